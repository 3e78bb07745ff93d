//! Pre-training from a teacher that predicts masked tokens, as DistilBERT was made (Sanh et al. 2019): its distributions at a temperature,
//! the masked tokens themselves, and the direction of its last hidden states; and a student that starts from some of its layers.
//!
//! ```text
//! soft_weight·T²·KL(softmax(t/T) ‖ softmax(z/T))    mean over the masked tokens
//! mlm_weight·(−ln softmax(z) at the token)          mean over the masked tokens
//! cosine_weight·(1 − cos(h, teacher's h))           mean over all tokens
//! ```
//!
//! Losses are computed on the host, in f64, on all threads; the backward pass begins with their gradient. The teacher is asked about every
//! batch: masks differ from epoch to epoch, and its distributions over a vocabulary are more bytes than they are worth keeping.
//!
//! Legend: T tokens, P predicted tokens, V vocabulary, H hidden.

use std::path::{Path, PathBuf};

use henson_checkpoint::{Config, LoadOptions, ModelDirectory, Sums, open_parameters};
use henson_data::{Part, Step};
use henson_kernels::threads::in_threads;
use henson_models::{Capture, Head, Model, ModelConfig};
use henson_tensor::{Builder, DType, Device, Group, Parameters, Pass, Reading, Tape, Tensor};
use henson_text::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::losses::{EQUAL, LossNames, LossWeights};
use crate::pretraining::Inputs;
use crate::recipe::check_ranges;
use crate::trainer::Engine;

/// What is learned from a teacher in pre-training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherSettings {
    /// The teacher (`henson distil --teacher`): the directory of a model that predicts masked tokens, with the tokenizer of the data.
    pub teacher: String,
    /// What logits are divided by on both sides before the softmax.
    pub temperature: f64,
    /// Weight of the teacher's distributions.
    pub soft_weight: f64,
    /// Weight of the masked tokens themselves.
    pub mlm_weight: f64,
    /// Weight of the cosine of the last hidden states, which must be of the same width; 0 for none.
    pub cosine_weight: f64,
    /// The teacher's layers that those of the student start from, counted from 0; by default evenly spaced from the first to the last (0,
    /// 2, 4, 7, 9 and 11 for six of twelve) where the two have the same width and the student is a size. An empty list starts from
    /// random weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
}

impl Default for TeacherSettings {
    /// As in the paper's code.
    fn default() -> Self {
        Self {
            teacher: String::new(),
            temperature: 2.0,
            soft_weight: 5.0,
            mlm_weight: 2.0,
            cosine_weight: 1.0,
            layers: None,
        }
    }
}

impl TeacherSettings {
    pub(crate) fn check(&self) -> Result<()> {
        check_ranges(&[
            ("distil.temperature", self.temperature, 1e-2, 1e3),
            ("distil.soft_weight", self.soft_weight, 1e-6, 1e6),
            ("distil.mlm_weight", self.mlm_weight, 1e-6, 1e6),
            ("distil.cosine_weight", self.cosine_weight, 0.0, 1e6),
        ])
    }

    fn weights(&self) -> [f64; 3] {
        [self.soft_weight, self.mlm_weight, self.cosine_weight]
    }

    /// The names of the losses.
    pub(crate) fn names(&self) -> LossNames {
        let names: LossNames = &["soft_loss", "mlm_loss", "cosine_loss"];
        if self.cosine_weight > 0.0 { names } else { &names[..2] }
    }

    /// What they are multiplied with.
    pub(crate) fn loss_weights(&self) -> LossWeights {
        let mut weights = EQUAL;
        let count = self.names().len();
        weights[..count].copy_from_slice(&self.weights()[..count]);
        weights
    }
}

/// A teacher that was found and fits, not opened yet.
#[derive(Clone, Debug)]
pub(crate) struct TeacherDirectory {
    pub(crate) settings: TeacherSettings,
    path: PathBuf,
    config: ModelConfig,
    /// The teacher's layers that those of the student start from; none: it starts otherwise.
    layers: Option<Vec<usize>>,
    /// Names the teacher, to be found again when a run resumes.
    pub(crate) digest: String,
}

