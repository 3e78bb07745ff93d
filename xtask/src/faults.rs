//! Kills henson at system calls and makes them fail, and demands that nothing is lost: the run ends with the same bits
//! all the same, or with a clean error, after which the same command works and gives them.
//!
//! A fault is one call of one command, and what happens there. `cargo xtask faults` tries one of every kind: of calls from
//! the same place in the code, the first. `--whole` tries them all. Deliberately not here: power cuts, which lose what
//! was written but not synced.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::Result;
use crate::strace::{self, Call, End, Fault, KILL, Program};
use crate::workspace::Workspace;

/// For the help text.
pub(crate) const WHAT: &str = "killed or failed at a system call, commands recover: [--whole] [--binary FILE] \
    [--only NAME [--at CALL:NUMBER:FAULT]]";

/// A command under test. What an undisturbed run of it gives is an input of those after it: {in}/NAME.
struct Subject {
    name: &'static str,
    /// The command line; its result is {out}.
    line: &'static str,
    /// Whether the same command may follow a finished one. Others refuse to write over their result.
    repeats: bool,
}

const SUBJECTS: [Subject; 7] = [
    Subject {
        name: "tokenizer",
        line: "tokenizer train --vocab-size 300 --threads 1 --out {out} {in}/text.txt",
        repeats: false,
    },
    Subject {
        name: "data",
        line: "data build --tokenizer {in}/tokenizer --held-out 0.1 --threads 1 --out {out} {in}/text.txt",
        repeats: false,
    },
    Subject {
        name: "pretrain",
        line: "pretrain --model bert-tiny --data {in}/data --threads 1 --out {out} \
               --set config.hidden_size=32 --set config.num_attention_heads=2 --set config.max_position_embeddings=64 \
               --set steps=4 --set batch_size=4 --set sequence_length=32 --set learning_rate=1e-3 \
               --set checkpoint_every=1 --set eval_every=2 --set eval_sequences=4",
        repeats: true,
    },
    Subject { name: "convert", line: "convert {in}/pretrain {out} --dtype bf16", repeats: false },
    Subject {
        name: "finetune",
        line: "finetune --task classify --model {in}/pretrain --train {in}/classify.jsonl --dev {in}/classify.jsonl \
               --threads 1 --out {out} --set batch_size=3 --set epochs=2 --set max_length=40 --set learning_rate=1e-3",
        repeats: true,
    },
    Subject {
        name: "search",
        line: "finetune --task classify --model {in}/pretrain --train {in}/classify.jsonl --dev {in}/classify.jsonl \
               --threads 1 --out {out} --set batch_size=3 --set epochs=1 --set max_length=40 \
               --grid learning_rate=1e-2,1e-3",
        repeats: true,
    },
    Subject {
        name: "frozen",
        line: "finetune --task tag --frozen --layers last --head bilstm --crf --model {in}/pretrain \
               --train {in}/tag.conll --dev {in}/tag.conll --threads 1 --out {out} \
               --set batch_size=3 --set epochs=2 --set max_length=40 --set learning_rate=1e-3",
        repeats: true,
    },
];

/// Files that hold times, and so differ from run to run; and locks.
const TIMED: [&str; 6] = ["metrics.jsonl", "report.html", "results.json", "README.md", "state.json", "run.lock"];

/// Folders of such files.
const TIMED_FOLDER: &str = "tensorboard";

/// What is asked for.
#[derive(Default)]
struct Options {
    whole: bool,
    binary: Option<PathBuf>,
    /// Only the command of this name.
    only: Option<String>,
    /// Only this fault of it.
    at: Option<String>,
}

/// How a command took a fault.
enum Outcome {
    /// With the same bits, without having to be run again.
    Equal,
    /// With the same bits from the second run.
    Recovered,
    /// The call was not made this time.
    Missed,
    /// None of them, and why.
    Lost(String),
}

/// Where everything happens.
struct Bench {
    binary: PathBuf,
    /// The folder of all below.
    place: PathBuf,
    inputs: PathBuf,
}

