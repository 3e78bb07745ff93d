//! How much work a tokenizer may make of a text. A `tokenizer.json` is a small program: its components replace parts of a
//! text by longer ones, one after the other, and match patterns that take any amount of time. What those of honest files
//! do stays far below the limits here.
//!
//! What can be seen in the file is refused when it is opened: [`Work::of`]. What depends on the text is tried out before the
//! `tokenizers` crate sees the text, step by step and with an eye on size and time: [`Work::check`]. Components that cannot go
//! beyond the limits are not tried, so that the tokenizers of BERT, RoBERTa, GPT-2 and Llama pay nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use fancy_regex::{Expr, Regex};
use serde_json::Value;
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper,
};

use crate::error::TextError;
use crate::guard::{base64, list, malformed, shielded};

/// Components of a tokenizer; the longest lists of replacements have some dozens.
const MOST_COMPONENTS: usize = 256;
/// Bytes of a pattern. That of GPT-4o, the longest in wide use, has some 500.
const LONGEST_PATTERN: usize = 4096;
/// States of a compiled pattern, with repetitions written out, as [`states`] counts them. That of GPT-4o has some 2,500; so many
/// are compiled in a tenth of a second.
const MOST_STATES: u64 = 20_000;
/// Bytes that components may make of one byte, judged by the file alone: a bound far above what any text shows.
const GROWTH_OF_FILE: u64 = 1 << 14;
/// Bytes that components may make of each byte of a text.
const GROWTH: usize = 16;
/// So many bytes are no burden, whatever they were made of.
const FREE: usize = 256 << 10;
/// How long the patterns of a component may search a text.
const PATIENCE: Duration = Duration::from_secs(5);

/// Patterns in wide use, whose time grows with the text alone: what splits words in GPT-2, GPT-4, Llama 3 and Qwen, and what
/// joins spaces in XLM-R and its kin.
const KNOWN_PATTERNS: [&str; 10] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" {2,}",
    r"\s+",
    r"[\s\x1c-\x1f]+",
    r"\d",
    r"[0-9]",
    r"\p{N}",
    r"\p{N}{1,3}",
];

/// The steps that a text takes through normalizer and pre-tokenizer.
pub(crate) struct Work {
    steps: Vec<Step>,
    /// Bytes that all of them may make of one.
    growth: u64,
}

struct Step {
    /// As messages call it: `normalizer.normalizers[2] (Replace)`.
    name: String,
    part: Part,
    /// Bytes that it may make of one.
    growth: u64,
    /// What it searches with, where that is not known to be harmless.
    pattern: Option<Regex>,
}

enum Part {
    Normalizer(NormalizerWrapper),
    /// A normalizer that puts a text in place of another.
    Replace(NormalizerWrapper, Pattern, usize),
    PreTokenizer(PreTokenizerWrapper),
}

/// What is replaced.
enum Pattern {
    Text(String),
    Regex(Regex),
}

impl Work {
    /// The steps of a `tokenizer.json`, or the component that goes beyond the limits.
    pub(crate) fn of(path: &Path, normalizer: &Value, pre_tokenizer: &Value) -> Result<Self, TextError> {
        let mut components = Vec::new();
        flatten(normalizer, "normalizer", "normalizers", &mut components);
        let normalizers = components.len();
        flatten(pre_tokenizer, "pre_tokenizer", "pretokenizers", &mut components);
        check_count(path, &components)?;
        let mut work = Self { steps: Vec::with_capacity(components.len()), growth: 1 };
        let mut decomposed = false;
        for (number, (place, value)) in components.into_iter().enumerate() {
            let growth = growth_of(value, &mut decomposed);
            work.growth = work.growth.saturating_mul(growth);
            check_growth(path, &place, work.growth)?;
            let (pattern, is_known) = pattern_of(path, &place, value)?;
            let refused = |reason| TextError::Refused { path: path.to_owned(), reason: format!("{place}: {reason}") };
            let watched = match &pattern {
                Some(Pattern::Regex(regex)) if !is_known => Some(regex.clone()),
                _ => None,
            };
            let part = if number < normalizers {
                let normalizer = shielded(|| Ok(serde_json::from_value(value.clone())?)).map_err(refused)?;
                match (pattern, value["content"].as_str()) {
                    (Some(pattern), Some(content)) => Part::Replace(normalizer, pattern, content.len()),
                    _ => Part::Normalizer(normalizer),
                }
            } else {
                Part::PreTokenizer(shielded(|| Ok(serde_json::from_value(value.clone())?)).map_err(refused)?)
            };
            let name = format!("{place} ({})", value["type"].as_str().unwrap_or("a component without a type"));
            work.steps.push(Step { name, part, growth, pattern: watched });
        }
        Ok(work)
    }

