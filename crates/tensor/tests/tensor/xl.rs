//! The attention of Transformer-XL and XLNet on the tape, and the rows that it joins: gradients against differences of the loss, bf16,
//! threads, company, and errors where sizes do not fit.

use crate::common::*;
use henson_tensor::{
    Activation, Builder, DType, Init, Layout, Param, Pass, QueryKeyValue, Relations, Tape, Tensor, UNSEEN, Var, Xl,
    XlRelations, XlTables,
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
