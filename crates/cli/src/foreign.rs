//! The suite `foreign`: streams and contexts that another driver of this process created, adopted as those of a
//! framework are. It is part of the command because it needs a second CUDA driver.

use warpool_conformance::expect::{expect, expect_eq, expect_slice_eq, skip};
use warpool_conformance::{CheckError, CheckResult, Level, Suite, TestContext, checks};
use warpool_cuda::CudaDriver;
use warpool_driver::{CaptureMode, Copies, ErrorCode, ForeignStream, Memory, Pattern, StreamId, Streams};

pub const SUITE: Suite = Suite::new(
    "foreign",
    Level::Driver,
    checks![
        adopted_stream_shares_the_order_of_work,
        handle_of_adopted_stream_is_available_during_capture,
        destroying_an_adopted_id_keeps_the_stream,
        primary_context_can_be_adopted,
    ],
);

/// A second driver over the same devices. Skips the check on other drivers than CUDA.
fn second_driver(context: &TestContext) -> CheckResult<CudaDriver> {
    if context.driver.kind() != "cuda" {
        return skip("two simulated drivers share no devices");
    }
    CudaDriver::open().map_err(|error| CheckError::Failed(error.to_string()))
}

/// The handle of a stream of the context, for the second driver to adopt.
fn foreign_handle(context: &TestContext, stream: StreamId) -> CheckResult<ForeignStream> {
    let handle = context.driver.stream_handle(stream)?;
    // SAFETY: the context destroys the stream after the check, and the second driver is dropped before.
    Ok(unsafe { ForeignStream::new(handle.raw) })
}

fn adopted_stream_shares_the_order_of_work(context: &TestContext) -> CheckResult {
    let other = second_driver(context)?;
    let stream = context.stream()?;
    let handle = foreign_handle(context, stream)?;
    let adopted = other.stream_adopt(context.device_id, handle)?;
    expect_eq("the id when adopted again", other.stream_adopt(context.device_id, handle)?, adopted)?;
    expect_eq("its handle", other.stream_handle(adopted)?.raw, handle.raw())?;
    let ptr = other.mem_alloc(context.device_id, 4096)?;
    // Queued after a kernel of the first driver: both drivers use one stream.
    context.keep_busy(stream)?;
    other.fill(ptr, Pattern::U8(5), 4096, adopted)?;
    expect(!other.stream_query(adopted)?, "the adopted stream has unfinished work of the first driver")?;
    context.driver.stream_synchronize(stream)?;
    expect(other.stream_query(adopted)?, "the adopted stream has finished its work")?;
    let mut bytes = [0; 4096];
    other.download(context.device_id, ptr, &mut bytes)?;
    expect_slice_eq("the filled memory", &bytes, &[5; 4096])?;
    Ok(other.mem_free(ptr)?)
}

fn handle_of_adopted_stream_is_available_during_capture(context: &TestContext) -> CheckResult {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let other = second_driver(context)?;
        let stream = context.stream()?;
        let (want, handle) = (context.driver.stream_handle(stream)?, foreign_handle(context, stream)?);
        let mut during = None;
        context.driver.capture_begin(stream, mode)?;
        let adopted = other.stream_adopt(context.device_id, handle);
        if let Ok(adopted) = adopted {
            during = Some((other.stream_handle(adopted), other.stream_info(adopted).map_err(|error| error.code)));
        }
        let ended = context.driver.capture_end(stream);
        let adopted = adopted?;
        let expected = (Ok(want), Err(ErrorCode::StreamCaptureUnsupported));
        expect_eq(&format!("handle and info during a {mode:?} capture"), during, Some(expected))?;
        context.driver.graph_destroy(ended?)?;
        expect_eq("the info afterwards", other.stream_info(adopted)?, context.driver.stream_info(stream)?)?;
    }
    Ok(())
}

fn destroying_an_adopted_id_keeps_the_stream(context: &TestContext) -> CheckResult {
    let other = second_driver(context)?;
    let handle = foreign_handle(context, context.stream()?)?;
    let adopted = other.stream_adopt(context.device_id, handle)?;
    other.stream_destroy(adopted)?;
    let query = other.stream_query(adopted).map_err(|error| error.code);
    expect_eq("a query of the destroyed id", query, Err(ErrorCode::InvalidHandle))?;
    // The stream itself exists and can be adopted again under another id.
    let again = other.stream_adopt(context.device_id, handle)?;
    expect(again != adopted, "the second id is new")?;
    Ok(other.stream_synchronize(again)?)
}

fn primary_context_can_be_adopted(context: &TestContext) -> CheckResult {
    let other = second_driver(context)?;
    let primary = context.driver.context_retain(context.device_id)?;
    // SAFETY: it is the primary context, which the first driver retains until the process ends.
    unsafe { other.adopt_context(context.device_id, primary) }?;
    let ptr = other.mem_alloc(context.device_id, 512)?;
    other.upload(context.device_id, ptr, &[1, 2, 3])?;
    expect_slice_eq("memory allocated in the adopted context", &context.read_bytes(ptr, 3)?, &[1, 2, 3])?;
    other.mem_free(ptr)?;
    Ok(context.driver.context_release(context.device_id)?)
}
