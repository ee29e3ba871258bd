//! Streams: made here, adopted from others, and the two default ones that every device has.

use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, EventId, EventScope, ForeignStream, HostCallback, PriorityRange, RawHandle, Result,
    StreamHandle, StreamId, StreamInfo, StreamOptions, Streams,
};

use crate::CudaDriver;
use crate::callback;
use crate::capture::NOT_CAPTURING;
use crate::context::{Context, Current};
use crate::error::Site;
use crate::table::{Handle, Used, lock};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

/// The handles of the default streams: null and `CU_STREAM_LEGACY` are the same stream, `CU_STREAM_PER_THREAD` the
/// thread's own.
const LEGACY: u64 = 0;
const LEGACY_ALIAS: u64 = 1;
pub(crate) const PER_THREAD: u64 = 2;

/// Stands in a number that is none of CUDA's: those count up from 1.
const UNNUMBERED: u64 = 1 << 63;

/// A stream behind its id.
pub(crate) struct Stream {
    /// CUDA's handle.
    pub(crate) raw: Handle<sys::CUstream_st>,
    /// The device it works for.
    pub(crate) device: DeviceId,
    /// Where it comes from.
    pub(crate) kind: StreamKind,
    /// The context it was made in. The default streams have none: they are those of whichever context is current.
    pub(crate) context: Option<Context>,
    /// CUDA's own number for it, which unlike the handle is not used again. 0 for the default streams; the handle,
    /// marked as [`UNNUMBERED`], for one that was adopted while it captures.
    pub(crate) serial: u64,
    /// Priority, and whether it ignores the legacy default stream. Asked as early as possible: asking while the stream
    /// captures breaks the capture.
    traits: OnceLock<(i32, bool)>,
}

/// Where a stream comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// The legacy default stream.
    Legacy,
    /// The calling thread's default stream.
    PerThread,
    /// Made here, so destroyed here.
    Own,
    /// Made and kept by somebody else.
    Adopted,
}

