//! Prints the seed and the program when a test of random programs panics.

/// The program itself is printed only when one seed is run alone.
pub struct FailingProgram<'a, T: std::fmt::Debug> {
    pub seed: u64,
    pub program: &'a T,
}

impl<T: std::fmt::Debug> Drop for FailingProgram<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if std::env::var_os("WARPOOL_SWARM_SEED").is_some() {
                eprintln!("{:#?}", self.program);
            }
            eprintln!("WARPOOL_SWARM_SEED={}", self.seed);
        }
    }
}
