//! The kernels against their references, on every kernel set: one program, so that generic kernels are compiled once for all of them.

#[macro_use]
mod common;

mod activation;
mod adafactor;
mod additive;
mod attention;
mod attention_cache;
mod cast;
mod characters;
mod crf;
mod disentangled;
mod embedding;
mod gemm;
mod layer_norm;
mod loss;
mod mix;
mod optimizer;
mod recurrent;
mod reduce;
mod replace;
mod rotary;
mod rows;
mod sample;
mod span;
mod xl;
