//! Weights near the largest f32: what cannot be computed is an error of its own request, on every route that computes.

use std::collections::BTreeSet;

use crate::common::{Running, model, set_weights, writer};
use henson_serve::Settings;
use serde_json::{Value, json};

/// Texts of more tokens than this overflow, in the first LayerNorm.
const POSITION: usize = 9;
const LONG: &str = "a b c d e f g h i j";

/// A route, the model that it is asked of, a body that works, and one whose second text (or only one) overflows.
fn cases() -> Vec<(&'static str, &'static str, Value, Value)> {
    vec![
        ("/embed", "model", json!({"inputs": ["jim", "a b"]}), json!({"inputs": ["jim", LONG]})),
        ("/embed_all", "model", json!({"inputs": ["jim", "a b"]}), json!({"inputs": ["jim", LONG]})),
        (
            "/similarity",
            "model",
            json!({"inputs": {"source_sentence": "jim", "sentences": ["a"]}}),
            json!({"inputs": {"source_sentence": "jim", "sentences": [LONG]}}),
        ),
        ("/v1/embeddings", "model", json!({"input": ["jim", "a b"]}), json!({"input": ["jim", LONG]})),
        (
            "/fill",
            "mlm",
            json!({"inputs": ["[MASK]", "a [MASK]"]}),
            json!({"inputs": ["[MASK]", format!("{LONG} [MASK]")]}),
        ),
        ("/predict", "sequence", json!({"inputs": [["jim"], ["a"]]}), json!({"inputs": [["jim"], [LONG]]})),
        (
            "/rerank",
            "regression",
            json!({"query": "jim", "texts": ["a", "b"]}),
            json!({"query": "jim", "texts": ["a", LONG]}),
        ),
        (
            "/v1/rerank",
            "regression",
            json!({"query": "jim", "documents": ["a", "b"]}),
            json!({"query": "jim", "documents": ["a", LONG]}),
        ),
        (
            "/v2/rerank",
            "regression",
            json!({"query": "jim", "documents": ["a", "b"]}),
            json!({"query": "jim", "documents": ["a", LONG]}),
        ),
        (
            "/zero_shot",
            "entailment",
            json!({"inputs": ["jim", "a"], "candidate_labels": ["b"], "hypothesis_template": "{}"}),
            json!({"inputs": ["jim", LONG], "candidate_labels": ["b"], "hypothesis_template": "{}"}),
        ),
        ("/tag", "token", json!({"inputs": ["jim", "a"]}), json!({"inputs": ["jim", LONG]})),
        ("/answer", "qa", json!({"question": "jim?", "context": "a b"}), json!({"question": "jim?", "context": LONG})),
        (
            "/choose",
            "choice",
            json!({"context": "jim", "choices": ["a", "b"]}),
            json!({"context": "jim", "choices": ["a", LONG]}),
        ),
        (
            "/v1/completions",
            "gpt",
            json!({"prompt": ["jim", "a b"], "max_tokens": 2, "seed": 1}),
            json!({"prompt": ["jim", LONG], "max_tokens": 2}),
        ),
        (
            "/generate",
            "gpt",
            json!({"inputs": "jim", "parameters": {"max_new_tokens": 2}}),
            json!({"inputs": LONG, "parameters": {"max_new_tokens": 2}}),
        ),
        ("/inside/attention", "model", json!({"inputs": "jim a"}), json!({"inputs": LONG})),
        (
            "/inside/neighbours",
            "model",
            json!({"word": "jim", "inputs": ["jim", "a jim"]}),
            json!({"word": "jim", "inputs": ["jim", format!("{LONG} jim")]}),
        ),
    ]
}

/// Routes with a body that compute nothing, the one that passes requests on to others, and the one whose answer has begun when
/// something fails.
const WITHOUT_NUMBERS: [&str; 4] = ["/tokenize", "/decode", "/", "/generate_stream"];

