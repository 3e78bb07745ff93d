//! Labels as other people write them: very many, and hostile ones.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

struct Place(TempDir);

impl Place {
    /// A directory with a small model in it.
    fn new() -> Self {
        let place = Self(TempDir::new().unwrap());
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
        std::fs::create_dir(place.at("model")).unwrap();
        for name in ["model.safetensors", "config.json"] {
            std::fs::copy(data.join("bert-golden/mlm").join(name), place.at("model").join(name)).unwrap();
        }
        std::fs::copy(data.join("likelihood/vocab.txt"), place.at("model/vocab.txt")).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap()
    }

    #[track_caller]
    fn works(&self, arguments: &str) -> Output {
        let mut henson = Command::new(env!("CARGO_BIN_EXE_henson"));
        let output = henson.args(arguments.split_whitespace()).current_dir(self.0.path()).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }
}

#[test]
fn five_thousand_labels() {
    let place = Place::new();
    let row = |i: usize| format!("word{} word{},label-{i}\n", i % 50, i / 50);
    let rows = |count: usize| (0..count).map(row).collect::<String>();
    std::fs::write(place.at("train.csv"), "text,label\n".to_owned() + &rows(5000)).unwrap();
    std::fs::write(place.at("dev.csv"), "text,label\n".to_owned() + &rows(600)).unwrap();
    let finetune = "finetune --task classify --model model --train train.csv --dev dev.csv --out run --set epochs=1 --set \
                    batch_size=500 --set max_length=8";
    place.works(finetune);
    let size = std::fs::metadata(place.at("run/results.json")).unwrap().len();
    assert!(size < 2 << 20, "{size} bytes");
    let results: Value = serde_json::from_str(&place.read("run/results.json")).unwrap();
    let confusions = results["scores"]["confusions"].as_array().unwrap();
    let counts: Vec<u64> = confusions.iter().map(|pair| pair["count"].as_u64().unwrap()).collect();
    assert!(!counts.is_empty() && counts.len() <= 200 && counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
    // Whoever reads it can: the same command again, reports, scores.
    place.works(finetune);
    place.works("report run --out report.html");
    assert!(place.read("report.html").contains("Most frequent confusions"));
    let scores = place.works("eval --task classify --model run --data dev.csv");
    assert!(String::from_utf8(scores.stdout).unwrap().contains("most frequent of 5,000 labels"));
    assert!(place.read("run/README.md").len() < 8000);
}

/// What version 0.1 wrote.
#[test]
fn a_table_of_all_labels_by_all_is_still_shown() {
    let place = Place::new();
    std::fs::create_dir(place.at("old")).unwrap();
    std::fs::write(place.at("old/metrics.jsonl"), "").unwrap();
    let scores = r#"{"accuracy": 0.5, "confusion": {"labels": ["cat", "dog"], "counts": [[3, 1], [4, 2]]}}"#;
    std::fs::write(place.at("old/results.json"), format!("{{\"scores\": {scores}}}")).unwrap();
    place.works("report old --out report.html");
    let page = place.read("report.html");
    let (first, second) = (page.find(">dog</td>").unwrap(), page.find(">cat</td>").unwrap());
    assert!(
        first < second && page.contains(">4</td>") && !page.contains(">3</td>"),
        "mistakes alone, the most frequent first"
    );
}

#[test]
fn hostile_labels_reach_nobody_raw() {
    let place = Place::new();
    let label = "\x1b[31m<script>|";
    let row = |i: usize| format!("word{i},{}\n", if i.is_multiple_of(2) { label } else { "plain" });
    std::fs::write(place.at("data.csv"), "text,label\n".to_owned() + &(0..8).map(row).collect::<String>()).unwrap();
    let commands = [
        "finetune --task classify --model model --train data.csv --dev data.csv --out run --set epochs=1 --set max_length=8",
        "eval --task classify --model run --data data.csv",
        "classify --model run word1",
        "report run",
        "info run",
    ];
    for line in commands {
        let output = place.works(line);
        for bytes in [output.stdout, output.stderr] {
            assert!(!bytes.contains(&0x1b), "{line}: {}", String::from_utf8_lossy(&bytes));
        }
    }
    let shown = String::from_utf8(place.works("classify --model run word1").stdout).unwrap();
    assert!(shown.contains("\\u{1b}[31m<script>|"), "{shown}");
    // For scripts it is the label itself, as JSON writes it.
    let line = String::from_utf8(place.works("classify --json --model run word0").stdout).unwrap();
    assert!(line.contains("\\u001b[31m<script>|"), "{line}");
    let card = place.read("run/README.md");
    assert!(!card.contains('\x1b') && !card.contains("<script>") && card.contains("&lt;script&gt;\\|"), "{card}");
    let page = place.read("run/report.html");
    assert!(!page.contains('\x1b') && !page.contains("[31m<script>") && page.contains("[31m&lt;script&gt;|"));
}
