//! Tokenizers out of text: WordPiece, BPE on characters or bytes, and the unigram language model.
//!
//! The trainers are our own, because the `tokenizers` crate's give another vocabulary from run to run
//! (huggingface/tokenizers#1794). Here the same text gives the same bytes, whatever the number of threads and however
//! it is divided into blocks: counts are sums of whole numbers, ties are broken by the order of ids or texts, sums of
//! fractions go in fixed chunks, and nothing depends on the order of a hash map. The crate stays what encodes, and
//! words are counted with the very normalizer and pre-tokenizer that the finished tokenizer has.
//!
//! Deliberately not here: files (the caller reads them), and special tokens of one's own beyond the [sets](SpecialSet) that
//! models are known to use.

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
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
};

use crate::error::TextError;
use crate::files::{Settings, WordPieceOptions};
use crate::guard::shielded;
use crate::template;
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

/// Which special tokens a vocabulary gets, and what stands around a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialSet {
    /// BERT's: `[CLS] a [SEP]`, `[MASK]`.
    Bert,
    /// RoBERTa's and BART's: `<s> a </s>`, `<mask>`. With byte-level BPE alone.
    Roberta,
    /// GPT-2's: `<|endoftext|>` between texts, and nothing around one. With byte-level BPE alone.
    EndOfText,
    /// T5's: `a </s>`, and padding that a decoder begins with.
    Ended,
    /// XLNet's: `a <sep> <cls>`, the last in a segment of its own. With the unigram model alone.
    XlNet,
}

impl SpecialSet {
    /// Its tokens in the order of their ids: BERT's, RoBERTa's in the order that Hugging Face's examples train them with, T5's.
    fn tokens(self) -> &'static [&'static str] {
        match self {
            Self::Bert => &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            Self::Roberta => &["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            Self::EndOfText => &[END_OF_TEXT],
            Self::Ended => &["<pad>", "</s>", "<unk>"],
            Self::XlNet => &["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
        }
    }

    /// The models that it is named after.
    fn name(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::EndOfText => "gpt2",
            Self::Ended => "t5",
            Self::XlNet => "xlnet",
        }
    }

    /// What stands for words that cannot be written.
    fn unknown(self) -> Option<&'static str> {
        self.tokens().iter().copied().find(|token| matches!(*token, "[UNK]" | "<unk>"))
    }

    /// Whether tokenizers of a kind can have it.
    fn serves(self, kind: TrainingKind) -> bool {
        match self {
            Self::Bert => kind != TrainingKind::ByteBpe,
            Self::Roberta | Self::EndOfText => kind == TrainingKind::ByteBpe,
            Self::Ended => kind != TrainingKind::WordPiece,
            Self::XlNet => kind == TrainingKind::Unigram,
        }
    }

    /// What tokenizer_config.json says beside the roles that have names of their own.
    fn config(self) -> Map<String, Value> {
        let names: &[(&str, &str)] = match self {
            Self::Bert => &[],
            Self::Roberta => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("tokenizer_class", "RobertaTokenizer")],
            Self::EndOfText => &[
                ("bos_token", END_OF_TEXT),
                ("eos_token", END_OF_TEXT),
                ("unk_token", END_OF_TEXT),
                ("tokenizer_class", "GPT2Tokenizer"),
            ],
            Self::Ended => &[("eos_token", "</s>")],
            // Padding before the text, so that the last column of a batch is the last token.
            Self::XlNet => &[
                ("unk_token", "<unk>"),
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("cls_token", "<cls>"),
                ("sep_token", "<sep>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
                ("padding_side", "left"),
            ],
        };
        names.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect()
    }

    /// What `tokenizers` sets around a text, where that is not what the special tokens imply by themselves.
    fn post_processor(self) -> tokenizers::Result<Option<PostProcessorWrapper>> {
        Ok(match self {
            Self::Bert | Self::Roberta => None,
            Self::EndOfText => Some(ByteLevel::default().trim_offsets(false).into()),
            Self::XlNet => Some(template::processor(("<cls>", 3), ("<sep>", 4), true)?),
            Self::Ended => {
                let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
                let end = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
                let id = self.tokens().iter().position(|token| *token == "</s>");
                Some(serde_json::from_value(json!({
                    "type": "TemplateProcessing",
                    "single": [text("A"), end],
                    "pair": [text("A"), end, text("B"), end],
                    "special_tokens": {"</s>": {"id": "</s>", "ids": [id], "tokens": ["</s>"]}},
                }))?)
            }
        })
    }
}

/// GPT-2's only special token.
const END_OF_TEXT: &str = "<|endoftext|>";

