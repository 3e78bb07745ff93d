//! Starting as one of several processes: what the environment says, who is joined, and how it ends.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use henson_ranks::{Launch, Ranks, Settings};

use crate::flags::ranks::RankFlags;
use crate::flags::{DeviceName, Machine};
use crate::output;

/// The exit code of all others when a process is lost: EX_TEMPFAIL, start again.
const LOST: i32 = 75;

/// How a command goes on.
pub(crate) enum Started {
    /// Alone.
    Alone,
    /// With others.
    Together(Together),
    /// It was done by processes that were started for it.
    Done,
}

/// This process among others.
pub(crate) struct Together {
    pub(crate) ranks: Arc<Ranks>,
    launch: Launch,
}

/// Finds out whether this process is one of several, starts them where it shall, and joins them.
pub(crate) fn start(flags: &RankFlags, machine: &Machine) -> anyhow::Result<Started> {
    let launch = Launch::recognise(|name| std::env::var(name).ok())?;
    let Some(launch) = launch else {
        return match flags.ranks {
            Some(count) if count > 1 => {
                refuse_cuda(machine)?;
                start_all(count).map(|()| Started::Done)
            }
            _ => Ok(Started::Alone),
        };
    };
    refuse_cuda(machine)?;
    let name = launch.launcher.name();
    anyhow::ensure!(
        launch.launcher.is_for_mpi(),
        "started by {name} with {} processes: on CPUs, data moves over MPI, whose processes are started by mpirun or srun. Start with \
         `mpirun -n {0} henson …`, or with --ranks {0} on one machine",
        launch.size
    );
    if let Some(count) = flags.ranks.filter(|count| *count != launch.size) {
        anyhow::bail!("--ranks {count}, but {name} has started {} processes: leave --ranks out", launch.size);
    }
    let settings = Settings {
        mpi_library: flags.mpi_library.clone(),
        lost_after: Duration::from_secs(flags.lost_after),
        on_loss: Box::new(move |text| {
            output::message(&format!(
                "rank {} stops: {text}; start again to resume from the last checkpoint",
                launch.rank
            ));
            // At once and without a last word: MPI may still be at work in other threads.
            signal_hook::low_level::exit(LOST)
        }),
    };
    let ranks = Arc::new(Ranks::join(&launch, settings)?);
    if ranks.rank() == 0 {
        output::message(&format!("{} processes by {name}, data over {}", ranks.size(), ranks.engine()));
    }
    Ok(Started::Together(Together { ranks, launch }))
}

/// Refuses several processes for what one does alone.
pub(crate) fn refuse(flags: &RankFlags, what: &str) -> anyhow::Result<()> {
    let launch = Launch::recognise(|name| std::env::var(name).ok())?;
    let count = launch.map(|launch| launch.size).or(flags.ranks).unwrap_or(1);
    anyhow::ensure!(count <= 1, "{what} is for one process alone so far, and {count} were asked for");
    Ok(())
}

impl Together {
    /// Whether this process prints and writes.
    pub(crate) fn is_first(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// Threads of this process where nobody said: those of the machine, shared with the others on it.
    pub(crate) fn threads(&self) -> usize {
        let all = std::thread::available_parallelism().map_or(1, |n| n.get());
        // Where a launcher has bound processes to cores, only these are counted.
        let online = std::fs::read_to_string("/proc/cpuinfo").map_or(all, |text| text.matches("processor\t").count());
        let local = self.launch.local_size.unwrap_or(1).max(1);
        if all < online { all } else { (all / local).max(1) }
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

fn refuse_cuda(machine: &Machine) -> anyhow::Result<()> {
    anyhow::ensure!(
        machine.device == DeviceName::Cpu,
        "several processes with --device cuda are not supported yet: NCCL is found (`henson info --devices`) but not used. Train on one \
         GPU, or on CPUs"
    );
    Ok(())
}

/// Runs this command once more, in so many processes on this machine.
fn start_all(count: usize) -> anyhow::Result<()> {
    let mut arguments: Vec<String> = Vec::new();
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--ranks" => drop(rest.next()),
            other if other.starts_with("--ranks=") => {}
            _ => arguments.push(argument),
        }
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let version = Command::new("mpirun").arg("--version").output().context(
        "--ranks starts processes with mpirun, which is not here: install one (Debian: openmpi-bin or mpich), or start the processes \
         by other means",
    )?;
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &count.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // It refuses more processes than cores otherwise, and would bind each to one.
        mpirun.args(["--oversubscribe", "--bind-to", "none"]);
    }
    let status = mpirun.arg(program).args(arguments).status().context("cannot run mpirun")?;
    anyhow::ensure!(status.success(), "mpirun ended with {status}: see above");
    Ok(())
}
