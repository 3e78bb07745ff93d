//! GPT, T5, BART and Marian as files of the years hold them: buffers, copies of tied tables, missing prefixes, tables that later
//! versions leave out.

use std::path::{Path, PathBuf};

use henson_checkpoint::{CheckpointError, Config, LoadOptions, LoadReport, Weights, load};
use henson_models::{Head, Model};
use henson_tensor::{Builder, Entry, Group};
use serde_json::{Value, json};

use crate::{Stored, f32s, finish, numbers, safetensors};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers-golden").join(name)
}

/// The parameters that were read, by their names.
type Values = Vec<(String, Vec<f32>)>;

/// A golden directory whose keys and tensors a test changes before it is loaded.
struct Changed {
    config: Value,
    /// By name: shape and numbers.
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
}

impl Changed {
    fn open(name: &str) -> Self {
        let directory = golden(name);
        let weights = Weights::open(&directory).unwrap();
        let tensor =
            |key: &str| (key.to_owned(), weights.get(key).unwrap().shape.clone(), weights.read_f32(key).unwrap());
        let config = std::fs::read_to_string(directory.join("config.json")).unwrap();
        let config = serde_json::from_str(&config).unwrap();
        Self { config, tensors: weights.names().map(tensor).collect() }
    }

    fn numbers_of(&self, name: &str) -> &(String, Vec<usize>, Vec<f32>) {
        self.tensors.iter().find(|(own, ..)| own == name).unwrap()
    }

    /// With a copy of a tensor under another name, to the first number of which something is added.
    fn with_copy(mut self, name: &str, of: &str, more: f32) -> Self {
        let (_, shape, mut numbers) = self.numbers_of(of).clone();
        numbers[0] += more;
        self.tensors.push((name.to_owned(), shape, numbers));
        self
    }

    fn with(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensors.push((name.to_owned(), shape.to_vec(), vec![1.0; shape.iter().product()]));
        self
    }

    fn without(mut self, name: &str) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|(own, ..)| own != name);
        assert_eq!(self.tensors.len() + 1, before, "{name}");
        self
    }

    fn without_prefix(mut self, prefix: &str) -> Self {
        for (name, ..) in &mut self.tensors {
            *name = name.strip_prefix(prefix).unwrap_or(name).to_owned();
        }
        self
    }

    fn set(mut self, key: &str, value: Value) -> Self {
        match value {
            Value::Null => drop(self.config.as_object_mut().unwrap().remove(key)),
            value => self.config[key] = value,
        }
        self
    }

    /// Loads all of it into a model with a head, a new one where `new` is true.
    fn load_as(&self, head: Head, new: bool) -> Result<(LoadReport, Values), Box<LoadReport>> {
        let name = |name: &str| -> &'static str { Box::leak(name.to_owned().into_boxed_str()) };
        let stored: Vec<Stored> =
            self.tensors.iter().map(|(own, shape, numbers)| f32s(name(own), shape, numbers)).collect();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("model.safetensors"), safetensors(&stored)).unwrap();
        let config = Config::from_value(self.config.clone()).unwrap().model;
        let mut builder = Builder::new();
        Model::build(&mut builder, &config, head).unwrap();
        let mut parameters = finish(builder, 7);
        let may_miss = |entry: &Entry| entry.group == Group::Head;
        let options = if new { LoadOptions::new_head(&may_miss) } else { LoadOptions::strict() };
        let weights = Weights::open(directory.path()).unwrap();
        match load(&weights, &config.family().naming, &mut parameters, &options) {
            Ok(report) => Ok((report, numbers(&parameters))),
            Err(CheckpointError::DoesNotFit { report, .. }) => Err(report),
            Err(error) => panic!("{error}"),
        }
    }

    #[track_caller]
    fn load(&self, head: Head) -> (LoadReport, Vec<(String, Vec<f32>)>) {
        self.load_as(head, false).unwrap_or_else(|report| panic!("{report}"))
    }

    /// The copies that a model with a head is refused for.
    #[track_caller]
    fn untied(&self, head: Head) -> Vec<String> {
        let report = self.load_as(head, false).map(|(report, _)| report).unwrap_err();
        assert_eq!((report.missing.len(), report.repeated.len()), (0, 0), "{report}");
        report.untied.into_iter().map(|untied| untied.copy).collect()
    }
}

