//! The keys of settings strings: the list that the reader, the linter, suggestions and the docs use. Values are read in
//! `value.rs` and written here.

use super::{Backend, GIB, MIB, Reserve, Settings};

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Backend,
    LargeSegmentSize,
    MaxSplitSize,
    MaxNonSplitRounding,
    GarbageCollectionThreshold,
    RoundupPower2Divisions,
    ExpandableSegments,
    ExpandableSegmentsReserve,
    ExpandableSegmentsReserveByClass,
    ReleaseLockOnCudamalloc,
    GraphCaptureRecordStreamReuse,
    PerProcessMemoryFraction,
    ThrowOnCudamallocOom,
    PinnedUseCudaHostRegister,
    PinnedNumRegisterThreads,
    PinnedUseBackgroundThreads,
    PinnedReserveSegmentSize,
    PinnedMaxRoundThreshold,
    PinnedMaxCachedSize,
    PinnedFreeCatchAll,
    PinnedCap,
    PinnedDeviceCap,
    FreeBlockOrder,
    MemoryCap,
    IdleDecay,
    Share,
    ShareGuaranteed,
    ShareLimit,
    SharePriority,
    ShareReclaim,
    Record,
    RecordEvents,
    RecordAbove,
    RecordAtExit,
    RecordSignal,
    RecordFiles,
    RecordFileSize,
    RecordInterval,
}

/// The properties of a key.
#[derive(Debug)]
pub(super) struct KeyInfo {
    pub key: Key,
    /// Its name in strings.
    pub name: &'static str,
    /// Another accepted name.
    pub alias: Option<&'static str>,
    /// The values that it takes.
    pub expects: &'static str,
    /// What it means.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test compares the docs with it"))]
    pub meaning: &'static str,
    /// What is shown if it has no value.
    pub unset: &'static str,
    /// Whether a further string that does not name it resets it to its default.
    pub resets: bool,
    /// The backends that it has an effect on.
    pub backends: &'static [Backend],
}

/// A key that is kept, affects all backends and always has a value; the functions below change that.
const fn key(key: Key, name: &'static str, expects: &'static str, meaning: &'static str) -> KeyInfo {
    KeyInfo { key, name, alias: None, expects, meaning, unset: "none", resets: false, backends: &Backend::ALL }
}

const fn native(info: KeyInfo) -> KeyInfo {
    KeyInfo { backends: &[Backend::Native], ..info }
}

const fn paged(info: KeyInfo) -> KeyInfo {
    KeyInfo { backends: &[Backend::Paged], ..info }
}

const fn resets(info: KeyInfo) -> KeyInfo {
    KeyInfo { resets: true, ..info }
}

const fn unset(info: KeyInfo, unset: &'static str) -> KeyInfo {
    KeyInfo { unset, ..info }
}

const fn alias(info: KeyInfo, alias: &'static str) -> KeyInfo {
    KeyInfo { alias: Some(alias), ..info }
}

const BOOLEAN: &str = "True or False";
const SIZE: &str = "a size such as 20GiB or 512MiB";

