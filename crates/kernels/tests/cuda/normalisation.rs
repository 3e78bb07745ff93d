//! Dropout, LayerNorm, embeddings, and what is done with whole rows.

use half::bf16;
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cpu::layer_norm::{Norm, reference};
use henson_kernels::cpu::rotary::{Pairing, Rotary, reference as rotary_reference};
use henson_kernels::cpu::{embedding::reference as embedding_reference, rows::reference as rows_reference};
use henson_kernels::cuda::embedding::{self as embeddings, Lookup};
use henson_kernels::cuda::layer_norm::{self as kernels, Drops};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::rotary as rotations;
use henson_kernels::cuda::rows::{self as whole_rows, Sorted};
use henson_kernels::cuda::{DType, Dropout, Native, Result, Step};

use crate::check::{Checks, Number, bits, exact, indices, numbers, places, tolerance};

/// The masks are those of the CPU, bit for bit.
pub(crate) fn dropout(checks: &mut Checks<'_>) -> Result<()> {
    let step = checks.up(&[3u32])?;
    for h in [1, 7, 8, 33, 128, 129, 300, 768] {
        for p in [0.1, 0.5, 1e-4] {
            let rows: Vec<RowId> = (0..9).map(|i| RowId { sequence: 4 * i + 1, position: i * i * 31 }).collect();
            let places = checks.up_places(&rows)?;
            let seed = 0x1234_5678_9abc_def0;
            let Some(on_cpu) = CpuDropout::new(p, seed, 3, 5) else { continue };
            for at in [Step::Value(3), Step::At(step.view())] {
                let Some(dropout) = Dropout::new(p, seed, at, 5) else { continue };
                let x = checks.out::<f32>(&vec![1.0; rows.len() * h])?;
                whole_rows::drop(checks.gpu, x.view(), h, dropout, places.view())?;
                let got = checks.read::<f32>("drop", &x)?;
                let expected = |i: usize| if on_cpu.keeps(rows[i / h], h, i % h) { on_cpu.scale() } else { 0.0 };
                let same = (0..got.len()).all(|i| got[i].to_bits() == expected(i).to_bits());
                checks.verify(|| format!("mask of {h} columns, p = {p}"), same);
            }
        }
    }
    checks.verify(|| "p = 0 drops".into(), Dropout::new(0.0, 1, Step::Value(1), 1).is_none());
    Ok(())
}

/// 0 or the scale for every element, as the references take it.
fn mask(dropout: Option<CpuDropout>, rows: &[RowId], h: usize) -> Option<Vec<f64>> {
    let dropout = dropout?;
    let keep = |i: usize| dropout.keeps(rows[i / h], h, i % h);
    Some((0..rows.len() * h).map(|i| if keep(i) { f64::from(dropout.scale()) } else { 0.0 }).collect())
}

/// The same dropout on both sides.
fn both(on: bool, site: u32) -> (Option<CpuDropout>, Option<Dropout<'static>>) {
    if !on {
        return (None, None);
    }
    (CpuDropout::new(0.1, 5, 2, site), Dropout::new(0.1, 5, Step::Value(2), site))
}

pub(crate) fn layer_norm(checks: &mut Checks<'_>) -> Result<()> {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300, 512, 768] {
            norm::<f32>(checks, t, h, true, true, false)?;
            norm::<bf16>(checks, t, h, true, true, false)?;
            norm::<f32>(checks, t, h, false, false, true)?;
            norm::<bf16>(checks, t, h, false, false, true)?;
        }
    }
    for (t, h) in [(7, 64), (40, 1024), (11, 1030), (9, 2048), (5, 4100), (3, 4352)] {
        norm::<f32>(checks, t, h, true, false, false)?;
        norm::<bf16>(checks, t, h, true, false, false)?;
        norm::<f32>(checks, t, h, false, true, true)?;
        norm::<bf16>(checks, t, h, false, true, true)?;
    }
    // RMSNorm, norms without β, and streams of residuals.
    for (shifted, centred, stream) in
        [(false, true, false), (false, false, true), (true, false, false), (true, true, true)]
    {
        for (t, h) in [(1, 3), (7, 24), (33, 300), (129, 512), (33, 768), (40, 1024), (11, 1030), (5, 4100)] {
            for before in [false, true] {
                let form = Form { residual: true, before, after: false, shifted, centred, stream };
                norm_of::<f32>(checks, t, h, form)?;
                norm_of::<bf16>(checks, t, h, form)?;
            }
            if !stream {
                let form = Form { residual: false, before: false, after: true, shifted, centred, stream };
                norm_of::<f32>(checks, t, h, form)?;
                norm_of::<bf16>(checks, t, h, form)?;
            }
        }
    }
    if !checks.small {
        norm_of::<bf16>(
            checks,
            3001,
            768,
            Form { residual: true, before: true, after: false, shifted: false, centred: false, stream: true },
        )?;
        // More rows than one turn of all blocks.
        norm::<f32>(checks, 3001, 768, true, true, false)?;
        norm::<bf16>(checks, 3001, 768, true, true, false)?;
        norm::<bf16>(checks, 5003, 256, true, true, true)?;
    }
    Ok(())
}

