//! A thread that looks after what waits for streams, so that requests need not. Optional:
//! `pinned_use_background_threads`.
//!
//! It sleeps while nothing waits, and looks every 100 microseconds while something does; seldom while that fails. It
//! keeps nothing alive: when the allocator goes, it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Shared;
use crate::lock;

/// How long it sleeps between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// How long it sleeps after a look that failed.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// The thread, if there is one.
#[derive(Default)]
pub(super) struct Background {
    wanted: AtomicBool,
    thread: Mutex<Option<Running>>,
}

struct Running {
    bell: Arc<Bell>,
    thread: JoinHandle<()>,
}

/// What the thread is woken by.
#[derive(Default)]
struct Bell {
    call: Mutex<Call>,
    rung: Condvar,
}

#[derive(Default)]
struct Call {
    work: bool,
    stop: bool,
}

impl Bell {
    fn ring(&self, change: impl FnOnce(&mut Call)) {
        change(&mut lock(&self.call));
        self.rung.notify_one();
    }

    /// Sleeps until there is work. False if it is to stop.
    fn wait_for_work(&self) -> bool {
        let mut call = lock(&self.call);
        while !call.work && !call.stop {
            call = self.rung.wait(call).unwrap_or_else(PoisonError::into_inner);
        }
        call.work = false;
        !call.stop
    }

    /// Sleeps for so long, whatever is rung for. False if it is to stop, which ends the sleep.
    fn pause(&self, pause: Duration) -> bool {
        let goes_on = |call: &mut Call| !call.stop;
        let slept = self.rung.wait_timeout_while(lock(&self.call), pause, goes_on);
        !slept.unwrap_or_else(PoisonError::into_inner).0.stop
    }
}

impl Background {
    /// Whether there should be a thread. It begins with the next request that finds nothing cached; an unwanted one
    /// ends at once.
    pub(super) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Release);
        if !wanted {
            drop(self.stop());
        }
    }

    /// Begins the thread, if it is wanted and not there.
    pub(super) fn start(&self, shared: &Arc<Shared>) {
        if !self.wanted.load(Ordering::Acquire) {
            return;
        }
        let mut running = lock(&self.thread);
        // Asked again: whoever wants none any more says so first, and then stops what there is.
        if running.is_some() || !self.wanted.load(Ordering::Acquire) {
            return;
        }
        let bell = Arc::new(Bell::default());
        bell.ring(|call| call.work = true);
        let (theirs, shared) = (Arc::clone(&bell), Arc::downgrade(shared));
        let builder = std::thread::Builder::new().name("warpool-pinned".into());
        match builder.spawn(move || run(&theirs, &shared)) {
            Ok(thread) => *running = Some(Running { bell, thread }),
            Err(error) => tracing::warn!(%error, "no thread looks after pinned memory; requests do it themselves"),
        }
    }

    /// Something waits.
    pub(super) fn wake(&self) {
        if self.wanted.load(Ordering::Acquire)
            && let Some(running) = &*lock(&self.thread)
        {
            running.bell.ring(|call| call.work = true);
        }
    }

    /// Tells the thread to end. Whoever wants to wait for that can.
    pub(super) fn stop(&self) -> Option<JoinHandle<()>> {
        let running = lock(&self.thread).take()?;
        running.bell.ring(|call| call.stop = true);
        Some(running.thread)
    }
}

fn run(bell: &Bell, shared: &Weak<Shared>) {
    let mut told = None;
    while bell.wait_for_work() {
        loop {
            let Some(shared) = shared.upgrade() else { return };
            let outcome = shared.look_after();
            let waits = lock(&shared.pending).waits();
            drop(shared);
            if !waits {
                break;
            }
            let pause = if outcome.is_ok() { PAUSE } else { PAUSE_AFTER_FAILURE };
            if let Err(error) = outcome
                && told.as_ref() != Some(&error)
            {
                // Once: a stream that failed goes on failing, and requests meet it too.
                tracing::warn!(%error, "while looking after pinned memory");
                told = Some(error);
            }
            if !bell.pause(pause) {
                return;
            }
        }
    }
}
