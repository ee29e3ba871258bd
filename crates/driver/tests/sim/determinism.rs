//! Seeds: a correct program gives the same memory with every seed, unordered work runs in any order, and the same seed
//! gives the same run.

use std::sync::{Arc, Mutex};

use crate::fixture::{DEVICE, Fixture, KERNELS};
use crate::scale::scaled;
use fastrand::Rng;
use warpool_driver::decorate::Recording;
use warpool_driver::sim::{Latencies, SimConfig, SimDriver, Timing};
use warpool_driver::*;

const STREAMS: usize = 5;
const CELLS: usize = 8;

/// Random work of five streams on eight cells, launched directly and in graphs, with an event wherever two streams use
/// the same cell. Returns the contents of the cells, and what a sequential program would have left there.
fn correct_program(gpu: &SimDriver, program_seed: u64) -> Result<(Vec<u32>, Vec<u32>)> {
    let mut rng = Rng::with_seed(program_seed);
    let module = gpu.module_load(DEVICE, &KERNELS)?;
    let (add, sum) = (gpu.function_get(module, "add")?, gpu.function_get(module, "sum")?);
    let streams: Vec<StreamId> =
        (0..STREAMS).map(|_| gpu.stream_create(DEVICE, StreamOptions::default())).collect::<Result<_>>()?;
    let memory = gpu.mem_alloc(DEVICE, 4 * CELLS as u64)?;
    let cell = |index: usize| memory.offset(4 * index as u64);
    gpu.fill(memory, Pattern::U32(0), CELLS as u64, streams[0])?;
    gpu.stream_synchronize(streams[0])?;

    let mut model = vec![0u32; CELLS];
    let mut last_event: Vec<Option<EventId>> = vec![None; CELLS];
    for step in 0..40u32 {
        let stream = streams[rng.usize(..STREAMS)];
        let (to, from) = (rng.usize(..CELLS), rng.usize(..CELLS));
        for event in [last_event[to], last_event[from]].into_iter().flatten() {
            gpu.stream_wait_event(stream, event, EventScope::Plain)?;
        }
        let work = |stream| match step % 3 {
            0 => {
                let args = [cell(to).into(), KernelArg::U32(1), KernelArg::U32(step)];
                gpu.kernel_launch(add, LaunchShape::ONE, &args, stream)
            }
            1 => gpu.kernel_launch(
                sum,
                LaunchShape::ONE,
                &[cell(to).into(), cell(from).into(), KernelArg::U32(1)],
                stream,
            ),
            _ if to != from => gpu.copy(cell(to).into(), cell(from).into(), 4, stream),
            _ => Ok(()),
        };
        let by_graph = rng.usize(..4) == 0;
        if by_graph {
            let aside = gpu.stream_create(DEVICE, StreamOptions::default())?;
            gpu.capture_begin(aside, CaptureMode::Relaxed)?;
            work(aside)?;
            let graph = gpu.capture_end(aside)?;
            let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
            gpu.graph_launch(exec, stream)?;
            gpu.graph_exec_destroy(exec)?;
            gpu.graph_destroy(graph)?;
            gpu.stream_destroy(aside)?;
        } else {
            work(stream)?;
        }
        match step % 3 {
            0 => model[to] = model[to].wrapping_add(step),
            1 => model[to] = model[to].wrapping_add(model[from]),
            _ => model[to] = model[from],
        }
        let event = gpu.event_create(DEVICE, EventOptions::default())?;
        gpu.event_record(event, stream, EventScope::Plain)?;
        last_event[to] = Some(event);
        last_event[from] = Some(event);
    }
    gpu.device_synchronize(DEVICE)?;
    let mut bytes = vec![0; 4 * CELLS];
    gpu.download(DEVICE, memory, &mut bytes)?;
    let cells = bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
    Ok((cells, model))
}

