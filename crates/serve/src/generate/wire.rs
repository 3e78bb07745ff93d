//! Requests to write, as OpenAI (`/v1/completions`) and Text Generation Inference (`/generate`) have them, and what both
//! mean: a [`Wish`]. Fields that are known there and not supported here are refused by name, and so is every number that
//! makes no sense.

use std::collections::BTreeMap;
use std::fmt;

use henson_infer::Sampling;
use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{ApiError, Kind};
use crate::wire::Inputs;

/// The most stop strings of a request, as OpenAI has it, and the most bytes of each: all are looked for after every token.
const STOPS: usize = 4;
const STOP_BYTES: usize = 1024;

/// Maximum number of tokens whose logits a request may shift.
const BIASES: usize = 300;

/// The most alternatives that are given for a token, as OpenAI and Text Generation Inference have it.
const ALTERNATIVES: usize = 5;

/// The most completions of a prompt.
const COMPLETIONS: usize = 128;

/// OpenAI's default.
const MAX_TOKENS: usize = 16;

/// Text Generation Inference's.
const MAX_NEW_TOKENS: usize = 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionRequest {
    pub(crate) prompt: Inputs,
    pub(crate) model: Option<String>,
    best_of: Option<usize>,
    echo: Option<bool>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<LogitBias>,
    logprobs: Option<usize>,
    max_tokens: Option<usize>,
    n: Option<usize>,
    presence_penalty: Option<f64>,
    seed: Option<i64>,
    stop: Option<Stop>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    suffix: Option<IgnoredAny>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    /// Taken and not used: there are no accounts here.
    #[serde(rename = "user")]
    _user: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GenerateRequest {
    pub(crate) inputs: String,
    parameters: Option<Parameters>,
    /// For `POST /`, where it decides; other addresses have theirs in the name.
    stream: Option<bool>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameters {
    adapter_id: Option<IgnoredAny>,
    best_of: Option<usize>,
    decoder_input_details: Option<bool>,
    details: Option<bool>,
    do_sample: Option<bool>,
    frequency_penalty: Option<f64>,
    grammar: Option<IgnoredAny>,
    max_new_tokens: Option<usize>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    return_full_text: Option<bool>,
    seed: Option<u64>,
    stop: Option<Stop>,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_n_tokens: Option<usize>,
    top_p: Option<f64>,
    truncate: Option<usize>,
    typical_p: Option<IgnoredAny>,
    watermark: Option<bool>,
}

/// What is wanted of each prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wish {
    pub(crate) max_new_tokens: usize,
    /// Whether the request says it, and must have room for it.
    pub(crate) is_length_given: bool,
    /// Completions of a prompt in the answer.
    pub(crate) n: usize,
    /// Completions that are written, of which the best are given.
    pub(crate) best_of: usize,
    /// None is the likeliest token each time. Its seed is not the request's yet.
    pub(crate) sampling: Option<Sampling>,
    pub(crate) seed: Option<u64>,
    pub(crate) repetition_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) stop: Vec<String>,
    /// Alternatives for each token; none where no logarithms are asked for at all.
    pub(crate) alternatives: Option<usize>,
    /// Whether the answer begins with the prompt.
    pub(crate) echo: bool,
    /// Whether the prompt's own tokens get their logarithms.
    pub(crate) prompt_logprobs: bool,
    /// So many of the prompt's last tokens count.
    pub(crate) truncate: Option<usize>,
    pub(crate) stream: bool,
    /// What is told in the end: OpenAI's usage after a stream, Text Generation Inference's details.
    pub(crate) details: bool,
}

