//! The examples of docs/serving.md, each sent to a server with small models of the names that the document uses.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::{Answer, Running, model, writer};
use henson_serve::Settings;

/// A command line of the document in words: single quotes, and backslashes at the ends of lines.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for character in command.replace("\\\n", " ").chars() {
        match character {
            '\'' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => words.push(String::new()),
            c => words.last_mut().unwrap().push(c),
        }
    }
    assert!(!quoted, "{command}");
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

/// Does what curl would do.
fn curl(running: &Running, command: &str) -> (String, Answer) {
    let (mut url, mut headers, mut body) = (None, String::new(), None);
    let mut words = words(command).into_iter().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "-s" | "-sN" => {}
            "-H" => headers += &format!("{}\r\n", words.next().unwrap()),
            "-d" => body = words.next(),
            word => assert!(url.replace(word.to_owned()).is_none() && !word.starts_with('-'), "{command}"),
        }
    }
    let url = url.unwrap_or_else(|| panic!("no address in {command}"));
    let path = url.strip_prefix("localhost:8080").unwrap_or_else(|| panic!("another address in {command}"));
    let answer = match body {
        Some(body) => running.post_with(path, body.as_bytes(), &headers),
        None => running.get(path),
    };
    (path.split('?').next().unwrap_or(path).to_owned(), answer)
}

#[test]
fn every_example_works_and_every_route_has_one() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/serving.md");
    let document = std::fs::read_to_string(document).unwrap();
    let heads = [
        ("minilm", "model"),
        ("words", "mlm"),
        ("sentiment", "sequence"),
        ("ranker", "regression"),
        ("entities", "token"),
        ("reader", "qa"),
        ("stories", "choice"),
    ];
    let directories: Vec<_> = heads.iter().map(|(name, head)| (*name, model(head))).collect();
    // For labels of one's own: the classifier with the labels of inference.
    let inference = model("sequence");
    let path = inference.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["id2label"] = serde_json::json!({"0": "contradiction", "1": "neutral", "2": "entailment"});
    std::fs::write(path, config.to_string()).unwrap();
    let mut models: Vec<(&str, &Path)> =
        directories.iter().map(|(name, directory)| (*name, directory.path())).collect();
    models.push(("inference", inference.path()));
    let gpt = writer(64);
    models.push(("gpt", gpt.path()));
    let runs = tempfile::TempDir::new().unwrap();
    std::fs::create_dir(runs.path().join("mini")).unwrap();
    std::fs::write(runs.path().join("mini/metrics.jsonl"), "{\"step\": 1}\n").unwrap();
    let running = Running::start(&models, Settings { runs: Some(runs.path().to_owned()), ..Settings::default() });

    let blocks = document.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let text = blocks.collect::<Vec<_>>().join("");
    let commands: Vec<String> =
        text.split("curl ").map(str::trim).filter(|c| !c.is_empty()).map(|c| format!("curl {c}")).collect();
    assert!(commands.len() > 20);
    let mut shown = BTreeSet::new();
    for command in &commands {
        let (path, answer) = curl(&running, command);
        assert_eq!(answer.status, 200, "{command}: {}", answer.text());
        assert!(!answer.body.is_empty(), "{command}");
        let path = models.iter().fold(path, |path, (name, _)| path.replacen(&format!("/models/{name}/"), "/", 1));
        shown.insert(path.replace("/runs/mini", "/runs/{run}"));
    }
    let documented = running.get("/openapi.json").json();
    let routes = documented["paths"].as_object().unwrap().keys().filter(|path| !path.starts_with("/models/"));
    for route in routes {
        assert!(shown.contains(route), "docs/serving.md has no example of {route}");
    }
}
