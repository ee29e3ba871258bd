//! The random generator of a program, and its seed.

pub use warpool_testing::Rng;

/// The seed of one program: a hash, so that neighbouring programs are unrelated.
pub fn program_seed(seed: u64, campaign: u64, program: u64) -> u64 {
    let mut z = seed
        .wrapping_add(campaign.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(program.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7))
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    // The finaliser of SplitMix64.
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
