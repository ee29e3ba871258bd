//! What was taken on each device, by owner and kind.
//!
//! Allocations are *tracked*: their bytes are known from the call. All else is *measured*: while calls that may take
//! memory run on a device, from the first that begins to the last that ends, what the device has in use beyond tracked
//! memory and pools may change; the change is the first caller's. Around tracked allocations it is how the driver
//! rounds, and its page tables. Calls of several threads that overlap share one such measurement, so nothing is counted
//! twice, and no lock is held during a call.
//!
//! What other processes take during a measurement is counted too. Measurements are short.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use warpool_cuda::nvml::{Nvml, NvmlDevice};
use warpool_driver::DeviceUuid;

use crate::driver::{self, Context};

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Context,
    ContextAndOthers,
    Allocations,
    Modules,
    Graphs,
    Streams,
    Pools,
    Overhead,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Context => "context",
            Self::ContextAndOthers => "context_and_others",
            Self::Allocations => "allocations",
            Self::Modules => "modules",
            Self::Graphs => "graphs",
            Self::Streams => "streams",
            Self::Pools => "pools",
            Self::Overhead => "overhead",
        }
    }
}

/// The owner of what belongs to no library.
pub(crate) const CUDA: &str = "CUDA";

/// Bytes of one owner for one thing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) owner: &'static str,
    pub(crate) kind: Kind,
    pub(crate) bytes: i64,
}

/// What a tracked allocation is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Pointer(u64),
    Handle(u64),
}

struct Allocation {
    device: c_int,
    owner: &'static str,
    bytes: i64,
}

/// What is known of one device.
pub(crate) struct Device {
    pub(crate) index: c_int,
    nvml: Option<NvmlDevice>,
    pub(crate) uuid: Option<[u8; 16]>,
    /// The primary context, by its address; 0 if it is not known.
    context: usize,
    /// In use before this process had a context there.
    pub(crate) before: Option<u64>,
    has_context: bool,
    pub(crate) total: u64,
    pub(crate) used: u64,
    active: u32,
    start: Option<i64>,
    first: (&'static str, Kind),
    tracked: i64,
    rows: Vec<Row>,
    pool: Option<usize>,
    pub(crate) used_most: u64,
    pub(crate) rows_most: Vec<Row>,
}

#[derive(Default)]
struct Ledger {
    devices: Vec<Device>,
    allocations: HashMap<Key, Allocation>,
    /// Pools that the program made, with their devices.
    pools: Vec<(usize, c_int, &'static str)>,
}

static LEDGER: LazyLock<Mutex<Ledger>> = LazyLock::new(Mutex::default);
static NVML: OnceLock<Nvml> = OnceLock::new();
/// Whether anything was allocated from a pool. Until then pools are not asked.
static USES_POOLS: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, Ledger> {
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nvml() -> Option<&'static Nvml> {
    NVML.get()
}

/// Whether libraries are open and functions are found. The first call does that, with no lock held and none that
/// others wait for: the loader's lock is taken, which another thread may hold while it calls the driver.
pub(crate) fn is_ready() -> bool {
    static STATE: AtomicU8 = AtomicU8::new(0);
    const READY: u8 = 2;
    if STATE.load(Ordering::Acquire) == READY {
        return true;
    }
    match STATE.compare_exchange(0, 1, Ordering::Acquire, Ordering::Acquire) {
        Ok(_) => {
            driver::resolve();
            if let Ok(nvml) = Nvml::open() {
                let _ = NVML.set(nvml);
            }
            STATE.store(READY, Ordering::Release);
            true
        }
        Err(state) => state == READY,
    }
}

impl Ledger {
    fn device(&mut self, index: c_int) -> &mut Device {
        let at = match self.devices.iter().position(|device| device.index == index) {
            Some(at) => at,
            None => {
                self.devices.push(Device::new(index));
                self.devices.len() - 1
            }
        };
        &mut self.devices[at]
    }

