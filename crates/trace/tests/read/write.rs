//! Written snapshots are read back as they were, with each text and stack written once.

use warpool::memory::MemPoolId;
use warpool::memory::report::{Action, Snapshot, StackId, TraceEntry};

use crate::common::{entry, read, recording, written};

#[test]
fn snapshot_is_read_back_as_it_was_written() {
    for name in [
        "snapshot.p2.pickle",
        "snapshot.torchscript.pickle",
        "legacy.pickle",
        "single.pickle",
        "single_list.pickle",
        "batches.pickle.xz",
        "mempool.native.pickle.xz",
        "graphs.expandable.pickle.xz",
        "rmm.csv",
    ] {
        let snapshot = recording(name).snapshot;
        let again = read(&written(&snapshot)).unwrap_or_else(|error| panic!("{name}: {error}")).snapshot;
        assert_eq!(snapshot, again, "{name}");
    }
}

#[test]
fn integers_of_every_length_are_written() {
    let mut numbers = vec![0, u64::MAX, i64::MAX as u64];
    numbers.extend((0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1]));
    let entries = numbers.iter().map(|&number| TraceEntry {
        pool: Some(MemPoolId { graph: number as u32, user: 7 }),
        ..entry(Action::Annotate, number, number, number, number as i64)
    });
    let entries = entries.collect();
    let snapshot = Snapshot { traces: vec![entries], ..Snapshot::default() };
    assert_eq!(read(&written(&snapshot)).expect("readable").snapshot, snapshot);
}

#[test]
fn each_stack_is_written_once() {
    let mut snapshot = recording("snapshot.p4.pickle").snapshot;
    let before = written(&snapshot).len();
    let entry = TraceEntry { stack: StackId::new(0), ..entry(Action::Alloc, 1, 1, 0, 1) };
    snapshot.traces[0].extend([entry; 100]);
    let file = written(&snapshot);
    assert!((file.len() - before) / 100 < 60, "{} bytes per entry", (file.len() - before) / 100);
    let again = read(&file).expect("readable").snapshot;
    assert_eq!(again, snapshot);
    assert_eq!(file.windows(8).filter(|part| part == b"model.py").count(), 1);
}
