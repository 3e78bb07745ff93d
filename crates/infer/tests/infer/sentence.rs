//! Sentence vectors, cross-encoders, aggregated tags and zero-shot classes against sentence-transformers and transformers'
//! pipelines; `tools/golden/sentence.py` tells how the values were made.

use std::path::{Path, PathBuf};

use henson_infer::{
    Aggregation, EmbedSettings, InferError, Length, Model, Prompts, SentenceFacts, SentenceKind, TagInput, Task, Want,
    ZeroShot,
};
use henson_tensor::DType;
use serde_json::{Value, json};
use tempfile::TempDir;

/// What is promised of a cosine.
const COSINE: f64 = 1e-6;
/// Of scores and probabilities; measured is below 10⁻⁶.
const TOLERANCE: f64 = 5e-6;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(name)
}

fn golden(part: &str) -> Value {
    let bytes = std::fs::read(data("sentence/golden.json")).unwrap();
    serde_json::from_slice::<Value>(&bytes).unwrap()[part].clone()
}

/// A golden model in a directory, with changes of its config.
fn place_model(weights: &str, to: &Path, changes: &Value) {
    std::fs::create_dir_all(to).unwrap();
    let source = data(weights);
    std::fs::copy(source.join("model.safetensors"), to.join("model.safetensors")).unwrap();
    std::fs::copy(data("likelihood/vocab.txt"), to.join("vocab.txt")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    // What was not written is what the tokenizer has anyway.
    if !to.join("tokenizer_config.json").exists() {
        std::fs::write(to.join("tokenizer_config.json"), r#"{"model_max_length": 40}"#).unwrap();
    }
}

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            copy_files(&entry.path(), &to.join(entry.file_name()));
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

/// The files of a case of `embed` with the model that they belong to.
fn sentence_model(case: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    copy_files(&data("sentence/embed").join(case), directory.path());
    let nested = directory.path().join("0_Transformer");
    if nested.exists() {
        place_model("bert-golden/model", &nested, &json!({}));
        std::fs::write(directory.path().join("config.json"), r#"{"__version__": "0.2.5"}"#).unwrap();
    } else {
        place_model("bert-golden/model", directory.path(), &json!({}));
    }
    directory
}

fn open(path: &Path, want: Want) -> henson_infer::Result<Model> {
    Model::open(path, &crate::common::device(None, Some(2)), DType::F32, want)
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|x| x.as_str().unwrap()).collect()
}

#[track_caller]
fn near(got: &[f32], expected: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).fold(0.0, f64::max);
    assert!(worst <= TOLERANCE, "{what}: {worst:e} off\n{got:?}\n{expected:?}");
}

#[test]
fn vectors_are_those_of_sentence_transformers() {
    let golden = golden("embed");
    let texts = strings(&golden["texts"]);
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 22);
    for case in cases {
        let name = case["case"].as_str().unwrap();
        let directory = sentence_model(name);
        let mut settings = EmbedSettings::of_directory(directory.path()).unwrap();
        if let Some(prompt) = case.get("prompt_name") {
            let prompts = Prompts::of_directory(directory.path()).unwrap();
            settings.prompt = prompts.get(prompt.as_str()).unwrap().to_owned();
        }
        if let Some(prompt) = case.get("prompt") {
            settings.prompt = prompt.as_str().unwrap().to_owned();
        }
        let model = open(directory.path(), Want::Encoder).unwrap();
        let got = model.embed(&texts, &settings, false).unwrap();
        let width = settings.width(24).unwrap();
        for (i, (got, expected)) in got.iter().zip(case["vectors"].as_array().unwrap()).enumerate() {
            let expected = floats(expected);
            assert_eq!((got.vector.len(), expected.len()), (width, width), "{name}");
            let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let vector: Vec<f64> = got.vector.iter().map(|x| f64::from(*x)).collect();
            let length = product(&expected, &expected).sqrt();
            let cosine = product(&vector, &expected) / length / product(&vector, &vector).sqrt();
            assert!(cosine > 1.0 - COSINE, "{name}, text {i}: {cosine}");
            // The length, too: not all are normalised.
            let longest = vector.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(longest <= TOLERANCE * length.max(1.0), "{name}, text {i}: {longest:e} off");
        }
        // Alone and among others.
        let alone = model.embed(&texts[1..2], &settings, false).unwrap();
        assert!(!crate::common::company_keeps_bits() || alone[0].vector == got[1].vector, "{name}");
    }
}

#[test]
fn facts_of_directories() {
    let facts = SentenceFacts::of_directory(sentence_model("prompt").path()).unwrap();
    assert_eq!((facts.kind, facts.similarity.as_deref()), (Some(SentenceKind::Embedding), Some("cosine")));
    assert_eq!(facts.prompts.default.as_deref(), Some("query"));
    let plain = TempDir::new().unwrap();
    place_model("bert-golden/model", plain.path(), &json!({}));
    assert_eq!(SentenceFacts::of_directory(plain.path()).unwrap(), SentenceFacts::default());
}

