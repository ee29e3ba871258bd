//! How much memory a device needed lately, for `decay.rs`: the highest need within a time, from which follows what was
//! needed by nobody all that time.
//!
//! Time is divided into slices. Of each, the highest need is kept, and forgotten once the slice ended longer ago than
//! the time in question. No clock is read here.

use std::collections::VecDeque;
use std::time::Duration;

/// Into how many slices the time is divided. An idle page leaves up to one of them late.
pub(super) const SLICES: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Needs {
    /// The end of the last slice.
    last: Option<Duration>,
    /// The highest need since then, as far as it is known.
    current: u64,
    /// The end and the highest need of earlier slices.
    past: VecDeque<(Duration, u64)>,
}

impl Needs {
    /// So much was needed a moment ago.
    pub(super) fn note(&mut self, bytes: u64) {
        self.current = self.current.max(bytes);
    }

    /// Whether a slice ends now: the last one did so long enough ago. The first one only begins.
    pub(super) fn is_due(&mut self, now: Duration, window: Duration) -> bool {
        now >= self.last.get_or_insert(now).saturating_add(window / SLICES)
    }

    /// Ends a slice. Returns the highest need since `window` ago.
    pub(super) fn end_slice(&mut self, now: Duration, window: Duration) -> u64 {
        self.past.push_back((now, std::mem::take(&mut self.current)));
        self.last = Some(now);
        // A slice that ended exactly then has passed.
        self.past.retain(|&(end, _)| end.saturating_add(window) > now);
        self.past.iter().map(|&(_, need)| need).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(800);

    /// Ends slices at these times with these needs, and compares the highest of the last 800 ms.
    fn check(slices: &[(u64, u64, u64)]) {
        let mut needs = Needs::default();
        assert!(!needs.is_due(Duration::ZERO, WINDOW));
        for &(millis, need, highest) in slices {
            needs.note(need);
            let now = Duration::from_millis(millis);
            assert!(needs.is_due(now, WINDOW), "at {millis} ms");
            assert_eq!(needs.end_slice(now, WINDOW), highest, "at {millis} ms");
            assert!(!needs.is_due(now + Duration::from_millis(99), WINDOW), "after {millis} ms");
        }
    }

    #[test]
    fn a_need_counts_until_its_slice_ended_a_window_ago() {
        check(&[(100, 50, 50), (200, 10, 50), (800, 20, 50), (900, 5, 20), (1500, 5, 20), (1600, 1, 5)]);
        // A slice without a call in between is long.
        check(&[(100, 50, 50), (5000, 30, 30), (5700, 1, 30), (5800, 1, 1)]);
        check(&[(100, 0, 0)]);
    }

    #[test]
    fn a_window_may_be_endless() {
        let mut needs = Needs::default();
        assert!(!needs.is_due(Duration::from_secs(1), Duration::MAX));
        assert!(!needs.is_due(Duration::from_secs(9), Duration::MAX));
    }
}
