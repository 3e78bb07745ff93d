//! Processes that train one model together ("ranks"). This crate knows bytes only: how the processes were started ([`Launch`]), how they
//! find each other, how bytes get from one to another, and how the loss of one is noticed by all. What is in the bytes, and every sum
//! over them, is the business of others: no bit of a result depends on who moved it.
//!
//! Large data in host memory moves over MPI, which is loaded at run time; that in the memory of GPUs over NCCL, which is the business of
//! others. Small values of the host and signs of life go over TCP connections of our own.

mod error;
mod launch;
mod meeting;
mod mpi;
mod threads;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::thread::ThreadId;
use std::time::Duration;

pub use error::{RanksError, Result};
pub use launch::{Launch, Launcher, Meet, Node, OWN, Place};
pub use meeting::OnLoss;
use meeting::{Door, LONGEST, Meeting, Token};
use mpi::Mpi;
pub use mpi::MpiLibrary;
use threads::Port;

/// What moves large data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// MPI, from host memory to host memory.
    Mpi,
    /// NCCL, from the memory of GPUs to that of others. Not a part of this crate; ranks only meet here.
    Nccl,
}

/// How ranks are joined.
pub struct Settings {
    /// What moves large data.
    pub transport: Transport,
    /// The file of the MPI library; none: the one that belongs to the launcher.
    pub mpi_library: Option<PathBuf>,
    /// After how long without a sign of life a rank counts as lost.
    pub lost_after: Duration,
    /// Is told why the work cannot be continued, and must end the process: data may still be under way.
    pub on_loss: OnLoss,
}

impl Settings {
    /// How long a rank counts as alive without a sign of it.
    pub const LOST_AFTER: Duration = Duration::from_secs(30);
}

/// An answer or a transfer may take so many times as long as a sign of life: a rank may be writing a checkpoint.
const PATIENCE: u32 = 40;

/// What all ranks together give in one message where large buffers go by way of rank 0: little enough for signs of life between.
const TOGETHER: usize = LONGEST / 16;

/// This process among those that train together.
pub struct Ranks {
    rank: usize,
    size: usize,
    link: Link,
    patience: Duration,
    /// The thread that started MPI, and alone may call it.
    owner: ThreadId,
}

enum Link {
    World { mpi: Option<Mpi>, meeting: Meeting },
    Threads(Port),
}

impl Ranks {
    /// Joins the others that were started with this process. Called by the thread that will move all data.
    pub fn join(launch: &Launch, settings: Settings) -> Result<Self> {
        let (patience, owner) = (PATIENCE * settings.lost_after, std::thread::current().id());
        // Ranks of MPI find each other by it, whatever moves their data.
        let without_mpi = settings.transport == Transport::Nccl
            && (launch.meet.is_some() || launch.size == 1 || !launch.launcher.is_for_mpi());
        if without_mpi {
            let (rank, size) = (launch.rank, launch.size);
            let meeting = meet_at(launch, settings)?;
            return Ok(Self { rank, size, link: Link::World { mpi: None, meeting }, patience, owner });
        }
        let library = MpiLibrary::load(settings.mpi_library.as_deref(), Some(launch.launcher))?;
        let mpi = Mpi::start(library)?;
        if mpi.size() != launch.size {
            return Err(RanksError::OtherWorld {
                launcher: launch.launcher.name(),
                expected: launch.size,
                library: mpi.library().version.clone(),
                found: mpi.size(),
            });
        }
        let (rank, size, over_mpi) = (mpi.rank(), mpi.size(), settings.transport == Transport::Mpi);
        let meeting = meet(&mpi, patience, settings)?;
        if !over_mpi {
            // It has told them where to meet, which is all that is asked of it.
            meeting.gather(&[], patience);
            mpi.finish()?;
        }
        Ok(Self { rank, size, link: Link::World { mpi: over_mpi.then_some(mpi), meeting }, patience, owner })
    }

    /// Ranks that are threads of this process, for tests. Each must be used by a thread of its own.
    pub fn in_threads(size: usize) -> Vec<Self> {
        let owner = std::thread::current().id();
        let ranks = Port::all(size).into_iter().enumerate().map(|(rank, port)| Self {
            rank,
            size,
            link: Link::Threads(port),
            patience: Duration::MAX,
            owner,
        });
        ranks.collect()
    }

