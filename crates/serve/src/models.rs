//! The models of a server by name. Each is loaded, used and replaced as a whole: a request keeps the one that it began
//! with, so a reload loses nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use henson_infer::{
    Ability, EmbedSettings, GenerateSettings, InferError, Model, Pooling, Prompts, Read, Request, SentenceFacts,
    SentenceKind, Task, TokenScore, Want, WriterLimits,
};
use henson_tensor::{DType, Device};
use henson_text::Pieces;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::app::Answer;
use crate::error::{ApiError, Kind, ServeError};
use crate::generate::queue::{self as writing, Update, WriteLimits, WriteQueue};
use crate::generate::text::{Token, Transcript};
use crate::metrics::Metrics;
use crate::queue::{Admitted, Limits, Queue};
use crate::settings::Settings;

/// A model to serve.
#[derive(Clone, Debug)]
pub struct Source {
    /// What requests call it.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
}

impl Source {
    /// A model under its directory's name.
    pub fn of_path(path: &Path) -> Self {
        // `.` and `..` have no name of their own.
        let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
        Self { name, path: path.to_owned() }
    }

    fn check_name(&self) -> Result<(), ServeError> {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
        if self.name.is_empty() || !self.name.chars().all(plain) || self.name.chars().all(|c| c == '.') {
            return Err(ServeError::Name(self.name.clone()));
        }
        Ok(())
    }
}

/// A model at work.
pub(crate) struct Loaded {
    pub(crate) name: String,
    pub(crate) model: Arc<Model>,
    pub(crate) embed: EmbedSettings,
    /// Whether its directory is one of sentence-transformers: made for vectors.
    sentences: bool,
    /// Prompts that are put before texts, by name.
    pub(crate) prompts: Prompts,
    queue: Queue,
    writes: Option<Writes>,
}

/// What a model has that writes.
struct Writes {
    queue: WriteQueue,
    /// What its files say.
    settings: GenerateSettings,
}

/// What is known of the files of a directory: names, sizes and times. A changed directory has another one.
type Fingerprint = Vec<(String, u64, Option<SystemTime>)>;

/// All models, and what is needed to load them again.
pub(crate) struct Registry {
    sources: Vec<Source>,
    device: Device,
    dtype: DType,
    settings: Settings,
    slots: RwLock<BTreeMap<String, (Fingerprint, Arc<Loaded>)>>,
}

/// A text that is longer than so many bytes for each token that the model takes is no text: it is not even looked at.
pub(crate) const BYTES_PER_TOKEN: usize = 256;

/// The share of a batch's tokens that a step of writing reads of new prompts: whoever is being written waits for it.
const PROMPT_SHARE: usize = 4;

/// What OpenAI's requests call the texts; they have no `truncate`.
pub(crate) const OPENAI_FIELD: &str = "input";

/// How the text of a request becomes a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// What the request calls it.
    pub(crate) field: &'static str,
    /// Maximum length in tokens, special ones included.
    pub(crate) most: usize,
    /// Whether longer texts are cut; otherwise they are refused.
    pub(crate) truncate: bool,
    /// Whether the beginning goes instead of the end.
    pub(crate) left: bool,
}

impl Cut {
    /// What a text may have in bytes, before it is looked at. Texts to be cut are cut there.
    pub(crate) fn bounded<'t>(&self, text: &'t str) -> Result<&'t str, ApiError> {
        let most = self.most.saturating_mul(BYTES_PER_TOKEN);
        if text.len() <= most {
            return Ok(text);
        }
        if !self.truncate {
            return Err(self.too_long(text.len().div_ceil(BYTES_PER_TOKEN)));
        }
        Ok(if self.left {
            &text[text.ceil_char_boundary(text.len() - most)..]
        } else {
            &text[..text.floor_char_boundary(most)]
        })
    }

    /// A request that has lost nothing, where texts must not be cut.
    pub(crate) fn checked<A>(&self, request: Request<A>) -> Result<Request<A>, ApiError> {
        if request.dropped > 0 && !self.truncate {
            return Err(self.too_long(request.tokens() + request.dropped));
        }
        Ok(request)
    }

    /// What is told where a text is too long and must not be cut.
    fn too_long(&self, given: usize) -> ApiError {
        let Cut { field, most, .. } = self;
        let next = match *field {
            OPENAI_FIELD => "this server was told not to cut texts (--no-truncate)",
            _ => "set `truncate` to cut it",
        };
        let message = format!("`{field}` must have at most {most} tokens, this has {given}: {next}");
        ApiError::new(Kind::Validation, message)
    }
}

