//! Decoding with a cache gives what attention over the whole sequences gives, on every kernel set, whatever the pages, the
//! number of new tokens at a time and the company.

use crate::common::*;
use henson_kernels::cpu::attention::cache::{Pages, append, attend};
use henson_kernels::cpu::attention::{Attention, Bias, Buckets, Inputs, View, Window, forward};
use henson_kernels::cpu::{Cpu, Element, Isa};

/// A cache, and who has which of its pages.
struct Cache<E> {
    page_size: usize,
    width: usize,
    keys: Vec<E>,
    values: Vec<E>,
    free: Vec<u32>,
    pages: Vec<Vec<u32>>,
    lengths: Vec<usize>,
}

impl<E: Element> Cache<E> {
    fn new(page_size: usize, count: usize, width: usize, sequences: usize) -> Self {
        let memory = || poisoned::<E>(count * page_size * width);
        // Neighbours in a sequence are not neighbours in memory.
        let free = (0..3).flat_map(|first| (first..count as u32).step_by(3)).collect();
        let (pages, lengths) = (vec![vec![]; sequences], vec![0; sequences]);
        Self { page_size, width, keys: memory(), values: memory(), free, pages, lengths }
    }

    /// The next `counts` tokens of some sequences: their outputs, one after the other.
    fn step(
        &mut self,
        cpu: &Cpu,
        attention: &Attention,
        bias: &[f32],
        sequences: &[usize],
        fused: &[Vec<E>],
    ) -> Vec<E> {
        let widths = attention.fused_widths();
        let columns: usize = widths.iter().sum();
        let mut offsets = vec![0];
        for (sequence, rows) in sequences.iter().zip(fused) {
            let count = rows.len() / columns;
            offsets.push(offsets[offsets.len() - 1] + count as u32);
            self.lengths[*sequence] += count;
            while self.pages[*sequence].len() * self.page_size < self.lengths[*sequence] {
                self.pages[*sequence].push(self.free.pop().unwrap());
            }
        }
        let mut page_offsets = vec![0];
        let mut pages = vec![];
        for sequence in sequences {
            pages.extend(&self.pages[*sequence]);
            page_offsets.push(pages.len() as u32);
        }
        let lengths: Vec<u32> = sequences.iter().map(|s| self.lengths[*s] as u32).collect();
        let pages = Pages { page_size: self.page_size, pages: &pages, page_offsets: &page_offsets, lengths: &lengths };
        let fused: Vec<E> = fused.concat();
        let [query, key, value] = View::split(&fused, widths);
        append(&pages, &key, &offsets, &mut self.keys);
        append(&pages, &value, &offsets, &mut self.values);
        let mut out = poisoned::<E>(fused.len() / columns * attention.query_width());
        attend(cpu, attention, &query, &offsets, bias, &self.keys, &self.values, &pages, &mut out);
        assert_eq!(self.width, attention.key_width());
        out
    }

    fn leave(&mut self, sequence: usize) {
        let pages = std::mem::take(&mut self.pages[sequence]);
        self.lengths[sequence] = 0;
        // What a sequence leaves behind must not be read by the next.
        for page in &pages {
            let rows = *page as usize * self.page_size * self.width;
            self.keys[rows..rows + self.page_size * self.width].fill(E::from_f32(f32::NAN));
            self.values[rows..rows + self.page_size * self.width].fill(E::from_f32(f32::NAN));
        }
        self.free.extend(pages);
    }
}

fn attentions() -> Vec<Attention> {
    let causal = Attention { window: Window::CAUSAL, ..Attention::new(4, 16) };
    let buckets = Buckets { count: 8, max_distance: 20, bidirectional: false };
    vec![
        causal,
        Attention { key_heads: 2, bias: Bias::Slopes, ..causal },
        Attention { bias: Bias::Relative(buckets), scale: 1.0, ..causal },
        Attention { window: Window { left: 9, right: 0 }, key_heads: 1, ..causal },
    ]
}

