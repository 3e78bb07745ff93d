//! XLNet (Yang et al. 2019): post-norm blocks whose attention scores contents, distances and segments apart. Tokens are predicted by a
//! second stream of queries, which knows where they stand and not what they are; earlier tokens may stand before a sequence. Not the
//! one-directional form (`attn_type` uni) and not the distances of reversed text (`bi_data`).
//!
//! Legend: T tokens in the flat batch, with those of the second stream; H hidden (`d_model`), A heads, D head size, V vocabulary,
//! P rows, R distances.

use henson_tensor::{
    Activation, Builder, EmbeddingTables, FeedForwardLayers, Group, Init, Layout, Norm, Param, Parameters, Pass,
    QueryKeyValue, Result as Computed, Sinusoids, Tensor, TensorError, Var, Xl, XlTables,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::beams::BeamHead;
use crate::bert::{fiftieth, tenth};
use crate::config::{
    FamilyConfig, check_dropouts, check_epsilon, check_heads, check_only, check_sizes, own_config, probability,
};
use crate::heads::{Classifier, HeadParts, SequencePooling, VocabularyBias, VocabularyHead};
use crate::layers::{Linear, MEAN_WEIGHT, diagonal, layer_norm};
use crate::streams::{MemorySettings, Streams};
use crate::{
    Batch, Capture, ConfigError, Encoded, Family, FineTuning, Head, HiddenActivation, Model, ModelConfig, Naming,
    Network, Sizes,
};

/// XLNet as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("xlnet", "XLNet")],
    naming: Naming {
        base_prefix: "transformer.",
        encoder: &["word_embedding.", "mask_emb", "layer."],
        old_endings: &[],
        tied: &[("lm_loss.weight", "transformer.word_embedding.weight")],
        ignored_endings: &[],
    },
    heads: heads!(Encoder, MaskedLm, BeamSpan),
    causal: None,
    endings: &[(Head::MaskedLm, "LMHeadModel"), (Head::Span, "ForQuestionAnsweringSimple")],
    // Two small ones to train from scratch, then the published ones.
    sizes: &[
        ("xlnet-tiny", || of_size(2, 128, 2)),
        ("xlnet-mini", || of_size(4, 256, 4)),
        ("xlnet-base", || of_size(12, 768, 12)),
        ("xlnet-large", || of_size(24, 1024, 16)),
    ],
    parse: |value| Ok(ModelConfig::XlNet(serde_json::from_value(value)?)),
};

/// Distances have no table to train: no length is too long but for memory. XLNet was pre-trained on 512.
const MAX_TOKENS: usize = 4096;

/// The first text, the second, and the classification token behind them.
const SEGMENTS: usize = 3;

/// The sizes and settings of an XLNet. A key that is missing has the default of `transformers`; BERT's names of sizes are read as well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct XlNetConfig {
    /// V: tokens of the vocabulary.
    #[serde(alias = "n_token")]
    pub vocab_size: usize,
    /// H.
    #[serde(alias = "hidden_size")]
    pub d_model: usize,
    /// Blocks.
    #[serde(alias = "num_hidden_layers")]
    pub n_layer: usize,
    /// A; divides H.
    #[serde(alias = "num_attention_heads")]
    pub n_head: usize,
    /// D: H / A, where it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_head: Option<usize>,
    /// Columns inside of the feed-forward layers.
    #[serde(alias = "intermediate_size")]
    pub d_inner: usize,
    /// The activation of feed-forward layers.
    pub ff_activation: HiddenActivation,
    /// `bi`; models that read left to right are not supported.
    pub attn_type: String,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Added to the variance in LayerNorm.
    pub layer_norm_eps: f64,
    /// All dropout but that of heads.
    pub dropout: f64,
    /// Earlier tokens that are remembered; 0 or none for all.
    pub mem_len: Option<usize>,
    /// Tokens at the beginning of a sequence that are remembered; 0 or none for all.
    pub reuse_len: Option<usize>,
    /// Whether half of a batch is read backwards: not supported.
    pub bi_data: bool,
    /// The largest distance that is told from others; below 1, every distance is.
    pub clamp_len: i64,
    /// What the vector of a sequence is: its `last` token, its `first`, or the `mean` of all.
    pub summary_type: String,
    /// Whether the head of sequences has a hidden layer; we know no other.
    pub summary_use_proj: bool,
    /// Its activation; null for none.
    pub summary_activation: Option<HiddenActivation>,
    /// Dropout behind it.
    pub summary_last_dropout: f64,
    /// Starts whose ends are looked for, where an answer's end depends on its start.
    pub start_n_top: usize,
    /// Ends that are kept for each of them.
    pub end_n_top: usize,
    /// `xlnet`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for XlNetConfig {
    fn default() -> Self {
        Self {
            vocab_size: 32000,
            d_model: 1024,
            n_layer: 24,
            n_head: 16,
            d_head: None,
            d_inner: 4096,
            ff_activation: HiddenActivation::Gelu,
            attn_type: "bi".to_owned(),
            initializer_range: fiftieth(),
            layer_norm_eps: 1e-12,
            dropout: tenth(),
            mem_len: Some(512),
            reuse_len: None,
            bi_data: false,
            clamp_len: -1,
            summary_type: "last".to_owned(),
            summary_use_proj: true,
            summary_activation: Some(HiddenActivation::Tanh),
            summary_last_dropout: tenth(),
            start_n_top: 5,
            end_n_top: 5,
            model_type: "xlnet".to_owned(),
            other: Map::new(),
        }
    }
}

