//! The feature-based approach (section 5.3 of the paper): a frozen encoder's vectors of words, from chosen layers, into a
//! tagger of their own: a linear one or a BiLSTM, with a CRF on request.
//!
//! The encoder runs once over each set, and its vectors stay in memory; only the tagger is trained, on the CPU, through the same
//! life of a run as everything else: with evaluations, checkpoints and resuming. What comes
//! out is no `transformers` model: a [`Tagger`]'s directory holds the encoder as it was, and beside it `tagger.json` and
//! `tagger.safetensors`. [`Tagger`] reads it again; nothing in `infer` or `serve` does, for whom it is an encoder.
//!
//! Deliberately absent: training any part of the encoder (that is [`crate::finetune()`]).

mod layers;
mod learner;
mod recipe;
mod tagger;
mod train;

pub use layers::FeatureLayers;
pub use recipe::{TaggerHead, TaggerRecipe};
pub use tagger::Tagger;
pub use train::{TaggerPlan, train_tagger};
