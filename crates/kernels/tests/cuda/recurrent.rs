//! Recurrent layers, one direction and both, forward and backward.

use half::bf16;
use henson_kernels::cpu::recurrent::{Cell, Scan, longest_first, reference};
use henson_kernels::cuda::recurrent::{Gradients, Layer, Sequences, State, Steps, Work, backward, forward};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::{Buffer, DType, Gpu, Result};

use crate::attention::time;
use crate::check::{Checks, Number, Out, bits, exact, filled, numbers, tolerance};

/// What is asked of a layer.
#[derive(Clone, Copy, Debug)]
struct Case {
    scan: Scan,
    reverse: &'static [bool],
    /// Whether states come in, and gradients of the last ones.
    states: bool,
    bias: bool,
    /// Tokens that fill the batch up, and steps that it does not need.
    filling: bool,
}

pub(crate) fn recurrent(checks: &mut Checks<'_>) -> Result<()> {
    for c in [7, 33] {
        let lstm = Scan::new(Cell::Lstm, c);
        let projected = Scan { projection: Some(c.div_ceil(2)), ..lstm };
        // Bounds that some numbers reach and others do not.
        let clipped = Scan { clip_cell: 0.4, clip_projection: 0.2, ..projected };
        for scan in
            [lstm, Scan::new(Cell::Gru, c), Scan::new(Cell::Tanh, c), Scan::new(Cell::Relu, c), projected, clipped]
        {
            let case = Case { scan, reverse: &[false, true], states: true, bias: true, filling: true };
            both(checks, case, &[3, 1, 9, 4, 9])?;
            both(checks, Case { reverse: &[false], states: false, ..case }, &[2, 12, 1])?;
            both(checks, Case { reverse: &[true], filling: false, ..case }, &[5])?;
            both(checks, Case { states: false, bias: false, ..case }, &[1, 1])?;
        }
    }
    // So many sequences that later steps have fewer rows.
    let many: Vec<usize> = (0..70).map(|i| 1 + i * i % 23).collect();
    for cell in [Cell::Lstm, Cell::Gru] {
        let case = Case { scan: Scan::new(cell, 16), reverse: &[false, true], states: true, bias: true, filling: true };
        both(checks, case, &many)?;
        both(checks, Case { filling: false, ..case }, &many)?;
    }
    let one = Case { scan: Scan::new(Cell::Gru, 1), reverse: &[false], states: false, bias: true, filling: false };
    both(checks, one, &[1])?;
    let lstm = Scan::new(Cell::Lstm, if checks.small { 129 } else { 512 });
    both(checks, Case { scan: lstm, reverse: &[false, true], ..one }, &[5, 7])
}

fn both(checks: &mut Checks<'_>, case: Case, lengths: &[usize]) -> Result<()> {
    check::<f32>(checks, case, lengths)?;
    check::<bf16>(checks, case, lengths)
}

/// Random inputs of a layer.
struct Data<E> {
    offsets: Vec<u32>,
    order: Vec<u32>,
    steps: Steps,
    /// T×D·G·C.
    said: Vec<E>,
    recurrent: Vec<E>,
    bias: Vec<f32>,
    projection: Vec<E>,
    /// D·B×P and D·B×C.
    first: [Vec<E>; 2],
    dout: Vec<E>,
    dlast: [Vec<E>; 2],
    /// T.
    tokens: usize,
}

impl<E: Number> Data<E> {
    fn new(case: Case, lengths: &[usize]) -> Self {
        let (d, b, scan) = (case.reverse.len(), lengths.len(), case.scan);
        let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
        let mut order = vec![0; b];
        longest_first(&offsets, &mut order);
        let needed = Steps::of(&offsets, &order);
        let tokens = offsets[b] as usize + if case.filling { 11 } else { 0 };
        let small = |seed: u64, n: usize, by: usize| -> Vec<E> {
            numbers::<f32>(seed, n).iter().map(|x| E::from_f32(x / (by as f32).sqrt())).collect()
        };
        let cells = if scan.cell == Cell::Lstm { d * b * c } else { 0 };
        let state = |seed: u64| [numbers::<E>(seed, d * b * p), numbers::<E>(seed + 1, cells)];
        Self {
            // What fills a batch up is computed with like the rest, and must not be seen.
            said: numbers(1, tokens * d * width),
            recurrent: small(2, d * width * p, p),
            bias: numbers(3, d * width),
            projection: if scan.projection.is_some() { small(4, d * p * c, c) } else { vec![] },
            first: state(5),
            dout: numbers(7, tokens * d * p),
            dlast: state(8),
            steps: if case.filling { Steps::none(b).grown_for(needed) } else { needed },
            offsets,
            order,
            tokens,
        }
    }
}

