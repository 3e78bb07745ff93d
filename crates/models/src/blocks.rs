//! Blocks of families beyond BERT, from layers that they share: pre-norm blocks with rotary positions, windows, a relative bias,
//! attention to another sequence, and gated feed-forward layers. Their fields' paths are their names in a checkpoint.
//!
//! Legend: T tokens, H hidden, A heads, D = head size, I inner columns of a feed-forward layer.

use henson_tensor::{
    Activation, Angles, Attention, Bias, BiasValues, Buckets, Builder, Cache, FeedForwardLayers, Init, Layout, Norm,
    Param, Pass, QueryKeyValue, Result, Tensor, TensorError, Var, Window,
};

use crate::layers::layer_norm;

/// The stream of residuals through pre-norm blocks: x + dropout(f(norm(x))), again and again. An addition waits for the norm
/// that follows it, so that both are done at once.
#[derive(Debug)]
pub struct Stream<'a> {
    layout: &'a Layout,
    sum: Var,
    waiting: Option<(Var, (f32, u32))>,
}

impl<'a> Stream<'a> {
    /// Begins with the embeddings' output: T×H.
    pub fn new(x: Var, layout: &'a Layout) -> Self {
        Self { layout, sum: x, waiting: None }
    }

    /// What flows here, normalised: the input of the next layer.
    pub fn norm(&mut self, pass: &mut Pass<'_>, norm: &Norm) -> Result<Var> {
        let Some((x, dropout)) = self.waiting.take() else { return pass.norm(self.sum.clone(), norm) };
        let (sum, y) = pass.add_pre_norm(x, &self.sum, norm, self.layout, dropout)?;
        self.sum = sum;
        Ok(y)
    }

    /// What flows here, as it is.
    pub fn value(&mut self, pass: &mut Pass<'_>) -> Result<Var> {
        if let Some((x, dropout)) = self.waiting.take() {
            self.sum = pass.add_residual(x, &self.sum, self.layout, dropout)?;
        }
        Ok(self.sum.clone())
    }

    /// How the tokens that flow here are divided.
    pub(crate) fn layout(&self) -> &'a Layout {
        self.layout
    }

    /// Goes on with something else: what a post-norm block gives.
    pub(crate) fn replace(&mut self, x: Var) {
        (self.sum, self.waiting) = (x, None);
    }

    /// Adds dropout(x).
    pub fn add(&mut self, pass: &mut Pass<'_>, x: Var, dropout: (f32, u32)) -> Result<()> {
        self.value(pass)?;
        self.waiting = Some((x, dropout));
        Ok(())
    }

    /// dropout(norm(x)) of all that flowed here: the end of a stack.
    pub fn finish(mut self, pass: &mut Pass<'_>, norm: &Norm, dropout: (f32, u32)) -> Result<Var> {
        let x = self.value(pass)?;
        pass.norm_dropout(x, norm, self.layout, dropout)
    }
}

/// Lays out a norm without a bias: LayerNorm, or RMSNorm where it is not centred.
pub fn norm_without_bias(b: &mut Builder, name: &str, size: usize, epsilon: f32, centred: bool) -> Norm {
    let weight = b.at(name, |b| b.vector("weight", size, Init::Ones));
    Norm { weight, bias: None, epsilon, centred }
}

/// An attention with its projections.
#[derive(Clone, Debug)]
pub struct AttentionLayer {
    /// Query, key and value side by side (3·A·D×H); or the query alone, where keys and values come from elsewhere.
    query: Param,
    /// As many as rows.
    query_bias: Option<Param>,
    /// Key and value of what is attended to (2·A·D×H).
    key_value: Option<Param>,
    /// As many as rows.
    key_value_bias: Option<Param>,
    /// H×A·D.
    output: Param,
    /// H.
    output_bias: Option<Param>,
    attention: Attention,
    bias: BiasValues,
    dropout: (f32, u32),
}

impl AttentionLayer {
    /// Lays out one with biases, under names such as `q_proj`: query, key, value, output. It has `heads` and `hidden` columns, and
    /// keys and values come from elsewhere where it is `cross`.
    pub(crate) fn with_biases(
        b: &mut Builder,
        [query, key, value, output]: [&str; 4],
        (hidden, attention): (usize, Attention),
        cross: bool,
        dropout: (f32, u32),
        init: Init,
    ) -> Self {
        let mut project = |names: &[&str]| {
            let [weights, biases] = ["weight", "bias"]
                .map(|end| -> Vec<String> { names.iter().map(|name| format!("{name}.{end}")).collect() });
            let [weights, biases] = [&weights, &biases].map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
            (b.side_by_side(&weights, hidden, hidden, init), Some(b.vectors(&biases, hidden, Init::Zeros)))
        };
        let (own, elsewhere) = if cross {
            (project(&[query]), Some(project(&[key, value])))
        } else {
            (project(&[query, key, value]), None)
        };
        let (output, output_bias) = project(&[output]);
        let (key_value, key_value_bias) = elsewhere.map_or((None, None), |(weight, bias)| (Some(weight), bias));
        let ((query, query_bias), bias) = (own, BiasValues::None);
        Self { query, query_bias, key_value, key_value_bias, output, output_bias, attention, bias, dropout }
    }

