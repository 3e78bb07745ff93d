//! ELMo (Peters et al. 2018): two language models over words that are read as characters, one from left to right and one from
//! right to left, each a stack of LSTMs with projections. What a word's vector is made of are the layers of both.
//!
//! Its tokens are bytes, white space and the marks of sentences: the words are found in them (`characters.rs`), and every token of a word
//! has its vector. Its config is the authors' options.json.
//!
//! Legend: T tokens, W words, P numbers of a direction, C cells, L layers.

use henson_tensor::{
    Activation, Builder, Cell, Directions, Group, Init, Layout, Param, Parameters, Pass, RecurrentState, Result,
    Tensor, TensorError, Var,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::batch::Apart;
use crate::bert::tenth;
use crate::characters::{CHARACTERS, CharacterCnn, CharacterSettings, SENTENCE_END};
use crate::config::{FamilyConfig, FineTuning, check_dropouts, check_sizes, own_config};
use crate::family::{Arrays, Original};
use crate::heads::{Classifier, HeadParts, SequencePooling, VocabularyBias, VocabularyHead};
use crate::layers::Linear;
use crate::recurrent::{RecurrentSettings, RecurrentStack};
use crate::{
    Batch, Capture, ConfigError, Encoded, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network, Sizes,
};

/// ELMo as the table of families has it. `transformers` has no such model: the names are ours.
pub(crate) static FAMILY: Family = Family {
    types: &[("elmo", "Elmo")],
    naming: Naming {
        base_prefix: "elmo.",
        encoder: &["words.", "forward_lm.", "backward_lm."],
        old_endings: &[],
        tied: &[],
        ignored_endings: &[],
    },
    heads: &[Head::Encoder, Head::MaskedLm, Head::Sequence { labels: 0 }, Head::Token { labels: 0 }],
    causal: None,
    // No masks: the next word and the one before.
    endings: &[(Head::MaskedLm, "BidirectionalLM")],
    // But for the first, the sizes that were published.
    sizes: &[
        ("elmo-tiny", || of_size(TINY_FILTERS, 1, 256, 64)),
        ("elmo-small", || of_size(FILTERS, 1, 1024, 128)),
        ("elmo-medium", || of_size(FILTERS, 1, 2048, 256)),
        ("elmo-original", || of_size(FILTERS, 2, 4096, 512)),
    ],
    parse: |value| Ok(ModelConfig::Elmo(serde_json::from_value(value)?)),
};

/// The authors' files.
pub(crate) const ORIGINAL: Original =
    Original { model_type: "elmo", config: "options.json", weights: "weights.hdf5", convert };

/// Tokens: bytes, and the marks of a sentence's beginning and end.
const TOKENS: usize = SENTENCE_END as usize + 1;

/// Bytes of a sequence at most. Nothing in the network ends there.
const MOST_BYTES: usize = 1 << 14;

/// The filters of all published models: of each width how many.
const FILTERS: &[(usize, usize)] = &[(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)];
const TINY_FILTERS: &[(usize, usize)] = &[(1, 16), (2, 16), (3, 32), (4, 64), (5, 128)];

/// Words that a new model predicts, where nobody says otherwise: a corpus of some millions has few others often enough.
const USUAL_WORDS: usize = 50_000;

/// Where dropout falls: before every layer of the first direction and of the second, and on their last output.
const DROPOUT: u32 = 0x7100;

/// The sizes and settings of an ELMo: options.json with a `model_type`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElmoConfig {
    /// What reads a word.
    pub char_cnn: CharCnn,
    /// What reads words.
    pub lstm: Lstm,
    /// Dropout on what every layer reads, and on the last one's output.
    #[serde(default = "tenth")]
    pub dropout: f64,
    /// Words that the two language models predict, the marks of sentences and unknown words included; none: there is no such head.
    #[serde(default)]
    pub n_tokens_vocab: Option<usize>,
    /// `elmo`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What reads a word as characters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CharCnn {
    /// `relu` or `tanh`.
    #[serde(default)]
    pub activation: FilterActivation,
    /// The vectors of characters.
    pub embedding: CharEmbedding,
    /// Of each width (in characters) how many filters.
    pub filters: Vec<(usize, usize)>,
    /// Characters of a word, with its start and end.
    pub max_characters_per_token: usize,
    /// 261 while it is trained, 262 afterwards; it changes nothing here.
    pub n_characters: usize,
    /// Highway layers.
    pub n_highway: usize,
}

