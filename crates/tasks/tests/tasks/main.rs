//! Files in, examples out; models in and out; predictions in, scores out.

mod bad_rows;
mod by_size;
mod decoders;
mod distil;
mod embed;
mod estimate;
mod features;
mod finetune;
mod hostile;
mod metrics;
mod predictions;
mod probe;
mod rank;
mod readers;
mod sentences;
mod seq2seq;
mod spans;
mod superglue;
mod support;
mod text_to_text;
mod texts;
mod words;
