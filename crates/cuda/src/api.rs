//! The CUDA driver's functions, resolved when the driver is opened.
//!
//! The compiler compares each signature with cudarc's binding, so the table cannot differ from the header, except in
//! the result: a plain number, since a Rust enum with a code of a newer driver is undefined behaviour. For the same
//! reason calls let the driver write enums into numbers.
//!
//! Symbols are the exact names: the header's macros (`cuMemAlloc` for `cuMemAlloc_v2`) are expanded here. The `_ptsz`
//! variants would make the per-thread stream the default stream, and are not used.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

use cudarc::driver::sys::{self, *};

use crate::shared_library::{MissingSymbol, SharedLibrary};

/// Declares the table: `field: binding(arguments);`, or `field: binding as "symbol"(arguments);` where a newer symbol
/// has the binding's signature. The functions of the last group are newer than the bindings: nothing checks their
/// signatures.
macro_rules! api {
    (
        required { $($field:ident: $symbol:ident($($arg:ty),*);)* }
        optional { $($opt_field:ident: $opt_binding:ident $(as $opt_symbol:literal)? ($($opt_arg:ty),*);)* }
        newer { $($new_field:ident: $new_symbol:ident($($new_arg:ty),*);)* }
    ) => {
        /// The driver's functions. Those of CUDA 12.0 are always present; newer ones may be missing.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> u32,)*
            $(pub(crate) $opt_field: Option<unsafe extern "C" fn($($opt_arg),*) -> u32>,)*
            $(pub(crate) $new_field: Option<unsafe extern "C" fn($($new_arg),*) -> u32>,)*
        }

        impl Api {
            /// Resolves every function, or names the first that is missing.
            pub(crate) fn resolve(library: &SharedLibrary) -> Result<Self, MissingSymbol> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the binding's, which `SIGNATURES` checks.
                        unsafe { library.require(stringify!($symbol)) }?
                    },)*
                    $($opt_field: {
                        // SAFETY: the signature is the binding's, which `SIGNATURES` checks.
                        unsafe { library.find(symbol_name!($opt_binding $($opt_symbol)?)) }
                    },)*
                    $($new_field: {
                        // SAFETY: the signature is that of CUDA's header.
                        unsafe { library.find(stringify!($new_symbol)) }
                    },)*
                })
            }

            /// Functions that do nothing and return success, for tests to replace.
            #[cfg(test)]
            pub(crate) fn stubs() -> Self {
                Self {
                    $($field: {
                        unsafe extern "C" fn stub($(_: $arg),*) -> u32 { 0 }
                        stub
                    },)*
                    $($opt_field: {
                        unsafe extern "C" fn stub($(_: $opt_arg),*) -> u32 { 0 }
                        Some(stub)
                    },)*
                    $($new_field: {
                        unsafe extern "C" fn stub($(_: $new_arg),*) -> u32 { 0 }
                        Some(stub)
                    },)*
                }
            }

            /// The symbols, for tests.
            #[cfg(test)]
            pub(crate) const SYMBOLS: &[&str] =
                &[$(stringify!($symbol),)* $(symbol_name!($opt_binding $($opt_symbol)?),)*
                    $(stringify!($new_symbol),)*];
        }

        /// Compares each signature with cudarc's. Never called; it only has to compile.
        const SIGNATURES: () = {
            $(let _: unsafe fn($($arg),*) -> sys::CUresult = sys::$symbol;)*
            $(let _: unsafe fn($($opt_arg),*) -> sys::CUresult = sys::$opt_binding;)*
        };
        const _: () = SIGNATURES;
    };
}

/// The symbol of a binding: its own name, unless another is given.
macro_rules! symbol_name {
    ($binding:ident) => {
        stringify!($binding)
    };
    ($binding:ident $symbol:literal) => {
        $symbol
    };
}

