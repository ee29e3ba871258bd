//! The suite `processes`: events and memory shared by two processes on one device. It is part of the command because
//! the second process is this binary: `peer.rs` is its code, and `child.rs` is how the first process talks to it.

mod child;
pub mod peer;

use std::process::{Command, Stdio};
use std::time::Duration;

use warpool_conformance::expect::{expect, expect_slice_eq, require};
use warpool_conformance::{CheckError, CheckResult, Level, Suite, TestContext, VmContext, checks};
use warpool_driver::platform::descriptor;
use warpool_driver::{IpcEventHandle, SharedMemory};

use child::ChildProcess;
use peer::{READY, RECORDED, RUNNING, Task};

pub const SUITE: Suite = Suite::new(
    "processes",
    Level::Driver,
    checks![
        another_process_waits_for_an_event,
        stream_of_another_process_waits_for_an_event,
        another_process_reads_and_writes_shared_memory,
    ],
);

/// Time limit for everything that the second process does. A driver needs a second or two to start.
const TIMEOUT: Duration = Duration::from_secs(30);

fn another_process_waits_for_an_event(context: &TestContext) -> CheckResult {
    event_in_another_process(context, |handle| Task::Event { handle })
}

fn stream_of_another_process_waits_for_an_event(context: &TestContext) -> CheckResult {
    event_in_another_process(context, |handle| Task::Stream { handle })
}

/// The second process imports the event before it is recorded, finds it incomplete while a kernel of this process runs,
/// and waits for it.
fn event_in_another_process(context: &TestContext, task: fn(IpcEventHandle) -> Task) -> CheckResult {
    require_two_processes(context)?;
    let (stream, event) = (context.stream()?, context.interprocess_event()?);
    let handle = context.driver.event_export(event)?;
    let mut child = start(context, &task(handle), Stdio::piped())?;
    child.expect_message(READY)?;
    context.keep_busy(stream)?;
    context.record(event, stream)?;
    child.send(RECORDED);
    child.expect_message(RUNNING)?;
    child.finish()?;
    expect(context.driver.event_query(event)?, "the event is complete once the second process has waited for it")
}

fn another_process_reads_and_writes_shared_memory(context: &TestContext) -> CheckResult {
    require_two_processes(context)?;
    let vm = VmContext::new(context)?;
    let (physical, shared) = vm.create_shared()?;
    let SharedMemory::PosixFd(memory) = shared else {
        return Err(CheckError::Failed("the exported memory is not a file descriptor".to_owned()));
    };
    let ptr = vm.map(vm.reserve(1)?, 0, physical, 1)?;
    vm.allow_access(ptr, 1)?;

    let (bytes, seed) = (vm.granule, context.random());
    context.driver.upload(context.device_id, ptr, &peer::contents_before(seed, bytes))?;
    // Streams do not order work of two processes.
    context.driver.device_synchronize(context.device_id)?;
    start(context, &Task::Memory { bytes, seed }, descriptor::into_stdio(memory))?.finish()?;
    let got = context.read_bytes(ptr, bytes as usize)?;
    expect_slice_eq("the memory written by the second process", &got, &peer::contents_after(seed, bytes))
}

fn require_two_processes(context: &TestContext) -> CheckResult {
    require(context.driver.kind() != "sim", "two processes cannot share a simulated GPU")
}

/// Starts this binary again, for `task`, on the same device of the same driver.
fn start(context: &TestContext, task: &Task, input: Stdio) -> CheckResult<ChildProcess> {
    let binary = std::env::current_exe()
        .map_err(|error| CheckError::Failed(format!("cannot find this binary to start it again: {error}")))?;
    let mut command = Command::new(binary);
    command.args(task.arguments(context.driver.kind(), context.device_id)).stdin(input);
    ChildProcess::start(command, TIMEOUT)
}
