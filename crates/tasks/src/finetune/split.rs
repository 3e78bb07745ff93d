//! A part of the training file as dev data, where there is no dev file: rows held out once, or folds that take turns. What
//! belongs together stays together, labels are spread evenly, and a seed decides alone. No model or score is known here.

use std::collections::{BTreeSet, HashMap};

use henson_kernels::philox::Stream;

use crate::example::{Example, Input, Set, Target};

/// Numbers the stream of splits among all uses of a seed.
const SPLIT: u32 = 0x5b17;

/// From so many rows on, a part is held out; below, folds give the estimate.
const HELD_OUT_FROM: usize = 500;

/// Folds, where nobody says how many.
const FOLDS: usize = 5;

/// From so many documents on, sentences are split by document even where they are read alone.
const MANY_DOCUMENTS: usize = 10;

/// Rows that cannot be divided: their places in the set.
type Group = Vec<usize>;

/// How many rows to hold out of a set, and in how many folds to divide it, where nobody says so; (0, 0) where nothing can be.
pub(super) fn usual(set: &Set, rows: usize, by_document: bool) -> (usize, usize) {
    let groups = groups(set, by_document).len();
    if rows >= HELD_OUT_FROM && groups >= 2 * FOLDS {
        // A tenth, but a hundred for a score that means something, and no more than evaluations have time for.
        return ((rows / 10).clamp(100, 5000), 0);
    }
    // Two rows to score on at least: one tells nothing of a correlation, and is always nearest to itself.
    let folds = FOLDS.min(groups / 2);
    (0, if folds >= 2 { folds } else { 0 })
}

/// How many parts the rows of a set could be divided into.
pub(super) fn most_parts(set: &Set, by_document: bool) -> usize {
    groups(set, by_document).len()
}

/// Divides a set: what is left to train on, and about `rows` of it to score on.
pub(super) fn hold_out(set: &Set, rows: usize, seed: u64, by_document: bool) -> (Set, Set) {
    let (total, mut seen, mut held) = (set.examples.len(), 0, 0);
    let mut is_held = vec![false; total];
    let mut last_stratum = None;
    for (stratum, group) in ordered(set, seed, by_document) {
        seen += group.len();
        // Evenly spaced, whole groups, as near to the wanted number as they allow. The first of a label stays: a label with a
        // single row must be learned rather than scored.
        let due = (2 * held + group.len()) * total <= 2 * seen * rows;
        if due && (last_stratum == Some(stratum) || set.labels.is_empty()) {
            held += group.len();
            group.iter().for_each(|row| is_held[*row] = true);
        }
        last_stratum = Some(stratum);
    }
    (part(set, |row| !is_held[row]), part(set, |row| is_held[row]))
}

/// Divides a set into folds: for each, what to train on and what to score on.
pub(super) fn folds(set: &Set, count: usize, seed: u64, by_document: bool) -> Vec<(Set, Set)> {
    let mut sizes = vec![0; count];
    let mut fold_of = vec![0; set.examples.len()];
    for (_, group) in ordered(set, seed, by_document) {
        // In turn where all groups are of one row.
        let smallest = (0..count).min_by_key(|fold| sizes[*fold]).unwrap_or(0);
        sizes[smallest] += group.len();
        group.iter().for_each(|row| fold_of[*row] = smallest);
    }
    (0..count).map(|fold| (part(set, |row| fold_of[row] != fold), part(set, |row| fold_of[row] == fold))).collect()
}

/// Some rows of a set, in its order.
fn part(set: &Set, keep: impl Fn(usize) -> bool) -> Set {
    let examples = (0..).zip(&set.examples).filter(|(row, _)| keep(*row)).map(|(_, example)| example.clone()).collect();
    Set { examples, ..set.without_examples() }
}

/// All groups in a drawn order, those of a stratum together, so that any even choice among them has all strata in their shares.
fn ordered(set: &Set, seed: u64, by_document: bool) -> Vec<(usize, Group)> {
    let mut groups = groups(set, by_document);
    let mut draws = Stream::new(seed, SPLIT, 0);
    for i in (1..groups.len()).rev() {
        groups.swap(i, draws.below(i as u32 + 1) as usize);
    }
    let counts = set.label_counts();
    let mut groups: Vec<(Stratum, Group)> = groups
        .into_iter()
        .map(|group| (group.first().map_or(Stratum::Same, |row| stratum(&set.examples[*row], &counts)), group))
        .collect();
    groups.sort_by(|(a, _), (b, _)| a.order(b));
    let mut number = 0;
    let mut before: Option<Stratum> = None;
    let numbered = groups.into_iter().map(|(stratum, group)| {
        number += usize::from(before.is_some_and(|before| before.order(&stratum).is_ne()));
        before = Some(stratum);
        (number, group)
    });
    numbered.collect()
}

