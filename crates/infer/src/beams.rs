//! The beam search of XLNet's head for answers (Yang et al. 2019): the best starts of a window, the best ends given each of them, and
//! whether there is an answer given the mean start. Probabilities are those among the tokens that an answer may start and end at, and
//! the classification token; `p_mask` of `transformers` leaves the same.
//!
//! Legend: H hidden, N such tokens.

use std::ops::Range;

use henson_models::Model;
use henson_tensor::{Pass, Tensor, TensorError, Var};
use henson_text::{BeamSpan, SpanBeams};

use crate::Result;
use crate::read::{best, log_sum_exp};

/// Searches a sequence, which has these rows of the last hidden states. `shown` and `null` are places within it.
pub(crate) fn search(
    model: &Model,
    pass: &mut Pass<'_>,
    last: &Var,
    rows: Range<usize>,
    shown: Range<usize>,
    null: usize,
) -> Result<SpanBeams> {
    let why = "the model has no head for answers whose end depends on their start";
    let head = model.beams().ok_or(TensorError::Unsupported { operation: "beams", why })?;
    let mut places: Vec<u32> = shown.filter(|place| *place != null).map(|place| place as u32).collect();
    places.push(null as u32);
    places.sort_unstable();
    let row = |place: u32| rows.start as u32 + place;
    let tensor = |rows: &[u32], pass: &Pass<'_>| Tensor::from_slice(pass.device(), [rows.len()], rows);

    let at = tensor(&places.iter().map(|place| row(*place)).collect::<Vec<u32>>(), pass)?;
    let starts = log_probabilities(&head.start_logits(pass, last, &at)?.tensor().to_f32()?);
    let mut spans = Vec::with_capacity(head.starts * head.ends);
    for start in best(&starts, head.starts) {
        let (start_score, start) = (starts[start as usize], places[start as usize]);
        let pairs: Vec<u32> = places.iter().flat_map(|place| [row(*place), row(start)]).collect();
        let pairs = tensor(&pairs, pass)?;
        let ends = log_probabilities(&head.end_logits(pass, last, &pairs)?.tensor().to_f32()?);
        spans.extend(best(&ends, head.ends).into_iter().map(|end| BeamSpan {
            start: start as usize,
            end: places[end as usize] as usize,
            start_score,
            end_score: ends[end as usize],
        }));
    }

    // The start that is expected next to the classification token.
    let states = pass.gather(last, &at)?.tensor().to_f32()?;
    let h = states.len() / places.len().max(1);
    let mut both = vec![0.0_f64; h];
    for (state, score) in states.chunks_exact(h.max(1)).zip(&starts) {
        let probability = f64::from(*score).exp();
        both.iter_mut().zip(state).for_each(|(sum, x)| *sum += probability * f64::from(*x));
    }
    let mut both: Vec<f32> = both.into_iter().map(|x| x as f32).collect();
    both.extend(tensor(&[row(null as u32)], pass).and_then(|at| pass.gather(last, &at)?.tensor().to_f32())?);
    let both = pass.input(&Tensor::from_slice(pass.device(), [1, 2 * h], &both)?)?;
    let no_answer = head.no_answer_logits_of(pass, &both)?.tensor().to_f32()?;
    Ok(SpanBeams { no_answer: no_answer.first().copied().unwrap_or(f32::NAN), spans })
}

fn log_probabilities(logits: &[f32]) -> Vec<f32> {
    let whole = log_sum_exp(logits);
    logits.iter().map(|logit| (f64::from(*logit) - whole) as f32).collect()
}
