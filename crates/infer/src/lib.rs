//! A model directory in, answers out: fill, embed, features, likelihood; batching without padding.
//!
//! Training is not needed here and not known. Texts are never cut silently: every answer says how many pieces were left
//! out, and windows avoid it.
#![forbid(unsafe_code)]

mod batches;
mod embed;
mod error;
mod features;
mod fill;
mod likelihood;
mod model;

pub use embed::{EmbedSettings, Embedding};
pub use error::InferError;
pub use features::{Layers, TokenFeatures};
pub use fill::{Blank, Candidate, Filled};
pub use henson_tensor::Pooling;
pub use likelihood::{ScoreProgress, Scored, Scoring};
pub use model::{Length, Model, Want};

/// What every fallible function here returns.
pub type Result<T, E = InferError> = std::result::Result<T, E>;
