//! cuBLAS: workspace, precision, and one matrix product.
//!
//! The memory that a product writes is checked, its workspace included: both may have been freed since they were set.
//! Scalars are passed by address in host memory, the default of a new handle.

use std::ffi::{c_int, c_void};
use std::ptr;

use warpool_driver::{BlasMath, BlasMatrix, Call, DevicePtr, DriverError, ErrorCode, HandleId, Library, Result, Sgemm};

use super::functions::CublasFunctions;
use super::handles::{LibraryHandle, check_status};
use super::status;
use crate::CudaDriver;
use crate::error::CallSite;
use crate::object_table::Exclusive;
use crate::stream::Stream;

/// The alignment of a workspace. cuBLAS's manual says that it checks it; cuBLAS 13 does not.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// The values of `cublasMath_t`, `cublasAtomicsMode_t` and `cublasOperation_t` that are used here.
const DEFAULT_MATH: u32 = 0;
const TF32_MATH: u32 = 3;
const ATOMICS_NOT_ALLOWED: u32 = 0;
const ATOMICS_ALLOWED: u32 = 1;
const NOT_TRANSPOSED: u32 = 0;
const TRANSPOSED: u32 = 1;

#[cfg(feature = "check-bindings")]
const _: () = {
    use cudarc::cublas::sys::{cublasAtomicsMode_t as Atomics, cublasMath_t as Math, cublasOperation_t as Operation};
    assert!(DEFAULT_MATH == Math::CUBLAS_DEFAULT_MATH as u32 && TF32_MATH == Math::CUBLAS_TF32_TENSOR_OP_MATH as u32);
    assert!(ATOMICS_NOT_ALLOWED == Atomics::CUBLAS_ATOMICS_NOT_ALLOWED as u32);
    assert!(ATOMICS_ALLOWED == Atomics::CUBLAS_ATOMICS_ALLOWED as u32);
    assert!(NOT_TRANSPOSED == Operation::CUBLAS_OP_N as u32 && TRANSPOSED == Operation::CUBLAS_OP_T as u32);
};

