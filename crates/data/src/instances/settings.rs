//! How instances are made: the settings that a recipe can make. An objective is a cut (how documents become sequences)
//! times a corruption (what is changed in them and predicted); [`InstanceSettings::cut`] and
//! [`Objective::masks`] are that table.

use henson_text::Template;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::noise::NoiseSettings;
use super::spans::text_of_source;
use crate::DataError;

/// How instances are made. The defaults are BERT's, with masks that are new in every epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceSettings {
    /// The most pieces of a sequence, special tokens included.
    pub sequence_length: usize,
    /// What is to be learnt.
    pub objective: Objective,
    /// How single segments are cut; pairs never leave their document, so that they know only `documents` and
    /// `sentence-pairs`.
    pub packing: Packing,
    /// What becomes of sentences that do not fit into a sequence by themselves.
    pub long_sentences: LongSentences,
    /// Where separators stand in a sequence of several sentences.
    pub separators: Separators,
    /// The share of documents that are cut for a shorter length, drawn from 2 up to the full one, so that a model also
    /// sees short sequences. Blocks are all of one length.
    pub short_sequences: f64,
    /// Which pieces are hidden together.
    pub masking: Masking,
    /// The share of pieces that are hidden.
    pub mask_probability: f64,
    /// How that share becomes a number of pieces.
    pub mask_count: MaskCount,
    /// Whether the special tokens of the layout, such as `[CLS]` and `[SEP]`, may be hidden too.
    pub mask_specials: bool,
    /// The most pieces that are hidden in a sequence, if there is such a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_predictions: Option<usize>,
    /// What stands in the place of a masked token: `[MASK]`, a random piece, or the piece itself, with these
    /// probabilities.
    pub mask_split: [f64; 3],
    /// 0: every epoch pairs and masks differently. n: after n epochs the same instances come again, in another order.
    pub dupe_factor: u32,
    /// Whether pieces are drawn with replacement, as in ELECTRA's code: one that is drawn twice is predicted twice, so that fewer
    /// are hidden.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub repeated_draws: bool,
    /// The mean length of spans that an encoder-decoder is to write.
    #[serde(skip_serializing_if = "is_usual_span")]
    pub mean_span: f64,
    /// How texts are spoiled that an encoder-decoder is to write; BART's way where nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise: Option<NoiseSettings>,
    /// Where tokens are predicted in an order: tokens of a block that is permuted by itself, the blocks from left to right; all
    /// of a sequence where nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permutation_size: Option<usize>,
}

/// What is to be learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// Masked LM and next-sentence prediction, as in BERT.
    #[default]
    MlmNsp,
    /// Masked LM, and whether two consecutive segments were swapped, as in ALBERT.
    MlmSop,
    /// Masked LM on single segments.
    Mlm,
    /// Masked LM on single segments, and each masked span from the two tokens around it, as in SpanBERT.
    SpanBoundary,
    /// Left to right: predict every next token.
    Causal,
    /// Detect which tokens a small generator replaced, on two segments of consecutive text, as in ELECTRA.
    ReplacedTokens,
    /// Write the spans that sentinels stand for, as in T5; for encoder-decoders.
    SpanCorruption,
    /// Write a text of which some was masked, deleted or moved (`noise`), as in BART; for encoder-decoders.
    Denoising,
    /// Predict some tokens in a random order, each from those before it in that order, as in XLNet.
    Permutation,
    /// Predict every next word and every previous one, by two networks over words that are read as characters, as in ELMo; with
    /// `packing = "stream"`, on a corpus of bytes (`data build --tokenizer bytes`).
    Bidirectional,
}

