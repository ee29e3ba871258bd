//! cuBLAS: memory to work with, precision, and one product.
//! Scalars are passed by address in host memory, which is how a fresh handle wants them.

use std::ffi::{c_int, c_void};
use std::ptr;

use warpool_driver::{BlasMath, BlasMatrix, Call, DevicePtr, DriverError, ErrorCode, HandleId, Library, Result, Sgemm};

use crate::CudaDriver;
use crate::error::Site;
use crate::handles::{LibraryHandle, check_status};
use crate::status;
use crate::stream::Stream;
use crate::table::Alone;
use crate::vendor::Cublas;

/// What a workspace's address must be a multiple of. cuBLAS's manual says that it checks; cuBLAS 13 does not.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// `cublasMath_t`, `cublasAtomicsMode_t` and `cublasOperation_t`, as far as they are used here.
const DEFAULT_MATH: u32 = 0;
const TF32_MATH: u32 = 3;
const ATOMICS_NOT_ALLOWED: u32 = 0;
const ATOMICS_ALLOWED: u32 = 1;
const AS_IT_IS: u32 = 0;
const TRANSPOSED: u32 = 1;

#[cfg(feature = "check-bindings")]
const _: () = {
    use cudarc::cublas::sys::{cublasAtomicsMode_t as Atomics, cublasMath_t as Math, cublasOperation_t as Operation};
    assert!(DEFAULT_MATH == Math::CUBLAS_DEFAULT_MATH as u32 && TF32_MATH == Math::CUBLAS_TF32_TENSOR_OP_MATH as u32);
    assert!(ATOMICS_NOT_ALLOWED == Atomics::CUBLAS_ATOMICS_NOT_ALLOWED as u32);
    assert!(ATOMICS_ALLOWED == Atomics::CUBLAS_ATOMICS_ALLOWED as u32);
    assert!(AS_IT_IS == Operation::CUBLAS_OP_N as u32 && TRANSPOSED == Operation::CUBLAS_OP_T as u32);
};

