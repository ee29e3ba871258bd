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

#[path = "memory_swarm/alarm.rs"]
mod alarm;
#[path = "host_swarm/capture.rs"]
mod capture;
#[path = "common/dice.rs"]
mod dice;
#[path = "host_swarm/found.rs"]
mod found;
#[path = "host_swarm/machine.rs"]
mod machine;
#[path = "host_swarm/model.rs"]
mod model;
#[path = "host_swarm/program.rs"]
mod program;
#[path = "host_swarm/whole.rs"]
mod whole;

use dice::seeds;

#[test]
fn nobody_gets_what_another_has_or_a_stream_still_uses() {
    let mut tally = program::Tally::default();
    let seeds = seeds(2000);
    for seed in seeds.clone() {
        program::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let program::Tally { allocations, uses, held, waited, trims, caps, pairs, captures, replays, .. } = tally;
    let least = [allocations, uses, held, waited, trims, caps, pairs, captures, replays].into_iter().min();
    assert!(seeds.end - seeds.start < 1000 || least > Some(300), "something hardly ever happens");
}
