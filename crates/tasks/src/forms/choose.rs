//! The best of several continuations.

use henson_data::tables::{Column, Row};
use henson_infer::softmax;
use serde_json::Value;

use super::classify::class_pairs;
use super::*;
use crate::read::rows::{need, place};

pub(crate) static CHOOSE: Form = form(&Choose { asks: false });

/// COPA: a column `question` says whether the cause or the effect is to be chosen.
pub(crate) static COPA: Form = form(&Choose { asks: true });

const fn form(steps: &'static Choose) -> Form {
    let command = "choose --model DIR --context 'A beginning' 'an end' 'another end'";
    // Choices are compared by one number each: there is no sum of windows that would mean the same.
    let form = Form::new(Head::Choice, "multiple-choice", "AutoModelForMultipleChoice", command, steps);
    Form { reads_whole: true, ..form }
}

#[derive(Debug)]
struct Choose {
    asks: bool,
}

impl Steps for Choose {
    /// The second column holds the beginning of all continuations.
    fn input(&self, cells: &Cells<'_>) -> Result<Input, TaskError> {
        let beginning = match &cells.second {
            None => None,
            Some((column, value)) => {
                text(value).map_err(|problem| cells.wrong(format!("column {column}: {problem}")))?
            }
        };
        let beginning = beginning.filter(|beginning| !beginning.trim().is_empty());
        let (column, endings) = choices(cells.path, cells.row, &cells.files.choice_columns)?;
        let mut texts = Vec::with_capacity(endings.len());
        for (name, ending) in endings {
            if ending.trim().is_empty() {
                return Err(cells.wrong(format!("choice {name:?} of {column} is empty")));
            }
            texts.push(match &beginning {
                Some(beginning) => format!("{} {ending}", beginning.trim_end()),
                None => ending,
            });
        }
        if texts.len() < 2 {
            return Err(cells.wrong(format!("{} choices in {column}: expected at least 2", texts.len())));
        }
        let context = match self.asks {
            true => format!("{} {}", cells.first.trim_end(), asked(cells)?),
            false => cells.first.clone(),
        };
        Ok(Input::Choices { context, endings: texts })
    }

    fn target(&self, cells: &Cells<'_>, _collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        let in_label = |problem: String| cells.in_label(&problem);
        let label = cells.label.as_ref().map(|(_, value)| text(value)).transpose().map_err(in_label)?.flatten();
        let label = label.map(|label| label.trim().to_owned()).filter(|label| !label.is_empty());
        let Some(label) = label else { return Ok(Target::None) };
        let (_, endings) = choices(cells.path, cells.row, &cells.files.choice_columns)?;
        let names: Vec<&str> = endings.iter().map(|(name, _)| name.as_str()).collect();
        Ok(Target::Class(chosen(&label, &names).map_err(in_label)?))
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Choices { context, endings } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let endings: Vec<&str> = endings.iter().map(String::as_str).collect();
        Ok(Prepared::Plain(tokenizer.choices(context, &endings, lengths.most)?))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let Target::Class(class) = target else { return Vec::new() };
        vec![Instance {
            sequences: prepared.into_sequences().collect(),
            labels: vec![Some(*class)],
            ..Instance::default()
        }]
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Choices)
    }

    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => {
                let sequences = prepared.into_sequences().collect();
                vec![Instance { sequences, labels: vec![None], ..Instance::default() }]
            }
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Choice({})", joined(&instance.labels))
    }

    fn scores(&self, _problem: Option<Problem>, _prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        vec![softmax(&logits.concat())]
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let pairs = class_pairs(set, predictions, usize::MAX)?;
        let mut mistakes = Vec::new();
        for ((example, prediction), (expected, class)) in set.examples.iter().zip(predictions).zip(&pairs) {
            let Input::Choices { endings, .. } = &example.input else { return Err(wrong_kind(set, example)) };
            if expected != class {
                let ending = |class: u32| endings.get(class as usize).map_or("?", String::as_str).to_owned();
                mistakes.push(mistake(example, ending(*expected), ending(*class), prediction.confidence()));
            }
        }
        let right = pairs.iter().filter(|(expected, class)| expected == class).count();
        let accuracy = right as f64 / pairs.len().max(1) as f64;
        Ok(Score { metrics: vec![("accuracy", accuracy)], mistakes, ..Score::default() })
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        let choices = match &set.examples[found.example].input {
            Input::Choices { endings, .. } => endings.len(),
            _ => 0,
        };
        let word = found.word()?;
        let letter = match word.as_bytes() {
            [letter] if letter.is_ascii_alphabetic() => Some(u32::from(letter.to_ascii_uppercase() - b'A')),
            _ => None,
        };
        let class = letter.or(word.parse().ok()).filter(|class| (*class as usize) < choices);
        let problem = || format!("expected the number of one of {choices} choices, from 0, found {word:?}");
        Ok(Prediction::Class { class: class.ok_or_else(problem)?, scores: Vec::new() })
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        if set.task.submission.is_some() {
            return predictions::lines(set, predictions, |prediction| match prediction {
                Prediction::Class { class, .. } => Some(Value::from(*class)),
                _ => None,
            });
        }
        let rows = set.examples.iter().zip(predictions).map(|(example, prediction)| match prediction {
            Prediction::Class { class, .. } => Ok(format!("{},{class}\n", quoted(&example.id))),
            _ => Err(wrong_kind(set, example)),
        });
        let text = "id,prediction\n".to_owned() + &rows.collect::<Result<String, _>>()?;
        Ok(vec![("predictions.csv".to_owned(), text.into_bytes())])
    }
}

