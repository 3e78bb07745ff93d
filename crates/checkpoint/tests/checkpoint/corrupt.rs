//! Files that are cut, bent or lie. Each is an error that says what is wrong: never a panic, never a huge allocation.

use std::path::Path;

use henson_checkpoint::safetensors::{FormatError, Header};
use henson_checkpoint::{CheckpointError, ModelDirectory, Weights};
use proptest::prelude::*;

use crate::{child, child_argument, golden, ones, raw, safetensors};

fn open(bytes: &[u8]) -> Result<Weights, CheckpointError> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("model.safetensors"), bytes).unwrap();
    Weights::open(directory.path())
}

#[test]
fn a_cut_file_is_refused_at_every_length() {
    let whole = safetensors(&[ones("a", &[2, 3]), ones("b", &[4])]);
    open(&whole).unwrap();
    for length in 0..whole.len() {
        let error = open(&whole[..length]).unwrap_err();
        let CheckpointError::Safetensors { path, problem } = &error else { panic!("{length}: {error:?}") };
        assert!(path.ends_with("model.safetensors"));
        match problem {
            FormatError::TooShort { .. } => assert!(length < 10),
            FormatError::HeaderCut { .. } => assert!(length < whole.len() - 40),
            FormatError::DataCut { .. } => assert!(length >= whole.len() - 40),
            other => panic!("{length}: {other}"),
        }
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(open(&longer).unwrap_err().to_string().contains("1 bytes follow after the last tensor"));
}

/// Cut or overwritten in place after it was opened, as `cp` does it: an error that names the file, never a signal.
#[test]
fn a_file_that_changes_while_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let whole = safetensors(&[ones("a", &[200_000]), ones("b", &[4])]);
    let changed = |error: CheckpointError| {
        assert!(matches!(&error, CheckpointError::Changed { path: named } if *named == path), "{error}");
        assert!(error.to_string().contains("model.safetensors was changed or truncated while it was being read"));
    };
    for length in [0, 9, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole).unwrap();
        let weights = Weights::open(directory.path()).unwrap();
        assert_eq!(weights.read_f32("b").unwrap(), [1.0; 4]);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(length as u64).unwrap();
        changed(weights.read_f32("b").unwrap_err());
        changed(weights.verify().unwrap_err());
    }
    std::fs::write(&path, &whole).unwrap();
    let weights = Weights::open(directory.path()).unwrap();
    weights.verify().unwrap();
    // Time enough for any clock of a file system.
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&path, &whole).unwrap();
    changed(weights.verify().unwrap_err());
}

