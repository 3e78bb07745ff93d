//! The server as a function from requests to answers: all routes with what stands around them (keys, limits, logs, counts).
//! It knows no sockets; `server` has them.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, MatchedPath, RawPathParams, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use tower_http::cors::{AllowOrigin, CorsLayer};

use crate::body::{DRAINING, Incoming, Unsent, counted};
use crate::error::{ApiError, Kind, ServeError};
use crate::hosts::Hosts;
use crate::metrics::Metrics;
use crate::models::{Loaded, Registry, needed};
use crate::refusals::{INTERVAL, Refusals};
use crate::settings::Settings;
use crate::wire;
use crate::{openapi, page, routes};

/// What all requests share.
#[derive(Clone)]
pub(crate) struct App(Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) models: Registry,
    pub(crate) metrics: Metrics,
    /// Of the API key: digests have one length, so comparing them tells nothing about the key's.
    key: Option<[u8; 32]>,
    /// The names that it answers to, where that is asked.
    hosts: Option<Hosts>,
    stopping: AtomicBool,
    /// Bytes of answers that may still wait for their clients.
    answers: Arc<Semaphore>,
    refusals: Refusals,
}

impl std::ops::Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl App {
    /// For a server that will listen on this address.
    pub(crate) fn new(address: IpAddr, settings: Settings, models: Registry) -> Result<Self, ServeError> {
        let key = match settings.api_key.as_deref().map(str::trim) {
            Some("") => return Err(ServeError::EmptyKey),
            key => key.map(|key| Sha256::digest(key).into()),
        };
        let hosts = Hosts::new(address, &settings.allowed_hosts)?;
        Ok(Self(Arc::new(Shared {
            models,
            metrics: Metrics::new(),
            key,
            hosts,
            stopping: AtomicBool::new(false),
            answers: Arc::new(Semaphore::new(settings.answer_bytes.min(Semaphore::MAX_PERMITS))),
            refusals: Refusals::default(),
            settings,
        })))
    }

    /// From now on, new requests are turned away.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Everything that the server answers to.
    pub(crate) fn router(&self) -> Result<Router, ServeError> {
        let mut router = Router::new();
        for route in routes::ROUTES {
            router = router.route(route.path, (route.handler)());
            if route.of_model {
                router = router.route(&format!("/models/{{model}}{}", route.path), (route.handler)());
            }
        }
        let protected = router.layer(middleware::from_fn_with_state(self.clone(), guard));
        let open = Router::new()
            .route("/health", axum::routing::get(routes::health))
            .route("/openapi.json", axum::routing::get(openapi::document))
            .route("/docs", axum::routing::get(openapi::docs))
            .merge(page::router());
        let router = protected
            .merge(open)
            .fallback(not_found)
            .method_not_allowed_fallback(wrong_method)
            .layer(middleware::from_fn_with_state(self.clone(), check_host))
            .layer(middleware::from_fn_with_state(self.clone(), observe))
            .with_state(self.clone());
        Ok(match cors(&self.settings.cors)? {
            Some(cors) => router.layer(cors),
            None => router,
        })
    }
}

/// A request for a model: its body is read, parsed, and a model found that can do what it asks for.
pub(crate) struct Call<T> {
    pub(crate) app: App,
    pub(crate) model: Arc<Loaded>,
    pub(crate) body: T,
}

