//! What is hidden in a sequence, and behind what.

use henson_kernels::philox::Stream;
use henson_text::Template;

use super::Predicted;
use super::draws::happens;
use super::settings::{InstanceSettings, MaskCount, Masking, Objective};
use crate::{DataError, Vocabulary};

/// SpanBERT (Joshi and others, 2020, section 3.1): lengths of spans are geometric with this parameter, cut at this many
/// words and scaled to a sum of 1.
const SPAN_STOPS: f64 = 0.2;
const LONGEST_SPAN: usize = 10;

/// ALBERT (Lan and others, 2020, section 4.1): most words of an n-gram.
const LONGEST_NGRAM: usize = 3;

/// What masks must know of a vocabulary and a template.
#[derive(Debug)]
pub(super) struct Masks {
    mask: u32,
    /// Ids that are never masked, ascending: those that a template inserts, and what stands between documents.
    layout: Vec<u32>,
    /// How many ids are not special.
    ordinary: u32,
    /// For each special id in ascending order, how many ordinary ones are below it.
    ordinary_below: Vec<u32>,
}

/// Memory that is used again from one sequence to the next.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// What is hidden together, as ranges of positions.
    units: Vec<(u32, u32)>,
    hidden: Vec<bool>,
    /// Of each piece that can be hidden, its position and the number of its unit.
    pieces: Vec<(u32, u32)>,
    /// Numbers of units, shuffled.
    order: Vec<u32>,
}

/// Draws a piece from a random place of the corpus.
pub(super) type Anywhere<'a> = &'a mut dyn FnMut(&mut Stream) -> Result<u32, DataError>;

impl Masks {
    pub(super) fn new(vocabulary: &Vocabulary, template: &Template, objective: Objective) -> Result<Self, DataError> {
        let mask = vocabulary.mask.ok_or(DataError::NoMask)?;
        let mut special: Vec<u32> = vocabulary.special.iter().copied().filter(|id| *id < vocabulary.size).collect();
        special.sort_unstable();
        special.dedup();
        let ordinary = vocabulary.size - special.len() as u32;
        if ordinary == 0 {
            return Err(DataError::NoPieces);
        }
        let ordinary_below = special.iter().enumerate().map(|(i, id)| id - i as u32).collect();
        let mut layout: Vec<u32> = template.special_ids().chain([vocabulary.sep]).collect();
        // ELECTRA's code draws no `[MASK]` that stands in the text itself.
        layout.extend((objective == Objective::ReplacedTokens).then_some(mask));
        layout.sort_unstable();
        layout.dedup();
        Ok(Self { mask, layout, ordinary, ordinary_below })
    }

    /// Whether an id is one of the layout's special tokens.
    pub(super) fn is_layout(&self, id: u32) -> bool {
        // In most vocabularies special ids are the lowest, so that one comparison is enough.
        self.layout.last().is_some_and(|last| id <= *last) && self.layout.contains(&id)
    }

    /// What stands for a masked token.
    pub(super) fn mask(&self) -> u32 {
        self.mask
    }

