//! `henson info`: what a model is and what it costs, without computing anything.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use henson_checkpoint::{Config, ModelDirectory, Weights};
use henson_infer::{Ability, EmbedSettings, Layer, Model, SentenceFacts, SentenceKind};
use henson_models::{Family, Head, ModelConfig};
use henson_ranks::MpiLibrary;
use henson_tensor::cuda::Library;
use henson_tensor::{Adafactor, Builder, Choice, Cores, DType, Isa, Method};
use henson_text::Tokenizer;
use henson_train::{Footprint, TokenCounts};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::Info;
use crate::output::{self, thousands};
use crate::{gpu, models};

pub(crate) fn run(flags: &Info) -> anyhow::Result<()> {
    if flags.devices {
        return devices(flags.json);
    }
    let built_in = if flags.model.is_none() { BuiltInFacts::all() } else { Vec::new() };
    let name = flags.model.as_deref().unwrap_or(BuiltIn::General.name());
    let (config, head, files) = match (Family::config_of_size(name), Path::new(name).exists()) {
        (Ok(config), false) => {
            let head = config.family().pretraining_head();
            (Config::new(config), head, None)
        }
        _ => {
            let path = match (&flags.model, built_in.first()) {
                (None, Some(BuiltInFacts { path: Some(path), .. })) => path.clone(),
                (None, _) => return none_found(&built_in, flags.json),
                (Some(model), _) => models::resolve(model, false)?,
            };
            let directory = ModelDirectory::open(Model::encoder_directory(&path)?)?;
            let config = Model::read_config(&directory)?;
            let weights = directory.weights()?;
            let head = Model::saved_head(&weights, &config)?;
            let files = Files::of(&path, &directory, &weights, &config, head);
            (config, head, Some(files))
        }
    };
    let facts = Facts::new(name, &config, head, files, built_in, flags)?;
    if flags.json { output::json(&facts) } else { facts.print() }
}

/// A model that comes with henson, and where it is.
#[derive(Serialize)]
struct BuiltInFacts {
    name: &'static str,
    used_by: &'static str,
    path: Option<PathBuf>,
    /// Why there is none.
    problem: Option<String>,
}

impl BuiltInFacts {
    /// All of them, the general one first.
    fn all() -> Vec<Self> {
        let facts = |model: BuiltIn, used_by| {
            let found = model.directory();
            let problem = found.as_ref().err().map(|error| format!("{error:#}"));
            Self { name: model.name(), used_by, path: found.ok(), problem }
        };
        vec![
            facts(BuiltIn::General, "fill, features, classify, finetune, serve, …"),
            facts(BuiltIn::Sentences, "embed, serve"),
        ]
    }

    fn print(&self) -> anyhow::Result<()> {
        let Self { name, used_by, path, problem } = self;
        let place = path.as_ref().map(|path| path.display().to_string()).or_else(|| problem.clone());
        output::line(&format!("without --model, {used_by} use {name}: {}", place.unwrap_or_default()))
    }
}

/// What is said where the general model is not there.
fn none_found(built_in: &[BuiltInFacts], json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(&serde_json::json!({"model": null, "built_in": built_in}));
    }
    built_in.iter().try_for_each(BuiltInFacts::print)
}

/// What the directory holds.
#[derive(Serialize)]
struct Files {
    tensors: usize,
    dtypes: BTreeMap<String, usize>,
    tokenizer: Option<TokenizerFacts>,
    tokenizer_problem: Option<String>,
    /// Whether the generator that it was pre-trained with lies in the directory.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    generator: bool,
    /// What the model can be asked, by the names of commands.
    commands: Vec<&'static str>,
    /// The class that config.json names, where the weights hold another.
    #[serde(skip_serializing_if = "Option::is_none")]
    named_class: Option<String>,
    /// The labels of its head, where it has such.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    labels: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sentences: Option<Sentences>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sentences_problem: Option<String>,
}

/// What the files of sentence-transformers say.
#[derive(Serialize)]
struct Sentences {
    cross_encoder: bool,
    pooling: Vec<&'static str>,
    dense_layers: usize,
    dimensions: usize,
    normalise: bool,
    max_length: Option<usize>,
    include_prompt: bool,
    prompts: BTreeMap<String, String>,
    default_prompt_name: Option<String>,
    similarity: Option<String>,
}

