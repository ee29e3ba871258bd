//! Pinning by registering: pages are mapped, touched by several threads, and then registered by one call. Touching is
//! most of the work, and threads can share it; the driver would do it on one thread.
//!
//! Not here: the choice of the method, the check of the address, and unpinning (`pin.rs`). A failure leaves nothing
//! pinned and nothing mapped.

use warpool_driver::{DeviceId, Driver, DriverError, ErrorCode, HostOptions, HostPages, HostPtr, HostRange};

use crate::{Error, Result};

/// The smallest range that a thread touches.
const PAGE: u64 = 4096;

/// The size of a huge page; less memory does not use them.
const HUGE_PAGE: u64 = 2 << 20;

/// Pins `bytes` of new, zeroed memory for all devices, with the context of `device`. The driver owns the pages until it
/// unregisters them.
pub(super) fn register(driver: &dyn Driver, device: DeviceId, bytes: u64, threads: u64) -> Result<HostPtr> {
    let pages = HostPages::map(bytes, bytes >= HUGE_PAGE).map_err(|error| {
        let detail = format!("{bytes} bytes of host memory could not be mapped: {error}");
        DriverError::new("host_register", ErrorCode::OutOfMemory).with_detail(detail)
    })?;
    pages.prefault(threads_for(bytes, threads));
    driver.host_register(device, HostRange::of_pages(&pages), HostOptions::default()).map_err(|error| {
        match error.code {
            ErrorCode::NotSupported => Error::HostRegister { why: error.to_string() },
            _ => error.into(),
        }
    })?;
    Ok(pages.ptr())
}

/// One thread, if there are fewer pages than threads.
fn threads_for(bytes: u64, threads: u64) -> usize {
    if bytes / PAGE >= threads { usize::try_from(threads).unwrap_or(1) } else { 1 }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::Call;
    use warpool_driver::decorate::{Counting, FaultPlan, Faulty};
    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::*;
    use crate::Instance;
    use crate::memory::{HostAllocator, PinnedSettings};

    const DEVICE: DeviceId = DeviceId(0);

    /// Counts the calls that reach the simulated device, below the injected faults.
    struct TestContext {
        counting: Arc<Counting>,
        faulty: Arc<Faulty>,
        instance: Instance,
    }

    impl TestContext {
        fn new(config: SimConfig) -> Self {
            let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(config))));
            let faulty = Arc::new(Faulty::new(Arc::clone(&counting) as Arc<dyn Driver>, FaultPlan::new()));
            let instance = Instance::new(Arc::clone(&faulty) as Arc<dyn Driver>).expect("a device");
            Self { counting, faulty, instance }
        }

        fn allocator(&self, threads: u64) -> HostAllocator {
            HostAllocator::new(&self.instance, settings(true, threads))
        }

        /// How many ranges were registered, and how many of them still are.
        fn registered(&self) -> (u64, u64) {
            let done = |call| self.counting.count(call).calls - self.counting.count(call).errors;
            (done(Call::HostRegister), done(Call::HostRegister) - done(Call::HostUnregister))
        }
    }

    fn settings(register: bool, threads: u64) -> PinnedSettings {
        PinnedSettings { use_cuda_host_register: register, num_register_threads: threads, ..PinnedSettings::default() }
    }

    #[test]
    fn a_segment_is_registered_and_unregistered_by_one_call() {
        let context = TestContext::new(SimConfig::default());
        for (nth, bytes) in [4096, 1 << 20, (2 << 20) + 4096, 64 << 20].into_iter().enumerate() {
            let allocator = context.allocator(8);
            let block = allocator.allocate(bytes).expect("there is room");
            assert_eq!(block.ptr().0 % if bytes < HUGE_PAGE { PAGE } else { HUGE_PAGE }, 0, "{bytes} bytes");
            block.write(bytes - 16, &[7; 16]).expect("all of it is pinned");
            assert_eq!(context.registered(), (nth as u64 + 1, 1));
            drop(block);
            allocator.close().expect("no block is allocated");
            assert_eq!(context.registered(), (nth as u64 + 1, 0));
        }
        assert_eq!(context.counting.count(Call::HostAlloc).calls, 0);
    }

    #[test]
    fn a_segment_is_unpinned_the_way_it_was_pinned() {
        let context = TestContext::new(SimConfig::default());
        let allocator = context.allocator(2);
        let registered = allocator.allocate(4 << 20).expect("there is room");
        allocator.set_settings(settings(false, 2));
        let plain = allocator.allocate(6 << 20).expect("there is room");
        allocator.set_settings(settings(true, 1));
        let again = allocator.allocate(8 << 20).expect("there is room");
        let calls = |call| context.counting.count(call).calls;
        assert_eq!((calls(Call::HostRegister), calls(Call::HostAlloc)), (2, 1));
        drop((registered, plain, again));
        allocator.set_settings(settings(false, 1));
        allocator.close().expect("no block is allocated");
        assert_eq!((calls(Call::HostUnregister), calls(Call::HostFree)), (2, 1));
        assert!(context.counting.counts().iter().all(|count| count.errors == 0));
    }

    #[test]
    fn a_failure_at_any_step_leaves_nothing_pinned() {
        let context = TestContext::new(SimConfig::default());
        let plans = [
            FaultPlan::new().fail_nth(Call::HostRegister, 1, ErrorCode::InvalidValue),
            FaultPlan::new().fail_nth(Call::HostDevicePtr, 1, ErrorCode::InvalidValue),
            FaultPlan::new().fail_nth(Call::HostDevicePtr, 1, ErrorCode::InvalidValue).fail_nth(
                Call::HostUnregister,
                1,
                ErrorCode::InvalidContext,
            ),
        ];
        for plan in plans {
            let allocator = context.allocator(2);
            context.faulty.set_plan(plan.clone());
            let error = allocator.allocate(4 << 20).expect_err("a call fails");
            assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::InvalidValue), "{plan:?}");
            assert_eq!(context.registered().1, 0, "{plan:?}");
            assert_eq!(allocator.stats().allocated_bytes.current, 0, "{plan:?}");
            allocator.check();
            drop(allocator.allocate(4 << 20).expect("the next one succeeds"));
            allocator.close().expect("no block is allocated");
            assert_eq!(context.registered().1, 0, "{plan:?}");
        }
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_out_of_memory() {
        let context = TestContext::new(SimConfig::default());
        context.counting.reset();
        for bytes in [1 << 62, u64::MAX] {
            let error = register(&*context.faulty, DEVICE, bytes, 1).expect_err("no machine has that much");
            assert!(error.driver().is_some_and(DriverError::is_out_of_memory), "{error}");
        }
        assert_eq!(context.counting.counts(), []);
    }

    #[test]
    fn unsupported_registration_names_the_setting() {
        let mut config = SimConfig::default();
        config.devices[0].properties.host_registration = false;
        let context = TestContext::new(config);
        let allocator = context.allocator(1);
        let error = allocator.allocate(4096).expect_err("it cannot register");
        assert!(matches!(error, Error::HostRegister { .. }), "{error}");
        assert!(error.to_string().ends_with("set pinned_use_cuda_host_register:False"), "{error}");
        allocator.set_settings(settings(false, 1));
        drop(allocator.allocate(4096).expect("the driver allocates it"));
    }

    #[test]
    fn every_thread_touches_at_least_a_page() {
        assert_eq!((threads_for(8 * PAGE, 8), threads_for(8 * PAGE - 1, 8), threads_for(1 << 30, 1)), (8, 1, 1));
        assert_eq!(threads_for(u64::MAX, u64::MAX), 1);
    }
}
