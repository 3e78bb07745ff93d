//! How often the documents of a source come in an epoch.

use henson_kernels::philox::philox;

use super::draws::MOST_COPIES;
use crate::{Corpus, DataError};

/// The weights of a corpus' sources. A unit (a document or a block) of a source of weight w comes ⌊w⌋ times in an epoch,
/// and once more with the probability of the rest.
#[derive(Debug)]
pub(super) struct Weights {
    /// For each source the end of its documents, and its weight.
    pub(super) sources: Vec<(usize, f64)>,
}

impl Weights {
    pub(super) fn of(corpus: &Corpus) -> Result<Self, DataError> {
        for source in corpus.sources() {
            if !(0.0..=MOST_COPIES).contains(&source.weight) {
                let problem = format!("source {}: expected a number from 0 to {MOST_COPIES}", source.name);
                return Err(DataError::InstanceSetting { name: "weight", value: source.weight.to_string(), problem });
            }
        }
        Ok(Self { sources: corpus.sources().iter().map(|source| (source.documents.end, source.weight)).collect() })
    }

    pub(super) fn sources(&self) -> usize {
        self.sources.len()
    }

    /// The source of a document.
    pub(super) fn source_of(&self, document: usize) -> usize {
        self.sources.partition_point(|(end, _)| *end <= document)
    }

    pub(super) fn of_source(&self, source: usize) -> f64 {
        self.sources.get(source).map_or(0.0, |(_, weight)| *weight)
    }

    /// Whether every unit comes once.
    pub(super) fn are_one(&self) -> bool {
        self.sources.iter().all(|(_, weight)| *weight == 1.0)
    }

    /// How often a unit of a source comes.
    pub(super) fn copies(&self, key: u64, unit: usize, source: usize) -> u32 {
        let weight = self.of_source(source);
        let rest = weight.fract();
        let draw = || philox(key, [unit as u32, (unit as u64 >> 32) as u32, 0, 0])[0];
        let again = rest > 0.0 && f64::from(draw()) < rest * (u64::from(u32::MAX) + 1) as f64;
        weight as u32 + u32::from(again)
    }
}