impl Sentences {
    fn of(path: &Path, hidden_size: usize) -> henson_infer::Result<Option<Self>> {
        let facts = SentenceFacts::of_directory(path)?;
        let Some(kind) = facts.kind else { return Ok(None) };
        let settings = EmbedSettings::of_directory(path)?;
        Ok(Some(Self {
            cross_encoder: kind == SentenceKind::CrossEncoder,
            pooling: settings.pooling.iter().map(|pooling| pooling.name()).collect(),
            dense_layers: settings.layers.iter().filter(|layer| matches!(layer, Layer::Dense(_))).count(),
            dimensions: settings.width(hidden_size)?,
            normalise: settings.normalise,
            max_length: settings.most_tokens,
            include_prompt: settings.include_prompt,
            prompts: facts.prompts.texts,
            default_prompt_name: facts.prompts.default,
            similarity: facts.similarity,
        }))
    }

    fn print(&self) -> anyhow::Result<()> {
        if self.cross_encoder {
            return output::line("sentence-transformers: a cross-encoder");
        }
        let mut words = vec![format!("pooling {}", self.pooling.join(" + "))];
        if self.dense_layers > 0 {
            words.push(format!("{} dense layers", self.dense_layers));
        }
        words.push(format!("{} dimensions", self.dimensions));
        words.push(if self.normalise { "normalised" } else { "not normalised" }.to_owned());
        words.extend(self.max_length.map(|most| format!("at most {most} tokens")));
        words.extend(self.similarity.as_ref().map(|similarity| format!("compared by {similarity}")));
        output::line(&format!("sentence-transformers: {}", words.join(", ")))?;
        for (name, text) in &self.prompts {
            let default = if self.default_prompt_name.as_ref() == Some(name) { " (default)" } else { "" };
            output::line(&format!("  prompt {name}{default}: {text:?}"))?;
        }
        if !self.include_prompt {
            output::line("  the prompt's tokens do not count in vectors")?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct TokenizerFacts {
    mask: Option<String>,
    kind: String,
    pieces: usize,
    lowercase: Option<bool>,
    max_length: Option<usize>,
}

impl Files {
    fn of(path: &Path, directory: &ModelDirectory, weights: &Weights, config: &Config, head: Head) -> Self {
        let mut dtypes = BTreeMap::new();
        for info in weights.names().filter_map(|name| weights.get(name)) {
            *dtypes.entry(info.dtype.to_string()).or_insert(0) += 1;
        }
        let (tokenizer, tokenizer_problem) = match Tokenizer::open(directory.path()) {
            Ok(t) => {
                let (kind, pieces) = (format!("{:?}", t.kind()), t.vocabulary_size());
                let mask = t.special().mask.as_ref().map(|mask| mask.text.clone());
                (
                    Some(TokenizerFacts { mask, kind, pieces, lowercase: t.lowercase(), max_length: t.max_length() }),
                    None,
                )
            }
            Err(error) => (None, Some(error.to_string())),
        };
        let (sentences, sentences_problem) = match Sentences::of(path, config.model.sizes().hidden_size) {
            Ok(sentences) => (sentences, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let generator = directory.path().join("generator/config.json").is_file();
        let class = config.model.class(head);
        Self {
            tensors: weights.names().len(),
            dtypes,
            tokenizer,
            tokenizer_problem,
            generator,
            commands: Ability::of_head(config, head).into_iter().filter_map(Ability::command).collect(),
            named_class: config.architectures.first().filter(|named| **named != class).cloned(),
            labels: match head {
                Head::Sequence { .. } | Head::Token { .. } => config.task.label_names(),
                _ => Vec::new(),
            },
            sentences,
            sentences_problem,
        }
    }
}

impl Files {
    /// What can be done with the directory.
    fn print_uses(&self) -> anyhow::Result<()> {
        if let Some(named) = &self.named_class {
            output::line(&format!(
                "config.json names {named}, and the weights are those of another class: they decide"
            ))?;
        }
        if let Some(sentences) = &self.sentences {
            sentences.print()?;
        }
        if let Some(problem) = &self.sentences_problem {
            output::line(&format!("sentence-transformers: cannot be used: {problem}"))?;
        }
        if !self.labels.is_empty() {
            let more = if self.labels.len() > 12 { ", …" } else { "" };
            let first: Vec<&str> = self.labels.iter().take(12).map(String::as_str).collect();
            output::line(&format!("labels: {}{more}", first.join(", ")))?;
        }
        let mask = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.mask.as_ref());
        let commands = self.commands.iter().map(|command| match (*command, mask) {
            ("fill", Some(mask)) => format!("henson fill (with {mask})"),
            (command, _) => format!("henson {command}"),
        });
        let commands = commands.chain(["henson serve", "henson finetune"].map(str::to_owned));
        output::line(&format!("can be used by: {}", commands.collect::<Vec<_>>().join(", ")))
    }
}

/// Numbers in a group of parameters.
#[derive(Serialize)]
struct Group {
    name: &'static str,
    parameters: usize,
}

#[derive(Serialize)]
struct Facts<'a> {
    model: &'a str,
    /// `model_type` of config.json.
    family: String,
    architecture: String,
    layers: usize,
    /// Of a model with an encoder and a decoder.
    #[serde(skip_serializing_if = "Option::is_none")]
    decoder_layers: Option<usize>,
    hidden_size: usize,
    heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    /// Whether it is made of LSTMs over words that are read as characters.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    recurrent: bool,
    max_position_embeddings: usize,
    hidden_act: henson_models::HiddenActivation,
    parameters: usize,
    groups: Vec<Group>,
    batch: usize,
    seq: usize,
    memory_mib: Memory,
    files: Option<Files>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    built_in: Vec<BuiltInFacts>,
}

/// Estimates for the batch that was asked for.
#[derive(Serialize)]
struct Memory {
    train_f32: f64,
    train_bf16: f64,
    train_adafactor_f32: f64,
    train_adafactor_bf16: f64,
    infer_f32: f64,
    infer_bf16: f64,
    /// Keys and values of these tokens, where the model can write.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_f32: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_bf16: Option<f64>,
}

impl<'a> Facts<'a> {
    fn new(
        model: &'a str,
        config: &Config,
        head: Head,
        files: Option<Files>,
        built_in: Vec<BuiltInFacts>,
        flags: &Info,
    ) -> anyhow::Result<Self> {
        let config = &config.model;
        let mut builder = Builder::new();
        let built = henson_models::Model::build(&mut builder, config, head)?;
        let footprint = Footprint::new(&built, builder.entries());
        let sizes = config.sizes();
        let mut groups =
            ["embeddings", "encoder", "decoder", "pooler", "head"].map(|name| Group { name, parameters: 0 });
        let mut decoder_layers = 0;
        // Constants stand among the weights and are none.
        for entry in builder.entries().iter().filter(|entry| !entry.constant) {
            let group = match entry.group {
                henson_tensor::Group::Embeddings => 0,
                henson_tensor::Group::Layer(layer) if layer < sizes.num_hidden_layers => 1,
                // Those of a decoder follow the encoder's.
                henson_tensor::Group::Layer(layer) => {
                    decoder_layers = decoder_layers.max(layer + 1 - sizes.num_hidden_layers);
                    2
                }
                henson_tensor::Group::Pooler => 3,
                henson_tensor::Group::Head | henson_tensor::Group::Objective => 4,
            };
            groups[group].parameters += entry.shape.elements();
        }
        if sizes.causal {
            groups[1].name = "decoder";
        }
        let groups: Vec<Group> = groups.into_iter().filter(|group| group.parameters > 0).collect();
        let parameters = groups.iter().map(|group| group.parameters).sum();
        Ok(Self {
            model,
            family: config.to_json()?["model_type"].as_str().unwrap_or_default().to_owned(),
            architecture: config.class(head),
            layers: sizes.num_hidden_layers,
            decoder_layers: (decoder_layers > 0).then_some(decoder_layers),
            hidden_size: sizes.hidden_size,
            heads: sizes.num_attention_heads,
            intermediate_size: sizes.intermediate_size,
            vocab_size: sizes.vocab_size,
            recurrent: config.characters().is_some(),
            max_position_embeddings: sizes.max_tokens,
            hidden_act: sizes.hidden_act,
            parameters,
            groups,
            batch: flags.batch,
            seq: flags.seq,
            memory_mib: estimate(&footprint, config, head, flags.batch * flags.seq),
            files,
            built_in,
        })
    }

    fn print(&self) -> anyhow::Result<()> {
        let layers = match self.decoder_layers {
            Some(decoder) => format!("{} + {decoder}", self.layers),
            None => self.layers.to_string(),
        };
        let Self { hidden_size, heads, intermediate_size, vocab_size, .. } = self;
        self.built_in.iter().try_for_each(BuiltInFacts::print)?;
        output::line(&format!("{}: {}, of the family {}", self.model, self.architecture, self.family))?;
        let act = serde_json::to_string(&self.hidden_act)?;
        let (most, act) = (self.max_position_embeddings, act.trim_matches('"'));
        let [network, tokens] = match self.recurrent {
            true => [
                format!(
                    "{layers} layers of LSTMs in both directions, {intermediate_size} cells, {hidden_size} numbers a word"
                ),
                format!("words are read as characters, texts as up to {most} bytes"),
            ],
            false => [
                format!(
                    "{layers} layers of {hidden_size} with {heads} heads, {intermediate_size} inside of the feed-forward layers"
                ),
                format!("{vocab_size} tokens, {most} positions, activation {act}"),
            ],
        };
        output::line(&format!("  {network}"))?;
        output::line(&format!("  {tokens}"))?;
        output::line(&format!("parameters: {}", thousands(self.parameters)))?;
        for group in &self.groups {
            let share = 100.0 * group.parameters as f64 / self.parameters as f64;
            output::line(&format!("  {:<11}{:>14}  {share:>5.1}%", group.name, thousands(group.parameters)))?;
        }
        let m = &self.memory_mib;
        let targets = if self.decoder_layers.is_some() { ", and as many written" } else { "" };
        output::line(&format!("memory for {}×{} tokens{targets} (estimate), f32 and bf16", self.batch, self.seq))?;
        let line =
            |what: &str, [f32, bf16]: [f64; 2]| output::line(&format!("  {what:<31}{f32:>8.0} MiB {bf16:>8.0} MiB"));
        line("training, AdamW", [m.train_f32, m.train_bf16])?;
        line("training, Adafactor", [m.train_adafactor_f32, m.train_adafactor_bf16])?;
        line("inference", [m.infer_f32, m.infer_bf16])?;
        if let (Some(f32), Some(bf16)) = (m.cache_f32, m.cache_bf16) {
            line("keys and values while writing", [f32, bf16])?;
        }
        if let Some(files) = &self.files {
            let dtypes: Vec<String> = files.dtypes.iter().map(|(dtype, n)| format!("{n} {dtype}")).collect();
            output::line(&format!("weights: {} tensors ({})", files.tensors, dtypes.join(", ")))?;
            if let Some(t) = &files.tokenizer {
                let case = match t.lowercase {
                    Some(true) => ", lower-casing",
                    Some(false) => ", cased",
                    None => "",
                };
                output::line(&format!("tokenizer: {}, {} tokens{case}", t.kind, t.pieces))?;
            }
            if let Some(problem) = &files.tokenizer_problem {
                output::line(&format!("tokenizer: none that can be used: {problem}"))?;
            }
            if files.generator {
                output::line(
                    "generator: in generator/, a masked LM over the same tables (fill --model DIR/generator)",
                )?;
            }
            files.print_uses()?;
        }
        Ok(())
    }
}

/// Estimates for sources of so many tokens, and as many that an encoder-decoder writes.
fn estimate(footprint: &Footprint, config: &ModelConfig, head: Head, tokens: usize) -> Memory {
    let targets = if config.targets().is_some() { tokens } else { 0 };
    // Models that write predict every token, others a share of them.
    let predicted = match head {
        _ if targets > 0 => targets,
        Head::MaskedLm if config.sizes().causal => tokens,
        _ => (0.15 * tokens as f64) as usize,
    };
    let counts = TokenCounts { sources: tokens, targets, predicted };
    let mib = |bytes: u64| (bytes as f64 / (1 << 20) as f64 * 10.0).round() / 10.0;
    let both = |bytes: &dyn Fn(DType) -> u64| [DType::F32, DType::Bf16].map(|dtype| mib(bytes(dtype)));
    let train = |method| both(&|dtype| footprint.training(counts, method, dtype, false));
    let ([train_f32, train_bf16], adafactor) = (train(Method::AdamW), Method::Adafactor(Adafactor::default()));
    let [train_adafactor_f32, train_adafactor_bf16] = train(adafactor);
    let [infer_f32, infer_bf16] = both(&|dtype| footprint.inference(counts, dtype));
    let cache = |dtype| footprint.cache(counts, dtype).map(mib);
    Memory {
        train_f32,
        train_bf16,
        train_adafactor_f32,
        train_adafactor_bf16,
        infer_f32,
        infer_bf16,
        cache_f32: cache(DType::F32),
        cache_bf16: cache(DType::Bf16),
    }
}

#[derive(Serialize)]
struct DeviceFacts {
    device: &'static str,
    threads: usize,
    processors: usize,
    cores: usize,
    cpu_quota: Option<f64>,
    kernels: Vec<String>,
    best: String,
    reason: String,
}

#[derive(Serialize)]
struct CudaFacts {
    device: &'static str,
    gpus: Vec<String>,
    problem: Option<String>,
    libraries: Vec<LibraryFacts>,
}

#[derive(Serialize)]
struct LibraryFacts {
    name: &'static str,
    path: Option<std::path::PathBuf>,
    /// Of those that say it without a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    problem: Option<String>,
}

/// The MPI library, for several processes.
#[derive(Serialize)]
struct MpiFacts {
    library: &'static str,
    path: Option<PathBuf>,
    version: Option<String>,
    problem: Option<String>,
}

/// The version of a library that says it without a GPU.
fn version(library: Library) -> Option<String> {
    (library == Library::Nccl).then(gpu::nccl)?.ok().map(|nccl| nccl.version)
}

fn devices(json: bool) -> anyhow::Result<()> {
    let (cores, choice) = (Cores::of_this_process(), Choice::of_this_machine());
    let facts = DeviceFacts {
        device: "cpu",
        threads: cores.threads(),
        processors: cores.processors,
        cores: cores.cores,
        cpu_quota: cores.quota,
        kernels: Isa::available().iter().map(Isa::to_string).collect(),
        best: choice.isa.to_string(),
        reason: choice.reason,
    };
    let mpi = MpiLibrary::load(None, None);
    let found = gpu::find();
    if json {
        output::json(&facts)?;
        let libraries = found.libraries.into_iter().map(|(library, place)| {
            let name = library.what();
            let version = version(library);
            let (path, problem) = (place.as_ref().ok().cloned(), place.err());
            LibraryFacts { name, path, version, problem }
        });
        let (gpus, problem) = match found.gpus {
            Ok(gpus) => (gpus, None),
            Err(problem) => (Vec::new(), Some(problem)),
        };
        output::json(&CudaFacts { device: "cuda", gpus, problem, libraries: libraries.collect() })?;
        let (path, version) = mpi.as_ref().ok().map(|mpi| (mpi.path.clone(), mpi.version.clone())).unzip();
        return output::json(&MpiFacts {
            library: "MPI",
            path,
            version,
            problem: mpi.err().map(|error| error.to_string()),
        });
    }
    let DeviceFacts { threads, best, kernels, reason, .. } = &facts;
    output::line(&format!("cpu: {threads} threads, kernels {} (using {best})", kernels.join(", ")))?;
    output::line(&format!("  threads: {cores}"))?;
    output::line(&format!("  {best}: {reason}"))?;
    match &found.gpus {
        Ok(gpus) if gpus.is_empty() => output::line("cuda: the driver sees no GPU")?,
        Ok(gpus) => output::line(&format!("cuda: {}", gpus.join(", ")))?,
        Err(problem) => output::line(&format!("cuda: {problem}"))?,
    }
    for (library, place) in &found.libraries {
        let place = match place {
            Ok(path) => match version(*library) {
                Some(version) => format!("{version} ({})", path.display()),
                None => path.display().to_string(),
            },
            Err(_) => format!("not found. {}", library.advice()),
        };
        output::line(&format!("  {}: {place}", library.what()))?;
    }
    match mpi {
        Ok(mpi) => output::line(&format!("mpi: {} ({})", mpi.version, mpi.path.display())),
        Err(_) => output::line("mpi: not found; needed to train with several processes (Debian: openmpi-bin or mpich)"),
    }
}
