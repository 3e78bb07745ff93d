//! How special tokens and segments surround one or two texts. A template is data, not one variant per model family:
//! BERT's, RoBERTa's, XLNet's and T5's layouts differ only in their slots, and a `tokenizer.json` may hold any of them.
//! Cutting texts to length and laying them out is in `features.rs`.

use std::path::Path;

use serde_json::{Value, json};
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::{PostProcessorWrapper, PreTokenizerWrapper};

use crate::error::TextError;
use crate::special::Special;

/// One place of a template, in the order of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// A special token.
    Special {
        /// Its id.
        id: u32,
        /// Its segment (`token_type_ids`).
        segment: u32,
    },
    /// All pieces of the first text.
    First {
        /// Their segment.
        segment: u32,
    },
    /// All pieces of the second text.
    Second {
        /// Their segment.
        segment: u32,
    },
}

/// The layout of a model's input, for one text and for two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    single: Vec<Slot>,
    pair: Vec<Slot>,
}

impl Template {
    /// A template of one's own. The one for a single text must hold the first text once, the one for a pair both once.
    pub fn new(single: Vec<Slot>, pair: Vec<Slot>) -> Result<Self, TextError> {
        let count = |slots: &[Slot]| {
            let first = slots.iter().filter(|slot| matches!(slot, Slot::First { .. })).count();
            let second = slots.iter().filter(|slot| matches!(slot, Slot::Second { .. })).count();
            (first, second)
        };
        let check = |form, slots: &[Slot], wanted: (usize, usize), expected| match count(slots) {
            found if found == wanted => Ok(()),
            (first, second) => Err(TextError::BadTemplate {
                form,
                expected,
                got: format!("the first text {first} times and the second {second} times"),
            }),
        };
        check("one text", &single, (1, 0), "the first text once, the second never")?;
        check("two texts", &pair, (1, 1), "each text once")?;
        Ok(Self { single, pair })
    }

    /// BERT's: `[CLS] a [SEP]` in segment 0, or `[CLS] a [SEP]` in segment 0 and `b [SEP]` in segment 1.
    pub fn bert(cls: u32, sep: u32) -> Self {
        let special = |id, segment| Slot::Special { id, segment };
        let single = vec![special(cls, 0), Slot::First { segment: 0 }, special(sep, 0)];
        let mut pair = single.clone();
        pair.extend([Slot::Second { segment: 1 }, special(sep, 1)]);
        Self { single, pair }
    }

    /// RoBERTa's: `<s> a </s>` or `<s> a </s></s> b </s>`, all in segment 0, the only one those models have.
    pub fn roberta(cls: u32, sep: u32) -> Self {
        let special = |id| Slot::Special { id, segment: 0 };
        let single = vec![special(cls), Slot::First { segment: 0 }, special(sep)];
        let mut pair = single.clone();
        pair.extend([special(sep), Slot::Second { segment: 0 }, special(sep)]);
        Self { single, pair }
    }

    /// No special tokens, as for GPT-2: a pair is one text after the other.
    pub fn plain() -> Self {
        Self {
            single: vec![Slot::First { segment: 0 }],
            pair: vec![Slot::First { segment: 0 }, Slot::Second { segment: 0 }],
        }
    }

    /// The slots for one text.
    pub fn single_slots(&self) -> &[Slot] {
        &self.single
    }

    /// The slots for two texts.
    pub fn pair_slots(&self) -> &[Slot] {
        &self.pair
    }

    /// How many special tokens surround one text.
    pub fn single_specials(&self) -> usize {
        specials(&self.single)
    }

    /// How many special tokens surround two texts.
    pub fn pair_specials(&self) -> usize {
        specials(&self.pair)
    }

