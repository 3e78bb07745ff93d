//! Models opened and asked: one program, linked once.

mod common;
mod generate;
mod generate_text;
mod granite;
mod heads;
mod likelihood;
mod minilm;
mod sentence;
mod small;
mod xlnet;
