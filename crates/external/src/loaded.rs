//! A shared object that is open, and its functions as a plug. All of this crate's unsafe code is here.

use std::error::Error as _;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use warpool::memory::{BaseAllocation, ExternalAllocator, Handled, MemPoolId, RawStream};
use warpool::{Error, Instance, Result};
use warpool_driver::{DeviceId, DevicePtr, Driver};

use crate::LoadError;
use crate::abi::{
    Alloc, BaseAlloc, BeginPool, EmptyFunction, Free, Init, MemoryFraction, PoolHook, PoolId, RecordStream, Reset,
};

/// The names of an allocator's functions in its shared object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatorSymbols {
    /// Gives memory.
    pub alloc: String,
    /// Takes it back.
    pub free: String,
    /// Called once, with the number of devices.
    pub init: Option<String>,
    /// Gives up what it keeps for later.
    pub reset: Option<String>,
    /// Told the share of a device's memory that may be used.
    pub memory_fraction: Option<String>,
    /// Says what an address belongs to.
    pub base_alloc: Option<String>,
    /// Told of other streams; with it, the allocator takes care of them itself.
    pub record_stream: Option<String>,
    /// Told that requests go to a pool.
    pub begin_pool: Option<String>,
    /// Told that they do no more.
    pub end_pool: Option<String>,
    /// Told that nobody uses a pool any more.
    pub release_pool: Option<String>,
}

impl AllocatorSymbols {
    /// The two that must be there, and no hooks.
    #[must_use]
    pub fn new(alloc: &str, free: &str) -> Self {
        Self { alloc: alloc.to_owned(), free: free.to_owned(), ..Self::default() }
    }
}

/// C functions of a shared object, as a plug. The object stays loaded until the process ends: its threads, or handlers
/// that run at exit, may be in it.
pub struct LoadedAllocator {
    path: PathBuf,
    alloc: Alloc,
    free: Free,
    init: Option<Init>,
    reset: Option<Reset>,
    memory_fraction: Option<MemoryFraction>,
    base_alloc: Option<BaseAlloc>,
    record_stream: Option<RecordStream>,
    begin_pool: Option<BeginPool>,
    end_pool: Option<PoolHook>,
    release_pool: Option<PoolHook>,
    /// Who makes devices current, if the functions rely on it.
    driver: Option<Arc<dyn Driver>>,
}

impl LoadedAllocator {
    /// Loads the shared object at `path` and finds the functions that `symbols` names. The path is a file's, not a name
    /// to search for.
    ///
    /// # Safety
    /// Loading runs what the object does when it is loaded, which can be anything. The functions must have the
    /// signatures of the [crate's](crate) list, may be called from any thread at any time, and must do as [`ExternalAllocator`]
    /// says: what `alloc` gives is device memory of that size that nobody else has.
    pub unsafe fn open(path: impl AsRef<Path>, symbols: &AllocatorSymbols) -> std::result::Result<Self, LoadError> {
        let path = path.as_ref();
        // The loader would search for a bare name, and find something else of that name.
        let path = path.canonicalize().map_err(|_| LoadError::NoFile { path: path.to_owned() })?;
        // SAFETY: the caller vouches for what runs when it is loaded.
        let library = unsafe { Library::new(&path) };
        let library = library.map_err(|error| LoadError::NotLoaded { path: path.clone(), why: said(&error) })?;
        let found = Symbols { library: &library, path: &path };
        // SAFETY: the caller vouches for the signatures.
        let plug = unsafe { Self::find(&found, symbols) }?;
        // Not before everything was found: what lacks a symbol is closed again.
        std::mem::forget(library);
        Ok(plug)
    }

    /// # Safety
    /// The functions of those names have the signatures of the types here.
    unsafe fn find(found: &Symbols<'_>, symbols: &AllocatorSymbols) -> std::result::Result<Self, LoadError> {
        /// Finds a hook, if one is named.
        macro_rules! hook {
            ($role:ident) => {
                match &symbols.$role {
                    // SAFETY: passed on to the caller.
                    Some(name) => Some(unsafe { found.get(stringify!($role), name) }?),
                    None => None,
                }
            };
        }
        Ok(Self {
            path: found.path.to_owned(),
            // SAFETY: passed on to the caller.
            alloc: unsafe { found.get("alloc", &symbols.alloc) }?,
            // SAFETY: passed on to the caller.
            free: unsafe { found.get("free", &symbols.free) }?,
            init: hook!(init),
            reset: hook!(reset),
            memory_fraction: hook!(memory_fraction),
            base_alloc: hook!(base_alloc),
            record_stream: hook!(record_stream),
            begin_pool: hook!(begin_pool),
            end_pool: hook!(end_pool),
            release_pool: hook!(release_pool),
            driver: None,
        })
    }

