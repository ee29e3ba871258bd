//! Which call invalidated a capture. CUDA reports that a capture is invalid, but not why.
//!
//! Every call that CUDA refuses because of a capture is recorded here. The error of `capture_end` names the first one
//! since the capture began: later ones are mostly consequences, such as cleanup or a thread that polls. It is a guess:
//! the call may have concerned another capture, and calls that do not go through this driver are unknown.
//!
//! Only failing calls are recorded, so the others cost nothing.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::ErrorCode;

use crate::sync::lock;

/// How many records are kept, the latest.
const KEPT: usize = 64;

/// The latest calls that CUDA refused because of a capture.
#[derive(Default)]
pub(crate) struct CaptureErrors {
    /// How many there were in all. Changed only while `records` is locked.
    count: AtomicU64,
    records: Mutex<VecDeque<Record>>,
}

/// A call that was refused, once or several times in a row.
struct Record {
    call: &'static str,
    code: ErrorCode,
    /// The total count after the last of them.
    last: u64,
}

/// How many calls had been refused at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErrorCount(u64);

impl CaptureErrors {
    /// How many calls have been refused so far.
    pub(crate) fn count(&self) -> ErrorCount {
        ErrorCount(self.count.load(Ordering::Acquire))
    }

    /// Records that CUDA refused a call. `StreamCaptureInvalidated` is a consequence, not a cause, and not recorded.
    #[cold]
    pub(crate) fn record(&self, call: &'static str, code: ErrorCode) {
        if code == ErrorCode::StreamCaptureInvalidated {
            return;
        }
        let mut records = lock(&self.records);
        let last = self.count.load(Ordering::Relaxed) + 1;
        self.count.store(last, Ordering::Release);
        match records.back_mut() {
            Some(record) if record.call == call && record.code == code => record.last = last,
            _ => {
                if records.len() == KEPT {
                    records.pop_front();
                }
                records.push_back(Record { call, code, last });
            }
        }
    }

    /// Why a capture that began at `since` is invalid, as far as it is known.
    pub(crate) fn explain(&self, since: ErrorCount) -> String {
        let records = lock(&self.records);
        let Some(first) = records.iter().find(|record| record.last > since.0) else {
            return "no call of this driver was refused since it began: something else invalidated it".to_owned();
        };
        let others = match self.count.load(Ordering::Relaxed) - since.0 {
            1 => String::new(),
            count => format!(", the first of {count} calls that were refused since it began"),
        };
        format!("most likely invalidated by {}: {:?}{others}", first.call, first.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: ErrorCode = ErrorCode::StreamCaptureUnsupported;

    #[test]
    fn the_first_refusal_since_the_capture_began_is_named() {
        let errors = CaptureErrors::default();
        errors.record("before", REFUSED);
        let since = errors.count();
        assert!(errors.explain(since).starts_with("no call of this driver"));
        errors.record("kernel_launch", ErrorCode::StreamCaptureInvalidated);
        errors.record("mem_alloc", REFUSED);
        assert_eq!(errors.explain(since), "most likely invalidated by mem_alloc: StreamCaptureUnsupported");
        errors.record("event_query", REFUSED);
        let text = errors.explain(since);
        assert!(text.contains("by mem_alloc") && text.ends_with("first of 2 calls that were refused since it began"));
        assert!(errors.explain(errors.count()).starts_with("no call of this driver"));
    }

    #[test]
    fn a_polling_thread_does_not_evict_other_records() {
        let errors = CaptureErrors::default();
        let since = errors.count();
        errors.record("mem_alloc", REFUSED);
        (0..1000).for_each(|_| errors.record("event_query", REFUSED));
        assert!(errors.explain(since).starts_with("most likely invalidated by mem_alloc"));
        // For a capture that began meanwhile, the polling thread is the cause.
        let later = errors.count();
        errors.record("event_query", REFUSED);
        assert!(errors.explain(later).starts_with("most likely invalidated by event_query"));
    }

    #[test]
    fn the_oldest_records_are_dropped() {
        let errors = CaptureErrors::default();
        for n in 0..1000 {
            errors.record(if n % 2 == 0 { "even" } else { "odd" }, REFUSED);
        }
        assert_eq!(lock(&errors.records).len(), KEPT);
    }
}
