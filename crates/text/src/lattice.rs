//! All ways to write a word in pieces of the unigram language model (Kudo, 2018): the likeliest, how likely each piece
//! is over all of them, and one drawn at random. Training and sampled encoding share it; plain encoding is the
//! `tokenizers` crate's, which finds the same likeliest way.

/// The piece of a character that no piece holds.
pub(crate) const UNKNOWN: u32 = u32::MAX;

/// How much lower than the lowest piece an unknown character scores, as in the `tokenizers` crate.
pub(crate) const UNKNOWN_PENALTY: f64 = 10.0;

/// Pieces by their characters: a tree in arrays, whose nodes are numbered level by level, so that the children of a
/// node are neighbours.
pub(crate) struct Trie {
    /// The children of node i are `first_child[i]..first_child[i + 1]`.
    first_child: Vec<u32>,
    /// The character that leads to a node.
    labels: Vec<char>,
    /// The piece that ends at a node, or [`UNKNOWN`].
    pieces: Vec<u32>,
}

impl Trie {
    /// Of pieces in the order of their texts, all different and none empty. A piece is known by its place.
    pub(crate) fn new(sorted: &[&str]) -> Self {
        let characters: Vec<Vec<char>> = sorted.iter().map(|piece| piece.chars().collect()).collect();
        let mut trie = Self { first_child: Vec::new(), labels: vec!['\0'], pieces: vec![UNKNOWN] };
        // The pieces below each node of a level.
        let root = 0..characters.len();
        let mut level = vec![root];
        let mut depth = 0;
        while !level.is_empty() {
            let mut next = Vec::new();
            for mut below in level {
                trie.first_child.push(trie.labels.len() as u32);
                // The piece that ends here sorts before those that continue.
                if characters[below.clone()].first().is_some_and(|piece| piece.len() == depth) {
                    below.start += 1;
                }
                while let Some(label) = characters[below.clone()].first().map(|piece| piece[depth]) {
                    let same = characters[below.clone()].iter().take_while(|piece| piece[depth] == label).count();
                    let ends = characters[below.start].len() == depth + 1;
                    trie.labels.push(label);
                    trie.pieces.push(if ends { below.start as u32 } else { UNKNOWN });
                    next.push(below.start..below.start + same);
                    below.start += same;
                }
            }
            level = next;
            depth += 1;
        }
        trie.first_child.push(trie.labels.len() as u32);
        trie
    }

    /// The pieces that a text begins with, the shortest first: how many bytes each has, and its place.
    pub(crate) fn prefixes<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (usize, u32)> + 't {
        let nodes = text.char_indices().scan(0, |node, (at, letter)| {
            *node = self.child(*node, letter)?;
            Some((at + letter.len_utf8(), self.pieces[*node]))
        });
        nodes.filter(|(_, piece)| *piece != UNKNOWN)
    }

    fn child(&self, node: usize, label: char) -> Option<usize> {
        let (start, end) = (self.first_child[node] as usize, self.first_child[node + 1] as usize);
        self.labels[start..end].binary_search(&label).ok().map(|place| start + place)
    }
}

/// A piece at a place of the word.
struct Edge {
    begin: usize,
    piece: u32,
    score: f64,
    /// The share of this edge among those that end where it ends, over all ways to get there.
    share: f64,
    /// The next edge with the same end.
    next: Option<usize>,
}

/// The ways through one word; made once and filled again and again.
#[derive(Default)]
pub(crate) struct Lattice {
    edges: Vec<Edge>,
    /// For each place the last edge that ends there.
    last: Vec<Option<usize>>,
    /// The score of the best way to each place, and its last edge.
    best: Vec<(f64, Option<usize>)>,
    /// The logarithm of the sum over all ways to each place.
    total: Vec<f64>,
    mass: Vec<f64>,
}

