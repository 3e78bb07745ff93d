//! Attention over flat tokens, forward and backward. The definition is [`crate::cpu::attention`]; scores are
//! never written to device memory.
//!
//! Legend: T tokens of the flat batch, S tokens of one sequence, A heads, D = head size, H = A·D. `qkv` is T×3H, `out`
//! T×H, `log_sums` A×T in f32.
//!
//! Here is what BERT needs: fused self-attention, full or causal. In bf16 with a head size of 32, 64, 96 or 128 it has kernels of its
//! own (attention.cu; for 64 on Hopper, attention_hopper.cu). Everything else is [`general`], and on Hopper what is long with heads of 128.

pub mod backward_hopper;
pub mod cache;
pub mod disentangled;
pub mod general;
pub mod hopper;
pub mod xl;

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Dropout, Gpu, Launch, Purpose, View};
use crate::cpu::attention::{Attention as Description, Window};
use general::{Columns, Gradients, Inputs, Sequences};

/// Attention on tensor cores.
pub static SOURCE: Source = Source {
    name: "attention.cu",
    text: concat!(
        include_str!("../kernels/tiles.cuh"),
        include_str!("../kernels/attention.cuh"),
        include_str!("../kernels/attention.cu")
    ),
    variants: &[&[HEAD_SIZES, DROPOUTS]],
};

/// The same for Hopper and a head size of 64. For other targets it is empty.
pub static HOPPER: Source = Source {
    name: "attention_hopper.cu",
    text: concat!(
        "#define HEAD_SIZE 64\n",
        include_str!("../kernels/tiles.cuh"),
        include_str!("../kernels/wgmma.cuh"),
        include_str!("../kernels/attention.cuh"),
        include_str!("../kernels/attention_hopper.cu")
    ),
    variants: &[&[DROPOUTS]],
};

const HEAD_SIZES: &[&str] = &["HEAD_SIZE=32", "HEAD_SIZE=64", "HEAD_SIZE=96", "HEAD_SIZE=128"];
const DROPOUTS: &[&str] = &["DROPOUT=false", "DROPOUT=true"];

/// Rows that a block of threads works on.
const TILE: usize = 128;

/// u32 numbers of an item: first token, tokens, number in the global batch, which 128 rows.
const ITEM: usize = 4;

/// How many items a table has: one for every 128 tokens of a sequence with more than 128, one for every other sequence.
///
/// A recorded graph is played with the room that it was recorded with: items that a batch does not need do nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Items of sequences with more than 1,024 tokens.
    pub longest: usize,
    /// Items of sequences with 129 to 1,024 tokens.
    pub long: usize,
    /// Items of sequences with 65 to 128 tokens.
    pub middle: usize,
    /// Items of the others.
    pub short: usize,
}

impl Room {
    /// What a batch needs: `offsets` tells where each sequence begins, and the end of the last.
    pub fn of(offsets: &[u32]) -> Self {
        let mut room = Self::default();
        for tokens in lengths(offsets) {
            let Self { longest, long, middle, short } = &mut room;
            *[short, middle, long, longest][class(tokens)] += tokens.div_ceil(TILE);
        }
        room
    }

    /// How many u32 numbers a table of this room has.
    pub fn numbers(self) -> usize {
        ITEM * self.items()
    }

    fn items(self) -> usize {
        self.longest + self.long + self.middle + self.short
    }

    /// Whether a batch that needs this much fits.
    pub fn holds(self, needed: Self) -> bool {
        let [have, need] = [self, needed].map(Self::by_class);
        need.iter().zip(have).all(|(need, have)| *need <= have)
    }

    /// Room for both, with some to spare where it had to grow, so that it seldom has to again.
    pub fn grown_for(self, needed: Self) -> Self {
        let grown = |have: usize, need: usize| {
            if need <= have { have } else { need.next_multiple_of(need.div_ceil(16).max(8)) }
        };
        Self {
            longest: grown(self.longest, needed.longest),
            long: grown(self.long, needed.long),
            middle: grown(self.middle, needed.middle),
            short: grown(self.short, needed.short),
        }
    }

