//! A snapshot as plain data: segments, their blocks, and the history, in the terms of PyTorch's snapshot files.
//!
//! Allocators fill it in; `warpool-trace` reads and writes it as a file. Texts and call stacks are stored once and
//! referred to by id: a history repeats the same few many times.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::account::DeviceAccount;
use crate::memory::MemPoolId;

/// The number of the host in snapshots.
const HOST: i32 = -1;

/// The state of allocators at one moment, with their history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Reserved memory, by device and address.
    pub segments: Vec<SegmentInfo>,
    /// The history, oldest first, one list per device.
    pub traces: Vec<Vec<TraceEntry>>,
    /// The allocator's settings.
    pub settings: RecordedSettings,
    /// Regions that the program named, with their times.
    pub annotations: Vec<Annotation>,
    /// Pinned host memory; `None` if unknown.
    pub host_segments: Option<Vec<SegmentInfo>>,
    /// The history of pinned host memory; `None` if unknown.
    pub host_traces: Option<Vec<TraceEntry>>,
    /// Whose the memory of each device was; empty if unknown. Not in PyTorch's files.
    pub accounts: Vec<DeviceAccount>,
    /// The texts that entries refer to.
    pub texts: Texts,
    /// The call stacks that entries, blocks and segments refer to.
    pub stacks: Vec<Arc<[Frame]>>,
}

/// A segment, or a contiguous mapped range of an expandable segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// The device; -1 is the host.
    pub device: i32,
    /// Its first address.
    pub address: u64,
    /// Its size.
    pub total_size: u64,
    /// Bytes of allocated blocks.
    pub allocated_size: u64,
    /// Bytes of allocated blocks and of pending frees.
    pub active_size: u64,
    /// Requested bytes of the active blocks.
    pub requested_size: u64,
    /// The stream that it was allocated for, by the driver's handle.
    pub stream: u64,
    /// Whether it serves large or small requests.
    pub kind: SegmentKind,
    /// Its pool.
    pub pool: MemPoolId,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// Whether it is [elastic memory](crate::memory::elastic). Not in PyTorch's files.
    pub is_elastic: bool,
    /// The call stack of the request that it was allocated for.
    pub stack: Option<StackId>,
    /// Its blocks, by address, without gaps.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// A segment without blocks, of the default stream and pool.
    pub(crate) fn empty(device: DeviceId, address: u64, kind: SegmentKind) -> Self {
        Self {
            device: i32::try_from(device.0).unwrap_or(HOST),
            address,
            total_size: 0,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: 0,
            kind,
            pool: MemPoolId::DEFAULT,
            is_expandable: false,
            is_elastic: false,
            stack: None,
            blocks: Vec::new(),
        }
    }

    /// Adds a block after the others.
    pub(crate) fn push(&mut self, block: BlockInfo) {
        self.total_size += block.size;
        if block.state == BlockState::ActiveAllocated {
            self.allocated_size += block.size;
        }
        if block.state != BlockState::Inactive {
            self.active_size += block.size;
            self.requested_size += block.requested_size;
        }
        self.blocks.push(block);
    }
}

/// The requests that a segment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// Requests up to 1 MiB.
    Small,
    /// Requests above 1 MiB.
    Large,
}

impl SegmentKind {
    /// Its name in snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Its first address.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// The requested size; for an inactive block, that of its last allocation.
    pub requested_size: u64,
    /// Its state.
    pub state: BlockState,
    /// The call stack of its allocation.
    pub stack: Option<StackId>,
}

/// The state of a block, as in PyTorch's snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockState {
    /// Allocated.
    ActiveAllocated,
    /// Freed; streams may still use it.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl BlockState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ActiveAllocated, Self::ActivePendingFree, Self::Inactive];

    /// Its name in snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActiveAllocated => "active_allocated",
            Self::ActivePendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }
}

/// An entry of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// The kind of event.
    pub action: Action,
    /// The address; for an [`Action::Oom`], the bytes that were free on the device.
    pub addr: u64,
    /// The size in bytes: the requested size for blocks, the whole size for segments.
    pub size: u64,
    /// The stream, by the driver's handle.
    pub stream: u64,
    /// The time, in microseconds.
    pub time_us: i64,
    /// The pool; `None` in recordings without it (PyTorch 2.11 records none).
    pub pool: Option<MemPoolId>,
    /// The compiled region of the program.
    pub compile_context: Option<TextId>,
    /// The metadata that the program had set.
    pub user_metadata: Option<TextId>,
    /// The call stack.
    pub stack: Option<StackId>,
    /// The call stack of the forward pass, for entries of the backward pass.
    pub forward_stack: Option<StackId>,
}

