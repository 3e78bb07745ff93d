//! Operations on the tape, each in a small network: gradients of all parameters against differences of the loss, f32 against
//! bf16, the same bits for any number of threads, and errors where sizes do not fit. With HENSON_TEST_CUDA set, the GPU's against the
//! CPU's.

use crate::common::*;
use henson_tensor::{
    Activation, Attention, Bias, BiasValues, Buckets, Builder, Cache, DType, Device, EmbeddingTables,
    FeedForwardLayers, Init, Layout, LogBuckets, LogSums, Norm, Pairing, Param, Pass, PositionTables, QueryKeyValue,
    RelativePositions, Rotary, RotaryTable, Tape, Tensor, TensorError, Training, Window,
};

const QUERIES: [usize; 3] = [7, 1, 33];
const KEYS: [usize; 3] = [5, 40, 2];

fn tokens(lengths: &[usize]) -> usize {
    lengths.iter().sum()
}

fn attention(heads: usize, key_heads: usize) -> Attention {
    Attention { key_heads, ..Attention::new(heads, 8) }
}

#[test]
fn attention_by_description() {
    let buckets = Buckets { count: 8, max_distance: 20, bidirectional: true };
    let forms = [
        attention(4, 4),
        Attention { window: Window::CAUSAL, ..attention(4, 2) },
        Attention { window: Window::local(3), ..attention(2, 1) },
        Attention { bias: Bias::Relative(buckets), scale: 0.5, ..attention(2, 2) },
        Attention { bias: Bias::Slopes, ..attention(4, 4) },
    ];
    for form in forms {
        let t = tokens(&QUERIES);
        let build = |b: &mut Builder| {
            let table = match form.bias {
                Bias::Relative(_) => Some(b.matrix("bias", 8, form.heads, Init::Zeros)),
                _ => None,
            };
            (input(b, "qkv", t, form.fused_widths().iter().sum()), table)
        };
        check(&format!("{form:?}"), build, |(qkv, table): &((Param, usize), Option<Param>), pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let qkv = rows(pass, *qkv);
            let bias = match (form.bias, table) {
                (Bias::Slopes, _) => {
                    BiasValues::Slopes(Tensor::from_slice(pass.device(), [4], &[0.25f32, 0.1, 0.05, 0.01]).unwrap())
                }
                (_, Some(table)) => BiasValues::Table(*table),
                _ => BiasValues::None,
            };
            let from = QueryKeyValue::Fused(qkv);
            vec![pass.attention(&form, from, &bias, (&layout, &layout), (0.1, 1)).unwrap()]
        });
    }
}

#[test]
fn attention_to_other_sequences() {
    let form = attention(4, 2);
    let (tq, tk) = (tokens(&QUERIES), tokens(&KEYS));
    for apart in [false, true] {
        let build = |b: &mut Builder| {
            let key = input(b, "key", tk, if apart { 16 } else { 32 });
            (input(b, "query", tq, 32), key, apart.then(|| input(b, "value", tk, 16)))
        };
        check("cross-attention", build, |(query, key, value), pass| {
            let queries = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let keys = Layout::new(pass.device(), &KEYS, 3).unwrap();
            let (query, key) = (rows(pass, *query), rows(pass, *key));
            let from = match value {
                Some(value) => QueryKeyValue::Apart { query, key, value: rows(pass, *value) },
                None => QueryKeyValue::Cross { query, key_value: key },
            };
            vec![pass.attention(&form, from, &BiasValues::None, (&queries, &keys), (0.1, 1)).unwrap()]
        });
    }
}

