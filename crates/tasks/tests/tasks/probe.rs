//! Probes: what files become, the same bits for any number of threads and for vectors that are read again, runs that resume, and heads
//! against arcs.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use henson_infer::{Input, Model, Want};
use henson_tasks::{
    Direction, EdgeSet, Files, HeadSettings, ProbeEnded, ProbePlan, ProbeRecipe, ProbeResults, ProbeTask, TaskError,
    compare_heads, probe, read_edges,
};
use henson_tensor::{DType, Device};
use henson_train::{Event, Watch, parse_settings};
use tempfile::TempDir;

use crate::features::{data, encoder};
use crate::support::Place;

const TREE: &str = "# newdoc\n# text = jim sat\n1\tjim\tjim\tPROPN\tNNP\t_\t2\tnsubj\t_\t_\n2\tsat\tsit\tVERB\tVBD\t_\t0\troot\t_\t_\n\n\
1-2\tcats\t_\t_\t_\t_\t_\t_\t_\t_\n1\tthe\tthe\tDET\tDT\t_\t3\tdet\t_\t_\n2\told\told\tADJ\tJJ\t_\t3\tamod\t_\t_\n\
3\tcat\tcat\tNOUN\tNN\t_\t4\tnsubj\t_\t_\n3.1\tx\t_\t_\t_\t_\t_\t_\t_\t_\n4\twalked\twalk\tVERB\tVBD\t_\t0\troot\t_\t_\n\
5\tby\tby\tADP\tIN\t_\t7\tcase\t_\t_\n6\tthe\tthe\tDET\tDT\t_\t7\tdet\t_\t_\n7\tdog\tdog\tNOUN\tNN\t_\t4\tobl\t_\t_\n";

/// `words | span1 span2 labels; …` for each text.
fn shown(set: &EdgeSet) -> Vec<String> {
    let target = |target: &henson_tasks::EdgeTarget| {
        let second = target.second.as_ref().map_or(String::new(), |span| format!(" {span:?}"));
        let labels: Vec<&str> = target.labels.iter().map(|label| set.labels[*label as usize].as_str()).collect();
        format!("{:?}{second} {}", target.first, labels.join("+"))
    };
    let text = |example: &henson_tasks::EdgeExample| {
        format!("{} | {}", example.words.join(" "), example.targets.iter().map(target).collect::<Vec<_>>().join("; "))
    };
    set.examples.iter().map(text).collect()
}

#[test]
fn files_become_targets() {
    let place = Place::new();
    let read = |task, path: &Path| read_edges(task, path, &Files::default()).unwrap();
    let edges = place.file(
        "srl.json",
        "{\"text\": \"Ian ate  ice cream\", \"targets\": [{\"span1\": [1, 2], \"span2\": [0, 1], \"label\": \"A0\"}, \
         {\"span1\": [1, 2], \"span2\": [2, 4], \"label\": [\"b\", \"A1\", \"b\"]}], \"info\": {}}\n\
         {\"text\": \"nothing here\", \"targets\": []}\n\
         {\"text\": \"a b\", \"targets\": [{\"span1\": [0, 1], \"span2\": [1, 2], \"label\": []}]}\n",
    );
    let set = read(ProbeTask::Edges, &edges);
    assert_eq!(shown(&set), ["Ian ate ice cream | 1..2 0..1 A0; 1..2 2..4 A1+b", "a b | 0..1 1..2 "]);
    assert_eq!((set.labels.join(" "), set.pairs, set.targets()), ("A0 A1 b".to_owned(), true, 3));
    let tree = place.file("tree.conllu", TREE);
    let set = read(ProbeTask::Dependencies, &tree);
    assert_eq!(
        shown(&set),
        [
            "jim sat | 0..1 1..2 nsubj; 1..2 1..2 root",
            "the old cat walked by the dog | 0..1 2..3 det; 1..2 2..3 amod; 2..3 3..4 nsubj; 3..4 3..4 root; 4..5 6..7 \
             case; 5..6 6..7 det; 6..7 3..4 obl"
        ]
    );
    assert_eq!(shown(&read(ProbeTask::Pos, &tree))[0], "jim sat | 0..1 PROPN; 1..2 VERB");
    let chunks = place.file("chunks.txt", "He PRP B-NP\nreckons VBZ B-VP\nthe DT B-NP\nday NN I-NP\n. . O\n");
    assert_eq!(shown(&read(ProbeTask::Chunks, &chunks)), ["He reckons the day . | 0..1 NP; 1..2 VP; 2..4 NP"]);
    let second = Files { label_column: vec![henson_data::tables::Column::Number(1)], ..Files::default() };
    let tags = read_edges(ProbeTask::Pos, &chunks, &second).unwrap();
    assert_eq!(shown(&tags), ["He reckons the day . | 0..1 PRP; 1..2 VBZ; 2..3 DT; 3..4 NN; 4..5 ."]);
}

