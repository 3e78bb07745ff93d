//! The flags of `henson data`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use henson_data::{
    Format, InstanceSettings, LongSentences, MaskCount, Masking, NoiseSettings, Objective, Packing, Sentences,
    Separators, SourceFiles,
};

use super::settings::named;
use super::{Values, among, parse_count, parse_threads, parse_within};

#[derive(Args, Debug)]
#[command(arg_required_else_help = true)]
pub(crate) struct Data {
    #[command(subcommand)]
    pub(crate) action: DataAction,
}

#[derive(Subcommand, Debug)]
pub(crate) enum DataAction {
    /// Tokenize text into shards for pre-training
    #[command(
        after_help = "FILES may be text (.txt; documents end at an empty line), JSON lines (.jsonl, .ndjson, .json) \
or parquet, plain or as .gz or .zst; - is standard input. Of a directory and all that is in it, files with such names are read, \
sorted; others are skipped and counted. \
Duplicate documents are dropped. DIR appears when it is complete, and holds the tokenizer too.\n\n\
Examples:\n  henson data build --tokenizer tokenizer --out corpus text/*.txt.zst\n  \
henson data build --tokenizer tokenizer --out corpus --source wiki=2:wiki/ --source web=1:web.jsonl.zst --field body\n  \
henson data build --tokenizer tokenizer --out corpus --document-per-file notes/\n\n\
Then look at it with `henson data stats DIR`, and train with `henson pretrain --data DIR`."
    )]
    Build(DataBuild),
    /// Show how much a corpus has, how long documents and sentences are, and how full sequences would be
    Stats(DataStats),
    /// Print pre-training instances as a model sees them: tokens, masks, segments
    #[command(after_help = "[MASK←dog] masks dog, cat←dog replaces it, =dog is to be predicted though it is \
seen. The first segment is A, the second B. Of span-corruption and denoising, the encoder reads the source, and the decoder is to \
write the target.\n\n\
Examples:\n  henson data show corpus\n  henson data show corpus --masking whole-words --sequence-length 64 -n 1\n  \
henson data show corpus --epoch 3 --index 1000 --json\n  \
henson data show corpus --objective span-corruption --packing blocks\n  \
henson data show corpus --objective denoising --noise deletion=0.2,rotation=1")]
    Show(DataShow),
    /// Write the first batches of pre-training to a file that other systems can read
    #[command(after_help = "FILE is in the safetensors format. Batch 0 is batch.0000.input_ids, .token_type_ids, \
.attention_mask, .labels (-100 where nothing is predicted) and, with sentence pairs, .next_sentence_label (0 next, 1 \
random) or .sentence_order_label (0 in order, 1 swapped): 64-bit integers, padded to the longest sequence of the batch, as \
transformers takes them. Of span-corruption and denoising, labels are the targets, padded to the longest of them. They are the batches \
that `henson pretrain` begins with, given the same settings.\n\n\
Example:\n  henson data export corpus --out batches.safetensors --batches 50 --batch-size 32")]
    Export(DataExport),
}

const FORMATS: Values<Format> = &[
    ("text", "Lines of text", Format::Text),
    ("jsonl", "One JSON object per line", Format::JsonLines),
    ("parquet", "A table", Format::Parquet),
];

const SENTENCES: Values<Sentences> = &[
    ("lines", "Each line is one", Sentences::Lines),
    ("split", "By punctuation, abbreviations and the like", Sentences::Split),
];

#[derive(Args, Debug)]
pub(crate) struct DataBuild {
    /// The directory of the tokenizer, or of a model with one; henson-12m is the one that comes with henson, bytes needs no
    /// file (ELMo's: words are read as characters)
    #[arg(long, value_name = "DIR")]
    pub(crate) tokenizer: PathBuf,

    /// The directory to write
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Replace DIR if it is a corpus already
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// A named part of the text with its weight: documents of weight 2 are seen twice as often as others. May come
    /// several times, for the same name too
    #[arg(long, value_name = "NAME=WEIGHT:PATH", value_parser = parse_source)]
    pub(crate) source: Vec<SourceFiles>,

    /// The share of documents to keep for evaluation, chosen by their text [default: 0.01, or 0 with --held-out-files]
    #[arg(long, value_name = "SHARE")]
    pub(crate) held_out: Option<f64>,

    /// A file whose documents are all kept for evaluation; may come several times
    #[arg(long, value_name = "FILE")]
    pub(crate) held_out_files: Vec<PathBuf>,

