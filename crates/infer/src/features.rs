//! Vectors of single tokens from chosen layers: BERT as a feature extractor (section 5.3 of the paper).

use std::fmt;
use std::str::FromStr;

use henson_text::{Features, windows_with_most_context};

use crate::read::Carried;
use crate::{InferError, Length, Model, Output, Read, Request, Result};

/// Which layers, and what becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// One: 0 is the embeddings' output, 1 to L the blocks', and −1 the last, −2 the one before, and so on.
    One(i32),
    /// The last n added up.
    SumLast(usize),
    /// The last n side by side, in the order of the network.
    ConcatLast(usize),
    /// All blocks added up, without the embeddings.
    SumAll,
    /// The mean of the last n.
    MeanLast(usize),
    /// The mean of all blocks, without the embeddings.
    MeanAll,
    /// Embeddings and all blocks, side by side.
    All,
}

impl FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |digits: &str| digits.parse::<usize>().ok().filter(|n| *n > 0);
        match text {
            "last" => return Ok(Layers::One(-1)),
            "embeddings" => return Ok(Layers::One(0)),
            "all" => return Ok(Layers::All),
            "sum-all" => return Ok(Layers::SumAll),
            "mean-all" => return Ok(Layers::MeanAll),
            _ => {}
        }
        if let Some(n) = text.strip_prefix("sum-last-").and_then(number) {
            return Ok(Layers::SumLast(n));
        }
        if let Some(n) = text.strip_prefix("mean-last-").and_then(number) {
            return Ok(Layers::MeanLast(n));
        }
        if let Some(n) = text.strip_prefix("concat-last-").and_then(number) {
            return Ok(Layers::ConcatLast(n));
        }
        text.parse::<i32>().map(Layers::One).map_err(|_| {
            format!(
                "unknown layers `{text}`: expected last, a number (0 embeddings, 1 the first block, -1 the last), \
                 sum-last-4, mean-last-4, concat-last-4, sum-all, mean-all, all or embeddings"
            )
        })
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layers::One(-1) => f.write_str("last"),
            Layers::One(n) => write!(f, "{n}"),
            Layers::SumLast(n) => write!(f, "sum-last-{n}"),
            Layers::ConcatLast(n) => write!(f, "concat-last-{n}"),
            Layers::SumAll => f.write_str("sum-all"),
            Layers::MeanLast(n) => write!(f, "mean-last-{n}"),
            Layers::MeanAll => f.write_str("mean-all"),
            Layers::All => f.write_str("all"),
        }
    }
}

impl Layers {
    /// The hidden states to use (0 to L), and the factor on their sum; none: they lie side by side.
    pub(crate) fn choose(self, blocks: usize) -> Result<(Vec<usize>, Option<f32>)> {
        let wrong = |what: String| Err(InferError::Layers(format!("{what}: the model has {blocks} layers")));
        let last = |n: usize| (blocks + 1 - n..=blocks).collect();
        match self {
            Layers::One(n) => {
                let index = if n < 0 { blocks as i64 + 1 + i64::from(n) } else { i64::from(n) };
                match usize::try_from(index) {
                    Ok(index) if index <= blocks => Ok((vec![index], None)),
                    _ => wrong(format!("there is no layer {n}")),
                }
            }
            Layers::SumLast(n) | Layers::MeanLast(n) | Layers::ConcatLast(n) if n > blocks => {
                wrong(format!("there are no {n} last layers"))
            }
            Layers::SumLast(n) => Ok((last(n), Some(1.0))),
            Layers::MeanLast(n) => Ok((last(n), Some(1.0 / n as f32))),
            Layers::ConcatLast(n) => Ok((last(n), None)),
            Layers::SumAll => Ok((last(blocks), Some(1.0))),
            Layers::MeanAll => Ok((last(blocks), Some(1.0 / blocks as f32))),
            Layers::All => Ok(((0..=blocks).collect(), None)),
        }
    }
}

/// The tokens of a text with a vector each.
#[derive(Clone, Debug)]
pub struct TokenFeatures {
    /// Their texts, special tokens included.
    pub tokens: Vec<String>,
    /// Where each stands in the text, in bytes; none for special tokens.
    pub offsets: Vec<Option<(usize, usize)>>,
    /// One row a token.
    pub vectors: Vec<f32>,
    /// Numbers in a row.
    pub width: usize,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

/// What separates the words of a model whose tokens are bytes.
fn is_space(letter: char) -> bool {
    letter.is_ascii_whitespace() || letter == '\u{b}'
}

impl TokenFeatures {
    /// The same with a row for each word of the text instead of each of its bytes, which all have the word's vector.
    fn by_words(self, text: &str) -> Self {
        let Self { tokens, offsets, vectors, width, dropped } = self;
        let mut out = Self { tokens: vec![], offsets: vec![], vectors: vec![], width, dropped };
        let mut open = false;
        for (i, (token, place)) in tokens.into_iter().zip(offsets).enumerate() {
            let white = place.is_some_and(|(start, end)| text[start..end].chars().all(is_space));
            match (place, out.tokens.last_mut(), out.offsets.last_mut()) {
                (Some((_, end)), Some(word), Some(Some(at))) if open && !white => {
                    at.1 = end;
                    text[at.0..end].clone_into(word);
                }
                _ if white => {}
                _ => {
                    out.tokens.push(place.map_or(token, |(start, end)| text[start..end].to_owned()));
                    out.offsets.push(place);
                    out.vectors.extend_from_slice(&vectors[i * width..(i + 1) * width]);
                }
            }
            open = place.is_some() && !white;
        }
        out
    }
}

impl Model {
    /// A vector for every token of every text. With windows, each piece comes from the window where it has most
    /// context, and the special tokens from the first and the last one.
    pub fn features(&self, texts: &[&str], layers: Layers, length: Length) -> Result<Vec<TokenFeatures>> {
        self.ask(texts, |text| self.prepare_features(text, layers, length))
    }

