//! How every typed operation reaches the driver: at once, or into a capture.
//!
//! Where all memory is private to the stream (`buffer.rs`), that is a few comparisons and the driver call, inlined into
//! the program ([`submit_direct`]).

use std::panic::Location;

use super::captured::CapturedBuffers;
use super::operation::{Access, capture_of, run};
use crate::{Instance, Result, Stream};

/// Which memory an operation can use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// That of the stream's device, and pinned memory.
    OwnDevice,
    /// Any; the operation fails where it must.
    AnyDevice,
}

/// Whether work in `stream` on memory that is all private to it can go straight to the driver.
#[inline]
pub(super) fn is_direct(stream: &Stream) -> bool {
    !stream.instance().has_captures() && !stream.instance().has_asleep()
}

/// Queues work in `stream`, [straight](is_direct) by the driver calls in `queue`, for the program's line `line`. Then
/// `late` [adds](Access::add_late) the uses of memory that is not private any more.
#[inline]
pub(super) fn submit_direct<R>(
    stream: &Stream,
    line: &'static Location<'static>,
    late: impl FnOnce(),
    queue: impl FnOnce() -> R,
) -> R {
    let outcome = stream.instance().at_line(line, queue);
    late();
    outcome
}

/// Queues work in `stream` that uses `accesses`, by the driver calls in `queue`, for the program's line `line`. If the
/// stream captures, its graph keeps the buffers.
pub(super) fn submit<const N: usize>(
    stream: &Stream,
    accesses: &[Option<Access<'_>>; N],
    reach: Reach,
    line: &'static Location<'static>,
    queue: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let Some(&any) = accesses.iter().flatten().next() else {
        return order(stream, &mut [], reach, line, queue);
    };
    let (mut list, mut count) = ([any; N], 0);
    for &access in accesses.iter().flatten() {
        list[count] = access;
        count += 1;
    }
    order(stream, &mut list[..count], reach, line, queue)
}

fn order(
    stream: &Stream,
    accesses: &mut [Access<'_>],
    reach: Reach,
    line: &'static Location<'static>,
    queue: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let instance = stream.instance();
    if reach == Reach::OwnDevice {
        accesses.iter().try_for_each(|access| access.expect_device_of(stream))?;
    }
    for access in &*accesses {
        access.instance().expect_same(instance, "the stream")?;
    }
    if instance.has_asleep() {
        expect_awake(instance, accesses)?;
    }
    instance.at_line(line, || match capture_of(stream)? {
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
    let (private, tracked) = accesses.split_at(accesses.partition_point(|access| access.key() == 0));
    let mut outcome = Ok(());
    run(stream, tracked, false, &mut || outcome = queue())?;
    private.iter().for_each(|access| access.add_late(stream));
    outcome
}
