//! The connections between processes beside the engine that moves their data: plain TCP from every rank to rank 0, for small values of
//! the host and for signs of life. A rank that is gone is named to all.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{RanksError, Result};

/// What a connection must begin with, for strangers to be told apart.
pub(crate) type Token = [u8; 16];

/// The largest message that is sent or read. Values of the host are small.
pub(crate) const LONGEST: usize = if cfg!(test) { 1 << 20 } else { 256 << 20 };

/// Signs of life within the time after which a rank counts as lost.
const BEATS: u32 = 6;

/// How long all ranks have to find rank 0.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// How long a connection has to say who it is: a stranger must not keep the ranks waiting.
const GREETING: Duration = Duration::from_secs(5);

/// How long whoever listens has to find out which rank is lost, before this one gives the reason that it knows itself.
const TO_BE_NAMED: Duration = Duration::from_secs(1);

const HELLO: u8 = 1;
const BEAT: u8 = 2;
/// A rank's value, with its number.
const VALUE: u8 = 3;
/// The values of all ranks, with their number.
const VALUES: u8 = 4;
/// A text: why everything ends.
const END: u8 = 5;
const BYE: u8 = 6;

/// Is told why the work cannot be continued, and must end the process.
pub type OnLoss = Box<dyn Fn(&str) + Send + Sync>;

pub(crate) struct Meeting {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
    next: AtomicU64,
}

struct Shared {
    rank: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// To each rank on rank 0, to rank 0 on the others.
    to: Vec<Option<Mutex<TcpStream>>>,
    hosts: Vec<String>,
    /// Where the work is, for messages.
    step: AtomicU64,
    on_loss: OnLoss,
}

#[derive(Default)]
struct State {
    /// By number: what came so far, of each rank; on ranks other than 0 all at once.
    values: BTreeMap<u64, BTreeMap<usize, Vec<u8>>>,
    /// Whether this rank has nothing more to do with the others.
    over: bool,
}

/// Where rank 0 waits for the others.
pub(crate) struct Door {
    listener: TcpListener,
    pub(crate) token: Token,
}

impl Door {
    /// Opens it at an address; port 0 is any.
    pub(crate) fn open(address: SocketAddr, token: Token) -> Result<Self> {
        let listener = TcpListener::bind(address).map_err(failed(format!("listen on {address}")))?;
        Ok(Self { listener, token })
    }

    pub(crate) fn port(&self) -> Result<u16> {
        Ok(self.listener.local_addr().map_err(failed("listen".to_owned()))?.port())
    }

    /// Waits until all others have come.
    fn wait(&self, size: usize) -> Result<Vec<(TcpStream, String)>> {
        let begin = Instant::now();
        self.listener.set_nonblocking(true).map_err(failed("listen".to_owned()))?;
        let mut came: BTreeMap<usize, (TcpStream, String)> = BTreeMap::new();
        while came.len() + 1 < size {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // A stranger, or one that was lost at once, is no rank.
                    if let Some((rank, host)) = self.greet(&stream).filter(|(rank, _)| (1..size).contains(rank)) {
                        came.insert(rank, (stream, host));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(failed("accept connections".to_owned())(error)),
            }
            if begin.elapsed() > PATIENCE {
                let missing: Vec<String> =
                    (1..size).filter(|rank| !came.contains_key(rank)).map(|rank| rank.to_string()).collect();
                let reason = format!("no connection from rank {} within {} s", missing.join(", "), PATIENCE.as_secs());
                return Err(RanksError::Meeting { action: "meet the other ranks".to_owned(), reason });
            }
        }
        Ok(came.into_values().collect())
    }

    fn greet(&self, stream: &TcpStream) -> Option<(usize, String)> {
        stream.set_nonblocking(false).ok()?;
        let (kind, hello) = receive(&mut Until { stream, end: Instant::now() + GREETING }, 1024).ok()?;
        let (token, rest) = hello.split_at_checked(16)?;
        let (rank, host) = rest.split_at_checked(8)?;
        let rank = u64::from_le_bytes(rank.try_into().ok()?) as usize;
        (kind == HELLO && token == self.token).then(|| (rank, String::from_utf8_lossy(host).into_owned()))
    }
}

