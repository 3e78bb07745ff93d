//! Models as their authors published them: two small ELMo of AllenNLP and bilm-tf, whose own vectors of the top layer are known;
//! those of other layers, and of sentences by themselves, come from `tools/golden/elmo.py`. And HDF5 files that lie.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use henson_checkpoint::fuzzing::hdf5;
use henson_checkpoint::{Config, LoadOptions, ModelDirectory, SaveDType, SaveOptions, Weights, open_parameters, save};
use henson_models::{Batch, Capture, Encoded, Head, Model, Sequence};
use henson_tensor::philox::Stream;
use henson_tensor::{Builder, DType, Device, Parameters, Pass, Tape};

/// What is asked of the authors' numbers, and of ours in f64.
const TOLERANCE: f32 = 1e-5;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/elmo").join(name)
}

struct Opened {
    config: Config,
    model: Model,
    parameters: Parameters,
    device: Device,
}

fn open(path: &Path) -> Opened {
    let directory = ModelDirectory::open(path).unwrap();
    let config = Config::from_value(directory.config().unwrap()).unwrap();
    let device = Device::cpu(None, Some(2)).unwrap();
    let mut b = Builder::new();
    let model = Model::build(&mut b, &config.model, Head::Encoder).unwrap();
    let (naming, weights) = (&config.model.family().naming, directory.weights().unwrap());
    let (parameters, report) =
        open_parameters(&weights, naming, b, &device, DType::F32, &LoadOptions::strict(), 0).unwrap();
    assert!(report.is_clean(), "{report}");
    Opened { config, model, parameters, device }
}

impl Opened {
    /// The layers of sentences, and where their words begin in the flat batch; `before` is what they continue.
    fn run(&self, sentences: &[&str], before: Option<&Encoded>) -> (Encoded, Vec<Vec<usize>>) {
        let ids: Vec<Vec<u32>> = sentences
            .iter()
            .map(|text| [256].into_iter().chain(text.bytes().map(u32::from)).chain([257]).collect())
            .collect();
        let zeros = vec![0; ids.iter().map(Vec::len).max().unwrap()];
        let sequences: Vec<Sequence<'_>> =
            ids.iter().map(|ids| Sequence { ids, segments: &zeros[..ids.len()] }).collect();
        let mut batch = Batch::new(&self.device, &self.config.model, &sequences, 0).unwrap();
        if let Some(before) = before {
            batch = batch.continuing(&before.states);
        }
        let (mut starts, mut at) = (Vec::new(), 0);
        for (text, ids) in sentences.iter().zip(&ids) {
            let of = |word: &str| at + 1 + word.as_ptr() as usize - text.as_ptr() as usize;
            starts.push(text.split_ascii_whitespace().map(of).collect());
            at += ids.len();
        }
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &self.parameters);
        let capture = Capture { hidden_states: true, attention_maps: false };
        (self.model.encode(&mut pass, &batch, capture).unwrap(), starts)
    }
}

fn rows(encoded: &Encoded, layer: usize, starts: &[usize]) -> Vec<f32> {
    let (x, width) = (&encoded.hidden_states[layer], encoded.last.tensor().columns());
    let x = x.tensor().to_f32().unwrap();
    starts.iter().flat_map(|row| &x[row * width..(row + 1) * width]).copied().collect()
}

fn off(got: &[f32], expected: &[f32]) -> f32 {
    assert!(got.len() == expected.len() && !got.is_empty(), "{} and {} numbers", got.len(), expected.len());
    got.iter().zip(expected).fold(0.0, |m: f32, (g, e)| if (g - e).abs() <= m { m } else { (g - e).abs() })
}

