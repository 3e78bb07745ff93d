//! A linear-chain conditional random field: loss with its gradients, probabilities of labels, and the best labels. The definition is
//! [`crate::cpu::crf`].
//!
//! Legend: B sequences, T tokens (those that fill a batch up among them), K labels.

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Gpu, Launch, Purpose, STORES, View, address, store};

/// All of it.
pub static SOURCE: Source = Source { name: "crf.cu", text: include_str!("kernels/crf.cu"), variants: &[&[STORES]] };

/// Threads of a block that goes along a sequence.
const THREADS: usize = 128;

/// Bytes of the gradients that chunks of sequences leave, at most, where there is more than one chunk.
const PARTIAL: usize = 32 << 20;

/// The parameters of a field, in f32.
#[derive(Clone, Copy, Debug)]
pub struct Field<'a> {
    /// K.
    pub start: View<'a>,
    /// K.
    pub end: View<'a>,
    /// K×K, from row to column.
    pub transitions: View<'a>,
}

/// `struct Field` of crf.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Arguments {
    start: u64,
    end: u64,
    transitions: u64,
    labels: u32,
    group: u32,
}

// SAFETY: `struct Field` has the same fields in the same order.
unsafe impl Argument for Arguments {}

impl Field<'_> {
    /// K.
    pub fn labels(&self) -> usize {
        self.start.len()
    }

    fn expect(&self, what: &str) {
        let k = self.labels();
        assert!(k > 0, "crf: no labels");
        for (view, len) in [(self.start, k), (self.end, k), (self.transitions, k * k)] {
            view.expect("crf", what, len, DType::F32);
        }
    }

    fn arguments(&self) -> Arguments {
        let k = self.labels();
        // As many lanes of a label as leave room for all labels.
        let group = (THREADS / k.next_power_of_two()).clamp(1, 32) as u32;
        let [start, end, transitions] = [self.start, self.end, self.transitions].map(|view| view.address());
        Arguments { start, end, transitions, labels: k as u32, group }
    }
}

/// Sums along sequences in work space: over the tokens up to each and after it (T×K f64 each), and over all labellings of each sequence (B).
struct Sums {
    before: u64,
    after: u64,
    all: u64,
    /// What is behind them.
    rest: u64,
}

/// Checks sizes and takes the sums; `more`: bytes of work space behind them.
fn sums(gpu: &Gpu, field: &Field<'_>, logits: View<'_>, offsets: View<'_>, more: usize) -> Result<Sums> {
    field.expect("a parameter");
    let (b, _) = sizes(field, logits, offsets);
    let bytes = logits.len() * 8;
    let before = gpu.scratch(Purpose::Field, 2 * bytes + b * 8 + more)?;
    let after = before + bytes as u64;
    let all = after + bytes as u64;
    let launch = Launch { grid: (b as u32, 2), threads: THREADS as u32, shared: 0 };
    // SAFETY: T×K numbers each and one for each sequence; offsets come from a layout.
    unsafe {
        let (logits_at, offsets) = (logits.address(), offsets.address());
        let arguments: [&dyn Argument; 6] = [&field.arguments(), &logits_at, &offsets, &before, &after, &all];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "sums", launch, &arguments)?;
    }
    Ok(Sums { before, after, all, rest: all + (b * 8) as u64 })
}

/// B and T.
fn sizes(field: &Field<'_>, logits: View<'_>, offsets: View<'_>) -> (usize, usize) {
    offsets.expect("crf", "the offsets", offsets.len(), DType::U32);
    assert!(!offsets.is_empty(), "crf: no offsets");
    (offsets.len() - 1, logits.rows("crf", field.labels()))
}

