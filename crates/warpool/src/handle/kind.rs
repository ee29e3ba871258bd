//! What a pool needs to know about a library: how its handles are made and unmade; and the kinds that Warpool knows.

use std::cell::Cell;
use std::fmt;
use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver, HandleId, Library, RawHandle, StreamId};

use crate::instance::InstanceKey;
use crate::{Device, Error, Instance, Result, Stream, lock};

/// A library whose handles can be pooled. Yours too: a `Handle` is any value that one thread at a time may use.
pub trait LibraryKind: Send + Sync + 'static {
    /// One handle, with what is remembered about it; its next holder finds it as it was left. Dropping one must not
    /// call the library: where [`destroy`](Self::destroy) was not called, the library may be gone already. What a
    /// handle keeps alive lives as long as the thread that holds it.
    type Handle: Send + 'static;

    /// The library's name, for errors.
    fn name(&self) -> &'static str;

    /// Makes a handle for `device`. No lock is held meanwhile.
    fn create(&self, device: &Device) -> Result<Self::Handle>;

    /// Unmakes it. One that could not be unmade is still there, and still the pool's: a library may refuse while a
    /// stream captures.
    fn destroy(&self, device: &Device, handle: &Self::Handle) -> Result<()>;
}

/// Declares the kinds of the contract's libraries.
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
    /// Layers of networks.
    Cudnn = Dnn;
    /// Sparse linear algebra.
    Cusparse = Sparse;
    /// Factorisations and solvers.
    Cusolver = Solver;
}

/// Handles that were made in vain and could not be destroyed at once, as none can while a stream captures.
#[derive(Default)]
pub(crate) struct StrayHandles(Mutex<Vec<HandleId>>);

impl StrayHandles {
    fn put(&self, id: HandleId) {
        lock(&self.0).push(id);
    }

    /// Destroys what can be destroyed now; the rest stays for the next time.
    pub(crate) fn destroy_all(&self, driver: &dyn Driver) {
        let mut strays = std::mem::take(&mut *lock(&self.0));
        strays.retain(|&id| driver.library_destroy(id).is_err());
        lock(&self.0).append(&mut strays);
    }
}

/// A handle of one of the contract's libraries, and the stream that it last was given.
///
/// It keeps nothing alive: threads have theirs until they end, and a [`Instance`](crate::Instance) can be closed before that.
pub struct LibraryHandle {
    instance: InstanceKey,
    device: DeviceId,
    id: HandleId,
    raw: RawHandle,
    /// `None` while unknown.
    stream: Cell<Option<StreamId>>,
}

impl LibraryHandle {
    /// Makes one. The library is loaded if this is its first.
    pub fn create(library: Library, device: &Device) -> Result<Self> {
        let (driver, strays) = (device.driver(), &device.state().stray_handles);
        strays.destroy_all(driver);
        let id = driver.library_create(library, device.id())?;
        match driver.library_raw(id) {
            Ok(raw) => {
                Ok(Self { instance: device.instance().key(), device: device.id(), id, raw, stream: Cell::new(None) })
            }
            Err(error) => {
                strays.put(id);
                strays.destroy_all(driver);
                Err(error.into())
            }
        }
    }

    /// Unmakes it; refused while a stream of its device captures. `device` is the one that it was made for.
    pub fn destroy(&self, device: &Device) -> Result<()> {
        self.expect_same(device.instance(), "the device")?;
        Ok(device.driver().library_destroy(self.id)?)
    }

    /// Its name for the driver.
    #[must_use]
    pub fn id(&self) -> HandleId {
        self.id
    }

    /// The library's own handle, for its own functions. No call: it was asked for when the handle was made.
    #[must_use]
    pub fn raw(&self) -> RawHandle {
        self.raw
    }

    /// Points it at `stream`, of its own device; no library call if it is there already. Whoever sets the stream
    /// through [`raw`](Self::raw) sets it behind Warpool's back.
    #[inline]
    pub fn set_stream(&self, stream: &Stream) -> Result<()> {
        // Ids never come again, in one Instance: the same id is the same stream.
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
        // Unknown while the call is under way: a failure leaves the next caller to set it.
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
