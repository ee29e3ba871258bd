//! Snapshots of every pickle protocol, writer and compression are read alike.

use std::cell::Cell;
use std::io::{Read, Write as _};
use std::sync::Arc;

use warpool::memory::MemPoolId;
use warpool::memory::report::{
    Action, Annotation, BlockInfo, BlockState, Frame, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, StackId,
    Texts, TraceEntry,
};
use warpool_trace::{Compression, Progress, ReadOptions, RecordingFormat, read, read_file};

use crate::common::{self, MIB, entry, path, recording};

const BASE: u64 = 0x7f00_0000_0000;

/// `SNAPSHOT` of `data/make.py`.
fn expected() -> Snapshot {
    let user = |user| MemPoolId { graph: 0, user };
    let frame = |name: &str, filename: &str, line| Frame { name: name.into(), filename: filename.into(), line };
    let block = |address, size, requested_size, state, stack| BlockInfo { address, size, requested_size, state, stack };
    let (train, load) = (StackId::new(0), StackId::new(1));
    let time = 1_794_702_992_267_000;
    let mut texts = Texts::default();
    let region = Some(texts.intern("Torch-Compiled Region: 0/0"));
    let weights = Some(texts.intern("weights, größer"));
    let stacks: Vec<Arc<[Frame]>> = vec![
        [frame("forward", "model.py", 12), frame("<module>", "train.py", 70_000)].into(),
        [frame("load", "data.py", 3)].into(),
    ];
    Snapshot {
        segments: vec![
            SegmentInfo {
                device: 0,
                address: BASE,
                total_size: 20 * MIB,
                allocated_size: 2 * MIB,
                active_size: 3 * MIB,
                requested_size: 3 * MIB - 100,
                stream: 0xfedc_ba98_7654_3210,
                kind: SegmentKind::Large,
                pool: user(3),
                is_expandable: true,
                is_elastic: false,
                stack: train,
                blocks: vec![
                    block(BASE, 2 * MIB, 2 * MIB - 50, BlockState::ActiveAllocated, train),
                    block(BASE + 2 * MIB, MIB, MIB - 50, BlockState::ActivePendingFree, load),
                    block(BASE + 3 * MIB, 17 * MIB, 0, BlockState::Inactive, None),
                ],
            },
            small_segment(),
        ],
        traces: vec![
            vec![
                TraceEntry {
                    pool: Some(user(3)),
                    stack: train,
                    ..entry(Action::SegmentAlloc, BASE, 20 * MIB, 0, time + 588)
                },
                TraceEntry {
                    pool: Some(user(3)),
                    stack: train,
                    forward_stack: load,
                    ..entry(Action::Alloc, BASE, 2 * MIB - 50, 0, time + 589)
                },
                TraceEntry {
                    pool: Some(user(3)),
                    compile_context: region,
                    user_metadata: weights,
                    stack: load,
                    ..entry(Action::Alloc, BASE + 2 * MIB, MIB - 50, 5, time + 590)
                },
                TraceEntry {
                    user_metadata: weights,
                    ..entry(Action::FreeRequested, BASE + 2 * MIB, MIB - 50, 5, time + 600)
                },
                entry(Action::Oom, 12_345, 1 << 40, 0, time + 700),
                entry(Action::Snapshot, 0, 3 * MIB, 0, time + 800),
            ],
            vec![],
            vec![entry(Action::Alloc, 70_000, 1, 0, -5)],
        ],
        settings: RecordedSettings {
            conf: Some("max_split_size_mb:200".into()),
            max_split_size: Some(200 << 20),
            garbage_collection_threshold: Some(0.8),
            expandable_segments: Some(false),
            pinned_num_register_threads: Some(1),
            roundup_power2_divisions: Some(vec![("1".into(), 0), ("2".into(), 4)]),
            ..RecordedSettings::default()
        },
        annotations: vec![Annotation { name: "step".into(), stage: "START".into(), device: 0, time_us: 17 }],
        host_segments: Some(vec![]),
        host_traces: Some(vec![entry(Action::Alloc, BASE + 128 * MIB, 4096, 0, 18)]),
        accounts: vec![],
        texts,
        stacks,
    }
}

fn small_segment() -> SegmentInfo {
    let address = BASE + 64 * MIB;
    let block = BlockInfo { address, size: 2 * MIB, requested_size: 0, state: BlockState::Inactive, stack: None };
    SegmentInfo {
        device: 1,
        address,
        total_size: 2 * MIB,
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        stream: 0,
        kind: SegmentKind::Small,
        pool: MemPoolId::DEFAULT,
        is_expandable: false,
        is_elastic: false,
        stack: None,
        blocks: vec![block],
    }
}

#[test]
fn every_protocol_and_writer_is_read_alike() {
    for format in ["p2", "p3", "p4", "p5", "imports", "torchscript", "lists"] {
        let recording = recording(&format!("snapshot.{format}.pickle"));
        assert_eq!(recording.snapshot, expected(), "{format}");
        assert_eq!((recording.format, recording.compression), (RecordingFormat::TorchSnapshot, None));
        assert_eq!(recording.bytes_read, recording.bytes_decompressed);
    }
}