    /// This one's number, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are; at least 2 where processes were started together.
    pub fn size(&self) -> usize {
        self.size
    }

    /// What moves the data, for people.
    pub fn engine(&self) -> String {
        match &self.link {
            Link::World { mpi: Some(mpi), .. } => mpi.library().version.clone(),
            Link::World { mpi: None, .. } => "NCCL".to_owned(),
            Link::Threads(_) => "threads".to_owned(),
        }
    }

    /// Whether large data moves from host memory to host memory, by [`Ranks::exchange`]; if not, over NCCL.
    pub fn moves_host_memory(&self) -> bool {
        !matches!(&self.link, Link::World { mpi: None, .. })
    }

    /// How long an answer or a transfer may take.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Tells all others why the work ends, and ends this process. Where a rank was lost, it is that one's name that they are told.
    ///
    /// Ranks that are threads panic.
    pub fn fail(&self, reason: &str) -> ! {
        match &self.link {
            Link::World { meeting, .. } => meeting.fail(reason),
            Link::Threads(_) => panic!("ranks: rank {}: {reason}", self.rank),
        }
    }

    /// Which of `count` things in a row belong to a rank: neighbours, as evenly as can be.
    pub fn share(&self, count: usize, rank: usize) -> Range<usize> {
        rank * count / self.size..(rank + 1) * count / self.size
    }

    /// Notes where the work is, for messages.
    pub fn at(&self, step: u64) {
        if let Link::World { meeting, .. } = &self.link {
            meeting.at(step);
        }
    }

