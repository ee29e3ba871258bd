//! Random programs on the caching allocator, over simulated devices.
//!
//! - `placement`: compared with a naive model of every block's address and of the driver calls, after every step.
//! - `contents`: with work on the memory, on several streams, in captures and graphs: no block is overwritten by
//!   another's owner, no hazard, no leak.
//! - `threads`: several threads at once, with little memory.
//! - `regressions`: bugs that these tests found, reduced.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` runs `n` programs, starting with
//! the seed `WARPOOL_SWARM_FIRST`.

mod contents;
mod driver_calls;
mod machine;
mod model;
mod placement;
mod regressions;
mod threads;

use crate::common::rng::seeds;

#[test]
fn placement_matches_the_naive_model() {
    let mut tally = placement::Tally::default();
    let seeds = seeds(600);
    for seed in seeds.clone() {
        placement::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let placement::Tally { retries, ooms, captures, fences, pools, expandable, oversize, .. } = tally;
    let least = [retries, ooms, captures, fences, pools, expandable, oversize].into_iter().min();
    assert!(
        seeds.end - seeds.start < 100 || least > Some((seeds.end - seeds.start) / 20),
        "some operation is too rare"
    );
}

#[test]
fn blocks_are_never_overwritten_by_other_owners() {
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
        "some operation is too rare"
    );
}

#[test]
fn threads_do_not_deadlock_or_leak() {
    for seed in seeds(10) {
        threads::run(seed, 1000);
    }
}
