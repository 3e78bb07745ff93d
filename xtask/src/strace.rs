//! Programs under strace: which system calls they make on our files, and what happens when one of them fails or is the
//! last. Deliberately no ptrace of our own: strace is on every distribution, and its command lines can be typed again.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::Result;
use crate::workspace::succeed;

/// A system call that matters to files and threads.
pub(crate) struct Kind {
    /// As strace has it; opening to create is named apart, see [`CREATE`].
    name: &'static str,
    /// Whether it changes what is on the disk, so that being killed before it leaves something new behind.
    changes: bool,
    /// What it may fail with.
    errors: &'static [&'static str],
}

/// openat that creates or empties a file.
const CREATE: &str = "openat (create)";

const FULL: &[&str] = &["ENOSPC", "EIO"];
const BROKEN: &[&str] = &["EIO"];

/// Every call that henson makes on files; another one is an error, so that none is forgotten. EINTR stands where the
/// kernel gives it for files.
const KINDS: [Kind; 38] = [
    Kind { name: CREATE, changes: true, errors: &["ENOSPC", "EIO", "EINTR"] },
    Kind { name: "openat", changes: false, errors: &["EIO", "EMFILE", "EINTR"] },
    Kind { name: "write", changes: true, errors: &["ENOSPC", "EIO", "EINTR"] },
    Kind { name: "writev", changes: true, errors: &["ENOSPC", "EIO", "EINTR"] },
    Kind { name: "pwrite64", changes: true, errors: &["ENOSPC", "EIO", "EINTR"] },
    Kind { name: "copy_file_range", changes: true, errors: FULL },
    Kind { name: "sendfile", changes: true, errors: FULL },
    Kind { name: "fallocate", changes: true, errors: FULL },
    Kind { name: "ftruncate", changes: true, errors: &["EIO", "EINTR"] },
    Kind { name: "fsync", changes: false, errors: &["EIO", "ENOSPC", "EINTR"] },
    Kind { name: "fdatasync", changes: false, errors: &["EIO", "ENOSPC", "EINTR"] },
    Kind { name: "rename", changes: true, errors: FULL },
    Kind { name: "renameat", changes: true, errors: FULL },
    Kind { name: "renameat2", changes: true, errors: FULL },
    Kind { name: "link", changes: true, errors: FULL },
    Kind { name: "linkat", changes: true, errors: FULL },
    Kind { name: "symlink", changes: true, errors: FULL },
    Kind { name: "mkdir", changes: true, errors: FULL },
    Kind { name: "mkdirat", changes: true, errors: FULL },
    Kind { name: "unlink", changes: true, errors: BROKEN },
    Kind { name: "unlinkat", changes: true, errors: BROKEN },
    Kind { name: "rmdir", changes: true, errors: BROKEN },
    Kind { name: "chmod", changes: true, errors: BROKEN },
    Kind { name: "fchmod", changes: true, errors: BROKEN },
    Kind { name: "utimensat", changes: true, errors: BROKEN },
    Kind { name: "read", changes: false, errors: &["EIO", "EINTR"] },
    Kind { name: "readv", changes: false, errors: &["EIO", "EINTR"] },
    Kind { name: "pread64", changes: false, errors: &["EIO", "EINTR"] },
    Kind { name: "mmap", changes: false, errors: &["ENOMEM"] },
    Kind { name: "getdents64", changes: false, errors: BROKEN },
    Kind { name: "statx", changes: false, errors: BROKEN },
    Kind { name: "fstat", changes: false, errors: BROKEN },
    Kind { name: "newfstatat", changes: false, errors: BROKEN },
    Kind { name: "statfs", changes: false, errors: BROKEN },
    Kind { name: "readlink", changes: false, errors: BROKEN },
    Kind { name: "flock", changes: false, errors: &["EINTR", "ENOLCK"] },
    // A thread that cannot be started.
    Kind { name: "clone3", changes: false, errors: &["EAGAIN"] },
    Kind { name: "clone", changes: false, errors: &["EAGAIN"] },
];

