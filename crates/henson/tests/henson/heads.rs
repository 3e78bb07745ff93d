//! `classify`, `tag`, `answer` and `choose` as a user meets them, on the golden models with the golden vocabulary.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{run_with, text};

/// A golden model; `keys` are set in its config.
fn model(head: &str, keys: Value) -> TempDir {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
    let directory = TempDir::new().unwrap();
    let golden = data.join("bert-golden").join(head);
    std::fs::copy(golden.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    std::fs::copy(data.join("likelihood/vocab.txt"), directory.path().join("vocab.txt")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    directory
}

fn henson(command: &str, model: &TempDir, arguments: &[&str], input: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_henson"));
    program
        .args([command, "--model", model.path().to_str().unwrap(), "--threads", "1"])
        .args(arguments)
        .env_remove("HENSON_KERNELS");
    run_with(&mut program, input.as_bytes())
}

#[track_caller]
fn lines(command: &str, model: &TempDir, arguments: &[&str], input: &str) -> Vec<Value> {
    let output = henson(command, model, &[&["--json"], arguments].concat(), input);
    assert!(output.status.success(), "{command} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails(code: i32, command: &str, model: &TempDir, arguments: &[&str], input: &str, parts: &[&str]) {
    let output = henson(command, model, arguments, input);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command} {arguments:?}: {message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{command} {arguments:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{command} {arguments:?}: expected `{part}` in: {message}");
    }
}

/// The characters `start..end`, as Python counts them.
fn cut(text: &str, span: &Value) -> String {
    let at = |key: &str| span[key].as_u64().unwrap() as usize;
    text.chars().skip(at("start")).take(at("end") - at("start")).collect()
}

#[test]
fn classify() {
    let directory = model("sequence", json!({"id2label": {"0": "bad", "1": "fair", "2": "good"}}));
    let classes = lines("classify", &directory, &["The cat sat.", "cats"], "");
    assert_eq!((classes.len(), &classes[0]["text"]), (2, &json!("The cat sat.")));
    let scores = classes[0]["scores"].as_array().unwrap();
    assert_eq!(
        (scores.len(), &scores[0]["label"], &scores[0]["score"]),
        (3, &classes[0]["label"], &classes[0]["score"])
    );
    assert!(scores[0]["score"].as_f64() > scores[1]["score"].as_f64() && scores[0]["logit"].is_f64());
    assert!(["bad", "fair", "good"].contains(&classes[0]["label"].as_str().unwrap()));
    assert_eq!(classes, lines("classify", &directory, &[], "The cat sat.\ncats\n"));

    let pairs = lines("classify", &directory, &["--pair", "a cat", "a dog", "cats", ""], "");
    assert_eq!((pairs.len(), &pairs[0]["pair"], &pairs[1]["pair"]), (2, &json!("a dog"), &json!("")));
    assert_eq!(pairs, lines("classify", &directory, &["--pair"], "a cat\ta dog\ncats\t\n"));
    assert_ne!(pairs[0]["scores"], lines("classify", &directory, &["a cat"], "")[0]["scores"]);
    fails(1, "classify", &directory, &["--pair", "one"], "", &["two by two", "1 were given"]);
    assert_eq!(classes, lines("classify", &directory, &[], "The cat sat.\n\ncats\n"));
    fails(1, "classify", &directory, &["--pair"], "a\tb\n\nno tab\n", &["line 3", "a tab between"]);
    let people = text(&henson("classify", &directory, &["The cat sat."], "").stdout);
    assert!(people.starts_with("The cat sat.\n") && people.contains('%') && people.contains("fair"), "{people}");

    let any = model("multilabel", json!({}));
    let labels = |threshold: &str| {
        let line = lines("classify", &any, &["--threshold", threshold, "The cat sat."], "").remove(0);
        assert!(line.get("label").is_none() && line.get("score").is_none());
        line["labels"].as_array().unwrap().len()
    };
    assert_eq!((labels("0"), labels("1")), (4, 0));
    fails(2, "classify", &any, &["--threshold", "7", "a"], "", &["from 0 to 1"]);

    let number = lines("classify", &model("regression", json!({})), &["The cat sat."], "").remove(0);
    assert!(number["score"].is_f64() && number.get("label").is_none(), "{number}");
    assert_eq!(number["score"], number["scores"][0]["logit"]);

    let long = "the cat sat on the dog . ".repeat(10);
    let output = henson("classify", &directory, &["--json", &long], "");
    assert!(text(&output.stderr).contains("--windows"), "{}", text(&output.stderr));
    assert_eq!(lines("classify", &directory, &["--windows", &long], "")[0]["dropped"], 0);
}

#[test]
fn tag() {
    let names = json!({"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"});
    let directory = model("token", json!({"id2label": names}));
    let words = "J\u{ed}m Henson's caf\u{e9}, and the \u{1f438} dogs were walking with the old man!";
    let line = lines("tag", &directory, &["--each-word", words], "").remove(0);
    let entities = line["entities"].as_array().unwrap();
    assert!(!entities.is_empty());
    for span in entities.iter().chain(line["words"].as_array().unwrap()) {
        assert_eq!(cut(words, span), span["text"].as_str().unwrap());
        assert!(span["score"].as_f64().unwrap() > 0.0 && span["label"].is_string());
    }
    assert_eq!(line["words"].as_array().unwrap().len(), 16);
    assert!(lines("tag", &directory, &[words], "")[0].get("words").is_none());
    let split = lines("tag", &directory, &["--each-word", "--pre-tokenized"], &format!("{words}\n")).remove(0);
    assert_eq!(split["words"][1]["text"], "Henson's");
    let people = text(&henson("tag", &directory, &[words], "").stdout);
    assert_eq!(people.lines().count(), 1 + entities.len(), "{people}");
}

#[test]
fn answer() {
    let directory = model("qa", json!({}));
    let passage = "\u{c9}t\u{e9}: the dog ran, and the cat sat.";
    let asked = ["--question", "What ran?", "--passage", passage, "--top", "4"];
    let line = lines("answer", &directory, &asked, "").remove(0);
    assert_eq!(
        (&line["question"], cut(passage, &line)),
        (&json!("What ran?"), line["text"].as_str().unwrap().to_owned())
    );
    assert!(line.get("null_odds").is_none() && line["score"].as_f64().unwrap() > 0.0);
    let candidates = line["candidates"].as_array().unwrap();
    assert_eq!((candidates.len(), &candidates[0]["text"]), (4, &line["text"]));
    candidates.iter().for_each(|span| assert_eq!(cut(passage, span), span["text"].as_str().unwrap()));

    // The same from lines of several kinds, and from a file that is one passage.
    let tabs = format!("What ran?\t{passage}\n");
    assert_eq!(lines("answer", &directory, &["--top", "4"], &tabs).remove(0), line);
    let object = json!({"question": "What ran?", "context": passage, "id": 7}).to_string();
    assert_eq!(lines("answer", &directory, &["--top", "4"], &format!("\n{object}\n\n")).remove(0), line);
    assert_eq!(lines("answer", &directory, &["--question", "What ran?", "--top", "4"], passage).remove(0), line);
    let file = directory.path().join("passage.txt");
    std::fs::write(&file, passage).unwrap();
    let from_file = ["--question", "What ran?", "--question", "Who?", "--passage-file", file.to_str().unwrap()];
    let both = lines("answer", &directory, &from_file, "");
    assert_eq!((both.len(), &both[0]["text"]), (2, &line["text"]));

    let nothing = lines("answer", &directory, &[&asked[..], &["--no-answer", "-100"]].concat(), "").remove(0);
    assert_eq!((&nothing["text"], &nothing["start"], nothing["null_odds"].is_f64()), (&json!(""), &json!(null), true));
    let stored = model("qa", json!({"henson_no_answer_threshold": -100}));
    assert_eq!(lines("answer", &stored, &asked, "").remove(0), nothing);
    let people = text(&henson("answer", &stored, &asked, "").stdout);
    assert!(people.contains("(no answer)"), "{people}");

    fails(1, "answer", &directory, &[], "no tab here\n", &["line 1", "--question"]);
    fails(1, "answer", &directory, &[], "{\"question\": \"a\"}\n", &["line 1", "`context`"]);
    fails(1, "answer", &directory, &["--question", "a", "--passage-file", "nowhere"], "", &["nowhere"]);
    fails(2, "answer", &directory, &["--passage", "b"], "", &["--question"]);
    fails(1, "answer", &directory, &["--question", "a", "--passage", "b", "--overlap", "90"], "", &["overlap by 90"]);
    // Windows as in the paper, and as in transformers.
    let long = "the cat sat on the dog . ".repeat(20);
    for stride in [["--stride", "7"], ["--overlap", "7"]] {
        let line = lines("answer", &directory, &[&["--question", "who", "--passage", &long], &stride[..]].concat(), "");
        assert_eq!(cut(&long, &line[0]), line[0]["text"].as_str().unwrap());
    }
}

#[test]
fn choose() {
    let directory = model("choice", json!({}));
    let line = lines("choose", &directory, &["--context", "The cat", "sat.", "ran.", "was a dog."], "").remove(0);
    let best = line["index"].as_u64().unwrap() as usize;
    assert_eq!((line["scores"].as_array().unwrap().len(), &line["choice"]), (3, &line["scores"][best]["choice"]));
    assert_eq!(line["score"], line["scores"][best]["score"]);
    let tabs = "The cat\tsat.\tran.\twas a dog.\n";
    assert_eq!(lines("choose", &directory, &[], tabs).remove(0), line);
    let object = json!({"context": "The cat", "choices": ["sat.", "ran.", "was a dog."]}).to_string();
    assert_eq!(lines("choose", &directory, &[], &object).remove(0), line);
    fails(1, "choose", &directory, &[], "The cat\n", &["line 1", "no choice"]);
    assert_eq!(lines("choose", &directory, &[], &format!("\n{tabs}\n")), [line]);
    fails(1, "choose", &directory, &[], "\n\nThe cat\n", &["line 3", "no choice"]);
    fails(1, "choose", &directory, &[], "{\"context\": 3}\n", &["line 1", "`choices`"]);
    fails(2, "choose", &directory, &["sat."], "", &["--context"]);
}

#[test]
fn rerank() {
    let directory = model("regression", json!({}));
    let texts = ["The cat sat.", "cats", "Jim Henson was a puppeteer."];
    let ranks = lines("rerank", &directory, &[&["--query", "who is it?"], &texts[..]].concat(), "");
    assert_eq!(ranks.len(), 3);
    let score = |line: &Value| line["score"].as_f64().unwrap();
    assert!(ranks.windows(2).all(|pair| score(&pair[0]) >= score(&pair[1])));
    assert_eq!(ranks[0]["text"], texts[ranks[0]["index"].as_u64().unwrap() as usize]);
    let raw = lines("rerank", &directory, &["--query", "who is it?", "--raw-scores", "--top", "1"], &texts.join("\n"));
    let sigmoid = 1.0 / (1.0 + (-score(&raw[0])).exp());
    assert!(raw.len() == 1 && (sigmoid - score(&ranks[0])).abs() < 1e-6);
    // What the model's files say of its scores.
    let named = json!({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}});
    let same =
        lines("rerank", &model("regression", named), &["--query", "who is it?", "--top", "1"], &texts.join("\n"));
    assert_eq!(same, raw);
    let custom = model("regression", json!({"sbert_ce_default_activation_function": "os.system"}));
    fails(1, "rerank", &custom, &["--query", "a", "b"], "", &["os.system", "not supported"]);
    fails(1, "rerank", &model("sequence", json!({})), &["--query", "a", "b"], "", &["3 labels", "henson classify"]);
    fails(1, "rerank", &directory, &["--query", " ", "b"], "", &["--query is empty"]);
}

#[test]
fn labels_of_ones_own() {
    let directory = model("sequence", json!({"id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"}}));
    let found = lines("classify", &directory, &["--labels", "dog, cat", "The cat sat.", "cats"], "");
    let scores = found[0]["scores"].as_array().unwrap();
    let sum: f64 = scores.iter().map(|score| score["score"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-6 && found.len() == 2);
    assert!(scores[0]["label"] == found[0]["label"] && ["dog", "cat"].contains(&found[0]["label"].as_str().unwrap()));
    let several =
        ["--labels", "dog,cat", "--multi-label", "--hypothesis", "a {} sat", "--threshold", "0", "The cat sat."];
    assert_eq!(lines("classify", &directory, &several, "")[0]["labels"].as_array().unwrap().len(), 2);
    fails(1, "classify", &directory, &["--labels", "a", "--hypothesis", "b", "c"], "", &["has no {}"]);
    fails(1, "classify", &directory, &["--labels", "a,,b", "c"], "", &["no empty ones"]);
    fails(1, "classify", &directory, &["--labels", "a", "--windows", "c"], "", &["--windows"]);
    fails(2, "classify", &directory, &["--multi-label", "c"], "", &["--labels"]);
    let plain = model("sequence", json!({}));
    fails(1, "classify", &plain, &["--labels", "a", "b"], "", &["entail", "LABEL_0, LABEL_1, LABEL_2"]);
}

#[test]
fn aggregated_tags_and_prompts() {
    let names = json!({"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"});
    let directory = model("token", json!({"id2label": names}));
    let sentence = "Jim Henson was a puppeteer.";
    for (strategy, fewest) in [("none", 2), ("simple", 1), ("first", 1), ("average", 1), ("max", 1)] {
        let found = lines("tag", &directory, &["--aggregation", strategy, sentence], "").remove(0);
        let entities = found["entities"].as_array().unwrap();
        assert!(entities.len() >= fewest, "{strategy}: {found}");
        assert!(entities.iter().all(|entity| entity["text"] == cut(sentence, entity)), "{found}");
        let prefixed = entities.iter().any(|entity| entity["label"].as_str().unwrap().contains('-'));
        assert_eq!(prefixed, strategy == "none", "{found}");
    }
    fails(2, "tag", &directory, &["--aggregation", "some", sentence], "", &["simple"]);

    let directory = model("model", json!({}));
    let vector = |arguments: &[&str]| lines("embed", &directory, arguments, "")[0]["embedding"].clone();
    assert_eq!(vector(&["--query-prefix", "who is ", "Jim"]), vector(&["who is Jim"]));
    assert_eq!(vector(&["--passage-prefix", "who is ", "Jim"]), vector(&["--prompt", "who is ", "Jim"]));
    assert_ne!(vector(&["--pooling", "lasttoken", "Jim"]), vector(&["--pooling", "weightedmean", "Jim"]));
    fails(1, "embed", &directory, &["--prompt-name", "query", "Jim"], "", &["--prompt-name", "no prompt \"query\""]);
    let files = [
        (
            "modules.json",
            json!([{"type": "sentence_transformers.models.Transformer", "path": ""},
                                {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]),
        ),
        ("1_Pooling/config.json", json!({"pooling_mode": "cls"})),
        ("config_sentence_transformers.json", json!({"prompts": {"query": "who is "}})),
    ];
    std::fs::create_dir(directory.path().join("1_Pooling")).unwrap();
    files.iter().for_each(|(name, value)| std::fs::write(directory.path().join(name), value.to_string()).unwrap());
    assert_eq!(vector(&["--prompt-name", "query", "Jim"]), vector(&["--pooling", "cls", "who is Jim"]));
    fails(1, "embed", &directory, &["--prompt-name", "web", "Jim"], "", &["it has: query"]);
    let info = Command::new(env!("CARGO_BIN_EXE_henson")).arg("info").arg(directory.path()).output().unwrap();
    let shown = text(&info.stdout);
    for part in ["of the family bert", "pooling cls", "prompt query: \"who is \"", "henson embed", "24 dimensions"] {
        assert!(shown.contains(part), "expected {part:?} in: {shown}");
    }
    let token = model("token", json!({"architectures": ["BertForMaskedLM"]}));
    let info = Command::new(env!("CARGO_BIN_EXE_henson")).args(["info", "--json"]).arg(token.path()).output().unwrap();
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["files"]["named_class"], "BertForMaskedLM");
    assert!(info["files"]["commands"].as_array().unwrap().contains(&json!("embed")), "{info}");
}

#[test]
fn a_model_for_something_else_is_explained() {
    for (command, head, parts) in [
        ("classify", "mlm", ["masked language model", "henson finetune --task classify"]),
        ("tag", "sequence", ["classifier of texts", "henson finetune --task tag"]),
        ("answer", "model", ["encoder without a head", "henson finetune --task qa"]),
        ("choose", "token", ["tagger of words", "henson finetune --task choice"]),
    ] {
        fails(1, command, &model(head, json!({})), &[], "", &parts);
    }
}

/// Makes the weights overflow for texts of more than ten tokens: the tenth position has numbers that no sum can hold.
fn overflowing(head: &str) -> TempDir {
    let directory = model(head, json!({}));
    let path = directory.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let tensors = tensors.as_object().unwrap();
    let (_, rows) = tensors.iter().find(|(name, _)| name.ends_with("position_embeddings.weight")).unwrap();
    let start = 8 + header + rows["data_offsets"][0].as_u64().unwrap() as usize;
    let width = 4 * rows["shape"][1].as_u64().unwrap() as usize;
    for number in bytes[start + 10 * width..start + 11 * width].chunks_exact_mut(4) {
        number.copy_from_slice(&3.4e38_f32.to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
    directory
}

#[test]
fn results_that_are_not_finite_are_an_error_that_names_the_text() {
    let long = "the dog ".repeat(6);
    let cases: [(&str, &str, &[&str], &str); 8] = [
        ("embed", "model", &[], "the cat"),
        ("embed", "model", &["--json"], "the cat"),
        ("features", "model", &[], "the cat"),
        ("fill", "mlm", &[], "a [MASK]"),
        ("classify", "sequence", &[], "the cat"),
        ("tag", "token", &[], "the cat"),
        ("answer", "qa", &["--question", "cat", "--question", "man"], "the cat"),
        ("choose", "choice", &[], "the\tcat\tman"),
    ];
    for (command, head, arguments, short) in cases {
        let input = format!("{short}\n\n{short} {long}\n");
        let parts = ["text 3 are not finite", "use another checkpoint"];
        fails(1, command, &overflowing(head), arguments, &input, &parts);
    }
    let directory = overflowing("mlm");
    let file = directory.path().join("lines.txt");
    std::fs::write(&file, format!("the cat.\n{long}.\n")).unwrap();
    let arguments = ["--task", "perplexity", "--data", file.to_str().unwrap()];
    fails(1, "eval", &directory, &arguments, "", &["not finite"]);
    let directory = overflowing("sequence");
    let file = directory.path().join("rows.csv");
    std::fs::write(&file, format!("text,label\nthe cat,LABEL_0\n{long},LABEL_1\n")).unwrap();
    let arguments = ["--task", "classify", "--data", file.to_str().unwrap()];
    fails(1, "eval", &directory, &arguments, "", &["text 2 are not finite"]);
}

#[test]
fn empty_texts_have_no_vector() {
    let directory = model("model", json!({}));
    fails(1, "embed", &directory, &["the cat", ""], "", &["text 2 is empty"]);
    fails(1, "embed", &directory, &[" "], "", &["text 1 is empty"]);
    assert_eq!(lines("embed", &directory, &[], "the cat\n\nthe man\n").len(), 2);
}

/// The authors' files as they are, and what becomes of them.
#[test]
fn elmo_opens_as_it_was_published() {
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/elmo/plain");
    let directory = TempDir::new().unwrap();
    for name in ["options.json", "lm_weights.hdf5"] {
        std::fs::copy(published.join(name), directory.path().join(name)).unwrap();
    }
    let converted = directory.path().join("converted");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_henson")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let path = directory.path().to_str().unwrap();
    assert!(run(&["info", path]).contains("2 layers of LSTMs in both directions, 64 cells, 32 numbers a word"));
    run(&["convert", path, converted.to_str().unwrap()]);
    let texts = ["--layers", "all", "The cat sat .", "na\u{ef}ve"];
    // Lines of JSON, as they are.
    let features = |model: &TempDir| -> Vec<Value> {
        let output = henson("features", model, &texts, "");
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let before = features(&directory);
    assert_eq!(before[0]["tokens"], json!(["<S>", "The", "cat", "sat", ".", "</S>"]));
    let (other, from) = (TempDir::new().unwrap(), &converted);
    std::fs::remove_dir(other.path()).unwrap();
    std::fs::rename(from, other.path()).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(other.path().join(name).is_file(), "{name}");
    }
    assert_eq!(features(&other), before);
    assert_eq!(lines("embed", &other, &["The cat"], ""), lines("embed", &directory, &["The cat"], ""));
    fails(1, "fill", &other, &["a"], "", &["ElmoModel"]);
}
