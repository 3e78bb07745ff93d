//! What SentencePiece does to a text before it is cut: characters replaced by a table, white space tidied and made visible.
//!
//! The table ("precompiled charsmap") is a double-array trie (darts-clone) of texts, each with the place of what replaces it.
//! At each place of a text the longest entry wins. The `tokenizers` crate looks entries up by grapheme instead and takes the
//! shortest, so that an accent after a ligature is lost, and Hangul in single letters stays so; hence this one.

use std::path::Path;

use crate::error::TextError;
use crate::lattice::Trie;

/// The sign that stands for a space.
pub(crate) const SPACE: char = '\u{2581}';

/// The longest text that a table replaces, in bytes. Those of SentencePiece have some 20.
const LONGEST_ENTRY: u32 = 256;
/// The largest table, in bytes. That of `nmt_nfkc_cf`, the largest in use, has some 330,000.
const LARGEST_TABLE: usize = 4 << 20;
/// SentencePiece looks at so many entries at a place and no more.
const MOST_ENTRIES: usize = 32;
const MOST_SYMBOLS: usize = 64;
/// Bytes that may be made of each byte of a text, and how many are no burden whatever they were made of.
const GROWTH: usize = 16;
const FREE: usize = 256 << 10;

/// Texts and what replaces them.
pub(crate) struct CharacterTable {
    units: Vec<u32>,
    /// The replacements, each ended by a zero.
    replacements: String,
}