/// `total` (one f32) becomes scale·Σ of the losses of all sequences. With `gradients`, the logits (T×K) are replaced by their gradient, zeros
/// behind the last sequence, and those of the field are written. A label (T, u32) outside of the field is a fault.
pub fn loss(
    gpu: &Gpu,
    field: &Field<'_>,
    logits: View<'_>,
    offsets: View<'_>,
    labels: View<'_>,
    scale: f32,
    gradients: Option<&Field<'_>>,
    total: View<'_>,
) -> Result<()> {
    let (k, (b, t)) = (field.labels(), sizes(field, logits, offsets));
    labels.expect("crf", "the labels", t, DType::U32);
    total.expect("crf", "the loss", 1, DType::F32);
    if let Some(to) = gradients {
        assert!(to.labels() == k, "crf: gradients of another field");
        to.expect("a gradient");
    }
    let numbers = 1 + k * (k + 2);
    let most = (PARTIAL / (numbers * 8)).max(1);
    let chunk = b.div_ceil(most.min(b.max(1))).max(1);
    let chunks = b.div_ceil(chunk);
    let Sums { before, after, all, rest: partial } = sums(gpu, field, logits, offsets, chunks * numbers * 8)?;
    let (variant, arguments) = ([store(logits.dtype())], field.arguments());
    let sizes = (b as u32, t as u32, chunk as u32, chunks as u32, k as u32, u32::from(gradients.is_some()));
    let (logits, offsets, labels) = (logits.address(), offsets.address(), labels.address());
    // SAFETY: as in `sums`; a row of numbers for each chunk. The kernels check labels.
    unsafe {
        let fault = gpu.fault();
        let list: [&dyn Argument; 12] = [
            &arguments, &logits, &offsets, &labels, &before, &after, &all, &partial, &sizes.0, &sizes.2, &sizes.5,
            &fault,
        ];
        gpu.launch(&SOURCE, &variant, "differences", Launch::new(chunks, 256), &list)?;
        let [dstart, dend, dtransitions] =
            [gradients.map(|to| to.start), gradients.map(|to| to.end), gradients.map(|to| to.transitions)].map(address);
        let total = total.address();
        let list: [&dyn Argument; 8] = [&partial, &sizes.3, &sizes.4, &scale, &total, &dstart, &dend, &dtransitions];
        let launch = Launch::new(if gradients.is_some() { numbers.div_ceil(256) } else { 1 }, 256);
        gpu.launch(&SOURCE, &variant, "finish", launch, &list)?;
        if gradients.is_some() {
            let list: [&dyn Argument; 10] =
                [&arguments, &offsets, &labels, &before, &after, &all, &logits, &sizes.0, &sizes.1, &scale];
            gpu.launch(&SOURCE, &variant, "gradient", Launch::new(b + 1, 256), &list)?;
        }
    }
    Ok(())
}

/// How likely each label of each token is (T×K, f32); zeros behind the last sequence.
pub fn probabilities(gpu: &Gpu, field: &Field<'_>, logits: View<'_>, offsets: View<'_>, out: View<'_>) -> Result<()> {
    out.expect("crf", "the probabilities", logits.len(), DType::F32);
    let (b, t) = sizes(field, logits, offsets);
    let Sums { before, after, all, .. } = sums(gpu, field, logits, offsets, 0)?;
    let sizes = (b as u32, t as u32);
    // SAFETY: as in `sums`.
    unsafe {
        let (arguments, offsets, out) = (field.arguments(), offsets.address(), out.address());
        let list: [&dyn Argument; 8] = [&arguments, &offsets, &before, &after, &all, &out, &sizes.0, &sizes.1];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "probabilities", Launch::new(b + 1, 256), &list)
    }
}

/// The likeliest labels of each sequence (T, u32), by Viterbi's algorithm; of equals, the first. `legal` (u32: K, K and K×K of 0 and 1) says
/// which labels may begin and end a sequence and follow each other: then those that have as few illegal steps as there can be. What is behind
/// the last sequence is not written.
pub fn best(
    gpu: &Gpu,
    field: &Field<'_>,
    legal: Option<View<'_>>,
    logits: View<'_>,
    offsets: View<'_>,
    out: View<'_>,
) -> Result<()> {
    field.expect("a parameter");
    let (k, (b, t)) = (field.labels(), sizes(field, logits, offsets));
    out.expect("crf", "the labels", t, DType::U32);
    if let Some(legal) = legal {
        legal.expect("crf", "the legal steps", k * (k + 2), DType::U32);
    }
    let scores = gpu.scratch(Purpose::Field, b * 2 * k * 8 + t * k * 4)?;
    let from = scores + (b * 2 * k * 8) as u64;
    // SAFETY: two rows of scores a sequence, T×K places; offsets come from a layout.
    unsafe {
        let (arguments, legal) = (field.arguments(), address(legal));
        let (logits_at, offsets, out) = (logits.address(), offsets.address(), out.address());
        let list: [&dyn Argument; 7] = [&arguments, &legal, &logits_at, &offsets, &scores, &from, &out];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "best", Launch::new(b, THREADS), &list)
    }
}
