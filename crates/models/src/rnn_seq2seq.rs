//! Recurrent encoder-decoders (Sutskever et al. 2014) with attention (Bahdanau et al. 2015, Luong et al. 2015): an LSTM or GRU reads the
//! source, another one begins with the states that the first ended with and writes. At each step its state attends to what the encoder
//! gave for each token: c; what predicts is tanh(W·[c; h]), section 3 of Luong et al. Scores are h·s (`dot`), h·W·s (`general`) or
//! v·tanh(W·h + U·s) (`additive`, Bahdanau's). A step may read more than the token before it (`feeding`, in `fed.rs`): what the state
//! before it attends to, as in Bahdanau et al., or what the step before it predicted from, as in section 3.3 of Luong et al. No class of
//! `transformers` is like it; layers have the names of `torch.nn`.
//!
//! Legend: T tokens of targets, M of sources, N new tokens, B sequences, H hidden, V vocabulary.

use henson_tensor::{
    Activation, Attention, BiasValues, Builder, Cell, Directions, EmbeddingTables, Group, Init, Layout, Param,
    Parameters, Pass, QueryKeyValue, RecurrentState, Result, Tensor, TensorError, Var,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

mod fed;

use crate::config::{FamilyConfig, FineTuning, Recurrence, check_dropouts, check_sizes, own_config};
use crate::encoder_decoder::{DECODER_SITES, source_of};
use crate::heads::{HeadParts, VocabularyBias, VocabularyHead};
use crate::layers::Linear;
use crate::recurrent::{RecurrentSettings, RecurrentStack};
use crate::{
    Batch, CacheSizes, Capture, ConfigError, Decoder, DecoderCache, Encoded, Family, Head, HiddenActivation, Model,
    ModelConfig, Naming, Network, NewTokens, Sizes, SpecialIds, TargetReading,
};

/// Recurrent encoder-decoders as the table of families has them.
pub(crate) static FAMILY: Family = Family {
    types: &[("rnn-seq2seq", "RnnSeq2Seq")],
    naming: Naming {
        base_prefix: "model.",
        encoder: &["shared.", "encoder.", "decoder.", "attention."],
        old_endings: &[],
        tied: &[("lm_head.weight", "model.shared.weight")],
        ignored_endings: &[],
    },
    heads: &[Head::Encoder, Head::Seq2Seq],
    causal: None,
    endings: &[],
    sizes: &[
        ("rnn-seq2seq", || of_size(RnnCell::Lstm, Score::General)),
        ("rnn-seq2seq-gru", || of_size(RnnCell::Gru, Score::Additive)),
    ],
    parse: |value| Ok(ModelConfig::RnnSeq2Seq(serde_json::from_value(value)?)),
};

/// Dropout sites of the encoder: of words' vectors, and the first of those between layers. The decoder's stand behind
/// [`DECODER_SITES`]; its output has one of its own.
const WORD_SITE: u32 = 0;
const LAYER_SITES: u32 = 1;
const OUTPUT_SITE: u32 = 0x100;

/// What the layers are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RnnCell {
    /// LSTM.
    Lstm,
    /// GRU.
    Gru,
}

/// How a state and a token of the source are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Score {
    /// They are not: the source is known by the encoder's last state alone.
    None,
    /// h·s.
    Dot,
    /// h·W·s.
    General,
    /// v·tanh(W·h + U·s).
    Additive,
}

/// What a step of the decoder reads besides the token before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Feeding {
    /// Nothing: all steps are one scan.
    #[default]
    None,
    /// What the state before it attends to (Bahdanau et al. 2015).
    Context,
    /// What the step before it predicted from: input feeding (Luong et al. 2015).
    Output,
}

