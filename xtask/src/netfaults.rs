//! Trains with two processes on two machines that are network namespaces of this one, over MPI and TCP through a pair of veth devices, and
//! spoils the network between them: packets get lost, the link is slow, pauses, or is cut. Demands the bits of one process, or an end of
//! both ranks within the time that `--lost-after` gives, and then the same bits from a restart. Needs root, iproute2 and nftables; not a
//! part of `ci`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Result;
use crate::ranks::{Bench, PRETRAIN};
use crate::strace::install_package;
use crate::workspace::{Workspace, succeed};

/// For the help text.
pub(crate) const WHAT: &str =
    "ranks in two network namespaces: lost packets, slow, paused and cut links: [--binary FILE] [--only CASE]";

/// Seconds without a sign of life after which a rank counts as lost.
const LOST_AFTER: u64 = 5;

/// How long after a cut both ranks must have ended: the time above, that of a rank to name the lost one, and some for a busy machine.
const ENDED_AFTER: Duration = Duration::from_secs(LOST_AFTER + 1 + 4);

/// Packages of programs, each with a question that it answers.
const NEEDED: [(&str, &str, &str); 4] = [
    ("ip", "-V", "iproute2"),
    ("nft", "-v", "nftables"),
    ("mpirun.openmpi", "--version", "openmpi-bin"),
    ("mpirun.mpich", "--version", "mpich"),
];

/// What happens between the two, while they train.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// So many of 100 packets do not arrive, either way.
    Loss(u32),
    /// Megabits a second that rank 1 sends.
    Slow(u32),
    /// Nothing arrives for so many seconds, fewer than those after which a rank counts as lost.
    Pause(u64),
    /// From some moment on, nothing arrives, and nobody says so.
    Silence,
    /// The link is taken down.
    Down,
}

const CASES: [(&str, Fault); 7] = [
    ("undisturbed", Fault::None),
    ("loss-1", Fault::Loss(1)),
    ("loss-4", Fault::Loss(4)),
    ("slow", Fault::Slow(50)),
    ("pause", Fault::Pause(3)),
    ("silence", Fault::Silence),
    ("down", Fault::Down),
];

pub(crate) fn run(workspace: &Workspace, options: &[String]) -> Result {
    if !cfg!(target_os = "linux") {
        println!("only Linux has network namespaces: nothing to check here");
        return Ok(());
    }
    let (mut binary, mut only) = (None, None);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let value = options.next().ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--binary" => binary = Some(PathBuf::from(value)),
            "--only" => only = Some(value.clone()),
            _ => return Err(format!("netfaults takes --binary and --only, not `{option}`")),
        }
    }
    if let Some(name) = only.as_ref().filter(|name| CASES.iter().all(|(known, _)| known != name)) {
        let known: Vec<&str> = CASES.iter().map(|(name, _)| *name).collect();
        return Err(format!("there is no case `{name}`: expected one of {}", known.join(", ")));
    }
    for (program, question, package) in NEEDED {
        install_package(program, question, package)?;
    }
    let bench = Bench::new(workspace, binary)?;
    bench.alone(&line(), "one")?;
    let network = Network::new(&bench)?;
    for family in [Family::OpenMpi, Family::Mpich] {
        for (name, fault) in CASES.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)) {
            let case = Case { bench: &bench, network: &network, family, name: format!("{}-{name}", family.name()) };
            case.run(*fault).map_err(|error| format!("{}: {error}", case.name))?;
        }
    }
    drop(network);
    fs::remove_dir_all(&bench.place).map_err(|error| format!("{}: {error}", bench.place.display()))
}

/// What is trained: long enough for something to happen.
fn line() -> String {
    PRETRAIN
        .replace("--set steps=40", "--set steps=200")
        .replace("--set checkpoint_every=4", "--set checkpoint_every=20")
        .replace("--set eval_every=20", "--set eval_every=100")
        .replace("--lost-after 10", &format!("--lost-after {LOST_AFTER}"))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    OpenMpi,
    Mpich,
}

impl Family {
    fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
        }
    }
}

/// Two machines with a cable between them.
struct Network {
    /// Their names, which are those of the namespaces.
    hosts: [String; 2],
    /// Starts a command on one of them, as ssh would.
    agent: PathBuf,
}

/// The end of the cable, on either.
const DEVICE: &str = "cable0";

