//! Learning from the vectors of texts by losses that are computed on the host ([`crate::sentences`]): the encoder gives the vectors, the
//! loss their gradient, and the backward pass goes on from there.
//!
//! With cached gradients (Gao et al. 2021) a batch is encoded twice, part by part: first for its vectors alone, of which the loss and its
//! gradient follow for the whole batch; then, part by part, with that gradient. Dropout is a function of a sequence's number in the
//! batch, so that both times the vectors are the same, and those of the undivided batch.
//!
//! Legend: N sequences, H numbers of a vector.

use henson_infer::Pooling;
use henson_models::{Batch, Capture, Sequence};
use henson_tensor::{Builder, Device, Group, Init, Param, Pass, Reading, Tensor, Var};
use henson_train::{EQUAL, Engine, LossNames, LossWeights, Result};

use super::learner::numbered;
use super::lists::ListObjective;
use super::pooled::Pooled;
use super::taught::TaughtObjective;
use crate::forms::not_asked_for;
use crate::prepare::Instance;
use crate::sentences::{Found, PairHead, SentenceLoss, VectorLoss, VectorTargets};

/// The layer on pairs: its name in checkpoints of a run. No model has it.
const PAIR_HEAD: &str = "pair_classifier.weight";

/// The standard deviation of its first weights.
const SPREAD: f32 = 0.02;

/// What is learned by losses that are computed on the host.
#[derive(Clone, Debug)]
pub enum HostObjective {
    /// From the vectors of texts.
    Vectors(VectorObjective),
    /// From the logits of a query's documents.
    Lists(ListObjective),
    /// From teachers.
    Taught(TaughtObjective),
}

impl HostObjective {
    /// Whether the parts of a batch are encoded twice, and told apart together.
    pub(crate) fn is_cached(&self) -> bool {
        matches!(self, Self::Vectors(VectorObjective { cached: true, .. }))
    }

    /// Adds the gradients of a step's passes; gives the loss of each.
    pub(crate) fn learn(
        &self,
        engine: &mut Engine,
        step: u64,
        passes: Vec<Vec<&Instance>>,
        divided: usize,
    ) -> Result<Vec<Reading>> {
        match self {
            Self::Vectors(objective) => objective.learn(engine, step, &passes, divided),
            Self::Lists(objective) => objective.learn(engine, step, &numbered(passes), divided),
            Self::Taught(objective) => objective.learn(engine, step, &numbered(passes), divided),
        }
    }

    /// Whether its loss is a sum over examples, so that ranks can share a batch.
    pub(crate) fn is_a_sum(&self) -> bool {
        !matches!(self, Self::Vectors(_))
    }

    /// The names of its losses, and what they are multiplied with.
    pub(crate) fn names(&self) -> (LossNames, LossWeights) {
        match self {
            Self::Taught(objective) => (objective.names(), objective.weights()),
            _ => (&[], EQUAL),
        }
    }

    /// Lays out what it needs and no model has; `width` is that of the hidden states, `number` that of its data set.
    pub(crate) fn build(&mut self, builder: &mut Builder, width: usize, number: usize) {
        match self {
            Self::Vectors(objective) => objective.build(builder, width, number),
            Self::Taught(objective) => objective.build(builder, width),
            Self::Lists(_) => {}
        }
    }
}

/// What is learned from vectors.
#[derive(Clone, Debug)]
pub struct VectorObjective {
    pub(crate) loss: VectorLoss,
    /// How tokens' vectors become one.
    pub(crate) poolings: Vec<Pooling>,
    /// Classes of the layer on pairs; 0: there is none.
    pub(crate) classes: usize,
    /// Whether the parts of a batch are encoded twice.
    pub(crate) cached: bool,
    /// The layer on pairs, once it is laid out.
    pub(crate) head: Option<Param>,
}

impl VectorObjective {
    /// Lays out what it needs and no model has; `number` is that of its data set.
    pub(crate) fn build(&mut self, b: &mut Builder, width: usize, number: usize) {
        if self.classes > 0 {
            let columns = 3 * self.poolings.len() * width + 1;
            let name = if number == 0 { PAIR_HEAD.to_owned() } else { format!("pair_classifier.{number}.weight") };
            let build = |b: &mut Builder| b.matrix(&name, self.classes, columns, Init::Normal(SPREAD));
            self.head = Some(b.group(Group::Objective, build));
        }
    }

    /// Adds the gradients of a step, whose parts are each told apart in themselves; gives the loss of each.
    pub(crate) fn learn(
        &self,
        engine: &mut Engine,
        step: u64,
        parts: &[Vec<&Instance>],
        divided: usize,
    ) -> Result<Vec<Reading>> {
        let all: usize = parts.iter().map(Vec::len).sum();
        let mut number = 0;
        engine.in_parts(step, parts.len(), |engine, i| {
            let part = &parts[i];
            let (sequences, targets) = self.targets(part);
            let share = part.len() as f64 / all.max(1) as f64;
            let loss = match self.cached && divided > 1 {
                true => self.learn_cached(engine, step, &sequences, &targets, divided)?,
                false => self.learn_at_once(engine, step, (&sequences, number), &targets, share)?,
            };
            number += sequences.len() as u32;
            let device = engine.parameters.device().clone();
            Ok(vec![device.read_later(&[&Tensor::from_slice(&device, [1], &[loss as f32])?])?])
        })
    }