    /// Hides pieces of a sequence and returns what they were, by position. Special tokens of the layout, such as
    /// `[CLS]` and `[SEP]`, are never hidden, unless the settings say so.
    ///
    /// Pieces and whole words go as in create_pretraining_data.py: in random order until there are enough; a word that
    /// would be one too many is skipped. Two differences, neither of which touches the counts: a random piece is
    /// never a special one, and a word never goes on over a `[SEP]`.
    pub(super) fn hide(
        &self,
        settings: &InstanceSettings,
        vocabulary: &Vocabulary,
        draws: &mut Stream,
        ids: &mut [u32],
        scratch: &mut Scratch,
        anywhere: Anywhere<'_>,
    ) -> Result<Vec<Predicted>, DataError> {
        self.find_units(vocabulary, settings, ids, &mut scratch.units);
        let budget = match settings.mask_count {
            MaskCount::Rounded => settings.predictions(ids.len()),
            // fairseq, mask_tokens_dataset.py.
            MaskCount::Stochastic => {
                let count = ids.len() as f64 * settings.mask_probability + unit_interval(draws);
                (count as usize).min(settings.max_predictions.unwrap_or(usize::MAX))
            }
            MaskCount::Bernoulli => return Ok(self.hide_by_coins(settings, draws, ids, &scratch.units)),
        };
        match settings.masking {
            Masking::Pieces if settings.repeated_draws => {
                Ok(self.hide_repeatedly(settings, budget, draws, ids, &scratch.units))
            }
            Masking::Pieces | Masking::Words => Ok(self.hide_units(settings, budget, draws, ids, &mut scratch.units)),
            Masking::NGrams => Ok(self.hide_ngrams(settings, budget, draws, ids, scratch)),
            Masking::Spans => {
                self.choose_spans(budget, draws, ids.len(), scratch);
                let ordinary = &mut |draws: &mut Stream| Ok(self.ordinary(draws));
                self.replace_runs(settings, draws, ids, &scratch.hidden, ordinary)
            }
            Masking::SpanBert => {
                self.choose_spanbert_spans(settings, draws, ids.len(), scratch);
                self.replace_runs(settings, draws, ids, &scratch.hidden, anywhere)
            }
        }
    }

    /// Each unit by a draw of its own.
    fn hide_by_coins(
        &self,
        settings: &InstanceSettings,
        draws: &mut Stream,
        ids: &mut [u32],
        units: &[(u32, u32)],
    ) -> Vec<Predicted> {
        let mut predicted = Vec::with_capacity(ids.len() / 4);
        for (start, end) in units {
            if happens(draws, settings.mask_probability) {
                (*start..*end).for_each(|position| predicted.push(self.replace(settings, draws, ids, position)));
            }
        }
        predicted
    }

    /// Hides one piece, by a draw of its own.
    fn replace(&self, settings: &InstanceSettings, draws: &mut Stream, ids: &mut [u32], position: u32) -> Predicted {
        let id = &mut ids[position as usize];
        let target = std::mem::replace(id, self.instead(self.fate(settings, draws), *id, draws));
        Predicted { position, target }
    }

    fn hide_units(
        &self,
        settings: &InstanceSettings,
        budget: usize,
        draws: &mut Stream,
        ids: &mut [u32],
        units: &mut [(u32, u32)],
    ) -> Vec<Predicted> {
        let mut predicted = Vec::with_capacity(budget.min(ids.len()));
        // A shuffle that goes only as far as it is needed.
        for i in 0..units.len() {
            if predicted.len() >= budget {
                break;
            }
            units.swap(i, i + draws.below((units.len() - i) as u32) as usize);
            let (start, end) = units[i];
            if predicted.len() + (end - start) as usize > budget {
                continue;
            }
            (start..end).for_each(|position| predicted.push(self.replace(settings, draws, ids, position)));
        }
        predicted.sort_unstable_by_key(|p| p.position);
        predicted
    }

    /// ALBERT's n-grams (create_pretraining_data.py): the words of a sequence come in random order, each as the first of one,
    /// two or three, as many as a draw says. Where they exceed the budget, fewer are tried; where a part of them is hidden
    /// already, the word is skipped. Each piece has a fate of its own. There, an n-gram may reach over a `[SEP]`; here it
    /// ends before it.
    fn hide_ngrams(
        &self,
        settings: &InstanceSettings,
        budget: usize,
        draws: &mut Stream,
        ids: &mut [u32],
        scratch: &mut Scratch,
    ) -> Vec<Predicted> {
        let Scratch { units: words, hidden, order, .. } = scratch;
        hidden.clear();
        hidden.resize(ids.len(), false);
        order.clear();
        order.extend(0..words.len() as u32);
        let mut predicted = Vec::with_capacity(budget.min(ids.len()));
        // A shuffle that goes only as far as it is needed.
        let count = order.len();
        for i in 0..count {
            let left = budget.saturating_sub(predicted.len());
            if left == 0 {
                break;
            }
            order.swap(i, i + draws.below((count - i) as u32) as usize);
            let first = order[i] as usize;
            let (start, mut end) = words[first];
            let mut fits = None;
            for (begin, stop) in words[first..].iter().take(ngram_length(draws)) {
                // A special token stands between them, or there are too many.
                if *begin > end || (*stop - start) as usize > left {
                    break;
                }
                end = *stop;
                fits = Some(end);
            }
            let Some(end) = fits else { continue };
            if hidden[start as usize..end as usize].contains(&true) {
                continue;
            }
            hidden[start as usize..end as usize].fill(true);
            (start..end).for_each(|position| predicted.push(self.replace(settings, draws, ids, position)));
        }
        predicted.sort_unstable_by_key(|p| p.position);
        predicted
    }

