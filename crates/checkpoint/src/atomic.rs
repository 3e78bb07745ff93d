//! Files and directories that appear whole or not at all, whatever happens while they are written.
//!
//! Everything is written under a temporary name on the same file system, synced to the disk, and then renamed. What a
//! killed process leaves behind, and who deals with it:
//!
//! | left behind | meaning | next save | next open |
//! |---|---|---|---|
//! | `.NAME.henson-tmp-…` beside NAME, `.henson-tmp-…` inside | unfinished, or an old one that was replaced | deleted | – |
//! | `.NAME.henson-old`, and no NAME | killed between two renames | renamed back | renamed back |
//! | `.NAME.henson-old`, and NAME | an old one that was replaced | deleted | – |
//! | `.henson-commit` inside NAME | finished files that were being moved into NAME | moved in | moved in |
//!
//! Linux and macOS exchange two directories in one call, so that the second row needs a file system that cannot (some
//! network ones). A process that is still at work holds a lock on what it writes: nobody deletes that.
//!
//! Deliberately not here: what the files contain.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::directory::read_json;
use crate::sums::{Summed, Sums};

const TEMPORARY: &str = ".henson-tmp-";
const OLD: &str = ".henson-old";
const COMMIT: &str = ".henson-commit";
const MANIFEST: &str = "manifest.json";

/// The largest manifest that is read.
const MANIFEST_LIMIT: u64 = 16 << 20;

/// How long to wait for another process that is between two renames.
const PATIENCE: Duration = Duration::from_secs(2);

/// What to do when the destination of a save is there already. An empty directory counts as not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// Refuse: nothing is ever overwritten unasked.
    #[default]
    Refuse,
    /// Put the new directory in its place; at every moment the old or the new one is there, complete. Refused if the
    /// old one holds files that are not a model's.
    Replace,
    /// Put the new files into it and leave all others, as for a run's directory with its logs and checkpoints beside
    /// the model. Killed on the way, the next open or save finishes it.
    Merge,
}