#[test]
fn every_compression_is_read_alike() {
    let plain = common::bytes("snapshot.p4.pickle").len() as u64;
    for (end, compression) in
        [("xz", Compression::Xz), ("gz", Compression::Gzip), ("zst", Compression::Zstd), ("bz2", Compression::Bzip2)]
    {
        let name = format!("snapshot.pickle.{end}");
        let recording = recording(&name);
        assert_eq!(recording.snapshot, expected(), "{end}");
        assert_eq!(recording.compression, Some(compression));
        assert_eq!(recording.bytes_decompressed, plain);
        assert_eq!(recording.bytes_read, common::bytes(&name).len() as u64);
    }
}

#[test]
fn only_recording_of_an_archive_is_read() {
    for (name, compression) in [
        ("snapshot.pt", None),
        ("snapshot.zip", None),
        ("snapshot.tar.gz", Some(Compression::Gzip)),
        ("snapshot.pax.tar.bz2", Some(Compression::Bzip2)),
    ] {
        let streamed = recording(name);
        let from_file = read_file(path(name), &ReadOptions { stacks: true, ..ReadOptions::default() });
        for recording in [streamed, from_file.expect("readable")] {
            assert_eq!(recording.snapshot, expected(), "{name}");
            assert_eq!(recording.compression, compression, "{name}");
        }
    }
    // An archive that was compressed as a whole.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&common::bytes("snapshot.pt")).expect("writing to memory succeeds");
    let recording = common::read(&packed.finish().expect("writing to memory succeeds")).expect("readable");
    assert_eq!((recording.snapshot, recording.compression), (expected(), Some(Compression::Gzip)));
}

#[test]
fn log_in_an_archive_is_read() {
    let mut archive = tar::Builder::new(Vec::new());
    let log = common::bytes("rmm.csv");
    let mut header = tar::Header::new_ustar();
    header.set_size(log.len() as u64);
    archive.append_data(&mut header, "rank0.csv", log.as_slice()).expect("writing to memory succeeds");
    let recording = common::read(&archive.into_inner().expect("writing to memory succeeds")).expect("readable");
    assert_eq!(recording.format, RecordingFormat::RmmLog);
    assert_eq!(recording.snapshot, common::recording("rmm.csv").snapshot);
}

#[test]
fn reading_without_stacks_leaves_out_only_stacks() {
    let recording = read_file(path("snapshot.p4.pickle"), &ReadOptions::default()).expect("readable");
    let mut expected = expected();
    expected.stacks.clear();
    for segment in &mut expected.segments {
        segment.stack = None;
        segment.blocks.iter_mut().for_each(|block| block.stack = None);
    }
    for entry in expected.traces.iter_mut().flatten() {
        (entry.stack, entry.forward_stack) = (None, None);
    }
    assert_eq!(recording.snapshot, expected);
}

#[test]
fn fields_that_older_versions_leave_out_get_defaults() {
    let recording = recording("legacy.pickle");
    let [segment] = &recording.snapshot.segments[..] else { panic!("one segment") };
    let blocks: Vec<_> = segment.blocks.iter().map(|b| (b.address - BASE, b.size, b.requested_size, b.state)).collect();
    assert_eq!(
        blocks,
        [
            (0, 1024, 1000, BlockState::ActiveAllocated),
            (1024, 512, 512, BlockState::ActivePendingFree),
            (1536, 2 * MIB - 1536, 0, BlockState::Inactive),
        ]
    );
    assert_eq!(segment.requested_size, 1512);
    assert_eq!(segment.blocks[0].stack, StackId::new(0));
    assert_eq!(recording.snapshot.stacks[0][1].line, 70_000);
    let fields = recording.fields;
    assert!(!fields.traces && !fields.segment_pools && !fields.requested_sizes && !fields.block_addresses);
}

#[test]
fn history_of_pytorch_2_0_has_no_times() {
    let recording = recording("torch_2_0.pickle");
    let stack = StackId::new(0);
    let without_time = |action, addr, size| TraceEntry { stack, ..entry(action, addr, size, 0, 0) };
    assert_eq!(
        recording.snapshot.traces,
        [[
            without_time(Action::SegmentAlloc, BASE, 2 * MIB),
            without_time(Action::Alloc, BASE, 1000),
            without_time(Action::Oom, 512, 1 << 40),
        ]]
    );
    let blocks = &recording.snapshot.segments[0].blocks;
    assert_eq!((blocks[0].stack, blocks[0].requested_size, blocks[1].address), (stack, 1000, BASE + 1024));
    let fields = recording.fields;
    assert!(fields.traces && fields.requested_sizes && !fields.times && !fields.trace_pools && !fields.block_addresses);
}

