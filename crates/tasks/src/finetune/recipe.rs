//! What a fine-tuning run does, as TOML: a table of settings whose unknown keys are errors, saved with every default
//! written out beside the model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use henson_infer::{MOST_SEQUENCES, Pooling};
use henson_models::{Family, Head, ModelConfig};
use henson_train::{
    MOST_BELOW_1, OptimizerKind, OptimizerSettings, Precision, Result, RunRecipe, ScheduleKind, TrainError,
    check_counts, check_ranges, to_toml,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::Table;

use super::mixture::{DataSet, Mixing};
use super::pooled::Poolings;
use crate::distil::DistilSettings;
use crate::prepare::TARGET_LENGTH;
use crate::ranking::RankLoss;
use crate::read::{Files, Paths};
use crate::sentences::{Distance, SentenceLoss};
use crate::task::Task;

/// A fine-tuning run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FineTuneRecipe {
    /// The task: a benchmark, or `classify`, `pair`, `regress`, `multilabel`, `span`, `tag`, `qa`, `choice`, `embed`,
    /// `rerank`, `seq2seq` (`--task`).
    pub task: String,
    /// The model to start from: a directory, or the name of one (`--model`).
    pub model: String,
    /// Start from random weights: the directory of the tokenizer (`--tokenizer`), where `model` is the name of a size.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tokenizer: String,
    /// From random weights, for a size that reads whole words (`bilstm`, `bilstm-crf`, `bilstm-cnn`, `bilstm-cnn-crf`): a file of word vectors to begin with, GloVe's
    /// text or word2vec's text or binary.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub word_vectors: String,
    /// For the same: first words of that file that join the vocabulary although the training data does not have them; by default 50,000.
    #[serde(skip_serializing_if = "is_vector_words")]
    pub vector_words: usize,
    /// For the same: words that occur less often (by default 2) are unknown, which is how the vector of unknown words is learned.
    #[serde(skip_serializing_if = "is_min_count")]
    pub min_count: u64,
    /// For the same: whether case is ignored; by default for texts, not for words to tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lowercase: Option<bool>,
    /// Values of config.json that differ from the size's, such as `config.d_model = 256`.
    #[serde(skip_serializing_if = "Table::is_empty")]
    #[schemars(with = "std::collections::BTreeMap<String, serde_json::Value>")]
    pub config: Table,
    /// That directory, where `model` is a name. It is never saved: another machine has it elsewhere.
    #[serde(skip)]
    pub found_at: Option<PathBuf>,
    /// The file to train on (`--train`), or a list of several. A `*` in a file's name stands for anything.
    pub train: Paths,
    /// `embed`, `rerank`: several data sets instead of `train`, each with its own files, loss and share.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub datasets: Vec<DataSet>,
    /// How batches of several data sets follow each other.
    #[serde(skip_serializing_if = "is_default")]
    pub mixing: Mixing,
    /// The file to choose the best checkpoint by (`--dev`).
    pub dev: String,
    /// Without a dev file: number of rows of the training file that are held out to choose the best checkpoint by.
    pub dev_rows: usize,
    /// Without a dev file: number of folds. Each is scored by a model trained on the others, which estimates how good the
    /// model is that is then trained on all rows.
    pub folds: usize,
    /// The score that chooses the best checkpoint (`--metric`): one of the task's, such as `macro_f1`, or `f1:LABEL`,
    /// `precision:LABEL` or `recall:LABEL` of one label; by default the task's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// Seed that draws the held-out rows or the folds. It is separate from `seed`, so that runs with several seeds are scored
    /// on the same rows.
    pub split_seed: u64,
    /// Seed of the new head, of the order of examples and of dropout (`--seed`).
    pub seed: u64,
    /// Number type to compute in; the master weights are f32 either way (`--dtype`).
    pub dtype: Precision,

    /// Examples per update, windows for questions (`--batch-size`).
    pub batch_size: usize,
    /// Number of parts that a batch is computed in, to save memory. For `embed` negatives come from the same part, so
    /// at most half of `batch_size`.
    pub accumulation: usize,
    /// Number of epochs (`--epochs`).
    pub epochs: f64,
    /// Train on this many examples, evenly spaced, for a quick look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Maximum sequence length in tokens, special tokens included; by default 128, 384 for questions, 256
    /// or 512 for passages of SuperGLUE, 512 for sources of `seq2seq`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// Divide longer texts into overlapping windows instead of cutting them. In training each window has the text's
    /// label, in evaluation their logits are averaged. Words to tag and passages are always divided.
    pub windows: bool,
    /// Words to tag: read each sentence together with the sentences around it, as many as fit into `max_length`.
    pub document_context: bool,
    /// Questions: tokens from the start of one window to that of the next.
    pub stride: usize,
    /// Questions: maximum length of a question in tokens.
    pub max_question: usize,
    /// Questions: score the end of an answer for each of the best starts, and whether there is an answer apart from both, as in XLNet
    /// (Yang et al. 2019); XLNet alone. By default as the model is, if it answers questions already.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beam_head: bool,

    /// Make the mean of this many last checkpoints the model, as in Vaswani et al. (2017); 0 and 1 for the best one. A checkpoint is made at
    /// every evaluation.
    pub average_checkpoints: usize,
    /// Let an encoder-decoder write labels and numbers as texts, as T5 learns every task; where it has no classifier, that is the
    /// only way.
    pub text_to_text: bool,
    /// Put texts between start, delimiter and extract tokens, which the tokenizer and the word table get as well, and read the vector
    /// of the last one, as in GPT's fine-tuning (Radford et al. 2018).
    pub task_tokens: bool,
    /// Weight of the language model's loss on the same texts, a mean over each sequence's tokens; decoders alone.
    pub auxiliary_lm: f64,
    /// Read pairs of texts in both orders and add their vectors; decoders alone.
    pub both_orders: bool,

    /// `seq2seq`: text before every source (`--prefix`), such as `translate English to German: `. The model keeps it, as `prefix` in
    /// config.json.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub prefix: String,
    /// `seq2seq`: maximum length of a target in tokens, in training and of what the model writes; by default 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_target_length: Option<usize>,
    /// `seq2seq`: share of each target that is spread evenly over the vocabulary.
    pub label_smoothing: f64,
    /// `seq2seq`: cut words into tokens at random in training. With a unigram tokenizer, the power of probabilities that
    /// segmentations are drawn by (Kudo, 2018); with BPE and WordPiece, the probability that a merge or a match is dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subword_regularisation: Option<f64>,
    /// `seq2seq`: beams with which texts are written for dev scores, and later by default; 1 for greedy search.
    pub beams: usize,
    /// `seq2seq`: power of the number of new tokens that the score of a beam is divided by.
    pub length_penalty: f64,
    /// `seq2seq`: minimum number of new tokens of what the model writes.
    pub min_target_length: usize,
    /// `seq2seq`: no n-gram of this length is written twice; 0 for no limit.
    pub no_repeat_ngram: usize,

    /// Optimizer.
    pub optimizer: OptimizerKind,
    /// Peak learning rate (`--learning-rate`).
    pub learning_rate: f64,
    /// Learning-rate schedule after the linear warm-up.
    pub schedule: ScheduleKind,
    /// Share of the updates in which the learning rate rises from 0 to its peak.
    pub warmup: f64,
    /// Decoupled weight decay; biases and LayerNorm are not decayed.
    pub weight_decay: f64,
    /// Adam's β₁.
    pub beta1: f64,
    /// Adam's β₂.
    pub beta2: f64,
    /// Adam's ε.
    pub epsilon: f64,
    /// Maximum norm of all gradients together; 0 turns clipping off.
    pub clip: f64,
    /// Dropout of hidden states, of attention and before the classifier; by default the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Factor on the learning rate from one layer to the one below it; 1 for the same everywhere.
    pub layer_decay: f64,
    /// Power of `layer_decay` at the last layer; each layer below has one more, the embeddings the highest. ELECTRA's code has 2: its
    /// rates are lr·d^(L + 2 − depth) with depth 1 for the first of L layers, 0 for the embeddings and L + 2 for the head.
    pub layer_decay_start: u32,
    /// Freeze the encoder and train the head alone (`--frozen`).
    pub freeze: bool,
    /// `embed`: what is learned from the texts' vectors. By default `ranking`, or `cosine` where the training file has scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<SentenceLoss>,
    /// `embed`: what cosines are divided by before the softmax.
    pub temperature: f64,
    /// `embed` with `ranking`: second texts also choose among first ones, and the mean of both losses counts.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub symmetric: bool,
    /// `embed` with `contrastive` or `triplet`: by how much texts shall be apart; by default 0.5 and 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// `embed` with `contrastive` or `triplet`: how vectors are compared; by default `cosine` and `euclidean`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distance: Option<Distance>,
    /// `embed`: how the vectors of a text's tokens become one: `cls`, `max`, `mean`, `mean_sqrt_len_tokens`, `weightedmean`,
    /// `lasttoken`, or a list of several, which lie side by side; by default the model's own, or `mean`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Poolings>,
    /// `embed`: whether vectors get the length 1, in training and in the finished model; by default with `ranking`, `cosine`, `cosent`
    /// and `contrastive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalize: Option<bool>,
    /// `embed`: numbers of the vectors' beginnings that shall do alone (Matryoshka), such as `[384, 128, 64]`; the losses of all are added.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub matryoshka: Vec<usize>,
    /// `embed`: encode the `accumulation` parts of a batch twice, so that all of its texts are told from each other in the memory of one
    /// part.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cached_gradients: bool,
    /// `embed`: lowest score of a row to learn from, where the training file has scores. Without it, the scores
    /// themselves are learned, as cosines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_score: Option<f64>,
    /// `rerank`: what is learned from the relevance of a query's documents.
    #[serde(skip_serializing_if = "is_default")]
    pub rank_loss: RankLoss,
    /// Weight labels inversely to their frequency; for `multilabel`, positives by the ratio of negatives to positives
    /// (`pos_weight`).
    pub class_weights: bool,
    /// Whether a linear head on the frozen model is fitted as well, and kept where it scores better than fine-tuning.
    pub linear_head: bool,

    /// What is learned from teachers (`henson distil`); without teachers, labels alone are learned from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distil: Option<DistilSettings>,
    /// Where the teachers are, where they are named. Never saved, like `found_at`.
    #[serde(skip)]
    pub teachers_at: Vec<PathBuf>,
    /// Of a run with teachers that resumes, the recipe of its texts without labels, of which only what is chosen counts. Never saved:
    /// that run has its own.
    #[serde(skip)]
    pub first: Option<Box<FineTuneRecipe>>,

    /// Evaluations per epoch, each with a checkpoint; 0.5 is one every second epoch.
    pub evals_per_epoch: f64,
    /// Stop after this many evaluations without an improvement; 0 never.
    pub patience: u64,
    /// Steps between lines of metrics.jsonl.
    pub log_every: u64,

    /// How both files are written, where they are not as the task's own are.
    #[serde(skip_serializing_if = "Files::is_usual")]
    pub files: Files,

    /// Keys that nobody set: [`Plan::new`](super::Plan::new) chooses their values by the size of data and model. Never saved,
    /// since a saved recipe has all values.
    #[serde(skip)]
    pub by_size: BTreeSet<&'static str>,
}

