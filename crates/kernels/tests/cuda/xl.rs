//! Transformer-XL's attention against the CPU's reference in f64.

use half::bf16;
use henson_kernels::cpu::attention::xl::{Relations, UNSEEN, Xl, reference, sinusoid};
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cuda::attention::general::{Columns, Cross, Sequences};
use henson_kernels::cuda::attention::xl::{self as kernels, Gradients, Inputs};
use henson_kernels::cuda::attention::{Room, write_table};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::{Buffer, DType, Dropout, Gpu, Result, Step, View};

use crate::attention::time;
use crate::check::{Checks, Number, bits, error, exact, filled, numbers, tolerance};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const STEP: u32 = 77;
const SITE: u32 = 5;

/// What is added to scores besides positions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Segments,
    /// With segments, in the order of a permutation.
    Permuted,
    /// The same, and the last sixth of a sequence's rows are a second stream: they stand where others do, and nobody sees them.
    Streams,
}

struct Case<'a> {
    /// Of queries, and of keys.
    lengths: &'a [(usize, usize)],
    attention: Xl,
    kind: Kind,
    p: f32,
    /// Heads at a time: as much room as they need.
    heads: usize,
}

impl Case<'_> {
    fn named(&self, what: &str) -> String {
        let Self { lengths, attention, kind, p, heads } = self;
        format!("{what}: {attention:?}, {kind:?}, p = {p}, {heads} heads at a time, {lengths:?}")
    }

    fn width(&self) -> usize {
        self.attention.heads * self.attention.head_size
    }

    /// Whether keys have a layout of their own.
    fn crosses(&self) -> bool {
        self.lengths.iter().any(|(n, m)| n != m)
    }

    fn longest(&self) -> usize {
        self.lengths.iter().map(|(_, m)| *m).max().unwrap_or(0)
    }

    fn tokens(&self) -> (usize, usize) {
        (self.lengths.iter().map(|l| l.0).sum(), self.lengths.iter().map(|l| l.1).sum())
    }
}

/// How the queries of a batch stand to its keys.
#[derive(Default)]
struct Numbers {
    places: Vec<u32>,
    segments: [Vec<u32>; 2],
    orders: [Vec<u32>; 2],
}

impl Numbers {
    fn new(case: &Case<'_>) -> Self {
        let mut all = Self::default();
        for (i, &(n, m)) in case.lengths.iter().enumerate() {
            let before = m - n;
            let second = if case.kind == Kind::Streams { n / 6 } else { 0 };
            let content = n - second;
            let order = |row: usize| 1 + ((row * 7 + i) % content) as u32;
            for key in 0..m {
                let row = key.saturating_sub(before);
                all.segments[1].push(if key < before { 0 } else { (row * 3 / n) as u32 });
                all.orders[1].push(match row {
                    _ if key < before => 0,
                    _ if row >= content => UNSEEN,
                    // Every query sees the first key, and a third of the others.
                    _ if row == 0 || row % 3 == 1 => 0,
                    _ => order(row),
                });
            }
            for row in 0..n {
                let place = if row < content { row } else { (row - content) * 5 % content };
                all.places.push((before + place) as u32);
                all.segments[0].push((place * 3 / n) as u32);
                all.orders[0].push(order(place));
            }
        }
        all
    }

    fn relations(&self, kind: Kind) -> Relations<'_> {
        let [of, others] = &self.segments;
        let [order, orders] = &self.orders;
        Relations {
            places: (kind == Kind::Streams).then_some(&self.places[..]),
            segments: (kind != Kind::Plain).then_some([&of[..], &others[..]]),
            orders: matches!(kind, Kind::Permuted | Kind::Streams).then_some([&order[..], &orders[..]]),
        }
    }
}

/// All without gaps: T×H of queries, M×H of keys and of values, P×H, and 5×H of the biases and segments.
struct Expected {
    out: Vec<f64>,
    dquery: Vec<f64>,
    dkey: Vec<f64>,
    dvalue: Vec<f64>,
    dpositions: Vec<f64>,
    dvectors: Vec<f64>,
    maps: Vec<f64>,
}

