//! Quick speed check of matrix products on BERT's shapes.
use henson_kernels::cpu::gemm::*;
use henson_kernels::cpu::*;
use std::time::Instant;
fn run<E: Element>(cpu: &Cpu, m: usize, n: usize, k: usize, form: usize) -> f64 {
    let a = vec![E::from_f32(0.5); m * k];
    let b = vec![E::from_f32(0.25); n * k];
    let mut c = vec![E::from_f32(0.0); m * n];
    let mut best = f64::MAX;
    for _ in 0..5 {
        let t = Instant::now();
        let va = if form == 2 { Matrix::new(&a, k, m).transposed() } else { Matrix::new(&a, m, k) };
        let vb = if form == 1 { Matrix::new(&b, n, k).transposed() } else { Matrix::new(&b, k, n) };
        product(cpu, va, Right::Plain(vb), &mut c, n, Finish::default());
        best = best.min(t.elapsed().as_secs_f64());
    }
    2.0 * (m * n * k) as f64 / best / 1e9
}
fn main() {
    for isa in [Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16] {
        let threads: usize = std::env::args().nth(1).map_or(2, |t| t.parse().unwrap());
        let cpu = Cpu::new(isa, threads).unwrap();
        for (m, n, k) in [
            (2048, 3072, 768),
            (2048, 768, 3072),
            (2048, 768, 768),
            (2048, 256, 256),
            (304, 30528, 256),
            (16, 768, 768),
        ] {
            for form in 0..3 {
                println!(
                    "{isa} {m}x{n}x{k} form {form}: f32 {:.0} bf16 {:.0} GFLOP/s",
                    run::<f32>(&cpu, m, n, k, form),
                    run::<half::bf16>(&cpu, m, n, k, form)
                );
            }
        }
    }
}
