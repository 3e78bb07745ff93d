//! The binary as a user meets it: results on standard output, messages on standard error, exit codes, and a clear word
//! for whatever is wrong.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{run_with, text};

/// The golden weights of a head with a vocabulary of its 71 pieces.
fn model(head: &str) -> TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden").join(head);
    let directory = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(file), directory.path().join(file)).unwrap();
    }
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    pieces.extend((b'a'..=b'z').map(|c| char::from(c).to_string()));
    pieces.extend((pieces.len()..71).map(|i| format!("word{i}")));
    std::fs::write(directory.path().join("vocab.txt"), pieces.join("\n") + "\n").unwrap();
    directory
}

fn henson(arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).env_remove("HENSON_KERNELS").env("HF_HOME", "nowhere");
    run_with(&mut command, input)
}

#[track_caller]
fn lines(arguments: &[&str], input: &[u8]) -> Vec<Value> {
    let output = henson(arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// It fails with `code`, says all of `parts` on standard error, and nothing on standard output; it never panics.
#[track_caller]
fn fails(code: i32, arguments: &[&str], input: &[u8], parts: &[&str]) {
    let output = henson(arguments, input);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{arguments:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
    }
}

#[test]
fn fill_embed_and_features_speak_json() {
    let mlm = model("mlm");
    let directory = mlm.path().to_str().unwrap();
    let filled = lines(&["fill", "--model", directory, "--json", "-k", "2", "a [MASK] b", "[MASK]"], b"");
    assert_eq!(filled.len(), 2);
    // Offsets count characters, here and in `features`.
    let accents = lines(&["fill", "--model", directory, "--json", "\u{e9}\u{1f600} [MASK]"], b"");
    assert_eq!((&accents[0]["masks"][0]["start"], &accents[0]["masks"][0]["end"]), (&json!(3), &json!(9)));
    let accents = lines(&["features", "--model", directory, "\u{1f600} a"], b"");
    assert_eq!(accents[0]["offsets"], json!([null, [0, 1], [2, 3], null]));
    let best = &filled[0]["masks"][0]["predictions"];
    assert!(best.as_array().unwrap().len() == 2 && best[0]["token"].is_string());
    assert!(best[0]["probability"].as_f64() >= best[1]["probability"].as_f64());

    let from_stdin = lines(&["embed", "--model", directory, "--json"], b"a b\r\nc\n\n");
    assert_eq!(from_stdin.len(), 2);
    assert_eq!(from_stdin[0]["text"], "a b");
    assert_eq!(from_stdin[0]["embedding"].as_array().unwrap().len(), 24);
    let file = mlm.path().join("texts.txt");
    // With a byte order mark.
    std::fs::write(&file, "\u{feff}a b\nc\n\n").unwrap();
    assert_eq!(from_stdin, lines(&["embed", "--model", directory, "--json", "--file", file.to_str().unwrap()], b""));
    let normal = lines(&["embed", "--model", directory, "--json", "--normalise", "--pooling", "cls", "a"], b"");
    let length: f64 = normal[0]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!((length - 1.0).abs() < 1e-5);

    lines(&["embed", "--model", directory, "--kernels", "portable", "--json", "a"], b"");
    lines(&["embed", "--model", directory, "--json", "--normalise=false", "a"], b"");
    let tokens = lines(&["features", "--model", directory, "--layers", "-2", "a word40"], b"");
    assert_eq!(tokens[0]["tokens"], json!(["[CLS]", "a", "word40", "[SEP]"]));
    assert_eq!(tokens[0]["vectors"].as_array().unwrap().len(), 4);
}

#[test]
fn blank_lines_are_no_texts() {
    let mlm = model("mlm");
    let directory = mlm.path().to_str().unwrap();
    for command in [&["fill"][..], &["embed"], &["features"], &["tokenizer", "encode"]] {
        let ask = |input: &[u8]| henson(&[command, &["--model", directory, "--json"]].concat(), input);
        let output = ask(b"\na [MASK]\n \t\r\n\nb [MASK]\n\n");
        assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "warning: 4 blank lines of standard input were skipped\n", "{command:?}");
        let without = ask(b"a [MASK]\nb [MASK]\n");
        assert!(without.stderr.is_empty() && without.stdout == output.stdout, "{command:?}");
        for nothing in [&b""[..], b"\n \n"] {
            let output = ask(nothing);
            let message = text(&output.stderr);
            assert!(message.contains("standard input has no text"), "{command:?}: {message}");
            assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{command:?}");
        }
    }
    // Numbers are those of the lines, and an empty argument was meant.
    let output = henson(&["fill", "--model", directory], b"\n[MASK]\n\nno blank\n");
    assert!(text(&output.stderr).contains("text 4 has no [MASK]"), "{}", text(&output.stderr));
    assert_eq!(lines(&["features", "--model", directory, "", "a"], b"").len(), 2);
}

#[test]
fn feature_files_hold_the_same_numbers() {
    let model = model("model");
    let directory = model.path().to_str().unwrap();
    let expected = lines(&["features", "--model", directory, "a b", "c"], b"");
    assert_eq!(expected, lines(&["features", "--model", directory, "--json", "a b", "c"], b""));
    let both = henson(&["features", "--model", directory, "--json", "--format", "npy", "--out", "x.npy", "a"], b"");
    assert_eq!(both.status.code(), Some(2), "{}", text(&both.stderr));
    let numbers = |line: &Value| -> Vec<f32> {
        let rows = line["vectors"].as_array().unwrap();
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|x| x.as_f64().unwrap() as f32).collect()
    };
    let flat: Vec<f32> = expected.iter().flat_map(numbers).collect();
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    for format in ["npy", "safetensors"] {
        let out: PathBuf = model.path().join(format!("out.{format}"));
        let out_name = out.to_str().unwrap();
        let arguments = ["features", "--model", directory, "--format", format, "--out", out_name, "a b", "c"];
        lines(&arguments, b"");
        let bytes = std::fs::read(&out).unwrap();
        let start = match format {
            "npy" => {
                assert!(bytes.starts_with(b"\x93NUMPY\x01\x00"));
                let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
                assert!(header.is_multiple_of(64) && text(&bytes[10..header]).contains("(7, 24)"));
                header
            }
            _ => 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize,
        };
        assert_eq!(floats(&bytes[start..]), flat, "{format}");
        let sidecar = std::fs::read_to_string(format!("{out_name}.tokens.jsonl")).unwrap();
        assert_eq!(sidecar.lines().count(), 2);
        fails(1, &arguments, b"", &["exists", "--overwrite"]);
    }
    fails(2, &["features", "--model", directory, "--format", "npy", "a"], b"", &["--out <FILE>"]);
    let nowhere = ["features", "--model", directory, "--out", "no/such/file", "a"];
    fails(1, &nowhere, b"", &["no directory no/such"]);
}

