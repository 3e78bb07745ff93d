//! One vector for each sequence of a training pass, by any pooling of sentence-transformers, and the way of its gradient.
//!
//! Means, first and last tokens are operations of the tape. The largest values and the weighted mean are computed on the host from the
//! vectors of all tokens, where the backward pass then begins: few models have them, and they cost little next to the encoder.
//!
//! Legend: N sequences, H hidden, P poolings side by side.

use henson_infer::Pooling;
use henson_tensor::{Layout, Pass, Var};
use henson_train::Result;
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How the vectors of a text's tokens become one; several lie side by side. In recipes a name, or a list of names.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[schemars(with = "Vec<String>")]
pub struct Poolings(pub Vec<Pooling>);

impl Poolings {
    /// In the order of the flags that sentence-transformers has for them: whatever order they were named in, a recipe that is read again
    /// means the same.
    pub(crate) fn new(mut poolings: Vec<Pooling>) -> Self {
        poolings.sort_by_key(|pooling| Pooling::ALL.iter().position(|other| other == pooling));
        Self(poolings)
    }
}

impl Serialize for Poolings {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let names: Vec<&str> = self.0.iter().map(|pooling| pooling.name()).collect();
        if let [one] = names[..] { serializer.serialize_str(one) } else { names.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for Poolings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected the name of a pooling, or a list of names")]
        enum Written {
            One(String),
            Several(Vec<String>),
        }
        let names = match Written::deserialize(deserializer)? {
            Written::One(name) => vec![name],
            Written::Several(names) => names,
        };
        let mut poolings = Vec::with_capacity(names.len());
        for name in names {
            let known = Pooling::ALL.into_iter().find(|pooling| pooling.name() == name);
            let unknown =
                || format!("unknown pooling {name:?}: expected {}", Pooling::ALL.map(Pooling::name).join(", "));
            let pooling = known.ok_or_else(|| D::Error::custom(unknown()))?;
            if poolings.contains(&pooling) {
                return Err(D::Error::custom(format!("the pooling {name:?} is there twice")));
            }
            poolings.push(pooling);
        }
        Ok(Self::new(poolings))
    }
}

/// The pooled vectors of a training pass.
pub(crate) struct Pooled {
    parts: Vec<(Pooling, Var)>,
    /// N + 1: where sequences begin, and the end.
    offsets: Vec<usize>,
}

impl Pooled {
    /// Of the last hidden states (T×H).
    pub(crate) fn new(pass: &mut Pass<'_>, last: &Var, layout: &Layout, poolings: &[Pooling]) -> Result<Self> {
        let mut parts = Vec::with_capacity(poolings.len());
        for pooling in poolings {
            let var = match pooling {
                Pooling::Mean | Pooling::MeanSqrtLength => pass.means(last, layout)?,
                Pooling::First => pass.first_tokens(last, layout)?,
                Pooling::Last => pass.last_tokens(last, layout)?,
                Pooling::Max | Pooling::WeightedMean => last.clone(),
            };
            parts.push((*pooling, var));
        }
        Ok(Self { parts, offsets: layout.offsets().iter().map(|offset| *offset as usize).collect() })
    }

    /// N×(P·H).
    pub(crate) fn vectors(&self) -> Result<Vec<f32>> {
        let mut all = Vec::with_capacity(self.parts.len());
        for (pooling, var) in &self.parts {
            let (numbers, h) = (var.tensor().to_f32()?, var.tensor().columns());
            let of = |(i, tokens): (usize, &[usize])| match pooling {
                Pooling::Max | Pooling::WeightedMean => pooling.of_rows(&numbers[tokens[0] * h..tokens[1] * h], h, 0),
                _ => {
                    let factor = pooling.factor(tokens[1] - tokens[0]);
                    numbers[i * h..(i + 1) * h].iter().map(|x| factor * x).collect()
                }
            };
            all.push(self.offsets.windows(2).enumerate().map(of).collect::<Vec<_>>());
        }
        let sequences = self.offsets.len() - 1;
        Ok((0..sequences).flat_map(|i| all.iter().flat_map(move |part| part[i].iter().copied())).collect())
    }

    /// The numbers of a vector.
    pub(crate) fn width(&self) -> usize {
        self.parts.iter().map(|(_, var)| var.tensor().columns()).sum()
    }

    /// Lets the backward pass begin with the gradient of the vectors.
    pub(crate) fn seed(&self, pass: &mut Pass<'_>, gradient: &[f32]) -> Result<()> {
        let (width, mut start) = (self.width(), 0);
        for (pooling, var) in &self.parts {
            let h = var.tensor().columns();
            let mut own = vec![0.0; var.tensor().shape().elements()];
            let numbers = if *pooling == Pooling::Max { var.tensor().to_f32()? } else { Vec::new() };
            for (i, tokens) in self.offsets.windows(2).enumerate() {
                let slopes = &gradient[i * width + start..][..h];
                let range = tokens[0] * h..tokens[1] * h;
                match pooling {
                    Pooling::Max => max_back(&numbers[range.clone()], slopes, &mut own[range]),
                    Pooling::WeightedMean => weighted_back(slopes, &mut own[range]),
                    _ => {
                        let factor = pooling.factor(tokens[1] - tokens[0]);
                        own[i * h..(i + 1) * h].iter_mut().zip(slopes).for_each(|(to, slope)| *to = factor * slope);
                    }
                }
            }
            start += h;
            pass.seed_gradient(var, &own)?;
        }
        Ok(())
    }
}

