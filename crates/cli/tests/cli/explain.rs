//! `explain`, `tune`, `diff`, `completions` and `man`.

use std::path::PathBuf;

use serde_json::Value;

use crate::{assert_usage_error, objects, text, warpool};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

fn recording(name: &str) -> String {
    format!("{RECORDINGS}/{name}.pickle.xz")
}

/// The sum of the parts of an object.
fn sum_of_parts(object: &Value) -> u64 {
    object["parts"].as_object().expect("a map").values().map(|bytes| bytes.as_u64().expect("bytes")).sum()
}

#[test]
fn explanation_has_the_fixed_keys_and_parts_that_add_up() {
    let object = &objects(&["explain", &recording("oom_stacks.fraction_6gib"), "--orders", "1", "--json"], 0)[0];
    for key in ["file", "device", "device_bytes_total", "moment", "verdict", "parts", "holders", "fits"] {
        assert!(object.get(key).is_some(), "no {key}");
    }
    assert_eq!(object["schema_version"], 1);
    assert_eq!(object["verdict"], "fragmentation");
    assert_eq!((&object["moment"]["kind"], &object["moment"]["event"]), (&"oom".into(), &108_301.into()));
    assert_eq!(Some(sum_of_parts(object)), object["device_bytes_total"].as_u64());
    let holders = object["holders"].as_array().expect("a list");
    assert_eq!(holders[0]["name"], "dropout (torch/nn/functional.py:1443)");
    assert_eq!(holders[0]["line"], "<module> (train.py:19)");
    let first = &object["fits"][0];
    assert_eq!((&first["set"], &first["fits"]), (&"expandable_segments:True".into(), &true.into()));
}

#[test]
fn prose_comes_first_and_tables_after() {
    let output = warpool(&["explain", &recording("verdict.growth"), "--orders", "1"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    let positions: Vec<usize> = [
        "out of memory: growth from iteration to iteration",
        "A request ran out of memory at event",
        "most is held by",
        "What stays allocated from iteration to iteration: ",
        "The smallest change that would have fitted",
        "Where the device's 139.8 GiB were",
        "Who held memory",
        "What would have fitted, by replays",
    ]
    .iter()
    .map(|part| stdout.find(part).unwrap_or_else(|| panic!("no '{part}' in {stdout}")))
    .collect();
    assert!(positions.is_sorted(), "{stdout}");
    assert!(stdout.contains("losses (train.py:108)"), "{stdout}");
    assert!(!stdout.contains('\u{1b}'), "no escape codes without a terminal");
}

#[test]
fn recordings_without_stacks_are_grouped_by_size_and_say_how_to_record_them() {
    let output = warpool(&["explain", &recording("device_full.native"), "--no-fits"]);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("_record_memory_history(stacks=\"python\")"), "{stdout}");
    assert!(stdout.contains("blocks of ") && stdout.contains("By age"), "{stdout}");
}

#[test]
fn many_files_or_a_folder_are_compared_in_one_table() {
    let files = ["verdict.limit", "verdict.limit", "verdict.limit", "verdict.growth"].map(recording);
    let mut arguments = vec!["explain", "--no-fits"];
    arguments.extend(files.iter().map(String::as_str));
    let output = warpool(&arguments);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("4 recordings"), "{stdout}");
    assert!(stdout.contains("verdict.growth.pickle.xz differs: "), "{stdout}");
    let folder = objects(&["explain", RECORDINGS, "--no-fits", "--json"], 0);
    assert!(folder.len() > 20, "{}", folder.len());
    for object in &folder {
        let known = object["moment"]["reserved_bytes"]
            .as_u64()
            .map(|bytes| bytes + object["moment"]["device_free_bytes"].as_u64().unwrap_or(0));
        let total = object["device_bytes_total"].as_u64().or(known);
        assert_eq!(Some(sum_of_parts(object)), total, "{}", object["file"]);
    }
}

#[test]
fn wrong_input_is_a_usage_error() {
    assert_usage_error(&["explain", "/nonexistent.pickle"], &["cannot open /nonexistent.pickle"]);
    assert_usage_error(&["explain", &recording("mempool.native"), "--capacity", "lots"], &["'lots' is not a size"]);
    let sources: PathBuf = [env!("CARGO_MANIFEST_DIR"), "src"].iter().collect();
    assert_usage_error(&["explain", sources.to_str().expect("a path")], &["no recordings in this folder"]);
    assert_usage_error(&["tune", &recording("mempool.native"), "--try", "max_splt:1"], &["--try", "max_splt"]);
    assert_usage_error(&["diff", &recording("mempool.native")], &["<B>"]);
}

#[test]
fn tune_ranks_candidates_and_has_a_line_to_paste() {
    let file = recording("oom_stacks.fraction_6gib");
    let candidates = objects(&["tune", &file, "--orders", "1", "--json"], 0);
    assert!(candidates.len() >= 12, "{}", candidates.len());
    assert!(candidates.iter().any(|candidate| candidate["recorded"] == true && candidate["fits"] == false));
    assert_eq!(candidates[0]["fits"], true);
    let output = warpool(&["tune", &file, "--orders", "1"]);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True    # before"), "{stdout}");
    assert!(stdout.contains("\nimport warpool.torch; warpool.torch.enable("), "{stdout}");
    assert!(stdout.contains("within 64 MiB"), "{stdout}");
    assert_eq!(candidates[0]["apply"], "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let (bytes, tolerance) =
        (&candidates[0]["smallest_device_bytes"], &candidates[0]["smallest_device_tolerance_bytes"]);
    assert!(
        bytes.as_u64().is_some_and(|bytes| bytes >> 30 == 5) && tolerance.as_u64() == Some(64 << 20),
        "{}",
        candidates[0]
    );
    assert!(stdout.contains("where the recorded settings do not fit"), "{stdout}");
    let tight = warpool(&["tune", &recording("mempool.native"), "--orders", "1", "--capacity", "1G"]);
    assert_eq!(tight.status.code(), Some(1), "{}", text(&tight.stdout));
}

#[test]
fn diff_tells_what_is_new_and_gone() {
    let files = [recording("verdict.limit"), recording("verdict.growth")];
    let object = &objects(&["diff", &files[0], &files[1], "--json"], 0)[0];
    let changes = object["changes"].as_array().expect("a list");
    let kind_of = |line: &str| {
        let found = changes.iter().find(|change| change["line"].as_str().is_some_and(|it| it.starts_with(line)));
        found.map(|change| change["kind"].as_str().expect("a name").to_owned())
    };
    assert_eq!(kind_of("losses").as_deref(), Some("new"));
    assert_eq!(kind_of("weights").as_deref(), Some("shrunk"));
    let same = warpool(&["diff", &files[0], &files[0]]);
    assert!(text(&same.stdout).contains("No difference."), "{}", text(&same.stdout));
}

#[test]
fn completions_and_man_page_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let output = warpool(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("explain"), "{shell}");
    }
    assert!(text(&warpool(&["man"]).stdout).starts_with(".TH WARPOOL 1"));
}
