//! A shard in the memory of a GPU. As on the CPU, but for who waits: nothing of a step does, unless its data goes through the host.

use std::ops::Range;
use std::sync::Arc;

use henson_kernels::cpu::optimizer::{Segment, TwoPasses};
use henson_kernels::cpu::reduce::CHUNK;
use henson_kernels::cuda::optimizer::{self as kernels, Control, FACTORS, NORM, Plan, Rule};
use henson_kernels::cuda::{self as cuda_kernels, Buffer, View, cast, reduce, rows};
use henson_ranks::Ranks;

use super::{Shards, alone};
use crate::cuda::CudaDevice;
use crate::wires::Wires;
use crate::{DType, Gradients, Kind, Method, Parameters, Reading, Result, Tensor, Update};

pub(super) struct OnGpu {
    ranks: Arc<Ranks>,
    wires: Arc<Wires>,
    cuda: Arc<CudaDevice>,
    segments: Vec<Segment>,
    /// Elements of the flat buffers.
    len: usize,
    shards: Shards,
    /// The moments of the own shard.
    moments: [Tensor; 2],
    /// What the other ranks have of the own shard.
    received: Buffer,
    /// Of each chunk of the gradients, and of all.
    squares: Buffer,
    total: Buffer,
    control: Buffer,
    /// The norm stands among them, so it is read from here.
    factors: Tensor,
    /// Made at the first step, when the constants are known.
    work: Option<Work>,
}

struct Work {
    rule: Rule,
    plan: Plan,
    /// What rates of tensors depend on.
    sums: Buffer,
}

/// Room for `len` numbers; there is none for nothing.
fn room(cuda: &CudaDevice, len: usize, dtype: cuda_kernels::DType) -> Result<Buffer> {
    Ok(cuda.gpu.zeros(len.max(1), dtype)?)
}

impl OnGpu {
    pub(super) fn new(
        segments: &[Segment],
        parameters: &Parameters,
        cuda: &Arc<CudaDevice>,
        ranks: Arc<Ranks>,
    ) -> Result<Self> {
        let wires = cuda.wires(&ranks)?;
        let len = parameters.flat().shape().elements();
        let (shards, _) = Shards::new(segments, len, &ranks);
        let own = shards.elements[ranks.rank()].len();
        let moments = || Tensor::zeros(parameters.device(), [own.max(1)], DType::F32);
        let (f32, f64) = (cuda_kernels::DType::F32, cuda_kernels::DType::F64);
        Ok(Self {
            moments: [moments()?, moments()?],
            received: room(cuda, own * (ranks.size() - 1), f32)?,
            squares: room(cuda, len.div_ceil(CHUNK), f64)?,
            total: room(cuda, 1, f64)?,
            control: room(cuda, 4, f64)?,
            factors: Tensor::zeros(parameters.device(), [FACTORS], DType::F32)?,
            work: None,
            segments: segments.to_vec(),
            cuda: Arc::clone(cuda),
            len,
            shards,
            wires,
            ranks,
        })
    }

    pub(super) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    fn own(&self) -> Range<usize> {
        self.shards.elements[self.ranks.rank()].clone()
    }

