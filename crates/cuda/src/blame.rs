//! Which call broke a capture. CUDA says that a capture is broken, but not by what.
//!
//! A call that CUDA refuses for the sake of a capture is noted here. Whoever ends a broken capture asks for the first
//! note since it began: what comes later is most often a consequence, such as clearing up, or a watcher that keeps
//! asking. It is a guess all the same. Another capture may have been meant, and calls that others make past this driver
//! are not seen.
//!
//! Only failures come here, so nothing else pays for it.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::ErrorCode;

use crate::table::lock;

/// How many notes are kept, the latest.
const KEPT: usize = 64;

/// The calls that CUDA refused, the latest.
#[derive(Default)]
pub(crate) struct Blame {
    /// How many there were, ever. Changed only while `notes` is locked.
    count: AtomicU64,
    notes: Mutex<VecDeque<Note>>,
}

/// A call that was refused, once or several times in a row.
struct Note {
    call: &'static str,
    code: ErrorCode,
    /// Which refusal the last of them was, counted from the first ever.
    last: u64,
}

/// A point in time: how many refusals there had been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Blame {
    /// Now.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.count.load(Ordering::Acquire))
    }

    /// Notes that CUDA refused a call. To say that a capture is broken already is no refusal.
    #[cold]
    pub(crate) fn note(&self, call: &'static str, code: ErrorCode) {
        if code == ErrorCode::StreamCaptureInvalidated {
            return;
        }
        let mut notes = lock(&self.notes);
        let last = self.count.load(Ordering::Relaxed) + 1;
        self.count.store(last, Ordering::Release);
        match notes.back_mut() {
            Some(note) if note.call == call && note.code == code => note.last = last,
            _ => {
                if notes.len() == KEPT {
                    notes.pop_front();
                }
                notes.push_back(Note { call, code, last });
            }
        }
    }

    /// What to tell about a capture that began at `since` and is broken.
    pub(crate) fn explain(&self, since: Mark) -> String {
        let notes = lock(&self.notes);
        let Some(first) = notes.iter().find(|note| note.last > since.0) else {
            return "no call of this driver was refused since it began: something else broke it".to_owned();
        };
        let others = match self.count.load(Ordering::Relaxed) - since.0 {
            1 => String::new(),
            count => format!(", the first of {count} calls that were refused since it began"),
        };
        format!("most likely broken by {}: {:?}{others}", first.call, first.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: ErrorCode = ErrorCode::StreamCaptureUnsupported;

    #[test]
    fn the_first_refusal_since_the_capture_began_is_named() {
        let blame = Blame::default();
        blame.note("before", REFUSED);
        let since = blame.mark();
        assert!(blame.explain(since).starts_with("no call of this driver"));
        blame.note("kernel_launch", ErrorCode::StreamCaptureInvalidated);
        blame.note("mem_alloc", REFUSED);
        assert_eq!(blame.explain(since), "most likely broken by mem_alloc: StreamCaptureUnsupported");
        blame.note("event_query", REFUSED);
        let text = blame.explain(since);
        assert!(text.contains("by mem_alloc") && text.ends_with("first of 2 calls that were refused since it began"));
        assert!(blame.explain(blame.mark()).starts_with("no call of this driver"));
    }

    #[test]
    fn a_watcher_that_keeps_asking_does_not_push_out_the_others() {
        let blame = Blame::default();
        let since = blame.mark();
        blame.note("mem_alloc", REFUSED);
        (0..1000).for_each(|_| blame.note("event_query", REFUSED));
        assert!(blame.explain(since).starts_with("most likely broken by mem_alloc"));
        // One that began while it asked is told about the watcher.
        let later = blame.mark();
        blame.note("event_query", REFUSED);
        assert!(blame.explain(later).starts_with("most likely broken by event_query"));
    }

    #[test]
    fn the_oldest_notes_are_forgotten() {
        let blame = Blame::default();
        for n in 0..1000 {
            blame.note(if n % 2 == 0 { "even" } else { "odd" }, REFUSED);
        }
        assert_eq!(lock(&blame.notes).len(), KEPT);
    }
}
