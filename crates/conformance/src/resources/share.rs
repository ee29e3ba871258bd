//! Several allocators that divide one card by their pages, as processes do: what each may take, who gives, and that
//! nothing in use is ever touched. They are in this process; real processes are in the tests of `warpool`.
//!
//! One more member is guaranteed all but [`SHARED`] of what is free, so the others are short of memory on a card of any
//! size, and at most 512 MiB are used, and once what members leave for others.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use warpool::memory::elastic::{ElasticLayout, ElasticMemory};
use warpool::memory::settings::ShareSettings;
use warpool::memory::{
    Allocate, BackgroundReclaim, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, OomCause, PagedAllocator,
    Settings,
};
use warpool::share::{LedgerPages, PageDirectory, PageOptions, ProcessPage, SharedPages};
use warpool::{Error, StreamLease};
use warpool_driver::DevicePtr;

use super::helpers::SharedAllocator;
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    what_one_has_allocated_no_other_gets,
    idle_memory_is_given_by_the_thread,
    idle_memory_is_given_by_requests,
    memory_in_use_by_streams_is_given_after_their_work,
    a_guarantee_stays_with_its_owner,
    a_guarantee_that_nobody_uses_is_kept,
    a_limit_is_never_exceeded,
    lower_priorities_give_first,
    higher_priorities_do_not_give,
    one_that_does_not_answer_is_waited_for_a_bounded_time,
    who_leaves_takes_nothing_with_it,
    who_is_at_its_peak_gets_what_the_others_left,
    members_at_the_same_time_never_have_more_than_there_is,
    elastic_memory_is_committed_from_idle_memory_of_others,
    idle_memory_decays_though_nobody_asks,
    what_cannot_be_understood_is_not_shared_with,
    a_folder_that_goes_ends_sharing,
];

const MIB: u64 = 1 << 20;
/// What all members of a check have together.
const SHARED: u64 = 512 * MIB;
/// How much of a block the checks write, at each end.
const END: u64 = MIB;

/// A folder of its own for each check.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("warpool-selftest-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Card<'a> {
    context: &'a TestContext,
    folder: Folder,
    directory: PageDirectory,
    /// What members leave for memory that no allocator has, but for what they are guaranteed.
    left: u64,
}

/// An allocator with a page, as one process.
struct Member<'a> {
    context: &'a TestContext,
    paged: Arc<PagedAllocator>,
    allocator: SharedAllocator,
    page: Arc<ProcessPage>,
    pages: Arc<dyn LedgerPages>,
    stream: StreamLease,
    thread: Option<BackgroundReclaim>,
}

/// Runs `body` with [`SHARED`] bytes for its members.
fn on_card(context: &TestContext, body: impl FnOnce(&Card<'_>) -> CheckResult) -> CheckResult {
    require(context.device().properties().virtual_memory, "the device has no virtual memory management")?;
    let has_pages = cfg!(any(target_os = "linux", target_os = "macos"));
    require(has_pages, "processes cannot share memory by files on this system")?;
    let free = context.driver.mem_info(context.device_id)?.bytes_free;
    let folder = Folder::new();
    let directory = PageDirectory::open(&folder.0)?;
    let mut card = Card { context, folder, directory, left: 0 };
    let most = card.member(plain())?.paged.largest_available(context.device_id)?;
    card.left = (free - most).next_multiple_of(2 * MIB);
    require(free > 2 * (SHARED + card.left), "too little of the device is free")?;
    let rest = card.member(share(|share| share.guaranteed_bytes = free - card.left - SHARED))?;
    let outcome = body(&card);
    // Work of a failed body must not use memory that is freed now. The body's failure is the one to report.
    let synchronized = context.device().synchronize();
    drop(rest);
    outcome?;
    Ok(synchronized?)
}

/// Terms of a member, with the defaults that `change` leaves.
fn share(change: impl FnOnce(&mut ShareSettings)) -> Settings {
    let mut share = ShareSettings { enabled: true, reclaim_ms: 50, ..ShareSettings::default() };
    change(&mut share);
    Settings { share, ..Settings::default() }
}

fn plain() -> Settings {
    share(|_| ())
}

/// Of one that others answer in time, however slow the machine is.
fn patient() -> Settings {
    share(|share| share.reclaim_ms = 200)
}

impl<'a> Card<'a> {
    /// An allocator that shares nothing yet.
    fn alone(&self, settings: Settings) -> CheckResult<Member<'a>> {
        let context = self.context;
        let paged = Arc::new(PagedAllocator::new(context.instance(), settings)?);
        // Pages of 2 MiB, so that it is known how many fit.
        paged.set_page_sizes(u64::MAX, u64::MAX);
        let page = Arc::new(self.directory.publish(context.instance(), &PageOptions::default())?);
        let pages: Arc<dyn LedgerPages> = Arc::new(SharedPages::new(self.directory.clone(), Arc::clone(&page)));
        let (allocator, stream) = (paged.clone(), context.device().lease_stream()?);
        Ok(Member { context, paged, allocator, page, pages, stream, thread: None })
    }

    /// One that gives memory only in calls of its own.
    fn member(&self, settings: Settings) -> CheckResult<Member<'a>> {
        let member = self.alone(settings)?;
        member.paged.share(&member.pages)?;
        Ok(member)
    }

    /// One with a thread, as processes have.
    fn active(&self, settings: Settings) -> CheckResult<Member<'a>> {
        let mut member = self.member(settings)?;
        member.thread = Some(BackgroundReclaim::start(&member.paged));
        Ok(member)
    }
}

