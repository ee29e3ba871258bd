//! The built binary, from outside: exit status, what stands on stdout and stderr, the shape of the JSON.

use std::io::Read as _;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn warpool(arguments: &str) -> Output {
    let run = Command::new(env!("CARGO_BIN_EXE_warpool")).args(arguments.split_whitespace()).output();
    run.expect("the binary was built for this test")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

/// Exits with 2, says one line on stderr with all of `parts` in it, and nothing on stdout.
fn refused(arguments: &str, parts: &[&str]) {
    let output = warpool(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
    assert_eq!(text(&output.stdout), "", "{arguments}");
    assert_eq!(said.lines().count(), 1, "{arguments}: {said}");
    for part in parts {
        assert!(said.contains(part), "{arguments}: no '{part}' in: {said}");
    }
}

/// Exits with `status` and prints nothing but JSON objects, one per line.
fn objects(arguments: &str, status: i32) -> Vec<Value> {
    let output = warpool(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments}: {}", text(&output.stderr));
    let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let objects: Vec<Value> = text(&output.stdout).lines().map(parse).collect();
    assert!(objects.iter().all(Value::is_object), "{arguments}");
    objects
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Whether this machine has a GPU that CUDA can use.
fn has_cuda() -> bool {
    objects("info --json", 0).iter().any(|o| o["kind"] == "driver" && o["driver"] == "cuda" && o["available"] == true)
}

#[test]
fn what_is_not_there_is_refused_in_one_line() {
    refused("info --driver vulkan", &["no driver 'vulkan'", "sim", "cuda"]);
    refused("selftest --driver vulkan", &["no driver 'vulkan'"]);
    refused("selftest --driver sim --device 9", &["no device 9", "0 to 1"]);
    refused("selftest --driver sim --sim-devices 1 --device 1", &["no device 1", "only device 0"]);
    refused("selftest --driver sim --suite nonsense", &["no suite 'nonsense'", "streams", "capture", "processes"]);
    refused("selftest --driver sim --suite errors --no-destructive", &["'errors'", "--no-destructive"]);
    refused("bench nonsense", &["no benchmark 'nonsense'", "sim", "driver"]);
    refused("bench sim --driver cuda", &["bench sim", "cuda"]);
    refused("bench driver", &["--driver", "sim", "cuda"]);
    refused("bench driver --driver sim --device 7", &["no device 7"]);
    refused("bench handles", &["--driver", "sim", "cuda"]);
    refused("bench graph", &["--driver", "sim", "cuda"]);
    refused("bench host", &["--driver", "sim", "cuda"]);
    refused("bench graph --driver rocm", &["rocm", "sim", "cuda"]);
    refused("info --driver cuda --sim-devices 2", &["--sim-devices", "sim"]);
}

#[test]
fn bad_usage_is_refused_in_one_line() {
    refused("selftest", &["--driver"]);
    refused("nonsense", &["nonsense"]);
    refused("info --nonsense", &["--nonsense"]);
    refused("selftest --driver sim --device x", &["--device"]);
    refused("selftest --driver sim --seed -1", &["-1"]);
    refused("bench", &["<BENCHMARK>", "--help"]);
    refused("bench sim --ops 0", &["--ops"]);
    refused("info --sim-memory 512MiB", &["--sim-memory", "from 1 GiB to 16 TiB"]);
    refused("selftest --driver sim --sim-devices 0", &["--sim-devices", "1..=64"]);
    refused("info --driver sim --sim-memory 80apples", &["'80apples' is no size", "GiB"]);
}

#[test]
fn a_missing_cuda_is_named_and_nothing_takes_its_place() {
    if has_cuda() {
        let objects = objects("info --driver cuda --json", 0);
        assert!(objects.iter().all(|object| object["driver"] != "sim"));
        return;
    }
    refused("info --driver cuda", &["cuda", "libcuda"]);
    refused("selftest --driver cuda", &["libcuda"]);
    refused("bench driver --driver cuda", &["libcuda"]);
}

#[test]
fn info_shows_every_device_and_library() {
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
fn info_alone_shows_every_driver_and_succeeds() {
    let objects = objects("info --json", 0);
    let drivers: Vec<&str> =
        objects.iter().filter(|o| o["kind"] == "driver").filter_map(|object| object["driver"].as_str()).collect();
    assert_eq!(drivers, ["cuda", "sim"]);
    let plain = warpool("info");
    assert_eq!(plain.status.code(), Some(0));
    assert!(text(&plain.stdout).contains("Simulated H200"));
}

#[test]
fn selftest_reports_each_check_and_then_the_totals() {
    let objects = objects("selftest --driver sim --seed 3 --json", 0);
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
    // Of two simulated devices, all that is missing is a second process, and a second driver for the same devices.
    let skipped = checks.iter().filter(|check| check["result"] == "skipped");
    let reasons: Vec<(&Value, &Value)> = skipped.map(|check| (&check["suite"], &check["detail"])).collect();
    let foreign = (&json!("foreign"), &json!("no two simulated machines have anything in common"));
    let processes = (&json!("processes"), &json!("no two processes share a simulated machine"));
    assert_eq!(reasons, [foreign, foreign, foreign, foreign, processes, processes, processes]);
}

#[test]
fn selftest_for_people_ends_with_the_summary_line() {
    let output = warpool("selftest --driver sim --suite streams --suite events");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let last = said.lines().last().unwrap_or_default();
    let words: Vec<&str> = last.split(' ').collect();
    assert!(matches!(words[..], [_, "passed,", "0", "failed,", _, "skipped"]), "{last}");
    for title in ["streams", "events", "all suites"] {
        assert!(said.lines().any(|line| line == title), "no table '{title}': {said}");
    }
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn selftest_for_people_gives_a_reason_per_skip() {
    let output = warpool("selftest --driver sim --sim-devices 1 --suite events --suite processes");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.ends_with("passed, 0 failed, 5 skipped\n"), "{said}");
    for reason in ["there is only one device", "no two processes share a simulated machine"] {
        assert!(said.contains(&format!("\nskipped, since {reason}:\n")), "no '{reason}': {said}");
    }
    assert!(said.contains("\n  events.a_wait_orders_two_devices\n"), "{said}");
}

/// On a simulated machine, which no second process shares, the other process of the suite `processes` says so and ends.
#[test]
fn the_other_process_says_why_it_cannot_go_on() {
    let said = |arguments: &str| {
        // Its standard input is empty: no word to hear, and no memory.
        let output = warpool(arguments);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), ""), "{arguments}");
        text(&output.stdout).to_owned()
    };
    let handle = "07".repeat(64);
    for task in ["event", "stream"] {
        let line = said(&format!("__peer sim 0 {task} {handle}"));
        assert!(line.starts_with("failed: event_import: CUDA_ERROR_MAP_FAILED"), "{line}");
    }
    let line = said("__peer sim 0 memory 2097152 7");
    assert!(line.starts_with("failed: vm_import: CUDA_ERROR_INVALID_VALUE"), "{line}");
    let line = said("__peer sim 9 memory 2097152 7");
    assert_eq!(line, "failed: there is no device 9: the driver 'sim' has devices 0 to 1\n");
    refused("__peer sim 0 event 07", &["no event handle"]);
    assert!(!text(&warpool("--help").stdout).contains("__peer"));
}

#[test]
fn bench_rows_stand_beside_their_baseline() {
    for arguments in ["bench sim --ops 2000 --json", "bench driver --driver sim --ops 1000 --json"] {
        let output = warpool(arguments);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{arguments}: {}", text(&output.stderr));
        let rows: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
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
fn fetching_a_handle_makes_no_call() {
    let output = warpool("bench handles --driver sim --ops 1000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (made, found) = rows.split_last().unwrap();
    assert!(found.len() >= 3 && found.iter().all(|row| row["library_calls"] == 0 && row["ratio"].is_number()));
    assert!(made["case"].as_str().unwrap().contains("made") && made["library_calls"].as_u64().unwrap() > 0);
}

#[test]
fn a_cached_pinned_pair_makes_no_call() {
    let output = warpool("bench host --driver sim --ops 1000 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
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
fn a_replay_stands_beside_its_bare_launch() {
    let output = warpool("bench graph --driver sim --ops 400 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().any(|row| row["generators"] == 0) && rows.iter().any(|row| row["generators"] == 1));
    for row in rows {
        assert_eq!((&row["bench"], &row["baseline"]), (&Value::from("graph"), &Value::from("bare launch")));
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!((number("ratio") - number("ns") / number("baseline_ns")).abs() < 1e-9);
    }
}

#[test]
fn help_helps() {
    for command in ["", "info", "selftest", "bench"] {
        let output = warpool(&format!("{command} --help"));
        assert_eq!(output.status.code(), Some(0), "{command}");
        assert!(text(&output.stdout).contains("Examples:") && text(&output.stdout).contains("--json"), "{command}");
    }
    assert_eq!(warpool("").status.code(), Some(2));
    assert_eq!(warpool("--version").status.code(), Some(0));
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(["selftest", "--driver", "sim", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().expect("stderr is piped").read_to_string(&mut said).expect("stderr is UTF-8");
    assert_eq!((child.wait().expect("it ends").code(), said.as_str()), (Some(0), ""));
}
