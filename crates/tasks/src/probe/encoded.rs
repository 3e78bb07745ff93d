//! The texts of a set as an encoder reads them: which tokens a span has, and the vectors of all layers.

use std::ops::{ControlFlow, Range};

use henson_infer::{Layers, Length, Model, Request};
use henson_text::{join_words, words_of_pieces};

use super::data::{EdgeExample, EdgeSet};
use crate::error::TaskError;

/// Texts that go through the encoder at a time.
const TOGETHER: usize = 64;

/// A set as an encoder reads it.
pub(super) struct Encoded<'a> {
    model: &'a Model,
    length: Length,
    texts: Vec<Text>,
    /// The vectors of each text, all layers side by side, where they are kept.
    kept: Option<Vec<Vec<f32>>>,
}

/// A text with the tokens of its targets.
struct Text {
    text: String,
    /// Tokens, or words of a model whose tokens are bytes; special ones not counted.
    tokens: usize,
    targets: Vec<Readable>,
}

/// A target whose spans have tokens.
pub(super) struct Readable {
    /// Its number among the text's targets.
    pub(super) number: usize,
    /// The tokens of each span.
    pub(super) spans: Vec<Range<usize>>,
}

impl<'a> Encoded<'a> {
    /// Finds the tokens of all spans.
    pub(super) fn new(model: &'a Model, set: &EdgeSet, max_length: usize) -> Result<Self, TaskError> {
        let length = Length { most: Some(max_length), windows: true };
        let texts = set.examples.iter().map(|example| Text::new(model, example)).collect::<Result<_, _>>()?;
        Ok(Self { model, length, texts, kept: None })
    }

    /// Bytes of all vectors.
    pub(super) fn bytes(&self) -> Result<usize, TaskError> {
        Ok(4 * self.model.width_of(Layers::All)? * self.texts.iter().map(|text| text.tokens).sum::<usize>())
    }

    /// Reads all texts and keeps their vectors. `each` is told how many are read, and may end it.
    pub(super) fn keep(&mut self, mut each: impl FnMut(usize) -> ControlFlow<()>) -> Result<(), TaskError> {
        let mut kept = Vec::with_capacity(self.texts.len());
        let all: Vec<usize> = (0..self.texts.len()).collect();
        for some in all.chunks(TOGETHER) {
            kept.extend(self.read(some)?);
            if each(kept.len()).is_break() {
                return Err(TaskError::Stopped);
            }
        }
        self.kept = Some(kept);
        Ok(())
    }

    /// How many texts there are.
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Tokens of a text.
    pub(super) fn tokens(&self, text: usize) -> usize {
        self.texts[text].tokens
    }

    /// The targets of a text that have tokens.
    pub(super) fn targets(&self, text: usize) -> &[Readable] {
        &self.texts[text].targets
    }

    /// The vectors of all tokens of some texts, row after row: the first `layers` layers side by side.
    pub(super) fn vectors(&self, texts: &[usize], layers: usize) -> Result<Vec<f32>, TaskError> {
        let (all, width) = (self.model.width_of(Layers::All)?, layers * self.model.width_of(Layers::One(0))?);
        let take =
            |rows: &[f32]| -> Vec<f32> { rows.chunks_exact(all).flat_map(|row| &row[..width]).copied().collect() };
        match &self.kept {
            Some(kept) => Ok(texts.iter().flat_map(|text| take(&kept[*text])).collect()),
            None => Ok(self.read(texts)?.iter().flat_map(|rows| take(rows)).collect()),
        }
    }

    /// What the encoder gives for some texts, without its special tokens.
    fn read(&self, texts: &[usize]) -> Result<Vec<Vec<f32>>, TaskError> {
        let prepare = |text: &usize| self.model.prepare_features(&self.texts[*text].text, Layers::All, self.length);
        let requests = texts.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
        let numbers: Vec<usize> = texts.iter().map(|text| text + 1).collect();
        let read = self.model.run(Request::all(requests)).map_err(|error| error.numbered(&numbers))?;
        let own = |features: &henson_infer::TokenFeatures| {
            let rows = features.vectors.chunks_exact(features.width).zip(&features.offsets);
            rows.filter(|(_, offset)| offset.is_some()).flat_map(|(row, _)| row).copied().collect()
        };
        Ok(read.iter().map(own).collect())
    }
}

impl Text {
    fn new(model: &Model, example: &EdgeExample) -> Result<Self, TaskError> {
        let (text, places) = join_words(&example.words);
        let rows = model.feature_offsets(&text)?;
        let mut of_words: Vec<Option<Range<usize>>> = vec![None; places.len()];
        for (piece, word) in words_of_pieces(&rows, &places).into_iter().enumerate() {
            let Some(word) = word else { continue };
            let known = of_words[word].get_or_insert(piece..piece);
            known.end = piece + 1;
        }
        let span = |words: &Range<usize>| {
            let own = of_words[words.clone()].iter().flatten();
            let (start, end) = (own.clone().map(|range| range.start).min()?, own.map(|range| range.end).max()?);
            Some(start..end)
        };
        let readable = |(number, target): (usize, &super::data::EdgeTarget)| {
            let spans = [Some(&target.first), target.second.as_ref()].into_iter().flatten();
            Some(Readable { number, spans: spans.map(span).collect::<Option<_>>()? })
        };
        let targets = example.targets.iter().enumerate().filter_map(readable).collect();
        Ok(Self { tokens: rows.len(), targets, text })
    }
}
