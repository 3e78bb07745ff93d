//! What goes over the wire: requests and answers as JSON. Field names are those of Text Embeddings Inference and OpenAI
//! where they have the route. Unknown fields are refused, so that a misspelt one is not taken for its default.

use std::fmt;

use henson_infer::{Ability, Aggregation, Task, ZeroShot};
use serde::de::{self, DeserializeOwned, DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::generate::wire::{CompletionRequest, GenerateRequest};

/// A request's body, what a model must be able to do for it, and the model that it names.
pub(crate) trait Request: DeserializeOwned + Send + 'static {
    const ABILITY: Ability;
    /// Whether clients of other servers send it, with names of those servers' models.
    const OTHERS_SEND_IT: bool;

    fn model(&self) -> Option<&str>;
}

macro_rules! requests {
    ($($name:ident => $ability:expr, $others:literal;)*) => {
        $(impl Request for $name {
            const ABILITY: Ability = $ability;
            const OTHERS_SEND_IT: bool = $others;

            fn model(&self) -> Option<&str> {
                self.model.as_deref()
            }
        })*

        /// Bytes as each kind of request: they are parsed or refused, and what is parsed holds no more inputs than bytes.
        pub fn fuzz(bytes: &[u8]) {
            $(let _ = serde_json::from_slice::<$name>(bytes);)*
            if let Ok(request) = serde_json::from_slice::<EmbedRequest>(bytes) {
                let size = |input: &Input| match input {
                    Input::Text(text) => text.len(),
                    Input::Ids(ids) => ids.len(),
                };
                assert!(request.inputs.0.len() + request.inputs.0.iter().map(size).sum::<usize>() <= bytes.len());
            }
            crate::generate::wire::fuzz(bytes);
        }
    };
}

requests!(
    EmbedRequest => Ability::Embed, true;
    EmbedAllRequest => Ability::EmbedAll, true;
    OpenAiRequest => Ability::Embed, true;
    CompletionRequest => Ability::Generate, true;
    GenerateRequest => Ability::Generate, true;
    SimilarityRequest => Ability::Similarity, true;
    TokenizeRequest => Ability::Tokenize, true;
    DecodeRequest => Ability::Decode, true;
    FillRequest => Ability::Fill, false;
    PredictRequest => Ability::Task(Task::Classify), true;
    RerankRequest => Ability::Rerank, true;
    DocumentsRequest => Ability::Rerank, true;
    DocumentsRequest2 => Ability::Rerank, true;
    ZeroShotRequest => Ability::ZeroShot, false;
    TagRequest => Ability::Task(Task::Tag), false;
    AnswerRequest => Ability::Task(Task::Answer), false;
    ChooseRequest => Ability::Task(Task::Choose), false;
    AttentionRequest => Ability::Inside, false;
    NeighboursRequest => Ability::Inside, false;
);

/// What to embed: a text, or the ids of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Text(String),
    Ids(Vec<u32>),
}

/// One input or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inputs(pub(crate) Vec<Input>);

/// One text or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Texts(pub(crate) Vec<String>);

/// Labels: a list, or one text with commas between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Labels(pub(crate) Vec<String>);

/// A text, or two that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TextOrPair(pub(crate) String, pub(crate) Option<String>);

/// One or several of them; a list of two texts is a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pairs {
    pub(crate) list: Vec<TextOrPair>,
    /// Whether there was one, not in a list.
    pub(crate) single: bool,
}

/// One list of ids or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdLists(pub(crate) Vec<Vec<u32>>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum TruncationDirection {
    #[serde(alias = "left")]
    Left,
    #[default]
    #[serde(alias = "right")]
    Right,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

fn yes() -> bool {
    true
}

fn five() -> usize {
    5
}

