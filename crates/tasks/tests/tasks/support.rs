//! Files for one test, and short forms of what comes out of them.

use std::path::{Path, PathBuf};

use henson_tasks::{Example, Files, Input, Reading, Set, Target, Task, TaskError, read};

/// A directory that goes away.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

/// Two documents of short sentences; the last one is longer than a sequence of 14 tokens.
pub(crate) const DOCUMENTS: &str = "-DOCSTART- -X- O\n\njim B-PER\nsat O\n\nwho O\nsings O\n? O\n\na O\nman O\n\n\
-DOCSTART- -X- O\n\nthe O\ncat B-PER\n\nthe O\nold O\nman B-PER\nand O\nthe O\nsmall O\nwoman B-PER\nand O\n\
the O\nchild B-PER\nwere O\nby O\nthe O\nsea B-LOC\n. O\n";

/// A file of tests-data/tasks.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/tasks").join(name)
}

pub(crate) fn task(name: &str) -> &'static Task {
    Task::named(name).unwrap_or_else(|| panic!("no task {name}"))
}

pub(crate) fn read_as(name: &str, path: &Path) -> Result<Set, TaskError> {
    read(path, &Reading::new(task(name)))
}

/// How files of a task are read that are written otherwise.
pub(crate) fn written(name: &str, files: Files) -> Reading {
    Reading { files, ..Reading::new(task(name)) }
}

/// `id: input -> target`, in a few letters.
pub(crate) fn short(set: &Set, example: &Example) -> String {
    let input = match &example.input {
        Input::One(text) => text.clone(),
        Input::Pair(first, second) => format!("{first} | {second}"),
        Input::Words { words, document } => format!("{} ({document})", words.join(" ")),
        Input::Question { question, passage } => format!("{question} | {passage}"),
        Input::Choices { context, endings } => format!("{context} | {}", endings.join(" / ")),
        Input::Answered { passage, question, answer } => format!("{passage} | {question} | {answer}"),
        Input::Cloze { passage, query, candidates } => format!("{passage} | {query} | {}", candidates.join(" / ")),
        Input::Marked { first, second, spans } => {
            let texts = [Some(first), second.as_ref()];
            let marked = spans.iter().map(|span| &texts[usize::from(span.in_second)].unwrap()[span.bytes.clone()]);
            let marked = marked.collect::<Vec<_>>().join(" / ");
            format!("{} | {marked}", texts.into_iter().flatten().cloned().collect::<Vec<_>>().join(" | "))
        }
        Input::Alike { first, second, unlike } => {
            [format!("{first} ~ {second}")].iter().chain(unlike).cloned().collect::<Vec<_>>().join(" / ")
        }
    };
    let names = |labels: &[u32]| labels.iter().map(|label| set.label(*label)).collect::<Vec<_>>().join(" ");
    let target = match &example.target {
        Target::None => "?".to_owned(),
        Target::Class(class) if set.labels.is_empty() => class.to_string(),
        Target::Class(class) => format!("{class} {}", set.label(*class)),
        Target::Classes(classes) => format!("[{}]", names(classes)),
        Target::Number(number) => number.to_string(),
        Target::Numbers(numbers) => format!("{numbers:?}"),
        Target::Tags(tags) => names(tags),
        Target::Texts(texts) => texts.join(" / "),
        Target::Answers(answers) => {
            let each = answers.iter().map(|answer| match &answer.place {
                Some(place) => format!("{} {place:?}", answer.text),
                None => format!("{} nowhere", answer.text),
            });
            format!("[{}]", each.collect::<Vec<_>>().join(", "))
        }
    };
    format!("{}: {input} -> {target}", example.id)
}

pub(crate) fn shorts(set: &Set) -> Vec<String> {
    set.examples.iter().map(|example| short(set, example)).collect()
}

/// Tags that continue an entity which is not there: `I-` behind another kind than its own.
pub(crate) fn illegal_tags(tags: &[&str]) -> usize {
    let before = |i: usize| i.checked_sub(1).map_or("O", |before| tags[before]);
    let continued = |i: usize, kind: &str| before(i).split_once('-').is_some_and(|(_, other)| other == kind);
    let illegal = |(i, tag): &(usize, &&str)| tag.strip_prefix("I-").is_some_and(|kind| !continued(*i, kind));
    tags.iter().enumerate().filter(illegal).count()
}