/// BERT's norm.
fn norm<E: Number>(
    checks: &mut Checks<'_>,
    t: usize,
    h: usize,
    residual: bool,
    before: bool,
    after: bool,
) -> Result<()> {
    norm_of::<E>(checks, t, h, Form { residual, before, after, shifted: true, centred: true, stream: false })
}

/// What stands around a norm, and what it is.
#[derive(Clone, Copy, Debug)]
struct Form {
    residual: bool,
    before: bool,
    after: bool,
    /// Whether there is a β.
    shifted: bool,
    centred: bool,
    /// Whether the sum has a gradient from elsewhere.
    stream: bool,
}

fn norm_of<E: Number>(checks: &mut Checks<'_>, t: usize, h: usize, form: Form) -> Result<()> {
    let what = format!("layer_norm {t}×{h}, {form:?}");
    let Form { residual: with_residual, before, after, shifted, centred, stream } = form;
    let (x, residual, dy) = (numbers::<E>(1, t * h), numbers::<E>(2, t * h), numbers::<E>(3, t * h));
    let (gamma, beta) = (numbers::<f32>(4, h), numbers::<f32>(5, h));
    let rows = places(t);
    let ((cpu_before, before), (cpu_after, after)) = (both(before, 1), both(after, 2));
    let masks = (mask(cpu_before, &rows, h), mask(cpu_after, &rows, h));
    let (gplaces, ggamma, gbeta) = (checks.up_places(&rows)?, checks.up(&gamma)?, checks.up(&beta)?);
    let gresidual = checks.up(&residual)?;
    let drops = Drops { before, after, rows: Some(gplaces.view()) };

    let (sum, y, statistics) = (checks.out(&x)?, checks.poisoned::<E>(t * h)?, checks.poisoned::<f32>(2 * t)?);
    let gresidual = with_residual.then(|| gresidual.view());
    let gnorm = kernels::Norm { gamma: ggamma.view(), beta: shifted.then(|| gbeta.view()), epsilon: 1e-12, centred };
    // The bias of the layer before comes with the dropout of its output.
    let bias = numbers::<f32>(6, h);
    let (gbias, has_bias) = (checks.up(&bias)?, before.is_some());
    let bias_view = has_bias.then(|| gbias.view());
    let kept = Some(statistics.view());
    kernels::forward(checks.gpu, sum.view(), bias_view, gresidual, gnorm, drops, y.view(), kept)?;
    let mut wide_x = exact(&x);
    if has_bias {
        wide_x.iter_mut().enumerate().for_each(|(i, x)| *x += f64::from(bias[i % h]));
    }
    let residual = with_residual.then(|| exact(&residual));
    let (wide_gamma, wide_beta) = (exact(&gamma), exact(&beta));
    let norm = Norm { gamma: &wide_gamma, beta: shifted.then_some(&wide_beta[..]), epsilon: 1e-12, centred };
    let expected = reference::forward(&wide_x, residual.as_deref(), &norm, masks.0.as_deref(), masks.1.as_deref());
    checks.close::<E>(&format!("sum of {what}"), &sum, &expected.sum)?;
    checks.close::<E>(&format!("y of {what}"), &y, &expected.y)?;
    // Without a backward, in place.
    let alone = checks.out(&x)?;
    kernels::forward(checks.gpu, alone.view(), bias_view, gresidual, gnorm, drops, alone.view(), None)?;
    checks.close::<E>(&format!("y in place of {what}"), &alone, &expected.y)?;

    // The backward starts from what the forward stored, so the reference does too.
    let stored = reference::Output {
        sum: exact(&checks.read::<E>(&what, &sum)?),
        y: vec![],
        statistics: checks.read::<f32>(&what, &statistics)?.chunks(2).map(|s| [s[0], s[1]].map(f64::from)).collect(),
    };
    let dstream = stream.then(|| numbers::<E>(7, t * h));
    let wide_stream = dstream.as_ref().map(|d| exact(d));
    let gstream = dstream.as_ref().map(|d| checks.up(d)).transpose()?;
    let gstream = gstream.as_ref().map(|d| d.view());
    let expected = reference::backward(
        &exact(&dy),
        wide_stream.as_deref(),
        &stored,
        &norm,
        masks.0.as_deref(),
        masks.1.as_deref(),
    );
    let gdy = checks.up(&dy)?;
    let mut run = || -> Result<Vec<u32>> {
        let (dsum, dx) = (checks.poisoned::<E>(t * h)?, checks.poisoned::<E>(t * h)?);
        let (dgamma, dbeta) = (checks.out(&vec![1.0f32; h])?, checks.out(&vec![2.0f32; h])?);
        let dbias = checks.out(&vec![3.0f32; h])?;
        kernels::backward(
            checks.gpu,
            gdy.view(),
            gstream,
            sum.view(),
            statistics.view(),
            gnorm,
            drops,
            dsum.view(),
            before.map(|_| dx.view()),
            Sum::add(dgamma.view()),
            shifted.then(|| Sum::add(dbeta.view())),
            Some(Sum::add(dbias.view())),
        )?;
        if before.is_some() {
            checks.close::<E>(&format!("dx of {what}"), &dx, &expected[0])?;
        }
        checks.close::<E>(&format!("dsum of {what}"), &dsum, &expected[1])?;
        // Masked dy is rounded to E once more before it is summed, hence E's tolerance for these f32 sums.
        let added = |g: &[f64], by: f64| g.iter().map(|g| g + by).collect::<Vec<_>>();
        let bound = tolerance::<E>();
        checks.within::<f32>(&format!("dgamma of {what}"), &dgamma, &added(&expected[2], 1.0), bound)?;
        if shifted {
            checks.within::<f32>(&format!("dbeta of {what}"), &dbeta, &added(&expected[3], 2.0), bound)?;
        }
        let mut columns = vec![3.0; h];
        henson_kernels::cpu::reduce::reference::column_sums(&expected[0], &mut columns);
        // A sum of numbers that nearly cancel: the error is that of the terms.
        let largest = expected[0].iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let scale =
            columns.iter().fold(largest, |m, x| m.max(x.abs())) / columns.iter().fold(1e-3, |m: f64, x| m.max(x.abs()));
        checks.within::<f32>(&format!("dbias of {what}"), &dbias, &columns, bound * scale.max(1.0))?;
        let all =
            [bits::<f32>(checks.gpu, &dgamma)?, bits::<f32>(checks.gpu, &dbeta)?, bits::<f32>(checks.gpu, &dbias)?];
        Ok([all.concat(), bits::<E>(checks.gpu, &dsum)?].concat())
    };
    let (first, second) = (run()?, run()?);
    checks.verify(|| format!("{what}: two runs differ"), first == second);

    // Without the columns' sums, where a caller does not want them.
    let (dsum, dx) = (checks.poisoned::<E>(t * h)?, checks.poisoned::<E>(t * h)?);
    let (dgamma, dbeta) = (checks.poisoned::<f32>(h)?, checks.out(&vec![0.0f32; h])?);
    let wanted = before.map(|_| dx.view());
    let (gdy, to) = (gdy.view(), dsum.view());
    let (dgamma_to, dbeta_to) = (Sum { to: dgamma.view(), add: false }, shifted.then(|| Sum::add(dbeta.view())));
    let (sum, st) = (sum.view(), statistics.view());
    kernels::backward(checks.gpu, gdy, gstream, sum, st, gnorm, drops, to, wanted, dgamma_to, dbeta_to, None)?;
    checks.within::<f32>(&format!("dgamma alone of {what}"), &dgamma, &expected[2], tolerance::<E>())
}

