//! Every head from text to answer against `transformers`, on every kernel set of the machine; `tools/golden/heads.py`
//! tells how the values were made.

use std::path::{Path, PathBuf};

use henson_infer::{
    AnswerSettings, Choices, InferError, Input, Length, Model, Problem, Question, QuestionSettings, Stride, TagInput,
    Task, Want,
};
use henson_tensor::{DType, Isa};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

/// f32 against f64, on logits of about 1; measured is below 1.5·10⁻⁶ on all kernel sets here.
const TOLERANCE: f64 = 1e-5;
/// bf16 keeps 8 bits of each activation; measured is below 0.04.
const BF16_TOLERANCE: f64 = 0.08;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(name)
}

/// A golden model with the golden vocabulary; `change` may edit its config.
fn directory(head: &str, change: impl FnOnce(&mut Value)) -> TempDir {
    let directory = TempDir::new().unwrap();
    let copy = |from: PathBuf, to: &str| std::fs::copy(from, directory.path().join(to)).unwrap();
    copy(data(&format!("bert-golden/{head}/model.safetensors")), "model.safetensors");
    copy(data("likelihood/vocab.txt"), "vocab.txt");
    let config = std::fs::read(data(&format!("bert-golden/{head}/config.json"))).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    change(&mut config);
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    directory
}

fn open(head: &str, isa: Option<Isa>, dtype: DType, want: Want) -> Model {
    open_directory(directory(head, |_| ()).path(), isa, dtype, want).unwrap()
}

fn open_directory(path: &Path, isa: Option<Isa>, dtype: DType, want: Want) -> henson_infer::Result<Model> {
    Model::open(path, &crate::common::device(isa, Some(2)), dtype, want)
}

fn golden(task: &str) -> Value {
    let file = std::fs::read(data("heads/golden.json")).unwrap();
    serde_json::from_slice::<Value>(&file).unwrap()[task].clone()
}

fn get<T: DeserializeOwned>(value: &Value, key: impl serde_json::value::Index + std::fmt::Display) -> T {
    serde_json::from_value(value[&key].clone()).unwrap_or_else(|error| panic!("{key} of {value}: {error}"))
}

#[track_caller]
fn near(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((f64::from(*got) - expected).abs() <= tolerance, "{what}: {got} not {expected}");
    }
}

/// f32 on every kernel set, and bf16 on the best.
fn every_machine(mut check: impl FnMut(Isa, DType, f64)) {
    for isa in Isa::available() {
        check(isa, DType::F32, TOLERANCE);
    }
    check(Isa::best(), DType::Bf16, BF16_TOLERANCE);
}

#[test]
fn classes_are_those_of_transformers() {
    let golden = golden("classify");
    every_machine(|isa, dtype, tolerance| {
        for (head, problem) in [
            ("sequence", Problem::SingleLabel),
            ("multilabel", Problem::MultiLabel),
            ("regression", Problem::Regression),
        ] {
            let model = open(head, Some(isa), dtype, Want::Task(Task::Classify));
            assert_eq!(model.problem().unwrap(), problem);
            let cases = golden[head].as_array().unwrap();
            let texts: Vec<(String, Option<String>, bool)> = cases
                .iter()
                .map(|case| match &case["text"] {
                    Value::String(text) => (text.clone(), None, get(case, "windows")),
                    pair => (get(pair, 0), Some(get(pair, 1)), get(case, "windows")),
                })
                .collect();
            for windows in [false, true] {
                let some: Vec<usize> = (0..cases.len()).filter(|&i| texts[i].2 == windows).collect();
                assert!(!some.is_empty());
                let inputs: Vec<Input<'_>> = some
                    .iter()
                    .map(|&i| match &texts[i] {
                        (first, Some(second), _) => Input::Pair(first, second),
                        (first, None, _) => Input::One(first),
                    })
                    .collect();
                let classified = model.classify(&inputs, Length { most: None, windows }).unwrap();
                for (&i, got) in some.iter().zip(&classified) {
                    let what = format!("{head} on {isa} in {dtype}: {:?}", texts[i]);
                    near(&got.logits, &get::<Vec<f64>>(&cases[i], "logits"), tolerance, &what);
                    near(&got.scores, &get::<Vec<f64>>(&cases[i], "scores"), tolerance, &what);
                    assert_eq!(got.dropped > 0, texts[i].0.len() > 80 && !windows, "{what}");
                }
                // Company changes no bit.
                if !crate::common::company_keeps_bits() {
                    continue;
                }
                assert_eq!(model.classify(&inputs[1..2], Length { most: None, windows }).unwrap()[0], classified[1]);
            }
        }
    });
}

