//! Intel's matrix tiles (AMX) for products of bf16: 32×32 sums at a time, each over pairs of neighbours along k.
//!
//! Rust has no intrinsics for them, so the whole loop over k is one block of assembly. Since few machines have tiles, a model
//! of them in plain Rust stands next to it, equal to the last bit, which the tests of all kernels run on any machine.
//!
//! Units are 32 bits: two bf16 that are neighbours along k. A left panel has blocks of 16 units along k, and in each block
//! its rows, one after the other; a right panel has rows of 32 units, one for each column, as it has without tiles.

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;

/// Pairs along k that one instruction adds up.
pub(crate) const UNITS: usize = 16;

/// Columns of a panel: two tiles side by side.
pub(crate) const COLUMNS: usize = 32;

/// Who multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tiles {
    /// The processor.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Processor,
    /// Plain Rust.
    Model,
}

/// Tiles that are set up on this thread: 32×32 sums that grow by blocks along k.
pub(crate) struct SetUp {
    by: Tiles,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[allow(dead_code, reason = "held for its drop")]
    processor: Option<processor::Configured>,
    model: Option<model::Sums>,
}

impl SetUp {
    /// Sets all sums to zero.
    #[inline(always)]
    pub(crate) fn begin(&mut self) {
        match self.by {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: tiles are set up as long as this lives.
            Tiles::Processor => unsafe { processor::begin() },
            Tiles::Model => self.model = Some(model::Sums::default()),
        }
    }

    /// Adds `blocks` blocks to 16·`row_tiles` rows (one or two tiles) of sums, and asks for what is at `ahead` and after it,
    /// [`AHEAD`] bytes for each block, to be brought into the second-level cache.
    ///
    /// # Safety
    /// The panels hold so many more blocks of so many rows and of 32 columns.
    #[inline(always)]
    pub(crate) unsafe fn add(
        &mut self,
        row_tiles: usize,
        blocks: usize,
        left: *const u32,
        right: *const u32,
        ahead: *const u32,
    ) {
        if blocks == 0 {
            return;
        }
        match self.by {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: as for this function, and tiles are set up as long as this lives.
            Tiles::Processor => unsafe { processor::add(row_tiles, blocks, left, right, ahead) },
            Tiles::Model => {
                let sums = self.model.get_or_insert_default();
                // SAFETY: as for this function.
                unsafe { sums.add(row_tiles, blocks, left, right) };
            }
        }
    }

    /// Writes `sums[r * 32 + c]` for 16·`row_tiles` rows.
    #[inline(always)]
    pub(crate) fn store(&mut self, row_tiles: usize, sums: &mut [f32; 2 * ROWS * COLUMNS]) {
        match self.by {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: the sums are two tiles high, and tiles are set up as long as this lives.
            Tiles::Processor => unsafe { processor::store(row_tiles, sums.as_mut_ptr()) },
            Tiles::Model => self.model.get_or_insert_default().store(row_tiles, sums),
        }
    }
}

/// Bytes that are asked for ahead with each block.
pub(crate) const AHEAD: usize = 256;

impl Tiles {
    /// Sets the processor's tiles up on this thread, until what it returns is dropped: with tiles in use, every switch to
    /// another thread has 8 KiB more to save.
    #[inline(always)]
    pub(crate) fn set_up(self) -> SetUp {
        SetUp {
            by: self,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: a `Cpu` with tiles exists only where `available` was true.
            processor: (self == Tiles::Processor).then(|| unsafe { processor::Configured::new() }),
            model: None,
        }
    }

    /// Multiply-adds in registers alone; the number of floating-point operations, where there is anything to measure.
    pub(crate) fn chains(self, rounds: usize) -> Option<u64> {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Tiles::Processor => {
                let _tiles = self.set_up();
                // SAFETY: tiles are set up.
                unsafe { processor::chains(rounds) };
                // Four products of 16×16 sums over 32 numbers.
                Some((rounds * 4 * 2 * ROWS * ROWS * 2 * UNITS) as u64)
            }
            Tiles::Model => {
                let _ = rounds;
                None
            }
        }
    }
}

