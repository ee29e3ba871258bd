//! The libraries whose handles are pooled: how a handle is created and destroyed.

use std::cell::Cell;
use std::fmt;
use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, HandleId, Library, RawHandle, StreamId};

use crate::instance::{Extension, ExtensionSlot, InstanceKey};
use crate::{Device, Error, Instance, Result, Stream, lock};

/// A library whose handles can be pooled. Users may implement it: a `Handle` is any value that one thread at a time may
/// use.
pub trait LibraryKind: Send + Sync + 'static {
    /// One handle, with its cached settings; its next user finds it as it was left. Dropping one must not call the
    /// library: if [`destroy`](Self::destroy) was not called, the library may already be unloaded. Objects that a
    /// handle keeps alive live as long as the thread that owns it.
    type Handle: Send + 'static;

    /// The library's name, for errors.
    fn name(&self) -> &'static str;

    /// Creates a handle for `device`. Called without a lock.
    fn create(&self, device: &Device) -> Result<Self::Handle>;

    /// Destroys a handle. After a failure the handle still exists and stays in the pool: a library may fail while a
    /// stream is capturing.
    fn destroy(&self, device: &Device, handle: &Self::Handle) -> Result<()>;
}

/// Declares the libraries of the driver contract.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $library:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name;

        impl LibraryKind for $name {
            type Handle = LibraryHandle;

            fn name(&self) -> &'static str {
                Library::$library.name()
            }

            fn create(&self, device: &Device) -> Result<LibraryHandle> {
                LibraryHandle::create(Library::$library, device)
            }

            fn destroy(&self, device: &Device, handle: &LibraryHandle) -> Result<()> {
                handle.destroy(device)
            }
        }
    )*};
}

kinds! {
    /// Dense linear algebra. [`Blas`](crate::blas::Blas) gives its handles streams, workspaces and precision.
    Cublas = Blas;
    /// Matrix products with fused epilogues.
    CublasLt = BlasLt;
    /// Layers of neural networks.
    Cudnn = Dnn;
    /// Sparse linear algebra.
    Cusparse = Sparse;
    /// Factorisations and solvers.
    Cusolver = Solver;
}

/// Handles of one device whose creation failed half-way and whose destruction failed too, as it does while a stream is
/// capturing.
#[derive(Default)]
struct HandlesToRetry(Mutex<Vec<HandleId>>);

impl HandlesToRetry {
    /// Destroys what can be destroyed now; the rest is kept.
    fn retry(&self, driver: &dyn Driver) {
        let mut handles = std::mem::take(&mut *lock(&self.0));
        handles.retain(|&id| driver.library_destroy(id).is_err());
        lock(&self.0).append(&mut handles);
    }
}

impl Extension for HandlesToRetry {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Handles
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        self.retry(driver);
        Ok(())
    }
}

/// A handle of one of the contract's libraries, with its stream.
///
/// It keeps no object alive: threads own their handles until they end, and an [`Instance`](crate::Instance) can be
/// closed before that.
pub struct LibraryHandle {
    instance: InstanceKey,
    device: DeviceId,
    id: HandleId,
    raw: RawHandle,
    /// The stream that was set last; `None` while unknown.
    stream: Cell<Option<StreamId>>,
}

impl LibraryHandle {
    /// Creates a handle. Loads the library if this is its first handle.
    pub fn create(library: Library, device: &Device) -> Result<Self> {
        let driver = device.driver();
        let to_retry = device.extensions().get_or_init(HandlesToRetry::default);
        to_retry.retry(driver);
        let id = driver.library_create(library, device.id())?;
        match driver.library_raw(id) {
            Ok(raw) => {
                Ok(Self { instance: device.instance().key(), device: device.id(), id, raw, stream: Cell::new(None) })
            }
            Err(error) => {
                lock(&to_retry.0).push(id);
                to_retry.retry(driver);
                Err(error.into())
            }
        }
    }

    /// Destroys it; fails while a stream of its device is capturing. `device` must be the one that it was created for.
    pub fn destroy(&self, device: &Device) -> Result<()> {
        self.expect_same(device.instance(), "the device")?;
        Ok(device.driver().library_destroy(self.id)?)
    }

    /// The driver's id of it.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.id
    }

    /// The library's own handle, for its own functions. It was read when the handle was created, so this makes no call.
    #[must_use]
    pub fn raw(&self) -> RawHandle {
        self.raw
    }

    /// Sets its stream, which must be of its own device. Makes no library call if it is already set. A stream that is
    /// set through [`raw`](Self::raw) is unknown to Warpool.
    #[inline]
    pub fn set_stream(&self, stream: &Stream) -> Result<()> {
        // Ids are never reused in one Instance: the same id is the same stream.
        if self.stream.get() == Some(stream.id()) && self.instance == stream.instance().key() {
            return Ok(());
        }
        self.change_stream(stream)
    }

    fn change_stream(&self, stream: &Stream) -> Result<()> {
        self.expect_same(stream.instance(), "the stream")?;
        if stream.device_id() != self.device {
            return Err(Error::HandleDevice { handle: self.device, stream: stream.id(), owner: stream.device_id() });
        }
        // Unknown during the call: after a failure the next call sets it.
        self.stream.set(None);
        stream.driver().library_set_stream(self.id, stream.id())?;
        self.stream.set(Some(stream.id()));
        Ok(())
    }

    fn expect_same(&self, instance: &Instance, object: &'static str) -> Result<()> {
        if self.instance == instance.key() { Ok(()) } else { Err(Error::ForeignInstance { object }) }
    }
}

impl fmt::Debug for LibraryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.id, self.device)
    }
}