const IDS: [(&str, u32); 3] = [("pad_token_id", 5), ("bos_token_id", 1), ("eos_token_id", 2)];

/// Those of xlnet-base-cased and xlnet-large-cased, which have no memory.
fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    ModelConfig::XlNet(XlNetConfig {
        d_model: hidden,
        n_layer: layers,
        n_head: heads,
        d_inner: 4 * hidden,
        mem_len: None,
        other: IDS.iter().map(|(key, id)| ((*key).to_owned(), Value::from(*id))).collect(),
        ..XlNetConfig::default()
    })
}

impl XlNetConfig {
    fn pooling(&self) -> Option<SequencePooling> {
        match self.summary_type.as_str() {
            "last" => Some(SequencePooling::Last),
            "first" => Some(SequencePooling::First),
            "mean" => Some(SequencePooling::Mean),
            _ => None,
        }
    }

    /// Dropout before the hidden layer of the head of sequences.
    fn summary_first_dropout(&self) -> f64 {
        probability(&self.other, "summary_first_dropout", 0.0)
    }

    fn check_kind(&self) -> Result<(), ConfigError> {
        if self.attn_type != "bi" {
            let expected = "bi: models that read left to right are not supported";
            return Err(ConfigError::value("attn_type", &self.attn_type, expected));
        }
        if self.bi_data {
            return Err(ConfigError::value("bi_data", true, "false: texts are read forwards alone"));
        }
        if !self.summary_use_proj {
            return Err(ConfigError::value("summary_use_proj", false, "true"));
        }
        if self.pooling().is_none() {
            return Err(ConfigError::value("summary_type", &self.summary_type, "last, first or mean"));
        }
        if self.clamp_len > 1 << 20 {
            return Err(ConfigError::value("clamp_len", self.clamp_len, format!("-1, or 1 to {}", 1 << 20)));
        }
        if let Some(d_head) = self.d_head.filter(|d_head| d_head.checked_mul(self.n_head) != Some(self.d_model)) {
            return Err(ConfigError::value(
                "d_head",
                d_head,
                format!("d_model / n_head, {}", self.d_model / self.n_head),
            ));
        }
        let only = [
            ("untie_r", Value::from(true)),
            ("is_encoder_decoder", Value::from(false)),
            ("tie_word_embeddings", Value::from(true)),
            ("summary_proj_to_labels", Value::from(false)),
        ];
        check_only(&self.other, &only)
    }
}

