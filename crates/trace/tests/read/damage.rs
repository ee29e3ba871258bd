//! Files that are cut off, damaged, malicious or something else: one clear error each, never a panic, and never much
//! memory or time. `WARPOOL_TEST_SCALE` multiplies the number of randomly damaged files; 3 is the full size.

use std::io::Write as _;

use warpool_testing::in_parallel;
use warpool_trace::ReadError;

use crate::common::{bytes, read, scale};

/// One small snapshot in all formats.
const FORMATS: [&str; 12] = [
    "snapshot.p2.pickle",
    "snapshot.p4.pickle",
    "snapshot.torchscript.pickle",
    "legacy.pickle",
    "snapshot.pickle.xz",
    "snapshot.pickle.gz",
    "snapshot.pickle.zst",
    "snapshot.pickle.bz2",
    "snapshot.lists.pickle",
    "snapshot.pt",
    "snapshot.zip",
    "snapshot.tar.gz",
];

/// The offset that an error names.
fn offset(error: &ReadError) -> Option<u64> {
    match error {
        ReadError::Io { offset, .. }
        | ReadError::Compressed { offset, .. }
        | ReadError::Truncated { offset, .. }
        | ReadError::Opcode { offset, .. }
        | ReadError::Pickle { offset, .. }
        | ReadError::Content { offset, .. } => Some(*offset),
        ReadError::Member { source, .. } => offset(source),
        _ => None,
    }
}

#[test]
fn file_cut_at_any_byte_is_an_error() {
    for name in FORMATS {
        let whole = bytes(name);
        let plain = read(&whole).expect("undamaged").bytes_decompressed;
        // For compressed archives it is the size of the archive, whose records are 10 KiB.
        let plain = if name.contains(".tar.") { 10 << 10 } else { plain };
        for length in 0..whole.len() {
            let error = read(&whole[..length]).expect_err(&format!("{name} cut to {length} bytes"));
            match offset(&error) {
                Some(offset) => assert!(offset <= plain, "{name} cut to {length}: {error}"),
                None => {
                    let is_archive = matches!(error, ReadError::Archive { .. });
                    assert!(length < 16 || is_archive, "{name} cut to {length}: {error}");
                }
            }
        }
    }
}

#[test]
fn file_with_any_byte_changed_is_an_error_or_another_snapshot() {
    in_parallel(&FORMATS, |name| {
        let mut file = bytes(name);
        let whole = read(&file).expect("undamaged").snapshot;
        let compressed = !name.ends_with(".pickle");
        for index in 0..file.len() {
            let before = file[index];
            for flip in [0x01, 0x10, 0x80, 0xff] {
                file[index] = before ^ flip;
                // Checksums protect compressed data; some of its bits have no meaning.
                if let Ok(other) = read(&file)
                    && compressed
                {
                    assert!(other.snapshot == whole, "{name} with byte {index} changed by {flip:#x}");
                }
            }
            file[index] = before;
        }
    });
}

#[test]
fn random_damage_causes_no_panic() {
    let seed = 0x5eed_0003;
    let mut rng = fastrand::Rng::with_seed(seed);
    // Mostly opcodes, so that much of a damaged file is read.
    const BYTES: &[u8] = b"(.}]usae)t\x85\x86\x87hjqr\x94NJKM\x8a\x8bGX\x8c\x8d\x95\x80\x00\x01\x02\xff";
    let files = ["snapshot.p2.pickle", "snapshot.p4.pickle", "single.pickle"].map(bytes);
    for round in 0..10_000 * scale() {
        let mut file = files[rng.usize(..files.len())].clone();
        for _ in 0..rng.u32(1..=4) {
            let index = rng.usize(2..file.len());
            let byte = BYTES[rng.usize(..BYTES.len())];
            match rng.u32(..3) {
                0 => file[index] = byte,
                1 => file.insert(index, byte),
                _ => drop(file.remove(index)),
            }
        }
        // Caught to print the round.
        let outcome = std::panic::catch_unwind(|| read(&file).is_ok());
        assert!(outcome.is_ok(), "seed {seed:#x}, round {round}");
    }
}

/// The error message for a pickle of protocol 4 with this body.
fn message(body: &[u8]) -> String {
    let file = [b"\x80\x04", body].concat();
    read(&file).expect_err("refused").to_string()
}

#[test]
fn opcodes_that_could_run_programs_are_refused_by_name() {
    for (body, name) in [
        (&b"cos\nsystem\n"[..], "GLOBAL"),
        (b"\x8c\x02os\x8c\x06system\x93", "STACK_GLOBAL"),
        (b"}R", "REDUCE"),
        (b"}b", "BUILD"),
        (b"(ios\nsystem\n", "INST"),
        (b"(o", "OBJ"),
        (b"}\x81", "NEWOBJ"),
        (b"}\x92", "NEWOBJ_EX"),
        (b"\x82\x01", "EXT1"),
        (b"Px\n", "PERSID"),
        (b"}Q", "BINPERSID"),
        (b"0", "POP"),
        (b"2", "DUP"),
        (b"C\x01a", "SHORT_BINBYTES"),
        (b"\x8f", "EMPTY_SET"),
        (b"\xee", "0xee (not a pickle opcode)"),
    ] {
        let file = [b"\x80\x04", body].concat();
        let Err(ReadError::Opcode { offset, opcode }) = read(&file) else { panic!("{name} is refused as an opcode") };
        assert_eq!(opcode, name);
        let code = file[offset as usize];
        assert!(body.contains(&code) && offset >= 2, "{name} at {offset}");
    }
    // A pickle that runs a command when Python loads it.
    let evil = b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.";
    let Err(ReadError::Opcode { offset: 28, opcode }) = read(evil) else { panic!("refused at STACK_GLOBAL") };
    assert_eq!(opcode, "STACK_GLOBAL");
}

