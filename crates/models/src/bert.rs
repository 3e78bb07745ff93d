//! BERT (Devlin et al. 2019): a bidirectional encoder with post-norm blocks, and its heads. Losses are not here.
//!
//! Legend: B sequences, T tokens in the flat batch, H hidden, A heads, V vocabulary, P predicted tokens.

use henson_tensor::{
    Activation, Builder, EmbeddingTables, Init, Layout, Norm, Param, Pass, Result, Tensor, TensorError, Var,
};

use crate::layers::{BLOCK_SITES, Block, BlockSettings, Linear, layer_norm};
use crate::{Batch, BertConfig, Naming};

/// The names in BERT's checkpoints.
pub const NAMING: Naming = Naming {
    base_prefix: "bert.",
    old_endings: &[("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")],
    tied: &[
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
    ignored_endings: &["embeddings.position_ids", "embeddings.token_type_ids"],
};

/// Dropout sites: the embeddings', then those of the blocks, then the head's.
const EMBEDDING_SITE: u32 = 0;
const HEAD_SITE: u32 = 0xff00;

/// What stands on the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Nothing at all: `BertModel` without its pooler, for features and embeddings.
    Encoder,
    /// Nothing but the pooler: `BertModel`.
    Pooler,
    /// Masked LM and next sentence: `BertForPreTraining`.
    PreTraining,
    /// Masked LM alone: `BertForMaskedLM`.
    MaskedLm,
    /// One vector of logits a sequence: `BertForSequenceClassification`.
    Sequence {
        /// Logits; 1 for regression.
        labels: usize,
    },
    /// One vector of logits a token: `BertForTokenClassification`.
    Token {
        /// Logits.
        labels: usize,
    },
    /// A start and an end logit for each token: `BertForQuestionAnswering`.
    Span,
    /// One logit a sequence, compared among the choices of an example: `BertForMultipleChoice`.
    Choice,
}

impl Head {
    /// The class of `transformers` with these parameters.
    pub fn architecture(self) -> &'static str {
        match self {
            Head::Encoder | Head::Pooler => "BertModel",
            Head::PreTraining => "BertForPreTraining",
            Head::MaskedLm => "BertForMaskedLM",
            Head::Sequence { .. } => "BertForSequenceClassification",
            Head::Token { .. } => "BertForTokenClassification",
            Head::Span => "BertForQuestionAnswering",
            Head::Choice => "BertForMultipleChoice",
        }
    }

    /// The head that a config's `architectures` names, if it is one of ours.
    pub fn of_config(config: &BertConfig) -> Option<Self> {
        let labels = config.labels();
        let all = [
            Head::Pooler,
            Head::PreTraining,
            Head::MaskedLm,
            Head::Sequence { labels },
            Head::Token { labels },
            Head::Span,
            Head::Choice,
        ];
        let name = config.architectures.first()?;
        // A left-to-right model: the same parameters under another name.
        if name == "BertLMHeadModel" {
            return Some(Head::MaskedLm);
        }
        all.into_iter().find(|head| head.architecture() == name)
    }

    /// Whether the parameters include the pooler, as in `transformers`.
    fn has_pooler(self) -> bool {
        matches!(self, Head::Pooler | Head::PreTraining | Head::Sequence { .. } | Head::Choice)
    }
}

/// A BERT: views into its parameters.
#[derive(Clone, Debug)]
pub struct Bert {
    config: BertConfig,
    head: Head,
    word_embeddings: Param,
    position_embeddings: Param,
    token_type_embeddings: Param,
    embedding_norm: Norm,
    layers: Vec<Block>,
    pooler: Option<Linear>,
    predictions: Option<Predictions>,
    /// `cls.seq_relationship`, `classifier` or `qa_outputs`.
    classifier: Option<Linear>,
}

/// The masked-LM head: a transformation, then the word embeddings once more, and a bias.
#[derive(Clone, Copy, Debug)]
struct Predictions {
    transform: Linear,
    norm: Norm,
    bias: Param,
}

