//! Documents to shards, shards to pre-training instances, instances to batches.
//!
//! The way that data takes: text files are read as documents and sentences ([`build()`]), tokenized once into shards
//! ([`Corpus`]), and cut, paired and masked while training ([`Instances`]); a [`Loader`] hands out whole steps, made by
//! threads ahead of the trainer. An instance is a pure function of (seed, epoch, index), so nothing is written to disk
//! per epoch and the whole state of a loader is a [`Place`].
//!
//! Labelled files, for fine-tuning and evaluation, are read as rows by [`tables`].
//!
//! What is deliberately absent: tensors and models (batches are plain vectors), and printing.

#![forbid(unsafe_code)]

mod blocks;
mod build;
mod corpus;
mod documents;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod instances;
mod lines;
mod loader;
mod manifest;
mod rows;
mod seen;
mod sentences;
mod shard;
mod staging;
mod stats;
mod stream;
pub mod tables;
mod vocabulary;

pub use build::{BuildOptions, BuildProgress, BuildReport, SourceFiles, build};
pub use corpus::{Corpus, Document, Reader, Source, Split};
pub use documents::{Documents, Format};
pub use error::DataError;
pub use instances::{
    Boundaries, Cut, Epoch, Instance, InstanceSettings, Instances, LongSentences, MaskCount, Masking, NoiseSettings,
    Objective, Packing, Predicted, Separators,
};
pub use lines::Lines;
pub use loader::{Loader, Part, Place, Step, part_of};
pub use rows::Rows;
pub use sentences::Sentences;
pub use shard::Counts;
pub use stats::{Lengths, PackingStats, SourceStats, Stats, stats};
pub use stream::{Stream, WordList};
pub use vocabulary::{Vocabulary, WordMarks};