impl Lattice {
    /// Lays out a word. `scores` are the pieces' log probabilities, `unknown` that of a character without a piece. The
    /// piece `without` is not used.
    pub(crate) fn fill(&mut self, word: &[char], trie: &Trie, scores: &[f64], unknown: f64, without: Option<u32>) {
        self.edges.clear();
        self.last.clear();
        self.last.resize(word.len() + 1, None);
        self.best.clear();
        self.best.resize(word.len() + 1, (0.0, None));
        self.total.clear();
        self.total.resize(word.len() + 1, 0.0);
        for begin in 0..word.len() {
            self.arrive(begin);
            let mut node = 0;
            let mut alone = false;
            for (end, &character) in (begin + 1..).zip(&word[begin..]) {
                let Some(child) = trie.child(node, character) else { break };
                node = child;
                let piece = trie.pieces[node];
                if piece != UNKNOWN && Some(piece) != without {
                    alone |= end == begin + 1;
                    self.insert(begin, end, piece, scores[piece as usize]);
                }
            }
            if !alone {
                self.insert(begin, begin + 1, UNKNOWN, unknown);
            }
        }
        self.arrive(word.len());
    }

    fn insert(&mut self, begin: usize, end: usize, piece: u32, score: f64) {
        self.edges.push(Edge { begin, piece, score, share: 0.0, next: self.last[end] });
        self.last[end] = Some(self.edges.len() - 1);
    }

    /// Sums up what leads to a place, now that all of it is known.
    fn arrive(&mut self, place: usize) {
        let mut edge = self.last[place];
        if edge.is_none() {
            return;
        }
        let mut best = (f64::NEG_INFINITY, None);
        let mut largest = f64::NEG_INFINITY;
        while let Some(number) = edge {
            let Edge { begin, score, next, .. } = self.edges[number];
            let way = self.best[begin].0 + score;
            // Edges come with the latest beginning first; among equals the longest piece wins, as in the crate.
            if way >= best.0 {
                best = (way, Some(number));
            }
            largest = largest.max(self.total[begin] + score);
            edge = next;
        }
        let mut sum = 0.0;
        edge = self.last[place];
        while let Some(number) = edge {
            let edge_here = &mut self.edges[number];
            edge_here.share = (self.total[edge_here.begin] + edge_here.score - largest).exp();
            sum += edge_here.share;
            edge = edge_here.next;
        }
        edge = self.last[place];
        while let Some(number) = edge {
            self.edges[number].share /= sum;
            edge = self.edges[number].next;
        }
        self.best[place] = best;
        self.total[place] = largest + sum.ln();
    }

    /// The logarithm of the word's probability, over all ways to write it.
    #[cfg(test)]
    pub(crate) fn log_probability(&self) -> f64 {
        self.total.last().copied().unwrap_or(0.0)
    }

    /// How often each piece is expected in the word, given all ways to write it.
    pub(crate) fn expectations(&mut self, mut each: impl FnMut(u32, f64)) {
        self.mass.clear();
        self.mass.resize(self.last.len(), 0.0);
        if let Some(whole) = self.mass.last_mut() {
            *whole = 1.0;
        }
        for end in (0..self.last.len()).rev() {
            let mut edge = self.last[end];
            while let Some(number) = edge {
                let Edge { begin, piece, share, next, .. } = self.edges[number];
                let expected = self.mass[end] * share;
                self.mass[begin] += expected;
                each(piece, expected);
                edge = next;
            }
        }
    }

    /// The likeliest way, from the end of the word: pieces with where they begin and end.
    pub(crate) fn best_backwards(&self, each: impl FnMut(u32, usize, usize)) {
        self.walk_backwards(|lattice, end| lattice.best[end].1, each);
    }

    /// A way drawn with its probability, from the end of the word. `uniform` gives numbers in [0, 1).
    pub(crate) fn sample_backwards(&self, mut uniform: impl FnMut() -> f64, each: impl FnMut(u32, usize, usize)) {
        let draw = |lattice: &Self, end: usize| {
            let mut left = uniform();
            let mut edge = lattice.last[end];
            while let Some(number) = edge {
                let Edge { share, next, .. } = lattice.edges[number];
                if left < share || next.is_none() {
                    break;
                }
                left -= share;
                edge = next;
            }
            edge
        };
        self.walk_backwards(draw, each);
    }