/// Keys are reported in their order.
#[track_caller]
fn assert_dropped(report: &LoadReport, tied: &[&str], ignored: &[&str]) {
    let sorted = |names: &[&str]| {
        let mut all: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        all.sort();
        all
    };
    assert_eq!((&report.tied, &report.ignored), (&sorted(tied), &sorted(ignored)), "{report}");
    assert!(report.unused.is_empty(), "{report}");
}

#[test]
fn masks_and_a_tied_head_of_old_gpt_files_are_dropped() {
    for (name, table) in [("gpt2/lm", "transformer.wte.weight"), ("openai-gpt/lm", "transformer.tokens_embed.weight")] {
        let (_, expected) = Changed::open(name).load(Head::MaskedLm);
        let old = || {
            let masks = Changed::open(name).with("transformer.h.0.attn.bias", &[1, 1, 24, 24]);
            masks.with("transformer.h.1.attn.masked_bias", &[]).with("transformer.position_ids", &[24])
        };
        let (report, found) = old().with_copy("lm_head.weight", table, 0.0).load(Head::MaskedLm);
        let masks = ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias", "transformer.position_ids"];
        assert_dropped(&report, &["lm_head.weight"], &masks);
        assert_eq!(found, expected);
        // Another table than that of the words is not silently left out.
        assert_eq!(old().with_copy("lm_head.weight", table, 1.0).untied(Head::MaskedLm), ["lm_head.weight"]);
        // The bare class has no prefix.
        let (report, found) = old().without_prefix("transformer.").load(Head::MaskedLm);
        assert_eq!((report.ignored.len(), found), (3, expected));
    }
}

/// transformers 5 saves the head of OpenAIGPTDoubleHeadsModel, and not the table of words that it is tied to.
#[test]
fn a_table_that_is_saved_as_the_head_is_found() {
    let saved = Changed::open("openai-gpt/choice");
    assert!(!saved.tensors.iter().any(|(name, ..)| name.contains("tokens_embed")));
    let head = saved.numbers_of("lm_head.weight").2.clone();
    let (report, found) = saved.load(Head::Choice);
    assert!(report.unused.is_empty(), "{report}");
    assert_eq!(found[0], ("transformer.tokens_embed.weight".to_owned(), head));
}

#[test]
fn untied_heads_are_needed_and_of_use_to_models_that_write_alone() {
    let untied = |more: f32| {
        let open = Changed::open("gpt2/lm").set("tie_word_embeddings", json!(false));
        open.with_copy("lm_head.weight", "transformer.wte.weight", more)
    };
    let (_, found) = untied(1.0).load(Head::MaskedLm);
    let table = |name: &str| found.iter().find(|(own, _)| own == name).unwrap().1.clone();
    assert_ne!(table("lm_head.weight"), table("transformer.wte.weight"));
    let missing = untied(1.0).without("lm_head.weight").load_as(Head::MaskedLm, false).unwrap_err();
    assert_eq!(missing.missing[0].parameter, "lm_head.weight");
    for (name, head) in [("gpt2/lm", Head::Encoder), ("gpt2/lm", Head::Sequence { labels: 2 })] {
        let (report, _) = untied(1.0).load_as(head, true).unwrap_or_else(|report| panic!("{name}: {report}"));
        assert_eq!(report.unused, ["lm_head.weight"]);
    }
    let v1_1 = Changed::open("t5-v1_1/seq2seq");
    let heads = [Head::Encoder, Head::Sequence { labels: 2 }, Head::Token { labels: 2 }, Head::Span];
    for head in heads {
        let (report, found) = v1_1.load_as(head, true).unwrap_or_else(|report| panic!("{head:?}: {report}"));
        assert!(report.unused.contains(&"lm_head.weight".to_owned()), "{report}");
        let decoder = found.iter().any(|(name, _)| name.contains("decoder."));
        assert_eq!(decoder, matches!(head, Head::Sequence { .. } | Head::Span), "{head:?}");
        assert!(report.missing.is_empty() && report.fresh.iter().all(|new| !new.parameter.contains("block")));
    }
}