/// Rows of the tables: words, positions, segments, one more.
const TABLES: [usize; 4] = [50, 17, 2, 1];

pub(crate) fn embedding(checks: &mut Checks<'_>) -> Result<()> {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300, 768] {
            for tables in 1..=4 {
                tables_alone::<f32, f32>(checks, t, h, tables)?;
                tables_alone::<f32, bf16>(checks, t, h, tables)?;
                tables_alone::<bf16, f32>(checks, t, h, tables)?;
                tables_alone::<bf16, bf16>(checks, t, h, tables)?;
            }
            tables_normalised::<f32>(checks, t, h)?;
            tables_normalised::<bf16>(checks, t, h)?;
            table_gradient::<f32>(checks, t, h)?;
            table_gradient::<bf16>(checks, t, h)?;
        }
    }
    tables_normalised::<bf16>(checks, 9, 1536)?;
    // Runs that cross many borders of chunks, and of the groups that add them.
    table_gradient::<f32>(checks, 3000, 24)?;
    table_gradient::<bf16>(checks, 3001, 300)?;
    if !checks.small {
        table_gradient::<bf16>(checks, 20_000, 768)?;
    }
    Ok(())
}

fn table<W: Number>(i: usize, h: usize) -> Vec<W> {
    numbers::<W>(i as u64, TABLES[i] * h)
}