    /// What the tokens of `x` attend to among themselves. Rotary positions are those of `angles`.
    pub fn attend(&self, pass: &mut Pass<'_>, x: &Var, layout: &Layout, angles: Option<Angles>) -> Result<Var> {
        let (y, _) = self.values(pass, x, layout, angles, false)?;
        self.project(pass, &y)
    }

    /// What new tokens attend to among themselves and those before them, whose keys and values a layer of the cache has; theirs join
    /// them.
    pub fn step(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        layout: &Layout,
        (cache, layer): (&mut Cache, usize),
    ) -> Result<Var> {
        let qkv = pass.linear(x, self.query, self.query_bias, Activation::None)?;
        pass.append_to_cache(cache, layer, &qkv, self.attention.query_width(), layout)?;
        let y = pass.attend_to_cache(cache, layer, &self.attention, &qkv, &self.bias, layout)?;
        self.project(pass, &y)
    }

    /// Keeps the keys and values of what is attended to in a layer of the cache.
    pub fn keep(
        &self,
        pass: &mut Pass<'_>,
        memory: (&Var, &Layout),
        (cache, layer): (&mut Cache, usize),
    ) -> Result<()> {
        let key_value = self.key_value(pass, memory.0)?;
        pass.append_to_cache(cache, layer, &key_value, 0, memory.1)
    }

    /// What the tokens of `x` attend to in what was [kept](Self::keep).
    pub fn attend_to_kept(
        &self,
        pass: &mut Pass<'_>,
        (x, layout): (&Var, &Layout),
        (cache, layer): (&Cache, usize),
    ) -> Result<Var> {
        let query = pass.linear(x, self.query, self.query_bias, Activation::None)?;
        let y = pass.attend_to_cache(cache, layer, &self.attention, &query, &self.bias, layout)?;
        self.project(pass, &y)
    }

    /// Key and value of what is attended to: M×2·A·D.
    fn key_value(&self, pass: &mut Pass<'_>, memory: &Var) -> Result<Var> {
        let why = "the layer attends to its own tokens";
        let weight = self.key_value.ok_or(TensorError::Unsupported { operation: "attend_to", why })?;
        pass.linear(memory, weight, self.key_value_bias, Activation::None)
    }

    /// What [`AttentionLayer::attend`] gives before the last projection, and the probabilities on request.
    pub(crate) fn values(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        layout: &Layout,
        angles: Option<Angles>,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let Attention { heads, key_heads, head_size, .. } = self.attention;
        let mut qkv = pass.linear(x, self.query, self.query_bias, Activation::None)?;
        if let Some(angles) = angles {
            let (table, columns) = (pass.rotary_table(angles), 0..(heads + key_heads) * head_size);
            qkv = pass.rotary(qkv, table, layout.positions(), columns, head_size)?;
        }
        let (from, layouts) = (QueryKeyValue::Fused(qkv), (layout, layout));
        let maps = match want_maps {
            true => Some(pass.attention_maps(&self.attention, &from, &self.bias, layouts)?),
            false => None,
        };
        Ok((pass.attention(&self.attention, from, &self.bias, layouts, self.dropout)?, maps))
    }

    /// What the tokens of `x` attend to in `memory`.
    pub fn attend_to(&self, pass: &mut Pass<'_>, (x, layout): (&Var, &Layout), memory: (&Var, &Layout)) -> Result<Var> {
        let query = pass.linear(x, self.query, self.query_bias, Activation::None)?;
        let key_value = self.key_value(pass, memory.0)?;
        let (from, layouts) = (QueryKeyValue::Cross { query, key_value }, (layout, memory.1));
        let y = pass.attention(&self.attention, from, &self.bias, layouts, self.dropout)?;
        self.project(pass, &y)
    }

    pub(crate) fn project(&self, pass: &mut Pass<'_>, y: &Var) -> Result<Var> {
        pass.linear(y, self.output, self.output_bias, Activation::None)
    }
}

