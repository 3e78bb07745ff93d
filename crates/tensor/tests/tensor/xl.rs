//! The attention of Transformer-XL and XLNet on the tape, and the rows that it joins: gradients against differences of the loss, bf16,
//! threads, company, and errors where sizes do not fit.

use crate::common::*;
use henson_tensor::{
    Activation, Builder, DType, Device, Init, Layout, Param, Pass, QueryKeyValue, Recordings, Relations, Sinusoids,
    Tape, Tensor, TensorError, UNSEEN, Var, Xl, XlRelations, XlTables,
};

/// Queries, and keys of which those in front are earlier tokens.
const QUERIES: [usize; 3] = [7, 1, 33];
const KEYS: [usize; 3] = [9, 4, 33];

/// What stands next to contents.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Nothing.
    Plain,
    /// Segments.
    Segments,
    /// With segments, in an order; the last third of a sequence is a second stream of queries.
    Streams,
}

#[derive(Clone, Copy)]
struct Model {
    /// Query, key and value of every token; with earlier tokens, the query alone.
    contents: (Param, usize),
    key_value: Option<(Param, usize)>,
    distances: Param,
    biases: Param,
    segments: Option<Param>,
}

fn build(b: &mut Builder, kind: Kind, earlier: bool) -> Model {
    let (queries, keys): (usize, usize) = (QUERIES.iter().sum(), KEYS.iter().sum());
    Model {
        contents: input(b, "contents", queries, if earlier { 16 } else { 48 }),
        key_value: earlier.then(|| input(b, "key_value", keys, 32)),
        distances: b.matrix("r", 16, 16, Init::Normal(0.5)),
        // Without segments, their bias changes nothing and has no gradient: the three are one parameter here.
        biases: b.vector("biases", 48, Init::Normal(0.5)),
        segments: (kind != Kind::Plain).then(|| b.matrix("segments", 2, 16, Init::Normal(0.5))),
    }
}

fn relations(pass: &Pass<'_>, kind: Kind, queries: &[usize], keys: &[usize]) -> XlRelations {
    let layouts = [queries, keys].map(|lengths| Layout::new(pass.device(), lengths, 3).unwrap());
    let (mut places, mut segments, mut orders) = (vec![], [vec![], vec![]], [vec![], vec![]]);
    for (&n, &m) in queries.iter().zip(keys) {
        let (before, content) = (m - n, n - n / 3);
        for j in 0..m {
            let row = j.saturating_sub(before);
            segments[1].push(if j < before { 0 } else { (row * 3 / n) as u32 });
            orders[1].push(if row >= content { UNSEEN } else { (j * 7 % 5) as u32 });
        }
        for row in 0..n {
            let place = if row < content { row } else { (row - content) * 2 };
            places.push((before + place) as u32);
            segments[0].push((place * 3 / n) as u32);
            orders[0].push(1 + (place * 3 % 5) as u32);
        }
    }
    let numbers = Relations {
        places: (kind == Kind::Streams).then_some(&places[..]),
        segments: (kind != Kind::Plain).then_some([&segments[0][..], &segments[1]]),
        orders: (kind == Kind::Streams).then_some([&orders[0][..], &orders[1]]),
    };
    XlRelations::new(pass.device(), (&layouts[0], &layouts[1]), numbers).unwrap()
}

fn attend(model: &Model, pass: &mut Pass<'_>, relations: &XlRelations) -> Var {
    let longest = relations.keys().offsets().windows(2).map(|ends| ends[1] - ends[0]).max().unwrap();
    let table = pass.sinusoids(longest as usize, 20, 16, (0.2, 2)).unwrap();
    let positions = pass.linear(&table.table, model.distances, None, Activation::None).unwrap();
    let tables = XlTables { positions, first: table.first, biases: model.biases, segments: model.segments };
    let contents = rows(pass, model.contents);
    let from = match model.key_value {
        Some(key_value) => QueryKeyValue::Cross { query: contents, key_value: rows(pass, key_value) },
        None => QueryKeyValue::Fused(contents),
    };
    pass.xl_attention(&Xl::new(2, 8), from, tables, relations, (0.1, 1)).unwrap()
}

