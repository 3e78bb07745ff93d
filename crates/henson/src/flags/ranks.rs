//! The flags of training by several processes.

use std::path::PathBuf;

use clap::Args;

use super::parse_count;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Several processes")]
pub(crate) struct RankFlags {
    /// Work with N processes on this machine: starts them with the mpirun that is installed. Under mpirun or srun itself, leave it
    /// out: what these set is recognised
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) ranks: Option<usize>,

    /// The file of the MPI library [default: libmpi_abi.so.1, else that of the mpirun which started the processes]
    #[arg(long, value_name = "FILE")]
    pub(crate) mpi_library: Option<PathBuf>,

    /// Seconds without a sign of life after which a process counts as lost, and all stop with exit code 75
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) lost_after: u64,
}
