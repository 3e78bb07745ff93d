//! Runs as a whole: the same bits whether or not a run was interrupted, whatever killed it; checkpoints that are kept;
//! how a run ends when its loss does; accumulation; phases; continued pre-training with new pieces.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use henson_data::{BuildOptions, Corpus, SourceFiles, Split, Vocabulary, build};
use henson_ranks::Ranks;
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Device, Isa, Tensor};
use henson_text::{SpecialSet, TextError, Tokenizer, TrainingKind, TrainingSettings, WordPieceOptions, train};
use henson_train::metrics::{self, Line};
use henson_train::{
    Best, Engine, Evaluation, Event, Keep, LoopSettings, Outcome, Plan, Recipe, Result, RunDirectory, Task,
    TrainingRun, Underway, Watch, pretrain,
};

/// The words of a real text as a vocabulary, most frequent first.
fn tokenizer(words: usize, extra: &[&str]) -> Tokenizer {
    let text = text();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for word in text.split(|c: char| !c.is_alphabetic()).filter(|word| word.len() > 1) {
        *counts.entry(word).or_default() += 1;
    }
    let mut by_count: Vec<(&str, usize)> = counts.into_iter().collect();
    by_count.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let mut vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    for c in (b'!'..=b'~').map(char::from).filter(|c| !c.is_ascii_uppercase()) {
        vocabulary.extend([c.to_string(), format!("##{c}")]);
    }
    vocabulary.extend(by_count.iter().take(words).map(|(word, _)| (*word).to_owned()));
    vocabulary.extend(extra.iter().map(|word| (*word).to_owned()));
    Tokenizer::from_vocabulary(&vocabulary, &WordPieceOptions::default()).unwrap()
}

fn text() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/text/novels.txt");
    fs::read_to_string(path).unwrap().to_lowercase()
}

/// Documents of 40 lines; every eighth is held out.
fn corpora(tokenizer: &Tokenizer) -> (Corpus, Corpus) {
    let text = text();
    let lines: Vec<Vec<u32>> =
        text.lines().map(|line| tokenizer.encode_ids(line).unwrap()).filter(|ids| !ids.is_empty()).collect();
    let documents: Vec<Vec<Vec<u32>>> = lines.chunks(40).map(<[Vec<u32>]>::to_vec).collect();
    let part = |held_out: bool| -> Vec<Vec<Vec<u32>>> {
        let chosen = documents.iter().enumerate().filter(|(i, _)| i.is_multiple_of(8) == held_out);
        chosen.map(|(_, document)| document.clone()).collect()
    };
    let vocabulary = Vocabulary::of(tokenizer).unwrap();
    (Corpus::from_documents(vocabulary.clone(), &part(false)), Corpus::from_documents(vocabulary, &part(true)))
}

const RECIPE: &str = r#"
model = "bert-tiny"
steps = 20
batch_size = 8
sequence_length = 48
learning_rate = 1e-3
checkpoint_every = 7
eval_every = 5
eval_sequences = 16
log_every = 1
config = { hidden_size = 32, num_hidden_layers = 2, max_position_embeddings = 64 }
"#;

fn plan(sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let recipe = Recipe::parse(RECIPE, "test", &sets).unwrap();
    let tokenizer = tokenizer(300, &[]);
    let (corpus, held_out) = corpora(&tokenizer);
    Plan::on(corpus, held_out, tokenizer, recipe, 2).unwrap()
}

/// Trains in a directory from where it is, until a step if one is given.
fn run(plan: &Plan, directory: &Path, threads: usize, stop_at: Option<u64>) -> Result<Outcome> {
    run_on(&Device::cpu(Some(Isa::best()), Some(threads)).unwrap(), plan, directory, stop_at)
}

fn run_on(device: &Device, plan: &Plan, directory: &Path, stop_at: Option<u64>) -> Result<Outcome> {
    let stop = AtomicBool::new(false);
    let mut watch = Watch { on: &mut |_| {}, stop: &stop };
    pretrain(plan, device, directory, 1, stop_at, &mut watch).map(|(outcome, _)| outcome)
}

fn weights(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("model.safetensors")).unwrap()
}

fn losses(directory: &Path) -> Vec<(u64, f64)> {
    let lines = metrics::read(&directory.join("metrics.jsonl")).unwrap().lines;
    let train = lines.into_iter().filter_map(|line| if let Line::Train(line) = line { Some(line) } else { None });
    train.map(|line| (line.step, line.loss)).collect()
}

#[test]
fn a_run_in_legs_gives_the_bits_of_one_that_was_never_stopped() {
    let plan = plan(&[]);
    let directory = tempfile::tempdir().unwrap();
    let (whole, legs) = (directory.path().join("whole"), directory.path().join("legs"));
    assert_eq!(run(&plan, &whole, 2, None).unwrap(), Outcome::Finished);
    // Stops fall on no checkpoint's step; another number of threads changes nothing.
    for (threads, stop_at) in [(1, Some(0)), (1, Some(4)), (2, Some(10)), (3, None)] {
        let expected = if stop_at.is_some() { Outcome::Paused } else { Outcome::Finished };
        assert_eq!(run(&plan, &legs, threads, stop_at).unwrap(), expected);
    }
    assert_eq!(weights(&whole), weights(&legs));
    let optimizer = |run: &Path| fs::read(run.join("checkpoints/step-20/optimizer.safetensors")).unwrap();
    assert_eq!(optimizer(&whole), optimizer(&legs));
    assert_eq!(losses(&whole), losses(&legs));
    assert_eq!(losses(&whole).len(), 20);
    let evals = |run: &Path| {
        let lines = metrics::read(&run.join("metrics.jsonl")).unwrap().lines;
        lines.into_iter().filter(|line| matches!(line, Line::Eval(_) | Line::Samples(_))).collect::<Vec<_>>()
    };
    assert_eq!(evals(&whole), evals(&legs));
    assert!(whole.join("report.html").is_file() && whole.join("vocab.txt").is_file());
}

/// A recipe with another model; `config` is then what `sets` say.
fn recipe_of(model: &str, sets: &[&str]) -> Recipe {
    let text = RECIPE.lines().filter(|line| !line.starts_with("config") && !line.starts_with("model"));
    let text: String = text.map(|line| format!("{line}\n")).chain([format!("model = {model:?}\n")]).collect();
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Recipe::parse(&text, "test", &sets).unwrap()
}

fn plan_of(recipe: Recipe, words: usize) -> Result<Plan> {
    let tokenizer = tokenizer(words, &[]);
    let (corpus, held_out) = corpora(&tokenizer);
    Plan::on(corpus, held_out, tokenizer, recipe, 2)
}

const DISTILBERT: [&str; 6] = [
    "objective=mlm",
    "config.dim=32",
    "config.n_layers=2",
    "config.n_heads=2",
    "config.hidden_dim=128",
    "config.max_position_embeddings=64",
];

/// A student of another family starts from the first and the last of its teacher's four layers, comes nearer to it than to its own
/// beginning, and ends with the same bits in legs and in one go.
#[test]
fn a_student_starts_from_its_teachers_layers_and_resumes_with_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let (teacher, whole, legs) =
        (directory.path().join("teacher"), directory.path().join("whole"), directory.path().join("legs"));
    let of_teacher = plan(&["objective=mlm", "steps=30", "config.num_hidden_layers=4"]);
    run(&of_teacher, &teacher, 2, None).unwrap();
    let named = format!("distil.teacher={}", teacher.display());
    let student =
        |more: &[&str]| plan_of(recipe_of("distilbert-base", &[&DISTILBERT[..], &[&named], more].concat()), 300);
    let plan = student(&[]).unwrap();
    let device = Device::cpu(None, Some(2)).unwrap();
    let engine = plan.engine(&device).unwrap();
    let read = |engine: &Engine, name: &str| {
        let place = engine.parameters.entries().iter().position(|entry| entry.name == name);
        engine.parameters.read(place.unwrap_or_else(|| panic!("no {name}"))).unwrap()
    };
    let opened = plan_of(recipe_of(&teacher.display().to_string(), &["objective=mlm"]), 300).unwrap();
    let opened = opened.engine(&device).unwrap();
    for (own, of_teacher) in [
        ("distilbert.embeddings.word_embeddings.weight", "bert.embeddings.word_embeddings.weight"),
        ("distilbert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.bias"),
        ("distilbert.transformer.layer.0.attention.k_lin.weight", "bert.encoder.layer.0.attention.self.key.weight"),
        ("distilbert.transformer.layer.1.attention.q_lin.weight", "bert.encoder.layer.3.attention.self.query.weight"),
        ("distilbert.transformer.layer.1.ffn.lin2.bias", "bert.encoder.layer.3.output.dense.bias"),
        ("distilbert.transformer.layer.1.output_layer_norm.weight", "bert.encoder.layer.3.output.LayerNorm.weight"),
        ("vocab_transform.weight", "cls.predictions.transform.dense.weight"),
        ("vocab_projector.bias", "cls.predictions.bias"),
    ] {
        assert_eq!(read(&engine, own), read(&opened, of_teacher), "{own}");
    }
    run(&plan, &whole, 2, None).unwrap();
    let log = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    assert!(["\"soft_loss\"", "\"mlm_loss\"", "\"cosine_loss\""].iter().all(|name| log.contains(name)), "{log}");
    let found = losses(&whole);
    let mean = |losses: &[(u64, f64)]| losses.iter().map(|(_, loss)| loss).sum::<f64>() / losses.len() as f64;
    assert!(mean(&found[15..]) < mean(&found[..5]), "{found:?}");
    for (threads, stop_at) in [(1, Some(4)), (2, Some(10)), (3, None)] {
        run(&plan, &legs, threads, stop_at).unwrap();
    }
    assert_eq!((weights(&whole), losses(&whole)), (weights(&legs), losses(&legs)));
    // Several ranks, each of which asks the teacher about its own parts.
    let shared = || student(&["accumulation=4"]).unwrap();
    let [one, two, four] = ["one", "two", "four"].map(|name| directory.path().join(name));
    run(&shared(), &one, 2, None).unwrap();
    run_together(&shared, 2, &two, None);
    run_together(&shared, 4, &four, Some(4));
    run_together(&shared, 2, &four, None);
    for several in [&two, &four] {
        assert_eq!((weights(several), losses(several)), (weights(&one), losses(&one)));
    }

    let refused = |made: Result<Plan>, expected: &[&str]| {
        let error = made.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(expected.iter().all(|part| error.contains(part)), "expected {expected:?}: {error}");
    };
    refused(student(&["distil.layers=[0]"]), &["distil.layers", "2 numbers below 4"]);
    refused(student(&["distil.layers=[0, 4]"]), &["distil.layers"]);
    refused(student(&["config.dim=48"]), &["distil.cosine_weight", "48", "32"]);
    let other = recipe_of("distilbert-base", &[&DISTILBERT[..], &[&named]].concat());
    refused(plan_of(other, 200), &["another vocabulary", "teacher"]);
    refused(student(&["distil.teacher=/no/such/teacher"]), &["/no/such/teacher"]);
    // Without the cosine another width is as good; nothing is copied then.
    student(&["config.dim=48", "distil.cosine_weight=0.0"]).unwrap().engine(&device).unwrap();
}

