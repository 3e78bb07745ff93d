//! A text for a text, written by an encoder-decoder: translation, summaries, pronunciations. Or by one language model over both: it
//! continues a source, and the token that ends texts behind it, with the target; the loss is that of the target alone.

use std::collections::HashMap;

use henson_data::Lines;
use henson_data::tables::{Column, Row, TableFormat};
use henson_models::InputError;
use henson_text::{Features, Pieces, Template};
use henson_train::TrainError;
use serde_json::Value;

use super::*;
use crate::metrics::TextScores;
use crate::read::rows::{each_row, find, id_of, need, place};
use crate::write;

pub(crate) static SEQ2SEQ: Form = Form {
    usual_length: 512,
    reads_whole: true,
    writes: true,
    continues: true,
    metrics: &["bleu", "chrf", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "wer", "per", "loss"],
    ..Form::new(
        Head::Seq2Seq,
        "text2text-generation",
        "AutoModelForSeq2SeqLM",
        "generate --model DIR 'A text.'",
        &Seq2Seq,
    )
};

/// Scores that are errors: lower is better.
pub(crate) const ERRORS: [&str; 3] = ["wer", "per", "loss"];

#[derive(Debug)]
struct Seq2Seq;

impl Steps for Seq2Seq {
    fn read(&self, path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
        let mut number = 0;
        each_row(path, &mut collector, |collector, row| {
            let (id, row) = (number, row?);
            number += 1;
            let input = Input::One(source(path, collector, &row)?);
            let target = match collector.reading.labels_wanted {
                true => targets(path, collector, &row)?,
                false => Target::None,
            };
            Ok(Some(Example { id: id_of(collector, &row, id), place: place(path, &row), input, target }))
        })?;
        collector.finish(None)
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::One(text) = input else { return Ok(Prepared::Plain(Vec::new())) };
        lay_out_pair(tokenizer, text, &[], lengths)
    }

    fn lay_out_example(&self, with: &LayingOut<'_>, example: &Example) -> Result<Prepared, TextError> {
        match (&example.input, &example.target) {
            (Input::One(text), Target::Texts(targets)) => lay_out_pair(with.tokenizer, text, targets, with.lengths),
            (input, _) => self.lay_out(with.tokenizer, input, with.lengths),
        }
    }

    fn instances(&self, prepared: Prepared, _target: &Target, _labels: usize) -> Vec<Instance> {
        pair_instances(prepared)
    }

    fn digest(&self, _instance: &Instance) -> String {
        "Text".to_owned()
    }

    fn batch(&self, device: &Device, config: &ModelConfig, instances: &[&Instance], number: u32) -> TrainResult<Batch> {
        pair_batch(device, config, instances, number)
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        Ok(Box::new(TokenLoss::new(device, part)?))
    }

    fn reading(&self, recipe: &FineTuneRecipe, _train: &Set, reading: TrainedReading) -> TrainedReading {
        TrainedReading { max_target: Some(recipe.target_length()), pairs: None, ..reading }
    }

    fn label_names(&self, _train: &Set) -> Vec<String> {
        Vec::new()
    }

