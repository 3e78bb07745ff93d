//! Tokens that say to a decoder where texts begin, where two of them part, and where an answer is read: those of GPT's fine-tuning
//! (Radford et al. 2018, section 3.3). Pre-training knows none of them.

use serde_json::{Value, json};
use tokenizers::{AddedToken, PostProcessorWrapper};

use crate::error::TextError;
use crate::guard::shielded;
use crate::template::{Slot, Template};
use crate::tokenizer::{self, Tokenizer};

/// Start, delimiter and extract, by the names that the authors' code gives them.
const TASK_TOKENS: [&str; 3] = ["_start_", "_delimiter_", "_classify_"];

impl Tokenizer {
    /// The same tokenizer with three special tokens, at the end of its vocabulary where it does not have them yet, which surround
    /// texts: `start text extract`, and `start first delimiter second extract`.
    pub fn with_task_tokens(&self) -> Result<Self, TextError> {
        let failed = |reason: String| TextError::Failed { action: "extend", reason };
        if self.sentence_piece.is_some() {
            return Err(failed("a SentencePiece model cannot get further tokens".to_owned()));
        }
        let mut inner = self.inner.clone();
        let new = TASK_TOKENS.iter().filter(|token| self.id(token).is_none());
        let new: Vec<AddedToken> = new.map(|token| AddedToken::from(*token, true)).collect();
        shielded(|| inner.add_special_tokens(new)).map_err(failed)?;
        let mut ids = [0; TASK_TOKENS.len()];
        for (id, token) in ids.iter_mut().zip(TASK_TOKENS) {
            *id = inner.token_to_id(token).ok_or_else(|| failed(format!("{token} did not get an id")))?;
        }
        let processor = post_processor(&tokenizer::json(inner.get_post_processor()), ids);
        let processor: PostProcessorWrapper =
            serde_json::from_value(processor).map_err(|error| failed(error.to_string()))?;
        inner.with_post_processor(Some(processor));
        let largest = ids.into_iter().map(|id| id as usize + 1).max().unwrap_or(0);
        let vocabulary_size = self.vocabulary_size().max(largest);
        Ok(self.clone().with_inner(inner, template(ids)?, vocabulary_size))
    }
}

fn template([start, delimiter, extract]: [u32; 3]) -> Result<Template, TextError> {
    let special = |id| Slot::Special { id, segment: 0 };
    let (first, second) = (Slot::First { segment: 0 }, Slot::Second { segment: 0 });
    let single = vec![special(start), first, special(extract)];
    Template::new(single, vec![special(start), first, special(delimiter), second, special(extract)])
}

/// The template in the words of `tokenizers`, behind a processor that only trims offsets.
fn post_processor(old: &Value, ids: [u32; 3]) -> Value {
    let special = |i: usize| json!({"SpecialToken": {"id": TASK_TOKENS[i], "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let entry = |i: usize| {
        let token = TASK_TOKENS[i];
        (token.to_owned(), json!({"id": token, "ids": [ids[i]], "tokens": [token]}))
    };
    let own = json!({
        "type": "TemplateProcessing",
        "single": [special(0), text("A"), special(2)],
        "pair": [special(0), text("A"), special(1), text("B"), special(2)],
        "special_tokens": Value::Object((0..TASK_TOKENS.len()).map(entry).collect()),
    });
    match old["type"].as_str() {
        Some("ByteLevel") => json!({"type": "Sequence", "processors": [old, own]}),
        _ => own,
    }
}