/// What a layer shall give, in the shapes that it gives it in.
#[derive(Default)]
struct Expected {
    out: Vec<f64>,
    last: [Vec<f64>; 2],
    dsaid: Vec<f64>,
    drecurrent: Vec<f64>,
    dbias: Vec<f64>,
    dprojection: Vec<f64>,
    dfirst: [Vec<f64>; 2],
}

/// Each direction and sequence by itself.
fn expected<E: Number>(case: Case, data: &Data<E>) -> Expected {
    let (d, b, t, scan) = (case.reverse.len(), data.order.len(), data.tokens, case.scan);
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let cells = if scan.cell == Cell::Lstm { c } else { 0 };
    let mut all = Expected {
        out: vec![0.0; t * d * p],
        dsaid: vec![0.0; t * d * width],
        drecurrent: vec![1.0; d * width * p],
        dbias: vec![1.0; d * width],
        dprojection: vec![0.0; data.projection.len()],
        ..Expected::default()
    };
    let (said, dout) = (exact(&data.said), exact(&data.dout));
    for (direction, reverse) in case.reverse.iter().enumerate() {
        let scan = Scan { reverse: *reverse, ..scan };
        let part = |x: &[E], n: usize| exact(&x[direction * n..(direction + 1) * n]);
        let recurrent = part(&data.recurrent, width * p);
        let bias = match case.bias {
            true => exact(&data.bias[direction * width..(direction + 1) * width]),
            false => vec![0.0; width],
        };
        let projection = scan.projection.map(|p| part(&data.projection, p * c));
        for (i, ends) in data.offsets.windows(2).enumerate() {
            let mut tokens: Vec<usize> = (ends[0] as usize..ends[1] as usize).collect();
            if *reverse {
                tokens.reverse();
            }
            // The rows of a token that are this direction's.
            let rows = |x: &[f64], n: usize| -> Vec<f64> {
                tokens.iter().flat_map(|token| &x[(token * d + direction) * n..][..n]).copied().collect()
            };
            let state = |both: &[Vec<E>; 2]| -> [Vec<f64>; 2] {
                let row = direction * b + i;
                match case.states {
                    true => {
                        let cell = exact(&both[1]).get(row * c..(row + 1) * c).map_or(vec![0.0; c], <[f64]>::to_vec);
                        [exact(&both[0][row * p..(row + 1) * p]), cell]
                    }
                    false => [vec![0.0; p], vec![0.0; c]],
                }
            };
            let (first, dlast, said) = (state(&data.first), state(&data.dlast), rows(&said, width));
            let inputs = reference::Inputs {
                said: &said,
                recurrent: &recurrent,
                bias: &bias,
                projection: projection.as_deref(),
                initial: [&first[0], &first[1]],
            };
            let output = reference::forward(&scan, &inputs);
            let gradients = reference::backward(&scan, &inputs, &output, &rows(&dout, p), [&dlast[0], &dlast[1]]);
            let back = |to: &mut [f64], from: &[f64], n: usize| {
                for (token, row) in tokens.iter().zip(from.chunks(n)) {
                    to[(token * d + direction) * n..][..n].copy_from_slice(row);
                }
            };
            back(&mut all.out, &output.states, p);
            back(&mut all.dsaid, &gradients.said, width);
            all.last[0].extend(&output.states[output.states.len() - p..]);
            all.last[1].extend(output.cells.get(output.cells.len().saturating_sub(c)..).unwrap_or_default());
            all.dfirst[0].extend(&gradients.initial[0]);
            all.dfirst[1].extend(&gradients.initial[1][..cells]);
            let sums = [
                (&mut all.drecurrent, &gradients.recurrent),
                (&mut all.dbias, &gradients.bias),
                (&mut all.dprojection, &gradients.projection),
            ];
            for (sum, gradient) in sums {
                let to = &mut sum[direction * gradient.len()..];
                to.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
            }
        }
    }
    all
}

