//! Library handles: creation and destruction, settings, and GEMM against a loop on the host. Matrices contain small
//! integers, so that every device computes them exactly, whatever the order of the sums.

use warpool_driver::ErrorCode::{InvalidDevice, InvalidHandle, InvalidValue, NotSupported, StreamCaptureUnsupported};
use warpool_driver::{
    BlasMath, BlasMatrix, CaptureMode, DeviceId, DevicePtr, HandleId, Library, NodeKind, Pattern, RawHandle, Sgemm,
    StreamId, StreamOptions,
};

use crate::check::Check;
use crate::context::{Capture, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};
use crate::sync::join;

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
    gemm_outside_of_memory_is_rejected,
];

// ---- handles

fn cublas_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    create_and_destroy(context, Library::Blas)
}

fn cublaslt_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    create_and_destroy(context, Library::BlasLt)
}

fn cudnn_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    create_and_destroy(context, Library::Dnn)
}

fn cusparse_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    create_and_destroy(context, Library::Sparse)
}

fn cusolver_handles_are_created_and_destroyed(context: &TestContext) -> CheckResult {
    create_and_destroy(context, Library::Solver)
}

/// Creates handles, sets their streams and destroys them. During a capture of this thread, creating is allowed and does
/// not disturb the capture; destroying is rejected.
fn create_and_destroy(context: &TestContext, library: Library) -> CheckResult {
    let (first, second, stream) =
        (context.library_handle(library)?, context.library_handle(library)?, context.stream()?);
    expect(first != second, "two handles have different ids")?;
    let raw = |handle| context.driver.library_raw(handle);
    // cuBLASLt may return the same raw handle.
    let own = library == Library::BlasLt || raw(first)? != raw(second)?;
    expect(raw(first)? != RawHandle(0) && own, "two handles have different raw handles")?;
    for stream in [stream, context.legacy_stream()?, context.per_thread_stream()?] {
        let result = context.driver.library_set_stream(first, stream);
        match library {
            Library::BlasLt => expect_error(result, NotSupported)?,
            _ => result?,
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
    expect(raw(second)? != RawHandle(0), "the second handle still exists")?;
    expect_error(context.driver.library_create(library, context.invalid_device_id()?), InvalidDevice)
}

fn unknown_handle_is_rejected(context: &TestContext) -> CheckResult {
    expect_rejected(context, HandleId(u64::MAX))
}

fn destroyed_handle_is_rejected(context: &TestContext) -> CheckResult {
    let handle = context.library_handle(Library::Blas)?;
    context.destroy_handle(handle)?;
    // The next handle has another id, even if the library reuses the raw handle.
    let next = context.library_handle(Library::Blas)?;
    expect(next != handle, "the id is new")?;
    expect_rejected(context, handle)
}

/// Every call that takes a handle must reject this one.
fn expect_rejected(context: &TestContext, handle: HandleId) -> CheckResult {
    let (driver, stream) = (&context.driver, context.stream()?);
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("library_destroy", driver.library_destroy(handle))?;
    rejected("library_set_stream", driver.library_set_stream(handle, stream))?;
    rejected("library_raw", driver.library_raw(handle).map(drop))?;
    expect_blas_rejects(context, handle)
}

/// Every call of cuBLAS must reject this one.
fn expect_blas_rejects(context: &TestContext, handle: HandleId) -> CheckResult {
    let (driver, memory) = (&context.driver, context.alloc(4096)?);
    let gemm = Gemm::new(context, GemmCase::default())?;
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("blas_set_workspace", driver.blas_set_workspace(handle, memory, 4096))?;
    rejected("blas_set_math", driver.blas_set_math(handle, BlasMath::Tf32))?;
    rejected("blas_set_atomics", driver.blas_set_atomics(handle, true))?;
    rejected("blas_sgemm", driver.blas_sgemm(handle, &gemm.call))?;
    gemm.expect("the result without a GEMM", context, 0)
}

fn blas_calls_reject_handles_of_other_libraries(context: &TestContext) -> CheckResult {
    let mut others = 0;
    for library in Library::ALL.into_iter().filter(|&library| library != Library::Blas) {
        if let Some(handle) = context.library_handle_if_installed(library)? {
            expect_blas_rejects(context, handle)?;
            others += 1;
        }
    }
    require(others != 0, "no library but cuBLAS is installed")
}

fn stream_of_another_device_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, other) = (context.library_handle(Library::Blas)?, context.second_device_id()?);
    let (stream, foreign) = (context.stream()?, context.stream_on(other, StreamOptions::default())?);
    context.driver.library_set_stream(handle, stream)?;
    expect_error(context.driver.library_set_stream(handle, foreign), InvalidValue)?;
    let gemm = Gemm::new(context, GemmCase::default())?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("the result on the previous stream", context, 1)
}

