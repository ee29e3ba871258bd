//! The status codes of NVIDIA's libraries: number, name, and the nearest CUDA error code.
//!
//! "Execution failed" has no such code. It may mean a kernel that made the device unusable, but also a launch that was
//! only refused, so it must not become a sticky error: if the device is unusable, the next call of the driver reports
//! it.

use ErrorCode::{
    InvalidValue, LaunchOutOfResources, MapFailed, NotInitialized, NotPermitted, NotReady, NotSupported, OutOfMemory,
    SharedObjectInitFailed, UnknownError,
};
use warpool_driver::{ErrorCode, Library};

/// Number, name and nearest error code.
type Statuses = &'static [(u32, &'static str, ErrorCode)];

/// The error code nearest to a library's status, and a text that names the status.
pub(crate) fn error_of(library: Library, status: u32) -> (ErrorCode, String) {
    match statuses(library).find(|&&(number, ..)| number == status) {
        Some(&(number, name, code)) => (code, format!("{library} returned {name} ({number})")),
        None => (UnknownError, format!("{library} returned the status {status}")),
    }
}

fn statuses(library: Library) -> impl Iterator<Item = &'static (u32, &'static str, ErrorCode)> {
    let (statuses, more): (Statuses, Statuses) = match library {
        Library::Blas | Library::BlasLt => (CUBLAS, &[]),
        Library::Dnn => (CUDNN, CUDNN_8),
        Library::Sparse => (CUSPARSE, &[]),
        Library::Solver => (CUSOLVER, &[]),
    };
    statuses.iter().chain(more)
}

/// Declares the statuses of a library.
macro_rules! statuses {
    ($table:ident: $($name:ident = $number:literal $code:ident,)*) => {
        const $table: Statuses = &[$(($number, stringify!($name), $code),)*];
    };
    // Also compares them with cudarc's.
    ($table:ident like $library:ident::$status:ident: $($name:ident = $number:literal $code:ident,)*) => {
        statuses!($table: $($name = $number $code,)*);

        #[cfg(feature = "check-bindings")]
        const _: () = {
            $(assert!(cudarc::$library::sys::$status::$name as u32 == $number);)*
        };
    };
}

statuses! {
    CUBLAS like cublas::cublasStatus_t:
    CUBLAS_STATUS_NOT_INITIALIZED = 1 NotInitialized,
    CUBLAS_STATUS_ALLOC_FAILED = 3 OutOfMemory,
    CUBLAS_STATUS_INVALID_VALUE = 7 InvalidValue,
    CUBLAS_STATUS_ARCH_MISMATCH = 8 NotSupported,
    CUBLAS_STATUS_MAPPING_ERROR = 11 MapFailed,
    CUBLAS_STATUS_EXECUTION_FAILED = 13 UnknownError,
    CUBLAS_STATUS_INTERNAL_ERROR = 14 UnknownError,
    CUBLAS_STATUS_NOT_SUPPORTED = 15 NotSupported,
    CUBLAS_STATUS_LICENSE_ERROR = 16 NotPermitted,
}

