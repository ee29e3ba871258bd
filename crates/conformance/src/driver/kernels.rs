//! Modules and kernels.

use warpool_driver::ErrorCode::{InvalidHandle, InvalidSource, InvalidValue, NotFound};
use warpool_driver::{FunctionId, KernelArg, KernelSource, LaunchShape, ModuleId};

use crate::check::Check;
use crate::context::{Resource, SOURCE, TestContext};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq};

pub(crate) const CHECKS: &[Check] = crate::checks![
    arguments_of_every_type_are_passed,
    parameters_are_those_of_the_source,
    launch_shape_is_passed,
    every_element_is_processed,
    float_results_are_exact,
    empty_launch_shape_is_rejected,
    oversized_launch_shape_is_rejected,
    unknown_function_name_is_not_found,
    invalid_source_is_rejected_with_the_compiler_log,
    modules_are_independent,
    any_thread_may_load_and_launch,
    unknown_functions_are_rejected,
    graphs_keep_their_modules_loaded,
    launched_kernels_complete_after_module_unload,
    ; provoking hazards:
    unloaded_module_is_rejected,
];

fn arguments_of_every_type_are_passed(context: &TestContext) -> CheckResult {
    let (stream, out) = (context.stream()?, context.alloc(48)?);
    let echo = context.kernels()?.echo;
    let cases = [
        (0_u32, 0_i32, 0_u64, 0_i64, 0.0_f32, 0.0_f64),
        (u32::MAX, i32::MIN, u64::MAX, i64::MIN, f32::MIN_POSITIVE, f64::MAX),
        (0x0102_0304, -2, 0x0102_0304_0506_0708, -3, -1.5, std::f64::consts::PI),
    ];
    for (a, b, c, d, e, f) in cases {
        let args = [
            KernelArg::Ptr(out),
            KernelArg::U32(a),
            KernelArg::I32(b),
            KernelArg::U64(c),
            KernelArg::I64(d),
            KernelArg::F32(e),
            KernelArg::F64(f),
        ];
        context.launch_single(echo, &args, stream)?;
        context.synchronize(stream)?;
        let want =
            [u64::from(a), i64::from(b).cast_unsigned(), c, d.cast_unsigned(), u64::from(e.to_bits()), f.to_bits()];
        let want: Vec<u8> = want.iter().flat_map(|word| word.to_le_bytes()).collect();
        expect_slice_eq("the arguments that the kernel received", &context.read_bytes(out, 48)?, &want)?;
    }
    Ok(())
}

fn parameters_are_those_of_the_source(context: &TestContext) -> CheckResult {
    let module = loaded(context)?;
    for (name, sizes) in
        [("spin", &[8][..]), ("append", &[8, 4]), ("add_sequence", &[8, 8, 4, 4]), ("axpy_f32", &[8, 8, 4, 4])]
    {
        let function = context.driver.function_get(module, name)?;
        // Drivers before CUDA 12.4 do not know them.
        if let Some(known) = context.driver.function_parameters(function)? {
            expect_eq(&format!("the sizes of the arguments of {name}"), known, sizes.to_vec())?;
        }
    }
    expect_error(context.driver.function_parameters(FunctionId(u64::MAX)), InvalidHandle)
}

fn launch_shape_is_passed(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let function = context.kernels()?.shape;
    for (grid, block) in
        [([1, 1, 1], [1, 1, 1]), ([2, 3, 4], [5, 6, 7]), ([100, 1, 2], [1024, 1, 1]), ([1, 1, 9], [1, 1, 64])]
    {
        let out = context.alloc_words(&[0; 7])?;
        let shape = LaunchShape { grid, block, shared_bytes: 1024 };
        context.launch_kernel(function, shape, &[out.into()], stream)?;
        context.synchronize(stream)?;
        let threads = shape.threads() as u32;
        let want = [threads, grid[0], grid[1], grid[2], block[0], block[1], block[2]];
        expect_slice_eq("threads, grid and block", &context.read_words(out, 7)?, &want)?;
    }
    Ok(())
}