/// The sizes and settings of a recurrent encoder-decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RnnSeq2SeqConfig {
    /// V: tokens of the vocabulary, that of sources and targets.
    pub vocab_size: usize,
    /// Numbers of a token's vector.
    pub embedding_size: usize,
    /// H: units of a decoder's layer, and of both directions of an encoder's together.
    pub hidden_size: usize,
    /// Layers of the encoder, and as many of the decoder.
    pub num_hidden_layers: usize,
    /// What layers are made of.
    pub cell: RnnCell,
    /// Whether the encoder reads in both directions.
    pub bidirectional: bool,
    /// How the source is attended to.
    pub attention: Score,
    /// What a step of the decoder reads besides the token before it.
    pub feeding: Feeding,
    /// Maximum length of a source, and of a target; the network itself has no limit.
    pub max_position_embeddings: usize,
    /// Dropout of tokens' vectors, between layers and before the output.
    pub dropout: f64,
    /// Initial weights lie evenly between this number and its negative.
    pub initializer_range: f64,
    /// Whether the table of the output is that of tokens' vectors, which must then be as wide as the layers.
    pub tie_word_embeddings: bool,
    /// Padding.
    pub pad_token_id: u32,
    /// What ends a text.
    pub eos_token_id: u32,
    /// What stands before a target.
    pub decoder_start_token_id: u32,
    /// `rnn-seq2seq`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for RnnSeq2SeqConfig {
    fn default() -> Self {
        Self {
            vocab_size: 10_000,
            embedding_size: 256,
            hidden_size: 256,
            num_hidden_layers: 2,
            cell: RnnCell::Lstm,
            bidirectional: true,
            attention: Score::General,
            feeding: Feeding::None,
            max_position_embeddings: 1024,
            dropout: 0.2,
            initializer_range: 0.08,
            tie_word_embeddings: false,
            pad_token_id: 0,
            eos_token_id: 1,
            decoder_start_token_id: 0,
            model_type: "rnn-seq2seq".to_owned(),
            other: Map::new(),
        }
    }
}

fn of_size(cell: RnnCell, attention: Score) -> ModelConfig {
    let layers = if cell == RnnCell::Gru { 1 } else { 2 };
    ModelConfig::RnnSeq2Seq(RnnSeq2SeqConfig {
        cell,
        attention,
        num_hidden_layers: layers,
        ..RnnSeq2SeqConfig::default()
    })
}

impl FamilyConfig for RnnSeq2SeqConfig {
    own_config!();

    fn check(&self) -> std::result::Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("embedding_size", self.embedding_size, 1 << 14),
            ("hidden_size", self.hidden_size, 1 << 14),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 6),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
        ])?;
        check_dropouts(&[("dropout", self.dropout)])?;
        if self.bidirectional && !self.hidden_size.is_multiple_of(2) {
            return Err(ConfigError::value("hidden_size", self.hidden_size, "an even number, for two directions"));
        }
        if self.feeding != Feeding::None && self.attention == Score::None {
            let expected = "none where attention is none: what was attended to is what is fed";
            return Err(ConfigError::value("feeding", format!("{:?}", self.feeding).to_lowercase(), expected));
        }
        if self.tie_word_embeddings && self.embedding_size != self.hidden_size {
            let expected = format!("hidden_size, {}, where the table is the output's, too", self.hidden_size);
            return Err(ConfigError::value("embedding_size", self.embedding_size, expected));
        }
        if !(self.initializer_range > 0.0 && self.initializer_range <= 10.0) {
            return Err(ConfigError::value("initializer_range", self.initializer_range, "above 0 and at most 10"));
        }
        let ids = [("eos_token_id", self.eos_token_id), ("decoder_start_token_id", self.decoder_start_token_id)];
        match ids.into_iter().find(|(_, id)| *id as usize >= self.vocab_size) {
            Some((key, id)) => Err(ConfigError::value(key, id, format!("less than vocab_size, {}", self.vocab_size))),
            None => Ok(()),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: 1,
            intermediate_size: 4 * self.hidden_size,
            max_tokens: self.max_position_embeddings,
            // A tokenizer may mark the second text of a pair; the network takes no notice.
            segments: 2,
            hidden_act: HiddenActivation::Tanh,
            dropout: self.dropout,
            attention_dropout: 0.0,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    /// A target begins with padding, or with its end where there is none.
    fn set_special_ids(&mut self, ids: SpecialIds) {
        (self.eos_token_id, self.pad_token_id) = (ids.end, ids.padding.unwrap_or(ids.end));
        self.decoder_start_token_id = self.pad_token_id;
    }

    fn set_layers(&mut self, layers: usize) {
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        self.dropout = p;
    }

    fn can_average(&self) -> bool {
        false
    }

    /// The mean of a token of a source and one of a target of the same length.
    fn multiply_adds(&self, length: usize) -> f64 {
        let (h, layers) = (self.hidden_size as f64, self.num_hidden_layers as f64);
        let gates = if self.cell == RnnCell::Lstm { 4.0 } else { 3.0 };
        let attended = if self.attention == Score::None { 0.0 } else { h * (length as f64 + 1.5 * h) };
        let fed = if self.feeding == Feeding::None { 0.0 } else { 0.5 * gates * h * h };
        layers * gates * 1.75 * h * h + attended + fed
    }

    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FineTuning {
            learning_rates: [1e-3, 1e-3],
            epochs: 20.0,
            warmup: 0.0,
            weight_decay: 0.0,
            clip: 5.0,
            ..FineTuning::BERT
        }
    }

    fn targets(&self) -> Option<TargetReading> {
        let (start, end) = (self.decoder_start_token_id, self.eos_token_id);
        Some(TargetReading { start, end, from_source: false })
    }

    fn in_transformers(&self) -> bool {
        false
    }

    /// Where both directions' last states are put side by side, or steps are fed, rows are picked while it runs.
    fn recurrence(&self) -> Recurrence {
        let fed = self.bidirectional || self.feeding != Feeding::None;
        if fed { Recurrence::Fed } else { Recurrence::Layers }
    }
}

