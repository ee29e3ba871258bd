//! Advice, the simplest change that works first, with what it saves, how to apply it, and how that is known (by
//! replays, or by arithmetic that is shown).

use super::fits::{Change, Fit, OVERHEAD_MIN};
use super::verdict::{Judgement, Verdict, limit_text};
use super::{ExplainOptions, Explanation, Holder};
use crate::bytes_text::text;
use crate::cards::Card;
use crate::category::{Category, Rule};
use crate::replay::LimitOrigin;

/// What kind of advice it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdviceKind {
    /// Something is kept from iteration to iteration.
    Leak,
    /// A memory limit of the program's own.
    Limit,
    /// A setting of PyTorch's allocator.
    Settings,
    /// Another allocator.
    Allocator,
    /// A smaller batch.
    Batch,
    /// Activations are computed again instead of kept.
    Checkpointing,
    /// The optimizer's state takes less.
    OptimizerState,
    /// Numbers of fewer bits.
    Precision,
    /// Others use less of the device.
    Others,
    /// A larger device.
    Device,
}

impl AdviceKind {
    /// Its name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Leak => "leak",
            Self::Limit => "limit",
            Self::Settings => "settings",
            Self::Allocator => "allocator",
            Self::Batch => "batch",
            Self::Checkpointing => "checkpointing",
            Self::OptimizerState => "optimizer_state",
            Self::Precision => "precision",
            Self::Others => "others",
            Self::Device => "device",
        }
    }
}

/// How it is known what an advice does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The recorded requests were replayed with it.
    Replay,
    /// Bytes of categories were added up.
    Arithmetic,
}

impl Proof {
    /// Its name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Replay => "replay",
            Self::Arithmetic => "arithmetic",
        }
    }
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What kind it is.
    pub kind: AdviceKind,
    /// What to do, in a few words.
    pub title: String,
    /// What it does, in a sentence.
    pub detail: String,
    /// What to write or run; `None` if that depends on the program.
    pub apply: Option<String>,
    /// Whether the program fits with it, by the recording; `None` if that is not known.
    pub fits: Option<bool>,
    /// The bytes that it saves: reserved memory if found by replay, allocated memory if by arithmetic.
    pub bytes_saved: Option<u64>,
    /// The bytes that are left of the device or the limit.
    pub margin_bytes: Option<u64>,
    /// How that is known.
    pub proof: Proof,
}

/// How to set settings of PyTorch.
const VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";
/// Another allocator is worth its installation if it saves this much more than PyTorch's own settings.
const MATERIAL_MIN: u64 = 256 << 20;
const MATERIAL_SHARE: u64 = 50;

/// The advice for an explanation.
pub(super) fn advise(explanation: &Explanation, judgement: &Judgement, options: &ExplainOptions<'_>) -> Vec<Advice> {
    let mut advice = Vec::new();
    let ran_out = explanation.ooms > 0;
    let does_not_fit = explanation.on_device.is_some_and(|on| !on.orders.all_fit());
    if judgement.verdict == Verdict::Growth && explanation.on_device.is_none() {
        // Whatever gives the program more memory only delays it.
        return leak(explanation).into_iter().collect();
    }
    if judgement.is_limit && ran_out && explanation.on_device.is_none() {
        advice.extend(limit(explanation, judgement));
    }
    match ran_out || does_not_fit {
        true => advice.extend(changes_that_fit(explanation)),
        false => advice.extend(changes_that_save(explanation)),
    }
    if does_not_fit || (ran_out && explanation.on_device.is_none()) {
        let missing = missing(explanation, judgement);
        if missing > 0 && !options.not_of_pytorch {
            advice.extend(smaller_program(explanation, missing));
        }
        advice.extend(others(judgement));
        advice.extend(device(explanation));
    }
    advice.extend(leak(explanation));
    advice
}

