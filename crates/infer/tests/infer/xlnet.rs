//! XLNet from text to answer: special tokens stand behind the text, heads read the last token, and masks are predicted by the second
//! stream. The network itself is held to `transformers` elsewhere; here what is read off texts is held to it.

use std::path::{Path, PathBuf};

use henson_infer::{EmbedSettings, Input, Length, Model, Pooling, Question, Read, Task, Want};
use henson_models::{Batch, Capture, Permutation, Sequence};
use henson_tensor::{DType, Pass, Tape, Tensor};
use henson_text::{AnswerSettings, Features, QuestionSettings, SpanBeams, Stride};
use safetensors::SafeTensors;
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

/// What XLNetForQuestionAnswering finds in golden sequences: the best starts, the best ends of each, and whether there is an answer.
#[test]
fn beams_are_those_of_transformers() {
    let model = open("beams", Want::Task(Task::Answer));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/relatives-golden/xlnet/beams");
    let bytes = std::fs::read(path.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let integers = |name: &str| -> Vec<usize> {
        let numbers = file.tensor(name).unwrap().data().chunks_exact(8);
        numbers.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as usize).collect()
    };
    let floats = |name: &str| -> Vec<f32> {
        let numbers = file.tensor(name).unwrap().data().chunks_exact(4);
        numbers.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let (ids, segments) = (integers("input.ids"), integers("input.segments"));
    let shown = integers("input.shown");
    let sequences: Vec<Features> = integers("input.offsets")
        .windows(2)
        .zip(shown.chunks_exact(2))
        .map(|(ends, shown)| Features {
            ids: ids[ends[0]..ends[1]].iter().map(|id| *id as u32).collect(),
            segments: segments[ends[0]..ends[1]].iter().map(|id| *id as u32).collect(),
            offsets: vec![None; ends[1] - ends[0]],
            spellings: None,
            first: 0..0,
            second: Some(shown[0]..shown[1]),
            first_piece: 0,
            dropped: 0,
        })
        .collect();
    let reads: Vec<Read> = sequences.iter().map(|sequence| Read::beams(sequence, sequence.len() - 1)).collect();
    let both: Vec<(&Features, &Read)> = sequences.iter().zip(&reads).collect();
    let found = model.read(&both).unwrap();
    let (starts, ends) = (integers("output.beams.starts"), integers("output.beams.ends"));
    let (of_starts, of_ends) = (floats("output.beams.start_probabilities"), floats("output.beams.end_probabilities"));
    let no_answer = floats("output.beams.no_answer");
    for (i, output) in found.into_iter().enumerate() {
        let beams = SpanBeams::from_numbers(&output.unwrap().numbers);
        assert!((beams.no_answer - no_answer[i]).abs() < 2e-5, "{} not {}", beams.no_answer, no_answer[i]);
        assert_eq!(beams.spans.len(), 6);
        for (j, span) in beams.spans.iter().enumerate() {
            let (start, end) = (3 * i + j / 2, 6 * i + j);
            assert_eq!((span.start, span.end), (starts[start], ends[end]), "sequence {i}, beam {j}");
            assert!((span.start_score.exp() - of_starts[start]).abs() < 1e-5, "sequence {i}, beam {j}");
            assert!((span.end_score.exp() - of_ends[end]).abs() < 1e-5, "sequence {i}, beam {j}");
        }
        // Alone as in company.
        let alone = model.read(&both[i..=i]).unwrap().remove(0).unwrap();
        assert_eq!(SpanBeams::from_numbers(&alone.numbers), beams);
    }
}

/// From a question to an answer: parts of the passage alone, and nothing where the head says that there is none.
#[test]
fn questions_are_answered_by_beams() {
    let model = open("beams", Want::Task(Task::Answer));
    let passage = "the cat sat on a mat and slept";
    let question = Question { question: "sat on", passage };
    let length = QuestionSettings { max_length: 10, stride: Stride::Step(2), max_question: 2 };
    let always = AnswerSettings::default();
    let answers = model.answer(&[question], length, &always).unwrap().remove(0);
    assert_eq!(answers.null_odds, None);
    let best = answers.best().unwrap();
    assert!(!best.text(passage).is_empty() && best.place.is_some());
    let shares: f64 = answers.candidates.iter().map(|candidate| candidate.probability).sum();
    assert!((shares - 1.0).abs() < 1e-9);
    assert!(answers.candidates.iter().all(|candidate| candidate.score() <= 0.0));
    let may = AnswerSettings { no_answer: Some(f64::MAX), ..always };
    let answers = model.answer(&[question], length, &may).unwrap().remove(0);
    let odds = answers.null_odds.unwrap();
    let nothing = answers.candidates.iter().find(|candidate| candidate.place.is_none()).unwrap();
    // Its share is what the head says, whatever the others score.
    assert!((nothing.probability - 1.0 / (1.0 + (-odds).exp())).abs() < 1e-6);
    assert_eq!(answers.best().unwrap().text(passage), best.text(passage));
    let declined = AnswerSettings { no_answer: Some(odds - 0.1), ..always };
    let answers = model.answer(&[question], length, &declined).unwrap().remove(0);
    assert_eq!(answers.best().unwrap().place, None);
}
