//! ELECTRA's pre-training (Clark et al. 2020): a generator fills masks, and a discriminator says of every token whether that replaced
//! it. Both stand over the same tables, in one flat buffer, and run on one tape; the draws between them have no gradient.
//!
//! Legend: T tokens, P places that are predicted.

use std::collections::BTreeMap;

use henson_data::Part;
use henson_models::{Batch, Capture, Model, ModelConfig, Sequence};
use henson_tensor::{Bits, Device, Pass, Tensor, TensorError, Training, Var};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::losses::LossNames;
use crate::objective::{Masked, Objective};
use crate::recipe::check_ranges;
use crate::trainer::{Engine, Evaluation};

/// The place of the draws among all that a pass draws.
const DRAWS: u32 = 0xfe00;

/// What draws replacements in evaluations: the same in all of them.
const HELD_OUT: Training = Training { seed: 0, step: 0 };

/// The generator of replaced tokens, and what is trained with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GeneratorSettings {
    /// Width of the generator as a factor of the discriminator's; heads are 64 wide, feed-forward layers four times as wide as the
    /// generator. By default a quarter, of a width of 768 a third.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<f64>,
    /// Number of layers of the generator; by default as many as the discriminator has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
    /// Weight of the generator's masked-LM loss, a mean over predicted tokens.
    pub weight: f64,
    /// Weight of the discriminator's loss, a mean over all tokens.
    pub detection_weight: f64,
    /// Share of the drawn tokens that the generator sees as `[MASK]`; it sees the others as they are, and predicts them as well. The
    /// paper's text says all, its code 0.85.
    pub mask_share: f64,
    /// Draw tokens with replacement, as the paper's code does: one that is drawn twice counts twice in the generator's loss, and of
    /// 15% about 13.9% are left.
    pub with_replacement: bool,
    /// What the generator's logits are divided by before replacements are drawn.
    pub temperature: f64,
    /// Never draw the token that stood there, so that every drawn token is replaced.
    pub disallow_correct: bool,
}

impl Default for GeneratorSettings {
    fn default() -> Self {
        Self {
            size: None,
            layers: None,
            weight: 1.0,
            detection_weight: 50.0,
            mask_share: 0.85,
            with_replacement: false,
            temperature: 1.0,
            disallow_correct: false,
        }
    }
}

impl GeneratorSettings {
    /// Refuses what makes no sense.
    pub(crate) fn check(&self) -> Result<()> {
        check_ranges(&[
            ("generator.size", self.size.unwrap_or(1.0), 1e-3, 16.0),
            ("generator.layers", self.layers.unwrap_or(1) as f64, 1.0, 1024.0),
            ("generator.weight", self.weight, 1e-6, 1e6),
            ("generator.detection_weight", self.detection_weight, 1e-6, 1e6),
            ("generator.mask_share", self.mask_share, 0.0, 1.0),
            ("generator.temperature", self.temperature, 1e-3, 1e3),
        ])
    }

    /// Maximum number of tokens that are drawn from a sequence, by default: as in the paper's code, where it is a bound of tensors.
    pub(crate) fn most_predictions(mask_probability: f64, sequence_length: usize) -> usize {
        (((mask_probability + 0.005) * sequence_length as f64) as usize).max(1)
    }

    pub(crate) fn objective(&self) -> ReplacedTokens {
        ReplacedTokens { temperature: Bits::from(self.temperature as f32), disallow_correct: self.disallow_correct }
    }

    /// What the losses are multiplied with, in their order.
    pub(crate) fn weights(&self) -> [f64; 2] {
        [self.weight, self.detection_weight]
    }
}

/// Masked LM of a generator, and replaced tokens of a discriminator.
#[derive(Clone, Copy, Debug, Hash)]
pub struct ReplacedTokens {
    /// What the generator's logits are divided by for its draws.
    pub temperature: Bits,
    /// Whether the token that stood there is never drawn.
    pub disallow_correct: bool,
}

/// What one prediction counts: one over their number in the whole step, times the weight of the loss.
#[derive(Clone, Copy, Debug)]
pub struct PerPrediction {
    /// A masked token.
    pub masked: f32,
    /// Any token, which is replaced or not.
    pub token: f32,
}

