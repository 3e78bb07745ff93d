//! Attention by a description: separate queries and keys, fewer key heads, windows, bias, any head size up to 256.
//!
//! Legend: A heads, K key heads, D = head size; N queries and M keys of one sequence.
//!
//! bf16 with heads of a multiple of eight numbers runs on tensor cores (attention_general.cu; on Hopper by wgmma for heads of 40 to 64
//! and of 104 to 128 numbers). f32 with heads of up to 128 numbers, a multiple of four, runs in tiles of exact f32 (attention_tiled.cu).
//! Larger heads in f32, the gradient of a relative bias there, and what is not aligned run one warp a row (attention_plain.cu), which is
//! right but not fast.

use super::{ITEM, Room, TILE, backward_hopper, by_length, hopper, largest_shared};
use crate::cpu::attention::{Attention, Bias, Buckets};
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{Argument, DType, Dropout, Gpu, Launch, Purpose, STORES, View, address, store};
use crate::cuda::reduce::{self, Sum};

/// On tensor cores. Kernels without dropout or bias are parts of those with them, so only those with both are compiled ahead.
pub static SOURCE: Source = Source {
    name: "attention_general.cu",
    text: concat!(
        include_str!("../kernels/tiles.cuh"),
        include_str!("../kernels/wgmma.cuh"),
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_general.cu")
    ),
    variants: &[
        &[HEAD_SIZES, &[DROPOUTS[1]], &[BIASES[1]]],
        &[&[HOPPER_SIZES[0], HOPPER_SIZES[1]], &[DROPOUTS[1]], &[BIASES[1]]],
        &[HEAD_SIZES, &[DROPOUTS[1]], &[POSITIONS]],
        &[&[HOPPER_SIZES[0], HOPPER_SIZES[1]], &[DROPOUTS[1]], &[POSITIONS]],
        &[HEAD_SIZES, &[DROPOUTS[1]], &[MATRIX]],
        &[&[HOPPER_SIZES[0], HOPPER_SIZES[1]], &[DROPOUTS[1]], &[MATRIX]],
    ],
};

/// In f32, by tiles.
pub static TILED: Source = Source {
    name: "attention_tiled.cu",
    text: concat!(
        "#include \"common.cuh\"\n",
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_tiled.cu")
    ),
    variants: &[&[TILED_SIZES, BIASES]],
};

const TILED_SIZES: &[&str] = &["HEAD_SIZE=32", "HEAD_SIZE=64", "HEAD_SIZE=96", "HEAD_SIZE=128"];

/// For everything else.
pub static PLAIN: Source = Source {
    name: "attention_plain.cu",
    text: concat!(
        "#include \"common.cuh\"\n",
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_plain.cu")
    ),
    variants: &[&[STORES, BIASES], &[STORES, &[POSITIONS, MATRIX]]],
};

/// What heads are filled up to.
const HEAD_SIZES: &[&str] =
    &["HEAD_SIZE=32", "HEAD_SIZE=64", "HEAD_SIZE=96", "HEAD_SIZE=128", "HEAD_SIZE=192", "HEAD_SIZE=256"];
const PADDED: [usize; 6] = [32, 64, 96, 128, 192, 256];
pub(super) const HOPPER_SIZES: [&str; 2] = ["HEAD_SIZE=64 HOPPER", "HEAD_SIZE=128 HOPPER"];
pub(super) const DROPOUTS: &[&str] = &["DROPOUT=false", "DROPOUT=true"];
const BIASES: &[&str] = &["BIAS=false", "BIAS=true"];
/// Contents are scored against positions: see disentangled.rs.
pub(super) const POSITIONS: &str = "BIAS=true POSITIONS";
/// A matrix is added to scores: see xl.rs.
pub(super) const MATRIX: &str = "BIAS=true MATRIX";

/// Heads with more numbers do not fit the registers of a warp.
pub const LARGEST_HEAD: usize = 256;

/// Buckets of one side of a relative bias at most, but one: as in described.cuh.
const LEVELS: usize = 63;

/// Distances that have buckets of their own at most, on each side: what shared memory has room for.
const LARGEST_REACH: u32 = 1024;

/// Keys before or after a query at most; further ones are as good as all.
const LARGEST_WINDOW: u32 = 1 << 30;

