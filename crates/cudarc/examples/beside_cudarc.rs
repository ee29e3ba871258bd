//! cudarc's kernels, copies and cuBLAS over Warpool's memory, with contents checked, and allocation beside cudarc's own
//! in turns. Needs a GPU:
//!
//! ```text
//! cargo run --release -p warpool-cudarc --example beside_cudarc
//! ```

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_N;
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use warpool::memory::{CachingAllocator, DeviceAllocator, PagedAllocator, Settings};
use warpool::{DeviceVec, Instance};
use warpool_cuda::CudaDriver;
use warpool_cudarc::{CudarcPool, PooledSlice};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const LEN: usize = 100_003;

/// `y[i] += a * x[i]`, repeated `rounds` times. PTX, so that no compiler is needed.
const SAXPY: &str = r#"
.version 7.0
.target sm_70
.address_size 64
.visible .entry saxpy(.param .f32 p_a, .param .u64 p_x, .param .u64 p_y, .param .u64 p_n, .param .u32 p_rounds) {
    .reg .pred %past, %more;
    .reg .f32 %a, %value, %sum;
    .reg .b32 %block, %threads, %thread, %rounds;
    .reg .b64 %x, %y, %n, %index, %first, %bytes;
    ld.param.f32 %a, [p_a];
    ld.param.u64 %x, [p_x];
    ld.param.u64 %y, [p_y];
    ld.param.u64 %n, [p_n];
    ld.param.u32 %rounds, [p_rounds];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %first, %block, %threads;
    cvt.u64.u32 %index, %thread;
    add.u64 %index, %index, %first;
    setp.ge.u64 %past, %index, %n;
    @%past bra DONE;
    shl.b64 %bytes, %index, 2;
    add.u64 %x, %x, %bytes;
    add.u64 %y, %y, %bytes;
    ld.f32 %value, [%x];
    ld.f32 %sum, [%y];
AGAIN:
    fma.rn.f32 %sum, %a, %value, %sum;
    sub.u32 %rounds, %rounds, 1;
    setp.ne.u32 %more, %rounds, 0;
    @%more bra AGAIN;
    st.f32 [%y], %sum;
DONE:
    ret;
}
"#;

/// The setup of the checks.
struct Gpu {
    context: Arc<CudaContext>,
    saxpy: CudaFunction,
    pool: CudarcPool,
}

fn main() -> Outcome {
    let context = CudaContext::new(0)?;
    println!("{}", context.name()?);
    let saxpy = context.load_module(Ptx::from_src(SAXPY))?.load_function("saxpy")?;
    let instance = Instance::new(Arc::new(CudaDriver::open()?))?;
    let expandable = Settings::parse("expandable_segments:True")?;
    let allocators: [Arc<dyn DeviceAllocator>; 3] = [
        Arc::new(CachingAllocator::new(&instance, Settings::default())),
        Arc::new(CachingAllocator::new(&instance, expandable)),
        Arc::new(PagedAllocator::new(&instance, Settings::default())?),
    ];
    for (allocator, name) in allocators.iter().zip(["caching", "caching, expandable segments", "paged"]) {
        let pool = CudarcPool::new(allocator, &context)?;
        let gpu = Gpu { context: Arc::clone(&context), saxpy: saxpy.clone(), pool };
        for (what, check) in CHECKS {
            check(&gpu)?;
            println!("ok: {what} ({name})");
        }
        if cfg!(debug_assertions) {
            println!("built without optimisation: not measured");
            continue;
        }
        measure(&gpu, name)?;
    }
    context.check_err()?;
    println!("no error was left in cudarc's context");
    Ok(())
}

type Check = (&'static str, fn(&Gpu) -> Outcome);

const CHECKS: [Check; 6] = [
    ("a kernel of cudarc's launch builder", kernel),
    ("copies in all directions, and views", copies),
    ("two streams, ordered by cudarc's events", two_streams),
    ("memory dropped while another stream uses it", dropped_in_use),
    ("a DeviceVec in cudarc's calls", device_vec),
    ("cuBLAS", blas),
];

impl Gpu {
    fn launch(
        &self,
        stream: &Arc<CudaStream>,
        a: f32,
        x: &PooledSlice<f32>,
        y: &mut PooledSlice<f32>,
        rounds: u32,
    ) -> Outcome {
        let n = x.len().min(y.len()) as u64;
        let mut launch = stream.launch_builder(&self.saxpy);
        launch.arg(&a).arg(x).arg(y).arg(&n).arg(&rounds);
        // SAFETY: these are its parameters, and both slices have `n` elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32))? };
        Ok(())
    }
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|n| (n % 1000) as f32).collect()
}

