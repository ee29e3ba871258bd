//! Streams: created here, adopted from other libraries, and the two default streams of every device.

use std::ptr;
use std::sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, EventId, EventScope, ForeignStream, HostCallback, PriorityRange, RawHandle, Result,
    StreamHandle as StreamHandleInfo, StreamId, StreamInfo, StreamOptions, Streams,
};

use crate::CudaDriver;
use crate::callback;
use crate::context::CurrentContext;
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle, StreamHandle};
use crate::object_table::Shared;
use crate::sync::{lock, read, write};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

/// The handles of the default streams: null and `CU_STREAM_LEGACY` are the same stream; `CU_STREAM_PER_THREAD` is the
/// calling thread's.
const LEGACY: u64 = 0;
const LEGACY_ALIAS: u64 = 1;
pub(crate) const PER_THREAD: u64 = 2;

/// Set in serials that are not CUDA's: those count up from 1.
const NO_SERIAL: u64 = 1 << 63;

/// A stream in the object table.
pub(crate) struct Stream {
    /// CUDA's handle.
    pub(crate) raw: StreamHandle,
    /// The device it belongs to.
    pub(crate) device: DeviceId,
    /// Where it comes from.
    pub(crate) kind: StreamKind,
    /// The context it was created in. `None` for the default streams: they belong to the current context.
    pub(crate) context: Option<Context>,
    /// CUDA's id of the stream, which unlike the handle is not reused. 0 for the default streams; for a stream that
    /// was adopted while it captures, the handle with [`NO_SERIAL`].
    pub(crate) serial: u64,
    /// Priority, and whether it is non-blocking. Queried as early as possible: a query while the stream captures
    /// invalidates the capture.
    attributes: OnceLock<(i32, bool)>,
    /// Held shared while work is put into the stream, exclusively while the stream may start to capture.
    work: RwLock<()>,
}

/// Where a stream comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// The legacy default stream.
    Legacy,
    /// The per-thread default stream.
    PerThread,
    /// Created here, so destroyed here.
    Own,
    /// Created and destroyed by others.
    Adopted,
}

/// Holds [`Stream::work`]. Not needed for default streams: the legacy one cannot capture, and a per-thread one is used
/// by one thread only.
#[expect(dead_code, reason = "held, not read")]
pub(crate) enum WorkLock<'a> {
    None,
    Shared(RwLockReadGuard<'a, ()>),
    Exclusive(RwLockWriteGuard<'a, ()>),
}

impl Stream {
    const fn new(raw: StreamHandle, device: DeviceId, kind: StreamKind, context: Option<Context>, serial: u64) -> Self {
        Self { raw, device, kind, context, serial, attributes: OnceLock::new(), work: RwLock::new(()) }
    }

    /// A default stream of `device`.
    pub(crate) const fn default_of(device: DeviceId, kind: StreamKind) -> Self {
        let number = if matches!(kind, StreamKind::PerThread) { PER_THREAD } else { LEGACY };
        Self::new(CudaHandle::from_number(number), device, kind, None, 0)
    }

    /// Whether it can be destroyed, or forgotten if it was adopted.
    pub(crate) const fn is_destroyable(&self) -> bool {
        matches!(self.kind, StreamKind::Own | StreamKind::Adopted)
    }

    /// Keeps the stream from starting to capture, while work is put into it.
    pub(crate) fn lock_work(&self) -> WorkLock<'_> {
        if self.is_destroyable() { WorkLock::Shared(read(&self.work)) } else { WorkLock::None }
    }

    /// Keeps work out of the stream, while it may start to capture.
    pub(crate) fn lock_capture(&self) -> WorkLock<'_> {
        if self.is_destroyable() { WorkLock::Exclusive(write(&self.work)) } else { WorkLock::None }
    }
}

impl Streams for CudaDriver {
    fn stream_default(&self, device: DeviceId) -> Result<StreamId> {
        Ok(self.device(self.enter(Call::StreamDefault)?, device)?.stream_default)
    }

    fn stream_per_thread(&self, device: DeviceId) -> Result<StreamId> {
        Ok(self.device(self.enter(Call::StreamPerThread)?, device)?.stream_per_thread)
    }

