//! Kernel sources to machine code, by NVRTC, with a cache on disk. Needs no GPU: sources can be checked anywhere.
//!
//! The sources include nothing but headers of our own, which travel in the binary, so no CUDA headers are needed.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys;

use super::error::{CudaError, Result};
use super::library::{Library, Search};

/// A CUDA source in the binary. It is compiled once for each variant that is used: definitions such as `STORE=bf16`, joined
/// by spaces, so that a run compiles what it needs and nothing else.
#[derive(Debug)]
pub struct Source {
    /// The file, for messages.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// All variants: each item is a list of axes, and every choice of one definition from each axis is a variant. An item
    /// without axes is the source as it is.
    pub variants: &'static [&'static [&'static [&'static str]]],
}

impl Source {
    /// All variants, to compile them ahead.
    pub fn all_variants(&self) -> Vec<String> {
        let mut all = Vec::new();
        for axes in self.variants {
            let mut some = vec![String::new()];
            for axis in *axes {
                let join =
                    |start: &String, end: &&str| format!("{start}{}{end}", if start.is_empty() { "" } else { " " });
                some = some.iter().flat_map(|start| axis.iter().map(move |end| join(start, end))).collect();
            }
            all.extend(some);
        }
        all
    }
}

/// What sources may include.
const HEADERS: [(&str, &str); 2] =
    [("common.cuh", include_str!("kernels/common.cuh")), ("activation.cuh", include_str!("kernels/activation.cuh"))];

/// A target such as `sm_80` or `sm_90a`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture(String);

impl Architecture {
    /// The target for a compute capability. Hopper's own instructions need the `a`.
    pub fn of(major: i32, minor: i32) -> Self {
        let own = if (major, minor) == (9, 0) { "a" } else { "" };
        Self(format!("sm_{major}{minor}{own}"))
    }

    /// As NVRTC writes it.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// The compiler, loaded.
#[derive(Debug)]
pub struct Compiler {
    version: (i32, i32),
    /// Where machine code is kept; none: nowhere.
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Loads NVRTC. Machine code is kept in `cache`, where given.
    pub fn new(search: &Search, cache: Option<PathBuf>) -> Result<Self> {
        search.load(Library::Compiler)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is loaded, and both places can be written.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        Ok(Self { version: (major, minor), cache })
    }

    /// Where machine code is kept.
    pub(crate) fn cache(&self) -> Option<&Path> {
        self.cache.as_deref()
    }

    /// The compiler's version.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The targets that it knows.
    pub fn architectures(&self) -> Vec<Architecture> {
        let mut count = 0;
        // SAFETY: the library is loaded; the second call gets room for as many as the first one told.
        let numbers = unsafe {
            sys::nvrtcGetNumSupportedArchs(&mut count);
            let mut numbers = vec![0; count.max(0) as usize];
            sys::nvrtcGetSupportedArchs(numbers.as_mut_ptr());
            numbers
        };
        numbers.into_iter().map(|n| Architecture::of(n / 10, n % 10)).collect()
    }

    /// Machine code of a variant of a source: from the cache, or compiled and put there.
    pub fn machine_code(&self, source: &Source, variant: &str, architecture: &Architecture) -> Result<Vec<u8>> {
        let path = self.cache.as_ref().map(|directory| directory.join(self.file_name(source, variant, architecture)));
        if let Some(code) = path.as_deref().and_then(read_cached) {
            return Ok(code);
        }
        let (code, _) = self.compile(source, variant, architecture, &[])?;
        if let Some(path) = path {
            // A cache that cannot be written costs time and nothing else.
            let _ = write_cached(&path, &code);
        }
        Ok(code)
    }

    /// What the assembler says about each kernel of a source: registers, shared memory, what did not fit.
    pub fn resources(&self, source: &Source, variant: &str, architecture: &Architecture) -> Result<String> {
        self.compile(source, variant, architecture, &["--ptxas-options=--verbose"]).map(|(_, log)| log)
    }

    /// Forgets the cached machine code of a source: the driver refused it.
    pub fn forget(&self, source: &Source, variant: &str, architecture: &Architecture) {
        if let Some(directory) = &self.cache {
            let _ = std::fs::remove_file(directory.join(self.file_name(source, variant, architecture)));
        }
    }

    fn file_name(&self, source: &Source, variant: &str, architecture: &Architecture) -> String {
        let options = options(variant, architecture).join(" ");
        let key = fnv128(&[source.text, HEADERS[0].1, HEADERS[1].1, &options, &self.version()]);
        let stem = source.name.trim_end_matches(".cu");
        format!("{stem}-{}-{key:032x}.cubin", architecture.name())
    }

