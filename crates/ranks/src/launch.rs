//! How this process was started: what torchrun, srun, mpirun and Kubernetes say in the environment. This module reads no environment
//! itself; whoever does gives it a function that looks up a variable.

use std::path::PathBuf;

use crate::error::{RanksError, Result};

/// Who started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// This program itself, on one machine or on each of several.
    Henson,
    /// Somebody who gave each process its number.
    Hand,
    /// `torchrun`, or what sets the same variables.
    Torchrun,
    /// Kubeflow's PyTorchJob, with one process in each pod.
    PyTorchJob,
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
            Self::Henson => "henson",
            Self::Hand => "hand",
            Self::Torchrun => "torchrun",
            Self::PyTorchJob => "a PyTorchJob",
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

/// Where ranks meet that have no MPI to tell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meet {
    /// Rank 0 listens at this host and port. The text tells this run from others.
    Address(String, u16, String),
    /// Rank 0 writes into this file where it listens; all can read it.
    File(PathBuf),
}

impl Meet {
    /// `HOST:PORT`, or a file's path.
    pub fn parse(text: &str) -> Self {
        let address = text.rsplit_once(':').filter(|(host, _)| !host.contains('/'));
        match address.and_then(|(host, port)| Some((host, port.parse().ok()?))) {
            Some((host, port)) => Self::Address(host.trim_matches(['[', ']']).to_owned(), port, String::new()),
            None => Self::File(PathBuf::from(text)),
        }
    }
}

/// This process's place among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started them.
    pub launcher: Launcher,
    /// This one's number, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number among those of its machine, where somebody said it.
    pub local_rank: Option<usize>,
    /// Where they meet, where somebody said it.
    pub meet: Option<Meet>,
}

/// A machine among several, each of which starts processes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Who said so.
    pub launcher: Launcher,
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub count: usize,
    /// Processes on each; none: as many as there are devices.
    pub processes: Option<usize>,
    /// Where they meet.
    pub meet: Meet,
}

/// What the environment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// One of several processes.
    Process(Launch),
    /// The one that starts those of its machine.
    Node(Node),
}

/// The variables of a launcher.
struct Variables {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local: Option<&'static str>,
    /// What must be there besides, for others set the same.
    also: Option<&'static str>,
}

/// The variables that this program sets for the processes that it starts: number, count, number on the machine, and where they meet.
pub const OWN: [&str; 4] = ["HENSON_RANK", "HENSON_SIZE", "HENSON_LOCAL_RANK", "HENSON_MEET"];

/// The first that fits counts.
const KNOWN: [Variables; 7] = [
    Variables { launcher: Launcher::Henson, rank: OWN[0], size: OWN[1], local: Some(OWN[2]), also: Some(OWN[3]) },
    Variables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local: Some("LOCAL_RANK"),
        also: Some("LOCAL_RANK"),
    },
    Variables {
        launcher: Launcher::Trainer,
        rank: "PET_NODE_RANK",
        size: "PET_NNODES",
        local: None,
        also: Some("PET_MASTER_ADDR"),
    },
    Variables {
        launcher: Launcher::PyTorchJob,
        rank: "RANK",
        size: "WORLD_SIZE",
        local: None,
        also: Some("MASTER_ADDR"),
    },
    Variables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        also: None,
    },
    Variables {
        launcher: Launcher::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local: Some("MPI_LOCALRANKID"),
        also: None,
    },
    Variables {
        launcher: Launcher::Srun,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local: Some("SLURM_LOCALID"),
        // Scripts of sbatch have the others, too.
        also: Some("SLURM_STEP_ID"),
    },
];

impl Place {
    /// What the environment says; nothing where one process was started alone.
    pub fn recognise(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |variable: &'static str| match get(variable) {
            None => Ok(None),
            Some(value) => match value.trim().parse::<usize>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(RanksError::Environment { variable, value, expected: "a number" }),
            },
        };
        for known in &KNOWN {
            if [Some(known.rank), Some(known.size), known.also].into_iter().flatten().any(|name| get(name).is_none()) {
                continue;
            }
            let (launcher, rank, size) = (known.launcher, number(known.rank)?, number(known.size)?);
            let (rank, size) = (rank.unwrap_or(0), size.unwrap_or(1));
            if rank >= size {
                let expected = "a number below that of all processes";
                return Err(RanksError::Environment { variable: known.rank, value: rank.to_string(), expected });
            }
            let meet = meet(launcher, &get)?;
            if launcher == Launcher::Trainer {
                // It may also say `auto` or `gpu`: as many as there are.
                let processes = get("PET_NPROC_PER_NODE").and_then(|text| text.trim().parse().ok());
                let Some(meet) = meet else { continue };
                return Ok(Some(Self::Node(Node { launcher, rank, count: size, processes, meet })));
            }
            let several =
                get("PET_NPROC_PER_NODE").filter(|count| launcher == Launcher::PyTorchJob && count.trim() != "1");
            if let Some(value) = several {
                // RANK is then the pod's number, while WORLD_SIZE counts the processes of all pods.
                let expected = "1: one process in each pod (nprocPerNode), or Trainer v2";
                return Err(RanksError::Environment { variable: "PET_NPROC_PER_NODE", value, expected });
            }
            let local_rank = known.local.map_or(Ok(None), number)?;
            let launch = Launch { launcher, rank, size, local_rank, meet };
            return Ok((size > 1).then_some(Self::Process(launch)));
        }
        Ok(None)
    }
}

