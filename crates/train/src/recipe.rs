//! Recipes: what a pre-training run does, as a TOML file. Unknown keys are refused; the resolved recipe, with every
//! default written out, is saved beside the output, and a run can be repeated from it.
//!
//! A recipe may have phases, each with its own length and batch. What a phase does not say is as in the recipe's top.
//! The learning rate's course spans the whole run, as in the paper; a phase that names its own `learning_rate` has a
//! course of its own over its own steps, as in Google's second run with 512 tokens.

use henson_data::{InstanceSettings, LongSentences, MaskCount, Masking, NoiseSettings, Objective, Packing, Separators};
use henson_tensor::{Adafactor, DType, Method};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::distil::TeacherSettings;
use crate::error::{Result, TrainError};
use crate::replaced::{self, GeneratorSettings};
use crate::run::RunRecipe;
use crate::schedule::{ByEpoch, Schedule, ScheduleKind};
use crate::{Clip, OptimizerSettings};

/// What models compute in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, with the master weights in f32.
    Bf16,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

impl From<DType> for Precision {
    fn from(dtype: DType) -> Self {
        if dtype == DType::Bf16 { Precision::Bf16 } else { Precision::F32 }
    }
}

/// The rule of the updates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// AdamW with bias correction.
    #[default]
    Adamw,
    /// AdamW without it, as in Google's BERT.
    #[serde(alias = "paper")]
    AdamwPaper,
    /// AdamW with bias correction, and smaller updates of tensors with unexpectedly large gradients; used instead of clipping.
    StableAdamw,
    /// LAMB, for very large batches.
    Lamb,
    /// Plain gradient descent, as recurrent language models are trained (Zaremba et al. 2014).
    Sgd,
    /// Adagrad, as ELMo is trained: gradients over the root of the sum of all their squares so far, which begins at 1.
    Adagrad,
    /// Adafactor: no first moment, and of large matrices only the means of rows and columns of the second, as T5 is trained. Its
    /// constants are those of `adafactor`.
    Adafactor,
}

impl OptimizerKind {
    /// The rule with the constants of a recipe, where a `clip` of 0 is none.
    pub fn with(self, betas: [f64; 2], epsilon: f64, weight_decay: f64, clip: f64) -> OptimizerSettings {
        OptimizerSettings {
            method: match self {
                OptimizerKind::Adamw | OptimizerKind::AdamwPaper => Method::AdamW,
                OptimizerKind::StableAdamw => Method::StableAdamW,
                OptimizerKind::Lamb => Method::Lamb,
                OptimizerKind::Sgd => Method::Sgd,
                OptimizerKind::Adagrad => Method::Adagrad(1.0),
                OptimizerKind::Adafactor => Method::Adafactor(Adafactor::default()),
            },
            beta1: betas[0],
            beta2: betas[1],
            epsilon,
            weight_decay,
            bias_correction: self != OptimizerKind::AdamwPaper,
            gradient_scale: 1.0,
            clip: if clip == 0.0 { Clip::Off } else { Clip::GlobalNorm(clip) },
        }
    }
}

/// The constants of Adafactor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdafactorSettings {
    /// Both sides of a matrix must be so long for its moment to be kept as rows and columns: 128 in T5's code, 1 in `transformers`.
    pub min_side: usize,
    /// β₂ of update t is 1 − t to the power of minus this.
    pub decay_rate: f64,
    /// An update whose root mean square is above this is scaled down to it.
    pub update_clip: f64,
    /// Multiply the learning rate by the root mean square of a tensor's numbers.
    pub scale_parameter: bool,
    /// The least that it is multiplied by.
    pub least_scale: f64,
}

impl Default for AdafactorSettings {
    fn default() -> Self {
        let Adafactor { min_side, decay_rate, clip, scale_parameter, least_scale } = Adafactor::default();
        Self { min_side, decay_rate, update_clip: clip, scale_parameter, least_scale }
    }
}

impl From<AdafactorSettings> for Adafactor {
    fn from(settings: AdafactorSettings) -> Self {
        let AdafactorSettings { min_side, decay_rate, update_clip, scale_parameter, least_scale } = settings;
        Self { min_side, decay_rate, clip: update_clip, scale_parameter, least_scale }
    }
}

impl AdafactorSettings {
    /// Refuses what makes no sense, and constants of an optimizer that is not used.
    pub fn check(settings: Option<&Self>, optimizer: OptimizerKind) -> Result<()> {
        let Some(own) = settings else { return Ok(()) };
        if optimizer != OptimizerKind::Adafactor {
            return Err(TrainError::setting("adafactor", "given", "optimizer = \"adafactor\""));
        }
        check_ranges(&[
            ("adafactor.min_side", own.min_side as f64, 1.0, 1e9),
            ("adafactor.decay_rate", own.decay_rate, 0.01, 2.0),
            ("adafactor.update_clip", own.update_clip, 1e-6, 1e9),
            ("adafactor.least_scale", own.least_scale, 1e-12, 1e6),
        ])
    }
}

