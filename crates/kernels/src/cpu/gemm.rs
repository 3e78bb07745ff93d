//! Matrix products: out = finish(A·B), A m×k, B k×n, with bias, activation and accumulation done while a tile of the
//! result is still in the cache.
//!
//! The scheme is Goto's: operands are packed into panels that the inner loop reads in order, and a tile of
//! `TILE_ROWS × 2·LANES` results stays in registers while its sums grow. One operand is packed once for all tasks, the
//! other by the task that needs it. k is never divided among threads, and a result never depends on how tiles are
//! grouped, so the number of threads changes no bit. Where k is long, tiles take turns after a block of it: their sums are put
//! down and taken up again, which changes no bit either.
//!
//! A packed *unit* is 32 bits: one f32, or, with the bf16 dot product, two bf16 that are neighbours along k. Without
//! that instruction bf16 operands are widened to f32 while packing.
//!
//! With matrix tiles (`amx.rs`) a tile of results has 32×32, and panels of A are packed for them; all else is the same.

use std::ops::Range;

use super::activation::Activation;
use super::amx;
use super::scratch::{self, Purpose};
use super::simd::{Element, Simd};
use super::{Cpu, Isa, SharedMut};
use crate::memory::Numbers;

/// The definition, in f64.
pub mod reference {
    use crate::cpu::activation::{Activation, reference as activation};

    /// A gated layer's output (m×n) from its product (m×2n): the activation of column c times column n + c; and (m×2n) its
    /// derivatives with respect to each column of the product.
    pub fn gated(product: &[f64], n: usize, gate: Activation) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut slopes) = (vec![0.0; product.len() / 2], vec![0.0; product.len()]);
        for (r, row) in product.chunks(2 * n).enumerate() {
            for c in 0..n {
                out[r * n + c] = activation::forward(gate, row[c]) * row[n + c];
                slopes[r * 2 * n + c] = activation::derivative(gate, row[c]) * row[n + c];
                slopes[r * 2 * n + n + c] = activation::forward(gate, row[c]);
            }
        }
        (out, slopes)
    }

    /// A·B for row-major A (m×k) and B (k×n).
    pub fn product(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
        let mut c = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                c[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
            }
        }
        c
    }
}

/// A matrix to read: `data[r * row_stride + c * column_stride]`; one of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, E> {
    data: &'a [E],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, E> Matrix<'a, E> {
    /// A row-major matrix without gaps.
    pub fn new(data: &'a [E], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// A row-major matrix whose rows start `row_stride` elements apart.
    pub fn strided(data: &'a [E], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(row_stride >= columns, "rows of {columns} overlap with the stride {row_stride}");
        Self::overlapping(data, rows, columns, row_stride)
    }

    /// The same where rows may share elements, as windows along a sequence do.
    pub fn overlapping(data: &'a [E], rows: usize, columns: usize, row_stride: usize) -> Self {
        let needed = rows.checked_sub(1).map_or(Some(0), |r| r.checked_mul(row_stride)?.checked_add(columns));
        assert!(needed.is_some_and(|needed| data.len() >= needed), "matrix is shorter than {rows}×{columns}");
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The same elements with rows and columns exchanged; nothing is moved.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// A right operand: as it is, or packed before.
#[derive(Clone, Copy, Debug)]
pub enum Right<'a, E> {
    /// Packed by the product itself.
    Plain(Matrix<'a, E>),
    /// Packed once, for weights that do not change.
    Packed(&'a Packed),
    /// Packed into work space, for weights that several products in a row multiply with.
    Units(Units<'a>),
}

/// A right operand in the order in which the product reads it, in memory of somebody else.
#[derive(Clone, Copy, Debug)]
pub struct Units<'a> {
    units: &'a [u32],
    k: usize,
    columns: usize,
    gated: bool,
    isa: Isa,
    bf16: bool,
}

/// How many units a right operand (k×n) is.
pub(crate) fn packed_units<E: Element>(cpu: &Cpu, matrix: Matrix<'_, E>) -> usize {
    let sizes = Sizes::of::<E>(cpu.isa(), 0, matrix.columns, matrix.rows, false);
    sizes.n_panels() * sizes.right_panel()
}

/// Packs a right operand (k×n) into as many units as [`packed_units`] says.
pub(crate) fn pack_into<'a, E: Element>(cpu: &Cpu, matrix: Matrix<'_, E>, units: &'a mut [u32]) -> Units<'a> {
    let sizes = Sizes::of::<E>(cpu.isa(), 0, matrix.columns, matrix.rows, false);
    assert!(units.len() == packed_units(cpu, matrix), "pack_into: lengths differ");
    pack_all(cpu, &sizes, Side::right(matrix), units);
    Units { units, k: matrix.rows, columns: matrix.columns, gated: false, isa: cpu.isa(), bf16: E::IS_BF16 }
}

impl<'a, E> Right<'a, E> {
    /// (k, columns).
    fn sizes(&self) -> (usize, usize) {
        match *self {
            Self::Plain(Matrix { rows, columns, .. }) => (rows, columns),
            Self::Packed(packed) => (packed.k, packed.columns),
            Self::Units(units) => (units.k, units.columns),
        }
    }

    /// What was packed before.
    fn units(&self) -> Option<Units<'a>> {
        match *self {
            Self::Plain(_) => None,
            Self::Packed(packed) => Some(packed.as_units()),
            Self::Units(units) => Some(units),
        }
    }
}

/// A right operand in the order in which the product reads it.
#[derive(Debug)]
pub struct Packed {
    units: Numbers<u32>,
    k: usize,
    columns: usize,
    gated: bool,
    isa: Isa,
    bf16: bool,
}

impl Packed {
    /// Packs `matrix` (k×n) for products on `cpu`.
    pub fn new<E: Element>(cpu: &Cpu, matrix: Matrix<'_, E>) -> Self {
        Self::for_finish(cpu, matrix, false)
    }

    /// Packs `matrix` (k×2n) for products whose [`Finish`] is gated.
    pub fn gated<E: Element>(cpu: &Cpu, matrix: Matrix<'_, E>) -> Self {
        Self::for_finish(cpu, matrix, true)
    }

    fn for_finish<E: Element>(cpu: &Cpu, matrix: Matrix<'_, E>, gated: bool) -> Self {
        let sizes = Sizes::of::<E>(cpu.isa(), 0, matrix.columns, matrix.rows, gated);
        let mut units = Numbers::zeros(sizes.n_panels() * sizes.right_panel());
        pack_all(cpu, &sizes, Side::right(matrix), &mut units);
        Self { units, k: matrix.rows, columns: matrix.columns, gated, isa: cpu.isa(), bf16: E::IS_BF16 }
    }

    fn as_units(&self) -> Units<'_> {
        let Self { units, k, columns, gated, isa, bf16 } = self;
        Units { units, k: *k, columns: *columns, gated: *gated, isa: *isa, bf16: *bf16 }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.units.len() * 4
    }
}

/// What happens to a result on its way out, in this order.
#[derive(Debug)]
pub struct Finish<'a, O> {
    /// Multiplied with.
    pub scale: f32,
    /// Added to every row; length n.
    pub bias: Option<&'a [f32]>,
    /// Applied then.
    pub activation: Activation,
    /// Whether this is a gated layer: of the product's 2n columns (k×2n is B, 2n the bias), the activation of column c is
    /// multiplied with column n + c, and `out` is m×n.
    pub gated: bool,
    /// Gets the activation's derivative (m×n, without gaps), for the backward: it shares its costly part with the value. In a
    /// gated layer (m×2n) the derivatives with respect to column c, and then those with respect to column n + c.
    pub derivative: Option<&'a mut [O]>,
    /// Multiplied with then (m×n, without gaps): the backward through an activation whose derivative was kept.
    pub factor: Option<&'a [O]>,
    /// The backward through a gated layer: both halves of what was kept (m×2n, without gaps) are multiplied with the product,
    /// and `out` is m×2n.
    pub gate_factors: Option<&'a [O]>,
    /// Whether the result is added to what `out` holds.
    pub accumulate: bool,
}

impl<O> Default for Finish<'_, O> {
    fn default() -> Self {
        Self {
            scale: 1.0,
            bias: None,
            activation: Activation::None,
            gated: false,
            derivative: None,
            factor: None,
            gate_factors: None,
            accumulate: false,
        }
    }
}