impl Objective for ReplacedTokens {
    /// What predictions count is in the inputs: it differs from step to step.
    type Part<'p> = (&'p Part, PerPrediction);
    type Inputs = ReplacedInputs;

    fn names(&self) -> LossNames {
        &["mlm_loss", "rtd_loss"]
    }

    fn inputs(&self, device: &Device, config: &ModelConfig, (part, per): Self::Part<'_>) -> Result<ReplacedInputs> {
        ReplacedInputs::new(device, config, part, per)
    }

    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &ReplacedInputs) -> Result<Vec<Tensor>> {
        let (logits, vocabulary) = self.fill(model, pass, inputs)?;
        let drawn = self.draw(pass, &logits, vocabulary, inputs)?;
        let Masked { targets, weights, .. } = &inputs.masked;
        let (masked, _) = pass.cross_entropy(logits, vocabulary, targets, weights.as_ref(), 1.0)?;
        let (logits, labels) = self.detect(model, pass, inputs, &drawn)?;
        let replaced = pass.binary_cross_entropy(logits, &labels, Some(&inputs.weights), 1.0)?;
        Ok(vec![masked, replaced])
    }
}

impl ReplacedTokens {
    /// The generator's logits at the places to predict, and how many of a row count.
    fn fill(&self, model: &Model, pass: &mut Pass<'_>, inputs: &ReplacedInputs) -> Result<(Var, usize)> {
        let why = "the model was built without a generator";
        let generator = model.generator().ok_or(TensorError::Unsupported { operation: "replaced tokens", why })?;
        let last = generator.encode(pass, &inputs.batch, Capture::default())?.last;
        let logits = generator.logits_of(pass, last, &inputs.batch.layout, Some(&inputs.masked.rows))?;
        Ok((logits, generator.config().sizes().vocab_size))
    }

    /// What the generator puts there: P.
    fn draw(&self, pass: &mut Pass<'_>, logits: &Var, vocabulary: usize, inputs: &ReplacedInputs) -> Result<Tensor> {
        let Masked { rows, targets, .. } = &inputs.masked;
        let never = self.disallow_correct.then_some(targets);
        let from = pass.randomness().unwrap_or(HELD_OUT);
        let places = (&inputs.batch.layout, rows);
        Ok(pass.sample(logits, vocabulary, self.temperature.get(), places, never, (from, DRAWS))?)
    }

    /// The discriminator's logits of the text with the draws in it, and its labels: T each.
    fn detect(
        &self,
        model: &Model,
        pass: &mut Pass<'_>,
        inputs: &ReplacedInputs,
        drawn: &Tensor,
    ) -> Result<(Var, Tensor)> {
        let (ids, labels) = pass.replace_tokens(&inputs.original, &inputs.masked.rows, drawn)?;
        let batch = inputs.batch.with_ids(ids);
        let last = model.encode(pass, &batch, Capture::default())?.last;
        Ok((model.logits_of(pass, last, &batch.layout, None)?, labels))
    }
}

/// A part of a step on the device.
#[derive(Debug)]
pub struct ReplacedInputs {
    /// What the generator reads.
    batch: Batch,
    /// The text as it was: T.
    original: Tensor,
    masked: Masked,
    /// What each token counts: T.
    weights: Tensor,
}

