//! Targets to probe for: one or two spans of a text's words, and their labels. Read from the edge-probing JSON lines of jiant, or made
//! from files with tags (parts of speech, entities, chunks) and from the arcs of CoNLL-U.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use henson_data::tables::{self, Column, Row, Sentence, TableFormat, TableOptions};
use henson_text::TagSet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::TaskError;
use crate::example::{Input, Target};
use crate::read::{Files, Reading, read, reading_with, text};
use crate::task::Task;

/// The most targets of a text, and the most labels of a file: more is hardly meant, and memory grows with their product.
const MOST_TARGETS: usize = 1 << 16;
const MOST_LABELS: usize = 1 << 12;

/// What is probed for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProbeTask {
    /// Any targets, from JSON lines with text and targets (span1, span2, label), as jiant has them.
    #[default]
    Edges,
    /// The tag of each word: CoNLL-U, columns, or rows with lists.
    Pos,
    /// What kind an entity is of, from BIO tags in columns or rows.
    Entities,
    /// What kind a chunk is of, from BIO tags in columns or rows.
    Chunks,
    /// The relation of each word to its head, from CoNLL-U.
    Dependencies,
}

impl ProbeTask {
    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Edges => "edges",
            Self::Pos => "pos",
            Self::Entities => "entities",
            Self::Chunks => "chunks",
            Self::Dependencies => "dependencies",
        }
    }
}

/// One or two spans of a text's words, and what is to be predicted of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeTarget {
    /// The first span.
    pub first: Range<usize>,
    /// The second one.
    pub second: Option<Range<usize>>,
    /// Its labels by their numbers, each once and sorted.
    pub labels: Vec<u32>,
}

/// A text with its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeExample {
    /// Where it stands in its file, for messages.
    pub place: String,
    /// Its words.
    pub words: Vec<String>,
    /// At least one.
    pub targets: Vec<EdgeTarget>,
}

/// The texts of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdgeSet {
    /// The file.
    pub path: PathBuf,
    /// Those with targets, in the file's order.
    pub examples: Vec<EdgeExample>,
    /// Whether all targets have two spans; else all have one.
    pub pairs: bool,
    /// The labels in the order of their numbers.
    pub labels: Vec<String>,
    /// What was wrong with the file and was left out, for people.
    pub problems: Vec<String>,
}

impl EdgeSet {
    /// Targets in all.
    pub fn targets(&self) -> usize {
        self.examples.iter().map(|example| example.targets.len()).sum()
    }

    /// Gives labels the numbers that they have in `labels`, which has all of them.
    fn renumber(&mut self, labels: &[String]) {
        let number = |label: &String| labels.binary_search(label).unwrap_or(0) as u32;
        let new: Vec<u32> = self.labels.iter().map(number).collect();
        for target in self.examples.iter_mut().flat_map(|example| &mut example.targets) {
            target.labels.iter_mut().for_each(|label| *label = new[*label as usize]);
            target.labels.sort_unstable();
        }
        self.labels = labels.to_vec();
    }
}

/// Reads the file to train on and the one to score on, with the labels of both.
pub(super) fn read_sets(
    task: ProbeTask,
    train: &Path,
    dev: &Path,
    files: &Files,
) -> Result<(EdgeSet, EdgeSet), TaskError> {
    let (mut train, mut dev) = (read_edges(task, train, files)?, read_edges(task, dev, files)?);
    if train.pairs != dev.pairs {
        let spans = |set: &EdgeSet| if set.pairs { "two spans" } else { "one span" };
        let problem = format!("its targets have {}, those of {} {}", spans(&dev), train.path.display(), spans(&train));
        return Err(TaskError::mismatch(&dev.path, problem));
    }
    let labels: BTreeSet<&String> = train.labels.iter().chain(&dev.labels).collect();
    let labels: Vec<String> = labels.into_iter().cloned().collect();
    if labels.len() < 2 {
        return Err(TaskError::FewLabels { path: train.path, found: format!("{} label", labels.len()) });
    }
    if labels.len() > MOST_LABELS {
        let problem = format!("it has {} different labels: expected at most {MOST_LABELS}", labels.len());
        return Err(TaskError::mismatch(&train.path, problem));
    }
    train.renumber(&labels);
    dev.renumber(&labels);
    Ok((train, dev))
}

