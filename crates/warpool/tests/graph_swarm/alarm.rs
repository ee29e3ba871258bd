//! Which program it was, when a test fails.

/// Says which seed it was if the test panics, and with one seed alone what its program is.
pub struct Alarm<'a, T: std::fmt::Debug> {
    pub seed: u64,
    pub program: &'a T,
}

impl<T: std::fmt::Debug> Drop for Alarm<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if std::env::var_os("WARPOOL_SWARM_SEED").is_some() {
                eprintln!("{:#?}", self.program);
            }
            eprintln!("WARPOOL_SWARM_SEED={}", self.seed);
        }
    }
}
