//! A naive model of PyTorch's native allocator on one device: lists, and scans over them. It was written from the
//! description of the behaviour and shares nothing with what it judges.
//!
//! It does not know what the driver has. Wherever the allocator should call it, the model takes the next call of that
//! kind from the script of what was really called, with its answer; a call that is missing or too many is a complaint.
//! Nor does it know the clock: which marks in streams have passed is said from outside, before each step.

mod given_back;
mod growing;
mod release;

use std::collections::BTreeMap;

use warpool::driver::StreamId;
use warpool::memory::MemPoolId;

use super::script::Script;

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
    /// The least of fraction and cap, in bytes.
    pub limit: Option<u64>,
    /// How many bytes of addresses a growing segment gets; `None` is 9/8 of the device.
    pub reserve: Option<u64>,
}

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Free,
    Taken,
    Waiting,
    Unmapped,
}

#[derive(Clone, Debug)]
struct Piece {
    at: u64,
    size: u64,
    requested: u64,
    standing: Standing,
    /// How many searches its bin had seen when it became free.
    born: u64,
    uses: Vec<StreamId>,
    uses_in_capture: Vec<StreamId>,
}

impl Piece {
    fn new(at: u64, size: u64, standing: Standing) -> Self {
        Self { at, size, requested: 0, standing, born: 0, uses: Vec::new(), uses_in_capture: Vec::new() }
    }
}