/// Where the processes of a launcher meet, where it says so.
fn meet(launcher: Launcher, get: &impl Fn(&str) -> Option<String>) -> Result<Option<Meet>> {
    let port = |variable: &'static str| -> Result<Option<u16>> {
        let Some(value) = get(variable) else { return Ok(None) };
        match value.trim().parse::<u16>() {
            Ok(port) if port < u16::MAX => Ok(Some(port)),
            _ => Err(RanksError::Environment { variable, value, expected: "a port" }),
        }
    };
    let address = |host: Option<String>, port: Option<u16>, run: &str| {
        Some(Meet::Address(host?, port?, get(run).unwrap_or_default()))
    };
    Ok(match launcher {
        Launcher::Henson => get(OWN[3]).map(|text| Meet::parse(&text)),
        Launcher::Torchrun | Launcher::PyTorchJob => {
            // torchrun's own store listens at its port.
            let taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
            let port = port("MASTER_PORT")?.map(|port| port + u16::from(taken));
            address(get("MASTER_ADDR"), port, "TORCHELASTIC_RUN_ID")
        }
        Launcher::Trainer => address(get("PET_MASTER_ADDR"), port("PET_MASTER_PORT")?, "PET_RDZV_ID"),
        Launcher::Srun => {
            let nodes = get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"));
            let job = get("SLURM_JOB_ID").and_then(|id| id.trim().parse::<u64>().ok()).unwrap_or(0);
            address(nodes.as_deref().and_then(first_host), Some(20000 + (job % 20000) as u16), "SLURM_JOB_ID")
        }
        // MPI tells them.
        Launcher::OpenMpi | Launcher::Mpich | Launcher::Hand => None,
    })
}

/// The first host of a list as Slurm writes them: `a[01-03,7],b`.
fn first_host(nodes: &str) -> Option<String> {
    let end = nodes.find(['[', ',']).unwrap_or(nodes.len());
    let (name, rest) = nodes.split_at(end);
    let number = rest.strip_prefix('[').map(|rest| rest.split(['-', ',', ']']).next().unwrap_or_default());
    let host = format!("{name}{}", number.unwrap_or_default());
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recognised(variables: &[(&str, &str)]) -> Result<Option<Place>> {
        Place::recognise(|name| Some(variables.iter().find(|(known, _)| *known == name)?.1.to_owned()))
    }

    fn process(variables: &[(&str, &str)]) -> Option<Launch> {
        match recognised(variables).unwrap()? {
            Place::Process(launch) => Some(launch),
            Place::Node(node) => panic!("{node:?}"),
        }
    }

    fn launch(variables: &[(&str, &str)]) -> Option<(Launcher, usize, usize)> {
        let launch = process(variables)?;
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
    }

    #[test]
    fn where_processes_meet_is_known_by_what_launchers_set() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "run"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        let met = |port, run: &str| Some(Meet::Address("node0".to_owned(), port, run.to_owned()));
        let started = process(&torchrun).unwrap();
        assert_eq!((started.local_rank, started.meet), (Some(1), met(29501, "run")));
        assert_eq!(process(&torchrun[..6]).unwrap().meet, met(29500, "run"));
        let job = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "1"),
            ("PET_NPROC_PER_NODE", "1"),
        ];
        assert_eq!((launch(&job), process(&job).unwrap().meet), (Some((Launcher::PyTorchJob, 1, 2)), met(1, "")));
        let srun = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_ID", "40007"),
            ("SLURM_STEP_NODELIST", "node[0-3,7],other"),
        ];
        let started = process(&srun).unwrap();
        assert_eq!((started.local_rank, started.meet), (Some(1), met(20007, "40007")));
        for (nodes, first) in [("a[01-03,7]", "a01"), ("b12,c", "b12"), ("d", "d"), ("e[5]", "e5")] {
            assert_eq!(first_host(nodes).as_deref(), Some(first));
        }
        let own = [("HENSON_RANK", "1"), ("HENSON_SIZE", "2"), ("HENSON_LOCAL_RANK", "1"), ("HENSON_MEET", "/tmp/a:b")];
        assert_eq!(process(&own).unwrap().meet, Some(Meet::File("/tmp/a:b".into())));
        // Each machine starts its own.
        let trainer = [
            ("PET_NODE_RANK", "1"),
            ("PET_NNODES", "2"),
            ("PET_MASTER_ADDR", "node0"),
            ("PET_MASTER_PORT", "7"),
            ("PET_NPROC_PER_NODE", "8"),
        ];
        let node =
            Node { launcher: Launcher::Trainer, rank: 1, count: 2, processes: Some(8), meet: met(7, "").unwrap() };
        assert_eq!(recognised(&trainer).unwrap(), Some(Place::Node(node)));
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
        let pods = [("RANK", "1"), ("WORLD_SIZE", "16"), ("MASTER_ADDR", "a"), ("PET_NPROC_PER_NODE", "8")];
        assert!(recognised(&pods).unwrap_err().to_string().contains("PET_NPROC_PER_NODE"));
    }
}
