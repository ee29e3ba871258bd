//! Real processes on one simulated card. Each has a simulation of its own; a hook makes them one card: what another
//! process has is not free, and more than the card has cannot be created.
//!
//! A test starts this test binary again, with the name of the program in the environment.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::decorate::{Arguments, Hook, Hooked, Outcome, Value};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, DevicePtr, Driver, DriverError, ErrorCode, Memory as _, StreamId};

use crate::memory::settings::ShareSettings;
use crate::memory::{
    Allocation, BackgroundReclaim, DeviceAllocator as _, MemPoolId, OomCause, PagedAllocator, PoolOptions,
    PrivatePools as _, Request, Settings, Upstream,
};
use crate::share::{LedgerPages, PageDirectory, PageOptions, ProcessPage, SharedPages};
use crate::{Error, Instance, Result, StreamLease, lock};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
/// What all processes have together.
const CARD: u64 = 256 * MIB;
/// What they leave, in MiB: a part of it, in whole pages.
const LEFT: u64 = 10;
const CONTEXT: u64 = 2 * MIB;
const FOLDER: &str = "WARPOOL_TEST_LEDGER";
const PROGRAM: &str = "WARPOOL_TEST_LEDGER_PROGRAM";
const SEED: &str = "WARPOOL_TEST_LEDGER_SEED";

/// The card, as one process sees it. The first word of its ledger in a folder of the card's is what it has created.
struct Card {
    directory: PageDirectory,
    page: ProcessPage,
    /// Memory of the simulation that others have.
    ballast: Mutex<(DevicePtr, u64)>,
    /// Whether more was to be created than there is.
    was_full: AtomicBool,
}

impl Card {
    fn others(&self) -> u64 {
        let pages = self.directory.list().unwrap().pages;
        pages.iter().map(|page| page.ledger(0)[0].load(Ordering::SeqCst)).sum()
    }

    /// Takes as much of the simulation as others have. Returns what this process has.
    fn own(&self, inner: &dyn Driver) -> u64 {
        let mut ballast = lock(&self.ballast);
        let info = inner.mem_info(DEVICE).unwrap();
        let own = info.bytes_total - CONTEXT - info.bytes_free - ballast.1;
        // Some may be about to be refused memory.
        let others = self.others().min(CARD - own);
        if ballast.1 != others {
            inner.mem_free(ballast.0).unwrap();
            let ptr = if others == 0 { DevicePtr(0) } else { inner.mem_alloc(DEVICE, others).unwrap() };
            *ballast = (ptr, others);
        }
        own
    }
}

impl Hook for Card {
    type CallState = ();

    fn before(&self, inner: &dyn Driver, call: Call, arguments: Arguments<'_>) -> warpool_driver::Result<()> {
        let used = &self.page.ledger(0)[0];
        match call {
            Call::MemInfo => drop(self.own(inner)),
            Call::VmCreate => {
                let bytes = arguments.iter().find_map(|(name, value)| match value {
                    Value::Number(bytes) if *name == "bytes" => Some(*bytes),
                    _ => None,
                });
                let before = used.fetch_add(bytes.expect("a size"), Ordering::SeqCst);
                if before + bytes.expect("a size") + self.others() > CARD {
                    used.store(before, Ordering::SeqCst);
                    self.was_full.store(true, Ordering::SeqCst);
                    return Err(DriverError::new("vm_create", ErrorCode::OutOfMemory));
                }
                self.own(inner);
            }
            _ => {}
        }
        Ok(())
    }

