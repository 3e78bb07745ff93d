//! The program as its users call it: one program of tests, linked once.

mod built_in;
mod cli;
mod common;
mod data;
mod demo;
mod eval;
mod finetune;
mod generate;
mod heads;
mod instances;
mod labels;
mod modernbert;
mod packaging;
mod plan;
mod pretrain;
mod report;
mod scoring;
mod search;
mod settings;
mod streams;
mod tokenizer;
mod version_0_1;
