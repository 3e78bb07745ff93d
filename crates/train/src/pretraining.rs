//! Pre-training from a recipe to a task for the loop: masked LM, next sentence, ALBERT's order of sentences, SpanBERT's boundaries,
//! left to right, and what encoder-decoders write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use henson_checkpoint::{Config, LoadOptions, ModelDirectory, Weights, difference, open_parameters};
use henson_data::{Corpus, Instances, Loader, Objective, Packing, Part, Place, Split, Step, part_of};
use henson_models::{
    BOUNDARY_TARGETS, Batch, Capture, Family, Head, Memory, Model, ModelConfig, Permutation, Sequence, SpecialIds,
};
use henson_ranks::Ranks;
use henson_tensor::{Bits, Builder, DType, Device, Entry, Parameters, Pass, Tensor};
use henson_text::{Pieces, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::distil::{Teacher, TeacherDirectory};
use crate::error::{Result, TrainError};
use crate::life::TrainingRun;
use crate::losses::{EQUAL, LossNames};
use crate::metrics::{self, Prediction};
use crate::objective::{self, Masked, Objective as _, Scales};
use crate::recipe::{Recipe, ResolvedPhase, to_toml};
use crate::replaced::{self, GeneratorSettings, PerPrediction};
use crate::run::{Carried, GENERATOR, GeneratorFiles, ModelFiles, weights_of};
use crate::span_boundary::{MaskedAndBoundary, PartWithBoundaries};
use crate::stream::{self, RunningText, Unrolled};
use crate::together::{agree, check_parts, digest};
use crate::trainer::{Engine, Evaluation, Event, Keep, LoopSettings, Outcome, Task, Underway, Watch};
use crate::workload::{Rank, Workload};

/// The seed of held-out instances: the same for all runs, so that they can be compared.
pub(crate) const HELD_OUT_SEED: u64 = 0;

/// Tokens of a batch in evaluation.
const EVALUATION_TOKENS: usize = 4096;

/// Steps that are made ahead of the trainer.
const AHEAD: usize = 4;

/// The file with the words that a language model over words predicts, one on each line.
const WORDS: &str = "words.txt";

/// Texts that are drawn from the held-out part where a recipe names no samples.
const DRAWN_SAMPLES: usize = 6;

/// Pre-trains in a directory, from its newest checkpoint on, until a step if one is given. Gives how it ended, and at which
/// step.
pub fn pretrain(
    plan: &Plan,
    device: &Device,
    out: &Path,
    loader_threads: usize,
    stop_at: Option<u64>,
    watch: &mut Watch<'_>,
) -> Result<(Outcome, u64)> {
    let ranks = &plan.ranks;
    plan.check_ranks(device)?;
    let mut run = TrainingRun::open_with(out, &plan.recipe, plan.loop_settings(stop_at), ranks.clone())?;
    run.find(&plan.data_name(), device, watch)?;
    if run.is_finished()? {
        return Ok((Outcome::WasFinished, run.state().step));
    }
    if run.is_first() && run.state().step >= plan.steps() && Weights::open(out).is_ok() {
        let text = format!(
            "the model in {} is not that of its last checkpoint: it was changed or damaged since, and is written again",
            out.display()
        );
        (watch.on)(Event::Warning { text: &text });
    }
    // Made before anything is written, so that a mistake is corrected in the same directory.
    let mut engine = plan.engine(device)?;
    engine.join(ranks.clone())?;
    run.write_recipe(&plan.recipe)?;
    run.resume(&mut engine, watch)?;
    let start = Instant::now();
    let mut task = plan.task(&run.state().place, loader_threads)?;
    task.resume(run.carried()?);
    (watch.on)(Event::Begins { step: run.state().step, seconds: start.elapsed().as_secs_f64() });
    let model = plan.model_files()?;
    let outcome = run.train(&mut engine, &mut task, &model, watch)?;
    if outcome == Outcome::Finished {
        run.finish(&model, &engine.parameters, &[])?;
    }
    let waited = task.loader.as_ref().map_or(0.0, |loader| loader.waited().as_secs_f64());
    if waited > 0.02 * run.state().seconds.max(1.0) {
        let text = format!("the trainer waited {waited:.1} s for data: raise --loader-threads");
        (watch.on)(Event::Warning { text: &text });
    }
    Ok((outcome, run.state().step))
}

/// A run, checked and resolved, before anything is computed.
pub struct Plan {
    /// The recipe, as it will be saved.
    pub recipe: Recipe,
    /// The model's config.
    pub config: Config,
    /// The phases.
    pub phases: Vec<ResolvedPhase>,
    /// What texts were tokenized with.
    pub tokenizer: Arc<Tokenizer>,
    corpus: Arc<Corpus>,
    held_out: Option<Arc<Corpus>>,
    instances: Vec<Arc<Instances>>,
    workload: Workload,
    /// The directory to start from.
    start: Option<Start>,
    /// The generator that the model is trained with.
    generator: Option<ModelConfig>,
    /// The teacher that it learns from.
    teacher: Option<TeacherDirectory>,
    /// The text, where it is read as it stands.
    text: Option<Arc<RunningText>>,
    /// Those that train together with this process.
    pub ranks: Option<Arc<Ranks>>,
}

/// A directory to start from, with the configs of its model and of the generator in it.
pub(crate) struct Start {
    path: PathBuf,
    pub(crate) config: ModelConfig,
    generator: Option<ModelConfig>,
}

impl Start {
    pub(crate) fn open(path: PathBuf, objective: Objective) -> Result<Self> {
        let config =
            |path: &Path| Ok::<_, TrainError>(Config::from_value(ModelDirectory::open(path)?.config()?)?.model);
        let inner = path.join(GENERATOR);
        let generator = match objective {
            Objective::ReplacedTokens if inner.is_dir() => Some(config(&inner)?),
            Objective::ReplacedTokens => {
                let expected = "a size, or the directory of a discriminator with its generator in `generator/`";
                return Err(TrainError::setting("model", path.display(), expected));
            }
            _ => None,
        };
        Ok(Self { config: config(&path)?, path, generator })
    }
}

impl Plan {
    /// Opens the recipe's data, resolves the phases and builds the config. `threads` count the instances of an epoch.
    pub fn new(recipe: Recipe, threads: usize) -> Result<Self> {
        if recipe.data.is_empty() {
            let expected = "the directory that `henson data build` made: --data DIR";
            return Err(TrainError::setting("data", "missing", expected));
        }
        let directory = Path::new(&recipe.data);
        let corpus = Corpus::open(directory, Split::Train)?;
        let held_out = Corpus::open(directory, Split::HeldOut)?;
        let tokenizer = Tokenizer::open(corpus.tokenizer_directory().unwrap_or(directory))?;
        Self::on(corpus, held_out, tokenizer, recipe, threads)
    }

    /// What [`Plan::new`] does, on data that is open already.
    pub fn on(
        corpus: Corpus,
        held_out: Corpus,
        tokenizer: Tokenizer,
        mut recipe: Recipe,
        threads: usize,
    ) -> Result<Self> {
        recipe.resolve_tables();
        let (corpus, tokenizer) = (Arc::new(corpus), Arc::new(tokenizer));
        let held_out = (held_out.documents() > 0).then(|| Arc::new(held_out));
        let (mut config, start) = match Family::config_of_size(&recipe.model) {
            Ok(mut config) => {
                config.set_vocab_size(tokenizer.vocabulary_size());
                let vocabulary = corpus.vocabulary();
                let padding = tokenizer.special().pad.as_ref().map(|padding| padding.id);
                config.set_special_ids(SpecialIds { begin: vocabulary.cls, end: vocabulary.sep, padding });
                (config, None)
            }
            Err(error) => {
                let path = PathBuf::from(&recipe.model);
                if !path.exists() {
                    return Err(TrainError::setting(
                        "model",
                        &recipe.model,
                        format!("a directory, or a size ({error})"),
                    ));
                }
                let start = Start::open(path, recipe.objective)?;
                (start.config.clone(), Some(start))
            }
        };
        config = overridden(config, &recipe)?;
        let pieces = tokenizer.vocabulary_size();
        let rows = config.sizes().vocab_size;
        if recipe.config.contains_key("vocab_size") && rows < pieces {
            let expected = format!("at least the {pieces} tokens of the data's tokenizer");
            return Err(TrainError::setting("config.vocab_size", rows, expected));
        }
        config.set_vocab_size(rows.max(pieces));
        stream::check_model(&recipe, &config, &corpus)?;
        config.set_causal(recipe.objective == Objective::Causal)?;
        check_streams(recipe.objective, &config)?;
        let text = match recipe.packing {
            Packing::Stream => {
                Some(RunningText::open(&recipe, &mut config, tokenizer.template(), &corpus, held_out.as_ref())?)
            }
            _ => None,
        };
        let mut config = Config::new(config);
        let head = checked_head(recipe.objective, &config.model)?;
        let generator = generator_of(&config.model, &recipe, start.as_ref())?;
        let find = |settings| TeacherDirectory::find(settings, &config.model, start.is_none(), &tokenizer);
        let teacher = recipe.distil.as_ref().map(find).transpose()?;
        config.set_head(head);
        config.check()?;

        let template = tokenizer.template();
        let first = recipe.instances(&recipe.phases.first().cloned().unwrap_or_default());
        let phases = recipe.resolve(|epochs| {
            if let Some(text) = &text {
                return Ok(text.steps_of_epochs(epochs));
            }
            let instances =
                Arc::new(Instances::new(Arc::clone(&corpus), template.clone(), first.clone(), recipe.seed)?);
            let mut sequences = 0.0;
            for epoch in 0..epochs.ceil() as u64 {
                let share = (epochs - epoch as f64).min(1.0);
                sequences += share * instances.epoch(epoch, threads)?.count() as f64;
            }
            Ok((sequences / recipe.batch_size as f64).ceil() as u64)
        })?;
        let mut instances = Vec::new();
        for (number, phase) in phases.iter().enumerate() {
            check_length(phase, &config.model)?;
            if text.is_some() {
                continue;
            }
            // Each phase walks over the data by a seed of its own.
            let seed = recipe.seed.wrapping_add((number as u64) << 32);
            let settings = phase.instances.clone();
            instances.push(Arc::new(Instances::new(Arc::clone(&corpus), template.clone(), settings, seed)?));
        }
        let workload = Workload::new(&recipe, &config.model, generator.as_ref(), &phases)?;
        Ok(Self {
            recipe,
            config,
            phases,
            tokenizer,
            corpus,
            held_out,
            instances,
            workload,
            start,
            generator,
            teacher,
            text: text.map(Arc::new),
            ranks: None,
        })
    }

    /// Checks that all ranks have the same before them, and that they can share every batch.
    fn check_ranks(&self, device: &Device) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        if self.text.is_some() {
            let expected = "another with several ranks: states are carried by one process alone so far";
            return Err(TrainError::setting("packing", "stream", expected));
        }
        for phase in &self.phases {
            check_parts(phase.accumulation, ranks.size())?;
        }
        let files = self.tokenizer.files(None)?;
        let facts = [
            ("recipe", digest(&to_toml(&self.recipe)?)),
            ("data", self.data_name()),
            ("tokenizer", digest(&files)),
            ("model", digest(&self.config.to_json()?.to_string())),
            ("processor", device.isa().map_or_else(|| device.to_string(), |isa| isa.to_string())),
        ];
        agree(ranks, &facts)
    }

    /// Updates in all.
    pub fn steps(&self) -> u64 {
        self.phases.iter().map(|phase| phase.steps).sum()
    }

    /// When a run does what.
    pub fn loop_settings(&self, stop_at: Option<u64>) -> LoopSettings {
        LoopSettings {
            steps: self.steps(),
            checkpoint_every: self.recipe.checkpoint_every,
            keep_checkpoints: self.recipe.keep_checkpoints,
            eval_every: self.recipe.eval_every,
            log_every: self.recipe.log_every,
            log_samples: self.recipe.logs_samples(),
            stop_at,
            higher_is_better: false,
            patience: 0,
            keep: Keep::Last,
        }
    }

    /// Tokens that the whole run will read, if every sequence is full.
    pub fn most_tokens(&self) -> u64 {
        let length = |p: &ResolvedPhase| p.instances.sequence_length + p.instances.longest_target();
        let tokens = |p: &ResolvedPhase| p.steps * (p.batch_size * length(p)) as u64;
        self.phases.iter().map(tokens).sum()
    }

    /// The training part of the data.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The held-out part, where there is one.
    pub fn held_out(&self) -> Option<&Corpus> {
        self.held_out.as_deref()
    }

    /// Names the data, to be found again when a run resumes.
    pub fn data_name(&self) -> String {
        let teacher = self.teacher.as_ref().map(|teacher| format!(" {}", teacher.digest)).unwrap_or_default();
        format!("{}{teacher}", self.corpus.digest())
    }

    /// Numbers of the model, without making it.
    pub fn parameters(&self) -> usize {
        self.workload.parameters()
    }

    /// What the run asks of the machines.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Bytes that the largest part of any step takes, about.
    pub fn memory(&self) -> u64 {
        let (rank, ranks) = self.ranks.as_ref().map_or((0, 1), |ranks| (ranks.rank(), ranks.size()));
        let rank = Rank { ranks, is_first: rank == 0 };
        self.workload.memory(rank) + self.remembered() as u64
    }

    /// Bytes of what is remembered of all rows: as numbers that are kept, and as they are computed with.
    fn remembered(&self) -> usize {
        let memory = self.config.model.memory().filter(|_| self.text.is_some());
        let (tokens, sizes) = (memory.and_then(|memory| memory.most).unwrap_or(0), self.config.model.sizes());
        2 * 4 * tokens * self.recipe.batch_size * sizes.hidden_size * sizes.num_hidden_layers
    }

    /// What is saved beside the weights.
    pub fn model_files(&self) -> Result<ModelFiles> {
        let mut files = self.tokenizer.files(Some(self.config.model.sizes().max_tokens))?;
        if let Some(words) = self.text.as_ref().and_then(|text| text.words.as_ref()) {
            files.push((WORDS.to_owned(), words.to_text().into_bytes()));
        }
        let generator = self.generator.as_ref().map(|generator| self.generator_files(generator)).transpose()?;
        Ok(ModelFiles { config: self.config.to_json()?, files, generator })
    }

    fn generator_files(&self, generator: &ModelConfig) -> Result<GeneratorFiles> {
        let mut config = Config::new(generator.clone());
        config.set_head(Head::MaskedLm);
        Ok(GeneratorFiles { config: config.to_json()?, shared: self.shared(generator)? })
    }

    /// The names of what a generator has in common with its model: all that it would have alone, and does not have of its own.
    fn shared(&self, generator: &ModelConfig) -> Result<BTreeSet<String>> {
        let (mut both, mut alone) = (Builder::new(), Builder::new());
        build(&mut both, &self.config.model, Some(generator), Head::ReplacedTokens)?;
        Model::build(&mut alone, generator, Head::MaskedLm)?;
        let own: BTreeSet<&str> =
            both.entries().iter().filter_map(|entry| entry.name.strip_prefix(Model::GENERATOR)).collect();
        let names = alone.entries().iter().map(|entry| entry.name.clone());
        Ok(names.filter(|name| !own.contains(name.as_str())).collect())
    }

    /// The config of the generator that the model is trained with, where there is one.
    pub fn generator(&self) -> Option<&ModelConfig> {
        self.generator.as_ref()
    }

    /// The model with its first weights: drawn by the seed, or those of the directory to start from.
    pub fn engine(&self, device: &Device) -> Result<Engine> {
        let head = head(self.recipe.objective);
        let dtype = DType::from(self.recipe.dtype);
        let mut builder = Builder::new();
        let model = build(&mut builder, &self.config.model, self.generator.as_ref(), head)?;
        let mut parameters = match &self.start {
            None => {
                let mut parameters = builder.finish(device, dtype)?;
                parameters.initialise(self.recipe.seed)?;
                if let Some(teacher) = &self.teacher {
                    teacher.start(&mut parameters)?;
                }
                parameters
            }
            Some(start) => self.started_from(start, builder, device, dtype)?,
        };
        if self.recipe.decay_all {
            parameters.decay_all();
        }
        let mut engine = Engine::new(model, parameters, self.recipe.optimizer(), self.recipe.seed)?;
        engine.tape.set_recompute(self.recipe.recompute);
        Ok(engine)
    }

    /// The weights of a directory; new heads and tokens start from scratch.
    fn started_from(
        &self,
        Start { path, config: old, generator: old_generator }: &Start,
        builder: Builder,
        device: &Device,
        dtype: DType,
    ) -> Result<Parameters> {
        let weights = match &self.generator {
            Some(generator) => self.weights_of_both(path, generator)?,
            None => ModelDirectory::open(path)?.weights()?,
        };
        let may_miss = |entry: &Entry| !entry.group.is_encoder();
        let options = LoadOptions::new_head(&may_miss);
        let naming = &self.config.model.family().naming;
        let seed = self.recipe.seed;
        let tokenizer = Tokenizer::open(path)?;
        let (pieces, before) = (self.tokenizer.vocabulary_size(), tokenizer.vocabulary_size());
        if let Some(id) = (0..before.min(pieces) as u32).find(|id| self.tokenizer.token(*id) != tokenizer.token(*id)) {
            let show = |tokenizer: &Tokenizer| tokenizer.token(id).unwrap_or_default();
            return Err(TrainError::Vocabulary(format!(
                "{} was built with another vocabulary than {}: id {id} is `{}` there and `{}` here. Build the data with \
                 --tokenizer {}, or with a copy of it that has new tokens at its end (`henson tokenizer extend`)",
                self.recipe.data,
                path.display(),
                show(&self.tokenizer),
                show(&tokenizer),
                path.display(),
            )));
        }
        if self.config.model.sizes().vocab_size == old.sizes().vocab_size && pieces <= before {
            return Ok(open_parameters(&weights, naming, builder, device, dtype, &options, seed)?.0);
        }
        // More pieces than the model had, or fewer than it has rows: loaded as it was, then copied row by row.
        let mut old_builder = Builder::new();
        build(&mut old_builder, old, old_generator.as_ref(), head(self.recipe.objective))?;
        let host = Device::cpu(None, None).map_err(|error| TrainError::Vocabulary(error.to_string()))?;
        let old = open_parameters(&weights, naming, old_builder, &host, DType::F32, &options, seed)?.0;
        let origins = self.origins(&tokenizer)?;
        let mut parameters = builder.finish(device, dtype)?;
        parameters.initialise(seed)?;
        for i in 0..parameters.entries().len() {
            let (from, to) = (&old.entries()[i], &parameters.entries()[i]);
            let mut values = old.read(i)?;
            if from.shape != to.shape {
                let columns = to.shape.elements() / to.shape.sizes()[0].max(1);
                let mut grown = parameters.read(i)?;
                let kept = values.len().min(grown.len());
                grown[..kept].copy_from_slice(&values[..kept]);
                values = grown;
                for (id, origins) in &origins {
                    let mut mean = vec![0.0; columns];
                    for origin in origins {
                        let row = &values[*origin as usize * columns..][..columns];
                        mean.iter_mut().zip(row).for_each(|(m, x)| *m += x / origins.len() as f32);
                    }
                    if !origins.is_empty() {
                        values[*id as usize * columns..][..columns].copy_from_slice(&mean);
                    }
                }
            }
            parameters.write(i, &values)?;
        }
        parameters.refresh()?;
        Ok(parameters)
    }

    /// The weights of a discriminator and its generator, whose tables must be the same.
    fn weights_of_both(&self, path: &Path, generator: &ModelConfig) -> Result<Weights> {
        let weights = weights_of(path, None)?;
        for name in self.shared(generator)? {
            let copy = format!("{}{name}", Model::GENERATOR);
            // What is missing is reported with all else that is.
            if weights.get(&name).is_some()
                && weights.get(&copy).is_some()
                && difference(&weights, &copy, &name)? != Some(0)
            {
                let place = path.join(GENERATOR);
                return Err(TrainError::Vocabulary(format!(
                    "{}: {name} is not what it is in {}: a generator and its discriminator share their tables",
                    place.display(),
                    path.display()
                )));
            }
        }
        Ok(weights)
    }

    /// For each new piece, the old pieces that its text was before.
    fn origins(&self, before: &Tokenizer) -> Result<Vec<(u32, Vec<u32>)>> {
        let new = before.vocabulary_size() as u32..self.tokenizer.vocabulary_size() as u32;
        let origin = |id: u32| {
            let text = self.tokenizer.decode(&[id], false)?;
            let text = text.strip_prefix("##").unwrap_or(&text);
            let unknown = before.special().unk.as_ref().map(|unk| unk.id);
            let ids = before.encode_ids(text)?.into_iter().filter(|id| Some(*id) != unknown).collect();
            Ok((id, ids))
        };
        new.map(origin).collect()
    }

    /// The task for the loop, from a place on that [`Task::place`] gave.
    pub fn task(&self, place: &Value, threads: usize) -> Result<PreTraining> {
        let place = match place {
            Value::Null => PhasePlace::default(),
            place => serde_json::from_value(place.clone()).map_err(|error| TrainError::State {
                path: PathBuf::from("state.json"),
                problem: format!("`place`: {error}"),
            })?,
        };
        let held_out = match &self.held_out {
            Some(corpus) if self.text.is_none() => self.held_out_parts(corpus, threads)?,
            _ => Vec::new(),
        };
        Ok(PreTraining {
            phases: self.phases.clone(),
            instances: self.instances.clone(),
            threads,
            place,
            loader: None,
            held_out,
            samples: self.samples()?,
            tokenizer: Arc::clone(&self.tokenizer),
            generator: self.recipe.generator.clone(),
            smoothing: self.recipe.label_smoothing as f32,
            teacher: self.teacher.clone().map(|found| (found, DType::from(self.recipe.dtype), None)),
            unrolled: self.text.as_ref().map(|text| Unrolled::new(Arc::clone(text), &self.recipe)),
            eval_sequences: self.recipe.eval_sequences,
        })
    }

    /// Held-out sequences with fixed masks, at the first phase's length.
    fn held_out_parts(&self, corpus: &Arc<Corpus>, threads: usize) -> Result<Vec<Part>> {
        let mut settings = self.phases[0].instances.clone();
        // One document alone has no random next sentences; its masks can still be scored.
        if settings.objective.has_pairs() && corpus.documents() < 2 {
            settings.objective = Objective::Mlm;
        }
        let length = settings.sequence_length;
        let template = self.tokenizer.template().clone();
        let instances = Arc::new(Instances::new(Arc::clone(corpus), template, settings, HELD_OUT_SEED)?);
        let epoch = instances.epoch(0, threads)?;
        let count = epoch.count().min(self.recipe.eval_sequences as u64);
        let instances: Vec<_> = (0..count).map(|index| epoch.get(index)).collect::<Result<_, _>>()?;
        let batch = (EVALUATION_TOKENS / length).max(1);
        let parts = instances.chunks(batch).zip((0..).step_by(batch));
        Ok(parts.map(|(chunk, first)| part_of(chunk, first)).collect())
    }

    /// The recipe's samples, or some that are drawn from held-out text.
    fn samples(&self) -> Result<Vec<Sample>> {
        let Some(mask) = self.tokenizer.special().mask.as_ref().map(|mask| mask.id) else { return Ok(Vec::new()) };
        if self.config.model.sizes().causal || self.config.model.targets().is_some() {
            return Ok(Vec::new());
        }
        let mut samples = Vec::new();
        for text in &self.recipe.samples {
            let pieces = self.tokenizer.encode(text)?;
            let features = self.tokenizer.template().single(&pieces, self.config.model.sizes().max_tokens)?;
            let positions = (0..features.len()).filter(|i| features.ids[*i] == mask);
            let positions: Vec<u32> = positions.map(|i| i as u32).collect();
            if positions.is_empty() {
                let expected = "texts with [MASK] in them";
                return Err(TrainError::setting("samples", format!("{text:?}"), expected));
            }
            samples.push(Sample { text: text.clone(), ids: features.ids, segments: features.segments, positions });
        }
        if samples.is_empty()
            && let Some(corpus) = &self.held_out
        {
            samples = self.drawn_samples(corpus, mask)?;
        }
        Ok(samples)
    }

    /// Sentences of middling length, spread over the held-out part, with one word hidden that is a single piece.
    fn drawn_samples(&self, corpus: &Corpus, mask: u32) -> Result<Vec<Sample>> {
        let words = &corpus.vocabulary().words;
        // What a model of few positions has room for, without the special tokens.
        let (template, max_tokens) = (self.tokenizer.template(), self.config.model.sizes().max_tokens);
        let room = max_tokens.saturating_sub(template.single_specials());
        let mut samples = Vec::new();
        let mut reader = corpus.reader();
        for n in 0..DRAWN_SAMPLES {
            let document = reader.document(n * corpus.documents() / DRAWN_SAMPLES)?;
            let mut ids = Vec::new();
            for sentence in 0..document.sentences() {
                let range = reader.sentence(&document, sentence)?;
                if (8..=20).contains(&range.len()) {
                    reader.read(&document, range, &mut ids)?;
                    break;
                }
            }
            ids.truncate(room);
            let alone = |i: &usize| {
                words.begins(Some(ids[i - 1]), ids[*i])
                    && words.begins(Some(ids[*i]), ids[i + 1])
                    && self
                        .tokenizer
                        .token(ids[*i])
                        .is_some_and(|t| t.chars().filter(|c| c.is_alphabetic()).count() > 3)
            };
            // The one that is nearest to the middle.
            let middle = ids.len() / 2;
            let Some(hidden) = (1..ids.len().saturating_sub(1)).filter(alone).min_by_key(|i| i.abs_diff(middle)) else {
                continue;
            };
            ids[hidden] = mask;
            let text = self.tokenizer.decode(&ids, false)?;
            let pieces = Pieces { ids, ..Pieces::default() };
            let features = template.single(&pieces, max_tokens)?;
            let positions = vec![(features.first.start + hidden) as u32];
            samples.push(Sample { text, ids: features.ids, segments: features.segments, positions });
        }
        Ok(samples)
    }
}

