//! Expandable segments of the model: where there is room, what is mapped and unmapped.

use super::{Block, BlockRequest, MIB, Model, State};
use crate::placement::driver_calls::DriverCalls;

impl Model {
    pub(super) fn size_with_unmapped(&self, (segment, at): (usize, usize)) -> u64 {
        let blocks = &self.segments[segment].blocks;
        let behind = blocks.get(at + 1).filter(|block| block.state == State::Unmapped);
        blocks[at].size + behind.map_or(0, |block| block.size)
    }

    /// The lowest position with room in expandable segments: adjacent free or unmapped blocks, one of the first two
    /// unmapped.
    pub(super) fn room(&self, request: &BlockRequest) -> Option<(usize, usize)> {
        let usable = |block: &Block| matches!(block.state, State::Free | State::Unmapped);
        let mut positions = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if segment.chunk.is_none()
                || (segment.pool, segment.small, segment.stream) != (request.pool, request.small, request.stream)
            {
                continue;
            }
            for (at, block) in segment.blocks.iter().enumerate() {
                if block.state == State::Unmapped {
                    let first = if at > 0 && usable(&segment.blocks[at - 1]) { at - 1 } else { at };
                    let room: u64 =
                        segment.blocks[first..].iter().take_while(|block| usable(block)).map(|block| block.size).sum();
                    if room >= request.size {
                        positions.push((block.at, (index, first)));
                    }
                }
            }
        }
        positions.into_iter().min().map(|(_, position)| position)
    }

    pub(super) fn grow(&mut self, request: &BlockRequest, calls: &mut DriverCalls) -> Option<(usize, usize)> {
        let (segment, mut at) = match self.room(request) {
            Some(position) => position,
            None => {
                let chunk = if request.small { 2 * MIB } else { self.rules.large_segment };
                let most = self.bytes_total + self.bytes_total / 8;
                let bytes = self.rules.reserve.unwrap_or(most).min(most).div_ceil(chunk) * chunk;
                if bytes < request.size {
                    return None;
                }
                let base = calls.reserve(bytes)?;
                self.add_segment(request, base, bytes, Some(chunk));
                (self.segments.len() - 1, 0)
            }
        };
        if self.segments[segment].blocks[at].state == State::Unmapped {
            let bytes = request.size.min(self.segments[segment].blocks[at].size);
            at = self.map(segment, at, bytes, calls)?;
        }
        while self.segments[segment].blocks[at].size < request.size {
            let missing = request.size - self.segments[segment].blocks[at].size;
            let bytes = missing.min(self.segments[segment].blocks[at + 1].size);
            at = self.map(segment, at + 1, bytes, calls)?;
        }
        Some((segment, at))
    }

    /// Maps the start of an unmapped block. Returns the index of the free block that it is part of.
    pub(super) fn map(&mut self, segment: usize, at: usize, bytes: u64, calls: &mut DriverCalls) -> Option<usize> {
        let chunk = self.segments[segment].chunk.expect("expandable");
        let bytes = bytes.div_ceil(chunk) * chunk;
        let start = self.segments[segment].blocks[at].at;
        calls.map(start, bytes, chunk)?;
        let blocks = &mut self.segments[segment].blocks;
        if blocks[at].size > bytes {
            let behind = Block::new(start + bytes, blocks[at].size - bytes, State::Unmapped);
            blocks[at].size = bytes;
            blocks.insert(at + 1, behind);
        }
        blocks[at].state = State::Free;
        Some(self.merge(segment, at))
    }

    /// Unmaps the whole chunks inside free blocks.
    pub(super) fn unmap(&mut self, segment: usize, calls: &mut DriverCalls) {
        let (base, chunk) = (self.segments[segment].blocks[0].at, self.segments[segment].chunk.expect("expandable"));
        let free: Vec<u64> = self.segments[segment]
            .blocks
            .iter()
            .filter(|block| block.state == State::Free)
            .map(|block| block.at)
            .collect();
        for start in free {
            let blocks = &mut self.segments[segment].blocks;
            let at = blocks.iter().position(|block| block.at == start).expect("it exists");
            let end = start + blocks[at].size;
            let first = base + (start - base).div_ceil(chunk) * chunk;
            let last = base + (end - base) / chunk * chunk;
            if first >= last {
                continue;
            }
            calls.unmap(first, last - first);
            let parts = [
                (start, first - start, State::Free),
                (first, last - first, State::Unmapped),
                (last, end - last, State::Free),
            ];
            let freed_at_search = self.searches_of(self.segments[segment].pool, self.segments[segment].small);
            let parts = parts
                .into_iter()
                .filter(|&(_, size, _)| size > 0)
                .map(|(at, size, state)| Block { freed_at_search, ..Block::new(at, size, state) });
            let blocks = &mut self.segments[segment].blocks;
            blocks.splice(at..=at, parts);
            let at = blocks.iter().position(|block| block.at == first).expect("it exists");
            self.merge(segment, at);
        }
    }
}
