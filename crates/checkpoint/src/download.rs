//! A model's files from a hub into the cache, all at once or not at all.
//!
//! The files lie in `snapshots/REVISION` themselves and are not links into `blobs`, as they also do where
//! `huggingface_hub` cannot make links; it reads both. An interrupted download starts from scratch.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::http::Response;
use ureq::{Agent, Body, Proxy};

use crate::atomic::{Existing, Staging, write_atomic};
use crate::directory::parse_json;
use crate::hub::{is_complete, is_revision};
use crate::weights::{Format, INDEX_LIMIT, parse_index, shards};
use crate::{CheckpointError, DownloadProgress, Hub};

/// What a model may have besides config and weights.
const OPTIONAL: [&str; 16] = [
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spm.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
];

/// The largest config.json.
const CONFIG_LIMIT: u64 = 64 << 20;

/// Files on a hub lead to a storage server, seldom over more than two hops.
const REDIRECTS: usize = 8;

const CONNECT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(60);

/// Fetches the newest revision of a model into `repository`, its place in the cache.
pub(crate) fn fetch(name: &str, repository: &Path, hub: &Hub<'_>) -> Result<PathBuf, CheckpointError> {
    let mut fetcher = Fetcher::new(name, hub)?;
    let config_url = fetcher.url("config.json");
    let Some(config) = fetcher.get_small("config.json", CONFIG_LIMIT)? else {
        let problem = format!("{} has no model {name} with a config.json; check the name", hub.endpoint);
        return Err(CheckpointError::Download { url: config_url, problem });
    };
    // A portal's login page also comes with the status 200.
    parse_json::<serde_json::Value>(Path::new(&config_url), &config)?;

    let revision = fetcher.revision.clone().unwrap_or_else(|| "main".to_owned());
    let snapshot = repository.join("snapshots").join(&revision);
    let mut staging = Staging::new(&snapshot, Existing::Merge, |_| false)?;
    write_bytes(&mut staging, "config.json", &config)?;
    for file in OPTIONAL {
        fetcher.get_into(&mut staging, file)?;
    }
    fetch_weights(&mut fetcher, &mut staging)?;
    match staging.publish() {
        // Another process has fetched the same meanwhile.
        Err(CheckpointError::Exists { .. }) if is_complete(&snapshot)? => {}
        result => result?,
    }
    // Last: only now does the cache know of the model.
    let references = repository.join("refs");
    std::fs::create_dir_all(&references).map_err(CheckpointError::io("create", &references))?;
    write_atomic(&references.join("main"), revision.as_bytes())?;
    Ok(snapshot)
}

/// Fetches the weights of the first format that the hub has.
fn fetch_weights(fetcher: &mut Fetcher<'_>, staging: &mut Staging) -> Result<(), CheckpointError> {
    for format in Format::ALL {
        if fetcher.get_into(staging, format.single_file())? {
            return Ok(());
        }
        let url = fetcher.url(format.index_file());
        let Some(index) = fetcher.get_small(format.index_file(), INDEX_LIMIT)? else { continue };
        let weight_map = parse_index(Path::new(&url), &index)?;
        for shard in shards(&weight_map) {
            if !fetcher.get_into(staging, shard)? {
                return Err(CheckpointError::MissingShard { index: url.into(), shard: shard.to_owned() });
            }
        }
        return write_bytes(staging, format.index_file(), &index);
    }
    let problem = "the model has no weights as safetensors, nor as pytorch_model.bin; fetch its directory by other means \
                   and convert it (opening it prints how)";
    let url = fetcher.url(Format::Safetensors.single_file());
    Err(CheckpointError::Download { url, problem: problem.to_owned() })
}

fn write_bytes(staging: &mut Staging, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    staging.write(name, |out, io| out.write_all(bytes).map_err(io))
}

struct Fetcher<'a> {
    agent: Agent,
    hub: &'a Hub<'a>,
    /// What stands before the files' names.
    base: String,
    /// The commit that the files come from, once a response has told it.
    revision: Option<String>,
}