impl CudaDriver {
    /// `blas_set_workspace` of the contract.
    pub(super) fn set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::BlasSetWorkspace)?;
        let (mut object, blas) = self.blas(site, handle)?;
        if !ptr.0.is_multiple_of(WORKSPACE_ALIGNMENT) {
            let detail = format!("{ptr} is no multiple of {WORKSPACE_ALIGNMENT}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _current = self.make_current(site, object.context)?;
        let mut checked = self.check_ranges(site);
        checked.device(ptr, bytes)?;
        // SAFETY: the handle is held exclusively. The memory is the device's or pinned, and checked before every use.
        let status = unsafe { (blas.set_workspace)(object.raw.raw(), pointer_to(ptr), bytes as usize) };
        check_status(site, Library::Blas, status)?;
        object.workspace = Some((ptr, bytes));
        Ok(())
    }

    /// `blas_set_math` of the contract.
    pub(super) fn set_math(&self, handle: HandleId, math: BlasMath) -> Result<()> {
        let site = self.enter(Call::BlasSetMath)?;
        let (object, blas) = self.blas(site, handle)?;
        let mode = match math {
            BlasMath::Default => DEFAULT_MATH,
            BlasMath::Tf32 => TF32_MATH,
        };
        let _current = self.make_current(site, object.context)?;
        // SAFETY: the handle is held exclusively.
        check_status(site, Library::Blas, unsafe { (blas.set_math)(object.raw.raw(), mode) })
    }

    /// `blas_set_atomics` of the contract.
    pub(super) fn set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()> {
        let site = self.enter(Call::BlasSetAtomics)?;
        let (object, blas) = self.blas(site, handle)?;
        let mode = if allowed { ATOMICS_ALLOWED } else { ATOMICS_NOT_ALLOWED };
        let _current = self.make_current(site, object.context)?;
        // SAFETY: the handle is held exclusively.
        check_status(site, Library::Blas, unsafe { (blas.set_atomics)(object.raw.raw(), mode) })
    }

    /// `blas_sgemm` of the contract.
    pub(super) fn sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()> {
        let site = self.enter(Call::BlasSgemm)?;
        let (object, blas) = self.blas(site, handle)?;
        let stream = object.stream.and_then(|stream| self.streams.get(stream.0)).ok_or_else(|| {
            site.explain(ErrorCode::InvalidHandle, format!("the stream that {handle} was set to is destroyed"))
        })?;
        let Sgemm { alpha, a, b, beta, c, .. } = *product;
        let counts = counts(product).map_err(|why| site.explain(ErrorCode::InvalidValue, why))?;
        if product.m == 0 || product.n == 0 {
            return Ok(());
        }
        let [m, n, k, a_stride, b_stride, c_stride] = counts;
        let _current = self.make_current(site, object.context)?;
        let mut checked = self.check_ranges(site);
        for (ptr, bytes) in product.ranges() {
            checked.device(ptr, bytes)?;
        }
        if let Some((ptr, bytes)) = object.workspace {
            checked.device(ptr, bytes)?;
        }
        let _work = self.begin_work(site, &stream, stream.lock_work());
        // SAFETY: the handle is held exclusively, and its stream is live; cuBLAS reads both scalars before it returns.
        // The matrices and the workspace are memory of the device, or pinned.
        let status = unsafe {
            (blas.sgemm)(
                object.raw.raw(),
                operation(&a),
                operation(&b),
                m,
                n,
                k,
                &raw const alpha,
                pointer_to(a.ptr).cast(),
                a_stride,
                pointer_to(b.ptr).cast(),
                b_stride,
                &raw const beta,
                pointer_to(c.ptr).cast(),
                c_stride,
            )
        };
        if status == 0 { Ok(()) } else { Err(self.product_error(site, status, &stream)) }
    }

    /// Looks up a cuBLAS handle by id, and cuBLAS's functions.
    fn blas(&self, site: CallSite<'_>, handle: HandleId) -> Result<(Exclusive<'_, LibraryHandle>, &CublasFunctions)> {
        let (object, functions) = self.library_handle(site, handle)?;
        match &functions.blas {
            Some(blas) => Ok((object, blas)),
            None => {
                let detail = format!("{handle} is one of {}, and this is a call of {}", object.library, Library::Blas);
                Err(site.explain(ErrorCode::InvalidHandle, detail))
            }
        }
    }

    /// Why a product was refused. cuBLAS does not report that a capture is the reason, but the stream does.
    #[cold]
    fn product_error(&self, site: CallSite<'_>, status: u32, stream: &Stream) -> DriverError {
        let (code, detail) = status::error_of(Library::Blas, status);
        let refusal = self.capture_refusal(site, stream);
        match refusal {
            // The stream does not report whether this call invalidated the capture or an earlier one did; so both are
            // recorded.
            Some(ErrorCode::StreamCaptureInvalidated) => site.invalidated_capture(code),
            Some(code) => site.invalidated_capture(code),
            None => {}
        }
        site.explain(refusal.unwrap_or(code), detail)
    }
}

/// `m`, `n`, `k` and the three strides as cuBLAS takes them, or why it would refuse them.
fn counts(product: &Sgemm) -> std::result::Result<[c_int; 6], String> {
    product.check()?;
    let Sgemm { m, n, k, a, b, c, .. } = *product;
    let mut counts = [0; 6];
    for (count, number) in counts.iter_mut().zip([m, n, k, a.stride, b.stride, c.stride]) {
        *count = c_int::try_from(number).map_err(|_| format!("{number} is more than cuBLAS can count"))?;
    }
    Ok(counts)
}

const fn operation(matrix: &BlasMatrix) -> u32 {
    if matrix.transposed { TRANSPOSED } else { NOT_TRANSPOSED }
}