    /// As many draws as the budget allows, each from all pieces: one that comes again is predicted again (pretrain_helpers.py of
    /// ELECTRA). Each draw decides again what stands there, and a `[MASK]` stays.
    fn hide_repeatedly(
        &self,
        settings: &InstanceSettings,
        budget: usize,
        draws: &mut Stream,
        ids: &mut [u32],
        units: &[(u32, u32)],
    ) -> Vec<Predicted> {
        if units.is_empty() {
            return Vec::new();
        }
        let mut predicted: Vec<Predicted> = (0..budget)
            .map(|_| units[draws.below(units.len() as u32) as usize].0)
            .map(|position| Predicted { position, target: ids[position as usize] })
            .collect();
        predicted.sort_unstable_by_key(|p| p.position);
        for Predicted { position, target } in &predicted {
            let instead = self.instead(self.fate(settings, draws), *target, draws);
            if instead != *target {
                ids[*position as usize] = instead;
            }
        }
        predicted
    }

    /// Spans of whole words, until the budget is used up or no word fits into its rest. As in SpanBERT, a span begins
    /// with the word around a piece that is not hidden yet, stays within a segment, and may run into words that are hidden
    /// already. SpanBERT's own code also cuts words in two at the end of the budget; here words stay whole.
    fn choose_spans(&self, budget: usize, draws: &mut Stream, length: usize, scratch: &mut Scratch) {
        let Scratch { units: words, hidden, .. } = scratch;
        hidden.clear();
        hidden.resize(length, false);
        let mut left = budget;
        loop {
            // A word is as likely as it has pieces.
            let may_begin = |word: &(u32, u32)| !hidden[word.0 as usize] && (word.1 - word.0) as usize <= left;
            let pieces: u32 = words.iter().filter(|word| may_begin(word)).map(|word| word.1 - word.0).sum();
            if pieces == 0 {
                break;
            }
            let mut draw = draws.below(pieces);
            let begins = words.iter().position(|word| {
                let found = may_begin(word) && draw < word.1 - word.0;
                draw = if may_begin(word) && !found { draw - (word.1 - word.0) } else { draw };
                found
            });
            let Some(begin) = begins else { break };
            let mut before = words[begin].0;
            for (start, end) in words[begin..].iter().take(span_length(draws)) {
                let length = (end - start) as usize;
                if *start != before || !hidden[*start as usize] && length > left {
                    break;
                }
                if !hidden[*start as usize] {
                    hidden[*start as usize..*end as usize].fill(true);
                    left -= length;
                }
                before = *end;
            }
        }
    }

    /// SpanBERT's own spans (facebookresearch/SpanBERT, pretraining/fairseq/data/masking.py): a length in words and an anchor
    /// among all pieces are drawn; an anchor that is hidden already is refused. The span begins with the anchor's word and
    /// goes on until it has its length, the text ends, or ⌈p·n⌉ of n pieces are hidden, even inside of a word.
    fn choose_spanbert_spans(
        &self,
        settings: &InstanceSettings,
        draws: &mut Stream,
        length: usize,
        scratch: &mut Scratch,
    ) {
        let Scratch { units: words, hidden, pieces, .. } = scratch;
        hidden.clear();
        hidden.resize(length, false);
        pieces.clear();
        for (word, (start, end)) in (0..).zip(words.iter()) {
            pieces.extend((*start..*end).map(|position| (position, word)));
        }
        let budget = (pieces.len() as f64 * settings.mask_probability).ceil() as usize;
        let mut left = budget.min(pieces.len()).min(settings.max_predictions.unwrap_or(usize::MAX));
        while left > 0 {
            let most_words = span_length(draws);
            let (anchor, word) = pieces[draws.below(pieces.len() as u32) as usize];
            if hidden[anchor as usize] {
                continue;
            }
            let mut before = words[word as usize].0;
            for (start, end) in words[word as usize..].iter().take(most_words) {
                // A special token ends the text.
                if *start != before {
                    break;
                }
                for piece in &mut hidden[*start as usize..*end as usize] {
                    if left > 0 && !*piece {
                        (*piece, left) = (true, left - 1);
                    }
                }
                before = *end;
            }
        }
    }