fn build(b: &mut Builder, own: &RnnSeq2SeqConfig, head: Head) -> Model {
    let base = if head == Head::Encoder { "" } else { "model" };
    let network = b.at(base, |b| RnnSeq2Seq::build(b, own));
    let mut parts = HeadParts::default();
    if head == Head::Seq2Seq {
        let (h, init) = (own.hidden_size, Init::Uniform(own.initializer_range as f32));
        let table = (!own.tie_word_embeddings).then(|| b.padded_table("lm_head.weight", own.vocab_size, h, init));
        if table.is_none() {
            b.mark_output(network.words);
        }
        let bias = b.padded_vector("lm_head.bias", own.vocab_size, Init::Zeros);
        parts.vocabulary = Some(VocabularyHead::scaled(table, 1.0, VocabularyBias::Trained(bias)));
    }
    Model::new(ModelConfig::RnnSeq2Seq(own.clone()), head, network, parts)
}

/// Views into the parameters.
#[derive(Debug)]
struct RnnSeq2Seq {
    words: Param,
    encoder: RecurrentStack,
    decoder: RecurrentStack,
    attention: Option<Attend>,
    settings: RnnSeq2SeqConfig,
}

/// How states attend to the source, and what becomes of it.
#[derive(Clone, Copy, Debug)]
struct Attend {
    scores: Scores,
    /// H×2H: of what was attended to and of the state.
    combine: Linear,
}

#[derive(Clone, Copy, Debug)]
enum Scores {
    Dot,
    /// H×H.
    General(Param),
    /// What projects states and tokens of the source, H×H each, and v.
    Additive {
        states: Param,
        tokens: Param,
        v: Param,
    },
}

impl Attend {
    fn build(b: &mut Builder, score: Score, h: usize, init: Init) -> Option<Self> {
        let scores = match score {
            Score::None => return None,
            Score::Dot => Scores::Dot,
            Score::General => Scores::General(b.matrix("score.weight", h, h, init)),
            Score::Additive => Scores::Additive {
                states: b.matrix("query.weight", h, h, init),
                tokens: b.matrix("key.weight", h, h, init),
                v: b.vector("score.weight", h, init),
            },
        };
        Some(Self { scores, combine: Linear::build(b, "combine", 2 * h, h, init) })
    }

    /// What tokens of the source are compared by: M×H.
    fn keys(&self, pass: &mut Pass<'_>, memory: &Var) -> Result<Var> {
        match self.scores {
            Scores::Additive { tokens, .. } => pass.linear(memory, tokens, None, Activation::None),
            Scores::Dot | Scores::General(_) => Ok(memory.clone()),
        }
    }

    /// What states attend to, c: T×H.
    fn attend(
        &self,
        pass: &mut Pass<'_>,
        (states, layout): (&Var, &Layout),
        [keys, memory]: [&Var; 2],
        source: &Layout,
    ) -> Result<Var> {
        match self.scores {
            Scores::Additive { states: weight, v, .. } => {
                let queries = pass.linear(states, weight, None, Activation::None)?;
                pass.additive_attention(Some((&queries, layout)), keys, v, memory, source)
            }
            Scores::Dot => self.multiply(pass, states.clone(), layout, [keys, memory], source),
            Scores::General(weight) => {
                let queries = pass.linear(states, weight, None, Activation::None)?;
                self.multiply(pass, queries, layout, [keys, memory], source)
            }
        }
    }

    /// tanh(W·[c; h]): T×H.
    fn combined(&self, pass: &mut Pass<'_>, attended: &Var, states: &Var) -> Result<Var> {
        let both = pass.beside(attended, states)?;
        self.combine.forward(pass, &both, Activation::Tanh)
    }

    fn multiply(
        &self,
        pass: &mut Pass<'_>,
        query: Var,
        layout: &Layout,
        [keys, memory]: [&Var; 2],
        source: &Layout,
    ) -> Result<Var> {
        let attention = Attention { scale: 1.0, ..Attention::new(1, query.tensor().columns()) };
        let from = QueryKeyValue::Apart { query, key: keys.clone(), value: memory.clone() };
        pass.attention(&attention, from, &BiasValues::None, (layout, source), (0.0, 0))
    }
}

