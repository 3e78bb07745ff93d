//! A real server on a loopback port with small models, and a client that can also misbehave.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use henson_serve::{Handle, ServeError, Server, Settings, Source};
use henson_tensor::{DType, Device};
use serde_json::Value;
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
        let running = Self::start_at_once(models, settings);
        let start = Instant::now();
        while running.get("/health").status != 200 {
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
