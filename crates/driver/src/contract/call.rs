//! All calls of the contract, to count them, model their cost, inject faults and state when they are legal.

use std::fmt;

/// When a call is legal while a stream captures. Measured on an H200 (driver 580.159, November 2026) for the calls in
/// the suite `capture_rules`; assumed for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureRule {
    /// Always legal.
    Free,
    /// Work for a stream: captured if the stream captures, else run. On the legacy default stream it fails with
    /// `StreamCaptureImplicit` while a blocking stream of that device captures, and invalidates that capture.
    Stream,
    /// Potentially unsafe during capture in CUDA's terms, since it may wait for the device. Forbidden
    /// (`StreamCaptureUnsupported`) while this thread has a capture that is not relaxed, and while any thread has a
    /// global one, unless this thread has set a less strict mode for itself. A forbidden call invalidates the captures
    /// that forbid it.
    Guarded,
    /// Forbidden while any stream of the device captures, in every mode; invalidates those captures.
    Never,
    /// Forbidden like [`Never`](Self::Never), but refused by this driver: captures that began through it stay valid.
    Refused,
}

macro_rules! calls {
    ($($rule:ident: $($name:ident $method:ident,)*;)*) => {
        /// A call of the contract.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call {
            $($(#[doc = concat!("`", stringify!($method), "`")] $name,)*)*
        }

        impl Call {
            /// All calls, by rule and subject.
            pub const ALL: &'static [Self] = &[$($(Self::$name,)*)*];

            /// The name of its method, also in errors and logs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $($(Self::$name => stringify!($method),)*)* }
            }

            /// Its rule during capture.
            #[must_use]
            pub const fn capture_rule(self) -> CaptureRule {
                match self { $($(Self::$name => CaptureRule::$rule,)*)* }
            }

            /// The call with that method name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|call| call.name() == name)
            }
        }
    };
}

calls! {
    Free:
        DeviceCount device_count, DeviceProperties device_properties,
        ContextRetain context_retain, ContextRelease context_release, ContextIsActive context_is_active,
        CurrentDevice current_device, SetCurrentDevice set_current_device,
        PeerCanAccess peer_can_access, PeerEnable peer_enable, PeerDisable peer_disable,
        StreamDefault stream_default, StreamPerThread stream_per_thread, StreamPriorityRange stream_priority_range,
        StreamCreate stream_create, StreamDestroy stream_destroy, StreamAdopt stream_adopt, StreamInfo stream_info,
        StreamHandle stream_handle,
        EventCreate event_create, EventDestroy event_destroy, EventElapsedMs event_elapsed_ms,
        EventExport event_export, EventImport event_import,
        MemInfo mem_info, MemExport mem_export, MemImport mem_import, MemClose mem_close,
        VmGranularity vm_granularity, VmReserve vm_reserve, VmFreeRange vm_free_range, VmCreate vm_create,
        VmRelease vm_release, VmMap vm_map, VmUnmap vm_unmap, VmSetAccess vm_set_access, VmExport vm_export,
        VmImport vm_import,
        PoolDefault pool_default, PoolSetAccess pool_set_access,
        HostDevicePtr host_device_ptr, HostRead host_read, HostWrite host_write,
        CaptureBegin capture_begin, CaptureEnd capture_end, CaptureState capture_state,
        CaptureDependencies capture_dependencies, CaptureTopology capture_topology,
        CaptureModeExchange capture_mode_exchange,
        ConditionalCreate conditional_create, ConditionalBegin conditional_begin,
        GraphTopology graph_topology, GraphDot graph_dot, GraphDestroy graph_destroy,
        GraphExecDestroy graph_exec_destroy, GraphRaw graph_raw, GraphExecRaw graph_exec_raw,
        GraphExecSetKernel graph_exec_set_kernel,
        ModuleLoad module_load, ModuleUnload module_unload, FunctionGet function_get,
        FunctionParameters function_parameters,
        LibraryCreate library_create, LibrarySetStream library_set_stream,
        LibraryRaw library_raw, BlasSetWorkspace blas_set_workspace, BlasSetMath blas_set_math,
        BlasSetAtomics blas_set_atomics,
        Suballocated suballocated, SuballocatedInPlace suballocated_in_place, SuballocationFreed suballocation_freed,
    ;
    Stream:
        StreamWaitEvent stream_wait_event, StreamHostCallback stream_host_callback,
        EventRecord event_record,
        Copy copy, Copy2d copy_2d, CopyPeer copy_peer, Fill fill, Upload upload, Download download,
        GraphLaunch graph_launch, KernelLaunch kernel_launch, BlasSgemm blas_sgemm,
    ;
    Guarded:
        StreamQuery stream_query, StreamSynchronize stream_synchronize,
        EventQuery event_query, EventSynchronize event_synchronize,
        MemAlloc mem_alloc, MemFree mem_free,
        PoolCreate pool_create, PoolDestroy pool_destroy, PoolAlloc pool_alloc, PoolFree pool_free, PoolGet pool_get,
        PoolSet pool_set, PoolTrim pool_trim,
        HostAlloc host_alloc, HostFree host_free, HostRegister host_register, HostUnregister host_unregister,
        GraphInstantiate graph_instantiate,
    ;
    Never:
        DeviceSynchronize device_synchronize,
    ;
    Refused:
        LibraryDestroy library_destroy, EventRecordContext event_record_context,
    ;
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_by_name() {
        for &call in Call::ALL {
            assert_eq!(Call::from_name(call.name()), Some(call));
        }
        assert_eq!(Call::from_name("cuMemAlloc"), None);
    }
}
