//! Every driver call of a scenario fails once: the error is returned, nothing is leaked, and the next attempt works.

use std::sync::Arc;

use crate::common::keep_busy;
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{Call, ErrorCode};
use warpool::{Error, EventOptions, Instance, Result, STREAMS_PER_POOL};

struct FaultyDriver {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
}

impl FaultyDriver {
    fn new(plan: FaultPlan) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        Self { faulty: Arc::new(Faulty::new(sim.clone(), plan)), sim }
    }

    fn instance(&self) -> Result<Instance> {
        Instance::new(self.faulty.clone())
    }

    /// Live driver objects, except the context, which stays once it is created.
    fn object_counts(&self) -> ObjectCounts {
        let mut census = self.sim.object_counts();
        census.bytes_used = 0;
        census
    }
}

/// Makes every driver call of streams and events, except those of `close`.
fn scenario(instance: &Instance) -> Result<()> {
    let [zero, one] = [instance.device(0)?, instance.device(1)?];
    let (shared, urgent) = (zero.pool_stream()?, one.high_priority_stream()?);
    let lease = zero.lease_stream()?;
    drop(one.lease_stream()?);
    one.lease_stream()?.synchronize()?;
    zero.bind_to_thread()?;

    instance.current_stream()?.wait_stream(&shared)?;
    urgent.wait_stream(&lease)?;
    lease.info()?;
    lease.host_callback(|| ())?;

    let (mut start, mut end) = (instance.timing_event(), instance.timing_event());
    start.record(&shared)?;
    end.record(&shared)?;
    end.synchronize()?;
    assert!(start.query()? && shared.query()?);
    start.elapsed_ms(&end)?;

    let mut exported = instance.event_with(EventOptions { interprocess: true, ..Default::default() })?;
    exported.export(&one)?;
    let mut external = instance.event_with(EventOptions { external: true, blocking: true, ..Default::default() })?;
    external.record(&lease)?;
    external.wait(&shared)?;

    zero.event_pool().reserve(3)?;
    zero.event_pool().trim()?;
    zero.synchronize()
}

#[test]
fn each_failed_call_is_returned_and_leaks_nothing() {
    let mut nth = 0;
    loop {
        nth += 1;
        let code = ErrorCode::OutOfMemory;
        let driver = FaultyDriver::new(FaultPlan::new().fail_nth_of_all(nth, code).excluding(FaultPlan::CLEANUP));
        let before = driver.object_counts();
        let outcome = driver.instance().and_then(|instance| {
            let outcome = scenario(&instance);
            driver.faulty.clear_plan();
            scenario(&instance).expect("after a fault everything works");
            instance.close().expect("it is the last handle");
            outcome
        });
        assert_eq!(driver.object_counts(), before, "leaked after call {nth} failed");
        if driver.faulty.injected().is_empty() {
            outcome.expect("nothing was made to fail");
            break;
        }
        let fired = driver.faulty.injected()[0];
        let error = outcome.expect_err("a failed call must be reported");
        assert_eq!(error.driver().map(|error| error.code), Some(code), "{} was made to fail", fired.call);
    }
    assert!(nth > 100, "the scenario made only {nth} calls");
}

#[test]
fn a_stream_pool_that_fails_half_way_leaks_nothing() {
    for nth in 1..=STREAMS_PER_POOL as u64 {
        let driver = FaultyDriver::new(FaultPlan::new().fail_nth(Call::StreamCreate, nth, ErrorCode::OutOfMemory));
        let device = driver.instance().unwrap().device(0).unwrap();
        let before = driver.object_counts();
        assert!(device.pool_stream().unwrap_err().driver().unwrap().is_out_of_memory());
        assert_eq!(driver.object_counts(), before);
        device.pool_stream().unwrap();
        assert_eq!(driver.object_counts().streams, before.streams + STREAMS_PER_POOL);
    }
}

#[test]
fn streams_whose_destruction_failed_are_used_by_the_next_attempt() {
    let plan = FaultPlan::new().fail_nth(Call::StreamCreate, 17, ErrorCode::OutOfMemory).fail_nth(
        Call::StreamDestroy,
        3,
        ErrorCode::UnknownError,
    );
    let driver = FaultyDriver::new(plan);
    let instance = driver.instance().unwrap();
    let before = driver.object_counts();
    assert!(instance.device(0).unwrap().pool_stream().is_err());
    assert_eq!(driver.object_counts().streams, before.streams + 1);
    instance.device(0).unwrap().pool_stream().unwrap();
    assert_eq!(driver.object_counts().streams, before.streams + STREAMS_PER_POOL);
    instance.close().unwrap();
    assert_eq!(driver.object_counts(), before);
}

#[test]
fn a_failed_record_leaves_the_event_usable() {
    let driver = FaultyDriver::new(FaultPlan::new().fail_nth(Call::EventRecord, 1, ErrorCode::LaunchFailed));
    let instance = driver.instance().unwrap();
    let stream = instance.device(1).unwrap().pool_stream().unwrap();
    let mut event = instance.event();
    assert!(event.record(&stream).is_err());
    assert!(!event.is_recorded() && event.query().unwrap());
    keep_busy(&stream);
    event.record(&stream).unwrap();
    assert!(!event.query().unwrap());
}

#[test]
fn trim_stops_at_a_failure_and_keeps_the_rest() {
    let driver = FaultyDriver::new(FaultPlan::new().fail_nth(Call::EventDestroy, 3, ErrorCode::UnknownError));
    let instance = driver.instance().unwrap();
    let pool = instance.device(0).unwrap().event_pool();
    pool.reserve(5).unwrap();
    assert!(matches!(pool.trim(), Err(Error::Driver(_))));
    assert_eq!((pool.idle(), driver.object_counts().events), (3, 3));
    assert_eq!(pool.trim().unwrap(), 3);
    assert_eq!(driver.object_counts().events, 0);
}

#[test]
fn a_failed_destroy_of_an_old_event_does_not_fail_a_new_one() {
    let driver = FaultyDriver::new(FaultPlan::new().fail_nth(Call::EventDestroy, 1, ErrorCode::UnknownError));
    let instance = driver.instance().unwrap();
    let device = instance.device(0).unwrap();
    let mut shared = instance.event_with(EventOptions { interprocess: true, ..Default::default() }).unwrap();
    shared.create(&device).unwrap();
    drop(shared);
    let first = device.event_pool().take().unwrap();
    assert_eq!(driver.object_counts().events, 2);
    let second = device.event_pool().take().unwrap();
    assert_eq!(driver.object_counts().events, 2);
    assert_ne!(first.id(), second.id());
}

#[test]
fn close_returns_the_first_error_and_destroys_the_rest() {
    let driver = FaultyDriver::new(FaultPlan::new().fail_nth(Call::StreamDestroy, 5, ErrorCode::UnknownError));
    let instance = driver.instance().unwrap();
    let before = driver.object_counts();
    instance.device(0).unwrap().pool_stream().unwrap();
    instance.device(1).unwrap().event_pool().reserve(2).unwrap();
    assert_eq!(instance.close().unwrap_err().driver().unwrap().call, "stream_destroy");
    assert_eq!((driver.object_counts().streams, driver.object_counts().events), (before.streams + 1, before.events));
}
