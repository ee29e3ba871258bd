//! Calls as Python makes them, through the C interface.

use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warpool_answers::abi::{
    Input, warpool_answers_version, warpool_call_free, warpool_call_json, warpool_call_new, warpool_call_page,
    warpool_call_progress, warpool_call_run, warpool_call_stop,
};
use warpool_report::request::{Call, Source};

fn recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recordings").join(format!("{name}.pickle.xz"))
}

/// The answer of a request in Rust, and its page.
fn ask(command: &str, options: Value, sources: &[Source<'_>]) -> (Value, String) {
    let call = Call::default();
    let request = json!({ "command": command, "options": options }).to_string();
    let succeeded = call.run(request.as_bytes(), sources);
    let answer: Value = serde_json::from_str(call.json()).expect("an answer is JSON");
    assert_eq!(answer.get("error").is_none(), succeeded, "{answer}");
    (answer, call.page().to_owned())
}

/// The kind and the sentence of an error.
fn error(command: &str, options: Value, sources: &[Source<'_>]) -> (String, String) {
    let (answer, _) = ask(command, options, sources);
    let text = |key: &str| answer["error"][key].as_str().unwrap_or_else(|| panic!("no error: {answer}")).to_owned();
    (text("kind"), text("message"))
}

#[test]
fn file_and_its_bytes_give_the_same_answer() {
    let path = recording("verdict.fragmentation");
    let bytes = std::fs::read(&path).expect("the recording");
    let (mut of_file, _) = ask("explain", json!({ "orders": 2 }), &[Source::Path(path.clone())]);
    let (of_bytes, _) = ask("explain", json!({ "orders": 2 }), &[Source::Bytes(&bytes)]);
    let device = &mut of_file["devices"][0];
    assert_eq!(device["object"]["verdict"], "fragmentation");
    assert_eq!(device["object"]["file"], path.to_string_lossy().as_ref());
    assert!(device["headline"].as_str().is_some_and(|headline| headline.starts_with("out of memory")));
    device["object"]["file"] = Value::Null;
    assert_eq!(of_file, of_bytes);
}

#[test]
fn replay_answers_what_if() {
    let source = [Source::Path(recording("verdict.fragmentation"))];
    let (answer, _) = ask("replay", json!({}), &source);
    assert_eq!(answer["devices"][0]["object"]["outcome"], "out_of_memory");
    let what_if = json!({ "set": ["expandable_segments:True"], "capacity": "24GiB", "orders": 2, "rounds": 3 });
    let (answer, _) = ask("replay", what_if, &source);
    let object = &answer["devices"][0]["object"];
    assert_eq!(object["outcome"], "completed");
    assert_eq!(object["in_force"]["device_bytes_total"], 24_u64 << 30);
    assert_eq!(object["rounds"].as_array().map(Vec::len), Some(3));
    let wrong = |options: Value| error("replay", options, &source);
    assert!(wrong(json!({ "settings": "nosuch:1" })).1.starts_with("settings: "));
    assert!(wrong(json!({ "set": ["backend:paged"] })).1.contains("choose it with allocator=\"paged\""));
    assert!(wrong(json!({ "allocator": "jemalloc" })).1.contains("one of caching, driver-pool, paged"));
}

#[test]
fn tune_ranks_candidates_for_all_recordings() {
    let sources = ["verdict.fragmentation", "verdict.limit"].map(|name| Source::Path(recording(name)));
    let (answer, _) = ask("tune", json!({ "orders": 1, "candidates": ["max_split_size_mb:32"] }), &sources);
    let candidates = answer["candidates"].as_array().expect("a list");
    assert!(candidates.iter().any(|candidate| candidate["set"] == "max_split_size_mb:32"), "{answer}");
    assert_eq!(candidates[0]["rank"], 0);
    assert_eq!(candidates[0]["files"].as_array().map(Vec::len), Some(2));
    assert!(answer["recommendation"].as_str().is_some_and(|sentence| sentence.ends_with('.')));
    assert_eq!(error("tune", json!({ "candidates": ["nosuch:1"] }), &sources).0, "option");
}

#[test]
fn pages_come_beside_their_objects() {
    let [one, other] = ["verdict.growth", "verdict.limit"].map(|name| Source::Path(recording(name)));
    let (answer, page) = ask("view", json!({ "device": 0 }), std::slice::from_ref(&one));
    assert!(page.starts_with("<!doctype html>\n<!-- warpool report"));
    assert_eq!(answer["object"]["page_bytes"], page.len());
    assert_eq!(answer["title"], "verdict.growth.pickle.xz");
    let (answer, page) = ask("diff", json!({ "page": true }), &[one.clone(), other.clone()]);
    assert!(page.contains("verdict.growth.pickle.xz and verdict.limit.pickle.xz"));
    assert!(answer["devices"][0]["object"]["changes"].as_array().is_some_and(|changes| !changes.is_empty()));
    let (_, page) = ask("diff", json!({}), &[one, other]);
    assert_eq!(page, "", "not asked for");
}

#[test]
fn whatever_is_wrong_is_an_error_of_its_kind() {
    let good = || Source::Path(recording("verdict.limit"));
    let check = |(kind, message): (String, String), expected: &str, part: &str| {
        assert_eq!(kind, expected, "{message}");
        assert!(message.contains(part), "{message}");
    };
    check(error("explain", json!({ "colour": 1 }), &[good()]), "option", "explain has no option colour");
    check(error("explain", json!({ "capacity": "80" }), &[good()]), "option", "without a unit");
    check(error("view", json!({ "device": 7 }), &[good()]), "option", "no device 7 in it, only 0");
    check(error("explain", json!({ "memory_limit": 1 }), &[good()]), "input", "raise memory_limit");
    check(error("explain", json!({}), &[Source::Bytes(b"not a recording")]), "input", "it is text");
    check(error("explain", json!({}), &[Source::Bytes(b"")]), "input", "empty");
    let missing = Source::Path("/nowhere/oom.pickle".into());
    check(error("explain", json!({}), &[missing]), "file", "No such file");
    check(error("explain", json!({}), &[Source::Path("/".into())]), "file", "directory");
    check(error("explain", json!({}), &[]), "internal", "no command explain of 0 recordings");
    check(error("nosuch", json!({}), &[good()]), "internal", "no command nosuch");
}

#[test]
fn stopped_call_ends_soon_and_says_so() {
    let call = Call::default();
    let source = [Source::Path(recording("oom_stacks.fraction_6gib"))];
    let request = json!({ "command": "explain", "options": { "orders": 1000 } }).to_string();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| call.run(request.as_bytes(), &source));
        // In the middle of the replays, which would take minutes.
        let deadline = Instant::now() + Duration::from_secs(60);
        while call.work().progress().0 < 2 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(200));
        let asked = Instant::now();
        call.work().stop.stop();
        assert!(!running.join().expect("no panic"));
        assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    });
    assert!(call.json().contains("\"stopped\""), "{}", call.json());
}

