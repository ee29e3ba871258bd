//! The other process: `warpool __peer`, which only the suite `processes` starts. Its arguments say what to do; over
//! standard input and output it says and hears one word per line, and at last says [`DONE`], or [`FAILED`] and why.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::os::fd::AsFd as _;

use warpool_driver::{
    Access, DeviceAccess, DeviceId, Driver, EventId, EventScope, IpcEventHandle, Pattern, SharedMemory, StreamOptions,
};

use crate::driver::{self, SimArgs};
use crate::output::{Result, Verdict};

/// The other process has opened the event, and its next steps need nothing that it has yet to load.
pub const READY: &str = "ready";
/// The first process has a kernel running and the event behind it.
pub const RECORDED: &str = "recorded";
/// The other process saw that the work is not done yet.
pub const RUNNING: &str = "running";
/// All was as it should be.
pub const DONE: &str = "done";
/// It was not; the reason follows on the same line.
pub const FAILED: &str = "failed: ";

/// What the command is called. It is in no help.
pub const NAME: &str = "__peer";

/// The other process of the suite `processes`
#[derive(Debug, clap::Args)]
pub struct Args {
    driver: String,
    device: u32,
    #[command(subcommand)]
    task: Task,
}

/// What the other process is there for.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Task {
    /// Finds an event of the first process busy, and waits for it
    Event {
        #[arg(value_parser = from_hex)]
        handle: IpcEventHandle,
    },
    /// The same with a stream that waits
    Stream {
        #[arg(value_parser = from_hex)]
        handle: IpcEventHandle,
    },
    /// Takes in the memory that is its standard input, reads what is there, and writes something else
    Memory { bytes: u64, seed: u64 },
}

impl Task {
    /// The arguments that lead here.
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

type Told = std::result::Result<(), Box<dyn Error>>;

pub fn run(args: &Args) -> Result<Verdict> {
    let mut talk = Talk { input: &mut io::stdin().lock(), output: &mut io::stdout() };
    match perform(args, &mut talk) {
        Ok(()) => {
            talk.say(DONE)?;
            Ok(Verdict::Success)
        }
        Err(reason) => {
            talk.say(&format!("{FAILED}{reason}"))?;
            Ok(Verdict::Failure)
        }
    }
}

fn perform(args: &Args, talk: &mut Talk<'_>) -> Told {
    let driver = &*driver::open(&args.driver, &SimArgs::default(), 0)?;
    let device = driver::device(driver, args.device)?;
    match &args.task {
        Task::Event { handle } => await_event(driver, driver.event_import(device, handle)?, talk),
        Task::Stream { handle } => await_event_in_stream(driver, device, driver.event_import(device, handle)?, talk),
        Task::Memory { bytes, seed } => {
            let shared = SharedMemory::PosixFd(io::stdin().as_fd().try_clone_to_owned()?);
            rewrite(driver, device, &shared, *bytes, *seed)
        }
    }
}

fn await_event(driver: &dyn Driver, event: EventId, talk: &mut Talk<'_>) -> Told {
    expect(driver.event_query(event)?, "the event marks nothing yet, but is not done")?;
    talk.say(READY)?;
    talk.hear(RECORDED)?;
    expect(!driver.event_query(event)?, "the event is done, but the kernel before it cannot be")?;
    talk.say(RUNNING)?;
    driver.event_synchronize(event)?;
    expect(driver.event_query(event)?, "the event was waited for, but is not done")?;
    Ok(driver.event_destroy(event)?)
}

fn await_event_in_stream(driver: &dyn Driver, device: DeviceId, event: EventId, talk: &mut Talk<'_>) -> Told {
    let stream = driver.stream_create(device, StreamOptions::default())?;
    let memory = driver.mem_alloc(device, 64)?;
    // Once in advance: what a fill runs is loaded when it is first needed, and that may wait for the device.
    driver.fill(memory, Pattern::U8(1), 64, stream)?;
    driver.stream_synchronize(stream)?;
    talk.say(READY)?;
    talk.hear(RECORDED)?;
    driver.stream_wait_event(stream, event, EventScope::Plain)?;
    driver.fill(memory, Pattern::U8(2), 64, stream)?;
    expect(!driver.stream_query(stream)?, "the stream is done, but it should wait for the other process")?;
    talk.say(RUNNING)?;
    driver.stream_synchronize(stream)?;
    expect(driver.event_query(event)?, "the stream went on before the event was done")?;
    driver.mem_free(memory)?;
    driver.stream_destroy(stream)?;
    Ok(driver.event_destroy(event)?)
}

/// Maps the memory, expects [`contents_before`] in it, and leaves [`contents_after`].
fn rewrite(driver: &dyn Driver, device: DeviceId, shared: &SharedMemory, bytes: u64, seed: u64) -> Told {
    let physical = driver.vm_import(device, shared, bytes)?;
    let ptr = driver.vm_reserve(bytes, 0, None)?;
    driver.vm_map(ptr, physical)?;
    driver.vm_set_access(ptr, bytes, &[DeviceAccess { device, access: Access::ReadWrite }])?;
    let mut found = vec![0; bytes as usize];
    driver.download(device, ptr, &mut found)?;
    expect(found == contents_before(seed, bytes), "the memory does not hold what the first process wrote")?;
    driver.upload(device, ptr, &contents_after(seed, bytes))?;
    // The first process is in no stream of this one.
    driver.device_synchronize(device)?;
    driver.vm_unmap(ptr, bytes)?;
    driver.vm_release(physical)?;
    // SAFETY: all work of the device has finished.
    Ok(unsafe { driver.vm_free_range(ptr, bytes) }?)
}

/// What the first process puts into shared memory.
pub fn contents_before(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}

/// What the other process leaves there: every byte is another.
pub fn contents_after(seed: u64, bytes: u64) -> Vec<u8> {
    contents_before(seed, bytes).into_iter().map(|byte| !byte).collect()
}

/// The other process's end of the talk.
struct Talk<'a> {
    input: &'a mut dyn BufRead,
    output: &'a mut dyn Write,
}

