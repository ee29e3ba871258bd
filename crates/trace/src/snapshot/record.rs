//! The keys of each dict of a snapshot: what they set, which may be missing, and what it means if they are.

use warpool::memory::{Action, Annotation, BlockInfo, BlockState, MemPoolId, SegmentInfo, StackId, TraceEntry};

use super::build::{Builder, Wrong};
use super::convert::{boolean, container, device, float, note, pool, signed, text, unsigned};
use super::schema::{self, Word};
use crate::pickle::{DictKind, ListKind, Value};

/// An entry before any key is known.
pub(super) const BLANK_ENTRY: TraceEntry = TraceEntry::new(Action::Alloc, 0, 0, 0, 0);

/// Keys that every entry has, as bits of `entries_seen`.
const ENTRY_KEYS: [(u8, Word); 4] = [(1, Word::Action), (2, Word::Addr), (4, Word::Size), (8, Word::Stream)];
const ENTRY_KEYS_ALL: u8 = 15;
/// Keys that older versions do not write.
pub(super) const ENTRY_HAS_TIME: u8 = 16;

/// A segment as far as its keys are known.
#[derive(Default)]
pub(super) struct SegmentDraft {
    device: Option<i32>,
    address: Option<u64>,
    total_size: Option<u64>,
    allocated_size: Option<u64>,
    active_size: Option<u64>,
    requested_size: Option<u64>,
    stream: Option<u64>,
    kind: Option<warpool::memory::SegmentKind>,
    pub(super) pool: Option<MemPoolId>,
    is_expandable: Option<bool>,
    stack: Option<StackId>,
    blocks: Option<Vec<BlockInfo>>,
    taken: bool,
}

/// A block as far as its keys are known.
#[derive(Default)]
pub(super) struct BlockDraft {
    pub(super) address: Option<u64>,
    size: Option<u64>,
    pub(super) requested_size: Option<u64>,
    state: Option<BlockState>,
    stack: Option<StackId>,
    past: Option<u32>,
}

/// What a block was, in the words of old versions.
#[derive(Clone, Copy, Default)]
pub(super) struct PastDraft {
    real_size: Option<u64>,
    stack: Option<StackId>,
}

/// An annotation as far as its keys are known. Its name and stage are whatever the program gave; texts by number.
#[derive(Default)]
pub(super) struct AnnotationDraft {
    name: Option<u32>,
    stage: Option<u32>,
    device: Option<i64>,
    time_us: Option<i64>,
}

/// Bytes of a settings string, and of a size in one. Both are copied wherever a pickle refers to them.
const CONF_MAX: usize = 16 << 10;
const DIVISION_NAME_MAX: usize = 20;

/// Marks an address that a block does not have; it is found from its neighbours.
pub(super) const ADDRESS_UNKNOWN: u64 = u64::MAX;

impl Builder {
    /// Sets the keys of an entry: the innermost loop of reading.
    #[inline]
    pub(super) fn set_entry(&mut self, number: u32, pairs: &[Value]) -> Result<(), Wrong> {
        let place = number as usize;
        let mut entry = self.entries[place];
        let mut seen = self.entries_seen[place];
        for pair in pairs.chunks_exact(2) {
            let (Value::Text(key), value) = (pair[0], pair[1]) else { continue };
            let Some(key) = Word::of(key) else { continue };
            let wrong = |wrong: Wrong| Wrong::new(format!("`{}`: {}", key.text(), wrong.what));
            match key {
                Word::Action => {
                    entry.action = self.action(value).map_err(wrong)?;
                    seen |= 1;
                }
                Word::Addr | Word::DeviceFree => {
                    entry.addr = unsigned(value).map_err(wrong)?;
                    seen |= 2;
                }
                Word::Size => {
                    entry.size = unsigned(value).map_err(wrong)?;
                    seen |= 4;
                }
                Word::Stream => {
                    entry.stream = unsigned(value).map_err(wrong)?;
                    seen |= 8;
                }
                Word::TimeUs => {
                    entry.time_us = signed(value).map_err(wrong)?;
                    seen |= ENTRY_HAS_TIME;
                }
                Word::PoolId => entry.pool = Some(pool(value).map_err(wrong)?),
                Word::CompileContext => entry.compile_context = note(value, Word::NotApplicable).map_err(wrong)?,
                Word::UserMetadata => entry.user_metadata = note(value, Word::Empty).map_err(wrong)?,
                Word::Frames => entry.stack = self.stack(value).map_err(wrong)?,
                Word::ForwardFrames => entry.forward_stack = self.stack(value).map_err(wrong)?,
                _ => {}
            }
        }
        self.entries[place] = entry;
        self.entries_seen[place] = seen;
        Ok(())
    }

