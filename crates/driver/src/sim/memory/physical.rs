//! Physical memory by id, and how many ids and mappings refer to it.

use rustc_hash::FxHashMap;

use super::backing::BackingId;
use crate::sim::table::{Missing, Table};
use crate::{PhysicalId, PhysicalOptions};

/// Physical memory as an id names it. Several ids may name the same memory: each import makes one.
#[derive(Clone, Copy, Debug)]
pub struct Physical {
    pub backing: BackingId,
    pub options: PhysicalOptions,
}

/// All ids of physical memory. The memory exists until no id and no mapping refers to it.
#[derive(Debug, Default)]
pub struct PhysicalMemory {
    ids: Table<Physical>,
    references: FxHashMap<BackingId, u32>,
}

impl PhysicalMemory {
    /// Gives new memory its first id.
    pub fn add(&mut self, backing: BackingId, options: PhysicalOptions) -> PhysicalId {
        self.references.insert(backing, 1);
        PhysicalId(self.ids.insert(Physical { backing, options }))
    }

    /// Gives memory another id; `None` if it no longer exists.
    pub fn import(&mut self, backing: BackingId, options: PhysicalOptions) -> Option<PhysicalId> {
        *self.references.get_mut(&backing)? += 1;
        Some(PhysicalId(self.ids.insert(Physical { backing, options })))
    }

    pub fn exists(&self, backing: BackingId) -> bool {
        self.references.contains_key(&backing)
    }

    pub fn get(&self, id: PhysicalId) -> Option<Physical> {
        self.ids.get(id.0).copied()
    }

    pub fn why_missing(&self, id: PhysicalId) -> Missing {
        self.ids.why_missing(id.0)
    }

    /// Removes an id. Returns whether that was the last reference to its memory.
    pub fn remove(&mut self, id: PhysicalId) -> bool {
        let Physical { backing, .. } = self.ids.remove(id.0).expect("an id that was looked up");
        self.remove_reference(backing)
    }

    /// A mapping refers to the memory from now on.
    pub fn add_mapping(&mut self, backing: BackingId) {
        *self.references.get_mut(&backing).expect("memory with an id") += 1;
    }

    /// A mapping no longer refers to the memory. Returns whether it was the last reference.
    pub fn remove_reference(&mut self, backing: BackingId) -> bool {
        let references = self.references.get_mut(&backing).expect("memory with a reference");
        *references -= 1;
        let was_last = *references == 0;
        if was_last {
            self.references.remove(&backing);
        }
        was_last
    }

    /// The number of ids.
    pub fn len(&self) -> usize {
        self.ids.len()
    }
}
