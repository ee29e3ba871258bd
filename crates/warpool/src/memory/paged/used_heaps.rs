//! Looking at the heaps that were used since a request last needed pages: what is free in them, and who may be busy.

use super::device::PagedDevice;
use super::pages::PageTable;

/// Looks at the heaps that were used, or whose pages changed, since the last time: what is free in them, and who may be
/// busy.
pub(super) fn look_at_used(device: &PagedDevice, table: &mut PageTable) {
    for number in device.activity.take() {
        let mut heap = device.heaps.get(number).lock();
        heap.unlist();
        table.bystanders.note(heap.stream, number);
        table.note_used(number);
        let is_unused = heap.pool.is_default() && heap.is_first() && heap.last_work().is_some();
        table.unused_heaps.note(number, is_unused.then(|| heap.ends()));
        heap.merge_recent();
        table.look_at(number, &heap);
    }
    for number in table.take_changed() {
        let mut heap = device.heaps.get(number).lock();
        heap.merge_recent();
        table.look_at(number, &heap);
    }
}
