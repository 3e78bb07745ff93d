//! A model directory in, answers out: fill, classify, tag, answer, choose, embed, rerank, features, attention, likelihood;
//! batching without padding.
//!
//! Every question is a [`Request`] that is prepared, run and finished; see there.
//!
//! Training is not needed here and not known. Texts are never cut silently: every answer says how many pieces were left
//! out, and windows avoid it.
#![forbid(unsafe_code)]

mod aggregate;
mod answer;
mod attention;
mod batches;
mod beams;
mod choose;
mod classify;
mod embed;
mod error;
mod features;
mod fill;
mod generate;
mod likelihood;
mod model;
mod numbers;
mod pooling;
mod prompt_scores;
mod read;
mod request;
mod rerank;
mod sentence;
mod tag;
mod task;
mod zero_shot;

pub use aggregate::{Aggregation, Group, Grouped};
pub use answer::Question;
pub use attention::AttentionMaps;
pub use choose::{Choices, Chosen};
pub use classify::{Classified, Input, Problem, both_orders, sum_orders, text_windows};
pub use embed::{EmbedSettings, Embedding, SentenceFacts};
pub use error::InferError;
pub use features::{Layers, TokenFeatures};
pub use fill::{Blank, Candidate, Filled};
pub use generate::{
    EarlyStopping, Event, EventKind, FinishReason, GenerateEvent, GenerateSettings, Generated, Job, MOST_SEQUENCES,
    Sampling, StopCheck, TextStream, Ticket, TokenScore, Writer, WriterLimits, Written,
};
pub use henson_text::{AnswerCandidate, AnswerSettings, Answers, QuestionSettings, Stride};
pub use likelihood::{ScoreProgress, Scored, Scoring};
pub use model::{Length, Model, Want};
pub use numbers::{dot, join_windows, normalise, sigmoid, softmax};
pub use pooling::{Activation, Dense, Layer, Pooling};
pub use read::{Carried, Output, Read, read};
pub use request::{Finish, Request, Sequence};
pub use rerank::Ranked;
pub use sentence::{Prompts, SentenceKind};
pub use tag::{Entity, TagInput, Tagged, TaggedWord, legal_steps};
pub use task::{Ability, Task};
pub use zero_shot::{Entailment, ZeroShot, ZeroShotScores};

/// What every fallible function here returns.
pub type Result<T, E = InferError> = std::result::Result<T, E>;

/// Bytes as each of sentence-transformers' files; see `fuzz/`.
#[doc(hidden)]
pub fn fuzz_sentence_files(bytes: &[u8]) {
    sentence::fuzz(bytes);
}