/// What [`Bert::encode`] shall give beside the last hidden states.
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
}

impl Bert {
    /// Lays out the parameters of a BERT with a head, under the names that `transformers` gives them.
    pub fn build(b: &mut Builder, config: &BertConfig, head: Head) -> Self {
        let h = config.hidden_size;
        let init = Init::TruncatedNormal(config.initializer_range as f32);
        let base = if matches!(head, Head::Encoder | Head::Pooler) { "" } else { "bert" };
        let mut model = b.at(base, |b| {
            let (words, positions, segments, norm) = b.at("embeddings", |b| {
                (
                    b.padded_table("word_embeddings.weight", config.vocab_size, h, init),
                    b.matrix("position_embeddings.weight", config.max_position_embeddings, h, init),
                    b.matrix("token_type_embeddings.weight", config.type_vocab_size, h, init),
                    layer_norm(b, "LayerNorm", h, config.layer_norm_eps as f32),
                )
            });
            let settings = BlockSettings {
                hidden: h,
                intermediate: config.intermediate_size,
                heads: config.num_attention_heads,
                activation: config.hidden_act.into(),
                causal: config.is_decoder,
                dropout: config.hidden_dropout_prob as f32,
                attention_dropout: config.attention_probs_dropout_prob as f32,
                epsilon: config.layer_norm_eps as f32,
                init,
            };
            let layer = |b: &mut Builder, i: usize| {
                let site = EMBEDDING_SITE + 1 + BLOCK_SITES * i as u32;
                b.at(&format!("encoder.layer.{i}"), |b| Block::build(b, settings, site))
            };
            Self {
                config: config.clone(),
                head,
                word_embeddings: words,
                position_embeddings: positions,
                token_type_embeddings: segments,
                embedding_norm: norm,
                layers: (0..config.num_hidden_layers).map(|i| layer(b, i)).collect(),
                pooler: head.has_pooler().then(|| b.at("pooler", |b| Linear::build(b, "dense", h, h, init))),
                predictions: None,
                classifier: None,
            }
        });
        if matches!(head, Head::PreTraining | Head::MaskedLm) {
            model.predictions = Some(b.at("cls.predictions", |b| {
                let bias = b.padded_vector("bias", config.vocab_size, Init::Zeros);
                let (transform, norm) = b.at("transform", |b| {
                    let dense = Linear::build(b, "dense", h, h, init);
                    (dense, layer_norm(b, "LayerNorm", h, config.layer_norm_eps as f32))
                });
                Predictions { transform, norm, bias }
            }));
        }
        // What is pre-trained starts as the paper's. Heads of tasks start as those of `transformers`, a seventh larger without
        // the truncation: where a task has few updates, a smaller head costs points (docs/finetuning.md).
        let task = Init::Normal(config.initializer_range as f32);
        model.classifier = match head {
            Head::Encoder | Head::Pooler | Head::MaskedLm => None,
            Head::PreTraining => Some(Linear::build(b, "cls.seq_relationship", h, 2, init)),
            Head::Sequence { labels } | Head::Token { labels } => Some(Linear::build(b, "classifier", h, labels, task)),
            Head::Span => Some(Linear::build(b, "qa_outputs", h, 2, task)),
            Head::Choice => Some(Linear::build(b, "classifier", h, 1, task)),
        };
        model
    }

    /// What it was built from.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Its head.
    pub fn head(&self) -> Head {
        self.head
    }

