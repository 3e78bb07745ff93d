//! What a teacher says about examples, as targets for the sequences of a model that learns from it. Both lay the examples out by
//! themselves, each with its own tokenizer and lengths, and meet in what the example has: the text as a whole, its words, the
//! characters of a passage.

use std::ops::Range;

use henson_infer::{EmbedSettings, Model, normalise};
use henson_text::{Features, QuestionWindows, WordWindows};
use henson_train::TrainError;
use henson_train::soft::softened;

use super::*;
use crate::distil::{Lesson, softened_each};
use crate::forward::logits_of;

/// What teachers say about an example: the targets of each of its instances, in the order of their numbers.
pub(crate) type Soft = Vec<Vec<f32>>;

/// A teacher, and what it is asked about.
pub(crate) struct Asked<'a> {
    pub(crate) teacher: &'a Model,
    /// For each label of the set its number in the teacher; empty: the same.
    pub(crate) order: &'a [usize],
    /// How it reads.
    pub(crate) lengths: &'a Lengths,
    pub(crate) set: &'a Set,
    pub(crate) examples: &'a [&'a Example],
    /// The examples as the model that learns reads them.
    pub(crate) students: &'a [Prepared],
    pub(crate) temperature: f64,
    /// Whether vectors get the length 1.
    pub(crate) normalise: bool,
}