#[test]
fn a_correct_program_gives_the_same_memory_with_every_seed() -> Result<()> {
    for seed in 0..scaled(100) {
        let gpu = SimDriver::new(SimConfig::default().with_seed(seed));
        let (cells, model) = correct_program(&gpu, 7)?;
        assert_eq!(cells, model, "seed {seed}");
        assert!(gpu.hazards().is_empty(), "seed {seed}: {:#?}", gpu.hazards());
    }
    Ok(())
}

#[test]
fn correct_programs_agree_with_sequential_execution() -> Result<()> {
    for program in 0..scaled(50) {
        let gpu = SimDriver::new(SimConfig::default().with_seed(program * 31 + 5));
        let (cells, model) = correct_program(&gpu, program)?;
        assert_eq!(cells, model, "program {program}");
        assert!(gpu.hazards().is_empty(), "program {program}: {:#?}", gpu.hazards());
    }
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_run() -> Result<()> {
    let run = |seed| -> Result<_> {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_seed(seed)));
        let driver = Recording::new(Arc::clone(&sim) as Arc<dyn Driver>);
        let order = finishing_order(&driver)?;
        Ok((order, driver.log(), sim.now()))
    };
    for seed in 0..20 {
        let (first, second) = (run(seed)?, run(seed)?);
        assert_eq!(first.0, second.0, "seed {seed}");
        assert!(first.1.diff(&second.1).is_none(), "seed {seed}");
        assert_eq!(first.2, second.2, "seed {seed}");
    }
    Ok(())
}

/// The order in which work of three unordered streams finishes.
fn finishing_order(driver: &dyn Driver) -> Result<Vec<usize>> {
    let order = Arc::new(Mutex::new(Vec::new()));
    for index in 0..3 {
        let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
        let memory = driver.mem_alloc(DEVICE, 64 << 20)?;
        for _ in 0..3 {
            driver.fill(memory, Pattern::U8(1), 1 << 20, stream)?;
        }
        let order = Arc::clone(&order);
        driver.stream_host_callback(stream, Arc::new(move || order.lock().expect("no panic").push(index)))?;
    }
    driver.device_synchronize(DEVICE)?;
    let order = order.lock().expect("no panic").clone();
    Ok(order)
}

#[test]
fn unordered_streams_finish_in_every_order() -> Result<()> {
    let mut orders: Vec<Vec<usize>> = Vec::new();
    for seed in 0..64 {
        // Calls take no time, so that the streams start together.
        let mut config = SimConfig::default().with_seed(seed);
        config.latencies = Latencies::flat(0);
        let order = finishing_order(&SimDriver::new(config))?;
        if !orders.contains(&order) {
            orders.push(order);
        }
    }
    assert_eq!(orders.len(), 6, "all orders of three streams occur: {orders:?}");
    Ok(())
}

#[test]
fn without_random_durations_work_takes_what_the_cost_model_says() -> Result<()> {
    let fixture = Fixture::new(SimConfig::default().with_timing(Timing::Model))?;
    let (start, end) = {
        let timed = EventOptions { timing: true, ..EventOptions::default() };
        (fixture.gpu.event_create(DEVICE, timed)?, fixture.gpu.event_create(DEVICE, timed)?)
    };
    let big = fixture.gpu.mem_alloc(DEVICE, 1 << 30)?;
    fixture.gpu.event_record(start, fixture.one, EventScope::Plain)?;
    fixture.gpu.copy(big.into(), big.offset(1 << 29).into(), 1 << 20, fixture.one)?;
    fixture.gpu.event_record(end, fixture.one, EventScope::Plain)?;
    fixture.gpu.event_synchronize(end)?;
    let millis = fixture.gpu.event_elapsed_ms(start, end)?;
    // 1 MiB at 2.15 TB/s and 1.5 us to start; the launch itself comes a little later than the first event.
    assert!((0.0019..0.0040).contains(&millis), "{millis} ms");
    Ok(())
}