/// What attention over whole sequences gives.
fn whole<E: Element>(cpu: &Cpu, attention: &Attention, bias: &[f32], fused: &[E]) -> Vec<f64> {
    let rows = fused.len() / attention.fused_widths().iter().sum::<usize>();
    let mut out = poisoned::<E>(rows * attention.query_width());
    let offsets = [0, rows as u32];
    let inputs = Inputs { bias, ..Inputs::fused(attention, fused, &offsets) };
    forward(cpu, attention, &inputs, None, &mut out, &mut vec![0.0; attention.heads * rows]);
    exact(&out)
}

fn check<E: Element>(cpu: &Cpu, page_size: usize) {
    for attention in attentions() {
        let (columns, h) = (attention.fused_widths().iter().sum::<usize>(), attention.query_width());
        let bias = numbers::<f32>(9, attention.bias_size());
        let lengths = [33, 1, 129];
        let sequences: Vec<Vec<E>> = (0..3).map(|i| numbers::<E>(i as u64, lengths[i] * columns)).collect();
        let mut cache = Cache::<E>::new(page_size, 200_usize.div_ceil(page_size) + 3, attention.key_width(), 3);
        let mut done = [0; 3];
        let mut out = [vec![], vec![], vec![]];
        // The first has one token at a time, the second leaves at once, the third enters later, with many at a time.
        let mut step = 0;
        while done[0] < 33 || done[2] < 129 {
            let counts = [1, usize::from(step == 0), if step < 2 { 0 } else { [1, 40, 7][step % 3] }];
            let who: Vec<usize> = (0..3).filter(|i| counts[*i] > 0 && done[*i] < lengths[*i]).collect();
            let rows: Vec<Vec<E>> = who
                .iter()
                .map(|i| {
                    let end = (done[*i] + counts[*i]).min(lengths[*i]);
                    let rows = sequences[*i][done[*i] * columns..end * columns].to_vec();
                    done[*i] = end;
                    rows
                })
                .collect();
            let got = cache.step(cpu, &attention, &bias, &who, &rows);
            let mut rest = &got[..];
            for (i, rows) in who.iter().zip(&rows) {
                let (own, others) = rest.split_at(rows.len() / columns * h);
                out[*i].extend_from_slice(own);
                rest = others;
            }
            if step == 0 {
                cache.leave(1);
            }
            step += 1;
        }
        for i in 0..3 {
            let expected = whole(cpu, &attention, &bias, &sequences[i]);
            assert_close(&format!("{attention:?}, pages of {page_size}, sequence {i}"), cpu, &out[i], &expected);
        }
    }
}

#[test]
fn decoding_gives_what_the_whole_sequence_gives() {
    for page_size in [1, 16, 256] {
        for_all!(check(page_size));
    }
}

#[test]
fn threads_and_company_do_not_change_a_bit() {
    for attention in attentions() {
        let columns = attention.fused_widths().iter().sum::<usize>();
        let bias = numbers::<f32>(9, attention.bias_size());
        let rows: Vec<Vec<f32>> = (0..3).map(|i| numbers::<f32>(i as u64, 70 * columns)).collect();
        let run = |threads, who: &[usize]| -> Vec<u32> {
            let cpu = Cpu::new(Isa::best(), threads).unwrap();
            let mut cache = Cache::<f32>::new(16, 20, attention.key_width(), 3);
            let mut out = vec![];
            for token in 0..70 {
                let rows: Vec<Vec<f32>> =
                    who.iter().map(|i| rows[*i][token * columns..(token + 1) * columns].to_vec()).collect();
                let got = cache.step(&cpu, &attention, &bias, who, &rows);
                // Those of sequence 2, wherever it stands.
                let at = who.iter().position(|i| *i == 2).unwrap() * attention.query_width();
                out.extend(got[at..at + attention.query_width()].iter().map(|x| x.to_bits()));
            }
            out
        };
        let alone = run(1, &[2]);
        assert_eq!(alone, run(1, &[0, 1, 2]));
        assert_eq!(alone, run(2, &[2, 0]));
        assert_eq!(alone, run(3, &[1, 2]));
    }
}
