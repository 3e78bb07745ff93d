//! Server-sent events: an answer that is written while its client reads it.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::mpsc::UnboundedReceiver;

/// Bytes of a frame after which no further event joins it.
const FRAME: usize = 16 << 10;

/// What becomes of the updates of a stream: the form of one API's events.
pub(crate) trait Form: Send + 'static {
    /// What the model's thread reports.
    type Update;

    /// Writes the events of an update. Says whether more may follow.
    fn write(&mut self, update: Self::Update, events: &mut Events) -> bool;

    /// Writes what is said where the updates end before their end.
    fn broken(&mut self, events: &mut Events);
}

/// Events that are to be sent.
#[derive(Debug, Default)]
pub(crate) struct Events(String);

impl Events {
    /// Adds an event with JSON in it.
    pub(crate) fn json(&mut self, value: &impl Serialize) {
        // What is sent here has texts as keys and finite numbers: it is always JSON.
        self.text(&serde_json::to_string(value).unwrap_or_default());
    }

    /// Adds an event of one line.
    pub(crate) fn text(&mut self, line: &str) {
        self.0.push_str("data: ");
        self.0.push_str(line);
        self.0.push_str("\n\n");
    }
}

/// The answer to a request for a stream. Whoever drops it, since the client has left, drops the receiver too.
pub(crate) fn stream<F: Form + Unpin>(updates: UnboundedReceiver<F::Update>, form: F) -> Response
where
    F::Update: Send + 'static,
{
    let mut response = Body::new(Streamed { updates, form, ended: false }).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would otherwise collect the events before it passes them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Streamed<F: Form> {
    updates: UnboundedReceiver<F::Update>,
    form: F,
    ended: bool,
}

impl<F: Form + Unpin> HttpBody for Streamed<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let mut events = Events::default();
        // All that is there goes into one frame; a client that is slower than the model gets fewer and larger ones.
        while !this.ended && events.0.len() < FRAME {
            match this.updates.poll_recv(context) {
                Poll::Ready(Some(update)) => this.ended = !this.form.write(update, &mut events),
                Poll::Ready(None) => {
                    this.form.broken(&mut events);
                    this.ended = true;
                }
                Poll::Pending if events.0.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!events.0.is_empty()).then(|| Ok(Frame::data(Bytes::from(events.0)))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::to_bytes;
    use tokio::sync::mpsc;

    /// Numbers until 0.
    struct Numbers;

    impl Form for Numbers {
        type Update = u32;

        fn write(&mut self, update: u32, events: &mut Events) -> bool {
            if update % 2 == 1 {
                events.json(&update);
            }
            update != 0
        }

        fn broken(&mut self, events: &mut Events) {
            events.text("broken");
        }
    }

    fn read(response: Response) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        String::from_utf8(runtime.block_on(to_bytes(response.into_body(), 10_000)).unwrap().to_vec()).unwrap()
    }

    #[test]
    fn updates_become_events_until_the_end() {
        let (sender, updates) = mpsc::unbounded_channel();
        [1, 2, 3, 0, 5].into_iter().for_each(|update| sender.send(update).unwrap());
        let response = stream(updates, Numbers);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        // 5 comes after the end.
        assert_eq!(read(response), "data: 1\n\ndata: 3\n\n");
        // The model's thread is gone, so that nobody sends the end.
        let (sender, updates) = mpsc::unbounded_channel();
        sender.send(1).unwrap();
        drop(sender);
        assert_eq!(read(stream(updates, Numbers)), "data: 1\n\ndata: broken\n\n");
    }

    #[test]
    fn whoever_stops_reading_is_noticed() {
        let (sender, updates) = mpsc::unbounded_channel();
        let response = stream(updates, Numbers);
        assert!(!sender.is_closed());
        drop(response);
        assert!(sender.is_closed());
    }
}
