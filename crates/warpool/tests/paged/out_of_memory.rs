//! The out-of-memory report of the paged allocator: live, free but mapped, spare, waiting for streams, and fixed.

use warpool::memory::pools::PoolOptions;
use warpool::memory::report::PageShortage;
use warpool::memory::{DeviceAllocator as _, MemPool, OomCause, OomReport};
use warpool::{Error, Stream};

use crate::{DEVICE, MIB, Machine};

fn limited(bytes: u64) -> Machine {
    let machine = Machine::new();
    machine.paged.set_memory_cap(DEVICE, Some(bytes)).unwrap();
    machine
}

fn refused(machine: &Machine, bytes: u64, stream: &Stream) -> (OomReport, PageShortage) {
    let before = machine.paged.page_stats(DEVICE).unwrap().reserved_bytes;
    let Err(Error::OutOfMemory(report)) = machine.try_block(bytes, stream) else { panic!("out of memory") };
    assert_eq!(machine.reserved(), before, "a failed request changes nothing");
    let pages = report.pages.expect("where free memory is");
    assert!(!report.to_string().contains("expandable"), "{report}");
    let sum = report.bytes_allocated + report.bytes_pending + pages.bytes_free_mapped + pages.bytes_spare;
    assert_eq!(sum + pages.bytes_fixed, report.bytes_reserved, "every byte is somewhere: {report}");
    (*report, pages)
}

#[test]
fn it_tells_live_memory_from_what_is_free_in_used_pages() {
    let machine = limited(512 * MIB);
    let stream = machine.stream();
    // Every second block of 1 MiB + 512 stays, so that no whole page is free.
    let mut blocks: Vec<_> = (0..200).map(|_| machine.block(MIB + 512, &stream)).collect();
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 2 == 0
    });
    let (report, pages) = refused(&machine, 400 * MIB, &stream);
    assert_eq!((report.bytes_allocated, report.bytes_pending), (100 * (MIB + 512), 0));
    assert_eq!((pages.bytes_whole_pages, pages.bytes_spare, pages.bytes_fixed), (0, 0, 0));
    assert!(pages.bytes_in_used_pages() >= 100 * MIB, "{report}");
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(512 * MIB)));
    machine.paged.set_memory_cap(DEVICE, Some(256 * MIB)).unwrap();
    let (report, _) = refused(&machine, 98 * MIB, &stream);
    let text = report.to_string();
    assert!(text.contains("Free memory in partly used pages would have sufficed"), "{text}");
}

#[test]
fn it_names_pools_whose_pages_stay() {
    let machine = limited(256 * MIB);
    let stream = machine.stream();
    let pool = MemPool::new(&machine.allocator, &machine.device, PoolOptions::default()).unwrap();
    {
        let _scope = pool.enter().unwrap();
        drop(machine.block(100 * MIB, &stream));
    }
    let (report, pages) = refused(&machine, 200 * MIB, &stream);
    assert_eq!((pages.bytes_fixed, report.bytes_private_free, report.bytes_cached), (100 * MIB, 100 * MIB, 0));
    assert!(report.to_string().contains("drop graphs and pools"), "{report}");
    pool.close().unwrap();
    drop(machine.block(200 * MIB, &stream));
}

#[test]
fn inside_a_capture_it_says_what_could_not_be_taken() {
    let machine = limited(256 * MIB);
    let (stream, other) = (machine.stream(), machine.stream());
    drop(machine.block(150 * MIB, &other));
    let pools = machine.paged.pools().unwrap();
    pools.capture_began(DEVICE).unwrap();
    machine.sim_driver().capture_begin(stream.id(), warpool::driver::CaptureMode::Relaxed).unwrap();
    let (report, pages) = refused(&machine, 200 * MIB, &stream);
    assert_eq!((pages.bytes_whole_pages, pages.bytes_free_mapped, report.capturing), (150 * MIB, 150 * MIB, true));
    assert!(report.to_string().contains("before the capture begins"), "{report}");
    machine.sim_driver().capture_end(stream.id()).unwrap();
    pools.capture_ended(DEVICE).unwrap();
    drop(machine.block(200 * MIB, &stream));
}
