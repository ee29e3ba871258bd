//! The open scopes of a device's private pools: which requests are routed to which pool. Whether a pool exists is not
//! tracked here.
//!
//! If several scopes match a request, the newest applies. It is looked up by the request's thread, stream and capture,
//! so the cost does not depend on the number of open scopes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::ThreadId;

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, Driver, StreamId};

use super::{MemPoolId, PoolUser, Route, ScopeId};
use crate::capture::CaptureStatus;
use crate::{Error, Result};

/// The scopes of one device.
#[derive(Default)]
pub(crate) struct Scopes {
    open: RwLock<OpenScopes>,
    /// The number of open scopes. With none, a request takes no lock.
    count: AtomicU32,
}

/// The position of a scope in the order in which they were opened.
type Age = u64;

#[derive(Default)]
struct OpenScopes {
    next: Age,
    by_age: BTreeMap<Age, Scope>,
    by_pool: BTreeMap<MemPoolId, Age>,
    threads: FxHashMap<ThreadId, BTreeSet<Age>>,
    streams: FxHashMap<StreamId, BTreeSet<Age>>,
    captures: FxHashMap<CaptureId, BTreeSet<Age>>,
    /// The scopes with any route by capture.
    with_captures: BTreeSet<Age>,
    for_everything: BTreeSet<Age>,
}

struct Scope {
    pool: MemPoolId,
    user: PoolUser,
    /// A request that matches any of them goes to the pool.
    routes: Vec<Route>,
}

impl OpenScopes {
    /// The scope of `pool`, which `user` must have opened.
    fn age(&self, pool: MemPoolId, user: PoolUser) -> Result<Age> {
        let age = *self.by_pool.get(&pool).ok_or(Error::NotRouting { pool })?;
        if self.by_age[&age].user == user { Ok(age) } else { Err(Error::ForeignScope { pool }) }
    }

    fn add_routes(&mut self, age: Age, routes: &[Route]) {
        for &route in routes {
            match route {
                Route::Thread(thread) => drop(self.threads.entry(thread).or_default().insert(age)),
                Route::Stream(stream) => drop(self.streams.entry(stream).or_default().insert(age)),
                Route::Capture(capture) => {
                    self.captures.entry(capture).or_default().insert(age);
                    self.with_captures.insert(age);
                }
                Route::Everything => drop(self.for_everything.insert(age)),
            }
        }
    }

    fn remove_routes(&mut self, age: Age, routes: &[Route]) {
        for &route in routes {
            match route {
                Route::Thread(thread) => remove_age(&mut self.threads, &thread, age),
                Route::Stream(stream) => remove_age(&mut self.streams, &stream, age),
                Route::Capture(capture) => {
                    remove_age(&mut self.captures, &capture, age);
                    self.with_captures.remove(&age);
                }
                Route::Everything => drop(self.for_everything.remove(&age)),
            }
        }
    }

    /// The newest scope that matches by thread or stream, or matches everything.
    fn newest(&self, thread: ThreadId, stream: StreamId) -> Option<Age> {
        let by_thread = self.threads.get(&thread).and_then(BTreeSet::last);
        let by_stream = self.streams.get(&stream).and_then(BTreeSet::last);
        [by_thread, by_stream, self.for_everything.last()].into_iter().flatten().max().copied()
    }

    fn pool(&self, age: Option<Age>) -> MemPoolId {
        age.and_then(|age| self.by_age.get(&age)).map_or(MemPoolId::DEFAULT, |scope| scope.pool)
    }
}

fn remove_age<K: Eq + Hash>(ages: &mut FxHashMap<K, BTreeSet<Age>>, key: &K, age: Age) {
    if let Some(of_key) = ages.get_mut(key) {
        of_key.remove(&age);
        if of_key.is_empty() {
            ages.remove(key);
        }
    }
}

