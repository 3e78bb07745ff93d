//! Settings from the command line: plain flags, mistakes, the list of all, completions, and that the documents have that list.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn henson(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_henson")).args(arguments).env_remove("HENSON_KERNELS").output().unwrap()
}

#[track_caller]
fn works(arguments: &[&str]) -> String {
    let output = henson(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
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

#[test]
fn plain_flags_are_settings() {
    let place = tempfile::TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
    let file = |name: &str| data.join(name).display().to_string();
    std::fs::create_dir(at("model")).unwrap();
    for name in ["model.safetensors", "config.json"] {
        std::fs::copy(data.join("bert-golden/sequence").join(name), at(&format!("model/{name}"))).unwrap();
    }
    std::fs::copy(data.join("likelihood/vocab.txt"), at("model/vocab.txt")).unwrap();
    let train = file("finetune/classify.jsonl");
    let other = at("x");
    let finetune = ["finetune", "--task", "classify", "--model", &at("model"), "--train", &train, "--dev", &train];
    let run = |out: &str, more: &[&str]| {
        works(&[&finetune[..], &["--out", &at(out)], more].concat());
        std::fs::read_to_string(at(&format!("{out}/recipe.toml"))).unwrap()
    };
    let by_flags = run("flags", &["--epochs", "2", "--learning-rate", "1e-3", "--batch-size", "4"]);
    let by_sets = run("sets", &["--set", "epochs=2", "--set", "learning_rate=1e-3", "--set", "batch_size=4"]);
    assert!(by_flags.contains("epochs = 2.0") && by_flags.contains("learning_rate = 0.001"), "{by_flags}");
    assert_eq!(by_flags, by_sets);

    let twice = [&finetune[..], &["--out", &other, "--epochs", "2", "--set", "epochs=3"]].concat();
    fails(2, &twice, &["--epochs 2 and --set epochs=3 set the same value"]);
    let wrong = [&finetune[..], &["--out", &other, "--set", "learning-rat=1"]].concat();
    fails(1, &wrong, &["unknown setting `learning-rat`: did you mean `learning_rate`?", "henson help settings"]);
    let dry = ["pretrain", "--data", "nowhere", "--dry-run", "--batch-size", "0"];
    fails(1, &dry, &["`batch_size` is 0"]);
}

#[test]
fn a_size_has_no_weights() {
    let arguments = ["finetune", "--task", "classify", "--model", "bert-mini", "--train", "x.csv", "--out", "nowhere"];
    fails(
        1,
        &arguments,
        &["bert-mini is a size, which has no weights", "henson pretrain --model bert-mini", "--model DIR"],
    );
    fails(1, &["fill", "--model", "bert-base", "[MASK]"], &["bert-base is a size"]);
    works(&["info", "bert-mini"]);
}

#[test]
fn both_spellings() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/henson-12m");
    let embed = |flag: &str| works(&["embed", "--json", flag, "--model", model.to_str().unwrap(), "a text"]);
    assert_eq!(embed("--normalize"), embed("--normalise"));
    assert_ne!(embed("--normalize"), embed("--normalize=false"));
}

#[test]
fn all_settings_are_listed() {
    let help = works(&["help", "settings"]);
    for part in
        ["learning_rate = 0.0001", "Peak learning rate", "whole-words", "phase.N.steps", "layer_decay", "lstm_layers"]
    {
        assert!(help.contains(part), "expected `{part}` in: {help}");
    }
    // The help breaks lines elsewhere.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&help).contains(&words(&works(&["settings"]))));
    let lines = works(&["settings", "finetune", "--json"]);
    let line: Value =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).find(|l: &Value| l["key"] == "clip").unwrap();
    assert_eq!((line["recipe"].as_str(), line["default"].as_str()), (Some("finetune"), Some("1.0")));
}

/// The tables of the documents are what `settings --markdown` prints. With HENSON_UPDATE_DOCS=1 the test writes them.
#[test]
fn documents_have_the_same_list() {
    for (document, recipe) in
        [("recipes", "pretrain"), ("finetuning", "finetune"), ("finetuning", "tagger"), ("probing", "probe")]
    {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/{document}.md"));
        let text = std::fs::read_to_string(&path).unwrap();
        let table = works(&["settings", recipe, "--markdown"]);
        let mark = format!("<!-- `henson settings {recipe} --markdown` -->\n\n");
        let (before, rest) = text.split_once(&mark).expect(document);
        let (_, after) = rest.split_once("\n\n").unwrap_or((rest, ""));
        if std::env::var_os("HENSON_UPDATE_DOCS").is_some() {
            let after = if after.is_empty() { String::new() } else { format!("\n{after}") };
            std::fs::write(&path, format!("{before}{mark}{table}{after}")).unwrap();
            continue;
        }
        assert!(
            text.contains(table.trim_end()),
            "docs/{document}.md lacks the table of `henson settings {recipe} --markdown`"
        );
    }
}

#[test]
fn shells_complete() {
    for (shell, part) in [("bash", "_henson()"), ("zsh", "#compdef henson"), ("fish", "complete -c henson")] {
        let script = works(&["completions", shell]);
        assert!(script.contains(part) && script.contains("finetune") && script.contains("learning-rate"), "{shell}");
    }
    fails(2, &["completions", "tcsh"], &["bash"]);
}
