//! The suite `processes`: what a driver promises about two processes on one device. It stands here and not beside the
//! other suites since its second process is this binary, started again: `peer.rs` says what that one does, `other.rs`
//! how the two talk.

mod other;
pub mod peer;

use std::process::{Command, Stdio};
use std::time::Duration;

use warpool_conformance::expect::{expect, expect_slice_eq, require};
use warpool_conformance::{CheckError, CheckResult, Level, Suite, TestContext, VmContext, checks};
use warpool_driver::{IpcEventHandle, SharedMemory};

use other::Other;
use peer::{READY, RECORDED, RUNNING, Task};

/// The suite.
pub const SUITE: Suite = Suite::new(
    "processes",
    Level::Driver,
    checks![
        another_process_waits_for_an_event,
        stream_of_another_process_waits_for_an_event,
        another_process_reads_and_writes_shared_memory,
    ],
);

/// How long the other process may take for everything. A driver needs a second or two to start.
const LIMIT: Duration = Duration::from_secs(30);

fn another_process_waits_for_an_event(context: &TestContext) -> CheckResult {
    event_in_another_process(context, |handle| Task::Event { handle })
}

fn stream_of_another_process_waits_for_an_event(context: &TestContext) -> CheckResult {
    event_in_another_process(context, |handle| Task::Stream { handle })
}

/// The other process opens the event before it marks anything, finds it busy while a kernel of this process runs, and
/// waits for it.
fn event_in_another_process(context: &TestContext, task: fn(IpcEventHandle) -> Task) -> CheckResult {
    need_two_processes(context)?;
    let (stream, event) = (context.stream()?, context.interprocess_event()?);
    let handle = context.driver.event_export(event)?;
    let mut other = start(context, &task(handle), Stdio::piped())?;
    other.expect(READY)?;
    context.keep_busy(stream)?;
    context.record(event, stream)?;
    other.tell(RECORDED);
    other.expect(RUNNING)?;
    other.finish()?;
    expect(context.driver.event_query(event)?, "the event to be done here once the other process has waited for it")
}

fn another_process_reads_and_writes_shared_memory(context: &TestContext) -> CheckResult {
    need_two_processes(context)?;
    let vm = VmContext::new(context)?;
    let (physical, shared) = vm.create_shared()?;
    let SharedMemory::PosixFd(memory) = shared else {
        return Err(CheckError::Failed("asked for a file descriptor, got something else".to_owned()));
    };
    let ptr = vm.map(vm.reserve(1)?, 0, physical, 1)?;
    vm.allow_access(ptr, 1)?;

    let (bytes, seed) = (vm.granule, context.random());
    context.driver.upload(context.device_id, ptr, &peer::contents_before(seed, bytes))?;
    // The other process is in no stream of this one.
    context.driver.device_synchronize(context.device_id)?;
    start(context, &Task::Memory { bytes, seed }, Stdio::from(memory))?.finish()?;
    let got = context.read_bytes(ptr, bytes as usize)?;
    expect_slice_eq("what the other process wrote", &got, &peer::contents_after(seed, bytes))
}

fn need_two_processes(context: &TestContext) -> CheckResult {
    require(context.driver.kind() != "sim", "no two processes share a simulated machine")
}

/// Starts this binary again, for `task`, on the same device of the same driver.
fn start(context: &TestContext, task: &Task, input: Stdio) -> CheckResult<Other> {
    let binary = std::env::current_exe().map_err(|error| {
        CheckError::Failed(format!("this binary cannot be started again: where it is, is unknown: {error}"))
    })?;
    let mut command = Command::new(binary);
    command.args(task.arguments(context.driver.kind(), context.device_id)).stdin(input);
    Other::start(command, LIMIT)
}