    fn predict_set(
        &self,
        models: &[henson_infer::Model],
        set: &Set,
        settings: &PredictSettings,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Prediction>, TaskError> {
        write::predict_set(models, set, settings, each)
    }

    /// Every source counts once, with the references of all rows that have it.
    fn check(&self, recipe: &FineTuneRecipe, _model: &Path) -> Result<(), TaskError> {
        check_trains(recipe)
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let (mut scores, mut mistakes) = (TextScores::default(), Vec::new());
        let sources = by_source(set)?;
        for (first, references) in &sources {
            let (example, Prediction::Text(text)) = (&set.examples[*first], &predictions[*first]) else {
                return Err(wrong_kind(set, &set.examples[*first]));
            };
            let chrf = scores.add(text, references);
            if !references.iter().any(|reference| reference.trim() == text.trim()) {
                let expected = references.first().map_or(String::new(), |reference| (*reference).to_owned());
                mistakes.push(mistake(example, expected, text.clone(), 1.0 - chrf / 100.0));
            }
        }
        Ok(Score {
            metrics: scores.metrics(),
            signatures: scores.signatures(),
            sources: Some(sources.len()),
            mistakes,
            ..Score::default()
        })
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        let lines = set.examples.iter().zip(predictions).map(|(example, prediction)| match prediction {
            Prediction::Text(text) => Ok(text.split(['\n', '\r']).collect::<Vec<_>>().join(" ") + "\n"),
            _ => Err(wrong_kind(set, example)),
        });
        let mut files = vec![(LINES.to_owned(), lines.collect::<Result<String, _>>()?.into_bytes())];
        files.extend(predictions::json_lines(set, predictions)?);
        Ok(files)
    }

    /// A text a line, for each row or for each source; or a table of ids and predictions.
    fn read_predictions(&self, path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
        let is_text = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".txt"));
        if TableFormat::of(path).is_some() && !is_text {
            return predictions::read_rows(path, set);
        }
        let mut texts = Vec::new();
        let mut lines = Lines::open(path)?;
        while let Some(line) = lines.next_text(LONGEST_LINE)? {
            texts.push(line.to_owned());
        }
        let sources = by_source(set)?;
        if texts.len() == sources.len() && texts.len() < set.examples.len() {
            let mut predictions = vec![Prediction::None; set.examples.len()];
            for ((first, _), text) in sources.iter().zip(texts) {
                predictions[*first] = Prediction::Text(text);
            }
            return Ok(predictions);
        }
        if texts.len() != set.examples.len() {
            let problem = format!(
                "it has {} lines, expected one for each of {} rows or of {} different sources",
                texts.len(),
                set.examples.len(),
                sources.len()
            );
            return Err(TaskError::mismatch(path, problem));
        }
        Ok(texts.into_iter().map(Prediction::Text).collect())
    }

    fn prediction(&self, _set: &mut Set, found: &Found) -> Result<Prediction, String> {
        Ok(Prediction::Text(text(&found.value)?.unwrap_or_default()))
    }
}

/// Refuses what would leave a model that writes as it was.
pub(super) fn check_trains(recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    if !recipe.freeze {
        return Ok(());
    }
    Err(TrainError::setting("freeze", "true", "false: a model that writes has no layer of its own for a task").into())
}

/// A file with a text a line.
const LINES: &str = "predictions.txt";

/// The longest line of such a file.
const LONGEST_LINE: usize = 16 << 20;

/// The names that columns usually have.
const SOURCES: &[&str] = &["source", "src", "input", "text", "document", "article", "mr", "word"];
const TARGETS: &[&str] =
    &["target", "targets", "tgt", "output", "summary", "translation", "reference", "references", "ref", "phones"];

/// The source of a row behind the prefix. A list of sentences is one text.
fn source(path: &Path, collector: &Collector<'_>, row: &Row) -> Result<String, TaskError> {
    let files = &collector.reading.files;
    let role = Role { what: "the source", flag: "--source-column", names: SOURCES };
    let nameless = Column::Number(0);
    let user = files.text_column.as_ref().or_else(|| is_nameless(row).then_some(&nameless));
    let (column, value) = need(path, row, user, &role, None)?;
    let wrong = |problem: String| TaskError::row(path, place(path, row), format!("column {column}: {problem}"));
    let text = match value {
        Value::Array(_) => texts(value).map_err(wrong)?.join(" "),
        other => text(other).map_err(wrong)?.unwrap_or_default(),
    };
    match text.trim().is_empty() {
        true => Err(wrong("the source is empty".to_owned())),
        false => Ok(format!("{}{text}", collector.reading.prefix)),
    }
}

/// The references of a row: one or several columns, each a text or a list of texts. Of a table without names, all columns but the
/// first; one that is empty there only fills the row up.
fn targets(path: &Path, collector: &Collector<'_>, row: &Row) -> Result<Target, TaskError> {
    let files = &collector.reading.files;
    let by_number = || (1..row.width()).map(Column::Number).collect();
    let usual = || find(row, None, TARGETS, None).map(|(column, _)| column).into_iter().collect();
    let columns: Vec<Column> = match &files.label_column[..] {
        [] if is_nameless(row) && files.text_column.is_none() => by_number(),
        [] => usual(),
        several => several.to_vec(),
    };
    let mut references = Vec::new();
    for column in &columns {
        let role = Role { what: "the target", flag: "--target-column", names: &[] };
        let (_, value) = need(path, row, Some(column), &role, None)?;
        let wrong = |problem: String| TaskError::row(path, place(path, row), format!("column {column}: {problem}"));
        let found = match value {
            Value::Array(_) => texts(value).map_err(wrong)?,
            other => text(other).map_err(wrong)?.into_iter().collect(),
        };
        references.extend(found.into_iter().filter(|text| !text.trim().is_empty()));
    }
    match (columns.first(), references.is_empty()) {
        (Some(column), true) => {
            Err(TaskError::row(path, place(path, row), format!("column {column}: the target is empty")))
        }
        (_, true) => Ok(Target::None),
        (_, false) => Ok(Target::Texts(references)),
    }
}

