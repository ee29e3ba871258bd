//! Frees in the model: uses by other streams, fences, and captures that have to end first.

use warpool::driver::StreamId;

use super::{Block, Fence, Model, State};

impl Model {
    /// The position of the allocated or pending block that starts at an address: segment, index.
    pub(super) fn position(&self, at: u64) -> (usize, usize) {
        let positions = self.segments.iter().enumerate().flat_map(|(segment_index, segment)| {
            segment.blocks.iter().enumerate().map(move |(index, block)| (segment_index, index, block))
        });
        let active = |block: &Block| matches!(block.state, State::Allocated | State::PendingFree);
        let mut found = positions.filter(|(_, _, block)| block.at == at && active(block));
        let (segment, index, _) = found.next().unwrap_or_else(|| panic!("the model has nothing at {at:#x}"));
        (segment, index)
    }

    pub fn record_use(&mut self, at: u64, stream: StreamId) {
        let captures = self.capturing == Some(stream);
        let (segment, index) = self.position(at);
        if self.segments[segment].stream == stream {
            return;
        }
        let block = &mut self.segments[segment].blocks[index];
        let list = if captures { &mut block.uses_in_capture } else { &mut block.uses };
        if !list.contains(&stream) {
            list.push(stream);
        }
    }

    /// Frees a block. `later`: by a destructor, which makes no driver call.
    pub fn free(&mut self, at: u64, later: bool) {
        let (segment, index) = self.position(at);
        let block = &mut self.segments[segment].blocks[index];
        assert_eq!(block.state, State::Allocated, "the model's {at:#x} is not allocated");
        block.state = State::PendingFree;
        if block.uses.is_empty() && block.uses_in_capture.is_empty() {
            self.complete(at);
        } else if later {
            self.unfenced.push(at);
        } else {
            self.start_free(at);
        }
    }

    pub(super) fn start_free(&mut self, at: u64) {
        let (segment, index) = self.position(at);
        let own = self.segments[segment].stream;
        let block = &mut self.segments[segment].blocks[index];
        let all = [own].into_iter().chain(block.uses.clone()).chain(block.uses_in_capture.clone());
        if all.into_iter().any(|stream| self.capturing == Some(stream)) {
            self.deferred.push(at);
            return;
        }
        block.uses_in_capture.clear();
        let uses = std::mem::take(&mut block.uses);
        for &stream in &uses {
            let recorded = self.recorded.entry(stream).or_default();
            self.fences.push(Fence { stream, sequence: *recorded, at });
            *recorded += 1;
        }
        if uses.is_empty() {
            self.complete(at);
        }
    }

    pub(super) fn complete(&mut self, at: u64) {
        let (segment, index) = self.position(at);
        let block = &mut self.segments[segment].blocks[index];
        block.state = State::Free;
        block.uses.clear();
        block.uses_in_capture.clear();
        self.merge(segment, index);
    }

    /// Records fences for blocks that destructors freed, then for frees that captures deferred, if the captures are
    /// over.
    pub(super) fn retry_unfenced(&mut self) {
        for at in std::mem::take(&mut self.unfenced) {
            self.start_free(at);
        }
        for at in std::mem::take(&mut self.deferred) {
            self.start_free(at);
        }
    }

    /// Completes pending frees whose fences have passed.
    pub fn process_pending(&mut self) {
        self.retry_unfenced();
        let passed = self.passed.clone();
        self.complete_fences(|fence| fence.sequence < passed.get(&fence.stream).copied().unwrap_or(0));
    }

    pub(super) fn wait_for_all(&mut self) {
        self.retry_unfenced();
        self.complete_fences(|_| true);
    }

    pub(super) fn complete_fences(&mut self, passed: impl Fn(&Fence) -> bool) {
        let (done, kept): (Vec<Fence>, Vec<Fence>) = self.fences.iter().partition(|fence| passed(fence));
        self.fences = kept;
        let mut done: Vec<u64> = done.into_iter().map(|fence| fence.at).collect();
        done.sort_unstable();
        done.dedup();
        for at in done {
            if !self.fences.iter().any(|fence| fence.at == at) {
                self.complete(at);
            }
        }
    }
}
