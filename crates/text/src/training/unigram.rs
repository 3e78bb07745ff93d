//! The unigram language model (Kudo, 2018), made as SentencePiece makes it: begin with far too many pieces, the
//! frequent substrings of words; fit their probabilities by expectation maximisation; take away the pieces whose loss hurts the
//! text's likelihood least; again, until few enough are left.
//!
//! Where we differ from SentencePiece: substrings are weighed by how often their words occur, frequent words may be
//! pieces though they stand in no other word, and single characters never leave the vocabulary.
//!
//! Sums of fractions over words go in [`STRIPES`] parts whose borders depend on the number of words alone, so that the
//! number of threads changes no bit.

use std::cmp::Reverse;

use crate::error::TextError;
use crate::lattice::{Lattice, Trie, UNKNOWN, UNKNOWN_PENALTY};
use crate::training::words::in_threads;

/// What SentencePiece's trainer has, too.
const LONGEST_PIECE: usize = 16;
const FIRST_PIECES: usize = 1_000_000;
const ROUNDS_BETWEEN_PRUNINGS: usize = 2;
const KEPT_BY_PRUNING: f64 = 0.75;
/// Pruning stops at this many times the size; the rest goes by probability alone.
const MARGIN: f64 = 1.1;
/// A piece that is expected less often than this goes.
const LEAST_EXPECTED: f64 = 0.5;

/// Longer words are learned from in parts, as in BPE: they are hardly words.
const LONGEST_RUN: usize = 1000;
const STRIPES: usize = 32;

pub(super) struct UnigramSettings {
    /// Sorted.
    pub(super) alphabet: Vec<char>,
    /// How many special tokens come on top.
    pub(super) specials: usize,
    pub(super) vocabulary_size: usize,
    pub(super) min_frequency: u64,
    pub(super) threads: usize,
}

/// A piece with its log probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f64,
}

impl Piece {
    fn is_character(&self) -> bool {
        self.text.chars().nth(1).is_none()
    }
}

/// The pieces, the likeliest first, without special tokens.
pub(super) fn learn(
    words: &[(Box<str>, u64)],
    settings: &UnigramSettings,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), TextError>,
) -> Result<Vec<Piece>, TextError> {
    let (specials, alphabet) = (settings.specials, settings.alphabet.len());
    let Some(wanted) = settings.vocabulary_size.checked_sub(specials).filter(|&wanted| wanted >= alphabet) else {
        return Err(TextError::VocabularyTooSmall { asked: settings.vocabulary_size, specials, alphabet });
    };
    let runs = runs(words);
    let mut pieces = first_pieces(&runs, settings);
    let enough = (wanted as f64 * MARGIN) as usize;
    let prunings = (enough as f64 / pieces.len() as f64).ln() / KEPT_BY_PRUNING.ln();
    let rounds = 1 + prunings.max(0.0).ceil() as usize;
    for round in 0.. {
        progress(round.min(rounds), rounds)?;
        for _ in 0..ROUNDS_BETWEEN_PRUNINGS {
            let expected = Model::new(&pieces).expectations(&runs, settings.threads);
            pieces = maximise(pieces, &expected);
        }
        if pieces.len() <= enough {
            break;
        }
        let kept = ((pieces.len() as f64 * KEPT_BY_PRUNING) as usize).max(enough);
        pieces = prune(pieces, kept, &runs, settings.threads);
    }

    // Characters first, then by probability; `false` sorts before `true`.
    let order = |a: &Piece, b: &Piece| b.score.total_cmp(&a.score).then_with(|| a.text.cmp(&b.text));
    pieces.sort_unstable_by(|a, b| b.is_character().cmp(&a.is_character()).then_with(|| order(a, b)));
    pieces.truncate(wanted);
    for piece in &mut pieces {
        // The last digits depend on the machine's exponential function, and nobody needs them.
        piece.score = (piece.score * 1e6).round() / 1e6;
    }
    pieces.sort_unstable_by(order);
    Ok(pieces)
}

/// Words, or parts of very long ones, as characters.
struct Run {
    characters: Vec<char>,
    count: u64,
}

