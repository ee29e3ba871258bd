//! Verdicts, on one program for each case.

use warpool::memory::report::{AccountRow, DeviceAccount, Snapshot};
use warpool_trace::explain::{Change, ExplainOptions, Explanation, Verdict, explain};

use crate::common::recording;
use crate::program::{self, GIB};

fn explained(snapshot: &Snapshot, options: &ExplainOptions<'_>) -> Explanation {
    let mut explanations = explain(snapshot, options).expect("a recording");
    assert_eq!(explanations.len(), 1);
    explanations.remove(0)
}

fn quick() -> ExplainOptions<'static> {
    ExplainOptions { skips_fits: true, ..ExplainOptions::default() }
}

/// The device of all the programs.
fn on_h200() -> ExplainOptions<'static> {
    ExplainOptions { capacity: Some(150_109_880_320), ..quick() }
}

fn check(snapshot: &Snapshot, verdict: Verdict) {
    let explanation = explained(snapshot, &on_h200());
    let moment = explanation.moment();
    assert_eq!(explanation.verdict, verdict, "{:?} {:?}", explanation.evidence, moment.parts);
    assert_eq!(Some(moment.parts.total()), explanation.device_bytes_total);
    assert_eq!(explanation.exact, Some(true), "{verdict:?}: the replay reproduces it");
}

#[test]
fn each_case_has_its_verdict() {
    check(&program::too_much(), Verdict::LiveExceedsDevice);
    check(&program::limited(), Verdict::Limit);
    check(&program::fragmented(), Verdict::Fragmentation);
    check(&program::other_stream(), Verdict::OtherStreamOrPool);
    check(&program::other_pool(), Verdict::OtherStreamOrPool);
    check(&program::outside(), Verdict::Outside);
    check(&program::growing(), Verdict::Growth);
}

#[test]
fn recordings_of_each_case_have_its_verdict() {
    for (name, verdict) in [
        ("verdict.fragmentation", Verdict::Fragmentation),
        ("verdict.growth", Verdict::Growth),
        ("verdict.limit", Verdict::Limit),
        ("verdict.live_exceeds_device", Verdict::LiveExceedsDevice),
        ("verdict.other_pool", Verdict::OtherStreamOrPool),
        ("verdict.other_stream", Verdict::OtherStreamOrPool),
        ("verdict.outside", Verdict::Outside),
        // Made by PyTorch.
        ("device_full.native", Verdict::LiveExceedsDevice),
        ("device_full.expandable", Verdict::LiveExceedsDevice),
        ("oom_stacks.fraction_6gib", Verdict::Fragmentation),
        ("resnet_train.native", Verdict::Fitted),
        ("leak.default", Verdict::Growth),
        ("oom_device.default", Verdict::LiveExceedsDevice),
        ("oom_limit.default", Verdict::Fragmentation),
    ] {
        let explanation = explained(&recording(&format!("{name}.pickle.xz")).snapshot, &on_h200());
        let moment = explanation.moment();
        assert_eq!(explanation.verdict, verdict, "{name}: {:?} {:?}", explanation.evidence, moment.parts);
    }
}

#[test]
fn growth_is_named_by_line() {
    let explanation = explained(&program::growing(), &quick());
    let growth = explanation.growth.as_ref().expect("it grows");
    assert!(growth.iterations > 10, "{growth:?}");
    let largest = &growth.holders[0];
    assert_eq!(largest.line.as_deref(), Some("losses (train.py:108)"), "{growth:?}");
    assert_eq!(largest.bytes, largest.count * (96 << 20));
}

#[test]
fn programs_that_do_not_grow_have_no_growth() {
    let names = "resnet_train.native prefetch_streams_train.native oom_stacks.fraction_6gib churn.gc_call \
                 oom_device.default oom_limit.default train.default streams.default";
    for name in names.split_whitespace() {
        let explanation = explained(&recording(&format!("{name}.pickle.xz")).snapshot, &quick());
        assert!(explanation.growth.is_none(), "{name}: {:?}", explanation.growth);
    }
}

