//! Call stacks of another language: a hook, which the allocator calls where its history wants a stack, pushes the
//! frames of the calling thread one by one.
//!
//! No lock is held while the hook runs, and it may allocate and free: what it causes itself has no stack. Equal stacks
//! are kept once. A hook that was replaced is not running any more, and runs never again: an interpreter that is about
//! to end removes its hook first.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use rustc_hash::FxHashSet;
use warpool::memory::{Frame, Observers, Stack};

/// A function that pushes the frames of the calling thread, innermost first.
pub(crate) type Hook = extern "C" fn();

thread_local! {
    /// What the hook that is running on this thread has pushed.
    static GATHERED: RefCell<Option<Vec<Frame>>> = const { RefCell::new(None) };
}

/// The stacks that were gathered.
#[derive(Default)]
pub(crate) struct Stacks {
    kept: Mutex<Kept>,
    /// The hook as an address, null if there is none; the allocator may come with an earlier one, which is not called
    /// then.
    current: AtomicPtr<()>,
    /// How many threads are in a hook, or about to look whether it is the current one.
    running: AtomicUsize,
}

#[derive(Default)]
struct Kept {
    stacks: FxHashSet<Stack>,
    /// How many there may be before those that nobody has any more are dropped.
    limit: usize,
}

/// So many are kept before it is worth looking for those that nobody has.
const LIMIT_MIN: usize = 1024;

/// So long is waited for a hook that is running. In a child of `fork` the threads that ran it are gone and their count
/// is not.
const PATIENCE: Duration = Duration::from_secs(2);

impl Stacks {
    /// Has stacks gathered by `hook`, or by nobody. Returns when no other thread is in an earlier hook any more.
    pub(crate) fn set_hook(self: &Arc<Self>, observers: &Observers, hook: Option<Hook>) {
        self.current.store(address(hook), Ordering::SeqCst);
        let stacks = Arc::clone(self);
        observers.set_stack_hook(hook.map(|hook| {
            let gather = move || stacks.gather(hook).map(|frames| stacks.keep(frames));
            Arc::new(gather) as warpool::memory::StackHook
        }));
        // The hook itself may replace the hook: this thread is not waited for.
        let own = usize::from(GATHERED.try_with(|gathered| gathered.borrow().is_some()).unwrap_or(false));
        let start = Instant::now();
        while self.running.load(Ordering::SeqCst) > own && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// The stack of this thread, by `hook`, if that is still the one. Counted before it looks: whoever replaces the
    /// hook sees the count, or is seen here.
    fn gather(&self, hook: Hook) -> Option<Vec<Frame>> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let is_current = self.current.load(Ordering::SeqCst) == address(Some(hook));
        let frames = if is_current { gather(hook) } else { None };
        self.running.fetch_sub(1, Ordering::SeqCst);
        frames
    }

    /// The one copy of a stack.
    fn keep(&self, frames: Vec<Frame>) -> Stack {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stack) = kept.stacks.get(&frames[..]) {
            return Arc::clone(stack);
        }
        if kept.stacks.len() >= kept.limit.max(LIMIT_MIN) {
            kept.stacks.retain(|stack| Arc::strong_count(stack) > 1);
            kept.limit = kept.stacks.len() * 2;
        }
        let stack: Stack = frames.into();
        kept.stacks.insert(Arc::clone(&stack));
        stack
    }
}

impl fmt::Debug for Stacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "{} call stacks", kept.stacks.len())
    }
}

/// Adds a frame to what the hook that is running on this thread gathers; elsewhere it is nothing.
pub(crate) fn push(frame: Frame) {
    let _ = GATHERED.try_with(|gathered| {
        if let Some(frames) = &mut *gathered.borrow_mut() {
            frames.push(frame);
        }
    });
}

fn address(hook: Option<Hook>) -> *mut () {
    hook.map_or(ptr::null_mut(), |hook| hook as *mut ())
}

fn gather(hook: Hook) -> Option<Vec<Frame>> {
    let begun = GATHERED.try_with(|gathered| {
        let mut gathered = gathered.borrow_mut();
        gathered.is_none().then(|| *gathered = Some(Vec::new()))
    });
    begun.ok().flatten()?;
    hook();
    GATHERED.try_with(|gathered| gathered.borrow_mut().take()).ok().flatten().filter(|frames| !frames.is_empty())
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
        assert!(gather(nested).is_none());
        push(frame(2));
    }

    #[test]
    fn what_the_hook_causes_has_no_stack() {
        push(frame(0));
        assert_eq!(gather(nested).unwrap(), [frame(1), frame(2)]);
        assert!(GATHERED.with(|gathered| gathered.borrow().is_none()));
    }

    /// 1 once the hook runs, 2 when it is about to end.
    static SLOW: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn slow() {
        SLOW.store(1, Ordering::SeqCst);
        // Long enough that whoever does not wait is seen not to.
        thread::sleep(Duration::from_millis(50));
        push(frame(1));
        SLOW.store(2, Ordering::SeqCst);
    }

    #[test]
    fn a_removed_hook_has_ended_and_does_not_run_again() {
        let (stacks, observers) = (Arc::new(Stacks::default()), Observers::default());
        stacks.set_hook(&observers, Some(slow));
        thread::scope(|scope| {
            let gathering = scope.spawn(|| stacks.gather(slow));
            while SLOW.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            stacks.set_hook(&observers, None);
            assert_eq!(SLOW.load(Ordering::SeqCst), 2, "removed while it runs");
            assert_eq!(gathering.join().unwrap().unwrap(), [frame(1)]);
        });
        assert!(stacks.gather(slow).is_none());
    }

    #[test]
    fn equal_stacks_are_one_and_unused_ones_go() {
        let stacks = Stacks::default();
        let first = stacks.keep(vec![frame(7)]);
        assert!(Arc::ptr_eq(&first, &stacks.keep(vec![frame(7)])));
        for line in 0..5 * LIMIT_MIN as u64 {
            stacks.keep(vec![frame(line + 100)]);
        }
        let kept = stacks.kept.lock().unwrap();
        assert!(kept.stacks.len() <= LIMIT_MIN && kept.stacks.contains(&first));
    }
}
