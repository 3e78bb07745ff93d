//! Collections to search, as BEIR has them: `corpus.jsonl`, `queries.jsonl` and `qrels/*.tsv`, which say what is relevant to a query.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use henson_data::tables::{self, Column, Header, Row, TableOptions};

use crate::error::TaskError;
use crate::metrics::JudgedRanking;
use crate::nearest::Near;
use crate::read::{reading_with, rows::place, text};

/// What a collection is called in messages.
const TASK: &str = "retrieval";

/// A text with its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Its id in its file.
    pub id: String,
    /// Its text: the title, where it has one, and the text.
    pub text: String,
}

/// Passages, queries, and what is relevant.
#[derive(Clone, Debug)]
pub struct Collection {
    /// What is searched.
    pub passages: Vec<Passage>,
    /// What is asked: the queries of the judgments, in the order of their file.
    pub queries: Vec<Passage>,
    /// For each query the passages that are relevant to it, by number, and how much.
    pub relevant: Vec<Vec<(usize, f64)>>,
    /// The file with the judgments.
    pub judgments: PathBuf,
}

impl Collection {
    /// Reads a directory. The judgments are in `qrels`, in its file test.tsv or the only one, unless another is named.
    pub fn open(directory: &Path, judgments: Option<&Path>) -> Result<Self, TaskError> {
        let judgments = match judgments {
            Some(path) => path.to_owned(),
            None => found_judgments(&directory.join("qrels"))?,
        };
        let passages = read_passages(&found(directory, "corpus")?)?;
        let all_queries = read_passages(&found(directory, "queries")?)?;
        let numbers = |all: &[Passage]| all.iter().enumerate().map(|(i, one)| (one.id.clone(), i)).collect();
        let (of_passages, of_queries): (HashMap<_, _>, HashMap<_, _>) = (numbers(&passages), numbers(&all_queries));
        let mut relevant: Vec<Vec<(usize, f64)>> = vec![Vec::new(); all_queries.len()];
        let mut known: HashMap<(usize, usize), f64> = HashMap::new();
        each(&judgments, |row| {
            let [query, passage, score] = judgment(&judgments, row)?;
            let wrong = |problem: String| TaskError::row(&judgments, place(&judgments, row), problem);
            let of = |ids: &HashMap<String, usize>, id: &str, what: &str| {
                ids.get(id).copied().ok_or_else(|| wrong(format!("there is no {what} {id:?}")))
            };
            let (query, passage) = (of(&of_queries, &query, "query")?, of(&of_passages, &passage, "passage")?);
            let number = score.trim().parse::<f64>().ok().filter(|number| number.is_finite());
            let number = number.ok_or_else(|| wrong(format!("expected a number, found {score:?}")))?;
            match known.insert((query, passage), number) {
                // The same once more says nothing new.
                Some(before) if before == number => {}
                Some(before) => return Err(wrong(format!("this passage was judged {before} for this query before"))),
                None if number > 0.0 => relevant[query].push((passage, number)),
                None => {}
            }
            Ok(())
        })?;
        // Those that nothing is relevant to say nothing.
        let judged = all_queries.into_iter().zip(relevant).filter(|(_, relevant)| !relevant.is_empty());
        let (queries, relevant): (Vec<_>, Vec<_>) = judged.unzip();
        if queries.is_empty() {
            let reason =
                "no query has anything relevant: expected rows of query-id, corpus-id and a score above 0".to_owned();
            return Err(TaskError::Empty { path: judgments, task: TASK, reason });
        }
        Ok(Self { passages, queries, relevant, judgments })
    }

    /// What was found for each query, by the relevance of each passage.
    pub fn judged(&self, found: &[Vec<Near>]) -> Vec<JudgedRanking> {
        let each = self.relevant.iter().zip(found).map(|(relevant, found)| {
            let grades: HashMap<usize, f64> = relevant.iter().copied().collect();
            let found = found.iter().map(|near| grades.get(&near.index).copied().unwrap_or(0.0)).collect();
            JudgedRanking { found, relevant: relevant.iter().map(|(_, grade)| *grade).collect() }
        });
        each.collect()
    }
}

/// Texts with ids: a row has `_id` or `id`, `text`, and perhaps `title`; without an id, its number.
pub fn read_passages(path: &Path) -> Result<Vec<Passage>, TaskError> {
    let (mut all, mut known): (Vec<Passage>, HashMap<String, usize>) = (Vec::new(), HashMap::new());
    each(path, |row| {
        let wrong = |problem: String| TaskError::row(path, place(path, row), problem);
        let cell = |names: &[&str]| -> Result<Option<String>, TaskError> {
            let value = names.iter().find_map(|name| row.get(&Column::Name((*name).to_owned())));
            value.map_or(Ok(None), |value| text(value).map_err(wrong))
        };
        let title = cell(&["title"])?.filter(|title| !title.trim().is_empty());
        let text = cell(&["text", "passage", "query", "sentence"])?;
        let text = [title, text].into_iter().flatten().collect::<Vec<_>>().join(" ").trim().to_owned();
        if text.is_empty() {
            return Err(wrong("it has no text: expected a key `text` with a text that is not empty".to_owned()));
        }
        let id = cell(&["_id", "id"])?.unwrap_or_else(|| all.len().to_string());
        if let Some(first) = known.insert(id.clone(), all.len()) {
            return Err(wrong(format!("the id {id:?} is that of row {} already", first + 1)));
        }
        all.push(Passage { id, text });
        Ok(())
    })?;
    if all.is_empty() {
        return Err(TaskError::Empty { path: path.to_owned(), task: TASK, reason: "expected texts".to_owned() });
    }
    Ok(all)
}

