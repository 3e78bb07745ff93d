//! The flat buffers of a model among several ranks: each holds all weights, and the moments of a shard of them alone (ZeRO-1). A step goes
//! gradients → own shard, summed over ranks → update of the shard → weights to all.
//!
//! Bits do not depend on the number of ranks: every rank's gradients are a branch of the tree over the batch's parts ([`crate::PartSums`]),
//! and shards end where chunks do, whose sums are added in order whoever gave them.

mod on_gpu;

use std::ops::Range;
use std::sync::Arc;

use henson_kernels::cpu::optimizer::{self as kernels, Plan, Segment, TwoPasses};
use henson_kernels::cpu::reduce::{self, CHUNK};
use henson_kernels::cpu::{Cpu, cast, rows};
use henson_ranks::Ranks;

use crate::{DType, Device, Gradients, Kind, Method, Parameters, Reading, Result, Tensor, TensorError, Update};

/// What an optimizer needs to share its work.
pub(crate) struct Sharing {
    place: Place,
    /// The moments of all, where they are being written or read.
    pub(crate) whole: Option<[Tensor; 2]>,
}

enum Place {
    Cpu(Box<OnCpu>),
    Cuda(Box<on_gpu::OnGpu>),
}

/// Which elements are whose, and which of the sums over chunks. Of numbers, in the order of ranks.
struct Shards {
    elements: Vec<Range<usize>>,
    /// Chunks of the flat buffers: sums of squares.
    chunks: Vec<Range<usize>>,
    /// What rates of tensors depend on.
    sums: Vec<Range<usize>>,
}

impl Shards {
    fn new(segments: &[Segment], len: usize, ranks: &Ranks) -> (Self, Vec<Plan>) {
        let chunks: Vec<Range<usize>> = (0..ranks.size()).map(|rank| ranks.share(len.div_ceil(CHUNK), rank)).collect();
        let elements: Vec<Range<usize>> =
            chunks.iter().map(|of| (of.start * CHUNK).min(len)..(of.end * CHUNK).min(len)).collect();
        let plans: Vec<Plan> = elements.iter().map(|shard| Plan::of_range(segments, len, shard.clone())).collect();
        let sums = plans.iter().map(Plan::own_sums).collect();
        (Self { elements, chunks, sums }, plans)
    }
}

fn in_bytes(ranges: &[Range<usize>], size: usize) -> Vec<Range<usize>> {
    ranges.iter().map(|range| size * range.start..size * range.end).collect()
}

/// A shard in the memory of the host.
struct OnCpu {
    ranks: Arc<Ranks>,
    /// The elements of each rank's shard.
    shards: Vec<Range<usize>>,
    plan: Plan,
    /// The moments of the own shard.
    moments: [Vec<f32>; 2],
    /// What the other ranks have of the own shard.
    received: Vec<f32>,
    /// Of each chunk of the gradients, and which of them are whose, in bytes.
    squares: Vec<f64>,
    squares_of: Vec<Range<usize>>,
    /// What rates of tensors depend on.
    sums: Vec<f64>,
    sums_of: Vec<Range<usize>>,
}

impl Sharing {
    pub(crate) fn new(segments: &[Segment], parameters: &Parameters, ranks: Arc<Ranks>) -> Result<Self> {
        let place = match parameters.device() {
            Device::Cpu(_) => Place::Cpu(Box::new(OnCpu::new(segments, parameters, ranks)?)),
            Device::Cuda(cuda) => Place::Cuda(Box::new(on_gpu::OnGpu::new(segments, parameters, cuda, ranks)?)),
        };
        Ok(Self { place, whole: None })
    }

    fn ranks(&self) -> &Ranks {
        match &self.place {
            Place::Cpu(shard) => &shard.ranks,
            Place::Cuda(shard) => shard.ranks(),
        }
    }

    /// One update, which all ranks make together; see [`crate::Optimizer::step`].
    pub(crate) fn step(
        &mut self,
        method: Method,
        parameters: &mut Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        match &mut self.place {
            Place::Cpu(shard) => shard.step(method, parameters, gradients, update, clip),
            Place::Cuda(shard) => shard.step(method, parameters, gradients, update, clip),
        }
    }

    /// Makes room for the moments of all on rank 0, which then may be written.
    pub(crate) fn make_whole(&mut self, parameters: &Parameters) -> Result<()> {
        if self.ranks().rank() == 0 && self.whole.is_none() {
            let zeros = || Tensor::zeros(parameters.device(), parameters.flat().shape(), DType::F32);
            self.whole = Some([zeros()?, zeros()?]);
        }
        Ok(())
    }

    /// Brings the moments of all to rank 0.
    pub(crate) fn collect(&mut self, parameters: &Parameters) -> Result<()> {
        self.make_whole(parameters)?;
        match &mut self.place {
            Place::Cpu(shard) => shard.collect(self.whole.as_mut()),
            Place::Cuda(shard) => shard.collect(self.whole.as_ref())?,
        }
        Ok(())
    }