impl<T: wire::Request> FromRequest<App> for Call<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        let media_type = content_type.split(';').next().unwrap_or("").trim();
        // Browsers send anything else to any address without asking; JSON they ask for.
        if !media_type.eq_ignore_ascii_case("application/json") {
            let message = "the body must be JSON, sent with the header Content-Type: application/json";
            return Err(ApiError::new(Kind::MediaType, message));
        }
        let most = app.settings.most_bytes;
        let too_large = || ApiError::new(Kind::TooLarge, format!("the body has more than {most} bytes"));
        let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: usize| length > most) {
            return Err(too_large());
        }
        let bytes = match tokio::time::timeout(app.settings.body_timeout, to_bytes(body, most)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => {
                let limit =
                    std::error::Error::source(&error).is_some_and(|source| source.to_string().contains("limit"));
                let broken = || ApiError::new(Kind::Syntax, "the body ended early");
                return Err(if limit { too_large() } else { broken() });
            }
            Err(_) => return Err(ApiError::new(Kind::Timeout, "the body did not arrive in time")),
        };
        let body: T = serde_json::from_slice(&bytes).map_err(|error| {
            let syntax = error.is_syntax() || error.is_eof();
            ApiError::new(if syntax { Kind::Syntax } else { Kind::Validation }, error.to_string())
        })?;
        let params = RawPathParams::from_request_parts(&mut parts, app).await.ok();
        let in_path = params.as_ref().and_then(|params| params.iter().find(|(name, _)| *name == "model"));
        let name = match (in_path.map(|(_, name)| name), body.model()) {
            (Some(path), Some(body)) if path != body => {
                let message = format!("the address names the model {path:?}, the body {body:?}");
                return Err(ApiError::new(Kind::Validation, message));
            }
            (path, body) => path.or(body),
        };
        let other_names = T::OTHERS_SEND_IT && !app.settings.strict_model_names;
        let model = match name {
            None => app.models.first(T::ABILITY)?,
            Some(name) => match app.models.get(name) {
                Ok(model) => model,
                Err(error) if in_path.is_none() && error.is_unknown_model() && other_names => {
                    let model = app.models.stand_in(T::ABILITY, error)?;
                    if let Some(warning) = parts.extensions.get::<Warning>() {
                        warning.set(&model.name);
                    }
                    model
                }
                Err(error) => return Err(error),
            },
        };
        if !model.can(T::ABILITY) {
            let (is, needed) = (model.kind(), needed(T::ABILITY));
            let message = format!("the model {:?} is a {is}, this needs {needed}", model.name);
            return Err(ApiError::new(Kind::Backend, message));
        }
        Ok(Self { app: app.clone(), model, body })
    }
}

/// What an answer says where another model answered than the one that was named.
#[derive(Clone, Default)]
struct Warning(Arc<OnceLock<HeaderValue>>);

impl Warning {
    fn set(&self, model: &str) {
        let text = format!("no model of the name in the request is served; answered by {}", model.escape_default());
        // Escaped, it is plain ASCII.
        if let Ok(value) = HeaderValue::from_str(&text) {
            let _ = self.0.set(value);
        }
    }
}

use axum::extract::FromRequestParts as _;

/// An answer as JSON, with how many tokens were computed for it and how many were cut off.
pub(crate) struct Answer<T> {
    pub(crate) body: T,
    pub(crate) tokens: usize,
    pub(crate) dropped: usize,
}

impl<T> Answer<T> {
    /// The same with another body.
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Answer<U> {
        Answer { body: change(self.body), tokens: self.tokens, dropped: self.dropped }
    }
}

const COMPUTE_TOKENS: HeaderName = HeaderName::from_static("x-compute-tokens");
const TRUNCATED_TOKENS: HeaderName = HeaderName::from_static("x-truncated-tokens");
const MODEL_WARNING: HeaderName = HeaderName::from_static("x-model-warning");

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        let bytes = match serde_json::to_vec(&self.body) {
            Ok(bytes) => bytes,
            Err(error) => return ApiError::new(Kind::Backend, error.to_string()).into_response(),
        };
        let mut response = bytes.into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(COMPUTE_TOKENS, HeaderValue::from(self.tokens));
        if self.dropped > 0 {
            headers.insert(TRUNCATED_TOKENS, HeaderValue::from(self.dropped));
        }
        response
    }
}

/// Turns away what means another host; see `hosts`.
async fn check_host(State(app): State<App>, request: Request, next: Next) -> Response {
    if app.hosts.as_ref().is_none_or(|hosts| hosts.are_meant_by(&request)) {
        return next.run(request).await;
    }
    let message = "the host of this request is not one of this server: allow it with --allow-host NAME";
    in_the_form_of(&request, ApiError::new(Kind::Misdirected, message))
}

