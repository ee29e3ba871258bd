//! A naive model of PyTorch's native allocator on one device: lists, and scans over them. It was written from the
//! description of the behaviour and shares no code with the allocator.
//!
//! It does not model the driver. Wherever the allocator should call it, the model takes the next call of that kind from
//! the recorded calls, with its result; a missing or unexpected call fails the test. Nor does it model time: how many
//! fences of each stream have passed is set before each step.

mod expandable;
mod pending;
mod release;

use std::collections::BTreeMap;

use warpool::driver::StreamId;
use warpool::memory::MemPoolId;

use super::driver_calls::DriverCalls;

const MIB: u64 = 1 << 20;

/// The settings, as numbers.
#[derive(Clone, Debug)]
pub struct Rules {
    pub divisions: [u64; 16],
    pub large_segment: u64,
    pub max_split: Option<u64>,
    pub rounding: u64,
    pub garbage: f64,
    pub expandable: bool,
    pub by_address: bool,
    /// The lower of fraction and cap, in bytes.
    pub limit: Option<u64>,
    /// How many bytes of addresses an expandable segment reserves; `None` is 9/8 of the device.
    pub reserve: Option<u64>,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Free,
    Allocated,
    PendingFree,
    Unmapped,
}

#[derive(Clone, Debug)]
struct Block {
    at: u64,
    size: u64,
    requested: u64,
    state: State,
    /// How many searches its block pool had counted when it became free.
    freed_at_search: u64,
    uses: Vec<StreamId>,
    uses_in_capture: Vec<StreamId>,
}

impl Block {
    fn new(at: u64, size: u64, state: State) -> Self {
        Self { at, size, requested: 0, state, freed_at_search: 0, uses: Vec::new(), uses_in_capture: Vec::new() }
    }
}

#[derive(Clone, Debug)]
struct Segment {
    age: u64,
    pool: MemPoolId,
    small: bool,
    stream: StreamId,
    /// The chunk size of an expandable segment.
    chunk: Option<u64>,
    /// By address, without holes.
    blocks: Vec<Block>,
}

#[derive(Clone, Debug)]
struct Pool {
    uses: u32,
    no_split: bool,
    on_oom: bool,
}

/// A fence that a block waits for.
#[derive(Clone, Copy, Debug)]
struct Fence {
    stream: StreamId,
    /// How many fences were recorded in the stream before.
    sequence: u64,
    /// The address of the block.
    at: u64,
}

#[derive(Clone, Copy, Debug)]
struct BlockRequest {
    pool: MemPoolId,
    stream: StreamId,
    requested: u64,
    size: u64,
    small: bool,
}

/// A segment as a snapshot lists it: address, bytes, pool, small, expandable, and its blocks.
pub type MappedRange = (u64, u64, MemPoolId, bool, bool, Vec<(u64, u64, u64, State)>);

/// The model.
#[derive(Clone, Debug)]
pub struct Model {
    pub rules: Rules,
    bytes_total: u64,
    segments: Vec<Segment>,
    pools: BTreeMap<MemPoolId, Pool>,
    searches: BTreeMap<(MemPoolId, bool), u64>,
    next_age: u64,
    /// The capturing stream, if there is one.
    pub capturing: Option<StreamId>,
    fences: Vec<Fence>,
    /// How many fences were recorded in each stream.
    pub recorded: BTreeMap<StreamId, u64>,
    /// How many of them have passed.
    pub passed: BTreeMap<StreamId, u64>,
    /// Blocks freed by destructors, without fences yet.
    unfenced: Vec<u64>,
    /// Blocks freed while one of their streams was capturing.
    deferred: Vec<u64>,
    pub retries: u64,
    pub ooms: u64,
}

impl Model {
    pub fn new(rules: Rules, bytes_total: u64) -> Self {
        let default = Pool { uses: 1, no_split: false, on_oom: false };
        Self {
            rules,
            bytes_total,
            segments: Vec::new(),
            pools: BTreeMap::from([(MemPoolId::DEFAULT, default)]),
            searches: BTreeMap::new(),
            next_age: 0,
            capturing: None,
            fences: Vec::new(),
            recorded: BTreeMap::new(),
            passed: BTreeMap::new(),
            unfenced: Vec::new(),
            deferred: Vec::new(),
            retries: 0,
            ooms: 0,
        }
    }

