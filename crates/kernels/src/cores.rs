//! How many threads to compute with where nobody says: one for each physical core that this process may use, and no more
//! than a container's CPU quota pays for.
//!
//! A second thread on a core shares its arithmetic units, so it only takes cache from the first. Threads beyond a quota are
//! worse: all are stopped for the rest of every period, most of them in the middle of a loop that the others wait for.
//!
//! Linux states all of this in files. Elsewhere, and where a file is missing or unreadable, that limit does not count.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What a process may use of a machine's processors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Logical processors that it may run on.
    pub processors: usize,
    /// Physical cores that those belong to.
    pub cores: usize,
    /// Processors' worth of time that its control groups allow, where they limit it.
    pub quota: Option<f64>,
}

impl Cores {
    /// As the system describes itself.
    pub fn of_this_process() -> Self {
        let fallback = std::thread::available_parallelism().map_or(1, usize::from);
        Self::under(Path::new("/")).unwrap_or(Self { processors: fallback, cores: fallback, quota: None })
    }

    /// As the files under `root` describe a Linux; nothing where they do not name a processor.
    pub fn under(root: &Path) -> Option<Self> {
        let processors = processors(root)?;
        let core = |processor: &usize| {
            let topology = root.join(format!("sys/devices/system/cpu/cpu{processor}/topology"));
            let siblings =
                ["core_cpus_list", "thread_siblings_list"].into_iter().find_map(|file| read(&topology.join(file)));
            siblings.and_then(|list| parse_list(&list)?.first().copied()).unwrap_or(*processor)
        };
        let cores: BTreeSet<usize> = processors.iter().map(core).collect();
        Some(Self { processors: processors.len(), cores: cores.len(), quota: quota(root) })
    }

    /// Threads to compute with: whole processors of a quota, so that they are never all stopped.
    pub fn threads(&self) -> usize {
        let paid = self.quota.map_or(usize::MAX, |quota| quota.floor() as usize);
        self.cores.min(paid).max(1)
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} physical cores, {} logical processors", self.cores, self.processors)?;
        match self.quota {
            Some(quota) => write!(f, ", a CPU quota of {quota:.2}"),
            None => Ok(()),
        }
    }
}

/// No file that is read here is longer, but for the list of mounts.
const LIMIT: u64 = 1 << 20;

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(LIMIT).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// Numbers and ranges such as `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    const MOST: usize = 1 << 16;
    let mut all = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if last >= MOST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// The processors that are on and that the affinity mask allows.
fn processors(root: &Path) -> Option<Vec<usize>> {
    let status = read(&root.join("proc/self/status"))?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).and_then(parse_list)?;
    let online = read(&root.join("sys/devices/system/cpu/online")).and_then(|list| parse_list(&list));
    let usable: Vec<usize> = match online {
        Some(online) => allowed.into_iter().filter(|processor| online.contains(processor)).collect(),
        None => allowed,
    };
    (!usable.is_empty()).then_some(usable)
}

/// The smallest limit of the control groups that this process is in, of either version.
fn quota(root: &Path) -> Option<f64> {
    let mounts = read(&root.join("proc/self/mountinfo"))?;
    let groups = read(&root.join("proc/self/cgroup"))?;
    let limits = groups.lines().filter_map(|line| {
        // hierarchy:controllers:path
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let second = controllers.is_empty();
        if !second && !controllers.split(',').any(|name| name == "cpu") {
            return None;
        }
        let mount = mounts.lines().filter_map(Mount::parse).find(|mount| mount.has_processors(second))?;
        let top = root.join(mount.point.strip_prefix('/')?);
        // A container sees its own group at the mount, whatever the path is called outside.
        let inside = Path::new(path).strip_prefix(mount.root).unwrap_or(Path::new(""));
        smallest_limit(&top, inside, if second { limit_of_second } else { limit_of_first })
    });
    limits.min_by(f64::total_cmp)
}

/// A group's own limit and those of all above it, up to the mount.
fn smallest_limit(top: &Path, inside: &Path, limit: fn(&Path) -> Option<f64>) -> Option<f64> {
    let mut group: PathBuf = top.to_owned();
    let mut smallest = limit(&group);
    for part in inside.components().filter(|part| matches!(part, std::path::Component::Normal(_))) {
        group.push(part);
        smallest = [smallest, limit(&group)].into_iter().flatten().min_by(f64::total_cmp);
    }
    smallest
}

/// Version 2: `cpu.max` holds `max` or the microseconds of a period, and the period.
fn limit_of_second(group: &Path) -> Option<f64> {
    let text = read(&group.join("cpu.max"))?;
    let mut numbers = text.split_whitespace();
    share(numbers.next()?, numbers.next().unwrap_or("100000"))
}

/// Version 1: −1 stands for no limit.
fn limit_of_first(group: &Path) -> Option<f64> {
    share(&read(&group.join("cpu.cfs_quota_us"))?, &read(&group.join("cpu.cfs_period_us"))?)
}

fn share(quota: &str, period: &str) -> Option<f64> {
    let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
    (quota > 0 && period > 0).then_some(quota as f64 / period as f64)
}

