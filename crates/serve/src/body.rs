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
pub(crate) const DRAINING: Duration = Duration::from_secs(10);

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
    /// take the answer along. Gives up after some bytes, or when the time is over.
    pub(crate) async fn drain(&mut self, time: Duration) {
        let rest = async {
            let mut bytes = 0;
            while bytes < DRAINED
                && let Some(Ok(frame)) = std::future::poll_fn(|context| Pin::new(&mut *self).poll_frame(context)).await
            {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
        };
        // Whoever is still sending then gets the answer if it listens.
        let _ = tokio::time::timeout(time, rest).await;
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
        ready(body.drain(DRAINING));
        assert!(!body.is_left() && body.is_begun());
        assert!(!Incoming::new(Body::empty()).is_left());
    }

    /// A client that never comes to an end: it sends this many frames of a mebibyte each, and then nothing more.
    struct Endless(usize);

    impl HttpBody for Endless {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
            static MEBIBYTE: [u8; 1 << 20] = [0; 1 << 20];
            let Some(left) = self.0.checked_sub(1) else { return Poll::Pending };
            self.0 = left;
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&MEBIBYTE)))))
        }
    }

    #[test]
    fn the_rest_of_a_body_without_end_is_not_waited_for() {
        let most = DRAINED >> 20;
        // Bytes without end, and a client that stalls: given up, the one at once, the other when the time is over.
        for (frames, read) in [(10 * most, most), (3, 3)] {
            let mut body = Incoming::new(Body::new(Endless(frames)));
            let time = if frames > most { Duration::MAX } else { Duration::from_millis(20) };
            let given_up = async { tokio::time::timeout(Duration::from_secs(20), body.drain(time)).await };
            assert!(ready(given_up).is_ok(), "{frames} frames");
            assert!(body.is_left());
            let mut rest = 0;
            while let Poll::Ready(Some(Ok(_))) =
                Pin::new(&mut body).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
            {
                rest += 1;
            }
            assert_eq!(frames - rest, read);
        }
    }
}
