//! cuBLAS: GEMM on several threads and streams, workspaces, precision, and that unchanged settings are not set again.

use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings, forbid_tf32};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::report::Stat;
use warpool::memory::{Allocate, CachingAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Device, Error, Instance, Stream};
use warpool_driver::decorate::Counting;
use warpool_driver::{BlasMatrix, Driver, ErrorCode, Sgemm};

use super::helpers::SharedAllocator;
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, expect_slice_eq, skip};
use crate::sync::join;

pub(crate) const CHECKS: &[Check] = crate::checks![
    two_threads_run_gemm_on_two_streams,
    one_handle_serves_two_streams,
    workspace_has_the_configured_size,
    cublaslt_shares_the_workspace,
    trim_frees_unused_workspaces,
    tf32_can_be_allowed_and_forbidden,
    repeated_handle_request_makes_no_driver_call,
    repeated_gemm_captures_do_not_grow_memory,
];

const MIB: u64 = 1 << 20;

/// Runs `body` with cuBLAS over an allocator, and then frees everything. Skips the check if cuBLAS is not installed.
fn with_blas(device: &Device, body: impl FnOnce(&SharedAllocator, &Blas) -> CheckResult) -> CheckResult {
    let allocator: SharedAllocator = Arc::new(CachingAllocator::new(device.instance(), Settings::default()));
    let blas = Blas::new(&allocator, BlasSettings::default());
    if let Err(Error::Driver(error)) = blas.bare(device)
        && error.code == ErrorCode::SharedObjectInitFailed
    {
        return skip("cuBLAS is not installed");
    }
    let outcome = body(&allocator, &blas);
    device.synchronize()?;
    blas.close()?;
    allocator.trim(device.id(), MemPoolId::DEFAULT)?;
    outcome
}

/// Square matrices of small integers, whose products are exact in any order and precision.
struct Matrices {
    block: DeviceBlock,
    product: Sgemm,
    expected: Vec<f32>,
}

impl Matrices {
    fn new(allocator: &SharedAllocator, stream: &Stream, size: u32, seed: usize) -> CheckResult<Self> {
        let n = size as usize;
        let number = |i: usize, salt: usize| ((i * 7 + salt * 11 + seed * 5) % 9) as f32 - 4.0;
        let a: Vec<f32> = (0..n * n).map(|i| number(i, 1)).collect();
        let b: Vec<f32> = (0..n * n).map(|i| number(i, 2)).collect();
        // Column by column: `a[k * n + row]` and `b[column * n + k]`.
        let sum = |row: usize, column: usize| (0..n).map(|k| a[k * n + row] * b[column * n + k]).sum::<f32>();
        let expected = (0..n * n).map(|at| sum(at % n, at / n)).collect();
        let (block, product) = Self::upload(allocator, stream, size, &a, &b)?;
        Ok(Self { block, product, expected })
    }

    /// Uploads two square matrices, with space for their product after them.
    fn upload(
        allocator: &SharedAllocator,
        stream: &Stream,
        size: u32,
        a: &[f32],
        b: &[f32],
    ) -> CheckResult<(DeviceBlock, Sgemm)> {
        let bytes = u64::from(size) * u64::from(size) * 4;
        let block = allocator.allocate(3 * bytes, stream)?;
        let contents: Vec<u8> = a.iter().chain(b).flat_map(|number| number.to_ne_bytes()).collect();
        stream.synchronize()?;
        stream.instance().driver().upload(stream.device_id(), block.ptr(), &contents)?;
        let matrix =
            |index: u64| BlasMatrix { ptr: block.ptr().offset(index * bytes), stride: size, transposed: false };
        let (m, n, k) = (size, size, size);
        let product = Sgemm { m, n, k, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
        Ok((block, product))
    }

    /// Waits for the stream and compares the result.
    fn check(&self, stream: &Stream) -> CheckResult {
        expect_slice_eq("the product", &result(&self.product, stream)?, &self.expected)?;
        expect(self.block.bytes() > 0, "the matrices are still allocated")
    }
}

/// Waits for the stream and returns the result of a GEMM.
fn result(product: &Sgemm, stream: &Stream) -> CheckResult<Vec<f32>> {
    stream.synchronize()?;
    let mut bytes = vec![0; product.m as usize * product.n as usize * 4];
    stream.instance().driver().download(stream.device_id(), product.c.ptr, &mut bytes)?;
    let number = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().expect("chunks of four"));
    Ok(bytes.chunks(4).map(number).collect())
}

