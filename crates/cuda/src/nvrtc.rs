//! NVRTC, the compiler for CUDA C++ text. Loaded when the first kernels are, so that a machine without the toolkit can
//! do all the rest.
//!
//! The text becomes PTX for the device's architecture, which the driver turns into code: that was seen to work also for
//! kernels that set a conditional node's flag. Where the compiler is newer than the driver understands, a finished
//! binary is the way out.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use cudarc::nvrtc::sys::{self, nvrtcProgram};

use crate::library::{Loaded, MissingLibrary, MissingSymbol, toolkit_candidates};

/// The names that NVRTC goes by, the newest first.
pub(crate) const NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Declares the functions, with cudarc's signatures but a plain number as the result.
macro_rules! nvrtc {
    ($($field:ident: $symbol:ident($($arg:ty),*);)*) => {
        /// The compiler's functions.
        pub(crate) struct Nvrtc {
            $($field: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Nvrtc {
            fn resolve(library: &Loaded) -> Result<Self, MissingSymbol> {
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
    /// Text that the driver compiles further.
    Ptx,
    /// A binary for exactly this architecture.
    Cubin,
}

/// The text could not be compiled; what the compiler says about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CompileError(pub(crate) String);

impl Nvrtc {
    /// Loads the compiler.
    pub(crate) fn load() -> Result<Self, Unavailable> {
        let library = Loaded::open("libnvrtc", &toolkit_candidates(NAMES))?;
        Ok(Self::resolve(&library)?)
    }

    /// Compiles `text` for a compute capability. The result ends with a 0, as the driver wants it of PTX.
    pub(crate) fn compile(
        &self,
        name: &str,
        text: &str,
        capability: (u32, u32),
        target: Target,
    ) -> Result<Vec<u8>, CompileError> {
        let program = Program::new(self, name, text)?;
        let option = architecture_option(capability, target, &self.supported());
        let option = CString::new(option).map_err(|_| CompileError("an option holds a 0".to_owned()))?;
        let options = [option.as_ptr()];
        // SAFETY: the program is live; one option, which ends with a 0, is read.
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
        let mut image = image.map_err(|code| CompileError(format!("{name}: NVRTC error {code}: no code came out")))?;
        image.push(0);
        Ok(image)
    }

    /// The architectures that this compiler knows, as numbers like 90; none if it does not say.
    fn supported(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: `count` takes the number.
        let code = unsafe { (self.arch_count)(&raw mut count) };
        if code != 0 || count <= 0 {
            return Vec::new();
        }
        let mut archs = vec![0; count.unsigned_abs() as usize];
        // SAFETY: the array has room for as many as the compiler said.
        let code = unsafe { (self.archs)(archs.as_mut_ptr()) };
        if code == 0 { archs.into_iter().map(c_int::unsigned_abs).collect() } else { Vec::new() }
    }
}

/// The option that names the architecture. PTX for an older one runs on a newer device, so a compiler that does not
/// know the device's makes that for the newest that it knows.
fn architecture_option((major, minor): (u32, u32), target: Target, supported: &[u32]) -> String {
    let wanted = major * 10 + minor;
    match target {
        Target::Cubin => format!("--gpu-architecture=sm_{wanted}"),
        Target::Ptx => {
            let nearest = supported.iter().copied().filter(|&arch| arch <= wanted).max();
            format!("--gpu-architecture=compute_{}", nearest.unwrap_or(wanted))
        }
    }
}

/// A program under compilation; destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: nvrtcProgram,
}

/// A function that tells a size, and one that fills as many bytes.
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32;
type Fill = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32;

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, name: &str, text: &str) -> Result<Self, CompileError> {
        let text = CString::new(text).map_err(|_| CompileError(format!("{name}: the text holds a 0")))?;
        let file = CString::new(format!("{name}.cu")).unwrap_or_else(|_| CString::from(c"kernels.cu"));
        let mut raw = ptr::null_mut();
        // SAFETY: text and name end with a 0 and are copied; there are no headers; `raw` takes the handle.
        let code =
            unsafe { (nvrtc.create)(&raw mut raw, text.as_ptr(), CStr::as_ptr(&file), 0, ptr::null(), ptr::null()) };
        if code == 0 { Ok(Self { nvrtc, raw }) } else { Err(CompileError(format!("{name}: NVRTC error {code}"))) }
    }

    /// Reads what comes as a size and then bytes.
    fn read(&self, size: Size, fill: Fill) -> Result<Vec<u8>, u32> {
        let mut bytes = 0;
        // SAFETY: the program is live; `bytes` takes the number.
        let code = unsafe { size(self.raw, &raw mut bytes) };
        if code != 0 {
            return Err(code);
        }
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer is as long as NVRTC said.
        let code = unsafe { fill(self.raw, buffer.as_mut_ptr().cast()) };
        if code == 0 { Ok(buffer) } else { Err(code) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here.
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
    fn the_architecture_is_the_devices_or_the_nearest_older_one() {
        let option = |capability, target, supported: &[u32]| architecture_option(capability, target, supported);
        assert_eq!(option((9, 0), Target::Ptx, &[75, 80, 90, 100]), "--gpu-architecture=compute_90");
        assert_eq!(option((12, 1), Target::Ptx, &[75, 80, 90, 100]), "--gpu-architecture=compute_100");
        assert_eq!(option((8, 6), Target::Ptx, &[]), "--gpu-architecture=compute_86");
        assert_eq!(option((9, 0), Target::Cubin, &[75]), "--gpu-architecture=sm_90");
    }

    #[test]
    fn the_compiler_works_or_says_what_is_missing() {
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
