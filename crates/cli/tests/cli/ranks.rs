//! Many recordings: `explain` of a folder, a pattern or a list, `summarize` and `merge`, the heat map of `view`, and
//! `tune`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fastrand::Rng;

use crate::{assert_usage_error, objects, text, warpool};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

/// A folder with the ranks of a job, removed at the end: links to recordings, and a damaged file.
struct Job(PathBuf);

impl Job {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("warpool-ranks-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let job = Self(folder);
        let recordings = ["verdict.limit", "verdict.limit", "verdict.growth", "train.default"];
        for (rank, recording) in [0, 2, 10, 3].into_iter().zip(recordings) {
            let from = format!("{RECORDINGS}/{recording}.pickle.xz");
            std::fs::copy(from, job.0.join(format!("rank{rank}.pickle.xz"))).expect("copied");
        }
        std::fs::write(job.0.join("rank4.pickle"), b"\x80\x02}q\x00").expect("written");
        job
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path").to_owned()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The exit status is 2 because of the damaged file.
fn report(arguments: &[&str]) -> String {
    let output = warpool(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
    let stderr = text(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("rank4.pickle: "), "{stderr}");
    text(&output.stdout).to_owned()
}

fn with_stdin(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_warpool"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built for this test");
    child.stdin.take().expect("a pipe").write_all(input).expect("it reads all");
    child.wait_with_output().expect("it ends")
}

#[test]
fn ranks_are_compared_in_natural_order() {
    let job = Job::new("order");
    let shown = report(&["explain", &job.path("")]);
    let first = shown.lines().next().expect("a headline");
    assert_eq!(first, "5 recordings: 3 ran out of memory, 3 groups of equal ranks, 1 cannot be read");
    let all = shown.split("\n5 recordings\n").nth(1).expect("the table of all");
    let names: Vec<&str> = all.lines().filter(|line| line.starts_with("  rank ")).map(|line| &line[2..9]).collect();
    assert_eq!(names, ["rank 0 ", "rank 2 ", "rank 3 ", "rank 4 ", "rank 10"], "{shown}");
    assert!(shown.contains("rank 4 cannot be read: "), "{shown}");
    assert!(shown.contains("  ranks 0, 2 "), "a group: {shown}");
    assert!(shown.contains("rank 10 differs from rank 0"), "{shown}");

    let object = objects(&["explain", &job.path(""), "--ranks", "--json"], 2).remove(0);
    assert_eq!((&object["recordings"], &object["ran_out"], &object["unreadable"]), (&5.into(), &3.into(), &1.into()));
    let limiting: Vec<&str> =
        object["limiting"].as_array().expect("a list").iter().filter_map(|it| it.as_str()).collect();
    assert_eq!(limiting.len(), 4);
    assert_eq!(limiting[3], "rank 3", "it is the one that did not run out");
    assert_eq!(object["more"]["name"], "rank 3");
    let group = &object["groups"][0];
    assert_eq!(group["names"], serde_json::json!(["rank 0", "rank 2"]));
    let difference = &object["groups"][2]["difference"];
    assert!(!difference["changes"].as_array().expect("a list").is_empty(), "{difference}");
    // Without --ranks there is an object for each file and device, as ever.
    assert_eq!(objects(&["explain", &job.path(""), "--no-fits", "--json"], 2).len(), 4);
}

#[test]
fn folders_patterns_and_lists_name_the_same_files() {
    let job = Job::new("lists");
    let expected = report(&["explain", &job.path("")]);
    assert_eq!(report(&["explain", &job.path("rank*.pickle*")]), expected);
    let files = ["rank10.pickle.xz", "rank4.pickle", "rank0.pickle.xz", "rank3.pickle.xz", "rank2.pickle.xz"];
    let list: String = files.iter().map(|file| format!("{}\n", job.path(file))).collect();
    let output = with_stdin(&["explain", "-"], list.as_bytes());
    assert_eq!((text(&output.stdout), output.status.code()), (expected.as_str(), Some(2)));
    // A recording is no list.
    let content = std::fs::read(job.path("rank3.pickle.xz")).expect("it is there");
    let output = with_stdin(&["explain", "-", "--no-fits"], &content);
    assert!(text(&output.stdout).starts_with("(stdin): "), "{}", text(&output.stderr));
    assert_usage_error(&["explain", &job.path("nothing*.pickle")], &["no file has such a name"]);
}

#[test]
fn parts_merge_to_the_report_of_all_files() {
    let job = Job::new("parts");
    let expected = report(&["explain", &job.path("")]);
    let expected_json = objects(&["explain", &job.path(""), "--ranks", "--json"], 2);
    let files: Vec<String> =
        ["rank0.pickle.xz", "rank2.pickle.xz", "rank3.pickle.xz", "rank4.pickle", "rank10.pickle.xz"]
            .map(|file| job.path(file))
            .to_vec();
    for seed in 0..4 {
        let mut rng = Rng::with_seed(seed);
        let folder = job.path(&format!("parts{seed}"));
        std::fs::create_dir(&folder).expect("a folder");
        let mut left = files.clone();
        rng.shuffle(&mut left);
        let mut parts = Vec::new();
        while !left.is_empty() {
            let taken = left.split_off(left.len() - rng.usize(1..=left.len()));
            let part = format!("{folder}/{}.json", parts.len());
            let mut arguments = vec!["summarize", "-o", &part];
            arguments.extend(taken.iter().map(String::as_str));
            let damaged = taken.iter().any(|file| file.ends_with("rank4.pickle"));
            let status = warpool(&arguments).status.code();
            assert_eq!(status, Some(if damaged { 2 } else { 0 }), "{arguments:?}");
            parts.push(part);
        }
        // A part that comes twice changes nothing.
        parts.push(parts[rng.usize(0..parts.len())].clone());
        rng.shuffle(&mut parts);
        let arguments = |more: &[&'static str]| -> Vec<String> {
            ["merge"]
                .into_iter()
                .map(str::to_owned)
                .chain(parts.clone())
                .chain(more.iter().map(|it| (*it).to_owned()))
                .collect()
        };
        let merge = arguments(&[]);
        assert_eq!(report(&merge.iter().map(String::as_str).collect::<Vec<_>>()), expected, "seed {seed}");
        let merge = arguments(&["--json"]);
        assert_eq!(objects(&merge.iter().map(String::as_str).collect::<Vec<_>>(), 2), expected_json, "seed {seed}");
        assert_eq!(report(&["merge", &folder]), expected, "seed {seed}");
    }
}

#[test]
fn part_has_what_the_arguments_say() {
    let job = Job::new("identity");
    let (file, part) = (job.path("rank3.pickle.xz"), job.path("part.json"));
    let arguments = ["summarize", &file, "--rank", "7", "--world", "64", "--host", "gpu3", "-o", &part];
    let written = objects(&[&arguments[..], &["--json"]].concat(), 0).remove(0);
    assert_eq!(written["part_bytes"], Path::new(&part).metadata().expect("it was written").len());
    assert!(written["part_bytes"].as_u64() < Some(64 << 10), "{written}");
    let row = &objects(&["merge", &part, "--json"], 0)[0]["ranks"][0];
    assert_eq!((&row["name"], &row["world"], &row["host"]), (&"rank 7".into(), &64.into(), &"gpu3".into()));
    // Without a file to write it is printed.
    let printed = warpool(&["summarize", &file]);
    let output = with_stdin(&["merge", "-", "--json"], &printed.stdout);
    assert!(text(&output.stdout).contains("\"rank 3\""), "{}", text(&output.stderr));
    assert_usage_error(&["merge", &file], &["rank3.pickle.xz: it is not a part"]);
    assert_usage_error(&["summarize", &file, "-o", "/nonexistent/part.json"], &["cannot write /nonexistent/part.json"]);
}

#[test]
fn memory_is_bounded_for_all_together() {
    let job = Job::new("memory");
    let expected = report(&["explain", &job.path("")]);
    // Half of it is too little for one of them, which is read alone then.
    let bounded = report(&["explain", &job.path(""), "--jobs", "2", "--memory", "600MiB"]);
    assert_eq!(bounded, expected);
    let refused = objects(&["explain", &job.path(""), "--ranks", "--memory", "1MiB", "--json"], 2).remove(0);
    let error = refused["ranks"][2]["error"].as_str().expect("it needs more");
    assert!(error.contains("it needs more than 1 MiB of memory; raise --memory"), "{error}");
}

#[test]
fn heat_map_is_written_with_a_page_for_each() {
    let job = Job::new("view");
    let page = job.path("ranks.html");
    let output = warpool(&["view", &job.path(""), "-o", &page, "--pages", "--no-fits", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_str(text(&output.stdout)).expect("one object");
    assert_eq!((&object["recordings"], &object["pages"]), (&5.into(), &4.into()));
    assert_eq!(object["page_bytes"], Path::new(&page).metadata().expect("it was written").len());
    let html = std::fs::read_to_string(&page).expect("it was written");
    for name in ["0000-rank-0", "0003-rank-10"] {
        assert!(html.contains(&format!("\"link\":\"ranks/{name}.html\"")), "{name}");
        assert!(job.0.join(format!("ranks/{name}.html")).is_file(), "{name}");
    }
    assert_usage_error(&["view", &job.path(""), "--device", "0"], &["--device is for one recording"]);
}

#[test]
fn one_setting_for_many_is_checked_on_all() {
    let job = Job::new("tune");
    let folder = job.path("many");
    std::fs::create_dir(&folder).expect("a folder");
    for rank in 0..9 {
        let from = format!("{RECORDINGS}/verdict.fragmentation.pickle.xz");
        std::fs::copy(from, format!("{folder}/rank{rank}.pickle.xz")).expect("copied");
    }
    let best = objects(&["tune", &folder, "--orders", "1", "--json"], 0).remove(0);
    assert_eq!(best["fits"], true);
    assert_eq!(best["files"], serde_json::json!([format!("{folder}/rank0.pickle.xz")]), "one of the only group");
    assert_eq!(best["checked"], serde_json::json!({ "recordings": 8, "not_on": [] }));
    std::fs::copy(job.path("rank4.pickle"), format!("{folder}/rank4.pickle")).expect("copied");
    let output = warpool(&["tune", &folder, "--orders", "1"]);
    assert_eq!(output.status.code(), Some(2), "one is damaged");
    let words = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("The best was replayed on the other 8, and it fits on all of them."), "{words}");
}
