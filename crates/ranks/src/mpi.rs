//! MPI, loaded at run time: a table of a dozen functions from whatever library is there. It only moves bytes; nothing is ever added by it.
//!
//! Three binary interfaces are known: Open MPI's, where handles are addresses of symbols; MPICH's own, where they are integers; and the
//! standard one of MPI 5, where they are small pointers. All are passed as a word, which x86-64 and AArch64 take for an `int` as well.
//!
//! No call blocks inside of the library: transfers are started and then asked for, so that a loss is noticed meanwhile and a processor
//! that others need is given away.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::{RanksError, Result};
use crate::launch::Launcher;

/// A handle of MPI: an address, or an integer in its lower half.
type Handle = usize;

/// The most bytes of one message: counts are `int`.
const MOST: usize = 1 << 30;

/// Larger than any library's `MPI_Status`, of which the largest takes 32 bytes.
type Status = [u64; 16];

/// Larger than any library's longest text, which is 8192.
const TEXT: usize = 16384;

/// The files of MPI libraries: that of the standard first, then by who started us.
const STANDARD: &str = "libmpi_abi.so.1";
const OPEN_MPI: &[&str] = &["libmpi.so.40"];
const MPICH: &[&str] = &["libmpi.so.12", "libmpich.so.12"];

/// What differs between the interfaces.
#[derive(Clone, Copy)]
struct Interface {
    world: Handle,
    byte: Handle,
    errors_return: Handle,
    funneled: c_int,
}

/// The functions.
struct Table {
    init_thread: unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    comm_rank: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    comm_size: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    set_errhandler: unsafe extern "C" fn(Handle, Handle) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    isend: unsafe extern "C" fn(*const c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, c_int, Handle, *mut Handle) -> c_int,
    test: unsafe extern "C" fn(*mut Handle, *mut c_int, *mut Status) -> c_int,
}

/// A library that was loaded, before it is started.
pub struct MpiLibrary {
    /// The file.
    pub path: PathBuf,
    /// What it calls itself.
    pub version: String,
    table: Table,
    interface: Interface,
}

/// A world of processes.
pub(crate) struct Mpi {
    library: MpiLibrary,
    rank: usize,
    size: usize,
}

impl MpiLibrary {
    /// Loads the file that is given; else the standard's; else that of who started the processes, or, where nobody did, any.
    pub fn load(file: Option<&Path>, launcher: Option<Launcher>) -> Result<Self> {
        let names: Vec<&str> = match launcher {
            Some(Launcher::OpenMpi) => [&[STANDARD][..], OPEN_MPI].concat(),
            Some(Launcher::Mpich) => [&[STANDARD][..], MPICH].concat(),
            _ => [&[STANDARD][..], OPEN_MPI, MPICH].concat(),
        };
        let files: Vec<PathBuf> = match file {
            Some(file) => vec![file.to_owned()],
            None => names.iter().map(PathBuf::from).collect(),
        };
        let mut tried = Vec::new();
        for path in files {
            // SAFETY: loading runs the library's own initialisers, which every program that is linked to it runs as well. Plug-ins of
            // Open MPI need its symbols to be global.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => return Self::look_up(library, path),
                Err(error) => tried.push(format!("{}: {error}", path.display())),
            }
        }
        Err(RanksError::NoLibrary { tried: tried.join("; ") })
    }

    fn look_up(library: Library, path: PathBuf) -> Result<Self> {
        let wrong = |problem: String| RanksError::Library { path: path.display().to_string(), problem };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of the MPI standard for this name, with handles as words; see the module's head.
                *unsafe { library.get($name) }
                    .map_err(|_| wrong(format!("it has no {}", String::from_utf8_lossy($name))))?
            };
        }
        let address = |name: &[u8]| -> Option<Handle> {
            // SAFETY: only the symbol's address is used, never what stands there.
            unsafe { library.get::<*const c_void>(name) }.ok().map(|symbol| symbol.as_raw_ptr() as Handle)
        };
        let is_standard = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmpi_abi"));
        let interface = match (is_standard, address(b"ompi_mpi_comm_world")) {
            (true, _) => Interface { world: 0x101, byte: 0x247, errors_return: 0x143, funneled: 1024 },
            (false, Some(world)) => {
                let byte = address(b"ompi_mpi_byte").ok_or_else(|| wrong("it has no ompi_mpi_byte".to_owned()))?;
                let errors_return = address(b"ompi_mpi_errors_return")
                    .ok_or_else(|| wrong("it has no ompi_mpi_errors_return".to_owned()))?;
                Interface { world, byte, errors_return, funneled: 1 }
            }
            (false, None) => {
                // A function that all libraries with MPICH's interface must have.
                if address(b"MPIR_Dup_fn").is_none() {
                    return Err(wrong("it is neither Open MPI nor MPICH, and not libmpi_abi".to_owned()));
                }
                Interface { world: 0x4400_0000, byte: 0x4c00_010d, errors_return: 0x5400_0001, funneled: 1 }
            }
        };
        let table = Table {
            init_thread: function!(b"MPI_Init_thread"),
            finalize: function!(b"MPI_Finalize"),
            comm_rank: function!(b"MPI_Comm_rank"),
            comm_size: function!(b"MPI_Comm_size"),
            set_errhandler: function!(b"MPI_Comm_set_errhandler"),
            error_string: function!(b"MPI_Error_string"),
            isend: function!(b"MPI_Isend"),
            irecv: function!(b"MPI_Irecv"),
            test: function!(b"MPI_Test"),
        };
        let get_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int = function!(b"MPI_Get_library_version");
        let mut text = vec![0u8; TEXT];
        let mut length: c_int = 0;
        // SAFETY: the buffer is longer than what any library writes; the function may be called before MPI_Init.
        unsafe { get_version(text.as_mut_ptr().cast(), &mut length) };
        let version = first_line(&text);
        // Never unloaded: its functions are called to the end, and its threads may outlive us.
        std::mem::forget(library);
        Ok(Self { path, version, table, interface })
    }

    /// What an error code means, in the library's words.
    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text = vec![0u8; TEXT];
        let mut length: c_int = 0;
        // SAFETY: the buffer is longer than what any library writes.
        unsafe { (self.table.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        Err(RanksError::Mpi { call, reason: first_line(&text) })
    }
}

