//! What can go wrong: for the one who starts a server, and for those who call it.

use std::net::SocketAddr;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use henson_infer::InferError;
use henson_text::TextError;
use serde_json::{Value, json};

/// The server could not start, or a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is taken, or not ours.
    #[error("cannot listen on {address}: {source}; choose another --port, or see what uses this one")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system refused something that a server needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A model's directory.
    #[error("cannot load the model {name:?}")]
    Model {
        /// Its name.
        name: String,
        /// Why not.
        source: InferError,
    },
    /// Files that changed while they were read.
    #[error("cannot load the model {name:?}: files in {} changed while they were read; load it again when they are complete", path.display())]
    Changed {
        /// The model's name.
        name: String,
        /// Its directory.
        path: std::path::PathBuf,
    },
    /// Two models with one name.
    #[error("two models are called {0:?}: give one another name, as in --model other={0}")]
    SameName(String),
    /// A name that cannot stand in an address.
    #[error("{0:?} cannot be a model's name: use letters, digits, `.`, `-` and `_`, as in --model NAME=DIR")]
    Name(String),
    /// A server without models.
    #[error("there is no model to serve: name a directory with --model DIR")]
    NoModels,
    /// An origin that is none.
    #[error("{0:?} is not a valid origin: expected * or something like https://example.org")]
    Origin(String),
    /// A host that is more than a name.
    #[error("{0:?} is not a valid host name: expected a name or an address alone, such as models.example.org")]
    Host(String),
    /// A key that cannot be sent.
    #[error("the API key is empty: leave it out to serve without one")]
    EmptyKey,
}

/// Why a request failed. Those that Text Embeddings Inference knows have its names and statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing to work on.
    Empty,
    /// Not JSON at all.
    Syntax,
    /// No key, or the wrong one.
    Unauthorized,
    /// No such route or run.
    NotFound,
    /// No such model.
    NoModel,
    /// The route has other methods.
    Method,
    /// Meant for another host.
    Misdirected,
    /// The client was too slow.
    Timeout,
    /// A body or a list beyond the limits.
    TooLarge,
    /// Not sent as JSON.
    MediaType,
    /// JSON, but not what belongs there.
    Validation,
    /// A text that the tokenizer cannot take.
    Tokenizer,
    /// The model cannot do this, or failed.
    Backend,
    /// Too much waits already.
    Overloaded,
    /// Loading, stopping, or far too slow.
    Unhealthy,
}

impl Kind {
    fn status(self) -> StatusCode {
        match self {
            Kind::Empty | Kind::Syntax => StatusCode::BAD_REQUEST,
            Kind::Unauthorized => StatusCode::UNAUTHORIZED,
            Kind::NotFound | Kind::NoModel => StatusCode::NOT_FOUND,
            Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
            Kind::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Kind::Timeout => StatusCode::REQUEST_TIMEOUT,
            Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::Validation | Kind::Tokenizer => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::Backend => StatusCode::FAILED_DEPENDENCY,
            Kind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            Kind::Unhealthy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Empty => "empty",
            Kind::Unauthorized => "unauthorized",
            Kind::NotFound | Kind::NoModel => "not_found",
            Kind::Method => "method_not_allowed",
            Kind::Misdirected => "misdirected",
            Kind::Timeout => "timeout",
            Kind::Syntax | Kind::TooLarge | Kind::MediaType | Kind::Validation => "validation",
            Kind::Tokenizer => "tokenizer",
            Kind::Backend => "backend",
            Kind::Overloaded => "overloaded",
            Kind::Unhealthy => "unhealthy",
        }
    }
}

/// What a client is told instead of an answer.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    kind: Kind,
    message: String,
    /// Seconds after which it may go better.
    retry_after: Option<u64>,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl ApiError {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), retry_after: None }
    }

    pub(crate) fn later(kind: Kind, message: impl Into<String>, seconds: u64) -> Self {
        Self { kind, message: message.into(), retry_after: Some(seconds) }
    }

    /// Whether it says that no model has the name that was asked for.
    pub(crate) fn is_unknown_model(&self) -> bool {
        self.kind == Kind::NoModel
    }

    /// As OpenAI's clients expect it.
    pub(crate) fn into_openai_response(self) -> Response {
        let body = self.openai_body();
        self.respond(&body)
    }

    /// OpenAI's form.
    pub(crate) fn openai_body(&self) -> Value {
        let status = self.kind.status();
        let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
        let code = if self.kind == Kind::NoModel { "model_not_found" } else { self.kind.name() };
        json!({"error": {"message": self.message, "type": kind, "param": null, "code": code}})
    }

    /// The form of Text Embeddings Inference and Text Generation Inference.
    pub(crate) fn body(&self) -> Value {
        json!({"error": self.message, "error_type": self.kind.name()})
    }

    fn respond(self, body: &Value) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.kind.status(), [(header::CONTENT_TYPE, json)], body.to_string()).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == Kind::Unauthorized {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The routes under /v1 say the same in another form.
        response.extensions_mut().insert(self);
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body();
        self.respond(&body)
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let kind = if matches!(error, TextError::UnknownId { .. }) { Kind::Validation } else { Kind::Tokenizer };
        Self::new(kind, error.to_string())
    }
}

impl From<InferError> for ApiError {
    fn from(error: InferError) -> Self {
        match error {
            InferError::Text(error) => error.into(),
            InferError::NoMask { .. } | InferError::Layers(_) | InferError::ZeroShot(_) => {
                Self::new(Kind::Validation, error.to_string())
            }
            InferError::LongPrompt { .. } | InferError::Setting { .. } | InferError::Input(_) => {
                Self::new(Kind::Validation, error.to_string())
            }
            InferError::EmptyPrompt { .. } => Self::new(Kind::Empty, error.to_string()),
            InferError::NoRoom { .. } => Self::new(Kind::TooLarge, error.to_string()),
            error => Self::new(Kind::Backend, error.to_string()),
        }
    }
}
