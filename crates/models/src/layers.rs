//! Layers that model families share. A layer is a handful of views into the flat parameters; its fields' paths are its
//! names in a checkpoint.
//!
//! Legend: T tokens, H hidden, A heads.

use henson_tensor::{Activation, Builder, Init, Layout, Param, Pass, Result, Tensor, Var};

/// y = x·weightᵀ + bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Param,
    pub(crate) bias: Param,
}

impl Linear {
    pub(crate) fn build(b: &mut Builder, name: &str, inputs: usize, outputs: usize, init: Init) -> Self {
        b.at(name, |b| Self {
            weight: b.matrix("weight", outputs, inputs, init),
            bias: b.vector("bias", outputs, Init::Zeros),
        })
    }

    pub(crate) fn forward(&self, pass: &mut Pass<'_>, x: &Var, activation: Activation) -> Result<Var> {
        pass.linear(x, self.weight, Some(self.bias), activation)
    }

    /// Logits of a small head, in f32.
    pub(crate) fn logits(&self, pass: &mut Pass<'_>, x: &Var) -> Result<Var> {
        pass.linear_f32(x, self.weight, Some(self.bias))
    }
}

/// γ·(x − mean)/deviation + β over the columns of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNorm {
    pub(crate) weight: Param,
    pub(crate) bias: Param,
    pub(crate) epsilon: f32,
}

impl LayerNorm {
    pub(crate) fn build(b: &mut Builder, name: &str, size: usize, epsilon: f32) -> Self {
        b.at(name, |b| Self {
            weight: b.vector("weight", size, Init::Ones),
            bias: b.vector("bias", size, Init::Zeros),
            epsilon,
        })
    }
}

/// What a block of the encoder is built with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSettings {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) activation: Activation,
    pub(crate) causal: bool,
    pub(crate) dropout: f32,
    pub(crate) attention_dropout: f32,
    pub(crate) epsilon: f32,
    pub(crate) init: Init,
}

/// Dropout sites that a block uses.
pub(crate) const BLOCK_SITES: u32 = 3;

/// A post-norm block: attention, then feed-forward, each followed by dropout, the residual and LayerNorm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// Query, key and value side by side: 3H×H and 3H.
    query_key_value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    settings: BlockSettings,
    /// The first of its dropout sites.
    site: u32,
}

impl Block {
    /// Builds with BERT's names.
    pub(crate) fn build(b: &mut Builder, settings: BlockSettings, site: u32) -> Self {
        let BlockSettings { hidden: h, intermediate, epsilon, init, .. } = settings;
        let (query_key_value, attention_output, attention_norm) = b.at("attention", |b| {
            let fused = b.at("self", |b| Linear {
                weight: b.side_by_side(&["query.weight", "key.weight", "value.weight"], h, h, init),
                bias: b.vectors(&["query.bias", "key.bias", "value.bias"], h, Init::Zeros),
            });
            let (output, norm) = b.at("output", |b| {
                (Linear::build(b, "dense", h, h, init), LayerNorm::build(b, "LayerNorm", h, epsilon))
            });
            (fused, output, norm)
        });
        let up = b.at("intermediate", |b| Linear::build(b, "dense", h, intermediate, init));
        let (down, norm) = b.at("output", |b| {
            (Linear::build(b, "dense", intermediate, h, init), LayerNorm::build(b, "LayerNorm", h, epsilon))
        });
        Self { query_key_value, attention_output, attention_norm, up, down, norm, settings, site }
    }

    /// T×H → T×H, and the attention's probabilities on request.
    pub(crate) fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        layout: &Layout,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let (attended, maps) = self.attend(pass, x, layout, want_maps)?;
        Ok((self.finish(pass, &attended, x, layout)?, maps))
    }

    /// T×H → P×H: the block's output at the rows named (P). After attention every row goes its own way, so the others
    /// can be left out. For inference: dropout counts by places in the batch.
    pub(crate) fn forward_rows(&self, pass: &mut Pass<'_>, x: &Var, layout: &Layout, rows: &Tensor) -> Result<Var> {
        let (attended, _) = self.attend(pass, x, layout, false)?;
        let (attended, x) = (pass.gather(&attended, rows)?, pass.gather(x, rows)?);
        let layout = Layout::new(pass.device(), &[rows.shape().elements()], 0)?;
        self.finish(pass, &attended, &x, &layout)
    }

    /// The values that each token attends to, T×H, and the probabilities on request.
    fn attend(&self, pass: &mut Pass<'_>, x: &Var, layout: &Layout, want_maps: bool) -> Result<(Var, Option<Tensor>)> {
        let BlockSettings { heads, causal, attention_dropout, .. } = self.settings;
        let qkv = self.query_key_value.forward(pass, x, Activation::None)?; // T×3H
        let maps = if want_maps { Some(pass.attention_maps(&qkv, layout, heads, causal)?) } else { None };
        Ok((pass.attention(qkv, layout, heads, causal, (attention_dropout, self.site))?, maps))
    }

    /// What follows attention.
    fn finish(&self, pass: &mut Pass<'_>, attended: &Var, x: &Var, layout: &Layout) -> Result<Var> {
        let BlockSettings { dropout, activation, .. } = self.settings;
        let output = self.attention_output.forward(pass, attended, Activation::None)?;
        let x = add_norm(pass, &self.attention_norm, output, x, layout, (dropout, self.site + 1))?;
        let (up, down) = ((self.up.weight, self.up.bias), (self.down.weight, self.down.bias));
        let output = pass.feed_forward(&x, up, activation, down)?; // T×4H inside
        add_norm(pass, &self.norm, output, &x, layout, (dropout, self.site + 2))
    }
}

fn add_norm(
    pass: &mut Pass<'_>,
    norm: &LayerNorm,
    x: Var,
    residual: &Var,
    layout: &Layout,
    dropout: (f32, u32),
) -> Result<Var> {
    pass.add_layer_norm(x, residual, norm.weight, norm.bias, norm.epsilon, layout, dropout)
}
