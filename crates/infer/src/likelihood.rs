//! How likely a model finds texts. What it means is the caller's: perplexity, minimal pairs.
//!
//! A masked language model has no probability of a whole text. Its pseudo-log-likelihood (Salazar et al. 2020) is the sum
//! over all pieces of ln P(piece | the rest), each piece masked in turn: as many sequences as pieces. A left-to-right
//! model (`is_decoder` in its config) has the real one, from one sequence.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};

use henson_models::{Batch, Sequence};
use henson_tensor::{Pass, Tape, Tensor};
use henson_text::{Features, Pieces, Slot, windows_with_most_context};

use crate::batches::TOKENS;
use crate::{InferError, Length, Model, Result};

/// Rows whose logits are computed at a time. 30 MB with BERT's vocabulary; a left-to-right model asks for every token's,
/// and more rows at a time are no faster.
const ROWS: usize = 256;

/// What a piece's probability is conditioned on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// All other pieces.
    Piece,
    /// All other pieces but the later ones of the same word (Kauf and Ivanova 2023, "PLL-word-l2r"): those would give the
    /// piece away, so that rare words of many pieces would seem likely. Words are the tokenizer's.
    Word,
    /// The pieces before it; for left-to-right models, and only for them.
    LeftToRight,
}

/// How likely a text is.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The sum of all pieces' logarithms.
    pub log_likelihood: f64,
    /// ln P of each piece of the text; special tokens around it are not counted.
    pub pieces: Vec<f32>,
    /// Pieces that the model would have predicted itself: their logit was the highest.
    pub correct: usize,
}

/// How far [`Model::log_likelihoods`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreProgress {
    /// Texts that are done, of those given.
    pub texts: usize,
    /// Tokens that went through the model: those of every masked sequence, special ones included.
    pub tokens: usize,
}

impl Model {
    /// Whether a token sees only what stands before it.
    pub fn is_left_to_right(&self) -> bool {
        self.config().model.sizes().causal
    }

    /// The log-likelihood of each text. A text that is longer than the model takes is divided into windows, and each piece
    /// is scored in the one that shows most of what it depends on. Equal texts are scored once. `progress` is called after
    /// every batch; where it breaks, the result is [`InferError::Stopped`].
    pub fn log_likelihoods(
        &self,
        texts: &[&str],
        scoring: Scoring,
        progress: impl FnMut(ScoreProgress) -> ControlFlow<()>,
    ) -> Result<Vec<Scored>> {
        if self.is_left_to_right() != (scoring == Scoring::LeftToRight) {
            return Err(InferError::Scoring { left_to_right: self.is_left_to_right() });
        }
        let scored = Vec::with_capacity(texts.len());
        let mut scorer =
            Scorer { model: self, tape: Tape::new(), queue: Queue::default(), scored, tokens: 0, progress };
        let mut first_with = HashMap::with_capacity(texts.len());
        for (i, text) in texts.iter().enumerate() {
            let content = if *first_with.entry(*text).or_insert(i) == i { *text } else { "" };
            match scoring {
                Scoring::LeftToRight => scorer.left_to_right(content)?,
                Scoring::Piece | Scoring::Word => scorer.masked(content, scoring)?,
            }
        }
        scorer.run(texts.len())?;
        let mut scored = scorer.scored;
        for (i, text) in texts.iter().enumerate() {
            let first = first_with[text];
            if first != i {
                scored[i] = scored[first].clone();
                continue;
            }
            scored[i].log_likelihood = scored[i].pieces.iter().map(|log| f64::from(*log)).sum();
            if !scored[i].log_likelihood.is_finite() {
                return Err(InferError::NotFinite { text: i + 1 });
            }
        }
        Ok(scored)
    }
}

/// Sequences are collected until they fill a batch.
struct Scorer<'a, P> {
    model: &'a Model,
    tape: Tape,
    queue: Queue,
    /// One for each text so far; what is still in the queue stands at 0.
    scored: Vec<Scored>,
    /// Those that went through the model.
    tokens: usize,
    progress: P,
}

/// Sequences that wait for the model, and what is to be read off them.
#[derive(Default)]
struct Queue {
    /// The ids of all sequences, one after the other, and which are whose.
    ids: Vec<u32>,
    segments: Vec<u32>,
    sequences: Vec<Range<usize>>,
    /// Where sequences start, by their ids: texts that differ in the masked piece alone, as minimal pairs often do, have
    /// that one in common.
    known: HashMap<Vec<u32>, usize>,
    asked: Vec<Asked>,
}

/// ln P of a target at a row of the flat batch, for a piece of a text.
struct Asked {
    row: usize,
    target: u32,
    text: usize,
    piece: usize,
}