/// A pre-training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// The model: a size (`bert-tiny`, `bert-mini`, `bert-small`, `bert-medium`, `bert-base`, `bert-large`, or one of another
    /// family such as `electra-small`), or the directory of a model to continue from (`--model`).
    pub model: String,
    /// The directory that `henson data build` wrote (`--data`).
    pub data: String,
    /// Seed of initial weights, instances and dropout (`--seed`).
    pub seed: u64,
    /// Number type to compute in; the master weights are f32 either way (`--dtype`).
    pub dtype: Precision,

    /// Training objective.
    pub objective: Objective,
    /// How single segments are filled.
    pub packing: Packing,
    /// What becomes of sentences that do not fit into a sequence by themselves.
    pub long_sentences: LongSentences,
    /// Where separators stand in a sequence of several sentences.
    pub separators: Separators,
    /// Which tokens are masked together.
    pub masking: Masking,
    /// Share of the tokens to predict.
    pub mask_probability: f64,
    /// How that share p becomes a number of tokens in a sequence of n.
    pub mask_count: MaskCount,
    /// Mask the special tokens of a sequence as well, `[CLS]` and `[SEP]`, as RoBERTa's training does.
    pub mask_specials: bool,
    /// Maximum number of tokens to predict in a sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_predictions: Option<usize>,
    /// With `permutation`: tokens of a block that is permuted by itself, the blocks from left to right. Without it, the order is one of
    /// the whole sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permutation_size: Option<usize>,
    /// Of the tokens to predict, the shares that become `[MASK]`, become a random token, and stay as they are.
    pub mask_split: [f64; 3],
    /// Number of copies of the data with fixed masks (static masking, 10 in Devlin et al. 2019); 0 draws new masks in
    /// every epoch (dynamic masking).
    pub dupe_factor: u32,
    /// Mean length in tokens of the spans of `span-corruption`, whose share of the tokens is `mask_probability`, and of those that
    /// `denoising` fills in (3.5 in the command that BART's authors gave).
    pub mean_span: f64,
    /// Share of documents with a random shorter target length; with `replaced-tokens`, of sequences (0.05 in ELECTRA).
    pub short_sequences: f64,
    /// Maximum length of a sequence in tokens, special tokens included.
    pub sequence_length: usize,

    /// Sequences per update (`--batch-size`).
    pub batch_size: usize,
    /// Number of parts that a batch is computed in, to save memory; they add up to the same update.
    pub accumulation: usize,
    /// Number of updates; either this or `epochs`: what flags say is used instead of the other in a recipe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Number of epochs, instead of `steps` (`--epochs`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,

    /// Optimizer.
    pub optimizer: OptimizerKind,
    /// Peak learning rate (`--learning-rate`). With `packing = "stream"`, it and `clip` are for the sum of a sequence's losses, as
    /// recurrent language models are trained, but not with `permutation`; logs show means.
    pub learning_rate: f64,
    /// Learning-rate schedule after the linear warm-up.
    pub schedule: ScheduleKind,
    /// Updates in which the learning rate rises from 0 to its peak; by default a tenth of all, at most 10,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Updates in which `warmup-stable-decay` and `warmup-stable-sqrt` decay; by default a tenth of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// With `schedule = "by-epoch"`: what the learning rate is divided by after each epoch (1.2 in Zaremba et al. 2014).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_factor: Option<f64>,
    /// With `schedule = "by-epoch"`: the number of epochs before the first division.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constant_epochs: Option<u64>,
    /// Decoupled weight decay; biases and LayerNorm are not decayed.
    pub weight_decay: f64,
    /// Decay biases and LayerNorm as well, as fairseq does (RoBERTa, SpanBERT).
    pub decay_all: bool,
    /// Adam's β₁.
    pub beta1: f64,
    /// Adam's β₂.
    pub beta2: f64,
    /// Adam's ε.
    pub epsilon: f64,
    /// Maximum norm of all gradients together; 0 turns clipping off.
    pub clip: f64,
    /// Label smoothing: the share of each token's target that is spread evenly over the vocabulary. Held-out losses are without it.
    pub label_smoothing: f64,
    /// Dropout of hidden states and attention; by default the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,

    /// Recompute the inner activations of feed-forward layers in the backward pass instead of keeping them: about
    /// half of the memory of a step for some 15% more time, with the same results.
    pub recompute: bool,
    /// Steps between checkpoints; 0 for one at the end alone.
    pub checkpoint_every: u64,
    /// How many of the last checkpoints are kept, in addition to the best.
    pub keep_checkpoints: usize,
    /// Steps between evaluations on held-out text; 0 for one at the end alone. Checkpoints are evaluated as well.
    pub eval_every: u64,
    /// Number of held-out sequences to evaluate on, with the same masks in all runs.
    pub eval_sequences: usize,
    /// Steps between lines of metrics.jsonl, which are means over them.
    pub log_every: u64,
    /// Texts with `[MASK]` to fill at every evaluation; without any, some are drawn from held-out text.
    pub samples: Vec<String>,
    /// Put samples that are drawn from held-out text into the log and the report, too (`--samples-in-report`). Those of
    /// `samples` always are, since they stand in the recipe as well.
    pub samples_in_report: bool,

    /// The generator of `objective = "replaced-tokens"`, and how it is trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generator: Option<GeneratorSettings>,
    /// The constants of `optimizer = "adafactor"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adafactor: Option<AdafactorSettings>,
    /// What `objective = "denoising"` does to a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<NoiseSettings>,
    /// A teacher whose predictions of masked tokens are learned, too, with `objective = "mlm"` (`henson distil --task mlm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distil: Option<TeacherSettings>,
    /// Values of config.json that differ from the size's, such as `config.num_hidden_layers = 6`.
    #[serde(skip_serializing_if = "Table::is_empty")]
    #[schemars(with = "std::collections::BTreeMap<String, serde_json::Value>")]
    pub config: Table,
    /// Phases of a run, one after the other; without any, the whole run is one. What a phase does not set is as in
    /// the rest of the recipe.
    #[serde(rename = "phase", skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
}

