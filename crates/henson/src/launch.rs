//! Starting as one of several processes: what the environment says, who is joined, and how it ends.

mod children;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use henson_ranks::{Launch, Launcher, Meet, Node, OWN, Place, Ranks, Settings, Transport};
use henson_tensor::{Cores, Device};

use crate::flags::ranks::{RankFlags, TransportName};
use crate::flags::{DeviceName, Machine};
use crate::{gpu, output};

/// The exit code of all others when a process is lost: EX_TEMPFAIL, start again.
const LOST: i32 = 75;

/// How a command goes on.
pub(crate) enum Started {
    /// Alone.
    Alone,
    /// With others.
    Together(Together),
}

/// This process among others.
pub(crate) struct Together {
    pub(crate) ranks: Arc<Ranks>,
    /// Its number among those of this machine, where its launcher said it.
    local_rank: Option<usize>,
}

/// Finds out whether this process is one of several, starts them where it shall, and joins them.
pub(crate) fn start(flags: &RankFlags, machine: &Machine) -> anyhow::Result<Started> {
    // Many processes may also be started to train a model each.
    if flags.ranks == Some(1) && flags.transport.is_none() && flags.node.is_none() {
        return Ok(Started::Alone);
    }
    let on_gpus = machine.device != DeviceName::Cpu;
    let transport = match flags.transport {
        Some(TransportName::Nccl) => {
            anyhow::ensure!(on_gpus, "--transport nccl moves data between GPUs: with --device cpu, it is mpi");
            Transport::Nccl
        }
        None if on_gpus => Transport::Nccl,
        Some(TransportName::Mpi) | None => Transport::Mpi,
    };
    let launch = match (place(flags)?, flags.ranks) {
        (Some(Place::Process(launch)), _) => launch,
        (Some(Place::Node(node)), count) => {
            anyhow::ensure!(transport == Transport::Nccl, no_mpi(node.launcher, node.count));
            let count = count.or(node.processes).map_or_else(gpu::count, Ok)?;
            return children::run(count, (node.rank, node.count), Some(&node.meet), flags.lost_after);
        }
        // One process with all that belongs to several.
        (None, None | Some(1)) if flags.transport == Some(TransportName::Nccl) => {
            Launch { launcher: Launcher::Henson, rank: 0, size: 1, local_rank: Some(0), meet: None }
        }
        (None, None | Some(1)) => return Ok(Started::Alone),
        (None, Some(count)) if transport == Transport::Mpi => return Err(become_mpirun(count)),
        (None, Some(count)) => return children::run(count, (0, 1), None, flags.lost_after),
    };
    let (name, rank) = (launch.launcher.name(), launch.rank);
    anyhow::ensure!(transport == Transport::Nccl || launch.launcher.is_for_mpi(), no_mpi(launch.launcher, launch.size));
    if launch.launcher == Launcher::Henson {
        children::end_with_parent();
    } else if let Some(count) = flags.ranks.filter(|count| *count != launch.size) {
        anyhow::bail!(
            "--ranks {count}, but {name} has started {} processes: leave --ranks out, or give --ranks 1 for processes that train alone",
            launch.size
        );
    }
    let engine = match transport {
        Transport::Nccl => {
            let nccl = gpu::nccl()?;
            Some(format!("NCCL {} ({})", nccl.version, nccl.path.display()))
        }
        Transport::Mpi => None,
    };
    let settings = Settings {
        transport,
        mpi_library: flags.mpi_library.clone(),
        lost_after: Duration::from_secs(flags.lost_after),
        on_loss: Box::new(move |text| {
            output::message(&format!("rank {rank} stops: {text}; start again to resume from the last checkpoint"));
            // At once and without a last word: MPI or NCCL may still be at work in other threads, or wait for what is lost.
            signal_hook::low_level::exit(LOST)
        }),
    };
    let ranks = Arc::new(Ranks::join(&launch, settings)?);
    if ranks.rank() == 0 {
        let by_host = if on_gpus && engine.is_none() { ", by way of the memory of hosts" } else { "" };
        let engine = engine.unwrap_or_else(|| ranks.engine());
        let processes = if ranks.size() == 1 { "process" } else { "processes" };
        output::message(&format!("{} {processes} by {name}, data over {engine}{by_host}", ranks.size()));
    }
    Ok(Started::Together(Together { ranks, local_rank: launch.local_rank }))
}

/// What is said of processes that MPI cannot connect.
fn no_mpi(launcher: Launcher, count: usize) -> String {
    format!(
        "started by {} with {count} processes: on CPUs, data moves over MPI, whose processes are started by mpirun or srun. Start with \
         `mpirun -n {count} henson …`, or with --ranks {count} on one machine",
        launcher.name()
    )
}

