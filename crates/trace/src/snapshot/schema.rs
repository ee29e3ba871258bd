//! The structure of a snapshot: its keywords, and which kind of dict or list is under which key.

use warpool::memory::report::{Action, BlockState, SegmentKind};

use crate::pickle::{DictKind, ListKind};

macro_rules! keywords {
    ($($word:ident $text:literal)*) => {
        /// A key of a snapshot, or a value with a meaning. Its number in the table of texts is its position here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Keyword { $($word,)* }

        impl Keyword {
            const ALL: &[Keyword] = &[$(Keyword::$word,)*];

            pub(crate) const fn text(self) -> &'static str {
                match self { $(Keyword::$word => $text,)* }
            }
        }
    };
}

keywords! {
    Segments "segments"
    DeviceTraces "device_traces"
    AllocatorSettings "allocator_settings"
    ExternalAnnotations "external_annotations"
    HostSegments "host_segments"
    HostTraces "host_traces"
    WarpoolAccount "warpool_account"

    Device "device"
    Address "address"
    TotalSize "total_size"
    AllocatedSize "allocated_size"
    ActiveSize "active_size"
    RequestedSize "requested_size"
    Stream "stream"
    SegmentType "segment_type"
    SegmentPoolId "segment_pool_id"
    IsExpandable "is_expandable"
    IsElastic "is_elastic"
    Frames "frames"
    Blocks "blocks"

    Size "size"
    State "state"
    History "history"
    RealSize "real_size"
    AwaitingFree "active_awaiting_free"

    Action "action"
    Addr "addr"
    DeviceFree "device_free"
    TimeUs "time_us"
    CompileContext "compile_context"
    UserMetadata "user_metadata"
    PoolId "pool_id"
    ForwardFrames "forward_frames"
    NotApplicable "N/A"
    Empty ""

    Name "name"
    Filename "filename"
    Line "line"
    Stage "stage"

    TotalBytes "total_bytes"
    UsedBytes "used_bytes"
    Owner "owner"
    What "what"
    Bytes "bytes"
    KnownBy "known_by"
    Remark "remark"

    Conf "PYTORCH_CUDA_ALLOC_CONF"
    MaxSplitSize "max_split_size"
    GarbageCollectionThreshold "garbage_collection_threshold"
    ExpandableSegments "expandable_segments"
    PinnedNumRegisterThreads "pinned_num_register_threads"
    ReleaseLockOnCudamalloc "release_lock_on_cudamalloc"
    PinnedUseCudaHostRegister "pinned_use_cuda_host_register"
    GraphCaptureRecordStreamReuse "graph_capture_record_stream_reuse"
    MaxRoundThreshold "max_round_threshold"
    MaxCachedSize "max_cached_size"
    RoundupPower2Divisions "roundup_power2_divisions"
}

impl Keyword {
    /// The keyword with that number in the table of texts.
    #[inline]
    pub(crate) fn of(text: u32) -> Option<Self> {
        Self::ALL.get(text as usize).copied()
    }
}

/// The texts with fixed numbers, in their order: keywords, then the names of actions, block states and segment kinds.
pub(super) fn fixed_texts() -> impl Iterator<Item = &'static str> {
    (Keyword::ALL.iter().map(|word| word.text()))
        .chain(Action::ALL.iter().map(|action| action.name()))
        .chain(BlockState::ALL.iter().map(|state| state.name()))
        .chain(SEGMENT_KINDS.iter().map(|kind| kind.name()))
}

const SEGMENT_KINDS: [SegmentKind; 2] = [SegmentKind::Small, SegmentKind::Large];

/// The action whose name has that number in the table of texts.
#[inline]
pub(super) fn action(text: u32) -> Option<Action> {
    Action::ALL.get((text as usize).checked_sub(Keyword::ALL.len())?).copied()
}