impl Registry {
    pub(crate) fn new(
        sources: Vec<Source>,
        device: Device,
        dtype: DType,
        settings: Settings,
    ) -> Result<Self, ServeError> {
        if sources.is_empty() && settings.runs.is_none() {
            return Err(ServeError::NoModels);
        }
        for (i, source) in sources.iter().enumerate() {
            source.check_name()?;
            if sources[..i].iter().any(|other| other.name == source.name) {
                return Err(ServeError::SameName(source.name.clone()));
            }
        }
        Ok(Self { sources, device, dtype, settings, slots: RwLock::default() })
    }

    /// Loads what is new or changed. Models whose files fail to load stay as they are; the errors come back.
    pub(crate) fn load(&self, metrics: &Metrics) -> (usize, Vec<ServeError>) {
        let (mut loaded, mut errors) = (0, Vec::new());
        for source in &self.sources {
            let fingerprint = fingerprint(&source.path);
            let known = self.read(|slots| slots.get(&source.name).map(|(known, _)| *known == fingerprint));
            if known == Some(true) {
                continue;
            }
            match self.open(source, &fingerprint, metrics) {
                Ok(model) => {
                    let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
                    slots.insert(source.name.clone(), (fingerprint, Arc::new(model)));
                    loaded += 1;
                }
                Err(error) => errors.push(error),
            }
        }
        (loaded, errors)
    }

    /// Loads a model whose files were like this before.
    fn open(&self, source: &Source, before: &Fingerprint, metrics: &Metrics) -> Result<Loaded, ServeError> {
        let told = |error| ServeError::Model { name: source.name.clone(), source: error };
        let facts = SentenceFacts::of_directory(&source.path).map_err(told)?;
        // sentence-transformers use the encoder alone, and some of their directories have no more.
        let sentences = facts.kind == Some(SentenceKind::Embedding);
        let want = if sentences { Want::Encoder } else { Want::AsSaved };
        let model = Arc::new(Model::open(&source.path, &self.device, self.dtype, want).map_err(told)?);
        let embed = EmbedSettings::of_directory(&source.path).map_err(told)?;
        embed.width(model.config().model.sizes().hidden_size).map_err(told)?;
        let mut prompts = facts.prompts;
        let own = self.settings.prompts.iter().filter(|prompt| prompt.is_for(&source.name));
        own.for_each(|prompt| _ = prompts.texts.insert(prompt.name.clone(), prompt.text.clone()));
        if !warm_up(&model).map_err(told)? {
            tracing::warn!(model = source.name, "its results are not finite: the weights are damaged or far too large");
        }
        let settings = &self.settings;
        let limits = Limits {
            batch_tokens: settings.batch_tokens,
            tokens: settings.queue_tokens,
            requests: settings.queue_requests,
            timeout: settings.request_timeout,
        };
        let queue = Queue::start(Arc::clone(&model), limits, metrics.model(&source.name))?;
        let writes = if model.abilities().contains(&Ability::Generate) {
            let limits = WriteLimits {
                writer: writer_limits(&model, settings),
                tokens: settings.queue_tokens,
                requests: settings.queue_requests,
                timeout: settings.request_timeout,
            };
            let own = model.generate_settings().map_err(told)?;
            let queue = WriteQueue::start(&source.name, Arc::clone(&model), limits, metrics.writer(&source.name))?;
            Some(Writes { queue, settings: own })
        } else {
            None
        };
        // Weights that were overwritten meanwhile may be half of the old ones and half of the new.
        if fingerprint(&source.path) != *before {
            return Err(ServeError::Changed { name: source.name.clone(), path: source.path.clone() });
        }
        Ok(Loaded { name: source.name.clone(), model, embed, sentences, prompts, queue, writes })
    }