    /// Sends and receives bytes, all at once; messages between two ranks keep their order. Every rank must expect what is sent to
    /// it. Returns when all is done; where that cannot be, the process ends.
    ///
    /// Panics when another thread calls than the one that joined, and where host memory is not moved: see
    /// [`Ranks::moves_host_memory`].
    pub fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) {
        match &self.link {
            Link::World { mpi, meeting } => {
                assert_eq!(self.owner, std::thread::current().id(), "ranks: one thread moves all data");
                let Some(mpi) = mpi else { panic!("ranks: only GPUs exchange data here") };
                mpi.exchange(sends, receives, self.patience, &|reason| meeting.fail(&reason));
            }
            Link::Threads(port) => {
                sends.iter().for_each(|(to, message)| port.send(*to, message));
                receives.iter_mut().for_each(|(from, to)| to.copy_from_slice(&port.receive(*from)));
            }
        }
    }

    /// Completes a buffer of which each rank has a part: `parts` says which bytes are whose, in the order of ranks.
    ///
    /// Without MPI it is slow for large buffers: they go by way of rank 0, piece by piece.
    pub fn all_gather(&self, buffer: &mut [u8], parts: &[Range<usize>]) {
        if !self.moves_host_memory() {
            let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
            let piece = (TOGETHER / self.size).max(1);
            for begin in (0..longest).step_by(piece) {
                let cut = |part: &Range<usize>| {
                    let begin = part.end.min(part.start + begin);
                    begin..part.end.min(begin + piece)
                };
                let all = self.gather(&buffer[cut(&parts[self.rank])]);
                for (part, bytes) in parts.iter().zip(all) {
                    buffer[cut(part)].copy_from_slice(&bytes);
                }
            }
            return;
        }
        let (mut rest, mut at, mut own) = (buffer, 0, &[][..]);
        let mut receives: Vec<(usize, &mut [u8])> = Vec::new();
        for (rank, part) in parts.iter().enumerate() {
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(part.start - at);
            let (piece, tail) = tail.split_at_mut(part.len());
            (rest, at) = (tail, part.end);
            match rank == self.rank {
                true => own = &*piece,
                // What is empty is neither sent nor expected.
                false if piece.is_empty() => {}
                false => receives.push((rank, piece)),
            }
        }
        let sends: Vec<(usize, &[u8])> = self.others().filter(|_| !own.is_empty()).map(|rank| (rank, own)).collect();
        self.exchange(&sends, &mut receives);
    }

    /// Gives all ranks the bytes of rank 0.
    pub fn broadcast(&self, buffer: &mut [u8]) {
        if buffer.is_empty() {
            return;
        }
        if !self.moves_host_memory() {
            buffer.chunks_mut(TOGETHER).for_each(|piece| piece.copy_from_slice(&self.from_first(piece)));
            return;
        }
        if self.rank == 0 {
            let buffer = &*buffer;
            let sends: Vec<(usize, &[u8])> = self.others().map(|rank| (rank, buffer)).collect();
            self.exchange(&sends, &mut []);
        } else {
            self.exchange(&[], &mut [(0, buffer)]);
        }
    }

    /// A small value of every rank, in their order. All must give one.
    pub fn gather(&self, value: &[u8]) -> Vec<Vec<u8>> {
        match &self.link {
            Link::World { meeting, .. } => meeting.gather(value, self.patience),
            Link::Threads(port) => {
                self.others().for_each(|rank| port.send(rank, value));
                (0..self.size).map(|rank| if rank == self.rank { value.to_vec() } else { port.receive(rank) }).collect()
            }
        }
    }

    /// The small value of rank 0; what the others give is not used.
    pub fn from_first(&self, value: &[u8]) -> Vec<u8> {
        let value = if self.rank == 0 { value } else { &[] };
        self.gather(value).swap_remove(0)
    }

    /// Compares facts by name, such as a version and a digest of the data: all ranks must have the same.
    pub fn agree(&self, facts: &[(&str, String)], host: &str) -> Result<()> {
        let own: Vec<String> = facts.iter().map(|(name, fact)| format!("{name}\t{fact}")).collect();
        let all = self.gather(format!("{host}\n{}", own.join("\n")).as_bytes());
        let all: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        let facts_of = |text: &str| -> Vec<String> { text.lines().skip(1).map(str::to_owned).collect() };
        let first = all.first().map(|text| facts_of(text)).unwrap_or_default();
        for (rank, text) in all.iter().enumerate() {
            let facts = facts_of(text);
            let names = facts.iter().chain(&first).filter(|fact| !(facts.contains(fact) && first.contains(fact)));
            let mut names: Vec<&str> = names.filter_map(|fact| Some(fact.split_once('\t')?.0)).collect();
            names.sort_unstable();
            names.dedup();
            if !names.is_empty() {
                let host = text.lines().next().unwrap_or_default().to_owned();
                return Err(RanksError::Differs { rank, host, what: names.join(", ") });
            }
        }
        Ok(())
    }

    /// Tells the others why this rank cannot continue. They end; so must it.
    pub fn leave(&self, reason: &str) {
        if let Link::World { meeting, .. } = &self.link {
            meeting.leave(reason);
        }
    }

    /// Parts from the others, when all have come this far.
    pub fn finish(&self) -> Result<()> {
        match &self.link {
            Link::World { mpi, meeting } => meeting.finish(|| mpi.as_ref().map_or(Ok(()), Mpi::finish)),
            Link::Threads(_) => Ok(()),
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size).filter(|rank| *rank != self.rank)
    }
}

/// Bytes that say where rank 0 waits: port, token, the length of the host's name, and that name.
const INVITATION: usize = 2 + 16 + 1 + 255;

/// Lets all ranks of a world meet over TCP, whose address goes over MPI.
fn meet(mpi: &Mpi, patience: Duration, settings: Settings) -> Result<Meeting> {
    let Settings { lost_after, on_loss, .. } = settings;
    let (rank, size, host) = (mpi.rank(), mpi.size(), host());
    let end = |reason: String| on_loss(&reason);
    let mut invitation = [0; INVITATION];
    if rank != 0 {
        mpi.exchange(&[], &mut [(0, &mut invitation[..])], patience, &end);
        let token: Token = std::array::from_fn(|i| invitation[2 + i]);
        let name = String::from_utf8_lossy(&invitation[19..19 + usize::from(invitation[18])]).into_owned();
        let port = u16::from_le_bytes([invitation[0], invitation[1]]);
        // On the same machine no name has to be known.
        let address = if name == host { "127.0.0.1" } else { &name };
        return Meeting::join((address, port), &token, (rank, size), &host, lost_after, on_loss);
    }
    let token = random_token();
    let door = Door::open(SocketAddr::from(([0, 0, 0, 0], 0)), token)?;
    invitation[..2].copy_from_slice(&door.port()?.to_le_bytes());
    invitation[2..18].copy_from_slice(&token);
    let name = &host.as_bytes()[..host.len().min(255)];
    invitation[18] = name.len() as u8;
    invitation[19..19 + name.len()].copy_from_slice(name);
    let sends: Vec<(usize, &[u8])> = (1..size).map(|rank| (rank, &invitation[..])).collect();
    mpi.exchange(&sends, &mut [], patience, &end);
    Meeting::host(&door, size, &host, lost_after, on_loss)
}

