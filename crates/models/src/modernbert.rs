//! ModernBERT (Warner et al. 2024) and Ettin: pre-norm blocks with rotary positions and gated feed-forward layers, most of which
//! see a window around each token alone. No segments, no table of positions and, but for the vocabulary's, no biases.
//!
//! Legend: T tokens in the flat batch, H hidden, A heads, L layers, I inner columns, V vocabulary, P rows.

use henson_tensor::{
    Angles, Builder, EmbeddingTables, Group, Init, Layout, Norm, Pairing, Param, Parameters, Pass, Result as Computed,
    Rotary, Tensor, TensorError, Var, Window,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::fiftieth;
use crate::blocks::{MODERN_BERT_SITES, ModernBertBlock, ModernBertSettings, Stream, norm_of};
use crate::config::{FamilyConfig, check_dropouts, check_epsilon, check_only, check_sizes, own_config};
use crate::heads::{Classifier, HeadParts, SequencePooling, VocabularyHead};
use crate::layers::Linear;
use crate::{
    Batch, Capture, ConfigError, Encoded, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network, Sizes,
};

/// ModernBERT as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("modernbert", "ModernBert")],
    naming: Naming {
        base_prefix: "model.",
        encoder: &["embeddings.", "layers.", "final_norm."],
        old_endings: &[],
        tied: &[("decoder.weight", "model.embeddings.tok_embeddings.weight")],
        ignored_endings: &["rotary_emb.inv_freq"],
    },
    heads: heads!(Encoder, MaskedLm),
    causal: None,
    endings: &[],
    // The paper's two, a small one to train from scratch, and the encoders of Weller et al. 2025 by their parameters.
    sizes: &[
        ("modernbert-mini", || of_size(7, 320, 5, 480)),
        ("ettin-17m", || of_size(7, 256, 4, 384)),
        ("ettin-32m", || of_size(10, 384, 6, 576)),
        ("ettin-68m", || of_size(19, 512, 8, 768)),
        ("modernbert-base", || of_size(22, 768, 12, 1152)),
        ("modernbert-large", || of_size(28, 1024, 16, 2624)),
        ("ettin-1b", || of_size(28, 1792, 28, 3840)),
    ],
    parse: |value| Ok(ModelConfig::ModernBert(serde_json::from_value(value)?)),
};

/// The dropout site of the embeddings; those of the blocks follow.
const EMBEDDING_SITE: u32 = 0;

/// Numbers of a table of rotary positions: 64 MiB, which no weights in a file vouch for.
const MOST_ANGLES: usize = 1 << 24;

const IDS: [&str; 5] = ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"];

/// The sizes and settings of a ModernBERT. A key that is missing has the default of `transformers`.
///
/// Which layers see all tokens, and the two thetas, have older and newer keys; where both are given, the newer ones count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModernBertConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H.
    pub hidden_size: usize,
    /// I: columns inside of the feed-forward layers, behind the gate.
    pub intermediate_size: usize,
    /// L: blocks of the encoder.
    pub num_hidden_layers: usize,
    /// A; divides H.
    pub num_attention_heads: usize,
    /// The activation of the gate.
    pub hidden_activation: HiddenActivation,
    /// Maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// How many standard deviations away they are drawn again.
    pub initializer_cutoff_factor: Option<f64>,
    /// Added to the variance in LayerNorm.
    pub norm_eps: f64,
    /// Whether LayerNorm has biases.
    pub norm_bias: bool,
    /// Whether attention's projections have biases.
    pub attention_bias: bool,
    /// Dropout of attention's probabilities and of its output.
    pub attention_dropout: f64,
    /// What each layer sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// The same in an older way: every so many layers, from the first, one sees all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_attn_every_n_layers: Option<usize>,
    /// The rotary positions of layers that see all tokens and of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_parameters: Option<RopeParameters>,
    /// The same in an older way: theta of layers that see all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_rope_theta: Option<f64>,
    /// Theta of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_rope_theta: Option<f64>,
    /// Tokens of a window; half of them stand on each side of a token.
    pub local_attention: usize,
    /// Dropout on embeddings.
    pub embedding_dropout: f64,
    /// Whether feed-forward layers have biases.
    pub mlp_bias: bool,
    /// Dropout inside of the feed-forward layers.
    pub mlp_dropout: f64,
    /// Whether the masked-LM head has a bias for each token of the vocabulary.
    pub decoder_bias: bool,
    /// What a sequence head reads.
    pub classifier_pooling: ClassifierPooling,
    /// Dropout before the last layer of a head.
    pub classifier_dropout: f64,
    /// Whether the hidden layer of heads has a bias.
    pub classifier_bias: bool,
    /// The activation of the hidden layer of heads.
    pub classifier_activation: HiddenActivation,
    /// `modernbert`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What the tokens of a layer see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// All of their sequence.
    FullAttention,
    /// A window around them.
    SlidingAttention,
}