#[test]
fn gradients_of_contents_distances_segments_and_biases() {
    for (kind, earlier) in [
        (Kind::Plain, false),
        (Kind::Plain, true),
        (Kind::Segments, true),
        (Kind::Segments, false),
        (Kind::Streams, false),
    ] {
        let keys = if earlier { KEYS } else { QUERIES };
        check(
            &format!("{kind:?}, earlier tokens: {earlier}"),
            |b| build(b, kind, earlier),
            |model, pass| {
                let relations = relations(pass, kind, &QUERIES, &keys);
                vec![attend(model, pass, &relations)]
            },
        );
    }
}

#[test]
fn distances_are_dropped_alike_in_any_company() {
    // A sequence alone, and next to a longer one, whose table has more distances.
    let of = |lengths: &[usize]| {
        let device = device(2);
        let mut b = Builder::new();
        let model = Model { contents: input(&mut b, "contents", 40, 48), ..build(&mut b, Kind::Segments, false) };
        let mut parameters = b.finish(&device, DType::F32).unwrap();
        parameters.initialise(1).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
        let relations = relations(&pass, Kind::Segments, lengths, lengths);
        let table = pass.sinusoids(*lengths.iter().max().unwrap(), 20, 16, (0.2, 2)).unwrap();
        let ids: Vec<u32> = (0..lengths.iter().sum::<usize>() as u32).collect();
        let ids = Tensor::from_slice(&device, [ids.len()], &ids).unwrap();
        let all = rows(&mut pass, model.contents);
        let contents = pass.gather(&all, &ids).unwrap();
        let positions = pass.linear(&table.table, model.distances, None, Activation::None).unwrap();
        let tables = XlTables { positions, first: table.first, biases: model.biases, segments: model.segments };
        let from = QueryKeyValue::Fused(contents);
        let out = pass.xl_attention(&Xl::new(2, 8), from, tables, &relations, (0.1, 1)).unwrap();
        out.tensor().to_f32().unwrap()[..7 * 16].to_vec()
    };
    assert_eq!(of(&[7]), of(&[7, 33]));
}

