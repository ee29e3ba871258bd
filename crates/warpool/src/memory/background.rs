//! A thread that returns idle memory to the driver while the program makes no calls. It decides nothing: it calls
//! [`DeviceAllocator::release_idle`] every now and then. Nobody starts it but the owner of an allocator, so replays and
//! tests on virtual time have none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use warpool_driver::fork::Origin;

use super::{DeviceAllocator, Settings, SharedAllocator};
use crate::lock;

/// How often it looks if no setting asks for anything: settings may change.
const INTERVAL_UNUSED: Duration = Duration::from_secs(1);

/// A thread that calls [`DeviceAllocator::release_idle`] for all devices, several times within
/// [`idle_decay_ms`](Settings::idle_decay_ms), and within the time in which pages are given to other
/// processes. It ends when this is dropped, or the allocator.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::driver::sim::{SimConfig, SimDriver};
/// # use warpool::prelude::*;
/// use warpool::memory::{BackgroundReclaim, PagedAllocator};
///
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// let settings = Settings::parse("backend:paged,idle_decay_ms:10000")?;
/// let allocator = Arc::new(PagedAllocator::new(&instance, settings)?);
/// let _thread = BackgroundReclaim::start(&allocator);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BackgroundReclaim {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

#[derive(Debug, Default)]
struct Stop {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Sleeps. `false` if the thread is to end.
    fn sleep(&self, interval: Duration) -> bool {
        let slept = self.changed.wait_timeout_while(lock(&self.is_set), interval, |is_set| !*is_set);
        !*slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl BackgroundReclaim {
    /// Starts it. If the system has no threads, that is logged, and only calls of the program return memory.
    #[must_use = "it ends when this is dropped"]
    pub fn start(allocator: &impl SharedAllocator) -> Self {
        let stop = Arc::new(Stop::default());
        let (received, allocator) = (Arc::clone(&stop), Arc::downgrade(&allocator.to_dyn()));
        let thread = std::thread::Builder::new().name("warpool-idle".into()).spawn(move || run(&received, &allocator));
        if let Err(error) = &thread {
            tracing::warn!(%error, "cannot start the thread that returns idle memory; requests do its work");
        }
        Self { stop, thread: thread.ok(), origin: Origin::here() }
    }

    /// Whether settings give it something to do.
    #[must_use]
    pub fn is_useful(settings: &Settings) -> bool {
        settings.idle_decay_ms.is_some() || settings.share.enabled
    }
}

impl Drop for BackgroundReclaim {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if !self.origin.is_here() {
            std::mem::forget(self.thread.take());
            return;
        }
        *lock(&self.stop.is_set) = true;
        self.stop.changed.notify_one();
        // The thread may drop the allocator, and with it the owner of this.
        if let Some(thread) = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id()) {
            // Panics are caught in it.
            let _ = thread.join();
        }
    }
}

fn run(stop: &Stop, allocator: &Weak<dyn DeviceAllocator>) {
    let mut logged = None;
    loop {
        let interval = {
            let Some(allocator) = allocator.upgrade() else { return };
            // A panic of an observer has been reported by the panic hook.
            let done = catch_unwind(AssertUnwindSafe(|| release(&*allocator)));
            let done = done.unwrap_or_else(|panic| {
                std::mem::forget(panic);
                Ok(())
            });
            if let Err(error) = done
                && logged.as_ref() != Some(&error)
            {
                // Once: a failed device keeps failing, and requests report the error too.
                tracing::warn!(%error, "idle memory could not be returned to the driver; it is retried");
                logged = Some(error);
            }
            interval(&allocator.settings())
        };
        if !stop.sleep(interval) {
            return;
        }
    }
}

fn release(allocator: &dyn DeviceAllocator) -> crate::Result<()> {
    allocator.instance().devices().try_for_each(|device| allocator.release_idle(device.id()).map(drop))
}

/// Several times within the time after which memory is idle.
fn interval(settings: &Settings) -> Duration {
    const TIMES: u32 = 8;
    let decay = settings.idle_decay_ms.map(|millis| Duration::from_millis(millis) / TIMES);
    // Pages that are asked for leave in one look, or in the next if a stream was busy.
    let share = settings.share.enabled.then(|| Duration::from_millis(settings.share.reclaim_ms) / 2);
    [decay, share]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(INTERVAL_UNUSED)
        .clamp(Duration::from_millis(1), INTERVAL_UNUSED)
}