/// Reads one file. Labels are numbered as they come, sorted by name.
pub fn read_edges(task: ProbeTask, path: &Path, files: &Files) -> Result<EdgeSet, TaskError> {
    let (examples, problems, skip_bad) = (Vec::new(), Vec::new(), files.skip_bad);
    let mut gathered = Gathered { path, skip_bad, examples, pairs: None, skipped: 0, problems };
    match task {
        ProbeTask::Edges => {
            let options = TableOptions { format: Some(TableFormat::JsonLines), ..TableOptions::default() };
            reading_with(
                |each| tables::read_rows(path, &options, each),
                |row| gathered.take(row.and_then(|row| edges_of_row(path, &row))),
            )?;
        }
        ProbeTask::Dependencies => {
            read_arcs(path, |sentence| gathered.take(sentence.map(|sentence| edges_of_arcs(&sentence))))?;
        }
        ProbeTask::Pos => gathered.tagged("pos", files)?,
        ProbeTask::Entities | ProbeTask::Chunks => gathered.tagged("ner", files)?,
    }
    gathered.finish(task)
}

/// A text before its labels are numbered.
struct Named {
    place: String,
    words: Vec<String>,
    targets: Vec<NamedTarget>,
}

struct NamedTarget {
    first: Range<usize>,
    second: Option<Range<usize>>,
    labels: Vec<String>,
}

struct Gathered<'a> {
    path: &'a Path,
    skip_bad: bool,
    examples: Vec<Named>,
    pairs: Option<bool>,
    skipped: usize,
    problems: Vec<String>,
}

impl Gathered<'_> {
    /// Takes a text, or the reason why there is none.
    fn take(&mut self, example: Result<Named, TaskError>) -> Result<(), TaskError> {
        match example.and_then(|example| self.check(example)) {
            Ok(example) if example.targets.is_empty() => Ok(()),
            Ok(example) => {
                self.examples.push(example);
                Ok(())
            }
            Err(problem) if problem.is_row() && self.skip_bad => {
                self.skipped += 1;
                if self.problems.len() < 5 {
                    self.problems.push(problem.to_string());
                }
                Ok(())
            }
            Err(problem) => Err(problem),
        }
    }

    fn check(&mut self, example: Named) -> Result<Named, TaskError> {
        let wrong = |problem: String| Err(TaskError::row(self.path, example.place.clone(), problem));
        if example.targets.len() > MOST_TARGETS {
            return wrong(format!("it has {} targets: expected at most {MOST_TARGETS}", example.targets.len()));
        }
        for (i, target) in example.targets.iter().enumerate() {
            for (name, span) in [("span1", Some(&target.first)), ("span2", target.second.as_ref())] {
                let Some(span) = span else { continue };
                if span.start >= span.end || span.end > example.words.len() {
                    let (start, end, count) = (span.start, span.end, example.words.len());
                    let expected = format!("a start before its end, within the {count} words of the text");
                    return wrong(format!("{name} of target {i} is [{start}, {end}]: expected {expected}"));
                }
            }
            if *self.pairs.get_or_insert(target.second.is_some()) != target.second.is_some() {
                let expected = "all targets of a file to have span2, or none";
                return wrong(format!("target {i} differs from those before in having span2: expected {expected}"));
            }
        }
        Ok(example)
    }

    /// The targets of a file that has a tag for each word: each word, or each entity.
    fn tagged(&mut self, task: &'static str, files: &Files) -> Result<(), TaskError> {
        let task = Task::named(task).ok_or_else(|| TaskError::NoTask { name: task.to_owned() })?;
        let set = read(self.path, &Reading { files: files.clone(), ..Reading::new(task) })?;
        let kind = match task.name {
            "pos" => TagSet::Words,
            _ if set.scheme.is_some() => TagSet::Chunks,
            _ => TagSet::of_labels(&set.labels),
        };
        (self.skipped, self.problems) = (set.skipped, set.problems.clone());
        for example in &set.examples {
            let (Input::Words { words, .. }, Target::Tags(tags)) = (&example.input, &example.target) else {
                let needed = "a probe is trained and scored on tags";
                return Err(TaskError::NoLabels { path: self.path.to_owned(), needed });
            };
            let tags: Vec<Option<&str>> = tags.iter().map(|tag| Some(set.label(*tag))).collect();
            let target = |(first, label): (Range<usize>, &str)| NamedTarget {
                first,
                second: None,
                labels: vec![label.to_owned()],
            };
            let targets = kind.entities(&tags).into_iter().map(target).collect();
            self.take(Ok(Named { place: example.place.clone(), words: words.to_vec(), targets }))?;
        }
        Ok(())
    }

    fn finish(self, task: ProbeTask) -> Result<EdgeSet, TaskError> {
        if self.examples.is_empty() {
            let reason = match self.skipped {
                0 => "no text has a target".to_owned(),
                skipped => format!("all {skipped} are wrong, first: {}", self.problems.join("; ")),
            };
            return Err(TaskError::Empty { path: self.path.to_owned(), task: task.name(), reason });
        }
        let named = self.examples.iter().flat_map(|example| &example.targets).flat_map(|target| &target.labels);
        let labels: BTreeSet<&String> = named.collect();
        let labels: Vec<String> = labels.into_iter().cloned().collect();
        let numbers: BTreeMap<&str, u32> = labels.iter().map(String::as_str).zip(0..).collect();
        let numbered = |target: &NamedTarget| {
            let own: BTreeSet<u32> = target.labels.iter().map(|label| numbers[label.as_str()]).collect();
            let (first, second) = (target.first.clone(), target.second.clone());
            EdgeTarget { first, second, labels: own.into_iter().collect() }
        };
        let examples = self.examples.iter().map(|Named { place, words, targets }| EdgeExample {
            place: place.clone(),
            words: words.clone(),
            targets: targets.iter().map(numbered).collect(),
        });
        let mut problems = self.problems;
        if self.skipped > 0 {
            problems.push(format!("{} bad texts of {} were left out", self.skipped, self.path.display()));
        }
        let pairs = self.pairs.unwrap_or(false);
        Ok(EdgeSet { path: self.path.to_owned(), examples: examples.collect(), pairs, problems, labels })
    }
}