/// Writes a file such that at every moment the old or the new one is there, complete.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let path = &resolve_link(path)?;
    let old = fs::metadata(path).ok();
    if old.as_ref().is_some_and(|old| !old.is_file() && !old.is_dir()) {
        // A pipe or a device is written to: a file in its place would not be what its owner wants.
        let mut file = File::options().write(true).open(path).map_err(CheckpointError::io("open", path))?;
        return file.write_all(bytes).map_err(CheckpointError::io("write", path));
    }
    let (parent, name) = split(path)?;
    let prefix = temporary_prefix(name);
    sweep(parent, begins_with(&prefix));
    let (temporary, mut file) = create_locked(parent, &prefix, Kind::File)?;
    let permissions = old.map_or(Ok(()), |old| file.set_permissions(old.permissions()));
    let written = permissions.and_then(|()| file.write_all(bytes)).and_then(|()| file.sync_all());
    let result = written
        .map_err(CheckpointError::io("write", path))
        .and_then(|()| fs::rename(&temporary, path).map_err(CheckpointError::io("write", path)))
        .and_then(|()| sync_directory(parent));
    if result.is_err() {
        // After a successful rename there is nothing left to remove.
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Whether a file or directory of this name is an unfinished one of ours, which a killed process may leave behind.
pub fn is_temporary(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.windows(TEMPORARY.len()).any(|part| part == TEMPORARY.as_bytes())
}

/// Deletes the unfinished files that dead processes left in a directory; those of living ones stay.
pub fn remove_temporaries(directory: &Path) {
    sweep(directory, is_temporary);
}

/// Finishes or takes back what a killed process left at `directory`; see the table above.
pub(crate) fn recover(directory: &Path) -> Result<(), CheckpointError> {
    if is_there(&directory.join(COMMIT))? {
        let Some(_lock) = lock_patiently(&directory.join(COMMIT))? else { return Ok(()) };
        return roll_forward(directory);
    }
    if is_there(directory)? {
        return Ok(());
    }
    let Ok((parent, name)) = split(directory) else { return Ok(()) };
    let old = parent.join(old_name(name));
    if !old.is_dir() {
        return Ok(());
    }
    // While a living process is between its two renames it holds this lock; afterwards the directory is there.
    let Some(_lock) = lock_patiently(&old)? else { return Ok(()) };
    if !is_there(directory)? && old.is_dir() {
        fs::rename(&old, directory).map_err(CheckpointError::io("restore", directory))?;
        sync_directory(parent)?;
    }
    Ok(())
}

/// A directory that is being written and will appear at its destination whole, or not at all: dropped before
/// [`Staging::publish`] it leaves nothing.
pub(crate) struct Staging {
    destination: PathBuf,
    existing: Existing,
    /// Whether the destination is there and files are moved into it.
    inside: bool,
    path: PathBuf,
    /// Keeps others from deleting the directory.
    _lock: File,
    files: Vec<String>,
    subdirectories: BTreeSet<PathBuf>,
    sums: Sums,
}

impl Staging {
    /// Begins beside (to merge: inside) the destination. `is_ours` says which names in the old directory may go when it
    /// is replaced.
    pub(crate) fn new(
        destination: &Path,
        existing: Existing,
        is_ours: impl Fn(&str) -> bool,
    ) -> Result<Self, CheckpointError> {
        recover(destination)?;
        let destination = resolve_link(destination)?;
        let occupied = match fs::symlink_metadata(&destination) {
            Ok(metadata) if metadata.is_dir() => !is_empty(&destination)?,
            Ok(_) => return Err(CheckpointError::NotADirectory { path: destination }),
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(CheckpointError::io("open", destination)(error)),
        };
        // Refused now, before gigabytes are written; the rename at the end checks once more.
        if occupied && existing == Existing::Refuse {
            return Err(CheckpointError::Exists { path: destination });
        }
        if occupied && existing == Existing::Replace {
            refuse_foreign(&destination, is_ours)?;
        }
        let inside = occupied && existing == Existing::Merge;
        let (path, lock) = if inside {
            sweep(&destination, begins_with(OsStr::new(TEMPORARY)));
            create_locked(&destination, OsStr::new(TEMPORARY), Kind::Directory)?
        } else {
            let (parent, name) = split(&destination)?;
            fs::create_dir_all(parent).map_err(CheckpointError::io("create", parent))?;
            let prefix = temporary_prefix(name);
            sweep(parent, begins_with(&prefix));
            if occupied {
                // Left by a replacement that was killed, or could not delete it: the destination is complete.
                sweep(parent, begins_with(&old_name(name)));
            }
            create_locked(parent, &prefix, Kind::Directory)?
        };
        let (files, subdirectories, sums) = (Vec::new(), BTreeSet::new(), Sums::default());
        Ok(Self { destination, existing, inside, path, _lock: lock, files, subdirectories, sums })
    }

    /// Writes a file of the new directory, with all of its bytes on the disk when this returns. Its name may have
    /// directories in it; [`is_plain`] must hold for it.
    pub(crate) fn write<R>(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write, &dyn Fn(io::Error) -> CheckpointError) -> Result<R, CheckpointError>,
    ) -> Result<R, CheckpointError> {
        debug_assert!(is_plain(name), "{name}");
        let path = self.path.join(name);
        // The error names where the file should have gone: the temporary name means nothing to the caller.
        let shown = self.destination.join(name);
        let io = |source| CheckpointError::Io { action: "write", path: shown.clone(), source };
        for parent in Path::new(name).ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            self.subdirectories.insert(parent.to_owned());
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io)?;
        }
        let mut out = Summed::new(BufWriter::with_capacity(1 << 16, File::create_new(&path).map_err(io)?));
        let result = write(&mut out, &io)?;
        out.flush().map_err(io)?;
        out.out.get_ref().sync_all().map_err(io)?;
        self.files.push(name.to_owned());
        self.sums.insert(name, &out.hash);
        Ok(result)
    }

    /// The checksums of all files that were written so far.
    pub(crate) fn sums(&self) -> &Sums {
        &self.sums
    }

    /// Puts the directory, complete and on the disk, at its destination.
    pub(crate) fn publish(mut self) -> Result<(), CheckpointError> {
        if self.inside {
            let manifest = Manifest { files: self.files.clone() };
            self.write(MANIFEST, |out, io| serde_json::to_writer(out, &manifest).map_err(|error| io(error.into())))?;
        }
        for subdirectory in &self.subdirectories {
            sync_directory(&self.path.join(subdirectory))?;
        }
        sync_directory(&self.path)?;
        if self.inside {
            let commit = self.destination.join(COMMIT);
            fs::rename(&self.path, &commit).map_err(CheckpointError::io("write", &self.destination))?;
            sync_directory(&self.destination)?;
            return roll_forward(&self.destination);
        }
        let (parent, name) = split(&self.destination)?;
        let moved = match self.existing {
            Existing::Replace if self.destination.exists() => match exchange(&self.path, &self.destination) {
                // What this drops and deletes is the old directory now.
                Some(result) => result.map_err(CheckpointError::io("replace", &self.destination)),
                None => replace(&self.path, &self.destination, &parent.join(old_name(name))),
            },
            _ => move_in(&self.path, &self.destination),
        };
        moved.and_then(|()| sync_directory(parent))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Best effort: what cannot be deleted is recognised by its name and deleted by the next save.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Whether a name stays within the directory that it is joined to, and is none of ours.
pub(crate) fn is_plain(name: &str) -> bool {
    let path = Path::new(name);
    !name.is_empty()
        && !name.contains(['\\', '\0'])
        && path.components().all(|part| matches!(part, Component::Normal(_)))
        && !name.starts_with(TEMPORARY)
        && !name.starts_with(COMMIT)
        // `a//b`, `a/./b` and `a/` would be other names of the same file.
        && path.components().collect::<PathBuf>().as_os_str() == name
}

/// Whether a file of this name holds a model's weights: such a file must not outlive the save of other weights.
pub(crate) fn is_weights(name: &str) -> bool {
    let shard = |name: &str| name.starts_with("model-") && name.contains("-of-") && name.ends_with(".safetensors");
    name == "model.safetensors" || name == "model.safetensors.index.json" || shard(name)
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    files: Vec<String>,
}

/// Moves finished files into the directory that holds them. May be interrupted and begun again at any point.
fn roll_forward(directory: &Path) -> Result<(), CheckpointError> {
    let commit = directory.join(COMMIT);
    let io = || CheckpointError::io("finish the save of", directory);
    let manifest = commit.join(MANIFEST);
    // Where it cannot be known, nothing is deleted: the files may not have been moved yet.
    if is_there(&manifest)? {
        let Manifest { files } = read_json(&manifest, MANIFEST_LIMIT)?;
        for name in files.iter().filter(|name| name.as_str() != MANIFEST) {
            // A directory comes from strangers, its manifest too.
            if !is_plain(name) {
                return Err(CheckpointError::FileName { name: name.clone(), problem: "it leaves the directory" });
            }
            let (from, to) = (commit.join(name), directory.join(name));
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(io())?;
            }
            match fs::rename(&from, &to) {
                Err(error) if error.kind() == ErrorKind::NotFound && to.exists() => {}
                result => result.map_err(io())?,
            }
            if let Some(parent) = to.parent().filter(|parent| *parent != directory) {
                sync_directory(parent)?;
            }
        }
        for entry in fs::read_dir(directory).map_err(io())? {
            let name = entry.map_err(io())?.file_name();
            if let Some(name) = name.to_str().filter(|name| is_weights(name))
                && !files.iter().any(|file| file == name)
            {
                fs::remove_file(directory.join(name)).map_err(io())?;
            }
        }
        sync_directory(directory)?;
        // From here on there is nothing to do again.
        fs::remove_file(&manifest).map_err(io())?;
    }
    fs::remove_dir_all(&commit).map_err(io())
}