impl<'a> Fetcher<'a> {
    fn new(name: &str, hub: &'a Hub<'a>) -> Result<Self, CheckpointError> {
        let base = format!("{}/{name}/resolve/main/", hub.endpoint.trim_end_matches('/'));
        let proxy = hub.proxy.map(Proxy::new).transpose().map_err(|error| problem(&base, error))?;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed by hand: the first response names the commit, and the token is for the endpoint alone.
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Given by the caller: libraries do not read the environment.
            .proxy(proxy)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .accept_encoding("identity")
            .user_agent(concat!("henson/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self { agent: config.new_agent(), hub, base, revision: None })
    }

    fn url(&self, file: &str) -> String {
        format!("{}{file}", self.base)
    }

    /// A file's bytes, if the hub has it.
    fn get_small(&mut self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(response) = self.get(file)? else { return Ok(None) };
        let url = self.url(file);
        let mut bytes = Vec::new();
        let too_large = || problem(&url, format!("it has more than the {limit} bytes that such a file may have"));
        self.receive(file, response, &mut |piece| {
            if (bytes.len() + piece.len()) as u64 > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(Some(bytes))
    }

    /// Writes a file, and says whether the hub has it.
    fn get_into(&mut self, staging: &mut Staging, file: &str) -> Result<bool, CheckpointError> {
        let Some(response) = self.get(file)? else { return Ok(false) };
        staging.write(file, |out, io| {
            self.receive(file, response, &mut |piece| Write::write_all(out, piece).map_err(io))
        })?;
        Ok(true)
    }

    /// A response with a body, or `None` if the hub has no such file.
    fn get(&mut self, file: &str) -> Result<Option<Response<Body>>, CheckpointError> {
        let mut url = self.url(file);
        for _ in 0..=REDIRECTS {
            let mut request = self.agent.get(&url);
            if let Some(token) = self.hub.token.filter(|_| origin(&url) == origin(self.hub.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| problem(&url, error))?;
            self.note_revision(&url, &response)?;
            match response.status().as_u16() {
                200 => return Ok(Some(response)),
                404 => return Ok(None),
                301 | 302 | 303 | 307 | 308 => url = redirected(&url, header(&response, "location"))?,
                status @ (401 | 403) => {
                    return Err(problem(
                        &url,
                        format!(
                            "the server refuses it (status {status}): the name is wrong, or the model is private or needs \
                             its terms accepted and a token"
                        ),
                    ));
                }
                status => {
                    return Err(problem(&url, format!("the server answers with status {status}; try again later")));
                }
            }
        }
        Err(problem(&url, "it is redirected too often"))
    }

    /// All files must be of one commit: `main` may move on while they are fetched.
    fn note_revision(&mut self, url: &str, response: &Response<Body>) -> Result<(), CheckpointError> {
        let Some(revision) = header(response, "x-repo-commit").filter(|revision| is_revision(revision)) else {
            return Ok(());
        };
        match &self.revision {
            Some(known) if known != revision => {
                Err(problem(url, "the model has changed while it was being fetched; try again"))
            }
            _ => {
                self.revision = Some(revision.to_owned());
                Ok(())
            }
        }
    }

    fn receive(
        &self,
        file: &str,
        mut response: Response<Body>,
        each: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let url = self.url(file);
        let total = header(&response, "content-length").and_then(|length| length.parse::<u64>().ok());
        // In chunks, the end is marked; otherwise a file that broke off would look like a whole one.
        if total.is_none() && header(&response, "transfer-encoding").is_none() {
            return Err(problem(&url, "the server does not report its length"));
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 18];
        let mut received = 0;
        loop {
            let length = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) => {
                    return Err(problem(&url, format!("it broke off after {received} bytes ({error}); try again")));
                }
            };
            each(&buffer[..length])?;
            received += length as u64;
            if let Some(progress) = self.hub.progress {
                progress(&DownloadProgress { file, received, total });
            }
        }
        match total {
            Some(total) if total != received => {
                Err(problem(&url, format!("it broke off: {received} of {total} bytes arrived; try again")))
            }
            _ => Ok(()),
        }
    }
}

fn header<'r>(response: &'r Response<Body>, name: &str) -> Option<&'r str> {
    response.headers().get(name)?.to_str().ok()
}

/// Where a redirect leads.
fn redirected(from: &str, location: Option<&str>) -> Result<String, CheckpointError> {
    let to = match location {
        Some(location) if location.contains("://") => location.to_owned(),
        Some(location) if location.starts_with('/') && !location.starts_with("//") => {
            origin(from).to_owned() + location
        }
        _ => return Err(problem(from, format!("it is redirected to {location:?}, which is not a valid address"))),
    };
    if from.starts_with("https://") && !to.starts_with("https://") {
        return Err(problem(from, format!("it is redirected to {}, which is not encrypted", origin(&to))));
    }
    Ok(to)
}

/// An address up to its path.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |i| i + 3);
    let end = url[host..].find(['/', '?', '#']).map_or(url.len(), |i| host + i);
    &url[..end]
}

fn problem(url: &str, problem: impl ToString) -> CheckpointError {
    // Storage servers are addressed with a signature behind the question mark: nothing for a log.
    let url = url.split_once('?').map_or(url, |(address, _)| address);
    CheckpointError::Download { url: url.to_owned(), problem: problem.to_string() }
}
