//! The only user of the tokenizers crate: tokenizer files, encoding, and features with their way back to the text.
