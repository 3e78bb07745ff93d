//! SentencePiece's `.model` file: a protobuf message (`sentencepiece_model.proto`), of which we need three submessages and a
//! dozen fields. Nothing is reserved for a length that the file claims, every slice is checked against what is there, and
//! messages are walked to a fixed depth.

use std::path::Path;

use crate::error::TextError;

/// What a piece is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    Normal,
    Unknown,
    /// Never found in a text: `<s>`, `</s>`, `<pad>`, `[CLS]`.
    Control,
    /// Always found as a whole.
    UserDefined,
    /// In the vocabulary, but taken apart again where a text would give it.
    Unused,
    /// One of the 256 bytes, `<0x00>` to `<0xFF>`.
    Byte,
}

/// A piece of the vocabulary; its id is its place in the file.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) score: f32,
    pub(crate) kind: PieceKind,
}

/// How a text is cut into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Unigram,
    BytePair,
}

/// The parts of a `.model` file that encoding needs.
#[derive(Debug, Clone)]
pub(crate) struct ModelProto {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) algorithm: Algorithm,
    pub(crate) byte_fallback: bool,
    pub(crate) whitespace_as_suffix: bool,
    pub(crate) characters: Vec<u8>,
    pub(crate) add_dummy_prefix: bool,
    pub(crate) remove_extra_whitespaces: bool,
    pub(crate) escape_whitespaces: bool,
}

/// A field's value. What a message holds is read by walking it again.
enum Field<'a> {
    Number(u64),
    Bits(u32),
    Bytes(&'a [u8]),
    /// Eight bytes, which no field of ours has.
    Wide,
}

/// A message that is walked field by field.
struct Message<'a> {
    path: &'a Path,
    rest: &'a [u8],
    /// Where `rest` begins in the file, for messages.
    at: usize,
}

