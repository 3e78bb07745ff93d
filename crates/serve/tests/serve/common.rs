//! A real server on a loopback port with small models, and a client that can also misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use henson_serve::{Handle, ServeError, Server, Settings, Source};
use henson_tensor::{DType, Device};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The golden weights of a head with a vocabulary of its 71 pieces.
pub(crate) fn model(head: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    copy_model(head, directory.path());
    directory
}

pub(crate) fn golden(head: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden").join(head)
}

pub(crate) fn copy_model(head: &str, to: &Path) {
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(head).join(file), to.join(file)).unwrap();
    }
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    pieces.extend((b'a'..=b'z').map(|c| char::from(c).to_string()));
    pieces.extend((b'a'..=b'z').map(|c| format!("##{}", char::from(c))));
    pieces.extend([".", "?", "!", ",", "play", "jim", "henson"].map(str::to_owned));
    pieces.extend((pieces.len()..71).map(|i| format!("word{i}")));
    std::fs::write(to.join("vocab.txt"), pieces.join("\n") + "\n").unwrap();
}

/// Overwrites a tensor of a model, or one row of it, with one number.
pub(crate) fn set_weights(directory: &Path, ending: &str, row: Option<usize>, number: f32) {
    let path = directory.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let named = tensors.as_object().unwrap().iter().find(|(name, _)| name.ends_with(ending));
    let tensor = named.unwrap_or_else(|| panic!("no tensor {ending}")).1;
    let number_of = |value: &Value| value.as_u64().unwrap() as usize;
    let (from, to) = (number_of(&tensor["data_offsets"][0]), number_of(&tensor["data_offsets"][1]));
    let rows = number_of(&tensor["shape"][0]);
    let range = row.map_or(from..to, |row| {
        let width = (to - from) / rows;
        from + row * width..from + (row + 1) * width
    });
    for place in bytes[8 + header..][range].chunks_exact_mut(4) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

/// A server at work; it stops when this is dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) handle: Handle,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Running {
    /// Serves these models, the first by default, and waits until they are loaded.
    pub(crate) fn start(models: &[(&str, &Path)], settings: Settings) -> Self {
        let mut running = Self::start_at_once(models, settings);
        let start = Instant::now();
        loop {
            // A model that cannot be loaded ends the server.
            if running.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                panic!("{:#?}", running.wait());
            }
            if TcpStream::connect(running.address).is_ok() && running.get("/health").status == 200 {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "the models are not loaded");
            std::thread::sleep(Duration::from_millis(5));
        }
        running
    }

    pub(crate) fn start_at_once(models: &[(&str, &Path)], settings: Settings) -> Self {
        let sources: Vec<Source> =
            models.iter().map(|(name, path)| Source { name: (*name).to_owned(), path: (*path).to_owned() }).collect();
        let device = Device::cpu(None, Some(2)).unwrap();
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), sources, device, DType::F32, settings).unwrap();
        let (address, handle) = (server.address(), server.handle());
        Self { address, handle, thread: Some(std::thread::spawn(move || server.run(|| ()))) }
    }

    /// Stops it and waits until it has.
    pub(crate) fn stop(&mut self) -> Result<(), ServeError> {
        self.handle.stop();
        self.wait()
    }

    pub(crate) fn wait(&mut self) -> Result<(), ServeError> {
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"), b"")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.post_with(path, body.as_bytes(), "Content-Type: application/json\r\n")
    }

    pub(crate) fn post_with(&self, path: &str, body: &[u8], headers: &str) -> Answer {
        self.send(&head(path, body.len(), headers), body)
    }

    /// The answer to a body that must be accepted.
    #[track_caller]
    pub(crate) fn ok(&self, path: &str, body: &str) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
        answer.json()
    }

    pub(crate) fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server may answer and close before it has read everything; that is its right.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        read_answer(&mut stream)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// A line of /metrics by its beginning.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

pub(crate) fn head(path: &str, length: usize, headers: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n")
}

/// What a server said; status 0 where it closed the connection without a word.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }
}