/// All keys, in the order of the enum.
pub(super) static KEYS: [KeyInfo; 38] = [
    key(
        Key::Backend,
        "backend",
        "native, expandable, paged or cudaMallocAsync",
        "the allocator: the caching allocator, the same with `expandable_segments:True`, the paged allocator, or the \
         driver's pool",
    ),
    native(key(
        Key::LargeSegmentSize,
        "large_segment_size_mb",
        "an integer above 10",
        "the size of segments for requests above 1 MiB and below 10 MiB",
    )),
    native(resets(unset(
        key(
            Key::MaxSplitSize,
            "max_split_size_mb",
            "an integer, at least large_segment_size_mb",
            "blocks from this size on are not split",
        ),
        "unlimited",
    ))),
    native(resets(key(
        Key::MaxNonSplitRounding,
        "max_non_split_rounding_mb",
        "an integer, at least large_segment_size_mb",
        "how much larger than the request a block may be that is not split",
    ))),
    native(resets(unset(
        key(
            Key::GarbageCollectionThreshold,
            "garbage_collection_threshold",
            "a number above 0.0 and below 1.0",
            "the fraction of the memory limit above which old cached segments are released",
        ),
        "off",
    ))),
    native(resets(unset(
        key(
            Key::RoundupPower2Divisions,
            "roundup_power2_divisions",
            "a power of two, or a list [MIB:DIVISIONS,...,>:DIVISIONS]",
            "round requests up to one of so many steps between two powers of two",
        ),
        "off",
    ))),
    native(key(
        Key::ExpandableSegments,
        "expandable_segments",
        BOOLEAN,
        "segments grow by mapping memory, instead of being allocated one by one",
    )),
    native(unset(
        key(
            Key::ExpandableSegmentsReserve,
            "expandable_segments_reserve",
            "a fraction of the device such as 0.5, or GiB such as 40G",
            "how much address range an expandable segment reserves",
        ),
        "9/8 of the device",
    )),
    native(key(
        Key::ExpandableSegmentsReserveByClass,
        "expandable_segments_reserve_by_class",
        "a list [CLASS:RESERVE,...]",
        "the same, for streams of a class",
    )),
    native(alias(
        key(
            Key::ReleaseLockOnCudamalloc,
            "release_lock_on_cudamalloc",
            BOOLEAN,
            "release the lock while the driver allocates; Warpool always does",
        ),
        "release_lock_on_hipmalloc",
    )),
    native(key(
        Key::GraphCaptureRecordStreamReuse,
        "graph_capture_record_stream_reuse",
        BOOLEAN,
        "inside a capture, reuse blocks that the graph's order allows",
    )),
    key(
        Key::PerProcessMemoryFraction,
        "per_process_memory_fraction",
        "a number from 0.0 to 1.0",
        "the fraction of each device's memory that may be reserved",
    ),
    native(key(
        Key::ThrowOnCudamallocOom,
        "throw_on_cudamalloc_oom",
        BOOLEAN,
        "requests above the limit fail at once, without a retry",
    )),
    alias(
        key(
            Key::PinnedUseCudaHostRegister,
            "pinned_use_cuda_host_register",
            BOOLEAN,
            "pin host memory by registering it, instead of having the driver allocate it",
        ),
        "pinned_use_hip_host_register",
    ),
    key(
        Key::PinnedNumRegisterThreads,
        "pinned_num_register_threads",
        "a power of two up to 128",
        "how many threads touch pages before they are registered",
    ),
    key(
        Key::PinnedUseBackgroundThreads,
        "pinned_use_background_threads",
        BOOLEAN,
        "a background thread processes pending frees of pinned memory",
    ),
    key(
        Key::PinnedReserveSegmentSize,
        "pinned_reserve_segment_size_mb",
        "an integer above 0",
        "pinned memory that is reserved at the first use",
    ),
    unset(
        key(
            Key::PinnedMaxRoundThreshold,
            "pinned_max_round_threshold_mb",
            "an integer",
            "pinned requests above this size are not rounded to a size class",
        ),
        "unlimited",
    ),
    unset(
        key(
            Key::PinnedMaxCachedSize,
            "pinned_max_cached_size_mb",
            "an integer",
            "pinned blocks above this size are not kept",
        ),
        "unlimited",
    ),
    key(
        Key::PinnedFreeCatchAll,
        "pinned_free_catch_all",
        BOOLEAN,
        "errors while pinned memory is freed are logged and ignored",
    ),
    unset(
        key(
            Key::PinnedCap,
            "pinned_cap_mb",
            "an integer, at least 2",
            "how much host memory may be pinned in all; Warpool's own key",
        ),
        "unlimited",
    ),
    unset(
        key(
            Key::PinnedDeviceCap,
            "pinned_device_cap_mb",
            "an integer, at least 2",
            "how much host memory may be pinned for each device; Warpool's own key",
        ),
        "unlimited",
    ),
    native(key(
        Key::FreeBlockOrder,
        "free_block_order",
        "registration or address",
        "which of two free blocks of one size is used first; Warpool's own key",
    )),
    key(
        Key::MemoryCap,
        "memory_cap_mb",
        "an integer, at least 2",
        "how much of each device may be reserved; Warpool's own key",
    ),
    paged(unset(
        key(
            Key::IdleDecay,
            "idle_decay_ms",
            "an integer above 0",
            "free pages that were not needed for so long return to the driver, a part at a time; Warpool's own key",
        ),
        "never",
    )),
    paged(key(Key::Share, "share", BOOLEAN, "processes of one user on one GPU divide its memory; Warpool's own key")),
    paged(key(
        Key::ShareGuaranteed,
        "share_guaranteed",
        SIZE,
        "what this process always gets of each GPU, with share:True; Warpool's own key",
    )),
    paged(unset(
        key(
            Key::ShareLimit,
            "share_limit",
            SIZE,
            "the most that this process takes of each GPU, with share:True; Warpool's own key",
        ),
        "unlimited",
    )),
    paged(key(
        Key::SharePriority,
        "share_priority",
        "an integer",
        "processes with a higher one get free pages of those with a lower one, with share:True; Warpool's own key",
    )),
    paged(key(
        Key::ShareReclaim,
        "share_reclaim_ms",
        "an integer above 0",
        "within which time an idle process gives free pages to others, with share:True; Warpool's own key",
    )),
    key(
        Key::Record,
        "record",
        "off or oom",
        "keep the last events with call stacks, and write a recording when memory runs out; Warpool's own key",
    ),
    key(
        Key::RecordEvents,
        "record_events",
        "an integer from 1000 to 100000000",
        "how many events are kept for each device; Warpool's own key",
    ),
    unset(
        key(
            Key::RecordAbove,
            "record_above",
            "a number above 0.0 and below 1.0",
            "write a recording when more than this share of a device is in use; Warpool's own key",
        ),
        "off",
    ),
    key(Key::RecordAtExit, "record_at_exit", BOOLEAN, "write a recording when the program ends; Warpool's own key"),
    unset(
        key(
            Key::RecordSignal,
            "record_signal",
            "SIGUSR1 or SIGUSR2",
            "write a recording when the process gets this signal; Warpool's own key",
        ),
        "none",
    ),
    key(
        Key::RecordFiles,
        "record_files",
        "an integer from 1 to 10000",
        "how many recordings of a rank are kept; Warpool's own key",
    ),
    key(
        Key::RecordFileSize,
        "record_file_mb",
        "an integer above 0",
        "how large a recording may be; it has the newest events that fit; Warpool's own key",
    ),
    key(
        Key::RecordInterval,
        "record_interval_s",
        "an integer",
        "for how many seconds after a recording none is written by itself; Warpool's own key",
    ),
];