impl CudaDriver {
    /// `blas_set_workspace` of the contract.
    pub(crate) fn set_workspace(&self, handle: HandleId, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let site = self.enter(Call::BlasSetWorkspace)?;
        let (row, blas) = self.blas(site, handle)?;
        if !ptr.0.is_multiple_of(WORKSPACE_ALIGNMENT) {
            let detail = format!("{ptr} is no multiple of {WORKSPACE_ALIGNMENT}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let _current = self.make_current(site, row.context)?;
        // SAFETY: the handle is ours alone. The address is the device's and is not followed here; where products go
        // with it is left to callers.
        let status = unsafe { (blas.set_workspace)(row.raw.raw(), address(ptr), bytes as usize) };
        check_status(site, Library::Blas, status)
    }

    /// `blas_set_math` of the contract.
    pub(crate) fn set_math(&self, handle: HandleId, math: BlasMath) -> Result<()> {
        let site = self.enter(Call::BlasSetMath)?;
        let (row, blas) = self.blas(site, handle)?;
        let mode = match math {
            BlasMath::Default => DEFAULT_MATH,
            BlasMath::Tf32 => TF32_MATH,
        };
        let _current = self.make_current(site, row.context)?;
        // SAFETY: the handle is ours alone.
        check_status(site, Library::Blas, unsafe { (blas.set_math)(row.raw.raw(), mode) })
    }

    /// `blas_set_atomics` of the contract.
    pub(crate) fn set_atomics(&self, handle: HandleId, allowed: bool) -> Result<()> {
        let site = self.enter(Call::BlasSetAtomics)?;
        let (row, blas) = self.blas(site, handle)?;
        let mode = if allowed { ATOMICS_ALLOWED } else { ATOMICS_NOT_ALLOWED };
        let _current = self.make_current(site, row.context)?;
        // SAFETY: the handle is ours alone.
        check_status(site, Library::Blas, unsafe { (blas.set_atomics)(row.raw.raw(), mode) })
    }

    /// `blas_sgemm` of the contract.
    pub(crate) fn sgemm(&self, handle: HandleId, product: &Sgemm) -> Result<()> {
        let site = self.enter(Call::BlasSgemm)?;
        let (row, blas) = self.blas(site, handle)?;
        // In use until the call returns. The id is looked up again: the stream may have gone since it was set.
        let stream = row.stream.and_then(|stream| self.streams.get(stream.0)).ok_or_else(|| {
            site.explain(ErrorCode::InvalidHandle, format!("the stream that {handle} worked on is gone"))
        })?;
        let Sgemm { m, n, alpha, a, b, beta, c, .. } = *product;
        let counts = counts(product).map_err(|why| site.explain(ErrorCode::InvalidValue, why))?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let [m, n, k, a_stride, b_stride, c_stride] = counts;
        let _current = self.make_current(site, row.context)?;
        // SAFETY: the handle is ours alone and its stream live; both scalars are read before the call returns. The
        // matrices' addresses are the device's and are not followed here; where the product goes with them is left to
        // callers.
        let status = unsafe {
            (blas.sgemm)(
                row.raw.raw(),
                operation(&a),
                operation(&b),
                m,
                n,
                k,
                &raw const alpha,
                address(a.ptr).cast(),
                a_stride,
                address(b.ptr).cast(),
                b_stride,
                &raw const beta,
                address(c.ptr).cast(),
                c_stride,
            )
        };
        if status == 0 { Ok(()) } else { Err(self.work_failed(site, status, &stream)) }
    }

    /// The handle behind an id, if it is one of cuBLAS, and cuBLAS's functions.
    fn blas(&self, site: Site<'_>, handle: HandleId) -> Result<(Alone<'_, LibraryHandle>, &Cublas)> {
        let (row, vendor) = self.handle(site, handle)?;
        match &vendor.blas {
            Some(blas) => Ok((row, blas)),
            None => {
                let detail = format!("{handle} is one of {}, and this is a call of {}", row.library, Library::Blas);
                Err(site.explain(ErrorCode::InvalidHandle, detail))
            }
        }
    }

    /// Why work for a stream was refused. cuBLAS does not say that a capture is the reason, but the stream does.
    #[cold]
    fn work_failed(&self, site: Site<'_>, status: u32, stream: &Stream) -> DriverError {
        let (code, detail) = status::meaning(Library::Blas, status);
        let reason = self.capture_trouble(site, stream);
        match reason {
            // The stream cannot tell whether this call broke the capture or an earlier one did; that is noted as well.
            Some(ErrorCode::StreamCaptureInvalidated) => site.broke_capture(code),
            Some(reason) => site.broke_capture(reason),
            None => {}
        }
        site.explain(reason.unwrap_or(code), detail)
    }
}

/// `m`, `n`, `k` and the three strides as cuBLAS takes them, or why it would not.
fn counts(product: &Sgemm) -> std::result::Result<[c_int; 6], String> {
    let Sgemm { m, n, k, a, b, c, .. } = *product;
    if c.transposed {
        return Err("the result of a product cannot be transposed".to_owned());
    }
    for (name, matrix, rows) in [("a", a, rows(&a, m, k)), ("b", b, rows(&b, k, n)), ("c", c, m)] {
        if matrix.stride < rows.max(1) {
            return Err(format!("{name} has columns of {rows}, and a stride of {}", matrix.stride));
        }
    }
    let mut counts = [0; 6];
    for (count, number) in counts.iter_mut().zip([m, n, k, a.stride, b.stride, c.stride]) {
        *count = c_int::try_from(number).map_err(|_| format!("{number} is more than cuBLAS can count to"))?;
    }
    Ok(counts)
}

/// How many numbers a column has in memory, of a matrix that takes part with `rows` rows and `columns` columns.
const fn rows(matrix: &BlasMatrix, rows: u32, columns: u32) -> u32 {
    if matrix.transposed { columns } else { rows }
}

const fn operation(matrix: &BlasMatrix) -> u32 {
    if matrix.transposed { TRANSPOSED } else { AS_IT_IS }
}

/// An address of the device as cuBLAS takes it.
const fn address(ptr: DevicePtr) -> *mut c_void {
    ptr::without_provenance_mut(ptr.0 as usize)
}

#[cfg(test)]
mod tests {
    use warpool_driver::{CaptureMode, Captures, Graphs, Libraries, Memory, Streams};

    use super::*;
    use crate::fake::{self, DEVICE, Given, given_here};

    fn matrix(ptr: u64, stride: u32, transposed: bool) -> BlasMatrix {
        BlasMatrix { ptr: DevicePtr(ptr), stride, transposed }
    }

    /// 2 by 3, times 3 by 4; `a` lies transposed.
    fn product() -> Sgemm {
        let (a, b, c) = (matrix(0x100, 5, true), matrix(0x200, 6, false), matrix(0x300, 7, false));
        Sgemm { m: 2, n: 4, k: 3, alpha: 1.5, a, b, beta: -2.0, c }
    }

    fn code<T>(result: Result<T>) -> Option<ErrorCode> {
        result.err().map(|error| error.code)
    }

    #[test]
    fn what_is_set_arrives_in_cublas_terms() -> Result<()> {
        let driver = fake::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        given_here();
        driver.blas_set_workspace(handle, DevicePtr(0x1000), 4096)?;
        driver.blas_set_workspace(handle, DevicePtr(0), 0)?;
        driver.blas_set_math(handle, BlasMath::Tf32)?;
        driver.blas_set_math(handle, BlasMath::Default)?;
        driver.blas_set_atomics(handle, true)?;
        driver.blas_set_atomics(handle, false)?;
        driver.blas_sgemm(handle, &product())?;
        let given = [
            Given::Workspace(0x1000, 4096),
            Given::Workspace(0, 0),
            Given::Math(3),
            Given::Math(0),
            Given::Atomics(1),
            Given::Atomics(0),
            Given::Product {
                operations: [1, 0],
                counts: [2, 4, 3, 5, 6, 7],
                scalars: [1.5, -2.0],
                addresses: [0x100, 0x200, 0x300],
            },
        ];
        assert_eq!(given_here(), given);
        assert_eq!(code(driver.blas_set_workspace(handle, DevicePtr(0x1080), 4096)), Some(ErrorCode::InvalidValue));
        Ok(())
    }

    #[test]
    fn products_that_cannot_be_are_refused_and_empty_ones_do_nothing() -> Result<()> {
        let driver = fake::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        given_here();
        let good = product();
        let bad = [
            Sgemm { a: matrix(0, 2, true), ..good },
            Sgemm { a: matrix(0, 1, false), ..good },
            Sgemm { b: matrix(0, 2, false), ..good },
            Sgemm { b: matrix(0, 3, true), ..good },
            Sgemm { c: matrix(0, 1, false), ..good },
            Sgemm { c: matrix(0, 7, true), ..good },
            Sgemm { b: matrix(0, u32::MAX, false), ..good },
            Sgemm { m: 0, c: matrix(0, 0, false), ..good },
        ];
        for product in bad {
            assert_eq!(code(driver.blas_sgemm(handle, &product)), Some(ErrorCode::InvalidValue), "{product:?}");
        }
        for product in [Sgemm { m: 0, ..good }, Sgemm { n: 0, ..good }] {
            driver.blas_sgemm(handle, &product)?;
        }
        assert_eq!(given_here(), []);
        for product in [Sgemm { k: 0, ..good }, Sgemm { a: matrix(0, 2, false), b: matrix(0, 4, true), ..good }] {
            driver.blas_sgemm(handle, &product)?;
        }
        assert_eq!(given_here().len(), 2);
        Ok(())
    }

    #[test]
    fn handles_of_other_libraries_are_not_cublas() -> Result<()> {
        let driver = fake::driver();
        for library in Library::ALL.into_iter().filter(|&library| library != Library::Blas) {
            let handle = driver.library_create(library, DEVICE)?;
            let refused = [
                driver.blas_set_workspace(handle, DevicePtr(0), 0),
                driver.blas_set_math(handle, BlasMath::Tf32),
                driver.blas_set_atomics(handle, true),
                driver.blas_sgemm(handle, &product()),
            ];
            for refused in refused {
                assert_eq!(code(refused), Some(ErrorCode::InvalidHandle));
            }
        }
        Ok(())
    }

    #[test]
    fn no_product_follows_a_stream_that_is_gone() -> Result<()> {
        let driver = fake::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        driver.blas_sgemm(handle, &product())?;
        driver.stream_destroy(stream)?;
        given_here();
        assert_eq!(code(driver.blas_sgemm(handle, &product())), Some(ErrorCode::InvalidHandle));
        assert_eq!(given_here(), []);
        driver.library_set_stream(handle, driver.stream_default(DEVICE)?)?;
        driver.blas_sgemm(handle, &product())
    }

    #[test]
    fn a_product_is_captured_and_says_so_if_the_capture_is_broken() -> Result<()> {
        let driver = fake::driver();
        let handle = driver.library_create(Library::Blas, DEVICE)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.library_set_stream(handle, stream)?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        driver.blas_sgemm(handle, &product())?;
        assert_eq!(driver.graph_topology(driver.capture_end(stream)?)?.nodes.len(), 1);

        driver.capture_begin(stream, CaptureMode::Global)?;
        assert_eq!(code(driver.mem_alloc(DEVICE, 256)), Some(ErrorCode::StreamCaptureUnsupported));
        let error = driver.blas_sgemm(handle, &product()).expect_err("the capture is broken");
        assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
        assert_eq!(error.detail.as_deref(), Some("cuBLAS says CUBLAS_STATUS_EXECUTION_FAILED (13)"));
        let error = driver.capture_end(stream).expect_err("the capture is broken");
        assert!(error.to_string().contains("most likely broken by mem_alloc"), "{error}");
        Ok(())
    }
}