impl TeacherDirectory {
    /// Finds a teacher and compares it with the student's config, `is_new` where that is a size, and with the data's tokenizer.
    pub(crate) fn find(
        settings: &TeacherSettings,
        student: &ModelConfig,
        is_new: bool,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        if settings.teacher.is_empty() {
            let expected =
                "the directory of a model that predicts masked tokens: `henson distil --task mlm --teacher DIR`";
            return Err(TrainError::setting("distil.teacher", "missing", expected));
        }
        let path = PathBuf::from(&settings.teacher);
        let config = Config::from_value(ModelDirectory::open(&path)?.config()?)?.model;
        let (own, new) = (config.sizes(), student.sizes());
        let masks = config.family().has_head(Head::MaskedLm) && config.characters().is_none();
        if !masks || config.targets().is_some() || own.causal {
            let expected = format!("a model that predicts masked tokens, not a {}", config.model_type());
            return Err(TrainError::setting("distil.teacher", path.display(), expected));
        }
        check_vocabulary(&path, &config, student, tokenizer)?;
        let same = own.hidden_size == new.hidden_size;
        if settings.cosine_weight > 0.0 && !same {
            let expected = format!(
                "0, since hidden states of {} and of {} numbers have no cosine",
                new.hidden_size, own.hidden_size
            );
            return Err(TrainError::setting("distil.cosine_weight", settings.cosine_weight, expected));
        }
        let (count, most) = (new.num_hidden_layers, own.num_hidden_layers);
        let layers = match &settings.layers {
            Some(layers) if layers.is_empty() => None,
            Some(layers) => {
                if layers.len() != count || layers.iter().any(|layer| *layer >= most) || !is_new || !same {
                    let expected = format!(
                        "{count} numbers below {most}, for a student that is a size and as wide as its teacher; or an empty list"
                    );
                    return Err(TrainError::setting("distil.layers", format!("{layers:?}"), expected));
                }
                Some(layers.clone())
            }
            None => (is_new && same && count <= most).then(|| spread(count, most)),
        };
        let mut digest = String::new();
        for name in ["config.json", "model.safetensors", "pytorch_model.bin"] {
            let path = path.join(name);
            if path.is_file() {
                digest += &Sums::of_file(&path)?;
            }
        }
        Ok(Self { settings: settings.clone(), path, config, layers, digest })
    }

    /// Copies the teacher's embeddings, head and some of its layers into a student's parameters, by their places among those of their
    /// group: families name them differently and lay them out in one order.
    pub(crate) fn start(&self, parameters: &mut Parameters) -> Result<()> {
        let Some(layers) = &self.layers else { return Ok(()) };
        let host = Device::cpu(None, None).map_err(|error| TrainError::Vocabulary(error.to_string()))?;
        let teacher = self.open(&host, DType::F32)?.parameters;
        let places = |parameters: &Parameters, group: Group| -> Vec<usize> {
            let entries = parameters.entries().iter().enumerate();
            entries.filter(|(_, entry)| entry.group == group).map(|(i, _)| i).collect()
        };
        let ending = |name: &str| name.split_once("embeddings.").map_or(name, |(_, ending)| ending).to_owned();
        let mut copied: Vec<(usize, usize)> = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            let (to, from) = (places(parameters, Group::Layer(number)), places(&teacher, Group::Layer(*layer)));
            if to.len() != from.len() {
                return Err(self.unlike(parameters));
            }
            copied.extend(to.into_iter().zip(from));
        }
        let (to, from) = (places(parameters, Group::Head), places(&teacher, Group::Head));
        if to.len() == from.len() {
            copied.extend(to.into_iter().zip(from));
        }
        for to in places(parameters, Group::Embeddings) {
            let name = ending(&parameters.entries()[to].name);
            let same = |from: &usize| ending(&teacher.entries()[*from].name) == name;
            copied.extend(places(&teacher, Group::Embeddings).into_iter().find(same).map(|from| (to, from)));
        }
        for (to, from) in copied {
            let (new, old) = (&parameters.entries()[to], &teacher.entries()[from]);
            if new.stored_shape().sizes() != old.stored_shape().sizes() {
                return Err(self.unlike(parameters));
            }
            let values = teacher.read(from)?;
            parameters.write(to, &values)?;
        }
        Ok(parameters.refresh()?)
    }

    fn unlike(&self, parameters: &Parameters) -> TrainError {
        let count = parameters.entries().len();
        let expected = format!(
            "an empty list: the student's {count} parameters are of other shapes than those of {}",
            self.path.display()
        );
        TrainError::setting("distil.layers", format!("{:?}", self.layers.as_deref().unwrap_or_default()), expected)
    }

    /// Opens it.
    pub(crate) fn open(&self, device: &Device, dtype: DType) -> Result<Teacher> {
        let weights = ModelDirectory::open(&self.path)?.weights()?;
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &self.config, Head::MaskedLm)?;
        let naming = &self.config.family().naming;
        let (mut parameters, _) = open_parameters(&weights, naming, builder, device, dtype, &LoadOptions::strict(), 0)?;
        parameters.keep_packed();
        Ok(Teacher { model, parameters, tape: Tape::new(), settings: self.settings.clone() })
    }
}