fn runs(words: &[(Box<str>, u64)]) -> Vec<Run> {
    let mut runs = Vec::with_capacity(words.len());
    for &(ref word, count) in words {
        let characters: Vec<char> = word.chars().collect();
        runs.extend(characters.chunks(LONGEST_RUN).map(|part| Run { characters: part.to_vec(), count }));
    }
    runs
}

/// The characters, and the substrings that are worth most by occurrences times length; in the order of their texts.
///
/// All suffixes of all words are sorted, so that equal beginnings lie side by side. Of substrings that always go on in
/// the same way only the longest counts.
fn first_pieces(runs: &[Run], settings: &UnigramSettings) -> Vec<Piece> {
    // Characters as their place in the alphabet + 1, in one list; 0 stands between words and for other characters.
    let mut symbols: Vec<u32> = Vec::new();
    let mut weights: Vec<u64> = Vec::new();
    let mut counts = vec![0_u64; settings.alphabet.len() + 1];
    for run in runs {
        for &character in &run.characters {
            let symbol = settings.alphabet.binary_search(&character).map_or(0, |place| place + 1);
            counts[symbol] += run.count;
            symbols.push(symbol as u32);
            weights.push(run.count);
        }
        symbols.push(0);
        weights.push(0);
    }
    // How far a piece that begins here may reach.
    let mut reach = vec![0_u8; symbols.len()];
    for at in (0..symbols.len()).rev().filter(|&at| symbols[at] != 0) {
        let following = reach.get(at + 1).map_or(0, |&reach| usize::from(reach));
        let character = |symbol: u32| settings.alphabet[symbol as usize - 1];
        let goes_on = following > 0 && may_join(character(symbols[at]), character(symbols[at + 1]));
        reach[at] = if goes_on { (following + 1).min(LONGEST_PIECE) as u8 } else { 1 };
    }
    let suffix = |at: u32| &symbols[at as usize..at as usize + usize::from(reach[at as usize])];

    let mut buckets: Vec<Vec<u32>> = vec![Vec::new(); counts.len()];
    for at in (0..symbols.len()).filter(|&at| symbols[at] != 0) {
        buckets[symbols[at] as usize].push(at as u32);
    }
    // Every so many-th bucket to the same thread, since neighbours are often equally large.
    let mut parts: Vec<Vec<&mut Vec<u32>>> = (0..settings.threads).map(|_| Vec::new()).collect();
    for (number, bucket) in buckets.iter_mut().enumerate() {
        parts[number % settings.threads].push(bucket);
    }
    in_threads(parts, |part| {
        for bucket in part {
            bucket.sort_unstable_by(|&a, &b| suffix(a).cmp(suffix(b)).then(a.cmp(&b)));
        }
    });
    let sorted = buckets.concat();

    // Substrings as (value, place in the order, length).
    let mut found: Vec<(Reverse<u64>, usize, usize)> = Vec::new();
    let common = |a: u32, b: u32| suffix(a).iter().zip(suffix(b)).take_while(|(a, b)| a == b).count();
    let mut sums = vec![0_u64; sorted.len() + 1];
    for (i, &at) in sorted.iter().enumerate() {
        sums[i + 1] = sums[i] + weights[at as usize];
    }
    let mut keep = |from: usize, to: usize, length: usize| {
        let count = sums[to] - sums[from];
        if length > 1 && count >= settings.min_frequency {
            found.push((Reverse(count * length as u64), from, length));
        }
    };
    // Beginnings that are shared up to here: (length, first place).
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut shared_before = 0;
    for i in 0..sorted.len() {
        let shared_after = sorted.get(i + 1).map_or(0, |&next| common(sorted[i], next));
        // A whole word that no other word holds.
        let at = sorted[i] as usize;
        let length = usize::from(reach[at]);
        let whole = (at == 0 || symbols[at - 1] == 0) && symbols[at + length] == 0;
        if whole && shared_before.max(shared_after) < length {
            keep(i, i + 1, length);
        }
        let mut from = i;
        while let Some(&(length, start)) = open.last().filter(|(length, _)| *length > shared_after) {
            keep(start, i + 1, length);
            from = start;
            open.pop();
        }
        if shared_after > open.last().map_or(0, |&(length, _)| length) {
            open.push((shared_after, from));
        }
        shared_before = shared_after;
    }
    found.sort_unstable();
    found.truncate(FIRST_PIECES.saturating_sub(settings.alphabet.len()));

    let characters = settings.alphabet.iter().zip(&counts[1..]);
    let mut pieces: Vec<Piece> = characters
        .map(|(character, &count)| Piece { text: character.to_string(), score: count.max(1) as f64 })
        .collect();
    for (Reverse(value), place, length) in found {
        let text = suffix(sorted[place])[..length].iter().map(|&symbol| settings.alphabet[symbol as usize - 1]);
        pieces.push(Piece { text: text.collect(), score: value as f64 });
    }
    pieces.sort_unstable_by(|a, b| a.text.cmp(&b.text));
    let sum: f64 = pieces.iter().map(|piece| piece.score).sum();
    for piece in &mut pieces {
        piece.score = (piece.score / sum).ln();
    }
    pieces
}

