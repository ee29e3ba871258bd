//! The settings of the memory allocators, and the strings that set them.
//!
//! The grammar is that of PyTorch's `PYTORCH_CUDA_ALLOC_CONF`, read strictly: an invalid string changes nothing. The
//! caller passes the string: nothing is read from the environment here, and no driver is called.
//!
//! ```
//! use warpool::memory::Settings;
//! use warpool::memory::settings::{Backend, Origin, Problem, SettingValue, Warning, lint};
//! use warpool::memory::settings::{RecordMode, RecordSettings, RecordSignal};
//!
//! # fn main() -> warpool::Result<()> {
//! let report = lint("backend:paged,garbage_collection_threshold:0.8");
//! let warning: &Warning = &report.warnings[0]; // the paged allocator does not use it
//! println!("{}: {}", warning.key, warning.text);
//! assert_eq!(report.effective.expect("it is valid").backend, Backend::Paged);
//! let given: Vec<&SettingValue> = report.values.iter().filter(|value| value.origin == Origin::Given).collect();
//! assert_eq!(given.len(), 2);
//!
//! let problem: &Problem = &lint("roundup_power2_divisions:3").problems[0];
//! println!("at {:?}: {}", problem.at, problem.text);
//!
//! let record: RecordSettings = Settings::parse("record:oom,record_signal:SIGUSR2")?.record;
//! assert_eq!((record.mode, record.signal), (RecordMode::Oom, Some(RecordSignal::Usr2)));
//! # Ok(())
//! # }
//! ```
//!
//! The keys and the grammar are listed at [`Settings`].

mod keys;
mod lint;
#[cfg(test)]
mod properties;
mod reader;
mod recorded;
mod syntax;
#[cfg(test)]
mod tests;
mod value;

use std::collections::BTreeMap;

pub use crate::error::{Problem, SettingsError, Warning};
pub use lint::{Lint, Origin, SettingValue, lint};

