//! Libraries with handles: how handles come and go, what they may be told, and products of matrices against a plain
//! loop on the host. Numbers are small and whole, so that every device computes them exactly, in whatever order it
//! adds.

use warpool_driver::ErrorCode::{InvalidDevice, InvalidHandle, InvalidValue, NotSupported, StreamCaptureUnsupported};
use warpool_driver::{
    BlasMath, BlasMatrix, CaptureMode, DeviceId, DevicePtr, HandleId, Library, NodeKind, RawHandle, Sgemm, StreamId,
    StreamOptions,
};

use crate::check::Check;
use crate::context::{Capture, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    cublas_handles_are_created_and_destroyed,
    cublaslt_handles_are_created_and_destroyed,
    cudnn_handles_are_created_and_destroyed,
    cusparse_handles_are_created_and_destroyed,
    cusolver_handles_are_created_and_destroyed,
    gemm_matches_a_host_loop,
    gemm_with_zero_beta_ignores_the_old_result,
    gemm_runs_in_submission_order,
    new_handle_uses_the_legacy_stream,
    handle_can_switch_streams,
    threads_run_gemm_concurrently,
    handle_may_be_used_by_another_thread,
    workspace_does_not_change_results,
    misaligned_workspace_is_rejected,
    small_integers_are_exact_in_tf32,
    atomics_mode_can_be_changed,
    empty_gemm_is_a_no_op,
    gemm_with_wrong_dimensions_is_rejected,
    captured_gemm_runs_at_every_launch,
    blas_calls_reject_handles_of_other_libraries,
    stream_of_another_device_is_rejected,
    gemm_runs_on_every_device,
    unknown_handle_is_rejected,
    ; provoking hazards:
    destroyed_handle_is_rejected,
];

// ---- handles

fn cublas_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    come_and_go(context, Library::Blas)
}

fn cublaslt_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    come_and_go(context, Library::BlasLt)
}

fn cudnn_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    come_and_go(context, Library::Dnn)
}

fn cusparse_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    come_and_go(context, Library::Sparse)
}

fn cusolver_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    come_and_go(context, Library::Solver)
}

/// Makes handles, points them at streams and takes them away. They are also made while this thread captures, which must
/// not notice, and cannot be taken away then.
fn come_and_go(context: &TestContext, library: Library) -> CheckResult {
    let (first, second, stream) =
        (context.library_handle(library)?, context.library_handle(library)?, context.stream()?);
    expect(first != second, "ids of their own")?;
    let raw = |handle| context.driver.library_raw(handle);
    // cuBLASLt gives everybody the same.
    let own = library == Library::BlasLt || raw(first)? != raw(second)?;
    expect(raw(first)? != RawHandle(0) && own, "handles of their own")?;
    for stream in [stream, context.legacy_stream()?, context.per_thread_stream()?] {
        let pointed = context.driver.library_set_stream(first, stream);
        match library {
            Library::BlasLt => expect_error(pointed, NotSupported)?,
            _ => pointed?,
        }
    }
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        context.driver.capture_begin(stream, mode)?;
        let handle = context.library_handle(library)?;
        expect_error(context.driver.library_destroy(handle), StreamCaptureUnsupported)?;
        context.expect_capture(stream, Capture::Active)?;
        context.end_capture(stream)?;
        context.destroy_handle(handle)?;
    }
    context.destroy_handle(first)?;
    expect(raw(second)? != RawHandle(0), "the second to live on")?;
    expect_error(context.driver.library_create(library, context.invalid_device_id()?), InvalidDevice)
}

fn unknown_handle_is_rejected(context: &TestContext) -> CheckResult {
    unknown(context, HandleId(u64::MAX))
}

fn destroyed_handle_is_rejected(context: &TestContext) -> CheckResult {
    let handle = context.library_handle(Library::Blas)?;
    context.destroy_handle(handle)?;
    // The next one has another id, whatever the library's own handle is.
    let next = context.library_handle(Library::Blas)?;
    expect(next != handle, "an id that was never given before")?;
    unknown(context, handle)
}