/// Whether a piece may hold two characters side by side. As in SentencePiece, letters and digits do not join with
/// punctuation: commas would otherwise stick to common words. The mark of a word's beginning goes with either.
fn may_join(left: char, right: char) -> bool {
    let mark = |c: char| matches!(c, '\u{300}'..='\u{36f}' | '\u{3099}' | '\u{309a}' | '\u{fe00}'..='\u{fe0f}');
    let letter = |c: char| c.is_alphanumeric() || mark(c);
    left == '\u{2581}' || letter(left) == letter(right)
}

/// Pieces, in the order of their texts, ready to be looked up.
struct Model {
    trie: Trie,
    scores: Vec<f64>,
    unknown: f64,
}

impl Model {
    fn new(pieces: &[Piece]) -> Self {
        let texts: Vec<&str> = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let scores: Vec<f64> = pieces.iter().map(|piece| piece.score).collect();
        let unknown = scores.iter().copied().fold(0.0, f64::min) - UNKNOWN_PENALTY;
        Self { trie: Trie::new(&texts), scores, unknown }
    }

    fn fill(&self, lattice: &mut Lattice, characters: &[char]) {
        lattice.fill(characters, &self.trie, &self.scores, self.unknown, None);
    }

    /// How often each piece is expected, over all ways to write the words.
    fn expectations(&self, runs: &[Run], threads: usize) -> Vec<f64> {
        let stripe = |runs: &[Run]| {
            let mut lattice = Lattice::default();
            let mut sums = vec![0.0; self.scores.len()];
            for run in runs {
                self.fill(&mut lattice, &run.characters);
                lattice.expectations(|piece, expected| {
                    if piece != UNKNOWN {
                        sums[piece as usize] += run.count as f64 * expected;
                    }
                });
            }
            sums
        };
        let mut sums = vec![0.0; self.scores.len()];
        in_stripes(runs, threads, stripe, |part| sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part));
        sums
    }

    /// How often each piece is used when every word is written in its likeliest way.
    fn uses(&self, runs: &[Run], threads: usize) -> Vec<u64> {
        let stripe = |runs: &[Run]| {
            let mut lattice = Lattice::default();
            let mut uses = vec![0_u64; self.scores.len()];
            for run in runs {
                self.fill(&mut lattice, &run.characters);
                lattice.best_backwards(|piece, _, _| {
                    if piece != UNKNOWN {
                        uses[piece as usize] += run.count;
                    }
                });
            }
            uses
        };
        let mut sums = vec![0; self.scores.len()];
        in_stripes(runs, threads, stripe, |part| sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part));
        sums
    }
}

/// Works on the stripes of the words, as many at a time as there are threads, and hands on what comes of them in order.
fn in_stripes<R: Send>(runs: &[Run], threads: usize, work: impl Fn(&[Run]) -> R + Sync, each: impl FnMut(R)) {
    let stripes: Vec<&[Run]> = runs.chunks(runs.len().div_ceil(STRIPES).max(1)).collect();
    stripes.chunks(threads).flat_map(|some| in_threads(some.to_vec(), &work)).for_each(each);
}

