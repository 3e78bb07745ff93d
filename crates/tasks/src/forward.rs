//! Prepared examples through a model without gradients, in flat batches.

use henson_infer::{Pooling, Read, normalise, read};
use henson_models::{Head, Model};
use henson_tensor::Parameters;
use henson_text::Features;

use crate::TaskError;
use crate::prepare::{Prepared, Scores};
use crate::task::Task;

/// Tokens of a batch.
const TOKENS: usize = 4096;

/// What the model says about each example; of a bare encoder, vectors by `poolings`. `go_on` is told how many are done, and may end it: the rest is then missing.
pub(crate) fn forward(
    model: &Model,
    parameters: &Parameters,
    task: &Task,
    examples: &[Prepared],
    poolings: &[Pooling],
    go_on: impl FnMut(usize) -> bool,
) -> Result<Vec<Scores>, TaskError> {
    let outputs = outputs_of(model, parameters, examples, poolings, go_on)?;
    let scores = |(example, (logits, labels)): (&Prepared, SequenceOutputs)| {
        // What was found by beams belongs together, and is taken as it is: a row for each sequence.
        if model.beams().is_some() {
            return logits;
        }
        let mut scores = task.form.scores(task.form.problem, example, &logits);
        if model.crf().is_some() {
            task.form.vote(example, &labels, &mut scores);
        }
        scores
    };
    Ok(examples.iter().zip(outputs).map(scores).collect())
}

/// The logits of each sequence of each example; of a bare encoder, their vectors. `go_on` as in [`forward`].
pub(crate) fn logits_of(
    model: &Model,
    parameters: &Parameters,
    examples: &[Prepared],
    go_on: impl FnMut(usize) -> bool,
) -> Result<Vec<Vec<Vec<f32>>>, TaskError> {
    Ok(outputs_of(model, parameters, examples, &[Pooling::Mean], go_on)?
        .into_iter()
        .map(|(logits, _)| logits)
        .collect())
}

/// Of each sequence of an example its logits, and the labels that a conditional random field gives its tokens together.
type SequenceOutputs = (Vec<Vec<f32>>, Vec<Vec<u32>>);

fn outputs_of(
    model: &Model,
    parameters: &Parameters,
    examples: &[Prepared],
    poolings: &[Pooling],
    mut go_on: impl FnMut(usize) -> bool,
) -> Result<Vec<SequenceOutputs>, TaskError> {
    let (head, mut all) = (model.head(), Vec::with_capacity(examples.len()));
    // A row of logits for the whole, or for each of its positions in turn. Of a bare encoder, its vector.
    let of_sequence = match head {
        Head::Encoder => Read::Pooled { pooling: poolings.to_vec(), skip: 0 },
        Head::Token { .. } => Read::Labels,
        Head::Span => Read::Spans,
        _ => Read::Sequence,
    };
    let mut rest = examples;
    while !rest.is_empty() && go_on(all.len()) {
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
        let mut reads = some.iter().flat_map(|example| {
            let of = &of_sequence;
            example.sequences().iter().enumerate().map(move |(window, sequence)| match example {
                Prepared::Question(asked) if head == Head::BeamSpan => {
                    Read::beams(sequence, asked.null_position(window))
                }
                _ => of.clone(),
            })
        });
        let (mut logits, mut labels) = (Vec::with_capacity(sequences.len()), Vec::with_capacity(sequences.len()));
        for part in by_tokens(&sequences) {
            let reads: Vec<Read> = reads.by_ref().take(part.len()).collect();
            let part: Vec<(&Features, &Read)> = part.iter().copied().zip(&reads).collect();
            for output in read(model, parameters, &part)? {
                logits.push(output.numbers);
                labels.push(output.ids);
            }
        }
        if head == Head::Encoder {
            logits.iter_mut().for_each(|vector| normalise(vector));
        }
        let mut read = logits.into_iter().zip(labels);
        all.extend(some.iter().map(|example| read.by_ref().take(example.sequences().len()).unzip()));
    }
    Ok(all)
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
