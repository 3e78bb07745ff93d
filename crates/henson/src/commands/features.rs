//! `henson features`: vectors of tokens as JSON lines, NumPy arrays or safetensors.

use std::path::{Path, PathBuf};

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_infer::{Carried, Model, TokenFeatures, Want};
use henson_text::code_point_offsets;
use serde::Serialize;
use serde_json::json;

use crate::built_in::BuiltIn;
use crate::flags::{FeatureFormat, Features};
use crate::{input, models, output};

pub(crate) fn run(flags: &Features) -> anyhow::Result<()> {
    let out = flags.out.as_deref();
    if let Some(out) = out {
        anyhow::ensure!(!out.is_dir(), "--out {} is a directory: expected a file in one", out.display());
        let beside = (flags.format != FeatureFormat::Jsonl).then(|| tokens_file(out));
        for path in [Some(out.to_owned()), beside].into_iter().flatten() {
            anyhow::ensure!(flags.overwrite || !path.exists(), "{} exists: --overwrite replaces it", path.display());
        }
        // Now, not after hours of computing.
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        anyhow::ensure!(parent.is_dir(), "cannot write {}: there is no directory {}", out.display(), parent.display());
    }
    let device = flags.compute.device()?;
    let path = models::find(&flags.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.compute.dtype(), Want::Encoder)?;
    output::warn_of_length(flags.length.max_length, model.most_tokens());
    let mut all: Vec<TokenFeatures> = Vec::new();
    let (mut lines, mut carried) = (Vec::new(), Carried::default());
    input::for_each(&flags.texts, |texts, numbers| {
        let features = match flags.carry_states {
            true => model.features_in_turn(texts, flags.layers, flags.length.length(), &mut carried),
            false => model.features(texts, flags.layers, flags.length.length()),
        };
        let features = features.map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, features.iter().map(|f| f.dropped));
        for (text, features) in texts.iter().zip(features) {
            match (flags.format, out) {
                (FeatureFormat::Jsonl, None) => output::json(&Line::new(text, &features, true))?,
                (FeatureFormat::Jsonl, Some(_)) => push_line(&mut lines, &Line::new(text, &features, true))?,
                _ => {
                    push_line(&mut lines, &Line::new(text, &features, false))?;
                    all.push(features);
                }
            }
        }
        Ok(())
    })?;
    let Some(out) = out else { return Ok(()) };
    let write = |path: &Path, bytes: &[u8]| {
        write_atomic(path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    match flags.format {
        FeatureFormat::Jsonl => return write(out, &lines),
        FeatureFormat::Npy => write(out, &npy(&all))?,
        FeatureFormat::Safetensors => write(out, &safetensors(&all)?)?,
    }
    write(&tokens_file(out), &lines)
}

/// The file that tells which row is which token.
fn tokens_file(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".tokens.jsonl");
    PathBuf::from(name)
}

fn push_line(lines: &mut Vec<u8>, value: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *lines, value)?;
    lines.push(b'\n');
    Ok(())
}

/// What is written for a text. Offsets are in characters.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    tokens: &'a [String],
    offsets: Vec<Option<(usize, usize)>>,
    width: usize,
    dropped: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    vectors: Option<Vec<&'a [f32]>>,
}

impl<'a> Line<'a> {
    fn new(text: &'a str, f: &'a TokenFeatures, with_vectors: bool) -> Self {
        let vectors = with_vectors.then(|| f.vectors.chunks(f.width).collect());
        let bytes: Vec<(usize, usize)> = f.offsets.iter().copied().flatten().collect();
        let mut characters = code_point_offsets(text, &bytes).into_iter();
        let offsets = f.offsets.iter().map(|offset| offset.and_then(|_| characters.next())).collect();
        Self { text, tokens: &f.tokens, offsets, width: f.width, dropped: f.dropped, vectors }
    }
}

/// NumPy's format 1.0: all rows of all texts, f32.
fn npy(all: &[TokenFeatures]) -> Vec<u8> {
    let width = all.first().map_or(0, |f| f.width);
    let rows: usize = all.iter().map(|f| f.tokens.len()).sum();
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    // Magic, version and length are 10 bytes; the header ends with a line feed at a multiple of 64.
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(all.iter().flat_map(|f| &f.vectors).flat_map(|x| x.to_le_bytes()));
    bytes
}

/// One tensor a text, by its number.
fn safetensors(all: &[TokenFeatures]) -> anyhow::Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (i, features) in all.iter().enumerate() {
        let start = end;
        end += features.vectors.len() * 4;
        let shape = [features.tokens.len(), features.width];
        header.insert(i.to_string(), json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(all.iter().flat_map(|f| &f.vectors).flat_map(|x| x.to_le_bytes()));
    Ok(bytes)
}
