//! How memory is asked of the plug, and what happens when it has none.
//!
//! The plug may panic. So what is noted for the time of a request is taken back by guards: a promise under the limit, a
//! place in a pool.

use warpool_driver::{CaptureState, DeviceId, DevicePtr, ErrorCode, MemoryInfo, StreamId};

use super::RawStream;
use super::allocator::{Cell, PluggableAllocator};
use crate::memory::books::Entry;
use crate::memory::desk::Shortage;
use crate::memory::journal::Cause;
use crate::memory::standing::Standing;
use crate::memory::{Action, Allocation, MemPoolId, OomCause, Request, StackLevel};
use crate::{Error, Result, lock};

/// No request is as large as this: an exbibyte.
const TOO_LARGE: u64 = 1 << 60;

/// Bytes that count as held until they are, or are not.
struct Promise<'a> {
    allocator: &'a PluggableAllocator,
    cell: &'a Cell,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.allocator.with(self.cell, |books| books.settle_promise(self.bytes));
    }
}

/// A block that a pool counts until it is there, or is not.
struct Place<'a> {
    cell: &'a Cell,
    pool: MemPoolId,
    kept: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.kept {
            lock(&self.cell.pools).leave(self.pool);
        }
    }
}

impl PluggableAllocator {
    pub(super) fn fetch(&self, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, .. } = request;
        let cell = self.cell(device)?;
        if bytes == 0 {
            return Ok(Allocation { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0 });
        }
        if bytes >= TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        self.deliver(cell);
        let mut place = self.place(cell, &request)?;
        let cause = self.cause(cell, StackLevel::State);
        self.settle(cell, &cause);
        let (capture, capturing) = match Standing::of(stream, self.driver())? {
            Standing::Working => (None, false),
            Standing::Captures(capture) => (Some(capture), true),
            Standing::Blocked => (None, true),
            // Its handle leads nowhere any more, and a plug would follow it.
            Standing::Gone => {
                self.driver().capture_state(stream)?;
                (None, false)
            }
        };
        let (plug_stream, owner) = self.plug_stream(cell, stream)?;
        if owner != device {
            return Err(Error::StreamDevice { device, stream, owner });
        }
        let failed = |why| Err(self.out_of_memory(cell, &request, place.pool, why, capturing, &cause));
        let Some(promise) = self.promise(cell, bytes, capturing, &cause)? else { return failed(OomCause::Limit) };
        let Some(ptr) = self.ask(cell, bytes, plug_stream, capturing, &cause)? else {
            drop(promise);
            return failed(OomCause::Upstream);
        };
        self.claims.claim(ptr, bytes)?;
        let entry = Entry {
            number: 0,
            ptr,
            bytes,
            requested: bytes,
            stream,
            stream_raw: plug_stream.raw.0,
            pool: place.pool,
            uses: Vec::new(),
            capture,
            stack: None,
        };
        place.kept = true;
        let given = self.with(cell, |books| books.hand_out(entry, &cause));
        drop(promise);
        Ok(given)
    }

    /// A place in the pool that the request names, or is routed to.
    fn place<'a>(&self, cell: &'a Cell, request: &Request) -> Result<Place<'a>> {
        let route = || cell.scopes.routed(request.stream, |stream| self.capture_state(stream));
        let mut pool = request.pool.map_or_else(route, Ok)?;
        loop {
            let entered = lock(&cell.pools).enter(pool, cell.desk.device);
            if let Err(error) = entered {
                // The scope that led here may have been closed by another thread since: it is as if we came later.
                let now = if request.pool.is_none() { route()? } else { pool };
                if now == pool {
                    return Err(error);
                }
                pool = now;
                continue;
            }
            return Ok(Place { cell, pool, kept: false });
        }
    }

    fn capture_state(&self, stream: StreamId) -> Result<CaptureState> {
        match self.driver().capture_state(stream) {
            Ok(state) => Ok(state),
            // The default stream does not capture, it is only that others do; a stream that is gone does not either.
            Err(error) if matches!(error.code, ErrorCode::StreamCaptureImplicit | ErrorCode::InvalidHandle) => {
                Ok(CaptureState::None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Has `bytes` promised under the limit, after asking for help and waiting for what is on its way back, if need be.
    fn promise<'a>(
        &'a self,
        cell: &'a Cell,
        bytes: u64,
        capturing: bool,
        cause: &Cause,
    ) -> Result<Option<Promise<'a>>> {
        let limit = cell.desk.limit(self.settings.memory_cap_bytes);
        let promised = || {
            let promised = self.with(cell, |books| books.promise(bytes, limit));
            promised.then(|| Promise { allocator: self, cell, bytes })
        };
        if let Some(promise) = promised() {
            return Ok(Some(promise));
        }
        if self.observers.relieve(cell.desk.device)
            && let Some(promise) = promised()
        {
            return Ok(Some(promise));
        }
        if !capturing && self.with(cell, |books| books.has_chores()) {
            self.settle_and_wait(cell, cause);
            return Ok(promised());
        }
        Ok(None)
    }

    /// Memory from the plug, at the second attempt if not at the first; `None` is out of memory.
    fn ask(
        &self,
        cell: &Cell,
        bytes: u64,
        stream: RawStream,
        capturing: bool,
        cause: &Cause,
    ) -> Result<Option<DevicePtr>> {
        let device: DeviceId = cell.desk.device;
        let ask = || -> Result<Option<DevicePtr>> {
            let given = self.call_plug(|plug| plug.allocate(bytes, device, stream))??;
            Ok(given.filter(|ptr| !ptr.is_null()))
        };
        if let Some(ptr) = ask()? {
            return Ok(Some(ptr));
        }
        self.observers.relieve(device);
        if !capturing {
            self.settle_and_wait(cell, cause);
            self.reset_plug()?;
            self.with(cell, |books| books.stats.num_alloc_retries += 1);
        }
        ask()
    }

    /// Counts a failure, tells the observers, and makes the error.
    fn out_of_memory(
        &self,
        cell: &Cell,
        request: &Request,
        pool: MemPoolId,
        why: OomCause,
        capturing: bool,
        cause: &Cause,
    ) -> Error {
        // That these fail too must not hide what went wrong.
        let nothing = MemoryInfo { bytes_free: 0, bytes_total: cell.desk.bytes_total };
        let memory = self.driver().mem_info(cell.desk.device).unwrap_or(nothing);
        let (stream_raw, _) = cell.desk.raw_of(request.stream, self.driver()).unwrap_or((0, cell.desk.device));
        let stats = self.with(cell, |books| {
            books.stats.num_ooms += 1;
            books.record(Action::Oom, memory.bytes_free, request.bytes, stream_raw, pool, cause);
            Self::stats_of(books)
        });
        let limit = cell.desk.limit(self.settings.memory_cap_bytes);
        let bytes_segment = request.bytes;
        let report = Shortage { request, why, bytes_segment, memory, limit, stats: &stats, capturing }.report();
        self.observers.out_of_memory(&report);
        Error::OutOfMemory(Box::new(report))
    }
}
