//! The network of GPT (Radford et al. 2018) and GPT-2 (2019): tokens that see what stands before them alone, learned positions,
//! matrices that files hold as inputs×outputs. The two differ in where the norms stand, in names and in scales.
//!
//! Legend: T tokens in the flat batch, H hidden, A heads, N new tokens, P rows.

use henson_tensor::{
    Activation, Attention, BiasValues, Builder, EmbeddingTables, FeedForwardLayers, Group, Init, Layout, Norm, Param,
    Parameters, Pass, QueryKeyValue, Result, Tensor, TensorError, Var, Window,
};

use serde_json::{Map, Value};

use crate::blocks::Stream;
use crate::config::{check_dropouts, check_epsilon, check_heads, check_only, check_sizes};
use crate::heads::{Classifier, HeadParts, SequencePooling, VocabularyHead};
use crate::layers::{Linear, layer_norm};
use crate::{
    Batch, CacheSizes, Capture, ConfigError, Decoder, DecoderCache, Encoded, FineTuning, Head, HiddenActivation,
    Network, NewTokens, Sizes, SpecialIds,
};

/// What stands before the network's names in a model with a head.
pub(crate) const PREFIX: &str = "transformer";

/// Endings of keys that old files have: masks, and a number for masked scores.
pub(crate) const BUFFERS: &[&str] = &[".attn.bias", ".attn.masked_bias", "position_ids"];

/// How models are fine-tuned (Radford et al. 2018, section 4.1).
pub(crate) const FINE_TUNING: FineTuning = FineTuning {
    learning_rates: [6.25e-5, 6.25e-5],
    epochs: 3.0,
    warmup: 0.002,
    weight_decay: 0.01,
    beta2: 0.999,
    clip: 1.0,
    layer_decay: 1.0,
    batch_size: 32,
    task_tokens: true,
    auxiliary_lm: 0.5,
    text_to_text: false,
};

/// The dropout site of the embeddings; those of the blocks follow.
const EMBEDDING_SITE: u32 = 0;

/// Dropout sites that a block uses.
const SITES: u32 = 3;

/// What the network is built with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GptSettings {
    pub(crate) vocabulary: usize,
    pub(crate) positions: usize,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) activation: Activation,
    pub(crate) epsilon: f32,
    pub(crate) embedding_dropout: f32,
    /// Of what each half of a block gives.
    pub(crate) residual_dropout: f32,
    pub(crate) attention_dropout: f32,
    /// The names of the tables of words and of positions.
    pub(crate) tables: [&'static str; 2],
    /// The name of the norm behind all blocks where norms stand before each half of a block; without it they stand behind.
    pub(crate) final_norm: Option<&'static str>,
    /// Whether scores are divided by √D, and whether by the layer's number, from 1, too.
    pub(crate) scaled: bool,
    pub(crate) scaled_by_layer: bool,
    pub(crate) init: Init,
    /// How the matrices start that add to the stream of residuals.
    pub(crate) output_init: Init,
}

impl GptSettings {
    /// Checks sizes, what configs may say beyond them, and dropouts, the last by their keys.
    pub(crate) fn check(
        &self,
        dropouts: &[(&'static str, f64)],
        epsilon: f64,
        other: &Map<String, Value>,
    ) -> std::result::Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocabulary, 1 << 24),
            ("n_positions", self.positions, 1 << 20),
            ("n_embd", self.hidden, 1 << 16),
            ("n_layer", self.layers, 1 << 10),
            ("n_head", self.heads, 1 << 12),
            ("n_inner", self.inner, 1 << 20),
        ])?;
        check_heads("n_head", self.heads, self.hidden)?;
        check_dropouts(dropouts)?;
        check_epsilon("layer_norm_epsilon", epsilon)?;
        let only = [
            ("add_cross_attention", Value::from(false)),
            ("is_encoder_decoder", Value::from(false)),
            ("summary_type", Value::from("cls_index")),
            ("summary_use_proj", Value::from(true)),
            ("summary_proj_to_labels", Value::from(true)),
            ("summary_activation", Value::Null),
        ];
        check_only(other, &only)
    }

    /// What other crates need to know.
    pub(crate) fn sizes(&self, hidden_act: HiddenActivation, dropout: f64, attention_dropout: f64) -> Sizes {
        Sizes {
            vocab_size: self.vocabulary,
            hidden_size: self.hidden,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            intermediate_size: self.inner,
            max_tokens: self.positions,
            // A tokenizer may mark the second text of a pair; the network takes no notice.
            segments: 2,
            hidden_act,
            dropout,
            attention_dropout,
            causal: true,
        }
    }
}

