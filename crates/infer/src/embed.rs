//! One vector a text. A directory of sentence-transformers says itself how (modules.json, its pooling, dense layers, prompts and
//! maximum length); others get the mean of their tokens.

use std::path::Path;

use henson_text::{Pieces, Slot};
use serde_json::{Value, json};

use crate::pooling::{Layer, Pooling};
use crate::sentence::{Files, Prompts, SentenceKind, Steps};
use crate::{InferError, Length, Model, Read, Request, Result, join_windows, normalise};

/// How texts become vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedSettings {
    /// How the tokens of a sequence become one vector; several lie side by side.
    pub pooling: Vec<Pooling>,
    /// What follows.
    pub layers: Vec<Layer>,
    /// Whether vectors get the length 1 at the end.
    pub normalise: bool,
    /// Maximum number of tokens of a sequence, where the directory sets one below the model's.
    pub most_tokens: Option<usize>,
    /// What is put before each text.
    pub prompt: String,
    /// Whether the tokens of the prompt, and the special ones before them, count in the vector.
    pub include_prompt: bool,
}

impl Default for EmbedSettings {
    /// The mean, not normalised.
    fn default() -> Self {
        Self {
            pooling: vec![Pooling::Mean],
            layers: Vec::new(),
            normalise: false,
            most_tokens: None,
            prompt: String::new(),
            include_prompt: true,
        }
    }
}

/// What a directory says of sentences' vectors beyond [`EmbedSettings`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentenceFacts {
    /// What sentence-transformers would make of it; nothing where it is not one of their directories.
    pub kind: Option<SentenceKind>,
    /// Its prompts.
    pub prompts: Prompts,
    /// How vectors are compared, in its own words (`cosine`, `dot`, …).
    pub similarity: Option<String>,
}

impl SentenceFacts {
    /// What the files of a directory say.
    pub fn of_directory(path: &Path) -> Result<Self> {
        let files = Files::open(path)?;
        Ok(Self { kind: files.kind()?, prompts: files.prompts()?, similarity: files.similarity()? })
    }
}

/// The vector of a text.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// As many numbers as [`EmbedSettings::width`] says.
    pub vector: Vec<f32>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

impl EmbedSettings {
    /// What a directory asks for: sentence-transformers' files where it has them (with the default prompt, if it has one), else
    /// the mean, not normalised.
    pub fn of_directory(path: &Path) -> Result<Self> {
        let files = Files::open(path)?;
        let Some(Steps { pooling, include_prompt, mut layers, max_tokens }) = files.steps()? else {
            return Ok(Self::default());
        };
        let normalise = layers.last() == Some(&Layer::Normalise);
        while layers.last() == Some(&Layer::Normalise) {
            layers.pop();
        }
        // The default prompt is one of them: that was checked.
        let prompt = files.prompts()?.get(None).unwrap_or_default().to_owned();
        Ok(Self { pooling, layers, normalise, most_tokens: max_tokens, prompt, include_prompt })
    }

    /// The numbers of a vector of a model with so many columns. Layers that do not fit each other are an error.
    pub fn width(&self, hidden_size: usize) -> Result<usize> {
        let mut width = self.pooling.len() * hidden_size;
        for layer in &self.layers {
            if let Layer::Dense(dense) = layer {
                if dense.inputs != width {
                    return Err(InferError::DenseWidth { expected: dense.inputs, got: width });
                }
                width = dense.outputs;
            }
        }
        Ok(width)
    }

    /// The files beside a model of so many columns that say so, as sentence-transformers reads them; not for dense layers, whose
    /// weights are elsewhere.
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
        for known in Pooling::ALL {
            pooling[known.flag()] = json!(self.pooling.contains(&known));
        }
        let mut files = vec![("modules.json", Value::Array(modules)), ("1_Pooling/config.json", pooling)];
        if let Some(most) = self.most_tokens {
            files.push(("sentence_bert_config.json", json!({"max_seq_length": most, "do_lower_case": false})));
        }
        files.into_iter().map(|(name, value)| (name.to_owned(), format!("{value:#}\n").into_bytes())).collect()
    }
}

impl Model {
    /// One vector for each text. With windows, a long text's vector is the mean of its windows' (weighted by their
    /// tokens), or their largest values with [`Pooling::Max`].
    pub fn embed(&self, texts: &[&str], settings: &EmbedSettings, windows: bool) -> Result<Vec<Embedding>> {
        let prompt = self.prompt_pieces(settings)?;
        self.ask(texts, |text| {
            let ids = match settings.prompt.as_str() {
                "" => self.tokenizer().encode_ids(text)?,
                prompt => self.tokenizer().encode_ids(&format!("{prompt}{text}"))?,
            };
            self.prepare_embed(&Pieces { ids, ..Pieces::default() }, settings, prompt, windows)
        })
    }