fn check<E: Number>(checks: &mut Checks<'_>, case: Case, lengths: &[usize]) -> Result<()> {
    let (data, scan) = (Data::<E>::new(case, lengths), case.scan);
    let expected = expected(case, &data);
    let name = |what: &str| format!("{what} of {case:?} over {} sequences", lengths.len());
    let first = run(checks, case, &data)?;
    let again = run(checks, case, &data)?;
    for (one, two) in first.wide.iter().zip(&again.wide) {
        let same = bits::<f32>(checks.gpu, one)? == bits::<f32>(checks.gpu, two)?;
        checks.verify(|| name("two runs differ: gradients"), same);
    }
    checks.close::<E>(&name("states"), &first.out, &expected.out)?;
    checks.close::<E>(&name("states without a backward"), &first.alone, &expected.out)?;
    checks.close::<E>(&name("last states"), &first.last[0], &expected.last[0])?;
    checks.close::<E>(&name("last cells"), &first.last[1], &expected.last[1])?;
    if E::IS_BF16 && scan.clip_cell.is_finite() {
        // A number next to its bound may be rounded onto it, and has no gradient then.
        return Ok(());
    }
    checks.close::<E>(&name("said"), &first.gates, &expected.dsaid)?;
    if case.states {
        checks.close::<E>(&name("first states"), &first.dfirst[0], &expected.dfirst[0])?;
        checks.close::<E>(&name("first cells"), &first.dfirst[1], &expected.dfirst[1])?;
    }
    // Sums in f32 over what was stored in E.
    let [recurrent, bias, projection] = &first.wide;
    checks.within::<f32>(&name("recurrent"), recurrent, &expected.drecurrent, tolerance::<E>())?;
    if case.bias {
        checks.within::<f32>(&name("bias"), bias, &expected.dbias, tolerance::<E>())?;
    }
    checks.within::<f32>(&name("projection"), projection, &expected.dprojection, tolerance::<E>())
}

/// What a layer gave.
struct Results {
    out: Out,
    /// The same without memory for a backward.
    alone: Out,
    last: [Out; 2],
    /// Of what tokens said.
    gates: Out,
    dfirst: [Out; 2],
    /// Of recurrent weights, biases and projections.
    wide: [Out; 3],
}

fn run<E: Number>(checks: &Checks<'_>, case: Case, data: &Data<E>) -> Result<Results> {
    let (d, b, t, scan) = (case.reverse.len(), data.order.len(), data.tokens, case.scan);
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let cells = if scan.cell == Cell::Lstm { d * b * c } else { 0 };
    let (offsets, order) = (checks.up(&data.offsets)?, checks.up(&data.order)?);
    let (recurrent, bias, projection) =
        (checks.up(&data.recurrent)?, checks.up(&data.bias)?, checks.up(&data.projection)?);
    let up = |[hidden, cell]: &[Vec<E>; 2]| -> Result<[Buffer; 2]> { Ok([checks.up(hidden)?, checks.up(cell)?]) };
    let (initial, dlast) = (up(&data.first)?, up(&data.dlast)?);
    fn state<'a>([hidden, cell]: &'a [Buffer; 2], cells: usize) -> State<'a> {
        State { hidden: hidden.view(), cell: (cells > 0).then(|| cell.view()) }
    }
    fn target<'a>([hidden, cell]: &'a [Out; 2], cells: usize) -> State<'a> {
        State { hidden: hidden.view(), cell: (cells > 0).then(|| cell.view()) }
    }
    let layer = Layer {
        scan,
        reverse: case.reverse,
        sequences: Sequences { offsets: offsets.view(), order: order.view(), steps: data.steps, tokens: t },
        recurrent: recurrent.view(),
        bias: case.bias.then(|| bias.view()),
        projection: scan.projection.map(|_| projection.view()),
        initial: case.states.then(|| state(&initial, cells)),
    };
    let states = || -> Result<[Out; 2]> { Ok([checks.poisoned::<E>(d * b * p)?, checks.poisoned::<E>(cells)?]) };
    let results = Results {
        out: checks.poisoned::<E>(t * d * p)?,
        alone: checks.poisoned::<E>(t * d * p)?,
        last: states()?,
        gates: checks.out(&data.said)?,
        dfirst: states()?,
        // Half of the gradients are added to 1.
        wide: [
            checks.out(&vec![1.0f32; d * width * p])?,
            checks.out(&vec![1.0f32; d * width])?,
            checks.poisoned::<f32>(data.projection.len())?,
        ],
    };
    let aside = checks.poisoned::<E>(d * t * scan.aside())?;
    let Results { out, alone, last, gates, dfirst, wide } = &results;
    forward(checks.gpu, &layer, gates.view(), Some(aside.view()), out.view(), Some(target(last, cells)))?;
    let said = checks.out(&data.said)?;
    forward(checks.gpu, &layer, said.view(), None, alone.view(), None)?;
    let (before, dsums) = (checks.poisoned::<E>(t * d * p)?, checks.poisoned::<E>(t * d * width)?);
    let projected = [checks.poisoned::<E>(t * d * c)?, checks.poisoned::<E>(t * d * p)?];
    let work = Work {
        before: before.view(),
        projected: scan.projection.map(|_| projected.each_ref().map(Out::view)),
        dsums: (scan.cell == Cell::Gru).then(|| dsums.view()),
    };
    let gradients = Gradients {
        recurrent: Sum { to: wide[0].view(), add: true },
        bias: case.bias.then(|| Sum { to: wide[1].view(), add: true }),
        projection: scan.projection.map(|_| Sum { to: wide[2].view(), add: false }),
        initial: case.states.then(|| target(dfirst, cells)),
    };
    let (dout, dlast) = (checks.up(&data.dout)?, case.states.then(|| state(&dlast, cells)));
    backward(checks.gpu, &layer, gates.view(), Some(aside.view()), out.view(), dout.view(), dlast, work, gradients)?;
    Ok(results)
}