impl Meeting {
    /// Rank 0: waits for the others.
    pub(crate) fn host(door: &Door, size: usize, own: &str, lost_after: Duration, on_loss: OnLoss) -> Result<Self> {
        let (mut to, mut from, mut hosts) = (vec![None], Vec::new(), vec![own.to_owned()]);
        for (stream, host) in door.wait(size)? {
            from.push(ready(&stream, lost_after)?);
            to.push(Some(Mutex::new(stream)));
            hosts.push(host);
        }
        Self::begin(0, size, to, from, hosts, lost_after, on_loss)
    }

    /// The others: find rank 0.
    pub(crate) fn join(
        (host, port): (&str, u16),
        token: &Token,
        (rank, size): (usize, usize),
        own: &str,
        lost_after: Duration,
        on_loss: OnLoss,
    ) -> Result<Self> {
        let begin = Instant::now();
        let mut stream = loop {
            match connect(host, port) {
                Ok(stream) => break stream,
                Err(error) if begin.elapsed() > PATIENCE => {
                    return Err(failed(format!("reach rank 0 at {host}:{port}"))(error));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let from = ready(&stream, lost_after)?;
        let hello = [&token[..], &(rank as u64).to_le_bytes(), own.as_bytes()].concat();
        send(&mut stream, HELLO, &hello).map_err(failed(format!("greet rank 0 at {host}:{port}")))?;
        Self::begin(rank, size, vec![Some(Mutex::new(stream))], vec![from], vec![host.to_owned()], lost_after, on_loss)
    }

    fn begin(
        rank: usize,
        size: usize,
        to: Vec<Option<Mutex<TcpStream>>>,
        from: Vec<TcpStream>,
        hosts: Vec<String>,
        lost_after: Duration,
        on_loss: OnLoss,
    ) -> Result<Self> {
        let (state, changed, step) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        let shared = Arc::new(Shared { rank, state, changed, to, hosts, step, on_loss });
        let first = usize::from(rank == 0);
        for (i, stream) in from.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            start("henson-ranks", move || shared.listen(stream, i + first))?;
        }
        let beating = Arc::clone(&shared);
        start("henson-beats", move || beating.beat(lost_after / BEATS))?;
        Ok(Self { rank, size, shared, next: AtomicU64::new(0) })
    }

    /// Notes where the work is.
    pub(crate) fn at(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
    }

    /// The values of all ranks, which all must give one. Returns when all have come, and never otherwise.
    pub(crate) fn gather(&self, value: &[u8], deadline: Duration) -> Vec<Vec<u8>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let begin = Instant::now();
        if self.rank != 0 {
            self.give(0..1, VALUE, &[&number.to_le_bytes()[..], value].concat());
        } else {
            self.shared.take(number, 0, value.to_vec());
        }
        let mut state = self.shared.lock();
        loop {
            if state.values.get(&number).is_some_and(|values| values.len() == self.size) {
                let values = state.values.remove(&number).unwrap_or_default();
                drop(state);
                let values: Vec<Vec<u8>> = values.into_values().collect();
                if self.rank == 0 {
                    self.give(1..self.size, VALUES, &packed(number, &values));
                }
                return values;
            }
            let wait = self.shared.changed.wait_timeout(state, Duration::from_secs(1));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
            if begin.elapsed() > deadline {
                let came = state.values.get(&number).cloned().unwrap_or_default();
                drop(state);
                let missing: Vec<String> =
                    (0..self.size).filter(|rank| !came.contains_key(rank)).map(|rank| rank.to_string()).collect();
                let who = if self.rank == 0 { format!("rank {}", missing.join(", ")) } else { "rank 0".to_owned() };
                self.fail(&format!("{who} did not answer for {} s", deadline.as_secs()))
            }
        }
    }

    /// Sends what must arrive. What is too long never would, and the others would take this rank for lost.
    fn give(&self, to: Range<usize>, kind: u8, message: &[u8]) {
        for rank in to {
            // Where it fails otherwise, the connection is gone, and whoever listens to it notices.
            if let Err(error) = self.shared.send(rank, kind, message)
                && error.kind() == ErrorKind::InvalidInput
            {
                self.fail(&error.to_string())
            }
        }
    }

    /// Tells all others why the work ends, and ends this process. Where a rank was lost, it is that one's name that they are told.
    pub(crate) fn fail(&self, reason: &str) -> ! {
        std::thread::sleep(TO_BE_NAMED);
        let text = self.shared.named(reason);
        self.shared.end(&text, None);
        loop {
            // The callback ends the process.
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Tells all others why this rank cannot continue; it ends by itself.
    pub(crate) fn leave(&self, reason: &str) {
        let text = format!("rank {}: {reason}", self.rank);
        self.shared.lock().over = true;
        self.shared.tell_all(END, text.as_bytes());
    }

    /// Parts from the others when all have come this far, however long that takes: the first may still be scoring and writing. What
    /// `last` does, a loss still ends.
    pub(crate) fn finish<T>(&self, last: impl FnOnce() -> T) -> T {
        self.gather(&[], Duration::MAX);
        let done = last();
        self.shared.lock().over = true;
        self.shared.tell_all(BYE, &[]);
        done
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        for stream in self.shared.to.iter().flatten() {
            // Wakes the thread that listens; one that is closed already needs nothing.
            let _ = lock(stream).shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Shared {
    /// Takes what comes from a rank, to its end.
    fn listen(&self, mut stream: TcpStream, rank: usize) {
        let reason = loop {
            match receive(&mut stream, LONGEST) {
                Ok((BEAT, _)) => {}
                Ok((VALUE, message)) if self.rank == 0 && message.len() >= 8 => {
                    let (number, value) = message.split_at(8);
                    self.take(u64::from_le_bytes(number.try_into().unwrap_or_default()), rank, value.to_vec());
                }
                Ok((VALUES, message)) if self.rank != 0 => match unpacked(&message) {
                    Some((number, values)) => {
                        for (rank, value) in values.into_iter().enumerate() {
                            self.take(number, rank, value);
                        }
                    }
                    None => break "its messages make no sense".to_owned(),
                },
                Ok((END, text)) => {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    return self.end(&text, Some(rank));
                }
                Ok((BYE, _)) => return,
                Ok(_) => break "its messages make no sense".to_owned(),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    break "no sign of life".to_owned();
                }
                Err(_) => break "its connection was closed".to_owned(),
            }
        };
        let host = self.hosts.get(rank).map_or("an unknown host", String::as_str);
        self.end(&self.named(&format!("rank {rank} on {host} was lost: {reason}")), Some(rank));
    }

    fn beat(&self, every: Duration) {
        while !self.lock().over {
            self.tell_all(BEAT, &[]);
            std::thread::sleep(every);
        }
    }

    fn take(&self, number: u64, rank: usize, value: Vec<u8>) {
        self.lock().values.entry(number).or_default().insert(rank, value);
        self.changed.notify_all();
    }

    /// Tells all but one that everything ends, and why; then this process ends. Only the first reason counts.
    fn end(&self, text: &str, but: Option<usize>) {
        if std::mem::replace(&mut self.lock().over, true) {
            return;
        }
        for rank in (0..self.to.len()).filter(|rank| Some(*rank) != but) {
            // Who cannot be told notices the closed connection.
            let _ = self.send(rank, END, text.as_bytes());
        }
        (self.on_loss)(text);
    }

    fn named(&self, reason: &str) -> String {
        match self.step.load(Ordering::Relaxed) {
            0 => reason.to_owned(),
            step => format!("{reason} (after step {step})"),
        }
    }

    fn tell_all(&self, kind: u8, message: &[u8]) {
        for rank in 0..self.to.len() {
            // Where that fails, whoever listens to the rank notices.
            let _ = self.send(rank, kind, message);
        }
    }

    fn send(&self, rank: usize, kind: u8, message: &[u8]) -> std::io::Result<()> {
        match self.to.get(rank).and_then(Option::as_ref) {
            Some(stream) => send(&mut *lock(stream), kind, message),
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map(drop).map_err(failed("start a thread".to_owned()))
}

fn connect(host: &str, port: u16) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::from(ErrorKind::NotFound);
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sets the times of a connection, and gives the end that is read from.
fn ready(stream: &TcpStream, lost_after: Duration) -> Result<TcpStream> {
    let set = || {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(lost_after))?;
        stream.set_write_timeout(Some(lost_after))?;
        stream.try_clone()
    };
    set().map_err(failed("prepare a connection".to_owned()))
}

/// A connection that is read until a moment, however slowly the bytes come.
struct Until<'a> {
    stream: &'a TcpStream,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        // A time of zero would mean that there is no end.
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { (&mut &*self.stream).read(bytes) }
    }
}

fn send(stream: &mut impl Write, kind: u8, message: &[u8]) -> std::io::Result<()> {
    if message.len() > LONGEST {
        let problem = format!("a message of {} bytes is too long: at most {LONGEST} are read", message.len());
        return Err(std::io::Error::new(ErrorKind::InvalidInput, problem));
    }
    // In one write, so that a message is one packet where it can be.
    let mut all = Vec::with_capacity(message.len() + 5);
    all.push(kind);
    all.extend_from_slice(&(message.len() as u32).to_le_bytes());
    all.extend_from_slice(message);
    stream.write_all(&all)
}

fn receive(stream: &mut impl Read, longest: usize) -> std::io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > longest {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut message = Vec::new();
    stream.take(length as u64).read_to_end(&mut message)?;
    if message.len() < length { Err(ErrorKind::UnexpectedEof.into()) } else { Ok((head[0], message)) }
}

/// Several values in one message.
fn packed(number: u64, values: &[Vec<u8>]) -> Vec<u8> {
    let mut all = number.to_le_bytes().to_vec();
    for value in values {
        all.extend_from_slice(&(value.len() as u64).to_le_bytes());
        all.extend_from_slice(value);
    }
    all
}

fn unpacked(message: &[u8]) -> Option<(u64, Vec<Vec<u8>>)> {
    let word = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    let (number, mut rest) = message.split_at_checked(8)?;
    let mut values = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_at_checked(8)?;
        let (value, behind) = behind.split_at_checked(usize::try_from(word(length)?).ok()?)?;
        values.push(value.to_vec());
        rest = behind;
    }
    Some((word(number)?, values))
}

fn failed(action: String) -> impl FnOnce(std::io::Error) -> RanksError {
    move |error| RanksError::Meeting { action, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    const SOON: Duration = Duration::from_millis(600);
    const LATE: Duration = Duration::from_secs(20);

    /// All ranks of a meeting on this machine, each with what its callback is told.
    fn meet(size: usize) -> Vec<(Meeting, Receiver<String>)> {
        let door = Door::open(([127, 0, 0, 1], 0).into(), [7; 16]).unwrap();
        let port = door.port().unwrap();
        let callback = || {
            let (tell, told) = channel();
            let on: OnLoss = Box::new(move |text| drop(tell.send(text.to_owned())));
            (on, told)
        };
        let join = move |rank| {
            let (on, told) = callback();
            let host = format!("node{rank}");
            (Meeting::join(("127.0.0.1", port), &[7; 16], (rank, size), &host, SOON, on).unwrap(), told)
        };
        let others: Vec<_> = (1..size).map(|rank| std::thread::spawn(move || join(rank))).collect();
        // One that does not know the token, and one that says nothing we understand.
        send(&mut TcpStream::connect(("127.0.0.1", port)).unwrap(), HELLO, &[0; 40]).unwrap();
        send(&mut TcpStream::connect(("127.0.0.1", port)).unwrap(), BEAT, &[]).unwrap();
        let (on, told) = callback();
        let first = (Meeting::host(&door, size, "node0", SOON, on).unwrap(), told);
        [first].into_iter().chain(others.into_iter().map(|thread| thread.join().unwrap())).collect()
    }

    #[test]
    fn all_ranks_get_the_values_of_all() {
        let ranks = meet(3);
        std::thread::scope(|scope| {
            for (meeting, _) in &ranks {
                scope.spawn(move || {
                    for round in 0..50u8 {
                        let value = vec![round; meeting.rank * usize::from(round)];
                        let expected: Vec<Vec<u8>> =
                            (0..3).map(|rank| vec![round; rank * usize::from(round)]).collect();
                        assert_eq!(meeting.gather(&value, LATE), expected);
                    }
                    meeting.finish(|| ());
                });
            }
        });
        let quiet: Vec<Receiver<String>> = ranks.into_iter().map(|(meeting, told)| (drop(meeting), told).1).collect();
        std::thread::sleep(2 * SOON);
        assert!(quiet.iter().all(|told| told.try_recv().is_err()), "a rank that parted was taken for lost");
    }

    #[test]
    fn who_is_lost_is_named_to_all() {
        let mut ranks = meet(4);
        ranks.iter().for_each(|(meeting, _)| meeting.at(120));
        let (gone, _) = ranks.remove(2);
        // As if its process were killed.
        lock(gone.shared.to[0].as_ref().unwrap()).shutdown(std::net::Shutdown::Both).unwrap();
        for (meeting, told) in &ranks {
            let text = told.recv_timeout(LATE).unwrap();
            assert!(text.contains("rank 2 on node2 was lost") && text.contains("step 120"), "{}: {text}", meeting.rank);
        }
    }

    #[test]
    fn who_is_silent_is_lost() {
        let door = Door::open(([127, 0, 0, 1], 0).into(), [7; 16]).unwrap();
        let mut silent = TcpStream::connect(("127.0.0.1", door.port().unwrap())).unwrap();
        send(&mut silent, HELLO, &[&[7; 16][..], &1u64.to_le_bytes(), b"node1"].concat()).unwrap();
        let (tell, told) = channel();
        let on: OnLoss = Box::new(move |text| drop(tell.send(text.to_owned())));
        let _meeting = Meeting::host(&door, 2, "node0", SOON, on).unwrap();
        let text = told.recv_timeout(LATE).unwrap();
        assert!(text.contains("rank 1 on node1 was lost: no sign of life"), "{text}");
    }

    #[test]
    fn who_fails_says_why() {
        let ranks = meet(3);
        ranks[1].0.leave("the disk is full");
        for i in [0, 2] {
            assert_eq!(ranks[i].1.recv_timeout(LATE).unwrap(), "rank 1: the disk is full");
        }
        assert!(ranks[1].1.try_recv().is_err());
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let mut ranks = meet(2);
        let (second, told) = ranks.remove(1);
        // It never returns: the callback of a rank ends the process.
        std::thread::spawn(move || second.gather(&vec![0; LONGEST], LATE));
        let expected = format!("a message of {} bytes is too long: at most {LONGEST} are read", LONGEST + 8);
        for told in [&told, &ranks[0].1] {
            assert_eq!(told.recv_timeout(LATE).unwrap(), expected);
        }
    }

    #[test]
    fn messages_of_strangers_are_bounded() {
        assert!(receive(&mut &[BEAT, 255, 255, 255, 255][..], LONGEST).is_err());
        assert!(receive(&mut &[BEAT, 4, 0, 0, 0, 1][..], LONGEST).is_err());
        assert!(unpacked(&[0; 7]).is_none());
        assert!(unpacked(&[&[0; 8][..], &u64::MAX.to_le_bytes()].concat()).is_none());
        assert_eq!(unpacked(&packed(9, &[vec![1], vec![]])), Some((9, vec![vec![1], vec![]])));
    }
}