    /// The encoder: embeddings and all blocks.
    pub fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        let layout = &batch.layout;
        let mut x = self.embed(pass, batch)?;
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            let (next, maps) = layer.forward(pass, &x, layout, capture.attention_maps)?;
            attention_maps.extend(maps);
            let before = std::mem::replace(&mut x, next);
            if capture.hidden_states {
                hidden_states.push(before);
            }
        }
        if capture.hidden_states {
            hidden_states.push(x.clone());
        }
        Ok(Encoded { last: x, hidden_states, attention_maps })
    }

    /// The encoder's output at the rows named (P) alone: P×H. The last block then works on these rows only, a sixth of a
    /// small model's time where few are needed. For inference.
    pub fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        if pass.is_training() {
            return Err(TensorError::Unsupported { operation: "encode_rows", why: "it has no dropout" });
        }
        let mut x = self.embed(pass, batch)?;
        let Some((last, layers)) = self.layers.split_last() else { return pass.gather(&x, rows) };
        for layer in layers {
            x = layer.forward(pass, &x, &batch.layout, false)?.0;
        }
        last.forward_rows(pass, &x, &batch.layout, rows)
    }

    /// The embeddings' output: T×H.
    fn embed(&self, pass: &mut Pass<'_>, batch: &Batch) -> Result<Var> {
        let tables = EmbeddingTables {
            word: self.word_embeddings,
            position: Some(self.position_embeddings),
            position_offset: 0,
            segment: Some(self.token_type_embeddings),
        };
        let dropout = (self.config.hidden_dropout_prob as f32, EMBEDDING_SITE);
        let segments = Some(&batch.segments);
        pass.embeddings_norm(tables, &batch.ids, segments, &batch.layout, &self.embedding_norm, dropout)
    }

    /// tanh(dense(first token)): B×H.
    pub fn pooled(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout) -> Result<Var> {
        let pooler = part(self.pooler, "pooled", "the model was built without a pooler")?;
        let first = pass.gather(last, layout.starts())?;
        pooler.forward(pass, &first, Activation::Tanh)
    }

    /// The vocabulary's logits at the rows named (P): P×V, the columns padded to a multiple of 64.
    pub fn masked_logits(&self, pass: &mut Pass<'_>, last: &Var, rows: &Tensor) -> Result<Var> {
        let head = part(self.predictions, "masked_logits", "the model has no masked-LM head")?;
        let x = pass.gather(last, rows)?;
        let x = head.transform.forward(pass, &x, self.config.hidden_act.into())?;
        let x = pass.norm(x, &head.norm)?;
        if pass.is_training() {
            pass.linear(&x, self.word_embeddings, Some(head.bias), Activation::None)
        } else {
            pass.linear_f32(&x, self.word_embeddings, Some(head.bias))
        }
    }

    /// Logits of a sequence head, of next sentence (0 next, 1 random) or of choices: B×labels.
    pub fn sequence_logits(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout) -> Result<Var> {
        let pooled = self.pooled(pass, last, layout)?;
        let pooled = match self.head {
            Head::PreTraining => pooled,
            _ => pass.dropout_sequences(pooled, layout, (self.classifier_dropout(), HEAD_SITE))?,
        };
        self.classifier()?.logits(pass, &pooled)
    }

    /// The same from the rows of the first tokens alone (B×H), as [`encode_rows`](Self::encode_rows) gives them.
    pub fn sequence_logits_of_rows(&self, pass: &mut Pass<'_>, first: &Var) -> Result<Var> {
        let pooler = part(self.pooler, "pooled", "the model was built without a pooler")?;
        let pooled = pooler.forward(pass, first, Activation::Tanh)?;
        self.classifier()?.logits(pass, &pooled)
    }

    /// Logits of a token head: T×labels.
    pub fn token_logits(&self, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> Result<Var> {
        let x = pass.dropout_tokens(last, layout, (self.classifier_dropout(), HEAD_SITE))?;
        self.classifier()?.logits(pass, &x)
    }

    /// Start and end logits of a span head: T×2.
    pub fn span_logits(&self, pass: &mut Pass<'_>, last: &Var) -> Result<Var> {
        self.classifier()?.logits(pass, last)
    }

    fn classifier(&self) -> Result<Linear> {
        part(self.classifier, "logits", "the model has no classifier")
    }

    fn classifier_dropout(&self) -> f32 {
        self.config.classifier_dropout.unwrap_or(self.config.hidden_dropout_prob) as f32
    }
}

/// A part that only some heads have.
fn part<T>(part: Option<T>, operation: &'static str, why: &'static str) -> Result<T> {
    part.ok_or(TensorError::Unsupported { operation, why })
}
