//! Recurrent layers: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::recurrent::{
    Cell, Columns, Gradients, Kept, Scan, Sequences, State, StateMut, Weights, backward, forward, longest_first,
    reference,
};
use henson_kernels::cpu::{Cpu, Element, Isa};

/// All kinds of layers, of `c` units.
fn scans(c: usize) -> Vec<Scan> {
    let p = Some(c.div_ceil(2));
    let mut all: Vec<Scan> =
        [Cell::Lstm, Cell::Gru, Cell::Tanh, Cell::Relu].into_iter().map(|cell| Scan::new(cell, c)).collect();
    all.push(Scan { reverse: true, ..all[0] });
    all.push(Scan { reverse: true, ..all[1] });
    all.push(Scan { projection: p, ..all[0] });
    // Bounds that some numbers reach and others do not.
    all.push(Scan { projection: p, reverse: true, clip_cell: 0.4, clip_projection: 0.2, ..all[0] });
    all
}

fn with_cells(scan: &Scan, n: usize) -> usize {
    if scan.cell == Cell::Lstm { n } else { 0 }
}

#[test]
fn reference_has_the_right_gradients() {
    for scan in scans(4) {
        let (s, c, p, width) = (5, scan.hidden, scan.width(), scan.gates());
        let sizes = [s * width, width * p, width, if scan.projection.is_some() { p * c } else { 0 }, p, c];
        let inputs: Vec<Vec<f64>> = (1..).zip(sizes).map(|(seed, n)| exact(&numbers::<f32>(seed, n))).collect();
        let (w, last) = (exact(&numbers::<f32>(9, s * p)), exact(&numbers::<f32>(10, p + c)));
        let of = |x: &[Vec<f64>]| reference::forward(&scan, &inputs_of(&scan, x));
        let dlast = [&last[..p], if scan.cell == Cell::Lstm { &last[p..] } else { &[0.0; 4] }];
        let d = reference::backward(&scan, &inputs_of(&scan, &inputs), &of(&inputs), &w, dlast);
        let [hidden, mut cell] = d.initial;
        if scan.cell != Cell::Lstm {
            cell.fill(0.0);
        }
        let gradients = [d.said, d.recurrent, d.bias, d.projection, hidden, cell];
        check_gradients(&format!("{scan:?}"), &inputs, &gradients, |x| {
            let output = of(x);
            let of_cells = output.cells.get((s - 1) * c..).map_or(0.0, |cells| weighted(cells, dlast[1]));
            weighted(&output.states, &w) + weighted(&output.states[(s - 1) * p..], dlast[0]) + of_cells
        });
    }
}

fn inputs_of<'a>(scan: &Scan, x: &'a [Vec<f64>]) -> reference::Inputs<'a> {
    reference::Inputs {
        said: &x[0],
        recurrent: &x[1],
        bias: &x[2],
        projection: scan.projection.map(|_| &x[3][..]),
        initial: [&x[4], &x[5]],
    }
}

/// Random inputs of a scan over several sequences.
struct Data<E> {
    offsets: Vec<u32>,
    order: Vec<u32>,
    said: Vec<E>,
    recurrent: Vec<E>,
    bias: Vec<f32>,
    projection: Option<Vec<E>>,
    first: Option<(Vec<E>, Vec<E>)>,
    dout: Vec<E>,
    dlast: Option<(Vec<E>, Vec<E>)>,
}

/// What a scan gave, forward and backward.
#[derive(Debug, PartialEq)]
struct Results<E> {
    out: Vec<E>,
    last: (Vec<E>, Vec<E>),
    dsaid: Vec<E>,
    drecurrent: Vec<f32>,
    dbias: Vec<f32>,
    dprojection: Vec<f32>,
    dfirst: (Vec<E>, Vec<E>),
}

