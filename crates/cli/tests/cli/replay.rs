//! `replay` and `settings`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{assert_usage_error, objects, text, warpool};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

fn recording(name: &str) -> String {
    format!("{RECORDINGS}/{name}.pickle.xz")
}

/// A temporary file, removed on drop.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("warpool-{}-{name}", std::process::id()));
        std::fs::File::create(&path).and_then(|mut file| file.write_all(content)).expect("a temporary file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a plain path")
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn replay_with_recorded_settings_is_exact() {
    let file = recording("resnet_train.native");
    let reports = objects(&["replay", &file, "--json"], 0);
    let [report] = reports.as_slice() else { panic!("one object per file") };
    for key in [
        "file",
        "events",
        "allocations",
        "outcome",
        "peak_live_bytes",
        "peak_reserved_bytes",
        "segments_allocated",
        "retries",
        "ooms",
        "driver_calls",
        "forced_syncs",
        "driver_seconds_modelled",
        "recorded_seconds",
        "steady",
        "replay_seconds",
        "run_seconds",
        "parse_seconds",
        "fidelity",
    ] {
        assert!(report.get(key).is_some(), "no {key}");
    }
    assert_eq!(report["file"], file.as_str());
    assert_eq!((&report["events"], &report["allocations"]), (&66_407.into(), &22_089.into()));
    assert_eq!(report["outcome"], "completed");
    assert_eq!(report["peak_reserved_bytes"], 7_470_055_424_u64);
    assert_eq!(report["segments_allocated"], 146);
    let fidelity = &report["fidelity"];
    assert_eq!((&fidelity["checked"], &fidelity["exact"]), (&true.into(), &true.into()));
    assert_eq!(fidelity["addresses_equal"], fidelity["addresses_total"]);
    assert_eq!(fidelity["recorded_peak_reserved_bytes"], 7_470_055_424_u64);
    assert_eq!(fidelity["recorded_segments_allocated"], 146);
}

#[test]
fn steady_half_is_reported_for_every_allocator() {
    let file = recording("resnet_train.native");
    for allocator in ["caching", "driver-pool"] {
        let report = &objects(&["replay", &file, "--allocator", allocator, "--json"], 0)[0];
        let seconds = |value: &serde_json::Value| value.as_f64().expect("a number");
        let (recorded, steady) = (seconds(&report["recorded_seconds"]), &report["steady"]);
        assert_eq!(seconds(&steady["recorded_seconds"]), recorded / 2.0, "{allocator}");
        assert!(steady["driver_calls"].as_u64() <= report["driver_calls"].as_u64(), "{allocator}: {report}");
        assert!(seconds(&steady["driver_seconds_modelled"]) <= seconds(&report["driver_seconds_modelled"]), "{report}");
        assert_eq!((seconds(&steady["remap_seconds_modelled"]), &steady["bytes_remapped"]), (0.0, &0.into()));
    }
}

