//! A connection that is written to for as long as its client reads: one that takes less than [`RATE`] for long is closed,
//! whether it reads nothing or a little now and then.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Bytes in a second that a client must take.
const RATE: f64 = 8192.0;

/// A stream whose writes may wait for so long, plus what was written at [`RATE`].
pub(crate) struct Paced<S> {
    stream: S,
    /// How long it may wait when all before was taken in time.
    patience: Duration,
    /// How long it may still wait.
    left: Duration,
    /// Since when a write waits.
    waiting: Option<Instant>,
    timer: Pin<Box<Sleep>>,
}

impl<S> Paced<S> {
    pub(crate) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, left: patience, waiting: None, timer: Box::pin(sleep(patience)) }
    }

    /// What a write gave, and the end of patience.
    fn paced(&mut self, context: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        if let Some(since) = self.waiting.take() {
            self.left = self.left.saturating_sub(now - since);
        }
        match written {
            Poll::Ready(Ok(bytes)) => {
                self.left = (self.left + Duration::from_secs_f64(bytes as f64 / RATE)).min(self.patience);
                written
            }
            Poll::Ready(Err(_)) => written,
            Poll::Pending if self.left.is_zero() => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => {
                self.waiting = Some(now);
                self.timer.as_mut().reset(now + self.left);
                // Only to be woken then: whether the time is up is seen above.
                let _ = self.timer.as_mut().poll(context);
                Poll::Pending
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.paced(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.paced(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    /// Writes so much to a client that takes some bytes at a time.
    fn write(bytes: usize, taken: usize, every: Duration) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (ours, mut theirs) = duplex(256);
            let mut stream = Paced::new(ours, Duration::from_millis(400));
            let reader = tokio::spawn(async move {
                let mut buffer = vec![0; taken];
                while taken > 0 && theirs.read(&mut buffer).await.is_ok_and(|length| length > 0) {
                    tokio::time::sleep(every).await;
                }
                // Kept open: a client that reads nothing has not left.
                tokio::time::sleep(Duration::from_secs(3600)).await;
            });
            let written = stream.write_all(&vec![0; bytes]).await;
            reader.abort();
            written
        })
    }

    #[test]
    fn slow_readers_are_cut_whether_they_read_or_not() {
        // Never silent for as long as the patience, but below the rate: 320 bytes a second.
        let begin = std::time::Instant::now();
        let trickle = write(1 << 20, 16, Duration::from_millis(50)).unwrap_err();
        assert_eq!(trickle.kind(), io::ErrorKind::TimedOut);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert_eq!(write(1 << 20, 0, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn others_get_all_of_it_however_long_it_takes() {
        // 25,600 bytes a second for longer than the patience.
        write(1 << 14, 256, Duration::from_millis(10)).unwrap();
        write(1 << 16, 1 << 16, Duration::ZERO).unwrap();
    }
}
