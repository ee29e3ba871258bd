//! Brings an allocator into the state that a recording began with: regions where they were, cut as they were. Done
//! before anything is counted, with settings that split everywhere, so that any state can be made; the recorded ones
//! come into force at the end.

use warpool::driver::{DevicePtr, ErrorCode};
use warpool::memory::{Allocation, BlockState, CachingAllocator, FreeBlockOrder, SegmentKind, Settings};
use warpool::{Error, Result};

use super::ledger::{Ledger, Region, RegionId};
use super::machine::Machine;
use super::plan::Plan;
use super::pools::{DEFAULT, Pools};
use super::sizes::MIB;
use super::start::Start;

/// What the largest small request is.
const SMALL: u64 = MIB;

/// What is to be built.
#[derive(Clone, Copy)]
pub(super) struct Scene<'a> {
    pub start: &'a Start,
    pub plan: &'a Plan,
    pub pools: &'a Pools,
    /// The settings that come into force at the end.
    pub settings: &'a Settings,
}

impl Scene<'_> {
    /// Builds the state and fills the slots of blocks that somebody has.
    pub fn build(&self, machine: &mut Machine, slots: &mut [Option<Allocation>]) -> Result<()> {
        let Some(caching) = machine.caching() else { return self.take_anywhere(machine, slots) };
        let builder = Builder { machine, ledger: &self.start.ledger, plan: self.plan, pools: self.pools };
        let held = self.get_regions(caching, &builder)?;
        held.into_iter().try_for_each(|block| machine.free(block))?;

        caching.set_settings(Settings { expandable_segments: true, ..plain() });
        let mut waiting = Vec::new();
        for early in &self.plan.early {
            let region = self.start.ledger.pieces()[&early.addr].region;
            let block = builder.take_at(region, early.addr, early.bytes)?;
            let block = Allocation { bytes_requested: early.requested, ..block };
            match early.place {
                None => slots[early.slot as usize] = Some(block),
                Some(place) => waiting.push((block, place)),
            }
        }
        caching.set_settings(self.settings.clone());
        waiting.into_iter().try_for_each(|(block, place)| machine.free_in_use(block, place))
    }

    /// The same blocks, wherever the allocator likes: where its ways are not the recorded ones.
    pub fn take_anywhere(&self, machine: &mut Machine, slots: &mut [Option<Allocation>]) -> Result<()> {
        let Self { start, plan, pools, .. } = *self;
        for early in &plan.early {
            let id = start.ledger.pieces()[&early.addr].region;
            let stream = stream_index(plan, start.ledger.region(id).stream);
            let block = machine.allocate(stream, pools.of(id), early.requested)?;
            match early.place {
                None => slots[early.slot as usize] = Some(block),
                Some(place) => machine.free_in_use(block, place)?,
            }
        }
        Ok(())
    }

    /// Gets all regions at their places, without their holes, and holds what there is of them.
    fn get_regions(&self, caching: &CachingAllocator, builder: &Builder<'_>) -> Result<Vec<Allocation>> {
        let mut held = Vec::new();
        let mut has_holes = false;
        for (id, region) in builder.regions() {
            caching.set_settings(Settings { expandable_segments: region.expandable, ..plain() });
            let filled = builder.fill(id, region)?;
            let runs = builder.runs(id);
            if runs.iter().map(|&(_, bytes)| bytes).sum::<u64>() == region.end - region.base {
                held.extend(filled);
                continue;
            }
            has_holes = true;
            filled.into_iter().try_for_each(|block| builder.machine.free(block))?;
            for (addr, bytes) in runs.into_iter().flat_map(|(addr, bytes)| pieces(addr, bytes, region.kind)) {
                held.push(builder.take_at(id, addr, bytes)?);
            }
        }
        if has_holes {
            builder.machine.trim(DEFAULT)?;
        }
        Ok(held)
    }
}

/// Settings that leave nothing to chance.
fn plain() -> Settings {
    Settings { free_block_order: FreeBlockOrder::Address, ..Settings::default() }
}

fn stream_index(plan: &Plan, stream: u64) -> u16 {
    let at = plan.streams.binary_search(&stream).expect("the plan knows all streams");
    u16::try_from(at).expect("the plan numbers them so")
}

/// A stretch in pieces that a request of its kind can have: small ones are at most 1 MiB.
fn pieces(addr: u64, bytes: u64, kind: SegmentKind) -> Vec<(u64, u64)> {
    let step = match kind {
        SegmentKind::Small => SMALL,
        SegmentKind::Large => bytes,
    };
    let count = bytes.div_ceil(step.max(1));
    (0..count).map(|at| (addr + at * step, step.min(bytes - at * step))).collect()
}

struct Builder<'a> {
    machine: &'a Machine,
    ledger: &'a Ledger,
    plan: &'a Plan,
    pools: &'a Pools,
}

impl Builder<'_> {
    /// What is there, in the order of appearance.
    fn regions(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        let ids = 0..RegionId::try_from(self.ledger.regions().len()).expect("numbered so");
        ids.map(|id| (id, self.ledger.region(id))).filter(|(_, region)| region.bytes > 0)
    }

    /// Gets a region at its place, and holds all of it. Everything else is held too, so nothing else can serve these
    /// requests.
    fn fill(&self, id: RegionId, region: &Region) -> Result<Vec<Allocation>> {
        let base = DevicePtr(region.base);
        if region.expandable {
            self.machine.driver().place_next_reserve(base)?;
        } else {
            self.machine.driver().place_next_alloc(super::machine::DEVICE, base)?;
        }
        let stream = stream_index(self.plan, region.stream);
        let filled = pieces(region.base, region.end - region.base, region.kind)
            .into_iter()
            .map(|(addr, bytes)| {
                let block = self.machine.allocate(stream, self.pools.of(id), bytes)?;
                if block.ptr.0 == addr { Ok(block) } else { Err(misplaced(addr, block.ptr)) }
            })
            .collect();
        self.machine.driver().clear_placements();
        filled
    }

    /// The mapped stretches of a region, without holes.
    fn runs(&self, id: RegionId) -> Vec<(u64, u64)> {
        let region = self.ledger.region(id);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (&addr, piece) in self.ledger.pieces().range(region.base..region.end) {
            match runs.last_mut() {
                _ if piece.region != id => {}
                Some((start, bytes)) if *start + *bytes == addr => *bytes += piece.bytes,
                _ => runs.push((addr, piece.bytes)),
            }
        }
        runs
    }

    fn take_at(&self, id: RegionId, addr: u64, bytes: u64) -> Result<Allocation> {
        let stream = stream_index(self.plan, self.ledger.region(id).stream);
        let request = self.machine.request(stream, self.pools.of(id), bytes);
        let caching = self.machine.caching().expect("only the caching allocator is built piece by piece");
        caching.allocate_at(request, DevicePtr(addr))
    }
}

fn misplaced(addr: u64, got: DevicePtr) -> Error {
    let error = warpool::driver::DriverError::new("place", ErrorCode::InvalidValue);
    error.with_detail(format!("the starting state could not be rebuilt: {} came at {got}", DevicePtr(addr))).into()
}

/// Whether there is anything to build.
pub(super) fn is_needed(start: &Start) -> bool {
    start.ledger.pieces().values().any(|piece| piece.bytes > 0 && piece.state != BlockState::Inactive)
        || start.ledger.bytes() > 0
}