/// What the steps of a layer take as a recorded graph, without the products over all tokens around them.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    println!("recurrent layers in both directions, 32 sequences: microseconds forward, backward");
    // Of natural lengths, and of equal ones.
    let natural: Vec<usize> = (0..32).map(|i| 4 + i * i * 7 % 53).collect();
    for (cell, c) in [(Cell::Lstm, 128), (Cell::Lstm, 512), (Cell::Gru, 512), (Cell::Lstm, 1024)] {
        for (name, lengths) in [("natural", &natural), ("equal", &vec![35; 32])] {
            for dtype in [DType::F32, DType::Bf16] {
                let [forward, backward] = times(gpu, Scan::new(cell, c), lengths, dtype)?;
                println!("henson | {cell:?} of {c} | {name} lengths, {dtype:?} | {forward:.1} | {backward:.1}");
            }
        }
    }
    Ok(())
}

fn times(gpu: &Gpu, scan: Scan, lengths: &[usize], dtype: DType) -> Result<[f64; 2]> {
    let (d, b, c, width) = (2, lengths.len(), scan.hidden, scan.gates());
    let mut offsets = vec![0];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
    let (t, mut order) = (offsets[b] as usize, vec![0; b]);
    longest_first(&offsets, &mut order);
    let steps = Steps::of(&offsets, &order);
    let (offsets, order) = (gpu.upload(&offsets)?, gpu.upload(&order)?);
    let recurrent = filled(gpu, 1, d * width * c, dtype, 1.0 / (c as f32).sqrt())?;
    let (gates, dout) = (filled(gpu, 2, t * d * width, dtype, 1.0)?, filled(gpu, 3, t * d * c, dtype, 1.0)?);
    let [aside, out, before] = [0, 1, 2].map(|_| gpu.empty(t * d * c, dtype));
    let (aside, out, before) = (aside?, out?, before?);
    let (dsums, dweight) = (gpu.empty(t * d * width, dtype)?, gpu.empty(d * width * c, DType::F32)?);
    let layer = Layer {
        scan,
        reverse: &[false, true],
        sequences: Sequences { offsets: offsets.view(), order: order.view(), steps, tokens: t },
        recurrent: recurrent.view(),
        bias: None,
        projection: None,
        initial: None,
    };
    let work = Work { before: before.view(), projected: None, dsums: (scan.cell == Cell::Gru).then(|| dsums.view()) };
    let gradients =
        Gradients { recurrent: Sum { to: dweight.view(), add: false }, bias: None, projection: None, initial: None };
    let (kept, out, dout) = (Some(aside.view()), out.view(), dout.view());
    let recorded = |work: &dyn Fn() -> Result<()>| -> Result<f64> {
        work()?;
        let graph = gpu.capture(work)?;
        time(gpu, || gpu.play(&graph))
    };
    Ok([
        recorded(&|| forward(gpu, &layer, gates.view(), kept, out, None))?,
        recorded(&|| backward(gpu, &layer, gates.view(), kept, out, dout, None, work, gradients))?,
    ])
}
