//! Captures of PyTorch, and the pools that their memory comes from.
//!
//! PyTorch says "allocate to this pool" *before* the capture begins, with a filter that would tell which streams are
//! meant and that cannot be called from here. So a scope is opened without knowing its capture, and *bound* at the
//! first allocation for a stream that captures: the scope that the same thread opened last, else the only one of other
//! threads. From then on everything that is asked for in that capture, on whichever of its streams, comes from the
//! pool, and everything else from where it always comes from.
//!
//! Opening a scope cannot fail, since PyTorch would not hear of it and the graph would share memory with the rest of
//! the program: whatever can fail is done, or done again, by the allocation that binds it, which says so.
//!
//! No scope is open most of the time; then an allocation pays one load for all this.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use warpool::memory::{MemPoolId, PoolKeeper, Route};
use warpool_driver::{CaptureId, CaptureState, DeviceId, ErrorCode, StreamId};

use crate::error::{Error, Result};
use crate::runtime::Runtime;

/// PyTorch's name of a pool: two numbers, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TorchPool {
    /// The number among those of graphs, or 0.
    pub graph: u64,
    /// The number among those of users, or 0.
    pub user: u64,
}

impl fmt::Display for TorchPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.graph, self.user)
    }
}

/// What is known of captures.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    books: Mutex<Books>,
    /// How many open scopes do not know their capture.
    unbound: AtomicU32,
}

#[derive(Debug, Default)]
struct Books {
    /// In the order in which they were opened.
    scopes: Vec<Scope>,
    pools: BTreeMap<(DeviceId, TorchPool), Held>,
    /// PyTorch's names of our pools. Also of those that are released: they may have blocks, and the history speaks of
    /// them.
    names: BTreeMap<(DeviceId, MemPoolId), TorchPool>,
    /// How many names there may be before those of pools that are gone are dropped.
    names_limit: usize,
    /// Scopes that were closed because their captures seemed to be over: their ends may still come.
    closed_early: Vec<Scope>,
}

/// An open scope.
#[derive(Clone, Copy, Debug)]
struct Scope {
    device: DeviceId,
    torch_pool: TorchPool,
    opener: ThreadId,
    /// Whether the allocator knows that a capture is under way. Not if telling it failed, nor if the capture seems to
    /// be over.
    is_told: bool,
    bound: Option<Bound>,
}

/// The capture of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bound {
    pool: MemPoolId,
    capture: CaptureId,
    /// The stream that it was seen on.
    stream: StreamId,
}

/// A pool that graphs use: one use for each begin, given up by each release.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Made when the first scope is bound.
    pool: Option<MemPoolId>,
    uses: u32,
}

/// So many names are always kept.
const NAMES_MIN: usize = 4096;

impl Captures {
    /// Whether a scope is open that does not know its capture.
    #[inline]
    pub(crate) fn await_a_stream(&self) -> bool {
        self.unbound.load(Ordering::Acquire) > 0
    }

    pub(crate) fn open_scopes(&self) -> usize {
        self.lock().scopes.len()
    }

    /// Opens a scope, for one use more of its pool.
    pub(crate) fn begin(&self, runtime: &Runtime, device: DeviceId, torch_pool: TorchPool) {
        let Some(pools) = runtime.pools() else { return };
        if let Err(error) = self.close_lost(runtime) {
            tracing::warn!(%error, "captures that may be over could not be looked at");
        }
        self.close_unbound(pools, device);
        let told = pools.capture_began(device);
        if let Err(error) = &told {
            tracing::warn!(%error, "the begin of a capture could not be noted; its first allocation tries again");
        }
        let (opener, is_told) = (thread::current().id(), told.is_ok());
        let mut books = self.lock();
        books.pools.entry((device, torch_pool)).or_insert(Held { pool: None, uses: 0 }).uses += 1;
        books.scopes.push(Scope { device, torch_pool, opener, is_told, bound: None });
        self.unbound.fetch_add(1, Ordering::Release);
    }

