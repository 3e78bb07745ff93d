//! Texts in, texts out: prompts, streams, stop strings, and what a model's files say about writing.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use henson_infer::{EarlyStopping, FinishReason, GenerateSettings, Model, Sampling, TextStream, Want};
use henson_tensor::DType;
use henson_text::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/generation")
}

/// A tiny model of byte-level tokens. A template is put around texts; a file of settings may stand beside it.
fn directory(name: &str, config: Value, template: Option<[&str; 2]>, generation: Option<Value>) -> TempDir {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    std::fs::copy(data().join(name).join("model.safetensors"), path.join("model.safetensors")).unwrap();
    let read = |path: PathBuf| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let mut keys = read(data().join(name).join("config.json"));
    config.as_object().unwrap().iter().for_each(|(key, value)| keys[key] = value.clone());
    std::fs::write(path.join("config.json"), keys.to_string()).unwrap();
    let mut tokenizer = read(data().join("tokenizer.json"));
    if let Some([before, behind]) = template {
        let special = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
        let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
        let ids = |token: &str| json!({ "id": token, "ids": [tokenizer["model"]["vocab"][token]], "tokens": [token] });
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [special(before), text("A"), special(behind)],
            "pair": [special(before), text("A"), text("B"), special(behind)],
            "special_tokens": { before: ids(before), behind: ids(behind) },
        });
    }
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    if let Some(generation) = generation {
        std::fs::write(path.join("generation_config.json"), generation.to_string()).unwrap();
    }
    directory
}

fn open(directory: &TempDir) -> Model {
    Model::open(directory.path(), &crate::common::device(None, Some(2)), DType::F32, Want::Writer).unwrap()
}

fn write(
    model: &Model,
    prompts: &[&str],
    settings: &GenerateSettings,
) -> (Vec<Vec<henson_infer::Generated>>, Vec<String>) {
    let prompts: Vec<_> = prompts.iter().map(|prompt| model.prompt(prompt).unwrap()).collect();
    let mut streamed = vec![String::new(); prompts.len()];
    let generated = model.generate(&prompts, settings, |event| {
        if event.sequence == 0 {
            streamed[event.prompt] += event.text;
        }
        ControlFlow::Continue(())
    });
    (generated.unwrap(), streamed)
}

#[test]
fn prompts() {
    // A decoder gets what stands before a text; an encoder-decoder gets both.
    let around = Some(["<s>", "<|endoftext|>"]);
    let gpt = open(&directory("gpt2", json!({}), around, None));
    assert_eq!(gpt.prompt("ab").unwrap(), [1, 4, 5]);
    assert_eq!(gpt.prompt("").unwrap(), [1]);
    let t5 = open(&directory("t5", json!({}), around, None));
    assert_eq!(t5.prompt("ab").unwrap(), [1, 4, 5, 2]);
    // Without a template, a start token stands where there is nothing else.
    let plain = open(&directory("gpt2", json!({}), None, Some(json!({ "bos_token_id": 1 }))));
    assert_eq!(plain.prompt("ab").unwrap(), [4, 5]);
    assert_eq!(plain.prompt("").unwrap(), [1]);
    let none = open(&directory("gpt2", json!({}), None, Some(json!({}))));
    let error = none.prompt("").unwrap_err().to_string();
    assert!(error.contains("text 1 is empty"), "{error}");
    assert_eq!(none.prompt(&"a".repeat(95)).unwrap().len(), 95);
    let error = none.prompt(&"a".repeat(96)).unwrap_err().to_string();
    assert!(error.contains("has 96 tokens, and the model takes 96"), "{error}");
}

#[test]
fn streams_hold_back_what_is_not_certain() {
    let tokenizer = Tokenizer::open(&data()).unwrap();
    let id = |token: &str| tokenizer.id(token).unwrap();
    let stream = |tokens: &[&str], stop: &[&str]| -> (Vec<String>, String, bool) {
        let mut stream = TextStream::new(&stop.iter().map(|&stop| stop.to_owned()).collect::<Vec<_>>());
        let given = tokens.iter().map(|token| stream.push(&tokenizer, id(token)).unwrap()).collect();
        (given, stream.finish(&tokenizer).unwrap(), stream.is_stopped())
    };
    let euro = ["a", "â", "Ĥ", "¬", "b"];
    assert_eq!(stream(&euro, &[]), (["a", "", "", "€", "b"].map(str::to_owned).to_vec(), String::new(), false));
    // What never becomes a character comes at the end.
    assert_eq!(stream(&["a", "â", "Ĥ"], &[]).1, "\u{fffd}");
    // Special tokens have no text.
    assert_eq!(stream(&["a", "<|endoftext|>", "b"], &[]).0.concat(), "ab");
    // A stop string over several tokens, its beginnings before it, and one inside of a character's bytes.
    let (given, rest, stopped) = stream(&["a", "b", "a", "b", "c", "d"], &["abc"]);
    assert_eq!((given, rest, stopped), (["", "", "ab", "", "", ""].map(str::to_owned).to_vec(), String::new(), true));
    let (given, rest, stopped) = stream(&["x", "a", "b"], &["abc", "bz"]);
    assert_eq!((given.concat() + "|" + &rest, stopped), ("x|ab".to_owned(), false));
    let (given, rest, stopped) = stream(&["x", "Ã", "©", "a"], &["é"]);
    assert_eq!((given.concat(), rest, stopped), ("x".to_owned(), String::new(), true));
}

