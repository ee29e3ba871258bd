//! The registry of suites, and what expectations say when they fail.

use std::collections::BTreeSet;

use warpool_conformance::expect::{expect_eq, expect_slice_eq};
use warpool_conformance::{CheckResult, Level, SUITES, Suite, suites};
use warpool_driver::{DriverError, ErrorCode};

#[test]
fn names_are_unique() {
    let (mut suites, mut checks) = (BTreeSet::new(), BTreeSet::new());
    for suite in SUITES {
        assert!(suites.insert(suite.name), "two suites {}", suite.name);
        for check in suite.checks {
            assert!(checks.insert((suite.name, check.name)), "two checks {}.{}", suite.name, check.name);
        }
    }
    assert!(checks.len() >= 423, "{} checks: none may get lost", checks.len());
}

#[test]
fn destructive_suites_run_last() {
    let extra = [Suite::new("extra", Level::Driver, &[])];
    let names: Vec<&str> = suites(&extra).map(|suite| suite.name).collect();
    assert_eq!(names[names.len() - 3..], ["pinned", "extra", "errors"]);
}

#[test]
fn an_error_names_its_source_line() {
    let text = expect_eq("sum", 1, 2).unwrap_err().to_string();
    assert!(text.starts_with("sum: expected 2, got 1 (at expectations.rs:"), "{text}");

    let line = line!() + 2;
    let failing = || -> CheckResult {
        Err(DriverError::new("mem_alloc", ErrorCode::OutOfMemory))?;
        Ok(())
    };
    let text = failing().unwrap_err().to_string();
    assert!(text.ends_with(&format!("(at expectations.rs:{line})")), "{text} should name line {line}");
}

#[test]
fn the_first_difference_is_reported() {
    let text = expect_slice_eq("bytes", &[1, 2, 3], &[1, 5, 6]).unwrap_err().to_string();
    assert!(text.starts_with("bytes: at 1 expected 5, got 2 (2 of 3 differ)"), "{text}");
}
