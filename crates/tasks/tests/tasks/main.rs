//! Files in, examples out; predictions in, scores out.

mod bad_rows;
mod hostile;
mod metrics;
mod predictions;
mod readers;
mod support;