/// The text and the targets of one of jiant's rows. Words are what stands between white space.
fn edges_of_row(path: &Path, row: &Row) -> Result<Named, TaskError> {
    let place = format!("line {}", row.line);
    let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
    let get = |key: &str| row.get(&Column::Name(key.to_owned()));
    let expected = "expected a text and a list of targets with span1, label and maybe span2";
    let Some(Value::String(text)) = get("text") else { return Err(wrong(format!("`text` is not a text: {expected}"))) };
    let Some(Value::Array(written)) = get("targets") else {
        return Err(wrong(format!("`targets` is not a list: {expected}")));
    };
    let mut targets = Vec::with_capacity(written.len());
    for (i, target) in written.iter().enumerate() {
        let wrong = |problem: String| wrong(format!("target {i}: {problem}"));
        let span = |key: &str| {
            let problem = || format!("{key} is {}: expected [start, end], two numbers of words", target[key]);
            span_of(&target[key]).ok_or_else(|| wrong(problem()))
        };
        let first = span("span1")?;
        let second = if target["span2"].is_null() { None } else { Some(span("span2")?) };
        targets.push(NamedTarget { first, second, labels: labels_of(&target["label"]).map_err(wrong)? });
    }
    let words = text.split_whitespace().map(str::to_owned).collect();
    Ok(Named { place, words, targets })
}

/// `[start, end]`, from 0 and the end not included.
fn span_of(value: &Value) -> Option<Range<usize>> {
    let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
    match value.as_array()?.as_slice() {
        [start, end] => Some(number(start)?..number(end)?),
        _ => None,
    }
}

