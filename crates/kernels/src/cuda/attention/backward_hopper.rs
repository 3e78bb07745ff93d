//! The backward of attention without bias on Hopper, which computes the scores once (attention_backward_hopper.cu). For bf16, heads of 40
//! to 64 and of 104 to 128 numbers, and batches with sequences of more than 128 tokens; the rest is [`super::general`]'s.

use super::TILE;
use super::general::{Arguments as Described, DROPOUTS, HOPPER_SIZES, Plan};
use super::hopper::is_narrow;
use crate::cpu::attention::Bias;
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{Argument, Gpu, Launch, Purpose};

/// The kernels.
pub static SOURCE: Source = Source {
    name: "attention_backward_hopper.cu",
    text: concat!(
        include_str!("../kernels/tiles.cuh"),
        include_str!("../kernels/wgmma.cuh"),
        include_str!("../kernels/pipeline.cuh"),
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_backward_hopper.cu")
    ),
    variants: &[&[&HOPPER_SIZES, DROPOUTS]],
};

/// As in attention_backward_hopper.cu: three groups of warps; queries of a step.
const THREADS: u32 = 384;
const STEP: usize = 64;

/// Key heads whose tiles are claimed in turn, at most: so many that a tile's neighbour, which adds to the same gradients, has begun well
/// before it, and so few that the tiles of a head that run at once still share what they read.
const TOGETHER: usize = 16;

/// What heads are filled up to, where these kernels are for the plan.
pub(super) fn size(plan: &Plan<'_>) -> Option<usize> {
    let long = |room: super::Room| room.longest + room.long > 0;
    let rooms = [plan.inputs.queries.room, plan.inputs.cross.map_or(plan.inputs.queries, |cross| cross.keys).room];
    let tiles = plan.tiles.filter(|tiles| tiles.hopper)?;
    let slow = tiles.size == 64 && is_narrow(plan.attention.window);
    (plan.attention.bias == Bias::None && !slow && rooms.into_iter().any(long)).then_some(tiles.size)
}

/// Bytes of shared memory of a block: keys and values, the ring of queries and their gradients with their terms, gradients of scores,
/// what is worked on, barriers.
fn shared(size: usize) -> usize {
    let (halves, stages, key_stages) = if size == 64 { (2, 5, 2) } else { (1, 3, 1) };
    let (keys, ring) = (key_stages * 2 * TILE * 2 * size, stages * STEP * (2 * 2 * size + 8));
    let barriers = 2 * stages + 2 * key_stages + 8;
    keys + ring + 2 * halves * TILE * 2 * STEP + 2 * 48 + 8 * barriers
}

/// `struct Sums` of attention_backward_hopper.cu.
#[repr(C)]
struct Sums {
    dqueries: u64,
    counts: u64,
    ticket: u64,
    items: u32,
    key_heads: u32,
    together: u32,
    /// Where the compilers of both sides leave a gap.
    unused: u32,
}

// SAFETY: the same fields in the same order.
unsafe impl Argument for Sums {}

/// Launches the backward of all sequences of the plan; `arguments` have all but the room for the terms.
///
/// # Safety
/// As [`Gpu::launch`].
pub(super) unsafe fn launch(gpu: &Gpu, plan: &Plan<'_>, size: usize, arguments: &mut Described<'_>) -> Result<()> {
    let (heads, key_heads) = (plan.attention.heads, plan.attention.key_heads);
    let items = plan.begin(true, arguments);
    let numbers = heads * plan.inputs.queries.tokens;
    // For each query and head its terms, a count and sums of gradients; the ticket.
    let [terms, counts, sums] = [8, 4, 4 * size].map(|bytes| (bytes * numbers).next_multiple_of(16));
    arguments.terms = gpu.scratch(Purpose::Attention, terms + counts + sums + 16)?;
    let dqueries = arguments.terms + terms as u64;
    let counts_at = dqueries + sums as u64;
    let together = key_heads.div_ceil(key_heads.div_ceil(TOGETHER));
    let sums = Sums {
        dqueries,
        counts: counts_at,
        ticket: counts_at + counts as u64,
        items: items as u32,
        key_heads: key_heads as u32,
        together: together as u32,
        unused: 0,
    };
    let variant = &plan.variant[..2];
    let begin = Launch::new((numbers * size / 8).div_ceil(256), 256);
    let grid = (gpu.multiprocessors().min(items * key_heads) as u32, 1);
    let all = Launch { grid, threads: THREADS, shared: shared(size) as u32 };
    // SAFETY: the caller's promise; the work space has room for what was said above.
    unsafe {
        gpu.launch(&SOURCE, variant, "backward_begin", begin, &[arguments, &sums])?;
        gpu.launch(&SOURCE, variant, "backward", all, &[arguments, &sums])
    }
}
