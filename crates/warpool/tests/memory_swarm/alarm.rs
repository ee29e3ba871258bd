//! Which program it was, when a test fails.

/// Says which seed it was, and what had been done, if the test panics.
pub struct Alarm {
    pub seed: u64,
    pub story: Vec<String>,
}

impl Alarm {
    pub fn new(seed: u64) -> Self {
        Self { seed, story: Vec::new() }
    }

    pub fn tell(&mut self, step: String) {
        self.story.push(step);
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (at, step) in self.story.iter().enumerate() {
                eprintln!("{at:4} {step}");
            }
            eprintln!("WARPOOL_SWARM_SEED={}", self.seed);
        }
    }
}
