//! Learning from teachers and labels: the losses of [`crate::distil`] on the logits or vectors of a batch, whose gradient the backward
//! pass begins with.
//!
//! Legend: K classes, H numbers of a vector.

use std::collections::HashMap;
use std::sync::Arc;

use henson_infer::Pooling;
use henson_models::{Batch, Capture, Sequence};
use henson_tensor::{Builder, Device, Group, Init, Param, Pass, Reading, Tensor, Var};
use henson_train::{EQUAL, Engine, LossNames, LossWeights, Result, TrainError};

use super::learner::in_passes;
use super::pooled::Pooled;
use super::teaching::Teaching;
use crate::distil::{self, Lesson, Parts, Shares};
use crate::forms::{Soft, spellings_of};
use crate::prepare::Instance;
use crate::ranking::RankLoss;

/// The layer that brings vectors to the teachers' width: its name in checkpoints of a run. No model has it.
const PROJECTION: &str = "teacher_projection.weight";

/// What is learned from teachers.
#[derive(Clone, Debug)]
pub struct TaughtObjective {
    pub(crate) teaching: Arc<Teaching>,
    /// The teachers' share of the loss.
    pub(crate) alpha: f64,
    /// What each label counts; empty: all the same.
    pub(crate) class_weights: Vec<f32>,
    /// What is learned from relevances, beside the teachers' margins.
    pub(crate) rank_loss: RankLoss,
    /// How tokens' vectors become one.
    pub(crate) poolings: Vec<Pooling>,
    /// Whether vectors get the length 1.
    pub(crate) normalise: bool,
    /// The width of the teachers' vectors, where it is another than the model's; and the layer between them, once it is laid out.
    pub(crate) projection: Option<(usize, Option<Param>)>,
}

/// What teachers say about the instances of a step.
type Said = HashMap<u32, Soft>;

impl TaughtObjective {
    /// Lays out what it needs and no model has. The first weights are such that a vector's length stays as it is, on the whole.
    pub(crate) fn build(&mut self, b: &mut Builder, width: usize) {
        if let Some((outputs, layer)) = &mut self.projection {
            let (width, init) = (self.poolings.len() * width, Init::Normal((*outputs as f32).sqrt().recip()));
            *layer = Some(b.group(Group::Objective, |b| b.matrix(PROJECTION, *outputs, width, init)));
        }
    }

    /// The names of its losses.
    pub(crate) fn names(&self) -> LossNames {
        if self.alpha < 1.0 { &["teacher_loss", "label_loss"] } else { &["teacher_loss"] }
    }

    /// What they are multiplied with.
    pub(crate) fn weights(&self) -> LossWeights {
        let mut weights = EQUAL;
        weights[0] = self.alpha;
        if self.alpha < 1.0 {
            weights[1] = 1.0 - self.alpha;
        }
        weights
    }

    /// Adds the gradients of a step's passes; gives the losses of each. What they count is counted together.
    ///
    /// Teachers are asked about each pass by itself, so that what they say on a GPU does not depend on who learns the others.
    pub(crate) fn learn(
        &self,
        engine: &mut Engine,
        step: u64,
        passes: &[(Vec<&Instance>, u32)],
        parts: usize,
    ) -> Result<Vec<Reading>> {
        let device = engine.parameters.device().clone();
        let mut said: Vec<Said> = match self.counts_by_answers() {
            true => passes.iter().map(|(pass, _)| self.said(&device, pass)).collect::<Result<_>>()?,
            false => vec![Said::new(); passes.len()],
        };
        let shares = self.shares(passes, &said);
        in_passes(engine, step, passes.len(), parts, |engine, i| {
            let (pass, number) = &passes[i];
            let own = match self.counts_by_answers() {
                true => std::mem::take(&mut said[i]),
                false => self.said(&device, pass)?,
            };
            let losses = self.learn_part(engine, step, (pass, *number), &own, shares)?;
            let losses = losses.map(|loss| Tensor::from_slice(&device, [1], &[loss as f32]));
            let losses = losses.into_iter().collect::<henson_tensor::Result<Vec<_>>>()?;
            let wanted: Vec<&Tensor> = losses.iter().take(self.names().len()).collect();
            Ok(device.read_later(&wanted)?)
        })
    }

    /// What teachers say about the instances of a pass.
    fn said(&self, device: &Device, pass: &[&Instance]) -> Result<Said> {
        let mut numbers: Vec<u32> = pass.iter().map(|instance| instance.example).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let said = self.teaching.said(device, &numbers).map_err(|error| TrainError::Task(error.into()))?;
        Ok(numbers.into_iter().zip(said).collect())
    }

    /// Whether what a batch counts is known from its teachers' answers alone.
    fn counts_by_answers(&self) -> bool {
        matches!(self.teaching.lesson, Lesson::Tokens | Lesson::Margins)
    }

