//! A training step in steady state allocates nothing and starts no thread: a counting allocator proves it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use henson_models::{Batch, Family, Head, Model, Sequence};
use henson_tensor::{Builder, DType, Device, Pass, Tape, Tensor, Training};
use henson_train::objective::{self, Masked, Scales};
use henson_train::{OptimizerSettings, Updater};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator; counting does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as for the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as for the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_steady_step_allocates_and_spawns_nothing() {
    let device = Device::cpu(None, Some(2)).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let mut config = Family::config_of_size("bert-tiny").unwrap();
        config.set_vocab_size(1000);
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, Head::PreTraining).unwrap();
        let mut parameters = builder.finish(&device, dtype).unwrap();
        parameters.initialise(1).unwrap();
        let mut gradients = parameters.gradients().unwrap();
        let mut updater = Updater::new(OptimizerSettings::default(), &parameters).unwrap();
        let ids: Vec<u32> = (0..300).map(|i| i * 7 % 1000).collect();
        let segments = vec![0; 300];
        let sequences: Vec<Sequence<'_>> = [0..100, 100..107, 107..300]
            .map(|range| Sequence { ids: &ids[range.clone()], segments: &segments[range] })
            .to_vec();
        let batch = Batch::new(&device, &config, &sequences, 0).unwrap();
        let tensor = |numbers: &[u32]| Tensor::from_slice(&device, [numbers.len()], numbers).unwrap();
        let masked = Masked { rows: tensor(&[3, 50, 102, 200]), targets: tensor(&[1, 2, 3, 4]), weights: None };
        let labels = tensor(&[0, 1, 1]);
        let scales = Scales { masked: 0.25, sequence: 1.0 / 3.0 };
        let mut tape = Tape::new();
        let (mut before, mut running) = (0, 0);
        for step in 0..8 {
            if step == 4 {
                (before, running) = (ALLOCATIONS.load(Ordering::Relaxed), threads());
                // Reading the list of threads allocates too: start counting after it.
                before = before.max(ALLOCATIONS.load(Ordering::Relaxed));
            }
            gradients.zero();
            let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step });
            objective::pre_training(&model, &mut pass, &batch, &masked, Some(&labels), scales).unwrap();
            pass.backward(&mut gradients).unwrap();
            updater.step(&mut parameters, &gradients, 1e-4).unwrap();
        }
        let during = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(during, 0, "four steady steps in {dtype} made {during} allocations");
        assert_eq!(threads(), running);
    }
}
