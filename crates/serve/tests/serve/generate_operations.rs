//! How a server that writes behaves among people: nonsense, crowds, limits, clients that leave, its own end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{Running, byte, head, model, read_answer, set_weights, writer};
use henson_serve::Settings;
use serde_json::{Value, json};

const JSON: &str = "Content-Type: application/json\r\n";

fn start(positions: usize, settings: Settings) -> (tempfile::TempDir, Running) {
    let directory = writer(positions);
    let running = Running::start(&[("gpt", directory.path())], settings);
    (directory, running)
}

/// A request whose answer is read later.
fn send(running: &Running, path: &str, body: &Value) -> TcpStream {
    let (mut stream, body) = (running.connect(), body.to_string());
    stream.write_all(head(path, body.len(), JSON).as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

fn streams(running: &Running) -> (f64, f64) {
    let metric = |name: &str| running.metric(&format!("henson_streams_{name}{{model=\"gpt\"}}"));
    (metric("waiting"), metric("running"))
}

/// Waits until something holds, and says how long it took.
#[track_caller]
fn until(what: &str, holds: impl Fn() -> bool) -> Duration {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
    begin.elapsed()
}

/// A text of many tokens, none of which is an end.
fn long(tokens: usize) -> Value {
    json!({"prompt": "a", "max_tokens": tokens, "temperature": 0, "logit_bias": {byte('x').to_string(): 100}})
}

#[test]
fn nonsense_gets_a_proper_status_and_the_server_lives() {
    let encoder = model("mlm");
    let directory = writer(64);
    let models = [("gpt", directory.path()), ("words", encoder.path())];
    let settings = Settings { most_texts: 8, queue_tokens: 2000, ..Settings::default() };
    let running = Running::start(&models, settings);
    let words = |count: usize| "a".repeat(count);
    let completions: [(Value, u16, &str); 22] = [
        (json!({}), 422, "`prompt`"),
        (json!({"prompt": []}), 400, "`prompt` is empty"),
        (json!({"prompt": 3}), 422, "a text"),
        (json!({"prompt": [[1], ["a"]]}), 422, "list"),
        (json!({"prompt": "a", "suffix": "b"}), 422, "`suffix`"),
        (json!({"prompt": "a", "top_k": 3}), 422, "`top_k`"),
        (json!({"prompt": "a", "temperature": -1}), 422, "`temperature`"),
        (json!({"prompt": "a", "temperature": null, "n": 0}), 422, "`n`"),
        (json!({"prompt": "a", "n": 9}), 413, "`prompt` times `best_of`"),
        (json!({"prompt": "a", "n": 1_000_000_000}), 422, "`n`"),
        (json!({"prompt": vec!["a"; 9]}), 413, "`prompt` has 9 entries"),
        (json!({"prompt": vec!["a"; 8], "max_tokens": 60, "n": 1}), 200, ""),
        (json!({"prompt": vec!["a"; 4], "max_tokens": 63, "n": 2, "best_of": 2}), 200, ""),
        (json!({"prompt": "a", "best_of": 2, "stream": true}), 422, "`best_of`"),
        (json!({"prompt": words(64)}), 422, "64 tokens"),
        (json!({"prompt": words(70)}), 422, "70 tokens"),
        (json!({"prompt": vec![97; 70], "echo": true, "logprobs": 0, "max_tokens": 0}), 422, "70 tokens"),
        (json!({"prompt": words(60), "max_tokens": 5}), 422, "`max_tokens` is 5"),
        (json!({"prompt": words(60)}), 200, ""),
        (json!({"prompt": [100_000]}), 422, "100000"),
        (json!({"prompt": "a", "logit_bias": {"100000": 1}}), 422, "100000"),
        (json!({"prompt": "a", "model": "words"}), 424, "needs a model that writes"),
    ];
    for (body, status, part) in completions {
        let answer = running.post("/v1/completions", &body.to_string());
        assert_eq!(answer.status, status, "{body}: {}", answer.text());
        if status != 200 {
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.contains(part), "{body}: {message}");
            assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        }
    }
    assert_eq!(running.post("/v1/completions", r#"{"prompt": "a", "temperature": NaN}"#).status, 400);
    assert_eq!(running.post("/models/gpt/v1/completions", "{").json()["error"]["code"], "validation");
    let generate: [(Value, u16, &str, &str); 8] = [
        (json!({"inputs": ""}), 400, "empty", "`inputs` is empty"),
        (json!({"inputs": ["a"]}), 422, "validation", "a string"),
        (json!({"inputs": "a", "parameters": {"typical_p": 0.5}}), 422, "validation", "`typical_p`"),
        (json!({"inputs": "a", "parameters": {"watermark": true}}), 422, "validation", "`watermark`"),
        (json!({"inputs": "a", "parameters": {"max_new_tokens": 64}}), 422, "validation", "`truncate`"),
        (json!({"inputs": words(64), "parameters": {"max_new_tokens": 5}}), 422, "validation", "64 tokens"),
        (json!({"inputs": words(64), "parameters": {"max_new_tokens": 5, "truncate": 59}}), 200, "", ""),
        (json!({"inputs": "a", "model": "words"}), 424, "backend", "needs a model that writes"),
    ];
    for (body, status, kind, part) in generate {
        for path in ["/generate", "/generate_stream"] {
            let answer = running.post(path, &body.to_string());
            assert_eq!(answer.status, status, "{path} {body}: {}", answer.text());
            if status != 200 {
                assert_eq!(answer.json()["error_type"], kind, "{body}");
                assert!(answer.json()["error"].as_str().unwrap().contains(part), "{body}: {}", answer.text());
            }
        }
    }
    assert_eq!(running.get("/health").status, 200);
}

#[test]
fn what_never_fits_is_refused_before_anything_is_computed() {
    // Two layers of keys and values, 16 wide: 256 bytes a token, so that 200 tokens have room.
    let (_directory, running) = start(512, Settings { cache_bytes: 200 * 256, ..Settings::default() });
    let refused = running.post("/v1/completions", &long(400).to_string());
    assert_eq!((refused.status, refused.json()["error"]["code"].clone()), (413, json!("validation")));
    assert!(refused.text().contains("cache"), "{}", refused.text());
    // In a stream as well: the status is there before the first event.
    let mut body = long(400);
    body["stream"] = json!(true);
    assert_eq!(running.post("/v1/completions", &body.to_string()).status, 413);
    assert_eq!(running.ok("/v1/completions", &long(100).to_string())["choices"][0]["text"], "x".repeat(100));
    // More sequences than can ever be written at once.
    let (_directory, running) = start(64, Settings { streams: 2, ..Settings::default() });
    let three = json!({"prompt": "a", "n": 3, "max_tokens": 2});
    assert_eq!(running.post("/v1/completions", &three.to_string()).status, 413);
    running.ok("/v1/completions", &json!({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2}).to_string());
    let (_directory, running) = start(512, Settings { queue_tokens: 300, ..Settings::default() });
    let refused = running.post("/v1/completions", &long(400).to_string());
    assert!(refused.status == 413 && refused.text().contains("--queue-tokens"), "{}", refused.text());
}

#[test]
fn a_crowd_is_served_in_turns_and_everyone_gets_what_they_would_get_alone() {
    // Far more than fit at once: they wait for each other.
    let settings = Settings { streams: 6, cache_bytes: 300 * 256, ..Settings::default() };
    let (_directory, running) = start(64, settings);
    let body = |i: usize| json!({"prompt": "the ".repeat(1 + i % 7), "max_tokens": 5 + 3 * (i % 9), "seed": i, "n": 1 + i % 2, "stop": "xq"});
    let ask = |i: usize| running.ok("/v1/completions", &body(i).to_string())["choices"].clone();
    let alone: Vec<Value> = (0..24).map(ask).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..24).map(|i| scope.spawn(move || ask(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    until("all is told", || streams(&running) == (0.0, 0.0));
    assert!(running.metric("henson_written_tokens_total{model=\"gpt\"}") > 500.0);
    assert_eq!(running.metric("henson_first_token_seconds_count{model=\"gpt\"}"), 48.0);
}

#[test]
fn a_full_queue_turns_requests_away_and_recovers() {
    full_queue(Settings { queue_requests: 2, ..Settings::default() }, 1);
    full_queue(Settings { queue_tokens: 5000, ..Settings::default() }, 2000);
}

/// A server with two long streams, for which one more of so many tokens is too much.
fn full_queue(settings: Settings, tokens: usize) {
    let (_directory, running) = start(2048, settings);
    let body = |tokens: usize| {
        let mut body = long(tokens);
        body["stream"] = json!(true);
        body
    };
    let first = send(&running, "/v1/completions", &body(2000));
    let second = send(&running, "/v1/completions", &body(2000));
    until("both are written", || streams(&running).1 == 2.0);
    // Two are there already, and 4,000 tokens.
    let third = running.post("/v1/completions", &body(tokens).to_string());
    assert_eq!((third.status, third.json()["error"]["code"].clone()), (429, json!("overloaded")), "{}", third.text());
    assert!(third.header("retry-after").is_some());
    drop((first, second));
    until("the places are free", || running.post("/v1/completions", &body(1).to_string()).status == 200);
}

#[test]
fn clients_that_leave_free_their_place_within_a_second() {
    let (_directory, running) = start(4096, Settings { streams: 2, ..Settings::default() });
    let mut body = long(4000);
    for stream in [true, false] {
        body["stream"] = json!(stream);
        let clients: Vec<TcpStream> = (0..2).map(|_| send(&running, "/v1/completions", &body)).collect();
        until("both are written", || streams(&running).1 == 2.0);
        // Another one waits for a place.
        let waiting =
            send(&running, "/generate_stream", &json!({"inputs": "a", "parameters": {"max_new_tokens": 2000}}));
        until("one waits", || streams(&running).0 == 1.0);
        let (written, mut waits) = (running.metric("henson_written_tokens_total{model=\"gpt\"}"), waiting);
        drop(clients);
        let begin = Instant::now();
        waits.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // Its first event comes in their place.
        let (mut found, mut buffer) = (Vec::new(), [0; 1024]);
        while !String::from_utf8_lossy(&found).contains("data: ") {
            let length = waits.read(&mut buffer).unwrap();
            found.extend_from_slice(&buffer[..length]);
        }
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        drop(waits);
        assert!(until("all have left", || streams(&running) == (0.0, 0.0)) < Duration::from_secs(1));
        // Hardly anything was written for nobody.
        let after = running.metric("henson_written_tokens_total{model=\"gpt\"}") - written;
        assert!(after < 4000.0, "{after} tokens");
    }
}

#[test]
fn requests_that_wait_too_long_are_told_so() {
    let settings = Settings { streams: 1, request_timeout: Duration::from_millis(300), ..Settings::default() };
    let (_directory, running) = start(4096, settings);
    let mut endless = long(4000);
    endless["stream"] = json!(true);
    let first = send(&running, "/v1/completions", &endless);
    until("it is written", || streams(&running).1 == 1.0);
    // A stream fails in the stream, another request with its status.
    let mut second = send(&running, "/generate_stream", &json!({"inputs": "a"}));
    let third = running.post("/v1/completions", r#"{"prompt": "a"}"#);
    assert_eq!((third.status, third.json()["error"]["type"].clone()), (503, json!("server_error")), "{}", third.text());
    let answer = read_answer(&mut second);
    let event: Value = serde_json::from_str(answer.text().trim().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!((answer.status, &event["error_type"]), (200, &json!("unhealthy")));
    drop(first);
    until("the place is free", || streams(&running) == (0.0, 0.0));
    running.ok("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#);
}

#[test]
fn stopping_and_replacing_finish_what_was_begun() {
    let (directory, mut running) = start(2048, Settings::default());
    let mut body = long(1000);
    body["stream"] = json!(true);
    let mut streams_begun: Vec<TcpStream> = (0..3).map(|_| send(&running, "/v1/completions", &body)).collect();
    until("all are written", || streams(&running).1 == 3.0);
    // Other weights take over; those who began keep theirs.
    set_weights(directory.path(), "h.0.mlp.c_fc.bias", None, 0.25);
    let (loaded, errors) = running.handle.reload();
    assert!(loaded == 1 && errors.is_empty(), "{errors:?}");
    streams_begun.push(send(&running, "/v1/completions", &body));
    std::thread::sleep(Duration::from_millis(20));
    running.stop().unwrap();
    for stream in &mut streams_begun {
        let answer = read_answer(stream);
        assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
        assert_eq!(answer.text().matches("\"text\":\"x\"").count(), 1000);
    }
}

#[test]
fn an_encoder_decoder_writes_what_its_source_says() {
    let directory = tempfile::TempDir::new().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers/bart");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(golden.join(file), directory.path().join(file)).unwrap();
    }
    let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"].map(str::to_owned).into_iter();
    let pieces = pieces.chain((b'a'..=b'z').map(|c| char::from(c).to_string()));
    let vocabulary: Value = pieces.enumerate().map(|(id, piece)| (piece, json!(id))).collect();
    assert!(config["vocab_size"].as_u64().unwrap() >= 31);
    let special = |(id, token)| {
        json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    let special: Value = ["<s>", "<pad>", "</s>"].into_iter().enumerate().map(special).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": true,
                           "add_prefix_space": false},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let running = Running::start(&[("bart", directory.path())], Settings::default());
    assert_eq!(running.get("/info").json()["encoder_decoder"], true);
    let body = json!({"prompt": "a b c", "temperature": 0, "max_tokens": 6, "logit_bias": {"10": 100}, "logprobs": 1});
    let answer = running.ok("/v1/completions", &body.to_string());
    // Five tokens of the source, its start and end among them.
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert!(answer["choices"][0]["text"].as_str().unwrap().contains('f'), "{answer}");
    for (field, body) in [
        ("echo", json!({"prompt": "a", "echo": true})),
        ("probabilities", json!({"inputs": "a", "parameters": {"details": true, "decoder_input_details": true}})),
        ("return_full_text", json!({"inputs": "a", "parameters": {"return_full_text": true}})),
    ] {
        let path = if body.get("prompt").is_some() { "/v1/completions" } else { "/generate" };
        let refused = running.post(path, &body.to_string());
        assert!(refused.status == 422 && refused.text().contains(field), "{body}: {}", refused.text());
    }
}
