//! SentencePiece's own model files (`spm.model`, `spiece.model`, `sentencepiece.bpe.model`, `tokenizer.model`), encoded with
//! exactly the ids that the `sentencepiece` package gives.
//!
//! A `tokenizer.json` cannot say the same: its components look characters up in other units, prefer other pieces where scores
//! are equal, and know no pieces that always win. So texts are encoded here; what the `tokenizers` crate holds beside it
//! ([`convention`]) knows the vocabulary, finds special tokens, decodes, and is what is saved for other programs.

mod convention;
mod normalizer;
mod proto;
mod segment;

use std::collections::HashMap;
use std::path::Path;

use tokenizers::{NormalizerWrapper, OffsetType, Token};

pub(crate) use convention::{MODEL_FILES, open_bare, open_directory, open_saved};
use normalizer::{CharacterTable, Normalizer, SPACE};
use proto::{ModelProto, PieceKind};
use segment::Segmenter;

use crate::error::TextError;
use crate::guard::shielded;
use crate::lattice::Trie;
use crate::tokenizer::Pieces;

/// The largest model file that is read. The largest in use have 5 MiB.
const FILE_LIMIT: u64 = 16 << 20;
/// The longest piece in bytes, as in the readers of other files.
const LONGEST_PIECE: usize = 4096;

/// A model file's encoder.
pub(crate) struct SentencePiece {
    normalizer: Normalizer,
    segmenter: Segmenter,
    /// The vocabulary's id of each piece of the file, and its text.
    pieces: Vec<(u32, String)>,
    unknown: usize,
    /// The ids of the 256 bytes, where unknown characters are written in them.
    bytes: Option<Vec<u32>>,
    /// What a family does to a text before SentencePiece sees it.
    front: Option<NormalizerWrapper>,
    /// Pieces that other programs must keep whole: added tokens in a `tokenizer.json`.
    user_defined: Vec<String>,
    file: ModelFile,
}

/// The file as it was read, to be saved again.
struct ModelFile {
    name: String,
    bytes: Vec<u8>,
}

impl SentencePiece {
    /// Checks the whole of a model and prepares it. `ids` gives each piece of the file its id.
    fn of(path: &Path, model: &ModelProto, ids: Vec<u32>, front: Option<NormalizerWrapper>) -> Result<Self, TextError> {
        let unknown = check_pieces(path, model)?;
        let mut user_defined: Vec<&str> = Vec::new();
        user_defined
            .extend(model.pieces.iter().filter(|piece| piece.kind == PieceKind::UserDefined).map(|piece| &*piece.text));
        user_defined.sort_unstable();
        let normalizer = Normalizer {
            table: CharacterTable::parse(path, &model.characters)?,
            symbols: (!user_defined.is_empty()).then(|| Trie::new(&user_defined)),
            add_dummy_prefix: model.add_dummy_prefix,
            whitespace_as_suffix: model.whitespace_as_suffix,
            remove_extra_whitespaces: model.remove_extra_whitespaces,
            escape_whitespaces: model.escape_whitespaces,
        };
        let bytes = model.byte_fallback.then(|| byte_pieces(model).map(|(_, piece)| ids[piece]).collect());
        Ok(Self {
            normalizer,
            segmenter: Segmenter::of(model, unknown),
            pieces: ids.into_iter().zip(&model.pieces).map(|(id, piece)| (id, piece.text.clone())).collect(),
            unknown,
            bytes,
            front,
            user_defined: user_defined.into_iter().map(str::to_owned).collect(),
            file: ModelFile { name: String::new(), bytes: Vec::new() },
        })
    }

    /// The name of the model's file and its bytes.
    pub(crate) fn file(&self) -> (&str, &[u8]) {
        (&self.file.name, &self.file.bytes)
    }

    /// Pieces that are always found as a whole.
    pub(crate) fn user_defined(&self) -> &[String] {
        &self.user_defined
    }