/// Positions are projected by the weights of queries and keys, whose gradients come from both.
#[test]
fn disentangled_attention() {
    let (t, h, buckets) = (tokens(&QUERIES), 16, LogBuckets { count: 8, max_distance: 24 });
    let dropout = (0.1, 1);
    for form in 0..4 {
        let build = |b: &mut Builder| {
            let table = b.matrix("positions", 40, h, Init::Zeros);
            let weight = b.side_by_side(&["q", "k", "v"], h, h, Init::Zeros);
            // Where keys are not compared with positions, their bias changes nothing.
            let bias = (form != 1).then(|| b.vectors(&["q.bias", "k.bias", "v.bias"], h, Init::Zeros));
            (input(b, "x", t, h), table, weight, bias)
        };
        check(&format!("disentangled attention {form}"), build, |(x, table, weight, bias), pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let positions = RelativePositions::new(pass.device(), buckets, 40, &layout).unwrap();
            let rows = positions.range();
            assert_eq!(rows, 4..36, "of 40 rows, those that 33 tokens may need");
            let x = crate::common::rows(pass, *x);
            let whole = pass.table(table.to_row(rows.end).from_row(rows.start));
            let whole = pass.dropout_positions(whole, &positions, (0.1, 2)).unwrap();
            let part = |pass: &mut Pass<'_>, from: usize, to: usize| {
                let rows = |x: &Param| x.to_row(to * h).from_row(from * h);
                pass.linear(&whole, rows(weight), bias.as_ref().map(rows), Activation::None).unwrap()
            };
            // The projection of contents first: its gradient comes last, when that of a part is there.
            let qkv = pass.linear(&x, *weight, *bias, Activation::None).unwrap();
            let tables = match form {
                0 => PositionTables::Both(part(pass, 0, 2)),
                1 => PositionTables::Keys(part(pass, 1, 2)),
                2 => PositionTables::Queries(part(pass, 0, 1)),
                _ => PositionTables::Apart { keys: part(pass, 1, 2), queries: part(pass, 0, 1) },
            };
            vec![pass.disentangled(2, qkv, tables, &positions, &layout, dropout).unwrap()]
        });
    }
}

#[test]
fn rotary_positions_before_attention() {
    let t = tokens(&QUERIES);
    for (size, pairing) in [(8, Pairing::Halves), (4, Pairing::Neighbours)] {
        let form = attention(2, 2);
        check(
            "rotary",
            |b| input(b, "qkv", t, 48),
            |qkv, pass| {
                let rotary = Rotary { theta: 100.0, size, pairing };
                let table = RotaryTable::new(pass.device(), rotary, 40).unwrap();
                let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
                let qkv = rows(pass, *qkv);
                let qkv = pass.rotary(qkv, &table, layout.positions(), 0..32, 8).unwrap();
                let from = QueryKeyValue::Fused(qkv);
                vec![pass.attention(&form, from, &BiasValues::None, (&layout, &layout), (0.0, 1)).unwrap()]
            },
        );
    }
}

fn norm(b: &mut Builder, name: &str, size: usize, shifted: bool, centred: bool) -> Norm {
    b.at(name, |b| Norm {
        weight: b.vector("weight", size, Init::Ones),
        bias: shifted.then(|| b.vector("bias", size, Init::Zeros)),
        epsilon: 1e-3,
        centred,
    })
}

#[test]
fn norms_in_both_kinds_of_blocks() {
    let (t, h) = (tokens(&QUERIES), 24);
    for (shifted, centred) in [(true, true), (false, true), (false, false)] {
        let build =
            |b: &mut Builder| (input(b, "x", t, h), input(b, "residual", t, h), norm(b, "norm", h, shifted, centred));
        check("post-norm", build, |(x, residual, norm), pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let (x, residual) = (rows(pass, *x), rows(pass, *residual));
            let y = pass.add_norm(x, &residual, norm, &layout, (0.2, 1)).unwrap();
            vec![pass.norm_dropout(y, norm, &layout, (0.2, 2)).unwrap()]
        });
        check("pre-norm", build, |(x, residual, norm), pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let (x, residual) = (rows(pass, *x), rows(pass, *residual));
            // The stream of residuals is used twice more, its norm once; and the first norm leaves its input as it was.
            let first = pass.norm(residual.clone(), norm).unwrap();
            let (stream, y) = pass.add_pre_norm(x, &residual, norm, &layout, (0.2, 1)).unwrap();
            let end = pass.add_residual(y, &stream, &layout, (0.2, 2)).unwrap();
            vec![first, stream, end]
        });
    }
}

fn feed_forward(
    b: &mut Builder,
    h: usize,
    n: usize,
    activation: Activation,
    gated: bool,
    biased: bool,
) -> FeedForwardLayers {
    let rows = if gated { 2 * n } else { n };
    FeedForwardLayers {
        up: b.matrix("up", rows, h, Init::Zeros),
        up_bias: biased.then(|| b.vector("up_bias", rows, Init::Zeros)),
        activation,
        gated,
        down: b.matrix("down", h, n, Init::Zeros),
        down_bias: biased.then(|| b.vector("down_bias", h, Init::Zeros)),
    }
}