/// out[r * out_stride + c] = finish(A·B)[r, c].
pub fn product<E: Element, O: Element>(
    cpu: &Cpu,
    a: Matrix<'_, E>,
    b: Right<'_, E>,
    out: &mut [O],
    out_stride: usize,
    finish: Finish<'_, O>,
) {
    // SAFETY: `out` is borrowed for the whole call.
    unsafe { product_into(cpu, a, b, SharedMut::new(out), out_stride, finish) }
}

/// [`product`] into an output whose gaps between rows belong to others.
///
/// # Safety
/// Nobody else may touch the m×n elements of `out` meanwhile.
pub(crate) unsafe fn product_into<E: Element, O: Element>(
    cpu: &Cpu,
    a: Matrix<'_, E>,
    b: Right<'_, E>,
    out: SharedMut<O>,
    out_stride: usize,
    finish: Finish<'_, O>,
) {
    let (k, columns) = b.sizes();
    if let Some(p) = b.units() {
        let fits = p.isa == cpu.isa() && p.bf16 == E::IS_BF16 && p.gated == finish.gated;
        assert!(fits, "operand was packed for other kernels");
    }
    let m = a.rows;
    let n = if finish.gated { columns / 2 } else { columns };
    let wide = if finish.gate_factors.is_some() { 2 * n } else { n };
    assert!(a.columns == k, "inner sizes differ: {}×{} times {k}×{columns}", a.rows, a.columns);
    assert!(!finish.gated || columns.is_multiple_of(2) && finish.factor.is_none(), "a gated product has two halves");
    assert!(
        out_stride >= wide && (m == 0 || out.len() >= (m - 1) * out_stride + wide),
        "out is shorter than {m}×{wide}"
    );
    assert!(finish.bias.is_none_or(|b| b.len() == columns), "bias has another length than {columns}");
    assert!(finish.derivative.as_ref().is_none_or(|d| d.len() == m * columns), "derivative is not {m}×{columns}");
    assert!(finish.factor.is_none_or(|f| f.len() == m * n), "factor is not {m}×{n}");
    assert!(
        finish.gate_factors.is_none_or(|f| f.len() == m * 2 * n && !finish.accumulate && !finish.gated),
        "the factors of a gate are not {m}×2·{n}"
    );
    if m == 0 || n == 0 {
        return;
    }
    let plain = finish.bias.is_none()
        && !finish.gated
        && finish.derivative.is_none()
        && finish.factor.is_none()
        && finish.gate_factors.is_none();
    match b {
        Right::Plain(b) if plain && finish.activation == Activation::None && !O::IS_BF16 && k > SPLIT => {
            // Parts of k add up in the output itself.
            for (i, (a, b)) in parts(a, b).enumerate() {
                let accumulate = finish.accumulate || i > 0;
                let finish = Finish { scale: finish.scale, accumulate, ..Finish::default() };
                // SAFETY: as for this function.
                unsafe { product_part(cpu, a, Right::Plain(b), out, out_stride, finish, None) };
            }
        }
        Right::Plain(b) if k > LONG => scratch::with(Purpose::Sums, m * columns, |sums: &mut [f32]| {
            // Parts of k add up in f32, and the last one takes the sums to the output.
            let count = parts(a, b).count();
            for (i, (a, b)) in parts(a, b).enumerate().take(count - 1) {
                let finish = Finish { accumulate: i > 0, ..Finish::default() };
                // SAFETY: the sums are ours alone.
                unsafe { product_part(cpu, a, Right::Plain(b), SharedMut::new(sums), columns, finish, None) };
            }
            if let Some((a, b)) = parts(a, b).last() {
                // SAFETY: as for this function.
                unsafe { product_part(cpu, a, Right::Plain(b), out, out_stride, finish, Some(sums)) };
            }
        }),
        // SAFETY: as for this function.
        b => unsafe { product_part(cpu, a, b, out, out_stride, finish, None) },
    }
}

/// Sums over more of k than this are divided, where they can add up in an f32 output: panels then stay in the caches.
const SPLIT: usize = 6144;

/// Sums over more of k than this are divided in any case, adding up in work space.
const LONG: usize = 8192;

/// What sums are divided into, nearly.
const PART: usize = 3072;

/// Units along k, about, that are multiplied before the next tile's turn comes. Of long panels too few would stay in the
/// second-level cache while the others stream by, from beyond it, again and again.
const BLOCK: usize = 768;

/// Most tiles whose sums wait for the next block: less than half a megabyte, which streams by as well.
const KEPT_TILES: usize = 256;

/// The operands of a product, divided along k.
fn parts<'a, E>(a: Matrix<'a, E>, b: Matrix<'a, E>) -> impl Iterator<Item = (Matrix<'a, E>, Matrix<'a, E>)> {
    let k = b.rows;
    let count = k.div_ceil(PART);
    // Even borders, so that pairs of bf16 stay together.
    let border = move |i: usize| if i == count { k } else { i * k / count / 2 * 2 };
    (0..count).map(move |i| {
        let (start, length) = (border(i), border(i + 1) - border(i));
        let a = Matrix { data: &a.data[start * a.column_stride..], columns: length, ..a };
        (a, Matrix { data: &b.data[start * b.row_stride..], rows: length, ..b })
    })
}

/// One product; `carry` (as large as the product, without gaps) is added to the sums before everything else.
///
/// # Safety
/// As for `product_into`, which checked the lengths.
unsafe fn product_part<E: Element, O: Element>(
    cpu: &Cpu,
    a: Matrix<'_, E>,
    b: Right<'_, E>,
    out: SharedMut<O>,
    out_stride: usize,
    finish: Finish<'_, O>,
    carry: Option<&[f32]>,
) {
    let (k, columns) = b.sizes();
    let m = a.rows;
    let sizes = Sizes::of::<E>(cpu.isa(), m, columns, k, finish.gated);
    let n = sizes.n;
    let plain = carry.is_none()
        && finish.activation == Activation::None
        && !finish.gated
        && finish.derivative.is_none()
        && finish.factor.is_none()
        && finish.gate_factors.is_none();
    let target = Target {
        plain,
        carry,
        out,
        out_stride,
        m,
        n,
        scale: finish.scale,
        bias: finish.bias,
        activation: finish.activation,
        gated: finish.gated,
        derivative: finish.derivative.map(SharedMut::new),
        factor: finish.factor,
        gate_factors: finish.gate_factors,
        accumulate: finish.accumulate,
    };
    let run = Run { cpu, sizes, target: &target };
    match (b.units(), b) {
        (Some(packed), _) => run.with_packed::<E>(Side::left(a), packed.units),
        (None, Right::Plain(b)) => run.with_plain::<E>(Side::left(a), Side::right(b)),
        (None, _) => unreachable!("an operand that is not plain is packed"),
    }
}

/// The sizes of a product in panels and units.
#[derive(Clone, Copy)]
struct Sizes {
    m: usize,
    n: usize,
    k: usize,
    /// Units that k fills.
    units: usize,
    /// Units along k: these, or with matrix tiles whole blocks, zeros at the end.
    depth: usize,
    /// Units along k that are multiplied at a time.
    block: usize,
    /// Most rows of a tile.
    tile_rows: usize,
    /// Rows of a panel; the first `longer_panels` have one more.
    panel_rows: usize,
    longer_panels: usize,
    /// Columns of a panel of B.
    panel_columns: usize,
    /// Columns of the output that belong to a panel of B: all of them, or half where a gate's columns stand beside the others.
    tile_columns: usize,
    /// The matrix tiles to multiply with, if any.
    tiles: Option<amx::Tiles>,
    isa: Isa,
}

impl Sizes {
    /// For a product of m×k and k×columns; where it is gated, n is half of the columns.
    fn of<E: Element>(isa: Isa, m: usize, columns: usize, k: usize, gated: bool) -> Self {
        let tiles = isa.tiles().filter(|_| E::IS_BF16);
        let (tile_rows, panel_columns, pairs) =
            if tiles.is_some() { (2 * amx::ROWS, amx::COLUMNS, true) } else { tile(isa) };
        let units = if pairs && E::IS_BF16 { k.div_ceil(2) } else { k };
        let depth = if tiles.is_some() { units.next_multiple_of(amx::UNITS) } else { units };
        let blocks = if tiles.is_some() || depth <= BLOCK / 2 * 3 { 1 } else { depth.div_ceil(BLOCK) };
        let panels = m.div_ceil(tile_rows).max(1);
        let (panel_rows, longer_panels) = (m / panels, m % panels);
        let (n, tile_columns) = if gated { (columns / 2, panel_columns / 2) } else { (columns, panel_columns) };
        Self {
            m,
            n,
            k,
            units,
            depth,
            block: depth.div_ceil(blocks),
            tile_rows,
            panel_rows,
            longer_panels,
            panel_columns,
            tile_columns,
            tiles,
            isa,
        }
    }

