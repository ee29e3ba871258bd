//! The methods that classify errors.

use warpool::driver::sim::SimConfig;
use warpool::driver::{DriverError, ErrorCode};
use warpool::graph::GraphError;
use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, Result};

use crate::fixture::Fixture;

/// The kinds of an error.
fn kinds(error: &Error) -> Vec<&'static str> {
    let all = [
        (error.is_out_of_memory(), "out of memory"),
        (error.is_capture_broken(), "capture broken"),
        (error.is_refused_in_capture(), "refused in capture"),
        (error.is_device_lost(), "device lost"),
        (error.is_not_ready(), "not ready"),
        (error.is_asleep(), "asleep"),
        (error.is_unsupported(), "unsupported"),
        (error.is_invalid_argument(), "invalid argument"),
    ];
    all.into_iter().filter_map(|(is, name)| is.then_some(name)).collect()
}

fn driver(code: ErrorCode) -> Error {
    DriverError::new("copy", code).into()
}

#[test]
fn every_error_has_at_most_one_kind() {
    let broken = DriverError::new("capture_end", ErrorCode::StreamCaptureInvalidated);
    let body = GraphError::BodyFailed { error: Box::new(driver(ErrorCode::OutOfMemory)) };
    for (error, expected) in [
        (driver(ErrorCode::OutOfMemory), &["out of memory"][..]),
        (driver(ErrorCode::NotReady), &["not ready"]),
        (driver(ErrorCode::IllegalAddress), &["device lost"]),
        (driver(ErrorCode::StreamCaptureUnsupported), &["capture broken"]),
        (GraphError::CaptureFailed { error: broken }.into(), &["capture broken"]),
        (body.into(), &["out of memory", "capture broken"]),
        (GraphError::ForeignCapture.into(), &["refused in capture"]),
        (BufferError::OrdinaryMemoryInCapture.into(), &["refused in capture"]),
        (BufferError::Length { source_len: 1, target_len: 2 }.into(), &["invalid argument"]),
        (Error::DeviceOutOfRange { index: 1, count: 1 }, &["invalid argument"]),
        (Error::MemoryAsleep { tag: "weights".into(), what: "replay the graph" }, &["asleep"]),
        (Error::TagAsleep { tag: "weights".into() }, &["asleep"]),
        (Error::UnknownTag { tag: "weights".into(), known: Vec::new() }, &["invalid argument"]),
        (Error::Unsupported { allocator: "driver-pool", what: "memory that sleeps" }, &["unsupported"]),
        (driver(ErrorCode::NotSupported), &["unsupported"]),
        (GraphError::UnknownBuffer.into(), &["invalid argument"]),
        (Error::ThreadEnding, &[]),
    ] {
        assert_eq!(kinds(&error), expected, "{error}");
    }
}

#[test]
fn a_full_device_is_out_of_memory() -> Result<()> {
    let gpu = Fixture::with(SimConfig::default().with_capacity(1 << 30))?;
    let stream = gpu.stream()?;
    let error = DeviceVec::<f32>::uninit(&gpu.allocator, 512 << 20, &stream).expect_err("twice what there is");
    assert_eq!(kinds(&error), ["out of memory"], "{error}");
    gpu.finish()
}
