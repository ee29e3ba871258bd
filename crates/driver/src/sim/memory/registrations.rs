//! The registration table: memory that a network card or a communication library has registered, with the physical
//! memory that was behind its addresses then.

use super::access::{AccessContext, IllegalAccess};
use super::address_space::{AccessFault, Region};
use super::remaps::MappingNumber;
use super::{BackingId, Memory};
use crate::sim::order::{HazardKind, HazardRange};
use crate::sim::refuse::refuse;
use crate::sim::table::{Missing, Table};
use crate::{DevicePtr, ErrorCode, Result};

/// A registered range.
#[derive(Debug)]
pub struct Registration {
    pub ptr: DevicePtr,
    pub bytes: u64,
    pub label: String,
    /// The number of the call that registered it.
    at: u64,
    parts: Vec<Part>,
}

/// A piece of memory behind a range: which one, from where, how much, and for mapped memory which mapping of it.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    backing: BackingId,
    offset: u64,
    bytes: u64,
    mapping: Option<MappingNumber>,
}

#[derive(Debug, Default)]
pub struct Registrations(Table<Registration>);

impl Memory {
    /// Registers a range, in call number `at`. All of it must be device memory.
    pub fn register(&mut self, ptr: DevicePtr, bytes: u64, label: &str, at: u64) -> Result<u64> {
        let mut parts = Vec::new();
        let mut done = 0;
        while done < bytes {
            let Some(part) = self.part(ptr.offset(done), bytes - done) else {
                return refuse(ErrorCode::InvalidValue, format!("no device memory is at {}", ptr.offset(done)));
            };
            done += part.bytes;
            parts.push(part);
        }
        if parts.is_empty() {
            return refuse(ErrorCode::InvalidValue, "the range has no bytes");
        }
        Ok(self.registrations.0.insert(Registration { ptr, bytes, label: label.to_owned(), at, parts }))
    }

    pub fn registration(&self, id: u64) -> std::result::Result<&Registration, Missing> {
        self.registrations.0.get(id).ok_or_else(|| self.registrations.0.why_missing(id))
    }

    /// Ends a registration. Returns whether there was one.
    pub fn deregister(&mut self, id: u64) -> bool {
        self.registrations.0.remove(id).is_some()
    }

    pub fn registrations(&self) -> usize {
        self.registrations.0.len()
    }

    /// Those of which a part is not the memory that was registered, and why.
    pub fn stale_registrations(&self) -> Vec<(u64, String)> {
        let why = |id| {
            let of = self.registrations.0.get(id)?;
            let (from, why) = self.why_stale(of, 0, of.bytes)?;
            Some((id, format!("registration {:?}, from {from} on: {why}", of.label)))
        };
        self.registrations.0.ids().into_iter().filter_map(why).collect()
    }

    /// Why `bytes` bytes at `offset` of a registration are not the memory that was registered, and from which address
    /// on; `None` if they are.
    pub fn why_stale(&self, of: &Registration, offset: u64, bytes: u64) -> Option<(DevicePtr, String)> {
        let (mut start, end) = (0, offset + bytes);
        for part in &of.parts {
            let (from, to) = (start.max(offset), (start + part.bytes).min(end));
            if from < to {
                let at = of.ptr.offset(start);
                if self.part(at, part.bytes).as_ref() != Some(part) {
                    return Some((of.ptr.offset(from), self.why_left(at, of.at)));
                }
            }
            start += part.bytes;
        }
        None
    }

    /// Writes to registered memory, unless it has left its address. A registration that ended since this was queued has
    /// no effect: whoever ended it did not wait, but has no memory to get wrong.
    pub fn write_registered(
        &mut self,
        id: u64,
        offset: u64,
        bytes: u64,
        value: u8,
        by: &mut AccessContext<'_>,
    ) -> std::result::Result<(), IllegalAccess> {
        let Some(of) = self.registrations.0.get(id) else { return Ok(()) };
        let ptr = of.ptr.offset(offset);
        if let Some((from, why)) = self.why_stale(of, offset, bytes) {
            let range = HazardRange::new(None, from, 0, ptr.0 + bytes - from.0);
            let why = || format!("registration {:?}: {why}", of.label);
            by.hazards.add_access(HazardKind::StaleRegistration, (None, &by.accessor), id, (range, from), why, by.now);
            return Err(IllegalAccess { fatal: false });
        }
        self.fill(ptr, &[value], bytes, by)
    }

    fn why_left(&self, at: DevicePtr, registered_at: u64) -> String {
        let left = match self.space.remapped_since(at, registered_at) {
            Some(freed) => Some(freed.freed_at),
            None => match self.space.why_not_mapped(at.0) {
                AccessFault::Freed(freed) => Some(freed.freed_at),
                AccessFault::NotMapped | AccessFault::Denied => None,
            },
        };
        let by = left.map_or(String::new(), |call| format!(" by call #{call}"));
        format!(
            "the memory that call #{registered_at} registered has left its address{by}, and was not registered again"
        )
    }

    /// The device memory at an address, up to `bytes` of it.
    fn part(&self, at: DevicePtr, bytes: u64) -> Option<Part> {
        let found = self.space.locate(at)?;
        self.backings.get(found.backing).device?;
        let mapping = match self.space.region_at(at.0)? {
            (_, _, Region::Reserved(reservation)) => reservation.get(at.0).map(|(_, mapping)| mapping.number),
            _ => None,
        };
        Some(Part { backing: found.backing, offset: found.offset, bytes: found.bytes.min(bytes), mapping })
    }
}