/// What a config becomes by a recipe.
pub(crate) fn overridden(config: ModelConfig, recipe: &Recipe) -> Result<ModelConfig> {
    let mut json = config.to_json()?;
    for (key, value) in &recipe.config {
        if json.get(key).is_none() {
            let keys: Vec<&str> =
                json.as_object().into_iter().flat_map(|keys| keys.keys().map(String::as_str)).collect();
            let expected = format!("a key of {}'s config.json: {}", config.model_type(), keys.join(", "));
            return Err(TrainError::setting("config", key, expected));
        }
        json[key] = serde_json::to_value(value)
            .map_err(|error| TrainError::setting("config", format!("{key}: {error}"), "a value for config.json"))?;
    }
    // The paper's 4·H, unless it was said.
    if recipe.config.contains_key("hidden_size") && !recipe.config.contains_key("intermediate_size") {
        json["intermediate_size"] = Value::from(4 * json["hidden_size"].as_u64().unwrap_or(0));
    }
    let mut config = ModelConfig::from_value(json)?;
    if let Some(dropout) = recipe.dropout {
        config.set_dropout(dropout);
    }
    Ok(config)
}

/// The generator's config: that of the directory to start from, or one by the recipe.
pub(crate) fn generator_of(
    config: &ModelConfig,
    recipe: &Recipe,
    start: Option<&Start>,
) -> Result<Option<ModelConfig>> {
    let Some(settings) = &recipe.generator else { return Ok(None) };
    let GeneratorSettings { size, layers, .. } = *settings;
    let Some(mut generator) = start.and_then(|start| start.generator.clone()) else {
        return Ok(Some(config.generator(size, layers)?));
    };
    let (given, own) = (generator.sizes(), config.sizes());
    let factor = given.hidden_size as f64 / own.hidden_size as f64;
    if let Some(size) = size.filter(|size| (size * own.hidden_size as f64).round() as usize != given.hidden_size) {
        let expected = format!("{factor}, as in the directory of the model, or nothing");
        return Err(TrainError::setting("generator.size", size, expected));
    }
    if let Some(layers) = layers.filter(|layers| *layers != given.num_hidden_layers) {
        let expected = format!("{}, as in the directory of the model, or nothing", given.num_hidden_layers);
        return Err(TrainError::setting("generator.layers", layers, expected));
    }
    generator.set_vocab_size(own.vocab_size);
    if let Some(dropout) = recipe.dropout {
        generator.set_dropout(dropout);
    }
    Ok(Some(generator))
}

