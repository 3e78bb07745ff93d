//! Attention by a description, and attention to a cache: against the CPU's reference in f64.

use half::bf16;
use henson_kernels::cpu::attention::{Attention, Bias, Buckets, Window, reference};
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cuda::attention::cache::{self as caches, Pages};
use henson_kernels::cuda::attention::general::{self as kernels, Columns, Cross, Gradients, Inputs, Sequences};
use henson_kernels::cuda::attention::{self as fused, Room, write_table};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::{Buffer, DType, Dropout, Gpu, Result, Step, View};

use crate::attention::time;
use crate::check::{Checks, Number, Out, bits, exact, filled, numbers, tolerance};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const STEP: u32 = 77;
const SITE: u32 = 5;

/// How query, key and value lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Storage {
    /// Side by side, where there are as many keys as queries.
    Fused,
    /// Queries alone, keys and values side by side.
    Pair,
    /// Three matrices.
    Apart,
}

struct Case<'a> {
    /// (queries, keys) of each sequence.
    lengths: &'a [(usize, usize)],
    attention: Attention,
    storage: Storage,
    p: f32,
}

impl Case<'_> {
    fn named(&self, what: &str) -> String {
        let Self { lengths, attention, storage, p } = self;
        let Attention { heads, key_heads, head_size, window, bias, .. } = attention;
        let first = lengths[0];
        format!(
            "{what}: {heads}/{key_heads} heads of {head_size}, {window:?}, {bias:?}, {storage:?}, p = {p}, {first:?}"
        )
    }
}

/// What the kernels gave.
struct Results {
    out: Out,
    log_sums: Out,
    dbias: Out,
    /// As query, key and value lie.
    gradients: Vec<Out>,
}

const T5: Buckets = Buckets { count: 32, max_distance: 128, bidirectional: true };
const DECODER: Buckets = Buckets { count: 8, max_distance: 20, bidirectional: false };

/// Sequences on the GPU.
struct Side {
    offsets: Vec<u32>,
    offsets_on_gpu: Buffer,
    numbers: Vec<u32>,
    table: Buffer,
    room: Room,
}

impl Side {
    fn new(gpu: &Gpu, lengths: impl Iterator<Item = usize>, spare: usize) -> Result<Self> {
        let mut offsets = vec![0];
        lengths.for_each(|n| offsets.push(offsets[offsets.len() - 1] + n as u32));
        let numbers: Vec<u32> = (1..offsets.len() as u32).map(|i| 5 + 3 * i).collect();
        let needed = Room::of(&offsets);
        let room = Room { long: needed.long + spare, middle: needed.middle + spare, ..needed };
        let mut table = vec![u32::MAX; room.numbers()];
        write_table(&offsets, &numbers, room, &mut table);
        Ok(Self { offsets_on_gpu: gpu.upload(&offsets)?, table: gpu.upload(&table)?, offsets, numbers, room })
    }

    fn tokens(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    fn sequences(&self) -> Sequences<'_> {
        Sequences { table: self.table.view(), room: self.room, tokens: self.tokens() }
    }
}

/// What a query at key position `position` sees of the key at `key`: the definition, spelled out.
fn added(attention: &Attention, bias: &[f32], head: usize, position: i64, key: i64) -> f64 {
    let Window { left, right } = attention.window;
    let hidden = (left != u32::MAX && key < position - i64::from(left))
        || (right != u32::MAX && key > position + i64::from(right));
    match attention.bias {
        _ if hidden => f64::NEG_INFINITY,
        Bias::None => 0.0,
        Bias::Relative(buckets) => f64::from(bias[buckets.of(key - position) * attention.heads + head]),
        Bias::Slopes => -f64::from(bias[head]) * (key - position).abs() as f64,
    }
}

/// What the reference gives for a batch: each of them without gaps.
struct Expected {
    out: Vec<f64>,
    log_sums: Vec<f64>,
    gradients: [Vec<f64>; 3],
    dbias: Vec<f64>,
    maps: Vec<f64>,
}

/// One head of one sequence.
struct Piece {
    rows: (usize, usize),
    head: usize,
    output: reference::Output,
    log_sums: Vec<f64>,
    gradients: [Vec<f64>; 3],
    dbias: Vec<f64>,
}