impl Key {
    /// The key with that name or alias.
    pub(super) fn named(name: &str) -> Option<Self> {
        KEYS.iter().find(|info| info.name == name || info.alias == Some(name)).map(|info| info.key)
    }

    /// Its properties.
    pub(super) fn info(self) -> &'static KeyInfo {
        let info = &KEYS[self as usize];
        assert!(info.key == self, "the list is in the order of the enum");
        info
    }

    /// Its name in strings.
    pub(super) fn name(self) -> &'static str {
        self.info().name
    }

    /// Its value in the form of a string; `None` if it has none.
    pub(super) fn value(self, settings: &Settings) -> Option<String> {
        let (pinned, record) = (&settings.pinned, &settings.record);
        match self {
            Self::Backend => Some(settings.backend.name().into()),
            Self::LargeSegmentSize => Some(mib(settings.large_segment_bytes)),
            Self::MaxSplitSize => settings.max_split_bytes.map(mib),
            Self::MaxNonSplitRounding => Some(mib(settings.max_non_split_rounding_bytes)),
            Self::GarbageCollectionThreshold => {
                let threshold = settings.garbage_collection_threshold;
                (threshold != 0.0).then(|| number(threshold))
            }
            Self::RoundupPower2Divisions => divisions(&settings.roundup_power2_divisions),
            Self::ExpandableSegments => Some(boolean(settings.expandable_segments)),
            Self::ExpandableSegmentsReserve => settings.expandable_segments_reserve.map(reserve),
            Self::ExpandableSegmentsReserveByClass => {
                let classes = &settings.expandable_segments_reserve_by_class;
                let list: Vec<String> =
                    classes.iter().map(|(name, size)| format!("{name}:{}", reserve(*size))).collect();
                (!list.is_empty()).then(|| format!("[{}]", list.join(",")))
            }
            Self::ReleaseLockOnCudamalloc => Some(boolean(settings.release_lock_on_cudamalloc)),
            Self::GraphCaptureRecordStreamReuse => Some(boolean(settings.graph_capture_record_stream_reuse)),
            Self::PerProcessMemoryFraction => Some(number(settings.per_process_memory_fraction)),
            Self::ThrowOnCudamallocOom => Some(boolean(settings.throw_on_cudamalloc_oom)),
            Self::PinnedUseCudaHostRegister => Some(boolean(pinned.use_cuda_host_register)),
            Self::PinnedNumRegisterThreads => Some(pinned.num_register_threads.to_string()),
            Self::PinnedUseBackgroundThreads => Some(boolean(pinned.use_background_threads)),
            Self::PinnedReserveSegmentSize => {
                (pinned.reserve_segment_bytes != 0).then(|| mib(pinned.reserve_segment_bytes))
            }
            Self::PinnedMaxRoundThreshold => pinned.max_round_threshold_bytes.map(mib),
            Self::PinnedMaxCachedSize => pinned.max_cached_bytes.map(mib),
            Self::PinnedFreeCatchAll => Some(boolean(pinned.free_catch_all)),
            Self::PinnedCap => pinned.cap_bytes.map(mib),
            Self::PinnedDeviceCap => pinned.device_cap_bytes.map(mib),
            Self::FreeBlockOrder => Some(settings.free_block_order.name().into()),
            Self::MemoryCap => settings.memory_cap_bytes.map(mib),
            Self::IdleDecay => settings.idle_decay_ms.map(|millis| millis.to_string()),
            Self::Share => Some(boolean(settings.share.enabled)),
            Self::ShareGuaranteed => Some(size(settings.share.guaranteed_bytes)),
            Self::ShareLimit => settings.share.limit_bytes.map(size),
            Self::SharePriority => Some(settings.share.priority.to_string()),
            Self::ShareReclaim => Some(settings.share.reclaim_ms.to_string()),
            Self::Record => Some(record.mode.name().into()),
            Self::RecordEvents => Some(record.events_max.to_string()),
            Self::RecordAbove => record.above.map(number),
            Self::RecordAtExit => Some(boolean(record.at_exit)),
            Self::RecordSignal => record.signal.map(|signal| signal.name().into()),
            Self::RecordFiles => Some(record.files_max.to_string()),
            Self::RecordFileSize => Some(mib(record.file_bytes_max)),
            Self::RecordInterval => Some(record.interval_s.to_string()),
        }
    }
}

