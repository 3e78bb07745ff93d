//! How a family's parameters are called in other people's checkpoints.

/// The names of a family. A parameter's own name is the one that Hugging Face's `transformers` writes today.
#[derive(Clone, Copy, Debug)]
pub struct Naming {
    /// What stands before the encoder's names in a model with a head, such as `bert.`; files without it are read too.
    pub base_prefix: &'static str,
    /// Endings that older files use, and today's.
    pub old_endings: &'static [(&'static str, &'static str)],
    /// Keys that some files repeat although they are the same tensor as another: (copy, original).
    pub tied: &'static [(&'static str, &'static str)],
    /// Endings of keys that hold no parameters.
    pub ignored_endings: &'static [&'static str],
}