#[test]
fn mistakes_are_named() {
    let place = Place::new();
    let fails = |task, name: &str, content: &str, parts: &[&str]| {
        let error = read_edges(task, &place.file(name, content), &Files::default()).unwrap_err().to_string();
        parts.iter().for_each(|part| assert!(error.contains(part), "expected `{part}` in: {error}"));
    };
    let line = |target: &str| format!("\n{{\"text\": \"a b\", \"targets\": [{target}]}}\n");
    let edges = |target: &str, parts: &[&str]| {
        fails(ProbeTask::Edges, "x.jsonl", &line(target), &[&["x.jsonl", "line 2"], parts].concat());
    };
    edges("{\"span1\": [0, 3], \"label\": \"x\"}", &["span1 of target 0 is [0, 3]", "2 words"]);
    edges("{\"span1\": [1, 1], \"label\": \"x\"}", &["a start before its end"]);
    edges("{\"span1\": [0, 1]}", &["`label` is missing"]);
    edges("{\"label\": \"x\"}", &["span1 is null", "[start, end]"]);
    edges("{\"span1\": [0, 1], \"span2\": [-1, 1], \"label\": \"x\"}", &["span2 is [-1,1]"]);
    edges(
        "{\"span1\": [0, 1], \"label\": \"x\"}, {\"span1\": [0, 1], \"span2\": [0, 1], \"label\": \"x\"}",
        &["target 1", "span2"],
    );
    fails(ProbeTask::Edges, "x.jsonl", "{\"text\": 1, \"targets\": []}\n", &["line 1", "`text`"]);
    fails(ProbeTask::Edges, "x.jsonl", "{\"text\": \"a\", \"targets\": []}\n", &["no text has a target", "edges"]);
    let tree = |from: &str, to: &str, parts: &[&str]| {
        fails(ProbeTask::Dependencies, "x.conllu", &TREE.replacen(from, to, 1), parts);
    };
    tree("\t2\tnsubj", "\t9\tnsubj", &["line 3", "HEAD is 9", "2 words"]);
    tree("\t2\tnsubj", "\t_\tnsubj", &["line 3", "HEAD is \"_\""]);
    tree("\tnsubj", "\t_", &["line 3", "DEPREL"]);
    tree("2\tsat", "3\tsat", &["line 4", "ID is \"3\": expected 2"]);
    tree("\tnsubj\t_\t_", "", &["line 3", "7 columns"]);
    // Bad texts may be left out.
    let bad = place.file(
        "bad.jsonl",
        line("{\"span1\": [0, 3], \"label\": \"x\"}") + &line("{\"span1\": [0, 1], \"label\": \"y\"}"),
    );
    let set = read_edges(ProbeTask::Edges, &bad, &Files { skip_bad: true, ..Files::default() }).unwrap();
    assert_eq!((set.examples.len(), set.problems.len()), (1, 2));
}