fn every_element_is_processed(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    for n in [1_u32, 255, 256, 257, 100_003] {
        let data = context.alloc_words(&vec![u32::MAX; n as usize + 1])?;
        context.fill_index(data, n, stream)?;
        context.synchronize(stream)?;
        let want: Vec<u32> = (0..n).chain([u32::MAX]).collect();
        expect_slice_eq("the elements and the word after them", &context.read_words(data, n as usize + 1)?, &want)?;
    }
    Ok(())
}

fn float_results_are_exact(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 1000_u32);
    let axpy = context.kernels()?.axpy_f32;
    let some = |at: u32| (context.random_below(2_000_000) as f32 - 1e6) / (1.0 + at as f32);
    let xs: Vec<f32> = (0..n).map(some).collect();
    let ys: Vec<f32> = (0..n).map(some).collect();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let (x, y) = (context.alloc_words(&bits(&xs))?, context.alloc_words(&bits(&ys))?);
    context.launch(axpy, n, &[y.into(), x.into(), KernelArg::F32(0.37), KernelArg::U32(n)], stream)?;
    context.synchronize(stream)?;
    let want: Vec<f32> = xs.iter().zip(&ys).map(|(x, y)| 0.37 * x + y).collect();
    expect_slice_eq("the bits of the sums", &context.read_words(y, n as usize)?, &bits(&want))
}

fn rejected(context: &TestContext, shape: LaunchShape) -> CheckResult {
    let (stream, spin) = (context.stream()?, context.kernels()?.spin);
    let launched = context.launch_kernel(spin, shape, &[KernelArg::U64(0)], stream);
    expect_error_of(&format!("{shape:?}"), launched, InvalidValue)
}

fn empty_launch_shape_is_rejected(context: &TestContext) -> CheckResult {
    for axis in 0..3 {
        let (mut no_blocks, mut no_threads) = (LaunchShape::ONE, LaunchShape::ONE);
        no_blocks.grid[axis] = 0;
        no_threads.block[axis] = 0;
        rejected(context, no_blocks)?;
        rejected(context, no_threads)?;
    }
    Ok(())
}

fn oversized_launch_shape_is_rejected(context: &TestContext) -> CheckResult {
    rejected(context, LaunchShape { block: [2048, 1, 1], ..LaunchShape::ONE })?;
    rejected(context, LaunchShape { block: [64, 64, 1], ..LaunchShape::ONE })?;
    rejected(context, LaunchShape { grid: [1, 70_000, 1], ..LaunchShape::ONE })
}

fn loaded(context: &TestContext) -> CheckResult<ModuleId> {
    let module = context.driver.module_load(context.device_id, &SOURCE)?;
    context.track(Resource::Module(module));
    Ok(module)
}

fn unknown_function_name_is_not_found(context: &TestContext) -> CheckResult {
    let module = loaded(context)?;
    for name in ["nope", "", "spi", "spin2"] {
        expect_error(context.driver.function_get(module, name), NotFound)?;
    }
    let known = context.driver.function_get(module, "spin")?;
    expect_eq("a known function in a second query", context.driver.function_get(module, "spin")?, known)
}

fn invalid_source_is_rejected_with_the_compiler_log(context: &TestContext) -> CheckResult {
    const WRONG: KernelSource = KernelSource {
        name: "invalid on purpose",
        cuda: "extern \"C\" __global__ void invalid() { this is no kernel }",
        host_kernels: &[],
    };
    // The simulated GPU compiles nothing: there the function is not found.
    match context.driver.module_load(context.device_id, &WRONG) {
        Err(error) => {
            expect_eq("the code", error.code, InvalidSource)?;
            expect(error.detail.is_some_and(|log| log.contains("error")), "the error has the compiler's log")
        }
        Ok(module) => {
            context.track(Resource::Module(module));
            expect_eq("a driver that loads invalid source", context.driver.kind(), "sim")?;
            expect_error(context.driver.function_get(module, "invalid"), NotFound)
        }
    }
}

