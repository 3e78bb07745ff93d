//! Examples of tasks as `transformers` lays them out, and answers from fixed logits as the reference procedure finds them:
//! `tools/golden/task_features.py` made the files.

use std::ops::Range;
use std::path::Path;

use henson_text::{
    AnswerSettings, BeamSpan, QuestionSettings, SpanBeams, SpanLogits, Stride, Tokenizer, byte_of_code_point,
    code_point_offsets, find_answers, find_beam_answers, join_words, split_words,
};
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::support::{CASED, ROBERTA, UNCASED, assert_error, small};

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/features").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn get<T: DeserializeOwned>(value: &Value, key: &str) -> T {
    serde_json::from_value(value[key].clone()).unwrap_or_else(|error| panic!("{key} of {value}: {error}"))
}

fn each(kind: &str, mut check: impl FnMut(&Tokenizer, &Value)) {
    let golden = golden("features.json");
    for (name, tokenizer) in [("bert-base-uncased", &*UNCASED), ("bert-base-cased", &*CASED)] {
        let cases = golden[name][kind].as_array().unwrap();
        assert!(!cases.is_empty());
        cases.iter().for_each(|case| check(tokenizer, case));
    }
}

fn overlapping(case: &Value) -> QuestionSettings {
    let stride = Stride::Overlap(get(case, "overlap"));
    QuestionSettings { max_length: get(case, "max_length"), stride, max_question: 64 }
}

#[test]
fn questions_as_transformers_lays_them_out() {
    each("questions", |tokenizer, case| {
        let passage: String = get(case, "passage");
        let question: String = get(case, "question");
        let made = tokenizer.question(&question, &passage, &overlapping(case)).unwrap();
        let byte = |code_point: usize| byte_of_code_point(&passage, code_point).unwrap();
        let answer: Option<Range<usize>> =
            get::<Option<(usize, usize)>>(case, "answer").map(|(start, end)| byte(start)..byte(end));
        let expected = case["windows"].as_array().unwrap();
        assert_eq!(made.windows.len(), expected.len(), "{case}");
        for (number, (window, expected)) in made.windows.iter().zip(expected).enumerate() {
            assert_eq!(window.ids, get::<Vec<u32>>(expected, "ids"), "{case}");
            assert_eq!(window.segments, get::<Vec<u32>>(expected, "segments"), "{case}");
            let offsets: Vec<Option<(usize, usize)>> = (0..window.len())
                .map(|position| {
                    let text = if window.first.contains(&position) { &question } else { &passage };
                    window.offsets[position].map(|at| code_point_offsets(text, &[at])[0])
                })
                .collect();
            assert_eq!(offsets, get::<Vec<Option<(usize, usize)>>>(expected, "offsets"), "{case}");
            let targets = made.targets(number, answer.as_ref());
            assert_eq!(targets, get(expected, "targets"), "window {number}: {case}");
        }
        // The same windows by their step.
        let room = made.windows[0].windowed_positions().len();
        if made.windows.len() > 1 {
            let step = Stride::Step(room - get::<usize>(case, "overlap"));
            let by_step = QuestionSettings { stride: step, ..overlapping(case) };
            assert_eq!(tokenizer.question(&question, &passage, &by_step).unwrap().windows, made.windows);
        }
    });
}

#[test]
fn answers_that_touch_no_piece_or_share_one() {
    let made = UNCASED.question("who", " a  b ", &QuestionSettings::default()).unwrap();
    assert_eq!(made.pieces_of(&(0..1)), None);
    assert_eq!(made.pieces_of(&(1..1)), None);
    assert_eq!(made.pieces_of(&(0..2)), Some(0..1));
    assert_eq!(made.pieces_of(&(2..6)), Some(1..2));
    assert_eq!(made.targets(0, Some(&(2..3))), (0, 0));
    assert_eq!(made.targets(0, Some(&(0..6))), (3, 4));
    assert_eq!(made.targets(0, Some(&(90..99))), (0, 0));
    assert_eq!(made.targets(7, Some(&(0..6))), (0, 0), "a window that is not there");
    // One character in several pieces of bytes: all of them.
    let made = ROBERTA.question("who", "x\u{1f438}y", &QuestionSettings::default()).unwrap();
    let frog = made.pieces_of(&(1..5)).unwrap();
    assert!(frog.len() > 1, "{frog:?}");
    assert_eq!(made.pieces_of(&(0..6)), Some(0..made.passage.len()));
}

