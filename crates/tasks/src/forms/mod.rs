//! The forms of tasks, a file each: how examples are read and laid out, what is learned from them and by which loss, what logits
//! say, how that is scored, and the files and words about it. [`crate::TASKS`] lists which task has which form.
//!
//! Nothing outside of this directory asks which form it has.

mod answer;
mod choose;
mod classify;
mod cloze;
mod embed;
mod embed_rows;
mod judge;
mod multilabel;
mod rank;
mod regress;
mod seq2seq;
mod span;
mod tag;
mod teach;
mod text_to_text;

use std::fmt::Debug;
use std::ops::{ControlFlow, Deref, Range};
use std::path::Path;

use henson_checkpoint::TrainedReading;
use henson_infer::{Problem, both_orders, join_windows, sum_orders, text_windows};
use henson_models::{Batch, Head, Model, ModelConfig, Sequence};
use henson_tensor::{Device, Layout, Pass, Tensor, Var};
use henson_text::{TextError, Tokenizer};
use henson_train::objective::Targets;
use henson_train::{ModelFiles, Result as TrainResult};

use crate::distil::Lesson;
use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target};
use crate::finetune::{FineTuneRecipe, HostObjective};
use crate::predict::{PredictSettings, predict_set};
use crate::predictions::{self, Found, Prediction};
use crate::prepare::{Instance, LayingOut, Lengths, Prepared, Scores};
use crate::read::rows::{self, Cells, Role};
use crate::read::{Collector, listed, text, texts};
use crate::score::{LabelScore, Mistake, Score, mistake};

pub(crate) use answer::ANSWER;
pub(crate) use choose::{CHOOSE, COPA};
pub(crate) use classify::{CLASSIFY, COMMITMENT, PAIR, WINOGENDER};
pub(crate) use cloze::CLOZE;
pub(crate) use embed::{EMBED, not_asked_for};
pub use embed_rows::report_twins;
pub(crate) use judge::JUDGE;
pub(crate) use multilabel::MULTILABEL;
pub(crate) use rank::RANK;
pub(crate) use regress::REGRESS;
pub(crate) use seq2seq::{ERRORS, SEQ2SEQ, TokenLoss, rows_of_targets, source_from, target_from};
pub(crate) use span::{SPAN, SPAN_PAIR};
pub(crate) use tag::{ENTITIES, WORDS, lay_out_words};
pub(crate) use teach::{Asked, Soft};
pub(crate) use text_to_text::{TEXT_CLASS, TEXT_NUMBER, TEXT_PAIR};

/// A form of task: what is known about it, and what it does.
#[derive(Debug)]
pub(crate) struct Form {
    /// The head that it takes, but for its labels.
    head: Head,
    /// What the logits of a sequence head mean; none where the head is another.
    pub(crate) problem: Option<Problem>,
    /// The fewest labels to learn from; 0 where there are no labels with names.
    pub(crate) fewest_labels: usize,
    /// Whether examples must have targets to be learned from and scored.
    pub(crate) needs_targets: bool,
    /// Whether a row has a second text.
    pub(crate) second_text: SecondText,
    /// Tokens of a sequence in training, where nothing else is said.
    pub(crate) usual_length: usize,
    /// Whether longer texts are always divided into windows.
    pub(crate) divides: bool,
    /// Whether an example cannot be divided into windows.
    pub(crate) reads_whole: bool,
    /// Whether models are averaged position by position, so that all must read the same windows.
    pub(crate) averages_positions: bool,
    /// Whether predictions are read off texts that the model writes, and not off logits.
    pub(crate) writes: bool,
    /// Whether a model that reads left to right does it as well, by continuing a source with its target.
    pub(crate) continues: bool,
    /// Whether only some rows of a file are learned from, which are picked before any limit.
    pub(crate) picks_rows: bool,
    /// Whether what is learned is a loss on the host ([`Steps::host`]), so that several data sets may each have their own.
    pub(crate) learns_on_host: bool,
    /// The scores that a model may be chosen by. Some need examples of their own.
    pub(crate) metrics: &'static [&'static str],
    /// For model cards: the library of Python that opens a model, its kind on the Hub, and its class.
    pub(crate) library: &'static str,
    pub(crate) pipeline: &'static str,
    pub(crate) class: &'static str,
    /// The command that asks a model.
    pub(crate) command: &'static str,
    steps: &'static dyn Steps,
}