fn hypothesis() -> String {
    ZeroShot::HYPOTHESIS.to_owned()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmbedRequest {
    pub(crate) inputs: Inputs,
    #[serde(default = "yes")]
    pub(crate) normalize: bool,
    pub(crate) truncate: Option<bool>,
    #[serde(default)]
    pub(crate) truncation_direction: TruncationDirection,
    pub(crate) prompt_name: Option<String>,
    pub(crate) dimensions: Option<usize>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmbedAllRequest {
    pub(crate) inputs: Inputs,
    pub(crate) truncate: Option<bool>,
    #[serde(default)]
    pub(crate) truncation_direction: TruncationDirection,
    pub(crate) prompt_name: Option<String>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenAiRequest {
    pub(crate) input: Inputs,
    pub(crate) model: Option<String>,
    #[serde(default)]
    pub(crate) encoding_format: EncodingFormat,
    pub(crate) dimensions: Option<usize>,
    /// Taken and not used: there are no accounts here.
    #[serde(rename = "user")]
    pub(crate) _user: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct OpenAiAnswer {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<OpenAiEmbedding>,
    pub(crate) model: String,
    pub(crate) usage: OpenAiUsage,
}

#[derive(Debug, Serialize)]
pub(crate) struct OpenAiEmbedding {
    pub(crate) object: &'static str,
    pub(crate) embedding: Encoded,
    pub(crate) index: usize,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Encoded {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize)]
pub(crate) struct OpenAiUsage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SimilarityRequest {
    pub(crate) inputs: SimilarityInputs,
    #[serde(default)]
    pub(crate) parameters: SimilarityParameters,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SimilarityInputs {
    pub(crate) source_sentence: String,
    pub(crate) sentences: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SimilarityParameters {
    pub(crate) truncate: Option<bool>,
    #[serde(default)]
    pub(crate) truncation_direction: TruncationDirection,
    pub(crate) prompt_name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    pub(crate) inputs: Texts,
    #[serde(default = "yes")]
    pub(crate) add_special_tokens: bool,
    pub(crate) prompt_name: Option<String>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) special: bool,
    pub(crate) start: Option<usize>,
    pub(crate) stop: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecodeRequest {
    pub(crate) ids: IdLists,
    #[serde(default = "yes")]
    pub(crate) skip_special_tokens: bool,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FillRequest {
    pub(crate) inputs: Texts,
    #[serde(default = "five")]
    pub(crate) top: usize,
    pub(crate) truncate: Option<bool>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PredictRequest {
    pub(crate) inputs: Pairs,
    pub(crate) truncate: Option<bool>,
    #[serde(default)]
    pub(crate) raw_scores: bool,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Prediction {
    pub(crate) label: String,
    pub(crate) score: f32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RerankRequest {
    pub(crate) query: String,
    pub(crate) texts: Vec<String>,
    pub(crate) truncate: Option<bool>,
    #[serde(default)]
    pub(crate) raw_scores: bool,
    #[serde(default)]
    pub(crate) return_text: bool,
    pub(crate) model: Option<String>,
}

/// The same as Jina and version 1 of Cohere have it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DocumentsRequest {
    pub(crate) query: String,
    pub(crate) documents: Vec<Document>,
    pub(crate) top_n: Option<usize>,
    #[serde(default = "yes")]
    pub(crate) return_documents: bool,
    pub(crate) model: Option<String>,
}

/// The same as version 2 of Cohere has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DocumentsRequest2 {
    pub(crate) query: String,
    pub(crate) documents: Vec<Document>,
    pub(crate) top_n: Option<usize>,
    /// Tokens of a document that are read; the rest of it is not.
    pub(crate) max_tokens_per_doc: Option<usize>,
    pub(crate) model: Option<String>,
}

/// A text, by itself or in an object.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a document is a text, or an object with a `text`")]
pub(crate) enum Document {
    Text(String),
    Object(TextOfDocument),
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextOfDocument {
    pub(crate) text: String,
}

impl Document {
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object(TextOfDocument { text }) => text,
        }
    }
}

/// What Jina and Cohere answer.
#[derive(Debug, Serialize)]
pub(crate) struct RankedDocuments {
    /// Jina's; Cohere's version 2 has neither this, nor the model, nor the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) object: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    pub(crate) results: Vec<RankedDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<OpenAiUsage>,
    pub(crate) meta: serde_json::Value,
}

#[derive(Debug, Serialize)]
pub(crate) struct RankedDocument {
    pub(crate) index: usize,
    pub(crate) relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) document: Option<TextOfDocument>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Rank {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) text: Option<String>,
    pub(crate) score: f32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ZeroShotRequest {
    pub(crate) inputs: Texts,
    pub(crate) candidate_labels: Labels,
    #[serde(default = "hypothesis")]
    pub(crate) hypothesis_template: String,
    #[serde(default)]
    pub(crate) multi_label: bool,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TagRequest {
    pub(crate) inputs: Texts,
    pub(crate) aggregation_strategy: Option<Aggregation>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AnswerRequest {
    pub(crate) question: String,
    pub(crate) context: String,
    #[serde(default = "five")]
    pub(crate) top: usize,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChooseRequest {
    pub(crate) context: String,
    pub(crate) choices: Vec<String>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttentionRequest {
    pub(crate) inputs: String,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NeighboursRequest {
    pub(crate) word: String,
    pub(crate) inputs: Vec<String>,
    pub(crate) model: Option<String>,
}

/// A text, a token id, or a list of such.
enum Element {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
    Texts(Vec<String>),
}

/// Reads an element. Lists inside of it may be this deep: deeper ones end here, so that nesting cannot use up the stack.
struct Depth(u8);

impl<'de> Visitor<'de> for Depth {
    type Value = Element;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0 == 0 { "a text or a token id" } else { "a text, a list of texts, or token ids" })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.to_owned()))
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<Element, E> {
        Ok(Element::Text(text))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
        let id = u32::try_from(id).map_err(|_| E::invalid_value(de::Unexpected::Unsigned(id), &"a token id"))?;
        Ok(Element::Id(id))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        if self.0 == 0 {
            return Err(de::Error::invalid_type(de::Unexpected::Seq, &self));
        }
        let (mut texts, mut ids) = (Vec::new(), Vec::new());
        while let Some(element) = list.next_element_seed(Depth(0))? {
            match element {
                Element::Text(text) => texts.push(text),
                Element::Id(id) => ids.push(id),
                Element::Ids(_) | Element::Texts(_) => {
                    return Err(de::Error::invalid_type(de::Unexpected::Seq, &Depth(0)));
                }
            }
        }
        match (texts.is_empty(), ids.is_empty()) {
            (_, true) => Ok(Element::Texts(texts)),
            (true, false) => Ok(Element::Ids(ids)),
            (false, false) => Err(de::Error::custom("texts and token ids in one list")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Depth {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Element, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// An element, or a list of elements.
enum OneOrMany {
    One(String),
    Many(Vec<Element>),
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor;
        impl<'de> Visitor<'de> for ListVisitor {
            type Value = OneOrMany;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text or a list of texts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<OneOrMany, E> {
                Ok(OneOrMany::One(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<OneOrMany, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element_seed(Depth(1))? {
                    elements.push(element);
                }
                Ok(OneOrMany::Many(elements))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<OneOrMany, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Err(de::Error::invalid_type(de::Unexpected::Map, &self))
            }
        }
        deserializer.deserialize_any(ListVisitor)
    }
}

impl<'de> Deserialize<'de> for Inputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let elements = match OneOrMany::deserialize(deserializer)? {
            OneOrMany::One(text) => return Ok(Self(vec![Input::Text(text)])),
            OneOrMany::Many(elements) => elements,
        };
        // A plain list of ids is one input.
        if matches!(elements.first(), Some(Element::Id(_))) {
            let ids = elements.into_iter().map(|element| match element {
                Element::Id(id) => Ok(id),
                _ => Err(de::Error::custom("texts and token ids in one list")),
            });
            return Ok(Self(vec![Input::Ids(ids.collect::<Result<_, _>>()?)]));
        }
        let inputs = elements.into_iter().map(|element| match element {
            Element::Text(text) => Ok(Input::Text(text)),
            Element::Ids(ids) => Ok(Input::Ids(ids)),
            Element::Id(_) => Err(de::Error::custom("texts and token ids in one list")),
            Element::Texts(_) => Err(de::Error::custom("a list of lists of texts; expected a list of texts")),
        });
        Ok(Self(inputs.collect::<Result<_, _>>()?))
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let texts = Inputs::deserialize(deserializer)?.0.into_iter().map(|input| match input {
            Input::Text(text) => Ok(text),
            Input::Ids(_) => Err(de::Error::custom("token ids; expected a text or a list of texts")),
        });
        Ok(Self(texts.collect::<Result<_, _>>()?))
    }
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let labels = match OneOrMany::deserialize(deserializer)? {
            OneOrMany::One(text) => return Ok(Self(split_labels(&text))),
            OneOrMany::Many(elements) => elements.into_iter().map(|element| match element {
                Element::Text(label) => Ok(label),
                _ => Err(de::Error::custom("expected a list of labels, or one text with commas between them")),
            }),
        };
        Ok(Self(labels.collect::<Result<_, _>>()?))
    }
}

/// As `transformers` does it.
fn split_labels(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned).collect()
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "expected a text, a pair [text, text], or a list [[text], [text, text], …] of both";
        let pair = |texts: Vec<String>| {
            let mut texts = texts.into_iter();
            match (texts.next(), texts.next(), texts.next()) {
                (Some(first), second, None) => Ok(TextOrPair(first, second)),
                _ => Err(de::Error::custom(EXPECTED)),
            }
        };
        let elements = match OneOrMany::deserialize(deserializer)? {
            OneOrMany::One(text) => return Ok(Self { list: vec![TextOrPair(text, None)], single: true }),
            OneOrMany::Many(elements) => elements,
        };
        if matches!(elements.first(), Some(Element::Text(_))) {
            let texts = elements.into_iter().map(|element| match element {
                Element::Text(text) => Ok(text),
                _ => Err(de::Error::custom(EXPECTED)),
            });
            return Ok(Self { list: vec![pair(texts.collect::<Result<_, _>>()?)?], single: true });
        }
        let list = elements.into_iter().map(|element| match element {
            Element::Texts(texts) => pair(texts),
            _ => Err(de::Error::custom(EXPECTED)),
        });
        Ok(Self { list: list.collect::<Result<_, _>>()?, single: false })
    }
}

impl<'de> Deserialize<'de> for IdLists {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let lists = Inputs::deserialize(deserializer)?.0.into_iter().map(|input| match input {
            Input::Ids(ids) => Ok(ids),
            Input::Text(_) => Err(de::Error::custom("a text; expected token ids, or lists of them")),
        });
        Ok(Self(lists.collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(json: &str) -> Result<Vec<Input>, String> {
        serde_json::from_str::<Inputs>(json).map(|inputs| inputs.0).map_err(|error| error.to_string())
    }

    #[test]
    fn inputs_are_texts_or_ids() {
        let text = |text: &str| Input::Text(text.to_owned());
        assert_eq!(inputs(r#""a""#), Ok(vec![text("a")]));
        assert_eq!(inputs(r#"["a", "b\u0000"]"#), Ok(vec![text("a"), text("b\0")]));
        assert_eq!(inputs("[]"), Ok(vec![]));
        assert_eq!(inputs("[1, 2]"), Ok(vec![Input::Ids(vec![1, 2])]));
        assert_eq!(inputs("[[1], [2, 3]]"), Ok(vec![Input::Ids(vec![1]), Input::Ids(vec![2, 3])]));
        for (json, part) in [
            ("3", "a text or a list of texts"),
            ("null", "a text or a list of texts"),
            (r#"{"a": 1}"#, "a text or a list of texts"),
            (r#"["a", 1]"#, "texts and token ids"),
            (r#"[1, "a"]"#, "texts and token ids"),
            (r#"[["a"]]"#, "expected a list of texts"),
            ("[-1]", "token ids"),
            ("[4294967296]", "a token id"),
            ("[[[1]]]", "a text or a token id"),
        ] {
            let error = inputs(json).unwrap_err();
            assert!(error.contains(part), "{json}: {error}");
        }
    }

    #[test]
    fn pairs_are_texts_or_two_texts() {
        let pairs = |json: &str| serde_json::from_str::<Pairs>(json).map_err(|error| error.to_string());
        let pair = |a: &str, b: Option<&str>| TextOrPair(a.to_owned(), b.map(str::to_owned));
        let one = |pair| Ok(Pairs { list: vec![pair], single: true });
        assert_eq!(pairs(r#""a""#), one(pair("a", None)));
        assert_eq!(pairs(r#"["a"]"#), one(pair("a", None)));
        assert_eq!(pairs(r#"["a", "b"]"#), one(pair("a", Some("b"))));
        let both = Pairs { list: vec![pair("a", None), pair("b", Some("c"))], single: false };
        assert_eq!(pairs(r#"[["a"], ["b", "c"]]"#), Ok(both));
        for json in [r#"["a", "b", "c"]"#, "[[]]", r#"["a", ["b"]]"#, r#"[["a"], "b"]"#, "[1]", "[[1]]"] {
            assert!(pairs(json).is_err(), "{json}");
        }
    }

    #[test]
    fn ids_to_decode() {
        let ids = |json: &str| serde_json::from_str::<IdLists>(json).map(|ids| ids.0).ok();
        assert_eq!(ids("[1, 2]"), Some(vec![vec![1, 2]]));
        assert_eq!(ids("[[1], [2]]"), Some(vec![vec![1], vec![2]]));
        assert_eq!(ids(r#""a""#), None);
    }

    #[test]
    fn deep_nesting_is_refused() {
        let deep = "[".repeat(100_000);
        assert!(inputs(&deep).is_err());
    }
}
