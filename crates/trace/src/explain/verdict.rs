//! Why a request ran out of memory: one of a fixed list of verdicts, with the numbers for it.

use super::parts::Parts;
use super::periods::Growth;
use crate::bytes_text::text;
use crate::replay::{InferredLimit, RequestInfo};

/// Why a request ran out of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// More is allocated, with the request, than the device has.
    LiveExceedsDevice,
    /// Free memory would have sufficed, but is in pieces that are too small.
    Fragmentation,
    /// Free memory would have sufficed, but is kept for another stream, pool or size class, or waits for streams.
    OtherStreamOrPool,
    /// A memory limit that was set; the device has more.
    Limit,
    /// The device would have sufficed, but others use too much of its memory.
    Outside,
    /// More is allocated from iteration to iteration.
    Growth,
    /// No request ran out of memory.
    Fitted,
    /// The snapshot has no history.
    #[default]
    Unknown,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::LiveExceedsDevice,
        Self::Fragmentation,
        Self::OtherStreamOrPool,
        Self::Limit,
        Self::Outside,
        Self::Growth,
        Self::Fitted,
        Self::Unknown,
    ];

    /// Its name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LiveExceedsDevice => "live_exceeds_device",
            Self::Fragmentation => "fragmentation",
            Self::OtherStreamOrPool => "other_stream_or_pool",
            Self::Limit => "limit",
            Self::Outside => "outside",
            Self::Growth => "growth",
            Self::Fitted => "fitted",
            Self::Unknown => "unknown",
        }
    }

    /// It in a few words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::LiveExceedsDevice => "more is allocated than the device has",
            Self::Fragmentation => "fragmentation",
            Self::OtherStreamOrPool => "free memory is kept by another stream or pool",
            Self::Limit => "a memory limit",
            Self::Outside => "memory taken from outside the allocator",
            Self::Growth => "growth from iteration to iteration",
            Self::Fitted => "it did not run out of memory",
            Self::Unknown => "no history",
        }
    }
}

/// The facts for a verdict.
#[derive(Clone, Copy)]
pub(super) struct Facts<'a> {
    pub parts: &'a Parts,
    /// Whether the parts are all of the device; else its size is not known.
    pub is_known: bool,
    /// The request that failed.
    pub request: &'a RequestInfo,
    /// The free memory of the device then.
    pub device_free: u64,
    pub limit: Option<InferredLimit>,
    /// The memory of a context.
    pub bytes_context: u64,
    pub growth: Option<&'a Growth>,
    /// How many iterations that growth took.
    pub periods: usize,
}

/// The verdict, and the numbers for it.
#[derive(Clone, Debug, Default)]
pub(super) struct Judgement {
    pub verdict: Verdict,
    /// The limit that was inferred.
    pub limit: Option<InferredLimit>,
    /// In sentences.
    pub evidence: Vec<String>,
    /// By how much the allocated and requested bytes exceed what the allocator could get.
    pub missing: u64,
    /// A limit refused the request, not the device.
    pub is_limit: bool,
    /// The bytes that others use of a known device, without one context.
    pub used_by_others: u64,
}

/// Why a request ran out of memory.
pub(super) fn judge(facts: &Facts<'_>) -> Judgement {
    let Facts { parts, is_known, request, device_free, bytes_context, .. } = *facts;
    let (verdict, evidence) = verdict(facts);
    let available = available(facts);
    let outside = if is_known { parts.outside.saturating_sub(bytes_context) } else { 0 };
    Judgement {
        verdict,
        limit: facts.limit,
        evidence,
        missing: parts.live().saturating_add(request.bytes_rounded).saturating_sub(available),
        is_limit: device_free >= request.bytes_segment,
        used_by_others: outside,
    }
}

/// The memory that the allocator could get.
fn available(facts: &Facts<'_>) -> u64 {
    let Facts { parts, request, device_free, limit, .. } = *facts;
    match limit {
        _ if device_free < request.bytes_segment => parts.reserved().saturating_add(device_free),
        Some(limit) => limit.used.max(parts.reserved()),
        None => parts.reserved(),
    }
}

