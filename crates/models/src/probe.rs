//! The edge probe of Tenney et al. (2019): a small classifier of spans on the layers of an encoder that is left as it is.
//!
//! Layers are mixed with learned weights, projected, pooled over the tokens of each span by attention with one learned query, and
//! a perceptron with one hidden layer gives a logit for each label, as in jiant's `EdgeClassifierModule`. The bias of its
//! attention scores is left out: a softmax does not see it.
//!
//! Legend: T tokens, n layers of W numbers, P projected, N targets of one or two spans each, C hidden, K labels.

use henson_tensor::{
    Activation, Attention, BiasValues, Builder, Device, Init, Layout, MixParams, Norm, Param, Pass, QueryKeyValue,
    Result, Tensor, Var,
};

use crate::layers::{Linear, layer_norm};

/// Where dropout falls: before the last matrix.
const BEFORE_OUTPUT: u32 = 0x7100;

/// ε of `torch.nn.LayerNorm`.
const EPSILON: f32 = 1e-5;

/// The sizes of a probe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EdgeProbeSettings {
    /// n.
    pub layers: usize,
    /// W.
    pub width: usize,
    /// P.
    pub projection: usize,
    /// C.
    pub hidden: usize,
    /// K.
    pub labels: usize,
    /// Whether targets have two spans.
    pub pairs: bool,
    /// Before the last matrix.
    pub dropout: f32,
}

/// A probe: views into its parameters.
#[derive(Clone, Debug)]
pub struct EdgeProbe {
    settings: EdgeProbeSettings,
    mix: MixParams,
    /// One for each span of a target.
    pools: Vec<Pool>,
    hidden: Linear,
    norm: Norm,
    output: Linear,
}

/// What makes one vector of a span.
#[derive(Clone, Copy, Debug)]
struct Pool {
    projection: Linear,
    /// 1×P: what the tokens of a span are scored with.
    query: Param,
}

impl EdgeProbe {
    /// The name of the layers' weights, before their softmax: n.
    pub const MIXING_WEIGHTS: &'static str = "mix.weights";

    /// Lays out its parameters, which start as those of `torch.nn.Linear` do.
    pub fn build(b: &mut Builder, settings: EdgeProbeSettings) -> Self {
        let EdgeProbeSettings { layers, width, projection: p, hidden, labels, pairs, .. } = settings;
        let mix = b.at("mix", |b| MixParams {
            weights: b.vector("weights", layers, Init::Zeros),
            gamma: b.vector("gamma", 1, Init::Ones),
        });
        let spans = if pairs { 2 } else { 1 };
        let pool = |i: usize| Pool {
            projection: linear(b, &format!("projection{i}"), width, p),
            query: b.at(&format!("attention{i}"), |b| b.matrix("weight", 1, p, start(p))),
        };
        let pools = (1..=spans).map(pool).collect();
        Self {
            settings,
            mix,
            pools,
            hidden: linear(b, "hidden", spans * p, hidden),
            norm: layer_norm(b, "norm", hidden, EPSILON),
            output: linear(b, "output", hidden, labels),
        }
    }

    /// Its sizes.
    pub fn settings(&self) -> &EdgeProbeSettings {
        &self.settings
    }

    /// T×n·W → N×K, in f32.
    pub fn logits(&self, pass: &mut Pass<'_>, inputs: &EdgeInputs) -> Result<Var> {
        let x = pass.input(&inputs.vectors)?;
        let mixed = pass.mix(&x, &self.mix)?;
        let mut spans = Vec::new();
        for (pool, span) in self.pools.iter().zip(&inputs.spans) {
            spans.push(self.pool(pass, pool, &mixed, span, inputs)?);
        }
        let spans = match &spans[..] {
            // Row by row, the first span and then the second: side by side.
            [first, second] => {
                let [even, odd] = &inputs.places;
                let joined = pass.join(first, second, [even, odd])?;
                joined.reshape([inputs.targets(), 2 * self.settings.projection])?
            }
            _ => spans.swap_remove(0),
        };
        let hidden = self.hidden.forward(pass, &spans, Activation::Tanh)?;
        let normed = pass.norm_dropout(hidden, &self.norm, &inputs.layout, (self.settings.dropout, BEFORE_OUTPUT))?;
        self.output.logits(pass, &normed)
    }

