//! The processor time of one thread. On a busy machine the elapsed time also counts other programs on the same core.

use std::time::Duration;

pub use system::IS_OF_THREAD;

/// A point in the processor time of the calling thread. Where the system does not report that (`IS_OF_THREAD` is
/// `false`), it is elapsed time.
pub struct ThreadTime(system::Point);

impl ThreadTime {
    pub fn now() -> Self {
        Self(system::now())
    }

    /// The time since then. To be called by the same thread.
    pub fn elapsed(&self) -> Duration {
        system::since(self.0)
    }
}

/// The processor time of `times` calls, which run on this thread alone.
pub fn timed<E>(times: u64, mut operation: impl FnMut() -> Result<(), E>) -> Result<Duration, E> {
    let start = ThreadTime::now();
    for _ in 0..times {
        operation()?;
    }
    Ok(start.elapsed())
}

#[cfg(target_os = "linux")]
mod system {
    use std::time::Duration;

    use rustix::time::{ClockId, Timespec, clock_gettime};

    pub const IS_OF_THREAD: bool = true;

    pub type Point = Duration;

    pub fn now() -> Point {
        let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ThreadCPUTime);
        let (seconds, nanoseconds) = (u64::try_from(tv_sec), u64::try_from(tv_nsec));
        Duration::from_secs(seconds.unwrap_or_default()) + Duration::from_nanos(nanoseconds.unwrap_or_default())
    }

    pub fn since(point: Point) -> Duration {
        now().saturating_sub(point)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::time::{Duration, Instant};

    pub const IS_OF_THREAD: bool = false;

    pub type Point = Instant;

    pub fn now() -> Point {
        Instant::now()
    }

    pub fn since(point: Point) -> Duration {
        point.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn waiting_takes_no_processor_time() {
        let (elapsed, busy) = (std::time::Instant::now(), ThreadTime::now());
        std::thread::sleep(Duration::from_millis(200));
        assert!(elapsed.elapsed() >= Duration::from_millis(200));
        assert!(busy.elapsed() < Duration::from_millis(50), "{:?}", busy.elapsed());
        let begin = ThreadTime::now();
        while begin.elapsed() < Duration::from_millis(20) {}
        assert!(busy.elapsed() >= Duration::from_millis(20));
    }
}
