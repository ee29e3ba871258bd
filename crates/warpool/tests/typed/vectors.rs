//! Vectors, views, copies and fills.

use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings};
use warpool::graph::{CaptureOptions, Graph, GraphOptions, Step};
use warpool::memory::decorate::{Limited, Traced};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPool, Settings, SharedAllocator, Tags};
use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, PinnedVec, Result, Stream};

use crate::fixture::Fixture;

#[test]
fn contents_survive_copies_in_all_directions() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let values: Vec<u64> = (0..1000).map(|n| n * n).collect();
    let first = DeviceVec::from_slice(&gpu.allocator, &values, &stream)?;
    let mut second = DeviceVec::uninit(&gpu.allocator, 1000, &stream)?;
    stream.copy(&first, &mut second)?;
    let mut pinned = PinnedVec::zeroed(&gpu.host, 1000)?;
    stream.copy(&second, &mut pinned)?;
    let mut other = PinnedVec::zeroed(&gpu.host, 1000)?;
    stream.copy(&pinned, &mut other)?;
    let mut third = DeviceVec::zeroed(&gpu.allocator, 1000, &stream)?;
    stream.copy(&other, &mut third)?;
    let mut array = [0_u64; 1000];
    stream.copy(&third, &mut array)?;
    assert_eq!((&array[..], &third.to_vec(&stream)?[..]), (&values[..], &values[..]));
    assert_eq!(pinned.wait()?, values);
    gpu.finish()
}

#[test]
fn slices_are_parts_and_their_bounds_are_checked() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::from_slice(&gpu.allocator, &[0_u32, 1, 2, 3, 4, 5, 6, 7], &stream)?;
    stream.copy(&[70, 80], x.slice_mut(6..)?)?;
    stream.fill(x.slice_mut(1..=2)?, 9)?;
    let view = x.slice(1..7)?;
    assert_eq!((view.len(), view.is_empty()), (6, false));
    assert_eq!(stream.to_vec(view.slice(..3)?)?, [9, 9, 3]);
    let (left, right) = view.split_at(4)?;
    assert_eq!((stream.to_vec(&left)?, stream.to_vec(right)?), (vec![9, 9, 3, 4], vec![5, 70]));
    for (start, end) in [(0, 9), (9, 9), (5, 4)] {
        let error = x.slice(start..end).expect_err("outside");
        assert_eq!(error, Error::Buffer(BufferError::Range { start, end, len: 8 }));
        assert!(error.is_invalid_argument());
    }
    assert!(x.slice(..=usize::MAX).is_err() && x.view_mut().slice_mut(3..9).is_err());
    assert!(x.slice(8..)?.is_empty());
    gpu.finish()
}

#[test]
fn vectors_and_views_say_what_they_are() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<f32>::zeroed(&gpu.allocator, 8, &stream)?;
    let shown = format!("{x:?}");
    assert!(shown.starts_with("8 elements in device memory without a label: 32 bytes at 0x"), "{shown}");
    let shown = format!("{:?}", x.slice_mut(2..4)?);
    assert!(shown.starts_with("elements 2..4 of device memory without a label: 32 bytes at 0x"), "{shown}");
    let x = x.with_label("x");
    let shown = format!("{:?}", x.view());
    assert!(shown.starts_with("elements 0..8 of device memory \"x\": 32 bytes at 0x"), "{shown}");
    gpu.finish()
}

#[test]
fn lengths_must_match() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<f32>::zeroed(&gpu.allocator, 8, &stream)?;
    let calls = gpu.gpu.calls_made();
    let error = stream.copy(&[1.0; 7], &mut x).expect_err("too short");
    assert_eq!(error, Error::Buffer(BufferError::Length { source_len: 7, target_len: 8 }));
    assert_eq!(gpu.gpu.calls_made(), calls, "the driver was not asked");
    gpu.finish()
}

#[test]
fn elements_of_every_size_are_filled() -> Result<()> {
    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Odd([u8; 3]);
    // SAFETY: three bytes, zeros among them.
    unsafe impl warpool::typed::Zeroable for Odd {}
    // SAFETY: three bytes, any of which are valid.
    unsafe impl warpool::typed::Pod for Odd {}

    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    for len in [0, 1, 2, 3, 100, 129] {
        macro_rules! check {
            ($($value:expr),*) => {$(
                let mut x = DeviceVec::uninit(&gpu.allocator, len, &stream)?;
                stream.fill(&mut x, $value)?;
                assert_eq!(x.to_vec(&stream)?, vec![$value; len]);
            )*};
        }
        check!(7_u8, 0x1234_u16, -1.5_f32, 1.0e100_f64, [1_u16, 2, 3], u64::MAX, [1_u64, 2, 3], Odd([1, 2, 3]));
    }
    gpu.finish()
}

#[test]
fn rows_are_copied_with_their_strides() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let source: Vec<u32> = (0..20).collect();
    let source = DeviceVec::from_slice(&gpu.allocator, &source, &stream)?;
    let mut target = DeviceVec::<u32>::zeroed(&gpu.allocator, 12, &stream)?;
    stream.copy_rows(&source.slice(1..)?.rows(3, 2, 5)?, &mut target.view_mut().rows_mut(3, 2, 4)?)?;
    assert_eq!(target.to_vec(&stream)?, [1, 2, 0, 0, 6, 7, 0, 0, 11, 12, 0, 0]);
    let mut pinned = PinnedVec::<u32>::zeroed(&gpu.host, 6)?;
    stream.copy_rows(&source.view().rows(2, 3, 10)?, &mut pinned.view_mut().rows_mut(2, 3, 3)?)?;
    assert_eq!(pinned.wait()?, [0, 1, 2, 10, 11, 12]);
    for (rows, columns, stride) in [(5, 5, 4), (4, 5, 6), (usize::MAX, 2, 3), (21, 1, 1)] {
        assert!(source.view().rows(rows, columns, stride).is_err(), "{rows} {columns} {stride}");
    }
    assert!(source.view().rows(0, 5, 5).is_ok() && source.view().rows(4, 5, 5).is_ok());
    let (two, three) = (source.view().rows(2, 3, 3)?, source.view().rows(3, 2, 2)?);
    assert!(stream.copy_rows(&two, &mut target.view_mut().rows_mut(3, 2, 2)?).is_err());
    stream.copy_rows(&three, &mut target.view_mut().rows_mut(3, 2, 2)?)?;
    gpu.finish()
}

