//! A run: vectors of all sentences once, then the tagger in epochs, the best one kept.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use henson_checkpoint::write_atomic;
use henson_infer::{Model, Task as Ability, Want};
use henson_kernels::cpu::optimizer::{Plan, Segment, Settings, adamw};
use henson_kernels::cpu::reduce::sum_of_squares;
use henson_kernels::philox::Stream;
use henson_tensor::{DType, Device};
use henson_train::metrics::{self, Line, MetricsLog};
use henson_train::{Event, RunDirectory, Schedule, TrainError, Watch, report};
use sha2::{Digest, Sha256};

use super::layers::{Vectors, vectors_of_words};
use super::network::{Network, Noise};
use super::recipe::{TaggerHead, TaggerRecipe};
use super::tagger::{Description, pair_for, save, sentences_of, tell};
use crate::bilstm::{Pair, Sequences};
use crate::error::TaskError;
use crate::example::{Set, Target, Words};
use crate::finetune::{
    Ended, Results, check_documents, chosen_by, code, degenerate, finished, listed, plain, read_both,
};
use crate::forms::lay_out_words;
use crate::predictions::Prediction;
use crate::read::Reading;
use crate::score::{Score, score};
use crate::task::Task;

/// Numbers the stream of shuffles among all uses of the seed.
const SHUFFLE: u32 = 0x7a68;

/// Sentences that are evaluated at a time.
const TOGETHER: usize = 64;

/// A run before it begins.
pub struct TaggerPlan {
    /// The recipe, as it will be saved.
    pub recipe: TaggerRecipe,
    /// The task.
    pub task: &'static Task,
    /// What is trained on.
    pub train: Set,
    /// What the best tagger is chosen by.
    pub dev: Option<Set>,
    data: String,
}

impl TaggerPlan {
    /// Reads the files of a recipe.
    pub fn new(recipe: TaggerRecipe) -> Result<Self, TaskError> {
        recipe.check()?;
        let task = Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })?;
        if task.ability() != Some(Ability::Tag) {
            let expected = "ner, pos or tag: the feature-based approach is for words with tags (freeze=true keeps the \
                            encoder of other tasks as it is)";
            return Err(TrainError::setting("task", task.name, expected).into());
        }
        let reading = Reading { files: recipe.files.clone(), ..Reading::new(task) };
        let (train, dev) = read_both(&recipe.train, &recipe.dev, recipe.limit, &reading)?;
        if recipe.document_context {
            check_documents(&train, dev.as_ref())?;
        }
        let mut hash = Sha256::new();
        for set in [Some(&train), dev.as_ref()].into_iter().flatten() {
            hash.update(format!("{:?}", set.labels));
            set.examples.iter().for_each(|example| hash.update(format!("{:?}{:?}", example.input, example.target)));
        }
        let data = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { recipe, task, train, dev, data })
    }

    /// Updates in all.
    pub fn steps(&self) -> u64 {
        self.steps_per_epoch() * self.recipe.epochs
    }

    fn steps_per_epoch(&self) -> u64 {
        self.train.examples.len().div_ceil(self.recipe.batch_size).max(1) as u64
    }
}