impl FamilyConfig for XlNetConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("d_model", self.d_model, 1 << 16),
            ("n_layer", self.n_layer, 1 << 10),
            ("n_head", self.n_head, 1 << 12),
            ("d_inner", self.d_inner, 1 << 20),
            ("start_n_top", self.start_n_top, 1 << 10),
            ("end_n_top", self.end_n_top, 1 << 10),
        ])?;
        check_heads("n_head", self.n_head, self.d_model)?;
        if !self.d_model.is_multiple_of(2) {
            return Err(ConfigError::value("d_model", self.d_model, "an even number: sines and cosines of distances"));
        }
        check_dropouts(&[
            ("dropout", self.dropout),
            ("summary_last_dropout", self.summary_last_dropout),
            ("summary_first_dropout", self.summary_first_dropout()),
        ])?;
        check_epsilon("layer_norm_eps", self.layer_norm_eps)?;
        self.check_kind()
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.d_model,
            num_hidden_layers: self.n_layer,
            num_attention_heads: self.n_head,
            intermediate_size: self.d_inner,
            max_tokens: MAX_TOKENS,
            segments: SEGMENTS,
            hidden_act: self.ff_activation,
            dropout: self.dropout,
            attention_dropout: self.dropout,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        if size != self.vocab_size {
            // They are another vocabulary's. Without the key, `transformers` takes those of the published models.
            IDS.iter().for_each(|(key, _)| drop(self.other.insert((*key).to_owned(), Value::Null)));
        }
        self.vocab_size = size;
    }

    fn set_layers(&mut self, layers: usize) {
        self.n_layer = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.dropout, self.summary_last_dropout) = (p, p);
        if self.summary_first_dropout() > 0.0 {
            self.other.insert("summary_first_dropout".to_owned(), Value::from(p));
        }
    }

    fn multiply_adds(&self, length: usize) -> f64 {
        let (h, inner, length) = (self.d_model as f64, self.d_inner as f64, length as f64);
        // Contents as in BERT; distances have about two rows for each key, and their own projection.
        self.n_layer as f64 * (4.0 * h * h + 2.0 * h * inner + 4.0 * length * h + 2.0 * h * h)
    }

    fn has_streams(&self) -> bool {
        true
    }

    fn set_remembered(&mut self, tokens: usize) {
        self.reuse_len = Some(tokens);
        self.other.insert("use_mems_train".to_owned(), Value::from(true));
    }

    fn memory(&self) -> Option<MemorySettings> {
        Some(MemorySettings { most: self.mem_len, reused: self.reuse_len })
    }

    /// Yang et al. (2019), appendix A.4; rates of base models as in the authors' examples.
    fn fine_tuning(&self, head: Head) -> FineTuning {
        let layer_decay = if matches!(head, Head::Span | Head::BeamSpan) { 0.75 } else { 1.0 };
        FineTuning { learning_rates: [3e-5, 2e-5], weight_decay: 0.0, layer_decay, ..FineTuning::BERT }
    }
}

/// The dropout sites of embeddings and of distances; those of the blocks follow, and of what they give.
const EMBEDDING_SITE: u32 = 0;
const DISTANCE_SITE: u32 = 1;
const FIRST_SITE: u32 = 2;

/// Dropout sites that a block uses.
const SITES: u32 = 4;

fn build(b: &mut Builder, own: &XlNetConfig, head: Head) -> Model {
    let (h, init) = (own.d_model, Init::Normal(own.initializer_range as f32));
    let base = if head == Head::Encoder { "" } else { "transformer" };
    let network = b.at(base, |b| XlNet::build(b, own, init));
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        let bias = VocabularyBias::Trained(b.padded_vector("lm_loss.bias", own.vocab_size, Init::Zeros));
        parts.vocabulary = Some(VocabularyHead::scaled(None, 1.0, bias));
    }
    if head == Head::BeamSpan {
        let beams = (own.start_n_top, own.end_n_top);
        parts.beams = Some(BeamHead::build(b, h, beams, own.layer_norm_eps as f32, init));
    }
    parts.classifier = match head {
        Head::Sequence { .. } | Head::Choice => {
            let labels = if let Head::Sequence { labels } = head { labels } else { 1 };
            let dense = Linear::build(b, "sequence_summary.summary", h, h, init);
            let activation = own.summary_activation.map_or(Activation::None, Activation::from);
            let out = Linear::build(b, "logits_proj", h, labels, init);
            Some(Classifier {
                pooling: own.pooling().unwrap_or(SequencePooling::Last),
                input_dropout: own.summary_first_dropout() as f32,
                hidden: Some((dense, activation)),
                ..Classifier::plain(own.summary_last_dropout as f32, out)
            })
        }
        Head::Token { labels } => Some(Classifier::plain(0.0, Linear::build(b, "classifier", h, labels, init))),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, init))),
        _ => None,
    };
    Model::new(ModelConfig::XlNet(own.clone()), head, network, parts)
}

/// Views into the parameters.
#[derive(Debug)]
struct XlNet {
    words: EmbeddingTables,
    /// 1×H: what the second stream starts with.
    mask: Param,
    blocks: Vec<Block>,
    attention: Xl,
    hidden: usize,
    /// The largest distance that is told from others.
    furthest: usize,
    dropout: f32,
}

/// Attention, then feed-forward.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// 3H×H: query, key and value.
    query_key_value: Param,
    /// H×H: what projects distances.
    distances: Param,
    /// 3H: of contents, of distances and of segments.
    biases: Param,
    /// 2×H: the same segment, another one.
    segments: Param,
    output: Param,
    norms: [Norm; 2],
    feed_forward: FeedForwardLayers,
    /// The first of its dropout sites.
    site: u32,
}

