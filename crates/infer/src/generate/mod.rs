//! Writing text: a prompt or a source in, tokens out, one after the other.
//!
//! A [`Writer`] does the work, on ids alone: sequences of many jobs share flat batches, enter while others write, and leave when they
//! end. What a token is chosen by is [`GenerateSettings`], with the meaning that `transformers` gives each setting. [`Model::generate`]
//! puts a tokenizer around it, and a [`TextStream`] turns tokens into text as they come.
//!
//! What is deliberately absent: prompts of conversations, and anything that changes what a model says beyond its settings.
//!
//! [`Model::generate`]: crate::Model::generate

mod beams;
mod choice;
mod files;
mod job;
mod next;
mod processors;
mod settings;
mod stream;
#[cfg(test)]
mod tests;
mod text;
mod writer;

pub(crate) use files::Keys;
pub use job::{Event, EventKind, FinishReason, Job, StopCheck, Ticket, TokenScore, Written};
pub use settings::{EarlyStopping, GenerateSettings, MOST_SEQUENCES, Sampling};
pub use stream::TextStream;
pub use text::{GenerateEvent, Generated};
pub use writer::{Writer, WriterLimits};
