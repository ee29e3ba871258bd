//! Random programs over pools of handles, compared with a naive model: which handle each call returns, and how many
//! there are. The threads are real, but work one at a time, so each seed is one program.

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
    created: Arc<AtomicUsize>,
    destroyed: Arc<AtomicUsize>,
}

impl LibraryKind for Numbers {
    type Handle = usize;

    fn name(&self) -> &'static str {
        "numbers"
    }

    fn create(&self, _: &Device) -> Result<usize> {
        Ok(self.created.fetch_add(1, Ordering::SeqCst))
    }

    fn destroy(&self, _: &Device, _: &usize) -> Result<()> {
        self.destroyed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// The expected state of a pool.
#[derive(Default)]
struct Model {
    created: usize,
    destroyed: usize,
    closed: bool,
    /// By device.
    idle: BTreeMap<u32, Vec<usize>>,
    /// How many are in use, by device.
    out: BTreeMap<u32, usize>,
}

impl Model {
    fn take(&mut self, device: u32) -> Option<usize> {
        if self.closed {
            return None;
        }
        *self.out.entry(device).or_default() += 1;
        Some(self.idle.entry(device).or_default().pop().unwrap_or_else(|| {
            self.created += 1;
            self.created - 1
        }))
    }

    fn put(&mut self, device: u32, handle: usize) {
        *self.out.get_mut(&device).expect("it was taken") -= 1;
        if !self.closed {
            self.idle.entry(device).or_default().push(handle);
        }
    }

    fn trim(&mut self, device: u32) -> usize {
        let idle = std::mem::take(self.idle.entry(device).or_default()).len();
        self.destroyed += idle;
        idle
    }
}

type Pool = HandlePool<Numbers>;

/// A thread that fetches handles on request.
struct Worker {
    requests: mpsc::Sender<(Pool, Device)>,
    results: mpsc::Receiver<Result<usize>>,
    thread: JoinHandle<()>,
    /// Its handles, by pool and device, in the order of first use: in this order they are returned.
    owned: Vec<(usize, u32, usize)>,
}

impl Worker {
    fn start() -> Self {
        let (requests, requested) = mpsc::channel::<(Pool, Device)>();
        let (result, results) = mpsc::channel();
        let thread = thread::spawn(move || {
            for (pool, device) in requested {
                let fetched = pool.current(&device).map(|handle| *handle);
                drop((pool, device));
                result.send(fetched).expect("the test waits for it");
            }
        });
        Self { requests, results, thread, owned: Vec::new() }
    }

    fn fetch(&self, pool: &Pool, device: &Device) -> Result<usize> {
        self.requests.send((pool.clone(), device.clone())).expect("the worker waits for requests");
        self.results.recv().expect("an result")
    }

    fn end(self, models: &mut [Model]) {
        drop(self.requests);
        self.thread.join().expect("a worker that ends well");
        for (pool, device, handle) in self.owned {
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
    let closed_error = || Err(Error::HandlePoolClosed { library: "numbers" });

    for step in 0..STEPS {
        let about = format!("seed {seed}, step {step}");
        let (p, d) = (rng.below(POOLS), rng.below(DEVICES as usize));
        let (pool, device, number) = (&pools[p], &devices[d], d as u32);
        match rng.below(100) {
            0..50 => {
                let worker = &mut workers[rng.below(THREADS)];
                let got = worker.fetch(pool, device);
                let has = worker.owned.iter().find(|held| (held.0, held.1) == (p, number)).map(|held| held.2);
                let model = &mut models[p];
                let expected = if model.closed { None } else { has.or_else(|| model.take(number)) };
                assert_eq!(got, expected.map_or_else(closed_error, Ok), "{about}: a thread's handle");
                if let (None, Some(handle)) = (has, expected) {
                    worker.owned.push((p, number, handle));
                }
            }
            50..65 => {
                let got = pool.lease(device);
                let expected = models[p].take(number);
                assert_eq!(
                    got.as_ref().map(|lease| **lease).map_err(Clone::clone),
                    expected.map_or_else(closed_error, Ok),
                    "{about}: a lease"
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
            92..98 => assert_eq!(pool.trim(device), Ok(models[p].trim(number)), "{about}: trim"),
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
                assert_eq!((pool.idle(device), pool.alive(device)), (idle, idle + out), "{about}: counts");
            }
            let counted = [&kind.created, &kind.destroyed].map(|counter| counter.load(Ordering::SeqCst));
            assert_eq!(counted, [model.created, model.destroyed], "{about}: created and destroyed");
        }
    }

    // All handles are returned; close destroys all that were returned before.
    workers.into_iter().for_each(|worker| worker.end(&mut models));
    for (p, lease, number) in leases {
        models[p].put(number, *lease);
        drop(lease);
    }
    for ((pool, model), kind) in pools.into_iter().zip(&mut models).zip(&kinds) {
        assert!(devices.iter().all(|device| pool.idle(device) == pool.alive(device)), "seed {seed}: all are returned");
        pool.close().expect("the kind never fails");
        (0..DEVICES).for_each(|device| _ = model.trim(device));
        assert_eq!(kind.destroyed.load(Ordering::SeqCst), model.destroyed, "seed {seed}: all are destroyed");
    }
    drop(devices);
    instance.close().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

#[test]
fn random_programs_match_the_model() {
    (0..200).for_each(run);
}