/// With windows, a prompt that does not count is in the first window alone.
#[test]
fn long_texts_with_prompts_are_divided() {
    let directory = sentence_model("prompt-apart-all");
    let model = open(directory.path(), Want::Encoder).unwrap();
    let settings = EmbedSettings::of_directory(directory.path()).unwrap();
    let long = "the old man and the small child ".repeat(20);
    let texts = ["cats", long.as_str()];
    let windows = model.embed(&texts, &settings, true).unwrap();
    let cut = model.embed(&texts, &settings, false).unwrap();
    assert_eq!(windows[0].vector, cut[0].vector);
    assert!(windows[1].dropped == 0 && cut[1].dropped > 0);
    assert_ne!(windows[1].vector, cut[1].vector);
    assert!(windows[1].vector.iter().all(|x| x.is_finite()));
}

#[test]
fn hostile_directories_are_refused_by_name() {
    let check = |case: &str, file: &str, text: &str, parts: &[&str]| {
        let directory = sentence_model(case);
        std::fs::write(directory.path().join(file), text).unwrap();
        let model = open(directory.path(), Want::Encoder);
        let error = EmbedSettings::of_directory(directory.path()).map(drop);
        let error = error.and(model.map(drop)).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    check("dense", "2_Dense/config.json", "{", &["2_Dense/config.json", "line 1"]);
    let wide = r#"{"in_features": 99999999, "out_features": 8}"#;
    check("dense", "2_Dense/config.json", wide, &["2_Dense/config.json", "linear.weight", "99999999"]);
    check("dense", "2_Dense/model.safetensors", "nothing", &["2_Dense/model.safetensors"]);
    check("mean", "1_Pooling/config.json", "[]", &["1_Pooling/config.json", "expected an object"]);
    let outside = r#"[{"type": "sentence_transformers.models.Transformer", "path": "/etc"}]"#;
    check("mean", "modules.json", outside, &["modules.json", "leads elsewhere"]);
    check("nested", "modules.json", outside, &["modules.json", "leads elsewhere"]);
    check("mean", "modules.json", "[]", &["modules.json", "expected a Transformer"]);
    let other = outside.replace("Transformer", "CNN").replace("/etc", "");
    check("mean", "modules.json", &other, &["modules.json", "models.CNN", "not supported"]);
    check("mean", "sentence_bert_config.json", r#"{"max_seq_length": -3}"#, &["sentence_bert_config.json", "-3"]);
    let prompts = r#"{"prompts": {"query": ["a"]}}"#;
    check("mean", "config_sentence_transformers.json", prompts, &["config_sentence_transformers.json", "query"]);

    // A layer behind another pooling than its own.
    let directory = sentence_model("dense");
    std::fs::write(directory.path().join("1_Pooling/config.json"), r#"{"pooling_mode": ["mean", "cls"]}"#).unwrap();
    let settings = EmbedSettings::of_directory(directory.path()).unwrap();
    let error = open(directory.path(), Want::Encoder).unwrap().embed(&["a"], &settings, false).unwrap_err();
    assert!(matches!(error, InferError::DenseWidth { expected: 24, got: 48 }), "{error}");
}

#[test]
fn scores_are_those_of_cross_encoders() {
    let golden = golden("rerank");
    let (query, texts) = (golden["query"].as_str().unwrap(), strings(&golden["texts"]));
    for case in golden["cases"].as_array().unwrap() {
        let directory = TempDir::new().unwrap();
        place_model(case["weights"].as_str().unwrap(), directory.path(), &case["config"]);
        for (name, value) in case["files"].as_object().unwrap() {
            std::fs::write(directory.path().join(name), value.to_string()).unwrap();
        }
        let today = !case["files"].as_object().unwrap().is_empty();
        let kind = SentenceFacts::of_directory(directory.path()).unwrap().kind;
        assert_eq!(kind, today.then_some(SentenceKind::CrossEncoder));
        let model = open(directory.path(), Want::AsSaved).unwrap();
        let ranked = model.rerank(query, &texts, model.rerank_length()).unwrap();
        let scores: Vec<f32> = ranked.iter().map(|ranked| ranked.score).collect();
        near(&scores, &floats(&case["scores"]), &case["config"].to_string());
        assert!(ranked[4].dropped > 0);
    }
    let directory = TempDir::new().unwrap();
    let custom = json!({"sentence_transformers": {"activation_fn": "my.own.Function"}});
    place_model("bert-golden/regression", directory.path(), &custom);
    let model = open(directory.path(), Want::Task(Task::Classify)).unwrap();
    let error = model.rerank(query, &texts, Length::CUT).unwrap_err().to_string();
    assert!(error.contains("my.own.Function"), "{error}");
    let directory = TempDir::new().unwrap();
    place_model("bert-golden/sequence", directory.path(), &json!({}));
    let model = open(directory.path(), Want::Task(Task::Classify)).unwrap();
    let error = model.rerank(query, &texts, Length::CUT).unwrap_err().to_string();
    assert!(error.contains("3 labels"), "{error}");
}

#[test]
fn groups_are_those_of_transformers() {
    let golden = golden("tag");
    let labels = json!({"id2label": golden["labels"]});
    let opened = |tokenizer: &str| {
        let directory = TempDir::new().unwrap();
        if tokenizer == "byte-pairs" {
            copy_files(&data("sentence/tag"), directory.path());
        }
        place_model("bert-golden/token", directory.path(), &labels);
        if tokenizer == "byte-pairs" {
            std::fs::remove_file(directory.path().join("vocab.txt")).unwrap();
        }
        open(directory.path(), Want::Task(Task::Tag)).unwrap()
    };
    let models = ["wordpiece", "byte-pairs"].map(|kind| (kind, opened(kind)));
    let (mut found, mut cases) = (0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let strategy = match case["strategy"].as_str().unwrap() {
            "none" => Aggregation::None,
            "simple" => Aggregation::Simple,
            "first" => Aggregation::First,
            "average" => Aggregation::Average,
            _ => Aggregation::Max,
        };
        let (_, model) = models.iter().find(|(kind, _)| *kind == case["tokenizer"].as_str().unwrap()).unwrap();
        let text = case["text"].as_str().unwrap();
        let grouped = model.tag_groups(&[TagInput::Text(text)], strategy, Length::CUT).unwrap().remove(0);
        let what = format!("{} {strategy:?} {text:?}", case["tokenizer"]);
        let expected = case["groups"].as_array().unwrap();
        let names = |group: &henson_infer::Group| {
            let bytes = [(group.place.start, group.place.end)];
            let (start, end) = henson_text::code_point_offsets(text, &bytes)[0];
            json!([group.label, start, end])
        };
        let got: Vec<Value> = grouped.groups.iter().map(names).collect();
        let wanted: Vec<Value> = expected.iter().map(|group| json!([group[0], group[2], group[3]])).collect();
        assert_eq!(got, wanted, "{what}");
        let scores: Vec<f32> = grouped.groups.iter().map(|group| group.score).collect();
        let wanted: Vec<f64> = expected.iter().map(|group| group[1].as_f64().unwrap()).collect();
        near(&scores, &wanted, &what);
        // Windows of a text that fits change nothing.
        let windows = model.tag_groups(&[TagInput::Text(text)], strategy, Length::WINDOWS).unwrap().remove(0);
        assert_eq!(windows.groups.len(), expected.len(), "{what}");
        found += expected.len();
        cases += 1;
    }
    assert!(cases == 40 && found > 100, "{cases} {found}");
}

#[test]
fn labels_of_ones_own_are_scored_as_in_transformers() {
    let golden = golden("zero_shot");
    for case in golden.as_array().unwrap() {
        let directory = TempDir::new().unwrap();
        let order = strings(&case["order"]);
        let names: serde_json::Map<String, Value> =
            order.iter().enumerate().map(|(i, label)| (i.to_string(), json!(label))).collect();
        place_model("bert-golden/sequence", directory.path(), &json!({"id2label": names}));
        let model = open(directory.path(), Want::Task(Task::Classify)).unwrap();
        let labels = strings(&case["labels"]);
        let hypothesis = case["hypothesis"].as_str().unwrap();
        let asked = ZeroShot { labels: &labels, hypothesis, multi_label: case["multi_label"].as_bool().unwrap() };
        let found = model.zero_shot(&[case["text"].as_str().unwrap()], &asked, None).unwrap();
        near(&found[0].scores, &floats(&case["scores"]), &case.to_string());
    }
    let directory = TempDir::new().unwrap();
    place_model("bert-golden/sequence", directory.path(), &json!({}));
    let model = open(directory.path(), Want::Task(Task::Classify)).unwrap();
    let asked = ZeroShot { labels: &["a"], hypothesis: ZeroShot::HYPOTHESIS, multi_label: false };
    let error = model.zero_shot(&["x"], &asked, None).unwrap_err().to_string();
    assert!(error.contains("LABEL_0, LABEL_1, LABEL_2"), "{error}");
}

/// all-mpnet-base-v2 names a class with a masked-LM head and holds a bare model; half of a head is still an error.
#[test]
fn the_head_is_what_the_weights_hold() {
    let directory = TempDir::new().unwrap();
    place_model("relatives-golden/mpnet/model", directory.path(), &json!({"architectures": ["MPNetForMaskedLM"]}));
    let vocabulary = std::fs::read_to_string(directory.path().join("vocab.txt")).unwrap();
    let first: Vec<&str> = vocabulary.lines().take(47).collect();
    std::fs::write(directory.path().join("vocab.txt"), first.join("\n")).unwrap();
    let model = open(directory.path(), Want::AsSaved).unwrap();
    assert_eq!(model.config().model.class(model.network().head()), "MPNetModel");
    assert!(!format!("{:?}", model.abilities()).contains("Fill"));
    let directory = TempDir::new().unwrap();
    place_model("bert-golden/sequence", directory.path(), &json!({"architectures": ["BertForTokenClassification"]}));
    // The classifier's keys have the same names: what the config says holds.
    assert_eq!(open(directory.path(), Want::AsSaved).unwrap().task(), Some(Task::Tag));
}