impl Block {
    fn build(b: &mut Builder, own: &XlNetConfig, init: Init, layer: usize) -> Self {
        let (h, heads, epsilon) = (own.d_model, own.n_head, own.layer_norm_eps as f32);
        let d = h / heads.max(1);
        let of_heads = [h, heads, d];
        let (query_key_value, output, distances, biases, segments, attention_norm) = b.at("rel_attn", |b| {
            let query_key_value = b.side_by_side(&["q", "k", "v"], h, h, init);
            b.stored_as(3, of_heads, true);
            let output = b.matrix("o", h, h, init);
            b.stored_as(1, of_heads, false);
            let distances = b.matrix("r", h, h, init);
            b.stored_as(1, of_heads, true);
            let biases = b.vectors(&["r_w_bias", "r_r_bias", "r_s_bias"], h, init);
            b.stored_as(3, [heads, d], false);
            let segments = b.matrix("seg_embed", 2, h, init);
            b.stored_as(1, [2, heads, d], false);
            (query_key_value, output, distances, biases, segments, layer_norm(b, "layer_norm", h, epsilon))
        });
        let (up, down, norm) = b.at("ff", |b| {
            let up = Linear::build(b, "layer_1", h, own.d_inner, init);
            (up, Linear::build(b, "layer_2", own.d_inner, h, init), layer_norm(b, "layer_norm", h, epsilon))
        });
        Self {
            query_key_value,
            distances,
            biases,
            segments,
            output,
            norms: [attention_norm, norm],
            feed_forward: FeedForwardLayers {
                up: up.weight,
                up_bias: up.bias,
                activation: own.ff_activation.into(),
                gated: false,
                down: down.weight,
                down_bias: down.bias,
            },
            site: FIRST_SITE + SITES * layer as u32,
        }
    }

    /// Query, key and value of x; keys and values of earlier tokens in front, where there are some.
    fn project(&self, pass: &mut Pass<'_>, x: &Var, streams: &Streams, layer: usize) -> Computed<QueryKeyValue> {
        let none = Activation::None;
        let Some((memory, [earlier, own])) = &streams.memory else {
            return Ok(QueryKeyValue::Fused(pass.linear(x, self.query_key_value, None, none)?)); // T×3H
        };
        let h = x.tensor().columns();
        let memory = pass.constant(memory.state(layer)?)?;
        let all = pass.join(&memory, x, [earlier, own])?;
        let query = pass.linear(x, self.query_key_value.to_row(h), None, none)?;
        Ok(QueryKeyValue::Cross { query, key_value: pass.linear(&all, self.query_key_value.from_row(h), None, none)? })
    }
}

/// What blocks read besides their input.
struct Context<'a> {
    streams: &'a Streams,
    table: Sinusoids,
}

impl XlNet {
    fn build(b: &mut Builder, own: &XlNetConfig, init: Init) -> Self {
        let h = own.d_model;
        let (words, mask) = b.group(Group::Embeddings, |b| {
            let word = b.padded_table("word_embedding.weight", own.vocab_size, h, init);
            let mask = b.matrix("mask_emb", 1, h, init);
            b.stored_as(1, [1, 1, h], false);
            (EmbeddingTables { word, position: None, position_offset: 0, segment: None }, mask)
        });
        let block =
            |i: usize| b.group(Group::Layer(i), |b| b.at(&format!("layer.{i}"), |b| Block::build(b, own, init, i)));
        Self {
            words,
            mask,
            blocks: (0..own.n_layer).map(block).collect(),
            attention: Xl::new(own.n_head, h / own.n_head.max(1)),
            hidden: h,
            furthest: usize::try_from(own.clamp_len).ok().filter(|most| *most > 0).unwrap_or(usize::MAX),
            dropout: own.dropout as f32,
        }
    }

