//! The page at `/`: files that are part of the binary, under a policy that lets them load nothing from elsewhere.
//!
//! Plain HTML, CSS and JavaScript modules, sent as they stand in `page/`: there is no build step. To add a file, put it there
//! and name it in [`FILES`]. `tools/page` tries the page in a real browser.

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::App;

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

macro_rules! page_file {
    ($name:literal, $content_type:expr) => {
        (concat!("/page/", $name), $content_type, include_str!(concat!("page/", $name)))
    };
}

/// Path, content type, contents.
const FILES: [(&str, &str, &str); 21] = [
    ("/", HTML, include_str!("page/index.html")),
    page_file!("page.css", STYLE),
    page_file!("icon.svg", PICTURE),
    page_file!("theme.js", SCRIPT),
    page_file!("page.js", SCRIPT),
    page_file!("api.js", SCRIPT),
    page_file!("bars.js", SCRIPT),
    page_file!("chart.js", SCRIPT),
    page_file!("dom.js", SCRIPT),
    page_file!("workbench.js", SCRIPT),
    page_file!("panels/answer.js", SCRIPT),
    page_file!("panels/attention.js", SCRIPT),
    page_file!("panels/fill.js", SCRIPT),
    page_file!("panels/inside.js", SCRIPT),
    page_file!("panels/neighbours.js", SCRIPT),
    page_file!("panels/runs.js", SCRIPT),
    page_file!("panels/scores.js", SCRIPT),
    page_file!("panels/similarity.js", SCRIPT),
    page_file!("panels/tag.js", SCRIPT),
    page_file!("panels/tokens.js", SCRIPT),
    page_file!("panels/write.js", SCRIPT),
];

/// Only what this server itself sends is run, shown or called; nothing is framed, nothing inline.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The texts between two others.
    fn between<'t>(text: &'t str, before: &'t str, after: &'t str) -> impl Iterator<Item = &'t str> {
        text.split(before).skip(1).filter_map(move |rest| rest.split(after).next())
    }

    #[test]
    fn every_file_is_served_and_needed() {
        let mut there = BTreeSet::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/page");
        for directory in ["", "panels/"] {
            for entry in std::fs::read_dir(root.join(directory)).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_file() {
                    there.insert(format!("/page/{directory}{}", entry.file_name().to_string_lossy()));
                }
            }
        }
        there.remove("/page/index.html");
        let served: BTreeSet<String> = FILES.iter().skip(1).map(|(path, ..)| (*path).to_owned()).collect();
        assert_eq!(served, there);

        let mut named: BTreeSet<String> = BTreeSet::new();
        for (path, _, contents) in FILES {
            named.extend(between(contents, "=\"/page/", "\"").map(|name| format!("/page/{name}")));
            let directory = path.rsplit_once('/').unwrap().0;
            named.extend(between(contents, "from \"./", "\"").map(|name| format!("{directory}/{name}")));
            named.extend(between(contents, "from \"../", "\"").map(|name| format!("/page/{name}")));
        }
        assert_eq!(named, served);
    }

    /// What the policy would refuse, and what would let a text become markup.
    #[test]
    fn nothing_comes_from_elsewhere_and_nothing_is_inline() {
        for (path, _, contents) in FILES {
            let contents = contents.replace("http://www.w3.org/2000/svg", "");
            let forbidden = ["http:", "https:", " style=\"", "<style", "innerHTML", "insertAdjacentHTML", "eval("];
            for forbidden in forbidden {
                assert!(!contents.contains(forbidden), "{path}: {forbidden}");
            }
            assert!(
                between(&contents, "<script", "</script>").all(|tag| tag.ends_with('>')),
                "{path}: a script inline"
            );
        }
    }
}