impl Member<'_> {
    fn allocate(&self, mib: u64) -> CheckResult<DeviceBlock> {
        Ok(self.allocator.allocate(mib * MIB, self.stream.stream())?)
    }

    /// The request must fail, for this reason.
    #[track_caller]
    fn expect_refused(&self, what: &str, mib: u64, why: OomCause) -> CheckResult {
        match self.allocator.allocate(mib * MIB, self.stream.stream()) {
            Err(Error::OutOfMemory(report)) => expect_eq(&format!("why there is no memory, {what}"), report.cause, why),
            Err(error) => Err(CheckError::Failed(format!("{what}: {error}"))),
            Ok(block) => expect(false, &format!("no memory, {what}, but {} bytes were found", block.bytes())),
        }
    }

    /// Writes both ends of a block.
    fn write(&self, block: &DeviceBlock, first: u32) -> CheckResult {
        ends(block).into_iter().try_for_each(|ptr| self.context.write_sequence(ptr, END, first, self.stream.stream()))
    }

    #[track_caller]
    fn expect(&self, what: &str, block: &DeviceBlock, first: u32) -> CheckResult {
        let stream = self.stream.stream();
        ends(block).into_iter().try_for_each(|ptr| self.context.expect_sequence(what, ptr, END, first, stream))
    }

    /// What it has of the driver, in MiB.
    fn reserved(&self) -> CheckResult<u64> {
        Ok(self.paged.page_stats(self.context.device_id)?.reserved_bytes / MIB)
    }

    fn largest_available(&self) -> CheckResult<u64> {
        Ok(self.paged.largest_available(self.context.device_id)? / MIB)
    }

    /// Allocates and frees, so that so much is idle. The work in its stream is done.
    fn leave_idle(&self, mib: u64) -> CheckResult {
        let block = self.allocate(mib)?;
        self.write(&block, 1)?;
        block.free()?;
        self.stream.stream().synchronize()?;
        // Says so, as its thread would in a moment.
        self.paged.release_idle(self.context.device_id)?;
        Ok(())
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        drop(self.thread.take());
        // A failure is one of the device, which the check reports.
        let _ = self.paged.trim(self.context.device_id, MemPoolId::DEFAULT);
    }
}

fn ends(block: &DeviceBlock) -> [DevicePtr; 2] {
    [block.ptr(), block.ptr().offset(block.bytes() - END)]
}

fn what_one_has_allocated_no_other_gets(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (first, second) = (card.active(plain())?, card.active(plain())?);
        expect(first.largest_available()? <= SHARED / MIB, "the rest is guaranteed to another")?;
        let held = first.allocate(320)?;
        first.write(&held, 3)?;
        second.expect_refused("that another has allocated", 256, OomCause::Shared)?;
        let own = second.allocate(64)?;
        second.write(&own, 4)?;
        first.expect("what was allocated all the time", &held, 3)?;
        second.expect("the block of the other", &own, 4)?;
        held.free()?;
        let more = second.allocate(256)?;
        second.write(&more, 5)?;
        second.expect("a block of memory that changed hands", &more, 5)
    })
}

fn idle_memory_is_given_by_the_thread(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (first, second) = (card.active(patient())?, card.active(patient())?);
        let kept = first.allocate(64)?;
        first.write(&kept, 7)?;
        for _ in 0..3 {
            first.leave_idle(320)?;
            let block = second.allocate(320)?;
            second.write(&block, 8)?;
            expect(first.reserved()? <= 64 + 128, "the first one has given most of what was idle")?;
            second.expect("the block", &block, 8)?;
            block.free()?;
        }
        first.expect("what stayed allocated", &kept, 7)
    })
}

