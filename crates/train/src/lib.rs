//! Objectives, optimizers and the training step.
//!
//! What a model is trained for stands here, not in the model: a loss is a sum over predictions, divided by how many
//! there are in the whole step, so that accumulated parts add up to the large batch.
#![forbid(unsafe_code)]

pub mod objective;
mod update;

pub use update::{Clip, OptimizerSettings, Updated, Updater};
