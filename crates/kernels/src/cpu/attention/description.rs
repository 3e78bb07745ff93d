//! What an attention computes, as plain numbers: the same for every device.

use std::ops::Range;

/// An attention apart from its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// A.
    pub heads: usize,
    /// K: heads of keys and values; A is a multiple of it, and query head a reads key head a·K/A (grouped-query attention).
    pub key_heads: usize,
    /// D.
    pub head_size: usize,
    /// Which keys a query sees.
    pub window: Window,
    /// What q·k is multiplied with; 1/√D in most models, 1 in T5.
    pub scale: f32,
    /// What is added to the scaled scores.
    pub bias: Bias,
}

impl Attention {
    /// Every query sees every key, scores are divided by √D, and nothing is added to them.
    pub fn new(heads: usize, head_size: usize) -> Self {
        let scale = 1.0 / (head_size as f32).sqrt();
        Self { heads, key_heads: heads, head_size, window: Window::FULL, scale, bias: Bias::None }
    }

    /// Columns of the queries and of the output.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }

    /// Columns of the keys, and of the values.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.head_size
    }

    /// How many numbers the bias needs: a table of buckets × A, A slopes, or none.
    pub fn bias_size(&self) -> usize {
        match self.bias {
            Bias::None => 0,
            Bias::Relative(buckets) => buckets.count as usize * self.heads,
            Bias::Slopes => self.heads,
        }
    }

    /// Pairs of a query and a key that it sees, over all sequences: what the work is proportional to.
    pub fn pairs(&self, query_offsets: &[u32], key_offsets: &[u32]) -> usize {
        let lengths = |offsets: &[u32], i: usize| (offsets[i + 1] - offsets[i]) as usize;
        let sequences = query_offsets.len().min(key_offsets.len()).saturating_sub(1);
        let of = |i: usize| self.window.pairs(lengths(query_offsets, i), lengths(key_offsets, i));
        (0..sequences).map(of).sum()
    }

    pub(super) fn check(&self) {
        assert!(self.heads > 0 && self.head_size > 0, "attention: there are no heads");
        assert!(
            self.key_heads > 0 && self.heads.is_multiple_of(self.key_heads),
            "attention: {} heads cannot share {} key heads",
            self.heads,
            self.key_heads
        );
    }
}

/// Which keys a query sees: those from `left` before its own position to `right` after it.
///
/// The last query stands at the position of the last key: query i of N with M keys at position M − N + i. With as many keys
/// as queries that is i; with a cache of earlier keys it is where the new tokens stand. A query that sees no key gives zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Keys before the query's own position; `u32::MAX` for all of them.
    pub left: u32,
    /// Keys after it; `u32::MAX` for all of them.
    pub right: u32,
}

impl Window {
    /// All keys.
    pub const FULL: Self = Self { left: u32::MAX, right: u32::MAX };
    /// The query's own position and all before it.
    pub const CAUSAL: Self = Self { left: u32::MAX, right: 0 };

    /// |i − j| ≤ `reach`. ModernBERT's `local_attention` of 128 is a reach of 64: 129 keys.
    pub fn local(reach: u32) -> Self {
        Self { left: reach, right: reach }
    }

    /// The keys (of `keys`) that one of `queries` sees.
    pub fn keys(&self, query: usize, queries: usize, keys: usize) -> Range<usize> {
        let position = query as i64 + keys as i64 - queries as i64;
        let start = if self.left == u32::MAX { 0 } else { position - i64::from(self.left) };
        let end = if self.right == u32::MAX { keys as i64 } else { position + i64::from(self.right) + 1 };
        let inside = |at: i64| at.clamp(0, keys as i64) as usize;
        inside(start)..inside(end).max(inside(start))
    }

    /// What queries `first..first + n` see together.
    pub(super) fn keys_of_block(&self, first: usize, n: usize, queries: usize, keys: usize) -> Range<usize> {
        let (one, last) = (self.keys(first, queries, keys), self.keys(first + n - 1, queries, keys));
        one.start..last.end.max(one.start)
    }