fn two_threads_run_gemm_on_two_streams(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |allocator, blas| {
        let streams = [context.device().pool_stream()?, context.device().pool_stream()?];
        let run_gemm = |thread: usize| -> CheckResult {
            let make = |i: usize| Matrices::new(allocator, &streams[i], 64, 2 * thread + i);
            let matrices = [make(0)?, make(1)?];
            for _ in 0..20 {
                for (stream, matrices) in streams.iter().zip(&matrices) {
                    blas.handle_on(stream)?.sgemm(&matrices.product)?;
                }
            }
            streams.iter().zip(&matrices).try_for_each(|(stream, matrices)| matrices.check(stream))
        };
        let outcomes = std::thread::scope(|scope| {
            let run_gemm = &run_gemm;
            let threads = [0, 1].map(|thread| scope.spawn(move || run_gemm(thread)));
            threads.map(join)
        });
        outcomes.into_iter().collect::<CheckResult<Vec<()>>>()?;
        expect(blas.handles_alive(context.device()) <= 3, "one handle per thread, including this one")
    })
}

/// A handle requested for a stream uses that stream, even after a request for another one.
fn one_handle_serves_two_streams(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |allocator, blas| {
        let (one, two) = (context.device().pool_stream()?, context.device().pool_stream()?);
        let (left, right) = (Matrices::new(allocator, &one, 64, 1)?, Matrices::new(allocator, &two, 64, 2)?);
        let (on_one, on_two) = (blas.handle_on(&one)?, blas.handle_on(&two)?);
        expect_eq("the handle of a thread", on_one.id(), on_two.id())?;
        for _ in 0..20 {
            on_one.sgemm(&left.product)?;
            on_two.sgemm(&right.product)?;
        }
        left.check(&one)?;
        right.check(&two)
    })
}

fn workspace_has_the_configured_size(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |allocator, blas| {
        let stream = context.device().pool_stream()?;
        let workspace_bytes = || Ok::<u64, Error>(allocator.stats(context.device_id)?.workspace_bytes.current);
        let default = match context.device().properties().compute_capability.0 {
            9..=12 => 32 * MIB,
            _ => 8 * MIB + (128 << 10),
        };
        let (ptr, bytes) = blas.handle_on(&stream)?.workspace();
        expect_eq(
            "the default workspace size, and its bytes in the statistics",
            (bytes, workspace_bytes()?),
            (default, default),
        )?;
        blas.set_workspace_bytes(Some(MIB));
        expect_eq("a smaller workspace", blas.handle_on(&stream)?.workspace(), (ptr, MIB))?;
        blas.set_workspace_bytes(Some(2 * default));
        expect_eq("the size of a larger workspace", blas.handle_on(&stream)?.workspace().1, 2 * default)?;
        expect_eq("its bytes in the statistics", workspace_bytes()?, 2 * default)?;
        let matrices = Matrices::new(allocator, &stream, 64, 3)?;
        for bytes in [Some(0), Some(MIB), None] {
            blas.set_workspace_bytes(bytes);
            blas.handle_on(&stream)?.sgemm(&matrices.product)?;
            matrices.check(&stream)?;
        }
        expect_eq("cleared workspaces", blas.clear_workspaces_of(&stream)?, 1)?;
        expect_eq("workspace bytes afterwards", workspace_bytes()?, 0)
    })
}

fn cublaslt_shares_the_workspace(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |_, blas| {
        let stream = context.device().pool_stream()?;
        let (handle, lt) = (blas.handle_on(&stream)?, blas.lt_on(&stream)?);
        expect_eq("its workspace", lt.workspace(), (handle.workspace().0, MIB))?;
        expect(lt.raw()? != handle.raw()?, "the raw handles are different")
    })
}

fn trim_frees_unused_workspaces(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |allocator, blas| {
        let stream = context.device().pool_stream()?;
        let handle = blas.handle_on(&stream)?;
        let workspace = handle.workspace();
        context.on_new_thread(|| {
            let matrices = Matrices::new(allocator, &stream, 64, 4)?;
            blas.handle_on(&stream)?.sgemm(&matrices.product)?;
            matrices.check(&stream)
        })?;
        let workspace_bytes = || allocator.stats(context.device_id).map(|stats| stats.workspace_bytes);
        let Stat { current, .. } = workspace_bytes()?;
        expect_eq("workspace bytes of both threads", current, 2 * workspace.1)?;
        let trimmed = allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect(trimmed >= workspace.1, "the workspace of the other thread is released")?;
        expect_eq("workspace bytes of this thread", workspace_bytes()?.current, workspace.1)?;
        expect_eq("the workspace of this thread", blas.handle_on(&stream)?.workspace(), workspace)?;
        drop(handle);
        allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
        expect_eq("workspace bytes after the handle was dropped", workspace_bytes()?.current, 0)?;
        let matrices = Matrices::new(allocator, &stream, 64, 5)?;
        blas.handle_on(&stream)?.sgemm(&matrices.product)?;
        matrices.check(&stream)
    })
}

