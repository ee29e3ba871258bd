//! Uses of one buffer in several streams: streams wait for each other if necessary, and only then.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, ErrorCode, Pattern};
use warpool::memory::{HostAllocator, PinnedSettings};
use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, Instance, PinnedVec, Result, Stream};

use crate::fixture::Fixture;

#[test]
fn one_stream_needs_no_events() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<f32>::zeroed(&gpu.allocator, 100, &stream)?;
    let mut y = DeviceVec::<f32>::zeroed(&gpu.allocator, 100, &stream)?;
    for round in 0..10 {
        stream.fill(&mut x, round as f32)?;
        stream.copy(&x, &mut y)?;
    }
    let events = [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent];
    assert_eq!(events.map(|call| gpu.gpu.call_count(call)), [0; 3]);
    assert_eq!(y.to_vec(&stream)?, [9.0; 100]);
    gpu.finish()
}

#[test]
fn a_second_stream_waits_for_the_first() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::uninit(&gpu.allocator, 1 << 20, &one)?;
    let mut y = DeviceVec::<u32>::uninit(&gpu.allocator, 1 << 20, &two)?;
    for round in 0..5 {
        one.fill(&mut x, round)?;
        two.copy(&x, &mut y)?; // reads what was written in the other stream
        one.fill(&mut x, 100 + round)?; // writes what is read in the other stream
        assert_eq!(y.to_vec(&two)?, vec![round; 1 << 20]);
    }
    gpu.finish()
}

#[test]
fn memory_is_waited_for_also_before_its_first_use() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    // Work of the first stream still uses the memory when it is freed and allocated again.
    let mut old = DeviceVec::<u32>::uninit(&gpu.allocator, 1 << 20, &one)?;
    one.fill(&mut old, 1)?;
    drop(old);
    let mut new = DeviceVec::<u32>::uninit(&gpu.allocator, 1 << 20, &one)?;
    two.fill(&mut new, 2)?;
    // The second stream's use is known when the memory is freed, without being recorded by hand.
    drop(new);
    let mut third = DeviceVec::<u32>::uninit(&gpu.allocator, 1 << 20, &one)?;
    one.fill(&mut third, 3)?;
    gpu.finish()
}

#[test]
fn readers_and_disjoint_parts_do_not_wait_for_each_other() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 100, &one)?;
    two.to_vec(&x)?; // the second stream has waited for the first
    let waits = || gpu.gpu.call_count(Call::StreamWaitEvent);
    let before = waits();
    let (mut a, mut b) = (PinnedVec::zeroed(&gpu.host, 50)?, PinnedVec::zeroed(&gpu.host, 50)?);
    one.copy(x.slice(..50)?, &mut a)?;
    two.copy(x.slice(..50)?, &mut b)?;
    one.copy(x.slice(..50)?, &mut a)?;
    assert_eq!(waits(), before, "readers");
    let (mut left, mut right) = x.split_at_mut(50)?;
    two.fill(&mut right, 2)?;
    one.fill(&mut right, 3)?;
    let before = waits();
    for value in 0..5 {
        one.fill(&mut right, value)?;
        two.copy(&b, left.slice_mut(..)?)?;
    }
    // The first write of the left half waits for the other stream's reads of it.
    assert!(waits() <= before + 1, "disjoint parts: {} waits", waits() - before);
    assert_eq!(one.to_vec(&right)?, [4; 50]);
    gpu.finish()
}

#[test]
fn many_streams_and_parts_are_merged_and_stay_ordered() -> Result<()> {
    let gpu = Fixture::new()?;
    let streams = (0..6).map(|_| gpu.stream()).collect::<Result<Vec<_>>>()?;
    let mut rng = fastrand::Rng::with_seed(16);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 256, &streams[0])?;
    let mut model = vec![0_u32; 256];
    for round in 0..400 {
        let stream = &streams[rng.usize(..6)];
        let (start, end) = (rng.usize(..=256), rng.usize(..=256));
        let range = start.min(end)..start.max(end);
        match rng.u8(..3) {
            0 => assert_eq!(stream.to_vec(x.slice(range.clone())?)?, model[range]),
            1 => {
                stream.fill(x.slice_mut(range.clone())?, round)?;
                model[range].fill(round);
            }
            _ => {
                let middle = range.start;
                let len = middle.min(256 - middle);
                let (left, mut right) = x.split_at_mut(middle)?;
                stream.copy(left.slice(..len)?, right.slice_mut(..len)?)?;
                let (from, to) = model.split_at_mut(middle);
                to[..len].copy_from_slice(&from[..len]);
            }
        }
    }
    assert_eq!(x.to_vec(&streams[5])?, model);
    gpu.finish()
}

