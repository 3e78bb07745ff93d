//! The sets of Ettinger (2020) as tables between tabs, known by the names of their columns.

use std::path::Path;

use anyhow::Context;

use crate::input::Lines;

/// Which set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Set {
    /// CPRAG-102: inference by common sense, from Federmeier and Kutas (1999).
    CommonSense,
    /// ROLE-88: who did what to whom, from Chow et al. (2016).
    Roles,
    /// NEG-136-SIMP: categories, from Fischler et al. (1983).
    SimpleNegation,
    /// NEG-136-NAT: natural sentences, from Nieuwland and Kuperberg (2008).
    NaturalNegation,
}

const SETS: [(Set, &str, &[&str]); 4] = [
    (
        Set::CommonSense,
        "CPRAG-102",
        &["item", "context_s1", "context_s2", "expected", "within_category", "between_category", "constraint"],
    ),
    (Set::Roles, "ROLE-88", &["item", "context", "expected", "exp_cloze", "target", "tgt_cloze", "tgt_cloze(strict)"]),
    (
        Set::NaturalNegation,
        "NEG-136-NAT",
        &["item", "context_aff", "context_neg", "target_aff", "target_neg", "licensing"],
    ),
    (Set::SimpleNegation, "NEG-136-SIMP", &["item", "context_aff", "context_neg", "target_aff", "target_neg"]),
];

impl Set {
    /// As the paper calls it.
    pub(super) fn name(self) -> &'static str {
        SETS.iter().find(|(set, ..)| *set == self).map_or("", |(_, name, _)| *name)
    }
}

/// A context, the word whose probability is asked for there, and the words that people expect.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Question {
    pub(super) context: String,
    pub(super) target: String,
    pub(super) expected: Vec<String>,
}

/// What belongs together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Item {
    /// CPRAG: expected, within category, between category. ROLE: the good order (a), then the reversed one (b). NEG: the true and the
    /// false word of the affirmative sentence, then those of the negative one.
    pub(super) questions: Vec<Question>,
    /// CPRAG: whether the context is of high constraint; NEG-NAT: whether negation is licensed.
    pub(super) marked: Option<bool>,
    /// ROLE: of each question, how many people said the most expected word, and the target.
    pub(super) clozes: Vec<(f64, f64)>,
}

/// Reads a set.
pub(super) fn read(data: &Path) -> anyhow::Result<(Set, Vec<Item>)> {
    let mut lines = Lines::open(Some(data))?;
    let mut set: Option<(Set, usize)> = None;
    let mut items = Vec::new();
    let mut waiting: Vec<(String, String, Question, (f64, f64))> = Vec::new();
    while let Some(line) = lines.next_line()? {
        let cells: Vec<&str> = line.trim_end_matches(['\r', '\n']).split('\t').map(str::trim).collect();
        if cells.iter().all(|cell| cell.is_empty()) {
            continue;
        }
        let place = || format!("{}, line {}", lines.name, lines.number);
        let Some((set, width)) = set else {
            set = Some(known(&cells).with_context(place)?);
            continue;
        };
        let filled = cells.len() >= width && cells[..width].iter().all(|cell| !cell.is_empty());
        anyhow::ensure!(filled, "{}: expected {width} columns with tabs between them, found {}", place(), cells.len());
        match set {
            Set::CommonSense => items.push(common_sense(&cells).with_context(place)?),
            Set::SimpleNegation | Set::NaturalNegation => items.push(negation(set, &cells).with_context(place)?),
            Set::Roles => {
                let (number, condition, question, clozes) = role(&cells).with_context(place)?;
                let other = waiting.iter().position(|(other, own, ..)| *other == number && *own != condition);
                let Some(other) = other else {
                    waiting.push((number, condition, question, clozes));
                    continue;
                };
                let (_, _, first, first_clozes) = waiting.swap_remove(other);
                let mut pair = [(first, first_clozes), (question, clozes)];
                if condition == "a" {
                    pair.reverse();
                }
                let (questions, clozes) = pair.into_iter().unzip();
                items.push(Item { questions, marked: None, clozes });
            }
        }
    }
    if let Some((number, condition, ..)) = waiting.first() {
        let other = if condition == "a" { "b" } else { "a" };
        anyhow::bail!("{}: item {number}-{condition} has no {number}-{other}", lines.name);
    }
    match set {
        Some((set, _)) if !items.is_empty() => Ok((set, items)),
        _ => anyhow::bail!("{} has no items: expected a set of lm-diagnostics with its header", lines.name),
    }
}

