//! The routes: what each takes and gives. One table makes the router, the OpenAPI document and the page that lists them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use base64::Engine;
use henson_infer::{
    Ability, EmbedSettings, Embedding as Embedded, Filled, InferError, Length, Request, Task, dot, normalise,
};
use henson_text::{Pieces, Slot, TextError, Tokenizer, code_point_offsets};
use serde_json::{Value, json};

use crate::app::{Answer, App, Call};
use crate::error::{ApiError, Kind};
use crate::generate::{completions, text_generation};
use crate::models::{Cut, Loaded, OPENAI_FIELD};
use crate::wire::{self, Input, TruncationDirection};
use crate::{answers, inside, runs};

/// A field of a body: its name, its schema as JSON, and what it is.
type Field = (&'static str, &'static str, &'static str);

/// A route, as it is served and as it is documented.
pub(crate) struct Route {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    /// Whether it is also there as `/models/NAME/…`.
    pub(crate) of_model: bool,
    /// One line.
    pub(crate) summary: &'static str,
    /// The names of the body's fields with their schemas, as JSON; what is required first has a `*`.
    pub(crate) fields: &'static [Field],
    /// A body that works.
    pub(crate) example: &'static str,
    pub(crate) handler: fn() -> MethodRouter<App>,
}

impl Route {
    /// One without a body, and not of a model.
    const fn get(path: &'static str, summary: &'static str, handler: fn() -> MethodRouter<App>) -> Self {
        Self { method: "get", path, of_model: false, summary, fields: &[], example: "", handler }
    }

    /// One that a model answers.
    const fn post(
        path: &'static str,
        summary: &'static str,
        fields: &'static [Field],
        example: &'static str,
        handler: fn() -> MethodRouter<App>,
    ) -> Self {
        Self { method: "post", path, of_model: true, summary, fields, example, handler }
    }
}

const TEXTS: &str = r#"{"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}"#;
const INPUTS: &str = r#"{"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]}"#;
const PAIRS: &str = r#"{"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}]}"#;
const STRING: &str = r#"{"type": "string"}"#;
const STRINGS: &str = r#"{"type": "array", "items": {"type": "string"}}"#;
const DOCUMENTS: &str = r#"{"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}]}}"#;
const BOOLEAN: &str = r#"{"type": "boolean"}"#;
const INTEGER: &str = r#"{"type": "integer", "minimum": 1}"#;
const COUNT: &str = r#"{"type": "integer", "minimum": 0}"#;
const WHOLE: &str = r#"{"type": "integer"}"#;
const NUMBER: &str = r#"{"type": "number"}"#;
const DIRECTION: &str = r#"{"type": "string", "enum": ["Left", "Right"]}"#;
const MODEL: Field = ("model", STRING, "which model; without it, the first that is made for this");
/// For requests that clients of other servers send.
const MODEL_OR_OTHER: Field = (
    "model",
    STRING,
    "which model; without it, the first that is made for this: for vectors sentence models, then other encoders. A name that is \
     not served is taken for the only such model, with the header x-model-warning, unless --strict-model-names was given",
);
const TRUNCATE: Field = ("truncate", BOOLEAN, "cut texts that are too long instead of refusing them");
const SIDE: Field = ("truncation_direction", DIRECTION, "which end of a long text is cut off");
const PROMPT: Field = ("prompt_name", STRING, "the name of one of the model's prompts, put before each text");
const AGGREGATION: Field = (
    "aggregation_strategy",
    r#"{"type": "string", "enum": ["none", "simple", "first", "average", "max"]}"#,
    "transformers' ways from tokens to entities (default: whole words by their first token, joined by what the labels mean)",
);
const EMBED: [Field; 7] = [
    ("*inputs", INPUTS, "a text, several, or token ids"),
    ("normalize", BOOLEAN, "whether vectors are normalized to length 1 (default: yes)"),
    TRUNCATE,
    SIDE,
    PROMPT,
    ("dimensions", INTEGER, "truncate each vector to this many dimensions"),
    MODEL_OR_OTHER,
];

const COMPLETION: [Field; 18] = [
    ("*prompt", INPUTS, "a text, several, or token ids"),
    MODEL_OR_OTHER,
    ("max_tokens", COUNT, "maximum number of tokens to write (default: 16)"),
    ("temperature", NUMBER, "0 to 2: what logits are divided by; 0 takes the likeliest token (default: 1)"),
    ("top_p", NUMBER, "0 to 1: draw from the likeliest tokens that reach this probability (default: 1)"),
    ("n", INTEGER, "completions of each prompt, up to 128 (default: 1)"),
    ("best_of", INTEGER, "write so many and give the `n` best by their mean log-probability; not in a stream"),
    ("stream", BOOLEAN, "send parts while they are written, as server-sent events up to [DONE]"),
    (
        "stream_options",
        r#"{"type": "object", "properties": {"include_usage": {"type": "boolean"}}}"#,
        "include_usage: a last part with the number of tokens",
    ),
    ("stop", TEXTS, "up to four texts that end a completion; they are not part of it"),
    ("seed", WHOLE, "the same seed draws the same tokens (default: another one each time)"),
    ("echo", BOOLEAN, "begin with the prompt"),
    ("logprobs", COUNT, "0 to 5: log-probabilities of each token and of so many alternatives"),
    (
        "logit_bias",
        r#"{"type": "object", "additionalProperties": {"type": "number"}}"#,
        "up to 300 token ids with what is added to their logits, -100 to 100",
    ),
    ("presence_penalty", NUMBER, "-2 to 2: subtracted from the logits of tokens that were written (default: 0)"),
    ("frequency_penalty", NUMBER, "-2 to 2: the same for every time that a token was written (default: 0)"),
    ("user", STRING, "taken and not used"),
    ("suffix", r#"{"type": "null"}"#, "not supported"),
];
const GENERATE: [Field; 4] = [
    ("*inputs", STRING, "the text to continue, or to read"),
    (
        "parameters",
        r#"{"type": "object", "properties": {"max_new_tokens": {"type": "integer", "default": 20}, "do_sample": {"type": "boolean"}, "temperature": {"type": "number"}, "top_k": {"type": "integer"}, "top_p": {"type": "number"}, "min_p": {"type": "number"}, "repetition_penalty": {"type": "number"}, "frequency_penalty": {"type": "number"}, "seed": {"type": "integer"}, "stop": {"type": "array", "items": {"type": "string"}, "maxItems": 4}, "best_of": {"type": "integer"}, "return_full_text": {"type": "boolean"}, "details": {"type": "boolean"}, "decoder_input_details": {"type": "boolean"}, "top_n_tokens": {"type": "integer"}, "truncate": {"type": "integer"}}}"#,
        "how; without any of temperature, top_k, top_p, min_p and do_sample, the likeliest token each time",
    ),
    ("stream", BOOLEAN, "for POST /, where it asks for a stream"),
    MODEL_OR_OTHER,
];

/// All routes that a key protects.
pub(crate) const ROUTES: [Route; 27] = [
    Route::post(
        "/embed",
        "A vector for each text",
        &EMBED,
        r#"{"inputs": ["Jim Henson was a puppeteer.", "He made puppets."]}"#,
        || post(embed),
    ),
    Route::post(
        "/embed_all",
        "A vector for each token of each text, special tokens included",
        &[("*inputs", INPUTS, "a text, several, or token ids"), TRUNCATE, SIDE, PROMPT, MODEL_OR_OTHER],
        r#"{"inputs": "Jim Henson"}"#,
        || post(embed_all),
    ),
    Route::post(
        "/similarity",
        "The cosine between one sentence and others",
        &[
            (
                "*inputs",
                r#"{"type": "object", "required": ["source_sentence", "sentences"], "properties": {"source_sentence": {"type": "string"}, "sentences": {"type": "array", "items": {"type": "string"}}}}"#,
                "the sentence, and those to compare it with",
            ),
            (
                "parameters",
                r#"{"type": "object", "properties": {"truncate": {"type": "boolean"}, "truncation_direction": {"type": "string", "enum": ["Left", "Right"]}, "prompt_name": {"type": "string"}}}"#,
                "as for /embed",
            ),
            MODEL_OR_OTHER,
        ],
        r#"{"inputs": {"source_sentence": "A puppet show.", "sentences": ["He made puppets.", "It rains."]}}"#,
        || post(similarity),
    ),
    Route::post(
        "/v1/embeddings",
        "A vector for each text, as OpenAI's clients expect it",
        &[
            ("*input", INPUTS, "a text, several, or token ids"),
            MODEL_OR_OTHER,
            (
                "encoding_format",
                r#"{"type": "string", "enum": ["float", "base64"]}"#,
                "numbers, or their bytes in base64",
            ),
            ("dimensions", INTEGER, "truncate each vector to this many dimensions"),
            ("user", STRING, "taken and not used"),
        ],
        r#"{"input": "Jim Henson was a puppeteer."}"#,
        || post(openai),
    ),
    Route::post(
        "/v1/completions",
        "Texts that continue prompts, as OpenAI's clients expect them; needs a model that writes",
        &COMPLETION,
        r#"{"prompt": "Jim Henson was", "max_tokens": 8, "temperature": 0}"#,
        || post(completions::completions),
    ),
    Route::post(
        "/generate",
        "A text that continues another, as in Text Generation Inference; needs a model that writes",
        &GENERATE,
        r#"{"inputs": "Jim Henson was", "parameters": {"max_new_tokens": 8, "details": true}}"#,
        || post(text_generation::generate),
    ),
    Route::post(
        "/generate_stream",
        "The same as server-sent events, one for each token",
        &GENERATE,
        r#"{"inputs": "Jim Henson was", "parameters": {"max_new_tokens": 8}}"#,
        || post(text_generation::generate_stream),
    ),
    Route::get("/v1/models", "The models, as OpenAI's clients expect them", || get(openai_models)),
    Route::post(
        "/tokenize",
        "The tokens of texts, with ids and character offsets",
        &[
            ("*inputs", TEXTS, "a text or several"),
            ("add_special_tokens", BOOLEAN, "with [CLS] and [SEP] (default: yes)"),
            PROMPT,
            MODEL_OR_OTHER,
        ],
        r#"{"inputs": "Jim Henson"}"#,
        || post(tokenize),
    ),
    Route::post(
        "/decode",
        "The text of token ids",
        &[
            (
                "*ids",
                r#"{"oneOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]}"#,
                "ids, or lists of them",
            ),
            ("skip_special_tokens", BOOLEAN, "without [CLS] and [SEP] (default: yes)"),
            MODEL_OR_OTHER,
        ],
        r#"{"ids": [5, 6, 7]}"#,
        || post(decode),
    ),
    Route::post(
        "/fill",
        "The most likely tokens for each [MASK]; needs a masked language model",
        &[
            ("*inputs", TEXTS, "texts with [MASK] in them"),
            ("top", INTEGER, "how many predictions for each mask (default: 5)"),
            TRUNCATE,
            MODEL,
        ],
        r#"{"inputs": "The capital of France is [MASK].", "top": 3}"#,
        || post(fill),
    ),
    Route::post(
        "/predict",
        "Labels with scores for texts or text pairs; needs a sequence classifier",
        &[
            ("*inputs", PAIRS, "a text, a pair [text, text], or a list [[text], [text, text], …] of both"),
            TRUNCATE,
            ("raw_scores", BOOLEAN, "logits instead of probabilities"),
            MODEL_OR_OTHER,
        ],
        r#"{"inputs": "A charming film."}"#,
        || post(answers::predict),
    ),
    Route::post(
        "/rerank",
        "Texts ranked by their relevance to a query; needs a sequence classifier with one label",
        &[
            ("*query", STRING, "the query"),
            ("*texts", STRINGS, "the texts to rank"),
            TRUNCATE,
            ("raw_scores", BOOLEAN, "logits, without the activation of the model's files (otherwise the sigmoid)"),
            ("return_text", BOOLEAN, "whether to return the texts"),
            MODEL_OR_OTHER,
        ],
        r#"{"query": "Who made the Muppets?", "texts": ["It rains.", "Jim Henson did."]}"#,
        || post(answers::rerank),
    ),
    Route::post(
        "/v1/rerank",
        "Documents ranked by their relevance to a query, as Jina and version 1 of Cohere have it",
        &[
            ("*query", STRING, "the query"),
            ("*documents", DOCUMENTS, "texts, or objects with a `text`"),
            ("top_n", INTEGER, "how many documents to return, the best first (default: all)"),
            ("return_documents", BOOLEAN, "whether to return the texts (default: yes)"),
            MODEL_OR_OTHER,
        ],
        r#"{"query": "Who made the Muppets?", "documents": ["It rains.", "Jim Henson did."], "top_n": 1}"#,
        || post(answers::rerank_documents),
    ),
    Route::post(
        "/v2/rerank",
        "The same as version 2 of Cohere has it",
        &[
            ("*query", STRING, "the query"),
            ("*documents", DOCUMENTS, "texts, or objects with a `text`"),
            ("top_n", INTEGER, "how many documents to return, the best first (default: all)"),
            ("max_tokens_per_doc", INTEGER, "tokens of a document that are read (default: as many as the model reads)"),
            MODEL_OR_OTHER,
        ],
        r#"{"query": "Who made the Muppets?", "documents": ["It rains.", "Jim Henson did."], "top_n": 1}"#,
        || post(answers::rerank_documents_2),
    ),
    Route::post(
        "/zero_shot",
        "Scores for labels of your own; needs a classifier of natural language inference",
        &[
            ("*inputs", TEXTS, "a text or several"),
            ("*candidate_labels", TEXTS, "the labels: a list, or one text with commas between them"),
            ("hypothesis_template", STRING, "a sentence with {} where a label goes (default: This example is {}.)"),
            (
                "multi_label",
                BOOLEAN,
                "whether several labels may hold, each with a probability of its own (default: no)",
            ),
            MODEL,
        ],
        r#"{"inputs": "The match ended in a draw.", "candidate_labels": ["sport", "politics"]}"#,
        || post(answers::zero_shot),
    ),
    Route::post(
        "/tag",
        "Entities with their character offsets; needs a token classifier",
        &[("*inputs", TEXTS, "a text or several"), AGGREGATION, MODEL],
        r#"{"inputs": "Jim Henson lived in London."}"#,
        || post(answers::tag),
    ),
    Route::post(
        "/answer",
        "Answers to a question within a passage, with their character offsets and scores; needs a question-answering model",
        &[
            ("*question", STRING, "the question"),
            ("*context", STRING, "the passage, of any length"),
            ("top", INTEGER, "how many answers (default: 5)"),
            MODEL,
        ],
        r#"{"question": "Where did Jim Henson live?", "context": "Jim Henson lived in London."}"#,
        || post(answers::answer),
    ),
    Route::post(
        "/choose",
        "Which of several continuations fits best; needs a multiple-choice model",
        &[("*context", STRING, "the text to continue"), ("*choices", STRINGS, "the continuations"), MODEL],
        r#"{"context": "He picked up the puppet", "choices": ["and made it speak.", "and it rained."]}"#,
        || post(answers::choose),
    ),
    Route::post(
        "/inside/attention",
        "What each head of each layer attends to, token by token",
        &[("*inputs", STRING, "one text of up to 128 tokens"), MODEL],
        r#"{"inputs": "Jim Henson was a puppeteer."}"#,
        || post(inside::attention),
    ),
    Route::post(
        "/inside/neighbours",
        "How similar the uses of a word in several texts are",
        &[("*word", STRING, "the word"), ("*inputs", STRINGS, "texts that hold it"), MODEL],
        r#"{"word": "play", "inputs": ["A play by Shakespeare.", "Children play outside.", "They play chess."]}"#,
        || post(inside::neighbours),
    ),
    Route {
        method: "get",
        path: "/info",
        of_model: true,
        summary: "What a model is, and the limits of this server",
        fields: &[],
        example: "",
        handler: || get(info),
    },
    Route::get("/models", "The models with what they can do", || get(models)),
    Route::get("/metrics", "Counts and times for Prometheus", || get(metrics)),
    Route::get("/runs", "The training runs below --runs", || get(runs::list)),
    Route::get("/runs/{run}", "The log of a run from a byte offset on (?from=BYTES), for polling", || get(runs::log)),
    Route {
        method: "post",
        path: "/",
        of_model: false,
        summary: "What the first model is for: /embed, /predict for a classifier, /rerank for a re-ranker, as in Text Embeddings Inference; /generate for a model that writes, as in Text Generation Inference",
        fields: &[],
        example: r#"{"inputs": "Jim Henson was a puppeteer."}"#,
        handler: || post(root),
    },
];

/// Texts longer than this are cut into pieces on another thread, so that nobody else waits for it.
const LONG: usize = 1 << 14;

/// Runs something that may take long where it delays nobody.
pub(crate) async fn off_the_road<R: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    if bytes <= LONG {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => {
            Err(ApiError::new(Kind::Backend, "tokenizing the texts failed unexpectedly; this is a bug in henson"))
        }
    }
}

/// The answer of a model to a request that is prepared where it delays nobody.
pub(crate) async fn ask<A: 'static>(
    model: &Arc<Loaded>,
    bytes: usize,
    prepare: impl FnOnce(&Loaded) -> Result<Request<A>, ApiError> + Send + 'static,
) -> Result<Answer<A>, ApiError> {
    let theirs = Arc::clone(model);
    let request = off_the_road(bytes, move || prepare(&theirs)).await?;
    model.run(request).await
}

