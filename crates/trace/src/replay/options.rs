//! The options of a replay.

use warpool::memory::Settings;

use crate::Stop;

/// How to replay. The default is as recorded.
#[derive(Clone, Default)]
pub struct ReplayOptions<'a> {
    /// Settings in place of the recorded ones.
    pub settings: Option<Settings>,
    /// Entries of a settings string, such as `expandable_segments:True`, that change single settings: of the recorded
    /// ones, or of [`settings`](Self::settings).
    pub changes: Option<String>,
    /// The allocator.
    pub allocator: AllocatorChoice,
    /// The memory of the device in bytes, at most 1 PiB, the whole card with its context; `None` is the recorded one,
    /// or enough for the recording if that is not known ([`DeviceReplay::card`](super::DeviceReplay::card)). With
    /// another device than the recorded one, a memory limit that was recorded no longer applies.
    pub capacity: Option<u64>,
    /// In how many address orders a what-if is replayed, where addresses can matter; `None` is [`ADDRESS_ORDERS`].
    pub address_orders: Option<u32>,
    /// How many times the program is run one after another, in further runs beside the answer, if more than once: see
    /// [`ReplayReport::rounds`](super::ReplayReport::rounds).
    pub rounds: u32,
    /// Leaves out the control: see [`ReplayReport::control`](super::ReplayReport::control).
    pub without_control: bool,
    /// How many threads replay them; `None` is one for each core.
    pub threads: Option<usize>,
    /// The most memory that a replay may take, in bytes, the recording included; `None` is
    /// [`default_memory_limit`](crate::default_memory_limit) for the recording's size in memory. Beyond it,
    /// [`ReplayError::MemoryLimit`](super::ReplayError::MemoryLimit).
    pub memory_limit: Option<u64>,
    /// Called now and then during a run. There are several runs if the first does not reproduce the recording.
    pub progress: Option<&'a dyn Fn(ReplayProgress)>,
    /// Ends it early, with [`ReplayError::Stopped`](super::ReplayError::Stopped).
    pub stop: Stop,
}

/// In how many address orders a what-if is replayed.
pub const ADDRESS_ORDERS: u32 = 16;

impl ReplayOptions<'_> {
    /// The what-if of these options.
    pub(super) fn what_if(&self) -> WhatIf {
        let Self { settings, changes, allocator, capacity, .. } = self;
        WhatIf { settings: settings.clone(), changes: changes.clone(), allocator: *allocator, capacity: *capacity }
    }
}

/// What differs from the recorded program; by default nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIf {
    /// Settings in place of the recorded ones.
    pub settings: Option<Settings>,
    /// Entries of a settings string that change single settings.
    pub changes: Option<String>,
    /// The allocator.
    pub allocator: AllocatorChoice,
    /// The memory of the device.
    pub capacity: Option<u64>,
}

/// The allocator of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllocatorChoice {
    /// [`CachingAllocator`](warpool::memory::CachingAllocator), which works as PyTorch's.
    #[default]
    Caching,
    /// [`DriverPoolAllocator`](warpool::memory::DriverPoolAllocator), over the driver's stream-ordered pool.
    DriverPool,
    /// [`PagedAllocator`](warpool::memory::PagedAllocator), over pages that are mapped where they are needed.
    Paged,
}

impl AllocatorChoice {
    /// All allocators.
    pub const ALL: [Self; 3] = [Self::Caching, Self::DriverPool, Self::Paged];

    /// Its name: `caching`, `driver-pool`, `paged`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Caching => "caching",
            Self::DriverPool => "driver-pool",
            Self::Paged => "paged",
        }
    }

    /// The allocator of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }
}

/// The progress of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayProgress {
    /// Events replayed in this run.
    pub done: u64,
    /// All events, of all rounds.
    pub total: u64,
}
