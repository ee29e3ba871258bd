//! How blocks go back to the plug: when nothing but their own stream can still use them, and no capture that uses them
//! is under way.
//!
//! A block is out of the books before the plug is called: from then on the plug may give the address out again, and a
//! panic of its leaves nothing half done.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use warpool_driver::{EventScope, RawHandle, StreamId};

use super::RawStream;
use super::allocator::{Cell, PluggableAllocator};
use crate::capture::RelaxedMode;
use crate::memory::books::Entry;
use crate::memory::journal::Cause;
use crate::memory::standing::Standing;
use crate::{Device, PooledEvent, Result, lock};

/// The marks that blocks on their way back wait for, by the number of the block.
#[derive(Default)]
pub(super) struct Marks {
    of: BTreeMap<u64, Vec<Mark>>,
    last: u64,
}

/// Stands behind the work that was in a stream when the block was freed.
struct Mark {
    stream: StreamId,
    /// Those of one stream pass in the order of their numbers.
    number: u64,
    event: PooledEvent,
}

/// What is known about streams within one look at all blocks: each is asked about once, however many blocks wait for
/// it.
#[derive(Default)]
struct Look {
    standings: FxHashMap<StreamId, Standing>,
    /// The first mark of a stream that has not passed.
    behind: FxHashMap<StreamId, u64>,
    /// Whether marks are waited for.
    waits: bool,
}

/// Whether a block can go back.
enum Verdict<'a> {
    /// To be freed for this stream, in the relaxed mode that the thread is in.
    Go(RawStream, RelaxedMode<'a>),
    NotYet,
    /// Not before its pool has lost its last user, which puts it out of hand.
    Kept,
}

impl PluggableAllocator {
    /// Gives a block that the calling thread has in hand to the plug, or puts it out of hand. The error is the plug's;
    /// one of the driver only means that it is tried again.
    pub(super) fn give_back(&self, cell: &Cell, entry: &Entry, cause: &Cause) -> Result<()> {
        self.give_back_in(cell, entry, &mut Look::default(), cause)
    }

    /// Gives everything that waits to the plug, as far as streams and captures allow.
    pub(super) fn settle(&self, cell: &Cell, cause: &Cause) {
        if self.with(cell, |books| books.has_chores()) {
            self.settle_in(cell, &mut Look::default(), cause);
        }
    }

    /// The same, and waits for streams: only captures hold anything back.
    pub(super) fn settle_and_wait(&self, cell: &Cell, cause: &Cause) {
        if self.with(cell, |books| books.has_chores()) {
            self.with(cell, |books| books.stats.num_sync_all_streams += 1);
            self.settle_in(cell, &mut Look { waits: true, ..Look::default() }, cause);
        }
    }

    fn settle_in(&self, cell: &Cell, look: &mut Look, cause: &Cause) {
        for number in self.with(cell, |books| books.chores()) {
            let Some(entry) = self.with(cell, |books| books.take_in_hand(number)) else { continue };
            if let Err(error) = self.give_back_in(cell, &entry, look, cause) {
                tracing::warn!(%error, ptr = %entry.ptr, "the plugged allocator could not take a block back");
            }
        }
    }

    fn give_back_in(&self, cell: &Cell, entry: &Entry, look: &mut Look, cause: &Cause) -> Result<()> {
        // All that can fail comes before the block leaves the books: it is tried again.
        let (stream, _relaxed) = match self.judge(cell, entry, look) {
            Ok(Verdict::Go(stream, relaxed)) => (stream, relaxed),
            Ok(Verdict::Kept) => return Ok(()),
            waits => {
                if let Err(error) = waits {
                    tracing::warn!(%error, ptr = %entry.ptr, "a freed block could not be given back; it is tried again");
                }
                self.with(cell, |books| books.put_out_of_hand(entry.number));
                return Ok(());
            }
        };
        drop(lock(&cell.marks).of.remove(&entry.number));
        self.with(cell, |books| books.complete_free(entry.number, cause));
        lock(&cell.pools).leave(entry.pool);
        self.claims.drop(entry.ptr);
        self.plug.free(entry.ptr, entry.bytes, cell.desk.device, stream)
    }

