//! All simulated memory, and every access to it: addresses are resolved, the history is checked, bytes are moved.

use std::sync::Arc;

use rustc_hash::FxHashMap;

mod address_space;
mod bytes;
mod quarantine;
mod shadow;

pub use address_space::{Fault, Mapping, PieceId, Region};
pub use bytes::{Bytes, HostBytes};
pub use quarantine::{Gone, Tomb};

use crate::sim::order::{Actor, Frontier, HazardKind, HazardLog, HazardRange, Label, Order};
use crate::{Access, DeviceId, DevicePtr, PoolId};
use address_space::{Piece, Place, Space};
use shadow::{Clash, Mark, Shadow};

/// How much of a copy or fill is moved at a time.
const CHUNK: u64 = 64 << 10;

/// Who is at work, and what is known about order: all that an access needs to be checked.
#[derive(Clone, Copy)]
pub struct Toucher<'a> {
    pub device: DeviceId,
    pub who: Actor,
    pub order: Order<'a>,
    pub now: u64,
    /// Copies may reach memory of every device; kernels only that of their own and of enabled peers.
    pub everywhere: bool,
}

/// The device touched what it may not. `true` if that breaks the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub bool);

/// All memory.
#[derive(Debug)]
pub struct Memory {
    pub space: Space,
    pub log: HazardLog,
    /// For each device, the peers whose plain memory it may use.
    pub peers: Vec<Vec<DeviceId>>,
    /// What devices may do with a pool's memory besides its own.
    pub pool_access: Vec<(PoolId, DeviceId, Access)>,
    pieces: FxHashMap<PieceId, Piece>,
    last_piece: u64,
    check_uninitialized: bool,
    scratch: Vec<u8>,
}

impl Memory {
    pub fn new(devices: usize, max_hazards: usize, check_uninitialized: bool) -> Self {
        Self {
            space: Space::default(),
            log: HazardLog::new(max_hazards),
            peers: vec![Vec::new(); devices],
            pool_access: Vec::new(),
            pieces: FxHashMap::default(),
            last_piece: 0,
            check_uninitialized,
            scratch: Vec::new(),
        }
    }

    pub fn add_piece(&mut self, bytes: u64, device: Option<DeviceId>, contents: Bytes) -> PieceId {
        self.last_piece += 1;
        let id = PieceId(self.last_piece);
        self.pieces.insert(id, Piece { bytes, device, pinned_by: None, contents, shadow: Shadow::default() });
        id
    }

    pub fn piece(&self, id: PieceId) -> &Piece {
        &self.pieces[&id]
    }

    pub fn piece_mut(&mut self, id: PieceId) -> &mut Piece {
        self.pieces.get_mut(&id).expect("a live piece")
    }

    pub fn drop_piece(&mut self, id: PieceId) {
        self.pieces.remove(&id);
    }

    /// Where `ptr` leads for `device`.
    pub fn resolve(
        &self,
        ptr: DevicePtr,
        device: DeviceId,
        write: bool,
        queued_at: u64,
        everywhere: bool,
    ) -> Result<Place, Fault> {
        self.space.resolve(ptr, device, write, queued_at, |piece, pool| {
            let Some(owner) = self.pieces[&piece].device else { return true };
            everywhere
                || owner == device
                || match pool {
                    None => self.peers[device.0 as usize].contains(&owner),
                    Some(pool) => self.pool_access.iter().any(|&(known, who, access)| {
                        (known, who) == (pool, device) && (access == Access::ReadWrite || !write)
                    }),
                }
        })
    }

    /// Whether all of a range can be used; else why not, and from which address on.
    pub fn check(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        device: DeviceId,
        write: bool,
        everywhere: bool,
    ) -> Result<(), (Fault, DevicePtr)> {
        let mut done = 0;
        while done < bytes {
            let here = ptr.offset(done);
            done += self.resolve(here, device, write, u64::MAX, everywhere).map_err(|fault| (fault, here))?.bytes;
        }
        Ok(())
    }

