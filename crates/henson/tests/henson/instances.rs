//! `henson data show` and `henson data export`: instances for people and for other systems.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use henson_data::{Corpus, InstanceSettings, Instances, Objective, Split};
use henson_text::{Template, Tokenizer};
use serde_json::Value;
use tempfile::TempDir;

fn henson(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_henson")).args(arguments).output().unwrap()
}

#[track_caller]
fn stdout(arguments: &[&str]) -> String {
    let output = henson(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn fails(code: i32, arguments: &[&str], part: &str) {
    let output = henson(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty() && message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
}

/// A corpus of 30 documents of words of one and two pieces; where it lies in the directory.
fn corpus(directory: &TempDir) -> String {
    let tokenizer = directory.path().join("tokenizer");
    std::fs::create_dir(&tokenizer).unwrap();
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##s", "."].map(str::to_owned).to_vec();
    pieces.extend((b'a'..=b'z').map(|c| format!("{0}{0}", char::from(c))));
    std::fs::write(tokenizer.join("vocab.txt"), pieces.join("\n") + "\n").unwrap();
    let word = |i: usize| {
        let letter = char::from(b'a' + (i * i % 26) as u8);
        format!("{letter}{letter}{}", if i.is_multiple_of(3) { "s" } else { "" })
    };
    let sentence = |i: usize| (i..i + 3 + i % 9).map(word).collect::<Vec<_>>().join(" ") + " .\n";
    let text: String = (0..240).map(|i| sentence(i) + if i % 8 == 7 { "\n" } else { "" }).collect();
    let (file, out) = (directory.path().join("text.txt"), directory.path().join("corpus"));
    std::fs::write(&file, text).unwrap();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let (tokenizer, file, out) = (path(&tokenizer), path(&file), path(&out));
    stdout(&["data", "build", "--tokenizer", &tokenizer, "--held-out", "0", "--out", &out, &file]);
    out
}

fn template(corpus: &Corpus) -> Template {
    Tokenizer::open(corpus.tokenizer_directory().unwrap()).unwrap().template().clone()
}

#[test]
fn show_tells_what_the_model_sees() {
    let directory = TempDir::new().unwrap();
    let corpus = &corpus(&directory);
    let show = ["data", "show", corpus, "--sequence-length", "32", "--seed", "7"];
    let with = |more: &[&str]| stdout(&[&show, more].concat());

    let settings = InstanceSettings { sequence_length: 32, ..InstanceSettings::default() };
    let opened = Arc::new(Corpus::open(Path::new(corpus), Split::Train).unwrap());
    let epoch = Arc::new(Instances::new(opened.clone(), template(&opened), settings, 7).unwrap()).epoch(2, 1).unwrap();
    let json = with(&["--epoch", "2", "--index", "3", "-n", "40", "--json"]);
    let text = with(&["--epoch", "2", "--index", "3", "-n", "40"]);
    let mut blocks = text.split("\n\n");
    let mut seen = [0; 3];
    for (i, line) in json.lines().enumerate() {
        let line: Value = serde_json::from_str(line).unwrap();
        let instance = epoch.get(3 + i as u64).unwrap();
        assert_eq!(line["ids"], serde_json::to_value(&instance.ids).unwrap());
        assert_eq!(line["segments"], serde_json::to_value(&instance.segments).unwrap());
        assert_eq!(line["next_sentence"], instance.next_sentence.unwrap());
        assert_eq!((&line["index"], &line["count"]), (&Value::from(3 + i), &Value::from(epoch.count())));
        // The text for people says the same.
        let [head, a, b] = blocks.next().unwrap().lines().collect::<Vec<_>>().try_into().unwrap();
        assert!(head.contains(&format!("in epoch 2: {} tokens", instance.ids.len())), "{head}");
        assert!(head.contains(&format!("document {}", instance.document)), "{head}");
        match instance.random_document {
            Some(other) => assert!(head.ends_with(&format!("B a random part of document {other}")), "{head}"),
            None => assert!(head.ends_with("B follows A"), "{head}"),
        }
        let (a, b) = (a.strip_prefix("  A ").unwrap(), b.strip_prefix("  B ").unwrap());
        let words: Vec<&str> = a.split(' ').chain(b.split(' ')).collect();
        assert_eq!(
            (words.len(), a.split(' ').count()),
            (instance.ids.len(), instance.segments.iter().filter(|segment| **segment == 0).count())
        );
        assert_eq!(line["predicted"].as_array().unwrap().len(), instance.predicted.len());
        for (predicted, told) in instance.predicted.iter().zip(line["predicted"].as_array().unwrap()) {
            let position = predicted.position as usize;
            let (piece, shown) = (told["piece"].as_str().unwrap(), line["pieces"][position].as_str().unwrap());
            assert_eq!((&told["position"], &told["id"]), (&position.into(), &predicted.target.into()));
            let (kind, expected) = match told["shown"].as_str().unwrap() {
                "mask" => (0, format!("[MASK←{piece}]")),
                "random" => (1, format!("{shown}←{piece}")),
                _ => (2, format!("={piece}")),
            };
            seen[kind] += 1;
            assert_eq!(words[position], expected);
        }
        let hidden = words.iter().filter(|word| word.contains('←') || word.starts_with('=')).count();
        assert_eq!(hidden, instance.predicted.len());
    }
    assert!(seen.iter().all(|kind| *kind > 3), "{seen:?}");
    assert!(!text.contains('\x1b'), "colours are for terminals");

    // In the order of the documents, one segment, and nothing hidden.
    let causal = with(&["--objective", "causal", "--in-order", "-n", "1"]);
    assert!(causal.contains("each predicts the next; document 0\n  A [CLS] aa ##s bb ee"), "{causal}");
    assert!(!causal.contains("  B") && !causal.contains('='), "{causal}");

    fails(1, &[&show[..], &["--index", "100000"]].concat(), "there is no instance 100000");
    fails(1, &[&show[..], &["--held-out"]].concat(), "0 documents");
    fails(1, &[&show[..], &["--packing", "blocks"]].concat(), "packing = blocks");
    fails(2, &[&show[..], &["--mask-split", "0.8,0.1"]].concat(), "expected three shares");
    fails(2, &[&show[..], &["--mask-split", "0.8,x,0.1"]].concat(), "expected three shares");
}

/// The tensors of a file, by name: shape and values.
fn tensor(file: &[u8], name: &str) -> (Vec<usize>, Vec<i64>) {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let described: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let entry = &described[name];
    assert_eq!(entry["dtype"], "I64", "{name} in {described}");
    let numbers = |key: &str| -> Vec<usize> { serde_json::from_value(entry[key].clone()).unwrap() };
    let offsets = numbers("data_offsets");
    let bytes = &file[8 + header..][offsets[0]..offsets[1]];
    (numbers("shape"), bytes.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect())
}

#[test]
fn export_writes_the_first_batches() {
    let directory = TempDir::new().unwrap();
    let corpus = &corpus(&directory);
    let out = directory.path().join("batches.safetensors");
    let export = ["data", "export", corpus, "--sequence-length", "40", "--out", out.to_str().unwrap()];
    let batches = ["--batches", "12", "--batch-size", "8", "--seed", "3"];
    let said = stdout(&[&export[..], &batches].concat());
    assert!(said.starts_with("wrote 12 × 8 sequences"), "{said}");
    fails(1, &[&export[..], &batches].concat(), "--overwrite");

    let settings = InstanceSettings { sequence_length: 40, ..InstanceSettings::default() };
    let opened = Arc::new(Corpus::open(Path::new(corpus), Split::Train).unwrap());
    let made = Arc::new(Instances::new(opened.clone(), template(&opened), settings.clone(), 3).unwrap());
    let mut stream = (0..).flat_map(|number| {
        let epoch = made.epoch(number, 1).unwrap();
        (0..epoch.count()).map(move |index| epoch.get(index).unwrap())
    });
    let file = std::fs::read(&out).unwrap();
    let mut padded = 0;
    for number in 0..12 {
        let get = |name: &str| tensor(&file, &format!("batch.{number:04}.{name}"));
        let (shape, ids) = get("input_ids");
        let [segments, mask, labels] = ["token_type_ids", "attention_mask", "labels"].map(|name| {
            let (other, values) = get(name);
            assert_eq!(other, shape);
            values
        });
        let (rows, next) = get("next_sentence_label");
        assert_eq!((shape[0], rows), (8, vec![8]));
        let batch: Vec<_> = stream.by_ref().take(8).collect();
        assert_eq!(batch.iter().map(|instance| instance.ids.len()).max(), Some(shape[1]));
        for (row, instance) in batch.iter().enumerate() {
            assert_eq!(next[row], i64::from(instance.next_sentence.unwrap()));
            let mut predicted = instance.predicted.iter().peekable();
            for column in 0..shape[1] {
                let at = row * shape[1] + column;
                let inside = column < instance.ids.len();
                padded += usize::from(!inside);
                let expected = if inside { (instance.ids[column], instance.segments[column], 1) } else { (0, 0, 0) };
                assert_eq!((ids[at], segments[at], mask[at]), (expected.0.into(), expected.1.into(), expected.2));
                let target = predicted.next_if(|p| p.position as usize == column);
                assert_eq!(labels[at], target.map_or(-100, |p| i64::from(p.target)));
            }
        }
    }
    assert!(padded > 0, "all sequences have one length");

    // From left to right, transformers moves the labels itself: each stands at its own piece.
    let causal = ["--objective", "causal", "--overwrite", "--batch-size", "4"];
    stdout(&[&export[..], &causal].concat());
    let file = std::fs::read(&out).unwrap();
    let ((shape, ids), (_, labels)) = (tensor(&file, "batch.0000.input_ids"), tensor(&file, "batch.0000.labels"));
    let causal = InstanceSettings { objective: Objective::Causal, ..settings };
    let epoch = Arc::new(Instances::new(opened.clone(), template(&opened), causal, 0).unwrap()).epoch(0, 1).unwrap();
    for row in 0..4 {
        let length = epoch.get(row as u64).unwrap().ids.len();
        for column in 0..shape[1] {
            let at = row * shape[1] + column;
            assert_eq!(labels[at], if column == 0 || column >= length { -100 } else { ids[at] });
        }
    }
    let nowhere = ["data", "export", corpus, "--out", "no/such/directory/file"];
    fails(1, &nowhere, "there is no directory");
}
