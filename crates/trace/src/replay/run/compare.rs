//! Compares a run with the recording, step by step, and keeps the first difference.

use std::fmt;

use warpool::memory::report::{Action, TraceEntry};

use super::device::SegmentAction;
use crate::replay::has_times;
use crate::replay::report::Difference;

/// What has been compared so far.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
    device: u32,
    events: &'a [TraceEntry],
    addresses_equal: u64,
    first: Option<Difference>,
}

impl<'a> Comparison<'a> {
    pub fn new(device: u32, events: &'a [TraceEntry]) -> Self {
        Self { device, events, addresses_equal: 0, first: None }
    }

    pub fn is_exact(&self) -> bool {
        self.first.is_none()
    }

    /// The number of equal addresses, and the first difference.
    pub fn finish(self) -> (u64, Option<Difference>) {
        (self.addresses_equal, self.first)
    }

    /// The address of an allocation.
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
    pub fn segments(&mut self, event: u32, recorded: impl Iterator<Item = u32>, got: &[SegmentAction]) {
        let mut got = got.iter();
        for number in recorded {
            let entry = &self.events[number as usize];
            let expected = SegmentAction { action: entry.action, addr: entry.addr, bytes: entry.size };
            match got.next() {
                Some(&action) if action == expected => {}
                Some(action) => return self.differs(number, expected, action),
                None => return self.differs(number, expected, "no segment event"),
            }
        }
        if let Some(action) = got.next() {
            self.differs(event, "no segment event", action);
        }
    }

    /// A total at the end.
    pub fn total(&mut self, what: &str, recorded: u64, got: u64) {
        if recorded != got && self.first.is_none() {
            let text = |number: u64| format!("{number} {what}");
            self.first = Some(Difference {
                device: self.device,
                event: None,
                time_us: None,
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
                time_us: has_times(self.events).then(|| self.events[event as usize].time_us.saturating_sub(start)),
                expected: expected.to_string(),
                got: got.to_string(),
            });
        }
    }
}

impl fmt::Display for SegmentAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, addr, bytes } = self;
        write!(f, "{} of {bytes} bytes at {addr:#x}", Action::name(*action))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_kept() {
        let entry = |action, addr, time_us| TraceEntry::new(action, addr, 512, 0, time_us);
        let events = [entry(Action::SegmentAlloc, 0x1000, 5000), entry(Action::Alloc, 0x1000, 6500)];
        let mut comparison = Comparison::new(0, &events);
        let got = [SegmentAction { action: Action::SegmentAlloc, addr: 0x1000, bytes: 512 }];
        comparison.segments(1, [0].into_iter(), &got);
        comparison.address(1, 0x1000, 0x1000);
        assert!(comparison.is_exact());
        comparison.address(1, 0x1000, 0x2000);
        comparison.total("retries", 1, 2);
        let text = comparison.first.unwrap().to_string();
        assert_eq!(text, "event 1 at 1.500 ms: recorded 512 bytes at 0x1000, replayed 0x2000");

        let without_times = events.map(|event| TraceEntry { time_us: 0, ..event });
        let mut comparison = Comparison::new(0, &without_times);
        comparison.address(1, 0x1000, 0x2000);
        let text = comparison.first.unwrap().to_string();
        assert_eq!(text, "event 1: recorded 512 bytes at 0x1000, replayed 0x2000");
    }

    #[test]
    fn missing_and_surplus_segment_events_are_differences() {
        let events = [TraceEntry::new(Action::SegmentMap, 0x1000, 512, 0, 0)];
        let mut missing = Comparison::new(0, &events);
        missing.segments(0, [0].into_iter(), &[]);
        let text = missing.first.unwrap().to_string();
        assert!(text.ends_with("recorded segment_map of 512 bytes at 0x1000, replayed no segment event"), "{text}");
        let mut surplus = Comparison::new(0, &events);
        let got = [SegmentAction { action: Action::SegmentFree, addr: 0x3000, bytes: 512 }];
        surplus.segments(0, [].into_iter(), &got);
        let text = surplus.first.unwrap().to_string();
        assert!(text.contains("recorded no segment event, replayed segment_free of 512 bytes"), "{text}");
    }
}
