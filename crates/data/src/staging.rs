//! A directory that appears whole or not at all, whatever happens while it is written.
//!
//! It is written under a temporary name beside its destination, synced to the disk, and renamed. A process that is killed
//! leaves the temporary directory behind; the next build of the same destination deletes it. One that is still at work
//! holds a lock on it. (`henson-checkpoint` does the same for models, with more cases: a model may be put into a
//! directory that has other files.)

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::DataError;
use crate::manifest::{MANIFEST, TOKENIZER, VOCABULARY};

const TEMPORARY: &str = ".henson-tmp-";
const OLD: &str = ".henson-old";
/// How the names of shards end.
pub(crate) const SHARD: &str = ".shard";

/// A directory that is being written. Dropped before [`publish`](Self::publish), it leaves nothing.
pub(crate) struct Staging {
    destination: PathBuf,
    path: PathBuf,
    /// Keeps others from deleting the directory.
    _lock: File,
    replace: bool,
}

impl Staging {
    /// Begins beside the destination. An empty directory there counts as none.
    pub(crate) fn new(destination: &Path, overwrite: bool) -> Result<Self, DataError> {
        // A rename replaces a link and not what it leads to; `.` and `..` have no name that could be renamed.
        let linked = destination.is_symlink() || destination.file_name().is_none();
        let destination = match linked {
            true => destination.canonicalize().map_err(DataError::io("open", destination))?,
            false => destination.to_owned(),
        };
        let occupied = match fs::read_dir(&destination) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(DataError::io("open", destination)(error)),
        };
        // Refused now, before gigabytes are written; the rename at the end checks once more.
        if occupied && !overwrite {
            return Err(DataError::Exists { path: destination });
        }
        if occupied {
            refuse_foreign(&destination)?;
        }
        let (parent, name) = split(&destination)?;
        fs::create_dir_all(parent).map_err(DataError::io("create", parent))?;
        let prefix = concatenate(".", &name, TEMPORARY);
        sweep(parent, &prefix);
        let (path, lock) = create_locked(parent, &prefix)?;
        Ok(Self { destination, path, _lock: lock, replace: occupied })
    }

    /// Where a file of the new directory is written.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where it will be: the temporary name means nothing to people.
    pub(crate) fn shown(&self, name: &str) -> PathBuf {
        self.destination.join(name)
    }

    /// Writes a small file, with all of its bytes on the disk when this returns.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), DataError> {
        let write = || {
            let path = self.path(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            let mut file = File::create_new(path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(DataError::io("write", self.shown(name)))
    }

    /// Puts the directory, complete and on the disk, at its destination.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        for entry in fs::read_dir(&self.path).map_err(DataError::io("write", &self.destination))?.flatten() {
            if entry.path().is_dir() {
                sync_directory(&entry.path())?;
            }
        }
        sync_directory(&self.path)?;
        let (parent, name) = split(&self.destination)?;
        let io = || DataError::io("write", &self.destination);
        if self.replace && self.destination.exists() {
            match renameat_with(CWD, &self.path, CWD, &self.destination, RenameFlags::EXCHANGE).map_err(io::Error::from)
            {
                // What this drops and deletes is the old directory now.
                Ok(()) => {}
                // Some network file systems cannot exchange; killed in between, the old one is there under its other name.
                Err(error) if is_unsupported(&error) => {
                    let old = parent.join(concatenate(".", &name, OLD));
                    let _ = fs::remove_dir_all(&old);
                    fs::rename(&self.destination, &old).map_err(io())?;
                    if let Err(error) = fs::rename(&self.path, &self.destination) {
                        let _ = fs::rename(&old, &self.destination);
                        return Err(io()(error));
                    }
                    let _ = fs::remove_dir_all(&old);
                }
                Err(error) => return Err(io()(error)),
            }
        } else {
            // A plain rename replaces an empty directory and refuses any other.
            fs::rename(&self.path, &self.destination).map_err(|error| match error.kind() {
                ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                    DataError::Exists { path: self.destination.clone() }
                }
                _ => io()(error),
            })?;
        }
        sync_directory(parent)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Best effort: what cannot be deleted is recognised by its name and deleted by the next build.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Only a corpus is replaced, and only one that nobody put other files into.
fn refuse_foreign(destination: &Path) -> Result<(), DataError> {
    let refuse = |problem: String| DataError::NotReplaced { path: destination.to_owned(), problem };
    if !destination.join(MANIFEST).is_file() {
        return Err(refuse(format!("it has no {MANIFEST}, so it is not a corpus; choose another directory")));
    }
    let mut foreign = Vec::new();
    for entry in fs::read_dir(destination).map_err(DataError::io("read", destination))? {
        let name = entry.map_err(DataError::io("read", destination))?.file_name().to_string_lossy().into_owned();
        if ![MANIFEST, VOCABULARY, TOKENIZER].contains(&name.as_str()) && !name.ends_with(SHARD) {
            foreign.push(name);
        }
    }
    if foreign.is_empty() {
        return Ok(());
    }
    foreign.sort();
    foreign.truncate(8);
    Err(refuse(format!("it holds files that are not a corpus's: {}; move them away first", foreign.join(", "))))
}

/// Makes a new temporary directory and locks it, so that [`sweep`] leaves it alone.
fn create_locked(parent: &Path, prefix: &OsString) -> Result<(PathBuf, File), DataError> {
    // Never the same name twice in a process: whoever deletes his own at the end does not delete another's.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(concatenate("", prefix, &format!("{}-{number}", std::process::id())));
        let file = match fs::create_dir(&path).and_then(|()| File::open(&path)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(DataError::io("write in", parent)(error)),
        };
        match file.try_lock() {
            // A sweep may have come between: then the name is gone.
            Ok(()) if is_at(&file, &path) => return Ok((path, file)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            // A file system without locks: then nothing is ever swept from it either.
            Err(TryLockError::Error(_)) => return Ok((path, file)),
        }
    }
}

/// Deletes what dead processes left: directories with this prefix that nobody holds a lock on. Best effort, since what
/// stays harms nobody.
fn sweep(parent: &Path, prefix: &OsString) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = File::open(&path) else { continue };
        if file.try_lock().is_ok() && is_at(&file, &path) {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Whether the path still leads to the open directory.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

fn sync_directory(path: &Path) -> Result<(), DataError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(DataError::io("write", path))
}

/// The directory that a path lies in, and its name there.
fn split(path: &Path) -> Result<(&Path, OsString), DataError> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if parent.as_os_str().is_empty() => Ok((Path::new("."), name.to_owned())),
        (Some(parent), Some(name)) => Ok((parent, name.to_owned())),
        _ => {
            let source = io::Error::new(ErrorKind::InvalidInput, "the path does not end in a name");
            Err(DataError::io("write", path)(source))
        }
    }
}

fn concatenate(start: &str, name: &OsString, ending: &str) -> OsString {
    let mut result = OsString::from(start);
    result.push(name);
    result.push(ending);
    result
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput)
}
