//! Random programs on the caching allocator, over simulated devices.
//!
//! - `placement`: against a naive model that says where every block must be and what the driver must be asked, after
//!   every step.
//! - `contents`: with real work on the memory, on several streams, in captures and graphs: no block is overwritten by
//!   another's owner, no hazard, nothing left behind.
//! - `threads`: several threads at once, with little memory.
//! - `found`: what the above found, made small.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` that many, from
//! `WARPOOL_SWARM_FIRST` on.

#[path = "memory_swarm/alarm.rs"]
mod alarm;
#[path = "memory_swarm/contents.rs"]
mod contents;
#[path = "common/dice.rs"]
mod dice;
#[path = "memory_swarm/found.rs"]
mod found;
#[path = "memory_swarm/machine.rs"]
mod machine;
#[path = "memory_swarm/model.rs"]
mod model;
#[path = "memory_swarm/placement.rs"]
mod placement;
#[path = "memory_swarm/script.rs"]
mod script;
#[path = "memory_swarm/threads.rs"]
mod threads;

use dice::seeds;

#[test]
fn blocks_are_where_the_naive_model_puts_them() {
    let mut tally = placement::Tally::default();
    let seeds = seeds(6000);
    for seed in seeds.clone() {
        placement::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let placement::Tally { retries, ooms, captures, marks, pools, grown, oversize, .. } = tally;
    let least = [retries, ooms, captures, marks, pools, grown, oversize].into_iter().min();
    assert!(seeds.end - seeds.start < 1000 || least > Some(500), "something hardly ever happens");
}

#[test]
fn nobody_overwrites_what_another_has() {
    let mut tally = contents::Tally::default();
    let seeds = seeds(10_000);
    for seed in seeds.clone() {
        contents::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let contents::Tally { allocations, uses, captures, launches, ooms, retries } = tally;
    let least = [allocations, uses, captures, launches, ooms, retries].into_iter().min();
    assert!(seeds.end - seeds.start < 1000 || least > Some(500), "something hardly ever happens");
}

#[test]
fn threads_neither_hang_nor_lose_anything() {
    for seed in seeds(100) {
        threads::run(seed, 1000);
    }
}
