//! A byte-level BPE with RoBERTa's template, from text to instances: `<s> a </s>` and `<s> a </s></s> b </s>`, all in
//! segment 0.

use std::path::Path;
use std::sync::Arc;

use henson_data::{
    BuildOptions, Corpus, Instance, InstanceSettings, Instances, Masking, Objective, Packing, SourceFiles, Split, build,
};
use henson_text::Tokenizer;

use crate::corpora::in_order;

const CLS: u32 = 0;
const SEP: u32 = 2;
/// Special ids of the file: `<s>`, `<pad>`, `</s>`, `<unk>`, `<mask>`.
const SPECIAL: [u32; 5] = [0, 1, 2, 3, 268];

fn corpus() -> (Arc<Corpus>, Tokenizer) {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data/transformers/roberta");
    let tokenizer = Tokenizer::open(&files).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let sentence = |i: usize| format!("a henson of {i}{} hens\n", " and one".repeat(i % 7));
    let text: String = (0..400).map(|i| sentence(i) + if i % 5 == 4 { "\n" } else { "" }).collect();
    let file = directory.path().join("text.txt");
    std::fs::write(&file, text).unwrap();
    let sources = vec![SourceFiles { name: "text".to_owned(), weight: 1.0, paths: vec![file] }];
    let options = BuildOptions { sources, ..BuildOptions::default() };
    let out = directory.path().join("corpus");
    build(&tokenizer, &out, &options, &mut |_| true).unwrap();
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    let tokenizer = Tokenizer::open(corpus.tokenizer_directory().unwrap()).unwrap();
    (Arc::new(corpus), tokenizer)
}

/// An epoch of each masking; special tokens are never masked, predicted, or drawn in place of others.
fn epochs(objective: Objective, packing: Packing, sequence_length: usize) -> Vec<Vec<Instance>> {
    let (corpus, tokenizer) = corpus();
    let epoch = |masking| {
        let short_sequences = 0.0;
        let settings =
            InstanceSettings { sequence_length, objective, packing, masking, short_sequences, ..Default::default() };
        let template = tokenizer.template().clone();
        let epoch = Arc::new(Instances::new(corpus.clone(), template, settings, 5).unwrap()).epoch(0, 1).unwrap();
        let instances = in_order(&epoch);
        assert!(instances.iter().all(|instance| instance.predicted.iter().all(|p| !SPECIAL.contains(&p.target))));
        assert!(instances.iter().all(|instance| instance.segments == vec![0; instance.ids.len()]));
        instances
    };
    [Masking::Pieces, Masking::Words, Masking::Spans].map(epoch).to_vec()
}

/// Where special tokens stand that are not masks.
fn specials(instance: &Instance) -> Vec<(usize, u32)> {
    let ids = instance.ids.iter().copied().enumerate();
    ids.filter(|(_, id)| SPECIAL[..4].contains(id)).collect()
}

#[test]
fn pairs_have_four_special_tokens() {
    for instances in epochs(Objective::MlmNsp, Packing::Documents, 64) {
        let longest = instances.iter().map(|instance| instance.ids.len()).max();
        assert_eq!(longest, Some(64), "the room is what four special tokens leave");
        let mut labels = [0; 2];
        for instance in instances {
            let [cls, end, again, last] = specials(&instance).try_into().unwrap();
            assert_eq!((cls, last), ((0, CLS), (instance.ids.len() - 1, SEP)));
            assert_eq!((end.1, again), (SEP, (end.0 + 1, SEP)));
            assert!(end.0 > 1 && again.0 + 1 < last.0, "both segments have text");
            labels[instance.next_sentence.unwrap() as usize] += 1;
        }
        assert!(labels.iter().all(|count| *count > 10), "{labels:?}");
    }
}

#[test]
fn single_segments_have_two_and_one_between_documents() {
    let mut crossing = 0;
    for packing in [Packing::Documents, Packing::FullSentences, Packing::Blocks] {
        for instances in epochs(Objective::Mlm, packing, 96) {
            for instance in instances {
                let found = specials(&instance);
                assert_eq!((found[0], found[found.len() - 1]), ((0, CLS), (instance.ids.len() - 1, SEP)));
                let between = &found[1..found.len() - 1];
                assert!(between.windows(2).all(|pair| pair[0].0 + 1 < pair[1].0));
                assert!(between.iter().all(|(_, id)| *id == SEP));
                assert!(between.is_empty() || packing != Packing::Documents);
                crossing += between.len();
            }
        }
    }
    assert!(crossing > 30, "{crossing}");
}