#[test]
fn leaking_a_value_leaks_its_memory_alone() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, 1000)?;
    stream.copy(&x, &mut pinned)?;
    stream.fill(&mut x, 7)?;
    std::mem::forget((x, pinned));
    let y = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &stream)?;
    assert_eq!(y.to_vec(&stream)?, [0; 1000]);
    gpu.finish()
}

#[test]
fn threads_share_a_vector() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let x = DeviceVec::from_slice(&gpu.allocator, &[5_u32; 64], &stream)?;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| -> Result<()> {
                let own = gpu.stream()?;
                for _ in 0..20 {
                    let mut copy = DeviceVec::uninit(&gpu.allocator, 64, &own)?;
                    own.copy(&x, &mut copy)?;
                    assert_eq!(copy.to_vec(&own)?, [5; 64]);
                }
                Ok(())
            });
        }
    });
    gpu.finish()
}

#[test]
fn a_callback_that_uses_typed_memory_gets_the_drivers_error() -> Result<()> {
    let gpu = Fixture::new()?;
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    let x = Arc::new(std::sync::Mutex::new(DeviceVec::<u32>::zeroed(&gpu.allocator, 8, &stream)?));
    let (seen, inner) = (Arc::new(std::sync::OnceLock::new()), x.clone());
    let (result, own) = (seen.clone(), other.stream().clone());
    stream.host_callback(move || {
        let mut x = inner.lock().expect("no thread panicked");
        let _ = result.set(own.fill(&mut *x, 1));
    })?;
    stream.synchronize()?;
    let error = seen.get().cloned().expect("the callback ran").expect_err("calls are not permitted there");
    assert_eq!(error.driver().map(|error| error.code), Some(ErrorCode::NotPermitted));
    gpu.finish()
}

/// The first uses of a vector, at the same time in two threads: one in its own stream, which records nothing, one in
/// another, which begins to record.
#[test]
fn threads_begin_to_share_a_vector() -> Result<()> {
    let gpu = Fixture::new()?;
    let streams = [gpu.stream()?, gpu.stream()?, gpu.stream()?];
    let mut targets = [0, 1].map(|at| DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &streams[at]).unwrap());
    for round in 0..200 {
        let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1000, &streams[0])?;
        std::thread::scope(|scope| {
            for (stream, target) in streams.iter().zip(&mut targets) {
                let x = &x;
                scope.spawn(move || stream.copy(x, target).unwrap());
            }
        });
        // After both reads.
        streams[2].fill(&mut x, round)?;
    }
    gpu.finish()
}

/// The same, step by step: the other thread waits for the first stream before the work is enqueued there.
#[test]
fn work_queued_while_another_thread_begins_to_share_is_waited_for() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two, three) = (gpu.stream()?, gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 20, &one)?;
    let mut read_in_one = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 20, &one)?;
    let mut read_in_two = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 20, &two)?;
    one.with_address(&x, |from| {
        std::thread::scope(|scope| scope.spawn(|| two.copy(&x, &mut read_in_two)).join().expect("no panic"))?;
        one.with_address_mut(&mut read_in_one, |to| {
            Ok(gpu.instance.driver().copy(to.into(), from.into(), 4 << 20, one.id())?)
        })
    })?;
    three.fill(&mut x, 1)?;
    gpu.finish()
}

