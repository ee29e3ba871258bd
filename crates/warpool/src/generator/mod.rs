//! Random number generators: Philox 4x32-10, with the same bits on every device, including in graphs.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::generator::{Generator, philox};
//! use warpool::memory::{Allocate, CachingAllocator, Settings};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let device = instance.device(0)?;
//! let stream = device.pool_stream()?;
//! let memory = Arc::new(CachingAllocator::new(&instance, Settings::default())).allocate(4 * 1000, &stream)?;
//!
//! let generator = Generator::new(&device)?;
//! generator.set_seed(42)?;
//! generator.fill_uniform(&memory, &stream)?; // 1,000 floats
//! stream.synchronize()?;
//!
//! let mut bytes = [0; 4];
//! instance.driver().download(device.id(), memory.ptr(), &mut bytes)?;
//! assert_eq!(f32::from_le_bytes(bytes), philox::uniform(philox::block(42, 0, 0)[0]));
//! assert_eq!(generator.offset()?, 4); // where the next numbers start
//! # Ok(())
//! # }
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::driver::HostKernel;
//! use warpool::generator::{DEFAULT_SEED, Generator, PHILOX_CUDA, philox, position};
//! use warpool::graph::{GeneratorSlot, GraphArg};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! let generator = Generator::new(&device)?;
//! assert_eq!(generator.seed(), DEFAULT_SEED);
//!
//! // A kernel of your own begins with this, and has the three arguments of a reservation:
//! assert!(PHILOX_CUDA.contains("warpool_position"));
//! // What the simulated GPU runs for it:
//! let draw = HostKernel::new("draw", |kernel| {
//!     let (target, (seed, offset)) = (kernel.arg_ptr(0)?, position(kernel, 1)?);
//!     kernel.write_u32(target, &philox::block(seed, 0, offset))
//! });
//! // In a graph, the first of the three is a slot, which each replay writes:
//! let [slot, seed, offset] = generator.reserve(4, &stream)?.graph_args();
//! let slot: Option<GeneratorSlot> = match slot {
//!     GraphArg::Slot(slot) => slot,
//!     other => panic!("{other:?}"),
//! };
//! assert_eq!(slot, None); // this is no capture
//! # Ok(())
//! # }
//! ```
//!
//! - [`Generator`]: seed and offset, fills, and [`reserve`](Generator::reserve) for users' own kernels.
//! - A generator's *state* is seed and offset. Clones of a generator share one generator; [`share`](Generator::share)
//!   creates another one with the same state, [`duplicate`](Generator::duplicate) another one with a copy of it, and
//!   [`adopt`](Generator::adopt) switches to the state of another.
//! - In a capture, the graph records how many numbers it draws. A replay draws from the generator's position at that
//!   time, and advances it by the numbers that the graph consumes, as if the work had been done without a graph.
//!
//! # During a capture
//! While the calling thread's current stream (on the generator's device) is capturing, calls that have no meaning for a
//! graph fail with [`GeneratorError::InCapture`]: creating or duplicating a generator, reading or setting the offset,
//! setting the state, a new seed.
//!
//! # Differences from PyTorch
//! - A capture has one slot of 16 bytes per generator and stream, from the graph's pool; PyTorch has two tensors per
//!   generator, from the default pool. Creating a slot does not wait.
//! - The numbers that a graph consumes are counted in 64 bits, not 32.
//! - Numbers in the body of a conditional node are an error when they are drawn, not at the end of the body.
//! - Which number of a fill comes from which subsequence does not depend on the device: see [`Generator`]. In PyTorch
//!   it depends on how many threads a device runs.
//! - A dropout mask with a keep probability of 1 keeps everything.
//!
//! Rejected: *writing the slot from the host before each replay.* It costs more than the launch itself, and has to wait
//! until no launch reads the slot any more.

mod fill;
mod in_capture;
mod kernels;
pub mod philox;
mod reservation;
mod reserve;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex};

use warpool_driver::{CaptureState, Driver};