use reader::Mode;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The settings of the allocators.
///
/// ```
/// use warpool::memory::Settings;
///
/// let settings = Settings::parse("max_split_size_mb:200, roundup_power2_divisions:[64:2,256:4,>:8]").unwrap();
/// assert_eq!(settings.max_split_bytes, Some(200 << 20));
/// assert_eq!(settings.divisions_for(300 << 20), 4);
///
/// let error = Settings::parse("max_splt_size_mb:200").unwrap_err();
/// assert!(error.to_string().contains("did you mean `max_split_size_mb`?"));
/// ```
///
/// # The string
/// Entries `key:value`, separated by commas. White space is ignored, even inside a word. A value is a word or a list
/// `[name:value,name:value]`. Booleans are `True` and `False`. A comma after the last entry is allowed.
///
/// # The keys
/// A *reset* key is set to its default by every further string that does not name it; the others keep their values.
///
/// - `backend` (native, expandable, paged or cudaMallocAsync): the allocator: the caching allocator, the same with
///   `expandable_segments:True`, the paged allocator, or the driver's pool.
/// - `large_segment_size_mb` (an integer above 10): the size of segments for requests above 1 MiB and below 10 MiB.
/// - `max_split_size_mb` (an integer, at least large_segment_size_mb; reset): blocks from this size on are not split.
/// - `max_non_split_rounding_mb` (an integer, at least large_segment_size_mb; reset): how much larger than the request
///   a block may be that is not split.
/// - `garbage_collection_threshold` (a number above 0.0 and below 1.0; reset): the fraction of the memory limit above
///   which old cached segments are released.
/// - `roundup_power2_divisions` (a power of two, or a list [MIB:DIVISIONS,...,>:DIVISIONS]; reset): round requests up
///   to one of so many steps between two powers of two.
/// - `expandable_segments` (True or False): segments grow by mapping memory, instead of being allocated one by one.
/// - `expandable_segments_reserve` (a fraction of the device such as 0.5, or GiB such as 40G): how much address range
///   an expandable segment reserves.
/// - `expandable_segments_reserve_by_class` (a list [CLASS:RESERVE,...]): the same, for streams of a class.
/// - `release_lock_on_cudamalloc` (True or False): release the lock while the driver allocates; Warpool always does.
/// - `graph_capture_record_stream_reuse` (True or False): inside a capture, reuse blocks that the graph's order allows.
/// - `per_process_memory_fraction` (a number from 0.0 to 1.0): the fraction of each device's memory that may be
///   reserved.
/// - `throw_on_cudamalloc_oom` (True or False): requests above the limit fail at once, without a retry.
/// - `pinned_use_cuda_host_register` (True or False): pin host memory by registering it, instead of having the driver
///   allocate it.
/// - `pinned_num_register_threads` (a power of two up to 128): how many threads touch pages before they are registered.
/// - `pinned_use_background_threads` (True or False): a background thread processes pending frees of pinned memory.
/// - `pinned_reserve_segment_size_mb` (an integer above 0): pinned memory that is reserved at the first use.
/// - `pinned_max_round_threshold_mb` (an integer): pinned requests above this size are not rounded to a size class.
/// - `pinned_max_cached_size_mb` (an integer): pinned blocks above this size are not kept.
/// - `pinned_free_catch_all` (True or False): errors while pinned memory is freed are logged and ignored.
/// - `pinned_cap_mb` (an integer, at least 2): how much host memory may be pinned in all; Warpool's own key.
/// - `pinned_device_cap_mb` (an integer, at least 2): how much host memory may be pinned for each device; Warpool's own
///   key.
/// - `free_block_order` (registration or address): which of two free blocks of one size is used first; Warpool's own
///   key.
/// - `memory_cap_mb` (an integer, at least 2): how much of each device may be reserved; Warpool's own key.
/// - `idle_decay_ms` (an integer above 0): free pages that were not needed for so long return to the driver, a part at
///   a time; Warpool's own key.
/// - `share` (True or False): processes of one user on one GPU divide its memory; Warpool's own key.
/// - `share_guaranteed` (a size such as 20GiB or 512MiB): what this process always gets of each GPU, with share:True;
///   Warpool's own key.
/// - `share_limit` (a size such as 20GiB or 512MiB): the most that this process takes of each GPU, with share:True;
///   Warpool's own key.
/// - `share_priority` (an integer): processes with a higher one get free pages of those with a lower one, with
///   share:True; Warpool's own key.
/// - `share_reclaim_ms` (an integer above 0): within which time an idle process gives free pages to others, with
///   share:True; Warpool's own key.
/// - `record` (off or oom): keep the last events with call stacks, and write a recording when memory runs out;
///   Warpool's own key.
/// - `record_events` (an integer from 1000 to 100000000): how many events are kept for each device; Warpool's own key.
/// - `record_above` (a number above 0.0 and below 1.0): write a recording when more than this share of a device is in
///   use; Warpool's own key.
/// - `record_at_exit` (True or False): write a recording when the program ends; Warpool's own key.
/// - `record_signal` (SIGUSR1 or SIGUSR2): write a recording when the process gets this signal; Warpool's own key.
/// - `record_files` (an integer from 1 to 10000): how many recordings of a rank are kept; Warpool's own key.
/// - `record_file_mb` (an integer above 0): how large a recording may be; it has the newest events that fit; Warpool's
///   own key.
/// - `record_interval_s` (an integer): for how many seconds after a recording none is written by itself; Warpool's own
///   key.
///
/// `release_lock_on_hipmalloc` and `pinned_use_hip_host_register` are accepted as aliases.
///
/// # Where it differs from PyTorch
/// - Wrong delimiters are errors, and so is a number followed by something (`512M`). PyTorch silently skips both.
/// - An invalid value of `expandable_segments_reserve` is an error; PyTorch logs it and continues.
/// - The list of `roundup_power2_divisions` must ascend, with `>` last.
/// - A failed update changes nothing; PyTorch applies half of it.
/// - Settings without effect are logged as warnings and listed by [`lint`](fn@lint).
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The last string.
    pub text: String,
    /// The allocator.
    pub backend: Backend,
    /// The size of segments for requests above 1 MiB and below 10 MiB.
    pub large_segment_bytes: u64,
    /// Blocks from this size on are not split; `None`: all are.
    pub max_split_bytes: Option<u64>,
    /// How much larger than the request a block may be that is not split.
    pub max_non_split_rounding_bytes: u64,
    /// The fraction of the memory limit above which old cached segments are released; 0.0: never.
    pub garbage_collection_threshold: f64,
    /// Steps between two powers of two, from 1 MiB to 32 GiB; 0 and 1: no rounding. See
    /// [`divisions_for`](Self::divisions_for).
    pub roundup_power2_divisions: [u64; 16],
    /// Segments grow by mapping memory.
    pub expandable_segments: bool,
    /// How much address range an expandable segment reserves; `None`: a little more than the device has.
    pub expandable_segments_reserve: Option<Reserve>,
    /// The same, for streams of a class.
    pub expandable_segments_reserve_by_class: BTreeMap<String, Reserve>,
    /// Release the lock while the driver allocates. Warpool always does; the value is kept for snapshots.
    pub release_lock_on_cudamalloc: bool,
    /// Inside a capture, reuse blocks that the graph's order allows.
    pub graph_capture_record_stream_reuse: bool,
    /// The fraction of each device's memory that may be reserved; 1.0: no limit.
    pub per_process_memory_fraction: f64,
    /// Requests above the limit fail at once, without a retry.
    pub throw_on_cudamalloc_oom: bool,
    /// The settings of pinned host memory.
    pub pinned: PinnedSettings,
    /// Which of two free blocks of one size is used first.
    pub free_block_order: FreeBlockOrder,
    /// How many bytes of each device may be reserved, in addition to the limit by the fraction.
    pub memory_cap_bytes: Option<u64>,
    /// After how many milliseconds free pages that were not needed return to the driver, a part at a time; `None`:
    /// never. See [`DeviceAllocator::release_idle`](super::DeviceAllocator::release_idle) for who does it.
    pub idle_decay_ms: Option<u64>,
    /// How the memory of a GPU is divided between processes.
    pub share: ShareSettings,
    /// When recordings are written. The allocators themselves write none: `warpool-torch` does.
    pub record: RecordSettings,
}

