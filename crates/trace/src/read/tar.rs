//! The recording in a tar archive. The archive is read once, from its start to its end.

use std::io::{self, Cursor, Read};

use super::archive::{Archive, PEEK_BYTES};
use super::error::{Checked, ReadError};
use super::members::{Member, Members, member_name};
use super::source::Source;

/// The most bytes of a name that are read.
const NAME_MAX: u64 = 4 << 10;

/// Calls `read` with the recording, and fails if there is none or another one.
pub(super) fn read<T>(source: &mut Source<'_>, mut read: impl FnMut(&mut dyn Read) -> Checked<T>) -> Checked<T> {
    let mut result = None;
    let mut members = Members::new(Archive::Tar);
    let mut archive = tar::Archive::new(&mut *source);
    let mut long_name = None;
    // Raw: the crate would read a long name into memory whatever its length.
    for entry in archive.entries().map_err(failed)?.raw(true) {
        let mut entry = entry.map_err(failed)?;
        let kind = entry.header().entry_type();
        let mut first = Vec::new();
        if kind.is_gnu_longname() {
            entry.take(NAME_MAX).read_to_end(&mut first).map_err(failed)?;
            long_name = Some(first.split(|&byte| byte == 0).next().unwrap_or_default().to_vec());
            continue;
        }
        let name = long_name.take().unwrap_or_else(|| entry.path_bytes().into_owned());
        if !kind.is_file() && !kind.is_contiguous() {
            continue;
        }
        entry.by_ref().take(PEEK_BYTES).read_to_end(&mut first).map_err(failed)?;
        let member = Member::of(&first);
        members.add(member, &name);
        if member == Member::Recording && result.is_none() {
            let recording = read(&mut Cursor::new(first).chain(&mut entry));
            result = Some(recording.map_err(|error| error.within(Archive::Tar, &member_name(&name)))?);
        }
    }
    // To the end of compressed data, where the checksum is.
    io::copy(source, &mut io::sink()).map_err(failed)?;
    members.check()?;
    Ok(result.expect("there is one recording, and it was read"))
}

fn failed(error: io::Error) -> Box<ReadError> {
    Box::new(error.downcast().unwrap_or_else(|error| ReadError::Archive {
        archive: Archive::Tar,
        what: format!("it is damaged or cut off ({error}): copy the file again"),
    }))
}