fn tables_alone<E: Number, W: Number>(checks: &mut Checks<'_>, t: usize, h: usize, count: usize) -> Result<()> {
    let ids: Vec<Vec<u32>> = (0..count).map(|i| indices(8 + i as u64, t, TABLES[i])).collect();
    let values: Vec<Vec<W>> = (0..count).map(|i| table::<W>(i, h)).collect();
    let gids = ids.iter().map(|ids| checks.up(ids)).collect::<Result<Vec<_>>>()?;
    let gvalues = values.iter().map(|v| checks.up(v)).collect::<Result<Vec<_>>>()?;
    let lookups: Vec<Lookup<'_>> =
        gids.iter().zip(&gvalues).map(|(ids, table)| Lookup { ids: ids.view(), table: table.view() }).collect();
    let out = checks.poisoned::<E>(t * h)?;
    embeddings::forward(checks.gpu, &lookups, h, out.view())?;
    let wide: Vec<Vec<f64>> = values.iter().map(|v| exact(v)).collect();
    let lookups: Vec<(&[u32], &[f64])> = ids.iter().zip(&wide).map(|(i, v)| (&i[..], &v[..])).collect();
    let expected = embedding_reference::forward(&lookups, h);
    checks.close::<E>(&format!("embedding {t}×{h} of {count} tables {:?}", W::DTYPE), &out, &expected)
}

fn tables_normalised<E: Number>(checks: &mut Checks<'_>, t: usize, h: usize) -> Result<()> {
    let what = format!("embedding with LayerNorm, {t}×{h}");
    let ids: Vec<Vec<u32>> = (0..3).map(|i| indices(8 + i as u64, t, TABLES[i])).collect();
    let values: Vec<Vec<E>> = (0..3).map(|i| table::<E>(i, h)).collect();
    let gids = ids.iter().map(|ids| checks.up(ids)).collect::<Result<Vec<_>>>()?;
    let gvalues = values.iter().map(|v| checks.up(v)).collect::<Result<Vec<_>>>()?;
    let lookups: Vec<Lookup<'_>> =
        gids.iter().zip(&gvalues).map(|(ids, table)| Lookup { ids: ids.view(), table: table.view() }).collect();
    let (gamma, beta) = (numbers::<f32>(4, h), numbers::<f32>(5, h));
    let (ggamma, gbeta) = (checks.up(&gamma)?, checks.up(&beta)?);
    let rows = places(t);
    let gplaces = checks.up_places(&rows)?;
    let (on_cpu, dropout) = both(true, 7);
    let (sum, y, statistics) =
        (checks.poisoned::<E>(t * h)?, checks.poisoned::<E>(t * h)?, checks.poisoned::<f32>(2 * t)?);
    let dropout = dropout.map(|d| (d, gplaces.view()));
    let gnorm = kernels::Norm { gamma: ggamma.view(), beta: Some(gbeta.view()), epsilon: 1e-12, centred: true };
    embeddings::forward_layer_norm(
        checks.gpu,
        &lookups,
        gnorm,
        dropout,
        sum.view(),
        y.view(),
        Some(statistics.view()),
    )?;
    let wide: Vec<Vec<f64>> = values.iter().map(|v| exact(v)).collect();
    let lookups: Vec<(&[u32], &[f64])> = ids.iter().zip(&wide).map(|(i, v)| (&i[..], &v[..])).collect();
    let expected = embedding_reference::forward(&lookups, h);
    checks.close::<E>(&format!("sum of {what}"), &sum, &expected)?;
    let mask = mask(on_cpu, &rows, h);
    let stored = exact(&checks.read::<E>(&what, &sum)?);
    let (wide_gamma, wide_beta) = (exact(&gamma), exact(&beta));
    let norm = Norm { gamma: &wide_gamma, beta: Some(&wide_beta), epsilon: 1e-12, centred: true };
    let expected = reference::forward(&stored, None, &norm, None, mask.as_deref());
    checks.close::<E>(&format!("y of {what}"), &y, &expected.y)?;
    let expected: Vec<f64> = expected.statistics.concat();
    checks.within::<f32>(&format!("statistics of {what}"), &statistics, &expected, 1e-5)
}

