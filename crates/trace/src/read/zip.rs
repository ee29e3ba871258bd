//! The recording in a zip archive, such as `torch.save` writes. The directory at its end has the positions of the
//! files: `torch.save` leaves their sizes out of the headers before them.

use std::cell::Cell;
use std::io::Read;
use std::rc::Rc;

use rawzip::{CompressionMethod, RECOMMENDED_BUFFER_SIZE, ReaderAt, ZipArchive, ZipArchiveEntryWayfinder};

use super::archive::{Archive, PEEK_BYTES};
use super::error::{Checked, ReadError};
use super::members::{Member, Members, member_name};
use super::source::{Bounded, Counted, Layer, Source};
use crate::budget::{Budget, Exceeded};

/// The only recording of an archive.
pub(super) struct ZippedRecording<'a> {
    pub reader: Box<dyn Read + 'a>,
    pub name: String,
    /// Its size in the archive.
    pub bytes: u64,
    /// Bytes of the recording that have been read, before decompression.
    pub bytes_read: Rc<Cell<u64>>,
}

impl<'a> ZippedRecording<'a> {
    pub fn find<R: ReaderAt>(archive: &'a ZipArchive<R>, budget: &Budget) -> Checked<Self> {
        let mut buffer = vec![0; rawzip::MAX_CENTRAL_DIRECTORY_RECORD_SIZE];
        let mut members = Members::new(Archive::Zip);
        let mut found = None;
        let mut entries = archive.entries(&mut buffer);
        while let Some(entry) = entries.next_entry().map_err(damaged)? {
            if entry.is_dir() || entry.flags().is_encrypted() {
                continue;
            }
            let (place, method) = (entry.wayfinder(), entry.compression_method());
            let mut first = Vec::new();
            if let Some(member) = open(archive, place, method, budget)? {
                let peeked = member.reader.take(PEEK_BYTES).read_to_end(&mut first);
                peeked.map_err(|error| ReadError::of_io(error, 0))?;
            }
            let member = Member::of(&first);
            members.add(member, entry.file_path().as_bytes());
            if member == Member::Recording {
                found = Some((place, method, member_name(entry.file_path().as_bytes())));
            }
        }
        members.check()?;
        let (place, method, name) = found.expect("there is one recording");
        let opened = open(archive, place, method, budget)?.expect("its method is known: its start was read");
        Ok(Self { name, ..opened })
    }
}

/// A file of the archive; `None` if it is compressed in a way that is not read.
fn open<'a, R: ReaderAt>(
    archive: &'a ZipArchive<R>,
    place: ZipArchiveEntryWayfinder,
    method: CompressionMethod,
    budget: &Budget,
) -> Checked<Option<ZippedRecording<'a>>> {
    let entry = archive.get_entry(place).map_err(damaged)?;
    let bytes_read = Rc::new(Cell::new(0));
    let raw = Counted { reader: entry.reader(), bytes: Rc::clone(&bytes_read) };
    let plain: Box<dyn Read + 'a> = match method {
        CompressionMethod::STORE => Box::new(entry.verifying_reader(raw)),
        CompressionMethod::DEFLATE => Box::new(entry.verifying_reader(flate2::read::DeflateDecoder::new(raw))),
        _ => return Ok(None),
    };
    let reader = Box::new(Bounded::new(plain, Layer::Zip, budget));
    Ok(Some(ZippedRecording { reader, name: String::new(), bytes: place.compressed_size_hint(), bytes_read }))
}

/// The archive in a file.
pub(super) fn in_file(file: std::fs::File) -> Checked<ZipArchive<rawzip::FileReader>> {
    ZipArchive::from_file(file, &mut vec![0; RECOMMENDED_BUFFER_SIZE]).map_err(damaged)
}

/// The archive in a stream, which cannot be read from its end: it is copied to memory.
pub(super) fn in_memory(source: &mut Source<'_>, budget: &Budget) -> Checked<ZipArchive<impl ReaderAt + use<>>> {
    const STEP: usize = 128 << 10;
    let mut bytes = Vec::new();
    loop {
        let offset = bytes.len() as u64;
        budget.set_bytes_needed(offset);
        budget.reserve(&mut bytes, STEP).map_err(|Exceeded| ReadError::memory_limit(budget, offset))?;
        let read = source.by_ref().take(STEP as u64).read_to_end(&mut bytes);
        if read.map_err(|error| ReadError::of_io(error, offset))? == 0 {
            break;
        }
    }
    let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
    ZipArchive::from_seekable(std::io::Cursor::new(bytes), &mut buffer).map_err(damaged)
}

fn damaged(error: rawzip::Error) -> Box<ReadError> {
    Box::new(ReadError::damaged_zip(&error))
}