    /// What files hold [default: what their names say, else text]
    #[arg(long, value_parser = among(FORMATS))]
    pub(crate) format: Option<Format>,

    /// In text, each line is a document; else an empty line ends one
    #[arg(long)]
    pub(crate) document_per_line: bool,

    /// Each file of text is a document, empty lines or not; of a directory, .md and .markdown are read as well
    #[arg(long, conflicts_with = "document_per_line")]
    pub(crate) document_per_file: bool,

    /// The key of the text in JSON lines
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub(crate) field: String,

    /// The column of the text in parquet
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub(crate) column: String,

    /// What a sentence is [default: lines in text with empty lines between documents, else split]
    #[arg(long, value_parser = among(SENTENCES))]
    pub(crate) sentences: Option<Sentences>,

    /// Replace bytes that are not UTF-8 instead of stopping at them
    #[arg(long)]
    pub(crate) lossy: bool,

    /// The size of a shard in MiB, about
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = parse_shard)]
    pub(crate) shard_size: usize,

    /// Decides, with a document's text, whether it is kept for evaluation
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Threads to use; the result does not depend on it [default: all cores]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The text
    #[arg(value_name = "FILES", required_unless_present = "source")]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct DataStats {
    /// The corpus
    #[arg(value_name = "DIR")]
    pub(crate) data: PathBuf,

    /// Compare all files with their checksums first
    #[arg(long)]
    pub(crate) verify: bool,

    /// Print one JSON object for each part
    #[arg(long)]
    pub(crate) json: bool,
}

/// How instances are made. The names are those of recipes, and so are the defaults.
#[derive(Args, Debug, Clone)]
pub(crate) struct InstanceFlags {
    /// Maximum sequence length in tokens, special tokens included
    #[arg(long, value_name = "PIECES", default_value_t = 128, value_parser = parse_count)]
    pub(crate) sequence_length: usize,

    /// The objective
    #[arg(long, value_parser = named::<Objective>(&[]), default_value = "mlm-nsp")]
    pub(crate) objective: Objective,

    /// How single segments are cut
    #[arg(long, value_parser = named::<Packing>(&["doc-sentences"]), default_value = "documents")]
    pub(crate) packing: Packing,

    /// What becomes of sentences that do not fit into a sequence
    #[arg(long, value_parser = named::<LongSentences>(&[]), default_value = "split")]
    pub(crate) long_sentences: LongSentences,

    /// Where separators stand among sentences
    #[arg(long, value_parser = named::<Separators>(&[]), default_value = "documents")]
    pub(crate) separators: Separators,

    /// The share of documents that are cut into shorter sequences
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    pub(crate) short_sequences: f64,

    /// What is masked together
    #[arg(long, value_parser = named::<Masking>(&[]), default_value = "pieces")]
    pub(crate) masking: Masking,

    /// The share of tokens that are masked
    #[arg(long, value_name = "SHARE", default_value_t = 0.15)]
    pub(crate) mask_probability: f64,

    /// How that share becomes a number of tokens
    #[arg(long, value_parser = named::<MaskCount>(&[]), default_value = "rounded")]
    pub(crate) mask_count: MaskCount,

    /// Mask special tokens as well
    #[arg(long)]
    pub(crate) mask_specials: bool,

    /// Maximum number of masked tokens per sequence [default: no limit]
    #[arg(long, value_name = "PIECES", value_parser = parse_count)]
    pub(crate) max_predictions: Option<usize>,

    /// What replaces masked tokens: the shares of [MASK], of random tokens, and of unchanged ones
    /// [default: 0.8,0.1,0.1; of replaced-tokens 0.85,0,0.15]
    #[arg(long, value_name = "MASK,RANDOM,SAME", value_parser = parse_split)]
    pub(crate) mask_split: Option<[f64; 3]>,

    /// Repeat the same instances after this many epochs (static masking); 0 draws new ones every epoch
    #[arg(long, value_name = "EPOCHS", default_value_t = 0)]
    pub(crate) dupe_factor: u32,

    /// Mean length of spans in tokens, of span-corruption and denoising
    #[arg(long, value_name = "PIECES", default_value_t = 3.0)]
    pub(crate) mean_span: f64,

    /// What denoising does to a text: shares of permutation, masking, deletion, infilling, rotation, random
    /// [default: permutation=1,infilling=0.3]
    #[arg(long, value_name = "NAME=SHARE,…", value_parser = parse_noise)]
    pub(crate) noise: Option<NoiseSettings>,

