//! The second process: `warpool __peer`, which only the suite `processes` starts. Its arguments name the task. It
//! exchanges messages of one line over standard input and output, and ends with [`DONE`] or [`FAILED`] and the reason.

use std::error::Error;
use std::io::{self, BufRead, Write};

use warpool_driver::platform::descriptor;
use warpool_driver::{
    Access, DeviceAccess, DeviceId, Driver, EventId, EventScope, IpcEventHandle, Pattern, SharedMemory, StreamOptions,
};

use crate::driver::{self, SimArgs};
use crate::output::{Result, Verdict};

/// The second process has imported the event, and has loaded everything that its next steps need.
pub const READY: &str = "ready";
/// The first process has recorded the event after a running kernel.
pub const RECORDED: &str = "recorded";
/// The second process has seen that the event is not complete.
pub const RUNNING: &str = "running";
/// Everything was as expected.
pub const DONE: &str = "done";
/// Something was not; the reason follows on the same line.
pub const FAILED: &str = "failed: ";

/// The name of the command, which is not in the help.
pub const NAME: &str = "__peer";

/// The second process of the suite `processes`
#[derive(Debug, clap::Args)]
pub struct Args {
    driver: String,
    device: u32,
    #[command(subcommand)]
    task: Task,
}

/// What the second process does.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Task {
    /// Finds that an event of the first process is not complete, and waits for it
    Event {
        #[arg(value_parser = from_hex)]
        handle: IpcEventHandle,
    },
    /// The same, with a stream that waits
    Stream {
        #[arg(value_parser = from_hex)]
        handle: IpcEventHandle,
    },
    /// Imports the memory that is its standard input, reads it and overwrites it
    Memory { bytes: u64, seed: u64 },
}

impl Task {
    /// The arguments that start the second process.
    pub fn arguments(&self, driver: &str, device: DeviceId) -> Vec<String> {
        let mut arguments = vec![NAME.to_owned(), driver.to_owned(), device.0.to_string()];
        arguments.extend(match self {
            Self::Event { handle } => vec!["event".to_owned(), to_hex(handle)],
            Self::Stream { handle } => vec!["stream".to_owned(), to_hex(handle)],
            Self::Memory { bytes, seed } => vec!["memory".to_owned(), bytes.to_string(), seed.to_string()],
        });
        arguments
    }
}

type PeerResult = std::result::Result<(), Box<dyn Error>>;

pub fn run(args: &Args) -> Result<Verdict> {
    let mut connection = Connection { input: &mut io::stdin().lock(), output: &mut io::stdout() };
    match perform(args, &mut connection) {
        Ok(()) => {
            connection.send(DONE)?;
            Ok(Verdict::Success)
        }
        Err(reason) => {
            connection.send(&format!("{FAILED}{reason}"))?;
            Ok(Verdict::Failure)
        }
    }
}

fn perform(args: &Args, connection: &mut Connection<'_>) -> PeerResult {
    let driver = &*driver::open(&args.driver, &SimArgs::default(), 0)?;
    let device = driver::device(driver, args.device)?;
    match &args.task {
        Task::Event { handle } => wait_on_host(driver, driver.event_import(device, handle)?, connection),
        Task::Stream { handle } => wait_on_stream(driver, device, driver.event_import(device, handle)?, connection),
        Task::Memory { bytes, seed } => {
            let shared = SharedMemory::PosixFd(descriptor::of_stdin()?);
            rewrite(driver, device, &shared, *bytes, *seed)
        }
    }
}

fn wait_on_host(driver: &dyn Driver, event: EventId, connection: &mut Connection<'_>) -> PeerResult {
    expect(driver.event_query(event)?, "the event is not recorded yet, but is not complete")?;
    connection.send(READY)?;
    connection.expect_message(RECORDED)?;
    expect(!driver.event_query(event)?, "the event is complete while the kernel before it runs")?;
    connection.send(RUNNING)?;
    driver.event_synchronize(event)?;
    expect(driver.event_query(event)?, "the event is not complete after the wait")?;
    Ok(driver.event_destroy(event)?)
}

