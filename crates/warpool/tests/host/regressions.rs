//! Minimal cases of bugs that random programs found, with their seeds.

use std::sync::Arc;

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::{HostAllocator, PinnedSettings};

/// Seed 101: a cached block of 339,968 bytes served a request for 300,000. The slack was an eighth of the rounded
/// request, in addition to the rounding.
#[test]
fn a_cached_block_never_wastes_more_than_an_eighth() {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    for requested in [300_000, 1_000_000, 5_000_000_u64] {
        let max = requested + requested / 8;
        for larger in [max - 5000, max, max + 1, max + 3000, max + 5000, 2 * requested] {
            drop(host.allocate(larger).unwrap());
            let block = host.allocate(requested).unwrap();
            let usable = block.bytes_usable();
            assert!((requested..=max).contains(&usable), "{usable} bytes for {requested}, with {larger} cached");
        }
    }
}
