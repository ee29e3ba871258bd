//! How many rounds a test runs.

/// The number in an environment variable, if it is set.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// `count`, times `WARPOOL_TEST_SCALE`. Tests are sized for a quick run; the full size is a scale of 10.
pub fn scaled(count: u64) -> u64 {
    count * number("WARPOOL_TEST_SCALE").unwrap_or(1)
}