    /// Why a `tokenizer.json` cannot say what this model does, where it is not a matter of rare characters.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        let suffix = self.normalizer.whitespace_as_suffix;
        suffix.then_some("tokenizer.json cannot put the sign for a space after words (treat_whitespace_as_suffix)")
    }

    /// Cuts a text into pieces. The tokens that `inner` was given, special ones above all, stay whole.
    pub(crate) fn encode(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Pieces, TextError> {
        let encode = || {
            let mut parts = inner.get_added_vocabulary().extract_and_normalize(self.front.as_ref(), text);
            parts.tokenize(|part| Ok(self.tokens(part.get())?))?;
            parts.into_encoding(None, 0, OffsetType::Byte)
        };
        let encoding = shielded(encode).map_err(|reason| TextError::Failed { action: "encode", reason })?;
        let mut pieces = Pieces::of_encoding(&encoding, text);
        for (start, end) in &mut pieces.offsets {
            // The space before a word is part of its piece, but not of what is quoted.
            let word = text[*start..*end].trim_start();
            *start = if word.is_empty() { *start } else { *end - word.len() };
        }
        // The parts between special tokens are numbered; of words, SentencePiece knows where they begin.
        let (mut word, mut last) = (None, None);
        for ((number, token), part) in pieces.words.iter_mut().zip(encoding.get_tokens()).zip(encoding.get_word_ids()) {
            if last != Some(part) || token.starts_with([SPACE, ' ']) {
                word = Some(word.map_or(0, |word: u32| word + 1));
            }
            (last, *number) = (Some(part), word);
        }
        Ok(pieces)
    }

    /// The pieces of a text without special tokens, with their places in it.
    fn tokens(&self, text: &str) -> Result<Vec<Token>, TextError> {
        let normalized = self.normalizer.normalize(text)?;
        let origin = |at: usize| normalized.origins.get(at).copied().unwrap_or(text.len());
        let mut tokens: Vec<Token> = Vec::new();
        let mut after_unknown = false;
        for (begin, end, piece) in self.segmenter.cut(&normalized.text, &self.normalizer) {
            let offsets = (origin(begin), origin(end));
            let is_unknown = piece == self.unknown;
            match (&self.bytes, tokens.last_mut()) {
                (Some(bytes), _) if is_unknown => {
                    for byte in normalized.text[begin..end].bytes() {
                        let id = bytes[usize::from(byte)];
                        tokens.push(Token { id, value: byte_piece(byte), offsets });
                    }
                }
                // Neighbouring unknown characters are one piece.
                (None, Some(last)) if is_unknown && after_unknown => {
                    last.value.push_str(&normalized.text[begin..end]);
                    last.offsets.1 = offsets.1;
                }
                _ if is_unknown => {
                    let value = normalized.text[begin..end].to_owned();
                    tokens.push(Token { id: self.pieces[piece].0, value, offsets });
                }
                _ => {
                    let (id, value) = self.pieces[piece].clone();
                    tokens.push(Token { id, value, offsets });
                }
            }
            after_unknown = is_unknown;
        }
        Ok(tokens)
    }
}

/// Checks that the pieces make a vocabulary, and finds the unknown one.
fn check_pieces(path: &Path, model: &ModelProto) -> Result<usize, TextError> {
    let malformed = |place: String, expected: &str, got: String| TextError::Malformed {
        path: path.to_owned(),
        place,
        expected: expected.to_owned(),
        got,
    };
    if model.pieces.is_empty() {
        let expected = "pieces (is it a SentencePiece model? tiktoken's files, for one, have the same name)";
        return Err(malformed("the file".to_owned(), expected, "none".to_owned()));
    }
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(model.pieces.len());
    let mut unknown = None;
    for (place, piece) in model.pieces.iter().enumerate() {
        let name = || format!("piece {place}");
        if !(1..=LONGEST_PIECE).contains(&piece.text.len()) {
            let expected = format!("a text of 1 to {LONGEST_PIECE} bytes");
            return Err(malformed(name(), &expected, format!("{} bytes", piece.text.len())));
        }
        if let Some(first) = ids.insert(&piece.text, place as u32) {
            let (path, token, second) = (path.to_owned(), piece.text.clone(), place as u32);
            return Err(TextError::DuplicateToken { path, token, first, second });
        }
        match piece.kind {
            PieceKind::Unknown if unknown.is_some() => {
                return Err(malformed(name(), "one unknown piece", format!("another, {:?}", piece.text)));
            }
            PieceKind::Unknown => unknown = Some(place),
            PieceKind::Byte if !model.byte_fallback => {
                let expected = "no byte pieces, because trainer_spec.byte_fallback is false";
                return Err(malformed(name(), expected, format!("{:?}", piece.text)));
            }
            _ => {}
        }
    }
    let bytes = byte_pieces(model).count();
    if model.byte_fallback && bytes != 256 {
        let expected = "256 byte pieces, <0x00> to <0xFF>, because trainer_spec.byte_fallback is true";
        return Err(malformed("the pieces".to_owned(), expected, bytes.to_string()));
    }
    let expected = "a piece of type 2 (unknown), for characters that no other has";
    unknown.ok_or_else(|| malformed("the pieces".to_owned(), expected, "none".to_owned()))
}

/// The pieces of bytes in the order of the bytes; fewer than 256 where one is missing or has another name.
fn byte_pieces(model: &ModelProto) -> impl Iterator<Item = (u8, usize)> {
    let byte = |(_, piece): &(usize, &proto::Piece)| piece.kind == PieceKind::Byte;
    let by_text: HashMap<&str, usize> =
        model.pieces.iter().enumerate().filter(byte).map(|(place, piece)| (&*piece.text, place)).collect();
    (0..=u8::MAX).filter_map(move |byte| Some((byte, *by_text.get(&*byte_piece(byte))?)))
}

fn byte_piece(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}
