//! Every numeric setting at 0, 1 and the maximum, through the string and through the fields: an error or a working
//! allocator, never a panic.

use std::sync::Arc;

use crate::common::memory::{FIRST, GIB, MIB};
use warpool::Instance;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::raw::Request;
use warpool::memory::settings::Reserve;
use warpool::memory::{CachingAllocator, DeviceAllocator, HostAllocator, MemPoolId, Settings};

/// Requests of all sizes, frees and a trim; and some pinned memory.
fn exercise(settings: &Settings, about: &str) {
    println!("{about}");
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_capacity(GIB)));
    let instance = Instance::new(sim).unwrap();
    let stream = instance.device(0).unwrap().default_stream().unwrap();
    for expandable_segments in [false, true] {
        let settings = Settings { expandable_segments, ..settings.clone() };
        let allocator = CachingAllocator::new(&instance, settings.clone());
        let sizes = [1, 512, MIB, MIB + 1, 5 * MIB, 10 * MIB - 1, 10 * MIB, 33 * MIB, (1 << 60) - 1, u64::MAX];
        for _ in 0..2 {
            let blocks: Vec<_> = sizes
                .iter()
                .filter_map(|&bytes| allocator.allocate_raw(Request::new(FIRST, stream.id(), bytes)).ok())
                .collect();
            allocator.check();
            blocks.into_iter().for_each(|block| allocator.free(block).unwrap());
            allocator.check();
            allocator.set_settings(settings.clone()).unwrap();
        }
        allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        allocator.check();
    }
    let host = HostAllocator::new(&instance, settings.pinned.clone());
    let block = host.allocate(1000);
    drop(block);
    host.trim(0).unwrap();
}

#[test]
fn strings() {
    let keys = [
        "large_segment_size_mb",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments_reserve",
        "per_process_memory_fraction",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_cap_mb",
        "pinned_device_cap_mb",
        "memory_cap_mb",
    ];
    let mut valid = 0;
    for key in keys {
        for value in ["0", "1", "2", "11", "0.5", "1e300", "1G", "9007199254740992", "18446744073709551615"] {
            for more in ["", ",per_process_memory_fraction:0.5", ",throw_on_cudamalloc_oom:True"] {
                let string = format!("{key}:{value}{more}");
                if let Ok(settings) = Settings::parse(&string) {
                    valid += 1;
                    exercise(&settings, &string);
                }
            }
        }
    }
    assert!(valid > 30, "{valid} of them are valid");
    let error = Settings::parse("large_segment_size_mb:18446744073709551615").unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
    assert!(Settings::parse("large_segment_size_mb:0").is_err());
}

#[test]
fn fields() {
    for value in [0, 1, 511, 10 * MIB, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
        let set: [fn(&mut Settings, u64); 11] = [
            |settings, value| settings.large_segment_bytes = value,
            |settings, value| settings.max_split_bytes = Some(value),
            |settings, value| settings.max_non_split_rounding_bytes = value,
            |settings, value| settings.roundup_power2_divisions = [value; 16],
            |settings, value| settings.expandable_segments_reserve = Some(Reserve::Bytes(value)),
            |settings, value| settings.memory_cap_bytes = Some(value),
            |settings, value| settings.pinned.reserve_segment_bytes = value.min(GIB),
            |settings, value| settings.pinned.max_round_threshold_bytes = Some(value),
            |settings, value| settings.pinned.max_cached_bytes = Some(value),
            |settings, value| settings.pinned.cap_bytes = Some(value),
            |settings, value| settings.pinned.device_cap_bytes = Some(value),
        ];
        for (at, set) in set.into_iter().enumerate() {
            let mut settings = Settings::default();
            set(&mut settings, value);
            exercise(&settings, &format!("field {at} of {value}"));
        }
    }
    for value in [0.0, -0.0, -1.0, 1.0, 2.0, 1e300, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MIN_POSITIVE] {
        let set: [fn(&mut Settings, f64); 3] = [
            |settings, value| settings.garbage_collection_threshold = value,
            |settings, value| settings.per_process_memory_fraction = value,
            |settings, value| settings.expandable_segments_reserve = Some(Reserve::Fraction(value)),
        ];
        for (at, set) in set.into_iter().enumerate() {
            let mut settings = Settings { memory_cap_bytes: Some(500 * MIB), ..Settings::default() };
            settings.throw_on_cudamalloc_oom = at == 1;
            set(&mut settings, value);
            exercise(&settings, &format!("fraction {at} of {value}"));
        }
    }
}
