//! Panics of user code in the uncached allocators: `common/panics.rs` has the scenario.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::common::panics::{Bomb, Subject, every_call_panics_once};
use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Memory as _};
use warpool::memory::external::FnAllocator;
use warpool::memory::pools::{PoolOptions, PrivatePools as _};
use warpool::memory::{DeviceAllocator, DriverPoolAllocator, PluggableAllocator};

const MIB: u64 = 1 << 20;

/// Memory from the driver, with every hook. Ticks before it allocates and after it has freed: memory that was being
/// freed counts as freed.
fn ticking_allocator(sim: &Arc<SimDriver>, bomb: &Arc<Bomb>, handles_streams: bool) -> FnAllocator {
    let (allocates, frees, ticks) = (sim.clone(), sim.clone(), || Arc::clone(bomb));
    let (allocate, free, reset, fraction) = (ticks(), ticks(), ticks(), ticks());
    let (begin, end, release, record) = (ticks(), ticks(), ticks(), ticks());
    let external = FnAllocator::new(
        move |bytes, device, _| {
            allocate.tick();
            Ok(allocates.mem_alloc(device, bytes).ok())
        },
        move |ptr, _, _, _| {
            // The driver may run a host callback that panics; the memory is not freed then.
            let freed = catch_unwind(AssertUnwindSafe(|| frees.mem_free(ptr)));
            let panicked = freed.map_err(|panic| frees.mem_free(ptr).map(|()| panic));
            match panicked {
                Ok(freed) => freed?,
                Err(panic) => resume_unwind(panic?),
            }
            free.tick();
            Ok(())
        },
    );
    let external = external
        .on_reset(move || reset.tick())
        .on_memory_fraction(move |_, _| fraction.tick())
        .on_begin_pool(move |_, _| begin.tick())
        .on_end_pool(move |_, _| end.tick())
        .on_release_pool(move |_, _| release.tick());
    if handles_streams { external.on_record_stream(move |_, _| record.tick()) } else { external }
}

fn machine() -> (Arc<SimDriver>, Instance) {
    let mut config = SimConfig::default().with_capacity(200 * MIB);
    config.devices[0].bytes_context = 0;
    let sim = Arc::new(SimDriver::new(config));
    let instance = Instance::new(sim.clone()).unwrap();
    (sim, instance)
}

fn pluggable(bomb: &Arc<Bomb>, handles_streams: bool) -> Subject {
    let (sim, instance) = machine();
    let external = ticking_allocator(&sim, bomb, handles_streams);
    let allocator = Arc::new(PluggableAllocator::new(&instance, Arc::new(external)).unwrap());
    let more = allocator.clone();
    let more_steps = move |run: &crate::common::panics::Run<'_>| {
        let device = DeviceId(0);
        let set = run.step("a fraction", || more.set_memory_fraction(device, 0.5).unwrap());
        let fraction = more.memory_fraction(device).unwrap();
        assert_eq!(fraction.to_bits(), (if set.is_some() { 0.5_f64 } else { 1.0 }).to_bits());
        if run.step("a capture begins", || more.capture_began(device).unwrap()).is_some() {
            more.capture_ended(device).unwrap();
        }
        assert!(more.capture_ended(device).is_err(), "no capture is counted");
    };
    Subject {
        sim,
        instance,
        allocator,
        pool_options: Box::new(PoolOptions::default),
        more_steps: Box::new(more_steps),
        check: Box::new(|| ()),
        capacity: 200 * MIB,
    }
}

#[test]
fn every_call_of_user_code_may_panic_once() {
    for handles_streams in [false, true] {
        let calls = every_call_panics_once(move |bomb| pluggable(bomb, handles_streams));
        assert!(calls > 100, "only {calls} calls of user code");
    }
}

#[test]
fn every_call_of_user_code_may_panic_once_over_the_drivers_pool() {
    let calls = every_call_panics_once(|_| {
        let (sim, instance) = machine();
        let allocator = Arc::new(DriverPoolAllocator::new(&instance));
        Subject {
            sim,
            instance,
            allocator,
            pool_options: Box::new(PoolOptions::default),
            more_steps: Box::new(|_| ()),
            check: Box::new(|| ()),
            capacity: 200 * MIB,
        }
    });
    assert!(calls > 60, "only {calls} calls of user code");
}