    /// Reads, as `by`.
    pub fn read(&mut self, ptr: DevicePtr, into: &mut [u8], by: &Toucher<'_>) -> Result<(), Broken> {
        let mut done = 0;
        while done < into.len() {
            let rest = (into.len() - done) as u64;
            let place = self.touch(ptr.offset(done as u64), rest, false, by)?;
            let piece = &self.pieces[&place.piece];
            piece.contents.read(place.offset, &mut into[done..done + place.bytes as usize]);
            done += place.bytes as usize;
        }
        Ok(())
    }

    /// Writes, as `by`.
    pub fn write(&mut self, ptr: DevicePtr, from: &[u8], by: &Toucher<'_>) -> Result<(), Broken> {
        let mut done = 0;
        while done < from.len() {
            let rest = (from.len() - done) as u64;
            let place = self.touch(ptr.offset(done as u64), rest, true, by)?;
            let piece = self.pieces.get_mut(&place.piece).expect("a place leads to a piece");
            piece.contents.write(place.offset, &from[done..done + place.bytes as usize]);
            done += place.bytes as usize;
        }
        Ok(())
    }

    /// Writes `pattern` over and over, as `by`.
    pub fn fill(&mut self, ptr: DevicePtr, pattern: &[u8], bytes: u64, by: &Toucher<'_>) -> Result<(), Broken> {
        self.touch_all(ptr, bytes, true, by)?;
        let mut chunk = std::mem::take(&mut self.scratch);
        chunk.clear();
        let period = bytes.min(CHUNK);
        chunk.extend(pattern.iter().copied().cycle().take(period as usize));
        self.for_chunks(ptr, bytes, |piece, offset, _, n| piece.contents.write(offset, &chunk[..n]));
        self.scratch = chunk;
        Ok(())
    }

    /// Copies, as `by`.
    pub fn copy(&mut self, dst: DevicePtr, src: DevicePtr, bytes: u64, by: &Toucher<'_>) -> Result<(), Broken> {
        self.touch_all(src, bytes, false, by)?;
        self.touch_all(dst, bytes, true, by)?;
        let mut chunk = std::mem::take(&mut self.scratch);
        let mut done = 0;
        while done < bytes {
            let n = (bytes - done).min(CHUNK);
            chunk.resize(n as usize, 0);
            self.for_chunks(src.offset(done), n, |piece, offset, at, n| {
                piece.contents.read(offset, &mut chunk[at..at + n]);
            });
            self.for_chunks(dst.offset(done), n, |piece, offset, at, n| {
                piece.contents.write(offset, &chunk[at..at + n]);
            });
            done += n;
        }
        self.scratch = chunk;
        Ok(())
    }

    /// Takes note of an access that moves no bytes of its own, such as a free.
    pub fn touch_all(&mut self, ptr: DevicePtr, bytes: u64, write: bool, by: &Toucher<'_>) -> Result<(), Broken> {
        let mut done = 0;
        while done < bytes {
            done += self.touch(ptr.offset(done), bytes - done, write, by)?.bytes;
        }
        Ok(())
    }

    /// Visits the bytes of a range that has been checked: piece, offset in it, offset in the range, how many.
    fn for_chunks(&mut self, ptr: DevicePtr, bytes: u64, mut visit: impl FnMut(&mut Piece, u64, usize, usize)) {
        let mut done = 0;
        while done < bytes {
            let place = self.space.locate(ptr.offset(done)).expect("checked before");
            let n = place.bytes.min(bytes - done).min(CHUNK);
            let piece = self.pieces.get_mut(&place.piece).expect("a place leads to a piece");
            visit(piece, place.offset, done as usize, n as usize);
            done += n;
        }
    }

