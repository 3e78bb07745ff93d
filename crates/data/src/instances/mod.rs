//! Instances: what a model sees in pre-training, each a pure function of (seed, epoch, index).
//!
//! An instance is a cut times a corruption, laid out by a tokenizer's template. Documents are cut by a [walk](walk) over the lengths of their sentences, which is BERT's own loop
//! (create_pretraining_data.py) with counter-based draws. Once an epoch all documents are counted, and a mark is kept for
//! every 64 of them and inside long ones; then an instance by its number is a permutation, a binary search, a short walk
//! from a mark, and only there its pieces are read, truncated and hidden.
//!
//! Deliberately absent: a list of instances, a shuffled copy, any state. The number of instances differs from epoch to
//! epoch, because pairs are drawn again; so training counts steps.

mod boundaries;
mod draws;
mod epoch;
mod masks;
mod noise;
mod permutation;
mod row;
mod settings;
mod spans;
#[cfg(test)]
mod tests;
mod walk;
mod weights;

use std::sync::Arc;

use henson_text::Template;

pub use boundaries::Boundaries;
pub use epoch::Epoch;
pub(crate) use epoch::Maker;
pub use noise::NoiseSettings;
pub use settings::{Cut, InstanceSettings, LongSentences, MaskCount, Masking, Objective, Packing, Separators};

use crate::{Corpus, DataError};
use masks::Masks;
use permutation::Orders;
use row::Row;
use spans::Spans;
use walk::SentenceRules;
use weights::Weights;

/// How many documents are counted as one: between two marks lie at most so many.
const GROUP: usize = 64;

/// All instances of a corpus, epoch by epoch.
#[derive(Debug)]
pub struct Instances {
    corpus: Arc<Corpus>,
    /// What surrounds texts with special tokens.
    template: Template,
    settings: InstanceSettings,
    cut: Cut,
    /// How many pieces of text a sequence takes.
    room: usize,
    /// What stands before and behind a document, where no template sets anything around a text.
    ends: Option<u32>,
    rules: SentenceRules,
    seed: u64,
    weights: Weights,
    /// Where text is packed across documents.
    row: Option<Row>,
    corruption: Corruption,
}

/// What is changed in a sequence, and what is to be predicted.
#[derive(Debug)]
enum Corruption {
    /// Some pieces are masked, and these are predicted.
    Masks(Masks),
    /// Nothing is changed: each piece predicts the next.
    None,
    /// Spans become sentinels, and are to be written behind them.
    Spans(Spans),
    /// The text is spoiled, and all of it is to be written.
    Noise(NoiseSettings, Masks),
    /// Nothing is changed: some pieces are predicted in an order.
    Order(Orders),
}

/// What a model sees, and what it shall say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The pieces, special tokens included, some of them hidden.
    pub ids: Vec<u32>,
    /// The segment of each, as the template has it: in BERT's, 0 for the first segment and its specials, 1 for the second.
    pub segments: Vec<u32>,
    /// What is to be predicted, by position; nothing where there is a target.
    pub predicted: Vec<Predicted>,
    /// What an encoder-decoder is to write, its end included.
    pub target: Option<Vec<u32>>,
    /// Where pieces are predicted in an order: for each piece 0 where all others see it, otherwise those with higher numbers do.
    pub orders: Option<Vec<u32>>,
    /// For sentence pairs: 0 where the second segment followed the first, 1 where it is a random one, or the two were swapped.
    pub next_sentence: Option<u32>,
    /// The document of the first segment.
    pub document: usize,
    /// The document of a random second segment.
    pub random_document: Option<usize>,
}

/// A piece that is to be predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Predicted {
    /// At which position.
    pub position: u32,
    /// Which piece.
    pub target: u32,
}

impl Instances {
    /// Instances laid out by a template, that of the corpus' tokenizer. Refuses settings that make no sense, and those
    /// that the corpus or its vocabulary cannot serve.
    pub fn new(
        corpus: Arc<Corpus>,
        template: Template,
        settings: InstanceSettings,
        seed: u64,
    ) -> Result<Self, DataError> {
        let weights = Weights::of(&corpus)?;
        Self::weighted(corpus, template, settings, seed, weights)
    }

    fn weighted(
        corpus: Arc<Corpus>,
        template: Template,
        settings: InstanceSettings,
        seed: u64,
        weights: Weights,
    ) -> Result<Self, DataError> {
        settings.check()?;
        let streams = settings.is_stream();
        if streams && settings.objective != Objective::Permutation {
            let problem = "running text has no instances, it is read as it stands: expected another packing".to_owned();
            return Err(DataError::InstanceSetting { name: "packing", value: "stream".to_owned(), problem });
        }
        let (cut, room) = (settings.cut(), settings.room(&template)?);
        let size = corpus.vocabulary().size;
        if let Some(id) = template.special_ids().find(|id| *id >= size) {
            return Err(DataError::ForeignTemplate { id, size });
        }
        let needed = cut.documents_needed();
        let (mut reader, mut documents) = (corpus.reader(), 0);
        for number in 0..corpus.documents() {
            let usable = weights.of_source(weights.source_of(number)) > 0.0 && !reader.document(number)?.is_empty();
            documents += usize::from(usable);
            if documents == needed {
                break;
            }
        }
        if documents < needed {
            return Err(DataError::TooFewDocuments { documents, needed });
        }
        drop(reader);
        let ends = settings.has_ends(&template).then_some(corpus.vocabulary().sep);
        // What is cut has no template around it, or is remembered without it.
        let whole = ends.is_some() || settings.objective == Objective::SpanCorruption || streams;
        let rules = SentenceRules::new(&settings, corpus.vocabulary().sep);
        let row = match cut {
            Cut::Pairs | Cut::Documents | Cut::Consecutive => None,
            Cut::FullSentences => Some(Row::new(&corpus, &weights, (room, false), Some(rules))?),
            Cut::Blocks => Some(Row::new(&corpus, &weights, (room, whole), None)?),
        };
        let masks = || Masks::new(corpus.vocabulary(), &template, settings.objective);
        let corruption = match settings.objective {
            Objective::Causal | Objective::Bidirectional => Corruption::None,
            Objective::SpanCorruption => Corruption::Spans(Spans::new(corpus.vocabulary(), room, &settings)?),
            Objective::Denoising => Corruption::Noise(settings.noise.unwrap_or_default(), masks()?),
            Objective::Permutation => Corruption::Order(Orders::new(corpus.vocabulary(), &template)),
            _ => Corruption::Masks(masks()?),
        };
        Ok(Self { corpus, template, settings, cut, room, ends, rules, seed, weights, row, corruption })
    }

    /// Counts an epoch on so many threads. Takes some nanoseconds a sentence; afterwards every instance is at hand.
    /// An error where mixing weights left too few documents in it.
    pub fn epoch(self: &Arc<Self>, epoch: u64, threads: usize) -> Result<Arc<Epoch>, DataError> {
        Epoch::new(self, epoch, threads).map(Arc::new)
    }

    /// How instances are made.
    pub fn settings(&self) -> &InstanceSettings {
        &self.settings
    }

    /// What they are made from.
    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    /// What their draws are keyed with.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// How many things there are that an epoch is made of: documents, or sequences of a row.
    pub(crate) fn units(&self) -> usize {
        self.row.as_ref().map_or(self.corpus.documents(), Row::count)
    }
}
