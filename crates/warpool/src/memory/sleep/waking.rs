//! Waking pools: create, map, copy back, each step for all pools before the next. Everything can be undone until the
//! end: the host keeps the contents until all of them are restored.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool_driver::{DeviceId, ErrorCode};

use super::changing::{Changing, ChangingPool};
use super::copies::Copies;
use super::going::{names, names_on_devices};
use super::report::SleepReport;
use super::shared::{Shared, TagPool};
use crate::error::{SleepCall, SleepFailure, SleepShortage};
use crate::memory::mapped_segments::{Contents, Phase};
use crate::memory::report::RangeEvent;
use crate::memory::{Asleep, MemPoolId};
use crate::{Error, Result};

/// Wakes pools, all or none.
pub(super) fn wake(shared: &Shared, pools: &[Arc<TagPool>]) -> Result<SleepReport> {
    let is_asleep = |pool: &&TagPool| matches!(pool.segments.phase(), Phase::Asleep(_));
    let (asleep, awake): (Vec<&TagPool>, Vec<&TagPool>) = pools.iter().map(|pool| &**pool).partition(is_asleep);
    let mut report = SleepReport {
        changed: names_on_devices(&asleep),
        unchanged: names_on_devices(&awake),
        ..SleepReport::default()
    };
    // Memory that the driver failed to release makes room when the release is retried, also that of pools that are
    // awake.
    pools.iter().for_each(|pool| pool.segments.collect());
    if asleep.is_empty() {
        return Ok(report);
    }
    let changing = Changing::begin(shared, &asleep, SleepCall::Wake, true);
    let outcome = wake_up(shared, changing, &mut report);
    asleep.iter().for_each(|pool| pool.segments.collect());
    if let Err(Failed { shortage, source }) = outcome {
        let failure = SleepFailure { call: SleepCall::Wake, tags: names(&asleep), shortage, source, is_undone: true };
        return Err(Error::Sleep(Box::new(failure)));
    }
    shared.reuse_pinned();
    let now_us = shared.now_us();
    asleep.iter().for_each(|pool| shared.remember(pool, "END", now_us));
    Ok(report)
}

struct Failed {
    shortage: SleepShortage,
    source: Option<Error>,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { shortage: SleepShortage::Nothing, source: Some(error) }
    }
}

fn wake_up(shared: &Shared, mut changing: Changing<'_>, report: &mut SleepReport) -> std::result::Result<(), Failed> {
    let mut created = Vec::new();
    let mut copies = BTreeMap::new();
    let mut outcome = bring_back(shared, &changing, &mut created, &mut copies, report);
    // Wait even after a failure: memory that a copy writes to must not be unmapped.
    for (id, copies) in &copies {
        let Err(error) = copies.wait() else { continue };
        if copies.wait_again().is_err() {
            let of_device = changing.pools.iter().filter(|pool| pool.pool.device() == *id);
            of_device.for_each(|pool| pool.pool.segments.set_used_by_copies(true));
        }
        outcome = outcome.and(Err(error.into()));
    }
    if outcome.is_err() {
        undo(&created);
        return outcome;
    }
    for ChangingPool { pool, sleeping } in &mut changing.pools {
        for segment in pool.segments.segments() {
            pool.segments.change(segment.ptr, |segment| segment.contents = Contents::Present);
        }
        sleeping.saved.clear();
    }
    let woken: Vec<&TagPool> = changing.pools.iter().map(|pool| pool.pool).collect();
    changing.complete();
    for pool in woken {
        pool.segments.segments().iter().for_each(|segment| pool.segments.tell(RangeEvent::Mapped, segment));
    }
    Ok(())
}

/// The segments for which physical memory was created.
type Created<'a> = Vec<(&'a TagPool, u64)>;

