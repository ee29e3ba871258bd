//! What may be had, how it is asked for, and the report when there is nothing left.

use warpool_driver::{DevicePtr, MemoryInfo, StreamId};

use super::{Cell, DriverPoolAllocator, GRAIN};
use crate::memory::desk::Shortage;
use crate::memory::journal::Cause;
use crate::memory::standing::Standing;
use crate::memory::{Action, MemPoolId, OomCause, Request};
use crate::{Error, Result};

impl DriverPoolAllocator {
    /// The least of what the fraction and the cap allow.
    fn limit(&self, cell: &Cell) -> Option<u64> {
        cell.desk.limit(self.settings.memory_cap_bytes)
    }

    /// Has `bytes` promised under the limit, after asking for help if need be.
    pub(super) fn promise(&self, cell: &Cell, bytes: u64) -> bool {
        let limit = self.limit(cell);
        let promised = || self.with(cell, |books| books.promise(bytes, limit));
        promised() || (self.observers.relieve(cell.desk.device) && promised())
    }

    /// Memory from the pool, at the second attempt if not at the first; `None` is out of memory.
    pub(super) fn fetch(
        &self,
        cell: &Cell,
        bytes: u64,
        stream: StreamId,
        standing: Standing,
        cause: &Cause,
    ) -> Result<Option<DevicePtr>> {
        let ready = self.ready(cell)?;
        let ask = || {
            // In a capture it is a node, which is always allowed.
            let _lax = if standing == Standing::Working { Some(self.lax()?) } else { None };
            match self.driver().pool_alloc(ready.pool, bytes, stream) {
                Ok(ptr) => Ok(Some(ptr)),
                Err(error) if error.is_out_of_memory() => Ok(None),
                Err(error) => Err(Error::from(error)),
            }
        };
        let first = ask()?;
        if first.is_some() || standing != Standing::Working {
            return Ok(first);
        }
        self.observers.relieve(cell.desk.device);
        self.drain(cell, ready, cause)?;
        self.with(cell, |books| {
            books.stats.num_sync_all_streams += 1;
            books.stats.num_alloc_retries += 1;
        });
        let second = ask()?;
        if second.is_none() {
            // A pool grows before it finds that it cannot grow enough, and keeps what it has got: the whole of an H200
            // (seen there).
            let _lax = self.lax()?;
            self.driver().pool_trim(ready.pool, 0)?;
        }
        Ok(second)
    }

    /// Counts a failure, tells the observers, and makes the error.
    pub(super) fn out_of_memory(
        &self,
        cell: &Cell,
        request: &Request,
        why: OomCause,
        capturing: bool,
        cause: &Cause,
    ) -> Error {
        // That these fail too must not hide what went wrong.
        let nothing = MemoryInfo { bytes_free: 0, bytes_total: cell.desk.bytes_total };
        let memory = self.driver().mem_info(cell.desk.device).unwrap_or(nothing);
        let pool = self.bytes_in_pool(cell).unwrap_or((0, 0));
        let stream_raw = self.raw_of(cell, request.stream).unwrap_or(0);
        let size = request.bytes.next_multiple_of(GRAIN);
        let stats = self.with(cell, |books| {
            books.stats.num_ooms += 1;
            books.record(Action::Oom, memory.bytes_free, size, stream_raw, MemPoolId::DEFAULT, cause);
            books.stats_with(pool)
        });
        let limit = self.limit(cell);
        let report = Shortage { request, why, bytes_segment: size, memory, limit, stats: &stats, capturing }.report();
        self.observers.out_of_memory(&report);
        Error::OutOfMemory(Box::new(report))
    }
}
