//! The paged allocator, Warpool's own: almost all memory that it reserves is in use.
//!
//! Physical memory is a stock of pages per device, shared by all streams and pools; addresses are plentiful. Each
//! stream and pool has a heap of address ranges, of which parts have pages behind them.
//!
//! # The life of an allocation
//! 1. The request is routed to a pool; with the stream, that names its heap (`heaps.rs`).
//! 2. A free block of the heap that fits is taken and cut to size (`heap/`). This is the hot path: one lock that
//!    threads on other streams never take, no driver call, no hash, no allocation.
//! 3. If none fits, free addresses are filled with pages (`window.rs`, `fill/`): spare ones, those under free blocks
//!    of this heap, of others, and only then new ones. Reserved memory grows when no whole free page is left.
//! 4. Freed, a block that only its own stream used is free at once. Others wait for fences (`pending.rs`).
//!
//! # Why this is safe
//! A page belongs to one address at a time, and only blocks there may use it. It is taken from an address only when all
//! blocks that touch it are free: so its last uses are in the heap's stream. The same stream's next use is after them;
//! another stream first waits for an event after them. A mapping is undone only after the stream has passed
//! (`old_mappings.rs`). Pages of private pools stay where they are while the pool is in use: graphs know their
//! addresses.
//!
//! # Streams that have gone
//! A stream may be destroyed once nothing is allocated for it, so it is not named from then on: the free of its last
//! block records an event (`stream_tail.rs`). A new stream gets the heap of one that may have gone as it is, with
//! mapped memory, once all work in it is done (`adoption.rs`). A heap that was not used for long is retired
//! (`retire.rs`): its pages belong to no stream any more, and its addresses serve the next one. A request that needs
//! pages looks only at heaps that were used since the last one, and at those with free pages (`pages/heaps.rs`).

mod activity;
mod address_space;
mod adoption;
mod allocate;
mod allocator;
mod annotate;
mod bystanders;
mod checkpoint;
mod counters;
mod decay;
mod device;
mod elastic;
mod elastic_table;
mod fill;
mod find_heap;
mod free;
mod heap;
mod heaps;
mod homes;
mod hot_path;
mod idle_pages;
mod ids;
mod inactive;
mod last_heap;
mod last_work;
mod left_addresses;
mod mapped_parts;
mod needs;
mod old_mappings;
mod page_sizes;
mod pages;
mod pending;
mod pools;
mod private_pools;
mod reclaim;
mod retire;
mod segments;
mod sharing;
mod shortage;
mod slot;
mod snapshot;
mod stream_tail;
mod supply;
mod take;
#[cfg(test)]
mod tests;
mod unused_heaps;
mod used_heaps;
mod window;

use std::fmt;
use std::sync::Arc;

use warpool_driver::{Access, DeviceAccess, DeviceId, DevicePtr, Driver, ErrorCode};

use self::device::PagedDevice;
use self::page_sizes::PageSizes;
use super::core::AllocatorCore;
use super::pool_owner::PoolOwner;
use super::report::Ranges;
use super::{Backend, PageStats, Settings, StackLevel, lint};
// Under these names, so that the models of `heaps` and `address_space` can give them others.
use crate::sync::{primitives as sync, spin_lock};
use crate::{Error, Instance, Result, lock};

/// The smallest page.
const SLOT_MIN: u64 = 2 << 20;

/// An allocator over pages of physical memory that are mapped where they are needed. See the
/// [module](crate::memory) for how allocators are used.
pub struct PagedAllocator {
    shared: Arc<AllocatorCore>,
    devices: Box<[PagedDevice]>,
}