/// What a sequence head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClassifierPooling {
    /// The first token.
    Cls,
    /// The mean of all tokens.
    Mean,
}

/// The rotary positions of both kinds of layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeParameters {
    #[serde(default)]
    full_attention: Option<Rope>,
    #[serde(default)]
    sliding_attention: Option<Rope>,
}

/// Rotary positions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Rope {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    /// `rope_type`, which must be `default`, and whatever another one would need.
    #[serde(flatten)]
    other: Map<String, Value>,
}

const GLOBAL_THETA: f64 = 160_000.0;
const LOCAL_THETA: f64 = 10_000.0;
const GLOBAL_EVERY: usize = 3;

impl Default for ModernBertConfig {
    /// The class's defaults in `transformers`: modernbert-base, but for the ids of special tokens.
    fn default() -> Self {
        Self {
            vocab_size: 50368,
            hidden_size: 768,
            intermediate_size: 1152,
            num_hidden_layers: 22,
            num_attention_heads: 12,
            hidden_activation: HiddenActivation::Gelu,
            max_position_embeddings: 8192,
            initializer_range: fiftieth(),
            initializer_cutoff_factor: Some(2.0),
            norm_eps: 1e-5,
            norm_bias: false,
            attention_bias: false,
            attention_dropout: 0.0,
            layer_types: None,
            global_attn_every_n_layers: None,
            rope_parameters: None,
            global_rope_theta: None,
            local_rope_theta: None,
            local_attention: 128,
            embedding_dropout: 0.0,
            mlp_bias: false,
            mlp_dropout: 0.0,
            decoder_bias: true,
            classifier_pooling: ClassifierPooling::Cls,
            classifier_dropout: 0.0,
            classifier_bias: false,
            classifier_activation: HiddenActivation::Gelu,
            model_type: "modernbert".to_owned(),
            other: Map::new(),
        }
    }
}

/// With modernbert-base's vocabulary, and mean pooling as the published models have it. Older keys say which layers see what, so
/// that a recipe can set the number of layers alone.
fn of_size(layers: usize, hidden: usize, heads: usize, intermediate: usize) -> ModelConfig {
    let ids = IDS.into_iter().zip([50283, 50281, 50282, 50281, 50282]);
    ModelConfig::ModernBert(ModernBertConfig {
        hidden_size: hidden,
        intermediate_size: intermediate,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        global_attn_every_n_layers: Some(GLOBAL_EVERY),
        global_rope_theta: Some(GLOBAL_THETA),
        local_rope_theta: Some(LOCAL_THETA),
        classifier_pooling: ClassifierPooling::Mean,
        other: ids.map(|(key, id)| (key.to_owned(), Value::from(id))).collect(),
        ..ModernBertConfig::default()
    })
}

