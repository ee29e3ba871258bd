//! Kernels with typed arguments.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use bytemuck::Pod;
use warpool_driver::{DevicePtr, FunctionId, KernelArg, KernelSource, LaunchShape};

use super::operation::Access;
use super::submit::{Reach, direct, submit, submit_direct};
use super::view::{IntoView, IntoViewMut, Part};
use crate::error::BufferError;
use crate::{Device, Error, Result, Stream};

/// A loaded kernel, declared with the types of its parameters: a tuple of numbers (`u32`, `i32`, `u64`, `i64`, `f32`,
/// `f64`), [`Slice`] and [`SliceMut`], and [`Pointer`] and [`PointerMut`].
///
/// Only the declaration is `unsafe`; launches are checked by the compiler, including their borrows.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Instance, driver::sim::{SimConfig, SimDriver}};
/// # use warpool::memory::{CachingAllocator, Settings};
/// use warpool::driver::{HostKernel, KernelSource};
/// use warpool::typed::{Kernel, Slice, SliceMut};
///
/// static SOURCE: KernelSource = KernelSource {
///     name: "saxpy",
///     cuda: r#"extern "C" __global__ void saxpy(
///         float a, const float* x, unsigned long long x_len, float* y, unsigned long long y_len
///     ) {
///         unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
///         if (i < x_len && i < y_len) y[i] += a * x[i];
///     }"#,
///     host_kernels: &[HostKernel::new("saxpy", |kernel| { // what the simulated GPU runs
///         let (a, x, y) = (kernel.arg_f32(0)?, kernel.arg_ptr(1)?, kernel.arg_ptr(3)?);
///         let len = kernel.arg_u64(2)?.min(kernel.arg_u64(4)?) as usize;
///         let (x, mut values) = (kernel.read_f32(x, len)?, kernel.read_f32(y, len)?);
///         values.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
///         kernel.write_f32(y, &values)
///     })],
/// };
/// type Saxpy = Kernel<(f32, Slice<f32>, SliceMut<f32>)>;
///
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// # let (device, stream) = (instance.device(0)?, instance.device(0)?.pool_stream()?);
/// // SAFETY: these are its parameters, and it stays within the slices that it is given, whatever their lengths.
/// let saxpy: Saxpy = unsafe { Kernel::load(&device, &SOURCE, "saxpy")? };
/// let x = DeviceVec::from_slice(&allocator, &[1.0, 2.0, 3.0], &stream)?;
/// let mut y = DeviceVec::zeroed(&allocator, 3, &stream)?;
/// saxpy.launch_linear(&stream, x.len(), (10.0, &x, &mut y))?;
/// assert_eq!(y.to_vec(&stream)?, [10.0, 20.0, 30.0]);
/// # Ok(())
/// # }
/// ```
///
/// A function over any kernel takes the arguments that fit it:
/// ```
/// use warpool::Stream;
/// use warpool::typed::{Argument, Arguments, Kernel, Parameter, Parameters, Pointer, PointerMut};
///
/// fn launch<'a, P: Parameters>(
///     kernel: &Kernel<P>, stream: &Stream, len: usize, arguments: impl Arguments<'a, P>,
/// ) -> warpool::Result<()> {
///     println!("{} over {len} elements", kernel.name());
///     kernel.launch_linear(stream, len, arguments)
/// }
///
/// fn is_argument<'a, P: Parameter>(_: impl Argument<'a, P>) {}
/// is_argument::<u32>(7);
///
/// /// Addresses without lengths, for kernels of other libraries.
/// type Copies = Kernel<(Pointer<f32>, PointerMut<f32>, u64)>;
/// ```
/// A slice of another type does not compile:
/// ```compile_fail,E0277
/// # use warpool::{DeviceVec, Stream, typed::{Kernel, Slice, SliceMut}};
/// # fn wrong(kernel: Kernel<(f32, Slice<f32>, SliceMut<f32>)>, stream: Stream, x: DeviceVec<u32>,
/// #   mut y: DeviceVec<f32>) -> warpool::Result<()> {
/// kernel.launch_linear(&stream, y.len(), (10.0, &x, &mut y))
/// # }
/// ```
/// Nor does a slice that is written and used otherwise in one launch:
/// ```compile_fail,E0502
/// # use warpool::{DeviceVec, Stream, typed::{Kernel, Slice, SliceMut}};
/// # fn aliased(kernel: Kernel<(f32, Slice<f32>, SliceMut<f32>)>, stream: Stream,
/// #   mut y: DeviceVec<f32>) -> warpool::Result<()> {
/// kernel.launch_linear(&stream, 3, (10.0, &y, &mut y))
/// # }
/// ```
/// Two writers of one vector:
/// ```compile_fail,E0499
/// # use warpool::{DeviceVec, Stream, typed::{Kernel, SliceMut}};
/// # fn two(kernel: Kernel<(SliceMut<f32>, SliceMut<f32>)>, stream: Stream,
/// #   mut y: DeviceVec<f32>) -> warpool::Result<()> {
/// kernel.launch_linear(&stream, 3, (&mut y, &mut y))
/// # }
/// ```
/// And loading one without the promise:
/// ```compile_fail,E0133
/// # use warpool::{Device, driver::KernelSource, typed::Kernel};
/// # fn load(device: &Device, source: &KernelSource) -> warpool::Result<Kernel<(u32,)>> {
/// Kernel::load(device, source, "kernel")
/// # }
/// ```
pub struct Kernel<P> {
    device: Device,
    function: FunctionId,
    name: &'static str,
    parameters: PhantomData<fn(P)>,
}

