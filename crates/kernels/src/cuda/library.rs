//! Finding the CUDA libraries at run time: on the system's path, in CUDA's own directory, and inside the wheels that
//! Python packages bring along. Nothing here needs a GPU.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};

use super::error::{CudaError, Result};

/// A library that the CUDA layer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: it comes with the GPU's driver, never with a toolkit.
    Driver,
    /// NVRTC, the compiler of the kernels.
    Compiler,
    /// cuBLASLt, for matrix products.
    Blas,
    /// NCCL, for several GPUs. Not needed for one.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Driver, Library::Compiler, Library::Blas, Library::Nccl];

    /// What people call it.
    pub fn what(self) -> &'static str {
        match self {
            Library::Driver => "the CUDA driver",
            Library::Compiler => "NVRTC, CUDA's run-time compiler",
            Library::Blas => "cuBLASLt",
            Library::Nccl => "NCCL",
        }
    }

    /// File names, the best first. cudarc asks for some of these names again after one is loaded, and the loader then
    /// finds it by the name that the library gives itself; so versions that cudarc does not ask for are not listed.
    fn names(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1", "libcuda.so"],
            Library::Compiler => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Library::Blas => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Library::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// How to get it.
    pub fn advice(self) -> &'static str {
        match self {
            Library::Driver => "It comes with NVIDIA's driver: install that, or use --device cpu.",
            Library::Compiler => "Install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`.",
            Library::Blas => "Install the CUDA toolkit, or `pip install nvidia-cublas`.",
            Library::Nccl => "Install it, or `pip install nvidia-nccl-cu13`; one GPU works without.",
        }
    }
}

/// Where to look, beyond the system's own path.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Directories that hold libraries, or prefixes such as a virtual environment or a toolkit.
    pub extra: Vec<PathBuf>,
}

impl Search {
    /// Every directory that exists and may hold a library, in the order of looking.
    pub fn directories(&self) -> Vec<PathBuf> {
        let usual = ["/usr/local/cuda", "/usr/local/nvidia", "/usr/lib/wsl/lib", "/usr/local", "/usr"];
        let prefixes = self.extra.iter().cloned().chain(usual.map(PathBuf::from));
        let mut all: Vec<PathBuf> = Vec::new();
        for prefix in prefixes {
            let plain = [prefix.clone(), prefix.join("lib64"), prefix.join("lib"), prefix.join("lib/x86_64-linux-gnu")];
            for directory in plain.into_iter().chain(wheels(&prefix)) {
                if directory.is_dir() && !all.contains(&directory) {
                    all.push(directory);
                }
            }
        }
        all
    }

    /// Loads a library for the whole life of the process, and says where it came from.
    ///
    /// What is on the system's path comes first, as with every other program.
    pub fn load(&self, library: Library) -> Result<PathBuf> {
        self.open(library).map(|(path, _)| path)
    }

    /// The same, for those that look up its functions themselves.
    pub(crate) fn open(&self, library: Library) -> Result<(PathBuf, &'static Handle)> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, path, handle)) = loaded.iter().find(|(l, ..)| *l == library) {
            return Ok((path.clone(), handle));
        }
        let directories = self.directories();
        let named = library.names().iter().map(PathBuf::from);
        let placed = directories.iter().flat_map(|d| library.names().iter().map(|name| d.join(name)));
        for path in named.chain(placed.filter(|path| path.is_file())) {
            if library == Library::Compiler {
                preload_builtins(&path);
            }
            // SAFETY: NVIDIA's libraries run no code on loading that could break this process's memory.
            if let Ok(handle) = unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                // Never unloaded: function pointers into it are kept by cudarc and by `nccl.rs`.
                let handle: &'static Handle = Box::leak(Box::new(handle));
                loaded.push((library, path.clone(), handle));
                return Ok((path, handle));
            }
        }
        let places = directories.iter().take(6).map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ");
        Err(CudaError::NoLibrary {
            what: library.what(),
            names: library.names().join(" or "),
            searched: directories,
            places,
            advice: library.advice(),
        })
    }
}

/// What was loaded, and from where. Loading is a property of the process, so this is too.
static LOADED: Mutex<Vec<(Library, PathBuf, &'static Handle)>> = Mutex::new(Vec::new());

/// NVRTC looks for its built-in headers by name only, so they are loaded from beside it first.
fn preload_builtins(compiler: &Path) {
    let Some(directory) = compiler.parent().filter(|d| d.is_dir()) else { return };
    let Ok(files) = directory.read_dir() else { return };
    for file in files.flatten() {
        let name = file.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so") {
            // SAFETY: as in `load`. Where it fails, the compiler says so itself.
            if let Ok(handle) = unsafe { Handle::open(Some(file.path()), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(handle);
            }
        }
    }
}

/// `nvidia/*/lib` of every Python below a prefix.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let subdirectories = |path: PathBuf| -> Vec<PathBuf> {
        let Ok(entries) = path.read_dir() else { return Vec::new() };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
        paths.sort();
        // The newest first: cu13 before cu12.
        paths.reverse();
        paths
    };
    let is_python = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
    let pythons = subdirectories(prefix.join("lib")).into_iter().filter(is_python);
    let packages = pythons.flat_map(|p| [p.join("site-packages"), p.join("dist-packages")]);
    packages.flat_map(|p| subdirectories(p.join("nvidia"))).map(|p| p.join("lib")).filter(|p| p.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_below_a_prefix() {
        let root = std::env::temp_dir().join(format!("henson-wheels-{}", std::process::id()));
        let lib = root.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        let found = Search { extra: vec![root.clone()] }.directories();
        std::fs::remove_dir_all(&root).unwrap();
        assert!(found.contains(&lib), "{found:?}");
    }

    #[test]
    fn what_is_missing_is_named() {
        // Nobody has both this library and a test that would be right about it.
        if let Err(error) = Search::default().load(Library::Nccl) {
            let text = error.to_string();
            assert!(text.contains("NCCL") && text.contains("libnccl.so.2") && text.contains("pip install"), "{text}");
        }
    }
}