fn gemm_runs_on_every_device(context: &TestContext) -> CheckResult {
    let other = context.second_device_id()?;
    let handle = context.library_handle_on(Library::Blas, other)?;
    let stream = context.stream_on(other, StreamOptions::default())?;
    context.driver.library_set_stream(handle, stream)?;
    let gemm = Gemm::on(context, other, GemmCase::default())?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("the result on the other device", context, 1)
}

// ---- GEMM

/// One GEMM: sizes, strides and factors.
#[derive(Clone, Copy, Debug)]
struct GemmCase {
    size: (u32, u32, u32),
    transposed: (bool, bool),
    /// Unused elements between the columns of each matrix.
    gaps: (u32, u32, u32),
    alpha: f32,
    beta: f32,
}

impl Default for GemmCase {
    fn default() -> Self {
        Self { size: (33, 17, 25), transposed: (false, false), gaps: (0, 0, 0), alpha: 1.0, beta: 1.0 }
    }
}

/// Matrices on the device, their contents, and the GEMM over them.
struct Gemm {
    device: DeviceId,
    call: Sgemm,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Gemm {
    fn new(context: &TestContext, case: GemmCase) -> CheckResult<Self> {
        Self::on(context, context.device_id, case)
    }

    /// Uploads matrices of small integers to `device`; the gaps between columns contain numbers too.
    fn on(context: &TestContext, device: DeviceId, case: GemmCase) -> CheckResult<Self> {
        let GemmCase { size: (m, n, k), transposed, gaps, alpha, beta } = case;
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

    /// Computes `c` after one more GEMM, on the host.
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

    /// All of `c`, with its gaps, must be the result of `times` GEMMs.
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

/// A cuBLAS handle with a stream of its own.
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
                let case = GemmCase { size, transposed, gaps, alpha, beta };
                let gemm = Gemm::new(context, case)?;
                context.driver.blas_sgemm(handle, &gemm.call)?;
                context.synchronize(stream)?;
                gemm.expect(&format!("{case:?}"), context, 1)?;
            }
        }
    }
    Ok(())
}

fn gemm_with_zero_beta_ignores_the_old_result(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let mut gemm = Gemm::new(context, GemmCase { beta: 0.0, ..GemmCase::default() })?;
    gemm.c.fill(f32::NAN);
    context.driver.upload(context.device_id, gemm.call.c.ptr, &to_bytes(&gemm.c))?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("the result over NaN", context, 1)
}

fn gemm_runs_in_submission_order(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    expect_in_order(context, handle, stream)
}

fn new_handle_uses_the_legacy_stream(context: &TestContext) -> CheckResult {
    let handle = context.library_handle(Library::Blas)?;
    // The legacy stream waits for this one.
    let stream = context.blocking_stream()?;
    expect_in_order(context, handle, stream)?;
    expect_in_order(context, handle, context.legacy_stream()?)
}

/// A GEMM must run after earlier work of `stream` and before later work.
fn expect_in_order(context: &TestContext, handle: HandleId, stream: StreamId) -> CheckResult {
    context.kernels()?;
    let mut gemm = Gemm::new(context, GemmCase::default())?;
    let new = vec![2.0; gemm.c.len()];
    let (from, back, bytes) =
        (context.alloc_bytes(&to_bytes(&new))?, context.alloc(4 * new.len() as u64)?, 4 * new.len());
    let c = gemm.call.c.ptr;
    context.delay(stream)?;
    context.driver.copy(c.into(), from.into(), bytes as u64, stream)?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.driver.copy(back.into(), c.into(), bytes as u64, stream)?;
    context.driver.fill(c, Pattern::U8(0), bytes as u64, stream)?;
    context.synchronize(stream)?;
    gemm.c = new;
    gemm.call.c.ptr = back;
    gemm.expect("the result between two copies", context, 1)
}

fn handle_can_switch_streams(context: &TestContext) -> CheckResult {
    let (handle, first) = blas(context)?;
    let second = context.stream()?;
    context.kernels()?;
    let gemm = Gemm::new(context, GemmCase { size: (20, 20, 20), ..GemmCase::default() })?;
    for round in 0..4 {
        let (stream, other) = if round % 2 == 0 { (first, second) } else { (second, first) };
        context.driver.library_set_stream(handle, stream)?;
        context.delay(stream)?;
        context.driver.blas_sgemm(handle, &gemm.call)?;
        context.order(stream, other)?;
    }
    context.synchronize(first)?;
    context.synchronize(second)?;
    gemm.expect("the result of four GEMMs", context, 4)
}

