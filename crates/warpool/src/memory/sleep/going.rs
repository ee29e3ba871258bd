//! Putting pools to sleep: copy, unmap, release, each step for all pools before the next. Until the first release
//! everything can be undone, since unmapped memory keeps its contents.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::changing::{Changing, ChangingPool};
use super::copies::{Copies, Packer, SaveError};
use super::elastic::TagElastic;
use super::report::{Keep, SleepReport};
use super::shared::{Shared, TagPool};
use crate::error::{SleepCall, SleepFailure, SleepShortage};
use crate::memory::mapped_segments::{Contents, Phase, SavedRange, Segment};
use crate::memory::report::RangeEvent;
use crate::memory::{BlockState, HostBlock, SegmentKind, SnapshotOptions};
use crate::{Device, Error, Result};

/// Puts pools to sleep, all or none.
pub(super) fn sleep(shared: &Shared, pools: &[Arc<TagPool>], keep: Keep) -> Result<SleepReport> {
    let is_asleep = |pool: &&TagPool| matches!(pool.segments.phase(), Phase::Asleep(_));
    let (asleep, awake): (Vec<&TagPool>, Vec<&TagPool>) = pools.iter().map(|pool| &**pool).partition(is_asleep);
    let mut report = SleepReport {
        changed: names_on_devices(&awake),
        unchanged: names_on_devices(&asleep),
        ..SleepReport::default()
    };
    if !awake.is_empty() {
        let changing = Changing::begin(shared, &awake, SleepCall::Sleep, keep == Keep::Host);
        let outcome = fall_asleep(shared, changing, keep, &mut report);
        awake.iter().for_each(|pool| pool.segments.collect());
        if let Err((shortage, source)) = outcome {
            shared.reuse_pinned();
            let is_undone = awake.iter().all(|pool| matches!(pool.segments.phase(), Phase::Awake));
            let tags = names(&awake);
            let failure = SleepFailure { call: SleepCall::Sleep, tags, shortage, source: Some(source), is_undone };
            return Err(Error::Sleep(Box::new(failure)));
        }
    }
    if keep == Keep::Discard {
        asleep.iter().for_each(|pool| discard(pool));
    }
    let since_us = shared.now_us();
    awake.iter().for_each(|pool| shared.remember(pool, "START", since_us));
    report.bytes_not_returned = pools.iter().map(|pool| pool.segments.bytes_physical()).sum();
    report.bytes_device = report.bytes_device.saturating_sub(report.bytes_not_returned);
    Ok(report)
}

/// Pins host memory for the contents of pools that are awake, and leaves it to the cache.
pub(super) fn prepare(shared: &Shared, pools: &[Arc<TagPool>], elastic: &[Arc<TagElastic>]) -> Result<u64> {
    let awake: Vec<&TagPool> =
        pools.iter().map(|pool| &**pool).filter(|pool| matches!(pool.segments.phase(), Phase::Awake)).collect();
    let mut bytes: Vec<(&Device, u64)> = elastic.iter().map(|of| (of.device(), of.bytes_to_save())).collect();
    for pool in &awake {
        bytes.push((&pool.segments.device, Plan::of(shared, pool)?.bytes_live()));
    }
    let bytes_needed = bytes.iter().map(|&(_, bytes)| bytes).sum();
    // All pieces are held at once, as the contents will be.
    let (mut pinned, mut bytes_found) = (Vec::new(), 0);
    for (device, bytes) in bytes {
        let mut packer = Packer::new(&shared.host, bytes);
        let outcome = packer.allocate_all(device);
        bytes_found += packer.bytes_allocated();
        pinned.push(packer);
        if let Err(error) = outcome {
            let shortage = SleepShortage::PinnedMemory { bytes_needed, bytes_found };
            let (call, tags, source) = (SleepCall::Sleep, names(&awake), Some(error));
            return Err(Error::Sleep(Box::new(SleepFailure { call, tags, shortage, source, is_undone: true })));
        }
    }
    Ok(bytes_needed)
}

/// The names of tags with their devices, each once.
pub(super) fn names_on_devices(pools: &[&TagPool]) -> Vec<(String, DeviceId)> {
    let mut names: Vec<(String, DeviceId)> = pools.iter().map(|pool| pool.name()).collect();
    names.dedup();
    names
}