    /// What pools have of a device: a sum, and what each has.
    fn pools(&mut self, index: c_int) -> Vec<Row> {
        if !USES_POOLS.load(Ordering::Relaxed) {
            return Vec::new();
        }
        driver::relaxed(|| {
            let mut rows = Vec::new();
            let device = self.device(index);
            device.pool = device.pool.or_else(|| driver::default_pool(index));
            let row = |owner, bytes| Row { owner, kind: Kind::Pools, bytes };
            rows.push(row(CUDA, device.pool.map_or(0, driver::pool_reserved) as i64));
            rows.push(Row { owner: CUDA, kind: Kind::Graphs, bytes: driver::graph_reserved(index) as i64 });
            let made = self.pools.iter().filter(|pool| pool.1 == index);
            rows.extend(made.map(|&(pool, _, owner)| row(owner, driver::pool_reserved(pool) as i64)));
            rows
        })
    }

    /// What a device has in use beyond tracked memory and pools.
    fn rest(&mut self, index: c_int) -> Option<i64> {
        let context = self.device(index).context;
        let (free, total) = driver::info(index, ptr::without_provenance_mut(context))?;
        let pools: i64 = self.pools(index).iter().map(|row| row.bytes).sum();
        let device = self.device(index);
        (device.total, device.used) = (total, total.saturating_sub(free));
        Some(device.used as i64 - device.tracked - pools)
    }
}

impl Device {
    fn new(index: c_int) -> Self {
        let uuid = driver::uuid(index);
        let nvml = nvml().zip(uuid).and_then(|(nvml, uuid)| nvml.device(&DeviceUuid(uuid)));
        Self {
            index,
            nvml,
            uuid,
            context: 0,
            before: None,
            has_context: false,
            total: 0,
            used: 0,
            active: 0,
            start: None,
            first: (CUDA, Kind::Overhead),
            tracked: 0,
            rows: Vec::new(),
            pool: None,
            used_most: 0,
            rows_most: Vec::new(),
        }
    }

    /// In use by all processes.
    fn used_by_all(&self) -> Option<u64> {
        nvml().zip(self.nvml).and_then(|(nvml, device)| nvml.used(device))
    }

    fn add(&mut self, owner: &'static str, kind: Kind, bytes: i64) {
        add(&mut self.rows, owner, kind, bytes);
    }

