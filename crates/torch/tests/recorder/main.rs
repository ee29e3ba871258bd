//! Recordings that a program writes about itself, on the simulated GPU: what they have in them, what happens where none
//! can be written, and how much memory the events take, counted by the allocator of this binary.

#[path = "../../../trace/tests/memory/counting.rs"]
mod counting;
mod interpreter;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use warpool::memory::Settings;
use warpool::memory::report::Snapshot;
use warpool_driver::ForeignStream;
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_torch::{Error, Runtime};
use warpool_trace::{ReadOptions, read_file};

use interpreter::with_frames;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

const MIB: isize = 1 << 20;
const DEFAULT: ForeignStream = ForeignStream::NULL;

/// A runtime whose recordings go to a folder of this name.
fn recording(name: &str, settings: &str) -> (Runtime, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recorder").join(name);
    let _ = fs::remove_dir_all(&folder);
    let config = SimConfig::default().with_capacity(2 << 30).without_suballocation_tracking();
    let backend = settings.split(',').next().expect("the backend");
    let runtime = Runtime::new(Arc::new(SimDriver::new(config)), Settings::parse(backend).unwrap()).unwrap();
    runtime.set_record_folder(&folder).unwrap();
    runtime.set_settings(settings).unwrap();
    runtime.set_python(Some(interpreter::interface()));
    (runtime, folder)
}

/// Frames of a model's forward pass, as many as are usual.
fn frames(call: usize) -> Vec<(usize, i32)> {
    let deep = (0..36).map(|depth| (depth * 7 % 60, 100 + (depth * 3) as i32));
    [(1000 + call % 400, (call % 90) as i32), (2000 + call % 50, 7)].into_iter().chain(deep).collect()
}

fn read(path: &Path) -> Snapshot {
    read_file(path, &ReadOptions { stacks: true, ..ReadOptions::default() }).unwrap().snapshot
}

