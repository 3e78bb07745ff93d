//! One vector a text. A directory of sentence-transformers says itself how (modules.json, its pooling and its maximum
//! length); others get the mean of their tokens.

use std::path::Path;

use henson_checkpoint::ModelDirectory;
use henson_tensor::Pooling;
use henson_text::Pieces;
use serde_json::{Value, json};

use crate::{InferError, Length, Model, Read, Request, Result, join_windows, normalise};

/// How texts become vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedSettings {
    /// How the tokens of a sequence become one vector.
    pub pooling: Pooling,
    /// Whether vectors get the length 1.
    pub normalise: bool,
    /// The most tokens of a sequence, where the directory sets one below the model's.
    pub most_tokens: Option<usize>,
}

/// The vector of a text.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// H numbers.
    pub vector: Vec<f32>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

impl EmbedSettings {
    /// What a directory asks for: sentence-transformers' files where it has them, else the mean, not normalised.
    pub fn of_directory(path: &Path) -> Result<Self> {
        let directory = ModelDirectory::open(path)?;
        let mut settings = Self { pooling: Pooling::Mean, normalise: false, most_tokens: None };
        if !directory.has("modules.json") {
            return Ok(settings);
        }
        let unsupported = |file: &str, what: String| InferError::SentenceTransformer { path: path.join(file), what };
        let modules: Vec<Value> = directory.read_json("modules.json")?;
        for module in &modules {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or("");
            // Both the old and the new names of the classes end like this.
            match text("type").rsplit('.').next().unwrap_or("") {
                "Transformer" => {}
                "Normalize" => settings.normalise = true,
                "Pooling" => {
                    let folder = text("path");
                    if folder.contains("..") || folder.starts_with('/') {
                        return Err(unsupported("modules.json", format!("the path `{folder}` leads elsewhere")));
                    }
                    let file =
                        if folder.is_empty() { "config.json".to_owned() } else { format!("{folder}/config.json") };
                    let config: Value = directory.read_json(&file)?;
                    settings.pooling = pooling_of(&config).map_err(|what| unsupported(&file, what))?;
                }
                other => {
                    let what = format!("the module `{other}` is not supported: Transformer, Pooling and Normalize are");
                    return Err(unsupported("modules.json", what));
                }
            }
        }
        if directory.has("sentence_bert_config.json") {
            let config: Value = directory.read_json("sentence_bert_config.json")?;
            let most = config.get("max_seq_length").and_then(Value::as_u64);
            settings.most_tokens = most.and_then(|most| usize::try_from(most).ok());
        }
        Ok(settings)
    }

    /// The files beside a model of so many columns that say so, as sentence-transformers reads them.
    pub fn files(&self, hidden_size: usize) -> Vec<(String, Vec<u8>)> {
        let module = |number: usize, name: &str, path: &str| {
            let class = format!("sentence_transformers.models.{name}");
            json!({"idx": number, "name": number.to_string(), "path": path, "type": class})
        };
        let mut modules = vec![module(0, "Transformer", ""), module(1, "Pooling", "1_Pooling")];
        if self.normalise {
            modules.push(module(2, "Normalize", "2_Normalize"));
        }
        let mut pooling = json!({"word_embedding_dimension": hidden_size});
        for (key, _, known) in POOLINGS {
            pooling[key] = json!(known == self.pooling);
        }
        let mut files = vec![("modules.json", Value::Array(modules)), ("1_Pooling/config.json", pooling)];
        if let Some(most) = self.most_tokens {
            files.push(("sentence_bert_config.json", json!({"max_seq_length": most, "do_lower_case": false})));
        }
        files.into_iter().map(|(name, value)| (name.to_owned(), format!("{value:#}\n").into_bytes())).collect()
    }
}

/// The poolings that are known: their keys in configs, then the short names that newer ones have.
const POOLINGS: [(&str, &str, Pooling); 3] = [
    ("pooling_mode_cls_token", "cls", Pooling::First),
    ("pooling_mode_mean_tokens", "mean", Pooling::Mean),
    ("pooling_mode_max_tokens", "max", Pooling::Max),
];

