//! A guard that forbids TF32 on the calling thread.

use std::cell::Cell;
use std::marker::PhantomData;
use std::rc::Rc;

thread_local! {
    /// How many guards this thread holds.
    static GUARDS: Cell<u32> = const { Cell::new(0) };
}

/// Forbids TF32 in every [`Blas`](super::Blas) for the calling thread, until the guard is dropped. Guards nest.
#[must_use = "dropping the guard allows TF32 again"]
pub fn forbid_tf32() -> Tf32Guard {
    let counted = GUARDS.try_with(|guards| guards.set(guards.get() + 1)).is_ok();
    Tf32Guard { counted, _not_send: PhantomData }
}

/// Whether the calling thread holds a guard.
#[must_use]
pub fn is_tf32_forbidden() -> bool {
    GUARDS.try_with(|guards| guards.get() > 0).unwrap_or(false)
}

/// While it is held, its thread multiplies without TF32. See [`forbid_tf32`].
///
/// ```compile_fail,E0277
/// let guard = warpool::blas::forbid_tf32();
/// std::thread::spawn(move || drop(guard)); // it stays on its thread
/// ```
#[derive(Debug)]
pub struct Tf32Guard {
    /// `false` if the thread-local variable was already destroyed.
    counted: bool,
    _not_send: PhantomData<Rc<()>>,
}

impl Drop for Tf32Guard {
    fn drop(&mut self) {
        if self.counted {
            let _ = GUARDS.try_with(|guards| guards.set(guards.get() - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_nest_and_stay_on_their_thread() {
        assert!(!is_tf32_forbidden());
        let outer = forbid_tf32();
        let inner = forbid_tf32();
        drop(outer);
        assert!(is_tf32_forbidden());
        assert!(!std::thread::spawn(is_tf32_forbidden).join().unwrap());
        drop(inner);
        assert!(!is_tf32_forbidden());
    }
}
