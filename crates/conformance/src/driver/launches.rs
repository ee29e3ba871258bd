//! Modules and kernels.

use super::Check;
use super::bench::Bench;
use super::kernels::PLAIN;
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq, expect_same};
use crate::launch::launch_kernel;
use warpool_driver::ErrorCode::{InvalidHandle, InvalidSource, InvalidValue, NotFound};
use warpool_driver::{FunctionId, KernelArg, KernelSource, LaunchShape, ModuleId};

pub(super) const CHECKS: &[Check] = super::checks![
    arguments_of_every_type_arrive,
    shapes_arrive,
    every_element_is_visited,
    floats_are_computed_exactly,
    an_empty_shape_is_refused,
    a_shape_beyond_the_device_is_refused,
    an_unknown_name_is_not_found,
    wrong_source_is_refused_with_a_reason,
    modules_do_not_disturb_each_other,
    any_thread_may_load_and_launch,
    functions_never_made_are_unknown,
    ; provoking:
    an_unloaded_module_is_unknown,
];

fn arguments_of_every_type_arrive(bench: &Bench<'_>) -> Checked {
    let (stream, out) = (bench.stream()?, bench.memory(48)?);
    let echo = bench.kernels()?.echo;
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
        bench.launch_one(echo, &args, stream)?;
        bench.sync(stream)?;
        let want =
            [u64::from(a), i64::from(b).cast_unsigned(), c, d.cast_unsigned(), u64::from(e.to_bits()), f.to_bits()];
        let want: Vec<u8> = want.iter().flat_map(|word| word.to_le_bytes()).collect();
        expect_same("the arguments as the kernel saw them", &bench.bytes_at(out, 48)?, &want)?;
    }
    Ok(())
}

fn shapes_arrive(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let function = bench.kernels()?.shape;
    for (grid, block) in
        [([1, 1, 1], [1, 1, 1]), ([2, 3, 4], [5, 6, 7]), ([100, 1, 2], [1024, 1, 1]), ([1, 1, 9], [1, 1, 64])]
    {
        let out = bench.words_of(&[0; 7])?;
        let shape = LaunchShape { grid, block, shared_bytes: 1024 };
        launch_kernel(bench.driver, function, shape, &[out.into()], stream)?;
        bench.sync(stream)?;
        let threads = shape.threads() as u32;
        let want = [threads, grid[0], grid[1], grid[2], block[0], block[1], block[2]];
        expect_same("threads, grid and block", &bench.words_at(out, 7)?, &want)?;
    }
    Ok(())
}

fn every_element_is_visited(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let fill_index = bench.kernels()?.fill_index;
    for n in [1_u32, 255, 256, 257, 100_003] {
        let data = bench.words_of(&vec![u32::MAX; n as usize + 1])?;
        bench.launch(fill_index, n, &[data.into(), KernelArg::U32(n)], stream)?;
        bench.sync(stream)?;
        let want: Vec<u32> = (0..n).chain([u32::MAX]).collect();
        expect_same("the elements and the one behind them", &bench.words_at(data, n as usize + 1)?, &want)?;
    }
    Ok(())
}

fn floats_are_computed_exactly(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 1000_u32);
    let axpy = bench.kernels()?.axpy_f32;
    let some = |at: u32| (bench.below(2_000_000) as f32 - 1e6) / (1.0 + at as f32);
    let xs: Vec<f32> = (0..n).map(some).collect();
    let ys: Vec<f32> = (0..n).map(some).collect();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let (x, y) = (bench.words_of(&bits(&xs))?, bench.words_of(&bits(&ys))?);
    bench.launch(axpy, n, &[y.into(), x.into(), KernelArg::F32(0.37), KernelArg::U32(n)], stream)?;
    bench.sync(stream)?;
    let want: Vec<f32> = xs.iter().zip(&ys).map(|(x, y)| 0.37 * x + y).collect();
    expect_same("the sums, bit by bit", &bench.words_at(y, n as usize)?, &bits(&want))
}

fn refused(bench: &Bench<'_>, shape: LaunchShape) -> Checked {
    let (stream, spin) = (bench.stream()?, bench.kernels()?.spin);
    let launched = launch_kernel(bench.driver, spin, shape, &[KernelArg::U64(0)], stream);
    expect_code_of(&format!("{shape:?}"), launched, InvalidValue)
}

