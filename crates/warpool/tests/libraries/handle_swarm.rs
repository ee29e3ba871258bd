//! Random programs over pools of handles, beside a naive model: which handle whoever asks must get, and how many there
//! must be. Threads are real, and do what they are told one after the other, so each seed is one program.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use crate::common::machine;
use crate::common::rng::Rng;
use warpool::handle::{HandleLease, HandlePool, LibraryKind};
use warpool::{Device, Error, Result};

const POOLS: usize = 2;
const DEVICES: u32 = 2;
const THREADS: usize = 4;
const STEPS: usize = 120;

/// Handles that are numbers, counted over all devices of a pool.
#[derive(Clone, Default)]
struct Numbers {
    made: Arc<AtomicUsize>,
    unmade: Arc<AtomicUsize>,
}

impl LibraryKind for Numbers {
    type Handle = usize;

    fn name(&self) -> &'static str {
        "numbers"
    }

    fn create(&self, _: &Device) -> Result<usize> {
        Ok(self.made.fetch_add(1, Ordering::SeqCst))
    }

    fn destroy(&self, _: &Device, _: &usize) -> Result<()> {
        self.unmade.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A pool as it should be.
#[derive(Default)]
struct Model {
    made: usize,
    unmade: usize,
    closed: bool,
    /// By device.
    idle: BTreeMap<u32, Vec<usize>>,
    /// How many are out, by device.
    out: BTreeMap<u32, usize>,
}

impl Model {
    fn take(&mut self, device: u32) -> Option<usize> {
        if self.closed {
            return None;
        }
        *self.out.entry(device).or_default() += 1;
        Some(self.idle.entry(device).or_default().pop().unwrap_or_else(|| {
            self.made += 1;
            self.made - 1
        }))
    }

    fn put(&mut self, device: u32, handle: usize) {
        *self.out.get_mut(&device).expect("it was taken") -= 1;
        if !self.closed {
            self.idle.entry(device).or_default().push(handle);
        }
    }

    fn trim(&mut self, device: u32) -> usize {
        let gone = std::mem::take(self.idle.entry(device).or_default()).len();
        self.unmade += gone;
        gone
    }
}

type Pool = HandlePool<Numbers>;

/// A thread that fetches what it is told to.
struct Worker {
    orders: mpsc::Sender<(Pool, Device)>,
    answers: mpsc::Receiver<Result<usize>>,
    thread: JoinHandle<()>,
    /// What it holds, by pool and device, in the order of first use: in this order they come back.
    holds: Vec<(usize, u32, usize)>,
}

impl Worker {
    fn start() -> Self {
        let (orders, ordered) = mpsc::channel::<(Pool, Device)>();
        let (answer, answers) = mpsc::channel();
        let thread = thread::spawn(move || {
            for (pool, device) in ordered {
                let fetched = pool.current(&device).map(|handle| *handle);
                drop((pool, device));
                answer.send(fetched).expect("the test waits for it");
            }
        });
        Self { orders, answers, thread, holds: Vec::new() }
    }

    fn fetch(&self, pool: &Pool, device: &Device) -> Result<usize> {
        self.orders.send((pool.clone(), device.clone())).expect("the worker waits for orders");
        self.answers.recv().expect("an answer")
    }

    fn end(self, models: &mut [Model]) {
        drop(self.orders);
        self.thread.join().expect("a worker that ends well");
        for (pool, device, handle) in self.holds {
            models[pool].put(device, handle);
        }
    }
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let instance = machine(DEVICES).1;
    let devices: Vec<Device> = instance.devices().collect();
    let kinds: Vec<Numbers> = (0..POOLS).map(|_| Numbers::default()).collect();
    let pools: Vec<Pool> = kinds.iter().map(|kind| HandlePool::new(&instance, kind.clone())).collect();
    let mut models: Vec<Model> = (0..POOLS).map(|_| Model::default()).collect();
    let mut workers: Vec<Worker> = (0..THREADS).map(|_| Worker::start()).collect();
    let mut leases: Vec<(usize, HandleLease<Numbers>, u32)> = Vec::new();
    let refused = || Err(Error::HandlePoolClosed { library: "numbers" });

    for step in 0..STEPS {
        let told = format!("seed {seed}, step {step}");
        let (p, d) = (rng.below(POOLS), rng.below(DEVICES as usize));
        let (pool, device, number) = (&pools[p], &devices[d], d as u32);
        match rng.below(100) {
            0..50 => {
                let worker = &mut workers[rng.below(THREADS)];
                let got = worker.fetch(pool, device);
                let has = worker.holds.iter().find(|held| (held.0, held.1) == (p, number)).map(|held| held.2);
                let model = &mut models[p];
                let want = if model.closed { None } else { has.or_else(|| model.take(number)) };
                assert_eq!(got, want.map_or_else(refused, Ok), "{told}: a thread's handle");
                if let (None, Some(handle)) = (has, want) {
                    worker.holds.push((p, number, handle));
                }
            }
            50..65 => {
                let got = pool.lease(device);
                let want = models[p].take(number);
                assert_eq!(
                    got.as_ref().map(|lease| **lease).map_err(Clone::clone),
                    want.map_or_else(refused, Ok),
                    "{told}: a lease"
                );
                leases.extend(got.ok().map(|lease| (p, lease, number)));
            }
            65..80 if !leases.is_empty() => {
                let (p, lease, number) = leases.swap_remove(rng.below(leases.len()));
                models[p].put(number, *lease);
                if rng.below(2) == 0 {
                    drop(lease);
                } else {
                    thread::spawn(move || drop(lease)).join().expect("a thread that ends well");
                }
            }
            80..92 => {
                let ended = std::mem::replace(&mut workers[rng.below(THREADS)], Worker::start());
                ended.end(&mut models);
            }
            92..98 => assert_eq!(pool.trim(device), Ok(models[p].trim(number)), "{told}: trim"),
            98 if step > STEPS / 2 => {
                pool.clone().close().expect("the kind never fails");
                models[p].closed = true;
                (0..DEVICES).for_each(|device| _ = models[p].trim(device));
            }
            _ => {}
        }
        for ((pool, model), kind) in pools.iter().zip(&models).zip(&kinds) {
            for device in &devices {
                let idle = model.idle.get(&device.index()).map_or(0, Vec::len);
                let out = model.out.get(&device.index()).copied().unwrap_or(0);
                assert_eq!((pool.idle(device), pool.alive(device)), (idle, idle + out), "{told}: counts");
            }
            let counted = [&kind.made, &kind.unmade].map(|counter| counter.load(Ordering::SeqCst));
            assert_eq!(counted, [model.made, model.unmade], "{told}: made and unmade");
        }
    }

    // Everything comes back, and closing leaves nothing but what came back too late.
    workers.into_iter().for_each(|worker| worker.end(&mut models));
    for (p, lease, number) in leases {
        models[p].put(number, *lease);
        drop(lease);
    }
    for ((pool, model), kind) in pools.into_iter().zip(&mut models).zip(&kinds) {
        assert!(devices.iter().all(|device| pool.idle(device) == pool.alive(device)), "seed {seed}: all are back");
        pool.close().expect("the kind never fails");
        (0..DEVICES).for_each(|device| _ = model.trim(device));
        assert_eq!(kind.unmade.load(Ordering::SeqCst), model.unmade, "seed {seed}: all are unmade");
    }
    drop(devices);
    instance.close().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

#[test]
fn random_programs_get_the_handles_that_they_should() {
    (0..200).for_each(run);
}
