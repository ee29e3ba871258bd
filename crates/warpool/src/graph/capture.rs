//! The scope of a capture: the operations that are possible during a capture, with memory that the graph owns.
//!
//! Work that is enqueued in the stream without this scope, by a library or by driver calls, is captured too, but the
//! graph does not own the memory of that work, and the program must keep it alive. This is not needed for blocks of the
//! graph ([`Capture::allocate`], [`Capture::keep`]). Pinned memory is in `capture_host.rs`.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use warpool_driver::{Address, CaptureId, FunctionId, GraphTopology, KernelArg, LaunchShape, Pattern};

use super::args::GraphArg;
use super::buffers::Owned;
use super::graph::{Graph, Stage};
use super::keys::{BufferKey, BufferOffset, CopyEndpoint};
use super::open_capture::OpenCapture;
use crate::error::GraphError;
use crate::generator::CapturedGenerators;
use crate::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPool, PoolScope};
use crate::{Device, Result, Stream, StreamLease};

/// An active capture, or the body of a conditional node in it. See [`Graph::capture`].
pub struct Capture<'a> {
    pub(super) open: &'a mut OpenCapture,
    pub(super) stream: Stream,
    pub(super) in_body: bool,
}

impl Graph {
    /// The scope of a capture that [`capture_begin`](Self::capture_begin) began.
    pub fn scope(&mut self) -> Result<Capture<'_>> {
        match &mut self.stage {
            Stage::Capturing(open) => {
                let stream = open.stream.clone();
                Ok(Capture { open, stream, in_body: false })
            }
            _ => Err(GraphError::NotCapturing.into()),
        }
    }

    /// During a capture: retains `pool`, whose memory the capture uses, for as long as the graph holds the capture. A
    /// second call for the same pool changes nothing.
    pub fn retain_pool(&mut self, pool: &MemPool) -> Result<()> {
        self.scope()?.retain_pool(pool)
    }
}

