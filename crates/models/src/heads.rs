//! What stands on an encoder. Heads are built from a few shared parts; which parts, under which names and with which
//! dropout, is what a family says.
//!
//! Legend: B sequences, T tokens in the flat batch, H hidden, V vocabulary, P predicted tokens.

use henson_tensor::{Activation, Builder, CrfParams, Init, Layout, Norm, Param, Pass, Result, Tensor, Var};

use crate::beams::BeamHead;
use crate::boundary::BoundaryHead;
use crate::layers::{Linear, layer_norm};

/// Dropout sites of heads, beyond those of any encoder.
const HEAD_SITE: u32 = 0xff00;
const HEAD_INPUT_SITE: u32 = 0xff01;

/// What stands on the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Head {
    /// Nothing at all, not even a pooler: for features and embeddings.
    Encoder,
    /// Nothing but the pooler.
    Pooler,
    /// Masked LM and next sentence.
    PreTraining,
    /// Masked LM alone; of a left-to-right model, the next token.
    MaskedLm,
    /// Masked LM, and masked spans from the tokens around them. The second is for training alone: what is saved is a
    /// [`Head::MaskedLm`].
    SpanBoundary,
    /// The next token of what an encoder-decoder writes.
    Seq2Seq,
    /// One vector of logits per sequence.
    Sequence {
        /// Logits; 1 for regression.
        labels: usize,
    },
    /// One vector of logits per token.
    Token {
        /// Logits.
        labels: usize,
    },
    /// A logit for each token: whether it was replaced.
    ReplacedTokens,
    /// A start and an end logit for each token.
    Span,
    /// A start logit for each token, an end logit for each token and start, and whether there is an answer: XLNet's own.
    BeamSpan,
    /// One logit per sequence, compared among the choices of an example.
    Choice,
}

impl Head {
    /// How the names of its classes in `transformers` end.
    pub(crate) fn class_ending(self) -> &'static str {
        match self {
            Head::Encoder | Head::Pooler => "Model",
            Head::PreTraining | Head::ReplacedTokens => "ForPreTraining",
            Head::MaskedLm | Head::SpanBoundary => "ForMaskedLM",
            Head::Seq2Seq => "ForConditionalGeneration",
            Head::Sequence { .. } => "ForSequenceClassification",
            Head::Token { .. } => "ForTokenClassification",
            Head::Span | Head::BeamSpan => "ForQuestionAnswering",
            Head::Choice => "ForMultipleChoice",
        }
    }

    /// The same head with another number of labels, where it has labels.
    pub fn with_labels(self, labels: usize) -> Self {
        match self {
            Head::Sequence { .. } => Head::Sequence { labels },
            Head::Token { .. } => Head::Token { labels },
            other => other,
        }
    }

    /// Whether it has logits for every token.
    pub(crate) fn reads_tokens(self) -> bool {
        matches!(self, Head::Token { .. } | Head::Span | Head::ReplacedTokens)
    }

    /// Whether both are the same but for their labels.
    pub(crate) fn is_like(self, other: Head) -> bool {
        self.with_labels(0) == other.with_labels(0)
    }
}

/// [dropout →] [dense → activation →] [norm →] [dropout →] out: what turns vectors of sequences or of tokens into logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Classifier {
    /// What the vector of a sequence is.
    pub(crate) pooling: SequencePooling,
    /// Dropout of what comes in.
    pub(crate) input_dropout: f32,
    /// A hidden layer, such as BERT's pooler.
    pub(crate) hidden: Option<(Linear, Activation)>,
    /// Of what the hidden layer gives.
    pub(crate) norm: Option<Norm>,
    /// Dropout before the last layer.
    pub(crate) dropout: f32,
    pub(crate) out: Linear,
}

impl Classifier {
    /// Dropout and one layer.
    pub(crate) fn plain(dropout: f32, out: Linear) -> Self {
        Self { pooling: SequencePooling::First, input_dropout: 0.0, hidden: None, norm: None, dropout, out }
    }

