//! Timing of the benchmarks: rounds of measured operations in turns with rounds of a baseline.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::cores::Cores;

/// The default baseline: locking and unlocking an uncontended `std` mutex, which every lock-based design does at least
/// once.
pub const MUTEX_BASELINE: &str = "uncontended mutex";

/// Nanoseconds per operation, and per operation of the baseline.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    pub ns: f64,
    pub baseline_ns: f64,
}

impl Measurement {
    /// The identity of [`min`](Self::min).
    pub const MAX: Self = Self { ns: f64::INFINITY, baseline_ns: f64::INFINITY };

    /// How many operations of the baseline the operation costs.
    pub fn ratio(self) -> f64 {
        self.ns / self.baseline_ns
    }

    /// The smaller of each time.
    pub fn min(self, other: Self) -> Self {
        Self { ns: self.ns.min(other.ns), baseline_ns: self.baseline_ns.min(other.baseline_ns) }
    }

    /// The larger of each time.
    pub fn max(self, other: Self) -> Self {
        Self { ns: self.ns.max(other.ns), baseline_ns: self.baseline_ns.max(other.baseline_ns) }
    }

    /// With `operations` operations where one was counted.
    pub fn per(self, operations: usize) -> Self {
        Self { ns: self.ns / operations as f64, ..self }
    }
}

/// Runs both functions `rounds` times in turns, so that other load on the machine affects both alike, and takes the
/// fastest round of each. Both return nanoseconds per operation.
pub fn fastest<E>(
    rounds: u64,
    mut baseline: impl FnMut() -> Result<f64, E>,
    mut operation: impl FnMut() -> Result<f64, E>,
) -> Result<Measurement, E> {
    let mut fastest = Measurement::MAX;
    for _ in 0..rounds {
        let baseline_ns = baseline()?;
        fastest = fastest.min(Measurement { ns: operation()?, baseline_ns });
    }
    Ok(fastest)
}

/// Like [`fastest`] on one core after another, until `duration` is over: where others use the machine too, a core is
/// slow for seconds. Both functions run on this thread alone.
pub fn fastest_of_cores<E>(
    duration: Duration,
    mut baseline: impl FnMut() -> Result<f64, E>,
    mut operation: impl FnMut() -> Result<f64, E>,
) -> Result<Measurement, E> {
    let (cores, start) = (Cores::allowed(), Instant::now());
    let turns = u32::try_from(cores.count().max(1)).unwrap_or(u32::MAX);
    let mut of_all = Measurement::MAX;
    for turn in 0..turns {
        let end = duration * (turn + 1) / turns;
        if start.elapsed() >= end {
            // A round may be longer than the time on a core.
            continue;
        }
        cores.run_on(turn as usize);
        // It may have been idle, and the baseline comes first.
        baseline()?;
        while start.elapsed() < end {
            of_all = of_all.min(fastest(1, &mut baseline, &mut operation)?);
        }
    }
    Ok(of_all)
}

/// One round of `locks` uncontended lock-unlock pairs; nanoseconds per pair.
pub fn mutex_round(locks: u32) -> f64 {
    let mutex = Mutex::new(0u64);
    let start = Instant::now();
    for _ in 0..locks {
        if let Ok(mut value) = black_box(&mutex).lock() {
            *value += 1;
        }
    }
    ns_each(start.elapsed(), u64::from(locks))
}

/// The median of several rounds of [`mutex_round`], for benchmarks that measure the baseline once.
pub fn mutex_median() -> f64 {
    const ROUNDS: usize = 9;
    let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| mutex_round(200_000)).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

/// Repeats `operation` for `duration`, until the processor runs at full clock.
pub fn warm_up<E>(duration: Duration, mut operation: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    let start = Instant::now();
    while start.elapsed() < duration {
        (0..1_000).try_for_each(|_| operation())?;
    }
    Ok(())
}

/// The time of `times` calls.
pub fn timed<E>(times: u64, mut operation: impl FnMut() -> Result<(), E>) -> Result<Duration, E> {
    let start = Instant::now();
    for _ in 0..times {
        operation()?;
    }
    Ok(start.elapsed())
}

/// Nanoseconds per operation.
pub fn ns_each(elapsed: Duration, ops: u64) -> f64 {
    elapsed.as_secs_f64() * 1e9 / ops as f64
}

/// Resident memory of this process; `None` if the system does not report it.
pub fn bytes_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