fn wait_on_stream(
    driver: &dyn Driver,
    device: DeviceId,
    event: EventId,
    connection: &mut Connection<'_>,
) -> PeerResult {
    let stream = driver.stream_create(device, StreamOptions::default())?;
    let memory = driver.mem_alloc(device, 64)?;
    // Once in advance: CUDA loads the kernel of a fill at first use, which may wait for the device.
    driver.fill(memory, Pattern::U8(1), 64, stream)?;
    driver.stream_synchronize(stream)?;
    connection.send(READY)?;
    connection.expect_message(RECORDED)?;
    driver.stream_wait_event(stream, event, EventScope::Plain)?;
    driver.fill(memory, Pattern::U8(2), 64, stream)?;
    expect(!driver.stream_query(stream)?, "the stream does not wait for the first process")?;
    connection.send(RUNNING)?;
    driver.stream_synchronize(stream)?;
    expect(driver.event_query(event)?, "the stream continued before the event was complete")?;
    driver.mem_free(memory)?;
    driver.stream_destroy(stream)?;
    Ok(driver.event_destroy(event)?)
}

/// Maps the memory, expects [`contents_before`] and writes [`contents_after`].
fn rewrite(driver: &dyn Driver, device: DeviceId, shared: &SharedMemory, bytes: u64, seed: u64) -> PeerResult {
    let physical = driver.vm_import(device, shared, bytes)?;
    let ptr = driver.vm_reserve(bytes, 0, None)?;
    driver.vm_map(ptr, physical)?;
    driver.vm_set_access(ptr, bytes, &[DeviceAccess { device, access: Access::ReadWrite }])?;
    let mut found = vec![0; bytes as usize];
    driver.download(device, ptr, &mut found)?;
    expect(found == contents_before(seed, bytes), "the memory does not contain what the first process wrote")?;
    driver.upload(device, ptr, &contents_after(seed, bytes))?;
    // Streams do not order work of two processes.
    driver.device_synchronize(device)?;
    driver.vm_unmap(ptr, bytes)?;
    driver.vm_release(physical)?;
    // SAFETY: all work of the device has finished.
    Ok(unsafe { driver.vm_free_range(ptr, bytes) }?)
}

/// What the first process writes into shared memory. Both processes compute it from the seed.
pub fn contents_before(seed: u64, bytes: u64) -> Vec<u8> {
    let mut contents = vec![0; bytes as usize];
    fastrand::Rng::with_seed(seed).fill(&mut contents);
    contents
}

/// What the second process writes there: every byte differs.
pub fn contents_after(seed: u64, bytes: u64) -> Vec<u8> {
    contents_before(seed, bytes).into_iter().map(|byte| !byte).collect()
}

/// The messages to and from the first process.
struct Connection<'a> {
    input: &'a mut dyn BufRead,
    output: &'a mut dyn Write,
}

impl Connection<'_> {
    fn send(&mut self, message: &str) -> io::Result<()> {
        writeln!(self.output, "{message}")?;
        self.output.flush()
    }

    fn expect_message(&mut self, message: &str) -> PeerResult {
        let mut line = String::new();
        self.input.read_line(&mut line)?;
        let received = line.trim_end();
        if received == message { Ok(()) } else { Err(format!("expected '{message}', got '{received}'").into()) }
    }
}

fn expect(condition: bool, failure: &str) -> PeerResult {
    if condition { Ok(()) } else { Err(failure.into()) }
}