    /// Whether an entry has all that it must have.
    #[inline]
    pub(super) fn check_entry(&self, number: u32) -> Result<(), Wrong> {
        let seen = self.entries_seen[number as usize];
        if seen & ENTRY_KEYS_ALL == ENTRY_KEYS_ALL {
            return Ok(());
        }
        let missing = ENTRY_KEYS.iter().find(|(bit, _)| seen & bit == 0).map_or("action", |(_, key)| key.text());
        Err(Wrong::missing(missing))
    }

    /// Sets one key of any other dict.
    pub(super) fn set(&mut self, kind: DictKind, number: u32, key: u32, value: Value) -> Result<(), Wrong> {
        let place = number as usize;
        match kind {
            DictKind::Root => self.set_root(Word::of(key), value)?,
            DictKind::Segment => self.set_segment(place, Word::of(key), value)?,
            DictKind::Block => self.set_block(place, Word::of(key), value)?,
            DictKind::Past => match Word::of(key) {
                Some(Word::RealSize) => self.pasts[place].real_size = Some(unsigned(value)?),
                Some(Word::Frames) => self.pasts[place].stack = self.stack(value)?,
                _ => {}
            },
            DictKind::Frame => {
                let frame = self.stacks.frame(number);
                match Word::of(key) {
                    Some(Word::Name) => frame.name = Some(text(value)?),
                    Some(Word::Filename) => frame.filename = Some(text(value)?),
                    Some(Word::Line) => frame.line = Some(unsigned(value)?),
                    _ => {}
                }
            }
            DictKind::Annotation => {
                let annotation = &mut self.annotations[place];
                match Word::of(key) {
                    Some(Word::Name) => annotation.name = Some(text(value)?),
                    Some(Word::Stage) => annotation.stage = Some(text(value)?),
                    Some(Word::Device) => annotation.device = Some(signed(value)?),
                    Some(Word::TimeUs) => annotation.time_us = Some(signed(value)?),
                    _ => {}
                }
            }
            DictKind::Settings => self.set_setting(place, Word::of(key), value)?,
            DictKind::Divisions => {
                let name = self.texts.get(key);
                if name.len() > DIVISION_NAME_MAX {
                    return Err(Wrong::new("expected a size in MiB"));
                }
                self.divisions[place].push((name.to_owned(), signed(value)?));
            }
            DictKind::Entry => self.set_entry(number, &[Value::Text(key), value])?,
            DictKind::Skipped => {}
        }
        Ok(())
    }

    fn set_root(&mut self, key: Option<Word>, value: Value) -> Result<(), Wrong> {
        match (key, value) {
            (Some(Word::Segments), Value::List(ListKind::Segments, list)) => {
                self.root.segments = Some(self.segment_lists[list as usize].take()?);
            }
            (Some(Word::HostSegments), Value::List(ListKind::Segments, list)) => {
                self.root.host_segments = Some(self.segment_lists[list as usize].take()?);
            }
            (Some(Word::DeviceTraces), Value::List(ListKind::Traces, list)) => {
                self.root.traces = Some(self.traces_lists[list as usize].take()?);
            }
            (Some(Word::HostTraces), Value::List(ListKind::Trace, list)) => self.root.host_trace = Some(list),
            (Some(Word::AllocatorSettings), Value::Dict(DictKind::Settings, dict)) => self.root.settings = Some(dict),
            (Some(Word::ExternalAnnotations), Value::List(ListKind::Annotations, list)) => {
                self.root.annotations = self.annotation_lists[list as usize].take()?;
            }
            (Some(Word::Segments), _) if self.is_empty_list(value) => self.root.segments = Some(Vec::new()),
            (Some(Word::HostSegments), _) if self.is_empty_list(value) => self.root.host_segments = Some(Vec::new()),
            (Some(Word::DeviceTraces), _) if self.is_empty_list(value) => self.root.traces = Some(Vec::new()),
            (Some(Word::ExternalAnnotations), _) if self.is_empty_list(value) => {}
            (Some(Word::Segments | Word::DeviceTraces | Word::AllocatorSettings | Word::ExternalAnnotations), _) => {
                return Err(container(value));
            }
            // Without a host allocator there is nothing to tell.
            (Some(Word::HostSegments | Word::HostTraces), Value::None) => {}
            (Some(Word::HostSegments | Word::HostTraces), _) => return Err(container(value)),
            _ => {}
        }
        Ok(())
    }

