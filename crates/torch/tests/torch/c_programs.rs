//! C programs that are compiled against the header, linked to the shared object, and run on the simulated GPU.

use std::fs;
use std::path::{Path, PathBuf};

use warpool::memory::MemPoolId;
use warpool::memory::report::Action;
use warpool_trace::{ReadOptions, read_file};

use crate::shared_object::{compiler, crate_folder, has, passed, run, scratch, shared_object, simulated};

/// Compiles `c/<name>.c` into `folder`.
pub fn build(name: &str, folder: &Path) -> PathBuf {
    let library = shared_object();
    let program = folder.join(name);
    run(compiler("cc")
        .arg(crate_folder().join(format!("tests/torch/c/{name}.c")))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .arg("-o")
        .arg(&program));
    program
}

#[test]
fn memory_statistics_settings_and_snapshots() {
    if !has("cc") {
        return;
    }
    let folder = scratch("memory");
    let snapshot = folder.join("snapshot.pickle");
    let mut program = simulated(&build("memory", &folder));
    program.env("WARPOOL_SIM", "devices:2,memory_mb:8192").env("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:200");
    passed(program.arg(&snapshot));

    let read = read_file(&snapshot, &ReadOptions { stacks: true, ..ReadOptions::default() }).unwrap().snapshot;
    let actions: Vec<Action> = read.traces[0].iter().map(|entry| entry.action).collect();
    // Includes the blocks that the hook allocates, without a stack.
    let own = [Action::Alloc, Action::FreeRequested];
    let expected = [&own[..], &own[..1], &own, &own[..1], &own, &own[1..], &own].concat();
    assert_eq!(actions, expected);
    let large: Vec<_> = read.traces[0].iter().filter(|entry| entry.size == 3 << 20).collect();
    assert_eq!(large.len(), 3);
    for entry in &large {
        let frames = &read.stacks[entry.stack.expect("a stack").index()];
        let shown: Vec<_> = frames.iter().map(|it| (it.name.as_str(), it.filename.as_str(), it.line)).collect();
        assert_eq!(shown, [("inner", "model.py", 12), ("outer", "train.py", 34)]);
        assert_eq!(entry.pool, Some(MemPoolId::DEFAULT));
    }
    let metadata: Vec<_> = large.iter().map(|entry| entry.user_metadata.map(|text| read.texts.get(text))).collect();
    assert_eq!(metadata, [Some("step 7"), None, None]);
    assert!(read.traces[0].iter().filter(|entry| entry.size == 512).all(|entry| entry.stack.is_none()));
    assert_eq!(read.segments.iter().map(|segment| segment.allocated_size).sum::<u64>(), 3 << 20);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "the program and its snapshot");
}

#[test]
fn elastic_memory() {
    if !has("cc") {
        return;
    }
    let folder = scratch("elastic");
    let mut program = simulated(&build("elastic", &folder));
    passed(program.env("WARPOOL_SIM", "memory_mb:1024"));
}

#[test]
fn errors_are_reported_and_the_program_continues() {
    if !has("cc") {
        return;
    }
    let folder = scratch("errors");
    let output = passed(simulated(&build("errors", &folder)).arg(&folder));
    // Functions without a status log their first failure.
    let log = String::from_utf8_lossy(&output.stderr);
    for name in ["warpool_free", "warpool_end_allocate_to_pool", "warpool_release_pool", "warpool_memory_fraction"] {
        let lines = log.lines().filter(|line| line.contains(&format!("{name}: "))).count();
        assert_eq!(lines, 1, "{name} in\n{log}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "the program only, no snapshot");
}

#[test]
fn threads() {
    if !has("cc") {
        return;
    }
    passed(&mut simulated(&build("threads", &scratch("threads"))));
}

#[test]
fn threads_with_driver_pools() {
    if !has("cc") {
        return;
    }
    let mut program = simulated(&build("threads", &scratch("driver_pools")));
    passed(program.env("WARPOOL_CONF", "backend:cudaMallocAsync"));
}

#[test]
fn pages() {
    if !has("cc") {
        return;
    }
    let program = build("pages", &scratch("pages"));
    passed(&mut simulated(&program));
    passed(simulated(&program).env("WARPOOL_CONF", "backend:native"));
}

/// What PyTorch's allocator class calls. `python/tests/backend` drives the class itself, against a real libtorch.
#[test]
fn backend() {
    if !has("cc") {
        return;
    }
    let program = build("backend", &scratch("backend"));
    for settings in ["backend:native", "backend:expandable", "backend:paged"] {
        passed(simulated(&program).env("WARPOOL_CONF", settings));
    }
}

#[test]
fn threads_with_pages() {
    if !has("cc") {
        return;
    }
    let mut program = simulated(&build("threads", &scratch("threads_with_pages")));
    passed(program.env("WARPOOL_CONF", "backend:paged"));
}

/// Issue 12: of 200 children of a process with four busy threads, 19 hung or failed in malloc or free.
#[test]
fn forked_children_never_hang() {
    if !has("cc") {
        return;
    }
    let folder = scratch("fork");
    let program = build("fork", &folder);
    passed(&mut simulated(&program));
    // With a backend that holds its locks for longer.
    passed(simulated(&program).env("WARPOOL_CONF", "backend:cudaMallocAsync"));
    passed(simulated(&program).env("WARPOOL_CONF", "backend:paged"));
    passed(simulated(&program).env("WARPOOL_SIM", "track_suballocations:True"));
}
