//! Model directories in and out: config.json, safetensors and PyTorch's files, atomic writes, one report of every key that
//! does not fit.
//!
//! The way in: [`resolve_model`] finds a directory, [`ModelDirectory`] its config, [`Weights`] its tensors, [`load()`]
//! puts them into parameters. The way out: [`save()`].
//!
//! What is deliberately absent: what a network's config means (`models`), what a tokenizer's files mean (`text`), the state of a
//! training run (`train`), the environment (the binary passes the cache's place), and printing. Pickles are read
//! as data: nothing in them is ever executed.

#![forbid(unsafe_code)]

mod atomic;
mod config;
mod directory;
#[cfg(feature = "download")]
mod download;
mod error;
pub mod hdf5;
mod hub;
mod load;
mod report;
pub mod safetensors;
mod save;
mod sums;
pub mod torch;
mod weights;

pub use atomic::{Existing, is_temporary, remove_temporaries, write_atomic};
pub use config::{Config, TaskConfig, TrainedReading};
pub use directory::{ModelDirectory, open_regular, parse_json, read_json, read_limited};
pub use error::CheckpointError;
pub use hub::{DownloadProgress, Hub, resolve_model};
pub use load::{LoadMode, LoadOptions, difference, load, open_parameters};
pub use report::{LoadReport, Misshapen, Missing, NonFinite, NotFloat, Repeated, Untied};
pub use safetensors::{SaveDType, StoredDType, TensorInfo};
pub use save::{Beside, LastFile, ModelBeside, NameOf, SaveOptions, TensorFile, save, save_files, save_with};
pub use sums::Sums;
pub use weights::Weights;

/// The readers over bytes in memory, with what they promise: for the targets in `fuzz/`, and for nothing else.
#[doc(hidden)]
pub mod fuzzing {
    use crate::hdf5::{self, Hdf5Error};
    use crate::safetensors::{Header, for_each_f32};
    use crate::torch::{self, TorchError, for_each_strided};
    use crate::weights::{parse_index, shards};

    /// Whatever is accepted can be read to its end.
    pub fn safetensors(bytes: &[u8]) {
        let Ok(header) = Header::parse(bytes) else { return };
        let mut covered = 0;
        for (info, range) in header.tensors.values() {
            let elements: usize = info.shape.iter().product();
            let mut read = 0;
            if for_each_f32(info.dtype, &bytes[range.clone()], |numbers| read += numbers.len()) {
                assert_eq!(read, elements);
            }
            assert_eq!(range.len() * 8, elements * info.dtype.bits());
            covered += range.len();
        }
        let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
        assert_eq!(covered as u64 + 8 + length, bytes.len() as u64);
    }

    /// Whatever is accepted can be read to its end. How many tensors that were.
    pub fn torch(bytes: &[u8]) -> Result<usize, TorchError> {
        struct Memory<'a>(&'a [u8]);
        impl torch::Bytes for Memory<'_> {
            fn size(&self) -> u64 {
                self.0.len() as u64
            }

            fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), TorchError> {
                bytes.copy_from_slice(&self.0[at as usize..at as usize + bytes.len()]);
                Ok(())
            }
        }
        let contents = torch::read(&Memory(bytes))?;
        for tensor in contents.tensors.values() {
            let (info, bytes) = (&tensor.info, &bytes[tensor.bytes.clone()]);
            let elements: usize = info.shape.iter().product();
            let mut read = 0;
            match &tensor.strides {
                Some(strides) => for_each_strided(info, strides, bytes, |numbers| read += numbers.len()),
                None => _ = for_each_f32(info.dtype, bytes, |numbers| read += numbers.len()),
            }
            assert_eq!(read, if info.dtype.is_readable() { elements } else { 0 });
        }
        Ok(contents.tensors.len())
    }

    /// Whatever is accepted lies within the file, as long as its shape says. How many arrays that were.
    pub fn hdf5(bytes: &[u8]) -> Result<usize, Hdf5Error> {
        struct Memory<'a>(&'a [u8]);
        impl hdf5::Bytes for Memory<'_> {
            fn size(&self) -> u64 {
                self.0.len() as u64
            }

            fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), Hdf5Error> {
                bytes.copy_from_slice(&self.0[at as usize..at as usize + bytes.len()]);
                Ok(())
            }
        }
        let arrays = hdf5::read(&Memory(bytes))?;
        for array in arrays.values() {
            let numbers = &bytes[array.bytes.start as usize..array.bytes.end as usize];
            assert_eq!(numbers.len(), 4 * array.shape.iter().product::<usize>());
        }
        Ok(arrays.len())
    }

    /// Whatever is accepted names files in its own directory.
    pub fn index(bytes: &[u8]) {
        let Ok(weight_map) = parse_index("index.json".as_ref(), bytes) else { return };
        for shard in shards(&weight_map) {
            assert!(crate::atomic::is_plain(shard));
            assert_eq!(std::path::Path::new(shard).components().count(), 1);
        }
    }
}
