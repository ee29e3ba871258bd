//! NVIDIA's libraries: finding and loading them, their handles, cuBLAS, the compiler.

mod blas;
mod functions;
mod handles;
mod installed;
mod loader;
mod nvrtc;
mod status;

pub use installed::{FoundLibrary, LibraryStatus, libraries};
pub use loader::{MissingLibrary, MissingSymbol};

pub(crate) use functions::LoadedLibraries;
#[cfg(test)]
pub(crate) use functions::{CublasFunctions, LibraryFunctions, RawLibraryHandle};
pub(crate) use handles::LibraryHandle;
pub(crate) use loader::{SharedLibrary, driver_candidates};
pub(crate) use nvrtc::{Nvrtc, Target, Unavailable};