    /// RoBERTa's for sequences: dropout on both sides of a hidden layer, `classifier.dense` and `classifier.out_proj`.
    pub(crate) fn with_dense(
        b: &mut Builder,
        (hidden, labels): (usize, usize),
        activation: Activation,
        dropout: f32,
        init: Init,
    ) -> Self {
        let dense = Linear::build(b, "classifier.dense", hidden, hidden, init);
        let out = Linear::build(b, "classifier.out_proj", hidden, labels, init);
        Self { input_dropout: dropout, hidden: Some((dense, activation)), ..Self::plain(dropout, out) }
    }

    /// T5's and BART's for sequences, `classification_head`: the same at the last token, which is the end's.
    pub(crate) fn at_end(b: &mut Builder, (hidden, labels): (usize, usize), dropout: f32, init: Init) -> Self {
        let dense = Linear::build(b, "classification_head.dense", hidden, hidden, init);
        let out = Linear::build(b, "classification_head.out_proj", hidden, labels, init);
        let (pooling, hidden) = (SequencePooling::Last, Some((dense, Activation::Tanh)));
        Self { pooling, input_dropout: dropout, hidden, ..Self::plain(dropout, out) }
    }

    /// The vectors of sequences: T×H → B×H.
    pub(crate) fn pool(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout) -> Result<Var> {
        match self.pooling {
            SequencePooling::First => pass.first_tokens(last, layout),
            SequencePooling::Last => pass.last_tokens(last, layout),
            SequencePooling::Mean => pass.means(last, layout),
            SequencePooling::Max => pass.maxima(last, layout),
            SequencePooling::Attention { dense, v } => {
                let keys = dense.forward(pass, last, Activation::None)?;
                pass.additive_attention(None, &keys, v, last, layout)
            }
        }
    }

    /// Logits of the vectors of sequences: B×H → B×labels.
    pub(crate) fn of_sequences(&self, pass: &mut Pass<'_>, pooled: Var, layout: &Layout) -> Result<Var> {
        let mut x = pooled;
        if self.input_dropout > 0.0 {
            x = pass.dropout_sequences(x, layout, (self.input_dropout, HEAD_INPUT_SITE))?;
        }
        x = self.hidden(pass, x)?;
        if self.dropout > 0.0 {
            x = pass.dropout_sequences(x, layout, (self.dropout, HEAD_SITE))?;
        }
        self.out.logits(pass, &x)
    }

    /// Logits of the vectors of tokens: T×H → T×labels.
    pub(crate) fn of_tokens(&self, pass: &mut Pass<'_>, last: Var, layout: &Layout) -> Result<Var> {
        let mut x = self.hidden(pass, last)?;
        if self.dropout > 0.0 {
            x = pass.dropout_tokens(x, layout, (self.dropout, HEAD_SITE))?;
        }
        self.out.logits(pass, &x)
    }

    fn hidden(&self, pass: &mut Pass<'_>, mut x: Var) -> Result<Var> {
        if let Some((dense, activation)) = self.hidden {
            x = dense.forward(pass, &x, activation)?;
        }
        match &self.norm {
            Some(norm) => pass.norm(x, norm),
            None => Ok(x),
        }
    }
}

/// How the tokens of a sequence become the one vector that is classified.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SequencePooling {
    First,
    /// The only one that has seen all others where tokens see what stands before them alone.
    Last,
    Mean,
    /// The largest of each column.
    Max,
    /// A mean by the softmax of v·tanh(dense(token)).
    Attention {
        dense: Linear,
        v: Param,
    },
}

/// What gives the vocabulary's logits: a transformation, then the word embeddings once more, and a bias; of models that write, the
/// table alone, which may be one of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VocabularyHead {
    transform: Option<(Linear, Activation, Norm)>,
    /// A table of its own, where it does not use the word embeddings.
    table: Option<Param>,
    /// A factor on what is multiplied with the table.
    scale: f32,
    bias: VocabularyBias,
}