pub use crate::error::GeneratorError;
pub use fill::Target;
pub(crate) use in_capture::CapturedGenerators;
pub use kernels::position;
pub use reservation::{GeneratorSlot, PHILOX_CUDA, Reservation};

use crate::capture::CaptureStatus;
use crate::instance::{Extension, ExtensionSlot};
use crate::{Device, Instance, Result, Stream, lock};
use state::PhiloxState;

/// The seed of a new generator.
pub const DEFAULT_SEED: u64 = 67_280_421_310_721;

/// A generator of random numbers for one device. Cheap to clone; clones share one generator. Any number of threads may
/// draw from it: each gets different numbers.
#[derive(Clone)]
pub struct Generator {
    device: Device,
    state: SharedState,
}

/// The state that the clones of a generator use; other generators may use it as well.
type SharedState = Arc<Mutex<Arc<PhiloxState>>>;

/// The state of a device's default generator.
struct DefaultGenerator(SharedState);

impl Extension for DefaultGenerator {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::DefaultGenerator
    }

    fn destroy(&self, _: &dyn Driver) -> Result<()> {
        Ok(())
    }
}

impl Generator {
    /// A generator with the seed [`DEFAULT_SEED`] and offset 0.
    pub fn new(device: &Device) -> Result<Self> {
        let generator = Self::with_state(device, Arc::new(PhiloxState::new(DEFAULT_SEED, 0)));
        generator.expect_no_capture("make a generator")?;
        Ok(generator)
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.current().get().0
    }

    /// Sets the seed, and the offset to 0. During a capture only the same seed is allowed, and changes nothing.
    pub fn set_seed(&self, seed: u64) -> Result<()> {
        let state = self.current();
        if self.capture_state()? == CaptureState::None {
            state.set(Some(seed), 0);
            return Ok(());
        }
        match state.get().0 {
            same if same == seed => Ok(()),
            other => Err(GeneratorError::SeedInCapture { wanted: seed, seed: other }.into()),
        }
    }

    /// Sets a nondeterministic seed, and returns it.
    pub fn reseed(&self) -> Result<u64> {
        self.expect_no_capture("take a new seed")?;
        let seed = self.device.driver().entropy();
        self.current().set(Some(seed), 0);
        Ok(seed)
    }

    /// How many numbers of each subsequence were consumed: a multiple of 4.
    pub fn offset(&self) -> Result<u64> {
        self.expect_no_capture("read the offset")?;
        Ok(self.current().get().1)
    }

    /// Sets the offset, a multiple of 4.
    pub fn set_offset(&self, offset: u64) -> Result<()> {
        self.expect_no_capture("set the offset")?;
        self.current().set(None, checked(offset)?);
        Ok(())
    }

    /// Seed and offset in PyTorch's format: 8 bytes each, little-endian. During a capture, these are the values outside
    /// of it.
    #[must_use]
    pub fn state(&self) -> [u8; 16] {
        let (seed, offset) = self.current().get();
        (u128::from(offset) << 64 | u128::from(seed)).to_le_bytes()
    }

    /// Sets a state that [`state`](Self::state) returned; 8 bytes are a seed with offset 0.
    pub fn set_state(&self, bytes: &[u8]) -> Result<()> {
        self.expect_no_capture("set the state")?;
        let wrong = |_| GeneratorError::StateSize { bytes: bytes.len() };
        let (seed, offset) = match bytes.split_at_checked(8) {
            Some((seed, [])) => (seed, [0; 8]),
            Some((seed, offset)) => (seed, offset.try_into().map_err(wrong)?),
            None => return Err(GeneratorError::StateSize { bytes: bytes.len() }.into()),
        };
        let seed = u64::from_le_bytes(seed.try_into().map_err(wrong)?);
        self.current().set(Some(seed), checked(u64::from_le_bytes(offset))?);
        Ok(())
    }

