//! Whether this process is a forked child: another thread may have held a lock, and CUDA does not work in it.

use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether it is.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Has children notice; to be called once.
pub(crate) fn watch() {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the function stays loaded, and only stores a flag.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}