/// What is added to the vocabulary's logits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VocabularyBias {
    None,
    Trained(Param),
    Constant(Param),
}

impl SequencePooling {
    /// The rows of the tokens that are read, where others are not.
    pub(crate) fn rows(self, layout: &Layout) -> Option<&Tensor> {
        match self {
            Self::First => Some(layout.starts()),
            Self::Last => Some(layout.ends()),
            Self::Mean | Self::Max | Self::Attention { .. } => None,
        }
    }
}

/// The names of a [`VocabularyHead`]'s parameters.
pub(crate) struct VocabularyNames {
    pub(crate) transform: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) bias: &'static str,
}

impl VocabularyHead {
    /// Sizes are those of the vocabulary, of the hidden states and of the word table's rows.
    pub(crate) fn build(
        b: &mut Builder,
        names: &VocabularyNames,
        (vocabulary, hidden, width): (usize, usize, usize),
        activation: Activation,
        epsilon: f32,
        init: Init,
    ) -> Self {
        let bias = b.padded_vector(names.bias, vocabulary, Init::Zeros);
        let transform = Linear::build(b, names.transform, hidden, width, init);
        Self::of(transform, activation, layer_norm(b, names.norm, width, epsilon), Some(bias))
    }

    /// From parts that were laid out already.
    pub(crate) fn of(transform: Linear, activation: Activation, norm: Norm, bias: Option<Param>) -> Self {
        let bias = bias.map_or(VocabularyBias::None, VocabularyBias::Trained);
        Self { transform: Some((transform, activation, norm)), table: None, scale: 1.0, bias }
    }

    /// The word embeddings alone, or a table like them.
    pub(crate) fn plain(table: Option<Param>) -> Self {
        Self::scaled(table, 1.0, VocabularyBias::None)
    }

    /// The same with a factor on what is multiplied with it, and a bias.
    pub(crate) fn scaled(table: Option<Param>, scale: f32, bias: VocabularyBias) -> Self {
        Self { transform: None, table, scale, bias }
    }

    /// Logits at the rows named (P): P×V, the columns padded to a multiple of 64.
    pub(crate) fn forward(&self, pass: &mut Pass<'_>, last: &Var, rows: &Tensor, words: Param) -> Result<Var> {
        let mut x = pass.gather(last, rows)?;
        if let Some((transform, activation, norm)) = &self.transform {
            x = transform.forward(pass, &x, *activation)?;
            x = pass.norm(x, norm)?;
        }
        if self.scale != 1.0 {
            x = pass.scale(&x, self.scale)?;
        }
        let table = self.table.unwrap_or(words);
        let bias = match self.bias {
            VocabularyBias::None => None,
            VocabularyBias::Trained(bias) => Some(bias),
            VocabularyBias::Constant(constants) => return pass.linear_with_constants(&x, table, constants),
        };
        if pass.is_training() {
            pass.linear(&x, table, bias, Activation::None)
        } else {
            pass.linear_f32(&x, table, bias)
        }
    }
}

/// The parts of a head that a family built; most have one of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadParts {
    /// The pooler of a model that has one: tanh(dense(first token)).
    pub(crate) pooler: Option<Linear>,
    /// Masked LM.
    pub(crate) vocabulary: Option<VocabularyHead>,
    /// Masked spans from their boundaries.
    pub(crate) boundary: Option<BoundaryHead>,
    /// Answers whose end depends on their start.
    pub(crate) beams: Option<BeamHead>,
    /// What scores the labels of a sequence's tokens together.
    pub(crate) crf: Option<CrfParams>,
    /// Everything with labels: sequences, tokens, spans, choices, next sentence.
    pub(crate) classifier: Option<Classifier>,
}
