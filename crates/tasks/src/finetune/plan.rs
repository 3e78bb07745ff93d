//! A run, checked and resolved, before anything is computed: files read, labels agreed on, texts laid out, the config made.

use std::path::Path;
use std::sync::Arc;

use henson_checkpoint::{Config, ModelDirectory, TaskConfig, TrainedReading, read_json};
use henson_infer::{GenerateSettings, Problem, legal_steps};
use henson_models::{Family, Head, Model, ModelConfig};
use henson_ranks::Ranks;
use henson_tensor::{Builder, Device, Entry, Group};
use henson_text::{Stride, Tokenizer};
use henson_train::{
    Engine, ModelFiles, Result as TrainResult, Schedule, TrainError, Updater, agree, check_parts, digest, to_toml,
};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::learner::{Dev, Learner, LearnerSettings, Shuffled, check_metric};
use super::mixture::{self, DataSet, Member, Mixture};
use super::recipe::FineTuneRecipe;
use super::sets::{check_documents, read_both, read_dev};
use super::start::{begin_with, special_ids, started_from, started_with};
use super::teaching::Teaching;
use super::vectors::HostObjective;
use super::words::WordTable;
use super::{defaults, split, teach};
use crate::error::TaskError;
use crate::example::{Input, Set, Target};
use crate::forms::ERRORS;
use crate::prepare::{Instance, Lengths, instances, taught_instances};
use crate::read::{Reading, listed};
use crate::task::Task;
use crate::write::{Resampling, Writing};

/// How a model's texts are written, beside its config.
const GENERATION_CONFIG: &str = "generation_config.json";

/// The largest that is read.
const GENERATION_CONFIG_LIMIT: u64 = 1 << 20;

/// A run before it begins.
pub struct Plan {
    /// The recipe, as it will be saved.
    pub recipe: FineTuneRecipe,
    /// The task.
    pub task: &'static Task,
    /// The config of the model to be.
    pub config: Config,
    /// What is trained on.
    pub train: Set,
    /// What the best model is chosen by.
    pub dev: Option<Set>,
    /// Examples of the training file whose end was cut off.
    pub cut: usize,
    /// Why settings that nobody gave are what they are, a line each.
    pub reasons: Vec<String>,
    /// What is divided into folds.
    whole: Option<Arc<Set>>,
    is_fold: bool,
    /// The network before its vocabulary grew, where it did.
    grown_from: Option<ModelConfig>,
    tokenizer: Arc<Tokenizer>,
    /// What words begin with, where a file says so.
    vectors: Option<Arc<WordTable>>,
    lengths: Lengths,
    instances: Vec<Instance>,
    /// The data sets, where there are several.
    members: Vec<Member>,
    threads: usize,
    data: String,
    /// The teachers, where there are some.
    teaching: Option<Arc<Teaching>>,
    /// What is learned from texts without labels before, if that is a phase of its own.
    first: Option<Arc<Plan>>,
    /// Those that train together with this process.
    pub ranks: Option<Arc<Ranks>>,
}