#[test]
fn tags_are_those_of_transformers() {
    let golden = golden("tag");
    every_machine(|isa, dtype, tolerance| {
        let model = open("token", Some(isa), dtype, Want::Task(Task::Tag));
        let texts: Vec<Vec<String>> = golden.as_array().unwrap().iter().map(|case| get(case, "words")).collect();
        let texts: Vec<Vec<&str>> = texts.iter().map(|words| words.iter().map(String::as_str).collect()).collect();
        let inputs: Vec<TagInput<'_>> = texts.iter().map(|words| TagInput::Words(words)).collect();
        let tagged = model.tag(&inputs, Length::WINDOWS).unwrap();
        for (case, tagged) in golden.as_array().unwrap().iter().zip(&tagged) {
            let expected: Vec<Vec<f64>> = get(case, "logits");
            assert_eq!(tagged.words.len(), expected.len());
            for (word, expected) in tagged.words.iter().zip(&expected) {
                near(&word.logits, expected, tolerance, &format!("{isa} {dtype} {}", &tagged.text[word.place.clone()]));
                let best = word.label.unwrap();
                assert!(word.logits.iter().all(|x| *x <= word.logits[best]));
            }
        }
        // A tag set without O: every word is one of its own.
        assert_eq!(tagged[0].entities.len(), 6);
        assert!(tagged[0].entities[0].label.starts_with("LABEL_"));
    });
}

#[test]
fn entities_are_parts_of_the_text() {
    let names = json!({"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"});
    let directory = directory("token", |config| config["id2label"] = names);
    let model = open_directory(directory.path(), None, DType::F32, Want::AsSaved).unwrap();
    assert_eq!(model.labels(), ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]);
    let text = "J\u{ed}m Henson's caf\u{e9}, and the dogs were walking with the old man! ".repeat(4);
    let tagged = model.tag(&[TagInput::Text(&text), TagInput::Text("")], Length::WINDOWS).unwrap();
    assert!(tagged[1].words.is_empty() && tagged[1].entities.is_empty());
    let tagged = &tagged[0];
    assert!(!tagged.entities.is_empty() && tagged.text == text && tagged.dropped == 0);
    let mut end = 0;
    for entity in &tagged.entities {
        assert!(["PER", "LOC"].contains(&entity.label.as_str()) && entity.place.start >= end);
        end = entity.place.end;
        let words = &tagged.words[entity.words.clone()];
        assert_eq!((words[0].place.start, words[words.len() - 1].place.end), (entity.place.start, entity.place.end));
        assert_eq!(text[entity.place.clone()].trim(), &text[entity.place.clone()]);
        let mean = words.iter().map(|word| word.score).sum::<f32>() / words.len() as f32;
        assert_eq!(entity.score, mean);
        assert!(entity.score > 0.0 && entity.score <= 1.0);
        assert!(words.iter().all(|word| model.labels()[word.label.unwrap()].ends_with(&entity.label)));
    }
    let outside = tagged.words.iter().filter(|word| word.label == Some(0)).count();
    let inside: usize = tagged.entities.iter().map(|entity| entity.words.len()).sum();
    assert_eq!(outside + inside, tagged.words.len());
    // Without windows the words at the end have no tag.
    let cut = model.tag(&[TagInput::Text(&text)], Length::CUT).unwrap().remove(0);
    assert!(cut.dropped > 0 && cut.words.last().unwrap().label.is_none());
    assert!(cut.words.last().unwrap().logits.is_empty());
}