impl CompletionRequest {
    /// What it asks for.
    pub(crate) fn wish(&self) -> Result<Wish, ApiError> {
        if self.suffix.is_some() {
            return Err(unsupported("suffix", "the models here write at the end of a text only"));
        }
        let n = within("n", self.n.unwrap_or(1), 1, COMPLETIONS)?;
        let best_of = within("best_of", self.best_of.unwrap_or(n), 1, COMPLETIONS)?;
        if best_of < n {
            return Err(invalid(format!("`best_of` is {best_of}, expected at least `n`, which is {n}")));
        }
        let stream = self.stream.unwrap_or(false);
        if stream && best_of > n {
            let message =
                "`best_of` cannot be streamed: the best are known only when all are written; leave out one of both";
            return Err(invalid(message));
        }
        if !stream && self.stream_options.is_some() {
            return Err(invalid("`stream_options` goes with `\"stream\": true` only"));
        }
        let temperature = number("temperature", self.temperature.unwrap_or(1.0), 0.0, 2.0)?;
        let top_p = number("top_p", self.top_p.unwrap_or(1.0), 0.0, 1.0)?;
        // Without any mass, the likeliest token is what is left.
        let sampling = Sampling { temperature, top_k: 0, top_p, min_p: 0.0, seed: 0 };
        let sampling = (temperature > 0.0 && top_p > 0.0).then_some(sampling);
        let echo = self.echo.unwrap_or(false);
        let alternatives = self.logprobs.map(|count| within("logprobs", count, 0, ALTERNATIVES)).transpose()?;
        let options = self.stream_options.as_ref();
        Ok(Wish {
            max_new_tokens: self.max_tokens.unwrap_or(MAX_TOKENS),
            is_length_given: self.max_tokens.is_some(),
            n,
            best_of,
            sampling,
            seed: self.seed.map(i64::cast_unsigned),
            repetition_penalty: 1.0,
            presence_penalty: number("presence_penalty", self.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            frequency_penalty: number("frequency_penalty", self.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            logit_bias: self.logit_bias.as_ref().map_or_else(Vec::new, |bias| bias.0.clone()),
            stop: checked_stop(self.stop.as_ref())?,
            alternatives,
            echo,
            prompt_logprobs: echo && alternatives.is_some(),
            truncate: None,
            stream,
            details: options.and_then(|options| options.include_usage).unwrap_or(false),
        })
    }
}

impl GenerateRequest {
    /// Whether `POST /` answers with a stream.
    pub(crate) fn asks_for_stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// What it asks for.
    pub(crate) fn wish(&self, stream: bool) -> Result<Wish, ApiError> {
        let none = Parameters::default();
        let given = self.parameters.as_ref().unwrap_or(&none);
        given.refuse_unsupported()?;
        let best_of = within("best_of", given.best_of.unwrap_or(1), 1, COMPLETIONS)?;
        let sampling = given.sampling()?;
        if best_of > 1 && sampling.is_none() {
            return Err(invalid("`best_of` goes with sampling only: set `do_sample`, or `temperature`"));
        }
        if best_of > 1 && stream {
            return Err(invalid("`best_of` cannot be streamed: the best is known only when all are written"));
        }
        let details = given.details.unwrap_or(false);
        let prompt_logprobs = given.decoder_input_details.unwrap_or(false);
        if prompt_logprobs && stream {
            return Err(invalid("`decoder_input_details` is not supported in a stream: ask /generate"));
        }
        if prompt_logprobs && !details {
            return Err(invalid("`decoder_input_details` goes with `\"details\": true` only"));
        }
        let top = within("top_n_tokens", given.top_n_tokens.unwrap_or(0), 0, ALTERNATIVES)?;
        let penalty = given.repetition_penalty.unwrap_or(1.0);
        let frequency = number("frequency_penalty", given.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?;
        Ok(Wish {
            max_new_tokens: within("max_new_tokens", given.max_new_tokens.unwrap_or(MAX_NEW_TOKENS), 1, usize::MAX)?,
            is_length_given: given.max_new_tokens.is_some(),
            n: 1,
            best_of,
            sampling,
            seed: given.seed,
            repetition_penalty: above_zero("repetition_penalty", penalty)?,
            presence_penalty: 0.0,
            frequency_penalty: frequency,
            logit_bias: Vec::new(),
            stop: checked_stop(given.stop.as_ref())?,
            // Its tokens always have logarithms: in a stream, and in the details.
            alternatives: (details || stream || best_of > 1).then_some(top),
            echo: given.return_full_text.unwrap_or(false),
            prompt_logprobs,
            truncate: given.truncate.map(|tokens| within("truncate", tokens, 1, usize::MAX)).transpose()?,
            stream,
            details,
        })
    }
}

impl Parameters {
    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        for (given, name) in [
            (self.adapter_id.is_some(), "adapter_id"),
            (self.grammar.is_some(), "grammar"),
            (self.typical_p.is_some(), "typical_p"),
            (self.watermark.unwrap_or(false), "watermark"),
        ] {
            if given {
                return Err(unsupported(name, "leave it out"));
            }
        }
        Ok(())
    }

    /// As Text Generation Inference has it: whoever gives one of these numbers samples, with `do_sample` or without.
    fn sampling(&self) -> Result<Option<Sampling>, ApiError> {
        let temperature = above_zero("temperature", self.temperature.unwrap_or(1.0))?;
        let top_p = self.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(invalid(format!("`top_p` is {top_p}, expected a number above 0 and at most 1")));
        }
        let min_p = number("min_p", self.min_p.unwrap_or(0.0), 0.0, 1.0)?;
        let top_k = self.top_k.map(|k| within("top_k", k, 1, usize::MAX)).transpose()?;
        let given = temperature != 1.0 || top_p < 1.0 || min_p > 0.0 || top_k.is_some();
        let samples = self.do_sample.unwrap_or(false) || given;
        let top_k = top_k.unwrap_or(0);
        Ok(samples.then_some(Sampling { temperature, top_k, top_p: top_p as f32, min_p, seed: 0 }))
    }
}

/// Bytes as each kind of request to write: what is accepted has numbers that make sense, and lists within their limits.
pub(crate) fn fuzz(bytes: &[u8]) {
    let completion = serde_json::from_slice::<CompletionRequest>(bytes).ok().and_then(|request| request.wish().ok());
    let generate = serde_json::from_slice::<GenerateRequest>(bytes).ok();
    let generate = generate.iter().flat_map(|request| [false, true].map(|stream| request.wish(stream).ok())).flatten();
    for wish in completion.into_iter().chain(generate) {
        assert!(wish.n >= 1 && wish.n <= wish.best_of && wish.best_of <= COMPLETIONS);
        assert!(wish.stop.len() <= STOPS && wish.stop.iter().all(|stop| (1..=STOP_BYTES).contains(&stop.len())));
        assert!(wish.logit_bias.len() <= BIASES && wish.logit_bias.iter().all(|(_, bias)| bias.abs() <= 100.0));
        assert!(wish.alternatives.is_none_or(|count| count <= ALTERNATIVES));
        assert!(wish.repetition_penalty > 0.0 && wish.repetition_penalty.is_finite());
        assert!(wish.presence_penalty.abs() <= 2.0 && wish.frequency_penalty.abs() <= 2.0);
        if let Some(Sampling { temperature, top_p, min_p, .. }) = wish.sampling {
            assert!(temperature > 0.0 && temperature.is_finite() && top_p > 0.0 && top_p <= 1.0 && min_p <= 1.0);
        }
    }
}

/// One stop string or several.
#[derive(Debug)]
struct Stop(Vec<String>);

fn checked_stop(stop: Option<&Stop>) -> Result<Vec<String>, ApiError> {
    let Some(Stop(stops)) = stop else { return Ok(Vec::new()) };
    for stop in stops {
        if stop.is_empty() {
            return Err(invalid("`stop` has an empty text, which every text begins with: leave it out"));
        }
        if stop.len() > STOP_BYTES {
            return Err(invalid(format!("`stop` has a text of {} bytes, expected at most {STOP_BYTES}", stop.len())));
        }
    }
    Ok(stops.clone())
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopVisitor;
        impl<'de> Visitor<'de> for StopVisitor {
            type Value = Stop;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "`stop` as a text or as a list of at most {STOPS} texts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stop, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = list.next_element::<String>()? {
                    if stops.len() == STOPS {
                        return Err(de::Error::invalid_length(STOPS + 1, &self));
                    }
                    stops.push(stop);
                }
                Ok(Stop(stops))
            }
        }
        deserializer.deserialize_any(StopVisitor)
    }
}

