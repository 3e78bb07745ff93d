//! Prediction files: what is written, that it is read again, and what does not fit.

use henson_tasks::{Candidate, Prediction, Set, prediction_files, read_predictions, score};

use crate::support::{Place, read_as};

fn class(class: u32) -> Prediction {
    Prediction::Class { class, scores: Vec::new() }
}

fn answer(text: &str, null_odds: Option<f64>) -> Prediction {
    Prediction::Answer { text: text.to_owned(), null_odds, candidates: Vec::new() }
}

fn files(set: &Set, predictions: &[Prediction]) -> Vec<(String, String)> {
    let files = prediction_files(set, predictions).unwrap();
    files.into_iter().map(|(name, bytes)| (name, String::from_utf8(bytes).unwrap())).collect()
}

/// Writes predictions for a file, expects one file of this name and content, and reads it again.
#[track_caller]
fn round(task: &str, data: (&str, &str), predictions: &[Prediction], name: &str, content: &str) -> Set {
    let place = Place::new();
    let mut set = read_as(task, &place.file(data.0, data.1)).unwrap();
    assert_eq!(files(&set, predictions)[0], (name.to_owned(), content.to_owned()));
    let path = place.file(name, content);
    assert_eq!(read_predictions(&path, &mut set).unwrap(), predictions, "{task}");
    set
}

#[test]
fn every_kind_is_written_and_read_again() {
    let glue = "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n1\tC\tD\tentailment\n";
    let expected = "index\tprediction\n0\tnot_entailment\n1\tentailment\n";
    let set = round("rte", ("dev.tsv", glue), &[class(1), class(0)], "RTE.tsv", expected);
    assert_eq!(score(&set, &[class(1), class(0)], None, 0).unwrap().get("accuracy"), Some(0.5));
    let test = "index\tgenre\tsentence1\tsentence2\n0\tx\tA\tB\n1\tx\tA\tB\n";
    let numbers = [Prediction::Number(4.25), Prediction::Number(0.0)];
    round("stsb", ("test.tsv", test), &numbers, "STS-B.tsv", "index\tprediction\n0\t4.250\n1\t0.000\n");
    let cola = "x\t1\t\tA\nx\t0\t\tB\n";
    let set = round("cola", ("dev.tsv", cola), &[class(1), class(1)], "CoLA.tsv", "index\tprediction\n0\t1\n1\t1\n");
    let scored = score(&set, &[class(1), class(1)], None, 0).unwrap();
    assert_eq!((scored.get("f1"), scored.positive.as_deref()), (Some(2.0 / 3.0), Some("acceptable")));
    let swag = "question,A,B,answer\nq,a,b,A\nr,a,b,B\n";
    round("choice", ("x.csv", swag), &[class(1), class(1)], "predictions.csv", "id,prediction\n0,1\n1,1\n");
    let users = "id\ttext\tlabel\na\tA\tx\nb\tB\ty\n";
    let scored = [Prediction::Class { class: 1, scores: vec![0.25, 0.75] }, class(0)];
    let expected =
        "{\"id\":\"a\",\"prediction\":\"y\",\"scores\":{\"x\":0.25,\"y\":0.75}}\n{\"id\":\"b\",\"prediction\":\"x\"}\n";
    round("classify", ("x.tsv", users), &scored, "predictions.jsonl", expected);
    let many = [
        Prediction::Classes { classes: vec![0, 1], scores: Vec::new() },
        Prediction::Classes { classes: Vec::new(), scores: Vec::new() },
    ];
    let expected = "{\"id\":\"a\",\"prediction\":[\"x\",\"y\"]}\n{\"id\":\"b\",\"prediction\":[]}\n";
    round("multilabel", ("x.tsv", users), &many, "predictions.jsonl", expected);
}

