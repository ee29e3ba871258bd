//! Every access to simulated memory: the address is resolved, the access is checked against the shadow memory, and
//! bytes are moved. Unprotected accesses are reported in the hazard log.

use std::sync::Arc;

use super::address_space::{AccessFault, Location, Region};
use super::backing::Backing;
use super::quarantine::Removal;
use super::shadow::{Conflict, NewSuballocation};
use super::{Backings, Memory};
use crate::sim::order::{Accessor, HappensBefore, HazardKind, HazardLog, HazardRange, Operation, VectorClock};
use crate::{Access, DeviceId, DevicePtr};

/// How much of a copy or fill is moved at a time.
const CHUNK: u64 = 64 << 10;

/// The context of an access: who makes it, what is ordered before it, and where hazards are logged.
pub struct AccessContext<'a> {
    pub device: DeviceId,
    pub accessor: Accessor,
    pub before: HappensBefore<'a>,
    pub now: u64,
    /// Copies may access memory of every device; kernels only that of their own and of enabled peers.
    pub any_device: bool,
    pub hazards: &'a mut HazardLog,
}

/// An access that is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalAccess {
    /// Whether it breaks the device.
    pub fatal: bool,
}

impl Memory {
    /// What `ptr` refers to for `device`, in work that call number `queued_at` queued.
    fn resolve(
        &self,
        ptr: DevicePtr,
        device: DeviceId,
        write: bool,
        queued_at: u64,
        any_device: bool,
    ) -> Result<Location, AccessFault> {
        let Some((_, _, region)) = self.space.region_at(ptr.0) else { return Err(self.space.why_not_mapped(ptr.0)) };
        let owner = |backing| self.backings.get(backing).device;
        let allowed = match region {
            Region::Pinned { .. } => true,
            Region::Allocation { backing } => {
                any_device
                    || owner(*backing)
                        .is_none_or(|owner| owner == device || self.peers[device.0 as usize].contains(&owner))
            }
            Region::PoolAllocation { backing, pool, .. } | Region::GraphMemory { backing: Some(backing), pool, .. } => {
                any_device
                    || owner(*backing) == Some(device)
                    || self.pools.get(*pool).is_some_and(|pool| pool.allows(device, write))
            }
            Region::GraphMemory { backing: None, .. } => false,
            Region::Reserved(reservation) => reservation.get(ptr.0).is_some_and(|(_, mapping)| {
                mapping.access.iter().any(|rights| {
                    rights.device == device
                        && (rights.access == Access::ReadWrite || (rights.access == Access::Read && !write))
                })
            }),
        };
        if let Some(freed) = self.space.remapped_since(ptr, queued_at) {
            return Err(AccessFault::Freed(freed));
        }
        match self.space.locate(ptr) {
            Some(location) if allowed => Ok(location),
            Some(_) => Err(AccessFault::Denied),
            None => Err(self.space.why_not_mapped(ptr.0)),
        }
    }

    /// Whether a copy or fill of `device` may access all of a range now; else why not, and from which address on.
    pub fn check(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        device: DeviceId,
        write: bool,
    ) -> Result<(), (AccessFault, DevicePtr)> {
        let mut done = 0;
        while done < bytes {
            let here = ptr.offset(done);
            done += self.resolve(here, device, write, u64::MAX, true).map_err(|fault| (fault, here))?.bytes;
        }
        Ok(())
    }

    pub fn read(&mut self, ptr: DevicePtr, into: &mut [u8], by: &mut AccessContext<'_>) -> Result<(), IllegalAccess> {
        self.check_block(ptr, into.len() as u64, by);
        let mut done = 0;
        while done < into.len() {
            let rest = (into.len() - done) as u64;
            let found = self.access(ptr.offset(done as u64), rest, false, by)?;
            let backing = self.backings.get(found.backing);
            backing.contents.read(found.offset, &mut into[done..done + found.bytes as usize]);
            done += found.bytes as usize;
        }
        Ok(())
    }

    pub fn write(&mut self, ptr: DevicePtr, from: &[u8], by: &mut AccessContext<'_>) -> Result<(), IllegalAccess> {
        self.check_block(ptr, from.len() as u64, by);
        let mut done = 0;
        while done < from.len() {
            let rest = (from.len() - done) as u64;
            let found = self.access(ptr.offset(done as u64), rest, true, by)?;
            let backing = self.backings.get_mut(found.backing);
            backing.contents.write(found.offset, &from[done..done + found.bytes as usize]);
            done += found.bytes as usize;
        }
        Ok(())
    }

    /// Writes `pattern` repeatedly.
    pub fn fill(
        &mut self,
        ptr: DevicePtr,
        pattern: &[u8],
        bytes: u64,
        by: &mut AccessContext<'_>,
    ) -> Result<(), IllegalAccess> {
        self.record_access(ptr, bytes, true, by)?;
        let mut chunk = std::mem::take(&mut self.scratch);
        chunk.clear();
        chunk.extend(pattern.iter().copied().cycle().take(bytes.min(CHUNK) as usize));
        self.for_chunks(ptr, bytes, |backing, offset, _, n| backing.contents.write(offset, &chunk[..n]));
        self.scratch = chunk;
        Ok(())
    }

