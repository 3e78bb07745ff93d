//! Sockets around the app: listening, connections with their timeouts, an end that finishes what was accepted.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use henson_tensor::{DType, Device};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use crate::app::App;
use crate::error::ServeError;
use crate::models::{Registry, Source};
use crate::pace::Paced;
use crate::settings::Settings;

/// The most bytes of a request's head.
const HEAD_BYTES: usize = 64 << 10;

/// Connections beyond the limit that are told so at a time; still more are closed without a word.
const TURNED_AWAY: usize = 64;

/// A server that listens, but does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: App,
    router: Router,
    stop: watch::Sender<bool>,
}

/// Starts so many threads at once and ends them: the runtime panics where the system refuses it one.
fn check_threads(count: usize) -> std::io::Result<()> {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let held = Arc::new(std::sync::Mutex::new(held));
    let start = |_| {
        let held = Arc::clone(&held);
        // They wait until the other end is dropped, so that all are there at once.
        std::thread::Builder::new().spawn(move || drop(held.lock().map(|held| held.recv())))
    };
    let started: Vec<_> = (0..count).map(start).collect();
    drop(hold);
    started.into_iter().try_for_each(|thread| thread.map(|thread| drop(thread.join())))
}

/// What can be told to a running server, from any thread.
#[derive(Clone)]
pub struct Handle {
    app: App,
    stop: watch::Sender<bool>,
}

impl Server {
    /// Takes the address. Port 0 is any free one.
    pub fn bind(
        address: SocketAddr,
        models: Vec<Source>,
        device: Device,
        dtype: DType,
        settings: Settings,
    ) -> Result<Self, ServeError> {
        let app = App::new(address.ip(), settings.clone(), Registry::new(models, device, dtype, settings)?)?;
        // What is wrong with the settings shows before anything is taken.
        let router = app.router()?;
        let listen = |source| ServeError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        Ok(Self { listener, address, app, router, stop: watch::Sender::new(false) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A way to reach it while it runs.
    pub fn handle(&self) -> Handle {
        Handle { app: self.app.clone(), stop: self.stop.clone() }
    }

    /// Loads the models while it answers already (with 503), then serves until it is told to stop, and returns when all that
    /// was accepted is answered. A model that cannot be loaded at the start is an error; when all are, `ready` is called.
    pub fn run(self, ready: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        let threads = self.app.settings.http_threads.max(1);
        check_threads(2 * threads + 1)
            .map_err(|source| ServeError::System { action: "start the threads for HTTP", source })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(threads + 1)
            .thread_name("henson-http")
            .enable_all()
            .build()
            .map_err(|source| ServeError::System { action: "start the threads for HTTP", source })?;
        let (failed, failure) = oneshot::channel();
        let app = self.app.clone();
        std::thread::Builder::new()
            .name("henson-load".to_owned())
            .spawn(move || {
                let (_, errors) = app.models.load(&app.metrics);
                match errors.into_iter().next() {
                    Some(error) => drop(failed.send(error)),
                    None => {
                        ready();
                        tracing::info!(models = app.models.names().count(), "ready");
                    }
                }
            })
            .map_err(|source| ServeError::System { action: "start a thread that loads the models", source })?;
        runtime.block_on(self.serve(failure))
    }

    async fn serve(self, failure: oneshot::Receiver<ServeError>) -> Result<(), ServeError> {
        let system = |source| ServeError::System { action: "listen", source };
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(system)?;
        let settings = self.app.settings.clone();
        let permits = Arc::new(Semaphore::new(settings.most_connections));
        let turned_away = Arc::new(Semaphore::new(TURNED_AWAY));
        let graceful = GracefulShutdown::new();
        let mut stopped = self.stop.subscribe();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(settings.header_timeout).max_buf_size(HEAD_BYTES);
        let connections = async {
            loop {
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    // Too many open files, most likely; some will be closed.
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                };
                let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                    if let Ok(permit) = Arc::clone(&turned_away).try_acquire_owned() {
                        tokio::spawn(turn_away(stream, permit));
                    }
                    continue;
                };
                // Answers are written at once; waiting for more to send would only delay them.
                let _ = stream.set_nodelay(true);
                let stream = Paced::new(stream, settings.body_timeout);
                let service = TowerToHyperService::new(self.router.clone());
                let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
                let open = self.app.metrics.connections.clone();
                open.inc();
                tokio::spawn(async move {
                    // Clients that break off, stall or speak nonsense are no news.
                    let _ = connection.await;
                    open.dec();
                    drop(permit);
                });
            }
        };
        let outcome = tokio::select! {
            () = connections => Ok(()),
            _ = stopped.wait_for(|stop| *stop) => Ok(()),
            Ok(error) = failure => Err(error),
        };
        drop(listener);
        self.app.stop();
        if tokio::time::timeout(settings.drain_timeout, graceful.shutdown()).await.is_err() {
            tracing::warn!("stopped before all requests were answered");
        }
        outcome
    }
}

/// Says that there are too many connections, and waits a moment for the client to read it: closing with unread bytes would
/// take the answer along.
async fn turn_away(mut stream: TcpStream, _permit: OwnedSemaphorePermit) {
    const BODY: &str = r#"{"error":"too many connections; try again later","error_type":"overloaded"}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    let talk = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        let mut rest = [0; 4096];
        while stream.read(&mut rest).await? > 0 {}
        std::io::Result::Ok(())
    };
    // Whether the client took it or not, the connection is closed now.
    let _ = tokio::time::timeout(Duration::from_secs(1), talk).await;
}

impl Handle {
    /// No new requests; those that were accepted are answered.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Loads the models whose files have changed. Requests on the way keep the model that they began with; one that cannot be
    /// loaded stays as it was. Says how many were loaded, and what went wrong.
    pub fn reload(&self) -> (usize, Vec<ServeError>) {
        let (loaded, errors) = self.app.models.load(&self.app.metrics);
        self.app.metrics.reloads.inc_by(loaded as u64);
        self.app.metrics.failed_reloads.inc_by(errors.len() as u64);
        (loaded, errors)
    }
}