impl Talk<'_> {
    fn say(&mut self, word: &str) -> io::Result<()> {
        writeln!(self.output, "{word}")?;
        self.output.flush()
    }

    fn hear(&mut self, word: &str) -> Told {
        let mut line = String::new();
        self.input.read_line(&mut line)?;
        let heard = line.trim_end();
        if heard == word { Ok(()) } else { Err(format!("should have heard '{word}', but heard '{heard}'").into()) }
    }
}

fn expect(holds: bool, otherwise: &str) -> Told {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

fn to_hex(handle: &IpcEventHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> std::result::Result<IpcEventHandle, String> {
    let refusal = || format!("'{text}' is no event handle: write 64 bytes as hexadecimal digits");
    if text.len() != 128 || !text.is_ascii() {
        return Err(refusal());
    }
    let mut handle = [0; 64];
    for (at, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| refusal())?;
    }
    Ok(IpcEventHandle(handle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{
        Copies as _, EventOptions, Events as _, KernelMirror, KernelSource, Kernels as _, LaunchShape, PhysicalOptions,
        ShareKind, Streams as _, VirtualMemory as _,
    };

    const DEVICE: DeviceId = DeviceId(0);

    /// A kernel of a second of the simulated clock.
    const SLOW: KernelSource = KernelSource {
        name: "slow",
        cuda: "",
        mirrors: &[KernelMirror { name: "slow", run: |_| Ok(()), nanos: Some(|_, _| 1_000_000_000) }],
    };

    type Part = fn(&dyn Driver, EventId, &mut Talk<'_>) -> Told;

    /// Lets the other process do its part on an event of this one: with a kernel before the mark when it hears of it,
    /// or without.
    fn talk(slow: bool, input: &str, part: Part) -> (std::result::Result<(), String>, String) {
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
        let ended = part(&driver, event, &mut Talk { input: &mut input, output: &mut output });
        (ended.map_err(|error| error.to_string()), String::from_utf8(output).unwrap().replace('\n', " "))
    }

    #[test]
    fn an_event_is_waited_for_by_host_and_by_stream() {
        let parts: [Part; 2] = [await_event, |driver, event, talk| await_event_in_stream(driver, DEVICE, event, talk)];
        for part in parts {
            assert_eq!(talk(true, "recorded\n", part), (Ok(()), "ready running ".to_owned()));
            let unheard = Err("should have heard 'recorded', but heard ''".to_owned());
            assert_eq!(talk(true, "", part), (unheard, "ready ".to_owned()));
        }
    }

    #[test]
    fn an_event_that_is_done_too_early_is_told() {
        let (ended, said) = talk(false, "recorded\n", await_event);
        assert!(ended.is_err_and(|reason| reason.contains("the kernel before it cannot be")));
        assert_eq!(said, "ready ");
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
        assert_eq!(driver.object_counts(), before, "nothing is left behind");
        let mut found = vec![0; bytes as usize];
        driver.download(DEVICE, ptr, &mut found).unwrap();
        assert!(found == contents_after(7, bytes));

        let reason = rewrite(&driver, DEVICE, &shared, bytes, 7).unwrap_err().to_string();
        assert!(reason.contains("does not hold"), "{reason}");
    }

    #[test]
    fn arguments_lead_back_to_their_task() {
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