/// How the memory of a GPU is divided between processes of one user, for each GPU. See
/// [`DeviceAllocator::share`](super::DeviceAllocator::share).
///
/// ```
/// use warpool::memory::settings::ShareSettings;
/// use warpool::memory::Settings;
///
/// let settings = Settings::parse("backend:paged,share:True,share_guaranteed:20GiB,share_limit:60GiB").unwrap();
/// let share: &ShareSettings = &settings.share;
/// assert_eq!((share.guaranteed_bytes, share.limit_bytes, share.reclaim_ms), (20 << 30, Some(60 << 30), 50));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSettings {
    /// Whether it is.
    pub enabled: bool,
    /// What this process always gets.
    pub guaranteed_bytes: u64,
    /// The most that it takes; `None`: no limit.
    pub limit_bytes: Option<u64>,
    /// Processes with a higher one get free pages of those with a lower one.
    pub priority: u64,
    /// Within which time an idle process gives free pages to others, in milliseconds.
    pub reclaim_ms: u64,
}

/// When recordings are written, and how much they may take.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordSettings {
    /// Whether events are kept.
    pub mode: RecordMode,
    /// How many events are kept for each device.
    pub events_max: u64,
    /// The share of a device's memory above which a recording is written.
    pub above: Option<f64>,
    /// Whether a recording is written when the program ends.
    pub at_exit: bool,
    /// The signal that has a recording written.
    pub signal: Option<RecordSignal>,
    /// How many recordings of a rank are kept.
    pub files_max: u64,
    /// How large a recording may be.
    pub file_bytes_max: u64,
    /// For how many seconds after a recording none is written by itself.
    pub interval_s: u64,
}

/// Whether events are kept for recordings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordMode {
    /// They are not.
    #[default]
    Off,
    /// They are, and a recording is written when memory runs out.
    Oom,
}

impl RecordMode {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Off, Self::Oom];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Oom => "oom",
        }
    }
}

/// A signal that has a recording written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordSignal {
    /// `SIGUSR1`.
    Usr1,
    /// `SIGUSR2`.
    Usr2,
}

impl RecordSignal {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Usr1, Self::Usr2];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Usr1 => "SIGUSR1",
            Self::Usr2 => "SIGUSR2",
        }
    }
}

impl Default for RecordSettings {
    fn default() -> Self {
        Self {
            mode: RecordMode::Off,
            events_max: 250_000,
            above: None,
            at_exit: false,
            signal: None,
            files_max: 4,
            file_bytes_max: 64 * MIB,
            interval_s: 60,
        }
    }
}

/// The settings of pinned host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedSettings {
    /// Pin host memory by registering it, instead of having the driver allocate it.
    pub use_cuda_host_register: bool,
    /// How many threads touch pages before they are registered.
    pub num_register_threads: u64,
    /// A background thread processes pending frees.
    pub use_background_threads: bool,
    /// Memory that is reserved at the first use; 0: none.
    pub reserve_segment_bytes: u64,
    /// Requests above this size are not rounded to a size class; `None`: all are.
    pub max_round_threshold_bytes: Option<u64>,
    /// Blocks above this size are not kept; `None`: all are.
    pub max_cached_bytes: Option<u64>,
    /// Errors while memory is freed are logged and ignored.
    pub free_catch_all: bool,
    /// How much may be pinned in total; `None`: no limit.
    pub cap_bytes: Option<u64>,
    /// How much may be pinned for each device; `None`: no limit.
    pub device_cap_bytes: Option<u64>,
}

/// The allocator of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// The caching allocator.
    #[default]
    Native,
    /// The paged allocator.
    Paged,
    /// The driver's pool.
    CudaMallocAsync,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Native, Self::Paged, Self::CudaMallocAsync];

    /// Its name in settings. (`expandable` is [`Native`](Self::Native) with expandable segments.)
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Paged => "paged",
            Self::CudaMallocAsync => "cudaMallocAsync",
        }
    }
}