/// New probabilities from expected counts, by the digamma function in place of the logarithm: a sparse prior, which
/// favours fewer pieces (Liang and Klein's tutorial of 2007, as in SentencePiece). Rare pieces go, characters stay.
fn maximise(pieces: Vec<Piece>, expected: &[f64]) -> Vec<Piece> {
    let mut kept = Vec::with_capacity(pieces.len());
    let mut sum = 0.0;
    for (mut piece, &expected) in pieces.into_iter().zip(expected) {
        if expected < LEAST_EXPECTED && !piece.is_character() {
            continue;
        }
        piece.score = expected.max(LEAST_EXPECTED);
        sum += piece.score;
        kept.push(piece);
    }
    let log_sum = digamma(sum);
    for piece in &mut kept {
        piece.score = digamma(piece.score) - log_sum;
    }
    kept
}

/// Keeps the characters and the pieces that the text would miss most, `kept` in all.
///
/// What the text loses without a piece is taken as if each of its uses were written in the next best way, and nothing
/// else changed.
fn prune(pieces: Vec<Piece>, kept: usize, runs: &[Run], threads: usize) -> Vec<Piece> {
    let model = Model::new(&pieces);
    let uses = model.uses(runs, threads);
    let sum = uses.iter().sum::<u64>() as f64;
    let loss = |number: usize, lattice: &mut Lattice| -> Option<f64> {
        let piece = &pieces[number];
        if piece.is_character() {
            return Some(f64::INFINITY);
        }
        // Nothing uses it: the text has a likelier way wherever it could stand.
        let used = uses[number] as f64;
        if used == 0.0 {
            return None;
        }
        let characters: Vec<char> = piece.text.chars().collect();
        lattice.fill(&characters, &model.trie, &model.scores, model.unknown, Some(number as u32));
        let mut parts = Vec::new();
        lattice.best_backwards(|piece, _, _| parts.push(piece));
        let known = parts.iter().filter(|&&part| part != UNKNOWN);
        let log_sum = (sum + used * (parts.len() as f64 - 1.0)).ln();
        let instead: f64 = known.map(|&part| (uses[part as usize] as f64 + used).ln() - log_sum).sum();
        Some(used * (used.ln() - sum.ln() - instead))
    };
    let numbers: Vec<usize> = (0..pieces.len()).collect();
    let chunks = numbers.chunks(pieces.len().div_ceil(threads).max(1)).collect();
    let losses = in_threads(chunks, |numbers: &[usize]| {
        let mut lattice = Lattice::default();
        numbers.iter().map(|&number| loss(number, &mut lattice)).collect::<Vec<_>>()
    });
    let mut order: Vec<(f64, usize)> =
        losses.concat().into_iter().enumerate().filter_map(|(number, loss)| Some((loss?, number))).collect();
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut stays = vec![false; pieces.len()];
    for &(loss, number) in &order {
        stays[number] = loss == f64::INFINITY;
    }
    let characters = stays.iter().filter(|&&stays| stays).count();
    for &(_, number) in order.iter().skip(characters).take(kept.saturating_sub(characters)) {
        stays[number] = true;
    }
    pieces.into_iter().zip(stays).filter(|(_, stays)| *stays).map(|(piece, _)| piece).collect()
}