fn idle_memory_is_given_by_requests(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        // Without a thread.
        let first = card.member(plain())?;
        let second = card.member(patient())?;
        first.leave_idle(320)?;
        let busy = context.device().lease_stream()?;
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| second.allocate(320).and_then(|block| Ok(block.free()?)));
            // Each request of another stream needs a page.
            let mut kept = Vec::new();
            while !asking.is_finished() {
                if kept.len() < 32 {
                    kept.push(first.allocator.allocate(2 * MIB, busy.stream())?);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            crate::sync::join(asking)
        })
    })
}

fn memory_in_use_by_streams_is_given_after_their_work(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (first, second) = (card.active(plain())?, card.active(patient())?);
        let stream = first.stream.stream();
        let result = first.allocate(2)?;
        let block = first.allocate(384)?;
        context.keep_stream_busy(stream)?;
        first.write(&block, 1)?;
        let last = ends(&block)[1];
        context.driver.copy(result.ptr().into(), last.into(), END, stream.id())?;
        block.free()?;
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| -> CheckResult {
                // It waits for the other, whose pages leave once its stream has passed.
                let taken = second.allocate(384)?;
                second.write(&taken, 2)?;
                second.expect("the block that was taken", &taken, 2)
            });
            std::thread::sleep(Duration::from_millis(100));
            // On the simulated GPU time passes only if somebody waits.
            let synchronized = stream.synchronize();
            crate::sync::join(asking)?;
            Ok::<(), CheckError>(synchronized?)
        })?;
        context.expect_sequence("what was copied before", result.ptr(), END, 1, stream)
    })
}

fn a_guarantee_stays_with_its_owner(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let owner = card.active(share(|share| share.guaranteed_bytes = 128 * MIB))?;
        let other = card.active(patient())?;
        owner.leave_idle(320)?;
        other.expect_refused("that is guaranteed to another", 448, OomCause::Shared)?;
        // All but the guarantee is given.
        let most = other.allocate(256)?;
        other.write(&most, 6)?;
        let own = owner.allocate(128)?;
        owner.write(&own, 5)?;
        owner.expect("what is guaranteed", &own, 5)?;
        other.expect("what the other one got", &most, 6)
    })
}

fn a_guarantee_that_nobody_uses_is_kept(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let owner = card.member(share(|share| share.guaranteed_bytes = 192 * MIB))?;
        let other = card.active(plain())?;
        // Blocks until there are no more.
        let mut blocks = Vec::new();
        while let Ok(block) = other.allocator.allocate(32 * MIB, other.stream.stream()) {
            blocks.push(block);
        }
        expect(other.reserved()? <= SHARED / MIB - 192, "the other one has no part of the guarantee")?;
        expect(other.reserved()? >= 192, "what is guaranteed to nobody is there")?;
        let own = owner.allocate(192)?;
        owner.write(&own, 1)?;
        owner.expect("what is guaranteed", &own, 1)
    })
}

fn a_limit_is_never_exceeded(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let member = card.active(share(|share| share.limit_bytes = Some(128 * MIB)))?;
        let block = member.allocate(96)?;
        member.expect_refused("beyond share_limit", 64, OomCause::Limit)?;
        block.free()?;
        drop(member.allocate(128)?);
        expect(member.reserved()? <= 128, "no more than the limit")
    })
}

fn lower_priorities_give_first(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        // The middle one looks rarely: one that looks in the moment between a gift and the next attempt gives, too.
        let middle = card.active(share(|share| (share.priority, share.reclaim_ms) = (1, 1000)))?;
        let low = card.active(plain())?;
        let high = card.active(share(|share| (share.priority, share.reclaim_ms) = (2, 1000)))?;
        low.leave_idle(192)?;
        middle.leave_idle(192)?;
        let block = high.allocate(256)?;
        high.write(&block, 1)?;
        expect(low.reserved()? <= 128, "the lowest priority has given")?;
        expect_eq("what the middle one has", middle.reserved()?, 192)?;
        high.expect("the block", &block, 1)
    })
}

