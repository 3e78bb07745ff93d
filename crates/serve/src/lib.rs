//! Models behind HTTP. Text Embeddings Inference's routes and OpenAI's embeddings, and for models that write OpenAI's
//! completions and Text Generation Inference's routes, so that clients switch by changing a URL; next to them what those have
//! not: masked words, entities, answers, choices, and a look inside.
//!
//! The way of a request: a route parses it (`wire`, `routes`) and prepares a `henson_infer::Request`, a model's queue joins
//! the sequences of all requests into flat batches by their tokens (`queue`), one thread for each model computes them
//! (`henson_infer::Model::read`), and the request is finished by the same code that the commands use. A model that writes has
//! another queue and thread for that (`generate`): a request stays, with a token in every batch, until it is done.
//!
//! Deliberately absent: TLS and accounts, which a proxy in front does better; signals, the environment and printing, which
//! are the binary's; padding. Users' texts are never logged.
#![forbid(unsafe_code)]

mod answers;
mod app;
mod body;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod generate;
mod hosts;
mod inside;
mod metrics;
mod models;
mod openapi;
mod pace;
mod page;
mod queue;
mod refusals;
mod routes;
mod runs;
mod server;
mod settings;
mod wire;

pub use error::ServeError;
pub use models::Source;
pub use server::{Handle, Server};
pub use settings::{Prompt, Settings};