    /// Replaces what was chosen. Spans that meet count as one, of which all pieces become `[MASK]`, become random ones, or
    /// stay.
    fn replace_runs(
        &self,
        settings: &InstanceSettings,
        draws: &mut Stream,
        ids: &mut [u32],
        hidden: &[bool],
        random: Anywhere<'_>,
    ) -> Result<Vec<Predicted>, DataError> {
        let mut predicted = Vec::with_capacity(hidden.iter().filter(|hidden| **hidden).count());
        let mut fate = Fate::Same;
        for position in 0..ids.len() {
            if !hidden[position] {
                continue;
            }
            if position == 0 || !hidden[position - 1] {
                fate = self.fate(settings, draws);
            }
            let id = &mut ids[position];
            predicted.push(Predicted { position: position as u32, target: *id });
            *id = match fate {
                Fate::Mask => self.mask,
                Fate::Random => random(draws)?,
                Fate::Same => *id,
            };
        }
        Ok(predicted)
    }

    fn fate(&self, settings: &InstanceSettings, draws: &mut Stream) -> Fate {
        let [mask, random, same] = settings.mask_split;
        let draw = unit_interval(draws);
        if draw < mask {
            Fate::Mask
        } else if draw < mask + random || same == 0.0 {
            Fate::Random
        } else {
            Fate::Same
        }
    }

    /// What stands in the place of `id`.
    fn instead(&self, fate: Fate, id: u32, draws: &mut Stream) -> u32 {
        match fate {
            Fate::Mask => self.mask,
            Fate::Same => id,
            Fate::Random => self.ordinary(draws),
        }
    }

    /// An id that is not special, each as likely.
    pub(super) fn ordinary(&self, draws: &mut Stream) -> u32 {
        let draw = draws.below(self.ordinary);
        draw + self.ordinary_below.partition_point(|below| *below <= draw) as u32
    }

    /// The words of a sequence, or its pieces one by one. A special token of the layout is never a part of one; it is one
    /// itself where it may be hidden.
    fn find_units(
        &self,
        vocabulary: &Vocabulary,
        settings: &InstanceSettings,
        ids: &[u32],
        units: &mut Vec<(u32, u32)>,
    ) {
        units.clear();
        let words = settings.masking != Masking::Pieces;
        let mut previous = None;
        for (position, id) in ids.iter().enumerate() {
            if self.is_layout(*id) {
                if settings.mask_specials {
                    units.push((position as u32, position as u32 + 1));
                }
                previous = None;
                continue;
            }
            let begins = !words || vocabulary.words.begins(previous, *id);
            previous = Some(*id);
            match units.last_mut() {
                Some(unit) if !begins => unit.1 += 1,
                _ => units.push((position as u32, position as u32 + 1)),
            }
        }
    }
}

/// What becomes of a masked token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Mask,
    Random,
    Same,
}

/// A number in [0, 1).
pub(super) fn unit_interval(draws: &mut Stream) -> f64 {
    f64::from(draws.bits()) / (u64::from(u32::MAX) + 1) as f64
}

/// A number of words, n with a probability in proportion to 1/n.
fn ngram_length(draws: &mut Stream) -> usize {
    let all: f64 = (1..=LONGEST_NGRAM).map(|n| 1.0 / n as f64).sum();
    let mut draw = unit_interval(draws) * all;
    for n in 1..LONGEST_NGRAM {
        draw -= 1.0 / n as f64;
        if draw < 0.0 {
            return n;
        }
    }
    LONGEST_NGRAM
}

