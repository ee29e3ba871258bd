//! Call stacks that PyTorch collects and symbolizes itself. Here a stack is an opaque context: a [`Stack`] with one
//! frame whose line is its address.
//!
//! A context is released when no history entry, block or segment refers to it any more. That is checked from time to
//! time: when the number of contexts has doubled since the last check, and when the history is switched.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use warpool::memory::report::{Frame, Observers, Stack};

/// Collects the context of the calling thread; NULL if there is none.
pub(crate) type CollectContext = unsafe extern "C" fn() -> *mut c_void;

/// Releases a context.
pub(crate) type ReleaseContext = unsafe extern "C" fn(context: *mut c_void);

/// The contexts that are alive.
#[derive(Debug, Default)]
pub(crate) struct Contexts(Mutex<Collected>);

#[derive(Debug, Default)]
struct Collected {
    stacks: Vec<(Stack, ReleaseContext)>,
    /// At this many, those without another reference are released.
    limit: usize,
}

/// Below this many contexts nothing is released.
const LIMIT_MIN: usize = 4096;

impl Contexts {
    /// Collects contexts for the history from here on; `None`: no more.
    ///
    /// # Safety
    /// Any thread may call the functions at any time, and `release` once with what `collect` returned.
    pub(crate) unsafe fn set_recorder(
        self: &Arc<Self>,
        observers: &Observers,
        recorder: Option<(CollectContext, ReleaseContext)>,
    ) {
        let contexts = Arc::clone(self);
        observers.set_stack_hook(recorder.map(|(collect, release)| {
            let collect = move || contexts.collect(collect, release);
            Arc::new(collect) as warpool::memory::report::StackHook
        }));
        self.release_unused(0);
    }

    fn collect(&self, collect: CollectContext, release: ReleaseContext) -> Option<Stack> {
        // SAFETY: callable by the contract of `set_recorder`.
        let context = unsafe { collect() };
        if context.is_null() {
            return None;
        }
        let line = context.expose_provenance() as u64;
        let stack: Stack = Arc::new([Frame { name: String::new(), filename: String::new(), line }]);
        let (count, limit) = {
            let mut collected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            collected.stacks.push((Arc::clone(&stack), release));
            (collected.stacks.len(), collected.limit.max(LIMIT_MIN))
        };
        if count >= limit {
            self.release_unused(limit);
        }
        Some(stack)
    }

    /// Releases contexts that nothing refers to any more, if there are at least `limit` contexts.
    fn release_unused(&self, limit: usize) {
        let mut unused = Vec::new();
        {
            let mut collected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if collected.stacks.len() < limit {
                return;
            }
            unused.extend(collected.stacks.extract_if(.., |(stack, _)| Arc::strong_count(stack) == 1));
            collected.limit = 2 * collected.stacks.len();
        }
        for (stack, release) in unused {
            // SAFETY: `collect` returned it, and nothing else refers to it.
            unsafe { release(context_of(&stack)) };
        }
    }
}

/// The context of a stack; null if it has none.
pub(crate) fn context_of(stack: &Stack) -> *mut c_void {
    match &stack[..] {
        [Frame { name, filename, line }] if name.is_empty() && filename.is_empty() => {
            std::ptr::with_exposed_provenance_mut(*line as usize)
        }
        _ => std::ptr::null_mut(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    static COLLECTED: AtomicUsize = AtomicUsize::new(0);
    static RELEASED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn collect() -> *mut c_void {
        std::ptr::without_provenance_mut(COLLECTED.fetch_add(1, Ordering::Relaxed) + 1)
    }

    unsafe extern "C" fn release(_context: *mut c_void) {
        RELEASED.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn contexts_without_a_reference_are_released() {
        let (contexts, observers) = (Arc::new(Contexts::default()), Observers::default());
        let kept: Vec<Stack> = (0..10).filter_map(|_| contexts.collect(collect, release)).collect();
        assert_eq!(context_of(&kept[3]).addr(), 4);
        for _ in 0..10 * LIMIT_MIN {
            contexts.collect(collect, release);
        }
        assert!(RELEASED.load(Ordering::Relaxed) > 8 * LIMIT_MIN, "they are not kept");
        // SAFETY: both functions may be called at any time.
        unsafe { contexts.set_recorder(&observers, None) };
        assert_eq!(COLLECTED.load(Ordering::Relaxed) - RELEASED.load(Ordering::Relaxed), kept.len());
        drop(kept);
        contexts.release_unused(0);
        assert_eq!(COLLECTED.load(Ordering::Relaxed), RELEASED.load(Ordering::Relaxed));
    }
}