/// The sample, or what the options ask for.
pub(crate) fn run(workspace: &Workspace, options: &[String]) -> Result {
    let options = Options::parse(options)?;
    if !cfg!(target_os = "linux") {
        println!("strace is for Linux: nothing to check here");
        return Ok(());
    }
    strace::install()?;
    let bench = Bench::new(workspace, &options)?;
    let mut total = Counts::default();
    for subject in &SUBJECTS {
        let calls = bench.record(subject)?;
        if options.only.as_ref().is_some_and(|only| only != subject.name) {
            continue;
        }
        let faults = match &options.at {
            Some(at) => vec![Fault::parse(at, &bench.inputs)?],
            None if options.whole => all(&calls),
            None => sample(&calls),
        };
        let start = Instant::now();
        let outcomes = bench.try_all(subject, &faults)?;
        let counts = Counts::of(&outcomes);
        println!("{:<9} {:>5} calls, {counts}, {:.0} s", subject.name, calls.len(), start.elapsed().as_secs_f64());
        for (fault, outcome) in faults.iter().zip(outcomes) {
            if let Outcome::Lost(why) = outcome {
                let at = fault.describe(&bench.inputs);
                println!("NOT recovered: cargo xtask faults --only {} --at {at}\n  {why}", subject.name);
            }
        }
        counts.check(subject)?;
        total.add(&counts);
    }
    if options.at.is_some() {
        println!("all files are in {}", bench.place.display());
    } else {
        fs::remove_dir_all(&bench.place).map_err(|error| format!("{}: {error}", bench.place.display()))?;
    }
    println!("faults: {total}");
    if total.lost == 0 { Ok(()) } else { Err(format!("{} faults were not recovered from", total.lost)) }
}

/// Every fault of every call.
fn all(calls: &[Call]) -> Vec<Fault> {
    calls.iter().flat_map(|call| call.kill().into_iter().chain(call.failures())).collect()
}

/// Of calls from the same place in the code, the first: killed there, and failed in one of the ways that it can fail,
/// another for every place.
fn sample(calls: &[Call]) -> Vec<Fault> {
    let mut places = BTreeMap::new();
    for (index, call) in calls.iter().enumerate() {
        places.entry(&call.place).or_insert(index);
    }
    let mut firsts: Vec<usize> = places.into_values().collect();
    firsts.sort_unstable();
    let mut faults = Vec::new();
    for (turn, call) in firsts.into_iter().map(|index| &calls[index]).enumerate() {
        let mut failures = call.failures();
        faults.extend(call.kill());
        faults.push(failures.swap_remove(turn % failures.len()));
    }
    faults
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().cloned().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--whole" => options.whole = true,
                "--binary" => options.binary = Some(value()?.into()),
                "--only" => options.only = Some(value()?),
                "--at" => options.at = Some(value()?),
                _ => return Err(format!("faults takes --whole, --binary, --only and --at, not `{argument}`")),
            }
        }
        let names = SUBJECTS.map(|subject| subject.name);
        if options.only.as_ref().is_some_and(|only| !names.contains(&only.as_str())) {
            return Err(format!("--only is one of {}", names.join(", ")));
        }
        if options.at.is_some() && options.only.is_none() {
            return Err("--at needs --only NAME: the command that it is a fault of".to_owned());
        }
        Ok(options)
    }
}

impl Fault {
    /// CALL:NUMBER:FAULT, and the input's name where there is one.
    fn describe(&self, inputs: &Path) -> String {
        let mut text = format!("{}:{}:{}", self.call, self.number, self.what);
        if let Some(input) = &self.input {
            let name = Path::new(input).strip_prefix(inputs).unwrap_or(Path::new(input));
            text += &format!(":{}", name.display());
        }
        text
    }

    fn parse(text: &str, inputs: &Path) -> Result<Self> {
        let mut parts = text.splitn(4, ':');
        let (call, number, what) = (parts.next(), parts.next().and_then(|number| number.parse().ok()), parts.next());
        let (Some(call), Some(number), Some(what)) = (call, number, what) else {
            return Err(format!("--at is CALL:NUMBER:FAULT, such as write:17:ENOSPC or rename:1:KILL, not `{text}`"));
        };
        let input = parts.next().map(|name| inputs.join(name).to_string_lossy().into_owned());
        Ok(Self { call: call.to_owned(), number, what: what.to_owned(), input })
    }
}

