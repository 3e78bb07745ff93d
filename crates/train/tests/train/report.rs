//! What a run leaves for people: the log and its cuts, event files for TensorBoard, and the page.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use henson_checkpoint::CheckpointError;
use henson_train::metrics::{Eval, Line, LogError, MetricsLog, Note, Prediction, Sample, Samples, Train, read};
use henson_train::report::{Confused, Run, is_report, render, write};
use henson_train::tensorboard::EventWriter;
use serde_json::Value;

fn train(step: u64) -> Train {
    Train {
        step,
        phase: 0,
        loss: 10.0 / (step as f64).sqrt(),
        losses: losses(&[("mlm_loss", 9.0 / (step as f64).sqrt())]),
        learning_rate: 1e-4,
        gradient_norm: 1.5,
        tokens_per_s: 50_000.0,
        tokens: step.saturating_mul(16_384),
        seconds: step as f64 * 0.3,
    }
}

fn losses(named: &[(&str, f64)]) -> Vec<(String, f64)> {
    named.iter().map(|(name, loss)| ((*name).to_owned(), *loss)).collect()
}

/// A line of pre-training with next sentences.
fn paired(step: u64) -> Train {
    let mut line = train(step);
    line.losses.push(("nsp_loss".to_owned(), 0.5));
    line
}

fn eval(step: u64, loss: f64) -> Line {
    let metrics = BTreeMap::from([("loss".to_owned(), loss), ("accuracy".to_owned(), 0.5 - loss / 100.0)]);
    Line::Eval(Eval { step, metrics })
}

fn samples(step: u64, text: &str, token: &str) -> Line {
    let blank = vec![Prediction { token: token.to_owned(), probability: 0.25 }];
    Line::Samples(Samples { step, texts: vec![Sample { text: text.to_owned(), blanks: vec![blank] }] })
}

fn note(step: u64, text: &str) -> Line {
    Line::Note(Note { step, text: text.to_owned() })
}

fn run(name: &str, lines: Vec<Line>) -> Run {
    Run { name: name.to_owned(), lines, ..Run::default() }
}

// The log

