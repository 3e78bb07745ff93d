//! Words read as characters (Kim et al. 2016, Peters et al. 2018): a convolution over the bytes of a word, the largest value of each
//! filter, highway layers, and a projection. It depends on the word alone, so each word of a batch is read once.
//!
//! Legend: T words of U types, N characters of all types; D numbers of a character; F filters of all widths.

use std::collections::HashMap;

use henson_tensor::{
    Activation, Builder, Device, EmbeddingTables, Filters, Init, Layout, Param, Pass, Result, Tensor, Var,
};

use crate::Sequence;
use crate::layers::Linear;

/// What is no byte of a word: ids 0 to 255 are bytes.
pub const SENTENCE_START: u32 = 256;
/// The end of a sentence, which is a word of its own, too.
pub const SENTENCE_END: u32 = 257;
/// Before the bytes of every word.
pub const WORD_START: u32 = 258;
/// Behind them.
pub const WORD_END: u32 = 259;
/// What fills a word up; it has a vector that is learned, and filters see it.
pub const PADDING: u32 = 260;
/// How many ids there are.
pub const CHARACTERS: usize = 261;

/// The ids of a word: its start, its bytes as far as they fit, its end.
pub fn spell(word: &str, max_characters: usize) -> impl Iterator<Item = u32> {
    let bytes = word.bytes().take(max_characters.saturating_sub(2)).map(u32::from);
    std::iter::once(WORD_START).chain(bytes).chain([WORD_END])
}

/// The sizes of a network that reads words.
#[derive(Clone, Debug, PartialEq)]
pub struct CharacterSettings {
    /// D.
    pub embedding: usize,
    /// Of each width (in characters) how many filters.
    pub filters: Vec<(usize, usize)>,
    /// Applied to each filter's largest value: ReLU or tanh.
    pub activation: Activation,
    /// Highway layers behind the filters.
    pub highways: usize,
    /// What a last linear layer gives, where there is one.
    pub projection: Option<usize>,
    /// A word's characters with its start and its end: what is longer is cut, what is shorter is filled up to it.
    pub max_characters: usize,
    /// Filters start between this number and its negative; without it, as `torch.nn.Conv1d` starts them.
    pub filter_range: Option<f32>,
    /// The vectors of characters start between this number and its negative.
    pub character_range: f32,
    /// Dropout of the vectors of characters, and its site.
    pub dropout: (f32, u32),
}

impl CharacterSettings {
    /// Filters of one width, nothing behind them: the characters of Ma and Hovy (2016) with 30, (3, 30), from the range of their
    /// section 3.1.
    pub fn plain(embedding: usize, filters: (usize, usize)) -> Self {
        Self {
            embedding,
            filters: vec![filters],
            activation: Activation::Relu,
            highways: 0,
            projection: None,
            max_characters: 50,
            filter_range: None,
            character_range: (3.0 / embedding.max(1) as f32).sqrt(),
            dropout: (0.0, 0),
        }
    }

    /// F.
    fn all_filters(&self) -> usize {
        self.filters.iter().map(|(_, count)| count).sum()
    }

    /// How many numbers a word gets.
    pub fn output(&self) -> usize {
        self.projection.unwrap_or_else(|| self.all_filters())
    }

    fn widest(&self) -> usize {
        self.filters.iter().map(|(width, _)| *width).max().unwrap_or(0)
    }

    /// What is wrong with them, if anything.
    pub fn problem(&self) -> Option<String> {
        let max = self.max_characters;
        if self.filters.is_empty() || self.filters.iter().any(|(width, count)| *width == 0 || *count == 0) {
            return Some("there is no filter, or one of no width or number".to_owned());
        }
        if max < 3 || self.widest() > max {
            return Some(format!(
                "a word has {max} characters with its start and end, the widest filter {}",
                self.widest()
            ));
        }
        (!matches!(self.activation, Activation::Relu | Activation::Tanh))
            .then(|| format!("filters are followed by relu or tanh, not {:?}", self.activation))
    }
}

/// The words of a batch on a device, each type once.
#[derive(Clone, Debug)]
pub struct Words {
    /// N: ids of the characters of all types.
    characters: Tensor,
    /// How they are divided into types.
    types: Layout,
    /// T: which type each word is.
    words: Tensor,
}

impl Words {
    /// From the ids of each word, as [`spell`] gives them.
    ///
    /// A word is filled up as far as it makes a difference: a window of nothing but padding says the same everywhere. In a feed on a GPU
    /// there are some more types, of padding alone, so that few sizes occur.
    pub fn new<'a>(
        device: &Device,
        settings: &CharacterSettings,
        words: impl IntoIterator<Item = &'a [u32]>,
    ) -> Result<Self> {
        let (widest, max) = (settings.widest(), settings.max_characters);
        let mut numbers: HashMap<&[u32], u32> = HashMap::new();
        let (mut characters, mut lengths, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for word in words {
            let next = numbers.len() as u32;
            let number = *numbers.entry(word).or_insert_with(|| {
                let length = (word.len() + widest).min(max).max(word.len()).max(widest);
                characters.extend_from_slice(word);
                characters.resize(characters.len() + length - word.len(), PADDING);
                lengths.push(length);
                next
            });
            all.push(number);
        }
        let filling = device.rounded(lengths.len()) - lengths.len();
        lengths.resize(lengths.len() + filling, widest);
        let types = Layout::new(device, &lengths, 0)?;
        // What fills the last types and the batch up, if anything.
        characters.resize(types.tokens(), PADDING);
        Ok(Self {
            characters: Tensor::from_slice(device, [characters.len()], &characters)?,
            types,
            words: Tensor::from_slice(device, [all.len()], &all)?,
        })
    }

    /// U.
    pub fn types(&self) -> usize {
        self.types.sequences()
    }
}

