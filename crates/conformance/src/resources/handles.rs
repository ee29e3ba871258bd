//! Handle pools: every library, handles per thread, reuse after a thread has ended, leases across threads, closing. A
//! check is skipped if its library is not installed. Real handles use device memory, some MiB each with cuBLAS.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::thread;

use warpool::handle::{Cublas, CublasLt, Cudnn, Cusolver, Cusparse, HandlePool, LibraryHandle, LibraryKind};
use warpool::{Error, Stream};
use warpool_driver::{BlasMatrix, ErrorCode, RawHandle, Sgemm};

use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_slice_eq, skip};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    cublas_handles_work,
    cublaslt_handles_work,
    cudnn_handles_work,
    cusparse_handles_work,
    cusolver_handles_work,
    thread_keeps_its_handle,
    thousand_threads_share_few_handles,
    handle_of_ended_thread_is_reused,
    lease_works_on_another_thread,
    handles_are_per_device,
    trim_destroys_idle_handles,
    closed_pool_rejects_requests,
];

/// The number of threads in all, and at most at once.
const THREADS: usize = 1_000;
const CONCURRENT_MAX: usize = 64;

/// Runs `body` with a pool and closes it. Skips the check if the library is not installed.
fn with_pool<K: LibraryKind>(
    context: &TestContext,
    kind: K,
    body: impl FnOnce(&HandlePool<K>) -> CheckResult,
) -> CheckResult {
    let pool = HandlePool::new(context.instance(), kind);
    match pool.lease(context.device()) {
        Err(Error::Driver(error)) if error.code == ErrorCode::SharedObjectInitFailed => return skip(error.to_string()),
        first => drop(first?),
    }
    let outcome = body(&pool);
    outcome.and(pool.close().map_err(CheckError::from))
}

/// Creates handles of one library, and sets their streams where the library has streams.
fn check_handles<K: LibraryKind<Handle = LibraryHandle>>(
    context: &TestContext,
    kind: K,
    has_stream: bool,
) -> CheckResult {
    with_pool(context, kind, |pool| {
        let [own, leased] = [(*pool.current(context.device())?).raw(), pool.lease(context.device())?.raw()];
        expect(own != RawHandle(0) && leased != RawHandle(0), "the raw handles are not null")?;
        expect_eq("handles", (pool.alive(context.device()), pool.idle(context.device())), (2, 1))?;
        let handle = pool.current(context.device())?;
        expect_eq("the handle of a second request", handle.raw(), own)?;
        for stream in
            [context.device().pool_stream()?, context.device().pool_stream()?, context.device().default_stream()?]
        {
            match handle.set_stream(&stream) {
                Err(Error::Driver(error)) if !has_stream && error.code == ErrorCode::NotSupported => {}
                outcome => {
                    outcome?;
                    expect(has_stream, "only handles with streams accept one")?;
                }
            }
        }
        Ok(())
    })
}

fn cublas_handles_work(context: &TestContext) -> CheckResult {
    check_handles(context, Cublas, true)
}

fn cublaslt_handles_work(context: &TestContext) -> CheckResult {
    check_handles(context, CublasLt, false)
}

fn cudnn_handles_work(context: &TestContext) -> CheckResult {
    check_handles(context, Cudnn, true)
}

fn cusparse_handles_work(context: &TestContext) -> CheckResult {
    check_handles(context, Cusparse, true)
}

fn cusolver_handles_work(context: &TestContext) -> CheckResult {
    check_handles(context, Cusolver, true)
}

fn thread_keeps_its_handle(context: &TestContext) -> CheckResult {
    with_pool(context, Cublas, |pool| {
        let request = || -> CheckResult<_> { Ok(pool.current(context.device())?.id()) };
        let this_thread = request()?;
        let other_thread = context.on_new_thread(|| {
            let first = request()?;
            expect_eq("the second request of another thread", request()?, first)?;
            Ok::<_, CheckError>(first)
        })?;
        expect(other_thread != this_thread, "two threads have different handles")?;
        expect_eq("the next request", request()?, this_thread)
    })
}

fn thousand_threads_share_few_handles(context: &TestContext) -> CheckResult {
    let concurrent = thread::available_parallelism().map_or(8, |cores| 8 * cores.get()).min(CONCURRENT_MAX);
    with_pool(context, Cublas, |pool| {
        let device = context.device();
        let all_here = Barrier::new(concurrent);
        let work = |number| -> CheckResult {
            let handle = pool.current(device);
            if number < concurrent {
                // The first threads wait until each has its handle, so that the maximum is reached.
                all_here.wait();
            }
            let handle = handle?;
            thread::yield_now();
            expect_eq("the handle of a second request", pool.current(device)?.id(), handle.id())?;
            expect(pool.alive(device) <= concurrent, "at most one handle per concurrent thread")
        };
        thread::scope(|scope| {
            let mut running = VecDeque::new();
            for number in 0..THREADS {
                if running.len() == concurrent {
                    running.pop_front().map_or(Ok(()), join)?;
                }
                running.push_back(scope.spawn(move || work(number)));
            }
            running.into_iter().try_for_each(join)
        })?;
        expect_eq("handles", (pool.alive(device), pool.idle(device)), (concurrent, concurrent))
    })
}

