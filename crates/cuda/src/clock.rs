//! The driver's clock. A history reads it with every allocation and free, so it is read from the processor's counter
//! where that runs at a constant rate: a quarter of the cost of the system's clock, from which the rate is computed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the system's clock is read before the counter's rate is computed. Reading both takes some 50 ns, so the
/// rate is exact to less than a millionth.
const CALIBRATION: Duration = Duration::from_millis(250);

/// Fraction bits of the rate.
const FRACTION_BITS: u32 = 32;

/// Time since the driver was opened.
#[derive(Debug)]
pub(crate) struct Clock {
    opened: Instant,
    /// The counter at that time; `None` if there is no counter to rely on.
    opened_ticks: Option<u64>,
    /// Nanoseconds per tick, with [`FRACTION_BITS`]; 0 while it is not known.
    rate: AtomicU64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { opened: Instant::now(), opened_ticks: counter::is_reliable().then(counter::read), rate: 0.into() }
    }

    #[inline]
    pub(crate) fn elapsed(&self) -> Duration {
        let Some(opened) = self.opened_ticks else { return self.opened.elapsed() };
        match self.rate.load(Ordering::Relaxed) {
            0 => self.calibrate(opened),
            rate => Duration::from_nanos(nanos(counter::read().saturating_sub(opened), rate)),
        }
    }

    /// Reads the system's clock, and computes the counter's rate if it has run for long enough.
    #[cold]
    fn calibrate(&self, opened: u64) -> Duration {
        let (ticks, elapsed) = (counter::read().saturating_sub(opened), self.opened.elapsed());
        if elapsed >= CALIBRATION && ticks > 0 {
            let rate = (elapsed.as_nanos() << FRACTION_BITS) / u128::from(ticks);
            // The first one stays, so that no thread sees time go back.
            let rate = u64::try_from(rate).unwrap_or(0);
            let _ = self.rate.compare_exchange(0, rate, Ordering::Relaxed, Ordering::Relaxed);
        }
        elapsed
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "2^64 ns are 584 years")]
fn nanos(ticks: u64, rate: u64) -> u64 {
    ((u128::from(ticks) * u128::from(rate)) >> FRACTION_BITS) as u64
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc, CpuidResult};

    /// Whether the counter runs at a constant rate, in all states of all cores.
    pub(super) fn is_reliable() -> bool {
        const POWER: u32 = 0x8000_0007;
        const INVARIANT: u32 = 1 << 8;
        cpuid(0x8000_0000).eax >= POWER && cpuid(POWER).edx & INVARIANT != 0
    }

    #[expect(clippy::allow_attributes, reason = "what is unused depends on the version of Rust")]
    #[allow(unused_unsafe, reason = "a safe function in newer versions than 1.90")]
    fn cpuid(leaf: u32) -> CpuidResult {
        // SAFETY: every x86-64 processor has the instruction.
        unsafe { __cpuid(leaf) }
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: it reads a register that every x86-64 processor has.
        unsafe { _rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    pub(super) fn is_reliable() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_tells_the_time_of_the_system() {
        let clock = Clock::new();
        std::thread::sleep(CALIBRATION);
        clock.elapsed();
        let mut last = Duration::ZERO;
        for _ in 0..1000 {
            let (before, now, after) = (clock.opened.elapsed(), clock.elapsed(), clock.opened.elapsed());
            // Without a reliable counter both are the same clock.
            let tolerance = Duration::from_micros(20);
            assert!(now + tolerance >= before && now <= after + tolerance, "{before:?} {now:?} {after:?}");
            assert!(now >= last, "{now:?} after {last:?}");
            last = now;
        }
    }

    #[test]
    fn ticks_are_scaled_without_overflow() {
        let rate = (1 << FRACTION_BITS) / 3;
        let year = 365 * 86_400 * 3_000_000_000_u64;
        assert_eq!(nanos(year, rate) / 1_000_000_000, 365 * 86_400 - 1);
        assert_eq!(nanos(0, rate), 0);
    }
}
