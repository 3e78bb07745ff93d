//! What the files of sentence-transformers say beside a model: modules.json and the folders that it names, the maximum length,
//! prompts, and the activation of a cross-encoder. They come from strangers: paths stay inside of the directory, and what is
//! not supported is an error that names the file and the key. Nothing that they name is ever run.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use henson_checkpoint::{ModelDirectory, Weights};
use serde_json::{Map, Value, json};

use crate::pooling::{Activation, Dense, Layer, Pooling, Residual};
use crate::{InferError, Result};

const MODULES: &str = "modules.json";
const CONFIG: &str = "config_sentence_transformers.json";

/// The names that the Transformer module's own config has had.
const TRANSFORMER_CONFIGS: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// Far more than any model has.
const MOST_MODULES: usize = 64;

/// What sentence-transformers would make of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SentenceKind {
    /// Vectors of sentences.
    Embedding,
    /// Scores of pairs, by the head of the model itself.
    CrossEncoder,
}

/// Texts that are put before others, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    /// All of them.
    pub texts: BTreeMap<String, String>,
    /// The one that is used where none is asked for.
    pub default: Option<String>,
}

impl Prompts {
    /// Those of a directory; most have none.
    pub fn of_directory(path: &Path) -> Result<Self> {
        Ok(Files::open(path)?.config()?.prompts)
    }

    /// The file that says so, where there are some.
    pub fn file(&self) -> Option<(String, Vec<u8>)> {
        let keys = json!({"prompts": self.texts, "default_prompt_name": self.default});
        (!self.texts.is_empty()).then(|| (CONFIG.to_owned(), format!("{keys:#}\n").into_bytes()))
    }

    /// The text of a prompt, or of the default one where no name is given. An unknown name is an error that lists the known ones.
    pub fn get(&self, name: Option<&str>) -> Result<&str, String> {
        let Some(name) = name.or(self.default.as_deref()) else { return Ok("") };
        self.texts.get(name).map(String::as_str).ok_or_else(|| {
            let known: Vec<&str> = self.texts.keys().map(String::as_str).collect();
            match known.is_empty() {
                true => format!("the model has no prompt {name:?}, nor any other"),
                false => format!("the model has no prompt {name:?}; it has: {}", known.join(", ")),
            }
        })
    }
}

/// One of the modules that a text goes through.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Module {
    kind: ModuleKind,
    /// Its class, for messages.
    class: String,
    /// Where its files are, below the directory.
    folder: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModuleKind {
    Transformer,
    Pooling,
    Dense,
    Normalise,
    /// It does nothing after training.
    Dropout,
    /// Something else: whoever wants vectors is told, and others may still use the model.
    Other,
}

/// What a Transformer module's config says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TransformerConfig {
    max_tokens: Option<usize>,
    lower_case: bool,
    /// Whether its head is used, too.
    classifies: bool,
}

/// What config_sentence_transformers.json says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SentenceConfig {
    prompts: Prompts,
    similarity: Option<String>,
    cross_encoder: bool,
    activation: Option<String>,
}

/// What becomes of the vectors of a text's tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Steps {
    pub(crate) pooling: Vec<Pooling>,
    pub(crate) include_prompt: bool,
    pub(crate) layers: Vec<Layer>,
    pub(crate) max_tokens: Option<usize>,
}

/// A directory that may have files of sentence-transformers.
pub(crate) struct Files {
    directory: ModelDirectory,
    modules: Option<Vec<Module>>,
}

