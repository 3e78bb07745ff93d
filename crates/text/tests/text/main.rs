//! The crate's tests, in one binary so that it is linked once. All data lies in `tests/data`.

mod fast;
mod features;
mod files;
mod golden;
mod hostile;
mod properties;
mod sampling;
mod sentencepiece;
mod support;
mod tasks;
mod training;