/// A part of a run with settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Phase {
    /// Its number of updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Its share of the run's `steps`, instead of `steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Maximum length of a sequence in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<usize>,
    /// Sequences per update.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Number of parts that a batch is computed in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulation: Option<usize>,
    /// Peak of a learning-rate schedule of its own, over its own steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Updates of its warm-up; only with a `learning_rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Share of the tokens to predict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_probability: Option<f64>,
    /// Maximum number of tokens to predict in a sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_predictions: Option<usize>,
}

/// A phase with everything that it does.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedPhase {
    /// Its first update, counted over the run.
    pub first_step: u64,
    /// Its updates.
    pub steps: u64,
    /// What its instances are.
    pub instances: InstanceSettings,
    /// Sequences of an update.
    pub batch_size: usize,
    /// Parts of a batch.
    pub accumulation: usize,
    /// The learning rate, by the step counted from `rate_from`.
    pub schedule: Schedule,
    /// The step that the schedule's begins at.
    pub rate_from: u64,
}

impl Default for Recipe {
    fn default() -> Self {
        let instances = InstanceSettings::default();
        Self {
            model: "bert-mini".to_owned(),
            data: String::new(),
            seed: 0,
            dtype: Precision::F32,
            objective: instances.objective,
            packing: instances.packing,
            long_sentences: instances.long_sentences,
            separators: instances.separators,
            masking: instances.masking,
            mask_probability: instances.mask_probability,
            mask_count: instances.mask_count,
            mask_specials: instances.mask_specials,
            max_predictions: instances.max_predictions,
            permutation_size: instances.permutation_size,
            mask_split: instances.mask_split,
            dupe_factor: instances.dupe_factor,
            mean_span: instances.mean_span,
            short_sequences: instances.short_sequences,
            sequence_length: 128,
            batch_size: 32,
            accumulation: 1,
            steps: None,
            epochs: None,
            optimizer: OptimizerKind::Adamw,
            learning_rate: 1e-4,
            schedule: ScheduleKind::Linear,
            warmup_steps: None,
            decay_steps: None,
            decay_factor: None,
            constant_epochs: None,
            weight_decay: 0.01,
            decay_all: false,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            clip: 1.0,
            label_smoothing: 0.0,
            dropout: None,
            recompute: false,
            checkpoint_every: 1000,
            keep_checkpoints: 2,
            eval_every: 500,
            eval_sequences: 512,
            log_every: 10,
            samples: Vec::new(),
            samples_in_report: false,
            generator: None,
            adafactor: None,
            distil: None,
            noise: None,
            config: Table::new(),
            phases: Vec::new(),
        }
    }
}

impl RunRecipe for Recipe {
    /// With those that change no bit.
    const MAY_CHANGE: &'static [&'static str] = &[
        "data",
        "distil.teacher",
        "recompute",
        "checkpoint_every",
        "keep_checkpoints",
        "eval_every",
        "eval_sequences",
        "log_every",
        "samples",
        "samples_in_report",
    ];
    const MAY_RISE: &'static [&'static str] = &["steps", "epochs"];
}

impl Recipe {
    /// Reads a recipe. `place` names it in errors; `sets` are `key=value`, applied in order on top.
    pub fn parse(text: &str, place: &str, sets: &[String]) -> Result<Self> {
        Self::parse_layers(&[(text, place)], sets)
    }

    /// Reads a recipe that consists of several texts with their names, of which a later one overrules the earlier.
    pub fn parse_layers(layers: &[(&str, &str)], sets: &[String]) -> Result<Self> {
        let mut recipe: Self = parse_settings(layers, sets)?;
        recipe.resolve_tables();
        recipe.check()?;
        Ok(recipe)
    }