#[test]
fn answers_are_those_of_the_reference() {
    let golden = golden("answer");
    every_machine(|isa, dtype, tolerance| {
        let model = open("qa", Some(isa), dtype, Want::Task(Task::Answer));
        for case in golden.as_array().unwrap() {
            let (question, passage): (String, String) = (get(case, "question"), get(case, "passage"));
            let asked = [Question { question: &question, passage: &passage }];
            let stride = Stride::Step(get(case, "step"));
            let length = QuestionSettings { stride, ..model.question_settings() };
            for (kind, no_answer) in [("must", None), ("may", Some(-3.0))] {
                let settings = AnswerSettings { no_answer, ..model.answer_settings() };
                let answers = model.answer(&asked, length, &settings).unwrap().remove(0);
                let expected: Vec<(String, f64, f64, f64)> = get(&case[kind], "n_best");
                let what = format!("{question} {kind} on {isa} in {dtype}");
                if dtype == DType::F32 {
                    let texts: Vec<&str> = answers.candidates.iter().map(|c| c.text(&passage)).collect();
                    assert_eq!(texts, expected.iter().map(|(text, ..)| text).collect::<Vec<_>>(), "{what}");
                    assert_eq!(answers.best().unwrap().text(&passage), get::<String>(&case[kind], "answer"), "{what}");
                }
                for candidate in &answers.candidates {
                    let Some((_, start, end, probability)) =
                        expected.iter().find(|(text, ..)| text == candidate.text(&passage))
                    else {
                        continue;
                    };
                    near(&[candidate.start_logit, candidate.end_logit], &[*start, *end], tolerance, &what);
                    assert!((candidate.probability - probability).abs() < tolerance, "{what}");
                }
                match (answers.null_odds, get::<Option<f64>>(&case[kind], "odds")) {
                    (Some(odds), Some(expected)) => assert!((odds - expected).abs() < 4.0 * tolerance, "{what}"),
                    (odds, expected) => assert_eq!(odds, expected, "{what}"),
                }
            }
        }
    });
}

#[test]
fn a_stored_threshold_lets_the_model_say_nothing() {
    let asked = [Question { question: "Who?", passage: "Jim Henson" }];
    let answer = |directory: &TempDir| {
        let model = open_directory(directory.path(), None, DType::F32, Want::Task(Task::Answer)).unwrap();
        model.answer(&asked, model.question_settings(), &model.answer_settings()).unwrap().remove(0)
    };
    let must = answer(&directory("qa", |_| ()));
    assert_eq!((must.best().unwrap().text("Jim Henson"), must.null_odds), ("Hen", None));
    let may = answer(&directory("qa", |config| config["henson_no_answer_threshold"] = json!(-3.0)));
    assert_eq!(may.best().unwrap().place, None);
    assert!((may.null_odds.unwrap() + 1.652).abs() < 1e-3);
}

