#![allow(missing_docs, clippy::print_stdout, reason = "scratch")]
use henson_kernels::cpu::gemm::*;
use henson_kernels::cpu::*;
use henson_kernels::memory::Buffer;
use std::time::Instant;
fn buf<E: Element>(n: usize, v: f32) -> &'static mut [E] {
    let b = Box::leak(Box::new(Buffer::new(n * size_of::<E>()).unwrap()));
    let s = unsafe { std::slice::from_raw_parts_mut(b.start().as_ptr().cast::<E>(), n) };
    for (i, x) in s.iter_mut().enumerate() { *x = E::from_f32(v * ((i * 7919 % 1013) as f32 / 1013.0 - 0.5)); }
    s
}
fn time(mut f: impl FnMut()) -> f64 {
    let mut t = vec![];
    for _ in 0..9 { let s = Instant::now(); f(); t.push(s.elapsed().as_secs_f64()); }
    t.sort_by(f64::total_cmp);
    t[4]
}
fn run<E: Element>(cpu: &Cpu, p: usize, v: usize, h: usize) {
    let x = buf::<E>(p * h, 1.0); let w = buf::<E>(v * h, 1.0); let mut y = buf::<E>(p * v, 1.0); let mut dx = buf::<E>(p * h, 0.0); let mut dw = buf::<f32>(v * h, 0.0);
    let bias = buf::<f32>(v, 1.0);
    let fl = 2.0 * (p * v * h) as f64 / 1e9;
    let a = time(|| product(cpu, Matrix::new(x, p, h), Right::Plain(Matrix::new(w, v, h).transposed()), &mut y, v, Finish { bias: Some(bias), ..Finish::default() }));
    let b = time(|| product(cpu, Matrix::new(y, p, v), Right::Plain(Matrix::new(w, v, h)), &mut dx, h, Finish::default()));
    let c = time(|| product(cpu, Matrix::new(y, p, v).transposed(), Right::Plain(Matrix::new(x, p, h)), &mut dw, h, Finish::default()));
    println!("{p}x{v}x{h} bf16 {}: fwd {:.2} ms {:.0}, dx {:.2} ms {:.0}, dw {:.2} ms {:.0} GFLOP/s", E::IS_BF16, a * 1e3, fl / a, b * 1e3, fl / b, c * 1e3, fl / c);
}
fn main() {
    let cpu = Cpu::detect();
    for h in [128, 256, 768] {
        run::<f32>(&cpu, 304, 30528, h);
        run::<half::bf16>(&cpu, 304, 30528, h);
    }
    println!("bandwidth {:.1} GB/s", peak::bytes_per_second(&cpu) / 1e9);
}