    /// Every id that the template inserts.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.single.iter().chain(&self.pair).filter_map(|slot| match slot {
            Slot::Special { id, .. } => Some(*id),
            _ => None,
        })
    }

    /// Reads the `post_processor` of a `tokenizer.json`. `None` when it adds nothing (null, or byte-level's, which only
    /// trims offsets): then the special tokens decide.
    pub(crate) fn from_post_processor(path: &Path, value: &Value) -> Result<Option<Self>, TextError> {
        let malformed = |place: &str, expected: &str, got: String| TextError::Malformed {
            path: path.to_owned(),
            place: format!("post_processor{place}"),
            expected: expected.to_owned(),
            got,
        };
        let named_id = |role: &str| {
            let id = value[role].get(1).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| malformed(&format!(".{role}"), "[token, id]", value[role].to_string()))
        };
        match value["type"].as_str() {
            None if value.is_null() => Ok(None),
            Some("ByteLevel") => Ok(None),
            Some("BertProcessing") => Ok(Some(Self::bert(named_id("cls")?, named_id("sep")?))),
            Some("RobertaProcessing") => Ok(Some(Self::roberta(named_id("cls")?, named_id("sep")?))),
            Some("TemplateProcessing") => {
                let slots = |form: &str| -> Result<Vec<Slot>, TextError> {
                    let place = format!(".{form}");
                    let entries = value[form].as_array();
                    let entries = entries.ok_or_else(|| malformed(&place, "a list", shortened(&value[form])))?.iter();
                    let mut slots = Vec::new();
                    for entry in entries {
                        slots.extend(
                            slots_of_entry(entry, &value["special_tokens"])
                                .ok_or_else(|| malformed(&place, "a sequence or a special token", shortened(entry)))?,
                        );
                    }
                    Ok(slots)
                };
                Self::new(slots("single")?, slots("pair")?)
                    .map(Some)
                    .map_err(|error| malformed("", "a usable template", error.to_string()))
            }
            Some("Sequence") => {
                let mut found = None;
                for processor in value["processors"].as_array().map(Vec::as_slice).unwrap_or_default() {
                    if let Some(template) = Self::from_post_processor(path, processor)? {
                        if found.is_some() {
                            let got = "two of them".to_owned();
                            return Err(malformed("", "one processor that adds special tokens", got));
                        }
                        found = Some(template);
                    }
                }
                Ok(found)
            }
            _ => Err(malformed(".type", "a processor that is known", shortened(&value["type"]))),
        }
    }

    /// The template of a tokenizer whose files name none. Transformers would add nothing here, and a BERT fed without
    /// [CLS] and [SEP] answers nonsense without a word; so the special tokens that the vocabulary has are used, and
    /// [`post_processor`](Self::post_processor) puts the choice into what is saved.
    pub(crate) fn from_special_tokens(cls: Option<&Special>, sep: Option<&Special>) -> Self {
        match (cls, sep) {
            (Some(cls), Some(sep)) if cls.text == "<s>" => Self::roberta(cls.id, sep.id),
            (Some(cls), Some(sep)) => Self::bert(cls.id, sep.id),
            _ => Self::plain(),
        }
    }

    /// The `tokenizers` form of a template that came from [`from_special_tokens`](Self::from_special_tokens).
    pub(crate) fn post_processor(
        &self,
        cls: Option<&Special>,
        sep: Option<&Special>,
        pre_tokenizer: Option<&PreTokenizerWrapper>,
    ) -> Result<Option<PostProcessorWrapper>, String> {
        let (Some(cls), Some(sep)) = (cls, sep) else { return Ok(None) };
        if *self == Self::roberta(cls.id, sep.id) {
            let prefix = matches!(pre_tokenizer, Some(PreTokenizerWrapper::ByteLevel(level)) if level.add_prefix_space);
            let processing = RobertaProcessing::new((sep.text.clone(), sep.id), (cls.text.clone(), cls.id));
            return Ok(Some(processing.trim_offsets(true).add_prefix_space(prefix).into()));
        }
        processor((&cls.text, cls.id), (&sep.text, sep.id), false).map(Some)
    }
}

/// A template in the form of `tokenizers`: `[CLS] a [SEP] b [SEP]`, or with the first behind all, in a segment of its own, as XLNet has
/// it.
pub(crate) fn processor(cls: (&str, u32), sep: (&str, u32), cls_last: bool) -> Result<PostProcessorWrapper, String> {
    // As JSON, because the crate's builder splits its strings at ':' and ' ', which a token may hold.
    let special = |(name, _): (&str, u32), segment: u32| json!({"SpecialToken": {"id": name, "type_id": segment}});
    let text = |name: &str, segment: u32| json!({"Sequence": {"id": name, "type_id": segment}});
    let entry = |(name, id): (&str, u32)| json!({"id": name, "ids": [id], "tokens": [name]});
    let mut single = vec![text("A", 0), special(sep, 0)];
    let mut pair = [single.clone(), vec![text("B", 1), special(sep, 1)]].concat();
    for slots in [&mut single, &mut pair] {
        match cls_last {
            true => slots.push(special(cls, 2)),
            false => slots.insert(0, special(cls, 0)),
        }
    }
    let processing = json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {cls.0: entry(cls), sep.0: entry(sep)},
    });
    serde_json::from_value(processing).map_err(|error| error.to_string())
}

fn specials(slots: &[Slot]) -> usize {
    slots.iter().filter(|slot| matches!(slot, Slot::Special { .. })).count()
}

/// `{"Sequence": {"id": "A", "type_id": 0}}` or `{"SpecialToken": {"id": "[CLS]", "type_id": 0}}`, the latter by way of
/// the list of special tokens, where one name may stand for several ids.
fn slots_of_entry(entry: &Value, special_tokens: &Value) -> Option<Vec<Slot>> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    if let Some(sequence) = entry.get("Sequence") {
        let segment = number(&sequence["type_id"])?;
        return match sequence["id"].as_str()? {
            "A" => Some(vec![Slot::First { segment }]),
            "B" => Some(vec![Slot::Second { segment }]),
            _ => None,
        };
    }
    let special = entry.get("SpecialToken")?;
    let segment = number(&special["type_id"])?;
    let ids = special_tokens.get(special["id"].as_str()?)?["ids"].as_array()?;
    ids.iter().map(|id| number(id).map(|id| Slot::Special { id, segment })).collect()
}

/// A JSON value for a message, without flooding it.
pub(crate) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
