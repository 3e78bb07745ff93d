//! Recurrent layers, mixtures of layers and conditional random fields on the tape: gradients against differences of the loss, f32
//! against bf16, the same bits for any number of threads, states that are carried on, and errors where sizes do not fit.

use crate::common::*;
use henson_tensor::{
    Activation, Builder, Cache, Cell, CrfParams, DType, Device, Directions, Filters, Init, Layout, LegalSteps,
    MixParams, Param, Pass, Recordings, RecurrentLayer, RecurrentState, Tape, Tensor, TensorError,
};

const LENGTHS: [usize; 4] = [5, 1, 9, 3];
const T: usize = 18;

fn layer(b: &mut Builder, cell: Cell, sizes: [usize; 2], projection: Option<usize>, both: bool) -> RecurrentLayer {
    let [input, hidden] = sizes;
    let d = if both { 2 } else { 1 };
    let (rows, p) = (d * cell.gates() * hidden, projection.unwrap_or(hidden));
    RecurrentLayer {
        cell,
        hidden,
        directions: if both { Directions::Both } else { Directions::Backward },
        input: b.matrix("input", rows, input, Init::Zeros),
        input_bias: Some(b.vector("input.bias", rows, Init::Zeros)),
        recurrent: b.matrix("recurrent", rows, p, Init::Zeros),
        recurrent_bias: Some(b.vector("recurrent.bias", rows, Init::Zeros)),
        projection: projection.map(|p| b.matrix("projection", d * p, hidden, Init::Zeros)),
        clip_cell: f32::INFINITY,
        clip_projection: f32::INFINITY,
    }
}

#[test]
fn layers_of_every_kind() {
    for cell in [Cell::Lstm, Cell::Gru, Cell::Tanh] {
        for both in [false, true] {
            let build = |b: &mut Builder| (input(b, "x", T, 6), layer(b, cell, [6, 10], None, both));
            check(&format!("{cell:?}, both {both}"), build, |(x, layer), pass| {
                let layout = Layout::new(pass.device(), &LENGTHS, 3).unwrap();
                let x = rows(pass, *x);
                let y = pass.recurrent(&x, layer, &layout, None).unwrap();
                // A second use of the input.
                vec![pass.dropout_tokens(y.out, &layout, (0.1, 2)).unwrap(), x]
            });
        }
    }
    let build = |b: &mut Builder| (input(b, "x", T, 6), layer(b, Cell::Lstm, [6, 10], Some(4), true));
    check("projected", build, |(x, layer), pass| {
        let layout = Layout::new(pass.device(), &LENGTHS, 3).unwrap();
        let x = rows(pass, *x);
        vec![pass.recurrent(&x, layer, &layout, None).unwrap().out]
    });
}

#[test]
fn dropout_of_the_same_columns() {
    let build = |b: &mut Builder| (input(b, "x", T, 6), layer(b, Cell::Lstm, [6, 10], None, true));
    check("variational dropout", build, |(x, layer), pass| {
        let layout = Layout::new(pass.device(), &LENGTHS, 3).unwrap();
        let x = rows(pass, *x);
        let y = pass.recurrent(&x, layer, &layout, None).unwrap();
        vec![pass.variational_dropout(y.out, &layout, (0.3, 1)).unwrap()]
    });
}

#[test]
fn states_come_in_and_go_out() {
    for cell in [Cell::Lstm, Cell::Gru] {
        let build = |b: &mut Builder| {
            let states = (input(b, "h", 8, 10), (cell == Cell::Lstm).then(|| input(b, "c", 8, 10)));
            (input(b, "x", T, 6), layer(b, cell, [6, 10], None, true), states)
        };
        check(&format!("states of {cell:?}"), build, |(x, layer, (h, c)), pass| {
            let layout = Layout::new(pass.device(), &LENGTHS, 3).unwrap();
            let x = rows(pass, *x);
            let initial = RecurrentState { hidden: rows(pass, *h), cell: c.map(|c| rows(pass, c)) };
            // The last states alone, whose gradients reach everything.
            let last = pass.recurrent(&x, layer, &layout, Some(&initial)).unwrap().last;
            [Some(last.hidden), last.cell].into_iter().flatten().collect()
        });
    }
}

