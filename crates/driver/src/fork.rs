//! Whether this process was forked after an object was made. A driver does not survive `fork`: CUDA refuses every call
//! in the child, and a lock that another thread held at the fork stays locked there for ever.
//!
//! So the owner of a driver or a lock stores its [`Origin`], and checks [`Origin::is_here`] before it takes a lock: in
//! the child, calls fail with an error and destructors do nothing. That is one load of a number that only a fork
//! changes.
//!
//! ```
//! use warpool_driver::fork::{Origin, REASON, is_child};
//!
//! let origin = Origin::here();
//! assert!(origin.is_here() && !is_child()); // after a fork, the child sees the opposite
//! println!("{REASON}"); // what an error says then
//! ```

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::platform::in_forked_child;
use crate::{DriverError, ErrorCode};

/// The number of forks between the first process that made an [`Origin`] and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that an object was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    generation: u32,
}

impl Origin {
    /// This process.
    #[must_use]
    pub fn here() -> Self {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        // Not a `Once`: one that was under way in another thread at a fork would never end in the child. Two threads
        // may both register, and a fork then counts twice, which does no harm.
        if !REGISTERED.load(Ordering::Acquire) {
            in_forked_child(count);
            REGISTERED.store(true, Ordering::Release);
        }
        Self { generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// Whether the object was made in this process; `false` if the process was forked since.
    #[inline]
    #[must_use]
    pub fn is_here(self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }

    /// The number of the process among its ancestors that noted an origin.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// Whether this process is a forked child of one that had noted an origin: the cheapest test, for hot paths. Objects
/// that the child made itself are usable; [`Origin::is_here`] distinguishes them.
#[inline]
#[must_use]
pub fn is_child() -> bool {
    GENERATION.load(Ordering::Relaxed) != 0
}

/// Why nothing that was made before the fork can be used, and what to do.
pub const REASON: &str = "this process was forked after the driver was opened, and a GPU driver does not survive fork: \
                          start processes by spawn or forkserver, or fork before the GPU is first used";

/// The error of a driver call in a forked child.
#[must_use]
pub fn error(call: &'static str) -> DriverError {
    DriverError::new(call, ErrorCode::NotInitialized).with_detail(REASON)
}

extern "C" fn count() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