impl Files {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let directory = ModelDirectory::open(path)?;
        let mut files = Self { directory, modules: None };
        if let Some(value) = files.json(Path::new(""), MODULES)? {
            files.modules = Some(modules(&value).map_err(|what| files.wrong(Path::new(""), MODULES, what))?);
        }
        Ok(files)
    }

    /// Where the encoder's own files are. Some older directories keep them in a folder, `0_Transformer`.
    pub(crate) fn encoder(path: &Path) -> Result<PathBuf> {
        let directory = ModelDirectory::open(path)?;
        // A model stands here itself, or there is nothing that could say where else.
        let is_model = directory.has("config.json")
            && directory.config()?.as_object().is_some_and(|keys| keys.contains_key("model_type"));
        if is_model || !directory.has(MODULES) {
            return Ok(path.to_owned());
        }
        let files = Self::open(path)?;
        let first = files.transformer().filter(|folder| !folder.as_os_str().is_empty());
        Ok(first.map_or_else(|| path.to_owned(), |folder| path.join(folder)))
    }

    /// What sentence-transformers would make of it; nothing where there is no modules.json.
    pub(crate) fn kind(&self) -> Result<Option<SentenceKind>> {
        let Some(modules) = &self.modules else { return Ok(None) };
        let classifies = self.config()?.cross_encoder || self.transformer_config()?.classifies;
        let pools = modules.iter().any(|module| module.kind == ModuleKind::Pooling);
        Ok(Some(if classifies && !pools { SentenceKind::CrossEncoder } else { SentenceKind::Embedding }))
    }

    /// Whether texts are lower-cased whatever the tokenizer does.
    pub(crate) fn lower_cases(&self) -> Result<bool> {
        Ok(self.modules.is_some() && self.transformer_config()?.lower_case)
    }

    /// How vectors are compared, in the words of the files.
    pub(crate) fn similarity(&self) -> Result<Option<String>> {
        Ok(self.config()?.similarity)
    }

    /// The class of the activation that a cross-encoder's scores go through, where its files say one.
    pub(crate) fn activation(&self, config: &Value) -> Result<Option<String>> {
        let root = Path::new("");
        if let Some(name) = self.config()?.activation {
            return Ok(Some(name));
        }
        // Since version 4, and before.
        let keys = [
            config.pointer("/sentence_transformers/activation_fn"),
            config.get("sbert_ce_default_activation_function"),
        ];
        match keys.into_iter().flatten().find(|value| !value.is_null()) {
            None => Ok(None),
            Some(Value::String(name)) => Ok(Some(name.clone())),
            Some(other) => {
                let what = format!("the activation of a cross-encoder is {}, expected its name", shortened(other));
                Err(self.wrong(root, "config.json", what))
            }
        }
    }

    pub(crate) fn prompts(&self) -> Result<Prompts> {
        Ok(self.config()?.prompts)
    }

    /// How the vectors of tokens become one; nothing where the files say nothing of it.
    pub(crate) fn steps(&self) -> Result<Option<Steps>> {
        let Some(modules) = &self.modules else { return Ok(None) };
        if self.kind()? == Some(SentenceKind::CrossEncoder) {
            return Ok(None);
        }
        let root = Path::new("");
        if let Some(other) = modules.iter().find(|module| module.kind == ModuleKind::Other) {
            let what = format!(
                "the module `{}` is not supported: Transformer, Pooling, Dense, Normalize and Dropout of \
                 sentence-transformers are",
                other.class
            );
            return Err(self.wrong(root, MODULES, what));
        }
        let [first, second, rest @ ..] = &modules[..] else {
            let what = "expected a Transformer, a Pooling and what follows them".to_owned();
            return Err(self.wrong(root, MODULES, what));
        };
        if (first.kind, second.kind) != (ModuleKind::Transformer, ModuleKind::Pooling) {
            let what = format!("begins with {:?} and {:?}, expected Transformer and Pooling", first.kind, second.kind);
            return Err(self.wrong(root, MODULES, what));
        }
        let pooling = self.needed(&second.folder, "config.json")?;
        let (pooling, include_prompt) =
            pooling_of(&pooling).map_err(|what| self.wrong(&second.folder, "config.json", what))?;
        let mut layers = Vec::new();
        for module in rest {
            match module.kind {
                ModuleKind::Dense => layers.push(Layer::Dense(Arc::new(self.dense(&module.folder)?))),
                ModuleKind::Normalise => layers.push(Layer::Normalise),
                ModuleKind::Dropout => {}
                other => {
                    let what = format!("a {other:?} follows the first Pooling, expected Dense, Normalize or Dropout");
                    return Err(self.wrong(root, MODULES, what));
                }
            }
        }
        let max_tokens = match self.transformer_config()?.max_tokens {
            None => self.tokenizer_length(&first.folder)?,
            given => given,
        };
        Ok(Some(Steps { pooling, include_prompt, layers, max_tokens }))
    }

    fn transformer(&self) -> Option<&Path> {
        let mut modules = self.modules.iter().flatten();
        modules.find(|module| module.kind == ModuleKind::Transformer).map(|module| module.folder.as_path())
    }

    fn transformer_config(&self) -> Result<TransformerConfig> {
        let folder = self.transformer().unwrap_or(Path::new(""));
        for name in TRANSFORMER_CONFIGS {
            if let Some(value) = self.json(folder, name)? {
                return transformer_config(&value).map_err(|what| self.wrong(folder, name, what));
            }
        }
        Ok(TransformerConfig::default())
    }

    /// Newer versions keep the maximum length with the tokenizer.
    fn tokenizer_length(&self, folder: &Path) -> Result<Option<usize>> {
        let config = self.json(folder, "tokenizer_config.json")?;
        // "Unknown" is written as 10³⁰.
        let length = config.as_ref().and_then(|config| config.get("model_max_length")?.as_u64());
        Ok(length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length > 0))
    }

    fn config(&self) -> Result<SentenceConfig> {
        let root = Path::new("");
        let Some(value) = self.json(root, CONFIG)? else { return Ok(SentenceConfig::default()) };
        sentence_config(&value).map_err(|what| self.wrong(root, CONFIG, what))
    }

    fn dense(&self, folder: &Path) -> Result<Dense> {
        let wrong = |file: &str, what| self.wrong(folder, file, what);
        let config = self.needed(folder, "config.json")?;
        let config = DenseConfig::of(&config).map_err(|what| wrong("config.json", what))?;
        let weights = Weights::open(&self.directory.path().join(folder))?;
        let tensor = |name: &str, shape: &[usize]| {
            match weights.get(name) {
                Some(info) if info.shape == shape => {}
                Some(info) => {
                    return Err(wrong(
                        "config.json",
                        format!("{name} has the shape {:?}, expected {shape:?}", info.shape),
                    ));
                }
                None => return Err(wrong("config.json", format!("the weights beside it lack {name}"))),
            }
            let numbers = weights.read_f32(name)?;
            match numbers.iter().all(|x| x.is_finite()) {
                true => Ok(numbers),
                false => Err(wrong("config.json", format!("{name} beside it has numbers that are not finite"))),
            }
        };
        let DenseConfig { inputs, outputs, bias, activation, residual } = config;
        Ok(Dense {
            inputs,
            outputs,
            weight: tensor("linear.weight", &[outputs, inputs])?,
            bias: if bias { tensor("linear.bias", &[outputs])? } else { Vec::new() },
            activation,
            residual: match residual {
                false => Residual::None,
                true if inputs == outputs => Residual::Input,
                true => Residual::Matrix(tensor("residual.weight", &[outputs, inputs])?),
            },
        })
    }

    /// A JSON file that need not be there. One that is something else than a file is an error and not "not there".
    fn json(&self, folder: &Path, name: &str) -> Result<Option<Value>> {
        let path = folder.join(name);
        if !self.directory.path().join(&path).exists() {
            return Ok(None);
        }
        Ok(Some(self.directory.read_json(&path.to_string_lossy())?))
    }

    fn needed(&self, folder: &Path, name: &str) -> Result<Value> {
        Ok(self.directory.read_json(&folder.join(name).to_string_lossy())?)
    }

    fn wrong(&self, folder: &Path, name: &str, what: String) -> InferError {
        InferError::SentenceTransformer { path: self.directory.path().join(folder).join(name), what }
    }
}

