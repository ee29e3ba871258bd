//! How benchmarks take time and memory.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Taking and releasing an uncontended `std` mutex: what every lock-based design pays at least once.
pub struct Baseline {
    pub ns: f64,
}

impl Baseline {
    pub const NAME: &'static str = "uncontended mutex";

    /// The median of several rounds, so that one interruption does not count.
    pub fn measure() -> Self {
        const ROUNDS: usize = 9;
        let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| Self::round(200_000)).collect();
        rounds.sort_by(f64::total_cmp);
        Self { ns: rounds[ROUNDS / 2] }
    }

    /// One round of so many.
    pub fn round(locks: u32) -> f64 {
        let mutex = Mutex::new(0u64);
        let begun = Instant::now();
        for _ in 0..locks {
            if let Ok(mut value) = black_box(&mutex).lock() {
                *value += 1;
            }
        }
        ns_each(begun.elapsed(), u64::from(locks))
    }
}

/// Nanoseconds of one of `ops` operations that took `elapsed` together.
pub fn ns_each(elapsed: Duration, ops: u64) -> f64 {
    elapsed.as_secs_f64() * 1e9 / ops as f64
}

/// Memory of this process that lies in RAM; `None` where the system does not say.
pub fn bytes_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
