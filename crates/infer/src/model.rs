//! A model that was opened for inference, and the way of texts through it.

use std::path::{Path, PathBuf};

use henson_checkpoint::{Config, LoadOptions, LoadReport, ModelDirectory, Weights, open_parameters};
use henson_models::{self as models, Head};
use henson_tensor::{Builder, DType, Device, Group, Parameters};
use henson_text::{Features, Pieces, Tokenizer};

use crate::classify::single_windows;
use crate::generate::Keys;
use crate::sentence::Files;
use crate::tag::legal_steps;
use crate::task::{RERANK, described};
use crate::{InferError, Result, Task};

/// What is wanted of a model directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The encoder alone, whatever stands on it.
    Encoder,
    /// The masked-LM head, too.
    MaskedLm,
    /// What writes text, with the head for the vocabulary; a model that cannot is an error that says what it is.
    Writer,
    /// The head that the config names, or the one that its weights show.
    AsSaved,
    /// The head for a task; another one is an error that says what is there and what to do.
    Task(Task),
    /// A classifier of pairs that scores texts for a query; another head is an error as above.
    Reranker,
}

/// How texts that are longer than the model takes are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Maximum number of tokens of a sequence, special ones included; the model's own limit where none is given.
    pub most: Option<usize>,
    /// Whether longer texts are divided into overlapping windows instead of cut.
    pub windows: bool,
}

impl Length {
    /// The model's limit; longer texts are cut, and the answers say so.
    pub const CUT: Length = Length { most: None, windows: false };
    /// The model's limit; longer texts are divided.
    pub const WINDOWS: Length = Length { most: None, windows: true };
}

/// A model with its tokenizer.
pub struct Model {
    path: PathBuf,
    config: Config,
    network: models::Model,
    parameters: Parameters,
    tokenizer: Tokenizer,
    report: LoadReport,
    /// The class of the activation that a cross-encoder's scores go through, where its files say one.
    pub(crate) activation: Option<String>,
    /// What its files say about writing; read when somebody asks.
    pub(crate) generation: [Keys; 2],
}

impl Model {
    /// Opens a directory: config, weights and tokenizer, checked against each other. Where sentence-transformers keeps them in a
    /// folder of it, they are read there.
    pub fn open(path: &Path, device: &Device, dtype: DType, want: Want) -> Result<Self> {
        let folder = Files::encoder(path)?;
        let directory = ModelDirectory::open(&folder)?;
        let config = Self::read_config(&directory)?;
        let weights = directory.weights()?;
        let labels = config.task.labels();
        let head = match want {
            Want::Encoder => Head::Encoder,
            // Language models over words predict whole words, and no token.
            Want::MaskedLm
                if !config.model.family().has_head(Head::MaskedLm) || config.model.characters().is_some() =>
            {
                let has = described(&config.model, config.head().unwrap_or(Head::Encoder));
                return Err(InferError::NoTokens { path: path.to_owned(), has });
            }
            Want::MaskedLm => Head::MaskedLm,
            Want::Writer => writing_head(path, &config, saved_head(&weights, &config)?)?,
            Want::AsSaved => saved_head(&weights, &config)?,
            Want::Task(_) | Want::Reranker => {
                let task = if let Want::Task(task) = want { task } else { Task::Classify };
                match saved_head(&weights, &config)? {
                    head if Task::of_head(head) == Some(task) => head,
                    // A config that names no class: the weights tell.
                    _ if config.head().is_none() && has_head(&weights, &config, task.head(labels))? => {
                        task.head(labels)
                    }
                    other => {
                        let words = if want == Want::Reranker { RERANK } else { task.words() };
                        return Err(task.refused(words, path, &config, config.head().map(|_| other)));
                    }
                }
            }
        };
        let mut builder = Builder::new();
        let network = models::Model::build(&mut builder, &config.model, head)?;
        let network = network.with_legal_steps(legal_steps(&config.task.label_names()));
        let naming = &config.model.family().naming;
        let (mut parameters, report) =
            open_parameters(&weights, naming, builder, device, dtype, &LoadOptions::strict(), 0)?;
        // What stands on an encoder may be left out, but not a part of the encoder itself.
        let encoder = |key: &&String| naming.is_encoder(key);
        if let Some(first) = report.unused.iter().find(encoder) {
            let (count, first) = (report.unused.iter().filter(encoder).count(), first.clone());
            return Err(InferError::MoreLayers { path: path.to_owned(), count, first });
        }
        parameters.keep_packed();
        Self::with_parameters(path, &directory, config, network, parameters, report)
    }