/// Token ids, which JSON has as texts, with what is added to their logits.
#[derive(Debug)]
struct LogitBias(Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;
        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = LogitBias;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(
                    formatter,
                    "`logit_bias` as an object of at most {BIASES} token ids with numbers from -100 to 100"
                )
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let bad = |what: &str| de::Error::custom(format!("`logit_bias` has {what}"));
                    let id: u32 = key.parse().map_err(|_| bad(&format!("the key {key:?}, which is not a token id")))?;
                    let value: f64 = map.next_value()?;
                    if !(-100.0..=100.0).contains(&value) {
                        return Err(bad(&format!("{value} for token {id}, expected a number from -100 to 100")));
                    }
                    if biases.insert(id, value as f32).is_some() {
                        return Err(bad(&format!("token {id} twice")));
                    }
                    if biases.len() > BIASES {
                        return Err(bad(&format!("more than {BIASES} tokens")));
                    }
                }
                Ok(LogitBias(biases.into_iter().collect()))
            }
        }
        deserializer.deserialize_any(BiasVisitor)
    }
}

pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(Kind::Validation, message)
}

fn unsupported(field: &str, next: &str) -> ApiError {
    invalid(format!("`{field}` is not supported: {next}"))
}

fn within(field: &str, given: usize, least: usize, most: usize) -> Result<usize, ApiError> {
    match given {
        given if (least..=most).contains(&given) => Ok(given),
        given if most == usize::MAX => Err(invalid(format!("`{field}` is {given}, expected at least {least}"))),
        given => Err(invalid(format!("`{field}` is {given}, expected {least} to {most}"))),
    }
}

