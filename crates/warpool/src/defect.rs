//! Planted defects: deliberate mistakes, each of which breaks one rule of the design. They show that tests and `soak`
//! detect the mistake; `cargo run -p xtask -- defects` runs both with each of them.
//!
//! For test builds only. The cargo feature `planted-defects` compiles them in, and the environment variable
//! `WARPOOL_DEFECT` switches one on by its number. Without the feature [`Defect::is_on`] is the constant `false`, and
//! none of this is compiled into the program. Unit tests can also switch one on in their thread, with `Defect::with`.

#[cfg(test)]
use std::cell::Cell;
#[cfg(feature = "planted-defects")]
use std::sync::OnceLock;

/// Declares the enum: the number, the name, and what the code does wrong.
macro_rules! defects {
    ($($number:literal $name:ident: $rule:literal;)*) => {
        /// A planted defect. The text describes what the code does wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Defect {
            $(#[doc = $rule] $name = $number,)*
        }

        #[cfg(feature = "planted-defects")]
        impl Defect {
            /// All of them, by number.
            const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

defects! {
    1 NoEventBetweenHeaps: "a stream that takes pages of another stream's heap does not wait for that stream";
    2 ForgetsBystanders: "streams that use memory although nobody said so are not waited for";
    3 UnmapsTooEarly: "an old mapping is undone while its stream may still use it";
    4 SleepDoesNotWait: "memory falls asleep while work in streams may still use it";
    5 SleepForgetsBlocks: "the last allocated block of a segment is not copied when it falls asleep";
    6 WakeDoesNotZero: "memory whose contents were discarded is not zeroed when it wakes";
    7 FailedWakeKeepsMemory: "a failed wake keeps the memory that it created";
    8 FreeForgetsUses: "a block that other streams used is free at once, without waiting for their events";
    9 FenceForgetsThirdStream: "of the streams that used a block only two are waited for";
    10 FenceSharesOlderEvent: "a freed block waits for an older event of its stream, not for one after its last use";
    11 PollForgetsToAsk: "a fence counts as passed although its event has not completed";
    12 SplitLosesRest: "the rest of a new segment that is split is in no free list";
    13 SplitOverlaps: "a block that is split off reaches 512 bytes into the rest";
    14 MergeForgetsNeighbour: "a freed block is not merged with its next neighbour if both neighbours are free";
    15 SearchesOtherStreams: "a request takes a free block of another stream";
    16 TrimForgetsReplays: "memory of a released pool is unmapped while replays of a dropped graph use it";
    17 LimitForgetsTheRequest: "a request may exceed the memory limit by its own segment";
    18 SplitCountsTwice: "a block that is split off counts twice in the statistics";
    19 PeakOfKindsStays: "a reset of the peaks leaves those of small and large pools";
    20 PoolStatsKeepReleased: "what a private pool releases still counts as reserved by it";
    21 GenerationsIgnored: "a stale allocation frees the block that is at its address now";
    22 RecentKeepsGeneration: "a block that is freed and allocated again at once keeps its generation";
    23 CapturedFreesUnordered: "a capture reuses a block before the graph orders its uses";
    24 RestoreForgetsUses: "a restore frees memory that other streams use without waiting for them";
    25 LendsMemoryOfGraphs: "a pool that graphs captured lends its memory to the default pool";
    26 HoldsIgnored: "a raw call frees a block that a graph owns";
    27 HostReusesBeforeCopy: "a pinned block is reused while a copy still reads it";
    28 HostFreesToWrongShard: "pinned memory is merged into another shard than its own";
    29 GraphRemembersOneStream: "memory of a dropped graph waits for replays on one of its streams";
    30 GraphForgetsHostPools: "pinned memory of a dropped graph is reused while a replay uses it";
    31 ReplayKeepsOffset: "a replay does not advance the generator";
    32 TypedForgetsWriter: "a read of typed memory does not wait for a write in another stream";
    33 TypedForgetsReaders: "a read of typed memory replaces a read in another stream, which a later write ignores";
    34 TypedMergeForgetsSpan: "merged uses of typed memory keep only the bytes of the last";
    35 ReplayKeepsSoleStream: "replays are not ordered with a second stream that begins to use their memory";
    36 HostForgetsReaders: "the host writes pinned typed memory while a device reads it";
    37 TypedDropForgetsStreams: "dropped typed memory is reused while another stream uses it";
    38 ViewStartsEarly: "a view of a part starts one element early";
    39 CaptureForgetsOrder: "streams of one capture are not ordered by the typed memory that they use";
    40 SleepForgetsTail: "of a copy above 64 MiB the tail is not made when memory sleeps or wakes";
    41 PagedFreeForgetsUses: "pages: a block that other streams used is free at once";
    42 PagedGenerationsIgnored: "pages: a stale allocation frees the block that is at its address now";
    43 ReleasedPagesTooEarly: "pages of a released pool serve others while work still uses them";
    44 LockWithoutExchange: "a thread that has waited for a spin lock takes it by a load and a store";
    45 UnknownWorkIsDone: "pages: unknown last work of a stream that may be destroyed counts as done";
    46 ReusesBusyHeaps: "pages: a heap is retired, or another stream gets it, while the last work in it still runs";
    47 GateForgetsTypedCalls: "a capture begins or ends while a typed call puts work into a stream";
    48 PinnedCapForgetsRequest: "a request may exceed the cap on pinned memory by its own segment";
    49 WorkspaceForgetsStream: "in a capture, products in two streams share a workspace";
    50 WhileRunsOnce: "a body that should run as long as a flag is set runs once";
    51 ShortageDoesNotWait: "pages: a request fails although pending frees would make room for it";
    52 PostponedFenceNamesStream: "a fence that was left to a later call is recorded in a stream that may be destroyed";
    53 ShortageCountsCallsFirst: "pages: the second attempt before out-of-memory counts driver calls before slots";
    54 ShortageKeepsPageSize: "pages: the second attempt before out-of-memory creates pages of more than 2 MiB";
    55 ShortageKeepsOldMappings: "pages: the second attempt before out-of-memory does not wait for old mappings";
    56 ShortageLeavesPools: "pages: the second attempt before out-of-memory takes no pages of pools marked for it";
    57 GateForgetsAllocators: "a capture begins or ends while an allocator enqueues an event or a wait";
    58 ImpossibleWindow: "pages: a window is chosen in which work may still use another page";
    59 ElasticIgnoresStreams: "elastic memory that changes in another stream than its own is ordered with neither";
    60 FailedCommitKeepsSlots: "a commit of elastic memory that fails keeps the slots that it got";
    61 CommitIgnoresStream: "elastic memory is committed in another stream than its own, which does not wait for it";
    62 DecommitIgnoresStream: "elastic memory is decommitted in another stream, whose work may still use it";
    63 SharedPageLeavesEarly: "a page of elastic memory leaves with the first of the blocks that share it";
    64 IdlePagesLeaveEarly: "idle pages return to the driver while work that used them still runs";
    65 ClaimsIgnored: "sharing: a claim is granted although another process claims the same memory";
    66 GuaranteesIgnored: "sharing: a process is granted what another one is guaranteed";
    67 DeadKeepGrants: "sharing: what a process was granted stays its own when it has ended";
    68 GivenStaysGranted: "sharing: what a process has given stays granted to it";
    69 UnmapsUnannounced: "range observers are not told before memory is unmapped";
    70 StableMemoryMoves: "a stable pool has the memory of any pool";
}

#[cfg(test)]
thread_local! {
    static IN_THREAD: Cell<Option<Defect>> = const { Cell::new(None) };
}

/// The number in `WARPOOL_DEFECT`, read once; 0 is none.
#[cfg(feature = "planted-defects")]
static IN_PROCESS: OnceLock<u32> = OnceLock::new();

impl Defect {
    /// Whether it is switched on: for this process, or by a unit test in this thread.
    #[cfg(any(test, feature = "planted-defects"))]
    pub(crate) fn is_on(self) -> bool {
        #[cfg(test)]
        if IN_THREAD.get() == Some(self) {
            return true;
        }
        #[cfg(feature = "planted-defects")]
        return self as u32 == number_in_process();
        #[cfg(not(feature = "planted-defects"))]
        false
    }

    /// Always `false`: this is not a test build.
    #[cfg(not(any(test, feature = "planted-defects")))]
    #[inline(always)]
    pub(crate) const fn is_on(self) -> bool {
        false
    }

    /// Runs `body` with it, in this thread.
    #[cfg(test)]
    pub(crate) fn with<R>(self, body: impl FnOnce() -> R) -> R {
        // Also if it panics.
        let _reset = crate::unwind::OnUnwind::new(|| IN_THREAD.set(None));
        IN_THREAD.set(Some(self));
        body()
    }
}

#[cfg(feature = "planted-defects")]
fn number_in_process() -> u32 {
    *IN_PROCESS.get_or_init(|| {
        let number = std::env::var("WARPOOL_DEFECT").unwrap_or_default();
        let known = |number: &u32| *number == 0 || Defect::ALL.iter().any(|&defect| defect as u32 == *number);
        match number.parse() {
            _ if number.is_empty() => 0,
            Ok(number) if known(&number) => number,
            _ => panic!("WARPOOL_DEFECT must be 0 or the number of a planted defect, not {number:?}"),
        }
    })
}
