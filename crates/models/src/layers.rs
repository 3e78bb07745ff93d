//! Layers that model families share. A layer is a handful of views into the flat parameters; its fields' paths are its
//! names in a checkpoint.
//!
//! Legend: T tokens, H hidden, A heads.

use henson_tensor::{
    Activation, Attention, Bias, BiasValues, Buckets, Builder, FeedForwardLayers, Init, Layout, Norm, Param,
    Parameters, Pass, PositionTables, QueryKeyValue, RelativePositions, Result, Tensor, Var, Window,
};

/// y = x·weightᵀ + bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Param,
    pub(crate) bias: Option<Param>,
}

impl Linear {
    pub(crate) fn build(b: &mut Builder, name: &str, inputs: usize, outputs: usize, init: Init) -> Self {
        b.at(name, |b| Self {
            weight: b.matrix("weight", outputs, inputs, init),
            bias: Some(b.vector("bias", outputs, Init::Zeros)),
        })
    }

    /// Some of its outputs.
    pub(crate) fn rows(&self, from: usize, to: usize) -> Self {
        let part = |x: Param| x.to_row(to).from_row(from);
        Self { weight: part(self.weight), bias: self.bias.map(part) }
    }

    pub(crate) fn forward(&self, pass: &mut Pass<'_>, x: &Var, activation: Activation) -> Result<Var> {
        pass.linear(x, self.weight, self.bias, activation)
    }

    /// Logits of a small head, in f32.
    pub(crate) fn logits(&self, pass: &mut Pass<'_>, x: &Var) -> Result<Var> {
        pass.linear_f32(x, self.weight, self.bias)
    }
}

/// Lays out a LayerNorm with a bias.
pub(crate) fn layer_norm(b: &mut Builder, name: &str, size: usize, epsilon: f32) -> Norm {
    b.at(name, |b| Norm {
        weight: b.vector("weight", size, Init::Ones),
        bias: Some(b.vector("bias", size, Init::Zeros)),
        epsilon,
        centred: true,
    })
}

/// What a block of the encoder is built with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSettings {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) activation: Activation,
    pub(crate) causal: bool,
    /// Dropout of what the feed-forward half gives.
    pub(crate) dropout: f32,
    /// Dropout of what the attention half gives; DistilBERT has none there.
    pub(crate) attention_output_dropout: f32,
    /// Dropout of attention's probabilities.
    pub(crate) attention_dropout: f32,
    pub(crate) epsilon: f32,
    pub(crate) init: Init,
}

/// The names of a block's parameters, behind the block's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockNames {
    pub(crate) query_key_value: [&'static str; 3],
    pub(crate) attention_output: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) norm: &'static str,
}

/// What a block's attention knows of distances.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Distances {
    None,
    /// Added to scores: a table for each head and bucket.
    Bias(Param, Buckets),
    /// Scored against contents.
    Scores(PositionScores),
}

/// How relative positions and contents are scored against each other (DeBERTa).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PositionScores {
    /// Whether queries are compared with positions, and whether keys are.
    pub(crate) of_queries: bool,
    pub(crate) of_keys: bool,
    /// The names of positions' own key and query projections; without them, those of contents serve.
    pub(crate) own: Option<[&'static str; 2]>,
    /// Dropout of the table of positions, drawn again in each layer.
    pub(crate) dropout: f32,
}

/// Its views into the parameters: what projects the positions that queries, and those that keys, are compared with.
#[derive(Clone, Copy, Debug)]
struct PositionLayers {
    keys: Option<Linear>,
    queries: Option<Linear>,
    /// Both at once, where they lie side by side.
    both: Option<Linear>,
    dropout: f32,
}

impl PositionLayers {
    fn build(b: &mut Builder, scores: PositionScores, query_key_value: Linear, h: usize, init: Init) -> Self {
        let PositionScores { of_queries, of_keys, own, dropout } = scores;
        let part = |from: usize, to: usize| query_key_value.rows(from * h, to * h);
        let mut layer = |i: usize| match own {
            Some(names) => Linear::build(b, names[i], h, h, init),
            None => part(1 - i, 2 - i),
        };
        let keys = of_queries.then(|| layer(0));
        let queries = of_keys.then(|| layer(1));
        let both = (of_queries && of_keys && own.is_none()).then(|| part(0, 2));
        Self { keys, queries, both, dropout }
    }