    fn walk_backwards(
        &self,
        mut choose: impl FnMut(&Self, usize) -> Option<usize>,
        mut each: impl FnMut(u32, usize, usize),
    ) {
        let mut end = self.last.len().saturating_sub(1);
        while let Some(number) = choose(self, end) {
            let Edge { begin, piece, .. } = self.edges[number];
            each(piece, begin, end);
            end = begin;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// All ways to write a word, with their scores.
    fn ways(word: &str, pieces: &BTreeMap<String, f64>, unknown: f64) -> Vec<(Vec<String>, f64)> {
        let Some(first) = word.chars().next() else { return vec![(Vec::new(), 0.0)] };
        let mut all = Vec::new();
        let mut begin = |piece: &str, score: f64| {
            for (rest, rest_score) in ways(&word[piece.len()..], pieces, unknown) {
                all.push(([vec![piece.to_owned()], rest].concat(), score + rest_score));
            }
        };
        pieces
            .iter()
            .filter(|(piece, _)| word.starts_with(piece.as_str()))
            .for_each(|(piece, &score)| begin(piece, score));
        let first = first.to_string();
        if !pieces.contains_key(&first) {
            begin(&first, unknown);
        }
        all
    }

    proptest! {
        #[test]
        fn best_sum_and_expectations_over_all_ways(
            pieces in prop::collection::btree_map("[abc]{1,4}", -6.0..-0.5_f64, 1..12),
            word in "[abcd]{0,8}",
        ) {
            let unknown = -9.0;
            let texts: Vec<&str> = pieces.keys().map(String::as_str).collect();
            let scores: Vec<f64> = pieces.values().copied().collect();
            let letters: Vec<char> = word.chars().collect();
            let mut lattice = Lattice::default();
            // Filled with something else before: nothing of it may stay.
            lattice.fill(&['a', 'b', 'c', 'a'], &Trie::new(&texts), &scores, unknown, None);
            lattice.fill(&letters, &Trie::new(&texts), &scores, unknown, None);

            let all = ways(&word, &pieces, unknown);
            let total: f64 = all.iter().map(|(_, score)| score.exp()).sum();
            prop_assert!((lattice.log_probability() - total.ln()).abs() < 1e-9);

            let mut best = Vec::new();
            lattice.best_backwards(|_, begin, end| best.push(letters[begin..end].iter().collect::<String>()));
            best.reverse();
            let highest = all.iter().map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
            let found = all.iter().find(|(way, _)| *way == best).map(|(_, score)| *score);
            prop_assert!(found.is_some_and(|score| (score - highest).abs() < 1e-9));

            let mut expected: BTreeMap<&str, f64> = BTreeMap::new();
            for (way, score) in &all {
                way.iter().for_each(|piece| *expected.entry(piece).or_default() += score.exp() / total);
            }
            let mut sums = vec![0.0; texts.len()];
            lattice.expectations(|piece, share| if piece != UNKNOWN { sums[piece as usize] += share });
            for (text, sum) in texts.iter().zip(sums) {
                prop_assert!((expected.get(text).copied().unwrap_or(0.0) - sum).abs() < 1e-9);
            }
        }
    }

    /// A piece can be left out of its own word.
    #[test]
    fn without_a_piece() {
        let texts = ["a", "ab", "abc", "b", "c"];
        let mut lattice = Lattice::default();
        let best = |lattice: &Lattice| {
            let mut best = Vec::new();
            lattice.best_backwards(|piece, _, _| best.insert(0, piece));
            best
        };
        lattice.fill(&['a', 'b', 'c'], &Trie::new(&texts), &[-1.0; 5], -20.0, None);
        assert_eq!(best(&lattice), [2]);
        lattice.fill(&['a', 'b', 'c'], &Trie::new(&texts), &[-1.0; 5], -20.0, Some(2));
        assert_eq!(best(&lattice), [1, 4]);
        lattice.fill(&['a'], &Trie::new(&texts), &[-1.0; 5], -20.0, Some(0));
        assert_eq!(best(&lattice), [UNKNOWN]);
    }
}