fn number(field: &str, given: f64, least: f64, most: f64) -> Result<f32, ApiError> {
    if (least..=most).contains(&given) {
        return Ok(given as f32);
    }
    Err(invalid(format!("`{field}` is {given}, expected a number from {least} to {most}")))
}

fn above_zero(field: &str, given: f64) -> Result<f32, ApiError> {
    // What is finite as f64 may be infinite as f32, or zero.
    let narrow = given as f32;
    if narrow > 0.0 && narrow.is_finite() {
        return Ok(narrow);
    }
    Err(invalid(format!("`{field}` is {given}, expected a number above 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(json: &str) -> Result<Wish, String> {
        let request = serde_json::from_str::<CompletionRequest>(json).map_err(|error| error.to_string())?;
        request.wish().map_err(|error| error.to_string())
    }

    fn generate(parameters: &str, stream: bool) -> Result<Wish, String> {
        let json = format!(r#"{{"inputs": "a", "parameters": {parameters}}}"#);
        let request = serde_json::from_str::<GenerateRequest>(&json).map_err(|error| error.to_string())?;
        request.wish(stream).map_err(|error| error.to_string())
    }

    #[test]
    fn completions_begin_with_openais_defaults() {
        let wish = completion(r#"{"prompt": "a"}"#).unwrap();
        assert_eq!((wish.max_new_tokens, wish.n, wish.best_of, wish.stream, wish.echo), (16, 1, 1, false, false));
        let sampling = wish.sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (1.0, 1.0, 0));
        assert_eq!((wish.alternatives, wish.seed, wish.stop.len()), (None, None, 0));
        // null is the same as nothing.
        let nulls = r#"{"prompt": "a", "stop": null, "logit_bias": null, "n": null, "suffix": null, "seed": null,
                        "stream": null, "stream_options": null, "temperature": null, "user": null, "logprobs": null}"#;
        assert_eq!(completion(nulls).unwrap(), completion(r#"{"prompt": "a"}"#).unwrap());
    }

    #[test]
    fn completions_take_what_openai_has() {
        let json = r#"{"prompt": ["a", "b"], "max_tokens": 0, "n": 2, "best_of": 3, "echo": true, "logprobs": 5,
                       "stop": ["x", "y"], "seed": -1, "logit_bias": {"7": -100, "3": 100}, "temperature": 0,
                       "top_p": 0.5, "presence_penalty": 2, "frequency_penalty": -2, "user": "u"}"#;
        let wish = completion(json).unwrap();
        assert_eq!((wish.max_new_tokens, wish.n, wish.best_of), (0, 2, 3));
        assert_eq!((wish.alternatives, wish.prompt_logprobs, wish.seed), (Some(5), true, Some(u64::MAX)));
        assert_eq!((wish.sampling, wish.stop), (None, vec!["x".to_owned(), "y".to_owned()]));
        assert_eq!(wish.logit_bias, [(3, 100.0), (7, -100.0)]);
        assert_eq!((wish.presence_penalty, wish.frequency_penalty), (2.0, -2.0));
        let usage = r#"{"prompt": "a", "stream": true, "stream_options": {"include_usage": true}, "stop": "x"}"#;
        let wish = completion(usage).unwrap();
        assert!(wish.stream && wish.details && wish.stop == ["x"]);
    }

    #[test]
    fn what_completions_cannot_have_is_refused_by_name() {
        let many = format!("{{{}}}", (0..301).map(|id| format!("\"{id}\": 1")).collect::<Vec<_>>().join(", "));
        let long = format!("{:?}", "a".repeat(1025));
        for (field, value, part) in [
            ("suffix", "\"x\"", "`suffix` is not supported"),
            ("n", "0", "`n` is 0, expected 1 to 128"),
            ("n", "1000000000", "`n` is 1000000000"),
            ("n", "-1", "invalid value"),
            ("best_of", "129", "`best_of`"),
            ("logprobs", "6", "`logprobs` is 6, expected 0 to 5"),
            ("temperature", "-0.1", "`temperature` is -0.1, expected a number from 0 to 2"),
            ("temperature", "2.5", "`temperature`"),
            ("temperature", "1e300", "`temperature`"),
            ("temperature", "NaN", "expected value"),
            ("temperature", "1e999", "number out of range"),
            ("temperature", "\"NaN\"", "invalid type"),
            ("top_p", "1.1", "`top_p`"),
            ("presence_penalty", "3", "`presence_penalty`"),
            ("frequency_penalty", "-3", "`frequency_penalty`"),
            ("stop", "[\"a\", \"b\", \"c\", \"d\", \"e\"]", "at most 4 texts"),
            ("stop", "\"\"", "`stop` has an empty text"),
            ("stop", &long, "1025 bytes"),
            ("stop", "3", "`stop` as a text"),
            ("stop", "[[\"a\"]]", "invalid type"),
            ("logit_bias", &many, "more than 300 tokens"),
            ("logit_bias", r#"{"a": 1}"#, "not a token id"),
            ("logit_bias", r#"{"1": 101}"#, "101 for token 1"),
            ("logit_bias", r#"{"1": 1, "01": 1}"#, "token 1 twice"),
            ("logit_bias", "[1]", "`logit_bias` as an object"),
            ("stream_options", r#"{"include_usage": true}"#, "`stream_options` goes with"),
            ("max_new_tokens", "3", "unknown field `max_new_tokens`"),
        ] {
            let error = completion(&format!(r#"{{"prompt": "a", "{field}": {value}}}"#)).unwrap_err();
            assert!(error.contains(part), "{field} {value}: {error}");
        }
        for (more, part) in [
            (r#""n": 3, "best_of": 2"#, "at least `n`, which is 3"),
            (r#""best_of": 2, "stream": true"#, "`best_of` cannot be streamed"),
            (r#""stream": true, "stream_options": {"include_obfuscation": true}"#, "include_obfuscation"),
        ] {
            let error = completion(&format!(r#"{{"prompt": "a", {more}}}"#)).unwrap_err();
            assert!(error.contains(part), "{more}: {error}");
        }
        assert!(completion("{}").unwrap_err().contains("missing field `prompt`"));
    }

    #[test]
    fn generate_begins_with_text_generation_inferences_defaults() {
        let wish = generate("{}", false).unwrap();
        assert_eq!((wish.max_new_tokens, wish.sampling, wish.best_of, wish.details), (20, None, 1, false));
        assert_eq!((wish.alternatives, wish.echo, wish.truncate), (None, false, None));
        let request: GenerateRequest = serde_json::from_str(r#"{"inputs": "a"}"#).unwrap();
        assert_eq!(request.wish(false).unwrap(), wish);
        // In a stream every token has its logarithm.
        assert_eq!(generate("{}", true).unwrap().alternatives, Some(0));
    }

    #[test]
    fn any_number_of_sampling_asks_for_it() {
        for parameters in [r#"{"do_sample": true}"#, r#"{"temperature": 0.5}"#, r#"{"top_k": 3}"#, r#"{"top_p": 0.9}"#]
        {
            assert!(generate(parameters, false).unwrap().sampling.is_some(), "{parameters}");
        }
        for parameters in [r#"{"temperature": 1.0}"#, r#"{"top_p": 1.0}"#, r#"{"seed": 3}"#] {
            assert!(generate(parameters, false).unwrap().sampling.is_none(), "{parameters}");
        }
        let all = r#"{"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.25, "repetition_penalty": 1.5,
                      "max_new_tokens": 7, "stop": ["x"], "best_of": 2, "return_full_text": true, "details": true,
                      "decoder_input_details": true, "top_n_tokens": 5, "truncate": 9, "seed": 3, "watermark": false}"#;
        let wish = generate(all, false).unwrap();
        let sampling = wish.sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), (0.5, 3, 0.9, 0.25));
        assert_eq!((wish.repetition_penalty, wish.max_new_tokens, wish.best_of, wish.echo), (1.5, 7, 2, true));
        assert_eq!(
            (wish.prompt_logprobs, wish.alternatives, wish.truncate, wish.seed),
            (true, Some(5), Some(9), Some(3))
        );
    }

    #[test]
    fn what_generate_cannot_have_is_refused_by_name() {
        for (parameters, stream, part) in [
            (r#"{"typical_p": 0.5}"#, false, "`typical_p` is not supported"),
            (r#"{"watermark": true}"#, false, "`watermark` is not supported"),
            (r#"{"grammar": {"type": "json"}}"#, false, "`grammar` is not supported"),
            (r#"{"adapter_id": "a"}"#, false, "`adapter_id` is not supported"),
            (r#"{"temperature": 0}"#, false, "`temperature` is 0, expected a number above 0"),
            (r#"{"temperature": -1}"#, false, "`temperature`"),
            (r#"{"temperature": 1e-60}"#, false, "`temperature`"),
            (r#"{"temperature": 1e60}"#, false, "`temperature`"),
            (r#"{"repetition_penalty": 0}"#, false, "`repetition_penalty`"),
            (r#"{"top_p": 0}"#, false, "`top_p`"),
            (r#"{"top_k": 0}"#, false, "`top_k` is 0, expected at least 1"),
            (r#"{"min_p": 2}"#, false, "`min_p`"),
            (r#"{"max_new_tokens": 0}"#, false, "`max_new_tokens`"),
            (r#"{"truncate": 0}"#, false, "`truncate`"),
            (r#"{"top_n_tokens": 6}"#, false, "`top_n_tokens`"),
            (r#"{"best_of": 2}"#, false, "goes with sampling only"),
            (r#"{"best_of": 2, "do_sample": true}"#, true, "cannot be streamed"),
            (r#"{"decoder_input_details": true}"#, false, "\"details\": true"),
            (r#"{"decoder_input_details": true, "details": true}"#, true, "not supported in a stream"),
            (r#"{"max_tokens": 3}"#, false, "unknown field `max_tokens`"),
        ] {
            let error = generate(parameters, stream).unwrap_err();
            assert!(error.contains(part), "{parameters}: {error}");
        }
    }
}