    /// [`features`](Self::features) of a recurrent network as ELMo's authors computed them: every text begins where the one before it
    /// ended. An error of other networks.
    pub fn features_in_turn(
        &self,
        texts: &[&str],
        layers: Layers,
        length: Length,
        carried: &mut Carried,
    ) -> Result<Vec<TokenFeatures>> {
        if self.config().model.characters().is_none() {
            let why = "there are no states to carry: only recurrent networks have them";
            return Err(InferError::Layers(format!("{}: {why}", self.config().model.model_type())));
        }
        let requests = texts.iter().map(|text| self.prepare_features(text, layers, length));
        self.run_in_turn(Request::all(requests.collect::<Result<_>>()?), carried)
    }

    /// [`features`](Self::features) for one text, to be run.
    pub fn prepare_features(&self, text: &str, layers: Layers, length: Length) -> Result<Request<TokenFeatures>> {
        let width = self.width_of(layers)?;
        let (windows, dropped) = self.windows_of(&self.tokenizer().encode(text)?, length)?;
        // Of a model whose tokens are bytes, what is given are words.
        let text = self.config().model.characters().map(|_| text.to_owned());
        Ok(Request::new(windows, Read::Layers(layers), dropped, move |model, read| {
            let mut out = TokenFeatures { tokens: vec![], offsets: vec![], vectors: vec![], width, dropped };
            let (windows, outputs): (Vec<Features>, Vec<Output>) = read.into_iter().unzip();
            let mut take = |window: usize, position: usize| {
                out.tokens.push(model.name_of(windows[window].ids[position]));
                out.offsets.push(windows[window].offsets[position]);
                out.vectors.extend_from_slice(&outputs[window].numbers[position * width..(position + 1) * width]);
            };
            let Some(last) = windows.len().checked_sub(1) else { return out };
            (0..windows[0].first.start).for_each(|position| take(0, position));
            for (piece, window) in windows_with_most_context(&windows).into_iter().enumerate() {
                if let Some(position) = windows[window].position_of_piece(piece) {
                    take(window, position);
                }
            }
            (windows[last].first.end..windows[last].len()).for_each(|position| take(last, position));
            match &text {
                Some(text) => out.by_words(text),
                None => out,
            }
        }))
    }

    /// Where each row of [`features`](Self::features) stands in the text, in bytes, special tokens not counted: tokens, or words of a
    /// model whose tokens are bytes.
    pub fn feature_offsets(&self, text: &str) -> Result<Vec<(usize, usize)>> {
        if self.config().model.characters().is_none() {
            return Ok(self.tokenizer().encode(text)?.offsets);
        }
        let at = |word: &str| {
            let start = word.as_ptr().addr() - text.as_ptr().addr();
            (start, start + word.len())
        };
        Ok(text.split(is_space).filter(|word| !word.is_empty()).map(at).collect())
    }

    /// A vector for every position of a text that was laid out elsewhere, row after row, one list for each window; to be run.
    pub fn prepare_windows(&self, windows: Vec<Features>, layers: Layers) -> Result<Request<Vec<Vec<f32>>>> {
        self.width_of(layers)?;
        Ok(Request::new(windows, Read::Layers(layers), 0, |_, read| {
            read.into_iter().map(|(_, output)| output.numbers).collect()
        }))
    }

    /// How long the vector of a token is.
    pub fn width_of(&self, layers: Layers) -> Result<usize> {
        let sizes = self.config().model.sizes();
        let (chosen, factor) = layers.choose(sizes.num_hidden_layers)?;
        Ok(if factor.is_some() { sizes.hidden_size } else { sizes.hidden_size * chosen.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_layers() {
        let choose = |text: &str| text.parse::<Layers>().unwrap().choose(4).map_err(|e| e.to_string());
        assert_eq!(choose("last"), Ok((vec![4], None)));
        assert_eq!(choose("-2"), Ok((vec![3], None)));
        assert_eq!(choose("embeddings"), Ok((vec![0], None)));
        assert_eq!(choose("sum-last-4"), Ok((vec![1, 2, 3, 4], Some(1.0))));
        assert_eq!(choose("mean-last-2"), Ok((vec![3, 4], Some(0.5))));
        assert_eq!(choose("mean-all"), Ok((vec![1, 2, 3, 4], Some(0.25))));
        assert_eq!(choose("concat-last-2"), Ok((vec![3, 4], None)));
        assert_eq!(choose("all"), Ok((vec![0, 1, 2, 3, 4], None)));
        assert!(choose("5").unwrap_err().contains("no layer 5"));
        assert!(choose("-6").unwrap_err().contains("no layer -6"));
        assert!(choose("sum-last-5").is_err() && choose("mean-last-5").is_err());
        assert!("first".parse::<Layers>().unwrap_err().contains("concat-last-4"));
    }
}