fn recipe(model: &Path, task: ProbeTask, file: &Path, sets: &[&str]) -> ProbeRecipe {
    let common =
        ["projection_size=12", "hidden_size=10", "batch_size=2", "epochs=24", "learning_rate=1e-2", "dropout=0.1"];
    let sets: Vec<String> = common.into_iter().chain(sets.iter().copied()).map(str::to_owned).collect();
    let recipe: ProbeRecipe = parse_settings(&[("", "test")], &sets).unwrap();
    let file = file.display().to_string();
    ProbeRecipe { task, model: model.display().to_string(), train: file.clone(), dev: file, ..recipe }
}

/// Runs a probing, and stops it after so many updates of all probes.
fn run(recipe: &ProbeRecipe, threads: usize, out: &Path, stop_after: usize) -> Result<ProbeEnded, TaskError> {
    let device = Device::cpu(None, Some(threads)).unwrap();
    let plan = ProbePlan::new(recipe.clone())?;
    let (stop, mut steps) = (AtomicBool::new(false), 0);
    let mut on = |event: Event<'_>| {
        if let Event::Step { .. } = event {
            steps += 1;
            stop.store(steps >= stop_after, Ordering::Relaxed);
        }
    };
    probe(&plan, &device, out, &mut |_, _| {}, &mut Watch { on: &mut on, stop: &stop })
}

/// All scores, without the time that they took.
fn whole(recipe: &ProbeRecipe, threads: usize, out: &Path) -> ProbeResults {
    let ProbeEnded::Finished(mut results) = run(recipe, threads, out, usize::MAX).unwrap() else { panic!("stopped") };
    results.full.seconds = 0.0;
    results.random_encoder.iter_mut().for_each(|score| score.seconds = 0.0);
    *results
}

#[test]
fn the_same_bits_however_it_is_run() {
    let (from, out, place) = (encoder(), TempDir::new().unwrap(), Place::new());
    let tree = place.file("tree.conllu", TREE.repeat(3));
    let sets = ["random_encoder=true"];
    for (task, sets) in [(ProbeTask::Dependencies, &sets[..]), (ProbeTask::Pos, &["max_length=6", "patience=2"])] {
        let recipe = recipe(from.path(), task, &tree, sets);
        let at = |name: &str| -> PathBuf { out.path().join(format!("{}-{name}", task.name())) };
        let results = whole(&recipe, 1, &at("one"));
        assert!(results.full.f1 > 0.5, "{results:?}");
        assert_eq!(whole(&recipe, 2, &at("two")), results, "threads");
        // Vectors that are not kept are read again.
        let uncached = ProbeRecipe { cache_mib: 0, ..recipe.clone() };
        assert_eq!(whole(&uncached, 1, &at("uncached")), results, "without a cache");
        // Stopped in the first probe, in the second, and resumed with other threads.
        for (stop_after, threads) in [(2, 1), (20, 2)] {
            let ended = run(&recipe, threads, &at("parts"), stop_after).unwrap();
            assert!(matches!(ended, ProbeEnded::Stopped(_, step) if step > 0), "{ended:?}");
        }
        assert!(!at("parts").join("report.html").exists());
        assert_eq!(whole(&recipe, 1, &at("parts")), results, "resumed");
        // Finished: nothing is trained again.
        let log = at("one").join("probes/layers-0-to-2/metrics.jsonl");
        let before = fs::metadata(&log).unwrap().modified().unwrap();
        assert_eq!(whole(&recipe, 1, &at("one")), results);
        assert_eq!(fs::metadata(&log).unwrap().modified().unwrap(), before);
        assert!(!at("one").join("probes/control/checkpoints").exists());
        let page = fs::read_to_string(at("one").join("report.html")).unwrap();
        assert!(page.contains("Mixing weights") && page.contains("<svg"), "{page}");
        check(&results);
        // Another recipe and other data are refused.
        let other = ProbeRecipe { seed: 1, ..recipe.clone() };
        assert!(run(&other, 1, &at("one"), usize::MAX).unwrap_err().to_string().contains("seed"));
        fs::write(&tree, TREE.repeat(3).replace("jim", "tom")).unwrap();
        assert!(run(&recipe, 1, &at("one"), usize::MAX).is_err());
        fs::write(&tree, TREE.repeat(3)).unwrap();
    }
}

