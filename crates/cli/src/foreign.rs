//! What comes from elsewhere: streams that another driver of this process made, adopted as a framework's would be.
//! It stands here because it needs a second driver, and only a real one has anything in common with the first.

use warpool_conformance::expect::{expect, expect_eq, expect_slice_eq, skip};
use warpool_conformance::{CheckError, CheckResult, Level, Suite, TestContext, checks};
use warpool_cuda::CudaDriver;
use warpool_driver::{CaptureMode, Copies, ErrorCode, ForeignStream, Memory, Pattern, Streams};

/// The suite.
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

/// Another driver over the same devices.
fn another(context: &TestContext) -> CheckResult<CudaDriver> {
    if context.driver.kind() != "cuda" {
        return skip("no two simulated machines have anything in common");
    }
    CudaDriver::open().map_err(|error| CheckError::Failed(error.to_string()))
}

/// A stream of the context's driver, for the other to adopt.
fn foreign(context: &TestContext) -> CheckResult<ForeignStream> {
    let stream = context.stream()?;
    // SAFETY: the context destroys the stream after the check, and the check's own driver is gone by then.
    Ok(unsafe { ForeignStream::new(context.driver.stream_handle(stream)?.raw) })
}

fn adopted_stream_shares_the_order_of_work(context: &TestContext) -> CheckResult {
    let other = another(context)?;
    let stream = context.stream()?;
    // SAFETY: as in `foreign`.
    let handle = unsafe { ForeignStream::new(context.driver.stream_handle(stream)?.raw) };
    let adopted = other.stream_adopt(context.device_id, handle)?;
    expect_eq("the id, adopted again", other.stream_adopt(context.device_id, handle)?, adopted)?;
    expect_eq("its handle", other.stream_handle(adopted)?.raw, handle.raw())?;
    let ptr = other.mem_alloc(context.device_id, 4096)?;
    // Behind a kernel that the first driver put there: one stream, one order.
    context.keep_busy(stream)?;
    other.fill(ptr, Pattern::U8(5), 4096, adopted)?;
    expect(!other.stream_query(adopted)?, "the adopted stream to be busy with what the other driver put there")?;
    context.driver.stream_synchronize(stream)?;
    expect(other.stream_query(adopted)?, "the adopted stream to be done")?;
    let mut bytes = [0; 4096];
    other.download(context.device_id, ptr, &mut bytes)?;
    expect_slice_eq("what was filled", &bytes, &[5; 4096])?;
    Ok(other.mem_free(ptr)?)
}

fn handle_of_adopted_stream_is_available_during_capture(context: &TestContext) -> CheckResult {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let other = another(context)?;
        let stream = context.stream()?;
        let want = context.driver.stream_handle(stream)?;
        // SAFETY: as in `foreign`.
        let handle = unsafe { ForeignStream::new(want.raw) };
        let mut told = None;
        context.driver.capture_begin(stream, mode)?;
        let adopted = other.stream_adopt(context.device_id, handle);
        if let Ok(adopted) = adopted {
            told = Some((other.stream_handle(adopted), other.stream_info(adopted).map_err(|error| error.code)));
        }
        let ended = context.driver.capture_end(stream);
        let adopted = adopted?;
        let expected = (Ok(want), Err(ErrorCode::StreamCaptureUnsupported));
        expect_eq(&format!("what it told in a {mode:?} capture"), told, Some(expected))?;
        context.driver.graph_destroy(ended?)?;
        expect_eq("what it tells afterwards", other.stream_info(adopted)?, context.driver.stream_info(stream)?)?;
    }
    Ok(())
}

fn destroying_an_adopted_id_keeps_the_stream(context: &TestContext) -> CheckResult {
    let other = another(context)?;
    let handle = foreign(context)?;
    let adopted = other.stream_adopt(context.device_id, handle)?;
    other.stream_destroy(adopted)?;
    let gone = other.stream_query(adopted).map_err(|error| error.code);
    expect_eq("the forgotten id", gone, Err(ErrorCode::InvalidHandle))?;
    // The stream itself lives on, and can be adopted again under another id.
    let again = other.stream_adopt(context.device_id, handle)?;
    expect(again != adopted, "an id of its own")?;
    Ok(other.stream_synchronize(again)?)
}

fn primary_context_can_be_adopted(context: &TestContext) -> CheckResult {
    let other = another(context)?;
    let primary = context.driver.context_retain(context.device_id)?;
    // SAFETY: it is the primary context, held by the context's driver until the process ends.
    unsafe { other.adopt_context(context.device_id, primary) }?;
    let ptr = other.mem_alloc(context.device_id, 512)?;
    other.upload(context.device_id, ptr, &[1, 2, 3])?;
    expect_slice_eq("memory made in the adopted context", &context.read_bytes(ptr, 3)?, &[1, 2, 3])?;
    other.mem_free(ptr)?;
    Ok(context.driver.context_release(context.device_id)?)
}
