//! Arguments and results of calls, in the few forms that a hook cares about.
//! A value is borrowed and costs nothing to make; text is made of it only by those who want text.

use std::fmt::Debug;

use crate::{
    Access, Address, BlasMath, CaptureId, CaptureMode, CaptureState, ConditionalId, ConditionalKind, DeviceAccess,
    DeviceId, DeviceProperties, DevicePtr, EventId, EventOptions, EventScope, ForeignStream, FunctionId, Granularity,
    GraphExecId, GraphId, GraphTopology, HandleId, HostCallback, HostOptions, HostPtr, HostRange, InstantiateOptions,
    IpcEventHandle, KernelArg, KernelSource, LaunchShape, Library, MemoryInfo, ModuleId, NodeId, Pattern, PhysicalId,
    PhysicalOptions, PoolAttribute, PoolId, PriorityRange, RawHandle, Sgemm, ShareKind, SharedMemory, StreamHandle,
    StreamId, StreamInfo, StreamOptions,
};

/// One argument or result.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Value<'a> {
    /// A size, count or address arithmetic.
    Number(u64),
    /// Something that reads the same in every run of the same program: ids, options, enums.
    Plain(&'a dyn Debug),
    /// An address that the device knows: its own, or one of pinned memory, which differs from run to run.
    Device(DevicePtr),
    /// The arguments of a kernel; addresses among them.
    Arguments(&'a [KernelArg]),
    /// A product of matrices; addresses in it.
    Product(&'a Sgemm),
    /// An address of this process, which differs from run to run.
    Host(HostPtr),
    /// A stretch of this process's memory.
    HostRange(&'a HostRange),
    /// A handle of the system below, which differs from run to run.
    Raw(RawHandle),
    /// What a stream is; it holds a raw handle.
    Stream(&'a StreamInfo),
    /// A stream's device, and its raw handle.
    StreamHandle(&'a StreamHandle),
    /// Bytes that go in, or that came out.
    Bytes(&'a [u8]),
    /// Room for that many bytes, to be filled by the call.
    Room(usize),
    /// Something with nothing to compare in it but its kind.
    Opaque(&'static str),
}

/// What can be looked at as a [`Value`].
pub(super) trait Shown {
    fn shown(&self) -> Value<'_>;
}

/// Types whose `Debug` form is the same in every run.
macro_rules! plain {
    ($($ty:ty),* $(,)?) => {$(
        impl Shown for $ty {
            fn shown(&self) -> Value<'_> {
                Value::Plain(self)
            }
        }
    )*};
}

plain! {
    (), bool, i32, u32, f32, &str,
    DeviceId, StreamId, EventId, PhysicalId, PoolId, CaptureId, GraphId, GraphExecId, NodeId, ConditionalId, ModuleId,
    FunctionId, HandleId, Option<DeviceId>, Option<DevicePtr>, Vec<NodeId>,
    DeviceProperties, StreamOptions, PriorityRange, EventOptions, EventScope, MemoryInfo, Granularity, PhysicalOptions,
    ShareKind, Access, &[DeviceAccess], PoolAttribute, HostOptions, Pattern, CaptureMode, CaptureState, GraphTopology,
    InstantiateOptions, ConditionalKind, LaunchShape, Library, BlasMath,
}

/// Types that are another form of value.
macro_rules! shown {
    ($($ty:ty: |$value:pat_param| $shown:expr;)*) => {$(
        impl Shown for $ty {
            fn shown(&self) -> Value<'_> {
                let $value = self;
                $shown
            }
        }
    )*};
}

shown! {
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
    &mut [u8]: |room| Value::Room(room.len());
    String: |text| Value::Bytes(text.as_bytes());
    &KernelSource: |source| Value::Plain(&source.name);
    HostCallback: |_| Value::Opaque("callback");
    IpcEventHandle: |_| Value::Opaque("event handle");
    &IpcEventHandle: |_| Value::Opaque("event handle");
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