/// Reads to the end: requests here ask to close the connection.
pub(crate) fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1 << 16];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..length]);
    }
    let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") else {
        return Answer { status: 0, head: String::new(), body: Vec::new() };
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let mut body = bytes[end + 4..].to_vec();
    if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body);
    }
    Answer { status, head, body }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = bytes.windows(2).position(|part| part == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        out.extend_from_slice(&bytes[end + 2..end + 2 + length]);
        bytes = &bytes[end + 4 + length..];
        if length == 0 {
            break;
        }
    }
    out
}

pub(crate) fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// A small GPT-2 with random weights and byte-level BPE: 256 bytes, an end of text, a few merges. What it writes is noise, and
/// often no UTF-8.
pub(crate) fn writer(positions: usize) -> TempDir {
    let directory = TempDir::new().unwrap();
    let write = |name: &str, value: &Value| std::fs::write(directory.path().join(name), value.to_string()).unwrap();
    write("tokenizer.json", &byte_level());
    write(
        "config.json",
        &json!({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
            "bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT, "layer_norm_epsilon": 1e-5, "n_embd": WIDTH, "n_head": 2,
            "n_inner": null, "n_layer": 2, "n_positions": positions, "vocab_size": VOCABULARY, "tie_word_embeddings": true,
        }),
    );
    write_weights(&directory.path().join("model.safetensors"), positions);
    directory
}

/// The id of `<|endoftext|>`.
pub(crate) const END_OF_TEXT: usize = 256;
const MERGES: [(&str, &str); 4] = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the")];
const VOCABULARY: usize = END_OF_TEXT + 1 + MERGES.len();
const WIDTH: usize = 16;

/// The id that stands for a byte.
pub(crate) fn byte(character: char) -> usize {
    character as usize
}

/// GPT-2 writes bytes as characters: those that can be read as they are, the others from 256 on.
fn byte_level() -> Value {
    let plain = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let symbol = |byte: u32| char::from_u32(if plain(&byte) { byte } else { others.next().unwrap() }).unwrap();
    let mut vocabulary: Vec<String> = (0..256).map(symbol).map(String::from).collect();
    vocabulary.push("<|endoftext|>".to_owned());
    vocabulary.extend(MERGES.iter().map(|(a, b)| format!("{a}{b}")));
    let vocabulary: Value = vocabulary.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": END_OF_TEXT, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "pre_tokenizer": level, "post_processor": level, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
                  "merges": MERGES.map(|(a, b)| json!([a, b]))},
    })
}

fn write_weights(path: &Path, positions: usize) {
    let h = WIDTH;
    let mut shapes =
        vec![("wte.weight".to_owned(), vec![VOCABULARY, h]), ("wpe.weight".to_owned(), vec![positions, h])];
    for layer in 0..2 {
        for (name, shape) in [
            ("ln_1.weight", vec![h]),
            ("ln_1.bias", vec![h]),
            ("attn.c_attn.weight", vec![h, 3 * h]),
            ("attn.c_attn.bias", vec![3 * h]),
            ("attn.c_proj.weight", vec![h, h]),
            ("attn.c_proj.bias", vec![h]),
            ("ln_2.weight", vec![h]),
            ("ln_2.bias", vec![h]),
            ("mlp.c_fc.weight", vec![h, 4 * h]),
            ("mlp.c_fc.bias", vec![4 * h]),
            ("mlp.c_proj.weight", vec![4 * h, h]),
            ("mlp.c_proj.bias", vec![h]),
        ] {
            shapes.push((format!("h.{layer}.{name}"), shape));
        }
    }
    shapes.extend([("ln_f.weight".to_owned(), vec![h]), ("ln_f.bias".to_owned(), vec![h])]);
    let (mut tensors, mut bytes, mut state) = (serde_json::Map::new(), Vec::new(), 0x9e37_79b9_7f4a_7c15_u64);
    for (name, shape) in shapes {
        let begin = bytes.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let noise = (state >> 40) as f32 / (1 << 24) as f32 - 0.5;
            let number = if name.contains("ln_") && name.ends_with("weight") { 1.0 + noise } else { noise };
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        let offsets = [begin, bytes.len()];
        let tensor = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        tensors.insert(format!("transformer.{name}"), tensor);
    }
    let header = Value::Object(tensors).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(path, file).unwrap();
}
