//! The campaigns: kinds of programs.

use crate::context::Context;
use crate::device::{self, Mix};
use crate::{
    elastic, host, lifetime, placement, recordings, registered, replays, share, sleep, streams, threads, typed,
};

/// A kind of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Campaign {
    /// Device memory: the caching allocator, the driver's pool, an external allocator, decorators; pools, limits,
    /// checkpoints, several devices and streams, and some captures.
    Device,
    /// Graphs: captures that succeed, fail and panic, shared pools, replays on several streams, resets.
    Captures,
    /// Pinned host memory, by itself, in copies and in graphs.
    Host,
    /// Several threads on one allocator of device memory and one of pinned memory.
    Threads,
    /// Few machines with many short-lived pools, graphs, streams and events: nothing may accumulate.
    Lifetime,
    /// Recordings, undamaged and damaged, through the reader and the replay.
    Recordings,
    // The number of a campaign is a part of its seeds: new ones come last.
    /// Streams that are created and destroyed, also foreign ones, with blocks that many of them use.
    Streams,
    /// Typed memory on several streams and in graphs, with its contents.
    Typed,
    /// Tags that sleep and wake, with large segments of odd sizes.
    Sleep,
    /// The caching allocator's addresses and driver calls, compared with a naive model of PyTorch's allocator.
    Placement,
    /// The paged allocator on a device of few pages, which heaps take from each other.
    Pages,
    /// Work on several streams and threads, captured and replayed, compared with doing it one after the other.
    Replays,
    /// Elastic memory beside ordinary requests, with graphs over it, on a device of few pages.
    Elastic,
    /// Memory of stable and other pools that is written through registrations.
    Registered,
    /// Several allocators that share one card, start, end and are killed, at every step of each other's calls.
    Share,
}

impl Campaign {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::Device,
        Self::Placement,
        Self::Pages,
        Self::Elastic,
        Self::Registered,
        Self::Share,
        Self::Captures,
        Self::Replays,
        Self::Streams,
        Self::Typed,
        Self::Sleep,
        Self::Host,
        Self::Threads,
        Self::Lifetime,
        Self::Recordings,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Captures => "captures",
            Self::Streams => "streams",
            Self::Typed => "typed",
            Self::Sleep => "sleep",
            Self::Placement => "placement",
            Self::Pages => "pages",
            Self::Elastic => "elastic",
            Self::Registered => "registered",
            Self::Share => "share",
            Self::Replays => "replays",
            Self::Host => "host",
            Self::Threads => "threads",
            Self::Lifetime => "lifetime",
            Self::Recordings => "recordings",
        }
    }

    /// The campaign of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|campaign| campaign.name() == name)
    }

    /// Whether a program does the same in every run. Those with threads do not.
    #[must_use]
    pub const fn is_deterministic(self) -> bool {
        !matches!(self, Self::Threads)
    }

    /// Runs one program. A violation is a panic.
    pub(crate) fn run(self, context: &mut Context) {
        match self {
            Self::Device => device::run(context, Mix::Memory),
            Self::Captures => device::run(context, Mix::Graphs),
            Self::Streams => streams::run(context),
            Self::Typed => typed::run(context),
            Self::Sleep => sleep::run(context),
            Self::Placement => placement::run(context),
            Self::Pages => device::run(context, Mix::Pages),
            Self::Elastic => elastic::run(context),
            Self::Registered => registered::run(context),
            Self::Share => share::run(context),
            Self::Replays => replays::run(context),
            Self::Host => host::run(context),
            Self::Threads => threads::run(context),
            Self::Lifetime => lifetime::run(context),
            Self::Recordings => recordings::run(context),
        }
    }
}
