//! `view` and `diff -o`: the written page, the figures, and refused requests. `tests/browser` opens the pages.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{assert_usage_error, objects, text, warpool};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

fn recording(name: &str) -> String {
    format!("{RECORDINGS}/{name}.pickle.xz")
}

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("warpool-view-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The only object that the command prints.
fn object(arguments: &[&str]) -> Value {
    let mut found = objects(arguments, 0);
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn bytes_of(file: &str) -> u64 {
    Path::new(file).metadata().expect("it was written").len()
}

#[test]
fn page_is_written_and_its_figures_are_printed() {
    let folder = Folder::new("figures");
    let page = folder.file("report.html");
    let written = object(&["view", &recording("oom_stacks.fraction_6gib"), "-o", &page, "--json"]);
    assert_eq!((&written["schema_version"], &written["page"]), (&1.into(), &page.as_str().into()));
    assert_eq!(written["page_bytes"], bytes_of(&page));
    assert!(bytes_of(&page) < 1_000_000, "{} bytes", bytes_of(&page));
    let device = &written["devices"][0];
    assert_eq!((&device["events"], &device["ooms"], &device["retries"]), (&108_720.into(), &1.into(), &7.into()));
    assert_eq!(device["verdict"], "fragmentation");
    for peak in ["peak_live", "peak_reserved"] {
        let parts = device[peak]["parts"].as_object().expect("a map");
        let sum: u64 = parts.values().map(|bytes| bytes.as_u64().expect("bytes")).sum();
        assert_eq!(device[peak]["reserved_bytes"], sum, "{peak}: the parts add up");
    }
    assert_eq!(device["peak_reserved"]["reserved_bytes"], 6_438_256_640_u64);
    let html = std::fs::read_to_string(&page).expect("a page");
    assert!(html.starts_with("<!doctype html>") && html.contains("oom_stacks.fraction_6gib.pickle.xz"));
}

/// The manifest for the script of a page.
fn manifest(page: &str) -> Value {
    let html = std::fs::read_to_string(page).expect("a page");
    let (_, rest) = html.split_once("id=\"manifest\">").expect("it has a manifest");
    let (text, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn moments_of_the_page_are_those_of_the_figures() {
    let folder = Folder::new("moments");
    let page = folder.file("report.html");
    let written = object(&["view", &recording("oom_stacks.fraction_6gib"), "-o", &page, "--json"]);
    let figures = &written["devices"][0];
    let told = manifest(&page);
    let device = &told["devices"][0];
    let moment = |name: &str| {
        let moments = device["moments"].as_array().expect("a list");
        moments.iter().find(|moment| moment["name"] == name).expect("it is there").clone()
    };
    for (name, peak, bytes) in
        [("most allocated", "peak_live", "live_bytes"), ("most reserved", "peak_reserved", "reserved_bytes")]
    {
        assert_eq!(moment(name)["bytes"], figures[peak][bytes], "{name}");
        assert_eq!(moment(name)["position"], figures[peak]["position"], "{name}");
        assert_eq!(moment(name)["requested_bytes"], figures[peak]["parts"]["allocated"], "{name}");
    }
    let failed = figures["moment"]["event"].as_u64().expect("an event") + 1;
    assert_eq!(moment("out of memory")["position"], failed);
    assert_eq!(device["moment_position"], failed);
    for list in ["advice", "categories"] {
        assert!(device[list].is_array(), "the page reads {list}");
    }
    // Regions are a part of the page even if there are none.
    let html = std::fs::read_to_string(&page).expect("a page");
    for section in ["regions", "contexts"] {
        assert_eq!(html.matches(&format!("id=\"device0.{section}\"")).count(), 1, "{section}");
    }
}

#[test]
fn pages_are_replaced_and_other_files_are_not() {
    let folder = Folder::new("replaced");
    let (page, other) = (folder.file("report.html"), folder.file("notes.html"));
    let file = recording("verdict.limit");
    for _ in 0..2 {
        assert_eq!(warpool(&["view", &file, "-o", &page]).status.code(), Some(0), "a report is replaced");
    }
    std::fs::write(&other, "my notes").expect("a file");
    assert_usage_error(&["view", &file, "-o", &other], &["notes.html exists and is not a report of warpool"]);
    assert_usage_error(&["diff", &file, &file, "-o", &other], &["notes.html exists and is not a report of warpool"]);
    assert_eq!(std::fs::read_to_string(&other).expect("it is there"), "my notes");
    assert_usage_error(&["view", &file, "-o", &folder.file("no/such/report.html")], &["cannot write", "no/such"]);
    assert_usage_error(&["view", &file, "-o", &folder.file("")], &["it is a folder"]);
    let left: Vec<_> = std::fs::read_dir(&folder.0).expect("the folder").collect();
    assert_eq!(left.len(), 2, "no drafts are left: {left:?}");
}

#[test]
fn odd_recordings_are_shown_or_refused() {
    let folder = Folder::new("odd");
    let (page, damaged) = (folder.file("report.html"), folder.file("damaged.pickle.xz"));
    assert_usage_error(&["view", "/nonexistent.pickle", "-o", &page], &["cannot open /nonexistent.pickle"]);
    std::fs::write(&damaged, []).expect("a file");
    assert_usage_error(&["view", &damaged, "-o", &page], &["damaged.pickle.xz"]);
    let whole = std::fs::read(recording("resnet_train.native")).expect("a recording");
    std::fs::write(&damaged, &whole[..whole.len() / 2]).expect("a file");
    assert_usage_error(&["view", &damaged, "-o", &page], &["damaged.pickle.xz"]);
    assert_usage_error(
        &["view", &recording("mempool.native"), "--device", "3", "-o", &page],
        &["there is no device 3 in it, only 0"],
    );
    assert!(!Path::new(&page).exists(), "nothing was written");
    let output = warpool(&["-q", "view", &recording("mempool.native"), "--device", "0", "-o", &page]);
    assert_eq!(text(&output.stdout).lines().count(), 1, "{}", text(&output.stdout));
}

#[test]
fn difference_is_a_page_too() {
    let folder = Folder::new("difference");
    let page = folder.file("report.html");
    let files = [recording("verdict.limit"), recording("verdict.growth")];
    let written = object(&["diff", &files[0], &files[1], "-o", &page, "--json"]);
    assert_eq!((&written["page"], &written["page_bytes"]), (&page.as_str().into(), &bytes_of(&page).into()));
    let same = warpool(&["diff", &files[0], &files[0], "-o", &page]);
    assert!(same.status.success() && text(&same.stdout).contains("No difference in what"), "{}", text(&same.stderr));
    let html = std::fs::read_to_string(&page).expect("a page");
    for id in ["before-device0.allocations", "after-device0.allocations"] {
        assert_eq!(html.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
    }
}
