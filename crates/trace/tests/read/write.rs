//! Written snapshots are read back as they were, with each text and stack written once.

use warpool::memory::MemPoolId;
use warpool::memory::report::{AccountRow, Action, DeviceAccount, Snapshot, StackId, TraceEntry};

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

/// Whose the memory was is under a key of its own, which other readers skip.
#[test]
fn accounts_are_read_back_as_they_were_written() {
    let row = |owner: &str, bytes| AccountRow {
        owner: owner.to_owned(),
        what: "modules and kernels".to_owned(),
        bytes,
        known_by: "measured around its calls".to_owned(),
    };
    let account = |device: u32, rows: Vec<AccountRow>, remarks: &[&str]| DeviceAccount {
        device,
        total: 150 << 30,
        used: 7 << 30,
        rows,
        remarks: remarks.iter().map(|&remark| remark.to_owned()).collect(),
    };
    let mut snapshot = recording("snapshot.p4.pickle").snapshot;
    let plain = written(&snapshot);
    snapshot.accounts = vec![
        account(0, vec![row("cuBLAS", 66 << 20), row("CUDA", u64::MAX)], &["one", "two"]),
        account(1, vec![], &["only a remark"]),
        account(3, vec![row("NCCL", 0)], &[]),
    ];
    let file = written(&snapshot);
    assert_eq!(read(&file).expect("readable").snapshot, snapshot);
    assert!(!plain.windows(15).any(|part| part == b"warpool_account"), "without accounts as before");
    // Damaged: a text where bytes are to be, and another key.
    let replaced = |from: &[u8], to: &[u8]| {
        let at = file.windows(from.len()).position(|part| part == from).expect("it is there");
        let mut damaged = file.clone();
        damaged[at..at + from.len()].copy_from_slice(to);
        damaged
    };
    let error = read(&replaced(b"owner", b"bytes")).unwrap_err().to_string();
    assert!(error.contains("bytes") && error.contains("an int"), "{error}");
    assert!(read(&replaced(b"used_bytes", b"not_a_byte")).is_ok(), "unknown keys are ignored");
}
