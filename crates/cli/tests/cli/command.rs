//! `info`, `selftest`, `bench`, the help, and wrong usage.

use std::io::Read as _;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::{run, text};

fn objects(arguments: &str, status: i32) -> Vec<Value> {
    crate::objects(&arguments.split_whitespace().collect::<Vec<_>>(), status)
}

fn assert_usage_error(arguments: &str, parts: &[&str]) {
    crate::assert_usage_error(&arguments.split_whitespace().collect::<Vec<_>>(), parts);
}

fn rows(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).filter(|&key| key != "schema_version").collect()
}

/// Whether CUDA finds a GPU on this machine.
fn has_cuda() -> bool {
    objects("info --json", 0).iter().any(|o| o["kind"] == "driver" && o["driver"] == "cuda" && o["available"] == true)
}

#[test]
fn unknown_names_are_usage_errors() {
    assert_usage_error("info --driver vulkan", &["unknown driver 'vulkan'", "sim", "cuda"]);
    assert_usage_error("selftest --driver vulkan", &["unknown driver 'vulkan'"]);
    assert_usage_error("selftest --driver sim --device 9", &["no device 9", "0 to 1"]);
    assert_usage_error("selftest --driver sim --sim-devices 1 --device 1", &["no device 1", "only device 0"]);
    assert_usage_error(
        "selftest --driver sim --suite nonsense",
        &["no suite 'nonsense'", "streams", "capture", "processes"],
    );
    assert_usage_error("selftest --driver sim --suite errors --no-destructive", &["'errors'", "--no-destructive"]);
    assert_usage_error("bench nonsense", &["unknown benchmark 'nonsense'", "sim", "driver"]);
    assert_usage_error("bench sim --driver cuda", &["bench sim", "cuda"]);
    assert_usage_error("bench driver", &["--driver", "sim", "cuda"]);
    assert_usage_error("bench driver --driver sim --device 7", &["no device 7"]);
    assert_usage_error("bench handles", &["--driver", "sim", "cuda"]);
    assert_usage_error("bench graph", &["--driver", "sim", "cuda"]);
    assert_usage_error("bench host", &["--driver", "sim", "cuda"]);
    assert_usage_error("bench scale --driver cuda", &["bench scale", "sim"]);
    assert_usage_error("bench graph --driver rocm", &["rocm", "sim", "cuda"]);
    assert_usage_error("info --driver cuda --sim-devices 2", &["--sim-devices", "sim"]);
}

#[test]
fn invalid_arguments_are_usage_errors() {
    assert_usage_error("selftest", &["--driver"]);
    assert_usage_error("nonsense", &["nonsense"]);
    assert_usage_error("info --nonsense", &["--nonsense"]);
    assert_usage_error("selftest --driver sim --device x", &["--device"]);
    assert_usage_error("selftest --driver sim --seed -1", &["-1"]);
    assert_usage_error("bench", &["<BENCHMARK>", "--help"]);
    assert_usage_error("bench sim --ops 0", &["--ops"]);
    assert_usage_error("info --sim-memory 512MiB", &["--sim-memory", "from 1 GiB to 16 TiB"]);
    assert_usage_error("selftest --driver sim --sim-devices 0", &["--sim-devices", "1..=64"]);
    assert_usage_error("info --driver sim --sim-memory 80apples", &["'80apples' is not a size", "GiB"]);
}

#[test]
fn missing_cuda_is_an_error_without_fallback() {
    if has_cuda() {
        let objects = objects("info --driver cuda --json", 0);
        assert!(objects.iter().all(|object| object["driver"] != "sim"));
        return;
    }
    assert_usage_error("info --driver cuda", &["cuda", "libcuda"]);
    assert_usage_error("selftest --driver cuda", &["libcuda"]);
    assert_usage_error("bench driver --driver cuda", &["libcuda"]);
}

#[test]
fn info_lists_every_device_and_library() {
    let objects = objects("info --driver sim --sim-devices 3 --sim-memory 80GiB --json", 0);
    let devices: Vec<&Value> = objects.iter().filter(|object| object["kind"] == "device").collect();
    assert_eq!(devices.len(), 3);
    assert_eq!(devices[1]["bytes_total"], 80u64 << 30);
    assert_eq!(devices[1]["peers"], serde_json::json!([0, 2]));
    for key in ["name", "compute_capability", "granularity", "virtual_memory", "async_pools", "rdma"] {
        assert!(!devices[0][key].is_null(), "{key}");
    }
    assert!(objects.iter().any(|object| object["kind"] == "library" && object["found"].is_boolean()));
}

#[test]
fn info_without_driver_lists_all_drivers() {
    let objects = objects("info --json", 0);
    let drivers: Vec<&str> =
        objects.iter().filter(|o| o["kind"] == "driver").filter_map(|object| object["driver"].as_str()).collect();
    assert_eq!(drivers, ["cuda", "sim"]);
    let plain = run("info");
    assert_eq!(plain.status.code(), Some(0));
    assert!(text(&plain.stdout).contains("Simulated H200"));
}

