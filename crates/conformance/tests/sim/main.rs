//! All suites on the simulated GPU, with several seeds.

mod driver;
mod expectations;
mod resources;

/// The seeds to run: `count`, times `WARPOOL_TEST_SCALE`.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let scale = std::env::var("WARPOOL_TEST_SCALE")
        .map_or(1, |text| text.parse().unwrap_or_else(|_| panic!("WARPOOL_TEST_SCALE must be a number, not {text:?}")));
    0..count * scale
}
