//! The bodies of requests and answers as a load: what a client still sends is taken off the wire before an early answer, and
//! what clients have not read yet is counted.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most bytes that are taken off the wire for a request that was answered before it was read.
const DRAINED: usize = 64 << 20;

/// How long that may take.
const DRAINING: Duration = Duration::from_secs(10);

/// A request's body, shared by the handler and by whoever takes the rest.
#[derive(Clone)]
pub(crate) struct Incoming(Arc<Mutex<State>>);

struct State {
    body: Body,
    begun: bool,
    ended: bool,
}

impl Incoming {
    pub(crate) fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(State { ended: body.is_end_stream(), body, begun: false })))
    }

    fn with<R>(&self, look: impl FnOnce(&mut State) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there is more of it than was read.
    pub(crate) fn is_left(&self) -> bool {
        self.with(|state| !state.ended && !state.body.is_end_stream())
    }

    /// Whether somebody has asked for it: a client that waits for `100 Continue` sends it only then.
    pub(crate) fn is_begun(&self) -> bool {
        self.with(|state| state.begun)
    }

    /// Throws the rest away, so that the client comes to read the answer: closing a connection with unread bytes would
    /// take the answer along. Gives up after some time or bytes.
    pub(crate) async fn drain(&mut self) {
        let rest = async {
            let mut bytes = 0;
            while bytes < DRAINED
                && let Some(Ok(frame)) = std::future::poll_fn(|context| Pin::new(&mut *self).poll_frame(context)).await
            {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
        };
        // Whoever is still sending then gets the answer if it listens.
        let _ = tokio::time::timeout(DRAINING, rest).await;
    }
}

impl HttpBody for Incoming {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.with(|state| {
            state.begun = true;
            let frame = Pin::new(&mut state.body).poll_frame(context);
            state.ended |= matches!(frame, Poll::Ready(None | Some(Err(_))));
            frame
        })
    }

    fn is_end_stream(&self) -> bool {
        !self.is_left()
    }

    fn size_hint(&self) -> SizeHint {
        self.with(|state| state.body.size_hint())
    }
}

/// An answer whose bytes count until the last of them is written.
struct Counted {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Why an answer cannot be sent.
pub(crate) enum Unsent {
    /// It is larger than all answers together may be.
    TooLarge(usize),
    /// Too many others wait for their clients.
    Later,
}

/// Counts an answer among those that wait for their clients to read them.
pub(crate) async fn counted(response: Response, room: &Arc<Semaphore>, most: usize) -> Result<Response, Unsent> {
    let Some(length) = response.body().size_hint().exact().map(|length| length as usize) else { return Ok(response) };
    if length > most {
        return Err(Unsent::TooLarge(length));
    }
    let permits = u32::try_from(length).map_err(|_| Unsent::TooLarge(length))?;
    let permit = Arc::clone(room).try_acquire_many_owned(permits).map_err(|_| Unsent::Later)?;
    let (head, body) = response.into_parts();
    // It is in memory as it is, and in one piece.
    let bytes = to_bytes(body, length).await.unwrap_or_default();
    Ok(Response::from_parts(head, Body::from(Bytes::from_owner(Counted { bytes, _permit: permit }))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready<R>(work: impl Future<Output = R>) -> R {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
    }

    #[test]
    fn answers_count_until_they_are_dropped() {
        let room = Arc::new(Semaphore::new(150));
        let answer = || ready(counted(Response::new(Body::from(vec![7; 100])), &room, 150));
        let first = answer().ok().unwrap();
        assert!(matches!(answer(), Err(Unsent::Later)));
        let bytes = ready(to_bytes(first.into_body(), 1000)).unwrap();
        assert!(bytes.len() == 100 && matches!(answer(), Err(Unsent::Later)), "read, but not written yet");
        drop(bytes.slice(..50));
        assert_eq!(room.available_permits(), 50);
        drop(bytes);
        assert!(answer().is_ok());
        assert_eq!(room.available_permits(), 150);
        let large = ready(counted(Response::new(Body::from(vec![7; 151])), &room, 150));
        assert!(matches!(large, Err(Unsent::TooLarge(151))));
    }

    #[test]
    fn the_rest_of_a_body_can_be_taken() {
        let mut body = Incoming::new(Body::from("abc"));
        assert!(body.is_left() && !body.is_begun());
        ready(body.drain());
        assert!(!body.is_left() && body.is_begun());
        assert!(!Incoming::new(Body::empty()).is_left());
    }
}