impl Default for FineTuneRecipe {
    fn default() -> Self {
        Self {
            task: String::new(),
            model: String::new(),
            found_at: None,
            tokenizer: String::new(),
            word_vectors: String::new(),
            vector_words: VECTOR_WORDS,
            min_count: MIN_COUNT,
            lowercase: None,
            config: Table::new(),
            train: Paths::default(),
            datasets: Vec::new(),
            mixing: Mixing::default(),
            dev: String::new(),
            dev_rows: 0,
            folds: 0,
            metric: None,
            split_seed: 0,
            by_size: BTreeSet::new(),
            seed: 0,
            dtype: Precision::F32,
            batch_size: 16,
            accumulation: 1,
            epochs: 3.0,
            limit: None,
            max_length: None,
            windows: false,
            document_context: false,
            stride: 128,
            max_question: 64,
            beam_head: false,
            average_checkpoints: 0,
            text_to_text: false,
            task_tokens: false,
            auxiliary_lm: 0.0,
            both_orders: false,
            prefix: String::new(),
            max_target_length: None,
            label_smoothing: 0.0,
            subword_regularisation: None,
            beams: 1,
            length_penalty: 1.0,
            min_target_length: 0,
            no_repeat_ngram: 0,
            optimizer: OptimizerKind::Adamw,
            learning_rate: 5e-5,
            schedule: ScheduleKind::Linear,
            warmup: 0.1,
            weight_decay: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            clip: 1.0,
            dropout: None,
            layer_decay: 1.0,
            layer_decay_start: 1,
            freeze: false,
            loss: None,
            temperature: 0.05,
            symmetric: false,
            margin: None,
            distance: None,
            pooling: None,
            normalize: None,
            matryoshka: Vec::new(),
            cached_gradients: false,
            min_score: None,
            rank_loss: RankLoss::default(),
            class_weights: false,
            linear_head: false,
            distil: None,
            teachers_at: Vec::new(),
            first: None,
            evals_per_epoch: 1.0,
            patience: 0,
            log_every: 10,
            files: Files::default(),
        }
    }
}