impl ModernBertConfig {
    /// What each layer sees.
    fn types(&self) -> Vec<LayerType> {
        if let Some(types) = &self.layer_types {
            return types.clone();
        }
        let every = self.global_attn_every_n_layers.unwrap_or(GLOBAL_EVERY).max(1);
        let kind = |i: usize| match i.is_multiple_of(every) {
            true => LayerType::FullAttention,
            false => LayerType::SlidingAttention,
        };
        (0..self.num_hidden_layers).map(kind).collect()
    }

    fn theta(&self, kind: LayerType) -> f64 {
        let new = self.rope_parameters.as_ref().and_then(|both| match kind {
            LayerType::FullAttention => both.full_attention.as_ref(),
            LayerType::SlidingAttention => both.sliding_attention.as_ref(),
        });
        let old = match kind {
            LayerType::FullAttention => self.global_rope_theta.unwrap_or(GLOBAL_THETA),
            LayerType::SlidingAttention => self.local_rope_theta.unwrap_or(LOCAL_THETA),
        };
        new.and_then(|rope| rope.rope_theta).unwrap_or(old)
    }

    fn check_layers(&self) -> Result<(), ConfigError> {
        let layers = self.num_hidden_layers;
        if let Some(types) = self.layer_types.as_ref().filter(|types| types.len() != layers) {
            let expected = format!("one for each of the {layers} layers of num_hidden_layers");
            return Err(ConfigError::value("layer_types", format!("a list of {}", types.len()), expected));
        }
        if self.global_attn_every_n_layers == Some(0) {
            return Err(ConfigError::value("global_attn_every_n_layers", 0, "1 or more"));
        }
        for kind in [LayerType::FullAttention, LayerType::SlidingAttention] {
            let theta = self.theta(kind);
            if !(1.0..=1e12).contains(&theta) {
                return Err(ConfigError::value("rope_theta", theta, "1 to 1e12"));
            }
        }
        let given = self.rope_parameters.iter().flat_map(|both| [&both.full_attention, &both.sliding_attention]);
        for rope in given.flatten() {
            check_only(&rope.other, &[("rope_type", Value::from("default"))])?;
            let known = |key: &str| key == "rope_type" || key == "partial_rotary_factor";
            if let Some((key, value)) = rope.other.iter().find(|(key, value)| !known(key) && !value.is_null()) {
                let got = format!("with `{key}`: {value}");
                return Err(ConfigError::value("rope_parameters", got, "rope_theta and a rope_type of default alone"));
            }
            if let Some(got) = rope.other.get("partial_rotary_factor").filter(|got| got.as_f64() != Some(1.0)) {
                return Err(ConfigError::value("partial_rotary_factor", got, "1.0"));
            }
        }
        Ok(())
    }
}

