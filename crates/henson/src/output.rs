//! What people and scripts see: results on standard output, everything else on standard error.
//!
//! Everything that the binary prints goes through here, for three reasons. A failed write to standard error is ignored,
//! whereas one to standard output is an error. Control characters in text from files are shown as escapes, so that a
//! label cannot steer the terminal. And a line that is printed while a progress bar is drawn does not tear it apart.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use clap::CommandFactory;
use henson_infer::Task as Ability;
use henson_tasks::Task;
use henson_train::report::numbers;
pub(crate) use henson_train::report::numbers::duration;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde::Serialize;

/// How often progress is reported where standard error is not a terminal.
const STATUS_EVERY: Duration = Duration::from_secs(30);

/// Work that takes less than this is not worth a bar.
const SHORT: Duration = Duration::from_secs(2);

/// The bar that is drawn at the moment.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Stopped by a signal.
#[derive(Debug, thiserror::Error)]
#[error("interrupted at step {step}; {next}")]
pub(crate) struct Interrupted {
    /// Updates made.
    step: u64,
    /// What to do to continue.
    next: &'static str,
}

impl Interrupted {
    /// With everything saved.
    pub(crate) fn saved(step: u64) -> Self {
        Self { step, next: "the same command resumes from the last checkpoint" }
    }

    /// With nothing that could be gone on from; `next` says what to do.
    pub(crate) fn lost(step: u64, next: &'static str) -> Self {
        Self { step, next }
    }
}

/// Prints the chain of causes. A closed pipe (`henson … | head`) is no failure.
pub(crate) fn report_error(error: &anyhow::Error) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    if error.chain().any(closed) {
        return ExitCode::SUCCESS;
    }
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        return report_usage(usage);
    }
    if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
        message(&interrupted.to_string());
        return ExitCode::from(130);
    }
    message(&format!("error: {error}"));
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    // Some errors end with their cause, or repeat it.
    for pair in causes.windows(2).filter(|pair| !pair[0].ends_with(&pair[1])) {
        message(&format!("  because: {}", pair[1]));
    }
    ExitCode::FAILURE
}

/// Prints what the parser has to say: help and version on standard output, mistakes on standard error.
pub(crate) fn report_usage(error: &clap::Error) -> ExitCode {
    match error.print() {
        Err(lost) if !error.use_stderr() && lost.kind() != ErrorKind::BrokenPipe => report_error(&lost.into()),
        _ => ExitCode::from(error.exit_code() as u8),
    }
}

/// What a model without a masked-LM head is refused with.
pub(crate) fn needs_masked_lm(what: &str, path: &Path) -> String {
    format!(
        "cannot {what} with {}: a model with a masked-LM head is needed, such as the one that this was made from, or \
         without --model the one that comes with henson",
        path.display()
    )
}

/// Refuses what is not a directory before hours are spent on what shall go into it.
pub(crate) fn check_directory(out: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        out.is_dir() || !out.exists(),
        "--out {} is a file: expected a directory, which is created if it does not exist",
        out.display()
    );
    Ok(())
}

/// One JSON object on a line of standard output.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(print(&text)?)
}

/// Lines of JSON about a training run. One that cannot be printed must not end the run, whose log has every line; the first
/// such failure is the command's, once the run is over.
#[derive(Default)]
pub(crate) struct JsonLines {
    lost: Option<anyhow::Error>,
}

impl JsonLines {
    pub(crate) fn print(&mut self, value: &serde_json::Value) {
        if self.lost.is_none() {
            self.lost = json(value).err();
        }
    }

    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.lost.map_or(Ok(()), |error| Err(error.context("the run is done, but lines of JSON could not be printed")))
    }
}

/// A line of text on standard output, for people.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    line_with_colours(&harmless(text))
}

/// Text on standard output that more follows, for people.
pub(crate) fn part(text: &str) -> anyhow::Result<()> {
    if text.is_empty() { Ok(()) } else { Ok(print(harmless(text).as_bytes())?) }
}

/// The same for text with escape codes of our own; what comes from files must be [`harmless`] already.
pub(crate) fn line_with_colours(text: &str) -> anyhow::Result<()> {
    Ok(print(format!("{text}\n").as_bytes())?)
}

/// A line of text on standard error, for people. Nothing depends on whether it arrives.
pub(crate) fn message(text: &str) {
    let text = format!("{}\n", harmless(text));
    beside_bar(|| drop(io::stderr().lock().write_all(text.as_bytes())));
}

/// A warning on standard error.
pub(crate) fn warn(text: &str) {
    message(&format!("warning: {text}"));
}

/// Text that may come from a file, without anything that a terminal would obey: control characters but for line ends and
/// tabs are shown as escapes, such as `\u{1b}`.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match obeyed(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// The script with which a shell completes commands and flags.
pub(crate) fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut crate::flags::Flags::command(), "henson", &mut script);
    Ok(print(&script)?)
}