/// Whether tokens may see what follows them: never.
pub(crate) fn only_causal(model_type: &str, causal: bool) -> std::result::Result<(), ConfigError> {
    let expected =
        "a family that reads in both directions, such as bert; this one reads left to right: objective = \"causal\"";
    if causal { Ok(()) } else { Err(ConfigError::value("model_type", model_type, expected)) }
}

/// Writes the ids of special tokens among keys that the network does not need.
pub(crate) fn set_special_ids(other: &mut Map<String, Value>, ids: SpecialIds) {
    let ids = [("bos_token_id", Some(ids.begin)), ("eos_token_id", Some(ids.end)), ("pad_token_id", ids.padding)];
    // Without the key, `transformers` takes its own.
    ids.into_iter().for_each(|(key, id)| drop(other.insert(key.to_owned(), id.map_or(Value::Null, Value::from))));
}

/// Views into the parameters.
#[derive(Debug)]
pub(crate) struct Gpt {
    tables: EmbeddingTables,
    blocks: Vec<Block>,
    final_norm: Option<Norm>,
    dropout: f32,
    hidden: usize,
}

/// Attention, then feed-forward.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// 3H×H: query, key and value.
    query_key_value: Linear,
    attention_output: Linear,
    norms: [Norm; 2],
    feed_forward: FeedForwardLayers,
    attention: Attention,
    attention_dropout: f32,
    residual_dropout: f32,
    /// The first of its dropout sites.
    site: u32,
}

/// What flows from block to block.
enum Flow<'a> {
    /// Each half reads a norm of the sum so far, and adds to the sum.
    PreNorm(Stream<'a>),
    /// Each half reads what the last one left, and the norm of both sums is left.
    PostNorm(Var, &'a Layout),
}

impl Flow<'_> {
    /// What a half of a block reads.
    fn input(&mut self, pass: &mut Pass<'_>, norm: &Norm) -> Result<Var> {
        match self {
            Self::PreNorm(stream) => stream.norm(pass, norm),
            Self::PostNorm(x, _) => Ok(x.clone()),
        }
    }

    /// Adds what a half of a block gives; the norm is the one that [`Flow::input`] got.
    fn add(&mut self, pass: &mut Pass<'_>, y: Var, norm: &Norm, dropout: (f32, u32)) -> Result<()> {
        match self {
            Self::PreNorm(stream) => stream.add(pass, y, dropout),
            Self::PostNorm(x, layout) => {
                *x = pass.add_norm(y, x, norm, layout, dropout)?;
                Ok(())
            }
        }
    }

    /// What flows here, as it is.
    fn value(&mut self, pass: &mut Pass<'_>) -> Result<Var> {
        match self {
            Self::PreNorm(stream) => stream.value(pass),
            Self::PostNorm(x, _) => Ok(x.clone()),
        }
    }
}

/// A layer whose matrix files hold as inputs×outputs.
fn conv1d(b: &mut Builder, name: &str, inputs: usize, outputs: usize, init: Init) -> Linear {
    b.at(name, |b| Linear {
        weight: b.transposed_matrix("weight", outputs, inputs, init),
        bias: Some(b.vector("bias", outputs, Init::Zeros)),
    })
}

impl Block {
    fn build(b: &mut Builder, settings: &GptSettings, layer: usize) -> Self {
        let GptSettings { hidden: h, inner, heads, epsilon, init, output_init, .. } = *settings;
        let plain = Attention::new(heads, h / heads.max(1));
        let scale = if settings.scaled { plain.scale } else { 1.0 };
        let scale = if settings.scaled_by_layer { scale / (layer + 1) as f32 } else { scale };
        let (query_key_value, attention_output) =
            b.at("attn", |b| (conv1d(b, "c_attn", h, 3 * h, init), conv1d(b, "c_proj", h, h, output_init)));
        let (up, down) =
            b.at("mlp", |b| (conv1d(b, "c_fc", h, inner, init), conv1d(b, "c_proj", inner, h, output_init)));
        Self {
            query_key_value,
            attention_output,
            norms: [layer_norm(b, "ln_1", h, epsilon), layer_norm(b, "ln_2", h, epsilon)],
            feed_forward: FeedForwardLayers {
                up: up.weight,
                up_bias: up.bias,
                activation: settings.activation,
                gated: false,
                down: down.weight,
                down_bias: down.bias,
            },
            attention: Attention { window: Window::CAUSAL, scale, ..plain },
            attention_dropout: settings.attention_dropout,
            residual_dropout: settings.residual_dropout,
            site: EMBEDDING_SITE + 1 + SITES * layer as u32,
        }
    }