/// At least one, and no more than the settings allow.
pub(crate) fn check_count(app: &App, count: usize, what: &str) -> Result<(), ApiError> {
    let most = app.settings.most_texts;
    if count == 0 {
        return Err(ApiError::new(Kind::Empty, format!("`{what}` is empty")));
    }
    if count > most {
        let message = format!("`{what}` has {count} entries, this server takes {most}: divide the request");
        return Err(ApiError::new(Kind::TooLarge, message));
    }
    Ok(())
}

/// How the requests for vectors say what is wanted.
struct Embedding {
    /// What the request calls the inputs.
    field: &'static str,
    inputs: Vec<Input>,
    truncate: Option<bool>,
    direction: TruncationDirection,
    prompt_name: Option<String>,
}

/// What is asked of each input.
async fn of_inputs<A: 'static>(
    app: &App,
    model: &Arc<Loaded>,
    wanted: Embedding,
    prepare: impl Fn(&Loaded, &Pieces, Option<usize>) -> Result<Request<A>, InferError> + Send + 'static,
) -> Result<Answer<Vec<A>>, ApiError> {
    check_count(app, wanted.inputs.len(), wanted.field)?;
    let cut = Cut {
        field: wanted.field,
        most: model.most_tokens(),
        truncate: wanted.truncate.unwrap_or(app.settings.truncate),
        left: wanted.direction == TruncationDirection::Left,
    };
    let settings = EmbedSettings { prompt: prompt(model, wanted.prompt_name)?, ..model.embed.clone() };
    let bytes = wanted.inputs.iter().map(|input| match input {
        Input::Text(text) => text.len(),
        Input::Ids(ids) => 4 * ids.len(),
    });
    ask(model, bytes.sum(), move |model| {
        let uncounted = model.model.prompt_pieces(&settings)?;
        let requests = wanted.inputs.into_iter().map(|input| {
            let ids = ids_of(model.model.tokenizer(), input, &settings.prompt, &cut)?;
            let mut pieces = Pieces { ids, ..Pieces::default() };
            let room = cut.most.saturating_sub(model.model.tokenizer().template().single_specials());
            let before = if cut.left && cut.truncate { pieces.len().saturating_sub(room) } else { 0 };
            pieces.ids.drain(..before);
            let uncounted = uncounted.map(|prompt| prompt.saturating_sub(before));
            let mut request = cut.checked(prepare(model, &pieces, uncounted)?)?;
            request.dropped += before;
            Ok(request)
        });
        Ok(Request::all(requests.collect::<Result<_, ApiError>>()?))
    })
    .await
}

