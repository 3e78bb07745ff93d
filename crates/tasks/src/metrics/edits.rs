//! How far two sequences are from each other: edit distance and longest common subsequence, 64 positions at a time, so that texts of a
//! hundred thousand words take tenths of a second and a few megabytes.

use std::collections::HashMap;

/// Positions of a word of memory.
const BITS: usize = u64::BITS as usize;

/// A sequence, and where each item stands in it.
#[derive(Debug)]
pub(super) struct Sequence {
    items: Vec<u32>,
    positions: HashMap<u32, Vec<u32>>,
    /// The positions of frequent items as bits. There are fewer than 64 such, so that memory follows the length.
    frequent: HashMap<u32, Vec<u64>>,
}

impl Sequence {
    pub(super) fn new(items: Vec<u32>) -> Self {
        let mut positions: HashMap<u32, Vec<u32>> = HashMap::new();
        for (position, item) in (0..).zip(&items) {
            positions.entry(*item).or_default().push(position);
        }
        let blocks = items.len().div_ceil(BITS);
        let mut frequent = HashMap::new();
        for (item, positions) in positions.iter().filter(|(_, positions)| positions.len() > blocks) {
            let mut bits = vec![0; blocks];
            positions.iter().for_each(|position| set(&mut bits, *position));
            frequent.insert(*item, bits);
        }
        Self { items, positions, frequent }
    }

    /// Where in it the items stand that another has, too, in ascending order.
    fn shared_with(&self, other: &Self) -> Vec<u32> {
        let (few, many) = match self.positions.len() < other.positions.len() {
            true => (&self.positions, &other.positions),
            false => (&other.positions, &self.positions),
        };
        let shared = few.keys().filter(|item| many.contains_key(item));
        let mut all: Vec<u32> = shared.flat_map(|item| &self.positions[item]).copied().collect();
        all.sort_unstable();
        all
    }
}

/// The fewest insertions, deletions and replacements from one sequence to the other (Levenshtein's distance), by the columns of bits of
/// Myers (1999) in blocks as Hyyrö (2003) has them.
pub fn edit_distance(first: &[u32], second: &[u32]) -> usize {
    let (Some(last), false) = (first.len().checked_sub(1), second.is_empty()) else {
        return first.len().max(second.len());
    };
    let first = Sequence::new(first.to_vec());
    let mut places = Places::new(&first);
    let blocks = first.items.len().div_ceil(BITS);
    // Where a row is one more, or one less, than the row above it.
    let (mut more, mut less) = (vec![!0u64; blocks], vec![0u64; blocks]);
    let mut distance = first.items.len();
    for item in second {
        // How the row above a block differs from the column before.
        let (mut up, mut down) = (1u64, 0u64);
        let found = places.of(*item);
        for block in 0..blocks {
            let (positive, negative) = (more[block], less[block]);
            let equal = found[block];
            let vertical = equal | negative;
            let equal = equal | down;
            let horizontal = ((equal & positive).wrapping_add(positive) ^ positive) | equal;
            let mut rises = negative | !(horizontal | positive);
            let mut falls = positive & horizontal;
            let at = if block + 1 == blocks { last % BITS } else { BITS - 1 };
            let next = ((rises >> at) & 1, (falls >> at) & 1);
            rises = (rises << 1) | up;
            falls = (falls << 1) | down;
            more[block] = falls | !(vertical | rises);
            less[block] = rises & vertical;
            (up, down) = next;
        }
        distance = distance + up as usize - down as usize;
    }
    distance
}

/// The length of the longest common subsequence.
pub fn common_length(first: &[u32], second: &[u32]) -> usize {
    let second = Sequence::new(second.to_vec());
    let mut places = Places::new(&second);
    let mut row = vec![!0u64; second.items.len().div_ceil(BITS)];
    first.iter().for_each(|item| advance(&mut row, places.of(*item)));
    steps_before(&row, second.items.len())
}