    fn m_panels(&self) -> usize {
        self.m.div_ceil(self.tile_rows)
    }

    fn n_panels(&self) -> usize {
        self.n.div_ceil(self.tile_columns)
    }

    /// First row of a panel: rows are spread evenly, so that 16 of them are 8 + 8 and not 14 + 2.
    fn row(&self, panel: usize) -> usize {
        panel * self.panel_rows + panel.min(self.longer_panels)
    }

    /// Where a packed panel of A begins, in units.
    fn left_at(&self, panel: usize) -> usize {
        let rows = if self.tiles.is_some() { panel * self.row_tiles() * amx::ROWS } else { self.row(panel) };
        rows * self.depth
    }

    /// Matrix tiles one above the other in a panel of A.
    fn row_tiles(&self) -> usize {
        (self.panel_rows + self.longer_panels.min(1)).div_ceil(amx::ROWS)
    }

    /// Units of a packed panel of B.
    fn right_panel(&self) -> usize {
        self.depth * self.panel_columns
    }

    /// Tiles whose sums are kept from block to block of k, of all that a task has or of a part of what streams by; one where there
    /// is a single block.
    fn kept_tiles(&self, staying: usize, streaming: usize) -> usize {
        if self.block < self.depth { staying * streaming.min((KEPT_TILES / staying.max(1)).max(1)) } else { 1 }
    }
}

/// (rows, columns, whether bf16 is multiplied in pairs) of the register tile.
fn tile(isa: Isa) -> (usize, usize, bool) {
    fn of<S: Simd>() -> (usize, usize, bool) {
        (S::TILE_ROWS, 2 * S::LANES, S::BF16_DOT)
    }
    use super::simd;
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::NeonBf16 => of::<simd::NeonBf16>(),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => of::<simd::Neon>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Amx => of::<simd::Avx512Bf16>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => of::<simd::Avx512>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => of::<simd::Avx2>(),
        _ => of::<simd::Portable>(),
    }
}

/// An operand seen from its panels: `lanes` along m or n, `k` along the sum.
#[derive(Clone, Copy)]
struct Side<'a, E> {
    data: &'a [E],
    lane_stride: usize,
    k_stride: usize,
}

impl<'a, E> Side<'a, E> {
    fn left(a: Matrix<'a, E>) -> Self {
        Self { data: a.data, lane_stride: a.row_stride, k_stride: a.column_stride }
    }

    fn right(b: Matrix<'a, E>) -> Self {
        Self { data: b.data, lane_stride: b.column_stride, k_stride: b.row_stride }
    }
}

impl<E: Element> Side<'_, E> {
    /// A pair of neighbours along k, zeros beyond it.
    fn pair(&self, lane: usize, unit: usize, k: usize) -> u32 {
        let half = |l: usize| if l < k { bits(self.data[lane * self.lane_stride + l * self.k_stride]) } else { 0 };
        half(unit * 2) | half(unit * 2 + 1) << 16
    }
}

/// Packs all panels of a right operand.
fn pack_all<E: Element>(cpu: &Cpu, sizes: &Sizes, b: Side<'_, E>, units: &mut [u32]) {
    let panel = sizes.right_panel();
    let shared = SharedMut::new(units);
    cpu.for_each(sizes.n_panels(), |j| {
        // SAFETY: each panel is written by its own task.
        let out = unsafe { shared.slice(j * panel, panel) };
        pack_right(sizes, b, j, out);
    });
}

/// Packs one panel of a right operand; a gated one has a gate's columns in its first half and those of its other factor in the
/// second.
fn pack_right<E: Element>(s: &Sizes, b: Side<'_, E>, panel: usize, out: &mut [u32]) {
    let first = panel * s.tile_columns;
    let lanes = s.tile_columns.min(s.n - first);
    let (out, rest) = out.split_at_mut(s.units * s.panel_columns);
    rest.fill(0);
    let pack = if s.tiles == Some(amx::Tiles::Model) { pack_plainly } else { pack };
    pack(s.isa, b, first, lanes, s.panel_columns, 0, s.k, out);
    if s.tile_columns < s.panel_columns {
        pack(s.isa, b, s.n + first, lanes, s.panel_columns, s.tile_columns, s.k, out);
    }
}

/// [`pack`] for the model of matrix tiles, whose instruction set knows no pairs.
fn pack_plainly<E: Element>(
    _: Isa,
    side: Side<'_, E>,
    first: usize,
    lanes: usize,
    width: usize,
    at: usize,
    k: usize,
    out: &mut [u32],
) {
    for (u, row) in out.chunks_exact_mut(width).enumerate() {
        for lane in 0..lanes {
            row[at + lane] = side.pair(first + lane, u, k);
        }
    }
}

