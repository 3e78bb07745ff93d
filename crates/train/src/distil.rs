//! Pre-training from a teacher. As DistilBERT was made (Sanh et al. 2019): its distributions at a temperature, the masked tokens
//! themselves, and the direction of its last hidden states; and a student that starts from some of its layers. As MiniLM was made (Wang et
//! al. 2020, 2021): the relations between tokens in one of its layers ([`crate::relations`]), for which it need not predict anything.
//!
//! ```text
//! soft_weight·T²·KL(softmax(t/T) ‖ softmax(z/T))    mean over the masked tokens
//! mlm_weight·(−ln softmax(z) at the token)          mean over the masked tokens
//! cosine_weight·(1 − cos(h, teacher's h))           mean over all tokens
//! relation_weight·Σ KL(teacher's R ‖ R)             mean over heads and tokens, sum over relations
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
use henson_models::{Capture, Encoded, Head, Model, ModelConfig};
use henson_tensor::{Builder, DType, Device, Group, Parameters, Pass, Reading, Tape, Tensor};
use henson_text::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::losses::{EQUAL, LossNames, LossWeights};
use crate::pretraining::Inputs;
use crate::recipe::check_ranges;
use crate::relations::{Relation, Relations};
use crate::soft;
use crate::trainer::Engine;

/// What is learned from a teacher in pre-training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherSettings {
    /// The teacher (`henson distil --teacher`): the directory of a model that predicts masked tokens, with the tokenizer of the data.
    pub teacher: String,
    /// What logits are divided by on both sides before the softmax.
    pub temperature: f64,
    /// Weight of the teacher's distributions; 0 for none.
    pub soft_weight: f64,
    /// Weight of the masked tokens themselves; 0 for none.
    pub mlm_weight: f64,
    /// Weight of the cosine of the last hidden states, which must be of the same width; 0 for none.
    pub cosine_weight: f64,
    /// The teacher's layers that those of the student start from, counted from 0; by default evenly spaced from the first to the last (0,
    /// 2, 4, 7, 9 and 11 for six of twelve) where the two have the same width and the student is a size. An empty list starts from
    /// random weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Relations between tokens that the student's last layer learns from a layer of the teacher: query-query, key-key and value-value
    /// (MiniLMv2), or query-key and value-value (MiniLM); none unless set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub relations: Vec<Relation>,
    /// Weight of each relation.
    pub relation_weight: f64,
    /// Heads that queries, keys and values are cut into for it, on both sides; divides both widths. By default the teacher's heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relation_heads: Option<usize>,
    /// The teacher's layer that has the relations, counted from 0; by default the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relation_layer: Option<usize>,
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
            relations: Vec::new(),
            relation_weight: 1.0,
            relation_heads: None,
            relation_layer: None,
        }
    }
}

/// The names of the losses, by which of them are learned: one bit each in this order.
const NAMES: [LossNames; 16] = [
    &[],
    &["soft_loss"],
    &["mlm_loss"],
    &["soft_loss", "mlm_loss"],
    &["cosine_loss"],
    &["soft_loss", "cosine_loss"],
    &["mlm_loss", "cosine_loss"],
    &["soft_loss", "mlm_loss", "cosine_loss"],
    &["relation_loss"],
    &["soft_loss", "relation_loss"],
    &["mlm_loss", "relation_loss"],
    &["soft_loss", "mlm_loss", "relation_loss"],
    &["cosine_loss", "relation_loss"],
    &["soft_loss", "cosine_loss", "relation_loss"],
    &["mlm_loss", "cosine_loss", "relation_loss"],
    &["soft_loss", "mlm_loss", "cosine_loss", "relation_loss"],
];