    fn stream_priority_range(&self, device: DeviceId) -> Result<PriorityRange> {
        let site = self.enter(Call::StreamPriorityRange)?;
        let _current = self.on_device(site, device)?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: CUDA writes one number each to `least` and `greatest`.
        site.check(unsafe { (self.api.ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest) })?;
        Ok(PriorityRange { least, greatest })
    }

    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        let site = self.enter(Call::StreamCreate)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let flags = if options.non_blocking { NON_BLOCKING } else { 0 };
        let mut raw = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `raw`, and clamps the priority.
        site.check(unsafe { (self.api.stream_create_with_priority)(&raw mut raw, flags, options.priority) })?;
        let serial = match self.serial_of(site, raw) {
            Ok(serial) => serial,
            Err(error) => {
                // SAFETY: created above, known to nothing else.
                let code = unsafe { (self.api.stream_destroy)(raw) };
                if code != 0 {
                    tracing::warn!("a stream could not be destroyed: {}", ErrorCode::from_number(code));
                }
                return Err(error);
            }
        };
        let stream = Stream::new(CudaHandle::new(raw), device, StreamKind::Own, Some(context), serial);
        // If this fails now, `stream_info` reports it later.
        let _ = self.attributes_of(site, &stream);
        Ok(StreamId(self.streams.insert(stream)))
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::StreamDestroy)?;
        // Before the exclusive lock: a default stream must stay usable meanwhile.
        if !self.stream(site, stream)?.is_destroyable() {
            return Err(site.error(ErrorCode::InvalidHandle));
        }
        let object = self.streams.exclusive(stream.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        self.unbind_stream(site, stream)?;
        if object.kind == StreamKind::Own {
            // A capture that began on the stream ends with it, and its graph is destroyed.
            let _graphs = lock(&self.graph_lock);
            let _current = self.on_stream(site, &object)?;
            self.end_body_captures_of(&object);
            let code = {
                let _no_queries = write(&self.capture_queries);
                // SAFETY: `raw` came from cuStreamCreateWithPriority, and no other call can use it.
                unsafe { (self.api.stream_destroy)(object.raw.raw()) }
            };
            site.check(code)?;
            self.capture_dropped(&object);
        }
        object.remove();
        Ok(())
    }

    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        let site = self.enter(Call::StreamAdopt)?;
        let gpu = self.device(site, device)?;
        let RawHandle(number) = stream.raw();
        match number {
            LEGACY | LEGACY_ALIAS => return Ok(gpu.stream_default),
            PER_THREAD => return Ok(gpu.stream_per_thread),
            _ => {}
        }
        let _current = self.on_device(site, device)?;
        let raw = CudaHandle::from_number(number);
        let mut context = ptr::null_mut();
        // SAFETY: the maker of the `ForeignStream` promises that the handle is live; CUDA writes to `context`.
        site.check(unsafe { (self.api.stream_get_ctx)(raw.raw(), &raw mut context) })?;
        let context = CudaHandle::new(context);
        if self.device_of_context(site, context)? != gpu.raw {
            let detail = format!("the stream belongs to another device than {device}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        self.captures.expect_foreign();
        let no_serial = NO_SERIAL | number;
        let mut stream = Stream::new(raw, device, StreamKind::Adopted, Some(context), no_serial);
        if self.is_capturing(site, &stream).unwrap_or(false) {
            // Queries for its id or its attributes would invalidate the capture; the query for its context did not (on
            // an H200).
            return Ok(StreamId(self.streams.find_or_insert(|known| known.raw == raw, stream)));
        }
        stream.serial = self.serial_of(site, raw.raw())?;
        let _ = self.attributes_of(site, &stream);
        let serials = [stream.serial, no_serial];
        Ok(StreamId(self.streams.find_or_insert(|known| known.raw == raw && serials.contains(&known.serial), stream)))
    }

    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo> {
        let site = self.enter(Call::StreamInfo)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let (priority, non_blocking) = self.attributes_of(site, &stream)?;
        Ok(StreamInfo { device: stream.device, priority, non_blocking, raw: stream.raw.exposed() })
    }

    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandleInfo> {
        let stream = self.stream(self.enter(Call::StreamHandle)?, stream)?;
        Ok(StreamHandleInfo { device: stream.device, raw: stream.raw.exposed() })
    }

    fn stream_query(&self, stream: StreamId) -> Result<bool> {
        let site = self.enter(Call::StreamQuery)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        // SAFETY: the stream is live and its context current.
        site.check_done(unsafe { (self.api.stream_query)(stream.raw.raw()) })
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::StreamSynchronize)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        // SAFETY: the stream is live and its context current.
        site.check(unsafe { (self.api.stream_synchronize)(stream.raw.raw()) })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()> {
        let site = self.enter(Call::StreamWaitEvent)?;
        let stream = self.stream(site, stream)?;
        let event = self.event(site, event)?;
        let flags = match scope {
            EventScope::Plain => sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            EventScope::External => sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL,
        };
        let _current = self.on_stream(site, &stream)?;
        // The event may be of a capture, which the stream joins then.
        let _work = self.begin_work(site, &stream, stream.lock_capture());
        // SAFETY: stream and event are live; the event may be another device's.
        site.check(unsafe { (self.api.stream_wait_event)(stream.raw.raw(), event.raw.raw(), flags as u32) })?;
        event.used_by_stream(scope);
        Ok(())
    }

    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()> {
        let site = self.enter(Call::StreamHostCallback)?;
        let stream = self.stream(site, stream)?;
        let _current = self.on_stream(site, &stream)?;
        let work = self.begin_work(site, &stream, stream.lock_work());
        if let Some(graph) = work.captured_into() {
            return self.capture_callback(site, &stream, graph, callback);
        }
        let id = callback::register(callback);
        // SAFETY: the stream is live. The function only takes its data as a number, whenever it runs.
        let code = unsafe { (self.api.launch_host_func)(stream.raw.raw(), Some(callback::run_once), id.user_data()) };
        if code != 0 {
            callback::unregister(id);
        }
        site.check(code)
    }
}