impl Stream {
    /// A default stream of `device`.
    pub(crate) const fn default_of(device: DeviceId, kind: StreamKind) -> Self {
        let number = if matches!(kind, StreamKind::PerThread) { PER_THREAD } else { LEGACY };
        Self { raw: Handle::from_number(number), device, kind, context: None, serial: 0, traits: OnceLock::new() }
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
        // SAFETY: `least` and `greatest` take one number each.
        site.check(unsafe { (self.api.ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest) })?;
        Ok(PriorityRange { least, greatest })
    }

    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        let site = self.enter(Call::StreamCreate)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let flags = if options.non_blocking { NON_BLOCKING } else { 0 };
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` takes the handle. CUDA clamps the priority.
        site.check(unsafe { (self.api.stream_create_with_priority)(&raw mut raw, flags, options.priority) })?;
        let serial = match self.serial_of(site, raw) {
            Ok(serial) => serial,
            Err(error) => {
                // SAFETY: made above, known to nobody else.
                let code = unsafe { (self.api.stream_destroy)(raw) };
                if code != 0 {
                    tracing::warn!("a stream could not be destroyed: {}", ErrorCode::from_number(code));
                }
                return Err(error);
            }
        };
        let (kind, traits) = (StreamKind::Own, OnceLock::new());
        let stream = Stream { raw: Handle::new(raw), device, kind, context: Some(context), serial, traits };
        // Best now. If it fails, whoever asks later learns why.
        let _ = self.traits_of(site, &stream);
        Ok(StreamId(self.streams.insert(stream)))
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::StreamDestroy)?;
        // Asked before anything is locked: a default stream must stay usable meanwhile.
        match self.stream(site, stream)?.kind {
            StreamKind::Legacy | StreamKind::PerThread => return Err(site.error(ErrorCode::InvalidHandle)),
            StreamKind::Own | StreamKind::Adopted => {}
        }
        let row = self.streams.alone(stream.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        self.leave_stream(site, stream)?;
        if row.kind == StreamKind::Own {
            // A capture that began on the stream ends with it, and its graph goes away.
            let _gate = lock(&self.graph_gate);
            let _current = self.on_stream(site, &row)?;
            self.end_bodies_of_capture(&row);
            // SAFETY: `raw` came from cuStreamCreateWithPriority, and nobody else can use it.
            site.check(unsafe { (self.api.stream_destroy)(row.raw.raw()) })?;
            self.capture_dropped(&row);
        }
        row.remove();
        Ok(())
    }

    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        let site = self.enter(Call::StreamAdopt)?;
        let slot = self.device(site, device)?;
        let RawHandle(number) = stream.raw();
        match number {
            LEGACY | LEGACY_ALIAS => return Ok(slot.stream_default),
            PER_THREAD => return Ok(slot.stream_per_thread),
            _ => {}
        }
        let _current = self.on_device(site, device)?;
        let raw = Handle::from_number(number);
        let mut context = ptr::null_mut();
        // SAFETY: the caller vouches for the handle; `context` takes its context.
        site.check(unsafe { (self.api.stream_get_ctx)(raw.raw(), &raw mut context) })?;
        let context = Handle::new(context);
        if self.device_of_context(site, context)? != slot.raw {
            let detail = format!("the stream is not one of {device}");
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let (kind, serial, traits) = (StreamKind::Adopted, UNNUMBERED | number, OnceLock::new());
        let mut stream = Stream { raw, device, kind, context: Some(context), serial, traits };
        if self.capture_status(site, &stream).is_ok_and(|(status, ..)| status != NOT_CAPTURING) {
            // Asked for its number or its flags now, it would break the capture; asked for its context, it did not
            // (H200).
            return Ok(StreamId(self.streams.find_or_insert(|known| known.raw == raw, stream)));
        }
        stream.serial = self.serial_of(site, raw.raw())?;
        let _ = self.traits_of(site, &stream);
        let numbers = [stream.serial, serial];
        Ok(StreamId(self.streams.find_or_insert(|known| known.raw == raw && numbers.contains(&known.serial), stream)))
    }

    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo> {
        let site = self.enter(Call::StreamInfo)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        let (priority, non_blocking) = self.traits_of(site, &row)?;
        Ok(StreamInfo { device: row.device, priority, non_blocking, raw: row.raw.exposed() })
    }

    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandle> {
        let row = self.stream(self.enter(Call::StreamHandle)?, stream)?;
        Ok(StreamHandle { device: row.device, raw: row.raw.exposed() })
    }

    fn stream_query(&self, stream: StreamId) -> Result<bool> {
        let site = self.enter(Call::StreamQuery)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        // SAFETY: the stream is live and its context current.
        site.check_done(unsafe { (self.api.stream_query)(row.raw.raw()) })
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::StreamSynchronize)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        // SAFETY: the stream is live and its context current.
        site.check(unsafe { (self.api.stream_synchronize)(row.raw.raw()) })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()> {
        let site = self.enter(Call::StreamWaitEvent)?;
        let row = self.stream(site, stream)?;
        let event = self.event(site, event)?;
        let flags = match scope {
            EventScope::Plain => sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            EventScope::External => sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL,
        };
        let _current = self.on_stream(site, &row)?;
        // SAFETY: stream and event are live; the event may be another device's.
        site.check(unsafe { (self.api.stream_wait_event)(row.raw.raw(), event.raw.raw(), flags as u32) })?;
        event.used_by_stream(scope);
        Ok(())
    }

    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()> {
        let site = self.enter(Call::StreamHostCallback)?;
        let row = self.stream(site, stream)?;
        let _current = self.on_stream(site, &row)?;
        if self.capturing_graph(site, &row).is_some() {
            // Asked again behind the gate, where the capture cannot end.
            let _gate = lock(&self.graph_gate);
            if let Some(graph) = self.capturing_graph(site, &row) {
                return self.capture_callback(site, &row, graph, callback);
            }
        }
        let ticket = callback::keep(callback);
        // SAFETY: the function has the type of a host function and takes its data for a number, whenever it runs.
        let code = unsafe { (self.api.launch_host_func)(row.raw.raw(), Some(callback::run_once), ticket.user_data()) };
        if code != 0 {
            callback::forget(ticket);
        }
        site.check(code)
    }
}

impl CudaDriver {
    /// The stream behind an id, live as long as the result.
    pub(crate) fn stream(&self, site: Site<'_>, stream: StreamId) -> Result<Used<'_, Stream>> {
        self.streams.get(stream.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// The context that work for the stream needs.
    pub(crate) fn context_of_stream(&self, site: Site<'_>, stream: &Stream) -> Result<Context> {
        stream.context.map_or_else(|| self.context_of(site, stream.device), Ok)
    }

    /// Makes the stream's context current.
    pub(crate) fn on_stream(&self, site: Site<'_>, stream: &Stream) -> Result<Current<'_>> {
        let context = self.context_of_stream(site, stream)?;
        self.make_current(site, context)
    }

    /// A stream's priority, and whether it ignores the legacy default stream. Its context must be current.
    fn traits_of(&self, site: Site<'_>, stream: &Stream) -> Result<(i32, bool)> {
        if stream.kind == StreamKind::Legacy {
            // By definition; and asking would break the captures of blocking streams.
            return Ok((0, false));
        }
        if let Some(&traits) = stream.traits.get() {
            return Ok(traits);
        }
        if self.capture_status(site, stream).is_ok_and(|(status, ..)| status != NOT_CAPTURING) {
            let detail = "a stream that was adopted while it captures tells nothing about itself before that ends";
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, detail.to_owned()));
        }
        let (mut priority, mut flags) = (0, 0);
        // SAFETY: `priority` takes the number; the stream's context is current.
        site.check(unsafe { (self.api.stream_get_priority)(stream.raw.raw(), &raw mut priority) })?;
        // SAFETY: `flags` takes the number; the stream's context is current.
        site.check(unsafe { (self.api.stream_get_flags)(stream.raw.raw(), &raw mut flags) })?;
        Ok(*stream.traits.get_or_init(|| (priority, flags & NON_BLOCKING != 0)))
    }

    /// CUDA's own number for a stream.
    fn serial_of(&self, site: Site<'_>, raw: sys::CUstream) -> Result<u64> {
        let mut serial = 0;
        // SAFETY: the stream was just made, or its adopter vouches for it; `serial` takes the number.
        site.check(unsafe { (self.api.stream_get_id)(raw, &raw mut serial) })?;
        Ok(serial)
    }
}
