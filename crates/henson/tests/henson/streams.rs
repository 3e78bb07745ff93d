//! Every command where something around it fails: standard error is lost, standard output is full, no thread can be
//! started, the terminal hangs up.
#![cfg(target_os = "linux")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// What a command prints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prints {
    /// The same each time.
    Equal,
    /// The same but for numbers, because of times and speeds among them.
    Times,
}

/// Each command with arguments that make it short. `OUT` is a place of the run's own; other capitals are what all share.
const COMMANDS: [(Prints, &str); 37] = [
    (Prints::Times, "tokenizer train --vocab-size 300 --out OUT TEXT"),
    (Prints::Equal, "tokenizer encode --model MLM word40"),
    (Prints::Equal, "tokenizer info --model MLM"),
    (Prints::Equal, "tokenizer extend --model MLM --pieces WORDS --out OUT"),
    (Prints::Times, "data build --tokenizer MLM --held-out 0.3 --threads 2 --out OUT TEXT"),
    (Prints::Equal, "data show SHARDS --sequence-length 32"),
    (Prints::Equal, "data stats SHARDS"),
    (Prints::Equal, "data export SHARDS --sequence-length 32 --batches 2 --batch-size 2 --out OUT"),
    (
        Prints::Times,
        "pretrain --model bert-tiny --data SHARDS --out OUT --json --set steps=3 --set batch_size=2 --set log_every=1",
    ),
    (
        Prints::Times,
        "finetune --task classify --model MLM --train LABELS --dev LABELS --out OUT --json --set max_length=32",
    ),
    (
        Prints::Equal,
        "finetune --task classify --model MLM --train LABELS --dev LABELS --out OUT --restarts 2 --set epochs=1",
    ),
    (
        Prints::Equal,
        "finetune --task ner --model TAG --train TAGS --dev TAGS --out OUT --frozen --layers last --set epochs=1",
    ),
    (
        Prints::Equal,
        "distil --task classify --teacher CLASSIFY --model bert-L2-H128 --train LABELS --dev LABELS --out OUT --set epochs=1",
    ),
    (Prints::Equal, "probe --model MLM --task pos --train TAGS --dev TAGS --out OUT --set epochs=1"),
    (Prints::Equal, "predict --task classify --model CLASSIFY --data LABELS --out OUT"),
    (Prints::Equal, "eval --task classify --model CLASSIFY --data LABELS"),
    (Prints::Times, "eval --task perplexity --model MLM --data TEXT --limit 3"),
    (Prints::Times, "ablate SET --data SHARDS --out OUT"),
    (Prints::Equal, "report RUN --out OUT"),
    (Prints::Equal, "fill --model MLM '[MASK] word40'"),
    (Prints::Equal, "classify --model CLASSIFY word40"),
    (Prints::Equal, "tag --model TAG word40"),
    (Prints::Equal, "answer --model ANSWER --question word1 --passage word2"),
    (Prints::Equal, "choose --model CHOOSE --context word1 word2 word3"),
    (Prints::Equal, "rerank --model RERANK --query word1 word2 word3"),
    (Prints::Equal, "generate --model WRITE --ids --max-new-tokens 4 '5 6'"),
    (Prints::Equal, "search TEXT word40 --model MLM --no-cache"),
    (Prints::Equal, "mine --train PAIRS.jsonl --model MLM --out OUT"),
    (Prints::Equal, "embed --model MLM word40"),
    (Prints::Equal, "features --model MLM word40"),
    (Prints::Equal, "info MLM"),
    (Prints::Equal, "convert MLM OUT"),
    (Prints::Times, "bench infer --model bert-tiny --batch 1 --seq 8 --steps 1"),
    (Prints::Equal, "plan SET/one.toml --gpus 8"),
    // Alone, it only says what it needs.
    (Prints::Equal, "bench exchange --model bert-tiny"),
    // The whole of it takes long; here it only has to refuse a directory of somebody else's.
    (Prints::Equal, "demo --out SET"),
    // Another mistake, so that there is a message.
    (Prints::Equal, "fill --model MLM 'nothing to fill'"),
];

