//! What the parts without a mutex synchronize with. Their tests build them once more, with `shuttle` in its place.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::OnceLock;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Sleeps for at least `us` microseconds.
pub(super) fn sleep_us(us: u64) {
    std::thread::sleep(std::time::Duration::from_micros(us));
}
