//! Sentences of words with tags: CoNLL columns, CoNLL-U, and rows with lists.
//!
//! Where the tags are those of entities they become BIO, whatever way the file wrote them; every kind that occurs then has
//! all of its tags among the labels.

use std::collections::BTreeSet;
use std::path::Path;

use henson_data::tables::{self, Column, Sentence};

use super::rows::{Role, each_row, id_of, need, place};
use super::{Collector, reading_with, text, texts};
use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target, Words};
use crate::tags::{Scheme, convert_tags};

/// A file of so many words and one sentence is hardly meant.
const ONE_SENTENCE: usize = 40;

/// A sentence before its tags are numbered.
struct Tagged {
    id: String,
    place: String,
    document: u64,
    words: Vec<String>,
    tags: Option<Vec<String>>,
}

/// Reads columns. The word is the first and the tag the last one; in CoNLL-U they are FORM and UPOS.
pub(super) fn read_columns(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let columns = &collector.reading.files;
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let universal = [".conllu", ".conllu.gz", ".conllu.zst"].iter().any(|ending| name.ends_with(ending));
    let number = |column: Option<&Column>, flag: &'static str| match column {
        None => Ok(None),
        Some(Column::Number(number)) => Ok(Some(*number)),
        Some(Column::Name(name)) => Err(TaskError::NoColumn {
            path: path.to_owned(),
            role: "words and tags",
            expected: format!("{name:?}"),
            found: "columns without names; give their numbers, from 0".to_owned(),
            flag,
        }),
    };
    let word_column = number(columns.text_column.as_ref(), "--text-column")?.unwrap_or(usize::from(universal));
    let tag_column = number(columns.label_column.first(), "--label-column")?.or(universal.then_some(3));
    let (mut sentences, labels_wanted) = (Vec::new(), collector.reading.labels_wanted);
    let (mut count, mut width) = (0, None);
    reading_with(
        |each| tables::read_sentences(path, universal, each),
        |sentence| {
            let id = count;
            count += 1;
            let example = sentence.and_then(|sentence| {
                let first = sentence.words.first().map_or(0, |(_, cells)| cells.len());
                let width = *width.get_or_insert(first);
                // A column that only the training needed.
                let tag_column = tag_column.filter(|column| labels_wanted || *column < width);
                tagged(path, sentence, width, universal, word_column, tag_column, id)
            });
            match example {
                Ok(sentence) if sentence.words.is_empty() => Ok(()),
                Ok(sentence) => {
                    sentences.push(sentence);
                    Ok(())
                }
                Err(problem) => collector.take(Err(problem)),
            }
        },
    )?;
    if let (1, [one]) = (count, &sentences[..])
        && one.words.len() >= ONE_SENTENCE
    {
        collector.problems.push(format!(
            "{}: all {} lines are one sentence, since no empty line ends one; expected a word with its tag a line, or a table \
             as .jsonl or .parquet",
            path.display(),
            one.words.len()
        ));
    }
    number_tags(collector, sentences)
}

fn tagged(
    path: &Path,
    sentence: Sentence,
    width: usize,
    universal: bool,
    word_column: usize,
    tag_column: Option<usize>,
    id: u64,
) -> Result<Tagged, TaskError> {
    let first_line = sentence.words.first().map_or(0, |(line, _)| *line);
    // A file with one column has words alone.
    let tag_at = tag_column.or(width.checked_sub(1).filter(|last| *last > word_column));
    let (mut words, mut tags) = (Vec::new(), Vec::new());
    for (line, mut cells) in sentence.words {
        let wrong = |problem: String| TaskError::row(path, format!("line {line}"), problem);
        // Multi-word tokens and empty nodes stand between the words of CoNLL-U and are none.
        if universal && cells.first().is_some_and(|id| id.contains(['-', '.'])) {
            continue;
        }
        if cells.len() != width {
            return Err(wrong(format!("it has {} columns, the file begins with {width}", cells.len())));
        }
        let needed = word_column.max(tag_at.unwrap_or(0));
        if needed >= cells.len() {
            return Err(wrong(format!("it has {} columns, expected at least {}", cells.len(), needed + 1)));
        }
        if let Some(column) = tag_at {
            let tag = std::mem::take(&mut cells[column]);
            if tag.is_empty() {
                return Err(wrong("its tag is empty".to_owned()));
            }
            tags.push(tag);
        }
        words.push(std::mem::take(&mut cells[word_column]));
    }
    let place = format!("line {first_line}");
    // `_` is CoNLL-U's word for "not said".
    let unlabelled = universal && tags.iter().all(|tag| tag == "_");
    let tags = tag_at.filter(|_| !unlabelled).map(|_| tags);
    Ok(Tagged { id: id.to_string(), place, document: sentence.document, words, tags })
}