impl<P: Parameters> Kernel<P> {
    /// The kernel `name` of `source`, which is loaded once per device and kept until the
    /// [`Instance`](crate::Instance) is closed.
    ///
    /// The number and sizes of the parameters are compared with those of the loaded kernel, if the driver knows them
    /// (CUDA 12.4 or later; the simulated GPU reads them from the CUDA source): [`BufferError::ArgumentCount`],
    /// [`BufferError::ArgumentSize`].
    ///
    /// # Safety
    /// The caller promises for every launch, whatever its shape and numeric arguments:
    /// - The kernel has these parameters, in this order.
    /// - It accesses no memory except the elements of its slices, only reads those of [`Slice`] and [`Pointer`], and
    ///   does not use them after it has finished.
    #[expect(unsafe_code, reason = "the promise about a kernel that safe launches rely on")]
    pub unsafe fn load(device: &Device, source: &KernelSource, name: &'static str) -> Result<Self> {
        let function = device.kernel(source, name)?;
        if let Some(sizes) = device.driver().function_parameters(function)? {
            check_sizes(name, &sizes, &P::sizes())?;
        }
        Ok(Self { device: device.clone(), function, name, parameters: PhantomData })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Launches it in `stream`, which must be a stream of its device. The stream waits for other streams that used the
    /// memory of its arguments before, and the use is recorded. If the stream is capturing, the graph keeps the memory.
    #[inline]
    #[track_caller]
    pub fn launch<'a>(&self, stream: &Stream, shape: LaunchShape, arguments: impl Arguments<'a, P>) -> Result<()> {
        let line = Location::caller();
        self.expect_own(stream)?;
        arguments.launch(&Launch { function: self.function, stream, shape, line })
    }

    /// As [`launch`](Self::launch), with at least one thread for each of `len` elements, in blocks of 256.
    #[inline]
    #[track_caller]
    pub fn launch_linear<'a>(&self, stream: &Stream, len: usize, arguments: impl Arguments<'a, P>) -> Result<()> {
        match u32::try_from(len) {
            Ok(threads) => self.launch(stream, LaunchShape::linear(threads), arguments),
            Err(_) => Err(BufferError::TooManyElements { len }.into()),
        }
    }

    /// Fails unless `stream` belongs to its device.
    #[inline]
    fn expect_own(&self, stream: &Stream) -> Result<()> {
        self.device.instance().expect_same(stream.instance(), "the stream")?;
        if stream.device_id() == self.device.id() { Ok(()) } else { Err(self.on_other_device(stream)) }
    }

    #[cold]
    fn on_other_device(&self, stream: &Stream) -> Error {
        let (buffer, owner) = (format!("kernel {}", self.name), self.device.id());
        BufferError::Device { buffer, owner, stream: stream.device_id() }.into()
    }
}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} of {}", self.name, self.device)
    }
}

fn check_sizes(kernel: &'static str, takes: &[u64], declared: &[u64]) -> Result<()> {
    if takes.len() != declared.len() {
        return Err(BufferError::ArgumentCount { kernel, takes: takes.len(), declared: declared.len() }.into());
    }
    match takes.iter().zip(declared).position(|(takes, declared)| takes != declared) {
        Some(index) => {
            let (takes, declared) = (takes[index], declared[index]);
            Err(BufferError::ArgumentSize { kernel, index, takes, declared }.into())
        }
        None => Ok(()),
    }
}

