//! The labels of a control task (Hewitt and Liang 2019): those of a target depend on nothing but its words, and are drawn with the
//! shares that labels have in the training file. A probe can only learn them by heart.

use henson_kernels::philox::Stream;
use sha2::{Digest, Sha256};

use super::data::{EdgeExample, EdgeSet};
use super::learner::Labels;

/// Numbers the stream of these draws among all uses of the seed.
const CONTROL: u32 = 0x6c31;

/// A set's own labels.
pub(super) fn own_labels(set: &EdgeSet) -> Labels {
    let of_text = |example: &EdgeExample| example.targets.iter().map(|target| target.labels.clone()).collect();
    set.examples.iter().map(of_text).collect()
}

/// Control labels for a set: each distinct text of spans has those of a training target drawn for it, in all files alike.
pub(super) fn control_labels(seed: u64, train: &EdgeSet, set: &EdgeSet) -> Labels {
    let drawn_from: Vec<&Vec<u32>> =
        train.examples.iter().flat_map(|example| &example.targets).map(|target| &target.labels).collect();
    let of_text = |example: &EdgeExample| {
        let draw = |spans: [Option<&std::ops::Range<usize>>; 2]| {
            let mut hash = Sha256::new();
            for span in spans.into_iter().flatten() {
                example.words[span.clone()].iter().for_each(|word| hash.update(format!("{}:{word}", word.len())));
                hash.update("|");
            }
            let digest = hash.finalize();
            let index = digest.iter().take(8).fold(0_u64, |index, byte| index << 8 | u64::from(*byte));
            let place = Stream::new(seed, CONTROL, index).below(drawn_from.len().max(1) as u32);
            drawn_from.get(place as usize).map_or_else(Vec::new, |labels| (*labels).clone())
        };
        example.targets.iter().map(|target| draw([Some(&target.first), target.second.as_ref()])).collect()
    };
    set.examples.iter().map(of_text).collect()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::probe::data::EdgeTarget;

    /// Spans with their labels.
    type Spans<'a> = &'a [(Range<usize>, u32)];

    fn set(texts: &[(&str, Spans<'_>)]) -> EdgeSet {
        let target = |(first, label): &(Range<usize>, u32)| EdgeTarget {
            first: first.clone(),
            second: None,
            labels: vec![*label],
        };
        let example = |(text, targets): &(&str, Spans<'_>)| EdgeExample {
            place: String::new(),
            words: text.split(' ').map(str::to_owned).collect(),
            targets: targets.iter().map(target).collect(),
        };
        let (examples, path) = (texts.iter().map(example).collect(), std::path::PathBuf::new());
        EdgeSet { path, examples, pairs: false, labels: vec!["a".to_owned(), "b".to_owned()], problems: Vec::new() }
    }

    #[test]
    fn labels_depend_on_words_alone() {
        let train = set(&[("the cat sat", &[(0..1, 0), (1..2, 1), (2..3, 1)])]);
        let other = set(&[("a cat and the dog", &[(1..2, 0), (3..4, 1), (3..5, 0)])]);
        let (of_train, of_other) = (control_labels(7, &train, &train), control_labels(7, &train, &other));
        assert_eq!(of_other[0][0], of_train[0][1], "cat");
        assert_eq!(of_other[0][1], of_train[0][0], "the");
        assert_eq!(own_labels(&other), [[[0], [1], [0]]]);
        // "ab c" and "a bc" are different words; and labels come in the shares that they have.
        let names: Vec<String> = (0..3000).map(|i| format!("w{i}")).collect();
        let text = names.join(" ");
        let targets: Vec<(Range<usize>, u32)> = (0..3000).map(|i| (i..i + 1, 0)).collect();
        let many = control_labels(1, &train, &set(&[(&text, &targets)]));
        let second = many[0].iter().filter(|labels| ***labels == [1]).count();
        assert!((1880..2120).contains(&second), "{second} of 3000, where two thirds are expected");
        let again = control_labels(2, &train, &set(&[(&text, &targets)]));
        assert_ne!(many, again, "another seed");
    }
}