#[test]
fn texts_are_streamed_and_stop() {
    for name in ["gpt2", "t5", "bart"] {
        let model = open(&directory(name, json!({}), None, None));
        let settings = GenerateSettings { max_new_tokens: Some(40), ..GenerateSettings::default() };
        let prompts = ["hello.", "a", "some more text, with more tokens"];
        let (plain, streamed) = write(&model, &prompts, &settings);
        for (i, generated) in plain.iter().enumerate() {
            let generated = &generated[0];
            assert_eq!((generated.ids.len(), generated.tokens.len(), generated.why), (40, 40, FinishReason::Length));
            assert_eq!(generated.text, model.tokenizer().decode(&generated.ids, true).unwrap());
            assert_eq!(streamed[i], generated.text, "{name}");
            // Alone it is the same.
            assert_eq!(write(&model, &prompts[i..=i], &settings).0[0], plain[i], "{name}");
        }
        // Each text up to where some of its own letters stand. (Some random texts are special tokens alone.)
        assert!(name == "t5" || plain.iter().any(|generated| generated[0].text.len() > 8), "{name}");
        for generated in plain.iter().filter(|generated| generated[0].text.len() > 8) {
            let text = &generated[0].text;
            let half = text.char_indices().map(|(place, _)| place).find(|place| *place >= text.len() / 2).unwrap();
            let end =
                text.char_indices().map(|(place, _)| place).find(|place| *place >= half + 3).unwrap_or(text.len());
            let stop = text[half..end].to_owned();
            for beams in [1, 2] {
                let settings = GenerateSettings { stop: vec![stop.clone()], beams, ..settings.clone() };
                let (stopped, streamed) = write(&model, &prompts, &settings);
                for (stopped, streamed) in stopped.iter().zip(&streamed) {
                    let stopped = &stopped[0];
                    assert!(!stopped.text.contains(&stop), "{name}: {stop:?} in {:?}", stopped.text);
                    assert_eq!(streamed, &stopped.text, "{name}");
                    let whole = model.tokenizer().decode(&stopped.ids, true).unwrap();
                    assert_eq!(stopped.why == FinishReason::Stop, whole.contains(&stop), "{name}: {whole:?}");
                }
                if beams == 1 {
                    let any = stopped.iter().any(|stopped| stopped[0].why == FinishReason::Stop);
                    assert!(any, "{name}: {stop:?}");
                }
            }
        }
    }
}

#[test]
fn settings_of_files() {
    let of = |config: Value, generation: Option<Value>| {
        let directory = directory("t5", config, None, generation);
        let model = open(&directory);
        model.generate_settings().map(|settings| (settings, model.sampling_settings().unwrap()))
    };
    let defaults = GenerateSettings { end: vec![2], ..GenerateSettings::default() };
    assert_eq!(of(json!({}), None).unwrap().0, defaults);
    // The keys of older configs, unless there is a file of its own.
    let keys = json!({
        "num_beams": 4, "length_penalty": 2.0, "max_length": 142, "min_length": 56, "no_repeat_ngram_size": 3,
        "early_stopping": true, "forced_bos_token_id": 0, "forced_eos_token_id": 2, "do_sample": false, "temperature": 0.7,
        "task_specific_params": { "summarization": { "num_beams": 6 } }, "diversity_penalty": 0.0, "bad_words_ids": null,
    });
    let expected = GenerateSettings {
        beams: 4,
        length_penalty: 2.0,
        max_length: Some(142),
        min_length: 56,
        no_repeat_ngram: 3,
        early_stopping: EarlyStopping::Yes,
        forced_first: Some(0),
        forced_last: Some(2),
        ..defaults.clone()
    };
    let (found, sampling) = of(keys.clone(), None).unwrap();
    assert_eq!(found, expected);
    assert_eq!(sampling, Sampling { temperature: 0.7, ..Sampling::default() });
    let own = json!({
        "eos_token_id": [5, 7], "do_sample": true, "top_k": 9, "top_p": 0.5, "max_new_tokens": 3, "early_stopping": "never",
        "sequence_bias": [[[4], -2.5]], "stop_strings": "end", "repetition_penalty": 1.5, "transformers_version": "5.0.0",
    });
    let sampling = Sampling { top_k: 9, top_p: 0.5, ..Sampling::default() };
    let expected = GenerateSettings {
        end: vec![5, 7],
        sampling: Some(sampling),
        max_new_tokens: Some(3),
        early_stopping: EarlyStopping::Never,
        logit_bias: vec![(4, -2.5)],
        stop: vec!["end".to_owned()],
        repetition_penalty: 1.5,
        ..defaults
    };
    assert_eq!(of(keys, Some(own)).unwrap(), (expected, sampling));
    for (key, value, part) in [
        ("typical_p", json!(0.9), "`typical_p` is 0.9, which is not supported"),
        ("suppress_tokens", json!([3]), "`suppress_tokens` is [3]"),
        ("num_beam_groups", json!(2), "set it to 1"),
        ("top_k", json!("many"), "a whole number"),
        ("early_stopping", json!(3), "true, false or"),
        ("sequence_bias", json!([[[4, 5], 1.0]]), "one token id"),
        ("eos_token_id", json!(-1), "a token id"),
        ("decoder_start_token_id", json!(7), "set it to 0"),
        ("temperature", json!("hot"), "a number"),
    ] {
        let error = of(json!({}), Some(json!({ key: value }))).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains(part), "{error}");
    }
    // What has a meaning by itself and none together.
    let both = json!({ "do_sample": true, "num_beams": 2 });
    assert!(of(json!({}), Some(both)).unwrap_err().to_string().contains("sampling is some"));
}

#[test]
fn models_that_cannot_write_are_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/mlm");
    let error = Model::open(&golden, &crate::common::device(None, Some(1)), DType::F32, Want::Writer)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("it is a masked language model (BertForMaskedLM), and this takes a model that writes"),
        "{error}"
    );
}
