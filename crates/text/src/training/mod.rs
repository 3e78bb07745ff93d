//! Tokenizers out of text: WordPiece, BPE on characters or bytes, and the unigram language model.
//!
//! The trainers are our own, because the `tokenizers` crate's give another vocabulary from run to run
//! (huggingface/tokenizers#1794). Here the same text gives the same bytes, whatever the number of threads and however
//! it is divided into blocks: counts are sums of whole numbers, ties are broken by the order of ids or texts, sums of
//! fractions go in fixed chunks, and nothing depends on the order of a hash map. The crate stays what encodes, and
//! words are counted with the very normalizer and pre-tokenizer that the finished tokenizer has.
//!
//! Deliberately not here: files (the caller reads them), and special tokens of one's own.

mod merges;
mod unigram;
mod words;

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::decoders::bpe::BPEDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{BertNormalizer, Lowercase, NFKC, NFKD, Nmt, Replace, Sequence, Strip, StripAccents};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::Metaspace;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use crate::error::TextError;
use crate::files::{Settings, WordPieceOptions};
use crate::guard::shielded;
use crate::tokenizer::Tokenizer;
use merges::{Marks, MergeSettings};
use unigram::UnigramSettings;
use words::{Counted, WordCounter};

/// What kind of tokenizer to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingKind {
    /// BERT's: merges by frequency as Hugging Face's trainer makes them (Google's was never published), `##` before
    /// what continues a word, greedy longest match when encoding.
    WordPiece,
    /// BPE on characters, `</w>` after what ends a word, as in the first GPT.
    Bpe,
    /// BPE on bytes, as in RoBERTa: every text can be written, and case is always kept.
    ByteBpe,
    /// SentencePiece's unigram language model, `▁` before what begins a word.
    Unigram,
}

/// How to train.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingSettings {
    /// The kind.
    pub kind: TrainingKind,
    /// How many tokens the vocabulary has, the five special ones included.
    pub vocabulary_size: usize,
    /// Whether texts are lower-cased and lose their accents. Not with byte-level BPE.
    pub lowercase: bool,
    /// A merge, or a piece of the unigram model's first vocabulary, must be seen so often.
    pub min_frequency: u64,
    /// At most so many different characters, the most frequent, and those of ASCII beyond it; others become the unknown
    /// token. Byte-level BPE has its 256 bytes instead.
    pub alphabet_limit: usize,
    /// At most so many different words (as white space divides the text) are held while counting, at some 80 bytes
    /// each. When there are more, the rarest are dropped, and [`TrainingReport::dropped_words`] says how many.
    pub distinct_limit: usize,
    /// How many threads to use. They change nothing but the time.
    pub threads: usize,
}

impl TrainingSettings {
    /// The defaults of a kind: lower case except for byte-level BPE, at least two of everything, 1,000 characters.
    pub fn new(kind: TrainingKind, vocabulary_size: usize) -> Self {
        Self {
            kind,
            vocabulary_size,
            lowercase: kind != TrainingKind::ByteBpe,
            min_frequency: 2,
            alphabet_limit: 1000,
            distinct_limit: 4 << 20,
            threads: 1,
        }
    }

    fn check(&self) -> Result<(), TextError> {
        let bad = |setting, expected: &str, got: String| TextError::BadTraining {
            setting,
            expected: expected.to_owned(),
            got,
        };
        if self.lowercase && self.kind == TrainingKind::ByteBpe {
            return Err(bad("lowercase", "false for byte-level BPE, which keeps case", "true".to_owned()));
        }
        if self.vocabulary_size > MOST_PIECES {
            let expected = format!("at most {MOST_PIECES}");
            return Err(bad("vocabulary_size", &expected, self.vocabulary_size.to_string()));
        }
        for (setting, value) in [
            ("alphabet_limit", self.alphabet_limit),
            ("distinct_limit", self.distinct_limit),
            ("threads", self.threads),
        ] {
            if value == 0 {
                return Err(bad(setting, "at least 1", "0".to_owned()));
            }
        }
        Ok(())
    }
}