    pub fn copy(
        &mut self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        by: &mut AccessContext<'_>,
    ) -> Result<(), IllegalAccess> {
        self.record_access(src, bytes, false, by)?;
        self.record_access(dst, bytes, true, by)?;
        let mut chunk = std::mem::take(&mut self.scratch);
        let mut done = 0;
        while done < bytes {
            let n = (bytes - done).min(CHUNK);
            chunk.resize(n as usize, 0);
            self.for_chunks(src.offset(done), n, |backing, offset, at, n| {
                backing.contents.read(offset, &mut chunk[at..at + n]);
            });
            self.for_chunks(dst.offset(done), n, |backing, offset, at, n| {
                backing.contents.write(offset, &chunk[at..at + n]);
            });
            done += n;
        }
        self.scratch = chunk;
        Ok(())
    }

    /// Checks and records an access without moving bytes.
    pub fn record_access(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        write: bool,
        by: &mut AccessContext<'_>,
    ) -> Result<(), IllegalAccess> {
        self.check_block(ptr, bytes, by);
        let mut done = 0;
        while done < bytes {
            done += self.access(ptr.offset(done), bytes - done, write, by)?.bytes;
        }
        Ok(())
    }

    /// Visits the memory of a range that was checked: backing memory, offset in it, offset in the range, size.
    fn for_chunks(&mut self, ptr: DevicePtr, bytes: u64, mut visit: impl FnMut(&mut Backing, u64, usize, usize)) {
        let mut done = 0;
        while done < bytes {
            let found = self.space.locate(ptr.offset(done)).expect("checked before");
            let n = found.bytes.min(bytes - done).min(CHUNK);
            visit(self.backings.get_mut(found.backing), found.offset, done as usize, n as usize);
            done += n;
        }
    }

    /// Resolves the start of a range, and checks and records the access to the part that lies in one backing memory.
    /// Returns that part.
    fn access(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        write: bool,
        by: &mut AccessContext<'_>,
    ) -> Result<Location, IllegalAccess> {
        let mut found = match self.resolve(ptr, by.device, write, by.accessor.queued_at, by.any_device) {
            Ok(found) => found,
            Err(fault) => return Err(report_fault(fault, ptr, bytes, &by.accessor, by.now, by.hazards)),
        };
        found.bytes = found.bytes.min(bytes);
        let Backing { device, pinned_by, shadow, .. } = self.backings.get_mut(found.backing);
        let check_uninitialized = self.check_uninitialized && device.is_some();
        let (accessor, before, now, hazards) = (&by.accessor, &by.before, by.now, &mut *by.hazards);
        // Where the backing memory would begin: the same for all of one mapping, different for each.
        let area = ptr.0.wrapping_sub(found.offset);
        let range = (found.offset, found.offset + found.bytes);
        shadow.access(range, write, accessor, before, &mut |conflict, from, to| {
            let here = ptr.offset(from - found.offset);
            let range = (HazardRange::new(*pinned_by, here, from, to - from), here);
            let mut log = |kind, why: &str| {
                hazards.add_access(kind, (None, accessor), area, range, || why.to_owned(), now);
            };
            match conflict {
                Conflict::Unordered(earlier) => {
                    let (kind, pair) = (unordered_kind(&earlier, accessor), (Some(&earlier), accessor));
                    let why = || before.why_not(&earlier, accessor);
                    hazards.add_access(kind, pair, area, range, why, now);
                }
                Conflict::Uninitialized if check_uninitialized => log(HazardKind::UninitializedRead, NEVER_WRITTEN),
                Conflict::Uninitialized => {}
                Conflict::Reused => {
                    let why = format!(
                        "an allocator reused the memory after this was queued, for work that is not ordered after {}",
                        accessor.stream
                    );
                    log(HazardKind::ReusedInFlight, &why);
                }
                Conflict::FreedSinceCapture => log(HazardKind::GraphUsesFreedMemory, FREED_SINCE_CAPTURE),
                Conflict::Freed if accessor.node.is_some() => log(HazardKind::GraphUsesFreedMemory, FREED),
                Conflict::Freed => log(HazardKind::UseAfterFree, FREED),
            }
        });
        Ok(found)
    }