/// A parameter: a slice that the kernel reads. Two arguments: the address, and the number of elements as an
/// `unsigned long long`.
#[derive(Debug)]
pub struct Slice<T>(PhantomData<T>);

/// A parameter: a slice that the kernel reads and writes. Two arguments, as [`Slice`].
#[derive(Debug)]
pub struct SliceMut<T>(PhantomData<T>);

/// A parameter: the address of elements that the kernel reads. The kernel must get their number in another way.
#[derive(Debug)]
pub struct Pointer<T>(PhantomData<T>);

/// A parameter: the address of elements that the kernel reads and writes, as [`Pointer`].
#[derive(Debug)]
pub struct PointerMut<T>(PhantomData<T>);

/// The type of a kernel's parameter. Sealed.
pub trait Parameter: sealed::Parameter {}

/// The types of a kernel's parameters: a tuple of up to 12. Sealed.
pub trait Parameters: sealed::Parameters {}

/// An argument for a parameter `P`: a number of the same type, or a slice by reference. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an argument for a parameter `{P}`",
    note = "numbers have the parameter's own type; slices are passed as `&vec` or `&mut vec` of the same element type"
)]
pub trait Argument<'a, P>: sealed::Argument<'a, P> {}

/// The arguments for parameters `P`: a tuple of the same length. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not arguments for parameters `{P}`",
    note = "one argument per parameter, in the same order"
)]
pub trait Arguments<'a, P>: sealed::Arguments<'a, P> {}

/// One launch, without its arguments.
#[derive(Debug)]
pub struct Launch<'s> {
    function: FunctionId,
    stream: &'s Stream,
    shape: LaunchShape,
    line: &'static Location<'static>,
}

impl Launch<'_> {
    #[inline]
    fn queue<const A: usize, const N: usize>(&self, list: &ArgumentList<'_, A, N>) -> Result<()> {
        let private = || list.accesses().all(|access| access.is_private_to(self.stream));
        if let Some(frozen) = direct(self.stream, private) {
            let late = || list.accesses().for_each(|access| access.add_late(self.stream));
            return submit_direct(frozen, self.stream, self.line, late, || self.call(list.arguments()));
        }
        self.queue_in_order(list)
    }

    #[inline(never)]
    fn queue_in_order<const A: usize, const N: usize>(&self, list: &ArgumentList<'_, A, N>) -> Result<()> {
        submit(self.stream, &list.accesses, Reach::OwnDevice, self.line, &mut || self.call(list.arguments()))
    }

    #[inline]
    #[expect(unsafe_code, reason = "the launch that `Kernel::load` is the promise for")]
    fn call(&self, arguments: &[KernelArg]) -> Result<()> {
        let (driver, stream) = (self.stream.driver(), self.stream.id());
        // SAFETY: `load`'s caller promised that the kernel takes these parameters and stays within its slices; those
        // are device memory or pinned, `submit` keeps them, and pinned ones have no references that conflict.
        Ok(unsafe { driver.kernel_launch(self.function, self.shape, arguments, stream) }?)
    }
}

/// The arguments for `N` parameters, one or two for each parameter; without a heap allocation.
pub struct ArgumentList<'a, const A: usize, const N: usize> {
    arguments: [KernelArg; A],
    count: usize,
    /// The memory of each parameter that is memory.
    accesses: [Option<Access<'a>>; N],
}

impl<'a, const A: usize, const N: usize> ArgumentList<'a, A, N> {
    #[inline]
    fn new() -> Self {
        Self { arguments: [KernelArg::U32(0); A], count: 0, accesses: [None; N] }
    }

    #[inline]
    fn arguments(&self) -> &[KernelArg] {
        &self.arguments[..self.count]
    }

    #[inline]
    fn accesses(&self) -> impl Iterator<Item = &Access<'a>> {
        self.accesses.iter().flatten()
    }

    #[inline]
    fn push(&mut self, argument: KernelArg) {
        self.arguments[self.count] = argument;
        self.count += 1;
    }

    /// The memory of the parameter `index`.
    #[inline]
    fn push_part<T: Pod>(&mut self, index: usize, part: &Part<'a, T>, write: bool) {
        if part.len() == 0 {
            self.push(KernelArg::Ptr(DevicePtr(0)));
            return;
        }
        self.push(KernelArg::Ptr(part.device_address()));
        self.accesses[index] = Some(part.access(write));
    }
}

