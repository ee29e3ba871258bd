//! Archives that are not read: without a recording, with several, damaged or malicious. One clear error each, without
//! much memory.

use std::io::Write as _;

use warpool_trace::{ReadError, ReadOptions};

use crate::common::{bytes, read};

/// The error for an archive.
fn message(file: &[u8]) -> String {
    read(file).expect_err("refused").to_string()
}

fn tar_file(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, name, *content).expect("writing to memory succeeds");
    }
    archive.into_inner().expect("writing to memory succeeds")
}

/// A zip archive whose files are stored as they are, with these sizes in the directory.
fn zip_file(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut archive = rawzip::ZipArchiveWriter::new(&mut file);
    for (name, content) in files {
        let (mut entry, config) = archive.new_file(name).start().expect("writing to memory succeeds");
        let mut writer = config.wrap(&mut entry);
        writer.write_all(content).expect("writing to memory succeeds");
        let (_, descriptor) = writer.finish().expect("writing to memory succeeds");
        entry.finish(descriptor).expect("writing to memory succeeds");
    }
    archive.finish().expect("writing to memory succeeds");
    file
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(content).expect("writing to memory succeeds");
    packed.finish().expect("writing to memory succeeds")
}

#[test]
fn several_recordings_are_named() {
    let ranks = message(&bytes("ranks.tar.xz"));
    assert_eq!(
        ranks,
        "the tar archive cannot be read: it has 2 recordings (ranks/rank0.pickle, ranks/rank1.pickle): extract it, \
         and give the folder or the files"
    );
    let plain = bytes("snapshot.p4.pickle");
    let names: Vec<String> = (0..20).map(|rank| format!("rank{rank}.pickle")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), plain.as_slice())).collect();
    for message in [message(&zip_file(&files)), message(&tar_file(&files))] {
        assert!(message.contains("20 recordings (rank0.pickle, rank1.pickle, "), "{message}");
        assert!(message.contains("rank7.pickle, …): extract it"), "{message}");
    }
}

#[test]
fn archive_without_a_recording_is_an_error() {
    let files: &[(&str, &[u8])] = &[("notes.txt", b"nothing"), ("empty", b"")];
    for (archive, kind) in [(tar_file(files), "tar"), (zip_file(files), "zip"), (zip_file(&[]), "zip")] {
        assert_eq!(message(&archive), format!("the {kind} archive cannot be read: no file in it is a recording"));
    }
}

#[test]
fn file_that_is_compressed_in_an_archive_is_named() {
    let (packed, inner) = (bytes("snapshot.pickle.xz"), tar_file(&[("a.pickle", b"\x80\x04}.")]));
    let files: &[(&str, &[u8])] = &[("a.pickle.xz", &packed), ("b.tar", &inner)];
    for archive in [tar_file(files), zip_file(files), gzip(&tar_file(files))] {
        let message = message(&archive);
        assert!(message.contains("compressed once more (a.pickle.xz, b.tar): extract it and give the files"));
    }
    // Next to a recording it does not matter.
    let plain = bytes("snapshot.p4.pickle");
    let archive = tar_file(&[("a.pickle.xz", &packed), ("b.pickle", &plain)]);
    assert_eq!(read(&archive).expect("readable").snapshot, read(&plain).expect("readable").snapshot);
}

#[test]
fn error_in_an_archive_names_the_file() {
    let damaged = b"\x80\x04}R.";
    for (archive, kind) in [(tar_file(&[("a/b.pkl", damaged)]), "tar"), (zip_file(&[("a/b.pkl", damaged)]), "zip")] {
        let message = message(&archive);
        assert!(message.starts_with(&format!("`a/b.pkl` in the {kind} archive: refused at byte 3: ")), "{message}");
    }
}

#[test]
fn sizes_in_headers_are_not_trusted() {
    // A tar header that promises 8 GiB, of a file and of a name, before a few bytes.
    for kind in [tar::EntryType::Regular, tar::EntryType::GNULongName, tar::EntryType::XHeader] {
        let mut header = tar::Header::new_gnu();
        header.set_path("snapshot.pickle").expect("short");
        header.set_size((8 << 30) - 1);
        header.set_entry_type(kind);
        header.set_cksum();
        let file = [header.as_bytes().as_slice(), b"\x80\x04}("].concat();
        let message = message(&file);
        assert!(message.contains("cut off"), "{kind:?}: {message}");
    }
    // A name that is compressed to nothing: only its start is read.
    let mut header = tar::Header::new_gnu();
    header.set_size(64 << 20);
    header.set_entry_type(tar::EntryType::GNULongName);
    header.set_cksum();
    let long_name = [header.as_bytes().as_slice(), &vec![b'n'; 64 << 20], &tar_file(&[("a", b"\x80\x04}.")])].concat();
    let message = message(&gzip(&long_name));
    assert!(message.starts_with("`nnnnnnn") && message.contains("`segments` is missing"), "{message}");
}

#[test]
fn every_number_of_a_zip_archive_may_be_wrong() {
    let good = bytes("snapshot.pt");
    let whole = read(&good).expect("undamaged").snapshot;
    for at in 0..good.len() - 8 {
        let mut file = good.clone();
        file[at..at + 8].fill(0xff);
        if let Ok(other) = read(&file) {
            assert!(other.snapshot == whole, "bytes from {at}");
        }
    }
}

#[test]
fn archive_that_expands_without_end_is_limited() {
    // 2 GiB of zeros in 2 MB, and no recording: with a limit of 64 MiB, 1 GiB of them are read.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut header = tar::Header::new_gnu();
    header.set_path("zeros").expect("short");
    header.set_size(2 << 30);
    header.set_cksum();
    packed.write_all(header.as_bytes()).expect("writing to memory succeeds");
    let zeros = vec![0; 1 << 20];
    (0..2 << 10).for_each(|_| packed.write_all(&zeros).expect("writing to memory succeeds"));
    let file = packed.finish().expect("writing to memory succeeds");
    let limited = ReadOptions { memory_limit: Some(64 << 20), ..ReadOptions::default() };
    let error = warpool_trace::read(file.as_slice(), &limited).expect_err("refused");
    assert!(matches!(error, ReadError::MemoryLimit { offset, .. } if offset < (1 << 30) + (1 << 20)), "{error}");
}