/// A number of words.
fn span_length(draws: &mut Stream) -> usize {
    let all = 1.0 - (1.0 - SPAN_STOPS).powi(LONGEST_SPAN as i32);
    let mut draw = unit_interval(draws) * all;
    let mut share = SPAN_STOPS;
    for length in 1..LONGEST_SPAN {
        if draw < share {
            return length;
        }
        draw -= share;
        share *= 1.0 - SPAN_STOPS;
    }
    LONGEST_SPAN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_the_lengths_of_the_paper() {
        let mut draws = Stream::new(3, 0, 0);
        let count = 200_000;
        let mut counts = [0_u32; LONGEST_SPAN + 1];
        (0..count).for_each(|_| counts[span_length(&mut draws)] += 1);
        let all = 1.0 - 0.8_f64.powi(10);
        for length in 1..=LONGEST_SPAN {
            let share = 0.2 * 0.8_f64.powi(length as i32 - 1) / all;
            let deviation = (share * (1.0 - share) * f64::from(count)).sqrt();
            let off = f64::from(counts[length]) - share * f64::from(count);
            assert!(off.abs() < 4.5 * deviation, "length {length}: {} of {count}", counts[length]);
        }
        // The mean that the paper names.
        let mean = (1..=LONGEST_SPAN).map(|n| n as f64 * f64::from(counts[n])).sum::<f64>() / f64::from(count);
        assert!((mean - 3.8).abs() < 0.03, "{mean}");
    }

    #[test]
    fn random_pieces_are_all_ordinary_ones_alike() {
        let special = vec![0, 1, 5, 6, 7, 19];
        let words = crate::WordMarks::Begin(vec![true; 20]);
        let vocabulary = Vocabulary {
            size: 20,
            cls: 0,
            sep: 1,
            mask: Some(5),
            special: special.clone(),
            words,
            sentinels: Vec::new(),
        };
        let masks = Masks::new(&vocabulary, &Template::bert(0, 1), Objective::Mlm).unwrap();
        let mut draws = Stream::new(4, 0, 0);
        let mut counts = [0; 20];
        (0..14_000).for_each(|_| counts[masks.instead(Fate::Random, 2, &mut draws) as usize] += 1);
        for id in 0..20 {
            let expected = if special.contains(&id) { 0..1 } else { 860..1140 };
            assert!(expected.contains(&counts[id as usize]), "{id}: {counts:?}");
        }
    }

    /// A span that begins with the last word of A ends there.
    #[test]
    fn spans_stay_in_their_segment() {
        let words = crate::WordMarks::Begin(vec![true; 40]);
        let vocabulary = Vocabulary {
            size: 40,
            cls: 0,
            sep: 1,
            mask: Some(2),
            special: vec![0, 1, 2],
            words,
            sentinels: Vec::new(),
        };
        let settings = InstanceSettings { masking: Masking::Spans, max_predictions: Some(2), ..Default::default() };
        let masks = Masks::new(&vocabulary, &Template::bert(0, 1), Objective::Mlm).unwrap();
        let mut scratch = Scratch::default();
        let ids: Vec<u32> = [0, 5, 1].into_iter().chain(6..34).chain([1]).collect();
        let mut both = 0;
        for i in 0..20_000 {
            let mut ids = ids.clone();
            let mut draws = Stream::new(5, 0, i);
            let anywhere = &mut |_: &mut Stream| unreachable!("these spans draw from the vocabulary");
            let predicted = masks.hide(&settings, &vocabulary, &mut draws, &mut ids, &mut scratch, anywhere).unwrap();
            assert_eq!(predicted.len(), 2);
            both += usize::from(predicted[0].target == 5 && predicted[1].target == 6);
        }
        // By two spans, about once in 440 times; by one across the border it would be once in 40.
        assert!((20..90).contains(&both), "{both}");
    }
}