impl Plan {
    /// Checks that all ranks have the same before them, and that they can share the work.
    pub(crate) fn check_ranks(&self, ranks: Option<&Arc<Ranks>>, device: &Device) -> TrainResult<()> {
        let Some(ranks) = ranks else { return Ok(()) };
        let objectives = self.objectives()?;
        // The loss of a batch whose parts are told from each other is not a sum over parts.
        let is_told_apart = match &objectives[..] {
            [] => self.instances.first().is_some_and(Instance::is_contrast),
            some => !some.iter().all(HostObjective::is_a_sum),
        };
        let refuse = |key: &'static str, got: &str, expected: &str| {
            Err(TrainError::setting(key, got, format!("{expected}: that is for one process alone so far")))
        };
        let recipe = &self.recipe;
        match () {
            () if !self.members.is_empty() => {
                return refuse("datasets", &self.members.len().to_string(), "none with several ranks");
            }
            () if is_told_apart => {
                return refuse("task", self.task.name, "a loss that is a sum over examples, with several ranks");
            }
            () if self.has_folds() => {
                return refuse("folds", &recipe.folds.to_string(), "0 with several ranks (give --dev)");
            }
            () if recipe.linear_head => return refuse("linear_head", "true", "false with several ranks"),
            () if recipe.average_checkpoints > 1 => {
                return refuse("average_checkpoints", &recipe.average_checkpoints.to_string(), "1 with several ranks");
            }
            () => check_parts(recipe.accumulation, ranks.size())?,
        }
        let tokenizer = self.tokenizer.files(None)?;
        let facts = [
            ("recipe", digest(&to_toml(recipe)?)),
            ("data", self.data.clone()),
            ("tokenizer", digest(&tokenizer)),
            ("model", digest(&self.config.to_json()?.to_string())),
            ("processor", device.isa().map_or_else(|| device.to_string(), |isa| isa.to_string())),
        ];
        agree(ranks, &facts)
    }

    /// Reads the files of a recipe.
    pub fn new(mut recipe: FineTuneRecipe, threads: usize) -> Result<Self, TaskError> {
        recipe.check()?;
        let kept = recipe.first.take();
        let first = match (teach::first_phase(&recipe), kept) {
            // All but what is chosen is as it is now: the number of ranks may have set `accumulation` since.
            (Some(first), Some(kept)) => Some(first.with_choices_of(&kept)?),
            (first, _) => first,
        };
        let first = first.map(|first| Self::new(first, threads)).transpose()?.map(Arc::new);
        let task = task_of(&mut recipe)?;
        let prefix = recipe.prefix.clone();
        let mut reading = Reading { files: recipe.files.clone(), prefix, loss: recipe.loss, ..Reading::new(task) };
        let unlabelled = teach::prepare(&mut recipe, task, &mut reading)?;
        let limit = recipe.limit.filter(|_| !task.form.picks_rows);
        let path = recipe.directory().to_owned();
        task.form.choose(&mut recipe, &path)?;
        let members = mixture::read(&mut recipe, task)?;
        let (mut train, mut dev) = match members.is_empty() {
            true => read_both(recipe.files_to_read(), &recipe.dev, limit, &reading)?,
            false => (mixture::joined(&members, task), read_dev(&recipe.dev, &reading)?),
        };
        task.form.check(&recipe, &path)?;
        for member in &members {
            task.form.check(&member.recipe, &path)?;
            task.form.check_data(&member.set, dev.as_ref())?;
        }
        if recipe.taught_by().is_some() {
            teach::check_data(&train)?;
        } else if members.is_empty() {
            task.form.check_data(&train, dev.as_ref())?;
        }
        if recipe.windows && task.form.reads_whole {
            let expected = format!("false: task {} reads an example as a whole", task.name);
            return Err(TrainError::setting("windows", "true", expected).into());
        }
        if recipe.document_context {
            check_documents(&train, dev.as_ref())?;
        }
        if let Some(metric) = &recipe.metric {
            recipe.metric = Some(check_metric(metric, task, &task.form.scored_names(&train))?);
        }
        if unlabelled {
            teach::check_estimate(&mut recipe)?;
        }
        defaults::choose_estimate(&mut recipe, &train)?;
        let whole = (recipe.folds > 0).then(|| Arc::new(train.clone()));
        if recipe.dev_rows > 0 {
            let (rest, held_out) = split::hold_out(&train, recipe.dev_rows, recipe.split_seed, recipe.document_context);
            (train, dev) = (rest, Some(held_out));
        }
        let reasons = defaults::why_estimate(&recipe, &train, dev.as_ref()).into_iter().collect();
        let (own, tokenizer, vectors) = started_with(&recipe, task, &train)?;
        choose_beams(&mut recipe, &own, task)?;
        check_head(&own, task, recipe.head(task, &own.model, 1), &path)?;
        defaults::choose_inputs(&mut recipe, &own.model, task, &train)?;
        teach::check_inputs(&recipe)?;
        let mut config = config_for(own, task, &train, &recipe)?;
        if recipe.class_weights && config.model.scores_jointly() && matches!(task.form.head(1), Head::Token { .. }) {
            let expected = "false: a conditional random field scores the tags of a sentence together";
            return Err(TrainError::setting("class_weights", "true", expected).into());
        }
        if recipe.class_weights && (unlabelled || task.form.class_weights(&train).is_none()) {
            let expected = "a task with labels of texts or words (classify, pair, tag, multilabel)";
            return Err(TrainError::setting("class_weights", "true", expected).into());
        }
        let max_tokens = config.model.sizes().max_tokens;
        let lengths = Lengths {
            most: recipe.length(task, &config.model),
            target: recipe.target_length().min(max_tokens),
            end: config.model.targets().map(|reading| reading.end),
            windows: recipe.windows,
            stride: Stride::Step(recipe.stride),
            max_question: recipe.max_question,
            document_context: recipe.document_context,
            both_orders: recipe.both_orders,
            continues: false,
        };
        let lengths = match recipe.head(task, &config.model, 1) != task.form.head(1) && task.form.continues {
            true => {
                let end = Some(special_ids(&tokenizer, recipe.tokenizer_directory())?.end);
                Lengths { end, ..lengths.in_one(max_tokens) }
            }
            false => lengths,
        };
        let mut tokenizer = tokenizer;
        let mut grown_from = None;
        if recipe.task_tokens {
            tokenizer = tokenizer.with_task_tokens().map_err(TrainError::from)?;
            if tokenizer.vocabulary_size() > config.model.sizes().vocab_size {
                let grown = config.model.with_more_tokens(tokenizer.vocabulary_size()).map_err(TrainError::from)?;
                grown_from = Some(std::mem::replace(&mut config.model, grown));
            }
        }
        let tokenizer = Arc::new(tokenizer);
        let empty = train.without_examples();
        let plan = Self {
            recipe,
            task,
            config,
            train: empty,
            dev: None,
            cut: 0,
            reasons,
            whole,
            is_fold: false,
            grown_from,
            tokenizer,
            vectors: vectors.map(Arc::new),
            lengths,
            instances: Vec::new(),
            members,
            threads,
            data: String::new(),
            teaching: None,
            first,
            ranks: None,
        };
        let mut plan = plan.on(train, dev)?;
        let reasons = defaults::choose_training(&mut plan)?;
        plan.reasons.extend(reasons);
        Ok(plan)
    }

    /// The same on these rows.
    fn on(&self, mut train: Set, dev: Option<Set>) -> Result<Self, TaskError> {
        let recipe = &self.recipe;
        let sizes = self.config.model.sizes();
        let dropout = sizes.dropout > 0.0 || sizes.attention_dropout > 0.0;
        let of_set = if recipe.taught_by().is_some() { taught_instances } else { instances };
        let lay_out = |set: &Set| of_set(set, &self.tokenizer, &self.lengths, self.threads).map_err(TrainError::from);
        let mut members = self.members.clone();
        let (instances, cut) = match members.is_empty() {
            true => {
                self.task.form.pick_rows(&mut train, recipe, dropout)?;
                lay_out(&train)?
            }
            false => {
                let (mut all, mut cut) = (Vec::new(), 0);
                for member in &mut members {
                    self.task.form.pick_rows(&mut member.set, &member.recipe, dropout)?;
                    let (own, cut_here) = lay_out(&member.set)?;
                    member.instances = all.len()..all.len() + own.len();
                    cut += cut_here;
                    all.extend(own);
                }
                train = mixture::joined(&members, self.task);
                (all, cut)
            }
        };
        let teaching = teach::teaching(recipe, self.task, &train, &self.tokenizer, self.lengths);
        let mut plan = Self {
            recipe: recipe.clone(),
            task: self.task,
            config: self.config.clone(),
            train,
            dev,
            cut,
            reasons: self.reasons.clone(),
            whole: self.whole.clone(),
            is_fold: self.is_fold,
            grown_from: self.grown_from.clone(),
            tokenizer: Arc::clone(&self.tokenizer),
            vectors: self.vectors.clone(),
            lengths: self.lengths,
            instances,
            members,
            threads: self.threads,
            data: String::new(),
            teaching: teaching.map(Arc::new),
            first: self.first.clone(),
            ranks: None,
        };
        plan.objectives()?;
        plan.data = plan.digest()?;
        Ok(plan)
    }

    /// Whether folds estimate the score.
    pub fn has_folds(&self) -> bool {
        self.whole.is_some()
    }

    /// A run for each fold: trained on the others, scored on it after its last update.
    pub(super) fn folds(&self) -> impl Iterator<Item = Result<Self, TaskError>> + '_ {
        let recipe = &self.recipe;
        let divided = self
            .whole
            .as_ref()
            .map(|whole| split::folds(whole, recipe.folds, recipe.split_seed, recipe.document_context));
        let run = |(train, dev): (Set, Set)| Ok(Self { is_fold: true, whole: None, ..self.on(train, Some(dev))? });
        divided.into_iter().flatten().map(run)
    }

    /// Whether this is a run of a fold, which is only there to be scored at its end.
    pub(super) fn is_fold(&self) -> bool {
        self.is_fold
    }

    /// The score that chooses the best model, unless the dev data has no such score.
    pub fn metric(&self) -> &str {
        self.recipe.metric.as_deref().unwrap_or(self.task.metric)
    }

    /// Whether lower values of that score are better.
    pub(super) fn metric_is_error(&self) -> bool {
        ERRORS.contains(&self.metric())
    }

    /// Updates in all.
    pub fn steps(&self) -> u64 {
        ((self.steps_per_epoch() as f64 * self.recipe.epochs).round() as u64).max(1)
    }

    /// Updates of an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        match self.mixture() {
            Some(mixture) => mixture.steps_per_epoch(),
            None => Learner::steps_per_epoch(&self.instances, self.recipe.batch_size),
        }
    }

    /// Updates between two evaluations.
    pub(super) fn eval_every(&self) -> u64 {
        ((self.steps_per_epoch() as f64 / self.recipe.evals_per_epoch) as u64).max(1)
    }

    /// In which order batches of several data sets are learned from.
    fn mixture(&self) -> Option<Mixture> {
        let sets: Vec<(u64, f64)> = self
            .shuffled()
            .iter()
            .zip(&self.recipe.datasets)
            .map(|(set, own)| (set.steps_per_epoch(&self.instances), own.weight))
            .collect();
        (!self.members.is_empty()).then(|| Mixture::new(self.recipe.mixing, self.recipe.seed, &sets))
    }

    /// The rows that are shuffled among themselves: all, or those of each data set.
    fn shuffled(&self) -> Vec<Shuffled> {
        if self.members.is_empty() {
            return vec![Shuffled::new(0..self.instances.len(), self.recipe.batch_size)];
        }
        let of = |(member, own): (&Member, &DataSet)| {
            Shuffled::new(member.instances.clone(), own.batch_size.unwrap_or(self.recipe.batch_size))
        };
        self.members.iter().zip(&self.recipe.datasets).map(of).collect()
    }

    /// Sequences to train on: more than examples where texts are divided.
    pub fn instances(&self) -> usize {
        self.instances.len()
    }

    /// Tokens of an epoch.
    pub fn tokens(&self) -> usize {
        self.instances.iter().map(Instance::tokens).sum()
    }

    /// The labels that no example to train on has, if there are such: those of the dev file alone, or given.
    pub fn labels_without_examples(&self) -> Option<String> {
        let counts = self.train.label_counts();
        let unseen: Vec<&String> =
            self.train.labels.iter().zip(counts).filter(|(_, count)| *count == 0).map(|(label, _)| label).collect();
        (!unseen.is_empty()).then(|| listed(&unseen))
    }

    /// Names the data, to be found again when a run resumes.
    pub fn data_name(&self) -> &str {
        &self.data
    }

    fn digest(&self) -> Result<String, TaskError> {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}", self.train.labels));
        for instance in &self.instances {
            for (ids, _) in &instance.sequences {
                ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            }
            for spelling in instance.spellings.iter().flatten().flatten() {
                hash.update(spelling.as_bytes());
                hash.update([0]);
            }
            hash.update(self.task.form.digest(instance));
        }
        if let Some(vectors) = &self.vectors {
            vectors.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            vectors.numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
        }
        if let Some(dev) = &self.dev {
            dev.examples.iter().for_each(|example| hash.update(format!("{:?}{:?}", example.input, example.target)));
        }
        if let Some(teaching) = &self.teaching {
            hash.update(teaching.digest()?);
        }
        if let Some(first) = &self.first {
            hash.update(first.data_name());
        }
        Ok(hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect())
    }

    /// What is saved beside the weights.
    pub fn model_files(&self) -> TrainResult<ModelFiles> {
        let sizes = self.config.model.sizes();
        let files = self.tokenizer.files(Some(sizes.max_tokens))?;
        let mut files = ModelFiles { config: self.config.to_json()?, files, generator: None };
        self.task.form.add_files(&mut files, &self.recipe, sizes.hidden_size, self.lengths.most)?;
        if self.task.form.writes {
            let json = serde_json::to_vec_pretty(&self.generation_config()?)
                .map_err(|error| TrainError::State { path: GENERATION_CONFIG.into(), problem: error.to_string() })?;
            files.files.push((GENERATION_CONFIG.to_owned(), json));
        }
        Ok(files)
    }

    /// Whether the model continues sources with targets.
    pub(super) fn continues(&self) -> bool {
        self.lengths.continues
    }

    /// The phase before this one, which this one starts from.
    pub fn first_phase(&self) -> Option<&Self> {
        self.first.as_deref()
    }

    /// The model with its first weights: those of the directory, and a new head where it has none that fits.
    pub fn engine(&self, device: &Device) -> TrainResult<Engine> {
        self.engine_from(device, Some(self.recipe.directory()).filter(|_| !self.recipe.is_from_scratch()))
    }

    /// The same with the weights of any directory; without one, with random weights.
    pub(super) fn engine_from(&self, device: &Device, directory: Option<&Path>) -> TrainResult<Engine> {
        let recipe = &self.recipe;
        let (model, mut builder) = self.model_builder()?;
        self.objectives_laid_out(&mut builder)?;
        let mut parameters = started_from(&self.config, self.grown_from.as_ref(), builder, device, recipe, directory)?;
        if let Some(vectors) = &self.vectors {
            begin_with(&mut parameters, vectors)?;
        }
        let mut engine = Engine::new(model, parameters, recipe.optimizer(), recipe.seed)?;
        if recipe.freeze || recipe.layer_decay < 1.0 {
            let layers = self.config.model.sizes().num_hidden_layers;
            let rate = |entry: &Entry| rate_of(entry.group, layers, recipe);
            engine.updater = Updater::with_rates(recipe.optimizer(), &engine.parameters, rate)?;
        }
        Ok(engine)
    }

    /// The task for the loop.
    pub fn learner(&self) -> TrainResult<Learner> {
        let steps = self.steps();
        let dev = match &self.dev {
            None => None,
            Some(set) => Some(Dev::new(set.clone(), &self.tokenizer, &self.lengths, self.threads)?),
        };
        let settings = LearnerSettings {
            task: self.task,
            batch_size: self.recipe.batch_size,
            accumulation: self.recipe.accumulation,
            schedule: Schedule::of_task(self.recipe.schedule, self.recipe.learning_rate, self.recipe.warmup, steps),
            seed: self.recipe.seed,
            freeze: self.recipe.freeze,
            may_decline: self.config.task.no_answer_threshold.is_some(),
            temperature: self.recipe.temperature as f32,
            class_weights: self.class_weights(),
            metric: self.recipe.metric.clone(),
            auxiliary_lm: self.recipe.auxiliary_lm as f32,
            both_orders: self.recipe.both_orders,
            label_smoothing: self.recipe.label_smoothing as f32,
            writing: self.writing()?,
            resampling: self.resampling()?,
            poolings: self.recipe.poolings(),
            host: self.objectives_laid_out(&mut self.model_builder()?.1)?,
        };
        Learner::of_several(self.instances.clone(), dev, settings, self.shuffled(), self.mixture())
    }

    /// How texts are written for dev scores, where they are: as the finished model's directory will have it.
    fn writing(&self) -> TrainResult<Option<Writing>> {
        if !self.task.form.writes {
            return Ok(None);
        }
        let json = self.generation_config()?;
        let settings = GenerateSettings::from_json(Path::new(GENERATION_CONFIG), &json);
        let settings = settings.map_err(|error| TrainError::Task(error.into()))?;
        Ok(Some(Writing { tokenizer: Arc::clone(&self.tokenizer), settings }))
    }

    fn resampling(&self) -> TrainResult<Option<Arc<Resampling>>> {
        let Some(strength) = self.recipe.subword_regularisation else { return Ok(None) };
        let draws = (self.recipe.seed, self.threads);
        let resampling = Resampling::new(&self.train, &self.tokenizer, strength, self.lengths, draws);
        Ok(Some(Arc::new(resampling.map_err(|error| TrainError::Task(error.into()))?)))
    }

    /// generation_config.json: that of the model's directory, with what the recipe says.
    fn generation_config(&self) -> TrainResult<Value> {
        let path = self.recipe.directory().join(GENERATION_CONFIG);
        let mut keys: Map<String, Value> = match path.exists() {
            true => read_json(&path, GENERATION_CONFIG_LIMIT)?,
            false => Map::new(),
        };
        // Lengths that were another task's.
        for key in [
            "max_length",
            "min_length",
            "max_new_tokens",
            "min_new_tokens",
            "transformers_version",
            "_from_model_config",
        ] {
            keys.remove(key);
        }
        let config = self.config.model.to_json()?;
        let ids = ["decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"];
        for key in ids {
            if let Some(id) = config.get(key).filter(|id| !id.is_null()) {
                keys.entry(key).or_insert_with(|| id.clone());
            }
        }
        if let Some(reading) = self.config.model.targets() {
            keys.insert("decoder_start_token_id".to_owned(), reading.start.into());
        }
        if let (true, Some(end)) = (self.lengths.continues, self.lengths.end) {
            keys.insert("eos_token_id".to_owned(), end.into());
        }
        let recipe = &self.recipe;
        let own = [
            ("max_new_tokens", Value::from(self.lengths.target), true),
            ("min_new_tokens", recipe.min_target_length.into(), recipe.min_target_length > 0),
            ("num_beams", recipe.beams.into(), true),
            ("length_penalty", recipe.length_penalty.into(), recipe.length_penalty != 1.0),
            ("no_repeat_ngram_size", recipe.no_repeat_ngram.into(), recipe.no_repeat_ngram > 0),
        ];
        for (key, value, says) in own {
            keys.remove(key);
            if says {
                keys.insert(key.to_owned(), value);
            }
        }
        Ok(Value::Object(keys))
    }

    /// What is learned by losses that are computed elsewhere than on the device: one objective, or one for each data set.
    fn objectives(&self) -> TrainResult<Vec<HostObjective>> {
        let (form, width) = (self.task.form, self.config.model.sizes().hidden_size);
        if let Some(teaching) = &self.teaching {
            let taught = teach::objective(&self.recipe, teaching, &self.train, width, self.class_weights());
            return Ok(vec![HostObjective::Taught(taught.map_err(|error| TrainError::Task(error.into()))?)]);
        }
        if self.members.is_empty() {
            return Ok(form.host(&self.recipe, &self.train, width)?.into_iter().collect());
        }
        let mut all = Vec::with_capacity(self.members.len());
        for Member { recipe, set, .. } in &self.members {
            all.extend(form.host(recipe, set, width)?);
        }
        Ok(all)
    }

    /// The same, with what they need and the model does not have laid out behind the model's parameters.
    fn objectives_laid_out(&self, builder: &mut Builder) -> TrainResult<Vec<HostObjective>> {
        let mut objectives = self.objectives()?;
        for (number, objective) in objectives.iter_mut().enumerate() {
            objective.build(builder, self.config.model.sizes().hidden_size, number);
        }
        Ok(objectives)
    }

    /// The network, and its parameters' layout.
    fn model_builder(&self) -> TrainResult<(Model, Builder)> {
        let mut builder = Builder::new();
        let (config, labels) = (&self.config.model, self.config.task.labels());
        let model = Model::build(&mut builder, config, self.recipe.head(self.task, config, labels))?;
        Ok((model.with_legal_steps(legal_steps(&self.config.task.label_names())), builder))
    }

    /// What each label counts; empty: all the same.
    pub(super) fn class_weights(&self) -> Vec<f32> {
        match self.recipe.class_weights {
            true => self.task.form.class_weights(&self.train).unwrap_or_default(),
            false => Vec::new(),
        }
    }

    /// What is learned from.
    pub(super) fn training_instances(&self) -> &[Instance] {
        &self.instances
    }
}

