//! Where CUDA's libraries and the compiled kernels are. Only here is the environment asked for them.

use std::path::PathBuf;

use anyhow::Context;
use henson_tensor::Device;
use henson_tensor::cuda::{CudaOptions, Gpu, Library, Nccl, Search};

/// A GPU by its number among those that the driver shows.
pub(crate) fn open(ordinal: usize) -> anyhow::Result<Device> {
    let options = CudaOptions { ordinal, search: search(), cache: cache() };
    Device::cuda(&options).context("--device cuda cannot be used here (`henson info --devices` lists what was found)")
}

/// What of CUDA is there: each library with its place or what is missing, and the GPUs.
pub(crate) struct Found {
    /// With their places, or why there are none.
    pub(crate) libraries: Vec<(Library, Result<PathBuf, String>)>,
    /// Their names, or why there are none.
    pub(crate) gpus: Result<Vec<String>, String>,
}

/// How many GPUs the driver shows.
pub(crate) fn count() -> anyhow::Result<usize> {
    Ok(Gpu::list(&search())?.len())
}

/// NCCL, for several GPUs.
pub(crate) fn nccl() -> anyhow::Result<Nccl> {
    Nccl::load(&search())
        .context("data between GPUs moves over NCCL (or, with --transport mpi, over MPI by way of the hosts)")
}

/// What NCCL takes for this machine, where somebody said so.
pub(crate) fn nccl_host() -> Option<String> {
    std::env::var("NCCL_HOSTID").ok().filter(|name| !name.is_empty())
}

pub(crate) fn find() -> Found {
    let search = search();
    let look = |library: Library| (library, search.load(library).map_err(|error| error.to_string()));
    Found { libraries: Library::ALL.map(look).to_vec(), gpus: Gpu::list(&search).map_err(|error| error.to_string()) }
}

/// Prefixes that hold libraries: a toolkit, a virtual environment, conda.
fn search() -> Search {
    let names = ["HENSON_CUDA", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"];
    Search { extra: names.into_iter().filter_map(set).collect() }
}

/// `$XDG_CACHE_HOME/henson`, by default `~/.cache/henson`; none where there is no home.
fn cache() -> Option<PathBuf> {
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("henson").join("kernels"))
}

fn set(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
