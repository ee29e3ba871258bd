//! Warpool's driver contract over the CUDA driver.
//!
//! [`CudaDriver`] is the contract; [`libraries()`] says which of NVIDIA's libraries this machine has. Both load what
//! they need at run time, so one build serves machines with and without CUDA, and drivers from CUDA 12.0 on. What is
//! missing is an error that names it, never a panic.
//!
//! No policy lives here: no caching, no pools of streams, no retries. Ids go in, handles go to CUDA, codes come back.
//! The only memory of its own that the backend keeps is what the contract needs: which handle an id stands for, which
//! device an address belongs to, which host memory is pinned.
//!
//! All FFI of the workspace is in this crate.
//!
//! # Threads
//!
//! Whoever uses an object holds its row in a table, each with a lock of its own. So whoever takes an object away waits
//! until calls that use it have returned, even a `stream_synchronize`, and calls that come meanwhile get
//! `InvalidHandle`. Executables and handles of libraries can be used by one thread at a time: calls that use one wait
//! for each other. Locks that unrelated calls share are not held while waiting for the device.
//!
//! The order of locks, where more than one is held: rows, a stream's before those of executables and handles that know
//! it (the other way round nobody waits); `graph_gate`; graphs' and flags' rows, for which nobody waits elsewhere; a
//! graph's `template`; `origins`; `pinned_bytes`; `pinned`; a device's holds; `holders`; the places of a table;
//! `blame`.
//!
//! # What is left to callers
//!
//! The contract is safe to call, and ids, ranges and arguments are checked so that it stays so. Some things CUDA does
//! not let anybody check:
//! - What comes from outside must stay alive while it is used here: adopted streams and contexts, and every primary
//!   context, which a `cuDevicePrimaryCtxReset` by others would destroy.
//! - Kernels go where they like, and so do the products of cuBLAS: the addresses of matrices and workspaces are not
//!   checked. Where devices reach ordinary host memory (HMM, Grace), a wrong address in a kernel, a product, a copy or
//!   a fill reaches it as well.
//! - Whoever uses a library's handle by `library_raw` uses it when nobody else does, and leaves it as it was: alive, on
//!   its stream, with scalars in host memory.
//! - A graph does not keep the modules of its kernels. They must stay loaded while it is instantiated, changed and
//!   launched.
//! - CUDA does not synchronise graphs. While one thread asks about a capture or adds a conditional node to it, no other
//!   may put work into it; and a body that is captured on a thread's own default stream must end before the capture
//!   around it.

#[cfg(not(all(unix, target_pointer_width = "64", target_endian = "little")))]
compile_error!("warpool-cuda is for 64-bit little-endian Unix: what the CUDA driver itself runs on");

mod api;
mod blame;
mod blas;
mod callback;
mod capture;
mod conditional;
mod context;
mod copy;
mod device;
mod error;
mod event;
mod exec;
#[cfg(test)]
mod fake;
mod graph;
mod handles;
mod holders;
mod host;
mod kernel;
mod libraries;
mod library;
mod memory;
mod nvrtc;
mod pool;
mod ranges;
mod status;
mod stream;
mod table;
mod vendor;
mod virtual_memory;

