//! Pages between processes: this test starts itself again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use warpool_driver::sim::{SimConfig, SimDriver};

use super::*;
use crate::Instance;
use crate::memory::pools::PoolOptions;
use crate::memory::sleep::Keep;
use crate::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, MemPool, MemPoolId, PagedAllocator,
    PinnedSettings, Settings, Tags,
};

const FOLDER: &str = "WARPOOL_TEST_PAGES";

fn instance() -> Instance {
    Instance::new(Arc::new(SimDriver::new(SimConfig::default().with_devices(2)))).unwrap()
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("warpool-pages-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::temp_dir().join(name))
    }

    fn open(&self) -> PageDirectory {
        PageDirectory::open(&self.0).unwrap()
    }

    fn files(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process with a page, which writes values as long as it lives.
struct Process(Child);

impl Process {
    /// Several start at the same time; each has its page on return.
    fn start(folder: &Path, count: usize) -> Vec<Self> {
        let test = "share::tests::a_process_that_other_tests_start";
        let start = |_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", test, "--ignored", "--nocapture"]).env(FOLDER, folder);
            Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
        };
        let mut all: Vec<Self> = (0..count).map(start).collect();
        for process in &mut all {
            let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap().contains("published")), "it has a page");
        }
        all
    }

    fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "other tests start it, with a folder in the environment"]
fn a_process_that_other_tests_start() {
    let folder = std::env::var_os(FOLDER).expect("another test starts this one");
    let pages = PageDirectory::open(Path::new(&folder)).unwrap();
    let options = PageOptions { command: format!("test {}", std::process::id()) };
    let page = pages.publish(&instance(), &options).unwrap();
    page.ledger(1)[LEDGER_WORDS - 1].store(5, Ordering::Relaxed);
    // Its own page is none of the others, and finding it does not end its lock.
    assert!(pages.list().unwrap().pages.iter().all(|other| other.identity().pid != std::process::id()));
    println!("published");
    std::io::stdout().flush().unwrap();
    let writer = std::thread::spawn(move || {
        for number in 1.. {
            let counters = Counters { bytes_allocated: number, read_us: number, ..Counters::default() };
            let row = |stream| UsageRow { bytes_active: number, ..UsageRow::of(UsageOf::Stream(stream)) };
            page.write(0, &counters, &[row(0), row(1)]);
            // A reader should have its turn on a machine of two cores.
            std::thread::sleep(std::time::Duration::from_micros(if page.asked_us() == 0 { 2000 } else { 20 }));
        }
    });
    // Until the parent ends.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(writer);
}

#[test]
fn pages_come_and_go_with_their_processes() {
    let folder = Folder::new();
    let pages = folder.open();
    let mut processes = Process::start(&folder.0, 3);
    let own = pages.publish(&instance(), &PageOptions::default()).unwrap();
    let listing = pages.list().unwrap();
    assert_eq!((listing.pages.len(), listing.problems.as_slice(), folder.files()), (3, &[][..], 4));
    let mut pids: Vec<u32> = processes.iter().map(Process::id).collect();
    pids.sort_unstable();
    assert_eq!(listing.pages.iter().map(|page| page.identity().pid).collect::<Vec<_>>(), pids);
    for page in &listing.pages {
        let identity = page.identity();
        assert_eq!(identity.command, format!("test {}", identity.pid));
        assert_eq!(identity.devices.len(), 2);
        let (device, properties) = (&identity.devices[1], instance().device(1).unwrap().properties().clone());
        assert_eq!((device.uuid, &device.name, device.ordinal), (properties.uuid, &properties.name, 1));
        assert_eq!(device.bytes_total, properties.bytes_total);
        assert_eq!(page.read(1), Reading::Nothing, "it writes of device 0 only");
        assert_eq!(page.ledger(1)[LEDGER_WORDS - 1].load(Ordering::Relaxed), 5);
        assert!(page.is_alive() && page.path().is_file());
    }
    // Killed at any instruction, its page is gone.
    let killed = processes.remove(0);
    let page = listing.pages.iter().find(|page| page.identity().pid == killed.id()).unwrap();
    drop(killed);
    assert!(!page.is_alive());
    assert_eq!((pages.list().unwrap().pages.len(), folder.files()), (2, 3));
    assert!(own.keep());
    drop(own);
    assert_eq!(folder.files(), 2);
}

#[test]
fn a_reader_sees_no_torn_value_of_another_process() {
    let folder = Folder::new();
    let _process = Process::start(&folder.0, 1);
    let listing = folder.open().list().unwrap();
    let page = &listing.pages[0];
    page.ask();
    let (mut last, mut different) = (0, 0);
    while different < 500 {
        match page.read(0) {
            Reading::Values(values) => {
                let number = values.counters.bytes_allocated;
                assert!(values.counters.read_us == number && number >= last, "{values:?} after {last}");
                assert!(values.rows.len() == 2 && values.rows.iter().all(|row| row.bytes_active == number));
                different += u64::from(number > last);
                last = number;
            }
            Reading::Nothing | Reading::Busy => {}
            Reading::Damaged => panic!("a torn value"),
        }
    }
}