    fn judge(&self, cell: &Cell, entry: &Entry, look: &mut Look) -> Result<Verdict<'_>> {
        let users = {
            let mut pools = lock(&cell.pools);
            if entry.capture.is_some() && pools.keep(entry.pool, entry.number) {
                return Ok(Verdict::Kept);
            }
            pools.users(entry.pool)
        };
        let own = self.standing(entry.stream, look)?;
        if matches!(own, Standing::Captures(_) | Standing::Blocked) {
            return Ok(Verdict::NotYet);
        }
        let marked = lock(&cell.marks).of.remove(&entry.number);
        let mut marks = match marked {
            Some(marks) => marks,
            None => {
                let mut others: Vec<StreamId> = entry.uses.iter().copied().chain(users).collect();
                others.retain(|&stream| stream != entry.stream);
                others.sort_unstable();
                others.dedup();
                let mut lost = own == Standing::Gone;
                for &stream in &others {
                    match self.standing(stream, look)? {
                        Standing::Working => {}
                        Standing::Gone => lost = true,
                        Standing::Captures(_) | Standing::Blocked => return Ok(Verdict::NotYet),
                    }
                }
                if lost {
                    return self.wait_for_devices(cell, entry, own);
                }
                match self.mark(cell, &others)? {
                    Some(marks) => marks,
                    None => return Ok(Verdict::NotYet),
                }
            }
        };
        let asked = self.drop_passed(&mut marks, look);
        if asked.is_err() || !marks.is_empty() {
            lock(&cell.marks).of.insert(entry.number, marks);
            return asked.map(|()| Verdict::NotYet);
        }
        if own == Standing::Gone {
            return self.wait_for_devices(cell, entry, own);
        }
        self.go(RawStream { id: entry.stream, raw: RawHandle(entry.stream_raw) })
    }

    fn go(&self, stream: RawStream) -> Result<Verdict<'_>> {
        Ok(Verdict::Go(stream, RelaxedMode::begin(self.driver())?))
    }

    /// Puts a mark into each of `streams`; `None` if one of them captures by now.
    fn mark(&self, cell: &Cell, streams: &[StreamId]) -> Result<Option<Vec<Mark>>> {
        let mut marks = Vec::with_capacity(streams.len());
        for &stream in streams {
            let device = self.driver().stream_handle(stream)?.device;
            let mut event = Device::known(&self.instance, device).event_pool().take()?;
            self.driver().event_record(event.id(), stream, EventScope::Plain)?;
            if Standing::of(stream, self.driver())? != Standing::Working {
                // Another thread began a capture since we looked: the mark may be the capture's, and asking about it
                // would break that.
                event.never_reuse();
                return Ok(None);
            }
            let number = {
                let mut all = lock(&cell.marks);
                all.last += 1;
                all.last
            };
            marks.push(Mark { stream, number, event });
        }
        Ok(Some(marks))
    }

    /// Drops the marks that have passed; all of them, if this look waits.
    fn drop_passed(&self, marks: &mut Vec<Mark>, look: &mut Look) -> Result<()> {
        if marks.is_empty() {
            return Ok(());
        }
        let _relaxed = RelaxedMode::begin(self.driver())?;
        while let Some(mark) = marks.last() {
            if look.behind.get(&mark.stream).is_some_and(|&first| first <= mark.number) {
                return Ok(());
            }
            if look.waits {
                self.driver().event_synchronize(mark.event.id())?;
            } else if !self.driver().event_query(mark.event.id())? {
                let first = look.behind.entry(mark.stream).or_insert(mark.number);
                *first = mark.number.min(*first);
                return Ok(());
            }
            marks.pop();
        }
        Ok(())
    }

    /// For a block one of whose streams is gone: only the devices can be waited for, which would break any capture.
    fn wait_for_devices(&self, cell: &Cell, entry: &Entry, own: Standing) -> Result<Verdict<'_>> {
        if self.has_captures() {
            return Ok(Verdict::NotYet);
        }
        for device in self.instance.devices() {
            if self.driver().context_is_active(device.id())? {
                device.synchronize()?;
            }
        }
        // The handle of a stream that is gone leads nowhere, and a plug would follow it.
        let stream =
            if own == Standing::Gone { self.instance.default_stream_id(cell.desk.device)? } else { entry.stream };
        self.go(self.plug_stream(cell, stream)?.0)
    }

    fn standing(&self, stream: StreamId, look: &mut Look) -> Result<Standing> {
        if let Some(&known) = look.standings.get(&stream) {
            return Ok(known);
        }
        let standing = Standing::of(stream, self.driver())?;
        look.standings.insert(stream, standing);
        Ok(standing)
    }
}
