//! Host code of the program that runs inside the simulation: host callbacks and host implementations of kernels. It
//! must not call the driver.

use std::cell::Cell;

thread_local! {
    static IN_HOST_CODE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is running host code of the program.
pub fn in_host_code() -> bool {
    IN_HOST_CODE.get()
}

/// Runs host code of the program. `body` must not panic.
pub fn run_host_code<T>(body: impl FnOnce() -> T) -> T {
    let before = IN_HOST_CODE.replace(true);
    let outcome = body();
    IN_HOST_CODE.set(before);
    outcome
}