/// Reads all rows; the first that is wrong is the error.
pub(crate) fn each(path: &Path, mut take: impl FnMut(&Row) -> Result<(), TaskError>) -> Result<(), TaskError> {
    let options = TableOptions { header: Header::Present, ..TableOptions::default() };
    reading_with(|each| tables::read_rows(path, &options, each), |row| take(&row?))
}

/// The query, the passage and the score of a row of judgments: by name, as BEIR has them.
fn judgment(path: &Path, row: &Row) -> Result<[String; 3], TaskError> {
    let names: [&[&str]; 3] =
        [&["query-id", "query_id", "qid"], &["corpus-id", "corpus_id", "doc_id"], &["score", "relevance"]];
    let mut cells = [String::new(), String::new(), String::new()];
    for (cell, names) in cells.iter_mut().zip(names) {
        let value = names.iter().find_map(|name| row.get(&Column::Name((*name).to_owned())));
        let found = value.and_then(|value| text(value).ok().flatten());
        *cell = found.ok_or_else(|| {
            let problem = format!("it has no column {}: expected query-id, corpus-id and score", names[0]);
            TaskError::row(path, place(path, row), problem)
        })?;
    }
    Ok(cells)
}

/// A file of a collection, as it is or compressed.
fn found(directory: &Path, name: &str) -> Result<PathBuf, TaskError> {
    let names = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"].map(|ending| directory.join(format!("{name}.{ending}")));
    let missing = || TaskError::NoFile {
        directory: directory.to_owned(),
        split: "data",
        task: TASK,
        looked: format!("{name}.jsonl, {name}.jsonl.gz, {name}.jsonl.zst, {name}.parquet"),
    };
    names.into_iter().find(|path| path.is_file()).ok_or_else(missing)
}

fn found_judgments(directory: &Path) -> Result<PathBuf, TaskError> {
    let test = directory.join("test.tsv");
    if test.is_file() {
        return Ok(test);
    }
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|e| e == "tsv")).collect();
    files.sort();
    match &files[..] {
        [one] => Ok(one.clone()),
        _ => {
            let looked = format!("test.tsv, or a single .tsv, and found {} (--qrels FILE)", files.len());
            Err(TaskError::NoFile { directory: directory.to_owned(), split: "judgments", task: TASK, looked })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn collections_are_read_or_refused_with_a_line() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir(at("qrels")).unwrap();
        let write = |name: &str, text: &str| fs::write(at(name), text).unwrap();
        let open = || Collection::open(place.path(), None).map_err(|error| error.to_string());
        assert!(open().unwrap_err().contains("qrels"));
        write("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq2\td1\t2\nq2\td2\t0\nq1\td2\t1\n");
        assert!(open().unwrap_err().contains("corpus.jsonl"));
        write(
            "corpus.jsonl",
            "{\"_id\": \"d1\", \"title\": \"A\", \"text\": \"b\"}\n{\"_id\": \"d2\", \"text\": \"c\"}\n",
        );
        write(
            "queries.jsonl",
            "{\"_id\": \"q1\", \"text\": \"x\"}\n{\"_id\": \"q0\", \"text\": \"z\"}\n{\"_id\": \"q2\", \"text\": \"y\"}\n",
        );
        let collection = open().unwrap();
        assert_eq!(collection.passages[0], Passage { id: "d1".to_owned(), text: "A b".to_owned() });
        assert_eq!(collection.queries.iter().map(|query| query.id.as_str()).collect::<Vec<_>>(), ["q1", "q2"]);
        assert_eq!(collection.relevant, [vec![(1, 1.0)], vec![(0, 2.0)]]);
        let near = |index| Near { index, score: 0.0 };
        let judged = collection.judged(&[vec![near(0), near(1)], vec![near(0)]]);
        assert_eq!((&judged[0].found[..], &judged[1].found[..]), (&[0.0, 1.0][..], &[2.0][..]));
        // What is said twice counts once.
        write("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td2\t1\nq2\td1\t2\nq1\td2\t1\n");
        assert_eq!(open().unwrap().relevant, [vec![(1, 1.0)], vec![(0, 2.0)]]);
        for (text, expected) in [
            ("query-id\tcorpus-id\tscore\nq1\td9\t1\n", "test.tsv, line 2: there is no passage \"d9\""),
            ("query-id\tcorpus-id\tscore\nq9\td1\t1\n", "line 2: there is no query \"q9\""),
            ("query-id\tcorpus-id\tscore\nq1\td1\tx\n", "line 2: expected a number, found \"x\""),
            ("query-id\tcorpus-id\tscore\nq1\td1\tNaN\n", "line 2: expected a number, found \"NaN\""),
            (
                "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t2\n",
                "line 3: this passage was judged 1 for this query before",
            ),
            ("query-id\tcorpus-id\tscore\nq1\td1\t0\n", "no query has anything relevant"),
            ("q1\td1\t1\nq1\td1\t1\n", "line 2: it has no column query-id"),
        ] {
            write("qrels/test.tsv", text);
            assert!(open().unwrap_err().contains(expected), "{expected}: {:?}", open());
        }
        write("corpus.jsonl", "{\"_id\": \"d1\", \"text\": \"b\"}\n{\"_id\": \"d1\", \"text\": \"c\"}\n");
        assert!(open().unwrap_err().contains("line 2: the id \"d1\" is that of row 1 already"));
        write("corpus.jsonl", "{\"_id\": \"d1\", \"text\": \" \"}\n");
        assert!(open().unwrap_err().contains("line 1: it has no text"));
    }
}
