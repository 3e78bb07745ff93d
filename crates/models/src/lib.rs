//! Layers and one file per model family: config, forward, heads and checkpoint names; knows no files, losses or tokenizers.
