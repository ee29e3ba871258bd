//! Programs over typed memory: copies, fills, kernels and random numbers on parts of vectors, in several streams and in
//! graphs. Typed calls order themselves, so the contents are those of making all calls one after the other. They are
//! compared with a model on the host.

mod graphs;
mod operation;
mod pinned;

use std::collections::BTreeMap;

use warpool::generator::Generator;
use warpool::memory::{HostAllocator, MemPoolId, PinnedSettings};
use warpool::{DeviceVec, Stream};

use self::graphs::Captured;
use self::operation::Operation;
use self::pinned::Pinned;
use crate::allocators::{Allocators, Subject};
use crate::context::Context;
use crate::machine::{Machine, Outcome, device_id};
use crate::unsafe_calls::{Add, load_add};

const STREAMS: usize = 4;
const VECTORS: usize = 4;

struct Run<'a> {
    context: &'a mut Context,
    machine: Machine,
    subject: Subject,
    host: HostAllocator,
    add: Add,
    generator: Generator,
    /// Draws the same numbers, never in a graph.
    twin: Generator,
    /// By number.
    vectors: BTreeMap<usize, DeviceVec<u32>>,
    /// The contents of each vector. Graphs may use one that the program has dropped.
    models: BTreeMap<usize, Vec<u32>>,
    pinned: Vec<Pinned>,
    graphs: Vec<Captured>,
    next: usize,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let machine = Machine::new(context, 1, STREAMS);
    let subject = Subject::draw(context, &machine, Allocators::All);
    let host = HostAllocator::new(&machine.instance, PinnedSettings::default());
    let device = machine.device(0);
    let [generator, twin] = [0, 1].map(|_| {
        let generator = Generator::new(&device).unwrap();
        generator.set_seed(context.seed).unwrap();
        generator
    });
    let add = load_add(&device).unwrap();
    drop(device);
    let mut run = Run {
        context,
        machine,
        subject,
        host,
        add,
        generator,
        twin,
        vectors: BTreeMap::new(),
        models: BTreeMap::new(),
        pinned: Vec::new(),
        graphs: Vec::new(),
        next: 1,
    };
    for _ in 0..80 + run.context.rng.below(200) {
        run.step();
    }
    run.finish();
}

impl Run<'_> {
    fn step(&mut self) {
        match self.context.rng.below(40) {
            0..3 => self.create(),
            3..18 => self.operate(),
            18..22 => self.read(),
            22 => self.drop_vector(),
            23..28 => self.use_pinned(),
            28 | 29 => self.capture(),
            30..36 => self.replay(),
            36 => self.drop_graph(),
            37 | 38 => {
                let stream = self.any_stream();
                self.machine.pause_or_resume(&stream, self.context.rng.one_in(2));
            }
            _ => {
                self.machine.synchronize();
                self.machine.check_contents();
            }
        }
    }

    fn any_stream(&mut self) -> Stream {
        self.machine.stream(0, self.context.rng.below(STREAMS)).clone()
    }

    fn any_vector(&mut self) -> Option<usize> {
        let all: Vec<usize> = self.vectors.keys().copied().collect();
        (!all.is_empty()).then(|| self.context.rng.pick(&all))
    }

    /// A vector of zeroes, or of known elements.
    fn create(&mut self) {
        if self.vectors.len() >= VECTORS {
            return;
        }
        let (stream, len) = (self.any_stream(), 1 + self.context.rng.below(2000));
        let model = match self.context.rng.one_in(2) {
            true => vec![0; len],
            false => vec![self.context.rng.u32(); len],
        };
        self.context.step(format!("vector {} of {len} elements on {}", self.next, stream.id()));
        let allocator = &self.subject.allocator;
        let outcome = self.machine.call(self.context, || match model[0] {
            0 => DeviceVec::zeroed(allocator, len, &stream),
            _ => DeviceVec::from_slice(allocator, &model, &stream),
        });
        let Outcome::Done(vector) = outcome else { return };
        self.context.counts.allocations += 1;
        self.vectors.insert(self.next, vector);
        self.models.insert(self.next, model);
        self.next += 1;
    }

    fn operate(&mut self) {
        let Some(operation) = self.draw_operation() else { return };
        let stream = self.any_stream();
        self.context.step(format!("{operation:?} in {}", stream.id()));
        if let Operation::Random { .. } = operation {
            // Without faults, so that the twin draws the same amount.
            self.queue(&operation, &stream).unwrap();
            return self.apply(&operation);
        }
        let armed = self.machine.arm(self.context);
        let outcome = crate::caught::caught(|| self.queue(&operation, &stream));
        match self.machine.settle(self.context, armed, outcome, false) {
            Outcome::Done(()) => self.apply(&operation),
            _ => self.overwrite(operation.target()),
        }
    }

    /// After a call that may have been carried out in part: all elements are known again.
    fn overwrite(&mut self, number: usize) {
        let stream = self.any_stream();
        self.context.step(format!("  vector {number} is overwritten"));
        let Some(vector) = self.vectors.get_mut(&number) else { return };
        stream.fill(vector, 7).unwrap();
        self.models.get_mut(&number).expect("every vector has a model").fill(7);
    }

    /// A stream reads a part of a vector.
    fn read(&mut self) {
        let Some(number) = self.any_vector() else { return };
        let (stream, range) = (self.any_stream(), self.draw_range(self.models[&number].len()));
        self.context.step(format!("read {range:?} of vector {number} in {}", stream.id()));
        let part = self.vectors[&number].slice(range.clone()).unwrap();
        let read = self.machine.call(self.context, || stream.to_vec(part));
        if let Outcome::Done(read) = read {
            expect_elements(&read, &self.models[&number][range], number);
        }
    }

    fn drop_vector(&mut self) {
        let Some(number) = self.any_vector() else { return };
        self.context.step(format!("vector {number} is dropped"));
        self.vectors.remove(&number);
        self.forget_models();
    }

    /// Forgets models of vectors that nobody uses any more.
    fn forget_models(&mut self) {
        let Self { models, vectors, graphs, .. } = self;
        models.retain(|number, _| vectors.contains_key(number) || graphs.iter().any(|graph| graph.uses(*number)));
    }

    /// Checks all contents, drops everything, and checks that nothing is left.
    fn finish(mut self) {
        self.context.step("the end");
        let stream = self.any_stream();
        for (number, vector) in &self.vectors {
            expect_elements(&stream.to_vec(vector).unwrap(), &self.models[number], *number);
        }
        drop(stream);
        while !self.pinned.is_empty() {
            self.check_pinned(0);
            self.pinned.swap_remove(0);
        }
        self.vectors.clear();
        self.graphs.clear();
        self.machine.synchronize();
        self.machine.check_contents();
        let Self { machine, subject, host, generator, twin, add, .. } = self;
        drop((generator, twin, add));
        let Subject { allocator, caching, paged, limited, external, .. } = subject;
        allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
        let stats = allocator.stats(device_id(0)).unwrap();
        assert_eq!(stats.active_bytes.all.current, 0, "active at the end");
        host.close().unwrap();
        let keeps_addresses = paged.is_some();
        drop((allocator, caching, paged, limited));
        if let Some(external) = &external {
            external.check_empty();
        }
        drop(external);
        machine.close(keeps_addresses);
    }
}

fn expect_elements(found: &[u32], expected: &[u32], number: usize) {
    if let Some(at) = (0..expected.len()).find(|&at| found[at] != expected[at]) {
        panic!("element {at} of vector {number} is {:#x}, and {:#x} is expected", found[at], expected[at]);
    }
}
