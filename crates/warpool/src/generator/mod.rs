//! Generators of random numbers: Philox 4x32-10, the same bits on every device, and right also in graphs.
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
//! assert_eq!(generator.offset()?, 4); // where the next numbers come from
//! # Ok(())
//! # }
//! ```
//!
//! - [`Generator`]: seed and offset, fills, and [`reserve`](Generator::reserve) for one's own kernels.
//! - A generator's *state* is seed and offset. Copies of a generator are the same generator;
//!   [`share`](Generator::share) makes another one on the same state, [`duplicate`](Generator::duplicate) another one
//!   on a copy of it, and [`adopt`](Generator::adopt) goes over to another's.
//! - In a capture, numbers are counted to the graph. A replay draws from where the generator is when it is replayed,
//!   and advances it by what the graph consumes, as if its work had been done without a graph.
//!
//! # During a capture
//! While the calling thread's current stream (on the generator's device) captures, what would have no meaning for a
//! graph is [`GeneratorError::InCapture`]: making a generator, copying one, reading or setting the offset, setting the
//! state, a new seed.
//!
//! # Where it differs from PyTorch
//! - A capture has one slot of 16 bytes per generator and stream, from the graph's pool; PyTorch has two tensors per
//!   generator, from the default pool. Nothing is waited for when it is made.
//! - What a graph consumes is counted in 64 bits, not 32.
//! - Numbers in the body of a conditional node are refused where they are drawn, not at the end of the body.
//! - The fills have their own rule of who gets which number, which does not depend on the device: see [`Generator`].
//!   PyTorch's depends on how many threads a device runs.
//! - A chance to keep of 1 keeps everything in a dropout mask.
//!
//! Rejected: *writing the slot from the host before each replay.* It costs more than the launch itself, and has to wait
//! until no launch reads the slot any more.

mod capture;
mod fill;
mod kernels;
pub mod philox;
mod reserve;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex};

use warpool_driver::CaptureState;

pub use crate::error::GeneratorError;
pub(crate) use capture::{GeneratorInCapture, Heads};
pub use fill::Target;
pub use kernels::place;
pub use reserve::{PHILOX_CUDA, Reservation};

use crate::capture::CaptureStatus;
use crate::{Device, Instance, Result, Stream, lock};
use state::State;

/// The seed of a generator that was given none.
pub const DEFAULT_SEED: u64 = 67_280_421_310_721;

/// A generator of random numbers for one device. Cheap to clone; clones are the same generator. Any number of threads
/// may draw from it: each gets numbers of its own.
#[derive(Clone)]
pub struct Generator {
    device: Device,
    seat: Arc<Seat>,
}

/// What the clones of a generator share: the state that it is on, which another one may be on as well.
#[derive(Debug)]
pub(crate) struct Seat(Mutex<Arc<State>>);

impl Generator {
    /// A generator with the seed [`DEFAULT_SEED`] and offset 0.
    pub fn new(device: &Device) -> Result<Self> {
        let generator = Self::on(device, Arc::new(State::new(DEFAULT_SEED, 0)));
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

    /// Sets a seed that nobody can foresee, and returns it.
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

    /// Seed and offset in PyTorch's form: 8 bytes each, the lowest first. During a capture: as they are outside of it.
    #[must_use]
    pub fn state(&self) -> [u8; 16] {
        let (seed, offset) = self.current().get();
        (u128::from(offset) << 64 | u128::from(seed)).to_le_bytes()
    }

    /// Sets what [`state`](Self::state) gave; 8 bytes are a seed with offset 0.
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

    /// Another generator, on a copy of the state: each goes its own way from here.
    pub fn duplicate(&self) -> Result<Self> {
        self.expect_no_capture("copy a generator")?;
        let (seed, offset) = self.current().get();
        Ok(Self::on(&self.device, Arc::new(State::new(seed, offset))))
    }

    /// Another generator on the same state: what one draws, the other does not draw again. Allowed during a capture.
    #[must_use]
    pub fn share(&self) -> Self {
        Self::on(&self.device, self.current())
    }

    /// Goes over to the state of `other`, and leaves its own to whoever is on it. Allowed during a capture, which then
    /// counts the numbers of both.
    pub fn adopt(&self, other: &Self) -> Result<()> {
        if self.device.instance() != other.device.instance() {
            return Err(GeneratorError::ForeignInstance.into());
        }
        if self.device != other.device {
            let (generator, wanted) = (other.device.id(), self.device.id());
            return Err(GeneratorError::ForeignDevice { generator, wanted }.into());
        }
        // One lock after the other: the two may be the same.
        let state = other.current();
        *lock(&self.seat.0) = state;
        Ok(())
    }

    /// Whether both are on the same state.
    #[must_use]
    pub fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.current(), &other.current())
    }

    fn on(device: &Device, state: Arc<State>) -> Self {
        Self { device: device.clone(), seat: Arc::new(Seat(Mutex::new(state))) }
    }

    /// The state that it is on.
    fn current(&self) -> Arc<State> {
        Arc::clone(&lock(&self.seat.0))
    }

    /// The generator and the stream belong together.
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

    /// Fails if the calling thread's current stream captures.
    fn expect_no_capture(&self, what: &'static str) -> Result<()> {
        match self.capture_state()? {
            CaptureState::None => Ok(()),
            state => Err(GeneratorError::InCapture { what, state }.into()),
        }
    }

    /// Where the calling thread's current stream stands. Makes no driver call while no capture of ours is under way.
    fn capture_state(&self) -> Result<CaptureState> {
        if self.device.instance().captures().none() {
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
    /// The device's own generator, the same for all who ask. Made at its first use, with a seed that nobody can
    /// foresee.
    #[must_use]
    pub fn default_generator(&self) -> Generator {
        let cell = &self.state().default_generator;
        let seat = match cell.get() {
            Some(seat) => seat,
            None => {
                let state = State::new(self.driver().entropy(), 0);
                cell.get_or_init(|| Arc::new(Seat(Mutex::new(Arc::new(state)))))
            }
        };
        Generator { device: self.clone(), seat: Arc::clone(seat) }
    }
}

impl Instance {
    /// The default generator of the device with that index. That of the thread's current device is
    /// `instance.current_device().default_generator()`.
    pub fn default_generator(&self, index: u32) -> Result<Generator> {
        Ok(self.device(index)?.default_generator())
    }
}