/// A line of `mountinfo`, as far as it concerns control groups.
struct Mount<'a> {
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    /// id, parent, device, root, point, options, optional fields, `-`, kind, source, options of the file system.
    fn parse(line: &'a str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let (mut before, mut after) = (before.split(' ').skip(3), after.split(' '));
        let (root, point) = (before.next()?, before.next()?);
        Some(Self { root, point, kind: after.next()?, options: after.nth(1).unwrap_or("") })
    }

    /// Whether groups of processors lie here, of the second version or of the first.
    fn has_processors(&self, second: bool) -> bool {
        match self.kind {
            "cgroup2" => second,
            "cgroup" => !second && self.options.split(',').any(|option| option == "cpu"),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system's files under a directory of its own.
    struct System(PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("henson-cores-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, format!("{text}\n")).unwrap();
            }
            Self(root)
        }

        fn cores(&self) -> Option<Cores> {
            Cores::under(&self.0)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro master:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      33 31 0:30 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    const EIGHT: [(&str, &str); 2] =
        [("proc/self/status", "Name:\thenson\nCpus_allowed_list:\t0-7"), ("sys/devices/system/cpu/online", "0-7")];

    /// Four cores with two threads each, numbered as Intel's are: 0 and 4 are one core.
    fn siblings() -> Vec<(String, String)> {
        (0..8)
            .map(|i| {
                (format!("sys/devices/system/cpu/cpu{i}/topology/core_cpus_list"), format!("{},{}", i % 4, i % 4 + 4))
            })
            .collect()
    }

    /// The eight processors with some more files.
    fn eight(name: &str, more: &[(&str, &str)]) -> System {
        let siblings = siblings();
        let mut files = EIGHT.to_vec();
        files.extend(siblings.iter().map(|(path, text)| (path.as_str(), text.as_str())));
        files.extend(more);
        System::new(name, &files)
    }

    #[track_caller]
    fn check(system: &System, expected: (usize, usize, Option<f64>), threads: usize) {
        let cores = system.cores().unwrap();
        assert_eq!((cores.processors, cores.cores, cores.quota), expected);
        assert_eq!(cores.threads(), threads);
    }

    #[test]
    fn physical_cores_and_affinity() {
        check(&eight("plain", &[]), (8, 4, None), 4);
        check(&eight("mask", &[("proc/self/status", "Cpus_allowed_list:\t1-2,5")]), (3, 2, None), 2);
        check(&eight("off", &[("sys/devices/system/cpu/online", "0-1,4")]), (3, 2, None), 2);
        // Nothing known of siblings, as in many virtual machines.
        check(&System::new("bare", &EIGHT), (8, 8, None), 8);
        check(&System::new("status", &[("proc/self/status", "Cpus_allowed_list:\t0,3")]), (2, 2, None), 2);
        assert_eq!(System::new("none", &[("proc/self/status", "Name:\thenson")]).cores(), None);
        assert_eq!(System::new("bad", &[("proc/self/status", "Cpus_allowed_list:\t0-99999999999")]).cores(), None);
    }

    #[test]
    fn quotas_of_both_versions() {
        let second = |name, group: &str, limits: &[(&str, &str)]| {
            let groups = format!("0::{group}");
            let mut files = vec![("proc/self/mountinfo", V2), ("proc/self/cgroup", groups.as_str())];
            files.extend(limits);
            eight(name, &files)
        };
        let max = "sys/fs/cgroup/cpu.max";
        check(&second("max", "/", &[(max, "max 100000")]), (8, 4, None), 4);
        check(&second("two", "/", &[(max, "250000 100000")]), (8, 4, Some(2.5)), 2);
        check(&second("half", "/", &[(max, "50000 100000")]), (8, 4, Some(0.5)), 1);
        check(&second("six", "/", &[(max, "600000 100000")]), (8, 4, Some(6.0)), 4);
        check(&second("broken", "/", &[(max, "many 0")]), (8, 4, None), 4);
        // The tightest of a group and those above it.
        let (slice, own) = ("sys/fs/cgroup/a.slice/cpu.max", "sys/fs/cgroup/a.slice/b/cpu.max");
        check(&second("nested", "/a.slice/b", &[(slice, "200000 100000"), (own, "max 100000")]), (8, 4, Some(2.0)), 2);
        check(&second("inner", "/a.slice/b", &[(slice, "300000 100000"), (own, "20000 20000")]), (8, 4, Some(1.0)), 1);

        let first = |name, path: &str, group: &str, quota| {
            let groups = format!("5:memory:/docker/ab\n4:cpu,cpuacct:{path}\n0::/");
            let (q, p) = (format!("{group}cpu.cfs_quota_us"), format!("{group}cpu.cfs_period_us"));
            let files =
                [("proc/self/mountinfo", V1), ("proc/self/cgroup", groups.as_str()), (&*q, quota), (&*p, "100000")];
            eight(name, &files)
        };
        let mount = "sys/fs/cgroup/cpu,cpuacct/";
        check(&first("v1", "/docker/ab", mount, "300000"), (8, 4, Some(3.0)), 3);
        check(&first("v1-none", "/docker/ab", mount, "-1"), (8, 4, None), 4);
        check(&first("v1-inner", "/docker/ab/c", &format!("{mount}c/"), "100000"), (8, 4, Some(1.0)), 1);
        // Seen from a name space of its own, the path says nothing of the mount.
        check(&first("v1-namespace", "/", mount, "200000"), (8, 4, Some(2.0)), 2);
    }

    #[test]
    fn this_process_has_cores() {
        let cores = Cores::of_this_process();
        assert!(cores.threads() >= 1 && cores.cores <= cores.processors && cores.processors >= 1, "{cores}");
    }
}
