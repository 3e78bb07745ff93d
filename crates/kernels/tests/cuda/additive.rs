//! Additive attention, by queries and as a pooling.

use half::bf16;
use henson_kernels::cpu::additive::reference;
use henson_kernels::cuda::Result;
use henson_kernels::cuda::additive::{Gradients, Inputs, backward, forward};
use henson_kernels::cuda::reduce::Sum;

use crate::check::{Checks, Number, bits, exact, numbers, tolerance};

pub(crate) fn additive(checks: &mut Checks<'_>) -> Result<()> {
    for (a, h) in [(1, 1), (7, 33), (40, 5), (300, 270)] {
        both(checks, (a, h), Some(&[2, 4, 1, 3]), &[5, 1, 9, 3])?;
        both(checks, (a, h), None, &[5, 1, 9, 3])?;
    }
    // More keys, and more queries, than a block takes at a time; a sequence without queries.
    both(checks, (12, 20), Some(&[70, 1, 0]), &[3, 150, 2])?;
    both(checks, (12, 20), None, &[150, 1])
}

fn both(checks: &mut Checks<'_>, sizes: (usize, usize), queries: Option<&[usize]>, keys: &[usize]) -> Result<()> {
    check::<f32>(checks, sizes, queries, keys)?;
    check::<bf16>(checks, sizes, queries, keys)
}

fn offsets_of(lengths: &[usize]) -> Vec<u32> {
    let mut offsets = vec![0];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
    offsets
}

fn check<E: Number>(
    checks: &mut Checks<'_>,
    (a, h): (usize, usize),
    queries: Option<&[usize]>,
    keys: &[usize],
) -> Result<()> {
    let what = format!("additive attention of {a} and {h} columns, {queries:?} queries of {keys:?} keys");
    let of_queries = offsets_of(queries.unwrap_or(&vec![1; keys.len()]));
    let of_keys = offsets_of(keys);
    // Rows behind the last sequence: they get zeros.
    let (real_n, real_m) = (*of_queries.last().unwrap() as usize, *of_keys.last().unwrap() as usize);
    let (n, m) = (if queries.is_some() { real_n + 3 } else { real_n }, real_m + 5);
    let (q, k, values) = (numbers::<E>(1, n * a), numbers::<E>(2, m * a), numbers::<E>(3, m * h));
    // Scores of about one, as in a model: the rounding of a score is a relative error of its exponential, so that scores of 10 to 20 would
    // measure the conditioning of softmax in f32 instead of the kernels.
    let v: Vec<f32> = numbers::<f32>(4, a).iter().map(|x| x / (a as f32).sqrt()).collect();
    let dout = numbers::<E>(5, n * h);
    let zeros = vec![0.0; real_n * a];
    let wide_q = if queries.is_some() { exact(&q[..real_n * a]) } else { zeros };
    let (wide_k, wide_v) = (exact(&k[..real_m * a]), exact(&v));
    let (wide_values, wide_dout) = (exact(&values[..real_m * h]), exact(&dout[..real_n * h]));
    let offsets = [&of_queries[..], &of_keys[..]];
    let (mut expected, _) = reference::forward(&wide_q, &wide_k, &wide_v, &wide_values, offsets);
    let [mut dq, mut dk, mut dv, mut dvalues] =
        reference::backward(&wide_q, &wide_k, &wide_v, &wide_values, offsets, &wide_dout);
    expected.resize(n * h, 0.0);
    dq.resize(n * a, 0.0);
    dk.resize(m * a, 0.0);
    dvalues.resize(m * h, 0.0);
    dv.iter_mut().for_each(|x| *x += 1.0);

    let (gq, gk, gv, gvalues) = (checks.up(&q)?, checks.up(&k)?, checks.up(&v)?, checks.up(&values)?);
    let (goffsets, gkeys, gdout) = (checks.up(&of_queries)?, checks.up(&of_keys)?, checks.up(&dout)?);
    let inputs = Inputs {
        queries: queries.map(|_| (gq.view(), goffsets.view())),
        keys: gk.view(),
        v: gv.view(),
        values: gvalues.view(),
        offsets: gkeys.view(),
    };
    let mut run = || -> Result<Vec<u32>> {
        let (sums, out) = (checks.poisoned::<f32>(n)?, checks.poisoned::<E>(n * h)?);
        forward(checks.gpu, &inputs, sums.view(), out.view())?;
        checks.close::<E>(&what, &out, &expected)?;
        let (to_q, to_k) = (checks.poisoned::<E>(n * a)?, checks.poisoned::<E>(m * a)?);
        let (to_v, to_values) = (checks.out(&vec![1.0f32; a])?, checks.poisoned::<E>(m * h)?);
        let to = Gradients {
            queries: queries.map(|_| to_q.view()),
            keys: to_k.view(),
            v: Sum::add(to_v.view()),
            values: to_values.view(),
        };
        backward(checks.gpu, &inputs, sums.view(), gdout.view(), to)?;
        if queries.is_some() {
            checks.close::<E>(&format!("queries' gradient of {what}"), &to_q, &dq)?;
        }
        checks.close::<E>(&format!("keys' gradient of {what}"), &to_k, &dk)?;
        checks.close::<E>(&format!("values' gradient of {what}"), &to_values, &dvalues)?;
        checks.within::<f32>(&format!("gradient of v of {what}"), &to_v, &dv, tolerance::<f32>())?;
        Ok([bits::<E>(checks.gpu, &to_k)?, bits::<f32>(checks.gpu, &to_v)?].concat())
    };
    let same = run()? == run()?;
    checks.verify(|| format!("two runs of {what} differ"), same);
    Ok(())
}
