//! Arguments and results of calls, in the few forms that hooks distinguish. A value borrows and is cheap to make; text
//! is made only by hooks that need text.

use std::fmt::Debug;

use crate::{
    Access, Address, BlasMath, CaptureId, CaptureMode, CaptureState, ConditionalId, ConditionalKind, DeviceAccess,
    DeviceId, DeviceProperties, DevicePtr, EventId, EventOptions, EventScope, ForeignStream, FunctionId, Granularity,
    GraphExecId, GraphId, GraphTopology, HandleId, HostCallback, HostOptions, HostPtr, HostRange, InstantiateOptions,
    IpcEventHandle, IpcMemoryHandle, KernelArg, KernelSource, LaunchShape, Library, MemoryInfo, ModuleId, NodeId,
    Pattern, PhysicalId, PhysicalOptions, PoolAttribute, PoolId, PriorityRange, RawHandle, Sgemm, ShareKind,
    SharedMemory, StreamHandle, StreamId, StreamInfo, StreamOptions,
};

/// One argument or result.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Value<'a> {
    /// A size or count.
    Number(u64),
    /// Something whose `Debug` form is the same in every run of the same program: ids, options, enums.
    Plain(&'a dyn Debug),
    /// A device address: of device memory, or of pinned memory, which differs from run to run.
    Device(DevicePtr),
    /// The arguments of a kernel, which may contain addresses.
    Arguments(&'a [KernelArg]),
    /// A matrix product, which contains addresses.
    Product(&'a Sgemm),
    /// An address of this process, which differs from run to run.
    Host(HostPtr),
    /// A range of this process's memory.
    HostRange(&'a HostRange),
    /// A handle of the system below, which differs from run to run.
    Raw(RawHandle),
    /// The attributes of a stream, with its raw handle.
    Stream(&'a StreamInfo),
    /// The device and raw handle of a stream.
    StreamHandle(&'a StreamHandle),
    /// Bytes, in either direction.
    Bytes(&'a [u8]),
    /// A buffer of that many bytes, to be filled by the call.
    Buffer(usize),
    /// Something of which only the kind can be compared.
    Opaque(&'static str),
}

/// Types that can be shown as a [`Value`].
pub(super) trait AsValue {
    fn as_value(&self) -> Value<'_>;
}

/// Types whose `Debug` form is the same in every run.
macro_rules! plain {
    ($($ty:ty),* $(,)?) => {$(
        impl AsValue for $ty {
            fn as_value(&self) -> Value<'_> {
                Value::Plain(self)
            }
        }
    )*};
}

plain! {
    (), bool, i32, u32, f32, &str,
    DeviceId, StreamId, EventId, PhysicalId, PoolId, CaptureId, GraphId, GraphExecId, NodeId, ConditionalId, ModuleId,
    FunctionId, HandleId, Option<DeviceId>, Option<DevicePtr>, Vec<NodeId>, Option<Vec<u64>>,
    DeviceProperties, StreamOptions, PriorityRange, EventOptions, EventScope, MemoryInfo, Granularity, PhysicalOptions,
    ShareKind, Access, &[DeviceAccess], PoolAttribute, HostOptions, Pattern, CaptureMode, CaptureState, GraphTopology,
    InstantiateOptions, ConditionalKind, LaunchShape, Library, BlasMath,
}

/// Types with other forms.
macro_rules! values {
    ($($ty:ty: |$value:pat_param| $as_value:expr;)*) => {$(
        impl AsValue for $ty {
            fn as_value(&self) -> Value<'_> {
                let $value = self;
                $as_value
            }
        }
    )*};
}

values! {
    u64: |&number| Value::Number(number);
    DevicePtr: |&ptr| Value::Device(ptr);
    &[KernelArg]: |args| Value::Arguments(args);
    &Sgemm: |product| Value::Product(product);
    HostPtr: |&ptr| Value::Host(ptr);
    HostRange: |range| Value::HostRange(range);
    RawHandle: |&raw| Value::Raw(raw);
    ForeignStream: |stream| Value::Raw(stream.raw());
    StreamInfo: |info| Value::Stream(info);
    StreamHandle: |handle| Value::StreamHandle(handle);
    &[u8]: |bytes| Value::Bytes(bytes);
    &mut [u8]: |buffer| Value::Buffer(buffer.len());
    String: |text| Value::Bytes(text.as_bytes());
    &KernelSource: |source| Value::Plain(&source.name);
    HostCallback: |_| Value::Opaque("callback");
    IpcEventHandle: |_| Value::Opaque("event handle");
    &IpcEventHandle: |_| Value::Opaque("event handle");
    IpcMemoryHandle: |_| Value::Opaque("memory handle");
    &IpcMemoryHandle: |_| Value::Opaque("memory handle");
    SharedMemory: |shared| Value::Opaque(kind_of(shared));
    &SharedMemory: |shared| Value::Opaque(kind_of(shared));
    Address: |address| match address {
        Address::Device(ptr) => Value::Device(*ptr),
        Address::Host(ptr) => Value::Host(*ptr),
    };
}

fn kind_of(shared: &SharedMemory) -> &'static str {
    match shared {
        SharedMemory::PosixFd(_) => "file descriptor",
        SharedMemory::Fabric(_) => "fabric handle",
    }
}