/// Trains by several ranks, here threads of this process.
fn run_together(plan: &(dyn Fn() -> Plan + Sync), ranks: usize, directory: &Path, stop_at: Option<u64>) {
    let world: Vec<Arc<Ranks>> = Ranks::in_threads(ranks).into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        for ranks in &world {
            scope.spawn(|| {
                let mut plan = plan();
                plan.ranks = Some(Arc::clone(ranks));
                let expected = if stop_at.is_some() { Outcome::Paused } else { Outcome::Finished };
                assert_eq!(run(&plan, directory, 1, stop_at).unwrap(), expected);
            });
        }
    });
}

#[test]
fn several_ranks_give_the_bits_of_one() {
    for (optimizer, dtype) in [("adamw", "f32"), ("lamb", "bf16"), ("stable-adamw", "f32")] {
        let (optimizer, dtype) = (format!("optimizer={optimizer:?}"), format!("dtype={dtype:?}"));
        // Steps of a size at which gradients are clipped.
        let sets = ["accumulation=4", &optimizer, &dtype, "learning_rate=1e-2", "steps=12"];
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        assert_eq!(run(&plan(&sets), &at("one"), 2, None).unwrap(), Outcome::Finished);
        let together = || plan(&sets);
        run_together(&together, 2, &at("two"), None);
        // Resumed by another number of ranks, and by one process.
        run_together(&together, 4, &at("legs"), Some(4));
        run_together(&together, 2, &at("legs"), Some(9));
        assert_eq!(run(&plan(&sets), &at("legs"), 1, None).unwrap(), Outcome::Finished);
        let all = |name: &str| {
            let (run, moments) = (at(name), "checkpoints/step-12/optimizer.safetensors");
            let lines = metrics::read(&run.join("metrics.jsonl")).unwrap().lines;
            let lines: Vec<Line> = lines
                .into_iter()
                .map(|line| match line {
                    Line::Train(line) => Line::Train(metrics::Train { seconds: 0.0, tokens_per_s: 0.0, ..line }),
                    other => other,
                })
                .collect();
            (weights(&run), fs::read(run.join(moments)).unwrap(), lines)
        };
        let one = all("one");
        for several in ["two", "legs"] {
            let (weights, moments, lines) = all(several);
            assert!(weights == one.0, "{optimizer} {dtype}: the weights of {several}");
            assert!(moments == one.1, "{optimizer} {dtype}: the moments of {several}");
            assert_eq!(lines, one.2, "{optimizer} {dtype}: the log of {several}");
        }
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_after_the_same_step() {
    let sets = ["accumulation=2", "steps=12", "eval_every=0"];
    let directory = tempfile::tempdir().unwrap();
    let (whole, stopped) = (directory.path().join("whole"), directory.path().join("stopped"));
    let (world, stops) = (Ranks::in_threads(2), [AtomicBool::new(false), AtomicBool::new(false)]);
    std::thread::scope(|scope| {
        for (ranks, stop) in world.into_iter().zip(&stops) {
            let (stops, stopped) = (&stops, &stopped);
            scope.spawn(move || {
                let mut plan = plan(&sets);
                plan.ranks = Some(Arc::new(ranks));
                // The first sees the steps; it is the other that is told to stop.
                let mut on = |event: Event<'_>| {
                    if let Event::Step { step, .. } = event {
                        stops[1].store(step >= 5, Ordering::Relaxed);
                    }
                };
                let mut watch = Watch { on: &mut on, stop };
                let device = Device::cpu(None, Some(1)).unwrap();
                let (outcome, step) = pretrain(&plan, &device, stopped, 1, None, &mut watch).unwrap();
                assert_eq!(outcome, Outcome::Interrupted);
                assert!((5..12).contains(&step), "{step}");
            });
        }
    });
    assert!(!stops[0].load(Ordering::Relaxed));
    assert_eq!(run(&plan(&sets), &stopped, 1, None).unwrap(), Outcome::Finished);
    assert_eq!(run(&plan(&sets), &whole, 1, None).unwrap(), Outcome::Finished);
    assert_eq!(weights(&whole), weights(&stopped));
}

#[test]
fn ranks_that_cannot_train_together_are_refused_by_name() {
    let refused = |sets: [&[&str]; 2], expected: &str| {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("run");
        std::thread::scope(|scope| {
            for (ranks, sets) in Ranks::in_threads(2).into_iter().zip(sets) {
                let out = &out;
                scope.spawn(move || {
                    let mut plan = plan(sets);
                    plan.ranks = Some(Arc::new(ranks));
                    let error = run(&plan, out, 1, None).unwrap_err().to_string();
                    assert!(error.contains(expected), "{error}");
                });
            }
        });
        assert!(!out.exists(), "{expected}: something was written");
    };
    let parts = ["accumulation=2"];
    refused([&parts, &["accumulation=2", "learning_rate=2e-3"]], "rank 1 on ");
    refused([&parts, &["accumulation=2", "learning_rate=2e-3"]], "differs from rank 0 in: recipe.");
    refused([&[], &[]], "1 parts can be shared by 1 ranks; or set accumulation=2");
    refused([&["accumulation=3", "batch_size=9"]; 2], "3 parts can be shared by 3 ranks");
}

#[test]
fn optimizers_that_cannot_be_shared_are_refused() {
    std::thread::scope(|scope| {
        for ranks in Ranks::in_threads(2) {
            scope.spawn(move || {
                let sets = ["accumulation=2", "optimizer=\"adafactor\""];
                let mut engine = plan(&sets).engine(&Device::cpu(None, Some(1)).unwrap()).unwrap();
                let error = engine.join(Some(Arc::new(ranks))).unwrap_err().to_string();
                assert!(error.contains("adamw, stable-adamw or lamb"), "{error}");
            });
        }
    });
}

/// Norms and sums over parts are rounded in another order than they were.
#[test]
fn a_run_of_a_version_that_rounds_otherwise_resumes_with_a_warning() {
    let plan = plan(&["eval_every=0", "steps=9"]);
    let directory = tempfile::tempdir().unwrap();
    let warnings = |stop_at| {
        let mut warnings = Vec::new();
        let mut on = |event: Event<'_>| {
            if let Event::Warning { text } = event {
                warnings.push(text.to_owned());
            }
        };
        let (device, stop) = (Device::cpu(None, Some(1)).unwrap(), AtomicBool::new(false));
        pretrain(&plan, &device, directory.path(), 1, stop_at, &mut Watch { on: &mut on, stop: &stop }).unwrap();
        warnings
    };
    assert!(warnings(Some(2)).is_empty());
    assert!(warnings(Some(4)).is_empty());
    // As versions before wrote it, which had no such key.
    let path = directory.path().join("checkpoints/step-4/state.json");
    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for key in ["rounding", "files", "sum"] {
        assert!(state.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    fs::write(&path, state.to_string()).unwrap();
    let told = warnings(Some(6));
    assert!(told.len() == 1 && told[0].contains("rounds norms"), "{told:?}");
    assert!(warnings(None).is_empty());
}

/// Nothing but relations.
const ALONE: [&str; 3] = ["distil.soft_weight=0.0", "distil.mlm_weight=0.0", "distil.relation_heads=4"];

/// A narrower student of another family learns the relations of a teacher's layer and nothing else; the teacher need not predict anything. The
/// gradient of the loss is its slope in every parameter's direction, and a run in legs has the bits of one that was never stopped.
#[test]
fn relations_are_learned_from_a_layer_of_any_encoder() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    run(&plan(&["objective=mlm", "steps=10", "config.num_hidden_layers=3"]), &at("teacher"), 2, None).unwrap();
    let named = format!("distil.teacher={}", at("teacher").display());
    let student = |more: &[&str]| {
        let sizes = ["config.dim=24", "config.n_heads=2", "distil.cosine_weight=0.0"];
        plan_of(recipe_of("distilbert-base", &[&DISTILBERT[..], &sizes, &[&named], more].concat()), 300)
    };
    for (relations, layer) in
        [(r#"distil.relations=["query-query", "key-key", "value-value"]"#, 2), (r#"distil.relations=["query-key"]"#, 0)]
    {
        let layer = format!("distil.relation_layer={layer}");
        let plan = student(&[&ALONE[..], &[relations, &layer, "dropout=0.0"]].concat()).unwrap();
        check_slopes(&plan);
        let (whole, legs) = (at(&format!("whole-{layer}")), at(&format!("legs-{layer}")));
        run(&plan, &whole, 2, None).unwrap();
        let log = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
        assert!(log.contains("\"relation_loss\"") && !log.contains("\"soft_loss\""), "{log}");
        let found = losses(&whole);
        let mean = |losses: &[(u64, f64)]| losses.iter().map(|(_, loss)| loss).sum::<f64>() / losses.len() as f64;
        assert!(mean(&found[15..]) < 0.9 * mean(&found[..5]), "{found:?}");
        for (threads, stop_at) in [(1, Some(4)), (3, None)] {
            run(&plan, &legs, threads, stop_at).unwrap();
        }
        assert_eq!((weights(&whole), losses(&whole)), (weights(&legs), losses(&legs)));
    }
    // Beside all other losses.
    let all = student(&[r#"distil.relations=["value-value"]"#, "distil.relation_heads=2", "steps=2"]).unwrap();
    run(&all, &at("all"), 2, None).unwrap();
    let log = fs::read_to_string(at("all").join("metrics.jsonl")).unwrap();
    assert!(["soft_loss", "mlm_loss", "relation_loss"].iter().all(|name| log.contains(name)), "{log}");

    let refused = |more: &[&str], expected: &[&str]| {
        let error = student(more).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(expected.iter().all(|part| error.contains(part)), "expected {expected:?}: {error}");
    };
    let one = r#"distil.relations=["key-key"]"#;
    refused(&[one, "distil.relation_heads=5"], &["distil.relation_heads", "24", "32"]);
    refused(&[one, "distil.relation_layer=3"], &["distil.relation_layer", "below 3"]);
    let modern = recipe_of("modernbert-base", &["objective=mlm", &named, one, "distil.cosine_weight=0.0"]);
    let error = plan_of(modern, 300).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("distil.rel"), "{error}");
    for (sets, expected) in [
        (&ALONE[..2], "nothing is learned from the teacher"),
        (&[r#"distil.relations=["key-key", "key-key"]"#][..], "each relation once"),
        (&[r#"distil.relations=["key-value"]"#], "query-key"),
    ] {
        let sets: Vec<String> = [sets, &["objective=mlm", &named, "distil.cosine_weight=0.0"]]
            .concat()
            .iter()
            .map(|set| (*set).to_owned())
            .collect();
        let error = Recipe::parse(RECIPE, "test", &sets).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "{error}");
    }
}

/// The gradient of a plan's first step beside differences of its loss along it: all parameters that learn, together.
fn check_slopes(plan: &Plan) {
    let device = Device::cpu(None, Some(2)).unwrap();
    let of = |shift: f32, along: &[Vec<f32>]| {
        let mut engine = plan.engine(&device).unwrap();
        for (i, slopes) in along.iter().enumerate() {
            let mut values = engine.parameters.read(i).unwrap();
            values.iter_mut().zip(slopes).for_each(|(x, slope)| *x += shift * slope);
            engine.parameters.write(i, &values).unwrap();
        }
        engine.parameters.refresh().unwrap();
        engine.gradients.zero();
        let loss = plan.task(&serde_json::Value::Null, 1).unwrap().step(&mut engine, 0).unwrap().wait().unwrap().total;
        let count = engine.parameters.entries().len();
        let slopes: Vec<Vec<f32>> = (0..count).map(|i| engine.gradients.read(&engine.parameters, i).unwrap()).collect();
        (loss, slopes)
    };
    let (_, slopes) = of(0.0, &[]);
    let square: f64 = slopes.iter().flatten().map(|x| f64::from(*x).powi(2)).sum();
    // A step that changes the loss by a hundredth or so.
    let step = 1e-2 / square.sqrt();
    let difference = (of(step as f32, &slopes).0 - of(-step as f32, &slopes).0) / (2.0 * step);
    assert!((difference / square - 1.0).abs() < 0.02, "{difference} {square}");
}

/// Byte-level BPE with the special tokens of models that write.
fn writers_tokenizer(specials: SpecialSet) -> Tokenizer {
    let sentinels = if specials == SpecialSet::Ended { 20 } else { 0 };
    let settings = TrainingSettings { specials, sentinels, ..TrainingSettings::new(TrainingKind::ByteBpe, 400) };
    let go_on = &mut |_| std::ops::ControlFlow::Continue(());
    train(&settings, [Ok::<_, TextError>(text())], go_on).unwrap().tokenizer
}

/// Models that write, each with its objective: the model, its special tokens, and what differs.
const WRITERS: [(&str, SpecialSet, &[&str]); 4] = [
    (
        "gpt2-tiny",
        SpecialSet::EndOfText,
        &["objective=causal", "packing=blocks", "config.n_embd=32", "config.n_positions=64", "schedule=inverse-sqrt"],
    ),
    (
        "openai-gpt",
        SpecialSet::EndOfText,
        &[
            "objective=causal",
            "config.n_embd=32",
            "config.n_layer=2",
            "config.n_head=2",
            "config.n_positions=64",
            "dtype=bf16",
            "accumulation=2",
        ],
    ),
    (
        "t5-mini",
        SpecialSet::Ended,
        &[
            "objective=span-corruption",
            "packing=blocks",
            "config.d_model=32",
            "config.d_ff=64",
            "config.d_kv=8",
            "config.num_layers=2",
            "config.num_decoder_layers=2",
            "optimizer=adafactor",
            "adafactor.min_side=16",
            "learning_rate=0.03",
            "schedule=constant-inverse-sqrt",
            "weight_decay=0.0",
            "clip=0.0",
            "label_smoothing=0.1",
        ],
    ),
    (
        "bart-mini",
        SpecialSet::Roberta,
        &[
            "objective=denoising",
            "packing=full-sentences",
            "config.d_model=32",
            "config.encoder_layers=1",
            "config.decoder_layers=1",
            "config.encoder_ffn_dim=64",
            "config.decoder_ffn_dim=64",
            "config.max_position_embeddings=64",
            "accumulation=2",
            "noise.rotation=0.3",
        ],
    ),
];

/// Every objective of models that write: the loss falls, legs and threads change no bit, and what is saved names its tokens.
#[test]
fn models_that_write_train_and_resume_with_the_same_bits() {
    for (model, specials, sets) in WRITERS {
        let text = RECIPE.lines().filter(|line| !line.starts_with("config") && !line.starts_with("model"));
        let text: String = text.map(|line| format!("{line}\n")).chain([format!("model = {model:?}\n")]).collect();
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let tokenizer = writers_tokenizer(specials);
        let (corpus, held_out) = corpora(&tokenizer);
        let end = tokenizer.end_of_text().unwrap();
        let plan = Plan::on(corpus, held_out, tokenizer, Recipe::parse(&text, "test", &sets).unwrap(), 2).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (whole, legs) = (directory.path().join("whole"), directory.path().join("legs"));
        assert_eq!(run(&plan, &whole, 2, None).unwrap(), Outcome::Finished);
        for (threads, stop_at) in [(1, Some(9)), (3, None)] {
            run(&plan, &legs, threads, stop_at).unwrap();
        }
        assert_eq!(weights(&whole), weights(&legs), "{model}");
        let optimizer = |run: &Path| fs::read(run.join("checkpoints/step-20/optimizer.safetensors")).unwrap();
        assert_eq!(optimizer(&whole), optimizer(&legs), "{model}");
        let found = losses(&whole);
        assert_eq!((&found, found.len()), (&losses(&legs), 20), "{model}");
        let mean = |part: &[(u64, f64)]| part.iter().map(|(_, loss)| loss).sum::<f64>() / part.len() as f64;
        // Twenty small steps: what is shown is that the loss falls, not how far.
        assert!(mean(&found[15..]) < 0.99 * mean(&found[..3]), "{model}: {found:?}");
        let lines = metrics::read(&whole.join("metrics.jsonl")).unwrap().lines;
        let evals: Vec<_> =
            lines.iter().filter_map(|l| if let Line::Eval(l) = l { Some(&l.metrics) } else { None }).collect();
        let (first, last) = (evals[0], evals[evals.len() - 1]);
        assert!(last["loss"] < first["loss"] && (last["perplexity"] - last["loss"].exp()).abs() < 1e-9, "{model}");
        let config: serde_json::Value = serde_json::from_slice(&fs::read(whole.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["eos_token_id"], end, "{model}");
        if model == "t5-mini" {
            // Rows and columns of matrices alone.
            let (kept, all) = (optimizer(&whole).len(), weights(&whole).len());
            assert!(kept < all / 2, "{kept} of {all} bytes");
        }
    }
}

#[test]
fn objectives_that_a_family_cannot_have_are_refused() {
    let cases: [(&str, SpecialSet, &[&str], &str); 5] = [
        ("t5-mini", SpecialSet::Ended, &["objective=mlm"], "span-corruption or denoising"),
        ("t5-mini", SpecialSet::Ended, &["objective=causal"], "left-to-right"),
        ("bart-mini", SpecialSet::Roberta, &["objective=span-corruption"], "sentinels"),
        ("bert-tiny", SpecialSet::Roberta, &["objective=denoising"], "for encoder-decoders"),
        ("gpt2-tiny", SpecialSet::EndOfText, &["objective=mlm"], "causal"),
    ];
    for (model, specials, sets, expected) in cases {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let recipe = Recipe::parse(&format!("steps = 1\nmodel = {model:?}"), "test", &sets).unwrap();
        let tokenizer = writers_tokenizer(specials);
        let (corpus, held_out) = corpora(&tokenizer);
        let error = Plan::on(corpus, held_out, tokenizer, recipe, 1).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{model}: {error}");
    }
}

/// Every file in `recipes/` is a recipe, but for those of fine-tuning; one in a set is one on top of the set's base.toml.
#[test]
fn all_recipes_are_read() {
    fn recipes(directory: &Path, found: &mut Vec<String>) {
        let read = |path: &Path| (fs::read_to_string(path).unwrap_or_default(), path.display().to_string());
        let base = read(&directory.join("base.toml"));
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("finetune") {
                continue;
            }
            if path.is_dir() {
                recipes(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "toml") {
                let own = read(&path);
                let layers = [(base.0.as_str(), base.1.as_str()), (own.0.as_str(), own.1.as_str())];
                Recipe::parse_layers(&layers, &[]).unwrap_or_else(|error| panic!("{error}"));
                found.push(own.1);
            }
        }
    }
    let mut found = Vec::new();
    recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes"), &mut found);
    assert!(found.len() > 40, "{found:?}");
}

/// ALBERT's objective: its losses have their names, the model is one of `transformers`, and threads change nothing.
#[test]
fn albert_learns_the_order_of_sentences() {
    let own = ["model=albert-base", "objective=mlm-sop", "masking=ngrams", "optimizer=lamb", "accumulation=2"];
    let sizes = ["config.num_attention_heads=2", "config.embedding_size=16"];
    let plan = plan(&[&own[..], &sizes].concat());
    let directory = tempfile::tempdir().unwrap();
    let (whole, legs) = (directory.path().join("whole"), directory.path().join("legs"));
    assert_eq!(run(&plan, &whole, 2, None).unwrap(), Outcome::Finished);
    for (threads, stop_at) in [(1, Some(9)), (3, None)] {
        run(&plan, &legs, threads, stop_at).unwrap();
    }
    assert_eq!(weights(&whole), weights(&legs));
    for line in metrics::read(&whole.join("metrics.jsonl")).unwrap().lines {
        match line {
            Line::Train(line) => {
                let [(first, masked), (second, order)] = &line.losses[..] else { panic!("{:?}", line.losses) };
                assert_eq!([first.as_str(), second], ["mlm_loss", "sop_loss"]);
                // At the start both are chance: ln V and ln 2.
                let chance = (masked - (plan.tokenizer.vocabulary_size() as f64).ln()).abs() < 0.1
                    && (order - 2.0_f64.ln()).abs() < 0.05;
                assert!(line.step != 1 || chance, "{masked} {order}");
                assert!((line.loss - masked - order).abs() < 1e-5);
            }
            Line::Eval(line) => assert!(line.metrics.contains_key("sop_accuracy")),
            Line::Samples(_) | Line::Note(_) => {}
        }
    }
    let config = fs::read_to_string(whole.join("config.json")).unwrap();
    assert!(config.contains("AlbertForPreTraining"), "{config}");
    let recipe = Recipe::parse(RECIPE, "test", &["model=roberta-base", own[1], sizes[0]].map(str::to_owned)).unwrap();
    let tokenizer = tokenizer(300, &[]);
    let (corpus, held_out) = corpora(&tokenizer);
    let error = Plan::on(corpus, held_out, tokenizer, recipe, 1).err().unwrap().to_string();
    assert!(error.contains("mlm-sop") && error.contains("roberta"), "{error}");
}

const SPANBERT: [&str; 8] = [
    "objective=span-boundary",
    "masking=spanbert",
    "long_sentences=drop",
    "short_sequences=0.0",
    "accumulation=2",
    "decay_all=true",
    "epsilon=1e-8",
    "clip=0.0",
];

/// The head of the boundaries is in checkpoints, for the run to resume with the same bits, and in no model.
const PERMUTATION: &str = r#"
model = "xlnet-tiny"
objective = "permutation"
packing = "blocks"
mask_probability = 0.1666667
permutation_size = 24
steps = 30
batch_size = 8
sequence_length = 48
learning_rate = 3e-3
warmup_steps = 3
checkpoint_every = 12
eval_every = 30
eval_sequences = 16
log_every = 1
config = { d_model = 32, n_layer = 2, d_inner = 64 }
"#;

/// XLNet's pre-training: it learns, and neither stops nor parts nor threads change a bit beyond what they must.
#[test]
fn permutations_learn_and_resume_with_the_same_bits() {
    let plan = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let recipe = Recipe::parse(PERMUTATION, "test", &sets)?;
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        Plan::on(corpus, held_out, tokenizer, recipe, 2)
    };
    let directory = tempfile::tempdir().unwrap();
    let [whole, legs, parts] = ["whole", "legs", "parts"].map(|name| directory.path().join(name));
    assert_eq!(run(&plan(&[]).unwrap(), &whole, 2, None).unwrap(), Outcome::Finished);
    for (threads, stop_at) in [(1, Some(7)), (3, None)] {
        run(&plan(&[]).unwrap(), &legs, threads, stop_at).unwrap();
    }
    assert_eq!(weights(&whole), weights(&legs));
    assert_eq!(losses(&whole), losses(&legs));
    let all = losses(&whole);
    let mean = |some: &[(u64, f64)]| some.iter().map(|(_, loss)| loss).sum::<f64>() / some.len() as f64;
    assert!(mean(&all[25..]) < mean(&all[..3]) - 0.5, "{all:?}");
    run(&plan(&["accumulation=4", "steps=3"]).unwrap(), &parts, 2, None).unwrap();
    for (got, expected) in losses(&parts).iter().zip(&all) {
        assert!((got.1 - expected.1).abs() < 1e-3, "{got:?} in parts, {expected:?} at once");
    }
    let refused = |sets: &[&str]| plan(sets).map(|_| ()).unwrap_err().to_string();
    assert!(refused(&["objective=mlm", "permutation_size=24"]).contains("permutation_size"));
    assert!(refused(&["masking=whole-words"]).contains("masking"));
}

/// What is remembered goes from step to step, into checkpoints and out of them, whatever the parts and threads.
#[test]
fn a_memory_is_carried_through_stops_with_the_same_bits() {
    let plan = |sets: &[&str]| {
        let own = ["packing=stream", "config.mem_len=20", "sequence_length=24", "batch_size=4", "steps=10"];
        let sets: Vec<String> = own.iter().chain(sets).map(|set| (*set).to_owned()).collect();
        let recipe = Recipe::parse(PERMUTATION, "test", &sets).unwrap();
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        Plan::on(corpus, held_out, tokenizer, recipe, 2).unwrap()
    };
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (name, dtype) in [("f32", "dtype=f32"), ("bf16", "dtype=bf16")] {
        let (whole, legs) = (at(name), at(&format!("{name} in legs")));
        assert_eq!(run(&plan(&[dtype]), &whole, 2, None).unwrap(), Outcome::Finished);
        for (threads, stop_at) in [(1, Some(4)), (3, Some(7)), (2, None)] {
            run(&plan(&[dtype]), &legs, threads, stop_at).unwrap();
        }
        assert_eq!((losses(&whole), weights(&whole)), (losses(&legs), weights(&legs)), "{name}");
    }
    let (whole, parts, shorter) = (at("f32"), at("parts"), at("shorter"));
    // The same in parts, each with a memory of its own.
    run(&plan(&["accumulation=2"]), &parts, 2, None).unwrap();
    for (got, expected) in losses(&parts).iter().zip(&losses(&whole)) {
        assert!((got.1 - expected.1).abs() < 1e-3, "{got:?} in parts, {expected:?} at once");
    }
    // A memory matters, from the second step on.
    run(&plan(&["config.mem_len=1"]), &shorter, 2, None).unwrap();
    let (all, short) = (losses(&whole), losses(&shorter));
    assert_eq!(all[0], short[0]);
    assert!(all[1..].iter().zip(&short[1..]).all(|(a, b)| a != b), "{all:?} {short:?}");
    let refused = at("ranks");
    for ranks in Ranks::in_threads(2) {
        let mut plan = plan(&["accumulation=2"]);
        plan.ranks = Some(Arc::new(ranks));
        let error = run(&plan, &refused, 1, None).unwrap_err().to_string();
        assert!(error.contains("carried by one process alone"), "{error}");
    }
    assert!(!refused.exists());
}

#[test]
fn another_objective_than_the_networks_is_refused() {
    let plan = |text: &str| {
        let recipe = Recipe::parse(text, "test", &[]).unwrap();
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        Plan::on(corpus, held_out, tokenizer, recipe, 2).map(|_| ()).unwrap_err().to_string()
    };
    let error = plan("model = \"xlnet-tiny\"\nobjective = \"mlm\"\nsteps = 1");
    assert!(error.contains("expected permutation"), "{error}");
    let error = plan("model = \"bert-tiny\"\nobjective = \"permutation\"\nsteps = 1");
    assert!(error.contains("no second stream"), "{error}");
}

#[test]
fn spanbert_resumes_with_the_same_bits_and_leaves_a_plain_model() {
    let plan = plan(&SPANBERT);
    let directory = tempfile::tempdir().unwrap();
    let (whole, legs) = (directory.path().join("whole"), directory.path().join("legs"));
    assert_eq!(run(&plan, &whole, 2, None).unwrap(), Outcome::Finished);
    for (threads, stop_at) in [(1, Some(4)), (2, Some(9)), (1, None)] {
        run(&plan, &legs, threads, stop_at).unwrap();
    }
    assert_eq!(run(&plan, &legs, 1, None).unwrap(), Outcome::WasFinished);
    assert_eq!(weights(&whole), weights(&legs));
    let moments = |run: &Path| fs::read(run.join("checkpoints/step-20/optimizer.safetensors")).unwrap();
    assert_eq!(moments(&whole), moments(&legs));
    assert_eq!(losses(&whole), losses(&legs));
    let names = |bytes: &[u8]| -> Vec<String> {
        let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
        file.names().into_iter().map(|name| name.to_owned()).collect()
    };
    for model in [weights(&whole), fs::read(whole.join("checkpoints/step-14/model.safetensors")).unwrap()] {
        let names = names(&model);
        assert!(names.iter().any(|name| name == "cls.predictions.transform.dense.weight"));
        assert!(!names.iter().any(|name| name.contains("pair_target")), "{names:?}");
    }
    assert!(names(&moments(&whole)).iter().any(|name| name.ends_with("mlp_layer_norm.linear2.weight.value")));
    let config = fs::read_to_string(whole.join("config.json")).unwrap();
    assert!(config.contains("BertForMaskedLM"), "{config}");
    // Both losses start where the words are all as likely, and both fall.
    let lines = metrics::read(&whole.join("metrics.jsonl")).unwrap().lines;
    let of_step = |step: u64| {
        let line = lines.iter().find_map(|line| match line {
            Line::Train(line) if line.step == step => Some(line),
            _ => None,
        });
        let line = line.unwrap();
        ["mlm_loss", "sbo_loss"].map(|name| line.losses.iter().find(|(found, _)| *found == name).unwrap().1)
    };
    let words = (plan.config.model.sizes().vocab_size as f64).ln();
    let (first, last) = (of_step(1), of_step(20));
    assert!(first.into_iter().all(|loss| (loss - words).abs() < 0.3), "{first:?} not {words}");
    assert!(last.into_iter().zip(first).all(|(last, first)| last < first - 0.1), "{first:?} {last:?}");
}

/// Sequences so short that in some parts nothing is masked.
#[test]
fn parts_without_a_masked_token_count_nothing() {
    for rule in ["mask_count=bernoulli", "mask_count=stochastic"] {
        let plan = plan(&[
            "objective=mlm",
            rule,
            "mask_probability=0.02",
            "sequence_length=8",
            "batch_size=4",
            "accumulation=4",
        ]);
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(run(&plan, directory.path(), 1, None).unwrap(), Outcome::Finished);
        let losses = losses(directory.path());
        assert!(
            losses.iter().any(|(_, loss)| *loss == 0.0) && losses.iter().any(|(_, loss)| *loss > 3.0),
            "{losses:?}"
        );
    }
}

/// Three updates of the same size, with and without: the difference is the decay.
#[test]
fn decay_of_all_parameters_reaches_norms() {
    let norm_after = |sets: &[&str]| {
        let plan = plan(&[&["objective=mlm", "steps=3", "weight_decay=0.5", "warmup_steps=0"], sets].concat());
        let directory = tempfile::tempdir().unwrap();
        run(&plan, directory.path(), 1, None).unwrap();
        let bytes = weights(directory.path());
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let norm = file.tensor("bert.embeddings.LayerNorm.weight").unwrap();
        let numbers: Vec<f32> =
            norm.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        numbers.iter().sum::<f32>() / numbers.len() as f32
    };
    let (plain, all) = (norm_after(&[]), norm_after(&["decay_all=true"]));
    // Rates of 1e-3, 2/3 and 1/3 of it.
    assert!((plain - all - 1e-3).abs() < 2e-4, "{plain} {all}");
}

/// A very small ELECTRA on the same text.
const ELECTRA: [&str; 4] =
    ["model=electra-small", "objective=replaced-tokens", "config.embedding_size=16", "generator.size=0.5"];

fn electra(more: &[&str]) -> Plan {
    plan(&[&ELECTRA[..], more].concat())
}

/// The keys of a file of weights.
fn keys(path: &Path) -> Vec<String> {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut keys: Vec<String> = file.names().into_iter().map(|name| name.to_string()).collect();
    keys.sort();
    keys
}

#[test]
fn a_generator_and_its_discriminator_give_the_same_bits_in_legs() {
    let plan = electra(&[]);
    let directory = tempfile::tempdir().unwrap();
    let (whole, legs) = (directory.path().join("whole"), directory.path().join("legs"));
    assert_eq!(run(&plan, &whole, 2, None).unwrap(), Outcome::Finished);
    for (threads, stop_at) in [(1, Some(4)), (2, Some(10)), (3, None)] {
        let expected = if stop_at.is_some() { Outcome::Paused } else { Outcome::Finished };
        assert_eq!(run(&plan, &legs, threads, stop_at).unwrap(), expected);
    }
    assert_eq!(run(&plan, &legs, 1, None).unwrap(), Outcome::WasFinished);
    assert_eq!(weights(&whole), weights(&legs));
    assert_eq!(weights(&whole.join("generator")), weights(&legs.join("generator")));
    assert_eq!(losses(&whole), losses(&legs));

    // Each directory has all of its own, and the tables in both.
    let [own, generator] = [whole.clone(), whole.join("generator")].map(|path| keys(&path.join("model.safetensors")));
    let tables: Vec<&String> =
        own.iter().filter(|key| generator.contains(key) && key.contains("embeddings.")).collect();
    assert_eq!(tables.len(), 5, "{tables:?}");
    assert!(own.iter().any(|key| key == "discriminator_predictions.dense_prediction.weight"));
    assert!(generator.iter().any(|key| key == "generator_lm_head.bias"));
    assert!(own.iter().chain(&generator).all(|key| !key.starts_with("generator.")));
    for file in ["config.json", "vocab.txt", "tokenizer_config.json"] {
        assert!(whole.join("generator").join(file).is_file(), "{file}");
    }

    // A generator that is damaged makes a checkpoint a damaged one.
    let damaged = directory.path().join("damaged");
    copy(&legs, &damaged);
    flip(&damaged.join("checkpoints/step-20/generator/model.safetensors"), |length| length - 9);
    let run = RunDirectory::open(&damaged).unwrap();
    let mut engine = plan.engine(&Device::cpu(None, Some(1)).unwrap()).unwrap();
    let mut warnings = Vec::new();
    let mut warn = |text: &str| warnings.push(text.to_owned());
    let state = run.resume(&mut engine.parameters, &mut engine.updater, &mut warn).unwrap();
    assert_eq!((state.step, warnings.len()), (14, 1), "{warnings:?}");
}

#[test]
fn a_generator_and_its_discriminator_begin_at_chance() {
    let directory = tempfile::tempdir().unwrap();
    let plan = electra(&["steps=1", "warmup_steps=1"]);
    run(&plan, directory.path(), 2, None).unwrap();
    let lines = metrics::read(&directory.path().join("metrics.jsonl")).unwrap().lines;
    let train = lines.iter().find_map(|line| if let Line::Train(line) = line { Some(line) } else { None }).unwrap();
    let part = |name: &str| train.losses.iter().find(|(own, _)| own == name).unwrap().1;
    let vocabulary = plan.config.model.sizes().vocab_size as f64;
    assert!((part("mlm_loss") / vocabulary.ln() - 1.0).abs() < 0.01, "{train:?}");
    assert!((part("rtd_loss") / 2f64.ln() - 1.0).abs() < 0.02, "{train:?}");
    // Parts are logged as they are, their sum as it is trained.
    assert!((train.loss - part("mlm_loss") - 50.0 * part("rtd_loss")).abs() < 1e-6, "{train:?}");
    let evals: Vec<_> =
        lines.iter().filter_map(|line| if let Line::Eval(line) = line { Some(line) } else { None }).collect();
    let first = &evals[0].metrics;
    // 15% are drawn, and nearly every draw of an untrained generator is wrong.
    assert!((0.12..0.16).contains(&first["replaced"]), "{first:?}");
    assert!((first["rtd_loss"] / 2f64.ln() - 1.0).abs() < 0.02 && first["mlm_accuracy"] < 0.2, "{first:?}");
}

/// Two denominators: predictions and tokens are counted over the whole step, also where some are drawn twice.
#[test]
fn parts_of_a_batch_of_two_models_add_up() {
    for more in [&["dropout=0.1"][..], &["generator.with_replacement=true"]] {
        let found = ["accumulation=1", "accumulation=4"].map(|accumulation| {
            let plan = electra(&[&[accumulation, "steps=4", "eval_every=0"][..], more].concat());
            let device = Device::cpu(None, Some(2)).unwrap();
            let mut engine = plan.engine(&device).unwrap();
            let mut task = plan.task(&serde_json::Value::Null, 1).unwrap();
            let mut losses = Vec::new();
            for step in 0..4 {
                engine.gradients.zero();
                losses.push(task.step(&mut engine, step).unwrap().wait().unwrap().total);
                let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, 1e-4).unwrap();
                losses.push(norm.wait().unwrap()[0]);
            }
            losses
        });
        for (large, parts) in found[0].iter().zip(&found[1]) {
            assert!((large / parts - 1.0).abs() < 1e-4, "{found:?}");
        }
    }
}

#[test]
fn both_models_of_a_directory_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    run(&electra(&["steps=3", "eval_every=0"]), &path("first"), 2, None).unwrap();
    let from = |name: &str| {
        let recipe = RECIPE.lines().filter(|line| !line.starts_with("config") && !line.starts_with("model"));
        let recipe: Vec<&str> = recipe.collect();
        let sets = [format!("model={}", path(name).display()), "objective=replaced-tokens".to_owned()];
        let recipe = Recipe::parse(&recipe.join("\n"), "test", &sets).unwrap();
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        Plan::on(corpus, held_out, tokenizer, recipe, 2)
    };
    let device = Device::cpu(None, Some(2)).unwrap();
    let (before, after) = (electra(&[]).engine(&device).unwrap(), from("first").unwrap().engine(&device).unwrap());
    assert_eq!(before.parameters.entries().len(), after.parameters.entries().len());
    let saved = [path("first"), path("first/generator")].map(|path| fs::read(path.join("model.safetensors")).unwrap());
    for (i, entry) in after.parameters.entries().iter().enumerate() {
        let (file, name) = match entry.name.strip_prefix("generator.") {
            Some(name) => (&saved[1], name),
            None => (&saved[0], entry.name.as_str()),
        };
        let file = safetensors::SafeTensors::deserialize(file).unwrap();
        let expected = file.tensor(name).unwrap();
        let expected = expected.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert!(after.parameters.read(i).unwrap().into_iter().eq(expected), "{}", entry.name);
    }
    // Tables that are not the same, and a generator that is not there.
    copy(&path("first"), &path("other"));
    let bytes = fs::read(path("other/generator/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let table = file.tensor("electra.embeddings.word_embeddings.weight").unwrap().data().as_ptr() as usize;
    let place = table - bytes.as_ptr() as usize;
    assert!(place >= header);
    flip(&path("other/generator/model.safetensors"), |_| place);
    let error = from("other").unwrap().engine(&device).err().unwrap().to_string();
    assert!(error.contains("word_embeddings") && error.contains("share their tables"), "{error}");
    fs::remove_dir_all(path("other/generator")).unwrap();
    let error = from("other").err().unwrap().to_string();
    assert!(error.contains("generator"), "{error}");
}

#[test]
fn the_last_checkpoints_and_the_best_are_kept() {
    let plan = plan(&["checkpoint_every=2", "keep_checkpoints=3", "steps=12", "learning_rate=0.0"]);
    let directory = tempfile::tempdir().unwrap();
    run(&plan, directory.path(), 2, None).unwrap();
    // Nothing is learned, so all evaluations are equal, and the last of them is the best.
    let run = RunDirectory::open(directory.path()).unwrap();
    assert_eq!(run.steps().unwrap(), [8, 10, 12]);
    let best = run.latest().unwrap().unwrap().best.unwrap();
    assert_eq!((best.step, best.held), (12, 10));
    run.prune(1, Some(Best { step: 8, ..best })).unwrap();
    assert_eq!(run.steps().unwrap(), [8, 12]);
}

#[test]
fn a_second_process_is_refused_and_so_are_other_directories() {
    let directory = tempfile::tempdir().unwrap();
    let _first = RunDirectory::open(directory.path()).unwrap();
    assert!(RunDirectory::open(directory.path()).unwrap_err().to_string().contains("another henson process"));
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("thesis.tex"), "years of work").unwrap();
    assert!(RunDirectory::open(other.path()).unwrap_err().to_string().contains("holds no run"));
}

/// What is there when a run is killed before its first rename.
#[test]
fn a_run_that_was_killed_in_its_first_moment_can_be_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("run.lock"), "").unwrap();
    fs::write(path(".recipe.toml.henson-tmp-4711-0"), "steps").unwrap();
    fs::create_dir(path(".henson-tmp-4711-1")).unwrap();
    // One that somebody is still writing stays.
    let locked = fs::File::create(path(".other.henson-tmp-4712-0")).unwrap();
    locked.lock().unwrap();
    let run = RunDirectory::open(directory.path()).unwrap();
    let mut left: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".other.henson-tmp-4712-0", "run.lock"]);
    drop((run, locked));
    fs::write(path("thesis.tex"), "years of work").unwrap();
    assert!(RunDirectory::open(directory.path()).unwrap_err().to_string().contains("holds no run"));
}

#[test]
fn a_damaged_line_of_the_log_does_not_end_the_training() {
    let plan = plan(&[]);
    let directory = tempfile::tempdir().unwrap();
    run(&plan, directory.path(), 2, Some(10)).unwrap();
    let path = directory.path().join("metrics.jsonl");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
    bytes[end / 2] = 0;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(run(&plan, directory.path(), 2, None).unwrap(), Outcome::Finished);
    assert_eq!(losses(directory.path()).len(), 20);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
        match path.is_dir() {
            true => copy(&path, &to.join(name)),
            false => _ = fs::copy(&path, to.join(name)).unwrap(),
        }
    }
}

fn flip(path: &Path, place: impl Fn(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let place = place(bytes.len());
    bytes[place] ^= 4;
    fs::write(path, bytes).unwrap();
}

/// A finished model whose bytes changed is reported, and written again from the checkpoint.
#[test]
fn a_damaged_model_of_a_finished_run_is_noticed() {
    let plan = plan(&["steps=2"]);
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("run");
    run(&plan, &out, 1, None).unwrap();
    let whole = weights(&out);
    flip(&out.join("model.safetensors"), |length| length - 9);
    let (stop, mut warnings) = (AtomicBool::new(false), Vec::new());
    let device = Device::cpu(Some(Isa::best()), Some(1)).unwrap();
    for (outcome, count) in [(Outcome::Finished, 1), (Outcome::WasFinished, 1)] {
        let mut on = |event: Event<'_>| {
            if let Event::Warning { text } = event {
                warnings.push(text.to_owned());
            }
        };
        let mut watch = Watch { on: &mut on, stop: &stop };
        assert_eq!(pretrain(&plan, &device, &out, 1, None, &mut watch).unwrap().0, outcome);
        assert!(warnings.len() == count && warnings[0].contains("is written again"), "{warnings:?}");
        assert_eq!(weights(&out), whole);
    }
}

/// One bit of any file of the newest checkpoint: the one before is taken, which is reported, and the end is the same.
#[test]
fn a_damaged_checkpoint_is_noticed_and_the_one_before_is_used() {
    let plan = plan(&["eval_every=0", "steps=16"]);
    let directory = tempfile::tempdir().unwrap();
    let (whole, stopped) = (directory.path().join("whole"), directory.path().join("stopped"));
    run(&plan, &whole, 2, None).unwrap();
    run(&plan, &stopped, 2, Some(14)).unwrap();
    let newest = |run: &Path| run.join("checkpoints/step-14");
    let mut names: Vec<_> = fs::read_dir(newest(&stopped)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let expected = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"];
    assert!(expected.iter().all(|name| names.iter().any(|found| found == *name)), "{names:?}");

    let device = Device::cpu(None, Some(1)).unwrap();
    let mut engine = plan.engine(&device).unwrap();
    for name in &names {
        for part in 0..6 {
            let damaged = directory.path().join("damaged");
            copy(&stopped, &damaged);
            flip(&newest(&damaged).join(name), |length| (length - 1) * part / 5);
            let run = RunDirectory::open(&damaged).unwrap();
            let mut warnings = Vec::new();
            let mut warn = |text: &str| warnings.push(text.to_owned());
            let state = run.resume(&mut engine.parameters, &mut engine.updater, &mut warn).unwrap();
            assert_eq!((state.step, run.steps().unwrap()), (7, vec![7]), "{name:?}");
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.contains("the checkpoint of step 14 is damaged, and the one of step 7 is used instead"));
            assert!(warning.contains(name.to_str().unwrap()) && damaged.join("checkpoints/damaged-step-14").is_dir());
            drop(run);
            if part == 3 {
                assert_eq!(finish(&plan, &damaged), Outcome::Finished);
                assert!(weights(&damaged) == weights(&whole), "{name:?}");
            }
            fs::remove_dir_all(&damaged).unwrap();
        }
    }
}

fn finish(plan: &Plan, directory: &Path) -> Outcome {
    run(plan, directory, 2, None).unwrap()
}

#[test]
fn checkpoints_that_are_cut_gone_or_all_damaged() {
    let plan = plan(&["eval_every=0", "steps=16"]);
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join("checkpoints").join(name);
    run(&plan, directory.path(), 2, Some(14)).unwrap();
    let opened = RunDirectory::open(directory.path()).unwrap();
    let mut engine = plan.engine(&Device::cpu(None, Some(1)).unwrap()).unwrap();
    let mut resume = || opened.resume(&mut engine.parameters, &mut engine.updater, &mut |_| {}).map(|state| state.step);

    // As version 0.1 wrote it, without checksums; and of a later version, which is none of damage.
    let state = fs::read(path("step-14/state.json")).unwrap();
    let mut old: serde_json::Value = serde_json::from_slice(&state).unwrap();
    for key in ["files", "sum"] {
        assert!(old.as_object_mut().unwrap().remove(key).is_some());
    }
    fs::write(path("step-14/state.json"), old.to_string()).unwrap();
    assert_eq!(resume().unwrap(), 14);
    old["version"] = 2.into();
    fs::write(path("step-14/state.json"), old.to_string()).unwrap();
    assert!(resume().unwrap_err().to_string().contains("this henson reads 1"));

    // A damaged name of either key does not make it one of version 0.1.
    let text = String::from_utf8(state.clone()).unwrap();
    for key in ["files", "sum"] {
        fs::write(path("step-14/state.json"), text.replace(&format!("\"{key}\""), "\"gone\"")).unwrap();
        let error = opened.verify(14).unwrap_err().to_string();
        assert!(error.contains("its own checksum"), "{key}: {error}");
    }
    fs::write(path("step-14/state.json"), &state).unwrap();

    // Cut weights, and then a missing file in the other one: nothing is left, and nothing is moved.
    let whole = fs::read(path("step-14/model.safetensors")).unwrap();
    fs::write(path("step-14/model.safetensors"), &whole[..whole.len() / 2]).unwrap();
    fs::rename(path("step-7/optimizer.safetensors"), path("aside")).unwrap();
    let error = resume().unwrap_err().to_string();
    for part in ["no checkpoint can be used", "train from scratch", "step 14: ", "step 7: ", "optimizer.safetensors"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(opened.steps().unwrap(), [7, 14]);
    fs::rename(path("aside"), path("step-7/optimizer.safetensors")).unwrap();
    assert_eq!(resume().unwrap(), 7);
    // Not even a state.
    fs::write(path("step-7/state.json"), "{").unwrap();
    assert!(opened.latest().unwrap_err().to_string().contains("no checkpoint can be used"));
}

/// Training ends with an error that names the shard; the checkpoints that were due are there.
#[test]
fn a_shard_that_is_truncated_while_a_run_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let tokenizer = tokenizer(300, &[]);
    let words: Vec<String> = text().split_whitespace().take(4000).map(str::to_owned).collect();
    let mut lines = String::new();
    for document in 0..150 {
        for line in words.chunks(12) {
            lines.push_str(&format!("{document} {}\n", line.join(" ")));
        }
        lines.push('\n');
    }
    fs::write(at("text.txt"), lines).unwrap();
    let sources = vec![SourceFiles { name: "text".to_owned(), weight: 1.0, paths: vec![at("text.txt")] }];
    let options = BuildOptions { sources, ..BuildOptions::default() };
    build(&tokenizer, &at("data"), &options, &mut |_| true).unwrap();
    let shard = at("data/train-00000.shard");

    let corpus = |split| Corpus::open(&at("data"), split).unwrap();
    let recipe = Recipe::parse(RECIPE, "test", &["checkpoint_every=2".to_owned()]).unwrap();
    let plan = Plan::on(corpus(Split::Train), corpus(Split::HeldOut), tokenizer, recipe, 1).unwrap();
    let device = Device::cpu(None, Some(2)).unwrap();
    let mut made = 0;
    let mut on = |event: Event<'_>| match event {
        Event::Saved { step: 2, .. } => {
            fs::File::options().write(true).open(&shard).unwrap().set_len(100).unwrap();
        }
        Event::Step { step, .. } => made = step,
        _ => {}
    };
    let stop = AtomicBool::new(false);
    let mut watch = Watch { on: &mut on, stop: &stop };
    let message = pretrain(&plan, &device, &at("run"), 1, None, &mut watch).unwrap_err().to_string();
    assert!(message.contains("train-00000.shard was changed or truncated while it was being read"), "{message}");
    let run = RunDirectory::open(&at("run")).unwrap();
    let mut engine = plan.engine(&device).unwrap();
    let last = run.resume(&mut engine.parameters, &mut engine.updater, &mut |_| {}).unwrap().step;
    assert!(last == made / 2 * 2 && last >= 2, "{last} of {made}");
}