/// Whether this machine has tiles of bf16, and its system lets this process use them. Asking is what makes the system do so.
pub(crate) fn available() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        static AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *AVAILABLE.get_or_init(|| processor::is_present() && processor::is_permitted())
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    {
        false
    }
}

/// Whether CPUID and XCR0 say that tiles of bf16 are there and that the system saves them: ECX of leaf 1, EDX of leaf 7, and
/// the register's lower half, which can be read only where the first says so.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "tested everywhere, used where CPUID is"))]
pub(crate) fn described(leaf_1_ecx: u32, leaf_7_edx: u32, xcr0: impl FnOnce() -> u32) -> bool {
    const SYSTEM_SAVES: u32 = 1 << 27;
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    // The tiles' configuration and their data.
    const STATE: u32 = 1 << 17 | 1 << 18;
    leaf_1_ecx & SYSTEM_SAVES != 0 && leaf_7_edx & BF16_AND_TILES == BF16_AND_TILES && xcr0() & STATE == STATE
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod processor {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    pub(super) fn is_present() -> bool {
        if __cpuid(0).eax < 7 {
            return false;
        }
        super::described(__cpuid(1).ecx, __cpuid_count(7, 0).edx, || {
            let low: u32;
            // SAFETY: asked for only where the system has set the bit that allows it.
            unsafe {
                asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags));
            }
            low
        })
    }

    /// Asks Linux for the use of tiles: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`. It holds for all threads.
    /// Kernels that do not know it (before 5.16) or that refuse return an error.
    pub(super) fn is_permitted() -> bool {
        const ARCH_PRCTL: isize = 158;
        const REQUEST: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let result: isize;
        // SAFETY: a system call that takes two numbers and touches no memory of ours.
        unsafe {
            asm!(
                "syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST, in("rsi") TILE_DATA,
                out("rcx") _, out("r11") _, options(nostack),
            );
        }
        result == 0
    }

    /// What `ldtilecfg` reads: palette 1, and for each of eight tiles 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_of_rows: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_of_rows: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// This thread's tiles are set up while this lives.
    pub(super) struct Configured(());

    impl Configured {
        /// # Safety
        /// The processor has tiles.
        #[inline(always)]
        pub(super) unsafe fn new() -> Self {
            // SAFETY: the configuration is 64 bytes that the processor accepts.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags)) };
            Self(())
        }
    }

    impl Drop for Configured {
        #[inline(always)]
        fn drop(&mut self) {
            // SAFETY: tiles were set up by `new`.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
        }
    }

    // Sums stay in the tiles 0 to 3 from one block of assembly to the next. The compiler knows no instruction that would
    // use a tile, so that nothing else touches them; only `add` clobbers, the tiles that it reads operands into.

    /// # Safety
    /// Tiles are set up.
    #[inline(always)]
    pub(super) unsafe fn begin() {
        // SAFETY: registers only.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nomem, nostack, preserves_flags),
            );
        }
    }

    /// # Safety
    /// As for `SetUp::add`; at least one block, and tiles are set up.
    #[inline(always)]
    pub(super) unsafe fn add(row_tiles: usize, blocks: usize, left: *const u32, right: *const u32, ahead: *const u32) {
        // SAFETY: each round reads a block of 16 units of both panels, of 64 bytes a row on the left and 128 on the right. A
        // prefetch of any address is allowed.
        unsafe {
            if row_tiles == 1 {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm6, [{b} + {wide}*1]",
                    "prefetcht1 [{ahead}]",
                    "prefetcht1 [{ahead} + 64]",
                    "tileloadd tmm7, [{b} + {wide}*1 + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "prefetcht1 [{ahead} + 128]",
                    "prefetcht1 [{ahead} + 192]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {ahead}, 256",
                    "add {a}, 1024",
                    "add {b}, 2048",
                    "dec {blocks}",
                    "jnz 2b",
                    a = inout(reg) left => _, b = inout(reg) right => _, blocks = inout(reg) blocks => _,
                    ahead = inout(reg) ahead => _, row = in(reg) 64_usize, wide = in(reg) 128_usize,
                    out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(readonly, nostack),
                );
                return;
            }
            asm!(
                "2:",
                "tileloadd tmm4, [{a} + {row}*1]",
                "tileloadd tmm6, [{b} + {wide}*1]",
                "tileloadd tmm7, [{b} + {wide}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht1 [{ahead}]",
                "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                "prefetcht1 [{ahead} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "prefetcht1 [{ahead} + 128]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetcht1 [{ahead} + 192]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {ahead}, 256",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {blocks}",
                "jnz 2b",
                a = inout(reg) left => _, b = inout(reg) right => _, blocks = inout(reg) blocks => _,
                ahead = inout(reg) ahead => _, row = in(reg) 64_usize, wide = in(reg) 128_usize,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack),
            );
        }
    }

    /// # Safety
    /// 16·`row_tiles` rows of 32 numbers may be written, and tiles are set up.
    #[inline(always)]
    pub(super) unsafe fn store(row_tiles: usize, sums: *mut f32) {
        // SAFETY: the sums are rows of 128 bytes.
        unsafe {
            asm!(
                "tilestored [{sums} + {wide}*1], tmm0",
                "tilestored [{sums} + {wide}*1 + 64], tmm1",
                sums = in(reg) sums, wide = in(reg) 128_usize,
                options(nostack, preserves_flags),
            );
            if row_tiles == 2 {
                asm!(
                    "tilestored [{sums} + {wide}*1 + 2048], tmm2",
                    "tilestored [{sums} + {wide}*1 + 2112], tmm3",
                    sums = in(reg) sums, wide = in(reg) 128_usize,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// Four chains of products. Not of zeros, which would draw less power: the clock would be higher than for real work.
    ///
    /// # Safety
    /// Tiles are set up.
    pub(super) unsafe fn chains(rounds: usize) {
        // Pairs of 0.73 and 0.73.
        let units = [0x3f3b_3f3b_u32; super::ROWS * super::UNITS];
        // SAFETY: four tiles are read from one that is there, all else is registers.
        unsafe {
            asm!(
                "tileloadd tmm4, [{units} + {row}*1]",
                "tileloadd tmm5, [{units} + {row}*1]",
                "tileloadd tmm6, [{units} + {row}*1]",
                "tileloadd tmm7, [{units} + {row}*1]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                units = in(reg) units.as_ptr(), row = in(reg) 64_usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack),
            );
        }
    }
}

/// Tiles in plain Rust, after the pseudo-code of Intel's manual for `tdpbf16ps`: for every sum two of its own, over the lower
/// and over the upper halves of units, by fused multiply-adds; then both together, then onto what was there. All of it rounds
/// to nearest even, takes denormal numbers as zero and makes them zero.
mod model {
    use super::{COLUMNS, ROWS, UNITS};

    /// 16 rows of 64 bytes.
    type Tile = [[u32; 16]; ROWS];

    /// `tileloadd`: rows that begin `stride` units apart.
    unsafe fn load(from: *const u32, stride: usize) -> Tile {
        // SAFETY: as for `SetUp::add`.
        std::array::from_fn(|r| unsafe { from.add(r * stride).cast::<[u32; 16]>().read_unaligned() })
    }

    /// `tdpbf16ps`.
    fn multiply_add(sums: &mut [[f32; 16]; ROWS], a: &Tile, b: &Tile) {
        for (sums, row) in sums.iter_mut().zip(a) {
            let mut parts = [[0.0_f32; 16]; 2];
            for k in 0..UNITS {
                for n in 0..16 {
                    parts[0][n] = fused(low(row[k]), low(b[k][n]), parts[0][n]);
                    parts[1][n] = fused(high(row[k]), high(b[k][n]), parts[1][n]);
                }
            }
            for n in 0..16 {
                sums[n] = normal(normal(sums[n]) + normal(parts[0][n] + parts[1][n]));
            }
        }
    }

    fn low(unit: u32) -> f32 {
        normal(f32::from_bits(unit << 16))
    }

    fn high(unit: u32) -> f32 {
        normal(f32::from_bits(unit & 0xffff_0000))
    }

    /// Zero with the same sign for a denormal number.
    fn normal(x: f32) -> f32 {
        if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
    }

    /// a·b + c, rounded once. What counts as denormal is the result before its exponent is limited, which matters just
    /// below the smallest normal number: there the rounding of a denormal number could still reach it.
    fn fused(a: f32, b: f32, c: f32) -> f32 {
        let sum = a.mul_add(b, c);
        if sum.abs() > f32::MIN_POSITIVE || sum == 0.0 {
            return sum;
        }
        let exact = f64::from(a).mul_add(f64::from(b), f64::from(c));
        let least = f64::from(f32::MIN_POSITIVE) * (1.0 - f64::from(f32::EPSILON) / 4.0);
        if exact.abs() < least { 0.0_f32.copysign(sum) } else { sum }
    }

    /// Two by two tiles of sums.
    #[derive(Default)]
    pub(super) struct Sums([[[f32; 16]; ROWS]; 4]);

    impl Sums {
        /// # Safety
        /// As for `SetUp::add`.
        pub(super) unsafe fn add(&mut self, row_tiles: usize, blocks: usize, left: *const u32, right: *const u32) {
            // SAFETY: the same places as the processor's loop reads.
            unsafe {
                for block in 0..blocks {
                    let b = right.add(block * UNITS * COLUMNS);
                    let b = [load(b, COLUMNS), load(b.add(16), COLUMNS)];
                    for i in 0..row_tiles {
                        let a = load(left.add((block * row_tiles + i) * ROWS * UNITS), UNITS);
                        multiply_add(&mut self.0[2 * i], &a, &b[0]);
                        multiply_add(&mut self.0[2 * i + 1], &a, &b[1]);
                    }
                }
            }
        }

        pub(super) fn store(&self, row_tiles: usize, sums: &mut [f32]) {
            for (row, sums) in sums.chunks_exact_mut(COLUMNS).take(row_tiles * ROWS).enumerate() {
                for (half, sums) in sums.chunks_exact_mut(16).enumerate() {
                    sums.copy_from_slice(&self.0[row / ROWS * 2 + half][row % ROWS]);
                }
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use half::bf16;

        fn pair(low: f32, high: f32) -> u32 {
            u32::from(bf16::from_f32(low).to_bits()) | u32::from(bf16::from_f32(high).to_bits()) << 16
        }

        /// One sum: the units of a row and of a column, on top of `start`.
        fn sum(start: f32, row: &[(f32, f32)], column: &[(f32, f32)]) -> f32 {
            let (mut a, mut b, mut sums) = ([[0; 16]; 16], [[0; 16]; 16], [[0.0; 16]; 16]);
            for (k, (x, y)) in row.iter().zip(column).enumerate() {
                a[3][k] = pair(x.0, x.1);
                b[k][5] = pair(y.0, y.1);
            }
            sums[3][5] = start;
            multiply_add(&mut sums, &a, &b);
            let others = sums.iter().flatten().filter(|x| **x != 0.0).count();
            assert!(others <= 1, "{others} sums");
            sums[3][5]
        }

        #[test]
        fn sums_are_added_in_the_manuals_order() {
            let one = (1.0, 1.0);
            assert_eq!(sum(0.5, &[(2.0, 3.0), (4.0, 5.0)], &[one, (10.0, 100.0)]), 545.5);
            // Lower and upper halves are apart: large numbers cancel in the one before the other comes in.
            let large = 2.0_f32.powi(30);
            assert_eq!(sum(0.0, &[(large, 1.0), (-large, 1.0)], &[one, one]), 2.0);
            // Across the halves they cancel at the end, when the small one is lost.
            assert_eq!(sum(0.0, &[(large, -large), (1.0, 0.0)], &[one, one]), 0.0);
            // What was there comes last.
            assert_eq!(sum(large, &[(-large, 1.0)], &[one]), 0.0);
            // No rounding between product and sum: (1 + 2⁻⁷)² = 1 + 2⁻⁶ + 2⁻¹⁴, of which −1 − 2⁻⁶ leaves the last.
            let x = 1.0 + 2.0_f32.powi(-7);
            assert_eq!(
                sum(0.0, &[(-1.0, 0.0), (x, 0.0)], &[(1.0 + 2.0_f32.powi(-6), 0.0), (x, 0.0)]),
                2.0_f32.powi(-14)
            );
        }

        #[test]
        fn denormal_numbers_are_zero() {
            let least = f32::MIN_POSITIVE;
            assert_eq!(sum(0.0, &[(least / 2.0, 0.0)], &[(2.0_f32.powi(100), 0.0)]), 0.0);
            assert_eq!(sum(0.0, &[(least, 0.0)], &[(0.5, 0.0)]), 0.0);
            assert_eq!(sum(0.0, &[(least, 0.0)], &[(1.0, 0.0)]), least);
            assert_eq!(sum(least / 2.0, &[(0.0, 0.0)], &[(0.0, 0.0)]), 0.0);
            assert_eq!(sum(-1.5 * least, &[(least, 0.0)], &[(1.0, 0.0)]).to_bits(), (-0.0_f32).to_bits());
            // Rounded to a denormal number all of these are the smallest normal one. With 24 bits the first two are below it,
            // and the third is not.
            assert_eq!(fused(1.0 - f32::EPSILON / 2.0, least, 0.0), 0.0);
            assert_eq!(fused(2.0_f32.powi(-100), -2.0_f32.powi(-50), least), 0.0);
            assert_eq!(fused(2.0_f32.powi(-100), -2.0_f32.powi(-52), least), least);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Stream;
    use half::bf16;

    #[test]
    fn tiles_are_found_where_all_parts_are_there() {
        let (saves, has, state) = (1 << 27, 1 << 22 | 1 << 24, 1 << 17 | 1 << 18);
        assert!(described(saves, has, || state));
        assert!(!described(saves, 1 << 24, || state) && !described(saves, 1 << 22, || state));
        assert!(!described(saves, has, || 1 << 17));
        // XCR0 must not be read where the system does not allow it.
        assert!(!described(0, has, || panic!("read XCR0")));
    }

    /// The processor's tiles and the model's give the same bits, on numbers of very different sizes, denormal ones among them.
    /// A machine without tiles compares the model with itself.
    #[test]
    fn the_model_is_the_processors_equal() {
        let mut stream = Stream::new(7, 0, 0);
        let mut units = |n: usize| -> Vec<u32> {
            let mut number = || {
                let power = (stream.normal() * 40.0) as i32;
                u32::from(bf16::from_f32(stream.normal() * 2.0_f32.powi(power.clamp(-140, 60))).to_bits())
            };
            (0..n).map(|_| number() | number() << 16).collect()
        };
        for (row_tiles, blocks) in [(1, 0), (1, 1), (1, 5), (2, 0), (2, 1), (2, 7)] {
            let (left, right) = (units(blocks * row_tiles * ROWS * UNITS), units(blocks * UNITS * COLUMNS));
            let run = |tiles: Tiles| {
                let mut sums = [f32::NAN; 2 * ROWS * COLUMNS];
                let mut tiles = tiles.set_up();
                // What another product left does not show, and parts add up.
                for blocks in [0..blocks, 0..blocks / 3, blocks / 3..blocks] {
                    if blocks.start == 0 {
                        tiles.begin();
                    }
                    let (a, b) =
                        (&left[blocks.start * row_tiles * ROWS * UNITS..], &right[blocks.start * UNITS * COLUMNS..]);
                    // SAFETY: the panels are as large as the numbers say.
                    unsafe { tiles.add(row_tiles, blocks.len(), a.as_ptr(), b.as_ptr(), b.as_ptr()) };
                }
                tiles.store(row_tiles, &mut sums);
                sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let expected = run(Tiles::Model);
            let written = expected.iter().filter(|bits| **bits != f32::NAN.to_bits()).count();
            assert_eq!(written, row_tiles * ROWS * COLUMNS, "{row_tiles} tiles of rows, {blocks} blocks");
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if available() {
                let got = run(Tiles::Processor);
                let differ = got.iter().zip(&expected).enumerate().find(|(_, (got, expected))| got != expected);
                assert!(
                    differ.is_none(),
                    "{row_tiles} tiles of rows, {blocks} blocks: (place, (bits, model's)) {differ:x?}"
                );
            }
        }
    }
}