impl TraceEntry {
    /// An entry without texts and stacks.
    #[must_use]
    pub const fn new(action: Action, addr: u64, size: u64, stream: u64, time_us: i64) -> Self {
        Self {
            action,
            addr,
            size,
            stream,
            time_us,
            pool: None,
            compile_context: None,
            user_metadata: None,
            stack: None,
            forward_stack: None,
        }
    }
}

/// The kind of event that an entry records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Action {
    /// A block was allocated.
    Alloc,
    /// A block was freed.
    FreeRequested,
    /// No stream uses a freed block any more.
    FreeCompleted,
    /// A segment was allocated from the driver.
    SegmentAlloc,
    /// A segment was returned to the driver.
    SegmentFree,
    /// A part of an expandable segment was mapped.
    SegmentMap,
    /// A part of an expandable segment was unmapped.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request ran out of memory.
    Oom,
    /// The program named a block.
    Annotate,
}

impl Action {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Snapshot,
        Self::Oom,
        Self::Annotate,
    ];

    /// Its name in snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Snapshot => "snapshot",
            Self::Oom => "oom",
            Self::Annotate => "annotate",
        }
    }

    /// The action of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }
}

/// The start or the end of a region that the program named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Its name.
    pub name: String,
    /// `START` or `END`.
    pub stage: String,
    /// The device.
    pub device: i64,
    /// The time, in microseconds.
    pub time_us: i64,
}

/// A frame of a call stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The function.
    pub name: String,
    /// Its file.
    pub filename: String,
    /// The line.
    pub line: u64,
}

/// A call stack of a [`Snapshot`]: an index into [`Snapshot::stacks`].
///
/// An `Option` of it is no larger, since each of millions of entries has two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(NonZeroU32);

/// A text of a [`Snapshot`]: an index into [`Snapshot::texts`]. An `Option` of it is no larger.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextId(NonZeroU32);

impl StackId {
    /// The stack with that index. `None` if the index is `u32::MAX` or more.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        one_more(index).map(Self)
    }

    /// The index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl TextId {
    /// The text with that index. `None` if the index is `u32::MAX` or more.
    #[must_use]
    pub fn new(index: usize) -> Option<Self> {
        one_more(index).map(Self)
    }

    /// The index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

fn one_more(index: usize) -> Option<NonZeroU32> {
    NonZeroU32::new(u32::try_from(index).ok()?.checked_add(1)?)
}

impl fmt::Debug for StackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StackId({})", self.index())
    }
}

impl fmt::Debug for TextId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextId({})", self.index())
    }
}

/// Texts, each once, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Texts {
    list: Vec<Arc<str>>,
    ids: std::collections::BTreeMap<Arc<str>, TextId>,
}

impl Texts {
    /// The id of a text, which is added if it is new.
    pub fn intern(&mut self, text: &str) -> TextId {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = TextId::new(self.list.len()).expect("fewer than 2^32 different texts");
        let text: Arc<str> = text.into();
        self.list.push(Arc::clone(&text));
        self.ids.insert(text, id);
        id
    }

    /// The text with that id.
    ///
    /// # Panics
    /// If the id does not belong to these texts.
    #[must_use]
    pub fn get(&self, id: TextId) -> &str {
        &self.list[id.index()]
    }
}

/// The settings in a snapshot. `None` if a recording has no value: older versions record fewer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedSettings {
    /// The settings string.
    pub conf: Option<String>,
    /// `max_split_size` in bytes; -1 is unlimited.
    pub max_split_size: Option<i64>,
    /// The fraction of the limit above which old segments are released.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments are expandable.
    pub expandable_segments: Option<bool>,
    /// How many threads touch pages before they are pinned.
    pub pinned_num_register_threads: Option<i64>,
    /// Whether the lock was released around the driver's allocation.
    pub release_lock_on_cudamalloc: Option<bool>,
    /// Whether host memory was pinned by registration.
    pub pinned_use_cuda_host_register: Option<bool>,
    /// Whether frees inside a capture were reused by graph order.
    pub graph_capture_record_stream_reuse: Option<bool>,
    /// The size above which pinned requests were not rounded; -1 is unlimited.
    pub max_round_threshold: Option<i64>,
    /// The size above which pinned blocks were not cached; -1 is unlimited.
    pub max_cached_size: Option<i64>,
    /// Divisions by power of two, from 1 MiB to 32 GiB, as (lower end in MiB, divisions).
    pub roundup_power2_divisions: Option<Vec<(String, i64)>>,
}