impl ModelProto {
    /// Reads a file's bytes. What the parts say together is checked elsewhere.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, TextError> {
        let mut model = Self {
            pieces: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            whitespace_as_suffix: false,
            characters: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        };
        let mut message = Message { path, rest: bytes, at: 0 };
        while let Some((number, field, at)) = message.next()? {
            match (number, field) {
                (1, Field::Bytes(bytes)) => {
                    let piece = Message { path, rest: bytes, at }.piece(model.pieces.len())?;
                    model.pieces.push(piece);
                }
                (2, Field::Bytes(bytes)) => model.read_trainer(Message { path, rest: bytes, at })?,
                (3, Field::Bytes(bytes)) => model.read_normalizer(Message { path, rest: bytes, at })?,
                (5, Field::Bytes(bytes)) => refuse_denormalizer(Message { path, rest: bytes, at })?,
                (1..=5, _) => return Err(message.error(at, "a message", "another kind of field")),
                // Newer fields are none of ours, as protobuf has it.
                _ => {}
            }
        }
        Ok(model)
    }

    fn read_trainer(&mut self, mut message: Message<'_>) -> Result<(), TextError> {
        while let Some((number, field, at)) = message.next()? {
            match number {
                3 => {
                    self.algorithm = match message.number(&field, at)? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::BytePair,
                        other => {
                            let got = match other {
                                3 => "3 (words)".to_owned(),
                                4 => "4 (characters)".to_owned(),
                                other => other.to_string(),
                            };
                            return Err(message.error(at, "a model_type of 1 (unigram) or 2 (BPE)", &got));
                        }
                    }
                }
                24 => self.whitespace_as_suffix = message.number(&field, at)? != 0,
                35 => self.byte_fallback = message.number(&field, at)? != 0,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, mut message: Message<'_>) -> Result<(), TextError> {
        while let Some((number, field, at)) = message.next()? {
            match number {
                2 => self.characters = message.bytes(&field, at)?.to_vec(),
                3 => self.add_dummy_prefix = message.number(&field, at)? != 0,
                4 => self.remove_extra_whitespaces = message.number(&field, at)? != 0,
                5 => self.escape_whitespaces = message.number(&field, at)? != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Rules for decoded texts exist in the format, and no published model has any.
fn refuse_denormalizer(mut message: Message<'_>) -> Result<(), TextError> {
    while let Some((number, field, at)) = message.next()? {
        if number == 2 && !message.bytes(&field, at)?.is_empty() {
            return Err(message.error(
                at,
                "no rules for decoded texts, which are not supported",
                "a denormalizer_spec",
            ));
        }
    }
    Ok(())
}

impl<'a> Message<'a> {
    /// The next field: its number, its value, and where it began; or for bytes, where they begin.
    fn next(&mut self) -> Result<Option<(u64, Field<'a>, usize)>, TextError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let at = self.at;
        let tag = self.varint()?;
        let (number, wire) = (tag >> 3, tag & 7);
        // Field numbers have 29 bits; 0 is none.
        if number == 0 || number >= 1 << 29 {
            return Err(self.error(at, "a field's number", &number.to_string()));
        }
        let field = match wire {
            0 => Field::Number(self.varint()?),
            1 => {
                self.take(8, at)?;
                Field::Wide
            }
            2 => {
                let length = self.varint()?;
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                let begin = self.at;
                return Ok(Some((number, Field::Bytes(self.take(length, at)?), begin)));
            }
            5 => {
                let bytes = self.take(4, at)?;
                Field::Bits(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            }
            other => return Err(self.error(at, "a field of wire type 0, 1, 2 or 5", &format!("wire type {other}"))),
        };
        Ok(Some((number, field, at)))
    }

    fn take(&mut self, length: usize, at: usize) -> Result<&'a [u8], TextError> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else {
            let got = format!("{} before the end of the file or message", self.rest.len());
            return Err(self.error(at, &format!("a field of {length} bytes"), &got));
        };
        self.rest = rest;
        self.at += length;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64, TextError> {
        let at = self.at;
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let [byte] = *self.take(1, at)? else { break };
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(self.error(at, "a number of at most ten bytes", "more"))
    }

    fn piece(mut self, id: usize) -> Result<Piece, TextError> {
        let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
        while let Some((number, field, at)) = self.next()? {
            match number {
                1 => {
                    let text = std::str::from_utf8(self.bytes(&field, at)?);
                    piece.text = text.map_err(|_| self.error(at, "a piece in UTF-8", "other bytes"))?.to_owned();
                }
                2 => {
                    let Field::Bits(bits) = field else {
                        return Err(self.error(at, "a score of four bytes", "another kind of field"));
                    };
                    piece.score = f32::from_bits(bits);
                    if !piece.score.is_finite() {
                        let got = format!("{} for piece {id}", piece.score);
                        return Err(self.error(at, "a score that is a finite number", &got));
                    }
                }
                3 => {
                    piece.kind = match self.number(&field, at)? {
                        1 => PieceKind::Normal,
                        2 => PieceKind::Unknown,
                        3 => PieceKind::Control,
                        4 => PieceKind::UserDefined,
                        5 => PieceKind::Unused,
                        6 => PieceKind::Byte,
                        other => {
                            return Err(self.error(
                                at,
                                "a piece's type from 1 to 6",
                                &format!("{other} for piece {id}"),
                            ));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(piece)
    }

    fn number(&self, field: &Field<'a>, at: usize) -> Result<u64, TextError> {
        match field {
            Field::Number(number) => Ok(*number),
            _ => Err(self.error(at, "a number", "another kind of field")),
        }
    }

    fn bytes(&self, field: &Field<'a>, at: usize) -> Result<&'a [u8], TextError> {
        match field {
            Field::Bytes(bytes) => Ok(bytes),
            _ => Err(self.error(at, "a text", "another kind of field")),
        }
    }

    fn error(&self, at: usize, expected: &str, got: &str) -> TextError {
        TextError::Malformed {
            path: self.path.to_owned(),
            place: format!("byte {at}"),
            expected: format!("{expected} (is it a whole SentencePiece model?)"),
            got: got.to_owned(),
        }
    }
}