/// A value for a message: files may hold anything.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn object(value: &Value) -> Result<&Map<String, Value>, String> {
    value.as_object().ok_or_else(|| format!("is {}, expected an object", shortened(value)))
}

/// The value of a key, unless it is missing or null.
fn key<'a, T>(
    keys: &'a Map<String, Value>,
    key: &str,
    expected: &str,
    read: impl FnOnce(&'a Value) -> Option<T>,
) -> Result<Option<T>, String> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            read(value).map(Some).ok_or_else(|| format!("`{key}` is {}, expected {expected}", shortened(value)))
        }
    }
}

fn string_key(keys: &Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    Ok(key(keys, name, "a text", Value::as_str)?.map(str::to_owned))
}

fn flag(keys: &Map<String, Value>, name: &str, default: bool) -> Result<bool, String> {
    Ok(key(keys, name, "true or false", Value::as_bool)?.unwrap_or(default))
}

/// A number of columns or tokens.
fn size(keys: &Map<String, Value>, name: &str) -> Result<Option<usize>, String> {
    let read =
        |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=1 << 31).contains(n));
    key(keys, name, "a whole number of at least 1", read)
}

fn modules(value: &Value) -> Result<Vec<Module>, String> {
    let list = value.as_array().ok_or_else(|| format!("is {}, expected a list of modules", shortened(value)))?;
    if list.len() > MOST_MODULES {
        return Err(format!("has {} modules, expected at most {MOST_MODULES}", list.len()));
    }
    list.iter().map(module).collect()
}