impl Network {
    fn new(bench: &Bench) -> Result<Self> {
        let own = std::process::id();
        let network = Self { hosts: ["a", "b"].map(|end| format!("hen{own}{end}")), agent: bench.place.join("agent") };
        let [a, b] = &network.hosts;
        let at = |error| format!("/etc/netns: {error}");
        for host in &network.hosts {
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {host} link set lo up"))?;
            // What lies there is bound over /etc by `ip netns exec`.
            fs::create_dir_all(format!("/etc/netns/{host}")).map_err(at)?;
            let names = format!("127.0.0.1 localhost\n10.77.0.1 {a}\n10.77.0.2 {b}\n");
            fs::write(format!("/etc/netns/{host}/hosts"), names).map_err(at)?;
        }
        ip(&format!("-n {a} link add {DEVICE} type veth peer name {DEVICE} netns {b}"))?;
        for (host, address) in [(a, "10.77.0.1/24"), (b, "10.77.0.2/24")] {
            ip(&format!("-n {host} addr add {address} dev {DEVICE}"))?;
            ip(&format!("-n {host} link set {DEVICE} up"))?;
        }
        // Options first, then the host, then what its shell shall run.
        let script = "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1\nshift\n\
                      exec ip netns exec \"$host\" unshare --uts sh -c \
                      'echo \"$0\" > /proc/sys/kernel/hostname; eval \"$*\"' \"$host\" \"$@\"\n";
        let at = |error| format!("{}: {error}", network.agent.display());
        fs::write(&network.agent, script).map_err(at)?;
        fs::set_permissions(&network.agent, fs::Permissions::from_mode(0o755)).map_err(at)?;
        Ok(network)
    }

    /// The `mpirun` of a family on the first machine, with a rank on each.
    fn mpirun(&self, family: Family) -> Command {
        let [a, b] = &self.hosts;
        // Each program becomes the next one, so that the child is mpirun.
        let mut command = Command::new("ip");
        command.args(["netns", "exec", a, "unshare", "--uts", "sh", "-c"]);
        command.args(["echo \"$0\" > /proc/sys/kernel/hostname; exec \"$@\"", a]);
        match family {
            Family::OpenMpi => {
                command.args(["mpirun.openmpi", "-n", "2", "--host", &format!("{a}:1,{b}:1"), "--bind-to", "none"]);
                for (name, value) in [
                    ("plm", "rsh"),
                    ("plm_rsh_agent", &*self.agent.to_string_lossy()),
                    // Both would see that they share the memory of one machine.
                    ("pml", "ob1"),
                    ("btl", "self,tcp"),
                    ("btl_tcp_if_include", DEVICE),
                    ("oob_tcp_if_include", DEVICE),
                ] {
                    command.args(["--mca", name, value]);
                }
                command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
            }
            Family::Mpich => {
                command.args([
                    "mpirun.mpich",
                    "-n",
                    "2",
                    "-ppn",
                    "1",
                    "-hosts",
                    &format!("{a},{b}"),
                    "-launcher",
                    "ssh",
                ]);
                command.args(["-launcher-exec", &*self.agent.to_string_lossy(), "-iface", DEVICE]);
                command.envs([("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", DEVICE)]);
                command.envs([("FI_PROVIDER", "tcp"), ("FI_TCP_IFACE", DEVICE), ("MPIR_CVAR_NOLOCAL", "1")]);
            }
        }
        command
    }

    fn spoil(&self, fault: Fault) -> Result {
        let [a, b] = &self.hosts;
        match fault {
            Fault::None => Ok(()),
            Fault::Loss(percent) => self.drop_where(&format!("numgen random mod 100 < {percent}")),
            Fault::Silence | Fault::Pause(_) => self.drop_where(""),
            Fault::Slow(megabits) => {
                succeed(Command::new("ip").args(["netns", "exec", b, "tc", "qdisc", "add", "dev"]).args([
                    DEVICE,
                    "root",
                    "tbf",
                    "rate",
                    &format!("{megabits}mbit"),
                    "burst",
                    "32kbit",
                    "latency",
                    "400ms",
                ]))
            }
            Fault::Down => ip(&format!("-n {a} link set {DEVICE} down")),
        }
    }

    /// Drops packets at either end that fulfil a condition.
    fn drop_where(&self, condition: &str) -> Result {
        self.hosts.iter().try_for_each(|host| {
            let rules = format!(
                "add table inet spoil; add chain inet spoil in {{ type filter hook input priority 0; }}; \
                 add rule inet spoil in iifname {DEVICE} {condition} drop"
            );
            succeed(Command::new("ip").args(["netns", "exec", host, "nft", &rules]))
        })
    }