    /// Another generator, with a copy of the state.
    pub fn duplicate(&self) -> Result<Self> {
        self.expect_no_capture("copy a generator")?;
        let (seed, offset) = self.current().get();
        Ok(Self::with_state(&self.device, Arc::new(PhiloxState::new(seed, offset))))
    }

    /// Another generator with the same state: a number that one draws is not drawn by the other. Allowed during a
    /// capture.
    #[must_use]
    pub fn share(&self) -> Self {
        Self::with_state(&self.device, self.current())
    }

    /// Switches to the state of `other`; other generators keep the old one. Allowed during a capture, which then counts
    /// the numbers of both states.
    pub fn adopt(&self, other: &Self) -> Result<()> {
        if self.device.instance() != other.device.instance() {
            return Err(GeneratorError::ForeignInstance.into());
        }
        if self.device != other.device {
            let (generator, wanted) = (other.device.id(), self.device.id());
            return Err(GeneratorError::ForeignDevice { generator, wanted }.into());
        }
        // One lock after the other, since both may be the same.
        let state = other.current();
        *lock(&self.state) = state;
        Ok(())
    }

    /// Whether both use the same state.
    #[must_use]
    pub fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.current(), &other.current())
    }

    fn with_state(device: &Device, state: Arc<PhiloxState>) -> Self {
        Self { device: device.clone(), state: Arc::new(Mutex::new(state)) }
    }

    fn current(&self) -> Arc<PhiloxState> {
        Arc::clone(&lock(&self.state))
    }

    /// Fails if the stream is of another device.
    fn expect_stream(&self, stream: &Stream) -> Result<()> {
        if self.device.instance() != stream.instance() {
            return Err(GeneratorError::ForeignInstance.into());
        }
        if self.device.id() != stream.device_id() {
            let (generator, wanted) = (self.device.id(), stream.device_id());
            return Err(GeneratorError::ForeignDevice { generator, wanted }.into());
        }
        Ok(())
    }

    /// Fails if the calling thread's current stream is capturing.
    fn expect_no_capture(&self, what: &'static str) -> Result<()> {
        match self.capture_state()? {
            CaptureState::None => Ok(()),
            state => Err(GeneratorError::InCapture { what, state }.into()),
        }
    }

    /// The capture state of the calling thread's current stream. Makes no driver call while no capture of a graph is
    /// active.
    fn capture_state(&self) -> Result<CaptureState> {
        if !self.device.instance().has_captures() {
            return Ok(CaptureState::None);
        }
        let status = CaptureStatus::of_existing(self.device.driver(), self.device.current_stream_id()?)?;
        Ok(match status {
            CaptureStatus::Capturing(id) => CaptureState::Active(id),
            CaptureStatus::Invalidated => CaptureState::Invalidated,
            CaptureStatus::NotCapturing | CaptureStatus::Blocked | CaptureStatus::StreamDestroyed => CaptureState::None,
        })
    }
}

fn checked(offset: u64) -> Result<u64> {
    if offset.is_multiple_of(4) { Ok(offset) } else { Err(GeneratorError::Offset { offset }.into()) }
}

impl fmt::Debug for Generator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seed, offset) = self.current().get();
        write!(f, "Generator(seed {seed}, offset {offset}, {})", self.device.id())
    }
}

impl Device {
    /// The device's default generator, shared by all callers. Created at its first use, with a nondeterministic seed.
    #[must_use]
    pub fn default_generator(&self) -> Generator {
        let DefaultGenerator(state) = match self.extensions().get() {
            Some(generator) => generator,
            None => {
                let state = PhiloxState::new(self.driver().entropy(), 0);
                self.extensions().get_or_init(|| DefaultGenerator(Arc::new(Mutex::new(Arc::new(state)))))
            }
        };
        Generator { device: self.clone(), state: Arc::clone(state) }
    }
}

impl Instance {
    /// The default generator of the device with that index. For the thread's current device, use
    /// `instance.current_device().default_generator()`.
    pub fn default_generator(&self, index: u32) -> Result<Generator> {
        Ok(self.device(index)?.default_generator())
    }
}
