//! Random numbers in typed memory.

use std::panic::Location;

use warpool_driver::DevicePtr;

use super::submit::{Reach, submit};
use super::view::{IntoViewMut, ViewMut};
use crate::generator::{Generator, Target};
use crate::{Result, Stream};

/// Random numbers for typed memory. The methods of [`Generator`] with the corresponding names define the numbers.
impl Stream {
    /// Floats in (0, 1].
    #[track_caller]
    pub fn random_uniform<'a>(&self, generator: &Generator, target: impl IntoViewMut<'a, f32>) -> Result<()> {
        let line = Location::caller();
        let target = target.into_view_mut();
        self.random(&target, line, |at| generator.fill_uniform(at, self))
    }

    /// Floats of the normal distribution with mean 0 and deviation 1.
    #[track_caller]
    pub fn random_normal<'a>(&self, generator: &Generator, target: impl IntoViewMut<'a, f32>) -> Result<()> {
        let line = Location::caller();
        let target = target.into_view_mut();
        self.random(&target, line, |at| generator.fill_normal(at, self))
    }

    /// Words of 32 random bits.
    #[track_caller]
    pub fn random_bits<'a>(&self, generator: &Generator, target: impl IntoViewMut<'a, u32>) -> Result<()> {
        let line = Location::caller();
        let target = target.into_view_mut();
        self.random(&target, line, |at| generator.fill_bits(at, self))
    }

    fn random<T: bytemuck::Pod>(
        &self,
        target: &ViewMut<'_, T>,
        line: &'static Location<'static>,
        fill: impl Fn(Target) -> Result<()>,
    ) -> Result<()> {
        let (ptr, len): (DevicePtr, _) = (target.part.device_address(), target.len() as u64);
        if len == 0 {
            return target.part.buffer().expect_device_of(self);
        }
        #[expect(unsafe_code, reason = "the promise of `Target::raw`")]
        // SAFETY: the view has `len` elements of 4 bytes there, and `submit` makes sure that the memory stays until the
        // work is done; a graph that captures it keeps the buffer.
        let at = unsafe { Target::raw(ptr, len) };
        submit(self, &[Some(target.part.access(true))], Reach::OwnDevice, line, &mut || fill(at))
    }
}
