//! Compares a replay with its recording, step by step, and keeps what differed first, in words.

use std::fmt;

use warpool::memory::{Action, TraceEntry};

use super::machine::Seen;
use super::report::Difference;

/// What has been compared so far.
#[derive(Debug)]
pub(super) struct Check<'a> {
    device: u32,
    events: &'a [TraceEntry],
    pub addresses_equal: u64,
    pub first: Option<Difference>,
}

impl<'a> Check<'a> {
    pub fn new(device: u32, events: &'a [TraceEntry]) -> Self {
        Self { device, events, addresses_equal: 0, first: None }
    }

    #[inline]
    pub fn address(&mut self, event: u32, recorded: u64, got: u64) {
        if recorded == got {
            self.addresses_equal += 1;
        } else if self.first.is_none() {
            let bytes = self.events[event as usize].size;
            self.differs(event, format!("{bytes} bytes at {recorded:#x}"), format!("{got:#x}"));
        }
    }

    /// The segment events of one step.
    pub fn segments(&mut self, event: u32, recorded: impl Iterator<Item = u32>, seen: &[Seen]) {
        let mut seen = seen.iter();
        for number in recorded {
            let entry = &self.events[number as usize];
            let expected = Seen { action: entry.action, addr: entry.addr, bytes: entry.size };
            match seen.next() {
                Some(&got) if got == expected => {}
                Some(got) => return self.differs(number, Named(&expected), Named(got)),
                None => return self.differs(number, Named(&expected), "nothing of the kind"),
            }
        }
        if let Some(got) = seen.next() {
            self.differs(event, "nothing of the kind", Named(got));
        }
    }

    /// Two numbers that must be equal at the end.
    pub fn sums(&mut self, what: &str, recorded: u64, got: u64) {
        if recorded != got && self.first.is_none() {
            let text = |number: u64| format!("{number} {what}");
            self.first = Some(Difference {
                device: self.device,
                event: None,
                time_us: 0,
                expected: text(recorded),
                got: text(got),
            });
        }
    }

    pub fn differs(&mut self, event: u32, expected: impl fmt::Display, got: impl fmt::Display) {
        if self.first.is_none() {
            let start = self.events.first().map_or(0, |event| event.time_us);
            self.first = Some(Difference {
                device: self.device,
                event: Some(u64::from(event)),
                time_us: self.events[event as usize].time_us - start,
                expected: expected.to_string(),
                got: got.to_string(),
            });
        }
    }
}

/// A segment event in words.
struct Named<'a>(&'a Seen);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen { action, addr, bytes } = self.0;
        let verb = match action {
            Action::SegmentAlloc => "a new segment",
            Action::SegmentMap => "memory mapped",
            Action::SegmentFree => "a segment given back",
            Action::SegmentUnmap => "memory unmapped",
            other => other.name(),
        };
        write!(f, "{verb}: {bytes} bytes at {addr:#x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_kept_in_words() {
        let entry = |action, addr, time_us| TraceEntry::new(action, addr, 512, 0, time_us);
        let events = [entry(Action::SegmentAlloc, 0x1000, 5000), entry(Action::Alloc, 0x1000, 6500)];
        let mut check = Check::new(0, &events);
        check.segments(1, [0].into_iter(), &[Seen { action: Action::SegmentAlloc, addr: 0x1000, bytes: 512 }]);
        check.address(1, 0x1000, 0x1000);
        assert!(check.first.is_none());
        check.address(1, 0x1000, 0x2000);
        check.sums("retries", 1, 2);
        let text = check.first.unwrap().to_string();
        assert_eq!(text, "event 1 at 1.500 ms: recorded 512 bytes at 0x1000, replayed 0x2000");
    }

    #[test]
    fn missing_and_surplus_segment_events_are_told() {
        let events = [TraceEntry::new(Action::SegmentMap, 0x1000, 512, 0, 0)];
        let seen = Seen { action: Action::SegmentFree, addr: 0x3000, bytes: 512 };
        let mut missing = Check::new(0, &events);
        missing.segments(0, [0].into_iter(), &[]);
        assert!(
            missing
                .first
                .unwrap()
                .to_string()
                .ends_with("memory mapped: 512 bytes at 0x1000, replayed nothing of the kind")
        );
        let mut surplus = Check::new(0, &events);
        surplus.segments(0, [].into_iter(), &[seen]);
        assert!(
            surplus.first.unwrap().to_string().contains("recorded nothing of the kind, replayed a segment given back")
        );
    }
}