/// A device address as cuBLAS takes it.
const fn pointer_to(ptr: DevicePtr) -> *mut c_void {
    ptr::without_provenance_mut(ptr.0 as usize)
}

#[cfg(test)]
mod tests {
    use warpool_driver::{CaptureMode, Captures, Graphs, Libraries, Memory, Streams};

    use super::*;
    use crate::fake_cuda::{self, DEVICE, LibraryCall, library_calls};

    fn matrix(ptr: DevicePtr, stride: u32, transposed: bool) -> BlasMatrix {
        BlasMatrix { ptr, stride, transposed }
    }

    /// 2 by 3, times 3 by 4; `a` is stored transposed.
    fn product(driver: &CudaDriver) -> Result<Sgemm> {
        let memory = driver.mem_alloc(DEVICE, 3 * 256)?;
        let [a, b, c] = [0, 256, 512].map(|offset| memory.offset(offset));
        let (a, b, c) = (matrix(a, 5, true), matrix(b, 6, false), matrix(c, 7, false));
        Ok(Sgemm { m: 2, n: 4, k: 3, alpha: 1.5, a, b, beta: -2.0, c })
    }

    fn code<T>(result: Result<T>) -> Option<ErrorCode> {
        result.err().map(|error| error.code)
    }

    #[test]
    fn arguments_are_passed_to_cublas() -> Result<()> {
        let driver = fake_cuda::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let workspace = driver.mem_alloc(DEVICE, 4096)?;
        let product = product(&driver)?;
        library_calls();
        driver.blas_set_workspace(handle, workspace, 4096)?;
        driver.blas_set_workspace(handle, DevicePtr(0), 0)?;
        driver.blas_set_math(handle, BlasMath::Tf32)?;
        driver.blas_set_math(handle, BlasMath::Default)?;
        driver.blas_set_atomics(handle, true)?;
        driver.blas_set_atomics(handle, false)?;
        driver.blas_sgemm(handle, &product)?;
        let calls = [
            LibraryCall::Workspace(workspace.0, 4096),
            LibraryCall::Workspace(0, 0),
            LibraryCall::Math(3),
            LibraryCall::Math(0),
            LibraryCall::Atomics(1),
            LibraryCall::Atomics(0),
            LibraryCall::Product {
                operations: [1, 0],
                counts: [2, 4, 3, 5, 6, 7],
                scalars: [1.5, -2.0],
                addresses: [product.a, product.b, product.c].map(|matrix| matrix.ptr.0),
            },
        ];
        assert_eq!(library_calls(), calls);
        Ok(())
    }

    #[test]
    fn a_workspace_is_aligned_and_allocated() -> Result<()> {
        let driver = fake_cuda::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let workspace = driver.mem_alloc(DEVICE, 4096)?;
        let refused = Some(ErrorCode::InvalidValue);
        assert_eq!(code(driver.blas_set_workspace(handle, workspace.offset(128), 256)), refused);
        assert_eq!(code(driver.blas_set_workspace(handle, workspace, 4097)), refused);
        let product = product(&driver)?;
        driver.blas_set_workspace(handle, workspace, 4096)?;
        driver.blas_sgemm(handle, &product)?;
        driver.mem_free(workspace)?;
        assert_eq!(code(driver.blas_sgemm(handle, &product)), refused, "the workspace is freed");
        driver.library_set_stream(handle, driver.stream_default(DEVICE)?)?;
        driver.blas_sgemm(handle, &product)
    }

