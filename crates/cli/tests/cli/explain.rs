//! `explain`, `tune`, `diff`, `completions` and `man`.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use warpool::memory::report::{AccountRow, DeviceAccount};
use warpool_trace::{ReadOptions, read_file, write_snapshot};

use crate::{assert_usage_error, objects, text, warpool};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

fn recording(name: &str) -> String {
    format!("{RECORDINGS}/{name}.pickle.xz")
}

/// What was printed, without line breaks: prose is wrapped.
fn words(stdout: &[u8]) -> String {
    text(stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Prints an explanation, and the same as JSON.
fn explained(name: &str, more: &[&str]) -> (String, Value) {
    let file = recording(name);
    let arguments = [&["explain", &file][..], more].concat();
    let output = warpool(&arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    let mut found = objects(&[&arguments[..], &["--json"]].concat(), 0);
    assert_eq!(found.len(), 1, "{name}");
    (words(&output.stdout), found.remove(0))
}

/// The sum of the parts of an object.
fn sum_of_parts(object: &Value) -> u64 {
    object["parts"].as_object().expect("a map").values().map(|bytes| bytes.as_u64().expect("bytes")).sum()
}

#[test]
fn explanation_has_the_fixed_keys_and_parts_that_add_up() {
    let object = &objects(&["explain", &recording("oom_stacks.fraction_6gib"), "--orders", "1", "--json"], 0)[0];
    let keys = "file device device_bytes_total device_origin headline sentences moment peaks verdict evidence parts \
                categories holders advice on_device fits";
    for key in keys.split_whitespace() {
        assert!(object.get(key).is_some(), "no {key}");
    }
    assert_eq!(object["schema_version"], 2);
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
        "Most of it was requested by",
        "What to do\n1. Do not keep what losses (train.py:108) makes",
        "Where the device's 139.8 GiB were",
        "What kind of memory was allocated",
        "Who held memory",
        "Changes that were replayed",
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
    assert!(stdout.contains("_record_memory_history()"), "{stdout}");
    assert!(stdout.contains("blocks of ") && stdout.contains("By age"), "{stdout}");
}

#[test]
fn many_files_or_a_folder_are_compared_in_one_table() {
    let files = ["verdict.limit", "verdict.outside", "verdict.other_pool", "verdict.growth"].map(recording);
    let mut arguments = vec!["explain", "--no-fits"];
    arguments.extend(files.iter().map(String::as_str));
    let output = warpool(&arguments);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("4 recordings"), "{stdout}");
    let words = words(&output.stdout);
    assert!(words.contains("verdict.limit.pickle.xz differs from verdict.growth.pickle.xz"), "{stdout}");
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
    let output = warpool(&["tune", &recording("oom_limit.default"), "--orders", "1"]);
    let stdout = text(&output.stdout);
    assert!(stdout.contains("\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True    # before"), "{stdout}");
    assert!(stdout.contains("\nimport warpool.torch; warpool.torch.enable("), "{stdout}");
    assert!(words(&output.stdout).contains("found by replays to within 64 MiB"), "{stdout}");
    assert_eq!(candidates[0]["apply"], "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let (bytes, tolerance) =
        (&candidates[0]["smallest_device_bytes"], &candidates[0]["smallest_device_tolerance_bytes"]);
    assert!(
        bytes.as_u64() > Some(5_880_414_208 + (512 << 20)) && tolerance.as_u64() == Some(64 << 20),
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
    assert!(text(&same.stdout).contains("No difference in what the calls hold"), "{}", text(&same.stdout));
}

/// Recordings of `torch.cuda.memory._record_memory_history()` without arguments, by `python/tests/gpu/snapshots.py`.
const DEFAULTS: [&str; 6] =
    ["train.default", "generate.default", "leak.default", "oom_device.default", "oom_limit.default", "streams.default"];

#[test]
fn recordings_by_default_are_explained_in_a_sentence() {
    for (name, sentences) in [
        ("train.default", &["it did not run out of memory", "3.4 GiB activations (56%)"][..]),
        ("generate.default", &["269.0 MiB parameters (59%), 149 MiB activations (33%)"]),
        (
            "leak.default",
            &[
                "out of memory: growth from iteration to iteration",
                "Over the last 179 of 270 iterations 1.4 GiB more stayed allocated",
                "1. Do not keep what leak (/home/me/snapshots.py:278) makes from one iteration to the next.",
            ],
        ),
        (
            "oom_device.default",
            &["out of memory: more is allocated than the device has", "the device has 139.8 GiB, H200."],
        ),
        (
            "oom_limit.default",
            &["out of memory: fragmentation", "a memory limit of at least 6.0 GiB and below 6.6 GiB refused it"],
        ),
        ("streams.default", &["it did not run out of memory", "1.1 GiB activations (75%), 340.1 MiB temporaries"]),
    ] {
        let (stdout, _) = explained(name, &["--orders", "1"]);
        for sentence in sentences {
            assert!(stdout.contains(sentence), "{name}: no '{sentence}' in {stdout}");
        }
    }
}

/// Issue 34, point 1: most memory is reserved at one moment, and most allocated at another.
#[test]
fn most_allocated_memory_is_explained_and_both_peaks_are_told() {
    const NAME: &str = "streams.expandable_cap";
    let (stdout, object) = explained(NAME, &["--no-fits"]);
    let (moment, peaks) = (&object["moment"], &object["peaks"]);
    assert_eq!((&moment["kind"], &moment["event"]), (&"allocated".into(), &peaks["allocated"]["event"]));
    assert_eq!(moment["allocated_bytes"], peaks["allocated"]["bytes"]);
    assert_eq!(peaks["reserved"]["bytes"], 1_753_219_072_u64, "PyTorch counted as many");
    assert!(moment["reserved_bytes"].as_u64() < peaks["reserved"]["bytes"].as_u64(), "or this recording shows nothing");
    let event = &moment["event"];
    assert!(stdout.contains(&format!("The most memory was allocated at event {event}")), "{stdout}");
    for sentence in object["sentences"].as_array().expect("a list") {
        let sentence = words(sentence.as_str().expect("a text").as_bytes());
        assert!(stdout.contains(&sentence), "'{sentence}' is in the JSON and not in {stdout}");
    }
    let (stdout, reserved) = explained(NAME, &["--no-fits", "--at", "reserved"]);
    assert_eq!(reserved["moment"]["reserved_bytes"], peaks["reserved"]["bytes"]);
    assert_eq!(reserved["peaks"], *peaks, "they do not depend on the moment");
    assert!(stdout.contains("The most memory was reserved at event"), "{stdout}");

    let file = recording(NAME);
    let same = &objects(&["diff", &file, &file, "--json"], 0)[0];
    assert_eq!(same["before"]["moment"], "allocated");
    assert_eq!(same["before"]["event"], *event, "it compares the moment that explain explains");
    let changes = same["changes"].as_array().expect("a list");
    assert!(!changes.is_empty() && changes.iter().all(|change| change["kind"] == "same"), "{same}");
    assert!(changes.iter().all(|change| change["bytes_before"] == change["bytes_after"]), "{same}");
    for bytes in ["requested_bytes", "allocated_bytes", "reserved_bytes"] {
        assert_eq!(same["before"][bytes], same["after"][bytes], "{bytes}");
    }
    let headline = "The second recording has as much allocated and as much reserved as the first";
    assert_eq!(same["headline"], headline);
}

/// Issue 34, point 2: frames between Python and the allocator name no holder.
#[test]
fn holders_are_lines_of_python_and_nodes_of_the_backward_pass() {
    for name in DEFAULTS {
        let file = recording(name);
        let object = &objects(&["explain", &file, "--no-fits", "--json", "--rows", "1000"], 0)[0];
        let lists = ["holders", "holders_by_line", "holders_by_module"];
        let holders = lists.map(|list| object[list].as_array().expect("a list"));
        assert!(!holders[0].is_empty(), "{name}");
        for holder in holders.into_iter().flatten() {
            let shown = holder.to_string();
            for part in ["unwind", "_PyEval", "c10::", "??"] {
                assert!(!shown.contains(part), "{name}: '{part}' in {shown}");
            }
        }
        let of_autograd = |holder: &&Value| holder["name"].as_str().is_some_and(|it| it.ends_with("Backward0"));
        let nodes = holders[0].iter().filter(of_autograd).count();
        assert_eq!(nodes > 0, name != "generate.default", "{name} has {nodes} nodes");
        let modules = holders[2].iter().filter(|holder| holder["name"] == "autograd").count();
        assert_eq!(modules > 0, nodes > 0, "{name}");
    }
}

/// Issue 34, point 3: the device is inferred from the recording, or unknown.
#[test]
fn no_device_is_assumed() {
    let (stdout, object) = explained("resnet_train.native", &["--orders", "1"]);
    assert!(object["device_bytes_total"].is_null(), "{}", object["device_bytes_total"]);
    assert_eq!(object["device_origin"], "unknown");
    for part in ["139.8 GiB", "of the device", "H200"] {
        assert!(!stdout.contains(part), "'{part}' in {stdout}");
    }
    let (stdout, object) = explained("oom_device.default", &["--no-fits"]);
    assert_eq!((&object["device_origin"], &object["device_name"]), (&"inferred".into(), &"H200".into()));
    // PyTorch reports 150,109,880,320: the size inferred from a recording is exact to a page.
    let bytes = object["device_bytes_total"].as_u64().expect("bytes");
    assert!(bytes.abs_diff(150_109_880_320) < 2 << 20, "{bytes}");
    assert!(stdout.contains("By the free memory that was recorded, the device has 139.8 GiB, H200."), "{stdout}");
}

/// Issue 34, point 6: whether a program that did not run out of memory fits on another device.
#[test]
fn program_is_asked_about_on_another_device() {
    let (stdout, object) = explained("resnet_train.native", &["--capacity", "6.5GiB", "--orders", "2"]);
    assert_eq!((&object["verdict"], &object["on_device"]["fits"]), (&"fitted".into(), &false.into()));
    assert!(object["on_device"]["oom_event"].is_u64(), "{}", object["on_device"]);
    assert!(stdout.contains("on a device of 6.5 GiB it does not fit"), "{stdout}");
    assert!(stdout.contains("do not fit, in none of 2 replays"), "{stdout}");
    let first = &object["advice"][0];
    assert_eq!((&first["kind"], &first["fits"]), (&"settings".into(), &true.into()), "{first}");
    assert_eq!(first["apply"], "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    assert!(stdout.contains("1. Set expandable_segments:True."), "{stdout}");

    let (stdout, object) = explained("resnet_train.native", &["--gpu", "rtx4090", "--orders", "2"]);
    assert_eq!(object["on_device"]["fits"], true);
    assert!(object["device_bytes_total"].is_null(), "it did not run there");
    assert!(stdout.contains("on a device of 23.5 GiB it fits"), "{stdout}");
}

/// Issue 34, point 7: what helps comes first, and it can be applied.
#[test]
fn advice_names_the_leak_and_the_call_that_sets_the_limit() {
    let advice_of = |name: &str| {
        let object = explained(name, &["--orders", "1"]).1;
        let advice = object["advice"].as_array().expect("a list").clone();
        for one in &advice {
            assert!(!one.to_string().contains("per_process_memory_fraction:1.0"), "{name}: no variable has it: {one}");
        }
        advice
    };
    let of_kind = |advice: &[Value], kind: &str| {
        let found = advice.iter().find(|one| one["kind"] == kind);
        found.unwrap_or_else(|| panic!("no {kind} in {advice:?}")).clone()
    };
    let leak = advice_of("leak.default");
    assert_eq!(leak[0]["kind"], "leak", "{leak:?}");
    assert!(leak[0]["title"].as_str().expect("a text").contains("leak (/home/me/snapshots.py:278)"), "{leak:?}");
    let limit = of_kind(&advice_of("oom_limit.default"), "limit");
    let detail = limit["detail"].as_str().expect("a text");
    assert!(detail.contains("the call overrides the environment variables"), "{detail}");
    assert!(limit["apply"].as_str().expect("a text").starts_with("torch.cuda.set_per_process_memory_fraction("));
    // Batches that double are no leak: all of the growth belongs to the last one.
    let device = advice_of("oom_device.default");
    assert!(device.iter().all(|one| one["kind"] != "leak"), "{device:?}");
    assert_eq!((&device[0]["kind"], &device[0]["fits"]), (&"batch".into(), &Value::Null), "{device:?}");
}

/// Issue 34, point 8: lines that moved are the same lines.
#[test]
fn diff_matches_lines_that_moved() {
    let file = recording("train.default");
    let options = ReadOptions { stacks: true, ..ReadOptions::default() };
    let mut snapshot = read_file(&file, &options).expect("a recording").snapshot;
    for stack in &mut snapshot.stacks {
        let mut frames = stack.to_vec();
        for frame in frames.iter_mut().filter(|frame| frame.filename.ends_with("snapshots.py")) {
            frame.line += 3;
        }
        for frame in frames.iter_mut().filter(|frame| frame.filename.ends_with("modeling_gpt2.py")) {
            frame.line += if frame.line > 400 { 20 } else { 1 };
        }
        *stack = Arc::from(frames);
    }
    let moved = std::env::temp_dir().join(format!("warpool-moved-{}.pickle", std::process::id()));
    write_snapshot(&snapshot, File::create(&moved).expect("a file")).expect("it is written");
    let found = objects(&["diff", &file, moved.to_str().expect("a path"), "--json", "--rows", "1000"], 0);
    let output = warpool(&["diff", &file, moved.to_str().expect("a path")]);
    std::fs::remove_file(&moved).expect("it is there");
    let changes = found[0]["changes"].as_array().expect("a list");
    assert!(changes.len() > 10, "{changes:?}");
    for change in changes {
        assert_eq!(change["kind"], "same", "{change}");
        assert_eq!(change["bytes_before"], change["bytes_after"], "{change}");
    }
    assert!(text(&output.stdout).contains("No difference in what the calls hold"), "{}", text(&output.stdout));
}

#[test]
fn completions_and_man_page_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let output = warpool(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("explain"), "{shell}");
    }
    assert!(text(&warpool(&["man"]).stdout).starts_with(".TH WARPOOL 1"));
}

/// Whose the memory outside the allocator was, if the recording says so: in words, a table, JSON and the page.
#[test]
fn an_account_of_the_recording_is_shown() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("account.pickle");
    let file = path.to_str().expect("a text");
    let mut snapshot = read_file(recording("verdict.outside"), &ReadOptions { stacks: true, ..ReadOptions::default() })
        .expect("a recording")
        .snapshot;
    let row = |owner: &str, what: &str, bytes: u64, known_by: &str| AccountRow {
        owner: owner.to_owned(),
        what: what.to_owned(),
        bytes,
        known_by: known_by.to_owned(),
    };
    snapshot.accounts = vec![DeviceAccount {
        device: 0,
        total: 140 << 30,
        used: 139 << 30,
        rows: vec![
            row("the allocator", "reserved", 18 << 30, "the allocator counts it"),
            row("cuBLAS", "modules and kernels", 66 << 20, "measured around its calls of the driver"),
            row("other processes", "1 process", 120 << 30, "the driver lists them"),
        ],
        remarks: vec![],
    }];
    write_snapshot(&snapshot, File::create(&path).expect("a file")).expect("it is written");
    let output = warpool(&["explain", file]);
    let shown = words(&output.stdout);
    for part in [
        "When the recording was written, 121 GiB of the device's 140 GiB were in use outside the allocator (other \
         processes, 1 process: 120 GiB; cuBLAS, modules and kernels: 66 MiB; of nobody who is known: 958 MiB).",
        "Whose it was outside the allocator, when the recording was written",
        "cuBLAS modules and kernels 66 MiB 0.1% measured around its calls of the driver",
    ] {
        assert!(shown.contains(part), "{part} is missing in {shown}");
    }
    let found = objects(&["explain", file, "--json"], 0).remove(0);
    assert_eq!(found["account"]["rows"][1]["owner"], "cuBLAS");
    assert_eq!(found["account"]["unexplained_bytes"], 958u64 << 20);
    let page = path.with_extension("html");
    let seen = objects(&["view", file, "-o", page.to_str().expect("a text"), "--json"], 0).remove(0);
    assert_eq!(seen["devices"][0]["account"], found["account"], "{seen}");
    assert!(std::fs::read_to_string(page).expect("the page").contains("in use outside the allocator"));
    // A recording without one is shown as before.
    let (shown, found) = explained("verdict.outside", &[]);
    assert!(found["account"].is_null() && !shown.contains("in use outside the allocator"));
}