/// Every call that takes a handle refuses this one.
fn unknown(context: &TestContext, handle: HandleId) -> CheckResult {
    let (driver, stream) = (&context.driver, context.stream()?);
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    refused("library_destroy", driver.library_destroy(handle))?;
    refused("library_set_stream", driver.library_set_stream(handle, stream))?;
    refused("library_raw", driver.library_raw(handle).map(drop))?;
    no_blas(context, handle)
}

/// Every call of cuBLAS refuses this one.
fn no_blas(context: &TestContext, handle: HandleId) -> CheckResult {
    let (driver, memory) = (&context.driver, context.alloc(4096)?);
    let product = Product::new(context, Case::default())?;
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    refused("blas_set_workspace", driver.blas_set_workspace(handle, memory, 4096))?;
    refused("blas_set_math", driver.blas_set_math(handle, BlasMath::Tf32))?;
    refused("blas_set_atomics", driver.blas_set_atomics(handle, true))?;
    refused("blas_sgemm", driver.blas_sgemm(handle, &product.call))?;
    product.expect("after nothing", context, 0)
}

fn blas_calls_reject_handles_of_other_libraries(context: &TestContext) -> CheckResult {
    let mut found = 0;
    for library in Library::ALL.into_iter().filter(|&library| library != Library::Blas) {
        if let Some(handle) = context.library_handle_if_installed(library)? {
            no_blas(context, handle)?;
            found += 1;
        }
    }
    require(found != 0, "no library but cuBLAS is installed")
}

fn stream_of_another_device_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, other) = (context.library_handle(Library::Blas)?, context.second_device_id()?);
    let (ours, theirs) = (context.stream()?, context.stream_on(other, StreamOptions::default())?);
    context.driver.library_set_stream(handle, ours)?;
    expect_error(context.driver.library_set_stream(handle, theirs), InvalidValue)?;
    let product = Product::new(context, Case::default())?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(ours)?;
    product.expect("on the stream it had", context, 1)
}

fn gemm_runs_on_every_device(context: &TestContext) -> CheckResult {
    let other = context.second_device_id()?;
    let handle = context.library_handle_on(Library::Blas, other)?;
    let stream = context.stream_on(other, StreamOptions::default())?;
    context.driver.library_set_stream(handle, stream)?;
    let product = Product::on(context, other, Case::default())?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(stream)?;
    product.expect("on the other device", context, 1)
}

// ---- products

/// What kind of product.
#[derive(Clone, Copy, Debug)]
struct Case {
    size: (u32, u32, u32),
    transposed: (bool, bool),
    /// How much further columns are apart than they are long.
    gaps: (u32, u32, u32),
    alpha: f32,
    beta: f32,
}

impl Default for Case {
    fn default() -> Self {
        Self { size: (33, 17, 25), transposed: (false, false), gaps: (0, 0, 0), alpha: 1.0, beta: 1.0 }
    }
}

