//! SuperGLUE and GLUE's diagnostics: every file in its own layout, what is wrong with a row, official scores, submissions.

use henson_tasks::{Files, Prediction, Reading, Set, Split, prediction_files, read, read_predictions, score};
use serde_json::json;

use crate::support::{Place, read_as, shorts, task, written};

const MULTIRC: &str = r#"{"idx": 4, "passage": {"text": "Kermit is green. He sings.", "questions": [{"question": "What is Kermit?", "sentences_used": [0], "answers": [{"text": "green", "idx": 10, "label": 1}, {"text": "a frog", "idx": 11, "label": 0}], "idx": 7}, {"question": "Who sings?", "answers": [{"text": "Kermit", "idx": 12, "label": 1}, {"text": "He", "idx": 13, "label": 1}, {"text": "nobody", "idx": 14, "label": 0}], "idx": 8}]}}"#;

const RECORD: &str = r#"{"source": "Daily", "passage": {"text": "Kermit met Élise in Rome\n@highlight\nÉlise sang.\n@highlight\nKermit left", "entities": [{"start": 0, "end": 5}, {"start": 11, "end": 15}, {"start": 20, "end": 23}, {"start": 36, "end": 40}]}, "qas": [{"query": "In @placeholder they met", "answers": [{"start": 20, "end": 23, "text": "Rome"}], "idx": 3}, {"query": "@placeholder likes @placeholder", "answers": [{"start": 0, "end": 5, "text": "Kermit"}, {"start": 11, "end": 15, "text": "Élise"}], "idx": 4}], "idx": 0}"#;

const WIC: &str = r#"{"word": "play", "sentence1": "Élise will play.", "sentence2": "A play", "idx": 0, "label": false, "start1": 11, "end1": 15, "start2": 2, "end2": 6, "version": 1.1}"#;

const WSC: &str = r#"{"text": "Kermit told Élise that he, the frog, sings.", "target": {"span2_index": 4, "span1_index": 0, "span1_text": "kermit", "span2_text": "he"}, "idx": 0, "label": true}"#;

fn class(class: u32) -> Prediction {
    Prediction::Class { class, scores: Vec::new() }
}

#[track_caller]
fn check(name: &str, file: &str, content: &str, expected: &[&str]) -> Set {
    let place = Place::new();
    let set = read_as(name, &place.file(file, content)).unwrap();
    assert_eq!(shorts(&set), expected, "{name}");
    set
}

