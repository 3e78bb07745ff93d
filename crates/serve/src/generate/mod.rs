//! Models that write, behind HTTP: OpenAI's completions and Text Generation Inference's routes. Both become a [`wire::Wish`],
//! which becomes tasks for a model's [`WriteQueue`](queue::WriteQueue); what comes back becomes text in the form of either.
//!
//! Deliberately absent: conversations and their templates, tools, and completions that are kept.

pub(crate) mod completions;
mod events;
pub(crate) mod queue;
mod task;
pub(crate) mod text;
pub(crate) mod text_generation;
pub(crate) mod wire;