/// Refuses a teacher that knows other tokens than the data has.
fn check_vocabulary(path: &Path, config: &ModelConfig, student: &ModelConfig, tokenizer: &Tokenizer) -> Result<()> {
    let own = Tokenizer::open(path)?;
    let (count, before) = (tokenizer.vocabulary_size(), own.vocabulary_size());
    let other = (0..count.max(before) as u32).find(|id| own.token(*id) != tokenizer.token(*id));
    if let Some(id) = other {
        let show =
            |tokenizer: &Tokenizer| tokenizer.token(id).map_or("nothing".to_owned(), |token| format!("`{token}`"));
        return Err(TrainError::Vocabulary(format!(
            "{}: the teacher has another vocabulary than the data: id {id} is {} there and {} here. Build the data with --tokenizer {}",
            path.display(),
            show(&own),
            show(tokenizer),
            path.display()
        )));
    }
    let (rows, new) = (config.sizes().vocab_size, student.sizes().vocab_size);
    match rows == new {
        true => Ok(()),
        false => Err(TrainError::setting(
            "config.vocab_size",
            new,
            format!("{rows}, as the teacher in {} has", path.display()),
        )),
    }
}

/// So many of some layers, evenly spaced from the first to the last.
fn spread(count: usize, most: usize) -> Vec<usize> {
    let last = (count.max(2) - 1) as f64;
    (0..count).map(|i| (i as f64 * (most - 1) as f64 / last).round() as usize).collect()
}

/// A teacher that is asked.
pub(crate) struct Teacher {
    model: Model,
    parameters: Parameters,
    tape: Tape,
    settings: TeacherSettings,
}

impl Teacher {
    /// Adds the gradients of a step; gives the losses of its parts.
    pub(crate) fn learn(&mut self, engine: &mut Engine, number: u64, step: &Step) -> Result<Vec<Reading>> {
        let per = |count: usize| 1.0 / count.max(1) as f64;
        let scales = Scales { predicted: per(step.predicted), token: per(step.tokens) };
        engine.in_parts(number, step.parts.len(), |engine, i| {
            self.learn_part(engine, number, &step.parts[i], scales).map(|losses| vec![losses])
        })
    }

    fn learn_part(&mut self, engine: &mut Engine, step: u64, part: &Part, scales: Scales) -> Result<Reading> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device = parameters.device().clone();
        let threads = device.threads();
        let asked = Inputs::new(&device, self.model.config(), part, 1.0)?;
        let mut pass = Pass::inference(&mut self.tape, &self.parameters);
        let hidden = self.model.encode(&mut pass, &asked.batch, Capture::default())?.last;
        let said = self.model.logits_of(&mut pass, hidden.clone(), &asked.batch.layout, Some(&asked.masked.rows))?;
        let (hidden, said) = (hidden.tensor().to_f32()?, said.tensor().to_f32()?);
        drop(pass);

