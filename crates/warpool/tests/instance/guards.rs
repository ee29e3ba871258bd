//! Guards compared with a naive model: random programs of guards, dropped in any order, with plain settings in between.
//!
//! The model keeps one layer per guard with the settings that the guard made; the current value is that of the topmost
//! layer with the setting. The implementation stores only the values to restore, so the two would fail in different
//! ways.

use std::any::Any;
use std::collections::BTreeMap;

use crate::common::machine;
use crate::common::rng::Rng;
use warpool::{Instance, MultiStreamGuard, Stream};

const DEVICES: u32 = 3;
const STREAMS: usize = 4;

/// A setting: the current device, or the current stream of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Setting {
    Device,
    StreamOf(u32),
}

/// The value of a setting: a device's index, or a stream's index in the list of its device.
type Values = BTreeMap<Setting, usize>;

struct Model {
    /// The first has every setting and is never dropped.
    layers: Vec<(usize, Values)>,
}

impl Model {
    fn new() -> Self {
        let streams = (0..DEVICES).map(|device| (Setting::StreamOf(device), 0));
        Self { layers: vec![(usize::MAX, streams.chain([(Setting::Device, 0)]).collect())] }
    }

    fn topmost(&mut self, setting: Setting) -> &mut usize {
        self.layers
            .iter_mut()
            .rev()
            .find_map(|(_, values)| values.get_mut(&setting))
            .expect("the first layer has every setting")
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
        let of = |device| Setting::StreamOf(device as u32);
        match rng.below(8) {
            0 => {
                instance.device(device as u32).unwrap().make_current();
                *model.topmost(Setting::Device) = device;
            }
            1 => {
                stream.make_current();
                *model.topmost(of(device)) = place;
            }
            2 => {
                guards.push((step, Box::new(instance.device(device as u32).unwrap().enter())));
                model.layers.push((step, [(Setting::Device, device)].into()));
            }
            3 => {
                guards.push((step, Box::new(stream.enter())));
                model.layers.push((step, [(Setting::Device, device), (of(device), place)].into()));
            }
            4 => {
                let (other, other_place) = (rng.below(DEVICES as usize), rng.below(STREAMS));
                guards.push((step, Box::new(MultiStreamGuard::enter([stream, &streams[other][other_place]]))));
                // If two streams are of one device the later one is current, as in this list.
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
    assert_eq!(instance.current_device().index() as usize, *model.topmost(Setting::Device), "seed {seed}, step {step}");
    for device in instance.devices() {
        let place = *model.topmost(Setting::StreamOf(device.index()));
        let expected = &streams[device.index() as usize][place];
        assert_eq!(device.current_stream().unwrap(), *expected, "seed {seed}, step {step}");
    }
}

#[test]
fn guards_agree_with_a_naive_model() {
    for seed in 0..2000 {
        let (_, instance) = machine(DEVICES);
        // The default stream first: it is current at the start.
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
