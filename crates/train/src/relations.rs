//! Relations between the tokens of a sequence, as a student learns them from a layer of its teacher: MiniLM's way (Wang et al. 2020, 2021).
//!
//! ```text
//! R = softmax(A·Bᵀ/√D)                            of a relation head: A and B are queries, keys or values of a layer
//! scale·Σ KL(teacher's R ‖ student's R)           over the rows of all heads of all sequences
//! ```
//!
//! The vectors of a token are cut into as many heads on both sides, whatever heads the two attend with, so that models of other widths
//! have relations of the same size. With query and key it is the distribution of attention, as in the first paper; queries among
//! themselves, keys and values are those of the second. On the host, in f64, a sequence on a thread.
//!
//! Legend: T tokens of all sequences, S of one, H hidden, A relation heads, D = H/A.

use henson_kernels::threads::in_threads;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is compared with what, between the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// Queries with each other (MiniLMv2).
    QueryQuery,
    /// Keys with each other (MiniLMv2).
    KeyKey,
    /// Values with each other (both).
    ValueValue,
    /// Queries with keys: the distribution of attention (MiniLM).
    QueryKey,
}

impl Relation {
    /// Which of query (0), key (1) and value (2) have rows and columns.
    fn parts(self) -> [usize; 2] {
        match self {
            Self::QueryQuery => [0, 0],
            Self::KeyKey => [1, 1],
            Self::ValueValue => [2, 2],
            Self::QueryKey => [0, 1],
        }
    }
}

/// The relations of a layer that are learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relations<'a> {
    pub(crate) kinds: &'a [Relation],
    /// A; divides the widths of both models.
    pub(crate) heads: usize,
}

impl Relations<'_> {
    /// The loss of the student's queries, keys and values (T×3H) beside the teacher's; their gradient takes their place.
    pub(crate) fn of_all(
        &self,
        student: &mut [f32],
        teacher: &[f32],
        lengths: &[usize],
        scale: f64,
        threads: usize,
    ) -> f64 {
        let tokens = lengths.iter().sum::<usize>().max(1);
        let (own, other) = (student.len() / tokens, teacher.len() / tokens);
        let (mut student, mut teacher, mut parts) = (student, teacher, Vec::with_capacity(lengths.len()));
        for length in lengths {
            let (first, rest) = student.split_at_mut(length * own);
            let (said, others) = teacher.split_at(length * other);
            (student, teacher) = (rest, others);
            parts.push((first, said, *length));
        }
        let found = in_threads(threads, parts, |(student, teacher, length)| {
            let values: Vec<f64> = student.iter().map(|x| f64::from(*x)).collect();
            let teacher: Vec<f64> = teacher.iter().map(|x| f64::from(*x)).collect();
            let mut gradient = vec![0.0; values.len()];
            let loss = self.of(&values, &teacher, length, scale, &mut gradient);
            student.iter_mut().zip(gradient).for_each(|(x, slope)| *x = slope as f32);
            loss
        });
        found.into_iter().sum()
    }

    /// The loss of a sequence; adds to its gradient.
    fn of(&self, student: &[f64], teacher: &[f64], tokens: usize, scale: f64, gradient: &mut [f64]) -> f64 {
        let mut loss = 0.0;
        for kind in self.kinds {
            for head in 0..self.heads {
                let [own, said] = [student, teacher].map(|values| Scores::new(values, tokens, self.heads, *kind, head));
                loss += own.learn(&said, scale, gradient);
            }
        }
        loss
    }
}

/// One relation of a sequence in one head.
struct Scores {
    tokens: usize,
    /// 3H.
    width: usize,
    /// Where the head's columns begin in rows of 3H numbers: A's and B's.
    columns: [usize; 2],
    /// A: S×D.
    rows: Vec<f64>,
    /// B: S×D, and transposed D×S.
    others: Vec<f64>,
    transposed: Vec<f64>,
    /// 1/√D.
    factor: f64,
}

impl Scores {
    fn new(values: &[f64], tokens: usize, heads: usize, kind: Relation, head: usize) -> Self {
        let width = values.len() / tokens.max(1);
        let size = width / 3 / heads.max(1);
        let columns = kind.parts().map(|part| part * width / 3 + head * size);
        let [rows, others] = columns.map(|column| -> Vec<f64> {
            values.chunks_exact(width.max(1)).flat_map(|row| &row[column..column + size]).copied().collect()
        });
        let mut transposed = vec![0.0; others.len()];
        for (token, row) in others.chunks_exact(size.max(1)).enumerate() {
            row.iter().enumerate().for_each(|(k, x)| transposed[k * tokens + token] = *x);
        }
        Self { tokens, width, columns, rows, others, transposed, factor: (size.max(1) as f64).sqrt().recip() }
    }

