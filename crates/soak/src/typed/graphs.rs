//! Graphs with typed work, on the capturing stream and on its forks.

use warpool::Stream;
use warpool::driver::CaptureMode;
use warpool::graph::{CaptureOptions, Fork, Graph, GraphOptions};

use super::Run;
use super::operation::Operation;
use crate::caught::caught;
use crate::machine::Outcome;

pub struct Captured {
    graph: Graph,
    /// The operations of a replay, in order.
    operations: Vec<Operation>,
}

impl Captured {
    /// Whether replays use a vector.
    pub fn uses(&self, number: usize) -> bool {
        self.operations.iter().any(|operation| operation.target() == number || operation.source() == Some(number))
    }
}

impl Run<'_> {
    pub fn capture(&mut self) {
        if self.graphs.len() >= 3 || !self.subject.has_pools() || self.vectors.is_empty() {
            return;
        }
        let stream = self.any_stream();
        let allocator = self.subject.allocator.clone();
        let mut graph = Graph::new(&allocator, &self.machine.device(0), GraphOptions::default()).unwrap();
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let options = CaptureOptions::default().with_mode(self.context.rng.pick(&modes));
        self.context.step(format!("capture on {}", stream.id()));
        let mut operations = Vec::new();
        let armed = self.machine.arm(self.context);
        let outcome = caught(|| {
            graph.capture(&stream, options, |capture| {
                self.machine.suspend();
                let mut forks: Vec<Fork> = Vec::new();
                for _ in 0..self.context.rng.below(3) {
                    forks.push(capture.fork()?);
                }
                for _ in 0..1 + self.context.rng.below(8) {
                    let Some(operation) = self.draw_operation() else { continue };
                    let at = self.context.rng.below(forks.len() + 1);
                    let on: Stream = forks.get(at).map_or(&stream, |fork| fork).clone();
                    self.context.step(format!("  {operation:?} in {}", on.id()));
                    self.queue(&operation, &on)?;
                    operations.push(operation);
                }
                for fork in forks {
                    capture.join(fork)?;
                }
                self.machine.resume(&armed);
                Ok(())
            })
        });
        let outcome = self.machine.settle(self.context, armed, outcome, false);
        self.machine.expect_capture_ended(&mut graph, &stream);
        if outcome == Outcome::Done(()) {
            self.context.counts.captures += 1;
            self.graphs.push(Captured { graph, operations });
        } else {
            self.context.counts.captures_failed += 1;
        }
        self.check_offsets();
    }

    pub fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let (at, stream) = (self.context.rng.below(self.graphs.len()), self.any_stream());
        self.context.step(format!("replay graph {at} in {}", stream.id()));
        let graph = &self.graphs[at].graph;
        // A failed replay launches nothing, and draws nothing.
        if self.machine.call(self.context, || graph.replay(&stream)) == Outcome::Done(()) {
            self.context.counts.replays += 1;
            for operation in self.graphs[at].operations.clone() {
                self.apply(&operation);
            }
        }
        self.check_offsets();
    }

    /// Checks that both generators have the same offset.
    fn check_offsets(&self) {
        let offsets = [&self.generator, &self.twin].map(|generator| generator.offset().unwrap());
        assert_eq!(offsets[0], offsets[1], "the offset of the generator, and of one that drew the same without graphs");
    }

    pub fn drop_graph(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.context.rng.below(self.graphs.len());
        self.context.step(format!("graph {at} is dropped"));
        self.graphs.swap_remove(at);
        self.forget_models();
    }
}