    /// The seed of all draws
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Take the part that is kept for evaluation
    #[arg(long)]
    pub(crate) held_out: bool,
}

impl InstanceFlags {
    pub(crate) fn settings(&self) -> InstanceSettings {
        InstanceSettings {
            sequence_length: self.sequence_length,
            objective: self.objective,
            packing: self.packing,
            long_sentences: self.long_sentences,
            separators: self.separators,
            short_sequences: self.short_sequences,
            masking: self.masking,
            mask_probability: self.mask_probability,
            mask_count: self.mask_count,
            mask_specials: self.mask_specials,
            max_predictions: self.max_predictions,
            mask_split: self.mask_split.unwrap_or(match self.objective {
                Objective::ReplacedTokens => [0.85, 0.0, 0.15],
                _ => [0.8, 0.1, 0.1],
            }),
            dupe_factor: self.dupe_factor,
            repeated_draws: false,
            mean_span: self.mean_span,
            noise: self.noise,
            permutation_size: None,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct DataShow {
    /// The corpus
    #[arg(value_name = "DIR")]
    pub(crate) data: PathBuf,

    /// The epoch, from 0
    #[arg(long, default_value_t = 0)]
    pub(crate) epoch: u64,

    /// The number of the first instance to show, from 0
    #[arg(long, default_value_t = 0)]
    pub(crate) index: u64,

    /// How many to show
    #[arg(long, short = 'n', default_value_t = 3, value_parser = parse_count)]
    pub(crate) count: usize,

    /// Number instances in the order of their documents, not in that of training
    #[arg(long)]
    pub(crate) in_order: bool,

    #[command(flatten)]
    pub(crate) instances: InstanceFlags,

    /// Print one JSON object an instance
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DataExport {
    /// The corpus
    #[arg(value_name = "DIR")]
    pub(crate) data: PathBuf,

    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,

    /// Replace FILE if it exists
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// How many batches
    #[arg(long, default_value_t = 1, value_parser = parse_count)]
    pub(crate) batches: usize,

    /// How many sequences a batch has
    #[arg(long, default_value_t = 32, value_parser = parse_count)]
    pub(crate) batch_size: usize,

    #[command(flatten)]
    pub(crate) instances: InstanceFlags,
}

fn parse_split(text: &str) -> Result<[f64; 3], String> {
    let shares: Option<Vec<f64>> = text.split(',').map(|share| share.trim().parse().ok()).collect();
    let shares = shares.and_then(|shares| <[f64; 3]>::try_from(shares).ok());
    shares.ok_or_else(|| "expected three shares, such as 0.8,0.1,0.1".to_owned())
}

/// Noises that are not named are none.
fn parse_noise(text: &str) -> Result<NoiseSettings, String> {
    let mut noise = NoiseSettings::none();
    for part in text.split(',') {
        let (name, share) = part.split_once('=').ok_or("expected NAME=SHARE, such as infilling=0.3")?;
        let share: f64 = share.trim().parse().map_err(|_| format!("expected a share, 0 to 1, got {share:?}"))?;
        let place = match name.trim() {
            "permutation" => &mut noise.permutation,
            "masking" => &mut noise.masking,
            "deletion" => &mut noise.deletion,
            "infilling" => &mut noise.infilling,
            "rotation" => &mut noise.rotation,
            "random" => &mut noise.random,
            other => {
                return Err(format!(
                    "unknown noise {other:?}: permutation, masking, deletion, infilling, rotation, random"
                ));
            }
        };
        *place = share;
    }
    Ok(noise)
}

fn parse_source(text: &str) -> Result<SourceFiles, String> {
    let parts = text.split_once('=').and_then(|(name, rest)| Some((name, rest.split_once(':')?)));
    let Some((name, (weight, path))) = parts.filter(|(name, (_, path))| !name.is_empty() && !path.is_empty()) else {
        return Err("expected NAME=WEIGHT:PATH, such as wiki=2:wiki/".to_owned());
    };
    match weight.parse::<f64>() {
        Ok(weight) if weight.is_finite() && weight > 0.0 => {
            Ok(SourceFiles { name: name.to_owned(), weight, paths: vec![path.into()] })
        }
        _ => Err(format!("expected a weight above 0, got {weight:?}")),
    }
}

fn parse_shard(text: &str) -> Result<usize, String> {
    parse_within(text, 2048)
}
