//! An allocator written in C for PyTorch, compiled here, loaded, and used: as the program's allocator and as the source
//! of a pool. And what is no allocator.
//!
//! On the simulated device it gets its memory from a function of the test's, since no C code can reach that device.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use libloading::Library;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Copies, DeviceId, DevicePtr, Devices, Memory, Pattern, Streams};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{
    Allocate, BaseAllocation, CachingAllocator, DeviceAllocator, ExternalAllocator, ExternalUpstream, HistoryOptions,
    MemPool, MemPoolId, OomCause, PluggableAllocator, PoolOptions, RawStream, Settings, SnapshotOptions,
};
use warpool::{Error, Instance, Stream};
use warpool_external::{AllocatorSymbols, LoadError, LoadedAllocator};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
const PANICS_AT: isize = 666;

/// Compiles a C file. Each test has a copy of its own: a shared object is loaded once, with all that it remembers.
fn compile(name: &str, source: &Path) -> PathBuf {
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.so"));
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-fexceptions", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&object)
        .arg(source)
        .args(["-ldl", "-lpthread"])
        .output()
        .expect("cc, which linking needs too");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    object
}

fn demo(name: &str) -> PathBuf {
    compile(name, &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/allocator.c"))
}

fn plain_symbols() -> AllocatorSymbols {
    AllocatorSymbols::new("demo_malloc", "demo_free")
}

fn all_symbols() -> AllocatorSymbols {
    let named = |name: &str| Some(format!("demo_{name}"));
    AllocatorSymbols {
        init: named("init"),
        reset: named("reset"),
        memory_fraction: named("memory_fraction"),
        base_alloc: named("base_alloc"),
        record_stream: named("record_stream"),
        begin_pool: named("begin_pool"),
        end_pool: named("end_pool"),
        release_pool: named("release_pool"),
        ..plain_symbols()
    }
}

/// What the C allocator asks for memory.
struct Source {
    sim: Arc<SimDriver>,
    /// Requests of this size end in a panic, as a C++ allocator's may in an exception.
    panics_at: isize,
}

unsafe extern "C-unwind" fn give(user: *mut c_void, size: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    // SAFETY: `user` is the source that the machine leaked for this.
    let source = unsafe { &*user.cast::<Source>() };
    assert_eq!(
        source.sim.current_device().unwrap(),
        Some(DeviceId(device as u32)),
        "the device is current, as in PyTorch"
    );
    assert_ne!(size, source.panics_at, "the source panics, as it was told to");
    let given = source.sim.mem_alloc(DeviceId(device as u32), size as u64);
    given.map_or(std::ptr::null_mut(), |ptr| std::ptr::without_provenance_mut(ptr.0 as usize))
}

unsafe extern "C" fn take(user: *mut c_void, ptr: *mut c_void, _size: isize, _device: c_int, _stream: *mut c_void) {
    // SAFETY: as above.
    let source = unsafe { &*user.cast::<Source>() };
    source.sim.mem_free(DevicePtr(ptr.addr() as u64)).unwrap();
}

type Give = unsafe extern "C-unwind" fn(*mut c_void, isize, c_int, *mut c_void) -> *mut c_void;
type Take = unsafe extern "C" fn(*mut c_void, *mut c_void, isize, c_int, *mut c_void);

/// A simulated machine, and a C allocator that is loaded and gets its memory there.
struct Machine {
    sim: Arc<SimDriver>,
    instance: Instance,
    object: PathBuf,
    library: Library,
}

impl Machine {
    fn new(name: &str) -> Self {
        let object = demo(name);
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let instance = Instance::new(sim.clone()).unwrap();
        // SAFETY: it is our own file, and does nothing when it is loaded.
        let library = unsafe { Library::new(&object) }.unwrap();
        let machine = Self { sim: sim.clone(), instance, object, library };
        // Leaked: the allocator remembers it for as long as the process runs.
        let source: *const Source = Box::leak(Box::new(Source { sim, panics_at: PANICS_AT }));
        // SAFETY: the signature is that of the file.
        let set = unsafe { machine.library.get::<unsafe extern "C" fn(Give, Take, *const c_void)>("demo_set_source") };
        let set = set.unwrap();
        // SAFETY: as above; the source lives for ever.
        unsafe { set(give, take, source.cast()) };
        machine
    }

    fn plug(&self, symbols: &AllocatorSymbols) -> Arc<LoadedAllocator> {
        // SAFETY: it is our own file.
        let plug = unsafe { LoadedAllocator::open(&self.object, symbols) }.unwrap();
        Arc::new(plug.on_current_device(&self.instance))
    }

    fn bytes_live(&self) -> u64 {
        // SAFETY: the signature is that of the file.
        let live = unsafe { self.library.get::<unsafe extern "C" fn() -> isize>("demo_bytes_live") }.unwrap();
        // SAFETY: as above.
        unsafe { live() as u64 }
    }

    fn set_limit(&self, bytes: isize) {
        // SAFETY: the signature is that of the file.
        let set = unsafe { self.library.get::<unsafe extern "C" fn(isize)>("demo_set_limit") }.unwrap();
        // SAFETY: as above.
        unsafe { set(bytes) };
    }

    /// What the hooks wrote down since this was last asked.
    fn words(&self) -> Vec<String> {
        let mut text = vec![0_u8; 4096];
        type Read = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        // SAFETY: the signature is that of the file.
        let read = unsafe { self.library.get::<Read>("demo_read_words") }.unwrap();
        // SAFETY: as above; the buffer is as long as we say.
        let length = unsafe { read(text.as_mut_ptr().cast(), text.len()) };
        let text = String::from_utf8(text[..length].to_vec()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn stream(&self) -> Stream {
        self.instance.device(0).unwrap().pool_stream().unwrap()
    }

    /// Writes into memory on a stream, copies it, and compares.
    fn work(&self, from: DevicePtr, to: DevicePtr, bytes: u64, value: u8, stream: &Stream) {
        self.sim.fill(from, Pattern::U8(value), bytes, stream.id()).unwrap();
        self.sim.copy(to.into(), from.into(), bytes, stream.id()).unwrap();
        stream.synchronize().unwrap();
        let mut there = vec![0; bytes as usize];
        self.sim.download(DEVICE, to, &mut there).unwrap();
        assert!(there.iter().all(|&byte| byte == value));
    }
}

#[test]
fn c_functions_are_a_device_allocator() {
    let machine = Machine::new("program");
    let plug = machine.plug(&all_symbols());
    assert_eq!(plug.path(), machine.object.canonicalize().unwrap());
    let plugged = Arc::new(PluggableAllocator::new(&machine.instance, plug).unwrap());
    assert_eq!(machine.words(), ["init 2"]);
    let allocator: Arc<dyn DeviceAllocator> = plugged.clone();
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let (stream, other) = (machine.stream(), machine.stream());
    let (first, second) =
        (allocator.allocate(100_000, &stream).unwrap(), allocator.allocate(3 * MIB, &stream).unwrap());
    machine.work(first.ptr(), second.ptr(), 100_000, 7, &stream);

    let stats = allocator.stats(DEVICE).unwrap();
    assert_eq!((stats.allocated_bytes.all.current, machine.bytes_live()), (100_000 + 3 * MIB, 100_000 + 3 * MIB));
    let snapshot = allocator.snapshot(SnapshotOptions::default()).unwrap();
    assert_eq!(snapshot.segments.len(), 2);
    assert!(snapshot.segments.iter().all(|segment| segment.stream == stream.info().unwrap().raw.0));
    assert_eq!(snapshot.traces[0].len(), 4, "two blocks, each a segment of its own");

    second.record_use(&other).unwrap();
    let used = format!("{} used by {:#x}", second.ptr(), other.info().unwrap().raw.0);
    allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
    let base = plugged.base_allocation(first.ptr().offset(3)).unwrap();
    assert_eq!(base, BaseAllocation { ptr: first.ptr(), bytes: Some(12345) });
    let device = machine.instance.device(0).unwrap();
    let pool = MemPool::new(&allocator, &device, PoolOptions::default()).unwrap();
    {
        let _scope = pool.enter().unwrap();
        drop(allocator.allocate(10, &stream).unwrap());
    }
    pool.close().unwrap();
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    let words = ["fraction 0.5 of 0", "begin (0, 1) on 0", "end (0, 1) on 0", "release (0, 1) on 0", "reset"];
    assert_eq!(machine.words(), [&[used], &words.map(str::to_owned)[..]].concat());

    machine.set_limit(4 * MIB as isize);
    let refused = allocator.allocate(2 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Upstream), "{refused:?}");
    first.free().unwrap();
    drop(second);
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!((machine.bytes_live(), allocator.stats(DEVICE).unwrap().reserved_bytes.all.current), (0, 0));
    assert_eq!(machine.sim.hazards(), []);
}

#[test]
fn a_c_allocator_is_the_source_of_a_pool() {
    let machine = Machine::new("upstream");
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&machine.instance, Settings::default()));
    let upstream = ExternalUpstream::new(&machine.instance, machine.plug(&plain_symbols())).unwrap();
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    let device = machine.instance.device(0).unwrap();
    let pool = MemPool::new(&allocator, &device, options).unwrap();
    let stream = machine.stream();
    let first = allocator.allocate_in(pool.id(), 100_000, &stream).unwrap();
    let second = allocator.allocate_in(pool.id(), 200_000, &stream).unwrap();
    let open = allocator.allocate(100_000, &stream).unwrap();
    assert_eq!(machine.bytes_live(), 2 * MIB, "one segment for both blocks of the pool, and none for the other");
    machine.work(first.ptr(), second.ptr(), 100_000, 9, &stream);
    machine.work(open.ptr(), first.ptr(), 100_000, 11, &stream);
    let of_pool = SnapshotOptions { pool: Some(pool.id()), traces: false };
    let segments = allocator.snapshot(of_pool).unwrap().segments;
    assert_eq!((segments.len(), segments[0].total_size), (1, 2 * MIB));
    machine.set_limit(4 * MIB as isize);
    let refused = allocator.allocate_in(pool.id(), 30 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Upstream), "{refused:?}");
    drop((first, second, open));
    pool.close().unwrap();
    assert_eq!(machine.bytes_live(), 0);
    assert_eq!(machine.sim.hazards(), []);
}

