//! Adafactor over flat buffers. The definition is [`crate::cpu::adafactor`].
//!
//! As of the optimizers of [`super::optimizer`], what changes from step to step is read from device memory: the same
//! [`Control`](super::optimizer::Control) and the same place for the norm. The norm of the gradients comes with their sums, so that they
//! are read once less.
//!
//! Legend: R rows and C columns of a matrix.

use crate::cpu::adafactor::{self as cpu, Moment, Rule};

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, Buffer, DType, Gpu, Launch, Purpose, View, address};
use super::optimizer::FACTORS;

/// The optimizer.
pub static SOURCE: Source = Source {
    name: "adafactor.cu",
    text: concat!(include_str!("kernels/flat.cuh"), include_str!("kernels/adafactor.cu")),
    variants: &[&[]],
};

/// Rows and columns of a tile.
const TILE: usize = 128;

/// Numbers of a piece of what is not divided.
const PIECE: usize = 16384;

/// Rows or columns of a block of `means`.
const LINES: usize = 32;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Piece {
    start: u64,
    tensor: u32,
    row: u32,
    column: u32,
    rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Tensor {
    start: u64,
    length: u64,
    state: u64,
    roots: u64,
    row_sums: u64,
    column_sums: u64,
    rows: u32,
    columns: u32,
    first_piece: u32,
    end_piece: u32,
    first_line: u32,
    end_line: u32,
    rate: f32,
    decays: u32,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Line {
    tensor: u32,
    first: u32,
    of_columns: u32,
}

/// How the work on a set of tensors is divided. Built once.
pub struct Plan {
    rule: Rule,
    pieces: Buffer,
    tensors: Buffer,
    lines: Buffer,
    piece_count: usize,
    tensor_count: usize,
    line_count: usize,
    /// Blocks of rows, which come first.
    row_line_count: usize,
    /// Numbers of the tiles' sums, and factors of rows and columns.
    sums: usize,
    roots: usize,
    len: usize,
    state: usize,
}

impl Plan {
    /// The same tensors and the same state as on a CPU.
    pub fn new(gpu: &Gpu, plan: &cpu::Plan) -> Result<Self> {
        let (mut pieces, mut tensors): (Vec<Piece>, Vec<Tensor>) = (Vec::new(), Vec::new());
        let [mut row_lines, mut column_lines]: [Vec<Line>; 2] = Default::default();
        let (mut sums, mut roots) = (0, 0);
        for (number, tensor) in plan.tensors().iter().enumerate() {
            let (segment, first_piece, first_line) = (tensor.segment, pieces.len(), row_lines.len());
            let own = number as u32;
            let place = [roots, sums];
            let (mut rows, mut columns, mut column_sums) = (0, 0, 0);
            match tensor.moment {
                Moment::Whole => {
                    for first in (0..segment.len).step_by(PIECE) {
                        let (start, rows) = ((segment.start + first) as u64, PIECE.min(segment.len - first) as u32);
                        pieces.push(Piece { start, tensor: own, row: 0, column: 0, rows });
                    }
                }
                Moment::Factored { rows: r, columns: c } => {
                    (rows, columns, column_sums) = (r, c, sums + r * c.div_ceil(TILE));
                    sums = column_sums + c * r.div_ceil(TILE);
                    roots += r + c;
                    // A row of tiles after the other.
                    for row in (0..r).step_by(TILE) {
                        for column in (0..c).step_by(TILE) {
                            let start = (segment.start + row * c + column) as u64;
                            let (rows, row, column) = (TILE.min(r - row) as u32, row as u32, column as u32);
                            pieces.push(Piece { start, tensor: own, row, column, rows });
                        }
                    }
                    for (lines, count, of_columns) in [(&mut row_lines, r, 0), (&mut column_lines, c, 1)] {
                        let firsts = (0..count).step_by(LINES);
                        lines.extend(firsts.map(|first| Line { tensor: own, first: first as u32, of_columns }));
                    }
                }
            }
            tensors.push(Tensor {
                start: segment.start as u64,
                length: segment.len as u64,
                state: tensor.state as u64,
                roots: place[0] as u64,
                row_sums: place[1] as u64,
                column_sums: column_sums as u64,
                rows: rows as u32,
                columns: columns as u32,
                first_piece: first_piece as u32,
                end_piece: pieces.len() as u32,
                first_line: first_line as u32,
                end_line: row_lines.len() as u32,
                rate: segment.rate,
                decays: u32::from(segment.decay),
            });
        }
        let row_line_count = row_lines.len();
        let lines = [row_lines, column_lines].concat();
        Ok(Self {
            rule: *plan.rule(),
            pieces: gpu.upload::<u32>(bytemuck::cast_slice(&pieces))?,
            tensors: gpu.upload::<u32>(bytemuck::cast_slice(&tensors))?,
            lines: gpu.upload::<u32>(bytemuck::cast_slice(&lines))?,
            piece_count: pieces.len(),
            tensor_count: tensors.len(),
            line_count: lines.len(),
            row_line_count,
            sums,
            roots,
            len: plan.len(),
            state: plan.state_len(),
        })
    }
}

/// One step over all tensors of the plan; `copy`, where given, gets the new parameters in bf16. `control` has the numbers of
/// [`Control`](super::optimizer::Control), f64, with the step's number; `factors` gets the norm of the gradients. Where that is not finite,
/// nothing else changes.
pub fn adafactor(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    state: View<'_>,
    weight_decay: f64,
    (control, factors): (View<'_>, View<'_>),
    copy: Option<View<'_>>,
) -> Result<()> {
    for view in [parameters, gradients] {
        view.expect("adafactor", "a buffer", plan.len, DType::F32);
        assert!(view.is_aligned(), "adafactor: a buffer does not begin at a multiple of 16 bytes");
    }
    if let Some(copy) = copy {
        copy.expect("adafactor", "the copy", plan.len, DType::Bf16);
        assert!(copy.is_aligned(), "adafactor: the copy does not begin at a multiple of 16 bytes");
    }
    state.expect("adafactor", "the state", plan.state, DType::F32);
    control.expect("adafactor", "the control", 4, DType::F64);
    factors.expect("adafactor", "the factors", FACTORS, DType::F32);

    // Two sums of squares and one of updates a piece, one a block of rows or columns, two rates a tensor, factors and tiles' sums.
    let sizes =
        [plan.piece_count * 16, plan.piece_count * 8, plan.line_count * 8, plan.tensor_count * 8, plan.roots * 4];
    let mut next = gpu.scratch(Purpose::Sums, sizes.iter().sum::<usize>() + plan.sums * 4)?;
    let [squares, of_updates, of_lines, rates, roots] = sizes.map(|size| {
        let place = next;
        next += size as u64;
        place
    });
    let of_tiles = next;
    let [pieces, tensors, lines] = [&plan.pieces, &plan.tensors, &plan.lines].map(|buffer| buffer.view().address());
    let [p, g, state, factors] = [parameters, gradients, state, factors].map(|view| view.address());
    let asked = if plan.rule.scale_parameter { p } else { 0 };
    let (piece_count, scales) = (plan.piece_count as u32, u32::from(plan.rule.scale_parameter));
    let launch = |kernel: &'static str, blocks: usize, threads: usize, arguments: &[&dyn Argument]| {
        // SAFETY: the plan's pieces lie within buffers and state, whose lengths are checked, and its sums within the work space. The
        // arguments are those of each kernel.
        unsafe { gpu.launch(&SOURCE, &[], kernel, Launch::new(blocks, threads), arguments) }
    };
    launch("sums", plan.piece_count, 256, &[&pieces, &tensors, &asked, &g, &of_tiles, &squares])?;
    let arguments: [&dyn Argument; 5] = [&control.address(), &squares, &piece_count, &plan.rule.decay_rate, &factors];
    launch("prepare", 1, 1024, &arguments)?;
    let arguments: [&dyn Argument; 7] = [&lines, &tensors, &factors, &of_tiles, &state, &roots, &of_lines];
    launch("means", plan.line_count, 256, &arguments)?;
    let arguments: [&dyn Argument; 6] = [&lines, &tensors, &factors, &of_lines, &state, &roots];
    launch("row_roots", plan.row_line_count, 256, &arguments)?;
    let arguments: [&dyn Argument; 7] = [&pieces, &tensors, &factors, &g, &roots, &state, &of_updates];
    launch("updates", plan.piece_count, 256, &arguments)?;
    let (clip, least_scale) = (plan.rule.clip, plan.rule.least_scale);
    let arguments: [&dyn Argument; 9] =
        [&tensors, &factors, &squares, &of_updates, &clip, &least_scale, &scales, &weight_decay, &rates];
    launch("rates", plan.tensor_count, 256, &arguments)?;
    let arguments: [&dyn Argument; 9] = [&pieces, &tensors, &factors, &g, &roots, &state, &rates, &p, &address(copy)];
    launch("apply", plan.piece_count, 256, &arguments)
}