/// What is spread evenly.
#[derive(Clone, Copy)]
enum Stratum {
    Same,
    Label(u32),
    Number(f64),
}

impl Stratum {
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        match (self, other) {
            (Self::Label(a), Self::Label(b)) => a.cmp(b),
            (Self::Number(a), Self::Number(b)) => a.total_cmp(b),
            _ => std::cmp::Ordering::Equal,
        }
    }
}

/// Its label; of several the rarest, of which fewest can be spread; its number; whether a question has an answer, or a
/// sentence more than one tag.
fn stratum(example: &Example, counts: &[usize]) -> Stratum {
    match &example.target {
        Target::None | Target::Texts(_) | Target::Numbers(_) => Stratum::Same,
        Target::Class(_) if counts.is_empty() => Stratum::Same,
        Target::Class(class) => Stratum::Label(*class),
        Target::Classes(classes) => {
            let rarest = classes.iter().min_by_key(|class| counts.get(**class as usize));
            Stratum::Label(rarest.map_or(u32::MAX, |class| *class))
        }
        Target::Number(number) => Stratum::Number(*number),
        Target::Tags(tags) => Stratum::Label(u32::from(tags.iter().any(|tag| Some(tag) != tags.first()))),
        Target::Answers(answers) => Stratum::Label(u32::from(answers.is_empty())),
    }
}

