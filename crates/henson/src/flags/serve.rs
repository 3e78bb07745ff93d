//! The flags of `henson serve`.

use std::path::PathBuf;

use clap::Args;

use super::{Compute, parse_count};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  henson serve\n  henson serve --model DIR --runs RUNS\n  \
henson serve --model minilm=DIR --model sentiment=OTHER --dtype bf16 --port 8080\n  \
HENSON_API_KEY=secret henson serve --model DIR --host 0.0.0.0\n\n\
Then open http://127.0.0.1:8080 or:\n  curl localhost:8080/embed -H 'Content-Type: application/json' -d '{\"inputs\": \"Jim Henson\"}'\n\n\
Signals: INT and TERM stop it after all accepted requests are answered, HUP loads models whose directories have changed. \
docs/serving.md has every route with an example.")]
pub(crate) struct Serve {
    /// A model directory, or org/name from the local Hugging Face cache, under its own name or another; may be repeated
    /// [default: the models that come with henson]
    #[arg(long = "model", value_name = "[NAME=]DIR")]
    pub(crate) models: Vec<String>,

    /// Fetch org/name from the Hugging Face Hub if it is not in the cache
    #[arg(long)]
    pub(crate) download: bool,

    /// The address to listen on, or a name of it; localhost is 127.0.0.1, and other machines reach 0.0.0.0
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,

    /// The port; 0 takes any free one
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,

    /// What clients must send as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "HENSON_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,

    /// An origin whose pages may call this server, such as `https://example.org`, or `*`; may be repeated [default: none]
    #[arg(long = "cors", value_name = "ORIGIN")]
    pub(crate) cors: Vec<String>,

    /// A host that requests may name, such as `models.example.org`, beside localhost and loopback addresses; may be repeated.
    /// On a loopback address others get status 421, so that pages of other sites cannot read answers; elsewhere
    /// names are checked only where one is given
    #[arg(long = "allow-host", value_name = "NAME")]
    pub(crate) allow_hosts: Vec<String>,

    /// A prompt called `query` for requests with `prompt_name`, such as 'query: ', for all models or one of them; may be repeated
    #[arg(long = "query-prefix", value_name = "[NAME=]TEXT")]
    pub(crate) query_prefixes: Vec<String>,

    /// The same called `passage` and `document`
    #[arg(long = "passage-prefix", value_name = "[NAME=]TEXT")]
    pub(crate) passage_prefixes: Vec<String>,

    /// A directory of training runs to show
    #[arg(long, value_name = "DIR")]
    pub(crate) runs: Option<PathBuf>,

    /// Maximum number of tokens in a batch [default: 2048, on a GPU 16384]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) batch_tokens: Option<usize>,

    /// Maximum number of queued tokens per model; further requests get status 429
    #[arg(long, value_name = "TOKENS", default_value_t = 65536, value_parser = parse_count)]
    pub(crate) queue_tokens: usize,

    /// Maximum number of queued requests per model; further ones get status 429
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = parse_count)]
    pub(crate) queue_requests: usize,

    /// Maximum number of sequences that a model writes at once; further ones wait
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_count)]
    pub(crate) streams: usize,

    /// Maximum memory in MiB for the keys and values of what is being written, per model that writes; requests that could
    /// never fit get status 413, others wait
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = parse_count)]
    pub(crate) cache_memory: usize,

    /// Maximum number of texts per request
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = parse_count)]
    pub(crate) max_texts: usize,

    /// Maximum size of a request in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 2_000_000, value_parser = parse_count)]
    pub(crate) max_bytes: usize,

    /// Maximum number of connections; further ones get status 503
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = parse_count)]
    pub(crate) max_connections: usize,

    /// Refuse requests that name a model which is not served. Otherwise, under /v1 and on the routes of Text Embeddings
    /// Inference, the only model that is made for the request answers, with the header `x-model-warning`
    #[arg(long)]
    pub(crate) strict_model_names: bool,

    /// Reject texts that are too long instead of truncating them, unless a request asks otherwise
    #[arg(long)]
    pub(crate) no_truncate: bool,

    /// Maximum duration of a request in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = parse_count)]
    pub(crate) timeout: usize,

    /// Threads for HTTP and tokenization; --threads are for computing [default: 2, with a GPU all cores, at most 8]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) http_threads: Option<usize>,

    /// Log every request, not only those that failed; texts are never logged
    #[arg(long)]
    pub(crate) log_requests: bool,

    /// Print the address as one JSON object, and logs as JSON on standard error
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}