/// Headers with the data that they need, and what the error should say.
fn lies() -> Vec<(Vec<u8>, &'static str)> {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!("{{\"x\":{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
    };
    let f32 = |shape: &str, offsets: &str| tensor("\"F32\"", shape, offsets);
    let two = |a: &str, b: &str| {
        let part = |name: &str, offsets: &str| {
            format!("\"{name}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{offsets}}}")
        };
        format!("{{{},{}}}", part("a", a), part("b", b))
    };
    let mut lies = vec![
        ([&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "more than the 100000000"),
        ([&100_000_001u64.to_le_bytes()[..], b"{}"].concat(), "more than the 100000000"),
        ([&100_000_000u64.to_le_bytes()[..], b"{}"].concat(), "should have 100000000 bytes, but only 2"),
        (raw("{\"x\":\u{fffd}}", &[]), "line 1, column"),
        ([&4u64.to_le_bytes()[..], b"{\"\xff}"].concat(), "line 1, column"),
    ];
    for (header, data, problem) in [
        (f32("[4611686018427387904,4]", "[0,0]"), 0, "which is not its size"),
        (f32("[18446744073709551615,18446744073709551615]", "[0,4]"), 4, "which is not its size"),
        (f32("[1099511627776]", "[0,4398046511104]"), 4, "promises 4398046511104 bytes of data, but only 4"),
        (f32("[18446744073709551616]", "[0,4]"), 4, "line 1, column"),
        (f32("[-1]", "[0,4]"), 4, "line 1, column"),
        (f32("[1.5]", "[0,4]"), 4, "line 1, column"),
        (f32("[2]", "[0,4]"), 4, "which is not its size"),
        (f32("[1]", "[4,0]"), 4, "which is not its size"),
        (f32("[1]", "[18446744073709551612,18446744073709551615]"), 4, "which is not its size"),
        (f32("[1]", "[18446744073709551611,18446744073709551615]"), 4, "begins at byte 18446744073709551611"),
        (f32("[1]", "[0,4,8]"), 4, "line 1, column"),
        (f32("[1]", "[0]"), 4, "line 1, column"),
        (f32("{}", "[0,4]"), 4, "at most 32 sizes"),
        (f32(&format!("{:?}", [1; 33]), "[0,4]"), 4, "at most 32 sizes"),
        (tensor("\"F4\"", "[3]", "[0,1]"), 1, "which is not its size"),
        (tensor("\"F33\"", "[1]", "[0,4]"), 4, "unknown dtype \"F33\""),
        (tensor("7", "[1]", "[0,4]"), 4, "expected a string"),
        (two("[0,4]", "[0,4]"), 4, "overlap or leave a hole"),
        (two("[0,4]", "[2,6]"), 6, "overlap or leave a hole"),
        (two("[0,4]", "[8,12]"), 12, "overlap or leave a hole"),
        (two("[4,8]", "[8,12]"), 12, "overlap or leave a hole"),
        (two("[0,4]", "[4,8]"), 9, "1 bytes follow"),
        (two("[0,4]", "[4,8]").replace("\"b\"", "\"a\""), 8, "a is there twice"),
        (two("[0,4]", "[4,8]").replace("\"b\"", "\"\\u0061\""), 8, "a is there twice"),
        (f32("[1]", "[0,4],\"dtype\":\"F32\""), 4, "duplicate field `dtype`"),
        ("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}".into(), 0, "a is there twice"),
        ("{\"__metadata__\":{},\"__metadata__\":{}}".into(), 0, "__metadata__ is there twice"),
        ("{\"__metadata__\":{\"a\":1}}".into(), 0, "expected a string"),
        ("{\"x\":{}}".into(), 0, "missing field"),
        ("{\"x\":null}".into(), 0, "line 1, column"),
        ("[]".into(), 0, "an object of tensors"),
        ("{} {}".into(), 0, "trailing characters"),
        ("[".repeat(100_000), 0, "line 1, column"),
        (format!("{{\"x\":{}", "[".repeat(100_000)), 0, "line 1, column"),
        (f32(&"[".repeat(100_000), "[0,4]"), 4, "line 1, column"),
    ] {
        lies.push((raw(&header, &vec![0; data]), problem));
    }
    lies
}

#[test]
fn lies_are_named() {
    for (bytes, problem) in lies() {
        let error = open(&bytes).unwrap_err().to_string();
        assert!(error.contains(problem), "expected {problem:?} in {error}");
    }
    for header in ["{}", "{\"__metadata__\":null}", "{\"__metadata__\":{\"a\":\"1\"}}", "{}    "] {
        assert_eq!(open(&raw(header, &[])).unwrap().names().len(), 0);
    }
}

#[test]
fn lies_allocate_little() {
    if child_argument().is_some() {
        return lies_are_named();
    }
    // The lies speak of up to 2^64 bytes; the process has 256 MiB.
    let mut child = child("ulimit -v 262144; exec \"$@\"", "corrupt::lies_allocate_little", Path::new("-"));
    assert!(child.status().unwrap().success());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever is accepted covers the file and can be read to the end.
    #[test]
    fn bent_headers(
        whole in prop::sample::select(vec![
            safetensors(&[ones("a", &[2, 3]), ones("b.weight", &[4]), ones("c", &[1, 1])]),
            std::fs::read(golden("variants/bf16/model.safetensors")).unwrap(),
        ]),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..4),
    ) {
        let mut bent = whole;
        let header = 8 + u64::from_le_bytes(bent[..8].try_into().unwrap()) as usize;
        for (place, bit) in flips {
            bent[place.index(header)] ^= 1 << bit;
        }
        if let Ok(header) = Header::parse(&bent) {
            let mut covered = 0;
            for (info, range) in header.tensors.values() {
                let elements: usize = info.shape.iter().product();
                prop_assert_eq!(range.len() * 8, elements * info.dtype.bits());
                prop_assert!(range.end <= bent.len());
                covered += range.len();
            }
            prop_assert!(covered <= bent.len());
        }
    }

    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Header::parse(&bytes).is_err());
    }
}

