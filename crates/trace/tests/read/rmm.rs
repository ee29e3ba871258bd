//! Logs of RMM.

use warpool::memory::report::{Action, Snapshot};
use warpool_trace::RecordingFormat;

use crate::common::{entry, read, recording};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

#[test]
fn every_kind_of_line_is_read() {
    let recording = recording("rmm.csv");
    assert_eq!(recording.format, RecordingFormat::RmmLog);
    let day = 86_400_000_000;
    let epoch = 1_634_567_890_000_000;
    let trace = vec![
        entry(Action::Alloc, 0x100_1240_0000, 1 << 20, 0, day - 158_039),
        entry(Action::Alloc, 0x100_1250_0000, 512, 2, day - 100_000),
        entry(Action::Oom, 0, 99_999_999_999, 0, day - 99_999),
        entry(Action::FreeRequested, 0x100_1240_0000, 1 << 20, 0, day + 2),
        entry(Action::FreeCompleted, 0x100_1240_0000, 1 << 20, 0, day + 2),
        entry(Action::Alloc, 0x7f8a_4000_0000, 1024, 140_232, epoch + 123_456),
        entry(Action::FreeRequested, 0x7f8a_4000_0000, 1024, 0x7f8a_3800_1020, epoch + 500_000),
        entry(Action::FreeCompleted, 0x7f8a_4000_0000, 1024, 0x7f8a_3800_1020, epoch + 500_000),
    ];
    assert_eq!(recording.snapshot, Snapshot { traces: vec![trace], ..Snapshot::default() });
}

#[test]
fn crlf_and_empty_lines_are_read() {
    let log =
        format!("{}1,00:00:00.1,allocate,0x10,1,0\r\n\r\n1,00:00:00.2,free,0x10,1,0", HEADER.replace('\n', "\r\n"));
    assert_eq!(read(log.as_bytes()).expect("readable").snapshot.traces[0].len(), 3);
    assert_eq!(read(HEADER.as_bytes()).expect("readable").snapshot.traces, [[]]);
}

#[test]
fn malformed_line_is_named_by_number() {
    for (line, expected) in [
        ("1,00:00:00.1,allocate,0x10,1", "5 columns instead of 6"),
        ("1,00:00:00.1,allocate,0x10,1,0,7", "7 columns"),
        ("1,00:00:00.1,reallocate,0x10,1,0", "`reallocate` is not `allocate`"),
        ("1,00:00:00.1,allocate,0xzz,1,0", "`0xzz` is not a pointer"),
        ("1,00:00:00.1,allocate,+10,1,0", "`+10` is not a pointer"),
        ("1,00:00:00.1,allocate,0x10,-1,0", "`-1` is not a size"),
        ("1,00:00:00.1,allocate,0x10,1,zero", "`zero` is not a stream"),
        ("1,noon,allocate,0x10,1,0", "`noon` is not a time"),
        ("1,99:99,allocate,0x10,1,0", "`99:99` is not a time"),
        ("1,0.1.2,allocate,0x10,1,0", "`0.1.2` is not a time"),
        ("1,00:00:00.1,\u{1b}[2Jfree,0x10,1,0", "`\\u{1b}[2Jfree` is not `allocate`"),
        ("\u{0}", "1 columns"),
    ] {
        let log = format!("{HEADER}1,00:00:00.1,allocate,0x10,1,0\n{line}\n");
        let message = read(log.as_bytes()).expect_err(line).to_string();
        assert!(message.starts_with("line 3 of the log: ") && message.contains(expected), "{line}: {message}");
    }
}
