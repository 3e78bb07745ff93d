//! How well texts answer a query, by a cross-encoder: a sequence classifier with one label that reads both together.

use crate::pooling::Activation;
use crate::{InferError, Input, Length, Model, Request, Result};

/// How well a text answers a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// The logit.
    pub logit: f32,
    /// The logit through the activation of [`Model::rerank_activation`].
    pub score: f32,
    /// Pieces that were cut off because the pair was too long.
    pub dropped: usize,
}

impl Model {
    /// What scores go through: what the model's files name (`activation_fn` in config_sentence_transformers.json, then
    /// `sentence_transformers.activation_fn` and `sbert_ce_default_activation_function` in config.json), as in
    /// sentence-transformers' CrossEncoder; else the sigmoid.
    pub fn rerank_activation(&self) -> Result<Activation> {
        self.activation.as_deref().map_or(Ok(Activation::Sigmoid), |name| {
            let wrong = |what| InferError::SentenceTransformer { path: self.path().to_owned(), what };
            Activation::of_class(name).map_err(wrong)
        })
    }

    /// How pairs are read unless told otherwise: as in fine-tuning, where config.json says how that was, else as much as the
    /// tokenizer's files allow, cut.
    pub fn rerank_length(&self) -> Length {
        let own = self.task_length();
        Length { most: own.most.or(self.tokenizer().max_length()), ..own }
    }

    /// Scores each text. A pair that is too long loses the end of its longer text, or is divided with windows.
    pub fn rerank(&self, query: &str, texts: &[&str], length: Length) -> Result<Vec<Ranked>> {
        self.ask(texts, |text| self.prepare_rerank(query, text, length))
    }

    /// [`rerank`](Self::rerank) for one text, to be run.
    pub fn prepare_rerank(&self, query: &str, text: &str, length: Length) -> Result<Request<Ranked>> {
        let request = self.prepare_logits(Input::Pair(query, text), length)?;
        let labels = self.config().task.labels();
        if labels != 1 {
            return Err(InferError::NotAReranker { path: self.path().to_owned(), labels });
        }
        let (activation, dropped) = (self.rerank_activation()?, request.dropped);
        Ok(request.map(move |logits| {
            let logit = logits.first().copied().unwrap_or(0.0);
            Ranked { logit, score: activation.apply(f64::from(logit)) as f32, dropped }
        }))
    }
}