/// What follows the filters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilterActivation {
    /// max(0, x).
    #[default]
    Relu,
    /// Of older models.
    Tanh,
}

/// The vectors of characters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CharEmbedding {
    /// How long they are.
    pub dim: usize,
}

/// The LSTMs of a direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lstm {
    /// The largest magnitude of a cell.
    pub cell_clip: f64,
    /// C.
    pub dim: usize,
    /// L.
    pub n_layers: usize,
    /// The largest magnitude of what is projected.
    pub proj_clip: f64,
    /// P.
    pub projection_dim: usize,
    /// Whether layers behind the first add what they read to what they give.
    pub use_skip_connections: bool,
}

/// C cells and P numbers in each direction.
fn of_size(filters: &[(usize, usize)], n_highway: usize, dim: usize, projection_dim: usize) -> ModelConfig {
    ModelConfig::Elmo(ElmoConfig {
        char_cnn: CharCnn {
            activation: FilterActivation::Relu,
            embedding: CharEmbedding { dim: 16 },
            filters: filters.to_vec(),
            max_characters_per_token: 50,
            n_characters: CHARACTERS + 1,
            n_highway,
        },
        lstm: Lstm { cell_clip: 3.0, dim, n_layers: 2, proj_clip: 3.0, projection_dim, use_skip_connections: true },
        dropout: 0.1,
        n_tokens_vocab: Some(USUAL_WORDS),
        model_type: "elmo".to_owned(),
        other: Map::new(),
    })
}

impl ElmoConfig {
    fn words(&self) -> CharacterSettings {
        let CharCnn { activation, embedding, filters, max_characters_per_token, n_highway, .. } = &self.char_cnn;
        let (all, width) = (filters.iter().map(|(_, count)| count).sum::<usize>(), self.lstm.projection_dim);
        CharacterSettings {
            embedding: embedding.dim,
            filters: filters.clone(),
            activation: match activation {
                FilterActivation::Relu => Activation::Relu,
                FilterActivation::Tanh => Activation::Tanh,
            },
            highways: *n_highway,
            projection: (all != width).then_some(width),
            max_characters: *max_characters_per_token,
            filter_range: Some(0.05),
            character_range: 1.0,
            dropout: (0.0, 0),
        }
    }

    fn stack(&self, directions: Directions) -> RecurrentSettings {
        let Lstm { cell_clip, dim, n_layers, proj_clip, projection_dim, .. } = self.lstm;
        // None, or zero: any magnitude.
        let clip = |size: f64| if size > 0.0 { size as f32 } else { f32::INFINITY };
        RecurrentSettings {
            projection: Some(projection_dim),
            directions,
            clip_cell: clip(cell_clip),
            clip_projection: clip(proj_clip),
            tensorflow: true,
            ..RecurrentSettings::new(Cell::Lstm, projection_dim, dim, n_layers)
        }
    }
}