/// Lays out a model, with its generator where it has one.
pub(crate) fn build(
    b: &mut Builder,
    config: &ModelConfig,
    generator: Option<&ModelConfig>,
    head: Head,
) -> Result<Model> {
    Ok(match generator {
        Some(generator) => Model::build_with_generator(b, config, generator)?,
        None => Model::build(b, config, head)?,
    })
}

/// The head of an objective, where the model has it.
pub(crate) fn checked_head(objective: Objective, model: &ModelConfig) -> Result<Head> {
    let head = head(objective);
    match model.family().has_head(head) || head == Head::ReplacedTokens {
        true => Ok(head),
        false => Err(wrong_objective(objective, model)),
    }
}

/// Refuses sequences that are longer than the model takes.
pub(crate) fn check_length(phase: &ResolvedPhase, model: &ModelConfig) -> Result<()> {
    let length = phase.instances.sequence_length.max(phase.instances.longest_target());
    let max_tokens = model.sizes().max_tokens;
    if length > max_tokens {
        let expected = format!("at most the model's {max_tokens} positions");
        return Err(TrainError::setting("sequence_length", length, expected));
    }
    Ok(())
}

/// Says what else a model is pre-trained with.
fn wrong_objective(objective: Objective, model: &ModelConfig) -> TrainError {
    let (got, without) = match objective {
        Objective::SpanBoundary => ("span-boundary", "the boundaries of spans"),
        Objective::SpanCorruption => ("span-corruption", "targets: that is for encoder-decoders, such as t5-small"),
        Objective::Denoising => ("denoising", "targets: that is for encoder-decoders, such as bart-base"),
        Objective::Mlm => ("mlm", "masked tokens"),
        Objective::MlmSop => ("mlm-sop", "a head for two sentences"),
        _ => ("mlm-nsp", "next sentence"),
    };
    let own = if model.targets().is_some() { "span-corruption or denoising" } else { "mlm" };
    TrainError::setting("objective", got, format!("{own}: {} is pre-trained without {without}", model.model_type()))
}