/// What the blocks of a stack attend to beyond their own tokens.
#[derive(Debug)]
pub enum Memory<'a> {
    /// Nothing: an encoder.
    None,
    /// The source's states, M×H: a decoder that reads whole targets.
    Source(&'a Var, &'a Layout),
    /// What a cache holds: a decoder that writes.
    Cache {
        /// Keys and values of the target so far, which those of new tokens join.
        written: &'a mut Cache,
        /// Those of the source.
        source: &'a Cache,
        /// Their layer.
        layer: usize,
    },
}

impl Memory<'_> {
    /// What a layer for its own tokens gives, and probabilities on request.
    pub(crate) fn own(
        &mut self,
        pass: &mut Pass<'_>,
        attention: &AttentionLayer,
        (x, layout): (&Var, &Layout),
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        if let Memory::Cache { written, layer, .. } = self {
            return Ok((attention.step(pass, x, layout, (written, *layer))?, None));
        }
        let (y, maps) = attention.values(pass, x, layout, None, want_maps)?;
        Ok((attention.project(pass, &y)?, maps))
    }

    /// What a layer for the source gives, where there is one.
    pub(crate) fn other(
        &self,
        pass: &mut Pass<'_>,
        attention: &AttentionLayer,
        x: (&Var, &Layout),
    ) -> Result<Option<Var>> {
        Ok(match self {
            Memory::None => None,
            Memory::Source(states, layout) => Some(attention.attend_to(pass, x, (states, layout))?),
            Memory::Cache { source, layer, .. } => Some(attention.attend_to_kept(pass, x, (source, *layer))?),
        })
    }
}

/// What ModernBERT's blocks are built with.
#[derive(Clone, Copy, Debug)]
pub struct ModernBertSettings {
    /// H.
    pub hidden: usize,
    /// I.
    pub intermediate: usize,
    /// A.
    pub heads: usize,
    /// All tokens, or [`Window::local`] of half of `local_attention`.
    pub window: Window,
    /// How queries and keys are rotated.
    pub angles: Angles,
    /// Of the gate.
    pub activation: Activation,
    /// Added to the variance.
    pub epsilon: f32,
    /// Of probabilities, and of attention's output.
    pub attention_dropout: f32,
    /// Between the two feed-forward layers.
    pub mlp_dropout: f32,
    /// Whether attention's projections have biases.
    pub attention_bias: bool,
    /// Whether the feed-forward layers have.
    pub mlp_bias: bool,
    /// Whether the norms have.
    pub norm_bias: bool,
    /// How matrices start.
    pub init: Init,
    /// How those start that add to the stream of residuals.
    pub output_init: Init,
}

/// Dropout sites that a block uses.
pub const MODERN_BERT_SITES: u32 = 3;

/// A block of ModernBERT (Warner et al. 2024): pre-norm, rotary positions, GeGLU, usually no biases.
#[derive(Clone, Debug)]
pub struct ModernBertBlock {
    /// Absent in the first block, which follows the embeddings' norm.
    attn_norm: Option<Norm>,
    attn: AttentionLayer,
    mlp_norm: Norm,
    mlp: FeedForwardLayers,
    settings: ModernBertSettings,
    site: u32,
}

impl ModernBertBlock {
    /// Builds with the names of `transformers`.
    pub fn build(b: &mut Builder, settings: ModernBertSettings, first: bool, site: u32) -> Self {
        let ModernBertSettings { hidden: h, intermediate: i, heads, window, activation, .. } = settings;
        let (init, output_init) = (settings.init, settings.output_init);
        let norm = |b: &mut Builder, name| norm_of(b, name, h, settings.epsilon, settings.norm_bias);
        let attn_norm = (!first).then(|| norm(b, "attn_norm"));
        let attention = Attention { window, ..Attention::new(heads, h / heads.max(1)) };
        let bias = |b: &mut Builder, name, rows, wanted: bool| wanted.then(|| b.vector(name, rows, Init::Zeros));
        let attn = b.at("attn", |b| AttentionLayer {
            query: b.matrix("Wqkv.weight", 3 * h, h, init),
            query_bias: bias(b, "Wqkv.bias", 3 * h, settings.attention_bias),
            key_value: None,
            key_value_bias: None,
            output: b.matrix("Wo.weight", h, h, output_init),
            output_bias: bias(b, "Wo.bias", h, settings.attention_bias),
            attention,
            bias: BiasValues::None,
            dropout: (settings.attention_dropout, site),
        });
        let mlp_norm = norm(b, "mlp_norm");
        let mlp = b.at("mlp", |b| FeedForwardLayers {
            up: b.matrix("Wi.weight", 2 * i, h, init),
            up_bias: bias(b, "Wi.bias", 2 * i, settings.mlp_bias),
            activation,
            gated: true,
            down: b.matrix("Wo.weight", h, i, output_init),
            down_bias: bias(b, "Wo.bias", h, settings.mlp_bias),
        });
        Self { attn_norm, attn, mlp_norm, mlp, settings, site }
    }