/// No vocabulary in use has a tenth of it, and ids must stay below what files may hold.
const MOST_PIECES: usize = 1 << 23;

/// How far training is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingProgress {
    /// So many bytes of text were read.
    Reading {
        /// Bytes so far.
        bytes: u64,
    },
    /// The vocabulary is being made: `done` of `of` steps.
    Learning {
        /// Steps so far.
        done: usize,
        /// Steps in all, as far as that can be known.
        of: usize,
    },
}

/// What the text was and what came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrainingReport {
    /// Bytes of text.
    pub bytes: u64,
    /// Lines of text, empty ones included.
    pub lines: u64,
    /// Words, as the tokenizer splits them.
    pub words: u64,
    /// Different words.
    pub distinct_words: usize,
    /// Words that were dropped because there were too many different ones; see [`TrainingSettings::distinct_limit`].
    pub dropped_words: u64,
    /// Different characters of the words.
    pub characters: usize,
    /// Different characters that were left out of the alphabet.
    pub dropped_characters: usize,
    /// The vocabulary's size; below the one that was asked for when the text has no more to give.
    pub vocabulary_size: usize,
}

/// A tokenizer and how it came about.
#[derive(Debug, Clone)]
pub struct Trained {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// What the text was and what came of it.
    pub report: TrainingReport,
}

/// Trains a tokenizer on blocks of text. A block holds whole lines, and a line is a text as it will later be encoded;
/// how lines are gathered into blocks makes no difference. `progress` is called now and then, and can stop the work,
/// which then ends with [`TextError::Stopped`].
///
/// ```
/// use henson_text::{TextError, TrainingKind, TrainingSettings, train};
///
/// let settings = TrainingSettings::new(TrainingKind::WordPiece, 40);
/// let blocks = ["the cat sat on the mat\nthe cat\n", "the mat\n"].map(|block| Ok::<_, TextError>(block.to_owned()));
/// let trained = train(&settings, blocks, &mut |_| std::ops::ControlFlow::Continue(()))?;
/// assert!(trained.tokenizer.id("the").is_some());
/// assert_eq!(trained.report.words, 10);
/// # Ok::<(), TextError>(())
/// ```
pub fn train<E: From<TextError>>(
    settings: &TrainingSettings,
    blocks: impl IntoIterator<Item = Result<String, E>>,
    progress: &mut dyn FnMut(TrainingProgress) -> ControlFlow<()>,
) -> Result<Trained, E> {
    settings.check()?;
    let parts = Parts::new(settings)?;
    let mut counter = WordCounter::new(settings.kind, settings.distinct_limit, settings.threads);
    for block in blocks {
        if counter.add(&block?) {
            go_on(progress(TrainingProgress::Reading { bytes: counter.bytes() }))?;
        }
    }
    let counted = counter.finish(&parts)?;
    if counted.words.is_empty() && counted.dropped > 0 {
        let expected = "more, since no word is more frequent than others and all were dropped".to_owned();
        let got = settings.distinct_limit.to_string();
        return Err(TextError::BadTraining { setting: "distinct_limit", expected, got }.into());
    }
    if counted.words.is_empty() {
        return Err(TextError::NoWords.into());
    }
    Ok(learn(settings, parts, counted, &mut |done, of| go_on(progress(TrainingProgress::Learning { done, of })))?)
}

fn go_on(flow: ControlFlow<()>) -> Result<(), TextError> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(TextError::Stopped),
    }
}

/// What stands before the model, the same for counting as for encoding later.
struct Parts {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: PreTokenizerWrapper,
}

