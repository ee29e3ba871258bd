//! The hazard log: every use of memory or of a handle that nothing protects, with who, where and why.

use std::fmt;

use rustc_hash::FxHashMap;

use crate::DevicePtr;
use crate::sim::order::Actor;

/// What kind of trouble it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum HazardKind {
    /// Memory was touched after it had been freed, or in no order with the free.
    UseAfterFree,
    /// Memory was touched after it had been unmapped.
    UseAfterUnmap,
    /// An address was touched that belongs to nothing, or that this device may not touch.
    IllegalAccess,
    /// Memory was read that nobody had written.
    UninitializedRead,
    /// Two accesses have no order, and one of them writes.
    Race,
    /// An allocator handed out memory that other work, in no order with the new owner, still uses.
    ReusedInFlight,
    /// The host touched pinned memory while the device still used it.
    HostRace,
    /// A stream, event, graph or other object was used after it had been destroyed.
    UseAfterDestroy,
    /// A graph was replayed over memory that is gone.
    GraphUsesFreedMemory,
    /// A copy whose source and target overlap.
    OverlappingCopy,
    /// A kernel's double could not go on, for a reason of its own.
    KernelFault,
    /// A capture ended while a stream that joined it had work that leads nowhere.
    CaptureUnjoined,
    /// A call broke a capture.
    CaptureInvalidated,
}

impl HazardKind {
    /// The name, in a few words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UseAfterFree => "use after free",
            Self::UseAfterUnmap => "use after unmap",
            Self::IllegalAccess => "illegal access",
            Self::UninitializedRead => "read of never-written memory",
            Self::Race => "unordered accesses",
            Self::ReusedInFlight => "handed out while in use",
            Self::HostRace => "host access before the device was done",
            Self::UseAfterDestroy => "use after destroy",
            Self::GraphUsesFreedMemory => "graph replayed over freed memory",
            Self::OverlappingCopy => "copy onto itself",
            Self::KernelFault => "kernel could not go on",
            Self::CaptureUnjoined => "capture left unjoined",
            Self::CaptureInvalidated => "capture broken",
        }
    }
}

impl fmt::Display for HazardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes that operations clash over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HazardRange {
    /// What `offset` counts from.
    pub base: RangeBase,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Where an offset counts from. Addresses of host memory differ from run to run, so pinned memory is named by the call
/// that pinned it: one seed gives one log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeBase {
    /// Address 0: the offset is the device's address.
    Address,
    /// The start of the host memory that the call of that number pinned.
    PinnedBy(u64),
}

impl HazardRange {
    /// `bytes` bytes at `ptr`, or from `offset` on in what the call `pinned_by` pinned.
    pub(in crate::sim) fn new(pinned_by: Option<u64>, ptr: DevicePtr, offset: u64, bytes: u64) -> Self {
        match pinned_by {
            Some(call) => Self { base: RangeBase::PinnedBy(call), offset, bytes },
            None => Self { base: RangeBase::Address, offset: ptr.0, bytes },
        }
    }

    /// Grows to hold `other` too, if both count from the same.
    fn widen(&mut self, other: Self) {
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
pub struct Hazard {
    /// What kind of trouble.
    pub kind: HazardKind,
    /// The operations, in the order in which they took effect: what each is, the number of the call that queued it
    /// (counted over the whole driver), its stream or graph.
    pub operations: Vec<String>,
    /// The bytes, where memory is concerned.
    pub range: Option<HazardRange>,
    /// Why no order protects them.
    pub why: String,
    /// When it was noticed, in nanoseconds of the virtual clock.
    pub at_nanos: u64,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.operations.join(" and "))?;
        if let Some(range) = self.range {
            write!(f, " at {range}")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// Who took part, for telling the same trouble again from new trouble.
type Key = (HazardKind, Option<(u64, u32)>, Option<(u64, u32)>, u64);

/// The log itself. One entry for each pair of operations and piece of memory, however many bytes of it they clash over.
#[derive(Debug, Default)]
pub struct HazardLog {
    kept: usize,
    entries: Vec<Hazard>,
    index: FxHashMap<Key, usize>,
    dropped: u64,
}

impl HazardLog {
    pub fn new(kept: usize) -> Self {
        Self { kept, ..Self::default() }
    }

    pub fn entries(&self) -> &[Hazard] {
        &self.entries
    }

    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    pub fn clear(&mut self) {
        *self = Self::new(self.kept);
    }

    /// Logs trouble over memory between `first`, if somebody came before, and `second`. `area` tells one piece of
    /// memory from another: ranges of two are never joined.
    pub fn memory(
        &mut self,
        kind: HazardKind,
        (first, second): (Option<&Actor>, &Actor),
        area: u64,
        range: HazardRange,
        why: impl FnOnce() -> String,
        at_nanos: u64,
    ) {
        let key = (kind, first.map(Actor::key), Some(second.key()), area);
        if let Some(&known) = self.index.get(&key) {
            if let Some(old) = &mut self.entries[known].range {
                old.widen(range);
            }
            return;
        }
        let operations = first.into_iter().chain([second]).map(ToString::to_string).collect();
        self.push(key, Hazard { kind, operations, range: Some(range), why: why(), at_nanos });
    }

    /// Logs trouble that is not about bytes.
    pub fn plain(&mut self, kind: HazardKind, operation: String, why: String, at_nanos: u64) {
        if self.entries.iter().any(|known| known.kind == kind && known.operations == [operation.as_str()]) {
            return;
        }
        let key = (kind, None, Some((u64::MAX - self.entries.len() as u64, 0)), 0);
        self.push(key, Hazard { kind, operations: vec![operation], range: None, why, at_nanos });
    }

    fn push(&mut self, key: Key, hazard: Hazard) {
        if self.entries.len() == self.kept {
            self.dropped += 1;
            return;
        }
        self.index.insert(key, self.entries.len());
        self.entries.push(hazard);
    }
}