#[test]
fn devices_are_checked_and_copies_between_them_work() -> Result<()> {
    let gpu = Fixture::pair()?;
    let (near, far) = (gpu.stream()?, gpu.instance.device(1)?.lease_stream()?);
    let here = DeviceVec::from_slice(&gpu.allocator, &[1_u32, 2, 3], &near)?.with_label("here");
    let mut there = DeviceVec::<u32>::zeroed(&gpu.allocator, 3, &far)?;
    assert_eq!(there.device(), gpu.instance.device(1)?);
    near.copy(&here, &mut there)?;
    assert_eq!(there.to_vec(&far)?, [1, 2, 3]);
    let error = near.fill(&mut there, 7).expect_err("memory of another device");
    assert!(matches!(error, Error::Buffer(BufferError::Device { .. })), "{error}");
    let mut here = here;
    let error = far.fill(&mut here, 7).expect_err("memory of another device");
    assert!(error.to_string().contains("\"here\""), "{error}");
    gpu.finish()
}

#[test]
fn empty_vectors_need_no_driver_call() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let mut x = DeviceVec::<f64>::zeroed(&gpu.allocator, 0, &stream)?;
    let pinned = PinnedVec::<f64>::zeroed(&gpu.host, 0)?;
    stream.copy(&pinned, &mut x)?;
    assert!(x.to_vec(&stream)?.is_empty() && x.is_empty() && pinned.is_empty());
    assert!(DeviceVec::<f64>::uninit(&gpu.allocator, usize::MAX, &stream).expect_err("too many").is_invalid_argument());
    gpu.finish()
}

/// Every constructor takes a concrete allocator as well as an erased one, by the same expression.
#[test]
fn constructors_take_every_shared_allocator() -> Result<()> {
    fn all(gpu: &Fixture, allocator: &impl SharedAllocator) -> Result<()> {
        let (device, stream) = (gpu.instance.device(0)?, gpu.stream()?);
        let options = GraphOptions::default();
        let pool = MemPool::new(allocator, &device, PoolOptions::default())?;
        assert_eq!(MemPool::from_id(allocator, &device, pool.id())?.id(), pool.id());
        pool.close()?;
        let blas = Blas::new(allocator, BlasSettings::default());
        Graph::new(allocator, &device, options)?;
        Tags::new(allocator, &gpu.host)?;
        let traced = Arc::new(Traced::new(&Arc::new(Limited::new(allocator, 1 << 30)), |_, _| {}));
        for values in [
            DeviceVec::from_slice(allocator, &[1_u32, 2, 3], &stream)?,
            DeviceVec::from_slice(&traced, &[1_u32, 2, 3], &stream)?,
        ] {
            let mut zeroed = DeviceVec::<u32>::zeroed(allocator, 3, &stream)?;
            stream.copy(&values, &mut zeroed)?;
            let capture = |stream: &Stream, buffers: &mut DeviceVec<u32>| stream.fill(buffers, 7);
            let step = Step::capture(allocator, &stream, CaptureOptions::default(), zeroed, capture)?;
            step.replay(&stream)?;
            assert_eq!(step.buffers().to_vec(&stream)?, [7; 3]);
        }
        drop(blas);
        Ok(())
    }
    let gpu = Fixture::new()?;
    let concrete = Arc::new(CachingAllocator::new(&gpu.instance, Settings::default()));
    let any: Arc<dyn DeviceAllocator> = concrete.clone();
    all(&gpu, &concrete)?;
    all(&gpu, &any)?;
    gpu.finish()
}

/// The contents of memory that was used before are whatever it held, and are not read from a device.
#[test]
fn pinned_memory_can_be_left_unwritten() -> Result<()> {
    let gpu = Fixture::new()?;
    let stream = gpu.stream()?;
    let values = DeviceVec::from_slice(&gpu.allocator, &[5_u16; 100], &stream)?;
    let mut target = PinnedVec::<u16>::uninit(&gpu.host, 100)?;
    stream.copy(&values, &mut target)?;
    assert_eq!(target.wait()?, [5; 100]);
    assert!(PinnedVec::<u16>::uninit(&gpu.host, 0)?.is_empty());
    assert!(PinnedVec::<u16>::uninit(&gpu.host, usize::MAX).unwrap_err().is_invalid_argument());
    gpu.finish()
}

/// `?` turns an invalid settings string into the crate's error, with the same message.
#[test]
fn an_invalid_settings_string_is_an_error_of_the_crate() -> Result<()> {
    fn parse(string: &str) -> Result<Settings> {
        Ok(Settings::parse(string)?)
    }
    parse("expandable_segments:True")?;
    let error = parse("max_splt_size_mb:200").unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    assert_eq!(error.to_string(), Settings::parse("max_splt_size_mb:200").unwrap_err().to_string());
    Ok(())
}
