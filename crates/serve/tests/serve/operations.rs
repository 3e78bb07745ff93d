//! How a server behaves among people: keys, limits, crowds, bad and slow clients, changed models, its own end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Running, copy_model, head, model, read_answer};
use henson_infer::{EmbedSettings, Pooling};
use henson_serve::Settings;
use serde_json::json;

const JSON: &str = "Content-Type: application/json\r\n";

fn start(settings: Settings) -> (tempfile::TempDir, Running) {
    let directory = model("mlm");
    let running = Running::start(&[("m", directory.path())], settings);
    (directory, running)
}

#[test]
fn bad_requests_get_a_proper_status_and_the_server_lives() {
    let settings = Settings { most_bytes: 100_000, most_texts: 4, ..Settings::default() };
    let (_directory, running) = start(settings);
    let many = json!({"inputs": vec!["a"; 5]}).to_string();
    let no_truncate = json!({"inputs": "a ".repeat(41), "truncate": false}).to_string();
    let cases: [(&str, &[u8], u16, &str); 30] = [
        ("/embed", b"", 400, "validation"),
        ("/embed", b"{", 400, "validation"),
        ("/embed", b"{\"inputs\": \"a\"} x", 400, "validation"),
        ("/embed", b"{\"inputs\": \"\xff\xfe\"}", 400, "validation"),
        ("/embed", b"\x00\x01", 400, "validation"),
        ("/embed", b"[]", 422, "validation"),
        ("/embed", b"{}", 422, "validation"),
        ("/embed", b"null", 422, "validation"),
        ("/embed", b"{\"inputs\": 3}", 422, "validation"),
        ("/embed", b"{\"inputs\": {\"a\": 1}}", 422, "validation"),
        ("/embed", b"{\"inputs\": [\"a\", 1]}", 422, "validation"),
        ("/embed", b"{\"inputs\": \"a\", \"normalise\": true}", 422, "validation"),
        ("/embed", b"{\"inputs\": \"a\", \"inputs\": \"b\"}", 422, "validation"),
        ("/embed", b"{\"inputs\": \"a\", \"truncate\": \"yes\"}", 422, "validation"),
        ("/embed", b"{\"inputs\": \"a\", \"dimensions\": 0}", 422, "validation"),
        ("/embed", b"{\"inputs\": \"a\", \"dimensions\": 1000000}", 422, "validation"),
        ("/embed", b"{\"inputs\": [999999]}", 422, "validation"),
        ("/embed", b"{\"inputs\": []}", 400, "empty"),
        ("/embed", b"{\"inputs\": \"\"}", 400, "empty"),
        ("/embed", many.as_bytes(), 413, "validation"),
        ("/embed", no_truncate.as_bytes(), 422, "validation"),
        ("/fill", b"{\"inputs\": \"a\", \"model\": \"other\"}", 404, "not_found"),
        ("/models/other/embed", b"{\"inputs\": \"a\"}", 404, "not_found"),
        ("/models/m/embed", b"{\"inputs\": \"a\", \"model\": \"other\"}", 422, "validation"),
        ("/nowhere", b"{}", 404, "not_found"),
        ("/fill", b"{\"inputs\": \"no mask\"}", 422, "validation"),
        ("/fill", b"{\"inputs\": \"[MASK]\", \"top\": 0}", 422, "validation"),
        ("/predict", b"{\"inputs\": \"a\"}", 424, "backend"),
        ("/answer", b"{\"question\": \"a\", \"context\": \"b\"}", 424, "backend"),
        ("/health", b"{}", 405, "method_not_allowed"),
    ];
    for (path, body, status, kind) in cases {
        let answer = running.post_with(path, body, JSON);
        let what = format!("{path} {}: {}", String::from_utf8_lossy(body), answer.text());
        assert_eq!(answer.status, status, "{what}");
        assert_eq!(answer.json()["error_type"], kind, "{what}");
        assert!(!answer.json()["error"].as_str().unwrap().is_empty(), "{what}");
    }
    let plain = running.post_with("/embed", b"{\"inputs\": \"a\"}", "Content-Type: text/plain\r\n");
    assert_eq!(plain.status, 415);
    // OpenAI's clients read errors in another form.
    let error = running.post("/v1/embeddings", "{}").json();
    assert_eq!(error["error"]["type"], "invalid_request_error");
    // Odd texts are texts.
    for text in ["\0", "a\0b", "\u{fffd}", "\u{202e}", "\u{1f468}\u{200d}\u{1f469}", " ", "\u{300}"] {
        running.ok("/embed", &json!({"inputs": text}).to_string());
    }
    running.ok("/embed", r#"{"inputs": "\u0000 a"}"#);
    assert_eq!(running.post("/embed", r#"{"inputs": "\ud800"}"#).status, 400);
    assert_eq!(running.get("/health").status, 200);
}

#[test]
fn huge_bodies_and_texts_are_turned_away_or_cut() {
    let (_directory, running) = start(Settings::default());
    // 10 MB: more than a body may have, announced or not.
    let huge = json!({"inputs": "a ".repeat(5 << 20)}).to_string();
    assert_eq!(running.post("/embed", &huge).status, 413);
    let mut stream = running.connect();
    write!(stream, "POST /embed HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n").unwrap();
    let chunk = vec![b'a'; 1 << 16];
    for _ in 0..160 {
        let sent =
            write!(stream, "10000\r\n").and_then(|()| stream.write_all(&chunk)).and_then(|()| write!(stream, "\r\n"));
        if sent.is_err() {
            break;
        }
    }
    let answer = read_answer(&mut stream);
    assert_eq!(answer.status, 413, "{answer:?}");
    // Within the body's limit, a text that no model could take is cut before it is looked at, or refused.
    let long = "a ".repeat(900_000);
    let start = Instant::now();
    let answer = running.post("/embed", &json!({"inputs": long}).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(running.post("/embed", &json!({"inputs": long, "truncate": false}).to_string()).status, 422);
    // A head without end.
    let mut stream = running.connect();
    let _ = write!(stream, "GET / HTTP/1.1\r\n").and_then(|()| stream.write_all(&vec![b'a'; 1 << 20]));
    assert!(matches!(read_answer(&mut stream).status, 431 | 400 | 0));
    assert_eq!(running.get("/health").status, 200);
}

/// Clients that send all of a body before they look at the answer see it, whatever was wrong.
#[test]
fn early_errors_are_read_after_long_bodies() {
    let (_directory, running) = start(Settings { api_key: Some("secret".to_owned()), ..Settings::default() });
    let key = "Authorization: Bearer secret\r\n";
    let body = vec![b' '; 20_000_000];
    let cases: [(&str, String, u16); 5] = [
        ("/nowhere", format!("{JSON}{key}"), 404),
        ("/health", format!("{JSON}{key}"), 405),
        ("/embed", format!("{JSON}{key}"), 413),
        ("/embed", format!("Content-Type: text/plain\r\n{key}"), 415),
        ("/embed", JSON.to_owned(), 401),
    ];
    for (path, headers, status) in cases {
        let mut stream = running.connect();
        // Without `Connection: close` of the client's own.
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body)).unwrap_or_else(|error| {
            panic!("{path} {status}: the connection was closed while the body was sent: {error}");
        });
        let answer = read_answer(&mut stream);
        assert_eq!((answer.status, answer.header("connection")), (status, Some("close")), "{path}: {answer:?}");
    }
    // Who waits for leave to send gets the answer at once, and sends nothing.
    let mut stream = running.connect();
    let begin = Instant::now();
    write!(
        stream,
        "POST /embed HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 20000000\r\n{JSON}{key}\r\n"
    )
    .unwrap();
    assert_eq!(read_answer(&mut stream).status, 413);
    assert!(begin.elapsed() < Duration::from_secs(5));
    // Who stalls is let go, and the others are served.
    let mut stream = running.connect();
    stream.write_all(head("/nowhere", 1000, JSON).as_bytes()).unwrap();
    running.get("/health");
    drop(stream);
}

#[test]
fn tokens_are_listed_within_the_limits_of_the_queue() {
    let (_directory, running) = start(Settings { queue_tokens: 100, ..Settings::default() });
    let tokenize =
        |text: &str, texts: usize| running.post("/tokenize", &json!({"inputs": vec![text; texts]}).to_string());
    assert_eq!(tokenize(&"a ".repeat(48), 2).status, 200);
    for answer in [tokenize(&"a ".repeat(99), 1), tokenize(&"a ".repeat(48), 3), tokenize(&"a".repeat(2000), 1)] {
        assert_eq!((answer.status, &answer.json()["error_type"]), (413, &json!("validation")), "{answer:?}");
        assert!(answer.text().contains("--queue-tokens"), "{}", answer.text());
    }
    assert_eq!(running.post("/decode", &json!({"ids": vec![61; 100]}).to_string()).status, 200);
    assert_eq!(running.post("/decode", &json!({"ids": vec![vec![61; 51]; 2]}).to_string()).status, 413);
    // Texts that only a tokenizer reads wait in the same queue as those that a model computes.
    let (_directory, busy) = start(Settings { queue_requests: 1, batch_tokens: 64, ..Settings::default() });
    let long = json!({"inputs": vec!["a ".repeat(38); 100]}).to_string();
    let statuses: Vec<(u16, u16)> = std::thread::scope(|scope| {
        let computing = scope.spawn(|| (0..10).for_each(|_| _ = busy.post("/embed", &long)));
        let ask =
            || (busy.post("/tokenize", r#"{"inputs": "a"}"#).status, busy.post("/decode", r#"{"ids": [61]}"#).status);
        std::iter::from_fn(|| (!computing.is_finished()).then(ask)).collect()
    });
    assert!(statuses.iter().any(|(tokenize, _)| *tokenize == 429), "{statuses:?}");
    assert!(statuses.iter().any(|(_, decode)| *decode == 429), "{statuses:?}");
    // Places are given back.
    busy.ok("/tokenize", r#"{"inputs": "a"}"#);
    assert_eq!(running.metric("henson_queue_tokens{model=\"m\"}"), 0.0);
    let (_directory, running) = start(Settings { answer_bytes: 4000, ..Settings::default() });
    let large = running.post("/tokenize", &json!({"inputs": "a ".repeat(100)}).to_string());
    assert!(large.status == 413 && large.text().contains("divide the request"), "{}", large.text());
    running.ok("/tokenize", r#"{"inputs": "a b"}"#);
}

#[test]
fn keys_are_asked_for() {
    let (_directory, running) = start(Settings { api_key: Some("secret".to_owned()), ..Settings::default() });
    let body = br#"{"inputs": "a"}"#;
    let with = |header: &str| running.post_with("/embed", body, &format!("{JSON}{header}")).status;
    assert_eq!(with(""), 401);
    assert_eq!(with("Authorization: Bearer secre\r\n"), 401);
    assert_eq!(with("Authorization: Bearer secrets\r\n"), 401);
    assert_eq!(with("Authorization: Basic secret\r\n"), 401);
    assert_eq!(with("Authorization: Bearer secret\r\n"), 200);
    for path in ["/metrics", "/info", "/models", "/runs", "/v1/models"] {
        assert_eq!(running.get(path).status, 401, "{path}");
    }
    // What tells nothing is open.
    for path in ["/health", "/", "/docs", "/openapi.json"] {
        assert_eq!(running.get(path).status, 200, "{path}");
    }
    let error = running.post("/v1/embeddings", r#"{"input": "a"}"#);
    assert_eq!((error.status, error.json()["error"]["code"].as_str().unwrap()), (401, "unauthorized"));
    assert_eq!(error.header("www-authenticate"), Some("Bearer"));
}

#[test]
fn pages_of_other_origins_may_call_only_when_asked() {
    let preflight = "OPTIONS /embed HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: https://example.org\r\n\
                     Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n\r\n";
    let (_directory, running) = start(Settings::default());
    assert_eq!(running.send(preflight, b"").header("access-control-allow-origin"), None);
    let cors = vec!["https://example.org".to_owned()];
    let (_directory, running) = start(Settings { cors, ..Settings::default() });
    assert_eq!(running.send(preflight, b"").header("access-control-allow-origin"), Some("https://example.org"));
    let other = preflight.replace("example.org", "evil.org");
    assert_eq!(running.send(&other, b"").header("access-control-allow-origin"), None);
}

#[test]
fn the_page_loads_nothing_from_elsewhere() {
    let (_directory, running) = start(Settings::default());
    for page in ["/", "/docs"] {
        let answer = running.get(page);
        assert_eq!(answer.status, 200, "{page}");
        assert!(answer.header("content-security-policy").unwrap().starts_with("default-src 'none'"), "{page}");
        // What it links to is here as well.
        let text = answer.text();
        let links = text.split(['"', '\'']).filter(|part| part.starts_with('/') && !part.contains(['<', ' ']));
        for link in links.filter(|link| link.len() > 1) {
            assert_eq!(running.get(link).status, 200, "{link} of {page}");
        }
        assert!(!text.contains("src=\"http") && !text.contains("link href=\"http"), "{page}");
    }
    let document = running.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    // What is documented is there: nothing answers that there is no such route.
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{model}", "m").replace("{run}", "r");
        for method in methods.as_object().unwrap().keys() {
            let answer = match method.as_str() {
                "get" => running.get(&path),
                _ => running.post(&path, "{}"),
            };
            assert!(!answer.text().contains("no such route") && answer.status != 405, "{method} {path}");
        }
    }
}

#[test]
fn slow_clients_are_let_go() {
    let brief = Duration::from_millis(200);
    let (_directory, running) = start(Settings { header_timeout: brief, body_timeout: brief, ..Settings::default() });
    // Half a head, then silence.
    let mut stream = running.connect();
    write!(stream, "POST /embed HTTP/1.1\r\nHost:").unwrap();
    let begin = Instant::now();
    let answer = read_answer(&mut stream);
    assert!(matches!(answer.status, 408 | 0) && begin.elapsed() < Duration::from_secs(5), "{answer:?}");
    // A body that trickles.
    let mut stream = running.connect();
    let body = br#"{"inputs": "a"}"#;
    stream.write_all(head("/embed", body.len(), JSON).as_bytes()).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let trickle = std::thread::spawn(move || {
        for byte in body {
            if stream.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let answer = read_answer(&mut reader);
    assert_eq!((answer.status, answer.json()["error_type"].as_str().unwrap()), (408, "timeout"));
    trickle.join().unwrap();
    // Others are served meanwhile, and connections that nobody uses are closed.
    running.ok("/embed", r#"{"inputs": "a"}"#);
    let mut idle = running.connect();
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).unwrap();
}

#[test]
fn clients_that_leave_take_their_work_along() {
    let (_directory, running) = start(Settings { batch_tokens: 40, queue_tokens: 1 << 20, ..Settings::default() });
    let body = json!({"inputs": vec!["a ".repeat(38); 256]}).to_string();
    let tokens = 256.0 * 40.0;
    let send = |part: &[u8]| {
        let mut stream = running.connect();
        stream.write_all(head("/embed", body.len(), JSON).as_bytes()).unwrap();
        stream.write_all(part).unwrap();
        stream
    };
    // All of them wait in the queue, and then they leave; others leave before all of their body is there.
    let streams: Vec<TcpStream> = (0..20).map(|_| send(body.as_bytes())).collect();
    let waiting = || running.metric("henson_queue_tokens{model=\"m\"}");
    let computed = || running.metric("henson_tokens_total{model=\"m\"}");
    let begin = Instant::now();
    while waiting() + computed() < 19.0 * tokens {
        assert!(begin.elapsed() < Duration::from_secs(20), "{} wait, {} computed", waiting(), computed());
    }
    let before = computed();
    drop(streams);
    (0..20).for_each(|_| drop(send(&body.as_bytes()[..body.len() / 2])));
    while waiting() > 0.0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "the queue is not empty");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Of what was not computed when they left, hardly anything was computed afterwards.
    let (rest, after) = (20.0 * tokens - before, computed() - before);
    assert!(after <= 0.5 * rest, "{after} of {rest} tokens were computed for nobody");
    running.ok("/embed", r#"{"inputs": "a"}"#);
}

#[test]
fn a_full_queue_turns_requests_away_and_recovers() {
    let (_directory, running) = start(Settings { queue_tokens: 2000, batch_tokens: 64, ..Settings::default() });
    let body = json!({"inputs": vec!["a ".repeat(38); 40]}).to_string();
    let statuses: Vec<(u16, Option<u64>)> = std::thread::scope(|scope| {
        let (running, body) = (&running, &body);
        let ask = move || {
            let answer = running.post("/embed", body);
            (answer.status, answer.header("retry-after").and_then(|seconds| seconds.parse().ok()))
        };
        let threads: Vec<_> = (0..24).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(statuses.iter().any(|(status, _)| *status == 200));
    let turned_away: Vec<_> = statuses.iter().filter(|(status, _)| *status == 429).collect();
    assert!(!turned_away.is_empty(), "{statuses:?}");
    assert!(turned_away.iter().all(|(_, seconds)| seconds.is_some_and(|s| (1..=60).contains(&s))), "{statuses:?}");
    assert!(statuses.iter().all(|(status, _)| matches!(status, 200 | 429)), "{statuses:?}");
    // A request that is larger than the queue is served when there is nothing else.
    let large = json!({"inputs": vec!["a ".repeat(38); 100]}).to_string();
    assert_eq!(running.post("/embed", &large).status, 200);
}

#[test]
fn too_many_requests_and_connections_are_turned_away() {
    let (_directory, running) = start(Settings { queue_requests: 2, batch_tokens: 64, ..Settings::default() });
    let body = json!({"inputs": vec!["a ".repeat(38); 100]}).to_string();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| running.post("/embed", &body).status)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    running.ok("/embed", r#"{"inputs": "a"}"#);

    let (_directory, running) = start(Settings { most_connections: 3, ..Settings::default() });
    // Connections of before may be on their way out.
    std::thread::sleep(Duration::from_millis(50));
    let open: Vec<TcpStream> = (0..3).map(|_| running.connect()).collect();
    let begin = Instant::now();
    let answer = running.get("/health");
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{answer:?}");
    assert_eq!(answer.json()["error_type"], "overloaded");
    assert!(begin.elapsed() < Duration::from_secs(5));
    drop(open);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(running.get("/health").status, 200);
}

#[test]
fn a_small_request_does_not_wait_for_a_huge_one() {
    let (_directory, running) = start(Settings { batch_tokens: 128, ..Settings::default() });
    let huge = json!({"inputs": vec!["a ".repeat(38); 256]}).to_string();
    std::thread::scope(|scope| {
        let done = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&done);
        let (running, huge) = (&running, &huge);
        scope.spawn(move || {
            assert_eq!(running.post("/embed", huge).status, 200);
            theirs.store(true, Ordering::SeqCst);
        });
        while running.metric("henson_queue_tokens{model=\"m\"}") == 0.0 && !done.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        running.ok("/embed", r#"{"inputs": "a"}"#);
        assert!(!done.load(Ordering::SeqCst), "the huge request was done before the small one");
    });
}

#[test]
fn what_nobody_waits_for_is_not_computed() {
    let settings = Settings { batch_tokens: 1, queue_tokens: 1 << 20, most_texts: 3000, ..Settings::default() };
    let (_directory, running) = start(settings);
    let body = json!({"inputs": vec!["a ".repeat(38); 3000]}).to_string();
    let all = 3000.0 * 40.0;
    let computed = || running.metric("henson_tokens_total{model=\"m\"}");
    // Somebody who waits gets all of it.
    running.ok("/embed", &body);
    assert_eq!(computed(), all);
    let mut stream = running.connect();
    stream.write_all(head("/embed", body.len(), JSON).as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let waiting = || running.metric("henson_queue_tokens{model=\"m\"}");
    let begin = Instant::now();
    while waiting() == 0.0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
    drop(stream);
    while waiting() > 0.0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(computed() < 2.0 * all, "all of what nobody waits for was computed");
    running.ok("/embed", r#"{"inputs": "a"}"#);
}

#[test]
fn stopping_answers_what_was_accepted() {
    let (_directory, mut running) = start(Settings { batch_tokens: 64, ..Settings::default() });
    let body = json!({"inputs": vec!["a ".repeat(38); 200]}).to_string();
    let mut streams: Vec<TcpStream> = (0..4).map(|_| running.connect()).collect();
    for stream in &mut streams {
        stream.write_all(head("/embed", body.len(), JSON).as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
    }
    // All four are in the queue before the server is told to stop.
    let begin = Instant::now();
    while running.metric("henson_connections") < 5.0 || running.metric("henson_queue_tokens{model=\"m\"}") == 0.0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
    std::thread::sleep(Duration::from_millis(50));
    running.handle.stop();
    for stream in &mut streams {
        let answer = read_answer(stream);
        assert_eq!((answer.status, answer.json().as_array().unwrap().len()), (200, 200));
    }
    running.wait().unwrap();
    assert!(TcpStream::connect(running.address).is_err());
}

#[test]
fn a_changed_model_is_loaded_without_losing_a_request() {
    let directory = model("mlm");
    let running = Running::start(&[("m", directory.path())], Settings::default());
    let body = r#"{"inputs": "jim play"}"#;
    let before = running.ok("/embed", body);
    assert_eq!(running.handle.reload().0, 0, "nothing has changed");
    let stop = AtomicBool::new(false);
    let after = std::thread::scope(|scope| {
        let (running, stop) = (&running, &stop);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(move || {
                    let mut answers = 0;
                    while !stop.load(Ordering::Relaxed) {
                        running.ok("/embed", body);
                        answers += 1;
                    }
                    answers
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        copy_model("pretraining-gelu-new", directory.path());
        let (loaded, errors) = running.handle.reload();
        let after = running.post("/embed", body);
        std::thread::sleep(Duration::from_millis(50));
        // First of all: a failed assertion would leave the others at it for ever.
        stop.store(true, Ordering::Relaxed);
        assert!(loaded == 1 && errors.is_empty(), "{errors:?}");
        for thread in threads {
            assert!(thread.join().unwrap() > 0);
        }
        after.json()
    });
    assert_ne!(before, after);
    // A directory that is broken leaves the model as it is.
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    let (loaded, errors) = running.handle.reload();
    assert_eq!((loaded, errors.len()), (0, 1));
    assert_eq!(running.ok("/embed", body), after);
}

/// Weights that are truncated and written again in place while they are loaded: never a crash, never half of them.
#[test]
fn a_model_that_is_overwritten_while_it_is_loaded_stays_as_it_was() {
    let directory = model("mlm");
    let running = Running::start(&[("m", directory.path())], Settings::default());
    let body = r#"{"inputs": "jim play"}"#;
    let before = running.ok("/embed", body);
    let path = directory.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let stop = AtomicBool::new(false);
    let (mut loaded, mut failed) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As `cp NEW DIR/model.safetensors` does it.
            while !stop.load(Ordering::Relaxed) {
                std::fs::File::create(&path).unwrap();
                let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                whole.chunks(whole.len() / 8).for_each(|part| file.write_all(part).unwrap());
            }
        });
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            let (count, errors) = running.handle.reload();
            loaded += count;
            failed += errors.len();
            assert_eq!(running.post("/embed", body).json(), before);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(failed > 0, "no reload met a broken file; {loaded} succeeded");
    // What stays broken is reported again and again, and the old model answers.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 / 2).unwrap();
    let (count, errors) = running.handle.reload();
    assert!(count == 0 && errors.len() == 1, "{errors:?}");
    assert_eq!(running.ok("/embed", body), before);
    assert_eq!(running.metric("henson_failed_reloads_total"), (failed + 1) as f64);
    std::fs::write(&path, &whole).unwrap();
    let (count, errors) = running.handle.reload();
    assert!(count == 1 && errors.is_empty(), "{errors:?}");
    assert_eq!(running.ok("/embed", body), before);
}

#[test]
fn loading_is_told_and_failure_ends_the_server() {
    let mut running = Running::start_at_once(&[("gone", Path::new("no/such/directory"))], Settings::default());
    let error = running.wait().unwrap_err().to_string();
    assert!(error.contains("gone"), "{error}");
}

#[test]
fn several_models_by_name() {
    let (first, second) = (model("mlm"), model("sequence"));
    let running = Running::start(&[("words", first.path()), ("classes", second.path())], Settings::default());
    running.ok("/fill", r#"{"inputs": "[MASK]"}"#);
    running.ok("/predict", r#"{"inputs": "a", "model": "classes"}"#);
    // Without a name, the first model that can do it.
    running.ok("/predict", r#"{"inputs": "a"}"#);
    assert_eq!(running.ok("/embed", r#"{"inputs": "a"}"#), running.ok("/models/words/embed", r#"{"inputs": "a"}"#));
    let none = running.post("/tag", r#"{"inputs": "a"}"#);
    assert_eq!(none.status, 424);
    for part in ["no model", "a token classifier", "words\\\" is a BertForMaskedLM", "classes\\\" is a BertForSequence"]
    {
        assert!(none.text().contains(part), "{part}: {}", none.text());
    }
    running.ok("/models/classes/predict", r#"{"inputs": "a"}"#);
    assert_eq!(running.post("/models/words/predict", r#"{"inputs": "a"}"#).status, 424);
    let models = running.get("/models").json();
    assert_eq!((&models[0]["model_id"], &models[1]["model_id"]), (&json!("words"), &json!("classes")));
    assert!(models[1]["abilities"].as_array().unwrap().contains(&json!("predict")));
    let info = running.get("/models/classes/info").json();
    assert!(info["model_type"]["classifier"]["id2label"].is_object());
    let unknown = running.post("/fill", r#"{"inputs": "[MASK]", "model": "other"}"#);
    assert!(unknown.text().contains("there are: words, classes"), "{}", unknown.text());
}

/// A directory of sentence-transformers.
fn sentence_model() -> tempfile::TempDir {
    let directory = model("model");
    std::fs::create_dir(directory.path().join("1_Pooling")).unwrap();
    let settings = EmbedSettings { pooling: vec![Pooling::First], normalise: true, ..EmbedSettings::default() };
    for (name, bytes) in settings.files(24) {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

#[test]
fn vectors_come_from_models_that_are_made_for_them() {
    let (classes, words, sentences) = (model("sequence"), model("mlm"), sentence_model());
    let (classes, words, sentences) = (classes.path(), words.path(), sentences.path());
    let requests = [
        ("/embed", r#"{"inputs": "jim a"}"#),
        ("/embed_all", r#"{"inputs": "jim a"}"#),
        ("/similarity", r#"{"inputs": {"source_sentence": "jim", "sentences": ["a b"]}}"#),
    ];
    // The order in which models are given does not matter for kinds that suit differently.
    let all = [("classes", classes), ("words", words), ("sentences", sentences)];
    for (models, expected) in [(&all[..], "sentences"), (&all[..2], "words")] {
        let running = Running::start(models, Settings::default());
        for (path, body) in requests {
            assert_eq!(running.ok(path, body), running.ok(&format!("/models/{expected}{path}"), body), "{path}");
        }
        let openai = r#"{"input": "jim a"}"#;
        assert_eq!(running.ok("/v1/embeddings", openai)["model"], expected);
        assert_eq!(running.get("/info").json()["model_id"], expected);
        let listed = running.get("/models").json();
        for model in listed.as_array().unwrap() {
            let default_for = model["default_for"].as_array().unwrap();
            assert_eq!(default_for.contains(&json!("similarity")), model["model_id"] == expected, "{model}");
        }
        // Named, a classifier gives its vectors, too.
        running.ok("/embed", r#"{"inputs": "a", "model": "classes"}"#);
        assert_eq!(running.ok("/v1/embeddings", r#"{"input": "jim a", "model": "classes"}"#)["model"], "classes");
    }
    let running = Running::start(&all[..1], Settings::default());
    for (path, body) in requests {
        let answer = running.post(path, body);
        assert_eq!(answer.status, 424, "{path}: {}", answer.text());
        assert!(answer.text().contains("/models/classes"), "{path}: {}", answer.text());
    }
    running.ok("/tokenize", r#"{"inputs": "a"}"#);
    running.ok("/models/classes/embed", r#"{"inputs": "a"}"#);
}

#[test]
fn names_of_other_servers_models_are_taken_where_one_can_be_meant() {
    let (classes, words, more, sentences) = (model("sequence"), model("mlm"), model("model"), sentence_model());
    let openai = r#"{"input": "jim", "model": "text-embedding-3-small"}"#;
    let tei = r#"{"inputs": "jim", "model": "BAAI/bge-small-en"}"#;
    let models = [("classes", classes.path()), ("words", words.path()), ("mini", sentences.path())];
    let running = Running::start(&models, Settings::default());
    for (path, body, model) in [
        ("/v1/embeddings", openai, "mini"),
        ("/embed", tei, "mini"),
        ("/tokenize", tei, "mini"),
        ("/predict", tei, "classes"),
    ] {
        let answer = running.post(path, body);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let warning = answer.header("x-model-warning").unwrap_or_default();
        assert!(warning.ends_with(&format!("answered by {model}")), "{path}: {warning}");
    }
    assert_eq!(running.ok("/v1/embeddings", openai)["model"], "mini");
    assert_eq!(running.post("/v1/embeddings", r#"{"input": "jim", "model": "mini"}"#).header("x-model-warning"), None);
    // Our own routes and addresses know our own names.
    assert_eq!(running.post("/fill", r#"{"inputs": "[MASK]", "model": "other"}"#).status, 404);
    assert_eq!(running.post("/models/other/embed", r#"{"inputs": "jim"}"#).status, 404);
    let strict = Settings { strict_model_names: true, ..Settings::default() };
    for (models, settings) in [
        (&models[..], strict),
        // Two of the same kind: either could be meant.
        (&[("words", words.path()), ("more", more.path())][..], Settings::default()),
        (&models[..1], Settings::default()),
    ] {
        let running = Running::start(models, settings);
        let answer = running.post("/v1/embeddings", openai);
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (404, &json!("model_not_found")), "{answer:?}");
        assert_eq!(running.post("/embed", tei).status, 404);
    }
}

#[test]
fn counts_are_kept_without_texts() {
    let (_directory, running) = start(Settings::default());
    for _ in 0..3 {
        running.ok("/embed", r#"{"inputs": ["jim", "play"]}"#);
    }
    running.post("/secret-path", "{}");
    running.post("/models/secret-model/embed", r#"{"inputs": "a"}"#);
    let text = running.get("/metrics").text();
    for line in [
        "henson_requests_total{route=\"/embed\",status=\"200\"} 3",
        "henson_requests_total{route=\"/models/{model}/embed\",status=\"404\"} 1",
        "henson_requests_total{route=\"unknown\",status=\"404\"} 1",
        "henson_tokens_total{model=\"m\"} 18",
        "henson_batch_sequences_count{model=\"m\"} 3",
        "henson_request_seconds_count{route=\"/embed\"} 3",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(!text.contains("secret") && !text.contains("jim"));
}

#[test]
fn runs_are_shown_where_asked() {
    let (_directory, running) = start(Settings::default());
    assert_eq!(running.get("/runs").status, 404);
    let runs = tempfile::TempDir::new().unwrap();
    std::fs::create_dir(runs.path().join("one")).unwrap();
    std::fs::write(runs.path().join("one/metrics.jsonl"), "{\"kind\": \"train\", \"step\": 1}\n").unwrap();
    let (_directory, running) = start(Settings { runs: Some(runs.path().to_owned()), ..Settings::default() });
    assert_eq!(running.get("/runs").json()[0]["name"], "one");
    let log = running.get("/runs/one").json();
    assert_eq!((&log["lines"][0]["step"], &log["next"]), (&json!(1), &json!(29)));
    assert_eq!(running.get("/runs/one?from=29").json()["lines"], json!([]));
    // Beyond its end it begins again, and says so.
    let again = running.get("/runs/one?from=99999999999").json();
    assert_eq!((&again["from"], &again["next"], &again["lines"][0]["step"]), (&json!(0), &json!(29), &json!(1)));
    for path in ["/runs/other", "/runs/..", "/runs/%2e%2e%2fone", "/runs/one%2f..%2fone"] {
        assert_eq!(running.get(path).status, 404, "{path}");
    }
    for from in ["x", "-1"] {
        let answer = running.get(&format!("/runs/one?from={from}"));
        assert_eq!((answer.status, &answer.json()["error_type"]), (400, &json!("validation")), "{answer:?}");
    }
    // A server may have runs alone.
    let running = Running::start(&[], Settings { runs: Some(runs.path().to_owned()), ..Settings::default() });
    assert_eq!(running.get("/runs").json()[0]["name"], "one");
    assert_eq!(running.get("/models").json(), json!([]));
    for answer in [running.get("/info"), running.post("/embed", r#"{"inputs": "a"}"#), running.post("/", "{}")] {
        assert!(answer.status == 404 && answer.text().contains("only training runs"), "{answer:?}");
    }
}

#[test]
fn pages_of_other_hosts_read_nothing() {
    let ask = |running: &Running, host: &str, path: &str| {
        running.send(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"), b"")
    };
    let (_directory, running) = start(Settings::default());
    for path in ["/", "/info", "/health", "/metrics", "/openapi.json", "/no-such-route"] {
        let answer = ask(&running, "evil.test:8080", path);
        assert_eq!((answer.status, &answer.json()["error_type"]), (421, &json!("misdirected")), "{path}");
        assert!(answer.json()["error"].as_str().unwrap().contains("--allow-host"));
    }
    assert_eq!(ask(&running, "evil.test", "/v1/models").json()["error"]["code"], "misdirected");
    for host in ["localhost:8080", "127.0.0.1", "[::1]:8080"] {
        assert_eq!(ask(&running, host, "/info").status, 200, "{host}");
    }
    let settings = Settings { allowed_hosts: vec!["models.example.org".to_owned()], ..Settings::default() };
    let (_directory, running) = start(settings);
    assert_eq!(ask(&running, "models.example.org", "/info").status, 200);
    assert_eq!(ask(&running, "example.org", "/info").status, 421);
}
