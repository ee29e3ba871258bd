//! How every typed operation reaches the driver: executed at once, or captured.
//!
//! If all memory is private to the stream (`buffer.rs`), this is a few comparisons and the driver call, inlined into
//! the program ([`submit_direct`]).

use std::panic::Location;

use super::captured::CapturedBuffers;
use super::operation::{Access, Attempt, Memory, capture_of, in_order, run};
use super::tracked::Tracked;
use crate::capture::FrozenCaptures;
use crate::error::BufferError;
use crate::{Instance, Result, Stream};

/// Which memory an operation can use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Memory of the stream's device, and pinned memory.
    OwnDevice,
    /// Any memory; the operation itself fails if it cannot use it.
    AnyDevice,
}

/// Freezes captures for work in `stream` on memory that is all private to it (`private`), if the work can go directly
/// to the driver: no capture is active, and no memory is asleep.
#[inline]
pub(super) fn direct(stream: &Stream, private: impl FnOnce() -> bool) -> Option<FrozenCaptures<'_>> {
    let instance = stream.instance();
    if instance.has_captures() || instance.has_asleep() || !private() {
        return None;
    }
    // A capture that began before is seen now, a later one waits.
    instance.try_freeze_captures(stream).filter(|_| !instance.has_captures())
}

/// Enqueues work in `stream` [directly](direct) by the driver calls in `queue`, for the program's line `line`. Then
/// `late` [adds](Access::add_late) the uses of memory that is no longer private.
#[inline]
pub(super) fn submit_direct<R>(
    frozen: FrozenCaptures<'_>,
    stream: &Stream,
    line: &'static Location<'static>,
    late: impl FnOnce(),
    queue: impl FnOnce() -> R,
) -> R {
    let outcome = stream.instance().at_line(line, queue);
    late();
    drop(frozen);
    outcome
}

/// Enqueues work in `stream` that uses `accesses`, by the driver calls in `queue`, for the program's line `line`. If
/// the stream is capturing, its graph keeps the buffers.
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
    check(stream, accesses, reach)?;
    stream.instance().at_line(line, || {
        in_order(stream, |_frozen| match capture_of(stream)? {
            Some(capture) => CapturedBuffers::submit(&capture, stream, accesses, queue).map(Ok),
            None => run_now(stream, accesses, queue),
        })
    })
}

/// Makes a copy of `access` from or to ordinary host memory, which is complete when `copy` returns. It waits for the
/// stream's work on the host, so captures are frozen only before that.
pub(super) fn submit_ordinary(
    stream: &Stream,
    mut access: Access<'_>,
    line: &'static Location<'static>,
    mut copy: impl FnMut() -> Result<()>,
) -> Result<()> {
    check(stream, &[access], Reach::AnyDevice)?;
    stream.instance().at_line(line, || {
        in_order(stream, |frozen| {
            if capture_of(stream)?.is_some() {
                return Err(BufferError::OrdinaryMemoryInCapture.into());
            }
            access.track_for(stream);
            let Memory::Tracked(tracked) = access.memory else {
                drop(frozen);
                return copy().map(Ok);
            };
            let Some(mut uses) = tracked.uses_if_unlocked() else { return Ok(Err(tracked)) };
            tracked.prepare(&mut uses, stream, access.span)?;
            let joined = capture_of(stream)?.is_some();
            if joined {
                uses.forget_waits(stream.id());
                return Err(BufferError::OrdinaryMemoryInCapture.into());
            }
            drop(frozen);
            // Afterwards nothing is under way that a later use would have to wait for.
            copy().map(Ok)
        })
    })
}

/// Fails if the stream must not use the memory.
fn check(stream: &Stream, accesses: &[Access<'_>], reach: Reach) -> Result<()> {
    let instance = stream.instance();
    if reach == Reach::OwnDevice {
        accesses.iter().try_for_each(|access| access.expect_device_of(stream))?;
    }
    for access in accesses {
        access.instance().expect_same(instance, "the stream")?;
    }
    if instance.has_asleep() {
        expect_awake(instance, accesses)?;
    }
    Ok(())
}

#[cold]
fn expect_awake(instance: &Instance, accesses: &[Access<'_>]) -> Result<()> {
    accesses.iter().try_for_each(|access| match access.device_ptr() {
        Some(ptr) => instance.expect_awake_at(ptr, "queue this work"),
        None => Ok(()),
    })
}

/// Enqueues work that is to run at once, unless a buffer is busy.
fn run_now<'a>(
    stream: &Stream,
    accesses: &mut [Access<'a>],
    queue: &mut dyn FnMut() -> Result<()>,
) -> Result<std::result::Result<(), &'a Tracked>> {
    accesses.iter_mut().for_each(|access| access.track_for(stream));
    accesses.sort_unstable_by_key(Access::key);
    let (private, tracked) = accesses.split_at(accesses.partition_point(|access| access.key() == 0));
    let mut outcome = Ok(());
    let queued = match run(stream, tracked, false, &mut || outcome = queue())? {
        Attempt::Queued(queued) => queued,
        Attempt::Busy(tracked) => return Ok(Err(tracked)),
    };
    private.iter().for_each(|access| access.add_late(stream));
    if let Some(joined) = &queued.capture {
        CapturedBuffers::keep(joined, stream, accesses);
    }
    outcome.map(Ok)
}
