//! From the vectors of a text's tokens to one, as sentence-transformers has it, and the dense layers that may follow.
//!
//! The three poolings that nearly all models have run on the device. The others, and all that leave a prompt's tokens out, are
//! computed on the host from the vectors of the tokens: few models have them, and they cost little next to the encoder.

use std::sync::Arc;

use henson_tensor as tensor;

/// How the vectors of a sequence's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The first token's.
    First,
    /// The largest of each column.
    Max,
    /// The mean.
    Mean,
    /// The sum, divided by the square root of the number of tokens.
    MeanSqrtLength,
    /// The mean, the first token counting once, the second twice, and so on.
    WeightedMean,
    /// The last token's.
    Last,
}

impl Pooling {
    /// All of them, in the order in which sentence-transformers puts them side by side where a config has a flag for each.
    pub const ALL: [Pooling; 6] =
        [Pooling::First, Pooling::Max, Pooling::Mean, Pooling::MeanSqrtLength, Pooling::WeightedMean, Pooling::Last];

    /// Its name in today's configs (`pooling_mode`).
    pub fn name(self) -> &'static str {
        match self {
            Pooling::First => "cls",
            Pooling::Max => "max",
            Pooling::Mean => "mean",
            Pooling::MeanSqrtLength => "mean_sqrt_len_tokens",
            Pooling::WeightedMean => "weightedmean",
            Pooling::Last => "lasttoken",
        }
    }

    /// Its flag in older ones.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Pooling::First => "pooling_mode_cls_token",
            Pooling::Max => "pooling_mode_max_tokens",
            Pooling::Mean => "pooling_mode_mean_tokens",
            Pooling::MeanSqrtLength => "pooling_mode_mean_sqrt_len_tokens",
            Pooling::WeightedMean => "pooling_mode_weightedmean_tokens",
            Pooling::Last => "pooling_mode_lasttoken",
        }
    }

    /// What the device computes for it, if it can.
    pub(crate) fn on_device(self) -> Option<tensor::Pooling> {
        match self {
            Pooling::First => Some(tensor::Pooling::First),
            Pooling::Max => Some(tensor::Pooling::Max),
            Pooling::Mean | Pooling::MeanSqrtLength => Some(tensor::Pooling::Mean),
            Pooling::WeightedMean | Pooling::Last => None,
        }
    }

    /// What the device's pooling of so many tokens is multiplied by.
    pub fn factor(self, tokens: usize) -> f32 {
        if self == Pooling::MeanSqrtLength { (tokens as f32).sqrt() } else { 1.0 }
    }

    /// One vector from rows of `width` numbers, without the first `skip` of them. Where none is left, the first row is the
    /// first token's and all else 0.
    pub fn of_rows(self, rows: &[f32], width: usize, skip: usize) -> Vec<f32> {
        let row = |i: usize| rows.get(i * width..(i + 1) * width).map(<[f32]>::to_vec);
        let count = rows.len().checked_div(width).unwrap_or(0);
        let left = rows.chunks_exact(width.max(1)).enumerate().skip(skip);
        let zeros = || vec![0.0; width];
        match self {
            Pooling::First => row(if skip < count { skip } else { 0 }).unwrap_or_else(zeros),
            Pooling::Last if skip < count => row(count - 1).unwrap_or_else(zeros),
            Pooling::Last => zeros(),
            Pooling::Max => {
                let largest = |a: Vec<f32>, b: Vec<f32>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
                left.map(|(_, row)| row.to_vec()).reduce(largest).unwrap_or_else(zeros)
            }
            Pooling::Mean | Pooling::MeanSqrtLength | Pooling::WeightedMean => {
                let (mut sum, mut weights) = (vec![0.0_f64; width], 0.0_f64);
                for (i, row) in left {
                    let weight = if self == Pooling::WeightedMean { (i + 1) as f64 } else { 1.0 };
                    weights += weight;
                    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += weight * f64::from(*x));
                }
                let divisor = if self == Pooling::MeanSqrtLength { weights.sqrt() } else { weights };
                sum.into_iter().map(|sum| (sum / divisor.max(1e-9)) as f32).collect()
            }
        }
    }
}

/// What follows the pooling.
#[derive(Clone, Debug, PartialEq)]
pub enum Layer {
    /// A dense layer.
    Dense(Arc<Dense>),
    /// The vector gets the length 1.
    Normalise,
}

/// A function of single numbers, as PyTorch calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The number itself.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// 1 / (1 + e⁻ˣ).
    Sigmoid,
    /// Nothing below 0.
    Relu,
    /// x / (1 + e⁻ˣ).
    Silu,
    /// x·Φ(x), Φ the normal distribution, as `torch.nn.GELU` has it by default.
    Gelu,
}

impl Activation {
    const NAMES: [(&'static str, Activation); 6] = [
        ("Identity", Activation::Identity),
        ("Tanh", Activation::Tanh),
        ("Sigmoid", Activation::Sigmoid),
        ("ReLU", Activation::Relu),
        ("SiLU", Activation::Silu),
        ("GELU", Activation::Gelu),
    ];

    /// The class of PyTorch with this full name, such as `torch.nn.modules.activation.Tanh`. Code of other packages is never
    /// run, so other names are errors.
    pub(crate) fn of_class(name: &str) -> Result<Self, String> {
        let class = name.strip_prefix("torch.nn.").and_then(|rest| rest.rsplit('.').next());
        let known = Self::NAMES.iter().find(|(known, _)| Some(*known) == class);
        known.map(|(_, activation)| *activation).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            format!("the activation `{name}` is not supported: those of torch.nn that are, are {names}")
        })
    }

    /// Its value.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Activation::Identity => x,
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        }
    }
}