    /// Resolves the start of a range, checks the access to as much of it as lies in one piece, and says where that is.
    fn touch(&mut self, ptr: DevicePtr, bytes: u64, write: bool, by: &Toucher<'_>) -> Result<Place, Broken> {
        let mut place = match self.resolve(ptr, by.device, write, by.who.at, by.everywhere) {
            Ok(place) => place,
            Err(fault) => return Err(self.fault(fault, ptr, bytes, &by.who, by.now)),
        };
        place.bytes = place.bytes.min(bytes);
        let Self { pieces, log, check_uninitialized, .. } = self;
        let piece = pieces.get_mut(&place.piece).expect("a place leads to a piece");
        let on_device = piece.device.is_some();
        let pinned_by = piece.pinned_by;
        let end = place.offset + place.bytes;
        piece.shadow.touch((place.offset, end), write, &by.who, &by.order, &mut |clash, from, to| {
            let range = HazardRange::new(pinned_by, ptr.offset(from - place.offset), from, to - from);
            let who = &by.who;
            // Where the piece would begin: the same for all of one mapping, another for each.
            let area = ptr.0.wrapping_sub(place.offset);
            match clash {
                Clash::Unordered(earlier) => {
                    let kind = unordered_kind(&earlier, who);
                    log.memory(kind, (Some(&earlier), who), area, range, || why_unordered(&earlier, by), by.now);
                }
                Clash::Unwritten if *check_uninitialized && on_device => {
                    let kind = HazardKind::UninitializedRead;
                    log.memory(kind, (None, who), area, range, || NEVER_WRITTEN.to_owned(), by.now);
                }
                Clash::Unwritten => {}
                Clash::HandedOut => {
                    let kind = HazardKind::ReusedInFlight;
                    log.memory(kind, (None, who), area, range, || why_handed_out(who), by.now);
                }
                Clash::ReturnedSinceCapture => {
                    let kind = HazardKind::GraphUsesFreedMemory;
                    log.memory(kind, (None, who), area, range, || RETURNED_SINCE_CAPTURE.to_owned(), by.now);
                }
                Clash::Returned => {
                    let kind = match who.point {
                        Some(_) => HazardKind::GraphUsesFreedMemory,
                        None => HazardKind::UseAfterFree,
                    };
                    log.memory(kind, (None, who), area, range, || RETURNED.to_owned(), by.now);
                }
            }
        });
        Ok(place)
    }

    /// Logs an access to an address that leads nowhere, and says whether it breaks the device.
    pub fn fault(&mut self, fault: Fault, ptr: DevicePtr, bytes: u64, who: &Actor, now: u64) -> Broken {
        let (kind, why, area, breaks) = match fault {
            Fault::Nothing => (HazardKind::IllegalAccess, "the address belongs to nothing".to_owned(), 0, true),
            Fault::Denied => (HazardKind::IllegalAccess, "the device was given no access to it".to_owned(), 0, true),
            Fault::Gone(tomb) => {
                let kind = match (who.point, tomb.gone) {
                    (Some(_), _) => HazardKind::GraphUsesFreedMemory,
                    (None, Gone::Unmapped | Gone::Remapped) => HazardKind::UseAfterUnmap,
                    (None, Gone::Freed | Gone::PoolFreed) => HazardKind::UseAfterFree,
                };
                let how = match tomb.gone {
                    Gone::Freed => "freed",
                    Gone::PoolFreed => "freed to its pool",
                    Gone::Unmapped => "unmapped",
                    Gone::Remapped => "unmapped (and other memory mapped there since)",
                };
                let when = if who.at > tomb.at { "before this was queued" } else { "while this was still queued" };
                let why = format!("the memory was {how} by call #{}, {when}", tomb.at);
                // Memory of a pool stays mapped, and so is what was mapped instead: the device goes on.
                (kind, why, tomb.at, matches!(tomb.gone, Gone::Freed | Gone::Unmapped))
            }
        };
        let range = match fault {
            Fault::Gone(tomb) => HazardRange::new(tomb.pinned_by, ptr, ptr.0 - tomb.start, bytes),
            Fault::Nothing | Fault::Denied => HazardRange::new(None, ptr, 0, bytes),
        };
        self.log.memory(kind, (None, who), area, range, || why, now);
        Broken(breaks)
    }