impl<E: Element> Data<E> {
    fn new(scan: &Scan, lengths: &[usize], states: bool) -> Self {
        let (b, c, p, width) = (lengths.len(), scan.hidden, scan.width(), scan.gates());
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
        let t = offsets[b] as usize;
        let mut order = vec![0; b];
        longest_first(&offsets, &mut order);
        // As large as PyTorch's first weights, or a little more.
        let small = |seed: u64, n: usize, by: usize| -> Vec<E> {
            let all = numbers::<f32>(seed, n);
            all.iter().map(|x| E::from_f32(x / (by as f32).sqrt())).collect()
        };
        let state =
            |seed: u64| states.then(|| (numbers::<E>(seed, b * p), numbers::<E>(seed + 1, with_cells(scan, b * c))));
        Self {
            said: numbers(1, t * width),
            recurrent: small(2, width * p, p),
            bias: numbers(3, width),
            projection: scan.projection.map(|p| small(4, p * c, c)),
            first: state(5),
            dout: numbers(7, t * p),
            dlast: state(8),
            offsets,
            order,
        }
    }

    fn tokens(&self) -> usize {
        self.offsets[self.order.len()] as usize
    }

    /// Runs the kernels. What tokens say and the states stand among other columns, which must stay as they are.
    fn run(&self, cpu: &Cpu, scan: &Scan) -> Results<E> {
        let (t, b, c, p, width) = (self.tokens(), self.order.len(), scan.hidden, scan.width(), scan.gates());
        let sequences = Sequences { offsets: &self.offsets, order: &self.order };
        let weights =
            Weights { recurrent: &self.recurrent, bias: Some(&self.bias), projection: self.projection.as_deref() };
        fn state<E>(pair: &Option<(Vec<E>, Vec<E>)>) -> Option<State<'_, E>> {
            pair.as_ref().map(|(hidden, cell)| State { hidden, cell })
        }
        let columns = Columns { at: 3, stride: width + 5 };
        let out_columns = Columns { at: 1, stride: p + 4 };
        let mut gates = spread(&self.said, width, columns);
        let (mut aside, mut out) = (poisoned::<E>(t * scan.aside()), spread(&poisoned::<E>(t * p), p, out_columns));
        let mut last = (poisoned::<E>(b * p), poisoned::<E>(with_cells(scan, b * c)));
        let to = StateMut { hidden: &mut last.0, cell: &mut last.1 };
        let kept = Kept { gates: &mut gates, columns, aside: &mut aside };
        forward(cpu, scan, sequences, weights, state(&self.first), kept, (&mut out, out_columns), Some(to));
        // Without memory for a backward, the same.
        let (mut others, mut same) =
            (spread(&self.said, width, columns), spread(&poisoned::<E>(t * p), p, out_columns));
        let kept = Kept { gates: &mut others, columns, aside: &mut [] };
        forward(cpu, scan, sequences, weights, state(&self.first), kept, (&mut same, out_columns), None);
        assert_eq!(exact(&gather(&out, t, p, out_columns)), exact(&gather(&same, t, p, out_columns)));

        // Half of the gradients are added to 1.
        let mut results = Results {
            out: gather(&out, t, p, out_columns),
            last,
            dsaid: Vec::new(),
            drecurrent: vec![1.0; width * p],
            dbias: vec![1.0; width],
            dprojection: poisoned(self.projection.as_ref().map_or(0, Vec::len)),
            dfirst: (poisoned(b * p), poisoned(with_cells(scan, b * c))),
        };
        let gradients = Gradients {
            recurrent: (&mut results.drecurrent, true),
            bias: Some(&mut results.dbias),
            projection: self.projection.as_ref().map(|_| (&mut results.dprojection[..], false)),
            initial: Some(StateMut { hidden: &mut results.dfirst.0, cell: &mut results.dfirst.1 }),
        };
        let kept = Kept { gates: &mut gates, columns, aside: &mut aside };
        let (dout, dlast) = (spread(&self.dout, p, out_columns), state(&self.dlast));
        let (out, dout) = ((&out[..], out_columns), (&dout[..], out_columns));
        backward(cpu, scan, sequences, weights, state(&self.first), kept, out, dout, dlast, gradients);
        results.dsaid = gather(&gates, t, width, columns);
        for (i, x) in gates.iter().enumerate() {
            let own = (columns.at..columns.at + width).contains(&(i % columns.stride));
            assert!(own || x.to_f32() == 77.0, "column {} was written to", i % columns.stride);
        }
        results
    }
}