/// Refuses orders where nothing predicts by them, and all else where something does: its second stream would stay as it began.
fn check_streams(objective: Objective, model: &ModelConfig) -> Result<()> {
    if model.has_streams() == (objective == Objective::Permutation) {
        return Ok(());
    }
    let expected = match model.has_streams() {
        true => format!("permutation: {} predicts tokens in an order", model.model_type()),
        false => format!("mlm or another: {} has no second stream of queries, as xlnet-base has", model.model_type()),
    };
    let got = serde_json::to_value(objective).ok().and_then(|name| Some(name.as_str()?.to_owned()));
    Err(TrainError::setting("objective", got.unwrap_or_default(), expected))
}

fn head(objective: Objective) -> Head {
    match objective {
        Objective::SpanCorruption | Objective::Denoising => Head::Seq2Seq,
        Objective::ReplacedTokens => Head::ReplacedTokens,
        Objective::MlmNsp | Objective::MlmSop => Head::PreTraining,
        Objective::SpanBoundary => Head::SpanBoundary,
        Objective::Mlm | Objective::Causal | Objective::Permutation | Objective::Bidirectional => Head::MaskedLm,
    }
}

/// Where the data of a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PhasePlace {
    phase: usize,
    #[serde(flatten)]
    place: Place,
}

