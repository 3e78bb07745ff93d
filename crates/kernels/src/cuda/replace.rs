//! Replaced tokens: what was drawn is put into a text. The definition is [`crate::cpu::replace`].

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Gpu, Launch, View};

/// Putting in, and counting.
pub static SOURCE: Source = Source { name: "replace.cu", text: include_str!("kernels/replace.cu"), variants: &[&[]] };

const THREADS: usize = 256;

/// `out` (T, u32) becomes `ids` with `drawn[i]` at `rows[i]` (P, u32), `labels` (T, f32) 1 where the two differ and else 0. No row
/// may be named twice but [`NOWHERE`](super::rows::NOWHERE), which stands for nothing.
pub fn replace(
    gpu: &Gpu,
    ids: View<'_>,
    rows: View<'_>,
    drawn: View<'_>,
    out: View<'_>,
    labels: View<'_>,
) -> Result<()> {
    let (tokens, count) = (ids.len(), rows.len());
    ids.expect("replace", "the ids", tokens, DType::U32);
    rows.expect("replace", "the rows", count, DType::U32);
    drawn.expect("replace", "what was drawn", count, DType::U32);
    out.expect("replace", "the output", tokens, DType::U32);
    labels.expect("replace", "the labels", tokens, DType::F32);
    let sizes = (count as u32, tokens as u32);
    let (ids, rows, drawn) = (ids.address(), rows.address(), drawn.address());
    let (out, labels, fault) = (out.address(), labels.address(), gpu.fault());
    // SAFETY: T and P numbers; the kernel checks rows against the tokens.
    unsafe {
        if tokens > 0 {
            let launch = Launch::new(tokens.div_ceil(THREADS), THREADS);
            gpu.launch(&SOURCE, &[], "begin_replacing", launch, &[&ids, &sizes.1, &out, &labels])?;
        }
        if count > 0 {
            let arguments: [&dyn Argument; 8] = [&ids, &rows, &drawn, &sizes.0, &sizes.1, &out, &labels, &fault];
            gpu.launch(&SOURCE, &[], "replace", Launch::new(count.div_ceil(THREADS), THREADS), &arguments)?;
        }
    }
    Ok(())
}

/// Adds to `counts` (3, u32) how many tokens of a weight above 0 are replaced (a label above ½), are said to be (a logit above 0),
/// and both.
pub fn found(gpu: &Gpu, logits: View<'_>, labels: View<'_>, weights: View<'_>, counts: View<'_>) -> Result<()> {
    let tokens = labels.len();
    logits.expect("found", "the logits", tokens, DType::F32);
    labels.expect("found", "the labels", tokens, DType::F32);
    weights.expect("found", "the weights", tokens, DType::F32);
    counts.expect("found", "the counts", 3, DType::U32);
    if tokens == 0 {
        return Ok(());
    }
    let launch = Launch::new(tokens.div_ceil(THREADS).min(2 * gpu.multiprocessors()), THREADS);
    let (logits, labels, weights, counts) = (logits.address(), labels.address(), weights.address(), counts.address());
    // SAFETY: T numbers each, and three counts.
    unsafe { gpu.launch(&SOURCE, &[], "count_found", launch, &[&logits, &labels, &weights, &(tokens as u32), &counts]) }
}