impl Bench {
    fn new(workspace: &Workspace, options: &Options) -> Result<Self> {
        let binary = match &options.binary {
            Some(binary) => binary.canonicalize().map_err(|error| format!("{}: {error}", binary.display()))?,
            None => workspace.build()?.join("henson"),
        };
        // In memory, where there is such a place: on a disk, most of the time goes into fsync.
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory } else { &workspace.target };
        let place = parent.join(format!("henson-faults-{}", std::process::id()));
        let inputs = place.join("in");
        let bench = Self { binary, place, inputs };
        let at = |error| format!("{}: {error}", bench.inputs.display());
        fs::create_dir_all(&bench.inputs).map_err(at)?;
        let data = workspace.root.join("tests-data");
        for name in ["classify.jsonl", "tag.conll"] {
            fs::copy(data.join("finetune").join(name), bench.inputs.join(name)).map_err(at)?;
        }
        let novels = fs::read_to_string(data.join("text/novels.txt")).map_err(at)?;
        fs::write(bench.inputs.join("text.txt"), documents(&novels)).map_err(at)?;
        Ok(bench)
    }

    /// An undisturbed run: its result becomes an input, its calls are listed.
    fn record(&self, subject: &Subject) -> Result<Vec<Call>> {
        let directory = self.place.join("record");
        let at = |error| format!("{}: {error}", directory.display());
        fs::create_dir(&directory).map_err(at)?;
        let calls = strace::calls(&self.program(subject, &directory), &self.place, &self.inputs)
            .map_err(|error| format!("{}: {error}", subject.name))?;
        fs::rename(directory.join("out"), self.inputs.join(subject.name)).map_err(at)?;
        fs::remove_dir_all(&directory).map_err(at)?;
        Ok(calls)
    }

    fn program<'a>(&'a self, subject: &Subject, directory: &'a Path) -> Program<'a> {
        let put = |word: &str| {
            let word = word.replace("{in}", &self.inputs.to_string_lossy());
            word.replace("{out}", &directory.join("out").to_string_lossy())
        };
        Program { path: &self.binary, arguments: subject.line.split_whitespace().map(put).collect(), directory }
    }

    /// Tries faults on all cores; the outcomes in the same order.
    fn try_all(&self, subject: &Subject, faults: &[Fault]) -> Result<Vec<Outcome>> {
        let next = AtomicUsize::new(0);
        let outcomes = Mutex::new(BTreeMap::new());
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(fault) = faults.get(index) else { return };
                let outcome = self.try_one(subject, fault, &self.place.join(format!("{}-{index}", subject.name)));
                outcomes.lock().expect("no thread panics").insert(index, outcome);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(work);
            }
        });
        outcomes.into_inner().expect("no thread panics").into_values().collect()
    }

    /// One fault in a directory of its own, which stays where the fault was not recovered from.
    fn try_one(&self, subject: &Subject, fault: &Fault, directory: &Path) -> Result<Outcome> {
        let at = |error| format!("{}: {error}", directory.display());
        fs::create_dir(directory).map_err(at)?;
        let outcome = self.judge(subject, fault, &self.program(subject, directory))?;
        if !matches!(outcome, Outcome::Lost(_)) {
            fs::remove_dir_all(directory).map_err(at)?;
        }
        Ok(outcome)
    }

    fn judge(&self, subject: &Subject, fault: &Fault, program: &Program) -> Result<Outcome> {
        let (end, call) = strace::disturb(program, fault)?;
        let message = program.messages();
        let different = || self.difference(subject, program);
        let is_output = |call: &str| call.contains("/stderr>") || call.contains("/stdout>");
        match (end, &call) {
            (End::Code(0), call) => {
                return Ok(match (different(), call) {
                    (Some(what), _) => Outcome::Lost(format!("it succeeded, but {what}")),
                    (None, None) => Outcome::Missed,
                    (None, Some(call)) if fault.loses_data() && !is_output(call) => {
                        Outcome::Lost(format!("it succeeded, and did not report: {call}"))
                    }
                    (None, Some(_)) => Outcome::Equal,
                });
            }
            (End::Signal(9), Some(_)) if fault.what == KILL => {}
            // What failed may have been the message.
            (End::Code(1), Some(call)) if is_error(&message) || is_output(call) => {}
            (end, _) => return Ok(Outcome::Lost(format!("it ended with {end:?} and printed:\n{message}"))),
        }
        if !subject.repeats && different().is_none() {
            return Ok(Outcome::Equal);
        }
        Ok(match program.run()? {
            End::Code(0) => match different() {
                Some(what) => Outcome::Lost(format!("the second run succeeded, but {what}")),
                None => Outcome::Recovered,
            },
            end => Outcome::Lost(format!("the second run ended with {end:?} and printed:\n{}", program.messages())),
        })
    }

    /// What a program's result has other than an undisturbed run's.
    fn difference(&self, subject: &Subject, program: &Program) -> Option<String> {
        let (wanted, found) = (self.inputs.join(subject.name), program.directory.join("out"));
        let (wanted_files, found_files) = (files(&wanted), files(&found));
        if let Some(file) = wanted_files.iter().find(|file| !found_files.contains(file)) {
            return Some(format!("{} is missing", file.display()));
        }
        if let Some(file) = found_files.iter().find(|file| !wanted_files.contains(file)) {
            return Some(format!("{} is left over", file.display()));
        }
        let same = |file: &PathBuf| fs::read(wanted.join(file)).ok() == fs::read(found.join(file)).ok();
        let other = wanted_files.iter().find(|file| !same(file))?;
        Some(format!("{} has other bytes", other.display()))
    }
}

/// A part of the text as many short documents, so that some are held out.
fn documents(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).take(240).collect();
    lines.chunks(10).map(|document| document.join("\n") + "\n\n").collect()
}

/// All files below a directory but those with times in them.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                if name != TIMED_FOLDER {
                    folders.push(path);
                }
            } else if !TIMED.contains(&&*name) {
                found.extend(path.strip_prefix(directory).map(Path::to_owned));
            }
        }
    }
    found.sort();
    found
}