/// The names of tags, each once.
pub(super) fn names(pools: &[&TagPool]) -> Vec<String> {
    let mut names: Vec<String> = pools.iter().map(|pool| pool.segments.tag.to_string()).collect();
    names.dedup();
    names
}

/// The resource that was missing, and the error of the call that failed.
type Failed = (SleepShortage, Error);

fn failed(error: Error) -> Failed {
    (SleepShortage::Nothing, error)
}

fn fall_asleep(
    shared: &Shared,
    mut changing: Changing<'_>,
    keep: Keep,
    report: &mut SleepReport,
) -> std::result::Result<(), Failed> {
    // Work in streams may use the memory, and unmapping does not wait for it.
    let devices = devices(&changing.pools);
    for device in devices.values() {
        if crate::defect::Defect::SleepDoesNotWait.is_on() {
            break;
        }
        device.synchronize().map_err(failed)?;
    }
    // Free segments need neither a copy nor memory after waking.
    for ChangingPool { pool, .. } in &changing.pools {
        shared.pool_sleep().release_free_segments(pool.device(), pool.id).map_err(failed)?;
    }
    let mut plans: Vec<Plan> = Vec::new();
    for ChangingPool { pool, .. } in &changing.pools {
        plans.push(Plan::of(shared, pool).map_err(failed)?);
    }
    if keep == Keep::Host {
        save(shared, &changing.pools, &mut plans, &devices)?;
        report.bytes_copied = plans.iter().map(Plan::bytes_live).sum();
    }
    if let Err(error) = unmap(&changing.pools, &plans) {
        map_again(&changing.pools);
        return Err(failed(error));
    }
    // From here on nothing can be undone: memory is released, and releases that fail are retried later.
    for (at, plan) in plans.iter().enumerate() {
        changing.keep(at, &plan.pieces);
        let pool = changing.pools[at].pool;
        for planned in &plan.segments {
            let contents =
                if keep == Keep::Host { Contents::Saved(planned.saved.clone()) } else { Contents::Discarded };
            pool.segments.change(planned.segment.ptr, |segment| segment.contents = contents);
            pool.segments.release(planned.segment.ptr);
            report.bytes_device += planned.segment.bytes;
        }
    }
    changing.complete();
    Ok(())
}

fn devices<'a>(pools: &[ChangingPool<'a>]) -> BTreeMap<DeviceId, &'a Device> {
    pools.iter().map(|ChangingPool { pool, .. }| (pool.device(), &pool.segments.device)).collect()
}

/// What the call does with the segments of a pool.
struct Plan {
    segments: Vec<Planned>,
    /// Host memory with the contents.
    pieces: Vec<Arc<HostBlock>>,
}

struct Planned {
    segment: Segment,
    /// Ranges of allocated blocks; neighbours are merged.
    live: Vec<(u64, u64)>,
    saved: Vec<SavedRange>,
}

impl Plan {
    fn of(shared: &Shared, pool: &TagPool) -> Result<Self> {
        let options = SnapshotOptions { pool: Some(pool.id), traces: false };
        let snapshot = shared.allocator.snapshot(options)?;
        let device = i32::try_from(pool.device().0).unwrap_or(i32::MAX);
        let known: Vec<_> = snapshot.segments.iter().filter(|known| known.device == device).collect();
        let plan = |mut segment: Segment| {
            let (start, end) = (segment.ptr, segment.ptr + segment.bytes);
            let of_segment =
                known.iter().filter(|known| known.address < end && known.address + known.total_size > start);
            let mut live: Vec<(u64, u64)> = Vec::new();
            let mut kind = None;
            for known in of_segment {
                kind = Some(known.kind);
                for block in known.blocks.iter().filter(|block| block.state != BlockState::Inactive) {
                    let (from, to) = (block.address.max(start), (block.address + block.size).min(end));
                    match live.last_mut() {
                        _ if from >= to => {}
                        Some(last) if last.1 == from => last.1 = to,
                        _ => live.push((from, to)),
                    }
                }
            }
            if crate::defect::Defect::SleepForgetsBlocks.is_on() {
                live.pop();
            }
            if kind.is_none() {
                // The allocator has just received the segment, and its contents are unknown: save all of it.
                live.push((start, end));
            }
            segment.kind = kind.unwrap_or(SegmentKind::Large);
            pool.segments.change(segment.ptr, |changed| changed.kind = segment.kind);
            Planned { segment, live, saved: Vec::new() }
        };
        Ok(Self { segments: pool.segments.segments().into_iter().map(plan).collect(), pieces: Vec::new() })
    }