#[test]
fn feed_forward_pairs() {
    let (t, h, n) = (tokens(&QUERIES), 24, 35);
    let all = [
        (Activation::Gelu, true, false),
        (Activation::GeluTanh, true, true),
        (Activation::Silu, true, false),
        (Activation::Silu, false, true),
        (Activation::Gelu, false, false),
    ];
    for (activation, gated, biased) in all {
        for p in [0.0, 0.2] {
            check(
                &format!("{activation:?}, gated {gated}, bias {biased}, dropout {p}"),
                |b| (input(b, "x", t, h), feed_forward(b, h, n, activation, gated, biased)),
                |(x, layers), pass| {
                    let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
                    let x = rows(pass, *x);
                    let dropout = (p > 0.0).then_some((&layout, (p, 4)));
                    vec![pass.feed_forward(&x, layers, dropout).unwrap()]
                },
            );
        }
    }
}

#[test]
fn weights_of_a_frozen_gate_are_packed_and_give_the_same() {
    let (t, h, n) = (tokens(&QUERIES), 24, 35);
    let device = device(2);
    let mut builder = Builder::new();
    let (x, layers) = (input(&mut builder, "x", t, h), feed_forward(&mut builder, h, n, Activation::Silu, true, true));
    let mut parameters = builder.finish(&device, DType::F32).unwrap();
    parameters.initialise(1).unwrap();
    for entry in 1..5 {
        let values = numbers(entry as u64, parameters.entries()[entry].shape.elements());
        parameters.write(entry, &values).unwrap();
    }
    let run = |parameters: &henson_tensor::Parameters| {
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, parameters);
        let x = rows(&mut pass, x);
        pass.feed_forward(&x, &layers, None).unwrap().tensor().to_f32().unwrap()
    };
    let plain = run(&parameters);
    parameters.keep_packed();
    assert_eq!(plain, run(&parameters));
    assert_eq!(plain, run(&parameters), "from the kept copy");
    assert!(plain.iter().any(|x| x.abs() > 0.1));
}

#[test]
fn embeddings_of_all_kinds() {
    let (h, e) = (24, 16);
    let ids: Vec<u32> = (0..tokens(&QUERIES) as u32).map(|i| i * 7 % 11).collect();
    for (positions, offset, segments) in [(false, 0, 0), (true, 2, 1), (true, 0, 2), (false, 0, 1)] {
        let build = |b: &mut Builder| {
            let tables = EmbeddingTables {
                word: b.matrix("word", 11, e, Init::Zeros),
                position: positions.then(|| b.matrix("position", 40, e, Init::Zeros)),
                position_offset: offset,
                segment: (segments > 0).then(|| b.matrix("segment", segments, e, Init::Zeros)),
            };
            // Another width than the blocks', and a projection.
            (tables, norm(b, "norm", e, true, true), b.matrix("project", h, e, Init::Zeros))
        };
        let forward = |(tables, norm, project): &(EmbeddingTables, Norm, Param), pass: &mut Pass<'_>| {
            let device = pass.device();
            let layout = Layout::new(device, &QUERIES, 3).unwrap();
            let segment: Vec<u32> = ids.iter().map(|i| if segments > 1 { i % 2 } else { 0 }).collect();
            let (ids, segment) = (
                Tensor::from_slice(device, [ids.len()], &ids).unwrap(),
                Tensor::from_slice(device, [ids.len()], &segment).unwrap(),
            );
            let segment = tables.segment.map(|_| &segment);
            let x = pass.embeddings_norm(*tables, &ids, segment, &layout, norm, (0.1, 0)).unwrap();
            vec![pass.linear(&x, *project, None, Activation::None).unwrap()]
        };
        check(&format!("embeddings: positions {positions}, offset {offset}, segments {segments}"), build, forward);
        if offset > 0 {
            let network = Network::new(&device(1), DType::F32, build, forward);
            let gradients = network.gradients(false);
            let place = network.parameters.entries().iter().position(|e| e.name == "position").unwrap();
            let used = |row: usize| gradients[place][row * e..(row + 1) * e].iter().any(|x| *x != 0.0);
            assert!(!used(0) && !used(1) && used(2) && used(34) && !used(35), "33 tokens use rows 2 to 34");
        }
    }
}