#[test]
fn elmo_gives_the_vectors_of_its_authors() {
    for name in ["skip", "plain"] {
        let directory = fixture(name);
        let elmo = open(&directory);
        let golden = Weights::open_file(&directory.join("golden.safetensors")).unwrap();
        let golden: BTreeMap<&str, Vec<f32>> =
            golden.names().map(|name| (name, golden.read_f32(name).unwrap())).collect();
        let sentences: Vec<Vec<String>> =
            serde_json::from_slice(&std::fs::read(directory.join("sentences.json")).unwrap()).unwrap();
        let (mut carried, mut fresh) = (vec![vec![Vec::new(); 3]; 3], vec![vec![Vec::new(); 3]; 3]);
        let (mut before, mut late) = (None, vec![Vec::new(); 3]);
        for i in 0..10 {
            let texts: Vec<&str> = sentences.iter().map(|list| list[i].as_str()).collect();
            let (encoded, starts) = elmo.run(&texts, before.as_ref());
            let (alone, _) = elmo.run(&texts, None);
            for (k, starts) in starts.iter().enumerate() {
                for layer in 0..3 {
                    if layer == 2 || i > 6 {
                        carried[layer][k].extend(rows(&encoded, layer, starts));
                    }
                    if i > 6 {
                        fresh[layer][k].extend(rows(&alone, layer, starts));
                    }
                }
                if i > 6 {
                    late[k].extend(rows(&encoded, 2, starts));
                }
            }
            before = Some(encoded);
        }
        let check = |key: &str, got: &[Vec<f32>]| {
            let off = off(&got.concat(), &golden[key]);
            assert!(off <= TOLERANCE, "{name}: {key} is off by {off}");
        };
        check("expected", &carried[2]);
        for layer in 0..3 {
            check(&format!("fresh.{layer}"), &fresh[layer]);
        }
        check("carried.0", &carried[0]);
        check("carried.1", &carried[1]);
        // The states matter: without them, the authors' numbers are far away.
        assert!(off(&late.concat(), &golden["fresh.2"]) > 0.1);
    }
}

/// The bytes of a text decide, not what stands next to it, and white space of any kind separates words.
#[test]
fn words_are_found_in_bytes() {
    let elmo = open(&fixture("skip"));
    let (plain, starts) = elmo.run(&["the cat sat"], None);
    let (other, others) = elmo.run(&["a dog", " the\t\u{b}cat\nsat  ", "x"], None);
    for layer in 0..3 {
        assert_eq!(rows(&plain, layer, &starts[0]), rows(&other, layer, &others[1]));
        // Every byte of a word has its vector, and so has the white space before it.
        let last: Vec<usize> = others[1].iter().map(|start| start - 1).collect();
        assert_eq!(rows(&other, layer, &others[1]), rows(&other, layer, &last));
        let inside: Vec<usize> = others[1].iter().map(|start| start + 2).collect();
        assert_eq!(rows(&other, layer, &others[1]), rows(&other, layer, &inside));
    }
    // White space alone is a sentence without words.
    let (empty, _) = elmo.run(&["  "], None);
    assert_eq!(empty.last.tensor().rows(), 4);
    // Longer words than the network has characters for are cut.
    let (long, starts) = elmo.run(&[&"a".repeat(60), &"a".repeat(48), &"a".repeat(47)], None);
    assert_eq!(rows(&long, 0, &starts[0]), rows(&long, 0, &starts[1]));
    assert_ne!(rows(&long, 0, &starts[0]), rows(&long, 0, &starts[2]));
}

#[test]
fn an_elmo_is_saved_as_safetensors() {
    let elmo = open(&fixture("skip"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("elmo");
    let mut config = elmo.config.clone();
    config.set_head(Head::Encoder);
    save(&path, &[], &config.to_json().unwrap(), &elmo.parameters, SaveDType::F32, &SaveOptions::default()).unwrap();
    let again = open(&path);
    assert_eq!(again.config.model.sizes(), elmo.config.model.sizes());
    assert_eq!(super::numbers(&again.parameters), super::numbers(&elmo.parameters));
}

#[test]
fn directories_that_are_not_whole_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let copy = |name: &str, to: &str| std::fs::copy(fixture("skip").join(name), path.join(to)).unwrap();
    let refused = || Weights::open(path).unwrap_err().to_string();
    copy("options.json", "options.json");
    assert!(refused().contains("no weights") || refused().contains("holds no"), "{}", refused());
    copy("lm_weights.hdf5", "a_weights.hdf5");
    assert!(Weights::open(path).is_ok());
    copy("lm_weights.hdf5", "b_weights.hdf5");
    assert!(refused().contains("keep one"), "{}", refused());
    std::fs::remove_file(path.join("b_weights.hdf5")).unwrap();
    // An array of another model.
    let file = path.join("a_weights.hdf5");
    let bytes = std::fs::read(&file).unwrap();
    let renamed = String::from_utf8_lossy(&bytes).find("char_embed").is_some();
    assert!(renamed);
    let at = bytes.windows(10).position(|name| name == b"char_embed").unwrap();
    let mut changed = bytes.clone();
    changed[at] = b'k';
    std::fs::write(&file, &changed).unwrap();
    assert!(refused().contains("no array char_embed"), "{}", refused());
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refused().contains("cut short"), "{}", refused());
    std::fs::write(&file, b"version https://git-lfs.github.com/spec/v1").unwrap();
    assert!(refused().contains("Git LFS"), "{}", refused());
}

