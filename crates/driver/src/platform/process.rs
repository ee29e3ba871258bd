//! This process: its id, and what happens in a forked child of it.

/// The id of this process; 0 where there are no processes.
#[cfg(feature = "sim")]
pub(crate) fn id() -> u32 {
    if cfg!(all(target_family = "wasm", target_os = "unknown")) { 0 } else { std::process::id() }
}

/// Calls `handler` in every child that this process forks from now on. Does nothing where processes cannot be forked.
/// The handler may only do what a signal handler may.
#[cfg(all(unix, not(miri)))]
pub(crate) fn in_forked_child(handler: extern "C" fn()) {
    use std::ffi::c_int;

    type Handler = Option<extern "C" fn()>;

    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }

    // SAFETY: as POSIX declares it. If the registration fails for lack of memory, a fork is not detected.
    let _ = unsafe { pthread_atfork(None, None, Some(handler)) };
}

/// Calls `handler` in every child that this process forks: there is none.
#[cfg(not(all(unix, not(miri))))]
pub(crate) fn in_forked_child(_handler: extern "C" fn()) {}
