//! Starting as one of several processes: what the environment says, who is joined, and how it ends.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use henson_ranks::{Launch, Ranks, Settings};
use henson_tensor::Cores;

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
}

/// This process among others.
pub(crate) struct Together {
    pub(crate) ranks: Arc<Ranks>,
}

/// Finds out whether this process is one of several, starts them where it shall, and joins them.
pub(crate) fn start(flags: &RankFlags, machine: &Machine) -> anyhow::Result<Started> {
    // Many processes may also be started to train a model each.
    if flags.ranks == Some(1) {
        return Ok(Started::Alone);
    }
    let Some(launch) = Launch::recognise(|name| std::env::var(name).ok())? else {
        let Some(count) = flags.ranks else { return Ok(Started::Alone) };
        refuse_cuda(machine)?;
        return Err(become_mpirun(count));
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
        anyhow::bail!(
            "--ranks {count}, but {name} has started {} processes: leave --ranks out, or give --ranks 1 for processes that train alone",
            launch.size
        );
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
    Ok(Started::Together(Together { ranks }))
}

/// Refuses several processes for what one does alone.
pub(crate) fn refuse(flags: &RankFlags, what: &str) -> anyhow::Result<()> {
    let launch = Launch::recognise(|name| std::env::var(name).ok())?.filter(|_| flags.ranks != Some(1));
    let count = launch.map(|launch| launch.size).or(flags.ranks).unwrap_or(1);
    anyhow::ensure!(count <= 1, "{what} is for one process alone so far, and {count} were asked for");
    Ok(())
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
        "several processes with --device cuda are not supported yet: this version does not use NCCL, over which GPUs exchange data. \
         Train with one process on one GPU, or with several on CPUs (--device cpu)"
    );
    Ok(())
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