dispatch! {
    /// Packs the rows `first..end` of A for matrix tiles: in blocks of units along k, in each block row by row, zeros beyond
    /// k. Rows beyond the last hold anything.
    fn pack_rows<E>(side: Side<'_, E>, first: usize, end: usize, k: usize, rows: usize, out: &mut [u32])
        = pack_rows_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn pack_rows_body<S: Simd, E: Element>(
    side: Side<'_, E>,
    first: usize,
    end: usize,
    k: usize,
    rows: usize,
    out: &mut [u32],
) {
    if k == 0 {
        return;
    }
    let last = (end - 1) * side.lane_stride + (k - 1) * side.k_stride;
    assert!(last < side.data.len() && end - first <= rows, "pack_rows: lengths differ");
    for (block, out) in out.chunks_exact_mut(rows * amx::UNITS).enumerate() {
        let unit = block * amx::UNITS;
        let whole = (unit + amx::UNITS) * 2 <= k;
        let mut row = first;
        while row < end {
            let to = &mut out[(row - first) * amx::UNITS..];
            if whole && side.k_stride == 1 {
                let from = &side.data[row * side.lane_stride + unit * 2..][..2 * amx::UNITS];
                bytemuck::cast_slice_mut(&mut to[..amx::UNITS]).copy_from_slice(from);
                row += 1;
            } else if whole && S::BF16_DOT && S::LANES == amx::UNITS && row + S::LANES <= end {
                assert!(to.len() >= S::LANES * amx::UNITS);
                // Rows lie along memory: pairs of neighbours along k are put together, then turned.
                // SAFETY: LANES elements from (row, 2·(unit + u)) and from the next along k on lie in the slice, since rows
                // below `end` do, for all of k; LANES rows of as many units are there to be written.
                unsafe {
                    let mut block = [S::splat(0.0); 16];
                    for (u, v) in block.iter_mut().enumerate() {
                        let low = side.data.as_ptr().add((unit + u) * 2 * side.k_stride + row);
                        *v = S::load_pairs(low.cast(), low.add(side.k_stride).cast(), S::LANES);
                    }
                    S::transpose(&mut block);
                    for (i, v) in block.iter().enumerate() {
                        S::store(to.as_mut_ptr().add(i * amx::UNITS).cast(), *v);
                    }
                }
                row += S::LANES;
            } else {
                for (u, to) in to[..amx::UNITS].iter_mut().enumerate() {
                    *to = side.pair(row, unit + u, k);
                }
                row += 1;
            }
        }
    }
}

dispatch! {
    /// Packs `lanes` lanes from `first` on into `out[unit * width + at + lane]`; lanes beyond them hold anything. `at` is 0, or
    /// a multiple of a vector's lanes that leaves room for one.
    fn pack<E>(side: Side<'_, E>, first: usize, lanes: usize, width: usize, at: usize, k: usize, out: &mut [u32])
        = pack_body
}

/// # Safety
/// The instruction set must be there; what is read is checked against the side's slice.
#[inline(always)]
unsafe fn pack_body<S: Simd, E: Element>(
    side: Side<'_, E>,
    first: usize,
    lanes: usize,
    width: usize,
    at: usize,
    k: usize,
    out: &mut [u32],
) {
    let pairs = E::IS_BF16 && S::BF16_DOT;
    let step = if pairs { 2 } else { 1 };
    if lanes == 0 || k == 0 {
        return;
    }
    let last = (first + lanes - 1) * side.lane_stride + (k - 1) * side.k_stride;
    let fits = out.len() == k.div_ceil(step) * width && at + lanes <= width;
    assert!(last < side.data.len() && fits, "pack: lengths differ");
    let data = side.data.as_ptr();
    if side.lane_stride == 1 {
        // Rows that a whole vector can be read from and written to without a look at the ends.
        let spare = if lanes.is_multiple_of(S::LANES) { 0 } else { S::LANES };
        let inside = side.data.len().saturating_sub(first + lanes + spare) / side.k_stride.max(1);
        let free = (inside / step).min(out.len().saturating_sub(spare) / width).min(k / step);
        for u in 0..free {
            for lane in (0..lanes).step_by(S::LANES) {
                // SAFETY: as below, and `spare` more elements are there on both sides.
                unsafe {
                    let low = data.add(u * step * side.k_stride + first + lane);
                    let v = if pairs {
                        S::load_pairs(low.cast(), low.add(side.k_stride).cast(), S::LANES)
                    } else {
                        E::load::<S>(low)
                    };
                    S::store(out.as_mut_ptr().add(u * width + at + lane).cast(), v);
                }
            }
        }
        for u in free..out.len() / width {
            for lane in (0..lanes).step_by(S::LANES) {
                let n = S::LANES.min(lanes - lane);
                // SAFETY: rows u·step and, for pairs, u·step + 1 < k have `lanes` elements from `first` on.
                unsafe {
                    let low = data.add(u * step * side.k_stride + first + lane);
                    let v = if pairs {
                        let inside = u * 2 + 1 < k;
                        let high = if inside { low.add(side.k_stride) } else { ZEROS.as_ptr().cast() };
                        S::load_pairs(low.cast(), high.cast(), n)
                    } else {
                        load::<S, E>(low, n)
                    };
                    put_unit::<S>(out, u * width + at + lane, S::LANES.min(width - at - lane), v);
                }
            }
        }
        return;
    }
    // Lanes are rows in memory: a transposition, block by block.
    debug_assert_eq!(side.k_stride, 1);
    let whole = k / step / S::LANES * S::LANES;
    for unit in (0..whole).step_by(S::LANES) {
        for lane in (0..lanes).step_by(S::LANES) {
            let most = lanes - lane - 1;
            let start = unit * width + at + lane;
            // SAFETY: rows below `lanes` have k elements, of which LANES·step from unit·step on are read. The block is
            // written to rows of `width` units, see `put_unit`; without its tests where all of it fits.
            unsafe {
                let corner = data.add((first + lane) * side.lane_stride + unit * step);
                let mut block = [S::splat(0.0); 16];
                // The number of rounds is a constant, so that the block stays in registers; missing lanes repeat the
                // last one, whose results nobody reads.
                for i in 0..S::LANES {
                    let row = corner.add(i.min(most) * side.lane_stride);
                    block[i] = if pairs { S::load(row.cast()) } else { E::load::<S>(row) };
                }
                S::transpose(&mut block);
                if start + (S::LANES - 1) * width + S::LANES <= out.len() {
                    let p = out.as_mut_ptr().add(start).cast::<f32>();
                    for j in 0..S::LANES {
                        S::store(p.add(j * width), block[j]);
                    }
                } else {
                    for j in 0..S::LANES {
                        put_unit::<S>(out, start + j * width, S::LANES.min(width - at - lane), block[j]);
                    }
                }
            }
        }
    }
    let zero = E::default();
    for u in whole..out.len() / width {
        for lane in 0..lanes {
            let row = &side.data[(first + lane) * side.lane_stride..];
            let low = row[u * step];
            let high = if pairs && u * 2 + 1 < k { row[u * 2 + 1] } else { zero };
            out[u * width + at + lane] = if pairs { bits(low) | bits(high) << 16 } else { low.to_f32().to_bits() };
        }
    }
}

/// What the missing row beside an odd last one is taken from.
static ZEROS: [u16; 16] = [0; 16];

/// `n` elements as f32, zeros after them.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(p: *const E, n: usize) -> S::V {
    // SAFETY: as for the caller.
    unsafe { if n == S::LANES { E::load::<S>(p) } else { E::load_part::<S>(p, n) } }
}

/// Writes `n` lanes of a row of units. Lanes beyond them may spill into what follows in `out`, since rows are written
/// in order and what follows is written later; at the end of `out` they are cut off.
#[inline(always)]
unsafe fn put_unit<S: Simd>(out: &mut [u32], at: usize, n: usize, v: S::V) {
    assert!(at + n <= out.len());
    let p = out[at..].as_mut_ptr().cast::<f32>();
    // SAFETY: inside of `out` by the tests.
    unsafe { if at + S::LANES <= out.len() { S::store(p, v) } else { S::store_part(p, n, v) } }
}

/// The 16 bits of a bf16 (for f32 never called with effect).
#[inline(always)]
fn bits<E: Element>(x: E) -> u32 {
    x.to_f32().to_bits() >> 16
}

/// How the tiles of a product are divided into tasks. No result depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Panels of A that a task has.
    rows: usize,
    /// Panels of B that it has.
    columns: usize,
    /// Panels of A that fit into the second-level cache while those of B stream by.
    fit_rows: usize,
    /// The same of B.
    fit_columns: usize,
}

impl Division {
    /// `packed`: whether B is packed already. `cache`: bytes of the second-level cache.
    fn new(s: &Sizes, packed: bool, threads: usize, cache: usize) -> Self {
        let (m, n) = (s.m_panels(), s.n_panels());
        let (a, b) = (s.depth * s.tile_rows * 4, s.right_panel() * 4);
        let stays = (cache / 8 * 3).max(128 << 10);
        // Of what stays, one block of k is read at a time.
        let at_a_time = |panel: usize| (panel / s.depth.max(1) * s.block).max(1);
        let (fit_rows, fit_columns) = ((stays / at_a_time(a)).max(1), (stays / at_a_time(b)).max(1));
        let by = |rows, columns| Self { rows, columns, fit_rows, fit_columns };
        if threads == 1 {
            // The operand with fewer panels is packed for all, the other by its tasks.
            let many_rows = m * s.tile_rows >= n * s.tile_columns;
            return if packed || many_rows { by(fit_rows.min(m), n) } else { by(m, fit_columns.min(n)) };
        }
        // Cycles that a tile takes, and that a byte takes from beyond the second-level cache; both roughly.
        let tile =
            if s.tiles.is_some() { s.depth as f64 * 4.0 + 200.0 } else { (s.depth * s.tile_rows) as f64 + 100.0 };
        const BYTE: f64 = 1.0 / 8.0;
        // Cycles until a task computes.
        const START: f64 = 1000.0;
        let mut best = (f64::INFINITY, by(1, n));
        for rounds in 1..=8 {
            let tasks = rounds * threads;
            let mut parts = 1;
            while parts <= m.min(tasks) {
                let rows = m.div_ceil(parts);
                let columns = n.div_ceil((tasks / parts).min(n));
                let count = m.div_ceil(rows) * n.div_ceil(columns);
                // What streams by is read again for each part of the other operand that stays in the cache.
                let again = rows.div_ceil(fit_rows).min(columns.div_ceil(fit_columns)) - 1;
                let bytes = (rows * a + columns * b + again * (rows * a).min(columns * b)) as f64;
                let task = (rows * columns) as f64 * tile + bytes * BYTE + START;
                // An operand that tasks share is written to memory first, and not by the task that reads it.
                let left = if columns < n { m * a } else { 0 };
                let right = if packed || rows >= m { 0 } else { n * b };
                let shared = (left + right) as f64 * 2.0 * BYTE / threads as f64;
                // Some thread is always late: many small tasks even that out.
                let time = (count.div_ceil(threads) as f64 + 0.15) * task + shared;
                if time < best.0 {
                    best = (time, by(rows, columns));
                }
                parts += 1 + parts / 4;
            }
        }
        best.1
    }
}

/// Whose panels a task reads again and again, from the second-level cache, while those of the other stream by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stays {
    Left,
    Right,
}

impl Stays {
    /// What stays and what streams by, of these rows and columns.
    fn of<'a>(self, rows: &'a Range<usize>, columns: &'a Range<usize>) -> (&'a Range<usize>, &'a Range<usize>) {
        match self {
            Self::Left => (rows, columns),
            Self::Right => (columns, rows),
        }
    }
}

/// All pairs of a row and a column, in the order for what stays.
#[inline(always)]
fn pairs(rows: Range<usize>, columns: Range<usize>, stays: Stays) -> impl Iterator<Item = (usize, usize)> {
    let left = stays == Stays::Left;
    let (outer, inner) = if left { (columns, rows) } else { (rows, columns) };
    outer.flat_map(move |x| inner.clone().map(move |y| if left { (y, x) } else { (x, y) }))
}