/// The task of a recipe; as a text where the model has no other way to say it.
fn task_of(recipe: &mut FineTuneRecipe) -> Result<&'static Task, TaskError> {
    let task = Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })?;
    let Some(written) = task.as_text() else {
        if recipe.text_to_text {
            let expected = "false, but for a class or a number of a text or two";
            return Err(TrainError::setting("text_to_text", "true", expected).into());
        }
        return Ok(task);
    };
    // What is wrong with a model is reported where it is opened.
    let model = || {
        let config = ModelDirectory::open(recipe.directory()).ok()?.config().ok()?;
        Some(Config::from_value(config).ok()?.model)
    };
    let (head, is_chosen) = (task.form.head(1), recipe.is_chosen("text_to_text"));
    let only_writes = |family: &Family| !family.has_head(head) && family.has_head(Head::Seq2Seq);
    let writes = |model: ModelConfig| {
        only_writes(model.family()) || (is_chosen && model.fine_tuning(Head::Seq2Seq).text_to_text)
    };
    if !recipe.text_to_text && model().is_some_and(writes) {
        recipe.text_to_text = true;
    }
    Ok(if recipe.text_to_text { written } else { task })
}

/// Keeps a head with beams that the model has, and refuses one for what is not a question.
fn choose_beams(recipe: &mut FineTuneRecipe, config: &Config, task: &'static Task) -> Result<(), TaskError> {
    let answers = task.form.head(1) == Head::Span;
    if recipe.is_chosen("beam_head") {
        recipe.beam_head = answers && config.head() == Some(Head::BeamSpan);
    }
    if recipe.beam_head && !answers {
        let expected = "false, but for questions about passages (squad, squad2, qa)";
        return Err(TrainError::setting("beam_head", "true", expected).into());
    }
    Ok(())
}