/// The error function, by 2/√π·e^(−z²)·Σ 2ⁿz²ⁿ⁺¹/(2n+1)!!, whose terms all have one sign. Beyond 6 it is 1 to the last bit.
fn erf(z: f64) -> f64 {
    if z.is_nan() || z.abs() > 6.0 {
        return z.signum();
    }
    let (mut sum, mut term, mut n) = (z, z, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        term *= 2.0 * z * z / (2.0 * n + 1.0);
        (sum, n) = (sum + term, n + 1.0);
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp() * sum
}

/// activation(W·x + b), with x or R·x added where there is a residual.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// Numbers that come in.
    pub(crate) inputs: usize,
    /// Numbers that go out.
    pub(crate) outputs: usize,
    /// outputs×inputs.
    pub(crate) weight: Vec<f32>,
    /// Outputs, or none.
    pub(crate) bias: Vec<f32>,
    pub(crate) activation: Activation,
    pub(crate) residual: Residual,
}

/// What is added to a dense layer's output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Residual {
    None,
    /// The input itself.
    Input,
    /// outputs×inputs, without a bias.
    Matrix(Vec<f32>),
}

impl Dense {
    pub(crate) fn apply(&self, x: &[f32]) -> Vec<f32> {
        let row = |weight: &[f32], i: usize| {
            let row = &weight[i * self.inputs..(i + 1) * self.inputs];
            row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>()
        };
        let output = |i: usize| {
            let sum = row(&self.weight, i) + f64::from(self.bias.get(i).copied().unwrap_or(0.0));
            let residual = match &self.residual {
                Residual::None => 0.0,
                Residual::Input => f64::from(x[i]),
                Residual::Matrix(weight) => row(weight, i),
            };
            // Finite numbers stay so, however large they are.
            (self.activation.apply(sum) + residual).clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
        };
        (0..self.outputs).map(output).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poolings_of_rows() {
        let rows = [1.0, -4.0, 3.0, 0.0, 5.0, 10.0];
        let check = |pooling: Pooling, skip, expected: [f32; 2]| {
            let got = pooling.of_rows(&rows, 2, skip);
            let near = got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-6);
            assert!(near && got.len() == 2, "{pooling:?} without {skip}: {got:?}, not {expected:?}");
        };
        check(Pooling::First, 0, [1.0, -4.0]);
        check(Pooling::First, 1, [3.0, 0.0]);
        check(Pooling::First, 3, [1.0, -4.0]);
        check(Pooling::Last, 1, [5.0, 10.0]);
        check(Pooling::Last, 3, [0.0, 0.0]);
        check(Pooling::Max, 0, [5.0, 10.0]);
        check(Pooling::Max, 4, [0.0, 0.0]);
        check(Pooling::Mean, 0, [3.0, 2.0]);
        check(Pooling::Mean, 1, [4.0, 5.0]);
        check(Pooling::Mean, 3, [0.0, 0.0]);
        check(Pooling::MeanSqrtLength, 2, [5.0, 10.0]);
        check(Pooling::MeanSqrtLength, 1, [8.0 / 2.0_f32.sqrt(), 10.0 / 2.0_f32.sqrt()]);
        check(Pooling::WeightedMean, 0, [22.0 / 6.0, 26.0 / 6.0]);
        check(Pooling::WeightedMean, 1, [21.0 / 5.0, 6.0]);
    }

    /// Values of `torch.nn.GELU()` in f64.
    #[test]
    fn gelu_is_torchs() {
        let known = [
            (-30.0, 0.0),
            (-2.0, -0.045500263896358445),
            (-0.1, -0.0460172162722971),
            (0.0, 0.0),
            (0.5, 0.34573123063700656),
            (3.0, 2.9959503059051),
            (9.0, 9.0),
        ];
        for (x, expected) in known {
            let got = Activation::Gelu.apply(x);
            assert!((got - expected).abs() < 1e-14, "{x}: {got}, not {expected}");
        }
        assert!(Activation::Gelu.apply(f64::NAN).is_nan());
    }

    #[test]
    fn dense_layers() {
        let dense = |activation, residual| {
            let (weight, bias) = (vec![1.0, 2.0, -1.0, 0.0], vec![0.5, 0.0]);
            Dense { inputs: 2, outputs: 2, weight, bias, activation, residual }.apply(&[2.0, -1.0])
        };
        assert_eq!(dense(Activation::Identity, Residual::None), [0.5, -2.0]);
        assert_eq!(dense(Activation::Relu, Residual::Input), [2.5, -1.0]);
        assert_eq!(dense(Activation::Relu, Residual::Matrix(vec![0.0, 1.0, 1.0, 1.0])), [-0.5, 1.0]);
        assert_eq!(dense(Activation::Tanh, Residual::None)[0], 0.5_f32.tanh());
        assert_eq!(Activation::of_class("torch.nn.modules.linear.Identity"), Ok(Activation::Identity));
        assert_eq!(Activation::of_class("torch.nn.modules.activation.GELU"), Ok(Activation::Gelu));
        for name in ["torch.nn.modules.activation.Softplus", "os.Tanh", "Tanh", "", "torch.nn."] {
            assert!(Activation::of_class(name).unwrap_err().contains(name), "{name}");
        }
    }
}
