//! How likely the tokens of a prompt were, to a model that reads left to right. (How likely whole texts are is in
//! `likelihood`.)

use henson_text::Features;

use crate::{Model, Read, Request, TokenScore};

impl Model {
    /// Asks for every token after the first: ln P after those before it, and the likeliest `top` in its place.
    pub fn prepare_prompt_scores(&self, prompt: &[u32], top: usize) -> Request<Vec<TokenScore>> {
        let length = prompt.len();
        let features = Features {
            ids: prompt.to_vec(),
            segments: vec![0; length],
            offsets: vec![None; length],
            spellings: None,
            first: 0..length,
            second: None,
            first_piece: 0,
            dropped: 0,
        };
        Request::new(vec![features], Read::Next { top }, 0, move |_, read| {
            let scores = read.iter().flat_map(|(features, output)| {
                let numbers = output.numbers.chunks(top + 1);
                features.ids.iter().skip(1).zip(numbers).enumerate().map(move |(i, (id, numbers))| {
                    let ids = &output.ids[i * top..(i + 1) * top];
                    let alternatives = ids.iter().copied().zip(numbers[1..].iter().copied()).collect();
                    TokenScore { id: *id, logprob: numbers[0], alternatives }
                })
            });
            scores.collect()
        })
    }
}
