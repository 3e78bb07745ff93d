//! A conditional random field on the logits of tokens: the loss in training, the best labels and their probabilities after it.
//!
//! Legend: T tokens, K labels.

use henson_kernels::cpu::crf::{self as kernels, Field, Gradients, Legal};
use henson_kernels::cuda::crf as cuda_kernels;

use super::{Op, with_float};
use crate::tape::Backward;
use crate::{DType, Device, Kind, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "crf";

/// The parameters of a field, by the names of the `pytorch-crf` package.
#[derive(Clone, Copy, Debug)]
pub struct CrfParams {
    /// K.
    pub start_transitions: Param,
    /// K.
    pub end_transitions: Param,
    /// K×K, from row to column.
    pub transitions: Param,
}

impl CrfParams {
    fn labels(&self) -> usize {
        self.start_transitions.shape().elements()
    }

    fn field<'a>(&self, parameters: &'a Parameters) -> Field<'a> {
        Field {
            start: parameters.slice(self.start_transitions),
            end: parameters.slice(self.end_transitions),
            transitions: parameters.slice(self.transitions),
        }
    }

    /// Start, end and transitions.
    fn vectors(&self, parameters: &Parameters) -> [Tensor; 3] {
        [self.start_transitions, self.end_transitions, self.transitions].map(|param| parameters.vector(param))
    }

    fn check(&self, logits: &Tensor, layout: &Layout) -> Result<()> {
        let k = self.labels();
        for (param, expected) in [(self.end_transitions, [k].into()), (self.transitions, [k, k].into())] {
            let got = param.shape();
            if got != expected || k == 0 {
                return Err(TensorError::Shape { operation: OPERATION, what: "a parameter", expected, got });
            }
        }
        logits.check_shape(OPERATION, "the logits", [layout.tokens(), k])
    }
}

/// Which labels may begin and end a sequence, and follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegalSteps {
    /// K.
    pub start: Vec<bool>,
    /// K.
    pub end: Vec<bool>,
    /// K×K, from row to column.
    pub transitions: Vec<bool>,
}