#[test]
fn recordings_without_time_stamps_have_no_steady_half() {
    let log = b"Thread,Time,Action,Pointer,Size,Stream\n\
        1,0:0:0.0,allocate,0x100,512,0\n1,0:0:0.0,free,0x100,512,0\n";
    let file = TemporaryFile::new("no-time.csv", log);
    let report = &objects(&["replay", file.path(), "--json"], 0)[0];
    assert_eq!((&report["recorded_seconds"], &report["steady"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    let output = warpool(&["replay", file.path()]);
    assert!(text(&output.stdout).contains("0.000 s        -"), "{}", text(&output.stdout));
}

#[test]
fn files_are_reported_in_the_order_of_the_arguments() {
    let names = ["prefetch_streams_train.native", "mempool.native", "resnet_train.expandable", "graphs.expandable"];
    let files = names.map(recording);
    let mut arguments = vec!["replay", "--json"];
    arguments.extend(files.iter().map(String::as_str));
    let reported: Vec<_> = objects(&arguments, 0).iter().map(|report| report["file"].clone()).collect();
    assert_eq!(reported, files);
}

#[test]
fn what_if_replay_tells_whether_it_fits() {
    let file = recording("resnet_train.native");
    let expandable = ["replay", &file, "--settings", "expandable_segments:True", "--json"];
    let report = &objects(&expandable, 0)[0];
    assert_eq!(report["peak_reserved_bytes"], 6_098_518_016_u64, "as in the recording with that setting");
    assert_eq!(report["fidelity"]["exact"], true);

    let with_capacity =
        |bytes: &'static str| -> Vec<&str> { [&expandable[..], &["--capacity", bytes, "--expect-fit"]].concat() };
    assert_eq!(objects(&with_capacity("7GiB"), 0)[0]["outcome"], "completed");
    let tight = &objects(&with_capacity("4GiB"), 1)[0];
    assert_eq!(tight["outcome"], "out_of_memory");
    assert!(tight["ooms"].as_u64() > Some(0));
    assert!(tight["oom"]["message"].as_str().is_some_and(|message| message.starts_with("CUDA out of memory")));
}

#[test]
fn rounds_are_listed_and_some_are_shown() {
    let file = recording("prefetch_streams_train.native");
    let report = &objects(&["replay", &file, "--allocator", "paged", "--rounds", "3", "--json"], 0)[0];
    let rounds = report["rounds"].as_array().expect("a list");
    assert_eq!(rounds.len(), 3);
    assert_eq!(rounds[0]["peak_reserved_bytes"], report["peak_reserved_bytes"]);
    assert_eq!(rounds[2]["peak_live_bytes"], report["peak_live_bytes"]);
    assert_eq!(rounds[2]["ooms"], 0);
    assert_eq!(objects(&["replay", &file, "--json"], 0)[0]["rounds"], serde_json::json!([]));

    let output = warpool(&["replay", &file, "--allocator", "paged", "--rounds", "6"]);
    let text = text(&output.stdout);
    let (_, table) = text.split_once("One round after another").expect("a table");
    let shown: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert!(["1", "2", "5", "6"].iter().all(|round| shown.contains(round)), "{table}");
    assert!(!shown.contains(&"3"), "{table}");
    assert_eq!(warpool(&["replay", &file, "--rounds", "0"]).status.code(), Some(2));
    let tight = ["replay", &file, "--capacity", "5GiB", "--rounds", "2", "--expect-fit"];
    assert_eq!(warpool(&tight).status.code(), Some(1));
}

#[test]
fn table_has_a_legend_and_remarks() {
    let output = warpool(&["replay", "--legend", &recording("oom_stacks.fraction_6gib")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    for part in [
        "live",
        "reserved",
        "overhead",
        "exact",
        "steady       what driver calls take",
        "out of memory at event 108301",
        "returned to the driver 8 times",
    ] {
        assert!(stdout.contains(part), "no '{part}' in {stdout}");
    }
}

#[test]
fn answer_names_what_is_in_force_and_the_control() {
    let file = recording("oom_stacks.fraction_6gib");
    let set = |entry: &'static str| vec!["replay", &file, "--orders", "2", "--set", entry];
    let output = warpool(&set("expandable_segments:True"));
    let stdout = text(&output.stdout);
    for part in [
        "fits in 2 of 2 address orders, by at least",
        "control: the recorded program, in the same address orders",
        "in force: settings expandable_segments:True (expandable_segments was False)",
        "the recorded memory limit of 6 GiB",
        "--legend explains the columns",
    ] {
        assert!(stdout.contains(part), "no '{part}' in {stdout}");
    }
    let lifted = warpool(&set("per_process_memory_fraction:1.0"));
    assert!(text(&lifted.stdout).contains("the recorded limit of 6 GiB lifted by the settings"));
    let quiet = warpool(&["replay", "-q", &file]);
    assert!(!text(&quiet.stdout).contains("--legend"), "{}", text(&quiet.stdout));
    // A what-if that changes nothing has the recorded outcome, and does not fit.
    for nothing in [["--settings", ""], ["--settings", "expandable_segments:False"], ["--capacity", "139.8GiB"]] {
        let arguments = [&["replay", &file, "--json", "--expect-fit"][..], &nothing[..]].concat();
        let report = &objects(&arguments, 1)[0];
        assert_eq!((&report["outcome"], &report["oom"]["event"]), (&"out_of_memory".into(), &108_301.into()));
        assert_eq!(report["peak_reserved_bytes"], report["fidelity"]["recorded_peak_reserved_bytes"]);
    }
    let larger = &objects(&["replay", &file, "--json", "--expect-fit", "--orders", "2", "--capacity", "24GiB"], 0)[0];
    assert_eq!(larger["in_force"]["memory_limit_lifted_bytes"], 6_u64 << 30);
}

/// The simulated device is an H200. The recorded device is not known, and neither is its remaining memory.
#[test]
fn unknown_device_has_no_size_in_any_text() {
    let file = recording("verdict.outside");
    let what_if = ["replay", &file, "--set", "max_split_size_mb:64"];
    for arguments in [&["replay", &file][..], &what_if, &["explain", &file, "--orders", "1"], &["tune", &file]] {
        let output = warpool(arguments);
        let shown = text(&output.stdout);
        for part in ["139.", "held by others", "used by others", "total capacity", "of the device were"] {
            assert!(!shown.contains(part), "'{part}' in {shown}");
        }
    }
    let object = &objects(&["replay", &file, "--json"], 0)[0];
    let in_force = &object["in_force"];
    assert!(in_force["device_bytes_total"].is_null() && in_force["device_assumed"] == true, "{in_force}");
    assert_eq!(in_force["device_origin"], "unknown");
    let message = object["oom"]["message"].as_str().expect("a message");
    assert!(message.starts_with("CUDA out of memory. Tried to allocate 512.00 MiB. 19.29 GiB allowed;"), "{message}");
    assert!(message.ends_with('.') && !message.contains("capacity"), "{message}");
    // The same with its card.
    let known = &objects(&["replay", &file, "--json", "--gpu", "H200"], 0)[0]["in_force"];
    assert_eq!((&known["device_origin"], &known["device_name"]), (&"argument".into(), &"H200".into()));
    assert_usage_error(&["replay", &file, "--gpu", "a100"], &["a100-40gb, a100-80gb"]);
    assert_usage_error(&["tune", &file, "--gpu", "h200", "--capacity", "24GiB"], &["cannot be used with"]);
}

#[test]
fn full_device_is_not_advised_to_raise_a_limit() {
    let output = warpool(&["replay", &recording("device_full.native")]);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("the recorded device was full"), "{stdout}");
    assert!(!stdout.contains("memory fraction"), "{stdout}");
}

#[test]
fn files_of_one_name_are_told_apart_and_stdin_is_read() {
    let whole = std::fs::read(recording("mempool.native")).expect("a recording");
    let folder = std::env::temp_dir().join(format!("warpool-names-{}", std::process::id()));
    for rank in ["rank0", "rank1"] {
        std::fs::create_dir_all(folder.join(rank)).expect("a folder");
        std::fs::write(folder.join(rank).join("s.pickle.xz"), &whole).expect("a file");
    }
    let file = |rank: &str| folder.join(rank).join("s.pickle.xz").to_string_lossy().into_owned();
    let output = warpool(&["replay", &file("rank0"), &file("rank1")]);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("rank0/s.pickle.xz") && stdout.contains("rank1/s.pickle.xz"), "{stdout}");
    let mut child = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(["replay", "-", "--json"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    child.stdin.take().expect("a pipe").write_all(&whole).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!((&report["file"], &report["events"]), (&"-".into(), &839.into()));
    std::fs::remove_dir_all(&folder).expect("the folder");
}

#[test]
fn unreadable_files_are_usage_errors() {
    let whole = std::fs::read(recording("mempool.native")).expect("a recording");
    let cases = [
        (TemporaryFile::new("text", b"Dear diary, today I ran out of memory.\n"), "text that starts with"),
        (TemporaryFile::new("empty", b""), "empty"),
        (TemporaryFile::new("cut.xz", &whole[..whole.len() / 2]), "cut off"),
        (TemporaryFile::new("evil", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "GLOBAL"),
        (TemporaryFile::new("line\nend", b"Dear diary.\n"), "line\\nend: not a recording"),
        (TemporaryFile::new("cut", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}"), "cut off"),
    ];
    for (file, part) in &cases {
        assert_usage_error(&["replay", file.path(), "--json"], &[part, &file.path().replace('\n', "\\n")]);
        assert_usage_error(&["replay", file.path()], &[part]);
    }
    assert_usage_error(&["replay", "/nonexistent/recording.pickle"], &["cannot open /nonexistent/recording.pickle"]);
    assert_usage_error(&["replay", Path::new(RECORDINGS).to_str().expect("a path")], &["recordings"]);
}

#[test]
fn memory_limit_is_an_error_and_can_be_raised() {
    let file = recording("resnet_train.native");
    let too_low = ["replay", &file, "--memory-limit", "24MiB"];
    assert_usage_error(&too_low, &[&file, "it needs more than 24 MiB of memory", "--memory-limit"]);
    let reports = objects(&["replay", &file, "--json", "--memory-limit", "1GiB"], 0);
    assert_eq!(reports[0]["fidelity"]["exact"], true);
    assert_usage_error(&["replay", &file, "--memory-limit", "much"], &["'much' is not a size"]);
    let no_unit = "'24' has no unit: write 24GiB or 24B";
    for option in ["--memory-limit", "--capacity"] {
        assert_usage_error(&["replay", &file, option, "24"], &[no_unit]);
        assert_usage_error(&["explain", &file, option, "24"], &[no_unit]);
    }
}

#[test]
fn invalid_arguments_are_reported_before_files_are_read() {
    let file = recording("mempool.native");
    assert_usage_error(&["replay"], &["<FILE>"]);
    assert_usage_error(
        &["replay", &file, "--settings", "max_splt_size_mb:200"],
        &["max_splt_size_mb", "did you mean `max_split_size_mb`"],
    );
    assert_usage_error(&["replay", &file, "--settings", "expandable_segments=True"], &["expandable_segments"]);
    assert_usage_error(&["replay", &file, "--settings", "backend:cudaMallocAsync"], &["--allocator driver-pool"]);
    assert_usage_error(&["replay", &file, "--allocator", "buddy"], &["buddy", "caching, driver-pool, paged"]);
    assert_usage_error(&["replay", &file, "--capacity", "80apples"], &["'80apples' is not a size"]);
}

#[test]
fn other_files_are_reported_beside_an_unreadable_one() {
    let output = warpool(&["replay", &recording("mempool.native"), "/nonexistent", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stdout).lines().count(), 1, "the readable one is reported");
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
}

#[test]
fn settings_are_listed_with_origin_and_warnings() {
    let lines = objects(&["settings", "garbage_collection_threshold:0.8", "--json"], 0);
    assert!(lines.iter().any(|line| line["kind"] == "warning" && line["key"] == "garbage_collection_threshold"));
    let value = lines.iter().find(|line| line["kind"] == "setting" && line["key"] == "max_split_size_mb");
    assert_eq!(value.expect("every setting is listed")["origin"], "default");

    let invalid = objects(&["settings", "max_split_size_mb:5,nonsense:1", "--json"], 1);
    let errors = invalid.iter().filter(|line| line["kind"] == "error").count();
    assert_eq!(errors, 2, "all problems are reported at once");
}

#[test]
fn settings_are_read_from_the_environment() {
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warpool"));
        command.arg("settings").env_remove("WARPOOL_CONF").env_remove("PYTORCH_CUDA_ALLOC_CONF");
        let output = command.envs(variables.iter().copied()).output().expect("the binary was built for this test");
        text(&output.stdout).lines().next().map(str::to_owned)
    };
    let pytorch = ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64");
    assert_eq!(run(&[]).as_deref(), Some("settings \"\" (no variable is set)"));
    assert_eq!(run(&[pytorch]).as_deref(), Some("settings \"max_split_size_mb:64\" (from PYTORCH_CUDA_ALLOC_CONF)"));
    let warpool = ("WARPOOL_CONF", "expandable_segments:True");
    assert_eq!(run(&[warpool]).as_deref(), Some("settings \"expandable_segments:True\" (from WARPOOL_CONF)"));
    let both =
        "settings \"max_split_size_mb:64,expandable_segments:True\" (from PYTORCH_CUDA_ALLOC_CONF and WARPOOL_CONF)";
    assert_eq!(run(&[pytorch, warpool]).as_deref(), Some(both));
}