/// Two halves with the state in between are the whole.
#[test]
fn a_state_is_carried_on() {
    for device in devices() {
        carried_on(&device);
    }
}

fn carried_on(device: &Device) {
    for cell in [Cell::Lstm, Cell::Gru, Cell::Tanh, Cell::Relu] {
        let mut b = Builder::new();
        let layer = RecurrentLayer { directions: Directions::Forward, ..layer(&mut b, cell, [3, 7], None, false) };
        let mut parameters = b.finish(device, DType::F32).unwrap();
        for i in 0..parameters.entries().len() {
            let values = numbers(i as u64, parameters.entries()[i].shape.elements());
            parameters.write(i, &values).unwrap();
        }
        let x = numbers(9, 11 * 3);
        let run = |rows: &[usize], lengths: &[usize], initial: Option<RecurrentState>| {
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &parameters);
            let numbers: Vec<f32> = rows.iter().flat_map(|row| &x[row * 3..row * 3 + 3]).copied().collect();
            let x = Tensor::from_slice(device, [rows.len(), 3], &numbers).unwrap();
            let (x, layout) = (pass.input(&x).unwrap(), Layout::new(device, lengths, 0).unwrap());
            let y = pass.recurrent(&x, &layer, &layout, initial.as_ref()).unwrap();
            (y.out.tensor().to_f32().unwrap(), y.last)
        };
        let (whole, _) = run(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[7, 4], None);
        let (first, state) = run(&[0, 1, 2, 7], &[3, 1], None);
        let (second, _) = run(&[3, 4, 5, 6, 8, 9, 10], &[4, 3], Some(state));
        // To the last bit; on a GPU, where products of other sizes are done in other ways, nearly so.
        let bound = if matches!(device, Device::Cpu(_)) { 0.0 } else { 1e-5 };
        let halves = [&first[..21], &second[..28], &first[21..], &second[28..]].concat();
        let scale = whole.iter().fold(1.0, |most: f32, x| most.max(x.abs()));
        assert_eq!(whole.len(), halves.len());
        let off = whole.iter().zip(&halves).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
        assert!(off <= bound * scale, "{cell:?}: off by {off}");
    }
}