fn threads_run_gemm_concurrently(context: &TestContext) -> CheckResult {
    context.library_handle(Library::Blas)?;
    let case = GemmCase { size: (20, 30, 40), ..GemmCase::default() };
    let gemms = (0..4).map(|_| Gemm::new(context, case)).collect::<CheckResult<Vec<_>>>()?;
    let one = |gemm: &Gemm| -> CheckResult {
        let (handle, stream) = blas(context)?;
        for _ in 0..10 {
            context.driver.blas_sgemm(handle, &gemm.call)?;
        }
        context.synchronize(stream)?;
        gemm.expect("the result of ten GEMMs of one thread", context, 10)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = gemms.iter().map(|gemm| scope.spawn(move || one(gemm))).collect();
        threads.into_iter().try_for_each(join)
    })
}

fn handle_may_be_used_by_another_thread(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let gemm = Gemm::new(context, GemmCase::default())?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.on_new_thread(|| context.driver.blas_sgemm(handle, &gemm.call))?;
    context.synchronize(stream)?;
    gemm.expect("the result of one GEMM on each thread", context, 2)?;
    context.on_new_thread(|| context.destroy_handle(handle))
}

fn workspace_does_not_change_results(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let workspace = context.alloc(4 << 20)?;
    for (ptr, bytes) in [(workspace, 4 << 20), (workspace.offset(256), 4096), (DevicePtr(0), 0), (workspace, 4 << 20)] {
        context.driver.blas_set_workspace(handle, ptr, bytes)?;
        let gemm = Gemm::new(context, GemmCase { size: (60, 50, 300), ..GemmCase::default() })?;
        context.driver.blas_sgemm(handle, &gemm.call)?;
        context.synchronize(stream)?;
        gemm.expect(&format!("the result with a workspace of {bytes} bytes at {ptr}"), context, 1)?;
    }
    // Setting the stream resets the workspace, so that its memory may be freed.
    context.driver.library_set_stream(handle, stream)?;
    context.free(workspace)?;
    let gemm = Gemm::new(context, GemmCase::default())?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("the result with the library's own workspace", context, 1)
}

fn misaligned_workspace_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let workspace = context.alloc(1 << 20)?;
    for offset in [1, 16, 128, 255] {
        let set = context.driver.blas_set_workspace(handle, workspace.offset(offset), 4096);
        expect_error_of(&format!("at offset {offset}"), set, InvalidValue)?;
    }
    let gemm = Gemm::new(context, GemmCase::default())?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("the result with the previous workspace", context, 1)
}

fn small_integers_are_exact_in_tf32(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    for math in [BlasMath::Tf32, BlasMath::Default, BlasMath::Tf32] {
        context.driver.blas_set_math(handle, math)?;
        let gemm = Gemm::new(context, GemmCase { size: (64, 64, 64), ..GemmCase::default() })?;
        context.driver.blas_sgemm(handle, &gemm.call)?;
        context.synchronize(stream)?;
        gemm.expect(&format!("{math:?}"), context, 1)?;
    }
    Ok(())
}

fn atomics_mode_can_be_changed(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let gemm = Gemm::new(context, GemmCase::default())?;
    for allowed in [true, true, false, false, true, false] {
        context.driver.blas_set_atomics(handle, allowed)?;
        context.driver.blas_sgemm(handle, &gemm.call)?;
    }
    context.synchronize(stream)?;
    gemm.expect("the result of six GEMMs", context, 6)
}

fn empty_gemm_is_a_no_op(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let gemm = Gemm::new(context, GemmCase { beta: 0.0, ..GemmCase::default() })?;
    let none = |context: &TestContext| -> CheckResult {
        context.driver.blas_sgemm(handle, &Sgemm { m: 0, ..gemm.call })?;
        context.driver.blas_sgemm(handle, &Sgemm { n: 0, ..gemm.call })?;
        Ok(context.driver.blas_sgemm(handle, &Sgemm { m: 0, n: 0, k: 0, ..gemm.call })?)
    };
    none(context)?;
    context.synchronize(stream)?;
    gemm.expect("the result without a GEMM", context, 0)?;
    let graph = context.capture(stream, || none(context))?;
    expect_eq("nodes", context.driver.graph_topology(graph)?.nodes.len(), 0)
}

