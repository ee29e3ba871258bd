//! Writes the page of an allocator, from a thread of its own: allocations and frees do nothing for it. It reads
//! counters that the allocator has anyway, four times per second while someone reads the page, else every ten
//! seconds. An out-of-memory error is written when it happens, by the thread that has it.
//!
//! The thread makes one driver call, for the free memory of a device, and only while someone reads, and if the process
//! uses the device.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use warpool_driver::DeviceId;
use warpool_driver::fork::Origin;
use warpool_driver::platform::Instant;

use super::limit::{LimitAnswer, LimitRequest};
use super::now_us;
use super::page::ProcessPage;
use super::values::{Counters, OomEvent, UsageOf, UsageRow};
use crate::error::ShareError;
use crate::memory::sleep::{TagInfo, TagState};
use crate::memory::{DeviceAllocator, HostAllocator, MemPoolId, ObserverId, SharedAllocator, Usage};
use crate::{Error, Result, lock};

/// How often the thread looks whether someone reads.
const TICK: Duration = Duration::from_millis(250);
/// How often it writes while none does.
const IDLE: Duration = Duration::from_secs(10);
/// For how long a reader that asked still counts.
const ASKED: Duration = Duration::from_secs(10);
/// Of a program with very many blocks, reading takes milliseconds, with locks held that allocations need: no more than
/// this part of the time.
const SHARE_OF_TIME: u32 = 100;

/// The tags of a program: [`Tags::info`](crate::memory::Tags::info).
pub type TagSource = Arc<dyn Fn() -> Vec<TagInfo> + Send + Sync>;

/// What a page says beside the memory of its allocator.
#[derive(Clone, Default)]
pub struct PublishOptions {
    /// Whether other processes of the user may change the limits of this one.
    pub accepts_limits: bool,
    /// Its pinned memory.
    pub host: Option<HostAllocator>,
    /// Its tags.
    pub tags: Option<TagSource>,
}

impl fmt::Debug for PublishOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishOptions").field("accepts_limits", &self.accepts_limits).finish_non_exhaustive()
    }
}

/// Writes a page, until it is dropped or the allocator is.
pub struct Publisher {
    shared: Arc<Shared>,
    origin: Origin,
    observer: Option<ObserverId>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    page: Arc<ProcessPage>,
    allocator: Weak<dyn DeviceAllocator>,
    options: PublishOptions,
    /// What was read before, by device.
    before: Mutex<Vec<Option<Before>>>,
    is_stopped: Mutex<bool>,
    stopped: Condvar,
}

/// From which rates are computed.
#[derive(Clone, Copy)]
struct Before {
    at: Instant,
    allocations: u64,
    remaps: u64,
    allocations_per_second: u64,
    remaps_per_second: u64,
}

