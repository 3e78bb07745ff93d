//! From what the user calls a model to its directory. Only here is the environment asked where the cache is.

use std::env;
use std::path::PathBuf;

use henson_checkpoint::{DownloadProgress, Hub, resolve_model};

use crate::output::Progress;

/// The directory of a model that is named by a path or as org/name.
pub(crate) fn resolve(model: &str, download: bool) -> anyhow::Result<PathBuf> {
    let cache = cache();
    let endpoint = env::var("HF_ENDPOINT").ok();
    let token = env::var("HF_TOKEN").ok();
    let proxy = env::var("HTTPS_PROXY").or_else(|_| env::var("https_proxy")).ok();
    let progress = std::cell::RefCell::new(Progress::new("MB", None));
    let show = |p: &DownloadProgress<'_>| progress.borrow_mut().at(p.received, (p.received >> 20) as usize);
    let mut hub = Hub::new(&cache);
    if let Some(endpoint) = &endpoint {
        hub.endpoint = endpoint;
    }
    (hub.download, hub.token, hub.proxy) = (download, token.as_deref(), proxy.as_deref());
    hub.progress = Some(&show);
    let path = resolve_model(model, &hub)?;
    progress.borrow().finish();
    Ok(path)
}

/// Where Hugging Face's programs keep downloads, by their own rules.
fn cache() -> PathBuf {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(cache) = set("HF_HUB_CACHE") {
        return cache;
    }
    if let Some(home) = set("HF_HOME") {
        return home.join("hub");
    }
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    base.unwrap_or_else(|| PathBuf::from(".cache")).join("huggingface/hub")
}