fn modules_are_independent(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let (first, second) = (loaded(context)?, loaded(context)?);
    expect(first != second, "two modules have different ids")?;
    let one = context.driver.function_get(first, "append")?;
    let two = context.driver.function_get(second, "append")?;
    context.launch_single(one, &[log.ptr.into(), KernelArg::U32(1)], stream)?;
    context.synchronize(stream)?;
    context.untrack(Resource::Module(first));
    context.driver.module_unload(first)?;
    context.launch_single(two, &[log.ptr.into(), KernelArg::U32(2)], stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2])
}

fn any_thread_may_load_and_launch(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let function = context.on_new_thread(|| -> CheckResult<FunctionId> {
        Ok(context.driver.function_get(loaded(context)?, "append")?)
    })?;
    context.launch_single(function, &[log.ptr.into(), KernelArg::U32(1)], stream)?;
    context.on_new_thread(|| context.launch_single(function, &[log.ptr.into(), KernelArg::U32(2)], stream))?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2])
}

fn unknown_functions_are_rejected(context: &TestContext) -> CheckResult {
    expect_rejected(context, ModuleId(u64::MAX), FunctionId(u64::MAX))
}

fn graphs_keep_their_modules_loaded(context: &TestContext) -> CheckResult {
    let (stream, ptr) = (context.stream()?, context.alloc_words(&[0])?);
    let module = loaded(context)?;
    let add = context.driver.function_get(module, "add_u32")?;
    let args = |value| [ptr.into(), KernelArg::U32(1), KernelArg::U32(value)];
    let first = context.capture(stream, || context.launch_single(add, &args(1), stream))?;
    let first_exec = context.instantiate(first)?;
    // Unloaded with an executable, a template, and a capture that use it.
    let second = context.capture(stream, || {
        context.launch_single(add, &args(10), stream)?;
        context.untrack(Resource::Module(module));
        Ok(context.driver.module_unload(module)?)
    })?;
    let execs = [first_exec, context.instantiate(first)?, context.instantiate(second)?];
    for exec in execs {
        context.replay(exec, stream)?;
    }
    expect_eq("the sum", context.read_words(ptr, 1)?, vec![12])?;
    // With others loaded and unloaded meanwhile.
    let other = loaded(context)?;
    context.untrack(Resource::Module(other));
    context.driver.module_unload(other)?;
    context.replay(execs[2], stream)?;
    expect_eq("the sum", context.read_words(ptr, 1)?, vec![22])
}

fn launched_kernels_complete_after_module_unload(context: &TestContext) -> CheckResult {
    let (stream, ptr) = (context.stream()?, context.alloc_words(&[0])?);
    let module = loaded(context)?;
    let add = context.driver.function_get(module, "add_u32")?;
    context.delay(stream)?;
    context.launch_single(add, &[ptr.into(), KernelArg::U32(1), KernelArg::U32(5)], stream)?;
    context.untrack(Resource::Module(module));
    context.driver.module_unload(module)?;
    context.synchronize(stream)?;
    expect_eq("what the kernel left", context.read_words(ptr, 1)?, vec![5])
}

fn unloaded_module_is_rejected(context: &TestContext) -> CheckResult {
    let module = loaded(context)?;
    let function = context.driver.function_get(module, "spin")?;
    context.untrack(Resource::Module(module));
    context.driver.module_unload(module)?;
    expect_rejected(context, module, function)
}

fn expect_rejected(context: &TestContext, module: ModuleId, function: FunctionId) -> CheckResult {
    let (driver, stream) = (&context.driver, context.stream()?);
    expect_error(driver.function_get(module, "spin"), InvalidHandle)?;
    let launched = context.launch_kernel(function, LaunchShape::ONE, &[KernelArg::U64(0)], stream);
    expect_error(launched, InvalidHandle)?;
    expect_error(driver.module_unload(module), InvalidHandle)
}
