//! An allocator written in C for PyTorch, compiled and loaded here: as a device allocator and as the upstream of a
//! pool; and objects that cannot be loaded.
//!
//! On the simulated device it gets its memory from functions of the test, since C code cannot reach that device.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use libloading::Library;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Copies, DeviceId, DevicePtr, Devices, Memory, Pattern, Streams};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::external::{BaseAllocation, ExternalAllocator, ExternalUpstream, RawStream};
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{HistoryOptions, SnapshotOptions};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, OomCause, PluggableAllocator, Settings,
};
use warpool::{Error, Instance, Stream};
use warpool_external::{AllocatorSymbols, LoadError, LoadedAllocator};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
const PANICS_AT: isize = 666;

/// Compiles a C file. Each test has its own copy: a shared object is loaded once per process, with its state.
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

/// The upstream of the C allocator.
struct Upstream {
    sim: Arc<SimDriver>,
    /// Requests of this size panic, as a C++ allocator may throw.
    panics_at: isize,
}

unsafe extern "C-unwind" fn allocate(
    user: *mut c_void,
    size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: `user` is the upstream that the context leaked.
    let upstream = unsafe { &*user.cast::<Upstream>() };
    assert_eq!(
        upstream.sim.current_device().unwrap(),
        Some(DeviceId(device as u32)),
        "the device is current, as in PyTorch"
    );
    assert_ne!(size, upstream.panics_at, "an injected panic");
    let allocated = upstream.sim.mem_alloc(DeviceId(device as u32), size as u64);
    allocated.map_or(std::ptr::null_mut(), |ptr| std::ptr::without_provenance_mut(ptr.0 as usize))
}

unsafe extern "C" fn free(user: *mut c_void, ptr: *mut c_void, _size: isize, _device: c_int, _stream: *mut c_void) {
    // SAFETY: as above.
    let upstream = unsafe { &*user.cast::<Upstream>() };
    upstream.sim.mem_free(DevicePtr(ptr.addr() as u64)).unwrap();
}

type AllocateFn = unsafe extern "C-unwind" fn(*mut c_void, isize, c_int, *mut c_void) -> *mut c_void;
type FreeFn = unsafe extern "C" fn(*mut c_void, *mut c_void, isize, c_int, *mut c_void);

/// A simulated device, and a loaded C allocator that gets its memory there.
struct TestContext {
    sim: Arc<SimDriver>,
    instance: Instance,
    object: PathBuf,
    library: Library,
}

impl TestContext {
    fn new(name: &str) -> Self {
        let object = demo(name);
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let instance = Instance::new(sim.clone()).unwrap();
        // SAFETY: the file is part of this test, and has no initializers.
        let library = unsafe { Library::new(&object) }.unwrap();
        let context = Self { sim: sim.clone(), instance, object, library };
        // Leaked: the allocator keeps it until the process ends.
        let upstream: *const Upstream = Box::leak(Box::new(Upstream { sim, panics_at: PANICS_AT }));
        type SetUpstream = unsafe extern "C" fn(AllocateFn, FreeFn, *const c_void);
        // SAFETY: the signature is that of the file.
        let set = unsafe { context.library.get::<SetUpstream>("demo_set_upstream") };
        let set = set.unwrap();
        // SAFETY: as above; the upstream is never dropped.
        unsafe { set(allocate, free, upstream.cast()) };
        context
    }

    fn load(&self, symbols: &AllocatorSymbols) -> Arc<LoadedAllocator> {
        // SAFETY: the file is part of this test.
        let loaded = unsafe { LoadedAllocator::open(&self.object, symbols) }.unwrap();
        Arc::new(loaded.on_current_device(&self.instance))
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

    /// The hooks that were called since the last call of this.
    fn hook_calls(&self) -> Vec<String> {
        let mut text = vec![0_u8; 4096];
        type Read = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        // SAFETY: the signature is that of the file.
        let read = unsafe { self.library.get::<Read>("demo_read_log") }.unwrap();
        // SAFETY: as above; the length is that of the buffer.
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
        let mut read = vec![0; bytes as usize];
        self.sim.download(DEVICE, to, &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == value));
    }
}

#[test]
fn c_functions_are_a_device_allocator() {
    let context = TestContext::new("program");
    let loaded = context.load(&all_symbols());
    assert_eq!(loaded.path(), context.object.canonicalize().unwrap());
    let pluggable = Arc::new(PluggableAllocator::new(&context.instance, loaded).unwrap());
    assert_eq!(context.hook_calls(), ["init 2"]);
    let allocator: Arc<dyn DeviceAllocator> = pluggable.clone();
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let (stream, other) = (context.stream(), context.stream());
    let (first, second) =
        (allocator.allocate(100_000, &stream).unwrap(), allocator.allocate(3 * MIB, &stream).unwrap());
    context.work(first.ptr(), second.ptr(), 100_000, 7, &stream);

    let stats = allocator.stats(DEVICE).unwrap();
    assert_eq!((stats.allocated_bytes.all.current, context.bytes_live()), (100_000 + 3 * MIB, 100_000 + 3 * MIB));
    let snapshot = allocator.snapshot(SnapshotOptions::default()).unwrap();
    assert_eq!(snapshot.segments.len(), 2);
    assert!(snapshot.segments.iter().all(|segment| segment.stream == stream.info().unwrap().raw.0));
    assert_eq!(snapshot.traces[0].len(), 4, "two blocks, each a segment of its own");

    second.record_use(&other).unwrap();
    let used = format!("{} used by {:#x}", second.ptr(), other.info().unwrap().raw.0);
    allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
    let base = pluggable.base_allocation(first.ptr().offset(3)).unwrap();
    assert_eq!(base, BaseAllocation { ptr: first.ptr(), bytes: Some(12345) });
    let device = context.instance.device(0).unwrap();
    let pool = MemPool::new(&allocator, &device, PoolOptions::default()).unwrap();
    {
        let _scope = pool.enter().unwrap();
        drop(allocator.allocate(10, &stream).unwrap());
    }
    pool.close().unwrap();
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    let calls = ["fraction 0.5 of 0", "begin (0, 1) on 0", "end (0, 1) on 0", "release (0, 1) on 0", "reset"];
    assert_eq!(context.hook_calls(), [&[used], &calls.map(str::to_owned)[..]].concat());

    context.set_limit(4 * MIB as isize);
    let refused = allocator.allocate(2 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::External), "{refused:?}");
    first.free().unwrap();
    drop(second);
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!((context.bytes_live(), allocator.stats(DEVICE).unwrap().reserved_bytes.all.current), (0, 0));
    assert_eq!(context.sim.hazards(), []);
}