/// Which items of `first` are in a longest common subsequence, in ascending order. Of several such, the one that is found from the end,
/// going back in `second` only where that keeps more than going back in `first`: rouge-score's choice.
pub(super) fn common_items(first: &Sequence, second: &Sequence) -> Vec<usize> {
    // An item that only `first` has changes no length, and the search for the best path leaves it at once.
    let shared = first.shared_with(second);
    let own: Vec<u32> = shared.iter().map(|position| first.items[*position as usize]).collect();
    let mut table = Table::new(&own, second);
    let (mut i, mut j, mut items) = (own.len(), second.items.len(), Vec::new());
    let is_step = |row: &[u64], j: usize| (row[(j - 1) / BITS] >> ((j - 1) % BITS)) & 1 == 0;
    // The rows of the first `i` and of the first `i - 1` items, with their lengths for the first `j` of the other.
    let mut row = table.row(i);
    let mut above = table.row(i.saturating_sub(1));
    let (mut length, mut length_above) = (steps_before(&row, j), steps_before(&above, j));
    while i > 0 && j > 0 {
        let equal = own[i - 1] == second.items[j - 1];
        let left = length - usize::from(is_step(&row, j));
        if !equal && left > length_above {
            length_above -= usize::from(is_step(&above, j));
            (length, j) = (left, j - 1);
            continue;
        }
        if equal {
            items.push(shared[i - 1] as usize);
            length_above -= usize::from(is_step(&above, j));
            j -= 1;
        }
        i -= 1;
        (row, length) = (above, length_above);
        above = table.row(i.saturating_sub(1));
        length_above = steps_before(&above, j);
    }
    items.reverse();
    items
}

/// Rows of the table of lengths of common subsequences, by Hyyrö (2004): bit j of row i is 0 where the first i items of one sequence have
/// one more in common with the first j + 1 of the other than with the first j. All rows would be too many: some are kept, and
/// those between two of them are made again, once for whoever asks from the last row to the first.
struct Table<'a> {
    first: &'a [u32],
    places: Places<'a>,
    /// Rows 0, `every`, 2·`every`, …
    kept: Vec<Vec<u64>>,
    every: usize,
    /// The rows from this one on, up to the next that is kept.
    start: usize,
    rows: Vec<Vec<u64>>,
}

impl<'a> Table<'a> {
    fn new(first: &'a [u32], second: &'a Sequence) -> Self {
        let (every, mut places) = (first.len().isqrt().max(1), Places::new(second));
        let mut row = vec![!0u64; second.items.len().div_ceil(BITS)];
        let mut kept = vec![row.clone()];
        for (number, item) in (1..).zip(first) {
            advance(&mut row, places.of(*item));
            if number % every == 0 {
                kept.push(row.clone());
            }
        }
        Self { first, places, kept, every, start: usize::MAX, rows: Vec::new() }
    }

    fn row(&mut self, i: usize) -> Vec<u64> {
        let start = i - i % self.every;
        if self.start != start {
            let mut row = self.kept[i / self.every].clone();
            self.rows = vec![row.clone()];
            for item in self.first[start..].iter().take(self.every - 1) {
                advance(&mut row, self.places.of(*item));
                self.rows.push(row.clone());
            }
            self.start = start;
        }
        self.rows[i - start].clone()
    }
}

/// A row of the table from the one before.
fn advance(row: &mut [u64], found: &[u64]) {
    let mut carry = false;
    for (bits, found) in row.iter_mut().zip(found) {
        let (sum, over) = bits.overflowing_add(*bits & found);
        let (sum, again) = sum.overflowing_add(u64::from(carry));
        *bits = sum | (*bits & !found);
        carry = over || again;
    }
}

/// The zeros among the first `count` bits of a row.
fn steps_before(row: &[u64], count: usize) -> usize {
    let whole = row.iter().take(count / BITS).map(|bits| bits.count_zeros() as usize).sum::<usize>();
    let rest = count % BITS;
    let mask = (1u64 << rest) - 1;
    whole + if rest > 0 { (!row[count / BITS] & mask).count_ones() as usize } else { 0 }
}

/// Where items stand in a sequence, as bits.
struct Places<'a> {
    sequence: &'a Sequence,
    bits: Vec<u64>,
    /// The item whose positions are set in `bits`.
    set: Option<u32>,
}

impl<'a> Places<'a> {
    fn new(sequence: &'a Sequence) -> Self {
        Self { sequence, bits: vec![0; sequence.items.len().div_ceil(BITS)], set: None }
    }