/// The scatter of each table's gradient: same numbers, and the same bits twice.
fn table_gradient<E: Number>(checks: &mut Checks<'_>, t: usize, h: usize) -> Result<()> {
    let dy = numbers::<E>(7, t * h);
    let gdy = checks.up(&dy)?;
    for table in 0..3 {
        let what = format!("gradient of table {table}, {t}×{h}");
        let ids = indices(8 + table as u64, t, TABLES[table]);
        let gids = checks.up(&ids)?;
        let (keys, order) = (checks.gpu.empty(t, DType::U32)?, checks.gpu.empty(t, DType::U32)?);
        let sorted = Sorted { keys: keys.view(), order: order.view() };
        whole_rows::sort(checks.gpu, gids.view(), TABLES[table], sorted)?;
        let mut expected = vec![0.5; TABLES[table] * h];
        embedding_reference::backward(&exact(&dy), &ids, &mut expected, h);
        let mut run = || -> Result<Vec<u32>> {
            let dtable = checks.out(&vec![0.5f32; TABLES[table] * h])?;
            whole_rows::scatter_add(checks.gpu, gdy.view(), h, sorted, dtable.view(), false)?;
            checks.close::<f32>(&what, &dtable, &expected)?;
            bits::<f32>(checks.gpu, &dtable)
        };
        let (first, second) = (run()?, run()?);
        checks.verify(|| format!("{what}: two runs differ"), first == second);
        if TABLES[table] > whole_rows::MOST_KINDS {
            continue;
        }
        // Few rows need no sorting.
        for add in [false, true] {
            let dtable = if add {
                checks.out(&vec![0.5f32; TABLES[table] * h])?
            } else {
                checks.poisoned::<f32>(TABLES[table] * h)?
            };
            let sum = Sum { to: dtable.view(), add };
            whole_rows::add_kinds(checks.gpu, gdy.view(), h, gids.view(), sum)?;
            let expected: Vec<f64> = expected.iter().map(|x| if add { *x } else { x - 0.5 }).collect();
            checks.close::<f32>(&format!("{what}, by kind"), &dtable, &expected)?;
        }
    }
    // Sequences of 1, 2, 3, … tokens, and the rest in one.
    let mut offsets = vec![0u32];
    while (offsets[offsets.len() - 1] as usize + offsets.len()) < t && offsets.len() < 30 {
        offsets.push(offsets[offsets.len() - 1] + offsets.len() as u32);
    }
    offsets.push(t as u32);
    let ids: Vec<u32> = offsets.windows(2).flat_map(|w| 0..w[1] - w[0]).collect();
    let places = ids.iter().max().map_or(0, |last| *last as usize + 3);
    let mut expected = vec![0.0; places * h];
    embedding_reference::backward(&exact(&dy), &ids, &mut expected, h);
    let goffsets = checks.up(&offsets)?;
    for add in [false, true] {
        let dtable = if add { checks.out(&vec![0.5f32; places * h])? } else { checks.poisoned::<f32>(places * h)? };
        whole_rows::add_places(checks.gpu, gdy.view(), h, goffsets.view(), Sum { to: dtable.view(), add })?;
        let expected: Vec<f64> = expected.iter().map(|x| if add { x + 0.5 } else { *x }).collect();
        checks.close::<f32>(&format!("gradient of places, {t}×{h}"), &dtable, &expected)?;
    }
    Ok(())
}

pub(crate) fn sort(checks: &mut Checks<'_>) -> Result<()> {
    let cases =
        [(1, 1), (5, 3), (31, 256), (2048, 257), (2049, 70_000), (5000, 30_522), (30_000, 2), (66_000, 1 << 25)];
    for (n, limit) in cases {
        let keys = indices(n as u64, n, limit);
        let gkeys = checks.up(&keys)?;
        let (sorted_keys, order) = (checks.gpu.empty(n, DType::U32)?, checks.gpu.empty(n, DType::U32)?);
        let sorted = Sorted { keys: sorted_keys.view(), order: order.view() };
        whole_rows::sort(checks.gpu, gkeys.view(), limit, sorted)?;
        let (got, order) = (checks.gpu.read::<u32>(sorted.keys)?, checks.gpu.read::<u32>(sorted.order)?);
        let mut expected: Vec<u32> = (0..n as u32).collect();
        expected.sort_by_key(|i| keys[*i as usize]);
        checks.verify(|| format!("order of {n} below {limit}"), order == expected);
        let expected: Vec<u32> = expected.iter().map(|i| keys[*i as usize]).collect();
        checks.verify(|| format!("keys of {n} below {limit}"), got == expected);
    }
    Ok(())
}