    /// D.
    fn size(&self) -> usize {
        self.rows.len() / self.tokens.max(1)
    }

    /// The logarithms of a token's row: ln softmax(a·Bᵀ/√D).
    fn log_row(&self, token: usize) -> Vec<f64> {
        let mut row = vec![0.0; self.tokens];
        let size = self.size();
        for (a, column) in
            self.rows[token * size..(token + 1) * size].iter().zip(self.transposed.chunks_exact(self.tokens))
        {
            row.iter_mut().zip(column).for_each(|(sum, b)| *sum += a * b);
        }
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max) * self.factor;
        let all = row.iter().map(|x| (x * self.factor - most).exp()).sum::<f64>().ln() + most;
        row.iter_mut().for_each(|x| *x = *x * self.factor - all);
        row
    }

    /// scale·Σ KL(teacher's row ‖ own row); adds to the gradient of the sequence's queries, keys and values.
    fn learn(&self, teacher: &Self, scale: f64, gradient: &mut [f64]) -> f64 {
        let (size, mut loss) = (self.size(), 0.0);
        for token in 0..self.tokens {
            let mut slopes = self.log_row(token);
            for (own, said) in slopes.iter_mut().zip(teacher.log_row(token)) {
                let share = said.exp();
                loss += scale * share * (said - *own);
                *own = scale * self.factor * (own.exp() - share);
            }
            let own = &self.rows[token * size..(token + 1) * size];
            for (other, slope) in slopes.iter().enumerate() {
                let back = &mut gradient[other * self.width + self.columns[1]..][..size];
                back.iter_mut().zip(own).for_each(|(back, a)| *back += slope * a);
            }
            let back = &mut gradient[token * self.width + self.columns[0]..][..size];
            for (other, slope) in self.others.chunks_exact(size.max(1)).zip(&slopes) {
                back.iter_mut().zip(other).for_each(|(back, b)| *back += slope * b);
            }
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Case {
        kinds: Vec<Relation>,
        heads: usize,
        lengths: Vec<usize>,
        /// T×3H, and as wide as the teacher is.
        student: Vec<f32>,
        teacher: Vec<f32>,
        loss: f64,
        gradient: Vec<f64>,
    }

    fn cases() -> Vec<Case> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/distil/relations.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    impl Case {
        fn relations(&self) -> Relations<'_> {
            Relations { kinds: &self.kinds, heads: self.heads }
        }

        /// One over what the mean is over.
        fn scale(&self) -> f64 {
            1.0 / (self.heads * self.lengths.iter().sum::<usize>()) as f64
        }
    }

    /// Values and gradients of the formula in PyTorch (tools/golden/distil_relations.py): other widths, heads of 1 to 8 columns, sequences of
    /// one token.
    #[test]
    fn relations_are_those_of_pytorch() {
        let cases = cases();
        assert!(cases.len() >= 6);
        for case in &cases {
            let near = |a: f64, b: f64| (a - b).abs() < 1e-7 * b.abs().max(1.0);
            for threads in [1, 3] {
                let mut states = case.student.clone();
                let loss = case.relations().of_all(&mut states, &case.teacher, &case.lengths, case.scale(), threads);
                assert!(near(loss, case.loss), "{:?}: {loss}, expected {}", case.kinds, case.loss);
                assert_eq!(states.len(), case.gradient.len());
                for (a, b) in states.iter().zip(&case.gradient) {
                    assert!(near(f64::from(*a), *b), "{:?}: {a}, expected {b}", case.kinds);
                }
            }
        }
    }

    #[test]
    fn gradients_are_differences() {
        const STEP: f64 = 1e-5;
        for case in cases().iter().filter(|case| case.lengths.len() == 1) {
            let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
            let (student, teacher, tokens) = (wide(&case.student), wide(&case.teacher), case.lengths[0]);
            let of = |student: &[f64], gradient: &mut [f64]| {
                case.relations().of(student, &teacher, tokens, case.scale(), gradient)
            };
            let mut gradient = vec![0.0; student.len()];
            of(&student, &mut gradient);
            for i in 0..student.len() {
                let at = |step: f64| {
                    let mut student = student.clone();
                    student[i] += step;
                    of(&student, &mut vec![0.0; student.len()])
                };
                let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                assert!((slope - gradient[i]).abs() < 1e-8, "{:?} {i}: {slope} {}", case.kinds, gradient[i]);
            }
        }
    }
}
