//! How a flat batch of tokens is divided into sequences. There is no padding.

use std::sync::{Arc, OnceLock};

use henson_kernels::cpu::recurrent::longest_first;
use henson_kernels::cuda::attention::general::Sequences;
use henson_kernels::cuda::attention::{Room, write_table};
use henson_kernels::cuda::recurrent::Steps;

use crate::{Device, Result, Tensor, TensorError};

/// B sequences with T tokens in all. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Layout(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    offsets: Vec<u32>,
    /// B: each sequence's number in the global batch, which dropout counts by.
    numbers: Tensor,
    /// T×2: (number of the sequence, place within it) of each token.
    tokens: Tensor,
    /// B×2: the same for the first token of each sequence.
    firsts: Tensor,
    /// B: where each sequence begins.
    starts: Tensor,
    /// B: each sequence's last token.
    ends: Tensor,
    /// T: each token's place within its sequence.
    positions: Tensor,
    /// What a GPU's kernels need beyond that.
    on_gpu: Option<OnGpu>,
}

#[derive(Debug)]
struct OnGpu {
    /// B + 1.
    offsets: Tensor,
    /// Attention's work, and how much of it there is room for.
    table: Tensor,
    room: Room,
    /// What recurrent layers need, where there are some.
    stepwise: OnceLock<Stepwise>,
}

/// How a GPU takes steps along all sequences at once.
#[derive(Debug)]
pub(crate) struct Stepwise {
    /// B: the longest first.
    pub(crate) order: Tensor,
    /// How many steps, with how many sequences.
    pub(crate) steps: Steps,
}

/// Tokens of the sequences that fill a batch up.
const FILLING: usize = 128;

impl Layout {
    /// Sequences of these lengths; the first has the number `first_number` in the global batch.
    ///
    /// In a feed on a GPU, further tokens at the end fill the batch up to one of few sizes: they belong to sequences that
    /// are not counted, and nothing that is computed at the others depends on them.
    pub fn new(device: &Device, lengths: &[usize], first_number: u32) -> Result<Self> {
        Self::numbered(device, lengths, (0..lengths.len() as u32).map(|i| first_number + i).collect(), 0)
    }

    /// One token of each of some sequences, with their numbers in the global batch: that at a place within its sequence, as dropout
    /// counts it.
    pub fn of_tokens(device: &Device, numbers: &[u32], place: u32) -> Result<Self> {
        Self::numbered(device, &vec![1; numbers.len()], numbers.to_vec(), place)
    }

    /// Sequences of these lengths and numbers, whose first tokens stand at a place.
    fn numbered(device: &Device, lengths: &[usize], numbers: Vec<u32>, first: u32) -> Result<Self> {
        if let Some(i) = lengths.iter().position(|length| *length == 0) {
            return Err(TensorError::Layout(format!(
                "sequence {i} of the batch is empty: each needs a token at least"
            )));
        }
        let total: usize = lengths.iter().sum();
        if u32::try_from(total).is_err() {
            return Err(TensorError::Layout(format!("a batch of {total} tokens is too large")));
        }
        let mut offsets = vec![0];
        let (mut tokens, mut positions) = (Vec::with_capacity(2 * total), Vec::with_capacity(total));
        for (length, number) in lengths.iter().zip(&numbers) {
            for position in first..first + *length as u32 {
                tokens.extend([*number, position]);
                positions.push(position);
            }
            offsets.push(positions.len() as u32);
        }
        let rounded = device.rounded_tokens(total);
        let mut ends = offsets.clone();
        while positions.len() < rounded {
            for position in 0..FILLING.min(rounded - positions.len()) as u32 {
                tokens.extend([u32::MAX, position]);
                // The model may have few positions.
                positions.push(0);
            }
            ends.push(positions.len() as u32);
        }
        let total = rounded;
        let b = lengths.len();
        let lasts: Vec<u32> = offsets[1..].iter().map(|end| end - 1).collect();
        let firsts: Vec<u32> = numbers.iter().flat_map(|n| [*n, first]).collect();
        Ok(Self(Arc::new(Inner {
            numbers: Tensor::from_slice(device, [b], &numbers)?,
            tokens: Tensor::from_slice(device, [total, 2], &tokens)?,
            firsts: Tensor::from_slice(device, [b, 2], &firsts)?,
            starts: Tensor::from_slice(device, [b], &offsets[..b])?,
            ends: Tensor::from_slice(device, [b], &lasts)?,
            positions: Tensor::from_slice(device, [total], &positions)?,
            on_gpu: match device {
                Device::Cpu(_) => None,
                Device::Cuda(cuda) => {
                    let room = cuda.room(total, Room::of(&ends));
                    let mut numbers = numbers;
                    numbers.resize(ends.len() - 1, u32::MAX);
                    let mut table = vec![0; room.numbers()];
                    write_table(&ends, &numbers, room, &mut table);
                    Some(OnGpu {
                        offsets: Tensor::from_slice(device, [b + 1], &offsets)?,
                        table: Tensor::from_slice(device, [table.len()], &table)?,
                        room,
                        stepwise: OnceLock::new(),
                    })
                }
            },
            offsets,
        })))
    }