/// Which of two free blocks of one size is used first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FreeBlockOrder {
    /// The one whose segment was allocated first, as in PyTorch after 2.11: the same program gets the same blocks,
    /// whatever the addresses of its segments.
    #[default]
    Registration,
    /// The one at the lower address, as in PyTorch up to 2.11.
    Address,
}

impl FreeBlockOrder {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Registration, Self::Address];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Registration => "registration",
            Self::Address => "address",
        }
    }
}

/// How much address range to reserve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// A fraction of the device's memory.
    Fraction(f64),
    /// This number of bytes.
    Bytes(u64),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            text: String::new(),
            backend: Backend::default(),
            large_segment_bytes: 20 * MIB,
            max_split_bytes: None,
            max_non_split_rounding_bytes: 20 * MIB,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; 16],
            expandable_segments: false,
            expandable_segments_reserve: None,
            expandable_segments_reserve_by_class: BTreeMap::new(),
            release_lock_on_cudamalloc: false,
            graph_capture_record_stream_reuse: false,
            per_process_memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            pinned: PinnedSettings::default(),
            free_block_order: FreeBlockOrder::default(),
            memory_cap_bytes: None,
            idle_decay_ms: None,
            share: ShareSettings::default(),
            record: RecordSettings::default(),
        }
    }
}

impl Default for ShareSettings {
    fn default() -> Self {
        Self { enabled: false, guaranteed_bytes: 0, limit_bytes: None, priority: 0, reclaim_ms: 50 }
    }
}

impl Default for PinnedSettings {
    fn default() -> Self {
        Self {
            use_cuda_host_register: false,
            num_register_threads: 1,
            use_background_threads: false,
            reserve_segment_bytes: 0,
            max_round_threshold_bytes: None,
            max_cached_bytes: None,
            free_catch_all: false,
            cap_bytes: None,
            device_cap_bytes: None,
        }
    }
}

impl PinnedSettings {
    /// The lower of the two caps: the most that can be pinned for one device.
    pub(crate) fn lowest_cap(&self) -> Option<u64> {
        [self.cap_bytes, self.device_cap_bytes].into_iter().flatten().min()
    }
}

impl Settings {
    /// The settings of a string, starting from the defaults. Settings without effect are logged as warnings.
    ///
    /// # Errors
    /// All problems of the string.
    pub fn parse(string: &str) -> Result<Self, SettingsError> {
        lint(string).into_result()
    }

    /// As [`parse`](Self::parse), with `backend` unless the string names another.
    ///
    /// # Errors
    /// All problems of the string.
    pub fn parse_for(backend: Backend, string: &str) -> Result<Self, SettingsError> {
        Lint::of(&Self { backend, ..Self::default() }, string, Mode::First).into_result()
    }

    /// The settings of a further string that is applied before these take effect: as [`updated`](Self::updated), but
    /// the string may name another backend.
    ///
    /// # Errors
    /// All problems of the string.
    pub fn overridden(&self, string: &str) -> Result<Self, SettingsError> {
        Lint::of(self, string, Mode::First).into_result()
    }

    /// The settings after a further string: reset keys are set to their defaults, the others keep their values, and
    /// then the string is applied. The backend can be named, but not changed. Settings without effect are logged as
    /// warnings.
    ///
    /// # Errors
    /// All problems of the string.
    pub fn updated(&self, string: &str) -> Result<Self, SettingsError> {
        self.lint_update(string).into_result()
    }

    /// The result of [`updated`](Self::updated) without applying it. Nothing is logged.
    #[must_use]
    pub fn lint_update(&self, string: &str) -> Lint {
        Lint::of(self, string, Mode::Update)
    }

    /// Into how many steps the range between two powers of two is divided for a request of that size.
    #[must_use]
    pub fn divisions_for(&self, bytes: u64) -> u64 {
        let last = self.roundup_power2_divisions.len() - 1;
        let power = bytes.checked_ilog2().unwrap_or(0) as usize;
        self.roundup_power2_divisions[power.saturating_sub(20).min(last)]
    }

    /// The string that gives these settings: the values that differ from the defaults, in the order of the keys.
    ///
    /// Parsed again it gives the same, except for [`text`](Self::text). Field values that no string can give are
    /// written as closely as the grammar allows: sizes in whole MiB.
    #[must_use]
    pub fn to_conf_string(&self) -> String {
        let default = self.defaults();
        let entries = keys::KEYS.iter().filter_map(|info| {
            let text = info.key.value(self)?;
            (Some(&text) != info.key.value(&default).as_ref()).then(|| format!("{}:{text}", info.name))
        });
        entries.collect::<Vec<_>>().join(",")
    }

    /// The defaults, including the one that depends on the size of large segments.
    fn defaults(&self) -> Self {
        Self { max_non_split_rounding_bytes: self.large_segment_bytes, ..Self::default() }
    }
}
