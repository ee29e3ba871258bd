//! A driver that calls a hook before and after every call. The table at the end lists every signature of the contract
//! once; the decorators are hooks. A call that the hook does not refuse is forwarded unchanged.

use std::sync::Arc;
use std::time::Duration;

use super::value::{AsValue, Value};
use crate::fork::{self, Origin};
use crate::{
    Access, Address, BlasMath, Call, CaptureMode, CaptureState, Captures, ConditionalId, ConditionalKind, Copies,
    DeviceAccess, DeviceId, DeviceProperties, DevicePtr, Devices, Driver, DriverError, EventId, EventOptions,
    EventScope, Events, ForeignStream, FunctionId, Granularity, GraphExecId, GraphId, GraphTopology, Graphs, HandleId,
    HostCallback, HostMemory, HostOptions, HostPtr, HostRange, InstantiateOptions, IpcEventHandle, IpcMemoryHandle,
    KernelArg, KernelSource, Kernels, LaunchShape, Libraries, Library, Memory, MemoryInfo, ModuleId, NodeId, Pattern,
    PhysicalId, PhysicalOptions, PoolAttribute, PoolId, Pools, PriorityRange, RawHandle, Result, Sgemm, ShareKind,
    SharedMemory, StreamHandle, StreamId, StreamInfo, StreamOptions, Streams, Suballocations, VirtualMemory,
};

/// The arguments of a call with their names, in order.
pub type Arguments<'a> = &'a [(&'static str, Value<'a>)];

/// What a call returned. For calls that fill a buffer, its bytes.
pub type Outcome<'a> = std::result::Result<Value<'a>, &'a DriverError>;

/// Called before and after every call of a [`Hooked`] driver.
pub trait Hook: Send + Sync {
    /// The state of a call from [`before`](Self::before) to [`after`](Self::after).
    type CallState;

    /// A call is about to be made to `inner`. If this returns an error, the call returns it: `inner` and
    /// [`after`](Self::after) are not called.
    fn before(&self, inner: &dyn Driver, call: Call, arguments: Arguments<'_>) -> Result<Self::CallState>;

    /// The call was made.
    fn after(&self, inner: &dyn Driver, call: Call, state: Self::CallState, outcome: Outcome<'_>);

    /// An allocator reported a suballocation ([`Suballocations`]); such a call cannot fail and returns nothing.
    fn suballocation(&self, call: Call, arguments: Arguments<'_>);

    /// Whether it needs these reports even if `inner` does not.
    fn tracks_suballocations(&self) -> bool {
        false
    }
}

/// A decorator with a hook on every call. [`Driver::kind`], [`Driver::now`] and [`Driver::entropy`] are forwarded
/// without the hook. In a forked child calls fail before they reach it ([`fork`]): it may need a lock that a thread of
/// the parent held.
pub struct Hooked<H> {
    inner: Arc<dyn Driver>,
    hook: H,
    origin: Origin,
}

impl<H: Hook> Hooked<H> {
    /// Decorates `inner` with `hook`.
    #[must_use]
    pub fn with_hook(inner: Arc<dyn Driver>, hook: H) -> Self {
        Self { inner, hook, origin: Origin::here() }
    }

    /// The hook.
    #[must_use]
    pub const fn hook(&self) -> &H {
        &self.hook
    }

    /// Whether this process was forked since it was made: the hook may be locked for ever.
    pub(super) fn is_inherited(&self) -> bool {
        !self.origin.is_here()
    }

    /// The decorated driver. Calls made on it directly do not reach the hook.
    #[must_use]
    pub const fn inner(&self) -> &Arc<dyn Driver> {
        &self.inner
    }
}

impl<H> std::fmt::Debug for Hooked<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hooked({})", self.inner.kind())
    }
}

impl<H: Hook> Driver for Hooked<H> {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn entropy(&self) -> u64 {
        self.inner.entropy()
    }

    fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        self.inner.is_device_memory(ptr, bytes)
    }
}

