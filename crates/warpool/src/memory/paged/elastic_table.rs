//! The ranges of elastic memory of a device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;

use super::ids::{BlockId, HeapId, RangeId, RangeInHeap};
use crate::memory::MemPoolId;
use crate::memory::elastic_range::{ElasticBlocks, ElasticRange};
use crate::{Error, Result};

/// All of them, by pool.
pub(super) type ElasticTable = Mutex<FxHashMap<MemPoolId, Arc<Mutex<Elastic>>>>;

/// One range.
#[derive(Debug)]
pub(super) struct Elastic {
    pub(super) range: ElasticRange,
    pub(super) slot_bytes: u64,
    pub(super) heap: HeapId,
    pub(super) on_device: RangeId,
    pub(super) in_heap: RangeInHeap,
    pub(super) blocks: ElasticBlocks,
    /// The slots that are allocated, with their blocks.
    pub(super) slots: BTreeMap<u32, BlockId>,
    /// The tag that it sleeps with.
    pub(super) asleep: Option<Arc<str>>,
    pub(super) is_released: bool,
}

impl Elastic {
    /// Fails if it was released, or if it sleeps and `though_asleep` is not set.
    pub(super) fn expect_usable(&self, though_asleep: bool) -> Result<()> {
        match &self.asleep {
            _ if self.is_released => Err(Error::UnknownElastic { ptr: self.range.ptr }),
            Some(tag) if !though_asleep => Err(Error::TagAsleep { tag: tag.to_string() }),
            _ => Ok(()),
        }
    }

    /// The address of a slot.
    pub(super) fn addr(&self, slot: u32) -> u64 {
        self.range.ptr.0 + u64::from(slot) * self.slot_bytes
    }
}
