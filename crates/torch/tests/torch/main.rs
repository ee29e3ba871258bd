//! Tests of `Runtime` on the simulated GPU, and of the shared object through C and C++ programs.

/// Tests that hold for every allocator of our own, each in a module of its name.
macro_rules! with_each_backend {
    ($($test:ident),* $(,)?) => {
        mod native { $(#[test] fn $test() { super::$test("backend:native") })* }
        mod expandable { $(#[test] fn $test() { super::$test("backend:expandable") })* }
        mod paged { $(#[test] fn $test() { super::$test("backend:paged") })* }
    };
}

mod c_programs;
mod captures;
mod elastic;
mod exceptions;
mod header;
#[cfg(target_os = "linux")]
mod publish;
mod runtime;
mod shared_object;
mod sleep;