    /// Adds what the block computes to the stream.
    pub fn forward(&self, pass: &mut Pass<'_>, stream: &mut Stream<'_>) -> Result<()> {
        let (attended, _) = self.attend(pass, stream, false)?;
        self.finish(pass, stream, &attended)
    }

    /// The values that each token attends to, before they are projected, and the probabilities on request.
    pub fn attend(
        &self,
        pass: &mut Pass<'_>,
        stream: &mut Stream<'_>,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let x = match &self.attn_norm {
            Some(norm) => stream.norm(pass, norm)?,
            None => stream.value(pass)?,
        };
        self.attn.values(pass, &x, stream.layout, Some(self.settings.angles), want_maps)
    }

    /// Adds what follows attention to the stream. Every row goes its own way here.
    pub fn finish(&self, pass: &mut Pass<'_>, stream: &mut Stream<'_>, attended: &Var) -> Result<()> {
        let y = self.attn.project(pass, attended)?;
        stream.add(pass, y, (self.settings.attention_dropout, self.site + 1))?;
        let x = stream.norm(pass, &self.mlp_norm)?;
        let inner = (stream.layout, (self.settings.mlp_dropout, self.site + 2));
        let y = pass.feed_forward(&x, &self.mlp, Some(inner))?;
        stream.add(pass, y, (0.0, 0))
    }
}

/// Lays out a LayerNorm with or without a bias.
pub(crate) fn norm_of(b: &mut Builder, name: &str, size: usize, epsilon: f32, bias: bool) -> Norm {
    match bias {
        true => layer_norm(b, name, size, epsilon),
        false => norm_without_bias(b, name, size, epsilon, true),
    }
}

/// What T5's blocks are built with.
#[derive(Clone, Copy, Debug)]
pub struct T5Settings {
    /// H: `d_model`.
    pub hidden: usize,
    /// I: `d_ff`.
    pub intermediate: usize,
    /// A.
    pub heads: usize,
    /// D: `d_kv`; A·D need not be H.
    pub head_size: usize,
    /// `relative_attention_num_buckets`.
    pub buckets: u32,
    /// `relative_attention_max_distance`.
    pub max_distance: u32,
    /// Of the feed-forward layer, or of its gate.
    pub activation: Activation,
    /// Whether there is a gate: `wi_0` and `wi_1` instead of `wi`.
    pub gated: bool,
    /// Added to the mean square.
    pub epsilon: f32,
    /// Everywhere.
    pub dropout: f32,
    /// A factor on the standard deviations that matrices start with: `initializer_factor`.
    pub initializer_factor: f32,
}

impl T5Settings {
    /// Normal with a variance of one over so many numbers.
    fn init(&self, numbers: usize) -> Init {
        Init::Normal(self.initializer_factor / (numbers.max(1) as f32).sqrt())
    }
}

/// Dropout sites that a block uses.
pub const T5_SITES: u32 = 6;

/// A block of T5 (Raffel et al. 2020), of its encoder or of its decoder: pre-norm with RMSNorm, scores without a scale but with a
/// bias by distance, no other biases.
#[derive(Clone, Debug)]
pub struct T5Block {
    self_norm: Norm,
    self_attention: AttentionLayer,
    /// A decoder's: to the encoder's output.
    cross: Option<(Norm, AttentionLayer)>,
    feed_forward_norm: Norm,
    feed_forward: FeedForwardLayers,
    settings: T5Settings,
    site: u32,
}

