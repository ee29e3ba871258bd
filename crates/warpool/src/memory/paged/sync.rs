//! What the parts without a mutex synchronize with. Their tests build them once more, with `shuttle` in its place.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::OnceLock;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(super) use std::thread::yield_now;

pub(super) use super::process_barrier::{process_barrier, process_has_barrier};
pub(super) use super::thread_number::{has_ended, known_thread_number, thread_number};
