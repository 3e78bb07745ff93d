//! Model directories in and out: config.json and safetensors, atomic writes, one report of every key that does not fit.
//!
//! The way in: [`resolve_model`] finds a directory, [`ModelDirectory`] its config, [`Weights`] its tensors, [`load`]
//! puts them into parameters. The way out: [`save`].
//!
//! What is deliberately absent: what a config means (`models`), what a tokenizer's files mean (`text`), the state of a
//! training run (`train`), the environment (the binary passes the cache's place), and printing. Pickles are not read:
//! they can run code.

mod atomic;
mod directory;
#[cfg(feature = "download")]
mod download;
mod error;
mod hub;
mod load;
mod report;
pub mod safetensors;
mod save;
mod weights;

pub use atomic::{Existing, write_atomic};
pub use directory::{ModelDirectory, read_json};
pub use error::CheckpointError;
pub use hub::{DownloadProgress, Hub, resolve_model};
pub use load::{LoadMode, LoadOptions, load};
pub use report::{LoadReport, Misshapen, Missing, NonFinite, NotFloat, Repeated, Untied};
pub use safetensors::{SaveDType, StoredDType, TensorInfo};
pub use save::{SaveOptions, save};
pub use weights::Weights;
