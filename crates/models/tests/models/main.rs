//! Families against golden values and hostile directories: one program, linked once.

mod blocks;
mod deberta;
mod decoding;
mod encoder_decoder;
mod hostile;
mod nano_gpt;
mod recurrent;
mod xlnet;
