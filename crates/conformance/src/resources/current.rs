//! The current device and stream of a thread, and the guards that set them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use warpool::{MultiStreamGuard, Stream};

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    new_thread_starts_with_first_device_and_default_streams,
    guards_restore_device_and_stream,
    guards_restore_after_a_panic,
    current_stream_is_per_device,
    current_stream_is_per_thread,
    current_device_of_the_driver_does_not_change,
];

fn new_thread_starts_with_first_device_and_default_streams(context: &TestContext) -> CheckResult {
    expect_eq("the current device", context.instance().current_device().index(), 0)?;
    for device in context.instance().devices() {
        expect_eq("the current stream", device.current_stream()?, device.default_stream()?)?;
    }
    Ok(())
}

fn guards_restore_device_and_stream(context: &TestContext) -> CheckResult {
    let stream = context.device().pool_stream()?;
    let before = (context.instance().current_device(), context.instance().current_stream()?);
    {
        let _outer = stream.enter();
        expect_eq("the current stream inside the guard", context.instance().current_stream()?, stream.clone())?;
        let other = context.device().pool_stream()?;
        {
            let _inner = MultiStreamGuard::enter([&other]);
            expect_eq("the current stream inside the inner guard", context.device().current_stream()?, other.clone())?;
        }
        expect_eq("the current stream after the inner guard", context.instance().current_stream()?, stream.clone())?;
    }
    expect_eq(
        "the current device and stream afterwards",
        (context.instance().current_device(), context.instance().current_stream()?),
        before,
    )
}

fn guards_restore_after_a_panic(context: &TestContext) -> CheckResult {
    let stream = context.device().pool_stream()?;
    let before = context.device().current_stream()?;
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = stream.enter();
        panic!("on purpose");
    }));
    std::panic::set_hook(hook);
    expect(panicked.is_err(), "the panic was caught")?;
    expect_eq("the current stream afterwards", context.device().current_stream()?, before)
}

fn current_stream_is_per_device(context: &TestContext) -> CheckResult {
    let other = context.second_device()?;
    let (device, stream) = (context.instance().current_device(), other.pool_stream()?);
    stream.make_current();
    expect_eq("the current device", context.instance().current_device(), device)?;
    expect_eq("the current stream of the other device", other.current_stream()?, stream)?;
    expect_eq(
        "the current stream of this device",
        context.device().current_stream()?,
        context.device().default_stream()?,
    )
}

fn current_stream_is_per_thread(context: &TestContext) -> CheckResult {
    let stream = context.device().pool_stream()?;
    let _guard = stream.enter();
    let on_new_thread = std::thread::scope(|scope| {
        let work = scope.spawn(|| -> CheckResult<(Stream, bool)> {
            // A thread that has not used the driver before can work at once.
            let own = context.device().pool_stream()?;
            let found = context.device().current_stream()?;
            own.make_current();
            own.synchronize()?;
            Ok((found, context.device().current_stream()? == own))
        });
        join(work)
    })?;
    expect_eq(
        "the current stream of the other thread, and whether it could be set",
        on_new_thread,
        (context.device().default_stream()?, true),
    )?;
    expect_eq("the current stream of this thread", context.device().current_stream()?, stream.clone())
}

fn current_device_of_the_driver_does_not_change(context: &TestContext) -> CheckResult {
    let before = context.driver.current_device()?;
    {
        let _guard = context.device().pool_stream()?.enter();
        context.instance().event().record(&context.instance().current_stream()?)?;
    }
    expect_eq("the current device of the driver", context.driver.current_device()?, before)
}