/// Rows within columns of a wider matrix that is full of 77.
fn spread<E: Element>(x: &[E], width: usize, columns: Columns) -> Vec<E> {
    let mut all = vec![E::from_f32(77.0); x.len() / width * columns.stride];
    for (to, row) in all.chunks_mut(columns.stride).zip(x.chunks(width)) {
        to[columns.at..columns.at + width].copy_from_slice(row);
    }
    all
}

fn gather<E: Element>(x: &[E], t: usize, width: usize, columns: Columns) -> Vec<E> {
    (0..t).flat_map(|row| &x[columns.at + row * columns.stride..][..width]).copied().collect()
}

fn check<E: Element>(cpu: &Cpu, scan: &Scan, lengths: &[usize], states: bool) {
    let data = Data::<E>::new(scan, lengths, states);
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let got = data.run(cpu, scan);
    let mut expected = Results::<f64> {
        out: Vec::new(),
        last: Default::default(),
        dsaid: Vec::new(),
        drecurrent: Vec::new(),
        dbias: Vec::new(),
        dprojection: Vec::new(),
        dfirst: Default::default(),
    };
    let (mut drecurrent, mut dbias) = (vec![1.0; width * p], vec![1.0; width]);
    let mut dprojection = vec![0.0; got.dprojection.len()];
    let (recurrent, bias) = (exact(&data.recurrent), exact(&data.bias));
    let projection = data.projection.as_ref().map(|x| exact(x));
    for (i, ends) in data.offsets.windows(2).enumerate() {
        let (start, end) = (ends[0] as usize, ends[1] as usize);
        // In the order of the steps, and back.
        let ordered = |x: &[f64], width: usize| -> Vec<f64> {
            let rows: Vec<&[f64]> = x[start * width..end * width].chunks(width).collect();
            if scan.reverse { rows.into_iter().rev().flatten().copied().collect() } else { rows.concat() }
        };
        let back = |x: &[f64], width: usize| -> Vec<f64> {
            let rows: Vec<&[f64]> = x.chunks(width).collect();
            if scan.reverse { rows.into_iter().rev().flatten().copied().collect() } else { rows.concat() }
        };
        let of = |pair: &Option<(Vec<E>, Vec<E>)>| match pair {
            Some((hidden, cell)) => {
                let cell = exact(cell).get(i * c..(i + 1) * c).map_or(vec![0.0; c], <[f64]>::to_vec);
                (exact(&hidden[i * p..(i + 1) * p]), cell)
            }
            None => (vec![0.0; p], vec![0.0; c]),
        };
        let (first, dlast, said) = (of(&data.first), of(&data.dlast), ordered(&exact(&data.said), width));
        let inputs = reference::Inputs {
            said: &said,
            recurrent: &recurrent,
            bias: &bias,
            projection: projection.as_deref(),
            initial: [&first.0, &first.1],
        };
        let output = reference::forward(scan, &inputs);
        let dout = ordered(&exact(&data.dout), p);
        let d = reference::backward(scan, &inputs, &output, &dout, [&dlast.0, &dlast.1]);
        expected.out.extend(back(&output.states, p));
        expected.last.0.extend(&output.states[output.states.len() - p..]);
        expected.last.1.extend(output.cells.get(output.cells.len().saturating_sub(c)..).unwrap_or_default());
        expected.dsaid.extend(back(&d.said, width));
        let sums = [(&mut drecurrent, &d.recurrent), (&mut dbias, &d.bias), (&mut dprojection, &d.projection)];
        for (sum, d) in sums {
            sum.iter_mut().zip(d).for_each(|(sum, d)| *sum += d);
        }
        expected.dfirst.0.extend(&d.initial[0]);
        expected.dfirst.1.extend(&d.initial[1][..with_cells(scan, c)]);
    }
    let name = |what: &str| format!("{what} of {scan:?} over {lengths:?}");
    assert_close(&name("states"), cpu, &got.out, &expected.out);
    assert_close(&name("last states"), cpu, &got.last.0, &expected.last.0);
    assert_close(&name("last cells"), cpu, &got.last.1, &expected.last.1);
    if E::IS_BF16 && scan.clip_cell.is_finite() {
        // A number next to its bound may be rounded onto it, and has no gradient then.
        return;
    }
    assert_close(&name("said"), cpu, &got.dsaid, &expected.dsaid);
    assert_close(&name("first states"), cpu, &got.dfirst.0, &expected.dfirst.0);
    assert_close(&name("first cells"), cpu, &got.dfirst.1, &expected.dfirst.1);
    // Sums in f32 over what was stored in E.
    for (what, got, expected) in [
        ("recurrent", &got.drecurrent, &drecurrent),
        ("bias", &got.dbias, &dbias),
        ("projection", &got.dprojection, &dprojection),
    ] {
        let error = error(&exact(got), expected);
        assert!(error <= tolerance::<E>(), "{} on {cpu:?}, bf16 {}: {error:e}", name(what), E::IS_BF16);
    }
}

