//! Prompts on one side, tokens on the other: a queue for each model that writes, and the one thread that owns its
//! [`Writer`].
//!
//! All streams are in one flat batch, a token of each in every step. Between two steps new requests join, and those whose
//! client has left go. Whatever was accepted is answered, even when the model is replaced or the server stops: the thread ends
//! when the queue is closed and empty. Texts are made by those who answer; the thread knows ids alone, but for stop strings.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use henson_infer::{
    Event, EventKind, FinishReason, GenerateSettings, InferError, Job, Model, Ticket, TokenScore, Writer, WriterLimits,
    Written,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::error::{ApiError, Kind, ServeError};
use crate::metrics::WriteMetrics;

/// The way to a model's writer.
pub(crate) struct WriteQueue {
    shared: Arc<Shared>,
    limits: WriteLimits,
}

/// What a queue holds, and how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteLimits {
    /// What is written at once.
    pub(crate) writer: WriterLimits,
    /// Tokens of prompts, and of what may be written for them, that wait or are under way.
    pub(crate) tokens: usize,
    /// Requests that wait or are under way.
    pub(crate) requests: usize,
    /// How long a request waits for its first token.
    pub(crate) timeout: Duration,
}

/// What is to be written for one prompt.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// Or the source of an encoder-decoder.
    pub(crate) prompt: Vec<u32>,
    pub(crate) settings: GenerateSettings,
}

impl Task {
    /// What it can take in the queue.
    fn tokens(&self) -> usize {
        let written = self.settings.max_new_tokens.unwrap_or(0).saturating_mul(self.settings.return_sequences);
        self.prompt.len().saturating_add(written)
    }
}

/// What is heard of a request.
#[derive(Clone, Debug)]
pub(crate) enum Update {
    /// A token of a task's sequence, its end, or both.
    Step { task: usize, sequence: usize, token: Option<TokenScore>, end: Option<Written> },
    /// The end of the request.
    Failed(ApiError),
}

struct Shared {
    inbox: Mutex<Inbox>,
    bell: Condvar,
    requests: AtomicUsize,
    tokens: AtomicUsize,
    /// Nanoseconds for a token of all streams together, as the last steps took it.
    nanoseconds: AtomicU64,
    metrics: WriteMetrics,
}

#[derive(Default)]
struct Inbox {
    orders: Vec<Order>,
    closed: bool,
}

/// The tasks of one request.
struct Order {
    tasks: Vec<Task>,
    reply: UnboundedSender<Update>,
    accepted: oneshot::Sender<Result<(), ApiError>>,
    begin: Instant,
    place: Place,
}

/// A place in the queue with the tokens that it takes there, given up when it is dropped.
struct Place {
    shared: Arc<Shared>,
    tokens: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.requests.fetch_sub(1, Ordering::AcqRel);
        self.shared.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

impl WriteQueue {
    /// Starts the thread that writes. A model without room for its cache is an error.
    pub(crate) fn start(
        name: &str,
        model: Arc<Model>,
        limits: WriteLimits,
        metrics: WriteMetrics,
    ) -> Result<Self, ServeError> {
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            bell: Condvar::new(),
            requests: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            nanoseconds: AtomicU64::new(0),
            metrics,
        });
        let theirs = Arc::clone(&shared);
        let (ready, outcome) = mpsc::channel();
        std::thread::Builder::new()
            .name("henson-writer".to_owned())
            .spawn(move || match Desk::new(&model, limits) {
                Ok(desk) => {
                    let _ = ready.send(Ok(()));
                    work(&theirs, desk);
                }
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(|source| ServeError::System { action: "start a thread for a model", source })?;
        match outcome.recv() {
            Ok(Err(source)) => Err(ServeError::Model { name: name.to_owned(), source }),
            // A thread that ended without a word is found when somebody asks for it.
            Ok(Ok(())) | Err(_) => Ok(Self { shared, limits }),
        }
    }

    /// Has tasks written. Dropping what this gives, or its future, lets the request go.
    pub(crate) async fn begin(&self, tasks: Vec<Task>) -> Result<UnboundedReceiver<Update>, ApiError> {
        let tokens = tasks.iter().fold(0, |sum: usize, task| sum.saturating_add(task.tokens()));
        let place = self.admit(tokens)?;
        let (reply, updates) = unbounded_channel();
        let (accepted, outcome) = oneshot::channel();
        self.shared.inbox().orders.push(Order { tasks, reply, accepted, begin: Instant::now(), place });
        self.shared.bell.notify_one();
        match outcome.await {
            Ok(Ok(())) => Ok(updates),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ApiError::new(Kind::Unhealthy, "the model's thread has ended")),
        }
    }