/// Why an attention cannot be computed on a GPU, if it cannot.
pub fn unsupported(attention: &Attention) -> Option<&'static str> {
    if attention.head_size > LARGEST_HEAD {
        return Some("heads of more than 256 numbers are not supported on a GPU: use --device cpu");
    }
    match attention.bias {
        Bias::Relative(buckets) if side(&buckets) > LEVELS + 1 || buckets.max_distance > LARGEST_REACH => {
            Some("a relative bias of more than 64 buckets a side, or beyond 1024 tokens, is not supported on a GPU")
        }
        _ => None,
    }
}

/// Buckets of one side.
fn side(buckets: &Buckets) -> usize {
    (if buckets.bidirectional { buckets.count / 2 } else { buckets.count }) as usize
}

/// Columns of every row of a matrix: queries, keys or values, fused with others or not.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    pub(super) view: View<'a>,
    pub(super) stride: usize,
    pub(super) offset: usize,
    pub(super) width: usize,
}

impl<'a> Columns<'a> {
    /// All columns.
    pub fn new(view: View<'a>, columns: usize) -> Self {
        let [all] = Self::split(view, [columns]);
        all
    }

    /// Columns side by side, of these widths, that are all of them together.
    pub fn split<const N: usize>(view: View<'a>, widths: [usize; N]) -> [Self; N] {
        let stride = widths.iter().sum();
        std::array::from_fn(|i| Self { view, stride, offset: widths[..i].iter().sum(), width: widths[i] })
    }

    pub(super) fn rows(&self) -> usize {
        self.view.rows("attention", self.stride)
    }

    pub(super) fn address(&self) -> u64 {
        self.view.address() + (self.offset * self.view.dtype().size()) as u64
    }

    pub(super) fn dtype(&self) -> DType {
        self.view.dtype()
    }

    /// Whether heads begin at multiples of 16 bytes where those of `head_size` numbers do.
    pub(super) fn is_even(&self) -> bool {
        self.view.is_aligned() && self.stride.is_multiple_of(8) && self.offset.is_multiple_of(8)
    }

    #[track_caller]
    pub(super) fn expect(&self, what: &str, rows: usize, width: usize, dtype: DType) {
        self.view.expect("attention", what, rows * self.stride, dtype);
        assert!(self.width == width, "attention: {what} has {} columns, not {width}", self.width);
    }

    #[track_caller]
    pub(super) fn expect_gradient_of(&self, x: &Columns<'_>) {
        self.expect("a gradient", x.rows(), x.width, x.dtype());
        let same = (self.stride, self.offset) == (x.stride, x.offset);
        assert!(same, "attention: a gradient lies otherwise than its number");
    }
}

/// A layout of sequences as [`super::write_table`] wrote it.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// On the GPU.
    pub table: View<'a>,
    /// The table's room.
    pub room: Room,
    /// Rows in all.
    pub tokens: usize,
}

/// Keys of another layout than the queries'.
#[derive(Clone, Copy, Debug)]
pub struct Cross<'a> {
    /// The keys' layout.
    pub keys: Sequences<'a>,
    /// Where each sequence's queries begin, and the end of the last (B + 1, u32).
    pub query_offsets: View<'a>,
    /// The same for the keys.
    pub key_offsets: View<'a>,
    /// The sequences' numbers in the global batch (B, u32), which dropout counts by.
    pub numbers: View<'a>,
}

/// What an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// A·D columns.
    pub query: Columns<'a>,
    /// K·D columns.
    pub key: Columns<'a>,
    /// K·D columns.
    pub value: Columns<'a>,
    /// The queries' layout.
    pub queries: Sequences<'a>,
    /// Where the keys have another one.
    pub cross: Option<Cross<'a>>,
    /// What the bias needs: see [`Attention::bias_size`]; f32.
    pub bias: Option<View<'a>>,
}

/// Where the gradients of [`forward`] go; each lies as what it is the gradient of.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// Written.
    pub query: Columns<'a>,
    /// Written.
    pub key: Columns<'a>,
    /// Written.
    pub value: Columns<'a>,
    /// That of the table of [`Bias::Relative`], buckets × A; none where it is not wanted.
    pub bias: Option<Sum<'a>>,
}