    /// What flows into the first block, and what all blocks read.
    fn embed<'a>(&self, pass: &mut Pass<'_>, batch: &'a Batch) -> Computed<(Var, Context<'a>)> {
        let Some(streams) = &batch.streams else {
            let why = "the batch was laid out for another family of models";
            return Err(TensorError::Unsupported { operation: "XLNet", why });
        };
        let dropout = (self.dropout, EMBEDDING_SITE);
        let x = match &streams.queries {
            None => pass.embeddings_dropout(self.words, &batch.ids, &batch.layout, dropout)?,
            Some(queries) => {
                let content = pass.embeddings(self.words, &batch.ids, batch.layout.positions(), None)?;
                let mask = pass.table(self.mask);
                let predicted = pass.gather(&mask, &queries.zeros)?;
                let both = pass.join(&content, &predicted, [&queries.content, &queries.predicted])?;
                pass.dropout_tokens(both, streams.relations.queries(), dropout)?
            }
        };
        let table = pass.sinusoids(streams.longest(), self.furthest, self.hidden, (self.dropout, DISTANCE_SITE))?;
        Ok((x, Context { streams, table }))
    }

    /// The values that each token attends to, T×H, and the probabilities on request.
    fn attend(
        &self,
        pass: &mut Pass<'_>,
        x: &Var,
        context: &Context<'_>,
        layer: usize,
        want_maps: bool,
    ) -> Computed<(Var, Option<Tensor>)> {
        let (block, streams) = (&self.blocks[layer], context.streams);
        let positions = pass.linear(&context.table.table, block.distances, None, Activation::None)?; // R×H
        let tables =
            XlTables { positions, first: context.table.first, biases: block.biases, segments: Some(block.segments) };
        let from = block.project(pass, x, streams, layer)?;
        let maps = match want_maps {
            true => Some(pass.xl_attention_maps(&self.attention, &from, &tables, &streams.relations)?),
            false => None,
        };
        let dropout = (self.dropout, block.site);
        Ok((pass.xl_attention(&self.attention, from, tables, &streams.relations, dropout)?, maps))
    }

    /// What follows attention. Every row goes its own way here.
    fn finish(&self, pass: &mut Pass<'_>, layer: usize, attended: &Var, x: &Var, layout: &Layout) -> Computed<Var> {
        let (block, p) = (&self.blocks[layer], self.dropout);
        let y = pass.linear(attended, block.output, None, Activation::None)?;
        let x = pass.add_norm(y, x, &block.norms[0], layout, (p, block.site + 1))?;
        let y = pass.feed_forward(&x, &block.feed_forward, Some((layout, (p, block.site + 2))))?;
        pass.add_norm(y, &x, &block.norms[1], layout, (p, block.site + 3))
    }

    fn last_site(&self) -> u32 {
        FIRST_SITE + SITES * self.blocks.len() as u32
    }
}

impl Network for XlNet {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Computed<Encoded> {
        let (mut x, context) = self.embed(pass, batch)?;
        let layout = context.streams.relations.queries();
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for layer in 0..self.blocks.len() {
            if capture.hidden_states {
                hidden_states.push(x.clone());
            }
            let (attended, maps) = self.attend(pass, &x, &context, layer, capture.attention_maps)?;
            attention_maps.extend(maps);
            x = self.finish(pass, layer, &attended, &x, layout)?;
        }
        if capture.hidden_states {
            hidden_states.push(x.clone());
        }
        let last = pass.dropout_tokens(x, layout, (self.dropout, self.last_site()))?;
        Ok(Encoded { last, hidden_states, attention_maps, states: Vec::new() })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Computed<Var> {
        let (mut x, context) = self.embed(pass, batch)?;
        let Some(last) = self.blocks.len().checked_sub(1) else { return pass.gather(&x, rows) };
        for layer in 0..last {
            let (attended, _) = self.attend(pass, &x, &context, layer, false)?;
            x = self.finish(pass, layer, &attended, &x, context.streams.relations.queries())?;
        }
        let (attended, _) = self.attend(pass, &x, &context, last, false)?;
        let (attended, x) = (pass.gather(&attended, rows)?, pass.gather(&x, rows)?);
        let layout = Layout::new(pass.device(), &[rows.shape().elements()], 0)?;
        self.finish(pass, last, &attended, &x, &layout)
    }

    fn average_in_last_layer(&self, parameters: &mut Parameters) -> Computed<()> {
        let Some(block) = self.blocks.last() else {
            return Err(TensorError::Unsupported { operation: "average", why: "there is no layer" });
        };
        // Queries and their biases are zero, so that all scores are; values are the vectors themselves, and the feed-forward
        // half adds nothing.
        let h = self.hidden;
        let mut query_key_value = vec![0.0; 2 * h * h];
        query_key_value.extend(diagonal(h, 1.0));
        parameters.set(block.query_key_value, &query_key_value)?;
        parameters.set(block.biases, &vec![0.0; 3 * h])?;
        parameters.set(block.output, &diagonal(h, MEAN_WEIGHT))?;
        let down = block.feed_forward.down;
        parameters.set(down, &vec![0.0; down.shape().elements()])
    }

    fn word_table(&self) -> Param {
        self.words.word
    }
}