/// The one pooling that a config switches on.
fn pooling_of(config: &Value) -> Result<Pooling, String> {
    if let Some(name) = config.get("pooling_mode").and_then(Value::as_str) {
        let known = POOLINGS.iter().find(|(_, short, _)| *short == name);
        return known.map(|(.., pooling)| *pooling).ok_or_else(|| format!("pooling `{name}` is not supported"));
    }
    let keys = config.as_object().into_iter().flatten();
    let on: Vec<&str> = keys
        .filter(|(key, value)| key.starts_with("pooling_mode_") && value.as_bool() == Some(true))
        .map(|(key, _)| key.as_str())
        .collect();
    match on[..] {
        [key] => {
            let known = POOLINGS.iter().find(|(long, ..)| *long == key);
            known.map(|(.., pooling)| *pooling).ok_or_else(|| format!("`{key}` is not supported"))
        }
        [] => Err("no pooling mode is switched on".to_owned()),
        _ => Err(format!("several pooling modes at once are not supported: {}", on.join(", "))),
    }
}

impl Model {
    /// One vector for each text. With windows, a long text's vector is the mean of its windows' (weighted by their
    /// tokens), or their largest values with [`Pooling::Max`].
    pub fn embed(&self, texts: &[&str], settings: EmbedSettings, windows: bool) -> Result<Vec<Embedding>> {
        self.ask(texts, |text| {
            let pieces = Pieces { ids: self.tokenizer().encode_ids(text)?, ..Pieces::default() };
            self.prepare_embed(&pieces, settings, windows)
        })
    }

    /// [`embed`](Self::embed) for the pieces of one text, to be run. Their ids are enough.
    pub fn prepare_embed(&self, pieces: &Pieces, settings: EmbedSettings, windows: bool) -> Result<Request<Embedding>> {
        let (windows, dropped) = self.windows_of(pieces, Length { most: settings.most_tokens, windows })?;
        Ok(Request::new(windows, Read::Pooled(settings.pooling), dropped, move |_, read| {
            let parts = read.into_iter().map(|(window, output)| (window.len(), output.numbers));
            let mut vector = join(parts, settings.pooling);
            if settings.normalise {
                normalise(&mut vector);
            }
            Embedding { vector, dropped }
        }))
    }

    /// A vector from the last layer for each token of a text that is cut to `most` tokens or the model's limit, special ones
    /// included, row after row. To be run.
    pub fn prepare_tokens(&self, pieces: &Pieces, most: Option<usize>) -> Result<Request<Vec<f32>>> {
        let (windows, dropped) = self.windows_of(pieces, Length { most, windows: false })?;
        Ok(Request::new(windows, Read::Tokens, dropped, |_, read| {
            read.into_iter().next().map(|(_, output)| output.numbers).unwrap_or_default()
        }))
    }
}

/// One vector from those of a text's windows, each with its number of tokens.
fn join(parts: impl Iterator<Item = (usize, Vec<f32>)>, pooling: Pooling) -> Vec<f32> {
    if pooling != Pooling::Max {
        return join_windows(parts);
    }
    let largest = |a: Vec<f32>, b: Vec<f32>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
    parts.map(|(_, vector)| vector).reduce(largest).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("1_Pooling")).unwrap();
        std::fs::write(place.path().join("config.json"), "{}").unwrap();
        for pooling in [Pooling::Mean, Pooling::First, Pooling::Max] {
            for (normalise, most_tokens) in [(true, Some(128)), (false, Some(7))] {
                let settings = EmbedSettings { pooling, normalise, most_tokens };
                for (name, bytes) in settings.files(4) {
                    std::fs::write(place.path().join(name), bytes).unwrap();
                }
                assert_eq!(EmbedSettings::of_directory(place.path()).unwrap(), settings);
            }
        }
    }

    #[test]
    fn pooling_configs() {
        let old =
            json!({"word_embedding_dimension": 4, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true});
        assert_eq!(pooling_of(&old), Ok(Pooling::Mean));
        assert_eq!(pooling_of(&json!({"pooling_mode": "cls"})), Ok(Pooling::First));
        let both = json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true});
        assert!(pooling_of(&both).unwrap_err().contains("several"));
        assert!(pooling_of(&json!({"pooling_mode_lasttoken": true})).unwrap_err().contains("lasttoken"));
        assert!(pooling_of(&json!({})).is_err());
    }

    #[test]
    fn windows_are_joined_by_their_tokens() {
        let parts = || vec![(1, vec![1.0, -4.0]), (3, vec![5.0, 8.0])].into_iter();
        assert_eq!(join(parts(), Pooling::Mean), [4.0, 5.0]);
        assert_eq!(join(parts(), Pooling::Max), [5.0, 8.0]);
        assert_eq!(join([(2, vec![7.0])].into_iter(), Pooling::First), [7.0]);
    }
}
