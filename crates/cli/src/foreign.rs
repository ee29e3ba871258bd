//! What comes from elsewhere: streams that another driver of this process made, adopted as a framework's would be.
//! It stands here because it needs a second driver, and only a real one has anything in common with the first.

use warpool_conformance::driver::{Bench, Check, Checked, Stop, Suite};
use warpool_conformance::expect::{expect, expect_eq, expect_same, skip};
use warpool_cuda::CudaDriver;
use warpool_driver::{CaptureMode, Copies, ErrorCode, ForeignStream, Memory, Pattern, Streams};

/// The suite.
pub const SUITE: Suite = Suite {
    name: "foreign",
    checks: &[
        Check::new("work_goes_into_an_adopted_stream", work_goes_into_an_adopted_stream),
        Check::new(
            "a_stream_adopted_while_it_captures_has_its_handle",
            a_stream_adopted_while_it_captures_has_its_handle,
        ),
        Check::new("an_adopted_stream_is_only_forgotten", an_adopted_stream_is_only_forgotten),
        Check::new("a_context_can_be_adopted", a_context_can_be_adopted),
    ],
    destructive: false,
};

/// Another driver over the same devices.
fn another(bench: &Bench<'_>) -> Checked<CudaDriver> {
    if bench.driver.kind() != "cuda" {
        return skip("no two simulated machines have anything in common");
    }
    CudaDriver::open().map_err(|error| Stop::Failed(error.to_string()))
}

/// A stream of the bench's driver, for the other to adopt.
fn foreign(bench: &Bench<'_>) -> Checked<ForeignStream> {
    let stream = bench.stream()?;
    // SAFETY: the bench destroys the stream after the check, and the check's own driver is gone by then.
    Ok(unsafe { ForeignStream::new(bench.driver.stream_handle(stream)?.raw) })
}

fn work_goes_into_an_adopted_stream(bench: &Bench<'_>) -> Checked {
    let other = another(bench)?;
    let stream = bench.stream()?;
    // SAFETY: as in `foreign`.
    let handle = unsafe { ForeignStream::new(bench.driver.stream_handle(stream)?.raw) };
    let adopted = other.stream_adopt(bench.device, handle)?;
    expect_eq("the id, adopted again", other.stream_adopt(bench.device, handle)?, adopted)?;
    expect_eq("its handle", other.stream_handle(adopted)?.raw, handle.raw())?;
    let ptr = other.mem_alloc(bench.device, 4096)?;
    // Behind a kernel that the first driver put there: one stream, one order.
    bench.spin_long(stream)?;
    other.fill(ptr, Pattern::U8(5), 4096, adopted)?;
    expect(!other.stream_query(adopted)?, "the adopted stream to be busy with what the other driver put there")?;
    bench.driver.stream_synchronize(stream)?;
    expect(other.stream_query(adopted)?, "the adopted stream to be done")?;
    let mut bytes = [0; 4096];
    other.download(bench.device, ptr, &mut bytes)?;
    expect_same("what was filled", &bytes, &[5; 4096])?;
    Ok(other.mem_free(ptr)?)
}

fn a_stream_adopted_while_it_captures_has_its_handle(bench: &Bench<'_>) -> Checked {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let other = another(bench)?;
        let stream = bench.stream()?;
        let want = bench.driver.stream_handle(stream)?;
        // SAFETY: as in `foreign`.
        let handle = unsafe { ForeignStream::new(want.raw) };
        let mut told = None;
        bench.driver.capture_begin(stream, mode)?;
        let adopted = other.stream_adopt(bench.device, handle);
        if let Ok(adopted) = adopted {
            told = Some((other.stream_handle(adopted), other.stream_info(adopted).map_err(|error| error.code)));
        }
        let ended = bench.driver.capture_end(stream);
        let adopted = adopted?;
        let expected = (Ok(want), Err(ErrorCode::StreamCaptureUnsupported));
        expect_eq(&format!("what it told in a {mode:?} capture"), told, Some(expected))?;
        bench.driver.graph_destroy(ended?)?;
        expect_eq("what it tells afterwards", other.stream_info(adopted)?, bench.driver.stream_info(stream)?)?;
    }
    Ok(())
}

fn an_adopted_stream_is_only_forgotten(bench: &Bench<'_>) -> Checked {
    let other = another(bench)?;
    let handle = foreign(bench)?;
    let adopted = other.stream_adopt(bench.device, handle)?;
    other.stream_destroy(adopted)?;
    let gone = other.stream_query(adopted).map_err(|error| error.code);
    expect_eq("the forgotten id", gone, Err(ErrorCode::InvalidHandle))?;
    // The stream itself lives on, and can be adopted again under another id.
    let again = other.stream_adopt(bench.device, handle)?;
    expect(again != adopted, "an id of its own")?;
    Ok(other.stream_synchronize(again)?)
}

fn a_context_can_be_adopted(bench: &Bench<'_>) -> Checked {
    let other = another(bench)?;
    let context = bench.driver.context_retain(bench.device)?;
    // SAFETY: it is the primary context, held by the bench's driver until the process ends.
    unsafe { other.adopt_context(bench.device, context) }?;
    let ptr = other.mem_alloc(bench.device, 512)?;
    other.upload(bench.device, ptr, &[1, 2, 3])?;
    expect_same("memory made in the adopted context", &bench.bytes_at(ptr, 3)?, &[1, 2, 3])?;
    other.mem_free(ptr)?;
    Ok(bench.driver.context_release(bench.device)?)
}
