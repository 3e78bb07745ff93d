//! A prepared text cut into pieces: the unigram model's likeliest way, or BPE's merges. Both follow SentencePiece to the bit,
//! with sums of scores in its precision, since equal sums decide between ways.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::normalizer::Normalizer;
use super::proto::{Algorithm, ModelProto, PieceKind};
use crate::lattice::Trie;

/// How much lower than the lowest piece an unknown character scores.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Where a piece lies in the prepared text, and its place in the file.
pub(crate) type Cut = (usize, usize, usize);

/// What cuts.
pub(crate) enum Segmenter {
    Unigram(Unigram),
    BytePair(BytePair),
}

impl Segmenter {
    pub(crate) fn of(model: &ModelProto, unknown: usize) -> Self {
        match model.algorithm {
            Algorithm::Unigram => Self::Unigram(Unigram::of(model, unknown)),
            Algorithm::BytePair => Self::BytePair(BytePair::of(model, unknown)),
        }
    }

    /// The pieces of a text in order; neighbouring unknown characters are still apart.
    pub(crate) fn cut(&self, text: &str, normalizer: &Normalizer) -> Vec<Cut> {
        match self {
            Self::Unigram(unigram) => unigram.cut(text),
            Self::BytePair(byte_pair) => byte_pair.cut(text, normalizer),
        }
    }
}

/// The pieces that can be found in a text.
fn findable(model: &ModelProto) -> impl Iterator<Item = (usize, &str)> {
    let kinds = [PieceKind::Normal, PieceKind::UserDefined, PieceKind::Unused];
    let pieces = model.pieces.iter().enumerate().filter(move |(_, piece)| kinds.contains(&piece.kind));
    pieces.map(|(id, piece)| (id, piece.text.as_str()))
}

pub(crate) struct Unigram {
    trie: Trie,
    /// By a piece's place in the trie: its place in the file, and its score; `None` for one that is not used.
    found: Vec<(usize, Option<Score>)>,
    unknown: usize,
    unknown_score: f32,
    highest: f32,
}

#[derive(Clone, Copy)]
enum Score {
    Of(f32),
    /// Of a piece that must win against all others.
    UserDefined,
}

/// The best way to a place: its score, where its last piece begins, and which that is.
#[derive(Clone, Copy)]
struct Way {
    score: f32,
    begin: usize,
    piece: usize,
}

impl Unigram {
    fn of(model: &ModelProto, unknown: usize) -> Self {
        let normal = model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal);
        let lowest = normal.clone().map(|piece| piece.score).fold(f32::MAX, f32::min);
        // SentencePiece begins with the smallest positive number here, so that this is the maximum only above it.
        let highest = normal.map(|piece| piece.score).fold(f32::MIN_POSITIVE, f32::max);
        let mut sorted: Vec<(usize, &str)> = findable(model).collect();
        sorted.sort_unstable_by_key(|(_, text)| *text);
        let texts: Vec<&str> = sorted.iter().map(|(_, text)| *text).collect();
        let score = |id: usize| match model.pieces[id].kind {
            PieceKind::Unused => None,
            PieceKind::UserDefined => Some(Score::UserDefined),
            _ => Some(Score::Of(model.pieces[id].score)),
        };
        Self {
            trie: Trie::new(&texts),
            found: sorted.iter().map(|&(id, _)| (id, score(id))).collect(),
            unknown,
            unknown_score: lowest - UNKNOWN_PENALTY,
            highest,
        }
    }

    fn cut(&self, text: &str) -> Vec<Cut> {
        let mut ways: Vec<Option<Way>> = vec![None; text.len() + 1];
        let offer = |ways: &mut [Option<Way>], begin: usize, end: usize, piece: usize, score: f64, so_far: f32| {
            let sum = score + f64::from(so_far);
            if ways[end].is_none_or(|way| sum > f64::from(way.score)) {
                ways[end] = Some(Way { score: sum as f32, begin, piece });
            }
        };
        for (begin, letter) in text.char_indices() {
            let so_far = ways[begin].map_or(0.0, |way| way.score);
            let mut alone = false;
            for (length, piece) in self.trie.prefixes(&text[begin..]) {
                let (id, Some(score)) = self.found[piece as usize] else { continue };
                let score = match score {
                    Score::Of(score) => f64::from(score),
                    Score::UserDefined => f64::from(length as f32 * self.highest) - 0.1,
                };
                offer(&mut ways, begin, begin + length, id, score, so_far);
                alone |= length == letter.len_utf8();
            }
            if !alone {
                let (end, score) = (begin + letter.len_utf8(), f64::from(self.unknown_score));
                offer(&mut ways, begin, end, self.unknown, score, so_far);
            }
        }
        let mut cuts = Vec::new();
        let mut end = text.len();
        // Every place between characters has a way to it; the place 0 has none and ends the loop.
        while let Some(way) = ways[end] {
            cuts.push((way.begin, end, way.piece));
            end = way.begin;
        }
        cuts.reverse();
        cuts
    }
}

