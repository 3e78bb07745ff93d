//! `search`, `mine` and `eval --task retrieval` as a user meets them, on a golden model with the golden vocabulary.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A golden model: an encoder, or with one label a cross-encoder.
fn model(head: &str) -> TempDir {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
    let (directory, golden) = (TempDir::new().unwrap(), data.join("bert-golden").join(head));
    for (from, name) in
        [(golden.join("model.safetensors"), "model.safetensors"), (golden.join("config.json"), "config.json")]
    {
        fs::copy(from, directory.path().join(name)).unwrap();
    }
    fs::copy(data.join("likelihood/vocab.txt"), directory.path().join("vocab.txt")).unwrap();
    directory
}

fn henson(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_henson")).args(arguments).env_remove("HENSON_KERNELS").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn lines(arguments: &[&str]) -> Vec<Value> {
    let output = henson(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails(arguments: &[&str], parts: &[&str]) {
    let output = henson(arguments);
    let message = text(&output.stderr);
    assert!(output.status.code() == Some(1) && !message.contains("panicked"), "{arguments:?}: {message}");
    parts.iter().for_each(|part| assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}"));
}

#[test]
fn search_finds_passages_and_keeps_their_vectors() {
    let (encoder, ranker, place) = (model("sequence"), model("regression"), TempDir::new().unwrap());
    let at = |name: &str| place.path().join(name);
    let (model, ranker) = (encoder.path().to_str().unwrap(), ranker.path().to_str().unwrap());
    fs::create_dir(at("notes")).unwrap();
    fs::write(at("notes/one.md"), "# the cat\n\nthe cat sat on the dog.\n").unwrap();
    fs::write(at("notes/two.txt"), "jim henson was a puppeteer.\n\nthe old man walked.").unwrap();
    fs::write(at("notes/rows.jsonl"), "{\"id\": \"r7\", \"title\": \"Jim\", \"text\": \"Henson\"}\n").unwrap();
    let (folder, query) = (at("notes").display().to_string(), "jim henson was a puppeteer. the old man walked.");
    let ask = |more: &[&str]| {
        lines(&[&["search", &folder, query, "--model", model, "--json", "--threads", "1"], more].concat())
    };
    let found = ask(&[]);
    assert_eq!(found.len(), 3);
    let score = |line: &Value| line["score"].as_f64().unwrap();
    assert!(found.windows(2).all(|two| score(&two[0]) >= score(&two[1])));
    // The same words as the query are nearest to it.
    assert!((score(&found[0]) - 1.0).abs() < 1e-5 && found[0]["path"].as_str().unwrap().ends_with("two.txt"));
    assert_eq!((&found[0]["lines"], &found[0]["rank"]), (&json!([1, 3]), &json!(1)));
    let row = found.iter().find(|line| line["id"] == "r7").unwrap();
    assert_eq!((&row["text"], row.get("lines")), (&json!("Jim Henson"), None));
    // The second time, all vectors are there, and the answer is the same.
    let kept = at("notes/.henson-search");
    let bytes = fs::read(&kept).unwrap();
    assert_eq!(ask(&[]), found);
    assert_eq!((fs::read(&kept).unwrap(), ask(&["--no-cache"])), (bytes.clone(), found.clone()));
    // What is new is embedded, what is gone is forgotten, what is damaged is made again.
    fs::write(at("notes/one.md"), "a small child sat.").unwrap();
    assert!(ask(&[]).iter().any(|line| line["text"] == "a small child sat.") && fs::read(&kept).unwrap() != bytes);
    let mut damaged = fs::read(&kept).unwrap();
    damaged[100] ^= 1;
    fs::write(&kept, &damaged).unwrap();
    let output = henson(&["search", &folder, query, "--model", model]);
    assert!(output.status.success() && text(&output.stderr).contains("is damaged"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("two.txt:1-3") && fs::read(&kept).unwrap() != damaged);
    // A cross-encoder has the last word, by the scores of `rerank`.
    let ranked = ask(&["--rerank", ranker, "--top", "2"]);
    let texts: Vec<&str> =
        found.iter().map(|line| line["text"].as_str().unwrap()).filter(|t| !t.contains("# the")).collect();
    let texts = [&texts[..], &["a small child sat."]].concat();
    let expected = lines(&[&["rerank", "--model", ranker, "--json", "--query", query], &texts[..]].concat());
    assert_eq!(ranked.len(), 2);
    for (ranked, expected) in ranked.iter().zip(&expected) {
        assert_eq!(ranked["text"], expected["text"]);
        assert!((score(ranked) - score(expected)).abs() < 1e-6);
    }
    let file = at("notes/two.txt").display().to_string();
    let words = lines(&[
        "search",
        &file,
        "old",
        "the",
        "--model",
        model,
        "--words",
        "3",
        "--overlap",
        "1",
        "--json",
        "--top",
        "9",
    ]);
    assert!(words.len() == 8 && at("notes/two.txt.henson-search").is_file(), "{words:?}");
    fails(&["search", &folder, " ", "--model", model], &["query 1 is empty"]);
    fails(&["search", "missing-folder", "a", "--model", model], &["does not exist"]);
    fails(&["search", &folder, "a", "--model", model, "--words", "3", "--overlap", "3"], &["--overlap"]);
    fs::write(at("empty.md"), "").unwrap();
    fails(&["search", &at("empty.md").display().to_string(), "a", "--model", model], &["there is no text"]);
}

#[test]
fn search_leaves_out_what_it_cannot_read() {
    let (encoder, place) = (model("sequence"), TempDir::new().unwrap());
    let at = |name: &str| place.path().join(name).display().to_string();
    let (model, folder) = (encoder.path().to_str().unwrap(), place.path().display().to_string());
    for number in 1..=7 {
        fs::write(at(&format!("bad{number}.jsonl")), "{\"n\": 1}\n").unwrap();
    }
    fs::write(at("wide.txt"), b"\xff\xfea\0b\0").unwrap();
    let arguments = ["search", &folder, "jim", "--model", model, "--no-cache"];
    fails(&arguments, &["there is no text", "8 left out", "bad1.jsonl, line 1: it has no text"]);
    fails(&["search", &at("bad1.jsonl"), "jim", "--model", model], &["bad1.jsonl, line 1: it has no text"]);
    fs::write(at("one.md"), "jim henson").unwrap();
    let output = henson(&arguments);
    let (found, warnings) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && found.contains("one.md:1"), "{warnings}");
    assert!(!found.contains("wide.txt") && warnings.contains("bad5.jsonl, line 1: it has no text"), "{warnings}");
    assert!(!warnings.contains("bad6") && warnings.contains("warning: 3 more were left out"), "{warnings}");
}

/// Elsewhere, file systems refuse such names.
#[cfg(target_os = "linux")]
#[test]
fn search_shows_any_name() {
    use std::os::unix::ffi::OsStrExt;

    let (encoder, place) = (model("sequence"), TempDir::new().unwrap());
    let (model, folder) = (encoder.path().to_str().unwrap(), place.path().display().to_string());
    for name in [&b"caf\xe9.md"[..], &b"two\nlines.md"[..]] {
        fs::write(place.path().join(std::ffi::OsStr::from_bytes(name)), "jim henson").unwrap();
    }
    let arguments = ["search", &folder, "jim", "--model", model, "--no-cache"];
    let found = lines(&[&arguments[..], &["--json"]].concat());
    let mut names: Vec<&str> = found.iter().map(|line| line["path"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert!(
        names.len() == 2 && names[0].ends_with("caf\u{fffd}.md") && names[1].ends_with("two\nlines.md"),
        "{names:?}"
    );
    let shown = text(&henson(&arguments).stdout);
    assert!(shown.contains("two\\nlines.md:1") && shown.lines().count() == 4, "{shown}");
}

#[test]
fn mined_negatives_are_near_and_not_right() {
    let (encoder, ranker, place) = (model("sequence"), model("regression"), TempDir::new().unwrap());
    let at = |name: &str| place.path().join(name).display().to_string();
    let (model, ranker) = (encoder.path().to_str().unwrap(), ranker.path().to_str().unwrap());
    let pairs =
        [("who was jim?", "jim henson"), ("who was jim?", "jim"), ("the cat", "cats"), ("a dog", "the dog walked")];
    let rows = pairs.map(|(a, b)| json!({"anchor": a, "positive": b}).to_string() + "\n");
    fs::write(at("pairs.jsonl"), rows.concat()).unwrap();
    let mine = |out: &str, more: &[&str]| {
        let (train, out) = (at("pairs.jsonl"), at(out));
        let output = henson(&[&["mine", "--train", &train, "--out", &out, "--model", model], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let mined = fs::read_to_string(&out).unwrap();
        mined.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let rows = mine("a.jsonl", &["--negatives", "9"]);
    assert_eq!(rows.len(), 4);
    for (row, (anchor, positive)) in rows.iter().zip(pairs) {
        assert_eq!((&row["anchor"], &row["positive"]), (&json!(anchor), &json!(positive)));
        let negatives: Vec<&str> = row["negatives"].as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
        // All texts but the anchor's own.
        let own = pairs.iter().filter(|(first, _)| *first == anchor).count();
        assert_eq!(negatives.len(), 4 - own, "{negatives:?}");
        assert!(pairs.iter().filter(|(first, _)| *first == anchor).all(|(_, second)| !negatives.contains(second)));
        assert!(row.get("scores").is_none());
    }
    let few = mine("b.jsonl", &["--negatives", "1", "--skip", "1"]);
    assert_eq!(few[2]["negatives"][0], rows[2]["negatives"][1]);
    assert!(mine("c.jsonl", &["--margin", "2.5"]).iter().all(|row| row["negatives"] == json!([])));
    // A cross-encoder scores the positive and what it leaves; the file can be trained on.
    let scored = mine("d.jsonl", &["--cross-encoder", ranker, "--negatives", "2", "--cross-margin", "-1"]);
    for row in &scored {
        let scores = row["scores"].as_array().unwrap();
        assert_eq!(scores.len(), 1 + row["negatives"].as_array().unwrap().len());
    }
    fs::write(at("corpus.jsonl"), "{\"text\": \"jim\"}\n{\"text\": \"a small child\"}\n{\"text\": \"the old sea\"}\n")
        .unwrap();
    let with_corpus = mine("e.jsonl", &["--corpus", &at("corpus.jsonl"), "--random", "3"]);
    let found = |row: &Value| row["negatives"].as_array().unwrap().len();
    assert_eq!((found(&with_corpus[0]), found(&with_corpus[2])), (2, 3));
    let out = at("trained");
    let train =
        ["finetune", "--task", "embed", "--model", model, "--train", &at("d.jsonl"), "--out", &out, "--epochs", "1"];
    let more = ["--set", "loss=margin-mse", "--set", "max_length=16", "--dev", "none"];
    let output = henson(&[&train[..], &more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    fails(&["mine", "--train", &at("pairs.jsonl"), "--out", &at("a.jsonl"), "--model", model], &["exists already"]);
    let skip = ["mine", "--train", &at("pairs.jsonl"), "--out", &at("z"), "--model", model, "--skip", "50"];
    fails(&skip, &["--skip"]);
    // What is there twice is reported, and mined for all the same.
    let rows = pairs.iter().chain(&pairs[2..3]).map(|(a, b)| json!({"anchor": a, "positive": b}).to_string() + "\n");
    fs::write(at("twice.jsonl"), rows.collect::<String>()).unwrap();
    let output = henson(&["mine", "--train", &at("twice.jsonl"), "--out", &at("f.jsonl"), "--model", model]);
    let message = text(&output.stderr);
    assert!(message.contains("1 rows are the same as earlier ones, first line 5, after line 3"), "{message}");
    assert_eq!(fs::read_to_string(at("f.jsonl")).unwrap().lines().count(), 5);
}

#[test]
fn retrieval_is_scored_by_the_judgments() {
    let (encoder, place) = (model("sequence"), TempDir::new().unwrap());
    let model = encoder.path().to_str().unwrap();
    fs::create_dir(place.path().join("qrels")).unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    let texts = ["the cat sat on the dog.", "jim henson was a puppeteer.", "a small child", "the old man walked."];
    let row = |(i, text): (usize, &&str)| json!({"_id": format!("d{i}"), "title": "", "text": text}).to_string() + "\n";
    write("corpus.jsonl", &texts.iter().enumerate().map(row).collect::<String>());
    // Each query is a passage, and so nearest to it.
    let query = |(i, text): (usize, &&str)| json!({"_id": format!("q{i}"), "text": text}).to_string() + "\n";
    write("queries.jsonl", &texts.iter().enumerate().map(query).collect::<String>());
    write("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td1\t2\nq3\td3\t1\n");
    let data = place.path().to_str().unwrap();
    let ask = || lines(&["eval", "--task", "retrieval", "--model", model, "--data", data, "--json"]).remove(0);
    let right = ask();
    assert_eq!((&right["queries"], &right["passages"]), (&json!(3), &json!(4)));
    for name in ["ndcg@1", "binary_ndcg@10", "mrr@10", "map@100", "recall@1", "accuracy@1", "precision@1"] {
        assert_eq!(right[name], 1.0, "{name}: {right}");
    }
    // What is asked for is never the nearest.
    write("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq0\td1\t1\nq1\td2\t2\n");
    let wrong = ask();
    assert_eq!((&wrong["ndcg@1"], &wrong["recall@100"]), (&json!(0.0), &json!(1.0)));
    assert!(wrong["mrr@10"].as_f64().unwrap() <= 0.5);
    let shown = henson(&["eval", "--task", "retrieval", "--model", model, "--data", data]);
    assert!(text(&shown.stdout).contains("2 queries, 4 passages"), "{}", text(&shown.stdout));
    fails(&["eval", "--task", "retrieval", "--model", model, "--data", data, "--limit", "3"], &["--limit"]);
    // By words, and with a cross-encoder behind: its scores are those of `rerank`.
    let by_words = lines(&["eval", "--task", "retrieval", "--bm25", "--data", data, "--json"]).remove(0);
    assert_eq!((&by_words["model"], &by_words["queries"]), (&json!("bm25"), &json!(2)));
    assert!(by_words["mrr@10"].as_f64().unwrap() <= 0.5 && by_words["ndcg@1"] == 0.0);
    let cross = self::model("regression");
    let ranker = cross.path().to_str().unwrap();
    let arguments = ["eval", "--task", "retrieval", "--model", model, "--data", data, "--rerank", ranker, "--json"];
    let reranked = lines(&arguments).remove(0);
    let mut expected = 0.0;
    for (query, right) in [(texts[0], texts[1]), (texts[1], texts[2])] {
        let ranked = lines(&[&["rerank", "--model", ranker, "--json", "--query", query], &texts[..]].concat());
        expected += 0.5 / (ranked.iter().position(|line| line["text"] == right).unwrap() + 1) as f64;
    }
    assert!((reranked["mrr@10"].as_f64().unwrap() - expected).abs() < 1e-9, "{reranked} {expected}");
    let one = lines(&[&arguments[..], &["--candidates", "1"]].concat()).remove(0);
    assert_eq!((&one["mrr@10"], &one["rerank"]), (&wrong["mrr@10"], &json!(ranker)));
    fails(&["eval", "--task", "retrieval", "--model", model, "--data", "missing"], &["qrels", "missing"]);
    write("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq0\td9\t1\n");
    fails(&["eval", "--task", "retrieval", "--model", model, "--data", data], &["test.tsv", "line 2", "d9"]);
}

#[test]
fn paraphrases_are_found_among_all_sentences() {
    let (encoder, place) = (model("sequence"), TempDir::new().unwrap());
    let model = encoder.path().to_str().unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    // Two are the same text, and so nearest of all.
    write("sentences.csv", "id,text\na,the cat sat\nb,jim henson\nc,the cat sat\nd,a small child\n");
    write("duplicates.tsv", "id1\tid2\nc\ta\n");
    let data = place.path().to_str().unwrap();
    let ask = || lines(&["eval", "--task", "paraphrases", "--model", model, "--data", data, "--json"]).remove(0);
    let right = ask();
    assert_eq!((&right["sentences"], &right["duplicates"]), (&json!(4), &json!(1)));
    assert_eq!((&right["average_precision"], &right["f1"], &right["recall"]), (&json!(1.0), &json!(1.0), &json!(1.0)));
    write("duplicates.tsv", "id1\tid2\nc\ta\nb\td\n");
    let more = ask();
    assert!(more["duplicates"] == 2 && more["average_precision"].as_f64().unwrap() >= 0.5, "{more}");
    write("duplicates.tsv", "id1\tid2\nc\tx\n");
    fails(&["eval", "--task", "paraphrases", "--model", model, "--data", data], &["duplicates.tsv", "line 2", "\"x\""]);
}