impl TeacherSettings {
    pub(crate) fn check(&self) -> Result<()> {
        check_ranges(&[
            ("distil.temperature", self.temperature, 1e-2, 1e3),
            ("distil.soft_weight", self.soft_weight, 0.0, 1e6),
            ("distil.mlm_weight", self.mlm_weight, 0.0, 1e6),
            ("distil.cosine_weight", self.cosine_weight, 0.0, 1e6),
            ("distil.relation_weight", self.relation_weight, 1e-6, 1e6),
        ])?;
        let is_twice = |(i, relation): (usize, &Relation)| self.relations[..i].contains(relation);
        if self.relations.iter().enumerate().any(is_twice) {
            let expected = "each relation once";
            return Err(TrainError::setting("distil.relations", format!("{:?}", self.relations), expected));
        }
        let weights = self.weights();
        if weights[0] + weights[2] + weights[3] == 0.0 {
            let expected =
                "more than 0, or one of distil.cosine_weight and distil.relations: nothing is learned from the teacher";
            return Err(TrainError::setting("distil.soft_weight", 0, expected));
        }
        Ok(())
    }

    /// The weight of every loss; 0: it is none.
    fn weights(&self) -> [f64; 4] {
        let relations = if self.relations.is_empty() { 0.0 } else { self.relation_weight };
        [self.soft_weight, self.mlm_weight, self.cosine_weight, relations]
    }

    /// Whether tokens are predicted, by the student at least.
    fn predicts(&self) -> bool {
        self.soft_weight + self.mlm_weight > 0.0
    }

    /// The names of the losses.
    pub(crate) fn names(&self) -> LossNames {
        let bits = self.weights().into_iter().enumerate();
        NAMES[bits.map(|(bit, weight)| usize::from(weight > 0.0) << bit).sum::<usize>()]
    }

    /// What they are multiplied with.
    pub(crate) fn loss_weights(&self) -> LossWeights {
        let mut weights = EQUAL;
        let learned = self.weights().into_iter().filter(|weight| *weight > 0.0);
        weights.iter_mut().zip(learned).for_each(|(to, weight)| *to = weight);
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
    /// The heads of relations, and the teacher's layer that has them.
    relations: (usize, usize),
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
        let relations = check_relations(settings, &config, student)?;
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
        Ok(Self { settings: settings.clone(), path, config, layers, relations, digest })
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
        // Where it predicts nothing, any encoder does.
        let (head, options) = match self.settings.soft_weight > 0.0 {
            true => (Head::MaskedLm, LoadOptions::strict()),
            false => (Head::Encoder, LoadOptions::new_head(&|_| false)),
        };
        let weights = ModelDirectory::open(&self.path)?.weights()?;
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &self.config, head)?;
        let naming = &self.config.family().naming;
        let (mut parameters, _) = open_parameters(&weights, naming, builder, device, dtype, &options, 0)?;
        parameters.keep_packed();
        let (settings, relations) = (self.settings.clone(), self.relations);
        Ok(Teacher { model, parameters, tape: Tape::new(), settings, relations })
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

/// The heads of relations and the teacher's layer that has them, where both models have such.
fn check_relations(settings: &TeacherSettings, config: &ModelConfig, student: &ModelConfig) -> Result<(usize, usize)> {
    let (own, new) = (config.sizes(), student.sizes());
    let heads = settings.relation_heads.unwrap_or(own.num_attention_heads);
    let layer = settings.relation_layer.unwrap_or(own.num_hidden_layers.saturating_sub(1));
    if settings.relations.is_empty() {
        return Ok((heads, layer));
    }
    if heads == 0 || [own, new].iter().any(|sizes| !sizes.hidden_size.is_multiple_of(heads)) {
        let expected =
            format!("a divisor of {} and of {}, the widths of student and teacher", new.hidden_size, own.hidden_size);
        return Err(TrainError::setting("distil.relation_heads", heads, expected));
    }
    if layer >= own.num_hidden_layers {
        let expected = format!("a number below {}, the teacher's layers", own.num_hidden_layers);
        return Err(TrainError::setting("distil.relation_layer", layer, expected));
    }
    for (config, layer) in [(config, layer), (student, new.num_hidden_layers.saturating_sub(1))] {
        if !Model::build(&mut Builder::new(), config, Head::Encoder)?.has_query_key_value(layer) {
            let expected =
                format!("an empty list: a {} has no queries and keys of its hidden states alone", config.model_type());
            return Err(TrainError::setting("distil.relations", format!("{:?}", settings.relations), expected));
        }
    }
    Ok((heads, layer))
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
    /// The heads of relations, and its layer that has them.
    relations: (usize, usize),
}

/// What a teacher says about a part of a step; what is not asked for is empty.
struct Said {
    /// P×V, padded.
    logits: Vec<f32>,
    /// T×H.
    hidden: Vec<f32>,
    /// T×3H.
    query_key_value: Vec<f32>,
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