    /// Whether a text stays within the limits.
    pub(crate) fn check(&self, text: &str) -> Result<(), TextError> {
        let may_grow = self.growth > GROWTH as u64 && self.growth.saturating_mul(text.len() as u64) > FREE as u64;
        let watched = self.steps.iter().rposition(|step| step.pattern.is_some()).map_or(0, |last| last + 1);
        let steps = if may_grow { &self.steps[..] } else { &self.steps[..watched] };
        if steps.is_empty() {
            return Ok(());
        }
        // What the crate itself refuses, it refuses again when the text is encoded.
        shielded(|| walk(steps, text)).unwrap_or(Ok(()))
    }
}

/// The growth that a decoder may cause, judged by the file alone.
pub(crate) fn check_decoder(path: &Path, decoder: &Value) -> Result<(), TextError> {
    let mut components = Vec::new();
    flatten(decoder, "decoder", "decoders", &mut components);
    check_count(path, &components)?;
    let mut growth = 1_u64;
    for (place, value) in components {
        if value.get("pattern").is_some() {
            growth = growth.saturating_mul(growth_of(value, &mut false));
            pattern_of(path, &place, value)?;
        }
        if growth > GROWTH as u64 {
            let expected = format!("with the components before it, at most {GROWTH} bytes for each byte");
            return Err(malformed(path, &place, &expected, &Value::from(growth)));
        }
    }
    Ok(())
}

fn check_count(path: &Path, components: &[(String, &Value)]) -> Result<(), TextError> {
    match components.get(MOST_COMPONENTS) {
        None => Ok(()),
        Some((place, _)) => {
            let count = Value::from(components.len());
            Err(malformed(path, place, &format!("at most {MOST_COMPONENTS} components"), &count))
        }
    }
}

fn check_growth(path: &Path, place: &str, growth: u64) -> Result<(), TextError> {
    if growth <= GROWTH_OF_FILE {
        return Ok(());
    }
    let expected = format!("that it and the components before it make at most {GROWTH_OF_FILE} bytes out of one");
    Err(malformed(path, place, &expected, &Value::from(growth)))
}

/// The components inside of sequences, in order, with their places. Old files have sequences without a type.
fn flatten<'v>(value: &'v Value, place: &str, key: &str, into: &mut Vec<(String, &'v Value)>) {
    match value.get(key) {
        Some(inner) => {
            let inner = list(inner).iter().enumerate();
            inner.for_each(|(i, value)| flatten(value, &format!("{place}.{key}[{i}]"), key, into));
        }
        None if value.is_null() => {}
        None => into.push((place.to_owned(), value)),
    }
}

