//! The hazard log: every use of memory or of a handle that nothing protects, with who, where and why.

use std::fmt;

use rustc_hash::FxHashMap;

use super::actor::Actor;
use crate::DevicePtr;

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
    HandedOutInFlight,
    /// The host touched pinned memory while the device still used it.
    HostTooEarly,
    /// A stream, event, graph or other object was used after it had been destroyed.
    UseAfterDestroy,
    /// A graph was replayed over memory that is gone.
    GraphOverFreedMemory,
    /// A capture ended while a stream that joined it had work that leads nowhere.
    CaptureUnjoined,
    /// A call broke a capture.
    CaptureBroken,
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
            Self::HandedOutInFlight => "handed out while in use",
            Self::HostTooEarly => "host access before the device was done",
            Self::UseAfterDestroy => "use after destroy",
            Self::GraphOverFreedMemory => "graph replayed over freed memory",
            Self::CaptureUnjoined => "capture left unjoined",
            Self::CaptureBroken => "capture broken",
        }
    }
}

impl fmt::Display for HazardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// What kind of trouble.
    pub kind: HazardKind,
    /// The operations, the earlier one first: what each is, its number, its stream or graph.
    pub operations: Vec<String>,
    /// The bytes, where memory is concerned: the first address and how many.
    pub range: Option<(DevicePtr, u64)>,
    /// Why no order protects them.
    pub why: String,
    /// When it was noticed, in nanoseconds of the virtual clock.
    pub at_nanos: u64,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.operations.join(" and "))?;
        if let Some((ptr, bytes)) = self.range {
            write!(f, " at {ptr}, {bytes} bytes")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// Who took part, for telling the same trouble again from new trouble.
type Key = (HazardKind, Option<(u64, u32)>, Option<(u64, u32)>);

/// The log itself. One entry for each pair of operations, however many bytes they clash over.
#[derive(Debug, Default)]
pub(super) struct HazardLog {
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

    /// Logs trouble over memory between `first`, if somebody came before, and `second`.
    pub fn memory(
        &mut self,
        kind: HazardKind,
        first: Option<&Actor>,
        second: &Actor,
        range: (DevicePtr, u64),
        why: impl FnOnce() -> String,
        at_nanos: u64,
    ) {
        let key = (kind, first.map(Actor::key), Some(second.key()));
        if let Some(&known) = self.index.get(&key) {
            widen(&mut self.entries[known].range, range);
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
        let key = (kind, None, Some((u64::MAX - self.entries.len() as u64, 0)));
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

fn widen(range: &mut Option<(DevicePtr, u64)>, (ptr, bytes): (DevicePtr, u64)) {
    let (old, old_bytes) = range.unwrap_or((ptr, bytes));
    let start = old.min(ptr);
    let end = old.offset(old_bytes).max(ptr.offset(bytes));
    *range = Some((start, end.0 - start.0));
}