impl PagedAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call. [`Error::Unsupported`] if a device has no
    /// virtual memory management, or a granularity that is no power of two.
    pub fn new(instance: &Instance, settings: Settings) -> Result<Self> {
        if instance.devices().any(|device| !device.properties().virtual_memory) {
            return Err(Error::Unsupported { allocator: "paged", what: "devices without virtual memory management" });
        }
        if instance.devices().any(|device| !device.properties().granularity.is_power_of_two()) {
            // No driver is known to have one. Slots have such a size, so that an address is divided by shifting it.
            return Err(Error::Unsupported { allocator: "paged", what: "a granularity that is no power of two" });
        }
        let shared = AllocatorCore::new(instance, naming_backend(settings));
        shared.observers.show_ranges(Ranges::Pages);
        let devices = instance.devices().map(|device| PagedDevice::new(&shared, &device)).collect();
        Ok(Self { shared, devices })
    }

    /// Returns free pages to the driver until at most `bytes` are reserved on the device, or no page is free. Returns
    /// how many bytes.
    pub fn trim_to(&self, device: DeviceId, bytes: u64) -> Result<u64> {
        let device = self.device(device)?;
        let details = device.timed_details(StackLevel::All);
        let trimmed = reclaim::release_all(device, super::MemPoolId::DEFAULT, bytes, &details);
        device.report();
        trimmed
    }

    /// What a device's pages are used for.
    fn count_pages(&self, device: DeviceId) -> Result<PageStats> {
        let device = self.device(device)?;
        let table = lock(&device.pages);
        let (mut active_bytes, mut free_mapped_bytes, mut elastic_bytes) = (0, 0, 0);
        let with_segments = table.heaps_with_segments();
        for (_, heap) in device.heaps.iter().filter(|(number, _)| !with_segments.contains(number)) {
            let mut heap = heap.lock();
            active_bytes += heap.counters().active_bytes();
            free_mapped_bytes += heap.free_bytes();
            elastic_bytes += heap.elastic_bytes();
        }
        Ok(PageStats {
            pages: table.count(),
            reserved_bytes: table.bytes_of_pages(),
            active_bytes,
            free_mapped_bytes,
            spare_bytes: table.homeless_pages().map(|page| table.page_bytes(page)).sum(),
            elastic_bytes,
            bytes_mapped_twice: table.bytes_mapped_twice(),
            totals: table.totals,
        })
    }

    /// Lets kernels on `device` access what this allocator has on `owner`.
    fn let_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.device(device)?;
        let owner_device = self.device(owner)?;
        if device == owner || lock(&owner_device.peers).contains(&device) {
            return Ok(());
        }
        match self.driver().peer_enable(device, owner) {
            Err(error) if error.code != ErrorCode::PeerAccessAlreadyEnabled => return Err(error.into()),
            _ => {}
        }
        self.share_pools(owner, device)?;
        {
            // Under this lock nothing is mapped meanwhile.
            let table = lock(&owner_device.pages);
            if lock(&owner_device.peers).contains(&device) {
                return Ok(());
            }
            for (ptr, bytes) in table.mapped_runs() {
                let access = [DeviceAccess { device, access: Access::ReadWrite }];
                self.driver().vm_set_access(DevicePtr(ptr), bytes, &access)?;
            }
            lock(&owner_device.peers).push(device);
        }
        // Pools that were created meanwhile.
        self.share_pools(owner, device)
    }

    /// From how much reserved memory on new pages have two and four slots: so tests have pages of all sizes on small
    /// devices.
    #[doc(hidden)]
    pub fn set_page_sizes(&self, pairs_from: u64, fours_from: u64) {
        for device in &self.devices {
            lock(&device.pages).page_sizes = PageSizes { pairs_from, fours_from };
        }
    }

    /// Whether a new stream may get the heap of one that has gone, which depends on when work was done. A replay, in
    /// which no work runs, switches it off.
    #[doc(hidden)]
    pub fn set_adoption(&self, adopts: bool) {
        for device in &self.devices {
            lock(&device.pages).unused_heaps.never_adopted = !adopts;
        }
    }

    /// Checks every invariant of the state. Slow; for tests, while no other thread is at work.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        for device in &self.devices {
            let table = lock(&device.pages);
            table.check();
            let mut homes = 0;
            for (number, heap) in device.heaps.iter() {
                let heap = heap.lock();
                heap.check(table.slot_bytes);
                homes += table.check_heap(number, &heap);
            }
            let spare: u64 = table.homeless_pages().map(|page| table.page_bytes(page)).sum();
            assert_eq!(homes + spare, table.bytes_of_pages(), "every page is somewhere");
        }
    }

    fn driver(&self) -> &dyn Driver {
        self.shared.driver()
    }

    #[inline]
    fn device(&self, device: DeviceId) -> Result<&PagedDevice> {
        self.shared.device(&self.devices, device)
    }
}

/// The settings, with a string that names this allocator: so a recording says what it was made with.
fn naming_backend(settings: Settings) -> Settings {
    let settings = Settings { backend: Backend::Paged, ..settings };
    let is_named = lint(&settings.text).effective.is_some_and(|read| read.backend == Backend::Paged);
    let text = if is_named { settings.text.clone() } else { settings.to_conf_string() };
    Settings { text, ..settings }
}

impl fmt::Debug for PagedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedAllocator").field("instance", &self.shared.instance).finish_non_exhaustive()
    }
}
