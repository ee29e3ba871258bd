//! Warpool's driver contract over the CUDA driver.
//!
//! [`CudaDriver`] implements the contract; [`libraries()`] reports which of NVIDIA's libraries this machine has. Both
//! load what they need at run time, so one build works on machines with and without CUDA, and with drivers from CUDA
//! 12.0 on. A missing library or function is an error that names it, never a panic.
//!
//! There is no policy here: no caching, no pools of streams, no retries. Ids are translated to handles, CUDA is called,
//! codes are returned. The backend stores only what the contract needs: the handle of each id, which memory is
//! allocated, mapped or pinned, which streams capture.
//!
//! All calls into CUDA and NVIDIA's libraries are in this crate, except those that `crates/inject` makes in the name of
//! a program. Other FFI of the workspace is the interface of external allocators (`crates/external`) and the shared
//! object for PyTorch (`crates/torch`).
//!
//! # What is safe
//!
//! A safe call of the contract cannot corrupt this process's memory, whatever its arguments. Ids are checked, and no
//! call uses an object that another thread has destroyed (`object_table.rs`). The ranges of copies, fills and products
//! are checked, also against memory of other libraries (`range_check.rs`). Pinned memory is unpinned after the work
//! that may use it, and read and written on the host without references to it (`host.rs`, `host_bytes.rs`). A module
//! stays loaded while graphs use its kernels (`kernel.rs`). Calls that use a graph while it is being captured exclude
//! each other (`capture.rs`).
//!
//! What cannot be checked is unsafe, and its documentation states what the caller promises:
//! - Launches of kernels and graphs, and kernel nodes' new arguments: a kernel accesses whatever its arguments point
//!   to, and a graph uses the addresses that it was captured with.
//! - `vm_free_range`: the addresses may become memory of this process while work still uses them.
//! - [`ForeignStream::new`](warpool_driver::ForeignStream::new), [`CudaDriver::adopt_context`] and
//!   [`HostRange::new`](warpool_driver::HostRange::new): streams, contexts and memory of others.
//!
//! Raw handles (`library_raw`, `graph_raw`, …) are numbers; using one is the unsafe code of its user. A device's memory
//! is not this process's: work that uses freed or unmapped device memory may fault on the device, or access other data.
//!
//! # Threads
//!
//! A call that uses an object holds a lock of that object alone. So a call that destroys an object waits until calls
//! that use it have returned, even a `stream_synchronize`, and calls that start meanwhile get `InvalidHandle`.
//! Executables and library handles can be used by one thread at a time: calls that use one wait for each other. Locks
//! that calls on different objects share are not held while waiting for the device, except `pinned` by a copy of pinned
//! memory whose stream's queue is full.
//!
//! The lock order, for calls that hold several locks: objects, where a stream comes before the executables and handles
//! that are bound to it (no call waits in the opposite order); `pinned_access`; `pinned`; a stream's work lock;
//! `graph_lock`; graphs and flags, for which no call waits elsewhere; a graph's `template`; `captures`; a device's
//! `caller_retains`; `stream_users`; the free slots of an object table; `capture_queries`;
//! `capture_errors`.

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("warpool-cuda needs a 64-bit little-endian target, as the CUDA driver does");

mod api;
mod callback;
mod capture;
mod capture_errors;
mod clock;
mod conditional;
mod context;
mod copy;
mod device;
mod device_ranges;
mod error;
mod event;
mod exec;
#[cfg(test)]
mod fake_cuda;
mod graph;
mod graph_family;
mod handle;
mod host;
mod host_bytes;
mod kernel;
mod libraries;
mod memory;
pub mod nvml;
mod object_table;
mod pool;
mod range_check;
mod range_map;
mod shared_library;
mod stream;
mod stream_users;
mod sync;
mod virtual_memory;

use std::fmt;
use std::sync::{Mutex, OnceLock, RwLock};
use std::time::Duration;

use warpool_driver::fork::Origin;
use warpool_driver::{Call, DevicePtr, Driver, ErrorCode, Suballocations};

use api::Api;
use capture::ActiveCaptures;
use capture_errors::CaptureErrors;
use device::Device;
use device_ranges::{DeviceRanges, Lookup};
use libraries::{LoadedLibraries, Nvrtc};
use object_table::ObjectTable;
use range_map::RangeMap;
use shared_library::{SharedLibrary, driver_candidates};
use stream_users::StreamUsers;

