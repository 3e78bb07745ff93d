//! Layers and one file per model family: config, forward, heads and checkpoint names; knows no files, losses or
//! tokenizers.
#![forbid(unsafe_code)]

mod batch;
pub mod bert;
pub mod blocks;
mod config;
mod layers;
mod naming;

pub use batch::{Batch, InputError, Sequence};
pub use bert::{Bert, Capture, Encoded, Head};
pub use config::{BertConfig, ConfigError, HiddenActivation, Size, TrainedReading};
pub use naming::Naming;