#[test]
fn the_log_has_the_fields_that_other_programs_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    let mut log = MetricsLog::open(&path, None).unwrap();
    let first = Line::Train(Train { loss: 2.5, losses: losses(&[("mlm_loss", 2.0), ("nsp_loss", 0.5)]), ..train(4) });
    let fine_tuning = Line::Train(Train { loss: 2.5, losses: losses(&[]), ..train(4) });
    for line in [&first, &fine_tuning, &eval(4, 2.0), &samples(4, "The [MASK].", "cat"), &note(5, "x")] {
        log.append(line).unwrap();
    }
    let rest = r#""learning_rate":0.0001,"gradient_norm":1.5,"tokens_per_s":50000.0,"tokens":65536,"seconds":1.2}"#;
    let expected = [
        format!(r#"{{"kind":"train","step":4,"phase":0,"loss":2.5,"mlm_loss":2.0,"nsp_loss":0.5,{rest}"#),
        format!(r#"{{"kind":"train","step":4,"phase":0,"loss":2.5,"nsp_loss":null,{rest}"#),
        r#"{"kind":"eval","step":4,"metrics":{"accuracy":0.48,"loss":2.0}}"#.to_owned(),
        r#"{"kind":"samples","step":4,"texts":[{"text":"The [MASK].","blanks":[[{"token":"cat","probability":0.25}]]}]}"#
            .to_owned(),
        r#"{"kind":"note","step":5,"text":"x"}"#.to_owned(),
    ];
    assert_eq!(fs::read_to_string(&path).unwrap(), expected.join("\n") + "\n");
    let lines = read(&path).unwrap().lines;
    assert_eq!(lines, [first, fine_tuning, eval(4, 2.0), samples(4, "The [MASK].", "cat"), note(5, "x")]);
    assert_eq!(lines.iter().map(Line::step).collect::<Vec<_>>(), [4, 4, 4, 4, 5]);
}

/// The names belong to the objective; what version 0.1 wrote is read as it was meant.
#[test]
fn any_named_losses_are_written_read_and_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    let two = [("discriminator_loss", 0.5), ("generator_loss", 2.0)];
    let line = Line::Train(Train { loss: 2.5, losses: losses(&two), ..train(4) });
    MetricsLog::open(&path, None).unwrap().append(&line).unwrap();
    let written: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&written["discriminator_loss"], &written["generator_loss"]), (&Value::from(0.5), &Value::from(2.0)));
    assert_eq!(read(&path).unwrap().lines, std::slice::from_ref(&line));
    let page = render(&[run("a", vec![line])]);
    let charts = data(&page)["charts"].clone();
    let titles: Vec<&str> = charts.as_array().unwrap().iter().map(|chart| chart["title"].as_str().unwrap()).collect();
    assert_eq!(titles[..3], ["Training loss", "Discriminator loss", "Generator loss"]);

    let rest = r#""learning_rate":1,"gradient_norm":1,"tokens_per_s":1,"tokens":1,"seconds":1"#;
    for (old, expected) in [
        (r#""mlm_loss":2.0,"nsp_loss":0.5"#, &[("mlm_loss", 2.0), ("nsp_loss", 0.5)][..]),
        (r#""mlm_loss":2.0,"nsp_loss":null"#, &[("mlm_loss", 2.0)]),
        (r#""nsp_loss":null,"a_later_one":"x","later":[1],"a_loss":"x""#, &[]),
    ] {
        fs::write(&path, format!("{{\"kind\":\"train\",\"step\":1,\"loss\":2.5,{old},{rest}}}\n")).unwrap();
        let log = read(&path).unwrap();
        let [Line::Train(line)] = &log.lines[..] else { panic!("{log:?}") };
        assert_eq!((line.loss, &line.losses), (2.5, &losses(expected)), "{old}");
    }
}

#[test]
fn numbers_that_are_not_finite_are_null_and_come_back_as_nan() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    let mut log = MetricsLog::open(&path, None).unwrap();
    let (loss, gradient_norm) = (f64::NAN, f64::INFINITY);
    log.append(&Line::Train(Train { loss, gradient_norm, ..train(1) })).unwrap();
    log.append(&eval(1, f64::NEG_INFINITY)).unwrap();
    let blanks = vec![vec![Prediction { token: "a".to_owned(), probability: f32::NAN }]];
    log.append(&Line::Samples(Samples { step: 1, texts: vec![Sample { text: String::new(), blanks }] })).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    text.lines().for_each(|line| _ = serde_json::from_str::<Value>(line).unwrap());
    assert_eq!(text.matches("null").count(), 6, "{text}");
    let [Line::Train(train), Line::Eval(eval), Line::Samples(samples)] = &read(&path).unwrap().lines[..] else {
        panic!()
    };
    assert!(train.loss.is_nan() && train.gradient_norm.is_nan() && train.seconds == 0.3);
    assert!(eval.metrics.values().all(|value| value.is_nan()));
    assert!(samples.texts[0].blanks[0][0].probability.is_nan());
}

#[test]
fn a_torn_last_line_is_left_out_and_cut_off() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    let whole = "{\"kind\":\"note\",\"step\":1,\"text\":\"eins\"}\n";
    let last = "{\"kind\":\"note\",\"step\":2,\"text\":\"zwölf\"}";
    for cut in 0..=last.len() {
        // Also within the two bytes of the ö.
        let bytes = [whole.as_bytes(), &last.as_bytes()[..cut]].concat();
        fs::write(&path, &bytes).unwrap();
        let kept = if cut == last.len() { vec![note(1, "eins"), note(2, "zwölf")] } else { vec![note(1, "eins")] };
        assert_eq!(read(&path).unwrap().lines, kept, "{cut}");
        let mut log = MetricsLog::open(&path, Some(9)).unwrap();
        log.append(&note(3, "drei")).unwrap();
        assert_eq!(read(&path).unwrap().lines, [kept, vec![note(3, "drei")]].concat(), "{cut}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left beside the log");
    }
}

