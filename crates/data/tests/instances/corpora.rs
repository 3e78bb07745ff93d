//! Made-up corpora whose pieces tell where they come from.

use std::sync::Arc;

use henson_data::{Corpus, Epoch, Instance, InstanceSettings, Instances, Vocabulary, WordMarks};
use henson_kernels::philox::Stream;
use henson_text::Template;

pub(crate) const CLS: u32 = 2;
pub(crate) const SEP: u32 = 3;
pub(crate) const MASK: u32 = 4;
/// The first id that is not special.
pub(crate) const FIRST: u32 = 5;

/// Every third ordinary id goes on with the word before it.
pub(crate) fn vocabulary(size: u32) -> Vocabulary {
    let words = WordMarks::Begin((0..size).map(begins).collect());
    Vocabulary {
        size,
        cls: CLS,
        sep: SEP,
        mask: Some(MASK),
        special: (0..FIRST).collect(),
        words,
        sentinels: Vec::new(),
    }
}

pub(crate) fn bert() -> Template {
    Template::bert(CLS, SEP)
}

pub(crate) fn begins(id: u32) -> bool {
    id < FIRST || !id.is_multiple_of(3)
}

pub(crate) type Documents = Vec<Vec<Vec<u32>>>;

/// Documents of so many sentences of so many pieces, all numbers drawn; every piece of the corpus has its own id.
pub(crate) fn documents(seed: u64, count: usize, sentences: (u32, u32), pieces: (u32, u32)) -> Documents {
    let mut draws = Stream::new(seed, 0, 0);
    let mut id = FIRST;
    let mut between = |(least, most): (u32, u32)| least + draws.below(most - least + 1);
    let mut documents = Vec::new();
    for _ in 0..count {
        let mut document = Vec::new();
        for _ in 0..between(sentences) {
            let length = between(pieces);
            document.push((id..id + length).collect());
            id += length;
        }
        documents.push(document);
    }
    documents
}

pub(crate) fn corpus(documents: &Documents) -> Arc<Corpus> {
    let most = documents.iter().flatten().flatten().copied().max().unwrap_or(FIRST);
    Arc::new(Corpus::from_documents(vocabulary(most + 1), documents))
}

pub(crate) fn instances(documents: &Documents, settings: &InstanceSettings, seed: u64) -> Arc<Instances> {
    Arc::new(Instances::new(corpus(documents), bert(), settings.clone(), seed).unwrap())
}

/// All instances of an epoch, in the order of the documents.
pub(crate) fn in_order(epoch: &Epoch) -> Vec<Instance> {
    (0..epoch.count()).map(|index| epoch.in_order(index).unwrap()).collect()
}

/// The pieces as they were before some were hidden, without specials, segment by segment.
pub(crate) fn originals(instance: &Instance) -> [Vec<u32>; 2] {
    let mut ids = instance.ids.clone();
    for predicted in &instance.predicted {
        ids[predicted.position as usize] = predicted.target;
    }
    let segment = |number| {
        let pieces = ids.iter().zip(&instance.segments).filter(|(id, segment)| **segment == number && **id >= FIRST);
        pieces.map(|(id, _)| *id).collect()
    };
    [segment(0), segment(1)]
}

/// How far a count may be from its expectation before chance is no excuse.
pub(crate) fn assert_share(what: &str, count: usize, of: usize, share: f64) {
    let deviation = (share * (1.0 - share) * of as f64).sqrt();
    let off = (count as f64 - share * of as f64).abs();
    assert!(off <= 4.0 * deviation, "{what}: {count} of {of} is not {share}: {:.1} deviations", off / deviation);
}
