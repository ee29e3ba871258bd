//! The open scopes of a device's private pools: which requests go where. Routing alone; whether a pool is there and who
//! uses it, its keeper knows.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use warpool_driver::{CaptureState, StreamId};

use super::{MemPoolId, Route};
use crate::{Error, Result};

/// One device's, oldest first.
#[derive(Default)]
pub(crate) struct Scopes {
    open: RwLock<Vec<Scope>>,
    /// How many there are: so that nobody needs the lock to see that there are none.
    count: AtomicU32,
}

struct Scope {
    pool: MemPoolId,
    /// Any of them will do.
    routes: Vec<Route>,
}

impl Scopes {
    /// Opens one. [`Error::AlreadyRouting`] if the pool has one.
    pub(crate) fn begin(&self, pool: MemPoolId, route: Route) -> Result<()> {
        let mut open = self.write();
        if open.iter().any(|scope| scope.pool == pool) {
            return Err(Error::AlreadyRouting { pool });
        }
        open.push(Scope { pool, routes: vec![route] });
        self.count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    pub(crate) fn reroute(&self, pool: MemPoolId, routes: &[Route]) -> Result<()> {
        let mut open = self.write();
        let scope = open.iter_mut().find(|scope| scope.pool == pool).ok_or(Error::NotRouting { pool })?;
        scope.routes = routes.to_vec();
        Ok(())
    }

    pub(crate) fn end(&self, pool: MemPoolId) -> Result<()> {
        let mut open = self.write();
        let at = open.iter().position(|scope| scope.pool == pool).ok_or(Error::NotRouting { pool })?;
        open.remove(at);
        self.count.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// Where a request goes that names no pool: the newest scope that it fits, or the default pool. `captures` says
    /// where the stream stands, and is asked without the lock, if at all.
    pub(crate) fn routed(
        &self,
        stream: StreamId,
        captures: impl Fn(StreamId) -> Result<CaptureState>,
    ) -> Result<MemPoolId> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(MemPoolId::DEFAULT);
        }
        let routes: Vec<(MemPoolId, Route)> =
            self.read().iter().rev().flat_map(|scope| scope.routes.iter().map(|&route| (scope.pool, route))).collect();
        for (pool, route) in routes {
            let fits = match route {
                Route::Thread(thread) => thread == std::thread::current().id(),
                Route::Stream(only) => only == stream,
                Route::Everything => true,
                Route::Capture(capture) => captures(stream)? == CaptureState::Active(capture),
            };
            if fits {
                return Ok(pool);
            }
        }
        Ok(MemPoolId::DEFAULT)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Scope>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Scope>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }
}
