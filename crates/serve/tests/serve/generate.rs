//! Models that write: OpenAI's completions and Text Generation Inference's routes, over a real socket, and beside the library.

use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{END_OF_TEXT, Running, byte, writer};
use henson_infer::{GenerateSettings, Generated, Model, Sampling, Want};
use henson_serve::Settings;
use henson_tensor::{DType, Device};
use serde_json::{Value, json};

fn start() -> (tempfile::TempDir, Running) {
    let directory = writer(64);
    let running = Running::start(&[("gpt", directory.path())], Settings::default());
    (directory, running)
}

/// The same from the library.
fn generate(directory: &Path, prompt: &str, settings: &GenerateSettings) -> Vec<Generated> {
    let device = Device::cpu(None, Some(1)).unwrap();
    let model = Model::open(directory, &device, DType::F32, Want::AsSaved).unwrap();
    let prompt = model.prompt(prompt).unwrap();
    let settings = GenerateSettings { end: vec![END_OF_TEXT as u32], ..settings.clone() };
    model.generate(&[prompt], &settings, |_| ControlFlow::Continue(())).unwrap().remove(0)
}

fn drawn(seed: u64) -> Option<Sampling> {
    Some(Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed })
}

fn completion(running: &Running, body: &Value) -> Value {
    running.ok("/v1/completions", &body.to_string())
}

/// The events of a stream.
fn events(running: &Running, path: &str, body: &Value) -> Vec<String> {
    let answer = running.post(path, &body.to_string());
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let text = answer.text();
    let mut events: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(events.pop(), Some(""), "{text}");
    events.iter().map(|event| event.strip_prefix("data: ").unwrap().to_owned()).collect()
}

/// The parts of a completion that is streamed, without its [DONE].
fn parts(running: &Running, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut events = events(running, "/v1/completions", &body);
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// The text and the finish reason of a choice, from the parts of a stream.
fn joined(parts: &[Value], index: usize) -> (String, Value) {
    let choices = || parts.iter().flat_map(|part| part["choices"].as_array().unwrap()).filter(|c| c["index"] == index);
    let ends: Vec<&Value> = choices().map(|choice| &choice["finish_reason"]).collect();
    let (last, others) = ends.split_last().unwrap();
    assert!(others.iter().all(|reason| reason.is_null()), "{ends:?}");
    (choices().map(|choice| choice["text"].as_str().unwrap()).collect(), (*last).clone())
}

/// A bias that leaves one token to choose.
fn only(token: usize) -> Value {
    json!({ token.to_string(): 100 })
}

#[test]
fn completions_are_those_of_the_library() {
    let (directory, running) = start();
    for (prompt, tokens) in [("the", 8), ("a", 30), ("Jim Henson was", 16)] {
        let greedy = generate(
            directory.path(),
            prompt,
            &GenerateSettings { max_new_tokens: Some(tokens), ..GenerateSettings::default() },
        );
        let answer = completion(&running, &json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0}));
        assert_eq!(answer["choices"][0]["text"], json!(greedy[0].text), "{prompt}");
        assert_eq!(answer["usage"]["completion_tokens"], greedy[0].ids.len());
        // Draws: several of one prompt, with a seed.
        let settings = GenerateSettings {
            max_new_tokens: Some(tokens),
            sampling: drawn(7),
            return_sequences: 3,
            ..GenerateSettings::default()
        };
        let texts: Vec<Value> =
            generate(directory.path(), prompt, &settings).into_iter().map(|one| json!(one.text)).collect();
        let answer = completion(&running, &json!({"prompt": prompt, "max_tokens": tokens, "n": 3, "seed": 7}));
        let found: Vec<Value> = answer["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
        assert_eq!(found, texts, "{prompt}");
        assert_ne!(found[0], found[1]);
    }
}