#[test]
fn call_is_run_once() {
    let call = Call::default();
    assert_eq!((call.json(), call.page()), ("", ""), "before it is run");
    assert!(!call.run(b"not a request", &[]));
    let first = call.json().to_owned();
    assert!(first.contains("not a JSON object"), "{first}");
    assert!(!call.run(b"{\"command\": \"explain\"}", &[]));
    assert_eq!(call.json(), first);
}

#[test]
fn calls_through_the_c_interface() {
    // SAFETY: a text of the library.
    let version = unsafe { std::ffi::CStr::from_ptr(warpool_answers_version()) };
    assert_eq!(version.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    let call = warpool_call_new();
    let path = recording("verdict.limit");
    let path = path.to_str().expect("the path is UTF-8");
    let inputs = [Input { data: path.as_ptr(), size: path.len(), is_path: 1 }];
    let request = br#"{"command": "explain", "options": {"no_fits": true}}"#;
    let (mut size, mut progress) = (7_usize, [9_u64; 3]);
    // SAFETY: the call is not freed.
    assert!(unsafe { warpool_call_json(call, &raw mut size) }.is_null());
    assert_eq!(size, 0);
    // SAFETY: all sizes are those of what is given.
    let failed = unsafe { warpool_call_run(call, request.as_ptr(), request.len(), inputs.as_ptr(), inputs.len()) };
    assert_eq!(failed, 0);
    // SAFETY: the call is not freed, and there is room for three.
    unsafe { warpool_call_progress(call, progress.as_mut_ptr()) };
    assert_eq!(progress[0], 2, "{progress:?}");
    // SAFETY: the call is not freed.
    let json = unsafe { warpool_call_json(call, &raw mut size) };
    // SAFETY: `length` bytes, until the call is freed.
    let json: Value = serde_json::from_slice(unsafe { std::slice::from_raw_parts(json, size) }).expect("JSON");
    assert_eq!(json["devices"][0]["object"]["verdict"], "limit");
    // SAFETY: the call is not freed.
    assert!(unsafe { warpool_call_page(call, &raw mut size) }.is_null());
    // SAFETY: the call is not freed; it has ended, so nothing happens.
    unsafe { warpool_call_stop(call) };
    // SAFETY: no one uses it any more.
    unsafe { warpool_call_free(call) };
    // SAFETY: null is allowed.
    unsafe { warpool_call_free(ptr::null_mut()) };
}

#[test]
fn calls_run_at_once() {
    let names = ["verdict.growth", "verdict.limit", "verdict.outside", "verdict.fragmentation"];
    let verdict = |name: &str| {
        let (answer, _) = ask("explain", json!({ "no_fits": true, "gpu": "h200" }), &[Source::Path(recording(name))]);
        answer["devices"][0]["object"]["verdict"].as_str().expect("a verdict").to_owned()
    };
    std::thread::scope(|scope| {
        let running = names.map(|name| scope.spawn(move || verdict(name)));
        let found = running.map(|thread| thread.join().expect("no panic"));
        assert_eq!(found, ["growth", "limit", "outside", "fragmentation"]);
    });
}