// cuDNN 9 and 8 have different numbers. No number has two meanings.
statuses! {
    CUDNN like cudnn::cudnnStatus_t:
    CUDNN_STATUS_NOT_INITIALIZED = 1001 NotInitialized,
    CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH = 1002 SharedObjectInitFailed,
    CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH = 1003 SharedObjectInitFailed,
    CUDNN_STATUS_DEPRECATED = 1004 NotSupported,
    CUDNN_STATUS_LICENSE_ERROR = 1005 NotPermitted,
    CUDNN_STATUS_RUNTIME_IN_PROGRESS = 1006 NotReady,
    CUDNN_STATUS_RUNTIME_FP_OVERFLOW = 1007 UnknownError,
    CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED = 1008 SharedObjectInitFailed,
    CUDNN_STATUS_BAD_PARAM = 2000 InvalidValue,
    CUDNN_STATUS_INVALID_VALUE = 2001 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_NULL_POINTER = 2002 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER = 2003 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED = 2004 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND = 2005 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT = 2006 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_STREAM_MISMATCH = 2007 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH = 2008 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES = 2009 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE = 2010 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_CUDA_GRAPH_MISMATCH = 2011 InvalidValue,
    CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE = 2012 InvalidValue,
    CUDNN_STATUS_NOT_SUPPORTED = 3000 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN = 3001 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_SHAPE = 3002 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE = 3003 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_LAYOUT = 3004 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER = 3005 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART = 3006 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH = 3007 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING = 3008 SharedObjectInitFailed,
    CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE = 3009 SharedObjectInitFailed,
    CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT = 3010 LaunchOutOfResources,
    CUDNN_STATUS_NOT_SUPPORTED_PADDING = 3011 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_BAD_LAUNCH_PARAM = 3012 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_CUDA_GRAPH_NATIVE_API = 3013 NotSupported,
    CUDNN_STATUS_NOT_SUPPORTED_INVALID_DYNAMIC_SHAPE = 3014 NotSupported,
    CUDNN_STATUS_INTERNAL_ERROR = 4000 UnknownError,
    CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED = 4001 UnknownError,
    CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE = 4002 UnknownError,
    CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003 OutOfMemory,
    CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004 OutOfMemory,
    CUDNN_STATUS_INTERNAL_ERROR_BAD_LAUNCH_PARAM = 4005 UnknownError,
    CUDNN_STATUS_INTERNAL_ERROR_TEXTURE_CREATION_FAILED = 4006 UnknownError,
    CUDNN_STATUS_EXECUTION_FAILED = 5000 UnknownError,
    CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER = 5001 UnknownError,
    CUDNN_STATUS_EXECUTION_FAILED_CUBLAS = 5002 UnknownError,
    CUDNN_STATUS_EXECUTION_FAILED_CUDART = 5003 UnknownError,
    CUDNN_STATUS_EXECUTION_FAILED_CURAND = 5004 UnknownError,
}

statuses! {
    CUDNN_8:
    CUDNN_STATUS_NOT_INITIALIZED = 1 NotInitialized,
    CUDNN_STATUS_ALLOC_FAILED = 2 OutOfMemory,
    CUDNN_STATUS_BAD_PARAM = 3 InvalidValue,
    CUDNN_STATUS_INTERNAL_ERROR = 4 UnknownError,
    CUDNN_STATUS_INVALID_VALUE = 5 InvalidValue,
    CUDNN_STATUS_ARCH_MISMATCH = 6 NotSupported,
    CUDNN_STATUS_MAPPING_ERROR = 7 MapFailed,
    CUDNN_STATUS_EXECUTION_FAILED = 8 UnknownError,
    CUDNN_STATUS_NOT_SUPPORTED = 9 NotSupported,
    CUDNN_STATUS_LICENSE_ERROR = 10 NotPermitted,
    CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING = 11 SharedObjectInitFailed,
    CUDNN_STATUS_RUNTIME_IN_PROGRESS = 12 NotReady,
    CUDNN_STATUS_RUNTIME_FP_OVERFLOW = 13 UnknownError,
    CUDNN_STATUS_VERSION_MISMATCH = 14 SharedObjectInitFailed,
}

statuses! {
    CUSPARSE like cusparse::cusparseStatus_t:
    CUSPARSE_STATUS_NOT_INITIALIZED = 1 NotInitialized,
    CUSPARSE_STATUS_ALLOC_FAILED = 2 OutOfMemory,
    CUSPARSE_STATUS_INVALID_VALUE = 3 InvalidValue,
    CUSPARSE_STATUS_ARCH_MISMATCH = 4 NotSupported,
    CUSPARSE_STATUS_MAPPING_ERROR = 5 MapFailed,
    CUSPARSE_STATUS_EXECUTION_FAILED = 6 UnknownError,
    CUSPARSE_STATUS_INTERNAL_ERROR = 7 UnknownError,
    CUSPARSE_STATUS_MATRIX_TYPE_NOT_SUPPORTED = 8 NotSupported,
    CUSPARSE_STATUS_ZERO_PIVOT = 9 InvalidValue,
    CUSPARSE_STATUS_NOT_SUPPORTED = 10 NotSupported,
    CUSPARSE_STATUS_INSUFFICIENT_RESOURCES = 11 LaunchOutOfResources,
}

