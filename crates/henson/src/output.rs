//! How the binary speaks: results on standard output, everything for people on standard error.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use serde::Serialize;

/// Prints the chain of causes. A closed pipe (`henson … | head`) is no failure.
pub(crate) fn report_error(error: &anyhow::Error) -> ExitCode {
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    if error.chain().any(closed) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {error}");
    for cause in error.chain().skip(1) {
        eprintln!("  because: {cause}");
    }
    ExitCode::FAILURE
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
