//! Random programs on the allocator of pinned host memory, over simulated devices.
//!
//! Each program allocates, gives back, lets streams of two devices copy from and to its blocks, holds streams up,
//! trims, changes settings, captures graphs and replays them. Beside it runs a naive model, which knows who has which
//! bytes, which streams may still use them and what must be in them. It knows nothing of segments and classes: what it
//! holds against the allocator is what callers were promised, and what the driver counts.
//!
//! - `machine`: the devices, and work for them whose outcome can be checked.
//! - `model`: who has what, and what must hold after every step.
//! - `program`: the steps with blocks and streams.
//! - `whole`: the steps with the allocator as a whole.
//! - `capture`: graphs that own pinned memory.
//! - `found`: what the above found, made small.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` that many, from
//! `WARPOOL_SWARM_FIRST` on.

mod capture;
mod found;
mod machine;
mod model;
mod program;
mod whole;

use crate::common::rng::seeds;

#[test]
fn nobody_gets_what_another_has_or_a_stream_still_uses() {
    let mut tally = program::Tally::default();
    let seeds = seeds(200);
    for seed in seeds.clone() {
        program::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let program::Tally { allocations, uses, held, waited, trims, caps, pairs, captures, replays, .. } = tally;
    let least = [allocations, uses, held, waited, trims, caps, pairs, captures, replays].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some kind of operation is hardly ever drawn"
    );
}
