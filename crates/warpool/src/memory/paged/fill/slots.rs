//! Getting pages for slots that the caller chooses: elastic memory. As for any other window, but for its place.

use super::{Fill, FillRequest, Filled, OrOom};
use crate::memory::paged::device::PagedDevice;
use crate::memory::paged::ids::{BlockId, RangeId, RangeInHeap};
use crate::memory::paged::old_mappings;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::window::Window;
use crate::memory::report::EntryDetails;
use crate::memory::{OomCause, SegmentKind};
use crate::{Error, Result, lock};

/// Neighbouring slots of elastic memory, none of which is allocated.
#[derive(Clone, Copy)]
pub(in crate::memory::paged) struct Slots {
    pub(in crate::memory::paged) range: RangeId,
    pub(in crate::memory::paged) range_in_heap: RangeInHeap,
    pub(in crate::memory::paged) start: u64,
    pub(in crate::memory::paged) end: u64,
    /// The last allocated slot of the range before them.
    pub(in crate::memory::paged) before: Option<BlockId>,
}

/// Allocates slots, each of them a block. Returns their numbers.
pub(in crate::memory::paged) fn allocate_slots(
    device: &PagedDevice,
    request: FillRequest,
    slots: Slots,
    details: &EntryDetails,
) -> Result<OrOom<Vec<BlockId>>> {
    let mut table = lock(&device.pages);
    let mut fill = Fill::new(device, request, &mut table, details);
    let outcome = fill.run_slots(slots);
    fill.end();
    outcome
}

impl Fill<'_> {
    fn run_slots(&mut self, slots: Slots) -> Result<OrOom<Vec<BlockId>>> {
        self.prepare()?;
        let Slots { range, range_in_heap, start, end, before } = slots;
        self.page_slots = if self.request.on_oom { 1 } else { self.new_page_slots(SegmentKind::Large) };
        self.border = PageSizes::SLOTS_MAX;
        let mut waited = false;
        loop {
            let filling = {
                let mut heap = self.cell.lock();
                heap.merge_recent();
                heap.begin_filling_slots(range_in_heap, before, start, end)
            };
            let window = Window { addr: start, start, end, range, anchor: filling };
            // Pages that are mapped in the window and free count, as the heap's own do.
            let needed = self.slots(window).filter(|&slot| self.table.own_page(slot).is_none()).count() as u64;
            self.asks_others |= self.request.on_oom || self.own_free_bytes() < needed * self.table.slot_bytes;
            let filled = self.fill(window);
            let mut heap = self.cell.lock();
            if matches!(filled, Ok(Filled::Done)) {
                return Ok(Ok(heap.end_filling_slots(filling, self.table.slot_bytes)));
            }
            heap.end_filling(filling, &self.pieces(window));
            drop(heap);
            match filled? {
                Filled::Done => {}
                Filled::NeedsOthers => self.asks_others = true,
                // Pages that others have taken are still mapped here, and work that used them here may still run. There
                // is no other window: the host waits for it, once.
                Filled::Blocked(_) if !waited => {
                    old_mappings::wait(self.device, self.table, self.request.heap, self.details)?;
                    waited = true;
                }
                // A capture forbids to wait.
                Filled::Blocked(_) if self.device.has_captures() => {
                    return Err(Error::ElasticInCapture { stream: self.request.stream });
                }
                Filled::Blocked(_) => return Ok(Err(OomCause::Device)),
                Filled::OutOfMemory(cause) => return Ok(Err(cause)),
            }
        }
    }
}