/// Steps of a training run with other lengths each, and with the states of the step before: what is recorded on a GPU gives what the
/// CPU gives.
#[test]
fn recorded_passes_follow_other_lengths_and_states() {
    let run = |device: &Device, dtype: DType| -> Vec<Vec<f32>> {
        let mut b = Builder::new();
        let forward = |layer| RecurrentLayer { directions: Directions::Forward, ..layer };
        let layers = ["first", "second"].map(|name| {
            b.at(name, |b| match name {
                "first" => forward(layer(b, Cell::Lstm, [6, 6], None, false)),
                _ => layer(b, Cell::Gru, [6, 5], None, true),
            })
        });
        let mut parameters = b.finish(device, dtype).unwrap();
        for i in 0..parameters.entries().len() {
            let values = numbers(i as u64, parameters.entries()[i].shape.elements());
            parameters.write(i, &values.iter().map(|x| 0.5 * x).collect::<Vec<_>>()).unwrap();
        }
        parameters.refresh().unwrap();
        let (mut gradients, mut tape, mut recordings) =
            (parameters.gradients().unwrap(), Tape::new(), Recordings::default());
        let (mut all, kept) = (Vec::new(), std::cell::RefCell::new(Vec::<RecurrentState>::new()));
        let batches =
            [[5, 1, 9, 3], [2, 2, 2, 2], [1, 11, 4, 2], [9, 9, 1, 7], [1, 1, 30, 1], [4, 3, 2, 1], [1, 2, 1, 1]];
        for (step, lengths) in batches.iter().cycle().take(18).enumerate() {
            let tokens: usize = lengths.iter().sum();
            let ((x, targets, layout), signature) = device
                .feed(|| {
                    let layout = Layout::new(device, lengths, 0)?.for_steps(device)?;
                    let padded = |seed: u64, columns: usize| {
                        let mut numbers = numbers(seed, tokens * columns);
                        numbers.resize(layout.tokens() * columns, 0.0);
                        numbers
                    };
                    let x = Tensor::from_slice(device, [layout.tokens(), 6], &padded(step as u64 + 40, 6))?;
                    let targets = Tensor::from_slice(device, [layout.tokens() * 10], &padded(step as u64 + 70, 10))?;
                    device.reads_in_place(&kept.borrow());
                    Ok::<_, TensorError>((x, targets, layout))
                })
                .unwrap();
            gradients.zero();
            let losses = recordings.run(device, &signature, &(), || {
                let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
                let x = pass.input(&x)?;
                let initial = kept.borrow().first().cloned();
                let y = pass.recurrent(&x, &layers[0], &layout, initial.as_ref())?;
                pass.carry(&[y.last], &mut kept.borrow_mut())?;
                let y = pass.recurrent(&y.out, &layers[1], &layout, None)?;
                let loss = pass.squared_error(y.out, &targets, 1.0)?;
                pass.backward(&mut gradients)?;
                Ok::<_, TensorError>((vec![loss], tape.trace()))
            });
            gradients.played();
            all.push(losses.unwrap()[0].to_f32().unwrap());
            all.extend((0..parameters.entries().len()).map(|i| gradients.read(&parameters, i).unwrap()));
        }
        all
    };
    let expected = run(&device(2), DType::F32);
    if let Some(gpu) = gpu() {
        assert_similar("f32 on the GPU", &run(&gpu, DType::F32), &expected, TOLERANCE_DEVICES);
        assert_similar("bf16 on the GPU", &run(&gpu, DType::Bf16), &expected, 2.0 * TOLERANCE_BF16);
    }
}

/// What is kept in a cache comes back, for the sequences that are asked for.
#[test]
fn states_are_kept_in_a_cache() {
    for device in devices() {
        for dtype in [DType::F32, DType::Bf16] {
            let parameters = Builder::new().finish(&device, dtype).unwrap();
            let mut cache = Cache::new(&device, dtype, 2, 3, (6, 2)).unwrap();
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &parameters);
            // Small whole numbers, which bf16 has all of.
            let state = |first: u32, rows: u32| {
                let numbers = |from: u32| (from..from + 3 * rows).map(|x| x as f32).collect::<Vec<_>>();
                let (hidden, cell) = (numbers(first), numbers(first + 50));
                RecurrentState::from_numbers(&device, dtype, (&hidden, 3), Some((&cell, 3))).unwrap()
            };
            let read = |state: &RecurrentState| {
                [Some(&state.hidden), state.cell.as_ref()].map(|x| x.map(|x| x.tensor().to_f32().unwrap()))
            };
            let [a, b] = [cache.enter(), cache.enter()];
            let new = Layout::new(&device, &[3, 1], 0).unwrap();
            cache.extend(&[a, b], &new).unwrap();
            // Nothing came before these tokens.
            assert_eq!(read(&pass.kept_state(&cache, 0, Some(&new), true).unwrap())[0], Some(vec![0.0; 6]));
            pass.keep_state(&mut cache, 0, &state(0, 2)).unwrap();
            let RecurrentState { hidden, .. } = state(100, 2);
            pass.keep_state(&mut cache, 1, &RecurrentState { hidden, cell: None }).unwrap();
            assert_eq!(read(&pass.kept_state(&cache, 0, None, true).unwrap()), read(&state(0, 2)));
            // Another one enters, and one goes on: it has its own state, the new one that which it is given.
            let c = cache.enter();
            let new = Layout::new(&device, &[1, 1], 0).unwrap();
            cache.extend(&[c, b], &new).unwrap();
            let begun = pass.kept_state_or(&cache, 0, &new, &state(20, 2)).unwrap();
            let [hidden, cell] = read(&begun);
            assert_eq!(hidden.unwrap(), [20.0, 21.0, 22.0, 3.0, 4.0, 5.0]);
            assert_eq!(cell.unwrap(), [70.0, 71.0, 72.0, 53.0, 54.0, 55.0]);
            // All rows of a layer.
            let keys: Vec<f32> = (0..12).map(|x| x as f32).collect();
            let keys = Tensor::from_slice(&device, [2, 6], &keys).unwrap();
            let keys = pass.input(&keys).unwrap();
            pass.append_to_cache(&mut cache, 1, &keys, 0, &new).unwrap();
            let ([keys, values], layout) = pass.cached_rows(&cache, 1).unwrap();
            assert_eq!(layout.offsets(), [0, 1, 3]);
            assert_eq!(keys.tensor().to_f32().unwrap(), [0.0, 1.0, 2.0, 103.0, 104.0, 105.0, 6.0, 7.0, 8.0]);
            assert_eq!(values.tensor().to_f32().unwrap()[..3], [3.0, 4.0, 5.0]);
            cache.select(&[a]).unwrap();
            assert_eq!(read(&pass.kept_state(&cache, 1, None, false).unwrap())[0], Some(vec![100.0, 101.0, 102.0]));
        }
    }
}