impl Publisher {
    /// Starts the thread, and writes the page once.
    pub fn start(page: &Arc<ProcessPage>, allocator: &impl SharedAllocator, options: PublishOptions) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_own_process("publish")?;
        let shared = Arc::new(Shared {
            page: Arc::clone(page),
            allocator: Arc::downgrade(&allocator),
            options,
            before: Mutex::new(vec![None; allocator.instance().device_count() as usize]),
            is_stopped: Mutex::new(false),
            stopped: Condvar::new(),
        });
        shared.write(&*allocator, false);
        let of_thread = Arc::clone(&shared);
        let started = std::thread::Builder::new().name("warpool-publish".to_owned()).spawn(move || of_thread.run());
        let thread = started.map_err(|error| {
            let file = page.path().display().to_string();
            ShareError::Page { file, why: format!("no thread can be started: {error}") }
        })?;
        let of_oom = Arc::clone(page);
        let observer = allocator.observers().attach_oom_observer(Arc::new(move |report| {
            of_oom.write_oom(report.device.0 as usize, OomEvent::of(report, now_us()));
        }));
        Ok(Self { shared, origin: Origin::here(), observer: Some(observer), thread: Some(thread) })
    }

    /// Its page.
    #[must_use]
    pub fn page(&self) -> &Arc<ProcessPage> {
        &self.shared.page
    }

    /// Writes the page now, and answers requests.
    pub fn write_now(&self) {
        if let Some(allocator) = self.shared.allocator.upgrade().filter(|_| self.origin.is_here()) {
            self.shared.answer(&*allocator);
            self.shared.write(&*allocator, true);
        }
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("page", &self.shared.page.path()).finish_non_exhaustive()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if !self.origin.is_here() {
            std::mem::forget(self.thread.take());
            return;
        }
        *lock(&self.shared.is_stopped) = true;
        self.shared.stopped.notify_all();
        if let (Some(allocator), Some(observer)) = (self.shared.allocator.upgrade(), self.observer.take()) {
            allocator.observers().detach(observer);
        }
        if let Some(thread) = self.thread.take() {
            // Its panic was reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let (mut written, mut pause) = (Instant::now(), TICK);
        let mut is_warned = false;
        loop {
            let stopped = lock(&self.is_stopped);
            let waited = self.stopped.wait_timeout_while(stopped, pause, |stopped| !*stopped);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            let Some(allocator) = self.allocator.upgrade() else {
                return;
            };
            self.answer(&*allocator);
            let is_asked = now_us().saturating_sub(self.page.asked_us()) < ASKED.as_micros() as u64;
            if !is_asked && written.elapsed() < IDLE {
                continue;
            }
            if !self.page.keep() && !std::mem::replace(&mut is_warned, true) {
                tracing::warn!("{} was removed: other processes do not see this one", self.page.path().display());
            }
            let begun = Instant::now();
            self.write(&*allocator, is_asked);
            written = Instant::now();
            pause = TICK.max(begun.elapsed() * SHARE_OF_TIME);
        }
    }

    /// Answers requests for other limits.
    fn answer(&self, allocator: &dyn DeviceAllocator) {
        for device in allocator.instance().devices().map(|device| device.id()) {
            if let Some(request) = self.page.limit_request(device.0 as usize) {
                self.page.answer_limit(device.0 as usize, request, self.apply(allocator, device, request));
            }
        }
    }

    fn apply(&self, allocator: &dyn DeviceAllocator, device: DeviceId, request: LimitRequest) -> LimitAnswer {
        if !self.options.accepts_limits {
            return LimitAnswer::NotAllowed;
        }
        match allocator.set_memory_cap(device, request.bytes()) {
            Ok(()) => LimitAnswer::Applied,
            Err(Error::Unsupported { .. }) => LimitAnswer::Unsupported,
            Err(error) => {
                tracing::warn!("the limit that another process asked for is not set: {error}");
                LimitAnswer::Unsupported
            }
        }
    }

    /// Writes every device. Those that cannot be read keep what is there.
    fn write(&self, allocator: &dyn DeviceAllocator, is_asked: bool) {
        let mut before = lock(&self.before);
        let tags = self.options.tags.as_ref().map(|tags| tags()).unwrap_or_default();
        let pinned = self.options.host.as_ref().map(|host| host.stats().pinned_bytes_by_device).unwrap_or_default();
        for (index, device) in allocator.instance().devices().enumerate() {
            let Ok(usage) = allocator.usage(device.id()) else {
                continue;
            };
            let tags: Vec<&TagInfo> = tags.iter().filter(|tag| tag.device == device.id()).collect();
            let mut counters = counters(&usage);
            counters.bytes_pinned = pinned.get(index).copied().unwrap_or(0);
            counters.bytes_device_free = u64::MAX;
            let driver = allocator.instance().driver();
            // A device that the process does not use may have no context, and gets none for this.
            if is_asked && usage.stats.reserved_bytes.all.current > 0 {
                counters.bytes_device_free = driver.mem_info(device.id()).map_or(u64::MAX, |info| info.bytes_free);
            }
            add_rates(&mut counters, &mut before[index]);
            self.page.write(index, &counters, &rows(&usage, &tags));
        }
    }
}