    fn after(&self, inner: &dyn Driver, call: Call, (): (), _: Outcome<'_>) {
        if matches!(call, Call::VmCreate | Call::VmRelease) {
            self.page.ledger(0)[0].store(self.own(inner), Ordering::SeqCst);
        }
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// A process's allocator.
struct Process {
    driver: Arc<Hooked<Card>>,
    paged: Arc<PagedAllocator>,
    stream: StreamLease,
    pages: PageDirectory,
    page: Arc<ProcessPage>,
    _thread: BackgroundReclaim,
}

impl Process {
    /// With a guarantee; `None` shares nothing.
    fn new(folder: &Path, guaranteed: Option<u64>) -> Self {
        let mut config = SimConfig::default().without_suballocation_tracking();
        config = config.with_capacity(CARD + CONTEXT);
        config.devices[0].bytes_context = CONTEXT;
        let sim = Arc::new(SimDriver::new(config));
        let plain = Instance::new(sim.clone()).unwrap();
        let directory = PageDirectory::open(&folder.join("card")).unwrap();
        let page = directory.publish(&plain, &PageOptions::default()).unwrap();
        let card = Card { directory, page, ballast: Mutex::new((DevicePtr(0), 0)), was_full: AtomicBool::new(false) };
        let driver = Arc::new(Hooked::with_hook(sim, card));
        let instance = Instance::new(driver.clone()).unwrap();
        let share = ShareSettings {
            enabled: guaranteed.is_some(),
            guaranteed_bytes: guaranteed.unwrap_or(0),
            reclaim_ms: 20,
            ..ShareSettings::default()
        };
        let paged = Arc::new(PagedAllocator::new(&instance, Settings { share, ..Settings::default() }).unwrap());
        paged.set_page_sizes(u64::MAX, u64::MAX);
        let pages = PageDirectory::open(&folder.join("ledger")).unwrap();
        let page = Arc::new(pages.publish(&instance, &PageOptions::default()).unwrap());
        let stream = instance.device(0).unwrap().lease_stream().unwrap();
        let thread = BackgroundReclaim::start(&paged);
        let process = Self { driver, paged, stream, pages, page, _thread: thread };
        if guaranteed.is_some() {
            process.join().unwrap();
        }
        process
    }

    fn join(&self) -> Result<()> {
        let pages: Arc<dyn LedgerPages> = Arc::new(SharedPages::new(self.pages.clone(), self.page.clone()));
        self.paged.share(&pages)
    }

    fn allocate(&self, mib: u64) -> Result<Allocation> {
        self.paged.allocate_raw(Request::new(DEVICE, self.stream.stream().id(), mib * MIB))
    }

    fn check(&self) {
        self.paged.check();
        let was_full = self.driver.hook().was_full.load(Ordering::SeqCst);
        assert!(!was_full, "more was granted than the card has");
    }
}

/// A folder of its own for each test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("warpool-ledger-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        PageDirectory::open(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Another process, which says in lines what it has done. It is killed when this is dropped.
struct Other {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(folder: &Folder, program: &str, seed: u64) -> Self {
        let test = "share::ledger_tests::a_process_that_other_tests_start";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--ignored", "--nocapture"]).env(FOLDER, &folder.0);
        command.env(PROGRAM, program).env(SEED, seed.to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut other = Self { process, lines };
        other.expect("ready");
        other
    }

    /// Waits until it says so.
    fn expect(&mut self, line: &str) {
        let found = self
            .lines
            .by_ref()
            .map(|found| found.unwrap())
            .find(|found| found.contains(line) || found.contains("panicked"));
        assert!(found.as_ref().is_some_and(|found| found.contains(line)), "{line}: {found:?}");
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.process.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "other tests start it, with a program in the environment"]
fn a_process_that_other_tests_start() {
    let variable = |name| std::env::var(name).expect("another test starts this one");
    let (folder, seed) = (PathBuf::from(variable(FOLDER)), variable(SEED).parse().unwrap());
    match variable(PROGRAM).as_str() {
        "idle" => idle(&folder, Some(32 * MIB)),
        "idle alone" => idle(&folder, None),
        "random" => random(&folder, seed),
        "other layout" => {
            let process = Process::new(&folder, Some(0));
            process.page.ledger(0)[0].store(9, Ordering::SeqCst);
            say("ready");
            hear();
        }
        other => panic!("no program {other}"),
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

/// Waits for a line; ends with the process that started this one.
fn hear() -> String {
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).unwrap() == 0 {
        std::process::exit(0);
    }
    line
}

/// Has had most of the card, and holds on to what it can. Then makes no call any more.
fn idle(folder: &Path, guaranteed: Option<u64>) {
    let process = Process::new(folder, guaranteed);
    let block = process.allocate(200).unwrap();
    process.paged.free(block).unwrap();
    say("ready");
    hear();
    // What it gave comes back.
    let block = process.allocate(200);
    say(if block.is_ok() { "again" } else { "no memory" });
    hear();
}

/// Allocates and frees. Once it has had what it is guaranteed, a request within that never fails: before, others may
/// still hold it.
fn random(folder: &Path, seed: u64) {
    const GUARANTEED: u64 = 64;
    let process = Process::new(folder, Some(GUARANTEED * MIB));
    let mut random = fastrand::Rng::with_seed(seed);
    let (is_told, mut held) = (Arc::new(AtomicBool::new(false)), Vec::<(u64, Allocation)>::new());
    let mut has_had = false;
    let told = Arc::clone(&is_told);
    std::thread::spawn(move || {
        hear();
        told.store(true, Ordering::SeqCst);
    });
    say("ready");
    for step in 0_u64.. {
        let live: u64 = held.iter().map(|(mib, _)| mib).sum();
        if is_told.load(Ordering::SeqCst) {
            held.drain(..).for_each(|(_, block)| process.paged.free(block).unwrap());
            // The others are gone, and all that they had is there.
            let all = process.allocate(CARD / MIB - LEFT).unwrap();
            process.paged.free(all).unwrap();
            process.check();
            say("all");
            return;
        }
        let mib = 2 * random.u64(1..=16);
        if live + mib <= 160 && random.u8(..) < 150 {
            match process.allocate(mib) {
                Ok(block) => {
                    has_had |= live + mib >= GUARANTEED;
                    held.push((mib, block));
                }
                Err(Error::OutOfMemory(report)) => {
                    assert!(!has_had || live + mib > GUARANTEED, "{live} of {GUARANTEED}: {report}");
                }
                Err(error) => panic!("{error}"),
            }
        } else if !held.is_empty() {
            let (_, block) = held.swap_remove(random.usize(..held.len()));
            process.paged.free(block).unwrap();
        }
        process.check();
        if step.is_multiple_of(16) {
            say("step");
        }
    }
}

#[test]
fn idle_memory_of_another_process_is_given() {
    let folder = Folder::new();
    let mut other = Other::start(&folder, "idle", 0);
    let process = Process::new(&folder.0, Some(0));
    // What the other one has, or was granted and does not hold yet, is not there before it gives it.
    assert!(process.paged.largest_available(DEVICE).unwrap() <= CARD - 200 * MIB);
    // Its guarantee stays its own.
    let block = process.allocate(CARD / MIB - LEFT - 32).unwrap();
    process.check();
    assert!(process.paged.largest_available(DEVICE).unwrap() < 2 * MIB, "less than a page");
    let refused = process.allocate(2);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Shared), "{refused:?}");
    process.paged.free(block).unwrap();
    other.tell("go on");
    other.expect("again");
}

/// For contexts of processes that start, and libraries. A guarantee is kept all the same.
#[test]
fn some_memory_is_left_that_no_allocator_has() {
    let (folder, other_folder) = (Folder::new(), Folder::new());
    let process = Process::new(&folder.0, Some(0));
    assert!(matches!(process.allocate(CARD / MIB - LEFT + 4), Err(Error::OutOfMemory(_))));
    process.allocate(CARD / MIB - LEFT).unwrap();
    assert!(process.driver.mem_info(DEVICE).unwrap().bytes_free >= 8 * MIB);
    let process = Process::new(&other_folder.0, Some(CARD));
    assert_eq!(process.paged.largest_available(DEVICE).unwrap(), CARD);
    process.allocate(CARD / MIB).unwrap();
    process.check();
}

/// So it does not wait at each step.
#[test]
fn one_that_grows_asks_for_more_than_it_lacks() {
    let folder = Folder::new();
    let _other = Other::start(&folder, "idle", 0);
    let process = Process::new(&folder.0, Some(0));
    // 46 MiB are nobody's; the rest of these 80 the other one gives, and an eighth of what this one had.
    process.allocate(40).unwrap();
    process.allocate(40).unwrap();
    assert!(process.paged.largest_available(DEVICE).unwrap() >= 2 * MIB);
    process.check();
}

/// The control: without sharing the same program runs out of memory.
#[test]
fn idle_memory_stays_without_sharing() {
    let folder = Folder::new();
    let _other = Other::start(&folder, "idle alone", 0);
    let process = Process::new(&folder.0, None);
    assert!(matches!(process.allocate(CARD / MIB - 32), Err(Error::OutOfMemory(_))));
}

/// A process that is stopped gives nothing, and holds nobody up. Once it goes on, or has died, its memory is there.
#[test]
fn a_stopped_process_is_waited_for_a_bounded_time() {
    for signal in ["-CONT", "-KILL"] {
        let folder = Folder::new();
        let mut other = Other::start(&folder, "idle", 0);
        let process = Process::new(&folder.0, Some(0));
        other.signal("-STOP");
        assert!(matches!(process.allocate(200), Err(Error::OutOfMemory(_))));
        other.signal(signal);
        if signal == "-KILL" {
            other.process.wait().unwrap();
        }
        let block = process.allocate(200).unwrap();
        process.check();
        process.paged.free(block).unwrap();
    }
}

#[test]
fn what_cannot_be_shared_is_refused_with_a_sentence() {
    let folder = Folder::new();
    let process = Process::new(&folder.0, None);
    let refused = |process: &Process| process.join().unwrap_err().to_string();
    let other = Other::start(&folder, "other layout", 0);
    let error = refused(&process);
    assert!(error.contains("its ledger has layout 9, and this Warpool reads layout 2; nothing is shared"), "{error}");
    drop(other);
    let _others = [(); 4].map(|()| Other::start(&folder, "random", 0));
    let settings = Settings {
        share: ShareSettings { enabled: true, guaranteed_bytes: 2 * CARD, ..ShareSettings::default() },
        ..Settings::default()
    };
    process.paged.set_settings(settings).unwrap();
    let error = refused(&process);
    assert!(error.contains("lower share_guaranteed; nothing is shared"), "{error}");
    assert_eq!(process.page.ledger(0)[0].load(Ordering::SeqCst), 0, "it does not count");
}

/// Processes that die at any instruction: what they had is free, no guarantee is ever refused, and the card is never
/// overcommitted.
#[test]
fn processes_are_killed_at_any_time() {
    let seed = 7;
    println!("seed {seed}");
    let (folder, mut random) = (Folder::new(), fastrand::Rng::with_seed(seed));
    let mut next = 0;
    let mut start = || {
        next += 1;
        Other::start(&folder, "random", seed * 1000 + next)
    };
    let mut all = [start(), start(), start()];
    for _ in 0..12 {
        let one = random.usize(..3);
        for _ in 0..random.u32(1..4) {
            all[one].expect("step");
        }
        all[one].process.kill().unwrap();
        all[one].process.wait().unwrap();
        all[one] = start();
    }
    let [mut last, second, third] = all;
    drop((second, third));
    last.tell("all");
    last.expect("all");
}

/// Where a process says what it holds (`ledger/admission.rs`).
const HELD: usize = 5;

/// An upstream of the driver's memory, which looks at the ledger while it gets memory back.
struct Upstreamed {
    driver: Arc<dyn Driver>,
    paged: Weak<PagedAllocator>,
    page: Arc<ProcessPage>,
    held: Mutex<Vec<u64>>,
}

impl Upstream for Upstreamed {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        Ok(Some(self.driver.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, _: u64, device: DeviceId, _: StreamId) -> Result<()> {
        // As another thread may: it says what the process holds.
        self.paged.upgrade().expect("it frees").release_idle(device)?;
        lock(&self.held).push(self.page.ledger(0)[HELD].load(Ordering::SeqCst));
        Ok(self.driver.mem_free(ptr)?)
    }
}

/// What is being returned may be free already: nobody may count it as held and as free.
#[test]
fn a_segment_is_not_held_while_its_upstream_gets_it_back() {
    let folder = Folder::new();
    let process = Process::new(&folder.0, Some(0));
    let paged = Arc::downgrade(&process.paged);
    let (page, held) = (Arc::clone(&process.page), Mutex::default());
    let upstream = Arc::new(Upstreamed { driver: process.driver.clone(), paged, page, held });
    let options = PoolOptions { upstream: Some(upstream.clone()), ..PoolOptions::default() };
    let pool = process.paged.create_pool(DEVICE, options).unwrap();
    let request = Request::new(DEVICE, process.stream.stream().id(), 40 * MIB);
    let block = process.paged.allocate_raw(request.in_pool(pool)).unwrap();
    let other = process.allocate(10).unwrap();
    process.paged.free(block).unwrap();
    process.paged.release_idle(DEVICE).unwrap();
    assert_eq!(process.page.ledger(0)[HELD].load(Ordering::SeqCst), 50 * MIB);
    process.paged.release_pool(DEVICE, pool).unwrap();
    process.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(*lock(&upstream.held), [10 * MIB]);
    process.paged.free(other).unwrap();
    process.check();
}

/// Allocators of one process see each other, as far as their pages were published through one folder, and no longer
/// than the pages exist.
#[test]
fn allocators_of_one_process_are_members_too() {
    let folder = Folder::new();
    let directory = PageDirectory::open(&folder.0.join("ledger")).unwrap();
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let publish = || Arc::new(directory.clone().publish(&instance, &PageOptions::default()).unwrap());
    let uuid = instance.device(0).unwrap().properties().uuid;
    let (first, second) = (publish(), publish());
    let numbers = |page: &Arc<ProcessPage>| {
        let pages = SharedPages::new(directory.clone(), Arc::clone(page));
        pages.others(uuid, true).unwrap()
    };
    let seen = numbers(&first);
    assert_eq!(seen.iter().map(|other| other.number()).collect::<Vec<_>>(), [second.number()]);
    second.ledger(0)[1].store(7, Ordering::SeqCst);
    assert_eq!(seen[0].words()[1].load(Ordering::SeqCst), 7);
    let path = second.path().to_owned();
    drop(second);
    assert!(numbers(&first).is_empty(), "it exists no more, though somebody still reads it");
    drop(seen);
    assert!(!path.exists() && first.path().exists());
    assert!(directory.list().unwrap().pages.is_empty(), "a reader of other processes does not see it");
}