    /// Notes that an allocator handed a range to the work that `order` is the end of.
    pub fn hand_out(&mut self, ptr: DevicePtr, bytes: u64, frontier: &Arc<Frontier>, by: &Toucher<'_>) {
        let mut done = 0;
        while done < bytes {
            let here = ptr.offset(done);
            let Some(place) = self.space.locate(here) else { return };
            let n = place.bytes.min(bytes - done);
            let Self { pieces, log, .. } = self;
            let piece = pieces.get_mut(&place.piece).expect("a place leads to a piece");
            let pinned_by = piece.pinned_by;
            let range = (place.offset, place.offset + n);
            let owner = (by.who.at, frontier, by.who.stamp);
            piece.shadow.hand_out(range, owner, &by.order, &mut |earlier, from, to| {
                let from = from.max(place.offset);
                let range = HazardRange::new(pinned_by, here.offset(from - place.offset), from, to - from);
                let why = || format!("{}; it was handed out by call #{}", why_unordered(earlier, by), by.who.at);
                let area = here.0.wrapping_sub(place.offset);
                log.memory(HazardKind::ReusedInFlight, (None, earlier), area, range, why, by.now);
            });
            done += n;
        }
    }

    /// Forgets what an allocator said about a range.
    pub fn unmark(&mut self, ptr: DevicePtr, bytes: u64) {
        let mut done = 0;
        while done < bytes {
            let Some(place) = self.space.locate(ptr.offset(done)) else { return };
            let n = place.bytes.min(bytes - done);
            let piece = self.pieces.get_mut(&place.piece).expect("a place leads to a piece");
            piece.shadow.unmark(place.offset, place.offset + n);
            done += n;
        }
    }

    /// Notes that an allocator took a range back.
    pub fn take_back(&mut self, ptr: DevicePtr, bytes: u64, at: u64) {
        let mut done = 0;
        while done < bytes {
            let Some(place) = self.space.locate(ptr.offset(done)) else { return };
            let n = place.bytes.min(bytes - done);
            let piece = self.pieces.get_mut(&place.piece).expect("a place leads to a piece");
            piece.shadow.mark(place.offset, place.offset + n, Mark::Returned { at });
            done += n;
        }
    }

    /// The pinned range that `[ptr, ptr + bytes)` lies in, if it does.
    pub fn is_pinned(&self, ptr: u64, bytes: u64) -> bool {
        match self.space.region_at(ptr) {
            Some((start, size, Region::Pinned { .. })) => ptr.checked_add(bytes).is_some_and(|end| end <= start + size),
            _ => false,
        }
    }
}

const NEVER_WRITTEN: &str = "nothing has written these bytes since they were allocated";
const RETURNED_SINCE_CAPTURE: &str =
    "the allocator took the memory back after this was captured, and had handed it to others before this was launched";
const RETURNED: &str = "the allocator had taken the memory back before this was queued";

fn unordered_kind(earlier: &Actor, who: &Actor) -> HazardKind {
    if earlier.is_host() || who.is_host() {
        HazardKind::HostRace
    } else if earlier.label == Label::PoolFree || who.label == Label::PoolFree {
        HazardKind::UseAfterFree
    } else {
        HazardKind::Race
    }
}

/// In words, why `earlier` does not come before the work of `by`.
fn why_unordered(earlier: &Actor, by: &Toucher<'_>) -> String {
    let seen = by.order.base.seen(earlier.stamp.lane);
    if by.who.is_host() {
        return format!(
            "the host has not waited for {}: it knows {} up to its operation {seen}, and this was operation {}",
            earlier.stream, earlier.stream, earlier.stamp.seq
        );
    }
    if earlier.is_host() {
        return format!(
            "it was queued in {} before the host touched the memory, and the host did not wait for it",
            by.who.stream
        );
    }
    match (by.who.point, earlier.point) {
        (Some(here), Some(there)) if earlier.stamp == by.who.stamp => {
            format!("no path of edges leads from node {} to node {}", there.node, here.node)
        }
        _ => format!(
            "no event, default-stream rule or wait of the host puts one behind the other: {} knows {} up to its operation {seen}, and this was operation {}",
            by.who.stream, earlier.stream, earlier.stamp.seq
        ),
    }
}

fn why_handed_out(who: &Actor) -> String {
    format!(
        "an allocator handed the memory to other work after this was queued, and nothing puts the new owner behind {}",
        who.stream
    )
}