/// The rows in groups, in the order of their first rows: those of a passage, a document, a beginning, the same texts.
fn groups(set: &Set, by_document: bool) -> Vec<Group> {
    let document = |example: &Example| match example.input {
        Input::Words { document, .. } => Some(document),
        _ => None,
    };
    let documents: BTreeSet<u64> = set.examples.iter().filter_map(document).collect();
    let by_document = by_document || documents.len() >= MANY_DOCUMENTS;
    let mut numbers: HashMap<(Option<u64>, Vec<&str>), usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    for (row, example) in set.examples.iter().enumerate() {
        let document = document(example).filter(|_| by_document);
        let texts: Vec<&str> = match &example.input {
            Input::Pair(first, second) => vec![first, second],
            Input::Words { words, .. } if document.is_none() => words.iter().map(String::as_str).collect(),
            Input::Words { .. } => Vec::new(),
            Input::Question { passage: text, .. }
            | Input::Answered { passage: text, .. }
            | Input::Cloze { passage: text, .. } => vec![text],
            Input::Marked { first, second, .. } => {
                [Some(first), second.as_ref()].into_iter().flatten().map(String::as_str).collect()
            }
            Input::One(text) | Input::Choices { context: text, .. } | Input::Alike { first: text, .. } => vec![text],
        };
        let together = (document, texts);
        let number = *numbers.entry(together).or_insert(groups.len());
        if number == groups.len() {
            groups.push(Vec::new());
        }
        groups[number].push(row);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;
    use crate::example::Words;

    fn example(text: String, target: Target) -> Example {
        Example { id: String::new(), place: String::new(), input: Input::One(text), target }
    }

    /// 10 of the first label for one of the second, and one row of a third.
    fn classes(rows: u32) -> Set {
        let class = |i: u32| if i == 0 { 2 } else { u32::from(i.is_multiple_of(10)) };
        let examples = (0..rows).map(|i| example(format!("text {i}"), Target::Class(class(i)))).collect();
        Set::new(Task::named("classify").unwrap(), ["a", "b", "c"].map(str::to_owned).to_vec(), examples)
    }

    #[test]
    fn a_part_has_labels_in_their_shares_and_is_drawn_by_the_seed() {
        let set = classes(1000);
        let (train, dev) = hold_out(&set, 100, 1, false);
        assert_eq!((train.examples.len(), dev.examples.len()), (900, 100));
        let counts = dev.label_counts();
        assert!((9..=11).contains(&counts[1]) && counts[2] == 0, "{counts:?}");
        assert!(dev.examples.iter().all(|example| !train.examples.contains(example)));
        assert_eq!(hold_out(&set, 100, 1, false).1.examples, dev.examples);
        assert_ne!(hold_out(&set, 100, 2, false).1.examples, dev.examples);
    }

    #[test]
    fn folds_are_of_one_size_and_cover_every_row_once() {
        let set = classes(103);
        let folds = folds(&set, 5, 7, false);
        let sizes: Vec<usize> = folds.iter().map(|(_, dev)| dev.examples.len()).collect();
        assert_eq!(sizes, [21, 21, 21, 20, 20]);
        for (train, dev) in &folds {
            assert_eq!(train.examples.len() + dev.examples.len(), 103);
            assert!(dev.label_counts()[1] == 2, "{:?}", dev.label_counts());
        }
        let mut all: Vec<String> = folds.iter().flat_map(|(_, dev)| &dev.examples).map(|e| format!("{e:?}")).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 103);
    }

    #[test]
    fn what_belongs_together_is_not_divided() {
        let words = |document: u64, i: u64| Example {
            input: Input::Words { words: Words::new(vec![format!("w{document}.{i}")]), document },
            ..example(String::new(), Target::Tags(vec![0]))
        };
        let document_of = |example: &Example| match example.input {
            Input::Words { document, .. } => document,
            _ => panic!("{example:?}"),
        };
        let sentences: Vec<Example> = (0..40).flat_map(|d| (0..d % 7 + 1).map(move |i| words(d, i))).collect();
        let set = Set::new(Task::named("ner").unwrap(), vec!["O".to_owned()], sentences);
        let apart = |train: &Set, dev: &Set| {
            let documents = |set: &Set| set.examples.iter().map(document_of).collect::<Vec<_>>();
            let (train, dev) = (documents(train), documents(dev));
            assert!(!dev.is_empty() && dev.iter().all(|document| !train.contains(document)), "{dev:?}");
        };
        let (train, dev) = hold_out(&set, 16, 0, false);
        apart(&train, &dev);
        assert!((10..=22).contains(&dev.examples.len()), "{}", dev.examples.len());
        folds(&set, 5, 0, false).iter().for_each(|(train, dev)| apart(train, dev));
        // Of few documents, sentences may be divided unless they are read in their document.
        let few = Set { examples: set.examples[..6].to_vec(), ..set.without_examples() };
        assert_eq!((most_parts(&few, false), most_parts(&few, true)), (6, 3));
        // The same text twice is no text to be scored on.
        let twice = (0..20).map(|i| example(format!("text {}", i / 2), Target::Class(i % 2))).collect();
        let set = Set::new(Task::named("classify").unwrap(), vec!["a".to_owned(), "b".to_owned()], twice);
        for (train, dev) in folds(&set, 5, 0, false) {
            assert!(dev.examples.iter().all(|e| train.examples.iter().all(|other| other.input != e.input)));
        }
    }

    #[test]
    fn numbers_are_spread_over_their_range() {
        let examples = (0..100).map(|i| example(i.to_string(), Target::Number(f64::from(i)))).collect();
        let set = Set::new(Task::named("regress").unwrap(), Vec::new(), examples);
        let mean = |set: &Set| {
            let number = |example: &Example| if let Target::Number(n) = example.target { n } else { f64::NAN };
            set.examples.iter().map(number).sum::<f64>() / set.examples.len() as f64
        };
        for (_, dev) in folds(&set, 4, 3, false) {
            assert!((mean(&dev) - 49.5).abs() < 3.0 && dev.examples.len() == 25);
        }
    }

    #[test]
    fn large_sets_are_split_and_small_ones_folded() {
        for (rows, expected) in
            [(3, (0, 0)), (4, (0, 2)), (96, (0, 5)), (499, (0, 5)), (500, (100, 0)), (5452, (545, 0))]
        {
            assert_eq!(usual(&classes(rows), rows as usize, false), expected, "{rows}");
        }
        // One passage cannot be divided, however many questions there are.
        let questions = (0..600).map(|i| Example {
            input: Input::Question { question: i.to_string(), passage: "the same".into() },
            ..example(String::new(), Target::Answers(Vec::new()))
        });
        let set = Set::new(Task::named("qa").unwrap(), Vec::new(), questions.collect());
        assert_eq!(usual(&set, 600, false), (0, 0));
    }
}