/// Held-out sentences that are drawn have up to 20 tokens; a model may have room for fewer.
#[test]
fn drawn_samples_fit_a_model_of_few_positions() {
    for positions in [16, 9, 5] {
        let sets = ["steps=1".to_owned(), "sequence_length=5".to_owned()];
        let text = RECIPE.replace("max_position_embeddings = 64", &format!("max_position_embeddings = {positions}"));
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        let recipe = Recipe::parse(&text, "test", &sets).unwrap();
        let plan = Plan::on(corpus, held_out, tokenizer, recipe, 2).unwrap();
        let directory = tempfile::tempdir().unwrap();
        run(&plan, directory.path(), 2, None).unwrap();
    }
}

#[test]
fn accumulated_parts_add_up_to_the_batch() {
    let directory = tempfile::tempdir().unwrap();
    let losses: Vec<Vec<(u64, f64)>> = [1, 4]
        .into_iter()
        .map(|accumulation| {
            let plan = plan(&["batch_size=32", "steps=6", &format!("accumulation={accumulation}")]);
            let out = directory.path().join(accumulation.to_string());
            run(&plan, &out, 2, None).unwrap();
            losses(&out)
        })
        .collect();
    for ((step, whole), (_, parts)) in losses[0].iter().zip(&losses[1]) {
        assert!((whole - parts).abs() < 2e-5 * whole, "step {step}: {whole} and {parts}");
    }
}