    fn mend(&self, fault: Fault) -> Result {
        let [a, b] = &self.hosts;
        match fault {
            Fault::None => Ok(()),
            Fault::Loss(_) | Fault::Silence | Fault::Pause(_) => self.hosts.iter().try_for_each(|host| {
                succeed(Command::new("ip").args(["netns", "exec", host, "nft", "delete table inet spoil"]))
            }),
            Fault::Slow(_) => {
                succeed(Command::new("ip").args(["netns", "exec", b, "tc", "qdisc", "del", "dev", DEVICE, "root"]))
            }
            Fault::Down => ip(&format!("-n {a} link set {DEVICE} up")),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in &self.hosts {
            // Helpers of a launcher that was killed may still wait there. Whatever was not made need not go.
            let left = Command::new("ip").args(["netns", "pids", host]).stderr(Stdio::null()).output();
            let left = left.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
            let _ = Command::new("kill").arg("-KILL").args(left.split_whitespace()).stderr(Stdio::null()).status();
            let _ = Command::new("ip").args(["netns", "del", host]).stderr(Stdio::null()).status();
            let _ = fs::remove_dir_all(format!("/etc/netns/{host}"));
        }
    }
}

/// One fault under one family.
struct Case<'a> {
    bench: &'a Bench,
    network: &'a Network,
    family: Family,
    name: String,
}

impl Case<'_> {
    fn run(&self, fault: Fault) -> Result {
        let begin = Instant::now();
        let child = self.start()?;
        // Some steps are done, and others to come.
        self.bench.wait_for_checkpoint(&self.name, 20)?;
        if self.bench.processes(&self.name)?.len() != 2 {
            return Err(format!("there are no two ranks:\n{}", self.said()));
        }
        self.network.spoil(fault)?;
        let done = match fault {
            Fault::Silence | Fault::Down => self.ends_early(child),
            Fault::Pause(seconds) => {
                std::thread::sleep(Duration::from_secs(seconds));
                self.network.mend(fault)?;
                self.finishes(child)
            }
            _ => self.finishes(child),
        };
        if !matches!(fault, Fault::Pause(_)) {
            self.network.mend(fault)?;
        }
        let how = done?;
        if matches!(fault, Fault::Silence | Fault::Down) {
            self.finishes(self.start()?).map_err(|error| format!("started again: {error}"))?;
        }
        self.bench.equal("one", &self.name)?;
        println!("{}: {how}; the bits of one process, {:.1} s in all", self.name, begin.elapsed().as_secs_f64());
        Ok(())
    }

    fn start(&self) -> Result<Child> {
        let mut command = self.network.mpirun(self.family);
        command.arg(&self.bench.binary).args(self.bench.arguments(&line(), &self.name));
        self.bench.start(command)
    }

    fn finishes(&self, child: Child) -> Result<String> {
        let begin = Instant::now();
        let (code, said) = self.bench.wait(child)?;
        if code != Some(0) {
            return Err(format!("ended with {code:?}:\n{said}"));
        }
        Ok(format!("finished {:.1} s later", begin.elapsed().as_secs_f64()))
    }

    /// Demands that both ranks end in time. The launcher, which may not notice, is ended after them.
    fn ends_early(&self, mut child: Child) -> Result<String> {
        let begin = Instant::now();
        while !self.bench.processes(&self.name)?.is_empty() {
            if begin.elapsed() > ENDED_AFTER {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!(
                    "ranks still run {:.0} s after the cut:\n{}",
                    ENDED_AFTER.as_secs_f64(),
                    self.said()
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let seconds = begin.elapsed().as_secs_f64();
        let finished = self.bench.out(&self.name).join("model.safetensors").exists();
        std::thread::sleep(Duration::from_millis(500));
        let launcher = match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => format!("the launcher with {:?}", status.code()),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                "the launcher still waits and is killed".to_owned()
            }
        };
        let said = self.said();
        let why = said.lines().find(|line| line.contains(" stops: "));
        match why {
            _ if finished => Err(format!("it was done before the cut:\n{said}")),
            Some(why) => Ok(format!("both ranks ended after {seconds:.1} s, {launcher}: {why}")),
            None => Err(format!("no rank says why it ended:\n{said}")),
        }
    }

    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.bench.place.join("stderr")).unwrap_or_default()).into_owned()
    }
}

fn ip(line: &str) -> Result {
    succeed(Command::new("ip").args(line.split_whitespace()))
}
