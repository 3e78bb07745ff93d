//! The flags of `henson tokenizer`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{ModelName, Texts, parse_count, parse_threads};

#[derive(Args, Debug)]
#[command(arg_required_else_help = true)]
pub(crate) struct Tokenizer {
    #[command(subcommand)]
    pub(crate) action: TokenizerAction,
}

#[derive(Subcommand, Debug)]
pub(crate) enum TokenizerAction {
    /// Make a vocabulary out of text
    #[command(
        after_help = "FILES hold one text per line, or JSON lines (.jsonl, .ndjson, .json; others with --field), plain or as .gz or \
.zst. As by `data build`, other tables (.csv, .tsv) are refused.\n\
The same text gives the same files, byte for byte, whatever the number of threads.\n\n\
Examples:\n  henson tokenizer train --kind wordpiece --vocab-size 30000 --out tokenizer corpus/*.txt\n  \
henson tokenizer train --kind byte-bpe --vocab-size 50000 --out tokenizer news.jsonl.zst --field body\n  \
henson tokenizer train --kind byte-bpe --specials gpt2 --vocab-size 50257 --out tokenizer corpus/*.txt\n  \
henson tokenizer train --kind unigram --specials t5 --sentinels 100 --cased --vocab-size 32100 --out tokenizer corpus/*.txt\n\n\
Then look at it with `henson tokenizer info --model tokenizer corpus/held-out.txt`, and turn the text into shards with \
`henson data build --tokenizer tokenizer`."
    )]
    Train(TokenizerTrain),
    /// Show the tokens of texts with ids and offsets
    #[command(
        after_help = "Offsets count characters (Unicode code points) from 0, the end not included. No special tokens are \
put around the text.\n\n\
With --sample, words are segmented at random instead of optimally, as in training with subword regularisation: BPE drops merges, \
WordPiece drops matches, the unigram model draws among all ways to write a word. The seed, the number of the text and \
the text decide everything.\n\n\
Examples:\n  henson tokenizer encode --model DIR 'Jim Henson was a puppeteer.'\n  \
henson tokenizer encode --model DIR --json --file texts.txt > pieces.jsonl\n  \
henson tokenizer encode --model DIR --sample 1 --dropout 0.2 'puppeteers'"
    )]
    Encode(TokenizerEncode),
    /// Show what a tokenizer is, and how well it fits a text
    #[command(
        after_help = "On FILES (one text per line or JSON lines, plain or as .gz or .zst) it reports how much of the text it can write, \
into how many tokens it splits words, and what it cannot write. Few tokens per word and almost no unknown ones are good; \
compare tokenizers on text that they were not trained on.\n\n\
Examples:\n  henson tokenizer info --model DIR\n  henson tokenizer info --model DIR held-out.txt"
    )]
    Info(TokenizerInfo),
    /// Add words of a domain to the end of a WordPiece vocabulary, for continued pre-training
    #[command(
        after_help = "All existing token ids stay. `henson pretrain --model DIR` on data that was built with the new \
tokenizer gives each new token the mean of the tokens that its text was split into before.\n\n\
Example:\n  henson tokenizer extend --model DIR --pieces words.txt --out my-tokenizer"
    )]
    Extend(TokenizerExtend),
}

#[derive(Args, Debug)]
pub(crate) struct TokenizerExtend {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// A file with one word per line, or ## and what continues a word; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) pieces: PathBuf,

    /// The directory to write
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Replace DIR if it is a tokenizer already
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizerKind {
    /// BERT's: greedy longest match, ## before what continues a word
    #[value(name = "wordpiece")]
    WordPiece,
    /// The first GPT's: merges of characters, `</w>` after what ends a word
    Bpe,
    /// RoBERTa's: merges of bytes, so that nothing is unknown; keeps case
    ByteBpe,
    /// SentencePiece's: the most likely segmentation, ▁ before what begins a word
    Unigram,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizerSpecials {
    /// [PAD] [UNK] [CLS] [SEP] [MASK], around a text as [CLS] text [SEP]
    Bert,
    /// `<s> <pad> </s> <unk> <mask>`, around a text as `<s> text </s>`: RoBERTa, BART
    Roberta,
    /// <|endoftext|> between texts and nothing around one
    Gpt2,
    /// `<pad> </s> <unk>`, behind a text as `text </s>`
    T5,
    /// XLNet's nine, behind a text as `text <sep> <cls>`; with --kind unigram
    #[value(name = "xlnet")]
    XlNet,
}

#[derive(Args, Debug)]
pub(crate) struct TokenizerTrain {
    /// What kind of tokenizer
    #[arg(long, value_enum, default_value = "wordpiece")]
    pub(crate) kind: TokenizerKind,

    /// How many tokens, special ones and sentinels included
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) vocab_size: usize,

    /// Which special tokens it has: those of the models that it is for [default: roberta with byte-bpe, else bert]
    #[arg(long, value_enum)]
    pub(crate) specials: Option<TokenizerSpecials>,

    /// How many tokens <extra_id_0>, <extra_id_1>, … stand at the end of the vocabulary, as T5's pre-training needs (100 in T5)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) sentinels: usize,

    /// Keep upper case and accents; byte-bpe always does [default: lower case]
    #[arg(long)]
    pub(crate) cased: bool,

    /// How often a merge must be seen
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse_count)]
    pub(crate) min_frequency: usize,

    /// Maximum number of different characters, ASCII aside, which is always kept; rarer ones become the unknown token
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = parse_count)]
    pub(crate) alphabet: usize,

    /// Maximum number of distinct words held while counting, about 80 bytes each; beyond it the rarest are dropped
    #[arg(long, value_name = "N", default_value_t = 4 << 20, value_parser = parse_count)]
    pub(crate) max_words: usize,

    /// The model_max_length to note in the files, such as 512
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) max_length: Option<usize>,

    /// The directory to write
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Replace DIR if it is a tokenizer already
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Lines are JSON objects with the text under this name [default: by the files' names; text]
    #[arg(long, value_name = "NAME")]
    pub(crate) field: Option<String>,

    /// Threads to use; the result does not depend on it [default: all cores]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The text; - is standard input
    #[arg(value_name = "FILES", required = true)]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct TokenizerEncode {
    #[command(flatten)]
    pub(crate) model: ModelName,

    #[command(flatten)]
    pub(crate) texts: Texts,

    /// Segment words at random instead of optimally, with this seed
    #[arg(long, value_name = "SEED")]
    pub(crate) sample: Option<u64>,

    /// For BPE and WordPiece: the probability of skipping a merge or a match [default: 0.1]
    #[arg(long, value_name = "P", requires = "sample", conflicts_with = "alpha")]
    pub(crate) dropout: Option<f64>,

    /// For unigram: the smoothing exponent; 0 makes all segmentations of a word equally likely, large values keep the best
    /// [default: 0.2]
    #[arg(long, value_name = "A", requires = "sample")]
    pub(crate) alpha: Option<f64>,

    /// Print one JSON object per text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct TokenizerInfo {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// Lines are JSON objects with the text under this name [default: by the files' names; text]
    #[arg(long, value_name = "NAME", requires = "files")]
    pub(crate) field: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// A text to try it on; - is standard input
    #[arg(value_name = "FILES")]
    pub(crate) files: Vec<PathBuf>,
}