statuses! {
    CUSOLVER like cusolver::cusolverStatus_t:
    CUSOLVER_STATUS_NOT_INITIALIZED = 1 NotInitialized,
    CUSOLVER_STATUS_ALLOC_FAILED = 2 OutOfMemory,
    CUSOLVER_STATUS_INVALID_VALUE = 3 InvalidValue,
    CUSOLVER_STATUS_ARCH_MISMATCH = 4 NotSupported,
    CUSOLVER_STATUS_MAPPING_ERROR = 5 MapFailed,
    CUSOLVER_STATUS_EXECUTION_FAILED = 6 UnknownError,
    CUSOLVER_STATUS_INTERNAL_ERROR = 7 UnknownError,
    CUSOLVER_STATUS_MATRIX_TYPE_NOT_SUPPORTED = 8 NotSupported,
    CUSOLVER_STATUS_NOT_SUPPORTED = 9 NotSupported,
    CUSOLVER_STATUS_ZERO_PIVOT = 10 InvalidValue,
    CUSOLVER_STATUS_INVALID_LICENSE = 11 NotPermitted,
    CUSOLVER_STATUS_IRS_PARAMS_NOT_INITIALIZED = 12 InvalidValue,
    CUSOLVER_STATUS_IRS_PARAMS_INVALID = 13 InvalidValue,
    CUSOLVER_STATUS_IRS_PARAMS_INVALID_PREC = 14 InvalidValue,
    CUSOLVER_STATUS_IRS_PARAMS_INVALID_REFINE = 15 InvalidValue,
    CUSOLVER_STATUS_IRS_PARAMS_INVALID_MAXITER = 16 InvalidValue,
    CUSOLVER_STATUS_IRS_INTERNAL_ERROR = 20 UnknownError,
    CUSOLVER_STATUS_IRS_NOT_SUPPORTED = 21 NotSupported,
    CUSOLVER_STATUS_IRS_OUT_OF_RANGE = 22 InvalidValue,
    CUSOLVER_STATUS_IRS_NRHS_NOT_SUPPORTED_FOR_REFINE_GMRES = 23 NotSupported,
    CUSOLVER_STATUS_IRS_INFOS_NOT_INITIALIZED = 25 InvalidValue,
    CUSOLVER_STATUS_IRS_INFOS_NOT_DESTROYED = 26 InvalidValue,
    CUSOLVER_STATUS_IRS_MATRIX_SINGULAR = 30 InvalidValue,
    CUSOLVER_STATUS_INVALID_WORKSPACE = 31 InvalidValue,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use warpool_driver::DriverError;

    use super::*;

    #[test]
    fn a_status_is_named_and_an_unknown_one_keeps_its_number() {
        let check = |library, status, code, text: &str| assert_eq!(error_of(library, status), (code, text.to_owned()));
        check(Library::Blas, 3, OutOfMemory, "cuBLAS returned CUBLAS_STATUS_ALLOC_FAILED (3)");
        check(Library::BlasLt, 7, InvalidValue, "cuBLASLt returned CUBLAS_STATUS_INVALID_VALUE (7)");
        check(Library::Dnn, 1001, NotInitialized, "cuDNN returned CUDNN_STATUS_NOT_INITIALIZED (1001)");
        check(Library::Dnn, 2, OutOfMemory, "cuDNN returned CUDNN_STATUS_ALLOC_FAILED (2)");
        check(Library::Sparse, 10, NotSupported, "cuSPARSE returned CUSPARSE_STATUS_NOT_SUPPORTED (10)");
        check(Library::Solver, 11, NotPermitted, "cuSOLVER returned CUSOLVER_STATUS_INVALID_LICENSE (11)");
        check(Library::Blas, 4711, UnknownError, "cuBLAS returned the status 4711");
    }

    #[test]
    fn each_number_occurs_once_and_no_status_is_a_sticky_error() {
        for library in Library::ALL {
            let mut seen = BTreeSet::new();
            assert!(statuses(library).all(|&(number, ..)| number != 0 && seen.insert(number)), "{library}");
            assert!(statuses(library).all(|&(.., code)| !DriverError::new("x", code).is_sticky()), "{library}");
        }
    }
}
