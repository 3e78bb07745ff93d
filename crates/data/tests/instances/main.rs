//! Instances against BERT's facts, against a naive reference, and against hostile input; the loader against both.

mod albert;
mod corpora;
mod electra;
mod hostile;
mod loader;
mod masks;
mod pairs;
mod permutation;
mod reference;
mod relatives;
mod roberta;
mod singles;
mod writers;
