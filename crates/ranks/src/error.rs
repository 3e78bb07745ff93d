//! What can go wrong between processes.

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// The environment contradicts itself.
    #[error("{variable} is `{value}`: expected {expected}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// No MPI could be loaded.
    #[error(
        "cannot load an MPI library (tried {tried}): install one (Debian: openmpi-bin or mpich), or name its file with --mpi-library"
    )]
    NoLibrary {
        /// File names, each with the loader's reason.
        tried: String,
    },
    /// A library is not what it should be.
    #[error("{path} cannot be used as MPI: {problem}")]
    Library {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An MPI function failed.
    #[error("{call} failed: {reason}")]
    Mpi {
        /// The function.
        call: &'static str,
        /// In the library's words.
        reason: String,
    },
    /// The launcher and MPI count differently.
    #[error(
        "{launcher} started {expected} processes, but {library} sees {found}: this library does not belong to the launcher. \
         Start with the mpirun of that library, or name the launcher's with --mpi-library"
    )]
    OtherWorld {
        /// Who started the processes.
        launcher: &'static str,
        /// Their number.
        expected: usize,
        /// The library.
        library: String,
        /// What it says.
        found: usize,
    },
    /// The processes could not find each other.
    #[error("cannot {action}: {reason}")]
    Meeting {
        /// What was tried.
        action: String,
        /// Why it failed.
        reason: String,
    },
    /// A process has other settings than the first.
    #[error("rank {rank} on {host} differs from rank 0 in: {what}. All ranks need the same {what}")]
    Differs {
        /// Which.
        rank: usize,
        /// Where it runs.
        host: String,
        /// In what.
        what: String,
    },
}

/// A result of this crate.
pub type Result<T, E = RanksError> = std::result::Result<T, E>;