/// Generates the methods of the table: `impl Trait { Call method(arguments) -> result; }`. `fills` names the buffer
/// whose bytes are the result; `@unsafe` marks an unsafe method. A method without a result is a suballocation report.
macro_rules! forward {
    ($(impl $trait:ident { $($(@$unsafe:tt)? $call:ident $method:ident($($arg:ident: $ty:ty),*)
        $(-> $ret:ty $(, fills $buffer:ident)?)?;)* })*) => {$(
        impl<H: Hook> $trait for Hooked<H> {
            $(forward! { @method $(@$unsafe)? $call $method($($arg: $ty),*) $(-> $ret $(, fills $buffer)?)? })*
        }
    )*};
    (@method $(@$unsafe:tt)? $call:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $ret:ty $(, fills $buffer:ident)?) => {
        $($unsafe)? fn $method(&self, $($arg: $ty),*) -> Result<$ret> {
            if self.is_inherited() {
                return Err(fork::error(Call::$call.name()));
            }
            let inner = &*self.inner;
            let state = self.hook.before(inner, Call::$call, &[$((stringify!($arg), $arg.as_value())),*])?;
            // SAFETY: for an unsafe method, the caller of this one makes the same promises.
            let result = $($unsafe)? { inner.$method($($arg),*) };
            let outcome = match &result {
                Ok(value) => Ok(forward! { @value value $($buffer)? }),
                Err(error) => Err(error),
            };
            self.hook.after(inner, Call::$call, state, outcome);
            result
        }
    };
    (@method $call:ident $method:ident($($arg:ident: $ty:ty),*)) => {
        fn $method(&self, $($arg: $ty),*) {
            if self.is_inherited() {
                return;
            }
            self.hook.suballocation(Call::$call, &[$((stringify!($arg), $arg.as_value())),*]);
            self.inner.$method($($arg),*);
        }
    };
    (@value $value:ident) => { $value.as_value() };
    (@value $value:ident $buffer:ident) => {{
        let () = $value;
        Value::Bytes($buffer)
    }};
}