    /// Something is asked for on `stream`: if it captures and nobody knows that capture yet, it is that of an open
    /// scope.
    #[cold]
    pub(crate) fn bind(&self, runtime: &Runtime, device: DeviceId, stream: StreamId) -> Result<()> {
        let CaptureState::Active(capture) = capture_state(runtime, stream)? else { return Ok(()) };
        let Some(pools) = runtime.pools() else { return Ok(()) };
        // Held until the pool is routed to: whoever else asks in the same capture must find it so. That calls no
        // driver, unless the begin could not be noted.
        let mut books = self.lock();
        if books.scopes.iter().any(|scope| scope.bound.is_some_and(|bound| bound.capture == capture)) {
            return Ok(());
        }
        let Some(at) = books.waiting(device)? else { return Ok(()) };
        if !books.scopes[at].is_told {
            pools.capture_began(device)?;
            books.scopes[at].is_told = true;
        }
        let torch_pool = books.scopes[at].torch_pool;
        let pool = books.pool(pools, device, torch_pool)?;
        let mut routes = books.routes(device, pool);
        routes.push(Route::Capture(capture));
        if let [only] = routes[..] {
            pools.begin_routing(device, pool, only)?;
        } else {
            pools.reroute(device, pool, &routes)?;
        }
        books.scopes[at].bound = Some(Bound { pool, capture, stream });
        self.unbound.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// Closes a scope, after its capture: the one that this thread opened last for that pool, else the newest.
    pub(crate) fn end(&self, runtime: &Runtime, device: DeviceId, torch_pool: TorchPool) -> Result<()> {
        let Some(pools) = runtime.pools() else { return Ok(()) };
        let mut books = self.lock();
        let me = thread::current().id();
        let meant = |scope: &Scope| scope.device == device && scope.torch_pool == torch_pool;
        let mine = books.scopes.iter().rposition(|scope| meant(scope) && scope.opener == me);
        if let Some(at) = mine {
            return self.close(books, pools, at);
        }
        // Between the end of a capture and this call another thread may have found that it is over.
        if let Some(at) = books.closed_early.iter().position(|scope| meant(scope) && scope.opener == me) {
            books.closed_early.swap_remove(at);
            return Ok(());
        }
        if let Some(at) = books.scopes.iter().rposition(meant) {
            return self.close(books, pools, at);
        }
        let early = books.closed_early.iter().position(meant);
        books.closed_early.swap_remove(early.ok_or(Error::PoolNotOpen { pool: torch_pool, device: device.0 })?);
        Ok(())
    }

    /// One use of a pool less. With the last one its memory can go back, but not before replays are done that PyTorch
    /// started on whichever stream.
    pub(crate) fn release(&self, runtime: &Runtime, device: DeviceId, torch_pool: TorchPool) -> Result<()> {
        let Some(pools) = runtime.pools() else { return Ok(()) };
        let mut books = self.lock();
        let Some(held) = books.pools.get_mut(&(device, torch_pool)) else {
            return Err(Error::PoolUnknown { pool: torch_pool, device: device.0 });
        };
        held.uses -= 1;
        let Held { pool, uses } = *held;
        if uses > 0 {
            return Ok(());
        }
        books.pools.remove(&(device, torch_pool));
        books.closed_early.retain(|scope| (scope.device, scope.torch_pool) != (device, torch_pool));
        drop(books);
        let Some(pool) = pool else { return Ok(()) };
        runtime.note_replays(device, pool)?;
        Ok(pools.release_pool(device, pool)?)
    }

    /// Closes scopes whose capture is over although nobody said so: PyTorch does not when the end of a capture fails.
    /// Their pools stay in use, since other graphs may share them.
    pub(crate) fn close_lost(&self, runtime: &Runtime) -> Result<()> {
        let Some(pools) = runtime.pools() else { return Ok(()) };
        let bound: Vec<Bound> = self.lock().scopes.iter().filter_map(|scope| scope.bound).collect();
        for bound in bound {
            let over = match capture_state(runtime, bound.stream)? {
                CaptureState::None => true,
                CaptureState::Active(capture) => capture != bound.capture,
                CaptureState::Invalidated => false,
            };
            let books = self.lock();
            if let Some(at) = books.scopes.iter().position(|scope| over && scope.bound == Some(bound)) {
                self.close_early(books, pools, at)?;
            }
        }
        Ok(())
    }

    /// This thread begins another capture: of one that it began before and that never asked for anything, nothing will
    /// come any more.
    fn close_unbound(&self, pools: &dyn PoolKeeper, device: DeviceId) {
        let me = thread::current().id();
        let is_over = |scope: &Scope| scope.device == device && scope.opener == me && scope.bound.is_none();
        loop {
            let books = self.lock();
            let Some(at) = books.scopes.iter().position(is_over) else { return };
            if let Err(error) = self.close_early(books, pools, at) {
                tracing::warn!(%error, "a capture that is over could not be closed");
            }
        }
    }

    /// This thread empties the cache: captures that it began and that never asked for anything are likely over, and the
    /// allocator need not take care of them. It is not certain, so their scopes stay, and an allocation in such a
    /// capture still finds its pool.
    pub(crate) fn doubt_unbound(&self, runtime: &Runtime) -> Result<()> {
        let Some(pools) = runtime.pools() else { return Ok(()) };
        let me = thread::current().id();
        for scope in &mut self.lock().scopes {
            if scope.opener == me && scope.bound.is_none() && std::mem::take(&mut scope.is_told) {
                pools.capture_ended(scope.device)?;
            }
        }
        Ok(())
    }

    /// PyTorch's name of a pool; its own, if it has none there.
    pub(crate) fn name(&self, device: DeviceId, pool: MemPoolId) -> MemPoolId {
        let name = self.lock().names.get(&(device, pool)).copied();
        let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        name.map_or(pool, |TorchPool { graph, user }| MemPoolId { graph: number(graph), user: number(user) })
    }

    fn close_early(&self, mut books: MutexGuard<'_, Books>, pools: &dyn PoolKeeper, at: usize) -> Result<()> {
        let scope = books.scopes[at];
        tracing::warn!(pool = %scope.torch_pool, "a capture ended without a word; its pool is closed");
        books.closed_early.push(scope);
        self.close(books, pools, at)
    }

    fn close(&self, mut books: MutexGuard<'_, Books>, pools: &dyn PoolKeeper, at: usize) -> Result<()> {
        let Scope { device, is_told, bound, .. } = books.scopes.remove(at);
        let routed = match bound {
            Some(Bound { pool, .. }) => match &books.routes(device, pool)[..] {
                [] => pools.end_routing(device, pool),
                others => pools.reroute(device, pool, others),
            },
            None => {
                self.unbound.fetch_sub(1, Ordering::Release);
                Ok(())
            }
        };
        drop(books);
        if is_told {
            pools.capture_ended(device)?;
        }
        Ok(routed?)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// The scope that an unknown capture is of: the last that this thread opened, else that of the only other thread.
    /// Which of several is not guessed: a graph would work in another's memory.
    fn waiting(&self, device: DeviceId) -> Result<Option<usize>> {
        let me = thread::current().id();
        let waits = |scope: &Scope| scope.device == device && scope.bound.is_none();
        if let Some(mine) = self.scopes.iter().rposition(|scope| waits(scope) && scope.opener == me) {
            return Ok(Some(mine));
        }
        let all: Vec<usize> = (0..self.scopes.len()).filter(|&at| waits(&self.scopes[at])).collect();
        let likely: Vec<usize> = all.iter().copied().filter(|&at| self.scopes[at].is_told).collect();
        match (&likely[..], &all[..]) {
            (&[one], _) | ([], &[one]) => Ok(Some(one)),
            ([], []) => Ok(None),
            _ => Err(Error::CaptureUnclear { device: device.0 }),
        }
    }

    /// The pool of that name; made now, if no capture took anything from it before.
    fn pool(&mut self, pools: &dyn PoolKeeper, device: DeviceId, torch_pool: TorchPool) -> Result<MemPoolId> {
        let held = self.pools.get_mut(&(device, torch_pool));
        // Released while its capture is under way: it was for this scope, and nobody will release what is made here.
        let held = held.ok_or(Error::PoolUnknown { pool: torch_pool, device: device.0 })?;
        if let Some(pool) = held.pool {
            return Ok(pool);
        }
        let pool = pools.create_graph_pool(device)?;
        held.pool = Some(pool);
        if self.names.len() >= self.names_limit.max(NAMES_MIN) {
            self.names.retain(|&(device, pool), _| pools.pool_uses(device, pool).is_ok());
            self.names_limit = self.names.len() * 2;
        }
        self.names.insert((device, pool), torch_pool);
        Ok(pool)
    }

    /// The captures that a pool serves.
    fn routes(&self, device: DeviceId, pool: MemPoolId) -> Vec<Route> {
        let bound = self.scopes.iter().filter(|scope| scope.device == device).filter_map(|scope| scope.bound);
        bound.filter(|bound| bound.pool == pool).map(|bound| Route::Capture(bound.capture)).collect()
    }
}

/// Where a stream stands.
fn capture_state(runtime: &Runtime, stream: StreamId) -> Result<CaptureState> {
    match runtime.instance().driver().capture_state(stream) {
        Ok(state) => Ok(state),
        // The default stream does not capture, it is only that others do; and a stream that is gone does not either.
        Err(error) if matches!(error.code, ErrorCode::StreamCaptureImplicit | ErrorCode::InvalidHandle) => {
            Ok(CaptureState::None)
        }
        Err(error) => Err(error.into()),
    }
}