    /// Writes the defaults of a generator, of noises, of Adafactor and of a decay by epochs out, where there are such.
    pub(crate) fn resolve_tables(&mut self) {
        if self.objective == Objective::ReplacedTokens {
            self.generator.get_or_insert_default();
        }
        if self.objective == Objective::Denoising {
            self.noise.get_or_insert_default();
        }
        if self.optimizer == OptimizerKind::Adafactor {
            self.adafactor.get_or_insert_default();
        }
        if self.schedule == ScheduleKind::ByEpoch {
            self.decay_factor.get_or_insert(1.2);
            self.constant_epochs.get_or_insert(6);
        }
    }

    /// The recipe as TOML, with all defaults.
    pub fn to_toml(&self) -> Result<String> {
        to_toml(self)
    }

    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
        if let Some(distil) = &self.distil {
            distil.check()?;
            if self.objective != Objective::Mlm {
                let expected = "mlm, since a teacher is followed in its predictions of masked tokens alone";
                return Err(TrainError::setting("objective", "another", expected));
            }
            if self.label_smoothing > 0.0 {
                return Err(TrainError::setting("label_smoothing", self.label_smoothing, "0 with a teacher"));
            }
        }
        check_ranges(&[
            ("learning_rate", self.learning_rate, 0.0, 10.0),
            ("weight_decay", self.weight_decay, 0.0, 10.0),
            ("epsilon", self.epsilon, 1e-30, 1.0),
            ("clip", self.clip, 0.0, 1e9),
            ("beta1", self.beta1, 0.0, MOST_BELOW_1),
            ("beta2", self.beta2, 0.0, MOST_BELOW_1),
            ("dropout", self.dropout.unwrap_or(0.0), 0.0, MOST_BELOW_1),
            ("label_smoothing", self.label_smoothing, 0.0, 0.99),
        ])?;
        if self.label_smoothing > 0.0 && matches!(self.objective, Objective::ReplacedTokens | Objective::SpanBoundary) {
            let expected = "0: replaced tokens and boundaries of spans are trained without it";
            return Err(TrainError::setting("label_smoothing", self.label_smoothing, expected));
        }
        if self.steps.is_some() && self.epochs.is_some() {
            return Err(TrainError::setting("epochs", "given", "either `steps` or `epochs`"));
        }
        if let Some(epochs) = self.epochs.filter(|epochs| !(*epochs > 0.0 && epochs.is_finite())) {
            return Err(TrainError::setting("epochs", epochs, "more than 0"));
        }
        for (key, got) in [("steps", self.steps), ("log_every", Some(self.log_every))] {
            if got.is_some_and(|got| got == 0 || got > u64::from(u32::MAX)) {
                return Err(TrainError::setting(key, got.unwrap_or(0), "1 to 4294967295"));
            }
        }
        if self.keep_checkpoints == 0 {
            return Err(TrainError::setting("keep_checkpoints", 0, "at least 1"));
        }
        if !self.phases.is_empty() && self.epochs.is_some() {
            return Err(TrainError::setting("epochs", "given", "`steps` where there are phases"));
        }
        let shares: f64 = self.phases.iter().filter_map(|phase| phase.share).sum();
        if self.phases.iter().any(|phase| phase.share.is_some()) && (shares - 1.0).abs() > 1e-6 {
            return Err(TrainError::setting("phase.share", shares, "a sum of 1 over all phases"));
        }
        for phase in &self.phases {
            match (phase.steps, phase.share, self.steps) {
                (Some(_), None, None) | (None, Some(_), Some(_)) => {}
                (Some(_), None, Some(_)) => {
                    let expected = "either the run's `steps` with a `share` for each phase, or `steps` in each phase";
                    return Err(TrainError::setting("steps", "given twice", expected));
                }
                (None, Some(_), None) => {
                    return Err(TrainError::setting(
                        "steps",
                        "missing",
                        "the run's steps, which phases have shares of",
                    ));
                }
                (Some(_), Some(_), _) | (None, None, _) => {
                    return Err(TrainError::setting(
                        "phase.steps",
                        "unclear",
                        "either `steps` or `share` in each phase",
                    ));
                }
            }
            if phase.warmup_steps.is_some() && phase.learning_rate.is_none() {
                let expected = "a `learning_rate` next to it: a phase without one follows the run's schedule";
                return Err(TrainError::setting("phase.warmup_steps", "alone", expected));
            }
        }
        for (batch_size, accumulation) in self.batches() {
            if batch_size == 0 || batch_size > 1 << 20 {
                return Err(TrainError::setting("batch_size", batch_size, "1 to 1048576"));
            }
            if accumulation == 0 || !batch_size.is_multiple_of(accumulation) {
                return Err(TrainError::setting("accumulation", accumulation, format!("a divisor of {batch_size}")));
            }
        }
        match &self.generator {
            Some(generator) if self.objective == Objective::ReplacedTokens => generator.check()?,
            Some(_) => return Err(replaced::no_generator()),
            None => {}
        }
        if self.objective == Objective::ReplacedTokens && self.mask_split != InstanceSettings::default().mask_split {
            let expected = "generator.mask_share instead: no random token is put into what a generator reads";
            return Err(TrainError::setting("mask_split", format!("{:?}", self.mask_split), expected));
        }
        AdafactorSettings::check(self.adafactor.as_ref(), self.optimizer)?;
        self.check_by_epoch()?;
        self.check_stream()?;
        self.instances(&Phase::default()).check()?;
        for phase in &self.phases {
            self.instances(phase).check()?;
        }
        Ok(())
    }

    /// Refuses the constants of a decay by epochs where there is none, and such as make no sense.
    fn check_by_epoch(&self) -> Result<()> {
        let by_epoch = self.schedule == ScheduleKind::ByEpoch;
        for (key, given) in
            [("decay_factor", self.decay_factor.is_some()), ("constant_epochs", self.constant_epochs.is_some())]
        {
            if given && !by_epoch {
                return Err(TrainError::setting(key, "given", "schedule = \"by-epoch\""));
            }
        }
        check_ranges(&[("decay_factor", self.decay_factor.unwrap_or(1.0), 1.0, 1e6)])
    }

    /// Running text is one phase: the rows of another would begin elsewhere.
    fn check_stream(&self) -> Result<()> {
        if self.packing == Packing::Stream && !self.phases.is_empty() {
            let expected = "one phase: running text is read in the same rows from the first step to the last";
            return Err(TrainError::setting("phase", "given", expected));
        }
        Ok(())
    }

    fn batches(&self) -> Vec<(usize, usize)> {
        let mut batches = vec![(self.batch_size, self.accumulation)];
        let own = |p: &Phase| (p.batch_size.unwrap_or(self.batch_size), p.accumulation.unwrap_or(self.accumulation));
        batches.extend(self.phases.iter().map(own));
        batches
    }

    /// What the instances of a phase are.
    pub fn instances(&self, phase: &Phase) -> InstanceSettings {
        let mut settings = InstanceSettings {
            sequence_length: phase.sequence_length.unwrap_or(self.sequence_length),
            objective: self.objective,
            packing: self.packing,
            long_sentences: self.long_sentences,
            separators: self.separators,
            short_sequences: self.short_sequences,
            masking: self.masking,
            mask_count: self.mask_count,
            mask_specials: self.mask_specials,
            mask_probability: phase.mask_probability.unwrap_or(self.mask_probability),
            max_predictions: phase.max_predictions.or(self.max_predictions),
            mask_split: self.mask_split,
            dupe_factor: self.dupe_factor,
            repeated_draws: false,
            mean_span: self.mean_span,
            noise: self.noise,
            permutation_size: self.permutation_size,
        };
        if self.objective == Objective::ReplacedTokens {
            let GeneratorSettings { mask_share, with_replacement, .. } = self.generator.clone().unwrap_or_default();
            let most = GeneratorSettings::most_predictions(settings.mask_probability, settings.sequence_length);
            settings.mask_split = [mask_share, 0.0, 1.0 - mask_share];
            settings.repeated_draws = with_replacement;
            settings.max_predictions.get_or_insert(most);
        }
        settings
    }

    /// The phases with everything that they do. `steps_of_epochs` turns the recipe's epochs into updates.
    pub fn resolve(&self, steps_of_epochs: impl Fn(f64) -> Result<u64>) -> Result<Vec<ResolvedPhase>> {
        let given = match (self.steps, self.epochs) {
            (Some(steps), _) => steps,
            (None, Some(epochs)) => steps_of_epochs(epochs)?.max(1),
            (None, None) if !self.phases.is_empty() => 0,
            (None, None) => return Err(TrainError::setting("steps", "missing", "a number of `steps`, or `epochs`")),
        };
        let whole = [Phase { share: Some(1.0), ..Phase::default() }];
        let phases = if self.phases.is_empty() { &whole[..] } else { &self.phases };
        let mut ends = Vec::new();
        let (mut end, mut shares) = (0, 0.0);
        for phase in phases {
            shares += phase.share.unwrap_or(0.0);
            end = match phase.steps {
                Some(steps) => end + steps,
                // Ends are rounded, not lengths: so they add up.
                None => (given as f64 * shares).round() as u64,
            };
            ends.push(end);
        }
        let total = end;
        if total == 0 || total > u64::from(u32::MAX) {
            return Err(TrainError::setting("steps", total, "1 to 4294967295 in all"));
        }
        let by_epoch = match self.schedule {
            ScheduleKind::ByEpoch => ByEpoch {
                steps: steps_of_epochs(1.0)?.max(1),
                constant: self.constant_epochs.unwrap_or(0),
                factor: self.decay_factor.unwrap_or(1.0),
            },
            _ => ByEpoch::default(),
        };
        // Gradient descent by epochs has no warm-up, unless it is asked for.
        let longest_warmup = if self.schedule == ScheduleKind::ByEpoch { 0 } else { 10_000 };
        let schedule = |peak, steps: u64, warmup: Option<u64>| Schedule {
            kind: self.schedule,
            peak,
            warmup_steps: warmup.unwrap_or((steps / 10).min(longest_warmup)),
            decay_steps: self.decay_steps.unwrap_or(steps / 10),
            steps,
            by_epoch,
        };
        let run = schedule(self.learning_rate, total, self.warmup_steps);
        let mut first_step = 0;
        let resolved = phases.iter().zip(ends).map(|(phase, end)| {
            let (start, steps) = (first_step, end - first_step);
            first_step = end;
            let own = phase.learning_rate.map(|peak| schedule(peak, steps, phase.warmup_steps));
            ResolvedPhase {
                first_step: start,
                steps,
                instances: self.instances(phase),
                batch_size: phase.batch_size.unwrap_or(self.batch_size),
                accumulation: phase.accumulation.unwrap_or(self.accumulation),
                schedule: own.unwrap_or(run),
                rate_from: if own.is_some() { start } else { 0 },
            }
        });
        Ok(resolved.collect())
    }

    /// Whether samples go into the log and the report.
    pub fn logs_samples(&self) -> bool {
        self.samples_in_report || !self.samples.is_empty()
    }

    /// The optimizer's constants.
    pub fn optimizer(&self) -> OptimizerSettings {
        let mut settings = self.optimizer.with([self.beta1, self.beta2], self.epsilon, self.weight_decay, self.clip);
        if let (Method::Adafactor(rule), Some(own)) = (&mut settings.method, self.adafactor) {
            *rule = own.into();
        }
        if self.packing == Packing::Stream && self.objective != Objective::Permutation {
            // The losses of an unrolled sequence are added up in Zaremba et al. (2014) and in ELMo's code; rates and clips are for that.
            settings.gradient_scale = self.sequence_length as f64;
        }
        settings
    }
}