#[test]
fn selftest_reports_each_check_and_then_the_totals() {
    // Those that take no time; all of them run in the tests of `warpool-conformance`.
    let suites = ["streams", "events", "memory", "graphs", "virtual_memory", "capture", "foreign", "processes"];
    let suites = suites.map(|suite| format!("--suite {suite}")).join(" ");
    let objects = objects(&format!("selftest --driver sim --seed 3 --json {suites}"), 0);
    let (totals, checks) = objects.split_last().expect("at least the totals");
    assert_eq!(keys(totals), ["passed", "failed", "skipped"]);
    let count = |result: &str| checks.iter().filter(|check| check["result"] == result).count() as u64;
    for check in checks {
        assert_eq!(keys(check), ["suite", "check", "result", "detail", "seconds"]);
        assert!(check["result"] != "skipped" || check["detail"] != "", "a skip without a reason: {check}");
        assert!(check["seconds"].is_number());
    }
    for result in ["passed", "failed", "skipped"] {
        assert_eq!(totals[result], count(result), "{result}");
    }
    assert!(count("passed") >= 80, "{totals}");
    // With two simulated devices, only checks that need a second process or a second driver are skipped.
    let skipped = checks.iter().filter(|check| check["result"] == "skipped");
    let reasons: Vec<(&Value, &Value)> = skipped.map(|check| (&check["suite"], &check["detail"])).collect();
    let foreign = (&json!("foreign"), &json!("two simulated drivers share no devices"));
    let processes = (&json!("processes"), &json!("two processes cannot share a simulated GPU"));
    assert_eq!(reasons, [foreign, foreign, foreign, foreign, processes, processes, processes]);
}

#[test]
fn selftest_text_ends_with_a_summary_line() {
    let output = run("selftest --driver sim --suite streams --suite events");
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    let last = stdout.lines().last().unwrap_or_default();
    let words: Vec<&str> = last.split(' ').collect();
    assert!(matches!(words[..], [_, "passed,", "0", "failed,", _, "skipped"]), "{last}");
    for title in ["streams", "events", "all suites"] {
        assert!(stdout.lines().any(|line| line == title), "no table '{title}': {stdout}");
    }
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn selftest_text_has_a_reason_for_each_skip() {
    let output = run("selftest --driver sim --sim-devices 1 --suite events --suite processes");
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    assert!(stdout.ends_with("passed, 0 failed, 5 skipped\n"), "{stdout}");
    for reason in ["there is only one device", "two processes cannot share a simulated GPU"] {
        assert!(stdout.contains(&format!("\nskipped because {reason}:\n")), "no '{reason}': {stdout}");
    }
    assert!(stdout.contains("\n  events.event_wait_orders_two_devices\n"), "{stdout}");
}

/// A simulated GPU cannot be shared between processes: the second process of the suite `processes` reports that.
#[test]
fn peer_process_reports_why_it_fails() {
    let failed = |arguments: &str| {
        // Its standard input is empty.
        let output = run(arguments);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), ""), "{arguments}");
        text(&output.stdout).to_owned()
    };
    let handle = "07".repeat(64);
    for task in ["event", "stream"] {
        let line = failed(&format!("__peer sim 0 {task} {handle}"));
        assert!(line.starts_with("failed: event_import: CUDA_ERROR_MAP_FAILED"), "{line}");
    }
    let line = failed("__peer sim 0 memory 2097152 7");
    assert!(line.starts_with("failed: vm_import: CUDA_ERROR_INVALID_VALUE"), "{line}");
    let line = failed("__peer sim 9 memory 2097152 7");
    assert_eq!(line, "failed: there is no device 9: the driver 'sim' has devices 0 to 1\n");
    assert_usage_error("__peer sim 0 event 07", &["not an event handle"]);
    assert!(!text(&run("--help").stdout).contains("__peer"));
}

#[test]
fn bench_rows_have_their_baseline() {
    for arguments in ["bench sim --ops 2000 --json", "bench driver --driver sim --ops 1000 --json"] {
        let output = run(arguments);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{arguments}: {}", text(&output.stderr));
        let rows = rows(&output);
        assert!(rows.len() >= 6, "{arguments}");
        for row in rows {
            let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
            assert_eq!(keys(&row)[..6], ["bench", "case", "ns", "baseline", "baseline_ns", "ratio"]);
            assert!((number("ratio") - number("ns") / number("baseline_ns")).abs() < 1e-6);
            assert!(arguments.contains("bench sim") || row["modelled_ns"].is_number(), "{row}");
        }
    }
}

#[test]
fn scale_bench_compares_two_sizes() {
    let output = run("bench scale --ops 2 --json");
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", text(&output.stderr));
    let rows = rows(&output);
    assert_eq!(rows.len(), 19);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
        assert_eq!((&row["bench"], &row["baseline"]), (&Value::from("scale"), &Value::from("the same beside fewer")));
        assert!(number("n") <= 2.0 && number("n_baseline") < number("n") && row["of"].is_string(), "{row}");
        assert!((number("ratio") - number("ns") / number("baseline_ns")).abs() < 1e-6);
        let expected = if row["of"] == "threads" || !cfg!(target_os = "linux") { "elapsed" } else { "processor" };
        assert_eq!(row["time"], expected, "{row}");
    }
}