/// Rows in no order, some of them twice: a third as many as there are.
fn picked(t: usize) -> Vec<u32> {
    (0..t.div_ceil(3)).map(|i| (i * 7 % t / 2) as u32).collect()
}

/// Sequences of 0, 1, 2, … rows, the last one cut off.
fn offsets(t: usize) -> Vec<u32> {
    let ends = (0..).map(|i: u32| i * (i + 1) / 2);
    ends.take_while(|end| (*end as usize) < t).chain([t as u32]).collect()
}

pub(crate) fn rows(checks: &mut Checks<'_>) -> Result<()> {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300] {
            some_rows::<f32>(checks, t, h)?;
            some_rows::<bf16>(checks, t, h)?;
        }
    }
    let (mut x, out) = (numbers::<f32>(1, 5 * 20), checks.poisoned::<f32>(20)?);
    x[2 * 20 + 9] = f32::NAN;
    let (gx, ends) = (checks.out(&x)?, checks.up(&[0u32, 5])?);
    whole_rows::segment_max(checks.gpu, gx.view(), 20, ends.view(), out.view())?;
    let got = checks.read::<f32>("segment_max", &out)?;
    checks.verify(|| format!("segment_max of a NaN: {got:?}"), (0..20).all(|c| got[c].is_nan() == (c == 9)));
    whole_rows::l2_normalise(checks.gpu, gx.view(), 20)?;
    let got = checks.read::<f32>("l2_normalise", &gx)?;
    checks.verify(|| "l2_normalise of a NaN".into(), (0..100).all(|i| got[i].is_nan() == (i / 20 == 2)));
    Ok(())
}

