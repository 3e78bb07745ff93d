//! Requests on one side, flat batches on the other: a queue for each loaded model, and the one thread that empties it.
//!
//! Requests take turns, one sequence each, so that a huge one delays a small one by a batch at most. What nobody waits for
//! any more is thrown away before it costs anything. Whatever was accepted is answered, even when the model is replaced
//! or the server stops: the thread ends when the queue is closed and empty.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use henson_infer::{InferError, Model, Output, Sequence};
use henson_text::Features;
use tokio::sync::oneshot;

use crate::error::{ApiError, Kind, ServeError};
use crate::metrics::ModelMetrics;

/// What a batch gave: one for each task, none where its numbers are not finite.
type Outputs = Vec<Option<Output>>;

/// The way into a model.
pub(crate) struct Queue {
    shared: Arc<Shared>,
    limits: Limits,
}

/// What a queue holds, and how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Tokens of a batch.
    pub(crate) batch_tokens: usize,
    /// Tokens that wait.
    pub(crate) tokens: usize,
    /// Requests that wait.
    pub(crate) requests: usize,
    /// How long a request waits for its answer.
    pub(crate) timeout: Duration,
}

struct Shared {
    inbox: Mutex<Inbox>,
    bell: Condvar,
    /// Tokens that wait or are being computed.
    waiting: AtomicUsize,
    /// Requests that wait for an answer.
    requests: AtomicUsize,
    /// Nanoseconds for a token, as the last batches took it.
    nanoseconds: AtomicU64,
    metrics: ModelMetrics,
}

#[derive(Default)]
struct Inbox {
    orders: Vec<Order>,
    closed: bool,
}

/// The sequences of one request.
struct Order {
    tasks: Vec<Sequence>,
    /// The first that was not taken yet.
    next: usize,
    outputs: Vec<Output>,
    /// Answers that are there.
    done: usize,
    reply: oneshot::Sender<Result<Vec<(Features, Output)>, String>>,
}

impl Queue {
    /// Starts the thread that owns the model's computations.
    pub(crate) fn start(model: Arc<Model>, limits: Limits, metrics: ModelMetrics) -> Result<Self, ServeError> {
        let shared = Arc::new(Shared::new(metrics));
        let theirs = Arc::clone(&shared);
        let run = move |tasks: &[&Sequence]| {
            model.read(&tasks.iter().map(|task| (&task.features, &task.read)).collect::<Vec<_>>())
        };
        std::thread::Builder::new()
            .name("henson-model".to_owned())
            .spawn(move || work(&theirs, limits.batch_tokens, run))
            .map_err(|source| ServeError::System { action: "start a thread for a model", source })?;
        Ok(Self { shared, limits })
    }

    /// These sequences with what was read off each. Dropping the future gives its place in the queue up.
    pub(crate) async fn run(&self, tasks: Vec<Sequence>) -> Result<Vec<(Features, Output)>, ApiError> {
        if tasks.is_empty() {
            return Ok(Vec::new());
        }
        let tokens: usize = tasks.iter().map(|task| task.features.len()).sum();
        let _place = self.admit(tokens)?;
        let (reply, answer) = oneshot::channel();
        let outputs = vec![Output::default(); tasks.len()];
        self.shared.inbox().orders.push(Order { tasks, next: 0, outputs, done: 0, reply });
        self.shared.bell.notify_one();
        match tokio::time::timeout(self.limits.timeout, answer).await {
            Ok(Ok(Ok(outputs))) => Ok(outputs),
            Ok(Ok(Err(message))) => Err(ApiError::new(Kind::Backend, message)),
            // The thread answers every order that it takes; this is for a thread that is gone.
            Ok(Err(_)) => Err(ApiError::new(Kind::Unhealthy, "the model's thread has ended")),
            Err(_) => Err(ApiError::later(Kind::Unhealthy, "the answer took too long; try again later", 10)),
        }
    }
}

