//! The only user of the `tokenizers` crate: tokenizer files in and out, text to pieces and back, and the features that
//! models read, with the mapping back to the text. Training and serving build their inputs with the same functions here.
//!
//! What is deliberately absent: no tensors, no padding (a batch is a flat stream), no threads but in training (callers
//! spread texts over theirs), no downloads, and no printing. Truncation never happens silently: whatever cuts says how
//! much it cut.
//!
//! The way in:
//! - [`Tokenizer::open`] reads a model directory or a SentencePiece file, [`Tokenizer::files`] gives the bytes to put in another one;
//! - [`Tokenizer::encode`] turns a text into [`Pieces`], without special tokens;
//! - [`Template`] (from [`Tokenizer::template`]) sets the special tokens around pieces: [`Template::single`],
//!   [`Template::pair`], [`Template::windows`], [`Template::pair_windows`] give [`Features`];
//! - for tasks, [`Tokenizer::question`], [`Tokenizer::words_in_windows`] and [`Tokenizer::choices`] do both, and the
//!   reverse is [`find_answers`] and [`TagSet::entities`];
//! - [`train`] makes a tokenizer out of text, [`Tokenizer::sampler`] encodes at random for subword regularisation.
//!
//! ```
//! use henson_text::{Tokenizer, WordPieceOptions};
//!
//! let vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "jim", "hen", "##son"];
//! let tokenizer = Tokenizer::from_vocabulary(&vocabulary, &WordPieceOptions::default())?;
//! let text = "Jim Henson";
//! let features = tokenizer.template().single(&tokenizer.encode(text)?, 128)?;
//! assert_eq!(features.ids, [2, 5, 6, 7, 3]);
//! assert_eq!(features.offsets[3].map(|(start, end)| &text[start..end]), Some("son"));
//! assert_eq!(features.dropped, 0);
//! # Ok::<(), henson_text::TextError>(())
//! ```

#![forbid(unsafe_code)]

mod answers;
mod bytes;
mod error;
mod fast;
mod features;
mod files;
mod guard;
mod lattice;
mod offsets;
mod sampling;
mod save;
mod sentencepiece;
mod special;
mod tagging;
mod task_tokens;
mod template;
mod tokenizer;
mod training;
mod vectors;
mod whole_words;
mod windows;
mod work;

pub use answers::{
    AnswerCandidate, AnswerSettings, Answers, BeamSpan, SpanBeams, SpanLogits, find_answers, find_beam_answers,
};
pub use error::TextError;
pub use fast::Encoder;
pub use features::{Features, truncated_lengths, window_with_most_context, windows_with_most_context};
pub use files::{BytePairOptions, BytePairStyle, WordPieceOptions};
pub use guard::check_regular;
pub use offsets::{byte_of_code_point, code_point_offsets};
pub use sampling::{Regularisation, Sampler};
pub use special::{Special, SpecialNames, SpecialTokens};
pub use tagging::{LegalTags, TagSet, WordWindows, join_words, split_words, words_of_pieces};
pub use template::{Slot, Template};
pub use tokenizer::{Kind, Pieces, Tokenizer, Word};
pub use training::{SpecialSet, Trained, TrainingKind, TrainingProgress, TrainingReport, TrainingSettings, train};
pub use vectors::WordVectors;
pub use whole_words::WordUnit;
pub use windows::{QuestionSettings, QuestionWindows, Stride};
