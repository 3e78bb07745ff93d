//! Embedding: each token's vector is the sum of one row of each of a few tables, alone or with LayerNorm and dropout behind
//! it. The definition is [`crate::cpu::embedding`].
//!
//! The gradient of a table is [`super::rows::scatter_add`] with its sorted ids.

use super::error::Result;
use super::gpu::{Argument, DType, Dropout, EVENS, Gpu, View, address, even, store};
use super::layer_norm::{self, Drops, Norm, REGISTERS, SOURCE, units};
use super::rows::warps;

/// Which row of a table each token takes.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// T row numbers.
    pub ids: View<'a>,
    /// Rows of H columns.
    pub table: View<'a>,
}

/// As kernels take it.
#[repr(C)]
#[derive(Default)]
struct Tables {
    table: [u64; 4],
    ids: [u64; 4],
    rows: [u32; 4],
    count: u32,
    pad: u32,
}

// SAFETY: `struct Tables` of layer_norm.cu has the same fields.
unsafe impl Argument for Tables {}

impl Tables {
    fn new(lookups: &[Lookup<'_>], tokens: usize, h: usize) -> Self {
        assert!((1..=4).contains(&lookups.len()), "embedding: {} tables", lookups.len());
        let mut tables = Tables { count: lookups.len() as u32, ..Tables::default() };
        for (i, lookup) in lookups.iter().enumerate() {
            lookup.ids.expect("embedding", "the ids", tokens, DType::U32);
            assert!(lookup.table.dtype() == lookups[0].table.dtype(), "embedding: tables of different dtypes");
            tables.rows[i] = lookup.table.rows("embedding", h) as u32;
            tables.table[i] = lookup.table.address();
            tables.ids[i] = lookup.ids.address();
        }
        tables
    }
}

/// Kernels for even rows, where all of the matrices have them.
fn all_even(h: usize, lookups: &[Lookup<'_>], others: &[View<'_>]) -> &'static str {
    let tables = lookups.iter().all(|lookup| even(h, &[lookup.table]) == EVENS[0]);
    if tables { even(h, others) } else { EVENS[1] }
}

/// Row t of `out` (T×H) becomes the sum of row `ids[t]` of each of one to four tables; NaN and a fault where an id is
/// outside of its table.
pub fn forward(gpu: &Gpu, lookups: &[Lookup<'_>], h: usize, out: View<'_>) -> Result<()> {
    let tokens = out.rows("embedding", h);
    let tables = Tables::new(lookups, tokens, h);
    let table = if lookups[0].table.dtype() == DType::Bf16 { "TABLE=bf16" } else { "TABLE=float" };
    let variant = [store(out.dtype()), all_even(h, lookups, &[out]), table];
    // SAFETY: the kernel checks ids against the tables' rows.
    unsafe {
        let arguments: [&dyn Argument; 5] = [&tables, &out.address(), &(tokens as u32), &(h as u32), &gpu.fault()];
        gpu.launch(&SOURCE, &variant, "embed", warps(tokens), &arguments)
    }
}

/// `sum` (T×H) becomes the sum of the tables' rows, `y` = drop(norm(sum)): what BERT begins with, in one pass. Without statistics
/// there is no backward pass: what `sum` holds is undefined, and y may be it.
pub fn forward_layer_norm(
    gpu: &Gpu,
    lookups: &[Lookup<'_>],
    norm: Norm<'_>,
    dropout: Option<(Dropout<'_>, View<'_>)>,
    sum: View<'_>,
    y: View<'_>,
    statistics: Option<View<'_>>,
) -> Result<()> {
    let Norm { gamma, beta, epsilon, centred } = norm;
    let h = gamma.len();
    let tokens = sum.rows("embedding", h);
    let mixed = lookups.first().is_some_and(|lookup| lookup.table.dtype() != sum.dtype());
    let drops = Drops { before: None, after: dropout.map(|d| d.0), rows: dropout.map(|d| d.1) };
    if mixed || h > REGISTERS {
        forward(gpu, lookups, h, sum)?;
        return layer_norm::forward(gpu, sum, None, None, norm, drops, y, statistics);
    }
    let tables = Tables::new(lookups, tokens, h);
    norm.check();
    y.expect("embedding", "the output", sum.len(), sum.dtype());
    if let Some(statistics) = statistics {
        statistics.expect("embedding", "the statistics", 2 * tokens, DType::F32);
    }
    if let Some(rows) = drops.rows {
        rows.expect("embedding", "the rows' places", 2 * tokens, DType::U32);
    }
    let even = all_even(h, lookups, &[sum, y, gamma, beta.unwrap_or(gamma)]);
    let variant = [store(sum.dtype()), even, units(h, even)];
    let after = Dropout::argument(drops.after);
    // SAFETY: the kernel checks ids against the tables' rows; rows×h numbers otherwise.
    unsafe {
        let arguments: [&dyn Argument; 13] = [
            &tables,
            &sum.address(),
            &gamma.address(),
            &address(beta),
            &epsilon,
            &u32::from(centred),
            &after,
            &address(drops.rows),
            &y.address(),
            &address(statistics),
            &(tokens as u32),
            &(h as u32),
            &gpu.fault(),
        ];
        gpu.launch(&SOURCE, &variant, "embed_normalise", warps(tokens), &arguments)
    }
}
