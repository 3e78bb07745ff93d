//! What reads words as characters, mixtures of layers, and what stands around them: columns side by side, dropout of the same columns at
//! all tokens of a sequence, the gradient of the largest.

use half::bf16;
use henson_kernels::cpu::activation::Activation;
use henson_kernels::cpu::{convolution, highway, mix, rows};
use henson_kernels::cuda::characters::{self as kernels, Bank, BankGradients};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::rows::Columns;
use henson_kernels::cuda::{Dropout, Result, Step, mix as mixtures, rows as row_kernels};

use crate::check::{Checks, Number, TOLERANCE_F32, bits, error, exact, numbers, places, tolerance};

pub(crate) fn characters(checks: &mut Checks<'_>) -> Result<()> {
    let lengths: Vec<usize> = (0..40).map(|i| 4 + i * i % 9).collect();
    for activation in [Activation::None, Activation::Relu, Activation::Tanh] {
        for d in [1, 4, 16, 30] {
            convolve::<f32>(checks, activation, d, &[(1, 3), (4, 9)], &[5, 4, 17])?;
            convolve::<bf16>(checks, activation, d, &[(1, 3), (4, 9)], &[5, 4, 17])?;
        }
    }
    // Filters of several blocks, one row of numbers that is wider than a warp takes at a time, words in several chunks.
    convolve::<f32>(checks, Activation::Relu, 16, &[(1, 32), (2, 40), (3, 300)], &lengths)?;
    convolve::<bf16>(checks, Activation::Tanh, 48, &[(4, 7)], &lengths)?;
    convolve::<f32>(checks, Activation::Tanh, 3, &[(2, 1)], &[2])?;
    // More than one block of products: 64 MiB of sums.
    let (filters, words) = if checks.small { (4096, 420) } else { (4096, 2000) };
    let many: Vec<usize> = (0..words).map(|i| 3 + i % 17).collect();
    forward_in_blocks(checks, filters, &many)?;
    for (rows, h) in [(1, 1), (3, 7), (33, 40), (129, 128)] {
        highways::<f32>(checks, rows, h)?;
        highways::<bf16>(checks, rows, h)?;
    }
    for (rows, n, w) in [(1, 1, 1), (7, 3, 5), (33, 13, 24), (600, 3, 64), (5, 256, 9)] {
        mixtures_of::<f32>(checks, rows, n, w)?;
        mixtures_of::<bf16>(checks, rows, n, w)?;
    }
    for (t, a, b) in [(1, 1, 1), (7, 3, 5), (33, 16, 24), (129, 64, 8)] {
        beside::<f32>(checks, t, a, b)?;
        beside::<bf16>(checks, t, a, b)?;
    }
    for h in [1, 7, 64, 129] {
        largest::<f32>(checks, h)?;
        largest::<bf16>(checks, h)?;
    }
    same_columns(checks)
}

fn offsets_of(lengths: &[usize]) -> Vec<u32> {
    let mut offsets = vec![0];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
    offsets
}

