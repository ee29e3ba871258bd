//! All that is concluded from the recording of one device before it is replayed: where it began, its pools, its limit,
//! and the plan.

use warpool::memory::{Action, FreeBlockOrder, MemPoolId, SegmentInfo, Settings, TraceEntry};

use super::caps::{self, Cap, Causes};
use super::endings;
use super::ledger::Ledger;
use super::plan::{Knowledge, Plan, plan};
use super::pools::{self, DEFAULT, PoolOrigin, Pools};
use super::sizes::{MIB, Sizes};
use super::start::{self, Start};
use super::survey::{Survey, is_return, survey};

/// The recording of one device.
#[derive(Clone, Copy)]
pub(super) struct Tape<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    pub segments: &'a [&'a SegmentInfo],
    /// Whether every entry names its pool.
    pub names_pools: bool,
    /// Whether a pause between two segments that go back tells two releases apart. A slow driver pauses too.
    pub pauses_tell: bool,
    /// Whether the choice of a block tells pools apart. Where settings changed on the way, it may have had other
    /// reasons.
    pub choices_tell: bool,
}

impl Tape<'_> {
    /// Whether there is anything of segments to compare with. Logs of other allocators have nothing.
    pub fn has_segments(&self) -> bool {
        !self.segments.is_empty()
            || self
                .events
                .iter()
                .any(|event| event.action == Action::SegmentAlloc || event.action == Action::SegmentMap)
    }

    /// Whether the plain reading will do: it begins with nothing, gives nothing back, and knows no pools.
    pub fn is_simple(&self) -> bool {
        let plain = |event: &TraceEntry| {
            !is_return(event.action) && event.action != Action::Oom && event.pool.is_none_or(MemPoolId::is_default)
        };
        self.segments.iter().all(|segment| segment.pool.is_default())
            && start::is_whole(self.events, self.segments)
            && self.events.iter().all(plain)
    }
}

/// What was concluded.
#[derive(Debug)]
pub(super) struct Model {
    pub settings: Settings,
    pub start: Option<Start>,
    pub pools: Pools,
    pub plan: Plan,
    pub cap: Option<Cap>,
    /// At least and at most.
    pub retries: (u64, u64),
    /// The events before which `expandable_segments` was switched; the settings have what it was before.
    pub switches: Vec<u32>,
    pub notes: Vec<String>,
}

impl Model {
    /// The plain reading.
    pub fn simple(tape: Tape<'_>, settings: Settings) -> Self {
        let plan = plan(tape.events, &Knowledge::default());
        let pools = Pools::default_only();
        Self { settings, start: None, pools, plan, cap: None, retries: (0, 0), switches: Vec::new(), notes: Vec::new() }
    }

    /// Everything that can be told.
    pub fn deep(tape: Tape<'_>, settings: Settings) -> Self {
        let by_registration = settings.free_block_order == FreeBlockOrder::Registration;
        let whole = !tape.has_segments() || start::is_whole(tape.events, tape.segments);
        let sizes = Sizes::new(&settings);
        let start = (!whole).then(|| start::rebuild(tape.events, tape.segments, &sizes, by_registration));
        // A history that cannot be undone may still be whole, with an end that does not fit it.
        let start = start.filter(|start| {
            start.misfits == 0 || {
                let forwards = survey(tape, Ledger::new(sizes.clone(), by_registration));
                start.misfits <= forwards.misfits
            }
        });
        Self::from_start(tape, settings, start)
    }

    fn from_start(tape: Tape<'_>, settings: Settings, mut start: Option<Start>) -> Self {
        let sizes = Sizes::new(&settings);
        let by_registration = settings.free_block_order == FreeBlockOrder::Registration;
        let mut notes = Vec::new();
        let mut survey = survey_corrected(tape, start.as_mut(), &Ledger::new(sizes.clone(), by_registration));
        if !tape.choices_tell {
            survey.rivalries.clear();
        }
        if !sizes.gives_back_parts() {
            endings::tell_apart(&mut survey);
        }
        let mut pools = pools::divide(&survey, sizes.gives_back_parts());
        let Causes { causes, cap, retries, notes: unexplained } = caps::conclude(&survey, &pools, &sizes);
        notes.extend(unexplained);
        let mut named = |action: Action| -> Vec<_> {
            let events = tape.events.iter().filter(|event| event.action == action);
            events.map(|event| event.pool.map_or(DEFAULT, |id| pools.recorded(id))).collect()
        };
        let fail_pools = named(Action::Oom);
        let alloc_pools = if tape.names_pools { named(Action::Alloc) } else { pools::of_allocations(&survey, &pools) };
        let pools_released = survey.releases.iter().map(|release| {
            let mut list: Vec<_> =
                release.regions.iter().map(|&id| pools.of(id)).filter(|&pool| pool != DEFAULT).collect();
            list.sort_unstable();
            list.dedup();
            list
        });
        let knowledge = Knowledge {
            start: start.as_ref(),
            alloc_pools,
            fail_pools,
            pools: pools.origins.len(),
            pools_released: pools_released.collect(),
            releases: &survey.releases,
            causes: &causes,
        };
        let plan = plan(tape.events, &knowledge);
        pools.origins.extend(std::iter::repeat_n(PoolOrigin::Inferred, plan.pools_added));
        if let Some(start) = &start {
            note_start(start, &mut notes);
        }
        // Blocks were split otherwise than is known here.
        let misfits = if tape.choices_tell { survey.misfits } else { 0 };
        note_pools(&pools, misfits, &mut notes);
        Self { settings, start, pools, plan, cap, retries, switches: Vec::new(), notes }
    }

