//! `warpool replay` and `warpool settings`, from outside.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

fn recording(name: &str) -> String {
    format!("{RECORDINGS}/{name}.pickle.xz")
}

fn warpool(arguments: &[&str]) -> Output {
    let command = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(arguments)
        .env_remove("WARPOOL_CONF")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .output();
    command.expect("the binary was built for this test")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

fn objects(arguments: &[&str], status: i32) -> Vec<Value> {
    let output = warpool(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output.stderr));
    let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text(&output.stdout).lines().map(parse).collect()
}

/// Exits with 2, says one line on stderr with all of `parts` in it, and nothing on stdout.
fn refused(arguments: &[&str], parts: &[&str]) {
    let output = warpool(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "{arguments:?}: no '{part}' in: {said}");
    }
}

/// A file that is there as long as this is.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("warpool-{}-{name}", std::process::id()));
        std::fs::File::create(&path).and_then(|mut file| file.write_all(content)).expect("a scratch file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a plain path")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_recording_is_replayed_as_recorded() {
    let file = recording("resnet_train.native");
    let answers = objects(&["replay", &file, "--json"], 0);
    let [answer] = answers.as_slice() else { panic!("one object per file") };
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
        "replay_seconds",
        "parse_seconds",
        "fidelity",
    ] {
        assert!(answer.get(key).is_some(), "no {key}");
    }
    assert_eq!(answer["file"], file.as_str());
    assert_eq!((&answer["events"], &answer["allocations"]), (&66_407.into(), &22_089.into()));
    assert_eq!(answer["outcome"], "completed");
    assert_eq!(answer["peak_reserved_bytes"], 7_470_055_424_u64);
    assert_eq!(answer["segments_allocated"], 146);
    let fidelity = &answer["fidelity"];
    assert_eq!((&fidelity["checked"], &fidelity["exact"]), (&true.into(), &true.into()));
    assert_eq!(fidelity["addresses_equal"], fidelity["addresses_total"]);
    assert_eq!(fidelity["recorded_peak_reserved_bytes"], 7_470_055_424_u64);
    assert_eq!(fidelity["recorded_segments_allocated"], 146);
}

#[test]
fn files_are_answered_in_their_order() {
    let names = ["prefetch_streams_train.native", "mempool.native", "resnet_train.expandable", "graphs.expandable"];
    let files = names.map(recording);
    let mut arguments = vec!["replay", "--json"];
    arguments.extend(files.iter().map(String::as_str));
    let answered: Vec<_> = objects(&arguments, 0).iter().map(|answer| answer["file"].clone()).collect();
    assert_eq!(answered, files);
}

#[test]
fn a_what_if_says_whether_it_fits() {
    let file = recording("resnet_train.native");
    let expandable = ["replay", &file, "--settings", "expandable_segments:True", "--json"];
    let answer = &objects(&expandable, 0)[0];
    assert_eq!(answer["peak_reserved_bytes"], 6_098_518_016_u64, "what the same program held with that setting");
    assert_eq!(answer["fidelity"]["exact"], true);

    let with_capacity =
        |bytes: &'static str| -> Vec<&str> { [&expandable[..], &["--capacity", bytes, "--expect-fit"]].concat() };
    assert_eq!(objects(&with_capacity("7GiB"), 0)[0]["outcome"], "completed");
    let tight = &objects(&with_capacity("4GiB"), 1)[0];
    assert_eq!(tight["outcome"], "out_of_memory");
    assert!(tight["ooms"].as_u64() > Some(0));
    assert!(tight["oom"]["message"].as_str().is_some_and(|message| message.starts_with("CUDA out of memory")));
}

#[test]
fn the_table_says_what_its_columns_mean() {
    let output = warpool(&["replay", &recording("oom_stacks.fraction_6gib")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for part in ["live", "reserved", "lost", "proven", "out of memory at event 108301", "8 times everything cached"] {
        assert!(said.contains(part), "no '{part}' in {said}");
    }
}

#[test]
fn what_is_no_recording_is_refused_in_one_line() {
    let whole = std::fs::read(recording("mempool.native")).expect("a recording");
    let cases = [
        (Scratch::new("text", b"Dear diary, today I ran out of memory.\n"), "text that starts with"),
        (Scratch::new("empty", b""), "empty"),
        (Scratch::new("cut.xz", &whole[..whole.len() / 2]), "cut off"),
        (Scratch::new("evil", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "GLOBAL"),
        (Scratch::new("line\nend", b"Dear diary.\n"), "line\\nend: not a recording"),
        (Scratch::new("cut", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}"), "cut off"),
    ];
    for (file, part) in &cases {
        refused(&["replay", file.path(), "--json"], &[part, &file.path().replace('\n', "\\n")]);
        refused(&["replay", file.path()], &[part]);
    }
    refused(&["replay", "/nonexistent/recording.pickle"], &["cannot open /nonexistent/recording.pickle"]);
    refused(&["replay", Path::new(RECORDINGS).to_str().expect("a path")], &["recordings"]);
}

#[test]
fn bad_usage_is_refused_before_anything_is_read() {
    let file = recording("mempool.native");
    refused(&["replay"], &["<FILE>"]);
    refused(
        &["replay", &file, "--settings", "max_splt_size_mb:200"],
        &["max_splt_size_mb", "did you mean `max_split_size_mb`"],
    );
    refused(&["replay", &file, "--settings", "expandable_segments=True"], &["expandable_segments"]);
    refused(&["replay", &file, "--settings", "backend:cudaMallocAsync"], &["--allocator driver-pool"]);
    refused(&["replay", &file, "--allocator", "paged"], &["paged", "caching, driver-pool"]);
    refused(&["replay", &file, "--capacity", "80apples"], &["'80apples' is no size"]);
}

#[test]
fn a_bad_file_does_not_hide_the_good_ones() {
    let output = warpool(&["replay", &recording("mempool.native"), "/nonexistent", "--json"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stdout).lines().count(), 1, "the good one is answered");
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
}

#[test]
fn settings_are_explained() {
    let said = objects(&["settings", "garbage_collection_threshold:0.8", "--json"], 0);
    assert!(said.iter().any(|line| line["kind"] == "warning" && line["key"] == "garbage_collection_threshold"));
    let value = said.iter().find(|line| line["kind"] == "setting" && line["key"] == "max_split_size_mb");
    assert_eq!(value.expect("every setting is listed")["origin"], "default");

    let refused = objects(&["settings", "max_split_size_mb:5,nonsense:1", "--json"], 1);
    let errors = refused.iter().filter(|line| line["kind"] == "error").count();
    assert_eq!(errors, 2, "all problems are said at once");
}

#[test]
fn settings_come_from_the_environment() {
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warpool"));
        command.arg("settings").env_remove("WARPOOL_CONF").env_remove("PYTORCH_CUDA_ALLOC_CONF");
        let output = command.envs(variables.iter().copied()).output().expect("the binary was built for this test");
        text(&output.stdout).lines().next().map(str::to_owned)
    };
    let theirs = ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64");
    assert_eq!(run(&[]).as_deref(), Some("settings \"\" (nothing is set)"));
    assert_eq!(run(&[theirs]).as_deref(), Some("settings \"max_split_size_mb:64\" (from PYTORCH_CUDA_ALLOC_CONF)"));
    let ours = ("WARPOOL_CONF", "expandable_segments:True");
    assert_eq!(run(&[theirs, ours]).as_deref(), Some("settings \"expandable_segments:True\" (from WARPOOL_CONF)"));
}