#[test]
fn mixtures_of_layers() {
    let build = |b: &mut Builder| {
        let params = MixParams { weights: b.vector("w", 3, Init::Zeros), gamma: b.vector("gamma", 1, Init::Ones) };
        (input(b, "x", T, 3 * 7), params)
    };
    check("mix", build, |(x, params), pass| {
        let x = rows(pass, *x);
        vec![pass.mix(&x, params).unwrap()]
    });
}

#[test]
fn sequences_are_attended_to() {
    let of_queries = [2, 4, 1, 3];
    let build = |b: &mut Builder| {
        let (queries, keys, values) = (input(b, "q", 10, 6), input(b, "k", T, 6), input(b, "x", T, 7));
        (queries, keys, values, b.vector("v", 6, Init::Zeros))
    };
    check("additive attention", build, |(queries, keys, values, v), pass| {
        let layout = Layout::new(pass.device(), &LENGTHS, 3).unwrap();
        let of_queries = Layout::new(pass.device(), &of_queries, 3).unwrap();
        let [queries, keys, values] = [*queries, *keys, *values].map(|x| rows(pass, x));
        let attended = pass.additive_attention(Some((&queries, &of_queries)), &keys, *v, &values, &layout).unwrap();
        // Without queries it is a pooling.
        let pooled = pass.additive_attention(None, &keys, *v, &values, &layout).unwrap();
        let both = pass.beside(&keys, &values).unwrap();
        vec![attended, pooled, pass.maxima(&values, &layout).unwrap(), both]
    });
}

fn field(b: &mut Builder, k: usize) -> CrfParams {
    CrfParams {
        start_transitions: b.vector("start", k, Init::Zeros),
        end_transitions: b.vector("end", k, Init::Zeros),
        transitions: b.matrix("transitions", k, k, Init::Zeros),
    }
}