fn higher_priorities_do_not_give(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (low, high) = (card.active(plain())?, card.active(share(|share| share.priority = 1))?);
        high.leave_idle(384)?;
        low.expect_refused("that a higher priority keeps", 256, OomCause::Shared)?;
        expect_eq("what the higher priority has", high.reserved()?, 384)?;
        // What is guaranteed comes from higher priorities, too, once all else is used.
        let bytes = 256 * MIB + card.left;
        let terms = |share: &mut ShareSettings| (share.guaranteed_bytes, share.reclaim_ms) = (bytes, 1000);
        let owner = card.active(share(terms))?;
        let block = owner.allocate(bytes / MIB)?;
        owner.write(&block, 2)?;
        expect(high.reserved()? <= 256, "the higher priority has given what is guaranteed to another")?;
        owner.expect("what is guaranteed", &block, 2)
    })
}

fn one_that_does_not_answer_is_waited_for_a_bounded_time(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (silent, other) = (card.member(plain())?, card.active(plain())?);
        silent.leave_idle(384)?;
        let begin = std::time::Instant::now();
        other.expect_refused("of one that does not answer", 256, OomCause::Shared)?;
        // Two times four rounds of 50 ms; the machine may be slow.
        expect(begin.elapsed() < Duration::from_secs(20), "the answer came in time")?;
        expect_eq("what it still has", silent.reserved()?, 384)?;
        let _answers = BackgroundReclaim::start(&silent.paged);
        drop(other.allocate(256)?);
        Ok(())
    })
}

fn who_leaves_takes_nothing_with_it(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let stays = card.active(plain())?;
        for round in 0..3 {
            let leaves = card.active(share(|share| share.guaranteed_bytes = 256 * MIB))?;
            leaves.leave_idle(384)?;
            stays.expect_refused("that is guaranteed to one that is there", 448, OomCause::Shared)?;
            drop(leaves);
            let all = stays.allocate(448)?;
            stays.write(&all, round)?;
            stays.expect("a block of nearly all", &all, round)?;
            all.free()?;
            stays.allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        }
        Ok(())
    })
}

fn who_is_at_its_peak_gets_what_the_others_left(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let members = [card.active(patient())?, card.active(patient())?, card.active(patient())?];
        let kept: Vec<DeviceBlock> = members.iter().map(|member| member.allocate(16)).collect::<CheckResult<_>>()?;
        for (member, block) in members.iter().zip(&kept) {
            member.write(block, 9)?;
        }
        for round in 0..6 {
            let member = &members[round % 3];
            let peak = member.allocate(288)?;
            member.write(&peak, 10)?;
            member.expect("its peak", &peak, 10)?;
            peak.free()?;
        }
        members.iter().zip(&kept).try_for_each(|(member, block)| member.expect("what each kept", block, 9))
    })
}

fn members_at_the_same_time_never_have_more_than_there_is(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let members = [card.active(plain())?, card.active(plain())?];
        let use_at_random = |member: &Member<'_>, seed: u64| -> CheckResult<u32> {
            let (mut random, mut held, mut refused) = (fastrand::Rng::with_seed(seed), Vec::new(), 0);
            for first in 0..60 {
                let mib = 2 * random.u64(1..=64);
                match member.allocator.allocate(mib * MIB, member.stream.stream()) {
                    Ok(block) => {
                        member.write(&block, first)?;
                        held.push((block, first));
                    }
                    // For lack of memory of the others, and never because the driver had less than was granted.
                    Err(Error::OutOfMemory(report)) => {
                        expect_eq("why there is no memory", report.cause, OomCause::Shared)?;
                        refused += 1;
                    }
                    Err(error) => return Err(error.into()),
                }
                while held.len() > 4 || refused > 0 && !held.is_empty() && random.bool() {
                    let (block, first) = held.swap_remove(random.usize(..held.len()));
                    member.expect("a block", &block, first)?;
                    block.free()?;
                }
            }
            held.into_iter().try_for_each(|(block, first)| member.expect("a block", &block, first))?;
            Ok(refused)
        };
        let seed = context.random();
        std::thread::scope(|scope| {
            let (members, act) = (&members, &use_at_random);
            let other = scope.spawn(move || act(&members[1], seed ^ 1));
            let own = act(&members[0], seed);
            let reserved = members[0].reserved()? + members[1].reserved()?;
            crate::sync::join(other)?;
            expect(reserved <= SHARED / MIB, "together no more than there is")?;
            own.map(drop)
        })
    })
}

