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

mod contents;
mod found;
mod machine;
mod model;
mod placement;
mod script;
mod threads;

use crate::common::rng::seeds;

#[test]
fn blocks_are_where_the_naive_model_puts_them() {
    let mut tally = placement::Tally::default();
    let seeds = seeds(600);
    for seed in seeds.clone() {
        placement::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let placement::Tally { retries, ooms, captures, marks, pools, grown, oversize, .. } = tally;
    let least = [retries, ooms, captures, marks, pools, grown, oversize].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some kind of operation is hardly ever drawn"
    );
}

#[test]
fn nobody_overwrites_what_another_has() {
    let mut tally = contents::Tally::default();
    let seeds = seeds(1000);
    for seed in seeds.clone() {
        contents::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let contents::Tally { allocations, uses, captures, launches, ooms, retries } = tally;
    let least = [allocations, uses, captures, launches, ooms, retries].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some kind of operation is hardly ever drawn"
    );
}

#[test]
fn threads_neither_hang_nor_lose_anything() {
    for seed in seeds(10) {
        threads::run(seed, 1000);
    }
}