#[test]
fn a_field_has_the_right_gradients() {
    let (k, device) = (4, device(2));
    let labels: Vec<u32> = (0..T as u32).map(|i| i * i % 4).collect();
    for dtype in [DType::F32, DType::Bf16] {
        let mut b = Builder::new();
        let ((x, _), crf): ((Param, usize), CrfParams) = (input(&mut b, "x", T, k), field(&mut b, k));
        let mut parameters = b.finish(&device, dtype).unwrap();
        for i in 0..parameters.entries().len() {
            let values = numbers(i as u64, parameters.entries()[i].shape.elements());
            parameters.write(i, &values).unwrap();
        }
        parameters.refresh().unwrap();
        let loss = |parameters: &henson_tensor::Parameters, gradients: Option<&mut henson_tensor::Gradients>| {
            let mut tape = Tape::new();
            let mut pass = Pass::training(&mut tape, parameters, TRAINING);
            let layout = Layout::new(&device, &LENGTHS, 0).unwrap();
            let x = rows(&mut pass, (x, T));
            let labels = Tensor::from_slice(&device, [T], &labels).unwrap();
            let loss = pass.crf_loss(x, &crf, &layout, &labels, 0.25).unwrap();
            if let Some(gradients) = gradients {
                gradients.zero();
                pass.backward(gradients).unwrap();
            }
            f64::from(loss.to_f32().unwrap()[0])
        };
        let mut gradients = parameters.gradients().unwrap();
        let first = loss(&parameters, Some(&mut gradients));
        assert!(first > 0.0);
        if dtype == DType::Bf16 {
            continue;
        }
        for i in 0..parameters.entries().len() {
            let (old, gradient) = (parameters.read(i).unwrap(), gradients.read(&parameters, i).unwrap());
            let squares: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
            let mut at = |step: f32| {
                let moved: Vec<f32> = old.iter().zip(&gradient).map(|(x, g)| x + step * g).collect();
                parameters.write(i, &moved).unwrap();
                loss(&parameters, None)
            };
            let slope = (at(2e-2) - at(-2e-2)) / 4e-2;
            at(0.0);
            assert!((slope / squares - 1.0).abs() < 1e-2, "parameter {i}: {slope} and {squares}");
        }
    }
}

#[test]
fn fields_decode_within_what_is_legal() {
    let device = device(1);
    let mut b = Builder::new();
    let crf = field(&mut b, 3);
    let parameters = b.finish(&device, DType::F32).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, &parameters);
    let layout = Layout::new(&device, &[2, 1], 0).unwrap();
    let logits = Tensor::from_slice(&device, [3, 3], &[1.0f32, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 1.0]).unwrap();
    let logits = pass.input(&logits).unwrap();
    assert_eq!(pass.crf_best(&logits, &crf, &layout, None).unwrap(), [0, 2, 2]);
    // 2 follows 1 or 2 alone.
    let mut legal = LegalSteps { start: vec![true, true, false], end: vec![true; 3], transitions: vec![true; 9] };
    legal.transitions[2] = false;
    assert_eq!(pass.crf_best(&logits, &crf, &layout, Some(&legal)).unwrap(), [1, 2, 0]);
    let shares = pass.crf_probabilities(&logits, &crf, &layout).unwrap().to_f32().unwrap();
    assert!(shares.chunks(3).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));
    legal.start.pop();
    assert!(pass.crf_best(&logits, &crf, &layout, Some(&legal)).is_err());
}