fn counters(usage: &Usage) -> Counters {
    let stats = &usage.stats;
    let pages = usage.pages.unwrap_or_default();
    Counters {
        bytes_allocated: stats.allocated_bytes.all.current,
        bytes_active: stats.active_bytes.all.current,
        bytes_requested: stats.requested_bytes.all.current,
        bytes_reserved: stats.reserved_bytes.all.current,
        bytes_allocated_peak: stats.allocated_bytes.all.peak,
        bytes_reserved_peak: stats.reserved_bytes.all.peak,
        bytes_free_pages: pages.free_mapped_bytes + pages.spare_bytes,
        bytes_asleep: stats.asleep_bytes.all.current,
        bytes_elastic: pages.elastic_bytes,
        bytes_workspace: stats.workspace_bytes.current,
        bytes_limit: usage.bytes_limit.unwrap_or(u64::MAX),
        allocations: stats.allocation.all.allocated,
        driver_allocations: stats.num_device_alloc,
        driver_frees: stats.num_device_free,
        pages_mapped: pages.totals.mapped,
        pages_unmapped: pages.totals.unmapped,
        retries: stats.num_alloc_retries,
        ooms: stats.num_ooms,
        read_us: now_us(),
        ..Counters::default()
    }
}

/// Rates since the values before. Two readings within a moment keep the rates of the first.
fn add_rates(counters: &mut Counters, before: &mut Option<Before>) {
    let remaps = counters.pages_mapped.saturating_add(counters.pages_unmapped);
    let mut now = Before {
        at: Instant::now(),
        allocations: counters.allocations,
        remaps,
        allocations_per_second: 0,
        remaps_per_second: 0,
    };
    if let Some(then) = *before {
        let us = u64::try_from(then.at.elapsed().as_micros()).unwrap_or(u64::MAX);
        // After a reset of the statistics the sums begin again.
        let rate = |now: u64, then: u64| {
            let difference = u128::from(now.saturating_sub(then));
            u64::try_from(difference * 1_000_000 / u128::from(us.max(1))).unwrap_or(u64::MAX)
        };
        (now.allocations_per_second, now.remaps_per_second) = match us {
            0..20_000 => (then.allocations_per_second, then.remaps_per_second),
            _ => (rate(now.allocations, then.allocations), rate(remaps, then.remaps)),
        };
        if us < 20_000 {
            (now.at, now.allocations, now.remaps) = (then.at, then.allocations, then.remaps);
        }
    }
    (counters.allocations_per_second, counters.remaps_per_second) = (now.allocations_per_second, now.remaps_per_second);
    *before = Some(now);
}

/// Memory by tag, by pool, by stream. What is asleep is not reserved.
fn rows(usage: &Usage, tags: &[&TagInfo]) -> Vec<UsageRow> {
    let is_asleep =
        |pool: MemPoolId| tags.iter().any(|tag| tag.pool == pool && matches!(tag.state, TagState::Asleep { .. }));
    let mut rows: BTreeMap<UsageOf, UsageRow> = BTreeMap::new();
    let mut add = |of: UsageOf, row: &UsageRow| {
        rows.entry(of.clone()).or_insert_with(|| UsageRow::of(of)).add(row);
    };
    for part in &usage.parts {
        let asleep = if is_asleep(part.pool) { part.bytes_reserved } else { 0 };
        let row = UsageRow {
            bytes_reserved: part.bytes_reserved - asleep,
            bytes_allocated: part.bytes_allocated,
            bytes_active: part.bytes_active,
            bytes_asleep: asleep,
            bytes_elastic: part.bytes_elastic,
            ..UsageRow::of(UsageOf::Pool(part.pool))
        };
        if row != UsageRow::of(UsageOf::Pool(part.pool)) {
            add(UsageOf::Pool(part.pool), &row);
            add(UsageOf::Stream(part.stream), &row);
        }
    }
    for tag in tags {
        let of_pool = usage.parts.iter().filter(|part| part.pool == tag.pool);
        let (allocated, active) = of_pool
            .fold((0, 0), |(allocated, active), part| (allocated + part.bytes_allocated, active + part.bytes_active));
        let of = UsageOf::Tag(tag.tag.clone());
        let row = UsageRow {
            bytes_reserved: tag.bytes_device,
            bytes_allocated: allocated,
            bytes_active: active,
            bytes_asleep: if is_asleep(tag.pool) { tag.bytes.saturating_sub(tag.bytes_device) } else { 0 },
            ..UsageRow::of(of.clone())
        };
        add(of, &row);
    }
    rows.into_values().collect()
}