fn piece(
    case: &Case<'_>,
    sides: [&Side; 2],
    inputs: [&[f64]; 3],
    bias: &[f32],
    dout: &[f64],
    (sequence, head): (usize, usize),
) -> Piece {
    let Case { lengths, attention, p, .. } = case;
    let ((n, m), d) = (lengths[sequence], attention.head_size);
    let [hq, hk, _] = attention.fused_widths();
    let [query_start, key_start] = sides.map(|side| side.offsets[sequence] as usize);
    let take = |x: &[f64], width: usize, start: usize, rows: usize, head: usize| -> Vec<f64> {
        (0..rows).flat_map(|i| x[(start + i) * width + head * d..][..d].to_vec()).collect()
    };
    let key_head = head * attention.key_heads / attention.heads;
    let q = take(inputs[0], hq, query_start, n, head);
    let [k, v] = [1, 2].map(|i| take(inputs[i], hk, key_start, m, key_head));
    let position = |query: usize| query as i64 + m as i64 - n as i64;
    let added: Vec<f64> = (0..n * m).map(|j| added(attention, bias, head, position(j / m), (j % m) as i64)).collect();
    let mask = CpuDropout::new(*p, SEED, STEP, SITE).map(|dropout| -> Vec<f64> {
        let dropout = dropout.at_head(head);
        let row = |i: usize| RowId { sequence: sides[0].numbers[sequence], position: i as u32 };
        let keep = |j: usize| dropout.keeps(row(j / m), m, j % m);
        (0..n * m).map(|j| if keep(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
    });
    let scale = f64::from(attention.scale);
    let output = reference::forward(&q, &k, &v, d, scale, Some(&added), mask.as_deref());
    let log_sum = |i: usize| {
        let score = |j: usize| scale * (0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>() + added[i * m + j];
        (0..m).map(|j| score(j).exp()).sum::<f64>().ln()
    };
    let log_sums = (0..n).map(log_sum).collect();
    let dout = take(dout, hq, query_start, n, head);
    let [dq, dk, dv, dadded] = reference::backward(&q, &k, &v, d, scale, &output, mask.as_deref(), &dout);
    let mut dbias = vec![0.0; attention.bias_size()];
    if let Bias::Relative(buckets) = attention.bias {
        for (j, dadded) in dadded.iter().enumerate() {
            dbias[buckets.of((j % m) as i64 - position(j / m)) * attention.heads + head] += dadded;
        }
    }
    Piece { rows: (query_start, key_start), head, output, log_sums, gradients: [dq, dk, dv], dbias }
}

fn expected(case: &Case<'_>, sides: [&Side; 2], inputs: [&[f64]; 3], bias: &[f32], dout: &[f64]) -> Expected {
    let attention = &case.attention;
    let ([hq, hk, _], d) = (attention.fused_widths(), attention.head_size);
    let (tq, tk) = (sides[0].tokens(), sides[1].tokens());
    let parts: Vec<(usize, usize)> =
        (0..case.lengths.len()).flat_map(|s| (0..attention.heads).map(move |head| (s, head))).collect();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let mut pieces: Vec<(usize, Piece)> = std::thread::scope(|scope| {
        let parts = &parts;
        let work = |worker: usize| {
            move || -> Vec<_> {
                let own = parts.iter().enumerate().skip(worker).step_by(workers);
                own.map(|(i, part)| (i, piece(case, sides, inputs, bias, dout, *part))).collect()
            }
        };
        let handles: Vec<_> = (0..workers).map(|worker| scope.spawn(work(worker))).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap_or_default()).collect()
    });
    pieces.sort_by_key(|(i, _)| *i);
    let mut all = Expected {
        out: vec![f64::NAN; tq * hq],
        log_sums: vec![f64::NAN; attention.heads * tq],
        gradients: [vec![0.0; tq * hq], vec![0.0; tk * hk], vec![0.0; tk * hk]],
        dbias: vec![0.5; attention.bias_size()],
        maps: vec![],
    };
    for (_, piece) in pieces {
        let key_head = piece.head * attention.key_heads / attention.heads;
        for (i, log_sum) in piece.log_sums.iter().enumerate() {
            all.log_sums[piece.head * tq + piece.rows.0 + i] = *log_sum;
        }
        for (i, x) in piece.output.out.iter().enumerate() {
            all.out[(piece.rows.0 + i / d) * hq + piece.head * d + i % d] = *x;
            all.gradients[0][(piece.rows.0 + i / d) * hq + piece.head * d + i % d] = piece.gradients[0][i];
        }
        for which in [1, 2] {
            for (i, x) in piece.gradients[which].iter().enumerate() {
                all.gradients[which][(piece.rows.1 + i / d) * hk + key_head * d + i % d] += x;
            }
        }
        all.dbias.iter_mut().zip(&piece.dbias).for_each(|(sum, x)| *sum += x);
        all.maps.extend(piece.output.probabilities);
    }
    all
}

/// What stands in a fused matrix: the columns of each of its parts, row by row.
fn join<E: Copy>(rows: usize, parts: &[(&[E], usize)]) -> Vec<E> {
    (0..rows)
        .flat_map(|r| parts.iter().flat_map(move |(x, width)| x[r * width..(r + 1) * width].iter().copied()))
        .collect()
}

/// The columns of one part of it.
fn part<E: Copy>(x: &[E], widths: &[usize], which: usize) -> Vec<E> {
    let (stride, offset) = (widths.iter().sum::<usize>(), widths[..which].iter().sum::<usize>());
    x.chunks(stride).flat_map(|row| row[offset..offset + widths[which]].iter().copied()).collect()
}

impl Storage {
    /// The widths of what lies side by side in each matrix.
    fn widths(self, [q, k, v]: [usize; 3]) -> Vec<Vec<usize>> {
        match self {
            Storage::Fused => vec![vec![q, k, v]],
            Storage::Pair => vec![vec![q], vec![k, v]],
            Storage::Apart => vec![vec![q], vec![k], vec![v]],
        }
    }

    /// Query, key and value in these matrices.
    fn columns<'a>(self, widths: [usize; 3], matrices: &[henson_kernels::cuda::View<'a>]) -> [Columns<'a>; 3] {
        let [q, k, v] = widths;
        match self {
            Storage::Fused => Columns::split(matrices[0], [q, k, v]),
            Storage::Pair => {
                let [key, value] = Columns::split(matrices[1], [k, v]);
                [Columns::new(matrices[0], q), key, value]
            }
            Storage::Apart => {
                [Columns::new(matrices[0], q), Columns::new(matrices[1], k), Columns::new(matrices[2], v)]
            }
        }
    }
}

