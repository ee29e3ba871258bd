//! The allocator under test: any kind of allocator, with settings, and decorators around it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use warpool::Instance;
use warpool::driver::sim::SimDriver;
use warpool::driver::{DeviceId, DevicePtr, Driver, Memory as _, StreamId};
use warpool::memory::decorate::{Decorator, Limited, Traced};
use warpool::memory::external::FnAllocator;
use warpool::memory::pools::Upstream;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::settings::{FreeBlockOrder, Reserve};
use warpool::memory::{
    CachingAllocator, DeviceAllocator, DeviceBlock, DriverPoolAllocator, PagedAllocator, PluggableAllocator, Settings,
};

use crate::context::Context;
use crate::machine::{Machine, Panics};
use crate::rng::Rng;

const MIB: u64 = 1 << 20;

/// Which kinds of allocators a program may draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocators {
    All,
    Caching,
    /// Without a limit, and with default settings.
    Paged,
}

/// The allocator under test.
pub struct Subject {
    /// The outermost one, which the program calls.
    pub allocator: Arc<dyn DeviceAllocator>,
    /// The caching allocator inside, if it is one.
    pub caching: Option<Arc<CachingAllocator>>,
    /// The paged allocator inside, if it is one.
    pub paged: Option<Arc<PagedAllocator>>,
    /// The decorator that limits, if there is one.
    pub limited: Option<Arc<Limited>>,
    /// The source of memory of an external allocator.
    pub external: Option<Arc<SimMemory>>,
}

impl Subject {
    /// Whether it has private pools, and with them captures. The driver's pool has none.
    pub fn has_pools(&self) -> bool {
        self.allocator.pools().is_ok()
    }

    pub fn draw(context: &mut Context, machine: &Machine, allocators: Allocators) -> Self {
        let (instance, rng) = (&machine.instance, &mut context.rng);
        let (kind, settings) = match allocators {
            Allocators::All => (rng.below(10), draw_settings(rng)),
            Allocators::Caching => (0, draw_settings(rng)),
            Allocators::Paged => (8, Settings::default()),
        };
        let mut subject =
            Self { allocator: placeholder(machine), caching: None, paged: None, limited: None, external: None };
        subject.allocator = match kind {
            0..6 => {
                let caching = Arc::new(CachingAllocator::new(instance, settings.clone()));
                subject.caching = Some(caching.clone());
                caching
            }
            6 => Arc::new(DriverPoolAllocator::with_settings(instance, settings.clone())),
            8.. => {
                let paged = Arc::new(draw_paged(rng, instance, settings.clone()));
                subject.paged = Some(paged.clone());
                paged
            }
            7 => {
                let memory = Arc::new(SimMemory::new(machine));
                subject.external = Some(memory.clone());
                let external = Arc::new(memory.external());
                Arc::new(PluggableAllocator::with_settings(instance, external, settings.clone()).unwrap())
            }
        };
        let decorator = rng.below(6);
        if decorator == 0 && allocators != Allocators::Paged {
            let limited = Arc::new(Limited::new(&subject.allocator, rng.pick(&[20, 100, 400]) * MIB));
            subject.limited = Some(limited.clone());
            subject.allocator = limited;
        }
        if decorator <= 1 {
            let panics = machine.panics.clone();
            subject.allocator = Arc::new(Traced::new(&subject.allocator, move |_, _| panics.pass()));
        }
        if context.broken {
            subject.allocator =
                Arc::new(Broken { inner: subject.allocator, calls: AtomicU64::new(0), last: Mutex::default() });
        }
        let names = ["caching", "driver pool", "external", "paged", "paged"];
        context.step(format!(
            "{} allocator, decorators {decorator}, {}",
            names[kind.saturating_sub(5)],
            settings.to_conf_string()
        ));
        subject
    }
}

/// Any allocator, until the real one is made.
fn placeholder(machine: &Machine) -> Arc<dyn DeviceAllocator> {
    Arc::new(DriverPoolAllocator::new(&machine.instance))
}

/// Settings that no settings string can give.
pub fn extreme_settings(rng: &mut Rng) -> Settings {
    let extreme = [0, 1, 1 << 40, u64::MAX];
    Settings {
        large_segment_bytes: rng.pick(&extreme),
        max_non_split_rounding_bytes: rng.pick(&extreme),
        max_split_bytes: rng.one_in(2).then(|| rng.pick(&extreme)),
        memory_cap_bytes: rng.one_in(2).then(|| rng.pick(&extreme)),
        expandable_segments: rng.one_in(2),
        expandable_segments_reserve: rng.one_in(2).then(|| Reserve::Bytes(rng.pick(&extreme))),
        garbage_collection_threshold: rng.pick(&[0.0, 1.0, 0.000_001]),
        ..draw_settings(rng)
    }
}

