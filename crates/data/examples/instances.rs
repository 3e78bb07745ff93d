//! How fast instances are made: `cargo run --release -p henson-data --example instances [CORPUS]`. Without a corpus, on
//! made-up documents of the sizes of articles, of books, and one of half a million sentences beside small ones.
#![allow(clippy::print_stdout, reason = "this is what an example is for")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use henson_data::{
    Corpus, InstanceSettings, Instances, Loader, Masking, Objective, Packing, Place, Split, Vocabulary, WordMarks,
};
use henson_kernels::philox::Stream;
use henson_text::{Template, Tokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(directory) = std::env::args().nth(1) {
        return measure("corpus", Arc::new(Corpus::open(Path::new(&directory), Split::Train)?));
    }
    measure("articles", made_up(&[(20_000, 20)]))?;
    measure("books", made_up(&[(100, 4000)]))?;
    measure("one giant", made_up(&[(100, 20), (1, 500_000)]))
}

/// Documents by number and sentences each, sentences of 5 to 40 pieces.
fn made_up(sizes: &[(usize, usize)]) -> Arc<Corpus> {
    let size = 30_000;
    let words = WordMarks::Begin((0..size).map(|id| id % 4 != 0).collect());
    let vocabulary =
        Vocabulary { size, cls: 2, sep: 3, mask: Some(4), special: (0..5).collect(), words, sentinels: Vec::new() };
    let mut draws = Stream::new(1, 0, 0);
    let mut documents = Vec::new();
    for (count, sentences) in sizes {
        for _ in 0..*count {
            let mut sentence = || (0..5 + draws.below(36)).map(|_| 5 + draws.below(size - 5)).collect();
            documents.push((0..*sentences).map(|_| sentence()).collect());
        }
    }
    Arc::new(Corpus::from_documents(vocabulary, &documents))
}

fn measure(name: &str, corpus: Arc<Corpus>) -> Result<(), Box<dyn Error>> {
    println!("{name}: {} documents, {} sentences, {} pieces", corpus.documents(), corpus.sentences(), corpus.pieces());
    let template = match corpus.tokenizer_directory() {
        Some(directory) => Tokenizer::open(directory)?.template().clone(),
        None => Template::bert(2, 3),
    };
    let default = InstanceSettings::default;
    let mlm = InstanceSettings { objective: Objective::Mlm, ..default() };
    for (what, settings) in [
        ("pairs", default()),
        ("pairs of 512", InstanceSettings { sequence_length: 512, ..default() }),
        ("whole words", InstanceSettings { masking: Masking::Words, ..default() }),
        ("spans", InstanceSettings { masking: Masking::Spans, ..default() }),
        ("single", mlm.clone()),
        ("sentences", InstanceSettings { packing: Packing::FullSentences, ..mlm.clone() }),
        ("blocks", InstanceSettings { packing: Packing::Blocks, ..mlm }),
    ] {
        let instances = Arc::new(Instances::new(corpus.clone(), template.clone(), settings, 1)?);
        let start = Instant::now();
        let epoch = instances.epoch(0, 1)?;
        let counting = start.elapsed();
        let start = Instant::now();
        let (mut tokens, mut made) = (0, 0);
        while start.elapsed().as_millis() < 300 {
            for i in 0..64 {
                tokens += epoch.get((made + i) % epoch.count())?.ids.len();
            }
            made += 64;
        }
        let one_core = tokens as f64 / start.elapsed().as_secs_f64() / 1e6;
        let mut loader = Loader::new(instances, Place::default(), 256, 1, 2, 8)?;
        let start = Instant::now();
        tokens = 0;
        while start.elapsed().as_millis() < 300 {
            tokens += loader.next()?.tokens;
        }
        let two_threads = tokens as f64 / start.elapsed().as_secs_f64() / 1e6;
        let a_sentence = counting.as_secs_f64() * 1e9 / corpus.sentences() as f64;
        println!(
            "  {what:>12}: counted in {:.1} ms ({a_sentence:.1} ns a sentence), \
             {one_core:.1}M tokens/s by number on one core, {two_threads:.1}M from a loader of two threads",
            counting.as_secs_f64() * 1e3
        );
    }
    Ok(())
}