#[test]
fn the_current_device_comes_back_also_after_an_exception() {
    let machine = Machine::new("unwinds");
    let plug = machine.plug(&plain_symbols());
    let id = machine.stream().id();
    let stream = RawStream { id, raw: machine.sim.stream_handle(id).unwrap().raw };
    let other = DeviceId(1);
    machine.sim.set_current_device(other).unwrap();
    let given = plug.allocate(100, DEVICE, stream).unwrap().unwrap();
    assert_eq!(machine.sim.current_device(), Ok(Some(other)));
    let unwound = catch_unwind(AssertUnwindSafe(|| plug.allocate(PANICS_AT as u64, DEVICE, stream)));
    assert!(unwound.is_err());
    assert_eq!(machine.sim.current_device(), Ok(Some(other)));
    plug.free(given, 100, DEVICE, stream).unwrap();
    assert_eq!((machine.bytes_live(), machine.sim.current_device()), (0, Ok(Some(other))));
}

#[test]
fn a_graph_works_on_a_c_allocator() {
    let machine = Machine::new("graph");
    let plug = machine.plug(&plain_symbols());
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&machine.instance, plug).unwrap());
    let device = machine.instance.device(0).unwrap();
    let stream = device.lease_stream().unwrap();
    let mut graph = Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
    let key = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let (key, stream) = (capture.allocate(4096)?, capture.stream().clone());
            let scratch = allocator.allocate(4096, &stream)?;
            machine.sim.fill(scratch.ptr(), Pattern::U8(5), 4096, stream.id())?;
            let to = capture.buffer(key)?.ptr();
            machine.sim.copy(to.into(), scratch.ptr().into(), 4096, stream.id())?;
            Ok(key)
        })
        .unwrap();
    for _ in 0..10 {
        graph.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    let mut there = [0; 4096];
    machine.sim.download(DEVICE, graph.buffer(key).unwrap().ptr(), &mut there).unwrap();
    assert_eq!(there, [5; 4096]);
    assert_eq!(machine.bytes_live(), 2 * 4096);
    drop(graph);
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(machine.bytes_live(), 0);
    assert_eq!(machine.sim.hazards(), []);
}