/// The verdict, with its evidence in sentences.
fn verdict(facts: &Facts<'_>) -> (Verdict, Vec<String>) {
    let Facts { parts, is_known, request, device_free, limit, bytes_context, growth, periods } = *facts;
    let is_full = device_free < request.bytes_segment;
    let total = parts.total();
    let live = parts.live();
    let needed = live.saturating_add(request.bytes_rounded);
    let available = available(facts);
    let mut evidence = vec![asked(request, limit, device_free, available, is_full)];
    if needed > available {
        let missing = needed - available;
        evidence.push(format!(
            "{} were allocated; with the request {}, which is {} more than the allocator could get",
            text(live),
            text(needed),
            text(missing)
        ));
        if let Some(growth) = growth.filter(|growth| growth.bytes >= missing) {
            evidence.push(growth_text(growth, periods));
            return (Verdict::Growth, evidence);
        }
        if parts.rounding >= missing && parts.rounding >= live / 20 {
            evidence.push(format!("{} of it are rounding inside blocks", text(parts.rounding)));
            return (Verdict::Fragmentation, evidence);
        }
        let usable = total.saturating_sub(parts.outside.min(bytes_context));
        if needed > usable {
            let over = needed - usable;
            evidence.push(match is_known {
                true => format!("the device has {} for programs: {} too little", text(usable), text(over)),
                false => format!("the device had {} for this program: {} too little", text(usable), text(over)),
            });
            return (Verdict::LiveExceedsDevice, evidence);
        }
        if !is_full {
            let least = if is_known { "" } else { "at least " };
            evidence.push(format!("the device has {least}{}", text(total)));
            return (Verdict::Limit, evidence);
        }
        evidence.push(format!(
            "{} of {} are used by others: contexts, libraries, other processes",
            text(parts.outside),
            text(total)
        ));
        return (Verdict::Outside, evidence);
    }
    let headroom = available - parts.reserved().min(available);
    let own = parts.free_too_small.saturating_add(parts.free_large_enough).saturating_add(headroom);
    let elsewhere = parts.kept_elsewhere();
    evidence.push(format!("{} were allocated, so {} would have sufficed", text(live), text(needed)));
    // Fragmentation decides in which iteration it runs out of memory, not whether it does.
    if let Some(growth) = growth.filter(|growth| growth.bytes > own.saturating_add(elsewhere)) {
        evidence.push(growth_text(growth, periods));
        return (Verdict::Growth, evidence);
    }
    if own >= request.bytes_rounded && (parts.free_too_small >= elsewhere || elsewhere < request.bytes_rounded) {
        evidence.push(format!(
            "{} are free for this stream, in pieces smaller than the request, and {} could still be reserved",
            text(parts.free_too_small),
            text(headroom)
        ));
        return (Verdict::Fragmentation, evidence);
    }
    let kept = [
        (parts.free_other_streams, "for other streams"),
        (parts.free_other_pools, "in other pools"),
        (parts.free_other_size, "in segments for requests of the other size class"),
        (parts.waiting_for_streams, "freed and waiting for streams"),
    ];
    let kept = kept.into_iter().filter(|&(bytes, _)| bytes > 0);
    let kept: Vec<String> = kept.map(|(bytes, place)| format!("{} {place}", text(bytes))).collect();
    evidence.push(format!("{} are free elsewhere: {}", text(elsewhere), kept.join(", ")));
    (Verdict::OtherStreamOrPool, evidence)
}

/// What was requested, and why it was refused.
fn asked(
    request: &RequestInfo,
    limit: Option<InferredLimit>,
    device_free: u64,
    available: u64,
    is_full: bool,
) -> String {
    let RequestInfo { bytes, bytes_segment, .. } = *request;
    let segment =
        if bytes_segment > bytes { format!(" (a segment of {})", text(bytes_segment)) } else { String::new() };
    let refused = match is_full {
        true => format!("the device had {} free", text(device_free)),
        false => format!("{} refused it; the device had {} free", limit_text(limit, available), text(device_free)),
    };
    format!("the request was for {}{segment}, and {refused}", text(bytes))
}

/// A limit that was inferred, with its range if that is wide.
pub(super) fn limit_text(limit: Option<InferredLimit>, available: u64) -> String {
    match limit {
        Some(InferredLimit { at_least, below, .. })
            if below - at_least > below / 100 && text(at_least) != text(below) =>
        {
            format!("a memory limit of at least {} and below {}", text(at_least), text(below))
        }
        _ => format!("a memory limit of {}", text(available)),
    }
}

pub(super) fn growth_text(growth: &Growth, periods: usize) -> String {
    let count = (growth.last - growth.first).max(1) as u64;
    format!(
        "over the last {count} of {periods} iterations {} more stayed allocated, {} in each",
        text(growth.bytes),
        text(growth.bytes / count)
    )
}