/// Tokens of sequences that see themselves, and queries and keys of those that see others.
const SELVES: [(usize, usize); 6] = [(1, 1), (7, 7), (33, 33), (129, 129), (64, 64), (200, 200)];
const CROSSES: [(usize, usize); 7] = [(1, 7), (33, 1), (7, 129), (129, 33), (5, 300), (260, 9), (64, 65)];

fn windows() -> [Window; 8] {
    [
        Window::FULL,
        Window::CAUSAL,
        Window::local(0),
        Window::local(3),
        Window::local(64),
        Window::local(5000),
        Window { left: 17, right: 0 },
        Window { left: 0, right: 40 },
    ]
}

/// A form for heads of any size, another for every window.
fn odd_case(i: usize, window: Window, d: usize) -> (Attention, &'static [(usize, usize)], Storage, f32) {
    let bias = [Bias::None, Bias::Relative(T5), Bias::Slopes, Bias::Relative(DECODER)][i % 4];
    let attention = Attention { window, bias, key_heads: 1, ..Attention::new(2, d) };
    match i % 2 {
        0 => (attention, &CROSSES, Storage::Pair, 0.1),
        _ => (attention, &SELVES, Storage::Fused, 0.0),
    }
}

/// In f32: by tiles up to heads of 128 numbers, a multiple of four, and otherwise one warp a row.
pub(crate) fn described_f32(checks: &mut Checks<'_>) -> Result<()> {
    let sizes: &[usize] = if checks.small { &[20, 64] } else { &[16, 26, 64, 96, 128, 250] };
    for &d in sizes {
        for (i, window) in windows().into_iter().enumerate() {
            let (attention, lengths, storage, p) = odd_case(i, window, d);
            case::<f32>(checks, &Case { lengths, attention, storage, p })?;
            // Without a bias everywhere: the gradient of its table is the plain kernels'.
            let attention =
                Attention { bias: Bias::None, key_heads: 3, scale: 0.3, ..Attention { heads: 3, ..attention } };
            let (lengths, storage) = match i % 4 {
                0 | 3 => (&SELVES[..], Storage::Fused),
                _ => (&CROSSES[..], Storage::Apart),
            };
            case::<f32>(checks, &Case { lengths, attention, storage, p: 0.1 - p })?;
        }
    }
    Ok(())
}

pub(crate) fn described(checks: &mut Checks<'_>) -> Result<()> {
    let (same, windows) = (|n: usize| (n, n), windows());
    let (selves, crosses) = (SELVES, CROSSES);
    let plain = |heads: usize, d: usize| Attention::new(heads, d);
    let sizes: &[usize] = if checks.small { &[64, 128] } else { &[16, 32, 40, 64, 80, 96, 128, 136, 192, 256] };
    for &d in sizes {
        for (i, window) in windows.into_iter().enumerate() {
            if checks.small && i % 3 == 2 {
                continue;
            }
            // Every form comes with every window, not with every size.
            let p = if i % 2 == 0 { 0.1 } else { 0.0 };
            let bias = [Bias::None, Bias::Relative(T5), Bias::Slopes, Bias::Relative(DECODER)][(i + d / 8) % 4];
            let storage = [Storage::Fused, Storage::Pair, Storage::Apart][(i + d / 16) % 3];
            let attention = Attention { window, bias, ..plain(2, d) };
            case::<bf16>(checks, &Case { lengths: &selves, attention, storage, p })?;
            let storage = if storage == Storage::Fused { Storage::Pair } else { storage };
            let attention = Attention { window, key_heads: 2, scale: 0.3, ..plain(6, d) };
            case::<bf16>(checks, &Case { lengths: &crosses, attention, storage, p })?;
            let attention = Attention { window, bias: Bias::Relative(T5), ..plain(2, d) };
            case::<bf16>(checks, &Case { lengths: &crosses, attention, storage, p: 0.1 - p })?;
        }
    }
    let sizes: &[usize] = if checks.small { &[] } else { &[26] };
    for &d in sizes {
        for (i, window) in windows.into_iter().enumerate() {
            let (attention, lengths, storage, p) = odd_case(i, window, d);
            case::<bf16>(checks, &Case { lengths, attention, storage, p })?;
        }
    }
    if !checks.small {
        let long = [same(1100), (40, 700), (900, 513)];
        for (window, bias) in [(Window::local(128), Bias::None), (Window::CAUSAL, Bias::Relative(T5))] {
            let attention = Attention { window, bias, ..plain(2, 64) };
            case::<bf16>(checks, &Case { lengths: &long, attention, storage: Storage::Pair, p: 0.1 })?;
        }
    }
    Ok(())
}

