//! Attention with a cache, for decoding. The definition is [`crate::cpu::attention::cache`]. Forward only.

use super::ITEM;
use super::general::{self, Arguments, Columns, Inputs, Sequences};
use crate::cpu::attention::Attention;
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{Argument, DType, EVENS, Gpu, Launch, Purpose, STORES, View, store};

/// Appending, and few queries to many keys.
pub static SOURCE: Source = Source {
    name: "attention_cache.cu",
    text: concat!(
        "#include \"common.cuh\"\n",
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_cache.cu")
    ),
    variants: &[&[STORES, EVENS]],
};

/// Sequences with more queries than this go through tiles of queries.
const FEW_QUERIES: u32 = 16;

/// Where the tokens of some sequences lie in a cache, on the GPU; all u32. The caller has checked that pages lie within the cache and
/// that there are enough of them.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// Tokens of a page.
    pub page_size: usize,
    /// The pages of every sequence in the order of its tokens, one sequence after the other.
    pub pages: View<'a>,
    /// Where each sequence's pages begin, and the end of the last.
    pub page_offsets: View<'a>,
    /// Tokens of each sequence, the new ones included; none of one that only fills a step up, which gets zeros.
    pub lengths: View<'a>,
}

impl Pages<'_> {
    #[track_caller]
    fn check(&self, offsets: View<'_>) {
        let sequences = self.lengths.len();
        self.pages.expect("cache", "the pages", self.pages.len(), DType::U32);
        self.page_offsets.expect("cache", "the pages' offsets", sequences + 1, DType::U32);
        self.lengths.expect("cache", "the lengths", sequences, DType::U32);
        offsets.expect("cache", "the offsets", sequences + 1, DType::U32);
    }
}

/// Copies new tokens' keys and values, side by side from `column` on in the rows of `from`, to the last places of their sequences.
/// `offsets` tells which rows are whose.
pub fn append(
    gpu: &Gpu,
    pages: Pages<'_>,
    from: View<'_>,
    column: usize,
    offsets: View<'_>,
    [keys, values]: [View<'_>; 2],
    width: usize,
) -> Result<()> {
    pages.check(offsets);
    let stride = column + 2 * width;
    let tokens = from.rows("cache", stride);
    keys.expect("cache", "the keys", values.len(), from.dtype());
    values.expect("cache", "the values", keys.len(), from.dtype());
    let aligned =
        [from, keys, values].iter().all(View::is_aligned) && [column, width].iter().all(|n| n.is_multiple_of(8));
    let variant = [store(from.dtype()), EVENS[usize::from(!aligned)]];
    let first = from.address() + (column * from.dtype().size()) as u64;
    let sizes = (stride as u64, width as u32, pages.lengths.len() as u32, pages.page_size as u32);
    let arguments: [&dyn Argument; 11] = [
        &first,
        &sizes.0,
        &sizes.1,
        &offsets.address(),
        &sizes.2,
        &pages.pages.address(),
        &pages.page_offsets.address(),
        &pages.lengths.address(),
        &sizes.3,
        &keys.address(),
        &values.address(),
    ];
    let launch = Launch { grid: (tokens as u32, 2), threads: 128, shared: 0 };
    // SAFETY: the kernel leaves rows beyond the last offset and of sequences without tokens alone; pages lie within the cache, as the
    // caller has checked.
    unsafe { gpu.launch(&SOURCE, &variant, "append", launch, &arguments) }
}

/// out (queries × A·D) = the attention of new tokens to all of their sequences' tokens in the cache, which hold the new ones at their
/// end. `offsets` tells which rows of the queries are whose, on the GPU, and `most` how many a sequence has at most. What a token gets
/// depends on its own sequence alone.
pub fn attend(
    gpu: &Gpu,
    attention: &Attention,
    query: Columns<'_>,
    queries: Sequences<'_>,
    (offsets, most): (View<'_>, usize),
    bias: Option<View<'_>>,
    [keys, values]: [View<'_>; 2],
    pages: Pages<'_>,
    out: View<'_>,
) -> Result<()> {
    pages.check(offsets);
    let (width, dtype) = (attention.key_width(), query.dtype());
    let rows = keys.rows("cache", width);
    assert!(general::unsupported(attention).is_none(), "attention: {:?}", general::unsupported(attention));
    general::check_bias(attention, bias);
    query.expect("the query", queries.tokens, attention.query_width(), dtype);
    queries.table.expect("attention", "the table", queries.room.numbers(), DType::U32);
    out.expect("attention", "the output", queries.tokens * attention.query_width(), dtype);
    let [key, value] = [keys, values].map(|matrix| Columns::new(matrix, width));
    key.expect("the keys", rows, width, dtype);
    value.expect("the values", rows, width, dtype);
    let inputs = Inputs { query, key, value, queries, cross: None, bias };
    let paged = |arguments: &mut Arguments<'_>| {
        arguments.own_offsets = offsets.address();
        arguments.sequences = pages.lengths.len() as u32;
        arguments.pages = pages.pages.address();
        arguments.page_offsets = pages.page_offsets.address();
        arguments.lengths = pages.lengths.address();
        arguments.page_size = pages.page_size as u32;
        arguments.result = out.address();
    };
    let out = Columns::new(out, attention.query_width());
    if most > FEW_QUERIES as usize {
        let log_sums = gpu.scratch(Purpose::Attention, 4 * attention.heads * queries.tokens)?;
        // SAFETY: the output's length was checked; pages lie within the cache, as the caller has checked.
        unsafe {
            general::forward_paged(gpu, attention, &inputs, (rows, out), |arguments| {
                paged(arguments);
                arguments.log_sums = log_sums;
                arguments.least_queries = FEW_QUERIES + 1;
            })?;
        }
    }
    let mut arguments = general::arguments(attention, &inputs, None);
    paged(&mut arguments);
    arguments.most_queries = FEW_QUERIES;
    let even = [query, key, value, out].iter().all(Columns::is_even);
    let variant = [store(dtype), EVENS[usize::from(!(even && attention.head_size.is_multiple_of(8)))]];
    for start in (0..queries.room.items()).step_by(65_535) {
        let items = (queries.room.items() - start).min(65_535);
        arguments.items = queries.table.part(ITEM * start, ITEM * items).address();
        let grid = (attention.heads as u32, items as u32);
        let launch = Launch { grid, threads: 256, shared: arguments.bias_bytes() as u32 };
        // SAFETY: all lengths were checked; pages lie within the cache, as the caller has checked.
        unsafe { gpu.launch(&SOURCE, &variant, "decode", launch, &[&arguments])? };
    }
    Ok(())
}