#[test]
fn containers_with_one_item_are_recognized() {
    let single = recording("single.pickle").snapshot;
    assert_eq!(single.traces, [[TraceEntry { stack: StackId::new(0), ..entry(Action::Alloc, BASE, 512, 0, 1) }]]);
    assert_eq!(single.stacks[0][0].filename, "g.py");
    assert_eq!(recording("single_list.pickle").snapshot.segments, [small_segment()]);

    // The only setting is a dict: its key could also be the next one of the root.
    let divisions =
        b"\x80\x04}(\x8c\x08segments]\x8c\x12allocator_settings}\x8c\x18roundup_power2_divisions}\x8c\x03256K\x04ssu.";
    let settings = common::read(divisions).expect("readable").snapshot.settings;
    assert_eq!(settings.roundup_power2_divisions, Some(vec![("256".to_owned(), 4)]));
}

#[test]
fn host_trace_in_parts_is_one_trace() {
    let entry = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x02\x8c\x06streamK\x03u";
    let two =
        [&b"\x80\x04}(\x8c\x08segments]\x8c\x0bhost_traces](]("[..], entry, b"e](", entry, entry, b"eeu."].concat();
    let one = [&b"\x80\x04}(\x8c\x08segments]\x8c\x0bhost_traces]]"[..], entry, b"aau."].concat();
    for (file, length) in [(two, 3), (one, 1)] {
        let snapshot = common::read(&file).expect("readable").snapshot;
        assert_eq!(snapshot.host_traces, Some(vec![common::entry(Action::Alloc, 1, 2, 3, 0); length]));
    }
}

#[test]
fn entries_may_be_shared_between_traces() {
    let entry = |addr: u8| {
        [&b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK"[..], &[addr], b"\x8c\x04sizeK\x02\x8c\x06streamK\x03u"].concat()
    };
    let (first, second) = (entry(1), entry(2));
    // The second entry of the first trace is also the only one of the second trace; the third trace has both.
    let file = [
        &b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](]("[..],
        &first,
        b"q\x00",
        &second,
        b"q\x01e]h\x01a](h\x01h\x00eeu.",
    ];
    let traces = common::read(&file.concat()).expect("readable").snapshot.traces;
    let addresses: Vec<Vec<u64>> = traces.iter().map(|trace| trace.iter().map(|entry| entry.addr).collect()).collect();
    assert_eq!(addresses, [vec![1, 2], vec![2], vec![2, 1]]);
}

#[test]
fn lists_in_several_batches_are_read() {
    let trace = &recording("batches.pickle.xz").snapshot.traces[0];
    assert_eq!(trace.len(), 2001);
    assert!(trace.iter().enumerate().all(|(i, entry)| (entry.size, entry.addr) == (i as u64, BASE + i as u64)));
}

#[test]
fn lone_surrogates_become_replacement_characters() {
    let snapshot = recording("surrogate.pickle").snapshot;
    let text = snapshot.traces[0][0].user_metadata.expect("it has one");
    assert_eq!(snapshot.texts.get(text), "a\u{fffd}b");
}

#[test]
fn recordings_of_real_programs_are_read() {
    for (name, events, segments, alloc_bytes) in
        [("mempool.native.pickle.xz", 839, 49, 1_953_513_472), ("graphs.expandable.pickle.xz", 3855, 26, 3_162_761_644)]
    {
        let recording = recording(name);
        let trace = &recording.snapshot.traces[0];
        assert_eq!((trace.len(), recording.snapshot.segments.len()), (events, segments), "{name}");
        let allocs = trace.iter().filter(|entry| entry.action == Action::Alloc);
        assert_eq!(allocs.map(|entry| entry.size).sum::<u64>(), alloc_bytes, "{name}");
        assert!(recording.fields.traces && recording.fields.segment_pools && !recording.fields.trace_pools);
        assert_eq!(recording.snapshot.settings.max_split_size, Some(-1));
        for segment in &recording.snapshot.segments {
            assert_eq!(segment.blocks.iter().map(|block| block.size).sum::<u64>(), segment.total_size);
        }
    }
}

/// A reader that returns a few bytes at a time.
struct SlowReader<'a>(&'a [u8], usize);

impl Read for SlowReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let (now, later) = self.0.split_at(self.1.min(self.0.len()).min(into.len()));
        into[..now.len()].copy_from_slice(now);
        self.0 = later;
        Ok(now.len())
    }
}

#[test]
fn size_of_reads_does_not_matter() {
    for name in ["snapshot.p2.pickle", "snapshot.torchscript.pickle", "snapshot.pickle.gz"] {
        for step in [1, 2, 3, 7, 300] {
            let recording =
                read(SlowReader(&common::bytes(name), step), &ReadOptions { stacks: true, ..ReadOptions::default() });
            assert_eq!(recording.expect("readable").snapshot, expected(), "{name}, {step} bytes at a time");
        }
    }
}

#[test]
fn progress_ends_at_the_files_size() {
    let last = Cell::new(None);
    let progress = |progress: Progress| last.set(Some(progress));
    let options = ReadOptions { progress: Some(&progress), ..ReadOptions::default() };
    let recording = read_file(path("graphs.expandable.pickle.xz"), &options).expect("readable");
    let size = recording.bytes_read;
    assert_eq!(last.get(), Some(Progress { bytes_read: size, bytes_total: Some(size) }));
}
