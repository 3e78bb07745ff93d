//! `henson eval` as a user meets it: perplexity and minimal pairs, plain and compressed files, choices of texts, and a
//! clear word for what is wrong. That the scores are right is tested where they are computed (crates/infer).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A model and files for it.
struct Place(TempDir);

impl Place {
    /// The golden masked LM with the vocabulary of the golden likelihoods; with `causal` as one that reads left to right.
    fn new(causal: bool) -> Self {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
        let place = Self(TempDir::new().unwrap());
        std::fs::copy(data.join("bert-golden/mlm/model.safetensors"), place.at("model.safetensors")).unwrap();
        std::fs::copy(data.join("likelihood/vocab.txt"), place.at("vocab.txt")).unwrap();
        let config = std::fs::read_to_string(data.join("bert-golden/mlm/config.json")).unwrap();
        let config = if causal { config.replace("\"is_decoder\": false", "\"is_decoder\": true") } else { config };
        std::fs::write(place.at("config.json"), config).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file with these bytes; gives its path.
    fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.at(name), bytes).unwrap();
        self.at(name).to_str().unwrap().to_owned()
    }

    fn eval(&self, task: &str, data: &str, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_henson"))
            .args(["eval", "--task", task, "--model", self.0.path().to_str().unwrap(), "--data", data])
            .args(more)
            .env_remove("HENSON_KERNELS")
            .output()
            .unwrap()
    }

    #[track_caller]
    fn json(&self, task: &str, data: &str, more: &[&str]) -> Value {
        let output = self.eval(task, data, &[more, &["--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, code: i32, task: &str, data: &str, more: &[&str], parts: &[&str]) {
        let output = self.eval(task, data, more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(output.stdout.is_empty() && !message.contains("panicked"), "{message}");
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
}

fn golden() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/likelihood/golden.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    golden["texts"].as_array().unwrap().clone()
}

/// The sum of a golden text's logarithms, its pieces, and how many were predicted right.
fn totals(entries: &[&Value], scoring: &str) -> (f64, f64, f64) {
    let logs = entries.iter().flat_map(|entry| entry[scoring]["logs"].as_array().unwrap());
    let logs: Vec<f64> = logs.map(|log| log.as_f64().unwrap()).collect();
    let correct: u64 = entries.iter().map(|entry| entry[scoring]["correct"].as_u64().unwrap()).sum();
    (logs.iter().sum(), logs.len() as f64, correct as f64)
}

#[track_caller]
fn near(value: &Value, expected: f64) {
    let got = value.as_f64().unwrap();
    assert!((got / expected - 1.0).abs() < 1e-5, "{got} not {expected}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn perplexity_is_the_golden_one() {
    let golden = golden();
    let entries: Vec<&Value> = golden.iter().collect();
    let texts: Vec<&str> = golden.iter().map(|entry| entry["text"].as_str().unwrap()).collect();
    // The empty text among them is a blank line.
    let text = texts.join("\n") + "\n \n";
    for (causal, more, name, key) in [
        (false, &[][..], "piece", "piece"),
        (false, &["--scoring", "word"], "word", "word"),
        (true, &[], "left-to-right", "left_to_right"),
    ] {
        let place = Place::new(causal);
        let result = place.json("perplexity", &place.file("texts.txt", text.as_bytes()), more);
        let (sum, pieces, correct) = totals(&entries, key);
        near(&result["loss"], -sum / pieces);
        near(&result["perplexity"], (-sum / pieces).exp());
        near(&result["accuracy"], correct / pieces);
        let words = text.split_whitespace().count();
        near(&result["word_perplexity"], (-sum / words as f64).exp());
        let expected = json!([name, texts.len() - 1, words, pieces as usize]);
        let got = json!([result["scoring"], result["texts"], result["words"], result["pieces"]]);
        assert_eq!(got, expected);
        assert!(result["tokens_per_s"].as_f64().unwrap() > 0.0 && result["seconds"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn compressed_files_are_known_by_their_bytes() {
    let place = Place::new(false);
    let text = b"The cat sat.\r\n\nThe dogs ran.\n";
    let loss = |data: &str| place.json("perplexity", data, &[])["loss"].clone();
    let plain = loss(&place.file("a.txt", text));
    assert_eq!(loss(&place.file("a.gz", &gzip(text))), plain);
    assert_eq!(loss(&place.file("a.zst", &zstd::encode_all(&text[..], 0).unwrap())), plain);
    // Compressed in parts, under a name that does not say so.
    let parts = [gzip(&text[..7]), gzip(&text[7..])].concat();
    assert_eq!(loss(&place.file("b.txt", &parts)), plain);
    let mut broken = zstd::encode_all(&text[..], 0).unwrap();
    broken.truncate(broken.len() - 3);
    place.fails(1, "perplexity", &place.file("c.zst", &broken), &[], &["cannot read", "c.zst"]);
}

#[test]
fn limits_take_the_first_or_some_of_all() {
    let golden = golden();
    let place = Place::new(false);
    let lines = [0, 4, 5, 6, 8, 10];
    let text: Vec<&str> = lines.iter().map(|i| golden[*i]["text"].as_str().unwrap()).collect();
    let data = place.file("texts.txt", text.join("\n\n").as_bytes());
    for (more, taken) in [
        (&["--limit", "2"][..], &[0, 4][..]),
        (&["--limit", "2", "--sample"], &[5, 10]),
        (&["--limit", "99", "--sample"], &lines),
    ] {
        let entries: Vec<&Value> = taken.iter().map(|i| &golden[*i]).collect();
        let (sum, pieces, _) = totals(&entries, "piece");
        let result = place.json("perplexity", &data, more);
        near(&result["loss"], -sum / pieces);
        assert_eq!(result["texts"], taken.len());
    }
}

/// Lines of minimal pairs: (good, bad, paradigm, phenomenon, field).
fn pairs(rows: &[[&str; 5]]) -> String {
    let line = |row: &[&str; 5]| {
        let keys = ["sentence_good", "sentence_bad", "UID", "linguistics_term", "field"];
        let object: serde_json::Map<String, Value> =
            keys.iter().map(|k| k.to_string()).zip(row.map(Value::from)).collect();
        Value::Object(object).to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

#[test]
fn pairs_are_counted_by_paradigm_phenomenon_and_field() {
    let place = Place::new(false);
    // By the golden values: −24.7 against −22.2, −5.1 against −2.9, and two that are the same to the tokenizer.
    let (lower, higher) = ("The cat sat on the puppet.", "the cat sat on the puppet");
    let rows = [
        [higher, lower, "first", "one", "syntax"],
        [lower, higher, "first", "one", "syntax"],
        ["a", "?", "first", "one", "syntax"],
        [higher, lower, "second", "one", "syntax"],
        ["a cat", "A  CAT", "third", "two", "semantics"],
    ];
    let data = place.file("pairs.jsonl.zst", &zstd::encode_all(pairs(&rows).as_bytes(), 0).unwrap());
    let result = place.json("blimp", &data, &[]);
    let tally = |correct: usize, ties: usize, pairs: usize| json!({"accuracy": correct as f64 / pairs as f64, "correct": correct, "ties": ties, "pairs": pairs});
    assert_eq!(
        result["paradigms"],
        json!({"first": tally(2, 0, 3), "second": tally(1, 0, 1), "third": tally(0, 1, 1)})
    );
    assert_eq!(result["phenomena"], json!({"one": tally(3, 0, 4), "two": tally(0, 1, 1)}));
    assert_eq!(result["fields"], json!({"syntax": tally(3, 0, 4), "semantics": tally(0, 1, 1)}));
    near(&result["accuracy"], 0.6);
    assert_eq!((&result["pairs"], &result["ties"], &result["scoring"]), (&json!(5), &json!(1), &json!("piece")));

    let first = place.json("blimp", &data, &["--limit", "1"]);
    assert_eq!(first["paradigms"]["first"], tally(1, 0, 1));
    assert_eq!(first["pairs"], 3);
    let sampled = place.json("blimp", &data, &["--limit", "2", "--sample"]);
    assert_eq!(sampled["paradigms"]["first"], tally(1, 0, 2), "the second and the third");

    let output = place.eval("blimp", &data, &[]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && table.contains("1 ties") && table.contains("60.00%"), "{table}");
    let (best, worst) = (table.find("second").unwrap(), table.find("third").unwrap());
    assert!(best < table.find("first").unwrap() && table.find("first").unwrap() < worst, "sorted: {table}");
}

#[test]
fn every_mistake_gets_a_clear_word() {
    let place = Place::new(false);
    let good = pairs(&[["a", "?", "p", "t", "f"]]);
    let file = |name: &str, text: &str| place.file(name, text.as_bytes());
    let missing = file("missing.jsonl", &(good.clone() + "\n" + &good.replace("UID", "uid")));
    place.fails(1, "blimp", &missing, &[], &["missing.jsonl, line 3", "`UID` is missing", "`sentence_good`"]);
    let number = file("number.jsonl", &good.replace("\"?\"", "7"));
    place.fails(1, "blimp", &number, &[], &["line 1", "`sentence_bad` is not a string"]);
    place.fails(
        1,
        "blimp",
        &file("text.jsonl", "a text\n"),
        &[],
        &["text.jsonl, line 1", "JSON object with the keys `sentence_good`"],
    );
    for task in ["blimp", "perplexity"] {
        place.fails(1, task, &file("empty", " \n\n"), &[], &["empty has no"]);
        place.fails(1, task, "nowhere.txt", &[], &["cannot open nowhere.txt"]);
    }
    let text = file("text.txt", "the cat\n");
    place.fails(2, "glue", &text, &[], &["glue", "perplexity", "blimp"]);
    place.fails(2, "perplexity", &text, &["--sample"], &["--limit"]);
    place.fails(2, "perplexity", &text, &["--limit", "0"], &["from 1 to"]);
    place.fails(1, "perplexity", "-", &["--limit", "1", "--sample"], &["standard input", "name a file"]);
    std::fs::write(place.at("latin"), b"fine\ncaf\xe9\n").unwrap();
    place.fails(1, "perplexity", place.at("latin").to_str().unwrap(), &[], &["line 2", "UTF-8"]);
    let causal = Place::new(true);
    causal.fails(1, "perplexity", &text, &["--scoring", "word"], &["left to right", "leave --scoring out"]);

    let encoder = Place::new(false);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/model");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), encoder.at(name)).unwrap();
    }
    encoder.fails(1, "perplexity", &text, &[], &["masked-LM head is needed", "cls.predictions"]);
}

/// Our own sentences in the layout of lm-diagnostics, in words that the golden model knows.
const CPRAG: &str = "item\tcontext_s1\tcontext_s2\texpected\twithin_category\tbetween_category\tconstraint\n\
0\tthe old man was with the cat.\tthe child ran by the\tcat\tdog\tpuppet\tH\n\
1\tjim was in the new walk.\tthe woman sat on the\tdog\tcat\tman\tL\n\
2\twho are the small men?\tthe child was a\tpuppet\tpuppeteer\tdog\tL\n";

const ROLES: &str = "item\tcontext\texpected\texp_cloze\ttarget\ttgt_cloze\ttgt_cloze(strict)\n\
7-b\tjim was with the man who the dog was \tby|in the\t0.2\tplay\t0.1\t0\n\
7-a\tjim was with the dog who the man was\twith\t0.5\tplay\t0.4\t0.4\n\
9-a\tthe woman was in the walk who the cat was\tsee\t0.3\tsing\t0.3\t0.3\n\
9-b\tthe cat was in the walk who the woman was\tplay\t0.4\tsing\t0\t0\n";

const SIMPLE: &str = "item\tcontext_aff\tcontext_neg\ttarget_aff\ttarget_neg\n\
0\tjim is (a|an)\tjim is not (a|an)\tman\tdog\n1\ta puppet is (a|an)\ta puppet is not (a|an)\told\tcat\n";

const NATURAL: &str = "item\tcontext_aff\tcontext_neg\ttarget_aff\ttarget_neg\tlicensing\n\
0\tthe new puppets are\tthe new puppets are not\tnew\told\tY\n1\tthe small dog was\tthe small dog was not\tsmall\told\tN\n";

/// The probability of each word at the mask, by `fill`, in the order of their likelihood.
fn filled(place: &Place, context: &str) -> Vec<(String, f64)> {
    let text = format!("{context} [MASK].");
    let arguments = ["fill", "--model", place.0.path().to_str().unwrap(), "--json", "-k", "1000", &text];
    let output = Command::new(env!("CARGO_BIN_EXE_henson")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let filled: Value = serde_json::from_slice(&output.stdout).unwrap();
    let candidates = filled["masks"][0]["predictions"].as_array().unwrap().iter();
    candidates.map(|c| (c["token"].as_str().unwrap().to_owned(), c["probability"].as_f64().unwrap())).collect()
}

#[test]
fn diagnostics_are_what_fill_predicts() {
    let place = Place::new(false);
    let get = |found: &Value, part: &str, condition: &str, key: &str, value: f64| -> (u64, u64) {
        let shares = found[part].as_array().unwrap();
        let same = |share: &&Value| share["condition"] == condition && share[key].as_f64() == Some(value);
        let share = shares.iter().find(same).unwrap_or_else(|| panic!("{condition} {value} in {found}"));
        (share["right"].as_u64().unwrap(), share["count"].as_u64().unwrap())
    };
    let probability = |context: &str, word: &str| {
        filled(&place, context).iter().find(|(token, _)| token == word).unwrap_or_else(|| panic!("{word}")).1
    };
    let rank = |context: &str, word: &str| filled(&place, context).iter().position(|(token, _)| token == word).unwrap();

    let found = place.json("diagnostics", &place.file("cprag.tsv", CPRAG.as_bytes()), &[]);
    assert_eq!((&found["set"], &found["items"]), (&json!("CPRAG-102"), &json!(3)));
    assert_eq!(found["out_of_vocabulary"], json!(["puppeteer"]));
    let contexts = [
        ("the old man was with the cat. the child ran by the", ["cat", "dog", "puppet"]),
        ("jim was in the new walk. the woman sat on the", ["dog", "cat", "man"]),
    ];
    let likeliest = contexts.iter().filter(|(context, words)| {
        let p = words.map(|word| probability(context, word));
        p[0] > p[1] && p[0] > p[2]
    });
    let likeliest = likeliest.count() as u64;
    assert_eq!(get(&found, "sensitivity", "expected word likeliest, all", "threshold", 0.0), (likeliest, 2));
    let third = ("who are the small men? the child was a", ["puppet", "", ""]);
    let hits = |top: usize| contexts.iter().chain([&third]).filter(|(c, words)| rank(c, words[0]) < top).count() as u64;
    assert_eq!(get(&found, "accuracy", "all", "k", 1.0), (hits(1), 3));
    assert_eq!(get(&found, "accuracy", "all", "k", 5.0), (hits(5), 3));
    let means = found["probabilities"].as_array().unwrap();
    let of_first = means.iter().find(|mean| mean["condition"] == "expected, high constraint").unwrap();
    near(&of_first["mean"], probability(contexts[0].0, "cat"));

    let found = place.json("diagnostics", &place.file("role.tsv", ROLES.as_bytes()), &[]);
    assert_eq!((&found["set"], &found["items"]), (&json!("ROLE-88"), &json!(2)));
    let pairs = [
        ("jim was with the dog who the man was", "jim was with the man who the dog was", "play"),
        ("the woman was in the walk who the cat was", "the cat was in the walk who the woman was", "sing"),
    ];
    let fits = pairs.iter().filter(|(a, b, word)| probability(a, word) > probability(b, word)).count() as u64;
    assert_eq!(get(&found, "sensitivity", "target likelier where it fits", "threshold", 0.0), (fits, 2));
    // Of "in the" the first word counts.
    let of_b = ["by", "in"].iter().any(|word| rank(pairs[0].1, word) < 5);
    let others = [(pairs[0].0, "with"), (pairs[1].0, "see"), (pairs[1].1, "play")];
    let hits = others.iter().filter(|(context, word)| rank(context, word) < 5).count() as u64 + u64::from(of_b);
    assert_eq!(get(&found, "accuracy", "all", "k", 5.0), (hits, 4));

    let found = place.json("diagnostics", &place.file("simple.tsv", SIMPLE.as_bytes()), &[]);
    assert_eq!(found["set"], "NEG-136-SIMP");
    // The article is as the target needs it, and so the contexts of one item differ.
    let truth =
        [("jim is not a", "dog", "jim is not a", "man"), ("a puppet is not a", "cat", "a puppet is not an", "old")];
    let right = truth.iter().filter(|t| probability(t.0, t.1) > probability(t.2, t.3)).count() as u64;
    assert_eq!(get(&found, "sensitivity", "true word likelier, negative, all", "threshold", 0.0), (right, 2));

    let found = place.json("diagnostics", &place.file("natural.tsv", NATURAL.as_bytes()), &[]);
    assert_eq!(found["set"], "NEG-136-NAT");
    let licensed = probability("the new puppets are", "new") > probability("the new puppets are", "old");
    let found_right = get(&found, "sensitivity", "true word likelier, affirmative, licensed", "threshold", 0.0);
    assert_eq!(found_right, (u64::from(licensed), 1));
    let text = place.eval("diagnostics", &place.file("role.tsv", ROLES.as_bytes()), &[]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("target likelier where it fits"));
}

#[test]
fn mistakes_in_diagnostics_are_named() {
    let place = Place::new(false);
    let fails = |content: &str, parts: &[&str]| {
        place.fails(1, "diagnostics", &place.file("x.tsv", content.as_bytes()), &[], &[&["x.tsv"], parts].concat());
    };
    fails("a\tb\n1\t2\n", &["line 1", "unknown columns", "CPRAG-102", "licensing"]);
    fails("", &["no items"]);
    fails(&CPRAG.replace("\tH\n", "\tM\n"), &["line 2", "constraint is \"M\"", "H or L"]);
    fails(&CPRAG.replace("\tpuppet\tH", ""), &["line 2", "expected 7 columns"]);
    fails(&ROLES.replace("7-b", "7-c"), &["line 2", "-a or -b"]);
    fails(&ROLES.replace("7-b", "8-b"), &["item", "has no"]);
    fails(&ROLES.replace("0.5", "much"), &["line 3", "exp_cloze", "from 0 to 1"]);
    fails(&NATURAL.replace("\tY", "\tyes"), &["line 2", "licensing is \"yes\"", "Y or N"]);
    let data = place.file("role.tsv", ROLES.as_bytes());
    place.fails(1, "diagnostics", &data, &["--limit", "3"], &["--limit", "do not apply"]);
    Place::new(true).fails(1, "diagnostics", &data, &[], &["left to right"]);
}