impl FamilyConfig for ModernBertConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        self.sizes().check()?;
        check_sizes(&[
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("local_attention", self.local_attention, 1 << 20),
        ])?;
        let head_size = self.hidden_size / self.num_attention_heads;
        if !head_size.is_multiple_of(2) {
            let expected = format!("a number that makes heads of {} even, for rotary positions", self.hidden_size);
            return Err(ConfigError::value("num_attention_heads", self.num_attention_heads, expected));
        }
        if self.max_position_embeddings * head_size > MOST_ANGLES {
            let expected = format!("at most {} for heads of {head_size}", MOST_ANGLES / head_size);
            return Err(ConfigError::value("max_position_embeddings", self.max_position_embeddings, expected));
        }
        check_dropouts(&[
            ("embedding_dropout", self.embedding_dropout),
            ("attention_dropout", self.attention_dropout),
            ("mlp_dropout", self.mlp_dropout),
            ("classifier_dropout", self.classifier_dropout),
        ])?;
        check_epsilon("norm_eps", self.norm_eps)?;
        if let Some(cut) = self.initializer_cutoff_factor.filter(|cut| !(0.5..=1e3).contains(cut)) {
            return Err(ConfigError::value("initializer_cutoff_factor", cut, "0.5 to 1000 standard deviations"));
        }
        self.check_layers()?;
        check_only(
            &self.other,
            &[
                ("is_decoder", Value::from(false)),
                ("add_cross_attention", Value::from(false)),
                // A decoder with a matrix of its own is not written by henson, so none is read.
                ("tie_word_embeddings", Value::from(true)),
                ("rope_scaling", Value::Null),
                ("head_dim", Value::from(head_size)),
            ],
        )
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            intermediate_size: self.intermediate_size,
            max_tokens: self.max_position_embeddings,
            // A tokenizer may mark the second text of a pair; the network takes no notice.
            segments: 2,
            hidden_act: self.hidden_activation,
            dropout: self.mlp_dropout,
            attention_dropout: self.attention_dropout,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        if size != self.vocab_size {
            // They are another vocabulary's. Without the key, `transformers` takes modernbert-base's.
            IDS.iter().for_each(|key| drop(self.other.insert((*key).to_owned(), Value::Null)));
        }
        self.vocab_size = size;
    }

    fn set_layers(&mut self, layers: usize) {
        if let Some(types) = &mut self.layer_types {
            // Further ones repeat what those that there are repeat.
            let repeats = |every: &usize| types.iter().zip(&types[*every..]).all(|(a, b)| a == b);
            let every = (1..types.len()).find(repeats).unwrap_or(types.len());
            *types = (0..layers).map(|i| if i < types.len() { types[i] } else { types[i % every] }).collect();
        }
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.embedding_dropout, self.attention_dropout, self.mlp_dropout, self.classifier_dropout) = (p, p, p, p);
    }

    fn can_average(&self) -> bool {
        false
    }

    /// Gated layers have two matrices that lead in, and a window limits what is seen.
    fn multiply_adds(&self, length: usize) -> f64 {
        let (h, i) = (self.hidden_size as f64, self.intermediate_size as f64);
        let window = (self.local_attention / 2 * 2 + 1).min(length);
        let seen = |kind: LayerType| if kind == LayerType::FullAttention { length } else { window };
        let layer = |kind| 4.0 * h * h + 3.0 * h * i + 2.0 * seen(kind) as f64 * h;
        self.types().into_iter().map(layer).sum()
    }
}

/// Views into the parameters.
#[derive(Debug)]
struct ModernBert {
    tables: EmbeddingTables,
    norm: Norm,
    dropout: f32,
    layers: Vec<ModernBertBlock>,
    final_norm: Norm,
}

/// How parameters start, as in `transformers`: truncated, and the smaller what adds to the stream of residuals, the more do.
struct Initial {
    matrix: Init,
    output: Init,
    /// The last layer of a task's head.
    task: Init,
}

impl Initial {
    fn new(own: &ModernBertConfig) -> Self {
        let cut = own.initializer_cutoff_factor.unwrap_or(3.0) as f32;
        let of = |deviation: f64| Init::TruncatedNormalAt(deviation as f32, cut);
        let range = own.initializer_range;
        Self {
            matrix: of(range),
            output: of(range / (2.0 * own.num_hidden_layers as f64).sqrt()),
            task: of((own.hidden_size as f64).powf(-0.5)),
        }
    }
}

