//! A memory fence in every thread of the process at once, made by the thread that needs it: Linux's `membarrier`. Where
//! the system has none, [`process_has_barrier`] says so, and nobody may rely on one.

#[cfg(all(target_os = "linux", not(miri)))]
pub(super) use linux::{process_barrier, process_has_barrier};

#[cfg(all(target_os = "linux", not(miri)))]
mod linux {
    use std::sync::atomic::{AtomicU8, Ordering};

    use rustix::thread::{MembarrierCommand, membarrier};

    const UNKNOWN: u8 = 0;
    const YES: u8 = 1;
    const NO: u8 = 2;

    /// Whether there is a barrier. It is asked for when it is first needed.
    pub(in super::super) fn process_has_barrier() -> bool {
        // Two threads may both ask, which does no harm; a `Once` that another thread holds at a fork would.
        static HAS_BARRIER: AtomicU8 = AtomicU8::new(UNKNOWN);
        match HAS_BARRIER.load(Ordering::Relaxed) {
            UNKNOWN => {
                let has_barrier = register_and_run().is_ok();
                HAS_BARRIER.store(if has_barrier { YES } else { NO }, Ordering::Relaxed);
                has_barrier
            }
            known => known == YES,
        }
    }

    fn register_and_run() -> rustix::io::Result<()> {
        membarrier(MembarrierCommand::RegisterPrivateExpedited)?;
        membarrier(MembarrierCommand::PrivateExpedited)
    }

    /// What every thread did before some moment of this call is visible afterwards, and what it does behind that moment
    /// sees what the caller did before the call. Only if [`process_has_barrier`].
    pub(in super::super) fn process_barrier() {
        // A process forked from the one that registered may have to do it itself.
        membarrier(MembarrierCommand::PrivateExpedited)
            .or_else(|_| register_and_run())
            .or_else(|_| membarrier(MembarrierCommand::Global))
            .expect("the system refuses a barrier that it had");
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(super) fn process_has_barrier() -> bool {
    false
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(super) fn process_barrier() {
    unreachable!("there is no barrier");
}