#[test]
fn kernels_follow_the_reference() {
    for scan in scans(7) {
        for_all!(check(&scan, &[3, 1, 9, 4, 9], true));
    }
    for scan in scans(33) {
        for_all!(check(&scan, &[2, 12, 1], false));
    }
    for_all!(check(&Scan::new(Cell::Lstm, 129), &[5, 7], true));
    for_all!(check(&Scan::new(Cell::Gru, 1), &[1], false));
}

#[test]
fn neither_threads_nor_company_change_a_bit() {
    for scan in scans(40) {
        let data = Data::<f32>::new(&scan, &[5, 30, 1, 17, 30], true);
        let on = |threads: usize| data.run(&Cpu::new(Isa::best(), threads).unwrap(), &scan);
        let one = on(1);
        assert_eq!(one, on(2));
        assert_eq!(one, on(3));
        // The first sequence alone.
        let p = scan.width();
        let (mut alone, cells) = (Data::<f32>::new(&scan, &[5], true), with_cells(&scan, scan.hidden));
        let first = |pair: &Option<(Vec<f32>, Vec<f32>)>| {
            pair.as_ref().map(|(hidden, cell)| (hidden[..p].to_vec(), cell[..cells].to_vec()))
        };
        (alone.first, alone.dlast) = (first(&data.first), first(&data.dlast));
        let alone = alone.run(&Cpu::new(Isa::best(), 1).unwrap(), &scan);
        assert_eq!(one.out[..5 * p], alone.out, "{scan:?}");
        assert_eq!(one.dsaid[..5 * scan.gates()], alone.dsaid, "{scan:?}");
        assert_eq!(one.dfirst.0[..p], alone.dfirst.0, "{scan:?}");
    }
}

#[test]
fn empty_sequences_and_batches_are_nothing() {
    let cpu = Cpu::new(Isa::best(), 1).unwrap();
    for scan in scans(5) {
        let with = Data::<f32>::new(&scan, &[3, 0, 2], false);
        let without = Data::<f32>::new(&scan, &[3, 2], false);
        let (with, without) = (with.run(&cpu, &scan), without.run(&cpu, &scan));
        assert_eq!((with.out, with.dsaid, with.drecurrent), (without.out, without.dsaid, without.drecurrent));
        // The last state of an empty sequence is the first.
        let data = Data::<f32>::new(&scan, &[3, 0, 2], true);
        let (results, p) = (data.run(&cpu, &scan), scan.width());
        assert_eq!(results.last.0[p..2 * p], data.first.as_ref().unwrap().0[p..2 * p]);
        let none = Data::<f32>::new(&scan, &[], false).run(&cpu, &scan);
        assert_eq!((none.out, none.drecurrent), (vec![], vec![1.0; scan.gates() * scan.width()]));
    }
}
