//! How every typed operation reaches the driver: at once, or into a capture.

use std::panic::Location;

use warpool_driver::source_line;

use super::captured::CapturedBuffers;
use super::operation::{Access, capture_of, run};
use crate::{Result, Stream};

/// Queues work in `stream` that uses `accesses`, by the driver calls in `queue`, for the program's line `line`. If the
/// stream captures, its graph keeps the buffers.
pub(super) fn submit(
    stream: &Stream,
    accesses: &mut [Access<'_>],
    line: &'static Location<'static>,
    queue: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let instance = stream.instance();
    for access in &*accesses {
        access.buffer.instance().expect_same(instance, "the stream")?;
    }
    source_line::at(line, || match capture_of(stream)? {
        Some(capture) => CapturedBuffers::submit(&capture, stream, accesses, queue),
        None => {
            accesses.sort_unstable_by_key(Access::key);
            run(stream, accesses, false, queue).map(drop)
        }
    })
}