    /// What both kinds of targets count in a step. Of its answers only those are looked at that count.
    fn shares(&self, passes: &[(Vec<&Instance>, u32)], said: &[Said]) -> Shares {
        let (mut soft, mut hard) = (0.0, 0.0);
        let pairs = passes.iter().zip(said);
        let instances = pairs.flat_map(|((pass, _), said)| pass.iter().map(move |instance| (instance, said)));
        for (instance, said) in instances {
            let teacher = || soft_of(said, instance);
            let labels = || instance.labels.iter().flatten().map(|label| self.weight(*label)).sum::<f64>();
            let is_known = instance.numbers.iter().all(|x| !x.is_nan());
            let (of_teacher, of_labels) = match self.teaching.lesson {
                Lesson::Classes | Lesson::Choices => (1.0, labels()),
                Lesson::Several | Lesson::Number => (1.0, f64::from(u8::from(is_known))),
                Lesson::Spans => (2.0, labels()),
                Lesson::Tokens => {
                    let classes = (teacher().len() / instance.tokens().max(1)).max(1);
                    let rows = teacher().chunks_exact(classes).filter(|row| !row[0].is_nan()).count();
                    (rows as f64, labels())
                }
                Lesson::Margins => {
                    let relevance = is_known.then_some(&instance.numbers[..]);
                    let pairs = distil::margins(teacher().len(), relevance).len();
                    (pairs as f64, relevance.map_or(0.0, |relevance| self.rank_loss.count(relevance) as f64))
                }
                Lesson::Vectors => (instance.sequences.len() as f64, 0.0),
            };
            soft += of_teacher;
            hard += of_labels;
        }
        let per = |share: f64, count: f64| if count > 0.0 { share / count } else { 0.0 };
        let temperature = self.teaching.settings.temperature;
        Shares { temperature, soft: per(self.alpha, soft), hard: per(1.0 - self.alpha, hard) }
    }

    fn weight(&self, label: u32) -> f64 {
        f64::from(self.class_weights.get(label as usize).copied().unwrap_or(1.0))
    }

