//! Whatever bytes a file has: an answer or an error, and never a panic. What is read can be written and read again.

use henson_data::tables::TableFormat;
use henson_tasks::{Files, Input, ProbeTask, Reading, Set, TASKS, Target, read, read_edges, read_predictions};
use proptest::prelude::*;

use crate::support::Place;

/// Pieces of files, so that more gets past the first check than noise alone would.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let parts = prop::sample::select(vec![
        "sentence\tlabel\n",
        "sentence1\tsentence2\tlabel\n",
        "text,label\n",
        "question,A,B,answer\n",
        "a",
        "\t",
        ",",
        "\n",
        "\r\n",
        "\"",
        "\"\"",
        "1",
        "0",
        "-",
        " ",
        "B-X",
        "I-X",
        "S-Y",
        "O",
        "-DOCSTART- O\n\n",
        "1-2\t",
        "# newdoc\n",
        "{\"text\": ",
        "\"label\": ",
        "{\"data\": [{\"paragraphs\": [{\"context\": \"ab\", \"qas\": [",
        "{\"id\": \"1\", \"question\": \"q\", ",
        "\"answers\": [{\"text\": \"b\", \"answer_start\": 1}]}",
        "]}]}]}",
        "{",
        "}",
        "[",
        "]",
        "null",
        "é",
        "\u{feff}",
        "\u{a0}",
        "{\"words\": [\"a\"], \"tags\": [\"X\"]}\n",
        "PAR1",
        "{\"text\": \"é a b\", \"span1\": [0, 1], \"label\": 1}\n",
        "{\"text\": \"é a b\", \"target\": {\"span1_index\": ",
        ", \"span1_text\": \"A\"}, ",
        "{\"sentence1\": \"é\", \"sentence2\": \"b\", \"start1\": 0, \"end1\": ",
        ", \"start2\": 0, \"end2\": 1, ",
        "\"targets\": [{\"span1\": [0, 1], \"label\": \"x\"}]}\n",
        "\"a é b\", ",
        "{\"span1\": [1, 3], \"span2\": [0, 1], \"label\": [\"x\"]}",
        "1\ta\t_\tX\t_\t_\t2\tdet\t_\t_\n",
        "2\tb\t_\tX\t_\t_\t0\troot\t_\t_\n",
        "{\"idx\": 1, \"passage\": {\"text\": \"é.\", \"questions\": [",
        "{\"question\": \"q\", \"idx\": 0, \"answers\": [{\"text\": \"a\", \"idx\": 0, \"label\": ",
        "{\"idx\": 1, \"passage\": {\"text\": \"é.\", \"entities\": [{\"start\": 0, \"end\": ",
        "\"qas\": [{\"idx\": 0, \"query\": \"@placeholder\", \"answers\": [{\"text\": \"é\"",
    ]);
    let part = prop_oneof![
        8 => parts.prop_map(|part| part.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..8),
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

/// What every set promises.
fn promises(set: &Set) {
    assert!(!set.examples.is_empty());
    for example in &set.examples {
        assert_eq!(example.target != Target::None, set.is_labelled());
        let known = |label: &u32| (*label as usize) < set.labels.len();
        match (&example.target, &example.input) {
            (Target::Class(class), Input::Choices { endings, .. }) => assert!((*class as usize) < endings.len()),
            (Target::Class(class), Input::Marked { first, second, spans }) => {
                let part = |span: &henson_tasks::Span| match (span.in_second, second) {
                    (true, Some(second)) => second.get(span.bytes.clone()),
                    _ => first.get(span.bytes.clone()),
                };
                assert!(known(class) && !spans.is_empty());
                assert!(spans.iter().all(|span| part(span).is_some_and(|part| !part.is_empty())));
            }
            (Target::Class(class), _) => assert!(known(class)),
            (Target::Classes(classes), _) => assert!(classes.iter().all(known) && classes.is_sorted()),
            (Target::Tags(tags), Input::Words { words, .. }) => {
                assert!(tags.iter().all(known) && tags.len() == words.len() && !words.is_empty());
            }
            (Target::Number(number), _) => assert!(number.is_finite()),
            (Target::Answers(answers), Input::Question { passage, .. }) => {
                for answer in answers {
                    assert_eq!(passage.get(answer.place.clone().unwrap()), Some(answer.text.as_str()));
                }
            }
            (Target::Answers(answers), Input::Cloze { candidates, .. }) => {
                assert!(!answers.is_empty() && !candidates.is_empty());
            }
            (Target::Texts(texts), Input::One(source)) => {
                let is_text = |text: &String| !text.trim().is_empty();
                assert!(is_text(source) && !texts.is_empty() && texts.iter().all(is_text));
            }
            (Target::None, _) => {}
            other => panic!("{other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_break_a_reader(
        bytes in content(),
        task in prop::sample::select(TASKS.iter().collect::<Vec<_>>()),
        format in prop::sample::select(vec![None, Some(TableFormat::Tsv), Some(TableFormat::Csv), Some(TableFormat::JsonLines)]),
        name in prop::sample::select(vec!["x", "x.json", "x.jsonl", "x.csv", "x.conllu", "x.parquet"]),
        skip_bad in any::<bool>(),
        header in any::<Option<bool>>(),
    ) {
        let place = Place::new();
        let path = place.file(name, &bytes);
        let reading = Reading { files: Files { format, skip_bad, header, ..Files::default() }, ..Reading::new(task) };
        match read(&path, &reading) {
            Ok(mut set) => {
                promises(&set);
                let _ = read_predictions(&path, &mut set);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// Spans lie within their texts, and labels are known.
    #[test]
    fn no_bytes_break_a_reader_of_targets(
        bytes in content(),
        task in prop::sample::select(vec![
            ProbeTask::Edges, ProbeTask::Edges, ProbeTask::Dependencies, ProbeTask::Dependencies, ProbeTask::Pos, ProbeTask::Entities,
        ]),
        skip_bad in any::<bool>(),
    ) {
        let place = Place::new();
        let path = place.file("x.conllu", &bytes);
        match read_edges(task, &path, &Files { skip_bad, ..Files::default() }) {
            Ok(set) => for example in &set.examples {
                prop_assert!(!example.targets.is_empty());
                for target in &example.targets {
                    for span in [Some(&target.first), target.second.as_ref()].into_iter().flatten() {
                        prop_assert!(span.start < span.end && span.end <= example.words.len());
                    }
                    prop_assert_eq!(target.second.is_some(), set.pairs);
                    prop_assert!(target.labels.iter().all(|label| (*label as usize) < set.labels.len()));
                }
            },
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// Cells come back as they were, whatever is in them.
    #[test]
    fn quoted_cells_hold_everything(texts in prop::collection::vec("[a\",\n\té ]{0,6}x[\"\n,]{0,3}", 1..6)) {
        let place = Place::new();
        let rows = texts.iter().map(|text| format!("\"{}\",y\n", text.replace('"', "\"\"")));
        let path = place.file("x.csv", "text,label\n".to_owned() + &rows.collect::<String>());
        let set = read(&path, &Reading::new(crate::support::task("classify"))).unwrap();
        let read: Vec<&str> = set.examples.iter().map(|example| match &example.input {
            Input::One(text) => text.as_str(),
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(read, texts);
    }

    /// A parquet file with some bytes changed. Its reader panics on some, which must not get out.
    #[test]
    fn no_damage_to_parquet_gets_out(
        name in prop::sample::select(vec![("squad.parquet", "qa"), ("tokens.parquet", "tag"), ("arc.parquet", "choice")]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = std::fs::read(crate::support::golden(name.0)).unwrap();
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        let place = Place::new();
        let reading = Reading { places_needed: false, ..Reading::new(crate::support::task(name.1)) };
        if let Err(error) = read(&place.file("x.parquet", &bytes), &reading) {
            prop_assert!(error.to_string().contains("x.parquet"));
        }
    }
}