fn module(value: &Value) -> Result<Module, String> {
    let keys = object(value)?;
    let class = string_key(keys, "type")?.ok_or_else(|| format!("a module without a `type`: {}", shortened(value)))?;
    // Where the classes live has changed over the years, their names have not.
    let name = class.strip_prefix("sentence_transformers.").and_then(|rest| rest.rsplit('.').next());
    let kind = match name {
        Some("Transformer") => ModuleKind::Transformer,
        Some("Pooling") => ModuleKind::Pooling,
        Some("Dense") => ModuleKind::Dense,
        Some("Normalize") => ModuleKind::Normalise,
        Some("Dropout") => ModuleKind::Dropout,
        _ => ModuleKind::Other,
    };
    let folder = PathBuf::from(string_key(keys, "path")?.unwrap_or_default());
    let inside = |component: Component<'_>| matches!(component, Component::Normal(_));
    if !folder.components().all(inside) || folder.as_os_str().len() > 255 {
        return Err(format!("the path {:?} leads elsewhere: expected a folder in the model's directory", folder));
    }
    Ok(Module { kind, class, folder })
}

/// The poolings that a config asks for, and whether prompts count.
fn pooling_of(config: &Value) -> Result<(Vec<Pooling>, bool), String> {
    let keys = object(config)?;
    let include_prompt = flag(keys, "include_prompt", true)?;
    let named = |value: &Value| {
        let known = value.as_str().and_then(|name| Pooling::ALL.into_iter().find(|pooling| pooling.name() == name));
        known.ok_or_else(|| {
            let names = Pooling::ALL.map(Pooling::name).join(", ");
            format!("the pooling {} is not supported: {names} are", shortened(value))
        })
    };
    match keys.get("pooling_mode") {
        None | Some(Value::Null) => {}
        Some(Value::Array(names)) if !names.is_empty() && names.len() <= Pooling::ALL.len() => {
            return Ok((names.iter().map(named).collect::<Result<_, _>>()?, include_prompt));
        }
        Some(name) => return Ok((vec![named(name)?], include_prompt)),
    }
    let mut flags = keys.keys().filter(|key| key.starts_with("pooling_mode_"));
    if let Some(other) = flags.find(|key| Pooling::ALL.iter().all(|pooling| pooling.flag() != *key))
        && flag(keys, other, false)?
    {
        return Err(format!("`{other}` is not supported: {} are", Pooling::ALL.map(Pooling::flag).join(", ")));
    }
    let mut on = Vec::new();
    for pooling in Pooling::ALL {
        if flag(keys, pooling.flag(), false)? {
            on.push(pooling);
        }
    }
    match (on.is_empty(), Pooling::ALL.iter().any(|pooling| keys.contains_key(pooling.flag()))) {
        (false, _) => Ok((on, include_prompt)),
        // As sentence-transformers has it.
        (true, true) => Ok((vec![Pooling::Mean], include_prompt)),
        (true, false) => Err("has neither `pooling_mode` nor one of the flags `pooling_mode_…`".to_owned()),
    }
}

