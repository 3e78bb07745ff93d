//! Eight models of different families on one server: what each is for, over HTTP as from the library that the commands use.

use std::path::Path;

use crate::common::{Running, floats};
use henson_infer::{Aggregation, EmbedSettings, Input, Length, Model, Pooling, Question, TagInput, Want, ZeroShot};
use henson_serve::{Prompt, Settings};
use henson_tensor::{DType, Device};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Name, golden weights, changes of the config, whether its special tokens are RoBERTa's.
fn families() -> [(&'static str, &'static str, Value, bool); 8] {
    let inference = json!({"0": "contradiction", "1": "neutral", "2": "entailment"});
    let tags = json!({"0": "O", "1": "B-PER", "2": "I-PER", "3": "B-LOC", "4": "I-LOC"});
    let camembert = json!({"model_type": "camembert", "architectures": ["CamembertForSequenceClassification"]});
    [
        ("bert", "bert-golden/mlm", json!({}), false),
        ("roberta", "relatives-golden/roberta/mlm", json!({}), true),
        ("distilbert", "relatives-golden/distilbert/sequence", json!({}), false),
        ("mpnet", "relatives-golden/mpnet/model", json!({"architectures": ["MPNetForMaskedLM"]}), true),
        ("electra", "relatives-golden/electra/token", json!({"id2label": tags}), false),
        ("albert", "relatives-golden/albert/qa", json!({}), false),
        ("xlm-roberta", "relatives-golden/xlm-roberta/sequence", json!({"id2label": inference}), true),
        ("camembert", "relatives-golden/roberta/regression", camembert, true),
    ]
}

fn place(weights: &str, changes: &Value, roberta: bool) -> TempDir {
    let directory = TempDir::new().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(weights);
    std::fs::copy(source.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    let write = |name: &str, value: &Value| std::fs::write(directory.path().join(name), value.to_string()).unwrap();
    write("config.json", &config);
    let names = if roberta {
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    } else {
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    };
    let mut pieces = names.map(str::to_owned).to_vec();
    pieces.extend((b'a'..=b'z').map(|c| char::from(c).to_string()));
    pieces.extend((b'a'..=b'n').map(|c| format!("##{}", char::from(c))));
    pieces.extend([".", "?"].map(str::to_owned));
    assert_eq!(pieces.len(), 47);
    if !roberta {
        std::fs::write(directory.path().join("vocab.txt"), pieces.join("\n") + "\n").unwrap();
        return directory;
    }
    let vocabulary: Value = pieces.iter().enumerate().map(|(id, piece)| (piece.clone(), json!(id))).collect();
    let special = |(id, content): (usize, &str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": content == "<mask>", "rstrip": false,
               "normalized": false, "special": true})
    };
    write(
        "tokenizer.json",
        &json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": names.into_iter().enumerate().map(special).collect::<Vec<Value>>(),
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": true,
                               "add_prefix_space": false},
            "decoder": null,
            "model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocabulary},
        }),
    );
    let roles = ["cls_token", "pad_token", "sep_token", "unk_token", "mask_token"];
    write(
        "tokenizer_config.json",
        &roles.into_iter().zip(names).map(|(role, name)| (role.to_owned(), json!(name))).collect(),
    );
    directory
}

/// sentence-transformers' files for a model of 24 columns or others.
fn sentences(directory: &Path) {
    let settings = EmbedSettings {
        pooling: vec![Pooling::Max, Pooling::WeightedMean],
        most_tokens: Some(16),
        ..EmbedSettings::default()
    };
    std::fs::create_dir(directory.join("1_Pooling")).unwrap();
    for (name, bytes) in settings.files(24) {
        std::fs::write(directory.join(name), bytes).unwrap();
    }
    let config = json!({"pooling_mode": ["max", "weightedmean"], "include_prompt": false});
    std::fs::write(directory.join("1_Pooling/config.json"), config.to_string()).unwrap();
    let prompts = json!({"prompts": {"query": "a b? "}, "default_prompt_name": null});
    std::fs::write(directory.join("config_sentence_transformers.json"), prompts.to_string()).unwrap();
}

#[track_caller]
fn same(got: &Value, expected: &[f32]) {
    assert_eq!(floats(got), expected);
}

