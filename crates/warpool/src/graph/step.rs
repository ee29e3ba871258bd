//! [`Step`]: a captured graph together with the typed memory that it works on.

use super::graph::Graph;
use super::options::{CaptureOptions, GraphOptions};
use crate::memory::SharedAllocator;
use crate::{Result, Stream};

/// Captured work and the buffers that it uses, as one value: the step of a loop that is replayed repeatedly.
///
/// The buffers can be any value, usually a struct or a tuple of [`DeviceVec`](crate::DeviceVec)s and
/// [`PinnedVec`](crate::PinnedVec)s. They are moved in at the capture, so they cannot be freed or used for something
/// else while the graph may be replayed:
/// ```compile_fail,E0382
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Stream, graph::{CaptureOptions, Step}, memory::DeviceAllocator};
/// # fn freed(allocator: &Arc<dyn DeviceAllocator>, stream: &Stream, x: DeviceVec<f32>) -> warpool::Result<()> {
/// let step = Step::capture(allocator, stream, CaptureOptions::default(), x, |stream, x| stream.fill(x, 1.0))?;
/// drop(x);
/// step.replay(stream)
/// # }
/// ```
/// Nor can a view of them be held over a replay that needs them exclusively, or outlive the step:
/// ```compile_fail,E0505
/// # use warpool::{DeviceVec, Stream, graph::Step};
/// # fn outlives(step: Step<DeviceVec<f32>>, stream: &Stream) -> warpool::Result<()> {
/// let view = step.buffers().view();
/// drop(step);
/// println!("{:?}", stream.to_vec(view)?);
/// # Ok(())
/// # }
/// ```
///
/// Between replays they are used like any other memory: work on them is ordered with the replays, and pinned memory
/// that a replay reads is written with [`PinnedVec::host_mut`](crate::PinnedVec::host_mut).
/// ```
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Instance, PinnedVec, driver::sim::{SimConfig, SimDriver}};
/// # use warpool::graph::{CaptureOptions, Step};
/// # use warpool::memory::{CachingAllocator, HostAllocator, PinnedSettings, Settings};
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// # let host = HostAllocator::new(&instance, PinnedSettings::default());
/// # let stream = instance.device(0)?.lease_stream()?;
/// let (input, output) = (PinnedVec::<u32>::zeroed(&host, 4)?, DeviceVec::<u32>::zeroed(&allocator, 4, &stream)?);
/// let options = CaptureOptions::default();
/// let mut step = Step::capture(&allocator, &stream, options, (input, output), |stream, (input, output)| {
///     stream.copy(&*input, output)
/// })?;
/// for round in 1..=3 {
///     step.buffers_mut().0.host_mut()?.fill(round);
///     step.replay(&stream)?;
///     assert_eq!(step.buffers().1.to_vec(&stream)?, [round; 4]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Step<B> {
    // Dropped before the buffers.
    graph: Graph,
    buffers: B,
}

impl<B> Step<B> {
    /// Captures the work that `work` enqueues in the given stream, on the given buffers. After an error the buffers are
    /// dropped.
    pub fn capture(
        allocator: &impl SharedAllocator,
        stream: &Stream,
        options: CaptureOptions<'_>,
        mut buffers: B,
        work: impl FnOnce(&Stream, &mut B) -> Result<()>,
    ) -> Result<Self> {
        let mut graph = Graph::new(allocator, &stream.device(), GraphOptions::default())?;
        graph.capture(stream, options, |capture| work(&capture.stream().clone(), &mut buffers))?;
        Ok(Self { graph, buffers })
    }

    /// Launches the captured work in `stream`; see [`Graph::replay`].
    #[track_caller]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        self.graph.replay(stream)
    }

    /// The buffers of the captured work.
    #[must_use]
    pub fn buffers(&self) -> &B {
        &self.buffers
    }

    /// The buffers, to be written between replays. If a buffer is replaced here, the graph keeps the captured one, and
    /// replays continue to use it.
    #[must_use]
    pub fn buffers_mut(&mut self) -> &mut B {
        &mut self.buffers
    }

    /// The captured graph.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Returns the buffers and drops the graph. Replays under way complete; later work on the buffers waits for them.
    #[must_use]
    pub fn into_buffers(self) -> B {
        self.buffers
    }
}