impl Parts {
    fn new(settings: &TrainingSettings) -> Result<Self, TextError> {
        Ok(match settings.kind {
            TrainingKind::WordPiece | TrainingKind::Bpe => Self {
                normalizer: Some(BertNormalizer::new(true, true, None, settings.lowercase).into()),
                pre_tokenizer: BertPreTokenizer.into(),
            },
            TrainingKind::ByteBpe => {
                Self { normalizer: None, pre_tokenizer: ByteLevel::default().add_prefix_space(false).into() }
            }
            TrainingKind::Unigram => {
                let build = || {
                    let mut steps: Vec<NormalizerWrapper> = vec![Nmt.into()];
                    if settings.lowercase {
                        // As ALBERT does; NFKC then puts together what is no accent, such as Korean syllables.
                        steps.extend([NFKD.into(), StripAccents.into(), Lowercase.into()]);
                    }
                    steps.push(NFKC.into());
                    steps.push(Replace::new(ReplacePattern::Regex(r"\s+".to_owned()), " ")?.into());
                    steps.push(Strip::new(true, true).into());
                    Ok(Sequence::new(steps).into())
                };
                let normalizer = shielded(build).map_err(|reason| TextError::Failed { action: "split", reason })?;
                Self { normalizer: Some(normalizer), pre_tokenizer: Metaspace::default().into() }
            }
        })
    }
}

/// How many characters count as common: no script with case has more letters.
const COMMON: usize = 100;

/// BERT's special tokens, in the order of their ids.
const BERT_TOKENS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
/// RoBERTa's, in the order that Hugging Face's examples train them with.
const ROBERTA_TOKENS: [&str; 5] = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"];

fn learn(
    settings: &TrainingSettings,
    parts: Parts,
    counted: Counted,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), TextError>,
) -> Result<Trained, TextError> {
    let merge_settings = |specials: &[&str], alphabet: Vec<char>, marks: Marks| MergeSettings {
        specials: specials.iter().map(|&special| special.to_owned()).collect(),
        alphabet,
        common: counted.alphabet(COMMON),
        marks,
        vocabulary_size: settings.vocabulary_size,
        min_frequency: settings.min_frequency,
    };
    let alphabet = || with_ascii(counted.first_characters(settings.alphabet_limit), settings);
    let kept = counted.first_characters(settings.alphabet_limit).len();
    let mut dropped_characters = counted.characters.len() - kept;
    let origin = Path::new("the trained vocabulary");
    let refused = |reason| TextError::Refused { path: origin.to_owned(), reason };
    let tokenizer = match settings.kind {
        TrainingKind::WordPiece => {
            let learned = merges::learn(
                &counted.words,
                &merge_settings(&BERT_TOKENS, alphabet(), Marks::Continuation),
                progress,
            )?;
            let options = WordPieceOptions { lowercase: Some(settings.lowercase), ..WordPieceOptions::default() };
            Tokenizer::from_vocabulary(&learned.pieces, &options)?
        }
        TrainingKind::Bpe => {
            let learned =
                merges::learn(&counted.words, &merge_settings(&BERT_TOKENS, alphabet(), Marks::WordEnd), progress)?;
            let build = || {
                let model = BPE::builder()
                    .vocab_and_merges(vocabulary(&learned.pieces), learned.merges())
                    .unk_token("[UNK]".to_owned())
                    .end_of_word_suffix(merges::WORD_END.to_owned())
                    .build()?;
                let mut inner = tokenizers::Tokenizer::new(model);
                inner.with_normalizer(parts.normalizer)?;
                inner.with_pre_tokenizer(Some(parts.pre_tokenizer));
                inner.with_decoder(Some(BPEDecoder::default()));
                Ok(inner)
            };
            Tokenizer::assemble(shielded(build).map_err(refused)?, Settings::default(), &[], origin)?
        }
        TrainingKind::ByteBpe => {
            dropped_characters = 0;
            let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
            alphabet.sort_unstable();
            let learned =
                merges::learn(&counted.words, &merge_settings(&ROBERTA_TOKENS, alphabet, Marks::None), progress)?;
            let build = || {
                let model = BPE::builder().vocab_and_merges(vocabulary(&learned.pieces), learned.merges()).build()?;
                let mut inner = tokenizers::Tokenizer::new(model);
                inner.with_pre_tokenizer(Some(parts.pre_tokenizer));
                inner.with_decoder(Some(ByteLevel::default()));
                // RoBERTa's mask takes the space before it along.
                inner.add_special_tokens([AddedToken::from("<mask>", true).lstrip(true)])?;
                Ok(inner)
            };
            let names = [("bos_token", "<s>"), ("eos_token", "</s>"), ("tokenizer_class", "RobertaTokenizer")];
            let config: Map<String, Value> =
                names.map(|(key, value)| (key.to_owned(), json!(value))).into_iter().collect();
            let settings = Settings { config, ..Settings::default() };
            Tokenizer::assemble(shielded(build).map_err(refused)?, settings, &[], origin)?
        }
        TrainingKind::Unigram => {
            let vocabulary = unigram_vocabulary(settings, &counted, alphabet(), progress)?;
            let build = || {
                let mut inner = tokenizers::Tokenizer::new(Unigram::from(vocabulary, Some(1), false)?);
                inner.with_normalizer(parts.normalizer)?;
                inner.with_pre_tokenizer(Some(parts.pre_tokenizer));
                inner.with_decoder(Some(Metaspace::default()));
                Ok(inner)
            };
            Tokenizer::assemble(shielded(build).map_err(refused)?, Settings::default(), &[], origin)?
        }
    };
    let report = TrainingReport {
        bytes: counted.bytes,
        lines: counted.lines,
        words: counted.occurrences,
        distinct_words: counted.words.len(),
        dropped_words: counted.dropped,
        characters: counted.characters.len(),
        dropped_characters,
        vocabulary_size: tokenizer.vocabulary_size(),
    };
    Ok(Trained { tokenizer, report })
}

