//! xz and zstd by their C libraries.

use std::io::{self, Read};

/// zstd's largest window that is read.
const WINDOW_LOG_MAX: u32 = 27;
/// What zstd takes beside its window, and the output.
const FIXED: u64 = 1 << 20;

/// A reader of xz data, of several streams too, that takes at most `memory_max`.
pub(super) fn xz<'a>(raw: impl Read + 'a, memory_max: u64) -> io::Result<Box<dyn Read + 'a>> {
    let stream = liblzma::stream::Stream::new_stream_decoder(memory_max, liblzma::stream::CONCATENATED)?;
    Ok(Box::new(liblzma::read::XzDecoder::new_stream(raw, stream)))
}

/// The base-2 logarithm of the largest window that `memory_max` has room for, and the memory that this takes.
pub(super) fn zstd_window(memory_max: u64) -> (u32, u64) {
    let log = memory_max.saturating_sub(FIXED).max(1).ilog2().clamp(10, WINDOW_LOG_MAX);
    (log, (1 << log) + FIXED)
}

/// A reader of zstd data, of several frames too, with windows of at most `1 << window_log`.
pub(super) fn zstd<'a>(raw: impl Read + 'a, window_log: u32) -> io::Result<Box<dyn Read + 'a>> {
    let mut decoder = zstd::Decoder::new(raw)?;
    decoder.window_log_max(window_log)?;
    Ok(Box::new(decoder))
}

/// Whether a decompressor needs more memory than it may take. Errors of zstd have no kind.
pub(super) fn exceeds_memory(error: &io::Error) -> bool {
    let xz = error.get_ref().and_then(|inner| inner.downcast_ref::<liblzma::stream::Error>());
    matches!(xz, Some(liblzma::stream::Error::MemLimit)) || error.to_string().contains("Frame requires too much memory")
}
