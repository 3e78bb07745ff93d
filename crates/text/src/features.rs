//! Pieces with special tokens around them: what a model reads, and the mapping back to the text. Used by training and
//! serving alike, so that the two cannot drift apart. It knows ids and offsets only: labels, masks and tensors are made
//! elsewhere from the positions given here.
//!
//! Two ways with a text that is too long: [`Template::single`] and [`Template::pair`] cut its end and say how much in
//! [`Features::dropped`]; [`Template::windows`] and [`Template::pair_windows`] cover all of it with several sequences.
//!
//! `max_length` always counts special tokens too, as in Google's and Hugging Face's programs.

use std::ops::Range;

use crate::error::TextError;
use crate::template::{Slot, Template};
use crate::tokenizer::Pieces;

/// One sequence for a model. `ids`, `segments` and `offsets` have the same length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Features {
    /// Ids of the pieces and special tokens.
    pub ids: Vec<u32>,
    /// Segments (`token_type_ids`).
    pub segments: Vec<u32>,
    /// Byte ranges in the text that the piece came from; `None` on special tokens. Which text it is, `first` and
    /// `second` tell (segments do not: RoBERTa has only one).
    pub offsets: Vec<Option<(usize, usize)>>,
    /// How the text spells each position, nothing on special tokens, where the tokenizer keeps that.
    pub spellings: Option<Vec<Box<str>>>,
    /// The positions that hold pieces of the first text.
    pub first: Range<usize>,
    /// The positions that hold pieces of the second text; `None` when there is only one text.
    pub second: Option<Range<usize>>,
    /// Where this window begins among the pieces of the text that is windowed (the second of a pair); 0 when nothing is.
    pub first_piece: usize,
    /// How many pieces were cut off the end of the text or texts; 0 in windows, which cut nothing.
    pub dropped: usize,
}

impl Features {
    /// How many positions the sequence has.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the sequence has no positions, which only a template without special tokens can give.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The positions of the text that windows move over: the second of a pair, otherwise the only one.
    pub fn windowed_positions(&self) -> Range<usize> {
        self.second.clone().unwrap_or_else(|| self.first.clone())
    }

    /// The pieces of the windowed text that this sequence shows, as indices into its [`Pieces`].
    pub fn windowed_pieces(&self) -> Range<usize> {
        self.first_piece..self.first_piece + self.windowed_positions().len()
    }

    /// The position of a piece of the windowed text, if this window shows it.
    pub fn position_of_piece(&self, piece: usize) -> Option<usize> {
        let pieces = self.windowed_pieces();
        pieces.contains(&piece).then(|| self.windowed_positions().start + piece - pieces.start)
    }
}

impl Template {
    /// One text, its end cut off where it is too long. A text without pieces gives the special tokens alone.
    pub fn single(&self, text: &Pieces, max_length: usize) -> Result<Features, TextError> {
        let room = room(max_length, self.single_specials(), 0, "special tokens")?;
        let kept = text.len().min(room);
        let mut features = lay_out(self.single_slots(), (text, 0..kept), None);
        features.dropped = text.len() - kept;
        Ok(features)
    }

    /// Two texts. Where they are too long together, pieces go from the end of the longer one, as in BERT's fine-tuning
    /// (see [`truncated_lengths`]).
    pub fn pair(&self, first: &Pieces, second: &Pieces, max_length: usize) -> Result<Features, TextError> {
        let room = room(max_length, self.pair_specials(), 0, "special tokens")?;
        let (kept_first, kept_second) = truncated_lengths(first.len(), second.len(), room);
        let mut features = lay_out(self.pair_slots(), (first, 0..kept_first), Some((second, 0..kept_second)));
        features.dropped = first.len() + second.len() - kept_first - kept_second;
        Ok(features)
    }

    /// One text in overlapping windows that together show every piece.
    ///
    /// `stride` is the step from the beginning of one window to that of the next, as in Google's `doc_stride`; Hugging
    /// Face's `stride` is the overlap, that is the room for pieces minus this one. A step longer than the room is
    /// shortened to it, so that no piece is skipped, and the last window is the first that reaches the end, so that none
    /// lies inside another.
    pub fn windows(&self, text: &Pieces, max_length: usize, stride: usize) -> Result<Vec<Features>, TextError> {
        self.windows_of(text, 0..text.len(), max_length, stride)
    }

    /// [`windows`](Self::windows) of a part of a text.
    pub(crate) fn windows_of(
        &self,
        text: &Pieces,
        part: Range<usize>,
        max_length: usize,
        stride: usize,
    ) -> Result<Vec<Features>, TextError> {
        let needed = usize::from(!part.is_empty());
        let room = room(max_length, self.single_specials(), needed, "special tokens and one token of the text")?;
        let spans = window_spans(part.len(), room, stride)?.into_iter();
        let spans = spans.map(|span| part.start + span.start..part.start + span.end);
        Ok(spans.map(|span| lay_out(self.single_slots(), (text, span), None)).collect())
    }

    /// A first text that stands whole in every window (a question) and a second one in windows (the passage); see
    /// [`windows`](Self::windows). Cut an over-long question first, with [`Pieces::truncate`].
    pub fn pair_windows(
        &self,
        first: &Pieces,
        second: &Pieces,
        max_length: usize,
        stride: usize,
    ) -> Result<Vec<Features>, TextError> {
        let needed = first.len() + usize::from(!second.is_empty());
        let reason = "special tokens, the whole first text and one token of the second";
        let room = room(max_length, self.pair_specials(), needed, reason)? - first.len();
        let spans = window_spans(second.len(), room, stride)?;
        let whole = || (first, 0..first.len());
        Ok(spans.into_iter().map(|span| lay_out(self.pair_slots(), whole(), Some((second, span)))).collect())
    }
}