api! {
    required {
        init: cuInit(c_uint);

        device_get: cuDeviceGet(*mut CUdevice, c_int);
        device_get_count: cuDeviceGetCount(*mut c_int);
        device_get_name: cuDeviceGetName(*mut c_char, c_int, CUdevice);
        device_get_uuid: cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        device_total_mem: cuDeviceTotalMem_v2(*mut usize, CUdevice);
        device_get_attribute: cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        device_can_access_peer: cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);

        primary_ctx_retain: cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        primary_ctx_release: cuDevicePrimaryCtxRelease_v2(CUdevice);
        primary_ctx_get_state: cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
        ctx_get_current: cuCtxGetCurrent(*mut CUcontext);
        ctx_set_current: cuCtxSetCurrent(CUcontext);
        ctx_get_device: cuCtxGetDevice(*mut CUdevice);
        ctx_synchronize: cuCtxSynchronize();
        ctx_get_stream_priority_range: cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        ctx_enable_peer_access: cuCtxEnablePeerAccess(CUcontext, c_uint);
        ctx_disable_peer_access: cuCtxDisablePeerAccess(CUcontext);

        stream_create_with_priority: cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        stream_destroy: cuStreamDestroy_v2(CUstream);
        stream_get_id: cuStreamGetId(CUstream, *mut c_ulonglong);
        stream_get_ctx: cuStreamGetCtx(CUstream, *mut CUcontext);
        stream_get_priority: cuStreamGetPriority(CUstream, *mut c_int);
        stream_get_flags: cuStreamGetFlags(CUstream, *mut c_uint);
        stream_query: cuStreamQuery(CUstream);
        stream_synchronize: cuStreamSynchronize(CUstream);
        stream_wait_event: cuStreamWaitEvent(CUstream, CUevent, c_uint);
        launch_host_func: cuLaunchHostFunc(CUstream, CUhostFn, *mut c_void);

        event_create: cuEventCreate(*mut CUevent, c_uint);
        event_destroy: cuEventDestroy_v2(CUevent);
        event_record_with_flags: cuEventRecordWithFlags(CUevent, CUstream, c_uint);
        event_query: cuEventQuery(CUevent);
        event_synchronize: cuEventSynchronize(CUevent);
        event_elapsed_time: cuEventElapsedTime(*mut f32, CUevent, CUevent);
        ipc_get_event_handle: cuIpcGetEventHandle(*mut CUipcEventHandle, CUevent);
        ipc_open_event_handle: cuIpcOpenEventHandle(*mut CUevent, CUipcEventHandle);

        mem_alloc: cuMemAlloc_v2(*mut CUdeviceptr, usize);
        mem_free: cuMemFree_v2(CUdeviceptr);
        mem_get_info: cuMemGetInfo_v2(*mut usize, *mut usize);
        ipc_get_mem_handle: cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
        ipc_open_mem_handle: cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        ipc_close_mem_handle: cuIpcCloseMemHandle(CUdeviceptr);
        pointer_get_attribute: cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);

        mem_get_allocation_granularity:
            cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
        mem_address_reserve: cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        mem_address_free: cuMemAddressFree(CUdeviceptr, usize);
        mem_create: cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        mem_release: cuMemRelease(CUmemGenericAllocationHandle);
        mem_map: cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        mem_unmap: cuMemUnmap(CUdeviceptr, usize);
        mem_set_access: cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        mem_export_to_shareable_handle: cuMemExportToShareableHandle(
            *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
        mem_import_from_shareable_handle: cuMemImportFromShareableHandle(
            *mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);

        device_get_default_mem_pool: cuDeviceGetDefaultMemPool(*mut CUmemoryPool, CUdevice);
        mem_pool_create: cuMemPoolCreate(*mut CUmemoryPool, *const CUmemPoolProps);
        mem_pool_destroy: cuMemPoolDestroy(CUmemoryPool);
        mem_alloc_from_pool_async: cuMemAllocFromPoolAsync(*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        mem_free_async: cuMemFreeAsync(CUdeviceptr, CUstream);
        mem_pool_get_attribute: cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        mem_pool_set_attribute: cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        mem_pool_trim_to: cuMemPoolTrimTo(CUmemoryPool, usize);
        mem_pool_set_access: cuMemPoolSetAccess(CUmemoryPool, *const CUmemAccessDesc, usize);

        mem_host_alloc: cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        mem_free_host: cuMemFreeHost(*mut c_void);
        mem_host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        mem_host_unregister: cuMemHostUnregister(*mut c_void);
        mem_host_get_device_pointer: cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);

        memcpy_async: cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        memcpy_htod_async: cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        memcpy_dtoh_async: cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        memcpy_dtod_async: cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        memcpy_peer_async: cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        memcpy_2d_async: cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
        memcpy_htod: cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
        memcpy_dtoh: cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
        memset_d8_async: cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        memset_d16_async: cuMemsetD16Async(CUdeviceptr, c_ushort, usize, CUstream);
        memset_d32_async: cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream);

        stream_begin_capture: cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        stream_end_capture: cuStreamEndCapture(CUstream, *mut CUgraph);
        stream_get_capture_info: cuStreamGetCaptureInfo_v2(
            CUstream, *mut CUstreamCaptureStatus, *mut cuuint64_t, *mut CUgraph, *mut *const CUgraphNode, *mut usize);
        stream_update_capture_dependencies:
            cuStreamUpdateCaptureDependencies(CUstream, *mut CUgraphNode, usize, c_uint);
        thread_exchange_stream_capture_mode: cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);

        graph_instantiate_with_flags: cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        graph_launch: cuGraphLaunch(CUgraphExec, CUstream);
        graph_exec_kernel_node_set_params:
            cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, *const CUDA_KERNEL_NODE_PARAMS);
        graph_get_nodes: cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        graph_get_edges: cuGraphGetEdges(CUgraph, *mut CUgraphNode, *mut CUgraphNode, *mut usize);
        graph_node_get_type: cuGraphNodeGetType(CUgraphNode, *mut CUgraphNodeType);
        graph_debug_dot_print: cuGraphDebugDotPrint(CUgraph, *const c_char, c_uint);
        graph_destroy: cuGraphDestroy(CUgraph);
        graph_exec_destroy: cuGraphExecDestroy(CUgraphExec);
        user_object_create: cuUserObjectCreate(*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint);
        user_object_release: cuUserObjectRelease(CUuserObject, c_uint);
        graph_retain_user_object: cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);

        module_load_data: cuModuleLoadData(*mut CUmodule, *const c_void);
        module_unload: cuModuleUnload(CUmodule);
        module_get_function: cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        launch_kernel: cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void);
    }
    optional {
        // Since 12.8. Unlike the older one it queries nothing.
        event_elapsed_time_v2: cuEventElapsedTime as "cuEventElapsedTime_v2"(*mut f32, CUevent, CUevent);
        // Since 12.1.
        multicast_get_granularity:
            cuMulticastGetGranularity(*mut usize, *const CUmulticastObjectProp, CUmulticastGranularity_flags);
        // Since 12.2, 12.3 and 12.3, for conditional nodes.
        graph_add_node: cuGraphAddNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *mut CUgraphNodeParams);
        graph_conditional_handle_create:
            cuGraphConditionalHandleCreate(*mut CUgraphConditionalHandle, CUgraph, CUcontext, c_uint, c_uint);
        stream_begin_capture_to_graph: cuStreamBeginCaptureToGraph(
            CUstream, CUgraph, *const CUgraphNode, *const CUgraphEdgeData, usize, CUstreamCaptureMode);
        // Since 12.4.
        func_get_param_info: cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    }
    newer {
        // Since 12.5.
        ctx_record_event: cuCtxRecordEvent(CUcontext, CUevent);
    }
}

