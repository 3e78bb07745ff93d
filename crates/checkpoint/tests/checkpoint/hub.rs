//! Finding models, and fetching them from a hub on a local port.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use henson_checkpoint::{CheckpointError, DownloadProgress, Hub, Weights, resolve_model};

use crate::{golden, ones, safetensors};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file that the server has.
#[derive(Clone, Default)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// What Content-Length says, where it is not the body's; `Some(None)` if there is none.
    length: Option<Option<usize>>,
}

fn file(body: impl Into<Vec<u8>>) -> Answer {
    Answer { status: 200, headers: vec![("X-Repo-Commit".into(), COMMIT.into())], body: body.into(), length: None }
}

fn redirect(location: &str) -> Answer {
    Answer { status: 302, headers: vec![("Location".into(), location.into())], ..Answer::default() }
}

/// The path of a request, with its token.
type Request = (String, Option<String>);

/// A server that lives as long as the test's process.
struct Server {
    endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(answers: impl IntoIterator<Item = (&'static str, Answer)>) -> Self {
        let answers: BTreeMap<String, Answer> =
            answers.into_iter().map(|(path, answer)| (path.to_owned(), answer)).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // A client that has gone away is no fault of the server's.
                let _ = answer(stream, &answers, &seen);
            }
        });
        Self { endpoint, requests }
    }

    fn hub<'a>(&'a self, cache: &'a Path) -> Hub<'a> {
        Hub { download: true, endpoint: &self.endpoint, ..Hub::new(cache) }
    }

    fn requests(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

fn answer(
    mut stream: TcpStream,
    answers: &BTreeMap<String, Answer>,
    seen: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut token = None;
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("authorization")
        {
            token = Some(value.trim().to_owned());
        }
    }
    seen.lock().unwrap().push((path.clone(), token));
    let none = Answer { status: 404, ..Answer::default() };
    let answer = answers.get(&path).unwrap_or(&none);
    write!(stream, "HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status)?;
    for (name, value) in &answer.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    if let Some(length) = answer.length.unwrap_or(Some(answer.body.len())) {
        write!(stream, "Content-Length: {length}\r\n")?;
    }
    write!(stream, "\r\n")?;
    stream.write_all(&answer.body)
}

/// A model's config and weights.
fn model() -> Vec<(&'static str, Answer)> {
    let read = |name: &str| std::fs::read(golden("model").join(name)).unwrap();
    vec![
        ("/org/name/resolve/main/config.json", file(read("config.json"))),
        ("/org/name/resolve/main/model.safetensors", file(read("model.safetensors"))),
    ]
}

/// Nothing may be left in the cache after a failure.
fn check_failure(server: &Server, problem: &str) {
    let cache = tempfile::tempdir().unwrap();
    let error = resolve_model("org/name", &server.hub(cache.path())).unwrap_err().to_string();
    assert!(error.contains(problem), "expected {problem:?} in {error}");
    let repository = cache.path().join("models--org--name");
    assert!(!repository.join("refs/main").exists());
    let left = std::fs::read_dir(repository.join("snapshots")).map_or(0, |entries| entries.count());
    assert_eq!(left, 0);
}

#[test]
fn fetched_once() {
    let mut answers = model();
    answers.push(("/org/name/resolve/main/vocab.txt", file("[PAD]\n")));
    answers.push(("/org/name/resolve/main/1_Pooling/config.json", file("{}")));
    let server = Server::start(answers);
    let cache = tempfile::tempdir().unwrap();
    let progress = Mutex::new(Vec::new());
    let report = |p: &DownloadProgress<'_>| progress.lock().unwrap().push((p.file.to_owned(), p.received, p.total));
    let hub = Hub { progress: Some(&report), ..server.hub(cache.path()) };

    let directory = resolve_model("org/name", &hub).unwrap();
    assert_eq!(directory, cache.path().join("models--org--name/snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(cache.path().join("models--org--name/refs/main")).unwrap(), COMMIT);
    assert_eq!(Weights::open(&directory).unwrap().names().len(), 39);
    let mut names: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["1_Pooling", "config.json", "model.safetensors", "vocab.txt"]);
    assert_eq!(progress.lock().unwrap().last().unwrap(), &("model.safetensors".to_owned(), 56376, Some(56376)));

    // From the cache: no request more, not even with permission.
    let before = server.requests();
    assert_eq!(resolve_model("org/name", &hub).unwrap(), directory);
    assert_eq!(resolve_model("org/name", &Hub::new(cache.path())).unwrap(), directory);
    assert_eq!(server.requests(), before);

    // What has been lost is fetched again.
    std::fs::remove_file(directory.join("model.safetensors")).unwrap();
    assert!(matches!(resolve_model("org/name", &Hub::new(cache.path())), Err(CheckpointError::ModelNotFound { .. })));
    assert_eq!(resolve_model("org/name", &hub).unwrap(), directory);
    assert_eq!(Weights::open(&directory).unwrap().names().len(), 39);
}

#[test]
fn not_without_permission() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub { download: false, ..server.hub(cache.path()) };
    let error = resolve_model("org/name", &hub).unwrap_err();
    assert!(matches!(error, CheckpointError::ModelNotFound { .. }));
    let error = error.to_string();
    assert!(error.contains("--download") && error.contains("models--org--name"), "{error}");
    assert_eq!(server.requests(), 0);
    for name in ["./org/name", "org/name/more", "../name", "org/..", ""] {
        let error = resolve_model(name, &server.hub(cache.path())).unwrap_err();
        assert!(matches!(error, CheckpointError::ModelName { .. }), "{name}: {error}");
    }
    assert_eq!(server.requests(), 0);
}

#[test]
fn directories_come_first() {
    let cache = tempfile::tempdir().unwrap();
    assert_eq!(resolve_model(golden("model"), &Hub::new(cache.path())).unwrap(), golden("model"));
    let file = golden("model/config.json");
    assert!(matches!(resolve_model(file, &Hub::new(cache.path())), Err(CheckpointError::NotADirectory { .. })));
}

/// As huggingface_hub lays it out: links into a store.
#[test]
fn the_cache_of_others() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--org--name");
    let snapshot = repository.join("snapshots").join(COMMIT);
    for directory in [&repository.join("refs"), &repository.join("blobs"), &snapshot] {
        std::fs::create_dir_all(directory).unwrap();
    }
    std::fs::write(repository.join("refs/main"), COMMIT).unwrap();
    let link = |name: &str| {
        std::fs::copy(golden("model").join(name), repository.join("blobs").join(name)).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    };
    let resolve = || resolve_model("org/name", &Hub::new(cache.path()));
    link("config.json");
    assert!(matches!(resolve(), Err(CheckpointError::ModelNotFound { .. })));
    // A format that is not read is found, so that the error is about the format.
    std::fs::write(snapshot.join("tf_model.h5"), "x").unwrap();
    assert!(matches!(Weights::open(&resolve().unwrap()), Err(CheckpointError::ForeignFormat { .. })));
    std::fs::write(snapshot.join("pytorch_model.bin"), "x").unwrap();
    assert!(matches!(Weights::open(&resolve().unwrap()), Err(CheckpointError::Torch { .. })));
    link("model.safetensors");
    assert_eq!(resolve().unwrap(), snapshot);
    assert_eq!(Weights::open(&snapshot).unwrap().names().len(), 39);
    // A reference that leads elsewhere leads nowhere.
    std::fs::write(repository.join("refs/main"), format!("../snapshots/{COMMIT}")).unwrap();
    assert!(matches!(resolve(), Err(CheckpointError::ModelNotFound { .. })));
}

