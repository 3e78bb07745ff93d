//! Looks for undefined behaviour where the code is `unsafe`: AddressSanitizer on the kernels, Miri on the thread pool and
//! on the readers of files from strangers. Not part of `ci`: both take minutes, and Miri needs a nightly compiler.

use std::path::Path;
use std::process::Command;

use crate::Result;
use crate::workspace::{Workspace, output, succeed};

/// What Miri runs, each as arguments of `cargo miri test`. It takes about a thousand times as long as the processor, so these
/// are few; and it knows no vector instructions, so that kernels run in their portable form.
const FOR_MIRI: [&[&str]; 2] = [
    &["-p", "henson-kernels", "--lib", "cpu::pool"],
    &["-p", "henson-checkpoint", "--test", "checkpoint", "corrupt::"],
];

/// Runs the tests of the kernels with AddressSanitizer. The pinned compiler brings it along, behind a switch.
pub(crate) fn sanitize(workspace: &Workspace) -> Result {
    let host = workspace.host()?;
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]).current_dir(&workspace.root))?;
    let libraries = Path::new(sysroot.trim()).join("lib/rustlib").join(&host).join("lib");
    if !has_sanitizer(&libraries) {
        return Err(format!(
            "the compiler for {host} has no AddressSanitizer ({}): try on x86-64 Linux",
            libraries.display()
        ));
    }
    // With a target given, build scripts and macros are built without it: they could not be loaded.
    let mut cargo = workspace.cargo(&["test", "-p", "henson-kernels", "--tests", "--target", &host, "--target-dir"]);
    cargo.arg(workspace.target.join("sanitize")).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    succeed(&mut cargo)
}

/// Runs some tests in Miri, which checks every access to memory.
pub(crate) fn miri(workspace: &Workspace) -> Result {
    let nightly = |arguments: &[&str]| {
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "cargo", "miri"]).args(arguments).current_dir(&workspace.root);
        command
    };
    if output(&mut nightly(&["--version"])).is_err() {
        let advice = "rustup toolchain install nightly --component miri,rust-src";
        return Err(format!("there is no nightly compiler with Miri here: install it with `{advice}`"));
    }
    for tests in FOR_MIRI {
        let mut command = nightly(&["test"]);
        command.args(tests).arg("--target-dir").arg(workspace.target.join("miri"));
        // Tests read and write files, and wait.
        succeed(command.env("MIRIFLAGS", "-Zmiri-disable-isolation"))?;
    }
    Ok(())
}

/// Whether a compiler's libraries have AddressSanitizer's runtime: librustc-stable_rt.asan.a, or -nightly_.
fn has_sanitizer(libraries: &Path) -> bool {
    let entries = std::fs::read_dir(libraries).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().ends_with("_rt.asan.a"))
}
