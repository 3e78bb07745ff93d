//! What Prometheus reads at /metrics: counts, times and sizes, never texts.

use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// A request by its route, which is a pattern and never what a client typed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteLabels {
    route: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteName {
    route: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModelName {
    model: String,
}

/// Everything that is counted.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RouteLabels, Counter>,
    seconds: Family<RouteName, Histogram>,
    waiting: Family<ModelName, Gauge>,
    batch_sequences: Family<ModelName, Histogram>,
    batch_tokens: Family<ModelName, Histogram>,
    batch_seconds: Family<ModelName, Histogram>,
    tokens: Family<ModelName, Counter>,
    written: Family<ModelName, Counter>,
    first_token: Family<ModelName, Histogram>,
    streams_running: Family<ModelName, Gauge>,
    streams_waiting: Family<ModelName, Gauge>,
    pub(crate) connections: Gauge,
    pub(crate) reloads: Counter,
    pub(crate) failed_reloads: Counter,
}

/// What is counted for one model.
#[derive(Clone, Default)]
pub(crate) struct ModelMetrics {
    pub(crate) waiting: Gauge,
    batches: Option<Batches>,
    tokens: Counter,
}

/// What is counted for a model that writes.
#[derive(Clone)]
pub(crate) struct WriteMetrics {
    pub(crate) written: Counter,
    pub(crate) running: Gauge,
    pub(crate) waiting: Gauge,
    first_token: Histogram,
}

#[derive(Clone)]
struct Batches {
    sequences: Histogram,
    tokens: Histogram,
    seconds: Histogram,
}

/// From 1 to 2¹³: sequences and tokens of a batch.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 14))
}

/// From half a millisecond to 33 seconds.
fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 17))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let sizes = || Family::<ModelName, Histogram>::new_with_constructor(sizes);
        let mut metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            seconds: Family::new_with_constructor(times),
            waiting: Family::default(),
            batch_sequences: sizes(),
            batch_tokens: sizes(),
            batch_seconds: Family::new_with_constructor(times),
            tokens: Family::default(),
            written: Family::default(),
            first_token: Family::new_with_constructor(times),
            streams_running: Family::default(),
            streams_waiting: Family::default(),
            connections: Gauge::default(),
            reloads: Counter::default(),
            failed_reloads: Counter::default(),
        };
        let mut registry = Registry::with_prefix("henson");
        registry.register("requests", "Requests that were answered", metrics.requests.clone());
        let seconds = "From the head of a request to the head of its answer";
        registry.register_with_unit("request", seconds, Unit::Seconds, metrics.seconds.clone());
        registry.register("queue_tokens", "Tokens that wait for a model or are in it", metrics.waiting.clone());
        registry.register("batch_sequences", "Sequences of a batch", metrics.batch_sequences.clone());
        registry.register("batch_tokens", "Tokens of a batch", metrics.batch_tokens.clone());
        let seconds = "What a batch took";
        registry.register_with_unit("batch", seconds, Unit::Seconds, metrics.batch_seconds.clone());
        registry.register("tokens", "Tokens that were computed", metrics.tokens.clone());
        registry.register("written_tokens", "Tokens that were written", metrics.written.clone());
        let seconds = "From a request to write to its first token";
        registry.register_with_unit("first_token", seconds, Unit::Seconds, metrics.first_token.clone());
        registry.register("streams_running", "Sequences that are being written", metrics.streams_running.clone());
        let waiting = "Sequences that wait for their first token";
        registry.register("streams_waiting", waiting, metrics.streams_waiting.clone());
        registry.register("connections", "Open connections", metrics.connections.clone());
        registry.register("reloads", "Models that were reloaded", metrics.reloads.clone());
        let failed = "Models that failed to reload; the old ones are still served";
        registry.register("failed_reloads", failed, metrics.failed_reloads.clone());
        metrics.registry = registry;
        metrics
    }

    pub(crate) fn request(&self, route: &str, status: u16, elapsed: Duration) {
        self.requests.get_or_create(&RouteLabels { route: route.to_owned(), status }).inc();
        self.seconds.get_or_create(&RouteName { route: route.to_owned() }).observe(elapsed.as_secs_f64());
    }

    pub(crate) fn model(&self, name: &str) -> ModelMetrics {
        let name = ModelName { model: name.to_owned() };
        ModelMetrics {
            waiting: self.waiting.get_or_create(&name).clone(),
            batches: Some(Batches {
                sequences: self.batch_sequences.get_or_create(&name).clone(),
                tokens: self.batch_tokens.get_or_create(&name).clone(),
                seconds: self.batch_seconds.get_or_create(&name).clone(),
            }),
            tokens: self.tokens.get_or_create(&name).clone(),
        }
    }

    pub(crate) fn writer(&self, name: &str) -> WriteMetrics {
        let name = ModelName { model: name.to_owned() };
        WriteMetrics {
            written: self.written.get_or_create(&name).clone(),
            running: self.streams_running.get_or_create(&name).clone(),
            waiting: self.streams_waiting.get_or_create(&name).clone(),
            first_token: self.first_token.get_or_create(&name).clone(),
        }
    }

    pub(crate) fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }
}

impl WriteMetrics {
    pub(crate) fn first_token(&self, elapsed: Duration) {
        self.first_token.observe(elapsed.as_secs_f64());
    }
}

impl ModelMetrics {
    pub(crate) fn batch(&self, sequences: usize, tokens: usize, elapsed: Duration) {
        self.tokens.inc_by(tokens as u64);
        if let Some(batches) = &self.batches {
            batches.sequences.observe(sequences as f64);
            batches.tokens.observe(tokens as f64);
            batches.seconds.observe(elapsed.as_secs_f64());
        }
    }
}
