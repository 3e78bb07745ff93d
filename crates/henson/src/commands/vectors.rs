//! Vectors of many texts, for commands that compare them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use henson_checkpoint::Sums;
use henson_infer::{EmbedSettings, Model, Prompts, SentenceFacts, Want};
use henson_tasks::{Near, VectorCache, nearest_of};

use crate::built_in::BuiltIn;
use crate::flags::{Compute, ModelName};
use crate::models;
use crate::output::{self, Progress};

/// Texts that are embedded between two looks at the progress.
const TOGETHER: usize = 64;

/// A model that makes vectors whose dot products tell how near texts are.
pub(crate) struct Embedder {
    model: Model,
    settings: EmbedSettings,
    path: PathBuf,
    prefixes: Prefixes,
    threads: usize,
}

/// What stands before queries, and before the texts that are searched.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prefixes {
    query: String,
    passage: String,
}

/// What a text is.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Query,
    Passage,
}

impl Embedder {
    /// The model that flags name, or the sentence model that comes with henson. Prefixes are those given, or the directory's own
    /// prompts of that name.
    pub(crate) fn open(
        named: &ModelName,
        compute: &Compute,
        query: Option<&str>,
        passage: Option<&str>,
    ) -> anyhow::Result<Self> {
        let device = compute.device()?;
        let path = models::find(named, BuiltIn::Sentences)?;
        let model = Model::open(&path, &device, compute.dtype(), Want::Encoder)?;
        let mut settings = EmbedSettings::of_directory(&path)?;
        // A directory may say that dot products of its vectors as they are tell how near they are; else cosines do.
        let dot = SentenceFacts::of_directory(&path)?.similarity.is_some_and(|name| name == "dot");
        settings.normalise |= !dot;
        let prompts = Prompts::of_directory(&path)?;
        let own = |names: &[&str]| names.iter().find_map(|name| prompts.get(Some(name)).ok().map(str::to_owned));
        let default = settings.prompt.clone();
        let prefixes = Prefixes {
            query: query.map(str::to_owned).or_else(|| own(&["query"])).unwrap_or_else(|| default.clone()),
            passage: passage.map(str::to_owned).or_else(|| own(&["passage", "document"])).unwrap_or(default),
        };
        Ok(Self { model, settings, path, prefixes, threads: device.threads() })
    }

    /// The vectors of texts, one after the other.
    pub(crate) fn embed(&self, texts: &[&str], side: Side, things: &'static str) -> anyhow::Result<Vec<f32>> {
        let settings = self.settings_of(side);
        let mut progress = Progress::new(things, Some(texts.len() as u64));
        let (mut all, mut cut) = (Vec::new(), 0);
        for (i, some) in texts.chunks(TOGETHER).enumerate() {
            let vectors = self.model.embed(some, &settings, false)?;
            for vector in vectors {
                cut += usize::from(vector.dropped > 0);
                all.extend(vector.vector);
            }
            let done = i * TOGETHER + some.len();
            progress.at(done as u64, done);
        }
        progress.finish();
        if cut > 0 {
            output::warn(&format!("{cut} of {} {things} are longer than the model reads, and were cut", texts.len()));
        }
        Ok(all)
    }

    /// The vectors of passages, of which a file keeps those that were made before. Without a file, all are made.
    pub(crate) fn embed_kept(&self, texts: &[&str], file: Option<&Path>) -> anyhow::Result<Vec<f32>> {
        let Some(file) = file else { return self.embed(texts, Side::Passage, "passages") };
        let (mut cache, problem) = VectorCache::open(file, &self.maker()?);
        problem.iter().for_each(|problem| output::warn(problem));
        let mut missing: Vec<&str> = texts.iter().copied().filter(|text| cache.get(text).is_none()).collect();
        missing.sort_unstable();
        missing.dedup();
        if !missing.is_empty() {
            let vectors = self.embed(&missing, Side::Passage, "passages")?;
            let width = vectors.len() / missing.len();
            for (text, vector) in missing.iter().zip(vectors.chunks(width.max(1))) {
                cache.insert(text, vector.to_vec());
            }
            cache.keep_only(texts.iter().copied());
            // Without it, the next search takes as long as this one.
            if let Err(error) = cache.save(file) {
                output::warn(&format!("the vectors are not kept: {error}"));
            }
        }
        let each = texts.iter().map(|text| cache.get(text).context("a vector that was just made"));
        Ok(each.collect::<anyhow::Result<Vec<_>>>()?.concat())
    }

    /// The nearest of some vectors to each of those that ask.
    pub(crate) fn nearest(&self, asking: &[f32], among: &[f32], count: usize, k: usize) -> Vec<Vec<Near>> {
        let width = among.len() / count.max(1);
        let mut progress = Progress::new("comparisons", Some((asking.len() / width.max(1) * count) as u64));
        let compared = |done: usize| {
            progress.at(done as u64, done);
            true
        };
        nearest_of(asking, among, width, k, self.threads, compared).unwrap_or_default()
    }

    fn settings_of(&self, side: Side) -> EmbedSettings {
        let prompt = match side {
            Side::Query => &self.prefixes.query,
            Side::Passage => &self.prefixes.passage,
        };
        EmbedSettings { prompt: prompt.clone(), ..self.settings.clone() }
    }

    /// Names all that makes the vectors of passages what they are.
    fn maker(&self) -> anyhow::Result<String> {
        let weights = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"];
        let weights = weights.iter().map(|name| self.path.join(name)).find(|path| path.is_file());
        let sum = weights.map(|path| Sums::of_file(&path)).transpose()?.unwrap_or_default();
        Ok(format!("{sum} {:?}", self.settings_of(Side::Passage)))
    }
}
