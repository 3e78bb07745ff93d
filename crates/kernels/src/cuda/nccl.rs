//! NCCL, loaded at run time: device memory of one process to that of others. It only moves bytes; nothing is ever added by it.
//!
//! We bind it ourselves: cudarc asks for file names under which wheels and distributions do not have it, and panics where a function is
//! missing. A communicator is non-blocking: calls that take their time are asked for again, so that a rank that is missing is noticed.
//! No call of it may stand in a recorded graph: ranks record and play their passes at different times.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::error::{CudaError, Result};
use super::gpu::{Gpu, View};
use super::library::{Library, Search};

/// What ranks find each other by: made by one of them, given to all.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its length.
    pub const BYTES: usize = 128;

    /// To be sent to others.
    pub fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// What was sent.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

/// A communicator of the library.
type Handle = *mut c_void;

/// `ncclResult_t`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclChar`: everything moves as bytes.
const BYTES: c_int = 0;

/// What was not set: `NCCL_CONFIG_UNDEF_INT`.
const UNSET: c_int = c_int::MIN;

/// `ncclConfig_t` as of NCCL 2.17, which later versions take as well: they copy as much as its size says, and have defaults for the rest.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    split_share: c_int,
    /// What fills it up; later versions have a field here, which may not be garbage.
    rest: c_int,
}

impl Config {
    fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21700,
            blocking: 0,
            cga_cluster_size: UNSET,
            least_blocks: UNSET,
            most_blocks: UNSET,
            network: std::ptr::null(),
            split_share: UNSET,
            rest: UNSET,
        }
    }
}

type OnStream = *mut c_void;

/// The functions.
#[derive(Clone, Copy)]
struct Table {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Handle) -> c_int,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, OnStream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, OnStream) -> c_int,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, OnStream) -> c_int,
}

/// The library, found and loaded.
#[derive(Clone)]
pub struct Nccl {
    /// The file.
    pub path: PathBuf,
    /// Such as 2.28.9.
    pub version: String,
    table: Table,
}

impl Nccl {
    /// Finds it; an error that says what is missing where it is not there. Needs no GPU.
    pub fn load(search: &Search) -> Result<Self> {
        let (path, library) = search.open(Library::Nccl)?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of nccl.h for this name.
                *unsafe { library.get($name) }.map_err(|_| CudaError::Nccl {
                    version: format!("({})", path.display()),
                    action: format!("find {} in it", String::from_utf8_lossy($name)),
                    message: "2.18 or newer is needed".to_owned(),
                })?
            };
        }
        let table = Table {
            get_version: function!(b"ncclGetVersion"),
            get_unique_id: function!(b"ncclGetUniqueId"),
            init_rank: function!(b"ncclCommInitRankConfig"),
            async_error: function!(b"ncclCommGetAsyncError"),
            finalize: function!(b"ncclCommFinalize"),
            destroy: function!(b"ncclCommDestroy"),
            abort: function!(b"ncclCommAbort"),
            error_string: function!(b"ncclGetErrorString"),
            last_error: function!(b"ncclGetLastError"),
            group_start: function!(b"ncclGroupStart"),
            group_end: function!(b"ncclGroupEnd"),
            send: function!(b"ncclSend"),
            recv: function!(b"ncclRecv"),
            broadcast: function!(b"ncclBroadcast"),
        };
        let mut number = 0;
        // SAFETY: writes one integer.
        unsafe { (table.get_version)(&mut number) };
        let version = format!("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
        Ok(Self { path, version, table })
    }

    /// For the first rank, to be given to all.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: room for the whole of it.
        let code = unsafe { (self.table.get_unique_id)(&mut id) };
        self.check("make an id that ranks find each other by", code, std::ptr::null_mut())?;
        Ok(id)
    }

    fn check(&self, action: &str, code: c_int, communicator: Handle) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: both give a text that the library keeps, the second of the last error of this communicator or, for none, of all.
        let [what, last] =
            unsafe { [(self.table.error_string)(code), (self.table.last_error)(communicator)] }.map(|text| {
                if text.is_null() {
                    String::new()
                } else {
                    // SAFETY: as above; it ends with a zero.
                    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
                }
            });
        let message = if last.is_empty() { what } else { format!("{what} ({last})") };
        Err(CudaError::Nccl { version: self.version.clone(), action: action.to_owned(), message })
    }
}

/// The ranks that move data among their GPUs, as one of them sees them. Used by one thread; another may ask for its state.
pub struct Communicator {
    nccl: Nccl,
    handle: Handle,
    deadline: Duration,
}