pub use exec::BareLaunch;
pub use libraries::{FoundLibrary, LibraryStatus, libraries};
pub use shared_library::{MissingLibrary, MissingSymbol};

/// The oldest supported driver.
const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 0 };

/// The CUDA version that a driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
}

impl DriverVersion {
    /// From CUDA's number: 13010 is 13.1.
    const fn from_number(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why the CUDA driver cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// On Windows the driver was never tried: there the library only compiles.
    #[error("CUDA is supported on Linux only")]
    Platform,
    /// There is no driver on this machine, or not in the loader's search path.
    #[error("no CUDA driver: {0}; install the NVIDIA driver, or add the directory of libcuda.so.1 to LD_LIBRARY_PATH")]
    Library(#[from] MissingLibrary),
    /// The driver lacks a function that every driver since CUDA 12.0 has.
    #[error("unusable CUDA driver: {0}")]
    Symbol(#[from] MissingSymbol),
    /// The driver is too old.
    #[error("the CUDA driver is too old: it supports CUDA {found}, {OLDEST} is needed; install a newer NVIDIA driver")]
    TooOld {
        /// The version that it supports.
        found: DriverVersion,
    },
    /// The driver is installed but cannot be initialized: no device, no permission, a mismatch with the kernel module.
    #[error("the CUDA driver cannot be initialized: {call}: {code}")]
    Start {
        /// The function that failed.
        call: &'static str,
        /// Its result.
        code: ErrorCode,
    },
}

/// The CUDA driver, as an implementation of the contract.
///
/// Opening it creates no context. The first call that needs a device's primary context creates it, and the driver
/// retains it until the process ends: dropping the driver makes no CUDA call, since the process may be exiting. Objects
/// that were created through the driver and not destroyed end with the context. So do events that a graph may record or
/// wait for at its launches, even if they were destroyed here.
pub struct CudaDriver {
    api: Api,
    version: DriverVersion,
    clock: clock::Clock,
    /// A forked child must not call CUDA, nor take a lock that another thread may have held at the fork.
    origin: Origin,
    /// Which calls were refused because of captures. Locked by failing calls only.
    capture_errors: CaptureErrors,
    devices: Box<[Device]>,

    streams: ObjectTable<stream::Stream>,
    events: ObjectTable<event::Event>,
    device_ranges: DeviceRanges,
    physical: ObjectTable<virtual_memory::Physical>,
    pools: ObjectTable<pool::Pool>,
    pinned: RwLock<RangeMap<host::Pinned>>,
    /// Held while the host reads (shared) or writes (exclusively) pinned memory, so that two threads do not race.
    pinned_access: RwLock<()>,
    graphs: ObjectTable<graph::Graph>,
    execs: ObjectTable<exec::Exec>,
    conditionals: ObjectTable<conditional::Conditional>,
    captures: ActiveCaptures,
    /// Held while a `CUgraph` is used: CUDA does not synchronize them, and one that is being captured may be ended by
    /// another thread.
    graph_lock: Mutex<()>,
    /// Held shared while CUDA is asked whether a stream captures, and exclusively while a capture begins or ends: the
    /// query crashes if another thread ends the capture meanwhile (seen on an H200, with driver 580).
    capture_queries: RwLock<()>,
    modules: ObjectTable<kernel::Module>,
    /// Modules that were unloaded by id, but which graphs may use.
    modules_pending_unload: Mutex<Vec<kernel::Module>>,
    functions: ObjectTable<kernel::Function>,
    nvrtc: OnceLock<Nvrtc>,
    handles: ObjectTable<libraries::LibraryHandle>,
    libraries: LoadedLibraries,
    stream_users: StreamUsers,
}

impl CudaDriver {
    /// Loads and initializes the CUDA driver.
    pub fn open() -> Result<Self, OpenError> {
        if !cfg!(unix) {
            return Err(OpenError::Platform);
        }
        let library = SharedLibrary::open("libcuda", &driver_candidates())?;
        let version = version_of(&library)?;
        if version < OLDEST {
            return Err(OpenError::TooOld { found: version });
        }
        Self::start(Api::resolve(&library)?, version)
    }

    /// Initializes a driver whose functions are resolved.
    fn start(api: Api, version: DriverVersion) -> Result<Self, OpenError> {
        // SAFETY: takes no pointers; may be called any number of times.
        check_start("cuInit", unsafe { (api.init)(0) })?;
        let devices = device::enumerate(&api)?;
        let streams = ObjectTable::new();
        let devices = devices.into_iter().map(|raw| Device::new(raw, &streams)).collect();
        Ok(Self {
            api,
            version,
            clock: clock::Clock::new(),
            origin: Origin::here(),
            capture_errors: CaptureErrors::default(),
            devices,
            streams,
            events: ObjectTable::new(),
            device_ranges: DeviceRanges::default(),
            physical: ObjectTable::new(),
            pools: ObjectTable::new(),
            pinned: RwLock::default(),
            pinned_access: RwLock::new(()),
            graphs: ObjectTable::new(),
            execs: ObjectTable::new(),
            conditionals: ObjectTable::new(),
            captures: ActiveCaptures::default(),
            graph_lock: Mutex::new(()),
            capture_queries: RwLock::new(()),
            modules: ObjectTable::new(),
            modules_pending_unload: Mutex::default(),
            functions: ObjectTable::new(),
            nvrtc: OnceLock::new(),
            handles: ObjectTable::new(),
            libraries: LoadedLibraries::default(),
            stream_users: StreamUsers::default(),
        })
    }

    /// The CUDA version that the driver supports.
    #[must_use]
    pub const fn version(&self) -> DriverVersion {
        self.version
    }
}

/// A library's CUDA version, queried before anything else.
fn version_of(library: &SharedLibrary) -> Result<DriverVersion, OpenError> {
    // SAFETY: `CUresult cuDriverGetVersion(int *)`, the same in every version.
    let get = unsafe { library.require::<unsafe extern "C" fn(*mut i32) -> u32>("cuDriverGetVersion") }?;
    let mut number = 0;
    // SAFETY: writes one int; needs no cuInit.
    check_start("cuDriverGetVersion", unsafe { get(&raw mut number) })?;
    Ok(DriverVersion::from_number(number))
}

/// Converts the result of a function that opening needs.
fn check_start(call: &'static str, number: u32) -> Result<(), OpenError> {
    match number {
        0 => Ok(()),
        number => Err(OpenError::Start { call, code: ErrorCode::from_number(number) }),
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("version", &self.version)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

impl Suballocations for CudaDriver {}

impl Driver for CudaDriver {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    fn entropy(&self) -> u64 {
        // The standard library's hash maps are seeded by the operating system.
        std::hash::BuildHasher::hash_one(
            &std::collections::hash_map::RandomState::new(),
            self.clock.elapsed().as_nanos(),
        )
    }

    fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        if !self.origin.is_here() {
            return false;
        }
        match self.device_ranges.find(ptr.0, bytes) {
            Lookup::Inside => true,
            Lookup::Overruns(_) => false,
            // CUDA forbids calls inside a host callback.
            Lookup::Unknown if callback::is_running() => false,
            Lookup::Unknown => {
                let site = self.site(Call::MemInfo);
                let context = self.devices.iter().find_map(Device::context);
                let current = context.and_then(|context| self.make_current(site, context).ok());
                current.is_some_and(|_current| self.is_cuda_memory(ptr, bytes))
            }
        }
    }
}

/// Compiles the example of the package's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct PackageReadme;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_works_or_reports_why_not() {
        match CudaDriver::open() {
            Ok(driver) => {
                assert_eq!(driver.kind(), "cuda");
                assert!(driver.version() >= OLDEST);
            }
            Err(OpenError::Library(missing)) => {
                assert_eq!(missing.tried, driver_candidates());
                let text = OpenError::Library(missing).to_string();
                assert!(text.contains("libcuda.so.1"), "{text}");
            }
            Err(other) => assert!(!other.to_string().is_empty()),
        }
    }

    #[test]
    fn the_driver_implements_the_contract() {
        fn takes(_: Option<&dyn Driver>) {}
        takes(None::<&CudaDriver>.map(|driver| driver as &dyn Driver));
    }

    #[test]
    fn versions_are_decoded_from_cudas_numbers() {
        assert_eq!(DriverVersion::from_number(12040).to_string(), "12.4");
        assert_eq!(DriverVersion::from_number(13000).to_string(), "13.0");
        assert!(DriverVersion::from_number(11080) < OLDEST && DriverVersion::from_number(12000) >= OLDEST);
    }
}