    fn set_segment(&mut self, place: usize, key: Option<Word>, value: Value) -> Result<(), Wrong> {
        let stack = if key == Some(Word::Frames) { self.stack(value)? } else { None };
        let draft = &mut self.segments[place];
        match key {
            Some(Word::Device) => draft.device = Some(device(value)?),
            Some(Word::Address) => draft.address = Some(unsigned(value)?),
            Some(Word::TotalSize) => draft.total_size = Some(unsigned(value)?),
            Some(Word::AllocatedSize) => draft.allocated_size = Some(unsigned(value)?),
            Some(Word::ActiveSize) => draft.active_size = Some(unsigned(value)?),
            Some(Word::RequestedSize) => draft.requested_size = Some(unsigned(value)?),
            Some(Word::Stream) => draft.stream = Some(unsigned(value)?),
            Some(Word::SegmentType) => {
                let kind = schema::segment_kind(text(value)?);
                draft.kind = Some(kind.ok_or_else(|| Wrong::new("expected `small` or `large`"))?);
            }
            Some(Word::SegmentPoolId) => draft.pool = Some(pool(value)?),
            Some(Word::IsExpandable) => draft.is_expandable = Some(boolean(value)?),
            Some(Word::Frames) => draft.stack = stack,
            Some(Word::Blocks) => match value {
                Value::List(ListKind::Blocks, list) => draft.blocks = Some(self.block_lists[list as usize].take()?),
                _ => return Err(container(value)),
            },
            _ => {}
        }
        Ok(())
    }

    fn set_block(&mut self, place: usize, key: Option<Word>, value: Value) -> Result<(), Wrong> {
        let stack = if key == Some(Word::Frames) { self.stack(value)? } else { None };
        let draft = &mut self.blocks[place];
        match key {
            Some(Word::Address) => draft.address = Some(unsigned(value)?),
            Some(Word::Size) => draft.size = Some(unsigned(value)?),
            Some(Word::RequestedSize) => draft.requested_size = Some(unsigned(value)?),
            Some(Word::State) => {
                let state = schema::block_state(text(value)?);
                draft.state =
                    Some(state.ok_or_else(|| {
                        Wrong::new("expected `active_allocated`, `active_pending_free` or `inactive`")
                    })?);
            }
            Some(Word::Frames) => draft.stack = stack,
            Some(Word::History) => match value {
                Value::List(ListKind::History, list) => draft.past = self.history_lists[list as usize],
                _ => return Err(container(value)),
            },
            _ => {}
        }
        Ok(())
    }

    /// A block with what older versions leave out: what was asked for is in its history, and else unknown, so that all
    /// of it counts; its address follows once its segment is known.
    pub(super) fn complete_block(&self, draft: &BlockDraft) -> Result<BlockInfo, Wrong> {
        let size = draft.size.ok_or_else(|| Wrong::missing("size"))?;
        let state = draft.state.ok_or_else(|| Wrong::missing("state"))?;
        let past = draft.past.map(|past| self.pasts[past as usize]).unwrap_or_default();
        let asked = if state == BlockState::Inactive { 0 } else { size };
        Ok(BlockInfo {
            address: draft.address.unwrap_or(ADDRESS_UNKNOWN),
            size,
            requested_size: draft.requested_size.or(past.real_size).unwrap_or(asked),
            state,
            stack: draft.stack.or(past.stack),
        })
    }

    pub(super) fn annotation(&self, number: u32) -> Result<Annotation, Wrong> {
        let draft = &self.annotations[number as usize];
        let spelled = |text: Option<u32>| text.map_or_else(String::new, |text| self.texts.get(text).to_owned());
        Ok(Annotation {
            name: spelled(draft.name),
            stage: spelled(draft.stage),
            device: draft.device.ok_or_else(|| Wrong::missing("device"))?,
            time_us: draft.time_us.ok_or_else(|| Wrong::missing("time_us"))?,
        })
    }