    fn compile(
        &self,
        source: &Source,
        variant: &str,
        architecture: &Architecture,
        more: &[&str],
    ) -> Result<(Vec<u8>, String)> {
        let error = |log: String| CudaError::Compile {
            source_name: source.name,
            variant: variant.into(),
            architecture: architecture.name().into(),
            version: self.version(),
            log,
        };
        let text = |s: &str| CString::new(s).map_err(|_| error("the source contains a zero byte".into()));
        let (program_text, program_name) = (text(source.text)?, text(source.name)?);
        let header_names = HEADERS.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let header_texts = HEADERS.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>>>()?;
        let options = options(variant, architecture);
        let all = options.iter().map(String::as_str).chain(more.iter().copied());
        let options: Vec<CString> = all.map(text).collect::<Result<_>>()?;
        let option_pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the library is loaded; all strings end with a zero and outlive the program, which is destroyed below.
        unsafe {
            let mut program = ptr::null_mut();
            let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
            let (texts, names) = (pointers(&header_texts), pointers(&header_names));
            let status = sys::nvrtcCreateProgram(
                &mut program,
                program_text.as_ptr(),
                program_name.as_ptr(),
                texts.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            );
            status.result().map_err(|e| error(format!("no program: {e}")))?;
            let status = sys::nvrtcCompileProgram(program, option_pointers.len() as i32, option_pointers.as_ptr());
            let outcome = match status.result() {
                Ok(()) => match machine_code(program) {
                    Ok(code) => Ok((code, log(program))),
                    Err(e) => Err(error(format!("no machine code: {e}"))),
                },
                Err(status) => Err(error(format!("{status}\n{}", log(program)))),
            };
            sys::nvrtcDestroyProgram(&mut program);
            outcome
        }
    }
}

fn options(variant: &str, architecture: &Architecture) -> Vec<String> {
    let target = format!("--gpu-architecture={}", architecture.name());
    let plain = [target, "--std=c++17".into(), "--device-as-default-execution-space".into()];
    plain.into_iter().chain(variant.split_whitespace().map(|definition| format!("-D{definition}"))).collect()
}

/// # Safety
/// The program was compiled with success.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, cudarc::nvrtc::result::NvrtcError> {
    let mut size = 0;
    // SAFETY: as above; the code has the size that the compiler tells.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut size).result()?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}

/// # Safety
/// The program was handed to the compiler.
unsafe fn log(program: sys::nvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: as above; the log has the size that the compiler tells.
    unsafe {
        if sys::nvrtcGetProgramLogSize(program, &mut size).result().is_err() {
            return String::new();
        }
        let mut log = vec![0u8; size];
        if sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast()).result().is_err() {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
    }
}

/// A cached file, if it is whole: machine code is an ELF file.
fn read_cached(path: &Path) -> Option<Vec<u8>> {
    std::fs::read(path).ok().filter(|code| code.starts_with(b"\x7fELF"))
}

fn write_cached(path: &Path, code: &[u8]) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    // Under a name of its own first: another process may compile the same.
    let temporary = path.with_extension(format!("{}.partial", std::process::id()));
    std::fs::write(&temporary, code)?;
    std::fs::rename(&temporary, path)
}

/// FNV-1a with 128 bits over strings and their lengths: a name for a file, not a defence against anyone.
fn fnv128(parts: &[&str]) -> u128 {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    let mut add = |byte: u8| hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    for part in parts {
        part.bytes().chain((part.len() as u64).to_le_bytes()).for_each(&mut add);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_fnv_and_differ_by_borders() {
        // The empty string's hash is the offset basis folded with its length of eight zero bytes: fixed for all time.
        assert_eq!(fnv128(&[]), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_ne!(fnv128(&["ab", "c"]), fnv128(&["a", "bc"]));
        assert_ne!(fnv128(&["ab"]), fnv128(&["ab", ""]));
    }

    #[test]
    fn variants_are_all_choices() {
        let source = Source { name: "", text: "", variants: &[&[&["A=1", "A=2"], &["B=1", "B=2"]], &[], &[&["C"]]] };
        assert_eq!(source.all_variants(), ["A=1 B=1", "A=1 B=2", "A=2 B=1", "A=2 B=2", "", "C"]);
    }

    #[test]
    fn targets_follow_the_capability() {
        assert_eq!(Architecture::of(8, 0).name(), "sm_80");
        assert_eq!(Architecture::of(9, 0).name(), "sm_90a");
        assert_eq!(Architecture::of(10, 0).name(), "sm_100");
    }

    #[test]
    fn torn_files_are_not_taken_from_the_cache() {
        let path = std::env::temp_dir().join(format!("henson-cubin-{}", std::process::id()));
        write_cached(&path, b"\x7fELFrest").unwrap();
        assert_eq!(read_cached(&path).as_deref(), Some(&b"\x7fELFrest"[..]));
        write_cached(&path, b"").unwrap();
        assert_eq!(read_cached(&path), None);
        std::fs::remove_file(&path).unwrap();
    }
}