/// Moves a finished directory to where nothing, or an empty directory, is.
fn move_in(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    let exists = || CheckpointError::Exists { path: to.to_owned() };
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(io::Error::from) {
        Ok(()) => return Ok(()),
        // A plain rename replaces an empty directory and refuses any other.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && to.is_dir() => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(exists()),
        Err(error) if is_unsupported(&error) => {}
        Err(error) => return Err(CheckpointError::io("write", to)(error)),
    }
    fs::rename(from, to).map_err(|error| match error.kind() {
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => exists(),
        _ => CheckpointError::io("write", to)(error),
    })
}

/// Exchanges two directories in one call; `None` where the system cannot.
fn exchange(a: &Path, b: &Path) -> Option<io::Result<()>> {
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(io::Error::from) {
        Err(error) if is_unsupported(&error) => None,
        result => Some(result),
    }
}

/// What [`exchange`] does, in two renames: killed between them, [`recover`] takes the first back.
fn replace(new: &Path, destination: &Path, old: &Path) -> Result<(), CheckpointError> {
    let lock = move_aside(destination, old)?;
    if let Err(error) = fs::rename(new, destination) {
        // If even this fails, the next open or save does it.
        let _ = fs::rename(old, destination);
        return Err(CheckpointError::io("replace", destination)(error));
    }
    drop(lock);
    // Best effort: the next save tries again.
    let _ = fs::remove_dir_all(old);
    Ok(())
}

/// The first half of [`replace`]. The lock says that the second half is to come.
fn move_aside(destination: &Path, old: &Path) -> Result<File, CheckpointError> {
    let io = || CheckpointError::io("replace", destination);
    let lock = File::open(destination).map_err(io())?;
    if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
        return Err(CheckpointError::Busy { path: destination.to_owned() });
    }
    fs::rename(destination, old).map_err(io())?;
    Ok(lock)
}