/// A pass that is recorded with sequences of some lengths and played with others; on a GPU, tokens are added that fill the batch up.
#[test]
fn recorded_passes_are_those_of_the_cpu() {
    let batches: [&[usize]; 4] = [&[20, 7, 33], &[33, 20, 7], &[1, 30, 29], &[20, 20, 20]];
    let run = |device: &Device, dtype: DType| {
        let mut b = Builder::new();
        let (project, distances) =
            (b.matrix("qkv", 48, 16, Init::Normal(0.5)), b.matrix("r", 16, 16, Init::Normal(0.5)));
        let (biases, segments) =
            (b.vector("biases", 48, Init::Normal(0.5)), Some(b.matrix("segments", 2, 16, Init::Normal(0.5))));
        let mut parameters = b.finish(device, dtype).unwrap();
        parameters.initialise(1).unwrap();
        let (mut gradients, mut tape, mut recordings) =
            (parameters.gradients().unwrap(), Tape::new(), Recordings::default());
        let mut all = Vec::new();
        for (step, lengths) in batches.iter().enumerate() {
            let tokens: usize = lengths.iter().sum();
            let ((x, targets, relations, far), signature) = device
                .feed(|| {
                    let layout = Layout::new(device, lengths, 3)?;
                    let padded = |seed: u64| {
                        let mut numbers = numbers(seed, tokens * 16);
                        numbers.resize(layout.tokens() * 16, 0.0);
                        numbers
                    };
                    let x = Tensor::from_slice(device, [layout.tokens(), 16], &padded(step as u64 + 40))?;
                    let targets = Tensor::from_slice(device, [layout.tokens() * 16], &padded(step as u64 + 70))?;
                    let of: Vec<u32> = (0..tokens as u32).map(|i| i / 5 % 3).collect();
                    let orders: Vec<u32> = (0..tokens as u32).map(|i| 1 + i * 7 % 11).collect();
                    let numbers =
                        Relations { places: None, segments: Some([&of, &of]), orders: Some([&orders, &orders]) };
                    let relations = XlRelations::new(device, (&layout, &layout), numbers)?;
                    let longest = Sinusoids::distances_for(device, *lengths.iter().max().unwrap());
                    // What a pass reads of it is its size.
                    let far = Tensor::from_slice(device, [longest], &vec![0u32; longest])?;
                    Ok::<_, TensorError>((x, targets, relations, far))
                })
                .unwrap();
            gradients.zero();
            // Memory that a recorded pass writes to on its way may belong to others afterwards, so it is recorded again.
            if step == 3 {
                device.trim();
            }
            let losses = recordings.run(device, &signature, &(), || {
                let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
                let x = pass.input(&x)?;
                let table = pass.sinusoids(far.shape().elements(), 20, 16, (0.2, 2))?;
                let positions = pass.linear(&table.table, distances, None, Activation::None)?;
                let from = QueryKeyValue::Fused(pass.linear(&x, project, None, Activation::None)?);
                let tables = XlTables { positions, first: table.first, biases, segments };
                let y = pass.xl_attention(&Xl::new(2, 8), from, tables, &relations, (0.1, 1))?;
                let loss = pass.squared_error(y, &targets, 1.0)?;
                pass.backward(&mut gradients)?;
                Ok::<_, TensorError>((vec![loss], tape.trace()))
            });
            gradients.played();
            let recorded = matches!(device, Device::Cuda(_)) && [1, 2].contains(&step);
            assert_eq!(recordings.ready(), usize::from(recorded), "step {step}");
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

#[test]
fn rows_of_two_values_are_joined() {
    let places = [vec![3u32, 0, 5], vec![1, 4, 2, 6]];
    let build = |b: &mut Builder| (input(b, "first", 3, 16), input(b, "second", 4, 16));
    check("join", build, |(first, second), pass| {
        let at = [0, 1].map(|i| Tensor::from_slice(pass.device(), [places[i].len()], &places[i]).unwrap());
        let [first, second] = [first, second].map(|x| rows(pass, *x));
        let both = pass.join(&first, &second, at.each_ref()).unwrap();
        let numbers = both.tensor().to_f32().unwrap();
        for (x, places) in [(&first, &places[0]), (&second, &places[1])] {
            for (row, place) in x.tensor().to_f32().unwrap().chunks(16).zip(places) {
                assert_eq!(row, &numbers[*place as usize * 16..][..16]);
            }
        }
        vec![both, first]
    });
}

#[test]
fn what_does_not_fit_is_an_error() {
    let device = device(1);
    let layout = |lengths: &[usize]| Layout::new(&device, lengths, 0).unwrap();
    let (three, four) = (layout(&[3]), layout(&[4]));
    let wrong = |queries: &Layout, keys: &Layout, numbers: Relations<'_>| {
        XlRelations::new(&device, (queries, keys), numbers).unwrap_err().to_string()
    };
    let none = Relations::default();
    assert!(wrong(&four, &three, none).contains("more queries than keys"));
    assert!(wrong(&three, &layout(&[3, 1]), none).contains("as many sequences"));
    assert!(wrong(&three, &four, Relations { places: Some(&[0, 1, 4]), ..none }).contains("outside of its sequence"));
    assert!(wrong(&three, &four, Relations { places: Some(&[0, 1]), ..none }).contains("one number"));
    // The first query sees no lower order, and its own key is hidden from all.
    let orders = Some([&[0, 1, 1][..], &[0, UNSEEN, 0, 0]]);
    assert!(wrong(&three, &four, Relations { orders, ..none }).contains("sees no key"));

    let mut b = Builder::new();
    let (weight, biases) = (b.matrix("r", 16, 16, Init::Zeros), b.vector("biases", 48, Init::Zeros));
    let qkv = input(&mut b, "qkv", 4, 48);
    let parameters = b.finish(&device, DType::F32).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::training(&mut tape, &parameters, TRAINING);
    let relations = XlRelations::new(&device, (&four, &four), none).unwrap();
    let from = QueryKeyValue::Fused(rows(&mut pass, qkv));
    let mut attend = |longest: usize, heads: usize, biases: Param| {
        let table = pass.sinusoids(longest, 9, 16, (0.0, 1)).unwrap();
        let positions = pass.linear(&table.table, weight, None, Activation::None).unwrap();
        let tables = XlTables { positions, first: table.first, biases, segments: None };
        pass.xl_attention(&Xl::new(heads, 8), from.clone(), tables, &relations, (0.0, 1)).map_err(|e| e.to_string())
    };
    assert!(attend(4, 2, biases).is_ok());
    assert!(attend(3, 2, biases).unwrap_err().contains("too short"));
    assert!(attend(4, 3, biases).unwrap_err().contains("query, key and value"));
    assert!(attend(4, 2, biases.to_row(32)).unwrap_err().contains("the biases"));
}