/// Settings of the device allocators.
pub fn draw_settings(rng: &mut Rng) -> Settings {
    let reserve = match rng.below(8) {
        0 => Some(Reserve::Bytes(64 * MIB)),
        1 => Some(Reserve::Fraction(0.5)),
        _ => None,
    };
    Settings {
        expandable_segments: rng.one_in(2),
        expandable_segments_reserve: reserve,
        graph_capture_record_stream_reuse: rng.one_in(2),
        max_split_bytes: rng.one_in(4).then(|| rng.pick(&[20, 30, 200]) * MIB),
        large_segment_bytes: rng.pick(&[20, 20, 20, 32, 64]) * MIB,
        garbage_collection_threshold: rng.pick(&[0.0, 0.0, 0.5, 0.9]),
        roundup_power2_divisions: [rng.pick(&[0, 0, 4]); 16],
        free_block_order: rng.pick(&FreeBlockOrder::ALL),
        per_process_memory_fraction: rng.pick(&[1.0, 1.0, 0.8]),
        throw_on_cudamalloc_oom: rng.one_in(6),
        ..Settings::default()
    }
}

/// A paged allocator which on devices this small has pages of several slots too.
pub fn draw_paged(rng: &mut Rng, instance: &Instance, settings: Settings) -> PagedAllocator {
    let paged = PagedAllocator::new(instance, settings).unwrap();
    let pairs_from = rng.pick(&[0, 60 * MIB, u64::MAX]);
    let fours_from = pairs_from.max(rng.pick(&[0, 120 * MIB, u64::MAX]));
    paged.set_page_sizes(pairs_from, fours_from);
    paged
}

/// An address that no upstream may return: a block there would wrap around the end of the address space.
const BAD: DevicePtr = DevicePtr(u64::MAX - 0xfff);

/// Memory of the driver for external allocators and upstreams. It keeps its own table.
pub struct SimMemory {
    driver: Arc<dyn Driver>,
    sim: Arc<SimDriver>,
    live: Mutex<BTreeMap<u64, u64>>,
    panics: Arc<Panics>,
}

impl SimMemory {
    pub fn new(machine: &Machine) -> Self {
        let (driver, sim, panics) = (machine.faulty.clone(), machine.sim.clone(), machine.panics.clone());
        Self { driver, sim, live: Mutex::default(), panics }
    }

    /// As the functions of an external allocator.
    fn external(self: &Arc<Self>) -> FnAllocator {
        let (allocates, frees) = (self.clone(), self.clone());
        FnAllocator::new(
            move |bytes, device, _| allocates.take(device, bytes),
            move |ptr, bytes, _, _| {
                if ptr == BAD {
                    return Ok(());
                }
                // An error would make the caller forget the memory: the faults are in the other calls.
                frees.give_back(ptr, bytes);
                frees.sim.mem_free(ptr)?;
                frees.panics.pass();
                Ok(())
            },
        )
    }

    fn take(&self, device: DeviceId, bytes: u64) -> warpool::Result<Option<DevicePtr>> {
        // Half of the armed calls misbehave, the others panic.
        if bytes.is_multiple_of(4 << 20) && self.panics.misbehaves() {
            return Ok(Some(BAD));
        }
        self.panics.pass();
        match self.driver.mem_alloc(device, bytes) {
            Ok(ptr) => {
                self.lock().insert(ptr.0, bytes);
                Ok(Some(ptr))
            }
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn give_back(&self, ptr: DevicePtr, bytes: u64) {
        assert_eq!(self.lock().remove(&ptr.0), Some(bytes), "memory at {ptr} that is freed, and its size");
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u64>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks at the end that everything was freed.
    pub fn check_empty(&self) {
        assert!(self.lock().is_empty(), "an external allocator or upstream still has {:x?}", self.lock());
    }
}

impl Upstream for SimMemory {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> warpool::Result<Option<DevicePtr>> {
        self.take(device, bytes)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, _: DeviceId, _: StreamId) -> warpool::Result<()> {
        self.panics.pass();
        if ptr == BAD {
            return Ok(());
        }
        // If this fails, the pool keeps the memory and frees it later.
        self.driver.mem_free(ptr)?;
        self.give_back(ptr, bytes);
        Ok(())
    }
}

/// Makes an owned block of an allocation that a program has allocated or restored.
#[expect(unsafe_code, reason = "the promise of `DeviceBlock::from_raw`")]
pub fn into_block(allocator: &Arc<dyn DeviceAllocator>, allocation: Allocation) -> DeviceBlock {
    // SAFETY: a program holds each of its allocations once: as it is, or as the block that is made here.
    unsafe { DeviceBlock::from_raw(allocator, allocation) }
}

/// A decorator with a defect: every 40th block is one that was returned before.
#[derive(Debug)]
struct Broken {
    inner: Arc<dyn DeviceAllocator>,
    calls: AtomicU64,
    last: Mutex<Option<Allocation>>,
}

#[expect(unsafe_code, reason = "the defect that programs have to find")]
// SAFETY: it breaks the promise on purpose. The memory is the simulated device's, and no typed memory is made from it.
unsafe impl Decorator for Broken {
    fn decorator_name(&self) -> &'static str {
        "broken"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn on_allocate(&self, request: Request) -> warpool::Result<Allocation> {
        let allocation = self.inner.allocate_raw(request)?;
        if allocation.ptr.is_null() {
            return Ok(allocation);
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let again = last.filter(|_| self.calls.fetch_add(1, Ordering::Relaxed) % 40 == 39);
        *last = Some(allocation);
        Ok(Allocation { ptr: again.map_or(allocation.ptr, |again| again.ptr), ..allocation })
    }
}