/// The block state whose name has that number.
pub(super) fn block_state(text: u32) -> Option<BlockState> {
    if Keyword::of(text) == Some(Keyword::AwaitingFree) {
        // The name in PyTorch's documentation.
        return Some(BlockState::ActivePendingFree);
    }
    BlockState::ALL.get((text as usize).checked_sub(Keyword::ALL.len() + Action::ALL.len())?).copied()
}

/// The segment kind whose name has that number.
pub(super) fn segment_kind(text: u32) -> Option<SegmentKind> {
    let first = Keyword::ALL.len() + Action::ALL.len() + BlockState::ALL.len();
    SEGMENT_KINDS.get((text as usize).checked_sub(first)?).copied()
}

/// The kind of a dict under `key`.
pub(crate) fn dict_in(dict: DictKind, key: Option<Keyword>) -> DictKind {
    match (dict, key) {
        (DictKind::Root, Some(Keyword::AllocatorSettings)) => DictKind::Settings,
        (DictKind::Settings, Some(Keyword::RoundupPower2Divisions)) => DictKind::Divisions,
        _ => DictKind::Skipped,
    }
}

/// The kind of a list under `key`.
pub(crate) fn list_in(dict: DictKind, key: Option<Keyword>) -> ListKind {
    match (dict, key) {
        (DictKind::Root, Some(Keyword::Segments | Keyword::HostSegments)) => ListKind::Segments,
        (DictKind::Root, Some(Keyword::DeviceTraces)) => ListKind::Traces,
        (DictKind::Root, Some(Keyword::HostTraces)) => ListKind::Trace,
        (DictKind::Root, Some(Keyword::ExternalAnnotations)) => ListKind::Annotations,
        (DictKind::Root, Some(Keyword::WarpoolAccount)) => ListKind::Account,
        (DictKind::Segment, Some(Keyword::Blocks)) => ListKind::Blocks,
        (DictKind::Block, Some(Keyword::History)) => ListKind::BlockHistory,
        (DictKind::Segment, Some(Keyword::SegmentPoolId)) => ListKind::Pool,
        (DictKind::Entry, Some(Keyword::PoolId)) => ListKind::Pool,
        // In any dict: stacks are shared, so an entry may refer to one that was first written in a skipped dict.
        (_, Some(Keyword::Frames | Keyword::ForwardFrames)) => ListKind::Frames,
        _ => ListKind::Skipped,
    }
}

/// Whether a text under `key` is read.
pub(crate) fn reads_text(dict: DictKind, key: Option<Keyword>, keeps_stacks: bool) -> bool {
    match (dict, key) {
        (DictKind::Entry, Some(Keyword::CompileContext | Keyword::UserMetadata | Keyword::Action))
        | (DictKind::Settings, Some(Keyword::Conf))
        | (DictKind::Annotation, Some(Keyword::Name | Keyword::Stage))
        | (DictKind::Account, Some(Keyword::Owner | Keyword::What | Keyword::KnownBy | Keyword::Remark)) => true,
        // In any dict: stacks are shared, and so are their texts.
        (_, Some(Keyword::Name | Keyword::Filename)) => keeps_stacks,
        _ => false,
    }
}

/// The kind of a dict that is an element of `list`.
pub(crate) fn dict_of(list: ListKind) -> DictKind {
    match list {
        ListKind::Segments => DictKind::Segment,
        ListKind::Blocks => DictKind::Block,
        ListKind::BlockHistory => DictKind::BlockHistory,
        ListKind::Trace => DictKind::Entry,
        ListKind::Frames => DictKind::Frame,
        ListKind::Annotations => DictKind::Annotation,
        ListKind::Account => DictKind::Account,
        ListKind::Traces | ListKind::Pool | ListKind::Skipped => DictKind::Skipped,
    }
}

/// The kind of a list that is an element of `list`.
pub(crate) fn list_of(list: ListKind) -> ListKind {
    match list {
        // A trace may be a list of lists: the host's would be, with one list per device.
        ListKind::Traces | ListKind::Trace => ListKind::Trace,
        _ => ListKind::Skipped,
    }
}
