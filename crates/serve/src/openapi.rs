//! The OpenAPI document and a page for people, both made from the table of routes.

use std::fmt::Write;

use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::page;
use crate::routes::{ROUTES, Route};

/// Routes that need no key.
const OPEN: [(&str, &str); 4] = [
    ("/health", "200 when all models are loaded; needs no key"),
    ("/openapi.json", "This document; needs no key"),
    ("/docs", "A page that lists the routes; needs no key"),
    ("/", "The page; needs no key"),
];

pub(crate) async fn document() -> Response {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], build().to_string()).into_response()
}

pub(crate) async fn docs() -> Response {
    page::file("text/html; charset=utf-8", html())
}

fn build() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    let mut add = |path: &str, method: &str, operation: Value| {
        let place = paths.entry(path).or_insert_with(|| json!({}));
        place[method] = operation;
    };
    for route in &ROUTES {
        add(route.path, route.method, operation(route, false));
        if route.of_model {
            add(&format!("/models/{{model}}{}", route.path), route.method, operation(route, true));
        }
    }
    for (path, summary) in OPEN {
        let operation = json!({"summary": summary, "responses": {"200": {"description": "OK"}}, "security": []});
        add(path, "get", operation);
    }
    let error = json!({
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    });
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "henson",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "BERT models behind HTTP. Routes under /v1 have OpenAI's errors, all others {error, error_type}.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

fn operation(route: &Route, of_model: bool) -> Value {
    let failed = |what: &str| {
        json!({
            "description": what,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        })
    };
    let mut operation = json!({"summary": route.summary, "responses": {"200": {"description": "OK"}}});
    if !route.example.is_empty() {
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": schema(route), "example": example(route)}},
        });
        for (status, what) in [
            ("400", "invalid JSON, or no input"),
            ("401", "a wrong API key"),
            ("404", "no such model"),
            ("408", "the body arrived too slowly"),
            ("413", "a body or a list beyond the limits"),
            ("415", "not sent as application/json"),
            ("422", "valid JSON, but not a valid request"),
            ("424", "a model of another kind, or one that failed"),
            ("429", "the queue is full; see Retry-After"),
            ("503", "loading, shutting down, or too slow; see Retry-After"),
        ] {
            operation["responses"][status] = failed(what);
        }
    }
    let mut parameters = Vec::new();
    if of_model {
        parameters.push(json!({"name": "model", "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    if route.path == "/runs/{run}" {
        parameters.push(json!({"name": "run", "in": "path", "required": true, "schema": {"type": "string"}}));
        parameters.push(json!({"name": "from", "in": "query", "schema": {"type": "integer"}}));
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    operation
}

fn example(route: &Route) -> Value {
    serde_json::from_str(route.example).unwrap_or_default()
}

fn schema(route: &Route) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for (name, schema, description) in route.fields {
        let plain = name.trim_start_matches('*');
        if plain != *name {
            required.push(plain);
        }
        let mut schema: Value = serde_json::from_str(schema).unwrap_or_default();
        schema["description"] = (*description).into();
        properties.insert(plain.to_owned(), schema);
    }
    // POST / takes what the first model's route takes.
    let closed = !properties.is_empty();
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": !closed})
}

fn html() -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>henson: routes</title>\n\
         <link rel=\"icon\" href=\"/page/icon.svg\">\n<link rel=\"stylesheet\" href=\"/page/page.css\">\n\
         </head>\n<body>\n<main>\n<h1>Routes</h1>\n\
         <p>As <a href=\"/openapi.json\">OpenAPI</a>. Routes with a body are also there as <code>/models/NAME/…</code>.</p>\n",
    );
    // Writing to a string cannot fail.
    for route in &ROUTES {
        let (method, path) = (route.method.to_uppercase(), route.path);
        let _ = writeln!(out, "<h2><code>{method} {path}</code></h2>\n<p>{}.</p>", escaped(route.summary));
        if !route.fields.is_empty() {
            out.push_str("<dl>\n");
            for (name, _, description) in route.fields {
                let (name, must) = name.strip_prefix('*').map_or((*name, ""), |name| (name, " (required)"));
                let _ = writeln!(out, "<dt>{name}{must}</dt><dd>{}</dd>", escaped(description));
            }
            out.push_str("</dl>\n");
        }
        if !route.example.is_empty() {
            let curl = format!(
                "curl localhost:8080{path} -H 'Content-Type: application/json' \\\n  -d '{}'",
                route.example.replace('\'', "'\\''")
            );
            let _ = writeln!(out, "<pre><code>{}</code></pre>", escaped(&curl));
        }
    }
    for (path, summary) in OPEN {
        let _ = writeln!(out, "<h2><code>GET {path}</code></h2>\n<p>{}.</p>", escaped(summary));
    }
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::wire::{CompletionRequest, GenerateRequest};
    use crate::wire;

    /// The fields that a request's parser knows, by what it says of one that it does not.
    fn known<T: serde::de::DeserializeOwned>() -> Vec<String> {
        let error = serde_json::from_str::<T>(r#"{"?": 1}"#).err().map(|error| error.to_string()).unwrap_or_default();
        let names = error.split('`').skip(3).step_by(2);
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        names.sort();
        names
    }

    #[test]
    fn the_document_names_the_fields_that_the_parsers_take() {
        let checks: [(&str, Vec<String>); 20] = [
            ("/embed", known::<wire::EmbedRequest>()),
            ("/embed_all", known::<wire::EmbedAllRequest>()),
            ("/similarity", known::<wire::SimilarityRequest>()),
            ("/v1/embeddings", known::<wire::OpenAiRequest>()),
            ("/v1/completions", known::<CompletionRequest>()),
            ("/generate", known::<GenerateRequest>()),
            ("/generate_stream", known::<GenerateRequest>()),
            ("/tokenize", known::<wire::TokenizeRequest>()),
            ("/decode", known::<wire::DecodeRequest>()),
            ("/fill", known::<wire::FillRequest>()),
            ("/predict", known::<wire::PredictRequest>()),
            ("/rerank", known::<wire::RerankRequest>()),
            ("/v1/rerank", known::<wire::DocumentsRequest>()),
            ("/v2/rerank", known::<wire::DocumentsRequest2>()),
            ("/zero_shot", known::<wire::ZeroShotRequest>()),
            ("/tag", known::<wire::TagRequest>()),
            ("/answer", known::<wire::AnswerRequest>()),
            ("/choose", known::<wire::ChooseRequest>()),
            ("/inside/attention", known::<wire::AttentionRequest>()),
            ("/inside/neighbours", known::<wire::NeighboursRequest>()),
        ];
        let document = build();
        let with_fields = ROUTES.iter().filter(|route| !route.fields.is_empty()).count();
        assert_eq!(with_fields, checks.len());
        for (path, known) in checks {
            let body = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
            let mut named: Vec<&String> = body["properties"].as_object().unwrap().keys().collect();
            named.sort();
            assert_eq!(named, known.iter().collect::<Vec<_>>(), "{path}");
        }
    }

    #[test]
    fn schemas_and_examples_are_json() {
        for route in &ROUTES {
            for (name, schema, _) in route.fields {
                assert!(serde_json::from_str::<Value>(schema).unwrap().is_object(), "{} {name}", route.path);
            }
            assert!(route.example.is_empty() || example(route).is_object(), "{}", route.path);
        }
        assert!(build()["paths"]["/models/{model}/embed"]["post"]["parameters"].is_array());
        assert!(html().contains("POST /v1/embeddings"));
    }
}
