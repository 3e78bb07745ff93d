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
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
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
    /// What to do to go on.
    next: &'static str,
}

impl Interrupted {
    /// With everything saved.
    pub(crate) fn saved(step: u64) -> Self {
        Self { step, next: "a checkpoint is there, and the same command goes on from it" }
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

/// Refuses what is no directory before hours are spent on what shall go into it.
pub(crate) fn check_directory(out: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(
        out.is_dir() || !out.exists(),
        "--out {} is a file: expected a directory, which is made where there is none",
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
    let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// A number with commas between thousands.
pub(crate) fn thousands(number: impl TryInto<u64>) -> String {
    let digits = number.try_into().map_or_else(|_| "?".to_owned(), |number| number.to_string());
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap_or("")).collect();
    groups.join(",")
}

/// Seconds as people say them.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} hours", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
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
    Bar(ProgressBar),
    /// Lines, the last of them at this time.
    Lines(Instant),
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
            Display::Bar(bar) => {
                bar.set_position(position);
                bar.set_message(message_of(elapsed.as_secs_f64()));
            }
            Display::Lines(last) if now - *last >= STATUS_EVERY => {
                *last = now;
                message(&self.status(position, elapsed, &message_of(elapsed.as_secs_f64())));
            }
            Display::Lines(_) => {}
        }
    }

    /// Something is done that has no steps of its own, such as an evaluation in training.
    pub(crate) fn pause(&self, what: &'static str) {
        if let Display::Bar(bar) = &self.display {
            bar.set_message(what);
        }
    }

    /// Removes the bar, for lines that follow; one that goes out of scope does so itself.
    pub(crate) fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
            BAR.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    fn bar(&self) -> ProgressBar {
        let style = |template| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = match (&self.kind, self.total) {
            (ProgressKind::Steps, Some(steps)) => {
                ProgressBar::new(steps).with_style(style("{wide_bar} {pos}/{len} {msg}  {eta} left"))
            }
            (_, Some(total)) => ProgressBar::new(total).with_style(style("{wide_bar} {percent}% {msg}  {eta} left")),
            (_, None) => ProgressBar::new_spinner().with_style(style("{spinner} {msg}")),
        };
        let bar = bar.with_position(self.first);
        bar.reset_eta();
        *BAR.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        bar
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
        warn(&format!("a length of {asked} was asked for, and the model takes no more than {most}: that it is"));
    }
}

/// Warns that texts were cut, once for each call with texts of which some were.
pub(crate) fn warn_cut(numbers: &[usize], dropped: impl Iterator<Item = usize>) {
    let cut: Vec<(&usize, usize)> = numbers.iter().zip(dropped).filter(|(_, dropped)| *dropped > 0).collect();
    for (number, dropped) in cut.iter().take(3) {
        warn(&format!("text {number} is too long: {dropped} pieces were cut off; --windows reads all of it"));
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
        assert_eq!(
            [0.04, 59.6, 150.0, 9000.0, 200_000.0].map(duration),
            ["0.0 s", "60 s", "2 min", "2.5 hours", "2.3 days"]
        );
    }

    #[test]
    fn status_lines_know_where_a_run_began() {
        let run = Progress::steps(3000, 1000);
        let line = run.status(1500, Duration::from_secs(60), "loss 2.5");
        assert_eq!(line, "step 1,500 of 3,000: loss 2.5, 3 min left");
        let file = Progress::new("texts", Some(200));
        assert_eq!(file.status(50, Duration::from_secs(30), "9 texts"), "25%: 9 texts, 90 s left");
        let unknown = Progress::new("texts", None);
        assert_eq!(unknown.status(50, Duration::from_secs(30), "9 texts"), "30 s: 9 texts");
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
