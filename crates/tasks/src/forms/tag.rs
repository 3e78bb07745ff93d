//! A label for each word: entities, parts of speech, anything. Read from CoNLL columns, CoNLL-U, rows with lists, and spans of
//! texts as annotation tools write them.
//!
//! Where the tags are those of entities they become BIO, whatever way the file wrote them; every kind that occurs then has
//! all of its tags among the labels.

use std::collections::BTreeSet;
use std::ops::Range;

use henson_data::tables::{self, Column, Sentence};
use henson_infer::softmax;
use henson_text::{TagSet, WordWindows, join_words};

use super::*;
use crate::example::Words;
use crate::metrics::{Confusion, EntityCounts};
use crate::read::reading_with;
use crate::read::rows::{each_row, id_of, need, place};
use crate::read::spans::{Annotated, annotated};
use crate::tags::{Scheme, convert_tags};

/// A file of so many words and one sentence is hardly meant.
const ONE_SENTENCE: usize = 40;

/// Tags that may be those of entities.
pub(crate) static ENTITIES: Form = form(&Tag { words_alone: false });
/// Tags that are never those of entities.
pub(crate) static WORDS: Form = form(&Tag { words_alone: true });

const fn form(steps: &'static Tag) -> Form {
    let (class, command) = ("AutoModelForTokenClassification", "tag --model DIR 'A text.'");
    let form = Form::new(Head::Token { labels: 2 }, "token-classification", class, command, steps);
    let metrics: &[&str] = match steps.words_alone {
        true => &["accuracy", "macro_f1"],
        false => &["f1", "precision", "recall", "accuracy", "macro_f1"],
    };
    Form { fewest_labels: 2, divides: true, metrics, ..form }
}

#[derive(Debug)]
struct Tag {
    words_alone: bool,
}