/// The derivative of the logarithm of the gamma function, for x > 0: up to 7 by its recurrence, then by its asymptotic
/// series around x - 1/2.
fn digamma(mut x: f64) -> f64 {
    let mut result = 0.0;
    while x < 7.0 {
        result -= 1.0 / x;
        x += 1.0;
    }
    let middle = x - 0.5;
    let inverse_square = 1.0 / (middle * middle);
    let series = [1.0 / 24.0, -7.0 / 960.0, 31.0 / 8064.0, -127.0 / 30720.0];
    let tail = series.iter().rev().fold(0.0, |sum, coefficient| (sum + coefficient) * inverse_square);
    result + middle.ln() + tail
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn as_runs(words: &[(&str, u64)]) -> Vec<Run> {
        runs(&words.iter().map(|&(word, count)| (word.into(), count)).collect::<Vec<(Box<str>, u64)>>())
    }

    fn settings(alphabet: &str, min_frequency: u64, threads: usize) -> UnigramSettings {
        let alphabet = alphabet.chars().collect();
        UnigramSettings { alphabet, specials: 2, vocabulary_size: 30, min_frequency, threads }
    }

    /// Every substring by its number of occurrences, less those that always go on in the same way, plus whole words.
    fn reference(words: &[(String, u64)], settings: &UnigramSettings) -> BTreeMap<String, u64> {
        let mut counts: BTreeMap<String, (u64, usize)> = BTreeMap::new();
        let mut extended: BTreeMap<String, BTreeMap<Option<char>, usize>> = BTreeMap::new();
        for (word, count) in words {
            let letters: Vec<char> = word.chars().collect();
            let fits = |piece: &[char]| {
                piece.iter().all(|letter| settings.alphabet.contains(letter))
                    && piece.windows(2).all(|pair| may_join(pair[0], pair[1]))
                    && piece.len() <= LONGEST_PIECE
            };
            for start in 0..letters.len() {
                for end in (start + 1..=letters.len()).take_while(|&end| fits(&letters[start..end])) {
                    let text: String = letters[start..end].iter().collect();
                    let entry = counts.entry(text.clone()).or_default();
                    *entry = (entry.0 + count, entry.1 + 1);
                    let next = letters.get(end).filter(|_| fits(&letters[start..=end])).copied();
                    *extended.entry(text).or_default().entry(next).or_default() += 1;
                }
            }
        }
        let mut kept = BTreeMap::new();
        for (text, (count, places)) in counts {
            // Two places that end differently, or both end, share no longer beginning.
            let branches =
                extended[&text].iter().map(|(next, &times)| if next.is_none() { times } else { 1 }).sum::<usize>();
            let whole = words
                .iter()
                .any(|(word, _)| word.split(|letter| !settings.alphabet.contains(&letter)).any(|part| part == text));
            if text.chars().count() > 1 && count >= settings.min_frequency && ((places > 1 && branches > 1) || whole) {
                kept.insert(text.clone(), count * text.chars().count() as u64);
            }
        }
        kept
    }

    proptest! {
        #[test]
        fn the_first_pieces_are_the_frequent_substrings(
            words in prop::collection::btree_map("▁?[ab.☃]{1,9}", 1_u64..5, 1..12),
            min_frequency in 1_u64..5,
            threads in 1_usize..4,
        ) {
            let words: Vec<(String, u64)> = words.into_iter().collect();
            let settings = settings(".ab▁", min_frequency, threads);
            let runs = as_runs(&words.iter().map(|(word, count)| (word.as_str(), *count)).collect::<Vec<_>>());
            let pieces = first_pieces(&runs, &settings);
            prop_assert!(pieces.is_sorted_by(|a, b| a.text < b.text));
            let longer = pieces.iter().filter(|piece| !piece.is_character());
            let found: Vec<&str> = longer.map(|piece| piece.text.as_str()).collect();
            let expected = reference(&words, &settings);
            prop_assert_eq!(found, expected.keys().map(String::as_str).collect::<Vec<_>>());
            // Scores are the shares of (occurrences times length).
            for pair in pieces.iter().filter(|piece| !piece.is_character()).collect::<Vec<_>>().windows(2) {
                let ratio = expected[&pair[0].text] as f64 / expected[&pair[1].text] as f64;
                prop_assert!((pair[0].score - pair[1].score - ratio.ln()).abs() < 1e-9);
            }
        }
    }

    const WORDS: [(&str, u64); 8] = [
        ("▁the", 60),
        ("▁then", 9),
        ("▁there", 12),
        ("▁cat", 20),
        ("▁cats", 8),
        ("▁mats", 7),
        ("▁cathedral", 3),
        ("▁tea☃", 2),
    ];

    /// With plain maximum likelihood in place of the sparse prior, no step may lower the likelihood: that is what
    /// expectation maximisation promises, and it holds only if the expectations are right.
    #[test]
    fn the_likelihood_never_falls() {
        let runs = as_runs(&WORDS);
        let mut pieces = first_pieces(&runs, &settings("acdehlmnrst▁", 2, 1));
        let likelihood = |pieces: &[Piece]| -> f64 {
            let model = Model::new(pieces);
            let mut lattice = Lattice::default();
            // The unknown character would score otherwise each time.
            let known = runs.iter().filter(|run| !run.characters.contains(&'☃'));
            known
                .map(|run| {
                    model.fill(&mut lattice, &run.characters);
                    run.count as f64 * lattice.log_probability()
                })
                .sum()
        };
        let mut last = likelihood(&pieces);
        let first = last;
        for _ in 0..20 {
            let known: Vec<Run> = as_runs(&WORDS[..7]);
            let expected = Model::new(&pieces).expectations(&known, 2);
            let sum: f64 = expected.iter().sum();
            for (piece, expected) in pieces.iter_mut().zip(&expected) {
                piece.score = (expected / sum).max(1e-300).ln();
            }
            let now = likelihood(&pieces);
            assert!(now >= last - 1e-9, "{now} after {last}");
            last = now;
        }
        assert!(last > first + 1.0, "{first} to {last}");
    }

    #[test]
    fn sizes_characters_and_threads() {
        let words: Vec<(Box<str>, u64)> = WORDS.iter().map(|&(word, count)| (word.into(), count)).collect();
        let learn_with = |size: usize, threads: usize| {
            let settings = UnigramSettings { vocabulary_size: size, ..settings("acdehlmnrst▁", 2, threads) };
            learn(&words, &settings, &mut |_, _| Ok(()))
        };
        assert!(matches!(
            learn_with(13, 1),
            Err(TextError::VocabularyTooSmall { asked: 13, specials: 2, alphabet: 12 })
        ));
        for size in [14, 16, 18] {
            let pieces = learn_with(size, 1).unwrap();
            assert_eq!(pieces.len(), size - 2);
            assert_eq!(pieces.iter().filter(|piece| piece.is_character()).count(), 12, "every character stays");
            assert!(pieces.is_sorted_by(|a, b| a.score >= b.score));
            assert_eq!(pieces, learn_with(size, 2).unwrap());
            assert_eq!(pieces, learn_with(size, 3).unwrap());
        }
        let pieces = learn_with(16, 1).unwrap();
        assert!(["▁the", "▁cat"].iter().all(|word| pieces.iter().any(|piece| piece.text == *word)), "{pieces:?}");
        // More than there is: everything, and no error.
        assert!(learn_with(1000, 1).unwrap().len() < 60);
    }

    /// To the last bit, before anything is rounded.
    #[test]
    fn threads_change_no_bit() {
        let parts = ["▁the", "▁cat", "s", "mat", "ten", "hen", "ed", "er"];
        let mut words = BTreeMap::new();
        for i in 0..4096_usize {
            let word: String = (0..4).map(|place| parts[i >> (3 * place) & 7]).collect();
            words.insert(word, 1 + (i * i % 97) as u64);
        }
        let words: Vec<(&str, u64)> = words.iter().map(|(word, &count)| (word.as_str(), count)).collect();
        let runs = as_runs(&words);
        let pieces = first_pieces(&runs, &settings("acdehmnrst▁", 2, 1));
        assert_eq!(pieces, first_pieces(&runs, &settings("acdehmnrst▁", 2, 3)));
        let bits = |threads| -> Vec<u64> {
            Model::new(&pieces).expectations(&runs, threads).into_iter().map(f64::to_bits).collect()
        };
        let once = bits(1);
        assert!([2, 3, 5].into_iter().all(|threads| bits(threads) == once));
    }

    /// Values of the digamma function from tables; ψ(1) is minus Euler's constant.
    #[test]
    fn digamma_values() {
        for (x, value) in [
            (0.5, -1.963_510_026_021_423_5),
            (1.0, -0.577_215_664_901_532_9),
            (2.0, 0.422_784_335_098_467_1),
            (10.0, 2.251_752_589_066_721),
            (1000.0, 6.907_255_195_648_812),
        ] {
            assert!((digamma(x) - value).abs() < 1e-8, "{x}: {}", digamma(x));
        }
    }
}