#[test]
fn a_resumed_log_ends_where_its_checkpoint_does() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    // A field of a later henson, and a note that comes late, stay as they are.
    let written = "{\"kind\":\"train\",\"step\":1,\"new\":[1,2]}\n{\"kind\":\"eval\", \"step\":2,\"metrics\":{}}\n\
                   {\"kind\":\"later\",\"step\":3}\n{\"step\":1}\n";
    let lines: Vec<&str> = written.split_inclusive('\n').collect();
    let check = |keep: Option<u64>, expected: String| {
        fs::write(&path, written).unwrap();
        MetricsLog::open(&path, keep).unwrap().append(&note(9, "end")).unwrap();
        let end = "{\"kind\":\"note\",\"step\":9,\"text\":\"end\"}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), expected + end, "{keep:?}");
    };
    check(Some(9), written.to_owned());
    check(Some(3), written.to_owned());
    check(Some(2), [lines[0], lines[1], lines[3]].concat());
    check(Some(1), [lines[0], lines[3]].concat());
    check(Some(0), String::new());
    check(None, String::new());
    // A log that was never there begins empty.
    MetricsLog::open(directory.path().join("new.jsonl"), Some(7)).unwrap();
}

#[test]
fn damaged_lines_are_skipped_and_reported_by_file_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics.jsonl");
    let [first, last] = [note(1, "first"), note(3, "last")];
    let good = |line: &Line| [serde_json::to_vec(line).unwrap(), b"\n".to_vec()].concat();
    let check = |bad: &[u8], expected: &str| {
        let damaged = [&good(&first)[..], bad, b"\n", &good(&last)].concat();
        fs::write(&path, &damaged).unwrap();
        let log = read(&path).unwrap();
        assert_eq!(log.lines, [first.clone(), last.clone()]);
        let start = format!("{}, line 2: ", path.display());
        let [message] = &log.skipped[..] else { panic!("{:?}", log.skipped) };
        assert!(message.starts_with(&start) && message.contains(expected), "{message}");
        // A run that resumes keeps the lines around it, and reports the same.
        let mut resumed = MetricsLog::open(&path, Some(3)).unwrap();
        if expected != "unknown variant" {
            assert_eq!(resumed.skipped().len(), 1);
            assert_eq!(fs::read(&path).unwrap(), [good(&first), good(&last)].concat());
        }
        resumed.append(&last).unwrap();
        assert_eq!(read(&path).unwrap().lines, [first.clone(), last.clone(), last.clone()]);
    };
    check(b"{\"kind\":\"note\",\"step\":1", "EOF");
    check(b"", "EOF");
    // One of a later henson stays in the log.
    check(b"{\"kind\":\"nothing\",\"step\":1}", "unknown variant");
    check(b"{\"kind\":\"note\",\"step\":-1,\"text\":\"\"}", "-1");
    check(b"{\"kind\":\"note\",\"text\":\"\"}", "missing field `step`");
    check(b"{\"kind\":\"note\",\"step\":1,\"text\":\"\xff\"}", "utf-8");
    check(b"\0\x01\xfe\xff", "utf-8");
    check("[".repeat(1_000_000).as_bytes(), "expected");
    check(&vec![b' '; (16 << 20) + 1], "longer than 16 MiB");
    check(&vec![0; (16 << 20) + 9], "longer than 16 MiB");
    // A few are named, the others counted.
    fs::write(&path, "\n".repeat(12)).unwrap();
    let skipped = read(&path).unwrap().skipped;
    assert!(skipped.len() == 6 && skipped[5].contains("7 more damaged lines"), "{skipped:?}");
    assert!(read(directory.path()).unwrap_err().to_string().contains("not a regular file"));
    let none = read(&directory.path().join("none"));
    assert!(matches!(none, Err(LogError::Checkpoint(CheckpointError::Io { action: "read", .. }))));
}

/// Opening a FIFO would wait for somebody who writes to it.
#[test]
fn a_fifo_in_a_run_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("metrics.jsonl"), "").unwrap();
    let fifo = directory.path().join("recipe.toml");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let (done, result) = std::sync::mpsc::channel();
    let run = directory.path().to_owned();
    std::thread::spawn(move || done.send((is_report(&fifo), Run::open(&run).map(drop))));
    let (is_report, opened) = result.recv_timeout(Duration::from_secs(10)).expect("it waits");
    assert!(!is_report && opened.unwrap_err().to_string().contains("recipe.toml is not a regular file"));
}

// Event files

/// Bit by bit, to check a table by.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 0 { crc >> 1 } else { (crc >> 1) ^ 0x82f6_3b78 };
        }
    }
    !crc
}

