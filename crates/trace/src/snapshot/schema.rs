//! The form of a snapshot: its words, and which dict or list is found under which key.

use warpool::memory::{Action, BlockState, SegmentKind};

use crate::pickle::{DictKind, ListKind};

macro_rules! words {
    ($($word:ident $text:literal)*) => {
        /// A text that means something in a snapshot. Its number among the texts is its place here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Word { $($word,)* }

        impl Word {
            const ALL: &[Word] = &[$(Word::$word,)*];

            pub(crate) const fn text(self) -> &'static str {
                match self { $(Word::$word => $text,)* }
            }
        }
    };
}

words! {
    Segments "segments"
    DeviceTraces "device_traces"
    AllocatorSettings "allocator_settings"
    ExternalAnnotations "external_annotations"
    HostSegments "host_segments"
    HostTraces "host_traces"

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

impl Word {
    /// The word that is the text of that number.
    #[inline]
    pub(crate) fn of(text: u32) -> Option<Self> {
        Self::ALL.get(text as usize).copied()
    }
}

/// The texts that every reading knows before it starts, in the order of their numbers: words, then the names of
/// actions, block states and segment kinds.
pub(crate) fn known_texts() -> impl Iterator<Item = &'static str> {
    (Word::ALL.iter().map(|word| word.text()))
        .chain(Action::ALL.iter().map(|action| action.name()))
        .chain(BlockState::ALL.iter().map(|state| state.name()))
        .chain(SEGMENT_KINDS.iter().map(|kind| kind.name()))
}

const SEGMENT_KINDS: [SegmentKind; 2] = [SegmentKind::Small, SegmentKind::Large];

/// The action whose name is the text of that number.
#[inline]
pub(crate) fn action(text: u32) -> Option<Action> {
    Action::ALL.get((text as usize).checked_sub(Word::ALL.len())?).copied()
}

/// The block state whose name is the text of that number.
pub(crate) fn block_state(text: u32) -> Option<BlockState> {
    if Word::of(text) == Some(Word::AwaitingFree) {
        // What PyTorch's own documentation calls it.
        return Some(BlockState::ActivePendingFree);
    }
    BlockState::ALL.get((text as usize).checked_sub(Word::ALL.len() + Action::ALL.len())?).copied()
}

/// The segment kind whose name is the text of that number.
pub(crate) fn segment_kind(text: u32) -> Option<SegmentKind> {
    let first = Word::ALL.len() + Action::ALL.len() + BlockState::ALL.len();
    SEGMENT_KINDS.get((text as usize).checked_sub(first)?).copied()
}

/// What a dict is that is the value of `key`.
pub(crate) fn dict_in(dict: DictKind, key: Option<Word>) -> DictKind {
    match (dict, key) {
        (DictKind::Root, Some(Word::AllocatorSettings)) => DictKind::Settings,
        (DictKind::Settings, Some(Word::RoundupPower2Divisions)) => DictKind::Divisions,
        _ => DictKind::Skipped,
    }
}

/// What a list is that is the value of `key`.
pub(crate) fn list_in(dict: DictKind, key: Option<Word>) -> ListKind {
    match (dict, key) {
        (DictKind::Root, Some(Word::Segments | Word::HostSegments)) => ListKind::Segments,
        (DictKind::Root, Some(Word::DeviceTraces)) => ListKind::Traces,
        (DictKind::Root, Some(Word::HostTraces)) => ListKind::Trace,
        (DictKind::Root, Some(Word::ExternalAnnotations)) => ListKind::Annotations,
        (DictKind::Segment, Some(Word::Blocks)) => ListKind::Blocks,
        (DictKind::Block, Some(Word::History)) => ListKind::History,
        // Wherever they are: stacks are shared, so what is skipped here may be referred to from an entry.
        (_, Some(Word::Frames | Word::ForwardFrames)) => ListKind::Frames,
        _ => ListKind::Skipped,
    }
}

/// What a dict is that is an element.
pub(crate) fn dict_of(list: ListKind) -> DictKind {
    match list {
        ListKind::Segments => DictKind::Segment,
        ListKind::Blocks => DictKind::Block,
        ListKind::History => DictKind::Past,
        ListKind::Trace => DictKind::Entry,
        ListKind::Frames => DictKind::Frame,
        ListKind::Annotations => DictKind::Annotation,
        ListKind::Traces | ListKind::Skipped => DictKind::Skipped,
    }
}

/// What a list is that is an element.
pub(crate) fn list_of(list: ListKind) -> ListKind {
    match list {
        // A trace may come in parts, as that of the host would with one list per device.
        ListKind::Traces | ListKind::Trace => ListKind::Trace,
        _ => ListKind::Skipped,
    }
}