    fn ask(&mut self, device: &Device, part: &Part) -> Result<Said> {
        let relations = !self.settings.relations.is_empty();
        let inputs = Inputs::new(device, self.model.config(), part, 1.0)?;
        let mut pass = Pass::inference(&mut self.tape, &self.parameters);
        let capture = Capture { hidden_states: relations, ..Capture::default() };
        let encoded = self.model.encode(&mut pass, &inputs.batch, capture)?;
        let mut said = Said { logits: Vec::new(), hidden: Vec::new(), query_key_value: Vec::new() };
        if relations {
            let x = &encoded.hidden_states[self.relations.1];
            said.query_key_value = self.model.query_key_value(&mut pass, self.relations.1, x)?.tensor().to_f32()?;
        }
        if self.settings.cosine_weight > 0.0 {
            said.hidden = encoded.last.tensor().to_f32()?;
        }
        if self.settings.soft_weight > 0.0 {
            let (layout, rows) = (&inputs.batch.layout, &inputs.masked.rows);
            said.logits = self.model.logits_of(&mut pass, encoded.last, layout, Some(rows))?.tensor().to_f32()?;
        }
        Ok(said)
    }

    fn learn_part(&mut self, engine: &mut Engine, step: u64, part: &Part, scales: Scales) -> Result<Reading> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device = parameters.device().clone();
        let (threads, tokens) = (device.threads(), part.lengths.iter().sum::<usize>());
        let said = self.ask(&device, part)?;
        let weights = self.settings.weights();
        let inputs = Inputs::new(&device, model.config(), part, 1.0)?;
        let mut pass = Pass::training(tape, parameters, training);
        let capture = Capture { hidden_states: weights[3] > 0.0, ..Capture::default() };
        let Encoded { last, hidden_states, .. } = model.encode(&mut pass, &inputs.batch, capture)?;
        let mut all = [0.0; 4];
        if self.settings.predicts() {
            let logits = model.logits_of(&mut pass, last.clone(), &inputs.batch.layout, Some(&inputs.masked.rows))?;
            let (vocabulary, columns) = (model.config().sizes().vocab_size, logits.tensor().columns());
            let mut values = logits.tensor().to_f32()?;
            let rows = Rows { settings: &self.settings, scale: scales.predicted, vocabulary };
            // A teacher that is not followed here says nothing that counts. Rows that only fill the batch up have no target.
            let theirs = if said.logits.is_empty() { values.clone() } else { said.logits };
            let (own, filling) = values.split_at_mut(part.targets.len() * columns);
            let losses = rows.of_all(own, &theirs[..own.len()], columns, &part.targets, threads);
            all[..2].copy_from_slice(&losses);
            filling.fill(0.0);
            pass.seed_gradient(&logits, &values)?;
        }
        if weights[2] > 0.0 {
            let width = last.tensor().columns();
            let mut states = last.tensor().to_f32()?;
            let (own, filling) = states.split_at_mut(tokens * width);
            all[2] = cosines(own, &said.hidden[..tokens * width], width, weights[2] * scales.token, threads);
            filling.fill(0.0);
            pass.seed_gradient(&last, &states)?;
        }
        if weights[3] > 0.0 {
            let layer = model.config().sizes().num_hidden_layers - 1;
            let states = model.query_key_value(&mut pass, layer, &hidden_states[layer])?;
            let mut values = states.tensor().to_f32()?;
            let (own, filling) = values.split_at_mut(tokens * states.tensor().columns());
            let relations = Relations { kinds: &self.settings.relations, heads: self.relations.0 };
            let theirs = &said.query_key_value[..tokens * 3 * self.model.config().sizes().hidden_size];
            let scale = weights[3] * scales.token / self.relations.0 as f64;
            all[3] = relations.of_all(own, theirs, &part.lengths, scale, threads);
            filling.fill(0.0);
            pass.seed_gradient(&states, &values)?;
        }
        pass.backward(gradients)?;
        let learned = all.into_iter().zip(weights).filter(|(_, weight)| *weight > 0.0);
        let tensors = learned.map(|(loss, _)| Tensor::from_slice(&device, [1], &[loss as f32]));
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