    /// How long a request may take to its first token.
    pub(crate) fn timeout(&self) -> Duration {
        self.limits.timeout
    }

    fn admit(&self, tokens: usize) -> Result<Place, ApiError> {
        let (shared, most) = (&self.shared, self.limits.tokens);
        if tokens > most {
            let message = format!(
                "prompts and what may be written for them have {tokens} tokens, this server takes {most} in a request \
                 (--queue-tokens): ask for fewer or shorter completions"
            );
            return Err(ApiError::new(Kind::TooLarge, message));
        }
        let others = shared.requests.fetch_add(1, Ordering::AcqRel);
        let waiting = shared.tokens.fetch_add(tokens, Ordering::AcqRel);
        // From here on it is given back by being dropped.
        let place = Place { shared: Arc::clone(shared), tokens };
        if others < self.limits.requests && waiting + tokens <= most {
            return Ok(place);
        }
        let nanoseconds = shared.nanoseconds.load(Ordering::Relaxed);
        let seconds = (waiting as u64).saturating_mul(nanoseconds).div_ceil(1_000_000_000).clamp(1, 60);
        Err(ApiError::later(Kind::Overloaded, "the model is overloaded: the queue is full; try again later", seconds))
    }
}

impl Drop for WriteQueue {
    fn drop(&mut self) {
        self.shared.inbox().closed = true;
        self.shared.bell.notify_one();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Nothing panics while it is held; and if so, a list of orders is still a list of orders.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread: takes orders and writes until the queue is closed and empty.
fn work(shared: &Shared, mut desk: Desk<'_>) {
    loop {
        let mut inbox = shared.inbox();
        while desk.orders.is_empty() && inbox.orders.is_empty() {
            if inbox.closed {
                return;
            }
            inbox = shared.bell.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        let orders = std::mem::take(&mut inbox.orders);
        drop(inbox);
        orders.into_iter().for_each(|order| desk.take(order));
        desk.let_go();
        let (begin, tokens) = (Instant::now(), desk.step(&shared.metrics));
        if tokens > 0 {
            let nanoseconds = begin.elapsed().as_nanos() as u64 / tokens as u64;
            shared.nanoseconds.store(nanoseconds, Ordering::Relaxed);
        }
        let (waiting, running) = desk.streams();
        shared.metrics.waiting.set(waiting as i64);
        shared.metrics.running.set(running as i64);
    }
}

/// What the thread works on.
struct Desk<'m> {
    model: &'m Model,
    limits: WriteLimits,
    /// None after a failure, until somebody asks again.
    writer: Option<Writer<'m>>,
    orders: HashMap<u64, Open>,
    tickets: HashMap<Ticket, (u64, usize)>,
    last: u64,
}

/// A request on its way.
struct Open {
    reply: UnboundedSender<Update>,
    begin: Instant,
    tickets: Vec<Ticket>,
    /// Sequences that have not ended.
    left: usize,
    /// Whether its first token is there.
    started: bool,
    place: Place,
}

impl<'m> Desk<'m> {
    fn new(model: &'m Model, limits: WriteLimits) -> Result<Self, InferError> {
        let mut desk = Self { model, limits, writer: None, orders: HashMap::new(), tickets: HashMap::new(), last: 0 };
        desk.enter(None)?;
        Ok(desk)
    }

    /// Lets a job in, if there is one, where there is a writer or one can be made.
    fn enter(&mut self, job: Option<Job<'m>>) -> Result<Option<Ticket>, InferError> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => none.insert(Writer::new(self.model.network(), self.model.parameters(), self.limits.writer)?),
        };
        job.map(|job| writer.enter(job)).transpose()
    }

    /// Lets an order in, or says why it cannot be.
    fn take(&mut self, order: Order) {
        let Order { tasks, reply, accepted, begin, place } = order;
        self.last += 1;
        let (number, mut tickets, mut left) = (self.last, Vec::with_capacity(tasks.len()), 0);
        for (i, Task { prompt, settings }) in tasks.into_iter().enumerate() {
            left += settings.return_sequences;
            match self.enter(Some(self.model.job(prompt, &settings))) {
                Ok(ticket) => {
                    tickets.extend(ticket);
                    self.tickets.extend(ticket.map(|ticket| (ticket, (number, i))));
                }
                Err(error) => {
                    self.forget(&tickets);
                    let _ = accepted.send(Err(error.numbered(&[i + 1]).into()));
                    return;
                }
            }
        }
        // Where nobody waits for the answer any more, `let_go` finds it.
        let _ = accepted.send(Ok(()));
        self.orders.insert(number, Open { reply, begin, tickets, left, started: false, place });
    }

    /// Drops requests that nobody waits for any more, and those that have waited too long.
    fn let_go(&mut self) {
        let timeout = self.limits.timeout;
        let gone = |open: &Open| open.reply.is_closed() || (!open.started && open.begin.elapsed() >= timeout);
        let gone: Vec<u64> = self.orders.iter().filter(|(_, open)| gone(open)).map(|(number, _)| *number).collect();
        for number in gone {
            let Some(open) = self.orders.remove(&number) else { continue };
            self.forget(&open.tickets);
            let message = "the answer took too long; try again later";
            let _ = open.reply.send(Update::Failed(ApiError::later(Kind::Unhealthy, message, 10)));
        }
    }

    fn forget(&mut self, tickets: &[Ticket]) {
        for ticket in tickets {
            self.writer.iter_mut().for_each(|writer| writer.leave(*ticket));
            self.tickets.remove(ticket);
        }
    }

    /// One flat batch. Says how many tokens were written.
    fn step(&mut self, metrics: &WriteMetrics) -> usize {
        let Some(writer) = self.writer.as_mut().filter(|writer| !writer.is_idle()) else { return 0 };
        // A bug in a kernel shall cost the requests under way, not the server.
        let outcome = catch_unwind(AssertUnwindSafe(|| writer.step()));
        let events = match outcome {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => {
                self.fail_all(&error.to_string());
                return 0;
            }
            Err(_) => {
                self.fail_all("the computation failed unexpectedly; this is a bug in henson");
                return 0;
            }
        };
        let written = events.iter().filter(|event| matches!(event.kind, EventKind::Token(_))).count();
        metrics.written.inc_by(written as u64);
        let mut events = events.into_iter().peekable();
        while let Some(Event { ticket, sequence, kind }) = events.next() {
            // The end of a sequence comes with its last token.
            let (token, mut end) = match kind {
                EventKind::Token(token) => (Some(token), None),
                EventKind::Finished(written) => (None, Some(written)),
            };
            let of_same = |next: &Event| next.ticket == ticket && next.sequence == sequence;
            if end.is_none()
                && let Some(Event { kind: EventKind::Finished(written), .. }) = events.next_if(of_same)
            {
                end = Some(written);
            }
            self.pass_on(ticket, sequence, token, end, metrics);
        }
        written
    }

    fn pass_on(
        &mut self,
        ticket: Ticket,
        sequence: usize,
        token: Option<TokenScore>,
        end: Option<Written>,
        metrics: &WriteMetrics,
    ) {
        let Some(&(number, task)) = self.tickets.get(&ticket) else { return };
        let Some(open) = self.orders.get_mut(&number) else { return };
        if !open.started {
            open.started = true;
            metrics.first_token(open.begin.elapsed());
        }
        open.left -= usize::from(end.is_some());
        let failed = end.as_ref().is_some_and(|end| end.why == FinishReason::NotFinite);
        let update = if failed {
            Update::Failed(InferError::NotFinite { text: task + 1 }.into())
        } else {
            Update::Step { task, sequence, token, end }
        };
        let reply = if failed || open.left == 0 {
            let Some(Open { reply, tickets, place, .. }) = self.orders.remove(&number) else { return };
            self.forget(&tickets);
            // Before the answer is sent: whoever has it and asks again finds the room that it took.
            drop(place);
            reply
        } else {
            open.reply.clone()
        };
        // Whoever has left meanwhile is found before the next step.
        let _ = reply.send(update);
    }

    /// Everything under way fails, and so does the writer, whose state nobody knows.
    fn fail_all(&mut self, message: &str) {
        tracing::error!(error = message, requests = self.orders.len(), "writing failed");
        self.tickets.clear();
        for (_, open) in self.orders.drain() {
            let _ = open.reply.send(Update::Failed(ApiError::new(Kind::Backend, message)));
        }
        self.writer = None;
    }

    /// Sequences that wait for their first token, and those that are being written.
    fn streams(&self) -> (usize, usize) {
        let of = |started: bool| self.orders.values().filter(move |open| open.started == started);
        let count = |started: bool| of(started).map(|open| open.left).sum();
        (count(false), count(true))
    }
}
