//! `henson serve`.

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use henson_serve::{Handle, Prompt, Server, Settings, Source};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::built_in::BuiltIn;
use crate::flags::DeviceName;
use crate::flags::serve::Serve;
use crate::{models, output};

/// What `--json` prints.
#[derive(Serialize)]
struct Line {
    address: String,
}

pub(crate) fn run(flags: &Serve) -> anyhow::Result<()> {
    if let Some(runs) = &flags.runs {
        anyhow::ensure!(runs.is_dir(), "--runs {}: there is no such directory", runs.display());
    }
    let host = host(&flags.host)?;
    let device = flags.compute.device()?;
    let sources: Vec<Source> = if flags.models.is_empty() {
        built_in(flags.runs.is_some())?
    } else {
        flags.models.iter().map(|model| source(model, flags.download)).collect::<anyhow::Result<_>>()?
    };
    // A GPU takes many more tokens at once, and leaves the processor to those who prepare them.
    let (batch_tokens, http_threads) = match flags.compute.machine.device {
        DeviceName::Cpu => (2048, 2),
        DeviceName::Cuda(_) => (16384, std::thread::available_parallelism().map_or(2, |cores| cores.get().min(8))),
    };
    let mut settings = Settings {
        batch_tokens: flags.batch_tokens.unwrap_or(batch_tokens),
        queue_tokens: flags.queue_tokens,
        queue_requests: flags.queue_requests,
        streams: flags.streams,
        cache_bytes: flags.cache_memory.saturating_mul(1 << 20),
        most_texts: flags.max_texts,
        most_bytes: flags.max_bytes,
        most_connections: flags.max_connections,
        truncate: !flags.no_truncate,
        request_timeout: Duration::from_secs(flags.timeout as u64),
        // An empty variable counts as not set.
        api_key: flags.api_key.clone().filter(|key| !key.is_empty()),
        cors: flags.cors.clone(),
        allowed_hosts: flags.allow_hosts.clone(),
        runs: flags.runs.clone(),
        strict_model_names: flags.strict_model_names,
        prompts: prompts(flags, &sources),
        http_threads: flags.http_threads.unwrap_or(http_threads),
        ..Settings::default()
    };
    // Who gives this machine a name of its own calls it by that name.
    if host.is_loopback() && flags.host.parse::<IpAddr>().is_err() {
        settings.allowed_hosts.push(flags.host.clone());
    }
    if !host.is_loopback() && settings.api_key.is_none() {
        output::warn("other machines can reach this server, and it asks for no key: --api-key sets one");
    }
    let address = SocketAddr::new(host, flags.port);
    let server = Server::bind(address, sources, device, flags.compute.dtype(), settings)?;
    log(flags);
    listen_to_signals(server.handle())?;
    let address = format!("http://{}", server.address());
    let as_json = flags.json;
    server.run(move || {
        if !as_json {
            output::message(&format!("serving on {address}; ctrl-C stops it"));
        } else if let Err(error) = output::json(&Line { address }) {
            output::warn(&format!("cannot print the address: {error:#}"));
        }
    })?;
    Ok(())
}

/// The address that a name means.
fn host(name: &str) -> anyhow::Result<IpAddr> {
    if name.eq_ignore_ascii_case("localhost") {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    if let Ok(address) = name.parse() {
        return Ok(address);
    }
    let found =
        (name, 0).to_socket_addrs().with_context(|| format!("--host {name}: not a valid address or host name"))?;
    let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    let first = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first());
    first.copied().with_context(|| format!("--host {name}: the name has no address"))
}

/// The models that come with henson. The one for vectors is first: it answers wherever both could.
fn built_in(may_be_none: bool) -> anyhow::Result<Vec<Source>> {
    let general = match BuiltIn::General.directory() {
        Err(error) if may_be_none => {
            output::warn(&format!("only training runs are shown: {error:#}"));
            return Ok(Vec::new());
        }
        found => found?,
    };
    let source = |model: BuiltIn, path| Source { name: model.name().to_owned(), path };
    let sentences = BuiltIn::Sentences.directory().inspect_err(models::warn_of_stand_in).ok();
    let sentences = sentences.map(|path| source(BuiltIn::Sentences, path));
    Ok(sentences.into_iter().chain([source(BuiltIn::General, general)]).collect())
}

/// What requests may name as `prompt_name` beside what the models' files have.
fn prompts(flags: &Serve, sources: &[Source]) -> Vec<Prompt> {
    let of = |names: &'static [&'static str], given: &str| {
        // A prefix may have a = in it.
        let named = given.split_once('=').filter(|(name, _)| sources.iter().any(|source| source.name == *name));
        let (model, text) = named.map_or((None, given), |(name, text)| (Some(name.to_owned()), text));
        names
            .iter()
            .map(|name| Prompt { model: model.clone(), name: (*name).to_owned(), text: text.to_owned() })
            .collect::<Vec<_>>()
    };
    let queries = flags.query_prefixes.iter().flat_map(|given| of(&["query"], given));
    let passages = flags.passage_prefixes.iter().flat_map(|given| of(&["passage", "document"], given));
    queries.chain(passages).collect()
}

/// `DIR`, `org/name`, or either with a name before it.
fn source(text: &str, download: bool) -> anyhow::Result<Source> {
    // A directory may have a = in its own name.
    let named = if Path::new(text).exists() { None } else { text.split_once('=') };
    let path = models::resolve(named.map_or(text, |(_, model)| model), download)?;
    Ok(match named {
        Some((name, _)) => Source { name: name.to_owned(), path },
        // The cache's own directories are called by a hash.
        None if !Path::new(text).exists() => {
            let name = text.rsplit('/').next().unwrap_or(text).to_owned();
            Source { name, path }
        }
        None => Source::of_path(&path),
    })
}

/// Logs go to standard error. Only what our own crates say is shown.
fn log(flags: &Serve) {
    let level = if flags.log_requests { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let filter = Targets::new().with_target("henson", level).with_target("henson_serve", level);
    let registry = tracing_subscriber::registry().with(filter);
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    // A log that cannot be written would otherwise be reported where it cannot be written either, with a panic.
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let layer = layer.with_target(false).with_ansi(colours);
    // Only this command logs, so nobody else can have begun to.
    let _ = if flags.json { registry.with(layer.json()).try_init() } else { registry.with(layer).try_init() };
}

/// INT and TERM stop the server when all is answered, a second one at once; HUP loads changed models.
fn listen_to_signals(handle: Handle) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let listening = std::thread::Builder::new().name("henson-signals".to_owned()).spawn(move || {
        let mut stopping = false;
        for signal in signals.forever() {
            match signal {
                SIGHUP => {
                    let (loaded, errors) = handle.reload();
                    tracing::info!(loaded, "looked for changed models");
                    for error in errors {
                        let error = format!("{:#}", anyhow::Error::from(error));
                        tracing::error!(error, "the old model is still served");
                    }
                }
                _ if stopping => std::process::exit(130),
                _ => {
                    stopping = true;
                    handle.stop();
                }
            }
        }
    });
    listening.context("cannot start a thread that listens to signals")?;
    Ok(())
}
