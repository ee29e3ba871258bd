//! A number of programs of each campaign, always the same; N times as many with `WARPOOL_TEST_SCALE=N`. A campaign that
//! hardly ever does what it is about tests nothing, so that is counted too.
//!
//! The campaigns `lifetime` and `recordings` run in the tests of the command: the first measures the memory of its
//! process, in which nothing else may run.

use std::ops::ControlFlow;

use warpool_soak::{Campaign, CampaignReport, Length, Options, run};
use warpool_testing::scaled;

/// Runs programs, which must find nothing. Together they must do each of these at least once in 25 programs.
fn find_nothing(campaign: Campaign, programs: u64, kinds: &[&str]) {
    let length = Length::Programs(scaled(programs));
    let options = Options { seed: 0, campaigns: vec![campaign], length, skip: Vec::new(), broken: false };
    let report = run(&options, &mut |_| ControlFlow::Continue(()));
    if let Some(found) = report.violation {
        let name = campaign.name();
        let steps = found.steps.join("\n");
        panic!("{steps}\n{}\nwarpool soak --seed 0 --campaign {name} --program {}", found.message, found.program);
    }
    let [CampaignReport { counts, kinds: made, .. }] = &report.campaigns[..] else { panic!("one campaign") };
    println!("{counts:?}, {made:?}");
    for &kind in kinds {
        let times = match kind {
            "faults" => counts.faults,
            "panics" => counts.panics,
            "out of memory" => counts.out_of_memory,
            "captures" => counts.captures,
            "failed captures" => counts.captures_failed,
            "replays" => counts.replays,
            other => made.get(other).copied().unwrap_or_default(),
        };
        assert!(times > counts.programs / 25, "{kind}: {times} times in {} programs", counts.programs);
    }
}

#[test]
fn placement_is_that_of_a_naive_model() {
    let kinds = ["retry", "out of memory", "captures", "fence", "pool", "expandable", "oversize"];
    find_nothing(Campaign::Placement, 600, &kinds);
}

#[test]
fn blocks_are_never_overwritten_by_other_owners() {
    let kinds = ["faults", "panics", "out of memory", "captures", "replays", "use elsewhere"];
    find_nothing(Campaign::Device, 200, &kinds);
}

#[test]
fn no_page_is_shared_by_two_owners() {
    let kinds = ["faults", "out of memory", "captures", "replays", "use elsewhere", "pool", "shortage"];
    let pages = ["page taken", "page taken back", "old mapping undone", "decay"];
    find_nothing(Campaign::Pages, 100, &[&kinds[..], &pages].concat());
}

#[test]
fn elastic_memory_has_the_contents_of_a_model() {
    let kinds = ["faults", "out of memory", "captures", "replays", "commit", "commit failed", "headroom", "decay"];
    find_nothing(Campaign::Elastic, 150, &kinds);
}

#[test]
fn registrations_follow_memory_and_stable_memory_stays() {
    let kinds = ["faults", "out of memory", "send", "stable send", "stable segment", "trim", "pool replaced"];
    find_nothing(Campaign::Registered, 150, &kinds);
}

#[test]
fn processes_that_share_a_card_never_have_more_than_it_has() {
    let kinds = ["faults", "out of memory", "started", "ended", "killed", "killed in a call", "in another call"];
    find_nothing(Campaign::Share, 100, &[&kinds[..], &["given", "decayed or given", "commit", "all"]].concat());
}

#[test]
fn captured_work_leaves_what_it_would_leave_without_a_graph() {
    let kinds = ["captures", "failed captures", "replays", "reset", "product", "random numbers", "body"];
    find_nothing(Campaign::Replays, 200, &[&kinds[..], &["other thread", "ended by another thread"]].concat());
}

#[test]
fn graphs_own_their_memory_whatever_fails() {
    find_nothing(Campaign::Captures, 200, &["faults", "captures", "failed captures", "replays"]);
}

#[test]
fn streams_come_and_go() {
    find_nothing(Campaign::Streams, 200, &["faults", "out of memory"]);
}

#[test]
fn typed_memory_has_the_contents_of_a_model() {
    find_nothing(Campaign::Typed, 200, &["faults", "captures", "replays"]);
}

#[test]
fn memory_that_slept_keeps_addresses_and_contents() {
    let kinds = ["faults", "out of memory", "captures", "replays", "refused", "freed asleep", "slept", "discarded"];
    let more = ["woken", "sleep failed", "wake failed", "replay refused", "limited"];
    find_nothing(Campaign::Sleep, 60, &[&kinds[..], &more].concat());
}

#[test]
fn pinned_memory_is_not_reused_while_it_is_in_use() {
    let kinds = ["faults", "panics", "out of memory", "captures", "replays", "drained", "pair", "trim", "refusal"];
    find_nothing(Campaign::Host, 400, &kinds);
}

#[test]
fn threads_do_not_deadlock_or_leak() {
    find_nothing(Campaign::Threads, 60, &["faults", "out of memory", "captures", "replays"]);
}