/// How single segments are cut from documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Whole sentences of one document, as many as fit (DOC-SENTENCES in RoBERTa). For `causal` with a tokenizer that sets nothing
    /// around a text, end-of-text stands before and behind each document.
    #[default]
    #[serde(alias = "doc-sentences")]
    Documents,
    /// Whole sentences of documents in a row, as many as fit, with `[SEP]` between documents (FULL-SENTENCES in
    /// RoBERTa).
    FullSentences,
    /// All documents in a row with `[SEP]` (or end-of-text) between them, cut into blocks of the full length.
    Blocks,
    /// For `mlm-nsp` and `mlm-sop`: two single sentences instead of two long segments (SENTENCE-PAIR in RoBERTa).
    SentencePairs,
    /// Running text for networks that carry something from step to step: all documents in a row, which is read at `batch_size`
    /// places at once, `sequence_length` tokens (or words) at a time. With `causal` and `bidirectional`, the states of recurrent
    /// networks (Zaremba et al. 2014); with `permutation`, the last `config.mem_len` tokens that XLNet remembers.
    Stream,
}

/// What becomes of sentences that do not fit into a sequence by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LongSentences {
    /// They are cut, and the next sequence continues with the rest.
    #[default]
    Split,
    /// They are cut, and the rest is lost, as in RoBERTa.
    Cut,
    /// They are left out, as in SpanBERT, and the sequence before ends there.
    Drop,
}

/// Where separators stand in a sequence of several sentences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Separators {
    /// One between documents, as the text of Liu et al. (2019) has it.
    #[default]
    Documents,
    /// One after every sentence and one more between documents, as fairseq trains RoBERTa. At the end of a sequence the
    /// template's own is the last.
    Sentences,
}

/// How a share of pieces becomes a number of them in a sequence of n pieces, special tokens included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MaskCount {
    /// max(1, round(p·n)), as in BERT.
    #[default]
    Rounded,
    /// ⌊p·n + u⌋ with a u drawn from 0 to 1, as in RoBERTa: p·n on average.
    Stochastic,
    /// Each token, or word, by a draw of its own, as in ModernBERT.
    Bernoulli,
}

/// How documents become sequences: what an objective and a packing amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cut {
    /// Two segments, each of whole sentences of one document.
    Pairs,
    /// One segment of whole sentences of one document.
    Documents,
    /// One segment of whole sentences, which may cross documents.
    FullSentences,
    /// One segment of a fixed length, which may cross documents and cut sentences.
    Blocks,
    /// Two segments that follow each other in one document, now and then only the first.
    Consecutive,
}

impl Cut {
    /// How many special tokens a template adds to each sequence.
    pub fn specials(self, template: &Template) -> usize {
        match self {
            Cut::Pairs | Cut::Consecutive => template.pair_specials(),
            Cut::Documents | Cut::FullSentences | Cut::Blocks => template.single_specials(),
        }
    }

    /// How many documents an epoch needs: a random second segment comes from another one.
    pub(super) fn documents_needed(self) -> usize {
        if self == Cut::Pairs { 2 } else { 1 }
    }
}

impl Objective {
    /// Whether tokens of a sequence are masked and predicted.
    pub fn masks(self) -> bool {
        match self {
            Objective::MlmNsp
            | Objective::MlmSop
            | Objective::Mlm
            | Objective::SpanBoundary
            | Objective::ReplacedTokens => true,
            Objective::Causal
            | Objective::SpanCorruption
            | Objective::Denoising
            | Objective::Permutation
            | Objective::Bidirectional => false,
        }
    }

    /// Whether something is asked about two segments.
    pub fn has_pairs(self) -> bool {
        matches!(self, Objective::MlmNsp | Objective::MlmSop)
    }

    /// Whether an encoder-decoder reads a source and writes a target.
    pub fn writes(self) -> bool {
        matches!(self, Objective::SpanCorruption | Objective::Denoising)
    }
}

/// Which pieces are hidden together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Masking {
    /// Each token by itself.
    #[default]
    Pieces,
    /// All tokens of a word together.
    #[serde(rename = "whole-words")]
    Words,
    /// Up to ten words in a row, which stay whole.
    Spans,
    /// Spans as SpanBERT draws them: ⌈p·n⌉ of the n tokens that are not special, so that the last span may end inside a
    /// word, and random tokens from random places of the corpus.
    #[serde(rename = "spanbert")]
    SpanBert,
    /// One, two or three words in a row, as in ALBERT: n of them with a probability in proportion to 1/n.
    #[serde(rename = "ngrams")]
    NGrams,
}

