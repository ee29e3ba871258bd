//! A driver that counts calls and errors and measures time by the driver's clock, for each kind of call. The counters
//! are atomic and independent: read while calls are running, they are exact for the calls that have returned.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::hooked::{Arguments, Hook, Hooked, Outcome};
use crate::{Call, Driver, Result};

/// A driver that counts calls.
pub type Counting = Hooked<Counts>;

/// The counts of one kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallCount {
    /// The call.
    pub call: Call,
    /// How often it was made.
    pub calls: u64,
    /// How often it failed.
    pub errors: u64,
    /// The time spent in it, by the driver's clock. With several threads on one virtual clock this includes time that
    /// calls of other threads advanced meanwhile.
    pub time: Duration,
}

impl Counting {
    /// Counts the calls made to `inner` through the new driver.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Self::with_hook(inner, Counts::default())
    }

    /// The calls that were made since the start or the last reset, in the order of [`Call::ALL`].
    #[must_use]
    pub fn counts(&self) -> Vec<CallCount> {
        Call::ALL.iter().map(|&call| self.count(call)).filter(|count| count.calls > 0).collect()
    }

    /// The counts of `call`.
    #[must_use]
    pub fn count(&self, call: Call) -> CallCount {
        let counter = self.hook().of(call);
        CallCount {
            call,
            calls: counter.calls.load(Relaxed),
            errors: counter.errors.load(Relaxed),
            time: Duration::from_nanos(counter.nanos.load(Relaxed)),
        }
    }

    /// Sets all counts to zero. Calls running meanwhile may be counted before or after.
    pub fn reset(&self) {
        for counter in &self.hook().0 {
            counter.calls.store(0, Relaxed);
            counter.errors.store(0, Relaxed);
            counter.nanos.store(0, Relaxed);
        }
    }
}

/// The counters of a [`Counting`] driver.
#[derive(Debug)]
pub struct Counts(Box<[Counter]>);

#[derive(Debug, Default)]
struct Counter {
    calls: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
}

impl Counts {
    fn of(&self, call: Call) -> &Counter {
        // `Call::ALL` lists the calls in the order of their declaration.
        &self.0[call as usize]
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self(Call::ALL.iter().map(|_| Counter::default()).collect())
    }
}

impl Hook for Counts {
    type CallState = Duration;

    fn before(&self, inner: &dyn Driver, _: Call, _: Arguments<'_>) -> Result<Duration> {
        Ok(inner.now())
    }

    fn after(&self, inner: &dyn Driver, call: Call, start: Duration, outcome: Outcome<'_>) {
        let nanos = u64::try_from(inner.now().saturating_sub(start).as_nanos()).unwrap_or(u64::MAX);
        let counter = self.of(call);
        counter.calls.fetch_add(1, Relaxed);
        counter.errors.fetch_add(u64::from(outcome.is_err()), Relaxed);
        counter.nanos.fetch_add(nanos, Relaxed);
    }

    fn suballocation(&self, call: Call, _: Arguments<'_>) {
        self.of(call).calls.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimConfig, SimDriver};
    use crate::{DeviceId, DevicePtr, Devices, Memory, StreamOptions, Streams, Suballocations};

    const DEVICE: DeviceId = DeviceId(0);

    fn counting() -> Counting {
        Counting::new(Arc::new(SimDriver::new(SimConfig::default())))
    }

    #[test]
    fn each_call_has_its_own_counter() {
        let counts = Counts::default();
        for &call in Call::ALL {
            counts.of(call).calls.fetch_add(1, Relaxed);
        }
        assert!(Call::ALL.iter().all(|&call| counts.of(call).calls.load(Relaxed) == 1));
    }

    #[test]
    fn calls_and_errors_are_counted() {
        let driver = counting();
        driver.mem_alloc(DEVICE, 4096).unwrap();
        driver.mem_alloc(DEVICE, 0).unwrap_err();
        driver.device_count().unwrap();
        driver.suballocation_freed(DevicePtr(0), 0);
        let seen: Vec<_> = driver.counts().iter().map(|c| (c.call.name(), c.calls, c.errors)).collect();
        let expected = [("device_count", 1, 0), ("suballocation_freed", 1, 0), ("mem_alloc", 2, 1)];
        assert_eq!(seen, expected);
        driver.reset();
        assert_eq!(driver.counts(), []);
    }

    #[test]
    fn time_is_that_of_the_drivers_clock() {
        let driver = counting();
        let start = driver.now();
        let stream = driver.stream_create(DEVICE, StreamOptions::default()).unwrap();
        let ptr = driver.mem_alloc(DEVICE, 1 << 20).unwrap();
        driver.stream_synchronize(stream).unwrap();
        driver.mem_free(ptr).unwrap();
        let counted: Duration = driver.counts().iter().map(|count| count.time).sum();
        assert_eq!(counted, driver.now() - start);
        assert!(driver.count(Call::MemAlloc).time > Duration::ZERO);
    }
}
