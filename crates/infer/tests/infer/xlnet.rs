//! XLNet from text to answer: special tokens stand behind the text, heads read the last token, and masks are predicted by the second
//! stream. The network itself is held to `transformers` elsewhere; here what is read off texts is held to it.

use std::path::{Path, PathBuf};

use henson_infer::{EmbedSettings, Input, Length, Model, Pooling, Task, Want};
use henson_models::{Batch, Capture, Permutation, Sequence};
use henson_tensor::{DType, Pass, Tape, Tensor};
use serde_json::{Map, json};
use tempfile::TempDir;

const WORDS: [&str; 8] = ["the", "cat", "sat", "on", "a", "mat", "and", "slept"];
/// Ids of the special tokens, and of the first word.
const SEP: u32 = 3;
const CLS: u32 = 4;
const MASK: u32 = 5;
const FIRST: u32 = 6;

/// A golden model with a small tokenizer like XLNet's.
fn directory(head: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    let golden: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/relatives-golden/xlnet").join(head);
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), directory.path().join(name)).unwrap();
    }
    let specials = ["<pad>", "<unk>", "</s>", "<sep>", "<cls>", "<mask>"];
    let vocabulary: Map<String, serde_json::Value> =
        specials.iter().chain(&WORDS).enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let special = |name: &str, segment: u32| json!({"SpecialToken": {"id": name, "type_id": segment}});
    let text = |name: &str, segment: u32| json!({"Sequence": {"id": name, "type_id": segment}});
    let entry = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    let added: Vec<_> = specials
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text("A", 0), special("<sep>", 0), special("<cls>", 2)],
            "pair": [text("A", 0), special("<sep>", 0), text("B", 1), special("<sep>", 1), special("<cls>", 2)],
            "special_tokens": {"<sep>": entry("<sep>", SEP), "<cls>": entry("<cls>", CLS)},
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let names = json!({"sep_token": "<sep>", "cls_token": "<cls>", "mask_token": "<mask>", "unk_token": "<unk>",
                       "pad_token": "<pad>"});
    std::fs::write(directory.path().join("tokenizer_config.json"), names.to_string()).unwrap();
    directory
}

fn open(head: &str, want: Want) -> Model {
    Model::open(directory(head).path(), &crate::common::device(None, Some(2)), DType::F32, want).unwrap()
}

/// The ids of words, with masks.
fn ids(text: &str) -> Vec<u32> {
    let id = |word: &str| WORDS.iter().position(|known| *known == word).map_or(MASK, |at| FIRST + at as u32);
    text.split(' ').map(id).collect()
}

#[test]
fn pairs_end_with_the_token_that_is_read() {
    let model = open("sequence", Want::Task(Task::Classify));
    let (first, second) = ("the cat sat", "and slept");
    let got = model.classify(&[Input::Pair(first, second)], Length::CUT).unwrap();
    let ids = [ids(first), vec![SEP], ids(second), vec![SEP, CLS]].concat();
    let segments = [vec![0; 4], vec![1; 3], vec![2]].concat();
    let batch = Batch::new(
        model.parameters().device(),
        model.network().config(),
        &[Sequence { ids: &ids, segments: &segments }],
        0,
    )
    .unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, model.parameters());
    let last = model.network().encode(&mut pass, &batch, Capture::default()).unwrap().last;
    let expected = model.network().logits_of(&mut pass, last.clone(), &batch.layout, None).unwrap();
    assert_eq!(got[0].logits, expected.tensor().to_f32().unwrap());
    // The vector of a text may be that token's as well.
    let model = open("model", Want::Encoder);
    let settings = EmbedSettings { pooling: vec![Pooling::Last], ..EmbedSettings::default() };
    let vector = model.embed(&[first], &settings, false).unwrap().remove(0).vector;
    let mean = model.embed(&[first], &EmbedSettings::default(), false).unwrap().remove(0).vector;
    assert_eq!((vector.len(), mean.len()), (12, 12));
    assert_ne!(vector, mean);
}

#[test]
fn masks_are_filled_by_the_second_stream() {
    let model = open("mlm", Want::MaskedLm);
    let texts = ["the cat <mask> on a <mask>", "the <mask> slept"];
    let filled = model.fill(&texts, 3, Length::CUT).unwrap();
    assert_eq!([filled[0].blanks.len(), filled[1].blanks.len()], [2, 1]);
    let ids = [ids(texts[0]), vec![SEP, CLS]].concat();
    let segments = [vec![0; 7], vec![2]].concat();
    let orders: Vec<u32> = ids.iter().map(|id| u32::from(*id == MASK)).collect();
    let permutation = Permutation { orders: &orders, targets: &[2, 5] };
    let sequence = Sequence { ids: &ids, segments: &segments };
    let (device, network) = (model.parameters().device(), model.network());
    let batch = Batch::in_order(device, network.config(), &[sequence], Some(&[permutation]), None, 0).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, model.parameters());
    let rows: &Tensor = batch.predicted().unwrap();
    let logits = network.logits(&mut pass, &batch, Some(rows)).unwrap();
    let expected = pass.softmax(&logits, 31).unwrap().to_vec::<f32>().unwrap();
    for (blank, row) in filled[0].blanks.iter().zip(expected.chunks(31)) {
        let best = row.iter().copied().fold(0.0, f32::max);
        assert!(
            (blank.candidates[0].probability - best).abs() < 1e-6,
            "{} not {best}",
            blank.candidates[0].probability
        );
        assert!((row[blank.candidates[0].id as usize] - best).abs() < 1e-6);
    }
    // Alone it is filled as in company.
    let alone = model.fill(&texts[1..], 3, Length::CUT).unwrap();
    assert_eq!(alone[0].blanks[0].candidates[0].probability, filled[1].blanks[0].candidates[0].probability);
}