/// The set whose columns these are, and how many it has.
fn known(cells: &[&str]) -> anyhow::Result<(Set, usize)> {
    let fits = |columns: &[&str]| cells.len() >= columns.len() && cells.iter().zip(columns).all(|(a, b)| a == b);
    // The natural sentences have one column more than the simple ones, and come first.
    if let Some((set, _, columns)) = SETS.iter().find(|(_, _, columns)| fits(columns)) {
        return Ok((*set, columns.len()));
    }
    let expected: Vec<String> =
        SETS.iter().map(|(_, name, columns)| format!("{name}: {}", columns.join(", "))).collect();
    anyhow::bail!("unknown columns {cells:?}; expected one of\n  {}", expected.join("\n  "))
}

fn question(context: &str, target: &str, expected: &[&str]) -> Question {
    // Of an expected phrase the first word counts.
    let first = |words: &&str| words.split_whitespace().next().unwrap_or_default().to_owned();
    let target = first(&target);
    Question { context: context.to_owned(), target, expected: expected.iter().map(first).collect() }
}

fn common_sense(cells: &[&str]) -> anyhow::Result<Item> {
    let context = format!("{} {}", cells[1], cells[2]);
    let marked = match cells[6] {
        "H" => true,
        "L" => false,
        other => anyhow::bail!("constraint is {other:?}: expected H or L"),
    };
    let questions = cells[3..6].iter().map(|target| question(&context, target, &cells[3..4])).collect();
    Ok(Item { questions, marked: Some(marked), clozes: Vec::new() })
}

fn role(cells: &[&str]) -> anyhow::Result<(String, String, Question, (f64, f64))> {
    let (number, condition) = cells[0]
        .split_once('-')
        .filter(|(_, condition)| ["a", "b"].contains(condition))
        .with_context(|| format!("item is {:?}: expected a number with -a or -b", cells[0]))?;
    let cloze = |i: usize, name: &str| {
        let share: Option<f64> = cells[i].parse().ok().filter(|share| (0.0..=1.0).contains(share));
        share.with_context(|| format!("{name} is {:?}: expected a share from 0 to 1", cells[i]))
    };
    let expected: Vec<&str> = cells[2].split('|').collect();
    let clozes = (cloze(3, "exp_cloze")?, cloze(5, "tgt_cloze")?);
    Ok((number.to_owned(), condition.to_owned(), question(cells[1], cells[4], &expected), clozes))
}

fn negation(set: Set, cells: &[&str]) -> anyhow::Result<Item> {
    let [affirmative, negative, of_affirmative, of_negative] = [cells[1], cells[2], cells[3], cells[4]];
    let marked = match cells.get(5).filter(|_| set == Set::NaturalNegation) {
        None => None,
        Some(&"Y") => Some(true),
        Some(&"N") => Some(false),
        Some(other) => anyhow::bail!("licensing is {other:?}: expected Y or N"),
    };
    // The simple ones end with (a|an), as the target needs it.
    let context = |sentence: &str, target: &str| match (set, sentence.split_once(" (")) {
        (Set::SimpleNegation, found) => {
            let article = if target.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
            format!("{} {article}", found.map_or(sentence, |(before, _)| before))
        }
        _ => sentence.to_owned(),
    };
    let ask = |sentence: &str, target: &str, expected: &str| question(&context(sentence, target), target, &[expected]);
    let questions = vec![
        ask(affirmative, of_affirmative, of_affirmative),
        ask(affirmative, of_negative, of_affirmative),
        ask(negative, of_negative, of_negative),
        ask(negative, of_affirmative, of_negative),
    ];
    Ok(Item { questions, marked, clozes: Vec::new() })
}