#[test]
fn lengths_and_numbers_are_checked() {
    for (body, expected) in [
        (&b"\x8d\0\0\0\0\0\0\0\x10"[..], "a text of 1152921504606846976 bytes"),
        (b"X\xff\xff\xff\xff", "a text of 4294967295 bytes"),
        (b"X\0\0\x10\0abc", "in the middle of a text"),
        (b"\x8b\xff\xff\xff\xff", "an integer of absurd length"),
        (b"\x8b\xff\xff\xff\x7f", "an integer of absurd length"),
        (b"\x8a\xff\x01", "in the middle of an integer"),
        (b"j\xff\xff\xff\xff", "object 4294967295, which does not exist"),
        (b"}r\xff\xff\xff\xffj\xfe\xff\xff\xff", "object 4294967294, which does not exist"),
        (b"\x94", "nothing on the stack to memoize"),
        (b"(\x94", "nothing on the stack to memoize"),
        (b"u", "without MARK"),
        (b"(u", "not there"),
        (b"}((u", "not there"),
        (b"]((e", "not there"),
        (b"s", "not there"),
        (b"}Ks", "cut off"),
        (b"a", "not there"),
        (b"](K\x01a", "not there"),
        (b"}(K\x01u", "a key without a value"),
        (b"K\x01(K\x01e", "not a list"),
        (b"K\x01(K\x01K\x01u", "not a dict"),
        (b"\x86", "more values than there are"),
        (b"t", "TUPLE without MARK"),
        (b"K\x01(\x85", "more values than there are"),
        (b".", "ends without a single root value"),
        (b"}(.", "ends without a single root value"),
        (b"}}.", "ends without a single root value"),
        (b"}\x80\x06", "protocol 6"),
        (b"\x8c\x01\xff", "not UTF-8"),
        (b"}.}", "data behind the end of the pickle"),
    ] {
        let message = message(body);
        assert!(message.contains(expected), "{:?}: {message}", String::from_utf8_lossy(body));
    }
}

#[test]
fn deep_nesting_and_shared_references_take_little_memory() {
    // Lists within lists.
    let deep = [&b"}(\x8c\x01x"[..], &b"]".repeat(1 << 20)].concat();
    assert!(message(&deep).contains("cut off"));
    let marks = [&b"}"[..], &b"(".repeat(1 << 20)].concat();
    assert!(message(&marks).contains("cut off"));

    // Each list holds the one before ten times; spelled out it would be 10^60 elements.
    let mut nested = b"}(\x8c\x01x]q\x00".to_vec();
    for level in 0..60_u8 {
        nested.extend_from_slice(b"](");
        nested.extend(b"h".iter().chain(&[level]).cycle().take(20));
        nested.extend_from_slice(&[b'e', b'q', level + 1]);
    }
    let values = nested.len();
    assert!(message(&nested).contains("cut off"), "{values} bytes");

    // One trace for many devices.
    let entry = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x01\x8c\x06streamK\x01u";
    let shared = [&b"}(\x8c\x0ddevice_traces](]("[..], entry, b"eq\x00h\x00h\x00e"].concat();
    let message = message(&shared);
    assert!(message.contains("is already part of another container"), "{message}");
}

