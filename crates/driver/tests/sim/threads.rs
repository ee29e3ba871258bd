//! Host threads on one simulated driver: nothing hangs, panics or leaks. The system decides the interleaving, so every
//! run is different; the assertions are true for all.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::fixture::{DEVICE, KERNELS};
use crate::scale::scaled;
use fastrand::Rng;
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::*;

const THREADS: u64 = 8;

/// The state shared by the threads.
struct Shared {
    gpu: SimDriver,
    /// Every thread records, waits for, queries and replaces these.
    events: Vec<Mutex<EventId>>,
    add: FunctionId,
    /// To a thread that answers every message. Callbacks wait for the answer, without the lock of the driver.
    messages: Mutex<Sender<Sender<()>>>,
}

/// The work of one thread: streams and memory of its own, shared events.
fn worker(shared: &Shared, seed: u64) -> Result<()> {
    let gpu = &shared.gpu;
    let mut rng = Rng::with_seed(seed);
    let options = |rng: &mut Rng| StreamOptions { non_blocking: rng.usize(..3) > 0, priority: 0 };
    let mut streams = vec![gpu.stream_per_thread(DEVICE)?];
    for _ in 0..2 {
        streams.push(gpu.stream_create(DEVICE, options(&mut rng))?);
    }
    let memory = gpu.mem_alloc(DEVICE, 4096)?;
    let pinned = gpu.host_alloc(DEVICE, 4096, HostOptions::default())?;
    let pool = gpu.pool_default(DEVICE)?;
    for _ in 0..scaled(200) {
        let index = rng.usize(..streams.len());
        let stream = streams[index];
        let event = &shared.events[rng.usize(..shared.events.len())];
        // Locked only to read the id: the event may be destroyed by the time of the call, which is only an error.
        let shared_event = *event.lock().expect("no panic");
        match rng.usize(..15) {
            0 | 1 => gpu.fill(memory, Pattern::U8(1), 4096, stream)?,
            2 => gpu.copy(pinned.into(), memory.into(), 4096, stream)?,
            3 => gpu.kernel_launch(
                shared.add,
                LaunchShape::ONE,
                &[memory.into(), KernelArg::U32(16), KernelArg::U32(1)],
                stream,
            )?,
            4 => may_be_destroyed(gpu.event_record(shared_event, stream, EventScope::Plain))?,
            5 => may_be_destroyed(gpu.stream_wait_event(stream, shared_event, EventScope::Plain))?,
            6 => may_be_destroyed(gpu.event_synchronize(shared_event))?,
            7 => may_be_destroyed(gpu.event_query(shared_event).map(drop))?,
            8 => {
                let fresh = gpu.event_create(DEVICE, EventOptions::default())?;
                let old = std::mem::replace(&mut *event.lock().expect("no panic"), fresh);
                gpu.event_destroy(old)?;
            }
            9 if index > 0 => {
                streams[index] = gpu.stream_create(DEVICE, options(&mut rng))?;
                gpu.stream_destroy(stream)?;
            }
            10 => {
                let (reply, answer) = channel();
                let messages = shared.messages.lock().expect("no panic").clone();
                let channels = Mutex::new((messages, reply, answer));
                gpu.stream_host_callback(
                    stream,
                    Arc::new(move || {
                        let (messages, reply, answer) = &*channels.lock().expect("no panic");
                        messages.send(reply.clone()).expect("the answering thread runs to the end");
                        answer.recv_timeout(Duration::from_secs(60)).expect("it answers");
                    }),
                )?;
            }
            11 => {
                let ptr = gpu.pool_alloc(pool, 8192, stream)?;
                gpu.fill(ptr, Pattern::U32(7), 2048, stream)?;
                gpu.pool_free(ptr, stream)?;
            }
            12 => {
                let aside = gpu.stream_create(DEVICE, StreamOptions::default())?;
                gpu.capture_begin(aside, CaptureMode::ThreadLocal)?;
                for _ in 0..rng.usize(..3) {
                    gpu.fill(memory, Pattern::U8(3), 64, aside)?;
                }
                let graph = gpu.capture_end(aside)?;
                let exec = gpu.graph_instantiate(graph, InstantiateOptions::default())?;
                gpu.graph_launch(exec, stream)?;
                gpu.graph_exec_destroy(exec)?;
                gpu.graph_destroy(graph)?;
                gpu.stream_destroy(aside)?;
            }
            13 => gpu.stream_synchronize(stream)?,
            _ => {
                let busy = gpu.stream_query(stream)?;
                let mut bytes = [0; 16];
                if busy {
                    gpu.host_read(pinned, &mut bytes)?;
                }
            }
        }
    }
    for &stream in &streams[1..] {
        gpu.stream_destroy(stream)?;
    }
    gpu.mem_free(memory)?;
    gpu.host_free(pinned)
}

/// Another thread may have destroyed it first.
fn may_be_destroyed(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.code == ErrorCode::InvalidHandle => Ok(()),
        other => other,
    }
}

#[test]
fn eight_threads_neither_hang_nor_leak() -> Result<()> {
    for seed in 0..3u64 {
        let mut config = SimConfig::default().with_seed(seed);
        // Short queues, so that calls wait.
        config.queue_depth = [3, 16, 1024][seed as usize];
        let gpu = SimDriver::new(config);
        let add = gpu.function_get(gpu.module_load(DEVICE, &KERNELS)?, "add")?;
        let start = gpu.object_counts();
        let events =
            (0..4).map(|_| gpu.event_create(DEVICE, EventOptions::default()).map(Mutex::new)).collect::<Result<_>>()?;
        let (messages, received) = channel::<Sender<()>>();
        let shared = Shared { gpu, events, add, messages: Mutex::new(messages) };
        std::thread::scope(|scope| {
            scope.spawn(move || received.iter().for_each(|reply| reply.send(()).expect("a callback waits")));
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let shared = &shared;
                    scope.spawn(move || worker(shared, seed * 1000 + thread))
                })
                .collect();
            for worker in workers {
                worker.join().expect("no panic").unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            shared.gpu.device_synchronize(DEVICE).expect("the device works");
            // Without a sender the answering thread ends.
            *shared.messages.lock().expect("no panic") = channel().0;
        });
        for event in &shared.events {
            shared.gpu.event_destroy(*event.lock().expect("no panic"))?;
        }
        assert_eq!(shared.gpu.object_counts(), start, "seed {seed}");
    }
    Ok(())
}