/// The largest number of each column has all of its gradient; of equal ones the first, as in PyTorch.
fn max_back(rows: &[f32], slopes: &[f32], back: &mut [f32]) {
    let h = slopes.len();
    for (column, slope) in slopes.iter().enumerate() {
        let (mut best, mut most) = (column, f32::NEG_INFINITY);
        for place in (column..rows.len()).step_by(h.max(1)) {
            if rows[place] > most {
                (best, most) = (place, rows[place]);
            }
        }
        back[best] += slope;
    }
}

/// Token i of n has the share (i + 1) / (1 + … + n).
fn weighted_back(slopes: &[f32], back: &mut [f32]) {
    let tokens = back.len() / slopes.len().max(1);
    let all = (tokens * (tokens + 1) / 2).max(1) as f64;
    for (i, row) in back.chunks_exact_mut(slopes.len().max(1)).enumerate() {
        let share = (i + 1) as f64 / all;
        row.iter_mut().zip(slopes).for_each(|(to, slope)| *to += (share * f64::from(*slope)) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_tensor::{Activation, Builder, DType, Device, Init, Tape, Tensor, Training};

    const LENGTHS: [usize; 4] = [3, 1, 4, 2];
    const SIZES: [usize; 2] = [5, 3];

    /// In f64: a linear layer, the poolings, and the sum of all numbers of the vectors times factors.
    fn loss(x: &[f64], weight: &[f64], poolings: &[Pooling], factors: &[f64]) -> f64 {
        let [h, k] = SIZES;
        let row =
            |x: &[f64]| -> Vec<f64> { weight.chunks(k).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect() };
        let mut rows = x.chunks(k).map(row);
        let mut vectors: Vec<f64> = Vec::new();
        for length in LENGTHS {
            let tokens: Vec<Vec<f64>> = rows.by_ref().take(length).collect();
            let n = length as f64;
            for pooling in poolings {
                vectors.extend((0..h).map(|j| {
                    let column = tokens.iter().map(|token| token[j]);
                    match pooling {
                        Pooling::First => tokens[0][j],
                        Pooling::Last => tokens[length - 1][j],
                        Pooling::Max => column.fold(f64::MIN, f64::max),
                        Pooling::Mean => column.sum::<f64>() / n,
                        Pooling::MeanSqrtLength => column.sum::<f64>() / n.sqrt(),
                        Pooling::WeightedMean => {
                            column.zip(1..).map(|(x, i)| x * f64::from(i)).sum::<f64>() / (n * (n + 1.0) / 2.0)
                        }
                    }
                }));
            }
        }
        vectors.iter().zip(factors).map(|(x, f)| x * f).sum()
    }

    #[test]
    fn gradients_are_finite_differences() {
        let [h, k] = SIZES;
        let tokens: usize = LENGTHS.iter().sum();
        let wave =
            |n: usize, by: f64| -> Vec<f64> { (0..n).map(|i| f64::from((by * i as f64).sin() as f32)).collect() };
        let (x, weight) = (wave(tokens * k, 1.7), wave(h * k, 2.3));
        let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
        let device = Device::cpu(None, Some(1)).unwrap();
        let mut cases: Vec<Vec<Pooling>> = Pooling::ALL.map(|pooling| vec![pooling]).to_vec();
        cases.push(Pooling::ALL.to_vec());
        for poolings in cases {
            let factors = wave(LENGTHS.len() * poolings.len() * h, 0.9);
            let mut builder = Builder::new();
            let param = builder.matrix("weight", h, k, Init::Zeros);
            let mut parameters = builder.finish(&device, DType::F32).unwrap();
            parameters.write(0, &narrow(&weight)).unwrap();
            parameters.refresh().unwrap();
            let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
            let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 0, step: 0 });
            let input = pass.input(&Tensor::from_slice(&device, [tokens, k], &narrow(&x)).unwrap()).unwrap();
            let last = pass.linear(&input, param, None, Activation::None).unwrap();
            let layout = Layout::new(&device, &LENGTHS, 0).unwrap();
            let pooled = Pooled::new(&mut pass, &last, &layout, &poolings).unwrap();
            let vectors = pooled.vectors().unwrap();
            assert_eq!((pooled.width(), vectors.len()), (poolings.len() * h, factors.len()));
            let got: f64 = vectors.iter().zip(&factors).map(|(x, f)| f64::from(*x) * f).sum();
            assert!((got - loss(&x, &weight, &poolings, &factors)).abs() < 1e-5, "{poolings:?}");
            pooled.seed(&mut pass, &narrow(&factors)).unwrap();
            pass.backward(&mut gradients).unwrap();
            let found = gradients.read(&parameters, 0).unwrap();
            for (i, found) in found.iter().enumerate() {
                let at = |step: f64| {
                    let mut weight = weight.clone();
                    weight[i] += step;
                    loss(&x, &weight, &poolings, &factors)
                };
                let expected = (at(1e-6) - at(-1e-6)) / 2e-6;
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{poolings:?}, {i}: {found} {expected}");
            }
        }
    }

    #[test]
    fn names_are_those_of_sentence_transformers() {
        let of = |json: &str| serde_json::from_str::<Poolings>(json).map_err(|error| error.to_string());
        assert_eq!(of("\"cls\""), Ok(Poolings(vec![Pooling::First])));
        let two = Poolings(vec![Pooling::Max, Pooling::Mean]);
        assert_eq!(of("[\"mean\", \"max\"]"), Ok(two.clone()));
        assert_eq!(serde_json::to_string(&two).unwrap(), "[\"max\",\"mean\"]");
        assert!(of("\"median\"").unwrap_err().contains("lasttoken"));
        assert!(of("[\"mean\", \"mean\"]").unwrap_err().contains("twice"));
    }
}