fn expect<T: PartialEq>(what: &str, found: &[T], expected: impl Iterator<Item = T>) -> Outcome {
    match found.iter().zip(expected).position(|(found, expected)| *found != expected) {
        Some(index) => Err(format!("{what}: element {index} is wrong").into()),
        None => Ok(()),
    }
}

fn kernel(gpu: &Gpu) -> Outcome {
    let stream = gpu.context.new_stream()?;
    let x = gpu.pool.clone_htod(&numbers(LEN), &stream)?;
    let mut y = gpu.pool.alloc_zeros::<f32>(LEN, &stream)?;
    for _ in 0..3 {
        gpu.launch(&stream, 2.0, &x, &mut y, 1)?;
    }
    expect("y", &stream.clone_dtoh(&y)?, numbers(LEN).into_iter().map(|x| 6.0 * x))
}

fn copies(gpu: &Gpu) -> Outcome {
    let stream = gpu.context.default_stream();
    let values = numbers(LEN);
    let first = gpu.pool.clone_htod(&values, &stream)?;
    let mut second = gpu.pool.alloc_zeros::<f32>(LEN, &stream)?;
    stream.memcpy_dtod(&first, &mut second)?;
    let mut back = vec![0.0; LEN];
    stream.memcpy_dtoh(&second, &mut back)?;
    stream.synchronize()?;
    expect("a copy", &back, values.iter().copied())?;
    // A part, and cudarc's own memory on the other side.
    let mut own = stream.alloc_zeros::<f32>(10)?;
    stream.memcpy_dtod(&second.as_view().slice(5..15), &mut own)?;
    stream.memcpy_dtod(&own, &mut second.as_view_mut().slice_mut(0..10))?;
    let expected = values[5..15].iter().chain(&values[10..]).copied();
    expect("a part", &stream.clone_dtoh(&second)?, expected)
}

fn two_streams(gpu: &Gpu) -> Outcome {
    let (one, two) = (gpu.context.new_stream()?, gpu.context.new_stream()?);
    let x = gpu.pool.clone_htod(&vec![1.0; LEN], &one)?;
    let mut y = gpu.pool.alloc_zeros::<f32>(LEN, &two)?;
    for _ in 0..50 {
        gpu.launch(&one, 1.0, &x, &mut y, 2000)?;
        gpu.launch(&two, 1.0, &x, &mut y, 1)?;
    }
    expect("y", &two.clone_dtoh(&y)?, std::iter::repeat(50.0 * 2001.0))
}

/// The memory is allocated again at once, and written in the stream that it was allocated for, while the other stream
/// still reads it.
fn dropped_in_use(gpu: &Gpu) -> Outcome {
    let (one, two) = (gpu.context.new_stream()?, gpu.context.new_stream()?);
    for round in 0..20 {
        let x = gpu.pool.clone_htod(&vec![1.0; LEN], &one)?;
        let mut y = gpu.pool.alloc_zeros::<f32>(LEN, &two)?;
        gpu.launch(&two, 0.0, &x, &mut y, 50_000)?; // keeps the stream busy
        gpu.launch(&two, 1.0, &x, &mut y, 1)?;
        drop(x);
        let other = gpu.pool.clone_htod(&vec![-7.0; LEN], &one)?;
        expect(&format!("y in round {round}"), &two.clone_dtoh(&y)?, std::iter::repeat(1.0))?;
        expect("the memory's next contents", &one.clone_dtoh(&other)?, std::iter::repeat(-7.0))?;
    }
    Ok(())
}