/// The ids of an input, with the prompt before it: vectors need no mapping back to the text.
fn ids_of(tokenizer: &Tokenizer, input: Input, prompt: &str, cut: &Cut) -> Result<Vec<u32>, ApiError> {
    let empty = || ApiError::new(Kind::Empty, format!("`{}` has an empty text", cut.field));
    match input {
        Input::Text(text) => {
            let text = format!("{prompt}{text}");
            if text.is_empty() {
                return Err(empty());
            }
            Ok(tokenizer.encode_ids(cut.bounded(&text)?)?)
        }
        Input::Ids(ids) => {
            let ids = unpadded(tokenizer, &ids)?;
            if prompt.is_empty() && ids.is_empty() {
                return Err(empty());
            }
            let before = tokenizer.encode_ids(cut.bounded(prompt)?)?;
            Ok(before.into_iter().chain(without_template(tokenizer, ids).iter().copied()).collect())
        }
    }
}

/// Ids of a tokenizer without what fills up a batch. Ids that it does not have are an error.
fn unpadded<'i>(tokenizer: &Tokenizer, mut ids: &'i [u32]) -> Result<&'i [u32], ApiError> {
    if let Some(&id) = ids.iter().find(|&&id| tokenizer.token(id).is_none()) {
        return Err(TextError::UnknownId { id, vocabulary_size: tokenizer.vocabulary_size() }.into());
    }
    let is_padding = |id: &u32| tokenizer.special().pad.as_ref().is_some_and(|pad| pad.id == *id);
    while let [first, rest @ ..] = ids
        && is_padding(first)
    {
        ids = rest;
    }
    while let [rest @ .., last] = ids
        && is_padding(last)
    {
        ids = rest;
    }
    Ok(ids)
}