/// Words of these lengths, filled up with rows of none, through banks of (width, filters).
fn convolve<E: Number>(
    checks: &mut Checks<'_>,
    activation: Activation,
    d: usize,
    banks: &[(usize, usize)],
    lengths: &[usize],
) -> Result<()> {
    let offsets = offsets_of(lengths);
    let (words, rows) = (lengths.len(), *offsets.last().unwrap() as usize + 11);
    let columns: usize = banks.iter().map(|(_, filters)| filters).sum();
    let what = format!("convolution, {activation:?}, {words} words of {d} columns, {banks:?}");
    let (x, dy) = (numbers::<E>(1, rows * d), numbers::<E>(2, words * columns));
    // Sums of about 1, where tanh has a slope.
    let small = |n: usize, inputs: usize| -> Vec<E> {
        numbers::<f32>(3, n).iter().map(|x| E::from_f32(x / (inputs as f32).sqrt())).collect()
    };
    let weights: Vec<Vec<E>> = banks.iter().map(|(width, filters)| small(filters * width * d, width * d)).collect();
    let biases: Vec<Vec<f32>> = banks.iter().map(|(_, filters)| numbers(4, *filters)).collect();
    let (gx, gdy, goffsets) = (checks.up(&x)?, checks.up(&dy)?, checks.up(&offsets)?);
    let gweights = weights.iter().map(|weight| checks.up(weight)).collect::<Result<Vec<_>>>()?;
    let gbiases = biases.iter().map(|bias| checks.up(bias)).collect::<Result<Vec<_>>>()?;
    let on_gpu: Vec<Bank<'_>> = (0..banks.len())
        .map(|i| Bank { width: banks[i].0, weight: gweights[i].view(), bias: gbiases[i].view() })
        .collect();
    let out = checks.poisoned::<E>(words * columns)?;
    let gat = checks.up(&vec![7u32; words * columns])?;
    let input = (gx.view(), d);
    kernels::forward(checks.gpu, input, goffsets.view(), &on_gpu, activation, out.view(), gat.view())?;
    let at = checks.gpu.read::<u32>(gat.view())?;

    // The references, bank by bank. Where windows have nearly the same sum, either may be the largest: gradients are those of what was
    // found, which must be nearly the largest.
    let (wide, wide_dy) = (exact(&x), exact(&dy));
    let pick = |from: &[f64], first: usize, filters: usize| -> Vec<f64> {
        from.chunks(columns).flat_map(|row| &row[first..first + filters]).copied().collect()
    };
    let (mut expected, mut dx) = (vec![0.0; words * columns], vec![0.0; rows * d]);
    let (mut dweights, mut dbiases) = (Vec::new(), Vec::new());
    let (mut first, mut off) = (0, 0);
    for (i, (width, filters)) in banks.iter().enumerate() {
        let (weight, bias) = (exact(&weights[i]), exact(&biases[i]));
        let bank = convolution::Bank { width: *width, weight: &weight[..], bias: &bias[..] };
        let (values, best) = convolution::reference::forward(&wide, d, &offsets, bank, activation);
        let found: Vec<u32> = at.chunks(columns).flat_map(|row| &row[first..first + filters]).copied().collect();
        off += found.iter().zip(&best).filter(|(found, best)| found != best).count();
        for (word, row) in values.chunks(*filters).enumerate() {
            expected[word * columns + first..][..*filters].copy_from_slice(row);
            let windows = offsets[word]..=offsets[word + 1] - *width as u32;
            let own = &found[word * filters..][..*filters];
            checks
                .verify(|| format!("{what}: a window outside of its word"), own.iter().all(|at| windows.contains(at)));
        }
        let dy = pick(&wide_dy, first, *filters);
        let (dweight, dbias) = convolution::reference::backward(&wide, d, bank, activation, &found, &dy, &mut dx);
        // One of both is added to.
        dweights.push(dweight.iter().map(|x| x + if i == 0 { 1.0 } else { 0.0 }).collect::<Vec<f64>>());
        dbiases.push(dbias.iter().map(|x| x + if i == 1 { 1.0 } else { 0.0 }).collect::<Vec<f64>>());
        first += filters;
    }
    checks.verify(|| format!("{what}: {off} other windows"), off * 100 <= words * columns);
    checks.close::<E>(&what, &out, &expected)?;

    let mut run = || -> Result<Vec<u32>> {
        let gdx = checks.poisoned::<E>(rows * d)?;
        let mut to = Vec::new();
        for (i, (weight, bias)) in weights.iter().zip(&biases).enumerate() {
            let start = |n: usize, ones: bool| match ones {
                true => checks.out(&vec![1.0f32; n]),
                false => checks.poisoned::<f32>(n),
            };
            to.push((start(weight.len(), i == 0)?, start(bias.len(), i == 1)?));
        }
        let gradients: Vec<BankGradients<'_>> = to
            .iter()
            .enumerate()
            .map(|(i, (weight, bias))| BankGradients {
                weight: Sum { to: weight.view(), add: i == 0 },
                bias: Sum { to: bias.view(), add: i == 1 },
            })
            .collect();
        let (y, dy, to_x) = ((out.view(), gat.view()), gdy.view(), Some(gdx.view()));
        kernels::backward(checks.gpu, input, goffsets.view(), &on_gpu, activation, y, dy, to_x, &gradients)?;
        let mut all = bits::<E>(checks.gpu, &gdx)?;
        let bound = tolerance::<E>();
        checks.within::<E>(&format!("input's gradient of {what}"), &gdx, &dx, bound)?;
        for (i, (weight, bias)) in to.iter().enumerate() {
            checks.within::<f32>(&format!("weight's gradient of {what}"), weight, &dweights[i], bound)?;
            checks.within::<f32>(&format!("bias' gradient of {what}"), bias, &dbiases[i], bound)?;
            all.extend(bits::<f32>(checks.gpu, weight)?);
        }
        Ok(all)
    };
    let same = run()? == run()?;
    checks.verify(|| format!("two runs of {what} differ"), same);
    Ok(())
}

