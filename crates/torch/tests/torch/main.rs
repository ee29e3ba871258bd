//! Tests of `Runtime` on the simulated GPU, and of the shared object through C and C++ programs.

mod c_programs;
mod captures;
mod exceptions;
mod header;
mod runtime;
mod shared_object;