    /// Gives each rank its moments of those that rank 0 has.
    pub(crate) fn distribute(&mut self) -> Result<()> {
        match &mut self.place {
            Place::Cpu(shard) => shard.distribute(self.whole.as_ref()),
            Place::Cuda(shard) => shard.distribute(self.whole.as_ref())?,
        }
        self.whole = None;
        Ok(())
    }
}

impl OnCpu {
    fn new(segments: &[Segment], parameters: &Parameters, ranks: Arc<Ranks>) -> Result<Self> {
        if !ranks.moves_host_memory() {
            let why = "ranks on CPUs exchange data over MPI, and these have NCCL alone: start them with mpirun or srun";
            return Err(TensorError::Unsupported { operation: "optimizer", why });
        }
        let len = parameters.flat().shape().elements();
        let (Shards { elements, chunks, sums }, plans) = Shards::new(segments, len, &ranks);
        let plan = plans[ranks.rank()].clone();
        let own = elements[ranks.rank()].len();
        Ok(Self {
            moments: [vec![0.0; own], vec![0.0; own]],
            received: vec![0.0; own * (ranks.size() - 1)],
            squares: vec![0.0; len.div_ceil(CHUNK)],
            squares_of: in_bytes(&chunks, 8),
            sums: vec![0.0; plan.sums()],
            sums_of: in_bytes(&sums, 8),
            plan,
            shards: elements,
            ranks,
        })
    }

    fn own(&self) -> Range<usize> {
        self.shards[self.ranks.rank()].clone()
    }

    fn step(
        &mut self,
        method: Method,
        parameters: &mut Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        let device = parameters.device().clone();
        let Device::Cpu(cpu) = &device else {
            return Err(TensorError::Unsupported {
                operation: "optimizer",
                why: "its shard is in the memory of the host",
            });
        };
        let cpu = &cpu.kernels;
        let (own, mut g, mut p) = (self.own(), gradients.flat().clone(), parameters.flat().clone());
        {
            let _timer = device.timer(Kind::AllToAll, 0, &[&g]);
            self.exchange(g.slice());
        }
        {
            let _timer = device.timer(Kind::AddRanks, 0, &[&g]);
            self.sum_own(cpu, g.slice_mut());
        }
        let g = &g.slice::<f32>()[own.clone()];
        let norm = {
            let _timer = device.timer(Kind::GradientNorm, 0, &[]);
            self.norm(cpu, g) * update.gradient_scale
        };
        if !norm.is_finite() {
            return Ok(Reading::one(norm));
        }
        let mut update = *update;
        update.gradient_scale *= crate::optimizer::clipping(clip, norm);
        let mut copy = parameters.flat_copy().cloned();
        {
            let _timer = device.timer(Kind::Optimizer, 0, &[]);
            let copy = copy.as_mut().map(|copy| &mut copy.slice_mut()[own.clone()]);
            self.update(cpu, method, &mut p.slice_mut::<f32>()[own], g, &update, copy)?;
        }
        let _timer = device.timer(Kind::AllGather, 0, &[&p]);
        self.ranks.all_gather(bytemuck::cast_slice_mut(p.slice_mut::<f32>()), &in_bytes(&self.shards, 4));
        if let Some(copy) = &mut copy {
            cast::to_bf16(cpu, p.slice(), copy.slice_mut());
        }
        Ok(Reading::one(norm))
    }

    /// Sends what this rank has of the others' shards, and receives what they have of its own.
    fn exchange(&mut self, values: &[f32]) {
        let (rank, size, own) = (self.ranks.rank(), self.ranks.size(), self.own());
        let others = || (0..size).filter(|other| *other != rank);
        let sends: Vec<(usize, &[u8])> = others()
            .filter(|other| !self.shards[*other].is_empty())
            .map(|other| (other, bytemuck::cast_slice(&values[self.shards[other].clone()])))
            .collect();
        let pieces = self.received.chunks_mut(own.len().max(1));
        let mut receives: Vec<(usize, &mut [u8])> =
            others().zip(pieces).map(|(other, piece)| (other, bytemuck::cast_slice_mut(piece))).collect();
        self.ranks.exchange(&sends, &mut receives);
    }

    /// Adds what was received of the own shard to `values`, in the tree over ranks.
    fn sum_own(&mut self, cpu: &Cpu, values: &mut [f32]) {
        let (rank, size, own) = (self.ranks.rank(), self.ranks.size(), self.own());
        if own.is_empty() {
            return;
        }
        let mut pieces: Vec<&mut [f32]> = self.received.chunks_mut(own.len()).collect();
        pieces.insert(rank, &mut values[own]);
        // As in a binary counter; the lower of two takes their sum.
        let mut waiting: Vec<usize> = Vec::new();
        for i in 0..size {
            waiting.push(i);
            let complete = if i + 1 == size { waiting.len() - 1 } else { i.trailing_ones() as usize };
            for _ in 0..complete {
                let (Some(later), Some(&earlier)) = (waiting.pop(), waiting.last()) else { break };
                let (left, right) = pieces.split_at_mut(later);
                rows::add(cpu, &*right[0], &mut *left[earlier]);
            }
        }
        if rank > 0 {
            let (left, right) = pieces.split_at_mut(rank);
            right[0].copy_from_slice(left[0]);
        }
    }

