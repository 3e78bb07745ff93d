//! Philox 4×32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): random bits
//! as a pure function of a key and a counter.
//!
//! Nothing has a state to save: the same (seed, counter) gives the same bits on every device and for every thread
//! count.

pub(crate) const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Rounds for everything but dropout, as its authors recommend.
pub(crate) const ROUNDS: usize = 10;

/// Rounds for dropout, which draws for every element of every activation: the fewest for which the authors found no test of
/// TestU01's BigCrush that fails.
pub const DROPOUT_ROUNDS: usize = 7;

/// 128 random bits for one counter.
#[inline(always)]
pub fn philox(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    philox_of::<ROUNDS>(seed, counter)
}

/// The same with another number of rounds.
#[inline(always)]
pub(crate) fn philox_of<const R: usize>(seed: u64, counter: [u32; 4]) -> [u32; 4] {
    let wide = philox_lanes::<1, R>(seed, [[counter[0]], [counter[1]], [counter[2]], [counter[3]]]);
    [wide[0][0], wide[1][0], wide[2][0], wide[3][0]]
}

/// 128 random bits for each of `N` counters, word by word: `counters[w][i]` is word w of counter i.
#[inline(always)]
pub(crate) fn philox_lanes<const N: usize, const R: usize>(seed: u64, counters: [[u32; N]; 4]) -> [[u32; N]; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counters;
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..R {
        for i in 0..N {
            let a = u64::from(MULTIPLIER[0]) * u64::from(c0[i]);
            let b = u64::from(MULTIPLIER[1]) * u64::from(c2[i]);
            let (n0, n2) = ((b >> 32) as u32 ^ c1[i] ^ key[0], (a >> 32) as u32 ^ c3[i] ^ key[1]);
            (c0[i], c1[i], c2[i], c3[i]) = (n0, b as u32, n2, a as u32);
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    [c0, c1, c2, c3]
}

/// A sequential reader of the numbers of one stream, for work that draws an unknown number of them.
///
/// Its counter is (draw, index low, index high, stream): two streams or two indices never share bits.
#[derive(Clone, Debug)]
pub struct Stream {
    seed: u64,
    stream: u32,
    index: u64,
    draw: u32,
    words: [u32; 4],
}

impl Stream {
    /// The numbers of item `index` of a stream.
    pub fn new(seed: u64, stream: u32, index: u64) -> Self {
        Self { seed, stream, index, draw: 0, words: [0; 4] }
    }

    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        let word = self.draw as usize % 4;
        if word == 0 {
            let counter = [self.draw / 4, self.index as u32, (self.index >> 32) as u32, self.stream];
            self.words = philox(self.seed, counter);
        }
        self.draw += 1;
        self.words[word]
    }

    /// A number in [0, 1) with 24 random bits.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 24) as f32
    }

    /// A number in 0..n without bias; n > 0.
    pub fn below(&mut self, n: u32) -> u32 {
        // Lemire's multiplication: the low part tells whether the draw falls into the uneven rest.
        loop {
            let product = u64::from(self.bits()) * u64::from(n);
            if product as u32 >= n.wrapping_neg() % n {
                return (product >> 32) as u32;
            }
        }
    }

    /// A draw from the normal distribution with mean 0 and deviation 1, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        let u = (f64::from(self.bits()) + 1.0) / (f64::from(u32::MAX) + 2.0);
        let v = f64::from(self.bits()) / (f64::from(u32::MAX) + 1.0);
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that come with the authors' Random123 library.
    #[test]
    fn known_answers() {
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let seed = 0x299f_31d0_a409_3822;
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(seed, counter), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
        let dropout = |seed, counter| philox_of::<DROPOUT_ROUNDS>(seed, counter);
        assert_eq!(dropout(0, [0; 4]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(dropout(u64::MAX, [u32::MAX; 4]), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
        assert_eq!(dropout(seed, counter), [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]);
    }

    #[test]
    fn lanes_equal_single_calls() {
        let counters: [[u32; 16]; 4] = std::array::from_fn(|w| std::array::from_fn(|i| (w * 1000 + i * 7) as u32));
        let wide = philox_lanes::<16, ROUNDS>(42, counters);
        for i in 0..16 {
            let one = philox(42, std::array::from_fn(|w| counters[w][i]));
            assert_eq!(one, std::array::from_fn(|w| wide[w][i]));
        }
    }

    #[test]
    fn streams_differ_repeat_and_have_the_right_moments() {
        let draw = |stream, index| -> Vec<u32> {
            let mut s = Stream::new(7, stream, index);
            (0..9).map(|_| s.bits()).collect()
        };
        assert_eq!(draw(1, 5), draw(1, 5));
        assert_ne!(draw(1, 5), draw(1, 6));
        assert_ne!(draw(1, 5), draw(2, 5));

        let mut s = Stream::new(7, 0, 0);
        let n = 100_000;
        let normals: Vec<f32> = (0..n).map(|_| s.normal()).collect();
        let mean = normals.iter().sum::<f32>() / n as f32;
        let variance = normals.iter().map(|x| x * x).sum::<f32>() / n as f32;
        assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
        let mut counts = [0; 7];
        for _ in 0..70_000 {
            counts[s.below(7) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (9_500..10_500).contains(c)), "{counts:?}");
    }
}
