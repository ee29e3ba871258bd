//! What windows in a run of free addresses need at least, without sums over its slots: most runs then need none.

use std::ops::Range;

use super::Wanted;
use crate::memory::paged::heap::FreeRun;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::slot::{MappedByChunk, Slot};

/// Driver calls, pages, and an address: no window of a run has less, in this order.
pub(super) type Least = (u32, u32, u64);

/// A [`Least`] in one number: which of two is less cannot be predicted, and so it takes no branch.
type Packed = u128;

fn packed((calls, pages, addr): Least) -> Packed {
    Packed::from(calls) << 96 | Packed::from(pages) << 64 | Packed::from(addr)
}

/// So many runs are looked at before more is found out about the others. In tests there are few.
const LOOKED_AT_FIRST: usize = if cfg!(test) { 1 } else { 2 };

/// The runs that are still to be looked at.
pub(super) struct Bounds<'a> {
    wanted: Wanted<'a>,
    memory: &'a mut BoundsMemory,
    looked_at: usize,
    /// Whether runs have bounds. Otherwise all are looked at.
    has_bounds: bool,
}

/// Kept from one search to the next.
#[derive(Debug, Default)]
pub(super) struct BoundsMemory {
    /// What each run needs at least, and its position among all runs.
    left: Vec<(Packed, usize)>,
    chunks: Chunks,
}

impl<'a> Bounds<'a> {
    pub(super) fn new(wanted: Wanted<'a>, memory: &'a mut BoundsMemory) -> Self {
        let least = |run: &FreeRun| packed((0, least_pages(wanted, run), run.start));
        memory.left.clear();
        memory.left.extend(wanted.runs.iter().map(least).zip(0..));
        Self { wanted, memory, looked_at: 0, has_bounds: true }
    }

    /// Nothing is known of the runs: all are looked at.
    pub(super) fn unknown(wanted: Wanted<'a>, memory: &'a mut BoundsMemory) -> Self {
        memory.left.clear();
        memory.left.extend((0..wanted.runs.len()).map(|position| (0, position)));
        Self { wanted, memory, looked_at: 0, has_bounds: false }
    }

    /// The run that could be the best of those that are left, if it could have a window that needs less than the best
    /// so far.
    pub(super) fn next_below(&mut self, best: Option<Least>) -> Option<&'a FreeRun> {
        if self.has_bounds && self.looked_at == LOOKED_AT_FIRST && best.is_none_or(|(calls, ..)| calls > 0) {
            self.raise();
        }
        self.looked_at += 1;
        let left = &mut self.memory.left;
        let first = (0..left.len()).min_by_key(|&at| left[at])?;
        let (least, position) = left.swap_remove(first);
        best.is_none_or(|best| least < packed(best)).then(|| self.wanted.runs.get(position))
    }

    /// Finds out how many driver calls windows of the runs need at least.
    fn raise(&mut self) {
        let Wanted { table, runs, .. } = self.wanted;
        let BoundsMemory { left, chunks } = self.memory;
        chunks.count(self.wanted);
        for (least, position) in left {
            let run = runs.get(*position);
            let [first, last] = [run.start, run.end - 1].map(|addr| table.slot_index(run.range, addr));
            let pages = least_pages(self.wanted, run);
            *least = packed((chunks.least_calls(run.range, first, last, pages), pages, run.start));
        }
    }
}

/// No window of the run needs fewer pages: as many slots as it has outside of its holes have one.
fn least_pages(wanted: Wanted<'_>, run: &FreeRun) -> u32 {
    let in_holes = wanted.bytes.saturating_sub(run.free_bytes);
    u32::try_from(in_holes.div_ceil(wanted.table.slot_bytes)).unwrap_or(u32::MAX)
}