#[test]
fn tags_on_first_pieces_as_transformers_puts_them() {
    each("tagged", |tokenizer, case| {
        let words: Vec<String> = get(case, "words");
        let (text, places) = join_words(&words);
        let made = tokenizer.words_in_windows(&text, &places, get(case, "max_length"), None).unwrap();
        assert_eq!(made.windows.len(), 1);
        assert_eq!(made.windows[0].ids, get::<Vec<u32>>(case, "ids"), "{case}");
        let labels: Vec<Option<u32>> = get::<Vec<u32>>(case, "labels").into_iter().map(Some).collect();
        let got: Vec<i64> = made.labels(0, &labels).into_iter().map(|label| label.map_or(-100, i64::from)).collect();
        assert_eq!(got, get::<Vec<i64>>(case, "of_pieces"), "{case}");
    });
}

#[test]
fn every_word_is_read_once_where_it_has_most_context() {
    let text = "Jim Henson was a puppeteer. ".repeat(20);
    let words = split_words(&text);
    let tokenizer = small();
    let all: Vec<Option<u32>> = (0..words.len() as u32).map(Some).collect();
    let whole = tokenizer.words_in_windows(&text, &words, 1000, Some(Stride::Step(1))).unwrap();
    assert_eq!(whole.windows.len(), 1);
    for (max_length, stride) in
        [(22, Stride::Step(10)), (22, Stride::Overlap(15)), (7, Stride::Step(5)), (12, Stride::Step(1))]
    {
        let made = tokenizer.words_in_windows(&text, &words, max_length, Some(stride)).unwrap();
        assert!(made.windows.len() > 1 && made.dropped == 0);
        let mut seen: Vec<u32> = (0..made.windows.len()).flat_map(|w| made.labels(w, &all)).flatten().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..words.len() as u32).collect::<Vec<_>>(), "{max_length} {stride:?}");
        for (word, place) in made.places.iter().enumerate() {
            let (window, position) = place.unwrap();
            let (first_window, first_position) = whole.places[word].unwrap();
            assert_eq!(made.windows[window].offsets[position], whole.windows[first_window].offsets[first_position]);
            assert_eq!(made.windows[window].offsets[position].unwrap().0, words[word].start);
        }
    }
    let cut = tokenizer.words_in_windows(&text, &words, 12, None).unwrap();
    assert_eq!(cut.places.iter().flatten().count(), 7, "ten pieces of seven words");
    assert_eq!(cut.dropped, 20 * 9 - 10);
    assert!(tokenizer.words_in_windows("", &[], 12, None).unwrap().places.is_empty());
}