fn refuse_foreign(destination: &Path, is_ours: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
    let io = || CheckpointError::io("read", destination);
    let mut names = Vec::new();
    for entry in fs::read_dir(destination).map_err(io())? {
        let name = entry.map_err(io())?.file_name();
        if !name.to_str().is_some_and(|name| is_ours(name) || name.starts_with(TEMPORARY)) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    if names.is_empty() {
        return Ok(());
    }
    names.sort();
    names.truncate(8);
    Err(CheckpointError::ForeignFiles { path: destination.to_owned(), names })
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    File,
    Directory,
}

/// Makes a new temporary file or directory and locks it, so that [`sweep`] leaves it alone.
fn create_locked(parent: &Path, prefix: &OsStr, kind: Kind) -> Result<(PathBuf, File), CheckpointError> {
    // Never the same name twice in a process: whoever deletes his own at the end does not delete another's.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    for _ in 0..u16::MAX {
        let mut name = prefix.to_owned();
        name.push(format!("{process}-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let path = parent.join(name);
        let created = match kind {
            Kind::File => File::create_new(&path),
            Kind::Directory => fs::create_dir(&path).and_then(|()| File::open(&path)),
        };
        let file = match created {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(CheckpointError::io("write in", parent)(error)),
        };
        match file.try_lock() {
            // A sweep may have come between: then the name is gone, or leads elsewhere.
            Ok(()) => match is_at(&file, &path) {
                Ok(true) => return Ok((path, file)),
                Ok(false) => {}
                Err(error) => {
                    // Best effort, as in [`Staging`]'s drop.
                    let _ = if kind == Kind::Directory { fs::remove_dir(&path) } else { fs::remove_file(&path) };
                    return Err(CheckpointError::io("write in", parent)(error));
                }
            },
            Err(TryLockError::WouldBlock) => {}
            // A file system without locks: then nothing is ever swept from it either.
            Err(TryLockError::Error(_)) => return Ok((path, file)),
        }
    }
    Err(CheckpointError::Busy { path: parent.to_owned() })
}

fn begins_with(prefix: &OsStr) -> impl Fn(&OsStr) -> bool {
    |name| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes())
}

/// Deletes what dead processes left: of the names that are meant, those that nobody holds a lock on. Best effort, since
/// what stays harms nobody.
fn sweep(parent: &Path, is_meant: impl Fn(&OsStr) -> bool) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Ok(kind) = entry.file_type() else { continue };
        if !is_meant(&name) || !(kind.is_dir() || kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = File::open(&path) else { continue };
        if file.try_lock().is_ok() && is_at(&file, &path).unwrap_or(false) {
            let _ = if kind.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    }
}

/// Waits for a lock on a directory; `None` if the directory goes away meanwhile.
fn lock_patiently(path: &Path) -> Result<Option<File>, CheckpointError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CheckpointError::io("open", path)(error)),
    };
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => {
                let same = is_at(&file, path).map_err(CheckpointError::io("open", path))?;
                return Ok(same.then_some(file));
            }
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => std::thread::sleep(PATIENCE / 100),
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { path: path.to_owned() }),
            // A file system without locks: nobody can hold one.
            Err(TryLockError::Error(_)) => return Ok(Some(file)),
        }
    }
}

/// Whether the path still leads to the open file or directory.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((open.dev(), open.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether there is something of this name. `Path::exists` says no where it cannot find out, and what follows a no here
/// deletes files.
fn is_there(path: &Path) -> Result<bool, CheckpointError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(CheckpointError::io("open", path)(error)),
    }
}

/// A rename replaces a link and not what it leads to, so that links are followed first.
fn resolve_link(path: &Path) -> Result<PathBuf, CheckpointError> {
    match fs::symlink_metadata(path) {
        // `.` and `..` have no name that could be renamed either.
        Ok(metadata) if metadata.is_symlink() || path.file_name().is_none() => {
            path.canonicalize().map_err(CheckpointError::io("open", path))
        }
        _ => Ok(path.to_owned()),
    }
}

/// The directory that a path lies in, and its name there.
fn split(path: &Path) -> Result<(&Path, &OsStr), CheckpointError> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if parent.as_os_str().is_empty() => Ok((Path::new("."), name)),
        (Some(parent), Some(name)) => Ok((parent, name)),
        _ => Err(CheckpointError::Io {
            action: "write",
            path: path.to_owned(),
            source: io::Error::new(ErrorKind::InvalidInput, "the path does not end in a name"),
        }),
    }
}

fn temporary_prefix(name: &OsStr) -> OsString {
    concatenate(name, TEMPORARY)
}

