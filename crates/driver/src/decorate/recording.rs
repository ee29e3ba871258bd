//! A driver that logs every call. Two runs of one program on the same driver with the same seed give equal logs: values
//! that differ from run to run (addresses of this process, raw handles) are replaced by numbers, and bytes by their
//! count and a hash. Calls of several threads are in the order in which they ended.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::hash::Hasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHasher;

use super::hooked::{Arguments, Hook, Hooked, Outcome};
use super::log::{Log, LogEntry};
use super::value::Value;
use crate::{BlasMatrix, Call, DevicePtr, Driver, HostPtr, KernelArg, RawHandle, Result, Sgemm};

/// A driver that logs every call.
pub type Recording = Hooked<Recorder>;

impl Recording {
    /// Logs every call made to `inner` through the new driver.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Self::with_limit(inner, usize::MAX)
    }

    /// The same, but keeps only the last `entries` calls.
    #[must_use]
    pub fn with_limit(inner: Arc<dyn Driver>, entries: usize) -> Self {
        Self::with_hook(inner, Recorder { limit: entries, state: Mutex::default() })
    }

    /// The log so far; empty in a forked child.
    #[must_use]
    pub fn log(&self) -> Log {
        if self.is_inherited() {
            return Log::default();
        }
        let state = self.hook().lock();
        Log { dropped: state.dropped, entries: state.entries.iter().cloned().collect() }
    }

    /// Empties the log. The numbers of addresses and handles are kept.
    pub fn clear(&self) {
        if self.is_inherited() {
            return;
        }
        let mut state = self.hook().lock();
        state.entries.clear();
        state.dropped = 0;
    }
}

/// The hook of a [`Recording`] driver.
#[derive(Debug)]
pub struct Recorder {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<LogEntry>,
    dropped: u64,
    names: Names,
}

/// A call that has not returned.
#[derive(Debug)]
pub struct PendingCall {
    arguments: String,
    change: Change,
}

/// The effect of a call on the numbers of host memory.
#[derive(Clone, Copy, Debug)]
enum Change {
    Nothing,
    /// Numbers what the call returns.
    Pins {
        bytes: u64,
    },
    /// Has numbered an argument; undone if the call fails.
    Registers(HostPtr),
    /// Removes the number if the call succeeds.
    Unpins(HostPtr),
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, state: &mut State, entry: LogEntry) {
        state.entries.push_back(entry);
        if state.entries.len() > self.limit {
            state.entries.pop_front();
            state.dropped += 1;
        }
    }
}

impl Hook for Recorder {
    type CallState = PendingCall;

    fn before(&self, _: &dyn Driver, call: Call, arguments: Arguments<'_>) -> Result<PendingCall> {
        let names = &mut self.lock().names;
        let change = match (call, arguments) {
            (Call::HostAlloc, [_, (_, Value::Number(bytes)), ..]) => Change::Pins { bytes: *bytes },
            (Call::HostRegister, [_, (_, Value::HostRange(range)), ..]) if names.find(range.ptr()).is_none() => {
                names.pin(range.ptr(), range.bytes());
                Change::Registers(range.ptr())
            }
            (Call::HostFree | Call::HostUnregister, [(_, Value::Host(ptr))]) => Change::Unpins(*ptr),
            _ => Change::Nothing,
        };
        Ok(PendingCall { arguments: names.list(arguments), change })
    }

    fn after(&self, _: &dyn Driver, call: Call, pending: PendingCall, outcome: Outcome<'_>) {
        let state = &mut *self.lock();
        match (outcome, pending.change) {
            (Ok(Value::Host(ptr)), Change::Pins { bytes }) => state.names.pin(ptr, bytes),
            (Ok(_), Change::Unpins(ptr)) | (Err(_), Change::Registers(ptr)) => state.names.unpin(ptr),
            _ => {}
        }
        let outcome = match outcome {
            Ok(value) => state.names.text(value),
            Err(error) => format!("error {}", error.code),
        };
        self.push(state, LogEntry { call, arguments: pending.arguments, outcome });
    }

    fn suballocation(&self, call: Call, arguments: Arguments<'_>) {
        let state = &mut *self.lock();
        let arguments = state.names.list(arguments);
        self.push(state, LogEntry { call, arguments, outcome: "()".to_owned() });
    }

    // The log contains everything the program did, including reports that the driver ignores.
    fn tracks_suballocations(&self) -> bool {
        true
    }
}