/// Long sequences without bias, for which Hopper has a backward of its own: several tiles of keys add to a query's gradient.
pub(crate) fn long(checks: &mut Checks<'_>) -> Result<()> {
    let same = |n: usize| (n, n);
    let selves = [same(300), same(1), same(129), same(64), same(200)];
    let crosses = [(1, 7), (33, 1), (7, 129), (129, 33), (5, 300), (260, 9), (190, 257)];
    let windows = [
        Window::FULL,
        Window::CAUSAL,
        Window::local(3),
        Window::local(64),
        Window { left: 17, right: 0 },
        Window::local(0),
    ];
    let sizes: &[usize] = if checks.small { &[64, 128] } else { &[40, 64, 104, 128] };
    for (j, &d) in sizes.iter().enumerate() {
        for (i, window) in windows.into_iter().enumerate() {
            if checks.small && (i + j) % 2 == 1 && i > 1 {
                continue;
            }
            let p = if (i / 2 + j) % 2 == 0 { 0.1 } else { 0.0 };
            let attention = Attention { window, ..Attention::new(2, d) };
            case::<bf16>(checks, &Case { lengths: &selves, attention, storage: Storage::Fused, p })?;
            let attention = Attention { window, key_heads: 1, scale: 0.3, ..Attention::new(2, d) };
            case::<bf16>(checks, &Case { lengths: &crosses, attention, storage: Storage::Pair, p: 0.1 - p })?;
        }
    }
    // More key heads than are claimed together.
    let attention = Attention { window: Window::CAUSAL, key_heads: 17, ..Attention::new(17, 64) };
    case::<bf16>(checks, &Case { lengths: &[same(200)], attention, storage: Storage::Fused, p: 0.0 })
}

