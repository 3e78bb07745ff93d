//! The flags of training by several processes.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::parse_count;

/// What moves gradients and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportName {
    /// From GPU to GPU
    Nccl,
    /// From host to host; of GPUs by way of the memory of their hosts
    Mpi,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Several processes")]
pub(crate) struct RankFlags {
    /// Work with N processes on this machine: on CPUs starts them with the mpirun that is installed, on GPUs by itself, one for each.
    /// Under mpirun, srun or torchrun themselves, leave it out: what these set is recognised
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) ranks: Option<usize>,

    /// What moves gradients and weights between processes [default: nccl for GPUs, mpi for CPUs]
    #[arg(long, value_enum)]
    pub(crate) transport: Option<TransportName>,

    /// The number of this process, from 0, where it was started by hand: with --size, and --address or --meet
    #[arg(long, value_name = "RANK", requires = "size", conflicts_with_all = ["ranks", "node"])]
    pub(crate) rank: Option<usize>,

    /// How many processes were started by hand
    #[arg(long, value_name = "N", requires = "rank", value_parser = parse_count)]
    pub(crate) size: Option<usize>,

    /// The number of this machine, from 0, where each of several starts --ranks processes: with --nodes, and --address or --meet
    #[arg(long, value_name = "NODE", requires = "nodes")]
    pub(crate) node: Option<usize>,

    /// How many machines start processes
    #[arg(long, value_name = "N", requires = "node", value_parser = parse_count)]
    pub(crate) nodes: Option<usize>,

    /// Where rank 0 waits for the others, which were started by hand
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) address: Option<String>,

    /// A file on a disk that all can read, in which rank 0 writes where it waits for the others; a new name for each start
    #[arg(long, value_name = "FILE", conflicts_with = "address")]
    pub(crate) meet: Option<PathBuf>,

    /// The file of the MPI library [default: libmpi_abi.so.1, else that of the mpirun which started the processes]
    #[arg(long, value_name = "FILE")]
    pub(crate) mpi_library: Option<PathBuf>,

    /// Seconds without a sign of life after which a process counts as lost, and all stop with exit code 75
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) lost_after: u64,
}