/// Whether a program ended with an error message of its own.
fn is_error(message: &str) -> bool {
    message.lines().any(|line| line.starts_with("error:"))
}

/// How many faults had which outcome.
#[derive(Default)]
struct Counts {
    tried: usize,
    equal: usize,
    recovered: usize,
    missed: usize,
    lost: usize,
}

impl Counts {
    fn of(outcomes: &[Outcome]) -> Self {
        let mut counts = Self { tried: outcomes.len(), ..Self::default() };
        for outcome in outcomes {
            *match outcome {
                Outcome::Equal => &mut counts.equal,
                Outcome::Recovered => &mut counts.recovered,
                Outcome::Missed => &mut counts.missed,
                Outcome::Lost(_) => &mut counts.lost,
            } += 1;
        }
        counts
    }

    fn add(&mut self, other: &Self) {
        self.tried += other.tried;
        self.equal += other.equal;
        self.recovered += other.recovered;
        self.missed += other.missed;
        self.lost += other.lost;
    }

    /// Runs are not quite the same each time, but nearly: where many faults did not come to be, nothing was tested.
    fn check(&self, subject: &Subject) -> Result {
        if self.missed * 10 > self.tried {
            return Err(format!("{}: {} of {} faults did not come to be", subject.name, self.missed, self.tried));
        }
        Ok(())
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self { tried, equal, recovered, missed, lost } = self;
        write!(
            out,
            "{tried} tried, {equal} equal at once, {recovered} recovered, {missed} missed, {lost} NOT recovered"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_has_each_place_once() {
        let log = r#"7 mkdir("/w/run-1/out") = 0
7 write(3</w/run-1/out/step-1>, "x", 1) = 1
7 write(3</w/run-1/out/step-2>, "x", 1) = 1
7 read(3</w/run-1/out/x>, "x", 1) = 1
"#;
        let calls = strace::list(log, "/w/", "/w/in/").unwrap();
        let shown = |faults: Vec<Fault>| -> Vec<String> {
            faults.iter().map(|fault| fault.describe(Path::new("/w/in"))).collect()
        };
        // Each place is killed once, if it changes something, and fails in one way, in turn.
        let expected = ["mkdir:1:KILL", "mkdir:1:ENOSPC", "write:1:KILL", "write:1:EIO", "read:1:EIO"];
        assert_eq!(shown(sample(&calls)), expected);
        let whole = shown(all(&calls));
        assert_eq!(whole.len(), 3 + 4 + 4 + 2);
        assert!(whole.contains(&"write:2:EINTR".to_owned()));
    }

    #[test]
    fn a_fault_is_read_as_it_is_printed() {
        let inputs = Path::new("/w/in");
        for text in ["write:17:ENOSPC", "rename:1:KILL", "pread64:2:EIO:data/train-00000.shard"] {
            assert_eq!(Fault::parse(text, inputs).unwrap().describe(inputs), text);
        }
        for text in ["", "write", "write:x:EIO", "write:1"] {
            assert!(Fault::parse(text, inputs).unwrap_err().contains("CALL:NUMBER:FAULT"), "{text}");
        }
    }

    #[test]
    fn options_are_checked() {
        let parse = |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert!(parse("--whole --only data").is_ok_and(|options| options.whole && options.only.is_some()));
        for (line, problem) in [
            ("--hole", "not `--hole`"),
            ("--only", "needs a value"),
            ("--only x", "one of tokenizer"),
            ("--at a:1:EIO", "needs --only"),
        ] {
            let error = parse(line).err().unwrap();
            assert!(error.contains(problem), "{line}: {error}");
        }
    }

    #[test]
    fn results_are_compared_but_for_files_with_times() {
        let place = std::env::temp_dir().join(format!("henson-xtask-faults-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = place.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let bench = Bench { binary: "henson".into(), place: place.clone(), inputs: place.join("in") };
        let (subject, directory) = (&SUBJECTS[2], place.join("case"));
        let difference = || bench.difference(subject, &bench.program(subject, &directory));
        write("in/pretrain/model.safetensors", "weights");
        write("in/pretrain/metrics.jsonl", "1 s");
        assert_eq!(difference().unwrap(), "model.safetensors is missing");
        write("case/out/metrics.jsonl", "2 s");
        write("case/out/tensorboard/events", "2 s");
        write("case/out/model.safetensors", "others");
        assert_eq!(difference().unwrap(), "model.safetensors has other bytes");
        write("case/out/model.safetensors", "weights");
        assert_eq!(difference(), None);
        write("case/out/checkpoints/.tmp/x", "");
        assert_eq!(difference().unwrap(), "checkpoints/.tmp/x is left over");
        fs::remove_dir_all(&place).unwrap();
    }
}