#[derive(Clone, Debug)]
struct Segment {
    age: u64,
    pool: MemPoolId,
    small: bool,
    stream: StreamId,
    /// The size of what is mapped at once, if it grows.
    chunk: Option<u64>,
    /// By address, without holes.
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Pool {
    uses: u32,
    no_split: bool,
    on_oom: bool,
}

/// A mark in a stream that a piece waits for.
#[derive(Clone, Copy, Debug)]
struct Mark {
    stream: StreamId,
    place: u64,
    at: u64,
}

#[derive(Clone, Copy, Debug)]
struct Want {
    pool: MemPoolId,
    stream: StreamId,
    requested: u64,
    size: u64,
    small: bool,
}

/// A stretch of memory as a snapshot shows it: address, bytes, pool, small, expandable, and its pieces.
pub type Stretch = (u64, u64, MemPoolId, bool, bool, Vec<(u64, u64, u64, Standing)>);

/// The model.
#[derive(Clone, Debug)]
pub struct Model {
    pub rules: Rules,
    bytes_total: u64,
    segments: Vec<Segment>,
    pools: BTreeMap<MemPoolId, Pool>,
    searches: BTreeMap<(MemPoolId, bool), u64>,
    next_age: u64,
    /// The stream that captures, if one does.
    pub capturing: Option<StreamId>,
    marks: Vec<Mark>,
    /// How many marks were put into each stream.
    pub marked: BTreeMap<StreamId, u64>,
    /// How many of them have passed.
    pub passed: BTreeMap<StreamId, u64>,
    /// Given back by destructors, without marks yet.
    unmarked: Vec<u64>,
    /// Given back while one of their streams captured.
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
            marks: Vec::new(),
            marked: BTreeMap::new(),
            passed: BTreeMap::new(),
            unmarked: Vec::new(),
            deferred: Vec::new(),
            retries: 0,
            ooms: 0,
        }
    }

    /// Where a request is put; `None` is out of memory.
    pub fn allocate(&mut self, pool: MemPoolId, stream: StreamId, bytes: u64, script: &mut Script) -> Option<u64> {
        let captures = self.capturing == Some(stream);
        if captures {
            // The graph goes on using what its capture gives back.
            self.pools.get_mut(&pool).expect("the pool is there").on_oom = false;
        } else {
            self.reap();
        }
        let size = self.rounded(bytes);
        let want = Want { pool, stream, requested: bytes, size, small: size <= MIB };
        if let Some(at) = self.search(&want) {
            return Some(self.give(at, &want));
        }
        self.collect_garbage(script);
        if let Some(at) = self.fetch(&want, script) {
            return Some(self.give(at, &want));
        }
        if pool.is_default() {
            let helpers: Vec<MemPoolId> =
                self.pools.iter().filter(|(_, pool)| pool.on_oom && pool.uses > 0).map(|(&id, _)| id).collect();
            for helper in helpers {
                let want = Want { pool: helper, ..want };
                if let Some(at) = self.search(&want) {
                    return Some(self.give(at, &want));
                }
            }
        }
        if self.release_oversize(&want, script)
            && let Some(at) = self.fetch(&want, script)
        {
            return Some(self.give(at, &want));
        }
        if !captures {
            self.wait_for_all();
            self.release_all(script);
            self.retries += 1;
            if let Some(at) = self.fetch(&want, script) {
                return Some(self.give(at, &want));
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

    fn search(&mut self, want: &Want) -> Option<(usize, usize)> {
        if self.collects() {
            *self.searches.entry((want.pool, want.small)).or_default() += 1;
        }
        let mut fitting = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if (segment.pool, segment.small, segment.stream) != (want.pool, want.small, want.stream) {
                continue;
            }
            for (at, piece) in segment.pieces.iter().enumerate() {
                if piece.standing == Standing::Free && piece.size >= want.size {
                    let age = if self.rules.by_address { 0 } else { segment.age };
                    fitting.push(((piece.size, age, piece.at), (index, at)));
                }
            }
        }
        fitting.sort_unstable();
        let places: Vec<(usize, usize)> = fitting.into_iter().map(|(_, place)| place).collect();
        let grows = |place: (usize, usize)| self.segments[place.0].chunk.is_some();
        let mut found = *places.first()?;
        if grows(found) && self.rules.expandable {
            for &next in &places[1..] {
                if !grows(found) || self.could_grow_to(next) >= self.could_grow_to(found) {
                    break;
                }
                found = next;
            }
        } else if grows(found) {
            found = *places.iter().find(|&&place| !grows(place))?;
        }
        let size = self.segments[found.0].pieces[found.1].size;
        if let Some(most) = self.rules.max_split
            && ((want.size < most && size >= most) || (want.size >= most && size >= want.size + self.rules.rounding))
        {
            return None;
        }
        Some(found)
    }

    fn give(&mut self, (segment, at): (usize, usize), want: &Want) -> u64 {
        let born = self.searches_of(want.pool, want.small);
        let no_split = self.pools[&want.pool].no_split;
        let pieces = &mut self.segments[segment].pieces;
        let rest = pieces[at].size - want.size;
        let cut = if no_split {
            false
        } else if want.small || self.rules.expandable {
            rest >= 512
        } else {
            self.rules.max_split.is_none_or(|most| want.size < most) && rest > MIB
        };
        if cut {
            let mut behind = Piece::new(pieces[at].at + want.size, rest, Standing::Free);
            behind.born = born;
            pieces[at].size = want.size;
            pieces.insert(at + 1, behind);
        }
        let piece = &mut pieces[at];
        piece.standing = Standing::Taken;
        piece.requested = want.requested;
        piece.at
    }

    fn reserved(&self) -> u64 {
        self.segments
            .iter()
            .flat_map(|segment| &segment.pieces)
            .filter(|piece| piece.standing != Standing::Unmapped)
            .map(|piece| piece.size)
            .sum()
    }

    fn fetch(&mut self, want: &Want, script: &mut Script) -> Option<(usize, usize)> {
        let bytes = self.segment_size(want.size);
        if self.rules.limit.is_some_and(|limit| self.reserved() + bytes > limit) {
            return None;
        }
        if self.rules.expandable {
            return self.grow(want, script);
        }
        let base = script.alloc(bytes)?;
        self.add_segment(want, base, bytes, None);
        Some((self.segments.len() - 1, 0))
    }

    fn add_segment(&mut self, want: &Want, base: u64, bytes: u64, chunk: Option<u64>) {
        let standing = if chunk.is_some() { Standing::Unmapped } else { Standing::Free };
        self.segments.push(Segment {
            age: self.next_age,
            pool: want.pool,
            small: want.small,
            stream: want.stream,
            chunk,
            pieces: vec![Piece::new(base, bytes, standing)],
        });
        self.next_age += 1;
    }

    /// Joins a piece with its neighbours of the same standing, and says where it is then.
    fn join(&mut self, segment: usize, at: usize) -> usize {
        let (pool, small) = (self.segments[segment].pool, self.segments[segment].small);
        let born = self.searches_of(pool, small);
        let pieces = &mut self.segments[segment].pieces;
        let mut at = at;
        if at + 1 < pieces.len() && pieces[at + 1].standing == pieces[at].standing {
            let behind = pieces.remove(at + 1);
            pieces[at].size += behind.size;
        }
        if at > 0 && pieces[at - 1].standing == pieces[at].standing {
            let piece = pieces.remove(at);
            at -= 1;
            pieces[at].size += piece.size;
        }
        pieces[at].born = born;
        at
    }

    pub fn create_pool(&mut self, id: MemPoolId, no_split: bool, on_oom: bool) {
        self.pools.insert(id, Pool { uses: 1, no_split, on_oom });
    }

    pub fn retain_pool(&mut self, id: MemPoolId) {
        self.pools.get_mut(&id).expect("the pool is there").uses += 1;
    }

    pub fn release_pool(&mut self, id: MemPoolId) {
        let pool = self.pools.get_mut(&id).expect("the pool is there");
        pool.uses -= 1;
        if pool.uses == 0 {
            (pool.no_split, pool.on_oom) = (false, false);
        }
        self.forget(id);
    }

    fn forget(&mut self, id: MemPoolId) {
        if self.pools[&id].uses == 0 && self.segments.iter().all(|segment| segment.pool != id) {
            self.pools.remove(&id);
        }
    }

    /// All that is mapped, by address.
    pub fn picture(&self) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for segment in &self.segments {
            let mut mapped = false;
            for piece in &segment.pieces {
                if piece.standing == Standing::Unmapped {
                    mapped = false;
                    continue;
                }
                if !mapped {
                    stretches.push((piece.at, 0, segment.pool, segment.small, segment.chunk.is_some(), Vec::new()));
                    mapped = true;
                }
                let stretch = stretches.last_mut().expect("pushed just now");
                let requested = if piece.standing == Standing::Free { 0 } else { piece.requested };
                stretch.1 += piece.size;
                stretch.5.push((piece.at, piece.size, requested, piece.standing));
            }
        }
        stretches.sort_by_key(|stretch| stretch.0);
        stretches
    }
}

impl Segment {
    /// Whether it is in one piece, free, and not a growing one.
    fn is_idle(&self) -> bool {
        self.chunk.is_none() && self.pieces.len() == 1 && self.pieces[0].standing == Standing::Free
    }
}
