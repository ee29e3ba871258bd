//! Typed memory: [`DeviceVec`] and [`PinnedVec`] hold elements instead of bytes, [`View`] and [`ViewMut`] are parts of
//! them, and [`Stream`](crate::Stream) copies and fills them. [`Kernel`] launches kernels with typed arguments.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::{CachingAllocator, HostAllocator, PinnedSettings, Settings};
//! use warpool::{DeviceVec, Instance, PinnedVec};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?; // or Arc::new(CudaDriver::open()?)
//! let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let host = HostAllocator::new(&instance, PinnedSettings::default());
//! let device = instance.device(0)?;
//! let (copies, compute) = (device.lease_stream()?, device.lease_stream()?);
//!
//! let staging = PinnedVec::from_slice(&host, &[1.0_f32; 1000])?;
//! let mut values = DeviceVec::<f32>::uninit(&allocator, 1000, &copies)?;
//! copies.copy(&staging, &mut values)?;
//! drop(staging); // its memory is reused once the copy is done
//!
//! compute.fill(values.slice_mut(500..)?, 2.0)?; // waits for the copy, because it is in another stream
//! let (ones, twos) = values.view().split_at(500)?;
//! assert_eq!(compute.to_vec(ones)?, [1.0; 500]);
//! assert_eq!(compute.to_vec(twos)?, [2.0; 500]);
//! # Ok(())
//! # }
//! ```
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::typed::{Rows, RowsMut, Zeroable};
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! // A matrix of 4 x 6, and a part of 2 x 3 of it, by rows and a stride.
//! let matrix = DeviceVec::from_slice(&allocator, &[u32::zeroed(); 24], &stream)?;
//! let mut part = DeviceVec::from_slice(&allocator, &[7_u32; 6], &stream)?;
//! let source: Rows<'_, u32> = matrix.view().slice(8..)?.rows(2, 3, 6)?;
//! let mut view = part.view_mut();
//! let mut target: RowsMut<'_, u32> = view.rows_mut(2, 3, 3)?;
//! stream.copy_rows(&source, &mut target)?;
//! assert_eq!(part.to_vec(&stream)?, [0; 6]);
//!
//! let error = stream.copy(&matrix, &mut part).unwrap_err();
//! assert!(matches!(error, warpool::Error::Buffer(warpool::typed::BufferError::Length { .. })));
//! # Ok(())
//! # }
//! ```
//!
//! # What is checked, and when
//! - By the compiler: element types, which are plain data; that written memory is borrowed exclusively; that a view
//!   does not outlive its vector.
//! - Before the driver is called: lengths, ranges, devices, for kernels the number and sizes of arguments, and that no
//!   memory is [asleep](crate::memory::Tags).
//! - By stream order: each buffer records which streams used which of its bytes. A use that conflicts with one in
//!   another stream waits for it, by an event. While only one stream uses a buffer, this costs a few comparisons, but
//!   no lock and no memory; streams that use different parts, or only read, do not wait.
//! - When it is freed: the allocator knows every stream that used it, so the memory is reused only after their work.
//!   There is nothing to record by hand, and leaking a value (`mem::forget`) leaks its memory and nothing else.
//! - In captures: the graph keeps every buffer that its work uses, and its replays are ordered with other uses like any
//!   other work. [`Step`](crate::graph::Step) moves the buffers into the graph, so that their owner is clear.
//!
//! Raw calls of the [driver](crate::driver) bypass all of this. A program can still pass typed memory to them by
//! address: such work is neither ordered nor recorded, and if it changes, frees or unpins pinned memory to which Rust
//! references exist, the behaviour is undefined.

mod buffer;
mod captured;
mod copy;
mod device_vec;
mod elastic_vec;
mod endpoint;
mod foreign;
mod kernel;
mod operation;
mod order;
mod pinned_vec;
mod random;
mod sole_stream;
mod submit;
mod tracked;
mod vector;
mod view;

pub use crate::error::BufferError;
pub use bytemuck::{Pod, Zeroable};
pub(crate) use captured::CapturedBuffers;
pub use device_vec::DeviceVec;
pub use elastic_vec::ElasticVec;
pub use endpoint::{CopySource, CopyTarget};
pub use kernel::{Argument, Arguments, Kernel, Parameter, Parameters, Pointer, PointerMut, Slice, SliceMut};
pub use pinned_vec::{HostMut, HostRef, PinnedVec};
pub use view::{IntoView, IntoViewMut, Rows, RowsMut, View, ViewMut};