/// The vocabulary of a unigram model with its scores, special tokens first.
fn unigram_vocabulary(
    settings: &TrainingSettings,
    counted: &Counted,
    alphabet: Vec<char>,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), TextError>,
) -> Result<Vec<(String, f64)>, TextError> {
    let unigram_settings = UnigramSettings {
        alphabet,
        specials: BERT_TOKENS.len(),
        vocabulary_size: settings.vocabulary_size,
        min_frequency: settings.min_frequency,
        threads: settings.threads,
    };
    let pieces = unigram::learn(&counted.words, &unigram_settings, progress)?;
    // Low enough that no text is ever written with a special token, should its characters stand there.
    let special = pieces.last().map_or(0.0, |piece| piece.score.floor()) - 100.0;
    let mut vocabulary: Vec<(String, f64)> = BERT_TOKENS.map(|token| (token.to_owned(), special)).into();
    vocabulary.extend(pieces.into_iter().map(|piece| (piece.text, piece.score)));
    Ok(vocabulary)
}

/// The characters with all that ASCII can print, as the normalizer leaves it, though the text may have none of some. They
/// take at most half of the vocabulary, so a tiny one goes without.
fn with_ascii(mut characters: Vec<char>, settings: &TrainingSettings) -> Vec<char> {
    let printable = ('!'..='~').filter(|c| !(settings.lowercase && c.is_ascii_uppercase()));
    let mut all: Vec<char> = characters.iter().copied().chain(printable).collect();
    all.sort_unstable();
    all.dedup();
    // Twice: a character may have a form of its own inside of words.
    if 2 * (2 * all.len() + BERT_TOKENS.len()) <= settings.vocabulary_size {
        characters = all;
    }
    characters
}

fn vocabulary(pieces: &[String]) -> Vocab {
    (0_u32..).zip(pieces).map(|(id, piece)| (piece.clone(), id)).collect()
}
