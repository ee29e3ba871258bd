//! Blocks shared with other processes. A block is exported as the memory that contains it and an offset. Memory of
//! another process is opened once, however often it is received, and closed after its last use.
//!
//! Plain memory is exported as CUDA's handle of its segment, pages as their numbers and the name of a socket, from
//! which the other process gets them as file descriptors (`server.rs`). Processes with PyTorch's own allocator can open
//! either, and memory that they share can be opened here (`descriptors.rs`).

mod descriptors;
mod handle;
mod mapped;
mod server;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use warpool::memory::raw::MappedPart;
use warpool::memory::report::Observers;
use warpool_driver::{DeviceId, DevicePtr, Driver, ErrorCode};

use self::descriptors::{KeptDescriptors, OtherProcess};
use self::handle::{Handle, PageHandle};
use self::mapped::MappedRange;
use self::server::{PageClient, PageServer};
use crate::allocator::PartsOf;
use crate::error::{Error, Result};

/// The memory that this process shares with others.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Started by the first export of pages.
    server: OnceLock<PageServer>,
    starting: Mutex<()>,
    /// For processes with PyTorch's own allocator.
    kept: Arc<KeptDescriptors>,
    opened: Mutex<Opened>,
}

/// A block of mapped memory to share.
pub(crate) struct MappedBlock<'a> {
    pub(crate) ptr: DevicePtr,
    pub(crate) parts: &'a [MappedPart],
    /// How PyTorch's own allocator writes handles.
    pub(crate) torch_version: u8,
    /// The function of the block's allocator.
    pub(crate) parts_of: &'a PartsOf,
    pub(crate) observers: &'a Observers,
}

#[derive(Debug, Default)]
struct Opened {
    /// By device and handle.
    memory: BTreeMap<(DeviceId, Vec<u8>), Use>,
    /// Memory without users that is not closed yet, because a capture forbade waiting for the device.
    to_close: Vec<(DeviceId, Memory)>,
}

#[derive(Debug)]
struct Use {
    memory: Memory,
    users: usize,
}

/// Memory of another process.
#[derive(Debug)]
enum Memory {
    Plain(DevicePtr),
    Mapped(MappedRange),
}

impl Memory {
    fn ptr(&self) -> DevicePtr {
        match self {
            Self::Plain(ptr) => *ptr,
            Self::Mapped(range) => range.ptr(),
        }
    }

    /// Waits for all work of the device.
    fn close(&self, driver: &dyn Driver, device: DeviceId) -> Result<()> {
        match self {
            Self::Plain(ptr) => Ok(driver.mem_close(device, *ptr)?),
            Self::Mapped(range) => range.close(driver, device),
        }
    }
}

impl Sharing {
    /// The handle of the plain allocation that starts at `base`.
    pub(crate) fn export_plain(driver: &dyn Driver, base: DevicePtr) -> Result<Vec<u8>> {
        match driver.mem_export(base) {
            Err(error) if error.code == ErrorCode::InvalidValue => Err(Error::NotShareable),
            exported => Ok(Handle::Plain(exported?).to_bytes()),
        }
    }

    /// The handle of a block of mapped memory: parts side by side, in the order of their addresses. Includes PyTorch's
    /// own form, of version `torch_version`.
    pub(crate) fn export_mapped(&self, driver: &Arc<dyn Driver>, block: &MappedBlock<'_>) -> Result<Vec<u8>> {
        let first = block.parts.first().ok_or(Error::NotShareable)?;
        // Fails now if the memory cannot be shared, not when another process opens it.
        PageServer::export(&**driver, first.physical)?;
        let server = self.server(driver, block)?.id();
        let torch = self.kept.keep(&**driver, block.torch_version, block.ptr, block.parts, block.parts_of)?;
        let pages = block.parts.iter().map(|part| (part.physical, part.bytes)).collect();
        Ok(Handle::Pages(PageHandle { server, pages, torch }).to_bytes())
    }

    fn server(&self, driver: &Arc<dyn Driver>, block: &MappedBlock<'_>) -> Result<&PageServer> {
        let _serialized = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = self.server.get() {
            return Ok(server);
        }
        let server = PageServer::start(Arc::clone(driver)).map_err(|source| Error::ShareServer { source })?;
        self.close_freed_when_memory_moves(block);
        Ok(self.server.get_or_init(|| server))
    }

    /// Closes descriptors of freed blocks before the allocator reserves or releases memory.
    fn close_freed_when_memory_moves(&self, block: &MappedBlock<'_>) {
        let (kept, parts_of) = (Arc::clone(&self.kept), Arc::clone(block.parts_of));
        block.observers.attach_pressure_callback(Arc::new(move |_device| {
            kept.close_freed(&parts_of);
            // This makes no memory available to the allocator.
            false
        }));
        let (kept, parts_of) = (Arc::clone(&self.kept), Arc::clone(block.parts_of));
        block.observers.attach_trim_hook(Arc::new(move |_device| kept.close_freed(&parts_of)));
    }