    /// The model of this name.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Loaded>, ApiError> {
        if let Some(loaded) = self.loaded(name) {
            return Ok(loaded);
        }
        if self.names().any(|known| known == name) {
            return Err(ApiError::later(Kind::Unhealthy, format!("the model {name:?} is still being loaded"), 1));
        }
        let names: Vec<&str> = self.names().collect();
        let message = match names.is_empty() {
            true => "this server has no models, only training runs".to_owned(),
            false => format!("there is no model {name:?}; there are: {}", names.join(", ")),
        };
        Err(ApiError::new(Kind::NoModel, message))
    }

    /// The model for requests that name none: sentence models first, then other encoders, in the order that they were given
    /// in.
    pub(crate) fn first(&self, ability: Ability) -> Result<Arc<Loaded>, ApiError> {
        // What is loaded later may suit better: the same request must not get other vectors a moment later.
        if !self.all_loaded() {
            return Err(ApiError::later(Kind::Unhealthy, "models are still being loaded", 1));
        }
        if let Some(model) = self.unnamed(ability).into_iter().next() {
            return Ok(model);
        }
        let models = self.names().map(|name| self.get(name)).collect::<Result<Vec<_>, _>>()?;
        let Some(able) = models.iter().find(|model| model.can(ability)).or(models.first()) else {
            return self.get("");
        };
        let are = models.iter().map(|model| format!("{:?} is a {}", model.name, model.kind()));
        let are = are.collect::<Vec<_>>().join(", ");
        let message = if able.can(ability) {
            let name = &able.name;
            format!(
                "no model of this server is made for vectors: {are}; name the one to ask, with \"model\": {name:?} or under \
                 /models/{name}, or serve a sentence model or an encoder"
            )
        } else {
            format!("no model of this server can do this: it needs {}, but {are}", needed(ability))
        };
        Err(ApiError::new(Kind::Backend, message))
    }

    /// The model for a name that is not served, as clients of other servers send it: the only one that may be meant.
    pub(crate) fn stand_in(&self, ability: Ability, unknown: ApiError) -> Result<Arc<Loaded>, ApiError> {
        match &self.unnamed(ability)[..] {
            _ if !self.all_loaded() => self.first(ability),
            [only] => Ok(Arc::clone(only)),
            _ => Err(unknown),
        }
    }

    /// The models that suit a request without a name best, in the order that they were given in.
    fn unnamed(&self, ability: Ability) -> Vec<Arc<Loaded>> {
        let models = self.names().filter_map(|name| self.loaded(name));
        let ranked: Vec<_> = models.filter_map(|model| Some((model.preference(ability)?, model))).collect();
        let best = ranked.iter().map(|(rank, _)| *rank).min();
        ranked.into_iter().filter(|(rank, _)| Some(*rank) == best).map(|(_, model)| model).collect()
    }

    fn loaded(&self, name: &str) -> Option<Arc<Loaded>> {
        self.read(|slots| slots.get(name).map(|(_, loaded)| Arc::clone(loaded)))
    }

    /// Names in the order that they were given in.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|source| source.name.as_str())
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn all_loaded(&self) -> bool {
        self.read(|slots| slots.len()) == self.sources.len()
    }

    fn read<R>(&self, look: impl FnOnce(&BTreeMap<String, (Fingerprint, Arc<Loaded>)>) -> R) -> R {
        look(&self.slots.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Loaded {
    /// The class of `transformers` that it is.
    pub(crate) fn class(&self) -> String {
        self.model.config().model.class(self.model.network().head())
    }

    /// What it is, for messages.
    pub(crate) fn kind(&self) -> String {
        let reads = if self.model.is_left_to_right() { " that reads left to right" } else { "" };
        format!("{}{reads}", self.class())
    }

    /// How well it suits requests that name no model, 0 best; none where it answers only to its name. Vectors of a
    /// fine-tuned head's encoder, or of a model that writes, are of use only to those who ask for them.
    fn preference(&self, ability: Ability) -> Option<usize> {
        let kind = match self.model.task() {
            _ if self.sentences => 0,
            // Made to write; its vectors are of use to few.
            _ if self.writes.is_some() => 2,
            None => 1,
            Some(_) => 2,
        };
        match ability {
            _ if !self.can(ability) => None,
            Ability::Embed | Ability::EmbedAll | Ability::Similarity => (kind < 2).then_some(kind),
            // The ids of /tokenize are for the model of /embed.
            Ability::Tokenize | Ability::Decode | Ability::Inside => Some(kind),
            Ability::Fill | Ability::Generate | Ability::Rerank | Ability::ZeroShot | Ability::Task(_) => Some(0),
        }
    }

    pub(crate) fn can(&self, ability: Ability) -> bool {
        self.model.abilities().contains(&ability)
    }

    /// Maximum number of tokens of a text to embed.
    pub(crate) fn most_tokens(&self) -> usize {
        self.embed.most_tokens.map_or(self.model.most_tokens(), |most| most.min(self.model.most_tokens()))
    }

    /// Maximum number of tokens of a sequence for the task of its head: what it was fine-tuned with, or all that it takes.
    pub(crate) fn task_tokens(&self) -> usize {
        self.model.task_length().most.map_or(self.model.most_tokens(), |most| most.min(self.model.most_tokens()))
    }

    /// A place among those that wait for the model, for work on texts alone; given up when it is dropped.
    pub(crate) fn admit(&self, tokens: usize) -> Result<Admitted<'_>, ApiError> {
        self.queue.admit_texts(tokens)
    }

    /// The answer to a request, which is computed together with those of others.
    pub(crate) async fn run<A>(&self, request: Request<A>) -> Result<Answer<A>, ApiError> {
        let (tokens, Request { sequences, dropped, finish }) = (request.tokens(), request);
        let read = self.queue.run(sequences).await?;
        Ok(Answer { body: finish(&self.model, read), tokens, dropped })
    }

    /// How its files say that it writes, where it does.
    pub(crate) fn generate_settings(&self) -> Option<&GenerateSettings> {
        self.writes.as_ref().map(|writes| &writes.settings)
    }

    /// Whether it reads a source and writes something else, instead of continuing what it reads.
    pub(crate) fn is_encoder_decoder(&self) -> bool {
        self.model.config().model.targets().is_some()
    }

    /// Has tasks written, together with those of others.
    pub(crate) async fn write(&self, tasks: Vec<writing::Task>) -> Result<UnboundedReceiver<Update>, ApiError> {
        match &self.writes {
            Some(writes) => writes.queue.begin(tasks).await,
            None => Err(ApiError::new(Kind::Backend, format!("the model {:?} cannot write", self.name))),
        }
    }

    /// Waits for an answer as long as a request may take.
    pub(crate) async fn within_timeout(
        &self,
        work: impl Future<Output = Result<(), ApiError>>,
    ) -> Result<(), ApiError> {
        let Some(writes) = &self.writes else { return work.await };
        let late =
            || ApiError::later(Kind::Unhealthy, "the answer took too long; try again later, or ask for less", 10);
        tokio::time::timeout(writes.queue.timeout(), work).await.unwrap_or_else(|_| Err(late()))
    }

    /// The tokens of prompts, with how likely each was after those before it.
    pub(crate) async fn prompt_scores(&self, prompts: &[&[u32]], top: usize) -> Result<Vec<Vec<Token>>, ApiError> {
        if self.is_encoder_decoder() {
            let message =
                format!("the prompt's own probabilities: {:?} reads it as a source and predicts none of it", self.name);
            return Err(ApiError::new(Kind::Validation, message));
        }
        let requests = prompts.iter().map(|prompt| self.model.prepare_prompt_scores(prompt, top)).collect();
        let scores = self.run(Request::all(requests)).await?.body;
        prompts.iter().zip(&scores).map(|(prompt, scores)| self.scored_tokens(prompt, scores)).collect()
    }

    fn scored_tokens(&self, prompt: &[u32], scores: &[TokenScore]) -> Result<Vec<Token>, ApiError> {
        let mut transcript = Transcript::new(&[], 0, true);
        // Nothing stands before the first.
        let scores = std::iter::once(None).chain(scores.iter().map(Some));
        let mut tokens = Vec::with_capacity(prompt.len());
        for (id, score) in prompt.iter().zip(scores) {
            let alternatives = score.map_or(&[][..], |score| &score.alternatives);
            let part = transcript.push_with(&self.model, *id, score.map(|score| score.logprob), alternatives)?;
            tokens.extend(part.tokens);
        }
        tokens.extend(transcript.finish(&self.model)?.tokens);
        tokens.extend(transcript.rest());
        Ok(tokens)
    }
}

/// How much is written at once: as many sequences as may be, of any length, within the memory that they may take.
fn writer_limits(model: &Model, settings: &Settings) -> WriterLimits {
    let longest = model.most_tokens();
    let most = settings.streams.saturating_mul(longest);
    let sizes = model.network().decoder().map(|decoder| decoder.cache_sizes());
    let (bytes, caches) = sizes.map_or((1, 1), |sizes| {
        let bytes = 2 * sizes.layers * sizes.width * model.parameters().dtype().size();
        (bytes.max(1), if sizes.source { 2 } else { 1 })
    });
    let tokens = (settings.cache_bytes / caches / bytes).clamp(1, most.max(1));
    let prefill = settings.batch_tokens.div_ceil(PROMPT_SHARE);
    WriterLimits { tokens, source_tokens: tokens, streams: settings.streams, prefill }
}

/// The kind of model that an ability needs.
pub(crate) fn needed(ability: Ability) -> &'static str {
    match ability {
        Ability::Fill => "a masked language model",
        Ability::Generate => "a model that writes: a decoder that reads left to right, or an encoder-decoder",
        Ability::Rerank => "a sequence classifier with one label, a re-ranker",
        Ability::ZeroShot => "a classifier of natural language inference, with a label that begins with \"entail\"",
        Ability::Task(Task::Classify) => "a sequence classifier",
        Ability::Task(Task::Tag) => "a token classifier",
        Ability::Task(Task::Answer) => "a question-answering model",
        Ability::Task(Task::Choose) => "a multiple-choice model",
        _ => "a model",
    }
}