fn bring_back<'a>(
    shared: &Shared,
    changing: &Changing<'a>,
    created: &mut Created<'a>,
    copies: &mut BTreeMap<DeviceId, Copies<'a>>,
    report: &mut SleepReport,
) -> std::result::Result<(), Failed> {
    let mut trimmed = BTreeSet::new();
    for ChangingPool { pool, .. } in &changing.pools {
        reserve(shared, pool, &mut trimmed)?;
    }
    let bytes_needed = changing.pools.iter().map(|pool| bytes_missing(pool.pool)).sum();
    for ChangingPool { pool, .. } in &changing.pools {
        for segment in pool.segments.segments().iter().filter(|segment| segment.physical.is_none()) {
            let mut outcome = pool.segments.create(segment);
            if is_oom(&outcome) && trimmed.insert(pool.device()) {
                trim(shared, pool.device());
                outcome = pool.segments.create(segment);
            }
            if is_oom(&outcome) {
                let bytes_found = report.bytes_device;
                let shortage = SleepShortage::DeviceMemory { bytes_needed, bytes_found };
                return Err(Failed { shortage, source: outcome.err() });
            }
            outcome?;
            created.push((pool, segment.ptr));
            report.bytes_device += segment.bytes;
        }
    }
    for ChangingPool { pool, .. } in &changing.pools {
        let device = &pool.segments.device;
        if let Entry::Vacant(entry) = copies.entry(device.id()) {
            entry.insert(Copies::new(device)?);
        }
    }
    for ChangingPool { pool, sleeping } in &changing.pools {
        pool.segments.wait_for_copies()?;
        let copies = copies.get_mut(&pool.device()).expect("the devices are those of the pools");
        for segment in pool.segments.segments() {
            pool.segments.map(&segment)?;
            match &segment.contents {
                Contents::Present => {}
                Contents::Discarded if crate::defect::Defect::WakeDoesNotZero.is_on() => {}
                Contents::Discarded => copies.clear(segment.ptr, segment.bytes)?,
                Contents::Saved(ranges) => {
                    for range in ranges {
                        copies.restore(range, &sleeping.saved)?;
                        report.bytes_copied += range.bytes;
                    }
                }
            }
        }
    }
    Ok(())
}

fn bytes_missing(pool: &TagPool) -> u64 {
    let Asleep { bytes_small, bytes_large, .. } = pool.segments.asleep();
    bytes_small + bytes_large
}

/// Reserves the memory that the pool needs, within the allocator's limits.
fn reserve(shared: &Shared, pool: &TagPool, trimmed: &mut BTreeSet<DeviceId>) -> std::result::Result<(), Failed> {
    let device = pool.device();
    let try_reserve = || {
        let nothing = Asleep { tag: Arc::clone(&pool.segments.tag), ..Asleep::default() };
        shared.pool_sleep().reserve_to_wake(device, pool.id, nothing)
    };
    if try_reserve()? {
        return Ok(());
    }
    if trimmed.insert(device) {
        trim(shared, device);
        if try_reserve()? {
            return Ok(());
        }
    }
    Err(Failed { shortage: SleepShortage::Limit { bytes_needed: bytes_missing(pool) }, source: None })
}

/// Returns cached memory of the allocator to the driver, as a request does before it fails for lack of memory.
fn trim(shared: &Shared, device: DeviceId) {
    if let Err(error) = shared.allocator.trim(device, MemPoolId::DEFAULT) {
        tracing::warn!(%error, "cached memory could not be returned to make room for memory that wakes");
    }
}

fn is_oom(outcome: &Result<()>) -> bool {
    let code = outcome.as_ref().err().and_then(Error::driver).map(|error| error.code);
    code == Some(ErrorCode::OutOfMemory)
}

/// Releases the created memory. If that fails the memory stays; the host still has the contents.
fn undo(created: &Created<'_>) {
    if crate::defect::Defect::FailedWakeKeepsMemory.is_on() {
        return;
    }
    for (pool, ptr) in created {
        let segments = pool.segments.segments();
        let Some(segment) = segments.iter().find(|segment| segment.ptr == *ptr) else { continue };
        if segment.is_mapped
            && let Err(error) = pool.segments.unmap(segment)
        {
            tracing::warn!(%error, "a mapping could not be undone; the memory stays until its tag wakes");
            continue;
        }
        pool.segments.release(*ptr);
    }
}
