//! A run: vectors of all sentences once, then the tagger through the life of a run, the best one kept.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use henson_infer::{Model, Task as Ability, Want, legal_steps};
use henson_models::recurrent::{WordTagger, WordTaggerSettings};
use henson_tensor::{Builder, DType, Device};
use henson_train::{
    Clip, Engine, Keep, LoopSettings, ModelFiles, OptimizerSettings, Outcome, Schedule, TrainError, TrainingRun, Watch,
};
use sha2::{Digest, Sha256};

use super::layers::{Vectors, vectors_of_words};
use super::learner::{DTYPE, TaggerLearner};
use super::recipe::{TaggerHead, TaggerRecipe};
use super::tagger::{Description, save, sentences_of};
use crate::error::TaskError;
use crate::example::{Set, Words};
use crate::finetune::{
    Ended, Found, RESULTS, Results, UNCHOSEN_CHECKPOINTS, check_documents, chosen_by, code, finished, listed, plain,
    read_both,
};
use crate::forms::lay_out_words;
use crate::read::Reading;
use crate::task::Task;

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

    pub(super) fn schedule(&self) -> Schedule {
        let (recipe, steps) = (&self.recipe, self.steps());
        Schedule::of_task(recipe.schedule, recipe.learning_rate, recipe.warmup, steps)
    }

    /// When the loop does what: evaluations and checkpoints are those of epochs.
    fn loop_settings(&self, stop_at: Option<u64>) -> LoopSettings {
        let (epoch, chooses) = (self.steps_per_epoch(), self.dev.is_some());
        LoopSettings {
            steps: self.steps(),
            // Where no checkpoint is chosen, one is only there to resume from.
            checkpoint_every: if chooses { epoch } else { epoch.max(UNCHOSEN_CHECKPOINTS) },
            keep_checkpoints: 1,
            eval_every: if chooses { epoch } else { 0 },
            log_every: epoch,
            log_samples: false,
            stop_at,
            higher_is_better: true,
            patience: self.recipe.patience,
            keep: Keep::Best,
        }
    }

    /// What the tagger is, on an encoder.
    fn description(&self, model: &Model) -> Description {
        let (recipe, config) = (&self.recipe, &model.config().model);
        let sizes = config.sizes();
        let max_length = config.own_length(recipe.max_length).min(sizes.max_tokens);
        let mut description = Description::new(self.task.name, &self.train.labels, recipe.layers, max_length);
        if recipe.head == TaggerHead::Bilstm {
            description.lstm_layers = recipe.lstm_layers;
            description.hidden_size = recipe.hidden_size.unwrap_or(sizes.hidden_size / 2 * 2);
        }
        (description.crf, description.document_context) = (recipe.crf, recipe.document_context);
        description
    }

    /// The tagger with its first weights; it computes on the processor.
    fn engine(&self, settings: WordTaggerSettings, host: &Device) -> Result<Engine<WordTagger>, TaskError> {
        let recipe = &self.recipe;
        let mut builder = Builder::new();
        let tagger = WordTagger::build(&mut builder, settings).with_legal_steps(legal_steps(&self.train.labels));
        let mut parameters = builder.finish(host, DTYPE).map_err(TrainError::from)?;
        parameters.initialise(recipe.seed).map_err(TrainError::from)?;
        let optimizer = OptimizerSettings {
            epsilon: 1e-8,
            weight_decay: recipe.weight_decay,
            clip: if recipe.clip > 0.0 { Clip::GlobalNorm(recipe.clip) } else { Clip::Off },
            ..OptimizerSettings::default()
        };
        Ok(Engine::new(tagger, parameters, optimizer, recipe.seed)?)
    }
}

/// Trains a tagger in a directory, from its newest checkpoint on, and leaves the best there. `read` is told how many of all
/// sentences the encoder has read, which it does again for a run that resumes.
pub fn train_tagger(
    plan: &TaggerPlan,
    device: &Device,
    out: &Path,
    stop_at: Option<u64>,
    read: &mut dyn FnMut(usize, usize),
    watch: &mut Watch<'_>,
) -> Result<Ended, TaskError> {
    let recipe = &plan.recipe;
    let mut run = TrainingRun::open(out, recipe, plan.loop_settings(stop_at))?;
    if let Some(results) = finished(&plan.data, out)? {
        // Killed while they were deleted, some are still there.
        run.delete_checkpoints()?;
        return Ok(Ended::Finished(Box::new(results)));
    }
    let host = device.host().map_err(|error| TrainError::Task(error.into()))?;
    run.find(&plan.data, &host, watch)?;
    let model = Model::open(recipe.directory(), device, DType::from(recipe.dtype), Want::AsSaved)?;
    let description = plan.description(&model);
    let Read { train, dev, width } = match vectors(plan, &model, description.max_length, read, watch.stop) {
        Err(TaskError::Stopped) => return Ok(Ended::Interrupted(run.state().step)),
        other => other?,
    };
    let blocks = model.config().model.sizes().num_hidden_layers;
    let mut engine = plan.engine(description.settings(width, blocks, recipe.dropout as f32), &host)?;
    run.write_recipe(recipe)?;
    run.resume(&mut engine, watch)?;
    let mut learner = TaggerLearner::new(plan, train, dev);
    let wrong = |error: serde_json::Error| TrainError::State { path: out.join(RESULTS), problem: error.to_string() };
    // A checkpoint has the tagger alone: the encoder is where it was.
    let config = serde_json::to_value(&description).map_err(wrong)?;
    let files = ModelFiles { config, files: Vec::new(), generator: None };
    match run.train(&mut engine, &mut learner, &files, watch)? {
        Outcome::Interrupted => return Ok(Ended::Interrupted(run.state().step)),
        Outcome::Paused => return Ok(Ended::Paused(run.state().step)),
        Outcome::Finished | Outcome::WasFinished => {}
    }
    // What the tagger says that the run ends with.
    if learner.found.as_ref().is_none_or(|found| found.step != run.best_step()) {
        learner.look(&engine, run.best_step())?;
    }
    let results = results(plan, &run, learner.found.as_ref());
    let card = card(plan, &description, &results).into_bytes();
    let json = serde_json::to_vec_pretty(&results).map_err(wrong)?;
    let write = |_: &_| save(out, &model, &description, &engine.parameters);
    run.finish_with(write, &[("README.md", card), (RESULTS, json)])?;
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

fn results(plan: &TaggerPlan, run: &TrainingRun, found: Option<&Found>) -> Results {
    let (metric, value) = match (&plan.dev, found) {
        (Some(dev), Some(found)) => chosen_by(dev, &found.score, None),
        _ => (plan.task.metric.to_owned(), f64::NAN),
    };
    let state = run.state();
    Results {
        task: plan.task.name.to_owned(),
        metric,
        value: value.is_finite().then_some(value),
        scores: found.map(|found| found.score.to_json()).unwrap_or_default(),
        best_step: run.best_step(),
        steps: state.step,
        stopped_early: state.step < plan.steps(),
        degenerate: found.and_then(|found| found.degenerate.clone()),
        seed: plan.recipe.seed,
        train_examples: plan.train.examples.len(),
        seconds: state.seconds,
        tokens: state.tokens,
        data: plan.data.clone(),
        dev_rows: None,
        folds: None,
        mistakes: found.map(|found| found.score.mistakes.clone()),
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
