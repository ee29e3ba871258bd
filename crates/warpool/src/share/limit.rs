//! A request for another limit, from one process to another, and its answer. The request is one word: a number that
//! changes with each, and the size in KiB. The answer is that word and an outcome; so of several processes that ask at
//! the same time, each sees whether its own request was answered.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{LIMIT_ANSWERED_AT, LIMIT_OUTCOME_AT, LIMIT_REQUEST_AT};

const NUMBER_SHIFT: u32 = 48;
const KIB: u64 = 1 << 10;
/// The size that stands for no limit.
const UNLIMITED: u64 = (1 << NUMBER_SHIFT) - 1;

/// A request that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitRequest(u64);

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitAnswer {
    /// The limit holds from now on. Memory that is reserved already stays.
    Applied,
    /// The process does not let others change its limits.
    NotAllowed,
    /// Its allocator has no limit that changes at run time.
    Unsupported,
}

impl LimitRequest {
    /// The limit; `None` is none. In whole KiB.
    #[must_use]
    pub const fn bytes(self) -> Option<u64> {
        match self.0 & UNLIMITED {
            UNLIMITED => None,
            size => Some(size * KIB),
        }
    }
}

pub(super) fn request(section: &[AtomicU64], bytes: Option<u64>) -> LimitRequest {
    let size = bytes.map_or(UNLIMITED, |bytes| (bytes / KIB).min(UNLIMITED - 1));
    let word = &section[LIMIT_REQUEST_AT];
    let mut before = word.load(Ordering::Relaxed);
    loop {
        // 0 is no request.
        let number = (before >> NUMBER_SHIFT) % u64::from(u16::MAX) + 1;
        let next = number << NUMBER_SHIFT | size;
        match word.compare_exchange(before, next, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return LimitRequest(next),
            Err(other) => before = other,
        }
    }
}

/// The request that is not answered.
pub(super) fn pending(section: &[AtomicU64]) -> Option<LimitRequest> {
    let request = section[LIMIT_REQUEST_AT].load(Ordering::Acquire);
    let is_answered = section[LIMIT_ANSWERED_AT].load(Ordering::Relaxed) == request;
    (request != 0 && !is_answered).then_some(LimitRequest(request))
}

/// By the process that owns the page.
pub(super) fn answer(section: &[AtomicU64], request: LimitRequest, answer: LimitAnswer) {
    let outcome = match answer {
        LimitAnswer::Applied => 1,
        LimitAnswer::NotAllowed => 2,
        LimitAnswer::Unsupported => 3,
    };
    section[LIMIT_OUTCOME_AT].store(outcome, Ordering::Relaxed);
    section[LIMIT_ANSWERED_AT].store(request.0, Ordering::Release);
}

pub(super) fn answer_to(section: &[AtomicU64], request: LimitRequest) -> Option<LimitAnswer> {
    if section[LIMIT_ANSWERED_AT].load(Ordering::Acquire) != request.0 {
        return None;
    }
    match section[LIMIT_OUTCOME_AT].load(Ordering::Relaxed) {
        1 => Some(LimitAnswer::Applied),
        2 => Some(LimitAnswer::NotAllowed),
        3 => Some(LimitAnswer::Unsupported),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_has_its_own_answer() {
        let section: Vec<AtomicU64> = (0..1024).map(|_| AtomicU64::new(0)).collect();
        assert_eq!(pending(&section), None);
        let first = request(&section, Some(40 << 30));
        assert_eq!((pending(&section), first.bytes()), (Some(first), Some(40 << 30)));
        assert_eq!(answer_to(&section, first), None);
        answer(&section, first, LimitAnswer::Applied);
        assert_eq!((pending(&section), answer_to(&section, first)), (None, Some(LimitAnswer::Applied)));
        // The same size again is another request.
        let second = request(&section, Some(40 << 30));
        assert_eq!((answer_to(&section, second), pending(&section)), (None, Some(second)));
        let third = request(&section, None);
        assert_eq!((third.bytes(), pending(&section)), (None, Some(third)));
        answer(&section, third, LimitAnswer::NotAllowed);
        assert_eq!(answer_to(&section, second), None, "it was replaced");
        assert_eq!(answer_to(&section, third), Some(LimitAnswer::NotAllowed));
        for bytes in [0, 1, u64::MAX] {
            assert!(request(&section, Some(bytes)).bytes().is_some_and(|size| size <= bytes), "{bytes}");
        }
        // As often as numbers repeat.
        for _ in 0..200_000 {
            assert_ne!(request(&section, Some(0)).0, 0);
        }
    }
}