impl FamilyConfig for ElmoConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        let Lstm { dim, n_layers, projection_dim, cell_clip, proj_clip, .. } = self.lstm;
        check_sizes(&[
            ("lstm.dim", dim, 1 << 16),
            ("lstm.n_layers", n_layers, 1 << 6),
            ("lstm.projection_dim", projection_dim, 1 << 16),
            ("char_cnn.embedding.dim", self.char_cnn.embedding.dim, 1 << 12),
            ("char_cnn.max_characters_per_token", self.char_cnn.max_characters_per_token, 1 << 10),
            ("n_tokens_vocab", self.n_tokens_vocab.unwrap_or(3), 1 << 24),
        ])?;
        for (key, clip) in [("lstm.cell_clip", cell_clip), ("lstm.proj_clip", proj_clip)] {
            if !(0.0..=1e6).contains(&clip) {
                return Err(ConfigError::value(key, clip, "0 (no clipping) to 1000000"));
            }
        }
        let filters: usize = self.char_cnn.filters.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count));
        if filters > 1 << 16 || self.char_cnn.n_highway > 1 << 6 {
            return Err(ConfigError::value("char_cnn.filters", filters, "at most 65536 in all, and 64 highways"));
        }
        if ![CHARACTERS, CHARACTERS + 1].contains(&self.char_cnn.n_characters) {
            let got = self.char_cnn.n_characters;
            return Err(ConfigError::value("char_cnn.n_characters", got, "261 or 262: bytes and a few marks"));
        }
        if let Some(problem) = self.words().problem() {
            return Err(ConfigError::value("char_cnn.filters", format!("{:?}", self.char_cnn.filters), problem));
        }
        check_dropouts(&[("dropout", self.dropout)])
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: TOKENS,
            hidden_size: 2 * self.lstm.projection_dim,
            num_hidden_layers: self.lstm.n_layers,
            num_attention_heads: 1,
            intermediate_size: self.lstm.dim,
            max_tokens: MOST_BYTES,
            // The second text of a pair may be marked; the network takes no notice.
            segments: 2,
            hidden_act: HiddenActivation::Relu,
            dropout: self.dropout,
            attention_dropout: 0.0,
            causal: false,
        }
    }

    /// Tokens are bytes: there are no other.
    fn set_vocab_size(&mut self, _size: usize) {}

    fn set_layers(&mut self, layers: usize) {
        self.lstm.n_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        self.dropout = p;
    }

    fn can_average(&self) -> bool {
        false
    }

    /// Of a byte, of which a word has about six; those of words' own characters are done once for each word.
    fn multiply_adds(&self, _length: usize) -> f64 {
        let Lstm { dim, n_layers, projection_dim, .. } = self.lstm;
        2.0 * (n_layers * dim * projection_dim * 9) as f64 / 6.0
    }

    fn characters(&self) -> Option<CharacterSettings> {
        Some(self.words())
    }

    /// Adam at 10⁻³ as its authors trained the networks that stand on it, and long enough for a head that begins with nothing.
    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FineTuning {
            learning_rates: [1e-3, 1e-3],
            epochs: 10.0,
            warmup: 0.0,
            weight_decay: 0.0,
            clip: 5.0,
            ..FineTuning::BERT
        }
    }

    fn predicted_words(&self) -> Option<usize> {
        self.n_tokens_vocab
    }

    fn set_predicted_words(&mut self, words: usize) {
        self.n_tokens_vocab = Some(words);
    }

    fn carries_states(&self) -> bool {
        true
    }

    fn in_transformers(&self) -> bool {
        false
    }
}

fn build(b: &mut Builder, own: &ElmoConfig, head: Head) -> Model {
    let base = if head == Head::Encoder { "" } else { "elmo" };
    let width = 2 * own.lstm.projection_dim;
    let network = b.at(base, |b| Elmo {
        words: b.group(Group::Embeddings, |b| b.at("words", |b| CharacterCnn::build(b, &own.words()))),
        directions: [("forward_lm", Directions::Forward), ("backward_lm", Directions::Backward)]
            .map(|(name, directions)| b.at(name, |b| RecurrentStack::build(b, own.stack(directions)))),
        skip: own.lstm.use_skip_connections,
        dropout: own.dropout as f32,
    });
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        // One table for both directions.
        let (words, p) = (own.n_tokens_vocab.unwrap_or(USUAL_WORDS), own.lstm.projection_dim);
        let table = b.padded_table("softmax.weight", words, p, Init::Normal(1.0 / (p.max(1) as f32).sqrt()));
        let bias = b.padded_vector("softmax.bias", words, Init::Zeros);
        parts.vocabulary = Some(VocabularyHead::scaled(Some(table), 1.0, VocabularyBias::Trained(bias)));
    }
    let init = Init::Normal(1.0 / (width as f32).sqrt());
    let mut classifier = |labels| {
        b.group(Group::Head, |b| {
            Classifier::plain(own.dropout as f32, Linear::build(b, "classifier", width, labels, init))
        })
    };
    parts.classifier = match head {
        Head::Sequence { labels } => Some(Classifier { pooling: SequencePooling::Mean, ..classifier(labels) }),
        Head::Token { labels } => Some(classifier(labels)),
        _ => None,
    };
    Model::new(ModelConfig::Elmo(own.clone()), head, network, parts)
}

/// Two language models over one reader of words.
#[derive(Debug)]
struct Elmo {
    words: CharacterCnn,
    directions: [RecurrentStack; 2],
    skip: bool,
    dropout: f32,
}