    fn bytes_live(&self) -> u64 {
        self.segments.iter().flat_map(|planned| &planned.live).map(|(from, to)| to - from).sum()
    }
}

/// Copies the contents of allocated blocks to the host.
fn save(
    shared: &Shared,
    pools: &[ChangingPool<'_>],
    plans: &mut [Plan],
    devices: &BTreeMap<DeviceId, &Device>,
) -> std::result::Result<(), Failed> {
    let bytes_needed = plans.iter().map(Plan::bytes_live).sum();
    let mut copies = BTreeMap::new();
    for (&id, &device) in devices {
        copies.insert(id, Copies::new(device).map_err(failed)?);
    }
    let mut outcome = Ok(());
    let mut bytes_before = 0;
    for (pool, plan) in pools.iter().zip(plans.iter_mut()) {
        let copies = copies.get_mut(&pool.pool.device()).expect("the devices are those of the pools");
        let mut packer = Packer::new(&shared.host, plan.bytes_live());
        outcome = save_pool(plan, &mut packer, copies).map_err(|error| match error {
            SaveError::NoHostMemory(error) => {
                let bytes_found = bytes_before + packer.bytes_allocated();
                (SleepShortage::PinnedMemory { bytes_needed, bytes_found }, error)
            }
            SaveError::Copy(error) => failed(error),
        });
        bytes_before += packer.bytes_allocated();
        plan.pieces = packer.pieces;
        if outcome.is_err() {
            break;
        }
    }
    // Wait even after a failure: no copy may be under way when the next call begins.
    for (id, copies) in &copies {
        let Err(error) = copies.wait() else { continue };
        if copies.wait_again().is_err() {
            let of_device = pools.iter().filter(|pool| pool.pool.device() == *id);
            of_device.for_each(|pool| pool.pool.segments.set_used_by_copies(true));
        }
        outcome = outcome.and(Err(failed(error)));
    }
    outcome
}

fn save_pool(plan: &mut Plan, packer: &mut Packer<'_>, copies: &mut Copies<'_>) -> std::result::Result<(), SaveError> {
    for planned in &mut plan.segments {
        for &(from, to) in &planned.live {
            planned.saved.extend(packer.save(from, to - from, copies)?);
        }
    }
    Ok(())
}

fn unmap(pools: &[ChangingPool<'_>], plans: &[Plan]) -> Result<()> {
    for (pool, plan) in pools.iter().zip(plans) {
        for planned in plan.segments.iter().filter(|planned| planned.segment.is_mapped) {
            pool.pool.segments.tell(RangeEvent::Unmapping, &planned.segment);
            pool.pool.segments.unmap(&planned.segment)?;
        }
    }
    Ok(())
}

/// Maps again what was unmapped. Memory for which that fails stays unmapped, with its contents, and can be woken.
fn map_again(pools: &[ChangingPool<'_>]) {
    for ChangingPool { pool, .. } in pools {
        for segment in pool.segments.segments().iter().filter(|segment| !segment.has_access) {
            if let Err(error) = pool.segments.map(segment) {
                tracing::warn!(%error, tag = &*pool.segments.tag, "a failed sleep could not be undone; wake the tag");
            }
        }
        for segment in pool.segments.segments().iter().filter(|segment| segment.has_access) {
            pool.segments.tell(RangeEvent::Mapped, segment);
        }
    }
}

/// Drops the contents of a pool that sleeps.
fn discard(pool: &TagPool) {
    let Phase::Asleep(mut sleeping) = pool.segments.phase() else { return };
    for segment in pool.segments.segments() {
        pool.segments.change(segment.ptr, |segment| segment.contents = Contents::Discarded);
        if segment.is_mapped
            && let Err(error) = pool.segments.unmap(&segment)
        {
            tracing::warn!(%error, "a mapping could not be undone; the memory stays until it is woken");
            continue;
        }
        pool.segments.release(segment.ptr);
    }
    sleeping.keeps_contents = false;
    if !pool.segments.is_used_by_copies() {
        sleeping.saved.clear();
    }
    pool.segments.set_phase(Phase::Asleep(sleeping));
    // There was memory left if an earlier call failed.
    pool.segments.count_asleep();
}