    /// The items of each class, in the order of the table.
    pub fn by_class(self) -> [usize; 4] {
        [self.longest, self.long, self.middle, self.short]
    }
}

/// Sequences with more tokens are few, so their backward must not be one block of threads for all of a head's.
const LONG: usize = 1024;

/// 0 for at most 64 tokens, 1 for at most 128, 2 for at most 1,024, else 3.
fn class(tokens: usize) -> usize {
    usize::from(tokens > TILE / 2) + usize::from(tokens > TILE) + usize::from(tokens > LONG)
}

/// Writes the table of a batch, to be copied to the GPU with it: long sequences first, then middle, then short ones, of
/// each kind the longest first, so that no block of threads begins its long work when the others are done.
///
/// `numbers` are the sequences' numbers in the global batch, by which dropout draws. Every token of the batch belongs
/// to a sequence: what fills a batch up is a sequence too. `table` has [`Room::numbers`] numbers, for at least
/// [`Room::of`] the batch.
pub fn write_table(offsets: &[u32], numbers: &[u32], room: Room, table: &mut [u32]) {
    assert!(table.len() == room.numbers(), "attention: the table has {} numbers", table.len());
    let needed = Room::of(offsets);
    assert!(room.holds(needed), "attention: {needed:?} does not fit {room:?}");
    table.fill(0);
    let (longest, rest) = table.split_at_mut(ITEM * room.longest);
    let (long, rest) = rest.split_at_mut(ITEM * room.long);
    let (middle, short) = rest.split_at_mut(ITEM * room.middle);
    let mut classes = [short, middle, long, longest].map(|items| items.chunks_exact_mut(ITEM));
    for sequence in by_length(offsets) {
        let (first, tokens) = (offsets[sequence], offsets[sequence + 1] - offsets[sequence]);
        for (block, item) in (0..tokens.div_ceil(TILE as u32)).zip(&mut classes[class(tokens as usize)]) {
            item.copy_from_slice(&[first, tokens, numbers[sequence], block]);
        }
    }
}

fn lengths(offsets: &[u32]) -> impl Iterator<Item = usize> {
    offsets.windows(2).map(|w| (w[1] - w[0]) as usize)
}

/// Sequences, the longest first; equal ones in their order.
fn by_length(offsets: &[u32]) -> Vec<usize> {
    assert!(offsets.first().is_none_or(|first| *first == 0), "attention: offsets begin with 0");
    assert!(offsets.windows(2).all(|w| w[0] < w[1]), "attention: every sequence has at least one token");
    let mut order: Vec<usize> = (0..offsets.len().saturating_sub(1)).collect();
    order.sort_by_key(|i| std::cmp::Reverse(offsets[i + 1] - offsets[*i]));
    order
}

/// The sizes of an attention over a flat batch.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// What [`write_table`] gives, on the GPU.
    pub table: View<'a>,
    /// The table's room.
    pub room: Room,
    /// T: where the last sequence of the table ends.
    pub tokens: usize,
    /// A.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// Whether a token sees only itself and what stands before it.
    pub causal: bool,
}

/// What kernels take; as `struct Arguments` of attention.cu.
#[repr(C)]
struct Arguments<'a> {
    qkv: u64,
    out: u64,
    dout: u64,
    result: u64,
    log_sums: u64,
    terms: u64,
    dqueries: u64,
    items: u64,
    tokens: u32,
    heads: u32,
    head_size: u32,
    causal: u32,
    keys: [u32; 14],
    dropout: Dropout<'a>,
}

// SAFETY: `struct Arguments` of both sources has the same fields.
unsafe impl Argument for Arguments<'_> {}

impl<'a> Attention<'a> {
    fn hidden(&self) -> usize {
        self.heads * self.head_size
    }

    /// The same for [`general`].
    fn description(&self) -> Description {
        let window = if self.causal { Window::CAUSAL } else { Window::FULL };
        Description { window, ..Description::new(self.heads, self.head_size) }
    }