#[test]
fn every_task_in_its_own_layout() {
    let boolq =
        r#"{"question": "is a frog green", "passage": "Frogs (Anura) -- Some are green.", "idx": 5, "label": true}"#;
    check("boolq", "train.jsonl", boolq, &["5: is a frog green | Frogs (Anura) -- Some are green. -> 1 true"]);
    let test = r#"{"question": "is a frog green", "passage": "Frogs.", "idx": 0}"#;
    check("boolq", "test.jsonl", test, &["0: is a frog green | Frogs. -> ?"]);
    let cb = r#"{"premise": "He said so. I doubt it.", "hypothesis": "it is so", "label": "contradiction", "idx": 1}"#;
    check("cb", "val.jsonl", cb, &["1: He said so. I doubt it. | it is so -> 1 contradiction"]);
    let copa = "{\"premise\": \"It rained.\", \"choice1\": \"We got wet.\", \"choice2\": \"We slept.\", \"question\": \"effect\", \"label\": 0, \"idx\": 0}\n\
                {\"premise\": \"I fell.\", \"choice1\": \"Ice.\", \"choice2\": \"Fog.\", \"question\": \"cause\", \"label\": 1, \"idx\": 1}\n";
    check(
        "copa",
        "train.jsonl",
        copa,
        &[
            "0: It rained. What happened as a result? | We got wet. / We slept. -> 0",
            "1: I fell. What was the cause of this? | Ice. / Fog. -> 1",
        ],
    );
    let passage = "Kermit is green. He sings.";
    check(
        "multirc",
        "train.jsonl",
        MULTIRC,
        &[
            &format!("4/7/10: {passage} | What is Kermit? | green -> 1 1"),
            &format!("4/7/11: {passage} | What is Kermit? | a frog -> 0 0"),
            &format!("4/8/12: {passage} | Who sings? | Kermit -> 1 1"),
            &format!("4/8/13: {passage} | Who sings? | He -> 1 1"),
            &format!("4/8/14: {passage} | Who sings? | nobody -> 0 0"),
        ],
    );
    // The same entity twice is one candidate; highlights become sentences.
    let passage = "Kermit met Élise in Rome. Élise sang. Kermit left";
    check(
        "record",
        "train.jsonl",
        RECORD,
        &[
            &format!("3: {passage} | In @placeholder they met | Kermit / Élise / Rome -> [Rome nowhere]"),
            &format!(
                "4: {passage} | @placeholder likes @placeholder | Kermit / Élise / Rome -> [Kermit nowhere, Élise nowhere]"
            ),
        ],
    );
    let rte = r#"{"premise": "A", "hypothesis": "B", "label": "not_entailment", "idx": 2}"#;
    check("superglue-rte", "val.jsonl", rte, &["2: A | B -> 1 not_entailment"]);
    check("wic", "train.jsonl", WIC, &["0: Élise will play. | A play | play / play -> 0 false"]);
    let text = "Kermit told Élise that he, the frog, sings.";
    check("wsc", "train.jsonl", WSC, &[&format!("0: {text} | Kermit / he -> 1 True")]);
    let axb = r#"{"sentence1": "A", "sentence2": "B", "idx": 3, "label": "entailment", "logic": "Negation"}"#;
    check("axb", "AX-b.jsonl", axb, &["3: A | B -> 0 entailment"]);
    let axg = r#"{"hypothesis": "B", "premise": "A", "label": "entailment", "idx": 1, "pair_id": 551}"#;
    check("axg", "AX-g.jsonl", axg, &["1: A | B -> 0 entailment"]);
    let ax = "index\tsentence1\tsentence2\n0\tA\tB\n";
    check("ax", "diagnostic.tsv", ax, &["0: A | B -> ?"]);
    let header =
        "Lexical Semantics\tPredicate-Argument Structure\tLogic\tKnowledge\tDomain\tPremise\tHypothesis\tLabel\n";
    let ax = format!("{header}\t\tNegation\t\tNews\tA\tB\tcontradiction\n");
    check("ax", "diagnostic-full.tsv", &ax, &["0: A | B -> 2 contradiction"]);
    let spans = "{\"text\": \"é, a frog\", \"span1\": [3, 9], \"label\": \"animal\"}\n{\"text\": \"é\", \"span1\": [0, 1], \"label\": \"x\"}\n";
    check("span", "train.jsonl", spans, &["0: é, a frog | a frog -> 0 animal", "1: é | é -> 1 x"]);
}

/// Numbers of words that do not fit the text, and spans with more than words, as the official file has some.
#[test]
fn the_nearest_span_with_the_text_is_meant() {
    let row = |text: &str, index: usize, span: &str| {
        let target = json!({"span1_index": 0, "span1_text": "I", "span2_index": index, "span2_text": span});
        json!({"text": text, "target": target, "label": true, "idx": 0}).to_string()
    };
    let text = "I saw him, him and her; hims.";
    for (index, span, expected) in [(2, "him", 6), (3, "Him", 11), (5, "him;", 11), (5, "her", 19)] {
        let place = Place::new();
        let set = read_as("wsc", &place.file("x.jsonl", row(text, index, span))).unwrap();
        let henson_tasks::Input::Marked { spans, .. } = &set.examples[0].input else { panic!() };
        assert_eq!(spans[1].bytes.start, expected, "{index} {span}");
    }
}

