//! How a family's parameters are called in other people's checkpoints.

/// The names of a family. A parameter's own name is the one that Hugging Face's `transformers` writes today.
#[derive(Clone, Copy, Debug)]
pub struct Naming {
    /// What stands before the encoder's names in a model with a head, such as `bert.`; files without it are read too.
    pub base_prefix: &'static str,
    /// How the names of the encoder's own parameters begin, behind the prefix.
    pub encoder: &'static [&'static str],
    /// Endings that older files use, and today's.
    pub old_endings: &'static [(&'static str, &'static str)],
    /// Keys that some files repeat although they are the same tensor as another: (copy, original).
    pub tied: &'static [(&'static str, &'static str)],
    /// Endings of keys that hold no parameters.
    pub ignored_endings: &'static [&'static str],
}

impl Naming {
    /// Names as they are: for files that henson wrote itself.
    pub const PLAIN: Naming =
        Naming { base_prefix: "", encoder: &[], old_endings: &[], tied: &[], ignored_endings: &[] };

    /// Whether a key of a file names a part of an encoder, rather than of what stands on one.
    pub fn is_encoder(&self, key: &str) -> bool {
        let name = key.strip_prefix(self.base_prefix).unwrap_or(key);
        self.encoder.iter().any(|start| name.starts_with(start))
    }
}