#[test]
fn c_functions_are_the_upstream_of_a_pool() {
    let context = TestContext::new("upstream");
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let upstream = ExternalUpstream::new(&context.instance, context.load(&plain_symbols())).unwrap();
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    let device = context.instance.device(0).unwrap();
    let pool = MemPool::new(&allocator, &device, options).unwrap();
    let stream = context.stream();
    let first = allocator.allocate_in(&pool, 100_000, &stream).unwrap();
    let second = allocator.allocate_in(&pool, 200_000, &stream).unwrap();
    let open = allocator.allocate(100_000, &stream).unwrap();
    assert_eq!(context.bytes_live(), 2 * MIB, "one segment for both blocks of the pool, and none for the other");
    context.work(first.ptr(), second.ptr(), 100_000, 9, &stream);
    context.work(open.ptr(), first.ptr(), 100_000, 11, &stream);
    let of_pool = SnapshotOptions { pool: Some(pool.id()), traces: false };
    let segments = allocator.snapshot(of_pool).unwrap().segments;
    assert_eq!((segments.len(), segments[0].total_size), (1, 2 * MIB));
    context.set_limit(4 * MIB as isize);
    let refused = allocator.allocate_in(&pool, 30 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::External), "{refused:?}");
    drop((first, second, open));
    pool.close().unwrap();
    assert_eq!(context.bytes_live(), 0);
    assert_eq!(context.sim.hazards(), []);
}

#[test]
fn the_current_device_is_restored_also_after_an_exception() {
    let context = TestContext::new("unwinds");
    let loaded = context.load(&plain_symbols());
    let id = context.stream().id();
    let stream = RawStream { id, raw: context.sim.stream_handle(id).unwrap().raw };
    let other = DeviceId(1);
    context.sim.set_current_device(other).unwrap();
    let block = loaded.allocate(100, DEVICE, stream).unwrap().unwrap();
    assert_eq!(context.sim.current_device(), Ok(Some(other)));
    let unwound = catch_unwind(AssertUnwindSafe(|| loaded.allocate(PANICS_AT as u64, DEVICE, stream)));
    assert!(unwound.is_err());
    assert_eq!(context.sim.current_device(), Ok(Some(other)));
    loaded.free(block, 100, DEVICE, stream).unwrap();
    assert_eq!((context.bytes_live(), context.sim.current_device()), (0, Ok(Some(other))));
}

#[test]
fn a_graph_uses_a_c_allocator() {
    let context = TestContext::new("graph");
    let loaded = context.load(&plain_symbols());
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&context.instance, loaded).unwrap());
    let device = context.instance.device(0).unwrap();
    let stream = device.lease_stream().unwrap();
    let mut graph = Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
    let key = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let (key, stream) = (capture.allocate(4096)?, capture.stream().clone());
            let scratch = allocator.allocate(4096, &stream)?;
            context.sim.fill(scratch.ptr(), Pattern::U8(5), 4096, stream.id())?;
            let to = capture.buffer(key)?.ptr();
            context.sim.copy(to.into(), scratch.ptr().into(), 4096, stream.id())?;
            Ok(key)
        })
        .unwrap();
    for _ in 0..10 {
        graph.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    let mut read = [0; 4096];
    context.sim.download(DEVICE, graph.buffer(key).unwrap().ptr(), &mut read).unwrap();
    assert_eq!(read, [5; 4096]);
    assert_eq!(context.bytes_live(), 2 * 4096);
    drop(graph);
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert_eq!(context.bytes_live(), 0);
    assert_eq!(context.sim.hazards(), []);
}

#[test]
fn a_file_that_cannot_be_loaded_is_an_error_with_the_reason() {
    let object = demo("wrong");
    let open = |path: &Path, symbols: &AllocatorSymbols| {
        // SAFETY: the files are part of this test, or cannot be loaded.
        unsafe { LoadedAllocator::open(path, symbols) }.map(drop).unwrap_err()
    };

    let missing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nowhere.so");
    let error = open(&missing, &plain_symbols());
    assert_eq!(error, LoadError::NoFile { path: missing.clone() });
    assert!(error.to_string().contains("nowhere.so"), "{error}");
    // A bare name is a path too: the library search path is not used.
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
    // SAFETY: the file is part of this test.
    unsafe { LoadedAllocator::open(&object, &all_symbols()) }.unwrap();
}