#[test]
fn training_learns_and_phases_follow_each_other() {
    let text = "phase = [{ steps = 30 }, { steps = 10, sequence_length = 64, batch_size = 4, learning_rate = 5e-4 }]";
    let sets = vec![text.to_owned()];
    let base = RECIPE.replace("steps = 20", "");
    let recipe = Recipe::parse(&base, "test", &sets).unwrap();
    let tokenizer = tokenizer(300, &[]);
    let (corpus, held_out) = corpora(&tokenizer);
    let plan = Plan::on(corpus, held_out, tokenizer, recipe, 2).unwrap();
    let directory = tempfile::tempdir().unwrap();
    // Stopped in the second phase once: its place is found again.
    run(&plan, directory.path(), 2, Some(33)).unwrap();
    run(&plan, directory.path(), 2, None).unwrap();
    let lines = metrics::read(&directory.path().join("metrics.jsonl")).unwrap().lines;
    let trained: Vec<_> = lines.iter().filter_map(|l| if let Line::Train(l) = l { Some(l) } else { None }).collect();
    assert_eq!(trained.len(), 40);
    assert!(trained.iter().all(|line| line.phase == u32::from(line.step > 30)));
    // The second phase has a warm-up of its own, from 0.
    assert_eq!(trained[30].learning_rate, 0.0);
    let evals: Vec<f64> =
        lines.iter().filter_map(|l| if let Line::Eval(l) = l { Some(l.metrics["loss"]) } else { None }).collect();
    assert!(evals[evals.len() - 1] < evals[0] - 0.5, "{evals:?}");
}