fn boolean(value: bool) -> String {
    if value { "True" } else { "False" }.into()
}

fn mib(bytes: u64) -> String {
    (bytes / MIB).to_string()
}

/// In the largest unit that gives a whole number.
fn size(bytes: u64) -> String {
    let exact = SIZE_UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit) || *unit == 1);
    let (name, unit) = exact.expect("a byte divides every size");
    format!("{}{name}", bytes / unit)
}

/// The units of sizes, the largest first.
pub(super) const SIZE_UNITS: [(&str, u64); 5] =
    [("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10), ("B", 1)];

/// A number with a decimal point, so that it reads as a fraction.
fn number(value: f64) -> String {
    format!("{value:?}")
}

fn reserve(size: Reserve) -> String {
    match size {
        Reserve::Fraction(fraction) => number(fraction),
        Reserve::Bytes(bytes) => format!("{}G", bytes as f64 / GIB as f64),
    }
}

/// The shortest form of the table: nothing, one number, or a list. The first entry of a list also covers all buckets
/// below its own, `>` all above the last; a bucket between that is not listed has 0.
fn divisions(table: &[u64; 16]) -> Option<String> {
    let head = table.iter().take_while(|steps| **steps == table[0]).count();
    if head == table.len() {
        return (table[0] != 0).then(|| table[0].to_string());
    }
    let last = table[table.len() - 1];
    let tail = table.len() - table.iter().rev().take_while(|steps| **steps == last).count();
    let listed = (head - 1..tail)
        .filter(|&bucket| bucket == head - 1 || table[bucket] != 0 || (bucket == tail - 1 && last != 0));
    let mut list: Vec<String> = listed.map(|bucket| format!("{}:{}", 1_u64 << bucket, table[bucket])).collect();
    if last != 0 {
        list.push(format!(">:{last}"));
    }
    Some(format!("[{}]", list.join(",")))
}

/// The key with the smallest edit distance, if that is small.
pub(super) fn suggestion(word: &str) -> Option<&'static str> {
    let names = KEYS.iter().flat_map(|info| [Some(info.name), info.alias]).flatten();
    nearest(word, names)
}

/// The candidate with the smallest edit distance, up to a third of its length. Case is ignored.
pub(super) fn nearest(word: &str, candidates: impl IntoIterator<Item = &'static str>) -> Option<&'static str> {
    // No misspelling is that long, and the cost is quadratic.
    if word.len() > 64 {
        return None;
    }
    let word = word.to_lowercase();
    let distances =
        candidates.into_iter().map(|candidate| (edit_distance(&word, &candidate.to_lowercase()), candidate));
    distances.filter(|(distance, candidate)| distance * 3 <= candidate.len()).min().map(|(_, candidate)| candidate)
}

/// The Levenshtein distance.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}