impl Steps for Tag {
    fn read(&self, path: &Path, collector: Collector<'_>) -> Result<Set, TaskError> {
        if collector.reading.has_rows(path) {
            self.read_rows(path, collector)
        } else {
            self.read_columns(path, collector)
        }
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Words { words, .. } = input else { return Ok(Prepared::Plain(Vec::new())) };
        Ok(Prepared::Words(lay_out_words(tokenizer, words, lengths.most, lengths.document_context)?))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let (Prepared::Words(words), Target::Tags(tags)) = (&prepared, target) else { return Vec::new() };
        let tags: Vec<Option<u32>> = tags.iter().map(|tag| Some(*tag)).collect();
        let of_windows: Vec<_> = (0..words.windows.len()).map(|window| words.labels(window, &tags)).collect();
        let mut instances = prepared.apart(|window| (of_windows[window].clone(), Vec::new()));
        // A window may show no word's first piece.
        instances.retain(|instance| instance.labels.iter().any(Option::is_some));
        instances
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Tokens)
    }

    /// Windows that show no word have nothing to learn from, with labels or without.
    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match (&prepared, target) {
            (Prepared::Words(words), Target::None) => {
                let shown: Vec<bool> = (0..words.windows.len())
                    .map(|window| words.places.iter().flatten().any(|(number, _)| *number == window))
                    .collect();
                let lengths: Vec<usize> = words.windows.iter().map(henson_text::Features::len).collect();
                let mut instances = prepared.apart(|window| (vec![None; lengths[window]], Vec::new()));
                instances.retain(|instance| shown[instance.window as usize]);
                instances
            }
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Tags({:?})", instance.labels)
    }

    fn scores(&self, _problem: Option<Problem>, prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        let Prepared::Words(words) = prepared else { return Vec::new() };
        let row = |(window, position): (usize, usize)| {
            let rows: &Vec<f32> = logits.get(window)?;
            let labels = rows.len() / words.windows[window].len().max(1);
            rows.chunks_exact(labels.max(1)).nth(position)
        };
        // Nothing for words that no sequence shows.
        words.places.iter().map(|place| place.and_then(row).map(softmax).unwrap_or_default()).collect()
    }

    /// A row then has as many votes behind its probabilities: of several models most have it.
    fn vote(&self, prepared: &Prepared, labels: &[Vec<u32>], scores: &mut Scores) {
        let Prepared::Words(words) = prepared else { return };
        for (place, row) in words.places.iter().zip(scores).filter(|(_, row)| !row.is_empty()) {
            let voted = place.and_then(|(window, position)| labels.get(window)?.get(position));
            let count = row.len() as u32;
            row.extend((0..count).map(|label| f32::from(u8::from(voted == Some(&label)))));
        }
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        let outside = said.set.labels.iter().position(|label| label == "O").unwrap_or(0) as u32;
        let labels = said.set.labels.len();
        let votes = |row: &Vec<f32>| if row.len() == 2 * labels { labels } else { 0 };
        let tag = |row: &Vec<f32>| best(&row[votes(row)..]).map_or(outside, |best| best as u32);
        Prediction::Tags(said.scores.iter().map(tag).collect())
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        if part.together {
            return Ok(Box::new(JointLoss::new(device, part)?));
        }
        let (mut labels, mut weights) = part.labels();
        // What fills the batch up on a GPU, if anything.
        labels.resize(part.tokens, 0);
        weights.resize(part.tokens, 0.0);
        class_loss(device, (labels, weights))
    }

    fn scored_names(&self, train: &Set) -> Vec<String> {
        let kind = |label: &String| label.split_once('-').map_or(label.clone(), |(_, kind)| kind.to_owned());
        train.labels.iter().filter(|label| *label != "O").map(kind).collect()
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(balanced(&train.label_counts()))
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let kind = match set.scheme {
            Some(_) => TagSet::Chunks,
            None if self.words_alone => TagSet::Words,
            None => TagSet::of_labels(&set.labels),
        };
        let mut counts = EntityCounts::new(kind);
        let mut mistakes = Vec::new();
        let mut word_pairs = Vec::new();
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let (Target::Tags(expected), Prediction::Tags(predicted), Input::Words { words, .. }) =
                (&example.target, prediction, &example.input)
            else {
                return Err(wrong_kind(set, example));
            };
            if expected.len() != words.len() || predicted.len() != words.len() {
                return Err(wrong_kind(set, example));
            }
            let names = |tags: &[u32]| tags.iter().map(|tag| set.label(*tag)).collect::<Vec<_>>();
            let (expected_names, predicted_names) = (names(expected), names(predicted));
            let [right, found] = counts.add(&expected_names, &predicted_names);
            if kind == TagSet::Words {
                word_pairs.extend(expected.iter().copied().zip(predicted.iter().copied()));
                mistakes.extend(wrong_words(example, words, &expected_names, &predicted_names));
            } else {
                mistakes.extend(wrong_entities(example, words, &right, &found));
            }
        }
        let score = Score { mistakes, ..Score::default() };
        if kind == TagSet::Words {
            let confusion = Confusion::new(set.labels.len(), word_pairs.into_iter());
            return Ok(Score {
                metrics: vec![("accuracy", counts.accuracy()), ("macro_f1", confusion.macro_f1())],
                labels: LabelScore::of_confusion(&set.labels, &confusion),
                names: set.labels.clone(),
                confusion: Some(confusion),
                ..score
            });
        }
        let overall = counts.overall();
        let metrics = vec![
            ("f1", overall.f1()),
            ("precision", overall.precision()),
            ("recall", overall.recall()),
            ("accuracy", counts.accuracy()),
            ("macro_f1", counts.macro_f1()),
        ];
        let labels = counts.kinds.into_iter().map(|(name, counts)| LabelScore { name, counts }).collect();
        Ok(Score { metrics, labels, ..score })
    }

    /// The last column holds what is predicted. Words and sentences must be those of the data.
    fn read_predictions(&self, path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
        let sentences = predicted_sentences(path)?;
        if sentences.len() != set.examples.len() {
            let problem =
                format!("it has {} sentences, {} has {}", sentences.len(), set.path.display(), set.examples.len());
            return Err(TaskError::mismatch(path, problem));
        }
        let mut predictions = Vec::with_capacity(sentences.len());
        for (i, Tagged { place, words, tags, .. }) in sentences.into_iter().enumerate() {
            let (example, tags) = (&set.examples[i], tags.unwrap_or_else(|| vec!["_".to_owned(); words.len()]));
            if let Input::Words { words: expected, .. } = &example.input
                && **expected != words
            {
                let at =
                    expected.iter().zip(&words).position(|(a, b)| a != b).unwrap_or(expected.len().min(words.len()));
                let shown = |words: &[String]| {
                    words.get(at).map_or("the sentence's end".to_owned(), |word| format!("{word:?}"))
                };
                let problem = format!(
                    "word {} of the sentence is {}, in {} (sentence at {}) it is {}",
                    at + 1,
                    shown(&words),
                    set.path.display(),
                    example.place,
                    shown(expected)
                );
                return Err(TaskError::row(path, format!("sentence at {place}"), problem));
            }
            // As the data's own tags were read. Those of BIO stay as they are, well-formed or not.
            let tags = match set.scheme {
                Some(scheme) if scheme != Scheme::Bio => convert_tags(&tags, Scheme::Bio),
                _ => tags,
            };
            let numbers: Result<Vec<u32>, String> =
                tags.iter().map(|tag| predictions::label_number(set, tag)).collect();
            let numbers = numbers.map_err(|problem| TaskError::row(path, format!("sentence at {place}"), problem))?;
            predictions.push(Prediction::Tags(numbers));
        }
        Ok(predictions)
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        let mut text = String::new();
        let words_of = |example: &Example| match &example.input {
            Input::Words { words, .. } => words.to_vec(),
            _ => Vec::new(),
        };
        let has_space = set.examples.iter().any(|example| words_of(example).iter().any(|word| word.contains(' ')));
        let separator = if has_space { '\t' } else { ' ' };
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let words = words_of(example);
            let Prediction::Tags(tags) = prediction else { return Err(wrong_kind(set, example)) };
            if tags.len() != words.len() {
                return Err(wrong_kind(set, example));
            }
            let predicted = written(set, tags);
            let expected = match &example.target {
                Target::Tags(tags) => Some(written(set, tags)),
                _ => None,
            };
            for (i, word) in words.iter().enumerate() {
                text.push_str(word);
                for tags in expected.iter().chain([&predicted]) {
                    text.push(separator);
                    text.push_str(&tags[i]);
                }
                text.push('\n');
            }
            text.push('\n');
        }
        Ok(vec![("predictions.conll".to_owned(), text.into_bytes())])
    }
}