        let inputs = Inputs::new(&device, model.config(), part, 1.0)?;
        let mut pass = Pass::training(tape, parameters, training);
        let last = model.encode(&mut pass, &inputs.batch, Capture::default())?.last;
        let logits = model.logits_of(&mut pass, last.clone(), &inputs.batch.layout, Some(&inputs.masked.rows))?;
        let (vocabulary, columns) = (model.config().sizes().vocab_size, logits.tensor().columns());
        let mut values = logits.tensor().to_f32()?;
        let rows = Rows { settings: &self.settings, scale: scales.predicted, vocabulary };
        // Rows that only fill the batch up have no target.
        let count = part.targets.len();
        let losses =
            rows.of_all(&mut values[..count * columns], &said[..count * columns], columns, &part.targets, threads);
        values[count * columns..].fill(0.0);
        pass.seed_gradient(&logits, &values)?;
        let mut all = vec![losses[0], losses[1]];
        if self.settings.cosine_weight > 0.0 {
            let width = last.tensor().columns();
            let mut states = last.tensor().to_f32()?;
            let tokens: usize = part.lengths.iter().sum();
            let scale = self.settings.cosine_weight * scales.token;
            let (own, filling) = states.split_at_mut(tokens * width);
            all.push(cosines(own, &hidden[..tokens * width], width, scale, threads));
            filling.fill(0.0);
            pass.seed_gradient(&last, &states)?;
        }
        pass.backward(gradients)?;
        let tensors = all.iter().map(|loss| Tensor::from_slice(&device, [1], &[*loss as f32]));
        let tensors = tensors.collect::<henson_tensor::Result<Vec<_>>>()?;
        Ok(device.read_later(&tensors.iter().collect::<Vec<_>>())?)
    }
}

/// One over the numbers of a whole step.
#[derive(Clone, Copy)]
struct Scales {
    predicted: f64,
    token: f64,
}

/// Rows of logits over a vocabulary, of which the first columns count.
struct Rows<'a> {
    settings: &'a TeacherSettings,
    scale: f64,
    vocabulary: usize,
}

/// Rows that are worth a thread.
const ROWS: usize = 8;

impl Rows<'_> {
    /// The losses of all rows, added in their order; their gradients take the rows' place.
    fn of_all(&self, logits: &mut [f32], teacher: &[f32], columns: usize, targets: &[u32], threads: usize) -> [f64; 2] {
        let size = ROWS * columns.max(1);
        let parts = logits.chunks_mut(size).zip(teacher.chunks(size)).zip(targets.chunks(ROWS));
        let found = in_threads(threads, parts.collect::<Vec<_>>(), |((logits, teacher), targets)| {
            let rows = logits.chunks_exact_mut(columns).zip(teacher.chunks_exact(columns)).zip(targets);
            rows.map(|((logits, teacher), target)| self.of(logits, teacher, *target as usize)).collect::<Vec<_>>()
        });
        found.into_iter().flatten().fold([0.0; 2], |sum, row| [sum[0] + row[0], sum[1] + row[1]])
    }

    /// The two losses of a row; their gradient takes its place.
    fn of(&self, logits: &mut [f32], teacher: &[f32], target: usize) -> [f64; 2] {
        let (t, classes) = (self.settings.temperature, self.vocabulary);
        let (soft, hard) = (self.scale * self.settings.soft_weight * t * t, self.scale * self.settings.mlm_weight);
        let sums = |row: &[f32], t: f64| {
            let most = row.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
            let sum: f64 = row.iter().map(|x| (f64::from(x - most) / t).exp()).sum();
            (most, sum.ln())
        };
        let (row, padding) = logits.split_at_mut(classes);
        let teacher = &teacher[..classes];
        let ((most, warm), (_, cold)) = (sums(row, t), sums(row, 1.0));
        let (top, other) = sums(teacher, t);
        let mut losses = [0.0, hard * (cold - f64::from(row[target] - most))];
        for (class, (x, y)) in row.iter_mut().zip(teacher).enumerate() {
            let own = f64::from(*x - most);
            let (p, q) = (own / t - warm, f64::from(y - top) / t - other);
            let share = q.exp();
            losses[0] += soft * share * (q - p);
            let wanted = if class == target { 1.0 } else { 0.0 };
            *x = (soft * (p.exp() - share) / t + hard * ((own - cold).exp() - wanted)) as f32;
        }
        padding.fill(0.0);
        losses
    }
}