/// Whether a row has a second text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecondText {
    /// It must.
    Needed,
    /// Where a column has one of the usual names.
    Usual,
    /// Where the user names its column.
    Named,
}

impl Form {
    /// A form for a text or two with a sequence head.
    const fn of_texts(problem: Problem, command: &'static str, steps: &'static dyn Steps) -> Self {
        let head = Head::Sequence { labels: 1 };
        let form = Self::new(head, "text-classification", "AutoModelForSequenceClassification", command, steps);
        Self { problem: Some(problem), ..form }
    }

    const fn new(
        head: Head,
        pipeline: &'static str,
        class: &'static str,
        command: &'static str,
        steps: &'static dyn Steps,
    ) -> Self {
        Self {
            head,
            problem: None,
            fewest_labels: 0,
            needs_targets: true,
            second_text: SecondText::Usual,
            usual_length: 128,
            divides: false,
            reads_whole: false,
            averages_positions: false,
            writes: false,
            continues: false,
            picks_rows: false,
            learns_on_host: false,
            metrics: &["accuracy"],
            library: "transformers",
            pipeline,
            class,
            command,
            steps,
        }
    }

    /// The head for so many labels.
    pub(crate) fn head(&self, labels: usize) -> Head {
        if self.fewest_labels > 0 { self.head.with_labels(labels) } else { self.head }
    }

    /// The head that a model of this kind takes: one that only continues texts has that for the next token.
    pub(crate) fn head_for(&self, model: &ModelConfig, labels: usize) -> Head {
        let head = self.head(labels);
        let continued = self.continues && model.sizes().causal && !model.family().has_head(head);
        if continued { Head::MaskedLm } else { head }
    }

    /// Whether a model with this head, for so many labels, can be asked.
    pub(crate) fn takes(&self, head: Head, labels: usize) -> bool {
        head == self.head(labels) || (self.head == Head::Span && head == Head::BeamSpan)
    }
}

impl Deref for Form {
    type Target = dyn Steps;

    fn deref(&self) -> &Self::Target {
        self.steps
    }
}

/// How the texts of some instances spell their positions, a list for each sequence.
pub(crate) fn spellings_of<'a>(instances: &[&'a Instance]) -> impl Iterator<Item = Option<&'a [Box<str>]>> {
    instances.iter().flat_map(|instance| &instance.spellings).map(Option::as_deref)
}

/// What a form does, in the order of the way that data takes. What most do, or those with one label for a text or two,
/// is the default.
pub(crate) trait Steps: Debug + Sync {
    /// Reads a file: a table, unless a form has files of its own.
    fn read(&self, path: &Path, collector: Collector<'_>) -> Result<Set, TaskError> {
        rows::read(path, collector)
    }

    /// What a row gives to read.
    fn input(&self, cells: &Cells<'_>) -> Result<Input, TaskError> {
        Ok(match cells.second_text()? {
            None => Input::One(cells.first.clone()),
            Some(second) => Input::Pair(cells.first.clone(), second),
        })
    }

    /// What a row gives to read, where it may be several things.
    fn inputs(&self, cells: &Cells<'_>) -> Result<Vec<Input>, TaskError> {
        Ok(vec![self.input(cells)?])
    }

    /// What a row says should be predicted.
    fn target(&self, _cells: &Cells<'_>, _collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        Ok(Target::None)
    }

    /// Tokens of a sequence for a model, where nothing else is said.
    fn length_of(&self, model: &henson_infer::Model) -> usize {
        model.task_length().most.unwrap_or(model.most_tokens())
    }

