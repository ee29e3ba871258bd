//! Looking at the heaps that were used since a request last needed pages: what is free in them, and who may be busy.

use super::device::PagedDevice;
use super::heap::Heap;
use super::heap_index::FreeMemory;
use super::pages::PageTable;

/// Looks at the heaps that were used, or whose pages changed, since the last time.
pub(super) fn look_at_used(device: &PagedDevice, table: &mut PageTable) {
    for number in device.activity.take() {
        let mut heap = device.heaps.get(number).lock();
        heap.unlist();
        table.bystanders.note(heap.stream, number);
        table.index.note_used(number);
        let is_unused = heap.pool.is_default() && heap.is_first() && heap.last_work().is_some();
        table.unused_heaps.note(number, is_unused.then(|| heap.ends()));
        look_at(table, number, &mut heap);
    }
    for number in table.index.take_changed() {
        look_at(table, number, &mut device.heaps.get(number).lock());
    }
}

fn look_at(table: &mut PageTable, number: u32, heap: &mut Heap) {
    heap.merge_recent();
    let free = FreeMemory {
        has_pages: table.has_free_pages(heap),
        bytes_in_parts: table.bytes_in_parts(heap),
        is_default: heap.pool.is_default(),
    };
    table.index.set(number, free);
}