fn handle_of_ended_thread_is_reused(context: &TestContext) -> CheckResult {
    with_pool(context, Cublas, |pool| {
        let stream = context.device().pool_stream()?;
        let request = || -> CheckResult<_> {
            let handle = pool.current(context.device())?;
            handle.set_stream(&stream)?;
            Ok(handle.id())
        };
        let first = context.on_new_thread(request)?;
        expect_eq("the handle of the next thread", context.on_new_thread(request)?, first)?;
        expect_eq("handles", (pool.alive(context.device()), pool.idle(context.device())), (1, 1))
    })
}

fn lease_works_on_another_thread(context: &TestContext) -> CheckResult {
    with_pool(context, Cublas, |pool| {
        let lease = pool.lease(context.device())?;
        let streams = [context.device().pool_stream()?, context.device().pool_stream()?];
        run_gemm(context, &lease, &streams[0])?;
        let lease = context.on_new_thread(move || {
            run_gemm(context, &lease, &streams[1])?;
            Ok::<_, CheckError>(lease)
        })?;
        let id = lease.id();
        context.on_new_thread(move || drop(lease));
        expect_eq("the next lease", pool.lease(context.device())?.id(), id)
    })
}

/// A GEMM of small integers, which is exact whatever the order of the sums.
fn run_gemm(context: &TestContext, handle: &LibraryHandle, stream: &Stream) -> CheckResult {
    const SIDE: u32 = 2;
    let matrices: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let bytes: Vec<u8> = matrices.iter().flat_map(|number| number.to_le_bytes()).collect();
    let ptr = context.alloc(48)?;
    let matrix = |at| BlasMatrix { ptr: ptr.offset(at), stride: SIDE, transposed: false };
    let product =
        Sgemm { m: SIDE, n: SIDE, k: SIDE, alpha: 1.0, a: matrix(0), b: matrix(16), beta: 0.0, c: matrix(32) };
    context.driver.upload(context.device_id, ptr, &bytes)?;
    handle.set_stream(stream)?;
    context.driver.blas_sgemm(handle.id(), &product)?;
    stream.synchronize()?;
    let got = context.read_bytes(ptr.offset(32), 16)?;
    let want: Vec<u8> = [23f32, 34.0, 31.0, 46.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    expect_slice_eq("the product", &got, &want)
}

fn handles_are_per_device(context: &TestContext) -> CheckResult {
    let second = context.second_device()?;
    with_pool(context, Cublas, |pool| {
        let [here, there] = [pool.current(context.device())?, pool.current(&second)?];
        expect(here.id() != there.id(), "two devices have different handles")?;
        here.set_stream(&context.device().pool_stream()?)?;
        there.set_stream(&second.pool_stream()?)?;
        let foreign = second.pool_stream()?;
        let rejected = Error::HandleDevice { handle: context.device_id, stream: foreign.id(), owner: second.id() };
        expect_eq("a stream of the other device", here.set_stream(&foreign), Err(rejected))
    })
}

fn trim_destroys_idle_handles(context: &TestContext) -> CheckResult {
    with_pool(context, Cublas, |pool| {
        let handle = pool.current(context.device())?;
        drop([pool.lease(context.device())?, pool.lease(context.device())?]);
        expect_eq("destroyed handles", pool.trim(context.device())?, 2)?;
        expect_eq("handles", (pool.alive(context.device()), pool.idle(context.device())), (1, 0))?;
        run_gemm(context, &handle, &context.device().pool_stream()?)
    })
}

fn closed_pool_rejects_requests(context: &TestContext) -> CheckResult {
    with_pool(context, Cublas, |pool| {
        pool.current(context.device())?;
        drop([pool.lease(context.device())?, pool.lease(context.device())?]);
        pool.clone().close()?;
        expect_eq("handles", pool.alive(context.device()), 0)?;
        let rejected = Some(Error::HandlePoolClosed { library: Cublas.name() });
        expect_eq("a request", pool.current(context.device()).err(), rejected.clone())?;
        expect_eq("a lease", pool.lease(context.device()).err(), rejected)
    })
}