impl Queue {
    /// A place for a request that the model need not compute, only its tokenizer: it counts as if it were computed.
    pub(crate) fn admit_texts(&self, tokens: usize) -> Result<Admitted<'_>, ApiError> {
        let place = self.admit(tokens)?;
        Ok(Admitted { _place: place, shared: &self.shared, tokens })
    }

    /// Takes a place among those that wait, or says when there may be one.
    fn admit(&self, tokens: usize) -> Result<Place<'_>, ApiError> {
        let shared = &self.shared;
        let place = Place(&shared.requests);
        let others = shared.requests.fetch_add(1, Ordering::AcqRel);
        let admitted = shared.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            // A request that is larger than the whole queue must wait for an empty one, but it can be served.
            let room = waiting == 0 || waiting + tokens <= self.limits.tokens;
            (room && others < self.limits.requests).then_some(waiting + tokens)
        });
        match admitted {
            Ok(waiting) => {
                shared.metrics.waiting.set((waiting + tokens) as i64);
                Ok(place)
            }
            Err(waiting) => {
                let nanoseconds = shared.nanoseconds.load(Ordering::Relaxed);
                let seconds = (waiting as u64).saturating_mul(nanoseconds).div_ceil(1_000_000_000).clamp(1, 60);
                let message = "the model is overloaded: the queue is full; try again later";
                Err(ApiError::later(Kind::Overloaded, message, seconds))
            }
        }
    }
}

/// A place in the queue, given up when its request is answered or its client has left.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A place in the queue with the tokens that it takes there.
pub(crate) struct Admitted<'a> {
    _place: Place<'a>,
    shared: &'a Shared,
    tokens: usize,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.shared.finished(self.tokens);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.inbox().closed = true;
        self.shared.bell.notify_one();
    }
}

