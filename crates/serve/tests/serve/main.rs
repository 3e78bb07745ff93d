//! The server as its clients meet it: one program, linked once.

mod answers;
mod common;
mod docs;
mod families;
mod generate;
mod generate_operations;
mod mutations;
mod operations;
mod overflow;