/// Keys, and the door when the server is about to stop.
async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    if let Some(key) = &app.key {
        let shown = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or("");
        let shown = shown.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let digest: [u8; 32] = Sha256::digest(shown.map_or("", |(_, key)| key.trim())).into();
        if !bool::from(digest.ct_eq(key)) {
            let message = "this needs the header Authorization: Bearer KEY, with the key of this server";
            return in_the_form_of(&request, ApiError::new(Kind::Unauthorized, message));
        }
    }
    if app.is_stopping() {
        return in_the_form_of(&request, ApiError::later(Kind::Unhealthy, "the server is shutting down", 5));
    }
    let openai = is_openai(&request);
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) if openai => error.into_openai_response(),
        _ => response,
    }
}

fn is_openai(request: &Request) -> bool {
    let path = request.uri().path();
    path.starts_with("/v1/") || (path.starts_with("/models/") && path.contains("/v1/"))
}

fn in_the_form_of(request: &Request, error: ApiError) -> Response {
    if is_openai(request) { error.into_openai_response() } else { error.into_response() }
}

/// Logs and counts. Of what the client typed, nothing is kept: routes are patterns.
async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let response = carried(&app, request, next).await;
    let (status, elapsed) = (response.status(), start.elapsed());
    app.metrics.request(&route, status.as_u16(), elapsed);
    let milliseconds = elapsed.as_secs_f64() * 1e3;
    let tokens = response.headers().get(COMPUTE_TOKENS).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match status {
        StatusCode::OK => tracing::debug!(%method, route, status = 200, milliseconds, tokens, "request"),
        status => {
            if app.refusals.count(Instant::now()) || tracing::enabled!(tracing::Level::DEBUG) {
                tracing::info!(%method, route, status = status.as_u16(), milliseconds, "request");
            }
        }
    }
    if let Some(requests) = app.refusals.settle(Instant::now()) {
        tracing::info!(requests, seconds = INTERVAL.as_secs(), "more requests failed, not logged one by one");
    }
    response
}

/// A request and its answer as a load on the connection: what of the body nobody read is taken off the wire first, so that
/// the client sees the answer, and the answer counts until the client has read it.
async fn carried(app: &App, request: Request, next: Next) -> Response {
    let (openai, waits) = (is_openai(&request), request.headers().contains_key(header::EXPECT));
    let warning = Warning::default();
    let (mut parts, body) = request.into_parts();
    let mut body = Incoming::new(body);
    parts.extensions.insert(warning.clone());
    let mut response = next.run(Request::from_parts(parts, Body::new(body.clone()))).await;
    if let Some(warning) = warning.0.get() {
        response.headers_mut().insert(MODEL_WARNING, warning.clone());
    }
    if body.is_left() {
        let slow = response.status() == StatusCode::REQUEST_TIMEOUT;
        if !slow && (body.is_begun() || !waits) {
            body.drain(DRAINING).await;
        }
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let most = app.settings.answer_bytes;
    let error = match counted(response, &app.answers, most).await {
        Ok(response) => return response,
        Err(Unsent::TooLarge(bytes)) => {
            let message = format!("the answer has {bytes} bytes, this server sends at most {most}: divide the request");
            ApiError::new(Kind::TooLarge, message)
        }
        Err(Unsent::Later) => {
            let message = "too many answers wait for their clients to read them; try again later";
            ApiError::later(Kind::Overloaded, message, 1)
        }
    };
    if openai { error.into_openai_response() } else { error.into_response() }
}

async fn not_found(request: Request) -> Response {
    let error = ApiError::new(Kind::NotFound, "no such route; GET /docs lists all routes");
    in_the_form_of(&request, error)
}

async fn wrong_method(request: Request) -> Response {
    let error = ApiError::new(Kind::Method, "this route has a different method; GET /docs lists all routes");
    in_the_form_of(&request, error)
}

fn cors(origins: &[String]) -> Result<Option<CorsLayer>, ServeError> {
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let parse = |origin: &String| {
            let known = origin.starts_with("http://") || origin.starts_with("https://");
            let value = HeaderValue::from_str(origin.trim_end_matches('/')).ok().filter(|_| known);
            value.ok_or_else(|| ServeError::Origin(origin.clone()))
        };
        AllowOrigin::list(origins.iter().map(parse).collect::<Result<Vec<_>, _>>()?)
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers([header::CONTENT_TYPE, header::AUTHORIZATION]);
    Ok(Some(layer))
}