/// A text whose blanks are filled now and then.
struct Sample {
    text: String,
    ids: Vec<u32>,
    segments: Vec<u32>,
    positions: Vec<u32>,
}

/// Pre-training as a task for the loop.
pub struct PreTraining {
    phases: Vec<ResolvedPhase>,
    instances: Vec<Arc<Instances>>,
    threads: usize,
    place: PhasePlace,
    loader: Option<Loader>,
    held_out: Vec<Part>,
    samples: Vec<Sample>,
    tokenizer: Arc<Tokenizer>,
    /// Where replaced tokens are detected.
    generator: Option<GeneratorSettings>,
    /// Label smoothing, in training alone.
    smoothing: f32,
    /// Where the model learns from a teacher: what it is, in which numbers it computes, and itself, once it was asked.
    teacher: Option<(TeacherDirectory, DType, Option<Teacher>)>,
    /// Where the text is read as it stands.
    unrolled: Option<Unrolled>,
    eval_sequences: usize,
}

impl PreTraining {
    /// Goes on with the states of a checkpoint, where there are some.
    fn resume(&mut self, carried: Vec<Carried>) {
        if let Some(unrolled) = &mut self.unrolled {
            unrolled.resume(carried);
        }
    }

    /// A token as people read it, without the space before it.
    fn token(&self, id: u32) -> String {
        let readable = self.tokenizer.readable(id).map(|token| token.trim().to_owned());
        let token = readable.filter(|token| !token.is_empty()).or_else(|| self.tokenizer.token(id));
        token.unwrap_or_else(|| format!("<{id}>"))
    }

    fn phase_of(&self, step: u64) -> usize {
        let after = self.phases.partition_point(|phase| phase.first_step <= step);
        after.saturating_sub(1)
    }

    /// The data of a step.
    fn next(&mut self, step: u64) -> Result<Step> {
        let number = self.phase_of(step);
        if number != self.place.phase {
            self.place = PhasePlace { phase: number, place: Place::default() };
            self.loader = None;
        }
        let loader = match &mut self.loader {
            Some(loader) => loader,
            none => {
                let phase = &self.phases[number];
                none.insert(Loader::new(
                    Arc::clone(&self.instances[number]),
                    self.place.place,
                    phase.batch_size,
                    phase.accumulation,
                    self.threads,
                    AHEAD,
                )?)
            }
        };
        let step = loader.next()?;
        self.place.place = step.after;
        Ok(step)
    }
}