/// What kernels take; as `struct Described` of described.cuh.
#[repr(C)]
pub(super) struct Arguments<'a> {
    pub(super) query: u64,
    pub(super) key: u64,
    pub(super) value: u64,
    pub(super) out: u64,
    pub(super) dout: u64,
    pub(super) result: u64,
    pub(super) dquery: u64,
    pub(super) dkey: u64,
    pub(super) dvalue: u64,
    pub(super) log_sums: u64,
    pub(super) terms: u64,
    dbias: u64,
    bias: u64,
    pub(super) items: u64,
    pub(super) own_offsets: u64,
    pub(super) other_offsets: u64,
    numbers: u64,
    pub(super) pages: u64,
    pub(super) page_offsets: u64,
    pub(super) lengths: u64,
    pub(super) by_query: u64,
    pub(super) by_key: u64,
    pub(super) dscores: u64,
    pub(super) distance_rows: u64,
    pub(super) page_size: u32,
    pub(super) sequences: u32,
    pub(super) query_stride: u32,
    pub(super) key_stride: u32,
    pub(super) value_stride: u32,
    pub(super) queries: u32,
    heads: u32,
    group: u32,
    head_size: u32,
    left: i32,
    right: i32,
    scale: f32,
    pub(super) bias_kind: u32,
    pub(super) reach: i32,
    side: u32,
    bidirectional: u32,
    pub(super) least_queries: u32,
    pub(super) most_queries: u32,
    thresholds: [u32; LEVELS],
    keys: [u32; 14],
    pub(super) positions: u32,
    pub(super) first_head: u32,
    pub(super) matrix_heads: u32,
    dropout: Dropout<'a>,
}

// SAFETY: `struct Described` has the same fields.
unsafe impl Argument for Arguments<'_> {}

impl<'a> Arguments<'a> {
    /// What follows from the description alone.
    pub(super) fn new(attention: &Attention, bias: Option<View<'_>>, dropout: Option<Dropout<'a>>) -> Self {
        let window = |keys: u32| keys.min(LARGEST_WINDOW) as i32;
        // SAFETY: numbers alone, and a marker without a size.
        let nothing: Arguments<'a> = unsafe { std::mem::zeroed() };
        let mut arguments = Arguments {
            bias: address(bias),
            heads: attention.heads as u32,
            group: (attention.heads / attention.key_heads) as u32,
            head_size: attention.head_size as u32,
            left: window(attention.window.left),
            right: window(attention.window.right),
            scale: attention.scale,
            side: 1,
            most_queries: u32::MAX,
            thresholds: [u32::MAX; LEVELS],
            keys: dropout.map_or([0; 14], |dropout| dropout.keys()),
            dropout: Dropout::argument(dropout),
            ..nothing
        };
        match attention.bias {
            Bias::None => {}
            Bias::Slopes => arguments.bias_kind = 2,
            Bias::Relative(buckets) => {
                arguments.bias_kind = 1;
                arguments.reach = buckets.max_distance.max(1) as i32;
                arguments.side = side(&buckets) as u32;
                arguments.bidirectional = u32::from(buckets.bidirectional);
                arguments.thresholds = thresholds(&buckets);
            }
        }
        arguments
    }

    /// What the backward reads and writes besides the inputs, and its room for a pair of numbers for every query and head.
    pub(super) fn set_backward(
        &mut self,
        gpu: &Gpu,
        inputs: &Inputs<'_>,
        out: View<'_>,
        log_sums: View<'_>,
        dout: View<'_>,
        [query, key, value]: [Columns<'_>; 3],
    ) -> Result<()> {
        (self.out, self.dout, self.log_sums) = (out.address(), dout.address(), log_sums.address());
        (self.dquery, self.dkey, self.dvalue) = (query.address(), key.address(), value.address());
        self.terms = gpu.scratch(Purpose::Attention, 8 * self.heads as usize * inputs.queries.tokens)?;
        Ok(())
    }

    /// Distances that the bias is kept for.
    fn distances(&self) -> usize {
        2 * self.reach as usize + 1
    }

    /// Bytes of shared memory that the bias takes.
    pub(super) fn bias_bytes(&self) -> usize {
        if self.bias_kind == 0 { 0 } else { 4 * self.distances() }
    }
}

/// The least distance of each bucket of a side but the first; the largest number where there is none.
fn thresholds(buckets: &Buckets) -> [u32; LEVELS] {
    let mut thresholds = [u32::MAX; LEVELS];
    let mut known = 0;
    for far in 1..=buckets.max_distance {
        let level = buckets.of(-i64::from(far)).min(LEVELS);
        while known < level {
            thresholds[known] = far;
            known += 1;
        }
    }
    thresholds
}

/// A kernel's shape on tensor cores, by what heads are filled up to: as in attention_general.cu.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) size: usize,
    pub(super) hopper: bool,
    definition: &'static str,
}