/// What a decoder begins with, and what it ends with.
struct Begin {
    /// The states of its layers, B×H each.
    states: Vec<RecurrentState>,
    /// What the step before predicted from (B×H), where that is fed; none: zeros.
    fed: Option<Var>,
}

impl RnnSeq2Seq {
    fn build(b: &mut Builder, own: &RnnSeq2SeqConfig) -> Self {
        let (h, w, layers) = (own.hidden_size, own.embedding_size, own.num_hidden_layers);
        let (init, dropout) = (Init::Uniform(own.initializer_range as f32), own.dropout as f32);
        let words =
            b.group(Group::Embeddings, |b| b.at("shared", |b| b.padded_table("weight", own.vocab_size, w, init)));
        let cell = if own.cell == RnnCell::Lstm { Cell::Lstm } else { Cell::Gru };
        let (directions, units) = if own.bidirectional { (Directions::Both, h / 2) } else { (Directions::Forward, h) };
        let of = |units: usize| RecurrentSettings {
            dropout,
            init: Some(init),
            ..RecurrentSettings::new(cell, w, units, layers)
        };
        let encoder = RecurrentSettings { directions, site: LAYER_SITES, ..of(units) };
        let fed = if own.feeding == Feeding::None { 0 } else { h };
        let decoder = RecurrentSettings { site: DECODER_SITES + LAYER_SITES, input: w + fed, ..of(h) };
        let last = Group::Layer(layers.saturating_sub(1));
        Self {
            words,
            encoder: b.at("encoder", |b| RecurrentStack::build(b, encoder)),
            decoder: b.at("decoder", |b| RecurrentStack::build(b, decoder)),
            attention: b.group(last, |b| b.at("attention", |b| Attend::build(b, own.attention, h, init))),
            settings: own.clone(),
        }
    }

    /// Vectors of tokens.
    fn embed(&self, pass: &mut Pass<'_>, ids: &Tensor, layout: &Layout, site: u32) -> Result<Var> {
        let tables = EmbeddingTables { word: self.words, position: None, position_offset: 0, segment: None };
        let x = pass.embeddings(tables, ids, layout.positions(), None)?;
        pass.dropout_tokens(x, layout, (self.settings.dropout as f32, site))
    }

    /// What the encoder gives for each token (M×H), and the states that the decoder's layers begin with (B×H).
    fn read(&self, pass: &mut Pass<'_>, batch: &Batch) -> Result<(Var, Vec<RecurrentState>)> {
        let x = self.embed(pass, &batch.ids, &batch.layout, WORD_SITE)?;
        let (memory, last) = self.encoder.forward_from(pass, x, &batch.layout, &[])?;
        if !self.settings.bidirectional {
            return Ok((memory, last));
        }
        let b = batch.layout.sequences() as u32;
        let rows = |from: u32| Tensor::from_slice(pass.device(), [b as usize], &(from..from + b).collect::<Vec<u32>>());
        let sides = [rows(0)?, rows(b)?];
        let mut joined = |x: &Var| -> Result<Var> {
            let [forward, backward] = [pass.gather(x, &sides[0])?, pass.gather(x, &sides[1])?];
            pass.beside(&forward, &backward)
        };
        let mut states = Vec::with_capacity(last.len());
        for RecurrentState { hidden, cell } in &last {
            let cell = cell.as_ref().map(&mut joined).transpose()?;
            states.push(RecurrentState { hidden: joined(hidden)?, cell });
        }
        Ok((memory, states))
    }

    /// What the decoder predicts from at each token (T×H), from vectors of tokens (T×W) and what its layers begin with; and what they end
    /// with.
    fn write(
        &self,
        pass: &mut Pass<'_>,
        (x, layout): (Var, &Layout),
        begin: Begin,
        source: Option<(&[Var; 2], &Layout)>,
    ) -> Result<(Var, Begin)> {
        let (out, end) = match (self.attention, source) {
            (Some(attention), Some((rows, of_source))) if self.settings.feeding != Feeding::None => {
                let source = fed::Source { rows: rows.clone(), layout: of_source.clone() };
                fed::Steps { network: self, attention, layout }.write(pass, &x, begin, source)?
            }
            (attention, source) => {
                let (states, last) = self.decoder.forward_from(pass, x, layout, &begin.states)?;
                let out = match (attention, source) {
                    (Some(attention), Some(([keys, memory], source))) => {
                        let attended = attention.attend(pass, (&states, layout), [keys, memory], source)?;
                        attention.combined(pass, &attended, &states)?
                    }
                    _ => states,
                };
                (out, Begin { states: last, fed: None })
            }
        };
        let out = pass.dropout_tokens(out, layout, (self.settings.dropout as f32, DECODER_SITES + OUTPUT_SITE))?;
        Ok((out, end))
    }