    /// A vector for each span: T×W → N×P.
    fn pool(&self, pass: &mut Pass<'_>, pool: &Pool, mixed: &Var, span: &SpanRows, inputs: &EdgeInputs) -> Result<Var> {
        let projected = pool.projection.forward(pass, mixed, Activation::None)?;
        let tokens = pass.gather(&projected, &span.rows)?;
        let query = pass.table(pool.query);
        let query = pass.gather(&query, &inputs.zeros)?;
        let attention = Attention { scale: 1.0, ..Attention::new(1, self.settings.projection) };
        let from = QueryKeyValue::Apart { query, key: tokens.clone(), value: tokens };
        pass.attention(&attention, from, &BiasValues::None, (&inputs.queries, &span.layout), (0.0, 0))
    }
}

/// A batch of targets on a device.
#[derive(Debug)]
pub struct EdgeInputs {
    /// T×n·W.
    vectors: Tensor,
    /// The first span of all targets, and the second where they have two.
    spans: Vec<SpanRows>,
    /// One query for each target.
    queries: Layout,
    /// N.
    zeros: Tensor,
    /// Where the rows of first and second spans go when they are laid side by side.
    places: [Tensor; 2],
    /// The targets of each text.
    layout: Layout,
}

/// The tokens of one span of every target.
#[derive(Debug)]
struct SpanRows {
    rows: Tensor,
    layout: Layout,
}

impl EdgeInputs {
    /// From the vectors of all tokens of a batch (T×n·W), the rows of each target's spans (one list for first spans, one for second
    /// ones), and the number of targets in each text. No span and no text may be empty.
    pub fn new(
        device: &Device,
        vectors: &[f32],
        tokens: usize,
        spans: &[Vec<std::ops::Range<usize>>],
        targets_of_texts: &[usize],
    ) -> Result<Self> {
        let targets: usize = targets_of_texts.iter().sum();
        let rows_of = |spans: &Vec<std::ops::Range<usize>>| {
            let rows: Vec<u32> = spans.iter().flat_map(|span| span.clone().map(|row| row as u32)).collect();
            let lengths: Vec<usize> = spans.iter().map(ExactSizeIterator::len).collect();
            let layout = Layout::new(device, &lengths, 0)?;
            Ok(SpanRows { rows: Tensor::from_slice(device, [rows.len()], &rows)?, layout })
        };
        let every_second = |from: u32| {
            let places: Vec<u32> = (0..targets as u32).map(|target| 2 * target + from).collect();
            Tensor::from_slice(device, [targets], &places)
        };
        Ok(Self {
            vectors: Tensor::from_slice(device, [tokens, vectors.len() / tokens.max(1)], vectors)?,
            spans: spans.iter().map(rows_of).collect::<Result<_>>()?,
            queries: Layout::new(device, &vec![1; targets], 0)?,
            zeros: Tensor::from_slice(device, [targets], &vec![0_u32; targets])?,
            places: [every_second(0)?, every_second(1)?],
            layout: Layout::new(device, targets_of_texts, 0)?,
        })
    }

    /// N.
    pub fn targets(&self) -> usize {
        self.layout.tokens()
    }
}

/// `torch.nn.Linear`'s distribution for so many inputs.
fn start(inputs: usize) -> Init {
    Init::Uniform(1.0 / (inputs.max(1) as f32).sqrt())
}

fn linear(b: &mut Builder, name: &str, inputs: usize, outputs: usize) -> Linear {
    b.at(name, |b| Linear {
        weight: b.matrix("weight", outputs, inputs, start(inputs)),
        bias: Some(b.vector("bias", outputs, start(inputs))),
    })
}
