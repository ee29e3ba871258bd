//! Events: create, record, wait, measure time, share.

use std::ffi::{c_char, c_uint};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use cudarc::driver::sys::CUevent_flags_enum as Flag;
use warpool_driver::{
    Call, DeviceId, ErrorCode, EventId, EventOptions, EventScope, Events, IpcEventHandle, Result, StreamId,
};

use crate::CudaDriver;
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle};
use crate::object_table::Shared;

/// An event in the object table.
pub(crate) struct Event {
    /// CUDA's handle.
    pub(crate) raw: CudaHandle<sys::CUevent_st>,
    device: DeviceId,
    context: Context,
    /// Whether a graph may record it or wait for it at every launch. Never reset.
    in_graph: AtomicBool,
}

impl Event {
    const fn new(raw: sys::CUevent, device: DeviceId, context: Context) -> Self {
        Self { raw: CudaHandle::new(raw), device, context, in_graph: AtomicBool::new(false) }
    }

    /// A stream recorded it, or waits for it.
    pub(crate) fn used_by_stream(&self, scope: EventScope) {
        if scope == EventScope::External {
            self.in_graph.store(true, Ordering::Relaxed);
        }
    }
}

/// CUDA's flags for an event.
const fn flags(options: EventOptions) -> c_uint {
    let mut flags = Flag::CU_EVENT_DEFAULT as c_uint;
    if !options.timing {
        flags |= Flag::CU_EVENT_DISABLE_TIMING as c_uint;
    }
    if options.blocking {
        flags |= Flag::CU_EVENT_BLOCKING_SYNC as c_uint;
    }
    if options.interprocess {
        flags |= Flag::CU_EVENT_INTERPROCESS as c_uint;
    }
    flags
}

impl Events for CudaDriver {
    fn event_create(&self, device: DeviceId, options: EventOptions) -> Result<EventId> {
        let site = self.enter(Call::EventCreate)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let mut raw = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `raw`.
        site.check(unsafe { (self.api.event_create)(&raw mut raw, flags(options)) })?;
        Ok(EventId(self.events.insert(Event::new(raw, device, context))))
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        let site = self.enter(Call::EventDestroy)?;
        let object = self.events.exclusive(event.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        // A graph does not keep the events of its nodes, so CUDA's event is not destroyed if a graph may use it.
        if !object.in_graph.load(Ordering::Relaxed) {
            let _current = self.make_current(site, object.context)?;
            // SAFETY: `raw` came from cuEventCreate or cuIpcOpenEventHandle, and no other call can use it.
            site.check(unsafe { (self.api.event_destroy)(object.raw.raw()) })?;
        }
        object.remove();
        Ok(())
    }

    fn event_record(&self, event: EventId, stream: StreamId, scope: EventScope) -> Result<()> {
        let site = self.enter(Call::EventRecord)?;
        let event = self.event(site, event)?;
        let stream = self.stream(site, stream)?;
        if event.device != stream.device {
            let detail = format!("the event belongs to {}, the stream to {}", event.device, stream.device);
            return Err(site.explain(ErrorCode::InvalidHandle, detail));
        }
        let flags = match scope {
            EventScope::Plain => sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT,
            EventScope::External => sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL,
        };
        let _current = self.on_stream(site, &stream)?;
        let _work = self.begin_work(site, &stream, stream.lock_work());
        // SAFETY: event and stream are live.
        site.check(unsafe { (self.api.event_record_with_flags)(event.raw.raw(), stream.raw.raw(), flags as c_uint) })?;
        event.used_by_stream(scope);
        Ok(())
    }

    fn event_record_context(&self, event: EventId) -> Result<()> {
        let site = self.enter(Call::EventRecordContext)?;
        let event = self.event(site, event)?;
        let Some(record) = self.api.ctx_record_event else {
            return Err(site.explain(ErrorCode::NotSupported, "cuCtxRecordEvent needs a driver for CUDA 12.5"));
        };
        // It would invalidate the captures.
        if self.captures.exist_in(event.context) {
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, "a stream of the event's device captures"));
        }
        let _current = self.make_current(site, event.context)?;
        // SAFETY: event and context are live, and the event was created in the context.
        site.check(unsafe { record(event.context.raw(), event.raw.raw()) })
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        let site = self.enter(Call::EventQuery)?;
        let event = self.event(site, event)?;
        let _current = self.make_current(site, event.context)?;
        // SAFETY: the event is live.
        site.check_done(unsafe { (self.api.event_query)(event.raw.raw()) })
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        let site = self.enter(Call::EventSynchronize)?;
        let event = self.event(site, event)?;
        let _current = self.make_current(site, event.context)?;
        // SAFETY: the event is live.
        site.check(unsafe { (self.api.event_synchronize)(event.raw.raw()) })
    }

    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32> {
        let site = self.enter(Call::EventElapsedMs)?;
        let (start, end) = (self.event(site, start)?, self.event(site, end)?);
        let _current = self.make_current(site, start.context)?;
        let (elapsed, _relaxed) = match self.api.event_elapsed_time_v2 {
            Some(elapsed) => (elapsed, None),
            // The older one also queries pending work, which captures forbid.
            None => (self.api.event_elapsed_time, Some(self.relax_capture_mode(site)?)),
        };
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; CUDA writes the number to `milliseconds`.
        site.check(unsafe { elapsed(&raw mut milliseconds, start.raw.raw(), end.raw.raw()) })?;
        Ok(milliseconds)
    }

    fn event_export(&self, event: EventId) -> Result<IpcEventHandle> {
        let site = self.enter(Call::EventExport)?;
        let event = self.event(site, event)?;
        let _current = self.make_current(site, event.context)?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: the event is live; CUDA writes 64 bytes to `handle`.
        site.check(unsafe { (self.api.ipc_get_event_handle)(&raw mut handle, event.raw.raw()) })?;
        Ok(IpcEventHandle(handle.reserved.map(|byte| byte as u8)))
    }

    fn event_import(&self, device: DeviceId, handle: &IpcEventHandle) -> Result<EventId> {
        let site = self.enter(Call::EventImport)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let handle = sys::CUipcEventHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let mut raw = ptr::null_mut();
        // SAFETY: CUDA checks the bytes, and writes the handle to `raw`.
        site.check(unsafe { (self.api.ipc_open_event_handle)(&raw mut raw, handle) })?;
        Ok(EventId(self.events.insert(Event::new(raw, device, context))))
    }
}

impl CudaDriver {
    /// Looks up an event by id, which stays live as long as the result.
    pub(crate) fn event(&self, site: CallSite<'_>, event: EventId) -> Result<Shared<'_, Event>> {
        self.events.get(event.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_flags() {
        let options = |timing, blocking, interprocess| EventOptions { timing, blocking, interprocess };
        assert_eq!(flags(options(true, false, false)), 0);
        assert_eq!(flags(EventOptions::default()), 2);
        assert_eq!(flags(options(true, true, false)), 1);
        assert_eq!(flags(options(false, true, true)), 7);
    }
}
