//! Call stacks of another language, for the history. The allocator calls a hook where an entry needs a stack; the hook
//! pushes the frames of the calling thread one by one.
//!
//! The hook runs without locks held and may allocate and free; allocations inside the hook get no stack. Equal stacks
//! are stored once. After a hook is replaced it is not running and will not run again, so an interpreter can remove its
//! hook before it shuts down.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use rustc_hash::FxHashSet;
use warpool::memory::report::{Frame, Observers, Stack};

/// A function that pushes the frames of the calling thread with [`push`], innermost first.
pub(crate) type StackHook = extern "C" fn();

thread_local! {
    /// Frames pushed by the hook that is running on this thread; `None` while none is.
    static PUSHED: RefCell<Option<Vec<Frame>>> = const { RefCell::new(None) };
}

/// The stack hook and the stacks that it collected.
#[derive(Default)]
pub(crate) struct Stacks {
    interned: Mutex<Interned>,
    /// The address of the current hook, or null. The allocator may still call an earlier one, which is then skipped.
    current: AtomicPtr<()>,
    /// The number of threads that are in a hook, or about to check whether it is the current one.
    running: AtomicUsize,
}

/// One copy of each distinct stack.
#[derive(Default)]
struct Interned {
    stacks: FxHashSet<Stack>,
    /// At this many stacks, those without another reference are dropped.
    limit: usize,
}

/// Below this many stacks nothing is dropped.
const LIMIT_MIN: usize = 1024;

/// How long replacing a hook waits for a running one.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(2);

impl Stacks {
    /// Replaces the hook. On return no other thread runs an earlier hook, unless [`REPLACE_TIMEOUT`] has passed.
    pub(crate) fn set_hook(self: &Arc<Self>, observers: &Observers, hook: Option<StackHook>) {
        self.current.store(address(hook), Ordering::SeqCst);
        let stacks = Arc::clone(self);
        observers.set_stack_hook(hook.map(|hook| {
            let collect = move || stacks.collect(hook).map(|frames| stacks.intern(frames));
            Arc::new(collect) as warpool::memory::report::StackHook
        }));
        // A hook may replace itself: this thread is not waited for.
        let own = usize::from(PUSHED.try_with(|pushed| pushed.borrow().is_some()).unwrap_or(false));
        let start = Instant::now();
        while self.running.load(Ordering::SeqCst) > own && start.elapsed() < REPLACE_TIMEOUT {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// The stack of this thread by `hook`, if that is still the current one. `running` is incremented before the check:
    /// either `set_hook` sees the count, or this sees the new hook.
    fn collect(&self, hook: StackHook) -> Option<Vec<Frame>> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let is_current = self.current.load(Ordering::SeqCst) == address(Some(hook));
        let frames = if is_current { collect(hook) } else { None };
        self.running.fetch_sub(1, Ordering::SeqCst);
        frames
    }

    /// The shared copy of a stack.
    fn intern(&self, frames: Vec<Frame>) -> Stack {
        let mut interned = self.interned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stack) = interned.stacks.get(&frames[..]) {
            return Arc::clone(stack);
        }
        if interned.stacks.len() >= interned.limit.max(LIMIT_MIN) {
            interned.stacks.retain(|stack| Arc::strong_count(stack) > 1);
            interned.limit = interned.stacks.len() * 2;
        }
        let stack: Stack = frames.into();
        interned.stacks.insert(Arc::clone(&stack));
        stack
    }
}

impl fmt::Debug for Stacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let interned = self.interned.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "{} call stacks", interned.stacks.len())
    }
}

/// Adds a frame to the stack of the hook that is running on this thread; ignored outside a hook.
pub(crate) fn push(frame: Frame) {
    let _ = PUSHED.try_with(|pushed| {
        if let Some(frames) = &mut *pushed.borrow_mut() {
            frames.push(frame);
        }
    });
}

fn address(hook: Option<StackHook>) -> *mut () {
    hook.map_or(ptr::null_mut(), |hook| hook as *mut ())
}

/// Runs the hook, unless one is running on this thread already.
fn collect(hook: StackHook) -> Option<Vec<Frame>> {
    let begun = PUSHED.try_with(|pushed| {
        let mut pushed = pushed.borrow_mut();
        pushed.is_none().then(|| *pushed = Some(Vec::new()))
    });
    begun.ok().flatten()?;
    hook();
    PUSHED.try_with(|pushed| pushed.borrow_mut().take()).ok().flatten().filter(|frames| !frames.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(line: u64) -> Frame {
        Frame { name: "f".to_owned(), filename: "f.py".to_owned(), line }
    }

    extern "C" fn nested() {
        push(frame(1));
        // As if the hook had caused an allocation.
        assert!(collect(nested).is_none());
        push(frame(2));
    }

    #[test]
    fn allocations_inside_the_hook_have_no_stack() {
        push(frame(0));
        assert_eq!(collect(nested).unwrap(), [frame(1), frame(2)]);
        assert!(PUSHED.with(|pushed| pushed.borrow().is_none()));
    }

    /// 1 once the hook runs, 2 when it is about to return.
    static SLOW: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn slow() {
        SLOW.store(1, Ordering::SeqCst);
        // Long enough to show a replacement that does not wait.
        thread::sleep(Duration::from_millis(50));
        push(frame(1));
        SLOW.store(2, Ordering::SeqCst);
    }

    #[test]
    fn removed_hook_has_returned_and_does_not_run_again() {
        let (stacks, observers) = (Arc::new(Stacks::default()), Observers::default());
        stacks.set_hook(&observers, Some(slow));
        thread::scope(|scope| {
            let collecting = scope.spawn(|| stacks.collect(slow));
            while SLOW.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            stacks.set_hook(&observers, None);
            assert_eq!(SLOW.load(Ordering::SeqCst), 2, "removed while it runs");
            assert_eq!(collecting.join().unwrap().unwrap(), [frame(1)]);
        });
        assert!(stacks.collect(slow).is_none());
    }

    #[test]
    fn equal_stacks_are_shared_and_unused_ones_dropped() {
        let stacks = Stacks::default();
        let first = stacks.intern(vec![frame(7)]);
        assert!(Arc::ptr_eq(&first, &stacks.intern(vec![frame(7)])));
        for line in 0..5 * LIMIT_MIN as u64 {
            stacks.intern(vec![frame(line + 100)]);
        }
        let interned = stacks.interned.lock().unwrap();
        assert!(interned.stacks.len() <= LIMIT_MIN && interned.stacks.contains(&first));
    }
}