#[test]
fn a_weight_of_several_layers_gets_the_sum_of_their_gradients() {
    let (t, h) = (tokens(&QUERIES), 24);
    check(
        "shared weights",
        |b| (input(b, "x", t, h), feed_forward(b, h, 30, Activation::Gelu, true, true), norm(b, "norm", h, true, true)),
        |(x, layers, norm), pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let mut x = rows(pass, *x);
            for site in 0..3 {
                let y = pass.feed_forward(&x, layers, None).unwrap();
                x = pass.add_norm(y, &x, norm, &layout, (0.1, site)).unwrap();
            }
            vec![x]
        },
    );
}

/// A loss is computed at once, so its gradient is compared with that of the logits given by hand.
#[test]
fn losses_over_tokens() {
    devices().iter().for_each(losses_over_tokens_on);
}

fn losses_over_tokens_on(device: &Device) {
    let (t, classes) = (tokens(&QUERIES), 9);
    let mut builder = Builder::new();
    let x = input(&mut builder, "x", t, classes);
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    let values = numbers(1, t * classes);
    parameters.write(0, &values).unwrap();
    let mut gradients = parameters.gradients().unwrap();
    let targets: Vec<u32> = (0..t as u32).map(|i| i % classes as u32).collect();
    let targets = Tensor::from_slice(device, [t], &targets).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
    let logits = rows(&mut pass, x);
    let (loss, _) = pass.smoothed_cross_entropy(logits, classes, &targets, None, 0.1, 0.5).unwrap();
    let loss = f64::from(loss.to_f32().unwrap()[0]);
    pass.backward(&mut gradients).unwrap();
    let (mut expected, mut gradient) = (0.0, vec![]);
    for (i, row) in values.chunks(classes).enumerate() {
        let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        for (c, x) in row.iter().enumerate() {
            let wanted = 0.1 / classes as f64 + if c == i % classes { 0.9 } else { 0.0 };
            expected += 0.5 * wanted * (sum - x);
            gradient.push(0.5 * ((x - sum).exp() - wanted));
        }
    }
    assert!((loss - expected).abs() < 1e-4 * expected, "{loss} for {expected}");
    let got = gradients.read(&parameters, 0).unwrap();
    assert!(got.iter().zip(&gradient).all(|(g, e)| (f64::from(*g) - e).abs() < 1e-5));

    // Yes or no for every token (ELECTRA), some of them not counted.
    let answers: Vec<f32> = (0..t * classes).map(|i| (i % 3 == 0).into()).collect();
    let weights: Vec<f32> = (0..t * classes).map(|i| (i % 5 != 0).into()).collect();
    let (answers_on, weights_on) = (
        Tensor::from_slice(device, [t * classes], &answers).unwrap(),
        Tensor::from_slice(device, [t * classes], &weights).unwrap(),
    );
    gradients.zero();
    let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
    let logits = rows(&mut pass, x);
    pass.binary_cross_entropy(logits, &answers_on, Some(&weights_on), 0.5).unwrap();
    pass.backward(&mut gradients).unwrap();
    let got = gradients.read(&parameters, 0).unwrap();
    for i in 0..t * classes {
        let sigmoid = 1.0 / (1.0 + (-f64::from(values[i])).exp());
        let expected = 0.5 * f64::from(weights[i]) * (sigmoid - f64::from(answers[i]));
        assert!((f64::from(got[i]) - expected).abs() < 1e-6, "{i}");
    }
}

/// Rows that are named several times, at the borders of what a GPU adds at a time, and those that nobody names.
#[test]
fn gathered_rows_may_repeat() {
    let (t, h) = (tokens(&QUERIES), 24);
    let picked: Vec<u32> =
        (0..t as u32 - 1).flat_map(|row| vec![row; if row == 3 { 70 } else { row as usize % 3 }]).chain([5]).collect();
    check(
        "gather",
        |b| input(b, "x", t, h),
        |x, pass| {
            let layout = Layout::new(pass.device(), &QUERIES, 3).unwrap();
            let picked = Tensor::from_slice(pass.device(), [picked.len()], &picked).unwrap();
            let x = rows(pass, *x);
            // Two rows next to each other, as one of twice the width.
            let pairs = pass.gather(&x, &picked).unwrap().reshape([picked.shape().elements() / 2, 2 * h]).unwrap();
            let ends = pass.last_tokens(&x, &layout).unwrap();
            let scaled = pass.scale(&ends, -0.75).unwrap();
            vec![pass.gather(&x, &picked).unwrap(), pairs, pass.first_tokens(&x, &layout).unwrap(), ends, scaled]
        },
    );
}