impl Tiles {
    fn new(gpu: &Gpu, head_size: usize) -> Option<Self> {
        let place = PADDED.iter().position(|size| head_size <= *size)?;
        let (size, hopper) = (PADDED[place], gpu.capability() == (9, 0));
        Some(match size {
            64 if hopper => Self { size, hopper, definition: HOPPER_SIZES[0] },
            128 if hopper => Self { size, hopper, definition: HOPPER_SIZES[1] },
            _ => Self { size, hopper: false, definition: HEAD_SIZES[place] },
        })
    }

    /// Rows of a block of threads.
    fn rows(self) -> usize {
        if self.size <= 128 { 128 } else { 64 }
    }

    /// Rows that it goes over at a time.
    fn block(self) -> usize {
        self.rows() / 2
    }

    /// Rows of a warp.
    fn warp_rows(self) -> usize {
        if self.size <= 64 && !self.hopper { 32 } else { 16 }
    }

    /// Keys that it works on at a time.
    fn step(self) -> usize {
        if self.hopper { 64 } else { 32 }
    }

    fn warps(self) -> usize {
        self.rows() / self.warp_rows()
    }

    /// Bytes of `tiles` tiles of rows and two blocks for each of two matrices.
    fn bytes(self, tiles: usize) -> usize {
        (tiles * self.rows() + 4 * self.block()) * 2 * self.size
    }

    /// Parts that a row of keys' gradients is computed in.
    fn parts(self) -> usize {
        if self.size <= 128 { 1 } else { 2 }
    }
}

/// A kernel's shape in f32: as in attention_tiled.cu.
#[derive(Clone, Copy)]
pub(super) struct TiledF32 {
    /// What heads are filled up to.
    size: usize,
    definition: &'static str,
}

impl TiledF32 {
    const COLUMNS: usize = 64;
    const THREADS: usize = 256;

    /// Rows of a block of threads.
    fn rows(self, kernel: &str) -> usize {
        if kernel == "forward" && self.size <= 64 { 128 } else { 64 }
    }

    /// Bytes of shared memory but for the bias: rows of one matrix or two, 64 of two others, weights, and a bit for each.
    fn bytes(self, kernel: &str) -> usize {
        let (rows, stride) = (self.rows(kernel), self.size + 4);
        let (own, terms) = if kernel == "forward" { (rows, 0) } else { (2 * rows, 2 * rows) };
        4 * ((own + 2 * Self::COLUMNS) * stride + rows * (Self::COLUMNS + 4) + terms) + 8 * rows
    }

    fn new(gpu: &Gpu, attention: &Attention, dtype: DType, even: bool) -> Option<Self> {
        let place = TILED_SIZES.len().min(PADDED.iter().position(|size| attention.head_size <= *size)?);
        let definition = TILED_SIZES.get(place).copied()?;
        let tiled = Self { size: PADDED[place], definition };
        let fits = dtype == DType::F32 && even && attention.head_size.is_multiple_of(4);
        let bias = Arguments::new(attention, None, None).bias_bytes();
        (fits && tiled.bytes("backward_keys") + bias <= largest_shared(gpu)).then_some(tiled)
    }
}

/// How an attention is computed.
pub(super) struct Plan<'a> {
    pub(super) attention: &'a Attention,
    pub(super) inputs: &'a Inputs<'a>,
    /// None where it runs without tensor cores.
    pub(super) tiles: Option<Tiles>,
    /// In f32; none where it runs one warp a row.
    pub(super) tiled: Option<TiledF32>,
    pub(super) variant: [&'static str; 3],
}