/// How many bytes too many the program needs: beyond what the allocator could get, or beyond the device that was asked
/// about.
fn missing(explanation: &Explanation, judgement: &Judgement) -> u64 {
    let Some(on) = explanation.on_device else { return judgement.missing };
    let usable = on.bytes_total.saturating_sub(crate::replay::bytes_context());
    explanation.peaks.map_or(0, |peaks| peaks.allocated.bytes.saturating_sub(usable))
}

/// The line that keeps memory from iteration to iteration.
fn leak(explanation: &Explanation) -> Option<Advice> {
    let growth = explanation.growth.as_ref()?;
    let holder = growth.holders.first()?;
    let each = growth.bytes / growth.iterations_grown.max(1);
    let line = holder.line.as_ref().or(holder.forward_line.as_ref());
    let place = line.map_or_else(|| holder.name.clone(), Clone::clone);
    let detail = format!(
        "over {} iterations {} stayed allocated, {} in each; most of it is allocated by {place}, and something keeps \
         it: a list, a sum of losses with their graphs, a cache without a bound",
        growth.iterations_grown,
        text(growth.bytes),
        text(each)
    );
    Some(Advice {
        kind: AdviceKind::Leak,
        title: format!("Do not keep what {place} makes from one iteration to the next"),
        detail,
        apply: Some(what_to_keep(holder)),
        fits: None,
        bytes_saved: Some(growth.bytes),
        margin_bytes: None,
        proof: Proof::Arithmetic,
    })
}

/// The code to write where something is kept.
fn what_to_keep(holder: &Holder) -> String {
    let kept = match holder.category {
        Category::Activations | Category::Temporaries | Category::Unknown => {
            "total += loss.item()                  # a number, not the tensor with its graph\n\
             outputs.append(x.detach().cpu())      # a result without its graph, in host memory"
        }
        _ => "del x                                 # when it is no longer needed",
    };
    kept.to_owned()
}

/// A limit that the program set.
fn limit(explanation: &Explanation, judgement: &Judgement) -> Option<Advice> {
    let in_force = explanation.in_force.as_ref()?;
    if in_force.limit_origin == LimitOrigin::RecordedDeviceFull {
        return None;
    }
    let limit = limit_text(judgement.limit, in_force.memory_limit?);
    let fit = explanation.fits.iter().find(|fit| fit.change == Change::Limit);
    let is_setting = ["per_process_memory_fraction", "memory_cap_mb"]
        .into_iter()
        .find(|key| in_force.settings_recorded.contains(key));
    let (detail, apply) = match is_setting {
        Some(key) => (format!("the setting {key} gives the program {limit}"), None),
        None => (
            format!(
                "the program set {limit} itself; the call overrides the environment variables, so it has to be changed \
                 there"
            ),
            Some("torch.cuda.set_per_process_memory_fraction(1.0)   # or no such call".to_owned()),
        ),
    };
    Some(Advice {
        kind: AdviceKind::Limit,
        title: "Raise the memory limit, or remove it".to_owned(),
        detail,
        apply,
        fits: fit.map(|fit| fit.fits),
        bytes_saved: None,
        margin_bytes: fit.and_then(|fit| fit.orders.margin_bytes_least),
        proof: Proof::Replay,
    })
}

/// Settings and allocators with which it fits. PyTorch's own come first; another allocator only where they do not
/// suffice, or where it leaves materially more.
fn changes_that_fit(explanation: &Explanation) -> Vec<Advice> {
    let best = best_setting(explanation, |fit| fit.fits);
    let paged = explanation.fits.iter().find(|fit| fit.change == Change::Allocator && fit.fits);
    let margin = |fit: &Fit| fit.orders.margin_bytes_least.unwrap_or(0);
    let reserved = |fit: &Fit| fit.orders.peak_reserved_bytes_most;
    let paged = paged.filter(|paged| {
        best.is_none_or(|best| {
            let more = margin(paged).saturating_sub(margin(best)).max(reserved(best).saturating_sub(reserved(paged)));
            more >= MATERIAL_MIN && more >= reserved(best) / MATERIAL_SHARE
        })
    });
    best.into_iter().chain(paged).map(|fit| of_fit(fit, None)).collect()
}

