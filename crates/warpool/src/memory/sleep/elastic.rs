//! Elastic memory that carries a tag. Asleep, its committed blocks have no memory: the contents are on the host or
//! dropped, and the pages have returned to the driver. Waking commits the same blocks again.
//!
//! It changes around the pools of the tags, which change all or none: contents are copied before those fall asleep, and
//! blocks are committed before those wake. Both can be undone.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::copies::{Copies, Packer, SaveError};
use super::report::{Keep, SleepReport};
use crate::error::{SleepCall, SleepFailure, SleepShortage};
use crate::memory::elastic::ElasticMemory;
use crate::memory::mapped_segments::SavedRange;
use crate::memory::{HostAllocator, HostBlock, OomCause};
use crate::{Device, Error, Result, Stream, lock};

/// Elastic memory of a tag. Its owner drops it.
pub(super) struct TagElastic {
    tag: Arc<str>,
    device: Device,
    memory: Weak<ElasticMemory>,
    sleeping: Mutex<Option<Sleeping>>,
}

/// What elastic memory has while it sleeps.
struct Sleeping {
    /// The blocks that are committed when it is awake.
    blocks: Vec<Range<u64>>,
    keeps_contents: bool,
    saved: Vec<SavedRange>,
    pieces: Vec<Arc<HostBlock>>,
}

impl TagElastic {
    pub(super) fn new(tag: Arc<str>, device: &Device, memory: &Arc<ElasticMemory>) -> Self {
        let (device, memory) = (device.clone(), Arc::downgrade(memory));
        Self { tag, device, memory, sleeping: Mutex::default() }
    }

    /// Whether its owner still has it.
    pub(super) fn exists(&self) -> bool {
        self.memory.strong_count() > 0
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The bytes of its blocks, with and without memory; those that have memory; and those of the host.
    pub(super) fn bytes(&self) -> [u64; 3] {
        let Some(memory) = self.memory.upgrade() else { return [0; 3] };
        let committed = memory.committed_bytes();
        match &*lock(&self.sleeping) {
            None => [committed, committed, 0],
            Some(sleeping) => {
                let bytes = bytes_of(&memory, &sleeping.blocks);
                [bytes, committed, sleeping.pieces.iter().map(|piece| piece.bytes()).sum()]
            }
        }
    }

    /// The bytes of contents that a sleep copies.
    pub(super) fn bytes_to_save(&self) -> u64 {
        if lock(&self.sleeping).is_some() { 0 } else { self.bytes()[1] }
    }

    fn failure(&self, call: SleepCall, shortage: SleepShortage, source: Error) -> Error {
        let (tags, source) = (vec![self.tag.to_string()], Some(source));
        Error::Sleep(Box::new(SleepFailure { call, tags, shortage, source, is_undone: true }))
    }

    fn home(&self, memory: &ElasticMemory) -> Stream {
        Stream::from_id(&self.device, memory.stream_id())
    }

    /// Takes the memory of all blocks, and returns their pages to the driver. Returns how many bytes. No work uses it.
    fn vacate(&self, memory: &ElasticMemory) -> u64 {
        let home = self.home(memory);
        let vacated = memory.change_asleep(0..memory.layout().blocks, &home, false).and_then(|()| memory.vacate());
        vacated.unwrap_or_else(|error| {
            tracing::warn!(%error, tag = &*self.tag, "pages of elastic memory did not return to the driver");
            0
        })
    }
}

fn bytes_of(memory: &ElasticMemory, blocks: &[Range<u64>]) -> u64 {
    let layout = memory.layout();
    blocks.iter().map(|run| run.end - run.start).sum::<u64>() * layout.rows * layout.block_bytes
}

/// Elastic memory that is about to sleep: its contents are saved. Dropped, it stays awake.
pub(super) struct Leaving {
    of: Arc<TagElastic>,
    memory: Arc<ElasticMemory>,
    sleeping: Option<Sleeping>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.sleeping.is_some() {
            self.memory.set_asleep(None);
        }
    }
}

/// Saves the contents of what is awake. Waits for all work of its devices.
pub(super) fn save(host: &HostAllocator, elastic: &[Arc<TagElastic>], keep: Keep) -> Result<Vec<Leaving>> {
    let mut leaving = Vec::new();
    for of in elastic.iter().filter(|of| lock(&of.sleeping).is_none()) {
        let Some(memory) = of.memory.upgrade() else { continue };
        memory.set_asleep(Some(&of.tag));
        let keeps_contents = keep == Keep::Host;
        let sleeping = Sleeping { blocks: Vec::new(), keeps_contents, saved: Vec::new(), pieces: Vec::new() };
        leaving.push(Leaving { of: Arc::clone(of), memory, sleeping: Some(sleeping) });
    }
    let bytes_needed = leaving.iter().map(|leaving| leaving.memory.committed_bytes()).sum();
    let mut bytes_before = 0;
    for leaving in &mut leaving {
        let Leaving { of, memory, sleeping: Some(sleeping) } = leaving else { unreachable!("it is new") };
        let nothing = |error| of.failure(SleepCall::Sleep, SleepShortage::Nothing, error);
        of.device.synchronize().map_err(nothing)?;
        sleeping.blocks = memory.committed_blocks();
        if keep != Keep::Host || sleeping.blocks.is_empty() {
            continue;
        }
        let mut copies = Copies::new(&of.device).map_err(nothing)?;
        let mut packer = Packer::new(host, bytes_of(memory, &sleeping.blocks));
        let copied = save_blocks(memory, &sleeping.blocks, &mut packer, &mut copies);
        let bytes_found = bytes_before + packer.bytes_allocated();
        bytes_before = bytes_found;
        sleeping.pieces = packer.pieces;
        let waited = wait(memory, &copies);
        sleeping.saved = copied.map_err(|error| match error {
            SaveError::NoHostMemory(error) => {
                of.failure(SleepCall::Sleep, SleepShortage::PinnedMemory { bytes_needed, bytes_found }, error)
            }
            SaveError::Copy(error) => nothing(error),
        })?;
        waited.map_err(nothing)?;
    }
    Ok(leaving)
}

