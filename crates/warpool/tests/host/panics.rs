//! Panics of user code: host callbacks, trackers, stack hooks, pressure callbacks, trim hooks. Whichever call panics,
//! nothing is leaked: the counts are right, everything can be closed, and nothing hangs. Issue 12.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use warpool::memory::HostBlock;
use warpool::memory::report::{Action, HistoryOptions, StackLevel};

use super::context::{KIB, MIB, TestContext};

/// Panics without a message, because the panic is expected.
fn panic_on_purpose() -> ! {
    resume_unwind(Box::new("on purpose"))
}

/// Whether `act` panicked.
fn panics<R>(act: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(act)).is_err()
}

#[test]
fn a_host_callback_that_panics_does_not_disturb_closing() {
    for when_closed in [false, true] {
        let context = TestContext::new("");
        let stream = context.stream();
        let block = context.alloc(3 * MIB);
        context.upload(&block, &stream);
        stream.host_callback(|| panic_on_purpose()).unwrap();
        context.free(block);
        if !when_closed {
            stream.synchronize().unwrap();
            context.trim(0);
        }
        context.finish();
    }
}

/// Everything that calls a tracker: a plain block, one that a stream used, one that a graph pool would, a large one.
fn scenario(context: &TestContext) -> usize {
    let mut panicked = 0;
    let mut attempt = |act: &mut dyn FnMut()| panicked += usize::from(panics(act));
    let stream = context.stream();
    for round in 0..3 {
        let blocks: Vec<Option<HostBlock>> = [KIB, 300 * KIB, 3 * MIB, KIB]
            .into_iter()
            .map(|bytes| {
                let mut block = None;
                attempt(&mut || block = Some(context.pinned.allocate(bytes).unwrap()));
                block
            })
            .collect();
        for (index, mut block) in blocks.into_iter().enumerate() {
            if let Some(block) = block.as_ref().filter(|_| index % 2 == 0) {
                context.upload(block, &stream);
            }
            attempt(&mut || match block.take() {
                Some(block) if round == 1 => block.free().unwrap(),
                block => drop(block),
            });
            context.pinned.check();
        }
        stream.synchronize().unwrap();
        attempt(&mut || context.pinned.process_pending().unwrap());
        attempt(&mut || _ = context.pinned.trim(MIB).unwrap());
        context.pinned.check();
    }
    panicked
}

#[test]
fn a_tracker_that_panics_loses_nothing() {
    for action in Action::ALL {
        for settings in ["", "pinned_use_background_threads:True", "pinned_max_cached_size_mb:1"] {
            let context = TestContext::new(settings);
            let called = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&called);
            let tracker = Arc::new(move |_, _: &_| {
                count.fetch_add(1, Ordering::Relaxed);
                panic_on_purpose();
            });
            let id = context.pinned.observers().attach_tracker(&[action], tracker);
            let panicked = scenario(&context);
            if settings.is_empty() {
                assert_eq!(panicked > 0, called.load(Ordering::Relaxed) > 0, "{action:?}: panics reach the caller");
            }
            assert!(context.pinned.observers().detach(id));
            context.pinned.process_pending().unwrap();
            if settings.contains("background") {
                // The thread may be in the middle of a free; closing waits for it.
                context.finish();
                continue;
            }
            let stats = context.stats();
            assert_eq!((stats.active_requests.current, stats.active_bytes.current), (0, 0), "{action:?}, {settings}");
            assert_eq!(stats.allocated_bytes.current, stats.cached_bytes, "{action:?}, {settings}");
            context.finish();
        }
    }
}

#[test]
fn closing_unpins_everything_also_if_a_tracker_panics() {
    let context = TestContext::new("");
    drop([KIB, 3 * MIB, 9 * MIB].map(|bytes| context.alloc(bytes)));
    let tracker = Arc::new(|_, _: &_| panic_on_purpose());
    context.pinned.observers().attach_tracker(&[Action::SegmentFree], tracker);
    let TestContext { sim, pinned, .. } = context;
    assert!(panics(|| pinned.close()));
    assert_eq!(sim.object_counts().pinned, 0);
}

#[test]
fn a_stack_hook_that_panics_loses_nothing() {
    let context = TestContext::new("");
    let options = HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() };
    context.pinned.record_history(Some(options));
    let (armed, stream) = (Arc::new(AtomicBool::new(false)), context.stream());
    let panics_now = Arc::clone(&armed);
    context.pinned.observers().set_stack_hook(Some(Arc::new(move || {
        if panics_now.load(Ordering::Relaxed) { panic_on_purpose() } else { None }
    })));
    let [plain, used, dropped] = [KIB, 2 * KIB, 3 * MIB].map(|bytes| context.alloc(bytes));
    context.upload(&used, &stream);
    armed.store(true, Ordering::Relaxed);
    assert!(panics(|| context.pinned.allocate(KIB)));
    assert!(panics(|| plain.free()) && panics(|| used.free()) && panics(|| drop(dropped)));
    armed.store(false, Ordering::Relaxed);
    stream.synchronize().unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!(context.stats().active_requests.current, 0);
    context.finish();
}

#[test]
fn callbacks_for_lack_of_memory_and_before_a_trim_may_panic() {
    let context = TestContext::new("pinned_cap_mb:4");
    let pressure = context.pinned.observers().attach_pressure_callback(Arc::new(|_| panic_on_purpose()));
    let trim = context.pinned.observers().attach_trim_hook(Arc::new(|_| panic_on_purpose()));
    let block = context.alloc(3 * MIB);
    assert!(panics(|| context.pinned.allocate(2 * MIB)) && panics(|| context.pinned.trim(0)));
    context.pinned.check();
    assert!(context.pinned.observers().detach(pressure) && context.pinned.observers().detach(trim));
    assert_eq!(context.refused_by_cap(2 * MIB).bytes_pinned, 3 * MIB);
    drop(block);
    assert_eq!(context.trim(0), 3 * MIB);
    context.finish();
}