/// Words of a file of vectors that join a vocabulary: nearly all that a text has, without making the model a hundred megabytes.
const VECTOR_WORDS: usize = 50_000;

/// A word that occurs once teaches what an unknown word is.
const MIN_COUNT: u64 = 2;

fn is_vector_words(count: &usize) -> bool {
    *count == VECTOR_WORDS
}

fn is_min_count(count: &u64) -> bool {
    *count == MIN_COUNT
}

/// For recipes as they were before a setting came.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl RunRecipe for FineTuneRecipe {
    const MAY_CHANGE: &'static [&'static str] =
        &["train", "dev", "files", "log_every", "distil.teachers", "distil.transfer", "distil.cache"];
}

impl FineTuneRecipe {
    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
        self.schedule.check_task()?;
        check_ranges(&[
            ("learning_rate", self.learning_rate, 0.0, 10.0),
            ("weight_decay", self.weight_decay, 0.0, 10.0),
            ("epsilon", self.epsilon, 1e-30, 1.0),
            ("clip", self.clip, 0.0, 1e9),
            ("warmup", self.warmup, 0.0, 1.0),
            ("layer_decay", self.layer_decay, 0.0, 1.0),
            ("layer_decay_start", f64::from(self.layer_decay_start), 0.0, 100.0),
            ("epochs", self.epochs, 1e-6, 1e6),
            ("beta1", self.beta1, 0.0, MOST_BELOW_1),
            ("beta2", self.beta2, 0.0, MOST_BELOW_1),
            ("temperature", self.temperature, 1e-4, 1e3),
            ("margin", self.margin.unwrap_or(1.0), 0.0, 1e6),
            ("evals_per_epoch", self.evals_per_epoch, 1e-6, 1e6),
            ("dropout", self.dropout.unwrap_or(0.0), 0.0, 0.99),
            ("auxiliary_lm", self.auxiliary_lm, 0.0, 100.0),
            ("label_smoothing", self.label_smoothing, 0.0, MOST_BELOW_1),
            ("length_penalty", self.length_penalty, -100.0, 100.0),
            ("subword_regularisation", self.subword_regularisation.unwrap_or(0.0), 0.0, 100.0),
        ])?;
        let words = [
            ("word_vectors", !self.word_vectors.is_empty()),
            ("vector_words", !is_vector_words(&self.vector_words)),
            ("min_count", !is_min_count(&self.min_count)),
            ("lowercase", self.lowercase.is_some()),
        ];
        if let Some((key, _)) = words.iter().find(|(_, is_set)| *is_set && !self.makes_vocabulary()) {
            let expected = "not to be set, but for a size that reads whole words: model = \"bilstm\", \"bilstm-crf\", \"bilstm-cnn\" or \"bilstm-cnn-crf\"";
            return Err(TrainError::setting(key, "a value", expected));
        }
        if let Some(short) = self.max_length.filter(|length| *length < 3) {
            let expected = "at least 3, since two special tokens surround a text";
            return Err(TrainError::setting("max_length", short, expected));
        }
        if let Some(distil) = &self.distil {
            if !self.datasets.is_empty() {
                let expected = "no teachers: several data sets have losses of their own";
                return Err(TrainError::setting("distil", "a table next to datasets", expected));
            }
            check_ranges(&[
                ("distil.temperature", distil.temperature, 1e-2, 1e3),
                ("distil.alpha", distil.alpha.unwrap_or(1.0), 1e-6, 1.0),
                ("distil.epochs", distil.epochs.unwrap_or(1.0), 1e-6, 1e6),
                ("distil.learning_rate", distil.learning_rate.unwrap_or(0.0), 0.0, 10.0),
            ])?;
        }
        let counts = [
            ("batch_size", self.batch_size as u64),
            ("accumulation", self.accumulation as u64),
            ("limit", self.limit.map_or(1, |n| n as u64)),
            ("max_length", self.max_length.map_or(3, |n| n as u64)),
            ("stride", self.stride as u64),
            ("log_every", self.log_every),
            ("average_checkpoints", self.average_checkpoints.max(1) as u64),
            ("max_target_length", self.target_length() as u64),
        ];
        check_counts(&counts.map(|(key, got)| (key, got, 1 << 20)))?;
        // Found out before anything is written.
        check_counts(&[("beams", self.beams as u64, MOST_SEQUENCES as u64)])?;
        if self.min_target_length > self.target_length() {
            let expected = format!("at most max_target_length, {}", self.target_length());
            return Err(TrainError::setting("min_target_length", self.min_target_length, expected));
        }
        Ok(())
    }

    /// The directory of the model.
    pub fn directory(&self) -> &Path {
        self.found_at.as_deref().unwrap_or(Path::new(&self.model))
    }

    /// Whether the model starts from random weights.
    pub fn is_from_scratch(&self) -> bool {
        !self.tokenizer.is_empty() || self.makes_vocabulary()
    }

    /// Whether the model is a size that reads whole words, whose vocabulary is made from the training data.
    pub fn makes_vocabulary(&self) -> bool {
        let reads_words =
            |model: &str| Family::config_of_size(model).is_ok_and(|size| size.word_vocabulary().is_some());
        self.found_at.is_none() && self.tokenizer.is_empty() && reads_words(&self.model)
    }

    /// The files to train on: those without labels, where there are no others.
    pub(crate) fn files_to_read(&self) -> &Paths {
        let transfer = self.taught_by().map(|distil| &distil.transfer);
        transfer.filter(|_| self.train.is_empty()).unwrap_or(&self.train)
    }

    /// What is learned from teachers, unless that is a phase of its own before this one.
    pub(crate) fn taught_by(&self) -> Option<&DistilSettings> {
        self.distil.as_ref().filter(|_| !self.has_two_phases())
    }

    /// Whether texts without labels are learned from first, and then those with labels.
    pub(crate) fn has_two_phases(&self) -> bool {
        self.distil.as_ref().is_some_and(|distil| !distil.transfer.is_empty()) && !self.train.is_empty()
    }

    /// Where the teachers are.
    pub(crate) fn teacher_directories(&self) -> Vec<PathBuf> {
        let named = self.distil.iter().flat_map(|distil| &distil.teachers).map(PathBuf::from);
        if self.teachers_at.is_empty() { named.collect() } else { self.teachers_at.clone() }
    }

    /// The directory of the tokenizer.
    pub(crate) fn tokenizer_directory(&self) -> &Path {
        if !self.tokenizer.is_empty() { Path::new(&self.tokenizer) } else { self.directory() }
    }

    /// The files to train on.
    pub fn training_files(&self) -> Vec<&str> {
        let paths = std::iter::once(self.files_to_read()).chain(self.datasets.iter().map(|set| &set.train));
        paths.flat_map(|paths| &paths.0).map(String::as_str).collect()
    }

    /// How tokens' vectors become one, once the model's own way is known.
    pub(crate) fn poolings(&self) -> Vec<Pooling> {
        self.pooling.as_ref().map_or_else(|| vec![Pooling::Mean], |poolings| poolings.0.clone())
    }

    /// The recipe as TOML, with all defaults.
    pub fn to_toml(&self) -> Result<String> {
        to_toml(self)
    }

    /// The head of the model to be, for so many labels.
    pub(crate) fn head(&self, task: &Task, model: &ModelConfig, labels: usize) -> Head {
        if self.beam_head { Head::BeamSpan } else { task.form.head_for(model, labels) }
    }

    /// Tokens of a sequence for a task, within what the model takes.
    pub(crate) fn length(&self, task: &Task, model: &ModelConfig) -> usize {
        let length = self.max_length.or(task.length).unwrap_or(task.form.usual_length);
        model.own_length(length).min(model.sizes().max_tokens)
    }

    /// Tokens of a target, within any model's reach.
    pub(crate) fn target_length(&self) -> usize {
        self.max_target_length.unwrap_or(TARGET_LENGTH)
    }

    pub(crate) fn optimizer(&self) -> OptimizerSettings {
        self.optimizer.with([self.beta1, self.beta2], self.epsilon, self.weight_decay, self.clip)
    }
}
