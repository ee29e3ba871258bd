//! A test context for cuBLAS: a simulated device, and multiplications with known results. A test that makes one ends
//! with [`BlasFixture::finish`].

use std::sync::Arc;

use warpool::blas::{Blas, BlasSettings};
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{BlasMatrix, Driver, HandleId, Libraries as _, Sgemm};
use warpool::memory::report::Stat;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Device, Instance, Result, Stream};

use super::memory::{FIRST, MIB};

/// The size on a device of compute capability 9, such as the simulated one.
pub const HOPPER: u64 = 32 * MIB;

/// A simulated machine with a counter of its calls, an allocator, and cuBLAS on it.
pub struct BlasFixture {
    pub sim: Arc<SimDriver>,
    pub counting: Arc<Counting>,
    pub instance: Instance,
    pub device: Device,
    pub allocator: Arc<dyn DeviceAllocator>,
    pub blas: Blas,
}

impl BlasFixture {
    pub fn new() -> Self {
        Self::with(BlasSettings::default())
    }

    pub fn with(settings: BlasSettings) -> Self {
        Self::on(|instance| Arc::new(CachingAllocator::new(instance, Settings::default())), settings)
    }

    pub fn on(allocator: impl FnOnce(&Instance) -> Arc<dyn DeviceAllocator>, settings: BlasSettings) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let allocator = allocator(&instance);
        let blas = Blas::new(&allocator, settings);
        Self { sim, counting, device: instance.device(0).unwrap(), instance, allocator, blas }
    }

    pub fn stream(&self) -> Stream {
        self.device.pool_stream().unwrap()
    }

    /// The calls on a handle from its `from`-th on, without multiplications.
    pub fn calls_since(&self, handle: HandleId, from: usize) -> Vec<LibraryCall> {
        let calls = self.sim.library_calls(handle).split_off(from);
        calls.into_iter().filter(|call| !matches!(call, LibraryCall::Sgemm(_))).collect()
    }

    pub fn workspaces(&self) -> Stat {
        self.allocator.stats(FIRST).unwrap().workspace_bytes
    }

    pub fn trim(&self) -> u64 {
        self.allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap()
    }

    /// Sets the stream through the raw handle, as a user might.
    pub fn sim_set_stream(&self, handle: HandleId, stream: &Stream) {
        self.sim.library_set_stream(handle, stream.id()).unwrap();
    }

    /// Frees everything, and checks for hazards and leaks.
    pub fn finish(self) {
        for device in self.instance.devices() {
            device.synchronize().unwrap();
        }
        assert_eq!(self.sim.hazards(), [], "hazards");
        self.blas.close().unwrap();
        assert_eq!(self.sim.object_counts().handles, 0, "handles");
        let stat = self.allocator.stats(FIRST).unwrap().workspace_bytes;
        assert_eq!((stat.current, stat.allocated), (0, stat.freed));
        assert_eq!(self.allocator.stats(FIRST).unwrap().allocated_bytes.all.current, 0, "blocks");
    }
}

/// Runs `body` on `count` threads, with their numbers, and waits until their thread-local variables are destroyed,
/// which the end of a scope does not.
pub fn on_threads(count: usize, body: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..count).map(|i| scope.spawn(move || body(i))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Three matrices on the device, small integers that depend on `seed`: their sums are exact in any order, even in TF32.
pub struct Matrices {
    pub product: Sgemm,
    pub expected: Vec<f32>,
    pub driver: Arc<dyn Driver>,
    _block: DeviceBlock,
}

impl Matrices {
    pub const N: u32 = 12;

    pub fn new(allocator: &Arc<dyn DeviceAllocator>, stream: &Stream, seed: u32) -> Result<Self> {
        let n = Self::N as usize;
        let number = |i: usize, salt: usize| ((i * 7 + salt * 5 + seed as usize * 3) % 13) as f32 - 6.0;
        let (a, b): (Vec<f32>, Vec<f32>) = (0..n * n).map(|i| (number(i, 1), number(i, 2))).unzip();
        let cell = |at: usize| {
            let (row, column) = (at % n, at / n);
            (0..n).map(|i| a[i * n + row] * b[column * n + i]).sum()
        };
        let expected = (0..n * n).map(cell).collect();
        let driver = Arc::clone(allocator.instance().driver());
        let block = allocator.allocate((3 * n * n * 4) as u64, stream)?;
        let bytes: Vec<u8> = a.iter().chain(&b).flat_map(|x| x.to_ne_bytes()).collect();
        // Stream order covers earlier uses of the block, but not the host's access.
        stream.synchronize()?;
        driver.upload(stream.device_id(), block.ptr(), &bytes)?;
        let matrix = |index: usize| BlasMatrix {
            ptr: block.ptr().offset((index * n * n * 4) as u64),
            stride: Self::N,
            transposed: false,
        };
        let (m, n, k) = (Self::N, Self::N, Self::N);
        let product = Sgemm { m, n, k, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 0.0, c: matrix(2) };
        Ok(Self { product, expected, driver, _block: block })
    }

    /// Waits for the stream and compares.
    pub fn check(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        let mut bytes = vec![0; self.expected.len() * 4];
        self.driver.download(stream.device_id(), self.product.c.ptr, &mut bytes)?;
        let found: Vec<f32> = bytes.chunks(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect();
        assert_eq!(found, self.expected);
        Ok(())
    }
}