/// Ids without the special tokens that the template puts around a text: some clients send them, others do not. All others
/// stay, since [UNK] and [MASK] are pieces that a model reads.
fn without_template<'i>(tokenizer: &Tokenizer, ids: &'i [u32]) -> &'i [u32] {
    let slots = tokenizer.template().single_slots();
    let special = |slot: &Slot| match slot {
        Slot::Special { id, .. } => Some(*id),
        Slot::First { .. } | Slot::Second { .. } => None,
    };
    let before: Vec<u32> = slots.iter().map_while(special).collect();
    let mut after: Vec<u32> = slots.iter().rev().map_while(special).collect();
    after.reverse();
    let ids = ids.strip_prefix(before.as_slice()).unwrap_or(ids);
    ids.strip_suffix(after.as_slice()).unwrap_or(ids)
}

/// The text of the prompt that a request names, or of the model's default one.
fn prompt(model: &Loaded, name: Option<String>) -> Result<String, ApiError> {
    let found = model.prompts.get(name.as_deref()).map(str::to_owned);
    found.map_err(|message| {
        let next = if model.prompts.texts.is_empty() { ": leave `prompt_name` out" } else { "" };
        ApiError::new(Kind::Validation, format!("{message}{next}"))
    })
}

/// One vector for each input, and the tokens that they took.
async fn vectors(
    app: &App,
    model: &Arc<Loaded>,
    wanted: Embedding,
    normalize: bool,
    dimensions: Option<usize>,
) -> Result<Answer<Vec<Vec<f32>>>, ApiError> {
    let width = model.embed.width(model.model.config().model.sizes().hidden_size)?;
    if let Some(dimensions) = dimensions.filter(|n| !(1..=width).contains(n)) {
        let message = format!("`dimensions` is {dimensions}, expected 1 to {width}");
        return Err(ApiError::new(Kind::Validation, message));
    }
    let settings = EmbedSettings { normalise: false, ..model.embed.clone() };
    let prepare = move |model: &Loaded, pieces: &Pieces, uncounted| {
        model.model.prepare_embed(pieces, &settings, uncounted, false)
    };
    let answer = of_inputs(app, model, wanted, prepare).await?;
    let vector = |Embedded { mut vector, .. }| {
        vector.truncate(dimensions.unwrap_or(width));
        if normalize {
            normalise(&mut vector);
        }
        vector
    };
    Ok(answer.map(|embedded| embedded.into_iter().map(vector).collect()))
}

