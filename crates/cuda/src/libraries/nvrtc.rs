//! NVRTC, the compiler for CUDA C++ source. Loaded with the first kernels, so that everything else works on a machine
//! without the toolkit.
//!
//! The source is compiled to PTX for the device's architecture, which the driver compiles further; this also works for
//! kernels that set a conditional node's flag. If the compiler is too new for the driver, it compiles to a binary.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use cudarc::nvrtc::sys::{self, nvrtcProgram};

use crate::shared_library::{MissingLibrary, MissingSymbol, SharedLibrary, toolkit_candidates};

/// The file names of NVRTC, the newest first.
pub(crate) const NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Declares the functions, with cudarc's signatures but a plain number as the result.
macro_rules! nvrtc {
    ($($field:ident: $symbol:ident($($arg:ty),*);)*) => {
        /// The compiler's functions.
        pub(crate) struct Nvrtc {
            $($field: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Nvrtc {
            fn resolve(library: &SharedLibrary) -> Result<Self, MissingSymbol> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the binding's, which `SIGNATURES` checks.
                        unsafe { library.require(stringify!($symbol)) }?
                    },)*
                })
            }
        }

        /// Compares each signature with cudarc's. Never called; it only has to compile.
        const SIGNATURES: () = { $(let _: unsafe fn($($arg),*) -> sys::nvrtcResult = sys::$symbol;)* };
        const _: () = SIGNATURES;
    };
}

nvrtc! {
    create: nvrtcCreateProgram(
        *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    destroy: nvrtcDestroyProgram(*mut nvrtcProgram);
    compile: nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    log_size: nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    log: nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
    ptx_size: nvrtcGetPTXSize(nvrtcProgram, *mut usize);
    ptx: nvrtcGetPTX(nvrtcProgram, *mut c_char);
    cubin_size: nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
    cubin: nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    arch_count: nvrtcGetNumSupportedArchs(*mut c_int);
    archs: nvrtcGetSupportedArchs(*mut c_int);
}

/// Why the compiler cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unavailable {
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    #[error(transparent)]
    Symbol(#[from] MissingSymbol),
}

/// What to compile to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// PTX, which the driver compiles further.
    Ptx,
    /// A binary for exactly this architecture.
    Cubin,
}

/// A failed compilation, with the compiler's log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CompileError(pub(crate) String);

impl Nvrtc {
    /// Loads the compiler.
    pub(crate) fn load() -> Result<Self, Unavailable> {
        let library = SharedLibrary::open("libnvrtc", &toolkit_candidates(NAMES))?;
        Ok(Self::resolve(&library)?)
    }

