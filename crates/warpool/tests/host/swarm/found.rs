//! What random programs found, made small. Each with the seed that found it.

use std::sync::Arc;

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::{HostAllocator, PinnedSettings};

/// Seed 101: a cached block of 339,968 bytes went to a request for 300,000. The slack was an eighth of the rounded
/// request, and came on top of the rounding.
#[test]
fn a_cached_block_is_not_given_where_it_wastes_more_than_an_eighth() {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    for asked in [300_000, 1_000_000, 5_000_000_u64] {
        let most = asked + asked / 8;
        for larger in [most - 5000, most, most + 1, most + 3000, most + 5000, 2 * asked] {
            drop(host.allocate(larger).unwrap());
            let block = host.allocate(asked).unwrap();
            let usable = block.bytes_usable();
            assert!((asked..=most).contains(&usable), "{usable} bytes for {asked}, with {larger} cached");
        }
    }
}