    /// The address for a request; `None` is out of memory.
    pub fn allocate(&mut self, pool: MemPoolId, stream: StreamId, bytes: u64, calls: &mut DriverCalls) -> Option<u64> {
        let captures = self.capturing == Some(stream);
        if captures {
            // The graph continues to use the memory that its capture frees.
            self.pools.get_mut(&pool).expect("the pool exists").on_oom = false;
        } else {
            self.process_pending();
        }
        let size = self.rounded(bytes);
        let request = BlockRequest { pool, stream, requested: bytes, size, small: size <= MIB };
        if let Some(at) = self.search(&request) {
            return Some(self.allocate_block(at, &request));
        }
        self.collect_garbage(calls);
        if let Some(at) = self.allocate_segment(&request, calls) {
            return Some(self.allocate_block(at, &request));
        }
        if pool.is_default() {
            let lenders: Vec<MemPoolId> =
                self.pools.iter().filter(|(_, pool)| pool.on_oom && pool.uses > 0).map(|(&id, _)| id).collect();
            for lender in lenders {
                let request = BlockRequest { pool: lender, ..request };
                if let Some(at) = self.search(&request) {
                    return Some(self.allocate_block(at, &request));
                }
            }
        }
        if self.release_oversize(&request, calls)
            && let Some(at) = self.allocate_segment(&request, calls)
        {
            return Some(self.allocate_block(at, &request));
        }
        if !captures {
            self.wait_for_all();
            self.release_all(calls);
            self.retries += 1;
            if let Some(at) = self.allocate_segment(&request, calls) {
                return Some(self.allocate_block(at, &request));
            }
        }
        self.ooms += 1;
        None
    }

    fn rounded(&self, bytes: u64) -> u64 {
        if bytes < 512 {
            return 512;
        }
        let mut bucket = 0;
        while bucket < 15 && bytes >= (2 * MIB) << bucket {
            bucket += 1;
        }
        let divisions = self.rules.divisions[bucket];
        if divisions > 1 && bytes > 512 * divisions {
            let mut power = 1;
            while power * 2 <= bytes {
                power *= 2;
            }
            if power == bytes {
                return bytes;
            }
            let step = power / divisions;
            return if step == 0 { 2 * power } else { bytes.div_ceil(step) * step };
        }
        bytes.div_ceil(512) * 512
    }

    fn segment_size(&self, size: u64) -> u64 {
        if size <= MIB {
            2 * MIB
        } else if size < 10 * MIB {
            self.rules.large_segment
        } else {
            size.div_ceil(2 * MIB) * 2 * MIB
        }
    }

    fn collects(&self) -> bool {
        self.rules.limit.is_some() && self.rules.garbage > 0.0
    }

    fn searches_of(&self, pool: MemPoolId, small: bool) -> u64 {
        self.searches.get(&(pool, small)).copied().unwrap_or(0)
    }

