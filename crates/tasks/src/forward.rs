//! Prepared examples through a model without gradients, in flat batches.

use henson_infer::{Pooling, Read, normalise, read};
use henson_models::{Head, Model};
use henson_ranks::Ranks;
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

/// The scores of all examples, of which each rank has those of its share, in order: on every rank. None where what came is no scores.
pub(crate) fn gather_scores(ranks: &Ranks, own: &[Scores]) -> Option<Vec<Scores>> {
    // For every example the number of its rows; for each of these its length and its numbers.
    let mut bytes = Vec::new();
    for scores in own {
        bytes.extend((scores.len() as u32).to_le_bytes());
        for row in scores {
            bytes.extend((row.len() as u32).to_le_bytes());
            bytes.extend(row.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
    let lengths = ranks.gather(&(bytes.len() as u64).to_le_bytes());
    let (mut parts, mut end) = (Vec::new(), 0);
    for length in lengths {
        let start = end;
        end += u64::from_le_bytes(length.try_into().ok()?) as usize;
        parts.push(start..end);
    }
    let mut all = vec![0; end];
    all[parts[ranks.rank()].clone()].copy_from_slice(&bytes);
    ranks.all_gather(&mut all, &parts);
    let (mut rest, mut scores) = (&all[..], Vec::new());
    while !rest.is_empty() {
        let rows = (0..take_count(&mut rest)?).map(|_| {
            let count = take_count(&mut rest)?;
            let (numbers, behind) = rest.split_at_checked(4 * count)?;
            rest = behind;
            Some(
                numbers
                    .chunks_exact(4)
                    .map(|number| f32::from_le_bytes(number.try_into().unwrap_or_default()))
                    .collect(),
            )
        });
        scores.push(rows.collect::<Option<Scores>>()?);
    }
    Some(scores)
}

fn take_count(rest: &mut &[u8]) -> Option<usize> {
    let (count, behind) = rest.split_at_checked(4)?;
    *rest = behind;
    Some(u32::from_le_bytes(count.try_into().ok()?) as usize)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_shares_come_together_in_order() {
        // Three ranks, of which the first has no example; rows of unequal lengths, one of them empty.
        let all: Vec<Scores> = vec![vec![vec![1.0, -2.5], vec![], vec![3.0]], vec![]];
        std::thread::scope(|scope| {
            for ranks in Ranks::in_threads(3) {
                let all = &all;
                scope.spawn(move || {
                    let own = ranks.share(all.len(), ranks.rank());
                    assert_eq!(gather_scores(&ranks, &all[own]).unwrap(), *all);
                    // Nothing of anybody.
                    assert_eq!(gather_scores(&ranks, &[]).unwrap(), Vec::<Scores>::new());
                });
            }
        });
    }
}