/// What is mapped in the chunks of the ranges that have runs.
#[derive(Debug, Default)]
struct Chunks {
    /// The chunks of each range. Of those without runs: the last one.
    of_range: Vec<Range<u32>>,
    all: Vec<Chunk>,
    /// A window has slots of no more chunks.
    in_window: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// Slots of pages that are still mapped, may be taken back, and begin in this chunk.
    takeable: u32,
    /// Slots in which nothing is mapped.
    unmapped: u32,
}

impl Chunks {
    fn count(&mut self, wanted: Wanted<'_>) {
        let Wanted { table, runs, bytes, unit, takeable, .. } = wanted;
        // A window may begin within a slot, and be up to a unit longer on either side; its first page may begin before.
        let slots = bytes.div_ceil(table.slot_bytes) + u64::from(2 * unit + PageSizes::SLOTS_MAX);
        let in_window = slots.div_ceil(u64::from(MappedByChunk::SLOTS)) as u32 + 1;
        self.in_window = in_window as usize;
        let Self { of_range, all, .. } = self;
        all.clear();
        of_range.clear();
        of_range.resize(table.range_count(), 0..0);
        for run in runs.iter() {
            let of_range = &mut of_range[run.range as usize];
            if of_range.end == 0 {
                // And a window behind the last slot that was ever used.
                let count = MappedByChunk::chunk_of(table.slots_used(run.range)) + 1 + in_window;
                let start = all.len() as u32;
                let unmapped = table.mapped_by_chunk(run.range).unmapped().take(count as usize);
                all.extend(unmapped.map(|unmapped| Chunk { takeable: 0, unmapped }));
                *of_range = start..all.len() as u32;
            }
        }
        let last = all.len() as u32;
        all.push(Chunk::default());
        of_range.iter_mut().filter(|of_range| of_range.end == 0).for_each(|of_range| *of_range = last..last);
        takeable.for_each_in_both(table.with_old(), |page| {
            let page = table.page(page);
            for &slot in &page.mapped {
                self.at(slot).takeable += page.slots;
            }
            if let Some(home) = page.home {
                // It is in no hole there.
                self.at(home).takeable -= page.slots;
            }
        });
    }

    /// The chunk of a slot; the last one if it is in another range.
    #[inline]
    fn at(&mut self, Slot { range, index }: Slot) -> &mut Chunk {
        let last = self.all.len() - 1;
        let chunk = self.of_range[range as usize].start + MappedByChunk::chunk_of(index);
        &mut self.all[last.min(chunk as usize)]
    }

    /// No window between these slots of a range that needs so many pages needs fewer calls.
    fn least_calls(&self, range: u32, first: u32, last: u32, pages: u32) -> u32 {
        let of_range = self.of_range[range as usize].clone();
        let chunks = &self.all[of_range.start as usize..of_range.end as usize];
        let [first, last] = [first, last].map(|index| MappedByChunk::chunk_of(index) as usize);
        let chunks = chunks.get(first..chunks.len().min(last + 1)).unwrap_or_default();
        let (begin, rest) = chunks.split_at(chunks.len().min(self.in_window));
        let mut sum = begin.iter().copied().fold(Chunk::default(), Chunk::with);
        let mut least = sum.least_calls(pages);
        for (&first, &next) in chunks.iter().zip(rest) {
            sum = sum.with(next).without(first);
            least = least.min(sum.least_calls(pages));
        }
        least
    }
}

impl Chunk {
    fn with(self, other: Self) -> Self {
        Self { takeable: self.takeable + other.takeable, unmapped: self.unmapped + other.unmapped }
    }

    fn without(self, other: Self) -> Self {
        Self { takeable: self.takeable - other.takeable, unmapped: self.unmapped - other.unmapped }
    }

    /// With its slots at best: a page that is taken back needs no call, one where nothing is mapped has to be mapped,
    /// and elsewhere another mapping has to be undone first.
    fn least_calls(self, pages: u32) -> u32 {
        let mapped = pages.saturating_sub(self.takeable);
        mapped + mapped.saturating_sub(self.unmapped)
    }
}