/// scale·Σ (1 − cosine) over rows; its gradient takes their place.
fn cosines(states: &mut [f32], teacher: &[f32], width: usize, scale: f64, threads: usize) -> f64 {
    let size = 64 * width.max(1);
    let parts: Vec<_> = states.chunks_mut(size).zip(teacher.chunks(size)).collect();
    let of = |(row, teacher): (&mut [f32], &[f32])| {
        let sum = |of: &dyn Fn(f64, f64) -> f64| {
            row.iter().zip(teacher).map(|(x, y)| of(f64::from(*x), f64::from(*y))).sum::<f64>()
        };
        let (length, other) = (sum(&|x, _| x * x).sqrt().max(1e-8), sum(&|_, y| y * y).sqrt().max(1e-8));
        let cosine = sum(&|x, y| x * y) / (length * other);
        for (x, y) in row.iter_mut().zip(teacher) {
            let slope = (f64::from(*y) / other - cosine * f64::from(*x) / length) / length;
            *x = (-scale * slope) as f32;
        }
        scale * (1.0 - cosine)
    };
    let found = in_threads(threads, parts, |(rows, teacher)| {
        rows.chunks_exact_mut(width).zip(teacher.chunks_exact(width)).map(of).collect::<Vec<f64>>()
    });
    found.into_iter().flatten().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Case {
        name: String,
        temperature: f64,
        alpha: f64,
        rows: Vec<Vec<f32>>,
        teacher: Vec<Vec<f32>>,
        labels: Vec<Option<usize>>,
        weights: Vec<f64>,
        projection: Vec<f32>,
        loss: f64,
        gradient: Vec<Vec<f64>>,
    }

    /// The same golden values that distillation for tasks has: rows with a label for the distributions and the tokens, vectors for the
    /// cosine (tools/golden/distil.py).
    #[test]
    fn losses_are_those_of_pytorch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/distil/golden.json");
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut checked = 0;
        for case in cases {
            let n = case.rows.len() as f64;
            let near = |a: f64, b: f64| (a - b).abs() < 2e-6 * b.abs().max(1.0);
            if case.name == "classes" && case.labels.iter().all(Option::is_some) {
                let labelled: f64 = case.labels.iter().flatten().map(|label| case.weights[*label]).sum();
                let mut total = 0.0;
                for (i, row) in case.rows.iter().enumerate() {
                    let label = case.labels[i].unwrap();
                    let settings = TeacherSettings {
                        temperature: case.temperature,
                        soft_weight: case.alpha / n,
                        mlm_weight: (1.0 - case.alpha) * case.weights[label] / labelled,
                        ..TeacherSettings::default()
                    };
                    let rows = Rows { settings: &settings, scale: 1.0, vocabulary: row.len() };
                    // Padding is whatever it is.
                    let mut logits = [&row[..], &[f32::NAN; 3]].concat();
                    let teacher = [&case.teacher[i][..], &[f32::NAN; 3]].concat();
                    let columns = logits.len();
                    let found = rows.of_all(&mut logits, &teacher, columns, &[label as u32], 2);
                    total += found[0] + found[1];
                    let (own, padding) = logits.split_at(row.len());
                    assert!(own.iter().zip(&case.gradient[i]).all(|(a, b)| near(f64::from(*a), *b)), "{own:?}");
                    assert_eq!(padding, [0.0; 3]);
                }
                assert!(near(total, case.loss), "{total} {}", case.loss);
                checked += 1;
            }
            if case.name == "cosine" && case.projection.is_empty() {
                let (mut states, teacher) = (case.rows.concat(), case.teacher.concat());
                let loss = cosines(&mut states, &teacher, case.rows[0].len(), 1.0 / n, 2);
                assert!(near(loss, case.loss), "{loss} {}", case.loss);
                let expected = case.gradient.iter().flatten();
                assert!(states.iter().zip(expected).all(|(a, b)| near(f64::from(*a), *b)), "{states:?}");
                checked += 1;
            }
        }
        assert!(checked >= 3, "{checked}");
    }

    #[test]
    fn layers_are_spread_as_in_the_papers_code() {
        assert_eq!(spread(6, 12), [0, 2, 4, 7, 9, 11]);
        assert_eq!((spread(1, 12), spread(2, 12), spread(4, 4)), (vec![0], vec![0, 11], vec![0, 1, 2, 3]));
    }
}