/// Waits for copies, also after one that failed: none may be under way when the next call begins. Where it cannot wait,
/// the pages serve nobody else before the copies are done. Pinned memory knows its copies.
fn wait(memory: &ElasticMemory, copies: &Copies<'_>) -> Result<()> {
    let waited = copies.wait();
    if waited.is_err() && copies.wait_again().is_err() {
        memory.record_uses(&copies.streams())?;
    }
    waited
}

fn save_blocks(
    memory: &ElasticMemory,
    blocks: &[Range<u64>],
    packer: &mut Packer<'_>,
    copies: &mut Copies<'_>,
) -> std::result::Result<Vec<SavedRange>, SaveError> {
    let mut saved = Vec::new();
    for run in blocks {
        for (ptr, bytes) in memory.pieces(run) {
            saved.extend(packer.save(ptr, bytes, copies)?);
        }
    }
    Ok(saved)
}

/// Puts it to sleep, after its contents were saved; drops the contents of what sleeps, if they are discarded.
pub(super) fn fall_asleep(leaving: Vec<Leaving>, elastic: &[Arc<TagElastic>], keep: Keep, report: &mut SleepReport) {
    for mut leaving in leaving {
        let Some(sleeping) = leaving.sleeping.take() else { continue };
        report.bytes_copied += sleeping.saved.iter().map(|range| range.bytes).sum::<u64>();
        *lock(&leaving.of.sleeping) = Some(sleeping);
        report.bytes_device += leaving.of.vacate(&leaving.memory);
    }
    for of in elastic.iter().filter(|_| keep == Keep::Discard) {
        if let Some(sleeping) = &mut *lock(&of.sleeping) {
            (sleeping.keeps_contents, sleeping.saved, sleeping.pieces) = (false, Vec::new(), Vec::new());
        }
    }
}

/// Elastic memory that has its memory and contents again. Dropped, it goes on sleeping.
pub(super) struct Waking {
    of: Arc<TagElastic>,
    memory: Arc<ElasticMemory>,
    is_complete: bool,
}

impl Drop for Waking {
    fn drop(&mut self) {
        if !self.is_complete {
            self.of.vacate(&self.memory);
            // Pages that could not be mapped belong to nobody.
            self.memory.trim();
        }
    }
}

/// Gives memory and contents to what sleeps, before the pools of its tags wake.
pub(super) fn bring_back(elastic: &[Arc<TagElastic>], report: &mut SleepReport) -> Result<Vec<Waking>> {
    let mut waking = Vec::new();
    let asleep = elastic.iter().filter(|of| lock(&of.sleeping).is_some());
    let asleep: Vec<_> = asleep.filter_map(|of| Some((of, of.memory.upgrade()?))).collect();
    let blocks_of = |of: &TagElastic| lock(&of.sleeping).as_ref().map_or_else(Vec::new, |it| it.blocks.clone());
    let bytes_needed = asleep.iter().map(|(of, memory)| bytes_of(memory, &blocks_of(of))).sum();
    let mut bytes_found = 0;
    for (of, memory) in asleep {
        let this = Waking { of: Arc::clone(of), memory: Arc::clone(&memory), is_complete: false };
        let home = of.home(&memory);
        for run in blocks_of(of) {
            if let Err(error) = memory.change_asleep(run, &home, true) {
                let shortage = match &error {
                    Error::OutOfMemory(report) if report.cause == OomCause::Limit => {
                        SleepShortage::Limit { bytes_needed }
                    }
                    Error::OutOfMemory(_) => SleepShortage::DeviceMemory { bytes_needed, bytes_found },
                    _ => SleepShortage::Nothing,
                };
                return Err(of.failure(SleepCall::Wake, shortage, error));
            }
        }
        let nothing = |error| of.failure(SleepCall::Wake, SleepShortage::Nothing, error);
        // The pages may have come from other streams, which the copies do not wait for.
        of.device.synchronize().map_err(nothing)?;
        let mut copies = Copies::new(&of.device).map_err(nothing)?;
        let copied = restore(of, &memory, &mut copies);
        let waited = wait(&memory, &copies);
        let bytes_copied = copied.and_then(|bytes| waited.map(|()| bytes)).map_err(nothing)?;
        report.bytes_copied += bytes_copied;
        report.bytes_device += memory.committed_bytes();
        bytes_found += memory.committed_bytes();
        waking.push(this);
    }
    Ok(waking)
}

/// Copies contents back, or writes zeroes. Returns the bytes that are copied.
fn restore(of: &TagElastic, memory: &ElasticMemory, copies: &mut Copies<'_>) -> Result<u64> {
    let sleeping = lock(&of.sleeping);
    let Some(sleeping) = &*sleeping else { return Ok(0) };
    if sleeping.keeps_contents {
        sleeping.saved.iter().try_for_each(|range| copies.restore(range, &sleeping.pieces))?;
        return Ok(sleeping.saved.iter().map(|range| range.bytes).sum());
    }
    for (ptr, bytes) in sleeping.blocks.iter().flat_map(|run| memory.pieces(run)) {
        copies.clear(ptr, bytes)?;
    }
    Ok(0)
}

/// Ends a wake that succeeded.
pub(super) fn awake(waking: Vec<Waking>) {
    for mut waking in waking {
        waking.is_complete = true;
        *lock(&waking.of.sleeping) = None;
        waking.memory.set_asleep(None);
    }
}