fn gemm_with_wrong_dimensions_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let gemm = Gemm::new(context, GemmCase { gaps: (1, 1, 1), ..GemmCase::default() })?;
    let Sgemm { m, k, n, a, b, c, .. } = gemm.call;
    let narrow =
        |matrix: BlasMatrix, rows: u32, transposed: bool| BlasMatrix { stride: rows - 1, transposed, ..matrix };
    let wrong = [
        ("a", Sgemm { a: narrow(a, m, false), ..gemm.call }),
        ("a, transposed", Sgemm { a: narrow(a, k, true), ..gemm.call }),
        ("b", Sgemm { b: narrow(b, k, false), ..gemm.call }),
        ("b, transposed", Sgemm { b: narrow(b, n, true), ..gemm.call }),
        ("c", Sgemm { c: narrow(c, m, false), ..gemm.call }),
        ("a transposed result", Sgemm { c: BlasMatrix { transposed: true, stride: m.max(n), ..c }, ..gemm.call }),
    ];
    for (what, call) in wrong {
        expect_error_of(what, context.driver.blas_sgemm(handle, &call), InvalidValue)?;
    }
    context.synchronize(stream)?;
    gemm.expect("the result without a GEMM", context, 0)
}

fn gemm_outside_of_memory_is_rejected(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let gemm = Gemm::new(context, GemmCase::default())?;
    let Sgemm { a, b, c, .. } = gemm.call;
    let moved = |matrix: BlasMatrix, by| BlasMatrix { ptr: matrix.ptr.offset(by), ..matrix };
    let nowhere = |matrix: BlasMatrix| BlasMatrix { ptr: DevicePtr(context.host_pages(1).ptr().0), ..matrix };
    let wrong = [
        ("a past its end", Sgemm { a: moved(a, 4), ..gemm.call }),
        ("b past its end", Sgemm { b: moved(b, 4), ..gemm.call }),
        ("c past its end", Sgemm { c: moved(c, 4), ..gemm.call }),
        ("a stride past the end", Sgemm { c: BlasMatrix { stride: 1 << 20, ..c }, ..gemm.call }),
        ("a in host memory", Sgemm { a: nowhere(a), ..gemm.call }),
        ("c in host memory", Sgemm { c: nowhere(c), ..gemm.call }),
    ];
    for (what, call) in wrong {
        expect_error_of(what, context.driver.blas_sgemm(handle, &call), InvalidValue)?;
    }
    let workspace = context.alloc(1 << 20)?;
    let set = |ptr, bytes| context.driver.blas_set_workspace(handle, ptr, bytes);
    expect_error_of("a workspace past its end", set(workspace, (1 << 20) + 1), InvalidValue)?;
    expect_error_of("a workspace in host memory", set(nowhere(a).ptr, 4096), InvalidValue)?;
    set(workspace, 1 << 20)?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    gemm.expect("within its memory", context, 1)
}

fn captured_gemm_runs_at_every_launch(context: &TestContext) -> CheckResult {
    let (handle, stream) = blas(context)?;
    let (other, workspace) = (context.stream()?, context.alloc(4 << 20)?);
    let gemm = Gemm::new(context, GemmCase { size: (20, 20, 20), ..GemmCase::default() })?;
    // Once before the capture: the library loads its kernels at first use.
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.synchronize(stream)?;
    context.driver.capture_begin(stream, CaptureMode::Global)?;
    context.driver.library_set_stream(handle, stream)?;
    context.driver.blas_set_workspace(handle, workspace, 4 << 20)?;
    context.driver.blas_set_math(handle, BlasMath::Default)?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.driver.blas_sgemm(handle, &gemm.call)?;
    context.expect_capture(stream, Capture::Active)?;
    let graph = context.end_capture(stream)?;
    let nodes = context.driver.graph_topology(graph)?.nodes;
    let kernels = nodes.iter().filter(|node| node.kind == NodeKind::Kernel).count();
    expect(kernels >= 2, &format!("a kernel node for each GEMM: {nodes:?}"))?;
    gemm.expect("the result before any launch", context, 1)?;
    let exec = context.instantiate(graph)?;
    // Later changes of the handle do not affect the graph.
    context.driver.library_set_stream(handle, other)?;
    context.destroy_handle(handle)?;
    for round in 1..=3 {
        context.replay(exec, if round % 2 == 0 { stream } else { other })?;
        gemm.expect(&format!("the result after launch {round}"), context, 1 + 2 * round)?;
    }
    Ok(())
}