/// How to train.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingSettings {
    /// The kind.
    pub kind: TrainingKind,
    /// How many tokens the vocabulary has, special ones and sentinels included.
    pub vocabulary_size: usize,
    /// Its special tokens.
    pub specials: SpecialSet,
    /// So many tokens `<extra_id_0>`, `<extra_id_1>`, … at the end of the vocabulary, the last id first: what stands for spans in
    /// T5's pre-training.
    pub sentinels: usize,
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
            specials: if kind == TrainingKind::ByteBpe { SpecialSet::Roberta } else { SpecialSet::Bert },
            sentinels: 0,
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
        if !self.specials.serves(self.kind) {
            let expected = match self.kind {
                TrainingKind::WordPiece => "bert for this kind",
                TrainingKind::Bpe | TrainingKind::Unigram => "bert or t5 for this kind",
                TrainingKind::ByteBpe => "roberta, gpt2 or t5 for this kind",
            };
            return Err(bad("specials", expected, self.specials.name().to_owned()));
        }
        if self.sentinels > 0 && self.kind == TrainingKind::WordPiece {
            return Err(bad("sentinels", "0 for WordPiece", self.sentinels.to_string()));
        }
        if self.sentinels > MOST_SENTINELS || self.sentinels >= self.vocabulary_size.max(1) {
            let expected = format!("at most {MOST_SENTINELS}, and fewer than vocabulary_size");
            return Err(bad("sentinels", &expected, self.sentinels.to_string()));
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

/// T5 has 100; a sequence of 4096 tokens needs about 200.
const MOST_SENTINELS: usize = 10_000;

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

fn learn(
    settings: &TrainingSettings,
    parts: Parts,
    counted: Counted,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), TextError>,
) -> Result<Trained, TextError> {
    let merge_settings = |alphabet: Vec<char>, marks: Marks| MergeSettings {
        specials: settings.specials.tokens().iter().map(|&special| special.to_owned()).collect(),
        alphabet,
        common: counted.alphabet(COMMON),
        marks,
        vocabulary_size: settings.vocabulary_size - settings.sentinels,
        min_frequency: settings.min_frequency,
    };
    let alphabet = || with_ascii(counted.first_characters(settings.alphabet_limit), settings);
    let kept = counted.first_characters(settings.alphabet_limit).len();
    let mut dropped_characters = counted.characters.len() - kept;
    let tokenizer = match settings.kind {
        TrainingKind::WordPiece => {
            let learned = merges::learn(&counted.words, &merge_settings(alphabet(), Marks::Continuation), progress)?;
            let options = WordPieceOptions { lowercase: Some(settings.lowercase), ..WordPieceOptions::default() };
            Tokenizer::from_vocabulary(&learned.pieces, &options)?
        }
        TrainingKind::Bpe => {
            let learned = merges::learn(&counted.words, &merge_settings(alphabet(), Marks::WordEnd), progress)?;
            assemble(settings, parts, BPEDecoder::default().into(), |unknown| {
                let model = BPE::builder()
                    .vocab_and_merges(vocabulary(&learned.pieces), learned.merges())
                    .end_of_word_suffix(merges::WORD_END.to_owned());
                Ok(match unknown {
                    Some(unknown) => model.unk_token(unknown.to_owned()),
                    None => model,
                }
                .build()?
                .into())
            })?
        }
        TrainingKind::ByteBpe => {
            dropped_characters = 0;
            let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
            alphabet.sort_unstable();
            let learned = merges::learn(&counted.words, &merge_settings(alphabet, Marks::None), progress)?;
            // Every text can be written, so nothing is unknown.
            assemble(settings, parts, ByteLevel::default().into(), |_| {
                Ok(BPE::builder().vocab_and_merges(vocabulary(&learned.pieces), learned.merges()).build()?.into())
            })?
        }
        TrainingKind::Unigram => {
            let vocabulary = unigram_vocabulary(settings, &counted, alphabet(), progress)?;
            assemble(settings, parts, Metaspace::default().into(), |unknown| {
                let unknown = vocabulary.iter().position(|(piece, _)| Some(piece.as_str()) == unknown);
                Ok(Unigram::from(vocabulary, unknown, false)?.into())
            })?
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

/// A tokenizer around a model, which is made with the name of the unknown token.
fn assemble(
    settings: &TrainingSettings,
    parts: Parts,
    decoder: DecoderWrapper,
    model: impl FnOnce(Option<&str>) -> tokenizers::Result<ModelWrapper>,
) -> Result<Tokenizer, TextError> {
    let (origin, set) = (Path::new("the trained vocabulary"), settings.specials);
    let build = || {
        let mut inner = tokenizers::Tokenizer::new(model(set.unknown())?);
        inner.with_normalizer(parts.normalizer)?;
        inner.with_pre_tokenizer(Some(parts.pre_tokenizer));
        inner.with_decoder(Some(decoder));
        if let Some(processor) = set.post_processor()? {
            inner.with_post_processor(Some(processor));
        }
        if set == SpecialSet::Roberta {
            // RoBERTa's mask takes the space before it along.
            inner.add_special_tokens([AddedToken::from("<mask>", true).lstrip(true)])?;
        }
        let sentinels = (0..settings.sentinels).rev().map(|number| AddedToken::from(sentinel(number), true));
        inner.add_special_tokens(sentinels)?;
        Ok(inner)
    };
    let inner = shielded(build).map_err(|reason| TextError::Refused { path: origin.to_owned(), reason })?;
    let settings = Settings { config: set.config(), ..Settings::default() };
    Tokenizer::assemble(inner, settings, &[], origin)
}

/// The text of a sentinel.
pub(crate) fn sentinel(number: usize) -> String {
    format!("<extra_id_{number}>")
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
        specials: settings.specials.tokens().len(),
        vocabulary_size: settings.vocabulary_size - settings.sentinels,
        min_frequency: settings.min_frequency,
        threads: settings.threads,
    };
    let pieces = unigram::learn(&counted.words, &unigram_settings, progress)?;
    // Low enough that no text is ever written with a special token, should its characters stand there.
    let special = pieces.last().map_or(0.0, |piece| piece.score.floor()) - 100.0;
    let tokens = settings.specials.tokens().iter();
    let mut vocabulary: Vec<(String, f64)> = tokens.map(|token| ((*token).to_owned(), special)).collect();
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
    if 2 * (2 * all.len() + settings.specials.tokens().len()) <= settings.vocabulary_size {
        characters = all;
    }
    characters
}

fn vocabulary(pieces: &[String]) -> Vocab {
    (0_u32..).zip(pieces).map(|(id, piece)| (piece.clone(), id)).collect()
}