#[test]
fn wrong_sizes_are_errors() {
    let device = device(1);
    let mut b = Builder::new();
    let good = layer(&mut b, Cell::Lstm, [6, 10], None, true);
    let crf = field(&mut b, 4);
    let parameters = b.finish(&device, DType::F32).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, &parameters);
    let layout = Layout::new(&device, &[3], 0).unwrap();
    let tensor = |shape: [usize; 2]| Tensor::zeros(&device, shape, DType::F32).unwrap();
    let x = pass.input(&tensor([3, 6])).unwrap();
    let wrong = [
        RecurrentLayer { hidden: 9, ..good },
        RecurrentLayer { cell: Cell::Gru, ..good },
        RecurrentLayer { directions: Directions::Forward, ..good },
        RecurrentLayer { projection: Some(good.input), ..good },
        RecurrentLayer { hidden: 0, ..good },
    ];
    for layer in wrong {
        let error = pass.recurrent(&x, &layer, &layout, None).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.starts_with("recurrent: ")), "{layer:?}: {error:?}");
    }
    let short = pass.input(&tensor([2, 6])).unwrap();
    assert!(pass.recurrent(&short, &good, &layout, None).is_err());
    let hidden = pass.input(&tensor([2, 10])).unwrap();
    let state = RecurrentState { hidden, cell: None };
    let error = pass.recurrent(&x, &good, &layout, Some(&state)).err().unwrap().to_string();
    assert!(error.contains("a state and a cell"), "{error}");
    let v = crf.start_transitions;
    let (keys, values) = (pass.input(&tensor([3, 4])).unwrap(), pass.input(&tensor([3, 5])).unwrap());
    let other = Layout::new(&device, &[2, 1], 0).unwrap();
    assert!(pass.additive_attention(None, &values, v, &values, &layout).is_err());
    assert!(pass.additive_attention(None, &keys, v, &short, &layout).is_err());
    let error = pass.additive_attention(Some((&keys, &other)), &keys, v, &values, &layout).err().unwrap().to_string();
    assert!(error.contains("different numbers of sequences"), "{error}");
    let logits = pass.input(&tensor([3, 4])).unwrap();
    let labels = Tensor::from_slice(&device, [3], &[0u32, 4, 1]).unwrap();
    let error = pass.crf_loss(logits, &crf, &layout, &labels, 1.0).err().unwrap().to_string();
    assert_eq!(error, "crf: label 4 is outside of 0..4");
    assert!(pass.crf_probabilities(&x, &crf, &layout).is_err());
}

fn filters(b: &mut Builder, width: usize, count: usize, d: usize) -> Filters {
    let weight = b.matrix(&format!("weight.{width}"), count, width * d, Init::Zeros);
    Filters { width, weight, bias: b.vector(&format!("bias.{width}"), count, Init::Zeros) }
}

/// Steps of the differences are small beside those between the windows that these numbers have.
#[test]
fn words_are_read_as_characters() {
    for activation in [Activation::Relu, Activation::Tanh] {
        let build = |b: &mut Builder| {
            let gates = (b.matrix("gates", 14, 7, Init::Zeros), b.vector("gates.bias", 14, Init::Zeros));
            (input(b, "x", T, 4), [filters(b, 1, 2, 4), filters(b, 3, 5, 4)], gates)
        };
        check(&format!("characters, {activation:?}"), build, |(x, filters, gates), pass| {
            let layout = Layout::new(pass.device(), &[5, 3, 7, 3], 0).unwrap();
            let x = rows(pass, *x);
            let y = pass.convolve_max(&x, &layout, filters, activation).unwrap();
            let z = pass.linear(&y, gates.0, Some(gates.1), Activation::None).unwrap();
            let out = pass.highway(&z, &y).unwrap();
            // A second use of both.
            vec![pass.side_by_side(&[&out, &y, &z]).unwrap(), x]
        });
    }
}

#[test]
fn wrong_filters_are_errors() {
    let device = device(1);
    let mut b = Builder::new();
    let good = filters(&mut b, 3, 5, 4);
    let parameters = b.finish(&device, DType::F32).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, &parameters);
    let x = pass.input(&Tensor::zeros(&device, [7, 4], DType::F32).unwrap()).unwrap();
    let mut fails = |lengths: &[usize], filters: &[Filters], activation, expected: &str| {
        let layout = Layout::new(&device, lengths, 0).unwrap();
        let error = pass.convolve_max(&x, &layout, filters, activation).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    };
    fails(&[3, 4], &[Filters { width: 2, ..good }], Activation::Relu, "a filter's weight");
    fails(&[3, 4], &[], Activation::Relu, "at least one row wide");
    fails(&[2, 5], &[good], Activation::Relu, "shorter than the widest filter");
    fails(&[3, 3], &[good], Activation::Relu, "the input");
    fails(&[3, 4], &[good], Activation::Gelu, "none, ReLU or tanh");
    assert!(pass.highway(&x, &x).is_err());
    assert!(pass.side_by_side(&[]).is_err());
}