impl<'a> Plan<'a> {
    #[track_caller]
    pub(super) fn new(
        gpu: &Gpu,
        attention: &'a Attention,
        inputs: &'a Inputs<'a>,
        others: &[Columns<'_>],
        drops: bool,
    ) -> Self {
        let keys = inputs.cross.map_or(inputs.queries, |cross| cross.keys);
        keys.table.expect("attention", "the table", keys.room.numbers(), DType::U32);
        Self::with_keys(gpu, attention, inputs, keys.tokens, others, drops)
    }

    /// The same for keys that lie in this many rows.
    #[track_caller]
    fn with_keys(
        gpu: &Gpu,
        attention: &'a Attention,
        inputs: &'a Inputs<'a>,
        keys: usize,
        others: &[Columns<'_>],
        drops: bool,
    ) -> Self {
        let Inputs { query, key, value, queries, .. } = inputs;
        let dtype = query.dtype();
        assert!(unsupported(attention).is_none(), "attention: {:?}", unsupported(attention));
        assert!(attention.heads.is_multiple_of(attention.key_heads), "attention: heads cannot share key heads");
        query.expect("the query", queries.tokens, attention.query_width(), dtype);
        key.expect("the key", keys, attention.key_width(), dtype);
        value.expect("the value", keys, attention.key_width(), dtype);
        queries.table.expect("attention", "the table", queries.room.numbers(), DType::U32);
        if let Some(Cross { query_offsets, key_offsets, numbers, .. }) = inputs.cross {
            query_offsets.expect("attention", "the queries' offsets", numbers.len() + 1, DType::U32);
            key_offsets.expect("attention", "the keys' offsets", numbers.len() + 1, DType::U32);
            numbers.expect("attention", "the numbers", numbers.len(), DType::U32);
        }
        check_bias(attention, inputs.bias);
        let even = [*query, *key, *value].iter().chain(others).all(Columns::is_even);
        let bias = BIASES[usize::from(inputs.bias.is_some())];
        match tiles_for(gpu, attention, dtype, even) {
            Some(tiles) => {
                let variant = [tiles.definition, DROPOUTS[usize::from(drops)], bias];
                Self { attention, inputs, tiles: Some(tiles), tiled: None, variant }
            }
            None => {
                let tiled = TiledF32::new(gpu, attention, dtype, even);
                Self { attention, inputs, tiles: None, tiled, variant: [store(dtype), bias, ""] }
            }
        }
    }

    pub(super) fn arguments<'d>(&self, dropout: Option<Dropout<'d>>) -> Arguments<'d> {
        arguments(self.attention, self.inputs, dropout)
    }

    /// Shared memory of the forward.
    pub(super) fn forward_bytes(&self, arguments: &Arguments<'_>) -> usize {
        let tiled = self.tiled.map_or(0, |tiled| tiled.bytes("forward"));
        self.tiles.map_or(tiled, |tiles| tiles.bytes(1)) + arguments.bias_bytes()
    }

    /// Sets the items that a kernel goes over, whose rows are queries, or keys, and gives their number.
    pub(super) fn begin(&self, by_keys: bool, arguments: &mut Arguments<'_>) -> usize {
        let mut layout = self.inputs.queries;
        if let Some(Cross { keys, query_offsets, key_offsets, .. }) = self.inputs.cross {
            let (mut own, mut other) = (query_offsets, key_offsets);
            if by_keys {
                (own, other, layout) = (key_offsets, query_offsets, keys);
            }
            (arguments.own_offsets, arguments.other_offsets) = (own.address(), other.address());
        }
        arguments.items = layout.table.address();
        layout.room.items()
    }

    /// Launches a kernel whose blocks have rows of queries, or of keys, and as many in the other direction of the grid.
    ///
    /// # Safety
    /// As [`Gpu::launch`].
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        kernel: &'static str,
        by_keys: bool,
        shared: usize,
        arguments: &mut Arguments<'_>,
    ) -> Result<()> {
        let all = self.begin(by_keys, arguments);
        let layout = match self.inputs.cross {
            Some(cross) if by_keys => cross.keys,
            _ => self.inputs.queries,
        };
        let (source, threads, halves, parts) = match (self.tiles, self.tiled) {
            (Some(tiles), _) => (&SOURCE, 32 * tiles.warps(), TILE / tiles.rows(), tiles.parts()),
            (None, Some(tiled)) => (&TILED, TiledF32::THREADS, TILE / tiled.rows(kernel), 1),
            (None, None) => (&PLAIN, PLAIN_THREADS, 1, 1),
        };
        let tiled = self.tiled.map(|tiled| [tiled.definition, self.variant[1]]);
        let variant = match (&self.tiles, &tiled) {
            (Some(_), _) => &self.variant[..],
            (None, Some(tiled)) => &tiled[..],
            (None, None) => &self.variant[..2],
        };
        let columns = match arguments.matrix_heads as usize {
            0 if by_keys => self.attention.key_heads * parts,
            0 => self.attention.heads,
            some => some * if by_keys { parts } else { 1 },
        };
        let first_share = arguments.dbias;
        // A grid has at most 65,535 rows.
        let most = 65_535 / halves;
        for start in (0..all).step_by(most) {
            let items = (all - start).min(most);
            arguments.items = layout.table.part(ITEM * start, ITEM * items).address();
            if first_share != 0 {
                arguments.dbias = first_share + (start * halves * self.attention.bias_size() * 4) as u64;
            }
            let grid = (columns as u32, (items * halves) as u32);
            let launch = Launch { grid, threads: threads as u32, shared: shared as u32 };
            // SAFETY: the caller's promise.
            unsafe { gpu.launch(source, variant, kernel, launch, &[arguments])? };
        }
        Ok(())
    }

    /// Launches the kernel before the backward's two, where they need it.
    ///
    /// # Safety
    /// As [`Gpu::launch`].
    pub(super) unsafe fn launch_terms(&self, gpu: &Gpu, arguments: &Arguments<'_>) -> Result<()> {
        let Some(tiles) = self.tiles else { return Ok(()) };
        let threads = self.inputs.queries.tokens * self.attention.heads * (tiles.size / 8).next_power_of_two();
        // SAFETY: the caller's promise.
        unsafe {
            gpu.launch(&SOURCE, &self.variant, "backward_terms", Launch::new(threads.div_ceil(256), 256), &[arguments])
        }
    }

    /// Blocks of the queries' layout, each of which has a share of the bias' gradient.
    fn shares(&self) -> usize {
        self.inputs.queries.room.items() * self.tiles.map_or(1, |tiles| TILE / tiles.rows())
    }
}