    /// Lays out an example; an input of another form has nothing to read.
    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        if let (Input::Pair(first, second), true) = (input, lengths.both_orders) {
            return Ok(Prepared::BothOrders(both_orders(tokenizer, first, second, lengths.most)?));
        }
        let input = match input {
            Input::One(text) => henson_infer::Input::One(text),
            Input::Pair(first, second) => henson_infer::Input::Pair(first, second),
            _ => return Ok(Prepared::Plain(Vec::new())),
        };
        Ok(Prepared::Plain(text_windows(tokenizer, input, lengths.most, lengths.windows)?.0))
    }

    /// The same with what should be written, where that is a text.
    fn lay_out_example(&self, with: &LayingOut<'_>, example: &Example) -> Result<Prepared, TextError> {
        self.lay_out(with.tokenizer, &example.input, with.lengths)
    }

    /// What there is to learn from an example; `labels` is how many there are. Nothing where its target is not known.
    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let Target::Class(class) = target else { return Vec::new() };
        prepared.apart(|_| (vec![Some(*class)], Vec::new()))
    }

    /// What teachers are followed in; none: this form is not distilled.
    fn lesson(&self) -> Option<Lesson> {
        None
    }

    /// What there is to learn from an example with a teacher, whether its target is known or not.
    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => prepared.apart(|_| (vec![None], Vec::new())),
            _ => self.instances(prepared, target, labels),
        }
    }

    /// How version 0.1 wrote down what is to be learned from an instance: a run's data is known by it.
    fn digest(&self, instance: &Instance) -> String {
        format!("Class({})", joined(&instance.labels))
    }

    /// The sequences of some instances in the order of a batch.
    fn sequences<'a>(&self, instances: &[&'a Instance]) -> Vec<Sequence<'a>> {
        let all = instances.iter().flat_map(|instance| &instance.sequences);
        all.map(|(ids, segments)| Sequence { ids, segments }).collect()
    }

    /// Puts what the model reads of a part of a batch on the device; `number` is that of its first sequence in the whole batch.
    fn batch(&self, device: &Device, config: &ModelConfig, instances: &[&Instance], number: u32) -> TrainResult<Batch> {
        let batch = Batch::new(device, config, &self.sequences(instances), number)?;
        Ok(batch.spelled(device, config, spellings_of(instances))?)
    }

    /// Puts what a part of a batch is held against on the device.
    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        class_loss(device, part.labels())
    }

    /// What is learned by losses that are computed elsewhere than on the device; none: [`Steps::loss`]. `width` is that of the hidden
    /// states.
    fn host(&self, _recipe: &FineTuneRecipe, _train: &Set, _width: usize) -> TrainResult<Option<HostObjective>> {
        Ok(None)
    }

    /// What each label counts so that all weigh the same; none where labels are not weighed.
    fn class_weights(&self, _train: &Set) -> Option<Vec<f32>> {
        None
    }

    /// Chooses what a recipe leaves to the model's directory.
    fn choose(&self, _recipe: &mut FineTuneRecipe, _model: &Path) -> Result<(), TaskError> {
        Ok(())
    }

    /// Refuses recipes that make no sense.
    fn check(&self, _recipe: &FineTuneRecipe, _model: &Path) -> Result<(), TaskError> {
        Ok(())
    }

    /// Refuses files that do not go together.
    fn check_data(&self, _train: &Set, _dev: Option<&Set>) -> Result<(), TaskError> {
        Ok(())
    }

    /// Picks the rows to learn from; `dropout` says whether the model has any.
    fn pick_rows(&self, _train: &mut Set, _recipe: &FineTuneRecipe, _dropout: bool) -> Result<(), TaskError> {
        Ok(())
    }

    /// The labels for config.json, one for each logit.
    fn label_names(&self, train: &Set) -> Vec<String> {
        meanings(train)
    }

    /// The classes that the labels of a config.json are about.
    fn class_names(&self, labels: Vec<String>) -> Vec<String> {
        labels
    }

    /// What scores of single labels may be about: labels, or kinds of entities.
    fn scored_names(&self, train: &Set) -> Vec<String> {
        meanings(train)
    }

    /// What config.json says about how texts are read, over what all forms have.
    fn reading(&self, _recipe: &FineTuneRecipe, _train: &Set, reading: TrainedReading) -> TrainedReading {
        reading
    }

    /// What else there is to know about a model of this form, for its card.
    fn note(&self) -> Option<&'static str> {
        None
    }

    /// Whether a model that was trained so can be asked about these examples; if not, what it is instead.
    fn fits(&self, _reading: Option<TrainedReading>, _set: &Set) -> Result<(), String> {
        Ok(())
    }

    /// Adds to what is saved beside the weights.
    fn add_files(
        &self,
        _files: &mut ModelFiles,
        _recipe: &FineTuneRecipe,
        _hidden_size: usize,
        _max_length: usize,
    ) -> TrainResult<()> {
        Ok(())
    }

    /// From the logits of each sequence to scores that can be averaged over models.
    fn scores(&self, problem: Option<Problem>, prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        if let Prepared::BothOrders(_) = prepared {
            let logits = sum_orders(logits.iter().cloned());
            return problem.map(|problem| vec![problem.scores(&logits)]).unwrap_or_default();
        }
        let parts = prepared.sequences().iter().zip(logits).map(|(window, logits)| (window.len(), logits.clone()));
        problem.map(|problem| vec![problem.scores(&join_windows(parts))]).unwrap_or_default()
    }

    /// Adds votes for the labels of the likeliest sequence, where a model scores labels together.
    fn vote(&self, _prepared: &Prepared, _labels: &[Vec<u32>], _scores: &mut Scores) {}

    /// What a text that the model wrote for an example says.
    fn read_written(&self, _set: &Set, _example: &Example, text: String) -> Prediction {
        Prediction::Text(text)
    }

    /// From scores to a prediction.
    fn predict(&self, said: Said<'_>) -> Prediction {
        said.class()
    }

    /// Asks models about all examples; see [`crate::predict()`].
    fn predict_set(
        &self,
        models: &[henson_infer::Model],
        set: &Set,
        settings: &PredictSettings,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Prediction>, TaskError> {
        predict_set(models, set, settings, each)
    }

    /// Scores the predictions for a set; their mistakes in any order.
    fn score(&self, set: &Set, predictions: &[Prediction], threshold: Option<f64>) -> Result<Score, TaskError>;

    /// Why a model is no better than none, if so; that it predicts the same for every example is known already.
    fn degenerate(&self, _set: &Set, _predictions: &[Prediction], _score: &Score) -> Option<String> {
        None
    }

    /// The files with predictions, the main one first.
    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        predictions::json_lines(set, predictions)
    }

    /// Reads a prediction file: a table, unless a form has files of its own.
    fn read_predictions(&self, path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
        predictions::read_rows(path, set)
    }

    /// What a row of predictions says.
    fn prediction(&self, _set: &mut Set, _found: &Found) -> Result<Prediction, String> {
        Ok(Prediction::None)
    }
}