/// Matrices on the device, what to do with them, and what is in them.
struct Product {
    device: DeviceId,
    call: Sgemm,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Product {
    fn new(context: &TestContext, case: Case) -> CheckResult<Self> {
        Self::on(context, context.device_id, case)
    }

    /// Puts matrices of small whole numbers onto `device`; the gaps between columns hold numbers too.
    fn on(context: &TestContext, device: DeviceId, case: Case) -> CheckResult<Self> {
        let Case { size: (m, n, k), transposed, gaps, alpha, beta } = case;
        let matrix = |rows: u32, columns: u32, transposed: bool, gap: u32| -> CheckResult<(BlasMatrix, Vec<f32>)> {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            let stride = rows.max(1) + gap;
            let numbers: Vec<f32> =
                (0..stride * columns.max(1)).map(|_| context.random_below(9) as f32 - 4.0).collect();
            let ptr = context.alloc_on(device, 4 * numbers.len() as u64)?;
            context.driver.upload(device, ptr, &to_bytes(&numbers))?;
            Ok((BlasMatrix { ptr, stride, transposed }, numbers))
        };
        let (a, in_a) = matrix(m, k, transposed.0, gaps.0)?;
        let (b, in_b) = matrix(k, n, transposed.1, gaps.1)?;
        let (c, in_c) = matrix(m, n, false, gaps.2)?;
        Ok(Self { device, call: Sgemm { m, n, k, alpha, a, b, beta, c }, a: in_a, b: in_b, c: in_c })
    }

    /// What is in `c` after the product was made once more.
    fn step(&self, c: &mut [f32]) {
        let Sgemm { m, n, k, alpha, a, b, beta, c: to } = self.call;
        let at = |numbers: &[f32], matrix: BlasMatrix, row: u32, column: u32| {
            let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
            f64::from(numbers[(column * matrix.stride + row) as usize])
        };
        for column in 0..n {
            for row in 0..m {
                let sum: f64 = (0..k).map(|i| at(&self.a, a, row, i) * at(&self.b, b, i, column)).sum();
                let old = &mut c[(column * to.stride + row) as usize];
                *old = (f64::from(alpha) * sum + if beta == 0.0 { 0.0 } else { f64::from(beta * *old) }) as f32;
            }
        }
    }

    /// All of `c`, gaps too, must be what it is after `times` products.
    #[track_caller]
    fn expect(&self, what: &str, context: &TestContext, times: u32) -> CheckResult {
        let mut want = self.c.clone();
        (0..times).for_each(|_| self.step(&mut want));
        let mut bytes = vec![0; 4 * want.len()];
        context.driver.download(self.device, self.call.c.ptr, &mut bytes)?;
        expect_slice_eq(what, &to_floats(&bytes), &want)
    }
}

fn to_bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect()
}

/// A handle of cuBLAS, pointed at a stream of its own.
fn blas(context: &TestContext) -> CheckResult<(HandleId, StreamId)> {
    let (handle, stream) = (context.library_handle(Library::Blas)?, context.stream()?);
    context.driver.library_set_stream(handle, stream)?;
    Ok((handle, stream))
}

fn gemm_matches_a_host_loop(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let sizes = [(1, 1, 1), (2, 3, 4), (16, 16, 16), (33, 17, 25), (1, 64, 7), (64, 1, 7), (96, 64, 130), (5, 5, 0)];
    let scales = [(1.0, 0.0), (1.0, 1.0), (-2.0, 0.5), (0.0, 3.0), (0.5, -1.0)];
    for size in sizes {
        for (at, (alpha, beta)) in scales.into_iter().enumerate() {
            for transposed in [(false, false), (true, false), (false, true), (true, true)] {
                let gaps = if at % 2 == 0 { (0, 0, 0) } else { (3, 1, 5) };
                let case = Case { size, transposed, gaps, alpha, beta };
                let product = Product::new(context, case)?;
                context.driver.blas_sgemm(handle, &product.call)?;
                context.synchronize(stream)?;
                product.expect(&format!("{case:?}"), context, 1)?;
            }
        }
    }
    Ok(())
}

fn gemm_with_zero_beta_ignores_the_old_result(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let mut product = Product::new(context, Case { beta: 0.0, ..Case::default() })?;
    product.c.fill(f32::NAN);
    context.driver.upload(context.device_id, product.call.c.ptr, &to_bytes(&product.c))?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(stream)?;
    product.expect("over numbers that are none", context, 1)
}

fn gemm_runs_in_submission_order(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    in_order(context, handle, stream)
}

fn new_handle_uses_the_legacy_stream(context: &TestContext) -> CheckResult {
    let handle = context.library_handle(Library::Blas)?;
    // The default stream waits for this one.
    let stream = context.blocking_stream()?;
    in_order(context, handle, stream)?;
    in_order(context, handle, context.legacy_stream()?)
}