#[test]
fn long_texts_are_cut_with_a_warning_or_windowed() {
    let mlm = model("mlm");
    let directory = mlm.path().to_str().unwrap();
    let long = "a b c ".repeat(50);
    let output = henson(&["embed", "--model", directory, "--json", &long], b"");
    assert!(output.status.success());
    let message = text(&output.stderr);
    assert!(message.contains("text 1") && message.contains("112 tokens") && message.contains("--windows"), "{message}");
    let output = henson(&["embed", "--model", directory, "--json", "--windows", &long], b"");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    for command in ["embed", "features", "fill"] {
        let output = henson(&[command, "--model", directory, "--max-length", "41", "a [MASK]"], b"");
        assert!(
            output.status.success() && text(&output.stderr).contains("no more than 40"),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn a_server_says_where_it_is_when_it_serves() {
    let model = model("mlm");
    let directory = model.path().to_str().unwrap();
    // A name is as good as an address, and the server answers to it.
    for host in ["localhost", "LocalHost", "127.0.0.1"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_henson"))
            .args(["serve", "--model", directory, "--host", host, "--port", "0", "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = serde_json::from_str::<Value>(&line).unwrap()["address"].as_str().unwrap().to_owned();
        let port = address.strip_prefix("http://127.0.0.1:").map(str::to_owned);
        let ask = |host: &str| {
            let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{}", port.as_ref().unwrap())).unwrap();
            write!(stream, "GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).unwrap();
            answer[9..12].to_owned()
        };
        // The models are loaded by then.
        let statuses = port.as_ref().map(|_| (ask("localhost"), ask("evil.test")));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(statuses, Some(("200".to_owned(), "421".to_owned())), "{host}: {address}");
    }
    fails(1, &["serve", "--model", directory, "--host", "no name", "--port", "0"], b"", &["--host no name"]);
    std::fs::write(model.path().join("config.json"), "{").unwrap();
    for arguments in
        [&["serve", "--model", directory, "--port", "0"][..], &["serve", "--model", directory, "--port", "0", "--json"]]
    {
        fails(1, arguments, b"", &["cannot load the model"]);
        let message = text(&henson(arguments, b"").stderr);
        assert!(!message.contains("serving on"), "{message}");
    }
}

#[test]
fn convert_writes_what_can_be_read_again() {
    let source = model("pretraining");
    let target = TempDir::new().unwrap();
    let (from, to) = (source.path().to_str().unwrap(), target.path().join("new"));
    let to = to.to_str().unwrap();
    let output = henson(&["convert", from, to], b"");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let ask = |model: &str| lines(&["fill", "--model", model, "--json", "a [MASK]"], b"");
    assert_eq!(ask(from), ask(to));
    fails(1, &["convert", from, to], b"", &["exists already"]);
    let output = henson(&["convert", from, to, "--overwrite", "--dtype", "bf16"], b"");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn convert_keeps_what_sentence_transformers_needs() {
    let source = model("model");
    let at = |name: &str| source.path().join(name);
    std::fs::create_dir(at("1_Pooling")).unwrap();
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]"#;
    std::fs::write(at("modules.json"), modules).unwrap();
    std::fs::write(at("1_Pooling/config.json"), r#"{"pooling_mode_cls_token": true}"#).unwrap();
    std::fs::write(at("sentence_bert_config.json"), r#"{"max_seq_length": 5}"#).unwrap();
    let target = TempDir::new().unwrap();
    let (from, to) = (source.path().to_str().unwrap(), target.path().join("new"));
    let to = to.to_str().unwrap();
    assert!(henson(&["convert", from, to], b"").status.success());
    let ask = |model: &str| lines(&["embed", "--model", model, "--json", "a b c d e f g"], b"");
    assert_eq!(ask(from), ask(to));
}

#[test]
fn convert_keeps_a_tagger() {
    let encoder = model("model");
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("tags.conll"), "word40 B-PER\nword41 I-PER\na O\n\nb O\nword40 B-PER\n").unwrap();
    let (data, tagger, new) = (at("tags.conll"), at("tagger"), at("new"));
    let features = ["--frozen", "--layers", "concat-last-2", "--set", "epochs=1"];
    let mut arguments = vec!["finetune", "--task", "ner", "--model", encoder.path().to_str().unwrap()];
    arguments.extend(["--train", &data, "--dev", &data, "--out", &tagger]);
    arguments.extend(features);
    let output = henson(&arguments, b"");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = henson(&["convert", &tagger, &new], b"");
    assert!(output.status.success() && text(&output.stderr).contains("tagger.json"), "{}", text(&output.stderr));
    let ask = |model: &str| lines(&["tag", "--model", model, "--json", "word40 a word41"], b"");
    assert_eq!(ask(&tagger), ask(&new));
    for name in ["tagger.json", "tagger.safetensors"] {
        let read = |directory: &str| std::fs::read(Path::new(directory).join(name)).unwrap();
        assert!(read(&tagger) == read(&new), "{name}");
    }
    // The encoder may change its precision under it, and what was converted may be replaced.
    let output = henson(&["convert", &tagger, &new, "--overwrite", "--dtype", "bf16"], b"");
    assert!(output.status.success(), "{}", text(&output.stderr));
    ask(&new);
    // A part of a tagger is no tagger.
    std::fs::remove_file(Path::new(&tagger).join("tagger.safetensors")).unwrap();
    fails(1, &["convert", &tagger, &at("other")], b"", &["tagger.safetensors"]);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_written_to_and_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let model = model("model");
    let pipe = model.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = {
        let pipe = pipe.clone();
        std::thread::spawn(move || std::fs::read_to_string(pipe).unwrap())
    };
    let directory = model.path().to_str().unwrap();
    lines(&["features", "--model", directory, "--out", pipe.to_str().unwrap(), "--overwrite", "a"], b"");
    assert!(reader.join().unwrap().contains("[CLS]"));
    assert!(std::fs::metadata(&pipe).unwrap().file_type().is_fifo());
}

#[test]
fn info_and_bench_describe_sizes() {
    let info = &lines(&["info", "bert-base", "--json"], b"")[0];
    // 110,106,428 is what transformers counts for BertForPreTraining of this size.
    assert_eq!(info["parameters"], 110_106_428);
    let groups: u64 = info["groups"].as_array().unwrap().iter().map(|g| g["parameters"].as_u64().unwrap()).sum();
    assert_eq!(groups, 110_106_428);
    // The same of models that write, as transformers counts them: constants next to the weights are none.
    for (size, architecture, parameters, layers, groups) in [
        ("gpt2", "GPT2LMHeadModel", 124_439_808, Value::Null, vec!["embeddings", "decoder"]),
        ("t5-small", "T5ForConditionalGeneration", 60_506_624, 6.into(), vec!["embeddings", "encoder", "decoder"]),
        ("bart-base", "BartForConditionalGeneration", 139_420_416, 6.into(), vec!["embeddings", "encoder", "decoder"]),
        ("transformer-base", "MarianMTModel", 63_082_496, 6.into(), vec!["embeddings", "encoder", "decoder"]),
    ] {
        let info = &lines(&["info", size, "--json"], b"")[0];
        assert_eq!((&info["architecture"], &info["parameters"]), (&architecture.into(), &parameters.into()), "{size}");
        let names: Vec<&str> =
            info["groups"].as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect();
        assert_eq!((&info["decoder_layers"], names), (&layers, groups), "{size}");
    }
    let memory = |size: &str, seq: &str| {
        lines(&["info", size, "--batch", "1", "--seq", seq, "--json"], b"")[0]["memory_mib"].clone()
    };
    let (small, large) = (memory("t5-small", "100"), memory("t5-small", "200"));
    let mib = |memory: &Value, key: &str| memory[key].as_f64().unwrap();
    // 100 tokens more to read and to write: six layers of each kind, and a row of logits for each token written.
    let grown = mib(&large, "train_f32") - mib(&small, "train_f32");
    let per_token = (6 * (8 * 512 + 2 * 2048) + 2 * 512 + 6 * 2 * 512) + (6 * (12 * 512 + 2 * 2048) + 2 * 512) + 32128;
    assert!((grown - 400.0 * f64::from(per_token + 3 * 2048) / 1_048_576.0).abs() < 0.2, "{grown}");
    // Two moments of 60.5 million numbers, less means of rows and columns.
    let saved = mib(&small, "train_f32") - mib(&small, "train_adafactor_f32");
    assert!((455.0..461.7).contains(&saved), "{saved}");
    // Keys and values of six layers, of 512 columns each, for 100 tokens of the source and 100 that are written.
    assert_eq!((mib(&small, "cache_f32"), mib(&small, "cache_bf16")), (4.7, 2.3));
    assert!(memory("bert-base", "100")["cache_f32"].is_null());
    let model = model("token");
    let info = &lines(&["info", model.path().to_str().unwrap(), "--json"], b"")[0];
    assert_eq!(info["architecture"], "BertForTokenClassification");
    for mode in ["train", "infer"] {
        let arguments =
            ["bench", mode, "--model", "bert-tiny", "--batch", "1", "--seq", "8", "--steps", "1", "--warmup"];
        let arguments = [&arguments[..], &["0", "--dtype", "bf16", "--json"]].concat();
        let result = &lines(&arguments, b"")[0];
        for field in ["ms", "tokens_per_s", "tflops", "peak_mib"] {
            assert!(result[field].as_f64().unwrap() > 0.0, "{mode}: {field} in {result}");
        }
    }
    let devices = &lines(&["info", "--devices", "--json"], b"")[0];
    assert!(devices["kernels"].as_array().unwrap().iter().any(|k| k == "portable"));
    assert!(devices["kernels"].as_array().unwrap().contains(&devices["best"]), "{devices}");
    assert!(devices["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{devices}");
    let count = |field: &str| devices[field].as_u64().unwrap();
    assert!((1..=count("cores")).contains(&count("threads")) && count("cores") <= count("processors"), "{devices}");
}

#[test]
fn every_mistake_gets_a_clear_word() {
    let mlm = model("mlm");
    let directory = mlm.path().to_str().unwrap();
    fails(2, &[], b"", &["Usage"]);
    fails(2, &["embed", "--model", directory, "--dtype", "f8", "a"], b"", &["f32, tf32, bf16"]);
    fails(
        1,
        &["embed", "--model", directory, "--dtype", "tf32", "a"],
        b"",
        &["TF32 is a number type of GPUs", "--device cuda"],
    );
    fails(2, &["features", "--model", directory, "--layers", "first", "a"], b"", &["concat-last-4"]);
    fails(1, &["embed", "--model", directory, "--device", "cuda", "a"], b"", &["--device cpu"]);
    fails(2, &["embed", "--model", directory, "--kernels", "sse9", "a"], b"", &["sse9", "portable"]);
    fails(2, &["embed", "--model", directory, "--threads", "0", "a"], b"", &["from 1 to"]);
    fails(2, &["embed", "--model", directory, "--threads", "100000", "a"], b"", &["from 1 to"]);
    fails(2, &["bench", "train", "--model", "bert-tiny", "--batch", "99999999999"], b"", &["from 1 to"]);
    fails(1, &["bench", "infer", "--model", "bert-tiny", "--batch", "9999999", "--seq", "512"], b"", &["at most"]);
    fails(1, &["embed", "--model", "does/not/exist", "a"], b"", &["does/not/exist"]);
    fails(1, &["embed", "--model", "some/model", "a"], b"", &["some/model", "--download"]);
    fails(1, &["embed", "--model", directory, "--file", "missing.txt"], b"", &["missing.txt"]);
    fails(1, &["embed", "--model", directory], b"fine\nbad \xff byte\n", &["line 2", "byte 5", "UTF-8"]);
    fails(1, &["fill", "--model", directory, "no blank"], b"", &["[MASK]", "text 1"]);
    fails(1, &["features", "--model", directory, "--layers", "9", "a"], b"", &["no layer 9", "2 layers"]);
    fails(1, &["embed", "--model", directory, "--max-length", "1", "a"], b"", &["1"]);
    fails(1, &["bench", "exchange"], b"", &["--ranks 2", "mpirun"]);
    fails(1, &["bench", "train", "--model", "bert-huge"], b"", &["bert-huge", "bert-large"]);
    fails(1, &["bench", "train", "--model", "elmo-tiny"], b"", &["elmo-tiny reads running text", "henson pretrain"]);
    for mode in ["train", "infer"] {
        fails(1, &["bench", mode, "--model", "bilstm"], b"", &["bilstm is never pre-trained", "henson finetune"]);
    }
    fails(1, &["bench", "infer", "--model", "bert-tiny", "--seq", "513"], b"", &["512"]);
    fails(1, &["info", "bert-enormous"], b"", &["bert-enormous"]);
    let many = format!("{}no blank\n", "[MASK]\n".repeat(300));
    let output = henson(&["fill", "--model", directory, "--json"], many.as_bytes());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("text 301"), "{}", text(&output.stderr));
    // What is no model, no file or no directory is called so; no cause is told twice.
    let (file, empty) = (mlm.path().join("vocab.txt"), TempDir::new().unwrap());
    let (file, empty) = (file.to_str().unwrap(), empty.path().to_str().unwrap());
    for arguments in [&["fill", "--model", empty, "[MASK]"][..], &["info", empty], &["convert", empty, "new"]] {
        fails(
            1,
            arguments,
            b"",
            &[empty, "holds no model", "config.json, model.safetensors and the tokenizer's files"],
        );
    }
    fails(
        1,
        &["features", "--model", directory, "--out", empty, "a"],
        b"",
        &[empty, "is a directory: expected a file"],
    );
    fails(1, &["pretrain", "--data", empty, "--out", file], b"", &["not a corpus"]);
    fails(1, &["ablate", empty, "--data", empty, "--out", file], b"", &[file, "is a file: expected a directory"]);
    fails(1, &["bench", "tokenize", "--model", directory, "/dev/null"], b"", &["/dev/null has no text"]);
    #[cfg(target_os = "linux")]
    {
        let full = ["features", "--model", directory, "--out", "/dev/full", "--overwrite", "a"];
        let message = text(&henson(&full, b"").stderr);
        assert_eq!(message.matches("cannot write").count(), 1, "{message}");
    }
    std::fs::remove_file(mlm.path().join("vocab.txt")).unwrap();
    let message = text(&henson(&["fill", "--model", directory, "[MASK]"], b"").stderr);
    assert!(message.contains("tokenizer") && !message.contains("masked-LM head"), "{message}");
    let encoder = model("model");
    fails(
        1,
        &["fill", "--model", encoder.path().to_str().unwrap(), "[MASK]"],
        b"",
        &["cls.predictions", "masked-LM head", "without --model the one that comes with henson"],
    );
}