fn some_rows<E: Number>(checks: &mut Checks<'_>, t: usize, h: usize) -> Result<()> {
    let what = format!("{t}×{h}");
    let x = numbers::<E>(1, t * h);
    let (gx, wide) = (checks.up(&x)?, exact(&x));
    let picked = picked(t);
    let gpicked = checks.up(&picked)?;
    let out = checks.poisoned::<E>(picked.len() * h)?;
    whole_rows::gather(checks.gpu, gx.view(), h, gpicked.view(), out.view())?;
    let expected = rows_reference::gather(&wide, h, &picked);
    checks.within::<E>(&format!("gather of {what}"), &out, &expected, 0.0)?;
    let out = checks.poisoned::<f32>(picked.len() * h)?;
    whole_rows::gather(checks.gpu, gx.view(), h, gpicked.view(), out.view())?;
    checks.within::<f32>(&format!("widening gather of {what}"), &out, &expected, 0.0)?;

    let dy = numbers::<E>(2, picked.len() * h);
    let mut expected = vec![0.0; t * h];
    rows_reference::scatter_add(&exact(&dy), h, &picked, &mut expected);
    // Forty rows more that go nowhere: a whole chunk, and parts of two.
    let more = numbers::<E>(3, 40 * h);
    let gdy = checks.up(&[more.as_slice(), &dy].concat())?;
    let gpicked = checks.up(&[vec![whole_rows::NOWHERE; 40], picked.clone()].concat())?;
    let all = picked.len() + 40;
    let (keys, order) = (checks.gpu.empty(all, DType::U32)?, checks.gpu.empty(all, DType::U32)?);
    let sorted = Sorted { keys: keys.view(), order: order.view() };
    whole_rows::sort(checks.gpu, gpicked.view(), t, sorted)?;
    let dx = checks.poisoned::<E>(t * h)?;
    whole_rows::scatter_add(checks.gpu, gdy.view(), h, sorted, dx.view(), true)?;
    checks.close::<E>(&format!("scatter_add of {what}"), &dx, &expected)?;
    let dx = checks.out(&x)?;
    whole_rows::scatter_add(checks.gpu, gdy.view(), h, sorted, dx.view(), false)?;
    let added: Vec<f64> = expected.iter().zip(&wide).map(|(d, x)| d + x).collect();
    checks.close::<E>(&format!("scatter_add to what is there, {what}"), &dx, &added)?;

    let distinct: Vec<u32> = (0..t.div_ceil(3) as u32).map(|i| (t as u32 - 1) - 2 * i).collect();
    let (gdistinct, gdy) = (checks.up(&distinct)?, checks.up(&dy)?);
    let mut expected = vec![0.0; t * h];
    rows_reference::scatter_add(&exact(&dy), h, &distinct, &mut expected);
    let dx = checks.poisoned::<E>(t * h)?;
    whole_rows::scatter_distinct(checks.gpu, gdy.view(), h, gdistinct.view(), dx.view(), true)?;
    checks.within::<E>(&format!("scatter_distinct of {what}"), &dx, &expected, 0.0)?;
    let dx = checks.out(&x)?;
    whole_rows::scatter_distinct(checks.gpu, gdy.view(), h, gdistinct.view(), dx.view(), false)?;
    let added: Vec<f64> = expected.iter().zip(&wide).map(|(d, x)| d + x).collect();
    checks.close::<E>(&format!("scatter_distinct to what is there, {what}"), &dx, &added)?;

    let ids: Vec<RowId> = (0..t as u32).map(|position| RowId { sequence: 6, position }).collect();
    let gids = checks.up_places(&ids)?;
    if let (Some(on_cpu), Some(dropout)) = (CpuDropout::new(0.2, 3, 1, 4), Dropout::new(0.2, 3, Step::Value(1), 4)) {
        let y = checks.out(&x)?;
        whole_rows::drop(checks.gpu, y.view(), h, dropout, gids.view())?;
        let keeps = |i: usize| f64::from(u8::from(on_cpu.keeps(ids[i / h], h, i % h)));
        let expected: Vec<f64> = (0..t * h).map(|i| wide[i] * keeps(i) * f64::from(on_cpu.scale())).collect();
        checks.close::<E>(&format!("drop of {what}"), &y, &expected)?;
    }

    let offsets = offsets(t);
    let goffsets = checks.up(&offsets)?;
    let count = (offsets.len() - 1) * h;
    let (mean, largest) =
        (rows_reference::segment_mean(&wide, h, &offsets), rows_reference::segment_max(&wide, h, &offsets));
    let out = checks.poisoned::<f32>(count)?;
    whole_rows::segment_mean(checks.gpu, gx.view(), h, goffsets.view(), out.view())?;
    checks.close::<f32>(&format!("segment_mean of {what}"), &out, &mean)?;
    let out = checks.poisoned::<bf16>(count)?;
    whole_rows::segment_mean(checks.gpu, gx.view(), h, goffsets.view(), out.view())?;
    checks.close::<bf16>(&format!("segment_mean of {what}"), &out, &mean)?;
    let out = checks.poisoned::<f32>(count)?;
    whole_rows::segment_max(checks.gpu, gx.view(), h, goffsets.view(), out.view())?;
    checks.within::<f32>(&format!("segment_max of {what}"), &out, &largest, 0.0)?;

    // With a row more than the sequences have.
    let (dmean, mut expected) = (numbers::<f32>(6, count), vec![0.0; (t + 1) * h]);
    rows_reference::segment_mean_gradient(&exact(&dmean), h, &offsets, &mut expected);
    let (gdmean, dx) = (checks.up(&dmean)?, checks.poisoned::<E>((t + 1) * h)?);
    whole_rows::segment_mean_gradient(checks.gpu, gdmean.view(), h, goffsets.view(), dx.view(), true)?;
    checks.close::<E>(&format!("segment_mean's gradient of {what}"), &dx, &expected)?;
    let there = numbers::<E>(7, (t + 1) * h);
    expected.iter_mut().zip(exact(&there)).for_each(|(d, x)| *d += x);
    let dx = checks.out(&there)?;
    whole_rows::segment_mean_gradient(checks.gpu, gdmean.view(), h, goffsets.view(), dx.view(), false)?;
    checks.close::<E>(&format!("segment_mean's gradient to what is there, {what}"), &dx, &expected)?;

    let dy = numbers::<E>(8, t * h);
    let expected = rows_reference::l2_normalise_gradient(&wide, &exact(&dy), h);
    let dx = checks.out(&dy)?;
    whole_rows::l2_normalise_gradient(checks.gpu, gx.view(), dx.view(), h)?;
    checks.close::<E>(&format!("l2_normalise's gradient of {what}"), &dx, &expected)?;
    let dx = checks.out(&dy[..h])?;
    let expected: Vec<f64> = exact(&dy[..h]).iter().map(|dy| dy * 1e12).collect();
    let zeros = checks.up(&vec![E::default(); h])?;
    whole_rows::l2_normalise_gradient(checks.gpu, zeros.view(), dx.view(), h)?;
    checks.close::<E>(&format!("l2_normalise's gradient at nothing, {h} columns"), &dx, &expected)?;

    let mut y = x.clone();
    // Rows of zeros, and of a very small length.
    y[..h].fill(E::default());
    y.chunks_mut(h).skip(1).step_by(2).for_each(|row| row[1..].fill(E::from_f32(1e-7)));
    y.chunks_mut(h).skip(1).step_by(4).for_each(|row| row[0] = E::from_f32(1e-7));
    let expected = rows_reference::l2_normalise(&exact(&y), h);
    let out = checks.out(&y)?;
    whole_rows::l2_normalise(checks.gpu, out.view(), h)?;
    checks.close::<E>(&format!("l2_normalise of {what}"), &out, &expected)?;

    let bias = numbers::<f32>(9, h);
    let (gbias, out) = (checks.up(&bias)?, checks.out(&x)?);
    whole_rows::add_bias(checks.gpu, out.view(), gbias.view())?;
    let expected: Vec<f64> = (0..t * h).map(|i| wide[i] + f64::from(bias[i % h])).collect();
    checks.close::<E>(&format!("add_bias of {what} in {:?}", f32::DTYPE), &out, &expected)
}

