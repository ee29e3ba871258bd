//! The suite `processes`: what a driver promises about two processes on one device. It stands here and not beside the
//! other suites since its second process is this binary, started again: `peer.rs` says what that one does, `other.rs`
//! how the two talk.

mod other;
pub mod peer;

use std::process::{Command, Stdio};
use std::time::Duration;

use warpool_conformance::driver::{Bench, Check, Checked, Granules, Stop, Suite};
use warpool_conformance::expect::{expect, expect_same, need};
use warpool_driver::{IpcEventHandle, SharedMemory};

use other::Other;
use peer::{READY, RECORDED, RUNNING, Task};

/// The suite.
pub const SUITE: Suite = Suite {
    name: "processes",
    checks: &[
        Check::new("another_process_waits_for_an_event", another_process_waits_for_an_event),
        Check::new("a_stream_of_another_process_waits_for_an_event", a_stream_of_another_process_waits_for_an_event),
        Check::new("another_process_reads_and_writes_shared_memory", another_process_reads_and_writes_shared_memory),
    ],
    destructive: false,
};

/// How long the other process may take for everything. A driver needs a second or two to start.
const LIMIT: Duration = Duration::from_secs(30);

fn another_process_waits_for_an_event(bench: &Bench<'_>) -> Checked {
    event_in_another_process(bench, |handle| Task::Event { handle })
}

fn a_stream_of_another_process_waits_for_an_event(bench: &Bench<'_>) -> Checked {
    event_in_another_process(bench, |handle| Task::Stream { handle })
}

/// The other process opens the event before it marks anything, finds it busy while a kernel of this process runs, and
/// waits for it.
fn event_in_another_process(bench: &Bench<'_>, task: fn(IpcEventHandle) -> Task) -> Checked {
    need_two_processes(bench)?;
    let (stream, event) = (bench.stream()?, bench.interprocess_event()?);
    let handle = bench.driver.event_export(event)?;
    let mut other = start(bench, &task(handle), Stdio::piped())?;
    other.expect(READY)?;
    bench.spin_long(stream)?;
    bench.record(event, stream)?;
    other.tell(RECORDED);
    other.expect(RUNNING)?;
    other.finish()?;
    expect(bench.driver.event_query(event)?, "the event to be done here once the other process has waited for it")
}

fn another_process_reads_and_writes_shared_memory(bench: &Bench<'_>) -> Checked {
    need_two_processes(bench)?;
    let granules = Granules::new(bench)?;
    let (physical, shared) = granules.shared()?;
    let SharedMemory::PosixFd(memory) = shared else {
        return Err(Stop::Failed("asked for a file descriptor, got something else".to_owned()));
    };
    let ptr = granules.map(granules.reserve(1)?, 0, physical, 1)?;
    granules.open(ptr, 1)?;

    let (bytes, seed) = (granules.bytes, bench.random());
    bench.driver.upload(bench.device, ptr, &peer::contents_before(seed, bytes))?;
    // The other process is in no stream of this one.
    bench.driver.device_synchronize(bench.device)?;
    start(bench, &Task::Memory { bytes, seed }, Stdio::from(memory))?.finish()?;
    let got = bench.bytes_at(ptr, bytes as usize)?;
    expect_same("what the other process wrote", &got, &peer::contents_after(seed, bytes))
}

fn need_two_processes(bench: &Bench<'_>) -> Checked {
    need(bench.driver.kind() != "sim", "no two processes share a simulated machine")
}

/// Starts this binary again, for `task`, on the same device of the same driver.
fn start(bench: &Bench<'_>, task: &Task, input: Stdio) -> Checked<Other> {
    let binary = std::env::current_exe().map_err(|error| {
        Stop::Failed(format!("this binary cannot be started again: where it is, is unknown: {error}"))
    })?;
    let mut command = Command::new(binary);
    command.args(task.arguments(bench.driver.kind(), bench.device)).stdin(input);
    Other::start(command, LIMIT)
}