async fn embed(call: Call<wire::EmbedRequest>) -> Result<Answer<Vec<Vec<f32>>>, ApiError> {
    let body = call.body;
    let wanted = Embedding {
        field: "inputs",
        inputs: body.inputs.0,
        truncate: body.truncate,
        direction: body.truncation_direction,
        prompt_name: body.prompt_name,
    };
    vectors(&call.app, &call.model, wanted, body.normalize, body.dimensions).await
}

async fn embed_all(call: Call<wire::EmbedAllRequest>) -> Result<Answer<Vec<Vec<Vec<f32>>>>, ApiError> {
    let body = call.body;
    let wanted = Embedding {
        field: "inputs",
        inputs: body.inputs.0,
        truncate: body.truncate,
        direction: body.truncation_direction,
        prompt_name: body.prompt_name,
    };
    let prepare = |model: &Loaded, pieces: &Pieces, _| model.model.prepare_tokens(pieces, model.embed.most_tokens);
    let answer = of_inputs(&call.app, &call.model, wanted, prepare).await?;
    let hidden = call.model.model.config().model.sizes().hidden_size;
    let rows = |vectors: &Vec<f32>| vectors.chunks(hidden).map(<[f32]>::to_vec).collect();
    Ok(answer.map(|texts| texts.iter().map(rows).collect()))
}