/// Longer sequences than any model takes; it keeps positions within 32 bits.
const LONGEST: usize = 1 << 20;

/// T5's mean length of spans, and that of BART's paper.
const USUAL_SPAN: f64 = 3.0;

fn is_usual_span(mean: &f64) -> bool {
    *mean == USUAL_SPAN
}

impl Default for InstanceSettings {
    fn default() -> Self {
        Self {
            sequence_length: 128,
            objective: Objective::default(),
            packing: Packing::default(),
            long_sentences: LongSentences::default(),
            separators: Separators::default(),
            short_sequences: 0.1,
            masking: Masking::default(),
            mask_probability: 0.15,
            mask_count: MaskCount::default(),
            mask_specials: false,
            max_predictions: None,
            mask_split: [0.8, 0.1, 0.1],
            dupe_factor: 0,
            repeated_draws: false,
            mean_span: USUAL_SPAN,
            noise: None,
            permutation_size: None,
        }
    }
}

impl InstanceSettings {
    /// Refuses what makes no sense.
    pub fn check(&self) -> Result<(), DataError> {
        let refuse = |name, value: String, problem| Err(DataError::InstanceSetting { name, value, problem });
        if self.objective.has_pairs() && matches!(self.packing, Packing::FullSentences | Packing::Blocks) {
            let name = if self.packing == Packing::Blocks { "blocks" } else { "full-sentences" };
            let problem =
                "sentence pairs are cut within documents: use objective = \"mlm\", or packing = \"documents\"";
            return refuse("packing", name.to_owned(), problem.to_owned());
        }
        let streams = matches!(self.objective, Objective::Causal | Objective::Bidirectional | Objective::Permutation);
        if self.packing == Packing::Stream && !streams
            || self.objective == Objective::Bidirectional && !self.is_stream()
        {
            let problem = "running text is for objective = \"causal\", \"permutation\" and \"bidirectional\", and the last has no other packing";
            return refuse(
                "packing",
                if self.is_stream() { "stream" } else { "another" }.to_owned(),
                problem.to_owned(),
            );
        }
        if self.objective == Objective::ReplacedTokens && self.mask_split[1] > 0.0 {
            let problem =
                "no random token is put into what a generator reads: expected such as [0.85, 0.0, 0.15]".to_owned();
            return refuse("mask_split", format!("{:?}", self.mask_split), problem);
        }
        if self.repeated_draws && self.objective == Objective::SpanBoundary {
            let problem = "a token that is predicted twice is in no span: expected another objective".to_owned();
            return refuse("repeated_draws", "true".to_owned(), problem);
        }
        if self.repeated_draws && (self.masking != Masking::Pieces || self.mask_count == MaskCount::Bernoulli) {
            let problem =
                "tokens are drawn with replacement one by one, and so many: use masking = \"pieces\", and no \
                           mask_count = \"bernoulli\""
                    .to_owned();
            return refuse("repeated_draws", "true".to_owned(), problem);
        }
        self.check_cut()?;
        self.check_masks()?;
        self.check_targets()?;
        self.check_order()?;
        if !(0.0..=1.0).contains(&self.short_sequences) {
            return refuse("short_sequences", self.short_sequences.to_string(), "expected a share, 0 to 1".to_owned());
        }
        if !(self.mask_probability > 0.0 && self.mask_probability <= 1.0) {
            let problem = "expected a share above 0, at most 1".to_owned();
            return refuse("mask_probability", self.mask_probability.to_string(), problem);
        }
        if self.max_predictions == Some(0) {
            return refuse("max_predictions", "0".to_owned(), "expected at least 1".to_owned());
        }
        let sum: f64 = self.mask_split.iter().sum();
        if !self.mask_split.iter().all(|share| (0.0..=1.0).contains(share)) || (sum - 1.0).abs() > 1e-6 {
            let problem = "expected three shares that add up to 1: [MASK], a random token, the token itself".to_owned();
            return refuse("mask_split", format!("{:?}", self.mask_split), problem);
        }
        Ok(())
    }

