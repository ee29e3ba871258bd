//! When the host may access pinned memory.

use std::panic::{AssertUnwindSafe, catch_unwind};

use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, PinnedVec, Result};

use crate::fixture::Fixture;

const LEN: usize = 1 << 18;

fn is_in_use(error: &Error) -> bool {
    matches!(error, Error::Buffer(BufferError::InUse { .. })) && error.is_not_ready()
}

#[test]
fn the_host_reads_what_a_device_reads_and_waits_for_what_it_writes() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, LEN)?.with_label("staging");
    pinned[3] = 4;
    let mut x = DeviceVec::uninit(&gpu.allocator, LEN, &stream)?;

    stream.copy(&pinned, &mut x)?; // the device reads
    assert_eq!(pinned[3], 4);
    let error = pinned.try_slice_mut().map(drop).expect_err("the copy is under way");
    assert!(is_in_use(&error) && error.to_string().contains("\"staging\""), "{error}");
    pinned.wait_mut()?[3] = 5;
    assert_eq!(x.to_vec(&stream)?[3], 4);

    stream.copy(&x, &mut pinned)?; // the device writes
    assert!(is_in_use(&pinned.try_slice().map(drop).expect_err("the copy is under way")));
    let panic = catch_unwind(AssertUnwindSafe(|| pinned[3])).expect_err("the copy is under way");
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("\"staging\"") && message.contains("still in use"), "{message}");
    stream.synchronize()?;
    assert_eq!((pinned[3], pinned.len()), (4, LEN));
    gpu.finish()
}

#[test]
fn dropped_memory_is_reused_after_the_copy() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<u32>::uninit(&gpu.allocator, LEN, &stream)?;
    for round in 0..10 {
        let pinned = PinnedVec::from_slice(&gpu.host, &vec![round; LEN])?;
        stream.copy(&pinned, &mut x)?;
        drop(pinned);
        let other = PinnedVec::from_slice(&gpu.host, &vec![u32::MAX; LEN])?;
        assert_eq!(other[0], u32::MAX);
        assert_eq!(x.to_vec(&stream)?, vec![round; LEN]);
    }
    gpu.finish()
}

#[test]
fn two_streams_use_it_in_turns() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, LEN)?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, LEN, &one)?;
    let mut y = DeviceVec::<u32>::zeroed(&gpu.allocator, LEN, &two)?;
    for round in 1..5 {
        one.fill(&mut x, round)?;
        one.copy(&x, &mut pinned)?;
        two.copy(&pinned, &mut y)?;
        assert_eq!(y.to_vec(&two)?, vec![round; LEN]);
    }
    assert_eq!(pinned.wait()?[LEN - 1], 4);
    gpu.finish()
}

#[test]
fn borrows_of_the_host_are_counted() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, 8)?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 8, &stream)?;
    {
        let (first, second) = (pinned.host()?, pinned.host()?);
        assert_eq!((first[0], second.len()), (0, 8));
        stream.copy(&pinned, &mut x)?; // the device reads too
    }
    pinned.host_mut()?[0] = 1;
    std::mem::forget(pinned.host_mut()?);
    let error = stream.copy(&x, &mut pinned).expect_err("a borrow was leaked");
    assert!(matches!(error, Error::Buffer(BufferError::BorrowedByHost { .. })), "{error}");
    gpu.finish()
}