fn transformer_config(value: &Value) -> Result<TransformerConfig, String> {
    let keys = object(value)?;
    Ok(TransformerConfig {
        max_tokens: size(keys, "max_seq_length")?,
        lower_case: flag(keys, "do_lower_case", false)?,
        classifies: string_key(keys, "transformer_task")?.as_deref() == Some("sequence-classification"),
    })
}

fn sentence_config(value: &Value) -> Result<SentenceConfig, String> {
    let keys = object(value)?;
    let mut prompts = Prompts { texts: BTreeMap::new(), default: string_key(keys, "default_prompt_name")? };
    let given = key(keys, "prompts", "an object of texts", Value::as_object)?;
    for name in given.into_iter().flat_map(Map::keys) {
        let text =
            given.map_or(Ok(None), |texts| string_key(texts, name)).map_err(|what| format!("prompts: {what}"))?;
        prompts.texts.insert(name.clone(), text.unwrap_or_default());
    }
    if let Some(default) = prompts.default.as_ref().filter(|name| !prompts.texts.contains_key(*name)) {
        return Err(format!("`default_prompt_name` is {default:?}, which is none of `prompts`"));
    }
    Ok(SentenceConfig {
        prompts,
        similarity: string_key(keys, "similarity_fn_name")?,
        cross_encoder: string_key(keys, "model_type")?.as_deref() == Some("CrossEncoder"),
        activation: string_key(keys, "activation_fn")?,
    })
}

/// What a dense layer's config says.
struct DenseConfig {
    inputs: usize,
    outputs: usize,
    bias: bool,
    activation: Activation,
    residual: bool,
}

impl DenseConfig {
    fn of(value: &Value) -> Result<Self, String> {
        let keys = object(value)?;
        let needed = |name: &str| size(keys, name)?.ok_or_else(|| format!("`{name}` is missing"));
        for name in ["module_input_name", "module_output_name"] {
            if let Some(other) = string_key(keys, name)?.filter(|value| value != "sentence_embedding") {
                return Err(format!("`{name}` is {other:?}, and only sentence_embedding is supported"));
            }
        }
        let activation = string_key(keys, "activation_function")?;
        Ok(Self {
            inputs: needed("in_features")?,
            outputs: needed("out_features")?,
            bias: flag(keys, "bias", true)?,
            activation: activation.map_or(Ok(Activation::Tanh), |name| Activation::of_class(&name))?,
            residual: flag(keys, "use_residual", false)?,
        })
    }
}

