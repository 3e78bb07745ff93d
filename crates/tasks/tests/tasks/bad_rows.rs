//! What is wrong is said with its file and line, or counted.

use std::path::Path;

use henson_tasks::{Files, Reading, TaskError, read};

use crate::support::{Place, read_as, task, written};

/// A file of which one row is wrong: the message has all parts; with `skip_bad` the others are read.
#[track_caller]
fn check(name: &str, file: &str, content: &str, parts: &[&str], others: usize) {
    let place = Place::new();
    let path = place.file(file, content);
    says(&read_as(name, &path).unwrap_err(), &path, parts);
    let set = read(&path, &written(name, Files { skip_bad: true, ..Files::default() })).unwrap();
    assert_eq!((set.examples.len(), set.skipped, set.problems.len()), (others, 1, 1), "{:?}", set.problems);
}

#[track_caller]
fn says(error: &TaskError, path: &Path, parts: &[&str]) {
    let message = error.to_string();
    assert!(message.contains(&path.display().to_string()), "{message}");
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

/// A file of which nothing can be used.
#[track_caller]
fn refused(name: &str, file: &str, content: &str, parts: &[&str]) {
    let place = Place::new();
    let path = place.file(file, content);
    for skip_bad in [false, true] {
        says(&read(&path, &written(name, Files { skip_bad, ..Files::default() })).unwrap_err(), &path, parts);
    }
}

#[test]
fn rows_of_tables() {
    check("sst2", "x.tsv", "sentence\tlabel\na\t1\nb\n", &["line 3", "1 columns", "2"], 1);
    check("sst2", "x.tsv", "sentence\tlabel\na\t1\nb\tc\t0\n", &["line 3", "3 columns", "2"], 1);
    check("sst2", "x.tsv", "sentence\tlabel\na\t1\nb\t2\n", &["line 3", "unknown label \"2\"", "\"0\", \"1\""], 1);
    check("sst2", "x.tsv", "sentence\tlabel\n  \t1\nb\t1\n", &["line 2", "\"sentence\"", "empty"], 1);
    check("sst2", "x.tsv", "sentence\tlabel\na\t1\nb\t\n", &["line 3", "no label"], 1);
    check("cola", "x.tsv", "a\t1\t\tb\na\t1\n", &["line 2", "2 columns, expected 4"], 1);
    check("stsb", "x.tsv", "sentence1\tsentence2\tscore\na\tb\t1\na\tb\tfive\n", &["line 3", "a number", "five"], 1);
    check("stsb", "x.tsv", "sentence1\tsentence2\tscore\na\tb\t1\na\tb\tNaN\n", &["line 3", "a number"], 1);
    check(
        "classify",
        "x.jsonl",
        "{\"text\": \"a\", \"label\": 1}\n\n{\"text\": \n",
        &["line 3", "broken JSON", "column"],
        1,
    );
    check("classify", "x.jsonl", "[1]\n{\"text\": \"a\", \"label\": 1}\n", &["line 1", "a list"], 1);
    check(
        "classify",
        "x.jsonl",
        "{\"label\": 1}\n{\"text\": \"a\", \"label\": 1}\n",
        &["line 1", "\"text\"", "\"label\""],
        1,
    );
    check(
        "classify",
        "x.jsonl",
        "{\"text\": \"a\", \"label\": 1}\n{\"text\": [], \"label\": 1}\n",
        &["line 2", "a list"],
        1,
    );
    check("choice", "x.csv", "question,A,B,answer\na,b,c,A\na,b,c,C\n", &["line 3", "\"C\"", "\"A\", \"B\""], 1);
    check("choice", "x.csv", "question,A,B,answer\na,b,c,A\na,,c,B\n", &["line 3", "choice \"A\"", "empty"], 1);
    check("choice", "x.csv", "question,A,B,answer\na,b,c,A\na,b,,A\n", &["line 3", "1 choices", "at least 2"], 1);
    let latin = String::from_utf8_lossy(b"text\tlabel\na\tx\n").into_owned();
    let place = Place::new();
    let path = place.file("x.tsv", [latin.as_bytes(), b"caf\xe9\tx\n"].concat());
    says(&read_as("classify", &path).unwrap_err(), &path, &["line 3", "byte 4", "UTF-8"]);
}

#[test]
fn sentences() {
    check("ner", "x.conll", "a O\nb O\n\nc O\nd\n", &["line 5", "1 columns", "2"], 1);
    // One long sentence is left, which says nothing about how the file is divided.
    check("ner", "x.conll", &("a O\n".repeat(50) + "\nb\n"), &["line 52", "1 columns", "2"], 1);
    check(
        "tag",
        "x.jsonl",
        "{\"words\": [\"a\"], \"tags\": []}\n{\"words\": [\"a\"], \"tags\": [\"X\"]}\n",
        &["line 1", "1 words have 0 tags"],
        1,
    );
    check("ner", "x.conll", "a X O\n\nb X\n", &["line 3", "2 columns", "3"], 1);
    // A file without empty lines: refused before it fills the memory.
    let place = Place::new();
    let path = place.file("endless.conll", "a O\n".repeat(70_000) + "\nb O\n");
    says(&read_as("ner", &path).unwrap_err(), &path, &["line 65537", "empty line"]);
    let reading = written("ner", Files { labels: vec!["O".to_owned(), "B-X".to_owned()], ..Files::default() });
    let place = Place::new();
    let path = place.file("y.conll", "a O\n\nb O\nc B-Y\n");
    says(&read(&path, &reading).unwrap_err(), &path, &["line 3", "unknown label \"B-Y\"", "\"O\", \"B-X\""]);
}

#[test]
fn questions() {
    let document = |qas: &str| {
        let good = r#"{"id": "good", "question": "Who?", "answers": [{"text": "Jim", "answer_start": 0}]}"#;
        format!(
            r#"{{"data": [{{"title": "T", "paragraphs": [{{"context": "Jim sings.", "qas": [{good}, {qas}]}}]}}]}}"#
        )
    };
    let answer = |text: &str, start: i64| {
        document(&format!(
            r#"{{"id": "q7", "question": "?", "answers": [{{"text": "{text}", "answer_start": {start}}}]}}"#
        ))
    };
    check("squad1", "x.json", &answer("sings", 5), &["question q7", "\"sings\"", "character 5", "\"ings.\""], 1);
    check("squad1", "x.json", &answer("sings", 99), &["question q7", "character 99", "has 10"], 1);
    check("squad1", "x.json", &answer("sings. Now", 4), &["question q7", "outside of the passage"], 1);
    check("squad1", "x.json", &answer("sings", -1), &["question q7", "answer_start"], 1);
    check(
        "squad1",
        "x.json",
        &document(r#"{"id": "q7", "question": "?", "answers": []}"#),
        &["question q7", "squad2"],
        1,
    );
    check(
        "squad1",
        "x.json",
        &document(r#"{"id": "q7", "question": " ", "answers": []}"#),
        &["question q7", "empty"],
        1,
    );
    check(
        "squad1",
        "x.json",
        &document(r#"{"question": "?"}"#),
        &["article \"T\", paragraph 1, question 2", "\"id\""],
        1,
    );
    // Scores do not need the places.
    let place = Place::new();
    let path = place.file("x.json", answer("sings", 99));
    let reading = Reading { places_needed: false, ..Reading::new(task("squad1")) };
    assert_eq!(read(&path, &reading).unwrap().examples.len(), 2);
}

#[test]
fn whole_files() {
    refused(
        "sst2",
        "x.tsv",
        "text\tlabel\na\t1\n",
        &["no column for the text", "\"sentence\"", "\"text\", \"label\"", "--text-column"],
    );
    refused("pair", "x.csv", "text,label\na,1\n", &["the second text", "--second-column"]);
    refused("sst2", "x.tsv", "", &["no examples for task sst2", "empty"]);
    refused("squad1", "x.json", "{\"data\": [\n{\"paragraphs\": 3}]}", &["JSON", "line 2"]);
    refused("squad1", "x.json", "{\"rows\": []}", &["JSON", "data"]);
    refused("choice", "x.csv", "question,answer\na,b\n", &["the choices", "--choice-columns"]);
    // What an open quote swallows cannot be told.
    refused("classify", "x.csv", "text,label\na,x\n\"b,x\nc,x\n", &["line 3", "quote", "--quotes=false"]);
    refused("rte", "x.parquet", "PAR1 and no more", &["parquet"]);
    refused("ner", "x.conll", "\n\n", &["no examples"]);
    let path = Path::new("nowhere/train.tsv");
    says(&read_as("sst2", path).unwrap_err(), path, &["cannot open"]);
}

#[test]
fn items_of_json_arrays() {
    let item = |n: &str| format!("{{\"text\": \"{n}\", \"label\": \"x\"}}");
    let (a, b) = (item("a"), item("b"));
    check("classify", "x.json", &format!("[\n{a},\n\n7,\n{b}\n]"), &["line 4", "a number"], 2);
    check("classify", "x.json", &format!("[\n{a},\n{{\"text\": }},\n{b}]"), &["line 3", "broken JSON"], 1);
    check("classify", "x.json", &format!("[\n{a},\n{b}\n"), &["line 4", "broken JSON", "end of the array"], 2);
    check("classify", "x.json", &format!("[\n{a}\n{b}\n]"), &["line 3", "broken JSON", "','"], 1);
    check("classify", "x.json", &format!("[\n{a}\n] {b}"), &["line 3", "follows the end"], 1);
    refused("classify", "x.json", "[]", &["no examples"]);
}

#[test]
fn lines_of_fasttext() {
    check("classify", "x.txt", "__label__a one\n__label__a\n", &["line 2", "\"text\"", "empty"], 1);
    check("classify", "x.txt", "__label__a one\n__label__a __label__b two\n", &["line 2", "\"label\"", "a list"], 1);
    check("classify", "x.txt", "__label__a one\ntwo\n", &["line 2", "no label"], 1);
}

#[test]
fn spans() {
    let row = |spans: &str| {
        format!("{{\"text\": \"Jim sat\", \"spans\": []}}\n{{\"text\": \"Jim sat by\", \"spans\": {spans}}}\n")
    };
    for (spans, parts) in [
        ("[[0, 2, \"X\"]]", &["\"Ji\"", "whole words", "\"Jim\"", "--skip-bad"][..]),
        ("[[0, 3, \"X\"], [0, 7, \"Y\"]]", &["\"Jim\"", "\"Jim sat\"", "overlap"]),
        ("[[0, 99, \"X\"]]", &["character 0 to 99", "10"]),
        ("[[3, 3, \"X\"]]", &["character 3 to 3"]),
        ("[[0, 3]]", &["expected a span such as", "[0,3]"]),
        ("[[\"Jim\", \"sat\", \"X\"]]", &["start and end"]),
        ("[\"O\", \"O\"]", &["expected a span such as", "\"O\""]),
        ("7", &["expected a list of spans"]),
    ] {
        check("ner", "x.jsonl", &row(spans), &[&["line 2"], parts].concat(), 1);
    }
    check(
        "ner",
        "x.jsonl",
        "{\"text\": \"a\", \"spans\": []}\n{\"text\": \" \", \"spans\": []}\n",
        &["line 2", "no words"],
        1,
    );
}
