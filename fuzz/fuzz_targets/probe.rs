//! Bytes as a file to probe for, of every kind: whatever is accepted has targets, spans within the words and labels within the names.
#![no_main]

use std::path::PathBuf;

use henson_tasks::{Files, ProbeTask, read_edges};

/// What a file is read as depends on its name.
const KINDS: [(ProbeTask, &str); 6] = [
    (ProbeTask::Edges, "jsonl"),
    (ProbeTask::Pos, "conllu"),
    (ProbeTask::Dependencies, "conllu"),
    (ProbeTask::Entities, "conll"),
    (ProbeTask::Chunks, "conll"),
    (ProbeTask::Entities, "jsonl"),
];

/// Files are opened by their path: one per process and kind, in memory where the system has such a place.
fn file(ending: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    parent.join(format!("henson-fuzz-{}.{ending}", std::process::id()))
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for (task, ending) in KINDS {
        let path = file(ending);
        std::fs::write(&path, bytes).expect("the input is written");
        for skip_bad in [false, true] {
            let Ok(set) = read_edges(task, &path, &Files { skip_bad, ..Files::default() }) else { continue };
            assert!(!set.examples.is_empty() && set.labels.is_sorted());
            for example in &set.examples {
                assert!(!example.targets.is_empty(), "{}", example.place);
                for target in &example.targets {
                    assert_eq!(target.second.is_some(), set.pairs);
                    let spans = [Some(&target.first), target.second.as_ref()];
                    for span in spans.into_iter().flatten() {
                        assert!(span.start < span.end && span.end <= example.words.len(), "{span:?}");
                    }
                    assert!(target.labels.iter().all(|label| (*label as usize) < set.labels.len()));
                }
            }
        }
    }
});