/// What is below 1 and yet all that a factor may be.
pub const MOST_BELOW_1: f64 = 0.999_999_999;

/// Refuses values of a recipe outside of their ranges: each with its key, the least and the most.
pub fn check_ranges(ranges: &[(&'static str, f64, f64, f64)]) -> Result<()> {
    match ranges.iter().find(|(_, got, least, most)| !(least..=most).contains(&got)) {
        Some((key, got, least, most)) => Err(TrainError::setting(key, got, format!("{least} to {most}"))),
        None => Ok(()),
    }
}

/// Refuses counts of a recipe that are 0 or too large: each with its key and the most.
pub fn check_counts(counts: &[(&'static str, u64, u64)]) -> Result<()> {
    match counts.iter().find(|(_, got, most)| !(1..=*most).contains(got)) {
        Some((key, got, most)) => Err(TrainError::setting(key, got, format!("1 to {most}"))),
        None => Ok(()),
    }
}

/// Settings as TOML, with all defaults.
pub fn to_toml<T: Serialize>(settings: &T) -> Result<String> {
    toml::to_string_pretty(settings).map_err(|error| recipe_error("recipe", error))
}

/// Reads settings that consist of several TOML texts with their names, of which a later one overrules the earlier, and of
/// `key=value`s on top. Unknown keys are errors where the type says so.
pub fn parse_settings<T: DeserializeOwned>(layers: &[(&str, &str)], sets: &[String]) -> Result<T> {
    let mut table = Table::new();
    for (text, place) in layers {
        let error = |error: toml::de::Error| recipe_error(place, suggest(error.to_string().trim_end()));
        // Checked by itself first, so that an error shows its line.
        toml::from_str::<T>(text).map_err(error)?;
        let given = text.parse::<Table>().map_err(error)?;
        overrule(&mut table, |key| given.contains_key(key));
        table.extend(given);
    }
    overrule(&mut table, |key| sets.iter().any(|set| set.split('=').next().is_some_and(|name| name.trim() == key)));
    for set in sets {
        let error = |error: toml::de::Error| recipe_error(&format!("--set {set}"), suggest(error.message()));
        apply(&mut table, set)?;
        T::deserialize(table.clone()).map_err(error)?;
    }
    let place = layers.last().map_or("recipe", |(_, place)| place);
    T::deserialize(table).map_err(|error| recipe_error(place, suggest(error.message())))
}

/// Keys of which a recipe has one: that of a later text, or on top, is instead of the other in an earlier one.
const ONE_OF: [&str; 2] = ["steps", "epochs"];

/// Takes away what another key is given instead of.
fn overrule(table: &mut Table, given: impl Fn(&str) -> bool) {
    match ONE_OF.map(given) {
        [true, false] => table.remove(ONE_OF[1]),
        [false, true] => table.remove(ONE_OF[0]),
        _ => None,
    };
}

/// What serde says about a key that does not exist, with the one that was meant in place of all that there are.
fn suggest(problem: &str) -> String {
    let Some((before, rest)) = problem.split_once("unknown field `") else { return problem.to_owned() };
    let mut names = rest.split('`').step_by(2);
    let unknown = names.next().unwrap_or_default();
    let likeness = |name: &str| strsim::jaro_winkler(name, &unknown.replace('-', "_"));
    let best = names.map(|name| (likeness(name), name)).max_by(|a, b| a.0.total_cmp(&b.0));
    let meant = match best.filter(|(likeness, _)| *likeness > 0.8) {
        Some((_, name)) => format!("did you mean `{name}`? "),
        None => String::new(),
    };
    format!("{before}unknown setting `{unknown}`: {meant}`henson help settings` lists all")
}

/// What keeps a run of `old` settings from resuming with the `new` ones, a line each: not those that `may_change`, nor
/// numbers that `may_rise` and did.
pub fn differences<T: Serialize>(old: &T, new: &T, may_change: &[&str], may_rise: &[&str]) -> Result<Vec<String>> {
    let table = |settings: &T| Table::try_from(settings).map_err(|error| recipe_error("recipe", error));
    let (mut old, mut new) = (table(old)?, table(new)?);
    // Keys within tables, such as `distil.cache`.
    for (outer, inner) in may_change.iter().filter_map(|key| key.split_once('.')) {
        for settings in [&mut old, &mut new] {
            settings.get_mut(outer).and_then(Value::as_table_mut).map(|table| table.remove(inner));
        }
    }
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    let number = |value: Option<&Value>| value.and_then(|v| v.as_float().or(v.as_integer().map(|n| n as f64)));
    let mut differences = Vec::new();
    for key in keys {
        let (was, is) = (old.get(key), new.get(key));
        let raised = may_rise.contains(&key.as_str()) && number(is) >= number(was) && was.is_some();
        if was != is && !may_change.contains(&key.as_str()) && !raised {
            let show = |value: Option<&Value>| value.map_or("not given".to_owned(), |v| v.to_string());
            differences.push(format!("  {key}: was {}, now {}", show(was), show(is)));
        }
    }
    Ok(differences)
}

fn recipe_error(place: &str, problem: impl ToString) -> TrainError {
    TrainError::Recipe { place: place.to_owned(), problem: problem.to_string() }
}

/// Sets `key=value` in a table. Keys may lead into tables and lists: `config.hidden_size=192`, `phase.0.steps=10`. What is
/// no TOML value is taken as text.
fn apply(table: &mut Table, set: &str) -> Result<()> {
    let place = format!("--set {set}");
    let Some((path, text)) = set.split_once('=') else {
        return Err(recipe_error(&place, "expected key=value, such as steps=1000"));
    };
    let (path, text) = (path.trim(), text.trim());
    let value = format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
    let value = value.unwrap_or_else(|| Value::String(text.to_owned()));
    let mut parts = path.split('.').peekable();
    let Some(first) = parts.next().filter(|first| !first.is_empty()) else {
        return Err(recipe_error(&place, "the key is empty"));
    };
    let mut target = match parts.peek() {
        None => {
            table.insert(first.to_owned(), value);
            return Ok(());
        }
        Some(item) if item.parse::<usize>().is_ok() && !table.contains_key(first) => {
            return Err(recipe_error(&place, format!("there is no list `{first}`: give a recipe with [[{first}]]")));
        }
        Some(_) => table.entry(first).or_insert_with(|| Value::Table(Table::new())),
    };
    while let Some(part) = parts.next() {
        let next = match target {
            Value::Table(table) => table.entry(part).or_insert_with(|| Value::Table(Table::new())),
            Value::Array(list) => {
                let count = list.len();
                let item = part.parse::<usize>().ok().and_then(|i| list.get_mut(i));
                item.ok_or_else(|| {
                    recipe_error(&place, format!("`{part}` is not one of the {count} items, which are numbered from 0"))
                })?
            }
            _ => return Err(recipe_error(&place, format!("`{part}` is nested under a value that is not a table"))),
        };
        if parts.peek().is_none() {
            *next = value;
            return Ok(());
        }
        target = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, sets: &[&str]) -> Result<Recipe> {
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
        Recipe::parse(text, "r.toml", &sets)
    }

    #[test]
    fn defaults_survive_and_sets_win() {
        let recipe =
            parse("steps = 10\nlearning_rate = 3e-4", &["batch_size=8", "config.hidden_size=64", "model=bert-tiny"])
                .unwrap();
        assert_eq!((recipe.steps, recipe.batch_size, recipe.learning_rate), (Some(10), 8, 3e-4));
        assert_eq!(recipe.config["hidden_size"].as_integer(), Some(64));
        assert_eq!(recipe.model, "bert-tiny");
        assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
        let phased = parse("[[phase]]\nsteps = 3\n[[phase]]\nsteps = 4", &["phase.1.steps=5"]).unwrap();
        assert_eq!(phased.phases[1].steps, Some(5));
    }

    #[test]
    fn mistakes_are_named() {
        let cases: [(&str, &[&str], &str); 24] = [
            ("steps = 10", &["lerning-rate=1"], "did you mean `learning_rate`?"),
            ("[[phase]]\nsteps = 1\nbatchsize = 2", &[], "did you mean `batch_size`?"),
            ("step = 10", &[], "unknown setting `step`: did you mean `steps`?"),
            ("steps = 10\nlearning_rat = 1", &[], "line 2"),
            ("steps = \"many\"", &[], "line 1"),
            ("steps = 10", &["nothing"], "expected key=value"),
            ("steps = 10", &["=1"], "the key is empty"),
            ("steps = 10", &["quux=1"], "unknown setting `quux`: `henson help settings` lists all"),
            ("steps = 10", &["phase.0.steps=1"], "phase"),
            ("[[phase]]\nsteps = 1", &["phase.3.steps=1"], "not one of the 1 items"),
            ("steps = 10\nepochs = 2", &[], "either `steps` or `epochs`"),
            ("batch_size = 8", &["steps=10", "epochs=2.0"], "either `steps` or `epochs`"),
            ("steps = 0", &[], "`steps` is 0"),
            ("batch_size = 10\naccumulation = 4", &[], "a divisor of 10"),
            ("objective = \"magic\"", &[], "mlm-nsp"),
            ("mask_split = [0.5, 0.1, 0.1]", &[], "mask_split"),
            ("steps = 9\n[[phase]]\nshare = 0.5", &[], "a sum of 1"),
            ("steps = 9\n[[phase]]\nsteps = 9", &[], "given twice"),
            ("[[phase]]\nsteps = 9\nwarmup_steps = 2", &[], "learning_rate"),
            ("label_smoothing = 1.0", &[], "label_smoothing"),
            ("objective = \"span-boundary\"\nlabel_smoothing = 0.1", &[], "without it"),
            ("adafactor.min_side = 1", &[], "optimizer = \"adafactor\""),
            ("optimizer = \"adafactor\"", &["adafactor.update_clip=0.0"], "adafactor.update_clip"),
            ("noise.deletion = 0.1", &[], "objective = \"denoising\""),
        ];
        for (text, sets, expected) in cases {
            let error = parse(text, sets).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_later_of_steps_and_epochs_counts() {
        let found = |recipe: Recipe| (recipe.steps, recipe.epochs);
        assert_eq!(found(parse("epochs = 13.0", &["steps=10"]).unwrap()), (Some(10), None));
        assert_eq!(found(parse("steps = 10", &["epochs = 2.5"]).unwrap()), (None, Some(2.5)));
        let layers = [("steps = 10", "base"), ("epochs = 2.0", "variant")];
        assert_eq!(found(Recipe::parse_layers(&layers, &[]).unwrap()), (None, Some(2.0)));
        assert_eq!(found(Recipe::parse_layers(&layers, &["steps=3".to_owned()]).unwrap()), (Some(3), None));
    }

    #[test]
    fn phases_add_up_and_have_their_rates() {
        let never = |_| -> Result<u64> { unreachable!("no epochs") };
        let text = "steps = 1001\nlearning_rate = 1.0\nwarmup_steps = 100\n[[phase]]\nshare = 0.9\n[[phase]]\nshare = 0.1\nsequence_length = 512\nbatch_size = 16";
        let phases = parse(text, &[]).unwrap().resolve(never).unwrap();
        assert_eq!(phases.iter().map(|p| (p.first_step, p.steps)).collect::<Vec<_>>(), [(0, 901), (901, 100)]);
        assert_eq!((phases[1].instances.sequence_length, phases[1].batch_size, phases[0].batch_size), (512, 16, 32));
        assert_eq!((phases[1].rate_from, phases[1].schedule.steps), (0, 1001));

        let text = "[[phase]]\nsteps = 10\n[[phase]]\nsteps = 20\nlearning_rate = 0.5\nwarmup_steps = 4";
        let phases = parse(text, &[]).unwrap().resolve(never).unwrap();
        assert_eq!((phases[1].rate_from, phases[1].schedule.steps, phases[1].schedule.peak), (10, 20, 0.5));
        assert_eq!(phases[0].schedule.steps, 30);

        let phases = parse("epochs = 2.0", &[]).unwrap().resolve(|epochs| Ok((epochs * 50.0) as u64)).unwrap();
        assert_eq!(phases[0].steps, 100);
        assert!(parse("", &[]).unwrap().resolve(never).unwrap_err().to_string().contains("`steps` is missing"));
    }

    #[test]
    fn what_may_change_when_a_run_goes_on() {
        let old = parse("steps = 10", &[]).unwrap();
        let differences = |sets: &[&str]| {
            differences(&old, &parse("steps = 10", sets).unwrap(), Recipe::MAY_CHANGE, Recipe::MAY_RISE).unwrap()
        };
        assert_eq!(differences(&["steps=20", "eval_every=3"]), [""; 0]);
        assert_eq!(differences(&["steps=5"]), ["  steps: was 10, now 5"]);
        assert_eq!(
            differences(&["learning_rate=1.0", "dropout=0.0"]),
            ["  dropout: was not given, now 0.0", "  learning_rate: was 0.0001, now 1.0"]
        );
    }
}