#[test]
fn what_would_have_fitted_is_found_by_replays() {
    let options = ExplainOptions { address_orders: Some(2), ..ExplainOptions::default() };
    let limited = explained(&program::limited(), &options);
    let first = limited.fits.first().expect("something was tried");
    assert_eq!((first.change, first.fits), (Change::Limit, true), "{:?}", limited.fits);
    assert_eq!(first.set, "per_process_memory_fraction:1.0");

    let fragmented = explained(&program::fragmented(), &options);
    let first = fragmented.fits.first().expect("something was tried");
    assert_eq!(
        (first.change, first.set.as_str()),
        (Change::Settings, "expandable_segments:True"),
        "{:?}",
        fragmented.fits
    );
    let paged = fragmented.fits.iter().find(|fit| fit.change == Change::Allocator).expect("the paged allocator");
    assert!(paged.fits && paged.set == "backend:paged" && paged.variable == "WARPOOL_CONF", "{paged:?}");

    let known = ExplainOptions { capacity: Some(150_109_880_320), ..options.clone() };
    let outside = explained(&program::outside(), &known);
    let first = outside.fits.first().expect("something was tried");
    assert_eq!((first.change, first.fits, first.set.as_str()), (Change::Others, true, "20.1GiB"), "{:?}", outside.fits);

    let too_much = explained(&program::too_much(), &options);
    let fitting: Vec<_> = too_much.fits.iter().filter(|fit| fit.fits).collect();
    assert!(fitting.iter().all(|fit| fit.change == Change::Device), "only a larger device: {fitting:?}");
    assert!(fitting.iter().any(|fit| fit.device_bytes_total > Some(139 * GIB)), "{:?}", too_much.fits);
}

#[test]
fn nothing_is_said_about_the_rest_of_a_device_of_unknown_size() {
    let options = ExplainOptions { address_orders: Some(2), ..ExplainOptions::default() };
    let explanation = explained(&program::outside(), &options);
    assert!(explanation.remarks[0].contains("--gpu or --capacity"), "{:?}", explanation.remarks);
    let moment = explanation.moment();
    assert_eq!((explanation.device_bytes_total, moment.parts.outside), (None, 0), "{:?}", moment.parts);
    let evidence = &explanation.evidence;
    assert!(evidence.iter().any(|text| text.contains("had 19.3 GiB for this program")), "{evidence:?}");
    assert!(explanation.fits.iter().all(|fit| fit.change != Change::Others), "{:?}", explanation.fits);
    let known = ExplainOptions { capacity: Some(150_109_880_320), ..quick() };
    let explanation = explained(&program::outside(), &known);
    assert!(!explanation.remarks.iter().any(|remark| remark.contains("--capacity")), "{:?}", explanation.remarks);
}

/// What an account says about the time of the recording counts where the state is of that time.
#[test]
fn an_account_is_part_of_the_explanation() {
    let mut snapshot = program::outside();
    assert_eq!(explained(&snapshot, &on_h200()).account, None);
    let row = |owner: &str, what: &str, bytes| AccountRow {
        owner: owner.to_owned(),
        what: what.to_owned(),
        bytes,
        ..AccountRow::default()
    };
    let account = DeviceAccount {
        device: 0,
        total: 150_109_880_320,
        used: 100 * GIB,
        rows: vec![row("the allocator", "reserved", 9 * GIB), row("the allocator", "beyond what it has reserved", GIB)],
        remarks: vec![],
    };
    snapshot.accounts = vec![DeviceAccount { device: 7, ..account.clone() }, account.clone()];
    let explanation = explained(&snapshot, &on_h200());
    assert_eq!((explanation.account.as_ref(), account.outside()), (Some(&account), 91 * GIB));
    assert_eq!(account.unexplained(), 90 * GIB as i64);
    // With a history its own figures count: the device was full then.
    assert_eq!(explanation.moment().parts, explained(&program::outside(), &on_h200()).moment().parts);
    snapshot.traces.clear();
    assert_eq!(explained(&snapshot, &on_h200()).moment().parts.outside, 91 * GIB);
}