    /// Opens memory of another process, or adds a user. The lock is held meanwhile: a handle must not be opened twice.
    /// `capturing` is whether a capture may be under way.
    pub(crate) fn open(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        bytes: &[u8],
        capturing: bool,
    ) -> Result<DevicePtr> {
        let handle = Handle::from_bytes(bytes)?;
        let mut opened = self.lock();
        opened.close_left(driver, capturing);
        let key = (device, handle.to_bytes());
        if let Some(known) = opened.memory.get_mut(&key) {
            known.users += 1;
            return Ok(known.memory.ptr());
        }
        let memory = match &handle {
            Handle::Plain(handle) => Memory::Plain(driver.mem_import(device, handle)?),
            Handle::Pages(handle) => {
                let mut client = PageClient::connect(handle.server)?;
                let sizes: Vec<_> = handle.pages.iter().map(|&(_, bytes)| bytes).collect();
                let page = |number: usize| client.page(handle.pages[number].0);
                Memory::Mapped(MappedRange::open(driver, device, &sizes, page)?)
            }
            Handle::Descriptors(handle) => {
                let process = OtherProcess::open(handle.process)?;
                let sizes = vec![handle.part_bytes; handle.descriptors.len()];
                let part = |number: usize| process.descriptor(handle.descriptors[number]);
                Memory::Mapped(MappedRange::open(driver, device, &sizes, part)?)
            }
        };
        let ptr = memory.ptr();
        opened.memory.insert(key, Use { memory, users: 1 });
        Ok(ptr)
    }

    /// Ends a use. The last one closes the memory; during a capture, which forbids that, a later call does.
    pub(crate) fn close(&self, driver: &dyn Driver, ptr: DevicePtr, capturing: bool) -> Result<()> {
        let mut opened = self.lock();
        opened.close_left(driver, capturing);
        let found = opened.memory.iter_mut().find(|(_, known)| known.memory.ptr() == ptr);
        let (key, known) = found.ok_or(warpool::Error::UnknownPointer { ptr })?;
        known.users -= 1;
        if known.users > 0 {
            return Ok(());
        }
        let key = key.clone();
        let Some(Use { memory, .. }) = opened.memory.remove(&key) else { return Ok(()) };
        if capturing {
            opened.to_close.push((key.0, memory));
            return Ok(());
        }
        memory.close(driver, key.0)
    }