#[test]
fn a_completion_has_openais_form() {
    let (_directory, running) = start();
    let answer = completion(&running, &json!({"prompt": "the a", "temperature": 0, "logit_bias": only(byte('x'))}));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("gpt")));
    assert!(answer["created"].as_u64().unwrap() > 1_600_000_000);
    let choice = json!({"text": "x".repeat(16), "index": 0, "logprobs": null, "finish_reason": "length"});
    assert_eq!(answer["choices"], json!([choice]));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}));
    // Prompts in all their forms: choices are numbered through.
    let fixed = json!({"max_tokens": 1, "temperature": 0, "logit_bias": only(byte('x')), "echo": true});
    for (prompt, texts) in [
        (json!(["a", "b"]), json!(["ax", "bx"])),
        (json!([byte('a'), byte('b')]), json!(["abx"])),
        (json!([[byte('a')], [byte('b')]]), json!(["ax", "bx"])),
        // Begins with the end of the text before.
        (json!(""), json!(["x"])),
    ] {
        let mut body = fixed.clone();
        body["prompt"] = prompt;
        let answer = completion(&running, &body);
        let choices = answer["choices"].as_array().unwrap();
        let found: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
        assert_eq!(json!(found), texts, "{body}");
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i), "{answer}");
    }
    // The likeliest tokens are the same for each of `n`.
    let answer = completion(&running, &json!({"prompt": ["a", "b"], "n": 2, "temperature": 0, "max_tokens": 5}));
    let texts: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert!(texts[0] == texts[1] && texts[2] == texts[3], "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    // An end of the text is no part of it.
    let ends = json!({"prompt": "a", "temperature": 0, "logit_bias": only(END_OF_TEXT), "logprobs": 1});
    let end = completion(&running, &ends);
    assert_eq!(end["choices"][0]["logprobs"]["tokens"], json!([]));
    assert_eq!((&end["choices"][0]["text"], &end["choices"][0]["finish_reason"]), (&json!(""), &json!("stop")));
    let models = running.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "gpt");
    assert_eq!(running.get("/info").json()["abilities"].as_array().unwrap().last().unwrap(), "generate");
}

