//! Nothing by default. With the feature `embedded-model`: a list of the files of models/ for `src/built_in.rs` to embed.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to cargo")]

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

const MODELS: [&str; 2] = ["henson-12m", "henson-12m-sentences"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_EMBEDDED_MODEL").is_none() {
        return;
    }
    let variable = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_default());
    let models = variable("CARGO_MANIFEST_DIR").join("../../models");
    let mut list = String::from("const MODELS: &[Model] = &[\n");
    for name in MODELS {
        let directory = models.join(name);
        println!("cargo::rerun-if-changed={}", directory.display());
        let files = files_of(&directory);
        let has = |known: fn(&str) -> bool| files.iter().any(|(file, _)| known(file));
        if !has(|file| file == "config.json") || !has(|file| file.ends_with(".safetensors")) {
            println!(
                "cargo::error=the feature embedded-model needs models/{name} with config.json and weights (*.safetensors)"
            );
            return;
        }
        // FNV-1a: it tells versions apart, no more is asked of it.
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        let mut entries = String::new();
        for (file, path) in &files {
            let bytes = fs::read(path).unwrap_or_default();
            for byte in file.bytes().chain(bytes) {
                digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            let _ = writeln!(entries, "        ({file:?}, include_bytes!({:?})),", path.display().to_string());
        }
        let _ = writeln!(list, "    Model {{ name: {name:?}, digest: \"{digest:016x}\", files: &[\n{entries}    ] }},");
    }
    list.push_str("];\n");
    let out = variable("OUT_DIR").join("embedded_models.rs");
    if let Err(error) = fs::write(&out, list) {
        println!("cargo::error=cannot write {}: {error}", out.display());
    }
}

/// What makes a model: weights, configs and vocabularies, not the log and the report of its training.
fn files_of(directory: &Path) -> Vec<(String, PathBuf)> {
    let mut files = Vec::new();
    for (prefix, folder) in [("", directory.to_owned()), ("1_Pooling/", directory.join("1_Pooling"))] {
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else { continue };
            let known = name == "vocab.txt" || [".json", ".safetensors"].iter().any(|ending| name.ends_with(ending));
            if known && path.is_file() {
                files.push((format!("{prefix}{name}"), path));
            }
        }
    }
    files.sort();
    files
}