/// Bytes as each of the files: they are read or refused.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
    if let Ok(modules) = modules(&value) {
        let inside = |module: &Module| module.folder.components().all(|part| matches!(part, Component::Normal(_)));
        assert!(modules.iter().all(inside));
    }
    let _ = pooling_of(&value);
    let _ = transformer_config(&value);
    let _ = DenseConfig::of(&value);
    if let Ok(config) = sentence_config(&value) {
        assert!(config.prompts.get(None).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poolings_of_configs() {
        let of = |config: Value| pooling_of(&config).map(|(poolings, _)| poolings);
        let old =
            json!({"word_embedding_dimension": 4, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true});
        assert_eq!(of(old), Ok(vec![Pooling::Mean]));
        assert_eq!(of(json!({"pooling_mode": "cls"})), Ok(vec![Pooling::First]));
        assert_eq!(of(json!({"pooling_mode": ["mean", "cls"]})), Ok(vec![Pooling::Mean, Pooling::First]));
        // Flags have an order of their own.
        let both =
            json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true, "pooling_mode_lasttoken": true});
        assert_eq!(of(both), Ok(vec![Pooling::First, Pooling::Mean, Pooling::Last]));
        assert_eq!(of(json!({"pooling_mode_cls_token": false})), Ok(vec![Pooling::Mean]));
        assert_eq!(
            pooling_of(&json!({"pooling_mode": "max", "include_prompt": false})),
            Ok((vec![Pooling::Max], false))
        );
        for (config, part) in [
            (json!({}), "pooling_mode"),
            (json!([]), "expected an object"),
            (json!({"pooling_mode": "median"}), "median"),
            (json!({"pooling_mode": []}), "[]"),
            (json!({"pooling_mode": vec!["cls"; 7]}), "cls"),
            (json!({"pooling_mode": 3}), "3"),
            (json!({"pooling_mode_median": true}), "pooling_mode_median"),
            (json!({"pooling_mode_cls_token": "yes"}), "expected true or false"),
            (json!({"pooling_mode": "cls", "include_prompt": 1}), "include_prompt"),
        ] {
            let error = of(config.clone()).unwrap_err();
            assert!(error.contains(part), "{config}: {error}");
        }
    }

    #[test]
    fn modules_and_configs_of_strangers() {
        let class = "sentence_transformers.models.Pooling";
        let at = |path: &str| modules(&json!([{"type": class, "path": path}]));
        assert_eq!(at("1_Pooling").unwrap()[0].folder, Path::new("1_Pooling"));
        for path in ["..", "../other", "1_Pooling/../../other", "/etc", "./x", &"x".repeat(300)] {
            assert!(at(path).unwrap_err().contains("leads elsewhere"), "{path}");
        }
        for (value, part) in [
            (json!({}), "expected a list"),
            (json!([1]), "expected an object"),
            (json!([{"path": ""}]), "without a `type`"),
            (json!([{"type": 1}]), "`type` is 1"),
            (json!([{"type": class, "path": 7}]), "`path` is 7"),
            (Value::Array(vec![json!({"type": class}); 65]), "65 modules"),
        ] {
            let error = modules(&value).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        for class in ["custom_st.Transformer", "sentence_transformers.models.CNN", ""] {
            assert_eq!(modules(&json!([{"type": class}])).unwrap()[0].kind, ModuleKind::Other, "{class}");
        }
        let dense = |key: &str, value: Value| {
            let mut config = json!({"in_features": 4, "out_features": 2});
            config[key] = value;
            DenseConfig::of(&config).map(drop).unwrap_err()
        };
        assert!(dense("in_features", json!(0)).contains("`in_features` is 0"));
        assert!(dense("out_features", json!(1e30)).contains("`out_features`"));
        assert!(dense("out_features", json!(u64::MAX)).contains("`out_features`"));
        assert!(dense("in_features", Value::Null).contains("`in_features` is missing"));
        assert!(dense("bias", json!("no")).contains("`bias`"));
        assert!(dense("activation_function", json!("os.system")).contains("os.system"));
        assert!(dense("module_input_name", json!("token_embeddings")).contains("token_embeddings"));
        for (value, part) in [
            (json!({"max_seq_length": -1}), "`max_seq_length` is -1"),
            (json!({"max_seq_length": 0}), "`max_seq_length` is 0"),
            (json!({"max_seq_length": "128"}), "`max_seq_length`"),
            (json!({"do_lower_case": 1}), "`do_lower_case`"),
        ] {
            assert!(transformer_config(&value).unwrap_err().contains(part), "{value}");
        }
        for (value, part) in [
            (json!({"prompts": ["query: "]}), "`prompts`"),
            (json!({"prompts": {"query": 1}}), "`query` is 1"),
            (json!({"default_prompt_name": "query"}), "none of `prompts`"),
            (json!({"default_prompt_name": {}}), "`default_prompt_name`"),
        ] {
            assert!(sentence_config(&value).unwrap_err().contains(part), "{value}");
        }
    }

    #[test]
    fn prompts_by_name() {
        let value = json!({"prompts": {"query": "query: ", "document": null}, "default_prompt_name": "query"});
        let mut prompts = sentence_config(&value).unwrap().prompts;
        assert_eq!((prompts.get(None), prompts.get(Some("document"))), (Ok("query: "), Ok("")));
        assert!(prompts.get(Some("passage")).unwrap_err().contains("document, query"));
        prompts.default = None;
        assert_eq!(prompts.get(None), Ok(""));
        assert!(Prompts::default().get(Some("query")).unwrap_err().contains("nor any other"));
    }
}
