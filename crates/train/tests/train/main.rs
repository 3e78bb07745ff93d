//! Training against golden values, and runs that are stopped, resumed and reported: one program, linked once.

mod golden;
mod report;
mod run;
mod span_boundary;
mod training;
