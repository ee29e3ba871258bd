//! Where output goes: a stderr that cannot be written to, narrow tables, recordings without times and logs of RMM.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::{objects, run, text, warpool};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data");
const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings/mempool.native.pickle.xz");

/// The exit status with a stderr on which every write fails.
#[cfg(target_os = "linux")]
fn status_without_stderr(arguments: &[&str]) -> Vec<Option<i32>> {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("Linux has it"));
    // The other end is closed at once.
    let closed = || Stdio::from(std::io::pipe().expect("a pipe").1);
    [full(), closed()]
        .map(|stderr| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_warpool"));
            command.args(arguments).stdout(Stdio::null()).stderr(stderr);
            command.env("PYTORCH_CUDA_ALLOC_CONF", "nonsense").status().expect("the binary was built").code()
        })
        .to_vec()
}

#[test]
#[cfg(target_os = "linux")]
fn stderr_that_fails_does_not_change_the_exit_status() {
    for (arguments, status) in [
        (&["explain", "missing.pickle"][..], 2),
        (&["replay", "--nonsense"], 2),
        (&["replay"], 2),
        (&[], 2),
        (&["replay", RECORDING, "--capacity", "24"], 2),
        (&["replay", RECORDING], 0),
        (&["settings", "max_split_size_mb:200"], 0),
    ] {
        assert_eq!(status_without_stderr(arguments), [Some(status); 2], "{arguments:?}");
    }
}

#[test]
fn columns_limit_the_width_where_there_is_no_terminal() {
    for width in [40, 80, 100, 132] {
        let command = Command::new(env!("CARGO_BIN_EXE_warpool"))
            .args(["replay", RECORDING, "--set", "max_split_size_mb:20", "--legend"])
            .env("COLUMNS", width.to_string())
            .output();
        let output = command.expect("the binary was built for this test");
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let widest = lines.iter().max_by_key(|line| line.chars().count()).expect("there is output");
        assert!(widest.chars().count() <= width, "{width}: {widest}");
        let name = lines.concat().replace(' ', "");
        assert!(name.contains("mempool.native.pickle.xz"), "{width}");
    }
}

#[test]
fn recording_without_times_names_no_times() {
    let file = format!("{DATA}/torch_2_0.pickle");
    for object in objects(&["replay", &file, "--json"], 0) {
        assert!(object["steady"].is_null() && object["recorded_seconds"].is_null());
        let difference = object["fidelity"]["first_difference"].as_str().unwrap_or_default();
        assert!(!difference.contains(" ms"), "{difference}");
    }
    let page = std::env::temp_dir().join(format!("warpool-{}-no-times.html", std::process::id()));
    let viewed = &objects(&["view", &file, "-o", page.to_str().expect("a path"), "--json"], 0)[0];
    let device = &viewed["devices"][0];
    for time in [&device["moment"]["time_us"], &device["peak_live"]["time_us"], &device["peak_reserved"]["time_us"]] {
        assert!(time.is_null(), "{device}");
    }
    std::fs::remove_file(page).expect("it was written");
}

#[test]
fn log_of_rmm_gets_no_advice_for_pytorch() {
    let log = format!("{DATA}/rmm.csv");
    let replayed = warpool(&["replay", &log]);
    let shown = text(&replayed.stdout);
    assert!(shown.contains("an RMM log; replayed with PyTorch's caching allocator"), "{shown}");
    assert!(objects(&["replay", &log, "--json"], 0)[0]["steady"].is_null());
    let failed = warpool(&["replay", &log, "--capacity", "1GiB"]);
    let shown = text(&failed.stdout);
    assert!(shown.contains("out of memory") && !shown.contains("expandable_segments"), "{shown}");
    assert!(!shown.contains("as recorded;"), "{shown}");
    let tuned = warpool(&["tune", &log, "--orders", "1"]);
    let shown = text(&tuned.stdout);
    assert!(shown.contains("RMM has none of these settings"), "{shown}");
    assert!(!shown.contains("_CONF=") && !shown.contains("Recommended"), "{shown}");
}

#[test]
fn recording_in_an_archive_is_a_file_like_any_other() {
    let replayed = run(&format!("replay {DATA}/ranks.tar.xz"));
    let stderr = text(&replayed.stderr);
    assert_eq!(replayed.status.code(), Some(2));
    assert!(stderr.contains("it has 2 recordings (ranks/rank0.pickle, ranks/rank1.pickle)"), "{stderr}");
}
