//! Operations on the tape against their references: one program, linked once.

#[path = "../common/mod.rs"]
mod common;
mod ops;
mod recurrent;
mod xl;
