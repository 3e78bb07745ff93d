//! The gradients of a batch's parts, added in a tree whose shape is the parts' number alone: ((0+1)+(2+3))+… . Whoever computes a whole
//! branch of it can add that up alone, so that one process and several give the same bits.

use henson_kernels::cpu::rows;
use henson_kernels::cuda;

use crate::{DType, Device, Gradients, Kind, Result, Tensor};

/// Sums that wait for their other half, as in a binary counter: for n parts, at most as many as n has digits.
#[derive(Default)]
pub struct PartSums {
    waiting: Vec<Tensor>,
    /// Kept from step to step.
    spare: Vec<Tensor>,
}

impl PartSums {
    /// Takes the gradients of part number `part` of `parts`. After the last, `gradients` are the sum of all; before, they are there
    /// for the next part, which must begin with [`Gradients::zero`].
    pub fn end_part(&mut self, gradients: &mut Gradients, part: usize, parts: usize) -> Result<()> {
        let device = gradients.device().clone();
        let is_last = part + 1 == parts;
        let complete = if is_last { self.waiting.len() } else { part.trailing_ones() as usize };
        if !is_last && let Device::Cuda(cuda) = &device {
            return self.end_part_in_place(&cuda.gpu, gradients, complete);
        }
        for _ in 0..complete {
            let Some(other) = self.waiting.pop() else { break };
            let sum = gradients.flat_mut();
            let _timer = device.timer(Kind::AddParts, 0, &[&other, &other, &other]);
            match &device {
                Device::Cpu(cpu) => rows::add(&cpu.kernels, other.slice::<f32>(), sum.slice_mut()),
                Device::Cuda(cuda) => cuda::rows::add(&cuda.gpu, other.on_gpu(), sum.on_gpu())?,
            }
            self.spare.push(other);
        }
        if !is_last {
            let next = self.spare(gradients)?;
            self.waiting.push(std::mem::replace(gradients.flat_mut(), next));
        }
        Ok(())
    }

    /// The same where the gradients must stay in their place, since recorded passes write there. What waits takes the sums; a + b and
    /// b + a are the same bits.
    fn end_part_in_place(&mut self, gpu: &cuda::Gpu, gradients: &Gradients, complete: usize) -> Result<()> {
        let device = gradients.device();
        if complete == 0 {
            let next = self.spare(gradients)?;
            let _timer = device.timer(Kind::AddParts, 0, &[&next, &next]);
            gpu.copy(gradients.flat().on_gpu(), next.on_gpu())?;
            self.waiting.push(next);
            return Ok(());
        }
        for number in 0..complete {
            let later = if number > 0 { self.waiting.pop() } else { None };
            let Some(sum) = self.waiting.last() else { break };
            let _timer = device.timer(Kind::AddParts, 0, &[sum, sum, sum]);
            cuda::rows::add(gpu, later.as_ref().unwrap_or(gradients.flat()).on_gpu(), sum.on_gpu())?;
            self.spare.extend(later);
        }
        Ok(())
    }

    fn spare(&mut self, gradients: &Gradients) -> Result<Tensor> {
        match self.spare.pop() {
            Some(spare) => Ok(spare),
            // Zeros, since nobody writes what lies between parameters, and the norm reads it.
            None => Tensor::zeros(gradients.device(), gradients.flat().shape(), DType::F32),
        }
    }

    /// Forgets what an interrupted step left.
    pub fn clear(&mut self) {
        self.spare.append(&mut self.waiting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, Parameters};

    fn sum(parameters: &Parameters, parts: &[f32]) -> f32 {
        let (mut gradients, mut sums) = (parameters.gradients().unwrap(), PartSums::default());
        for (i, part) in parts.iter().enumerate() {
            gradients.zero();
            gradients.flat_mut().slice_mut::<f32>()[0] = *part;
            gradients.played();
            sums.end_part(&mut gradients, i, parts.len()).unwrap();
        }
        assert!(sums.waiting.is_empty());
        gradients.flat().slice::<f32>()[0]
    }

    #[test]
    fn parts_are_added_in_a_tree() {
        let device = Device::cpu(None, Some(1)).unwrap();
        let mut builder = Builder::new();
        builder.vector("x", 1, Init::Zeros);
        let parameters = builder.finish(&device, DType::F32).unwrap();
        // Each number alone is lost in the large one, and the order of additions is seen.
        let [a, b, c, d, e, f] = [1e8f32, 3.0, -1e8, 5.0, 7e7, 1.5];
        assert_eq!(sum(&parameters, &[a]), a);
        assert_eq!(sum(&parameters, &[a, b, c]), (a + b) + c);
        assert_eq!(sum(&parameters, &[a, b, c, d]), (a + b) + (c + d));
        assert_eq!(sum(&parameters, &[a, b, c, d, e]), ((a + b) + (c + d)) + e);
        assert_eq!(sum(&parameters, &[a, b, c, d, e, f]), ((a + b) + (c + d)) + (e + f));
        assert_ne!((a + b) + (c + d), ((a + b) + c) + d);
    }
}