fn out_of_memory(runtime: &Runtime) -> (Error, String) {
    let error = runtime.malloc(1600 * MIB, 0, DEFAULT).unwrap_err();
    let note = runtime.record_out_of_memory(&error);
    (error, note)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn out_of_memory_is_recorded_with_the_lines_that_matter() {
    for backend in ["backend:native", "backend:paged"] {
        let (runtime, folder) = recording(&backend.replace(':', "-"), &format!("{backend},record:oom"));
        let kept = with_frames(vec![(3, 42), (4, 7)], || runtime.malloc(1000 * MIB, 0, DEFAULT).unwrap());
        let (error, note) = with_frames(vec![(5, 43), (4, 8)], || out_of_memory(&runtime));
        assert!(error.is_out_of_memory());
        let lines: Vec<&str> = note.lines().collect();
        assert_eq!((lines.len(), lines[0]), (7, ""), "{note}");
        assert!(lines[1].starts_with("Why: out of memory: "), "{note}");
        assert_eq!(lines[2], "Asked for: 1.6 GiB on GPU 0", "{note}");
        assert!(lines[3].starts_with("Then: 1000 MiB allocated of ") && lines[3].ends_with(" free of 2 GiB"), "{note}");
        assert!(lines[4].starts_with("Most is held by: method_3 (/home/me/project/package/module_3.py:42)"), "{note}");
        assert!(lines[4].ends_with(": 1000 MiB in 1 block"), "{note}");
        assert!(lines[5].starts_with("What to do: "), "{note}");
        let pid = std::process::id();
        let expected = folder.join(format!("warpool-rank0-pid{pid}-1-oom.pickle"));
        assert!(lines[6].starts_with(&format!("Recording: {} (explained in ", expected.display())), "{note}");

        let snapshot = read(&expected);
        let of = |addr: u64| snapshot.traces[0].iter().find(|entry| entry.addr == addr).expect("an event");
        let stack = &snapshot.stacks[of(kept.0).stack.expect("a stack").index()];
        let shown: Vec<_> = stack.iter().map(|frame| (frame.name.as_str(), frame.line)).collect();
        assert_eq!(shown, [("method_3", 42), ("method_4", 7)]);
        let text = fs::read_to_string(expected.with_extension("txt")).unwrap();
        assert!(text.contains("CUDA out of memory. Tried to allocate") && text.contains("What to do"), "{text}");
        assert!(text.contains("module_3.py:42"), "{text}");
    }
}

#[test]
fn a_loop_that_runs_out_of_memory_is_recorded_once() {
    let (runtime, folder) = recording("loop", "backend:paged,record:oom");
    let (_, first) = out_of_memory(&runtime);
    assert!(first.contains("\nRecording: "), "{first}");
    let (_, second) = out_of_memory(&runtime);
    assert!(second.starts_with(" Not recorded: Warpool's last recording, of ") && second.contains("-1-oom.pickle"));
    assert_eq!(second.lines().count(), 1, "{second}");
    assert_eq!(names(&folder).len(), 2, "a snapshot and its text");
    // Without the interval, as many as are to be kept.
    runtime.set_settings("record_interval_s:0,record_files:2").unwrap();
    for _ in 0..3 {
        assert!(out_of_memory(&runtime).1.contains("\nRecording: "));
    }
    let kept = names(&folder);
    assert_eq!(kept.len(), 4, "{kept:?}");
    runtime.set_settings("record:off").unwrap();
    assert_eq!(out_of_memory(&runtime).1, "");
}

#[test]
fn what_cannot_be_written_is_a_sentence() {
    let (runtime, folder) = recording("no-folder", "backend:paged,record:oom");
    fs::create_dir_all(folder.parent().unwrap()).unwrap();
    fs::write(&folder, "a file").unwrap();
    let (_, note) = out_of_memory(&runtime);
    let last = note.lines().last().unwrap();
    assert!(last.starts_with(&format!("No recording can be written to {}: ", folder.display())), "{note}");
    assert!(note.contains("Why: ") && note.contains("What to do: "), "what can be said is said: {note}");
    let (_, second) = out_of_memory(&runtime);
    assert!(second.starts_with(" Not recorded: the last attempt, "), "{second}");
    assert!(matches!(runtime.record_now(None), Err(Error::Record { .. })));
    fs::remove_file(&folder).unwrap();
}

#[test]
fn a_recording_is_written_by_a_call_to_any_file() {
    let (runtime, folder) = recording("call", "backend:paged,record:oom");
    let block = with_frames(vec![(9, 1)], || runtime.malloc(MIB, 0, DEFAULT).unwrap());
    let path = runtime.record_now(None).unwrap();
    assert_eq!(path.parent(), Some(&*folder));
    let own = folder.join("mine.pickle");
    assert_eq!(runtime.record_now(Some(&own)).unwrap(), own);
    assert!(read(&own).traces[0].iter().any(|entry| entry.addr == block.0 && entry.stack.is_some()));
    assert!(fs::read_to_string(folder.join("mine.txt")).unwrap().contains("Who held memory"));
    runtime.set_settings("record:off").unwrap();
    assert!(matches!(runtime.record_now(None), Err(Error::NotRecording)));
}

#[test]
fn threads_without_python_have_no_stacks_and_do_not_enter_the_interpreter() {
    let (runtime, folder) = recording("threads", "backend:paged,record:oom");
    let ptr = runtime.malloc(MIB, 0, DEFAULT).unwrap();
    let inside = with_frames(vec![(11, 5)], || runtime.malloc(MIB, 0, DEFAULT).unwrap());
    runtime.set_python(None);
    let after = with_frames(vec![(12, 5)], || runtime.malloc(MIB, 0, DEFAULT).unwrap());
    let snapshot = read(&runtime.record_now(Some(&folder.join("it"))).unwrap_or_else(|_| {
        fs::create_dir_all(&folder).unwrap();
        runtime.record_now(Some(&folder.join("it"))).unwrap()
    }));
    let has_stack = |addr| snapshot.traces[0].iter().find(|entry| entry.addr == addr).unwrap().stack.is_some();
    assert_eq!([ptr.0, inside.0, after.0].map(has_stack), [false, true, false]);
}

#[test]
fn a_frame_is_described_once_and_references_are_given_back() {
    let (runtime, _) = recording("references", "backend:paged,record:oom");
    let (described, references) =
        (interpreter::DESCRIBED.load(Ordering::Relaxed), interpreter::REFERENCES.load(Ordering::Relaxed));
    for _ in 0..50 {
        let frames: Vec<_> = (0..30).map(|depth| (50_000 + depth, 3)).collect();
        let ptr = with_frames(frames, || runtime.malloc(MIB, 0, DEFAULT).unwrap());
        runtime.free(ptr, 0).unwrap();
    }
    // Other tests run at the same time, with other interpreters' threads but the same counters: at least once for each.
    assert!(interpreter::DESCRIBED.load(Ordering::Relaxed) - described >= 60);
    assert!(interpreter::REFERENCES.load(Ordering::Relaxed) - references >= 30, "codes are kept");
}

/// The aim: a million events in 256 MB. Here 30,000, in as much less.
#[test]
fn events_with_stacks_take_little_memory() {
    const EVENTS: u64 = 30_000;
    let settings = format!("backend:paged,record:oom,record_events:{EVENTS}");
    let (runtime, _) = recording("memory", &settings);
    let step = |call: usize| {
        let ptr = with_frames(frames(call), || runtime.malloc((1 + call as isize % 60) * MIB / 4, 0, DEFAULT).unwrap());
        with_frames(frames(call + 1), || runtime.free(ptr, 0).unwrap());
    };
    // What the allocator and the device take without that.
    runtime.set_settings("record:off").unwrap();
    (0..EVENTS as usize).for_each(step);
    runtime.set_settings("record:oom").unwrap();
    // A pair is two entries or more: the ring is full before these end.
    let (bytes, ()) = counting::peak(|| (0..EVENTS as usize).for_each(step));
    // Of each event the system's allocator takes some for itself.
    let bytes = bytes + 16 * EVENTS;
    println!("{bytes} bytes for {EVENTS} events: {} each", bytes / EVENTS);
    assert!(bytes < 256 * EVENTS, "{bytes} bytes for {EVENTS} events");
    assert!(bytes > 50 * EVENTS, "{bytes} bytes: the events were recorded");
    // And it does not grow.
    let (more, ()) = counting::peak(|| (0..EVENTS as usize / 2).for_each(step));
    assert!(more < bytes / 20, "{more} bytes more for half as many events again");
}
