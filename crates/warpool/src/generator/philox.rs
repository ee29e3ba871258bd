//! Philox 4x32-10 on the host: a pure function from a counter and a key to four words, and the conversions of the words
//! to floats.
//!
//! This is the reference for the kernels, and the implementation on the simulated device. There is no state here; see
//! `state.rs`.
//!
//! A *position* is (seed, subsequence, offset), as in cuRAND: the seed is the key, the subsequence is the upper half of
//! the counter, and the lower half counts blocks of four words (`offset / 4`). The same position gives the same words
//! as cuRAND's `curandStatePhilox4_32_10`.
//!
//! ```
//! use warpool::generator::philox::{normals, uniform, words};
//!
//! let mut numbers = words(42, 0, 0); // of seed 42, subsequence 0, from offset 0 on
//! let [first, second] = [(); 2].map(|()| numbers.next().expect("it has no end"));
//! assert!(uniform(first) > 0.0 && uniform(first) <= 1.0);
//! let [a, b] = normals(first, second);
//! assert!(a.is_finite() && b.is_finite());
//! ```

/// Four words for a counter and a key: Philox 4x32 with 10 rounds, by Salmon, Moraes, Dror and Shaw.
#[must_use]
pub const fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    let mut round = 0;
    while round < 10 {
        let (first, second) = (0xD251_1F53 * a as u64, 0xCD9E_8D57 * c as u64);
        a = (second >> 32) as u32 ^ b ^ k0;
        c = (first >> 32) as u32 ^ d ^ k1;
        b = second as u32;
        d = first as u32;
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
        round += 1;
    }
    [a, b, c, d]
}

/// The four words at a position. The offset is rounded down to a multiple of 4.
#[must_use]
pub const fn block(seed: u64, subsequence: u64, offset: u64) -> [u32; 4] {
    block_at(seed, subsequence, offset / 4)
}

/// An endless iterator over the words from a position on, at any offset. Past offset 2⁶⁴ the block counter continues,
/// as in cuRAND.
pub fn words(seed: u64, subsequence: u64, offset: u64) -> impl Iterator<Item = u32> {
    let skipped = (offset % 4) as usize;
    (offset / 4..).flat_map(move |count| block_at(seed, subsequence, count)).skip(skipped)
}

/// The four words of the `count`-th block of a subsequence.
const fn block_at(seed: u64, subsequence: u64, count: u64) -> [u32; 4] {
    let counter = [count as u32, (count >> 32) as u32, subsequence as u32, (subsequence >> 32) as u32];
    philox(counter, [seed as u32, (seed >> 32) as u32])
}

/// A float in (0, 1].
#[must_use]
pub fn uniform(word: u32) -> f32 {
    // Rounded twice, once to a float and once by the sum, as on the device; the product is exact.
    const STEP: f32 = 1.0 / 4_294_967_296.0;
    word as f32 * STEP + STEP / 2.0
}

/// Two floats of the normal distribution with mean 0 and deviation 1, by Box and Muller: the sine first, then the
/// cosine.
#[must_use]
pub fn normals(first: u32, second: u32) -> [f32; 2] {
    const STEP: f32 = std::f32::consts::TAU / 4_294_967_296.0;
    let angle = f64::from((second as f32).mul_add(STEP, STEP / 2.0));
    // Computed in double precision, so that the device's floats are compared with the nearest float.
    let radius = (-2.0 * f64::from(uniform(first)).ln()).sqrt();
    [(radius * angle.sin()) as f32, (radius * angle.cos()) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `kat_vectors` of Random123, by the authors of Philox.
    #[test]
    fn philox_matches_the_vectors_of_its_authors() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in cases {
            assert_eq!(philox(counter, key), words, "{counter:x?} {key:x?}");
        }
    }

    #[test]
    fn uniforms_are_above_0_and_at_most_1() {
        assert_eq!(uniform(0), 1.0 / 8_589_934_592.0, "2 to the power of -33");
        assert_eq!(uniform(u32::MAX), 1.0);
        assert_eq!(uniform(1 << 31), 0.5);
    }

    #[test]
    fn normals_are_finite_at_both_ends() {
        for first in [0, 1, u32::MAX - 1, u32::MAX] {
            for second in [0, 1 << 31, u32::MAX] {
                assert!(normals(first, second).iter().all(|x| x.is_finite()), "{first} {second}");
            }
        }
        assert_eq!(normals(u32::MAX, 5), [0.0, 0.0], "the logarithm of 1");
    }
}