/// What models say about an example.
pub(crate) struct Said<'a> {
    pub(crate) set: &'a Set,
    pub(crate) example: &'a Example,
    pub(crate) prepared: &'a Prepared,
    pub(crate) scores: Scores,
    /// The threshold for questions that may be without an answer.
    pub(crate) no_answer: Option<f64>,
}

impl Said<'_> {
    /// The first row of scores, for each label or choice.
    fn row(self) -> Vec<f32> {
        self.scores.into_iter().next().unwrap_or_default()
    }

    /// The label or choice with the highest score.
    fn class(self) -> Prediction {
        let scores = self.row();
        best(&scores).map_or(Prediction::None, |class| Prediction::Class { class: class as u32, scores })
    }
}

/// What a part of a batch is held against, on the device.
pub(crate) trait Loss {
    /// The losses from the last hidden states, whose sum is trained; most have one.
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>>;
}

/// Targets of a head's logits, with the factor on their loss.
impl Loss for (Targets, f32) {
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> TrainResult<Vec<Tensor>> {
        let logits = model.logits_of(pass, last, layout, None)?;
        Ok(vec![self.0.loss(pass, logits, layout, self.1)?])
    }
}

/// A part of a batch.
pub(crate) struct Part<'a> {
    pub(crate) instances: &'a [&'a Instance],
    /// What each label counts; empty: all the same.
    pub(crate) class_weights: &'a [f32],
    /// On every loss: one over what all instances of the step count.
    pub(crate) scale: f32,
    /// What cosines are divided by.
    pub(crate) temperature: f32,
    /// Tokens of the batch that the network's output is for, with those that fill it up.
    pub(crate) tokens: usize,
    /// The share of a target that is spread evenly over all classes.
    pub(crate) smoothing: f32,
    /// Whether the model scores the labels of a sequence together.
    pub(crate) together: bool,
    /// Its head.
    pub(crate) head: Head,
    /// How the tokens that the network's output is for are divided.
    pub(crate) layout: &'a Layout,
}

