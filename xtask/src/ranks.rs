//! Trains with several processes under both families of MPI, and demands the bits of one process: weights, moments and every number of the
//! log but times. Then kills a rank, stops one in its tracks, asks one to end, and demands the same from the restarts. `ci` tries optimizers,
//! dtypes, numbers of ranks and families in chosen pairs and kills one rank; `--whole` tries all of them. `--gpus` gives every process an
//! emulated GPU, over NCCL (emulated as well) and over MPI.

mod on_gpus;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::strace::install_package;
use crate::workspace::{Workspace, succeed};
use crate::{Result, emulator};

/// For the help text.
pub(crate) const WHAT: &str =
    "several processes over MPI give the bits of one: [--whole] [--binary FILE] [--kills N]; over NCCL: --gpus";

/// The `mpirun` of each family, and its package.
const FAMILIES: [(&str, &str); 2] = [("mpirun.openmpi", "openmpi-bin"), ("mpirun.mpich", "mpich")];

/// No command takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) const PRETRAIN: &str = "pretrain --model bert-tiny --data {in}/data --threads 1 --set config.hidden_size=48 \
    --set config.num_attention_heads=2 --set config.max_position_embeddings=64 --set steps=40 --set batch_size=8 --set accumulation=4 \
    --set sequence_length=32 --set learning_rate=1e-2 --set warmup_steps=2 --set checkpoint_every=4 --set eval_every=20 \
    --set eval_sequences=24 --set log_every=1 --lost-after 10";

const FINETUNE: &str = "finetune --task classify --model {in}/model --train {in}/classify.jsonl --dev {in}/classify.jsonl --threads 1 \
    --set batch_size=5 --set accumulation=4 --set epochs=3 --set max_length=40 --set learning_rate=1e-3 --set linear_head=false \
    --set log_every=1 --lost-after 10";

/// Two phases. In how many parts a batch is computed, the number of ranks says.
const DISTIL: &str = "distil --task classify --teacher {in}/out/tuned-1 --model {in}/model --transfer {in}/classify.jsonl \
    --train {in}/classify.jsonl --dev {in}/classify.jsonl --threads 1 --set batch_size=4 --set epochs=3 --set max_length=40 \
    --set learning_rate=1e-3 --set linear_head=false --set log_every=1 --lost-after 10";

/// Every text is told from all others of its batch.
const EMBED: &str =
    "finetune --task embed --model {in}/model --train {in}/embed.jsonl --set accumulation=2 --lost-after 10";

/// Optimizers and dtypes of pre-training.
const KINDS: [(&str, &str); 5] =
    [("adamw", "f32"), ("adamw", "bf16"), ("lamb", "f32"), ("lamb", "bf16"), ("stable-adamw", "f32")];

/// Which families and numbers of ranks are tried for which of these: every pair of choices is there once.
const CHOSEN: [(usize, usize, usize); 5] = [(0, 2, 0), (1, 4, 1), (1, 2, 2), (0, 4, 3), (0, 2, 4)];

pub(crate) struct Bench {
    pub(crate) binary: PathBuf,
    pub(crate) place: PathBuf,
}

pub(crate) fn run(workspace: &Workspace, options: &[String]) -> Result {
    if !cfg!(target_os = "linux") {
        println!("only Linux has the libraries that are looked for: nothing to check here");
        return Ok(());
    }
    let (mut whole, mut kills, mut binary, mut gpus) = (false, 1, None, false);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let mut value = || options.next().ok_or_else(|| format!("{option} needs a value"));
        match option.as_str() {
            "--whole" => whole = true,
            "--gpus" => gpus = true,
            "--binary" => binary = Some(PathBuf::from(value()?)),
            "--kills" => kills = value()?.parse().map_err(|_| "--kills needs a number".to_owned())?,
            _ => return Err(format!("ranks takes --whole, --gpus, --binary and --kills, not `{option}`")),
        }
    }
    if gpus {
        install_package(FAMILIES[0].0, "--version", FAMILIES[0].1)?;
        let bench = Bench::new(workspace, binary)?;
        on_gpus::check(&bench, &emulator::build(workspace)?, whole, kills)?;
        return fs::remove_dir_all(&bench.place).map_err(|error| format!("{}: {error}", bench.place.display()));
    }
    for (program, package) in FAMILIES {
        install_package(program, "--version", package)?;
    }
    let bench = Bench::new(workspace, binary)?;
    bench.measured()?;
    bench.same_bits(whole)?;
    bench.finetuning()?;
    for number in 0..kills {
        bench.killed(number)?;
    }
    bench.silent()?;
    bench.asked_to_stop()?;
    bench.refusals()?;
    bench.strangers()?;
    fs::remove_dir_all(&bench.place).map_err(|error| format!("{}: {error}", bench.place.display()))
}