impl Api {
    /// The first symbol for conditional nodes that this driver lacks.
    pub(crate) fn missing_for_conditionals(&self) -> Option<&'static str> {
        if self.graph_add_node.is_none() {
            Some("cuGraphAddNode")
        } else if self.graph_conditional_handle_create.is_none() {
            Some("cuGraphConditionalHandleCreate")
        } else if self.stream_begin_capture_to_graph.is_none() {
            Some("cuStreamBeginCaptureToGraph")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_unique_and_none_is_a_per_thread_variant() {
        let mut symbols = Api::SYMBOLS.to_vec();
        symbols.sort_unstable();
        let count = symbols.len();
        symbols.dedup();
        assert_eq!(symbols.len(), count);
        assert!(symbols.iter().all(|symbol| symbol.starts_with("cu") && !symbol.ends_with("_ptsz")));
    }

    #[test]
    fn another_library_is_refused_with_the_first_missing_symbol() {
        let Ok(other) = SharedLibrary::open("libc", &["libc.so.6".to_owned()]) else { return };
        let missing = Api::resolve(&other).err().expect("the C library is another");
        assert_eq!(missing.to_string(), "libc.so.6 has no symbol cuInit");
    }

    #[test]
    fn structures_have_the_size_of_the_header() {
        // sizeof() of the C structures, the same from CUDA 12.0 to 13.0.
        assert_eq!(size_of::<CUmemAllocationProp>(), 32);
        assert_eq!(size_of::<CUmemAccessDesc>(), 12);
        assert_eq!(size_of::<CUmulticastObjectProp>(), 32);
        assert_eq!(size_of::<CUmemPoolProps>(), 88);
        assert_eq!(size_of::<CUipcEventHandle>(), 64);
        assert_eq!(size_of::<CUipcMemHandle>(), 64);
        assert_eq!(size_of::<CUmemFabricHandle>(), 64);
        assert_eq!(size_of::<CUgraphNodeParams>(), 256);
        assert_eq!(size_of::<CUDA_KERNEL_NODE_PARAMS>(), 72);
    }
}
