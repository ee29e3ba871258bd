//! A background thread that processes pending frees, so that requests need not. Optional:
//! `pinned_use_background_threads`.
//!
//! It sleeps while no free is pending, and polls every 100 microseconds otherwise; less often after an error. It does
//! not keep the allocator alive, and ends with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Shared;
use crate::lock;

const POLL_INTERVAL: Duration = Duration::from_micros(100);

const POLL_INTERVAL_AFTER_ERROR: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct BackgroundThread {
    enabled: AtomicBool,
    running: Mutex<Option<Running>>,
}

struct Running {
    signal: Arc<Signal>,
    thread: JoinHandle<()>,
}

/// Wakes the thread.
#[derive(Default)]
struct Signal {
    state: Mutex<SignalState>,
    changed: Condvar,
}

#[derive(Default)]
struct SignalState {
    work: bool,
    stop: bool,
}

impl Signal {
    fn send(&self, change: impl FnOnce(&mut SignalState)) {
        change(&mut lock(&self.state));
        self.changed.notify_one();
    }

    /// Sleeps until there is work. Returns `false` to stop.
    fn wait_for_work(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.work && !state.stop {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = false;
        !state.stop
    }

    /// Sleeps for `interval`, whether there is work or not. Returns `false` at once if the thread is to stop.
    fn sleep(&self, interval: Duration) -> bool {
        let slept = self.changed.wait_timeout_while(lock(&self.state), interval, |state| !state.stop);
        !slept.unwrap_or_else(PoisonError::into_inner).0.stop
    }
}

impl BackgroundThread {
    /// Enables or disables the thread. It starts with the next request that finds nothing cached, and ends when
    /// disabled.
    pub(super) fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Release);
        if !enabled {
            drop(self.stop());
        }
    }

    /// Starts the thread, if it is enabled and not running.
    pub(super) fn start(&self, shared: &Arc<Shared>) {
        if !self.enabled.load(Ordering::Acquire) {
            return;
        }
        let mut running = lock(&self.running);
        // Checked again: `set_enabled` clears the flag first, and then stops a running thread.
        if running.is_some() || !self.enabled.load(Ordering::Acquire) {
            return;
        }
        let signal = Arc::new(Signal::default());
        signal.send(|state| state.work = true);
        let (received, shared) = (Arc::clone(&signal), Arc::downgrade(shared));
        let builder = std::thread::Builder::new().name("warpool-pinned".into());
        match builder.spawn(move || run(&received, &shared)) {
            Ok(thread) => *running = Some(Running { signal, thread }),
            Err(error) => {
                tracing::warn!(%error, "cannot start the thread for pinned memory; requests do its work");
            }
        }
    }

    /// Tells the thread that there is work.
    pub(super) fn wake(&self) {
        if self.enabled.load(Ordering::Acquire)
            && let Some(running) = &*lock(&self.running)
        {
            running.signal.send(|state| state.work = true);
        }
    }

    /// Tells the thread to end. The result can be joined.
    pub(super) fn stop(&self) -> Option<JoinHandle<()>> {
        let running = lock(&self.running).take()?;
        running.signal.send(|state| state.stop = true);
        Some(running.thread)
    }
}

fn run(signal: &Signal, shared: &Weak<Shared>) {
    let mut logged = None;
    while signal.wait_for_work() {
        loop {
            let Some(shared) = shared.upgrade() else { return };
            // A panic of an observer has been reported by the panic hook. The thread continues, or later frees would
            // not be processed.
            let processed = catch_unwind(AssertUnwindSafe(|| shared.process_pending()));
            let outcome = processed.unwrap_or_else(|panic| {
                std::mem::forget(panic);
                Ok(())
            });
            let has_pending = shared.has_pending_frees();
            drop(shared);
            if !has_pending {
                break;
            }
            let interval = if outcome.is_ok() { POLL_INTERVAL } else { POLL_INTERVAL_AFTER_ERROR };
            if let Err(error) = outcome
                && logged.as_ref() != Some(&error)
            {
                // Warn once: a failed stream keeps failing, and requests report the error too.
                tracing::warn!(%error, "pending frees of pinned memory could not be processed; they are retried");
                logged = Some(error);
            }
            if !signal.sleep(interval) {
                return;
            }
        }
    }
}
