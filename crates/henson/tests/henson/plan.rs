//! `henson plan` as a user meets it: predictions that can be followed by hand, and clear words for what it cannot know.

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// N of bert-tiny with its heads.
const PARAMETERS: f64 = 4_433_468.0;

fn henson(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.arg("plan").args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn plan(arguments: &[&str]) -> Value {
    let output = henson(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn fails(code: i32, arguments: &[&str], parts: &[&str]) {
    let output = henson(arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
    }
}

/// What one process and two might have been measured to do: 8 ms for 1,024 tokens, 2 ms for the optimizer; 4N bytes each way in 8 ms.
fn rates() -> [Value; 2] {
    [
        json!({
            "mode": "train", "device": "cpu (avx2, 1 threads)", "model": "bert-tiny", "batch": 8, "seq": 128, "dtype": "f32",
            "threads": 1, "ms": 10.0, "tokens_per_s": 102_400.0,
            "operations": [{"kind": "linear", "ms": 5.0}, {"kind": "gradient norm", "ms": 0.5}, {"kind": "optimizer", "ms": 1.5}],
        }),
        json!({
            "mode": "exchange", "model": "bert-tiny", "dtype": "f32", "ranks": 2, "hosts": 1, "threads": 1, "engine": "by hand",
            "parameters": PARAMETERS as u64, "latency_us": 10.0, "values_us": 50.0,
            "transfers": [{
                "bytes": 17_733_872, "sent_bytes": 8_866_936, "all_to_all_ms": 4.0, "all_to_all_gb_per_s": 2.208,
                "all_gather_ms": 4.0, "all_gather_gb_per_s": 2.208,
            }],
            "update": {
                "ms": 11.0, "all_to_all_ms": 4.0, "add_ms": 1.0, "norm_ms": 0.5, "optimizer_ms": 1.0, "all_gather_ms": 4.0,
            },
        }),
    ]
}

struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

const TINY: &str = "model = \"bert-tiny\"\nsteps = 1000\nbatch_size = 32\nsequence_length = 128\n";

#[test]
fn measured_rates_give_times_that_can_be_followed_by_hand() {
    let place = Place::new();
    let recipe = place.file("recipe.toml", TINY);
    let [train, exchange] = rates();
    let rates = place.file("rates.jsonl", &format!("{train}\n\n{exchange}\n"));
    let plan = plan(&[&recipe, "--ranks", "1,2,3,4", "--rates", &rates, "--network", "1"]);
    assert_eq!((&plan["parameters"], &plan["steps"], &plan["per_node"]), (&json!(4_433_468), &json!(1000), &json!(2)));
    assert_eq!(plan["allowed"], json!([1, 2, 4, 8, 16, 32]));
    let row = |i: usize, name: &str| plan["rows"][i][name].as_f64().unwrap();
    let near = |i, name, expected: f64| {
        let found = row(i, name);
        assert!((found - expected).abs() < 2e-4 * expected.max(1.0), "{name} of row {i}: {found}, expected {expected}");
    };
    // Alone: four times 1,024 tokens, and the optimizer.
    for (name, expected) in
        [("passes_ms", 32.0), ("adding_ms", 0.0), ("exchange_ms", 0.0), ("update_ms", 2.0), ("step_ms", 34.0)]
    {
        near(0, name, expected);
    }
    near(0, "seconds", 34.0);
    near(0, "tokens_per_s", 4096.0 / 0.034);
    // Two: half of the tokens; N/2 numbers added, 4N bytes at 2.208 GB/s, two messages, another's small values, half of the optimizer.
    for (name, expected) in
        [("passes_ms", 16.0), ("adding_ms", 1.0), ("exchange_ms", 8.0 + 0.02 + 0.05), ("update_ms", 1.0)]
    {
        near(1, name, expected);
    }
    near(1, "efficiency", 34.0 / (2.0 * 26.07));
    near(1, "sent_mb", 4.0 * PARAMETERS / 1e6);
    assert_eq!(row(1, "network_mb"), 0.0);
    // Three do not divide 32 sequences.
    assert!(plan["rows"][2]["problem"].as_str().unwrap().contains("a multiple of 3"), "{}", plan["rows"][2]);
    // Four on two machines: 2N bytes inside, 4N at 1 GB/s, six messages, three others.
    near(3, "exchange_ms", 4.0 + 4.0 * PARAMETERS / 1e6 + 0.06 + 0.15);
    near(3, "adding_ms", 1.5);
    near(3, "network_mb", 4.0 * PARAMETERS / 1e6);
    // The second process makes 34 ms to 26, less than half of what it could.
    assert_eq!(plan["pays_up_to"], 1);
    // The first collects two moments for checkpoints: 8N bytes.
    let more = row(1, "first_memory_mib") - row(1, "memory_mib");
    assert!((more - 8.0 * PARAMETERS / 1_048_576.0).abs() <= 1.0, "{more}");
    let texts = |name: &str| plan[name].to_string();
    assert!(texts("measured").contains("bert-tiny") && texts("measured").contains("--network"), "{plan}");
    assert!(!texts("assumed").contains("GB/s") && texts("assumed").contains("overlapped"), "{plan}");
}

#[test]
fn what_is_not_measured_is_named_as_assumed() {
    let place = Place::new();
    let recipe = place.file("recipe.toml", TINY);
    let [train, _] = rates();
    let rates = place.file("rates.jsonl", &train.to_string());
    let plan = plan(&[&recipe, "--ranks", "8", "--rates", &rates, "--set", "sequence_length=256", "--dtype", "bf16"]);
    let assumed = plan["assumed"].to_string();
    for part in ["GB/s each way between machines", "per FLOP", "bf16 as fast as f32", "20 µs", "additions"] {
        assert!(assumed.contains(part), "expected `{part}` in {assumed}");
    }
    assert!(!assumed.contains("an optimizer"), "{assumed}");
    // Longer sequences: twice the tokens, each with two layers of 24·H² + 4·S·H and 15% of predictions.
    let flops = |s: f64, predicted: f64| {
        2.0 * (24.0 * 128.0 * 128.0 + 4.0 * s * 128.0) + predicted / s * 2.0 * 128.0 * (128.0 + 30522.0)
    };
    let expected = 8.0 * 8.0 * flops(256.0, 38.0) / flops(128.0, 19.0);
    let found = plan["rows"][0]["passes_ms"].as_f64().unwrap();
    assert!((found - expected).abs() < 1e-3, "{found}, expected {expected}");
}

/// The design's figures for GPUs, all of them assumed, and what the paper's recipe would do with them.
#[test]
fn gpus_are_predicted_by_assumptions_alone() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/bert-base.toml");
    let plan = plan(&[recipe, "--gpus", "1024"]);
    assert_eq!(plan["measured"], json!([]));
    assert!(plan["assumed"].to_string().contains("this version has one level"), "{plan}");
    let ranks: Vec<u64> = plan["rows"].as_array().unwrap().iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    let row = |i: usize, name: &str| plan["rows"][i][name].as_f64().unwrap();
    // 110 million parameters, f32 gradients and weights: 8N·7/8 at 350 GB/s, 14 messages.
    let expected = 8.0 * 110_106_428.0 * 7.0 / 8.0 / 350e6 + 0.014;
    assert!((row(3, "exchange_ms") - expected).abs() < 1e-3, "{}", row(3, "exchange_ms"));
    // Of 256 sequences few are left for each of many GPUs.
    assert!((0.7..0.8).contains(&row(3, "efficiency")) && row(8, "efficiency") < 0.1);
    assert_eq!(plan["pays_up_to"], 8);
    // 512 GPUs do not divide 256 sequences.
    assert!(plan["rows"][9]["problem"].is_string());
    let printed = String::from_utf8(henson(&[recipe, "--gpus", "8"]).stdout).unwrap();
    assert!(printed.contains("assumed   350 GB/s") && printed.contains("it pays up to"), "{printed}");
}

#[test]
fn mistakes_get_a_clear_word() {
    let place = Place::new();
    let recipe = place.file("recipe.toml", TINY);
    fails(2, &[&recipe], &["--ranks", "--gpus"]);
    fails(2, &[&recipe, "--ranks", "2", "--gpus", "2"], &["--gpus"]);
    fails(2, &[&recipe, "--ranks", "0"], &["from 1 to"]);
    fails(2, &[&recipe, "--ranks", "2", "--network", "0"], &["above 0"]);
    fails(1, &[&recipe, "--ranks", "2"], &["bench train", "--tokens-per-second"]);
    fails(1, &["--gpus", "2", "--model", "bert-tiny", "--epochs", "2"], &["epochs", "--data DIR"]);
    fails(1, &[&recipe, "--ranks", "2", "--rates", "missing.jsonl"], &["missing.jsonl"]);
    let [train, exchange] = rates();
    let on_cpu = place.file("cpu.jsonl", &train.to_string());
    fails(1, &[&recipe, "--gpus", "2", "--rates", &on_cpu], &["avx2", "--ranks"]);
    let infer = place.file("infer.jsonl", &format!("{train}\n{{\"mode\": \"infer\"}}"));
    fails(1, &[&recipe, "--ranks", "2", "--rates", &infer], &["line 2", "`infer`", "bench exchange"]);
    let cut = place.file("cut.jsonl", "{\"mode\": \"tr");
    fails(1, &[&recipe, "--ranks", "2", "--rates", &cut], &["cut.jsonl, line 1"]);
    let zero = place.file("zero.jsonl", &train.to_string().replace("\"ms\":10.0", "\"ms\":1.0"));
    fails(1, &[&recipe, "--ranks", "2", "--rates", &zero], &["cannot take 1 ms"]);
    let mut vast = train.clone();
    (vast["batch"], vast["seq"]) = (json!(1u64 << 40), json!(1u64 << 40));
    let vast = place.file("vast.jsonl", &vast.to_string());
    fails(1, &[&recipe, "--ranks", "2", "--rates", &vast], &["at most 16777216"]);
    let mut alone = exchange;
    alone["ranks"] = json!(1);
    let alone = place.file("alone.jsonl", &alone.to_string());
    fails(1, &[&recipe, "--ranks", "2", "--rates", &alone, "--tokens-per-second", "1e5"], &["no transfers"]);
}
