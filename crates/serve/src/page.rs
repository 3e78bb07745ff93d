//! The page at `/`: files that are part of the binary, under a policy that lets them load nothing from elsewhere.
//!
//! To add a file: put it into `page/` and name it in [`FILES`].

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::App;

/// Path, content type, contents.
const FILES: [(&str, &str, &str); 2] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
];

/// Only what this server itself sends is run, shown or called; nothing is framed, nothing inline.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn router() -> Router<App> {
    FILES.into_iter().fold(Router::new(), |router, (path, content_type, contents)| {
        router.route(path, get(move || async move { file(content_type, contents) }))
    })
}

/// A file with the headers that browsers need to trust it no further than necessary.
pub(crate) fn file(content_type: &'static str, contents: impl IntoResponse) -> Response {
    let mut response = contents.into_response();
    let headers: [(HeaderName, &'static str); 5] = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
