//! A model: a network, a head and a config. What a family is made of stays inside of this crate; other crates see this type.
//!
//! Legend: B sequences, T tokens in the flat batch, H hidden, V vocabulary, P predicted tokens.

use std::fmt::Debug;
use std::sync::Arc;

use henson_tensor::{
    Activation, Builder, CrfParams, Layout, LegalSteps, Param, Parameters, Pass, RecurrentState, Result, Tensor,
    TensorError, Var,
};

use crate::beams::BeamHead;
use crate::heads::{Classifier, HeadParts};
use crate::layers::diagonal;
use crate::{Batch, Decoder, Family, Head, ModelConfig};

/// A network without a head: tokens in, a vector per token out.
pub trait Network: Debug + Send + Sync {
    /// The last hidden states of a batch, and what else is asked for.
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded>;

    /// The last hidden states at the rows named (P) alone: P×H. The last layer then works on these rows only, a sixth of a
    /// small model's time where few are needed. For inference: there is no dropout in it.
    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var>;

    /// Makes the last layer give every token the mean of its sequence's vectors. The layer is one that was just initialised.
    fn average_in_last_layer(&self, parameters: &mut Parameters) -> Result<()>;

    /// The table of words, V×H, which the masked-LM head uses once more.
    fn word_table(&self) -> Param;

    /// The layer that turns a block's input into queries, keys and values side by side, 3H×H and its bias, where it is one that reads the
    /// input as it is.
    fn query_key_value(&self, _block: usize) -> Option<(Param, Option<Param>)> {
        None
    }

    /// What writes token by token, where the network can.
    fn decoder(&self) -> Option<&dyn Decoder> {
        None
    }
}

/// What [`Network::encode`] shall give beside the last hidden states.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capture {
    /// The embeddings' output and every layer's.
    pub hidden_states: bool,
    /// The attention's probabilities of every layer.
    pub attention_maps: bool,
}

/// The encoder's output.
#[derive(Debug)]
pub struct Encoded {
    /// T×H.
    pub last: Var,
    /// L + 1 of T×H, on request.
    pub hidden_states: Vec<Var>,
    /// L tensors with A×S×S numbers for each sequence in turn, on request.
    pub attention_maps: Vec<Tensor>,
    /// What every recurrent layer ends with; none of other networks.
    pub states: Vec<RecurrentState>,
}

/// A network with a head: views into flat parameters.
#[derive(Clone, Debug)]
pub struct Model {
    config: ModelConfig,
    head: Head,
    network: Arc<dyn Network>,
    parts: HeadParts,
    /// The model that draws what this one shall detect, over the same tables.
    generator: Option<Arc<Model>>,
    /// Which labels may follow each other, where a field scores them together.
    legal_steps: Option<Arc<LegalSteps>>,
}

impl Model {
    /// Lays out the parameters of a model with a head, under the names that `transformers` gives them. A head that the family
    /// does not have is an error.
    pub fn build(b: &mut Builder, config: &ModelConfig, head: Head) -> Result<Self> {
        if !config.family().has_head(head) {
            return Err(TensorError::Unsupported { operation: "build", why: "this family of models has no such head" });
        }
        Ok(config.build(b, head))
    }

    /// Lays out a model that detects replaced tokens, and the generator that it is trained with: its own parameters stand behind
    /// [`Model::GENERATOR`], the tables are the first one's. An error where the family has no such pair.
    pub fn build_with_generator(b: &mut Builder, config: &ModelConfig, generator: &ModelConfig) -> Result<Self> {
        let why = "this family of models has no generator, or the two differ in their tables";
        config.build_pair(b, generator).ok_or(TensorError::Unsupported { operation: "build", why })
    }

    /// What stands before the names of a generator's own parameters.
    pub const GENERATOR: &'static str = "generator.";

    pub(crate) fn new(config: ModelConfig, head: Head, network: impl Network + 'static, parts: HeadParts) -> Self {
        Self { config, head, network: Arc::new(network), parts, generator: None, legal_steps: None }
    }

    pub(crate) fn with_generator(self, generator: Model) -> Self {
        Self { generator: Some(Arc::new(generator)), ..self }
    }