async fn similarity(call: Call<wire::SimilarityRequest>) -> Result<Answer<Vec<f32>>, ApiError> {
    let wire::SimilarityRequest { inputs, parameters, .. } = call.body;
    check_count(&call.app, inputs.sentences.len(), "sentences")?;
    let texts = std::iter::once(inputs.source_sentence).chain(inputs.sentences);
    let wanted = Embedding {
        field: "inputs",
        inputs: texts.map(Input::Text).collect(),
        truncate: parameters.truncate,
        direction: parameters.truncation_direction,
        prompt_name: parameters.prompt_name,
    };
    let answer = vectors(&call.app, &call.model, wanted, true, None).await?;
    Ok(answer.map(|vectors| vectors[1..].iter().map(|vector| dot(&vectors[0], vector)).collect()))
}

async fn openai(call: Call<wire::OpenAiRequest>) -> Result<Answer<wire::OpenAiAnswer>, ApiError> {
    let body = call.body;
    let wanted = Embedding {
        field: OPENAI_FIELD,
        inputs: body.input.0,
        truncate: None,
        direction: TruncationDirection::Right,
        prompt_name: None,
    };
    let Answer { body: vectors, tokens, dropped } =
        vectors(&call.app, &call.model, wanted, true, body.dimensions).await?;
    let data = vectors.into_iter().enumerate().map(|(index, vector)| {
        let embedding = match body.encoding_format {
            wire::EncodingFormat::Float => wire::Encoded::Float(vector),
            wire::EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                wire::Encoded::Base64(base64::engine::general_purpose::STANDARD.encode(bytes))
            }
        };
        wire::OpenAiEmbedding { object: "embedding", embedding, index }
    });
    let body = wire::OpenAiAnswer {
        object: "list",
        data: data.collect(),
        model: call.model.name.clone(),
        usage: wire::OpenAiUsage { prompt_tokens: tokens, total_tokens: tokens },
    };
    Ok(Answer { body, tokens, dropped })
}

async fn tokenize(call: Call<wire::TokenizeRequest>) -> Result<Answer<Vec<Vec<wire::Token>>>, ApiError> {
    let wire::TokenizeRequest { inputs, add_special_tokens, prompt_name, .. } = call.body;
    check_count(&call.app, inputs.0.len(), "inputs")?;
    let prompt = prompt(&call.model, prompt_name)?;
    let most = call.app.settings.queue_tokens;
    let bytes = inputs.0.iter().map(|text| prompt.len() + text.len()).sum::<usize>();
    // So many bytes have more tokens, whatever the text: they are not even cut into pieces.
    if bytes > most.saturating_mul(BYTES_PER_LISTED_TOKEN) {
        return Err(too_many_tokens("inputs", bytes / BYTES_PER_LISTED_TOKEN, most));
    }
    let _place = call.model.admit(bytes / 4)?;
    let model = Arc::clone(&call.model);
    let body = off_the_road(bytes, move || {
        let mut listed = 0;
        let texts = inputs.0.iter().map(|text| {
            let tokens = tokens(&model, &format!("{prompt}{text}"), add_special_tokens)?;
            listed += tokens.len();
            if listed > most { Err(too_many_tokens("inputs", listed, most)) } else { Ok(tokens) }
        });
        texts.collect::<Result<Vec<_>, _>>()
    });
    Ok(Answer { body: body.await?, tokens: 0, dropped: 0 })
}