pub(crate) struct BytePair {
    /// A piece's place in the file, its score, and whether it is used.
    pieces: HashMap<String, (usize, f32, bool)>,
    longest: usize,
    unknown: usize,
}

/// A stretch of the text in the course of merging. What was merged into its left neighbour is empty.
struct Symbol {
    begin: usize,
    length: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined piece, which is never merged.
    frozen: bool,
}

/// Two neighbours that make a piece.
struct Merge {
    score: f32,
    left: usize,
    right: usize,
    length: usize,
}

impl PartialEq for Merge {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Merge {}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Merge {
    /// The highest score first, then the leftmost. Scores are finite; 0 and −0 count as equal.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        by_score.then(other.left.cmp(&self.left)).then(other.length.cmp(&self.length))
    }
}

/// The merges to come, and for pieces that are not used, how long their left part was when they were made.
struct Agenda<'t> {
    text: &'t str,
    symbols: Vec<Symbol>,
    merges: BinaryHeap<Merge>,
    left_parts: HashMap<&'t str, usize>,
}

impl BytePair {
    fn of(model: &ModelProto, unknown: usize) -> Self {
        let entry = |(id, text): (usize, &str)| {
            let piece = &model.pieces[id];
            (text.to_owned(), (id, piece.score, piece.kind != PieceKind::Unused))
        };
        let pieces: HashMap<_, _> = findable(model).map(entry).collect();
        let longest = pieces.keys().map(String::len).max().unwrap_or(0);
        Self { pieces, longest, unknown }
    }

    fn cut(&self, text: &str, normalizer: &Normalizer) -> Vec<Cut> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut begin = 0;
        while let Some(letter) = text[begin..].chars().next() {
            let symbol = normalizer.symbol(&text[begin..]);
            let length = symbol.unwrap_or(letter.len_utf8());
            let number = symbols.len();
            let next = (begin + length < text.len()).then_some(number + 1);
            symbols.push(Symbol { begin, length, previous: number.checked_sub(1), next, frozen: symbol.is_some() });
            begin += length;
        }
        let mut agenda = Agenda { text, symbols, merges: BinaryHeap::new(), left_parts: HashMap::new() };
        for right in 1..agenda.symbols.len() {
            self.consider(&mut agenda, right - 1, right);
        }
        while let Some(Merge { left, right, length, .. }) = agenda.merges.pop() {
            let (left_length, right_length) = (agenda.symbols[left].length, agenda.symbols[right].length);
            if left_length == 0 || right_length == 0 || left_length + right_length != length {
                continue;
            }
            let next = agenda.symbols[right].next;
            agenda.symbols[left].length = length;
            agenda.symbols[left].next = next;
            agenda.symbols[right].length = 0;
            if let Some(next) = next {
                agenda.symbols[next].previous = Some(left);
            }
            if let Some(previous) = agenda.symbols[left].previous {
                self.consider(&mut agenda, previous, left);
            }
            if let Some(next) = next {
                self.consider(&mut agenda, left, next);
            }
        }
        let mut cuts = Vec::new();
        let mut place = (!agenda.symbols.is_empty()).then_some(0);
        while let Some(Symbol { begin, length, next, .. }) = place.map(|place| &agenda.symbols[place]) {
            self.take_apart(&agenda, *begin, *length, &mut cuts);
            place = *next;
        }
        cuts
    }

    /// Puts a merge on the agenda, if there is one.
    fn consider(&self, agenda: &mut Agenda<'_>, left: usize, right: usize) {
        let (first, second) = (&agenda.symbols[left], &agenda.symbols[right]);
        let length = first.length + second.length;
        if first.frozen || second.frozen || length > self.longest {
            return;
        }
        let piece = &agenda.text[first.begin..first.begin + length];
        let Some(&(_, score, used)) = self.pieces.get(piece) else { return };
        if !used {
            agenda.left_parts.insert(piece, first.length);
        }
        agenda.merges.push(Merge { score, left, right, length });
    }

    /// A piece, or what it was made of where it is not to be used.
    fn take_apart(&self, agenda: &Agenda<'_>, begin: usize, length: usize, cuts: &mut Vec<Cut>) {
        let mut open = vec![(begin, length)];
        while let Some((begin, length)) = open.pop() {
            let piece = &agenda.text[begin..begin + length];
            match (self.pieces.get(piece), agenda.left_parts.get(piece)) {
                (Some((_, _, false)), Some(&left)) => {
                    open.push((begin + left, length - left));
                    open.push((begin, left));
                }
                (found, _) => cuts.push((begin, begin + length, found.map_or(self.unknown, |found| found.0))),
            }
        }
    }
}