/// What kernels are told of the description and the inputs.
pub(super) fn arguments<'d>(attention: &Attention, inputs: &Inputs<'_>, dropout: Option<Dropout<'d>>) -> Arguments<'d> {
    let Inputs { query, key, value, queries, cross, bias } = inputs;
    let mut arguments = Arguments::new(attention, *bias, dropout);
    (arguments.query, arguments.key, arguments.value) = (query.address(), key.address(), value.address());
    arguments.query_stride = query.stride as u32;
    arguments.key_stride = key.stride as u32;
    arguments.value_stride = value.stride as u32;
    arguments.queries = queries.tokens as u32;
    if let Some(cross) = cross {
        arguments.sequences = cross.numbers.len() as u32;
        arguments.numbers = cross.numbers.address();
    }
    arguments
}

#[track_caller]
pub(super) fn check_bias(attention: &Attention, bias: Option<View<'_>>) {
    assert!(bias.is_some() == (attention.bias != Bias::None), "attention: a bias without its numbers, or the reverse");
    if let Some(bias) = bias {
        bias.expect("attention", "the bias", attention.bias_size(), DType::F32);
    }
}

/// The tiles of an attention on tensor cores, where it can have some.
fn tiles_for(gpu: &Gpu, attention: &Attention, dtype: DType, even: bool) -> Option<Tiles> {
    let fits = dtype == DType::Bf16 && even && attention.head_size.is_multiple_of(8) && attention.scale > 0.0;
    let tiles = Tiles::new(gpu, attention.head_size).filter(|_| fits)?;
    let arguments = Arguments::new(attention, None, None);
    (backward_bytes(tiles, &arguments, true) <= largest_shared(gpu)).then_some(tiles)
}

/// Shared memory of the backward; that of the forward is less.
pub(super) fn backward_bytes(tiles: Tiles, arguments: &Arguments<'_>, with_dbias: bool) -> usize {
    let sums = match with_dbias && arguments.bias_kind == 1 {
        true => tiles.warps() * (arguments.distances() + tiles.warp_rows() * (tiles.step() + 1)) * 4,
        false => 16 * tiles.block(),
    };
    tiles.bytes(2) + arguments.bias_bytes() + sums
}

/// Threads of a block of attention_plain.cu.
const PLAIN_THREADS: usize = 256;

/// out (queries × A·D) = the attention; `log_sums` (A × queries, f32) gets the logarithm of each softmax's denominator.
pub fn forward(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
) -> Result<()> {
    let (rows, width) = (inputs.queries.tokens, attention.query_width());
    out.expect("attention", "the output", rows * width, inputs.query.dtype());
    log_sums.expect("attention", "the log-sums", attention.heads * rows, DType::F32);
    let plan = Plan::new(gpu, attention, inputs, &[Columns::new(out, width)], dropout.is_some());
    let mut arguments = plan.arguments(dropout);
    (arguments.result, arguments.log_sums) = (out.address(), log_sums.address());
    let shared = plan.forward_bytes(&arguments);
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the tables.
    unsafe {
        match hopper::size(&plan, dropout.is_some()) {
            Some(size) => hopper::forward(gpu, &plan, size, &mut arguments),
            None => plan.launch(gpu, "forward", false, shared, &mut arguments),
        }
    }
}