impl Part<'_> {
    /// All labels with what each counts; positions without one count nothing. Weights carry the scale, which differs from step
    /// to step.
    fn labels(&self) -> (Vec<u32>, Vec<f32>) {
        let labels = || self.instances.iter().flat_map(|instance| &instance.labels);
        let weights = labels().map(|label| label.map_or(0.0, |label| self.weight(label)));
        (labels().map(|label| label.unwrap_or(0)).collect(), weights.collect())
    }

    fn numbers(&self) -> Vec<f32> {
        self.instances.iter().flat_map(|instance| &instance.numbers).copied().collect()
    }

    fn weight(&self, label: u32) -> f32 {
        self.class_weights.get(label as usize).copied().unwrap_or(1.0) * self.scale
    }
}

/// A class for each row of logits.
fn class_loss(device: &Device, (classes, weights): (Vec<u32>, Vec<f32>)) -> TrainResult<Box<dyn Loss>> {
    let classes = Tensor::from_slice(device, [classes.len()], &classes)?;
    let weights = Tensor::from_slice(device, [weights.len()], &weights)?;
    Ok(Box::new((Targets::Classes(classes, Some(weights)), 1.0)))
}

/// The place of the largest, the first of equals.
fn best(row: &[f32]) -> Option<usize> {
    (0..row.len()).reduce(|best, i| if row[i] > row[best] { i } else { best })
}

/// Labels as [`Form::digest`] has them.
fn joined(labels: &[Option<u32>]) -> String {
    labels.iter().flatten().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Weights with which all labels count the same together, with a mean of 1 over the examples.
fn balanced(counts: &[usize]) -> Vec<f32> {
    let present = counts.iter().filter(|count| **count > 0).count();
    let total: usize = counts.iter().sum();
    counts.iter().map(|count| if *count > 0 { total as f32 / (present * count) as f32 } else { 1.0 }).collect()
}

/// What a set's labels mean.
fn meanings(set: &Set) -> Vec<String> {
    (0..set.labels.len()).map(|i| set.task.meaning(&set.labels, i).to_owned()).collect()
}

/// A prediction of another form.
pub(crate) fn wrong_kind(set: &Set, example: &Example) -> TaskError {
    TaskError::WrongKind { id: example.id.clone(), task: set.task.name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balanced_weights_make_labels_equal() {
        let weights = balanced(&[90, 10, 0]);
        assert!((weights[0] * 90.0 - weights[1] * 10.0).abs() < 1e-4 && weights[2] == 1.0);
        assert!((weights[0] * 90.0 + weights[1] * 10.0 - 100.0).abs() < 1e-3);
    }
}