    /// The projections of a table of positions, P×H.
    fn tables(
        &self,
        pass: &mut Pass<'_>,
        table: &Var,
        positions: &RelativePositions,
        site: u32,
    ) -> Result<Option<PositionTables>> {
        let x = pass.dropout_positions(table.clone(), positions, (self.dropout, site))?;
        let mut of = |layer: Linear| layer.forward(pass, &x, Activation::None);
        Ok(match (self.both, self.keys, self.queries) {
            (Some(both), ..) => Some(PositionTables::Both(of(both)?)),
            (None, Some(keys), Some(queries)) => Some(PositionTables::Apart { keys: of(keys)?, queries: of(queries)? }),
            (None, Some(keys), None) => Some(PositionTables::Keys(of(keys)?)),
            (None, None, Some(queries)) => Some(PositionTables::Queries(of(queries)?)),
            (None, None, None) => None,
        })
    }
}

/// What a block reads besides its input.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) layout: &'a Layout,
    /// The table of relative positions, P×H, and what is known of its rows.
    pub(crate) relative: Option<(Var, &'a RelativePositions)>,
}

/// What an attended mean is multiplied by, so that the residual beside it does not count. A power of two, exact in bf16.
pub(crate) const MEAN_WEIGHT: f32 = 1024.0;

/// A multiple of the identity: H×H.
pub(crate) fn diagonal(h: usize, factor: f32) -> Vec<f32> {
    (0..h * h).map(|i| if i.is_multiple_of(h + 1) { factor } else { 0.0 }).collect()
}

/// Dropout sites that a block uses.
pub(crate) const BLOCK_SITES: u32 = 3;

/// Dropout sites of relative positions begin here, beyond those of all blocks.
const POSITION_SITES: u32 = 0x8000;

/// A post-norm block: attention, then feed-forward, each followed by dropout, the residual and LayerNorm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// Query, key and value side by side: 3H×H and 3H.
    query_key_value: Linear,
    attention_output: Linear,
    attention_norm: Norm,
    up: Linear,
    down: Linear,
    norm: Norm,
    settings: BlockSettings,
    bias: Option<(Param, Buckets)>,
    positions: Option<PositionLayers>,
    /// The first of its dropout sites.
    site: u32,
}

impl Block {
    pub(crate) fn build(b: &mut Builder, names: &BlockNames, settings: BlockSettings, distances: Distances) -> Self {
        let BlockSettings { hidden: h, intermediate, epsilon, init, .. } = settings;
        let weights = names.query_key_value.map(|name| format!("{name}.weight"));
        let biases = names.query_key_value.map(|name| format!("{name}.bias"));
        let query_key_value = Linear {
            weight: b.side_by_side(&weights.each_ref().map(String::as_str), h, h, init),
            bias: Some(b.vectors(&biases.each_ref().map(String::as_str), h, Init::Zeros)),
        };
        let (bias, positions) = match distances {
            Distances::None => (None, None),
            Distances::Bias(table, buckets) => (Some((table, buckets)), None),
            Distances::Scores(scores) => (None, Some(PositionLayers::build(b, scores, query_key_value, h, init))),
        };
        Self {
            query_key_value,
            attention_output: Linear::build(b, names.attention_output, h, h, init),
            attention_norm: layer_norm(b, names.attention_norm, h, epsilon),
            up: Linear::build(b, names.up, h, intermediate, init),
            down: Linear::build(b, names.down, intermediate, h, init),
            norm: layer_norm(b, names.norm, h, epsilon),
            settings,
            bias,
            positions,
            site: 0,
        }
    }

    /// The same weights with the dropout of another layer.
    pub(crate) fn at_site(&self, site: u32) -> Self {
        Self { site, ..*self }
    }

    /// What gives query, key and value: 3H×H and 3H.
    pub(crate) fn query_key_value(&self) -> (Param, Option<Param>) {
        (self.query_key_value.weight, self.query_key_value.bias)
    }

