//! The random number generator of the simulation. A number depends only on the seed and on where it is used, so a run
//! does not depend on the order of the draws.

/// A number drawn for operation `seq` of `timeline`; `salt` distinguishes several draws for one operation.
pub fn draw(seed: u64, timeline: u64, seq: u64, salt: u64) -> u64 {
    let mut z = seed
        .wrapping_add(timeline.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(seq.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(salt.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7))
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    // The finaliser of SplitMix64.
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `nanos` times a factor between 1/8 and 8 that `random` selects.
pub fn stretch(nanos: u64, random: u64) -> u64 {
    // Steps of the eighth root of two, in integers, so that every machine computes the same.
    const STEPS: [u64; 8] = [1024, 1117, 1218, 1328, 1448, 1579, 1722, 1878];
    let octave = (random >> 3) % 6;
    let factor = STEPS[(random & 7) as usize] << octave;
    (u128::from(nanos) * u128::from(factor) / (1024 * 8)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretched_durations_stay_within_a_factor_of_eight() {
        for seq in 0..if cfg!(miri) { 100 } else { 10_000 } {
            let nanos = stretch(8_000, draw(1, 2, seq, 0));
            assert!((1_000..=64_000).contains(&nanos), "{nanos}");
        }
    }
}
