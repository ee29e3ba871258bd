//! The begin of a capture: all checks first, then steps with guards that undo them, so that a failure at any step
//! leaves no partial state.

use std::sync::Arc;
use std::thread;

use super::buffers::Buffers;
use super::graph::{Graph, Stage};
use super::open_capture::OpenCapture;
use super::options::CaptureOptions;
use super::registration::Registration;
use super::retired::RetiredGraphs;
use crate::capture::{CaptureRecord, guards_of_thread};
use crate::error::GraphError;
use crate::memory::{CaptureMemory, Route};
use crate::{Result, Stream};

impl Graph {
    /// Begins a capture on `stream`: work enqueued there is recorded instead of run, and memory that is requested on
    /// streams of the capture comes from the graph's pool. [`capture_end`](Self::capture_end) must follow, even after
    /// an error in between. [`capture`](Self::capture) does both, and cannot be left incomplete.
    pub fn capture_begin(&mut self, stream: &Stream, options: CaptureOptions<'_>) -> Result<()> {
        self.device.instance().expect_own_process("capture_begin")?;
        self.check_begin(stream, &options)?;
        let instance = self.device.instance();
        let driver = &**instance.driver();
        RetiredGraphs::of(&self.device).process_pending(instance);
        if stream.is_capturing()? {
            return Err(GraphError::StreamCaptures { stream: stream.id() }.into());
        }
        let mut registration = Registration::new(&self.allocator, &self.device, options.pool)?;
        // Before the driver's own begin: another thread that frees memory of this stream in between would record an
        // event in it.
        registration.route(Route::Stream(stream.id()))?;
        registration.count()?;
        let pollers_excluded = instance.captures().pollers.exclude(options.poller_timeout)?;
        let memory = CaptureMemory { allocator: Arc::clone(&self.allocator), pool: registration.pool().id() };
        let record = Arc::new(CaptureRecord::new(self.device.id(), memory));
        let begun = {
            // Added to the registry before any typed call sees that the stream is capturing.
            let _change = instance.change_captures()?;
            driver.capture_begin(stream.id(), options.mode)?;
            instance.captures().add(stream, &record, false)
        };
        drop(pollers_excluded);
        let id = match begun.and_then(|id| registration.register(id)) {
            Ok(id) => id,
            Err(error) => {
                registration.discard(stream);
                return Err(error);
            }
        };
        self.stage = Stage::Capturing(Box::new(OpenCapture {
            registration,
            stream: stream.clone(),
            id,
            mode: options.mode,
            thread: thread::current().id(),
            record,
            buffers: Buffers::new(),
            failed: None,
            body_streams: Vec::new(),
        }));
        Ok(())
    }

    /// The checks that are possible before anything is changed.
    fn check_begin(&self, stream: &Stream, options: &CaptureOptions<'_>) -> Result<()> {
        match &self.stage {
            Stage::New => {}
            Stage::Capturing(open) => return Err(GraphError::AlreadyCapturing { stream: open.stream.id() }.into()),
            Stage::Captured(_) => return Err(GraphError::AlreadyCaptured.into()),
        }
        self.expect_own(stream)?;
        if stream.is_default()? {
            return Err(GraphError::DefaultStream.into());
        }
        if let Some(pool) = options.pool {
            pool.expect_of(&*self.allocator, self.device.id())?;
            if pool.id().is_default() {
                return Err(GraphError::DefaultPool.into());
            }
        }
        if guards_of_thread(self.device.instance()) > 0 {
            return Err(GraphError::PollsItself.into());
        }
        self.device.instance().expect_no_typed_call()
    }
}