#[test]
fn interrupted_from_outside_a_checkpoint_is_written() {
    let plan = plan(&[]);
    let directory = tempfile::tempdir().unwrap();
    let device = Device::cpu(None, Some(2)).unwrap();
    let stop = AtomicBool::new(false);
    let mut on = |event: Event<'_>| {
        if let Event::Step { step: 3, .. } = event {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let mut watch = Watch { on: &mut on, stop: &stop };
    let ended = pretrain(&plan, &device, directory.path(), 1, None, &mut watch).unwrap();
    let steps = RunDirectory::open(directory.path()).unwrap().steps().unwrap();
    assert_eq!((ended, steps), ((Outcome::Interrupted, 3), vec![3]));
}

/// A task whose loss, and whose score and loss on held-out data, are what the test says.
struct Scripted {
    task: henson_train::PreTraining,
    loss: fn(u64) -> f64,
    found: fn(u64) -> (f64, Option<f64>),
}

impl Task for Scripted {
    fn step(&mut self, engine: &mut Engine, step: u64) -> Result<Underway> {
        let underway = self.task.step(engine, step)?;
        let device = engine.parameters.device();
        let loss = Tensor::from_slice(device, [1], &[(self.loss)(step) as f32])?;
        Ok(Underway { parts: vec![device.read_later(&[&loss])?], losses: &[], ..underway })
    }
    fn evaluate(&mut self, engine: &mut Engine, step: u64) -> Result<Option<Evaluation>> {
        let evaluation = self.task.evaluate(engine, step)?;
        let (score, loss) = (self.found)(step);
        Ok(evaluation.map(|evaluation| Evaluation { score, loss, ..evaluation }))
    }
    fn samples(&mut self, engine: &mut Engine) -> Result<Vec<metrics::Sample>> {
        self.task.samples(engine)
    }
    fn rate(&self, step: u64) -> (f64, u32) {
        self.task.rate(step)
    }
    fn place(&self) -> Result<serde_json::Value> {
        self.task.place()
    }
}

#[test]
fn a_loss_that_explodes_or_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint() {
    type Case = (fn(u64) -> f64, &'static str);
    let cases: [Case; 2] = [
        (|step| if step == 17 { f64::NAN } else { 5.0 }, "step 18: the loss is not finite; the checkpoint of step 14"),
        (|step| if step > 22 { 1e4 } else { 5.0 }, "the loss has risen to"),
    ];
    for (loss, expected) in cases {
        let plan = plan(&["steps=40"]);
        let directory = tempfile::tempdir().unwrap();
        let device = Device::cpu(None, Some(2)).unwrap();
        let mut run = TrainingRun::open(directory.path(), &plan.recipe, plan.loop_settings(None)).unwrap();
        let mut engine = plan.engine(&device).unwrap();
        let task = plan.task(&run.state().place, 1).unwrap();
        let mut task = Scripted { task, loss, found: |_| (0.0, None) };
        let stop = AtomicBool::new(false);
        let mut watch = Watch { on: &mut |_| {}, stop: &stop };
        let files = plan.model_files().unwrap();
        let error = run.train(&mut engine, &mut task, &files, &mut watch).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().contains("learning_rate"), "{error}");
        let run = run.directory().unwrap();
        let last = run.latest().unwrap().unwrap();
        assert!(last.step >= 14 && run.load(last.step, &mut engine.parameters, &mut engine.updater).is_ok());
    }
}

/// Patience, what is better and what stays are settings: whether or not a run is stopped at each of its evaluations.
#[test]
fn a_run_ends_where_nothing_gets_better_and_with_the_model_that_was_asked_for() {
    type Score = fn(u64) -> (f64, Option<f64>);
    type Case = (Score, bool, u64, Keep, [u64; 2]);
    let rising: Score = |step| ([1.0, 2.0, 5.0, 4.0, 5.0, 3.0, 2.0, 1.0][step as usize / 2], None);
    // A score that stays as it is while the loss falls and rises, and one that is reached again with a higher loss.
    let constant: Score = |step| (0.0, Some([9.0, 8.0, 7.0, 6.0, 6.0, 7.0, 8.0, 9.0][step as usize / 2]));
    let again: Score = |step| ([1.0, 2.0, 5.0, 4.0, 5.0, 3.0, 2.0, 1.0][step as usize / 2], Some(step as f64));
    // The step that it ends with, and that of its model. An equal score is no better, but its model has learnt longer.
    let cases: [Case; 9] = [
        (rising, true, 0, Keep::Best, [14, 8]),
        (rising, true, 2, Keep::Best, [8, 8]),
        (rising, true, 3, Keep::Best, [10, 8]),
        (rising, true, 2, Keep::Last, [8, 8]),
        (rising, false, 3, Keep::Best, [8, 2]),
        (|_| (f64::NAN, None), true, 2, Keep::Best, [4, 4]),
        (constant, true, 0, Keep::Best, [14, 6]),
        (constant, true, 2, Keep::Best, [10, 6]),
        (again, true, 2, Keep::Best, [8, 4]),
    ];
    let plan = plan(&["checkpoint_every=2", "eval_every=2", "steps=14"]);
    let device = Device::cpu(None, Some(2)).unwrap();
    for (found, higher_is_better, patience, keep, [last, best]) in cases {
        let mut models = Vec::new();
        for stops in [vec![None], (2..=14).step_by(2).map(Some).chain([None]).collect()] {
            let directory = tempfile::tempdir().unwrap();
            let model = plan.model_files().unwrap();
            for stop_at in stops {
                let settings = LoopSettings { higher_is_better, patience, keep, ..plan.loop_settings(stop_at) };
                let mut run = TrainingRun::open(directory.path(), &plan.recipe, settings).unwrap();
                let stop = AtomicBool::new(false);
                let mut watch = Watch { on: &mut |_| {}, stop: &stop };
                run.find(&plan.data_name(), &device, &mut watch).unwrap();
                run.write_recipe(&plan.recipe).unwrap();
                let mut engine = plan.engine(&device).unwrap();
                run.resume(&mut engine, &mut watch).unwrap();
                let task = plan.task(&run.state().place, 1).unwrap();
                let mut task = Scripted { task, loss: |_| 1.0, found };
                if run.train(&mut engine, &mut task, &model, &mut watch).unwrap() == Outcome::Finished {
                    assert_eq!([run.state().step, run.best_step()], [last, best], "{patience} {stop_at:?}");
                    assert_eq!(engine.updater.steps(), if keep == Keep::Best { best } else { last });
                    run.finish(&model, &engine.parameters, &[("README.md", b"a card".to_vec())]).unwrap();
                    assert_eq!(directory.path().join("checkpoints").exists(), keep == Keep::Last);
                    assert!(directory.path().join("README.md").is_file());
                    models.push(weights(directory.path()));
                    break;
                }
            }
        }
        assert!(models.len() == 2 && models[0] == models[1]);
    }
}

#[test]
fn continued_pre_training_keeps_weights_and_gives_new_pieces_the_mean_of_their_old_ones() {
    let directory = tempfile::tempdir().unwrap();
    let first = directory.path().join("first");
    run(&plan(&["steps=3"]), &first, 2, None).unwrap();
    let old = plan(&[&format!("model={:?}", first.display().to_string()), "config={}"]);
    let device = Device::cpu(None, Some(2)).unwrap();
    let before = old.engine(&device).unwrap().parameters;

    let word = "zzyzx";
    let grown = tokenizer(300, &[word]);
    let recipe = old.recipe.clone();
    let (corpus, held_out) = corpora(&grown);
    let new = Plan::on(corpus, held_out, grown, recipe, 2).unwrap();
    assert_eq!(new.config.model.sizes().vocab_size, old.config.model.sizes().vocab_size + 1);
    let after = new.engine(&device).unwrap().parameters;
    let old_ids = old.tokenizer.encode_ids(word).unwrap();
    assert!(old_ids.len() > 1);
    for (i, entry) in before.entries().iter().enumerate() {
        let (was, is) = (before.read(i).unwrap(), after.read(i).unwrap());
        assert_eq!(was, is[..was.len()], "{}", entry.name);
        if is.len() > was.len() {
            let columns = is.len() - was.len();
            for (c, x) in is[was.len()..].iter().enumerate() {
                let mean = old_ids.iter().map(|id| was[*id as usize * columns + c]).sum::<f32>() / old_ids.len() as f32;
                assert!((x - mean).abs() < 1e-6, "{}: {x} and {mean}", entry.name);
            }
        }
    }
    // Another vocabulary altogether is refused.
    let other = tokenizer(200, &["zzyzx"]);
    let (corpus, held_out) = corpora(&other);
    let plan = Plan::on(corpus, held_out, other, old.recipe.clone(), 2).unwrap();
    let error = plan.engine(&device).err().unwrap().to_string();
    assert!(error.contains("another vocabulary"), "{error}");
}

#[test]
fn a_left_to_right_model_trains_and_says_what_it_is() {
    let plan = plan(&["objective=causal", "steps=4"]);
    let directory = tempfile::tempdir().unwrap();
    run(&plan, directory.path(), 2, None).unwrap();
    let config = fs::read_to_string(directory.path().join("config.json")).unwrap();
    assert!(config.contains("BertLMHeadModel") && config.contains("\"is_decoder\": true"), "{config}");
}

#[test]
fn recomputing_changes_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    let runs = ["false", "true"].map(|on| {
        let path = directory.path().join(on);
        run(&plan(&[&format!("recompute={on}"), "steps=6"]), &path, 2, None).unwrap();
        (losses(&path), weights(&path))
    });
    assert!(runs[0] == runs[1]);
    // It may be switched on in the middle of a run.
    let path = directory.path().join("legs");
    run(&plan(&["steps=6"]), &path, 2, Some(3)).unwrap();
    run(&plan(&["recompute=true", "steps=6"]), &path, 2, None).unwrap();
    assert!(weights(&path) == runs[0].1);
}

