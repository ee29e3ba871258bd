//! A loaded shared object, and its functions as an external allocator. All unsafe code of this crate is here.

use std::error::Error as _;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;
use warpool::memory::MemPoolId;
use warpool::memory::external::{BaseAllocation, ExternalAllocator, Handled, RawStream};
use warpool::{Error, Instance, Result};
use warpool_driver::{DeviceId, DevicePtr, Driver};

use crate::LoadError;
use crate::abi::{
    Alloc, BaseAlloc, BeginPool, EmptyFunction, Free, Init, MemoryFraction, PoolHook, PoolId, RecordStream, Reset,
};

/// The symbols of an allocator's functions in its shared object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatorSymbols {
    /// Allocates memory.
    pub alloc: String,
    /// Frees it.
    pub free: String,
    /// Called once, with the number of devices.
    pub init: Option<String>,
    /// Returns cached memory to the driver.
    pub reset: Option<String>,
    /// Called when the memory fraction of a device is set.
    pub memory_fraction: Option<String>,
    /// Finds the allocation that contains an address.
    pub base_alloc: Option<String>,
    /// Called when another stream uses a block; the allocator then delays the block's reuse itself.
    pub record_stream: Option<String>,
    /// Called when routing to a pool begins.
    pub begin_pool: Option<String>,
    /// Called when it ends.
    pub end_pool: Option<String>,
    /// Called after the last use of a pool has ended.
    pub release_pool: Option<String>,
}

impl AllocatorSymbols {
    /// The two required functions, and no hooks.
    #[must_use]
    pub fn new(alloc: &str, free: &str) -> Self {
        Self { alloc: alloc.to_owned(), free: free.to_owned(), ..Self::default() }
    }
}

/// C functions of a shared object, as an external allocator. The object stays loaded until the process ends, since its
/// threads or exit handlers may still run.
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
    /// Set if the functions rely on the current device.
    driver: Option<Arc<dyn Driver>>,
}

impl LoadedAllocator {
    /// Loads the shared object at `path` and resolves `symbols`. The library search path is not used.
    ///
    /// # Safety
    /// Loading runs the object's initializers. The functions must have the signatures of the [crate's](crate) list,
    /// must be callable from any thread at any time, and must keep the contract of [`ExternalAllocator`]: `alloc`
    /// returns device memory of that size that is not in use otherwise.
    pub unsafe fn open(path: impl AsRef<Path>, symbols: &AllocatorSymbols) -> std::result::Result<Self, LoadError> {
        let path = path.as_ref();
        // The loader would search for a bare name, and might find another file.
        let path = path.canonicalize().map_err(|_| LoadError::NoFile { path: path.to_owned() })?;
        // SAFETY: the caller guarantees that the initializers are sound.
        let library = unsafe { Library::new(&path) };
        let library = library.map_err(|error| LoadError::NotLoaded { path: path.clone(), why: message(&error) })?;
        let found = Symbols { library: &library, path: &path };
        // SAFETY: the caller guarantees the signatures.
        let loaded = unsafe { Self::find(&found, symbols) }?;
        // Only now: an object that lacks a symbol is unloaded.
        std::mem::forget(library);
        Ok(loaded)
    }

    /// # Safety
    /// The functions have the signatures of the types here.
    unsafe fn find(found: &Symbols<'_>, symbols: &AllocatorSymbols) -> std::result::Result<Self, LoadError> {
        /// Resolves a hook, if one is named.
        macro_rules! hook {
            ($role:ident) => {
                match &symbols.$role {
                    // SAFETY: the caller's guarantee.
                    Some(name) => Some(unsafe { found.get(stringify!($role), name) }?),
                    None => None,
                }
            };
        }
        Ok(Self {
            path: found.path.to_owned(),
            // SAFETY: the caller's guarantee.
            alloc: unsafe { found.get("alloc", &symbols.alloc) }?,
            // SAFETY: the caller's guarantee.
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

    /// Makes the device the thread's current one during `alloc` and `free`, for functions that rely on it as they can
    /// in PyTorch. The previous one is restored afterwards; a thread that had none keeps the device.
    #[must_use]
    pub fn on_current_device(mut self, instance: &Instance) -> Self {
        self.driver = Some(Arc::clone(instance.driver()));
        self
    }

    /// The canonical path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `call` with the device current, if the functions rely on it.
    fn with_device<R>(&self, device: DeviceId, call: impl FnOnce() -> R) -> Result<R> {
        let Some(driver) = &self.driver else { return Ok(call()) };
        let before = driver.current_device()?;
        if before == Some(device) {
            return Ok(call());
        }
        driver.set_current_device(device)?;
        let _restore = before.map(|before| RestoreDevice { driver, before });
        Ok(call())
    }
}

/// Restores the current device, even if the call unwinds.
struct RestoreDevice<'a> {
    driver: &'a Arc<dyn Driver>,
    before: DeviceId,
}

impl Drop for RestoreDevice<'_> {
    fn drop(&mut self) {
        // It was current before, so this does not fail; if it did, the result of the call must not be lost.
        let _ = self.driver.set_current_device(self.before);
    }
}

/// Resolves symbols of a library.
struct Symbols<'a> {
    library: &'a Library,
    path: &'a Path,
}