/// Bytes of text for a token that /tokenize lists, at the most: ordinary text has four to six.
const BYTES_PER_LISTED_TOKEN: usize = 16;

fn too_many_tokens(field: &str, given: usize, most: usize) -> ApiError {
    let message = format!(
        "`{field}` has {given} tokens or more, this server takes {most} in a request (--queue-tokens): divide the request"
    );
    ApiError::new(Kind::TooLarge, message)
}

fn tokens(model: &Loaded, text: &str, special: bool) -> Result<Vec<wire::Token>, ApiError> {
    let tokenizer = model.model.tokenizer();
    let pieces = tokenizer.encode(text)?;
    let (ids, offsets): (Vec<u32>, Vec<Option<(usize, usize)>>) = if special {
        let features = tokenizer.template().single(&pieces, usize::MAX)?;
        (features.ids, features.offsets)
    } else {
        (pieces.ids, pieces.offsets.into_iter().map(Some).collect())
    };
    Ok(named_tokens(model, text, &ids, &offsets))
}

/// Tokens as the wire has them, with offsets in characters.
pub(crate) fn named_tokens(
    model: &Loaded,
    text: &str,
    ids: &[u32],
    offsets: &[Option<(usize, usize)>],
) -> Vec<wire::Token> {
    let tokenizer = model.model.tokenizer();
    let bytes: Vec<(usize, usize)> = offsets.iter().copied().flatten().collect();
    let mut characters = code_point_offsets(text, &bytes).into_iter();
    let tokens = ids.iter().zip(offsets).map(|(id, offset)| {
        let place = offset.and_then(|_| characters.next());
        // As Text Embeddings Inference has it: the part of the text, not the piece, which may be normalised.
        let text = match offset.and_then(|(start, end)| text.get(start..end)) {
            Some(part) => part.to_owned(),
            None => tokenizer.token(*id).unwrap_or_default(),
        };
        wire::Token {
            id: *id,
            text,
            special: tokenizer.is_special(*id),
            start: place.map(|(start, _)| start),
            stop: place.map(|(_, stop)| stop),
        }
    });
    tokens.collect()
}

async fn decode(call: Call<wire::DecodeRequest>) -> Result<Answer<Vec<String>>, ApiError> {
    let wire::DecodeRequest { ids, skip_special_tokens, .. } = call.body;
    check_count(&call.app, ids.0.len(), "ids")?;
    let (given, most) = (ids.0.iter().map(Vec::len).sum::<usize>(), call.app.settings.queue_tokens);
    if given > most {
        return Err(too_many_tokens("ids", given, most));
    }
    let _place = call.model.admit(given)?;
    let model = Arc::clone(&call.model);
    let body = off_the_road(4 * given, move || {
        let texts = ids.0.iter().map(|ids| model.model.tokenizer().decode(ids, skip_special_tokens));
        Ok(texts.collect::<Result<Vec<_>, _>>()?)
    });
    Ok(Answer { body: body.await?, tokens: 0, dropped: 0 })
}

async fn fill(call: Call<wire::FillRequest>) -> Result<Answer<Vec<Filled>>, ApiError> {
    let Call { app, model, body: wire::FillRequest { inputs, top, truncate, .. } } = call;
    check_count(&app, inputs.0.len(), "inputs")?;
    let vocabulary = model.model.config().model.sizes().vocab_size;
    if !(1..=vocabulary).contains(&top) {
        return Err(ApiError::new(Kind::Validation, format!("`top` is {top}, expected 1 to {vocabulary}")));
    }
    let truncate = truncate.unwrap_or(app.settings.truncate);
    let cut = Cut { field: "inputs", most: model.model.most_tokens(), truncate, left: false };
    let texts = Arc::new(inputs.0);
    let theirs = Arc::clone(&texts);
    let answer = ask(&model, texts.iter().map(String::len).sum(), move |model| {
        let requests = (1..).zip(theirs.iter()).map(|(number, text)| {
            let request = model.model.prepare_fill(cut.bounded(text)?, top, Length::CUT);
            cut.checked(request.map_err(|error| error.numbered(&[number]))?)
        });
        Ok(Request::all(requests.collect::<Result<_, _>>()?))
    });
    let answer = answer.await?;
    let both = answer.body.into_iter().zip(texts.iter());
    let body = both.map(|(filled, text)| Ok(filled.in_characters(cut.bounded(text)?)));
    Ok(Answer { body: body.collect::<Result<_, ApiError>>()?, ..answer })
}