    /// The norm of all gradients, of which this rank has a shard.
    fn norm(&mut self, cpu: &Cpu, shard: &[f32]) -> f64 {
        let own = &self.squares_of[self.ranks.rank()];
        reduce::squares_of_chunks(cpu, shard, &mut self.squares[own.start / 8..own.end / 8]);
        self.ranks.all_gather(bytemuck::cast_slice_mut(&mut self.squares), &self.squares_of);
        self.squares.iter().sum::<f64>().sqrt()
    }

    fn update(
        &mut self,
        cpu: &Cpu,
        method: Method,
        p: &mut [f32],
        g: &[f32],
        update: &Update,
        copy: Option<&mut [crate::bf16]>,
    ) -> Result<()> {
        let Self { ranks, plan, moments: [first, second], sums, sums_of, .. } = self;
        let rule = match method {
            Method::AdamW => {
                kernels::adamw(cpu, plan, p, g, first, second, update, copy);
                return Ok(());
            }
            Method::Lamb => TwoPasses::Lamb,
            Method::StableAdamW => TwoPasses::StableAdamW,
            Method::Adafactor(_) => return Err(alone("adafactor")),
            Method::Adagrad(_) => return Err(alone("adagrad")),
            Method::Sgd => return Err(alone("sgd")),
        };
        kernels::first_pass(cpu, plan, rule, p, g, first, second, update, sums);
        ranks.all_gather(bytemuck::cast_slice_mut(sums), sums_of);
        kernels::second_pass(cpu, plan, rule, p, first, second, update, sums, copy);
        Ok(())
    }

    fn collect(&mut self, mut whole: Option<&mut [Tensor; 2]>) {
        let own = self.own();
        for (i, moment) in self.moments.iter_mut().enumerate() {
            match &mut whole {
                Some(whole) => {
                    let whole = whole[i].slice_mut::<f32>();
                    whole[own.clone()].copy_from_slice(moment);
                    let mut receives: Vec<(usize, &mut [u8])> = split(whole, &self.shards);
                    self.ranks.exchange(&[], &mut receives);
                }
                None if own.is_empty() => {}
                None => self.ranks.exchange(&[(0, bytemuck::cast_slice(moment))], &mut []),
            }
        }
    }

    fn distribute(&mut self, whole: Option<&[Tensor; 2]>) {
        let own = self.own();
        for (i, moment) in self.moments.iter_mut().enumerate() {
            match whole {
                Some(whole) => {
                    let whole = whole[i].slice::<f32>();
                    moment.copy_from_slice(&whole[own.clone()]);
                    let shards = self.shards.iter().enumerate().skip(1).filter(|(_, shard)| !shard.is_empty());
                    let sends: Vec<(usize, &[u8])> =
                        shards.map(|(rank, shard)| (rank, bytemuck::cast_slice(&whole[shard.clone()]))).collect();
                    self.ranks.exchange(&sends, &mut []);
                }
                None if own.is_empty() => {}
                None => self.ranks.exchange(&[], &mut [(0, bytemuck::cast_slice_mut(moment))]),
            }
        }
    }
}

/// The shards of all ranks but the first, where they are not empty.
fn split<'a>(mut rest: &'a mut [f32], shards: &[Range<usize>]) -> Vec<(usize, &'a mut [u8])> {
    let mut pieces = Vec::new();
    for (rank, shard) in shards.iter().enumerate() {
        let (piece, behind) = std::mem::take(&mut rest).split_at_mut(shard.len());
        rest = behind;
        if rank > 0 && !piece.is_empty() {
            pieces.push((rank, bytemuck::cast_slice_mut(piece)));
        }
    }
    pieces
}

impl Parameters {
    /// Sets all parameters to those of rank 0.
    pub fn take_from_first(&mut self, ranks: &Arc<Ranks>) -> Result<()> {
        match self.device() {
            Device::Cpu(_) => {
                let mut values = self.flat().clone();
                ranks.broadcast(bytemuck::cast_slice_mut(values.slice_mut::<f32>()));
            }
            Device::Cuda(cuda) => cuda.wires(ranks)?.broadcast(&cuda.gpu, self.flat().on_gpu())?,
        }
        self.refresh()
    }
}

/// What is said of a rule that no ranks can share.
pub(crate) fn alone(operation: &'static str) -> TensorError {
    let why = "it is for one process alone so far: use adamw, stable-adamw or lamb with several ranks";
    TensorError::Unsupported { operation, why }
}