/// Calls that neither change anything nor fail in ways that a program can do something about.
const WITHOUT_FAULTS: [&str; 10] =
    ["execve", "close", "lseek", "fcntl", "ioctl", "poll", "fadvise64", "getcwd", "dup", "faccessat2"];

/// A call that was seen in an undisturbed run.
pub(crate) struct Call {
    pub(crate) kind: &'static Kind,
    /// Which of its kind it is in its thread, from 1; among those on `input` where there is one.
    pub(crate) number: usize,
    /// The input file that it touches. strace can be told to look at one path alone, which finds calls in any thread.
    pub(crate) input: Option<String>,
    /// Kind and file without the numbers in them: calls with the same come from the same place in the code.
    pub(crate) place: String,
}

/// The fault that ends the program.
pub(crate) const KILL: &str = "KILL";

/// What is done to a call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// strace's name of the call.
    pub(crate) call: String,
    pub(crate) number: usize,
    /// [`KILL`], or the error that it fails with.
    pub(crate) what: String,
    pub(crate) input: Option<String>,
}

impl Fault {
    /// Whether it keeps bytes from the disk, so that a program that then succeeds must not have ignored it.
    pub(crate) fn loses_data(&self) -> bool {
        let writes = ["write", "writev", "pwrite64", "copy_file_range", "ftruncate", "fsync", "fdatasync"];
        let moves = ["rename", "renameat", "renameat2", "link", "linkat"];
        let lasting = self.what != KILL && self.what != "EINTR";
        lasting && (writes.contains(&self.call.as_str()) || moves.contains(&self.call.as_str()))
    }
}

/// How a program ended.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    Code(i32),
    Signal(i32),
    /// It was still running after [`PATIENCE`].
    Hangs,
}

/// For what takes a tenth of a second.
const PATIENCE: Duration = Duration::from_secs(60);

impl Kind {
    /// strace's name.
    fn call(&self) -> &'static str {
        if self.name == CREATE { "openat" } else { self.name }
    }
}

impl Call {
    /// The fault that kills the program at this call, if that differs from killing it at the next.
    pub(crate) fn kill(&self) -> Option<Fault> {
        self.kind.changes.then(|| self.fault(KILL))
    }

    /// The faults that make this call fail.
    pub(crate) fn failures(&self) -> Vec<Fault> {
        self.kind.errors.iter().map(|error| self.fault(error)).collect()
    }

    fn fault(&self, what: &str) -> Fault {
        let call = self.kind.call().to_owned();
        Fault { call, number: self.number, what: what.to_owned(), input: self.input.clone() }
    }
}

/// Makes sure that strace is there: installs it where we may.
pub(crate) fn install() -> Result {
    install_package("strace", "-V", "strace")
}