impl CharacterTable {
    /// Reads a table and walks all of it, so that later nothing can lead out of it or in circles. An empty one is none.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Option<Self>, TextError> {
        let malformed = |expected: &str, got: String| TextError::Malformed {
            path: path.to_owned(),
            place: "normalizer_spec.precompiled_charsmap".to_owned(),
            expected: expected.to_owned(),
            got,
        };
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() > LARGEST_TABLE {
            return Err(malformed(&format!("at most {LARGEST_TABLE} bytes"), bytes.len().to_string()));
        }
        let (size, rest) = bytes
            .split_first_chunk::<4>()
            .ok_or_else(|| malformed("the trie's size in four bytes", bytes.len().to_string()))?;
        let size = u32::from_le_bytes(*size) as usize;
        let split = rest.split_at_checked(size).filter(|_| size >= 4 && size.is_multiple_of(4));
        let expected = format!("a trie of units of four bytes within {} bytes", rest.len());
        let (trie, strings) = split.ok_or_else(|| malformed(&expected, format!("{size} bytes")))?;
        let replacements = std::str::from_utf8(strings);
        let replacements =
            replacements.map_err(|error| malformed("replacements in UTF-8", error.to_string()))?.to_owned();
        let (units, _) = trie.as_chunks::<4>();
        let table = Self { units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(), replacements };
        table.check().map_err(|(expected, got)| malformed(expected, got))?;
        Ok(Some(table))
    }

    /// The place of the next units after unit `place`, if it is one.
    fn next(&self, place: usize) -> Option<usize> {
        let unit = *self.units.get(place)?;
        let offset = (unit >> 10) << ((unit & (1 << 9)) >> 6);
        Some(place ^ offset as usize)
    }

    /// The unit that byte `label` leads to from the units at `base`.
    fn child(&self, base: usize, label: u8) -> Option<usize> {
        let place = base ^ usize::from(label);
        // The highest bit marks a value, which no byte leads to. Entries have no zeros, and to follow one could lead back.
        let found = self.units.get(place)? & (1 << 31 | 0xff);
        (label != 0 && found == u32::from(label)).then_some(place)
    }

    /// The place of a replacement, where an entry ends at unit `place`.
    fn value(&self, place: usize) -> Option<u32> {
        let ends = self.units.get(place)? & (1 << 8) != 0;
        let value = ends.then(|| self.next(place)).flatten()?;
        Some(self.units.get(value)? & !(1 << 31))
    }

    /// Walks the trie once. Its branches may join (equal endings are shared), but not turn back.
    fn check(&self) -> Result<(), (&'static str, String)> {
        const OPEN: u32 = u32::MAX;
        // For the place of a unit: the bytes that can follow it and one, or that it is being walked.
        let mut heights = vec![0_u32; self.units.len()];
        let mut open: Vec<(usize, u16, u32)> = vec![(0, 0, 0)];
        heights[0] = OPEN;
        while let Some((place, label, height)) = open.last_mut() {
            let base = self.next(*place).unwrap_or(usize::MAX);
            if base >= self.units.len() {
                return Err(("offsets within the trie", format!("unit {place} leads to {base}")));
            }
            if *label == 0 {
                self.check_value(*place)?;
            }
            let mut entered = None;
            while *label < 256 && entered.is_none() {
                let child = self.child(base, *label as u8);
                *label += 1;
                match child.map(|child| (child, heights[child])) {
                    None => {}
                    Some((child, OPEN)) => {
                        return Err(("a trie without circles", format!("unit {child} leads back to itself")));
                    }
                    Some((child, 0)) => entered = Some(child),
                    Some((_, known)) => *height = (*height).max(known),
                }
            }
            match entered {
                Some(child) => {
                    heights[child] = OPEN;
                    open.push((child, 0, 0));
                }
                None => {
                    let (place, height) = (*place, *height + 1);
                    heights[place] = height;
                    open.pop();
                    if let Some((_, _, above)) = open.last_mut() {
                        *above = (*above).max(height);
                    }
                }
            }
            if open.len() > LONGEST_ENTRY as usize + 1 {
                return Err(("entries of at most 256 bytes", "a longer one".to_owned()));
            }
        }
        match heights[0] > LONGEST_ENTRY + 1 {
            true => Err(("entries of at most 256 bytes", format!("one of {}", heights[0] - 1))),
            false => Ok(()),
        }
    }

    fn check_value(&self, place: usize) -> Result<(), (&'static str, String)> {
        match self.value(place) {
            Some(value) if self.replacements.get(value as usize..).is_none() => {
                Err(("places within the replacements, between characters", value.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// The length of the longest entry that the text begins with, and what replaces it.
    fn longest(&self, text: &[u8]) -> Option<(usize, &str)> {
        let mut base = self.next(0)?;
        let mut found = None;
        let mut entries = 0;
        for (length, &byte) in (1..).zip(text) {
            let Some(place) = self.child(base, byte) else { break };
            if let Some(value) = self.value(place) {
                found = Some((length, value));
                entries += 1;
                if entries == MOST_ENTRIES {
                    break;
                }
            }
            base = self.next(place)?;
        }
        let (length, value) = found?;
        let replacement = self.replacements.get(value as usize..)?;
        Some((length, replacement.split('\0').next().unwrap_or(replacement)))
    }
}

/// How a text is prepared.
pub(crate) struct Normalizer {
    pub(crate) table: Option<CharacterTable>,
    /// Pieces that stay as they are.
    pub(crate) symbols: Option<Trie>,
    pub(crate) add_dummy_prefix: bool,
    pub(crate) whitespace_as_suffix: bool,
    pub(crate) remove_extra_whitespaces: bool,
    pub(crate) escape_whitespaces: bool,
}

/// A prepared text, and for each of its bytes (and its end) where that came from.
#[derive(Debug, Default)]
pub(crate) struct Normalized {
    pub(crate) text: String,
    pub(crate) origins: Vec<usize>,
}

impl Normalized {
    fn push(&mut self, letter: char, origin: usize) {
        self.text.push(letter);
        self.origins.resize(self.text.len(), origin);
    }
}

impl Normalizer {
    pub(crate) fn normalize(&self, text: &str) -> Result<Normalized, TextError> {
        let allowed = (GROWTH * text.len()).max(FREE);
        let mut normalized = Normalized::default();
        let space = if self.escape_whitespaces { SPACE } else { ' ' };
        let mut at = 0;
        while self.remove_extra_whitespaces && at < text.len() {
            let (length, replacement) = self.first(&text[at..]);
            if replacement != " " {
                break;
            }
            at += length;
        }
        if at == text.len() {
            return Ok(normalized);
        }
        if self.add_dummy_prefix && !self.whitespace_as_suffix {
            normalized.push(space, at);
        }
        let mut after_space = self.remove_extra_whitespaces;
        while at < text.len() {
            let (length, mut replacement) = self.first(&text[at..]);
            if after_space {
                replacement = replacement.trim_start_matches(' ');
            }
            for letter in replacement.chars() {
                normalized.push(if letter == ' ' { space } else { letter }, at);
            }
            if !replacement.is_empty() {
                after_space = self.remove_extra_whitespaces && replacement.ends_with(' ');
            }
            at += length;
            if normalized.text.len() > allowed {
                let what = format!("it makes more than {allowed} bytes out of it");
                return Err(TextError::TooMuchWork { component: "SentencePiece character table".to_owned(), what });
            }
        }
        while self.remove_extra_whitespaces && normalized.text.ends_with(space) {
            normalized.text.pop();
            at = normalized.origins[normalized.text.len()];
            normalized.origins.truncate(normalized.text.len());
        }
        if self.add_dummy_prefix && self.whitespace_as_suffix {
            normalized.push(space, at);
        }
        normalized.origins.push(at);
        Ok(normalized)
    }

    /// The bytes that are replaced at the beginning of a text, which has some, and by what.
    fn first<'t>(&'t self, text: &'t str) -> (usize, &'t str) {
        if let Some(length) = self.symbol(text) {
            return (length, &text[..length]);
        }
        let found = self.table.as_ref().and_then(|table| table.longest(text.as_bytes()));
        // An entry that ends within a character would leave half of it.
        if let Some((length, replacement)) = found.filter(|(length, _)| text.is_char_boundary(*length)) {
            return (length, replacement);
        }
        let length = text.chars().next().map_or(0, char::len_utf8);
        (length, &text[..length])
    }

    /// The length of the longest piece that stays as it is, where the text begins with one.
    pub(crate) fn symbol(&self, text: &str) -> Option<usize> {
        let symbols = self.symbols.as_ref()?;
        symbols.prefixes(text).take(MOST_SYMBOLS).last().map(|(length, _)| length)
    }
}
