//! Attention without bias on Hopper, where blocks of threads stay on their multiprocessor: one group of warps fetches, the others
//! multiply (attention_forward_hopper.cu). For bf16 and heads of 40 to 64 and of 104 to 128 numbers; the rest is [`super::general`]'s.

use super::general::{Arguments, DROPOUTS, HOPPER_SIZES, Plan};
use crate::cpu::attention::{Bias, Window};
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{Gpu, Launch};

/// The forward.
pub static FORWARD: Source = Source {
    name: "attention_forward_hopper.cu",
    text: concat!(
        include_str!("../kernels/tiles.cuh"),
        include_str!("../kernels/wgmma.cuh"),
        include_str!("../kernels/pipeline.cuh"),
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_forward_hopper.cu")
    ),
    variants: &[&[&HOPPER_SIZES, DROPOUTS]],
};

/// As in attention_forward_hopper.cu: groups that multiply; jobs, steps of keys and barriers that are in shared memory.
const fn groups(size: usize) -> usize {
    if size == 64 { 3 } else { 2 }
}
const JOBS: usize = 2;
const STAGES: usize = 2;
const KEYS: usize = 128;
const JOB_BYTES: usize = 64;
const BARRIERS: usize = 2 * JOBS + 4 * STAGES;
const TICKET_BYTES: usize = 8;

/// What heads are filled up to, where this kernel is for the plan.
pub(super) fn size(plan: &Plan<'_>, drops: bool) -> Option<usize> {
    let tiles = plan.tiles.filter(|tiles| tiles.hopper)?;
    let slow = tiles.size == 64 && drops && is_narrow(plan.attention.window);
    (plan.attention.bias == Bias::None && !slow).then_some(tiles.size)
}

/// Whether queries see so few keys that most of a block's would not count: general.rs has smaller ones, which are faster for heads of 64.
pub(super) fn is_narrow(window: Window) -> bool {
    window.left.saturating_add(window.right) < 256
}

/// Launches the forward of all sequences of the plan, which has no bias.
///
/// # Safety
/// As [`Gpu::launch`].
pub(super) unsafe fn forward(gpu: &Gpu, plan: &Plan<'_>, size: usize, arguments: &mut Arguments<'_>) -> Result<()> {
    let items = plan.begin(false, arguments);
    let rows = JOBS * 64 * groups(size) + 2 * STAGES * KEYS;
    let shared = rows * 2 * size + JOBS * JOB_BYTES + 8 * BARRIERS + TICKET_BYTES;
    let grid = gpu.multiprocessors().min(items * plan.attention.heads);
    let threads = (groups(size) + 1) * 128;
    let launch = Launch { grid: (grid as u32, 1), threads: threads as u32, shared: shared as u32 };
    // SAFETY: the caller's promise.
    unsafe {
        gpu.launch(&FORWARD, &plan.variant[..2], "forward", launch, &[arguments, &(items as u32), &gpu.tickets()])
    }
}