/// What sums begin with.
const BEFORE: f32 = 0.5;

pub(crate) fn xl(checks: &mut Checks<'_>) -> Result<()> {
    sinusoids(checks)?;
    let own = [(7, 7), (33, 33), (1, 1), (129, 129)];
    let long = [(200, 200), (6, 6), (128, 128)];
    let earlier = [(7, 40), (33, 34), (1, 129), (129, 200)];
    let sizes: &[usize] = if checks.small { &[64] } else { &[8, 32, 40, 64, 96, 128, 136, 192, 256] };
    let kinds = [Kind::Plain, Kind::Segments, Kind::Permuted, Kind::Streams];
    for &d in sizes {
        let attention = Xl::new(3, d);
        for (i, kind) in kinds.into_iter().enumerate() {
            let p = if i % 2 == 0 { 0.1 } else { 0.0 };
            case::<bf16>(checks, &Case { lengths: &own, attention, kind, p, heads: 3 })?;
            case::<bf16>(checks, &Case { lengths: &earlier, attention, kind, p: 0.1 - p, heads: 2 })?;
        }
        case::<bf16>(checks, &Case { lengths: &long, attention, kind: Kind::Streams, p: 0.1, heads: 1 })?;
    }
    let sizes: &[usize] = if checks.small { &[64] } else { &[3, 16, 64] };
    for &d in sizes {
        for (i, kind) in kinds.into_iter().enumerate() {
            let (attention, p) = (Xl::new(2, d), if i % 2 == 0 { 0.0 } else { 0.1 });
            case::<f32>(checks, &Case { lengths: &own, attention, kind, p, heads: 2 })?;
            case::<f32>(checks, &Case { lengths: &earlier, attention, kind, p: 0.1 - p, heads: 1 })?;
            // Heads of an odd size in bf16.
            if d == 3 {
                case::<bf16>(checks, &Case { lengths: &own, attention, kind, p, heads: 2 })?;
            }
        }
    }
    Ok(())
}

fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut all = vec![0];
    lengths.for_each(|length| all.push(all[all.len() - 1] + length as u32));
    all
}

/// Numbers of queries, keys, values (rows of H each), positions, the three biases and two segments, and the output's gradient.
struct Data<E> {
    query: Vec<E>,
    key: Vec<E>,
    value: Vec<E>,
    positions: Vec<E>,
    vectors: Vec<f32>,
    dout: Vec<E>,
}

impl<E: Number> Data<E> {
    fn new(case: &Case<'_>, rows: usize) -> Self {
        let (h, (n, m)) = (case.width(), case.tokens());
        Self {
            query: numbers(1, n * h),
            key: numbers(2, m * h),
            value: numbers(3, m * h),
            positions: numbers(4, rows * h),
            vectors: numbers(5, 5 * h),
            dout: numbers(6, n * h),
        }
    }
}