/// The data of each record, with both checksums checked.
fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let masked = |bytes: &[u8]| {
        let crc = crc32c(bytes);
        crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(bytes[8..12], masked(&bytes[..8]));
        let data = &bytes[12..12 + length];
        assert_eq!(bytes[12 + length..16 + length], masked(data));
        records.push(data.to_vec());
        bytes = &bytes[16 + length..];
    }
    records
}

/// The fields of a message: numbers, and bytes.
#[derive(Debug, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        number
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            kind => {
                let length = match kind {
                    1 => 8,
                    5 => 4,
                    2 => varint(&mut bytes) as usize,
                    other => panic!("wire type {other}"),
                };
                let (head, rest) = bytes.split_at(length);
                bytes = rest;
                Field::Bytes(head.to_vec())
            }
        };
        found.push((key >> 3, field));
    }
    found
}

/// What is at a path of field numbers.
fn at(message: &[u8], path: &[u64]) -> Option<Field> {
    let (_, field) = fields(message).into_iter().find(|(number, _)| *number == path[0])?;
    match (&field, path.len()) {
        (_, 1) => Some(field),
        (Field::Bytes(bytes), _) => at(bytes, &path[1..]),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn event_files_have_the_bytes_that_tensorboard_writes() {
    let directory = tempfile::tempdir().unwrap();
    let time = UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
    let mut writer = EventWriter::create(&directory.path().join("a/b"), time, 300).unwrap();
    writer.scalar("train/loss", 300, time, 2.5).unwrap();
    writer.flush().unwrap();
    // From tensorboard 2.21: RecordWriter on its own Event, SessionLog and Summary.
    let expected = [
        "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9",
        "100000000000000095fbfe180900001040fc54d94110ad023a020801cb79b93b",
        "2100000000000000017becf60900001040fc54d94110ac022a130a110a0a747261696e2f6c6f737315000020408dabcc7d",
    ];
    assert_eq!(hex(&fs::read(writer.path()).unwrap()), expected.concat());
}

#[test]
fn event_files_say_what_the_log_says() {
    let directory = tempfile::tempdir().unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(5);
    let mut writer = EventWriter::create(directory.path(), time, None).unwrap();
    let lines = [
        Line::Train(Train { loss: f64::NAN, ..paired(1_000_000) }),
        eval(4, 2.0),
        samples(4, "a | [MASK] <b>\n", "c*t"),
        note(5, "1 < 2"),
    ];
    for line in &lines {
        writer.log(line, time).unwrap();
    }
    // Nothing waits in a buffer.
    let events = records(&fs::read(writer.path()).unwrap());
    let scalar = |event: &[u8]| {
        let Some(Field::Bytes(tag)) = at(event, &[5, 1, 1]) else { panic!() };
        let Some(Field::Bytes(value)) = at(event, &[5, 1, 2]) else { panic!() };
        (String::from_utf8(tag).unwrap(), f32::from_le_bytes(value.try_into().unwrap()))
    };
    assert_eq!(at(&events[1], &[7, 1]), Some(Field::Number(1)));
    assert_eq!(at(&events[1], &[2]), None, "a new run: all that was there before is void");
    assert_eq!(at(&events[2], &[2]), Some(Field::Number(1_000_000)));
    assert_eq!(at(&events[2], &[1]), Some(Field::Bytes(5.0_f64.to_le_bytes().to_vec())));
    let (tag, value) = scalar(&events[2]);
    assert!(tag == "train/loss" && value.is_nan());
    let scalars: Vec<_> = events[3..10].iter().map(|event| scalar(event)).collect();
    let expected = [
        ("train/mlm_loss", 0.009),
        ("train/nsp_loss", 0.5),
        ("train/learning_rate", 1e-4),
        ("train/gradient_norm", 1.5),
        ("train/tokens_per_s", 50_000.0),
        ("eval/accuracy", 0.48),
        ("eval/loss", 2.0),
    ];
    assert_eq!(scalars, expected.map(|(tag, value)| (tag.to_owned(), value)));
    let texts = [
        (
            "samples",
            "| text | blank | predictions |\n|---|---|---|\n| a \\| \\[MASK\\] &lt;b\\>  | 1 | c\\*t 25.0% |\n",
        ),
        ("notes", "1 &lt; 2"),
    ];
    for (event, (tag, text)) in events[10..].iter().zip(texts) {
        assert_eq!(at(event, &[5, 1, 1]), Some(Field::Bytes(tag.into())));
        assert_eq!(at(event, &[5, 1, 8, 8]), Some(Field::Bytes(text.into())));
        assert_eq!(at(event, &[5, 1, 8, 1]), Some(Field::Number(7)));
        assert_eq!(at(event, &[5, 1, 9, 1, 1]), Some(Field::Bytes("text".into())));
    }
    assert_eq!(events.len(), 12);
}

#[test]
fn a_resumed_run_begins_a_file_that_comes_after_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let mut names = Vec::new();
    // The clock stands still, and then goes back.
    for (seconds, step) in [(2_000_000_000, None), (2_000_000_000, Some(0)), (1_000_000_000, Some(7))] {
        let time = UNIX_EPOCH + Duration::from_secs(seconds);
        let writer = EventWriter::create(directory.path(), time, step).unwrap();
        let session = &records(&fs::read(writer.path()).unwrap())[1];
        assert_eq!(at(session, &[2]), step.map(|step| Field::Number(step + 1)), "the checkpoint's own step stays");
        names.push(writer.path().file_name().unwrap().to_owned());
    }
    assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    assert!(
        EventWriter::create(&directory.path().join(&names[0]), SystemTime::now(), 0).is_err(),
        "a file is in the way"
    );
}

// The page

/// What the script gets.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let (json, rest) = rest.split_once("</script>").unwrap();
    assert!(
        rest.starts_with("\n<script>\n// Draws the curves.") || rest.starts_with("\n<script>// Draws"),
        "{rest:.60}"
    );
    serde_json::from_str(json).unwrap()
}