fn an_empty_shape_is_refused(bench: &Bench<'_>) -> Checked {
    for axis in 0..3 {
        let (mut no_blocks, mut no_threads) = (LaunchShape::ONE, LaunchShape::ONE);
        no_blocks.grid[axis] = 0;
        no_threads.block[axis] = 0;
        refused(bench, no_blocks)?;
        refused(bench, no_threads)?;
    }
    Ok(())
}

fn a_shape_beyond_the_device_is_refused(bench: &Bench<'_>) -> Checked {
    refused(bench, LaunchShape { block: [2048, 1, 1], ..LaunchShape::ONE })?;
    refused(bench, LaunchShape { block: [64, 64, 1], ..LaunchShape::ONE })?;
    refused(bench, LaunchShape { grid: [1, 70_000, 1], ..LaunchShape::ONE })
}

fn loaded(bench: &Bench<'_>) -> Checked<ModuleId> {
    let module = bench.driver.module_load(bench.device, &PLAIN)?;
    bench.own(Owned::Module(module));
    Ok(module)
}

fn an_unknown_name_is_not_found(bench: &Bench<'_>) -> Checked {
    let module = loaded(bench)?;
    for name in ["nope", "", "spi", "spin2"] {
        expect_code(bench.driver.function_get(module, name), NotFound)?;
    }
    let known = bench.driver.function_get(module, "spin")?;
    expect_eq("a known one, asked again", bench.driver.function_get(module, "spin")?, known)
}

fn wrong_source_is_refused_with_a_reason(bench: &Bench<'_>) -> Checked {
    const WRONG: KernelSource = KernelSource {
        name: "wrong on purpose",
        cuda: "extern \"C\" __global__ void broken() { this is no kernel }",
        mirrors: &[],
    };
    // A simulated device compiles nothing: there the kernel is simply not to be found.
    match bench.driver.module_load(bench.device, &WRONG) {
        Err(error) => {
            expect_eq("the code", error.code, InvalidSource)?;
            expect(error.detail.is_some_and(|log| log.contains("error")), "the compiler's log")
        }
        Ok(module) => {
            bench.own(Owned::Module(module));
            expect_eq("a backend that loads wrong source", bench.driver.kind(), "sim")?;
            expect_code(bench.driver.function_get(module, "broken"), NotFound)
        }
    }
}

fn modules_do_not_disturb_each_other(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let (first, second) = (loaded(bench)?, loaded(bench)?);
    expect(first != second, "modules of their own")?;
    let one = bench.driver.function_get(first, "append")?;
    let two = bench.driver.function_get(second, "append")?;
    bench.launch_one(one, &[log.ptr.into(), KernelArg::U32(1)], stream)?;
    bench.sync(stream)?;
    bench.disown(Owned::Module(first));
    bench.driver.module_unload(first)?;
    bench.launch_one(two, &[log.ptr.into(), KernelArg::U32(2)], stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2])
}

fn any_thread_may_load_and_launch(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let function =
        bench.elsewhere(|| -> Checked<FunctionId> { Ok(bench.driver.function_get(loaded(bench)?, "append")?) })?;
    bench.launch_one(function, &[log.ptr.into(), KernelArg::U32(1)], stream)?;
    bench.elsewhere(|| bench.launch_one(function, &[log.ptr.into(), KernelArg::U32(2)], stream))?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2])
}

fn functions_never_made_are_unknown(bench: &Bench<'_>) -> Checked {
    unknown(bench, ModuleId(u64::MAX), FunctionId(u64::MAX))
}

fn an_unloaded_module_is_unknown(bench: &Bench<'_>) -> Checked {
    let module = loaded(bench)?;
    let function = bench.driver.function_get(module, "spin")?;
    bench.disown(Owned::Module(module));
    bench.driver.module_unload(module)?;
    unknown(bench, module, function)
}

fn unknown(bench: &Bench<'_>, module: ModuleId, function: FunctionId) -> Checked {
    let (driver, stream) = (bench.driver, bench.stream()?);
    expect_code(driver.function_get(module, "spin"), InvalidHandle)?;
    let launched = launch_kernel(driver, function, LaunchShape::ONE, &[KernelArg::U64(0)], stream);
    expect_code(launched, InvalidHandle)?;
    expect_code(driver.module_unload(module), InvalidHandle)
}