/// A product under way.
struct Run<'a, 'b, O> {
    cpu: &'a Cpu,
    sizes: Sizes,
    target: &'a Target<'b, O>,
}

impl<O: Element> Run<'_, '_, O> {
    fn division(&self, packed: bool) -> Division {
        Division::new(&self.sizes, packed, self.cpu.threads_of_a_loop(), self.cpu.second_level_cache())
    }

    /// All tiles, where B is packed.
    fn with_packed<E: Element>(&self, a: Side<'_, E>, right: &[u32]) {
        let (s, division) = (&self.sizes, self.division(true));
        if division.columns >= s.n_panels() {
            return self.tasks_by_rows(a, right, division);
        }
        self.with_left(Purpose::Shared, a, |left| self.tasks::<E>(left, right, division));
    }

    /// All tiles, where B is not packed.
    fn with_plain<E: Element>(&self, a: Side<'_, E>, b: Side<'_, E>) {
        let (s, division) = (&self.sizes, self.division(false));
        if division.rows >= s.m_panels() {
            return self.tasks_by_columns(a, b, division);
        }
        scratch::with(Purpose::Shared, s.n_panels() * s.right_panel(), |right: &mut [u32]| {
            pack_all(self.cpu, s, b, right);
            if division.columns >= s.n_panels() {
                return self.tasks_by_rows(a, right, division);
            }
            self.with_left(Purpose::Left, a, |left| self.tasks::<E>(left, right, division));
        });
    }

    /// Each task packs some rows of A and multiplies them with all of B.
    fn tasks_by_rows<E: Element>(&self, a: Side<'_, E>, right: &[u32], division: Division) {
        let s = &self.sizes;
        let group = division.rows.min(division.fit_rows);
        self.cpu.for_each(s.m_panels().div_ceil(group), |task| {
            let panels = task * group..((task + 1) * group).min(s.m_panels());
            let units = s.left_at(panels.end) - s.left_at(panels.start);
            scratch::with(Purpose::Local, units, |left: &mut [u32]| {
                self.pack_left(a, panels.clone(), left);
                self.tiles::<E>(panels, left, 0..s.n_panels(), right, Stays::Left);
            });
        });
    }

    /// All of A is packed first, then each task packs some columns of B and multiplies all of A with them.
    fn tasks_by_columns<E: Element>(&self, a: Side<'_, E>, b: Side<'_, E>, division: Division) {
        let s = &self.sizes;
        let panel = s.right_panel();
        let group = division.columns.min(division.fit_columns);
        self.with_left(Purpose::Shared, a, |left| {
            self.cpu.for_each(s.n_panels().div_ceil(group), |task| {
                let panels = task * group..((task + 1) * group).min(s.n_panels());
                scratch::with(Purpose::Local, panels.len() * panel, |right: &mut [u32]| {
                    for (j, out) in panels.clone().zip(right.chunks_exact_mut(panel.max(1))) {
                        pack_right(s, b, j, out);
                    }
                    self.tiles::<E>(0..s.m_panels(), left, panels, right, Stays::Right);
                });
            });
        });
    }

    /// Both operands are packed, and each task has some rows of the one and some columns of the other.
    fn tasks<E: Element>(&self, left: &[u32], right: &[u32], division: Division) {
        let s = &self.sizes;
        let Division { rows, columns, fit_rows, fit_columns } = division;
        let (down, across) = (s.m_panels().div_ceil(rows), s.n_panels().div_ceil(columns));
        // Those parts stay in the cache of which there are fewer.
        let left_stays = rows.div_ceil(fit_rows) <= columns.div_ceil(fit_columns);
        self.cpu.for_each(down * across, |task| {
            let (row, column) = (task % down * rows, task / down * columns);
            let rows = row..(row + rows).min(s.m_panels());
            let columns = column..(column + columns).min(s.n_panels());
            let part = |rows: Range<usize>, columns: Range<usize>, stays| {
                let left = &left[s.left_at(rows.start)..s.left_at(rows.end)];
                let right = &right[columns.start * s.right_panel()..columns.end * s.right_panel()];
                self.tiles::<E>(rows, left, columns, right, stays);
            };
            if left_stays {
                for start in rows.clone().step_by(fit_rows) {
                    part(start..(start + fit_rows).min(rows.end), columns.clone(), Stays::Left);
                }
            } else {
                for start in columns.clone().step_by(fit_columns) {
                    part(rows.clone(), start..(start + fit_columns).min(columns.end), Stays::Right);
                }
            }
        });
    }

    /// The tiles of some panels of A and some of B.
    fn tiles<E: Element>(&self, rows: Range<usize>, left: &[u32], columns: Range<usize>, right: &[u32], stays: Stays) {
        match self.sizes.tiles {
            Some(by) => {
                matrix_tiles::<O>(self.sizes.isa, by, &self.sizes, rows, left, columns, right, stays, self.target)
            }
            None => {
                let s = &self.sizes;
                let (staying, streaming) = stays.of(&rows, &columns);
                let kept = s.kept_tiles(staying.len(), streaming.len());
                scratch::with(Purpose::Tiles, kept * TILE, |sums: &mut [f32]| {
                    tiles::<E, O>(s.isa, s, rows, left, columns, right, stays, self.target, sums);
                });
            }
        }
    }

    /// Packs all of A for `body`.
    fn with_left<E: Element>(&self, purpose: Purpose, a: Side<'_, E>, body: impl FnOnce(&[u32])) {
        let s = &self.sizes;
        scratch::with(purpose, s.left_at(s.m_panels()), |left: &mut [u32]| {
            let shared = SharedMut::new(left);
            self.cpu.for_each(s.m_panels(), |i| {
                // SAFETY: each panel is written by its own task.
                let out = unsafe { shared.slice(s.left_at(i), s.left_at(i + 1) - s.left_at(i)) };
                self.pack_panel(a, i, out);
            });
            body(left);
        });
    }

    fn pack_left<E: Element>(&self, a: Side<'_, E>, panels: Range<usize>, left: &mut [u32]) {
        let s = &self.sizes;
        let start = s.row(panels.start);
        if a.lane_stride == 1 && s.tiles.is_none() {
            // Rows of memory cross all panels: one walk over them, not one for each panel.
            const ROWS: usize = 32;
            let step = if s.depth < s.k { 2 } else { 1 };
            for unit in (0..s.depth).step_by(ROWS) {
                let units = ROWS.min(s.depth - unit);
                let side = Side { data: &a.data[unit * step * a.k_stride..], ..a };
                let k = (units * step).min(s.k - unit * step);
                for i in panels.clone() {
                    let (first, width) = (s.row(i), s.row(i + 1) - s.row(i));
                    let at = (first - start) * s.depth + unit * width;
                    pack(s.isa, side, first, width, width, 0, k, &mut left[at..at + units * width]);
                }
            }
            return;
        }
        let start = s.left_at(panels.start);
        for i in panels {
            self.pack_panel(a, i, &mut left[s.left_at(i) - start..s.left_at(i + 1) - start]);
        }
    }

    /// Packs one panel of A.
    fn pack_panel<E: Element>(&self, a: Side<'_, E>, panel: usize, out: &mut [u32]) {
        let s = &self.sizes;
        let (first, end) = (s.row(panel), s.row(panel + 1));
        if s.tiles.is_some() {
            pack_rows(s.isa, a, first, end, s.k, s.row_tiles() * amx::ROWS, out);
        } else {
            pack(s.isa, a, first, end - first, end - first, 0, s.k, out);
        }
    }
}

/// Where results go, and what is done to them first; see [`Finish`].
struct Target<'a, O> {
    /// Whether nothing but scale, bias and accumulation is asked for.
    plain: bool,
    carry: Option<&'a [f32]>,
    out: SharedMut<O>,
    out_stride: usize,
    m: usize,
    n: usize,
    scale: f32,
    bias: Option<&'a [f32]>,
    activation: Activation,
    gated: bool,
    derivative: Option<SharedMut<O>>,
    factor: Option<&'a [O]>,
    gate_factors: Option<&'a [O]>,
    accumulate: bool,
}