/// Trains a tagger in a directory. `read` is told how many of all sentences the encoder has read.
pub fn train_tagger(
    plan: &TaggerPlan,
    device: &Device,
    out: &Path,
    read: &mut dyn FnMut(usize, usize),
    watch: &mut Watch<'_>,
) -> Result<Ended, TaskError> {
    let run = RunDirectory::open_for(out, &plan.recipe)?;
    if let Some(results) = finished(&plan.data, out)? {
        return Ok(Ended::Finished(Box::new(results)));
    }
    let recipe = &plan.recipe;
    let model = Model::open(recipe.directory(), device, DType::from(recipe.dtype), Want::AsSaved)?;
    let sizes = model.config().model.sizes();
    let max_length = recipe.max_length.min(sizes.max_tokens);
    let mut description = Description::new(plan.task.name, &plan.train.labels, recipe.layers, max_length);
    if recipe.head == TaggerHead::Bilstm {
        description.lstm_layers = recipe.lstm_layers;
        description.hidden_size = recipe.hidden_size.unwrap_or(sizes.hidden_size / 2 * 2);
    }
    (description.crf, description.document_context) = (recipe.crf, recipe.document_context);

    let Read { train, dev, width } = match vectors(plan, &model, max_length, read, watch.stop) {
        Err(TaskError::Stopped) => return Ok(Ended::Stopped(0)),
        other => other?,
    };
    run.write_recipe(recipe)?;

    let network = description.network(width, sizes.num_hidden_layers, recipe.dropout as f32);
    let mut learner = Learner::new(plan, network, device);
    let mut log = MetricsLog::open(out.join("metrics.jsonl"), None).map_err(TrainError::from)?;
    let tags: Vec<Vec<u32>> = plan.train.examples.iter().zip(&train).map(|(e, v)| tags_of(&e.target, v)).collect();
    let mut best: Option<Best> = None;
    let (mut since, mut seconds, mut words) = (0, 0.0, 0);
    for epoch in 0..recipe.epochs {
        let begun = Instant::now();
        let order = order(recipe.seed, epoch, train.len());
        let (mut losses, before) = (0.0, words);
        for batch in order.chunks(recipe.batch_size) {
            if watch.stop.load(Ordering::Relaxed) {
                return Ok(Ended::Stopped(learner.step));
            }
            let (loss, count) = learner.learn(&train, &tags, batch)?;
            losses += loss;
            words += count;
            let tokens_per_s = (words - before) as f64 / begun.elapsed().as_secs_f64();
            (watch.on)(Event::Step { step: learner.step, loss, tokens_per_s, learning_rate: learner.rate });
        }
        let spent = begun.elapsed().as_secs_f64();
        seconds += spent;
        let line = metrics::Train {
            step: learner.step,
            phase: 0,
            loss: losses / plan.steps_per_epoch() as f64,
            losses: Vec::new(),
            learning_rate: learner.rate,
            gradient_norm: learner.norm,
            tokens_per_s: (words - before) as f64 / spent,
            tokens: words,
            seconds,
        };
        log.append(&Line::Train(line)).map_err(TrainError::from)?;
        let (Some(set), Some(vectors)) = (&plan.dev, &dev) else {
            best = Some(learner.as_best(f64::NAN, None));
            continue;
        };
        (watch.on)(Event::Evaluating);
        let found = look(set, vectors, &learner)?;
        let (_, value) = chosen_by(set, &found.score, None);
        let metrics: BTreeMap<String, f64> =
            found.score.metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        (watch.on)(Event::Evaluated { step: learner.step, metrics: &metrics });
        log.append(&Line::Eval(metrics::Eval { step: learner.step, metrics })).map_err(TrainError::from)?;
        let before = best.as_ref().map(|best| best.value).filter(|value| !value.is_nan());
        let is_better = before.is_none_or(|before| value > before);
        since = if is_better { 0 } else { since + 1 };
        // Of equal ones the last, which has learned the longest; only patience does not count it.
        if is_better || before == Some(value) {
            best = Some(learner.as_best(value, Some(found)));
        }
        if recipe.patience > 0 && since >= recipe.patience {
            break;
        }
    }
    let Some(best) = best else { return Ok(Ended::Stopped(0)) };

    save(out, &model, &description, &network, &best.parameters)?;
    let results = results(plan, &best, learner.step, seconds, words);
    write_atomic(&out.join("README.md"), card(plan, &description, &results).as_bytes()).map_err(TrainError::from)?;
    let json = serde_json::to_vec_pretty(&results)
        .map_err(|error| TrainError::State { path: out.join("results.json"), problem: error.to_string() })?;
    drop(log);
    let page = report::Run::open(out).and_then(|run| report::write(&out.join("report.html"), &[run]));
    page.map_err(TrainError::from)?;
    // The last file: a directory that has it is finished.
    write_atomic(&run.path().join("results.json"), &json).map_err(TrainError::from)?;
    Ok(Ended::Finished(Box::new(results)))
}

/// The vectors of all words of the training and the dev set, and their width.
struct Read {
    train: Vec<Vectors>,
    dev: Option<Vec<Vectors>>,
    width: usize,
}