    fn learn_part(
        &self,
        engine: &mut Engine,
        step: u64,
        (part, number): (&[&Instance], u32),
        said: &Said,
        shares: Shares,
    ) -> Result<Parts> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device = parameters.device().clone();
        let sequences = part.iter().flat_map(|instance| &instance.sequences);
        let sequences: Vec<Sequence<'_>> = sequences.map(|(ids, segments)| Sequence { ids, segments }).collect();
        let batch = Batch::new(&device, model.config(), &sequences, number)?;
        let batch = batch.spelled(&device, model.config(), spellings_of(part))?;
        let mut pass = Pass::training(tape, parameters, training);
        let last = model.encode(&mut pass, &batch, Capture::default())?.last;
        let losses = match self.teaching.lesson {
            Lesson::Vectors => {
                let pooled = Pooled::new(&mut pass, &last, &batch.layout, &self.poolings)?;
                [self.of_vectors(&mut pass, &pooled, part, said, shares)?, 0.0]
            }
            _ => {
                let logits = model.logits_of(&mut pass, last, batch.output_layout(), None)?;
                self.of_logits(&mut pass, &logits, part, said, shares)?
            }
        };
        pass.backward(gradients)?;
        Ok(losses)
    }

    /// The loss of a part's logits, with whose gradient the backward pass begins.
    fn of_logits(
        &self,
        pass: &mut Pass<'_>,
        logits: &Var,
        part: &[&Instance],
        said: &Said,
        shares: Shares,
    ) -> Result<Parts> {
        let columns = logits.tensor().columns();
        let values = wide(&logits.tensor().to_f32()?);
        let mut gradient = vec![0.0; values.len()];
        let (mut losses, mut start) = ([0.0; 2], 0);
        for instance in part {
            let rows = match self.teaching.lesson {
                Lesson::Tokens | Lesson::Spans => instance.tokens(),
                _ => instance.sequences.len(),
            };
            let range = start..start + rows * columns;
            start = range.end;
            let teacher = soft_of(said, instance);
            let found = self.of_instance(instance, &values[range.clone()], teacher, shares, &mut gradient[range]);
            losses = sums([losses, found].into_iter());
        }
        pass.seed_gradient(logits, &narrow(&gradient))?;
        Ok(losses)
    }

    /// The loss of an instance's logits; adds to their gradient.
    fn of_instance(
        &self,
        instance: &Instance,
        logits: &[f64],
        teacher: &[f32],
        shares: Shares,
        back: &mut [f64],
    ) -> Parts {
        let labels = instance.labels.iter().map(|label| label.map(|label| (label as usize, self.weight(label))));
        let mut labels = labels.collect::<Vec<_>>().into_iter();
        let is_known = instance.numbers.iter().all(|x| !x.is_nan());
        match self.teaching.lesson {
            Lesson::Classes | Lesson::Choices => {
                distil::classes(logits, Some(teacher), labels.next().flatten(), shares, back)
            }
            Lesson::Several => {
                let weight = |(y, label): (&f32, u32)| (f64::from(*y), if *y > 0.0 { self.weight(label) } else { 1.0 });
                let targets: Vec<(f64, f64)> = instance.numbers.iter().zip(0..).map(weight).collect();
                distil::several(logits, Some(teacher), is_known.then_some(&targets), shares, back)
            }
            Lesson::Number => {
                let label = is_known.then(|| instance.number());
                distil::number(logits[0], teacher.first().copied(), label, shares, &mut back[0])
            }
            Lesson::Tokens => {
                let classes = (logits.len() / instance.tokens().max(1)).max(1);
                let rows = logits.chunks_exact(classes).zip(teacher.chunks_exact(classes));
                let rows = rows.zip(labels).zip(back.chunks_exact_mut(classes));
                sums(rows.map(|(((logits, teacher), label), back)| {
                    distil::classes(logits, Some(teacher).filter(|row| !row[0].is_nan()), label, shares, back)
                }))
            }
            Lesson::Spans => {
                // Columns of starts and ends side by side; the teacher's one after the other.
                let tokens = logits.len() / 2;
                sums((0..2).zip(labels).map(|(column, label)| {
                    let of_column: Vec<f64> = logits.iter().skip(column).step_by(2).copied().collect();
                    let mut slopes = vec![0.0; tokens];
                    let teacher = teacher.get(column * tokens..(column + 1) * tokens);
                    let found = distil::classes(&of_column, teacher, label, shares, &mut slopes);
                    back.iter_mut().skip(column).step_by(2).zip(slopes).for_each(|(back, slope)| *back += slope);
                    found
                }))
            }
            Lesson::Margins => {
                let relevance = is_known.then_some(&instance.numbers[..]);
                let pairs = distil::margins(logits.len(), relevance);
                let soft = distil::margin_mse(logits, teacher, &pairs, shares.soft, back);
                let hard = match relevance.filter(|_| shares.hard > 0.0) {
                    None => 0.0,
                    Some(relevance) => {
                        let logits: Vec<f32> = logits.iter().map(|x| *x as f32).collect();
                        let mut slopes = vec![0.0; logits.len()];
                        let loss = self.rank_loss.of(&logits, relevance, shares.hard, &mut slopes);
                        back.iter_mut().zip(slopes).for_each(|(back, slope)| *back += f64::from(slope));
                        shares.hard * loss
                    }
                };
                [soft, hard]
            }
            Lesson::Vectors => [0.0; 2],
        }
    }

    /// The loss of a part's vectors, with whose gradient the backward pass begins, and with that of the layer to the teachers' width.
    fn of_vectors(
        &self,
        pass: &mut Pass<'_>,
        pooled: &Pooled,
        part: &[&Instance],
        said: &Said,
        shares: Shares,
    ) -> Result<f64> {
        let layer: Option<Var> = self.projection.and_then(|(_, layer)| layer).map(|layer| pass.table(layer));
        let weights = layer.as_ref().map(|layer| layer.tensor().to_f32()).transpose()?.unwrap_or_default();
        let (width, values) = (pooled.width(), wide(&pooled.vectors()?));
        let mut gradient = vec![0.0; values.len()];
        let (mut of_layer, mut loss) = (vec![0.0; weights.len()], 0.0);
        let teacher_width = self.projection.map_or(width, |(width, _)| width);
        let teachers = part.iter().flat_map(|instance| soft_of(said, instance).chunks_exact(teacher_width));
        for ((vector, teacher), back) in values.chunks(width).zip(teachers).zip(gradient.chunks_mut(width)) {
            let seen = if layer.is_some() { distil::projected(&weights, vector) } else { vector.to_vec() };
            let (mut slopes, length) = (vec![0.0; seen.len()], length(&seen).filter(|_| self.normalise));
            let unit: Vec<f64> = seen.iter().map(|x| x / length.unwrap_or(1.0)).collect();
            loss += self.teaching.settings.vectors.of(&unit, teacher, shares.soft, &mut slopes);
            if let Some(length) = length {
                let along: f64 = slopes.iter().zip(&unit).map(|(slope, x)| slope * x).sum();
                slopes.iter_mut().zip(&unit).for_each(|(slope, x)| *slope = (*slope - along * x) / length);
            }
            match layer.is_some() {
                true => distil::projected_back(&weights, vector, &slopes, (back, &mut of_layer)),
                false => back.copy_from_slice(&slopes),
            }
        }
        pooled.seed(pass, &narrow(&gradient))?;
        if let Some(layer) = &layer {
            pass.seed_gradient(layer, &narrow(&of_layer))?;
        }
        Ok(loss)
    }
}

/// What teachers say about an instance.
fn soft_of<'s>(said: &'s Said, instance: &Instance) -> &'s [f32] {
    let soft = said.get(&instance.example).and_then(|soft| soft.get(instance.window as usize));
    soft.map(Vec::as_slice).unwrap_or_default()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

fn sums(parts: impl Iterator<Item = Parts>) -> Parts {
    parts.fold([0.0; 2], |sum, part| [sum[0] + part[0], sum[1] + part[1]])
}

/// The length of a vector, unless it is none.
fn length(vector: &[f64]) -> Option<f64> {
    Some(vector.iter().map(|x| x * x).sum::<f64>().sqrt()).filter(|length| *length > 0.0)
}
