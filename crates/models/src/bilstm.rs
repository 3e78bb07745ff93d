//! BiLSTM taggers and classifiers: vectors of words, several bidirectional LSTM layers, and a label for each word or for the text.
//! Beside a word's vector may stand what a convolution reads in its characters (Chiu and Nichols 2016, Ma and Hovy 2016), which is all
//! that is known of a word that the vocabulary does not have. A conditional random field may score the labels of a sentence together
//! (Huang et al. 2015, Ma and Hovy 2016). No class of `transformers` is like it; layers have the names of `torch.nn.LSTM`, the field
//! those of `pytorch-crf`.
//!
//! Legend: T words in the flat batch, W numbers of a word's vector, F filters over its characters, C units of each direction, H = 2·C,
//! V vocabulary.

use henson_tensor::{
    Activation, Builder, Cell, Directions, EmbeddingTables, Group, Init, Param, Parameters, Pass, Result, Tensor,
    TensorError, Var,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::characters::{CharacterCnn, CharacterSettings};
use crate::config::{FamilyConfig, FineTuning, Recurrence, check_dropouts, check_sizes, own_config};
use crate::heads::{Classifier, HeadParts, SequencePooling};
use crate::layers::Linear;
use crate::recurrent::{RecurrentSettings, RecurrentStack, build_crf};
use crate::{
    Batch, Capture, ConfigError, Encoded, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network,
};
use crate::{Sizes, WordVocabulary};

/// Taggers and classifiers from scratch as the table of families has them.
pub(crate) static FAMILY: Family = Family {
    types: &[("bilstm", "BiLstm")],
    naming: Naming {
        base_prefix: "bilstm.",
        encoder: &["embeddings.", "words.", "lstm."],
        old_endings: &[],
        tied: &[],
        ignored_endings: &[],
    },
    heads: &[Head::Encoder, Head::Sequence { labels: 0 }, Head::Token { labels: 0 }],
    causal: None,
    endings: &[],
    // The last is the model of Ma and Hovy (2016), BLSTM-CNNs-CRF.
    sizes: &[
        ("bilstm", || of_size(0, false)),
        ("bilstm-crf", || of_size(0, true)),
        ("bilstm-cnn", || of_size(FILTERS, false)),
        ("bilstm-cnn-crf", || of_size(FILTERS, true)),
    ],
    parse: |value| Ok(ModelConfig::BiLstm(serde_json::from_value(value)?)),
};

/// Dropout sites: that of words' vectors, the first of the layers', and that of characters' vectors.
const WORD_SITE: u32 = 0;
const LAYER_SITES: u32 = 1;
const CHARACTER_SITE: u32 = 0x100;

/// Filters over characters in Ma and Hovy (2016).
const FILTERS: usize = 30;

/// How the vectors of a text's words become the one that is classified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TextPooling {
    /// Their mean.
    Mean,
    /// The largest of each column, as in InferSent (Conneau et al. 2017).
    #[default]
    Max,
    /// A mean by learned weights: softmax(v·tanh(W·h + b)), as in Yang et al. (2016).
    Attention,
}

/// The sizes and settings of a BiLSTM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BiLstmConfig {
    /// V: words of the vocabulary.
    pub vocab_size: usize,
    /// W.
    pub embedding_size: usize,
    /// F: filters over the characters of a word; 0: its vector alone is read.
    pub character_filters: usize,
    /// Characters that a filter sees at a time.
    pub character_width: usize,
    /// Numbers of a character's vector.
    pub character_embedding_size: usize,
    /// Bytes of a word that are read, with its start and its end.
    pub max_characters: usize,
    /// C.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Maximum length of a sequence; the network itself has no limit.
    pub max_position_embeddings: usize,
    /// Dropout of characters' and words' vectors, between layers and before the classifier.
    pub dropout: f64,
    /// Whether it falls on the same columns at all words of a sequence.
    pub variational: bool,
    /// How texts are pooled.
    pub classifier_pooling: TextPooling,
    /// Whether the tags of a sentence are scored together.
    pub crf: bool,
    /// `bilstm`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for BiLstmConfig {
    fn default() -> Self {
        Self {
            vocab_size: 20_000,
            embedding_size: 100,
            character_filters: 0,
            character_width: 3,
            character_embedding_size: 30,
            max_characters: 50,
            hidden_size: 200,
            num_hidden_layers: 1,
            max_position_embeddings: 4096,
            dropout: 0.5,
            variational: false,
            classifier_pooling: TextPooling::Max,
            crf: false,
            model_type: "bilstm".to_owned(),
            other: Map::new(),
        }
    }
}

fn of_size(character_filters: usize, crf: bool) -> ModelConfig {
    ModelConfig::BiLstm(BiLstmConfig { character_filters, crf, ..BiLstmConfig::default() })
}

impl FamilyConfig for BiLstmConfig {
    own_config!();