    /// Compiles `source` for a compute capability. The result ends with a 0, as the driver requires for PTX.
    pub(crate) fn compile(
        &self,
        name: &str,
        source: &str,
        capability: (u32, u32),
        target: Target,
    ) -> Result<Vec<u8>, CompileError> {
        let program = Program::new(self, name, source)?;
        let option = architecture_option(capability, target, &self.supported());
        let option = CString::new(option).map_err(|_| CompileError("an option contains a 0".to_owned()))?;
        let options = [option.as_ptr()];
        // SAFETY: the program is live; NVRTC reads one option, which ends with a 0.
        let code = unsafe { (self.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
        if code != 0 {
            let log = program.read(self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches('\0').trim();
            return Err(CompileError(format!("{name}: NVRTC error {code}: {log}")));
        }
        let image = match target {
            Target::Ptx => program.read(self.ptx_size, self.ptx),
            Target::Cubin => program.read(self.cubin_size, self.cubin),
        };
        let mut image = image.map_err(|code| CompileError(format!("{name}: NVRTC error {code}: no output")))?;
        image.push(0);
        Ok(image)
    }

    /// The architectures that this compiler supports, as numbers like 90; empty if it does not report them.
    fn supported(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: NVRTC writes the number to `count`.
        let code = unsafe { (self.arch_count)(&raw mut count) };
        if code != 0 || count <= 0 {
            return Vec::new();
        }
        let mut archs = vec![0; count.unsigned_abs() as usize];
        // SAFETY: the array has as many elements as NVRTC reported.
        let code = unsafe { (self.archs)(archs.as_mut_ptr()) };
        if code == 0 { archs.into_iter().map(c_int::unsigned_abs).collect() } else { Vec::new() }
    }
}

/// The option for the architecture. PTX for an older one runs on a newer device, so a compiler that does not support
/// the device's architecture compiles for the newest older one.
fn architecture_option((major, minor): (u32, u32), target: Target, supported: &[u32]) -> String {
    let architecture = major * 10 + minor;
    match target {
        Target::Cubin => format!("--gpu-architecture=sm_{architecture}"),
        Target::Ptx => {
            let nearest = supported.iter().copied().filter(|&arch| arch <= architecture).max();
            format!("--gpu-architecture=compute_{}", nearest.unwrap_or(architecture))
        }
    }
}

/// A program; destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: nvrtcProgram,
}

/// A function that reports a size, and one that writes that many bytes.
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32;
type Fill = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32;

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, name: &str, source: &str) -> Result<Self, CompileError> {
        let source = CString::new(source).map_err(|_| CompileError(format!("{name}: the source contains a 0")))?;
        let file = CString::new(format!("{name}.cu")).unwrap_or_else(|_| CString::from(c"kernels.cu"));
        let mut raw = ptr::null_mut();
        // SAFETY: source and name end with a 0 and are copied; there are no headers; NVRTC writes the handle to `raw`.
        let code =
            unsafe { (nvrtc.create)(&raw mut raw, source.as_ptr(), CStr::as_ptr(&file), 0, ptr::null(), ptr::null()) };
        if code == 0 { Ok(Self { nvrtc, raw }) } else { Err(CompileError(format!("{name}: NVRTC error {code}"))) }
    }

    /// Reads an output: its size, then its bytes.
    fn read(&self, size: Size, fill: Fill) -> Result<Vec<u8>, u32> {
        let mut bytes = 0;
        // SAFETY: the program is live; NVRTC writes the number to `bytes`.
        let code = unsafe { size(self.raw, &raw mut bytes) };
        if code != 0 {
            return Err(code);
        }
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that NVRTC reported.
        let code = unsafe { fill(self.raw, buffer.as_mut_ptr().cast()) };
        if code == 0 { Ok(buffer) } else { Err(code) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed only here.
        let code = unsafe { (self.nvrtc.destroy)(&raw mut self.raw) };
        if code != 0 {
            tracing::warn!("an NVRTC program could not be destroyed: error {code}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_the_devices_or_the_newest_older_one() {
        let option = |capability, target, supported: &[u32]| architecture_option(capability, target, supported);
        assert_eq!(option((9, 0), Target::Ptx, &[75, 80, 90, 100]), "--gpu-architecture=compute_90");
        assert_eq!(option((12, 1), Target::Ptx, &[75, 80, 90, 100]), "--gpu-architecture=compute_100");
        assert_eq!(option((8, 6), Target::Ptx, &[]), "--gpu-architecture=compute_86");
        assert_eq!(option((9, 0), Target::Cubin, &[75]), "--gpu-architecture=sm_90");
    }

    #[test]
    fn the_compiler_works_or_reports_what_is_missing() {
        match Nvrtc::load() {
            Err(unavailable) => assert!(unavailable.to_string().contains("libnvrtc"), "{unavailable}"),
            Ok(nvrtc) => {
                let text = "extern \"C\" __global__ void nothing() {}";
                let ptx = nvrtc.compile("nothing", text, (9, 0), Target::Ptx).expect("it is correct");
                assert!(String::from_utf8_lossy(&ptx).contains(".entry nothing"));
                let CompileError(log) = nvrtc.compile("wrong", "oops", (9, 0), Target::Ptx).expect_err("it is not");
                assert!(log.contains("wrong.cu"), "{log}");
            }
        }
    }
}
