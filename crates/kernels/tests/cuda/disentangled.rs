//! Disentangled attention against the CPU's reference in f64.

use half::bf16;
use henson_kernels::cpu::attention::LogBuckets;
use henson_kernels::cpu::attention::disentangled::{Disentangled, reference};
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cuda::attention::disentangled::{self as kernels, Gradients, Inputs};
use henson_kernels::cuda::attention::general::{Columns, Sequences};
use henson_kernels::cuda::attention::{Room, write_table};
use henson_kernels::cuda::{DType, Dropout, Gpu, Result, Step};

use crate::attention::time;
use crate::check::{Checks, Number, bits, error, exact, filled, numbers, tolerance};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const STEP: u32 = 77;
const SITE: u32 = 5;
const SHORT: LogBuckets = LogBuckets { count: 8, max_distance: 24 };
const V3: LogBuckets = LogBuckets { count: 256, max_distance: 512 };

struct Case<'a> {
    lengths: &'a [usize],
    attention: Disentangled,
    /// P.
    positions: usize,
    /// Whether there are positions for queries, and for keys.
    tables: [bool; 2],
    p: f32,
}

impl Case<'_> {
    fn named(&self, what: &str) -> String {
        let Self { lengths, attention, positions, tables, p } = self;
        format!("{what}: {attention:?}, tables {tables:?} of {positions}, p = {p}, {lengths:?}")
    }
}

/// All without gaps: T×H, T×3H (query, key, value) and P×2H (of keys, of queries).
struct Expected {
    out: Vec<f64>,
    dqkv: Vec<f64>,
    dpositions: Vec<f64>,
    maps: Vec<f64>,
}

pub(crate) fn disentangled(checks: &mut Checks<'_>) -> Result<()> {
    let both = [true, true];
    let of = |heads, d, buckets, tables: [bool; 2]| {
        Disentangled::new(heads, d, buckets, tables.iter().filter(|there| **there).count())
    };
    let sizes: &[usize] = if checks.small { &[64] } else { &[16, 32, 40, 64, 96, 128, 136, 192, 256] };
    for &d in sizes {
        for (i, tables) in [both, [true, false], [false, true]].into_iter().enumerate() {
            let p = if i % 2 == 0 { 0.1 } else { 0.0 };
            let lengths = [1, 7, 33, 129, 64, 200];
            let attention = of(2, d, SHORT, tables);
            case::<bf16>(checks, &Case { lengths: &lengths, attention, positions: 16, tables, p })?;
            case::<bf16>(checks, &Case { lengths: &lengths, attention, positions: 16, tables, p: 0.1 - p })?;
        }
    }
    let sizes: &[usize] = if checks.small { &[64] } else { &[16, 26, 64] };
    for &d in sizes {
        for (tables, p) in [(both, 0.1), ([true, false], 0.0), ([false, true], 0.1)] {
            let case_of = |attention| Case { lengths: &[7, 33, 1, 129], attention, positions: 16, tables, p };
            case::<f32>(checks, &case_of(of(3, d, SHORT, tables)))?;
            // Heads of an odd size in bf16.
            if d == 26 {
                case::<bf16>(checks, &case_of(of(3, d, SHORT, tables)))?;
            }
        }
    }
    if !checks.small {
        for (lengths, positions) in [(&[300, 5, 512][..], 512), (&[530], 512), (&[17, 3], V3.rows_for(17, 512))] {
            let attention = of(2, 64, V3, both);
            case::<bf16>(checks, &Case { lengths, attention, positions, tables: both, p: 0.1 })?;
            case::<f32>(checks, &Case { lengths, attention, positions, tables: both, p: 0.1 })?;
        }
    }
    Ok(())
}

fn offsets(lengths: &[usize]) -> Vec<u32> {
    let mut all = vec![0];
    lengths.iter().for_each(|length| all.push(all[all.len() - 1] + *length as u32));
    all
}