/// The forward of keys and values in `rows` rows of pages, which `set` names, along with the output.
///
/// # Safety
/// Pages lie within those rows, and the output has a row of A·D numbers for each query.
pub(super) unsafe fn forward_paged(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    (rows, out): (usize, Columns<'_>),
    set: impl FnOnce(&mut Arguments<'_>),
) -> Result<()> {
    let plan = Plan::with_keys(gpu, attention, inputs, rows, &[out], false);
    let mut arguments = plan.arguments(None);
    set(&mut arguments);
    let shared = plan.forward_bytes(&arguments);
    // SAFETY: the caller's promise.
    unsafe { plan.launch(gpu, "forward", false, shared, &mut arguments) }
}

/// Checks what [`backward`] gets, and gives the columns that kernels touch besides the inputs.
#[track_caller]
pub(super) fn check_backward<'a>(
    attention: &Attention,
    inputs: &Inputs<'_>,
    out: View<'a>,
    log_sums: View<'_>,
    dout: View<'a>,
    [query, key, value]: [Columns<'a>; 3],
) -> [Columns<'a>; 5] {
    let (rows, width, dtype) = (inputs.queries.tokens, attention.query_width(), inputs.query.dtype());
    for (view, what) in [(out, "the output"), (dout, "the output's gradient")] {
        view.expect("attention", what, rows * width, dtype);
    }
    log_sums.expect("attention", "the log-sums", attention.heads * rows, DType::F32);
    for (x, dx) in [(inputs.query, query), (inputs.key, key), (inputs.value, value)] {
        dx.expect_gradient_of(&x);
    }
    [query, key, value, Columns::new(out, width), Columns::new(dout, width)]
}

/// Gradients of [`forward`]. `out` and `log_sums` are what it gave.
pub fn backward(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
    dout: View<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let Gradients { query, key, value, bias } = gradients;
    if bias.is_none() {
        let others = check_backward(attention, inputs, out, log_sums, dout, [query, key, value]);
        let plan = Plan::new(gpu, attention, inputs, &others, dropout.is_some());
        if let Some(size) = backward_hopper::size(&plan) {
            let mut arguments = plan.arguments(dropout);
            (arguments.out, arguments.dout, arguments.log_sums) = (out.address(), dout.address(), log_sums.address());
            (arguments.dquery, arguments.dkey, arguments.dvalue) = (query.address(), key.address(), value.address());
            // SAFETY: all lengths were checked; the kernels stay within the sequences of the tables.
            return unsafe { backward_hopper::launch(gpu, &plan, size, &mut arguments) };
        }
    }
    backward_twice(gpu, attention, inputs, dropout, out, log_sums, dout, gradients)
}

/// The same by attention_general.cu or attention_plain.cu, which compute the scores twice: for what [`backward`] has no other kernel, and
/// to compare with.
#[doc(hidden)]
pub fn backward_twice(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
    dout: View<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let Gradients { query, key, value, bias } = gradients;
    let others = check_backward(attention, inputs, out, log_sums, dout, [query, key, value]);
    let mut plan = Plan::new(gpu, attention, inputs, &others, dropout.is_some());
    // Sums by distance are the others' alone.
    plan.tiled = plan.tiled.filter(|_| bias.is_none());
    let mut arguments = plan.arguments(dropout);
    arguments.set_backward(gpu, inputs, out, log_sums, dout, [query, key, value])?;
    if bias.is_some() {
        assert!(matches!(attention.bias, Bias::Relative(_)), "attention: only a table of buckets has a gradient");
        arguments.dbias = gpu.scratch(Purpose::Sums, 4 * plan.shares() * attention.bias_size())?;
    }
    let dbias = arguments.dbias;
    let with_dbias = bias.is_some();
    let [by_queries, by_keys] = match (plan.tiles, plan.tiled) {
        (None, Some(tiled)) => {
            ["backward_queries", "backward_keys"].map(|kernel| tiled.bytes(kernel) + arguments.bias_bytes())
        }
        (Some(tiles), _) => [true, false].map(|queries| backward_bytes(tiles, &arguments, queries && with_dbias)),
        (None, None) => {
            let sums = if with_dbias { PLAIN_THREADS / 32 * 4 * arguments.distances() } else { 0 };
            [arguments.bias_bytes() + sums, arguments.bias_bytes()]
        }
    };
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the tables, and the work space has a pair of numbers
    // for every query and head, and a table for every block.
    unsafe {
        plan.launch_terms(gpu, &arguments)?;
        plan.launch(gpu, "backward_queries", false, by_queries, &mut arguments)?;
        plan.launch(gpu, "backward_keys", true, by_keys, &mut arguments)?;
    }
    match bias {
        Some(sum) => reduce::finish(gpu, dbias, plan.shares(), attention.bias_size(), [Some(sum), None, None]),
        None => Ok(()),
    }
}

/// The probabilities of every sequence, one after the other: A×N×M each, before dropout. For people to look at.
///
/// `offsets` are those that the tables were written from, without room to spare.
pub fn probabilities(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    offsets: (&[u32], &[u32]),
    out: View<'_>,
) -> Result<()> {
    let variant = [store(inputs.query.dtype()), BIASES[usize::from(inputs.bias.is_some())], ""];
    probabilities_of(gpu, attention, inputs, offsets, variant, out, |plan| plan.arguments(None))
}

/// The same of a variant of the kernel, with what it takes for a plan.
pub(super) fn probabilities_of<'d>(
    gpu: &Gpu,
    attention: &Attention,
    inputs: &Inputs<'_>,
    (query_offsets, key_offsets): (&[u32], &[u32]),
    variant: [&'static str; 3],
    out: View<'_>,
    arguments_of: impl Fn(&Plan<'_>) -> Arguments<'d>,
) -> Result<()> {
    out.expect("attention", "the probabilities", attention.probabilities(query_offsets, key_offsets), DType::F32);
    assert!(Room::of(query_offsets) == inputs.queries.room, "attention: the table has room to spare");
    // There is one kernel for all; this checks the sizes.
    let _ = Plan::new(gpu, attention, inputs, &[], false);
    // By length: the order of the table.
    let mut next = 0;
    for sequence in by_length(query_offsets) {
        let start = attention.probabilities(&query_offsets[..=sequence], &key_offsets[..=sequence]);
        let end = attention.probabilities(&query_offsets[..=sequence + 1], &key_offsets[..=sequence + 1]);
        let items = ((query_offsets[sequence + 1] - query_offsets[sequence]) as usize).div_ceil(TILE);
        let queries = Sequences {
            table: inputs.queries.table.part(ITEM * next, ITEM * items),
            room: Room { long: items, ..Room::default() },
            ..inputs.queries
        };
        let one = Inputs { queries, ..*inputs };
        let plan = Plan { inputs: &one, attention, tiles: None, tiled: None, variant };
        let mut arguments = arguments_of(&plan);
        arguments.log_sums = out.part(start, end - start).address();
        let shared = arguments.bias_bytes();
        // SAFETY: the kernel reads queries and keys and writes A·N·M numbers where log-sums go otherwise.
        unsafe { plan.launch(gpu, "probabilities", false, shared, &mut arguments)? };
        next += items;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_as_long_as_the_kernels_take_them() {
        assert_eq!(size_of::<Arguments<'_>>(), 24 * 8 + 18 * 4 + (LEVELS + 14 + 3) * 4 + 32);
    }

    /// `Described::bucket` of described.cuh.
    fn bucket(buckets: &Buckets, distance: i64) -> usize {
        let reach = i64::from(buckets.max_distance);
        let distance = distance.clamp(-reach, reach);
        let far = if buckets.bidirectional { distance.abs() } else { (-distance).max(0) } as u32;
        let first = if buckets.bidirectional && distance > 0 { side(buckets) } else { 0 };
        first + thresholds(buckets)[..side(buckets) - 1].iter().filter(|least| far >= **least).count()
    }

    #[test]
    fn thresholds_give_the_buckets() {
        for bidirectional in [false, true] {
            for (count, max_distance) in [(32, 128), (8, 20), (2, 5), (64, 512), (16, 16)] {
                let buckets = Buckets { count, max_distance, bidirectional };
                for distance in -700..=700 {
                    let (got, expected) = (bucket(&buckets, distance), buckets.of(distance));
                    assert_eq!(got, expected, "{buckets:?} at {distance}");
                }
            }
        }
    }
}
