//! How a model's files say that it should write: `generation_config.json`, or the keys that older files keep in config.json.

use std::path::{Path, PathBuf};

use henson_checkpoint::ModelDirectory;
use serde_json::{Map, Value, json};

use super::settings::TOP_K;
use super::{EarlyStopping, GenerateSettings, Sampling};
use crate::{InferError, Model, Result};

const FILE: &str = "generation_config.json";

/// What a directory says.
pub(crate) struct GenerationFiles {
    pub(crate) settings: GenerateSettings,
    /// How it draws where it does.
    pub(crate) sampling: Sampling,
    /// What stands before the first token where there is no prompt.
    pub(crate) first: Option<u32>,
}

impl Model {
    /// How the model's files say that it writes; what they do not say is as in `transformers`. A setting that would change what is
    /// written, and that we do not follow, is an error.
    pub fn generate_settings(&self) -> Result<GenerateSettings> {
        Ok(self.generation_files()?.settings)
    }

    /// How the model's files say that tokens are drawn, whether or not they ask for it.
    pub fn sampling_settings(&self) -> Result<Sampling> {
        Ok(self.generation_files()?.sampling)
    }

    pub(crate) fn generation_files(&self) -> Result<GenerationFiles> {
        let [keys, config] = &self.generation;
        keys.refuse_others()?;
        let mut files = keys.read()?;
        if files.settings.end.is_empty() {
            // What the model was trained with, where only the other file says it.
            files.settings.end = config.ids("eos_token_id")?;
        }
        if let (Some(targets), Some(start)) = (self.config().model.targets(), keys.id("decoder_start_token_id")?) {
            keys.refuse_unless(start == targets.start, "decoder_start_token_id", targets.start)?;
        }
        Ok(files)
    }
}

impl GenerateSettings {
    /// What a `generation_config.json` says; `path` is for messages. What it does not say is as in `transformers`.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self> {
        let keys = Keys { path: path.to_owned(), keys: object(json) };
        keys.refuse_others()?;
        Ok(keys.read()?.settings)
    }
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

/// Keys of a file, for messages with its path.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    path: PathBuf,
    keys: Map<String, Value>,
}

impl Keys {
    /// The file that says how a model writes, and its config.json; the second stands for the first where there is none.
    pub(crate) fn of_directory(directory: &ModelDirectory) -> Result<[Self; 2]> {
        let config = Self { path: directory.path().join("config.json"), keys: object(&directory.config()?) };
        if !directory.has(FILE) {
            return Ok([config.clone(), config]);
        }
        let own = Self { path: directory.path().join(FILE), keys: object(&directory.read_json::<Value>(FILE)?) };
        Ok([own, config])
    }

    /// Refuses keys that change what is written in a way that we do not follow.
    fn refuse_others(&self) -> Result<()> {
        let none: [Value; 0] = [];
        let only: [(&str, Value); 21] = [
            ("num_beam_groups", json!(1)),
            ("diversity_penalty", json!(0.0)),
            ("encoder_no_repeat_ngram_size", json!(0)),
            ("encoder_repetition_penalty", json!(1.0)),
            ("typical_p", json!(1.0)),
            ("epsilon_cutoff", json!(0.0)),
            ("eta_cutoff", json!(0.0)),
            ("renormalize_logits", json!(false)),
            ("bad_words_ids", json!(none)),
            ("force_words_ids", json!(none)),
            ("constraints", json!(none)),
            ("suppress_tokens", json!(none)),
            ("begin_suppress_tokens", json!(none)),
            ("forced_decoder_ids", json!(none)),
            ("exponential_decay_length_penalty", Value::Null),
            ("penalty_alpha", json!(0.0)),
            ("guidance_scale", json!(1.0)),
            ("top_h", Value::Null),
            ("watermarking_config", Value::Null),
            ("dola_layers", Value::Null),
            ("token_healing", json!(false)),
        ];
        for (key, expected) in only {
            let fine = match (self.keys.get(key), expected.as_f64()) {
                (None | Some(Value::Null), _) => true,
                (Some(got), Some(number)) => got.as_f64() == Some(number),
                (Some(got), None) => *got == expected,
            };
            self.refuse_unless(fine, key, expected)?;
        }
        Ok(())
    }