impl Pass<'_> {
    /// scale·Σ over sequences of −ln of the probability of their labels (T, u32).
    pub fn crf_loss(
        &mut self,
        logits: Var,
        crf: &CrfParams,
        layout: &Layout,
        labels: &Tensor,
        scale: f32,
    ) -> Result<Tensor> {
        let k = crf.labels();
        self.reads(&(crf, scale));
        crf.check(logits.tensor(), layout)?;
        labels.check_shape(OPERATION, "labels", [layout.tokens()])?;
        labels.check_dtype(OPERATION, "labels", DType::U32)?;
        super::rows::check_indices(OPERATION, "label", self.device(), labels, k)?;
        let parameters = self.parameters();
        let mut gradients = match logits.slot() {
            Some(_) => {
                let zeros = |n: usize| Tensor::zeros(self.device(), [n], DType::F32);
                Some([zeros(k)?, zeros(k)?, zeros(k * k)?])
            }
            None => None,
        };
        let loss = self.replace_by_gradient(logits, |device, logits, _, loss| {
            match device {
                Device::Cpu(cpu) => with_float!(logits.dtype(), E => {
                    let to = gradients.as_mut().map(|[start, end, transitions]| Gradients {
                        start: start.slice_mut(),
                        end: end.slice_mut(),
                        transitions: transitions.slice_mut(),
                    });
                    let (logits, offsets) = (logits.slice_mut::<E>(), layout.offsets());
                    let (field, labels) = (crf.field(parameters), labels.slice());
                    loss.slice_mut::<f32>()[0] =
                        kernels::loss(&cpu.kernels, &field, logits, offsets, labels, scale, to);
                }),
                Device::Cuda(cuda) => {
                    let (vectors, to) = (crf.vectors(parameters), gradients.as_ref().map(on_gpu));
                    let (x, offsets) = (logits.on_gpu(), layout.offsets_on_gpu()?.on_gpu());
                    let (field, labels, loss) = (on_gpu(&vectors), labels.on_gpu(), loss.on_gpu());
                    cuda_kernels::loss(&cuda.gpu, &field, x, offsets, labels, scale, to.as_ref(), loss)?;
                }
            }
            Ok(())
        })?;
        if let Some(gradients) = gradients {
            self.record(Op::Crf(Recorded { crf: *crf, gradients }));
        }
        Ok(loss)
    }

    /// The likeliest labels of each sequence; with `legal`, of those that have as few illegal steps as there can be.
    pub fn crf_best(
        &mut self,
        logits: &Var,
        crf: &CrfParams,
        layout: &Layout,
        legal: Option<&LegalSteps>,
    ) -> Result<Vec<u32>> {
        let k = crf.labels();
        crf.check(logits.tensor(), layout)?;
        let fits = |legal: &LegalSteps| [&legal.start, &legal.end, &legal.transitions].map(Vec::len) == [k, k, k * k];
        if !legal.is_none_or(fits) {
            let why = "the legal steps are those of another number of labels";
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let _timer = self.device().timer(Kind::Loss, 0, &[logits.tensor()]);
        match self.device() {
            Device::Cpu(cpu) => {
                let legal =
                    legal.map(|legal| Legal { start: &legal.start, end: &legal.end, transitions: &legal.transitions });
                let (field, mut out) = (crf.field(self.parameters()), vec![0; layout.tokens()]);
                with_float!(logits.tensor().dtype(), E => {
                    let (logits, offsets) = (logits.tensor().slice::<E>(), layout.offsets());
                    kernels::best(&cpu.kernels, &field, legal, logits, offsets, &mut out);
                });
                Ok(out)
            }
            Device::Cuda(cuda) => {
                let legal = legal.map(|legal| {
                    let steps = legal.start.iter().chain(&legal.end).chain(&legal.transitions);
                    let steps: Vec<u32> = steps.map(|legal| u32::from(*legal)).collect();
                    Tensor::from_slice(self.device(), [steps.len()], &steps)
                });
                let legal = legal.transpose()?;
                let out = Tensor::zeros(self.device(), [layout.tokens()], DType::U32)?;
                let (vectors, x) = (crf.vectors(self.parameters()), logits.tensor().on_gpu());
                let (offsets, legal) = (layout.offsets_on_gpu()?.on_gpu(), legal.as_ref().map(Tensor::on_gpu));
                cuda_kernels::best(&cuda.gpu, &on_gpu(&vectors), legal, x, offsets, out.on_gpu())?;
                out.to_vec::<u32>()
            }
        }
    }

    /// How likely each label of each token is: T×K in f32.
    pub fn crf_probabilities(&mut self, logits: &Var, crf: &CrfParams, layout: &Layout) -> Result<Tensor> {
        crf.check(logits.tensor(), layout)?;
        let mut out = Tensor::empty(self.device(), logits.tensor().shape(), DType::F32)?;
        let _timer = self.device().timer(Kind::Loss, 0, &[logits.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(logits.tensor().dtype(), E => {
                let (field, logits, offsets) =
                    (crf.field(self.parameters()), logits.tensor().slice::<E>(), layout.offsets());
                kernels::probabilities(&cpu.kernels, &field, logits, offsets, out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let (vectors, x) = (crf.vectors(self.parameters()), logits.tensor().on_gpu());
                let offsets = layout.offsets_on_gpu()?.on_gpu();
                cuda_kernels::probabilities(&cuda.gpu, &on_gpu(&vectors), x, offsets, out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

/// Start, end and transitions of a field, or of its gradients, as kernels take them.
fn on_gpu([start, end, transitions]: &[Tensor; 3]) -> cuda_kernels::Field<'_> {
    cuda_kernels::Field { start: start.on_gpu(), end: end.on_gpu(), transitions: transitions.on_gpu() }
}

/// A recorded loss: the gradients of its parameters are known since the forward.
pub(crate) struct Recorded {
    crf: CrfParams,
    gradients: [Tensor; 3],
}

impl Recorded {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let params = [self.crf.start_transitions, self.crf.end_transitions, self.crf.transitions];
        for (param, gradient) in params.into_iter().zip(&self.gradients) {
            let mut to = back.gradients.sum(param)?;
            super::add(back.device(), gradient, &mut to)?;
        }
        Ok(())
    }
}
