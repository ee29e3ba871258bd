//! Backing memory: contents and access history, reached by addresses through a region or a mapping.

use rustc_hash::FxHashMap;

use super::bytes::Bytes;
use super::remaps::MappingHistory;
use super::shadow::Shadow;
use crate::DeviceId;

/// Memory with its access history. The history belongs to the memory, not to addresses, so memory mapped at two
/// addresses has one.
#[derive(Debug)]
pub struct Backing {
    pub bytes: u64,
    /// The device; `None` for host memory.
    pub device: Option<DeviceId>,
    /// The number of the call that pinned it, if it is host memory.
    pub pinned_by: Option<u64>,
    pub contents: Bytes,
    pub shadow: Shadow,
    pub mapping_history: MappingHistory,
}

/// Names backing memory. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackingId(pub u64);

/// All backing memory.
#[derive(Debug, Default)]
pub struct Backings {
    live: FxHashMap<BackingId, Backing>,
    last: u64,
    /// The value of every byte of device memory before it is written.
    fresh_byte: u8,
}

impl Backings {
    pub fn new(fresh_byte: u8) -> Self {
        Self { fresh_byte, ..Self::default() }
    }

    /// Adds device memory.
    pub fn add_device(&mut self, bytes: u64, device: DeviceId) -> BackingId {
        self.add(bytes, Some(device), None, Bytes::device(self.fresh_byte))
    }

    /// Adds host memory that call number `pinned_by` pinned.
    pub fn add_host(&mut self, bytes: u64, contents: Bytes, pinned_by: u64) -> BackingId {
        self.add(bytes, None, Some(pinned_by), contents)
    }

    fn add(&mut self, bytes: u64, device: Option<DeviceId>, pinned_by: Option<u64>, contents: Bytes) -> BackingId {
        self.last += 1;
        let id = BackingId(self.last);
        let (shadow, mapping_history) = (Shadow::default(), MappingHistory::default());
        let backing = Backing { bytes, device, pinned_by, contents, shadow, mapping_history };
        self.live.insert(id, backing);
        id
    }

    pub fn get(&self, id: BackingId) -> &Backing {
        &self.live[&id]
    }

    pub fn get_mut(&mut self, id: BackingId) -> &mut Backing {
        self.live.get_mut(&id).expect("live backing memory")
    }

    pub fn remove(&mut self, id: BackingId) {
        self.live.remove(&id);
    }
}