impl Bench {
    pub(crate) fn new(workspace: &Workspace, binary: Option<PathBuf>) -> Result<Self> {
        let binary = match binary {
            Some(binary) => binary.canonicalize().map_err(|error| format!("{}: {error}", binary.display()))?,
            None => workspace.build()?.join("henson"),
        };
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory } else { &workspace.target };
        let bench = Self { binary, place: parent.join(format!("henson-ranks-{}", std::process::id())) };
        let at = |error| format!("{}: {error}", bench.place.display());
        fs::create_dir_all(&bench.place).map_err(at)?;
        let data = workspace.root.join("tests-data");
        for file in ["classify.jsonl", "embed.jsonl"] {
            fs::copy(data.join("finetune").join(file), bench.place.join(file)).map_err(at)?;
        }
        let novels = fs::read_to_string(data.join("text/novels.txt")).map_err(at)?;
        let lines: Vec<&str> = novels.lines().filter(|line| !line.trim().is_empty()).collect();
        let documents: Vec<String> = lines.chunks(40).map(|document| document.join("\n")).collect();
        fs::write(bench.place.join("text.txt"), documents.join("\n\n")).map_err(at)?;
        fs::write(bench.place.join("less.txt"), documents[1..].join("\n\n")).map_err(at)?;
        for (tokenizer, size) in [("tokenizer", 400), ("words", 300)] {
            let line =
                format!("tokenizer train --vocab-size {size} --threads 1 --out {{in}}/{tokenizer} {{in}}/text.txt");
            bench.alone(&line, "")?;
        }
        // Other data and another tokenizer, for ranks that must be refused.
        for (out, tokenizer, text) in
            [("data", "tokenizer", "text"), ("less", "tokenizer", "less"), ("other", "words", "text")]
        {
            let line = format!(
                "data build --tokenizer {{in}}/{tokenizer} --held-out 0.1 --threads 1 --out {{in}}/{out} {{in}}/{text}.txt"
            );
            bench.alone(&line, "")?;
        }
        Ok(bench)
    }

    /// One process, to its end.
    pub(crate) fn alone(&self, line: &str, out: &str) -> Result {
        let mut command = Command::new(&self.binary);
        command.args(self.arguments(line, out));
        self.ends(command, Some(0), line).map(drop)
    }

    /// So many processes of a family, to their end.
    fn together(&self, family: usize, ranks: usize, line: &str, out: &str) -> Result {
        self.ends(self.mpirun(family, ranks, line, out), Some(0), line).map(drop)
    }

    fn mpirun(&self, family: usize, ranks: usize, line: &str, out: &str) -> Command {
        let mut command = Command::new(FAMILIES[family].0);
        command.args(["-n", &ranks.to_string()]);
        if family == 0 {
            // There may be fewer cores than ranks, and CI may be root.
            command.args(["--oversubscribe", "--bind-to", "none"]);
            command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        }
        command.arg(&self.binary).args(self.arguments(line, out));
        command
    }

    pub(crate) fn arguments(&self, line: &str, out: &str) -> Vec<String> {
        let line = line.replace("{in}", &self.place.to_string_lossy());
        let mut arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        if !out.is_empty() {
            arguments.extend(["--out".to_owned(), self.out(out).to_string_lossy().into_owned()]);
        }
        arguments
    }

    pub(crate) fn out(&self, name: &str) -> PathBuf {
        self.place.join("out").join(name)
    }

    pub(crate) fn start(&self, mut command: Command) -> Result<Child> {
        let file = |name| fs::File::create(self.place.join(name)).map_err(|error| error.to_string());
        command.stdin(Stdio::null()).stdout(file("stdout")?).stderr(file("stderr")?);
        command.spawn().map_err(|error| format!("cannot start {command:?}: {error}"))
    }

    /// Waits for the end, but not for ever. Gives what was printed on standard error.
    pub(crate) fn wait(&self, mut child: Child) -> Result<(Option<i32>, String)> {
        let begin = Instant::now();
        loop {
            let ended = child.try_wait().map_err(|error| error.to_string())?;
            let said =
                || String::from_utf8_lossy(&fs::read(self.place.join("stderr")).unwrap_or_default()).into_owned();
            match ended {
                Some(status) => return Ok((status.code(), said())),
                None if begin.elapsed() > PATIENCE => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("hangs:\n{}", said()));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Runs to the end; `code` is the expected exit code, any but 0 where it is none.
    fn ends(&self, command: Command, code: Option<i32>, line: &str) -> Result<String> {
        let shown = format!("{command:?}");
        let (ended, said) = self.wait(self.start(command)?)?;
        let right = code.map_or(ended != Some(0), |code| ended == Some(code));
        if right { Ok(said) } else { Err(format!("{line}\n{shown}\nended with {ended:?}:\n{said}")) }
    }

    /// What ranks exchange is measured under both families.
    fn measured(&self) -> Result {
        for (family, ranks) in [(0, 2), (1, 4)] {
            let line = "bench exchange --model bert-tiny --steps 2 --threads 1 --json --lost-after 10";
            self.ends(self.mpirun(family, ranks, line, ""), Some(0), line)?;
            let printed = fs::read_to_string(self.place.join("stdout")).map_err(|error| error.to_string())?;
            let measured: Value = serde_json::from_str(&printed).map_err(|error| format!("{error}: {printed}"))?;
            let largest = measured["transfers"].as_array().and_then(|all| all.last()).cloned().unwrap_or_default();
            let rates = ["all_to_all_gb_per_s", "all_gather_gb_per_s"].map(|name| largest[name].as_f64());
            if measured["ranks"] != ranks || rates.iter().any(|rate| rate.is_none_or(|rate| rate <= 0.0)) {
                return Err(format!("bench exchange with {ranks} ranks printed {printed}"));
            }
            println!("{}: {ranks} ranks exchange {rates:?} GB/s", FAMILIES[family].1);
        }
        Ok(())
    }

    /// Weights, moments and logs of several ranks are those of one.
    fn same_bits(&self, whole: bool) -> Result {
        for (kind, (optimizer, dtype)) in KINDS.iter().enumerate() {
            let line = format!("{PRETRAIN} --set optimizer=\"{optimizer}\" --dtype {dtype}");
            let one = format!("one-{optimizer}-{dtype}");
            self.alone(&line, &one)?;
            let all = (0..2).flat_map(|family| [2, 4].map(|ranks| (family, ranks, kind)));
            let cases: Vec<_> = if whole { all.collect() } else { CHOSEN.to_vec() };
            for (family, ranks, _) in cases.into_iter().filter(|case| case.2 == kind) {
                let begin = Instant::now();
                let several = format!("{}-{ranks}-{optimizer}-{dtype}", FAMILIES[family].1);
                self.together(family, ranks, &line, &several)?;
                self.equal(&one, &several)?;
                println!("{several}: the bits of one process, {:.1} s", begin.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }

    fn finetuning(&self) -> Result {
        let model = self.out(&format!("one-{}-{}", KINDS[0].0, KINDS[0].1));
        std::os::unix::fs::symlink(model, self.place.join("model")).map_err(|error| error.to_string())?;
        // Stopped, so that there is a checkpoint with moments; then to the end.
        for (name, rest) in [("paused", " --stop-at 3"), ("tuned", "")] {
            let line = format!("{FINETUNE}{rest}");
            self.alone(&line, &format!("{name}-1"))?;
            for (family, ranks) in [(0, 4), (1, 2)] {
                self.together(family, ranks, &line, &format!("{name}-{ranks}"))?;
                self.equal(&format!("{name}-1"), &format!("{name}-{ranks}"))?;
            }
        }
        println!("fine-tuning on 2 and 4 ranks: the bits of one process");
        let line = |name: &str| format!("{DISTIL} --cache {{in}}/kept-by-{name}");
        self.alone(&format!("{} --set accumulation=2", line("one")), "distilled-1")?;
        // Stopped in the first phase, resumed to the end, and started once more.
        for rest in [" --stop-at 2", "", ""] {
            self.together(1, 2, &format!("{}{rest}", line("two")), "distilled-2")?;
        }
        self.equal("distilled-1", "distilled-2")?;
        println!("distillation on 2 ranks, stopped and resumed: the bits of one process");
        Ok(())
    }

    /// A rank is killed, and the run resumed by another number of ranks under the other family.
    fn killed(&self, number: usize) -> Result {
        let name = format!("killed-{number}");
        let (family, ranks) = (number % 2, [4, 2][number / 2 % 2]);
        let child = self.start(self.mpirun(family, ranks, PRETRAIN, &name))?;
        let step = [4, 12, 20][number % 3];
        self.wait_for_checkpoint(&name, step)?;
        let processes = self.processes(&name)?;
        let victim = *processes.get(number % processes.len().max(1)).ok_or("no rank is running")?;
        signal("KILL", victim)?;
        let begin = Instant::now();
        let (code, said) = self.wait(child)?;
        self.gone(&name, &said)?;
        match code {
            Some(0) => println!("{name}: finished before it was killed"),
            _ => println!(
                "{name}: a rank of {ranks} died after step {step}, the rest ended with {code:?} after {:.1} s{}",
                begin.elapsed().as_secs_f64(),
                said.lines().find(|line| line.contains("was lost")).map_or(String::new(), |line| format!(": {line}"))
            ),
        }
        let others = [2, 4, 1][number % 3];
        match others {
            1 => self.alone(PRETRAIN, &name)?,
            _ => self.together(1 - family, others, PRETRAIN, &name)?,
        }
        self.equal("one-adamw-f32", &name)
    }

    /// A rank that shows no sign of life is named to the others, which end: under both families, since no `mpirun` notices.
    fn silent(&self) -> Result {
        for family in 0..2 {
            let name = format!("silent-{family}");
            let line = PRETRAIN.replace("--lost-after 10", "--lost-after 3");
            let child = self.start(self.mpirun(family, 2, &line, &name))?;
            self.wait_for_checkpoint(&name, 4)?;
            let processes = self.processes(&name)?;
            let victim = *processes.last().ok_or("no rank is running")?;
            signal("STOP", victim)?;
            let begin = Instant::now();
            let ended = self.wait(child);
            // Both mpiruns kill what is left of a job; a stopped process that outlives them must not stay.
            let _ = Command::new("kill").args(["-KILL", &victim.to_string()]).stderr(Stdio::null()).status();
            let ((code, said), seconds) = (ended?, begin.elapsed().as_secs_f64());
            let named = said.lines().find(|line| line.contains("was lost: no sign of life"));
            match named {
                Some(line) if code != Some(0) && seconds < 10.0 => println!("{name}: {seconds:.1} s: {line}"),
                _ => return Err(format!("a silent rank: ended with {code:?} after {seconds:.1} s:\n{said}")),
            }
            self.gone(&name, &said)?;
            self.alone(PRETRAIN, &name)?;
            self.equal("one-adamw-f32", &name)?;
        }
        Ok(())
    }

    /// One rank is asked to stop: all do, after the same step.
    fn asked_to_stop(&self) -> Result {
        // Fine-tuning that takes long enough.
        let finetune = FINETUNE.replace("epochs=3", "epochs=9999 --set evals_per_epoch=0.5");
        for (name, line) in [("asked", PRETRAIN), ("asked-tuning", &finetune)] {
            // Under MPICH, whose mpirun leaves the others alone.
            let child = self.start(self.mpirun(1, 2, line, name))?;
            self.wait_for_checkpoint(name, 4)?;
            let processes = self.processes(name)?;
            signal("TERM", *processes.last().ok_or("no rank is running")?)?;
            let (code, said) = self.wait(child)?;
            if code != Some(130) || !said.contains("interrupted at step") {
                return Err(format!("{name}: one rank got SIGTERM, and all ended with {code:?}:\n{said}"));
            }
            self.gone(name, &said)?;
        }
        self.alone(PRETRAIN, "asked")?;
        self.equal("one-adamw-f32", "asked")?;
        println!("SIGTERM to one rank stopped all, and one process resumed to the same bits");
        Ok(())
    }

    /// What cannot be shared is refused by name, and nothing hangs.
    fn refusals(&self) -> Result {
        let cases = [
            (PRETRAIN.replace("accumulation=4", "accumulation=3 --set batch_size=9"), "3 ranks; or set accumulation=2"),
            (format!("{PRETRAIN} --set optimizer=\"adafactor\""), "with several ranks"),
            (PRETRAIN.replace("--data {in}/data", "--data {in}/nothing"), "nothing"),
            (EMBED.to_owned(), "a sum over examples, with several ranks"),
        ];
        for (line, words) in cases {
            let said = self.ends(self.mpirun(1, 2, &line, "refused"), None, &line)?;
            if !said.contains(words) || said.contains("panicked") {
                return Err(format!("{line}\nexpected `{words}` in:\n{said}"));
            }
        }
        // A library of the other family sees worlds of one process.
        let line = format!("{PRETRAIN} --mpi-library libmpich.so.12");
        let said = self.ends(self.mpirun(0, 2, &line, "refused"), None, &line)?;
        if !said.contains("does not belong to the launcher") {
            return Err(format!("a library of the other family was not refused:\n{said}"));
        }
        println!("what cannot be shared is refused by name");
        Ok(())
    }

    /// A rank that has other things before it than the first is refused, and named.
    fn strangers(&self) -> Result {
        for (other, words) in [
            (PRETRAIN.replace("{in}/data", "{in}/less"), "data, recipe"),
            (PRETRAIN.replace("{in}/data", "{in}/other"), "data, model, recipe, tokenizer"),
            (PRETRAIN.replace("learning_rate=1e-2", "learning_rate=2e-2"), "recipe"),
            (format!("{PRETRAIN} --kernels portable"), "processor"),
        ] {
            // MPMD: each rank with a command of its own.
            let mut command = self.mpirun(1, 1, PRETRAIN, "refused");
            command.args([":", "-n", "1"]).arg(&self.binary).args(self.arguments(&other, "refused"));
            let said = self.ends(command, None, &other)?;
            if !said.contains("rank 1 on") || !said.contains(&format!("differs from rank 0 in: {words}.")) {
                return Err(format!("a rank with other {words} was not named:\n{said}"));
            }
        }
        println!("a rank with other data, recipe, tokenizer or kernels is refused by name");
        Ok(())
    }

    /// Waits for the checkpoint of a step.
    pub(crate) fn wait_for_checkpoint(&self, name: &str, step: u64) -> Result {
        let (place, begin) = (self.out(name).join(format!("checkpoints/step-{step}")), Instant::now());
        while !place.exists() {
            if begin.elapsed() > PATIENCE {
                return Err(format!("{}: no checkpoint", place.display()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The ranks of a run, by their ids in order.
    pub(crate) fn processes(&self, name: &str) -> Result<Vec<u32>> {
        let (out, mut found) = (self.out(name).to_string_lossy().into_owned(), Vec::new());
        for entry in fs::read_dir("/proc").map_err(|error| error.to_string())?.flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            let is_ours = words.next() == Some(self.binary.as_os_str().as_encoded_bytes());
            if is_ours && words.any(|word| word == out.as_bytes()) {
                found.push(id);
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Demands that no rank is left.
    pub(crate) fn gone(&self, name: &str, said: &str) -> Result {
        let begin = Instant::now();
        loop {
            let left = self.processes(name)?;
            if left.is_empty() {
                return Ok(());
            }
            if begin.elapsed() > Duration::from_secs(30) {
                return Err(format!("{name}: {left:?} still run:\n{said}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Demands that two runs left the same: model, last checkpoint, log.
    pub(crate) fn equal(&self, one: &str, other: &str) -> Result {
        let (left, right) = (self.results(one)?, self.results(other)?);
        let names: Vec<&String> = left.keys().chain(right.keys()).collect();
        for name in names {
            if left.get(name) != right.get(name) {
                return Err(format!(
                    "{other} differs from {one} in {name}: {:?} and {:?}",
                    left.get(name).map(|bytes| shown(bytes)),
                    right.get(name).map(|bytes| shown(bytes))
                ));
            }
        }
        Ok(())
    }

    fn results(&self, name: &str) -> Result<BTreeMap<String, Vec<u8>>> {
        let out = self.out(name);
        let mut files = BTreeMap::new();
        let mut folders = vec![out.clone()];
        if out.join("checkpoints").is_dir() {
            let all = fs::read_dir(out.join("checkpoints")).map_err(|error| error.to_string())?;
            folders.extend(all.flatten().map(|entry| entry.path()));
        }
        for folder in folders {
            for entry in fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?.flatten() {
                let path = entry.path();
                if path.extension().is_some_and(|extension| extension == "safetensors") {
                    let name = path.strip_prefix(&out).unwrap_or(&path).display().to_string();
                    files.insert(name, fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?);
                }
            }
        }
        if files.is_empty() {
            return Err(format!("{}: nothing is there", out.display()));
        }
        let log = fs::read_to_string(out.join("metrics.jsonl")).map_err(|error| error.to_string())?;
        for (number, line) in log.lines().enumerate() {
            let mut line: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
            if let Some(fields) = line.as_object_mut() {
                fields.retain(|name, _| !["seconds", "tokens_per_s"].contains(&name.as_str()));
            }
            files.insert(format!("metrics.jsonl:{number}"), line.to_string().into_bytes());
        }
        Ok(files)
    }
}

fn shown(bytes: &[u8]) -> String {
    match bytes.len() {
        ..400 => String::from_utf8_lossy(bytes).into_owned(),
        length => format!("{length} bytes"),
    }
}

fn signal(name: &str, process: u32) -> Result {
    succeed(Command::new("kill").args([&format!("-{name}"), &process.to_string()]))
}
