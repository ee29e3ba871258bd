//! The open scopes of a device's private pools: which requests are routed to which pool. Whether a pool exists is its
//! keeper's part.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use warpool_driver::{Driver, StreamId};

use super::{MemPoolId, PoolUser, Route};
use crate::capture::CaptureStatus;
use crate::{Error, Result};

/// The scopes of one device, oldest first.
#[derive(Default)]
pub(crate) struct Scopes {
    open: RwLock<Vec<Scope>>,
    /// How many there are: without any, a request takes no lock.
    count: AtomicU32,
}

struct Scope {
    pool: MemPoolId,
    user: PoolUser,
    /// A request that matches any of them goes to the pool.
    routes: Vec<Route>,
}

impl Scopes {
    /// Opens a scope. [`Error::AlreadyRouting`] if the pool has one.
    pub(crate) fn begin(&self, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        let mut open = self.write();
        if open.iter().any(|scope| scope.pool == pool) {
            return Err(Error::AlreadyRouting { pool });
        }
        open.push(Scope { pool, user, routes: vec![route] });
        self.count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    pub(crate) fn reroute(&self, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        let mut open = self.write();
        let at = position(&open, pool, user)?;
        open[at].routes = routes.to_vec();
        Ok(())
    }

    pub(crate) fn end(&self, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let mut open = self.write();
        let at = position(&open, pool, user)?;
        open.remove(at);
        self.count.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// The pool for a request that names none: that of the newest matching scope, or the default pool. Reads the
    /// stream's capture status only for routes by capture, without the lock.
    #[inline]
    pub(crate) fn routed(&self, stream: StreamId, driver: &dyn Driver) -> Result<MemPoolId> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(MemPoolId::DEFAULT);
        }
        let routes: Vec<(MemPoolId, Route)> =
            self.read().iter().rev().flat_map(|scope| scope.routes.iter().map(|&route| (scope.pool, route))).collect();
        for (pool, route) in routes {
            let matches = match route {
                Route::Thread(thread) => thread == std::thread::current().id(),
                Route::Stream(only) => only == stream,
                Route::Everything => true,
                Route::Capture(capture) => CaptureStatus::of(driver, stream)?.capture() == Some(capture),
            };
            if matches {
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

/// Where the scope of `pool` is, which `user` must have opened.
fn position(open: &[Scope], pool: MemPoolId, user: PoolUser) -> Result<usize> {
    let at = open.iter().position(|scope| scope.pool == pool).ok_or(Error::NotRouting { pool })?;
    if open[at].user == user { Ok(at) } else { Err(Error::ForeignScope { pool }) }
}