/// Warpool's typed memory: Warpool fills it in its own stream, cudarc uses it in another, Warpool reads it.
fn device_vec(gpu: &Gpu) -> Outcome {
    let stream = gpu.context.new_stream()?;
    let own = gpu.pool.allocator().instance().device(0)?.lease_stream()?;
    let mut values = DeviceVec::<f32>::zeroed(gpu.pool.allocator(), LEN, &own)?;
    let x = gpu.pool.clone_htod(&numbers(LEN), &stream)?;
    for round in 1..=10 {
        own.fill(&mut values, round as f32)?;
        gpu.pool.with_mut(&mut values, &stream, |view| {
            let (a, n, rounds) = (2.0_f32, LEN as u64, 1_u32);
            let mut launch = stream.launch_builder(&gpu.saxpy);
            launch.arg(&a).arg(&x).arg(view).arg(&n).arg(&rounds);
            // SAFETY: these are its parameters, and both have `n` elements.
            unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32))? };
            Ok(())
        })?;
        expect("values", &values.to_vec(&own)?, numbers(LEN).into_iter().map(|x| 2.0 * x + round as f32))?;
        let copied = gpu.pool.with(&values, &stream, |view| Ok(stream.clone_dtoh(view)?))?;
        expect("a copy", &copied, numbers(LEN).into_iter().map(|x| 2.0 * x + round as f32))?;
    }
    Ok(())
}

fn blas(gpu: &Gpu) -> Outcome {
    const N: usize = 96;
    let stream = gpu.context.new_stream()?;
    // cudarc panics where a library is not installed.
    let Ok(blas) = std::panic::catch_unwind(|| CudaBlas::new(Arc::clone(&stream))) else {
        println!("not checked: cudarc does not find libcublas");
        return Ok(());
    };
    let blas = blas?;
    let (a, b): (Vec<f32>, Vec<f32>) = (0..N * N).map(|n| ((n % 7) as f32, (n % 5) as f32)).unzip();
    let (left, right) = (gpu.pool.clone_htod(&a, &stream)?, gpu.pool.clone_htod(&b, &stream)?);
    let mut product = gpu.pool.alloc_zeros::<f32>(N * N, &stream)?;
    let n = N as i32;
    let (transa, transb) = (CUBLAS_OP_N, CUBLAS_OP_N);
    let config = GemmConfig { transa, transb, m: n, n, k: n, alpha: 1.0, lda: n, ldb: n, beta: 0.0_f32, ldc: n };
    // SAFETY: three matrices of N by N.
    unsafe { blas.gemm(config, &left, &right, &mut product)? };
    // Columns are contiguous.
    let cell = |at: usize| (0..N).map(|k| a[at % N + k * N] * b[k + at / N * N]).sum::<f32>();
    expect("a product", &stream.clone_dtoh(&product)?, (0..N * N).map(cell))
}

/// Pairs of an allocation and a free, in turns with cudarc's own; the best of several rounds each.
fn measure(gpu: &Gpu, name: &str) -> Outcome {
    const PAIRS: u32 = 2000;
    const ROUNDS: usize = 7;
    let stream = gpu.context.new_stream()?;
    for (size, label) in [(1 << 10, "4 KiB"), (1 << 18, "1 MiB"), (1 << 24, "64 MiB")] {
        let own = || -> Outcome<f64> {
            let start = Instant::now();
            for _ in 0..PAIRS {
                // SAFETY: it is not read.
                drop(black_box(unsafe { stream.alloc::<f32>(size)? }));
            }
            Ok(start.elapsed().as_nanos() as f64 / f64::from(PAIRS))
        };
        let ours = || -> Outcome<f64> {
            let start = Instant::now();
            for _ in 0..PAIRS {
                // SAFETY: it is not read.
                drop(black_box(unsafe { gpu.pool.alloc::<f32>(size, &stream)? }));
            }
            Ok(start.elapsed().as_nanos() as f64 / f64::from(PAIRS))
        };
        for (tracking, mode) in [(true, "with cudarc's events"), (false, "without")] {
            set_event_tracking(&gpu.context, tracking);
            let (mut best_own, mut best_ours) = (f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                best_own = best_own.min(own()?);
                stream.synchronize()?;
                best_ours = best_ours.min(ours()?);
                stream.synchronize()?;
            }
            let ratio = best_ours / best_own;
            println!(
                "alloc+free of {label}, {mode}: cudarc {best_own:.0} ns, Warpool ({name}) {best_ours:.0} ns, \
                 ratio {ratio:.3}"
            );
        }
    }
    set_event_tracking(&gpu.context, true);
    Ok(())
}

/// Whether cudarc has events for new slices. In `measure` one stream is used, and no slice exists when it changes.
fn set_event_tracking(context: &CudaContext, tracking: bool) {
    if tracking {
        // SAFETY: no slice was made without events that is used afterwards.
        unsafe { context.enable_event_tracking() };
    } else {
        // SAFETY: one stream uses the slices that are made from here on.
        unsafe { context.disable_event_tracking() };
    }
}