/// Refuses a model that has no head for a task.
fn check_head(config: &Config, task: &'static Task, head: Head, path: &Path) -> Result<(), TaskError> {
    let family = config.model.family();
    if family.has_head(head) {
        return Ok(());
    }
    let advice = match task.form.writes && config.model.sizes().causal {
        true => {
            "; a decoder alone continues texts: train it on whole ones by `henson pretrain` with objective = \"causal\""
        }
        false => "",
    };
    Err(TaskError::NoHead {
        path: path.to_owned(),
        model_type: config.model.model_type().to_owned(),
        task: task.name,
        expected: Family::types_with_head(head),
        advice,
    })
}

/// The config of the fine-tuned model, as `transformers` would write it.
fn config_for(
    mut config: Config,
    task: &'static Task,
    train: &Set,
    recipe: &FineTuneRecipe,
) -> Result<Config, TaskError> {
    let names = task.form.label_names(train);
    let problem_type = task.form.problem.map(|problem| match problem {
        Problem::SingleLabel => "single_label_classification",
        Problem::MultiLabel => "multi_label_classification",
        Problem::Regression => "regression",
    });
    let reading = TrainedReading {
        max_length: recipe.length(task, &config.model),
        windows: recipe.windows || task.form.divides,
        stride: None,
        max_question: None,
        document_context: recipe.document_context,
        spans: None,
        max_target: None,
        both_orders: recipe.both_orders,
        pairs: train.examples.first().and_then(|example| match example.input {
            Input::One(_) => Some(false),
            Input::Pair(..) => Some(true),
            _ => None,
        }),
    };
    // Of any questions, only where some have no answer: else the model would learn nothing about that.
    let unanswerable = || train.examples.iter().any(|example| example.target == Target::Answers(Vec::new()));
    let may_say_so = task.may_be_unanswerable && (task.name != "qa" || unanswerable());
    config.task = TaskConfig {
        id2label: names.iter().enumerate().map(|(i, name)| (i.to_string(), name.clone())).collect(),
        label2id: names.iter().enumerate().map(|(i, name)| (name.clone(), i)).collect(),
        num_labels: None,
        problem_type: problem_type.map(str::to_owned),
        reading: Some(task.form.reading(recipe, train, reading)),
        no_answer_threshold: may_say_so.then_some(0.0),
        prefix: (!recipe.prefix.is_empty()).then(|| recipe.prefix.clone()),
    };
    let head = recipe.head(task, &config.model, config.task.labels());
    // Of those that can; a decoder reads left to right whatever it learns, and whoever continues texts must.
    if head != Head::MaskedLm {
        config.model.set_causal(false).ok();
    }
    config.set_head(head);
    if let Some(dropout) = recipe.dropout {
        config.model.set_dropout(dropout);
    }
    config.check().map_err(TrainError::from)?;
    Ok(config)
}

