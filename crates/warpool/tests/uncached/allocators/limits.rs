//! Counters, limits, a full device, and the return of memory.

use super::*;

#[test]
fn counters_and_snapshots_agree_in_random_programs() {
    each_by_default(|context| {
        for seed in 0..4 {
            println!("seed: {seed}");
            let mut rng = Rng::new(seed);
            let streams = [context.stream(), context.stream()];
            let mut live: Vec<Allocation> = Vec::new();
            for step in 0..400 {
                match rng.below(10) {
                    0..=4 => live.push(context.block(request_bytes(&mut rng), &streams[rng.below(2)])),
                    5..=7 if !live.is_empty() => {
                        let block = live.swap_remove(rng.below(live.len()));
                        match rng.below(3) {
                            0 => context.allocator.free(block).unwrap(),
                            1 => context.allocator.free_raw(block.ptr).unwrap(),
                            _ => context.allocator.free_later(block),
                        }
                    }
                    8 if !live.is_empty() => {
                        let block = live[rng.below(live.len())];
                        context.allocator.record_use(block, streams[rng.below(2)].id()).unwrap();
                    }
                    9 if step % 50 == 0 => drop(context.trim()),
                    _ => {}
                }
                if step % 10 == 0 {
                    context.expect_sound(&live);
                }
            }
            for block in live.drain(..) {
                context.allocator.free(block).unwrap();
            }
            context.trim();
            context.expect_sound(&[]);
            let stats = context.stats();
            assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0));
            assert_eq!(stats.allocation.all.allocated, stats.allocation.all.freed);
        }
        context.expect_no_hazard();
    });
}

#[test]
fn peaks_and_accumulated_counters_can_be_reset() {
    each_by_default(|context| {
        let stream = context.stream();
        let (kept, freed) = (context.block(40 * MIB, &stream), context.block(80 * MIB, &stream));
        context.allocator.free(freed).unwrap();
        context.trim();
        let before = context.stats();
        assert_eq!(before.allocated_bytes.all.peak, 120 * MIB);
        assert!(before.reserved_bytes.all.peak >= 120 * MIB);
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.reset_accumulated_stats(DEVICE).unwrap();
        let after = context.stats();
        for (before, after) in [
            (before.allocated_bytes, after.allocated_bytes),
            (before.active_bytes, after.active_bytes),
            (before.reserved_bytes, after.reserved_bytes),
        ] {
            assert_eq!((after.all.current, after.all.peak), (before.all.current, before.all.current));
            assert_eq!((after.all.allocated, after.all.freed), (0, 0));
        }
        context.allocator.free(kept).unwrap();
    });
}

#[test]
fn a_memory_fraction_limits_and_can_be_lifted() {
    each_by_default(|context| {
        let stream = context.stream();
        for wrong in [-0.1, 1.1, f64::NAN] {
            assert!(matches!(context.allocator.set_memory_fraction(DEVICE, wrong), Err(Error::Fraction { .. })));
        }
        assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(1.0));
        let limit = context.device().properties().bytes_total / 128;
        context.allocator.set_memory_fraction(DEVICE, 1.0 / 128.0).unwrap();
        assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(1.0 / 128.0));

        let held = context.block(limit / 2, &stream);
        let Error::OutOfMemory(report) = context.refused(limit / 2 + 64 * MIB, &stream) else { panic!("no report") };
        assert_eq!((report.cause, report.device, report.capturing), (OomCause::Limit, DEVICE, false));
        assert_eq!((report.bytes_requested, report.bytes_limit), (limit / 2 + 64 * MIB, Some(limit)));
        assert_eq!((report.bytes_allocated, report.bytes_pending), (held.bytes, 0));
        assert!(report.bytes_free > limit && report.bytes_total > report.bytes_free);
        assert!(report.to_string().contains("allowed"), "{report}");
        assert_eq!(context.stats().num_ooms, 1);
        context.expect_sound(&[held]);

        // Cached memory of another size is released.
        context.allocator.free(held).unwrap();
        let large = context.block(limit - 64 * MIB, &stream);
        context.allocator.free(large).unwrap();
        context.allocator.set_memory_fraction(DEVICE, 1.0).unwrap();
        let more = context.block(2 * limit, &stream);
        context.allocator.free(more).unwrap();
    });
}