/// Makes sure that a program is there, which `question` makes say something: installs its Debian package where we may.
pub(crate) fn install_package(program: &str, question: &str, package: &str) -> Result {
    let there = || Command::new(program).arg(question).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if there() {
        return Ok(());
    }
    let advice = format!("{program} is missing: install it, as with `sudo apt-get install {package}`");
    let root = fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    if !root || Command::new("apt-get").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Err(advice);
    }
    let apt = |arguments: &[&str]| {
        succeed(Command::new("apt-get").args(["-qq", "-y"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let install = ["install", "--no-install-recommends", package];
    // Without lists of packages, as in a fresh container, the first attempt fails.
    if apt(&install).is_err() {
        apt(&["update"]).and_then(|()| apt(&install)).map_err(|error| format!("{error}; {advice}"))?;
    }
    if there() { Ok(()) } else { Err(advice) }
}

/// A program with its arguments. Output goes to the files stdout and stderr in a directory of its own.
pub(crate) struct Program<'a> {
    pub(crate) path: &'a Path,
    pub(crate) arguments: Vec<String>,
    pub(crate) directory: &'a Path,
}

impl Program<'_> {
    /// Runs it undisturbed.
    pub(crate) fn run(&self) -> Result<End> {
        self.run_by(&mut Command::new(self.path))
    }

    /// The end of what it printed on standard error.
    pub(crate) fn messages(&self) -> String {
        let text = fs::read(self.directory.join("stderr")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Runs it under strace, and returns what that wrote.
    fn trace(&self, options: &[&str]) -> Result<(End, String)> {
        let log = self.directory.join("strace");
        let end = self.run_by(Command::new("strace").args(["-f", "-o"]).arg(&log).args(options).arg(self.path))?;
        let text = fs::read(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        Ok((end, String::from_utf8_lossy(&text).into_owned()))
    }

    /// Waits for the end, but not for ever.
    fn run_by(&self, command: &mut Command) -> Result<End> {
        let failed = |error| format!("cannot run {}: {error}", self.path.display());
        let file = |name| File::create(self.directory.join(name)).map_err(failed);
        command.args(&self.arguments).env("HOME", self.directory).env_remove("HENSON_KERNELS");
        command.stdin(Stdio::null()).stdout(file("stdout")?).stderr(file("stderr")?);
        let mut child = command.process_group(0).spawn().map_err(failed)?;
        let begin = Instant::now();
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(status.code().map_or_else(|| End::Signal(status.signal().unwrap_or_default()), End::Code));
            }
            if begin.elapsed() > PATIENCE {
                // The group, because what strace follows outlives it.
                succeed(Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]))?;
                child.wait().map_err(failed)?;
                return Ok(End::Hangs);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs a program to its end and lists its calls on files in `directory`, in order. `inputs`, a folder in it, has the
/// files whose names are the same in each run.
pub(crate) fn calls(program: &Program, directory: &Path, inputs: &Path) -> Result<Vec<Call>> {
    let (end, log) = program.trace(&["-qq", "-y", "-e", "trace=%file,%desc,clone,?clone3"])?;
    if end != End::Code(0) {
        return Err(format!("an undisturbed run under strace ended with {end:?} and printed:\n{}", program.messages()));
    }
    list(&log, &directory.to_string_lossy(), &inputs.to_string_lossy())
}

/// Runs a program with a fault. The second is the failed call as strace shows it, or that it was killed; `None` where the
/// call was not made this time.
pub(crate) fn disturb(program: &Program, fault: &Fault) -> Result<(End, Option<String>)> {
    let Fault { call, number, what, .. } = fault;
    let (trace, error) = (format!("trace={call}"), format!("inject={call}:error={what}:when={number}"));
    let kill = format!("inject={call}:signal={KILL}:when={number}");
    let mut options = vec!["-y", "-e", &trace];
    match what.as_str() {
        KILL => options.extend(["-e", &kill]),
        // --seccomp-bpf stops at this call alone, which is faster, but loses signals.
        _ => options.extend(["--seccomp-bpf", "-e", &error]),
    }
    if let Some(input) = &fault.input {
        options.extend(["-P", input]);
    }
    let (end, log) = program.trace(&options)?;
    let mark = if what == KILL { "killed by SIGKILL" } else { "(INJECTED)" };
    Ok((end, log.lines().find(|line| line.contains(mark)).map(str::to_owned)))
}

/// The calls in strace's log that touch a file of `directory` or start a thread.
pub(crate) fn list(log: &str, directory: &str, inputs: &str) -> Result<Vec<Call>> {
    let mut calls = Vec::new();
    let mut numbers: HashMap<(&str, &str, &str), usize> = HashMap::new();
    let main = log.split_whitespace().next().unwrap_or_default();
    for line in log.lines() {
        // "12 openat(AT_FDCWD</tmp>, ..." or "12 <... openat resumed>", the end of what another thread came between.
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((name, arguments)) = rest.trim_start().split_once('(') else { continue };
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            continue;
        }
        let count = |numbers: &mut HashMap<_, usize>, key| {
            let number = numbers.entry(key).or_default();
            *number += 1;
            *number
        };
        let mut number = count(&mut numbers, (thread, name, ""));
        let file = path_in(arguments, directory);
        if (file.is_none() && !name.starts_with("clone")) || WITHOUT_FAULTS.contains(&name) {
            continue;
        }
        let input = file.filter(|file| file.starts_with(inputs));
        if let Some(input) = input {
            number = count(&mut numbers, (thread, name, input));
        } else if thread != main {
            return Err(format!("no fault can be set in a second thread but on inputs: {line}"));
        }
        let create = name == "openat" && (arguments.contains("O_CREAT") || arguments.contains("O_TRUNC"));
        let wanted = if create { CREATE } else { name };
        let Some(kind) = KINDS.iter().find(|kind| kind.name == wanted) else {
            return Err(format!("`{name}` has no place in the table of calls (xtask/src/strace.rs)"));
        };
        let place = format!("{wanted} {}", file.unwrap_or_default().replace(|c: char| c.is_ascii_digit(), ""));
        calls.push(Call { kind, number, input: input.map(str::to_owned), place });
    }
    Ok(calls)
}

/// The last path in a call's arguments that lies in a directory: of a rename, where it leads.
fn path_in<'a>(arguments: &'a str, directory: &str) -> Option<&'a str> {
    let path = &arguments[arguments.rfind(directory)?..];
    path.split(['"', '>', '<']).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"7 openat(AT_FDCWD</home>, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3
7 read(3</etc/ld.so.cache>, "..."..., 832) = 832
7 openat(AT_FDCWD</home>, "/w/in/data/a.shard", O_RDONLY|O_CLOEXEC) = 3
7 read(3</w/in/data/a.shard>, "text", 64) = 4
7 mkdir("/w/run-12/out", 0777) = 0
7 openat(AT_FDCWD</home>, "/w/run-12/out/.x.tmp-7-1", O_WRONLY|O_CREAT|O_EXCL, 0666 <unfinished ...>
8 read(3</w/in/data/a.shard>, "more", 64) = 4
7 <... openat resumed>) = 4
7 write(4</w/run-12/out/.x.tmp-7-1>, "x", 1) = 1
7 close(4</w/run-12/out/.x.tmp-7-1>) = 0
7 rename("/w/run-12/out/.x.tmp-7-1", "/w/run-12/out/x") = 0
7 clone3({flags=CLONE_VM}, 88) = 8
7 write(2<pipe:[1]>, "done", 4) = 4
"#;

    /// Kind, number, input.
    fn listed(log: &str) -> Result<Vec<(&'static str, usize, Option<String>)>> {
        let calls = list(log, "/w/", "/w/in/")?;
        Ok(calls.into_iter().map(|call| (call.kind.name, call.number, call.input)).collect())
    }

    #[test]
    fn calls_on_our_files_are_counted_as_strace_does() {
        let input = || Some("/w/in/data/a.shard".to_owned());
        let expected = [
            // On inputs: among the calls on that file, in each thread.
            ("openat", 1, input()),
            ("read", 1, input()),
            ("mkdir", 1, None),
            // On others: among all of the thread.
            (CREATE, 3, None),
            ("read", 1, input()),
            ("write", 1, None),
            ("rename", 1, None),
            ("clone3", 1, None),
        ];
        assert_eq!(listed(LOG).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_tested_is_an_error() {
        let unknown = listed("7 mknod(\"/w/x\", 0) = 0").unwrap_err();
        assert!(unknown.contains("`mknod` has no place in the table"), "{unknown}");
        let second = listed("7 mkdir(\"/w/x\") = 0\n8 unlink(\"/w/x\") = 0").unwrap_err();
        assert!(second.contains("in a second thread"), "{second}");
    }

    #[test]
    fn a_place_is_a_call_and_a_file_whatever_its_numbers() {
        let places = |log: &str| list(log, "/w/", "/w/in/").unwrap().remove(0).place;
        let renamed = places("7 rename(\"/w/run-12/out/.x.tmp-7-1\", \"/w/run-12/out/x-3\") = 0");
        assert_eq!(renamed, "rename /w/run-/out/x-");
        assert_eq!(renamed, places("9 rename(\"/w/run-5/out/.x.tmp-9-1\", \"/w/run-5/out/x-4\") = 0"));
        assert_ne!(renamed, places("9 rename(\"/w/run-5/out/.x.tmp-9-1\", \"/w/run-5/out/y\") = 0"));
    }
}
