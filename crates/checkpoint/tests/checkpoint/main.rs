//! The crate from outside: real directories, broken ones, interrupted saves, and a hub on a local port.

mod corrupt;
mod golden;
#[cfg(feature = "download")]
mod hub;
mod load;
mod original;
mod save;
mod torch;
mod writers;

use std::path::{Path, PathBuf};

use henson_checkpoint::{Config, ModelDirectory};
use henson_models::{Family, Head, Model, Naming};
use henson_tensor::{Builder, DType, Device, Init, Parameters};

/// BERT's names.
fn naming() -> &'static Naming {
    &Family::of_type("bert").unwrap().naming
}

/// A directory of the golden values.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden").join(name)
}

/// The parameters of a BERT for a directory's config, different for every seed.
fn bert(directory: &Path, head: Head, seed: u64) -> Parameters {
    let config = ModelDirectory::open(directory).unwrap().config().unwrap();
    let config = Config::from_value(config).unwrap();
    let mut builder = Builder::new();
    Model::build(&mut builder, &config.model, head).unwrap();
    finish(builder, seed)
}

/// Five words, three numbers each: the smallest model that has every kind of name.
fn tiny(seed: u64) -> Parameters {
    let mut builder = Builder::new();
    let init = Init::TruncatedNormal(0.5);
    builder.matrix("cls.predictions.transform.dense.weight", 3, 3, init);
    builder.padded_vector("cls.predictions.bias", 5, init);
    builder.padded_table("bert.embeddings.word_embeddings.weight", 5, 3, init);
    builder.vector("bert.embeddings.LayerNorm.weight", 3, init);
    finish(builder, seed)
}

fn finish(builder: Builder, seed: u64) -> Parameters {
    let device = Device::cpu(None, Some(1)).unwrap();
    let mut parameters = builder.finish(&device, DType::F32).unwrap();
    parameters.initialise(seed).unwrap();
    parameters
}

/// All numbers of all parameters, with their names.
fn numbers(parameters: &Parameters) -> Vec<(String, Vec<f32>)> {
    parameters
        .entries()
        .iter()
        .enumerate()
        .map(|(i, entry)| (entry.name.clone(), parameters.read(i).unwrap()))
        .collect()
}

/// A tensor for [`safetensors`].
struct Stored {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn f32s(name: &'static str, shape: &[usize], numbers: &[f32]) -> Stored {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    Stored { name, dtype: "F32", shape: shape.to_vec(), bytes }
}

/// Ones of a shape.
fn ones(name: &'static str, shape: &[usize]) -> Stored {
    f32s(name, shape, &vec![1.0; shape.iter().product()])
}

/// The bytes of a safetensors file, written independently of the crate.
fn safetensors(tensors: &[Stored]) -> Vec<u8> {
    let mut header = Vec::new();
    let mut data = Vec::new();
    for Stored { name, dtype, shape, bytes } in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        header
            .push(format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"));
        data.extend_from_slice(bytes);
    }
    raw(&format!("{{{}}}", header.join(",")), &data)
}

/// The bytes of a safetensors file with this header.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Runs one test of this binary as a process of its own, through a shell command that ends in `"$@"`.
fn child(shell: &str, test: &str, argument: &Path) -> std::process::Command {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", shell, "sh"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--test-threads", "1"]);
    command.env(CHILD, argument).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command
}

/// What [`child`] passes on; not set in the tests' own process.
fn child_argument() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

const CHILD: &str = "HENSON_CHECKPOINT_TEST_CHILD";