#[test]
fn words_amid_their_context() {
    let tokenizer = small();
    // Three sentences, some words of several pieces.
    let words: Vec<&str> = "Jim was a puppeteer . A puppeteer was Jim . He was a man .".split(' ').collect();
    let (text, places) = join_words(&words);
    let whole = tokenizer.words_in_windows(&text, &places, 1000, None).unwrap();
    let shown = |features: &henson_text::Features| {
        let (first, last) = (features.first.start, features.first.end - 1);
        text[features.offsets[first].unwrap().0..features.offsets[last].unwrap().1].to_owned()
    };
    let own = 5..10;
    let pieces = |words: std::ops::Range<usize>| {
        tokenizer.encode(&text[places[words.start].start..places[words.end - 1].end]).unwrap().len()
    };
    let (before, inside, after) = (pieces(0..5), pieces(5..10), pieces(10..15));
    assert!(before > 5 && inside > 5 && after >= 5, "{before} {inside} {after}");
    for max_length in 3..2 + before + inside + after + 3 {
        let made = tokenizer.words_in_context(&text, &places, own.clone(), max_length).unwrap();
        assert_eq!((made.places.len(), made.dropped), (5, 0));
        for (word, place) in own.clone().zip(&made.places) {
            let (window, position) = place.unwrap();
            let in_whole = whole.places[word].unwrap().1;
            assert_eq!(made.windows[window].ids[position], whole.windows[0].ids[in_whole]);
            assert_eq!(made.windows[window].offsets[position], whole.windows[0].offsets[in_whole], "{max_length}");
        }
        let room = max_length - 2;
        if room < inside {
            assert!(made.windows.len() > 1 && made.windows.iter().all(|window| !shown(window).contains("He")));
            continue;
        }
        let [window] = made.windows.as_slice() else { panic!("{made:?}") };
        assert_eq!(window.first.len(), room.min(before + inside + after), "all of the room is used");
        let left = before - window.first_piece;
        let right = window.first.len() - inside - left;
        // As much on either side, but for an odd piece, unless one has no more.
        let even = left == right || left + 1 == right;
        assert!(even || left == before && right > left || right == after && left > right, "{left} {right}");
    }
    let first = tokenizer.words_in_context(&text, &places, 0..1, 6).unwrap();
    assert_eq!((shown(&first.windows[0]).as_str(), first.places.len()), ("Jim was a pupp", 1));
    let none = tokenizer.words_in_context(&text, &places, 3..3, 8).unwrap();
    assert!(none.places.is_empty() && none.windows.len() == 1);
    assert!(tokenizer.words_in_context(&text, &places, 0..1, 2).unwrap_err().to_string().contains("special tokens"));
}

#[test]
fn pairs_and_choices_as_transformers_lays_them_out() {
    each("pairs", |tokenizer, case| {
        let encode = |key: &str| tokenizer.encode(&get::<String>(case, key)).unwrap();
        let made = tokenizer.template().pair(&encode("first"), &encode("second"), get(case, "max_length")).unwrap();
        assert_eq!(made.ids, get::<Vec<u32>>(case, "ids"), "{case}");
        assert_eq!(made.segments, get::<Vec<u32>>(case, "segments"), "{case}");
    });
    each("choices", |tokenizer, case| {
        let choices: Vec<String> = get(case, "choices");
        let choices: Vec<&str> = choices.iter().map(String::as_str).collect();
        let made = tokenizer.choices(&get::<String>(case, "context"), &choices, get(case, "max_length")).unwrap();
        let (ids, segments): (Vec<_>, Vec<_>) = made.into_iter().map(|made| (made.ids, made.segments)).unzip();
        assert_eq!(ids, get::<Vec<Vec<u32>>>(case, "ids"), "{case}");
        assert_eq!(segments, get::<Vec<Vec<u32>>>(case, "segments"), "{case}");
    });
}

#[test]
fn answers_from_fixed_logits_are_the_references() {
    let golden = golden("answers.json");
    let (mut refused, mut answered) = (0, 0);
    for case in golden.as_array().unwrap() {
        let passage: String = get(case, "passage");
        let question = UNCASED.question(&get::<String>(case, "question"), &passage, &overlapping(case)).unwrap();
        let logits: Vec<(Vec<f32>, Vec<f32>)> = get(case, "logits");
        let logits: Vec<SpanLogits> = logits.into_iter().map(|(start, end)| SpanLogits { start, end }).collect();
        let settings = AnswerSettings {
            n_best: get(case, "n_best"),
            longest: get(case, "longest"),
            no_answer: get(case, "threshold"),
        };
        let answers = find_answers(&question, &logits, &passage, &settings);
        let expected: Vec<(String, f32, f32, f64)> = get(&case["expected"], "n_best");
        let got: Vec<(&str, f32, f32)> =
            answers.candidates.iter().map(|c| (c.text(&passage), c.start_logit, c.end_logit)).collect();
        let wanted: Vec<(&str, f32, f32)> = expected.iter().map(|(text, s, e, _)| (text.as_str(), *s, *e)).collect();
        assert_eq!(got, wanted);
        for (candidate, (text, .., probability)) in answers.candidates.iter().zip(&expected) {
            assert!((candidate.probability - probability).abs() < 1e-12, "{text}");
        }
        assert_eq!(answers.best().unwrap().text(&passage), get::<String>(&case["expected"], "answer"));
        assert_eq!(answers.null_odds, get(&case["expected"], "odds"));
        match answers.best().unwrap().place {
            Some(_) => answered += 1,
            None => refused += 1,
        }
    }
    assert!(refused >= 2 && answered >= 6, "the cases are of both kinds: {refused} {answered}");
}