    fn inputs(&self, qkv: View<'a>, room: Room) -> Inputs<'a> {
        let queries = Sequences { table: self.table.part(0, room.numbers()), room, tokens: self.tokens };
        let [query, key, value] = Columns::split(qkv, self.description().fused_widths());
        Inputs { query, key, value, queries, cross: None, bias: None }
    }

    #[track_caller]
    fn check(&self, qkv: View<'_>, out: View<'_>, log_sums: View<'_>) {
        let (t, h) = (self.tokens, self.hidden());
        assert!(matches!(qkv.dtype(), DType::F32 | DType::Bf16), "attention: qkv is {:?}", qkv.dtype());
        qkv.expect("attention", "qkv", t * 3 * h, qkv.dtype());
        out.expect("attention", "the output", t * h, qkv.dtype());
        log_sums.expect("attention", "the log-sums", self.heads * t, DType::F32);
        self.table.expect("attention", "the table", self.room.numbers(), DType::U32);
    }

    fn arguments(
        &self,
        qkv: View<'_>,
        log_sums: View<'_>,
        result: View<'_>,
        dropout: Option<Dropout<'a>>,
    ) -> Arguments<'a> {
        Arguments {
            qkv: qkv.address(),
            out: 0,
            dout: 0,
            result: result.address(),
            log_sums: log_sums.address(),
            terms: 0,
            dqueries: 0,
            items: 0,
            tokens: self.tokens as u32,
            heads: self.heads as u32,
            head_size: self.head_size as u32,
            causal: u32::from(self.causal),
            keys: dropout.map_or([0; 14], |dropout| dropout.keys()),
            dropout: Dropout::argument(dropout),
        }
    }

    /// The first sequences of the table, by [`general`].
    fn forward_generally(
        &self,
        gpu: &Gpu,
        qkv: View<'a>,
        room: Room,
        dropout: Option<Dropout<'a>>,
        out: View<'_>,
        log_sums: View<'_>,
    ) -> Result<()> {
        general::forward(gpu, &self.description(), &self.inputs(qkv, room), dropout, out, log_sums)
    }

    /// The backward of the first sequences of the table, by [`general`].
    fn backward_generally(
        &self,
        gpu: &Gpu,
        qkv: View<'a>,
        room: Room,
        dropout: Option<Dropout<'a>>,
        out: View<'_>,
        log_sums: View<'_>,
        dout: View<'_>,
        dqkv: View<'_>,
    ) -> Result<()> {
        let description = self.description();
        let [query, key, value] = Columns::split(dqkv, description.fused_widths());
        let gradients = Gradients { query, key, value, bias: None };
        general::backward(gpu, &description, &self.inputs(qkv, room), dropout, out, log_sums, dout, gradients)
    }

    /// Whether attention_hopper.cu applies, where attention.cu does.
    fn hopper(&self, gpu: &Gpu) -> bool {
        gpu.capability() == (9, 0) && self.head_size == 64
    }

    /// Sequences whose forward [`general`] has faster kernels for, where attention.cu or attention_hopper.cu apply, too: as measured on an
    /// H200 (docs/performance.md).
    fn better_generally(&self, gpu: &Gpu, drops: bool) -> Room {
        let Room { longest, long, middle, .. } = self.room;
        match (gpu.capability(), self.head_size) {
            ((9, 0), 128) => Room { longest, long, middle, ..Room::default() },
            ((9, 0), 64) if !drops => Room { longest, long: if self.causal { 0 } else { long }, ..Room::default() },
            _ => Room::default(),
        }
    }

    /// The same of the backward, where the longest never run as one block of threads for each head.
    fn backward_better_generally(&self, gpu: &Gpu) -> Room {
        let Room { longest, long, .. } = self.room;
        let long = if gpu.capability() == (9, 0) && self.head_size == 128 { long } else { 0 };
        Room { longest, long, ..Room::default() }
    }