    fn read(&self) -> Result<GenerationFiles> {
        let defaults = GenerateSettings::default();
        let sampling = Sampling {
            temperature: self.number("temperature", 1.0)?,
            top_k: self.count("top_k")?.unwrap_or(TOP_K),
            top_p: self.number("top_p", 1.0)?,
            min_p: self.number("min_p", 0.0)?,
            seed: 0,
        };
        let draws = self.flag("do_sample")?;
        let max_new_tokens = self.count("max_new_tokens")?;
        let settings = GenerateSettings {
            max_new_tokens,
            max_length: self.count("max_length")?,
            min_new_tokens: self.count("min_new_tokens")?.unwrap_or(0),
            min_length: self.count("min_length")?.unwrap_or(0),
            beams: self.count("num_beams")?.unwrap_or(1),
            return_sequences: self.count("num_return_sequences")?.unwrap_or(1),
            sampling: draws.then_some(sampling),
            length_penalty: self.number("length_penalty", 1.0)?,
            early_stopping: self.early_stopping()?,
            repetition_penalty: self.number("repetition_penalty", 1.0)?,
            no_repeat_ngram: self.count("no_repeat_ngram_size")?.unwrap_or(0),
            logit_bias: self.biases()?,
            forced_first: self.id("forced_bos_token_id")?,
            forced_last: self.ids("forced_eos_token_id")?.first().copied(),
            end: self.ids("eos_token_id")?,
            stop: self.texts("stop_strings")?,
            ..defaults
        };
        settings.check()?;
        Ok(GenerationFiles { settings, sampling, first: self.id("bos_token_id")? })
    }

    /// What a key says; `null` says nothing.
    fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn number(&self, key: &'static str, default: f32) -> Result<f32> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().map(|number| number as f32).ok_or_else(|| self.refused(key, "a number"))
    }

    fn count(&self, key: &'static str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.map(Some).ok_or_else(|| self.refused(key, "a whole number"))
    }

    fn flag(&self, key: &'static str) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(false) };
        value.as_bool().ok_or_else(|| self.refused(key, "true or false"))
    }

    fn early_stopping(&self) -> Result<EarlyStopping> {
        match self.get("early_stopping") {
            None | Some(Value::Bool(false)) => Ok(EarlyStopping::No),
            Some(Value::Bool(true)) => Ok(EarlyStopping::Yes),
            Some(never) if never == "never" => Ok(EarlyStopping::Never),
            Some(_) => Err(self.refused("early_stopping", "true, false or \"never\"")),
        }
    }

    /// One id, or a list of them.
    fn ids(&self, key: &'static str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(vec![]) };
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = match value.as_array() {
            Some(all) => all.iter().map(id).collect(),
            None => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.refused(key, "a token id, or a list of them"))
    }

    fn id(&self, key: &'static str) -> Result<Option<u32>> {
        let ids = self.ids(key)?;
        if ids.len() > 1 { Err(self.refused(key, "one token id")) } else { Ok(ids.first().copied()) }
    }

    /// `[[[id], bias], …]`: sequences of one token alone.
    fn biases(&self) -> Result<Vec<(u32, f32)>> {
        const KEY: &str = "sequence_bias";
        let Some(value) = self.get(KEY) else { return Ok(vec![]) };
        let pair = |pair: &Value| {
            let (ids, bias) = (pair.get(0)?.as_array()?, pair.get(1)?.as_f64()?);
            let id = ids.first().filter(|_| ids.len() == 1)?.as_u64()?;
            Some((u32::try_from(id).ok()?, bias as f32))
        };
        let pairs = value.as_array().and_then(|all| all.iter().map(pair).collect());
        pairs.ok_or_else(|| self.refused(KEY, "pairs of a list with one token id and a number"))
    }

    fn texts(&self, key: &'static str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else { return Ok(vec![]) };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let texts: Option<Vec<String>> = match value.as_array() {
            Some(all) => all.iter().map(text).collect(),
            None => text(value).map(|text| vec![text]),
        };
        texts.ok_or_else(|| self.refused(key, "a text, or a list of them"))
    }

    fn refused(&self, key: &str, expected: impl ToString) -> InferError {
        let got = self.keys.get(key).map_or_else(String::new, Value::to_string);
        InferError::GenerationConfig {
            path: self.path.clone(),
            key: key.to_owned(),
            got,
            expected: expected.to_string(),
        }
    }

    fn refuse_unless(&self, fine: bool, key: &str, expected: impl ToString) -> Result<()> {
        if fine { Ok(()) } else { Err(self.refused(key, expected)) }
    }
}
