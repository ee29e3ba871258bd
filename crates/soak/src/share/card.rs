//! One card of several simulations, each of which is a process: what one has created no other can create, and is not
//! free for any. A process has an entry of words that the others read, as long as it is alive.
//!
//! All runs in one thread. So that processes meet at every step of each other's calls, each driver call and each look
//! at the entries is a point at which [`Points::reached`] may run another process, or end this one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use warpool::Result;
use warpool::driver::decorate::{Arguments, Hook, Outcome, Value};
use warpool::driver::sim::SimDriver;
use warpool::driver::{Call, DevicePtr, DeviceUuid, Driver, DriverError, ErrorCode, Memory as _};
use warpool::share::{LEDGER_WORDS, LedgerPages, OtherLedger};

use crate::machine::device_id;

/// What happens at the points of a process's calls.
pub trait Points: Send + Sync {
    /// A process is at a point of a call.
    fn reached(&self, process: u64);

    /// A process looks at the clock: it may be waiting for others.
    fn looked_at_clock(&self, process: u64);
}

type Entry = Arc<Vec<AtomicU64>>;

#[derive(Default)]
struct State {
    /// What each process has created, by its number. The driver has it back some time after the process ended.
    used: BTreeMap<u64, u64>,
    /// The entries of processes that are alive.
    alive: BTreeMap<u64, Entry>,
}

/// The memory of the card, and the entries of its processes.
pub struct Card {
    bytes: u64,
    state: Mutex<State>,
    clock_us: AtomicU64,
    points: OnceLock<Weak<dyn Points>>,
}

impl Card {
    pub fn new(bytes: u64) -> Arc<Self> {
        let (state, clock_us, points) = (Mutex::default(), AtomicU64::new(1 << 40), OnceLock::new());
        Arc::new(Self { bytes, state, clock_us, points })
    }

    pub fn set_points(&self, points: Weak<dyn Points>) {
        assert!(self.points.set(points).is_ok(), "a card has one program");
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn points(&self) -> Option<Arc<dyn Points>> {
        self.points.get()?.upgrade()
    }

    /// A new process.
    pub fn add(self: &Arc<Self>, number: u64) -> Arc<Pages> {
        let entry: Entry = Arc::new((0..LEDGER_WORDS).map(|_| AtomicU64::new(0)).collect());
        self.state().alive.insert(number, Arc::clone(&entry));
        self.state().used.insert(number, 0);
        Arc::new(Pages { card: Arc::clone(self), number, entry })
    }

    /// A process ended: others do not see its entry any more. Its memory is not free yet.
    pub fn ended(&self, number: u64) {
        self.state().alive.remove(&number);
    }

    /// The driver has the memory of processes that ended.
    pub fn reclaim(&self) {
        let mut state = self.state();
        let State { used, alive } = &mut *state;
        used.retain(|number, _| alive.contains_key(number));
    }

    /// Whether a process that ended still has memory.
    pub fn has_remains(&self) -> bool {
        let state = self.state();
        state.used.iter().any(|(number, &bytes)| bytes > 0 && !state.alive.contains_key(number))
    }

    /// What each process has created, and the words of its entry, for a violation.
    pub fn describe(&self) -> String {
        let state = self.state();
        let words =
            |number| state.alive.get(number).map(|entry| entry[..10].iter().map(|word| word.load(Ordering::SeqCst)));
        let lines = state.used.iter().map(|(number, used)| {
            format!("{number} created {used}, and says {:?}", words(number).map(Iterator::collect::<Vec<u64>>))
        });
        lines.collect::<Vec<_>>().join("; ")
    }

    fn free(&self) -> u64 {
        self.bytes.checked_sub(self.state().used.values().sum()).expect("no more was created than there is")
    }
}

/// The entries, as one process finds them.
pub struct Pages {
    card: Arc<Card>,
    number: u64,
    entry: Entry,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pages({})", self.number)
    }
}

impl LedgerPages for Pages {
    fn number(&self) -> u64 {
        self.number
    }

    fn own(&self, _: usize) -> &[AtomicU64] {
        &self.entry
    }

    fn others(&self, _: DeviceUuid, _: bool) -> Result<Vec<Box<dyn OtherLedger>>> {
        self.card.points().inspect(|points| points.reached(self.number));
        let state = self.card.state();
        let others = state.alive.iter().filter(|(number, _)| **number != self.number);
        Ok(others.map(|(&number, entry)| Box::new(Other { number, entry: entry.clone() }) as _).collect())
    }

    fn keep(&self) -> bool {
        true
    }

    fn now_us(&self) -> u64 {
        self.card.points().inspect(|points| points.looked_at_clock(self.number));
        self.card.clock_us.fetch_add(10, Ordering::Relaxed)
    }

