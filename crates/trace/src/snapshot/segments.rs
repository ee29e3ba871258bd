//! Segments and blocks while a pickle is read: the keys that were read, and what a missing key means.

use warpool::memory::MemPoolId;
use warpool::memory::report::{BlockInfo, BlockState, SegmentInfo, SegmentKind, StackId};

use super::convert::{boolean, device, text, unsigned};
use super::invalid::Invalid;
use super::lists::Lists;
use super::schema::{self, Keyword};
use crate::pickle::{ListKind, Value};

/// Stands for the address of a block without one, until its segment is complete.
const ADDRESS_UNKNOWN: u64 = u64::MAX;

/// The keys of a segment that were read.
#[derive(Default)]
pub(super) struct SegmentDraft {
    device: Option<i32>,
    address: Option<u64>,
    total_size: Option<u64>,
    allocated_size: Option<u64>,
    active_size: Option<u64>,
    requested_size: Option<u64>,
    stream: Option<u64>,
    kind: Option<SegmentKind>,
    pool: Option<MemPoolId>,
    is_expandable: Option<bool>,
    is_elastic: bool,
    stack: Option<StackId>,
    blocks: Option<Vec<BlockInfo>>,
    is_taken: bool,
}

impl SegmentDraft {
    pub(super) fn has_pool(&self) -> bool {
        self.pool.is_some()
    }

    pub(super) fn set(&mut self, key: Option<Keyword>, value: Value, lists: &mut Lists) -> Result<(), Invalid> {
        match key {
            Some(Keyword::Device) => self.device = Some(device(value)?),
            Some(Keyword::Address) => self.address = Some(unsigned(value)?),
            Some(Keyword::TotalSize) => self.total_size = Some(unsigned(value)?),
            Some(Keyword::AllocatedSize) => self.allocated_size = Some(unsigned(value)?),
            Some(Keyword::ActiveSize) => self.active_size = Some(unsigned(value)?),
            Some(Keyword::RequestedSize) => self.requested_size = Some(unsigned(value)?),
            Some(Keyword::Stream) => self.stream = Some(unsigned(value)?),
            Some(Keyword::SegmentType) => {
                let kind = schema::segment_kind(text(value)?);
                self.kind = Some(kind.ok_or_else(|| Invalid::new("expected `small` or `large`"))?);
            }
            Some(Keyword::SegmentPoolId) => self.pool = Some(lists.pool(value)?),
            Some(Keyword::IsExpandable) => self.is_expandable = Some(boolean(value)?),
            Some(Keyword::IsElastic) => self.is_elastic = boolean(value)?,
            Some(Keyword::Frames) => self.stack = lists.stack(value)?,
            Some(Keyword::Blocks) => match value {
                Value::List(ListKind::Blocks, list) => self.blocks = Some(lists.blocks[list as usize].take()?),
                _ => return Err(Invalid::container(value)),
            },
            _ => {}
        }
        Ok(())
    }

    /// The segment, once. A missing key has the meaning of the versions that leave it out.
    pub(super) fn take(&mut self) -> Result<SegmentInfo, Invalid> {
        if self.is_taken {
            return Err(Invalid::shared("segment"));
        }
        self.is_taken = true;
        let required = |value: Option<u64>, key: Keyword| value.ok_or_else(|| Invalid::missing(key.text()));
        let address = required(self.address, Keyword::Address)?;
        let mut blocks = self.blocks.take().ok_or_else(|| Invalid::missing("blocks"))?;
        let mut next = address;
        for (index, block) in blocks.iter_mut().enumerate() {
            if block.address == ADDRESS_UNKNOWN {
                block.address = next;
            }
            let beyond = || Invalid::new("it ends beyond the last address").within(&format!(".blocks[{index}]"));
            next = block.address.checked_add(block.size).ok_or_else(beyond)?;
        }
        let active = blocks.iter().filter(|block| block.state != BlockState::Inactive);
        let requested = active.fold(0_u64, |sum, block| sum.saturating_add(block.requested_size));
        Ok(SegmentInfo {
            device: self.device.ok_or_else(|| Invalid::missing("device"))?,
            address,
            total_size: required(self.total_size, Keyword::TotalSize)?,
            allocated_size: required(self.allocated_size, Keyword::AllocatedSize)?,
            active_size: required(self.active_size, Keyword::ActiveSize)?,
            requested_size: self.requested_size.unwrap_or(requested),
            stream: self.stream.unwrap_or(0),
            kind: self.kind.ok_or_else(|| Invalid::missing("segment_type"))?,
            pool: self.pool.unwrap_or_default(),
            is_expandable: self.is_expandable.unwrap_or(false),
            is_elastic: self.is_elastic,
            stack: self.stack,
            blocks,
        })
    }
}

/// The keys of a block that were read.
#[derive(Default)]
pub(super) struct BlockDraft {
    address: Option<u64>,
    size: Option<u64>,
    requested_size: Option<u64>,
    state: Option<BlockState>,
    stack: Option<StackId>,
    history: Option<u32>,
}

impl BlockDraft {
    pub(super) fn has_address(&self) -> bool {
        self.address.is_some()
    }

    pub(super) fn has_requested_size(&self) -> bool {
        self.requested_size.is_some()
    }

    pub(super) fn set(&mut self, key: Option<Keyword>, value: Value, lists: &mut Lists) -> Result<(), Invalid> {
        match key {
            Some(Keyword::Address) => self.address = Some(unsigned(value)?),
            Some(Keyword::Size) => self.size = Some(unsigned(value)?),
            Some(Keyword::RequestedSize) => self.requested_size = Some(unsigned(value)?),
            Some(Keyword::State) => {
                let state = schema::block_state(text(value)?);
                let unknown = || Invalid::new("expected `active_allocated`, `active_pending_free` or `inactive`");
                self.state = Some(state.ok_or_else(unknown)?);
            }
            Some(Keyword::Frames) => self.stack = lists.stack(value)?,
            Some(Keyword::History) => match value {
                Value::List(ListKind::BlockHistory, list) => self.history = lists.block_histories[list as usize],
                _ => return Err(Invalid::container(value)),
            },
            _ => {}
        }
        Ok(())
    }

    /// The block. If older versions leave them out, the requested size comes from the block's history or is the size of
    /// the block, and the address follows once the segment is complete.
    pub(super) fn complete(&self, histories: &[BlockHistoryDraft]) -> Result<BlockInfo, Invalid> {
        let size = self.size.ok_or_else(|| Invalid::missing("size"))?;
        let state = self.state.ok_or_else(|| Invalid::missing("state"))?;
        let history = self.history.map(|history| histories[history as usize]).unwrap_or_default();
        let default_requested = if state == BlockState::Inactive { 0 } else { size };
        Ok(BlockInfo {
            address: self.address.unwrap_or(ADDRESS_UNKNOWN),
            size,
            requested_size: self.requested_size.or(history.real_size).unwrap_or(default_requested),
            state,
            stack: self.stack.or(history.stack),
        })
    }
}

/// An entry of a block's history, which old versions write.
#[derive(Clone, Copy, Default)]
pub(super) struct BlockHistoryDraft {
    real_size: Option<u64>,
    stack: Option<StackId>,
}

impl BlockHistoryDraft {
    pub(super) fn set(&mut self, key: Option<Keyword>, value: Value, lists: &mut Lists) -> Result<(), Invalid> {
        match key {
            Some(Keyword::RealSize) => self.real_size = Some(unsigned(value)?),
            Some(Keyword::Frames) => self.stack = lists.stack(value)?,
            _ => {}
        }
        Ok(())
    }
}
