//! Permutation language modelling with partial prediction (Yang et al. 2019, section 2.3; sampling as in data_utils.py of zihangdai/xlnet):
//! which tokens of a sequence are predicted, and in which order. The text itself stays as it is.
//!
//! Special tokens are hidden in the order like those that are predicted, and are not predicted themselves.

use henson_kernels::philox::Stream;
use henson_text::Template;

use super::Predicted;
use super::masks::unit_interval;
use super::settings::InstanceSettings;
use crate::Vocabulary;

/// Maximum number of tokens of a span.
const LONGEST_SPAN: usize = 5;

/// What an order must know of a template.
#[derive(Debug)]
pub(super) struct Orders {
    /// Ids that are never predicted: those that a template inserts, and what stands between documents.
    layout: Vec<u32>,
}

/// The order of a sequence.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// For each token 0 where all others see it; otherwise those with higher numbers do.
    pub(super) orders: Vec<u32>,
    pub(super) predicted: Vec<Predicted>,
}

impl Orders {
    pub(super) fn new(vocabulary: &Vocabulary, template: &Template) -> Self {
        let mut layout: Vec<u32> = template.special_ids().chain([vocabulary.sep]).collect();
        layout.sort_unstable();
        layout.dedup();
        Self { layout }
    }

    /// Draws what is predicted in a sequence, and when.
    pub(super) fn draw(
        &self,
        settings: &InstanceSettings,
        vocabulary: &Vocabulary,
        draws: &mut Stream,
        ids: &[u32],
    ) -> Order {
        let special: Vec<bool> = ids.iter().map(|id| self.layout.contains(id)).collect();
        let ordinary = special.iter().filter(|special| !**special).count();
        // A token that is predicted must see another one.
        let most = if ordinary < ids.len() { ordinary } else { ordinary.saturating_sub(1) };
        let goal = settings.predictions(ids.len()).min(most);
        let mut hidden = vec![false; ids.len()];
        let left = choose_spans(settings, vocabulary, draws, (ids, &special), goal, &mut hidden);
        choose_singles(draws, &special, left, &mut hidden);

        let mut orders = ranks(draws, ids.len(), settings.permutation_size.unwrap_or(ids.len()));
        // Where all text is predicted, the special tokens are what it sees.
        let keeps_specials = goal == ordinary;
        for (position, order) in orders.iter_mut().enumerate() {
            if !hidden[position] && (keeps_specials || !special[position]) {
                *order = 0;
            }
        }
        let places = (0..).zip(ids).zip(&hidden).filter(|(_, hidden)| **hidden);
        let predicted = places.map(|((position, target), _)| Predicted { position, target: *target }).collect();
        Order { orders, predicted }
    }
}

/// From left to right, spans of n tokens that begin with a word, among n/p tokens of context, where n is 1 to 5 with a probability
/// proportional to 1/n. Gives how many are left of those to choose.
fn choose_spans(
    settings: &InstanceSettings,
    vocabulary: &Vocabulary,
    draws: &mut Stream,
    (ids, special): (&[u32], &[bool]),
    goal: usize,
    hidden: &mut [bool],
) -> usize {
    let begins = |at: usize| {
        let previous = at.checked_sub(1).filter(|before| !special[*before]).map(|before| ids[before]);
        !special[at] && vocabulary.words.begins(previous, ids[at])
    };
    let (mut left, mut at) = (goal, 0);
    while left > 0 && at < ids.len() {
        let length = span_length(draws).min(left);
        let context = ((length as f64 / settings.mask_probability).round() as usize).max(1);
        let before = draws.below(context as u32) as usize;
        let Some(start) = (at + before..ids.len()).find(|at| begins(*at)) else { break };
        let end =
            (start..ids.len().min(start + length)).find(|at| special[*at]).unwrap_or(ids.len().min(start + length));
        hidden[start..end].fill(true);
        left -= end - start;
        at = end + context - before;
    }
    left
}

/// Single tokens anywhere, for what spans have left.
fn choose_singles(draws: &mut Stream, special: &[bool], left: usize, hidden: &mut [bool]) {
    if left == 0 {
        return;
    }
    let mut free: Vec<usize> = (0..hidden.len()).filter(|at| !hidden[*at] && !special[*at]).collect();
    let count = free.len();
    for i in 0..left.min(count) {
        free.swap(i, i + draws.below((count - i) as u32) as usize);
        hidden[free[i]] = true;
    }
}

/// From 1: a random permutation of each block of so many tokens, the blocks one after the other.
fn ranks(draws: &mut Stream, length: usize, block: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (1..=length as u32).collect();
    for block in all.chunks_mut(block.max(1)) {
        let count = block.len();
        for i in 0..count {
            block.swap(i, i + draws.below((count - i) as u32) as usize);
        }
    }
    all
}

/// 1 to [`LONGEST_SPAN`], each with a probability proportional to its inverse.
fn span_length(draws: &mut Stream) -> usize {
    let weight = |length: usize| 1.0 / length as f64;
    let total: f64 = (1..=LONGEST_SPAN).map(weight).sum();
    let mut left = unit_interval(draws) * total;
    for length in 1..LONGEST_SPAN {
        left -= weight(length);
        if left < 0.0 {
            return length;
        }
    }
    LONGEST_SPAN
}
