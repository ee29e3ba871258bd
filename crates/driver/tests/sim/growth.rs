//! Costs that must not grow with what merely exists, by counting steps: streams that calls look at, nodes of vector
//! clocks, pools.

use crate::fixture::DEVICE;
use warpool_driver::sim::{SimConfig, SimDriver, steps_taken};
use warpool_driver::*;

/// The earlier work of the other streams.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Others {
    Idle,
    /// Each has had work, which the host has waited for.
    Used,
    /// The same, and nothing has been waited for.
    Unobserved,
}

/// Steps of each operation beside `count` streams.
fn steps_beside(count: usize, others: Others, non_blocking: bool) -> Result<Vec<(&'static str, u64)>> {
    let gpu = SimDriver::new(SimConfig::default());
    let options = StreamOptions { non_blocking, priority: 0 };
    let mut streams: Vec<StreamId> = (0..count).map(|_| gpu.stream_create(DEVICE, options)).collect::<Result<_>>()?;
    let memory = gpu.mem_alloc(DEVICE, 4096)?;
    let pinned = gpu.host_alloc(DEVICE, 4096, HostOptions::default())?;
    let event = gpu.event_create(DEVICE, EventOptions::default())?;
    if others != Others::Idle {
        for &stream in &streams {
            gpu.event_record(event, stream, EventScope::Plain)?;
        }
        gpu.event_synchronize(event)?;
    }
    let (first, last) = (streams[0], streams[count - 1]);
    let default = gpu.stream_default(DEVICE)?;
    let raw = gpu.stream_handle(last)?.raw;
    if others != Others::Unobserved {
        // The default stream is ordered after the work of the others, and the host waits for it.
        gpu.fill(memory, Pattern::U8(1), 4096, default)?;
        gpu.device_synchronize(DEVICE)?;
    }
    let mut counts = Vec::new();
    let mut count = |name, act: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        // The first two rounds are not counted: they also pay for what changed since the last such call.
        for round in 0..3 {
            let before = steps_taken();
            act()?;
            if round == 2 {
                counts.push((name, steps_taken() - before));
            }
        }
        Ok(())
    };
    count("mem_free", &mut || gpu.mem_free(gpu.mem_alloc(DEVICE, 4096)?))?;
    count("host_free", &mut || gpu.host_free(gpu.host_alloc(DEVICE, 4096, HostOptions::default())?))?;
    count("device_synchronize", &mut || gpu.device_synchronize(DEVICE))?;
    count("fill and synchronize, last stream", &mut || {
        gpu.fill(memory, Pattern::U8(1), 4096, last)?;
        gpu.stream_synchronize(last)
    })?;
    count("fill and synchronize, default stream", &mut || {
        gpu.fill(memory, Pattern::U8(1), 4096, default)?;
        gpu.stream_synchronize(default)
    })?;
    count("events between two streams", &mut || {
        gpu.event_record(event, last, EventScope::Plain)?;
        gpu.stream_wait_event(first, event, EventScope::Plain)?;
        gpu.event_synchronize(event)
    })?;
    count("host_write", &mut || gpu.host_write(pinned, &[1; 16]))?;
    // SAFETY: the stream lives as long as this driver.
    let foreign = unsafe { ForeignStream::new(raw) };
    count("stream_adopt", &mut || gpu.stream_adopt(DEVICE, foreign).map(drop))?;
    count("suballocated", &mut || {
        gpu.suballocated(memory, 512, last);
        gpu.suballocation_freed(memory, 512);
        Ok(())
    })?;
    count("stream_destroy", &mut || gpu.stream_destroy(streams.pop().expect("more than three")))?;
    assert!(gpu.hazards().is_empty(), "{:#?}", gpu.hazards());
    Ok(counts)
}

/// Issue 12: `mem_free` looked at every stream of the device, 0.21 ms beside 10,000 and 6.2 ms beside 100,000.
#[test]
fn no_call_looks_at_streams_that_have_nothing_new() -> Result<()> {
    for others in [Others::Idle, Others::Used, Others::Unobserved] {
        for non_blocking in [true, false] {
            let few = steps_beside(300, others, non_blocking)?;
            let many = steps_beside(3_000, others, non_blocking)?;
            for ((name, few), (_, many)) in few.into_iter().zip(many) {
                // A clock of ten times as many timelines has one level more.
                let what = format!("{name} beside {others:?} streams, non-blocking: {non_blocking}");
                assert!(many <= few * 2 + 20, "{what}: {few} steps, then {many}");
            }
        }
    }
    Ok(())
}