fn to_hex(handle: &IpcEventHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> std::result::Result<IpcEventHandle, String> {
    let invalid = || format!("'{text}' is not an event handle: expected 64 bytes as hexadecimal digits");
    if text.len() != 128 || !text.is_ascii() {
        return Err(invalid());
    }
    let mut handle = [0; 64];
    for (index, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| invalid())?;
    }
    Ok(IpcEventHandle(handle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{
        Copies as _, EventOptions, Events as _, HostKernel, KernelSource, Kernels as _, LaunchShape, PhysicalOptions,
        ShareKind, Streams as _, VirtualMemory as _,
    };

    const DEVICE: DeviceId = DeviceId(0);

    /// A kernel that takes one second of simulated time.
    const SLOW: KernelSource = KernelSource {
        name: "slow",
        cuda: "",
        host_kernels: &[HostKernel { name: "slow", run: |_| Ok(()), nanos: Some(|_, _| 1_000_000_000) }],
    };

    type Part = fn(&dyn Driver, EventId, &mut Connection<'_>) -> PeerResult;

    /// Runs the second process's part on an event that is recorded when it reads its input, optionally after a slow
    /// kernel.
    fn run_part(slow: bool, input: &str, part: Part) -> (std::result::Result<(), String>, String) {
        struct Input<'a>(&'a dyn Fn(), io::Cursor<&'a [u8]>);
        impl io::Read for Input<'_> {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.1.read(into)
            }
        }
        impl BufRead for Input<'_> {
            fn fill_buf(&mut self) -> io::Result<&[u8]> {
                (self.0)();
                self.1.fill_buf()
            }
            fn consume(&mut self, n: usize) {
                self.1.consume(n);
            }
        }

        let driver = SimDriver::new(SimConfig::default());
        let event = driver.event_create(DEVICE, EventOptions::default()).unwrap();
        let stream = driver.stream_create(DEVICE, StreamOptions::default()).unwrap();
        let kernel = driver.function_get(driver.module_load(DEVICE, &SLOW).unwrap(), "slow").unwrap();
        let record = || {
            if slow {
                driver.kernel_launch(kernel, LaunchShape::ONE, &[], stream).unwrap();
            }
            driver.event_record(event, stream, EventScope::Plain).unwrap();
        };
        let mut output = Vec::new();
        let mut input = Input(&record, io::Cursor::new(input.as_bytes()));
        let ended = part(&driver, event, &mut Connection { input: &mut input, output: &mut output });
        (ended.map_err(|error| error.to_string()), String::from_utf8(output).unwrap().replace('\n', " "))
    }

    #[test]
    fn host_and_stream_wait_for_an_event() {
        let parts: [Part; 2] =
            [wait_on_host, |driver, event, connection| wait_on_stream(driver, DEVICE, event, connection)];
        for part in parts {
            assert_eq!(run_part(true, "recorded\n", part), (Ok(()), "ready running ".to_owned()));
            let unreceived = Err("expected 'recorded', got ''".to_owned());
            assert_eq!(run_part(true, "", part), (unreceived, "ready ".to_owned()));
        }
    }

    #[test]
    fn event_that_completes_too_early_is_reported() {
        let (ended, sent) = run_part(false, "recorded\n", wait_on_host);
        assert!(ended.is_err_and(|reason| reason.contains("while the kernel before it runs")));
        assert_eq!(sent, "ready ");
    }

    #[test]
    fn shared_memory_is_read_and_written() {
        let driver = SimDriver::new(SimConfig::default());
        let bytes = 2 << 20;
        let options = PhysicalOptions { share: Some(ShareKind::PosixFd), rdma: false };
        let physical = driver.vm_create(DEVICE, bytes, options).unwrap();
        let ptr = driver.vm_reserve(bytes, 0, None).unwrap();
        driver.vm_map(ptr, physical).unwrap();
        let access = [DeviceAccess { device: DEVICE, access: Access::ReadWrite }];
        driver.vm_set_access(ptr, bytes, &access).unwrap();
        driver.upload(DEVICE, ptr, &contents_before(7, bytes)).unwrap();

        let shared = driver.vm_export(physical, ShareKind::PosixFd).unwrap();
        let before = driver.object_counts();
        rewrite(&driver, DEVICE, &shared, bytes, 7).unwrap();
        assert_eq!(driver.object_counts(), before, "nothing is leaked");
        let mut found = vec![0; bytes as usize];
        driver.download(DEVICE, ptr, &mut found).unwrap();
        assert!(found == contents_after(7, bytes));

        let reason = rewrite(&driver, DEVICE, &shared, bytes, 7).unwrap_err().to_string();
        assert!(reason.contains("does not contain"), "{reason}");
    }

    #[test]
    fn arguments_parse_to_their_task() {
        use clap::Parser as _;
        let handle = IpcEventHandle(std::array::from_fn(|at| 250_u8.wrapping_add(at as u8)));
        for task in [Task::Event { handle }, Task::Stream { handle }, Task::Memory { bytes: 2 << 20, seed: u64::MAX }] {
            let arguments = task.arguments("cuda", DeviceId(3));
            let line = std::iter::once("warpool".to_owned()).chain(arguments);
            let parsed = crate::Cli::try_parse_from(line).unwrap().command;
            let crate::Command::Peer(Args { driver, device, task: read }) = parsed else { panic!("{parsed:?}") };
            assert_eq!((driver.as_str(), device, read), ("cuda", 3, task));
        }
        assert!(from_hex("00").is_err() && from_hex(&"x".repeat(128)).is_err() && from_hex(&"é".repeat(64)).is_err());
    }
}