/// So many filters that products are made in several blocks of rows, which words cross.
fn forward_in_blocks(checks: &mut Checks<'_>, filters: usize, lengths: &[usize]) -> Result<()> {
    let (offsets, d, width) = (offsets_of(lengths), 2, 3);
    let (words, rows) = (lengths.len(), *offsets.last().unwrap() as usize);
    let (x, weight) = (numbers::<f32>(1, rows * d), numbers::<f32>(2, filters * width * d));
    let bias = vec![0.25f32; filters];
    let (gx, goffsets, gweight, gbias) = (checks.up(&x)?, checks.up(&offsets)?, checks.up(&weight)?, checks.up(&bias)?);
    let (out, at) = (checks.poisoned::<f32>(words * filters)?, checks.up(&vec![7u32; words * filters])?);
    let bank = [Bank { width, weight: gweight.view(), bias: gbias.view() }];
    let to = (out.view(), at.view());
    kernels::forward(checks.gpu, (gx.view(), d), goffsets.view(), &bank, Activation::Relu, to.0, to.1)?;
    // Some filters say enough.
    let (some, got) = (filters - 2, checks.read::<f32>("blocks of products", &out)?);
    let (x, weight, bias) = (exact(&x), exact(&weight[some * width * d..]), exact(&bias[some..]));
    let bank = convolution::Bank { width, weight: &weight[..], bias: &bias[..] };
    let (expected, _) = convolution::reference::forward(&x, d, &offsets, bank, Activation::Relu);
    let got: Vec<f64> = got.chunks(filters).flat_map(|row| &row[some..]).map(|x| f64::from(*x)).collect();
    let off = error(&got, &expected);
    checks.verify(|| format!("blocks of products: error {off:.1e}"), off <= TOLERANCE_F32);
    Ok(())
}

fn highways<E: Number>(checks: &mut Checks<'_>, rows: usize, h: usize) -> Result<()> {
    let what = format!("highway, {rows}×{h}");
    let (z, x, dy) = (numbers::<E>(1, rows * 2 * h), numbers::<E>(2, rows * h), numbers::<E>(3, rows * h));
    let (gz, gx, gdy) = (checks.up(&z)?, checks.up(&x)?, checks.up(&dy)?);
    let (out, dz, dx) =
        (checks.poisoned::<E>(rows * h)?, checks.poisoned::<E>(rows * 2 * h)?, checks.poisoned::<E>(rows * h)?);
    kernels::highway(checks.gpu, gz.view(), gx.view(), h, out.view())?;
    kernels::highway_backward(checks.gpu, gz.view(), gx.view(), h, gdy.view(), dz.view(), dx.view())?;
    let (z, x) = (exact(&z), exact(&x));
    checks.close::<E>(&what, &out, &highway::reference::forward(&z, &x, h))?;
    let (expected_dz, expected_dx) = highway::reference::backward(&z, &x, h, &exact(&dy));
    checks.close::<E>(&format!("{what}: the gates' gradient"), &dz, &expected_dz)?;
    checks.close::<E>(&format!("{what}: the input's gradient"), &dx, &expected_dx)
}

fn mixtures_of<E: Number>(checks: &mut Checks<'_>, rows: usize, n: usize, w: usize) -> Result<()> {
    let what = format!("mixture of {n} layers, {rows}×{w}");
    let (x, dy, weights) = (numbers::<E>(1, rows * n * w), numbers::<E>(2, rows * w), numbers::<f32>(3, n));
    let gamma = [1.5f32];
    let (gx, gdy, gweights, ggamma) = (checks.up(&x)?, checks.up(&dy)?, checks.up(&weights)?, checks.up(&gamma)?);
    let out = checks.poisoned::<E>(rows * w)?;
    mixtures::forward(checks.gpu, gx.view(), w, gweights.view(), ggamma.view(), out.view())?;
    let (wide, weights) = (exact(&x), exact(&weights));
    checks.close::<E>(&what, &out, &mix::reference::forward(&wide, w, &weights, 1.5))?;
    let (expected_dx, mut dweights, dgamma) = mix::reference::backward(&wide, w, &weights, 1.5, &exact(&dy));
    dweights.iter_mut().for_each(|x| *x += 1.0);
    let mut run = |wanted: bool| -> Result<Vec<u32>> {
        let (dx, to, gamma) =
            (checks.poisoned::<E>(rows * n * w)?, checks.out(&vec![1.0f32; n])?, checks.poisoned::<f32>(1)?);
        let sums = [Sum::add(to.view()), Sum { to: gamma.view(), add: false }];
        let place = wanted.then(|| dx.view());
        mixtures::backward(checks.gpu, gx.view(), w, gweights.view(), ggamma.view(), gdy.view(), place, sums)?;
        if wanted {
            checks.close::<E>(&format!("{what}: the input's gradient"), &dx, &expected_dx)?;
        }
        checks.within::<f32>(&format!("{what}: the weights' gradient"), &to, &dweights, TOLERANCE_F32)?;
        checks.within::<f32>(&format!("{what}: the factor's gradient"), &gamma, &[dgamma], TOLERANCE_F32)?;
        bits::<f32>(checks.gpu, &to)
    };
    let same = run(true)? == run(false)?;
    checks.verify(|| format!("two runs of {what} differ"), same);
    Ok(())
}