#[test]
fn choices_are_those_of_transformers() {
    let golden = golden("choose");
    every_machine(|isa, dtype, tolerance| {
        let model = open("choice", Some(isa), dtype, Want::Task(Task::Choose));
        let cases: Vec<(String, Vec<String>, Vec<f64>)> = golden
            .as_array()
            .unwrap()
            .iter()
            .map(|case| (get(case, "context"), get(case, "choices"), get(case, "logits")))
            .collect();
        let choices: Vec<Vec<&str>> = cases.iter().map(|(_, c, _)| c.iter().map(String::as_str).collect()).collect();
        let asked: Vec<Choices<'_>> =
            cases.iter().zip(&choices).map(|((context, ..), choices)| Choices { context, choices }).collect();
        let chosen = model.choose(&asked, None).unwrap();
        for ((context, _, logits), chosen) in cases.iter().zip(&chosen) {
            near(&chosen.logits, logits, tolerance, &format!("{context} on {isa} in {dtype}"));
            assert!((chosen.probabilities.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            assert!(chosen.logits.iter().all(|x| *x <= chosen.logits[chosen.best().unwrap()]));
        }
        assert_eq!(chosen[1].best(), Some(0), "the first of equals");
        assert_eq!(chosen[1].logits[0], chosen[1].logits[1]);
        assert!(chosen[2].dropped > 0 && chosen[0].dropped == 0);
        let nothing = model.choose(&[Choices { context: "a", choices: &[] }], None).unwrap();
        assert_eq!(nothing[0].best(), None);
    });
}

#[test]
fn attention_is_that_of_transformers() {
    let model = open("model", None, DType::F32, Want::Encoder);
    for case in golden("attention").as_array().unwrap() {
        let (first, second): (String, Option<String>) = (get(case, "first"), get(case, "second"));
        let input = second.as_deref().map_or(Input::One(&first), |second| Input::Pair(&first, second));
        let maps = model.attention(input, None).unwrap();
        let layers: Vec<Vec<f64>> = get(case, "layers");
        let tokens: Vec<String> = maps.sequence.ids.iter().map(|id| model.tokenizer().token(*id).unwrap()).collect();
        assert_eq!(tokens, get::<Vec<String>>(case, "tokens"));
        assert_eq!((maps.heads, maps.layers().count(), layers.len()), (3, 2, 2));
        for (layer, expected) in maps.layers().zip(&layers) {
            near(layer, expected, 1e-6, &first);
        }
        let s = tokens.len();
        let head = maps.head(1, 2).unwrap();
        assert!(head == &maps.layers().nth(1).unwrap()[2 * s * s..] && head[..s].iter().sum::<f32>() > 0.999);
        assert!(maps.head(2, 0).is_none() && maps.head(0, 3).is_none());
    }
    let cut = model.attention(Input::One(&"cat ".repeat(50)), Some(10)).unwrap();
    assert_eq!((cut.sequence.len(), cut.sequence.dropped), (10, 42));
}

/// Clients of the server go by these names.
#[test]
fn abilities_have_the_names_of_routes() {
    for (head, left_to_right, own) in [
        ("model", false, &[][..]),
        ("mlm", false, &["fill"]),
        ("mlm", true, &[]),
        ("pretraining", false, &["fill"]),
        ("sequence", false, &["predict"]),
        ("regression", false, &["predict", "rerank"]),
        ("token", false, &["tag"]),
        ("qa", false, &["answer"]),
        ("choice", false, &["choose"]),
    ] {
        let directory = directory(head, |config| config["is_decoder"] = json!(left_to_right));
        let model = open_directory(directory.path(), None, DType::F32, Want::AsSaved).unwrap();
        let mut names = vec!["embed", "embed_all", "similarity", "tokenize", "decode", "inside"];
        names.extend(own);
        assert_eq!(serde_json::to_value(model.abilities()).unwrap(), json!(names), "{head}");
    }
}

#[test]
fn a_model_without_the_head_is_explained() {
    let message = |head: &str, want: Want| {
        let directory = directory(head, |_| ());
        match open_directory(directory.path(), None, DType::F32, want) {
            Err(error @ InferError::Head { .. }) => error.to_string(),
            Err(other) => panic!("{head}: {other}"),
            Ok(_) => panic!("{head}: it opened"),
        }
    };
    for (head, want, parts) in [
        (
            "mlm",
            Want::Task(Task::Classify),
            ["cannot classify with", "masked language model (BertForMaskedLM)", "--task classify"],
        ),
        ("pretraining", Want::Task(Task::Answer), ["cannot answer with", "BertForPreTraining", "--task qa"]),
        (
            "model",
            Want::Task(Task::Tag),
            ["encoder without a head (BertModel)", "BertForTokenClassification", "--task tag"],
        ),
        ("token", Want::Task(Task::Classify), ["tagger of words", "BertForSequenceClassification", "henson finetune"]),
        ("sequence", Want::Task(Task::Choose), ["classifier of texts", "multiple-choice model", "--task choice"]),
        ("model", Want::Reranker, ["cannot rerank with", "BertForSequenceClassification", "--task rerank"]),
    ] {
        let message = message(head, want);
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
    // A model that was opened as it is, and asked for something else.
    let model = open("qa", None, DType::F32, Want::AsSaved);
    assert_eq!(model.task(), Some(Task::Answer));
    let error = model.classify(&[Input::One("a")], Length::CUT).unwrap_err();
    assert!(error.to_string().contains("question answerer"), "{error}");

    // Without `architectures` the weights tell.
    for (head, task) in
        [("token", Task::Tag), ("qa", Task::Answer), ("sequence", Task::Classify), ("choice", Task::Choose)]
    {
        let directory = directory(head, |config| config["architectures"] = json!([]));
        let model = open_directory(directory.path(), None, DType::F32, Want::Task(task)).unwrap();
        assert_eq!(model.task(), Some(task));
        let as_saved = open_directory(directory.path(), None, DType::F32, Want::AsSaved);
        match head {
            // One logit for a sequence may be a number as well: its two labels by default do not fit.
            "choice" => assert!(as_saved.is_err()),
            _ => assert_eq!(as_saved.unwrap().task(), Some(task)),
        }
    }
    // And the number of labels tells a regression from a class, as in transformers.
    for (head, problem) in [("regression", Problem::Regression), ("multilabel", Problem::SingleLabel)] {
        let directory = directory(head, |config| config["problem_type"] = Value::Null);
        let model = open_directory(directory.path(), None, DType::F32, Want::AsSaved).unwrap();
        assert_eq!(model.problem().unwrap(), problem);
    }
    let strange = directory("sequence", |config| config["problem_type"] = json!("ranking"));
    let model = open_directory(strange.path(), None, DType::F32, Want::AsSaved).unwrap();
    let error = model.classify(&[Input::One("a")], Length::CUT).unwrap_err().to_string();
    assert!(error.contains("`ranking`") && error.contains("regression"), "{error}");
}