#[test]
fn shards_and_redirects() {
    let storage = Server::start([("/store/b?signature=1", file(safetensors(&[ones("b", &[2])])))]);
    let index = r#"{"metadata":{},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#;
    let server = Server::start([
        ("/org/name/resolve/main/config.json", redirect("/elsewhere/config.json")),
        ("/elsewhere/config.json", file("{}")),
        ("/org/name/resolve/main/model.safetensors.index.json", file(index)),
        ("/org/name/resolve/main/a.safetensors", file(safetensors(&[ones("a", &[2])]))),
        ("/org/name/resolve/main/b.safetensors", redirect(&format!("{}/store/b?signature=1", storage.endpoint))),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub { token: Some("secret"), ..server.hub(cache.path()) };
    let directory = resolve_model("org/name", &hub).unwrap();
    assert_eq!(Weights::open(&directory).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
    // The token is for the hub and not for the storage that it leads to.
    assert!(server.requests.lock().unwrap().iter().all(|(_, token)| token.as_deref() == Some("Bearer secret")));
    assert_eq!(*storage.requests.lock().unwrap(), [("/store/b?signature=1".to_owned(), None)]);
}

/// What PyTorch writes is fetched where the hub has nothing else.
#[test]
fn files_of_torch() {
    let bin = include_bytes!("../../../../tests-data/torch-files/plain-zip.bin");
    let config = ("/org/name/resolve/main/config.json", file("{}"));
    let index = r#"{"weight_map":{"a":"pytorch_model-00001-of-00001.bin","b":"pytorch_model-00001-of-00001.bin"}}"#;
    for answers in [
        vec![config.clone(), ("/org/name/resolve/main/pytorch_model.bin", file(*bin))],
        vec![
            config.clone(),
            ("/org/name/resolve/main/pytorch_model.bin.index.json", file(index)),
            ("/org/name/resolve/main/pytorch_model-00001-of-00001.bin", file(*bin)),
        ],
    ] {
        let server = Server::start(answers);
        let cache = tempfile::tempdir().unwrap();
        let directory = resolve_model("org/name", &server.hub(cache.path())).unwrap();
        assert_eq!(Weights::open(&directory).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
        // The second time from the cache.
        assert_eq!(resolve_model("org/name", &Hub::new(cache.path())).unwrap(), directory);
    }
}

#[test]
fn failures() {
    let with = |path: &'static str, answer: Answer| {
        let mut answers = model();
        answers.retain(|(known, _)| *known != path);
        answers.push((path, answer));
        Server::start(answers)
    };
    const CONFIG: &str = "/org/name/resolve/main/config.json";
    const WEIGHTS: &str = "/org/name/resolve/main/model.safetensors";
    const INDEX: &str = "/org/name/resolve/main/model.safetensors.index.json";
    let status = |status| Answer { status, ..Answer::default() };
    let cut = Answer { length: Some(Some(60_000)), ..file(vec![0; 50_000]) };

    check_failure(&Server::start([]), "has no model org/name with a config.json");
    check_failure(&with(CONFIG, status(401)), "status 401): the name is wrong, or the model is private");
    check_failure(&with(CONFIG, file("<html>")), "line 1, column 1");
    check_failure(&with(CONFIG, redirect(CONFIG)), "redirected too often");
    check_failure(&with(CONFIG, redirect("nowhere")), "which is not a valid address");
    check_failure(&with(WEIGHTS, status(503)), "status 503; try again later");
    check_failure(&with(WEIGHTS, cut.clone()), "it broke off");
    check_failure(&with("/org/name/resolve/main/tokenizer.json", cut), "it broke off");
    check_failure(&with(WEIGHTS, Answer { length: Some(None), ..file("x") }), "does not report its length");
    check_failure(&with(WEIGHTS, status(404)), "no weights as safetensors");
    let mut changed = file("x");
    changed.headers[0].1 = COMMIT.replace('0', "f");
    check_failure(&with(WEIGHTS, changed), "changed while it was being fetched");

    let with_index = |index: &str| {
        let mut answers = model();
        answers.pop();
        answers.push((INDEX, file(index)));
        Server::start(answers)
    };
    check_failure(&with_index(r#"{"weight_map":{"a":"a.safetensors"}}"#), "names a.safetensors, which is not in that");
    check_failure(&with_index(r#"{"weight_map":{"a":"../a.safetensors"}}"#), "is not the plain name");

    // Nobody listens there.
    let cache = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let hub = Hub { download: true, endpoint: &format!("http://127.0.0.1:{port}"), ..Hub::new(cache.path()) };
    assert!(matches!(resolve_model("org/name", &hub), Err(CheckpointError::Download { .. })));
}