impl ReplacedInputs {
    fn new(device: &Device, config: &ModelConfig, part: &Part, per: PerPrediction) -> Result<Self> {
        let mut sequences = Vec::with_capacity(part.lengths.len());
        let mut start = 0;
        for length in &part.lengths {
            let range = start..start + length;
            sequences.push(Sequence { ids: &part.ids[range.clone()], segments: &part.segments[range] });
            start += length;
        }
        let batch = Batch::new(device, config, &sequences, part.first_number)?;
        // What was drawn twice is predicted once, and counts twice: no row may be named more than once.
        let drawn: Vec<(u32, u32)> = part.rows.iter().copied().zip(part.targets.iter().copied()).collect();
        let (mut rows, mut targets, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        let (mut original, mut of_tokens) = (part.ids.clone(), vec![per.token; part.ids.len()]);
        for same in drawn.chunk_by(|a, b| a.0 == b.0) {
            let (row, target) = same[0];
            original[row as usize] = target;
            rows.push(row);
            targets.push(target);
            weights.push(per.masked * same.len() as f32);
        }
        let rounded = device.rounded(rows.len());
        rows.resize(rounded, Device::NOWHERE);
        targets.resize(rounded, 0);
        weights.resize(rounded, 0.0);
        let tokens = batch.layout.tokens();
        original.resize(tokens, 0);
        of_tokens.resize(tokens, 0.0);
        let masked = Masked {
            rows: Tensor::from_slice(device, [rounded], &rows)?,
            targets: Tensor::from_slice(device, [rounded], &targets)?,
            weights: Some(Tensor::from_slice(device, [rounded], &weights)?),
        };
        let original = Tensor::from_slice(device, [tokens], &original)?;
        Ok(Self { batch, original, masked, weights: Tensor::from_slice(device, [tokens], &of_tokens)? })
    }
}

/// How good generator and discriminator are on held-out parts, with the same draws each time.
pub(crate) fn evaluate(
    engine: &mut Engine,
    settings: &GeneratorSettings,
    held_out: &[Part],
) -> Result<Option<Evaluation>> {
    if held_out.is_empty() {
        return Ok(None);
    }
    let objective = settings.objective();
    let once = PerPrediction { masked: 1.0, token: 1.0 };
    let readings = engine.look_around(held_out.len(), |engine, i| {
        engine.look(
            objective,
            |device, config| ReplacedInputs::new(device, config, &held_out[i], once),
            |objective, model, pass, inputs| {
                let (logits, vocabulary) = objective.fill(model, pass, inputs)?;
                let drawn = objective.draw(pass, &logits, vocabulary, inputs)?;
                let Masked { targets, weights, .. } = &inputs.masked;
                let right = pass.count_correct(&logits, vocabulary, targets, weights.as_ref())?;
                let masked = pass.cross_entropy(logits, vocabulary, targets, weights.as_ref(), 1.0)?.0;
                let (logits, labels) = objective.detect(model, pass, inputs, &drawn)?;
                let [replaced, said, both] = pass.count_found(&logits, &labels, &inputs.weights)?;
                let loss = pass.binary_cross_entropy(logits, &labels, Some(&inputs.weights), 1.0)?;
                Ok(vec![masked, right, loss, replaced, said, both])
            },
        )
    })?;
    let predicted: usize = held_out.iter().map(|part| part.rows.len()).sum();
    let places: usize = held_out.iter().map(|part| part.rows.chunk_by(|a, b| a == b).count()).sum();
    let tokens: usize = held_out.iter().map(|part| part.ids.len()).sum();
    let mut sums = [0.0; 6];
    for reading in readings {
        sums.iter_mut().zip(reading.wait()?).for_each(|(sum, number)| *sum += number);
    }
    let [masked, right, detected, replaced, said, both] = sums;
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let (masked, detected) = (share(masked, predicted as f64), share(detected, tokens as f64));
    let [weight, detection_weight] = settings.weights();
    let loss = weight * masked + detection_weight * detected;
    let metrics = [
        ("loss", loss),
        ("mlm_loss", masked),
        ("mlm_accuracy", share(right, places as f64)),
        ("rtd_loss", detected),
        ("rtd_accuracy", 1.0 - share(replaced + said - 2.0 * both, tokens as f64)),
        ("rtd_precision", share(both, said)),
        ("rtd_recall", share(both, replaced)),
        ("rtd_f1", share(2.0 * both, said + replaced)),
        ("replaced", share(replaced, tokens as f64)),
    ];
    let metrics: BTreeMap<String, f64> = metrics.into_iter().map(|(name, number)| (name.to_owned(), number)).collect();
    Ok(Some(Evaluation { metrics, score: loss, loss: None }))
}

/// A recipe's settings of a generator, which only this objective has.
pub(crate) fn no_generator() -> TrainError {
    TrainError::setting("generator", "given", "objective = \"replaced-tokens\", or no generator")
}