/// ELMo's tokens are bytes, and its vectors those of words.
#[test]
fn words_of_an_elmo_are_probed() {
    let (out, place) = (TempDir::new().unwrap(), Place::new());
    let tree = place.file("tree.conllu", TREE.repeat(3));
    for task in [ProbeTask::Pos, ProbeTask::Dependencies] {
        let recipe = recipe(&data("elmo/skip"), task, &tree, &["epochs=100", "cumulative=false"]);
        let results = whole(&recipe, 1, &out.path().join(task.name()));
        assert!(results.full.f1 > 0.9, "{results:?}");
        assert_eq!(results.train.targets, 27);
    }
}

/// What scores promise, whatever they are.
fn check(results: &ProbeResults) {
    let (full, cumulative) = (&results.full, results.cumulative.as_ref().unwrap());
    assert_eq!((full.mixing_weights.len(), cumulative.f1.len(), cumulative.differences.len()), (3, 3, 2));
    assert!((full.mixing_weights.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    let centre = full.mixing_weights[1] + 2.0 * full.mixing_weights[2];
    assert!((full.centre_of_gravity - centre).abs() < 1e-12);
    assert!(full.mixing_weights.iter().any(|weight| (weight - 1.0 / 3.0).abs() > 1e-4), "no weight was learned");
    assert_eq!(cumulative.f1[2], full.f1);
    let control = results.control.unwrap();
    assert!((control.selectivity - (full.f1 - control.f1)).abs() < 1e-12);
    if results.task == "dependencies" {
        assert_ne!(results.random_encoder.as_ref().unwrap().mixing_weights, full.mixing_weights);
    }
}

#[test]
fn heads_are_compared_with_arcs() {
    let (from, place) = (encoder(), Place::new());
    let tree = place.file("tree.conllu", TREE);
    let device = Device::cpu(None, Some(1)).unwrap();
    let model = Model::open(from.path(), &device, DType::F32, Want::Encoder).unwrap();
    let settings = HeadSettings { limit: None, max_length: 64, min_count: 2 };
    let results = compare_heads(&model, &tree, &settings, |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!((results.sentences, results.too_long, results.all.count), (2, 0, 7));
    let names: Vec<(&str, usize)> = results.relations.iter().map(|r| (r.relation.as_str(), r.count)).collect();
    assert_eq!(names, [("det", 2), ("nsubj", 2)]);
    // Determiners stand two words and one word before their heads, subjects one word before.
    let nsubj = &results.relations[1];
    assert_eq!((nsubj.offset, nsubj.offset_accuracy), (1, 1.0));
    assert_eq!(results.relations[0].offset_accuracy, 0.5);
    // The same by the maps themselves, where each word is one token: jim → sat, and what sat is looked at by.
    let maps = model.attention(Input::One("jim sat"), None).unwrap();
    let s = maps.sequence.len();
    assert_eq!(s, 4);
    let sat = |layer: usize, head: usize, from: usize, to: usize| maps.head(layer, head).unwrap()[from * s + to];
    assert!(sat(0, 0, 1, 2) > 0.0);
    let one = place.file("one.conllu", TREE.split("\n\n").next().unwrap());
    let settings = HeadSettings { min_count: 1, ..settings };
    let only = compare_heads(&model, &one, &settings, |_, _| ControlFlow::Continue(())).unwrap();
    // Among two words the other one is always the most attended to.
    assert_eq!((only.all.count, only.all.best.accuracy), (1, 1.0));
    assert_eq!((only.all.best.layer, only.all.best.head, only.all.best.direction), (1, 1, Direction::DependentToHead));
    // Sentences that do not fit are left out.
    let short = HeadSettings { max_length: 5, ..settings };
    assert_eq!(compare_heads(&model, &tree, &short, |_, _| ControlFlow::Continue(())).unwrap().too_long, 1);
    let none =
        compare_heads(&model, &tree, &HeadSettings { max_length: 3, ..settings }, |_, _| ControlFlow::Continue(()));
    assert!(none.unwrap_err().to_string().contains("too long"));
}