impl<const A: usize, const N: usize> fmt::Debug for ArgumentList<'_, A, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arguments().fmt(f)
    }
}

mod sealed {
    use super::{ArgumentList, Launch};
    use crate::Result;

    pub trait Parameter {
        /// The sizes of the arguments that it makes.
        const SIZES: &'static [u64];
    }

    pub trait Parameters {
        fn sizes() -> Vec<u64>;
    }

    pub trait Argument<'a, P> {
        /// Adds it as the argument for the parameter `index`.
        fn push_to<const A: usize, const N: usize>(self, list: &mut ArgumentList<'a, A, N>, index: usize);
    }

    pub trait Arguments<'a, P> {
        fn launch(self, launch: &Launch<'_>) -> Result<()>;
    }
}

/// Declares numbers.
macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl sealed::Parameter for $ty {
            const SIZES: &'static [u64] = &[size_of::<$ty>() as u64];
        }

        impl Parameter for $ty {}

        impl<'a> sealed::Argument<'a, $ty> for $ty {
            #[inline]
            fn push_to<const A: usize, const N: usize>(self, list: &mut ArgumentList<'a, A, N>, _: usize) {
                list.push(self.into());
            }
        }

        impl Argument<'_, $ty> for $ty {}
    )*};
}

numbers!(u32, i32, u64, i64, f32, f64);

/// Declares parameters in memory: which borrow they take, whether they are written, and whether the length follows.
macro_rules! memory {
    ($($name:ident $into:ident $view:ident $write:literal $sizes:expr, $with_len:literal;)*) => {$(
        impl<T> sealed::Parameter for $name<T> {
            const SIZES: &'static [u64] = &$sizes;
        }

        impl<T> Parameter for $name<T> {}

        impl<'a, T: Pod, V: $into<'a, T>> sealed::Argument<'a, $name<T>> for V {
            #[inline]
            fn push_to<const A: usize, const N: usize>(self, list: &mut ArgumentList<'a, A, N>, index: usize) {
                let view = self.$view();
                list.push_part(index, &view.part, $write);
                if $with_len {
                    list.push(KernelArg::U64(view.len() as u64));
                }
            }
        }

        impl<'a, T: Pod, V: $into<'a, T>> Argument<'a, $name<T>> for V {}
    )*};
}

memory! {
    Slice IntoView into_view false [8, 8], true;
    SliceMut IntoViewMut into_view_mut true [8, 8], true;
    Pointer IntoView into_view false [8], false;
    PointerMut IntoViewMut into_view_mut true [8], false;
}

/// Declares tuples.
macro_rules! tuples {
    ($(($($p:ident $a:ident $field:tt),*);)*) => {$(
        impl<$($p: Parameter),*> sealed::Parameters for ($($p,)*) {
            fn sizes() -> Vec<u64> {
                [$($p::SIZES),*].concat()
            }
        }

        impl<$($p: Parameter),*> Parameters for ($($p,)*) {}

        impl<'a, $($p: Parameter, $a: Argument<'a, $p>),*> sealed::Arguments<'a, ($($p,)*)> for ($($a,)*) {
            #[inline]
            fn launch(self, launch: &Launch<'_>) -> Result<()> {
                const PARAMETERS: usize = [$($field),*].len();
                // A slice is two arguments.
                let mut list = ArgumentList::<{ 2 * PARAMETERS }, PARAMETERS>::new();
                $(self.$field.push_to(&mut list, $field);)*
                launch.queue(&list)
            }
        }

        impl<'a, $($p: Parameter, $a: Argument<'a, $p>),*> Arguments<'a, ($($p,)*)> for ($($a,)*) {}
    )*};
}

tuples! {
    (P0 A0 0);
    (P0 A0 0, P1 A1 1);
    (P0 A0 0, P1 A1 1, P2 A2 2);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9, P10 A10 10);
    (P0 A0 0, P1 A1 1, P2 A2 2, P3 A3 3, P4 A4 4, P5 A5 5, P6 A6 6, P7 A7 7, P8 A8 8, P9 A9 9, P10 A10 10, P11 A11 11);
}