/// Where nothing ran out: what would reserve much less.
fn changes_that_save(explanation: &Explanation) -> Vec<Advice> {
    let Some(peaks) = explanation.peaks else { return Vec::new() };
    let recorded = peaks.reserved.bytes;
    let saved = |fit: &Fit| recorded.saturating_sub(fit.orders.peak_reserved_bytes_most);
    let is_material = |bytes: u64| bytes >= OVERHEAD_MIN && bytes >= recorded / 20;
    let best = best_setting(explanation, |fit| fit.fits && is_material(saved(fit)));
    let paged = explanation.fits.iter().find(|fit| fit.change == Change::Allocator && fit.fits);
    let paged = paged.filter(|paged| {
        let more = saved(paged).saturating_sub(best.map_or(0, saved));
        more >= MATERIAL_MIN && more >= recorded / MATERIAL_SHARE
    });
    best.into_iter().chain(paged).map(|fit| of_fit(fit, Some(saved(fit)))).collect()
}

/// The setting of PyTorch to recommend: expandable segments, unless another leaves materially more.
fn best_setting(explanation: &Explanation, works: impl Fn(&Fit) -> bool) -> Option<&Fit> {
    let settings = || explanation.fits.iter().filter(|fit| fit.change == Change::Settings && works(fit));
    let reserved = |fit: &Fit| fit.orders.peak_reserved_bytes_most;
    let best = settings().min_by_key(|fit| reserved(fit))?;
    let expandable = settings().find(|fit| fit.set.contains("expandable_segments:True"));
    Some(expandable.filter(|it| reserved(it) <= reserved(best).saturating_add(MATERIAL_MIN)).unwrap_or(best))
}

fn of_fit(fit: &Fit, saved: Option<u64>) -> Advice {
    let orders = match fit.orders.run {
        1 => "by replay".to_owned(),
        run => format!("in {} of {run} replays with other addresses", fit.orders.fit),
    };
    let peak = text(fit.orders.peak_reserved_bytes_most);
    let detail = match saved {
        Some(saved) => format!("it reserves {peak} at most, {} less than recorded, {orders}", text(saved)),
        None => {
            let margin = fit.orders.margin_bytes_least;
            let margin = margin.map_or_else(String::new, |bytes| format!(", with at least {} left", text(bytes)));
            format!("the recorded requests fit {orders}{margin}")
        }
    };
    let (kind, title, apply) = match fit.change {
        Change::Allocator => (
            AdviceKind::Allocator,
            "Use Warpool's paged allocator under PyTorch".to_owned(),
            "pip install warpool\nimport warpool.torch; warpool.torch.enable()   # before CUDA is used".to_owned(),
        ),
        _ => (AdviceKind::Settings, format!("Set {}", fit.set), format!("export {VARIABLE}={}", fit.set)),
    };
    Advice {
        kind,
        title,
        detail,
        apply: Some(apply),
        fits: Some(fit.fits),
        bytes_saved: saved,
        margin_bytes: fit.orders.margin_bytes_least,
        proof: Proof::Replay,
    }
}

