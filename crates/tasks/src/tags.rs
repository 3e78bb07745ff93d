//! How entities are written as tags of words, and from one way into another. Reading them is `henson_text::TagSet`'s.

use std::ops::Range;

use henson_text::TagSet;

/// How tags say where entities begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `B-` begins every entity, `I-` continues it (IOB2).
    Bio,
    /// `I-` everywhere; `B-` only where an entity follows another of its kind at once.
    Iob1,
    /// `B-`, `I-` and `E-` for the first, inner and last words, `S-` for entities of one word.
    Bioes,
}

impl Scheme {
    /// Which way sentences are written; `None` where their tags are no entities. Where both fit, BIO.
    pub fn of<'t>(sentences: impl Iterator<Item = &'t [String]> + Clone) -> Option<Self> {
        let mut labels: Vec<&str> = sentences.clone().flatten().map(String::as_str).collect();
        labels.sort_unstable();
        labels.dedup();
        if TagSet::of_labels(&labels) != TagSet::Chunks {
            return None;
        }
        if labels.iter().any(|label| ["E-", "S-", "L-", "U-"].iter().any(|prefix| label.starts_with(prefix))) {
            return Some(Self::Bioes);
        }
        let is_iob1 = |tags: &[String]| tags == Self::Iob1.write(tags.len(), &entities(tags));
        let begins_inside = labels.iter().any(|label| label.starts_with("I-"));
        let mut rest = sentences;
        Some(if begins_inside && rest.all(is_iob1) { Self::Iob1 } else { Self::Bio })
    }

    /// The tags of a sentence with these entities.
    pub fn write(self, words: usize, entities: &[(Range<usize>, &str)]) -> Vec<String> {
        let mut tags = vec!["O".to_owned(); words];
        for (i, (place, kind)) in entities.iter().enumerate() {
            let follows = i > 0 && entities[i - 1].0.end == place.start && entities[i - 1].1 == *kind;
            for word in place.clone() {
                let (first, last) = (word == place.start, word + 1 == place.end);
                let prefix = match self {
                    Self::Bio if first => "B",
                    Self::Iob1 if first && follows => "B",
                    Self::Bioes if first && last => "S",
                    Self::Bioes if first => "B",
                    Self::Bioes if last => "E",
                    _ => "I",
                };
                tags[word] = format!("{prefix}-{kind}");
            }
        }
        tags
    }

    /// All tags that entities of a kind can have.
    pub(crate) fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Bio | Self::Iob1 => &["B", "I"],
            Self::Bioes => &["B", "E", "I", "S"],
        }
    }
}

/// The same entities written another way. Tags that no scheme allows, such as an `I-` after `O`, are mended by it.
pub fn convert_tags<T: AsRef<str>>(tags: &[T], to: Scheme) -> Vec<String> {
    to.write(tags.len(), &entities(tags))
}

fn entities<T: AsRef<str>>(tags: &[T]) -> Vec<(Range<usize>, &str)> {
    let tags: Vec<Option<&str>> = tags.iter().map(|tag| Some(tag.as_ref())).collect();
    TagSet::Chunks.entities(&tags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn one_sentence_in_every_scheme() {
        let bio = "B-X I-X B-X O B-Y B-X I-X I-X";
        let iob1 = "I-X I-X B-X O I-Y I-X I-X I-X";
        let bioes = "B-X E-X S-X O S-Y B-X I-X E-X";
        for (text, scheme) in [(bio, Scheme::Bio), (iob1, Scheme::Iob1), (bioes, Scheme::Bioes)] {
            assert_eq!(Scheme::of([&*tags(text)].into_iter()), Some(scheme), "{text}");
            for (expected, to) in [(bio, Scheme::Bio), (iob1, Scheme::Iob1), (bioes, Scheme::Bioes)] {
                assert_eq!(convert_tags(&tags(text), to), tags(expected), "{text} to {to:?}");
            }
        }
        assert_eq!(convert_tags(&tags("B-X L-X U-Y"), Scheme::Bioes), tags("B-X E-X S-Y"));
    }

    #[test]
    fn schemes_by_their_tags() {
        for (text, scheme) in [
            // Broken BIO is BIO: somewhere a `B` begins what stands alone.
            ("O I-X O B-X", Some(Scheme::Bio)),
            ("O B-X B-Y O", Some(Scheme::Bio)),
            ("O I-X I-Y O", Some(Scheme::Iob1)),
            ("NOUN VERB -LRB- X", None),
            ("O O", None),
            ("O PER O", None),
        ] {
            assert_eq!(Scheme::of([&*tags(text)].into_iter()), scheme, "{text}");
        }
    }
}