/// The tags of a page in order, without attributes. Every tag is closed in its turn; style and scripts are left out.
fn tags(page: &str) -> Vec<String> {
    const VOID: [&str; 4] = ["meta", "link", "input", "!doctype"];
    let (mut found, mut open) = (Vec::new(), Vec::<String>::new());
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        rest = &rest[start + 1..];
        // Attributes are in quotation marks, which hold no `>` that was not escaped.
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[..end];
        let name = tag.split([' ', '\n']).next().unwrap().to_owned();
        assert_eq!(tag.matches('"').count() % 2, 0, "<{tag}>");
        rest = &rest[end + 1..];
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closed in its turn");
        } else if !VOID.contains(&name.as_str()) {
            open.push(name.clone());
            if ["style", "script"].contains(&name.as_str()) {
                rest = &rest[rest.find(&format!("</{name}>")).unwrap()..];
            }
        }
        found.push(name);
    }
    assert!(open.is_empty(), "{open:?}");
    found
}

/// A run with everything, all of its foreign texts being `text`.
fn full(text: &str, phases: bool) -> Run {
    let mut lines = vec![note(0, text), eval(0, 9.0), samples(0, text, text)];
    for step in 1..=40 {
        let phase = u32::from(phases && step > 30);
        lines.push(Line::Train(Train { phase, ..paired(step) }));
        if step % 10 == 0 {
            lines.push(Line::Eval(Eval {
                step,
                metrics: BTreeMap::from([("loss".to_owned(), 9.0 - step as f64 / 10.0), (format!("z{text}"), 0.5)]),
            }));
            lines.push(samples(step, text, text));
        }
    }
    let pairs = vec![(format!("key {text}"), text.to_owned()), ("architecture".to_owned(), text.to_owned())];
    let confusions = vec![Confused { expected: text.to_owned(), predicted: text.to_owned(), count: 1 }];
    let (skipped, facts) = (Vec::new(), pairs.clone());
    Run { name: text.to_owned(), recipe: text.to_owned(), lines, skipped, facts, results: pairs, confusions }
}

const HOSTILE: [&str; 8] = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "&lt;b&gt; &amp; {{style}} {{data}}",
    "]]>\u{2028}\u{202e}\u{0}\u{7}\r\n\t",
    "</title></style></pre></textarea><svg/onload=alert(1)>",
    "javascript:alert(1) ${alert(1)} `${1}`",
];