fn print(bytes: &[u8]) -> io::Result<()> {
    let write = || {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    };
    // Elsewhere a bar is not in the way.
    if io::stdout().is_terminal() { beside_bar(write) } else { write() }
}

/// Prints something while no bar is drawn.
fn beside_bar<T>(write: impl FnOnce() -> T) -> T {
    let bar = lock(&BAR).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// A number with commas between thousands.
pub(crate) fn thousands(number: impl TryInto<u64>) -> String {
    number.try_into().map_or_else(|_| "?".to_owned(), numbers::count)
}

/// A score of a task: shares in per cent with two digits, which answers are already, and correlations with four.
pub(crate) fn score(task: &Task, name: &str, value: f64) -> String {
    match (numbers::is_share(name), task.ability()) {
        (true, Some(Ability::Answer)) => format!("{value:.2}%"),
        (true, _) => format!("{:.2}%", 100.0 * value),
        (false, _) => format!("{value:.4}"),
    }
}

/// Reports on standard error how far something is: by a bar on a terminal, elsewhere by a line every half minute.
pub(crate) struct Progress {
    kind: ProgressKind,
    total: Option<u64>,
    /// Where it began: a training run that resumes does not begin at 0.
    first: u64,
    start: Instant,
    display: Display,
}

enum ProgressKind {
    /// So many things are done, out of a file of so many bytes; with the name of the things.
    Things(&'static str),
    /// Updates.
    Steps,
}

enum Display {
    /// It may be over before it is worth showing.
    Waiting,
    Bar(Bar),
    /// Lines, the last of them at this time.
    Lines(Instant),
}

/// A bar with a text beside it. The text is no message of the bar's, which would be drawn once more for it.
struct Bar {
    bar: ProgressBar,
    text: Arc<Mutex<String>>,
}

impl Bar {
    fn new(bar: ProgressBar, template: &str) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let shown = Arc::clone(&text);
        let write = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
            // A bar that cannot be written is missing, and nothing else.
            let _ = out.write_str(&lock(&shown));
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.with_key("text", write));
        Self { bar, text }
    }

    fn show(&self, position: u64, text: String) {
        *lock(&self.text) = text;
        self.bar.set_position(position);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress {
    /// `total` is the size of what is read, where it is known.
    pub(crate) fn new(things: &'static str, total: Option<u64>) -> Self {
        let kind = ProgressKind::Things(things);
        Self { kind, total, first: 0, start: Instant::now(), display: Display::Waiting }
    }

    /// Of a training run at this step.
    pub(crate) fn steps(steps: u64, at: u64) -> Self {
        let kind = ProgressKind::Steps;
        Self { kind, total: Some(steps), first: at, start: Instant::now(), display: Display::Waiting }
    }

    /// So many bytes are read and so many things are done.
    pub(crate) fn at(&mut self, read: u64, done: usize) {
        let ProgressKind::Things(things) = self.kind else { return };
        self.show(read, |seconds| format!("{} {things}, {:.1}/s", thousands(done), done as f64 / seconds));
    }

    /// So many bytes are read, or steps made; the message is made of the seconds since the beginning.
    pub(crate) fn show(&mut self, position: u64, message_of: impl FnOnce(f64) -> String) {
        let now = Instant::now();
        let elapsed = now - self.start;
        if let Display::Waiting = self.display {
            self.display = match io::stderr().is_terminal() {
                true if elapsed < SHORT && !matches!(self.kind, ProgressKind::Steps) => return,
                true => Display::Bar(self.bar()),
                false => Display::Lines(self.start),
            };
        }
        match &mut self.display {
            Display::Waiting => {}
            Display::Bar(bar) => bar.show(position, message_of(elapsed.as_secs_f64())),
            Display::Lines(last) if now - *last >= STATUS_EVERY => {
                *last = now;
                message(&self.status(position, elapsed, &message_of(elapsed.as_secs_f64())));
            }
            Display::Lines(_) => {}
        }
    }

    /// Something is done that has no steps of its own, such as an evaluation in training.
    pub(crate) fn pause(&self, what: &str) {
        if let Display::Bar(bar) = &self.display {
            what.clone_into(&mut lock(&bar.text));
            bar.bar.tick();
        }
    }

    /// Removes the bar, for lines that follow; one that goes out of scope does so itself.
    pub(crate) fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.bar.finish_and_clear();
            lock(&BAR).take();
        }
    }

    fn bar(&self) -> Bar {
        let (bar, template) = match (&self.kind, self.total) {
            (ProgressKind::Steps, Some(steps)) => {
                (ProgressBar::new(steps), "{wide_bar} {pos}/{len} {text}  {eta} left")
            }
            (_, Some(total)) => (ProgressBar::new(total), "{wide_bar} {percent}% {text}  {eta} left"),
            (_, None) => (ProgressBar::new_spinner(), "{spinner} {text}"),
        };
        let bar = bar.with_position(self.first);
        bar.reset_eta();
        *lock(&BAR) = Some(bar.clone());
        Bar::new(bar, template)
    }

    /// A line for a log file.
    fn status(&self, position: u64, elapsed: Duration, text: &str) -> String {
        let mut line = match (&self.kind, self.total) {
            (ProgressKind::Steps, Some(steps)) => format!("step {} of {}", thousands(position), thousands(steps)),
            (_, Some(total)) if total > 0 => format!("{:.0}%", 100.0 * position as f64 / total as f64),
            _ => duration(elapsed.as_secs_f64()),
        };
        let _ = write!(line, ": {text}");
        let done = position.saturating_sub(self.first);
        if let Some(left) = self.total.map(|total| total.saturating_sub(position)).filter(|_| done > 0) {
            let _ = write!(line, ", {} left", duration(elapsed.as_secs_f64() * left as f64 / done as f64));
        }
        line
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Warns where a longer sequence was asked for than the model takes.
pub(crate) fn warn_of_length(asked: Option<usize>, most: usize) {
    if let Some(asked) = asked.filter(|asked| *asked > most) {
        warn(&format!("a length of {asked} was asked for, and the model takes no more than {most}: using that"));
    }
}

/// Warns that texts were cut, once for each call with texts of which some were.
pub(crate) fn warn_cut(numbers: &[usize], dropped: impl Iterator<Item = usize>) {
    let cut: Vec<(&usize, usize)> = numbers.iter().zip(dropped).filter(|(_, dropped)| *dropped > 0).collect();
    for (number, dropped) in cut.iter().take(3) {
        warn(&format!("text {number} is too long: {dropped} tokens were cut off; --windows reads all of it"));
    }
    if cut.len() > 3 {
        warn(&format!("{} more of the texts up to {} were cut", cut.len() - 3, cut[cut.len() - 1].0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_as_escapes() {
        assert_eq!(harmless("plain, ü, 漢\tand\nlines"), "plain, ü, 漢\tand\nlines");
        assert_eq!(harmless("\x1b[31m<script>|\r\u{9b}2J\u{7}\0"), "\\u{1b}[31m<script>|\\r\\u{9b}2J\\u{7}\\u{0}");
    }

    #[test]
    fn numbers_have_one_style() {
        assert_eq!([0usize, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        let task = |name: &str| Task::named(name).unwrap();
        assert_eq!(score(task("sst2"), "accuracy", 0.91234), "91.23%");
        assert_eq!(score(task("squad1"), "best_f1", 88.5), "88.50%");
        assert_eq!(score(task("cola"), "matthews", 0.61234), "0.6123");
        assert_eq!(score(task("squad2"), "best_f1_threshold", -1.5), "-1.5000");
    }

    #[test]
    fn status_lines_know_where_a_run_began() {
        let run = Progress::steps(3000, 1000);
        let line = run.status(1500, Duration::from_secs(60), "loss 2.5");
        assert_eq!(line, "step 1,500 of 3,000: loss 2.5, 3 min 0 s left");
        let file = Progress::new("texts", Some(200));
        assert_eq!(file.status(50, Duration::from_secs(30), "9 texts"), "25%: 9 texts, 1 min 30 s left");
        let unknown = Progress::new("texts", None);
        assert_eq!(unknown.status(50, Duration::from_secs(30), "9 texts"), "30 s: 9 texts");
    }

    /// A terminal that counts how often something is drawn.
    #[derive(Debug, Default, Clone)]
    struct Counting(Arc<std::sync::atomic::AtomicUsize>);

    impl indicatif::TermLike for Counting {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn write_str(&self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn a_step_is_drawn_once() {
        let terminal = Counting::default();
        let target = indicatif::ProgressDrawTarget::term_like_with_hz(Box::new(terminal.clone()), 255);
        let bar = Bar::new(ProgressBar::with_draw_target(Some(9), target), "{wide_bar} {pos} {text}");
        for step in 1..=3 {
            // Slowly enough for each to be drawn.
            std::thread::sleep(Duration::from_millis(20));
            bar.show(step, format!("loss {step}"));
        }
        assert_eq!(terminal.0.load(std::sync::atomic::Ordering::Relaxed), 3);
    }

    #[test]
    fn a_status_line_comes_every_half_minute() {
        let mut run = Progress::steps(10, 0);
        let mut shown = 0;
        for (step, since) in [(1, 0), (2, 29), (3, 30), (4, 31)] {
            // As if the last line (or the beginning) had been so many seconds ago.
            run.display = Display::Lines(Instant::now() - Duration::from_secs(since));
            run.show(step, |_| {
                shown += 1;
                String::new()
            });
        }
        assert_eq!(shown, 2);
    }
}
