//! Vectors of words from chosen layers of an encoder.

use std::fmt;
use std::ops::ControlFlow;
use std::str::FromStr;

use henson_infer::{Layers, Model, Request};
use henson_text::{TextError, WordWindows};
use henson_train::TrainError;
use serde::{Deserialize, Serialize};

use crate::error::TaskError;

/// Texts that go through the encoder at a time.
const TOGETHER: usize = 64;

/// Which layers, and what becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum FeatureLayers {
    /// As the encoder gives them.
    Fixed(Layers),
    /// The last n, added up with weights that are learned with the tagger: γ·Σ softmax(w)ᵢ·layerᵢ (Peters et al. 2018).
    MixLast(usize),
    /// The same of all blocks, without the embeddings.
    MixAll,
    /// The same of the embeddings and all blocks, as ELMo's authors do.
    MixWhole,
}

impl FromStr for FeatureLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |digits: &str| digits.parse::<usize>().ok().filter(|n| *n > 0);
        match text.strip_prefix("mix-") {
            Some("all") => Ok(Self::MixAll),
            Some("whole") => Ok(Self::MixWhole),
            Some(last) if let Some(n) = last.strip_prefix("last-").and_then(number) => Ok(Self::MixLast(n)),
            _ => text
                .parse()
                .map(Self::Fixed)
                .map_err(|problem: String| format!("{problem}, mix-last-4, mix-all or mix-whole")),
        }
    }
}

impl fmt::Display for FeatureLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(layers) => layers.fmt(f),
            Self::MixLast(n) => write!(f, "mix-last-{n}"),
            Self::MixAll => f.write_str("mix-all"),
            Self::MixWhole => f.write_str("mix-whole"),
        }
    }
}

impl TryFrom<String> for FeatureLayers {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<FeatureLayers> for String {
    fn from(layers: FeatureLayers) -> Self {
        layers.to_string()
    }
}

impl FeatureLayers {
    /// What the encoder is asked for, and how many layers of that lie side by side to be mixed; 0: none.
    pub(crate) fn of_encoder(self, blocks: usize) -> (Layers, usize) {
        match self {
            Self::Fixed(layers) => (layers, 0),
            Self::MixLast(n) => (Layers::ConcatLast(n), n),
            Self::MixAll => (Layers::ConcatLast(blocks), blocks),
            Self::MixWhole => (Layers::All, blocks + 1),
        }
    }
}

/// The vectors of a sentence's words.
#[derive(Debug)]
pub(crate) struct Vectors {
    /// Its words in all.
    pub(crate) count: usize,
    /// The words that have one, by their places: the tokenizer leaves nothing of some.
    pub(crate) words: Vec<usize>,
    /// One row each.
    pub(crate) rows: Vec<f32>,
}

/// The vectors of the words of some sentences, and how long one is. A word's is that of its first piece, read in the window
/// where it has most context. `lay_out` makes a sentence's windows; `each` is told how many sentences are done, and may end it.
pub(crate) fn vectors_of_words<T>(
    model: &Model,
    sentences: &[T],
    layers: Layers,
    lay_out: impl Fn(&T) -> Result<WordWindows, TextError>,
    mut each: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<(Vec<Vectors>, usize), TaskError> {
    let (mut all, width) = (Vec::with_capacity(sentences.len()), model.width_of(layers)?);
    for some in sentences.chunks(TOGETHER) {
        let (mut requests, mut places) = (Vec::new(), Vec::new());
        for sentence in some {
            let words = lay_out(sentence).map_err(TrainError::from)?;
            requests.push(model.prepare_windows(words.windows, layers)?);
            places.push(words.places);
        }
        let numbers: Vec<usize> = (all.len() + 1..=all.len() + some.len()).collect();
        let vectors = model.run(Request::all(requests)).map_err(|error| error.numbered(&numbers))?;
        for (places, own) in places.iter().zip(&vectors) {
            let read = places.iter().enumerate().filter_map(|(word, place)| Some((word, (*place)?)));
            let (count, mut words, mut rows) = (places.len(), Vec::new(), Vec::new());
            for (word, (window, position)) in read {
                words.push(word);
                rows.extend_from_slice(&own[window][position * width..][..width]);
            }
            all.push(Vectors { count, words, rows });
        }
        if each(all.len()).is_break() {
            return Err(TaskError::Stopped);
        }
    }
    Ok((all, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_layers() {
        let cases = [
            ("last", FeatureLayers::Fixed(Layers::One(-1)), (Layers::One(-1), 0)),
            ("-2", FeatureLayers::Fixed(Layers::One(-2)), (Layers::One(-2), 0)),
            ("concat-last-4", FeatureLayers::Fixed(Layers::ConcatLast(4)), (Layers::ConcatLast(4), 0)),
            ("mean-last-4", FeatureLayers::Fixed(Layers::MeanLast(4)), (Layers::MeanLast(4), 0)),
            ("mean-all", FeatureLayers::Fixed(Layers::MeanAll), (Layers::MeanAll, 0)),
            ("mix-last-4", FeatureLayers::MixLast(4), (Layers::ConcatLast(4), 4)),
            ("mix-all", FeatureLayers::MixAll, (Layers::ConcatLast(6), 6)),
        ];
        for (name, layers, of_encoder) in cases {
            assert_eq!(name.parse(), Ok(layers), "{name}");
            assert_eq!(layers.to_string(), name);
            assert_eq!(layers.of_encoder(6), of_encoder, "{name}");
        }
        for wrong in ["mix-last-0", "mix-first-2", "mix", ""] {
            assert!(wrong.parse::<FeatureLayers>().unwrap_err().contains("mix-all"), "{wrong}");
        }
    }
}