#[test]
fn copies_and_an_unused_table_of_the_first_t5_files_are_dropped() {
    let biases = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    let copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"];
    let old = |copies: &[&str], more: f32| {
        let open = Changed::open("t5/seq2seq").with(biases, &[8, 2]);
        copies.iter().fold(open, |all, copy| all.with_copy(copy, "shared.weight", more))
    };
    let (report, found) = old(&copies, 0.0).load(Head::Seq2Seq);
    assert_dropped(&report, &copies, &[biases]);
    assert_eq!(found, Changed::open("t5/seq2seq").load(Head::Seq2Seq).1);
    for copy in copies {
        assert_eq!(old(&[copy], 1.0).untied(Head::Seq2Seq), [copy]);
    }
    // The same below the prefix that classifiers alone have.
    let copy = "transformer.encoder.embed_tokens.weight";
    let classifier = Changed::open("t5/sequence").with_copy(copy, "transformer.shared.weight", 0.0);
    assert_dropped(&classifier.load(Head::Sequence { labels: 3 }).0, &[copy], &[]);
}

/// Which T5 it is: `scale_decoder_outputs` of newer files, or `tie_word_embeddings` of older ones.
#[test]
fn t5_has_a_head_of_its_own_where_outputs_are_not_scaled() {
    let has_head = |file: &Changed| file.load(Head::Seq2Seq).1.iter().any(|(name, _)| name == "lm_head.weight");
    let new = Changed::open("t5-v1_1/seq2seq");
    assert_eq!(
        (&new.config["scale_decoder_outputs"], &new.config["tie_word_embeddings"]),
        (&json!(false), &json!(true))
    );
    assert!(has_head(&new));
    let old = new.set("scale_decoder_outputs", Value::Null);
    assert_eq!(old.untied(Head::Seq2Seq), ["lm_head.weight"]);
    let old = old.set("tie_word_embeddings", json!(false));
    assert!(has_head(&old));
    // transformers 5 ties the head of a model that it makes, and leaves it out.
    let (_, found) = old.without("lm_head.weight").load(Head::Seq2Seq);
    let table = |name: &str| found.iter().find(|(own, _)| own == name).unwrap().1.clone();
    assert_eq!(table("lm_head.weight"), table("shared.weight"));
    let first = Changed::open("t5/seq2seq").set("scale_decoder_outputs", Value::Null);
    assert!(!has_head(&first.set("tie_word_embeddings", Value::Null)));
}

#[test]
fn copies_of_barts_and_marians_table_are_dropped_and_constants_may_be_missing() {
    let (table, bias) = ("model.shared.weight", "final_logits_bias");
    let copies = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"];
    let buffers: [(&str, &[&str]); 2] = [
        ("bart/seq2seq", &["model.encoder.version", "model.decoder.version"]),
        ("marian/seq2seq", &["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]),
    ];
    for (name, buffers) in buffers {
        let old = |copies: &[&str], more: f32| {
            let open = buffers.iter().fold(Changed::open(name), |all, buffer| all.with(buffer, &[1]));
            copies.iter().fold(open, |all, copy| all.with_copy(copy, table, more))
        };
        let (report, found) = old(&copies, 0.0).load(Head::Seq2Seq);
        assert_dropped(&report, &copies, buffers);
        let (_, mut expected) = Changed::open(name).load(Head::Seq2Seq);
        assert_eq!(found, expected);
        for copy in copies {
            assert_eq!(old(&[copy], 1.0).untied(Head::Seq2Seq), [copy]);
        }
        // An encoder has no use for a head.
        let (report, _) = old(&["lm_head.weight"], 1.0).without_prefix("model.").load(Head::Encoder);
        assert_eq!(report.unused, [bias, "lm_head.weight"]);
        let constants = expected.iter_mut().find(|(own, _)| own == bias).unwrap();
        assert!(constants.1.iter().any(|constant| *constant != 0.0));
        constants.1.fill(0.0);
        assert_eq!(Changed::open(name).without(bias).load(Head::Seq2Seq).1, expected);
    }
}