#[test]
fn foreign_text_stays_text() {
    let names = |text: &str| [full(text, true), full(text, false)];
    for runs in [1, 2] {
        let harmless = tags(&render(&names("harmless")[..runs]));
        for text in HOSTILE {
            let page = render(&names(text)[..runs]);
            assert_eq!(tags(&page), harmless, "{text}");
            // Not even in the block of data is there any `<`.
            assert_eq!(data(&page)["runs"][0]["name"], text);
            let (markup, _) = page.split_once("<script type=\"application/json\"").unwrap();
            for part in ["<img", "onerror=alert(1)>", "<svg/", "<script>", "\u{0}"] {
                assert!(!markup.contains(part), "{text}: {part}");
            }
        }
    }
    // A recipe's keys and values are foreign, too.
    let with = |recipe: &str| Run { recipe: recipe.to_owned(), ..run("a", vec![]) };
    let page = render(&[with("\"<b>\" = \"<i>\""), with("\"<b>\" = '</td>'")]);
    tags(&page);
    assert!(page.contains("<code>&lt;b&gt;</code>") && page.contains("<td class=\"differs\">&lt;/td&gt;</td>"));
}

#[test]
fn the_page_needs_nothing_else() {
    let page = render(&[full("x", true)]);
    for part in ["http://", "https://", "src=", "@import", "url(", "innerHTML", "eval(", "document.write"] {
        let allowed = page.matches("http://www.w3.org/2000/svg").count();
        let count = page.matches(part).count() - if part == "http://" { allowed } else { 0 };
        let clip = usize::from(part == "url("); // the script's reference to a clip path of its own
        assert_eq!(count, clip, "{part}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("script-src 'sha256-"));
    for part in ["<noscript>", "prefers-color-scheme: dark", "name=\"viewport\"", "lang=\"en\"", "aria-live"] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page, render(&[full("x", true)]), "equal runs give equal bytes");
}

#[test]
fn one_run_shows_its_figures_curves_samples_and_recipe() {
    let mut run = full("demo", true);
    run.lines[2] = samples(0, "The [MASK] sat.", "the");
    run.lines.push(samples(40, "The [MASK] sat.", "cat"));
    run.recipe = "steps = 40\n".to_owned();
    run.facts = vec![("parameters".to_owned(), "11,267,900".to_owned())];
    let page = render(std::slice::from_ref(&run));
    let parts = [
        "<h1 dir=\"auto\">demo</h1>",
        "11,267,900 parameters",
        "<dt>held-out loss</dt><dd>5.000</dd>",
        "<dt>steps</dt><dd>40</dd>",
        "<dt>tokens</dt><dd>655 k</dd>",
        "<dt>time</dt><dd>12 s</dd>",
        "<dt>tokens/s</dt><dd>54.6 k</dd>",
        "<h3 id=\"chart-0\">Training loss</h3>",
        "Gradient norm",
        "The <mark>[MASK]</mark> sat.",
        "<th scope=\"col\" dir=\"auto\">step 40</th>",
        "<li style=\"--share:0.2500\"><span dir=\"auto\">cat</span> <span>25%</span></li>",
        "<pre dir=\"auto\" tabindex=\"0\">steps = 40\n</pre>",
        "<li><b>step 0</b> <span dir=\"auto\">demo</span></li>",
    ];
    for part in parts {
        assert!(page.contains(part), "{part}");
    }
    let data = data(&page);
    let titles: Vec<&str> = data["charts"].as_array().unwrap().iter().map(|c| c["title"].as_str().unwrap()).collect();
    let expected = [
        "Training loss",
        "Held-out loss",
        "Held-out accuracy",
        "Held-out zdemo",
        "Masked-LM loss",
        "Next-sentence loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
    ];
    assert_eq!(titles, expected);
    let train = &data["runs"][0]["train"];
    assert_eq!(train["step"].as_array().unwrap().len(), 40);
    assert_eq!(train["series"]["loss"]["y"][3], 5.0);
    assert!(train["series"]["loss"].get("mean").is_none() && train["series"]["loss"].get("rows").is_none());
    let phase = &data["runs"][0]["phases"][0];
    assert_eq!((phase["step"].as_u64(), phase["tokens"].as_u64()), (Some(30), Some(30 * 16_384)));
    // An evaluation between two lines lies between them in tokens and time.
    assert_eq!(data["runs"][0]["eval"]["tokens"][1], 10 * 16_384);
}

#[test]
fn several_runs_of_different_lengths_are_compared() {
    let run_of = |name: &str, steps: u64, recipe: &str| {
        let mut lines: Vec<Line> = (1..=steps).map(|step| Line::Train(train(step))).collect();
        lines.push(eval(steps, 10.0 - steps as f64 / 1000.0));
        lines.push(samples(steps, "The [MASK].", name));
        Run { recipe: recipe.to_owned(), ..run(name, lines) }
    };
    let mut runs = vec![
        run_of("short", 1, "steps = 1\nseed = 3\n[config]\nlayers = 2\n"),
        run_of("long", 5000, "steps = 5000\nseed = 3\n[config]\nlayers = 4\n"),
        run("none", vec![]),
    ];
    let page = render(&runs);
    tags(&page);
    let parts = [
        "3 runs compared",
        "data-run=\"2\" aria-pressed=\"true\"",
        "<strong title=\"the best\">5.000</strong>",
        "<code>config.layers</code>",
        "<td class=\"differs\">5000</td>",
        "Not shown: 1 that are the same in all runs",
        "long: the whole recipe",
        "short: over time",
    ];
    for part in parts {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<code>seed</code>"), "equal where there is a recipe at all");
    let data = data(&page);
    let curve = &data["runs"][1]["train"]["series"]["loss"];
    let points = curve["y"].as_array().unwrap();
    assert!(points.len() <= 1500 && points[0] == 10.0, "{}", points.len());
    assert_eq!(curve["mean"]["y"].as_array().unwrap().len(), 500);
    let steps = data["runs"][1]["train"]["step"].as_array().unwrap();
    let rows = curve["rows"].as_array().unwrap();
    assert_eq!(
        (rows.len(), &steps[rows[rows.len() - 1].as_u64().unwrap() as usize]),
        (points.len(), &Value::from(5000))
    );
    assert!(page.len() < 300_000, "{}", page.len());
    // More runs than colours.
    runs.resize_with(12, || run("more", vec![eval(1, 2.0)]));
    let page = render(&runs);
    tags(&page);
    assert!(page.contains("swatch c7\"") && page.contains("swatch c3 dashed\"") && !page.contains("swatch c8"));
}

#[test]
fn runs_with_little_or_nothing_to_show() {
    let page = render(&[run("new", vec![])]);
    tags(&page);
    assert!(page.contains("logged nothing yet") && !page.contains("<figure") && !page.contains("class=\"toolbar\""));
    assert_eq!(data(&page)["charts"], Value::Array(vec![]));
    tags(&render(&[]));
    tags(&render(&[run("a", vec![]), run("b", vec![])]));
    for lines in [vec![Line::Train(train(1))], vec![eval(0, 1.0)], vec![note(1, "x")], vec![samples(1, "no mask", "x")]]
    {
        tags(&render(&[run("one", lines)]));
    }
    // Nothing that a log can hold breaks it: lost numbers, steps out of order and twice, positions that go back.
    let lost = f64::NAN;
    let mut lines: Vec<Line> = (0..4000)
        .rev()
        .map(|step| {
            Line::Train(Train { loss: lost, tokens_per_s: 1e308, gradient_norm: -1e-300, seconds: lost, ..train(step) })
        })
        .collect();
    lines.extend([eval(5, lost), eval(5, 3.0), eval(u64::MAX, f64::INFINITY), eval(0, -1e308)]);
    lines.push(Line::Train(Train { tokens: 3, ..train(u64::MAX) }));
    let page = render(&[run("odd", lines)]);
    tags(&page);
    let data = data(&page);
    let train = &data["runs"][0]["train"];
    assert!(train["tokens"].as_array().unwrap().is_sorted_by_key(|n| n.as_u64().unwrap()));
    assert!(train["series"]["tokens_per_s"]["y"][0].is_null() && train["series"]["loss"]["y"][1].is_null());
    assert_eq!(data["runs"][0]["eval"]["series"]["loss"]["y"][1], 3.0, "the later of two counts");
    assert!(page.contains("<dt>held-out loss</dt><dd>not finite</dd>"), "no number is passed off as another");
}

#[test]
fn a_summary_has_the_last_and_the_best() {
    let lines = vec![
        Line::Train(train(1)),
        eval(10, 3.0),
        eval(20, 2.0),
        eval(30, f64::NAN),
        eval(40, 2.5),
        Line::Train(train(41)),
        note(50, "later"),
    ];
    let summary = run("a", lines).summary();
    let json = serde_json::to_value(&summary).unwrap();
    assert_eq!(json["name"], "a");
    assert_eq!((json["steps"].as_u64(), json["tokens"].as_u64()), (Some(50), Some(41 * 16_384)));
    assert_eq!((&json["final"]["loss"], &json["final_step"]), (&Value::from(2.5), &Value::from(40)));
    assert_eq!(json["best"]["loss"], serde_json::json!({ "step": 20, "value": 2.0 }));
    assert_eq!(json["best"]["accuracy"]["step"], 20, "more of it is better");
    let figures = summary.figures();
    assert_eq!((figures[0].label.as_str(), figures[0].text.as_str()), ("held-out loss", "2.500"));
    assert_eq!(figures[0].best, Some(("2.000".to_owned(), 20)));
    let empty = run("b", vec![]).summary();
    assert!(empty.is_empty() && serde_json::to_value(&empty).unwrap()["tokens_per_s"].is_null());
}

#[test]
fn a_directory_becomes_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mini");
    fs::create_dir(&path).unwrap();
    let message = Run::open(&path).unwrap_err().to_string();
    assert!(message.contains("mini holds no run (no metrics.jsonl)"), "{message}");
    assert!(matches!(Run::open(&directory.path().join("none")), Err(LogError::Checkpoint(CheckpointError::Io { .. }))));

    let mut log = MetricsLog::open(path.join("metrics.jsonl"), None).unwrap();
    log.append(&Line::Train(train(1))).unwrap();
    assert!(Run::open(&path).unwrap().facts.is_empty(), "the log alone is enough");
    fs::write(path.join("recipe.toml"), "steps = 1\n").unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/pretraining/config.json");
    fs::copy(golden, path.join("config.json")).unwrap();
    fs::write(path.join("results.json"), r#"{"blimp": {"after": 0.67}, "seeds": [1, 2], "tasks": [{"a": "b"}]}"#)
        .unwrap();
    let run = Run::open(&path).unwrap();
    assert_eq!((run.name.as_str(), run.recipe.as_str(), run.lines.len()), ("mini", "steps = 1\n", 1));
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(run.facts[..3], [pair("architecture", "BertForPreTraining"), run.facts[1].clone(), pair("layers", "2")]);
    // 71·24 + 40·24 + 2·24 embeddings and so on: what the golden files hold, added up.
    assert_eq!(run.facts[1], pair("parameters", &parameters_of_golden()));
    assert_eq!(run.results, [pair("blimp.after", "0.67"), pair("seeds", "[1,2]"), pair("tasks[0].a", "b")]);

    let page = path.join("report.html");
    write(&path, std::slice::from_ref(&run)).unwrap();
    assert!(
        is_report(&page) && !is_report(&path.join("recipe.toml")) && !is_report(&path) && !is_report(Path::new("no"))
    );
    let first = fs::read(&page).unwrap();
    write(&page, &[run]).unwrap();
    assert_eq!(first, fs::read(&page).unwrap());
    // A config of a family that is not known is shown as far as it goes.
    fs::write(path.join("config.json"), r#"{"model_type": "other", "hidden_size": 8}"#).unwrap();
    assert_eq!(Run::open(&path).unwrap().facts, [pair("hidden size", "8")]);
    fs::write(path.join("config.json"), r#"{"hidden_size": 8, "#).unwrap();
    assert!(Run::open(&path).unwrap_err().to_string().contains("config.json, line 1"));
}

fn parameters_of_golden() -> String {
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/pretraining/model.safetensors");
    let bytes = fs::read(golden).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let total: usize = tensors.iter().map(|(_, tensor)| tensor.shape().iter().product::<usize>()).sum();
    let digits = total.to_string();
    let (head, tail) = digits.split_at(digits.len() - 3);
    format!("{head},{tail}")
}