/// Reads rows with a list of words and a list of tags.
pub(super) fn read_rows(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let mut sentences = Vec::new();
    let mut number = 0;
    each_row(path, &mut collector, |collector, row| {
        let row = row?;
        let (columns, place) = (&collector.reading.files, place(path, &row));
        let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
        let role = Role { what: "the words", flag: "--text-column", names: &["tokens", "words", "text"] };
        let (_, value) = need(path, &row, columns.text_column.as_ref(), &role, None)?;
        let words = texts(value).map_err(wrong)?;
        let names = &["tags", "ner_tags", "labels", "pos_tags", "upos"];
        let tags = match columns.label_column.first() {
            Some(column) if collector.reading.labels_wanted => {
                let role = Role { what: "the tags", flag: "--label-column", names };
                Some(need(path, &row, Some(column), &role, None)?)
            }
            user => super::rows::find(&row, user, names, None),
        };
        let tags = tags.filter(|(_, value)| !value.is_null());
        let tags = tags.map(|(column, value)| texts(&collector.named(&row, &column, value)));
        let tags = tags.transpose().map_err(wrong)?;
        if words.is_empty() {
            return Err(wrong("the list of words is empty".to_owned()));
        }
        if let Some(tags) = tags.as_ref().filter(|tags| tags.len() != words.len()) {
            return Err(wrong(format!("{} words have {} tags", words.len(), tags.len())));
        }
        // Without such a column each is a document of its own.
        let document = match row.get(&Column::Name("document".to_owned())) {
            None => number,
            Some(value) => {
                let written = text(value).map_err(|problem| wrong(format!("column \"document\": {problem}")))?;
                let parsed = written.as_deref().and_then(|written| written.parse().ok());
                let found = || written.as_deref().map_or("nothing".to_owned(), |written| format!("{written:?}"));
                parsed.ok_or_else(|| wrong(format!("column \"document\": expected a number, found {}", found())))?
            }
        };
        sentences.push(Tagged { id: id_of(collector, &row, number), place: place.clone(), document, words, tags });
        number += 1;
        Ok(None)
    })?;
    number_tags(collector, sentences)
}

/// Numbers the tags of all sentences, those of entities as BIO.
fn number_tags(mut collector: Collector<'_>, sentences: Vec<Tagged>) -> Result<Set, TaskError> {
    let path = collector.path;
    let written = sentences.iter().filter_map(|sentence| sentence.tags.as_deref());
    let scheme = match collector.reading.task.name {
        "pos" => None,
        _ => Scheme::of(written.clone()),
    };
    let is_number = |tag: &String| tag.parse::<i64>().is_ok();
    let mut tags = written.flatten().peekable();
    if collector.reading.task.name != "pos"
        && collector.reading.labels_wanted
        && !collector.labels_are_final
        && tags.peek().is_some()
        && tags.all(is_number)
    {
        return Err(TaskError::NumbersForTags { path: path.to_owned() });
    }
    // A model that was trained on BIOES wants its labels so.
    let wanted = match collector.labels.iter().any(|label| label.starts_with("E-") || label.starts_with("S-")) {
        true => Scheme::Bioes,
        false => Scheme::Bio,
    };
    let mut kinds = BTreeSet::new();
    for (sentence, words) in in_documents(sentences) {
        let Tagged { id, place, document, tags, .. } = sentence;
        let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
        let tags = tags.map(|tags| if scheme.is_some() { convert_tags(&tags, wanted) } else { tags });
        if let (Some(tags), true) = (&tags, scheme.is_some()) {
            kinds.extend(tags.iter().filter_map(|tag| tag.split_once('-')).map(|(_, kind)| kind.to_owned()));
        }
        let numbered =
            tags.map(|tags| tags.iter().map(|tag| collector.number_of(tag)).collect::<Result<Vec<u32>, _>>());
        let example = numbered.transpose().map_err(wrong).map(|tags| {
            let input = Input::Words { words, document };
            Example { id, place, input, target: tags.map_or(Target::None, Target::Tags) }
        });
        collector.take(example)?;
    }
    if !collector.labels_are_final && scheme.is_some() {
        let tags = kinds.iter().flat_map(|kind| wanted.prefixes().iter().map(move |prefix| format!("{prefix}-{kind}")));
        for tag in tags.chain(["O".to_owned()]) {
            // Never refused while labels are learnt.
            let _ = collector.number_of(&tag);
        }
    }
    collector.finish(scheme)
}

/// Neighbours of the same document know each other's words.
fn in_documents(mut sentences: Vec<Tagged>) -> impl Iterator<Item = (Tagged, Words)> {
    let mut words = Vec::with_capacity(sentences.len());
    for document in sentences.chunk_by_mut(|a, b| a.document == b.document) {
        let own = document.iter_mut().map(|sentence| std::mem::take(&mut sentence.words));
        words.extend(Words::of_document(own.collect()));
    }
    sentences.into_iter().zip(words)
}
