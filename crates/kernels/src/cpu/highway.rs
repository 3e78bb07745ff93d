//! The gate of a highway layer (Srivastava et al. 2015): y = σ(g)∘relu(t) + (1 − σ(g))∘x, where t and g are linear in x.
//!
//! Legend: T rows of H columns; a row of z is what the two linear maps gave, t and then g.

use super::activation::{Activation, sigmoid};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut};

/// The definition, in f64.
pub mod reference {
    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// T×H.
    pub fn forward(z: &[f64], x: &[f64], h: usize) -> Vec<f64> {
        let one = |i: usize| {
            let (t, g) = (z[i / h * 2 * h + i % h], sigmoid(z[i / h * 2 * h + h + i % h]));
            g * t.max(0.0) + (1.0 - g) * x[i]
        };
        (0..x.len()).map(one).collect()
    }

    /// The gradients with respect to z and x.
    pub fn backward(z: &[f64], x: &[f64], h: usize, dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut dz, mut dx) = (vec![0.0; z.len()], vec![0.0; x.len()]);
        for i in 0..x.len() {
            let at = i / h * 2 * h + i % h;
            let (t, g) = (z[at], sigmoid(z[at + h]));
            dz[at] = if t > 0.0 { dy[i] * g } else { 0.0 };
            dz[at + h] = dy[i] * (t.max(0.0) - x[i]) * g * (1.0 - g);
            dx[i] = dy[i] * (1.0 - g);
        }
        (dz, dx)
    }
}

/// Numbers that are worth a task.
const LEAST: usize = 4096;

/// z (T×2H), x (T×H) → T×H.
pub fn forward<E: Element>(cpu: &Cpu, z: &[E], x: &[E], h: usize, out: &mut [E]) {
    assert!(h > 0 && z.len() == 2 * x.len() && out.len() == x.len(), "highway: lengths differ");
    cpu.for_rows(out, h, (LEAST / h).max(1), |range, out| {
        for (row, out) in range.zip(out.chunks_exact_mut(h)) {
            forward_row(cpu.isa(), &z[row * 2 * h..(row + 1) * 2 * h], &x[row * h..(row + 1) * h], out);
        }
    });
}

/// Writes the gradients with respect to z and x.
pub fn backward<E: Element>(cpu: &Cpu, z: &[E], x: &[E], h: usize, dy: &[E], dz: &mut [E], dx: &mut [E]) {
    let fits = z.len() == 2 * x.len() && dy.len() == x.len() && dz.len() == z.len() && dx.len() == x.len();
    assert!(h > 0 && fits, "highway: lengths differ");
    let dz = SharedMut::new(dz);
    cpu.for_rows(dx, h, (LEAST / h).max(1), |range, dx| {
        for (row, dx) in range.zip(dx.chunks_exact_mut(h)) {
            // SAFETY: every row is one task's.
            let dz = unsafe { dz.slice(row * 2 * h, 2 * h) };
            let of = row * h..(row + 1) * h;
            backward_row(cpu.isa(), &z[row * 2 * h..(row + 1) * 2 * h], &x[of.clone()], &dy[of], dz, dx);
        }
    });
}

dispatch! { fn forward_row<E>(z: &[E], x: &[E], out: &mut [E]) = forward_body }
dispatch! { fn backward_row<E>(z: &[E], x: &[E], dy: &[E], dz: &mut [E], dx: &mut [E]) = backward_body }

/// # Safety
/// The instruction set must be there; z is twice as long as the others.
#[inline(always)]
unsafe fn forward_body<S: Simd, E: Element>(z: &[E], x: &[E], out: &mut [E]) {
    let (t, g) = z.split_at(x.len());
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: c < x.len(), the length of all.
        unsafe {
            let (t, g) = (Activation::Relu.apply::<S>(read::<S, E>(t, c)), sigmoid::<S>(read::<S, E>(g, c)));
            let x = read::<S, E>(x, c);
            write::<S, E>(out, c, S::mul_add(g, S::sub(t, x), x));
        }
    }
}

/// # Safety
/// The instruction set must be there; z and dz are twice as long as the others.
#[inline(always)]
unsafe fn backward_body<S: Simd, E: Element>(z: &[E], x: &[E], dy: &[E], dz: &mut [E], dx: &mut [E]) {
    let ((t, g), (dt, dg)) = (z.split_at(x.len()), dz.split_at_mut(x.len()));
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: c < x.len(), the length of all.
        unsafe {
            let (t, g, dy) = (read::<S, E>(t, c), sigmoid::<S>(read::<S, E>(g, c)), read::<S, E>(dy, c));
            let through = S::mul(dy, S::sub(S::splat(1.0), g));
            let slope = Activation::Relu.derivative::<S>(t);
            write::<S, E>(dt, c, S::mul(S::mul(dy, g), slope));
            let difference = S::sub(Activation::Relu.apply::<S>(t), read::<S, E>(x, c));
            write::<S, E>(dg, c, S::mul(S::mul(through, g), difference));
            write::<S, E>(dx, c, through);
        }
    }
}