impl<O: Element> Target<'_, O> {
    /// Asks for the lines that a tile's write-back will touch, so that they arrive while it is computed.
    ///
    /// # Safety
    /// The instruction set must be there.
    #[inline(always)]
    unsafe fn expect<S: Simd>(&self, first: usize, end: usize, column: usize) {
        for row in first..end {
            // SAFETY: a prefetch of any address is allowed.
            unsafe {
                let out = self.out.0.wrapping_add(row * self.out_stride + column);
                S::prefetch_to_write(out.cast());
                S::prefetch_to_write(out.wrapping_add(2 * S::LANES - 1).cast());
                if let Some(derivative) = &self.derivative {
                    let (stride, last) = if self.gated { (2 * self.n, self.n) } else { (self.n, 2 * S::LANES - 1) };
                    let out = derivative.0.wrapping_add(row * stride + column);
                    S::prefetch_to_write(out.cast());
                    S::prefetch_to_write(out.wrapping_add(last).cast());
                }
                if let Some(factors) = self.gate_factors {
                    let factors = factors.as_ptr().wrapping_add(row * 2 * self.n + column);
                    let out = out.wrapping_add(self.n);
                    for last in [0, 2 * S::LANES - 1] {
                        S::prefetch_to_write(out.wrapping_add(last).cast());
                        S::prefetch(factors.wrapping_add(last).cast());
                        S::prefetch(factors.wrapping_add(self.n + last).cast());
                    }
                }
                if let Some(factor) = self.factor {
                    let factor = factor.as_ptr().wrapping_add(row * self.n + column);
                    S::prefetch(factor.cast());
                    S::prefetch(factor.wrapping_add(2 * S::LANES - 1).cast());
                }
            }
        }
    }
}

dispatch! {
    /// Computes the tiles of some panels of A (`left`) with some of B (`right`); both hold just those panels.
    fn tiles<E, O>(
        sizes: &Sizes, rows: Range<usize>, left: &[u32], columns: Range<usize>, right: &[u32], stays: Stays,
        target: &Target<'_, O>, sums: &mut [f32],
    ) = tiles_body
}

/// # Safety
/// `left` and `right` hold the panels that the ranges name, and no other task has the same tiles.
#[inline(always)]
unsafe fn tiles_body<S: Simd, E: Element, O: Element>(
    sizes: &Sizes,
    rows: Range<usize>,
    left: &[u32],
    columns: Range<usize>,
    right: &[u32],
    stays: Stays,
    target: &Target<'_, O>,
    sums: &mut [f32],
) {
    let (depth, block) = (sizes.depth, sizes.block.max(1));
    let start = sizes.row(rows.start);
    assert!(left.len() >= (sizes.row(rows.end) - start) * depth && right.len() >= columns.len() * depth * 2 * S::LANES);
    // A row that is packed narrower than a vector spills into the next one alone; see `put_unit`.
    const { assert!(S::TILE_ROWS <= S::LANES && S::TILE_ROWS * 2 * S::LANES <= TILE) };
    let (kept, first_column) = (sums.len() / TILE, columns.start);
    // What streams by comes in parts, of which all sums are kept.
    let (staying, streaming) = stays.of(&rows, &columns);
    let at_a_time = if block < depth { kept / staying.len().max(1) } else { streaming.len() };
    assert!(block >= depth || at_a_time > 0);
    for from in streaming.clone().step_by(at_a_time.max(1)) {
        let part = from..(from + at_a_time).min(streaming.end);
        let (rows, columns) = match stays {
            Stays::Left => (rows.clone(), part),
            Stays::Right => (part, columns.clone()),
        };
        let mut unit = 0;
        loop {
            let units = block.min(depth - unit);
            let is_last = unit + units == depth;
            for (i, (row, column)) in pairs(rows.clone(), columns.clone(), stays).enumerate() {
                let (first, end) = (sizes.row(row), sizes.row(row + 1));
                let a = left[(first - start) * depth + unit * (end - first)..].as_ptr().cast::<f32>();
                let b = right[((column - first_column) * depth + unit) * 2 * S::LANES..].as_ptr().cast::<f32>();
                let tile = &mut sums[i % kept * TILE..][..TILE];
                // The next panel of those that stream by, a part of it with each of those that stay. Where one alone stays, memory gives
                // all it has without being asked.
                let (next, numbers, nth) = match stays {
                    Stays::Left => (b.wrapping_add(depth * 2 * S::LANES), 2 * S::LANES, row - rows.start),
                    Stays::Right => (a.wrapping_add(depth * (end - first)), end - first, column - columns.start),
                };
                let at = nth * units / UNITS_A_LINE * LINE;
                let ahead = if staying.len() > 1 && at < units * numbers { next.wrapping_add(at) } else { a };
                // SAFETY: the panels have `depth` units of `end - first` and `2·LANES` lanes, by the assertions above.
                unsafe {
                    if is_last {
                        target.expect::<S>(first, end, column * sizes.tile_columns);
                    }
                    multiply::<S, E>(end - first, units, a, b, ahead, tile, unit > 0);
                    if is_last {
                        finish::<S, O>(tile, first, end, column * sizes.tile_columns, target);
                    }
                }
            }
            unit += units;
            if is_last {
                break;
            }
        }
    }
}

dispatch! {
    /// The same with matrix tiles.
    fn matrix_tiles<O>(
        by: amx::Tiles, sizes: &Sizes, rows: Range<usize>, left: &[u32], columns: Range<usize>, right: &[u32],
        stays: Stays, target: &Target<'_, O>,
    ) = matrix_tiles_body
}

/// # Safety
/// As for `tiles_body`.
#[inline(always)]
unsafe fn matrix_tiles_body<S: Simd, O: Element>(
    by: amx::Tiles,
    sizes: &Sizes,
    rows: Range<usize>,
    left: &[u32],
    columns: Range<usize>,
    right: &[u32],
    stays: Stays,
    target: &Target<'_, O>,
) {
    let start = sizes.left_at(rows.start);
    assert!(left.len() >= sizes.left_at(rows.end) - start && right.len() >= columns.len() * sizes.right_panel());
    let (blocks, row_tiles, first_column) = (sizes.depth / amx::UNITS, sizes.row_tiles(), columns.start);
    // While the tiles' unit multiplies, the vectors' finishes what was multiplied before: a few rows after each part of k.
    // Both have their instructions in flight at a time.
    let parts = blocks.div_ceil(BLOCKS_AT_A_TIME).max(1);
    let rows_at_a_time = (row_tiles * amx::ROWS).div_ceil(parts);
    let mut sums = [Sums([0.0; 2 * amx::ROWS * amx::COLUMNS]), Sums([0.0; 2 * amx::ROWS * amx::COLUMNS])];
    let mut tiles = by.set_up();
    let mut before: Option<(usize, usize, usize)> = None;
    for (turn, pair) in pairs(rows, columns, stays).map(Some).chain([None]).enumerate() {
        let [even, odd] = &mut sums;
        let (now, last) = if turn % 2 == 0 { (even, odd) } else { (odd, even) };
        let under_way = pair.map(|(i, column)| {
            let (first, end) = (sizes.row(i), sizes.row(i + 1));
            // Both panels are there in whole, by the assertion above.
            let a = left[sizes.left_at(i) - start..].as_ptr();
            let b = right[(column - first_column) * sizes.right_panel()..].as_ptr();
            // SAFETY: the instruction set is there.
            unsafe { target.expect::<S>(first, end, column * sizes.tile_columns) };
            tiles.begin();
            // The next panel of those that stream by, a part of it with each of those that stay.
            let ahead = match stays {
                Stays::Left => b.wrapping_add(sizes.right_panel() + (sizes.left_at(i) - start) / row_tiles / 4),
                Stays::Right => a
                    .wrapping_add(row_tiles * amx::ROWS * sizes.depth)
                    .wrapping_add((column - first_column) * sizes.depth * 4),
            };
            (first, end, column * sizes.tile_columns, a, b, ahead)
        });
        for part in 0..parts {
            if let Some((_, _, _, a, b, ahead)) = under_way {
                let at = part * BLOCKS_AT_A_TIME;
                let (a, b) = (
                    a.wrapping_add(at * row_tiles * amx::ROWS * amx::UNITS),
                    b.wrapping_add(at * amx::UNITS * amx::COLUMNS),
                );
                let ahead = ahead.wrapping_add(at * amx::AHEAD / 4);
                // SAFETY: the panels have so many blocks.
                unsafe { tiles.add(row_tiles, BLOCKS_AT_A_TIME.min(blocks - at), a, b, ahead) };
            }
            if let Some((first, end, column)) = before {
                let (from, to) = (first + part * rows_at_a_time, end.min(first + (part + 1) * rows_at_a_time));
                if from < to {
                    // SAFETY: the sums of these rows were stored, and no other task has the tile.
                    unsafe {
                        finish_matrix::<S, O>(&last.0[(from - first) * amx::COLUMNS..], from, to, column, target)
                    };
                }
            }
        }
        if under_way.is_some() {
            tiles.store(row_tiles, &mut now.0);
        }
        before = under_way.map(|(first, end, column, ..)| (first, end, column));
    }
}