impl ModernBert {
    fn build(b: &mut Builder, own: &ModernBertConfig, init: &Initial) -> Self {
        let (h, epsilon) = (own.hidden_size, own.norm_eps as f32);
        let norm = |b: &mut Builder, name| norm_of(b, name, h, epsilon, own.norm_bias);
        let (word, embedding_norm) = b.group(Group::Embeddings, |b| {
            b.at("embeddings", |b| {
                (b.padded_table("tok_embeddings.weight", own.vocab_size, h, init.matrix), norm(b, "norm"))
            })
        });
        let types = own.types();
        let layers = types.iter().enumerate().map(|(i, kind)| {
            let angles = angles(b, own, *kind);
            let settings = ModernBertSettings {
                hidden: h,
                intermediate: own.intermediate_size,
                heads: own.num_attention_heads,
                window: match kind {
                    LayerType::FullAttention => Window::FULL,
                    LayerType::SlidingAttention => Window::local((own.local_attention / 2) as u32),
                },
                angles,
                activation: own.hidden_activation.into(),
                epsilon,
                attention_dropout: own.attention_dropout as f32,
                mlp_dropout: own.mlp_dropout as f32,
                attention_bias: own.attention_bias,
                mlp_bias: own.mlp_bias,
                norm_bias: own.norm_bias,
                init: init.matrix,
                output_init: init.output,
            };
            let site = EMBEDDING_SITE + 1 + MODERN_BERT_SITES * i as u32;
            let block = |b: &mut Builder| ModernBertBlock::build(b, settings, i == 0, site);
            b.group(Group::Layer(i), |b| b.at(&format!("layers.{i}"), block))
        });
        let layers: Vec<ModernBertBlock> = layers.collect();
        // It belongs to what the last layer gives.
        let last = Group::Layer(own.num_hidden_layers.saturating_sub(1));
        let final_norm = b.group(last, |b| norm(b, "final_norm"));
        let tables = EmbeddingTables { word, position: None, position_offset: 0, segment: None };
        Self { tables, norm: embedding_norm, dropout: own.embedding_dropout as f32, layers, final_norm }
    }

    /// The stream of residuals, which begins with the embeddings' output.
    fn embed<'a>(&self, pass: &mut Pass<'_>, batch: &'a Batch) -> Computed<Stream<'a>> {
        let dropout = (self.dropout, EMBEDDING_SITE);
        let x = pass.embeddings_norm(self.tables, &batch.ids, None, &batch.layout, &self.norm, dropout)?;
        Ok(Stream::new(x, &batch.layout))
    }
}

/// The table of rotary positions of a kind of layers: heads are rotated as a whole.
fn angles(b: &mut Builder, own: &ModernBertConfig, kind: LayerType) -> Angles {
    let size = own.hidden_size / own.num_attention_heads.max(1);
    let rotary = Rotary { theta: own.theta(kind) as f32, size, pairing: Pairing::Halves };
    b.rotary(rotary, own.max_position_embeddings)
}

impl Network for ModernBert {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Computed<Encoded> {
        let mut stream = self.embed(pass, batch)?;
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            if capture.hidden_states {
                hidden_states.push(stream.value(pass)?);
            }
            let (attended, maps) = layer.attend(pass, &mut stream, capture.attention_maps)?;
            attention_maps.extend(maps);
            layer.finish(pass, &mut stream, &attended)?;
        }
        let last = stream.norm(pass, &self.final_norm)?;
        if capture.hidden_states {
            // The last one is normalised, as in `transformers`.
            hidden_states.push(last.clone());
        }
        Ok(Encoded { last, hidden_states, attention_maps, states: Vec::new() })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Computed<Var> {
        let mut stream = self.embed(pass, batch)?;
        let Some((last, layers)) = self.layers.split_last() else {
            let x = stream.norm(pass, &self.final_norm)?;
            return pass.gather(&x, rows);
        };
        for layer in layers {
            layer.forward(pass, &mut stream)?;
        }
        let (attended, _) = last.attend(pass, &mut stream, false)?;
        let x = stream.value(pass)?;
        let (attended, x) = (pass.gather(&attended, rows)?, pass.gather(&x, rows)?);
        let layout = Layout::new(pass.device(), &[rows.shape().elements()], 0)?;
        let mut stream = Stream::new(x, &layout);
        last.finish(pass, &mut stream, &attended)?;
        stream.norm(pass, &self.final_norm)
    }

    fn average_in_last_layer(&self, _: &mut Parameters) -> Computed<()> {
        let why = "a pre-norm layer that averages would add to what it reads";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.tables.word
    }
}