struct Place {
    directory: TempDir,
}

impl Place {
    /// A directory with what the commands share.
    fn new() -> Self {
        let place = Self { directory: TempDir::new().unwrap() };
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
        let models = [
            ("MLM", "mlm"),
            ("CLASSIFY", "sequence"),
            ("TAG", "token"),
            ("ANSWER", "qa"),
            ("CHOOSE", "choice"),
            ("RERANK", "regression"),
        ];
        for (name, head) in models {
            std::fs::create_dir(place.at(name)).unwrap();
            for file in ["model.safetensors", "config.json"] {
                std::fs::copy(data.join("bert-golden").join(head).join(file), place.at(name) + "/" + file).unwrap();
            }
            std::fs::copy(data.join("likelihood/vocab.txt"), place.at(name) + "/vocab.txt").unwrap();
        }
        std::fs::create_dir(place.at("WRITE")).unwrap();
        for file in ["gpt2/model.safetensors", "gpt2/config.json", "tokenizer.json"] {
            let name = file.rsplit('/').next().unwrap_or(file);
            std::fs::copy(data.join("generation").join(file), place.at("WRITE") + "/" + name).unwrap();
        }
        let document = |i: usize| format!("word{} word{} word4{}.\nword1 word{}.\n", i, i + 2, i % 9, 9 - i % 9);
        std::fs::write(place.at("TEXT"), (0..12).map(document).collect::<Vec<_>>().join("\n")).unwrap();
        std::fs::write(place.at("WORDS"), "puppeteer\n").unwrap();
        let label = |i: usize| format!("{{\"text\": \"word{i}\", \"label\": \"{}\"}}\n", ["LABEL_0", "LABEL_1"][i % 2]);
        std::fs::write(place.at("LABELS"), (0..8).map(label).collect::<String>()).unwrap();
        std::fs::rename(place.at("LABELS"), place.at("LABELS.jsonl")).unwrap();
        std::fs::copy(data.join("finetune/tag.conll"), place.at("TAGS")).unwrap();
        std::fs::copy(data.join("finetune/embed.jsonl"), place.at("PAIRS.jsonl")).unwrap();
        std::fs::create_dir(place.at("SET")).unwrap();
        let recipe = "model = \"bert-tiny\"\nsteps = 2\nbatch_size = 2\nsequence_length = 32\n";
        std::fs::write(place.at("SET/one.toml"), recipe).unwrap();
        for line in [
            "data build --tokenizer MLM --held-out 0.3 --out SHARDS TEXT",
            "pretrain --model bert-tiny --data SHARDS --out RUN --set steps=2 --set batch_size=2",
        ] {
            let output = place.command(line, "OUT").output().unwrap();
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        }
        place
    }

