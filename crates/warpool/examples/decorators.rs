//! A cap and a log around an allocator, on the simulated GPU: `cargo run --example decorators`.
//!
//! The log is in the format of RMM's `logging_resource_adaptor`, which `warpool replay` reads:
//! `cargo run --example decorators > log.csv` and `warpool replay log.csv`.

use std::sync::Arc;

use warpool::driver::Driver;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::decorate::{AllocatorCall, FreeCall, Limited, Traced};
use warpool::memory::raw::Allocation;
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};
use warpool::{Error, Instance};

const MIB: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
    let caching = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let limited = Arc::new(Limited::new(&caching, 64 * MIB));

    println!("Thread,Time,Action,Pointer,Size,Stream");
    let driver = Arc::clone(instance.driver());
    let allocator: Arc<dyn DeviceAllocator> =
        Arc::new(Traced::new(&limited, move |call, error| log(&*driver, call, error)));

    let stream = instance.device(0)?.pool_stream()?;
    let weights = allocator.allocate(40 * MIB, &stream)?;
    for step in 1..=3 {
        // Freed at the end of each step, and reused by the next one.
        let _activations = allocator.allocate(step * 8 * MIB, &stream)?;
    }
    // The device has room, but the cap is on what is allocated through the decorator.
    let refused = allocator.allocate(25 * MIB, &stream);
    assert!(matches!(refused, Err(Error::OutOfMemory(_))), "{refused:?}");

    assert_eq!(limited.bytes_allocated(), 40 * MIB);
    drop(weights);
    assert_eq!(limited.bytes_allocated(), 0);
    Ok(())
}

/// Writes one line per allocation, failure and free.
fn log(driver: &dyn Driver, call: &AllocatorCall, error: Option<&Error>) {
    let (action, ptr, bytes, stream) = match (call, error) {
        (AllocatorCall::Allocate { allocation: Some(Allocation { ptr, .. }), request }, _) => {
            ("allocate", ptr.0, request.bytes, request.stream)
        }
        (AllocatorCall::Allocate { request, .. }, _) => ("allocate failure", 0, request.bytes, request.stream),
        (AllocatorCall::Free(FreeCall::Owned(freed) | FreeCall::Dropped(freed)), None) => {
            ("free", freed.ptr.0, freed.bytes_requested, freed.stream)
        }
        _ => return,
    };
    let seconds = driver.now().as_secs_f64();
    let raw = driver.stream_handle(stream).map_or(0, |handle| handle.raw.0);
    println!("0,{seconds:.6},{action},{ptr:#x},{bytes},{raw:#x}");
}