/// Changes that make the program itself need less memory, by arithmetic over the categories.
fn smaller_program(explanation: &Explanation, missing: u64) -> Vec<Advice> {
    let moment = explanation.moment();
    let of = |category: Category| {
        moment.categories.iter().find(|share| share.category == category).map_or(0, |share| share.bytes)
    };
    let whole = moment.bytes_requested.max(1);
    let with = |kind, title: String, detail: String, apply: Option<&str>, fits, saved| Advice {
        kind,
        title,
        detail,
        apply: apply.map(ToOwned::to_owned),
        fits,
        bytes_saved: Some(saved),
        margin_bytes: None,
        proof: Proof::Arithmetic,
    };
    let mut advice = Vec::new();
    // The memory that grows with the batch. It must shrink by a twentieth more than is missing, since not all of it
    // shrinks with the batch.
    let per_batch = of(Category::Activations) + of(Category::Temporaries) + of(Category::Inputs);
    let must_go = missing + missing / 20;
    if per_batch > must_go {
        let percent = 100 * (per_batch - must_go) / per_batch;
        if percent >= 10 {
            advice.push(with(
                AdviceKind::Batch,
                format!("Make the batch smaller: at most {percent} % of it, or shorter sequences"),
                format!(
                    "activations, temporaries and inputs are {} and grow with the batch; {} are missing for the \
                     request that failed, and what comes after it may need more",
                    text(per_batch),
                    text(missing)
                ),
                None,
                None,
                must_go,
            ));
        }
    }
    let activations = of(Category::Activations);
    let rules = moment.categories.iter().flat_map(|share| &share.rules);
    let recomputes = rules.clone().any(|&(rule, _)| rule == Rule::Recomputed);
    if activations >= whole / 5 && !recomputes {
        advice.push(with(
            AdviceKind::Checkpointing,
            "Compute activations again in the backward pass (checkpointing)".to_owned(),
            format!(
                "activations are {}; with a checkpoint for each layer, those of one layer and the inputs of all are \
                 kept, for about a third more computing time",
                text(activations)
            ),
            Some(
                "model.gradient_checkpointing_enable()                                  # transformers\n\
                 x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)   # own modules",
            ),
            (activations < missing).then_some(false),
            activations,
        ));
    }
    let state = of(Category::OptimizerState);
    if state >= whole / 10 {
        let saved = state / 4 * 3;
        advice.push(with(
            AdviceKind::OptimizerState,
            "Keep the optimizer's state in 8 bit, or shard it over the ranks".to_owned(),
            format!(
                "it is {}; in 8 bit instead of 32 it takes a quarter, {} less; over n ranks each keeps one n-th",
                text(state),
                text(saved)
            ),
            Some("optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())"),
            Some(saved >= missing),
            saved,
        ));
    }
    if activations >= whole / 5 && !explanation.moment().holders.uses_autocast {
        let saved = activations / 2;
        advice.push(with(
            AdviceKind::Precision,
            "Compute in bfloat16, if the program computes in 32 bit".to_owned(),
            format!("activations of {} then take half", text(activations)),
            Some("with torch.autocast(\"cuda\", dtype=torch.bfloat16):"),
            (saved < missing).then_some(false),
            saved,
        ));
    }
    // Advice that is known to fit comes first. The smallest change comes first already, and the sort is stable.
    advice.sort_by_key(|advice| advice.fits != Some(true));
    advice
}

/// Memory that others use.
fn others(judgement: &Judgement) -> Option<Advice> {
    let used = judgement.used_by_others;
    (judgement.missing > 0 && !judgement.is_limit && used >= OVERHEAD_MIN).then(|| Advice {
        kind: AdviceKind::Others,
        title: format!("Free what others use of the device: {}", text(used)),
        detail: format!(
            "other processes and libraries outside of PyTorch's allocator use {}; {} are missing",
            text(used),
            text(judgement.missing)
        ),
        apply: Some("nvidia-smi   # lists the processes on the device".to_owned()),
        fits: Some(used >= judgement.missing),
        bytes_saved: Some(used),
        margin_bytes: None,
        proof: Proof::Arithmetic,
    })
}

/// A larger device, last.
fn device(explanation: &Explanation) -> Option<Advice> {
    let fit = explanation.fits.iter().find(|fit| fit.change == Change::Device && fit.fits)?;
    let needed = fit.device_bytes_total?;
    let card = Card::ALL.iter().filter(|card| card.bytes_total() >= needed).min_by_key(|card| card.bytes_total())?;
    Some(Advice {
        kind: AdviceKind::Device,
        title: format!("A device of {} GB or more, such as {}", card.gigabytes, card.name),
        detail: format!(
            "with the recorded settings the recorded requests fit on a device of {}, as far as the recording goes",
            text(needed)
        ),
        apply: None,
        fits: Some(true),
        bytes_saved: None,
        margin_bytes: fit.orders.margin_bytes_least,
        proof: Proof::Replay,
    })
}