fn build(b: &mut Builder, own: &ModernBertConfig, head: Head) -> Model {
    let h = own.hidden_size;
    let init = Initial::new(own);
    let base = if head == Head::Encoder { "" } else { "model" };
    let network = b.at(base, |b| ModernBert::build(b, own, &init));
    let mut parts = HeadParts::default();
    if head != Head::Encoder {
        let activation = own.classifier_activation.into();
        let (dense, norm) = b.at("head", |b| {
            let weight = b.matrix("dense.weight", h, h, init.output);
            let bias = own.classifier_bias.then(|| b.vector("dense.bias", h, Init::Zeros));
            (Linear { weight, bias }, norm_of(b, "norm", h, own.norm_eps as f32, own.norm_bias))
        });
        let labels = match head {
            Head::Sequence { labels } | Head::Token { labels } => labels,
            Head::Span => 2,
            _ => 1,
        };
        if head == Head::MaskedLm {
            let bias = own.decoder_bias.then(|| b.padded_vector("decoder.bias", own.vocab_size, Init::Zeros));
            b.mark_output(network.word_table());
            parts.vocabulary = Some(VocabularyHead::of(dense, activation, norm, bias));
        } else {
            let out = Linear::build(b, "classifier", h, labels, init.task);
            let pooling = match own.classifier_pooling {
                ClassifierPooling::Cls => SequencePooling::First,
                ClassifierPooling::Mean => SequencePooling::Mean,
            };
            let (hidden, norm) = (Some((dense, activation)), Some(norm));
            let plain = Classifier::plain(own.classifier_dropout as f32, out);
            parts.classifier = Some(Classifier { pooling, hidden, norm, ..plain });
        }
    }
    Model::new(ModelConfig::ModernBert(own.clone()), head, network, parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_tensor::{DType, Device, Tape};
    use serde_json::json;

    use crate::Sequence;

    /// Section 7's model: four layers, windows of two tokens on each side.
    fn small() -> Value {
        json!({
            "model_type": "modernbert", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
            "intermediate_size": 24, "local_attention": 4, "pad_token_id": 1, "max_position_embeddings": 64,
        })
    }

    /// A model with weights from a formula: 0.2·sin(0.7·i + 1.3·k), k the place of a key among all, norms around 1.
    fn filled(json: Value, head: Head) -> (Model, Parameters) {
        let config = ModelConfig::from_value(json).unwrap();
        let device = Device::cpu(None, Some(2)).unwrap();
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, head).unwrap();
        let mut parameters = builder.finish(&device, DType::F32).unwrap();
        let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
        names.sort();
        for i in 0..names.len() {
            let entry = parameters.entries()[i].clone();
            let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
            let one = if entry.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            let value = |j: usize| (0.2 * (0.7 * j as f64 + 1.3 * k).sin() + one) as f32;
            let values: Vec<f32> = (0..entry.shape.elements()).map(value).collect();
            parameters.write(i, &values).unwrap();
        }
        parameters.refresh().unwrap();
        (model, parameters)
    }

    fn ids(length: usize) -> Vec<u32> {
        let inner = (0..length.saturating_sub(2)).map(|i| ((7 * i + 3) % 36 + 4) as u32);
        std::iter::once(1).chain(inner).chain([2]).take(length).collect()
    }

    /// The vocabulary's logits of all tokens, or those of a head with labels.
    fn logits((model, parameters): &(Model, Parameters), sequences: &[Vec<u32>]) -> Vec<f32> {
        let zeros = vec![0; 64];
        let each: Vec<Sequence<'_>> =
            sequences.iter().map(|ids| Sequence { ids, segments: &zeros[..ids.len()] }).collect();
        let batch = Batch::new(parameters.device(), model.config(), &each, 0).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, parameters);
        let rows: Vec<u32> = (0..batch.layout.tokens() as u32).collect();
        let rows = Tensor::from_slice(parameters.device(), [rows.len()], &rows).unwrap();
        let rows = (model.head() == Head::MaskedLm).then_some(&rows);
        let columns = model.config().sizes().vocab_size;
        let logits = model.logits(&mut pass, &batch, rows).unwrap().tensor().to_f32().unwrap();
        match rows {
            Some(_) => logits.chunks(columns.next_multiple_of(64)).flat_map(|row| row[..columns].to_vec()).collect(),
            None => logits,
        }
    }

    /// Computed by `transformers` 5.22 with the same weights (family-encoders, section 7).
    #[test]
    fn weights_of_a_formula_give_the_numbers_of_transformers() {
        let near = |got: &[f32], expected: &[f32]| got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 2e-5);
        let found = logits(&filled(small(), Head::MaskedLm), &[ids(14)]);
        assert!(near(&found, &[0.10731, -0.05745, 0.01414, 0.28466]), "{:?}", &found[..4]);
        assert!(near(&found[found.len() - 2..], &[0.15526, 0.12777]));
        let (sum, size) = found.iter().fold((0.0, 0.0), |(s, a), x| (s + f64::from(*x), a + f64::from(x.abs())));
        assert!((sum - 6.5039).abs() < 1e-4 && (size - 95.4411).abs() < 1e-4, "{sum} {size}");
        let found = logits(&filled(small(), Head::Sequence { labels: 3 }), &[ids(14)]);
        assert!(near(&found, &[0.20020, 0.53114, 0.16023]), "{found:?}");
    }

    #[test]
    fn company_changes_nothing_at_any_length() {
        let mut mean = small();
        mean["classifier_pooling"] = json!("mean");
        let all: Vec<Vec<u32>> = [14, 1, 2, 64, 5].into_iter().map(ids).collect();
        for (json, head) in [(small(), Head::MaskedLm), (mean, Head::Sequence { labels: 3 }), (small(), Head::Choice)] {
            let model = filled(json, head);
            let alone: Vec<f32> = all.iter().flat_map(|ids| logits(&model, std::slice::from_ref(ids))).collect();
            assert_eq!(logits(&model, &all), alone, "{head:?}");
        }
    }

    /// What a token outside of all windows changes reaches a token through layers that see all tokens, and no other way.
    #[test]
    fn windows_limit_what_is_seen() {
        let first = |json: &Value, changed: bool| {
            let mut ids = ids(40);
            ids[39] = if changed { 30 } else { ids[39] };
            logits(&filled(json.clone(), Head::MaskedLm), &[ids])[..40].to_vec()
        };
        let mut json = small();
        assert_ne!(first(&json, false), first(&json, true));
        json["layer_types"] = json!(vec!["sliding_attention"; 4]);
        assert_eq!(first(&json, false), first(&json, true));
    }

    #[test]
    fn older_and_newer_keys_say_the_same() {
        let of = |keys: Value| {
            let mut json = small();
            keys.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
            logits(&filled(json, Head::MaskedLm), &[ids(30)])
        };
        let older = json!({ "global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 70 });
        let newer = json!({
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": { "rope_theta": 500.0, "rope_type": "default" },
                "sliding_attention": { "rope_theta": 70.0, "rope_type": "default" },
            },
            // These do not count next to the newer ones.
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        });
        assert_eq!(of(older.clone()), of(newer));
        assert_ne!(of(older), of(json!({})));
        // Without any of them it is the class's defaults; keys of other versions and tools change nothing.
        let defaults = json!({
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "rope_parameters": null,
            "reference_compile": false, "sparse_prediction": true, "position_embedding_type": "sans_pos", "layer_norm_eps": 1e-3,
            "hidden_dropout_prob": 0.1, "rope_theta": 3, "type_vocab_size": 2,
        });
        assert_eq!(of(defaults), of(json!({})));
    }

    #[test]
    fn what_is_not_followed_is_refused() {
        let rope = |rope: Value| json!({ "full_attention": rope });
        let cases = [
            ("layer_types", json!(["full_attention"]), "one for each of the 4 layers"),
            (
                "layer_types",
                json!(["full_attention", "chunked_attention", "full_attention", "full_attention"]),
                "unknown variant",
            ),
            ("global_attn_every_n_layers", json!(0), "1 or more"),
            ("rope_parameters", rope(json!({ "rope_type": "yarn", "factor": 4.0 })), "`rope_type` is \"yarn\""),
            ("rope_parameters", rope(json!({ "factor": 4.0 })), "`factor`: 4.0"),
            ("rope_parameters", rope(json!({ "partial_rotary_factor": 0.5 })), "partial_rotary_factor"),
            ("rope_parameters", rope(json!({ "rope_theta": -1 })), "`rope_theta` is -1"),
            ("rope_parameters", json!({ "rope_theta": 10000.0 }), "full_attention"),
            ("rope_scaling", json!({ "type": "linear" }), "rope_scaling"),
            ("tie_word_embeddings", json!(false), "tie_word_embeddings"),
            ("head_dim", json!(4), "`head_dim` is 4"),
            ("is_decoder", json!(true), "is_decoder"),
            ("classifier_pooling", json!("max"), "unknown variant `max`"),
            ("hidden_activation", json!("xielu"), "unknown variant `xielu`"),
            ("local_attention", json!(0), "local_attention"),
            ("local_attention", json!(-1), "invalid value"),
            ("num_attention_heads", json!(16), "rotary positions"),
            ("mlp_dropout", json!(1.0), "mlp_dropout"),
            ("initializer_cutoff_factor", json!(0.0), "initializer_cutoff_factor"),
            ("max_position_embeddings", json!(1u64 << 40), "max_position_embeddings"),
        ];
        for (key, value, expected) in cases {
            let mut json = small();
            json[key] = value;
            let error = ModelConfig::from_value(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{key}: {error}");
        }
        // Nothing in a file is as long as its table of positions.
        let mut json = small();
        (json["hidden_size"], json["max_position_embeddings"]) = (json!(64), json!(1 << 20));
        let error = ModelConfig::from_value(json).unwrap_err().to_string();
        assert!(error.contains("at most 524288 for heads of 32"), "{error}");
    }

    #[test]
    fn other_sizes_keep_the_pattern_of_layers() {
        let kinds = |json: &Value, layers| {
            let mut config = ModelConfig::from_value(json.clone()).unwrap();
            config.set_layers(layers);
            config.check().unwrap();
            let ModelConfig::ModernBert(config) = config else { unreachable!() };
            config.types().into_iter().map(|kind| kind == LayerType::FullAttention).collect::<Vec<_>>()
        };
        let mut json = small();
        let expected = [true, false, false, true, false, false, true];
        assert_eq!(kinds(&json, 7), expected);
        json["layer_types"] = json!(["full_attention", "sliding_attention", "sliding_attention", "full_attention"]);
        assert_eq!(kinds(&json, 7), expected);
        assert_eq!(kinds(&json, 3), expected[..3]);
        // Ids of special tokens are those of a vocabulary.
        let mut config = Family::config_of_size("modernbert-mini").unwrap();
        assert_eq!(config.to_json().unwrap()["pad_token_id"], 50283);
        config.set_vocab_size(16384);
        assert_eq!(config.to_json().unwrap()["pad_token_id"], Value::Null);
    }

    /// Parameters as the papers count them, and multiply-adds of a token by hand.
    #[test]
    fn sizes_are_those_of_the_papers() {
        let millions = |name: &str| {
            let mut builder = Builder::new();
            let config = Family::config_of_size(name).unwrap();
            Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
            builder.entries().iter().map(|entry| entry.shape.elements()).sum::<usize>() / 1_000_000
        };
        let names = ["ettin-17m", "ettin-32m", "ettin-68m", "modernbert-base", "modernbert-large"];
        assert_eq!(names.map(millions), [16, 32, 68, 149, 395]);
        let config = Family::config_of_size("modernbert-base").unwrap();
        let (layer, h) = (4 * 768 * 768 + 3 * 768 * 1152, 768);
        let expected = 22 * layer + 2 * h * (8 * 1024 + 14 * 129);
        assert_eq!(config.multiply_adds(1024), expected as f64);
    }
}