/// One pass over next to nothing, before anybody waits: weights are packed, a GPU's kernels compiled, and what cannot be
/// computed at all shows now. Whether the result is finite.
fn warm_up(model: &Model) -> Result<bool, InferError> {
    // Some tokenizers put nothing around a text.
    let pieces = Pieces { ids: vec![0], offsets: vec![(0, 0)], ..Pieces::default() };
    let features = model.tokenizer().template().single(&pieces, model.most_tokens())?;
    Ok(model.read(&[(&features, &Read::Pooled { pooling: vec![Pooling::Mean], skip: 0 })])?.iter().all(Option::is_some))
}

/// The files that make a model: weights, configs and vocabularies. A run's logs and checkpoints are none of them.
fn fingerprint(directory: &Path) -> Fingerprint {
    let mut found = Vec::new();
    let mut look = |folder: &Path| {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            let Ok(metadata) = std::fs::metadata(&path) else { continue };
            if metadata.is_file() && matches!(ending, Some("json" | "safetensors" | "bin" | "txt" | "model")) {
                found.push((path.to_string_lossy().into_owned(), metadata.len(), metadata.modified().ok()));
            }
        }
    };
    look(directory);
    // The modules of sentence-transformers: 1_Pooling, 2_Dense.
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit())) {
            look(&entry.path());
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models() {
        assert_eq!(Source::of_path(Path::new("/models/minilm/")).name, "minilm");
        for (name, good) in
            [("minilm", true), ("a.b-c_1", true), ("", false), ("a/b", false), ("..", false), ("a b", false)]
        {
            let source = Source { name: name.to_owned(), path: PathBuf::new() };
            assert_eq!(source.check_name().is_ok(), good, "{name}");
        }
    }

    #[test]
    fn prompts_in_a_fifo_are_refused_at_once() {
        let directory = tempfile::TempDir::new().unwrap();
        let fifo = directory.path().join("config_sentence_transformers.json");
        assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
        let (done, result) = std::sync::mpsc::channel();
        let path = directory.path().to_owned();
        std::thread::spawn(move || done.send(SentenceFacts::of_directory(&path).map(drop)));
        let error = result.recv_timeout(std::time::Duration::from_secs(10)).expect("it waits").unwrap_err();
        assert!(error.to_string().contains("config_sentence_transformers.json"), "{error}");
    }

    #[test]
    fn fingerprints_know_what_belongs_to_a_model() {
        let directory = tempfile::TempDir::new().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("config.json", "{}");
        let first = fingerprint(directory.path());
        write("metrics.jsonl", "{}");
        assert_eq!(fingerprint(directory.path()), first);
        write("config.json", "{ }");
        assert_ne!(fingerprint(directory.path()), first);
    }
}