/// A product must come behind what `stream` was given before, and before what `stream` is given next.
fn in_order(context: &TestContext, handle: HandleId, stream: StreamId) -> CheckResult {
    context.kernels()?;
    let mut product = Product::new(context, Case::default())?;
    let new = vec![2.0; product.c.len()];
    let (from, back, bytes) =
        (context.alloc_bytes(&to_bytes(&new))?, context.alloc(4 * new.len() as u64)?, 4 * new.len());
    let c = product.call.c.ptr;
    context.delay(stream)?;
    context.driver.copy(c.into(), from.into(), bytes as u64, stream)?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.driver.copy(back.into(), c.into(), bytes as u64, stream)?;
    context.driver.fill(c, warpool_driver::Pattern::U8(0), bytes as u64, stream)?;
    context.synchronize(stream)?;
    product.c = new;
    product.call.c.ptr = back;
    product.expect("between two copies", context, 1)
}

fn handle_can_switch_streams(context: &TestContext) -> CheckResult {
    let (handle, first) = blas(context)?;
    let second = context.stream()?;
    context.kernels()?;
    let product = Product::new(context, Case { size: (20, 20, 20), ..Case::default() })?;
    for round in 0..4 {
        let (stream, other) = if round % 2 == 0 { (first, second) } else { (second, first) };
        context.driver.library_set_stream(handle, stream)?;
        context.delay(stream)?;
        context.driver.blas_sgemm(handle, &product.call)?;
        context.order(stream, other)?;
    }
    context.synchronize(first)?;
    context.synchronize(second)?;
    product.expect("after four", context, 4)
}