    /// Where each sequence begins, and the end of the last.
    pub fn offsets(&self) -> &[u32] {
        &self.0.offsets
    }

    /// B.
    pub fn sequences(&self) -> usize {
        self.0.offsets.len() - 1
    }

    /// T, with those that fill the batch up.
    pub fn tokens(&self) -> usize {
        self.0.positions.shape().elements()
    }

    /// The rows of the first tokens: where the sequences begin.
    pub fn starts(&self) -> &Tensor {
        &self.0.starts
    }

    /// The rows of the last tokens.
    pub fn ends(&self) -> &Tensor {
        &self.0.ends
    }

    /// Each token's place within its sequence.
    pub fn positions(&self) -> &Tensor {
        &self.0.positions
    }

    /// Where each sequence begins, and the end of the last, on a GPU.
    pub(crate) fn offsets_on_gpu(&self) -> Result<&Tensor> {
        self.on_gpu().map(|on_gpu| &on_gpu.offsets)
    }

    /// Attention's work on a GPU.
    pub(crate) fn attention_table(&self) -> Result<Sequences<'_>> {
        let OnGpu { table, room, .. } = self.on_gpu()?;
        Ok(Sequences { table: table.on_gpu(), room: *room, tokens: self.tokens() })
    }

    /// The same for recurrent layers too, whose steps on a GPU are bounded by the lengths: what a recorded pass reads must be made for
    /// it in its feed.
    pub fn for_steps(self, device: &Device) -> Result<Self> {
        if let Device::Cuda(_) = device {
            self.stepwise(device)?;
        }
        Ok(self)
    }

    /// How recurrent layers go along the sequences on a GPU.
    pub(crate) fn stepwise(&self, device: &Device) -> Result<&Stepwise> {
        let (on_gpu, why) = (self.on_gpu()?, "the layout was made for the CPU");
        let unsupported = || TensorError::Unsupported { operation: "layout", why };
        if on_gpu.stepwise.get().is_none() {
            let Device::Cuda(cuda) = device else { return Err(unsupported()) };
            let mut order = vec![0; self.sequences()];
            longest_first(self.offsets(), &mut order);
            let steps = cuda.steps((self.tokens(), order.len()), Steps::of(self.offsets(), &order));
            let order = Tensor::from_slice(device, [order.len()], &order)?;
            // Of two threads that ask at once, the first one's stays.
            let _ = on_gpu.stepwise.set(Stepwise { order, steps });
        }
        on_gpu.stepwise.get().ok_or_else(unsupported)
    }

    /// Whether both are one layout, and not two that may divide the same batch alike: what a recorded pass does must not depend on
    /// the lengths of the sequences that it was recorded with.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn on_gpu(&self) -> Result<&OnGpu> {
        let why = "the layout was made for the CPU";
        self.0.on_gpu.as_ref().ok_or(TensorError::Unsupported { operation: "layout", why })
    }

    /// The number of each sequence in the global batch, which dropout counts by.
    pub fn numbers(&self) -> &Tensor {
        &self.0.numbers
    }

    pub(crate) fn token_rows(&self) -> &Tensor {
        &self.0.tokens
    }

    pub(crate) fn first_rows(&self) -> &Tensor {
        &self.0.firsts
    }
}
