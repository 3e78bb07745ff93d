//! Bodies that are nearly right, by the same ways as in `fuzz/`, for those who have no libFuzzer: the parsers, and the routes that write.

use crate::common::writer;
use henson_serve::Source;
use henson_serve::fuzzing::{Server, examples, requests};

/// Bodies to begin with.
const SEEDS: [&str; 6] = [
    r#"{"prompt": ["a", "the"], "max_tokens": 3, "n": 2, "best_of": 3, "echo": true, "logprobs": 2, "stop": ["x", "y"], "seed": -1}"#,
    r#"{"prompt": [[1, 2], [97]], "logit_bias": {"7": -100, "8": 1.5}, "temperature": 0, "top_p": 0.5, "presence_penalty": 1, "stream": true, "stream_options": {"include_usage": true}}"#,
    r#"{"prompt": "a \ud83d\udc38", "max_tokens": 0, "echo": true, "logprobs": 0, "user": "u", "model": "gpt"}"#,
    r#"{"inputs": "the", "parameters": {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "stop": ["x"], "best_of": 2, "details": true, "decoder_input_details": true, "top_n_tokens": 2, "truncate": 3}}"#,
    r#"{"inputs": "the", "parameters": {"do_sample": true, "return_full_text": true, "frequency_penalty": 0.5}, "stream": true}"#,
    r#"{"inputs": ["a", "b"], "normalize": true, "truncate": false, "dimensions": 3}"#,
];

/// What often breaks readers of numbers, texts and lists.
const PARTS: [&str; 20] = [
    "-1",
    "0",
    "1e999",
    "-0.0",
    "1e-400",
    "18446744073709551616",
    "9223372036854775807",
    "NaN",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[",
    "\\u0000",
    "\\ud800",
    "\u{fffd}",
    "\"stream\": true,",
    "\"n\": 128,",
    "\"stop\": [\"\",",
];

/// Xorshift: the same bodies each time.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }

    /// A seed with up to four changes.
    fn body(&mut self) -> Vec<u8> {
        let mut body = SEEDS[self.below(SEEDS.len())].as_bytes().to_vec();
        for _ in 0..=self.below(4) {
            let place = self.below(body.len() + 1);
            let until = (place + 1 + self.below(8)).min(body.len());
            match self.below(6) {
                0 if place < body.len() => body[place] ^= 1 << self.below(8),
                1 => drop(body.drain(place..until)),
                2 => body.truncate(place),
                3 => {
                    let other = SEEDS[self.below(SEEDS.len())].as_bytes();
                    let from = self.below(other.len());
                    body.splice(place..until, other[from..(from + 30).min(other.len())].iter().copied());
                }
                4 => {
                    // A number as another one.
                    let digit = |from: usize| (from..body.len()).find(|i| body[*i].is_ascii_digit());
                    let Some(first) = digit(place).or_else(|| digit(0)) else { continue };
                    let length = body[first..].iter().take_while(|c| c.is_ascii_digit() || **c == b'.').count();
                    body.splice(first..first + length, PARTS[self.below(PARTS.len())].bytes());
                }
                _ => drop(body.splice(place..place, PARTS[self.below(PARTS.len())].bytes())),
            }
        }
        body
    }
}

#[test]
fn changed_bodies_are_parsed_or_refused() {
    let mut draw = Draw(0x2545_f491_4f6c_dd1d);
    SEEDS.iter().for_each(|seed| requests(seed.as_bytes()));
    (0..100_000).for_each(|_| requests(&draw.body()));
}

#[test]
fn changed_bodies_get_a_proper_answer_on_routes_that_write() {
    let directory = writer(64);
    let server = Server::new(vec![Source { name: "gpt".to_owned(), path: directory.path().to_owned() }]);
    let examples = examples();
    examples.iter().for_each(|example| server.ask(example));
    // The numbers of the routes that write: their examples have a prompt, or parameters of new tokens.
    let writes = |example: &&Vec<u8>| {
        let text = String::from_utf8_lossy(&example[2..]);
        text.contains("\"prompt\"") || text.contains("new_tokens")
    };
    let routes: Vec<u8> = examples.iter().filter(writes).map(|example| example[0]).collect();
    assert_eq!(routes.len(), 3);
    let mut draw = Draw(0x9e37_79b9_7f4a_7c15);
    for _ in 0..1500 {
        let route = routes[draw.below(routes.len())];
        let named = draw.below(2) as u8;
        server.ask(&[&[route, named], draw.body().as_slice()].concat());
    }
}