    fn set_setting(&mut self, place: usize, key: Option<Word>, value: Value) -> Result<(), Wrong> {
        let settings = &mut self.settings[place];
        match key {
            Some(Word::Conf) => {
                let conf = self.texts.get(text(value)?);
                if conf.len() > CONF_MAX {
                    return Err(Wrong::new(format!("{} bytes of settings; {CONF_MAX} are the most", conf.len())));
                }
                settings.conf = Some(conf.to_owned());
            }
            Some(Word::MaxSplitSize) => settings.max_split_size = Some(signed(value)?),
            Some(Word::GarbageCollectionThreshold) => settings.garbage_collection_threshold = Some(float(value)?),
            Some(Word::ExpandableSegments) => settings.expandable_segments = Some(boolean(value)?),
            Some(Word::PinnedNumRegisterThreads) => settings.pinned_num_register_threads = Some(signed(value)?),
            Some(Word::ReleaseLockOnCudamalloc) => settings.release_lock_on_cudamalloc = Some(boolean(value)?),
            Some(Word::PinnedUseCudaHostRegister) => settings.pinned_use_cuda_host_register = Some(boolean(value)?),
            Some(Word::GraphCaptureRecordStreamReuse) => {
                settings.graph_capture_record_stream_reuse = Some(boolean(value)?);
            }
            Some(Word::MaxRoundThreshold) => settings.max_round_threshold = Some(signed(value)?),
            Some(Word::MaxCachedSize) => settings.max_cached_size = Some(signed(value)?),
            Some(Word::RoundupPower2Divisions) => match value {
                Value::Dict(DictKind::Divisions, dict) => {
                    settings.roundup_power2_divisions = Some(std::mem::take(&mut self.divisions[dict as usize]));
                }
                _ => return Err(container(value)),
            },
            _ => {}
        }
        Ok(())
    }

    fn action(&self, value: Value) -> Result<Action, Wrong> {
        let name = text(value)?;
        schema::action(name)
            .ok_or_else(|| Wrong::new(format!("`{}` is not an action that this version knows", self.texts.short(name))))
    }

    /// The stack that a list of frames is.
    fn stack(&mut self, value: Value) -> Result<Option<StackId>, Wrong> {
        match value {
            _ if !self.stacks.kept() => Ok(None),
            Value::None => Ok(None),
            Value::List(ListKind::Frames, list) => self.stacks.close(list),
            _ if self.is_empty_list(value) => Ok(None),
            _ => Err(container(value)),
        }
    }
}

impl SegmentDraft {
    /// The segment, once. What is missing gets its meaning from the versions that leave it out.
    pub(super) fn take(&mut self) -> Result<SegmentInfo, Wrong> {
        if self.taken {
            return Err(Wrong::new("it refers to a segment that belongs to another place"));
        }
        self.taken = true;
        let need = |value: Option<u64>, key: Word| value.ok_or_else(|| Wrong::missing(key.text()));
        let address = need(self.address, Word::Address)?;
        let mut blocks = self.blocks.take().ok_or_else(|| Wrong::missing("blocks"))?;
        let mut next = address;
        for (place, block) in blocks.iter_mut().enumerate() {
            if block.address == ADDRESS_UNKNOWN {
                block.address = next;
            }
            let end = block.address.checked_add(block.size);
            next =
                end.ok_or_else(|| Wrong::new("it ends beyond the last address").within(&format!(".blocks[{place}]")))?;
        }
        let active = blocks.iter().filter(|block| block.state != BlockState::Inactive);
        let asked = active.fold(0_u64, |sum, block| sum.saturating_add(block.requested_size));
        Ok(SegmentInfo {
            device: self.device.ok_or_else(|| Wrong::missing("device"))?,
            address,
            total_size: need(self.total_size, Word::TotalSize)?,
            allocated_size: need(self.allocated_size, Word::AllocatedSize)?,
            active_size: need(self.active_size, Word::ActiveSize)?,
            requested_size: self.requested_size.unwrap_or(asked),
            stream: self.stream.unwrap_or(0),
            kind: self.kind.ok_or_else(|| Wrong::missing("segment_type"))?,
            pool: self.pool.unwrap_or_default(),
            is_expandable: self.is_expandable.unwrap_or(false),
            stack: self.stack,
            blocks,
        })
    }
}