// SAFETY: the library's handle may be used from any thread; `&self` is used by one at a time but for `state`, which may come from another.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Joins the others, each with its own GPU. Returns when all have come, or after `deadline` with an error; later calls take no
    /// longer than that either.
    pub fn join(nccl: Nccl, gpu: &Gpu, id: UniqueId, (rank, size): (usize, usize), deadline: Duration) -> Result<Self> {
        gpu.bind()?;
        let mut joined = Self { nccl, handle: std::ptr::null_mut(), deadline };
        let mut config = Config::non_blocking();
        // SAFETY: the config is copied before this returns, and the handle is ours; the GPU's context is current.
        let code =
            unsafe { (joined.nccl.table.init_rank)(&mut joined.handle, size as c_int, id, rank as c_int, &mut config) };
        joined.settle("join the other ranks", code)?;
        Ok(joined)
    }

    /// The library.
    pub fn library(&self) -> &Nccl {
        &self.nccl
    }

    /// Queues what is sent to others and received from them, all at once; with each rank in order. Every rank must expect what is sent
    /// to it. It is done in its turn on the GPU.
    pub fn exchange(&self, gpu: &Gpu, sends: &[(usize, View<'_>)], receives: &[(usize, View<'_>)]) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        gpu.bind()?;
        let (table, stream) = (&self.nccl.table, gpu.stream().cast());
        // SAFETY: memory of the GPU with these lengths; the stream outlives what is queued on it.
        unsafe {
            self.settle("begin a group of transfers", (table.group_start)())?;
            let mut queued = Ok(());
            for (from, view) in receives {
                let (to, bytes) = (view.address() as *mut c_void, view.len() * view.dtype().size());
                let code = (table.recv)(to, bytes, BYTES, *from as c_int, self.handle, stream);
                queued = queued.and_then(|()| self.within_group("receive from another rank", code));
            }
            for (to, view) in sends {
                let (from, bytes) = (view.address() as *const c_void, view.len() * view.dtype().size());
                let code = (table.send)(from, bytes, BYTES, *to as c_int, self.handle, stream);
                queued = queued.and_then(|()| self.within_group("send to another rank", code));
            }
            let ended = (table.group_end)();
            queued?;
            self.settle("move data between ranks", ended)
        }
    }

    /// Queues what gives all ranks the numbers of one.
    pub fn broadcast(&self, gpu: &Gpu, view: View<'_>, root: usize) -> Result<()> {
        gpu.bind()?;
        let (at, bytes) = (view.address() as *mut c_void, view.len() * view.dtype().size());
        // SAFETY: as in `exchange`; in its place, which the library allows.
        let code = unsafe {
            let stream = gpu.stream().cast();
            (self.nccl.table.broadcast)(at, at, bytes, BYTES, root as c_int, self.handle, stream)
        };
        self.settle("give all ranks the numbers of one", code)
    }

    /// Whether all is well so far: an error where a transfer failed, such as by the loss of a connection.
    pub fn state(&self) -> Result<()> {
        match self.ask()? {
            IN_PROGRESS => Ok(()),
            code => self.nccl.check("move data between ranks", code, self.handle),
        }
    }

    fn ask(&self) -> Result<c_int> {
        let mut state = SUCCESS;
        // SAFETY: the handle is alive, and may be asked about from any thread.
        let code = unsafe { (self.nccl.table.async_error)(self.handle, &mut state) };
        self.nccl.check("ask for the state of transfers", code, self.handle)?;
        Ok(state)
    }

    /// An error inside of a group; that it is under way is none.
    fn within_group(&self, action: &str, code: c_int) -> Result<()> {
        if code == IN_PROGRESS { Ok(()) } else { self.nccl.check(action, code, self.handle) }
    }

    /// Waits until a call is over.
    fn settle(&self, action: &str, code: c_int) -> Result<()> {
        let begin = Instant::now();
        let mut code = code;
        while code == IN_PROGRESS {
            if begin.elapsed() > self.deadline {
                let message = format!("not done after {} s", self.deadline.as_secs());
                let (version, action) = (self.nccl.version.clone(), action.to_owned());
                return Err(CudaError::Nccl { version, action, message });
            }
            match begin.elapsed().as_millis() {
                0..2 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(200)),
            }
            code = self.ask()?;
        }
        self.nccl.check(action, code, self.handle)
    }
}

/// How long what is still under way at the end may take.
const LAST_TRANSFERS: Duration = Duration::from_secs(5);

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        // What others still want of us is done first; where they are gone, it never will be, and the GPU's work must be ended for its
        // memory to be given back.
        self.deadline = LAST_TRANSFERS;
        // SAFETY: the handle is alive, and not used any more afterwards. Nobody could hear of an error here.
        unsafe {
            let finalized = (self.nccl.table.finalize)(self.handle);
            if self.settle("end", finalized).is_ok() {
                (self.nccl.table.destroy)(self.handle);
            } else {
                (self.nccl.table.abort)(self.handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_the_library() {
        // By nccl.h of 2.17; later ones have another field where this one is filled up.
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, network)), (48, 32));
        assert_eq!((std::mem::offset_of!(Config, blocking), std::mem::offset_of!(Config, rest)), (16, 44));
    }
}