/// TF32 has 10 mantissa bits. If allowed, the library may use it or not; if forbidden, it must not.
fn tf32_can_be_allowed_and_forbidden(context: &TestContext) -> CheckResult {
    const SIZE: u32 = 128;
    with_blas(context.device(), |allocator, blas| {
        let stream = context.device().pool_stream()?;
        // One number with 13 mantissa bits in each row and column: every element of the result has one summand.
        let fine = 1.0 + 2f32.powi(-13);
        let n = SIZE as usize;
        let diagonal = |value: f32| (0..n * n).map(|at| if at % n == at / n { value } else { 0.0 }).collect::<Vec<_>>();
        let (block, product) = Matrices::upload(allocator, &stream, SIZE, &diagonal(fine), &diagonal(1.0))?;
        let handle = blas.handle_on(&stream)?;
        let run_gemm = || {
            handle.sgemm(&product)?;
            result(&product, &stream)
        };
        let exact = diagonal(fine);
        expect_slice_eq("the result by default", &run_gemm()?, &exact)?;
        blas.set_tf32(true);
        let rounded = run_gemm()?;
        let error = rounded.iter().zip(&exact).map(|(found, exact)| (found - exact).abs()).fold(0.0, f32::max);
        expect(error <= 2f32.powi(-10), "the error is within the precision of TF32")?;
        if context.driver.kind() == "sim" {
            expect(error > 0.0, "the simulated library rounds if allowed")?;
        }
        {
            let _guard = forbid_tf32();
            expect_slice_eq("the result in a scope that forbids TF32", &run_gemm()?, &exact)?;
        }
        blas.set_tf32(false);
        expect_slice_eq("the result with TF32 forbidden again", &run_gemm()?, &exact)?;
        drop(block);
        Ok(())
    })
}

fn repeated_handle_request_makes_no_driver_call(context: &TestContext) -> CheckResult {
    let counting = Arc::new(Counting::new(Arc::clone(&context.driver)));
    let instance = Instance::new(Arc::<Counting>::clone(&counting) as Arc<dyn Driver>)?;
    let device = instance.device(context.device().index())?;
    let stream = device.lease_stream()?;
    with_blas(&device, |_, blas| {
        let first = blas.handle_on(&stream)?.id();
        let _guard = stream.enter();
        blas.handle(&device)?;
        counting.reset();
        for _ in 0..100 {
            expect_eq("the handle", blas.handle(&device)?.id(), first)?;
            expect_eq("the handle", blas.handle_on(&stream)?.id(), first)?;
        }
        expect_slice_eq("driver calls", &counting.counts(), &[])
    })?;
    drop((stream, device));
    Ok(instance.close()?)
}

fn repeated_gemm_captures_do_not_grow_memory(context: &TestContext) -> CheckResult {
    with_blas(context.device(), |allocator, blas| {
        let (stream, device) = (context.device().lease_stream()?, context.device_id);
        let matrices = Matrices::new(allocator, &stream, 32, 6)?;
        // In use, so that a trim keeps its workspace.
        let handle = blas.handle_on(&stream)?;
        let workspace = handle.workspace();
        let mut graph = Graph::new(allocator, context.device(), GraphOptions::default())?;
        let mut first = None;
        for _ in 0..100 {
            graph.capture(&stream, CaptureOptions::default(), |_| {
                blas.handle(context.device())?.sgemm(&matrices.product)?;
                let handle = blas.handle_on(&stream)?;
                (0..2).try_for_each(|_| handle.sgemm(&matrices.product))
            })?;
            for _ in 0..2 {
                graph.replay(&stream)?;
                matrices.check(&stream)?;
            }
            graph.reset()?;
            allocator.trim(device, MemPoolId::DEFAULT)?;
            let stats = allocator.stats(device)?;
            let now = (stats.reserved_bytes.all.current, stats.active.all.current);
            expect_eq("reserved bytes and active blocks after each capture", now, *first.get_or_insert(now))?;
        }
        expect_eq("the workspace after all captures", blas.handle_on(&stream)?.workspace(), workspace)?;
        expect_eq("workspace bytes", allocator.stats(device)?.workspace_bytes.current, workspace.1)
    })
}