#[test]
fn hdf5_files_that_lie_are_refused() {
    let good = std::fs::read(fixture("skip").join("lm_weights.hdf5")).unwrap();
    assert_eq!(hdf5(&good).unwrap(), 33);
    let check = |expected: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        let error = hdf5(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error} instead of {expected}");
    };
    let find = |what: &[u8]| good.windows(what.len()).position(|some| some == what).unwrap();
    check("not an HDF5 file", &|bytes| bytes.truncate(7));
    check("not an HDF5 file", &|bytes| bytes[1] = b'h');
    check("a superblock of version 2", &|bytes| bytes[8] = 2);
    check("addresses of 4", &|bytes| bytes[13] = 4);
    check("before its own beginning", &|bytes| bytes[25] = 1);
    check("cut short", &|bytes| bytes[64..72].fill(0xff));
    check("of version 1", &|bytes| bytes[64..72].fill(0));
    // The first child of the root's tree is the tree itself.
    let tree = find(b"TREE");
    check("a part of two others, or of itself", &|bytes| {
        bytes[tree + 32..tree + 40].copy_from_slice(&(tree as u64).to_le_bytes());
    });
    check("there should be the names", &|bytes| {
        let heap = find(b"HEAP");
        bytes[heap] = b'h';
    });
    // f32 with the highest byte first, f64, integers, chunks, numbers beyond the end.
    let float = find(&[0x11, 0x20, 0x1f, 0, 4, 0, 0, 0]);
    check("another form than f32", &|bytes| bytes[float + 1] |= 1);
    check("numbers of 8 bytes", &|bytes| bytes[float + 4] = 8);
    check("class 0", &|bytes| bytes[float] = 0x10);
    let layout = (float..good.len()).find(|at| good[*at..*at + 2] == [3, 1] && good[at - 8..at - 6] == [8, 0]).unwrap();
    check("in chunks", &|bytes| bytes[layout + 1] = 2);
    check("nothing was ever written", &|bytes| bytes[layout + 2..layout + 10].fill(0xff));
    check("an array should lie", &|bytes| bytes[layout + 7] = 1);
    check("another size than its shape", &|bytes| bytes[layout + 10] ^= 8);
}

/// Whatever is changed, the answer is an error or arrays within the file.
#[test]
fn changed_hdf5_files_never_panic() {
    let good = std::fs::read(fixture("skip").join("lm_weights.hdf5")).unwrap();
    let mut stream = Stream::new(7, 0, 0);
    let marks: Vec<usize> = (0..good.len() - 4)
        .filter(|at| [&b"TREE"[..], b"SNOD", b"HEAP"].contains(&&good[*at..at + 4]) || *at < 96)
        .collect();
    let mut refused = 0;
    for round in 0..4000 {
        let mut bytes = good.clone();
        for _ in 0..1 + round % 4 {
            let near = marks[stream.below(marks.len() as u32) as usize];
            let at = (near + stream.below(600) as usize).min(bytes.len() - 1);
            bytes[at] = [0, 1, 0x7f, 0xff, stream.below(256) as u8][stream.below(5) as usize];
        }
        if round % 7 == 0 {
            bytes.truncate(stream.below(good.len() as u32) as usize);
        }
        refused += usize::from(hdf5(&bytes).is_err());
    }
    assert!((500..4000).contains(&refused), "{refused}");
}
