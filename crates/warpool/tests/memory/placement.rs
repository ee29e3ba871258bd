//! Placement of blocks: short scripts in, pictures of the segments out.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, DevicePtr};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SnapshotOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, Settings};

use crate::common::sizes::{bytes, short};

const DEVICE: DeviceId = DeviceId(0);

/// Runs a script and compares the picture of all segments at its end.
///
/// Steps: `a=1M` allocates under a name; `free a`; `trim`. Sizes have the units K and M. The picture lists mapped
/// ranges by address, each block with its name, or `.` if free.
fn check(settings: &str, script: &str, picture: &str) {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let allocator = CachingAllocator::new(&instance, Settings::parse(settings).unwrap());
    let stream = instance.device(0).unwrap().default_stream().unwrap().id();
    let mut named: BTreeMap<String, Allocation> = BTreeMap::new();
    for step in script.split(';').map(str::trim).filter(|step| !step.is_empty()) {
        if let Some((name, size)) = step.split_once('=') {
            let allocation = allocator.allocate_raw(Request::new(DEVICE, stream, bytes(size))).unwrap();
            named.insert(name.to_owned(), allocation);
        } else if let Some(name) = step.strip_prefix("free ") {
            allocator.free(named.remove(name).expect("it was allocated")).unwrap();
        } else {
            assert_eq!(step, "trim", "unknown step");
            allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        }
        allocator.check();
    }
    assert_eq!(draw(&allocator, &named), picture, "{script} with {settings:?}");
}

fn draw(allocator: &CachingAllocator, named: &BTreeMap<String, Allocation>) -> String {
    let name_at = |address: u64| {
        named.iter().find(|(_, allocation)| allocation.ptr == DevicePtr(address)).map(|(name, _)| name.as_str())
    };
    let segments = allocator.snapshot(SnapshotOptions::default()).unwrap().segments;
    let drawn = segments.iter().map(|segment| {
        let blocks = segment.blocks.iter().map(|block| {
            let name = match block.state {
                BlockState::Inactive => ".",
                _ => name_at(block.address).unwrap_or("?"),
            };
            format!("[{name} {}]", short(block.size))
        });
        blocks.collect::<String>()
    });
    drawn.collect::<Vec<_>>().join(" ")
}

#[test]
fn blocks_are_split_at_the_low_end_and_merged_again() {
    check("", "a=1M; b=1M", "[a 1M][b 1M]");
    check("", "a=1M; b=1M; free a; c=512K", "[c 512K][. 512K][b 1M]");
    check("", "a=4M; b=4M; free a; c=2M", "[c 2M][. 2M][b 4M][. 12M]");
    check("", "a=4M; b=4M; free a; free b", "[. 20M]");
    check("", "a=4M; free a; trim", "");
    check("", "a=19.5M; free a; b=19M", "[b 20M]");
    check("", "a=1; b=513", "[a 512][b 1K][. 2046K]".replace("2046K", "2095616").as_str());
}

#[test]
fn expandable_segments_grow_and_shrink() {
    let on = "expandable_segments:True";
    check(on, "a=4M; b=30M", "[a 4M][b 30M][. 6M]");
    check(on, "a=4M; b=30M; free a; trim", "[. 4M][b 30M][. 6M]");
    check(on, "a=20M; b=20M; c=20M; free b; trim", "[a 20M] [c 20M]");
    check(on, "a=20M; b=20M; c=20M; free b; trim; d=20M", "[a 20M][d 20M][c 20M]");
    check(on, "a=20M; b=20M; c=20M; free b; trim; d=21M", "[a 20M] [c 20M][d 21M][. 19M]");
    check(on, "a=20M; free a; trim", "");
}

#[test]
fn the_smallest_fitting_block_is_used() {
    check("", "a=30M; b=14M; free a; free b; c=13M", "[. 30M] [c 14M]");
    check("", "a=30M; b=14M; free a; free b; c=12M", "[. 30M] [c 12M][. 2M]");
    check("", "a=30M; b=14M; free a; free b; c=15M", "[c 15M][. 15M] [. 14M]");
    check("", "a=8M; b=8M; free a; c=9M", "[. 8M][b 8M][. 4M] [c 9M][. 11M]");
    check("", "a=512K; b=512K; c=512K; free a; free c; d=256K", "[d 256K][. 256K][b 512K][. 1M]");
}

#[test]
fn a_rest_of_one_mebibyte_is_not_split_off() {
    check("", "a=12M; free a; b=11M", "[b 12M]");
    check("", "a=19M", "[a 20M]");
    check("", "a=18M", "[a 18M]");
    check("", "a=9M; b=10M", "[a 9M][b 11M]");
    check("", "a=9M; b=9.5M; c=9.5M", "[a 9M][b 9728K][. 1536K] [c 9728K][. 10752K]");
}

#[test]
fn oversize_blocks_are_not_split() {
    let limit = "max_split_size_mb:32";
    check(limit, "a=40M; free a; b=30M", "[. 40M] [b 30M]");
    check(limit, "a=40M; free a; b=36M", "[b 40M]");
    check(limit, "a=64M; free a; b=44M", "[. 64M] [b 44M]");
    check(limit, "a=31M; free a; b=9M", "[. 32M] [b 9M][. 11M]");
}