    /// The context is there: what it took. Without NVIDIA's management library, that and what others have.
    fn context_found(&mut self) {
        if !self.has_context {
            self.has_context = true;
            if let Some((before, now)) = self.before.zip(self.used_by_all()) {
                self.add(CUDA, Kind::Context, now as i64 - before as i64);
            } else if let Some((free, total)) = driver::info(self.index, ptr::without_provenance_mut(self.context)) {
                self.add(CUDA, Kind::ContextAndOthers, total.saturating_sub(free) as i64);
            }
        }
    }
}

fn add(rows: &mut Vec<Row>, owner: &'static str, kind: Kind, bytes: i64) {
    match rows.iter_mut().find(|row| row.owner == owner && row.kind == kind) {
        Some(row) => row.bytes += bytes,
        None if bytes != 0 => rows.push(Row { owner, kind, bytes }),
        None => {}
    }
}

/// The driver is ready: what devices have in use before this process takes anything.
pub(crate) fn started() {
    if !is_ready() {
        return;
    }
    for index in 0..driver::device_count() {
        let mut ledger = lock();
        let device = ledger.device(index);
        device.before = device.used_by_all();
    }
}

/// A context may be about to be made on a device.
pub(crate) fn before_context(index: c_int) {
    if !is_ready() {
        return;
    }
    let mut ledger = lock();
    let device = ledger.device(index);
    if !device.has_context && !driver::has_primary_context(index) {
        device.before = device.used_by_all().or(device.before);
    }
}

/// A device has a context, if it is the primary one with its handle.
pub(crate) fn context_made(index: c_int, primary: Option<Context>) {
    if !is_ready() {
        return;
    }
    let mut ledger = lock();
    let device = ledger.device(index);
    device.context = primary.map_or(device.context, Context::addr);
    device.context_found();
}

/// A device's context may be gone, with what belonged to it.
pub(crate) fn context_released(index: c_int) {
    if !is_ready() {
        return;
    }
    let mut ledger = lock();
    if driver::has_primary_context(index) {
        return;
    }
    let mut gone = 0;
    ledger.allocations.retain(|key, allocation| {
        let stays = allocation.device != index || matches!(key, Key::Handle(_));
        gone += if stays { 0 } else { allocation.bytes };
        stays
    });
    let kept: Vec<Row> = ledger.allocations.values().filter(|allocation| allocation.device == index).fold(
        Vec::new(),
        |mut rows, allocation| {
            add(&mut rows, allocation.owner, Kind::Allocations, allocation.bytes);
            rows
        },
    );
    let device = ledger.device(index);
    device.tracked -= gone;
    device.rows = kept;
    (device.context, device.has_context, device.start) = (0, false, None);
}

/// A call that may take memory runs on a device.
#[must_use]
pub(crate) struct Measured {
    device: Option<c_int>,
}

/// Begins a call on a device, or on that of the current context.
pub(crate) fn measure(device: Option<c_int>, owner: &'static str, kind: Kind) -> Measured {
    let device = if is_ready() { device.or_else(driver::current_device) } else { None };
    if let Some(index) = device {
        let mut ledger = lock();
        let found = ledger.device(index);
        found.context_found();
        found.active += 1;
        // What tracked memory takes beside its bytes is little: of calls that overlap, the others' is more.
        if found.active == 1 || found.first.1 == Kind::Overhead {
            found.first = (owner, kind);
        }
        if found.active == 1 {
            let start = ledger.rest(index);
            ledger.device(index).start = start;
        }
    }
    Measured { device }
}

impl Measured {
    /// The call has returned. Whether more is in use than ever before.
    pub(crate) fn end(self) -> bool {
        let Some(index) = self.device else { return false };
        let mut ledger = lock();
        let found = ledger.device(index);
        found.active = found.active.saturating_sub(1);
        if found.active > 0 {
            return false;
        }
        let (before, after) = (found.start.take(), ledger.rest(index));
        let device = ledger.device(index);
        if let Some((before, after)) = before.zip(after) {
            let (owner, kind) = device.first;
            device.add(owner, kind, after - before);
        }
        if device.used <= device.used_most {
            return false;
        }
        let mut rows = ledger.pools(index);
        let device = ledger.device(index);
        rows.extend(&device.rows);
        (device.used_most, device.rows_most) = (device.used, rows);
        true
    }
}

/// The driver allocated memory.
pub(crate) fn allocated(index: c_int, owner: &'static str, key: Key, bytes: u64) {
    let mut ledger = lock();
    let bytes = bytes as i64;
    let device = ledger.device(index);
    device.tracked += bytes;
    device.add(owner, Kind::Allocations, bytes);
    if let Some(before) = ledger.allocations.insert(key, Allocation { device: index, owner, bytes }) {
        // Freed in a way that is not seen here, and given out again.
        forget(&mut ledger, &before);
    }
}

/// The driver freed memory.
pub(crate) fn freed(key: Key) {
    let mut ledger = lock();
    if let Some(before) = ledger.allocations.remove(&key) {
        forget(&mut ledger, &before);
    }
}

fn forget(ledger: &mut Ledger, allocation: &Allocation) {
    let device = ledger.device(allocation.device);
    device.tracked -= allocation.bytes;
    device.add(allocation.owner, Kind::Allocations, -allocation.bytes);
}

/// The device of a tracked allocation.
pub(crate) fn device_of(key: Key) -> Option<c_int> {
    lock().allocations.get(&key).map(|allocation| allocation.device)
}

/// Something is allocated from a pool.
pub(crate) fn pools_are_used() {
    USES_POOLS.store(true, Ordering::Relaxed);
}

/// The program made a pool.
pub(crate) fn pool_made(pool: usize, device: c_int, owner: &'static str) {
    lock().pools.push((pool, device, owner));
}

/// The program destroyed a pool, which must not be asked any more.
pub(crate) fn pool_gone(pool: usize) {
    lock().pools.retain(|made| made.0 != pool);
}

/// Calls `see` with each device that this process used, and what was taken there, now if that can be asked.
pub(crate) fn each(asks: bool, mut see: impl FnMut(&Device, &[Row])) {
    let mut ledger = lock();
    let used: Vec<c_int> =
        ledger.devices.iter().filter(|device| device.has_context).map(|device| device.index).collect();
    for index in used {
        let mut rows = Vec::new();
        if asks {
            let _ = ledger.rest(index);
            rows = ledger.pools(index);
        }
        let device = ledger.device(index);
        for row in &device.rows {
            add(&mut rows, row.owner, row.kind, row.bytes);
        }
        see(device, &rows);
    }
}