/// Bytes that a component may make of one, at the worst. Further Unicode forms do not decompose what one `decomposed`.
fn growth_of(value: &Value, decomposed: &mut bool) -> u64 {
    let length = |value: &Value| value.as_str().map_or(0, str::len) as u64;
    if let Some(content) = value.get("content") {
        *decomposed = false;
        return match length(&value["pattern"]["String"]) {
            0 => 1 + length(content),
            pattern => length(content).div_ceil(pattern).max(1),
        };
    }
    if let Some(prepended) = value.get("prepend") {
        *decomposed = false;
        // Once for each stretch between special tokens, which may be of one byte.
        return 1 + length(prepended);
    }
    if let Some(map) = value.get("precompiled_charsmap") {
        *decomposed = false;
        return longest_replacement(map);
    }
    match value["type"].as_str() {
        // U+FDFA has 3 bytes and becomes 33.
        Some("NFKC" | "NFKD" | "NFC" | "NFD") if !*decomposed => {
            *decomposed = true;
            12
        }
        // Accents apart, a space on each side of a character of three bytes, lower case.
        Some("BertNormalizer") => 8,
        Some("Lowercase") => 2,
        // Two bytes for one, and a space before a word of one.
        Some("ByteLevel") => 4,
        // Four bytes for a space, and again before a word of one.
        Some("Metaspace") => 5,
        _ => 1,
    }
}

/// The longest text that SentencePiece's table puts in place of a character.
fn longest_replacement(map: &Value) -> u64 {
    let bytes = map.as_str().and_then(base64).unwrap_or_default();
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let replacements = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default();
    replacements.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1).max(1) as u64
}

/// What a component searches for, compiled within the limits, and whether it is known to be harmless.
fn pattern_of(path: &Path, place: &str, value: &Value) -> Result<(Option<Pattern>, bool), TextError> {
    if let Some(text) = value["pattern"]["String"].as_str() {
        return Ok((Some(Pattern::Text(text.to_owned())), true));
    }
    let Some(pattern) = value["pattern"]["Regex"].as_str() else { return Ok((None, true)) };
    let place = format!("{place}.pattern");
    if pattern.len() > LONGEST_PATTERN {
        let (expected, length) = (format!("at most {LONGEST_PATTERN} bytes"), Value::from(pattern.len()));
        return Err(malformed(path, &place, &expected, &length));
    }
    let unusable = |error: fancy_regex::Error| {
        malformed(path, &place, &format!("a regular expression ({error})"), &Value::from(pattern))
    };
    let states = states(&Expr::parse_tree(pattern).map_err(unusable)?.expr);
    if states > MOST_STATES {
        let expected = format!("a regular expression of at most {MOST_STATES} states, with repetitions written out");
        return Err(malformed(path, &place, &expected, &Value::from(states)));
    }
    let compiled = Regex::new(pattern).map_err(unusable)?;
    Ok((Some(Pattern::Regex(compiled)), KNOWN_PATTERNS.contains(&pattern)))
}

/// The states that a pattern is compiled to, roughly: one for a character, a hundred for a class of them, and all of that again
/// for each repetition.
fn states(expression: &Expr) -> u64 {
    let sum = |list: &[Expr]| list.iter().map(states).fold(1, u64::saturating_add);
    match expression {
        Expr::Literal { val, .. } => val.len() as u64,
        Expr::Any { .. } | Expr::Delegate { .. } => 100,
        Expr::Concat(list) | Expr::Alt(list) => sum(list),
        Expr::Group(inner) | Expr::AtomicGroup(inner) | Expr::LookAround(inner, _) => states(inner).saturating_add(1),
        Expr::Repeat { child, lo, hi, .. } => {
            let times = if *hi == usize::MAX { *lo } else { *hi };
            states(child).saturating_mul(times.max(1) as u64)
        }
        Expr::Conditional { condition, true_branch, false_branch } => {
            [condition, true_branch, false_branch].into_iter().map(|part| states(part)).fold(1, u64::saturating_add)
        }
        // Groups that call each other have no bound, and no tokenizer has them.
        Expr::SubroutineCall(_) | Expr::UnresolvedNamedSubroutineCall { .. } => u64::MAX,
        _ => 1,
    }
}