impl Scopes {
    /// Opens a scope. [`Error::AlreadyRouting`] if the pool has one.
    pub(crate) fn begin(&self, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        let mut open = self.write();
        if open.by_pool.contains_key(&pool) {
            return Err(Error::AlreadyRouting { pool });
        }
        let age = open.next;
        open.next += 1;
        open.by_pool.insert(pool, age);
        open.by_age.insert(age, Scope { pool, user, routes: vec![route] });
        open.add_routes(age, &[route]);
        self.count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Opens another scope of a pool, regardless of other scopes and their users. It is closed only by its id.
    pub(crate) fn open(&self, pool: MemPoolId, route: Route) -> ScopeId {
        let mut open = self.write();
        let age = open.next;
        open.next += 1;
        open.by_age.insert(age, Scope { pool, user: PoolUser::HANDLE, routes: vec![route] });
        open.add_routes(age, &[route]);
        self.count.fetch_add(1, Ordering::Release);
        ScopeId(age)
    }

    /// Closes a scope of [`open`](Self::open). Returns whether there was one.
    pub(crate) fn close(&self, scope: ScopeId) -> bool {
        let mut open = self.write();
        let Some(closed) = open.by_age.remove(&scope.0) else { return false };
        open.remove_routes(scope.0, &closed.routes);
        self.count.fetch_sub(1, Ordering::Release);
        true
    }

    pub(crate) fn reroute(&self, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        let mut open = self.write();
        let age = open.age(pool, user)?;
        let scope = open.by_age.get_mut(&age).expect("a scope that is open");
        let before = std::mem::replace(&mut scope.routes, routes.to_vec());
        open.remove_routes(age, &before);
        open.add_routes(age, routes);
        Ok(())
    }

    pub(crate) fn end(&self, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let mut open = self.write();
        let age = open.age(pool, user)?;
        open.by_pool.remove(&pool);
        let scope = open.by_age.remove(&age).expect("a scope that is open");
        open.remove_routes(age, &scope.routes);
        self.count.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// Whether any scope is open: without one, requests go to the default pool.
    #[inline]
    pub(crate) fn is_any_open(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// The pool for a request that names none: that of the newest matching scope, or the default pool. Reads the
    /// stream's capture status only if a newer scope routes by capture, without the lock.
    #[inline]
    pub(crate) fn routed(&self, stream: StreamId, driver: &dyn Driver) -> Result<MemPoolId> {
        if self.is_any_open() { self.search(stream, driver) } else { Ok(MemPoolId::DEFAULT) }
    }

    fn search(&self, stream: StreamId, driver: &dyn Driver) -> Result<MemPoolId> {
        let thread = std::thread::current().id();
        let open = self.read();
        let newest = open.newest(thread, stream);
        if open.with_captures.last().copied() <= newest {
            return Ok(open.pool(newest));
        }
        drop(open);
        let capture = CaptureStatus::of(driver, stream)?.capture();
        let open = self.read();
        let by_capture = capture.and_then(|capture| open.captures.get(&capture)?.last().copied());
        Ok(open.pool(open.newest(thread, stream).max(by_capture)))
    }

    /// The pools to which captures are routed.
    pub(crate) fn pools_of_captures(&self) -> Vec<MemPoolId> {
        let open = self.read();
        open.with_captures.iter().map(|&age| open.pool(Some(age))).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, OpenScopes> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, OpenScopes> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{CaptureMode, CaptureState, Captures as _, DeviceId, StreamOptions, Streams as _};

    use super::*;

    const RAW: PoolUser = PoolUser::RAW;

    /// Random scopes, compared with a search of a list from its end.
    #[test]
    fn the_newest_scope_that_matches_counts() {
        let driver = Arc::new(SimDriver::new(SimConfig::default()));
        let options = StreamOptions { non_blocking: true, priority: 0 };
        let streams: Vec<StreamId> = (0..3).map(|_| driver.stream_create(DeviceId(0), options).unwrap()).collect();
        let other_thread = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
        driver.capture_begin(streams[0], CaptureMode::Relaxed).unwrap();
        let CaptureState::Active(capture) = driver.capture_state(streams[0]).unwrap() else { panic!("it captures") };
        let routes = [
            Route::Thread(std::thread::current().id()),
            Route::Thread(other_thread),
            Route::Stream(streams[0]),
            Route::Stream(streams[1]),
            Route::Capture(capture),
            Route::Everything,
        ];
        for seed in 0..50 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (scopes, mut list) = (Scopes::default(), Vec::<(MemPoolId, Vec<Route>)>::new());
            for _ in 0..200 {
                let pool = MemPoolId { graph: rng.u32(1..8), user: 0 };
                let some: Vec<Route> = (0..rng.usize(0..3)).map(|_| routes[rng.usize(..routes.len())]).collect();
                let at = list.iter().position(|(open, _)| *open == pool);
                match (rng.u8(..4), at) {
                    (0, Some(at)) => {
                        scopes.end(pool, RAW).unwrap();
                        list.remove(at);
                    }
                    (1, Some(at)) => {
                        scopes.reroute(pool, &some, RAW).unwrap();
                        list[at].1 = some;
                    }
                    (_, Some(_)) => {
                        assert_eq!(scopes.begin(pool, Route::Everything, RAW), Err(Error::AlreadyRouting { pool }));
                    }
                    (_, None) => {
                        let route = routes[rng.usize(..routes.len())];
                        assert_eq!(scopes.end(pool, RAW), Err(Error::NotRouting { pool }));
                        scopes.begin(pool, route, RAW).unwrap();
                        list.push((pool, vec![route]));
                    }
                }
                for &stream in &streams {
                    let matches = |route: &Route| match *route {
                        Route::Thread(thread) => thread == std::thread::current().id(),
                        Route::Stream(only) => only == stream,
                        Route::Capture(_) => stream == streams[0],
                        Route::Everything => true,
                    };
                    let newest = list.iter().rev().find(|(_, routes)| routes.iter().any(matches));
                    let expected = newest.map_or(MemPoolId::DEFAULT, |&(pool, _)| pool);
                    assert_eq!(scopes.routed(stream, &*driver), Ok(expected), "seed {seed}");
                }
            }
            let pools: Vec<MemPoolId> = list.iter().map(|&(pool, _)| pool).collect();
            pools.into_iter().for_each(|pool| scopes.end(pool, RAW).unwrap());
            let open = scopes.read();
            let left = (open.by_age.len(), open.by_pool.len(), open.threads.len(), open.streams.len());
            assert_eq!(left, (0, 0, 0, 0), "nothing is kept of closed scopes");
            assert!(open.captures.is_empty() && open.with_captures.is_empty() && open.for_everything.is_empty());
        }
    }
}
