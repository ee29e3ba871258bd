//! Every example runs on the simulated GPU, without hazards.

use std::process::Command;

fn run(program: &str, arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(program).args(arguments).output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// Runs an example and expects these parts in what it prints.
fn check(program: &str, parts: &[&str]) {
    let (succeeded, out, errors) = run(program, &[]);
    assert!(succeeded, "{out}{errors}");
    for part in parts {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
}

#[test]
fn saxpy() {
    let parts =
        ["the first half sums to 250000", "the second half sums to 749500", "cannot copy 1000 elements into 500"];
    check(env!("CARGO_BIN_EXE_saxpy"), &parts);
}

#[test]
fn staging() {
    check(env!("CARGO_BIN_EXE_staging"), &["12 chunks of 65536 elements squared"]);
}

#[test]
fn decode() {
    check(env!("CARGO_BIN_EXE_decode"), &["24 tokens by replays of one graph: [1, "]);
}

#[test]
fn server_plan() {
    check(env!("CARGO_BIN_EXE_server_plan"), &["2000 requests", "out of memory during service: 0"]);
}

#[test]
fn an_unknown_argument_is_an_error() {
    let (succeeded, _, errors) = run(env!("CARGO_BIN_EXE_saxpy"), &["--cude"]);
    assert!(!succeeded && errors.contains("the only argument is --cuda"), "{errors}");
}
