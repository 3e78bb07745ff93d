//! Compiles every CUDA kernel for the oldest and the best target, without a GPU: NVRTC comes as a Python package.

use crate::workspace::{Workspace, succeed};
use crate::{Result, wheel};

/// The folder that the package unpacks to, and where the libraries are in it.
const PACKAGE: &str = "nvidia";
const LIBRARIES: &str = "nvidia/cu13/lib";

pub(crate) fn run(workspace: &Workspace) -> Result {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        println!("NVRTC's package is for Linux on x86-64: nothing to check here");
        return Ok(());
    }
    let place = workspace.target.join("nvrtc");
    let libraries = place.join(LIBRARIES);
    if !libraries.join("libnvrtc.so.13").is_file() {
        wheel::fetch(workspace, "nvrtc-requirements.txt", &place, PACKAGE)?;
    }
    let example = ["run", "--quiet", "-p", "henson-kernels", "--example", "compile_kernels", "--", "--quiet"];
    let mut cargo = workspace.cargo(&example);
    succeed(cargo.arg("--libraries").arg(libraries).args(["8.0", "9.0"]))
}