#[test]
fn samples_do_not_depend_on_their_company() {
    devices().iter().for_each(samples_do_not_depend_on_their_company_on);
}

fn samples_do_not_depend_on_their_company_on(device: &Device) {
    let (t, classes) = (tokens(&QUERIES), 50);
    let mut builder = Builder::new();
    let x = input(&mut builder, "x", t, classes);
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    parameters.write(0, &numbers(1, t * classes)).unwrap();
    let mut tape = Tape::new();
    let layout = Layout::new(device, &QUERIES, 3).unwrap();
    let mut draw = |picked: &[u32], from: Training| {
        let mut pass = Pass::inference(&mut tape, &parameters);
        let picked = Tensor::from_slice(device, [picked.len()], picked).unwrap();
        let logits = rows(&mut pass, x);
        let logits = pass.gather(&logits, &picked).unwrap();
        pass.sample(&logits, classes, 1.0, (&layout, &picked), None, (from, 9)).unwrap().to_vec::<u32>().unwrap()
    };
    let all = draw(&(0..t as u32).collect::<Vec<_>>(), TRAINING);
    let some = draw(&[40, 3, 9], TRAINING);
    assert_eq!(some, [all[40], all[3], all[9]]);
    assert!(all.iter().all(|class| (*class as usize) < classes));
    assert_ne!(all, draw(&(0..t as u32).collect::<Vec<_>>(), Training { step: 4, ..TRAINING }));
}

/// What a generator drew is put in, labelled, and found or not; a training pass draws from its own step.
#[test]
fn drawn_tokens_are_put_in_and_found() {
    for device in &devices() {
        let parameters = Builder::new().finish(device, DType::F32).unwrap();
        let mut tape = Tape::new();
        let tensor = |ids: &[u32]| Tensor::from_slice(device, [ids.len()], ids).unwrap();
        let (ids, rows) = (tensor(&[7, 8, 9, 8, 7]), tensor(&[1, 3, 4]));
        let mut pass = Pass::inference(&mut tape, &parameters);
        let (out, labels) = pass.replace_tokens(&ids, &rows, &tensor(&[5, 8, 6])).unwrap();
        assert_eq!(out.to_vec::<u32>().unwrap(), [7, 5, 9, 8, 6]);
        assert_eq!(labels.to_vec::<f32>().unwrap(), [0.0, 1.0, 0.0, 0.0, 1.0]);
        assert!(pass.replace_tokens(&ids, &rows, &tensor(&[5, 8])).is_err());
        if let Device::Cpu(_) = device {
            let error = pass.replace_tokens(&ids, &tensor(&[5]), &tensor(&[1])).unwrap_err().to_string();
            assert!(error.contains("row 5 is outside of 0..5"), "{error}");
        }
        let mut builder = Builder::new();
        let x = input(&mut builder, "x", 5, 1);
        let mut parameters = builder.finish(device, DType::F32).unwrap();
        parameters.write(0, &[2.0, 1.0, -1.0, 3.0, -2.0]).unwrap();
        drop(pass);
        let mut pass = Pass::inference(&mut tape, &parameters);
        let logits = self::rows(&mut pass, x);
        let weights = Tensor::from_slice(device, [5], &[1.0f32, 1.0, 1.0, 0.0, 1.0]).unwrap();
        let found = pass.count_found(&logits, &labels, &weights).unwrap();
        assert_eq!(found.map(|count| count.to_vec::<u32>().unwrap()[0]), [2, 2, 1]);
    }
}

