//! Entities as annotation tools write them, by places in a text instead of tags of words: Prodigy (`text`, `tokens`, `spans`),
//! doccano (`text` with `label`, `labels` or `entities`) and spaCy (`[text, {"entities": […]}]`, `{"text", "entities"}`, and the
//! documents of version 2 with `paragraphs`).
//!
//! Places count characters. A span covers whole words: those of the file's own `tokens`, else those that running text is divided
//! into when a model tags it.

use std::ops::Range;

use henson_data::tables::{Column, Row};
use henson_text::split_words;
use serde_json::Value;

use super::{Files, text};
use crate::tags::Scheme;

/// What a row with such annotations gives.
pub(crate) enum Annotated {
    /// Nothing: its annotator rejected it.
    LeftOut,
    /// Its sentences.
    Sentences(Vec<Sentence>),
}

/// Words, and their tags where these are known.
type Sentence = (Vec<String>, Option<Vec<String>>);

/// Reads a row; nothing where it is not so written.
pub(crate) fn annotated(row: &Row, files: &Files) -> Result<Option<Annotated>, String> {
    let get = |name: &str| row.get(&Column::Name(name.to_owned()));
    if let Some(Value::Array(paragraphs)) = get("paragraphs") {
        return Ok(Some(Annotated::Sentences(of_paragraphs(paragraphs)?)));
    }
    let (written, spans) = match (row.get(&Column::Number(0)), row.get(&Column::Number(1))) {
        (Some(Value::String(written)), Some(Value::Object(annotations))) if row.names().is_empty() => {
            (written, annotations.get("entities"))
        }
        _ => {
            let own = files.text_column.as_ref().map_or_else(|| get("text"), |column| row.get(column));
            let Some(Value::String(written)) = own else { return Ok(None) };
            let words = ["tokens", "words"].iter().filter_map(|name| get(name)?.as_array()?.first());
            // Words in a list, beside the text that they are from.
            if files.text_column.is_none() && words.clone().any(Value::is_string) {
                return Ok(None);
            }
            let names = ["spans", "entities", "label", "labels"];
            let usual = || names.iter().find_map(|name| get(name));
            (written, files.label_column.first().map_or_else(usual, |column| row.get(column)))
        }
    };
    if matches!(get("answer"), Some(Value::String(answer)) if ["reject", "ignore"].contains(&answer.as_str())) {
        return Ok(Some(Annotated::LeftOut));
    }
    let places = Places::new(written);
    let words = match get("tokens") {
        Some(Value::Array(tokens)) => {
            tokens.iter().map(|token| places.of_token(token)).collect::<Result<Vec<_>, _>>()?
        }
        _ => split_words(written),
    };
    // Where something was accepted without any spans, there are none.
    let tags = match spans.filter(|spans| !spans.is_null()) {
        None if get("answer").is_none() => None,
        None => Some(tags(written, &words, Vec::new())?),
        Some(Value::Array(spans)) => {
            let spans = spans.iter().map(|span| places.of_span(span)).collect::<Result<_, _>>()?;
            Some(tags(written, &words, spans)?)
        }
        Some(other) => return Err(format!("expected a list of spans, found {other}")),
    };
    let words = words.into_iter().map(|word| written[word].to_owned()).collect();
    Ok(Some(Annotated::Sentences(vec![(words, tags)])))
}

/// The sentences of a document of spaCy 2: tokens with `orth` and `ner`, as BILUO.
fn of_paragraphs(paragraphs: &[Value]) -> Result<Vec<Sentence>, String> {
    let list = |value: &Value, key: &str| -> Result<Vec<Value>, String> {
        let found = value.get(key).and_then(Value::as_array).cloned();
        found.ok_or_else(|| format!("expected a list {key:?} in a document with \"paragraphs\", as spaCy 2 writes it"))
    };
    let mut sentences = Vec::new();
    for paragraph in paragraphs {
        for sentence in list(paragraph, "sentences")? {
            let tokens = list(&sentence, "tokens")?;
            let all = |key: &str| -> Result<Option<Vec<String>>, String> {
                tokens.iter().map(|token| token.get(key).map_or(Ok(None), text)).collect()
            };
            let words = all("orth")?.ok_or("a token without \"orth\", its text")?;
            sentences.push((words, all("ner")?));
        }
    }
    Ok(sentences)
}