impl Symbols<'_> {
    /// # Safety
    /// `F` is the type of a pointer to that function.
    unsafe fn get<F: Copy>(&self, role: &'static str, symbol: &str) -> std::result::Result<F, LoadError> {
        // SAFETY: the caller guarantees the type; a null symbol is `None`.
        let found = unsafe { self.library.get::<Option<F>>(symbol.as_bytes()) };
        let found = found.ok().and_then(|found| *found);
        found.ok_or_else(|| LoadError::NoSymbol { path: self.path.to_owned(), symbol: symbol.to_owned(), role })
    }
}

/// The loader's message, which is the source of libloading's error.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn device_number(device: DeviceId) -> c_int {
    c_int::try_from(device.0).expect("device numbers fit in an int")
}

fn size(bytes: u64) -> Result<isize> {
    isize::try_from(bytes).map_err(|_| Error::RequestTooLarge { bytes })
}

/// A device address or a driver handle as a C pointer. It is not dereferenced here.
fn pointer(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(number).expect("a 64-bit platform"))
}

const fn pool_id(pool: MemPoolId) -> PoolId {
    PoolId { graph: pool.graph as u64, user: pool.user as u64 }
}

impl ExternalAllocator for LoadedAllocator {
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        let bytes = size(bytes)?;
        let allocated = self.with_device(device, || {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { (self.alloc)(bytes, device_number(device), pointer(stream.raw.0)) }
        })?;
        Ok((!allocated.is_null()).then(|| DevicePtr(allocated.addr() as u64)))
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        let bytes = size(bytes)?;
        self.with_device(device, || {
            // SAFETY: as above; the arguments are those of `alloc` and its result.
            unsafe { (self.free)(pointer(ptr.0), bytes, device_number(device), pointer(stream.raw.0)) }
        })
    }

    fn init(&self, device_count: u32) -> Result<()> {
        if let Some(init) = self.init {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { init(c_int::try_from(device_count).unwrap_or(c_int::MAX)) }
        }
        Ok(())
    }

    fn reset(&self) {
        if let Some(reset) = self.reset {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { reset() }
        }
    }

    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        if let Some(hook) = self.memory_fraction {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { hook(fraction, device_number(device)) }
        }
    }

    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        const UNSET: usize = usize::MAX;
        let hook = self.base_alloc?;
        let mut bytes = UNSET;
        // SAFETY: the caller of `open` guarantees the function; the size is a local variable.
        let base = unsafe { hook(pointer(ptr.0), &raw mut bytes) };
        let bytes = (bytes != UNSET).then_some(bytes as u64);
        (!base.is_null()).then(|| BaseAllocation { ptr: DevicePtr(base.addr() as u64), bytes })
    }

    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        let Some(hook) = self.record_stream else { return Handled::No };
        // SAFETY: the caller of `open` guarantees the function; the stream exists.
        unsafe { hook(pointer(ptr.0), pointer(stream.raw.0)) };
        Handled::Yes
    }

    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.begin_pool {
            let mut filter = EmptyFunction::new();
            // SAFETY: the caller of `open` guarantees the function, which does not call the filter. The filter outlives
            // the call.
            unsafe { hook(device_number(device), pool_id(pool), (&raw mut filter).cast()) }
        }
    }

    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.end_pool {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { hook(device_number(device), pool_id(pool)) }
        }
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = self.release_pool {
            // SAFETY: the caller of `open` guarantees the function.
            unsafe { hook(device_number(device), pool_id(pool)) }
        }
    }
}

impl fmt::Debug for LoadedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedAllocator").field("path", &self.path).finish_non_exhaustive()
    }
}