/// The GPU; where there is none, the error must say what is missing and what to do.
fn gpu() -> Option<Device> {
    match Device::cuda(&CudaOptions::default()) {
        Ok(device) => Some(device),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("not found") || text.contains("no GPU"), "{text}");
            assert!(text.contains("install") || text.contains("nvidia-smi"), "{text}");
            None
        }
    }
}

/// Held-out losses in the order of the log.
fn held_out(directory: &Path) -> Vec<f64> {
    let lines = metrics::read(&directory.join("metrics.jsonl")).unwrap().lines;
    let eval = lines.into_iter().filter_map(|line| if let Line::Eval(line) = line { Some(line) } else { None });
    eval.map(|line| line.metrics["loss"]).collect()
}

#[test]
#[allow(clippy::print_stdout, reason = "how near they are is worth knowing")]
fn cpu_and_gpu_follow_each_other() {
    if gpu().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // The masks of dropout are the same on both; f32, then bf16 with heads of 64, which have kernels of their own.
    for (name, sets, tolerance) in [
        ("f32", &["steps=100", "dropout=0.1"][..], 1e-3),
        ("accumulated", &["steps=40", "accumulation=2"], 1e-3),
        ("bf16", &["steps=100", "dtype=bf16", "config.hidden_size=128"], 2e-2),
        ("recomputed", &["steps=10", "recompute=true"], 1e-3),
    ] {
        let plan = plan(sets);
        let (cpu, cuda) = (directory.path().join(format!("{name}-cpu")), directory.path().join(format!("{name}-cuda")));
        run(&plan, &cpu, 2, None).unwrap();
        run_on(&gpu().unwrap(), &plan, &cuda, None).unwrap();
        let worst = losses(&cpu).iter().zip(losses(&cuda)).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f64::max);
        let evals = held_out(&cpu).iter().zip(held_out(&cuda)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{name}: losses differ by {worst:.1e} at the most, held-out losses by {evals:.1e}");
        assert!(losses(&cpu).len() as u64 == plan.steps() && losses(&cuda).len() as u64 == plan.steps());
        assert!(worst <= tolerance && evals <= tolerance, "{name}: {worst} and {evals}");
    }
}