fn vectors(
    plan: &TaggerPlan,
    model: &Model,
    max_length: usize,
    read: &mut dyn FnMut(usize, usize),
    stop: &AtomicBool,
) -> Result<Read, TaskError> {
    let (recipe, sizes) = (&plan.recipe, model.config().model.sizes());
    let layers = recipe.layers.of_encoder(sizes.num_hidden_layers).0;
    let of_dev = plan.dev.as_ref().map_or(0, |dev| dev.examples.len());
    let all = plan.train.examples.len() + of_dev;
    let mut of_set = |set: &Set, before: usize| {
        let lay_out = |words: &Words| lay_out_words(model.tokenizer(), words, max_length, recipe.document_context);
        vectors_of_words(model, &sentences_of(set), layers, lay_out, |done| {
            read(before + done, all);
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    };
    let (train, width) = of_set(&plan.train, 0)?;
    let dev = plan.dev.as_ref().map(|dev| of_set(dev, all - of_dev)).transpose()?;
    Ok(Read { train, dev: dev.map(|(dev, _)| dev), width })
}

/// The order of an epoch.
fn order(seed: u64, epoch: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut draws = Stream::new(seed, SHUFFLE, epoch);
    for i in (1..count).rev() {
        order.swap(i, draws.below(i as u32 + 1) as usize);
    }
    order
}

/// The tags of the words that have vectors.
fn tags_of(target: &Target, vectors: &Vectors) -> Vec<u32> {
    let Target::Tags(tags) = target else { return vec![0; vectors.words.len()] };
    vectors.words.iter().map(|word| tags.get(*word).copied().unwrap_or(0)).collect()
}

/// The tagger in training.
struct Learner {
    network: Network,
    pair: Pair,
    parameters: Vec<f32>,
    gradients: Vec<f32>,
    moments: [Vec<f32>; 2],
    segments: Plan,
    schedule: Schedule,
    seed: u64,
    weight_decay: f64,
    clip: f64,
    /// Updates made.
    step: u64,
    /// Of the last update.
    rate: f64,
    norm: f64,
}

/// The best tagger so far.
struct Best {
    value: f64,
    step: u64,
    parameters: Vec<f32>,
    found: Option<Found>,
}

struct Found {
    score: Score,
    degenerate: Option<String>,
}

impl Learner {
    fn new(plan: &TaggerPlan, network: Network, device: &Device) -> Self {
        let recipe = &plan.recipe;
        let (mut segments, mut start) = (Vec::new(), 0);
        for (name, shape) in network.entries() {
            let len = shape.iter().product();
            let decay = shape.len() > 1 && !name.starts_with("crf.");
            segments.push(Segment { start, len, decay, rate: 1.0 });
            start += len;
        }
        let (parameters, steps) = (network.first_parameters(recipe.seed), plan.steps());
        let zeros = || vec![0.0; parameters.len()];
        Self {
            gradients: zeros(),
            moments: [zeros(), zeros()],
            segments: Plan::new(&segments, parameters.len()),
            parameters,
            network,
            pair: pair_for(device),
            schedule: Schedule {
                kind: recipe.schedule,
                peak: recipe.learning_rate,
                warmup_steps: (steps as f64 * recipe.warmup) as u64,
                decay_steps: steps / 10,
                steps,
            },
            seed: recipe.seed,
            weight_decay: recipe.weight_decay,
            clip: recipe.clip,
            step: 0,
            rate: 0.0,
            norm: 0.0,
        }
    }

    /// One update; gives its loss and its words.
    fn learn(&mut self, vectors: &[Vectors], tags: &[Vec<u32>], batch: &[usize]) -> Result<(f64, u64), TrainError> {
        let lengths: Vec<usize> = batch.iter().map(|i| tags[*i].len()).collect();
        let rows: Vec<f32> = batch.iter().flat_map(|i| &vectors[*i].rows).copied().collect();
        let tags: Vec<u32> = batch.iter().flat_map(|i| &tags[*i]).copied().collect();
        let sequences = Sequences::new(&lengths);
        let noise = Some(Noise { seed: self.seed, step: self.step as u32 });
        let (p, g) = (&self.parameters, &mut self.gradients);
        let loss = self.network.learn(&self.pair, p, rows, &sequences, &tags, noise, g);
        let cpu = &self.pair.first;
        self.norm = sum_of_squares(cpu, &self.gradients).sqrt();
        if !loss.is_finite() || !self.norm.is_finite() {
            let what = if loss.is_finite() { "the norm of the gradients" } else { "the loss" };
            return Err(TrainError::NotFinite { step: self.step + 1, what, kept: "nothing is kept".to_owned() });
        }
        self.rate = self.schedule.rate(self.step);
        self.step += 1;
        let clipped = self.clip > 0.0 && self.norm > self.clip;
        let settings = Settings {
            learning_rate: self.rate,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: self.weight_decay,
            bias_correction: Some(self.step),
            gradient_scale: if clipped { self.clip / self.norm } else { 1.0 },
        };
        let [m, v] = &mut self.moments;
        adamw(cpu, &self.segments, &mut self.parameters, &self.gradients, m, v, &settings, None);
        Ok((loss, tags.len() as u64))
    }

    fn as_best(&self, value: f64, found: Option<Found>) -> Best {
        Best { value, step: self.step, parameters: self.parameters.clone(), found }
    }
}

/// What the tagger says about the dev sentences, and how right that is.
fn look(set: &Set, vectors: &[Vectors], learner: &Learner) -> Result<Found, TaskError> {
    let outside = set.labels.iter().position(|label| label == "O").unwrap_or(0) as u32;
    let mut predictions = Vec::with_capacity(set.examples.len());
    for some in vectors.chunks(TOGETHER) {
        let told = tell(&learner.network, &learner.parameters, &learner.pair, some);
        for ((tags, _), vectors) in told.iter().zip(some) {
            let Target::Tags(right) = &set.examples[predictions.len()].target else { continue };
            let mut of_words = vec![outside; right.len()];
            vectors.words.iter().zip(tags).for_each(|(word, tag)| of_words[*word] = *tag);
            predictions.push(Prediction::Tags(of_words));
        }
    }
    let score = score(set, &predictions, None, usize::MAX)?;
    let degenerate = degenerate(set, &predictions, &score);
    Ok(Found { score, degenerate })
}

fn results(plan: &TaggerPlan, best: &Best, steps: u64, seconds: f64, words: u64) -> Results {
    let (metric, value) = match (&plan.dev, &best.found) {
        (Some(dev), Some(found)) => chosen_by(dev, &found.score, None),
        _ => (plan.task.metric.to_owned(), f64::NAN),
    };
    Results {
        task: plan.task.name.to_owned(),
        metric,
        value: value.is_finite().then_some(value),
        scores: best.found.as_ref().map(|found| found.score.to_json()).unwrap_or_default(),
        best_step: best.step,
        steps,
        stopped_early: steps < plan.steps(),
        degenerate: best.found.as_ref().and_then(|found| found.degenerate.clone()),
        seed: plan.recipe.seed,
        train_examples: plan.train.examples.len(),
        seconds,
        tokens: words,
        data: plan.data.clone(),
        dev_rows: None,
        folds: None,
        mistakes: best.found.as_ref().map(|found| found.score.mistakes.clone()),
        linear_head: None,
    }
}

/// The directory's README.md.
fn card(plan: &TaggerPlan, description: &Description, results: &Results) -> String {
    let recipe = &plan.recipe;
    let name = |path: &str| {
        let name = Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or_else(|| path.to_owned())
    };
    let start = name(&recipe.model);
    let head = match description.lstm_layers {
        0 => "a linear tagger".to_owned(),
        layers => format!("a BiLSTM of {layers} layers and {} numbers", description.hidden_size),
    };
    let crf = if description.crf { " with a CRF" } else { "" };
    let mut text = format!(
        "---\ntags:\n- {}\n- henson\n---\n\n# {} as features for {}\n\n{head}{crf} on the frozen encoder {}, \
         layers `{}`. Made by henson; the whole recipe is in recipe.toml, the training log in metrics.jsonl and \
         report.html.\n\n## Data\n\n- trained on {}: {} sentences\n",
        plan.task.name,
        plain(&start),
        plan.task.name,
        code(&start),
        description.layers,
        code(&name(&recipe.train.to_string())),
        results.train_examples
    );
    if let Some(dev) = &plan.dev {
        text += &format!("- chosen by {}: {} sentences\n", code(&name(&recipe.dev)), dev.examples.len());
    }
    text += &format!("- labels: {}\n", listed(&description.labels));
    if let Some(value) = results.value {
        text += &format!(
            "\n## Scores\n\n{} {value:.4} after {} of {} updates, on the file that it was chosen by.\n",
            results.metric, results.best_step, results.steps
        );
    }
    text + "\n## Use\n\n```sh\nhenson tag --model DIR 'A text.'\n```\n\nFor `transformers` this directory is the encoder alone; \
            the tagger is in tagger.json and tagger.safetensors, whose LSTM has the names and shapes of `torch.nn.LSTM`.\n"
}