#[test]
fn tags_are_written_in_the_scheme_of_the_data() {
    // Labels: B-PER I-PER O.
    let tags = [Prediction::Tags(vec![0, 0, 2]), Prediction::Tags(vec![0])];
    let iob1 = "Jim I-PER\nHenson I-PER\nsings O\n\nJim O\n";
    let expected = "Jim I-PER I-PER\nHenson I-PER B-PER\nsings O O\n\nJim O I-PER\n\n";
    let set = round("ner", ("eng.testa", iob1), &tags, "predictions.conll", expected);
    let score = score(&set, &tags, None, 9).unwrap();
    assert_eq!((score.get("f1"), score.get("accuracy")), (Some(0.0), Some(0.5)));
    assert_eq!(score.mistakes[0].expected, "Jim Henson (PER)");
    assert_eq!(score.mistakes[0].predicted, "Jim (PER), Henson (PER)");
    let bare = "Jim\nHenson\n\n1 000\tB-PER\n";
    let place = Place::new();
    assert!(read_as("ner", &place.file("x", bare)).is_err(), "half of it has tags");
    let words = read_as("pos", &place.file("x.txt", "a\tX\nb c\tY\n")).unwrap();
    assert_eq!(files(&words, &[Prediction::Tags(vec![1, 1])])[0].1, "a\tX\tY\nb c\tY\tY\n\n");
}

#[test]
fn answers_with_candidates_and_odds() {
    let document = r#"{"data": [{"paragraphs": [{"context": "Jim sings.", "qas": [
        {"id": "b", "question": "?", "answers": [{"text": "Jim", "answer_start": 0}]},
        {"id": "a", "question": "?", "is_impossible": true, "answers": []},
        {"id": "c", "question": "?", "is_impossible": true, "answers": []}]}]}]}"#;
    let place = Place::new();
    let mut set = read_as("squad2", &place.file("dev.json", document)).unwrap();
    let candidate = Candidate { text: "Jim \"é\"".to_owned(), probability: 0.5, start_logit: 1.5, end_logit: -2.0 };
    let predictions = [
        Prediction::Answer { text: "Jim \"é\"".to_owned(), null_odds: Some(-1.5), candidates: vec![candidate] },
        answer("", Some(2.0)),
        answer("x", Some(3.0)),
    ];
    let files = files(&set, &predictions);
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["predictions.json", "nbest_predictions.json", "null_odds.json"]);
    assert_eq!(files[0].1, "{\n    \"b\": \"Jim \\\"é\\\"\",\n    \"a\": \"\",\n    \"c\": \"x\"\n}\n");
    assert_eq!(files[2].1, "{\n    \"b\": -1.5,\n    \"a\": 2.0,\n    \"c\": 3.0\n}\n");
    let best = place.file("nbest_predictions.json", &files[1].1);
    let read = read_predictions(&best, &mut set).unwrap();
    let Prediction::Answer { text, candidates, .. } = &read[0] else { panic!("{read:?}") };
    assert_eq!((text.as_str(), candidates.len(), &read[1]), ("Jim \"é\"", 1, &Prediction::None));

    // Questions without prediction count as wrong, also where "" would be right.
    let some = place.file("p.json", r#"{"b": "jim", "a": ""}"#);
    let predictions = read_predictions(&some, &mut set).unwrap();
    let score = score(&set, &predictions, None, 0).unwrap();
    assert_eq!((score.missing, score.get("no_answer_f1")), (1, Some(50.0)));
}

#[test]
fn answers_of_decoded_logits() {
    use henson_text::{AnswerCandidate, Answers};
    let candidate = |place: Option<std::ops::Range<usize>>, start_logit| AnswerCandidate {
        place,
        start_logit,
        end_logit: 0.5,
        probability: 0.5,
    };
    let mut answers = Answers {
        candidates: vec![candidate(None, 2.0), candidate(Some(4..9), 1.0)],
        chosen: Some(1),
        null_odds: Some(1.0),
    };
    let Prediction::Answer { text, null_odds, candidates } = Prediction::from_answers(&answers, "Jim sings.") else {
        panic!()
    };
    assert_eq!((text.as_str(), null_odds), ("sings", Some(1.0)));
    let texts: Vec<&str> = candidates.iter().map(|candidate| candidate.text.as_str()).collect();
    assert_eq!((texts, candidates[1].start_logit), (vec!["", "sings"], 1.0));
    answers.chosen = Some(0);
    assert_eq!(
        Prediction::from_answers(&answers, "Jim sings."),
        Prediction::Answer { text: String::new(), null_odds, candidates }
    );
}

