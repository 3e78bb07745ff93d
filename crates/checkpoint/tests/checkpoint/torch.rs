//! pytorch_model.bin: files of torch.save (tools/golden/make_torch_files.py), and files that lie. Nothing in them is executed,
//! and none makes a panic or a huge allocation.

use std::path::Path;

use henson_checkpoint::safetensors::Header;
use henson_checkpoint::{CheckpointError, LoadOptions, StoredDType, Weights, fuzzing, load};
use henson_models::Head;

use crate::{bert, child, child_argument, golden, naming, numbers, ones, safetensors};

/// The files of torch.save.
const FILES: [&str; 8] = [
    "state-zip",
    "state-legacy",
    "training-zip",
    "training-legacy",
    "plain-zip",
    "plain-legacy",
    "expanded-zip",
    "expanded-legacy",
];

fn file(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/torch-files");
    std::fs::read(folder.join(format!("{name}.bin"))).unwrap()
}

fn write(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

fn open(bytes: &[u8]) -> Result<Weights, CheckpointError> {
    Weights::open(write(&[("pytorch_model.bin", bytes)]).path())
}

/// What a file is refused for.
fn problem(bytes: &[u8]) -> String {
    let error = open(bytes).unwrap_err();
    let CheckpointError::Torch { path, problem } = &error else { panic!("{error:?}") };
    assert!(path.ends_with("pytorch_model.bin"));
    problem.to_string()
}

#[test]
fn both_forms_of_torch_save() {
    for name in ["state-zip", "state-legacy"] {
        let weights = open(&file(name)).unwrap();
        let check = |name: &str, dtype: StoredDType, shape: &[usize]| {
            let info = weights.get(name).unwrap();
            assert_eq!((info.dtype, &info.shape[..]), (dtype, shape), "{name}");
            let expected: Vec<f32> = (0..shape.iter().product()).map(|i: usize| i as f32 / 2.0 - 1.0).collect();
            match weights.read_f32(name) {
                Ok(numbers) => assert_eq!(numbers, expected, "{name}"),
                Err(error) => assert!(matches!(error, CheckpointError::NotFloat { .. }), "{error}"),
            }
        };
        use StoredDType::{Bf16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};
        check("float32", F32, &[2, 3]);
        check("float16", F16, &[2, 3]);
        check("bfloat16", Bf16, &[2, 3]);
        check("float64", F64, &[2, 3]);
        check("tied", F32, &[2, 3]);
        check("transposed", F32, &[3, 4]);
        check("permuted", F16, &[2, 3, 4]);
        check("window", F32, &[2, 3]);
        check("rows", F32, &[2, 3]);
        check("columns", F32, &[5]);
        check("parameter", F32, &[2, 3]);
        check("scalar", F32, &[]);
        check("empty", F32, &[0, 3]);
        for (name, dtype) in
            [("int64", I64), ("int32", I32), ("int16", I16), ("int8", I8), ("uint8", U8), ("bool", Bool)]
        {
            check(name, dtype, &[2, 3]);
            assert!(weights.read_f32(name).is_err());
        }
        check("position_ids", I64, &[1, 4]);
        assert_eq!(weights.names().len(), 20);
        weights.verify().unwrap();
    }
}

#[test]
fn a_state_dict_among_other_things() {
    for name in ["training-zip", "training-legacy", "plain-zip", "plain-legacy"] {
        let weights = open(&file(name)).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b"], "{name}");
        assert_eq!(weights.read_f32("b").unwrap(), [-1.0, -0.5, 0.0, 0.5]);
    }
    // A single number that stands for twelve: a file of a few bytes could claim any number of them.
    for name in ["expanded-zip", "expanded-legacy"] {
        assert!(problem(&file(name)).contains("its tensor a repeats numbers of a smaller storage"), "{name}");
    }
}

#[test]
fn safetensors_come_first() {
    let (bin, other) = (file("plain-zip"), safetensors(&[ones("x", &[2])]));
    let names = |files: &[(&str, &[u8])]| {
        Weights::open(write(files).path()).unwrap().names().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(names(&[("pytorch_model.bin", &bin), ("model.safetensors", &other)]), ["x"]);
    let index = br#"{"weight_map":{"x":"model-00001-of-00001.safetensors"}}"#;
    let (index, shard) =
        (("model.safetensors.index.json", &index[..]), ("model-00001-of-00001.safetensors", &other[..]));
    assert_eq!(names(&[("pytorch_model.bin", &bin), index, shard]), ["x"]);

    let shards =
        [("pytorch_model-00001-of-00002.bin", &bin[..]), ("pytorch_model-00002-of-00002.bin", &one("c", 2)[..])];
    let error = Weights::open(write(&shards).path()).unwrap_err().to_string();
    assert!(error.contains("pytorch_model-00001-of-00002.bin, but not pytorch_model.bin.index.json"), "{error}");
    let with = |map: &str| {
        let index = format!("{{\"metadata\":{{}},\"weight_map\":{{{map}}}}}");
        let files = [shards[0], shards[1], ("pytorch_model.bin.index.json", index.as_bytes())];
        Weights::open(write(&files).path())
    };
    let first = r#""a":"pytorch_model-00001-of-00002.bin","b":"pytorch_model-00001-of-00002.bin""#;
    let weights = with(&format!("{first},\"c\":\"pytorch_model-00002-of-00002.bin\"")).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(weights.read_f32("c").unwrap(), [1.0, 1.0]);
    let error = with(&format!("{first},\"d\":\"pytorch_model-00002-of-00002.bin\"")).unwrap_err().to_string();
    assert!(error.contains("the shard holds c, the index does not know it"), "{error}");
}

/// A whole model: the same parameters as from safetensors, and the same report of what does not fit.
#[test]
fn a_model_as_from_safetensors() {
    let bytes = std::fs::read(golden("model/model.safetensors")).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let mut state = State::default();
    for (name, (info, range)) in &header.tensors {
        let numbers: Vec<f32> = bytes[range.clone()].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        state.tensor(name, &info.shape, &numbers);
    }
    let mut from_torch = bert(&golden("model"), Head::Pooler, 1);
    let mut expected = bert(&golden("model"), Head::Pooler, 2);
    let options = LoadOptions::strict();
    let weights = open(&state.clone().file()).unwrap();
    let report = load(&weights, naming(), &mut from_torch, &options).unwrap();
    assert!(report.is_clean(), "{report}");
    load(&Weights::open(&golden("model")).unwrap(), naming(), &mut expected, &options).unwrap();
    assert_eq!(numbers(&from_torch), numbers(&expected));

    // One of another shape, one missing, one unknown, one that is no tensor.
    let mut wrong = State::default();
    for (name, (info, range)) in header.tensors.iter().filter(|(name, _)| !name.ends_with("pooler.dense.bias")) {
        let transposed: Vec<usize> = info.shape.iter().rev().copied().collect();
        let shape = if name.ends_with("word_embeddings.weight") { &transposed } else { &info.shape };
        wrong.tensor(name, shape, &vec![1.0; range.len() / 4]);
    }
    wrong.tensor("unknown", &[1], &[1.0]);
    wrong.entry("_extra_state", b"N");
    let error = load(&open(&wrong.file()).unwrap(), naming(), &mut from_torch, &options).unwrap_err();
    let CheckpointError::DoesNotFit { report, .. } = error else { panic!("{error:?}") };
    assert_eq!(report.unused, ["unknown", "_extra_state"]);
    assert_eq!((report.missing.len(), report.misshapen.len()), (1, 1));
    assert!(report.missing[0].parameter.ends_with("pooler.dense.bias"));
    assert_eq!(numbers(&from_torch), numbers(&expected), "an error changes nothing");
}

#[test]
fn damage_is_noticed() {
    let whole = one("a", 64);
    let place = whole.windows(4).position(|bytes| bytes == 1f32.to_le_bytes()).unwrap();
    let mut damaged = whole.clone();
    damaged[place] ^= 1;
    let error = open(&damaged).unwrap().read_f32("a").unwrap_err().to_string();
    assert!(error.contains("its tensor a has another checksum than was written"), "{error}");
    let mut damaged = whole.clone();
    let place = whole.windows(5).position(|bytes| bytes == b"torch").unwrap();
    damaged[place] ^= 1;
    assert!(problem(&damaged).contains("its member m/data.pkl has another checksum"));
    // torch.serialization.set_crc32_options(False) leaves zeros.
    let mut zip = State::with("a", 64).zip();
    zip.members.iter_mut().for_each(|member| member.crc = Some(0));
    assert_eq!(open(&zip.bytes()).unwrap().read_f32("a").unwrap(), [1.0; 64]);
}

#[test]
fn a_cut_file_is_refused_at_every_length() {
    for name in ["plain-zip", "plain-legacy", "state-zip", "state-legacy"] {
        let whole = file(name);
        for length in 0..whole.len() {
            assert!(fuzzing::torch(&whole[..length]).is_err(), "{name} at {length}");
        }
        problem(&whole[..whole.len() - 1]);
        problem(&[&whole[..], &[0]].concat());
    }
}

/// Never executed: each names what it wants.
#[test]
fn code_is_named_and_never_run() {
    let witness = tempfile::tempdir().unwrap().path().join("witness");
    let command = format!("touch {}", witness.display());
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let call = |global: &[u8]| [b"\x80\x02", global, &text(&command)[..], b"\x85R."].concat();
    for (pickle, name) in [
        (call(b"cos\nsystem\n"), "os.system"),
        (call(b"cposix\nsystem\n"), "posix.system"),
        (call(b"c__builtin__\neval\n"), "__builtin__.eval"),
        (call(b"ctorch\nload\n"), "torch.load"),
        (call(b"ctorch._utils\n_rebuild_tensor_v3\n"), "torch._utils._rebuild_tensor_v3"),
        (call(b"ctorch.storage\n_load_from_bytes\n"), "torch.storage._load_from_bytes"),
        (call(b"ccollections\nOrderedDict\x1b[2J\n"), "collections.OrderedDict\\u{1b}[2J"),
        ([b"\x80\x02(", &text(&command)[..], b"ios\nsystem\n."].concat(), "os.system"),
        ([b"\x80\x02(", &text(&command)[..], b"icollections\nOrderedDict\n."].concat(), "collections.OrderedDict"),
    ] {
        let expected = format!("it wants to call {name} of Python, and nothing in a file is run here");
        for bytes in [with_pickle(&pickle), legacy(&pickle, b"\x80\x02].", &[])] {
            let problem = problem(&bytes);
            assert!(problem.contains(&expected) && problem.contains("make a model.safetensors of it"), "{problem}");
        }
    }
    assert!(!witness.exists());
}

/// Pickles that are wrong, with a word of what is said.
fn wrong_pickles() -> Vec<(Vec<u8>, &'static str)> {
    let list = |parts: &[&[u8]]| [b"\x80\x02", &parts.concat()[..], b"."].concat();
    let deep = [b"\x80\x02".to_vec(), b"(".repeat(500_000), b"t".repeat(500_000), b".".to_vec()].concat();
    // Each tuple holds the one before ten times: walked, it would have 10^100 items.
    let bomb =
        [b"\x80\x02(Nq\x00", &b"(h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00tq\x00".repeat(100)[..], b"t."]
            .concat();
    vec![
        (b"".to_vec(), "cut short"),
        (b"\x80".to_vec(), "cut short"),
        (list(&[]), "takes more than there is"),
        (list(&[b"N", b"N"]), "values left over"),
        (list(&[b"(", b"N"]), "values left over"),
        (list(&[b"N", b"(", b"0"]), "operation 0x30"),
        (list(&[b"N(", b"\x85"]), "takes more than there is"),
        (list(&[b"t"]), "a mark is missing"),
        (list(&[b"}", b"X\xff\xff\xff\xffa"]), "bytes in a string"),
        (list(&[b"}", b"X\xff\xff\x0f\x00a"]), "cut short"),
        (list(&[b"}", b"X\x02\x00\x00\x00\xff\xfe"]), "not UTF-8"),
        (list(&[b"\x8a\xff"]), "a number of 255 bytes"),
        (list(&[b"\x8a\x10", &[0x7f; 16]]), "a number of 16 bytes"),
        (list(&[b"\x80\x04"]), "protocol 4"),
        (list(&[b"h\x07"]), "what was not noted"),
        (list(&[b"j\xff\xff\xff\xff"]), "what was not noted"),
        (list(&[b"q\x07"]), "nothing is there to be noted"),
        (list(&[b"]q\x00h\x00aN", b"a"]), "instead of a state dict: "),
        (list(&[b"}q\x00X\x01\x00\x00\x00ah\x00s"]), "no tensors, but a"),
        (list(&[b"}q\x00X\x05\x00\x00\x00modelh\x00s"]), "dictionaries in dictionaries"),
        (list(&[b"}(X\x05\x00\x00\x00model}X\x06\x00\x00\x00module}u"]), "several (model, module)"),
        (list(&[b"}(NNNu"]), "a key without a value"),
        (list(&[b"}NNs", b"NNs"]), "instead of a state dict"),
        (list(&[b"NNNs"]), "what is not a dictionary"),
        (list(&[b"NNa"]), "what is not a list"),
        (list(&[b"NNb"]), "attributes are set on what is not a dictionary"),
        (list(&[b"NNR"]), "wrong arguments"),
        (list(&[b"ccollections\nOrderedDict\n]\x85R"]), "wrong arguments"),
        (list(&[b"ctorch._utils\n_rebuild_tensor_v2\n)R"]), "wrong arguments"),
        (list(&[b"ctorch._utils\n_rebuild_parameter\nNNN\x87R"]), "wrong arguments"),
        (list(&[b"NQ"]), "not described as PyTorch does"),
        (list(&[b"c", &[b'a'; 300]]), "a name has no end"),
        (deep, "a tuple instead of a state dict"),
        (bomb, "a tuple instead of a state dict"),
        ([b"\x80\x02".to_vec(), b"}".repeat(2_000_000)].concat(), "more than 1048576 operations"),
        ([b"\x80\x02Nq\x00".to_vec(), b"h\x00".repeat(2_000_000)].concat(), "more than 1048576 operations"),
    ]
}

/// Tensors that do not lie in their storages, with a word of what is said.
fn wrong_tensors() -> Vec<(Vec<u8>, &'static str)> {
    let with = |offset: i64, shape: &[i64], strides: &[i64]| {
        let mut state = State::default();
        state.view("a", "FloatStorage", "0", 4, offset, shape, strides);
        state.storage("0", vec![0; 16]);
        state.file()
    };
    let storage = |class: &str, elements: i64, bytes: usize| {
        let mut state = State::default();
        state.view("a", class, "0", elements, 0, &[1], &[1]);
        state.storage("0", vec![0; bytes]);
        state.file()
    };
    let mut twice = State::default();
    twice.view("a", "FloatStorage", "0", 4, 0, &[4], &[1]);
    twice.view("b", "HalfStorage", "0", 8, 0, &[4], &[1]);
    twice.storage("0", vec![0; 16]);
    let mut repeated = State::with("a", 2);
    repeated.view("a", "FloatStorage", "0", 2, 0, &[1], &[1]);
    vec![
        (with(1, &[4], &[1]), "lies outside of its storage"),
        (with(5, &[], &[]), "lies outside of its storage"),
        (with(5, &[0], &[1]), "lies outside of its storage"),
        (with(-1, &[1], &[1]), "wrong arguments"),
        (with(0, &[2, 2], &[4, 1]), "lies outside of its storage"),
        (with(0, &[-2], &[1]), "wrong arguments"),
        (with(0, &[2], &[-1]), "wrong arguments"),
        (with(0, &[2], &[1, 1]), "wrong arguments"),
        (with(0, &[1; 33], &[1; 33]), "wrong arguments"),
        (with(0, &[1 << 62, 1 << 62], &[0, 0]), "lies outside of its storage"),
        (with(0, &[1 << 40], &[0]), "repeats numbers of a smaller storage"),
        (with(i64::MAX, &[2], &[i64::MAX]), "lies outside of its storage"),
        (with(0, &[2], &[i64::MAX]), "lies outside of its storage"),
        (storage("FloatStorage", 4, 15), "has 15 bytes, not those of 4 numbers of F32"),
        (storage("FloatStorage", i64::MAX, 16), "has 16 bytes"),
        (storage("FloatStorage", -1, 16), "not described as PyTorch does"),
        (storage("QInt8Storage", 4, 4), "torch.QInt8Storage of Python"),
        (twice.file(), "described in two different ways"),
        (repeated.file(), "its tensor a is there twice"),
    ]
}

/// Archives that are wrong, with a word of what is said.
fn wrong_archives() -> Vec<(Vec<u8>, &'static str)> {
    let bent = |change: &dyn Fn(&mut Zip)| {
        let mut zip = State::with("a", 4).zip();
        change(&mut zip);
        zip.bytes()
    };
    let end = |at: usize, bytes: &[u8]| {
        let mut file = State::with("a", 4).file();
        let start = file.len() - 22 + at;
        file[start..start + bytes.len()].copy_from_slice(bytes);
        file
    };
    let end64 = |at: usize, bytes: &[u8]| {
        let mut file = bent(&|zip| zip.is_64 = true);
        let start = file.len() - 22 - 20 - 56 + at;
        file[start..start + bytes.len()].copy_from_slice(bytes);
        file
    };
    let far = u64::MAX.to_le_bytes();
    vec![
        (b"PK\x03\x04".to_vec(), "has no end"),
        (b"version https://git-lfs.github.com/spec/v1".to_vec(), "neither a zip archive nor"),
        (bent(&|zip| zip.members[1].method = 8), "is compressed"),
        (bent(&|zip| zip.members[2].method = 8), "its member m/data/0 is compressed"),
        (bent(&|zip| zip.members[2].flags = 1), "is encrypted"),
        (bent(&|zip| zip.members[2].size = Some(15)), "two different sizes"),
        (bent(&|zip| zip.members[2].crc = Some(7)), "has another checksum"),
        (bent(&|zip| zip.members[1].crc = Some(7)), "has another checksum"),
        (bent(&|zip| zip.members[2].offset = Some(u32::MAX - 1)), "lies outside of the file"),
        (bent(&|zip| zip.members[2].offset = Some(1)), "is not where the list of members has it"),
        (bent(&|zip| zip.members[2].offset = Some(u32::MAX)), "list of members is cut or damaged"),
        (bent(&|zip| zip.members[2].name = "m/data/1".to_owned()), "its member m/data/0 is missing"),
        (bent(&|zip| zip.members[2].name = "m/data.pkl".to_owned()), "m/data.pkl is there twice"),
        (bent(&|zip| zip.members[2].name = "n/data.pkl".to_owned()), "has 2 members called data.pkl"),
        (bent(&|zip| zip.members[1].name = "m/x".to_owned()), "has 0 members called data.pkl"),
        (bent(&|zip| zip.members[0].bytes = b"big".to_vec()), "stored as big-endian"),
        (bent(&|zip| zip.members[0].bytes = vec![b'x'; 100]), "more than 64 bytes in a member"),
        (end(8, &[9, 0, 9, 0]), "cut or damaged"),
        (end(8, &[1, 0, 1, 0]), "longer than their number"),
        (end(12, &[0xff, 0xff, 0xff, 0x7f]), "list of members lies outside of the file"),
        (end(16, &[0xff, 0xff, 0xff, 0x7f]), "list of members lies outside of the file"),
        (end(16, &[0xff; 4]), "64-bit record of its end is missing"),
        (end(20, &[1, 0]), "has no end"),
        (end64(0, b"QQQQ"), "64-bit record of its end is missing"),
        (end64(40, &far), "list of members lies outside of the file"),
        (end64(48, &far), "list of members lies outside of the file"),
        (end64(32, &far), "cut or damaged"),
        (end64(56 + 8, &far), "64-bit record of its end is missing"),
        (overlapping(), "its members overlap"),
    ]
}

#[test]
fn lies_are_named() {
    for (pickle, expected) in wrong_pickles() {
        let problem = problem(&with_pickle(&pickle));
        assert!(problem.contains(expected), "expected {expected:?} in {problem}");
    }
    for (bytes, expected) in wrong_tensors().into_iter().chain(wrong_archives()) {
        let problem = match open(&bytes) {
            Ok(weights) => weights.read_f32("a").unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(problem.contains(expected), "expected {expected:?} in {problem}");
    }
    let mut zip = State::with("a", 4).zip();
    zip.is_64 = true;
    assert_eq!(open(&zip.bytes()).unwrap().read_f32("a").unwrap(), [1.0; 4]);
}

#[test]
fn lies_of_the_older_form_are_named() {
    let mut state = State::with("a", 2);
    let keys = b"\x80\x02]X\x01\x00\x00\x000a.";
    let numbers = [&2u64.to_le_bytes()[..], &1f32.to_le_bytes(), &1f32.to_le_bytes()].concat();
    let pickle = state.pickle();
    let whole = legacy(&pickle, keys, &numbers);
    assert_eq!(open(&whole).unwrap().read_f32("a").unwrap(), [1.0, 1.0]);
    let count = |count: u64| [&count.to_le_bytes()[..], &[0; 8]].concat();
    state.view("b", "FloatStorage", "0", 2, 0, &[2], &[1]);
    for (bytes, expected) in [
        (legacy(&pickle, keys, &numbers[..15]), "storage 0 should end at byte"),
        (legacy(&pickle, keys, &count(3)), "another number of elements"),
        (legacy(&pickle, keys, &count(u64::MAX)), "another number of elements"),
        (legacy(&pickle, keys, &[&numbers[..], &[0]].concat()), "1 bytes follow after the last storage"),
        (legacy(&pickle, b"\x80\x02].", &[]), "has a storage that is not in the file"),
        (legacy(&pickle, b"\x80\x02]X\x01\x00\x00\x001a.", &numbers), "a storage belongs to nothing"),
        (legacy(&pickle, b"\x80\x02]K\x01a.", &numbers), "the key of a storage is not a string"),
        (
            legacy(&pickle, b"\x80\x02](X\x01\x00\x00\x000X\x01\x00\x00\x000e.", &numbers.repeat(2)),
            "a storage is there twice",
        ),
        ([b"\x80\x02\x8a\x0a", &[1; 10][..], b"."].concat(), "a number of 10 bytes"),
        (whole.iter().copied().map(|byte| if byte == 0x88 { 0x89 } else { byte }).collect(), "not little-endian"),
    ] {
        let problem = problem(&bytes);
        assert!(problem.contains(expected), "expected {expected:?} in {problem}");
    }
}

#[test]
fn lies_allocate_little() {
    if child_argument().is_some() {
        lies_are_named();
        return lies_of_the_older_form_are_named();
    }
    // The lies speak of up to 2^64 bytes; the process has 256 MiB.
    let mut child = child("ulimit -v 262144; exec \"$@\"", "torch::lies_allocate_little", Path::new("-"));
    assert!(child.status().unwrap().success());
}

/// Bytes are changed, lost and doubled: whatever is accepted can be read to its end.
#[test]
fn bent_files() {
    // A fixed sequence: xorshift.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let files: Vec<Vec<u8>> = FILES.iter().map(|name| without_sums(file(name))).collect();
    let mut accepted = 0;
    for round in 0..20_000 {
        let mut bent = files[round % files.len()].clone();
        for _ in 0..1 + draw(4) {
            let at = draw(bent.len());
            match draw(if bent.len() > 8 { 6 } else { 2 }) {
                0 => bent[at] ^= 1 << draw(8),
                1 => bent[at] = [0, 1, 0x7f, 0x80, 0xff, b'.', b'(', b'R', b'h'][draw(9)],
                2 => drop(bent.remove(at)),
                3 => bent.insert(at, bent[draw(bent.len())]),
                4 => {
                    let (from, length) = (draw(bent.len()), draw(32));
                    let part = bent[from..(from + length).min(bent.len())].to_vec();
                    let end = (at + part.len()).min(bent.len());
                    bent[at..end].copy_from_slice(&part[..end - at]);
                }
                _ => bent.truncate(at.max(1)),
            }
        }
        accepted += usize::from(fuzzing::torch(&bent).is_ok());
    }
    // Else the mutations would never have come past the first check.
    assert!(accepted > 1000, "{accepted}");
}

/// Sets all checksums of an archive to zero, so that changes are not noticed by these alone.
fn without_sums(mut file: Vec<u8>) -> Vec<u8> {
    let places: Vec<usize> = (0..file.len()).filter(|at| file[*at..].starts_with(b"PK\x01\x02")).collect();
    for at in places {
        file[at + 16..at + 20].fill(0);
    }
    file
}

/// A state dict in the making.
#[derive(Clone, Default)]
struct State {
    entries: Vec<u8>,
    storages: Vec<(String, Vec<u8>)>,
}

impl State {
    /// One tensor of ones.
    fn with(name: &str, elements: usize) -> Self {
        let mut state = Self::default();
        state.tensor(name, &[elements], &vec![1.0; elements]);
        state
    }

    fn tensor(&mut self, name: &str, shape: &[usize], numbers: &[f32]) {
        let key = self.storages.len().to_string();
        let mut strides = vec![1; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i] as i64;
        }
        let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
        self.view(name, "FloatStorage", &key, numbers.len() as i64, 0, &shape, &strides);
        self.storage(&key, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
    }

    fn view(&mut self, name: &str, class: &str, key: &str, elements: i64, offset: i64, shape: &[i64], strides: &[i64]) {
        let sizes =
            |sizes: &[i64]| [b"(", &sizes.iter().flat_map(|size| long(*size)).collect::<Vec<u8>>()[..], b"t"].concat();
        let value = [
            b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
            text("storage"),
            format!("ctorch\n{class}\n").into_bytes(),
            text(key),
            text("cpu"),
            long(elements),
            b"tQ".to_vec(),
            long(offset),
            sizes(shape),
            sizes(strides),
            b"\x89ccollections\nOrderedDict\n)RtR".to_vec(),
        ];
        self.entry(name, &value.concat());
    }

    /// Any value, as it is pickled.
    fn entry(&mut self, name: &str, value: &[u8]) {
        self.entries.extend(text(name));
        self.entries.extend(value);
    }

    fn storage(&mut self, key: &str, bytes: Vec<u8>) {
        self.storages.push((key.to_owned(), bytes));
    }

    fn pickle(&self) -> Vec<u8> {
        [b"\x80\x02}(", &self.entries[..], b"u."].concat()
    }

    fn zip(&self) -> Zip {
        let mut zip = Zip::default();
        zip.add("m/byteorder", b"little");
        zip.add("m/data.pkl", &self.pickle());
        for (key, bytes) in &self.storages {
            zip.add(&format!("m/data/{key}"), bytes);
        }
        zip
    }

    fn file(self) -> Vec<u8> {
        self.zip().bytes()
    }
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn long(number: i64) -> Vec<u8> {
    [b"\x8a\x08", &number.to_le_bytes()[..]].concat()
}

fn one(name: &str, elements: usize) -> Vec<u8> {
    State::with(name, elements).file()
}

fn with_pickle(pickle: &[u8]) -> Vec<u8> {
    let mut zip = Zip::default();
    zip.add("m/data.pkl", pickle);
    zip.bytes()
}

/// Two names for the same bytes of an archive.
fn overlapping() -> Vec<u8> {
    let mut state = State::default();
    state.view("a", "FloatStorage", "0", 40, 0, &[40], &[1]);
    state.view("b", "FloatStorage", "1", 4, 0, &[4], &[1]);
    let mut inner = Zip::default();
    inner.add("m/data/1", &[0; 16]);
    let mut hidden = inner.bytes();
    hidden.resize(160, 0);
    state.storage("0", hidden);
    let mut zip = state.zip();
    let start = zip.bytes().windows(8).position(|bytes| bytes == b"m/data/1").unwrap() - 30;
    zip.add("m/data/1", &[0; 16]);
    zip.members.last_mut().unwrap().offset = Some(start as u32);
    zip.bytes()
}

/// A file of the older form around a pickle.
fn legacy(pickle: &[u8], keys: &[u8], storages: &[u8]) -> Vec<u8> {
    let magic = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";
    let machine = [b"\x80\x02}", &text("little_endian")[..], b"\x88s."].concat();
    [&magic[..], &machine, pickle, keys, storages].concat()
}

/// An archive in the making, written independently of the crate.
#[derive(Default)]
struct Zip {
    members: Vec<Packed>,
    is_64: bool,
}

#[derive(Default)]
struct Packed {
    name: String,
    bytes: Vec<u8>,
    method: u16,
    flags: u16,
    /// Instead of the right one.
    crc: Option<u32>,
    size: Option<u32>,
    offset: Option<u32>,
}

impl Zip {
    fn add(&mut self, name: &str, bytes: &[u8]) {
        self.members.push(Packed { name: name.to_owned(), bytes: bytes.to_vec(), ..Packed::default() });
    }

    fn bytes(&self) -> Vec<u8> {
        let (mut file, mut list) = (Vec::new(), Vec::new());
        for Packed { name, bytes, method, flags, crc, size, offset } in &self.members {
            let place = offset.unwrap_or(file.len() as u32);
            let length = bytes.len() as u32;
            let sums =
                [crc.unwrap_or_else(|| crc32(bytes)), length, size.unwrap_or(length)].map(u32::to_le_bytes).concat();
            let common = [&flags.to_le_bytes()[..], &method.to_le_bytes(), &[0; 4], &sums].concat();
            let name_length = (name.len() as u16).to_le_bytes();
            file.extend([b"PK\x03\x04\x14\x00", &common[..], &name_length, &[0; 2], name.as_bytes(), bytes].concat());
            let place = place.to_le_bytes();
            let tail = [&name_length[..], &[0; 12], &place, name.as_bytes()].concat();
            list.extend([b"PK\x01\x02\x14\x00\x14\x00", &common[..], &tail].concat());
        }
        let (count, length, start) = (self.members.len() as u64, list.len() as u64, file.len() as u64);
        file.extend(list);
        if self.is_64 {
            let place = (file.len() as u64).to_le_bytes();
            let numbers = [count, count, length, start].map(u64::to_le_bytes).concat();
            file.extend([b"PK\x06\x06", &44u64.to_le_bytes()[..], &[0; 12], &numbers].concat());
            file.extend([b"PK\x06\x07", &[0; 4][..], &place, &[0; 4]].concat());
            file.extend([b"PK\x05\x06", &[0; 4][..], &[0xff; 12], &[0; 2]].concat());
        } else {
            let count = (count as u16).to_le_bytes();
            let (length, start) = ((length as u32).to_le_bytes(), (start as u32).to_le_bytes());
            file.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &length, &start, &[0; 2]].concat());
        }
        file
    }
}

/// The definition, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}