#[test]
fn passages_without_an_answer() {
    let question = UNCASED.question("who", "", &QuestionSettings::default()).unwrap();
    let logits = [SpanLogits { start: vec![1.0; 4], end: vec![1.0; 4] }];
    let must = find_answers(&question, &logits, "", &AnswerSettings::default());
    assert_eq!((must.candidates.len(), must.chosen, must.null_odds), (0, None, None));
    let may = AnswerSettings { no_answer: Some(5.0), ..AnswerSettings::default() };
    let may = find_answers(&question, &logits, "", &may);
    assert_eq!((may.best().unwrap().place.clone(), may.null_odds), (None, Some(2.0)));
    // Logits for other windows than these do no harm.
    let nothing = find_answers(&question, &[], "", &AnswerSettings::default());
    assert_eq!(nothing.candidates, []);
}

/// Spans are ranked by both probabilities, whatever window they are of; those that are none are left out. Whether there is an answer is
/// known apart from them.
#[test]
fn answers_from_beams() {
    let passage = "six seven one two three four";
    let settings = QuestionSettings { max_length: 8, stride: Stride::Step(4), max_question: 1 };
    let question = UNCASED.question("who", passage, &settings).unwrap();
    assert_eq!((question.windows.len(), question.windows[0].windowed_positions()), (2, 3..7));
    let span = |start, end, p: f32, q: f32| BeamSpan { start, end, start_score: p.ln(), end_score: q.ln() };
    let first = vec![
        span(3, 4, 0.5, 0.4),
        span(4, 4, 0.3, 0.5),
        // Backwards, into what stands behind the passage, at the question, and at "no answer".
        span(5, 4, 0.9, 0.9),
        span(4, 7, 0.9, 0.9),
        span(1, 1, 0.9, 0.9),
        span(0, 0, 0.9, 0.9),
    ];
    // The last two tokens are the second window's.
    let beams =
        [SpanBeams { no_answer: 2.0, spans: first }, SpanBeams { no_answer: -1.0, spans: vec![span(3, 4, 0.6, 0.5)] }];
    for one in &beams {
        assert_eq!(SpanBeams::from_numbers(&one.to_numbers()), *one);
    }
    let must = AnswerSettings::default();
    let answers = find_beam_answers(&question, &beams, passage, &must);
    let texts: Vec<&str> = answers.candidates.iter().map(|candidate| candidate.text(passage)).collect();
    assert_eq!(texts, ["three four", "six seven", "seven"]);
    assert_eq!((answers.chosen, answers.null_odds), (Some(0), None));
    assert!((answers.candidates[0].probability - 0.3 / 0.65).abs() < 1e-6);
    let alone = AnswerSettings { longest: 1, ..must };
    let answers = find_beam_answers(&question, &beams, passage, &alone);
    assert_eq!(answers.best().unwrap().text(passage), "seven");
    // The window that denies it least counts: −1.
    let nothing = 1.0 / (1.0 + 1_f64.exp());
    for (threshold, text) in [(0.0, "three four"), (-1.5, "")] {
        let may = AnswerSettings { no_answer: Some(threshold), ..must };
        let answers = find_beam_answers(&question, &beams, passage, &may);
        assert_eq!((answers.best().unwrap().text(passage), answers.null_odds), (text, Some(-1.0)));
        let none = answers.candidates.iter().find(|candidate| candidate.place.is_none()).unwrap();
        assert!((none.probability - nothing).abs() < 1e-6, "{}", none.probability);
        assert!(answers.candidates.is_sorted_by(|a, b| a.probability >= b.probability));
    }
    let none = SpanBeams { no_answer: 0.5, spans: Vec::new() };
    let may = AnswerSettings { no_answer: Some(0.0), ..must };
    let answers = find_beam_answers(&question, &[none.clone(), none], passage, &may);
    assert_eq!((answers.best().unwrap().place.clone(), answers.null_odds), (None, Some(0.5)));
    assert_eq!(find_beam_answers(&question, &[], passage, &may).candidates, []);
}