    /// Makes it average: every token gets the mean of its sequence's vectors, normalised. Queries are zero, so that all tokens
    /// are attended to alike, values are the vectors themselves, and the feed-forward half adds nothing. For parameters as they
    /// are initialised: biases are zero, norms ones.
    pub(crate) fn average(&self, parameters: &mut Parameters) -> Result<()> {
        let h = self.settings.hidden;
        let mut query_key_value = vec![0.0; 2 * h * h];
        query_key_value.extend(diagonal(h, 1.0));
        parameters.set(self.query_key_value.weight, &query_key_value)?;
        parameters.set(self.attention_output.weight, &diagonal(h, MEAN_WEIGHT))?;
        parameters.set(self.down.weight, &vec![0.0; h * self.settings.intermediate])
    }

    /// T×H → T×H, and the attention's probabilities on request.
    pub(crate) fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        context: &Context<'_>,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let (attended, maps) = self.attend(pass, x, context, want_maps)?;
        Ok((self.finish(pass, &attended, x, context.layout)?, maps))
    }

    /// T×H → P×H: the block's output at the rows named (P). After attention every row goes its own way, so the others
    /// can be left out. For inference: dropout counts by places in the batch.
    pub(crate) fn forward_rows(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        context: &Context<'_>,
        rows: &Tensor,
    ) -> Result<Var> {
        let (attended, _) = self.attend(pass, x, context, false)?;
        let (attended, x) = (pass.gather(&attended, rows)?, pass.gather(x, rows)?);
        let layout = Layout::new(pass.device(), &[rows.shape().elements()], 0)?;
        self.finish(pass, &attended, &x, &layout)
    }

    /// The values that each token attends to, T×H, and the probabilities on request.
    fn attend(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        context: &Context<'_>,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let BlockSettings { hidden, heads, causal, attention_dropout, .. } = self.settings;
        let (layout, dropout) = (context.layout, (attention_dropout, self.site));
        if let (Some(layers), Some((table, positions))) = (self.positions, &context.relative) {
            // Positions before contents: gradients of shared weights are then written by the larger product.
            let tables = layers.tables(pass, table, positions, POSITION_SITES + self.site)?;
            let qkv = self.query_key_value.forward(pass, x, Activation::None)?; // T×3H
            if let Some(tables) = tables {
                let maps = match want_maps {
                    true => Some(pass.disentangled_maps(heads, &qkv, &tables, positions, layout)?),
                    false => None,
                };
                return Ok((pass.disentangled(heads, qkv, tables, positions, layout, dropout)?, maps));
            }
        }
        let window = if causal { Window::CAUSAL } else { Window::FULL };
        let (form, bias) = match self.bias {
            Some((table, buckets)) => (Bias::Relative(buckets), BiasValues::Table(table)),
            None => (Bias::None, BiasValues::None),
        };
        let attention = Attention { window, bias: form, ..Attention::new(heads, hidden / heads.max(1)) };
        let layouts = (layout, layout);
        let from = QueryKeyValue::Fused(self.query_key_value.forward(pass, x, Activation::None)?); // T×3H
        let maps = match want_maps {
            true => Some(pass.attention_maps(&attention, &from, &bias, layouts)?),
            false => None,
        };
        Ok((pass.attention(&attention, from, &bias, layouts, dropout)?, maps))
    }

    /// What follows attention.
    fn finish(&self, pass: &mut Pass<'_>, attended: &Var, x: &Var, layout: &Layout) -> Result<Var> {
        let BlockSettings { dropout, attention_output_dropout, activation, .. } = self.settings;
        let output = self.attention_output.forward(pass, attended, Activation::None)?;
        let x = pass.add_norm(output, x, &self.attention_norm, layout, (attention_output_dropout, self.site + 1))?;
        let layers = FeedForwardLayers {
            up: self.up.weight,
            up_bias: self.up.bias,
            activation,
            gated: false,
            down: self.down.weight,
            down_bias: self.down.bias,
        };
        let output = pass.feed_forward(&x, &layers, None)?; // T×4H inside
        pass.add_norm(output, &x, &self.norm, layout, (dropout, self.site + 2))
    }
}