    /// Makes the device the thread's current one around `alloc` and `free`, for functions that rely on it as they can
    /// in PyTorch. The one before is current again afterwards; a thread that had none keeps the device.
    #[must_use]
    pub fn on_current_device(mut self, instance: &Instance) -> Self {
        self.driver = Some(Arc::clone(instance.driver()));
        self
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `call` with the device current, if that is wanted.
    fn on<R>(&self, device: DeviceId, call: impl FnOnce() -> R) -> Result<R> {
        let Some(driver) = &self.driver else { return Ok(call()) };
        let before = driver.current_device()?;
        if before == Some(device) {
            return Ok(call());
        }
        driver.set_current_device(device)?;
        let _back = before.map(|before| Back { driver, before });
        Ok(call())
    }
}

/// Makes the device from before current again, also if the call unwinds.
struct Back<'a> {
    driver: &'a Arc<dyn Driver>,
    before: DeviceId,
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        // It was current a moment ago. What the call gave must not be lost, should this fail all the same.
        let _ = self.driver.set_current_device(self.before);
    }
}

/// Where symbols are looked for.
struct Symbols<'a> {
    library: &'a Library,
    path: &'a Path,
}

impl Symbols<'_> {
    /// # Safety
    /// `F` is the type of a pointer to that very function.
    unsafe fn get<F: Copy>(&self, role: &'static str, symbol: &str) -> std::result::Result<F, LoadError> {
        // SAFETY: the caller vouches for the type; `Option` has room for a symbol that is null.
        let found = unsafe { self.library.get::<Option<F>>(symbol.as_bytes()) };
        let found = found.ok().and_then(|found| *found);
        found.ok_or_else(|| LoadError::NoSymbol { path: self.path.to_owned(), symbol: symbol.to_owned(), role })
    }
}

/// What the loader said, which libloading keeps one level down.
fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn device_number(device: DeviceId) -> c_int {
    c_int::try_from(device.0).expect("devices are few")
}

fn size(bytes: u64) -> Result<isize> {
    isize::try_from(bytes).map_err(|_| Error::RequestTooLarge { bytes })
}

/// An address of the device, or a driver's handle, as C passes it. Nothing here follows it.
fn pointer(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(number).expect("64 bits"))
}

const fn pool_id(pool: MemPoolId) -> PoolId {
    PoolId { graph: pool.graph as u64, user: pool.user as u64 }
}

impl ExternalAllocator for LoadedAllocator {
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        let bytes = size(bytes)?;
        let given = self.on(device, || {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { (self.alloc)(bytes, device_number(device), pointer(stream.raw.0)) }
        })?;
        Ok((!given.is_null()).then(|| DevicePtr(given.addr() as u64)))
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        let bytes = size(bytes)?;
        self.on(device, || {
            // SAFETY: as above; it is what `alloc` gave, with its size, device and stream.
            unsafe { (self.free)(pointer(ptr.0), bytes, device_number(device), pointer(stream.raw.0)) }
        })
    }

    fn init(&self, device_count: u32) -> Result<()> {
        if let Some(init) = self.init {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { init(c_int::try_from(device_count).unwrap_or(c_int::MAX)) }
        }
        Ok(())
    }

    fn reset(&self) {
        if let Some(reset) = self.reset {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { reset() }
        }
    }

    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        if let Some(hook) = self.memory_fraction {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { hook(fraction, device_number(device)) }
        }
    }

    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        const UNTOUCHED: usize = usize::MAX;
        let hook = self.base_alloc?;
        let mut bytes = UNTOUCHED;
        // SAFETY: whoever opened it vouched for the function; the size is ours to be written.
        let base = unsafe { hook(pointer(ptr.0), &raw mut bytes) };
        let bytes = (bytes != UNTOUCHED).then_some(bytes as u64);
        (!base.is_null()).then(|| BaseAllocation { ptr: DevicePtr(base.addr() as u64), bytes })
    }

    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        let Some(hook) = self.record_stream else { return Handled::No };
        // SAFETY: whoever opened it vouched for the function; the stream is alive.
        unsafe { hook(pointer(ptr.0), pointer(stream.raw.0)) };
        Handled::Yes
    }

    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.begin_pool {
            let mut filter = EmptyFunction::new();
            // SAFETY: whoever opened it vouched for the function, which does not call the filter; it is ours until the
            // call is over.
            unsafe { hook(device_number(device), pool_id(pool), (&raw mut filter).cast()) }
        }
    }

    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.end_pool {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { hook(device_number(device), pool_id(pool)) }
        }
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.release_pool {
            // SAFETY: whoever opened it vouched for the function.
            unsafe { hook(device_number(device), pool_id(pool)) }
        }
    }
}

impl fmt::Debug for LoadedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedAllocator").field("path", &self.path).finish_non_exhaustive()
    }
}
