//! A plug for tests: memory from the simulated device, every call written down, and everything that is freed compared
//! with what was given.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use warpool::Result;
use warpool::driver::{DeviceId, DevicePtr, Driver};
use warpool::memory::{BaseAllocation, FnAllocator, MemPoolId, RawStream};

/// What a plug gave, and to whom.
pub type Given = (u64, DeviceId, RawStream);

/// What is written down, shared with the closures.
pub struct Notebook {
    driver: Arc<dyn Driver>,
    pub words: Mutex<Vec<String>>,
    live: Mutex<BTreeMap<u64, Given>>,
    /// How many bytes there are.
    pub capacity: AtomicU64,
    /// Panic at the next call.
    pub panics: AtomicBool,
    /// Give nothing back to the driver: its free waits for the device, and so for streams that are held.
    pub keeps: AtomicBool,
}

impl Notebook {
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self {
            driver,
            words: Mutex::default(),
            live: Mutex::default(),
            capacity: AtomicU64::new(u64::MAX),
            panics: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
        })
    }

    /// Two closures around the driver's plain calls.
    pub fn plug(self: &Arc<Self>) -> FnAllocator {
        let (gives, takes) = (Arc::clone(self), Arc::clone(self));
        FnAllocator::new(
            move |bytes, device, stream| gives.give(bytes, device, stream),
            move |ptr, bytes, device, stream| takes.take(ptr, bytes, device, stream),
        )
    }

    /// The same with a closure for every hook, which takes care of other streams by doing nothing.
    pub fn plug_with_hooks(self: &Arc<Self>) -> FnAllocator {
        let book = || Arc::clone(self);
        let (init, reset, fraction, base, record) = (book(), book(), book(), book(), book());
        let (begin, end, release) = (book(), book(), book());
        let named = |what: &'static str, book: Arc<Self>| {
            move |device: DeviceId, pool: MemPoolId| book.write(format!("{what} {pool} on {device}"))
        };
        self.plug()
            .on_init(move |count| {
                init.write(format!("init {count}"));
                Ok(())
            })
            .on_reset(move || reset.write("reset".into()))
            .on_memory_fraction(move |share, device| fraction.write(format!("fraction {share} of {device}")))
            .on_base_allocation(move |ptr| {
                base.write(format!("base of {ptr}"));
                Some(BaseAllocation { ptr: DevicePtr(ptr.0 & !0xff), bytes: None })
            })
            .on_record_stream(move |ptr, stream| record.write(format!("{ptr} used by {}", stream.id)))
            .on_begin_pool(named("begin", begin))
            .on_end_pool(named("end", end))
            .on_release_pool(named("release", release))
    }

    pub fn write(&self, word: String) {
        assert!(!self.panics.swap(false, Ordering::SeqCst), "the plug panics, as it was told to");
        lock(&self.words).push(word);
    }

    /// What was written down since this was last asked.
    pub fn read(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.words))
    }

    /// What it gave and has not got back, by address.
    pub fn live(&self) -> BTreeMap<u64, Given> {
        lock(&self.live).clone()
    }

    pub fn bytes_live(&self) -> u64 {
        lock(&self.live).values().map(|given| given.0).sum()
    }

    fn give(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        self.write(format!("give {bytes}"));
        assert_eq!(self.driver.stream_handle(stream.id).unwrap().raw, stream.raw, "the stream's own handle");
        if self.bytes_live().saturating_add(bytes) > self.capacity.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let given = self.driver.mem_alloc(device, bytes).ok();
        if let Some(ptr) = given {
            let before = lock(&self.live).insert(ptr.0, (bytes, device, stream));
            assert_eq!(before, None, "the driver gave {ptr} twice");
        }
        Ok(given)
    }

    fn take(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        let given = lock(&self.live).remove(&ptr.0);
        let (given_bytes, given_device, given_stream) = given.expect("what comes back was given, and once");
        assert_eq!((bytes, device), (given_bytes, given_device), "as it was given");
        let gone = self.driver.stream_handle(given_stream.id).is_err();
        assert!(gone || stream == given_stream, "{ptr} was given for {given_stream:?} and comes back for {stream:?}");
        if !self.keeps.load(Ordering::SeqCst) {
            self.driver.mem_free(ptr)?;
        }
        self.write(format!("take {bytes}"));
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