/// The numbers of what differs from run to run, in the order of first use.
#[derive(Debug, Default)]
struct Names {
    /// Pinned host memory by address: its size and its number.
    pinned: BTreeMap<HostPtr, (u64, usize)>,
    last_pinned: usize,
    raw: BTreeMap<RawHandle, usize>,
}

impl Names {
    fn pin(&mut self, ptr: HostPtr, bytes: u64) {
        self.last_pinned += 1;
        self.pinned.insert(ptr, (bytes, self.last_pinned));
    }

    fn unpin(&mut self, ptr: HostPtr) {
        self.pinned.remove(&ptr);
    }

    fn list(&mut self, arguments: Arguments<'_>) -> String {
        let mut text = String::new();
        for (name, value) in arguments {
            let separator = if text.is_empty() { "" } else { ", " };
            let value = self.text(*value);
            // Writing to a string cannot fail.
            let _ = write!(text, "{separator}{name}: {value}");
        }
        text
    }

    fn text(&mut self, value: Value<'_>) -> String {
        match value {
            Value::Number(number) => number.to_string(),
            Value::Plain(value) => format!("{value:?}"),
            Value::Device(ptr) => self.device(ptr),
            Value::Arguments(args) => args.iter().map(|arg| self.argument(arg)).collect::<Vec<_>>().join(", "),
            Value::Product(product) => self.product(product),
            Value::Host(ptr) => self.host(ptr),
            Value::HostRange(range) => format!("{}, {} bytes", self.host(range.ptr()), range.bytes()),
            Value::Raw(raw) => self.raw(raw),
            Value::Stream(info) => {
                let kind = if info.non_blocking { "non-blocking" } else { "blocking" };
                format!("{}, priority {}, {kind}, {}", info.device, info.priority, self.raw(info.raw))
            }
            Value::StreamHandle(handle) => format!("{}, {}", handle.device, self.raw(handle.raw)),
            Value::Bytes(bytes) => format!("{} bytes #{:016x}", bytes.len(), hash(bytes)),
            Value::Buffer(bytes) => format!("buffer of {bytes} bytes"),
            Value::Opaque(kind) => kind.to_owned(),
        }
    }

    /// The pinned memory that contains `ptr`: its number, and the offset.
    fn find(&self, ptr: HostPtr) -> Option<(usize, u64)> {
        let (start, &(bytes, number)) = self.pinned.range(..=ptr).next_back()?;
        let offset = ptr.0 - start.0;
        (offset < bytes).then_some((number, offset))
    }

    fn device(&self, ptr: DevicePtr) -> String {
        // Pinned memory has the same address on the device.
        match self.find(HostPtr(ptr.0)) {
            Some(_) => self.host(HostPtr(ptr.0)),
            None => ptr.to_string(),
        }
    }

    fn argument(&self, arg: &KernelArg) -> String {
        match arg {
            KernelArg::Ptr(ptr) => format!("Ptr({})", self.device(*ptr)),
            other => format!("{other:?}"),
        }
    }

    fn product(&self, product: &Sgemm) -> String {
        let Sgemm { m, n, k, alpha, a, b, beta, c } = product;
        let matrix = |name: &str, matrix: &BlasMatrix| {
            let transposed = if matrix.transposed { ", transposed" } else { "" };
            format!("; {name}: {}, stride {}{transposed}", self.device(matrix.ptr), matrix.stride)
        };
        let matrices = [("a", a), ("b", b), ("c", c)].map(|(name, which)| matrix(name, which)).concat();
        format!("{m} by {n} by {k}, alpha {alpha:?}, beta {beta:?}{matrices}")
    }

    fn host(&self, ptr: HostPtr) -> String {
        match self.find(ptr) {
            Some((number, 0)) => format!("host {number}"),
            Some((number, offset)) => format!("host {number} + {offset}"),
            None => "host not pinned".to_owned(),
        }
    }

    fn raw(&mut self, raw: RawHandle) -> String {
        // Handles up to 2 are CUDA's constants for null and the default streams.
        if raw.0 <= 2 {
            return format!("raw constant {}", raw.0);
        }
        let next = self.raw.len() + 1;
        format!("raw {}", self.raw.entry(raw).or_insert(next))
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimConfig, SimDriver};
    use crate::{DeviceId, HostOptions, Pattern, StreamOptions};

    const DEVICE: DeviceId = DeviceId(0);