    /// The variant of attention.cu for these sizes; none where it does not apply.
    fn fast(&self, gpu: &Gpu, views: &[View<'_>], shared: usize, dropout: bool) -> Option<[&'static str; 2]> {
        let size = match self.head_size {
            32 => 0,
            64 => 1,
            96 => 2,
            128 => 3,
            _ => return None,
        };
        let even = views.iter().all(|view| view.dtype() == DType::Bf16 && view.is_aligned());
        (even && shared <= largest_shared(gpu)).then_some([HEAD_SIZES[size], DROPOUTS[usize::from(dropout)]])
    }

    /// Launches a kernel for `count` items from `first` on.
    ///
    /// # Safety
    /// As [`Gpu::launch`].
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        (source, variant, kernel): (&'static Source, &[&str], &'static str),
        (first, count): (usize, usize),
        (threads, shared): (usize, usize),
        arguments: &mut Arguments<'_>,
    ) -> Result<()> {
        // A grid has at most 65,535 rows.
        for start in (0..count).step_by(65_535) {
            let rows = (count - start).min(65_535);
            arguments.items = self.table.part(ITEM * (first + start), ITEM * rows).address();
            let grid = (self.heads as u32, rows as u32);
            let launch = Launch { grid, threads: threads as u32, shared: shared as u32 };
            // SAFETY: the caller's promise.
            unsafe { gpu.launch(source, variant, kernel, launch, &[arguments])? };
        }
        Ok(())
    }

    /// Threads of a block of attention.cu: 32 rows a warp, or 16.
    fn threads(&self) -> usize {
        if self.head_size <= 64 { 128 } else { 256 }
    }

    /// Bytes of a tile of queries, keys, values or gradients.
    fn tile(&self) -> usize {
        TILE * self.head_size * 2
    }
}

/// Threads of a block of attention_hopper.cu.
const HOPPER_THREADS: usize = 256;

/// The shared memory that a block of threads can have, by the compute capability (CUDA C++ Programming Guide, table of
/// technical specifications).
pub(crate) fn largest_shared(gpu: &Gpu) -> usize {
    match gpu.capability() {
        (8, 0) | (8, 7) => 163 << 10,
        (9, 0) | (10, _) => 227 << 10,
        _ => 99 << 10,
    }
}

/// out (T×H) = attention of `qkv` (T×3H); `log_sums` (A×T) gets the logarithm of each softmax's denominator.
pub fn forward<'a>(
    gpu: &Gpu,
    qkv: View<'a>,
    shape: Attention<'a>,
    dropout: Option<Dropout<'a>>,
    out: View<'_>,
    log_sums: View<'_>,
) -> Result<()> {
    shape.check(qkv, out, log_sums);
    let mut arguments = shape.arguments(qkv, log_sums, out, dropout);
    let shared = 3 * shape.tile();
    let items = shape.room.items();
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the table.
    unsafe {
        let Some(variant) = shape.fast(gpu, &[qkv, out], shared, dropout.is_some()) else {
            return shape.forward_generally(gpu, qkv, shape.room, dropout, out, log_sums);
        };
        let kernel = (&SOURCE, &variant[..], "forward");
        let block = (shape.threads(), shared);
        let generally = shape.better_generally(gpu, dropout.is_some());
        let first = generally.items();
        if first > 0 {
            shape.forward_generally(gpu, qkv, generally, dropout, out, log_sums)?;
        }
        if !shape.hopper(gpu) {
            return shape.launch(gpu, kernel, (first, items - first), block, &mut arguments);
        }
        // For short sequences more and smaller blocks of threads are faster; where there are many of them, they take
        // the middle ones along, because two launches one after the other cost more than they gain.
        let Room { longest, long, middle, short } = shape.room;
        let others = longest + if short > middle / 4 { long } else { long + middle };
        let hopper = (&HOPPER, &variant[1..], "forward");
        shape.launch(gpu, hopper, (first, others - first), (HOPPER_THREADS, shared), &mut arguments)?;
        shape.launch(gpu, kernel, (others, items - others), block, &mut arguments)
    }
}