#[test]
fn decoding_with_a_cache_gives_what_the_whole_pass_gives() {
    let form = Attention { window: Window::CAUSAL, ..attention(4, 2) };
    let lengths = [20, 9];
    let columns: usize = form.fused_widths().iter().sum();
    let devices = devices();
    let all = devices.iter().flat_map(|device| [DType::F32, DType::Bf16].map(|dtype| (device, dtype)));
    for (device, dtype) in all {
        let mut builder = Builder::new();
        let x = input(&mut builder, "x", tokens(&lengths), columns);
        let mut parameters = builder.finish(device, dtype).unwrap();
        parameters.write(0, &numbers(1, tokens(&lengths) * columns)).unwrap();
        parameters.refresh().unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let layout = Layout::new(device, &lengths, 0).unwrap();
        let all = rows(&mut pass, x);
        let from = QueryKeyValue::Fused(all.clone());
        let whole = pass.attention(&form, from, &BiasValues::None, (&layout, &layout), (0.0, 0)).unwrap();
        let whole = whole.tensor().to_f32().unwrap();

        let mut cache = Cache::new(device, dtype, 1, form.key_width(), (8, 4)).unwrap();
        let (first, second) = (cache.enter(), cache.enter());
        let mut step = |cache: &mut Cache, who: &[_], picked: &[u32], lengths: &[usize]| {
            let layout = Layout::new(device, lengths, 0).unwrap();
            let picked = Tensor::from_slice(device, [picked.len()], picked).unwrap();
            let x = pass.gather(&all, &picked).unwrap();
            cache.extend(who, &layout)?;
            pass.append_to_cache(cache, 0, &x, form.query_width(), &layout)?;
            let y = pass.attend_to_cache(cache, 0, &form, &x, &BiasValues::None, &layout)?;
            y.tensor().to_f32()
        };
        // Five tokens of the first sequence, then one of it and three of the second.
        let h = form.query_width();
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
        let close = |got: &[f32], token: usize| {
            let expected = &whole[token * h..][..got.len()];
            got.iter().zip(expected).all(|(g, e)| (g - e).abs() < tolerance)
        };
        let got = step(&mut cache, &[first], &[0, 1, 2, 3, 4], &[5]).unwrap();
        assert!(close(&got, 0));
        let got = step(&mut cache, &[second, first], &[20, 21, 22, 5], &[3, 1]).unwrap();
        assert!(close(&got[..3 * h], 20) && close(&got[3 * h..], 5));
        assert_eq!((cache.tokens(first), cache.tokens(second), cache.free_pages()), (6, 3, 5));
        let error =
            step(&mut cache, &[first], &(0..40).map(|i| i % 29).collect::<Vec<_>>(), &[40]).unwrap_err().to_string();
        assert!(error.contains("5 free pages of 4 tokens, and 10 are needed"), "{error}");
        assert_eq!(cache.tokens(first), 6, "nothing was taken");
        cache.leave(second);
        assert_eq!(cache.free_pages(), 6);
        assert!(step(&mut cache, &[second], &[0], &[1]).is_err(), "it has left");
        let third = cache.enter();
        let got = step(&mut cache, &[third, first], &[20, 6, 7], &[1, 2]).unwrap();
        assert!(close(&got[..h], 20) && close(&got[h..], 6));
    }
}