    fn lock(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opened {
    /// Closes memory that could not be closed during a capture.
    fn close_left(&mut self, driver: &dyn Driver, capturing: bool) {
        if !capturing {
            for (device, memory) in std::mem::take(&mut self.to_close) {
                if let Err(error) = memory.close(driver, device) {
                    tracing::warn!(%error, "memory of another process could not be closed");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool::memory::Settings;
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{Copies as _, ForeignStream, Memory as _};

    use super::*;
    use crate::Runtime;

    fn runtime(sim: &Arc<SimDriver>, settings: &str) -> Runtime {
        Runtime::new(sim.clone(), Settings::parse(settings).unwrap()).unwrap()
    }

    #[test]
    fn pages_are_opened_once_and_closed_after_the_last_user() {
        opened_once("backend:paged");
    }

    #[test]
    fn chunks_are_opened_once_and_closed_after_the_last_user() {
        opened_once("expandable_segments:True");
    }

    fn opened_once(settings: &str) {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let driver: Arc<dyn Driver> = sim.clone();
        let (from, to) = (runtime(&sim, settings), Sharing::default());
        // Not at the start of its pages, and longer than one.
        from.allocate(3 << 20, 0, ForeignStream::NULL).unwrap();
        let block = from.allocate(39 << 20, 0, ForeignStream::NULL).unwrap();
        let (handle, offset) = from.share(block, 2).unwrap();

        let device = DeviceId(0);
        let free = sim.mem_info(device).unwrap().bytes_free;
        let opened = to.open(&*driver, device, &handle, false).unwrap();
        assert_eq!(to.open(&*driver, device, &handle, false).unwrap(), opened, "it is opened once");
        assert_eq!(sim.mem_info(device).unwrap().bytes_free, free, "it is the same memory");
        let there = DevicePtr(opened.0 + offset as u64);
        for at in [0, 5 << 20, (39 << 20) - 4] {
            sim.upload(device, DevicePtr(block.0 + at), &[0x5A; 4]).unwrap();
            let mut read = [0; 4];
            sim.download(device, DevicePtr(there.0 + at), &mut read).unwrap();
            assert_eq!(read, [0x5A; 4], "at {at}");
        }

        to.close(&*driver, opened, false).unwrap();
        to.close(&*driver, opened, true).unwrap();
        assert!(to.close(&*driver, opened, true).is_err(), "no user is left");
        assert_eq!(to.lock().to_close.len(), 1, "not during a capture");
        assert!(to.close(&*driver, opened, false).is_err());
        assert!(to.lock().to_close.is_empty());
        from.free_block(block).unwrap();
    }

    /// The part of a handle that PyTorch's own allocator reads, and would write itself.
    fn as_torch_reads_it(handle: &[u8]) -> Vec<u8> {
        let Handle::Pages(pages) = Handle::from_bytes(handle).unwrap() else { panic!("no pages") };
        Handle::Descriptors(pages.torch.expect("PyTorch's own form")).to_bytes()
    }

    #[test]
    fn a_process_with_pytorchs_allocator_opens_mapped_memory() {
        for settings in ["backend:paged", "expandable_segments:True"] {
            let sim = Arc::new(SimDriver::new(SimConfig::default()));
            let driver: Arc<dyn Driver> = sim.clone();
            let (from, to) = (runtime(&sim, settings), Sharing::default());
            let block = from.allocate(39 << 20, 0, ForeignStream::NULL).unwrap();
            let (handle, offset) = from.share(block, 2).unwrap();
            assert_eq!(from.share(block, 2).unwrap().0, handle, "PyTorch knows what it has opened by the handle");
            let opened = to.open(&*driver, DeviceId(0), &as_torch_reads_it(&handle), false).unwrap();
            for at in [0, 5 << 20, (39 << 20) - 4] {
                sim.upload(DeviceId(0), DevicePtr(block.0 + at), &[0x5A; 4]).unwrap();
                let mut read = [0; 4];
                sim.download(DeviceId(0), DevicePtr(opened.0 + offset as u64 + at), &mut read).unwrap();
                assert_eq!(read, [0x5A; 4], "{settings}: at {at}");
            }
            to.close(&*driver, opened, false).unwrap();

            assert!(from.sharing.kept.count() > 0);
            from.empty_cache().unwrap();
            assert!(from.sharing.kept.count() > 0, "{settings}: the block is allocated");
            from.free_block(block).unwrap();
            from.empty_cache().unwrap();
            assert_eq!(from.sharing.kept.count(), 0, "{settings}: open descriptors would keep the memory");
        }
    }

    #[test]
    fn descriptors_of_freed_blocks_are_closed_by_later_shares() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let from = runtime(&sim, "backend:paged");
        for _ in 0..1000 {
            let block = from.allocate(3 << 20, 0, ForeignStream::NULL).unwrap();
            // There is room for all descriptors, so the handle includes PyTorch's form.
            as_torch_reads_it(&from.share(block, 2).unwrap().0);
            // So that the next block is at another address.
            from.allocate(1 << 20, 0, ForeignStream::NULL).unwrap();
            from.free_block(block).unwrap();
        }
    }

    #[test]
    fn more_descriptors_than_a_process_may_have_are_not_kept() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let driver: Arc<dyn Driver> = sim.clone();
        let (from, to) = (runtime(&sim, "backend:paged"), Sharing::default());
        let block = from.allocate(2 << 30, 0, ForeignStream::NULL).unwrap();
        let (handle, _) = from.share(block, 2).unwrap();
        let Handle::Pages(pages) = Handle::from_bytes(&handle).unwrap() else { panic!("no pages") };
        assert_eq!((pages.pages.len() > 256, pages.torch), (true, None));
        let opened = to.open(&*driver, DeviceId(0), &handle, false).unwrap();
        to.close(&*driver, opened, false).unwrap();
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let driver: Arc<dyn Driver> = sim.clone();
        let (from, to) = (runtime(&sim, "backend:paged"), Sharing::default());
        let block = from.allocate(3 << 20, 0, ForeignStream::NULL).unwrap();
        let mut handle = as_torch_reads_it(&from.share(block, 2).unwrap().0);
        // The largest process id of Linux is 2^22.
        handle[2..6].copy_from_slice(&i32::MAX.to_le_bytes());
        let error = to.open(&*driver, DeviceId(0), &handle, false).unwrap_err().to_string();
        assert!(error.contains("does not answer"), "{error}");
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let driver: Arc<dyn Driver> = sim.clone();
        let (from, to) = (runtime(&sim, "backend:paged"), Sharing::default());
        let block = from.allocate(3 << 20, 0, ForeignStream::NULL).unwrap();
        let (handle, _) = from.share(block, 2).unwrap();
        from.free_block(block).unwrap();
        from.empty_cache().unwrap();
        let error = to.open(&*driver, DeviceId(0), &handle, false).unwrap_err().to_string();
        assert!(error.contains("the process that shared it has freed it"), "{error}");
        assert!(from.share(block, 2).is_err());
    }
}