    fn check(&self) -> std::result::Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("embedding_size", self.embedding_size, 1 << 14),
            ("hidden_size", self.hidden_size, 1 << 14),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 6),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("character_embedding_size", self.character_embedding_size, 1 << 12),
            ("max_characters", self.max_characters, 1 << 10),
        ])?;
        if self.character_filters > 1 << 14 {
            return Err(ConfigError::value("character_filters", self.character_filters, "at most 16384"));
        }
        if let Some(problem) = self.spelled_words().and_then(|settings| settings.problem()) {
            return Err(ConfigError::value("character_width", self.character_width, problem));
        }
        check_dropouts(&[("dropout", self.dropout)])
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: 2 * self.hidden_size,
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

    fn set_layers(&mut self, layers: usize) {
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        self.dropout = p;
    }

    fn can_average(&self) -> bool {
        false
    }

    /// Those of the gates, by what tokens say and by what states do.
    fn multiply_adds(&self, _length: usize) -> f64 {
        let (c, mut inputs) = (self.hidden_size as f64, (self.embedding_size + self.character_filters) as f64);
        let mut sum = 0.0;
        for _ in 0..self.num_hidden_layers {
            sum += 2.0 * 4.0 * c * (inputs + c);
            inputs = 2.0 * c;
        }
        sum
    }

    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FINE_TUNING
    }

    fn scores_jointly(&self) -> bool {
        self.crf
    }

    fn in_transformers(&self) -> bool {
        false
    }

    fn recurrence(&self) -> Recurrence {
        Recurrence::Layers
    }

    fn spelled_words(&self) -> Option<CharacterSettings> {
        let filters = (self.character_width, self.character_filters);
        (self.character_filters > 0).then(|| CharacterSettings {
            activation: Activation::Tanh,
            max_characters: self.max_characters,
            dropout: (self.dropout as f32, CHARACTER_SITE),
            ..CharacterSettings::plain(self.character_embedding_size, filters)
        })
    }

    fn word_vocabulary(&self) -> Option<WordVocabulary> {
        Some(WordVocabulary { width: self.embedding_size })
    }
}

/// As the NER model of Peters et al. (2018) was trained: Adam at 10⁻³ without decay, clipped at 5.
const FINE_TUNING: FineTuning = FineTuning {
    learning_rates: [1e-3, 1e-3],
    epochs: 20.0,
    warmup: 0.0,
    weight_decay: 0.0,
    clip: 5.0,
    ..FineTuning::BERT
};

fn build(b: &mut Builder, own: &BiLstmConfig, head: Head) -> Model {
    let base = if head == Head::Encoder { "" } else { "bilstm" };
    let network = b.at(base, |b| BiLstm::build(b, own));
    let h = 2 * own.hidden_size;
    let init = Init::Uniform(1.0 / (h.max(1) as f32).sqrt());
    let classifier = |b: &mut Builder, labels: usize| {
        Classifier::plain(own.dropout as f32, Linear::build(b, "classifier", h, labels, init))
    };
    let mut parts = HeadParts::default();
    match head {
        Head::Sequence { labels } => {
            let pooling = match own.classifier_pooling {
                TextPooling::Mean => SequencePooling::Mean,
                TextPooling::Max => SequencePooling::Max,
                TextPooling::Attention => b.at("pooling", |b| SequencePooling::Attention {
                    dense: Linear::build(b, "dense", h, h, init),
                    v: b.vector("score.weight", h, init),
                }),
            };
            parts.classifier = Some(Classifier { pooling, ..classifier(b, labels) });
        }
        Head::Token { labels } => {
            parts.classifier = Some(classifier(b, labels));
            parts.crf = own.crf.then(|| b.at("crf", |b| build_crf(b, labels)));
        }
        _ => {}
    }
    Model::new(ModelConfig::BiLstm(own.clone()), head, network, parts)
}

/// Views into the parameters.
#[derive(Debug)]
struct BiLstm {
    words: Param,
    characters: Option<CharacterCnn>,
    lstm: RecurrentStack,
    dropout: f32,
    variational: bool,
}

impl BiLstm {
    fn build(b: &mut Builder, own: &BiLstmConfig) -> Self {
        let (w, dropout) = (own.embedding_size, own.dropout as f32);
        // As in Ma and Hovy (2016), section 3.1.
        let init = Init::Uniform((3.0 / w.max(1) as f32).sqrt());
        let words = b.group(Group::Embeddings, |b| {
            b.at("embeddings.word_embeddings", |b| b.padded_table("weight", own.vocab_size, w, init))
        });
        let characters = own
            .spelled_words()
            .map(|settings| b.group(Group::Embeddings, |b| b.at("words", |b| CharacterCnn::build(b, &settings))));
        let settings = RecurrentSettings {
            directions: Directions::Both,
            dropout,
            variational: own.variational,
            site: LAYER_SITES,
            ..RecurrentSettings::new(Cell::Lstm, w + own.character_filters, own.hidden_size, own.num_hidden_layers)
        };
        let lstm = b.at("lstm", |b| RecurrentStack::build(b, settings));
        Self { words, characters, lstm, dropout, variational: own.variational }
    }
}

impl Network for BiLstm {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        if capture.attention_maps || capture.hidden_states {
            let why = "a BiLSTM has no attention maps, and its words' vectors are not as wide as its layers";
            return Err(TensorError::Unsupported { operation: "encode", why });
        }
        let tables = EmbeddingTables { word: self.words, position: None, position_offset: 0, segment: None };
        let mut x = pass.embeddings(tables, &batch.ids, batch.layout.positions(), None)?; // T×W
        if let Some(network) = &self.characters {
            let why = "the network reads the characters of words, and the batch has no texts of them";
            let spelled = batch.spelled.as_ref().ok_or(TensorError::Unsupported { operation: "encode", why })?;
            let characters = network.forward(pass, spelled)?; // T×F
            x = pass.beside(&x, &characters)?;
        }
        let dropout = (self.dropout, WORD_SITE);
        let x = match self.variational {
            true => pass.variational_dropout(x, &batch.layout, dropout)?,
            false => pass.dropout_tokens(x, &batch.layout, dropout)?,
        };
        let last = self.lstm.forward(pass, x, &batch.layout)?; // T×H
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
}