fn case<E: Number>(checks: &mut Checks<'_>, case: &Case<'_>) -> Result<()> {
    let Case { lengths, attention, storage, p } = case;
    let gpu = checks.gpu;
    let queries = Side::new(gpu, lengths.iter().map(|l| l.0), 1)?;
    let keys = Side::new(gpu, lengths.iter().map(|l| l.1), 2)?;
    let (widths, (tq, tk)) = (attention.fused_widths(), (queries.tokens(), keys.tokens()));
    let [hq, hk, _] = widths;
    // Scores of some size, so that softmax is not flat.
    let stretch = 1.5f32.min(1.0 / (attention.scale * (attention.head_size as f32).sqrt()).max(0.4));
    let drawn =
        |seed: u64, n: usize| -> Vec<E> { numbers::<f32>(seed, n).iter().map(|x| E::from_f32(stretch * x)).collect() };
    let (q, k, v) = (drawn(1, tq * hq), drawn(2, tk * hk), drawn(3, tk * hk));
    let (dout, bias) = (numbers::<E>(4, tq * hq), numbers::<f32>(5, attention.bias_size()));
    let bias: Vec<f32> = match attention.bias {
        Bias::Slopes => bias.iter().map(|x| x.abs() * 0.1).collect(),
        _ => bias,
    };
    let wide = [exact(&q), exact(&k), exact(&v)];
    let expected = expected(case, [&queries, &keys], [&wide[0], &wide[1], &wide[2]], &bias, &exact(&dout));

    let rows = |which: usize| if which == 0 { tq } else { tk };
    let parts = [(&q[..], hq), (&k[..], hk), (&v[..], hk)];
    let sides = storage.widths(widths);
    let firsts: Vec<usize> = sides.iter().scan(0, |n, w| Some(std::mem::replace(n, *n + w.len()))).collect();
    let matrices: Vec<Buffer> = sides
        .iter()
        .zip(&firsts)
        .map(|(w, first)| checks.up(&join(rows(*first), &parts[*first..first + w.len()])))
        .collect::<Result<_>>()?;
    let (gdout, gbias, numbers_on_gpu) = (checks.up(&dout)?, checks.up(&bias)?, checks.up(&queries.numbers)?);
    let views: Vec<_> = matrices.iter().map(Buffer::view).collect();
    let [query, key, value] = storage.columns(widths, &views);
    let cross = Cross {
        keys: keys.sequences(),
        query_offsets: queries.offsets_on_gpu.view(),
        key_offsets: keys.offsets_on_gpu.view(),
        numbers: numbers_on_gpu.view(),
    };
    let inputs = Inputs {
        query,
        key,
        value,
        queries: queries.sequences(),
        cross: (*storage != Storage::Fused).then_some(cross),
        bias: (!bias.is_empty()).then(|| gbias.view()),
    };
    let step = checks.up(&[STEP])?;
    let dropout = Dropout::new(*p, SEED, Step::At(step.view()), SITE);
    let relative = matches!(attention.bias, Bias::Relative(_));
    let mut before = None;
    for _ in 0..2 {
        let gradients = sides.iter().zip(&firsts);
        let results = Results {
            out: checks.poisoned::<E>(tq * hq)?,
            log_sums: checks.poisoned::<f32>(attention.heads * tq)?,
            dbias: checks.out(&vec![0.5f32; bias.len()])?,
            gradients: gradients
                .map(|(w, first)| checks.poisoned::<E>(rows(*first) * w.iter().sum::<usize>()))
                .collect::<Result<_>>()?,
        };
        let (out, log_sums) = (results.out.view(), results.log_sums.view());
        kernels::forward(gpu, attention, &inputs, dropout, out, log_sums)?;
        let views: Vec<_> = results.gradients.iter().map(Out::view).collect();
        let [query, key, value] = storage.columns(widths, &views);
        let to = Gradients { query, key, value, bias: relative.then(|| Sum::add(results.dbias.view())) };
        kernels::backward(gpu, attention, &inputs, dropout, out, log_sums, gdout.view(), to)?;
        let mut all = vec![bits::<E>(gpu, &results.out)?, bits::<f32>(gpu, &results.log_sums)?];
        all.push(bits::<f32>(gpu, &results.dbias)?);
        for gradient in &results.gradients {
            all.push(bits::<E>(gpu, gradient)?);
        }
        match &before {
            None => compare::<E>(checks, case, &results, &expected)?,
            Some(before) => {
                checks.verify(|| case.named("another run gives other bits"), *before == all);
            }
        }
        before = Some(all);
    }
    maps::<E>(checks, case, inputs, [&queries, &keys], &expected.maps)
}