/// Blocks along k that matrix tiles multiply before some rows are finished: some 250 cycles.
const BLOCKS_AT_A_TIME: usize = 4;

/// The sums of two by two tiles.
#[repr(align(64))]
struct Sums([f32; 2 * amx::ROWS * amx::COLUMNS]);

/// Takes rows of the sums of matrix tiles to the output.
#[inline(always)]
unsafe fn finish_matrix<S: Simd, O: Element>(sums: &[f32], first: usize, end: usize, column: usize, t: &Target<'_, O>) {
    if 2 * S::LANES == amx::COLUMNS {
        // SAFETY: as for the caller.
        unsafe { finish::<S, O>(sums, first, end, column, t) };
        return;
    }
    // Narrower vectors: columns in parts, and of a gated layer as many of both halves.
    let (step, second) = if t.gated { (S::LANES, amx::COLUMNS / 2) } else { (2 * S::LANES, S::LANES) };
    let columns = if t.gated { amx::COLUMNS / 2 } else { amx::COLUMNS };
    for c in (0..columns.min(t.n - column)).step_by(step) {
        let mut tile = [0.0; amx::COLUMNS];
        for (row, from) in (first..end).zip(sums.chunks_exact(amx::COLUMNS)) {
            tile[..S::LANES].copy_from_slice(&from[c..c + S::LANES]);
            tile[S::LANES..2 * S::LANES].copy_from_slice(&from[c + second..c + second + S::LANES]);
            // SAFETY: as for the caller.
            unsafe { finish::<S, O>(&tile, row, row + 1, column + c, t) };
        }
    }
}

/// Numbers that any instruction set's register tile has room in.
const TILE: usize = 14 * 32;

/// Units along k that are multiplied before a line is asked for that a later tile will read.
const UNITS_A_LINE: usize = 4;

/// Numbers in a cache line.
const LINE: usize = 16;

