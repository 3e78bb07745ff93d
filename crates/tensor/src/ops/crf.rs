//! A conditional random field on the logits of tokens: the loss in training, the best labels and their probabilities after it.
//!
//! Legend: T tokens, K labels. On a GPU there is no such operation yet.

use henson_kernels::cpu::crf::{self as kernels, Field, Gradients, Legal};

use super::{Op, with_float};
use crate::tape::Backward;
use crate::{DType, Device, Kind, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "crf";
const NO_GPU: TensorError = TensorError::Unsupported {
    operation: OPERATION,
    why: "conditional random fields do not run on a GPU yet: choose the device cpu",
};

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
        let Device::Cpu(cpu) = self.device() else { return Err(NO_GPU) };
        let k = crf.labels();
        self.reads(&(crf, scale));
        crf.check(logits.tensor(), layout)?;
        labels.check_shape(OPERATION, "labels", [layout.tokens()])?;
        labels.check_dtype(OPERATION, "labels", DType::U32)?;
        super::rows::check_indices(OPERATION, "label", self.device(), labels, k)?;
        let field = crf.field(self.parameters());
        let mut gradients = match logits.slot() {
            Some(_) => {
                let zeros = |n: usize| Tensor::zeros(self.device(), [n], DType::F32);
                Some([zeros(k)?, zeros(k)?, zeros(k * k)?])
            }
            None => None,
        };
        let loss = self.replace_by_gradient(logits, |_, logits, _, loss| {
            with_float!(logits.dtype(), E => {
                let to = gradients.as_mut().map(|[start, end, transitions]| Gradients {
                    start: start.slice_mut(),
                    end: end.slice_mut(),
                    transitions: transitions.slice_mut(),
                });
                let (logits, offsets) = (logits.slice_mut::<E>(), layout.offsets());
                loss.slice_mut::<f32>()[0] =
                    kernels::loss(&cpu.kernels, &field, logits, offsets, labels.slice(), scale, to);
            });
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
        let Device::Cpu(cpu) = self.device() else { return Err(NO_GPU) };
        let k = crf.labels();
        crf.check(logits.tensor(), layout)?;
        let fits = |legal: &LegalSteps| [&legal.start, &legal.end, &legal.transitions].map(Vec::len) == [k, k, k * k];
        if !legal.is_none_or(fits) {
            let why = "the legal steps are those of another number of labels";
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let _timer = self.device().timer(Kind::Loss, 0, &[logits.tensor()]);
        let legal = legal.map(|legal| Legal { start: &legal.start, end: &legal.end, transitions: &legal.transitions });
        let (field, mut out) = (crf.field(self.parameters()), vec![0; layout.tokens()]);
        with_float!(logits.tensor().dtype(), E => {
            kernels::best(&cpu.kernels, &field, legal, logits.tensor().slice::<E>(), layout.offsets(), &mut out);
        });
        Ok(out)
    }

    /// How likely each label of each token is: T×K in f32.
    pub fn crf_probabilities(&mut self, logits: &Var, crf: &CrfParams, layout: &Layout) -> Result<Tensor> {
        let Device::Cpu(cpu) = self.device() else { return Err(NO_GPU) };
        crf.check(logits.tensor(), layout)?;
        let mut out = Tensor::empty(self.device(), logits.tensor().shape(), DType::F32)?;
        let _timer = self.device().timer(Kind::Loss, 0, &[logits.tensor(), &out]);
        let field = crf.field(self.parameters());
        with_float!(logits.tensor().dtype(), E => {
            let (logits, offsets) = (logits.tensor().slice::<E>(), layout.offsets());
            kernels::probabilities(&cpu.kernels, &field, logits, offsets, out.slice_mut());
        });
        Ok(out)
    }
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