fn compare<E: Number>(checks: &mut Checks<'_>, case: &Case<'_>, results: &Results, expected: &Expected) -> Result<()> {
    let attention = &case.attention;
    checks.close::<E>(&case.named("attention"), &results.out, &expected.out)?;
    let got = checks.read::<f32>(&case.named("log-sums"), &results.log_sums)?;
    let off = got.iter().zip(&expected.log_sums).fold(0.0f64, |m, (g, e)| {
        let d = if e.is_infinite() { f64::from(u8::from(f64::from(*g) != *e)) } else { (f64::from(*g) - e).abs() };
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    checks.verify(|| format!("{}: off by {off:.1e}", case.named("log-sums")), off <= tolerance::<E>().max(1e-4));
    if matches!(attention.bias, Bias::Relative(_)) {
        // A sum over queries of numbers that nearly cancel: beside its own size, rounding of the output counts, whose product with its
        // gradient is subtracted from each.
        let largest = expected.dbias.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let got = checks.read::<f32>(&case.named("bias"), &results.dbias)?;
        let off = exact(&got).iter().zip(&expected.dbias).fold(0.0f64, |m, (g, e)| m.max((g - e).abs()));
        let bound = tolerance::<E>() * largest.max((expected.out.len() as f64 / attention.heads as f64).sqrt() / 4.0);
        let good = off <= bound && got.iter().all(|x| x.is_finite());
        checks.verify(|| format!("{} {:?}: off by {off:.1e}", case.named("bias' gradient"), E::DTYPE), good);
    }
    let mut which = 0;
    for (gradient, widths) in results.gradients.iter().zip(&case.storage.widths(attention.fused_widths())) {
        let got = exact(&checks.read::<E>(&case.named("gradients"), gradient)?);
        for i in 0..widths.len() {
            let (got, expected) = (part(&got, widths, i), &expected.gradients);
            let mut error = crate::check::error(&got, &expected[which]);
            if which < 2 && attention.window == Window::local(0) {
                // A query that sees one key alone has no gradient but what rounding leaves of the difference of two numbers of the size
                // of the values' gradient.
                let largest = |x: &[f64]| x.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
                error *= largest(&expected[which]) / largest(&expected[2]);
            }
            let worst = &mut checks.worst[usize::from(E::IS_BF16)];
            *worst = worst.max(error);
            let name = ["queries' gradient", "keys' gradient", "values' gradient"][which];
            let good = error <= tolerance::<E>();
            checks.verify(|| format!("{} {:?}: error {error:.2e}", case.named(name), E::DTYPE), good);
            which += 1;
        }
    }
    Ok(())
}

/// The probabilities for people, from tables without room to spare.
fn maps<E: Number>(
    checks: &mut Checks<'_>,
    case: &Case<'_>,
    inputs: Inputs<'_>,
    sides: [&Side; 2],
    expected: &[f64],
) -> Result<()> {
    let queries = Side::new(checks.gpu, case.lengths.iter().map(|l| l.0), 0)?;
    let out = checks.poisoned::<f32>(expected.len())?;
    let inputs = Inputs { queries: queries.sequences(), ..inputs };
    let offsets = (&sides[0].offsets[..], &sides[1].offsets[..]);
    kernels::probabilities(checks.gpu, &case.attention, &inputs, offsets, out.view())?;
    checks.within::<f32>(&format!("probabilities, {:?}", case.attention), &out, expected, 1e-4)
}

/// Times forward and backward on 16,384 tokens of 2,048 numbers; TFLOP/s by what queries see, four operations for each number of a pair
/// forward and ten backward.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    println!("attention by a description, bf16, 16,384 tokens: microseconds, TFLOP/s");
    for d in [64, 128] {
        for s in [128, 256, 512, 1024, 2048, 4096, 8192] {
            let forms = [
                ("full", Window::FULL, Bias::None, true),
                ("full, general", Window::FULL, Bias::None, false),
                ("causal", Window::CAUSAL, Bias::None, true),
                ("causal, general", Window::CAUSAL, Bias::None, false),
                ("window 64+64", Window::local(64), Bias::None, false),
                ("T5 bias", Window::FULL, Bias::Relative(T5), false),
            ];
            for (name, window, bias, own) in forms {
                for p in [0.0, 0.1] {
                    let attention = Attention { window, bias, ..Attention::new(2048 / d, d) };
                    let (forward, backward) = times(gpu, &attention, s, p, own)?;
                    let lengths: Vec<u32> = (0..=16_384 / s as u32).map(|i| i * s as u32).collect();
                    let flops = (4 * attention.pairs(&lengths, &lengths) * 2048) as f64;
                    println!(
                        "henson | {name} | {d} | {s} | {p} | {forward:.1} | {:.0} | {backward:.1} | {:.0}",
                        flops / forward * 1e-6,
                        2.5 * flops / backward * 1e-6
                    );
                }
            }
        }
    }
    Ok(())
}

/// Times the backward beside that by attention_general.cu, as [`bench`] does; TFLOP/s.
pub(crate) fn backward_bench(gpu: &Gpu) -> Result<()> {
    println!(
        "the backward of attention without bias, bf16, 16,384 tokens: microseconds, TFLOP/s; then those of the general kernels"
    );
    for d in [64, 128] {
        for s in [256, 512, 1024, 2048, 4096, 8192] {
            let forms = [("full", Window::FULL), ("causal", Window::CAUSAL), ("window 64+64", Window::local(64))];
            for (name, window) in forms {
                for p in [0.0, 0.1] {
                    let attention = Attention { window, ..Attention::new(2048 / d, d) };
                    let batch = Batch::new(gpu, &attention, s, p)?;
                    let inputs = batch.inputs(&attention, None);
                    let (dropout, out, log_sums) = (batch.dropout, batch.out.view(), batch.log_sums.view());
                    kernels::forward(gpu, &attention, &inputs, dropout, out, log_sums)?;
                    let time = |f: Backward| {
                        let to = batch.gradients(&attention, None);
                        time(gpu, || f(gpu, &attention, &inputs, dropout, out, log_sums, batch.dout.view(), to))
                    };
                    let (one, two) = (time(kernels::backward)?, time(kernels::backward_twice)?);
                    let lengths: Vec<u32> = (0..=16_384 / s as u32).map(|i| i * s as u32).collect();
                    let flops = (10 * attention.pairs(&lengths, &lengths) * 2048) as f64 * 1e-6;
                    println!(
                        "{name} | {d} | {s} | {p} | {one:.1} | {:.0} | {two:.1} | {:.0}",
                        flops / one,
                        flops / two
                    );
                }
            }
        }
    }
    Ok(())
}

/// [`kernels::backward`] or one like it.
type Backward =
    fn(&Gpu, &Attention, &Inputs<'_>, Option<Dropout<'_>>, View<'_>, View<'_>, View<'_>, Gradients<'_>) -> Result<()>;

/// What a benchmark's 16,384 tokens need.
struct Batch {
    side: Side,
    qkv: Buffer,
    dout: Buffer,
    out: Buffer,
    log_sums: Buffer,
    dqkv: Buffer,
    dropout: Option<Dropout<'static>>,
}

impl Batch {
    fn new(gpu: &Gpu, attention: &Attention, s: usize, p: f32) -> Result<Self> {
        let (tokens, heads) = (16_384, attention.heads);
        let h = heads * attention.head_size;
        Ok(Self {
            side: Side::new(gpu, (0..tokens / s).map(|_| s), 0)?,
            qkv: filled(gpu, 1, tokens * 3 * h, DType::Bf16, 1.0)?,
            dout: filled(gpu, 2, tokens * h, DType::Bf16, 1.0)?,
            out: gpu.empty(tokens * h, DType::Bf16)?,
            log_sums: gpu.empty(heads * tokens, DType::F32)?,
            dqkv: gpu.empty(tokens * 3 * h, DType::Bf16)?,
            dropout: Dropout::new(p, SEED, Step::Value(STEP), SITE),
        })
    }

    fn inputs<'a>(&'a self, attention: &Attention, bias: Option<View<'a>>) -> Inputs<'a> {
        let [query, key, value] = Columns::split(self.qkv.view(), attention.fused_widths());
        Inputs { query, key, value, queries: self.side.sequences(), cross: None, bias }
    }

    fn gradients<'a>(&'a self, attention: &Attention, bias: Option<Sum<'a>>) -> Gradients<'a> {
        let [query, key, value] = Columns::split(self.dqkv.view(), attention.fused_widths());
        Gradients { query, key, value, bias }
    }
}

/// Microseconds of forward and backward: the kernels that fused self-attention has for itself, or the general ones.
fn times(gpu: &Gpu, attention: &Attention, s: usize, p: f32, own: bool) -> Result<(f64, f64)> {
    let (heads, d) = (attention.heads, attention.head_size);
    let batch = Batch::new(gpu, attention, s, p)?;
    let Batch { side, qkv, dout, dqkv, dropout, .. } = &batch;
    let dropout = *dropout;
    let table = gpu.zeros(attention.bias_size().max(1), DType::F32)?;
    let dtable = gpu.zeros(attention.bias_size().max(1), DType::F32)?;
    let (o, l) = (batch.out.view(), batch.log_sums.view());
    if own {
        let causal = attention.window == Window::CAUSAL;
        let Sequences { table, room, tokens } = side.sequences();
        let shape = fused::Attention { table, room, tokens, heads, head_size: d, causal };
        let forward = || fused::forward(gpu, qkv.view(), shape, dropout, o, l);
        let backward = || fused::backward(gpu, qkv.view(), shape, dropout, o, l, dout.view(), dqkv.view());
        return Ok((time(gpu, forward)?, time(gpu, backward)?));
    }
    let bias = matches!(attention.bias, Bias::Relative(_));
    let inputs = batch.inputs(attention, bias.then(|| table.view()));
    let to = batch.gradients(attention, bias.then(|| Sum { to: dtable.view(), add: false }));
    let forward = || kernels::forward(gpu, attention, &inputs, dropout, o, l);
    let backward = || kernels::backward(gpu, attention, &inputs, dropout, o, l, dout.view(), to);
    Ok((time(gpu, forward)?, time(gpu, backward)?))
}

/// Pages of a cache, and queries of its sequences.
pub(crate) fn cache(checks: &mut Checks<'_>) -> Result<()> {
    let windows = [Window::CAUSAL, Window::FULL, Window::local(5), Window { left: 40, right: 0 }];
    // (new tokens, tokens before them): some begin with an empty cache.
    let few = [(1, 0), (1, 33), (3, 7), (16, 129), (1, 500), (5, 0)];
    let many = [(1, 0), (40, 0), (1, 260), (130, 7), (17, 40), (16, 3)];
    let sizes: &[usize] = if checks.small { &[64] } else { &[16, 40, 64, 128, 256] };
    for (i, window) in windows.into_iter().enumerate() {
        for &d in sizes {
            for lengths in [&few, &many] {
                for page_size in [1, 7, 16] {
                    let bias = [Bias::None, Bias::Relative(T5), Bias::Slopes][(i + d / 8) % 3];
                    let attention = Attention { window, bias, key_heads: 2, ..Attention::new(4, d) };
                    pages::<f32>(checks, attention, lengths, page_size)?;
                    pages::<bf16>(checks, attention, lengths, page_size)?;
                }
            }
        }
        let attention = Attention { window, ..Attention::new(3, 26) };
        pages::<f32>(checks, attention, &many, 5)?;
        pages::<bf16>(checks, attention, &many, 5)?;
    }
    Ok(())
}

fn pages<E: Number>(
    checks: &mut Checks<'_>,
    attention: Attention,
    lengths: &[(usize, usize)],
    page_size: usize,
) -> Result<()> {
    let what = format!("cache, pages of {page_size}, {attention:?}, {:?}", lengths[0]);
    let gpu = checks.gpu;
    let all: Vec<(usize, usize)> = lengths.iter().map(|(new, before)| (*new, new + before)).collect();
    let (queries, keys) = (Side::new(gpu, all.iter().map(|l| l.0), 1)?, Side::new(gpu, all.iter().map(|l| l.1), 0)?);
    let (tq, tk) = (queries.tokens(), keys.tokens());
    let [hq, hk, _] = attention.fused_widths();
    let (q, k, v) = (numbers::<E>(1, tq * hq), numbers::<E>(2, tk * hk), numbers::<E>(3, tk * hk));
    let bias: Vec<f32> = numbers::<f32>(5, attention.bias_size()).iter().map(|x| x.abs() * 0.1).collect();
    let case = Case { lengths: &all, attention, storage: Storage::Apart, p: 0.0 };
    let wide = [exact(&q), exact(&k), exact(&v)];
    let dout = vec![0.0; tq * hq];
    let expected = expected(&case, [&queries, &keys], [&wide[0], &wide[1], &wide[2]], &bias, &dout);

    // Pages in an order of their own; a few belong to nobody.
    let counts: Vec<usize> = all.iter().map(|(_, m)| m.div_ceil(page_size)).collect();
    let total = counts.iter().sum::<usize>() + 3;
    let list: Vec<u32> = (0..total - 3).map(|i| ((i * 7 + 2) % total) as u32).collect();
    // Multiples of 7 are all different where 7 does not divide their number.
    let list = if total.is_multiple_of(7) { (0..total as u32 - 3).rev().collect() } else { list };
    let mut page_offsets = vec![0u32];
    counts.iter().for_each(|n| page_offsets.push(page_offsets[page_offsets.len() - 1] + *n as u32));
    let row = |sequence: usize, token: usize| {
        list[page_offsets[sequence] as usize + token / page_size] as usize * page_size + token % page_size
    };
    // Earlier tokens are there; what else the cache holds must not matter.
    let mut caches = [vec![E::nan(); total * page_size * hk], vec![E::nan(); total * page_size * hk]];
    for (i, (new, m)) in all.iter().enumerate() {
        for token in 0..m - new {
            let from = (keys.offsets[i] as usize + token) * hk;
            caches[0][row(i, token) * hk..][..hk].copy_from_slice(&k[from..from + hk]);
            caches[1][row(i, token) * hk..][..hk].copy_from_slice(&v[from..from + hk]);
        }
    }
    let [cached_keys, cached_values] = caches.map(|cache| checks.out(&cache));
    let (cached_keys, cached_values) = (cached_keys?, cached_values?);
    let new_rows = |x: &[E]| -> Vec<E> {
        let of = |(i, (new, m)): (usize, &(usize, usize))| {
            let end = (keys.offsets[i] as usize + m) * hk;
            x[end - new * hk..end].to_vec()
        };
        all.iter().enumerate().flat_map(of).collect()
    };
    let fused = checks.up(&join(tq, &[(&q, hq), (&new_rows(&k), hk), (&new_rows(&v), hk)]))?;
    let lengths: Vec<u32> = all.iter().map(|l| l.1 as u32).collect();
    let (glist, goffsets, glengths) = (checks.up(&list)?, checks.up(&page_offsets)?, checks.up(&lengths)?);
    let gbias = checks.up(&bias)?;
    let pages = Pages { page_size, pages: glist.view(), page_offsets: goffsets.view(), lengths: glengths.view() };
    let out = checks.poisoned::<E>(tq * hq)?;
    let (offsets, cache) = (queries.offsets_on_gpu.view(), [cached_keys.view(), cached_values.view()]);
    caches::append(gpu, pages, fused.view(), hq, offsets, cache, hk)?;
    let [query, _] = Columns::split(fused.view(), [hq, 2 * hk]);
    let most = all.iter().map(|l| l.0).max().unwrap_or(0);
    let bias = (!bias.is_empty()).then(|| gbias.view());
    caches::attend(gpu, &attention, query, queries.sequences(), (offsets, most), bias, cache, pages, out.view())?;
    checks.close::<E>(&what, &out, &expected.out)?;
    let stored = checks.read::<E>(&what, &cached_values)?;
    let good = all.iter().enumerate().all(|(i, (_, m))| {
        (0..*m).all(|token| {
            let from = (keys.offsets[i] as usize + token) * hk;
            stored[row(i, token) * hk..][..hk] == v[from..from + hk]
        })
    });
    checks.verify(|| format!("{what}: values are not where they belong"), good);
    Ok(())
}