impl Shared {
    fn new(metrics: ModelMetrics) -> Self {
        Self {
            inbox: Mutex::default(),
            bell: Condvar::new(),
            waiting: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            nanoseconds: AtomicU64::new(0),
            metrics,
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Nothing panics while it is held; and if so, a list of orders is still a list of orders.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finished(&self, tokens: usize) {
        let before = self.waiting.fetch_sub(tokens, Ordering::AcqRel);
        self.metrics.waiting.set(before.saturating_sub(tokens) as i64);
    }
}

/// Requests in the order of their turns.
#[derive(Default)]
struct Turns {
    orders: HashMap<u64, Order>,
    turns: VecDeque<u64>,
    last: u64,
}

impl Turns {
    fn add(&mut self, order: Order) {
        self.last += 1;
        self.turns.push_back(self.last);
        self.orders.insert(self.last, order);
    }

    /// Throws away what nobody waits for any more, and says how many tokens that were.
    fn forget_abandoned(&mut self) -> usize {
        let mut tokens = 0;
        self.orders.retain(|_, order| {
            let keep = !order.reply.is_closed();
            if !keep {
                tokens += order.tasks[order.next..].iter().map(|task| task.features.len()).sum::<usize>();
            }
            keep
        });
        self.turns.retain(|id| self.orders.contains_key(id));
        tokens
    }

    /// The next batch: sequences by turns until the tokens are used up. The first is taken whatever its length.
    fn next_batch(&mut self, most_tokens: usize) -> (Vec<(u64, usize)>, usize) {
        let (mut batch, mut tokens) = (Vec::new(), 0);
        while let Some(id) = self.turns.pop_front() {
            let Some(order) = self.orders.get_mut(&id) else { continue };
            let length = order.tasks[order.next].features.len();
            if !batch.is_empty() && tokens + length > most_tokens {
                self.turns.push_front(id);
                break;
            }
            batch.push((id, order.next));
            tokens += length;
            order.next += 1;
            if order.next < order.tasks.len() {
                self.turns.push_back(id);
            }
        }
        (batch, tokens)
    }

    /// Notes the answers of a batch and sends off what is complete. Says how many tokens of failed requests need not be
    /// computed any more.
    fn answer(&mut self, batch: &[(u64, usize)], outputs: Result<Outputs, String>) -> usize {
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(message) => return batch.iter().map(|(id, _)| self.fail(*id, &message)).sum(),
        };
        let mut dropped = 0;
        for ((id, task), output) in batch.iter().zip(outputs) {
            let Some(order) = self.orders.get_mut(id) else { continue };
            let Some(output) = output else {
                let error = InferError::NotFinite { text: order.tasks[*task].text };
                dropped += self.fail(*id, &error.to_string());
                continue;
            };
            order.outputs[*task] = output;
            order.done += 1;
            if order.done == order.tasks.len()
                && let Some(order) = self.orders.remove(id)
            {
                let features = order.tasks.into_iter().map(|task| task.features);
                // Whoever has left meanwhile needs no answer.
                let _ = order.reply.send(Ok(features.zip(order.outputs).collect()));
            }
        }
        dropped
    }

    /// A request fails as a whole; what it still has in the queue is dropped. Says how many tokens that were.
    fn fail(&mut self, id: u64, message: &str) -> usize {
        let Some(order) = self.orders.remove(&id) else { return 0 };
        self.turns.retain(|other| *other != id);
        let _ = order.reply.send(Err(message.to_owned()));
        order.tasks[order.next..].iter().map(|task| task.features.len()).sum()
    }
}

/// The thread: takes batches and computes them until the queue is closed and empty.
fn work(shared: &Shared, batch_tokens: usize, run: impl Fn(&[&Sequence]) -> Result<Outputs, InferError>) {
    let mut turns = Turns::default();
    loop {
        let mut inbox = shared.inbox();
        while turns.orders.is_empty() && inbox.orders.is_empty() {
            if inbox.closed {
                return;
            }
            inbox = shared.bell.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        inbox.orders.drain(..).for_each(|order| turns.add(order));
        drop(inbox);
        shared.finished(turns.forget_abandoned());
        let (batch, tokens) = turns.next_batch(batch_tokens);
        if batch.is_empty() {
            continue;
        }
        let start = Instant::now();
        let outputs = {
            let tasks: Vec<&Sequence> = batch.iter().map(|(id, task)| &turns.orders[id].tasks[*task]).collect();
            // A bug in a kernel shall cost the requests of one batch, not the server.
            catch_unwind(AssertUnwindSafe(|| run(&tasks)))
        };
        let outputs = match outputs {
            Ok(outputs) => outputs.map_err(|error| error.to_string()),
            Err(_) => Err("the computation failed unexpectedly; this is a bug in henson".to_owned()),
        };
        let elapsed = start.elapsed();
        shared.nanoseconds.store(elapsed.as_nanos() as u64 / tokens.max(1) as u64, Ordering::Relaxed);
        shared.metrics.batch(batch.len(), tokens, elapsed);
        // Before the answers are sent: whoever has one and asks again finds the room that it took.
        shared.finished(tokens);
        let dropped = turns.answer(&batch, outputs);
        shared.finished(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(length: usize) -> Sequence {
        let features = Features {
            ids: vec![0; length],
            segments: vec![0; length],
            offsets: vec![None; length],
            spellings: None,
            first: 0..length,
            second: None,
            first_piece: 0,
            dropped: 0,
        };
        Sequence { features, read: henson_infer::Read::Tokens, text: 1 }
    }

    type Answer = oneshot::Receiver<Result<Vec<(Features, Output)>, String>>;

    fn order(lengths: &[usize]) -> (Order, Answer) {
        let (reply, answer) = oneshot::channel();
        let tasks: Vec<Sequence> = lengths.iter().map(|length| task(*length)).collect();
        (Order { outputs: vec![Output::default(); tasks.len()], tasks, next: 0, done: 0, reply }, answer)
    }

    fn turns(orders: &[&[usize]]) -> (Turns, Vec<Answer>) {
        let mut turns = Turns::default();
        let mut answers = Vec::new();
        for lengths in orders {
            let (order, answer) = order(lengths);
            turns.add(order);
            answers.push(answer);
        }
        (turns, answers)
    }

    fn outputs(answer: &mut Answer) -> Vec<Output> {
        answer.try_recv().unwrap().unwrap().into_iter().map(|(_, output)| output).collect()
    }

    #[test]
    fn requests_take_turns() {
        let (mut turns, _answers) = turns(&[&[10, 10, 10, 10], &[10], &[10, 10]]);
        assert_eq!(turns.next_batch(45), (vec![(1, 0), (2, 0), (3, 0), (1, 1)], 40));
        // The third request's second sequence comes before the first one's third.
        assert_eq!(turns.next_batch(20), (vec![(3, 1), (1, 2)], 20));
        assert_eq!(turns.next_batch(20), (vec![(1, 3)], 10));
        assert_eq!(turns.next_batch(20), (vec![], 0));
    }

    #[test]
    fn a_long_sequence_goes_alone_and_keeps_its_place() {
        let (mut turns, _answers) = turns(&[&[5], &[100], &[5]]);
        assert_eq!(turns.next_batch(50), (vec![(1, 0)], 5));
        assert_eq!(turns.next_batch(50), (vec![(2, 0)], 100));
        assert_eq!(turns.next_batch(50), (vec![(3, 0)], 5));
    }

    #[test]
    fn what_nobody_waits_for_costs_nothing() {
        let (mut turns, mut answers) = turns(&[&[10, 10], &[7]]);
        assert_eq!(turns.next_batch(10), (vec![(1, 0)], 10));
        drop(answers.remove(0));
        assert_eq!(turns.forget_abandoned(), 10);
        assert_eq!(turns.next_batch(50), (vec![(2, 0)], 7));
    }

    #[test]
    fn the_thread_computes_nothing_for_those_who_left() {
        let shared = Shared::new(ModelMetrics::default());
        shared.waiting.store(12, Ordering::Relaxed);
        let ((left, left_answer), (stays, mut answer), (leaves, leaves_answer)) =
            (order(&[4]), order(&[1]), order(&[5, 2]));
        drop(left_answer);
        shared.inbox().orders.extend([left, leaves, stays]);
        shared.inbox().closed = true;
        let leaves_answer = std::cell::Cell::new(Some(leaves_answer));
        let computed = std::cell::RefCell::new(Vec::new());
        work(&shared, 1, |tasks| {
            computed.borrow_mut().extend(tasks.iter().map(|task| task.features.len()));
            // The second one leaves while its first sequence is computed.
            drop(leaves_answer.take());
            Ok(vec![Some(Output::default()); tasks.len()])
        });
        assert_eq!(*computed.borrow(), [5, 1]);
        assert!(answer.try_recv().unwrap().is_ok());
        assert_eq!(shared.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn answers_come_when_all_of_a_request_is_done() {
        let (mut turns, mut answers) = turns(&[&[1, 1], &[1]]);
        let output = |number: f32| Output { numbers: vec![number], ids: vec![] };
        let some = |number: f32| Some(output(number));
        assert_eq!(turns.answer(&[(1, 1)], Ok(vec![some(2.0)])), 0);
        assert!(answers[0].try_recv().is_err());
        turns.answer(&[(1, 0), (2, 0)], Ok(vec![some(1.0), some(3.0)]));
        assert_eq!(outputs(&mut answers[0]), [output(1.0), output(2.0)]);
        assert_eq!(outputs(&mut answers[1]), [output(3.0)]);
    }

    #[test]
    fn what_is_not_finite_fails_its_request_alone() {
        let (mut turns, mut answers) = turns(&[&[1, 4, 5], &[1]]);
        let output = Output { numbers: vec![1.0], ids: vec![] };
        let (batch, _) = turns.next_batch(2);
        assert_eq!(batch, [(1, 0), (2, 0)]);
        assert_eq!(turns.answer(&batch, Ok(vec![None, Some(output.clone())])), 9);
        assert!(answers[0].try_recv().unwrap().unwrap_err().contains("text 1 are not finite"));
        assert_eq!(outputs(&mut answers[1]), [output]);
        assert_eq!(turns.next_batch(9), (vec![], 0));
    }

    #[test]
    fn a_failed_batch_fails_its_requests_alone() {
        let (mut turns, mut answers) = turns(&[&[1, 4], &[1]]);
        let (batch, _) = turns.next_batch(1);
        assert_eq!(turns.answer(&batch, Err("broken".to_owned())), 4);
        assert_eq!(answers[0].try_recv().unwrap(), Err("broken".to_owned()));
        assert_eq!(turns.next_batch(9), (vec![(2, 0)], 1));
    }

    #[test]
    fn a_panic_costs_one_batch() {
        let shared = Shared::new(ModelMetrics::default());
        shared.waiting.store(3, Ordering::Relaxed);
        let ((bad, mut bad_answer), (good, mut good_answer)) = (order(&[1]), order(&[2]));
        shared.inbox().orders.extend([bad, good]);
        shared.inbox().closed = true;
        work(&shared, 1, |tasks| {
            assert_eq!(tasks[0].features.len(), 2, "the first batch");
            Ok(vec![Some(Output::default()); tasks.len()])
        });
        assert!(bad_answer.try_recv().unwrap().unwrap_err().contains("bug"));
        assert!(good_answer.try_recv().unwrap().is_ok());
        assert_eq!(shared.waiting.load(Ordering::Relaxed), 0);
    }
}