/// This process's place by flags, or by what its launcher has set.
fn place(flags: &RankFlags) -> anyhow::Result<Option<Place>> {
    let meet = match (&flags.address, &flags.meet) {
        (Some(address), _) => match Meet::parse(address) {
            Meet::File(_) => anyhow::bail!("--address {address}: expected HOST:PORT"),
            meet => Some(meet),
        },
        (None, Some(file)) => Some(Meet::File(file.clone())),
        (None, None) => None,
    };
    let below = |what: &str, number: usize, count: usize| {
        anyhow::ensure!(number < count, "--{what} {number} of {count}: they are counted from 0");
        Ok(())
    };
    if let (Some(rank), Some(size)) = (flags.rank, flags.size) {
        below("rank", rank, size)?;
        let launch = Launch { launcher: Launcher::Hand, rank, size, local_rank: None, meet };
        return Ok(Some(Place::Process(launch)));
    }
    if let (Some(rank), Some(count)) = (flags.node, flags.nodes) {
        below("node", rank, count)?;
        // Not for those that this program itself has started: they have the same flags.
        let own = Place::recognise(|name| std::env::var(name).ok().filter(|_| OWN.contains(&name)))?;
        if own.is_some() {
            return Ok(own);
        }
        let Some(meet) = meet else { anyhow::bail!("--node needs --address HOST:PORT of the first, or --meet FILE") };
        let node = Node { launcher: Launcher::Hand, rank, count, processes: None, meet };
        return Ok(Some(Place::Node(node)));
    }
    Ok(Place::recognise(|name| std::env::var(name).ok())?)
}

impl Together {
    /// Whether this process prints and writes.
    pub(crate) fn is_first(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// Threads of this process where nobody said: those of its cores, shared with all ranks that may use the same ones.
    pub(crate) fn threads(&self) -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let cores = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap_or_default();
        let own = format!("{} {cores}", henson_ranks::host());
        let sharing = self.ranks.gather(own.as_bytes()).iter().filter(|other| **other == own.as_bytes()).count();
        (Cores::of_this_process().threads() / sharing.max(1)).max(1)
    }

    /// The GPU of this process: the one that was asked for; else the only one, or that with its number on this machine.
    pub(crate) fn gpu(&self, number: Option<usize>) -> anyhow::Result<Device> {
        let (host, count) = (henson_ranks::host(), gpu::count());
        // Before anything can fail, for the others wait.
        let hosts = self.ranks.gather(host.as_bytes());
        let count = count?;
        let same = || hosts[..self.ranks.rank()].iter().filter(|other| **other == host.as_bytes()).count();
        let local = self.local_rank.unwrap_or_else(same);
        let number = match number {
            Some(number) => number,
            None if count == 1 => 0,
            None if local < count => local,
            None => anyhow::bail!(
                "process {local} of {host}, which has {count} GPUs: start one for each at most, or set CUDA_VISIBLE_DEVICES for each"
            ),
        };
        let device = gpu::open(number)?;
        if self.ranks.moves_host_memory() {
            return Ok(device);
        }
        // NCCL says "Duplicate GPU detected" and no more. It goes by machines as NCCL_HOSTID names them.
        let identity = device.identity().unwrap_or_default();
        let own = [&identity[..], gpu::nccl_host().unwrap_or(host.clone()).as_bytes()].concat();
        let all = self.ranks.gather(&own);
        if let Some(other) = all[..self.ranks.rank()].iter().position(|other| *other == own) {
            anyhow::bail!(
                "ranks {other} and {} have the same GPU, number {number} of {host}, and NCCL needs one for each: start as many processes \
                 as there are GPUs, or exchange by way of the host with --transport mpi",
                self.ranks.rank()
            );
        }
        Ok(device)
    }

    /// In how many parts a batch is computed: what the recipe says; where it says nothing, as many as the run was begun with, or as
    /// there are processes. The first process knows.
    pub(crate) fn parts(&self, own: usize, out: Option<&Path>) -> usize {
        let begun = || {
            let recipe = std::fs::read_to_string(out?.join("recipe.toml")).ok()?;
            let settings = recipe.lines().take_while(|line| !line.starts_with('['));
            settings.filter_map(|line| line.strip_prefix("accumulation = ")?.trim().parse::<u64>().ok()).next()
        };
        let wanted = if own == 1 { begun().unwrap_or(self.ranks.size() as u64) } else { own as u64 };
        let shared = self.ranks.from_first(&wanted.to_le_bytes());
        shared.try_into().map_or(own, |bytes| u64::from_le_bytes(bytes) as usize)
    }

    /// Ends together with the others, or tells them why not.
    pub(crate) fn end(self, ended: anyhow::Result<()>) -> anyhow::Result<()> {
        match &ended {
            Err(error) if !error.is::<output::Interrupted>() => {
                let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
                self.ranks.leave(&causes.join(": "));
            }
            _ => self.ranks.finish()?,
        }
        ended
    }
}

/// Makes this process the mpirun that is installed, with this command in so many processes: its signals and its exit code are then
/// those of this process. Returns only where that fails.
fn become_mpirun(count: usize) -> anyhow::Error {
    let missing = "--ranks starts processes with mpirun, which is not here: install one (Debian: openmpi-bin or mpich), or start the \
                   processes by other means";
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return anyhow::Error::new(error).context("cannot find the file of this program"),
    };
    let version = match Command::new("mpirun").arg("--version").output() {
        Ok(version) => version,
        Err(error) => return anyhow::Error::new(error).context(missing),
    };
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &count.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // It refuses more processes than cores otherwise, and would bind each to one.
        mpirun.args(["--oversubscribe", "--bind-to", "none"]);
    }
    // --ranks stays: the processes compare it with their number.
    let error = mpirun.arg(program).args(std::env::args_os().skip(1)).exec();
    anyhow::Error::new(error).context("cannot run mpirun")
}