#[test]
fn a_full_device_is_an_error_and_recovers() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let stream = context.stream();
        let mut live = Vec::new();
        let report = loop {
            match context.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 256 * MIB)) {
                Ok(block) => live.push(block),
                Err(Error::OutOfMemory(report)) => break report,
                Err(other) => panic!("{other}"),
            }
        };
        assert!(live.len() >= 12, "{} blocks fitted", live.len());
        assert!(matches!(report.cause, OomCause::Device | OomCause::External), "{report}");
        assert_eq!(report.bytes_limit, None);
        assert_eq!(report.bytes_allocated, 256 * MIB * live.len() as u64);
        let stats = context.stats();
        assert_eq!((stats.num_ooms, stats.num_alloc_retries), (1, 1));
        context.expect_sound(&live);

        // The request waits for frees on a busy stream, and cached memory of another size is released.
        crate::common::keep_busy(&stream);
        for block in live.drain(..) {
            context.allocator.free(block).unwrap();
        }
        let large = context.block(3 * GIB, &stream);
        context.expect_sound(&[large]);
        context.allocator.free(large).unwrap();
        context.trim();
        context.expect_no_hazard();
    });
}

#[test]
fn a_request_waits_for_pending_blocks_before_it_fails() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let (own, other) = (context.stream(), context.stream());
        let first = context.block(2 * GIB, &own);
        crate::common::keep_busy(&other);
        context.allocator.record_use(first, other.id()).unwrap();
        context.allocator.free(first).unwrap();
        let second = context.block(3 * GIB, &own);
        context.allocator.free(second).unwrap();
        context.expect_no_hazard();
    });
}

#[test]
fn trim_releases_all_unused_memory() {
    each_by_default(|context| {
        let stream = context.stream();
        let before = context.sim_driver().mem_info(DEVICE).unwrap().bytes_free;
        let kept = context.block(30 * MIB, &stream);
        let freed: Vec<_> = [100 * KIB, 5 * MIB, 200 * MIB].map(|bytes| context.block(bytes, &stream)).into();
        freed.into_iter().for_each(|block| context.allocator.free_later(block));
        let reserved = context.stats().reserved_bytes.all.current;
        let trimmed = context.trim();
        assert!(trimmed >= 200 * MIB);
        assert_eq!(context.stats().reserved_bytes.all.current, reserved - trimmed);
        context.expect_sound(&[kept]);
        assert_eq!(context.trim(), 0);
        context.allocator.free(kept).unwrap();
        context.trim();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        assert_eq!(context.sim_driver().mem_info(DEVICE).unwrap().bytes_free, before);
        assert!(context.allocator.largest_available(DEVICE).unwrap() >= before);
    });
}

#[test]
fn destructors_make_no_driver_call() {
    each(&SimConfig::default().without_suballocation_tracking(), |context| {
        let (own, other) = (context.stream(), context.stream());
        let blocks: Vec<_> = (0..4).map(|_| context.allocator.allocate(3 * MIB, &own).unwrap()).collect();
        blocks[0].record_use(&other).unwrap();
        crate::common::keep_busy(&other);
        context.counting.reset();
        drop(blocks);
        assert_eq!(context.counting.counts(), []);
        assert_eq!(context.stats().allocation.all.current, 0);
        // The next call does the rest.
        let block = context.allocator.allocate(3 * MIB, &own).unwrap();
        block.free().unwrap();
        context.trim();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        context.counting.reset();
        drop(context.allocator.allocate(0, &own).unwrap());
        assert_eq!(context.counting.counts(), []);
        context.expect_no_hazard();
    });
}