    /// See [`crate::Optimizer::step`].
    pub(super) fn step(
        &mut self,
        method: Method,
        parameters: &mut Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        let rule = Rule {
            beta1: update.beta1,
            beta2: update.beta2,
            epsilon: update.epsilon,
            weight_decay: update.weight_decay,
        };
        let own = self.own();
        if self.work.as_ref().is_none_or(|work| work.rule != rule) {
            let plan = Plan::of_range(&self.cuda.gpu, rule, &self.segments, self.len, own.clone())?;
            let sums = room(&self.cuda, plan.sums(), cuda_kernels::DType::F64)?;
            self.work = Some(Work { rule, plan, sums });
        }
        let Some(work) = &self.work else { unreachable!("made above") };
        let device = parameters.device().clone();
        let (gpu, wires, shards) = (&self.cuda.gpu, &self.wires, &self.shards);
        let (g, p) = (gradients.flat(), parameters.flat());
        {
            let _timer = device.timer(Kind::AllToAll, 0, &[g]);
            self.exchange(g.on_gpu())?;
        }
        let [own_g, own_p] = [g, p].map(|tensor| tensor.on_gpu().part(own.start, own.len()));
        {
            let _timer = device.timer(Kind::AddRanks, 0, &[g]);
            if !own.is_empty() && self.ranks.size() > 1 {
                let received = self.received.view().part(0, own.len() * (self.ranks.size() - 1));
                reduce::add_shards(gpu, own_g, received, self.ranks.rank(), self.ranks.size())?;
            }
        }
        {
            let _timer = device.timer(Kind::GradientNorm, 0, &[]);
            let chunks = &shards.chunks[self.ranks.rank()];
            if !own.is_empty() {
                reduce::squares_of_chunks(gpu, own_g, self.squares.view().part(chunks.start, chunks.len()))?;
            }
            wires.all_gather(gpu, self.squares.view(), &shards.chunks)?;
            reduce::add_squares(gpu, self.squares.view(), self.total.view())?;
        }
        {
            let _timer = device.timer(Kind::Optimizer, 0, &[]);
            let control = Control {
                learning_rate: update.learning_rate,
                bias_correction: update.bias_correction,
                clip,
                gradient_scale: update.gradient_scale,
            };
            rows::set(gpu, self.control.view(), &control.numbers())?;
            let factors = self.factors.on_gpu();
            kernels::prepare(gpu, &work.rule, self.control.view(), Some(self.total.view()), factors)?;
            let [m, v] = [0, 1].map(|i| self.moments[i].on_gpu().part(0, own.len()));
            let (plan, sums) = (&work.plan, work.sums.view().part(0, work.plan.sums()));
            let two_passes = |rule: TwoPasses| -> Result<()> {
                kernels::first_pass(gpu, plan, rule, [own_p, own_g, m, v], factors, sums)?;
                wires.all_gather(gpu, sums, &shards.sums)?;
                Ok(kernels::second_pass(gpu, plan, rule, [own_p, m, v], factors, sums, None)?)
            };
            match method {
                Method::AdamW => kernels::adamw(gpu, plan, own_p, own_g, m, v, factors, None)?,
                Method::Lamb => two_passes(TwoPasses::Lamb)?,
                Method::StableAdamW => two_passes(TwoPasses::StableAdamW)?,
                Method::Adafactor(_) => return Err(alone("adafactor")),
                Method::Adagrad(_) => return Err(alone("adagrad")),
                Method::Sgd => return Err(alone("sgd")),
            }
        }
        {
            let _timer = device.timer(Kind::AllGather, 0, &[p]);
            wires.all_gather(gpu, p.on_gpu(), &shards.elements)?;
            if let Some(copy) = parameters.flat_copy() {
                cast::to_bf16(gpu, p.on_gpu(), copy.on_gpu())?;
            }
        }
        device.read_later(&[&self.factors.view(NORM, [1].into())])
    }

    /// Sends what this rank has of the others' shards, and receives what they have of its own.
    fn exchange(&self, values: View<'_>) -> Result<()> {
        let (own, received) = (self.own(), self.received.view());
        let shard = |rank: usize| values.part(self.shards.elements[rank].start, self.shards.elements[rank].len());
        let sends: Vec<_> =
            self.wires.others().map(|rank| (rank, shard(rank))).filter(|(_, shard)| !shard.is_empty()).collect();
        let pieces = self.wires.others().enumerate().filter(|_| !own.is_empty());
        let receives: Vec<_> = pieces.map(|(i, rank)| (rank, received.part(i * own.len(), own.len()))).collect();
        self.wires.exchange(&self.cuda.gpu, &sends, &receives)
    }

    /// Brings the moments of all to rank 0, into `whole` there.
    pub(super) fn collect(&self, whole: Option<&[Tensor; 2]>) -> Result<()> {
        let (gpu, own) = (&self.cuda.gpu, self.own());
        for (i, moment) in self.moments.iter().enumerate() {
            let moment = moment.on_gpu().part(0, own.len());
            match whole {
                Some(whole) => {
                    let whole = whole[i].on_gpu();
                    gpu.copy(moment, whole.part(own.start, own.len()))?;
                    self.wires.exchange(gpu, &[], &self.of_others(whole))?;
                }
                None if own.is_empty() => {}
                None => self.wires.exchange(gpu, &[(0, moment)], &[])?,
            }
        }
        Ok(())
    }

    /// Gives each rank its moments of those that rank 0 has.
    pub(super) fn distribute(&self, whole: Option<&[Tensor; 2]>) -> Result<()> {
        let (gpu, own) = (&self.cuda.gpu, self.own());
        for (i, moment) in self.moments.iter().enumerate() {
            let moment = moment.on_gpu().part(0, own.len());
            match whole {
                Some(whole) => {
                    let whole = whole[i].on_gpu();
                    gpu.copy(whole.part(own.start, own.len()), moment)?;
                    self.wires.exchange(gpu, &self.of_others(whole), &[])?;
                }
                None if own.is_empty() => {}
                None => self.wires.exchange(gpu, &[], &[(0, moment)])?,
            }
        }
        Ok(())
    }

    /// The shards of all ranks but this one, where they are not empty.
    fn of_others<'a>(&self, whole: View<'a>) -> Vec<(usize, View<'a>)> {
        let shard = |rank: usize| whole.part(self.shards.elements[rank].start, self.shards.elements[rank].len());
        self.wires.others().map(|rank| (rank, shard(rank))).filter(|(_, shard)| !shard.is_empty()).collect()
    }
}
