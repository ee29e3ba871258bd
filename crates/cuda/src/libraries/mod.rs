//! NVIDIA's libraries: their functions and handles, cuBLAS, the compiler, and which are installed.

mod blas;
mod functions;
mod handles;
mod installed;
mod nvrtc;
mod status;

pub use installed::{FoundLibrary, LibraryStatus, libraries};

pub(crate) use functions::LoadedLibraries;
#[cfg(test)]
pub(crate) use functions::{CublasFunctions, LibraryFunctions, RawLibraryHandle};
pub(crate) use handles::LibraryHandle;
pub(crate) use nvrtc::{Nvrtc, Target, Unavailable};
