//! What can go wrong between a directory, a text and an answer.

use std::path::PathBuf;

use henson_checkpoint::CheckpointError;
use henson_models::{ConfigError, InputError};
use henson_tensor::TensorError;
use henson_text::TextError;

/// No answer could be given.
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// The directory's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The config describes no model of ours.
    #[error("in {path}")]
    Config {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: ConfigError,
    },
    /// The tokenizer's files, or a text that it cannot take.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A computation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Tokens that do not fit the model.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The tokenizer gives ids that the model does not have.
    #[error(
        "the tokenizer in {path} has {tokenizer} tokens, the model's vocabulary {model}: they do not belong together; \
         put the tokenizer that the model was trained with into its directory"
    )]
    Vocabulary {
        /// The directory.
        path: PathBuf,
        /// Pieces of the tokenizer.
        tokenizer: usize,
        /// The model's.
        model: usize,
    },
    /// The weights hold more of the encoder than the config describes.
    #[error(
        "the weights in {path} have {count} tensors of the encoder that config.json does not describe, such as `{first}`: \
         the two do not belong together; see num_hidden_layers"
    )]
    MoreLayers {
        /// The directory.
        path: PathBuf,
        /// How many.
        count: usize,
        /// One of them.
        first: String,
    },
    /// A directory whose model does something else.
    #[error(
        "cannot {task} with {}: it is {has}, and this takes {needs}; fine-tune it first: {next}",
        path.display()
    )]
    Head {
        /// The directory.
        path: PathBuf,
        /// What was wanted.
        task: &'static str,
        /// What is there, in words.
        has: String,
        /// What it takes.
        needs: String,
        /// The command that makes one.
        next: String,
    },
    /// A classifier's config says what its logits mean in a word that we do not know.
    #[error(
        "config.json in {}: problem_type is `{problem_type}`, expected single_label_classification, \
         multi_label_classification or regression",
        path.display()
    )]
    ProblemType {
        /// The directory.
        path: PathBuf,
        /// What it says.
        problem_type: String,
    },
    /// A tokenizer without a token that the task needs.
    #[error("the tokenizer has no {0} token, which this needs")]
    NoSpecial(&'static str),
    /// A text without a blank.
    #[error(
        "text {text} has no {mask} to fill: write {mask} where a word is missing{}",
        other.map(|other| format!("; {other} is the mask of other models")).unwrap_or_default()
    )]
    NoMask {
        /// The mask of other models that it has instead.
        other: Option<&'static str>,
        /// Its number, counted from 1.
        text: usize,
        /// The mask token.
        mask: String,
    },
    /// A setting of a sentence-transformers directory that we do not follow.
    #[error("{path}: {what}")]
    SentenceTransformer {
        /// The file.
        path: PathBuf,
        /// What it asks for.
        what: String,
    },
    /// A classifier with several labels that shall rank texts.
    #[error(
        "cannot rerank with {}: it has {labels} labels, and a re-ranker has one; `henson classify` gives the labels of a pair",
        path.display()
    )]
    NotAReranker {
        /// The directory.
        path: PathBuf,
        /// How many.
        labels: usize,
    },
    /// A classifier that is no model of natural language inference.
    #[error(
        "cannot classify by labels of your own with {}: that takes a model of natural language inference, which has a label that \
         begins with \"entail\"; this one has: {labels}",
        path.display()
    )]
    NoEntailment {
        /// The directory.
        path: PathBuf,
        /// What it has.
        labels: String,
    },
    /// Labels or a hypothesis that cannot be asked about.
    #[error("{0}")]
    ZeroShot(String),
    /// A dense layer behind a pooling of another width.
    #[error(
        "a Dense module of this model takes {expected} numbers, and what comes before it gives {got}: the two do not belong together"
    )]
    DenseWidth {
        /// What it takes.
        expected: usize,
        /// What comes.
        got: usize,
    },
    /// A scoring that is not the model's.
    #[error(
        "the model {} (`is_decoder` in config.json): its texts are scored {}",
        if *.left_to_right { "sees only what stands before a token" } else { "sees both sides of a token" },
        if *.left_to_right { "left to right, without masks" } else { "with masks, by piece or by word" }
    )]
    Scoring {
        /// Whether the model is one that reads left to right.
        left_to_right: bool,
    },
    /// Blanks for a model that reads left to right.
    #[error(
        "the model reads left to right (`is_decoder` in config.json): it predicts the next token and has never seen {mask}, so \
         it cannot fill blanks: use a masked language model; `henson eval --task perplexity` and `--task blimp` score this one"
    )]
    CannotFill {
        /// The mask token.
        mask: String,
    },
    /// A result that is infinite or not a number.
    #[error(
        "the model's results for text {text} are not finite: its weights are damaged or far too large; use another checkpoint \
         of the model (copy it again, or take an earlier one of its run), or leave this text out"
    )]
    NotFinite {
        /// Its number, counted from 1.
        text: usize,
    },
    /// A setting of generation that has no meaning.
    #[error("{name} is {got}, expected {expected}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// What it takes.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// A model that writes nothing.
    #[error(
        "cannot generate with {}: it is {has}, and this takes a model that writes: a decoder that reads left to right, or an \
         encoder-decoder",
        path.as_ref().map_or("this model".into(), |path| path.display().to_string())
    )]
    CannotWrite {
        /// The directory, where it is known.
        path: Option<PathBuf>,
        /// What it is, in words.
        has: String,
    },
    /// The family has no vocabulary head on an encoder.
    #[error(
        "{} has no head that predicts single tokens of a text: it is {has}. `henson generate` writes with it, where it has such a head",
        path.display()
    )]
    NoTokens {
        /// The directory.
        path: PathBuf,
        /// What it is, in words.
        has: String,
    },
    /// Nothing to go on from.
    #[error(
        "text {text} is empty: the model needs at least one token to continue, and its tokenizer has no start token"
    )]
    EmptyPrompt {
        /// Its number, counted from 1.
        text: usize,
    },
    /// A prompt that leaves no room.
    #[error("text {text} has {got} tokens, and the model takes {most}, among them at least one new one: shorten it")]
    LongPrompt {
        /// Its number, counted from 1.
        text: usize,
        /// Its tokens.
        got: usize,
        /// The most.
        most: usize,
    },
    /// More than can ever be held at once.
    #[error("{what}: {needed} are needed, and there is room for {room}; ask for less, or give more room")]
    NoRoom {
        /// Of what.
        what: &'static str,
        /// How much.
        needed: usize,
        /// How much there is.
        room: usize,
    },
    /// A setting in a model's files that we do not follow.
    #[error("{}: `{key}` is {got}, which is not supported; remove it, or set it to {expected}", path.display())]
    GenerationConfig {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What it says.
        got: String,
        /// What is understood.
        expected: String,
    },
    /// The caller's callback said so.
    #[error("stopped before all texts were done")]
    Stopped,
    /// A choice of layers that the model does not have.
    #[error("{0}")]
    Layers(String),
}

impl InferError {
    /// The same, with the numbers that the caller's texts have: errors here count what they were given, from 1.
    #[must_use]
    pub fn numbered(mut self, numbers: &[usize]) -> Self {
        if let Self::NotFinite { text }
        | Self::NoMask { text, .. }
        | Self::EmptyPrompt { text }
        | Self::LongPrompt { text, .. } = &mut self
        {
            *text = text.checked_sub(1).and_then(|i| numbers.get(i)).copied().unwrap_or(*text);
        }
        self
    }
}