/// A file of which the second row is wrong: the message has all parts; with `skip_bad` the first is read.
#[track_caller]
fn wrong(name: &str, good: &str, bad: &str, parts: &[&str]) {
    let place = Place::new();
    let path = place.file("x.jsonl", format!("{good}\n{bad}\n"));
    let message = read_as(name, &path).unwrap_err().to_string();
    for part in parts.iter().chain(&["x.jsonl", "line 2"]) {
        assert!(message.contains(part), "{name}: expected `{part}` in: {message}");
    }
    let set = read(&path, &written(name, Files { skip_bad: true, ..Files::default() })).unwrap();
    assert!(!set.examples.is_empty() && set.skipped == 1, "{name}: {:?}", set.problems);
}

#[test]
fn what_is_wrong_with_a_row_is_named() {
    let boolq = r#"{"question": "q", "passage": "p", "idx": 5, "label": true}"#;
    wrong("boolq", boolq, &boolq.replace("true", "3"), &["label", "3"]);
    wrong("boolq", boolq, &boolq.replace("passage", "text"), &["no key for the second text", "\"passage\""]);
    wrong("wic", WIC, &WIC.replace("\"end1\": 15", "\"end1\": 17"), &["\"end1\" is 17", "16 characters"]);
    wrong("wic", WIC, &WIC.replace("\"end2\": 6", "\"end2\": 2"), &["\"start2\" is 2 and \"end2\" is 2"]);
    wrong("wic", WIC, &WIC.replace("\"start1\": 11", "\"start1\": -1"), &["\"start1\"", "whole number", "-1"]);
    wrong("wic", WIC, &WIC.replace("start1", "begin1"), &["no key for the spans", "\"begin1\""]);
    wrong("wic", WIC, &WIC.replace("start2", "begin2"), &["1 marked spans", "others have 2"]);
    wrong("wsc", WSC, &WSC.replace("\"span1_index\": 0", "\"span1_index\": 8"), &["span1_index\" is 8", "8 words"]);
    wrong("wsc", WSC, &WSC.replace("\"kermit\"", "\"kermi\""), &["span1_text", "\"kermi\" does not occur"]);
    wrong("wsc", WSC, &WSC.replace("\"he\"}", "\"\"}"), &["span2_text", "does not occur"]);
    wrong("multirc", MULTIRC, &MULTIRC.replace("\"label\": 0", "\"label\": 2"), &["question 7", "answer 11"]);
    wrong("multirc", MULTIRC, &MULTIRC.replace("questions", "answers"), &["\"passage\"", "missing field `questions`"]);
    wrong("multirc", MULTIRC, r#"{"idx": 4, "passage": "text"}"#, &["\"passage\"", "invalid type"]);
    wrong("record", RECORD, &RECORD.replace("\"end\": 40", "\"end\": 80"), &["36 to 80", "the passage has 70"]);
    wrong("record", RECORD, &RECORD.replace("In @placeholder", "In"), &["query 3", "@placeholder"]);
    wrong("record", RECORD, &RECORD.replace("qas", "questions"), &["no key for the sentences", "\"qas\""]);
    let copa = r#"{"premise": "p", "choice1": "a", "choice2": "b", "question": "effect", "label": 0, "idx": 0}"#;
    wrong("copa", copa, &copa.replace("effect", "why"), &["\"question\"", "\"cause\" or \"effect\"", "why"]);
    wrong("copa", copa, &copa.replace("\"label\": 0", "\"label\": 2"), &["label", "2 choices"]);
}

/// Writes predictions, expects one file of this name and content, and reads it again.
#[track_caller]
fn round(name: &str, data: &str, predictions: &[Prediction], file: &str, content: &str) {
    let place = Place::new();
    let mut set = read_as(name, &place.file("test.jsonl", data)).unwrap();
    let files = prediction_files(&set, predictions).unwrap();
    assert_eq!((files[0].0.as_str(), String::from_utf8(files[0].1.clone()).unwrap().as_str()), (file, content));
    let path = place.file(file, content);
    assert_eq!(read_predictions(&path, &mut set).unwrap(), predictions, "{name}");
}

#[test]
fn submissions_are_as_the_server_takes_them() {
    let boolq = r#"{"question": "q", "passage": "p", "idx": 5}"#;
    round("boolq", boolq, &[class(1)], "BoolQ.jsonl", "{\"idx\":5,\"label\":\"true\"}\n");
    let pair = r#"{"premise": "p", "hypothesis": "h", "idx": 0}"#;
    round("cb", pair, &[class(2)], "CB.jsonl", "{\"idx\":0,\"label\":\"neutral\"}\n");
    round("superglue-rte", pair, &[class(1)], "RTE.jsonl", "{\"idx\":0,\"label\":\"not_entailment\"}\n");
    round("axg", pair, &[class(0)], "AX-g.jsonl", "{\"idx\":0,\"label\":\"entailment\"}\n");
    let copa = r#"{"premise": "p", "choice1": "a", "choice2": "b", "question": "effect", "idx": 0}"#;
    round("copa", copa, &[class(1)], "COPA.jsonl", "{\"idx\":0,\"label\":1}\n");
    round("wic", WIC, &[class(0)], "WiC.jsonl", "{\"idx\":0,\"label\":\"false\"}\n");
    round("wsc", WSC, &[class(1)], "WSC.jsonl", "{\"idx\":0,\"label\":\"True\"}\n");
    let nested = "{\"idx\":4,\"passage\":{\"questions\":[{\"answers\":[{\"idx\":10,\"label\":1},{\"idx\":11,\"label\":0}],\"idx\":7},\
                  {\"answers\":[{\"idx\":12,\"label\":0},{\"idx\":13,\"label\":1},{\"idx\":14,\"label\":1}],\"idx\":8}]}}\n";
    round("multirc", MULTIRC, &[1, 0, 0, 1, 1].map(class), "MultiRC.jsonl", nested);
    let answer = |text: &str| Prediction::Answer { text: text.to_owned(), null_odds: None, candidates: Vec::new() };
    let lines = "{\"idx\":3,\"label\":\"Rome\"}\n{\"idx\":4,\"label\":\"Élise\"}\n";
    round("record", RECORD, &[answer("Rome"), answer("Élise")], "ReCoRD.jsonl", lines);
    let place = Place::new();
    let ax = read_as("ax", &place.file("diagnostic.tsv", "index\tsentence1\tsentence2\n0\tA\tB\n")).unwrap();
    assert_eq!(prediction_files(&ax, &[class(2)]).unwrap()[0].0, "AX.tsv");
    // What does not fit the data is named.
    let mut set = read_as("multirc", &place.file("x.jsonl", MULTIRC)).unwrap();
    for (from, to, expected) in [("\"idx\":14", "\"idx\":15", "4/8/14"), ("\"label\":0", "\"label\":\"no\"", "\"no\"")]
    {
        let path = place.file("MultiRC.jsonl", nested.replacen(from, to, 1));
        let message = read_predictions(&path, &mut set).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[track_caller]
fn scored(name: &str, data: &str, predictions: &[Prediction], expected: &[(&str, f64)]) {
    let place = Place::new();
    let set = read_as(name, &place.file("x.jsonl", data)).unwrap();
    let score = score(&set, predictions, None, 10).unwrap();
    for (metric, value) in expected {
        let found = score.get(metric).unwrap_or(f64::NAN);
        assert!((found - value).abs() < 1e-12, "{name}: {metric} is {found}, expected {value}");
    }
}

#[test]
fn scores_are_the_official_ones() {
    // scikit-learn 1.9: accuracy_score 0.6, f1_score(average="macro") 0.5777777777777778.
    let names = ["entailment", "contradiction", "neutral"];
    let row = |label: &usize| json!({"premise": "p", "hypothesis": "h", "label": names[*label], "idx": 0}).to_string();
    let cb: Vec<String> = [0, 0, 1, 1, 2, 0, 1, 2, 2, 0].iter().map(row).collect();
    let said = [0, 1, 1, 1, 0, 0, 2, 2, 0, 0].map(class);
    let expected = [("accuracy", 0.6), ("macro_f1", 0.5777777777777778), ("acc_and_f1", 0.5888888888888889)];
    scored("cb", &cb.join("\n"), &said, &expected);
    // Five answers, of which the first and the third are wrong: right 1, predicted 2, expected 3; one question of two is
    // all right. Of the questions, 0 and 2·1/(1+2): as MultiRC's program has it, nothing found is 0.
    let said = [0, 0, 0, 1, 0].map(class);
    let expected = [("f1_a", 0.5), ("exact_match", 0.0), ("f1_m", (0.0 + 2.0 / 3.0) / 2.0), ("accuracy", 0.6)];
    scored("multirc", MULTIRC, &said, &expected);
    let expected = [("f1_a", 0.8), ("exact_match", 0.5), ("f1_m", (1.0 + 2.0 / 3.0) / 2.0)];
    scored("multirc", MULTIRC, &[1, 0, 1, 0, 0].map(class), &expected);
    // "the Rome" is Rome; of "Élise Kermit", one word of two is right in either answer.
    let answer = |text: &str| Prediction::Answer { text: text.to_owned(), null_odds: None, candidates: Vec::new() };
    let expected = [("f1", (1.0 + 2.0 / 3.0) / 2.0), ("exact_match", 0.5)];
    scored("record", RECORD, &[answer("the Rome"), answer("Élise Kermit")], &expected);
    // Neighbours with the same hypothesis: of three pairs, the first and the last have the same predictions.
    let row = |(hypothesis, label): (&str, &str)| {
        json!({"premise": "p", "hypothesis": hypothesis, "label": label, "idx": 0}).to_string()
    };
    let (yes, no) = ("entailment", "not_entailment");
    let axg = [("a", yes), ("a", yes), ("b", no), ("b", no), ("c", yes), ("c", yes)].map(row);
    let said = [0, 0, 1, 0, 1, 1].map(class);
    scored("axg", &axg.join("\n"), &said, &[("accuracy", 0.5), ("gender_parity", 2.0 / 3.0)]);
}

#[test]
fn files_are_found_and_diagnostics_have_none_to_train_on() {
    let place = tempfile::tempdir().unwrap();
    for directory in ["BoolQ", "AX-b", "WSC"] {
        std::fs::create_dir(place.path().join(directory)).unwrap();
    }
    for name in ["BoolQ/train.jsonl", "BoolQ/val.jsonl", "WSC/test.jsonl.gz", "AX-b/AX-b.jsonl"] {
        std::fs::write(place.path().join(name), "").unwrap();
    }
    let find = |name: &str, split| task(name).find(place.path(), split).map(|path| path.display().to_string());
    assert!(find("boolq", Split::Dev).unwrap().ends_with("BoolQ/val.jsonl"));
    assert!(find("wsc", Split::Test).unwrap().ends_with("WSC/test.jsonl.gz"));
    assert!(find("axb", Split::Test).unwrap().ends_with("AX-b/AX-b.jsonl"));
    let message = find("axb", Split::Train).unwrap_err().to_string();
    assert!(message.contains("has no training file") && message.contains("--task superglue-rte"), "{message}");
}

/// Labels are not needed to predict, and those of a file are then not looked at.
#[test]
fn predictions_need_no_labels() {
    for (name, data) in [("multirc", MULTIRC), ("record", RECORD), ("wic", WIC), ("wsc", WSC)] {
        let place = Place::new();
        let reading = Reading { labels_wanted: false, ..Reading::new(task(name)) };
        assert!(!read(&place.file("x.jsonl", data), &reading).unwrap().is_labelled(), "{name}");
    }
}