fn is_nameless(row: &Row) -> bool {
    row.names().is_empty() && !row.is_object()
}

/// The number of the first row with each source, and the references of all of them.
fn by_source(set: &Set) -> Result<Vec<(usize, Vec<&str>)>, TaskError> {
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut sources: Vec<(usize, Vec<&str>)> = Vec::new();
    for (row, example) in set.examples.iter().enumerate() {
        let (Input::One(source), Target::Texts(references)) = (&example.input, &example.target) else {
            return Err(wrong_kind(set, example));
        };
        let number = *numbers.entry(source).or_insert(sources.len());
        if number == sources.len() {
            sources.push((row, Vec::new()));
        }
        sources[number].1.extend(references.iter().map(String::as_str));
    }
    Ok(sources)
}

/// A source and its targets as tokens: as the tokenizer surrounds any text, and the targets with the model's end token.
pub(super) fn lay_out_pair(
    tokenizer: &Tokenizer,
    source: &str,
    targets: &[String],
    lengths: &Lengths,
) -> Result<Prepared, TextError> {
    let template = tokenizer.template();
    let source = source_from(template, &tokenizer.encode(source)?, lengths)?;
    let (mut written, mut dropped) = (Vec::with_capacity(targets.len()), 0);
    for target in targets {
        let (ids, lost) = target_from(template, &tokenizer.encode(target)?, lengths)?;
        dropped += lost;
        written.push(ids);
    }
    Ok(Prepared::Written(source, written, dropped))
}

/// A source as the model reads it; one that is continued ends like a text.
pub(crate) fn source_from(template: &Template, pieces: &Pieces, lengths: &Lengths) -> Result<Features, TextError> {
    let mut features = template.single(pieces, lengths.most)?;
    if lengths.continues {
        end_with(&mut features, lengths.end, lengths.most);
    }
    Ok(features)
}

/// Puts a token at the end of a sequence that does not end so, and cuts it where that is too much.
fn end_with(features: &mut Features, end: Option<u32>, most: usize) {
    // A tokenizer that ends no text.
    let Some(end) = end.filter(|end| features.ids.last() != Some(end)) else { return };
    let kept = features.len().min(most.saturating_sub(1));
    features.dropped += features.len() - kept;
    features.ids.truncate(kept);
    features.segments.truncate(kept);
    features.offsets.truncate(kept);
    features.first.end = features.first.end.min(kept);
    features.ids.push(end);
    features.segments.push(0);
    features.offsets.push(None);
}

/// A target as the model shall write it, and how many tokens were cut off.
pub(crate) fn target_from(
    template: &Template,
    pieces: &Pieces,
    lengths: &Lengths,
) -> Result<(Vec<u32>, usize), TextError> {
    let mut features = template.single(pieces, lengths.target)?;
    end_with(&mut features, lengths.end, lengths.target);
    Ok((features.ids, features.dropped))
}

/// An instance for each target.
pub(super) fn pair_instances(prepared: Prepared) -> Vec<Instance> {
    let Prepared::Written(source, targets, _) = prepared else { return Vec::new() };
    targets.into_iter().map(|target| Instance::pair(&source, target)).collect()
}

/// Sources, and targets that the decoder reads a token behind.
pub(super) fn pair_batch(
    device: &Device,
    config: &ModelConfig,
    instances: &[&Instance],
    number: u32,
) -> TrainResult<Batch> {
    let mut sources = Vec::with_capacity(instances.len());
    let mut targets: Vec<&[u32]> = Vec::with_capacity(instances.len());
    for instance in instances {
        let [(ids, segments), (target, _)] = &instance.sequences[..] else {
            return Err(InputError::Targets { sources: instances.len(), targets: targets.len() }.into());
        };
        sources.push(Sequence { ids, segments });
        targets.push(target);
    }
    Ok(Batch::pairs(device, config, &sources, &targets, number)?)
}

