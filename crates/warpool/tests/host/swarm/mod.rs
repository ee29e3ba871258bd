//! Random programs on the allocator of pinned host memory, over simulated devices.
//!
//! Each program allocates, frees, lets streams of two devices copy from and to its blocks, pauses streams, trims,
//! changes settings, captures graphs and replays them. A naive model tracks the owner of every byte, the streams that
//! may still use it and its expected content. It does not model segments and size classes: it checks the allocator's
//! contract and compares its counters with the driver's.
//!
//! - `devices`: simulated devices, and work whose result can be checked.
//! - `model`: the model, and what must hold after every step.
//! - `program`: steps with blocks and streams.
//! - `allocator_steps`: steps with the whole allocator.
//! - `capture`: graphs that use pinned memory.
//! - `regressions`: minimal cases of found bugs.
//!
//! `WARPOOL_SWARM_SEED=n` runs the program of that seed, `WARPOOL_SWARM_COUNT=n` runs `n` programs, starting with the
//! seed `WARPOOL_SWARM_FIRST`.

mod allocator_steps;
mod capture;
mod devices;
mod model;
mod program;
mod regressions;

use crate::common::rng::seeds;

#[test]
fn no_block_is_reused_while_it_is_in_use() {
    let mut counts = program::Counts::default();
    let seeds = seeds(200);
    for seed in seeds.clone() {
        program::run(seed, &mut counts);
    }
    println!("seeds {seeds:?}: {counts:?}");
    let program::Counts { allocations, uses, pauses, pending, trims, refusals, pairs, captures, replays, .. } = counts;
    let min = [allocations, uses, pauses, pending, trims, refusals, pairs, captures, replays].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || min > Some((seeds.end - seeds.start) / 20),
        "some operation is hardly ever drawn"
    );
}