    /// How many pieces the prompt has, where they do not count in vectors.
    pub fn prompt_pieces(&self, settings: &EmbedSettings) -> Result<Option<usize>> {
        if settings.include_prompt || settings.prompt.is_empty() {
            return Ok(None);
        }
        Ok(Some(self.tokenizer().encode_ids(&settings.prompt)?.len()))
    }

    /// [`embed`](Self::embed) for the pieces of one text, to be run. Their ids are enough. So many pieces at their beginning
    /// (see [`prompt_pieces`](Self::prompt_pieces)) and the special tokens before them do not count in the vector.
    pub fn prepare_embed(
        &self,
        pieces: &Pieces,
        settings: &EmbedSettings,
        prompt: Option<usize>,
        windows: bool,
    ) -> Result<Request<Embedding>> {
        let hidden = self.config().model.sizes().hidden_size;
        settings.width(hidden)?;
        let (windows, dropped) = self.windows_of(pieces, Length { most: settings.most_tokens, windows })?;
        let slots = self.tokenizer().template().single_slots();
        let before = slots.iter().take_while(|slot| matches!(slot, Slot::Special { .. })).count();
        let starts: Vec<usize> = windows.iter().map(|window| window.first_piece).collect();
        let read = Read::Pooled { pooling: settings.pooling.clone(), skip: 0 };
        let (layers, normalised, poolings) = (settings.layers.clone(), settings.normalise, settings.pooling.clone());
        let mut request = Request::new(windows, read, dropped, move |_, read| {
            let parts = read.into_iter().map(|(window, output)| (window.len(), output.numbers)).collect();
            let mut vector = join(parts, &poolings, hidden);
            for layer in &layers {
                match layer {
                    Layer::Dense(dense) => vector = dense.apply(&vector),
                    Layer::Normalise => normalise(&mut vector),
                }
            }
            if normalised {
                normalise(&mut vector);
            }
            Embedding { vector, dropped }
        });
        for (sequence, start) in request.sequences.iter_mut().zip(starts) {
            let skip =
                prompt.filter(|pieces| start == 0 || *pieces > start).map_or(0, |pieces| before + pieces - start);
            sequence.read = Read::Pooled { pooling: settings.pooling.clone(), skip };
        }
        Ok(request)
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

/// One vector from those of a text's windows, each with its number of tokens: pooling by pooling, of so many columns each.
fn join(parts: Vec<(usize, Vec<f32>)>, poolings: &[Pooling], hidden: usize) -> Vec<f32> {
    if parts.len() == 1 {
        return parts.into_iter().map(|(_, vector)| vector).next().unwrap_or_default();
    }
    let mut joined = Vec::with_capacity(poolings.len() * hidden);
    for (i, pooling) in poolings.iter().enumerate() {
        let parts = parts.iter().map(|(tokens, vector)| (*tokens, vector[i * hidden..(i + 1) * hidden].to_vec()));
        joined.extend(match pooling {
            Pooling::Max => {
                let largest = |a: Vec<f32>, b: Vec<f32>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
                parts.map(|(_, vector)| vector).reduce(largest).unwrap_or_default()
            }
            _ => join_windows(parts),
        });
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("1_Pooling")).unwrap();
        std::fs::write(place.path().join("config.json"), "{}").unwrap();
        for pooling in [vec![Pooling::Mean], vec![Pooling::First], vec![Pooling::Max, Pooling::Last]] {
            for (normalise, most_tokens) in [(true, Some(128)), (false, Some(7))] {
                let pooling = pooling.clone();
                let settings = EmbedSettings { pooling, normalise, most_tokens, ..EmbedSettings::default() };
                for (name, bytes) in settings.files(4) {
                    std::fs::write(place.path().join(name), bytes).unwrap();
                }
                assert_eq!(EmbedSettings::of_directory(place.path()).unwrap(), settings);
            }
        }
    }

    #[test]
    fn windows_are_joined_by_their_tokens() {
        let parts = || vec![(1, vec![1.0, -4.0]), (3, vec![5.0, 8.0])];
        assert_eq!(join(parts(), &[Pooling::Mean], 2), [4.0, 5.0]);
        assert_eq!(join(parts(), &[Pooling::Max], 2), [5.0, 8.0]);
        assert_eq!(join(parts(), &[Pooling::Max, Pooling::Mean], 1), [5.0, 5.0]);
        assert_eq!(join(vec![(2, vec![7.0])], &[Pooling::First], 1), [7.0]);
    }
}