/// Gradients of [`forward`]: `dqkv` (T×3H) is written. `out` and `log_sums` are what it gave.
pub fn backward<'a>(
    gpu: &Gpu,
    qkv: View<'a>,
    shape: Attention<'a>,
    dropout: Option<Dropout<'a>>,
    out: View<'_>,
    log_sums: View<'_>,
    dout: View<'_>,
    dqkv: View<'_>,
) -> Result<()> {
    shape.check(qkv, out, log_sums);
    dout.expect("attention", "the output's gradient", out.len(), qkv.dtype());
    dqkv.expect("attention", "the gradient", qkv.len(), qkv.dtype());
    let (t, longest, long) = (shape.tokens, shape.room.longest, shape.room.long);
    let mut arguments = shape.arguments(qkv, log_sums, dqkv, dropout);
    (arguments.out, arguments.dout) = (out.address(), dout.address());
    // Sums and queries of 128 rows, keys, values and gradients; then the scores' gradients, 128 × 128 or 128 × 64.
    let (shared, shared_long) = (1024 + 4 * shape.tile() + 2 * TILE * TILE, 1024 + 4 * shape.tile() + TILE * TILE);
    let (first, rest) = (longest + long, shape.room.items() - longest - long);
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the table, and the work space has a
    // pair of numbers for every token and head, and a number for every number of the queries.
    unsafe {
        let Some(variant) = shape.fast(gpu, &[qkv, out, dout, dqkv], shared, dropout.is_some()) else {
            return shape.backward_generally(gpu, qkv, shape.room, dropout, out, log_sums, dout, dqkv);
        };
        let (source, variant, threads) = match shape.hopper(gpu) {
            true => (&HOPPER, &variant[1..], HOPPER_THREADS),
            false => (&SOURCE, &variant[..], shape.threads()),
        };
        let generally = shape.backward_better_generally(gpu);
        if generally.items() > 0 {
            shape.backward_generally(gpu, qkv, generally, dropout, out, log_sums, dout, dqkv)?;
        }
        if long > generally.long {
            let terms = (8 * shape.heads * t).next_multiple_of(16);
            arguments.terms = gpu.scratch(Purpose::Attention, terms + 4 * t * shape.hidden())?;
            arguments.dqueries = arguments.terms + terms as u64;
            let kernel = (source, variant, "backward_long");
            shape.launch(gpu, kernel, (longest, long), (threads, shared_long), &mut arguments)?;
        }
        shape.launch(gpu, (source, variant, "backward"), (first, rest), (threads, shared), &mut arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_every_row_once_and_the_longest_first() {
        let offsets = [0, 5, 305, 433, 434, 563, 1263, 3400];
        let numbers = [10, 11, 12, 13, 14, 15, 16];
        assert_eq!(Room::of(&offsets), Room { longest: 17, long: 3 + 2 + 6, middle: 1, short: 2 });
        let room = Room { longest: 17, long: 12, middle: 1, short: 4 };
        let mut table = vec![7; room.numbers()];
        write_table(&offsets, &numbers, room, &mut table);
        let items: Vec<&[u32]> = table.chunks(ITEM).collect();
        assert_eq!((items[0], items[16]), (&[1263, 2137, 16, 0][..], &[1263, 2137, 16, 16][..]));
        let items = &items[17..];
        assert_eq!(items[0], [563, 700, 15, 0]);
        assert_eq!(items[5], [563, 700, 15, 5]);
        assert_eq!(items[6], [5, 300, 11, 0]);
        assert_eq!(items[10], [434, 129, 14, 1]);
        assert_eq!(items[11], [0; 4]);
        assert_eq!(items[12..15], [[305, 128, 12, 0], [0, 5, 10, 0], [433, 1, 13, 0]]);
        assert_eq!(items[15..], [[0; 4]; 2]);
    }

    #[test]
    fn the_arguments_are_as_long_as_the_kernels_take_them() {
        assert_eq!(size_of::<Arguments<'_>>(), 8 * 8 + 4 * 4 + 14 * 4 + 32);
    }
}