#[test]
fn results_that_are_not_finite_fail_their_own_request_on_every_route() {
    let heads = ["model", "mlm", "sequence", "regression", "token", "qa", "choice", "entailment"];
    let directories = heads.map(|head| {
        let directory = model(if head == "entailment" { "sequence" } else { head });
        if head == "entailment" {
            let path = directory.path().join("config.json");
            let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            config["id2label"] = json!({"0": "contradiction", "1": "neutral", "2": "entailment"});
            std::fs::write(&path, config.to_string()).unwrap();
        }
        set_weights(directory.path(), "embeddings.position_embeddings.weight", Some(POSITION), 3.4e38);
        directory
    });
    let gpt = writer(64);
    set_weights(gpt.path(), "transformer.wpe.weight", Some(POSITION), 3.4e38);
    let mut models: Vec<_> = heads.iter().copied().zip(directories.iter().map(tempfile::TempDir::path)).collect();
    models.push(("gpt", gpt.path()));
    let running = Running::start(&models, Settings::default());

    let document = running.get("/openapi.json").json();
    let paths = document["paths"].as_object().unwrap().iter();
    let posts = paths.filter(|(path, methods)| !methods["post"].is_null() && !path.starts_with("/models/"));
    let routes: BTreeSet<&str> = posts.map(|(path, _)| path.as_str()).collect();
    let tried: BTreeSet<&str> = cases().iter().map(|(path, ..)| *path).chain(WITHOUT_NUMBERS).collect();
    assert_eq!(tried, routes, "a route without a case here");

    let stream = running.post("/generate_stream", &json!({"inputs": LONG}).to_string());
    assert_eq!(stream.status, 200);
    assert!(stream.text().contains("not finite") && stream.text().contains("backend"), "{}", stream.text());
    for (path, name, good, bad) in cases() {
        let address = format!("/models/{name}{path}");
        let (good, bad) = (good.to_string(), bad.to_string());
        let before = running.ok(&address, &good);
        assert!(!before.to_string().contains("null,null"), "{address}: {before}");
        // Every completion has a name of its own.
        let named = |mut answer: Value| {
            answer
                .as_object_mut()
                .into_iter()
                .for_each(|answer| answer.retain(|key, _| key != "id" && key != "created"));
            answer
        };
        let before = named(before);
        // Many at once share batches: short ones get the same bits as alone.
        std::thread::scope(|scope| {
            let failing = (0..4).map(|_| scope.spawn(|| running.post(&address, &bad)));
            let failing: Vec<_> = failing.collect();
            let working: Vec<_> = (0..4).map(|_| scope.spawn(|| running.post(&address, &good))).collect();
            for thread in working {
                let answer = thread.join().unwrap();
                assert_eq!((answer.status, named(answer.json())), (200, before.clone()), "{address}");
            }
            for thread in failing {
                let answer = thread.join().unwrap();
                assert_eq!(answer.status, 424, "{address}: {}", answer.text());
                let alone = matches!(path, "/answer" | "/choose" | "/inside/attention" | "/generate");
                let number = if alone { 1 } else { 2 };
                let expected = format!("results for text {number} are not finite");
                assert!(answer.text().contains(&expected), "{address}: {}", answer.text());
            }
        });
    }
}

/// Numbers that are large but finite have a direction: their squares overflow f32, and the vector must not become zero.
#[test]
fn large_finite_vectors_keep_their_direction() {
    let directory = model("model");
    let running = Running::start(&[("m", directory.path())], Settings::default());
    let body = r#"{"inputs": {"source_sentence": "jim", "sentences": ["jim", "a b c"]}}"#;
    let before = crate::common::floats(&running.ok("/similarity", body));
    set_weights(directory.path(), "encoder.layer.1.output.LayerNorm.weight", None, 3e37);
    set_weights(directory.path(), "encoder.layer.1.output.LayerNorm.bias", None, 0.0);
    let (loaded, errors) = running.handle.reload();
    assert!(loaded == 1 && errors.is_empty(), "{errors:?}");
    let after = crate::common::floats(&running.ok("/similarity", body));
    assert!((after[0] - 1.0).abs() < 1e-5, "{after:?}, before {before:?}");
    let vector = crate::common::floats(&running.ok("/embed", r#"{"inputs": "jim"}"#)[0]);
    let length = vector.iter().map(|x| x * x).sum::<f32>();
    assert!((length - 1.0).abs() < 1e-5, "{vector:?}");
}
