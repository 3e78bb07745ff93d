//! What can be chosen about a server. The defaults suit a small machine that strangers can reach.

use std::path::PathBuf;
use std::time::Duration;

/// A prompt that a model has beside those of its files: prefixes stand in model cards more often than in files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The name of a served model; none: for all of them.
    pub model: Option<String>,
    /// What requests call it.
    pub name: String,
    /// What is put before texts.
    pub text: String,
}

impl Prompt {
    pub(crate) fn is_for(&self, model: &str) -> bool {
        self.model.as_ref().is_none_or(|name| name == model)
    }
}

/// What can be chosen about a server.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Maximum number of tokens that are computed at once. Larger batches are hardly faster, and whoever comes later waits longer.
    pub batch_tokens: usize,
    /// Maximum number of tokens that wait for a model; requests beyond it are turned away.
    pub queue_tokens: usize,
    /// The most requests that wait for a model. Fewer than connections, so that there is always one to turn the next away on.
    pub queue_requests: usize,
    /// The most sequences that a model writes at once; further ones wait.
    pub streams: usize,
    /// The most bytes of the keys and values of all sequences that a model writes at once, for each model.
    pub cache_bytes: usize,
    /// The most texts of a request.
    pub most_texts: usize,
    /// The most bytes of a request's body.
    pub most_bytes: usize,
    /// The most connections at a time; further ones are told to come back later.
    pub most_connections: usize,
    /// The most bytes of all answers that wait for their clients to read them; requests beyond it are turned away.
    pub answer_bytes: usize,
    /// Whether texts that are too long are cut where a request does not say.
    pub truncate: bool,
    /// How long a client may take to send the head of a request, or to send none on an open connection.
    pub header_timeout: Duration,
    /// How long a client may take to send a body, and how long it may keep an answer waiting without reading at a least rate.
    pub body_timeout: Duration,
    /// How long a request may wait for its answer.
    pub request_timeout: Duration,
    /// How long the server waits for what it accepted when it is told to stop.
    pub drain_timeout: Duration,
    /// What clients must show as `Authorization: Bearer KEY`.
    pub api_key: Option<String>,
    /// Origins whose pages may call this server; `*` is all of them.
    pub cors: Vec<String>,
    /// Hosts that requests may name beside this machine's own; see the flag `--allow-host`.
    pub allowed_hosts: Vec<String>,
    /// A directory of training runs to show.
    pub runs: Option<PathBuf>,
    /// Whether a name of no served model is refused everywhere; see the flag `--strict-model-names`.
    pub strict_model_names: bool,
    /// Prompts beside those of the models' files.
    pub prompts: Vec<Prompt>,
    /// Threads that speak HTTP and cut texts into pieces; models compute on their device's own.
    pub http_threads: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_tokens: 2048,
            queue_tokens: 1 << 16,
            queue_requests: 512,
            streams: 64,
            cache_bytes: 1 << 30,
            most_texts: 256,
            most_bytes: 2_000_000,
            most_connections: 1024,
            answer_bytes: 256 << 20,
            truncate: true,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(30),
            api_key: None,
            cors: Vec::new(),
            allowed_hosts: Vec::new(),
            runs: None,
            strict_model_names: false,
            prompts: Vec::new(),
            http_threads: 2,
        }
    }
}