    /// The memory of the device that this is replayed on: `usual`, unless the recording held more, or reserved ranges
    /// closer together than such a device would.
    pub fn capacity(&self, tape: Tape<'_>, usual: u64) -> u64 {
        const CONTEXT: u64 = 1024 * MIB;
        let chunk = self.settings.large_segment_bytes;
        let reserved = |total: u64| (total / 8 * 9).next_multiple_of(chunk);
        let least = self.plan.bytes_peak + CONTEXT;
        let capacity = usual.max(least);
        match self.range_gap(tape) {
            Some(gap) if reserved(capacity) > gap => (gap / chunk * chunk / 9 * 8).max(least),
            _ => capacity,
        }
    }

    /// The least distance between the starts of two ranges of addresses.
    fn range_gap(&self, tape: Tape<'_>) -> Option<u64> {
        let maps = |event: &TraceEntry| event.action == Action::SegmentMap;
        if !self.settings.expandable_segments && !tape.events.iter().any(maps) {
            return None;
        }
        let sizes = Sizes::new(&self.settings);
        let mut ranges =
            self.start.as_ref().map_or_else(|| Ledger::new(sizes, false), |start| start.ledger.ranges_only());
        for event in tape.events {
            match event.action {
                Action::SegmentMap => drop(ranges.map(event.addr, event.size, event.stream, None)),
                Action::SegmentUnmap => drop(ranges.unmap(event.addr, event.size)),
                _ => {}
            }
        }
        let mut bases: Vec<u64> =
            ranges.regions().iter().filter(|region| region.expandable).map(|region| region.base).collect();
        bases.sort_unstable();
        bases.dedup();
        bases.windows(2).map(|pair| pair[1] - pair[0]).min()
    }
}

/// Walks over the events. Where a block of the starting state would have been chosen and was not, it must have been
/// smaller, if that can be; then the walk begins anew.
fn survey_corrected(tape: Tape<'_>, start: Option<&mut Start>, empty: &Ledger) -> Survey {
    const WALKS_MAX: u32 = 16;
    let Some(start) = start else { return survey(tape, empty.clone()) };
    for _ in 0..WALKS_MAX {
        let found = survey(tape, start.ledger.clone());
        let before = start.corrections;
        for pair in &found.rivalries {
            start.corrections += u64::from(start.ledger.lengthen_before(pair.addr, pair.excess).is_some());
        }
        if start.corrections == before {
            return found;
        }
    }
    survey(tape, start.ledger.clone())
}

fn note_start(start: &Start, notes: &mut Vec<String>) {
    let mib = |bytes: u64| bytes / MIB;
    notes.push(format!(
        "the history starts late: {} MiB were held then, of which {} MiB in use have no known origin; the state was rebuilt backwards from the end",
        mib(start.ledger.bytes()),
        mib(start.bytes_unknown_origin)
    ));
    if start.corrections > 0 {
        notes.push(format!("where {} of the blocks in use then ended was told by what followed", start.corrections));
    }
    if start.misfits > 0 {
        notes.push(format!(
            "{} events could not be undone: the segments at the end do not fit the history",
            start.misfits
        ));
    }
}

fn note_pools(pools: &Pools, misfits: u64, notes: &mut Vec<String>) {
    let inferred = pools.origins.iter().filter(|&&origin| origin == PoolOrigin::Inferred).count();
    if inferred > 0 {
        notes.push(format!(
            "the recording does not name the pools of what was given back before its end: {} segments must have been in {inferred} other \
             pools, and {} were taken to be in the default pool",
            pools.regions_inferred, pools.regions_assumed
        ));
    }
    if pools.contradictions > 0 {
        notes.push(format!(
            "{} choices of the recorded allocator are not explained by any division into pools",
            pools.contradictions
        ));
    }
    if misfits > 0 {
        notes.push(format!("{misfits} events do not fit what was known before them"));
    }
}