    #[test]
    fn impossible_products_are_refused_and_empty_ones_do_nothing() -> Result<()> {
        let driver = fake_cuda::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let good = product(&driver)?;
        let (a, b, c) = (good.a.ptr, good.b.ptr, good.c.ptr);
        library_calls();
        let bad = [
            Sgemm { a: matrix(a, 2, true), ..good },
            Sgemm { a: matrix(a, 1, false), ..good },
            Sgemm { b: matrix(b, 2, false), ..good },
            Sgemm { b: matrix(b, 3, true), ..good },
            Sgemm { c: matrix(c, 1, false), ..good },
            Sgemm { c: matrix(c, 7, true), ..good },
            Sgemm { b: matrix(b, u32::MAX, false), ..good },
            Sgemm { m: 0, c: matrix(c, 0, false), ..good },
            // 3 columns of 7 numbers and 2 numbers do not fit.
            Sgemm { c: matrix(c.offset(256 - 4 * 23 + 4), 7, false), ..good },
            Sgemm { c: matrix(c, i32::MAX as u32, false), ..good },
            Sgemm { a: matrix(DevicePtr(8), 5, true), ..good },
        ];
        for product in bad {
            assert_eq!(code(driver.blas_sgemm(handle, &product)), Some(ErrorCode::InvalidValue), "{product:?}");
        }
        for product in [Sgemm { m: 0, ..good }, Sgemm { n: 0, ..good }] {
            driver.blas_sgemm(handle, &product)?;
        }
        assert_eq!(library_calls(), []);
        let nowhere = matrix(DevicePtr(8), 5, true);
        for product in [
            Sgemm { k: 0, ..good },
            Sgemm { a: matrix(a, 2, false), b: matrix(b, 4, true), ..good },
            Sgemm { c: matrix(c.offset(256 - 4 * 23), 7, false), ..good },
            Sgemm { alpha: 0.0, a: nowhere, ..good },
            Sgemm { k: 0, a: nowhere, ..good },
        ] {
            driver.blas_sgemm(handle, &product)?;
        }
        assert_eq!(library_calls().len(), 5);
        Ok(())
    }

    #[test]
    fn handles_of_other_libraries_are_not_cublas() -> Result<()> {
        let driver = fake_cuda::driver();
        let product = product(&driver)?;
        for library in Library::ALL.into_iter().filter(|&library| library != Library::Blas) {
            let handle = driver.library_create(library, DEVICE)?;
            let refused = [
                driver.blas_set_workspace(handle, DevicePtr(0), 0),
                driver.blas_set_math(handle, BlasMath::Tf32),
                driver.blas_set_atomics(handle, true),
                driver.blas_sgemm(handle, &product),
            ];
            for refused in refused {
                assert_eq!(code(refused), Some(ErrorCode::InvalidHandle));
            }
        }
        Ok(())
    }

    #[test]
    fn no_product_uses_a_destroyed_stream() -> Result<()> {
        let driver = fake_cuda::driver();
        let product = product(&driver)?;
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        driver.blas_sgemm(handle, &product)?;
        driver.stream_destroy(stream)?;
        library_calls();
        assert_eq!(code(driver.blas_sgemm(handle, &product)), Some(ErrorCode::InvalidHandle));
        assert_eq!(library_calls(), []);
        driver.library_set_stream(handle, driver.stream_default(DEVICE)?)?;
        driver.blas_sgemm(handle, &product)
    }

    #[test]
    fn a_product_is_captured_and_refused_if_the_capture_is_invalid() -> Result<()> {
        let driver = fake_cuda::driver();
        let product = product(&driver)?;
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        driver.blas_sgemm(handle, &product)?;
        assert_eq!(driver.graph_topology(driver.capture_end(stream)?)?.nodes.len(), 1);

        driver.capture_begin(stream, CaptureMode::Global)?;
        assert_eq!(code(driver.mem_alloc(DEVICE, 256)), Some(ErrorCode::StreamCaptureUnsupported));
        let error = driver.blas_sgemm(handle, &product).expect_err("the capture is invalid");
        assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
        assert_eq!(error.detail.as_deref(), Some("cuBLAS returned CUBLAS_STATUS_EXECUTION_FAILED (13)"));
        let error = driver.capture_end(stream).expect_err("the capture is invalid");
        assert!(error.to_string().contains("most likely invalidated by mem_alloc"), "{error}");
        Ok(())
    }
}