forward! {
    impl Devices {
        DeviceCount device_count() -> u32;
        DeviceProperties device_properties(device: DeviceId) -> DeviceProperties;
        ContextRetain context_retain(device: DeviceId) -> RawHandle;
        ContextRelease context_release(device: DeviceId) -> ();
        ContextIsActive context_is_active(device: DeviceId) -> bool;
        CurrentDevice current_device() -> Option<DeviceId>;
        SetCurrentDevice set_current_device(device: DeviceId) -> ();
        DeviceSynchronize device_synchronize(device: DeviceId) -> ();
        PeerCanAccess peer_can_access(device: DeviceId, peer: DeviceId) -> bool;
        PeerEnable peer_enable(device: DeviceId, peer: DeviceId) -> ();
        PeerDisable peer_disable(device: DeviceId, peer: DeviceId) -> ();
    }
    impl Streams {
        StreamDefault stream_default(device: DeviceId) -> StreamId;
        StreamPerThread stream_per_thread(device: DeviceId) -> StreamId;
        StreamPriorityRange stream_priority_range(device: DeviceId) -> PriorityRange;
        StreamCreate stream_create(device: DeviceId, options: StreamOptions) -> StreamId;
        StreamDestroy stream_destroy(stream: StreamId) -> ();
        StreamAdopt stream_adopt(device: DeviceId, stream: ForeignStream) -> StreamId;
        StreamInfo stream_info(stream: StreamId) -> StreamInfo;
        StreamHandle stream_handle(stream: StreamId) -> StreamHandle;
        StreamQuery stream_query(stream: StreamId) -> bool;
        StreamSynchronize stream_synchronize(stream: StreamId) -> ();
        StreamWaitEvent stream_wait_event(stream: StreamId, event: EventId, scope: EventScope) -> ();
        StreamHostCallback stream_host_callback(stream: StreamId, callback: HostCallback) -> ();
    }
    impl Events {
        EventCreate event_create(device: DeviceId, options: EventOptions) -> EventId;
        EventDestroy event_destroy(event: EventId) -> ();
        EventRecord event_record(event: EventId, stream: StreamId, scope: EventScope) -> ();
        EventRecordContext event_record_context(event: EventId) -> ();
        EventQuery event_query(event: EventId) -> bool;
        EventSynchronize event_synchronize(event: EventId) -> ();
        EventElapsedMs event_elapsed_ms(start: EventId, end: EventId) -> f32;
        EventExport event_export(event: EventId) -> IpcEventHandle;
        EventImport event_import(device: DeviceId, handle: &IpcEventHandle) -> EventId;
    }
    impl Memory {
        MemAlloc mem_alloc(device: DeviceId, bytes: u64) -> DevicePtr;
        MemFree mem_free(ptr: DevicePtr) -> ();
        MemInfo mem_info(device: DeviceId) -> MemoryInfo;
        MemExport mem_export(ptr: DevicePtr) -> IpcMemoryHandle;
        MemImport mem_import(device: DeviceId, handle: &IpcMemoryHandle) -> DevicePtr;
        MemClose mem_close(device: DeviceId, ptr: DevicePtr) -> ();
    }
    impl VirtualMemory {
        VmGranularity vm_granularity(device: DeviceId, which: Granularity) -> u64;
        VmReserve vm_reserve(bytes: u64, align: u64, hint: Option<DevicePtr>) -> DevicePtr;
        @unsafe VmFreeRange vm_free_range(ptr: DevicePtr, bytes: u64) -> ();
        VmCreate vm_create(device: DeviceId, bytes: u64, options: PhysicalOptions) -> PhysicalId;
        VmRelease vm_release(physical: PhysicalId) -> ();
        VmMap vm_map(ptr: DevicePtr, physical: PhysicalId) -> ();
        VmUnmap vm_unmap(ptr: DevicePtr, bytes: u64) -> ();
        VmSetAccess vm_set_access(ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> ();
        VmExport vm_export(physical: PhysicalId, kind: ShareKind) -> SharedMemory;
        VmImport vm_import(device: DeviceId, shared: &SharedMemory, bytes: u64) -> PhysicalId;
    }
    impl Pools {
        PoolDefault pool_default(device: DeviceId) -> PoolId;
        PoolCreate pool_create(device: DeviceId) -> PoolId;
        PoolDestroy pool_destroy(pool: PoolId) -> ();
        PoolAlloc pool_alloc(pool: PoolId, bytes: u64, stream: StreamId) -> DevicePtr;
        PoolFree pool_free(ptr: DevicePtr, stream: StreamId) -> ();
        PoolGet pool_get(pool: PoolId, attribute: PoolAttribute) -> u64;
        PoolSet pool_set(pool: PoolId, attribute: PoolAttribute, value: u64) -> ();
        PoolTrim pool_trim(pool: PoolId, keep: u64) -> ();
        PoolSetAccess pool_set_access(pool: PoolId, device: DeviceId, access: Access) -> ();
    }
    impl HostMemory {
        HostAlloc host_alloc(device: DeviceId, bytes: u64, options: HostOptions) -> HostPtr;
        HostFree host_free(ptr: HostPtr) -> ();
        HostRegister host_register(device: DeviceId, range: HostRange, options: HostOptions) -> ();
        HostUnregister host_unregister(ptr: HostPtr) -> ();
        HostDevicePtr host_device_ptr(device: DeviceId, ptr: HostPtr) -> DevicePtr;
        HostRead host_read(ptr: HostPtr, into: &mut [u8]) -> (), fills into;
        HostWrite host_write(ptr: HostPtr, bytes: &[u8]) -> ();
    }
    impl Copies {
        Copy copy(dst: Address, src: Address, bytes: u64, stream: StreamId) -> ();
        Copy2d copy_2d(
            dst: Address, dst_pitch: u64, src: Address, src_pitch: u64, width: u64, rows: u64, stream: StreamId
        ) -> ();
        CopyPeer copy_peer(
            dst: DevicePtr, dst_device: DeviceId, src: DevicePtr, src_device: DeviceId, bytes: u64, stream: StreamId
        ) -> ();
        Fill fill(dst: DevicePtr, pattern: Pattern, count: u64, stream: StreamId) -> ();
        Upload upload(device: DeviceId, dst: DevicePtr, bytes: &[u8]) -> ();
        Download download(device: DeviceId, src: DevicePtr, into: &mut [u8]) -> (), fills into;
    }
    impl Captures {
        CaptureBegin capture_begin(stream: StreamId, mode: CaptureMode) -> ();
        CaptureEnd capture_end(stream: StreamId) -> GraphId;
        CaptureState capture_state(stream: StreamId) -> CaptureState;
        CaptureDependencies capture_dependencies(stream: StreamId) -> Vec<NodeId>;
        CaptureTopology capture_topology(stream: StreamId) -> GraphTopology;
        CaptureModeExchange capture_mode_exchange(mode: CaptureMode) -> CaptureMode;
    }
    impl Graphs {
        GraphInstantiate graph_instantiate(graph: GraphId, options: InstantiateOptions) -> GraphExecId;
        @unsafe GraphLaunch graph_launch(exec: GraphExecId, stream: StreamId) -> ();
        @unsafe GraphExecSetKernel graph_exec_set_kernel(
            exec: GraphExecId, node: NodeId, function: FunctionId, shape: LaunchShape, args: &[KernelArg]
        ) -> ();
        GraphTopology graph_topology(graph: GraphId) -> GraphTopology;
        GraphDot graph_dot(graph: GraphId) -> String;
        GraphDestroy graph_destroy(graph: GraphId) -> ();
        GraphExecDestroy graph_exec_destroy(exec: GraphExecId) -> ();
        GraphRaw graph_raw(graph: GraphId) -> RawHandle;
        GraphExecRaw graph_exec_raw(exec: GraphExecId) -> RawHandle;
        ConditionalCreate conditional_create(stream: StreamId, default: u32) -> ConditionalId;
        ConditionalBegin conditional_begin(
            stream: StreamId, conditional: ConditionalId, kind: ConditionalKind, body: StreamId, mode: CaptureMode
        ) -> ();
    }
    impl Kernels {
        ModuleLoad module_load(device: DeviceId, source: &KernelSource) -> ModuleId;
        ModuleUnload module_unload(module: ModuleId) -> ();
        FunctionGet function_get(module: ModuleId, name: &str) -> FunctionId;
        FunctionParameters function_parameters(function: FunctionId) -> Option<Vec<u64>>;
        @unsafe KernelLaunch kernel_launch(
            function: FunctionId, shape: LaunchShape, args: &[KernelArg], stream: StreamId
        ) -> ();
    }
    impl Libraries {
        LibraryCreate library_create(library: Library, device: DeviceId) -> HandleId;
        LibraryDestroy library_destroy(handle: HandleId) -> ();
        LibrarySetStream library_set_stream(handle: HandleId, stream: StreamId) -> ();
        LibraryRaw library_raw(handle: HandleId) -> RawHandle;
        BlasSetWorkspace blas_set_workspace(handle: HandleId, ptr: DevicePtr, bytes: u64) -> ();
        BlasSetMath blas_set_math(handle: HandleId, math: BlasMath) -> ();
        BlasSetAtomics blas_set_atomics(handle: HandleId, allowed: bool) -> ();
        BlasSgemm blas_sgemm(handle: HandleId, product: &Sgemm) -> ();
    }
}

impl<H: Hook> Suballocations for Hooked<H> {
    fn tracks_suballocations(&self) -> bool {
        self.hook.tracks_suballocations() || self.inner.tracks_suballocations()
    }

    fn label_memory(&self, ptr: DevicePtr, bytes: u64, label: &str) {
        self.inner.label_memory(ptr, bytes, label);
    }

    fn label_stream(&self, stream: StreamId, label: &str) {
        self.inner.label_stream(stream, label);
    }

    forward! { @method Suballocated suballocated(ptr: DevicePtr, bytes: u64, stream: StreamId) }
    forward! {
        @method SuballocatedInPlace suballocated_in_place(ptr: DevicePtr, bytes: u64, stream: StreamId)
    }
    forward! { @method SuballocationFreed suballocation_freed(ptr: DevicePtr, bytes: u64) }
}
