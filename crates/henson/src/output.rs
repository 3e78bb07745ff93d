//! How the binary speaks: results on standard output, everything for people on standard error.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

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
        eprintln!("{interrupted}");
        return ExitCode::from(130);
    }
    eprintln!("error: {error}");
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    // Some errors end with their cause, or repeat it.
    for pair in causes.windows(2).filter(|pair| !pair[0].ends_with(&pair[1])) {
        eprintln!("  because: {}", pair[1]);
    }
    ExitCode::FAILURE
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
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value).map_err(io::Error::from)?;
    out.write_all(b"\n")?;
    Ok(())
}

/// A line of text on standard output.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    Ok(())
}

/// A warning on standard error.
pub(crate) fn warn(text: &str) {
    eprintln!("warning: {text}");
}

/// Tells people on standard error how far something is, if it takes over two seconds and they watch a terminal.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    start: Instant,
    what: &'static str,
    bytes: Option<u64>,
}

impl Progress {
    /// `bytes` is the size of what is read, where it is known.
    pub(crate) fn new(what: &'static str, bytes: Option<u64>) -> Self {
        Self { bar: None, start: Instant::now(), what, bytes }
    }

    /// So many bytes are read and so many things are done.
    pub(crate) fn at(&mut self, read: u64, done: usize) {
        let what = self.what;
        self.show(read, |seconds| format!("{done} {what} {:.1}/s", done as f64 / seconds));
    }

    /// So many bytes are read; the message is made of the seconds since the beginning.
    pub(crate) fn show(&mut self, read: u64, message: impl FnOnce(f64) -> String) {
        if self.bar.is_none() && self.start.elapsed().as_secs() >= 2 && io::stderr().is_terminal() {
            let bar = match self.bytes {
                Some(bytes) => ProgressBar::new(bytes).with_style(style("{wide_bar} {percent}% {msg} {eta} left")),
                None => ProgressBar::new_spinner().with_style(style("{spinner} {msg}")),
            };
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(read);
            bar.set_message(message(self.start.elapsed().as_secs_f64()));
        }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A bar for something with a known number of steps, on standard error, if people watch a terminal.
pub(crate) fn steps_bar(steps: u64, at: u64) -> Option<ProgressBar> {
    io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new(steps).with_position(at);
        bar.reset_eta();
        bar.with_style(style("{wide_bar} {pos}/{len} {msg} {eta} left"))
    })
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
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