impl Task for PreTraining {
    fn step(&mut self, engine: &mut Engine, step: u64) -> Result<Underway> {
        if let Some(unrolled) = &mut self.unrolled {
            return unrolled.step(engine, step, &mut self.place.place);
        }
        let data = self.next(step)?;
        let one = |losses| vec![losses];
        if let Some((found, dtype, teacher)) = &mut self.teacher {
            let teacher = match teacher {
                Some(teacher) => teacher,
                none => none.insert(found.open(engine.parameters.device(), *dtype)?),
            };
            let (losses, weights) = (found.settings.names(), found.settings.loss_weights());
            let parts = teacher.learn(engine, step, &data)?;
            return Ok(Underway { parts, losses, weights, tokens: data.tokens });
        }
        if let Some(generator) = &self.generator {
            let (objective, weights) = (generator.objective(), generator.weights());
            let per = |weight: f64, count: usize| (weight / count.max(1) as f64) as f32;
            let per = PerPrediction { masked: per(weights[0], data.predicted), token: per(weights[1], data.tokens) };
            let parts = engine.in_parts(step, data.parts.len(), |engine, i| {
                engine.learn_part(step, objective, (&data.parts[i], per)).map(one)
            })?;
            let (losses, mut of_losses) = (objective.names(), EQUAL);
            of_losses[..2].copy_from_slice(&weights);
            return Ok(Underway { parts, losses, weights: of_losses, tokens: data.tokens });
        }
        // The rows' weights carry the scale of masked LM, which differs from step to step.
        let scale = 1.0 / data.predicted.max(1) as f32;
        let number = self.place.phase;
        if self.phases[number].instances.objective == Objective::SpanBoundary {
            let boundaries = |part: &Part| self.instances[number].boundaries(part, BOUNDARY_TARGETS);
            let parts = PartWithBoundaries::of_step(&data.parts, scale, boundaries);
            let objective = MaskedAndBoundary;
            let parts = engine
                .in_parts(step, parts.len(), |engine, i| engine.learn_part(step, objective, &parts[i]).map(one))?;
            return Ok(Underway { parts, losses: objective.names(), weights: EQUAL, tokens: data.tokens });
        }
        let objective = MaskedAndNext {
            sequence: Bits::from(1.0 / data.pairs.max(1) as f32),
            pairs: (data.pairs > 0).then_some(PairLoss::of(self.phases[number].instances.objective)),
            permuted: self.phases[number].instances.objective == Objective::Permutation,
            writes: self.phases[number].instances.objective.writes(),
            smoothing: Bits::from(self.smoothing),
        };
        let parts = engine.in_parts(step, data.parts.len(), |engine, i| {
            engine.learn_part(step, objective, (&data.parts[i], scale)).map(one)
        })?;
        Ok(Underway { parts, losses: objective.names(), weights: EQUAL, tokens: data.tokens })
    }

    fn evaluate(&mut self, engine: &mut Engine, _step: u64) -> Result<Option<Evaluation>> {
        if let Some(generator) = &self.generator {
            return replaced::evaluate(engine, generator, &self.held_out);
        }
        if let Some(unrolled) = &self.unrolled {
            return unrolled.evaluate(engine, self.eval_sequences);
        }
        if self.held_out.is_empty() {
            return Ok(None);
        }
        let readings = engine.look_around(self.held_out.len(), |engine, i| {
            engine.look(
                (),
                |device, config| Inputs::new(device, config, &self.held_out[i], 1.0),
                |(), model, pass, Inputs { batch, masked, labels }| {
                    let vocabulary = model.config().sizes().vocab_size;
                    let Masked { rows, targets, weights } = masked;
                    let weights = weights.as_ref();
                    let last = model.encode(pass, batch, Capture::default())?.last;
                    let logits = model.logits_of(pass, last.clone(), &batch.layout, Some(rows))?;
                    let right = pass.count_correct(&logits, vocabulary, targets, weights)?;
                    let mut found = vec![pass.cross_entropy(logits, vocabulary, targets, weights, 1.0)?.0, right];
                    if let Some(labels) = labels {
                        let logits = model.logits_of(pass, last, &batch.layout, None)?;
                        let right = pass.count_correct(&logits, 2, labels, None)?;
                        found.extend([pass.cross_entropy(logits, 2, labels, None, 1.0)?.0, right]);
                    }
                    Ok(found)
                },
            )
        })?;
        let predicted: usize = self.held_out.iter().map(|part| part.rows.len()).sum();
        let pairs: usize = self.held_out.iter().filter_map(|part| Some(part.next_sentence.as_ref()?.len())).sum();
        let mut sums = [0.0; 4];
        for reading in readings {
            sums.iter_mut().zip(reading.wait()?).for_each(|(sum, number)| *sum += number);
        }
        let [loss, right, next_loss, next_right] = sums;
        let loss = loss / predicted.max(1) as f64;
        let mut metrics = BTreeMap::from([
            ("loss".to_owned(), loss),
            ("perplexity".to_owned(), loss.exp()),
            ("accuracy".to_owned(), right / predicted.max(1) as f64),
        ]);
        if pairs > 0 {
            let [loss, accuracy] = PairLoss::of(self.phases[0].instances.objective).metrics();
            metrics.insert(loss.to_owned(), next_loss / pairs as f64);
            metrics.insert(accuracy.to_owned(), next_right / pairs as f64);
        }
        Ok(Some(Evaluation { metrics, score: loss, loss: None }))
    }

    fn samples(&mut self, engine: &mut Engine) -> Result<Vec<metrics::Sample>> {
        const BEST: usize = 5;
        let mut texts = Vec::new();
        for sample in &self.samples {
            let device = engine.parameters.device().clone();
            let sequence = Sequence { ids: &sample.ids, segments: &sample.segments };
            let config = engine.model.config();
            let (batch, rows) = Batch::with_masks(&device, config, &[sequence], &sample.positions, 0)?;
            let mut pass = Pass::inference(&mut engine.tape, &engine.parameters);
            // Of two, the generator fills blanks.
            let model = engine.model.generator().unwrap_or(&engine.model);
            let logits = model.logits(&mut pass, &batch, Some(&rows))?;
            let vocabulary = engine.model.config().sizes().vocab_size;
            let probabilities = pass.softmax(&logits, vocabulary)?.to_vec::<f32>()?;
            let blanks = probabilities.chunks(vocabulary).map(|row| {
                let mut ids: Vec<u32> = (0..row.len() as u32).collect();
                ids.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
                let guess = |id: &u32| Prediction { token: self.token(*id), probability: row[*id as usize] };
                ids.iter().take(BEST).map(guess).collect()
            });
            texts.push(metrics::Sample { text: sample.text.clone(), blanks: blanks.collect() });
        }
        Ok(texts)
    }

    fn rate(&self, step: u64) -> (f64, u32) {
        let number = self.phase_of(step);
        let phase = &self.phases[number];
        (phase.schedule.rate(step - phase.rate_from), number as u32)
    }

    fn place(&self) -> Result<Value> {
        serde_json::to_value(self.place)
            .map_err(|error| TrainError::State { path: PathBuf::from("state.json"), problem: error.to_string() })
    }

    fn carried(&self) -> Result<Vec<Carried>> {
        self.unrolled.as_ref().map_or_else(|| Ok(Vec::new()), Unrolled::carried)
    }
}

/// What is asked about two segments: whether the second followed the first, or which of them came first. What is computed is
/// the same; logs tell them apart.
#[derive(Clone, Copy, Hash)]
enum PairLoss {
    Next,
    Order,
}

impl PairLoss {
    fn of(objective: Objective) -> Self {
        if objective == Objective::MlmSop { Self::Order } else { Self::Next }
    }

