//! What can go wrong between files and parameters. Each message says which file and key, what was expected and found,
//! and what to do next; the binary only adds the chain of causes.

use std::path::PathBuf;

use crate::hdf5::Hdf5Error;
use crate::report::LoadReport;
use crate::safetensors::{FormatError, StoredDType};
use crate::torch::TorchError;

/// EIO: the medium itself cannot be read there.
const UNREADABLE: i32 = 5;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused to read or write.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, such as `read`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A path that should be a directory is something else.
    #[error("{} is not a directory: a model is a directory with config.json and model.safetensors", path.display())]
    NotADirectory {
        /// The path that was given.
        path: PathBuf,
    },

    /// A directory that holds something else, or nothing.
    #[error(
        "{} holds no model: it has no config.json; a model is a directory with config.json, model.safetensors and the \
         tokenizer's files",
        path.display()
    )]
    NoConfig {
        /// The directory that was given.
        path: PathBuf,
    },

    /// A path that should be a file is something else.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path that was given.
        path: PathBuf,
    },

    /// A file is larger than any real one of its kind.
    #[error("{} has more than {limit} bytes, too many for a file of this kind: is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most that is read.
        limit: u64,
    },

    /// A JSON file does not parse, or has not the fields that it should have.
    #[error("{}, line {line}, column {column}: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// What is wrong there.
        problem: String,
    },

    /// A directory holds no weights.
    #[error(
        "no weights in {}: looked for model.safetensors and pytorch_model.bin, and for an index of their shards; copy the \
         model's files there, or give the directory that has them",
        directory.display()
    )]
    NoWeights {
        /// The directory that was searched.
        directory: PathBuf,
    },

    /// A directory holds shards without their index.
    #[error("{} has {shard}, but not {index}, which says what is in which shard: copy or fetch it too", directory.display())]
    NoIndex {
        /// The directory that was searched.
        directory: PathBuf,
        /// A shard that is there.
        shard: String,
        /// The file that is missing.
        index: &'static str,
    },

    /// A directory holds weights of a format that is not read.
    #[error(
        "{} holds its weights as {found} ({format}), which cannot be read yet; make a model.safetensors of it: {conversion}",
        directory.display()
    )]
    ForeignFormat {
        /// The directory that was searched.
        directory: PathBuf,
        /// The file that is there.
        found: String,
        /// Whose format it is.
        format: &'static str,
        /// How to convert it.
        conversion: &'static str,
    },

    /// A file is not a valid safetensors file.
    #[error("{} cannot be used: {problem}; fetch or write it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: FormatError,
    },

    /// A file is not one of PyTorch that can be read without executing it.
    #[error("{} cannot be used: {problem}", path.display())]
    Torch {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: TorchError,
    },

    /// A file is not one of HDF5 that can be read.
    #[error("{} cannot be used: {problem}", path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: Hdf5Error,
    },

    /// Weights as their authors published them do not belong to the family.
    #[error("{} cannot be used: {problem}", path.display())]
    Original {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A file's bytes are not those that were written.
    #[error("{} is damaged: its checksum is {found}, {expected} was written", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The checksum that was noted when it was written.
        expected: String,
        /// The checksum that it has.
        found: String,
    },

    /// A file is not what it was when it was opened.
    #[error(
        "{} was changed or truncated while it was being read: read it again when nothing writes to it (henson itself \
         writes new files and renames them)",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },

    /// An index names a shard by something else than the name of a file beside it.
    #[error("{}: {shard:?} is not the plain name of a file next to the index", index.display())]
    ShardName {
        /// The index.
        index: PathBuf,
        /// The name that it gives.
        shard: String,
    },

    /// A shard that the index names is not there.
    #[error("{} names {shard}, which is not in that directory: copy or fetch the missing file", index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The file that is missing.
        shard: String,
    },

    /// The index and a shard disagree.
    #[error("{} and {shard} do not belong together: {problem}; fetch all files of the model again", index.display())]
    IndexMismatch {
        /// The index.
        index: PathBuf,
        /// The shard.
        shard: String,
        /// Where they differ.
        problem: String,
    },

    /// A tensor that was asked for is not there.
    #[error("{} has no tensor named {name:?}", path.display())]
    NoTensor {
        /// Where the weights come from.
        path: PathBuf,
        /// The name.
        name: String,
    },

    /// A tensor does not hold floating-point numbers that can be read.
    #[error("{}: {name} holds {dtype}; only F32, F16, BF16 and F64 are read as weights", path.display())]
    NotFloat {
        /// Where the weights come from.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What it holds.
        dtype: StoredDType,
    },

    /// The weights do not fit the model. Nothing was written to the parameters.
    #[error("the weights in {} do not fit this model\n{report}", path.display())]
    DoesNotFit {
        /// Where the weights come from.
        path: PathBuf,
        /// Every key that does not fit.
        report: Box<LoadReport>,
    },

    /// There was no memory for the parameters.
    #[error(transparent)]
    Tensor(#[from] henson_tensor::TensorError),

    /// The destination is there and was not to be replaced. It is as it was.
    #[error("{} exists already and was not touched: choose another directory, or overwrite it (--overwrite)", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },

    /// The destination holds files that do not belong to a model, which replacing it would delete.
    #[error(
        "{} was not touched: replacing it would delete {}, which a model directory does not have; move that elsewhere, \
         or choose another directory",
        path.display(), names.join(", ")
    )]
    ForeignFiles {
        /// The destination.
        path: PathBuf,
        /// Some of what would be lost.
        names: Vec<String>,
    },

    /// Two processes write to the same place.
    #[error("another process is writing {}: wait until it has finished", path.display())]
    Busy {
        /// The destination.
        path: PathBuf,
    },

    /// A file to save has a name that cannot be used.
    #[error("{name:?} cannot be saved in a model directory: {problem}")]
    FileName {
        /// The name.
        name: String,
        /// Why not.
        problem: &'static str,
    },

    /// Weights to save are not finite, or would not be after rounding. What was there before is as it was.
    #[error("{name}: {count} of its numbers are not finite as {dtype}, nothing was saved; {hint}")]
    NotFinite {
        /// The parameter.
        name: String,
        /// How many.
        count: usize,
        /// What they were to be saved as.
        dtype: StoredDType,
        /// What to do next.
        hint: &'static str,
    },

    /// The model is neither a directory nor the name of one on a hub.
    #[error(
        "{name:?} is neither a directory nor a name of the form organisation/name: give the path of a directory with \
         config.json and model.safetensors"
    )]
    ModelName {
        /// What was given.
        name: String,
    },

    /// The model is not on this machine, and fetching it was not allowed.
    #[error(
        "there is no directory {name:?}, and the model is not in the cache: put config.json, model.safetensors and the \
         tokenizer's files into a directory and give its path (the cache would have them in {}), or fetch them with \
         --download",
        expected.display()
    )]
    ModelNotFound {
        /// What was given.
        name: String,
        /// Where the cache would have it.
        expected: PathBuf,
    },

    /// This program was built without the ability to fetch models.
    #[error("{name} cannot be fetched: this program was built without the feature `download`")]
    DownloadNotBuilt {
        /// What was given.
        name: String,
    },

    /// A file could not be fetched. Nothing was added to the cache.
    #[error("cannot fetch {url}: {problem}")]
    Download {
        /// Its address.
        url: String,
        /// What went wrong, and what to do next.
        problem: String,
    },
}

impl CheckpointError {
    /// Whether it is the files that are wrong, as when they are damaged or missing, and not the machine that reads them.
    pub fn is_of_the_files(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                source.kind() == std::io::ErrorKind::NotFound || source.raw_os_error() == Some(UNREADABLE)
            }
            Self::Tensor(_) | Self::Exists { .. } | Self::ForeignFiles { .. } | Self::Busy { .. } => false,
            _ => true,
        }
    }

    /// For `map_err` after a call of the operating system.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
