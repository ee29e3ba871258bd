//! A sleep that begins in one thread while another is between getting a block and telling the driver of it. The sleep
//! copies the block: told afterwards, the driver would report that the memory was reused while the copy ran.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{self, Call, DeviceId, Driver};
use warpool::memory::raw::Request;
use warpool::memory::sleep::Keep;
use warpool::memory::{
    CachingAllocator, DeviceAllocator, HostAllocator, PagedAllocator, PinnedSettings, Settings, Tags,
};
use warpool::{Instance, Result};

use crate::common::pause::PATIENCE;

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Preparing,
    Armed,
    /// A block is being reported.
    Reporting,
    /// The sleep has put its copies into streams, and is about to wait for them.
    Copied,
    /// The report was made.
    Reported,
}

/// Stops a report until a sleep has made its copies, and the sleep until the report was made; both not for ever.
struct Meeting {
    step: Mutex<Step>,
    changed: Condvar,
}

impl Meeting {
    fn set(&self, step: Step) {
        *self.step.lock().unwrap() = step;
        self.changed.notify_all();
    }

    /// If it is at `from`: goes to `to`, and waits for `end`.
    fn advance(&self, from: Step, to: Step, end: Step) {
        let mut step = self.step.lock().unwrap();
        if *step == from {
            *step = to;
            self.changed.notify_all();
            drop(self.changed.wait_timeout_while(step, PATIENCE, |step| *step != end).unwrap());
        }
    }

    fn wait_for(&self, end: Step) {
        let step = self.step.lock().unwrap();
        let (step, _) = self.changed.wait_timeout_while(step, 100 * PATIENCE, |step| *step != end).unwrap();
        assert_eq!(*step, end);
    }
}

impl Hook for Meeting {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> driver::Result<()> {
        if call == Call::StreamSynchronize {
            self.advance(Step::Reporting, Step::Copied, Step::Reported);
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, call: Call, _: Arguments<'_>) {
        if call == Call::Suballocated {
            self.advance(Step::Armed, Step::Reporting, Step::Copied);
        }
    }
}

fn copies_of_a_sleep_are_not_earlier_users(new: impl Fn(&Instance) -> Result<Arc<dyn DeviceAllocator>>) -> Result<()> {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let meeting = Meeting { step: Mutex::new(Step::Preparing), changed: Condvar::new() };
    let hooked = Arc::new(Hooked::with_hook(sim.clone(), meeting));
    let meeting = hooked.hook();
    let instance = Instance::new(hooked.clone())?;
    let device = instance.device(0)?;
    let stream = device.pool_stream()?;
    let allocator = new(&instance)?;
    let tags = Tags::new(&allocator, &HostAllocator::new(&instance, PinnedSettings::default()))?;
    let tag = tags.tag(&device, "weights")?;
    // The first request of its size gets memory from the driver, the second a free block.
    for _ in 0..2 {
        let allocation = thread::scope(|threads| {
            let sleep = threads.spawn(|| {
                meeting.wait_for(Step::Reporting);
                tags.sleep(&["weights"], Keep::Host)
            });
            let allocation = {
                let _scope = tag.enter()?;
                meeting.set(Step::Armed);
                allocator.allocate_raw(Request::new(DeviceId(0), stream.id(), 20 * MIB))
            };
            meeting.set(Step::Reported);
            sleep.join().unwrap()?;
            Result::Ok(allocation)
        })?;
        tags.wake(&["weights"])?;
        match allocation {
            Ok(allocation) => allocator.free(allocation)?,
            Err(error) => assert!(error.is_asleep(), "{error}"),
        }
        assert_eq!(sim.hazards(), []);
    }
    Ok(())
}

#[test]
fn with_segments() -> Result<()> {
    copies_of_a_sleep_are_not_earlier_users(|instance| {
        Ok(Arc::new(CachingAllocator::new(instance, Settings::default())))
    })
}

#[test]
fn with_pages() -> Result<()> {
    copies_of_a_sleep_are_not_earlier_users(|instance| {
        Ok(Arc::new(PagedAllocator::new(instance, Settings::default())?))
    })
}