    fn recording(limit: usize) -> Recording {
        Recording::with_limit(Arc::new(SimDriver::new(SimConfig::default().with_seed(7))), limit)
    }

    /// Fills device memory with `byte` and reads it back through pinned memory.
    fn program(driver: &dyn Driver, byte: u8) {
        let stream = driver.stream_create(DEVICE, StreamOptions::default()).unwrap();
        let ptr = driver.mem_alloc(DEVICE, 64).unwrap();
        let pinned = driver.host_alloc(DEVICE, 64, HostOptions::default()).unwrap();
        driver.fill(ptr, Pattern::U8(byte), 64, stream).unwrap();
        driver.copy(pinned.into(), ptr.into(), 64, stream).unwrap();
        driver.stream_synchronize(stream).unwrap();
        driver.host_read(pinned.offset(16), &mut [0; 8]).unwrap();
        let mapped = driver.host_device_ptr(DEVICE, pinned).unwrap();
        driver.fill(mapped.offset(8), Pattern::U8(byte), 8, stream).unwrap();
        driver.mem_alloc(DEVICE, 0).unwrap_err();
        driver.host_free(pinned).unwrap();
        driver.mem_free(ptr).unwrap();
        driver.stream_destroy(stream).unwrap();
    }

    #[test]
    fn runs_of_one_program_give_equal_logs() {
        let (first, second) = (recording(usize::MAX), recording(usize::MAX));
        program(&first, 1);
        // So that the second run does not get the same memory.
        let _moved = vec![0_u8; 5000];
        program(&second, 1);
        assert_eq!(first.log().diff(&second.log()), None);
        assert!(first.log().to_string().contains("dst: host 1 + 8"), "{}", first.log());
        assert_eq!(first.log().entries.len(), 13);
    }

    #[test]
    fn diff_finds_the_first_different_call() {
        let (first, second) = (recording(usize::MAX), recording(usize::MAX));
        program(&first, 1);
        program(&second, 2);
        let difference = first.log().diff(&second.log()).unwrap();
        assert_eq!(difference.index, 3);
        assert!(difference.right.unwrap().arguments.contains("U8(2)"));
    }

    #[test]
    fn entries_show_numbers_of_host_memory_and_error_codes() {
        let driver = recording(usize::MAX);
        program(&driver, 1);
        let text: Vec<String> = driver.log().entries.iter().map(ToString::to_string).collect();
        assert!(text[2].ends_with(" = host 1"), "{}", text[2]);
        assert!(text[6].starts_with("host_read(ptr: host 1 + 16, into: buffer of 8 bytes) = 8 bytes #"), "{}", text[6]);
        let error = "error CUDA_ERROR_INVALID_VALUE (1): an argument is out of its range";
        assert_eq!(text[7], "host_device_ptr(device: device 0, ptr: host 1) = host 1");
        assert_eq!(text[9], format!("mem_alloc(device: device 0, bytes: 0) = {error}"));
        assert_eq!(text[10], "host_free(ptr: host 1) = ()");
    }

    #[test]
    fn limited_log_keeps_the_last_calls() {
        let driver = recording(3);
        program(&driver, 1);
        let log = driver.log();
        assert_eq!((log.dropped, log.entries.len()), (10, 3));
        assert_eq!(log.entries[2].call, Call::StreamDestroy);
        driver.clear();
        assert_eq!(driver.log(), Log::default());
    }

    #[test]
    fn numbers_of_host_memory_are_not_reused() {
        let mut names = Names::default();
        names.pin(HostPtr(0x1000), 16);
        names.pin(HostPtr(0x2000), 16);
        let see = |names: &Names, ptr| names.host(HostPtr(ptr));
        assert_eq!(see(&names, 0x2000), "host 2");
        assert_eq!(see(&names, 0x200f), "host 2 + 15");
        assert_eq!(see(&names, 0x2010), "host not pinned");
        names.unpin(HostPtr(0x2000));
        assert_eq!(see(&names, 0x2000), "host not pinned");
        names.pin(HostPtr(0x2000), 32);
        assert_eq!(see(&names, 0x2010), "host 3 + 16");
    }

    #[test]
    fn raw_handles_are_numbered_by_first_use() {
        let mut names = Names::default();
        let seen: Vec<String> = [0, 0x5555, 0x7777, 0x5555, 2].map(|raw| names.raw(RawHandle(raw))).to_vec();
        assert_eq!(seen, ["raw constant 0", "raw 1", "raw 2", "raw 1", "raw constant 2"]);
    }
}
