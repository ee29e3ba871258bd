//! Random programs on the paged allocator, over a small simulated device, so that pages are taken between heaps all the
//! time. The simulation knows contents and order: a lost tag or a hazard is a defect of the allocator.
//!
//! - `program`: one thread, several streams, pools, captures and replays, limits, trims, driver calls that fail.
//! - `bystanders`: streams that use a block although nobody said so.
//! - `contention`: heaps that take the same page from each other.
//! - `defects`: deliberate defects are found.
//! - `faults`: every driver call of fixed programs fails once.
//! - `graph_pools`: what a captured graph needs of its pages, step by step.
//! - `models`: the parts without a mutex, under many interleavings.
//! - `shortage`: requests when memory is short, step by step.
//! - `threads`: several threads at once.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed, `WARPOOL_SWARM_COUNT=n` that many, from
//! `WARPOOL_SWARM_FIRST` on.

mod bystanders;
mod contention;
mod defects;
mod faults;
mod graph_pools;
mod machine;
mod model;
mod models;
mod program;
mod shortage;
mod spin_lock;
mod threads;

use warpool_testing::seeds;

#[test]
fn no_page_is_shared_by_two_owners() {
    let mut tally = program::Tally::default();
    let seeds = seeds(300);
    for seed in seeds.clone() {
        program::run(seed, &mut tally);
    }
    println!("seeds {seeds:?}: {tally:?}");
    let count = seeds.end - seeds.start;
    assert!(count < 100 || tally.least() > count / 20, "some operation is too rare: {tally:?}");
}

/// Programs that found a defect once, and are too rare to be found again by chance.
#[test]
fn found_defects_do_not_come_back() {
    // A request ran out of memory although another window had room: it counted free pages in the window as a gain, but
    // they could be taken anywhere, and what was free beside a block stayed unused.
    program::run(4971, &mut program::Tally::default());
}

#[test]
fn threads_take_pages_from_each_other() {
    for seed in seeds(6) {
        threads::run(seed, 600);
    }
}