/// The factor on the learning rate of a parameter: `layer_decay` to the power of `layer_decay_start` at the last layer, and once more
/// for each layer further down.
fn rate_of(group: Group, layers: usize, recipe: &FineTuneRecipe) -> f32 {
    let below = match group {
        Group::Pooler | Group::Head | Group::Objective => return 1.0,
        _ if recipe.freeze => return 0.0,
        Group::Layer(layer) => layers - (layer + 1).min(layers),
        Group::Embeddings => layers,
    };
    recipe.layer_decay.powi((below as i32).saturating_add_unsigned(recipe.layer_decay_start)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_fall_from_the_head_down() {
        let recipe = FineTuneRecipe { layer_decay: 0.5, ..FineTuneRecipe::default() };
        let rates = [
            (Group::Head, 1.0),
            (Group::Pooler, 1.0),
            (Group::Layer(1), 0.5),
            (Group::Layer(0), 0.25),
            (Group::Embeddings, 0.125),
        ];
        for (group, expected) in rates {
            assert_eq!(rate_of(group, 2, &recipe), expected, "{group:?}");
            // ELECTRA's own: 0.5^(2 + 2 − depth), with depth 2 for the last of two layers and 0 for the embeddings.
            let electra = FineTuneRecipe { layer_decay_start: 2, ..recipe.clone() };
            assert_eq!(rate_of(group, 2, &electra), if expected < 1.0 { expected / 2.0 } else { 1.0 }, "{group:?}");
            let frozen = FineTuneRecipe { freeze: true, ..recipe.clone() };
            assert_eq!(rate_of(group, 2, &frozen), if expected < 1.0 { 0.0 } else { 1.0 }, "{group:?}");
        }
    }
}