    /// Keys that a query sees at most, where that is less than all.
    pub(super) fn span(&self) -> Option<usize> {
        let limited = self.left != u32::MAX && self.right != u32::MAX;
        limited.then(|| self.left as usize + self.right as usize + 1)
    }

    fn pairs(&self, queries: usize, keys: usize) -> usize {
        if *self == Self::FULL {
            return queries * keys;
        }
        (0..queries).map(|query| self.keys(query, queries, keys).len()).sum()
    }
}

/// What is added to the score of a query and a key; it depends on the head and on how far apart they stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// Nothing.
    None,
    /// A learned number for each bucket of distances and head: a table of buckets × A (T5, MPNet).
    Relative(Buckets),
    /// −slope·distance with a fixed slope for each head (Press et al. 2022, "ALiBi"): A slopes.
    Slopes,
}

/// T5's buckets of distances: exact ones near by, growing ones further away (Raffel et al. 2020, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Rows of the table: 32 in T5 and MPNet.
    pub count: u32,
    /// All that is as far away as this, or further, shares a bucket: 128 in T5 and MPNet.
    pub max_distance: u32,
    /// Whether keys after the query have buckets of their own (encoders); else they share that of distance 0.
    pub bidirectional: bool,
}

impl Buckets {
    /// The bucket of a key that stands `distance` after the query. In f32 as in `transformers`: borders depend on it.
    pub fn of(&self, distance: i64) -> usize {
        let (count, first) = match self.bidirectional {
            true => (self.count / 2, if distance > 0 { self.count / 2 } else { 0 }),
            false => (self.count, 0),
        };
        let far = if self.bidirectional { distance.unsigned_abs() } else { (-distance).max(0).unsigned_abs() };
        let exact = count / 2;
        if far < u64::from(exact) {
            return first as usize + far as usize;
        }
        let ratio = (far as f32 / exact as f32).ln() / (f64::from(self.max_distance) / f64::from(exact)).ln() as f32;
        let grown = exact + (ratio * (count - exact) as f32) as u32;
        (first + grown.min(count - 1)) as usize
    }
}

/// DeBERTa-v2's buckets of distances: exact ones near by, growing ones further away (He et al. 2021). Buckets have signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogBuckets {
    /// Buckets of a side, half of which are exact: 256 in DeBERTa-v3. With 0, every distance is its own bucket.
    pub count: u32,
    /// The distance whose predecessor has the last bucket: 512 in DeBERTa-v3. More than half of `count` + 1.
    pub max_distance: u32,
}

impl LogBuckets {
    /// The bucket of a distance, an odd function that never descends. In f32 as in `transformers`: borders depend on it.
    pub fn of(&self, distance: i64) -> i64 {
        let (far, exact) = (distance.abs(), i64::from(self.count / 2));
        if self.count == 0 || far <= exact {
            return distance;
        }
        let end = (f64::from(self.max_distance - 1) / exact as f64) as f32;
        let ratio = (far as f32 / exact as f32).ln() / end.ln();
        distance.signum() * ((ratio * (exact - 1) as f32).ceil() as i64 + exact)
    }

    /// The row of a table of `rows` rows, the middle one for no distance, that a distance has.
    pub fn row(&self, distance: i64, rows: usize) -> usize {
        (self.of(distance) + rows as i64 / 2).clamp(0, rows as i64 - 1) as usize
    }

    /// How many rows in the middle of a table of `rows` rows distances below `length` need, rounded up to one of few numbers.
    pub fn rows_for(&self, length: usize, rows: usize) -> usize {
        let most = self.of(length.saturating_sub(1) as i64).unsigned_abs() as usize;
        (2 * (most + 1).next_power_of_two().max(16)).min(rows)
    }
}