    /// The two losses of a row; their gradient takes its place. Columns behind the vocabulary have none.
    fn of(&self, logits: &mut [f32], teacher: &[f32], target: usize) -> [f64; 2] {
        let TeacherSettings { temperature, soft_weight, mlm_weight, .. } = *self.settings;
        let (row, padding) = logits.split_at_mut(self.vocabulary);
        let values: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let (mut losses, mut gradient) = ([0.0; 2], vec![0.0; row.len()]);
        if soft_weight > 0.0 {
            let teacher = soft::softened(&teacher[..self.vocabulary], temperature);
            losses[0] = soft::divergence(&values, &teacher, temperature, self.scale * soft_weight, &mut gradient);
        }
        if mlm_weight > 0.0 {
            losses[1] = soft::cross_entropy(&values, target, self.scale * mlm_weight, &mut gradient);
        }
        row.iter_mut().zip(gradient).for_each(|(x, slope)| *x = slope as f32);
        padding.fill(0.0);
        losses
    }
}

/// scale·Σ (1 − cosine) over rows; its gradient takes their place.
fn cosines(states: &mut [f32], teacher: &[f32], width: usize, scale: f64, threads: usize) -> f64 {
    let size = 64 * width.max(1);
    let parts: Vec<_> = states.chunks_mut(size).zip(teacher.chunks(size)).collect();
    let of = |(row, teacher): (&mut [f32], &[f32])| {
        let values: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let mut gradient = vec![0.0; row.len()];
        let loss = soft::cosine_distance(&values, teacher, scale, &mut gradient);
        row.iter_mut().zip(gradient).for_each(|(x, slope)| *x = slope as f32);
        loss
    };
    let found = in_threads(threads, parts, |(rows, teacher)| {
        rows.chunks_exact_mut(width).zip(teacher.chunks_exact(width)).map(of).collect::<Vec<f64>>()
    });
    found.into_iter().flatten().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are those of [`crate::soft`], whose values are PyTorch's, whatever the padding is and however many threads there are.
    #[test]
    fn rows_are_learned_apart_and_their_padding_is_not() {
        const CLASSES: usize = 5;
        let wave = |by: f32| move |i: usize| if i % 8 < CLASSES { 3.0 * (by * i as f32).sin() } else { f32::NAN };
        let (logits, teacher): (Vec<f32>, Vec<f32>) =
            ((0..80).map(wave(1.3)).collect(), (0..80).map(wave(0.7)).collect());
        let targets: Vec<u32> = (0..10).map(|i| i % CLASSES as u32).collect();
        let settings =
            TeacherSettings { temperature: 3.0, soft_weight: 2.0, mlm_weight: 0.5, ..TeacherSettings::default() };
        let rows = Rows { settings: &settings, scale: 0.25, vocabulary: CLASSES };
        let mut found = logits.clone();
        let losses = rows.of_all(&mut found, &teacher, 8, &targets, 3);
        let mut expected = [0.0; 2];
        for (i, target) in targets.iter().enumerate() {
            let values: Vec<f64> = logits[8 * i..][..CLASSES].iter().map(|x| f64::from(*x)).collect();
            let (mut gradient, said) = ([0.0; CLASSES], soft::softened(&teacher[8 * i..][..CLASSES], 3.0));
            expected[0] += soft::divergence(&values, &said, 3.0, 0.5, &mut gradient);
            expected[1] += soft::cross_entropy(&values, *target as usize, 0.125, &mut gradient);
            assert_eq!(found[8 * i..][..CLASSES], gradient.map(|x| x as f32));
            assert_eq!(found[8 * i + CLASSES..8 * (i + 1)], [0.0; 3]);
        }
        assert_eq!(losses, expected);
    }

    #[test]
    fn layers_are_spread_as_in_the_papers_code() {
        assert_eq!(spread(6, 12), [0, 2, 4, 7, 9, 11]);
        assert_eq!((spread(1, 12), spread(2, 12), spread(4, 4)), (vec![0], vec![0, 11], vec![0, 1, 2, 3]));
    }
}