/// Two matrices side by side, and apart again.
fn beside<E: Number>(checks: &mut Checks<'_>, t: usize, a: usize, b: usize) -> Result<()> {
    let (x, y) = (numbers::<E>(1, t * a), numbers::<E>(2, t * b));
    let (gx, gy, both) = (checks.up(&x)?, checks.up(&y)?, checks.poisoned::<E>(t * (a + b))?);
    let at = |first: usize, count: usize| Columns { first, count, stride: a + b };
    row_kernels::copy_columns(checks.gpu, gx.view(), Columns::all(a), both.view(), at(0, a))?;
    row_kernels::copy_columns(checks.gpu, gy.view(), Columns::all(b), both.view(), at(a, b))?;
    let what = format!("{t} rows of {a} and {b} columns");
    let rows = x.chunks(a).zip(y.chunks(b));
    let expected: Vec<E> = rows.flat_map(|(x, y)| x.iter().chain(y)).copied().collect();
    let got = checks.read::<E>(&what, &both)?;
    checks.verify(|| format!("{what} side by side"), got == expected);
    for (first, count, expected) in [(0, a, &x), (a, b, &y)] {
        let apart = checks.poisoned::<E>(t * count)?;
        row_kernels::copy_columns(checks.gpu, both.view(), at(first, count), apart.view(), Columns::all(count))?;
        let got = checks.read::<E>(&what, &apart)?;
        checks.verify(|| format!("{what} apart"), got == *expected);
    }
    Ok(())
}

fn largest<E: Number>(checks: &mut Checks<'_>, h: usize) -> Result<()> {
    let offsets = [0u32, 1, 8, 10, 43];
    let (rows, segments) = (43 + 5, 4);
    // Some numbers are there twice: the first gets it all.
    let mut x = numbers::<E>(1, rows * h);
    (0..h).for_each(|c| x[20 * h + c] = x[12 * h + c]);
    let dy = numbers::<E>(2, segments * h);
    let (gx, gdy, goffsets) = (checks.up(&x)?, checks.up(&dy)?, checks.up(&offsets)?);
    let mut expected = vec![0.0; rows * h];
    rows::reference::segment_max_gradient(&exact(&x), &exact(&dy), h, &offsets, &mut expected);
    let dx = checks.poisoned::<E>(rows * h)?;
    row_kernels::segment_max_gradient(checks.gpu, gx.view(), gdy.view(), h, goffsets.view(), dx.view(), true)?;
    checks.close::<E>(&format!("gradient of the largest, {h} columns"), &dx, &expected)?;
    let start = vec![E::from_f32(1.0); rows * h];
    let dx = checks.out(&start)?;
    row_kernels::segment_max_gradient(checks.gpu, gx.view(), gdy.view(), h, goffsets.view(), dx.view(), false)?;
    expected.iter_mut().for_each(|x| *x += 1.0);
    checks.close::<E>(&format!("gradient of the largest, added, {h} columns"), &dx, &expected)
}

fn same_columns(checks: &mut Checks<'_>) -> Result<()> {
    let (t, h) = (33, 19);
    let tokens = places(t);
    let rows = checks.up(&vec![7u32; 2 * t])?;
    let gtokens = checks.up_places(&tokens)?;
    row_kernels::sequence_rows(checks.gpu, gtokens.view(), rows.view())?;
    let got = checks.gpu.read::<u32>(rows.view())?;
    let good = got.chunks(2).zip(&tokens).all(|(row, token)| row == [token.sequence, 0]);
    checks.verify(|| "rows of sequences".to_owned(), good);
    let x = checks.out(&vec![1.0f32; t * h])?;
    let Some(drop) = Dropout::new(0.5, 3, Step::Value(1), 2) else { return Ok(()) };
    row_kernels::drop(checks.gpu, x.view(), h, drop, rows.view())?;
    let got = checks.read::<f32>("dropout of the same columns", &x)?;
    let alike = (0..t).all(|i| i % 5 == 0 || got[i * h..(i + 1) * h] == got[(i - 1) * h..i * h]);
    let some = got.contains(&0.0) && got.iter().any(|x| *x != 0.0);
    checks.verify(|| "dropout of the same columns".to_owned(), alike && some);
    Ok(())
}