    /// What the decoder attends to: keys and memory, where it does.
    fn source(&self, pass: &mut Pass<'_>, memory: &Var) -> Result<Option<[Var; 2]>> {
        let keys = self.attention.map(|attention| attention.keys(pass, memory)).transpose()?;
        Ok(keys.map(|keys| [keys, memory.clone()]))
    }

    fn layers(&self) -> usize {
        self.settings.num_hidden_layers
    }

    fn has_cells(&self) -> bool {
        self.settings.cell == RnnCell::Lstm
    }
}

impl Network for RnnSeq2Seq {
    /// Of a batch with targets, what predicts their tokens; of one without, what the encoder gives.
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        if capture.attention_maps || capture.hidden_states {
            let why = "a recurrent encoder-decoder gives its last states alone";
            return Err(TensorError::Unsupported { operation: "encode", why });
        }
        let (memory, states) = self.read(pass, batch)?;
        let last = match &batch.target {
            None => memory,
            Some(target) => {
                let x = self.embed(pass, &target.ids, &target.layout, DECODER_SITES + WORD_SITE)?;
                let rows = self.source(pass, &memory)?;
                let source = rows.as_ref().map(|rows| (rows, &batch.layout));
                self.write(pass, (x, &target.layout), Begin { states, fed: None }, source)?.0
            }
        };
        Ok(Encoded { last, hidden_states: Vec::new(), attention_maps: Vec::new(), states: Vec::new() })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let last = self.encode(pass, batch, Capture::default())?.last;
        pass.gather(&last, rows)
    }

    fn average_in_last_layer(&self, _: &mut Parameters) -> Result<()> {
        let why = "a recurrent layer cannot be one that averages";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.words
    }

    fn decoder(&self) -> Option<&dyn Decoder> {
        Some(self)
    }
}

impl Decoder for RnnSeq2Seq {
    /// Of what is written, states and cells of layers in the place of keys and values, and in a layer more what is fed, where that is the
    /// output. Of a source, those that a decoder begins with, and in a layer more what it attends to.
    fn cache_sizes(&self) -> CacheSizes {
        CacheSizes { layers: self.layers() + 1, width: self.settings.hidden_size, source: true }
    }

    fn read_sources(&self, pass: &mut Pass<'_>, sources: &Batch, cache: &mut DecoderCache) -> Result<()> {
        let (memory, states) = self.read(pass, sources)?;
        let source = source_of(&mut cache.source)?;
        for (i, state) in states.iter().enumerate() {
            pass.keep_state(source, i, state)?;
        }
        if let Some([keys, memory]) = self.source(pass, &memory)? {
            let both = pass.beside(&keys, &memory)?;
            pass.append_to_cache(source, self.layers(), &both, 0, &sources.layout)?;
        }
        Ok(())
    }

    /// Where states are kept in the cache is found on the host.
    fn is_recordable(&self) -> bool {
        false
    }

    fn step(&self, pass: &mut Pass<'_>, new: &NewTokens, cache: &mut DecoderCache) -> Result<Var> {
        let x = self.embed(pass, &new.ids, &new.layout, WORD_SITE)?;
        let source = source_of(&mut cache.source)?;
        let mut states = Vec::with_capacity(self.layers());
        for i in 0..self.layers() {
            let first = pass.kept_state(source, i, None, self.has_cells())?;
            states.push(pass.kept_state_or(&cache.written, i, &new.layout, &first)?);
        }
        let fed = match self.settings.feeding {
            Feeding::Output => Some(pass.kept_state(&cache.written, self.layers(), Some(&new.layout), false)?.hidden),
            Feeding::None | Feeding::Context => None,
        };
        let kept = self.attention.map(|_| pass.cached_rows(source, self.layers())).transpose()?;
        let source = kept.as_ref().map(|(rows, layout)| (rows, layout));
        let (out, end) = self.write(pass, (x, &new.layout), Begin { states, fed }, source)?;
        for (i, state) in end.states.iter().enumerate() {
            pass.keep_state(&mut cache.written, i, state)?;
        }
        if let Some(hidden) = end.fed {
            pass.keep_state(&mut cache.written, self.layers(), &RecurrentState { hidden, cell: None })?;
        }
        Ok(out)
    }
}
