//! Device memory, pinned memory and the driver's pools for checks.

#![expect(unsafe_code, reason = "ranges of host memory are unsafe to make")]

use warpool_driver::{DeviceId, DevicePtr, HostOptions, HostPtr, HostRange, PoolId, StreamId};

use super::TestContext;
use super::cleanup::Resource;
use crate::expect::{CheckResult, require};
use crate::sync::lock;

/// One page of ordinary host memory.
#[derive(Clone)]
#[repr(align(4096))]
pub(super) struct HostPage(#[expect(dead_code, reason = "drivers access it by its address")] [u8; HOST_PAGE]);

const HOST_PAGE: usize = 4096;

impl TestContext {
    pub(crate) fn alloc(&self, bytes: u64) -> CheckResult<DevicePtr> {
        self.alloc_on(self.device_id, bytes)
    }

    pub(crate) fn alloc_on(&self, device: DeviceId, bytes: u64) -> CheckResult<DevicePtr> {
        let ptr = self.driver.mem_alloc(device, bytes)?;
        self.track(Resource::Memory(ptr));
        Ok(ptr)
    }

    pub(crate) fn free(&self, ptr: DevicePtr) -> CheckResult {
        self.untrack(Resource::Memory(ptr));
        Ok(self.driver.mem_free(ptr)?)
    }

    /// Device memory that contains `bytes`.
    pub(crate) fn alloc_bytes(&self, bytes: &[u8]) -> CheckResult<DevicePtr> {
        let ptr = self.alloc(bytes.len() as u64)?;
        self.driver.upload(self.device_id, ptr, bytes)?;
        Ok(ptr)
    }

    /// Device memory that contains `words`.
    pub(crate) fn alloc_words(&self, words: &[u32]) -> CheckResult<DevicePtr> {
        self.alloc_bytes(&to_bytes(words))
    }

    /// The contents of device memory. Waits for blocking streams only; synchronize with others first.
    pub fn read_bytes(&self, ptr: DevicePtr, n: usize) -> CheckResult<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.driver.download(self.device_id, ptr, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn read_words(&self, ptr: DevicePtr, n: usize) -> CheckResult<Vec<u32>> {
        Ok(to_words(&self.read_bytes(ptr, 4 * n)?))
    }

    pub(crate) fn alloc_pinned(&self, bytes: u64) -> CheckResult<HostPtr> {
        let ptr = self.driver.host_alloc(self.device_id, bytes, HostOptions::default())?;
        self.track(Resource::Pinned(ptr));
        Ok(ptr)
    }

    /// Pinned memory that contains `bytes`.
    pub(crate) fn alloc_pinned_bytes(&self, bytes: &[u8]) -> CheckResult<HostPtr> {
        let ptr = self.alloc_pinned(bytes.len() as u64)?;
        self.driver.host_write(ptr, bytes)?;
        Ok(ptr)
    }

    pub(crate) fn read_pinned(&self, ptr: HostPtr, n: usize) -> CheckResult<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.driver.host_read(ptr, &mut bytes)?;
        Ok(bytes)
    }

    /// Zeroed pages of ordinary host memory, which live as long as the context. Only drivers access them.
    pub(crate) fn host_pages(&self, n: usize) -> HostRange {
        let mut pages = vec![HostPage([0; HOST_PAGE]); n];
        let ptr = HostPtr(pages.as_mut_ptr().expose_provenance() as u64);
        lock(&self.host_pages).push(pages);
        // SAFETY: the pages are writable, there are no references to them, and they live until the context is dropped,
        // which is after everything that the check registered was unregistered.
        unsafe { HostRange::new(ptr, (HOST_PAGE * n) as u64) }
    }

    /// Part of a range of [`host_pages`](Self::host_pages).
    pub(crate) fn part_of(&self, range: &HostRange, offset: u64, bytes: u64) -> HostRange {
        assert!(offset + bytes <= range.bytes(), "the part is inside the range");
        // SAFETY: a part lives as long as the whole.
        unsafe { HostRange::new(range.ptr().offset(offset), bytes) }
    }

    /// Registers ordinary host memory.
    pub(crate) fn register(&self, range: HostRange) -> CheckResult<HostPtr> {
        let ptr = range.ptr();
        self.driver.host_register(self.device_id, range, HostOptions::default())?;
        self.track(Resource::Registered(ptr));
        Ok(ptr)
    }

    /// A stream-ordered pool of the driver. Skips the check where there are none.
    pub(crate) fn pool(&self) -> CheckResult<PoolId> {
        require(self.properties()?.async_pools, "the device has no stream-ordered pools")?;
        let pool = self.driver.pool_create(self.device_id)?;
        self.track(Resource::Pool(pool));
        Ok(pool)
    }

    pub(crate) fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> CheckResult<DevicePtr> {
        let ptr = self.driver.pool_alloc(pool, bytes, stream)?;
        self.track(Resource::Memory(ptr));
        Ok(ptr)
    }

    pub(crate) fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> CheckResult {
        self.untrack(Resource::Memory(ptr));
        Ok(self.driver.pool_free(ptr, stream)?)
    }
}

pub(crate) fn to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&chunk| u32::from_le_bytes(chunk)).collect()
}