use std::fmt;
use std::sync::{Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use warpool_driver::{Driver, ErrorCode, Suballocations};

use api::Api;
use blame::Blame;
use capture::Origins;
use context::Device;
use holders::Holders;
use library::{Loaded, driver_candidates};
use nvrtc::Nvrtc;
use ranges::Ranges;
use table::Table;
use vendor::Vendors;

pub use exec::BareLaunch;
pub use libraries::{FoundLibrary, LibraryStatus, libraries};
pub use library::{MissingLibrary, MissingSymbol};

/// The oldest driver that is served.
const OLDEST: DriverVersion = DriverVersion { major: 12, minor: 0 };

/// The version of CUDA that a driver speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion {
    /// Before the point.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

impl DriverVersion {
    /// From the number that CUDA gives: 13010 is 13.1.
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
    /// There is no driver on this machine, or not where the loader looks.
    #[error("no CUDA driver: {0}; install the NVIDIA driver, or put the folder of libcuda.so.1 into LD_LIBRARY_PATH")]
    Library(#[from] MissingLibrary),
    /// The driver lacks a function that every driver since CUDA 12.0 has.
    #[error("unusable CUDA driver: {0}")]
    Symbol(#[from] MissingSymbol),
    /// The driver is too old.
    #[error("the CUDA driver is too old: it speaks CUDA {found}, {OLDEST} is needed; install a newer NVIDIA driver")]
    TooOld {
        /// What it speaks.
        found: DriverVersion,
    },
    /// The driver is there but does not start: no device, no permission, a mismatch with the kernel module.
    #[error("the CUDA driver does not start: {call}: {code}")]
    Start {
        /// The function that failed.
        call: &'static str,
        /// Why.
        code: ErrorCode,
    },
}

/// The CUDA driver, behind the contract.
///
/// Opening it creates no context. The first call that needs a device's primary context makes it, and the driver holds
/// it until the process ends: dropping the driver calls nothing, since it may happen while the process exits. Objects
/// that were made through the driver and not taken away go with the context. So do events that a graph may record or
/// wait for at its launches, even if they were destroyed here.
pub struct CudaDriver {
    api: Api,
    version: DriverVersion,
    opened: Instant,
    /// Which calls captures forbade. Locked by failures only.
    blame: Blame,
    devices: Box<[Device]>,

    streams: Table<stream::Stream>,
    events: Table<event::Event>,
    allocations: Ranges<memory::Allocation>,
    physical: Table<virtual_memory::Physical>,
    pools: Table<pool::Pool>,
    pinned: Ranges<host::Pinned>,
    /// Held while the host reads (shared) or writes (alone) pinned memory, so that two threads cannot race on its
    /// bytes.
    pinned_bytes: RwLock<()>,
    graphs: Table<graph::Graph>,
    execs: Table<exec::Exec>,
    conditionals: Table<conditional::Conditional>,
    origins: Mutex<Origins>,
    /// Held while a `CUgraph` is used: CUDA does not synchronise them, and one that is being captured may end under our
    /// hands.
    graph_gate: Mutex<()>,
    modules: Table<kernel::Module>,
    functions: Table<kernel::Function>,
    nvrtc: OnceLock<Nvrtc>,
    handles: Table<handles::LibraryHandle>,
    vendors: Vendors,
    /// Who knows which stream beyond a call.
    holders: Holders,
}

impl CudaDriver {
    /// Loads and starts the CUDA driver.
    pub fn open() -> Result<Self, OpenError> {
        let library = Loaded::open("libcuda", &driver_candidates())?;
        let version = version_of(&library)?;
        if version < OLDEST {
            return Err(OpenError::TooOld { found: version });
        }
        Self::start(Api::resolve(&library)?, version)
    }

    /// Starts a driver whose functions are found.
    fn start(api: Api, version: DriverVersion) -> Result<Self, OpenError> {
        // SAFETY: takes no pointers; may be called any number of times.
        start("cuInit", unsafe { (api.init)(0) })?;
        let devices = device::enumerate(&api)?;
        let streams = Table::new();
        let devices = devices.into_iter().map(|raw| Device::new(raw, &streams)).collect();
        Ok(Self {
            api,
            version,
            opened: Instant::now(),
            blame: Blame::default(),
            devices,
            streams,
            events: Table::new(),
            allocations: Ranges::new(),
            physical: Table::new(),
            pools: Table::new(),
            pinned: Ranges::new(),
            pinned_bytes: RwLock::new(()),
            graphs: Table::new(),
            execs: Table::new(),
            conditionals: Table::new(),
            origins: Mutex::default(),
            graph_gate: Mutex::new(()),
            modules: Table::new(),
            functions: Table::new(),
            nvrtc: OnceLock::new(),
            handles: Table::new(),
            vendors: Vendors::default(),
            holders: Holders::default(),
        })
    }

    /// The version of CUDA that the driver speaks.
    #[must_use]
    pub const fn version(&self) -> DriverVersion {
        self.version
    }
}

/// Asks a library for its version, before anything else of it is needed.
fn version_of(library: &Loaded) -> Result<DriverVersion, OpenError> {
    // SAFETY: `CUresult cuDriverGetVersion(int *)`, the same in every version.
    let get = unsafe { library.require::<unsafe extern "C" fn(*mut i32) -> u32>("cuDriverGetVersion") }?;
    let mut number = 0;
    // SAFETY: writes one int; needs no cuInit.
    start("cuDriverGetVersion", unsafe { get(&raw mut number) })?;
    Ok(DriverVersion::from_number(number))
}

/// Takes the code of a function that opening needs.
fn start(call: &'static str, number: u32) -> Result<(), OpenError> {
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
        self.opened.elapsed()
    }

    fn entropy(&self) -> u64 {
        // What the standard library seeds its hash maps with comes from the operating system.
        std::hash::BuildHasher::hash_one(
            &std::collections::hash_map::RandomState::new(),
            self.opened.elapsed().as_nanos(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_works_or_says_why_not() {
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
    fn the_driver_is_a_driver() {
        fn takes(_: Option<&dyn Driver>) {}
        takes(None::<&CudaDriver>.map(|driver| driver as &dyn Driver));
    }

    #[test]
    fn versions_read_like_nvidias() {
        assert_eq!(DriverVersion::from_number(12040).to_string(), "12.4");
        assert_eq!(DriverVersion::from_number(13000).to_string(), "13.0");
        assert!(DriverVersion::from_number(11080) < OLDEST && DriverVersion::from_number(12000) >= OLDEST);
    }
}