    /// Query, key and value of what flows here: T×3H.
    fn project(&self, pass: &mut Pass<'_>, flow: &mut Flow<'_>) -> Result<Var> {
        let x = flow.input(pass, &self.norms[0])?;
        self.query_key_value.forward(pass, &x, Activation::None)
    }

    /// The values that each token attends to, T×H, and the probabilities on request.
    fn attend(
        &self,
        pass: &mut Pass<'_>,
        flow: &mut Flow<'_>,
        layout: &Layout,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let from = QueryKeyValue::Fused(self.project(pass, flow)?);
        let (bias, layouts) = (BiasValues::None, (layout, layout));
        let maps = match want_maps {
            true => Some(pass.attention_maps(&self.attention, &from, &bias, layouts)?),
            false => None,
        };
        let dropout = (self.attention_dropout, self.site);
        Ok((pass.attention(&self.attention, from, &bias, layouts, dropout)?, maps))
    }

    /// What follows attention. Every row goes its own way here.
    fn finish(&self, pass: &mut Pass<'_>, flow: &mut Flow<'_>, attended: &Var) -> Result<()> {
        let [attention_norm, feed_forward_norm] = &self.norms;
        let y = self.attention_output.forward(pass, attended, Activation::None)?;
        flow.add(pass, y, attention_norm, (self.residual_dropout, self.site + 1))?;
        let x = flow.input(pass, feed_forward_norm)?;
        let y = pass.feed_forward(&x, &self.feed_forward, None)?;
        flow.add(pass, y, feed_forward_norm, (self.residual_dropout, self.site + 2))
    }
}

impl Gpt {
    pub(crate) fn build(b: &mut Builder, settings: &GptSettings) -> Self {
        let GptSettings { vocabulary, positions, hidden, layers, init, .. } = *settings;
        let [words, places] = settings.tables;
        let tables = b.group(Group::Embeddings, |b| EmbeddingTables {
            word: b.padded_table(&format!("{words}.weight"), vocabulary, hidden, init),
            position: Some(b.matrix(&format!("{places}.weight"), positions, hidden, init)),
            position_offset: 0,
            segment: None,
        });
        let block = |i: usize| b.group(Group::Layer(i), |b| b.at(&format!("h.{i}"), |b| Block::build(b, settings, i)));
        let blocks: Vec<Block> = (0..layers).map(block).collect();
        // It belongs to what the last layer gives.
        let last = Group::Layer(layers.saturating_sub(1));
        let final_norm =
            settings.final_norm.map(|name| b.group(last, |b| layer_norm(b, name, hidden, settings.epsilon)));
        Self { tables, blocks, final_norm, dropout: settings.embedding_dropout, hidden }
    }

    fn flow<'a>(&self, x: Var, layout: &'a Layout) -> Flow<'a> {
        match self.final_norm {
            Some(_) => Flow::PreNorm(Stream::new(x, layout)),
            None => Flow::PostNorm(x, layout),
        }
    }

    /// What flows into the first block.
    fn embed<'a>(&self, pass: &mut Pass<'_>, batch: &'a Batch) -> Result<Flow<'a>> {
        let dropout = (self.dropout, EMBEDDING_SITE);
        let x = pass.embeddings_dropout(self.tables, &batch.ids, &batch.layout, dropout)?;
        Ok(self.flow(x, &batch.layout))
    }

    /// What comes out behind the last block.
    fn finish(&self, pass: &mut Pass<'_>, mut flow: Flow<'_>) -> Result<Var> {
        match &self.final_norm {
            Some(norm) => flow.input(pass, norm),
            None => flow.value(pass),
        }
    }
}

