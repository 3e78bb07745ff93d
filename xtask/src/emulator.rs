//! The CUDA kernels, run without a GPU: `tools/emulator` has a driver, a compiler and matrix products that do on a CPU what NVIDIA's
//! do. The same tests that a GPU runs with HENSON_TEST_CUDA set are run on it: values, not speed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;
use crate::workspace::{Workspace, succeed};

/// For the list of steps.
pub(crate) const WHAT: &str = "the CUDA kernels' tests on an emulated GPU; `--build` only prints where it is";

/// A library, its source, and those that it needs.
const LIBRARIES: [(&str, &str, &str); 4] = [
    ("libcuda.so.1", "driver.cpp", "-ldl"),
    ("libnvrtc.so.13", "compiler.cpp", "-ldl"),
    ("libcublasLt.so.13", "products.cpp", "-l:libcuda.so.1"),
    ("libnccl.so.2", "nccl.cpp", "-l:libcuda.so.1"),
];

/// What runs on it: arguments of `cargo test`, and of the tests themselves.
const TESTS: [(&[&str], &[&str]); 5] = [
    (&["-p", "henson-kernels", "--test", "cuda"], &["suite", "--small"]),
    (&["-p", "henson-tensor"], &[]),
    (&["-p", "henson-models", "--test", "models"], &[]),
    (&["-p", "henson-infer", "--test", "infer"], &["generate::"]),
    (&["-p", "henson-train", "--test", "train"], &["golden::"]),
];

pub(crate) fn run(workspace: &Workspace, options: &[String]) -> Result {
    let place = build(workspace)?;
    match options {
        [] => {}
        [only] if only == "--build" => {
            println!("{}", place.display());
            return Ok(());
        }
        _ => return Err("emulator takes --build or nothing".to_owned()),
    }
    for (tests, arguments) in TESTS {
        let mut cargo = workspace.cargo(&["test"]);
        succeed(emulated(cargo.args(tests).arg("--").args(arguments), &place))?;
    }
    Ok(())
}

/// A command that finds the emulated libraries before any others.
pub(crate) fn emulated<'a>(command: &'a mut Command, place: &Path) -> &'a mut Command {
    command.env("LD_LIBRARY_PATH", place).env("HENSON_TEST_CUDA", "1")
}

/// Compiles the emulator with the system's C++ compiler, and says where it is.
pub(crate) fn build(workspace: &Workspace) -> Result<PathBuf> {
    let (sources, place) = (workspace.root.join("tools/emulator"), workspace.target.join("emulator"));
    std::fs::create_dir_all(&place).map_err(|error| format!("cannot make {}: {error}", place.display()))?;
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    for (library, source, needed) in LIBRARIES {
        let to = place.join(library);
        // Under another name first: a program that still runs keeps the old one.
        let partial = place.join(format!("{library}.partial"));
        let mut command = Command::new(&compiler);
        command
            .args([
                "-shared",
                "-fPIC",
                "-std=c++20",
                "-O3",
                "-march=native",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Werror",
            ])
            .arg(format!("-Wl,-soname,{library}"))
            .arg("-o")
            .arg(&partial)
            .arg(sources.join(source))
            .arg("-L")
            .arg(&place)
            .arg(needed);
        succeed(&mut command).map_err(|error| format!("{error}; a C++20 compiler is needed (on Debian: g++)"))?;
        let moved = std::fs::rename(&partial, &to);
        moved.map_err(|error| format!("cannot write {}: {error}", to.display()))?;
        // cudarc asks for names without a version.
        let plain = place.join(library.split_once(".so").map_or(library, |(name, _)| name)).with_extension("so");
        if !plain.exists() {
            let linked = std::os::unix::fs::symlink(library, &plain);
            linked.map_err(|error| format!("cannot write {}: {error}", plain.display()))?;
        }
    }
    let header = std::fs::copy(sources.join("device.h"), place.join("device.h"));
    header.map_err(|error| format!("cannot copy device.h: {error}"))?;
    Ok(place)
}
