//! `record` without CUDA: what the command gets, its exit status, and what cannot be recorded. What is counted is
//! tested in `crates/inject`, and with the allocator in `python/tests/test_account.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::text;

/// A folder of this test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("record-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles a program or a library; false, which is said, without a compiler.
fn compiled(source: &str, options: &[&str], to: &Path) -> bool {
    let file = to.with_extension("c");
    fs::write(&file, source).unwrap();
    let done = Command::new("cc").args(options).arg(&file).arg("-o").arg(to).output();
    let done = done.is_ok_and(|output| output.status.success());
    if !done {
        eprintln!("!!! NOT CHECKED: cc cannot compile with {options:?}, so this test did nothing !!!");
    }
    done
}

/// Runs `record` with a library that does nothing.
fn record(folder: &Path, options: &[&str], command: &[&str]) -> Option<Output> {
    let library = folder.join("libnothing.so");
    if !library.exists() && !compiled("int nothing;", &["-shared", "-fPIC"], &library) {
        return None;
    }
    let mut run = Command::new(env!("CARGO_BIN_EXE_warpool"));
    run.arg("record").args(options).arg("--").args(command).current_dir(folder);
    run.env("WARPOOL_INJECT_LIBRARY", &library).env_remove("WARPOOL_RECORD_DIR").env_remove("LD_PRELOAD");
    Some(run.env_remove("WARPOOL_CONF").output().unwrap())
}

#[test]
fn the_command_has_the_library_and_the_recorder() {
    let folder = folder("environment");
    let print = "echo $LD_PRELOAD; echo $WARPOOL_CONF; echo $WARPOOL_RECORD_DIR; ls -d $WARPOOL_ACCOUNT_DIR; exit 7";
    let Some(output) = record(&folder, &[], &["sh", "-c", print]) else { return };
    assert_eq!(output.status.code(), Some(7));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let folder = folder.canonicalize().unwrap();
    assert_eq!(lines[0], folder.join("libnothing.so").display().to_string());
    assert_eq!(lines[1], "record:oom");
    assert_eq!(lines[2], folder.join("warpool-records").display().to_string());
    assert!(!Path::new(lines[3]).exists(), "{} is left", lines[3]);
    assert!(text(&output.stderr).contains("no process of the command used CUDA"), "{}", text(&output.stderr));
}

#[test]
fn accounts_and_recordings_that_the_command_writes_are_shown() {
    let folder = folder("written");
    fs::create_dir(folder.join("records")).unwrap();
    fs::write(folder.join("records/warpool-rank0-pid1-1-oom.pickle"), "before").unwrap();
    let account = r#"{"version":1,"pid":12,"devices":[{"device":0,"uuid":"00","total":1000000000,"used":5,
        "before":100000000,"rows":[],"most":{"used":700000000,"rows":[
        {"owner":"CUDA","kind":"context","bytes":400000000},
        {"owner":"cuBLAS","kind":"allocations","bytes":190000000}]}}]}"#;
    let write = format!(
        "printf '%s' '{account}' > $WARPOOL_ACCOUNT_DIR/account-12.json
        echo no > $WARPOOL_ACCOUNT_DIR/account-13.json
        echo > $WARPOOL_RECORD_DIR/warpool-rank0-pid12-2-oom.pickle; echo printed"
    );
    let options = ["--dir", "records"];
    let Some(output) = record(&folder, &options, &["sh", "-c", &write]) else { return };
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "printed\n"));
    let stderr = text(&output.stderr);
    for part in ["process 12", "57.1%  CUDA: context", "cuBLAS: allocations", "other processes", "9.5 MiB"] {
        assert!(stderr.contains(part), "{part} is missing: {stderr}");
    }
    assert!(stderr.contains("pid12-2-oom.pickle") && !stderr.contains("pid1-1-oom.pickle"), "{stderr}");

    let Some(output) = record(&folder, &["--dir", "records", "--json"], &["sh", "-c", &write]) else { return };
    let object: Value = serde_json::from_str(text(&output.stdout)).expect("one JSON object, and nothing else");
    assert!(text(&output.stderr).contains("printed"));
    let device = &object["processes"][0]["devices"][0];
    assert_eq!((&object["processes"][0]["pid"], &device["used_bytes"]), (&12.into(), &700_000_000.into()));
    assert_eq!(device["unexplained_bytes"], 10_000_000);
    // The file is replaced, so it is none that is new.
    assert_eq!(object["recordings"].as_array().unwrap().len(), 0);
}

#[test]
fn a_signal_is_told_as_a_shell_does() {
    let Some(output) = record(&folder("signal"), &["-q"], &["sh", "-c", "kill -9 $$"]) else { return };
    assert_eq!(output.status.code(), Some(128 + 9));
}

#[test]
fn what_cannot_be_recorded_is_an_error() {
    let folder = folder("refused");
    let refused = |output: Output, part: &str| {
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("warpool: ") && stderr.contains(part), "{stderr}");
    };
    let Some(output) = record(&folder, &[], &["./no-such-program"]) else { return };
    refused(output, "cannot be started");
    refused(record(&folder, &["--library", "no-such-file"], &["true"]).unwrap(), "no-such-file is not a file");
    fs::copy(folder.join("libnothing.so"), folder.join("a space.so")).unwrap();
    refused(record(&folder, &["--library", "a space.so"], &["true"]).unwrap(), "a space or a colon");
    if compiled("int main(void) { return 0; }", &["-static"], &folder.join("static")) {
        refused(record(&folder, &[], &["./static"]).unwrap(), "is statically linked");
    }
}