#[test]
fn missing_key_is_named_with_its_path() {
    let entry = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x01\x8c\x06streamK\x01u";
    let no_size = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x06streamK\x01u";
    let segment = b"}(\x8c\x07addressK\x01\x8c\x06blocks](}(\x8c\x04sizeK\x01u";
    for (body, at, what) in [
        (
            [&b"}(\x8c\x0ddevice_traces](](e]("[..], entry, entry, no_size, b"e"].concat(),
            "device_traces[1][2]",
            "`size` is missing",
        ),
        ([&b"}\x8c\x0ddevice_traces]]"[..], no_size, b"a"].concat(), "device_traces[0][0]", "`size` is missing"),
        (
            [&b"}(\x8c\x0ddevice_traces](]("[..], entry, b"}(\x8c\x06action\x8c\x03eatu"].concat(),
            "device_traces[0][1]",
            "`eat` is not a known action",
        ),
        (
            [&b"}(\x8c\x0ddevice_traces](](}(\x8c\x04sizeNu"[..]].concat(),
            "device_traces[0][0]",
            "`size`: expected an int, found None",
        ),
        (
            [&b"}(\x8c\x0ddevice_traces](](}(\x8c\x04addrJ\xff\xff\xff\xffu"[..]].concat(),
            "device_traces[0][0]",
            "-1 is negative",
        ),
        ([&b"}(\x8c\x08segments]("[..], segment, b"e"].concat(), "segments[0].blocks[0]", "`state` is missing"),
        (b"}(\x8c\x08segments](}(\x8c\x06blocks]\x8c\x07addressK\x01ue".to_vec(), "segments[0]", "`device` is missing"),
        (b"}(\x8c\x08segments](K\x01e".to_vec(), "segments[0]", "expected a dict"),
        (b"](K\x01e".to_vec(), "[0]", "expected a dict"),
        (b"}(\x8c\x08segmentsK\x01u".to_vec(), "the root", "`segments`: expected a dict or list, found an int"),
        (b"}.".to_vec(), "the root", "`segments` is missing"),
        (b"K\x01.".to_vec(), "the root", "found an int"),
        (
            b"}(\x8c\x08segments]\x8c\x14external_annotations]}au.".to_vec(),
            "external_annotations[0]",
            "`device` is missing",
        ),
    ] {
        let file = [b"\x80\x04", &body[..]].concat();
        match read(&file) {
            Err(ReadError::Content { at: path, what: found, .. }) => {
                assert!(path == at && found.contains(what), "{at}: {path}: {found}");
            }
            other => panic!("{at}: {other:?}"),
        }
    }
}

#[test]
fn entry_needs_each_of_its_keys() {
    let keys: [(&str, &[u8]); 4] =
        [("action", b"\x8c\x05alloc"), ("addr", b"K\x01"), ("size", b"K\x01"), ("stream", b"K\x01")];
    for (missing, _) in keys {
        let mut body = b"}(\x8c\x0ddevice_traces](](}(".to_vec();
        for (key, value) in keys.iter().filter(|(key, _)| *key != missing) {
            body.extend([&[0x8c, key.len() as u8], key.as_bytes(), value].concat());
        }
        body.extend(b"ue");
        let message = message(&body);
        assert!(message.contains(&format!("device_traces[0][0]: the key `{missing}` is missing")), "{message}");
    }
}

#[test]
fn other_files_are_recognized() {
    for (content, expected) in [
        (&b""[..], "empty"),
        (b"hello, world\n", "text that starts with \"hello, world\\n\""),
        (b"{\"segments\": []}", "it is text"),
        (b"PK\x03\x04....", "the zip archive cannot be read: it is damaged or cut off"),
        (b"BZh9", "the bzip2 data is damaged or cut off after 0"),
        (b"\x7fELF\x02\x01", "it starts with the bytes [7f, 45"),
        (b"(dp0\nVsegments\n", "a pickle of protocol 0 or 1"),
        (b"}q\0(X\x08\0\0\0segments", "a pickle of protocol 0 or 1"),
        (b"\x80\x01}.", "protocol 1; 2 to 5 can be read"),
        (b"\x80", "cut off at byte 1"),
        (b"\xfd7zXZ\0", "the xz data is damaged or cut off after 0"),
        (b"\x1f\x8b", "the gzip data is damaged or cut off after 0"),
        (b"\x28\xb5\x2f\xfd", "the zstd data is damaged or cut off after 0"),
    ] {
        let message = read(content).expect_err("refused").to_string();
        assert!(message.contains(expected), "{message}");
    }
    let missing = warpool_trace::read_file("no/such/file", &Default::default()).expect_err("no such file");
    assert!(missing.to_string().starts_with("cannot open no/such/file: "), "{missing}");
    let folder = warpool_trace::read_file(env!("CARGO_MANIFEST_DIR"), &Default::default()).expect_err("a folder");
    assert!(matches!(folder, ReadError::Io { .. } | ReadError::Open { .. }), "{folder}");
}

#[test]
fn file_that_was_compressed_twice_is_recognized() {
    let mut twice = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    twice.write_all(&bytes("snapshot.pickle.xz")).expect("writing to memory succeeds");
    let message = read(&twice.finish().expect("writing to memory succeeds")).expect_err("refused").to_string();
    assert!(message.contains("it is xz data that was compressed again; decompress it once"), "{message}");
}

#[test]
fn message_is_one_line_without_control_characters() {
    let entry = b"}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](](}X\x06\0\0\0actionX\x08\0\0\0a\nb\x1b[2Jc";
    let action = message(&[&entry[..], b"seee"].concat());
    assert!(
        action.contains("device_traces[0][0]") && action.contains("`a\\nb\\u{1b}[2Jc` is not a known action"),
        "{action}"
    );
    assert!(!action.contains(char::is_control), "{action}");
}

#[test]
fn containers_that_are_not_filled_are_limited() {
    let trace = &b"}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](]("[..];
    // A tuple removes the entries from the stack, which stays small.
    let pairs = message(&[trace, b"}", &b"}\x86".repeat(1 << 16)].concat());
    let plain = message(&[trace, &b"}".repeat(1 << 16)].concat());
    for message in [pairs, plain] {
        assert!(message.contains("more containers than this many bytes can fill"), "{message}");
    }
}