fn expected<E: Number>(case: &Case<'_>, data: &Data<E>, first: usize, sequences: &[u32], all: &Numbers) -> Expected {
    let Case { lengths, attention, kind, p, .. } = case;
    let Xl { heads, head_size: d, scale } = *attention;
    let (h, (tq, tk)) = (heads * d, case.tokens());
    let take = |x: &[E], rows: std::ops::Range<usize>, column: usize| -> Vec<f64> {
        rows.flat_map(|row| exact(&x[row * h + column..][..d])).collect()
    };
    let add = |to: &mut [f64], from: &[f64], first: usize, column: usize| {
        from.iter().enumerate().for_each(|(i, x)| to[(first + i / d) * h + column + i % d] += x);
    };
    let mut found = Expected {
        out: vec![0.0; tq * h],
        dquery: vec![0.0; tq * h],
        dkey: vec![0.0; tk * h],
        dvalue: vec![0.0; tk * h],
        dpositions: vec![0.0; data.positions.len()],
        dvectors: vec![f64::from(BEFORE); 5 * h],
        maps: vec![],
    };
    let (mut first_query, mut first_key) = (0, 0);
    for (i, &(n, m)) in lengths.iter().enumerate() {
        let (queries, keys) = (first_query..first_query + n, first_key..first_key + m);
        for head in 0..heads {
            let at = head * d;
            let q = take(&data.query, queries.clone(), at);
            let [k, v] = [&data.key, &data.value].map(|x| take(x, keys.clone(), at));
            let vector = |which: usize| exact(&data.vectors[which * h + at..][..d]);
            let (biases, segments) = ([vector(0), vector(1), vector(2)], [vector(3), vector(4)].concat());
            let positions = take(&data.positions, 0..data.positions.len() / h, at);
            let x = reference::Inputs {
                q: &q,
                k: &k,
                v: &v,
                d,
                biases: biases.each_ref().map(|x| &x[..]),
                positions: &positions,
                first,
                segments: (*kind != Kind::Plain).then_some(&segments[..]),
                relations: all.relations(*kind).of(queries.clone(), keys.clone()),
                scale: f64::from(scale),
            };
            let mask = CpuDropout::new(*p, SEED, STEP, SITE).map(|dropout| -> Vec<f64> {
                let dropout = dropout.at_head(head);
                let row = |j: usize| RowId { sequence: sequences[i], position: (j / m) as u32 };
                let keep = |j: usize| dropout.keeps(row(j), m, j % m);
                (0..n * m).map(|j| if keep(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let output = reference::forward(&x, mask.as_deref());
            let gradients = reference::backward(&x, &output, mask.as_deref(), &take(&data.dout, queries.clone(), at));
            add(&mut found.out, &output.out, first_query, at);
            add(&mut found.dquery, &gradients.q, first_query, at);
            add(&mut found.dkey, &gradients.k, first_key, at);
            add(&mut found.dvalue, &gradients.v, first_key, at);
            add(&mut found.dpositions, &gradients.positions, 0, at);
            for (which, gradient) in gradients.biases.iter().enumerate() {
                add(&mut found.dvectors, gradient, which, at);
            }
            add(&mut found.dvectors, &gradients.segments, 3, at);
            found.maps.extend(output.probabilities);
        }
        (first_query, first_key) = (queries.end, keys.end);
    }
    found
}

/// A layout on the GPU.
struct Table {
    table: Buffer,
    room: Room,
    offsets: Vec<u32>,
}

impl Table {
    /// With room to spare, or not.
    fn new(gpu: &Gpu, offsets: Vec<u32>, sequences: &[u32], spare: bool) -> Result<Self> {
        let needed = Room::of(&offsets);
        let room = if spare { Room { long: needed.long + 1, middle: needed.middle + 1, ..needed } } else { needed };
        let mut table = vec![u32::MAX; room.numbers()];
        write_table(&offsets, sequences, room, &mut table);
        Ok(Self { table: gpu.upload(&table)?, room, offsets })
    }

    fn sequences(&self) -> Sequences<'_> {
        Sequences { table: self.table.view(), room: self.room, tokens: self.offsets[self.offsets.len() - 1] as usize }
    }
}

/// Matrices of H columns side by side.
fn side_by_side<E: Number>(parts: &[&[E]], h: usize) -> Vec<E> {
    let rows = parts[0].len() / h;
    (0..rows).flat_map(|row| parts.iter().flat_map(move |part| part[row * h..(row + 1) * h].to_vec())).collect()
}

/// Queries, keys and values in one matrix, or queries apart from the others.
fn columns<'a>(case: &Case<'_>, buffers: [View<'a>; 2]) -> [Columns<'a>; 3] {
    let h = case.width();
    if !case.crosses() {
        return Columns::split(buffers[0], [h, h, h]);
    }
    let [key, value] = Columns::split(buffers[1], [h, h]);
    [Columns::new(buffers[0], h), key, value]
}

fn case<E: Number>(checks: &mut Checks<'_>, case: &Case<'_>) -> Result<()> {
    let Case { lengths, attention, kind, p, heads } = case;
    let (gpu, h, crosses, (tq, tk)) = (checks.gpu, case.width(), case.crosses(), case.tokens());
    let longest = kernels::rounded_longest(case.longest());
    // More of the table than is needed, on both sides.
    let (rows, first) = (2 * longest + 8, longest + 1);
    let data = Data::<E>::new(case, rows);
    let all = Numbers::new(case);
    let sequences: Vec<u32> = (0..lengths.len() as u32).map(|i| 100 - 7 * i).collect();
    let expected = expected(case, &data, first, &sequences, &all);

    let query_offsets = || offsets(lengths.iter().map(|l| l.0));
    let key_offsets = || offsets(lengths.iter().map(|l| l.1));
    let exactly = [query_offsets(), key_offsets()].map(|o| Table::new(gpu, o, &sequences, false));
    let spare = [query_offsets(), key_offsets()].map(|o| Table::new(gpu, o, &sequences, true));
    let [exactly, spare] = [exactly, spare].map(|[queries, keys]| Ok([queries?, keys?]));
    let (exactly, spare): ([Table; 2], [Table; 2]) = (exactly?, spare?);
    let (on_gpu, numbers_on_gpu) =
        ([gpu.upload(&query_offsets())?, gpu.upload(&key_offsets())?], gpu.upload(&sequences)?);
    let cross = |keys| {
        let [query_offsets, key_offsets] = on_gpu.each_ref().map(Buffer::view);
        crosses.then(|| Cross { keys, query_offsets, key_offsets, numbers: numbers_on_gpu.view() })
    };
    // Queries apart from keys and values, or all side by side.
    let widths = if crosses { [h, 2 * h] } else { [3 * h, 0] };
    let parts = match crosses {
        true => [data.query.clone(), side_by_side(&[&data.key, &data.value], h)],
        false => [side_by_side(&[&data.query, &data.key, &data.value], h), vec![]],
    };
    let uploaded = [checks.up(&parts[0])?, checks.up(&parts[1])?];
    let [query, key, value] = columns(case, uploaded.each_ref().map(Buffer::view));
    let (positions, dout) = (checks.up(&data.positions)?, checks.up(&data.dout)?);
    let (biases, segments) = (checks.up(&data.vectors[..3 * h])?, checks.up(&data.vectors[3 * h..])?);
    let [places, of, others, order, orders] =
        [&all.places, &all.segments[0], &all.segments[1], &all.orders[0], &all.orders[1]].map(|x| checks.up(x));
    let (places, of, others, order, orders) = (places?, of?, others?, order?, orders?);
    let known = all.relations(*kind);
    // What one head needs in a backward.
    let of_head = tq * (rows + 2 * longest) * E::DTYPE.size();
    let inputs = Inputs {
        query,
        key,
        value,
        queries: spare[0].sequences(),
        cross: cross(spare[1].sequences()),
        biases: biases.view(),
        positions: Columns::new(positions.view(), h),
        first,
        longest,
        segments: (*kind != Kind::Plain).then_some(segments.view()),
        relations: kernels::Relations {
            places: known.places.map(|_| places.view()),
            segments: known.segments.map(|_| [of.view(), others.view()]),
            orders: known.orders.map(|_| [order.view(), orders.view()]),
        },
        room: heads * of_head,
    };
    let step = checks.up(&[STEP])?;
    let dropout = Dropout::new(*p, SEED, Step::At(step.view()), SITE);
    let mut before = None;
    for _ in 0..2 {
        let (out, log_sums) = (checks.poisoned::<E>(tq * h)?, checks.poisoned::<f32>(attention.heads * tq)?);
        let own = [checks.poisoned::<E>(tq * widths[0])?, checks.poisoned::<E>(tk * widths[1])?];
        let dpositions = checks.poisoned::<E>(rows * h)?;
        let (dbiases, dsegments) = (checks.out(&vec![BEFORE; 3 * h])?, checks.out(&vec![BEFORE; 2 * h])?);
        kernels::forward(gpu, attention, &inputs, dropout, out.view(), log_sums.view())?;
        let [query, key, value] = columns(case, [own[0].view(), own[1].view()]);
        let to = Gradients {
            query,
            key,
            value,
            positions: Columns::new(dpositions.view(), h),
            biases: Sum::add(dbiases.view()),
            segments: inputs.segments.map(|_| Sum::add(dsegments.view())),
        };
        kernels::backward(gpu, attention, &inputs, dropout, out.view(), log_sums.view(), dout.view(), to)?;
        let all = [
            bits::<E>(gpu, &out)?,
            bits::<E>(gpu, &own[0])?,
            bits::<E>(gpu, &own[1])?,
            bits::<E>(gpu, &dpositions)?,
            bits::<f32>(gpu, &dbiases)?,
            bits::<f32>(gpu, &dsegments)?,
        ];
        match &before {
            None => {
                checks.close::<E>(&case.named("Transformer-XL's attention"), &out, &expected.out)?;
                checks.close::<E>(&case.named("the positions' gradient"), &dpositions, &expected.dpositions)?;
                let got = [checks.read::<E>("queries", &own[0])?, checks.read::<E>("keys", &own[1])?];
                let of = |part: usize| -> Vec<f64> {
                    let (which, column) = match (crosses, part) {
                        (true, 0) => (0, 0),
                        (true, _) => (1, part - 1),
                        (false, _) => (0, part),
                    };
                    let rows = got[which].chunks(widths[which]);
                    exact(&rows.flat_map(|row| row[column * h..(column + 1) * h].to_vec()).collect::<Vec<E>>())
                };
                let gradients = [("queries", &expected.dquery), ("keys", &expected.dkey), ("values", &expected.dvalue)];
                for (part, (name, expected)) in gradients.into_iter().enumerate() {
                    compare::<E>(checks, case, name, &of(part), expected, tolerance::<E>());
                }
                let vectors = [gpu.read::<f32>(dbiases.view())?, gpu.read::<f32>(dsegments.view())?].concat();
                // Sums over all queries of numbers that nearly cancel: rounding of each counts beside the sum.
                let bound = if E::IS_BF16 { 3.0 } else { 1.0 } * tolerance::<E>();
                let names = ["contents", "positions", "segments", "the same segment", "another segment"];
                for (which, name) in names.into_iter().enumerate() {
                    let range = which * h..(which + 1) * h;
                    compare::<E>(checks, case, name, &exact(&vectors[range.clone()]), &expected.dvectors[range], bound);
                }
            }
            Some(before) => checks.verify(|| case.named("another run gives other bits"), *before == all),
        }
        before = Some(all);
    }
    let maps = checks.poisoned::<f32>(expected.maps.len())?;
    let inputs = Inputs { queries: exactly[0].sequences(), cross: cross(exactly[1].sequences()), ..inputs };
    let offsets = (&exactly[0].offsets[..], &exactly[1].offsets[..]);
    kernels::probabilities(gpu, attention, &inputs, offsets, maps.view())?;
    // What is added to scores is rounded to the storage type.
    let bound = if E::IS_BF16 { tolerance::<E>() } else { 1e-4 };
    checks.within::<f32>(&case.named("probabilities"), &maps, &expected.maps, bound)
}

fn compare<E: Number>(checks: &mut Checks<'_>, case: &Case<'_>, name: &str, got: &[f64], expected: &[f64], bound: f64) {
    let error = error(got, expected);
    let worst = &mut checks.worst[usize::from(E::IS_BF16)];
    *worst = worst.max(error);
    let what = || format!("{} {:?}: error {error:.2e}", case.named(&format!("the gradient of {name}")), E::DTYPE);
    checks.verify(what, error <= bound);
}

/// The table of distances, of which those far away are one.
fn sinusoids(checks: &mut Checks<'_>) -> Result<()> {
    for (first, most, width, rows) in [(4, 9, 6, 7), (4, 1, 6, 7), (511, usize::MAX, 30, 1024), (0, 3, 2, 1)] {
        let (out, half) = (checks.poisoned::<f32>(rows * width)?, checks.poisoned::<bf16>(rows * width)?);
        let ids = checks.gpu.empty(2 * rows, DType::U32)?;
        kernels::sinusoids(checks.gpu, first, most, width, half.view(), ids.view())?;
        kernels::sinusoids(checks.gpu, first, most, width, out.view(), ids.view())?;
        let mut expected = Vec::new();
        for row in 0..rows {
            let distance = (first as i64 - row as i64).clamp(-(most.min(1 << 30) as i64), most.min(1 << 30) as i64);
            let both: Vec<_> = (0..width / 2).map(|t| sinusoid(distance, t, width)).collect();
            expected.extend(both.iter().map(|(sin, _)| f64::from(*sin)));
            expected.extend(both.iter().map(|(_, cos)| f64::from(*cos)));
        }
        let what = format!("sinusoids from {first} to {most}, {rows}×{width}");
        checks.close::<f32>(&what, &out, &expected)?;
        checks.close::<bf16>(&what, &half, &expected)?;
        let found = checks.gpu.read::<u32>(ids.view())?;
        let side = |row: usize| [u32::from(row > first), first.abs_diff(row) as u32];
        checks.verify(|| format!("{what}: the rows' numbers"), found == (0..rows).flat_map(side).collect::<Vec<_>>());
    }
    Ok(())
}

/// Times forward and backward of XLNet-base's attention, with segments.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    println!("Transformer-XL's attention, bf16, 12 heads of 64: microseconds forward, backward");
    for (b, s) in [(64, 128), (16, 512), (32, 512), (4, 2048)] {
        let (t, h, attention) = (b * s, 768, Xl::new(12, 64));
        let (rows, first) = kernels::table_for(s);
        let table = Table::new(gpu, offsets((0..b).map(|_| s)), &(0..b as u32).collect::<Vec<_>>(), false)?;
        let qkv = filled(gpu, 1, t * 3 * h, DType::Bf16, 1.0)?;
        let positions = filled(gpu, 2, rows * h, DType::Bf16, 1.0)?;
        let vectors = filled(gpu, 4, 5 * h, DType::F32, 1.0)?;
        let dout = filled(gpu, 3, t * h, DType::Bf16, 1.0)?;
        let of = gpu.upload(&(0..t).map(|i| (i % s / (s / 2)) as u32).collect::<Vec<_>>())?;
        let (out, log_sums) = (gpu.empty(t * h, DType::Bf16)?, gpu.empty(12 * t, DType::F32)?);
        let (dqkv, dpositions) = (gpu.empty(t * 3 * h, DType::Bf16)?, gpu.empty(rows * h, DType::Bf16)?);
        let dvectors = gpu.zeros(5 * h, DType::F32)?;
        let dropout = Dropout::new(0.1, SEED, Step::Value(STEP), SITE);
        let [query, key, value] = Columns::split(qkv.view(), [h, h, h]);
        let inputs = Inputs {
            query,
            key,
            value,
            queries: table.sequences(),
            cross: None,
            biases: vectors.view().part(0, 3 * h),
            positions: Columns::new(positions.view(), h),
            first,
            longest: kernels::rounded_longest(s),
            segments: Some(vectors.view().part(3 * h, 2 * h)),
            relations: kernels::Relations { segments: Some([of.view(); 2]), ..Default::default() },
            room: kernels::ROOM,
        };
        let [query, key, value] = Columns::split(dqkv.view(), [h, h, h]);
        let to = Gradients {
            query,
            key,
            value,
            positions: Columns::new(dpositions.view(), h),
            biases: Sum::add(dvectors.view().part(0, 3 * h)),
            segments: Some(Sum::add(dvectors.view().part(3 * h, 2 * h))),
        };
        let (o, l) = (out.view(), log_sums.view());
        let forward = time(gpu, || kernels::forward(gpu, &attention, &inputs, dropout, o, l))?;
        let backward = time(gpu, || kernels::backward(gpu, &attention, &inputs, dropout, o, l, dout.view(), to))?;
        println!("henson | xl | {b} × {s} | {forward:.1} | {backward:.1}");
    }
    Ok(())
}