#[test]
fn what_is_no_allocator_is_an_error_that_says_why() {
    let object = demo("wrong");
    // SAFETY: the files are our own, or cannot be loaded at all.
    let open = |path: &Path, symbols: &AllocatorSymbols| {
        unsafe { LoadedAllocator::open(path, symbols) }.map(drop).unwrap_err()
    };

    let missing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nowhere.so");
    let error = open(&missing, &plain_symbols());
    assert_eq!(error, LoadError::NoFile { path: missing.clone() });
    assert!(error.to_string().contains("nowhere.so"), "{error}");
    // A bare name is a file's too: the loader does not search for it.
    assert!(matches!(open(Path::new("libm.so.6"), &plain_symbols()), LoadError::NoFile { .. }));

    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/allocator.c");
    let error = open(&text, &plain_symbols());
    assert!(matches!(&error, LoadError::NotLoaded { path, why } if *path == text && !why.is_empty()), "{error:?}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(matches!(open(folder, &plain_symbols()), LoadError::NotLoaded { .. }));

    let mut cases = vec![
        ("alloc", AllocatorSymbols::new("demo_mallocc", "demo_free"), "demo_mallocc"),
        ("free", AllocatorSymbols::new("demo_malloc", "demo_release"), "demo_release"),
        ("alloc", AllocatorSymbols::new("", "demo_free"), ""),
        ("alloc", AllocatorSymbols::new("de\0mo", "demo_free"), "de\0mo"),
    ];
    for role in
        ["init", "reset", "memory_fraction", "base_alloc", "record_stream", "begin_pool", "end_pool", "release_pool"]
    {
        let mut symbols = all_symbols();
        let AllocatorSymbols {
            init,
            reset,
            memory_fraction,
            base_alloc,
            record_stream,
            begin_pool,
            end_pool,
            release_pool,
            ..
        } = &mut symbols;
        let field = match role {
            "init" => init,
            "reset" => reset,
            "memory_fraction" => memory_fraction,
            "base_alloc" => base_alloc,
            "record_stream" => record_stream,
            "begin_pool" => begin_pool,
            "end_pool" => end_pool,
            _ => release_pool,
        };
        *field = Some("no_such_hook".to_owned());
        cases.push((role, symbols, "no_such_hook"));
    }
    for (role, symbols, symbol) in cases {
        let error = open(&object, &symbols);
        let expected = LoadError::NoSymbol { path: object.canonicalize().unwrap(), symbol: symbol.to_owned(), role };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("wrong.so") && error.to_string().contains(role), "{error}");
    }
    // And the process goes on.
    // SAFETY: the file is our own.
    unsafe { LoadedAllocator::open(&object, &all_symbols()) }.unwrap();
}