#[test]
fn windows_that_cannot_be() {
    let settings = |max_length, stride| QuestionSettings { max_length, stride, max_question: 4 };
    let ask = |settings: QuestionSettings| UNCASED.question("one two three four five", "six seven", &settings);
    assert_error(ask(settings(10, Stride::Overlap(3))), &["overlap by 3", "room for 3", "smaller overlap"]);
    assert_error(ask(settings(10, Stride::Step(0))), &["stride 0"]);
    assert_error(ask(settings(7, Stride::Overlap(1))), &["max_length 7", "8 positions"]);
    let made = ask(settings(8, Stride::Overlap(0))).unwrap();
    assert_eq!((made.windows.len(), made.dropped), (2, 1));
    assert_eq!(byte_of_code_point("\u{e9}a", 1), Some(2));
    assert_eq!(byte_of_code_point("\u{e9}a", 2), Some(3));
    assert_eq!(byte_of_code_point("\u{e9}a", 3), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn words_leave_only_white_space_out(text in ".{0,60}") {
        let mut end = 0;
        for word in split_words(&text) {
            prop_assert!(text[end..word.start].chars().all(char::is_whitespace));
            prop_assert!(!text[word.clone()].is_empty() && !text[word.clone()].contains(char::is_whitespace));
            end = word.end;
        }
        prop_assert!(text[end..].chars().all(char::is_whitespace));
    }

    /// Any text, any answer in it, any logits: windows show what they are asked for, and answers are parts of the passage.
    #[test]
    fn any_passage_can_be_asked(
        passage in "[a-z é中🐸.\u{301}\u{200d}\n]{0,80}",
        (from, to) in (0_usize..90, 0_usize..90),
        max_length in 6_usize..40,
        overlap in 0_usize..3,
        logits in proptest::collection::vec(-9_i8..9, 64),
    ) {
        let settings = QuestionSettings { max_length, stride: Stride::Overlap(overlap), max_question: 1 };
        for tokenizer in [&*UNCASED, &*ROBERTA] {
            let Ok(question) = tokenizer.question("who", &passage, &settings) else { continue };
            let answer = from.min(to)..from.max(to);
            let shown = (0..question.windows.len()).filter(|&window| {
                let (start, end) = question.targets(window, Some(&answer));
                let window = &question.windows[window];
                start != 0 && {
                    let at = |position: usize| window.offsets[position].unwrap();
                    let (first, last) = (at(start), at(end));
                    assert!(start <= end && first.1 > answer.start && last.0 < answer.end);
                    true
                }
            });
            let fits = question.pieces_of(&answer).is_some_and(|pieces| pieces.len() == 1);
            prop_assert!(shown.count() > 0 || !fits, "a single piece is in some window");
            let mut next = logits.iter().cycle().map(|&x| f32::from(x));
            let logits: Vec<SpanLogits> = question
                .windows
                .iter()
                .map(|window| SpanLogits {
                    start: next.by_ref().take(window.len()).collect(),
                    end: next.by_ref().take(window.len()).collect(),
                })
                .collect();
            let settings = AnswerSettings { no_answer: Some(0.0), ..AnswerSettings::default() };
            let answers = find_answers(&question, &logits, &passage, &settings);
            prop_assert!(answers.best().is_some() && answers.candidates.len() <= 21);
            let total: f64 = answers.candidates.iter().map(|candidate| candidate.probability).sum();
            prop_assert!((total - 1.0).abs() < 1e-9);
            for candidate in &answers.candidates {
                prop_assert_eq!(candidate.place.is_none(), candidate.text(&passage).is_empty());
            }
        }
    }
}
