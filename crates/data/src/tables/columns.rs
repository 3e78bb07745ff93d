//! Sentences of CoNLL columns: a word a line, its columns between tabs or spaces, an empty line after each sentence.

use std::path::Path;
use std::sync::Arc;

use super::{bad_row, open, text_of};
use crate::DataError;
use crate::documents::LARGEST;
use crate::lines::{Line, Lines, Meter};

/// The most words of a sentence, and its most bytes are [`LARGEST`]: a file without empty lines is hardly meant.
const LONGEST_SENTENCE: usize = 1 << 16;

/// A sentence of a column file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// Which document it belongs to, from 0: `-DOCSTART-` and `# newdoc` begin one.
    pub document: u64,
    /// The words: the number of the line, from 1, and its columns.
    pub words: Vec<(u64, Vec<String>)>,
}

/// Reads all sentences of a file. With `comments` (CoNLL-U), lines that begin with `#` are none of its words; without, as in
/// the other column files, `#` is a word like others. A line with tabs has its columns between tabs, others between spaces:
/// no-break spaces and their kin are part of a word.
pub fn read_sentences(
    path: &Path,
    comments: bool,
    each: &mut dyn FnMut(Result<Sentence, DataError>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let meter = Arc::new(Meter::default());
    let (source, start) = open(path, &meter)?;
    let mut lines = Lines::new(source, &start, path, &meter)?;
    let mut document = 0;
    let (mut words, mut size): (Vec<(u64, Vec<String>)>, usize) = (Vec::new(), 0);
    // What is wrong with the sentence that is being read.
    let mut problem = None;
    let mut seen = false;
    while let Some(Line { bytes, number, unfinished, .. }) = lines.next(LARGEST)? {
        if unfinished {
            while lines.next(LARGEST)?.is_some_and(|part| part.unfinished) {}
            problem =
                problem.or_else(|| Some(bad_row(path, number, format!("it is longer than {} MiB", LARGEST >> 20))));
            continue;
        }
        let text = match text_of(bytes, path, number) {
            Ok(text) => text,
            Err(error) => {
                problem = problem.or(Some(error));
                continue;
            }
        };
        let begins_document = match comments {
            true => text.starts_with("# newdoc"),
            false => text.starts_with("-DOCSTART-"),
        };
        if text.trim_matches([' ', '\t']).is_empty() || begins_document {
            size = 0;
            seen |= finish(document, &mut words, &mut problem, each)?;
            document += u64::from(begins_document && seen);
            seen &= !begins_document;
        } else if !(comments && text.starts_with('#')) {
            size += text.len();
            if words.len() == LONGEST_SENTENCE || size > LARGEST {
                let text = "the sentence is too long: expected an empty line after each sentence";
                problem = problem.or_else(|| Some(bad_row(path, number, text)));
                continue;
            }
            words.push((number, split(text)));
        }
    }
    finish(document, &mut words, &mut problem, each)?;
    Ok(())
}

/// Hands a sentence out; says whether there was one.
fn finish(
    document: u64,
    words: &mut Vec<(u64, Vec<String>)>,
    problem: &mut Option<DataError>,
    each: &mut dyn FnMut(Result<Sentence, DataError>) -> Result<(), DataError>,
) -> Result<bool, DataError> {
    let words = std::mem::take(words);
    match problem.take() {
        Some(problem) => each(Err(problem))?,
        None if words.is_empty() => return Ok(false),
        None => each(Ok(Sentence { document, words }))?,
    }
    Ok(true)
}

fn split(line: &str) -> Vec<String> {
    match line.contains('\t') {
        true => line.trim_end_matches([' ', '\t']).split('\t').map(|cell| cell.trim_matches(' ').to_owned()).collect(),
        false => line.split(' ').filter(|cell| !cell.is_empty()).map(str::to_owned).collect(),
    }
}