fn old_name(name: &OsStr) -> OsString {
    concatenate(name, OLD)
}

fn concatenate(name: &OsStr, ending: &str) -> OsString {
    let mut result = OsString::from(".");
    result.push(name);
    result.push(ending);
    result
}

fn is_empty(directory: &Path) -> Result<bool, CheckpointError> {
    Ok(fs::read_dir(directory).map_err(CheckpointError::io("read", directory))?.next().is_none())
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput)
}

fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(CheckpointError::io("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: PathBuf, content: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    /// Where the system cannot exchange directories, two renames do it.
    #[test]
    fn replaced_by_two_renames() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        write(path("out/a"), "old");
        write(path("new/a"), "new");
        replace(&path("new"), &path("out"), &path(".out.henson-old")).unwrap();
        assert_eq!(read(path("out/a")), "new");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        // The second rename fails: the first is taken back.
        assert!(replace(&path("none"), &path("out"), &path(".out.henson-old")).is_err());
        assert_eq!(read(path("out/a")), "new");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }

    #[test]
    fn killed_between_two_renames() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        write(path("out/a"), "old");
        write(path(".out.henson-tmp-1-0/a"), "new");
        let lock = move_aside(&path("out"), &path(".out.henson-old")).unwrap();
        assert!(!path("out").exists());
        // While the other process lives, its second rename is waited for.
        assert!(matches!(recover(&path("out")), Err(CheckpointError::Busy { .. })));
        drop(lock);
        recover(&path("out")).unwrap();
        assert_eq!(read(path("out/a")), "old");
        // A save does the same before anything else, and clears what is left.
        drop(move_aside(&path("out"), &path(".out.henson-old")).unwrap());
        let refused = Staging::new(&path("out"), Existing::Refuse, |_| true);
        assert!(matches!(refused, Err(CheckpointError::Exists { .. })));
        write(path(".out.henson-old/a"), "older");
        drop(Staging::new(&path("out"), Existing::Replace, |_| true).unwrap());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        assert_eq!(read(path("out/a")), "old");
        // What was never there is no concern.
        recover(&path("none")).unwrap();
        recover(Path::new("/")).unwrap();
    }

    /// Killed after each step of moving files in: the next open continues from there.
    #[test]
    fn killed_while_merging() {
        const NAMES: [&str; 3] = ["config.json", "1_Pooling/config.json", "model.safetensors"];
        for moved in 0..=NAMES.len() {
            let parent = tempfile::tempdir().unwrap();
            let path = |name: &str| parent.path().join(name);
            write(path("model-00001-of-00002.safetensors"), "old");
            write(path("model.safetensors.index.json"), "old");
            write(path("config.json"), "old");
            write(path("log"), "old");
            for (i, name) in NAMES.into_iter().enumerate() {
                write(if i < moved { path(name) } else { path(COMMIT).join(name) }, "new");
            }
            write(
                path(COMMIT).join(MANIFEST),
                &serde_json::to_string(&Manifest { files: NAMES.map(str::to_owned).into() }).unwrap(),
            );
            recover(parent.path()).unwrap();
            assert!(NAMES.iter().all(|name| read(path(name)) == "new"));
            let mut left: Vec<_> =
                fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            left.sort();
            assert_eq!(left, ["1_Pooling", "config.json", "log", "model.safetensors"]);
        }
    }

    /// A save that waits to be finished is not taken for a finished one where its manifest cannot be read.
    #[test]
    fn files_are_kept_where_it_is_unknown_whether_they_were_moved() {
        let parent = tempfile::tempdir().unwrap();
        let commit = parent.path().join(COMMIT);
        write(commit.join("model.safetensors"), "new");
        std::os::unix::fs::symlink(MANIFEST, commit.join(MANIFEST)).unwrap();
        assert!(recover(parent.path()).is_err());
        assert_eq!(read(commit.join("model.safetensors")), "new");
    }

    /// A manifest from elsewhere cannot reach out of its directory.
    #[test]
    fn manifests_are_not_trusted() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        write(path("secret"), "mine");
        write(path("out/.henson-commit/x"), "theirs");
        for manifest in [r#"{"files":["../secret"]}"#, r#"{"files":["/x"]}"#, "{", r#"{"files":["none"]}"#] {
            write(path("out/.henson-commit/manifest.json"), manifest);
            assert!(recover(&path("out")).is_err());
        }
        assert_eq!(read(path("secret")), "mine");
        // Without one the files have all been moved.
        fs::remove_file(path("out/.henson-commit/manifest.json")).unwrap();
        recover(&path("out")).unwrap();
        assert_eq!(fs::read_dir(path("out")).unwrap().count(), 0);
    }
}
