//! The losses of BERT's pre-training and of its heads. Each is scale·Σ over its predictions; the scale is one over their
//! number in the whole step (or 1e-5 more, as in Google's code), which the caller knows.
//!
//! Legend: B sequences, T tokens, P predicted tokens.

use std::hash::Hash;
use std::ops::Range;

use henson_models::{Batch, Capture, Model, ModelConfig};
use henson_tensor::{Device, Layout, Pass, Result, Tensor, TensorError, Var};

use crate::losses::LossNames;

/// What is learned from the parts of a batch: their inputs on the device, then losses by name, whose sum is trained.
///
/// An objective is all that its losses read from the host beside their inputs, and so the key of a recorded pass: plain numbers
/// ([`henson_tensor::Bits`]), never what differs from step to step if that can be an input.
pub trait Objective: Hash + Copy + 'static {
    /// A part of a batch as it was read.
    type Part<'p>: Copy;
    /// The same on the device.
    type Inputs;

    /// The names of its losses.
    fn names(&self) -> LossNames;

    /// Puts a part on the device.
    fn inputs(&self, device: &Device, config: &ModelConfig, part: Self::Part<'_>) -> crate::Result<Self::Inputs>;

    /// The losses, in the order of their names.
    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &Self::Inputs) -> crate::Result<Vec<Tensor>>;
}

/// What masked-LM pre-training predicts in a batch.
#[derive(Clone, Debug)]
pub struct Masked {
    /// P rows of the flat batch.
    pub rows: Tensor,
    /// P piece ids that stood there.
    pub targets: Tensor,
    /// P factors on their losses, where they differ.
    pub weights: Option<Tensor>,
}

impl Masked {
    /// Puts rows and targets on the device, each with this weight, filled up to what the device wants with such that count
    /// nothing. Where there is none, the first row counts nothing.
    pub fn new(device: &Device, rows: &[u32], targets: &[u32], weight: f32) -> Result<Self> {
        let (mut rows, mut targets) = (rows.to_vec(), targets.to_vec());
        let mut weights = vec![weight; rows.len()];
        if rows.is_empty() {
            (rows, targets, weights) = (vec![0], vec![0], vec![0.0]);
        }
        let rounded = device.rounded(rows.len());
        rows.resize(rounded, Device::NOWHERE);
        targets.resize(rounded, 0);
        weights.resize(rounded, 0.0);
        Ok(Self {
            rows: Tensor::from_slice(device, [rounded], &rows)?,
            targets: Tensor::from_slice(device, [rounded], &targets)?,
            weights: Some(Tensor::from_slice(device, [rounded], &weights)?),
        })
    }
}

/// The two losses of BERT's pre-training; their plain sum is trained.
#[derive(Debug)]
pub struct PreTrainingLoss {
    /// Masked LM.
    pub masked: Tensor,
    /// Next sentence, where there are labels for it.
    pub next_sentence: Option<Tensor>,
}

/// One over the number of predictions of a whole step.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// For masked tokens.
    pub masked: f32,
    /// For sequences.
    pub sequence: f32,
}

/// Masked LM, and next sentence (label 0 next, 1 random) where labels are given.
pub fn pre_training(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    masked: &Masked,
    next_sentence: Option<&Tensor>,
    scales: Scales,
) -> Result<PreTrainingLoss> {
    smoothed_pre_training(model, pass, batch, masked, next_sentence, scales, 0.0)
}

/// The same with label smoothing of tokens: a share of each target is spread evenly over the vocabulary, as in PyTorch.
pub(crate) fn smoothed_pre_training(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    masked: &Masked,
    next_sentence: Option<&Tensor>,
    scales: Scales,
    smoothing: f32,
) -> Result<PreTrainingLoss> {
    let last = model.encode(pass, batch, Capture::default())?.last;
    let next_sentence = match next_sentence {
        Some(labels) => {
            let logits = model.logits_of(pass, last.clone(), &batch.layout, None)?;
            Some(pass.cross_entropy(logits, 2, labels, None, scales.sequence)?.0)
        }
        None => None,
    };
    let logits = model.logits_of(pass, last, &batch.layout, Some(&masked.rows))?;
    let (vocabulary, weights) = (model.config().sizes().vocab_size, masked.weights.as_ref());
    let (masked, _) =
        pass.smoothed_cross_entropy(logits, vocabulary, &masked.targets, weights, smoothing, scales.masked)?;
    Ok(PreTrainingLoss { masked, next_sentence })
}

/// What the logits of a task's head are held against.
#[derive(Clone, Debug)]
pub enum Targets {
    /// Class numbers of sequences or tokens, with a weight each on request; 0 leaves one out. Of multiple choice, where a sequence
    /// has one logit, which of an example's sequences.
    Classes(Tensor, Option<Tensor>),
    /// B numbers to come close to.
    Numbers(Tensor),
    /// B×labels of 0 or 1, with a weight each on request.
    Several(Tensor, Option<Tensor>),
    /// The first and last token of each answer within its sequence (B×2), with weights (B×2); 0 leaves one out.
    Spans(Tensor, Tensor),
}