    /// The names of its loss and its accuracy.
    fn metrics(self) -> [&'static str; 2] {
        match self {
            Self::Next => ["nsp_loss", "nsp_accuracy"],
            Self::Order => ["sop_loss", "sop_accuracy"],
        }
    }
}

/// BERT's objective: masked LM, and next sentence where there are pairs; ALBERT's, with the order of sentences. In the same place, the
/// next token of models that write, and tokens that are predicted in an order.
#[derive(Clone, Copy, Hash)]
struct MaskedAndNext {
    /// One over the number of pairs in the step.
    sequence: Bits,
    pairs: Option<PairLoss>,
    permuted: bool,
    /// Whether the tokens are those of targets.
    writes: bool,
    /// The share of each token's target that is spread over the vocabulary.
    smoothing: Bits,
}

impl objective::Objective for MaskedAndNext {
    /// What each masked token counts is in the inputs: it differs from step to step.
    type Part<'p> = (&'p Part, f32);
    type Inputs = Inputs;

    fn names(&self) -> LossNames {
        match (self.pairs, self.writes) {
            (Some(PairLoss::Next), _) => &["mlm_loss", "nsp_loss"],
            (Some(PairLoss::Order), _) => &["mlm_loss", "sop_loss"],
            (None, _) if self.permuted => &["permutation_loss"],
            (None, false) => &["mlm_loss"],
            (None, true) => &["lm_loss"],
        }
    }

    fn inputs(&self, device: &Device, config: &ModelConfig, (part, scale): (&Part, f32)) -> Result<Inputs> {
        Inputs::new(device, config, part, scale)
    }

    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &Inputs) -> Result<Vec<Tensor>> {
        let (labels, scales) = (inputs.labels.as_ref(), Scales { masked: 1.0, sequence: self.sequence.get() });
        let (batch, masked, smoothing) = (&inputs.batch, &inputs.masked, self.smoothing.get());
        let loss = objective::smoothed_pre_training(model, pass, batch, masked, labels, scales, smoothing)?;
        Ok([Some(loss.masked), loss.next_sentence].into_iter().flatten().collect())
    }
}

/// A part of a step on the device.
pub(crate) struct Inputs {
    pub(crate) batch: Batch,
    pub(crate) masked: Masked,
    labels: Option<Tensor>,
}

impl Inputs {
    /// `weight` is what each prediction counts.
    pub(crate) fn new(device: &Device, config: &ModelConfig, part: &Part, weight: f32) -> Result<Self> {
        Self::behind(device, config, part, weight, None)
    }

    /// The same behind a memory, where tokens are predicted in an order.
    pub(crate) fn behind(
        device: &Device,
        config: &ModelConfig,
        part: &Part,
        weight: f32,
        memory: Option<&Memory>,
    ) -> Result<Self> {
        let mut sequences = Vec::with_capacity(part.lengths.len());
        let mut start = 0;
        for length in &part.lengths {
            let range = start..start + length;
            sequences.push(Sequence { ids: &part.ids[range.clone()], segments: &part.segments[range] });
            start += length;
        }
        let (batch, masked) = match (&part.orders, &part.target_lengths) {
            (Some(orders), _) => in_order(device, config, part, (&sequences, orders, memory), weight)?,
            (None, lengths) => {
                let batch = match lengths {
                    None => Batch::new(device, config, &sequences, part.first_number)?,
                    Some(lengths) => {
                        let mut rest = &part.targets[..];
                        let targets: Vec<&[u32]> = lengths
                            .iter()
                            .map(|length| {
                                let (target, behind) = rest.split_at(*length);
                                rest = behind;
                                target
                            })
                            .collect();
                        Batch::pairs(device, config, &sequences, &targets, part.first_number)?
                    }
                };
                (batch, Masked::new(device, &part.rows, &part.targets, weight)?)
            }
        };
        let labels = part.next_sentence.as_ref().map(|labels| Tensor::from_slice(device, [labels.len()], labels));
        Ok(Self { batch, masked, labels: labels.transpose()? })
    }
}