/// Ends the process by way of `fail`.
fn end_by(fail: &dyn Fn(String), reason: String) -> ! {
    fail(reason);
    loop {
        // It is ending.
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The first line of a text that C wrote.
fn first_line(text: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(text).unwrap_or_default().to_string_lossy();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

impl Mpi {
    /// Starts the library. It is called once in a process, by the thread that makes all other calls.
    pub(crate) fn start(library: MpiLibrary) -> Result<Self> {
        let Interface { world, errors_return, funneled, .. } = library.interface;
        let (mut provided, mut rank, mut size) = (0, 0, 0);
        // SAFETY: null arguments are allowed since MPI 2; the results are plain integers.
        unsafe {
            let code = (library.table.init_thread)(std::ptr::null_mut(), std::ptr::null_mut(), funneled, &mut provided);
            library.check("MPI_Init_thread", code)?;
            library.check("MPI_Comm_set_errhandler", (library.table.set_errhandler)(world, errors_return))?;
            library.check("MPI_Comm_rank", (library.table.comm_rank)(world, &mut rank))?;
            library.check("MPI_Comm_size", (library.table.comm_size)(world, &mut size))?;
        }
        Ok(Self { library, rank: rank as usize, size: size as usize })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn library(&self) -> &MpiLibrary {
        &self.library
    }

    /// Sends and receives, all at once: with each rank the messages in their order. Returns when all is done, and never otherwise:
    /// where MPI fails or `deadline` has passed, `fail` must end the process, because the library may still write to the slices.
    pub(crate) fn exchange(
        &self,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
        deadline: Duration,
        fail: &dyn Fn(String),
    ) {
        let Interface { world, byte, .. } = self.library.interface;
        let table = &self.library.table;
        let mut requests: Vec<Handle> = Vec::new();
        let ensure = |call, code| {
            if let Err(error) = self.library.check(call, code) {
                end_by(fail, error.to_string())
            }
        };
        for (rank, to) in receives.iter_mut() {
            for piece in to.chunks_mut(MOST) {
                requests.push(0);
                let request = requests.last_mut().map_or(std::ptr::null_mut(), |last| last as *mut Handle);
                // SAFETY: the piece stays borrowed until the request is complete, since this function returns only then.
                let code = unsafe {
                    (table.irecv)(
                        piece.as_mut_ptr().cast(),
                        piece.len() as c_int,
                        byte,
                        *rank as c_int,
                        0,
                        world,
                        request,
                    )
                };
                ensure("MPI_Irecv", code);
            }
        }
        for (rank, from) in sends {
            for piece in from.chunks(MOST) {
                requests.push(0);
                let request = requests.last_mut().map_or(std::ptr::null_mut(), |last| last as *mut Handle);
                // SAFETY: as above.
                let code = unsafe {
                    (table.isend)(piece.as_ptr().cast(), piece.len() as c_int, byte, *rank as c_int, 0, world, request)
                };
                ensure("MPI_Isend", code);
            }
        }
        let (begin, mut idle) = (Instant::now(), 0u32);
        while !requests.is_empty() {
            let before = requests.len();
            requests.retain_mut(|request| {
                let (mut done, mut status) = (0, Status::default());
                // SAFETY: the request is one of those above that was not complete yet, and the status has room for any library's.
                let code = unsafe { (table.test)(request, &mut done, &mut status) };
                ensure("MPI_Test", code);
                done == 0
            });
            if requests.len() < before {
                idle = 0;
                continue;
            }
            if begin.elapsed() > deadline {
                end_by(fail, format!("a transfer was not done after {} s", deadline.as_secs()))
            }
            // Others may need this processor, above all where there are more processes than processors.
            idle += 1;
            match idle {
                ..200 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(u64::from(idle.min(1000)) / 10)),
            }
        }
    }

    /// Ends MPI, when all ranks have come this far.
    pub(crate) fn finish(&self) -> Result<()> {
        // SAFETY: nothing is under way, and no call follows.
        let code = unsafe { (self.library.table.finalize)() };
        self.library.check("MPI_Finalize", code)
    }
}