impl Asked<'_> {
    /// The targets of all examples.
    pub(crate) fn said(&self, lesson: Lesson) -> Result<Vec<Soft>, TaskError> {
        let said = match lesson {
            Lesson::Vectors => self.vectors()?,
            _ => self.by_logits(lesson)?,
        };
        for (example, soft) in self.examples.iter().zip(&said) {
            // NaN stands for words that the teacher did not read.
            let broken = |x: &f32| if lesson == Lesson::Tokens { x.is_infinite() } else { !x.is_finite() };
            if soft.iter().flatten().any(broken) {
                let problem = format!("the teacher {} has no finite number for it", self.teacher.path().display());
                return Err(TaskError::row(&self.set.path, example.place.clone(), problem));
            }
        }
        Ok(said)
    }

    fn by_logits(&self, lesson: Lesson) -> Result<Vec<Soft>, TaskError> {
        let with = LayingOut {
            task: self.set.task,
            labels: &self.set.labels,
            tokenizer: self.teacher.tokenizer(),
            lengths: self.lengths,
        };
        let form = self.set.task.form;
        let lay_out = |example: &&Example| form.lay_out_example(&with, example);
        let own: Vec<Prepared> =
            self.examples.iter().map(lay_out).collect::<Result<_, _>>().map_err(TrainError::from)?;
        let logits = logits_of(self.teacher.network(), self.teacher.parameters(), &own, |_| true)?;
        let each = own.iter().zip(&logits).zip(self.students);
        Ok(each.map(|((own, logits), student)| self.soft(lesson, own, logits, student)).collect())
    }

    /// The targets of an example from the teacher's logits for each of its sequences.
    fn soft(&self, lesson: Lesson, own: &Prepared, logits: &[Vec<f32>], student: &Prepared) -> Soft {
        let whole = || match own {
            Prepared::BothOrders(_) => sum_orders(logits.iter().cloned()),
            _ => join_windows(own.sequences().iter().zip(logits).map(|(window, row)| (window.len(), row.clone()))),
        };
        let count = match student {
            Prepared::BothOrders(_) => 1,
            _ => student.sequences().len(),
        };
        match (lesson, own, student) {
            (Lesson::Classes, ..) => vec![softened(&self.ordered(&whole()), self.temperature); count],
            (Lesson::Several, ..) => vec![softened_each(&self.ordered(&whole()), self.temperature); count],
            (Lesson::Number, ..) => vec![whole(); count],
            (Lesson::Choices, ..) => vec![softened(&logits.concat(), self.temperature)],
            (Lesson::Margins, ..) => vec![logits.concat()],
            (Lesson::Tokens, Prepared::Words(own), Prepared::Words(student)) => self.words(own, logits, student),
            (Lesson::Spans, Prepared::Question(own), Prepared::Question(student)) => {
                let windows = 0..student.windows.len();
                windows.map(|window| span_targets(own, logits, student, window, self.temperature)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// A row of the teacher's labels in the order of the set's.
    fn ordered(&self, row: &[f32]) -> Vec<f32> {
        match self.order.len() == row.len() {
            true => self.order.iter().map(|from| row[*from]).collect(),
            false => row.to_vec(),
        }
    }

    /// For each window of the student, its tokens × K: at the first token of every word what the teacher says of that word.
    fn words(&self, own: &WordWindows, logits: &[Vec<f32>], student: &WordWindows) -> Soft {
        let labels = self.set.labels.len().max(1);
        let row = |(window, position): (usize, usize)| logits.get(window)?.chunks_exact(labels).nth(position);
        let none = |window: &Features| vec![f32::NAN; window.len() * labels];
        let mut soft: Soft = student.windows.iter().map(none).collect();
        for (to, from) in student.places.iter().zip(&own.places) {
            let (Some((window, position)), Some(row)) = (*to, from.and_then(row)) else { continue };
            let row = softened(&self.ordered(row), self.temperature);
            soft[window][position * labels..][..labels].copy_from_slice(&row);
        }
        soft
    }

    /// The vectors of an example's texts, as the teacher's directory has them made.
    fn vectors(&self) -> Result<Vec<Soft>, TaskError> {
        let mut settings = EmbedSettings::of_directory(self.teacher.path())?;
        settings.normalise |= self.normalise;
        // An empty second text is none.
        let texts_of = |example: &&Example| {
            embed::texts_of(&example.input).into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect()
        };
        let of_examples: Vec<Vec<String>> = self.examples.iter().map(texts_of).collect();
        let texts: Vec<&str> = of_examples.iter().flatten().map(String::as_str).collect();
        let mut vectors = self.teacher.embed(&texts, &settings, false)?.into_iter().map(|found| {
            let mut vector = found.vector;
            if self.normalise {
                normalise(&mut vector);
            }
            vector
        });
        // All texts of an example are one instance.
        Ok(of_examples.iter().map(|texts| vec![vectors.by_ref().take(texts.len()).flatten().collect()]).collect())
    }
}

/// For a window of the student, its distribution of starts and then that of ends: what the teacher gives to a token is given to the
/// token with the same character, its first one of starts and its last one of ends. What the window does not show, and all that is
/// not of the passage, goes to where "no answer" stands.
fn span_targets(
    own: &QuestionWindows,
    logits: &[Vec<f32>],
    student: &QuestionWindows,
    window: usize,
    temperature: f64,
) -> Vec<f32> {
    let to = &student.windows[window];
    let shown = bytes_of(to);
    let overlap = |from: &Features| {
        let bytes = bytes_of(from);
        bytes.end.min(shown.end).saturating_sub(bytes.start.max(shown.start))
    };
    // Of equals the first.
    let nearest =
        (0..own.windows.len()).rev().max_by_key(|i| (own.windows[*i].ids == to.ids, overlap(&own.windows[*i])));
    let Some(nearest) = nearest else { return Vec::new() };
    let (from, rows, null) = (&own.windows[nearest], &logits[nearest], student.null_position(window));
    let mut both = Vec::with_capacity(2 * to.len());
    for column in 0..2 {
        let of_column: Vec<f32> = rows.chunks_exact(2).map(|row| row[column]).collect();
        let of_column = softened(&of_column, temperature);
        if from.ids == to.ids {
            both.extend(of_column);
            continue;
        }
        let mut target = vec![0.0; to.len()];
        for (position, share) in of_column.into_iter().enumerate() {
            let bytes = from.offsets[position].filter(|_| is_passage(from, position));
            let byte = bytes.map(|(start, end)| if column == 0 { start } else { end.max(start + 1) - 1 });
            target[byte.and_then(|byte| position_at(to, byte)).unwrap_or(null)] += share;
        }
        both.extend(target);
    }
    both
}

fn is_passage(window: &Features, position: usize) -> bool {
    window.second.as_ref().is_some_and(|passage| passage.contains(&position))
}

/// The bytes of the passage that a window shows.
fn bytes_of(window: &Features) -> Range<usize> {
    let offsets = window.second.clone().into_iter().flatten().filter_map(|position| window.offsets[position]);
    let (start, end) = offsets.fold((usize::MAX, 0), |all, (start, end)| (all.0.min(start), all.1.max(end)));
    start..end
}

/// The position of the token of the passage that has a byte, or the next one where none has.
fn position_at(window: &Features, byte: usize) -> Option<usize> {
    let passage = window.second.clone()?;
    let offsets = &window.offsets[passage.clone()];
    let place = offsets.partition_point(|offset| offset.is_none_or(|(_, end)| end <= byte));
    let shown = bytes_of(window);
    (shown.contains(&byte) && place < offsets.len()).then_some(passage.start + place)
}

#[cfg(test)]
mod tests {
    use henson_text::{QuestionSettings, Stride};

    use super::*;

    fn tokenizer(pieces: &[&str]) -> Tokenizer {
        let place = tempfile::tempdir().unwrap();
        let specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
        let vocabulary: String = specials.iter().chain(pieces).map(|piece| format!("{piece}\n")).collect();
        std::fs::write(place.path().join("vocab.txt"), vocabulary).unwrap();
        Tokenizer::open(place.path()).unwrap()
    }

    /// What a teacher of words says about an answer goes to a student's letters with the same characters.
    #[test]
    fn answers_are_compared_by_characters() {
        let words = tokenizer(&["who", "was", "jim", "henson", "?"]);
        let letters: Vec<String> =
            "abcdefghijklmnopqrstuvwxyz?".chars().flat_map(|c| [c.to_string(), format!("##{c}")]).collect();
        let letters = tokenizer(&letters.iter().map(String::as_str).collect::<Vec<_>>());
        let lay_out = |tokenizer: &Tokenizer, max_length| {
            let settings = QuestionSettings { max_length, stride: Stride::Step(4), max_question: 8 };
            tokenizer.question("who?", "jim henson was jim", &settings).unwrap()
        };
        let (own, student) = (lay_out(&words, 20), lay_out(&letters, 40));
        assert_eq!((own.windows.len(), student.windows.len()), (1, 1));
        // [CLS] who ? [SEP] jim henson was jim [SEP]: the answer is "henson was", or there is none.
        let mut logits = vec![vec![0.0; 2 * own.windows[0].len()]];
        (logits[0][2 * 5], logits[0][2 * 6 + 1], logits[0][0]) = (60.0, 60.0, 58.0);
        let soft = span_targets(&own, &logits, &student, 0, 2.0);
        let (window, tokens) = (&student.windows[0], student.windows[0].len());
        let at = |byte: usize, end: bool| {
            let is =
                |offset: &Option<(usize, usize)>| offset.is_some_and(|(a, b)| if end { b == byte } else { a == byte });
            window.second.clone().unwrap().find(|position| is(&window.offsets[*position])).unwrap()
        };
        // e^(-1) to one, at a temperature of 2.
        let (start, end) = (soft[at(4, false)], soft[tokens + at(14, true)]);
        assert!((start - 0.7311).abs() < 1e-3 && (soft[0] - 0.2689).abs() < 1e-3, "{soft:?}");
        assert!((end - 1.0).abs() < 1e-6, "{soft:?}");
        // A window that does not show the answer: nothing is there to be found.
        let cut = lay_out(&letters, 14);
        let last = cut.windows.len() - 1;
        assert!(last > 1, "{last}");
        let soft = span_targets(&own, &logits, &cut, last, 2.0);
        assert!((soft[0] - 1.0).abs() < 1e-5, "{soft:?}");
        // The same layout is the teacher's own distribution.
        let same = span_targets(&own, &logits, &own, 0, 2.0);
        assert_eq!(
            same[..own.windows[0].len()],
            softened(&logits[0].iter().step_by(2).copied().collect::<Vec<_>>(), 2.0)
        );
    }
}
