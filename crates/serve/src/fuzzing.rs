//! The ways that bytes of strangers take, in memory: for the targets in `fuzz/`, and for nothing else.

use std::net::Ipv4Addr;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use henson_tensor::{DType, Device};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::app::App;
use crate::models::{Registry, Source};
use crate::routes::{ROUTES, Route};
use crate::settings::Settings;
pub use crate::wire::fuzz as requests;

/// A whole server without sockets, with small limits so that they are met.
pub struct Server {
    service: TowerToHyperService<Router>,
    models: Vec<String>,
    runtime: Runtime,
}

/// What a request may get. 500 is none of it, nor is a word about the server being busy: there is one request at a time.
const EXPECTED: [u16; 5] = [200, 400, 413, 422, 424];

fn post_routes() -> impl Iterator<Item = &'static Route> {
    ROUTES.iter().filter(|route| route.method == "post")
}

/// A request for each route, as [`Server::ask`] takes it: the number of the route, a byte for the model, and the body.
pub fn examples() -> Vec<Vec<u8>> {
    let examples = post_routes().enumerate();
    examples.map(|(i, route)| [&[i as u8, 0], route.example.as_bytes()].concat()).collect()
}

impl Server {
    /// With these models; panics where one cannot be loaded.
    pub fn new(models: Vec<Source>) -> Self {
        let settings = Settings { most_texts: 8, most_bytes: 3000, batch_tokens: 64, ..Settings::default() };
        let names = models.iter().map(|model| model.name.clone()).collect();
        let device = Device::cpu(None, Some(1)).expect("the processor");
        let registry = Registry::new(models, device, DType::F32, settings.clone()).expect("names of models");
        let app = App::new(Ipv4Addr::LOCALHOST.into(), settings, registry).expect("an app");
        let (_, errors) = app.models.load(&app.metrics);
        assert!(errors.is_empty(), "{errors:?}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { service: TowerToHyperService::new(app.router().expect("routes")), models: names, runtime }
    }

    /// Sends a body to a route: it gets a proper status and JSON, whatever it is.
    pub fn ask(&self, bytes: &[u8]) {
        let [route, model, body @ ..] = bytes else { return };
        let routes: Vec<&Route> = post_routes().collect();
        let route = routes[usize::from(*route) % routes.len()];
        // In turns no model, and each of them by name.
        let named = usize::from(*model) % (self.models.len() + 1);
        let address = match named.checked_sub(1).filter(|_| route.of_model) {
            Some(i) => format!("/models/{}{}", self.models[i], route.path),
            None => route.path.to_owned(),
        };
        let request = Request::post(&address).header(header::HOST, "localhost");
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_vec())).expect("a request");
        let (status, streamed, answer) = self.runtime.block_on(async {
            let response = self.service.call(request).await.expect("an answer");
            let content_type = response.headers().get(header::CONTENT_TYPE);
            let streamed = content_type.is_some_and(|value| value == "text/event-stream");
            let status = response.status();
            (status, streamed, to_bytes(response.into_body(), usize::MAX).await.expect("a body"))
        });
        let text = String::from_utf8_lossy(&answer);
        // A model may be asked for by a name that is not there.
        let named_in_body = status == StatusCode::NOT_FOUND && text.contains("there is no model");
        assert!(EXPECTED.contains(&status.as_u16()) || named_in_body, "{address}: {status} {text}");
        if streamed {
            let mut events = text.split("\n\n").collect::<Vec<_>>();
            assert_eq!(events.pop(), Some(""), "{address}: {text}");
            for event in events.iter().map(|event| event.strip_prefix("data: ").expect("an event")) {
                assert!(event == "[DONE]" || serde_json::from_str::<Value>(event).is_ok(), "{address}: {text}");
            }
            return;
        }
        let answer: Value = serde_json::from_slice(&answer).expect("answers are JSON");
        assert!(status == StatusCode::OK || answer.get("error").is_some(), "{address}: {status} {text}");
    }
}