    fn at(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// A command of the table, run in the directory; what it writes is called `out`.
    fn command(&self, line: &str, out: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
        let (line, quoted) =
            line.split_once('\'').map_or((line, None), |(line, quoted)| (line, quoted.strip_suffix('\'')));
        let words = line.split_whitespace().chain(quoted).map(|word| match word {
            "OUT" => out,
            "LABELS" => "LABELS.jsonl",
            word => word,
        });
        command.args(words).current_dir(self.directory.path()).env_remove("HENSON_KERNELS").stdin(Stdio::null());
        command
    }
}

/// What must not change: how it ended and what it printed.
fn comparable(output: &Output, prints: Prints, out: &str) -> (Option<i32>, String) {
    let text = String::from_utf8(output.stdout.clone()).unwrap().replace(out, "OUT");
    let text = match prints {
        Prints::Equal => text,
        Prints::Times => text.split(|c: char| c.is_ascii_digit() || "+-.e".contains(c)).collect(),
    };
    (output.status.code(), text)
}

/// A file that cannot be written to.
fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// The writing end of a pipe that nobody reads from.
fn closed_pipe() -> std::io::PipeWriter {
    std::io::pipe().unwrap().1
}

#[test]
fn the_table_has_every_command() {
    let help = Command::new(env!("CARGO_BIN_EXE_henson")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let listed = help.split_once("Commands:").unwrap().1.split_once("Options:").unwrap().0;
    let names =
        listed.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).filter(|name| !name.is_empty());
    // `serve` has tests of its own below; the others print and do nothing else.
    for name in names.filter(|name| !["serve", "help", "settings", "completions"].contains(name)) {
        assert!(COMMANDS.iter().any(|(_, line)| line.split(' ').next() == Some(name)), "`{name}` is not in the table");
    }
}

#[test]
fn no_command_needs_standard_error() {
    let place = Place::new();
    for (number, (prints, line)) in COMMANDS.into_iter().enumerate() {
        let out = |kind: &str| format!("out-{number}-{kind}");
        let run = |kind: &str, standard_error: Stdio| {
            let output = place.command(line, &out(kind)).stderr(standard_error).output().unwrap();
            comparable(&output, prints, &out(kind))
        };
        let open = run("open", Stdio::null());
        assert!(open.0.is_some_and(|code| code < 2), "{line}: {open:?}");
        assert_eq!(run("full", full().into()), open, "{line}, with a full disk");
        assert_eq!(run("pipe", closed_pipe().into()), open, "{line}, with a closed pipe");
    }
    // Closed altogether; the system's runtime looks after that for all commands alike.
    let line = COMMANDS.iter().find(|(_, line)| line.starts_with("fill")).unwrap().1;
    let run = |script: &str| {
        let henson = place.command(line, "OUT");
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh"]).arg(henson.get_program()).args(henson.get_args());
        comparable(&shell.current_dir(place.directory.path()).output().unwrap(), Prints::Equal, "OUT")
    };
    assert_eq!(run("exec \"$@\" 2>&-"), run("exec \"$@\""));
}

/// Without threads a command takes longer, or says that it needs them.
#[test]
fn no_command_panics_without_threads() {
    let place = Place::new();
    for (number, (prints, line)) in COMMANDS.into_iter().enumerate() {
        let out = |kind: &str| format!("out-{number}-{kind}");
        let mut run = place.command(line, &out("none"));
        // No machine has room for such a stack, so that every start of a thread fails.
        let output = run.env("RUST_MIN_STACK", (1u64 << 60).to_string()).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!message.contains("panicked"), "{line}: {message}");
        let refused = output.status.code() == Some(1) && message.contains("thread");
        if !refused {
            let open = place.command(line, &out("open")).output().unwrap();
            assert!(
                open.status.code().is_some_and(|code| code < 2),
                "{line}: {}",
                String::from_utf8_lossy(&open.stderr)
            );
            assert_eq!(comparable(&output, prints, &out("none")), comparable(&open, prints, &out("open")), "{line}");
        }
    }
    let mut serve = place.command("serve --model MLM --port 0", "OUT");
    let output = serve.env("RUST_MIN_STACK", (1u64 << 60).to_string()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && !message.contains("panicked"), "{message}");
    assert!(message.contains("thread"), "{message}");
}

