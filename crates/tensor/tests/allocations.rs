//! A steady step through every operation beyond BERT's allocates nothing: a counting allocator proves it. It stands alone in its
//! file, because other tests would be counted too.

mod common;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use henson_tensor::{
    Activation, Attention, Bias, BiasValues, Buckets, Builder, Cell, CrfParams, DType, Directions, EmbeddingTables,
    FeedForwardLayers, Init, Layout, LogBuckets, MixParams, Norm, Pairing, Pass, PositionTables, QueryKeyValue,
    RecurrentLayer, Relations, RelativePositions, Rotary, RotaryTable, Tape, Tensor, Training, Window, Xl, XlRelations,
    XlTables,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator; counting does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as for the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Memory) {
        // SAFETY: as for the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_steady_step_allocates_nothing() {
    // One thread: each has work space of its own, and on a busy machine a second may come to its first task at any time.
    let (device, h, t) = (device(1), 32, 60);
    for dtype in [DType::F32, DType::Bf16] {
        let mut b = Builder::new();
        let tables = EmbeddingTables {
            word: b.matrix("word", 50, h, Init::Normal(1.0)),
            position: Some(b.matrix("position", 64, h, Init::Normal(1.0))),
            position_offset: 2,
            segment: None,
        };
        let norm = Norm { weight: b.vector("norm", h, Init::Ones), bias: None, epsilon: 1e-6, centred: false };
        let qkv = b.matrix("qkv", h + 2 * 16, h, Init::Normal(0.1));
        let (query, key_value) = (b.matrix("q", h, h, Init::Normal(0.1)), b.matrix("kv", 2 * h, h, Init::Normal(0.1)));
        let (relative, all) = (b.matrix("r", 16, h, Init::Normal(1.0)), b.matrix("all", 3 * h, h, Init::Normal(0.1)));
        let bias = BiasValues::Table(b.matrix("bias", 8, 2, Init::Normal(0.1)));
        let (xl_biases, xl_segments) =
            (b.vector("xl.biases", 3 * h, Init::Normal(0.1)), b.matrix("xl.segments", 2, h, Init::Normal(0.1)));
        let distances = b.matrix("xl.r", h, h, Init::Normal(0.1));
        let layers = FeedForwardLayers {
            up: b.matrix("up", 80, h, Init::Normal(0.1)),
            up_bias: None,
            activation: Activation::Silu,
            gated: true,
            down: b.matrix("down", h, 40, Init::Normal(0.1)),
            down_bias: None,
        };
        let layer = |b: &mut Builder, cell: Cell, name: &str| RecurrentLayer {
            cell,
            hidden: 8,
            directions: Directions::Both,
            input: b.matrix(&format!("{name}.input"), 2 * 8 * cell.gates(), 16, Init::Normal(0.1)),
            input_bias: Some(b.vector(&format!("{name}.input_bias"), 2 * 8 * cell.gates(), Init::Zeros)),
            recurrent: b.matrix(&format!("{name}.recurrent"), 2 * 8 * cell.gates(), 8, Init::Normal(0.1)),
            recurrent_bias: Some(b.vector(&format!("{name}.bias"), 2 * 8 * cell.gates(), Init::Zeros)),
            projection: None,
            clip_cell: f32::INFINITY,
            clip_projection: f32::INFINITY,
        };
        let mixture = MixParams { weights: b.vector("mix", 2, Init::Zeros), gamma: b.vector("gamma", 1, Init::Ones) };
        let (lstm, gru) = (layer(&mut b, Cell::Lstm, "lstm"), layer(&mut b, Cell::Gru, "gru"));
        let crf = CrfParams {
            start_transitions: b.vector("start", 16, Init::Zeros),
            end_transitions: b.vector("end", 16, Init::Zeros),
            transitions: b.matrix("transitions", 16, 16, Init::Zeros),
        };
        let mut parameters = b.finish(&device, dtype).unwrap();
        parameters.initialise(1).unwrap();
        let mut gradients = parameters.gradients().unwrap();
        let layout = Layout::new(&device, &[40, 1, 19], 0).unwrap();
        let ids = Tensor::from_slice(&device, [t], &(0..t as u32).map(|i| i % 50).collect::<Vec<_>>()).unwrap();
        let targets = Tensor::from_slice(&device, [t], &vec![7u32; t]).unwrap();
        let rotary = Rotary { theta: 1e4, size: 16, pairing: Pairing::Halves };
        let angles = RotaryTable::new(&device, rotary, 40).unwrap();
        let window = Attention { window: Window::local(5), key_heads: 1, ..Attention::new(2, 16) };
        let buckets = Buckets { count: 8, max_distance: 20, bidirectional: true };
        let cross = Attention { bias: Bias::Relative(buckets), ..Attention::new(2, 16) };
        let positions =
            RelativePositions::new(&device, LogBuckets { count: 8, max_distance: 24 }, 16, &layout).unwrap();
        // The last five tokens of each long sequence stand where others do, and are seen by nobody.
        let segments: Vec<u32> = (0..t as u32).map(|i| i / 7 % 2).collect();
        let own_orders: Vec<u32> = (0..t as u32).map(|i| 1 + i * 7 % 11).collect();
        let orders: Vec<u32> = (0..t as u32).map(|i| if i % 3 == 0 || i == 40 { 0 } else { i * 7 % 11 }).collect();
        let numbers =
            Relations { places: None, segments: Some([&segments, &segments]), orders: Some([&own_orders, &orders]) };
        let relations = XlRelations::new(&device, (&layout, &layout), numbers).unwrap();
        let halves: Vec<u32> = (0..t as u32).map(|i| if i < 30 { 2 * i } else { 2 * i - 59 }).collect();
        let halves = [&halves[..30], &halves[30..]].map(|half| Tensor::from_slice(&device, [30], half).unwrap());
        let thirty =
            [0, 30].map(|from| Tensor::from_slice(&device, [30], &(from..from + 30).collect::<Vec<u32>>()).unwrap());
        let mut tape = Tape::new();
        let mut before = 0;
        for step in 0..8 {
            if step == 4 {
                before = ALLOCATIONS.load(Ordering::Relaxed);
            }
            gradients.zero();
            let training = Training { seed: 1, step };
            let mut pass = Pass::training(&mut tape, &parameters, training);
            let x = pass.embeddings(tables, &ids, layout.positions(), None).unwrap();
            let y = pass.norm(x.clone(), &norm).unwrap();
            let y = pass.linear(&y, qkv, None, Activation::None).unwrap();
            let y = pass.rotary(y, &angles, layout.positions(), 0..48, 16).unwrap();
            let from = QueryKeyValue::Fused(y);
            let y = pass.attention(&window, from, &BiasValues::None, (&layout, &layout), (0.1, 1)).unwrap();
            let (x, y) = pass.add_pre_norm(y, &x, &norm, &layout, (0.1, 2)).unwrap();
            let r = pass.table(relative);
            let r = pass.norm(r, &norm).unwrap();
            let r = pass.dropout_positions(r, &positions, (0.1, 9)).unwrap();
            let both = PositionTables::Both(pass.linear(&r, all.to_row(2 * h), None, Activation::None).unwrap());
            let y = pass.linear(&y, all, None, Activation::None).unwrap();
            let y = pass.disentangled(2, y, both, &positions, &layout, (0.1, 10)).unwrap();
            let [first, second] = [0, 1].map(|half| pass.gather(&y, &thirty[half]).unwrap());
            let y = pass.join(&first, &second, halves.each_ref()).unwrap();
            let sinusoids = pass.sinusoids(40, 30, h, (0.1, 11)).unwrap();
            let positions_of_xl = pass.linear(&sinusoids.table, distances, None, Activation::None).unwrap();
            let of = XlTables {
                positions: positions_of_xl,
                first: sinusoids.first,
                biases: xl_biases,
                segments: Some(xl_segments),
            };
            let y = pass.linear(&y, all, None, Activation::None).unwrap();
            let y = pass.xl_attention(&Xl::new(2, 16), QueryKeyValue::Fused(y), of, &relations, (0.1, 12)).unwrap();
            let query = pass.linear(&y, query, None, Activation::None).unwrap();
            let key_value = pass.linear(&y, key_value, None, Activation::None).unwrap();
            let from = QueryKeyValue::Cross { query, key_value };
            let y = pass.attention(&cross, from, &bias, (&layout, &layout), (0.1, 3)).unwrap();
            let (x, y) = pass.add_pre_norm(y, &x, &norm, &layout, (0.1, 4)).unwrap();
            let y = pass.feed_forward(&y, &layers, Some((&layout, (0.1, 5)))).unwrap();
            let x = pass.add_residual(y, &x, &layout, (0.1, 6)).unwrap();
            let y = pass.norm_dropout(x, &norm, &layout, (0.1, 7)).unwrap();
            let logits = pass.linear(&y, tables.word, None, Activation::None).unwrap();
            pass.sample(&logits, 50, 1.0, (&layout, &ids), None, (training, 8)).unwrap();
            pass.smoothed_cross_entropy(logits, 50, &targets, None, 0.1, 0.1).unwrap();
            let y = pass.mix(&y, &mixture).unwrap();
            let y = pass.recurrent(&y, &lstm, &layout, None).unwrap().out;
            let y = pass.variational_dropout(y, &layout, (0.1, 11)).unwrap();
            let y = pass.recurrent(&y, &gru, &layout, None).unwrap().out;
            pass.crf_loss(y, &crf, &layout, &targets, 0.1).unwrap();
            pass.backward(&mut gradients).unwrap();
        }
        let during = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(during, 0, "four steady steps in {dtype} made {during} allocations");
    }
}