/// The words of sequences whose tokens are bytes, with white space between words, and marks where sentences begin and end, which are
/// words, too.
#[derive(Clone, Debug)]
pub(crate) struct WordStream {
    pub(crate) words: Words,
    /// How words are divided into sequences.
    pub(crate) layout: Layout,
    /// Which word each token is a part of; white space belongs to the word behind it.
    pub(crate) of_tokens: Tensor,
}

impl WordStream {
    /// `tokens`: those of the batch, with what fills it up.
    pub(crate) fn new(
        device: &Device,
        settings: &CharacterSettings,
        sequences: &[Sequence<'_>],
        first_number: u32,
        tokens: usize,
    ) -> Result<Self> {
        let (mut words, mut lengths): (Vec<Vec<u32>>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut of_tokens = Vec::new();
        for sequence in sequences {
            let before = words.len();
            let mut open = false;
            for id in sequence.ids {
                let mark = [SENTENCE_START, SENTENCE_END].contains(id);
                let white = u8::try_from(*id).is_ok_and(|byte| byte.is_ascii_whitespace() || byte == 0x0b);
                of_tokens.push((words.len() - usize::from(open && !mark && !white)) as u32);
                if mark {
                    words.push(vec![WORD_START, *id, WORD_END]);
                } else if !white && open {
                    let word = words.last_mut().filter(|word| word.len() < settings.max_characters);
                    word.into_iter().for_each(|word| word.insert(word.len() - 1, *id));
                } else if !white {
                    words.push(vec![WORD_START, *id, WORD_END]);
                }
                open = !mark && !white;
            }
            if words.len() == before {
                words.push(vec![WORD_START, WORD_END]);
            }
            // White space at the end has no word behind it.
            let last = words.len() as u32 - 1;
            of_tokens.iter_mut().rev().take_while(|word| **word > last).for_each(|word| *word = last);
            lengths.push(words.len() - before);
        }
        let layout = Layout::new(device, &lengths, first_number)?.for_steps(device)?;
        // What fills the batch up, if anything.
        words.resize_with(layout.tokens(), || vec![WORD_START, WORD_END]);
        of_tokens.resize(tokens, Device::NOWHERE);
        Ok(Self {
            words: Words::new(device, settings, words.iter().map(Vec::as_slice))?,
            layout,
            of_tokens: Tensor::from_slice(device, [of_tokens.len()], &of_tokens)?,
        })
    }
}

/// A network that reads words as characters.
#[derive(Clone, Debug)]
pub struct CharacterCnn {
    table: Param,
    filters: Vec<Filters>,
    activation: Activation,
    highways: Vec<Linear>,
    projection: Option<Linear>,
    dropout: (f32, u32),
}

impl CharacterCnn {
    /// Lays out its parameters: `characters.weight`, `filters.i`, `highways.i.transform` and `.gate`, `projection`.
    pub fn build(b: &mut Builder, settings: &CharacterSettings) -> Self {
        let (d, n) = (settings.embedding, settings.all_filters());
        let by_inputs = |inputs: usize| Init::Normal(1.0 / (inputs.max(1) as f32).sqrt());
        let filters = |b: &mut Builder, (i, (width, count)): (usize, &(usize, usize))| {
            let range = settings.filter_range.unwrap_or_else(|| 1.0 / ((width * d).max(1) as f32).sqrt());
            b.at(&format!("filters.{i}"), |b| Filters {
                width: *width,
                weight: b.matrix("weight", *count, width * d, Init::Uniform(range)),
                bias: b.vector("bias", *count, Init::Zeros),
            })
        };
        let highway = |b: &mut Builder, i: usize| {
            b.at(&format!("highways.{i}"), |b| Linear {
                weight: b.side_by_side(&["transform.weight", "gate.weight"], n, n, by_inputs(n)),
                // Closed at first: a word is what its filters gave.
                bias: Some(b.vectors_from(&[("transform.bias", Init::Zeros), ("gate.bias", Init::Constant(-2.0))], n)),
            })
        };
        Self {
            table: b.matrix("characters.weight", CHARACTERS, d, Init::Uniform(settings.character_range)),
            filters: settings.filters.iter().enumerate().map(|some| filters(b, some)).collect(),
            activation: settings.activation,
            highways: (0..settings.highways).map(|i| highway(b, i)).collect(),
            projection: settings.projection.map(|p| Linear::build(b, "projection", n, p, by_inputs(n))),
            dropout: settings.dropout,
        }
    }

    /// The vectors of characters.
    pub(crate) fn table(&self) -> Param {
        self.table
    }

    /// T×F, or as wide as it is projected.
    pub fn forward(&self, pass: &mut Pass<'_>, words: &Words) -> Result<Var> {
        let tables = EmbeddingTables { word: self.table, position: None, position_offset: 0, segment: None };
        let x = pass.embeddings(tables, &words.characters, &words.characters, None)?;
        let x = pass.dropout_tokens(x, &words.types, self.dropout)?;
        let mut x = pass.convolve_max(&x, &words.types, &self.filters, self.activation)?;
        for highway in &self.highways {
            let gates = highway.forward(pass, &x, Activation::None)?;
            x = pass.highway(&gates, &x)?;
        }
        if let Some(projection) = &self.projection {
            x = projection.forward(pass, &x, Activation::None)?;
        }
        pass.gather(&x, &words.words)
    }
}