#[test]
fn seeds_repeat_and_none_differs() {
    let (_directory, running) = start();
    let text = |seed: Value| {
        let body = json!({"prompt": "the", "max_tokens": 20, "seed": seed});
        completion(&running, &body)["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!(3)), text(json!(3)));
    assert_ne!(text(json!(3)), text(json!(4)));
    assert_ne!(text(json!(null)), text(json!(null)));
}

#[test]
fn the_best_of_several_has_the_highest_mean() {
    let (directory, running) = start();
    let settings = GenerateSettings {
        max_new_tokens: Some(9),
        sampling: drawn(5),
        return_sequences: 6,
        ..GenerateSettings::default()
    };
    let mut all = generate(directory.path(), "the", &settings);
    all.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mean = |one: &Generated| one.tokens.iter().map(|token| token.logprob).sum::<f32>() / one.tokens.len() as f32;
    assert!((mean(&all[0]) - all[0].score).abs() < 1e-4);
    let answer = completion(&running, &json!({"prompt": "the", "max_tokens": 9, "seed": 5, "n": 2, "best_of": 6}));
    let texts: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, [&json!(all[0].text), &json!(all[1].text)]);
    // All that was written counts.
    assert_eq!(answer["usage"]["completion_tokens"], all.iter().map(|one| one.ids.len()).sum::<usize>());
}

#[test]
fn probabilities_of_tokens_and_of_the_prompt() {
    let (directory, running) = start();
    let body = json!({"prompt": "a the cat", "max_tokens": 6, "temperature": 0, "logprobs": 3, "echo": true});
    let answer = completion(&running, &body);
    let choice = &answer["choices"][0];
    let (text, logprobs) = (choice["text"].as_str().unwrap(), &choice["logprobs"]);
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let tokens: String = list("tokens").iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens, text);
    for (token, offset) in list("tokens").iter().zip(list("text_offset")) {
        let rest: String = text.chars().skip(offset.as_u64().unwrap() as usize).collect();
        assert!(rest.starts_with(token.as_str().unwrap()), "{token} at {offset} of {text}");
    }
    let (given, top) = (list("token_logprobs"), list("top_logprobs"));
    assert!(given[0].is_null() && top[0].is_null());
    for ((token, given), top) in list("tokens").iter().zip(&given).zip(&top).skip(1) {
        let top = top.as_object().unwrap();
        assert!((3..=4).contains(&top.len()), "{top:?}");
        if !token.as_str().unwrap().is_empty() {
            assert_eq!(top.get(token.as_str().unwrap()), Some(given), "{token}: {top:?}");
        }
    }
    // What was written is the likeliest each time; the prompt's are those of a writer that has come so far.
    for (given, top) in given.iter().zip(&top).skip(6) {
        let best = top.as_object().unwrap().values().map(|x| x.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert_eq!(given.as_f64(), Some(best));
    }
    let device = Device::cpu(None, Some(1)).unwrap();
    let model = Model::open(directory.path(), &device, DType::F32, Want::AsSaved).unwrap();
    let prompt = model.prompt("a the cat").unwrap();
    assert_eq!(prompt.len(), 6);
    let settings = GenerateSettings { max_new_tokens: Some(1), logprobs: Some(256), ..GenerateSettings::default() };
    for i in 1..6 {
        let next = model.generate(&[prompt[..i].to_vec()], &settings, |_| ControlFlow::Continue(())).unwrap();
        let (_, expected) = next[0][0].tokens[0].alternatives.iter().find(|(id, _)| *id == prompt[i]).unwrap();
        assert!((given[i].as_f64().unwrap() as f32 - expected).abs() < 1e-4, "{i}: {given:?} {expected}");
    }
    // A special token counts, though the text is without it.
    let special = json!({"prompt": [byte('a'), END_OF_TEXT], "max_tokens": 0, "logprobs": 0, "echo": true});
    assert_eq!(completion(&running, &special)["choices"][0]["logprobs"]["tokens"], json!(["a", ""]));
    // Only scores: nothing is written.
    let scores = json!({"prompt": "a the cat", "max_tokens": 0, "logprobs": 1, "echo": true});
    let scored = completion(&running, &scores);
    assert_eq!(scored["choices"][0]["text"], "a the cat");
    assert_eq!(scored["choices"][0]["logprobs"]["token_logprobs"], json!(given[..6]));
    assert_eq!(scored["usage"], json!({"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}));
    let streamed = parts(&running, &scores);
    assert_eq!(joined(&streamed, 0), ("a the cat".to_owned(), json!("length")));
}

#[test]
fn stop_strings_end_a_text_and_are_no_part_of_it() {
    let (directory, running) = start();
    let settings = GenerateSettings { max_new_tokens: Some(40), ..GenerateSettings::default() };
    let mut cut = 0;
    for prompt in ["the", "a", "b", "cat", "Jim", "frog", "x", "0"] {
        let whole = generate(directory.path(), prompt, &settings).remove(0).text;
        let letters: Vec<char> = whole.chars().collect();
        let mut pairs = letters.windows(2).skip(4).filter(|pair| !pair.contains(&'\u{fffd}'));
        let Some(middle) = pairs.next().map(|pair| pair.iter().collect::<String>()) else { continue };
        let body = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": ["nowhere at all", middle], "logprobs": 0});
        let answer = completion(&running, &body);
        let choice = &answer["choices"][0];
        let expected = &whole[..whole.find(&middle).unwrap()];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(expected), &json!("stop")), "{body}");
        let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
        let tokens: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert!(tokens.starts_with(expected), "{tokens:?} {expected:?}");
        // Of the stop string's tokens, only one that begins before it is left.
        let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
        let length = expected.chars().count() as u64;
        assert!(offsets.iter().all(|offset| offset.as_u64().unwrap() < length), "{offsets:?} of {length}");
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 40);
        assert_eq!(joined(&parts(&running, &body), 0), (expected.to_owned(), json!("stop")));
        cut += 1;
    }
    assert!(cut >= 3, "{cut} texts could be cut");
}

#[test]
fn streams_add_up_to_the_same_text() {
    let (_directory, running) = start();
    for seed in 0..6 {
        // Noise of bytes: characters come in parts, and parts that never become one.
        let body = json!({"prompt": ["the", "a"], "n": 2, "max_tokens": 25, "seed": seed, "stop": ["e", "\u{1f438}x"],
                          "logprobs": 1, "echo": seed % 2 == 0});
        let whole = completion(&running, &body);
        let parts = parts(&running, &body);
        let mut several = false;
        for index in 0..4 {
            let choice = &whole["choices"][index];
            let (text, reason) = joined(&parts, index);
            assert_eq!((json!(text), &reason), (choice["text"].clone(), &choice["finish_reason"]), "{body}");
            let of_index = || {
                let choices = parts.iter().map(|part| &part["choices"][0]);
                choices.filter(move |choice| choice["index"] == index)
            };
            several |= of_index().count() > 2;
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let joined: Vec<Value> =
                    of_index().flat_map(|choice| choice["logprobs"][list].as_array().unwrap().clone()).collect();
                assert_eq!(json!(joined), choice["logprobs"][list], "{list} of {body}");
            }
        }
        assert!(several);
        assert!(parts.iter().all(|part| part.get("usage").is_none() && part["object"] == "text_completion"));
        assert!(parts.iter().all(|part| part["id"] == parts[0]["id"]));
    }
    let body = json!({"prompt": "the", "max_tokens": 5, "seed": 1, "stream_options": {"include_usage": true}});
    let parts = parts(&running, &body);
    let (last, others) = parts.split_last().unwrap();
    assert!(others.iter().all(|part| part["usage"].is_null() && part.get("usage").is_some()));
    assert_eq!(last["usage"], json!({"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}));
    assert_eq!(last["choices"], json!([]));
}

#[test]
fn text_generation_inferences_routes() {
    let (directory, running) = start();
    let greedy = generate(
        directory.path(),
        "the",
        &GenerateSettings { max_new_tokens: Some(20), logprobs: Some(2), ..GenerateSettings::default() },
    );
    let plain = running.ok("/generate", r#"{"inputs": "the"}"#);
    assert_eq!(plain, json!({"generated_text": greedy[0].text}));
    let full = running.ok("/generate", r#"{"inputs": "the", "parameters": {"return_full_text": true}}"#);
    assert_eq!(full["generated_text"], json!(format!("the{}", greedy[0].text)));
    let parameters = json!({"details": true, "decoder_input_details": true, "top_n_tokens": 2, "seed": 5});
    let detailed = running.ok("/generate", &json!({"inputs": "the a", "parameters": parameters}).to_string());
    let details = &detailed["details"];
    assert_eq!((&details["finish_reason"], &details["generated_tokens"]), (&json!("length"), &json!(20)));
    assert_eq!(details["seed"], json!(null), "nothing is drawn");
    assert_eq!(details["prefill"].as_array().unwrap().len(), 2);
    assert!(details["prefill"][0]["logprob"].is_null() && details["prefill"][1]["logprob"].is_number());
    assert_eq!(details["prefill"][1]["text"], " a");
    let tokens = details["tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), details["top_tokens"].as_array().unwrap().len()), (20, 20));
    let text: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(json!(text), detailed["generated_text"]);
    for (token, top) in tokens.iter().zip(details["top_tokens"].as_array().unwrap()) {
        assert_eq!((&token["id"], &token["logprob"]), (&top[0]["id"], &top[0]["logprob"]));
        assert_eq!((top.as_array().unwrap().len(), &token["special"]), (2, &json!(false)));
    }
    // The same bit by bit.
    let stream = events(&running, "/generate_stream", &json!({"inputs": "the a", "parameters": {"top_n_tokens": 2}}));
    let stream: Vec<Value> = stream.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(stream.iter().map(|event| event["token"].clone()).collect::<Vec<_>>(), *tokens);
    assert_eq!(json!(stream.iter().map(|event| &event["top_tokens"]).collect::<Vec<_>>()), details["top_tokens"]);
    let (last, others) = stream.split_last().unwrap();
    assert!(others.iter().all(|event| event["generated_text"].is_null() && event["details"].is_null()));
    assert!(stream.iter().enumerate().all(|(i, event)| event["index"] == i + 1));
    assert_eq!(last["generated_text"], detailed["generated_text"]);
    let end = json!({"finish_reason": "length", "generated_tokens": 20, "seed": null, "input_length": 2});
    assert_eq!(last["details"], end);
}

#[test]
fn text_generation_inferences_ends_and_choices() {
    let (directory, running) = start();
    let ask = |parameters: Value| {
        running.ok("/generate", &json!({"inputs": "cat the", "parameters": parameters}).to_string())
    };
    // A stop string is a part of the text.
    let whole = ask(json!({"max_new_tokens": 40}))["generated_text"].as_str().unwrap().to_owned();
    let letter = whole.chars().find(|c| *c != '\u{fffd}').unwrap().to_string();
    let stopped = ask(json!({"max_new_tokens": 40, "stop": [letter], "details": true}));
    let text = stopped["generated_text"].as_str().unwrap();
    assert!(text.ends_with(&letter) && whole.starts_with(text), "{text:?} of {whole:?}");
    assert_eq!(stopped["details"]["finish_reason"], "stop_sequence");
    // Of several, the best; the others are in the details.
    let settings = GenerateSettings {
        max_new_tokens: Some(7),
        sampling: Some(Sampling { temperature: 0.5, top_k: 9, top_p: 0.9, min_p: 0.01, seed: 3 }),
        return_sequences: 4,
        repetition_penalty: 1.2,
        ..GenerateSettings::default()
    };
    let mut all = generate(directory.path(), "cat the", &settings);
    all.sort_by(|a, b| b.score.total_cmp(&a.score));
    let parameters = json!({"max_new_tokens": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3,
                            "repetition_penalty": 1.2, "best_of": 4, "details": true});
    let best = ask(parameters);
    assert_eq!(best["generated_text"], json!(all[0].text));
    assert_eq!(best["details"]["seed"], 3);
    let others = best["details"]["best_of_sequences"].as_array().unwrap();
    let texts: Vec<&Value> = others.iter().map(|other| &other["generated_text"]).collect();
    assert_eq!(json!(texts), json!([all[1].text, all[2].text, all[3].text]));
    // The last tokens of the prompt are those that count.
    let cut = ask(json!({"truncate": 1, "details": true, "decoder_input_details": true}));
    assert_eq!(cut["details"]["prefill"].as_array().unwrap().len(), 1);
    assert_eq!(cut["details"]["prefill"][0]["text"], " the");
    let only_the = running.ok("/generate", r#"{"inputs": " the"}"#);
    assert_eq!(cut["generated_text"], only_the["generated_text"]);
    // An end token is among the tokens, not in the text. At / the answer is a list, or a stream.
    let body = json!({"prompt": "a", "temperature": 0, "logit_bias": only(END_OF_TEXT)});
    assert_eq!(completion(&running, &body)["usage"]["completion_tokens"], 1);
    let root = running.ok("/", r#"{"inputs": "cat the", "parameters": {"max_new_tokens": 3}}"#);
    assert_eq!(root, json!([ask(json!({"max_new_tokens": 3}))]));
    let stream = json!({"inputs": "cat the", "parameters": {"max_new_tokens": 3}, "stream": true});
    assert_eq!(events(&running, "/", &stream), events(&running, "/generate_stream", &stream));
}

#[test]
fn penalties_keep_tokens_from_coming_again() {
    let (_directory, running) = start();
    let text = |penalties: Value| {
        let mut body =
            json!({"prompt": "the", "max_tokens": 6, "temperature": 0, "logit_bias": {"120": 60, "121": 59}});
        penalties.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        completion(&running, &body)["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let plain = text(json!({}));
    assert!(plain.chars().all(|c| matches!(c, 'x' | 'y')), "{plain}");
    let count = |text: &str| text.chars().filter(|c| *c == plain.chars().next().unwrap()).count();
    // Once for each, so that both are equally far down after the first two; or for every time, so that they take turns.
    assert!(count(&text(json!({"presence_penalty": 2, "frequency_penalty": 2}))) < count(&plain), "{plain}");
    assert!(count(&text(json!({"presence_penalty": -2, "frequency_penalty": -2}))) == count(&plain), "{plain}");
}