#[test]
fn predictions_find_their_examples() {
    let place = Place::new();
    let data = place.file("dev.tsv", "id\tquestion1\tquestion2\tis_duplicate\n70\ta\tb\t0\n60\tc\td\t1\n");
    let mut set = read_as("qqp", &data).unwrap();
    for (name, content) in [
        // By id in any order, by a count from 0, and in order without ids; also in the words of config.json.
        ("a.tsv", "index\tprediction\n60\t1\n70\t0\n"),
        ("b.tsv", "index\tprediction\n0\t0\n1\t1\n"),
        ("c.txt", "0\n1\n"),
        ("d.tsv", "70\t0\n60\t1\n"),
        ("e.csv", "prediction,id\nduplicate,60\nnot_duplicate,70\n"),
        ("f.jsonl", "{\"id\": 60, \"label\": 1}\n{\"id\": 70, \"label\": 0}\n"),
    ] {
        let predictions = read_predictions(&place.file(name, content), &mut set).unwrap();
        assert_eq!(predictions, [class(0), class(1)], "{name}");
    }
    for (content, parts) in [
        ("index\tprediction\n70\t0\n", &["1 of 2 examples have no prediction", "\"60\""][..]),
        ("index\tprediction\n70\t0\n70\t1\n", &["line 3", "second prediction for \"70\""]),
        ("index\tprediction\n70\t0\n60\t1\n50\t1\n", &["3 predictions for 2 examples"]),
        ("index\tprediction\n70\t0\n60\tmaybe\n", &["line 3", "\"maybe\"", "\"0\", \"1\""]),
        ("index\tprediction\n70\t0\n60\t\n", &["line 3", "empty"]),
        ("a\tb\tc\n", &["line 1", "\"prediction\"", "3 columns"]),
    ] {
        let path = place.file("bad.tsv", content);
        let message = read_predictions(&path, &mut set).unwrap_err().to_string();
        assert!(message.contains("bad.tsv"), "{message}");
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
    let mut set = read_as("ner", &place.file("x.conll", "a O\nb O\n")).unwrap();
    for (content, part) in [
        ("a O\nc O\n", "word 2"),
        ("a O\n", "the sentence's end"),
        ("a O\n\nb O\n", "2 sentences"),
        ("a\nb\n", "line 1"),
    ] {
        let message = read_predictions(&place.file("p.conll", content), &mut set).unwrap_err().to_string();
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

#[test]
fn labels_of_predictions_alone() {
    // A model may say what this file does not have.
    let place = Place::new();
    let mut set = read_as("classify", &place.file("x.tsv", "text\tlabel\na\tx\nb\ty\n")).unwrap();
    let predictions = read_predictions(&place.file("p.txt", "z\ny\n"), &mut set).unwrap();
    let score = score(&set, &predictions, None, 5).unwrap();
    assert_eq!((score.get("accuracy"), set.labels.join(" ")), (Some(0.5), "x y z".to_owned()));
    assert_eq!((score.mistakes[0].expected.as_str(), score.mistakes[0].predicted.as_str()), ("x", "z"));
    let json = score.to_json();
    // Mistakes alone: what was right is among the labels.
    assert_eq!(json["confusions"], serde_json::json!([{"expected": "x", "predicted": "z", "count": 1}]));
    assert_eq!(json["labels"]["y"]["recall"], 1.0);
}

#[test]
fn what_needs_labels_says_so() {
    let place = Place::new();
    let set = read_as("cola", &place.file("test.tsv", "index\tsentence\n0\tA\n")).unwrap();
    let message = score(&set, &[class(0)], None, 0).unwrap_err().to_string();
    assert!(message.contains("test.tsv has no labels"), "{message}");
    assert!(score(&set, &[], None, 0).unwrap_err().to_string().contains("0 predictions for 1 examples"));
}