#[test]
fn eight_families_at_once() {
    let placed: Vec<(&str, TempDir)> =
        families().iter().map(|(name, weights, changes, roberta)| (*name, place(weights, changes, *roberta))).collect();
    let directory = |name: &str| placed.iter().find(|(known, _)| *known == name).unwrap().1.path();
    sentences(directory("mpnet"));
    let served: Vec<(&str, &Path)> = placed.iter().map(|(name, directory)| (*name, directory.path())).collect();
    let passage = Prompt { model: Some("mpnet".to_owned()), name: "passage".to_owned(), text: "c d. ".to_owned() };
    let running = Running::start(&served, Settings { prompts: vec![passage], ..Settings::default() });
    let device = Device::cpu(None, Some(1)).unwrap();
    let open = |name: &str, want| Model::open(directory(name), &device, DType::F32, want).unwrap();
    let texts = ["a cab fed", "jim ran? no. we lie", "x"];

    for (name, mask) in [("bert", "[MASK]"), ("roberta", "<mask>")] {
        let text = format!("a {mask} sat.");
        let expected = open(name, Want::AsSaved).fill(&[&text], 3, Length::CUT).unwrap();
        let got = running.ok(&format!("/models/{name}/fill"), &json!({"inputs": text, "top": 3}).to_string());
        let expected = serde_json::to_string(&expected[0].clone().in_characters(&text)).unwrap();
        assert_eq!(got[0], serde_json::from_str::<Value>(&expected).unwrap(), "{name}");
        let other = if mask == "<mask>" { "[MASK]" } else { "<mask>" };
        let wrong = running.post(&format!("/models/{name}/fill"), &json!({"inputs": format!("a {other}")}).to_string());
        assert_eq!(wrong.status, 422);
        assert!(
            wrong.text().contains(&format!("write {mask}")) && wrong.text().contains("other models"),
            "{}",
            wrong.text()
        );
    }

    let classes = open("distilbert", Want::AsSaved).classify(&texts.map(Input::One), Length::CUT).unwrap();
    let got =
        running.ok("/models/distilbert/predict", &json!({"inputs": [[texts[0]], [texts[1]], [texts[2]]]}).to_string());
    for (got, expected) in got.as_array().unwrap().iter().zip(&classes) {
        let mut expected = expected.scores.clone();
        expected.sort_by(|a, b| b.total_cmp(a));
        same(&got.as_array().unwrap().iter().map(|label| label["score"].clone()).collect(), &expected);
    }

    // The sentence model is the one that vectors come from, whatever class its config names.
    let model = open("mpnet", Want::Encoder);
    let settings = EmbedSettings { normalise: true, ..EmbedSettings::of_directory(directory("mpnet")).unwrap() };
    for (prompt, text) in [(None, ""), (Some("query"), "a b? "), (Some("passage"), "c d. ")] {
        let settings = EmbedSettings { prompt: text.to_owned(), ..settings.clone() };
        let expected = model.embed(&texts, &settings, false).unwrap();
        let got = running.ok("/embed", &json!({"inputs": texts, "prompt_name": prompt}).to_string());
        for (got, expected) in got.as_array().unwrap().iter().zip(&expected) {
            same(got, &expected.vector);
        }
    }
    let unknown = running.post("/embed", r#"{"inputs": "a", "prompt_name": "web"}"#);
    assert!(unknown.status == 422 && unknown.text().contains("passage, query"), "{}", unknown.text());

    let model = open("electra", Want::AsSaved);
    let tagged = model.tag(&[TagInput::Text(texts[1])], Length::WINDOWS).unwrap();
    let got = running.ok("/tag", &json!({"inputs": texts[1]}).to_string());
    let scores: Vec<f32> = tagged[0].entities.iter().map(|entity| entity.score).collect();
    same(&got[0].as_array().unwrap().iter().map(|entity| entity["score"].clone()).collect(), &scores);
    for (name, strategy) in [("none", Aggregation::None), ("simple", Aggregation::Simple), ("max", Aggregation::Max)] {
        let expected = model.tag_groups(&[TagInput::Text(texts[1])], strategy, Length::WINDOWS).unwrap().remove(0);
        let got = running.ok("/tag", &json!({"inputs": texts[1], "aggregation_strategy": name}).to_string());
        let got = got[0].as_array().unwrap();
        let labels: Vec<&str> = got.iter().map(|group| group["label"].as_str().unwrap()).collect();
        assert_eq!(labels, expected.groups.iter().map(|group| group.label.as_str()).collect::<Vec<_>>(), "{name}");
        let places: Vec<u64> = got.iter().map(|group| group["start"].as_u64().unwrap()).collect();
        assert_eq!(places, expected.groups.iter().map(|group| group.place.start as u64).collect::<Vec<_>>(), "{name}");
    }

    let model = open("albert", Want::AsSaved);
    let question = Question { question: "who ran?", passage: "jim ran. a cat sat." };
    let expected = model.answer(&[question], model.question_settings(), &model.answer_settings()).unwrap().remove(0);
    let body = json!({"question": question.question, "context": question.passage, "top": 1}).to_string();
    let got = running.ok("/answer", &body);
    let best = &expected.candidates[expected.chosen.unwrap()];
    assert_eq!(got["answers"][0]["text"], json!(best.text(question.passage)));
    assert_eq!(got["answers"][0]["score"].as_f64().unwrap() as f32, best.probability as f32);

    let model = open("xlm-roberta", Want::AsSaved);
    let labels = ["cab", "lie"];
    for multi_label in [false, true] {
        let asked = ZeroShot { labels: &labels, hypothesis: "it is {}.", multi_label };
        let mut expected = model.zero_shot(&texts[..1], &asked, None).unwrap().remove(0).scores;
        expected.sort_by(|a, b| b.total_cmp(a));
        let body = json!({"inputs": texts[0], "candidate_labels": "cab, lie", "hypothesis_template": "it is {}.",
                          "multi_label": multi_label});
        let got = running.ok("/zero_shot", &body.to_string());
        same(&got.as_array().unwrap().iter().map(|label| label["score"].clone()).collect(), &expected);
    }
    let without =
        running.post("/zero_shot", r#"{"inputs": "a", "candidate_labels": ["b"], "hypothesis_template": "c"}"#);
    assert!(without.status == 422 && without.text().contains("has no {}"), "{}", without.text());

    let model = open("camembert", Want::AsSaved);
    let mut ranked = model.rerank("who ran?", &texts, model.rerank_length()).unwrap();
    ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
    for raw in [false, true] {
        let body = json!({"query": "who ran?", "texts": texts, "raw_scores": raw, "return_text": true});
        let got = running.ok("/rerank", &body.to_string());
        let expected: Vec<f32> = ranked.iter().map(|r| if raw { r.logit } else { r.score }).collect();
        same(&got.as_array().unwrap().iter().map(|rank| rank["score"].clone()).collect(), &expected);
        let index = got[0]["index"].as_u64().unwrap() as usize;
        assert_eq!(got[0]["text"], json!(texts[index]));
    }
}