fn elastic_memory_is_committed_from_idle_memory_of_others(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let (first, second) = (card.active(plain())?, card.active(plain())?);
        let stream = second.stream.stream();
        let layout = ElasticLayout { rows: 1, blocks: 512, block_bytes: 2 * MIB };
        let memory = ElasticMemory::new(&second.paged, layout, stream)?;
        for round in 0..3 {
            first.leave_idle(320)?;
            memory.commit(0..160, stream)?;
            let (block, at) = (2 * MIB, memory.ptr().offset(318 * MIB));
            context.write_sequence(at, block, round, stream)?;
            match memory.commit(0..400, stream) {
                Err(Error::OutOfMemory(report)) => expect_eq("the cause", report.cause, OomCause::Shared)?,
                other => expect(false, &format!("more than there is: {other:?}"))?,
            }
            context.expect_sequence("a block that was committed", at, block, round, stream)?;
            expect_eq("committed blocks", memory.committed(), 160)?;
            // What is decommitted is idle, and the other one's to take.
            memory.decommit(0..512, stream)?;
            stream.synchronize()?;
        }
        Ok(())
    })
}

fn idle_memory_decays_though_nobody_asks(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let settings = Settings { idle_decay_ms: Some(10), ..plain() };
        let member = card.member(settings)?;
        let (kept, stream) = (member.allocate(64)?, member.stream.stream());
        member.write(&kept, 4)?;
        member.leave_idle(256)?;
        expect_eq("what is reserved at first", member.reserved()?, 320)?;
        for _ in 0..200 {
            if member.reserved()? == 64 {
                break;
            }
            // Time passes: on the simulated GPU only with work.
            context.delay(stream.id())?;
            stream.synchronize()?;
            member.paged.release_idle(context.device_id)?;
            member.paged.check();
        }
        expect_eq("what is reserved in the end", member.reserved()?, 64)?;
        member.expect("what is allocated", &kept, 4)
    })
}

fn what_cannot_be_understood_is_not_shared_with(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let refused = |what: &str, member: &Member<'_>, sentence: &str| -> CheckResult {
            match member.paged.share(&member.pages) {
                Err(Error::Share(error)) => {
                    let text = error.to_string();
                    expect(text.contains(sentence), &format!("{what}: {sentence:?}, not {text:?}"))
                }
                other => expect(false, &format!("{what} is refused: {other:?}")),
            }?;
            // It goes on alone.
            drop(member.allocate(2)?);
            Ok(())
        };
        let index = context.device_id.0 as usize;
        // Another version of the ledger.
        let other = card.member(plain())?;
        other.page.ledger(index)[0].store(9, Ordering::SeqCst);
        let member = card.alone(plain())?;
        refused("another layout", &member, "nothing is shared")?;
        drop(other);
        // A page that cannot be read: it may be one of another user, or of another version.
        let unreadable = card.folder.0.join("1-00000000000000ff.page");
        std::fs::create_dir(&unreadable).map_err(|error| CheckError::Failed(error.to_string()))?;
        refused("a page that is none", &member, "1-00000000000000ff.page")?;
        std::fs::remove_dir(&unreadable).map_err(|error| CheckError::Failed(error.to_string()))?;
        // More than there is.
        let greedy = card.alone(share(|share| share.guaranteed_bytes = u64::MAX / 2))?;
        refused("too much that is guaranteed", &greedy, "share_guaranteed")?;
        // An allocator without pages that could be given.
        let caching = CachingAllocator::new(context.instance(), Settings::default());
        let unsupported = matches!(caching.share(&member.pages), Err(Error::Unsupported { .. }));
        expect(unsupported, "the caching allocator does not share")?;
        // Nothing of all this counts.
        member.paged.share(&member.pages)?;
        drop(member.allocate(448)?);
        Ok(())
    })
}

fn a_folder_that_goes_ends_sharing(context: &TestContext) -> CheckResult {
    on_card(context, |card| {
        let member = card.member(plain())?;
        let block = member.allocate(64)?;
        member.write(&block, 1)?;
        std::fs::remove_dir_all(&card.folder.0).map_err(|error| CheckError::Failed(error.to_string()))?;
        let missing = PageDirectory::open(&card.folder.0.join("missing/folder"));
        expect(matches!(missing, Err(Error::Share(_))), "a folder that cannot be made is refused")?;
        // From here on it is as without a ledger.
        let more = member.allocate(SHARED / MIB)?;
        member.write(&more, 2)?;
        member.paged.release_idle(context.device_id)?;
        member.expect("what it had", &block, 1)?;
        member.expect("what it took without a ledger", &more, 2)
    })
}