    fn folder(&self) -> String {
        "a simulated card".to_owned()
    }
}

struct Other {
    number: u64,
    entry: Entry,
}

impl std::fmt::Debug for Other {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Other({})", self.number)
    }
}

impl OtherLedger for Other {
    fn number(&self) -> u64 {
        self.number
    }

    fn words(&self) -> &[AtomicU64] {
        &self.entry
    }

    fn file(&self) -> String {
        self.number.to_string()
    }
}

/// The driver of one process: its simulation has as much free memory as the card.
pub struct PartOfCard {
    card: Arc<Card>,
    number: u64,
    sim: Arc<SimDriver>,
    /// What others have, as memory of this simulation.
    ballast: Mutex<(DevicePtr, u64)>,
    created: Mutex<BTreeMap<String, u64>>,
    has_ended: AtomicBool,
    /// More was to be created than the card has: what everybody said then.
    full: Mutex<Option<String>>,
}

impl PartOfCard {
    pub fn new(pages: &Pages, sim: &Arc<SimDriver>) -> Self {
        Self {
            card: Arc::clone(&pages.card),
            number: pages.number,
            sim: Arc::clone(sim),
            ballast: Mutex::new((DevicePtr(0), 0)),
            created: Mutex::default(),
            has_ended: AtomicBool::new(false),
            full: Mutex::default(),
        }
    }

    /// What everybody said when the driver had less than the process was granted.
    pub fn full(&self) -> Option<String> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From here on its calls do not count.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.set_ballast(0);
    }

    fn set_ballast(&self, bytes: u64) {
        let mut ballast = self.ballast.lock().unwrap_or_else(PoisonError::into_inner);
        if ballast.1 != bytes {
            self.sim.mem_free(ballast.0).expect("it was allocated");
            let ptr =
                if bytes == 0 { DevicePtr(0) } else { self.sim.mem_alloc(device_id(0), bytes).expect("it is free") };
            *ballast = (ptr, bytes);
        }
    }

    /// Makes the simulation have as much free memory as the card.
    fn level(&self) {
        let ballast = self.ballast.lock().unwrap_or_else(PoisonError::into_inner).1;
        let free = self.sim.mem_info(device_id(0)).expect("a simulation answers").bytes_free;
        self.set_ballast(
            (free + ballast).checked_sub(self.card.free()).expect("the simulation is larger than the card"),
        );
    }
}

/// What a call changes.
#[derive(Default)]
pub enum Change {
    #[default]
    Nothing,
    Creates(u64),
    /// Physical memory, by its id.
    Releases(String),
}

fn bytes_of(arguments: Arguments<'_>) -> u64 {
    let number = |value: &Value<'_>| if let Value::Number(number) = value { Some(*number) } else { None };
    arguments.iter().find_map(|(_, value)| number(value)).expect("a size")
}

impl Hook for PartOfCard {
    type CallState = Change;

    fn before(&self, _: &dyn Driver, call: Call, arguments: Arguments<'_>) -> warpool::driver::Result<Change> {
        if self.has_ended.load(Ordering::Relaxed) {
            return Ok(Change::Nothing);
        }
        self.card.points().inspect(|points| points.reached(self.number));
        match call {
            Call::MemInfo => self.level(),
            Call::VmCreate => {
                let bytes = bytes_of(arguments);
                if bytes > self.card.free() {
                    let said = format!("{bytes} of {}: {}", self.card.free(), self.card.describe());
                    *self.full.lock().unwrap_or_else(PoisonError::into_inner) = Some(said);
                    return Err(DriverError::new("vm_create", ErrorCode::OutOfMemory));
                }
                self.level();
                *self.card.state().used.entry(self.number).or_default() += bytes;
                return Ok(Change::Creates(bytes));
            }
            Call::VmRelease => return Ok(Change::Releases(format!("{:?}", arguments[0].1))),
            _ => {}
        }
        Ok(Change::Nothing)
    }

    fn after(&self, _: &dyn Driver, _: Call, change: Change, outcome: Outcome<'_>) {
        if self.has_ended.load(Ordering::Relaxed) {
            return;
        }
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        let mut freed = 0;
        match (change, outcome) {
            (Change::Creates(bytes), Ok(physical)) => drop(created.insert(format!("{physical:?}"), bytes)),
            (Change::Creates(bytes), Err(_)) => freed = bytes,
            (Change::Releases(physical), Ok(_)) => freed = created.remove(&physical).unwrap_or(0),
            _ => {}
        }
        drop(created);
        *self.card.state().used.entry(self.number).or_default() -= freed;
        self.card.points().inspect(|points| points.reached(self.number));
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}