/// Adafactor, whose state is kept by rows and columns, of smaller tensors as a whole.
#[test]
fn cpu_and_gpu_follow_each_other_with_adafactor() {
    if gpu().is_none() {
        return;
    }
    for (dtype, tolerance) in [("dtype=f32", 1e-3), ("dtype=bf16", 2e-2)] {
        let plan = plan(&["steps=8", "optimizer=adafactor", "adafactor.min_side=16", dtype]);
        follow(dtype, &plan, tolerance);
    }
}

/// Runs a plan on both, and on the GPU also with a stop: losses are near, and the same bits in legs.
fn follow(name: &str, plan: &Plan, tolerance: f64) {
    let directory = tempfile::tempdir().unwrap();
    let [cpu, cuda, legs] = ["cpu", "cuda", "legs"].map(|name| directory.path().join(name));
    run(plan, &cpu, 2, None).unwrap();
    run_on(&gpu().unwrap(), plan, &cuda, None).unwrap();
    for stop_at in [Some(2), None] {
        run_on(&gpu().unwrap(), plan, &legs, stop_at).unwrap();
    }
    let worst = losses(&cpu).iter().zip(losses(&cuda)).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f64::max);
    assert!(losses(&cuda).len() as u64 == plan.steps() && worst <= tolerance, "{name}: {worst}");
    assert!(losses(&cuda) == losses(&legs) && weights(&cuda) == weights(&legs), "{name}: legs differ");
}