impl CudaDriver {
    /// Looks up a stream by id, which stays live as long as the result.
    pub(crate) fn stream(&self, site: CallSite<'_>, stream: StreamId) -> Result<Shared<'_, Stream>> {
        self.streams.get(stream.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// The context that work on the stream needs.
    pub(crate) fn context_of_stream(&self, site: CallSite<'_>, stream: &Stream) -> Result<Context> {
        stream.context.map_or_else(|| self.context_of(site, stream.device), Ok)
    }

    /// Makes the stream's context current.
    pub(crate) fn on_stream(&self, site: CallSite<'_>, stream: &Stream) -> Result<CurrentContext<'_>> {
        let context = self.context_of_stream(site, stream)?;
        self.make_current(site, context)
    }

    /// Waits for all work in the streams of this driver, except streams that capture, where no wait is possible, and
    /// adopted ones, which may not exist any more. Captures are not invalidated.
    pub(crate) fn wait_for_streams(&self, site: CallSite<'_>) -> Result<()> {
        let _relaxed = self.relax_capture_mode(site)?;
        for id in self.streams.ids(|stream| stream.kind != StreamKind::Adopted) {
            let Some(stream) = self.streams.get(id) else { continue };
            // A device without a context has no work. The legacy stream waits for the per-thread streams, too.
            let Some(context) = stream.context.or_else(|| self.devices[stream.device.0 as usize].context()) else {
                continue;
            };
            let _current = self.make_current(site, context)?;
            let _work = stream.lock_work();
            if self.is_capturing(site, &stream) == Ok(false) {
                // SAFETY: the stream is live and its context current.
                site.check(unsafe { (self.api.stream_synchronize)(stream.raw.raw()) })?;
            }
        }
        Ok(())
    }

    /// A stream's priority, and whether it is non-blocking. Its context must be current.
    fn attributes_of(&self, site: CallSite<'_>, stream: &Stream) -> Result<(i32, bool)> {
        if stream.kind == StreamKind::Legacy {
            // By definition; a query would invalidate the captures of blocking streams.
            return Ok((0, false));
        }
        if let Some(&attributes) = stream.attributes.get() {
            return Ok(attributes);
        }
        if self.is_capturing(site, stream).unwrap_or(false) {
            let detail = "the attributes of a stream that was adopted while it captures are unknown until that ends";
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, detail));
        }
        let (mut priority, mut flags) = (0, 0);
        // SAFETY: the stream's context is current; CUDA writes the number to `priority`.
        site.check(unsafe { (self.api.stream_get_priority)(stream.raw.raw(), &raw mut priority) })?;
        // SAFETY: the stream's context is current; CUDA writes the number to `flags`.
        site.check(unsafe { (self.api.stream_get_flags)(stream.raw.raw(), &raw mut flags) })?;
        Ok(*stream.attributes.get_or_init(|| (priority, flags & NON_BLOCKING != 0)))
    }

    /// CUDA's id of a stream.
    fn serial_of(&self, site: CallSite<'_>, raw: sys::CUstream) -> Result<u64> {
        let mut serial = 0;
        // SAFETY: the stream was just created, or is promised to be live; CUDA writes the number to `serial`.
        site.check(unsafe { (self.api.stream_get_id)(raw, &raw mut serial) })?;
        Ok(serial)
    }
}