    fn search(&mut self, request: &BlockRequest) -> Option<(usize, usize)> {
        if self.collects() {
            *self.searches.entry((request.pool, request.small)).or_default() += 1;
        }
        let mut fitting = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if (segment.pool, segment.small, segment.stream) != (request.pool, request.small, request.stream) {
                continue;
            }
            for (at, block) in segment.blocks.iter().enumerate() {
                if block.state == State::Free && block.size >= request.size {
                    let age = if self.rules.by_address { 0 } else { segment.age };
                    fitting.push(((block.size, age, block.at), (index, at)));
                }
            }
        }
        fitting.sort_unstable();
        let positions: Vec<(usize, usize)> = fitting.into_iter().map(|(_, position)| position).collect();
        let is_expandable = |position: (usize, usize)| self.segments[position.0].chunk.is_some();
        let mut found = *positions.first()?;
        if is_expandable(found) && self.rules.expandable {
            for &next in &positions[1..] {
                if !is_expandable(found) || self.size_with_unmapped(next) >= self.size_with_unmapped(found) {
                    break;
                }
                found = next;
            }
        } else if is_expandable(found) {
            found = *positions.iter().find(|&&position| !is_expandable(position))?;
        }
        let size = self.segments[found.0].blocks[found.1].size;
        if let Some(most) = self.rules.max_split
            && ((request.size < most && size >= most)
                || (request.size >= most && size >= request.size + self.rules.rounding))
        {
            return None;
        }
        Some(found)
    }

    fn allocate_block(&mut self, (segment, at): (usize, usize), request: &BlockRequest) -> u64 {
        let freed_at_search = self.searches_of(request.pool, request.small);
        let no_split = self.pools[&request.pool].no_split;
        let blocks = &mut self.segments[segment].blocks;
        let rest = blocks[at].size - request.size;
        let split = if no_split {
            false
        } else if request.small || self.rules.expandable {
            rest >= 512
        } else {
            self.rules.max_split.is_none_or(|most| request.size < most) && rest > MIB
        };
        if split {
            let mut behind = Block::new(blocks[at].at + request.size, rest, State::Free);
            behind.freed_at_search = freed_at_search;
            blocks[at].size = request.size;
            blocks.insert(at + 1, behind);
        }
        let block = &mut blocks[at];
        block.state = State::Allocated;
        block.requested = request.requested;
        block.at
    }

    fn reserved(&self) -> u64 {
        self.segments
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state != State::Unmapped)
            .map(|block| block.size)
            .sum()
    }

    fn allocate_segment(&mut self, request: &BlockRequest, calls: &mut DriverCalls) -> Option<(usize, usize)> {
        let bytes = self.segment_size(request.size);
        if self.rules.limit.is_some_and(|limit| self.reserved() + bytes > limit) {
            return None;
        }
        if self.rules.expandable {
            return self.grow(request, calls);
        }
        let base = calls.alloc(bytes)?;
        self.add_segment(request, base, bytes, None);
        Some((self.segments.len() - 1, 0))
    }

    fn add_segment(&mut self, request: &BlockRequest, base: u64, bytes: u64, chunk: Option<u64>) {
        let state = if chunk.is_some() { State::Unmapped } else { State::Free };
        self.segments.push(Segment {
            age: self.next_age,
            pool: request.pool,
            small: request.small,
            stream: request.stream,
            chunk,
            blocks: vec![Block::new(base, bytes, state)],
        });
        self.next_age += 1;
    }

    /// Merges a block with neighbours in the same state. Returns its index.
    fn merge(&mut self, segment: usize, at: usize) -> usize {
        let (pool, small) = (self.segments[segment].pool, self.segments[segment].small);
        let freed_at_search = self.searches_of(pool, small);
        let blocks = &mut self.segments[segment].blocks;
        let mut at = at;
        if at + 1 < blocks.len() && blocks[at + 1].state == blocks[at].state {
            let behind = blocks.remove(at + 1);
            blocks[at].size += behind.size;
        }
        if at > 0 && blocks[at - 1].state == blocks[at].state {
            let block = blocks.remove(at);
            at -= 1;
            blocks[at].size += block.size;
        }
        blocks[at].freed_at_search = freed_at_search;
        at
    }

    pub fn create_pool(&mut self, id: MemPoolId, no_split: bool, on_oom: bool) {
        self.pools.insert(id, Pool { uses: 1, no_split, on_oom });
    }

    pub fn retain_pool(&mut self, id: MemPoolId) {
        self.pools.get_mut(&id).expect("the pool exists").uses += 1;
    }

    pub fn release_pool(&mut self, id: MemPoolId) {
        let pool = self.pools.get_mut(&id).expect("the pool exists");
        pool.uses -= 1;
        if pool.uses == 0 {
            (pool.no_split, pool.on_oom) = (false, false);
        }
        self.remove_if_unused(id);
    }

    fn remove_if_unused(&mut self, id: MemPoolId) {
        if self.pools[&id].uses == 0 && self.segments.iter().all(|segment| segment.pool != id) {
            self.pools.remove(&id);
        }
    }

    /// All mapped ranges, by address.
    pub fn mapped_ranges(&self) -> Vec<MappedRange> {
        let mut ranges: Vec<MappedRange> = Vec::new();
        for segment in &self.segments {
            let mut mapped = false;
            for block in &segment.blocks {
                if block.state == State::Unmapped {
                    mapped = false;
                    continue;
                }
                if !mapped {
                    ranges.push((block.at, 0, segment.pool, segment.small, segment.chunk.is_some(), Vec::new()));
                    mapped = true;
                }
                let range = ranges.last_mut().expect("pushed just now");
                let requested = if block.state == State::Free { 0 } else { block.requested };
                range.1 += block.size;
                range.5.push((block.at, block.size, requested, block.state));
            }
        }
        ranges.sort_by_key(|range| range.0);
        ranges
    }
}

impl Segment {
    /// Whether it is one free block, and not expandable.
    fn is_free_segment(&self) -> bool {
        self.chunk.is_none() && self.blocks.len() == 1 && self.blocks[0].state == State::Free
    }
}