/// Rotary positions, there and back.
pub(crate) fn rotary(checks: &mut Checks<'_>) -> Result<()> {
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        for (t, heads, d, size, around) in [
            (1, 1, 8, 2, (0, 0)),
            (7, 2, 16, 16, (0, 16)),
            (33, 3, 64, 64, (0, 64)),
            (129, 2, 32, 16, (8, 8)),
            (20, 4, 24, 10, (3, 5)),
            (9, 2, 128, 96, (0, 0)),
        ] {
            let rotary = Rotary { theta: 10_000.0, size, pairing };
            turns::<f32>(checks, rotary, (t, heads, d), around)?;
            turns::<bf16>(checks, rotary, (t, heads, d), around)?;
        }
    }
    // A position outside of the table.
    let rotary = Rotary { theta: 10_000.0, size: 8, pairing: Pairing::Halves };
    let (table, positions) = (checks.up(&rotary.table(3))?, checks.up(&[0u32, 3])?);
    let x = checks.out::<f32>(&[1.0; 16])?;
    rotations::rotate(checks.gpu, &rotary, table.view(), positions.view(), x.view(), 8, 0..8, 8, false)?;
    let got = checks.read::<f32>("rotary", &x)?;
    let good = got[..8].iter().all(|x| x.is_finite()) && got[8..].iter().all(|x| x.is_nan());
    checks.verify(|| format!("rotary outside of its table: {got:?}"), good);
    checks.verify(|| "rotary outside of its table: no fault".into(), checks.gpu.check_faults().is_err());
    Ok(())
}

/// `before` and `after` are columns that are left alone.
fn turns<E: Number>(
    checks: &mut Checks<'_>,
    rotary: Rotary,
    (t, heads, d): (usize, usize, usize),
    (before, after): (usize, usize),
) -> Result<()> {
    let stride = before + heads * d + after;
    let x = numbers::<E>(1, t * stride);
    let positions = indices(2, t, 300);
    let (gtable, gpositions) = (checks.up(&rotary.table(300))?, checks.up(&positions)?);
    for opposite in [false, true] {
        let what = format!("{rotary:?} of {t} tokens, {heads} heads of {d}, opposite {opposite}");
        let out = checks.out(&x)?;
        let columns = before..before + heads * d;
        let (table, at) = (gtable.view(), gpositions.view());
        rotations::rotate(checks.gpu, &rotary, table, at, out.view(), stride, columns.clone(), d, opposite)?;
        let wide = exact(&x);
        let own: Vec<f64> = wide.chunks(stride).flat_map(|row| row[columns.clone()].to_vec()).collect();
        let turned = rotary_reference::rotate(&rotary, &own, d, &positions, opposite);
        let mut expected = wide;
        for (row, turned) in expected.chunks_mut(stride).zip(turned.chunks(heads * d)) {
            row[columns.clone()].copy_from_slice(turned);
        }
        checks.close::<E>(&what, &out, &expected)?;
    }
    Ok(())
}
