//! The hazard log: every use of memory or of a handle that nothing protects, with the operations and the reason.

use std::fmt;

use rustc_hash::FxHashMap;

use super::accessor::Accessor;
use super::names::Names;
use crate::DevicePtr;

/// The kind of a hazard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum HazardKind {
    /// Memory was accessed after it was freed, or unordered with the free.
    UseAfterFree,
    /// Memory was accessed after it was unmapped.
    UseAfterUnmap,
    /// An access ran past the end of its block into the next: of an allocator's block, or of an allocation.
    BlockOverrun,
    /// An address was accessed that is not mapped, or that this device has no access to.
    IllegalAccess,
    /// Memory was read that had never been written.
    UninitializedRead,
    /// Two accesses are unordered, and at least one of them writes.
    Race,
    /// An allocator reused memory for new work that is not ordered after earlier work on the same memory.
    ReusedInFlight,
    /// The host accessed pinned memory that the device was still using.
    HostRace,
    /// A stream, event, graph or other object was used after it was destroyed.
    UseAfterDestroy,
    /// A graph was launched that uses memory freed or unmapped since its capture.
    GraphUsesFreedMemory,
    /// Registered memory was used after it had left its address.
    StaleRegistration,
    /// The source and the target of a copy overlap.
    OverlappingCopy,
    /// The host implementation of a kernel returned an error.
    KernelFault,
    /// A capture ended while a stream that had joined it had work that the first stream did not wait for.
    CaptureUnjoined,
    /// A call invalidated a capture.
    CaptureInvalidated,
}

impl HazardKind {
    /// The name, in a few words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UseAfterFree => "use after free",
            Self::UseAfterUnmap => "use after unmap",
            Self::BlockOverrun => "access beyond the block",
            Self::IllegalAccess => "illegal access",
            Self::UninitializedRead => "uninitialized read",
            Self::Race => "unordered accesses",
            Self::ReusedInFlight => "memory reused while in use",
            Self::HostRace => "host access while the device used the memory",
            Self::UseAfterDestroy => "use after destroy",
            Self::GraphUsesFreedMemory => "graph uses freed memory",
            Self::StaleRegistration => "use of a stale registration",
            Self::OverlappingCopy => "overlapping copy",
            Self::KernelFault => "kernel fault",
            Self::CaptureUnjoined => "capture unjoined",
            Self::CaptureInvalidated => "capture invalidated",
        }
    }
}

impl fmt::Display for HazardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The bytes that a hazard is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HazardRange {
    /// What `offset` is relative to.
    pub base: RangeBase,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// What an offset is relative to. Addresses of host memory differ from run to run, so pinned memory is named by the
/// call that pinned it: the same seed gives the same log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeBase {
    /// Address 0: the offset is a device address.
    Address,
    /// The start of the host memory that the call of that number pinned.
    PinnedBy(u64),
}

impl HazardRange {
    /// `bytes` bytes at `ptr`, or at `offset` of the memory that call `pinned_by` pinned.
    pub(in crate::sim) fn new(pinned_by: Option<u64>, ptr: DevicePtr, offset: u64, bytes: u64) -> Self {
        match pinned_by {
            Some(call) => Self { base: RangeBase::PinnedBy(call), offset, bytes },
            None => Self { base: RangeBase::Address, offset: ptr.0, bytes },
        }
    }

    /// Grows to include `other`, if both have the same base.
    fn extend(&mut self, other: Self) {
        if self.base == other.base {
            let end = (self.offset + self.bytes).max(other.offset + other.bytes);
            self.offset = self.offset.min(other.offset);
            self.bytes = end - self.offset;
        }
    }
}

impl fmt::Display for HazardRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.base {
            RangeBase::Address => write!(f, "{}, {} bytes", DevicePtr(self.offset), self.bytes),
            RangeBase::PinnedBy(call) => {
                write!(f, "byte {} of the host memory pinned by call #{call}, {} bytes", self.offset, self.bytes)
            }
        }
    }
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hazard {
    /// The kind.
    pub kind: HazardKind,
    /// The operations, in the order in which they took effect: what each is, the number of the call that queued it
    /// (counted over the whole driver), its stream or graph, the stream's label, and the program's line, as far as they
    /// are known ([`source_line`](crate::source_line)).
    pub operations: Vec<String>,
    /// The bytes, if the hazard is about memory.
    pub range: Option<HazardRange>,
    /// The label of the memory, if it has one.
    pub label: Option<String>,
    /// Why nothing protects them.
    pub why: String,
    /// When it was detected, in nanoseconds of virtual time.
    pub at_nanos: u64,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.operations.join(" and "))?;
        if let Some(range) = self.range {
            write!(f, " at {range}")?;
        }
        if let Some(label) = &self.label {
            write!(f, " of {label:?}")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// What makes two hazards the same: kind, operations, memory.
type Key = (HazardKind, Option<(u64, u32)>, Option<(u64, u32)>, u64);

/// The log. One entry for each pair of operations and backing memory, however many of its bytes they conflict over.
#[derive(Debug, Default)]
pub struct HazardLog {
    max: usize,
    entries: Vec<Hazard>,
    index: FxHashMap<Key, usize>,
    dropped: u64,
    names: Names,
}

impl HazardLog {
    /// Keeps up to `max` entries and counts the others.
    pub fn new(max: usize) -> Self {
        Self { max, ..Self::default() }
    }

    pub fn entries(&self) -> &[Hazard] {
        &self.entries
    }

    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    pub fn clear(&mut self) {
        *self = Self { max: self.max, names: std::mem::take(&mut self.names), ..Self::default() };
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    pub fn names_mut(&mut self) -> &mut Names {
        &mut self.names
    }

    /// Logs a hazard about memory, of `second` and of `first`, if another operation is involved. `area` identifies the
    /// mapped memory: ranges of two areas are never merged. `ptr` is where the range begins.
    pub fn add_access(
        &mut self,
        kind: HazardKind,
        (first, second): (Option<&Accessor>, &Accessor),
        area: u64,
        (range, ptr): (HazardRange, DevicePtr),
        why: impl FnOnce() -> String,
        at_nanos: u64,
    ) {
        let key = (kind, first.map(Accessor::key), Some(second.key()), area);
        if let Some(&known) = self.index.get(&key) {
            if let Some(old) = &mut self.entries[known].range {
                old.extend(range);
            }
            return;
        }
        let operations = first.into_iter().chain([second]).map(|by| self.names.describe(by)).collect();
        let label = self.names.of_memory(ptr).map(str::to_owned);
        self.push(key, Hazard { kind, operations, range: Some(range), label, why: why(), at_nanos });
    }

    /// Logs a hazard that is not about bytes.
    pub fn add(&mut self, kind: HazardKind, operation: String, why: String, at_nanos: u64) {
        if self.entries.iter().any(|known| known.kind == kind && known.operations == [operation.as_str()]) {
            return;
        }
        let key = (kind, None, Some((u64::MAX - self.entries.len() as u64, 0)), 0);
        self.push(key, Hazard { kind, operations: vec![operation], range: None, label: None, why, at_nanos });
    }

    fn push(&mut self, key: Key, hazard: Hazard) {
        if self.entries.len() == self.max {
            self.dropped += 1;
            return;
        }
        self.index.insert(key, self.entries.len());
        self.entries.push(hazard);
    }
}