/// How many pieces of each text fit into `room` together: one at a time goes from the longer text, and from the second
/// when both are equally long (`_truncate_seq_pair` in google-research/bert `run_classifier.py`).
pub fn truncated_lengths(first: usize, second: usize, room: usize) -> (usize, usize) {
    // Removing one at a time ends with the shorter text whole where half of the room holds it, otherwise with both at
    // half; the odd piece stays with the first text, because ties are cut from the second.
    let over = (first + second).saturating_sub(room);
    let from_longer = over.min(first.abs_diff(second));
    let rest = over - from_longer;
    let (from_first, from_second) = (rest / 2, rest - rest / 2);
    if first > second {
        (first - from_longer - from_first, second - from_second)
    } else {
        (first - from_first, second - from_longer - from_second)
    }
}

/// The window in which a piece has most context: the largest of min(pieces to its left, pieces to its right) + 0.01 ·
/// window length, the first window on ties (`_check_is_max_context` in google-research/bert `run_squad.py`). `None` when
/// no window shows the piece.
pub fn window_with_most_context(windows: &[Features], piece: usize) -> Option<usize> {
    let mut best: Option<(f64, usize)> = None;
    for (number, window) in windows.iter().enumerate() {
        let pieces = window.windowed_pieces();
        if pieces.contains(&piece) {
            let score = context_score(&pieces, piece);
            if best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, number));
            }
        }
    }
    best.map(|(_, number)| number)
}

/// [`window_with_most_context`] for every piece of the windowed text at once, in time proportional to what the windows
/// show.
pub fn windows_with_most_context(windows: &[Features]) -> Vec<usize> {
    let pieces = windows.iter().map(|window| window.windowed_pieces().end).max().unwrap_or(0);
    let mut best = vec![(f64::NEG_INFINITY, 0); pieces];
    for (number, window) in windows.iter().enumerate() {
        let shown = window.windowed_pieces();
        for piece in shown.clone() {
            let score = context_score(&shown, piece);
            if score > best[piece].0 {
                best[piece] = (score, number);
            }
        }
    }
    best.into_iter().map(|(_, number)| number).collect()
}

/// In double precision as in the original, so that even its ties by rounding are the same.
fn context_score(window: &Range<usize>, piece: usize) -> f64 {
    let (left, right) = (piece - window.start, window.end - 1 - piece);
    left.min(right) as f64 + 0.01 * window.len() as f64
}

/// The room that `max_length` leaves beside the special tokens, at least `needed`.
fn room(max_length: usize, specials: usize, needed: usize, reason: &'static str) -> Result<usize, TextError> {
    match max_length.checked_sub(specials) {
        Some(room) if room >= needed => Ok(room),
        _ => Err(TextError::MaxLengthTooSmall { max_length, needed: specials + needed, reason }),
    }
}

fn window_spans(pieces: usize, room: usize, stride: usize) -> Result<Vec<Range<usize>>, TextError> {
    if stride == 0 {
        return Err(TextError::ZeroStride);
    }
    let mut spans = Vec::new();
    let mut start: usize = 0;
    loop {
        let end = pieces.min(start.saturating_add(room));
        spans.push(start..end);
        if end == pieces {
            return Ok(spans);
        }
        start += stride.min(room);
    }
}

/// Fills the slots with spans of the texts.
fn lay_out(slots: &[Slot], first: (&Pieces, Range<usize>), second: Option<(&Pieces, Range<usize>)>) -> Features {
    let texts = first.1.len() + second.as_ref().map_or(0, |(_, span)| span.len());
    let length = texts + slots.iter().filter(|slot| matches!(slot, Slot::Special { .. })).count();
    let spelled = first.0.spellings.is_some() && second.as_ref().is_none_or(|(pieces, _)| pieces.spellings.is_some());
    let mut features = Features {
        ids: Vec::with_capacity(length),
        segments: Vec::with_capacity(length),
        offsets: Vec::with_capacity(length),
        spellings: spelled.then(|| Vec::with_capacity(length)),
        first: 0..0,
        second: None,
        first_piece: second.as_ref().map_or(first.1.start, |(_, span)| span.start),
        dropped: 0,
    };
    for slot in slots {
        match *slot {
            Slot::Special { id, segment } => {
                features.ids.push(id);
                features.segments.push(segment);
                features.offsets.push(None);
                features.spellings.iter_mut().for_each(|spellings| spellings.push(Box::default()));
            }
            Slot::First { segment } => features.first = append(&mut features, &first, segment),
            Slot::Second { segment } => {
                if let Some(second) = &second {
                    features.second = Some(append(&mut features, second, segment));
                }
            }
        }
    }
    features
}

fn append(features: &mut Features, (pieces, span): &(&Pieces, Range<usize>), segment: u32) -> Range<usize> {
    let start = features.ids.len();
    features.ids.extend_from_slice(&pieces.ids[span.clone()]);
    // Pieces that were made from ids alone (a shard) have no offsets, and so cannot be mapped back to a text.
    features.offsets.extend(span.clone().map(|piece| pieces.offsets.get(piece).copied()));
    features.segments.resize(features.ids.len(), segment);
    if let (Some(spellings), Some(own)) = (&mut features.spellings, &pieces.spellings) {
        spellings.extend_from_slice(&own[span.clone()]);
    }
    start..features.ids.len()
}