#[test]
fn getting_a_cached_handle_makes_no_calls() {
    let output = run("bench handles --driver sim --ops 1000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    let (created, cached) = rows.split_last().unwrap();
    assert!(cached.len() >= 3 && cached.iter().all(|row| row["library_calls"] == 0 && row["ratio"].is_number()));
    assert!(created["case"].as_str().unwrap().contains("made") && created["library_calls"].as_u64().unwrap() > 0);
}

#[test]
fn typed_calls_are_compared_with_raw_ones() {
    let output = run("bench typed --driver sim --ops 1000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    // Each case has a row of its own and one of its control.
    let is_control = |row: &Value| row["case"].as_str().expect("a name").ends_with(", raw against raw");
    assert_eq!(rows.iter().map(is_control).collect::<Vec<_>>(), [false, true].repeat(5));
    assert!(rows.iter().all(|row| row["baseline"] == "the raw calls" && row["ratio"].is_number()));
}

#[test]
fn a_history_is_compared_with_none() {
    let output = run("bench record --driver sim --ops 4000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert!(row["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
        let is_longest = row["case"].as_str().expect("a name").contains("longest pair");
        assert_eq!(row["entries"] == 4000, is_longest, "{row}");
    }
}

#[test]
fn sleep_is_compared_with_plain_copies() {
    let output = run("bench sleep --driver sim --ops 64 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    let cases: Vec<_> = rows.iter().map(|row| row["case"].as_str().expect("a name")).collect();
    for part in ["sleep, first: ", "prepare: ", "sleep, first, prepared", "sleep, keep host", "wake, keep host"] {
        assert!(cases.iter().any(|case| case.starts_with(part)), "{part}: {cases:?}");
    }
    assert_eq!(cases.iter().filter(|case| case.contains("discard")).count(), 2);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
        assert_eq!((row["bench"].as_str(), number("bytes")), (Some("sleep"), f64::from(64 << 20)));
        assert!(number("gb_per_second") > 0.0 && number("plain_gb_per_second") > 0.0);
    }
    assert_usage_error("bench sleep", &["--driver", "sim", "cuda"]);
}

#[test]
fn recorded_programs_are_measured() {
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings/graphs.native.pickle.xz");
    let rows = objects(&format!("bench alloc --driver sim --recording {recording} --json"), 0);
    let cases: Vec<_> = rows.iter().map(|row| row["case"].as_str().expect("a name")).collect();
    let kinds = ["", "expandable, ", "paged, ", "driver-pool, "];
    assert_eq!(cases, kinds.map(|kind| format!("{kind}replay of graphs.native, per event")));
    assert_usage_error("bench alloc --driver sim --recording /nonexistent", &["/nonexistent"]);
}

#[test]
fn cached_pinned_pairs_make_no_driver_calls() {
    let output = run("bench host --driver sim --ops 1000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    let named = |what: &str| rows.iter().filter(|row| row["case"].as_str().unwrap().contains(what)).collect::<Vec<_>>();
    let (pairs, first) = (named("cached pair"), named("first pinning"));
    assert_eq!((pairs.len(), first.len(), named("random").len()), (8, 4, 2));
    assert!(pairs.iter().all(|row| row["driver_calls"] == 0 && row["baseline"] == "uncontended mutex"));
    assert!(first.iter().all(|row| row["baseline"] == "the driver's host_alloc"));
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!((number("ratio") - number("ns") / number("baseline_ns")).abs() < 1e-9);
    }
}

#[test]
fn graph_bench_compares_with_a_bare_launch() {
    let output = run("bench graph --driver sim --ops 400 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = rows(&output);
    assert!(rows.iter().any(|row| row["generators"] == 0) && rows.iter().any(|row| row["generators"] == 1));
    for row in rows {
        assert_eq!((&row["bench"], &row["baseline"]), (&Value::from("graph"), &Value::from("bare launch")));
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!((number("ratio") - number("ns") / number("baseline_ns")).abs() < 1e-9);
    }
}

#[test]
fn help_has_examples() {
    for command in ["", "info", "selftest", "soak", "bench"] {
        let output = run(&format!("{command} --help"));
        assert_eq!(output.status.code(), Some(0), "{command}");
        assert!(text(&output.stdout).contains("Examples:") && text(&output.stdout).contains("--json"), "{command}");
    }
    assert_eq!(run("").status.code(), Some(2));
    assert_eq!(run("--version").status.code(), Some(0));
}

#[test]
fn closed_stdout_is_not_an_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(["selftest", "--driver", "sim", "--suite", "streams", "--suite", "events", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().expect("stderr is piped").read_to_string(&mut stderr).expect("stderr is UTF-8");
    assert_eq!((child.wait().expect("it ends").code(), stderr.as_str()), (Some(0), ""));
}
