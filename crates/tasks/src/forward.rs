//! Prepared examples through a model without gradients, in flat batches.

use henson_models::{Batch, Capture, Head, InputError, Model, Sequence};
use henson_tensor::{Parameters, Pass, Tape};
use henson_text::Features;

use crate::prepare::{Prepared, Scores};
use crate::task::Task;

/// Tokens of a batch.
const TOKENS: usize = 4096;

/// What the model says about each example. `go_on` is told how many are done, and may end it: the rest is then missing.
pub(crate) fn forward(
    model: &Model,
    parameters: &Parameters,
    tape: &mut Tape,
    task: &Task,
    examples: &[Prepared],
    mut go_on: impl FnMut(usize) -> bool,
) -> Result<Vec<Scores>, InputError> {
    let mut scores = Vec::with_capacity(examples.len());
    let mut rest = examples;
    while !rest.is_empty() && go_on(scores.len()) {
        // Whole examples together, as many as fit.
        let (mut count, mut tokens) = (0, 0);
        for example in rest {
            tokens += example.sequences().iter().map(Features::len).sum::<usize>();
            if count > 0 && tokens > TOKENS {
                break;
            }
            count += 1;
        }
        let (some, others) = rest.split_at(count);
        rest = others;
        let sequences: Vec<&Features> = some.iter().flat_map(Prepared::sequences).collect();
        let mut logits = Vec::with_capacity(sequences.len());
        for part in by_tokens(&sequences) {
            logits_of(model, parameters, tape, part, &mut logits)?;
        }
        let mut logits = logits.as_slice();
        for example in some {
            let (own, others) = logits.split_at(example.sequences().len());
            logits = others;
            scores.push(task.form.scores(task.form.problem, example, own));
        }
    }
    Ok(scores)
}

/// Consecutive sequences with a bounded number of tokens: one example may have very many.
fn by_tokens<'a, 'f>(mut rest: &'a [&'f Features]) -> impl Iterator<Item = &'a [&'f Features]> {
    std::iter::from_fn(move || {
        let mut tokens = 0;
        let fit = |sequence: &&&Features| {
            tokens += sequence.len();
            tokens <= TOKENS
        };
        let count = rest.iter().take_while(fit).count().max(1).min(rest.len());
        let (part, others) = rest.split_at(count);
        rest = others;
        (!part.is_empty()).then_some(part)
    })
}

/// A row of logits for each sequence: for the whole, or for each of its positions in turn. Of a bare encoder, its vector.
fn logits_of(
    model: &Model,
    parameters: &Parameters,
    tape: &mut Tape,
    sequences: &[&Features],
    all: &mut Vec<Vec<f32>>,
) -> Result<(), InputError> {
    let inputs: Vec<Sequence<'_>> = sequences.iter().map(|s| Sequence { ids: &s.ids, segments: &s.segments }).collect();
    let batch = Batch::new(parameters.device(), model.config(), &inputs, 0)?;
    let mut pass = Pass::inference(tape, parameters);
    let rows = match model.head() {
        Head::Encoder => {
            let last = model.encode(&mut pass, &batch, Capture::default())?.last;
            pass.unit_means(&last, &batch.layout)?
        }
        _ => model.logits(&mut pass, &batch, None)?,
    };
    let (numbers, columns) = (rows.tensor().to_f32()?, rows.tensor().columns().max(1));
    match model.head() {
        Head::Token { .. } | Head::Span => {
            let rows = |ends: &[u32]| numbers[ends[0] as usize * columns..ends[1] as usize * columns].to_vec();
            all.extend(batch.layout.offsets().windows(2).map(rows));
        }
        _ => all.extend(numbers.chunks_exact(columns).map(<[f32]>::to_vec)),
    }
    Ok(())
}
