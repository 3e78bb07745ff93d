//! What a model can be asked, and which head that takes.

use std::fmt;
use std::path::Path;

use henson_checkpoint::Config;
use henson_models::{self as models, Head, ModelConfig};
use henson_tensor::Builder;
use serde::Serialize;

use crate::{Entailment, InferError, Model, Result};

/// What a model can be asked. In JSON, abilities have the names of the server's routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ability {
    /// A vector for each text.
    Embed,
    /// A vector for each token.
    EmbedAll,
    /// The cosine between texts.
    Similarity,
    /// The tokens of texts.
    Tokenize,
    /// The text of tokens.
    Decode,
    /// Attention maps and the vectors of words.
    Inside,
    /// The likeliest tokens for masks.
    Fill,
    /// How well texts answer a query.
    Rerank,
    /// How likely labels of the caller's own are.
    ZeroShot,
    /// How a text goes on, or what is written for it.
    Generate,
    /// What the head was fine-tuned for.
    #[serde(untagged)]
    Task(Task),
}

impl Ability {
    /// All that a model with this config and head can be asked.
    pub fn of_head(config: &Config, head: Head) -> Vec<Self> {
        Self::of(config, head, writes(&config.model, head))
    }

    fn of(config: &Config, head: Head, writes: bool) -> Vec<Self> {
        use Ability::{Decode, Embed, EmbedAll, Fill, Generate, Inside, Rerank, Similarity, Tokenize, ZeroShot};
        let mut abilities = vec![Embed, EmbedAll, Similarity, Tokenize, Decode, Inside];
        abilities.extend(Task::of_head(head).map(Ability::Task));
        match head {
            // A left-to-right model predicts the next token and knows nothing of masks, and one over words no token at all.
            Head::PreTraining | Head::MaskedLm
                if !config.model.sizes().causal && config.model.characters().is_none() =>
            {
                abilities.push(Fill);
            }
            Head::MaskedLm | Head::Seq2Seq if writes => abilities.push(Generate),
            Head::Sequence { labels: 1 } => abilities.push(Rerank),
            Head::Sequence { .. } if Entailment::of_labels(&config.task.label_names()).is_some() => {
                abilities.push(ZeroShot);
            }
            _ => {}
        }
        abilities
    }

    /// The command that asks it; none for those that only the server has.
    pub fn command(self) -> Option<&'static str> {
        match self {
            Ability::Embed => Some("embed"),
            Ability::Fill => Some("fill"),
            Ability::Generate => Some("generate"),
            Ability::Rerank => Some("rerank"),
            Ability::ZeroShot => Some("classify --labels"),
            Ability::Task(Task::Classify) => Some("classify"),
            Ability::Task(Task::Tag) => Some("tag"),
            Ability::Task(Task::Answer) => Some("answer"),
            Ability::Task(Task::Choose) => Some("choose"),
            Ability::EmbedAll | Ability::Similarity | Ability::Tokenize | Ability::Decode | Ability::Inside => None,
        }
    }
}

/// A question for a fine-tuned model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Which class a text or a pair belongs to.
    #[serde(rename = "predict")]
    Classify,
    /// Which words are entities, or what part of speech they are.
    Tag,
    /// What a passage answers to a question.
    Answer,
    /// Which of several endings fits.
    Choose,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words()[0])
    }
}

/// The same words as [`Task::words`], for a classifier that scores texts for a query.
pub(crate) const RERANK: [&str; 2] = ["rerank", "rerank"];

impl Task {
    /// What a model with this head can be asked.
    pub fn of_head(head: Head) -> Option<Self> {
        match head {
            Head::Sequence { .. } => Some(Task::Classify),
            Head::Token { .. } => Some(Task::Tag),
            Head::Span | Head::BeamSpan => Some(Task::Answer),
            Head::Choice => Some(Task::Choose),
            Head::Encoder | Head::Pooler | Head::PreTraining | Head::MaskedLm | Head::SpanBoundary => None,
            Head::ReplacedTokens | Head::Seq2Seq => None,
        }
    }

    /// The head that this takes.
    pub(crate) fn head(self, labels: usize) -> Head {
        match self {
            Task::Classify => Head::Sequence { labels },
            Task::Tag => Head::Token { labels },
            Task::Answer => Head::Span,
            Task::Choose => Head::Choice,
        }
    }

    /// What it is called, and the word for `henson finetune --task`.
    pub(crate) fn words(self) -> [&'static str; 2] {
        match self {
            Task::Classify => ["classify", "classify"],
            Task::Tag => ["tag", "tag"],
            Task::Answer => ["answer", "qa"],
            Task::Choose => ["choose", "choice"],
        }
    }

    /// A model that does not have its head, in the words for it or for what else the head does.
    pub(crate) fn refused(
        self,
        [task, to_train]: [&'static str; 2],
        path: &Path,
        config: &Config,
        has: Option<Head>,
    ) -> InferError {
        let needed = self.head(0);
        InferError::Head {
            path: path.to_owned(),
            task,
            has: match has {
                None => "a model without such a head".to_owned(),
                // A head for tokens, which knows nothing of tags.
                Some(head) if config.task.reading.is_some_and(|reading| reading.spans.is_some()) => {
                    format!("a classifier of marked spans, for `henson predict` ({})", config.model.class(head))
                }
                Some(head) => described(&config.model, head),
            },
            needs: described(&config.model, needed),
            next: format!("henson finetune --task {} --model {} --data … --out …", to_train, path.display()),
        }
    }
}

/// Whether a model with this head writes token by token.
fn writes(config: &ModelConfig, head: Head) -> bool {
    models::Model::build(&mut Builder::new(), config, head).is_ok_and(|model| model.decoder().is_some())
}

/// A head in words.
pub(crate) fn described(config: &ModelConfig, head: Head) -> String {
    let words = match head {
        Head::Encoder | Head::Pooler => "an encoder without a head",
        Head::MaskedLm if config.characters().is_some() => "a language model over words",
        Head::PreTraining | Head::MaskedLm | Head::SpanBoundary => "a masked language model",
        Head::Seq2Seq => "an encoder-decoder that writes",
        Head::Sequence { .. } => "a classifier of texts",
        Head::ReplacedTokens => "a discriminator of replaced tokens",
        Head::Token { .. } => "a tagger of words",
        Head::Span | Head::BeamSpan => "a question answerer",
        Head::Choice => "a multiple-choice model",
    };
    format!("{words} ({})", config.class(head))
}

impl Model {
    /// What its head can be asked; nothing where it has none, or was opened without.
    pub fn task(&self) -> Option<Task> {
        // One for marked spans has a head for tokens, and knows nothing of tags.
        let knows_tags = self.config().task.reading.is_none_or(|reading| reading.spans.is_none());
        Task::of_head(self.network().head()).filter(|task| *task != Task::Tag || knows_tags)
    }

    /// All that it can be asked.
    pub fn abilities(&self) -> Vec<Ability> {
        Ability::of(self.config(), self.network().head(), self.network().decoder().is_some())
    }

    pub(crate) fn check_task(&self, task: Task) -> Result<()> {
        if self.task() == Some(task) {
            Ok(())
        } else {
            Err(task.refused(task.words(), self.path(), self.config(), Some(self.network().head())))
        }
    }
}