impl T5Block {
    /// Builds with the names of `transformers`. The first block of a stack has the table of biases, which all others use: see
    /// [`T5Block::bias`].
    pub fn build(b: &mut Builder, settings: T5Settings, decoder: bool, bias: Option<Param>, site: u32) -> Self {
        let T5Settings { hidden, heads, head_size, epsilon, dropout, .. } = settings;
        let norm = |b: &mut Builder| norm_without_bias(b, "layer_norm", hidden, epsilon, false);
        let window = if decoder { Window::CAUSAL } else { Window::FULL };
        let plain = Attention { scale: 1.0, ..Attention::new(heads, head_size) };
        let inner = plain.query_width();
        // Queries start so small that scores, which nothing divides by √D, are as large as elsewhere.
        let (query, other) = (settings.init(hidden * head_size), settings.init(hidden));
        let layer = |query: Param, key_value: Option<Param>, output: Param, site: u32| AttentionLayer {
            query,
            query_bias: None,
            key_value,
            key_value_bias: None,
            output,
            output_bias: None,
            attention: plain,
            bias: BiasValues::None,
            dropout: (dropout, site),
        };
        let (self_attention, self_norm) = b.at("layer.0", |b| {
            let layer = b.at("SelfAttention", |b| {
                let starts = [("q.weight", query), ("k.weight", other), ("v.weight", other)];
                let qkv = b.side_by_side_from(&starts, inner, hidden);
                let output = b.matrix("o.weight", hidden, inner, settings.init(inner));
                let count = settings.buckets;
                let table =
                    bias.unwrap_or_else(|| b.matrix("relative_attention_bias.weight", count as usize, heads, other));
                let buckets = Buckets { count, max_distance: settings.max_distance, bidirectional: !decoder };
                let attention = Attention { window, bias: Bias::Relative(buckets), ..plain };
                AttentionLayer { attention, bias: BiasValues::Table(table), ..layer(qkv, None, output, site) }
            });
            (layer, norm(b))
        });
        let cross = decoder.then(|| {
            b.at("layer.1", |b| {
                let layer = b.at("EncDecAttention", |b| {
                    let query = b.matrix("q.weight", inner, hidden, query);
                    let key_value = b.side_by_side(&["k.weight", "v.weight"], inner, hidden, other);
                    let output = b.matrix("o.weight", hidden, inner, settings.init(inner));
                    layer(query, Some(key_value), output, site + 2)
                });
                (norm(b), layer)
            })
        });
        let last = if decoder { "layer.2" } else { "layer.1" };
        let (feed_forward, feed_forward_norm) =
            b.at(last, |b| (b.at("DenseReluDense", |b| feed_forward(b, &settings)), norm(b)));
        Self { self_norm, self_attention, cross, feed_forward_norm, feed_forward, settings, site }
    }

    /// The table of biases.
    pub fn bias(&self) -> Option<Param> {
        match self.self_attention.bias {
            BiasValues::Table(table) => Some(table),
            _ => None,
        }
    }

    /// Adds what the block computes to the stream; a decoder's attends to `memory`.
    pub fn forward(&self, pass: &mut Pass<'_>, stream: &mut Stream<'_>, memory: Option<(&Var, &Layout)>) -> Result<()> {
        let mut memory = memory.map_or(Memory::None, |(states, layout)| Memory::Source(states, layout));
        self.apply(pass, stream, &mut memory, false)?;
        Ok(())
    }

    /// The same with any memory; probabilities of the attention to its own tokens on request.
    pub(crate) fn apply(
        &self,
        pass: &mut Pass<'_>,
        stream: &mut Stream<'_>,
        memory: &mut Memory<'_>,
        want_maps: bool,
    ) -> Result<Option<Tensor>> {
        let dropout = |i: u32| (self.settings.dropout, self.site + i);
        let x = stream.norm(pass, &self.self_norm)?;
        let (y, maps) = memory.own(pass, &self.self_attention, (&x, stream.layout), want_maps)?;
        stream.add(pass, y, dropout(1))?;
        if let Some((norm, layer)) = &self.cross {
            let x = stream.norm(pass, norm)?;
            if let Some(y) = memory.other(pass, layer, (&x, stream.layout))? {
                stream.add(pass, y, dropout(3))?;
            }
        }
        let x = stream.norm(pass, &self.feed_forward_norm)?;
        let y = pass.feed_forward(&x, &self.feed_forward, Some((stream.layout, dropout(4))))?;
        stream.add(pass, y, dropout(5))?;
        Ok(maps)
    }

    /// Its attention to a source, of a decoder's.
    pub(crate) fn cross(&self) -> Option<&AttentionLayer> {
        self.cross.as_ref().map(|(_, layer)| layer)
    }
}

fn feed_forward(b: &mut Builder, settings: &T5Settings) -> FeedForwardLayers {
    let T5Settings { hidden, intermediate, activation, gated, .. } = *settings;
    let up: &[&str] = if gated { &["wi_0.weight", "wi_1.weight"] } else { &["wi.weight"] };
    FeedForwardLayers {
        up: b.side_by_side(up, intermediate, hidden, settings.init(hidden)),
        up_bias: None,
        activation,
        gated,
        down: b.matrix("wo.weight", hidden, intermediate, settings.init(intermediate)),
        down_bias: None,
    }
}
