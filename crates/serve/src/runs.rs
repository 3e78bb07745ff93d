//! Training runs below `--runs DIR`, for live curves: their names, and their logs from a place on. Logs are passed on line by
//! line as they are; what they mean is `henson_train`'s, which a server does not carry.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path as UrlPath, Query, State};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::{Answer, App};
use crate::error::{ApiError, Kind};

const LOG: &str = "metrics.jsonl";

/// The most bytes of a log in one answer; the next request continues from there.
const CHUNK: u64 = 4 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct From {
    #[serde(default)]
    from: u64,
}

/// The directories below DIR that have a log; DIR itself where it is a run.
fn find(directory: &Path) -> Vec<(String, PathBuf)> {
    let mut runs = Vec::new();
    if directory.join(LOG).is_file() {
        let name = directory.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
        runs.push((name, directory.to_owned()));
    }
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.path().join(LOG).is_file() {
            runs.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    runs.sort();
    runs
}

fn directory(app: &App) -> Result<PathBuf, ApiError> {
    let message = "this server shows no runs: start it with --runs DIR";
    app.settings.runs.clone().ok_or_else(|| ApiError::new(Kind::NotFound, message))
}

/// Files are read on a thread where that delays nobody.
async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let broken = |_| ApiError::new(Kind::Backend, "reading the runs failed unexpectedly; this is a bug in henson");
    tokio::task::spawn_blocking(work).await.map_err(broken)?
}

pub(crate) async fn list(State(app): State<App>) -> Result<Answer<Value>, ApiError> {
    let directory = directory(&app)?;
    let runs = blocking(move || {
        let runs = find(&directory).into_iter().filter_map(|(name, path)| {
            let metadata = fs::metadata(path.join(LOG)).ok()?;
            let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let seconds = modified.map(|since| since.as_secs());
            Some(json!({"name": name, "bytes": metadata.len(), "modified": seconds}))
        });
        Ok(runs.collect())
    });
    Ok(Answer { body: runs.await?, tokens: 0, dropped: 0 })
}

pub(crate) async fn log(
    State(app): State<App>,
    UrlPath(run): UrlPath<String>,
    query: Result<Query<From>, QueryRejection>,
) -> Result<Answer<Value>, ApiError> {
    let Query(From { from }) = query.map_err(|error| ApiError::new(Kind::Syntax, error.body_text()))?;
    let directory = directory(&app)?;
    let body = blocking(move || {
        // Only what was found is opened: a name never leads elsewhere.
        let runs = find(&directory);
        let Some((_, path)) = runs.iter().find(|(name, _)| *name == run) else {
            let names: Vec<&str> = runs.iter().map(|(name, _)| name.as_str()).collect();
            return Err(ApiError::new(
                Kind::NotFound,
                format!("there is no run {run:?}; there are: {}", names.join(", ")),
            ));
        };
        let unreadable = |error: std::io::Error| ApiError::new(Kind::Backend, format!("cannot read the log: {error}"));
        let (lines, from, next) = read(&path.join(LOG), from).map_err(unreadable)?;
        Ok(json!({"name": run, "from": from, "next": next, "lines": lines}))
    });
    Ok(Answer { body: body.await?, tokens: 0, dropped: 0 })
}

/// Whole lines from a byte on (without those that are longer than a chunk), the byte that they begin at and the one after the last of them. A log that was cut back since (a
/// run that resumed from an earlier checkpoint) is read from its beginning: `next` is then below what the caller knows.
fn read(path: &Path, from: u64) -> std::io::Result<(Vec<Value>, u64, u64)> {
    let mut file = File::open(path)?;
    let from = if from > file.metadata()?.len() { 0 } else { from };
    file.seek(SeekFrom::Start(from))?;
    let (mut bytes, mut skipped) = (Vec::new(), 0);
    loop {
        let read = (&mut file).take(CHUNK).read_to_end(&mut bytes)? as u64;
        if let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') {
            bytes.truncate(end + 1);
            break;
        }
        // A line without an end so far: it is still being written, or longer than any that is shown, and then what
        // follows it counts.
        if read < CHUNK {
            return Ok((Vec::new(), from, from));
        }
        skipped += read;
        bytes.clear();
    }
    let next = from + skipped + bytes.len() as u64;
    let mut lines = bytes.split(|byte| *byte == b'\n');
    if skipped > 0 {
        lines.next();
    }
    Ok((lines.filter_map(|line| serde_json::from_slice(line).ok()).collect(), from, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_read_in_whole_lines() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join(LOG);
        fs::write(&path, "{\"step\": 1}\n{\"step\": 2}\n{\"ste").unwrap();
        let (lines, from, next) = read(&path, 0).unwrap();
        assert_eq!((lines.len(), from, next), (2, 0, 24));
        fs::write(&path, "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3}\n").unwrap();
        assert_eq!(read(&path, next).unwrap(), (vec![json!({"step": 3})], 24, 36));
        // Cut back: from the beginning again.
        fs::write(&path, "{\"step\": 9}\n").unwrap();
        assert_eq!(read(&path, 36).unwrap(), (vec![json!({"step": 9})], 0, 12));
    }

    #[test]
    fn a_line_without_measure_hides_no_later_one() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join(LOG);
        let long = format!("{{\"samples\": \"{}\"}}\n", "a".repeat(2 * CHUNK as usize + 17));
        fs::write(&path, format!("{{\"step\": 1}}\n{long}{{\"step\": 2}}\n{{\"step\": 3}}\n")).unwrap();
        let (mut from, mut steps, mut polls) = (0, Vec::new(), 0);
        while polls < 5 {
            let (lines, _, next) = read(&path, from).unwrap();
            steps.extend(lines.iter().map(|line| line["step"].as_u64().unwrap()));
            (from, polls) = (next, polls + 1);
        }
        assert_eq!((steps, from), (vec![1, 2, 3], fs::metadata(&path).unwrap().len()));
        // Its end alone is not taken for a line.
        let wide = format!("{}{{\"step\": 9}}\n", " ".repeat(2 * CHUNK as usize));
        fs::write(&path, format!("{wide}{{\"step\": 2}}\n")).unwrap();
        assert_eq!(read(&path, 0).unwrap().0, [json!({"step": 2})]);
        // One that is still being written is waited for.
        fs::write(&path, &long[..long.len() - 1]).unwrap();
        assert_eq!(read(&path, 0).unwrap(), (vec![], 0, 0));
        fs::write(&path, &long).unwrap();
        assert_eq!(read(&path, 0).unwrap(), (vec![], 0, long.len() as u64));
    }

    #[test]
    fn runs_are_directories_with_a_log() {
        let directory = tempfile::TempDir::new().unwrap();
        for name in ["b", "a", "none"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        for name in ["a", "b"] {
            fs::write(directory.path().join(name).join(LOG), "").unwrap();
        }
        let names: Vec<String> = find(directory.path()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