/// The rows of a network's output that predict the tokens of targets: all of an encoder-decoder's; of one that continues sources, those
/// from the last token of each on. `lengths` are those of sources and targets.
pub(crate) fn rows_of_targets(head: Head, tokens: usize, lengths: impl Iterator<Item = (usize, usize)>) -> Vec<u32> {
    if head == Head::Seq2Seq {
        return (0..tokens as u32).collect();
    }
    let (mut rows, mut start) = (Vec::with_capacity(tokens), 0);
    for (source, target) in lengths {
        let first = start + source as u32 - 1;
        rows.extend(first..first + target as u32);
        start = first + target as u32;
    }
    rows
}

/// The next token at some rows, or at every place of all targets.
pub(crate) struct TokenLoss {
    rows: Tensor,
    targets: Tensor,
    weights: Tensor,
    smoothing: f32,
}

impl TokenLoss {
    pub(crate) fn new(device: &Device, part: &Part<'_>) -> TrainResult<Self> {
        let (mut targets, mut weights) = part.labels();
        let length = |instance: &Instance, i: usize| instance.sequences.get(i).map_or(0, |(ids, _)| ids.len());
        let lengths = part.instances.iter().map(|instance| (length(instance, 0), length(instance, 1)));
        let rows = rows_of_targets(part.head, part.tokens, lengths);
        // What fills the batch up, if anything.
        targets.resize(rows.len(), 0);
        weights.resize(rows.len(), 0.0);
        Self::at(device, (&rows, &targets, &weights), part.smoothing)
    }

    /// At these rows, with what each counts.
    pub(crate) fn at(
        device: &Device,
        (rows, targets, weights): (&[u32], &[u32], &[f32]),
        smoothing: f32,
    ) -> TrainResult<Self> {
        Ok(Self {
            rows: Tensor::from_slice(device, [rows.len()], rows)?,
            targets: Tensor::from_slice(device, [rows.len()], targets)?,
            weights: Tensor::from_slice(device, [rows.len()], weights)?,
            smoothing,
        })
    }
}

impl Loss for TokenLoss {
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let logits = model.logits_of(pass, last, layout, Some(&self.rows))?;
        let classes = model.config().sizes().vocab_size;
        let weights = Some(&self.weights);
        let (targets, smoothing) = (&self.targets, self.smoothing);
        Ok(vec![pass.smoothed_cross_entropy(logits, classes, targets, weights, smoothing, 1.0)?.0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_text::WordUnit;

    /// A tokenizer that ends no text: the end is put there, within the length, of sources only where they are continued.
    #[test]
    fn sources_and_targets_end_as_they_shall() {
        let tokenizer = Tokenizer::of_words(["a", "b", "c", "</s>"], false, WordUnit::Words).unwrap();
        let (template, end) = (tokenizer.template(), tokenizer.id("</s>"));
        let pieces = tokenizer.encode("a b c").unwrap();
        let read = |most: usize, continues: bool| {
            let lengths = Lengths { end, continues, target: most, ..Lengths::new(most) };
            let source = source_from(template, &pieces, &lengths).unwrap();
            assert_eq!((source.ids.len(), source.segments.len()), (source.offsets.len(), source.offsets.len()));
            (source.ids, source.dropped, target_from(template, &pieces, &lengths).unwrap())
        };
        assert_eq!(read(4, true), (vec![2, 3, 4, 5], 0, (vec![2, 3, 4, 5], 0)));
        assert_eq!(read(3, true), (vec![2, 3, 5], 1, (vec![2, 3, 5], 1)));
        assert_eq!(read(2, true), (vec![2, 5], 2, (vec![2, 5], 2)));
        assert_eq!(read(4, false).0, [2, 3, 4]);
    }

    /// What predicts the first token of a target is the last of its source, and a target's last token is never read.
    #[test]
    fn targets_are_predicted_from_the_end_of_sources_on() {
        let lengths = [(3, 2), (1, 1), (2, 3)];
        assert_eq!(rows_of_targets(Head::MaskedLm, 9, lengths.into_iter()), [2, 3, 4, 6, 7, 8]);
        assert_eq!(rows_of_targets(Head::Seq2Seq, 4, lengths.into_iter()), [0, 1, 2, 3]);
    }
}