impl Targets {
    /// The loss of a head's logits.
    pub fn loss(&self, pass: &mut Pass<'_>, mut logits: Var, layout: &Layout, scale: f32) -> Result<Tensor> {
        match self {
            Self::Classes(labels, weights) => {
                if logits.tensor().columns() == 1 {
                    let (examples, all) = (labels.shape().elements(), logits.tensor().shape().elements());
                    logits = logits.reshape([examples, all / examples.max(1)])?;
                }
                let classes = logits.tensor().columns();
                Ok(pass.cross_entropy(logits, classes, labels, weights.as_ref(), scale)?.0)
            }
            Self::Numbers(numbers) => pass.squared_error(logits, numbers, scale),
            Self::Several(targets, weights) => pass.binary_cross_entropy(logits, targets, weights.as_ref(), scale),
            Self::Spans(targets, weights) => pass.span_cross_entropy(logits, layout, targets, weights, scale),
        }
    }
}

/// A window on a passage, and the answer in it: places within its sequence.
#[derive(Clone, Debug)]
pub struct AnswerWindow {
    /// Where an answer may start and end.
    pub shown: Range<usize>,
    /// The classification token, where the window points to that has no answer.
    pub null: usize,
    /// The first and the last token of the answer, both `null` where there is none.
    pub answer: [usize; 2],
}

impl AnswerWindow {
    /// All places that compete, in order.
    fn places(&self) -> Vec<usize> {
        let mut places: Vec<usize> = self.shown.clone().chain([self.null]).collect();
        places.sort_unstable();
        places.dedup();
        places
    }
}

/// What a [`Head::BeamSpan`](henson_models::Head::BeamSpan) is held against. Tokens that no answer can start or end at are left
/// out, which is the same as logits of −∞.
#[derive(Clone, Debug)]
pub struct BeamTargets {
    /// N rows of the flat batch.
    rows: Tensor,
    /// How they are divided into B sequences.
    layout: Layout,
    /// 2N: each of the rows, and that of its sequence's right start.
    ends: Tensor,
    /// B×2: first and last token among the rows of the sequence, and what they count.
    answers: Tensor,
    weights: Tensor,
    /// 2B: the row of the start, and that of the classification token.
    starts: Tensor,
    /// B: 1 where there is no answer, and what that counts.
    impossible: [Tensor; 2],
}

impl BeamTargets {
    /// Puts the windows of a batch on the device. `scale` is one over twice the number of windows in the whole step: start and end
    /// are averaged, and whether there is an answer counts half, as in the authors' code.
    pub fn new(device: &Device, layout: &Layout, windows: &[AnswerWindow], scale: f32) -> Result<Self> {
        let (mut rows, mut lengths, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let (mut answers, mut starts, mut impossible) = (Vec::new(), Vec::new(), Vec::new());
        for (window, first) in windows.iter().zip(layout.offsets()) {
            let places = window.places();
            let row = |place: usize| first + place as u32;
            let among = |place: &usize| places.binary_search(place).map_err(|_| outside(*place, &places));
            answers.extend([among(&window.answer[0])? as u32, among(&window.answer[1])? as u32]);
            ends.extend(places.iter().flat_map(|place| [row(*place), row(window.answer[0])]));
            starts.extend([row(window.answer[0]), row(window.null)]);
            impossible.push(f32::from(u8::from(window.answer[0] == window.null)));
            lengths.push(places.len());
            rows.extend(places.into_iter().map(row));
        }
        let b = lengths.len();
        Ok(Self {
            rows: Tensor::from_slice(device, [rows.len()], &rows)?,
            layout: Layout::new(device, &lengths, 0)?,
            ends: Tensor::from_slice(device, [ends.len()], &ends)?,
            answers: Tensor::from_slice(device, [b, 2], &answers)?,
            weights: Tensor::from_slice(device, [b, 2], &vec![scale; 2 * b])?,
            starts: Tensor::from_slice(device, [starts.len()], &starts)?,
            impossible: [
                Tensor::from_slice(device, [b], &impossible)?,
                Tensor::from_slice(device, [b], &vec![scale; b])?,
            ],
        })
    }

    /// The losses of starts and ends together, and of whether there is an answer.
    pub fn losses(&self, model: &Model, pass: &mut Pass<'_>, last: &Var) -> Result<[Tensor; 2]> {
        let why = "the model has no head for answers whose end depends on their start";
        let head = model.beams().ok_or(TensorError::Unsupported { operation: "beams", why })?;
        let start = head.start_logits(pass, last, &self.rows)?;
        let end = head.end_logits(pass, last, &self.ends)?;
        let logits = pass.beside(&start, &end)?;
        let spans = pass.span_cross_entropy(logits, &self.layout, &self.answers, &self.weights, 1.0)?;
        let logits = head.no_answer_logits(pass, last, &self.starts)?;
        let [impossible, weights] = &self.impossible;
        Ok([spans, pass.binary_cross_entropy(logits, impossible, Some(weights), 1.0)?])
    }
}

fn outside(place: usize, places: &[usize]) -> TensorError {
    TensorError::Index {
        operation: "beams",
        what: "answer",
        index: place,
        end: places.last().map_or(0, |last| last + 1),
    }
}