fn describe(app: &App, model: &Loaded) -> Value {
    let config = model.model.config();
    let sizes = config.model.sizes();
    let pooling = model.embed.pooling.iter().map(|pooling| pooling.name()).collect::<Vec<_>>().join(",");
    let labels = json!({"id2label": config.task.id2label, "label2id": config.task.label2id});
    let model_type = match model.model.task() {
        Some(Task::Classify) if model.can(Ability::Rerank) => json!({"reranker": labels}),
        Some(Task::Classify) => json!({"classifier": labels}),
        _ if model.can(Ability::Generate) => json!({"generator": {}}),
        _ => json!({"embedding": {"pooling": pooling}}),
    };
    // What is read for that which it was made for.
    let longest = if model.model.task().is_some() { model.task_tokens() } else { model.most_tokens() };
    let settings = &app.settings;
    let abilities = model.model.abilities();
    let answers = |ability: &&Ability| app.models.first(**ability).is_ok_and(|first| first.name == model.name);
    let default_for: Vec<&Ability> = abilities.iter().filter(answers).collect();
    json!({
        "model_id": model.name,
        "served_model_name": model.name,
        "model_sha": null,
        "model_dtype": app.models.dtype().to_string(),
        "model_type": model_type,
        "max_concurrent_requests": settings.queue_requests,
        "max_input_length": longest,
        "max_batch_tokens": settings.batch_tokens,
        "max_batch_requests": null,
        "max_client_batch_size": settings.most_texts,
        "auto_truncate": settings.truncate,
        "tokenization_workers": settings.http_threads,
        "version": env!("CARGO_PKG_VERSION"),
        "architecture": model.class(),
        "hidden_size": sizes.hidden_size,
        "layers": sizes.num_hidden_layers,
        "heads": sizes.num_attention_heads,
        "vocabulary": sizes.vocab_size,
        "mask_token": model.model.tokenizer().special().mask.as_ref().map(|mask| &mask.text),
        "labels": config.task.id2label,
        "prompts": model.prompts.texts,
        "default_prompt_name": model.prompts.default,
        "encoder_decoder": model.is_encoder_decoder(),
        "abilities": abilities,
        "default_for": default_for,
    })
}

fn json_answer(body: Value) -> Answer<Value> {
    Answer { body, tokens: 0, dropped: 0 }
}

async fn info(State(app): State<App>, params: axum::extract::RawPathParams) -> Result<Answer<Value>, ApiError> {
    let name = params.iter().find(|(name, _)| *name == "model").map(|(_, name)| name);
    let model = name.map_or_else(|| app.models.first(Ability::Tokenize), |name| app.models.get(name))?;
    Ok(json_answer(describe(&app, &model)))
}

async fn models(State(app): State<App>) -> Answer<Value> {
    let models = app.models.names().map(|name| match app.models.get(name) {
        Ok(model) => describe(&app, &model),
        Err(_) => json!({"model_id": name, "abilities": []}),
    });
    json_answer(models.collect())
}

async fn openai_models(State(app): State<App>) -> Answer<Value> {
    let models =
        app.models.names().map(|name| json!({"id": name, "object": "model", "created": 0, "owned_by": "henson"}));
    json_answer(json!({"object": "list", "data": models.collect::<Vec<_>>()}))
}

pub(crate) async fn health(State(app): State<App>) -> Result<Answer<Value>, ApiError> {
    if app.is_stopping() {
        return Err(ApiError::later(Kind::Unhealthy, "the server is shutting down", 5));
    }
    if !app.models.all_loaded() {
        return Err(ApiError::later(Kind::Unhealthy, "models are still being loaded", 1));
    }
    Ok(json_answer(json!({"status": "ok"})))
}

async fn metrics(State(app): State<App>) -> Response {
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, openmetrics)], app.metrics.encode()).into_response()
}

/// Text Embeddings Inference answers at / with what its model is for.
async fn root(State(app): State<App>, request: axum::extract::Request) -> Response {
    use axum::handler::Handler;
    let first = app.models.names().next().map_or_else(|| app.models.get(""), |name| app.models.get(name));
    match first {
        Ok(model) if model.can(Ability::Rerank) => Handler::call(answers::rerank, request, app).await,
        Ok(model) if model.can(Ability::Task(Task::Classify)) => Handler::call(answers::predict, request, app).await,
        Ok(model) if model.can(Ability::Generate) => {
            Handler::call(text_generation::generate_at_root, request, app).await
        }
        Ok(_) => Handler::call(embed, request, app).await,
        Err(error) => error.into_response(),
    }
}