/// The same with two halves that two threads borrow exclusively, and with views of an exclusive view.
#[test]
fn parts_of_a_vector_are_not_exclusive() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two, three) = (gpu.stream()?, gpu.stream()?, gpu.stream()?);
    let fill = |at, stream: &Stream| Ok(gpu.instance.driver().fill(at, Pattern::U32(7), 1 << 19, stream.id())?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 20, &one)?;
    let (mut left, mut right) = x.split_at_mut(1 << 19)?;
    one.with_address_mut(left.slice_mut(..)?, |at| {
        std::thread::scope(|scope| scope.spawn(|| two.fill(&mut right, 1)).join().expect("no panic"))?;
        fill(at, &one)
    })?;
    three.fill(&mut x, 1)?;

    let mut first = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 19, &one)?;
    let mut second = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 19, &two)?;
    for by_slice in [false, true] {
        let mut y = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 19, &one)?;
        let whole = y.view_mut();
        let view = || if by_slice { whole.slice(..) } else { Ok(whole.view()) };
        one.with_address(view()?, |from| {
            let read = || two.copy(view()?, &mut second);
            std::thread::scope(|scope| scope.spawn(read).join().expect("no panic"))?;
            one.with_address_mut(&mut first, |to| {
                Ok(gpu.instance.driver().copy(to.into(), from.into(), 2 << 20, one.id())?)
            })
        })?;
        three.fill(&mut y, 1)?;
    }
    gpu.finish()
}

/// A fill of elements that no pattern repeats is several driver calls.
#[test]
fn work_that_failed_half_way_is_waited_for() -> Result<()> {
    let faulty = Arc::new(Faulty::new(Arc::new(SimDriver::new(SimConfig::default())), FaultPlan::new()));
    let instance = Instance::new(faulty.clone())?;
    let (stream, host) =
        (instance.device(0)?.lease_stream()?, HostAllocator::new(&instance, PinnedSettings::default()));
    let mut pinned = PinnedVec::<[u32; 3]>::zeroed(&host, 1 << 20)?;
    faulty.set_plan(FaultPlan::new().fail_nth(Call::Copy, 3, ErrorCode::LaunchFailed));
    let failed = stream.fill(&mut pinned, [1, 2, 3]).expect_err("the third copy fails");
    assert_eq!(failed.driver().map(|error| error.code), Some(ErrorCode::LaunchFailed));
    faulty.clear_plan();
    let refused = pinned.try_slice_mut().expect_err("the first copies are under way");
    assert!(matches!(refused, Error::Buffer(BufferError::InUse { .. })), "{refused}");
    assert_eq!(pinned.wait_mut()?[..4], [[1, 2, 3]; 4]);
    Ok(())
}

#[test]
fn work_of_a_closure_that_panics_is_waited_for() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 1 << 20, &one)?;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        two.with_address_mut(&mut x, |ptr| -> Result<()> {
            gpu.instance.driver().fill(ptr, Pattern::U32(7), 1 << 20, two.id())?;
            panic!("after the fill was queued");
        })
    }));
    assert!(outcome.is_err());
    one.fill(x.slice_mut(..10)?, 9)?;
    assert_eq!((x.to_vec(&one)?[..10].to_vec(), x.to_vec(&one)?[10]), (vec![9; 10], 7));
    gpu.finish()
}

#[test]
fn a_write_waits_for_all_readers() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two, three) = (gpu.stream()?, gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 100, &one)?;
    let mut read = [&two, &three].map(|stream| DeviceVec::<u32>::zeroed(&gpu.allocator, 100, stream).expect("memory"));
    two.to_vec(&x)?; // the second stream has waited for the first
    gpu.gpu.pause_stream(two.id()).expect("it is there");
    two.copy(&x, &mut read[0])?;
    three.copy(&x, &mut read[1])?;
    one.fill(&mut x, 5)?;
    gpu.gpu.resume_stream(two.id()).expect("it is there");
    assert_eq!((read[0].to_vec(&two)?, read[1].to_vec(&three)?), (vec![0; 100], vec![0; 100]));
    gpu.finish()
}

/// More reads than are stored separately, each of another part.
#[test]
fn a_write_waits_for_reads_that_were_merged() -> Result<()> {
    let gpu = Fixture::new()?;
    let (one, two) = (gpu.stream()?, gpu.stream()?);
    let mut x = DeviceVec::<u32>::zeroed(&gpu.allocator, 100, &one)?;
    let mut read = DeviceVec::<u32>::zeroed(&gpu.allocator, 100, &two)?;
    two.to_vec(&x)?;
    gpu.gpu.pause_stream(two.id()).expect("it is there");
    for at in 0..40 {
        two.copy(x.slice(at..at + 1)?, read.slice_mut(at..at + 1)?)?;
    }
    one.fill(x.slice_mut(..2)?, 5)?;
    gpu.gpu.resume_stream(two.id()).expect("it is there");
    assert_eq!(read.to_vec(&two)?, [0; 100]);
    gpu.finish()
}