impl Elmo {
    /// The outputs of all layers of a direction (W×P each), and what they end with.
    fn run(
        &self,
        pass: &mut Pass<'_>,
        direction: usize,
        words: &Var,
        layout: &Layout,
        initial: &[RecurrentState],
    ) -> Result<(Vec<Var>, Vec<RecurrentState>)> {
        let stack = &self.directions[direction];
        let count = stack.layers.len();
        let (mut x, mut outputs, mut states) = (words.clone(), Vec::new(), Vec::new());
        for (i, layer) in stack.layers.iter().enumerate() {
            let site = DROPOUT + (direction * count + i) as u32;
            let read = pass.dropout_tokens(x, layout, (self.dropout, site))?;
            let output = pass.recurrent(&read, layer, layout, initial.get(direction * count + i))?;
            x = match self.skip && i > 0 {
                // Dropout falls on both, as in the authors' code.
                true => pass.add_residual(output.out, &read, layout, (0.0, 0))?,
                false => output.out,
            };
            outputs.push(x.clone());
            states.push(output.last);
        }
        Ok((outputs, states))
    }

    /// What predicts the next word of the sequences that are read forwards, and the word before of the others: a row for each word.
    fn predict(&self, pass: &mut Pass<'_>, words: &Var, batch: &Batch, apart: &Apart) -> Result<Encoded> {
        let (mut ends, mut states) = (Vec::new(), Vec::new());
        for (direction, (places, layout)) in apart.places.iter().zip(&apart.layouts).enumerate() {
            let own = pass.gather(words, places)?;
            let (outputs, last) = self.run(pass, direction, &own, layout, &batch.states)?;
            let site = DROPOUT + (2 * outputs.len() + direction) as u32;
            let end = outputs.into_iter().next_back().unwrap_or(own);
            ends.push(pass.dropout_tokens(end, layout, (self.dropout, site))?);
            states.extend(last);
        }
        let last = pass.join(&ends[0], &ends[1], [&apart.places[0], &apart.places[1]])?;
        Ok(Encoded { last, hidden_states: Vec::new(), attention_maps: Vec::new(), states })
    }
}

fn words_of(batch: &Batch) -> Result<&crate::characters::WordStream> {
    let why = "the batch was laid out for a network that does not read words as characters";
    batch.words.as_ref().ok_or(TensorError::Unsupported { operation: "encode", why })
}

impl Network for Elmo {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        if capture.attention_maps {
            let why = "there is no attention in recurrent layers";
            return Err(TensorError::Unsupported { operation: "encode", why });
        }
        let stream = words_of(batch)?;
        let expected: usize = self.directions.iter().map(|stack| stack.layers.len()).sum();
        if !batch.states.is_empty() && batch.states.len() != expected {
            let why = "the states that the batch continues are not one for each layer and direction";
            return Err(TensorError::Unsupported { operation: "encode", why });
        }
        let words = self.words.forward(pass, &stream.words)?;
        if let Some(apart) = &batch.apart {
            return self.predict(pass, &words, batch, apart);
        }
        let (forward, mut states) = self.run(pass, 0, &words, &stream.layout, &batch.states)?;
        let (backward, others) = self.run(pass, 1, &words, &stream.layout, &batch.states)?;
        states.extend(others);
        let last = forward.len() - 1;
        let mut hidden_states = Vec::new();
        let layer = |pass: &mut Pass<'_>, parts: [&Var; 2]| {
            let both = pass.side_by_side(&parts)?;
            pass.gather(&both, &stream.of_tokens)
        };
        if capture.hidden_states {
            hidden_states.push(layer(pass, [&words, &words])?);
            for i in 0..last {
                hidden_states.push(layer(pass, [&forward[i], &backward[i]])?);
            }
        }
        let last = layer(pass, [&forward[last], &backward[last]])?;
        if capture.hidden_states {
            hidden_states.push(last.clone());
        }
        Ok(Encoded { last, hidden_states, attention_maps: Vec::new(), states })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let last = self.encode(pass, batch, Capture::default())?.last;
        pass.gather(&last, rows)
    }

    fn average_in_last_layer(&self, _parameters: &mut Parameters) -> Result<()> {
        let why = "a recurrent layer does not average";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.words.table()
    }
}