fn threads_run_gemm_concurrently(context: &TestContext) -> CheckResult {
    context.library_handle(Library::Blas)?;
    let case = Case { size: (20, 30, 40), ..Case::default() };
    let products = (0..4).map(|_| Product::new(context, case)).collect::<CheckResult<Vec<_>>>()?;
    let one = |product: &Product| -> CheckResult {
        let (handle, stream) = blas(context)?;
        for _ in 0..10 {
            context.driver.blas_sgemm(handle, &product.call)?;
        }
        context.synchronize(stream)?;
        product.expect("after ten on one thread", context, 10)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = products.iter().map(|product| scope.spawn(move || one(product))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn handle_may_be_used_by_another_thread(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let product = Product::new(context, Case::default())?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.on_new_thread(|| context.driver.blas_sgemm(handle, &product.call))?;
    context.synchronize(stream)?;
    product.expect("after one on each thread", context, 2)?;
    context.on_new_thread(|| context.destroy_handle(handle))
}

fn workspace_does_not_change_results(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let workspace = context.alloc(4 << 20)?;
    for (ptr, bytes) in [(workspace, 4 << 20), (workspace.offset(256), 4096), (DevicePtr(0), 0), (workspace, 4 << 20)] {
        context.driver.blas_set_workspace(handle, ptr, bytes)?;
        let product = Product::new(context, Case { size: (60, 50, 300), ..Case::default() })?;
        context.driver.blas_sgemm(handle, &product.call)?;
        context.synchronize(stream)?;
        product.expect(&format!("with {bytes} bytes at {ptr}"), context, 1)?;
    }
    // A stream takes the workspace with it: the memory may go.
    context.driver.library_set_stream(handle, stream)?;
    context.free(workspace)?;
    let product = Product::new(context, Case::default())?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(stream)?;
    product.expect("with the library's own", context, 1)
}

fn misaligned_workspace_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let workspace = context.alloc(1 << 20)?;
    for offset in [1, 16, 128, 255] {
        let set = context.driver.blas_set_workspace(handle, workspace.offset(offset), 4096);
        expect_error_of(&format!("{offset} bytes in"), set, InvalidValue)?;
    }
    let product = Product::new(context, Case::default())?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(stream)?;
    product.expect("with what it had", context, 1)
}

fn small_integers_are_exact_in_tf32(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    for math in [BlasMath::Tf32, BlasMath::Default, BlasMath::Tf32] {
        context.driver.blas_set_math(handle, math)?;
        let product = Product::new(context, Case { size: (64, 64, 64), ..Case::default() })?;
        context.driver.blas_sgemm(handle, &product.call)?;
        context.synchronize(stream)?;
        product.expect(&format!("{math:?}"), context, 1)?;
    }
    Ok(())
}

fn atomics_mode_can_be_changed(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let product = Product::new(context, Case::default())?;
    for allowed in [true, true, false, false, true, false] {
        context.driver.blas_set_atomics(handle, allowed)?;
        context.driver.blas_sgemm(handle, &product.call)?;
    }
    context.synchronize(stream)?;
    product.expect("after six", context, 6)
}

fn empty_gemm_is_a_no_op(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let product = Product::new(context, Case { beta: 0.0, ..Case::default() })?;
    let none = |context: &TestContext| -> CheckResult {
        context.driver.blas_sgemm(handle, &Sgemm { m: 0, ..product.call })?;
        context.driver.blas_sgemm(handle, &Sgemm { n: 0, ..product.call })?;
        Ok(context.driver.blas_sgemm(handle, &Sgemm { m: 0, n: 0, k: 0, ..product.call })?)
    };
    none(context)?;
    context.synchronize(stream)?;
    product.expect("after nothing", context, 0)?;
    let graph = context.capture(stream, || none(context))?;
    expect_eq("nodes", context.driver.graph_topology(graph)?.nodes.len(), 0)
}

fn gemm_with_wrong_dimensions_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let product = Product::new(context, Case { gaps: (1, 1, 1), ..Case::default() })?;
    let Sgemm { m, k, n, a, b, c, .. } = product.call;
    let narrow =
        |matrix: BlasMatrix, rows: u32, transposed: bool| BlasMatrix { stride: rows - 1, transposed, ..matrix };
    let wrong = [
        ("a", Sgemm { a: narrow(a, m, false), ..product.call }),
        ("a, transposed", Sgemm { a: narrow(a, k, true), ..product.call }),
        ("b", Sgemm { b: narrow(b, k, false), ..product.call }),
        ("b, transposed", Sgemm { b: narrow(b, n, true), ..product.call }),
        ("c", Sgemm { c: narrow(c, m, false), ..product.call }),
        ("a transposed result", Sgemm { c: BlasMatrix { transposed: true, stride: m.max(n), ..c }, ..product.call }),
    ];
    for (what, call) in wrong {
        expect_error_of(what, context.driver.blas_sgemm(handle, &call), InvalidValue)?;
    }
    context.synchronize(stream)?;
    product.expect("after nothing", context, 0)
}

fn captured_gemm_runs_at_every_launch(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let (other, workspace) = (context.stream()?, context.alloc(4 << 20)?);
    let product = Product::new(context, Case { size: (20, 20, 20), ..Case::default() })?;
    // Once outside, so that the library has loaded what it needs.
    context.driver.blas_sgemm(handle, &product.call)?;
    context.synchronize(stream)?;
    context.driver.capture_begin(stream, CaptureMode::Global)?;
    context.driver.library_set_stream(handle, stream)?;
    context.driver.blas_set_workspace(handle, workspace, 4 << 20)?;
    context.driver.blas_set_math(handle, BlasMath::Default)?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.driver.blas_sgemm(handle, &product.call)?;
    context.expect_capture(stream, Capture::Active)?;
    let graph = context.end_capture(stream)?;
    let nodes = context.driver.graph_topology(graph)?.nodes;
    let kernels = nodes.iter().filter(|node| node.kind == NodeKind::Kernel).count();
    expect(kernels >= 2, &format!("a kernel for each product, among {nodes:?}"))?;
    product.expect("before any replay", context, 1)?;
    let exec = context.instantiate(graph)?;
    // What the handle is told later is no concern of the graph's.
    context.driver.library_set_stream(handle, other)?;
    context.destroy_handle(handle)?;
    for round in 1..=3 {
        context.replay(exec, if round % 2 == 0 { stream } else { other })?;
        product.expect(&format!("after replay {round}"), context, 1 + 2 * round)?;
    }
    Ok(())
}
