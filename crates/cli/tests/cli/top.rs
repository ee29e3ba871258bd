//! `top` and `limit`, with processes on the simulated GPU that publish pages.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::{assert_usage_error, objects, text, warpool};

const MIB: u64 = 1 << 20;

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("warpool-top-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::temp_dir().join(name))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// What `top --json` prints of one kind.
    fn kind(&self, kind: &str) -> Vec<Value> {
        let all = objects(&["top", "--json", "--sort", "pid", "--pages", self.path()], 0);
        all.into_iter().filter(|object| object["kind"] == kind).collect()
    }

    /// The page of a process.
    fn page_of(&self, pid: u32) -> PathBuf {
        let of_process = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{pid}-"));
        std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).find(of_process).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process with a page, that is killed when it is dropped.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(folder: &Path, mib: u64, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warpool"));
        command.arg("__page").arg(folder).arg(mib.to_string()).args(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut process = Self { child, input, output };
        assert_eq!(process.answer(), "published");
        process
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.answer()
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn processes_and_cards_are_shown_while_they_live() {
    let folder = Folder::new();
    let mut one = Process::start(&folder.0, 40, &["--command", "train\u{1b}[2J.py"]);
    let two = Process::start(&folder.0, 60, &[]);
    let of = |pid: u32| {
        let processes = folder.kind("process");
        processes.into_iter().find(|process| process["pid"] == pid).unwrap()
    };
    let process = of(one.pid());
    assert_eq!((&process["state"], &process["device"]), (&"ok".into(), &0.into()));
    assert_eq!(process["command"], "train\u{1b}[2J.py");
    assert_eq!(process["bytes_allocated"], 80 * MIB);
    assert_eq!(process["tags"][0]["name"], "weights");
    assert_eq!(process["tags"][0]["bytes_reserved"], 40 * MIB);
    assert_eq!((process["pools"].as_array().unwrap().len(), process["streams"].as_array().unwrap().len()), (2, 2));
    assert!(process["bytes_limit"].is_null() && process["last_oom"].is_null());
    // Both are on the same simulated card.
    let cards = folder.kind("card");
    assert_eq!((&cards[0]["uuid"], &cards[0]["processes"]), (&process["uuid"], &2.into()));
    assert!(cards[0]["bytes_reserved"].as_u64() >= Some(200 * MIB));
    assert!(cards[0]["bytes_used"].is_u64(), "a process asked its driver");

    assert_eq!(one.ask("oom"), "out of memory");
    assert_eq!(one.ask("sleep"), "asleep");
    let process = of(one.pid());
    assert_eq!((&process["bytes_asleep"], &process["ooms"]), (&(40 * MIB).into(), &1.into()));
    assert_eq!(process["last_oom"]["bytes_requested"], 1_u64 << 50);

    let shown = warpool(&["top", "--once", "--pages", folder.path()]);
    let shown = text(&shown.stdout);
    assert!(shown.contains("2 processes with Warpool") && shown.contains("train\\u{1b}[2J.py"), "{shown}");
    assert!(shown.contains("Simulated H200"), "{shown}");
    let gone = two.pid();
    drop(two);
    assert!(folder.kind("process").iter().all(|process| process["pid"] != gone));
    drop(one);
    assert_eq!(folder.kind("total")[0]["processes"], 0);
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0, "their pages were removed");
    let shown = warpool(&["top", "--once", "--pages", folder.path()]);
    assert!(text(&shown.stdout).starts_with("No process of this user publishes"));
    let shown = warpool(&["top", "--once", "--pages", folder.path(), "--driver", "sim", "--sim-devices", "1"]);
    assert!(text(&shown.stdout).contains("Simulated H200"), "a card without a process: {}", text(&shown.stdout));
}

#[test]
fn every_key_is_in_the_documentation() {
    let folder = Folder::new();
    let mut process = Process::start(&folder.0, 4, &[]);
    process.ask("oom");
    std::fs::create_dir(folder.0.join("x.page")).unwrap();
    let docs = include_str!("../../../../docs/json.md");
    let section = docs.split("## `warpool top`").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut missing = Vec::new();
    for object in objects(&["top", "--json", "--pages", folder.path()], 0) {
        let inner = ["last_oom", "tags"].map(|key| if key == "tags" { &object[key][0] } else { &object[key] });
        for object in [&object].into_iter().chain(inner).filter_map(Value::as_object) {
            missing.extend(object.keys().filter(|key| !section.contains(&format!("`{key}`"))).cloned());
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn unreadable_pages_are_rows() {
    let folder = Folder::new();
    let processes = [4, 8, 12].map(|mib| Process::start(&folder.0, mib, &[]));
    let damage = |index: usize, at: u64, bytes: &[u8]| {
        let path = folder.page_of(processes[index].pid());
        File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    };
    damage(0, 0, b"nonsense");
    // Longer than it was.
    damage(1, 1 << 20, b"longer");
    let unreadable = folder.kind("unreadable");
    let why: Vec<&str> = unreadable.iter().map(|object| object["why"].as_str().unwrap()).collect();
    assert_eq!(why.len(), 2, "{why:?}");
    assert!(why.contains(&"it does not begin as a page does") && why.contains(&"it has not the length of a page"));
    assert_eq!(folder.kind("process").len(), 1);
    let shown = warpool(&["top", "--once", "--pages", folder.path()]);
    assert_eq!(text(&shown.stdout).matches("cannot read ").count(), 2);
}

#[test]
fn a_limit_is_set_from_outside_if_the_process_lets_it() {
    let folder = Folder::new();
    let limit = |pid: u32, more: &[&str], status: i32| {
        let pid = pid.to_string();
        let mut arguments = vec!["limit", &pid];
        arguments.extend(more);
        arguments.extend(["--json", "--pages", folder.path()]);
        objects(&arguments, status).remove(0)
    };
    let mut process = Process::start(&folder.0, 4, &[]);
    let answer = limit(process.pid(), &["64MiB"], 0);
    assert_eq!((&answer["outcome"], &answer["bytes_limit"]), (&"applied".into(), &(64 * MIB).into()));
    assert_eq!(process.ask("allocate"), "refused");
    assert_eq!(folder.kind("process")[0]["bytes_limit"], 64 * MIB);
    assert!(folder.kind("process")[0]["last_oom"]["by_limit"].as_bool().unwrap());
    let answer = limit(process.pid(), &["none"], 0);
    assert!(answer["bytes_limit"].is_null());
    assert_eq!(process.ask("allocate"), "enough");
    let refuses = Process::start(&folder.0, 4, &["--read-only"]);
    assert_eq!(limit(refuses.pid(), &["64MiB"], 1)["outcome"], "refused");
    let pid = process.pid().to_string();
    let pages = ["--pages", folder.path()];
    assert_usage_error(&["limit", &pid, "1GiB", "--device", "7", pages[0], pages[1]], &["no device 7"]);
    assert_usage_error(&["limit", "1", "1GiB", pages[0], pages[1]], &["process 1 publishes no page"]);
    assert_usage_error(&["limit", &pid, "40", pages[0], pages[1]], &["has no unit"]);
}

#[test]
fn metrics_are_served_and_nothing_else() {
    let folder = Folder::new();
    let _process = Process::start(&folder.0, 40, &["--command", "a \"b\""]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_warpool"));
    command.args(["top", "--metrics", "127.0.0.1:0", "--pages", folder.path()]);
    let mut server = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("serving http://").unwrap().split('/').next().unwrap().to_owned();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answers = ["GET /metrics", "POST /metrics", "GET /"].map(|head| ask(&format!("{head} HTTP/1.1\r\n\r\n")));
    let incomplete = ask("GET /metr");
    server.kill().unwrap();
    server.wait().unwrap();
    let [metrics, post, other] = &answers;
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text"), "{metrics}");
    assert!(metrics.ends_with("# EOF\n") && metrics.contains("command=\"a \\\"b\\\"\""), "{metrics}");
    let line = metrics.lines().find(|line| line.starts_with("warpool_allocated_bytes{")).unwrap();
    assert!(line.ends_with(&format!(" {}", 80 * MIB)), "{line}");
    assert!(metrics.contains("tag=\"weights\""), "{metrics}");
    // Every family is declared once, before its samples.
    let (mut families, mut current) = (Vec::new(), String::new());
    for line in metrics.split("\r\n\r\n").nth(1).unwrap().lines() {
        match line.strip_prefix("# TYPE ") {
            Some(declared) => {
                let (name, kind) = declared.split_once(' ').unwrap();
                assert!(!families.contains(&name), "{name} twice");
                families.push(name);
                current = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
            }
            None => assert!(line == "# EOF" || line.split(['{', ' ']).next() == Some(&current), "{line}"),
        }
    }
    assert!(post.starts_with("HTTP/1.1 405 ") && other.starts_with("HTTP/1.1 404 "), "{post} {other}");
    assert!(incomplete.starts_with("HTTP/1.1 400 "), "{incomplete}");
}

#[test]
fn wrong_use_is_a_sentence() {
    let folder = Folder::new();
    assert_usage_error(&["top", "--pages", folder.path()], &["this is no terminal", "--once"]);
    assert_usage_error(&["top", "--once", "--sort", "size"], &["choose one of reserved, allocated"]);
    assert_usage_error(&["top", "--interval", "0"], &["from 0.1 to 60"]);
    assert_usage_error(&["top", "--once", "--metrics", "127.0.0.1:0"], &["--once"]);
    let missing = format!("{}/a/b", folder.path());
    assert_usage_error(&["top", "--once", "--pages", &missing], &["the folder of the pages", "cannot be used"]);
}
