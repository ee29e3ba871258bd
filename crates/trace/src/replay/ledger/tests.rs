//! Short scripts, and pictures of the state.

use warpool::memory::Settings;

use super::*;

const STREAM: u64 = 0;

fn new_ledger(expandable: bool) -> Ledger {
    Ledger::new(Sizes::new(&Settings { expandable_segments: expandable, ..Settings::default() }), false)
}

/// The pieces from address 0 on, in MiB: letters say who has them.
fn picture(ledger: &Ledger) -> String {
    let name = |state| match state {
        BlockState::ActiveAllocated => 'x',
        BlockState::ActivePendingFree => 'p',
        BlockState::Inactive => '.',
    };
    ledger
        .pieces()
        .values()
        .map(|piece| format!("[{} {}]", name(piece.state), piece.bytes as f64 / MIB as f64))
        .collect()
}

#[test]
fn blocks_are_cut_and_joined_as_recorded() {
    let mut ledger = new_ledger(false);
    ledger.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    ledger.take(20 * MIB, 4 * MIB).unwrap();
    ledger.take(24 * MIB, 2 * MIB).unwrap();
    assert_eq!(picture(&ledger), "[x 4][x 2][. 14]");
    ledger.give_back(20 * MIB).unwrap();
    assert_eq!(picture(&ledger), "[p 4][x 2][. 14]");
    ledger.release(20 * MIB).unwrap();
    ledger.take(20 * MIB, 3 * MIB + 512).unwrap();
    assert_eq!(picture(&ledger), "[x 4][x 2][. 14]", "what is left is too small for a block");
    ledger.release(24 * MIB).unwrap();
    ledger.release(20 * MIB).unwrap();
    assert_eq!(picture(&ledger), "[. 20]");
    ledger.remove_segment(20 * MIB, 20 * MIB).unwrap();
    assert_eq!(ledger.bytes(), 0);
}

#[test]
fn backwards_the_unused_end_of_a_block_is_found_again() {
    let mut ledger = new_ledger(false);
    ledger.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    ledger.reinstate(24 * MIB, 2 * MIB).unwrap();
    ledger.reinstate(20 * MIB, 3 * MIB + 512).unwrap();
    assert_eq!(picture(&ledger), "[p 4][p 2][. 14]");
    ledger.hand_back(20 * MIB).unwrap();
    assert_eq!(ledger.hand_back(20 * MIB), None);
    let mut other_order = new_ledger(false);
    other_order.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    other_order.reinstate(20 * MIB, 3 * MIB + 512).unwrap();
    other_order.reinstate(24 * MIB, 2 * MIB).unwrap();
    assert_eq!(picture(&other_order), "[p 4][p 2][. 14]");
}

#[test]
fn ranges_grow_and_shrink() {
    let mut ledger = new_ledger(true);
    let base = 1 << 40;
    let region = ledger.map(base, 20 * MIB, STREAM, None);
    ledger.take(base, 18 * MIB).unwrap();
    assert_eq!(ledger.map(base + 20 * MIB, 20 * MIB, STREAM, None), region);
    assert_eq!(picture(&ledger), "[x 18][. 22]");
    ledger.unmap(base + 20 * MIB, 20 * MIB).unwrap();
    assert_eq!((picture(&ledger).as_str(), ledger.region(region).end), ("[x 18][. 2]", base + 20 * MIB));
    assert_ne!(ledger.map(base + 60 * MIB, 20 * MIB, STREAM, None), region, "a range grows at its end");
    ledger.release(base).unwrap();
    ledger.unmap(base, 20 * MIB).unwrap();
    assert_eq!(ledger.region(region).bytes, 0);
}

#[test]
fn a_boundary_that_is_not_known_can_be_moved() {
    let mut ledger = new_ledger(false);
    ledger.add_segment(20 * MIB, 20 * MIB, STREAM, None);
    ledger.reinstate(20 * MIB, 4 * MIB).unwrap();
    assert_eq!(ledger.lengthen_before(24 * MIB, 2 * MIB), None, "more than can be unused");
    ledger.lengthen_before(24 * MIB, MIB / 2).unwrap();
    assert_eq!(picture(&ledger), "[p 4.5][. 15.5]");
}

#[test]
fn a_better_block_elsewhere_is_a_rival() {
    let mut ledger = new_ledger(false);
    let first = ledger.add_segment(100 * MIB, 20 * MIB, STREAM, None);
    ledger.add_segment(200 * MIB, 30 * MIB, STREAM, None);
    assert_eq!(ledger.rivals(STREAM, 15 * MIB, Some(200 * MIB)), [(100 * MIB, first)]);
    assert_eq!(ledger.rivals(STREAM, 15 * MIB, Some(100 * MIB)), []);
    assert_eq!(ledger.rivals(STREAM, 25 * MIB, Some(200 * MIB)), []);
    assert_eq!(ledger.rivals(STREAM, 15 * MIB, None).len(), 2);
    assert_eq!(ledger.rivals(7, 15 * MIB, None), []);
}