/// Where the characters of a text are.
struct Places<'t> {
    text: &'t str,
    /// The byte where each character begins, and the end.
    starts: Vec<usize>,
}

impl<'t> Places<'t> {
    fn new(text: &'t str) -> Self {
        Self { text, starts: text.char_indices().map(|(byte, _)| byte).chain([text.len()]).collect() }
    }

    /// The bytes of some characters.
    fn bytes(&self, what: &str, start: Option<&Value>, end: Option<&Value>) -> Result<Range<usize>, String> {
        let place = |value: Option<&Value>| value.and_then(Value::as_u64).and_then(|place| usize::try_from(place).ok());
        let (Some(start), Some(end)) = (place(start), place(end)) else {
            return Err(format!("a {what} without numbers for its start and end"));
        };
        match (self.starts.get(start), self.starts.get(end)) {
            (Some(from), Some(to)) if start < end => Ok(*from..*to),
            _ => {
                let characters = self.starts.len() - 1;
                Err(format!(
                    "a {what} from character {start} to {end}: the text has {characters}, and a {what} at least one"
                ))
            }
        }
    }

    fn of_token(&self, token: &Value) -> Result<Range<usize>, String> {
        self.bytes("token", token.get("start"), token.get("end"))
    }

    /// `[start, end, label]`, or an object with such keys; without white space at its ends.
    fn of_span(&self, span: &Value) -> Result<(Range<usize>, String), String> {
        let either = |names: [&str; 2]| names.iter().find_map(|name| span.get(name));
        let (start, end, label) = match span {
            Value::Array(parts) => (parts.first(), parts.get(1), parts.get(2)),
            _ => (either(["start", "start_offset"]), either(["end", "end_offset"]), span.get("label")),
        };
        let label = label.map(text).transpose()?.flatten().filter(|label| !label.is_empty());
        let Some(label) = label else {
            let expected = "[0, 5, \"PER\"] or {\"start\": 0, \"end\": 5, \"label\": \"PER\"}";
            return Err(format!("expected a span such as {expected}, found {span}"));
        };
        let bytes = self.bytes("span", start, end)?;
        let inside = &self.text[bytes.clone()];
        let start = bytes.start + inside.len() - inside.trim_start().len();
        Ok((start..start + inside.trim().len(), label))
    }
}

/// The tags of words in a text with these spans.
fn tags(text: &str, words: &[Range<usize>], mut spans: Vec<(Range<usize>, String)>) -> Result<Vec<String>, String> {
    spans.sort_by_key(|(span, _)| span.start);
    let mut entities: Vec<(Range<usize>, &str)> = Vec::new();
    for (i, (span, label)) in spans.iter().enumerate() {
        let shown = |span: &Range<usize>| format!("{:?}", &text[span.clone()]);
        if let Some((before, _)) = spans[..i].last().filter(|(before, _)| before.end > span.start) {
            return Err(format!("the spans {} and {} overlap: a word has one tag", shown(before), shown(span)));
        }
        let first = words.partition_point(|word| word.end <= span.start);
        let end = words.partition_point(|word| word.start < span.end);
        if first >= end || words[first].start != span.start || words[end - 1].end != span.end {
            let cut = words.get(first).map_or_else(String::new, |word| format!(" such as {}", shown(word)));
            return Err(format!(
                "the span {} ({label}) does not begin and end with whole words{cut}: mark whole words, give \"tokens\" with \
                 \"start\" and \"end\", or leave such rows out by --skip-bad",
                shown(span)
            ));
        }
        entities.push((first..end, label));
    }
    Ok(Scheme::Bio.write(words.len(), &entities))
}