fn random_token() -> Token {
    let random = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
    let (a, b) = (random(), random());
    std::array::from_fn(|i| if i < 8 { a[i] } else { b[i - 8] })
}

/// Lets all ranks meet over TCP where they were told to.
fn meet_at(launch: &Launch, settings: Settings) -> Result<Meeting> {
    let Settings { lost_after, on_loss, .. } = settings;
    let (rank, size, host) = (launch.rank, launch.size, host());
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    match &launch.meet {
        None if size == 1 => Meeting::host(&Door::open(any, random_token())?, 1, &host, lost_after, on_loss),
        None => {
            let reason =
                "nobody said where: give --address HOST:PORT of rank 0, or --meet FILE on a shared disk".to_owned();
            Err(RanksError::Meeting { action: "meet the other ranks".to_owned(), reason })
        }
        Some(Meet::Address(name, port, run)) => {
            // Strangers that come by do not know it; it is not meant to keep anybody out who wants to come in.
            let hash = |part: u64| {
                let mut hasher = std::hash::DefaultHasher::new();
                (part, "henson ranks", port, run).hash(&mut hasher);
                hasher.finish().to_le_bytes()
            };
            let (a, b) = (hash(0), hash(1));
            let token: Token = std::array::from_fn(|i| if i < 8 { a[i] } else { b[i - 8] });
            if rank > 0 {
                return Meeting::join((name, *port), &token, (rank, size), &host, lost_after, on_loss);
            }
            let door = Door::open(SocketAddr::from(([0, 0, 0, 0], *port)), token)?;
            Meeting::host(&door, size, &host, lost_after, on_loss)
        }
        Some(Meet::File(path)) => {
            if rank > 0 {
                let (name, port, token) = invitation_in(path)?;
                let name = if name == host { "127.0.0.1" } else { &name };
                return Meeting::join((name, port), &token, (rank, size), &host, lost_after, on_loss);
            }
            let door = Door::open(any, random_token())?;
            let token: String = door.token.iter().map(|byte| format!("{byte:02x}")).collect();
            let partial = path.with_extension("partial");
            let write = || {
                std::fs::write(&partial, format!("{host} {} {token}\n", door.port().unwrap_or(0)))?;
                std::fs::rename(&partial, path)
            };
            let failed = |error: std::io::Error| RanksError::Meeting {
                action: format!("write {}", path.display()),
                reason: error.to_string(),
            };
            write().map_err(failed)?;
            let met = Meeting::host(&door, size, &host, lost_after, on_loss);
            // The next start must not find it. Where it cannot be removed, the next rank 0 writes over it.
            let _ = std::fs::remove_file(path);
            met
        }
    }
}