impl Tag {
    /// Reads columns. The word is the first and the tag the last one; in CoNLL-U they are FORM and UPOS.
    fn read_columns(&self, path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
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
            collector.set.problems.push(format!(
                "{}: all {} lines are one sentence, since no empty line ends one; expected one word with its tag per line, or a table \
                 as .jsonl or .parquet",
                path.display(),
                one.words.len()
            ));
        }
        self.number_tags(collector, sentences)
    }

    /// Reads rows with a list of words and a list of tags.
    fn read_rows(&self, path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
        let mut sentences = Vec::new();
        let mut number = 0;
        each_row(path, &mut collector, |collector, row| {
            let row = row?;
            let (columns, place) = (&collector.reading.files, place(path, &row));
            let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
            match annotated(&row, columns).map_err(wrong)? {
                None => {}
                Some(Annotated::LeftOut) => {
                    collector.set.undecided += 1;
                    return Ok(None);
                }
                Some(Annotated::Sentences(all)) => {
                    if all.iter().any(|(words, _)| words.is_empty()) {
                        return Err(wrong("the text has no words".to_owned()));
                    }
                    let id = id_of(collector, &row, number);
                    let tagged =
                        |(words, tags)| Tagged { id: id.clone(), place: place.clone(), document: number, words, tags };
                    sentences.extend(all.into_iter().map(tagged));
                    number += 1;
                    return Ok(None);
                }
            }
            let role = Role { what: "the words", flag: "--text-column", names: &["tokens", "words", "text"] };
            let (_, value) = need(path, &row, columns.text_column.as_ref(), &role, None)?;
            let words = texts(value).map_err(wrong)?;
            let names = &["tags", "ner_tags", "labels", "pos_tags", "upos"];
            let tags = match columns.label_column.first() {
                Some(column) if collector.reading.labels_wanted => {
                    let role = Role { what: "the tags", flag: "--label-column", names };
                    Some(need(path, &row, Some(column), &role, None)?)
                }
                user => rows::find(&row, user, names, None),
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
        self.number_tags(collector, sentences)
    }

    /// Numbers the tags of all sentences, those of entities as BIO.
    fn number_tags(&self, mut collector: Collector<'_>, sentences: Vec<Tagged>) -> Result<Set, TaskError> {
        let path = collector.path;
        let written = sentences.iter().filter_map(|sentence| sentence.tags.as_deref());
        let scheme = if self.words_alone { None } else { Scheme::of(written.clone()) };
        let is_number = |tag: &String| tag.parse::<i64>().is_ok();
        let mut tags = written.flatten().peekable();
        if !self.words_alone
            && collector.reading.labels_wanted
            && !collector.set.labels_are_final
            && tags.peek().is_some()
            && tags.all(is_number)
        {
            return Err(TaskError::NumbersForTags { path: path.to_owned() });
        }
        // A model that was trained on BIOES wants its labels so.
        let wanted = match collector.set.labels.iter().any(|label| label.starts_with("E-") || label.starts_with("S-")) {
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
        if !collector.set.labels_are_final && scheme.is_some() {
            let tags =
                kinds.iter().flat_map(|kind| wanted.prefixes().iter().map(move |prefix| format!("{prefix}-{kind}")));
            for tag in tags.chain(["O".to_owned()]) {
                // Never refused while labels are learned.
                let _ = collector.number_of(&tag);
            }
        }
        collector.finish(scheme)
    }
}

/// The tags of all words of a sentence, scored together.
struct JointLoss {
    /// The rows of words with a tag, where others have none.
    rows: Option<Tensor>,
    layout: Layout,
    tags: Tensor,
    scale: f32,
}

impl JointLoss {
    fn new(device: &Device, part: &Part<'_>) -> TrainResult<Self> {
        let all = || part.instances.iter().flat_map(|instance| &instance.labels);
        let mut tags: Vec<u32> = all().flatten().copied().collect();
        let mut rows: Vec<u32> = (0..).zip(all()).filter_map(|(row, tag)| tag.map(|_| row)).collect();
        let every = rows.len() == all().count();
        let lengths = part.instances.iter().map(|instance| instance.labels.iter().flatten().count());
        let layout = Layout::new(device, &lengths.collect::<Vec<_>>(), 0)?;
        // What fills the batch up on a GPU, if anything.
        tags.resize(layout.tokens(), 0);
        rows.resize(layout.tokens(), Device::NOWHERE);
        let rows = if every { None } else { Some(Tensor::from_slice(device, [rows.len()], &rows)?) };
        Ok(Self { rows, layout, tags: Tensor::from_slice(device, [tags.len()], &tags)?, scale: part.scale })
    }
}

impl Loss for JointLoss {
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let mut logits = model.logits_of(pass, last, layout, None)?;
        if let Some(rows) = &self.rows {
            logits = pass.gather(&logits, rows)?;
        }
        let why = "the model has no conditional random field";
        let crf = model.crf().ok_or(henson_tensor::TensorError::Unsupported { operation: "loss", why })?;
        Ok(vec![pass.crf_loss(logits, crf, &self.layout, &self.tags, self.scale)?])
    }
}

/// A sentence before its tags are numbered.
struct Tagged {
    id: String,
    place: String,
    document: u64,
    words: Vec<String>,
    tags: Option<Vec<String>>,
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

/// Neighbours of the same document know each other's words.
fn in_documents(mut sentences: Vec<Tagged>) -> impl Iterator<Item = (Tagged, Words)> {
    let mut words = Vec::with_capacity(sentences.len());
    for document in sentences.chunk_by_mut(|a, b| a.document == b.document) {
        let own = document.iter_mut().map(|sentence| std::mem::take(&mut sentence.words));
        words.extend(Words::of_document(own.collect()));
    }
    sentences.into_iter().zip(words)
}

/// The words of a sentence with wrong tags.
fn wrong_words(example: &Example, words: &[String], expected: &[&str], predicted: &[&str]) -> Option<Mistake> {
    let wrong: Vec<usize> = (0..words.len()).filter(|&i| expected[i] != predicted[i]).collect();
    let shown = |names: &[&str]| {
        let each = wrong.iter().map(|&i| format!("{}/{}", words[i], names[i]));
        each.collect::<Vec<_>>().join(" ")
    };
    (!wrong.is_empty()).then(|| mistake(example, shown(expected), shown(predicted), wrong.len() as f64))
}

type Entities<'a> = [(Range<usize>, &'a str)];

/// The entities of a sentence that were missed or invented.
fn wrong_entities(example: &Example, words: &[String], right: &Entities<'_>, found: &Entities<'_>) -> Option<Mistake> {
    let only_in = |these: &Entities<'_>, others: &Entities<'_>| {
        let each = these.iter().filter(|entity| !others.contains(entity));
        each.map(|(place, kind)| format!("{} ({kind})", words[place.clone()].join(" "))).collect::<Vec<_>>()
    };
    let (missed, invented) = (only_in(right, found), only_in(found, right));
    let weight = (missed.len() + invented.len()) as f64;
    let shown = |entities: Vec<String>| if entities.is_empty() { "nothing".to_owned() } else { entities.join(", ") };
    (weight > 0.0).then(|| mistake(example, shown(missed), shown(invented), weight))
}

/// The sentences of a prediction file.
fn predicted_sentences(path: &Path) -> Result<Vec<Tagged>, TaskError> {
    let universal = path.to_string_lossy().to_lowercase().contains(".conllu");
    let mut sentences = Vec::new();
    reading_with(
        |each| tables::read_sentences(path, universal, each),
        |sentence| {
            let sentence = sentence?;
            let width = sentence.words.first().map_or(0, |(_, cells)| cells.len());
            let tag_column = Some(if universal { 3 } else { width.saturating_sub(1).max(1) });
            sentences.push(tagged(path, sentence, width, universal, usize::from(universal), tag_column, 0)?);
            Ok(())
        },
    )?;
    Ok(sentences)
}

/// Tags as the data's own file writes them. BIO is left as it is, well-formed or not.
fn written(set: &Set, tags: &[u32]) -> Vec<String> {
    let tags: Vec<String> = tags.iter().map(|tag| set.label(*tag).to_owned()).collect();
    match set.scheme {
        Some(scheme) if scheme != Scheme::Bio => convert_tags(&tags, scheme),
        _ => tags,
    }
}

/// The words of a sentence as sequences, with as much of its document around them as fits, if that is wanted.
pub(crate) fn lay_out_words(
    tokenizer: &Tokenizer,
    words: &Words,
    most: usize,
    document_context: bool,
) -> Result<WordWindows, TextError> {
    // A word has a piece or more, nearly always: more words would hardly be shown.
    let (words, own) = words.around(if document_context { most } else { 0 });
    let (text, places) = join_words(words);
    tokenizer.words_in_context(&text, &places, own, most)
}