/// What COPA asks, in words, as jiant has them.
fn asked(cells: &Cells<'_>) -> Result<&'static str, TaskError> {
    let role = Role { what: "what is asked", flag: "--task copa", names: &["question"] };
    let (_, value) = need(cells.path, cells.row, None, &role, None)?;
    match value.as_str() {
        Some("cause") => Ok("What was the cause of this?"),
        Some("effect") => Ok("What happened as a result?"),
        _ => Err(cells.wrong(format!("\"question\": expected \"cause\" or \"effect\", found {value}"))),
    }
}

fn quoted(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}

type NamedTexts = Vec<(String, String)>;

/// The choices of a row, each with its name, and where they were found.
fn choices(path: &Path, row: &Row, user: &[Column]) -> Result<(String, NamedTexts), TaskError> {
    let wrong = |problem: String| TaskError::row(path, place(path, row), problem);
    let role = Role { what: "the choices", flag: "--choice-columns", names: &["ending0", "A", "choice0", "choices"] };
    let mut columns: Vec<Column> = user.to_vec();
    if columns.is_empty() {
        columns = usual_choices(row);
    }
    if let [column] = &columns[..] {
        return Ok((
            format!("column {column}"),
            listed_choices(need(path, row, Some(column), &role, None)?.1).map_err(wrong)?,
        ));
    }
    if columns.is_empty() {
        need(path, row, None, &role, None)?;
    }
    let mut found = NamedTexts::new();
    for column in &columns {
        let (_, value) = need(path, row, Some(column), &role, None)?;
        let name = match column {
            Column::Name(name) => name.clone(),
            Column::Number(number) => number.to_string(),
        };
        found.push((name, text(value).map_err(wrong)?.unwrap_or_default()));
    }
    // A table must have the same columns for questions with fewer choices.
    while found.last().is_some_and(|(_, ending)| ending.trim().is_empty()) {
        found.pop();
    }
    let names: Vec<String> = columns.iter().map(Column::to_string).collect();
    Ok((format!("columns {}", names.join(", ")), found))
}

/// `ending0`, `ending1`, …, or `A`, `B`, …, or one column with a list.
fn usual_choices(row: &Row) -> Vec<Column> {
    for stem in ["ending", "choice", "option", ""] {
        for first in ['0', '1', 'A'] {
            let names = (0..26).map(|i| match first {
                'A' => format!("{stem}{}", char::from(b'A' + i)),
                first => format!("{stem}{}", i + u8::from(first == '1')),
            });
            let columns: Vec<Column> = names.map(Column::Name).take_while(|column| row.get(column).is_some()).collect();
            if columns.len() > 1 {
                return columns;
            }
        }
    }
    let lists = ["endings", "choices", "options"].iter().map(|name| Column::Name((*name).to_owned()));
    lists.filter(|column| row.get(column).is_some()).take(1).collect()
}

/// A list of choices, or two lists as ARC has them: their texts and their names.
fn listed_choices(value: &Value) -> Result<NamedTexts, String> {
    if let (Some(names), Some(endings)) = (value.get("label"), value.get("text")) {
        let (names, endings) = (texts(names)?, texts(endings)?);
        return match names.len() == endings.len() {
            true => Ok(names.into_iter().zip(endings).collect()),
            false => Err(format!("{} choices have {} names", endings.len(), names.len())),
        };
    }
    let endings = texts(value)?;
    Ok(endings.into_iter().enumerate().map(|(i, ending)| (i.to_string(), ending)).collect())
}

/// Which choice a label means: by its name, by its number from 0, or by its letter.
fn chosen(label: &str, names: &[&str]) -> Result<u32, String> {
    let by_name = names.iter().position(|name| *name == label);
    let by_number = || label.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && *number >= 0.0);
    let by_letter = || match label.as_bytes() {
        [letter] if letter.is_ascii_alphabetic() => Some(usize::from(letter.to_ascii_uppercase() - b'A')),
        _ => None,
    };
    let found = by_name.or_else(|| by_number().map(|number| number as usize)).or_else(by_letter);
    let expected = || format!("{label:?} is not one of the {} choices: expected one of {}", names.len(), listed(names));
    found.filter(|choice| *choice < names.len()).map(|choice| choice as u32).ok_or_else(expected)
}
