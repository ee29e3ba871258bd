//! Elastic memory at addresses that another heap has had.

use warpool_driver::Devices as _;

use super::super::reclaim;
use super::machine::{DEVICE, MIB, Machine};
use crate::lock;
use crate::memory::elastic::{ElasticLayout, ElasticRanges as _};
use crate::memory::report::EntryDetails;
use crate::memory::{DeviceAllocator as _, MemPoolId, Request, Settings};

/// A page of 8 MiB that lies across a multiple of 8 MiB is still mapped there. It is not taken back: half of it could
/// not be decommitted.
#[test]
fn a_page_across_a_border_is_not_taken_back() {
    let machine = Machine::with_capacity(400 * MIB, 1, Settings::default());
    let (paged, stream) = (&machine.paged, machine.streams[0].id());
    let allocate = |mib| paged.allocate_raw(Request::new(DEVICE, stream, mib * MIB)).unwrap();
    // The slots 0 to 6, and 7. Pages of up to 8 MiB are then mapped in the first seven from their end.
    let (first, last) = (allocate(14), allocate(2));
    assert_eq!(last.ptr, first.ptr.offset(14 * MIB));
    paged.free(first).unwrap();
    paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    paged.set_page_sizes(0, 0);
    let again = allocate(14);
    assert_eq!((again.ptr, paged.page_stats(DEVICE).unwrap().pages), (first.ptr, 4));
    [again, last].into_iter().for_each(|block| paged.free(block).unwrap());
    machine.sim.device_synchronize(DEVICE).unwrap();
    {
        let device = &paged.devices[0];
        let mut table = lock(&device.pages);
        let heap = device.existing_heap(stream, MemPoolId::DEFAULT).unwrap();
        assert!(reclaim::retire_idle(device, &mut table, heap, &EntryDetails::default()));
    }
    let range = paged.reserve(DEVICE, stream, ElasticLayout { rows: 1, blocks: 8, block_bytes: 2 * MIB }).unwrap();
    assert_eq!(range.ptr, first.ptr, "the addresses of the retired heap");
    paged.commit(&range, stream, 0..8).unwrap();
    paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    paged.decommit(&range, stream, 0..4).unwrap();
    assert_eq!(paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap(), 8 * MIB, "all of the first half");
    paged.release(&range);
    paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    paged.check();
    assert_eq!(machine.finish(), None);
}