/// Waits for what rank 0 writes into a file: its host, port and token.
fn invitation_in(path: &std::path::Path) -> Result<(String, u16, Token)> {
    let begin = std::time::Instant::now();
    loop {
        if let Ok(text) = std::fs::read_to_string(path) {
            let mut words = text.split_whitespace();
            let read = (|| {
                let (host, port, token) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
                let byte = |i: usize| u8::from_str_radix(token.get(2 * i..2 * i + 2)?, 16).ok();
                let bytes: Vec<u8> = (0..16).map(byte).collect::<Option<_>>()?;
                Some((host.to_owned(), port, bytes.try_into().ok()?))
            })();
            let nonsense = || RanksError::Meeting {
                action: format!("read {}", path.display()),
                reason: "it does not say where rank 0 is: delete it".to_owned(),
            };
            return read.ok_or_else(nonsense);
        }
        if begin.elapsed() > meeting::PATIENCE {
            let reason = format!("rank 0 did not write it within {} s", meeting::PATIENCE.as_secs());
            return Err(RanksError::Meeting { action: format!("read {}", path.display()), reason });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The name of this machine.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Runs `task` on every rank of a world of threads.
    fn on_all(size: usize, task: impl Fn(&Ranks) + Sync) {
        std::thread::scope(|scope| {
            for ranks in Ranks::in_threads(size) {
                let task = &task;
                scope.spawn(move || task(&ranks));
            }
        });
    }

    #[test]
    fn bytes_get_from_each_to_all() {
        on_all(4, |ranks| {
            let (rank, size) = (ranks.rank(), ranks.size());
            // Parts with a gap before them, one of them empty.
            let parts = [1..4, 4..4, 5..6, 6..9];
            let mut buffer = [9; 10];
            buffer[parts[rank].clone()].fill(rank as u8);
            ranks.all_gather(&mut buffer, &parts);
            assert_eq!(buffer, [9, 0, 0, 0, 9, 2, 3, 3, 3, 9]);
            let mut value = [rank as u8; 3];
            ranks.broadcast(&mut value);
            assert_eq!(value, [0; 3]);
            assert_eq!(ranks.gather(&vec![7; rank]), (0..size).map(|rank| vec![7; rank]).collect::<Vec<_>>());
            assert_eq!(ranks.from_first(&[rank as u8, 5]), [0, 5]);
            // In their order between two ranks, whatever goes on between others.
            let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
            let (mut one, mut two) = ([0], [0; 2]);
            ranks
                .exchange(&[(next, &[rank as u8][..]), (next, &[1, 2][..])], &mut [(last, &mut one), (last, &mut two)]);
            assert_eq!((one, two), ([last as u8], [1, 2]));
        });
        let shares = |size: usize, count| -> Vec<_> {
            let ranks = Ranks::in_threads(size).swap_remove(0);
            (0..size).map(|rank| ranks.share(count, rank)).collect()
        };
        assert_eq!(shares(3, 2), [0..0, 0..1, 1..2]);
        assert_eq!(shares(2, 5), [0..2, 2..5]);
    }

    /// Without MPI, where no buffer fits into one message.
    #[test]
    fn large_buffers_go_by_way_of_rank_0() {
        let parts = [3..LONGEST, LONGEST..LONGEST + 1, LONGEST + 2..4 * LONGEST];
        let whole: Vec<u8> = (0..parts[2].end).map(|i| (i / 251) as u8).collect();
        let file = std::env::temp_dir().join(format!("henson-ranks-{}", std::process::id()));
        let task = |rank: usize| {
            let meet = Some(Meet::File(file.clone()));
            let launch = Launch { launcher: Launcher::Henson, rank, size: 3, local_rank: None, meet };
            let on_loss: OnLoss = Box::new(|text| {
                drop(writeln!(std::io::stderr(), "{text}"));
                std::process::abort()
            });
            let lost_after = Duration::from_secs(20);
            let settings = Settings { transport: Transport::Nccl, mpi_library: None, lost_after, on_loss };
            let ranks = Ranks::join(&launch, settings).unwrap();
            let mut buffer = vec![0; whole.len()];
            buffer[parts[rank].clone()].copy_from_slice(&whole[parts[rank].clone()]);
            ranks.all_gather(&mut buffer, &parts);
            assert!(parts.iter().all(|part| buffer[part.clone()] == whole[part.clone()]), "rank {rank}");
            assert_eq!((buffer[2], buffer[LONGEST + 1]), (0, 0));
            let mut buffer = if rank == 0 { whole.clone() } else { vec![0; whole.len()] };
            ranks.broadcast(&mut buffer);
            assert!(buffer == whole, "rank {rank}");
            ranks.finish().unwrap();
        };
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let task = &task;
                scope.spawn(move || task(rank));
            }
        });
    }

    #[test]
    fn who_has_other_facts_is_named() {
        on_all(3, |ranks| {
            let facts = |data: &str| vec![("version", "1".to_owned()), ("data", data.to_owned())];
            let host = format!("node{}", ranks.rank());
            ranks.agree(&facts("a"), &host).unwrap();
            let own = facts(if ranks.rank() == 2 { "b" } else { "a" });
            let error = ranks.agree(&own, &host).unwrap_err().to_string();
            assert_eq!(error, "rank 2 on node2 differs from rank 0 in: data. All ranks need the same data");
        });
    }
}