impl Network for Gpt {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        let mut flow = self.embed(pass, batch)?;
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for block in &self.blocks {
            if capture.hidden_states {
                hidden_states.push(flow.value(pass)?);
            }
            let (attended, maps) = block.attend(pass, &mut flow, &batch.layout, capture.attention_maps)?;
            attention_maps.extend(maps);
            block.finish(pass, &mut flow, &attended)?;
        }
        let last = self.finish(pass, flow)?;
        if capture.hidden_states {
            // The last one is normalised, as in `transformers`.
            hidden_states.push(last.clone());
        }
        Ok(Encoded { last, hidden_states, attention_maps, states: Vec::new() })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let mut flow = self.embed(pass, batch)?;
        let Some((last, blocks)) = self.blocks.split_last() else {
            let x = self.finish(pass, flow)?;
            return pass.gather(&x, rows);
        };
        for block in blocks {
            let (attended, _) = block.attend(pass, &mut flow, &batch.layout, false)?;
            block.finish(pass, &mut flow, &attended)?;
        }
        let (attended, _) = last.attend(pass, &mut flow, &batch.layout, false)?;
        let x = flow.value(pass)?;
        let (attended, x) = (pass.gather(&attended, rows)?, pass.gather(&x, rows)?);
        let layout = Layout::new(pass.device(), &[rows.shape().elements()], 0)?;
        let mut flow = self.flow(x, &layout);
        last.finish(pass, &mut flow, &attended)?;
        self.finish(pass, flow)
    }

    fn average_in_last_layer(&self, _: &mut Parameters) -> Result<()> {
        let why = "its tokens see those before them alone, so that no layer can average all";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.tables.word
    }

    fn decoder(&self) -> Option<&dyn Decoder> {
        Some(self)
    }
}

impl Decoder for Gpt {
    fn cache_sizes(&self) -> CacheSizes {
        CacheSizes { layers: self.blocks.len(), width: self.hidden, source: false }
    }

    fn step(&self, pass: &mut Pass<'_>, new: &NewTokens, cache: &mut DecoderCache) -> Result<Var> {
        let x = pass.embeddings(self.tables, &new.ids, &new.positions, None)?;
        let mut flow = self.flow(x, &new.layout);
        for (layer, block) in self.blocks.iter().enumerate() {
            let from = block.project(pass, &mut flow)?; // N×3H
            let (attention, bias, layout) = (&block.attention, &BiasValues::None, &new.layout);
            pass.append_to_cache(&mut cache.written, layer, &from, attention.query_width(), layout)?;
            let attended = pass.attend_to_cache(&cache.written, layer, attention, &from, bias, layout)?;
            block.finish(pass, &mut flow, &attended)?;
        }
        self.finish(pass, flow)
    }
}

/// Dropouts of heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadDropouts {
    pub(crate) token: f32,
    pub(crate) choice: f32,
}

/// The parts of a head. Every one gives the vocabulary's logits, too, as fine-tuning uses them; a table of their own, which is not
/// that of words, belongs to models that write and to the head for choices alone.
pub(crate) fn head_parts(
    b: &mut Builder,
    head: Head,
    settings: &GptSettings,
    (words, tied): (Param, bool),
    dropouts: HeadDropouts,
) -> HeadParts {
    let GptSettings { vocabulary, hidden: h, init, .. } = *settings;
    let writes = matches!(head, Head::MaskedLm | Head::Choice);
    let own = (!tied && writes).then(|| b.padded_table("lm_head.weight", vocabulary, h, init));
    let at_last = |classifier| Some(Classifier { pooling: SequencePooling::Last, ..classifier });
    let classifier = match head {
        Head::Sequence { labels } => {
            let weight = b.at("score", |b| b.matrix("weight", labels, h, init));
            at_last(Classifier::plain(0.0, Linear { weight, bias: None }))
        }
        Head::Token { labels } => {
            Some(Classifier::plain(dropouts.token, Linear::build(b, "classifier", h, labels, init)))
        }
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, init))),
        Head::Choice => {
            at_last(Classifier::plain(dropouts.choice, Linear::build(b, "multiple_choice_head.summary", h, 1, init)))
        }
        _ => None,
    };
    if tied {
        b.mark_output(words);
    }
    let vocabulary = (tied || writes).then(|| VocabularyHead::plain(own));
    HeadParts { vocabulary, classifier, ..HeadParts::default() }
}
