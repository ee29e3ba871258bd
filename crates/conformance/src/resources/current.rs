//! What is current on a thread, and the guards that change it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::driver::Checked;
use crate::expect::{expect, expect_eq};

use super::{Bench, Check, checks};
use warpool::{MultiStreamGuard, Stream};

pub(super) const CHECKS: &[Check] = checks![
    a_thread_starts_with_the_first_device_and_default_streams,
    guards_restore_device_and_stream,
    guards_restore_after_a_panic,
    a_current_stream_is_its_devices_own_affair,
    threads_do_not_see_each_other,
    the_drivers_current_device_is_left_alone,
];

fn a_thread_starts_with_the_first_device_and_default_streams(bench: &Bench) -> Checked {
    expect_eq("the device", bench.instance.current_device().index(), 0)?;
    for device in bench.instance.devices() {
        expect_eq("the stream", device.current_stream()?, device.default_stream()?)?;
    }
    Ok(())
}

fn guards_restore_device_and_stream(bench: &Bench) -> Checked {
    let stream = bench.device.pool_stream()?;
    let before = (bench.instance.current_device(), bench.instance.current_stream()?);
    {
        let _outer = stream.enter();
        expect_eq("the stream within", bench.instance.current_stream()?, stream.clone())?;
        let other = bench.device.pool_stream()?;
        {
            let _inner = MultiStreamGuard::enter([&other]);
            expect_eq("the stream further within", bench.device.current_stream()?, other.clone())?;
        }
        expect_eq("the stream within, again", bench.instance.current_stream()?, stream.clone())?;
    }
    expect_eq(
        "device and stream afterwards",
        (bench.instance.current_device(), bench.instance.current_stream()?),
        before,
    )
}

fn guards_restore_after_a_panic(bench: &Bench) -> Checked {
    let stream = bench.device.pool_stream()?;
    let before = bench.device.current_stream()?;
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = stream.enter();
        panic!("on purpose");
    }));
    std::panic::set_hook(hook);
    expect(panicked.is_err(), "the panic to arrive")?;
    expect_eq("the stream afterwards", bench.device.current_stream()?, before)
}

fn a_current_stream_is_its_devices_own_affair(bench: &Bench) -> Checked {
    let other = bench.second_device()?;
    let (device, stream) = (bench.instance.current_device(), other.pool_stream()?);
    stream.make_current();
    expect_eq("the device", bench.instance.current_device(), device)?;
    expect_eq("the other device's stream", other.current_stream()?, stream)?;
    expect_eq("this device's stream", bench.device.current_stream()?, bench.device.default_stream()?)
}

fn threads_do_not_see_each_other(bench: &Bench) -> Checked {
    let stream = bench.device.pool_stream()?;
    let _guard = stream.enter();
    let elsewhere = std::thread::scope(|scope| {
        let work = scope.spawn(|| -> Checked<(Stream, bool)> {
            // A thread that never touched the driver can work at once.
            let own = bench.device.pool_stream()?;
            let found = bench.device.current_stream()?;
            own.make_current();
            own.synchronize()?;
            Ok((found, bench.device.current_stream()? == own))
        });
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    expect_eq("the other thread's stream", elsewhere, (bench.device.default_stream()?, true))?;
    expect_eq("this thread's stream", bench.device.current_stream()?, stream.clone())
}

fn the_drivers_current_device_is_left_alone(bench: &Bench) -> Checked {
    let before = bench.instance.driver().current_device()?;
    {
        let _guard = bench.device.pool_stream()?.enter();
        bench.instance.event().record(&bench.instance.current_stream()?)?;
    }
    expect_eq("the driver's device", bench.instance.driver().current_device()?, before)
}
