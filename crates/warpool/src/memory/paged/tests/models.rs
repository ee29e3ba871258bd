//! The parts without a mutex, under many interleavings: the heaps by number, and the address space. The same source
//! files are built with `shuttle` in place of `sync/primitives.rs`.

#[path = "../address_space.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
#[expect(dead_code, reason = "the models use a part of it")]
mod address_space;
#[path = "../heaps.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, with other primitives")]
mod heaps;
/// In place of the heaps of streams.
mod heap {
    use shuttle::thread::yield_now;

    #[derive(Debug)]
    pub(super) struct Heap(u64);

    impl Heap {
        pub(super) fn new(value: u64) -> Self {
            Self(value)
        }

        pub(super) fn get(&self) -> u64 {
            self.0
        }

        /// In two steps: a lost update would show.
        pub(super) fn add(&mut self, by: u64) {
            let before = self.0;
            yield_now();
            self.0 = before + by;
        }
    }
}

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use warpool_driver::DevicePtr;
use warpool_driver::sim::{SimConfig, SimDriver};

use self::address_space::{AddressSpace, Location};
use self::heap::Heap;
use self::heaps::Heaps;
use crate::Instance;
use crate::memory::SegmentKind;
use crate::memory::paged::ids::{HeapId, RangeInHeap};
use crate::sync::tests::models::{check, primitives as sync, spin_lock};

/// Threads see a heap whole as soon as it is counted, and may use it while others are added.
#[test]
fn heaps_can_be_read_while_others_are_added() {
    check(|| {
        let heaps = Arc::new(Heaps::new());
        assert_eq!(heaps.push(Heap::new(100)), HeapId(0));
        let reader = {
            let heaps = Arc::clone(&heaps);
            thread::spawn(move || {
                for (number, heap) in heaps.iter() {
                    assert_eq!(heap.lock().get() / 100, u64::from(number.0) + 1);
                }
                assert!(heaps.try_get(HeapId(7)).is_none());
            })
        };
        assert_eq!(heaps.push(Heap::new(200)), HeapId(1));
        heaps.get(HeapId(0)).lock().add(1);
        reader.join().unwrap();
        assert_eq!(heaps.len(), 2);
    });
}

/// An address that a thread has been given is found by it, whatever other ranges are reserved meanwhile.
#[test]
fn an_address_is_found_by_whoever_has_it() {
    check(|| {
        let sim = SimDriver::new(SimConfig::default().with_capacity(64 << 20));
        let instance = Instance::new(Arc::new(sim)).unwrap();
        let space = Arc::new(AddressSpace::new(64 << 20));
        let given = Arc::new(AtomicU64::new(0));
        let place = |heap: u32| Location { heap: HeapId(heap), kind: SegmentKind::Large, range: RangeInHeap(0) };
        let reader = {
            let (space, given) = (Arc::clone(&space), Arc::clone(&given));
            thread::spawn(move || {
                let ptr = DevicePtr(given.load(Ordering::Acquire));
                let found = space.locate(ptr);
                assert_eq!(found, (ptr.0 > 0).then_some(place(5)), "{ptr}");
            })
        };
        let (first, bytes) = space.reserve(&instance, 1).unwrap().unwrap();
        space.assign(first, bytes, place(5));
        given.store(first + 512, Ordering::Release);
        // More than is left of the first arena.
        let (second, bytes) = space.reserve(&instance, 8 << 30).unwrap().unwrap();
        space.assign(second, bytes, place(6));
        assert_eq!(space.locate(DevicePtr(second)), Some(place(6)));
        reader.join().unwrap();
    });
}
