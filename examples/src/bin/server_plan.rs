//! The memory plan of an inference server: weights first, then one step at the largest batch to measure the peak of
//! activations, and all remaining memory for the cache of keys and values, in pages. Then requests of random lengths
//! are served. A request begins when the cache has enough pages for its whole length, so the server never runs out of
//! memory.

use std::collections::VecDeque;
use std::sync::Arc;

use warpool::memory::{DeviceAllocator, PagedAllocator, Settings};
use warpool::{Device, DeviceVec, Result, Stream};
use warpool_examples::{Gpu, Outcome};

const LAYERS: usize = 12;
const HIDDEN: usize = 2048;
const BATCH_MAX: usize = 64;
/// Tokens of one page, and numbers that a token needs in it: keys and values of all layers.
const PAGE_TOKENS: usize = 16;
const TOKEN: usize = 2 * LAYERS * HIDDEN;
/// The share of the device that the server may use.
const SHARE: f64 = 0.05;

/// The memory that the server holds the whole time.
struct Plan {
    weights: Vec<DeviceVec<f32>>,
    free_pages: Vec<DeviceVec<f32>>,
}

struct Request {
    length: usize,
    /// Tokens so far.
    tokens: usize,
    pages: Vec<DeviceVec<f32>>,
}

impl Request {
    fn new(length: usize) -> Self {
        Self { length, tokens: 0, pages: Vec::new() }
    }

    fn pages_needed(&self) -> usize {
        self.length.div_ceil(PAGE_TOKENS)
    }
}

/// The memory of one forward pass over a batch. Only one row of each buffer is written, so that the simulated GPU does
/// not hold gigabytes.
fn activations(allocator: &Arc<dyn DeviceAllocator>, batch: usize, stream: &Stream) -> Result<()> {
    let mut hidden = DeviceVec::<f32>::uninit(allocator, batch * HIDDEN, stream)?;
    stream.fill(hidden.slice_mut(..HIDDEN)?, 1.0)?;
    for _ in 0..LAYERS {
        let mut next = DeviceVec::uninit(allocator, batch * HIDDEN, stream)?;
        let mut mlp = DeviceVec::<f32>::uninit(allocator, batch * 4 * HIDDEN, stream)?;
        stream.copy(hidden.slice(..HIDDEN)?, mlp.slice_mut(..HIDDEN)?)?;
        stream.copy(mlp.slice(..HIDDEN)?, next.slice_mut(..HIDDEN)?)?;
        hidden = next;
    }
    Ok(())
}

fn plan(device: &Device, allocator: &Arc<dyn DeviceAllocator>, stream: &Stream) -> Result<Plan> {
    allocator.set_memory_fraction(device.id(), SHARE)?;
    let layer = |n| Ok(DeviceVec::uninit(allocator, 12 * HIDDEN * HIDDEN, stream)?.with_label(&format!("layer {n}")));
    let weights = (0..LAYERS).map(layer).collect::<Result<Vec<_>>>()?;
    let reserved = || Ok::<_, warpool::Error>(allocator.stats(device.id())?.reserved_bytes.all.current);
    let for_weights = reserved()?;
    // The memory of the largest step stays reserved for steps.
    activations(allocator, BATCH_MAX, stream)?;
    let for_activations = reserved()? - for_weights;
    // Everything else is cache. This block keeps the free memory of activations from being used for it.
    let held = DeviceVec::<u8>::uninit(allocator, for_activations as usize, stream)?;
    let mut free_pages = Vec::new();
    let full = loop {
        match DeviceVec::uninit(allocator, PAGE_TOKENS * TOKEN, stream) {
            Ok(page) => free_pages.push(page.with_label("page of the cache")),
            Err(error) if error.is_out_of_memory() => break error,
            Err(error) => return Err(error),
        }
    };
    drop(held);
    println!("weights {} MiB, activations {} MiB", for_weights >> 20, for_activations >> 20);
    println!("cache {} pages for {} tokens", free_pages.len(), free_pages.len() * PAGE_TOKENS);
    println!("then: {}", full.to_string().lines().next().unwrap_or_default());
    Ok(Plan { weights, free_pages })
}

/// The next request, if it needs at most that many pages.
fn next_that_fits(waiting: &mut VecDeque<Request>, pages: usize) -> Option<Request> {
    if waiting.front()?.pages_needed() <= pages { waiting.pop_front() } else { None }
}

fn main() -> Outcome {
    let gpu = Gpu::from_arguments()?;
    let device = gpu.instance().device(0)?;
    let stream = device.lease_stream()?;
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(PagedAllocator::new(gpu.instance(), Settings::default())?);
    let Plan { weights, mut free_pages } = plan(&device, &allocator, &stream)?;

    // Lengths from a fixed sequence, so that every run is the same.
    let lengths = (0_usize..2000).map(|n| 200 + n * 7919 % 1800);
    let mut waiting: VecDeque<Request> = lengths.map(Request::new).collect();
    let requests = waiting.len();
    let (mut running, mut promised) = (Vec::<Request>::new(), 0);
    let (mut steps, mut tokens) = (0, 0);
    while !(waiting.is_empty() && running.is_empty()) {
        // A request begins once there are pages for its whole length, beside those that running requests will still
        // take.
        while running.len() < BATCH_MAX
            && let Some(request) = next_that_fits(&mut waiting, free_pages.len() - promised)
        {
            promised += request.pages_needed();
            running.push(request);
        }
        for request in &mut running {
            if request.tokens.is_multiple_of(PAGE_TOKENS) {
                request.pages.push(free_pages.pop().expect("it was promised"));
                promised -= 1;
            }
            // The step writes the token's keys and values into its page; here only every 100th step writes a part.
            let page = request.pages.last_mut().expect("it has one");
            let at = request.tokens % PAGE_TOKENS * TOKEN;
            if steps % 100 == 0 {
                stream.fill(page.slice_mut(at..at + HIDDEN)?, request.tokens as f32)?;
            }
            request.tokens += 1;
        }
        steps += 1;
        tokens += running.len();
        if steps % 100 == 0 {
            activations(&allocator, running.len(), &stream)?;
        }
        for mut done in running.extract_if(.., |request| request.tokens == request.length) {
            free_pages.append(&mut done.pages);
        }
    }
    println!("{requests} requests in {steps} steps, {} at a time", tokens / steps);
    let stats = allocator.stats(device.id())?;
    println!("out of memory during service: {}", stats.num_ooms - 1);
    assert_eq!(stats.num_ooms, 1, "the plan's own last request");
    drop((weights, free_pages));
    gpu.finish()
}