/// One register tile: `rows` × 2·LANES sums over `depth` units of k, added one by one to what `tile` holds where it goes on.
#[inline(always)]
unsafe fn multiply<S: Simd, E: Element>(
    rows: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    ahead: *const f32,
    tile: &mut [f32],
    goes_on: bool,
) {
    assert!(tile.len() == TILE);
    let tile = tile.as_mut_ptr();
    macro_rules! by_rows {
        ($($m:literal)*) => {
            match rows {
                // SAFETY: as for the caller.
                $($m if $m <= S::TILE_ROWS => unsafe { multiply_rows::<S, E, $m>(depth, a, b, ahead, tile, goes_on) },)*
                _ => unreachable!("a panel has at most TILE_ROWS rows"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

#[inline(always)]
unsafe fn multiply_rows<S: Simd, E: Element, const M: usize>(
    depth: usize,
    mut a: *const f32,
    mut b: *const f32,
    mut ahead: *const f32,
    tile: *mut f32,
    goes_on: bool,
) {
    // SAFETY: the pointers stay inside panels of `depth` units, see the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; M];
        if goes_on {
            for i in 0..M {
                sums[i] = [S::load(tile.add(i * 2 * S::LANES)), S::load(tile.add(i * 2 * S::LANES + S::LANES))];
            }
        }
        macro_rules! add_unit {
            () => {
                let (b0, b1) = (S::load(b), S::load(b.add(S::LANES)));
                for i in 0..M {
                    let x = S::splat(*a.add(i));
                    if E::IS_BF16 && S::BF16_DOT {
                        sums[i] = [S::dot_pairs(sums[i][0], x, b0), S::dot_pairs(sums[i][1], x, b1)];
                    } else {
                        sums[i] = [S::mul_add(x, b0, sums[i][0]), S::mul_add(x, b1, sums[i][1])];
                    }
                }
                a = a.add(M);
                b = b.add(2 * S::LANES);
            };
        }
        for _ in 0..depth / UNITS_A_LINE {
            S::prefetch(ahead.cast());
            ahead = ahead.wrapping_add(LINE);
            for _ in 0..UNITS_A_LINE {
                add_unit!();
            }
        }
        for _ in 0..depth % UNITS_A_LINE {
            add_unit!();
        }
        for i in 0..M {
            S::store(tile.add(i * 2 * S::LANES), sums[i][0]);
            S::store(tile.add(i * 2 * S::LANES + S::LANES), sums[i][1]);
        }
    }
}

/// Takes a tile of sums to the output.
#[inline(always)]
unsafe fn finish<S: Simd, O: Element>(tile: &[f32], first: usize, end: usize, column: usize, t: &Target<'_, O>) {
    assert!(end <= t.m && (end - 1) * t.out_stride + t.n <= t.out.len());
    assert!(tile.len() >= (end - first) * 2 * S::LANES);
    if t.plain && column + 2 * S::LANES <= t.n {
        // SAFETY: all of the tile lies inside of the output, and no other task has it.
        unsafe { finish_plain::<S, O>(tile, first, end, column, t) };
        return;
    }
    if t.gated {
        // SAFETY: as for the caller.
        unsafe { finish_gated::<S, O>(tile, first, end, column, t) };
        return;
    }
    for row in first..end {
        for half in 0..2 {
            let c = column + half * S::LANES;
            if c >= t.n {
                break;
            }
            let lanes = S::LANES.min(t.n - c);
            let sums = tile[(row - first) * 2 * S::LANES + half * S::LANES..][..S::LANES].as_ptr();
            // SAFETY: `lanes` elements from (row, c) on lie inside of every operand (checked in `product`), and no
            // other task has this tile.
            unsafe {
                let mut x = S::load(sums);
                if let Some(carry) = t.carry {
                    x = S::add(x, part::<S, f32>(&carry[row * t.n + c..], lanes));
                }
                x = S::mul(x, S::splat(t.scale));
                if let Some(bias) = t.bias {
                    x = S::add(x, part::<S, f32>(&bias[c..], lanes));
                }
                if let Some(derivative) = &t.derivative {
                    let (y, slope) = t.activation.apply_with_derivative::<S>(x);
                    put::<S, O>(derivative.slice(row * t.n + c, lanes), slope);
                    x = y;
                } else {
                    x = t.activation.apply::<S>(x);
                }
                if let Some(factor) = t.factor {
                    x = S::mul(x, part::<S, O>(&factor[row * t.n + c..], lanes));
                }
                if let Some(factors) = t.gate_factors {
                    for half in [0, t.n] {
                        let factor = part::<S, O>(&factors[row * 2 * t.n + half + c..], lanes);
                        put::<S, O>(t.out.slice(row * t.out_stride + half + c, lanes), S::mul(x, factor));
                    }
                    continue;
                }
                let out = t.out.slice(row * t.out_stride + c, lanes);
                if t.accumulate {
                    x = S::add(x, part::<S, O>(out, lanes));
                }
                put::<S, O>(out, x);
            }
        }
    }
}

/// The same where the tile's first half is the gate of the second.
#[inline(always)]
unsafe fn finish_gated<S: Simd, O: Element>(tile: &[f32], first: usize, end: usize, c: usize, t: &Target<'_, O>) {
    let lanes = S::LANES.min(t.n - c);
    for row in first..end {
        let sums = tile[(row - first) * 2 * S::LANES..][..2 * S::LANES].as_ptr();
        let (gate_at, other_at) = (row * 2 * t.n + c, row * 2 * t.n + t.n + c);
        // SAFETY: as for `finish`; both halves of what has 2n columns are there.
        unsafe {
            let (mut gate, mut other) = (S::load(sums), S::load(sums.add(S::LANES)));
            if let Some(carry) = t.carry {
                gate = S::add(gate, part::<S, f32>(&carry[gate_at..], lanes));
                other = S::add(other, part::<S, f32>(&carry[other_at..], lanes));
            }
            (gate, other) = (S::mul(gate, S::splat(t.scale)), S::mul(other, S::splat(t.scale)));
            if let Some(bias) = t.bias {
                gate = S::add(gate, part::<S, f32>(&bias[c..], lanes));
                other = S::add(other, part::<S, f32>(&bias[t.n + c..], lanes));
            }
            let mut x = if let Some(derivative) = &t.derivative {
                let (y, slope) = t.activation.apply_with_derivative::<S>(gate);
                put::<S, O>(derivative.slice(gate_at, lanes), S::mul(slope, other));
                put::<S, O>(derivative.slice(other_at, lanes), y);
                S::mul(y, other)
            } else {
                S::mul(t.activation.apply::<S>(gate), other)
            };
            let out = t.out.slice(row * t.out_stride + c, lanes);
            if t.accumulate {
                x = S::add(x, part::<S, O>(out, lanes));
            }
            put::<S, O>(out, x);
        }
    }
}

/// The same for a whole tile with nothing but scale, bias and accumulation.
///
/// # Safety
/// The tile lies inside of the output.
#[inline(always)]
unsafe fn finish_plain<S: Simd, O: Element>(tile: &[f32], first: usize, end: usize, column: usize, t: &Target<'_, O>) {
    // SAFETY: as for the caller; the bias has n elements.
    unsafe {
        let scale = S::splat(t.scale);
        let (b0, b1) = match t.bias {
            Some(bias) => (S::load(bias.as_ptr().add(column)), S::load(bias.as_ptr().add(column + S::LANES))),
            None => (S::splat(0.0), S::splat(0.0)),
        };
        let mut sums = tile.as_ptr();
        let mut out = t.out.0.add(first * t.out_stride + column);
        for _ in first..end {
            let mut x0 = S::mul_add(S::load(sums), scale, b0);
            let mut x1 = S::mul_add(S::load(sums.add(S::LANES)), scale, b1);
            if t.accumulate {
                x0 = S::add(x0, O::load::<S>(out));
                x1 = S::add(x1, O::load::<S>(out.add(S::LANES)));
            }
            O::store::<S>(out, x0);
            O::store::<S>(out.add(S::LANES), x1);
            sums = sums.add(2 * S::LANES);
            out = out.wrapping_add(t.out_stride);
        }
    }
}

/// The first `lanes` elements of a slice, zeros after them.
#[inline(always)]
unsafe fn part<S: Simd, E: Element>(x: &[E], lanes: usize) -> S::V {
    // SAFETY: callers give slices of at least `lanes` elements.
    unsafe { if lanes == S::LANES { E::load::<S>(x.as_ptr()) } else { E::load_part::<S>(x.as_ptr(), lanes) } }
}

/// Writes as many lanes as the slice has elements.
#[inline(always)]
unsafe fn put<S: Simd, E: Element>(out: &mut [E], v: S::V) {
    // SAFETY: just the slice's elements are written.
    unsafe {
        if out.len() == S::LANES {
            E::store::<S>(out.as_mut_ptr(), v);
        } else {
            E::store_part::<S>(out.as_mut_ptr(), out.len(), v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Stream;
    use half::bf16;

    /// Tasks of whatever rows and columns, with parts that stay and parts that do not, and blocks of k give the same bits.
    #[test]
    fn no_division_changes_a_bit() {
        let mut stream = Stream::new(3, 0, 0);
        let mut numbers = |n: usize| -> Vec<bf16> { (0..n).map(|_| bf16::from_f32(stream.normal())).collect() };
        let (m, n, k) = (200, 150, 40);
        let (a, b) = (numbers(m * k), numbers(k * n));
        for isa in Isa::available().into_iter().chain([Isa::AmxModel]) {
            let run = |threads, block, division: Option<[usize; 4]>| {
                let cpu = Cpu::new(isa, threads).unwrap();
                let mut out = vec![f32::NAN; m * n];
                let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
                let Some([rows, columns, fit_rows, fit_columns]) = division else {
                    product(&cpu, a, Right::Plain(b), &mut out, n, Finish::default());
                    return out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                };
                let target = Target {
                    plain: true,
                    carry: None,
                    out: SharedMut::new(&mut out),
                    out_stride: n,
                    m,
                    n,
                    scale: 1.0,
                    bias: None,
                    activation: Activation::None,
                    gated: false,
                    derivative: None,
                    factor: None,
                    gate_factors: None,
                    accumulate: false,
                };
                let mut sizes = Sizes::of::<bf16>(isa, m, n, k, false);
                if sizes.tiles.is_none() {
                    sizes.block = block;
                }
                let run = Run { cpu: &cpu, sizes, target: &target };
                let division = Division { rows, columns, fit_rows, fit_columns };
                let (a, b) = (Side::left(a), Side::right(b));
                let mut right = vec![0; sizes.n_panels() * sizes.right_panel()];
                pack_all(&cpu, &sizes, b, &mut right);
                if division.rows >= sizes.m_panels() {
                    run.tasks_by_columns(a, b, division);
                } else if division.columns >= sizes.n_panels() {
                    run.tasks_by_rows(a, &right, division);
                } else {
                    run.with_left(Purpose::Left, a, |left| run.tasks::<bf16>(left, &right, division));
                }
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let expected = run(1, 0, None);
            assert!(expected.iter().all(|bits| !f32::from_bits(*bits).is_nan()));
            assert!(run(3, 0, None) == expected, "{isa}: three threads");
            for division in
                [[2, 1, 1, 9], [2, 2, 9, 1], [1, 3, 1, 1], [3, 2, 2, 1], [1, 99, 9, 9], [99, 1, 9, 9], [5, 4, 2, 3]]
            {
                for (threads, block) in [(1, 40), (2, 40), (2, 20), (1, 7), (2, 1)] {
                    let what = format!("{isa}: {division:?}, {threads} threads, blocks of {block}");
                    assert!(run(threads, block, Some(division)) == expected, "{what}");
                }
            }
        }
    }

    /// With many threads every one has work, and no task streams many bytes for what it computes.
    #[test]
    fn divisions_suit_the_threads_and_the_cache() {
        let (small, large) = (1 << 20, 2 << 20);
        for isa in [Isa::Portable, Isa::AmxModel] {
            for (m, n, k) in [
                (2048, 2304, 768),
                (2048, 768, 3072),
                (128, 3072, 768),
                (8, 768, 768),
                (1, 30522, 768),
                (3072, 768, 2048),
            ] {
                let s = Sizes::of::<bf16>(isa, m, n, k, false);
                for (threads, cache, packed) in
                    [(1, small, false), (1, large, true), (4, large, false), (16, large, true), (16, large, false)]
                {
                    let d = Division::new(&s, packed, threads, cache);
                    let what = format!("{isa}, {m}×{n}×{k}, {threads} threads, packed {packed}: {d:?}");
                    assert!((1..=s.m_panels()).contains(&d.rows) && (1..=s.n_panels()).contains(&d.columns), "{what}");
                    let tasks = s.m_panels().div_ceil(d.rows) * s.n_panels().div_ceil(d.columns);
                    assert!(tasks >= threads.min(s.m_panels() * s.n_panels()) * 3 / 4, "{what}: {tasks} tasks");
                    assert!(d.fit_rows * s.block * s.tile_rows * 4 <= cache / 2 || d.fit_rows == 1, "{what}");
                    assert!(d.fit_columns * s.block * s.panel_columns * 4 <= cache / 2 || d.fit_columns == 1, "{what}");
                }
            }
        }
        // One of many tokens in base, as 16 threads have it: blocks of both operands.
        let s = Sizes::of::<bf16>(Isa::AmxModel, 2048, 2304, 768, false);
        let d = Division::new(&s, true, 16, large);
        assert!(d.rows >= 4 && d.columns >= 4, "{d:?}");
    }

    /// Rows for matrix tiles, packed by every set of instructions that this machine has, against their definition. The sets
    /// with tiles are few, but what packs for them is in others as well.
    #[test]
    fn rows_for_matrix_tiles_are_packed_alike_by_all_sets() {
        for (rows, k) in [(1_usize, 1_usize), (5, 31), (16, 32), (17, 33), (32, 96), (31, 130), (32, 64)] {
            let first = 2;
            let data: Vec<bf16> = (0..(first + rows) * (k + 3)).map(|i| bf16::from_f32(i as f32)).collect();
            let depth = k.div_ceil(2).next_multiple_of(amx::UNITS);
            let room = rows.next_multiple_of(amx::ROWS);
            let along_k = Side { data: &data, lane_stride: k + 3, k_stride: 1 };
            let along_rows = Side { data: &data, lane_stride: 1, k_stride: first + rows };
            for side in [along_k, along_rows] {
                for isa in Isa::available() {
                    let mut out = vec![u32::MAX; room * depth];
                    pack_rows(isa, side, first, first + rows, k, room, &mut out);
                    for (at, unit) in out.iter().enumerate() {
                        let (block, row, u) = (at / (room * 16), at / 16 % room, at % 16);
                        let expected = if row < rows { side.pair(first + row, block * 16 + u, k) } else { u32::MAX };
                        assert_eq!(*unit, expected, "{isa}: unit {u} of block {block}, row {row} of {rows}, k {k}");
                    }
                }
            }
        }
    }
}