/// Opens shards `a.safetensors` with tensor `a` and `b.safetensors` with tensor `b` by this index.
fn open_index(index: &str) -> Result<Weights, CheckpointError> {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("model");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(inner.join("model.safetensors.index.json"), index).unwrap();
    for (place, name) in [(&inner, "a"), (&inner, "b"), (&directory.path().to_owned(), "secret")] {
        std::fs::write(place.join(format!("{name}.safetensors")), safetensors(&[ones(name, &[2])])).unwrap();
    }
    Weights::open(&inner)
}

#[test]
fn indices() {
    let weights = open_index(r#"{"metadata":{},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(weights.read_f32("b").unwrap(), [1.0, 1.0]);
    assert!(weights.read_f32("c").unwrap_err().to_string().contains("has no tensor named \"c\""));

    for (weight_map, problem) in [
        (r#"{"a":"a.safetensors","c":"c.safetensors"}"#, "names c.safetensors, which is not in that directory"),
        (r#"{"a":"a.safetensors","c":"a.safetensors"}"#, "the index has c in this shard, the shard does not hold it"),
        (r#"{"c":"a.safetensors"}"#, "the shard holds a, the index does not know it"),
        (r#"{"a":"b.safetensors","b":"a.safetensors"}"#, "the shard holds a, the index has it in b.safetensors"),
        (r#"{"secret":"../secret.safetensors"}"#, "is not the plain name"),
        (r#"{"a":"/etc/passwd"}"#, "is not the plain name"),
        (r#"{"a":".."}"#, "is not the plain name"),
        (r#"{"a":""}"#, "is not the plain name"),
        (r#"{"a":"x\u0000"}"#, "is not the plain name"),
        (r#"{"a":"..\\secret.safetensors"}"#, "is not the plain name"),
        (r#"{"a":"a.safetensors","a":"b.safetensors"}"#, "a is there twice"),
        (r#"{"a":1}"#, "line 1, column"),
        ("[]", "line 1, column"),
    ] {
        let error = open_index(&format!("{{\"weight_map\":{weight_map}}}")).unwrap_err().to_string();
        assert!(error.contains(problem) && error.contains("index.json"), "{error}");
    }
    assert!(open_index("{}").unwrap_err().to_string().contains("missing field `weight_map`"));
    assert!(open_index("").unwrap_err().to_string().contains("line 1, column 0"));
}

#[test]
fn directories_without_weights() {
    let directory = tempfile::tempdir().unwrap();
    let check = |file: &str, problem: &str| {
        if !file.is_empty() {
            std::fs::write(directory.path().join(file), "x").unwrap();
        }
        let error = Weights::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
        let _ = std::fs::remove_file(directory.path().join(file));
    };
    check("", "no weights in");
    check("pytorch_model.bin", "neither a zip archive nor an older file of torch.save");
    check("pytorch_model-00001-of-00002.bin", "but not pytorch_model.bin.index.json");
    check("model-00001-of-00002.safetensors", "but not model.safetensors.index.json");
    check("bert_model.ckpt.index", "a checkpoint of TensorFlow");
    check("tf_model.h5", "a checkpoint of TensorFlow");
    check("flax_model.msgpack", "a checkpoint of Flax");
    check("model.onnx", "a graph for ONNX Runtime");

    std::fs::create_dir(directory.path().join("model.safetensors")).unwrap();
    assert!(matches!(Weights::open(directory.path()), Err(CheckpointError::NotAFile { .. })));
    assert!(matches!(Weights::open(&directory.path().join("none")), Err(CheckpointError::Io { action: "open", .. })));
    assert!(matches!(Weights::open(&golden("model/config.json")), Err(CheckpointError::NotADirectory { .. })));
}

/// Opening a FIFO would wait for somebody who writes to it.
#[test]
fn a_fifo_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"] {
        let status = std::process::Command::new("mkfifo").arg(directory.path().join(name)).status().unwrap();
        assert!(status.success());
        let (done, result) = std::sync::mpsc::channel();
        let (path, file) = (directory.path().to_owned(), directory.path().join(name));
        std::thread::spawn(move || {
            let is_config = name == "config.json";
            let config = || ModelDirectory::open(&path).and_then(|directory| directory.config());
            done.send(if is_config { config().map(drop) } else { Weights::open(&path).map(drop) })
        });
        let error = result.recv_timeout(std::time::Duration::from_secs(10)).expect("it waits").unwrap_err();
        assert!(matches!(&error, CheckpointError::NotAFile { path } if *path == file), "{error}");
        std::fs::remove_file(file).unwrap();
    }
}