#[test]
fn forks_go_on_apart_and_share_full_pages() {
    let form = Attention { window: Window::CAUSAL, ..attention(4, 2) };
    let columns: usize = form.fused_widths().iter().sum();
    let devices = devices();
    let all = devices.iter().flat_map(|device| [DType::F32, DType::Bf16].map(|dtype| (device, dtype)));
    for (device, dtype) in all {
        let mut builder = Builder::new();
        let x = input(&mut builder, "x", 30, columns);
        let mut parameters = builder.finish(device, dtype).unwrap();
        parameters.write(0, &numbers(1, 30 * columns)).unwrap();
        parameters.refresh().unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let all = rows(&mut pass, x);
        let mut step = |cache: &mut Cache, who: &[_], picked: &[u32], lengths: &[usize]| {
            let layout = Layout::new(device, lengths, 0).unwrap();
            let picked = Tensor::from_slice(device, [picked.len()], picked).unwrap();
            let x = pass.gather(&all, &picked).unwrap();
            cache.extend(who, &layout)?;
            for layer in 0..2 {
                pass.append_to_cache(cache, layer, &x, form.query_width(), &layout)?;
            }
            pass.attend_to_cache(cache, 1, &form, &x, &BiasValues::None, &layout)?.tensor().to_f32()
        };
        let new = || Cache::new(device, dtype, 2, form.key_width(), (9, 4)).unwrap();
        let h = form.query_width();
        // Six tokens and two continuations, once as sequences of their own and once as forks.
        let mut cache = new();
        let (a, b) = (cache.enter(), cache.enter());
        step(&mut cache, &[a, b], &[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], &[6, 6]).unwrap();
        let expected = step(&mut cache, &[a, b], &[6, 7, 16, 17], &[2, 2]).unwrap();
        let later = step(&mut cache, &[a, b], &[8, 18], &[1, 1]).unwrap();

        let mut cache = new();
        let a = cache.enter();
        step(&mut cache, &[a], &[0, 1, 2, 3, 4, 5], &[6]).unwrap();
        let b = cache.fork(a).unwrap();
        assert_eq!((cache.tokens(b), cache.free_pages()), (6, 9 - 3), "a full page is shared, the last one copied");
        assert_eq!(step(&mut cache, &[a, b], &[6, 7, 16, 17], &[2, 2]).unwrap(), expected);
        let c = cache.fork(b).unwrap();
        assert_eq!(cache.free_pages(), 9 - 3, "eight tokens are two full pages");
        cache.leave(b);
        assert_eq!(cache.free_pages(), 9 - 3, "c has them");
        assert_eq!(step(&mut cache, &[a, c], &[8, 18], &[1, 1]).unwrap(), later);
        cache.leave(b);
        cache.leave(a);
        assert_eq!(cache.free_pages(), 9 - 3, "c has three of them");
        assert_eq!(step(&mut cache, &[c], &[9], &[1]).unwrap().len(), h);
        cache.leave(c);
        assert_eq!(cache.free_pages(), 9);
        assert!(cache.fork(c).is_err(), "it has left");

        // Several queries may share a source, but nobody grows twice at once.
        let a = cache.enter();
        step(&mut cache, &[a], &[0, 1, 2], &[3]).unwrap();
        assert!(step(&mut cache, &[a, a], &[3, 4], &[1, 1]).unwrap_err().to_string().contains("named twice"));
        assert_eq!(cache.tokens(a), 3);
        cache.select(&[a, a]).unwrap();
        let layout = Layout::new(device, &[1, 1], 0).unwrap();
        let picked = Tensor::from_slice(device, [2], &[7u32, 7]).unwrap();
        let queries = pass.gather(&all, &picked).unwrap();
        let y = pass.attend_to_cache(&cache, 0, &form, &queries, &BiasValues::None, &layout).unwrap();
        let y = y.tensor().to_f32().unwrap();
        assert_eq!(y[..h], y[h..]);

        // A fork that needs a page where there is none changes nothing.
        let mut cache = Cache::new(device, dtype, 1, form.key_width(), (1, 4)).unwrap();
        let a = cache.enter();
        let layout = Layout::new(device, &[3], 0).unwrap();
        cache.extend(&[a], &layout).unwrap();
        assert!(cache.fork(a).unwrap_err().to_string().contains("0 free pages"));
        cache.leave(a);
        assert_eq!(cache.free_pages(), 1);
    }
}

