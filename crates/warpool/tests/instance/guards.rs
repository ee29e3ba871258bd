//! Guards against a naive model: random programs of guards, dropped in any order, and of plain settings in between.
//!
//! The model keeps a pile of layers, each saying what it covers; what is current is what the topmost layer says that
//! covers it. The real thing keeps only what to restore, so the two can be wrong in different ways.

use std::any::Any;
use std::collections::BTreeMap;

use crate::common::machine;
use crate::common::rng::Rng;
use warpool::{Instance, MultiStreamGuard, Stream};

const DEVICES: u32 = 3;
const STREAMS: usize = 4;

/// What can be current: the device, or the stream of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    Device,
    StreamOf(u32),
}

/// The value of a thing: a device's number, or a stream's place in the list of its device.
type Values = BTreeMap<Thing, usize>;

struct Model {
    /// The first covers everything and is never dropped.
    layers: Vec<(usize, Values)>,
}

impl Model {
    fn new() -> Self {
        let streams = (0..DEVICES).map(|device| (Thing::StreamOf(device), 0));
        Self { layers: vec![(usize::MAX, streams.chain([(Thing::Device, 0)]).collect())] }
    }

    fn topmost(&mut self, thing: Thing) -> &mut usize {
        self.layers.iter_mut().rev().find_map(|(_, values)| values.get_mut(&thing)).expect("the first covers all")
    }
}

fn program(seed: u64, instance: &Instance, streams: &[Vec<Stream>]) {
    let mut rng = Rng::new(seed);
    let mut model = Model::new();
    let mut guards: Vec<(usize, Box<dyn Any>)> = Vec::new();
    for step in 0..60 {
        let device = rng.below(DEVICES as usize);
        let place = rng.below(STREAMS);
        let stream = &streams[device][place];
        let of = |device| Thing::StreamOf(device as u32);
        match rng.below(8) {
            0 => {
                instance.device(device as u32).unwrap().make_current();
                *model.topmost(Thing::Device) = device;
            }
            1 => {
                stream.make_current();
                *model.topmost(of(device)) = place;
            }
            2 => {
                guards.push((step, Box::new(instance.device(device as u32).unwrap().enter())));
                model.layers.push((step, [(Thing::Device, device)].into()));
            }
            3 => {
                guards.push((step, Box::new(stream.enter())));
                model.layers.push((step, [(Thing::Device, device), (of(device), place)].into()));
            }
            4 => {
                let (other, other_place) = (rng.below(DEVICES as usize), rng.below(STREAMS));
                guards.push((step, Box::new(MultiStreamGuard::enter([stream, &streams[other][other_place]]))));
                // Of two streams of one device the later counts, as it does in this list.
                model.layers.push((step, [(of(device), place), (of(other), other_place)].into_iter().collect()));
            }
            _ if guards.is_empty() => {}
            _ => {
                let (made_at, guard) = guards.remove(rng.below(guards.len()));
                drop(guard);
                model.layers.retain(|(layer, _)| *layer != made_at);
            }
        }
        check(seed, step, &mut model, instance, streams);
    }
    drop(guards);
    model.layers.truncate(1);
    check(seed, 60, &mut model, instance, streams);
}

fn check(seed: u64, step: usize, model: &mut Model, instance: &Instance, streams: &[Vec<Stream>]) {
    assert_eq!(instance.current_device().index() as usize, *model.topmost(Thing::Device), "seed {seed}, step {step}");
    for device in instance.devices() {
        let place = *model.topmost(Thing::StreamOf(device.index()));
        let expected = &streams[device.index() as usize][place];
        assert_eq!(device.current_stream().unwrap(), *expected, "seed {seed}, step {step}");
    }
}

#[test]
fn guards_agree_with_a_naive_model() {
    for seed in 0..2000 {
        let (_, instance) = machine(DEVICES);
        // The default stream first: it is what is current at the start.
        let streams: Vec<Vec<_>> = instance
            .devices()
            .map(|device| {
                let others = (1..STREAMS).map(|_| device.pool_stream().unwrap());
                [device.default_stream().unwrap()].into_iter().chain(others).collect()
            })
            .collect();
        program(seed, &instance, &streams);
    }
}