    fn of(&mut self, item: u32) -> &[u64] {
        let Sequence { positions, frequent, .. } = self.sequence;
        if let Some(bits) = frequent.get(&item) {
            return bits;
        }
        if self.set != Some(item) {
            if let Some(before) = self.set.and_then(|before| positions.get(&before)) {
                before.iter().for_each(|position| self.bits[*position as usize / BITS] = 0);
            }
            if let Some(positions) = positions.get(&item) {
                positions.iter().for_each(|position| set(&mut self.bits, *position));
            }
            self.set = Some(item);
        }
        &self.bits
    }
}

fn set(bits: &mut [u64], position: u32) {
    bits[position as usize / BITS] |= 1 << (position as usize % BITS);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All lengths of common subsequences.
    fn lengths(first: &[u32], second: &[u32]) -> Vec<Vec<usize>> {
        let mut table = vec![vec![0; second.len() + 1]; first.len() + 1];
        for i in 1..=first.len() {
            for j in 1..=second.len() {
                table[i][j] = match first[i - 1] == second[j - 1] {
                    true => table[i - 1][j - 1] + 1,
                    false => table[i - 1][j].max(table[i][j - 1]),
                };
            }
        }
        table
    }

    fn plain_items(first: &[u32], second: &[u32]) -> Vec<usize> {
        let table = lengths(first, second);
        let (mut i, mut j, mut items) = (first.len(), second.len(), Vec::new());
        while i > 0 && j > 0 {
            if first[i - 1] == second[j - 1] {
                (i, j) = (i - 1, j - 1);
                items.insert(0, i);
            } else if table[i][j - 1] > table[i - 1][j] {
                j -= 1;
            } else {
                i -= 1;
            }
        }
        items
    }

    fn plain_distance(first: &[u32], second: &[u32]) -> usize {
        let mut row: Vec<usize> = (0..=second.len()).collect();
        for (i, item) in first.iter().enumerate() {
            let mut before = row[0];
            row[0] = i + 1;
            for j in 1..=second.len() {
                let replaced = before + usize::from(second[j - 1] != *item);
                before = row[j];
                row[j] = replaced.min(row[j] + 1).min(row[j - 1] + 1);
            }
        }
        row[second.len()]
    }

    fn check(first: &[u32], second: &[u32]) {
        assert_eq!(edit_distance(first, second), plain_distance(first, second), "{first:?} {second:?}");
        assert_eq!(common_length(first, second), lengths(first, second)[first.len()][second.len()]);
        let found = common_items(&Sequence::new(first.to_vec()), &Sequence::new(second.to_vec()));
        assert_eq!(found, plain_items(first, second), "{first:?} {second:?}");
    }

    proptest! {
        #[test]
        fn as_the_plain_tables_say(
            first in prop::collection::vec(0u32..6, 0..200),
            second in prop::collection::vec(0u32..6, 0..200),
        ) {
            check(&first, &second);
        }

        #[test]
        fn with_many_different_items(
            first in prop::collection::vec(0u32..90, 0..150),
            second in prop::collection::vec(0u32..90, 0..150),
        ) {
            check(&first, &second);
        }
    }

    #[test]
    fn at_the_borders_of_blocks() {
        for (n, m) in [(0, 0), (0, 5), (64, 64), (63, 65), (128, 1), (129, 64)] {
            let items = |count: u32, of: u32| (0..count).map(|i| i * i % of).collect::<Vec<_>>();
            check(&items(n, 7), &items(m, 5));
            check(&items(n, 1), &items(m, 1));
        }
    }

    /// Tens of thousands of different words on both sides take neither their square in memory nor minutes.
    #[test]
    fn long_sequences_are_no_problem() {
        let first: Vec<u32> = (0..30_000).collect();
        let second: Vec<u32> = (0..30_000).map(|i| if i % 3 == 0 { i + 100_000 } else { i }).collect();
        assert_eq!(edit_distance(&first, &second), 10_000);
        assert_eq!(common_length(&first, &second), 20_000);
        assert_eq!(common_items(&Sequence::new(first), &Sequence::new(second)).len(), 20_000);
    }
}
