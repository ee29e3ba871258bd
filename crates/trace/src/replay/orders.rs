//! One what-if in several address orders. As long as it requests the recorded segments, it gets them at the recorded
//! addresses; if it never requests others, there is only one order. After that the driver's addresses are not known,
//! and a seed chooses them: the answer is the range of the results.

use warpool::memory::report::TraceEntry;
use warpool::memory::settings::FreeBlockOrder;

use super::ReplayError;
use super::options::AllocatorChoice;
use super::report::AddressOrders;
use super::run::{OnProgress, Run, RunResult, Scatter};
use crate::parallel::in_parallel_beside;

/// In how many orders to replay, and on how many threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderOptions {
    pub orders: u32,
    pub threads: usize,
}

impl OrderOptions {
    /// With no more threads than there is memory for, if each run takes as much as that one.
    pub fn within(self, run: &Run<'_>, result: &RunResult) -> Self {
        let each = (result.bytes_taken + result.bytes_taken / 4).max(1);
        let threads = usize::try_from(run.budget.left() / each).unwrap_or(usize::MAX);
        Self { threads: self.threads.min(threads).max(1), ..self }
    }
}

/// The results of one what-if.
#[derive(Debug)]
pub(super) struct OrderResults {
    /// One for each order.
    results: Vec<RunResult>,
    /// The first step at which a result may depend on the order; `None` if none does.
    pub free_from_step: Option<usize>,
    /// The options for further runs of the same program.
    pub options: OrderOptions,
}

/// Runs in one order, and in all orders if addresses can matter.
pub(super) fn run_orders(
    run: &Run<'_>,
    options: OrderOptions,
    progress: OnProgress<'_>,
) -> Result<OrderResults, ReplayError> {
    let first = seeded(run, 0).run(progress)?;
    let free_from_step = first.leaves_recorded_at.filter(|_| depends_on_addresses(run));
    let options = options.within(run, &first);
    let mut results = vec![first];
    if free_from_step.is_some() {
        results.extend(run_seeds(run, 1, options, progress)?);
    }
    Ok(OrderResults { results, free_from_step, options })
}

/// The first order in which a run does not fit, `tried_first` before the others. The orders are those of
/// [`run_orders`]: if all addresses are as recorded, or do not matter, one order is enough.
pub(super) fn first_failure(run: &Run<'_>, orders: u32, tried_first: u32) -> Result<Option<u32>, ReplayError> {
    let first = if tried_first < orders { tried_first } else { 0 };
    for order in std::iter::once(first).chain((0..orders).filter(|&order| order != first)) {
        let result = seeded(run, u64::from(order)).run(None)?;
        if !fits(&result) {
            return Ok(Some(order));
        }
        if result.leaves_recorded_at.is_none() || !depends_on_addresses(run) {
            break;
        }
    }
    Ok(None)
}

/// Runs the recorded program in the same orders, with recorded addresses before `free_from_step`.
pub(super) fn run_control(
    run: &Run<'_>,
    free_from_step: usize,
    options: OrderOptions,
    progress: OnProgress<'_>,
) -> Result<OrderResults, ReplayError> {
    let run = Run { recorded_steps: free_from_step, ..*run };
    let results = run_seeds(&run, 0, options, progress)?;
    Ok(OrderResults { results, free_from_step: Some(free_from_step), options })
}

impl OrderResults {
    /// Over all orders.
    pub fn summary(&self, bytes_available: Option<u64>) -> AddressOrders {
        let peaks = || self.results.iter().map(|result| result.peak_reserved_bytes);
        let fitting = || self.results.iter().filter(|result| fits(result));
        let count = |results: usize| u32::try_from(results).expect("as many as orders");
        AddressOrders {
            run: count(self.results.len()),
            fit: count(fitting().count()),
            peak_reserved_bytes_least: peaks().min().unwrap_or(0),
            peak_reserved_bytes_most: peaks().max().unwrap_or(0),
            margin_bytes_least: fitting()
                .filter_map(|result| Some(bytes_available?.saturating_sub(result.peak_reserved_bytes)))
                .min(),
        }
    }

    /// The worst result: one that ran out of memory, the earliest first; else the one that reserved most.
    pub fn into_worst(self) -> RunResult {
        let badness = |result: &RunResult| {
            let event = result.out_of_memory.as_ref().map_or(u64::MAX, |&(event, _)| event);
            (std::cmp::Reverse(event), result.peak_reserved_bytes, result.ooms)
        };
        // The first of equals, so that the result depends on no order of threads.
        let worst = self.results.into_iter().reduce(|a, b| if badness(&b) > badness(&a) { b } else { a });
        worst.expect("at least one order was run")
    }
}

/// Whether no request ran out of memory.
pub(super) fn fits(result: &RunResult) -> bool {
    result.out_of_memory.is_none() && result.ooms == 0
}

/// Whether the addresses of segments can change the result: the caching allocator chooses between free blocks of one
/// size by address, as PyTorch up to 2.11, or by age. The other allocators have one range of addresses for each list of
/// blocks.
fn depends_on_addresses(run: &Run<'_>) -> bool {
    run.allocator == AllocatorChoice::Caching && run.settings.free_block_order == FreeBlockOrder::Address
}

/// The run with the addresses of a seed.
fn seeded<'a>(run: &Run<'a>, seed: u64) -> Run<'a> {
    // Around the recorded addresses, so that new segments come before, between and after the recorded ones, with room
    // for the address ranges of expandable segments.
    const RANGES: u64 = 64;
    const ALIGNMENT: u64 = 2 << 20;
    let segments = || run.plan.segment_events.iter().map(|segment| &run.events[segment.event as usize]);
    let initial = || run.inference.initial.iter().flat_map(|initial| initial.heap.segments());
    let starts = segments().map(|event: &TraceEntry| event.addr).chain(initial().map(|segment| segment.base));
    let ends = segments().map(|event| event.addr + event.size).chain(initial().map(|segment| segment.end));
    let room = run.capacity.saturating_mul(RANGES);
    let (first, last) = (starts.min().unwrap_or(1 << 47), ends.max().unwrap_or(1 << 47));
    let low = first.saturating_sub(room).max(ALIGNMENT);
    Run { scatter: Some(Scatter { seed, low, high: last.saturating_add(room).min(1 << 56) }), ..*run }
}

/// Runs the seeds from `first` on, up to the number of orders, on several threads.
fn run_seeds(
    run: &Run<'_>,
    first: u32,
    options: OrderOptions,
    progress: OnProgress<'_>,
) -> Result<Vec<RunResult>, ReplayError> {
    let count = options.orders.saturating_sub(first) as usize;
    let seeded = |number: usize| seeded(run, u64::from(first) + number as u64);
    // The callback belongs to this thread.
    let own = |number| seeded(number).run(progress);
    in_parallel_beside(count, options.threads, own, |number| seeded(number).run(None)).into_iter().collect()
}