impl<P: FnMut(ScoreProgress) -> ControlFlow<()>> Scorer<'_, P> {
    /// One sequence for each piece of a text.
    fn masked(&mut self, content: &str, scoring: Scoring) -> Result<()> {
        let mask = self.model.tokenizer().special().mask.as_ref().ok_or(InferError::NoSpecial("mask"))?.id;
        let (pieces, windows, text) = self.start(content, Length::WINDOWS)?;
        for (piece, window) in windows_with_most_context(&windows).into_iter().enumerate() {
            let window = &windows[window];
            let Some(position) = window.position_of_piece(piece) else { continue };
            let word = pieces.words[piece].filter(|_| scoring == Scoring::Word);
            let following = &pieces.words[piece + 1..window.windowed_pieces().end];
            let later = following.iter().take_while(|other| word.is_some() && **other == word).count();
            let mut ids = window.ids.clone();
            ids[position..=position + later].fill(mask);
            let start = self.enqueue(ids, &window.segments)?;
            self.queue.asked.push(Asked { row: start + position, target: pieces.ids[piece], text, piece });
        }
        Ok(())
    }

    /// One sequence for a text, or several windows; each piece is read off the token before it. Where no special token opens a
    /// text, the first piece follows an end-of-text, as in pre-training.
    fn left_to_right(&mut self, content: &str) -> Result<()> {
        let bare = !matches!(self.model.tokenizer().template().single_slots(), [Slot::Special { .. }, ..]);
        let length = match bare {
            // One less than fits, for what stands before the first.
            true => Length { most: Some(self.model.length_within(None).saturating_sub(1).max(1)), ..Length::WINDOWS },
            false => Length::WINDOWS,
        };
        let (pieces, windows, text) = self.start(content, length)?;
        let mut scored = 0;
        for window in windows.iter().filter(|_| !pieces.is_empty()) {
            let (mut ids, mut segments) = (window.ids.clone(), window.segments.clone());
            let mut before = window.first.start;
            if bare && scored == 0 {
                let end = self.model.tokenizer().end_of_text().ok_or(InferError::NoSpecial("cls or eos"))?;
                ids.insert(0, end);
                segments.insert(0, 0);
                before += 1;
            }
            let start = self.enqueue(ids, &segments)?;
            // The first window that shows a piece shows most of what stands before it.
            let shown = window.windowed_pieces();
            for piece in scored..shown.end {
                let row = start + before + piece - shown.start - 1;
                self.queue.asked.push(Asked { row, target: pieces.ids[piece], text, piece });
            }
            scored = shown.end;
        }
        Ok(())
    }

    /// Cuts a text into pieces and makes room for its scores; gives its number, too.
    fn start(&mut self, content: &str, length: Length) -> Result<(Pieces, Vec<Features>, usize)> {
        let pieces = self.model.tokenizer().encode(content)?;
        let (windows, _) = self.model.windows_of(&pieces, length)?;
        self.scored.push(Scored { log_likelihood: 0.0, pieces: vec![0.0; pieces.len()], correct: 0 });
        Ok((pieces, windows, self.scored.len() - 1))
    }

    /// Puts a sequence into the queue if it is not there, and tells where it starts.
    fn enqueue(&mut self, ids: Vec<u32>, segments: &[u32]) -> Result<usize> {
        if let Some(start) = self.queue.known.get(&ids) {
            return Ok(*start);
        }
        if self.queue.ids.len() + ids.len() > TOKENS {
            self.run(self.scored.len() - 1)?;
        }
        let start = self.queue.ids.len();
        self.queue.sequences.push(start..start + ids.len());
        self.queue.ids.extend(&ids);
        self.queue.segments.extend(segments);
        self.queue.known.insert(ids, start);
        Ok(start)
    }

    /// Runs what is in the queue and writes it down; `texts` are done then.
    fn run(&mut self, texts: usize) -> Result<()> {
        let queue = std::mem::take(&mut self.queue);
        if queue.sequences.is_empty() {
            return Ok(());
        }
        let (network, parameters) = (self.model.network(), self.model.parameters());
        let (device, vocabulary) = (parameters.device(), network.config().sizes().vocab_size);
        let sequence = |range: &Range<usize>| Sequence {
            ids: &queue.ids[range.clone()],
            segments: &queue.segments[range.clone()],
        };
        let sequences: Vec<Sequence<'_>> = queue.sequences.iter().map(sequence).collect();
        let rows: Vec<u32> = queue.asked.iter().map(|asked| asked.row as u32).collect();
        let (batch, read) = Batch::with_masks(device, network.config(), &sequences, &rows, 0)?;
        let mut pass = Pass::inference(&mut self.tape, parameters);
        let of_rows = |numbers: &[u32]| Tensor::from_slice(device, [numbers.len()], numbers);
        let encoded = network.encode_rows(&mut pass, &batch, &read)?;
        for first in (0..rows.len()).step_by(ROWS) {
            let asked = &queue.asked[first..rows.len().min(first + ROWS)];
            let chosen: Vec<u32> = (first as u32..(first + asked.len()) as u32).collect();
            let targets = of_rows(&asked.iter().map(|asked| asked.target).collect::<Vec<u32>>())?;
            let logits =
                network.logits_of(&mut pass, encoded.clone(), batch.output_layout(), Some(&of_rows(&chosen)?))?;
            let hits = pass.hits(&logits, vocabulary, &targets)?;
            // −ln P of the target: of each row the largest logit, a sum and the target's are needed, and no copy.
            let (_, losses) = pass.cross_entropy(logits, vocabulary, &targets, None, 1.0)?;
            for ((asked, loss), hit) in asked.iter().zip(losses.to_vec::<f32>()?).zip(hits) {
                let scored = &mut self.scored[asked.text];
                scored.pieces[asked.piece] = -loss;
                scored.correct += usize::from(hit);
            }
        }
        self.tokens += queue.ids.len();
        match (self.progress)(ScoreProgress { texts, tokens: self.tokens }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(InferError::Stopped),
        }
    }
}
