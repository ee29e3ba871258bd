//! Pages between processes: this test starts itself again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use warpool_driver::sim::{SimConfig, SimDriver};

use super::*;
use crate::Instance;

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