    /// Whether texts are not cut into sequences, but read as they stand: [`Stream`](crate::Stream).
    pub fn is_stream(&self) -> bool {
        self.packing == Packing::Stream
    }

    /// How many pieces must be hidden in a sequence of `length` pieces, specials included, where there are enough to
    /// hide: `min(max_predictions, max(1, round(length · probability)))`, with Python's rounding of halves to even.
    pub fn predictions(&self, length: usize) -> usize {
        let share = (length as f64 * self.mask_probability).round_ties_even() as usize;
        share.max(1).min(self.max_predictions.unwrap_or(usize::MAX))
    }

    /// How documents become sequences.
    pub fn cut(&self) -> Cut {
        match (self.objective, self.packing) {
            (Objective::MlmNsp | Objective::MlmSop, _) => Cut::Pairs,
            (Objective::ReplacedTokens, Packing::Documents) => Cut::Consecutive,
            (_, Packing::Documents | Packing::SentencePairs) => Cut::Documents,
            (_, Packing::FullSentences) => Cut::FullSentences,
            (_, Packing::Blocks | Packing::Stream) => Cut::Blocks,
        }
    }

    /// Refuses rules about sentences where none are cut.
    fn check_cut(&self) -> Result<(), DataError> {
        let refuse = |name, value: &str, problem: &str| {
            Err(DataError::InstanceSetting { name, value: value.to_owned(), problem: problem.to_owned() })
        };
        if self.packing == Packing::SentencePairs && !self.objective.has_pairs() {
            let expected = "expected objective = \"mlm-nsp\" or \"mlm-sop\", which have pairs";
            return refuse("packing", "sentence-pairs", expected);
        }
        let whole_sentences = matches!(self.cut(), Cut::Documents | Cut::FullSentences);
        let expected = "expected single segments of whole sentences: objective = \"mlm\" with packing = \"documents\" \
                        or \"full-sentences\"";
        match (self.long_sentences, self.separators) {
            (LongSentences::Split, Separators::Documents) => Ok(()),
            _ if whole_sentences => Ok(()),
            (LongSentences::Cut, _) => refuse("long_sentences", "cut", expected),
            (LongSentences::Drop, _) => refuse("long_sentences", "drop", expected),
            (_, Separators::Sentences) => refuse("separators", "sentences", expected),
        }
    }

    /// Refuses spans and noises that make no sense, and noises where nothing is written.
    fn check_targets(&self) -> Result<(), DataError> {
        let refuse = |name, value: String, problem: &str| {
            Err(DataError::InstanceSetting { name, value, problem: problem.to_owned() })
        };
        if !(0.1..=100.0).contains(&self.mean_span) {
            return refuse("mean_span", self.mean_span.to_string(), "expected 0.1 to 100 tokens");
        }
        // Below it a text grows without bound in the arithmetic of lengths.
        if self.objective == Objective::SpanCorruption && self.mask_probability > 0.9 {
            return refuse("mask_probability", self.mask_probability.to_string(), "expected at most 0.9 of the tokens");
        }
        let Some(noise) = self.noise.or((self.objective == Objective::Denoising).then(NoiseSettings::default)) else {
            return Ok(());
        };
        noise.check()?;
        if self.objective != Objective::Denoising {
            return refuse("noise", "given".to_owned(), "expected objective = \"denoising\"");
        }
        if self.packing == Packing::Blocks && noise.permutation > 0.0 {
            let problem = "blocks cut sentences: expected 0, or packing = \"documents\" or \"full-sentences\"";
            return refuse("noise.permutation", noise.permutation.to_string(), problem);
        }
        Ok(())
    }