/// A part whose tokens are predicted in an order: by the second stream, whose rows are in the order of the targets.
fn in_order(
    device: &Device,
    config: &ModelConfig,
    part: &Part,
    (sequences, orders, memory): (&[Sequence<'_>], &[u32], Option<&Memory>),
    weight: f32,
) -> Result<(Batch, Masked)> {
    let (mut start, mut rows) = (0, part.rows.iter().peekable());
    let mut targets: Vec<Vec<u32>> = Vec::with_capacity(sequences.len());
    let mut ranges = Vec::with_capacity(sequences.len());
    for length in &part.lengths {
        let end = start + length;
        let own = std::iter::from_fn(|| rows.next_if(|row| (**row as usize) < end));
        targets.push(own.map(|row| row - start as u32).collect());
        ranges.push(start..end);
        start = end;
    }
    let both = ranges.into_iter().zip(&targets);
    let permutations: Vec<Permutation<'_>> =
        both.map(|(range, targets)| Permutation { orders: &orders[range], targets }).collect();
    let batch = Batch::in_order(device, config, sequences, Some(&permutations), memory, part.first_number)?;
    let masked = Masked::new(device, &part.rows, &part.targets, weight)?;
    // Where tokens stand is not where they are predicted; where nothing is, a row that counts nothing stands for all.
    let rows = batch.predicted().filter(|_| !part.rows.is_empty()).cloned().unwrap_or(masked.rows);
    Ok((batch, Masked { rows, ..masked }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_tensor::Tape;

    /// The loss of targets is that of `transformers` with labels (tools/golden/writers_loss.py), with label smoothing as well, and in
    /// two parts as in one.
    #[test]
    fn targets_have_the_loss_of_transformers() {
        let sources: [&[u32]; 2] = [&[5, 6, 7, 8, 9, 10, 11, 2], &[12, 13, 14, 2]];
        let targets: [&[u32]; 2] = [&[20, 21, 22, 23, 24, 2], &[30, 31, 2]];
        let part = |chosen: &[usize]| {
            let instance = |i: &usize| henson_data::Instance {
                ids: sources[*i].to_vec(),
                segments: vec![0; sources[*i].len()],
                predicted: Vec::new(),
                target: Some(targets[*i].to_vec()),
                orders: None,
                next_sentence: None,
                document: 0,
                random_document: None,
            };
            part_of(&chosen.iter().map(instance).collect::<Vec<_>>(), chosen[0] as u32)
        };
        let device = Device::cpu(None, Some(2)).unwrap();
        for (name, plain, smoothed) in
            [("t5", 4.681419, 4.670618), ("t5-v1_1", 12.260151, 12.328471), ("bart", 4.23783, 4.229297)]
        {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers").join(name);
            let directory = ModelDirectory::open(&path).unwrap();
            let config = Config::from_value(directory.config().unwrap()).unwrap().model;
            let mut builder = Builder::new();
            let model = Model::build(&mut builder, &config, Head::Seq2Seq).unwrap();
            let (weights, options) = (directory.weights().unwrap(), LoadOptions::default());
            let naming = &config.family().naming;
            let parameters = open_parameters(&weights, naming, builder, &device, DType::F32, &options, 0).unwrap().0;
            for (smoothing, expected) in [(0.0, plain), (0.1, smoothed)] {
                let smoothing = Bits::from(smoothing);
                let objective =
                    MaskedAndNext { sequence: Bits::from(0.0), pairs: None, writes: true, permuted: false, smoothing };
                assert_eq!(objective.names(), &["lm_loss"]);
                let loss = |part: &Part| {
                    let inputs = objective.inputs(&device, &config, (part, 1.0 / 9.0)).unwrap();
                    let mut tape = Tape::new();
                    let mut pass = Pass::inference(&mut tape, &parameters);
                    objective.losses(&model, &mut pass, &inputs).unwrap()[0].to_vec::<f32>().unwrap()[0]
                };
                let whole = loss(&part(&[0, 1]));
                assert!((whole - expected).abs() < 2e-5, "{name}: {whole}, expected {expected}");
                let parts = loss(&part(&[0])) + loss(&part(&[1]));
                assert!((whole - parts).abs() < 1e-5, "{name}: {whole} and {parts}");
            }
        }
    }

    /// A memory that is carried from step to step: losses, gradients and updates are those of `transformers`
    /// (tools/golden/running_text.py), over the end of an epoch, where it begins empty.
    #[test]
    fn a_memory_is_that_of_transformers() {
        const TOLERANCE: f64 = 2e-5;
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/running-text/golden.json");
        let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let golden = &golden["in_order"];
        let plan = plan_with_memory(&[]).unwrap();
        let device = Device::cpu(None, Some(2)).unwrap();
        let mut engine = plan.engine(&device).unwrap();
        let mut names: Vec<String> = engine.parameters.entries().iter().map(|entry| entry.name.clone()).collect();
        names.sort();
        for i in 0..names.len() {
            let entry = engine.parameters.entries()[i].clone();
            let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
            let values = (0..entry.shape.elements()).map(|j| (0.4 * (0.7 * j as f64 + 1.3 * k).sin()) as f32);
            engine.parameters.write(i, &values.collect::<Vec<f32>>()).unwrap();
        }
        engine.parameters.refresh().unwrap();
        let mut task = plan.task(&Value::Null, 1).unwrap();
        let numbers = |value: &Value| -> Vec<u32> {
            value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
        };
        let instance = |row: &Value| {
            let ids = numbers(&row["ids"]);
            let target = |position: u32| henson_data::Predicted { position, target: ids[position as usize] };
            henson_data::Instance {
                segments: vec![0; ids.len()],
                predicted: numbers(&row["targets"]).into_iter().map(target).collect(),
                target: None,
                orders: Some(numbers(&row["orders"])),
                next_sentence: None,
                document: 0,
                random_document: None,
                ids,
            }
        };
        for (step, rows) in golden["batches"].as_array().unwrap().iter().enumerate() {
            let rows: Vec<_> = rows.as_array().unwrap().iter().map(instance).collect();
            let parts: Vec<Part> = rows.chunks(1).zip(0..).map(|(rows, first)| part_of(rows, first)).collect();
            let unrolled = task.unrolled.as_mut().unwrap();
            if (step as u64).is_multiple_of(golden["epoch"].as_u64().unwrap()) {
                unrolled.begin();
            }
            engine.gradients.zero();
            let found = unrolled.learn(&mut engine, step as u64, &parts).unwrap().wait().unwrap();
            assert_eq!(found.named(1.0)[0].0, "permutation_loss");
            let rate = task.rate(step as u64).0;
            let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap()[0];
            for (what, got, bound) in [("losses", found.total, TOLERANCE), ("norms", norm, 10.0 * TOLERANCE)] {
                let expected = golden[what][step].as_f64().unwrap();
                assert!((got - expected).abs() < bound, "{what} of step {step}: {got}, transformers has {expected}");
            }
        }
        let known = golden["parameters"].as_object().unwrap();
        assert_eq!(known.len(), names.len());
        for (i, entry) in engine.parameters.entries().iter().enumerate() {
            let numbers = engine.parameters.read(i).unwrap();
            let sum = numbers.iter().zip(0..).map(|(p, j)| f64::from(*p) * f64::from(j + 1).sin()).sum::<f64>();
            let expected = known[&entry.name].as_f64().unwrap();
            assert!((sum - expected).abs() < 10.0 * TOLERANCE, "{}: {sum}, transformers has {expected}", entry.name);
        }
    }

    /// A tiny XLNet with a memory, on documents of two rows and two parts.
    fn plan_with_memory(sets: &[&str]) -> Result<Plan> {
        let names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned);
        let pieces: Vec<String> = names.into_iter().chain((0..26).map(|i| format!("w{i}"))).collect();
        let tokenizer = Tokenizer::from_vocabulary(&pieces, &henson_text::WordPieceOptions::default()).unwrap();
        let text = "model = \"xlnet-tiny\"\nobjective = \"permutation\"\npacking = \"stream\"\nsteps = 8\nbatch_size = 2\n\
                    accumulation = 2\nsequence_length = 8\noptimizer = \"sgd\"\nlearning_rate = 0.5\nclip = 1.0\n\
                    weight_decay = 0.0\nwarmup_steps = 0\nschedule = \"constant\"\ndropout = 0.0\neval_every = 0\n\
                    mask_probability = 0.25\n[config]\nd_model = 8\nn_layer = 2\nn_head = 2\nd_inner = 12\nmem_len = 10\n";
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let recipe = Recipe::parse(text, "test", &sets)?;
        let corpus = |documents: &[Vec<Vec<u32>>]| {
            let words = henson_data::WordMarks::Begin(vec![true; 31]);
            let (special, sentinels) = (vec![2, 3], Vec::new());
            let vocabulary =
                henson_data::Vocabulary { size: 31, cls: 2, sep: 3, mask: Some(4), special, words, sentinels };
            Corpus::from_documents(vocabulary, documents)
        };
        let documents = [vec![(5..31).collect::<Vec<u32>>(); 3], vec![(5..20).collect(); 4]];
        Plan::on(corpus(&documents), corpus(&[]), tokenizer, recipe, 1)
    }

    /// What is remembered is bounded and stands in the config; ranks do not carry it.
    #[test]
    fn a_memory_has_a_length() {
        let json = plan_with_memory(&[]).unwrap().config.to_json().unwrap();
        assert_eq!([&json["mem_len"], &json["reuse_len"]].map(Value::as_u64), [Some(10), Some(7)]);
        assert_eq!(json["use_mems_train"], true);
        let refused = |sets: &[&str]| plan_with_memory(sets).err().map(|error| error.to_string()).unwrap_or_default();
        for (set, expected) in [
            ("config.mem_len=0", "config.mem_len=384"),
            ("config.mem_len=70000", "1 to 65536"),
            ("config.reuse_len=4", "nothing, or 7"),
            ("batch_size=100", "batch_size"),
        ] {
            assert!(refused(&[set]).contains(expected), "{set}: {}", refused(&[set]));
        }
    }
}