    /// The model that draws what this one shall detect, where it was built with one.
    pub fn generator(&self) -> Option<&Model> {
        self.generator.as_deref()
    }

    /// What it was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its family.
    pub fn family(&self) -> &'static Family {
        self.config.family()
    }

    /// Its head.
    pub fn head(&self) -> Head {
        self.head
    }

    /// The encoder: embeddings and all layers.
    pub fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        self.network.encode(pass, batch, capture)
    }

    /// Whether [`Model::query_key_value`] has those of a block.
    pub fn has_query_key_value(&self, block: usize) -> bool {
        self.network.query_key_value(block).is_some()
    }

    /// Queries, keys and values of a block side by side, T×3H, from its input, which is the hidden state of that number. Computed once more
    /// beside those that the block attends with, so that a loss on them has a gradient of its own.
    pub fn query_key_value(&self, pass: &mut Pass<'_>, block: usize, x: &Var) -> Result<Var> {
        let why = "queries, keys and values of this family of models do not come from the hidden states alone";
        let (weight, bias) = part(self.network.query_key_value(block), "query_key_value", why)?;
        pass.linear(x, weight, bias, Activation::None)
    }

    /// What writes token by token, where the network can; its hidden states go through [`Model::logits_of`].
    pub fn decoder(&self) -> Option<&dyn Decoder> {
        self.network.decoder()
    }

    /// The encoder's output at the rows named alone; see [`Network::encode_rows`].
    pub fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        if pass.is_training() {
            return Err(TensorError::Unsupported { operation: "encode_rows", why: "it has no dropout" });
        }
        self.network.encode_rows(pass, batch, rows)
    }

    /// tanh(dense(first token)): B×H.
    pub fn pooled(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout) -> Result<Var> {
        let pooler = part(self.parts.pooler, "pooled", "the model was built without a pooler")?;
        let first = pass.first_tokens(last, layout)?;
        pooler.forward(pass, &first, Activation::Tanh)
    }

    /// The head's logits for a batch; see [`logits_of`](Self::logits_of). In inference, a head that reads one token of a sequence
    /// makes the last layer compute no other.
    pub fn logits(&self, pass: &mut Pass<'_>, batch: &Batch, rows: Option<&Tensor>) -> Result<Var> {
        let layout = batch.output_layout();
        let reads = self.parts.classifier.and_then(|head| head.pooling.rows(layout));
        if let (None, Some(read), false) = (rows, reads, pass.is_training() || self.head.reads_tokens()) {
            let read = self.encode_rows(pass, batch, read)?;
            return self.classifier()?.of_sequences(pass, read, layout);
        }
        let last = self.encode(pass, batch, Capture::default())?.last;
        self.logits_of(pass, last, batch.output_layout(), rows)
    }

    /// The head's logits from the last hidden states. With rows (P), the vocabulary's there: P×V, the columns padded to a
    /// multiple of 64. Without, T×labels of a token head, T×2 (start and end) of a span head, and B×labels of a sequence head, of
    /// choices (one label) and of next sentence (0 next, 1 random).
    pub fn logits_of(&self, pass: &mut Pass<'_>, last: Var, layout: &Layout, rows: Option<&Tensor>) -> Result<Var> {
        if let Some(rows) = rows {
            let head = part(self.parts.vocabulary, "logits", "the model has no masked-LM head")?;
            return head.forward(pass, &last, rows, self.network.word_table());
        }
        if self.head.reads_tokens() {
            return self.classifier()?.of_tokens(pass, last, layout);
        }
        let classifier = self.classifier()?;
        let pooled = classifier.pool(pass, &last, layout)?;
        classifier.of_sequences(pass, pooled, layout)
    }

    /// The vocabulary's logits of masked spans from the last hidden states: P×V, the columns padded. `ends` has two rows for each
    /// target, those before and behind its span, `places` its place within the span, below
    /// [`BOUNDARY_TARGETS`](crate::BOUNDARY_TARGETS).
    pub fn boundary_logits(
        &self,
        pass: &mut Pass<'_>,
        last: &Var,
        layout: &Layout,
        ends: &Tensor,
        places: &Tensor,
    ) -> Result<Var> {
        let head = part(self.parts.boundary, "boundary_logits", "the model has no head for the boundaries of spans")?;
        head.forward(pass, last, layout, (ends, places), self.network.word_table())
    }

    /// The parts of a [`Head::BeamSpan`], which has no logits but in answer to others.
    pub fn beams(&self) -> Option<&BeamHead> {
        self.parts.beams.as_ref()
    }

    /// What scores the labels of a sequence's tokens together, on the logits of a token head.
    pub fn crf(&self) -> Option<&CrfParams> {
        self.parts.crf.as_ref()
    }

    /// The same where only some labels may follow each other, as those of entities: the best sequence of labels is one of these. A loss
    /// knows nothing of it.
    pub fn with_legal_steps(self, legal: Option<LegalSteps>) -> Self {
        Self { legal_steps: legal.map(Arc::new), ..self }
    }

    /// Which labels may follow each other; none: all.
    pub fn legal_steps(&self) -> Option<&LegalSteps> {
        self.legal_steps.as_deref()
    }

    fn classifier(&self) -> Result<Classifier> {
        part(self.parts.classifier, "logits", "the model has no classifier")
    }

    /// Sets a model with a sequence head, whose last layer and head were just initialised, up for a linear head on the mean of
    /// the vectors before that layer: the layer averages, and the hidden layer of the head lets the mean through.
    pub fn average(&self, parameters: &mut Parameters) -> Result<LinearHead> {
        let no_head = "a linear head is a sequence classifier with a hidden layer of tanh, ReLU or GELU";
        let classifier = part(self.parts.classifier, "average", no_head)?;
        let (dense, activation) = part(classifier.hidden, "average", no_head)?;
        // LayerNorm's output has a variance of 1: tanh(0.1·x) bends it by a few thousandths, and x + 8 is hardly ever negative.
        let (scale, shift) = match activation {
            Activation::Tanh => (0.1, 0.0),
            Activation::Relu | Activation::Gelu | Activation::GeluTanh => (1.0, 8.0),
            _ => return Err(TensorError::Unsupported { operation: "average", why: no_head }),
        };
        let h = self.config.sizes().hidden_size;
        self.network.average_in_last_layer(parameters)?;
        parameters.set(dense.weight, &diagonal(h, scale))?;
        let (bias, out_bias) = (part(dense.bias, "average", no_head)?, part(classifier.out.bias, "average", no_head)?);
        parameters.set(bias, &vec![shift; h])?;
        Ok(LinearHead { weight: classifier.out.weight, bias: out_bias, activation, scale, shift })
    }
}

