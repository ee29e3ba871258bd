//! A snapshot as plain data: segments, their blocks, and the history, in the terms of PyTorch's snapshot files.
//!
//! Allocators make one, `warpool-trace` reads and writes files of it. Nothing here is live, and nothing is computed.
//! Texts and call stacks are kept once and named by number: a history repeats the same few over and over.

use std::sync::Arc;

use super::MemPoolId;

/// The state of allocators at one moment, with what led to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Memory that is held from the driver, by device and address.
    pub segments: Vec<SegmentInfo>,
    /// What happened, oldest first, one list per device.
    pub traces: Vec<Vec<TraceEntry>>,
    /// The settings that the allocator had.
    pub settings: RecordedSettings,
    /// Scopes that the program named, with their times.
    pub annotations: Vec<Annotation>,
    /// Pinned host memory; `None` if whoever took the snapshot does not know of it.
    pub host_segments: Option<Vec<SegmentInfo>>,
    /// What happened to pinned host memory; `None` if unknown.
    pub host_traces: Option<Vec<TraceEntry>>,
    /// The texts that entries name.
    pub texts: Texts,
    /// The call stacks that entries, blocks and segments name.
    pub stacks: Vec<Arc<[Frame]>>,
}

/// A stretch of memory that was obtained as one; of expandable segments, one stretch without holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Whose memory; -1 is the host's.
    pub device: i32,
    /// Where it starts.
    pub address: u64,
    /// How long it is.
    pub total_size: u64,
    /// Bytes in blocks that somebody has.
    pub allocated_size: u64,
    /// The same, with blocks that wait for events.
    pub active_size: u64,
    /// What was asked for, of the active blocks.
    pub requested_size: u64,
    /// The stream that its blocks are for, by the driver's handle.
    pub stream: u64,
    /// Whether it serves large or small requests.
    pub kind: SegmentKind,
    /// Its pool.
    pub pool: MemPoolId,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// Who asked for it.
    pub stack: Option<StackId>,
    /// What it is cut into, by address, without gaps.
    pub blocks: Vec<BlockInfo>,
}

/// Which requests a segment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SegmentKind {
    /// Up to 1 MiB.
    Small,
    /// More.
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
    /// Where it starts.
    pub address: u64,
    /// How long it is.
    pub size: u64,
    /// What was asked for; of an inactive block, what was asked for the last time.
    pub requested_size: u64,
    /// Who has it.
    pub state: BlockState,
    /// Who asked for it.
    pub stack: Option<StackId>,
}

/// Who has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockState {
    /// Somebody.
    ActiveAllocated,
    /// Nobody, but streams may still use it.
    ActivePendingFree,
    /// Nobody.
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

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// What.
    pub action: Action,
    /// Where; of an [`Action::Oom`], the bytes that the device had free.
    pub addr: u64,
    /// How many bytes: of blocks what was asked for, of segments what they take.
    pub size: u64,
    /// For which stream, by the driver's handle.
    pub stream: u64,
    /// When, in microseconds.
    pub time_us: i64,
    /// In which pool; `None` if the recording does not say (PyTorch 2.11 does not).
    pub pool: Option<MemPoolId>,
    /// The compiled region that it happened in.
    pub compile_context: Option<TextId>,
    /// What the program wanted written beside it.
    pub user_metadata: Option<TextId>,
    /// Who asked for it.
    pub stack: Option<StackId>,
    /// Who asked for it in the forward pass, where it happened in the backward pass.
    pub forward_stack: Option<StackId>,
}

impl TraceEntry {
    /// An entry with nothing but numbers.
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

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Action {
    /// A block was given out.
    Alloc,
    /// Its owner gave it back.
    FreeRequested,
    /// All streams were done with it.
    FreeCompleted,
    /// A segment was obtained from the driver.
    SegmentAlloc,
    /// A segment was given back to the driver.
    SegmentFree,
    /// An expandable segment grew.
    SegmentMap,
    /// An expandable segment lost a part.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request could not be met.
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

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }
}

/// A scope that the program named: where it starts or ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Its name.
    pub name: String,
    /// `START` or `END`.
    pub stage: String,
    /// On which device.
    pub device: i64,
    /// When, in microseconds.
    pub time_us: i64,
}

/// One line of a call stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The function.
    pub name: String,
    /// Its file.
    pub filename: String,
    /// The line in it.
    pub line: u64,
}

/// A call stack of a [`Snapshot`], by its place in [`Snapshot::stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

/// A text of a [`Snapshot`], by its place in [`Snapshot::texts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextId(pub u32);

/// Texts, each once, in the order in which they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Texts {
    list: Vec<Arc<str>>,
    places: std::collections::BTreeMap<Arc<str>, TextId>,
}

impl Texts {
    /// The number of a text; a new one if it is new.
    pub fn intern(&mut self, text: &str) -> TextId {
        if let Some(&id) = self.places.get(text) {
            return id;
        }
        let id = TextId(u32::try_from(self.list.len()).expect("fewer than 2^32 different texts"));
        let text: Arc<str> = text.into();
        self.list.push(Arc::clone(&text));
        self.places.insert(text, id);
        id
    }

    /// The text of that number.
    ///
    /// # Panics
    /// If the number is not one of its own.
    #[must_use]
    pub fn get(&self, id: TextId) -> &str {
        &self.list[id.0 as usize]
    }
}

/// The settings as a snapshot shows them. `None` where the recording does not say: older versions know fewer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedSettings {
    /// The string that the settings were given as.
    pub conf: Option<String>,
    /// `max_split_size` in bytes; -1 is unlimited.
    pub max_split_size: Option<i64>,
    /// The share of the limit above which old segments are given back.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments grow.
    pub expandable_segments: Option<bool>,
    /// How many threads touch pages before they are pinned.
    pub pinned_num_register_threads: Option<i64>,
    /// Whether the lock was let go around the driver's allocation.
    pub release_lock_on_cudamalloc: Option<bool>,
    /// Whether host memory was pinned by registration.
    pub pinned_use_cuda_host_register: Option<bool>,
    /// Whether frees inside a capture were reused by graph order.
    pub graph_capture_record_stream_reuse: Option<bool>,
    /// The size above which pinned requests were not rounded; -1 is unlimited.
    pub max_round_threshold: Option<i64>,
    /// The size above which pinned blocks were not kept; -1 is unlimited.
    pub max_cached_size: Option<i64>,
    /// Divisions by power of two, from 1 MiB to 32 GiB, as (lower end in MiB, divisions).
    pub roundup_power2_divisions: Option<Vec<(String, i64)>>,
}