    /// An allocator allocated a range for the work that `by` is the end of; `in_place` at addresses that work captured
    /// before may use.
    pub fn suballocated(
        &mut self,
        ptr: DevicePtr,
        bytes: u64,
        clock: &Arc<VectorClock>,
        by: &mut AccessContext<'_>,
        in_place: bool,
    ) {
        let (accessor, before, now, hazards) = (&by.accessor, &by.before, by.now, &mut *by.hazards);
        let new = NewSuballocation { at: accessor.queued_at, clock, epoch: accessor.epoch, in_place };
        self.blocks.add(ptr, bytes, accessor.queued_at);
        hazards.names_mut().forget_memory(ptr, bytes);
        self.for_located(ptr, bytes, |backings, found, here| {
            let Backing { pinned_by, shadow, .. } = backings.get_mut(found.backing);
            let range = (found.offset, found.offset + found.bytes);
            let area = here.0.wrapping_sub(found.offset);
            shadow.suballocate(range, &new, before, &mut |earlier, from, to| {
                let from = from.max(found.offset);
                let here = here.offset(from - found.offset);
                let range = (HazardRange::new(*pinned_by, here, from, to - from), here);
                let call = accessor.queued_at;
                let why = || format!("{}; the memory was reused by call #{call}", before.why_not(earlier, accessor));
                hazards.add_access(HazardKind::ReusedInFlight, (None, earlier), area, range, why, now);
            });
        });
    }

    /// Forgets the order that an allocator reported about a range, which it allocated anew by call number `at`.
    pub fn forget_suballocations(&mut self, ptr: DevicePtr, bytes: u64, at: u64) {
        self.blocks.add(ptr, bytes, at);
        self.for_located(ptr, bytes, |backings, found, _| {
            let shadow = &mut backings.get_mut(found.backing).shadow;
            shadow.forget_suballocations(found.offset, found.offset + found.bytes);
        });
    }

    /// An allocator freed a range, by call number `at`.
    pub fn suballocation_freed(&mut self, ptr: DevicePtr, bytes: u64, at: u64) {
        self.blocks.remove(ptr, bytes);
        self.for_located(ptr, bytes, |backings, found, _| {
            let shadow = &mut backings.get_mut(found.backing).shadow;
            shadow.free_suballocation(found.offset, found.offset + found.bytes, at);
        });
    }

    /// Visits the memory of a range up to the first address that is not in use.
    fn for_located(&mut self, ptr: DevicePtr, bytes: u64, mut visit: impl FnMut(&mut Backings, Location, DevicePtr)) {
        let mut done = 0;
        while done < bytes {
            let here = ptr.offset(done);
            let Some(mut found) = self.space.locate(here) else { return };
            found.bytes = found.bytes.min(bytes - done);
            visit(&mut self.backings, found, here);
            done += found.bytes;
        }
    }
}

/// Logs an access to an address that cannot be accessed.
pub fn report_fault(
    fault: AccessFault,
    ptr: DevicePtr,
    bytes: u64,
    by: &Accessor,
    now: u64,
    hazards: &mut HazardLog,
) -> IllegalAccess {
    let (kind, why, area, fatal) = match fault {
        AccessFault::NotMapped => (HazardKind::IllegalAccess, "the address is not mapped".to_owned(), 0, true),
        AccessFault::Denied => (HazardKind::IllegalAccess, "the device has no access to it".to_owned(), 0, true),
        AccessFault::Freed(freed) => {
            let kind = match (by.node, freed.removal) {
                (Some(_), _) => HazardKind::GraphUsesFreedMemory,
                (None, Removal::Unmapped | Removal::Remapped) => HazardKind::UseAfterUnmap,
                (None, Removal::Freed | Removal::PoolFreed) => HazardKind::UseAfterFree,
            };
            let how = match freed.removal {
                Removal::Freed => "freed",
                Removal::PoolFreed => "freed to its pool",
                Removal::Unmapped => "unmapped",
                Removal::Remapped => "unmapped (and other memory mapped there since)",
            };
            let when =
                if by.queued_at > freed.freed_at { "before this was queued" } else { "while this was still queued" };
            let why = format!("the memory was {how} by call #{}, {when}", freed.freed_at);
            // Freed memory of a pool and remapped addresses are mapped: the device survives the access.
            (kind, why, freed.freed_at, matches!(freed.removal, Removal::Freed | Removal::Unmapped))
        }
    };
    let range = match fault {
        AccessFault::Freed(freed) => HazardRange::new(freed.pinned_by, ptr, ptr.0 - freed.start, bytes),
        AccessFault::NotMapped | AccessFault::Denied => HazardRange::new(None, ptr, 0, bytes),
    };
    hazards.add_access(kind, (None, by), area, (range, ptr), || why, now);
    IllegalAccess { fatal }
}

const NEVER_WRITTEN: &str = "these bytes were not written since they were allocated";
const FREED: &str = "the allocator had freed the memory before this was queued";
const FREED_SINCE_CAPTURE: &str =
    "the allocator freed the memory after this was captured, and reused it before this was launched";

fn unordered_kind(earlier: &Accessor, later: &Accessor) -> HazardKind {
    if earlier.is_host() || later.is_host() {
        HazardKind::HostRace
    } else if earlier.operation == Operation::PoolFree || later.operation == Operation::PoolFree {
        HazardKind::UseAfterFree
    } else {
        HazardKind::Race
    }
}