impl Capture<'_> {
    /// The capturing stream: the one that the capture began on, or the body's own stream in a body. In
    /// [`Graph::capture`] and in bodies it is the thread's current stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.open.registration.device()
    }

    /// The driver's id of the capture as a whole.
    #[must_use]
    pub fn id(&self) -> CaptureId {
        self.open.id
    }

    /// Whether this is the body of a conditional node.
    #[must_use]
    pub fn in_body(&self) -> bool {
        self.in_body
    }

    /// The allocator of the graph's memory.
    #[must_use]
    pub fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        self.open.registration.allocator()
    }

    /// The pool of memory that is requested on streams of the capture.
    #[must_use]
    pub fn pool(&self) -> &MemPool {
        self.open.registration.pool()
    }

    /// Retains `pool` for as long as the graph holds the capture. A second call for the same pool changes nothing.
    pub fn retain_pool(&mut self, pool: &MemPool) -> Result<()> {
        self.open.registration.retain(pool)
    }

    /// Routes requests of this thread to `pool` until the scope is dropped, and retains the pool with the graph.
    pub fn enter_pool(&mut self, pool: &MemPool) -> Result<PoolScope> {
        self.retain_pool(pool)?;
        pool.enter()
    }

    /// The nodes and edges captured so far; those of the body if this is one.
    pub fn topology(&self) -> Result<GraphTopology> {
        Ok(self.stream.driver().capture_topology(self.stream.id())?)
    }

    /// Allocates memory that the graph owns, for work on the scope's stream.
    pub fn allocate(&mut self, bytes: u64) -> Result<BufferKey> {
        self.allocate_on(bytes, &self.stream.clone())
    }

    /// Allocates memory that the graph owns, for another stream of the capture.
    pub fn allocate_on(&mut self, bytes: u64, stream: &Stream) -> Result<BufferKey> {
        self.expect_in_capture(stream)?;
        let block = self.allocator().allocate(bytes, stream)?;
        self.open.buffers.add(Owned::Moved(block))
    }

    /// Moves a block into the graph.
    pub fn keep(&mut self, block: DeviceBlock) -> Result<BufferKey> {
        block.expect_of(self.device().instance())?;
        self.open.buffers.add(Owned::Moved(block))
    }

    /// Shares a block with the graph, which keeps it alive.
    pub fn share(&mut self, block: Arc<DeviceBlock>) -> Result<BufferKey> {
        block.expect_of(self.device().instance())?;
        self.open.buffers.add(Owned::Shared(block))
    }

    /// A block that the graph owns.
    pub fn buffer(&self, key: BufferKey) -> Result<&DeviceBlock> {
        self.open.buffers.get(key)
    }

    /// Captures a kernel.
    ///
    /// # Safety
    /// As for [`Kernels::kernel_launch`](warpool_driver::Kernels::kernel_launch): the arguments match the kernel's
    /// parameters, and at every replay the kernel accesses no host memory of this process except pinned memory that
    /// stays pinned. Buffers that are passed by key live as long as the graph.
    #[expect(unsafe_code, reason = "passes on the promise of `kernel_launch`")]
    pub unsafe fn launch(
        &mut self,
        function: FunctionId,
        shape: LaunchShape,
        args: &[GraphArg],
        stream: &Stream,
    ) -> Result<()> {
        self.expect_in_capture(stream)?;
        self.expect_own_slots(args)?;
        self.record_host_uses(args, stream)?;
        let buffers = &self.open.buffers;
        let args: Vec<KernelArg> = args.iter().map(|&arg| buffers.argument(arg)).collect::<Result<_>>()?;
        // SAFETY: by this function's contract; the graph owns the buffers among the arguments.
        Ok(unsafe { stream.driver().kernel_launch(function, shape, &args, stream.id()) }?)
    }

    /// Fails if a slot among the arguments belongs to another graph, which may be freed before this one.
    fn expect_own_slots(&self, args: &[GraphArg]) -> Result<()> {
        let slots =
            args.iter().filter_map(|arg| if let GraphArg::Slot(Some(slot)) = arg { Some(slot.0) } else { None });
        for slot in slots {
            if !self.open.record.with(|generators: &mut CapturedGenerators| generators.has_slot(slot)) {
                return Err(GraphError::ForeignSlot.into());
            }
        }
        Ok(())
    }

    /// Records that a kernel on `stream` uses the pinned memory among its arguments.
    fn record_host_uses(&self, args: &[GraphArg], stream: &Stream) -> Result<()> {
        let mut keys = args.iter().filter_map(|arg| if let GraphArg::Host(at) = arg { Some(at.key) } else { None });
        keys.try_for_each(|key| self.open.buffers.get_host(key)?.record_use(stream))
    }

    /// Captures a fill with `count` copies of `pattern`.
    pub fn fill(&mut self, to: impl Into<BufferOffset>, pattern: Pattern, count: u64, stream: &Stream) -> Result<()> {
        self.expect_in_capture(stream)?;
        let ptr = self.open.buffers.address(to.into(), pattern.bytes().saturating_mul(count))?;
        Ok(stream.driver().fill(ptr, pattern, count, stream.id())?)
    }

    /// Captures a copy between buffers, of the device or of the host.
    pub fn copy(
        &mut self,
        to: impl Into<CopyEndpoint>,
        from: impl Into<CopyEndpoint>,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        self.expect_in_capture(stream)?;
        let (to, from) = (self.address(to.into(), bytes, stream)?, self.address(from.into(), bytes, stream)?);
        Ok(stream.driver().copy(to, from, bytes, stream.id())?)
    }

    /// The address of `bytes` bytes that work on `stream` is about to use. The use of pinned memory is recorded.
    fn address(&self, endpoint: CopyEndpoint, bytes: u64, stream: &Stream) -> Result<Address> {
        let buffers = &self.open.buffers;
        match endpoint {
            CopyEndpoint::Device(at) => Ok(Address::Device(buffers.address(at, bytes)?)),
            CopyEndpoint::Host(at) => {
                let ptr = buffers.host_address(at, bytes)?;
                buffers.get_host(at.key)?.record_use(stream)?;
                Ok(Address::Host(ptr))
            }
        }
    }

    /// Leases another stream and joins it to the capture, ordered after the work that the scope's stream holds now.
    /// Work in it must be [joined](Self::join) before the capture ends.
    pub fn fork(&mut self) -> Result<Fork> {
        let lease = self.device().lease_stream()?;
        lease.wait_stream(&self.stream)?;
        Ok(Fork { lease })
    }

    /// Makes the scope's stream wait for the work in a forked one.
    pub fn join(&mut self, fork: Fork) -> Result<()> {
        self.stream.wait_stream(&fork)
    }

    /// Fails unless `stream` takes part in this capture.
    pub(super) fn expect_in_capture(&self, stream: &Stream) -> Result<()> {
        let instance = self.device().instance();
        instance.expect_same(stream.instance(), "the stream")?;
        match instance.captures().find(stream)? {
            Some(capture) if Arc::ptr_eq(&capture.record, &self.open.record) => Ok(()),
            _ => Err(GraphError::StreamNotInCapture { stream: stream.id() }.into()),
        }
    }
}

impl fmt::Debug for Capture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.open.id, self.stream)
    }
}

/// A stream that was forked into a capture. See [`Capture::fork`].
#[must_use = "work in a forked stream must be joined before the capture ends"]
#[derive(Debug)]
pub struct Fork {
    lease: StreamLease,
}

impl Deref for Fork {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.lease
    }
}
