//! How every typed operation reaches the driver: at once, or into a capture.

use std::panic::Location;

use warpool_driver::source_line;

use super::captured::CapturedBuffers;
use super::operation::{Access, capture_of, run};
use crate::{Instance, Result, Stream};

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
        access.instance().expect_same(instance, "the stream")?;
    }
    if instance.has_asleep() {
        expect_awake(instance, accesses)?;
    }
    source_line::at(line, || match capture_of(stream)? {
        Some(capture) => CapturedBuffers::submit(&capture, stream, accesses, queue),
        None => run_now(stream, accesses, queue),
    })
}

#[cold]
fn expect_awake(instance: &Instance, accesses: &[Access<'_>]) -> Result<()> {
    accesses.iter().try_for_each(|access| match access.device_ptr() {
        Some(ptr) => instance.expect_awake_at(ptr, "queue this work"),
        None => Ok(()),
    })
}

fn run_now(stream: &Stream, accesses: &mut [Access<'_>], queue: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    accesses.iter_mut().for_each(|access| access.track_for(stream));
    accesses.sort_unstable_by_key(Access::key);
    let (untracked, tracked) = accesses.split_at(accesses.partition_point(|access| access.key() == 0));
    let mut outcome = Ok(());
    run(stream, tracked, false, &mut || outcome = queue())?;
    untracked.iter().for_each(|access| access.add_late(stream));
    outcome
}
