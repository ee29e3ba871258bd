//! A decode step, captured once and replayed for every token: random numbers from a generator, two kernels, and the
//! buffers that belong to the step. The same steps, launched one by one, give the same tokens.

use std::sync::Arc;

use warpool::driver::{HostKernel, KernelSource, LaunchShape};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Step};
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::typed::{Kernel, Slice, SliceMut};
use warpool::{Device, DeviceVec, Result, Stream};
use warpool_examples::{Gpu, Outcome};

const VOCABULARY: usize = 64;
const TOKENS: usize = 24;

/// A model of one table: the logits of the next token are one of its rows. A token is drawn by adding Gumbel noise.
static SOURCE: KernelSource = KernelSource {
    name: "decode example",
    cuda: r#"
    typedef unsigned long long size;
    extern "C" __global__ void logits(const float* table, unsigned long long tables,
        const unsigned* text, unsigned long long texts, const unsigned* position, unsigned long long positions,
        float* row, unsigned long long rows) {
        size i = threadIdx.x;
        if (positions == 0 || position[0] >= texts || i >= rows) return;
        size at = text[position[0]] * rows + i;
        if (at < tables) row[i] = table[at];
    }
    extern "C" __global__ void draw(const float* row, unsigned long long rows,
        const float* noise, unsigned long long noises, unsigned* text, unsigned long long texts,
        unsigned* position, unsigned long long positions) {
        if (threadIdx.x != 0 || positions == 0 || position[0] + 1 >= texts || rows == 0) return;
        unsigned best = 0;
        float most = -1e30f;
        for (unsigned i = 0; i < rows && i < noises; i++) {
            float value = row[i] - logf(-logf(noise[i] * 0.999f + 0.0005f));
            if (value > most) { most = value; best = i; }
        }
        text[position[0] + 1] = best;
        position[0] += 1;
    }"#,
    host_kernels: &[
        HostKernel::new("logits", |kernel| {
            let position = kernel.read_u32(kernel.arg_ptr(4)?, 1)?[0];
            let token = kernel.read_u32(kernel.arg_ptr(2)?, position as usize + 1)?[position as usize];
            let len = kernel.arg_u64(7)? as usize;
            let table = kernel.read_f32(kernel.arg_ptr(0)?, kernel.arg_u64(1)? as usize)?;
            kernel.write_f32(kernel.arg_ptr(6)?, &table[token as usize * len..][..len])
        }),
        HostKernel::new("draw", |kernel| {
            let row = kernel.read_f32(kernel.arg_ptr(0)?, kernel.arg_u64(1)? as usize)?;
            let noise = kernel.read_f32(kernel.arg_ptr(2)?, kernel.arg_u64(3)? as usize)?;
            let value = |i: usize| row[i] - (-(noise[i] * 0.999 + 0.0005).ln()).ln();
            let best = (0..row.len()).fold(0, |best, i| if value(i) > value(best) { i } else { best });
            let (text, texts, position) = (kernel.arg_ptr(4)?, kernel.arg_u64(5)?, kernel.arg_ptr(6)?);
            let next = kernel.read_u32(position, 1)?[0] + 1;
            if u64::from(next) < texts {
                kernel.write_u32(text.offset(u64::from(next) * 4), &[best as u32])?;
                kernel.write_u32(position, &[next])?;
            }
            Ok(())
        }),
    ],
};

/// Table, text and position; writes the row.
type Logits = (Slice<f32>, Slice<u32>, Slice<u32>, SliceMut<f32>);
/// Row and noise; writes the text and the position.
type Draw = (Slice<f32>, Slice<f32>, SliceMut<u32>, SliceMut<u32>);

struct Model {
    table: DeviceVec<f32>,
    logits: Kernel<Logits>,
    draw: Kernel<Draw>,
}

/// The buffers that a step reads and writes.
struct Buffers {
    text: DeviceVec<u32>,
    position: DeviceVec<u32>,
    row: DeviceVec<f32>,
    noise: DeviceVec<f32>,
}

impl Model {
    fn new(device: &Device, allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) -> Result<Self> {
        let table: Vec<f32> = (0..VOCABULARY * VOCABULARY).map(|n| (n * 7919 % 101) as f32 / 50.0).collect();
        Ok(Self {
            table: DeviceVec::from_slice(allocator, &table, stream)?.with_label("table"),
            // SAFETY: these are its parameters; it checks the lengths of its slices.
            logits: unsafe { Kernel::load(device, &SOURCE, "logits")? },
            // SAFETY: as above.
            draw: unsafe { Kernel::load(device, &SOURCE, "draw")? },
        })
    }

    /// Queues one step.
    fn step(&self, generator: &Generator, buffers: &mut Buffers, stream: &Stream) -> Result<()> {
        let Buffers { text, position, row, noise } = buffers;
        let block = LaunchShape { block: [VOCABULARY as u32, 1, 1], ..LaunchShape::ONE };
        stream.random_uniform(generator, &mut *noise)?;
        self.logits.launch(stream, block, (&self.table, &*text, &*position, &mut *row))?;
        self.draw.launch(stream, LaunchShape::ONE, (&*row, &*noise, text, position))
    }
}

impl Buffers {
    /// A text that begins with token 1.
    fn new(allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) -> Result<Self> {
        let mut text = DeviceVec::zeroed(allocator, TOKENS + 1, stream)?.with_label("text");
        stream.fill(text.slice_mut(..1)?, 1)?;
        Ok(Self {
            text,
            position: DeviceVec::zeroed(allocator, 1, stream)?.with_label("position"),
            row: DeviceVec::zeroed(allocator, VOCABULARY, stream)?.with_label("row"),
            noise: DeviceVec::zeroed(allocator, VOCABULARY, stream)?.with_label("noise"),
        })
    }
}

fn main() -> Outcome {
    let gpu = Gpu::from_arguments()?;
    let device = gpu.instance().device(0)?;
    let allocator: Arc<dyn DeviceAllocator> =
        Arc::new(CachingAllocator::new(gpu.instance(), Settings::parse("expandable_segments:True")?));
    let stream = device.lease_stream()?;
    let model = Model::new(&device, &allocator, &stream)?;
    let generator = Generator::new(&device)?;

    // Once without a graph.
    generator.set_seed(2026)?;
    let mut buffers = Buffers::new(&allocator, &stream)?;
    for _ in 0..TOKENS {
        model.step(&generator, &mut buffers, &stream)?;
    }
    let expected = buffers.text.to_vec(&stream)?;

    // And captured: the buffers move into the step, which the graph's memory and random numbers belong to.
    generator.set_seed(2026)?;
    let buffers = Buffers::new(&allocator, &stream)?;
    let step = Step::capture(&allocator, &stream, CaptureOptions::default(), buffers, |stream, buffers| {
        model.step(&generator, buffers, stream)
    })?;
    for _ in 0..TOKENS {
        step.replay(&stream)?;
    }
    let text = step.buffers().text.to_vec(&stream)?;
    assert_eq!(text, expected, "the replays drew the same tokens");
    println!("{TOKENS} tokens by replays of one graph: {text:?}");
    drop((step, model));
    gpu.finish()
}