    /// The encoder of a directory with random weights instead of its own, which need not be there: what its architecture and its
    /// tokenizer give without any training.
    pub fn open_untrained(path: &Path, device: &Device, dtype: DType, seed: u64) -> Result<Self> {
        let directory = ModelDirectory::open(&Files::encoder(path)?)?;
        let config = Self::read_config(&directory)?;
        let mut builder = Builder::new();
        let network = models::Model::build(&mut builder, &config.model, Head::Encoder)?;
        let mut parameters = builder.finish(device, dtype)?;
        parameters.initialise(seed)?;
        parameters.keep_packed();
        Self::with_parameters(path, &directory, config, network, parameters, LoadReport::default())
    }

    /// With the tokenizer and what other files say.
    fn with_parameters(
        path: &Path,
        directory: &ModelDirectory,
        config: Config,
        network: models::Model,
        parameters: Parameters,
        report: LoadReport,
    ) -> Result<Self> {
        let files = Files::open(path)?;
        let mut tokenizer = Tokenizer::open(directory.path())?;
        if files.lower_cases()? {
            tokenizer = tokenizer.lower_casing()?;
        }
        if config.model.spells_words() {
            tokenizer = tokenizer.spelling();
        }
        let rows = config.model.sizes().vocab_size;
        if tokenizer.vocabulary_size() > rows {
            return Err(InferError::Vocabulary {
                path: path.to_owned(),
                tokenizer: tokenizer.vocabulary_size(),
                model: rows,
            });
        }
        let activation = files.activation(&directory.config()?)?;
        let generation = Keys::of_directory(directory)?;
        Ok(Self { path: path.to_owned(), config, network, parameters, tokenizer, report, activation, generation })
    }

    /// Where the config, the weights and the tokenizer of a model are: in its directory, or in a folder of it that
    /// sentence-transformers' files name.
    pub fn encoder_directory(path: &Path) -> Result<PathBuf> {
        Files::encoder(path)
    }

    /// The head that a directory holds: the one that its config names, unless the weights have nothing of it.
    pub fn saved_head(weights: &Weights, config: &Config) -> Result<Head> {
        saved_head(weights, config)
    }