/// XLNet in the order of a permutation, alone and behind what it remembers: a GPU follows the CPU, and goes on with the same bits.
#[test]
fn cpu_and_gpu_follow_each_other_in_permutations() {
    if gpu().is_none() {
        return;
    }
    let stream = ["packing=stream", "config.mem_len=20", "sequence_length=24", "batch_size=4"];
    for (name, sets, tolerance) in [
        ("f32", &["steps=6"][..], 1e-3),
        ("bf16", &["steps=6", "dtype=bf16"], 2e-2),
        ("stream", &[&stream[..], &["steps=6"]].concat(), 1e-3),
        ("stream in bf16", &[&stream[..], &["steps=6", "dtype=bf16"]].concat(), 2e-2),
    ] {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let recipe = Recipe::parse(PERMUTATION, "test", &sets).unwrap();
        let tokenizer = tokenizer(300, &[]);
        let (corpus, held_out) = corpora(&tokenizer);
        let plan = Plan::on(corpus, held_out, tokenizer, recipe, 2).unwrap();
        follow(name, &plan, tolerance);
    }
}

#[test]
fn a_gpu_gives_the_same_bits_twice_and_in_legs() {
    if gpu().is_none() {
        return;
    }
    for sets in [&["steps=40"][..], &["steps=40", "dtype=bf16", "config.hidden_size=128", "accumulation=2"]] {
        let plan = plan(sets);
        let directory = tempfile::tempdir().unwrap();
        let [first, second, legs] = ["first", "second", "legs"].map(|name| directory.path().join(name));
        run_on(&gpu().unwrap(), &plan, &first, None).unwrap();
        run_on(&gpu().unwrap(), &plan, &second, None).unwrap();
        for stop_at in [Some(1), Some(11), None] {
            run_on(&gpu().unwrap(), &plan, &legs, stop_at).unwrap();
        }
        assert!(losses(&first) == losses(&second), "{sets:?}: two runs differ");
        assert!(weights(&first) == weights(&second), "{sets:?}: two runs differ");
        assert!(losses(&first) == losses(&legs) && weights(&first) == weights(&legs), "{sets:?}: legs differ");
    }
}