fn expected(case: &Case<'_>, qkv: &[f64], positions: &[f64], dout: &[f64], sequences: &[u32]) -> Expected {
    let Case { lengths, attention, positions: rows, tables, p } = case;
    let Disentangled { heads, head_size: d, buckets, scale } = *attention;
    let (h, offsets) = (heads * d, offsets(lengths));
    let t = offsets[lengths.len()] as usize;
    let take = |x: &[f64], first: usize, rows: usize, stride: usize, column: usize| -> Vec<f64> {
        (first..first + rows).flat_map(|row| x[row * stride + column..][..d].to_vec()).collect()
    };
    let add = |to: &mut [f64], from: &[f64], first: usize, stride: usize, column: usize| {
        from.iter().enumerate().for_each(|(i, x)| to[(first + i / d) * stride + column + i % d] += x);
    };
    let mut all = Expected {
        out: vec![0.0; t * h],
        dqkv: vec![0.0; t * 3 * h],
        dpositions: vec![0.0; rows * 2 * h],
        maps: vec![],
    };
    for (i, &s) in lengths.iter().enumerate() {
        let first = offsets[i] as usize;
        for head in 0..heads {
            let [q, k, v] = [0, 1, 2].map(|part| take(qkv, first, s, 3 * h, part * h + head * d));
            let [kr, qr] = [0, 1].map(|part| take(positions, 0, *rows, 2 * h, part * h + head * d));
            let (kr, qr) = (tables[0].then_some(&kr[..]), tables[1].then_some(&qr[..]));
            let x = reference::Inputs { q: &q, k: &k, v: &v, kr, qr, d, buckets, scale: f64::from(scale) };
            let mask = CpuDropout::new(*p, SEED, STEP, SITE).map(|dropout| -> Vec<f64> {
                let dropout = dropout.at_head(head);
                let row = |j: usize| RowId { sequence: sequences[i], position: (j / s) as u32 };
                let keep = |j: usize| dropout.keeps(row(j), s, j % s);
                (0..s * s).map(|j| if keep(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let output = reference::forward(&x, mask.as_deref());
            let [dq, dk, dv, dkr, dqr] =
                reference::backward(&x, &output, mask.as_deref(), &take(dout, first, s, h, head * d));
            add(&mut all.out, &output.out, first, h, head * d);
            for (part, gradient) in [dq, dk, dv].iter().enumerate() {
                add(&mut all.dqkv, gradient, first, 3 * h, part * h + head * d);
            }
            for (part, gradient) in [dkr, dqr].iter().enumerate() {
                add(&mut all.dpositions, gradient, 0, 2 * h, part * h + head * d);
            }
            all.maps.extend(output.probabilities);
        }
    }
    all
}

fn case<E: Number>(checks: &mut Checks<'_>, case: &Case<'_>) -> Result<()> {
    let Case { lengths, attention, positions: rows, tables, p } = case;
    let (gpu, h) = (checks.gpu, attention.heads * attention.head_size);
    let offsets = offsets(lengths);
    let t = offsets[lengths.len()] as usize;
    let sequences: Vec<u32> = (1..offsets.len() as u32).map(|i| 5 + 3 * i).collect();
    let (qkv, positions) = (numbers::<E>(1, t * 3 * h), numbers::<E>(2, rows * 2 * h));
    let dout = numbers::<E>(3, t * h);
    let expected = expected(case, &exact(&qkv), &exact(&positions), &exact(&dout), &sequences);
    let needed = Room::of(&offsets);
    let spared = Room { long: needed.long + 1, middle: needed.middle + 1, ..needed };
    let table = |room: Room| {
        let mut table = vec![u32::MAX; room.numbers()];
        write_table(&offsets, &sequences, room, &mut table);
        gpu.upload(&table)
    };
    let (exactly, spare) = (table(needed)?, table(spared)?);
    let longest = kernels::rounded_longest(lengths.iter().copied().max().unwrap_or(0));
    let distances = checks.up(&kernels::distance_table(attention.buckets, *rows, longest))?;
    let (qkv, positions, dout) = (checks.up(&qkv)?, checks.up(&positions)?, checks.up(&dout)?);
    let [query, key, value] = Columns::split(qkv.view(), [h, h, h]);
    let [position_key, position_query] = Columns::split(positions.view(), [h, h]);
    let inputs = Inputs {
        query,
        key,
        value,
        sequences: Sequences { table: spare.view(), room: spared, tokens: t },
        position_key: tables[0].then_some(position_key),
        position_query: tables[1].then_some(position_query),
        distances: distances.view(),
        longest,
    };
    let step = checks.up(&[STEP])?;
    let dropout = Dropout::new(*p, SEED, Step::At(step.view()), SITE);
    let mut before = None;
    for _ in 0..2 {
        let (out, log_sums) = (checks.poisoned::<E>(t * h)?, checks.poisoned::<f32>(attention.heads * t)?);
        let (dqkv, dpositions) = (checks.poisoned::<E>(t * 3 * h)?, checks.poisoned::<E>(rows * 2 * h)?);
        kernels::forward(gpu, attention, &inputs, dropout, out.view(), log_sums.view())?;
        let [query, key, value] = Columns::split(dqkv.view(), [h, h, h]);
        let [position_key, position_query] = Columns::split(dpositions.view(), [h, h]);
        let (position_key, position_query) = (tables[0].then_some(position_key), tables[1].then_some(position_query));
        let to = Gradients { query, key, value, position_key, position_query };
        kernels::backward(gpu, attention, &inputs, dropout, out.view(), log_sums.view(), dout.view(), to)?;
        let all = [bits::<E>(gpu, &out)?, bits::<E>(gpu, &dqkv)?, bits::<E>(gpu, &dpositions)?];
        match &before {
            None => {
                checks.close::<E>(&case.named("disentangled attention"), &out, &expected.out)?;
                let got = exact(&checks.read::<E>(&case.named("gradients"), &dqkv)?);
                for (part, name) in ["queries", "keys", "values"].iter().enumerate() {
                    compare::<E>(checks, case, name, part, 3, &got, &expected.dqkv);
                }
                // A table that is not there leaves its half as it was.
                let got: Vec<f64> = exact(&gpu.read::<E>(dpositions.view())?);
                for part in (0..2).filter(|part| tables[*part]) {
                    let name = ["positions' keys", "positions' queries"][part];
                    compare::<E>(checks, case, name, part, 2, &got, &expected.dpositions);
                }
            }
            Some(before) => checks.verify(|| case.named("another run gives other bits"), *before == all),
        }
        before = Some(all);
    }
    let maps = checks.poisoned::<f32>(expected.maps.len())?;
    let inputs = Inputs { sequences: Sequences { table: exactly.view(), room: needed, tokens: t }, ..inputs };
    kernels::probabilities(gpu, attention, &inputs, &offsets, maps.view())?;
    // Products with positions are rounded to the storage type.
    let bound = if E::IS_BF16 { tolerance::<E>() } else { 1e-4 };
    checks.within::<f32>(&case.named("probabilities"), &maps, &expected.maps, bound)
}

/// Compares one of several matrices side by side.
fn compare<E: Number>(
    checks: &mut Checks<'_>,
    case: &Case<'_>,
    name: &str,
    part: usize,
    parts: usize,
    got: &[f64],
    expected: &[f64],
) {
    let h = case.attention.heads * case.attention.head_size;
    let of = |x: &[f64]| -> Vec<f64> {
        x.chunks(parts * h).flat_map(|row| row[part * h..(part + 1) * h].to_vec()).collect()
    };
    let error = error(&of(got), &of(expected));
    let worst = &mut checks.worst[usize::from(E::IS_BF16)];
    *worst = worst.max(error);
    let good = error <= tolerance::<E>();
    checks.verify(|| format!("{} {:?}: error {error:.2e}", case.named(&format!("{name}' gradient")), E::DTYPE), good);
}

/// Times forward and backward of DeBERTa-v3-base's attention.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    println!("disentangled attention, bf16, 12 heads of 64: microseconds forward, backward");
    for (b, s) in [(32, 128), (64, 128), (16, 512), (32, 512)] {
        let (t, h, attention) = (b * s, 768, Disentangled::new(12, 64, V3, 2));
        let (rows, longest) = (V3.rows_for(s, 512), kernels::rounded_longest(s));
        let offsets = offsets(&vec![s; b]);
        let (numbers, room) = ((0..b as u32).collect::<Vec<_>>(), Room::of(&offsets));
        let mut table = vec![0; room.numbers()];
        write_table(&offsets, &numbers, room, &mut table);
        let (table, distances) = (gpu.upload(&table)?, gpu.upload(&kernels::distance_table(V3, rows, longest))?);
        let qkv = filled(gpu, 1, t * 3 * h, DType::Bf16, 1.0)?;
        let positions = filled(gpu, 2, rows * 2 * h, DType::Bf16, 1.0)?;
        let dout = filled(gpu, 3, t * h, DType::Bf16, 1.0)?;
        let (out, log_sums) = (gpu.empty(t * h, DType::Bf16)?, gpu.empty(12 * t, DType::F32)?);
        let (dqkv, dpositions) = (gpu.empty(t * 3 * h, DType::Bf16)?, gpu.empty(rows * 2 * h, DType::Bf16)?);
        let dropout = Dropout::new(0.1, SEED, Step::Value(STEP), SITE);
        let [query, key, value] = Columns::split(qkv.view(), [h, h, h]);
        let [position_query, position_key] = Columns::split(positions.view(), [h, h]);
        let inputs = Inputs {
            query,
            key,
            value,
            sequences: Sequences { table: table.view(), room, tokens: t },
            position_key: Some(position_key),
            position_query: Some(position_query),
            distances: distances.view(),
            longest,
        };
        let [query, key, value] = Columns::split(dqkv.view(), [h, h, h]);
        let [position_query, position_key] = Columns::split(dpositions.view(), [h, h]);
        let (position_key, position_query) = (Some(position_key), Some(position_query));
        let to = Gradients { query, key, value, position_key, position_query };
        let (o, l) = (out.view(), log_sums.view());
        let forward = time(gpu, || kernels::forward(gpu, &attention, &inputs, dropout, o, l))?;
        let backward = time(gpu, || kernels::backward(gpu, &attention, &inputs, dropout, o, l, dout.view(), to))?;
        println!("henson | disentangled | {b} × {s} | {forward:.1} | {backward:.1}");
    }
    Ok(())
}