#[test]
fn standard_output_that_is_full_is_an_error_and_a_closed_one_is_not() {
    let place = Place::new();
    let training =
        "pretrain --model bert-tiny --data SHARDS --json --set steps=3 --set batch_size=2 --set log_every=1 --out OUT";
    for (number, line) in
        ["fill --model MLM '[MASK] word40'", "info MLM", "--help", "--version", training].iter().enumerate()
    {
        let out = |kind: &str| format!("out-{number}-{kind}");
        let run = place.command(line, &out("full")).stdout(full()).output().unwrap();
        let message = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.code() == Some(1) && message.contains("No space left on device"), "{line}: {message}");
        let run = place.command(line, &out("pipe")).stdout(closed_pipe()).output().unwrap();
        assert_eq!(run.status.code(), Some(0), "{line}: {}", String::from_utf8_lossy(&run.stderr));
    }
    // The run itself was done in both cases.
    assert!(Path::new(&place.at("out-4-full/model.safetensors")).exists());
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// A server, and where it listens.
fn serve(place: &Place, flags: &str, standard_error: Stdio) -> (Child, String) {
    let mut serve = place.command(&format!("serve --model MLM --port 0 --json {flags}"), "OUT");
    let mut child = serve.stdout(Stdio::piped()).stderr(standard_error).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    (child, line["address"].as_str().unwrap().trim_start_matches("http://").to_owned())
}

fn get(address: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn refused_requests_are_logged_at_a_limited_rate() {
    let (child, address) = serve(&Place::new(), "", Stdio::piped());
    for _ in 0..50 {
        assert!(get(&address, "/nowhere").starts_with("HTTP/1.1 404"));
    }
    signal(&child, "-INT");
    let log = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    let lines = log.lines().filter(|line| line.contains("\"status\":404")).count();
    assert_eq!(lines, 10, "{log}");
}

#[test]
fn a_server_answers_though_its_log_is_lost() {
    let place = Place::new();
    for standard_error in [Stdio::from(full()), closed_pipe().into()] {
        let (mut child, address) = serve(&place, "--log-requests", standard_error);
        let health = || get(&address, "/health");
        assert!(health().starts_with("HTTP/1.1 200"));
        // A reload, which logs, too.
        signal(&child, "-HUP");
        std::thread::sleep(Duration::from_millis(50));
        assert!(health().starts_with("HTTP/1.1 200"));
        signal(&child, "-INT");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

/// A run that takes some seconds.
const LONG: &str = "pretrain --model bert-tiny --data SHARDS --out OUT --threads 1 --set steps=1500 --set batch_size=4 --set \
                    checkpoint_every=0 --set eval_every=0 --set eval_sequences=2 --set sequence_length=32 --set \
                    log_every=1 --set config.hidden_size=64";

fn wait_for_first_steps(place: &Place, out: &str) {
    let begin = Instant::now();
    while std::fs::read_to_string(place.at(out) + "/metrics.jsonl").unwrap_or_default().lines().count() < 2 {
        assert!(begin.elapsed().as_secs() < 60, "training does not begin");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_hangup_saves_a_checkpoint_and_the_run_ends_with_the_same_bits() {
    let place = Place::new();
    // The terminal is gone: so is standard error. Whoever runs the tests may ignore hangups, which would be inherited.
    let henson = place.command(LONG, "hung-up");
    let mut heeding = Command::new("env");
    heeding.arg("--default-signal=HUP").arg(henson.get_program()).args(henson.get_args());
    heeding.current_dir(place.directory.path()).stdout(Stdio::null()).stderr(closed_pipe());
    let mut child = heeding.spawn().unwrap();
    wait_for_first_steps(&place, "hung-up");
    // They come in pairs, from the terminal and from the shell.
    signal(&child, "-HUP");
    signal(&child, "-HUP");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!Path::new(&place.at("hung-up/model.safetensors")).exists(), "it was interrupted before it was done");
    for out in ["hung-up", "whole"] {
        let output = place.command(LONG, out).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && message.contains("resuming") == (out == "hung-up"), "{message}");
    }
    let weights = |out: &str| std::fs::read(place.at(out) + "/model.safetensors").unwrap();
    assert!(weights("hung-up") == weights("whole"));
}

#[test]
fn a_hangup_that_was_ignored_before_stays_ignored() {
    let place = Place::new();
    let henson = place.command(LONG, "nohup");
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(henson.get_program()).args(henson.get_args());
    let mut child = shell.current_dir(place.directory.path()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_first_steps(&place, "nohup");
    signal(&child, "-HUP");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
