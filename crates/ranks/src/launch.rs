//! How this process was started: what torchrun, srun, mpirun and Kubernetes say in the environment. This module reads no environment
//! itself; whoever does gives it a function that looks up a variable.

use crate::error::{RanksError, Result};

/// Who started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `torchrun`, or what sets the same variables, such as Kubeflow's PyTorchJob.
    Torchrun,
    /// Kubeflow's Trainer, which says only how many nodes there are.
    Trainer,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH or Intel MPI.
    Mpich,
    /// Slurm's `srun`.
    Srun,
}

impl Launcher {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Torchrun => "torchrun",
            Self::Trainer => "Kubeflow Trainer",
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Mpich => "MPICH's mpirun",
            Self::Srun => "srun",
        }
    }

    /// Whether its processes can be a world of MPI.
    pub fn is_for_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Mpich | Self::Srun)
    }
}

/// This process's place among those that were started together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started them.
    pub launcher: Launcher,
    /// This one's number, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
}

/// The variables of a launcher.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    /// What must be there besides, for others set the same.
    also: Option<&'static str>,
}

/// The first that fits counts.
const KNOWN: [Variables; 5] = [
    Variables { launcher: Launcher::Torchrun, rank: "RANK", size: "WORLD_SIZE", also: Some("LOCAL_RANK") },
    Variables { launcher: Launcher::Trainer, rank: "PET_NODE_RANK", size: "PET_NNODES", also: Some("PET_MASTER_ADDR") },
    Variables { launcher: Launcher::OpenMpi, rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE", also: None },
    Variables { launcher: Launcher::Mpich, rank: "PMI_RANK", size: "PMI_SIZE", also: None },
    Variables {
        launcher: Launcher::Srun,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        // Scripts of sbatch have the others, too.
        also: Some("SLURM_STEP_ID"),
    },
];

impl Launch {
    /// What the environment says; nothing where one process was started alone.
    pub fn recognise(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        for known in &KNOWN {
            if [Some(known.rank), Some(known.size), known.also].into_iter().flatten().any(|name| get(name).is_none()) {
                continue;
            }
            let number = |variable: &'static str| match get(variable) {
                None => Ok(None),
                Some(value) => match value.trim().parse::<usize>() {
                    Ok(number) => Ok(Some(number)),
                    Err(_) => Err(RanksError::Environment { variable, value, expected: "a number" }),
                },
            };
            let (rank, size) = (number(known.rank)?.unwrap_or(0), number(known.size)?.unwrap_or(1));
            if rank >= size {
                let expected = "a number below that of all processes";
                return Err(RanksError::Environment { variable: known.rank, value: rank.to_string(), expected });
            }
            return Ok((size > 1).then_some(Self { launcher: known.launcher, rank, size }));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recognised(variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        Launch::recognise(|name| Some(variables.iter().find(|(known, _)| *known == name)?.1.to_owned()))
    }

    fn launch(variables: &[(&str, &str)]) -> Option<(Launcher, usize, usize)> {
        let launch = recognised(variables).unwrap()?;
        Some((launch.launcher, launch.rank, launch.size))
    }

    #[test]
    fn every_launcher_is_known_by_what_it_sets() {
        assert_eq!(launch(&[("HOME", "/root")]), None);
        let torchrun = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
        assert_eq!(launch(&torchrun), Some((Launcher::Torchrun, 3, 4)));
        let open = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            // srun may be what started mpirun.
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
        ];
        assert_eq!(launch(&open), Some((Launcher::OpenMpi, 1, 2)));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        assert_eq!(launch(&mpich), Some((Launcher::Mpich, 0, 2)));
        let srun = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_NTASKS_PER_NODE", "4(x2)"),
        ];
        assert_eq!(launch(&srun), Some((Launcher::Srun, 5, 8)));
        // A script of sbatch without srun, and worlds of one.
        assert_eq!(launch(&srun[..3]), None);
        assert_eq!(launch(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), None);
        let trainer = [("PET_NODE_RANK", "1"), ("PET_NNODES", "2"), ("PET_MASTER_ADDR", "a")];
        assert_eq!(launch(&trainer), Some((Launcher::Trainer, 1, 2)));
    }

    #[test]
    fn contradictions_are_errors() {
        for (wrong, name) in [
            ([("PMI_RANK", "2"), ("PMI_SIZE", "2")], "PMI_RANK"),
            ([("PMI_RANK", "x"), ("PMI_SIZE", "2")], "PMI_RANK"),
            ([("PMI_RANK", "0"), ("PMI_SIZE", "-1")], "PMI_SIZE"),
        ] {
            let error = recognised(&wrong).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("expected"), "{error}");
        }
    }
}