/// Takes a text through the steps. The inner result is ours, the outer one the crate's.
fn walk(steps: &[Step], text: &str) -> tokenizers::Result<Result<(), TextError>> {
    let allowed = (GROWTH * text.len()).max(FREE);
    let mut normalized = NormalizedString::from(text);
    let mut words: Option<PreTokenizedString> = None;
    for step in steps {
        let size = match &step.part {
            Part::PreTokenizer(part) => {
                let words = words.get_or_insert_with(|| PreTokenizedString::from(normalized.clone()));
                for (word, ..) in words.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
                    if let Err(error) = step.search(word) {
                        return Ok(Err(error));
                    }
                }
                part.pre_tokenize(words)?;
                let words = words.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
                words.iter().map(|(word, ..)| word.len()).sum()
            }
            Part::Normalizer(part) | Part::Replace(part, ..) => {
                if let Err(error) = step.search(normalized.get()) {
                    return Ok(Err(error));
                }
                if normalized.len().saturating_mul(step.growth as usize) > allowed {
                    let size = step.size_of(normalized.get(), allowed)?;
                    if size > allowed {
                        return Ok(Err(step.grows(allowed)));
                    }
                }
                part.normalize(&mut normalized)?;
                normalized.len()
            }
        };
        if size > allowed {
            return Ok(Err(step.grows(allowed)));
        }
    }
    Ok(Ok(()))
}

impl Step {
    fn grows(&self, allowed: usize) -> TextError {
        let what = format!("it makes more than {allowed} bytes out of it, {GROWTH} for each of its own");
        TextError::TooMuchWork { component: self.name.clone(), what }
    }

    /// The bytes that it would make of a text, without making them all at once; more than allowed is not told exactly.
    fn size_of(&self, text: &str, allowed: usize) -> tokenizers::Result<usize> {
        let replaced = |(matches, matched): (usize, usize), content: usize| {
            text.len() - matched.min(text.len()) + matches.saturating_mul(content)
        };
        match &self.part {
            Part::Replace(_, Pattern::Text(pattern), content) => {
                let matches = text.matches(pattern.as_str()).count();
                Ok(replaced((matches, matches * pattern.len()), *content))
            }
            Part::Replace(_, Pattern::Regex(pattern), content) => {
                let lengths = pattern.find_iter(text).map_while(Result::ok).map(|found| found.range().len());
                Ok(replaced(lengths.fold((0, 0), |(count, sum), length| (count + 1, sum + length)), *content))
            }
            Part::Normalizer(part) => {
                let (mut rest, mut size) = (text, 0);
                while !rest.is_empty() && size <= allowed {
                    let (piece, others) = rest.split_at(rest.ceil_char_boundary(PIECE.min(rest.len())));
                    let mut piece = NormalizedString::from(piece);
                    part.normalize(&mut piece)?;
                    size += piece.len();
                    rest = others;
                }
                Ok(size)
            }
            Part::PreTokenizer(_) => Ok(text.len()),
        }
    }

    /// Searches a text as the crate will, first the beginning of it and then twice as much each time, so that a search whose
    /// time grows faster than the text is given up while it is short.
    fn search(&self, text: &str) -> Result<(), TextError> {
        let Some(pattern) = &self.pattern else { return Ok(()) };
        let begin = Instant::now();
        let mut length = PIECE.min(text.len());
        loop {
            length = text.ceil_char_boundary(length.min(text.len()));
            let is_all = length == text.len();
            let patience = if is_all { PATIENCE } else { PATIENCE / 8 };
            let start = Instant::now();
            for found in pattern.find_iter(&text[..length]) {
                if found.is_err() {
                    let what = "its regular expression gives up on it".to_owned();
                    return Err(TextError::TooMuchWork { component: self.name.clone(), what });
                }
                if start.elapsed() > patience {
                    break;
                }
            }
            if start.elapsed() > patience || begin.elapsed() > 2 * PATIENCE {
                let what =
                    format!("its regular expression takes too long for {length} bytes, the limit is {patience:?}");
                return Err(TextError::TooMuchWork { component: self.name.clone(), what });
            }
            if is_all {
                return Ok(());
            }
            length *= 2;
        }
    }
}

/// Bytes of a text that are tried first.
const PIECE: usize = 1 << 10;