/// The authors' arrays under our names: matrices with a row for each output, gates in the order of PyTorch, and the 1 that
/// TensorFlow adds to forget gates while it runs in their bias.
fn convert(mut arrays: Arrays) -> Result<Arrays, String> {
    let mut out = Arrays::new();
    let table = take(&mut arrays, "char_embed", 2)?;
    out.insert("words.characters.weight".to_owned(), table);
    for i in 0.. {
        let name = format!("CNN/W_cnn_{i}");
        if !arrays.contains_key(&name) {
            break;
        }
        let (shape, numbers) = take(&mut arrays, &name, 4)?;
        let (inputs, filters) = (shape[0] * shape[1] * shape[2], shape[3]);
        insert(
            &mut out,
            format!("words.filters.{i}.weight"),
            transposed(&numbers, inputs, filters),
            &[filters, inputs],
        );
        out.insert(format!("words.filters.{i}.bias"), take(&mut arrays, &format!("CNN/b_cnn_{i}"), 1)?);
    }
    for i in 0.. {
        if !arrays.contains_key(&format!("CNN_high_{i}/W_carry")) {
            break;
        }
        for (theirs, ours) in [("transform", "transform"), ("carry", "gate")] {
            let (from, to) = (format!("CNN_high_{i}/"), format!("words.highways.{i}.{ours}"));
            linear(&mut arrays, [format!("{from}W_{theirs}"), format!("{from}b_{theirs}")], &mut out, &to)?;
        }
    }
    if arrays.contains_key("CNN_proj/W_proj") {
        linear(
            &mut arrays,
            ["CNN_proj/W_proj".to_owned(), "CNN_proj/b_proj".to_owned()],
            &mut out,
            "words.projection",
        )?;
    }
    for (direction, name) in [(0, "forward_lm"), (1, "backward_lm")] {
        for layer in 0.. {
            let from = format!("RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell");
            if !arrays.contains_key(&format!("{from}/W_0")) {
                break;
            }
            cell(&mut arrays, &from, &mut out, |what| format!("{name}.{what}_l{layer}"))?;
        }
    }
    // What is left over keeps its name, so that it is reported.
    out.extend(arrays);
    Ok(out)
}

fn take(arrays: &mut Arrays, name: &str, dimensions: usize) -> Result<(Vec<usize>, Vec<f32>), String> {
    let array = arrays.remove(name).ok_or_else(|| format!("it has no array {name}"))?;
    match array.0.len() == dimensions {
        true => Ok(array),
        false => Err(format!("{name} has the shape {:?}, not one of {dimensions} dimensions", array.0)),
    }
}

fn insert(out: &mut Arrays, name: String, numbers: Vec<f32>, shape: &[usize]) {
    out.insert(name, (shape.to_vec(), numbers));
}

/// Rows and columns exchanged.
fn transposed(numbers: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| numbers[r * columns + c])).collect()
}

fn linear(arrays: &mut Arrays, names: [String; 2], out: &mut Arrays, to: &str) -> Result<(), String> {
    let (shape, numbers) = take(arrays, &names[0], 2)?;
    insert(out, format!("{to}.weight"), transposed(&numbers, shape[0], shape[1]), &[shape[1], shape[0]]);
    out.insert(format!("{to}.bias"), take(arrays, &names[1], 1)?);
    Ok(())
}

/// An LSTM: z = [x, h]·W_0 + B, gates i, j, f, o.
fn cell(arrays: &mut Arrays, from: &str, out: &mut Arrays, to: impl Fn(&str) -> String) -> Result<(), String> {
    let (shape, gates) = take(arrays, &format!("{from}/W_0"), 2)?;
    let (of_projection, projection) = take(arrays, &format!("{from}/W_P_0"), 2)?;
    let (of_bias, bias) = take(arrays, &format!("{from}/B"), 1)?;
    let (c, p) = (of_projection[0], of_projection[1]);
    if shape[1] != 4 * c || of_bias != [4 * c] || shape[0] < p {
        return Err(format!("{from} has W_0 of {shape:?}, B of {of_bias:?} and W_P_0 of {of_projection:?}"));
    }
    // Where PyTorch's i, f, g, o stand among them.
    let order = |row: usize| [0, 2, 1, 3][row / c] * c + row % c;
    let inputs = shape[0] - p;
    let rows = |from: usize, to: usize| -> Vec<f32> {
        (0..4 * c)
            .flat_map(|row| (from..to).map(move |i| (i, order(row))))
            .map(|(i, c4)| gates[i * 4 * c + c4])
            .collect()
    };
    insert(out, to("weight_ih"), rows(0, inputs), &[4 * c, inputs]);
    insert(out, to("weight_hh"), rows(inputs, shape[0]), &[4 * c, p]);
    let forget = |row: usize| if row / c == 1 { 1.0 } else { 0.0 };
    insert(out, to("bias_ih"), (0..4 * c).map(|row| bias[order(row)] + forget(row)).collect(), &[4 * c]);
    insert(out, to("weight_hr"), transposed(&projection, c, p), &[p, c]);
    Ok(())
}
