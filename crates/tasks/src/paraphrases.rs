//! Sentences among which some mean the same: which of all pairs an encoder finds, as ParaphraseMiningEvaluator of sentence-transformers
//! asks. A directory has `sentences.jsonl` (or tsv, csv, parquet) with `id` and `text`, and `duplicates.tsv` (or another table) with
//! `id1` and `id2`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use henson_data::tables::{Column, Row};

use crate::error::TaskError;
use crate::metrics::PairScores;
use crate::nearest::Near;
use crate::read::{rows::place, text};
use crate::retrieval::{Passage, each, read_passages};

/// What it is called in messages.
const TASK: &str = "paraphrases";

/// Pairs that are looked at, those with the highest scores first, as there.
const MOST_PAIRS: usize = 500_000;

/// Sentences, and which of them mean the same.
#[derive(Clone, Debug)]
pub struct Paraphrases {
    /// The sentences.
    pub sentences: Vec<Passage>,
    /// Pairs of their numbers, the smaller one first.
    pub duplicates: HashSet<(usize, usize)>,
}

impl Paraphrases {
    /// How many of the nearest of each sentence are looked at, as there.
    pub const NEAREST: usize = 100;

    /// Reads a directory.
    pub fn open(directory: &Path) -> Result<Self, TaskError> {
        let sentences = read_passages(&found(directory, "sentences")?)?;
        let numbers: HashMap<&str, usize> =
            sentences.iter().enumerate().map(|(number, sentence)| (sentence.id.as_str(), number)).collect();
        let path = found(directory, "duplicates")?;
        let mut duplicates = HashSet::new();
        each(&path, |row| {
            let [first, second] =
                [&["id1", "qid1"][..], &["id2", "qid2"][..]].map(|names| number(&path, row, names, &numbers));
            let (first, second) = (first?, second?);
            if first == second {
                let problem = "a sentence with itself: expected the ids of two".to_owned();
                return Err(TaskError::row(&path, place(&path, row), problem));
            }
            duplicates.insert((first.min(second), first.max(second)));
            Ok(())
        })?;
        if duplicates.is_empty() {
            let reason = "expected rows with id1 and id2, sentences that mean the same".to_owned();
            return Err(TaskError::Empty { path, task: TASK, reason });
        }
        Ok(Self { sentences, duplicates })
    }

    /// The scores, by the nearest of each sentence.
    pub fn scores(&self, nearest: &[Vec<Near>]) -> PairScores {
        let mut pairs: HashMap<(usize, usize), f32> = HashMap::new();
        for (own, near) in nearest.iter().enumerate() {
            for near in near.iter().filter(|near| near.index != own).take(Self::NEAREST) {
                pairs.entry((own.min(near.index), own.max(near.index))).or_insert(near.score);
            }
        }
        let mut pairs: Vec<((usize, usize), f32)> = pairs.into_iter().collect();
        pairs.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        pairs.truncate(MOST_PAIRS);
        let labels: Vec<bool> = pairs.iter().map(|(pair, _)| self.duplicates.contains(pair)).collect();
        let scores: Vec<f64> = pairs.iter().map(|(_, score)| f64::from(*score)).collect();
        PairScores::among(&labels, &scores, self.duplicates.len())
    }
}

/// The number of the sentence that a row names.
fn number(path: &Path, row: &Row, names: &[&str], numbers: &HashMap<&str, usize>) -> Result<usize, TaskError> {
    let wrong = |problem: String| TaskError::row(path, place(path, row), problem);
    let value = names.iter().find_map(|name| row.get(&Column::Name((*name).to_owned())));
    let id = value.and_then(|value| text(value).ok().flatten());
    let id = id.ok_or_else(|| wrong(format!("it has no column {}: expected id1 and id2", names[0])))?;
    numbers.get(id.as_str()).copied().ok_or_else(|| wrong(format!("there is no sentence {id:?}")))
}

/// A table of the directory.
fn found(directory: &Path, name: &str) -> Result<PathBuf, TaskError> {
    let endings = ["jsonl", "tsv", "csv", "parquet", "jsonl.gz", "tsv.gz", "csv.gz", "jsonl.zst"];
    let paths = endings.map(|ending| directory.join(format!("{name}.{ending}")));
    let missing = || TaskError::NoFile {
        directory: directory.to_owned(),
        split: "data",
        task: TASK,
        looked: format!("{name}.jsonl, {name}.tsv, {name}.csv, {name}.parquet"),
    };
    paths.into_iter().find(|path| path.is_file()).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn sentences_are_read_or_refused_with_a_line() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
        let open = || Paraphrases::open(place.path()).map_err(|error| error.to_string());
        assert!(open().unwrap_err().contains("sentences.jsonl"));
        write("sentences.tsv", "id\ttext\n7\ta b\n8\tc\n9\td\n");
        assert!(open().unwrap_err().contains("duplicates.jsonl"));
        write("duplicates.csv", "id1,id2\n8,7\n7,8\n");
        let all = open().unwrap();
        assert_eq!((all.sentences.len(), &all.duplicates), (3, &HashSet::from([(0, 1)])));
        // Sentence 0 and 1 are the pair of the highest score but one.
        let near = |index, score| Near { index, score };
        let nearest = [
            vec![near(0, 1.0), near(2, 0.9), near(1, 0.8)],
            vec![near(1, 1.0), near(0, 0.8), near(2, 0.1)],
            vec![near(2, 1.0), near(0, 0.9), near(1, 0.1)],
        ];
        let scores = all.scores(&nearest);
        assert!((scores.average_precision - 0.5).abs() < 1e-12 && (scores.f1 - 2.0 / 3.0).abs() < 1e-12, "{scores:?}");
        for (text, expected) in [
            ("id1,id2\n7,5\n", "line 2: there is no sentence \"5\""),
            ("id1,id2\n7,7\n", "line 2: a sentence with itself"),
            ("a,b\n7,8\n", "line 2: it has no column id1"),
            ("id1,id2\n", "expected rows with id1 and id2"),
        ] {
            write("duplicates.csv", text);
            assert!(open().unwrap_err().contains(expected), "{expected}: {:?}", open());
        }
    }
}