    /// The sequences of a part in the order that the loss knows, and what their vectors are held against.
    fn targets<'a>(&self, part: &[&'a Instance]) -> (Vec<Sequence<'a>>, VectorTargets) {
        let columns = if part.iter().all(|instance| instance.sequences.len() > 1) { 2 } else { 1 };
        let most = part.iter().map(|instance| instance.sequences.len()).max().unwrap_or(0);
        let of = |place: usize| {
            part.iter().enumerate().filter_map(move |(i, instance)| Some((i, instance.sequences.get(place)?)))
        };
        let mut sequences: Vec<Sequence<'a>> = Vec::new();
        let (mut owners, mut numbers) = (Vec::new(), Vec::new());
        for place in 0..most {
            for (i, (ids, segments)) in of(place) {
                sequences.push(Sequence { ids, segments });
                if place >= 2 {
                    owners.push(i);
                    if self.loss.loss == SentenceLoss::MarginMse {
                        numbers.push(part[i].numbers.get(place - 2).copied().unwrap_or(f32::NAN));
                    }
                }
            }
        }
        match self.loss.loss {
            SentenceLoss::MarginMse => {}
            SentenceLoss::Softmax => {
                numbers = part.iter().map(|i| i.labels.first().copied().flatten().unwrap_or(0) as f32).collect();
            }
            _ => numbers = part.iter().flat_map(|instance| &instance.numbers).copied().collect(),
        }
        let never = match self.loss.loss {
            SentenceLoss::Ranking => not_asked_for(&sequences, part.len(), sequences.len()),
            _ => Vec::new(),
        };
        (sequences, VectorTargets { examples: part.len(), columns, owners, numbers, never })
    }

    /// Vectors, loss and gradients in one pass.
    fn learn_at_once(
        &self,
        engine: &mut Engine,
        step: u64,
        (sequences, number): (&[Sequence<'_>], u32),
        targets: &VectorTargets,
        share: f64,
    ) -> Result<f64> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device = parameters.device().clone();
        let batch = Batch::new(&device, model.config(), sequences, number)?;
        let mut pass = Pass::training(tape, parameters, training);
        let last = model.encode(&mut pass, &batch, Capture::default())?.last;
        let pooled = Pooled::new(&mut pass, &last, &batch.layout, &self.poolings)?;
        let table: Option<Var> = self.head.map(|head| pass.table(head));
        let weights = table.as_ref().map(|table| table.tensor().to_f32()).transpose()?.unwrap_or_default();
        let head = PairHead { classes: self.classes, weights: &weights };
        let Found { loss, gradient, head: of_head } =
            self.loss.of(&pooled.vectors()?, pooled.width(), targets, head, share);
        pooled.seed(&mut pass, &gradient)?;
        if let Some(table) = &table {
            pass.seed_gradient(table, &of_head)?;
        }
        pass.backward(gradients)?;
        Ok(loss)
    }

    /// The same for a batch that does not fit into memory at once, in so many parts of it.
    fn learn_cached(
        &self,
        engine: &mut Engine,
        step: u64,
        sequences: &[Sequence<'_>],
        targets: &VectorTargets,
        divided: usize,
    ) -> Result<f64> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device: Device = parameters.device().clone();
        let part = sequences.len().div_ceil(divided.max(1)).max(1);
        let (mut vectors, mut width) = (Vec::new(), 1);
        for (i, some) in sequences.chunks(part).enumerate() {
            let batch = Batch::new(&device, model.config(), some, (i * part) as u32)?;
            // A training pass for its dropout; its tape is not used.
            let mut pass = Pass::training(tape, parameters, training);
            let last = model.encode(&mut pass, &batch, Capture::default())?.last;
            let of_part = Pooled::new(&mut pass, &last, &batch.layout, &self.poolings)?;
            width = of_part.width();
            vectors.extend(of_part.vectors()?);
        }
        let none = PairHead { classes: 0, weights: &[] };
        let Found { loss, gradient, .. } = self.loss.of(&vectors, width, targets, none, 1.0);
        for (i, some) in sequences.chunks(part).enumerate() {
            let batch = Batch::new(&device, model.config(), some, (i * part) as u32)?;
            let mut pass = Pass::training(tape, parameters, training);
            let last = model.encode(&mut pass, &batch, Capture::default())?.last;
            let of_part = Pooled::new(&mut pass, &last, &batch.layout, &self.poolings)?;
            of_part.seed(&mut pass, &gradient[i * part * width..][..some.len() * width])?;
            pass.backward(gradients)?;
        }
        Ok(loss)
    }
}