#[test]
fn damaged_files_are_named_and_others_are_left_alone() {
    let folder = Folder::new();
    let pages = folder.open();
    let _processes = Process::start(&folder.0, 4);
    let listing = pages.list().unwrap();
    let damage = |index: usize, at: u64, bytes: &[u8]| {
        let file = std::fs::File::options().write(true).open(listing.pages[index].path()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    };
    damage(0, 0, b"nonsense");
    damage(1, 8, &9_u64.to_ne_bytes());
    // Longer than it was.
    damage(2, 1 << 20, &[1]);
    // No file of pages, and such as no process owns.
    std::fs::write(folder.0.join("notes.txt"), "mine").unwrap();
    std::fs::write(folder.0.join("1-left.page"), "mine").unwrap();
    std::fs::create_dir(folder.0.join("folder.page")).unwrap();
    let again = pages.list().unwrap();
    assert_eq!(again.pages.len(), 1);
    let mut why: Vec<&str> = again.problems.iter().map(|problem| &*problem.why).collect();
    why.sort_unstable();
    assert_eq!(
        why,
        [
            "it does not begin as a page does",
            "it has layout 9, and this Warpool reads layout 1",
            "it has not the length of a page",
            "it has not the length of a page"
        ]
    );
    assert!(folder.0.join("notes.txt").exists() && !folder.0.join("1-left.page").exists());
}

#[test]
fn two_hundred_processes() {
    let folder = Folder::new();
    let pages = folder.open();
    let mut processes = Process::start(&folder.0, 200);
    let listing = pages.list().unwrap();
    assert_eq!((listing.pages.len(), listing.problems.as_slice()), (200, &[][..]));
    let killed: Vec<Process> = processes.drain(..150).collect();
    drop(killed);
    assert_eq!((pages.list().unwrap().pages.len(), folder.files()), (50, 50));
    assert_eq!(listing.pages.iter().filter(|page| page.is_alive()).count(), 50);
}

#[test]
fn errors_name_the_folder_and_the_reason() {
    let folder = Folder::new();
    let inside = folder.0.join("inside");
    let error = PageDirectory::open(&inside).unwrap_err().to_string();
    assert!(error.starts_with(&format!("the folder of the pages, {}, cannot be used: ", inside.display())), "{error}");
    let pages = folder.open();
    std::fs::remove_dir(&folder.0).unwrap();
    assert!(pages.publish(&instance(), &PageOptions::default()).is_err());
    assert!(pages.list().is_err());
    assert!(PageDirectory::default_path().file_name().unwrap().to_string_lossy().starts_with("warpool-"));
}

/// Writes what an allocator has, and reads it as another process would.
fn published(allocator: &Arc<dyn DeviceAllocator>, options: PublishOptions, act: impl FnOnce(&Publisher)) -> Reading {
    let folder = Folder::new();
    let page = Arc::new(folder.open().publish(allocator.instance(), &PageOptions::default()).unwrap());
    let publisher = Publisher::start(&page, allocator, options).unwrap();
    act(&publisher);
    publisher.write_now();
    page.read_own(0)
}

fn allocators() -> [Arc<dyn DeviceAllocator>; 2] {
    let paged = PagedAllocator::new(&instance(), Settings::default()).unwrap();
    [Arc::new(CachingAllocator::new(&instance(), Settings::default())), Arc::new(paged)]
}

#[test]
fn a_publisher_writes_what_the_allocator_counts() {
    for allocator in allocators() {
        let device = allocator.instance().device(0).unwrap();
        let streams = [device.lease_stream().unwrap(), device.lease_stream().unwrap()];
        let _blocks = streams.each_ref().map(|stream| allocator.allocate(3 << 20, stream).unwrap());
        let freed = allocator.allocate(30 << 20, &streams[0]).unwrap();
        let pool = MemPool::new(&allocator, &device, PoolOptions::default()).unwrap();
        let _of_pool = allocator.allocate_in(&pool, 5 << 20, &streams[1]).unwrap();
        freed.free().unwrap();
        let options = PublishOptions::default();
        let reading = published(&allocator, options, |_| {
            // The error is written when it happens.
            assert!(allocator.allocate(1 << 50, &streams[0]).is_err());
        });
        let Reading::Values(values) = reading else { panic!("{reading:?}") };
        let counters = &values.counters;
        assert_eq!(counters.bytes_allocated, 11 << 20);
        let stats = allocator.stats(device.id()).unwrap();
        assert_eq!(counters.bytes_reserved, stats.reserved_bytes.all.current);
        assert_eq!((counters.allocations, counters.limit()), (4, None));
        assert!(counters.device_free().is_some_and(|free| free > 1 << 30), "{counters:?}");
        let oom = values.last_oom.as_ref().unwrap();
        assert_eq!((oom.bytes_requested, oom.by_limit, counters.ooms), (1 << 50, false, 1));
        let of = |kind: &str| values.rows.iter().filter(|row| row.of.kind() == kind).collect::<Vec<_>>();
        for kind in ["pool", "stream"] {
            assert_eq!(of(kind).iter().map(|row| row.bytes_allocated).sum::<u64>(), 11 << 20, "{values:?}");
            assert_eq!(of(kind).len(), 2);
        }
        let of_pool = of("pool").into_iter().find(|row| row.of == UsageOf::Pool(pool.id())).unwrap();
        assert_eq!(of_pool.bytes_allocated, 5 << 20);
    }
}

#[test]
fn tags_asleep_are_not_reserved() {
    let allocator = allocators().into_iter().next().unwrap();
    let device = allocator.instance().device(0).unwrap();
    let host = HostAllocator::new(allocator.instance(), PinnedSettings::default());
    let tags = Tags::new(&allocator, &host).unwrap();
    let stream = device.lease_stream().unwrap();
    let _weights = {
        let _scope = tags.tag(&device, "weights").unwrap().enter().unwrap();
        allocator.allocate(40 << 20, &stream).unwrap()
    };
    let source: TagSource = {
        let tags = tags.clone();
        Arc::new(move || tags.info())
    };
    let options = PublishOptions { tags: Some(source), host: Some(host), ..PublishOptions::default() };
    for is_asleep in [false, true] {
        if is_asleep {
            stream.synchronize().unwrap();
            tags.sleep(&["weights"], Keep::Host).unwrap();
        }
        let reading = published(&allocator, options.clone(), |_| {});
        let Reading::Values(values) = reading else { panic!("{reading:?}") };
        let row = values.rows.iter().find(|row| row.of == UsageOf::Tag("weights".to_owned())).unwrap();
        let expected = if is_asleep { (0, 40 << 20) } else { (40 << 20, 0) };
        assert_eq!((row.bytes_reserved, row.bytes_asleep), expected);
        assert_eq!((values.counters.bytes_reserved, values.counters.bytes_asleep), expected);
        assert_eq!(values.counters.bytes_pinned > 0, is_asleep, "{:?}", values.counters);
    }
}

#[test]
fn a_limit_is_changed_by_another_process_if_it_may() {
    for accepts_limits in [false, true] {
        for allocator in allocators() {
            let stream = allocator.instance().device(0).unwrap().lease_stream().unwrap();
            let options = PublishOptions { accepts_limits, ..PublishOptions::default() };
            let reading = published(&allocator, options, |publisher| {
                let page = publisher.page();
                let request = page.request_own(0, Some(64 << 20));
                publisher.write_now();
                let answer = if accepts_limits { LimitAnswer::Applied } else { LimitAnswer::NotAllowed };
                assert_eq!(page.answer_own(0, request), Some(answer));
                assert_eq!(allocator.allocate(80 << 20, &stream).is_ok(), !accepts_limits);
            });
            let Reading::Values(values) = reading else { panic!("{reading:?}") };
            assert_eq!(values.counters.limit(), accepts_limits.then_some(64 << 20));
            assert_eq!(values.last_oom.is_some_and(|event| event.by_limit), accepts_limits);
        }
    }
}

#[test]
fn a_publisher_ends_with_its_allocator_and_changes_no_statistic() {
    let allocator = allocators().into_iter().nth(1).unwrap();
    let device = allocator.instance().device(0).unwrap();
    let stream = device.lease_stream().unwrap();
    let _block = allocator.allocate(3 << 20, &stream).unwrap();
    let before = allocator.stats(device.id()).unwrap();
    drop(allocator.allocate(30 << 20, &stream).unwrap());
    let folder = Folder::new();
    let page = Arc::new(folder.open().publish(allocator.instance(), &PageOptions::default()).unwrap());
    let publisher = Publisher::start(&page, &allocator, PublishOptions::default()).unwrap();
    publisher.write_now();
    allocator.trim(device.id(), MemPoolId::DEFAULT).unwrap();
    // Had the publisher read them with all free memory, their peak would be another.
    let after = allocator.stats(device.id()).unwrap();
    assert_eq!(after.inactive_split_bytes.all.peak, before.inactive_split_bytes.all.peak);
    drop((_block, stream, device, allocator));
    publisher.write_now();
    drop(publisher);
    drop(page);
    assert_eq!(folder.files(), 0);
}