    /// The config of a model directory.
    pub fn read_config(directory: &ModelDirectory) -> Result<Config> {
        let json = directory.config()?;
        Config::from_value(json).map_err(|source| InferError::Config { path: directory.path().to_owned(), source })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The network.
    pub fn network(&self) -> &models::Model {
        &self.network
    }

    /// What its config.json says.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its weights.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// What loading found: keys of the files that were not used, and so on.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Maximum number of tokens of a sequence.
    pub fn most_tokens(&self) -> usize {
        self.config.model.sizes().max_tokens
    }

    /// How texts are read for the task of the model's head unless told otherwise: as in its fine-tuning, where config.json
    /// says how that was, else as much as it takes, cut. (What [`fill`](Self::fill), [`embed`](Self::embed) and
    /// [`features`](Self::features) read is no matter of the head.)
    pub fn task_length(&self) -> Length {
        let trained = self.config.task.reading;
        trained.map_or(Length::CUT, |reading| Length { most: Some(reading.max_length), windows: reading.windows })
    }

    /// A length that was asked for, within the model's own.
    pub(crate) fn length_within(&self, most: Option<usize>) -> usize {
        most.map_or(self.most_tokens(), |most| most.min(self.most_tokens()))
    }

    /// The text of a token.
    pub(crate) fn name_of(&self, id: u32) -> String {
        self.tokenizer.token(id).unwrap_or_else(|| format!("<{id}>"))
    }

    /// The pieces of a text as one sequence, or as windows that overlap by half, and how many of them are left out.
    pub(crate) fn windows_of(&self, pieces: &Pieces, length: Length) -> Result<(Vec<Features>, usize)> {
        let most = self.length_within(length.most);
        Ok(single_windows(self.tokenizer.template(), pieces, most, length.windows)?)
    }
}

/// The head with which a model writes, whatever stands on it in its directory.
fn writing_head(path: &Path, config: &Config, saved: Head) -> Result<Head> {
    let heads = [Head::Seq2Seq, Head::MaskedLm].into_iter().filter(|head| config.model.family().has_head(*head));
    for head in heads {
        if models::Model::build(&mut Builder::new(), &config.model, head)?.decoder().is_some() {
            return Ok(head);
        }
    }
    Err(InferError::CannotWrite { path: Some(path.to_owned()), has: described(&config.model, saved) })
}

/// The head that a config names, if the weights have any part of it: some directories name a class that they do not hold
/// (all-mpnet-base-v2 says MPNetForMaskedLM and is a bare model). Otherwise the weights tell.
fn saved_head(weights: &Weights, config: &Config) -> Result<Head> {
    let Some(named) = config.head() else { return head_of_weights(weights, config) };
    if named == Head::Pooler {
        // A bare model may be without the pooler that nothing of a sentence's vector goes through.
        return Ok(if has_head(weights, config, Head::Pooler)? { Head::Pooler } else { Head::Encoder });
    }
    let mut builder = Builder::new();
    models::Model::build(&mut builder, &config.model, named)?;
    // What a file may lack says nothing.
    let own = builder.entries().iter().filter(|entry| entry.group == Group::Head && entry.otherwise.is_none());
    let mut own = own.peekable();
    let none = own.peek().is_some() && own.all(|entry| !is_there(weights, config, &entry.name));
    if none { head_of_weights(weights, config) } else { Ok(named) }
}

/// Whether a file has a parameter, with the family's prefix or without it.
fn is_there(weights: &Weights, config: &Config, name: &str) -> bool {
    let prefix = config.model.family().naming.base_prefix;
    let bare = name.strip_prefix(prefix).unwrap_or(name);
    [name, bare].into_iter().any(|key| weights.get(key).is_some()) || weights.get(&format!("{prefix}{name}")).is_some()
}

/// Whether a file has all parameters of a head.
fn has_head(weights: &Weights, config: &Config, head: Head) -> Result<bool> {
    Ok(parameters_of_head(weights, config, head)?.is_some())
}

/// The head with the most parameters that are all in a file; of equals the first, as the family lists them.
fn head_of_weights(weights: &Weights, config: &Config) -> Result<Head> {
    let mut best = (Head::Encoder, 0);
    for head in config.model.family().heads {
        let head = head.with_labels(config.task.labels());
        match parameters_of_head(weights, config, head)? {
            Some(count) if count > best.1 => best = (head, count),
            _ => {}
        }
    }
    Ok(best.0)
}

/// How many parameters stand on the encoder of a model with this head, if a file has all of them.
fn parameters_of_head(weights: &Weights, config: &Config, head: Head) -> Result<Option<usize>> {
    if !config.model.family().has_head(head) {
        return Ok(None);
    }
    let mut builder = Builder::new();
    models::Model::build(&mut builder, &config.model, head)?;
    let mut own = builder.entries().iter().filter(|entry| !entry.group.is_encoder());
    let count = own.clone().count();
    Ok(own.all(|entry| is_there(weights, config, &entry.name)).then_some(count))
}