/// What remains to be fitted after [`Model::average`].
#[derive(Clone, Copy, Debug)]
pub struct LinearHead {
    weight: Param,
    bias: Param,
    activation: Activation,
    scale: f32,
    shift: f32,
}

impl LinearHead {
    /// What the last layer of the head sees of a number of the mean, as near to it as the hidden layer allows.
    pub fn feature(&self, mean: f32) -> f64 {
        let hidden = self.scale * mean + self.shift;
        // Where it is positive by so much, GELU is ReLU.
        let hidden = if self.activation == Activation::Tanh { hidden.tanh() } else { hidden.max(0.0) };
        f64::from((hidden - self.shift) / self.scale)
    }

    /// Sets the head to weights (labels×H) and biases that were fitted on features.
    pub fn set(&self, parameters: &mut Parameters, weights: &[f64], biases: &[f64]) -> Result<()> {
        let (scale, shift) = (f64::from(self.scale), f64::from(self.shift));
        let h = weights.len() / biases.len().max(1);
        let scaled: Vec<f32> = weights.iter().map(|w| (w / scale) as f32).collect();
        let shifted = biases.iter().zip(weights.chunks(h.max(1)));
        let shifted: Vec<f32> = shifted.map(|(b, w)| (b - w.iter().sum::<f64>() * shift / scale) as f32).collect();
        parameters.set(self.weight, &scaled)?;
        parameters.set(self.bias, &shifted)
    }
}

/// A part that only some heads have.
fn part<T>(part: Option<T>, operation: &'static str, why: &'static str) -> Result<T> {
    part.ok_or(TensorError::Unsupported { operation, why })
}
