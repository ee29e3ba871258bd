//! Sleep and wake on the simulated GPU, which tracks contents and order: a lost tag or a hazard is a defect.
//!
//! - `calls`: the result of each call in every state, step by step.
//! - `faults`: every driver call of sleeping and waking fails, once and permanently.
//! - `large`: copies of more than one chunk.
//! - `program`: random programs against a naive model; `defects`: deliberate defects are found by them.
//!
//! `WARPOOL_SWARM_SEED=n` runs the one program of that seed.

mod calls;
mod defects;
mod faults;
mod graphs;
mod large;
mod machine;
mod program;

use warpool_testing::seeds;

#[test]
fn memory_keeps_addresses_and_contents() {
    let mut tally = program::Tally::default();
    let seeds = seeds(120);
    for seed in seeds.clone() {
        assert_eq!(program::defect_of(seed, &mut tally), None, "seed {seed}");
    }
    println!("seeds {seeds:?}: {tally:?}");
    let count = seeds.end - seeds.start;
    assert!(count < 100 || tally.least() > count / 20, "some operation is too rare: {tally:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let [first, second] = [0, 1].map(|_| {
        let mut tally = program::Tally::default();
        (0..20).for_each(|seed| assert_eq!(program::defect_of(seed, &mut tally), None));
        tally
    });
    assert_eq!(first, second);
}