    /// Refuses rules about the number of masks, and masked special tokens, where spans have rules of their own.
    fn check_masks(&self) -> Result<(), DataError> {
        let refuse = |name, value: &str, problem: &str| {
            Err(DataError::InstanceSetting { name, value: value.to_owned(), problem: problem.to_owned() })
        };
        let spans = matches!(self.masking, Masking::Spans | Masking::SpanBert | Masking::NGrams);
        match self.mask_count {
            MaskCount::Stochastic if self.masking == Masking::SpanBert => refuse(
                "mask_count",
                "stochastic",
                "masking = \"spanbert\" has a number of its own, ⌈p·n⌉: leave it out",
            ),
            MaskCount::Bernoulli if spans => {
                refuse("mask_count", "bernoulli", "expected masking = \"pieces\" or \"whole-words\"")
            }
            MaskCount::Bernoulli if self.max_predictions.is_some() => {
                refuse("mask_count", "bernoulli", "it has no limit: leave out max_predictions")
            }
            _ if self.mask_specials && (spans || self.objective == Objective::SpanBoundary) => {
                refuse("mask_specials", "true", "spans lie between special tokens: expected false")
            }
            _ => Ok(()),
        }
    }

    /// The longest target that a sequence can have; 0 where there is none.
    pub fn longest_target(&self) -> usize {
        match self.objective {
            Objective::SpanCorruption => text_of_source(self.sequence_length, self).map_or(0, |(_, target)| target),
            Objective::Denoising => self.sequence_length,
            _ => 0,
        }
    }

    /// Whether documents have an end-of-text before and behind them: where a text is written from left to right, and no template
    /// sets anything around it.
    pub(super) fn has_ends(&self, template: &Template) -> bool {
        self.objective == Objective::Causal && template.single_specials() == 0
    }

    /// Refuses rules about masks where there are none, and about orders where there are none.
    fn check_order(&self) -> Result<(), DataError> {
        let refuse = |name, value: String, problem: &str| {
            Err(DataError::InstanceSetting { name, value, problem: problem.to_owned() })
        };
        let usual = Self::default();
        match self.permutation_size {
            Some(0 | 1) => return refuse("permutation_size", "below 2".to_owned(), "expected 2 tokens or more"),
            Some(size) if self.objective != Objective::Permutation => {
                return refuse("permutation_size", size.to_string(), "expected objective = \"permutation\"");
            }
            _ if self.objective != Objective::Permutation => return Ok(()),
            _ => {}
        }
        let alone = "nothing is masked in a permutation: leave it out";
        if self.masking != usual.masking || self.mask_count != usual.mask_count {
            let (name, value) = match self.masking == usual.masking {
                true => ("mask_count", format!("{:?}", self.mask_count)),
                false => ("masking", format!("{:?}", self.masking)),
            };
            return refuse(name, value.to_lowercase(), alone);
        }
        if self.mask_split != usual.mask_split {
            return refuse("mask_split", format!("{:?}", self.mask_split), alone);
        }
        if self.mask_specials || self.repeated_draws {
            let name = if self.mask_specials { "mask_specials" } else { "repeated_draws" };
            return refuse(name, "true".to_owned(), alone);
        }
        if self.mask_probability > 0.5 {
            let problem = "at most half of the tokens can be predicted in an order: XLNet has 1/6";
            return refuse("mask_probability", self.mask_probability.to_string(), problem);
        }
        Ok(())
    }

    /// How many pieces of text a sequence takes beside its special tokens; an error where that is too few or too many.
    pub(super) fn room(&self, template: &Template) -> Result<usize, DataError> {
        if self.objective == Objective::SpanCorruption && self.sequence_length <= LONGEST {
            let room = text_of_source(self.sequence_length, self).map(|(text, _)| text);
            return room.ok_or_else(|| DataError::InstanceSetting {
                name: "sequence_length",
                value: self.sequence_length.to_string(),
                problem: "expected room for a token, a sentinel and an end: at least 3".to_owned(),
            });
        }
        let ends = if self.has_ends(template) && self.cut() == Cut::Documents { 2 } else { 0 };
        let specials = self.cut().specials(template) + ends;
        // Two pieces must have room: one for each segment, or one beside a separator of documents.
        let shortest = specials + 2;
        if (shortest..=LONGEST).contains(&self.sequence_length) {
            return Ok(self.sequence_length - specials);
        }
        let problem = format!("expected {shortest} to {LONGEST} tokens, {specials} of them special");
        Err(DataError::InstanceSetting { name: "sequence_length", value: self.sequence_length.to_string(), problem })
    }
}