/// Inputs of a step that failed, and a fault met in one, do not reach the next.
#[test]
fn a_step_that_fails_leaves_nothing_behind() {
    for device in &devices() {
        let on_gpu = matches!(device, Device::Cuda(_));
        let failed = device.feed_tokens(|| {
            Tensor::from_slice(device, [2], &[1u32, 2])?;
            assert_eq!(device.rounded_streams(5), if on_gpu { 8 } else { 5 });
            device.do_not_record();
            assert_eq!(device.rounded_streams(5), 5, "it was said that it is not recorded");
            let why = "it fails";
            Err::<(), _>(TensorError::Unsupported { operation: "test", why })
        });
        assert!(failed.is_err());
        assert_eq!(device.rounded_streams(5), 5);
        let fed =
            |numbers: &[u32]| device.feed_tokens(|| Tensor::from_slice(device, [numbers.len()], numbers)).unwrap();
        let (ids, signature) = fed(&[7, 8, 9]);
        assert_eq!(ids.to_vec::<u32>().unwrap(), [7, 8, 9]);
        let (again, other) = (fed(&[3, 2, 1]).1, fed(&[3, 2]).1);
        assert!(signature == again && (!on_gpu || signature != other));

        let mut builder = Builder::new();
        let x = input(&mut builder, "x", 2, 4);
        let parameters = builder.finish(device, DType::F32).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let logits = Tensor::from_slice(device, [2, 4], &[0.0f32, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
        let found = pass.log_sums(&logits, 4).unwrap();
        if on_gpu {
            let x = rows(&mut pass, x);
            pass.gather(&x, &Tensor::from_slice(device, [1], &[99u32]).unwrap()).unwrap();
            assert!(LogSums::read(&found).unwrap_err().to_string().contains("gather"));
        }
        let LogSums { sums, largest } = LogSums::read(&found).unwrap();
        let expected = [(9.0f32.exp() + 3.0).ln(), 4.0f32.ln()];
        assert!(sums.iter().zip(expected).all(|(sum, expected)| (sum - expected).abs() < 1e-4), "{sums:?}");
        assert_eq!(largest, on_gpu.then(|| vec![(2, 9.0), (0, 0.0)]));
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let device = device(1);
    let mut builder = Builder::new();
    let x = input(&mut builder, "x", 8, 48);
    let table = builder.matrix("table", 8, 2, Init::Zeros);
    let weight = builder.matrix("weight", 5, 48, Init::Zeros);
    let gamma = builder.vector("gamma", 47, Init::Ones);
    let parameters = builder.finish(&device, DType::F32).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
    let x = rows(&mut pass, x);
    let (layout, short) = (Layout::new(&device, &[5, 3], 0).unwrap(), Layout::new(&device, &[5, 2], 0).unwrap());
    let one = Layout::new(&device, &[8], 0).unwrap();
    let mut expect = |form: Attention, bias: &BiasValues, layouts: (&Layout, &Layout), expected: &str| {
        let error = pass.attention(&form, QueryKeyValue::Fused(x.clone()), bias, layouts, (0.0, 0)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    let (both, plain) = ((&layout, &layout), attention(2, 2));
    expect(Attention { heads: 0, ..plain }, &BiasValues::None, both, "there are no heads");
    expect(attention(4, 3), &BiasValues::None, both, "not a multiple");
    expect(attention(3, 3), &BiasValues::None, both, "query, key and value has the shape [8, 48], expected [8, 72]");
    expect(plain, &BiasValues::None, (&layout, &one), "the keys' layout has the shape [1], expected [2]");
    expect(plain, &BiasValues::None, (&short, &short), "expected [7, 48]");
    expect(plain, &BiasValues::Table(table), both, "the bias' numbers are not those");
    let bias = Bias::Relative(Buckets { count: 32, max_distance: 128, bidirectional: true });
    expect(Attention { bias, ..plain }, &BiasValues::Table(table), both, "expected [32, 2]");

    let rotary = Rotary { theta: 1e4, size: 16, pairing: Pairing::Halves };
    assert!(RotaryTable::new(&device, Rotary { size: 3, ..rotary }, 8).is_err());
    let angles = RotaryTable::new(&device, rotary, 4).unwrap();
    let error = pass.rotary(x.clone(), &angles, layout.positions(), 0..32, 16).unwrap_err().to_string();
    assert!(error.contains("position 4 is outside of 0..4"), "{error}");
    let angles = RotaryTable::new(&device, rotary, 8).unwrap();
    assert!(pass.rotary(x.clone(), &angles, layout.positions(), 0..33, 16).is_err());
    assert!(pass.rotary(x.clone(), &angles, layout.positions(), 0..32, 8).is_err());

    let odd = Norm { weight: gamma, bias: None, epsilon: 1e-5, centred: false };
    let error = pass.norm(x.clone(), &odd).unwrap_err().to_string();
    assert!(error.contains("gamma has the shape [47], expected [48]"), "{error}");
    let layers = FeedForwardLayers {
        up: weight,
        up_bias: None,
        activation: Activation::Gelu,
        gated: true,
        down: weight,
        down_bias: None,
    };
    let error = pass.feed_forward(&x, &layers, None).unwrap_err().to_string();
    assert!(error.contains("two halves"), "{error}");
    let ids = Tensor::from_slice(&device, [8], &[0u32, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    let tables = EmbeddingTables { word: table, position: Some(table), position_offset: 4, segment: None };
    let error = pass.embeddings(tables, &ids, layout.positions(), None).unwrap_err().to_string();
    assert!(error.contains("position 4 is outside of 0..4"), "{error}");
    assert!(pass.embeddings(tables, &ids, layout.positions(), Some(&ids)).is_err(), "segments without a table");
    let targets = Tensor::from_slice(&device, [8], &[0u32; 8]).unwrap();
    assert!(pass.smoothed_cross_entropy(x.clone(), 48, &targets, None, 1.0, 1.0).is_err());
    assert!(pass.sample(&x, 49, 1.0, (&layout, &ids), None, (TRAINING, 0)).is_err());
    assert!(pass.sample(&x, 48, 0.0, (&layout, &ids), None, (TRAINING, 0)).is_err());
    assert!(Cache::new(&device, DType::F32, 1, 0, (1, 1)).is_err());
}