/// One label, or a list of any number of them.
fn labels_of(value: &Value) -> Result<Vec<String>, String> {
    let one = |value: &Value| text(value)?.ok_or_else(|| "`label` is missing: expected a text or a list".to_owned());
    match value {
        Value::Array(values) => values.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// A sentence of CoNLL-U: its words and what they depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Arcs {
    pub(super) place: String,
    pub(super) words: Vec<String>,
    /// For each word its head, none for the root, and the relation between them.
    pub(super) heads: Vec<(Option<usize>, String)>,
}

/// Reads all sentences of a CoNLL-U file.
pub(super) fn read_arcs(
    path: &Path,
    mut each: impl FnMut(Result<Arcs, TaskError>) -> Result<(), TaskError>,
) -> Result<(), TaskError> {
    reading_with(
        |each| tables::read_sentences(path, true, each),
        |sentence| each(sentence.and_then(|sentence| arcs_of(path, sentence))),
    )
}

fn arcs_of(path: &Path, sentence: Sentence) -> Result<Arcs, TaskError> {
    let place = format!("line {}", sentence.words.first().map_or(0, |(line, _)| *line));
    let (mut words, mut heads) = (Vec::new(), Vec::new());
    for (line, cells) in &sentence.words {
        let wrong = |problem: String| TaskError::row(path, format!("line {line}"), problem);
        let [id, form, _, _, _, _, head, relation, ..] = &cells[..] else {
            let problem = "expected the ten columns of CoNLL-U with tabs between them";
            return Err(wrong(format!("it has {} columns: {problem}", cells.len())));
        };
        // Multi-word tokens and empty nodes are no words.
        if id.contains(['-', '.']) {
            continue;
        }
        if id.parse() != Ok(words.len() + 1) {
            return Err(wrong(format!("ID is {id:?}: expected {}", words.len() + 1)));
        }
        let head: usize =
            head.parse().map_err(|_| wrong(format!("HEAD is {head:?}: expected the ID of a word, or 0")))?;
        if relation.is_empty() || relation == "_" {
            return Err(wrong(format!("DEPREL is {relation:?}: expected the name of a relation")));
        }
        words.push(form.clone());
        heads.push((*line, head, relation.clone()));
    }
    let count = words.len();
    let arc = |(line, head, relation): (u64, usize, String)| {
        let problem = || format!("HEAD is {head}: expected the ID of one of the {count} words, or 0");
        let arc = (head <= count).then_some((head.checked_sub(1), relation));
        arc.ok_or_else(|| TaskError::row(path, format!("line {line}"), problem()))
    };
    let heads = heads.into_iter().map(arc).collect::<Result<_, _>>()?;
    Ok(Arcs { place, words, heads })
}

/// A target for each word: the word, its head, and their relation; of a root, the word twice, as jiant has it.
fn edges_of_arcs(sentence: &Arcs) -> Named {
    let target = |(word, (head, relation)): (usize, &(Option<usize>, String))| {
        let head = head.unwrap_or(word);
        NamedTarget { first: word..word + 1, second: Some(head..head + 1), labels: vec![relation.clone()] }
    };
    let targets = sentence.heads.iter().enumerate().map(target).collect();
    Named { place: sentence.place.clone(), words: sentence.words.clone(), targets }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: [&str; 3] = [
        "{\"text\": \"the cat sat\", \"targets\": [{\"span1\": [0, 2], \"span2\": [2, 3], \"label\": \"A\"}]}\n",
        "1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_\n2\tcat\tcat\tNOUN\tNN\t_\t0\troot\t_\t_\n\n",
        "jim B-PER\nhenson I-PER\nwas O\n\nold B-LOC\n",
    ];

    /// Files come from strangers: what is changed at random is read, with spans and labels within bounds, or refused.
    #[test]
    fn any_bytes_are_read_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("probe.txt");
        let files = Reading::new(Task::named("ner").unwrap()).files;
        let tasks = [ProbeTask::Edges, ProbeTask::Pos, ProbeTask::Entities, ProbeTask::Chunks, ProbeTask::Dependencies];
        let mut state = 1_u64;
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut accepted = 0;
        for round in 0..900 {
            let mut bytes = SEEDS[round % SEEDS.len()].as_bytes().to_vec();
            for _ in 0..draw(4) {
                let at = draw(bytes.len());
                match draw(3) {
                    0 => bytes[at] = draw(256) as u8,
                    1 => _ = bytes.remove(at),
                    _ => bytes.extend_from_within(at..),
                }
            }
            std::fs::write(&path, &bytes).unwrap();
            for task in tasks {
                let Ok(set) = read_edges(task, &path, &files) else { continue };
                accepted += 1;
                for example in &set.examples {
                    for target in &example.targets {
                        for span in [Some(&target.first), target.second.as_ref()].into_iter().flatten() {
                            assert!(span.start < span.end && span.end <= example.words.len(), "{target:?}");
                        }
                        assert!(target.labels.iter().all(|label| (*label as usize) < set.labels.len()));
                    }
                }
            }
        }
        assert!(accepted > 200, "{accepted}");
    }
}
