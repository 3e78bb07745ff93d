//! Rotary positions, in place on the queries and keys of a projection.

use std::ops::Range;

use henson_kernels::cpu::rotary::{self as kernels, Rotary};
use henson_kernels::cuda::rotary as cuda_kernels;

use super::rows::check_indices;
use super::{Op, copy, own, with_float};
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Pass, Result, Tensor, TensorError, Var};

/// The angles of all positions that a model may see: made once, used by every layer with the same theta.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    rotary: Rotary,
    /// Positions × R: cosines, then sines.
    angles: Tensor,
}

impl RotaryTable {
    /// For positions below `positions`.
    pub fn new(device: &Device, rotary: Rotary, positions: usize) -> Result<Self> {
        if rotary.size == 0 || !rotary.size.is_multiple_of(2) {
            let why = "the number of rotated columns is not even, or 0";
            return Err(TensorError::Unsupported { operation: "rotary", why });
        }
        let angles = Tensor::from_slice(device, [positions, rotary.size], &rotary.table(positions))?;
        Ok(Self { rotary, angles })
    }
}

impl Pass<'_> {
    /// Rotates heads of `head_size` within some columns of `x` (T rows) by their tokens' positions (T, u32): those of queries
    /// and keys, which stand first in a fused projection.
    pub fn rotary(
        &mut self,
        x: Var,
        table: &RotaryTable,
        positions: &Tensor,
        columns: Range<usize>,
        head_size: usize,
    ) -> Result<Var> {
        positions.check_shape("rotary", "the positions", [x.tensor().rows()])?;
        positions.check_dtype("rotary", "the positions", DType::U32)?;
        check_indices("rotary", "position", self.device(), positions, table.angles.rows())?;
        let heads = head_size > 0 && columns.len().is_multiple_of(head_size) && columns.end <= x.tensor().columns();
        if !heads || table.rotary.size > head_size {
            let why = "the columns are not heads, or heads have fewer columns than are rotated";
            return Err(TensorError::Unsupported { operation: "rotary", why });
        }
        self.reads(&(table.rotary, &columns, head_size));
        let slot = x.slot();
        let mut out = own(self.device(), x.into_tensor())?;
        let turn = Turn { table: table.clone(), positions: positions.clone(), columns, head_size };
        turn.apply(self.device(), &mut out, false)?;
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Rotary(Rotated { x: slot, turn, out }));
        }
        Ok(y)
    }
}

/// What is rotated, and by how much.
struct Turn {
    table: RotaryTable,
    positions: Tensor,
    columns: Range<usize>,
    head_size: usize,
}

impl Turn {
    fn apply(&self, device: &Device, x: &mut Tensor, opposite: bool) -> Result<()> {
        // Only the heads' columns move.
        let moved = x.view(0, [x.rows(), self.columns.len()].into());
        let _timer = device.timer(Kind::Rotary, 0, &[&moved, &moved]);
        let Self { table: RotaryTable { rotary, angles }, positions, columns, head_size } = self;
        let (stride, columns) = (x.columns(), columns.clone());
        match device {
            Device::Cpu(cpu) => with_float!(x.dtype(), E => kernels::rotate(
                &cpu.kernels, rotary, angles.slice(), positions.slice(), x.slice_mut::<E>(), stride, columns, *head_size, opposite,
            )),
            Device::Cuda(cuda) => {
                let (angles, positions) = (angles.on_gpu(), positions.on_gpu());
                cuda_kernels::rotate(
                    &cuda.gpu,
                    rotary,
                    angles,
                    positions,
                    x.on_gpu(),
                    stride,
                    columns,
                    *head_size,
                    opposite,
                )?;
            }
        }
        Ok(())
    }
}

/// A recorded rotation.
pub(crate) struct Rotated {
    x: Option<Slot>,
    turn: Turn,
    out: Slot,
}

impl Rotated {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let mut dx = if dy.is_unique() { dy } else { copy(back.device(), &dy)? };
        self.turn.apply(back.device(), &mut dx, true)?;
        back.add(self.x, dx)
    }
}
