//! One timeline as sections of the page. `page/recording.js` reads what is written here.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use warpool::memory::report::{Frame, SegmentKind, Snapshot, TextId};
use warpool_trace::Category;
use warpool_trace::explain::Frameworks;
use warpool_trace::parallel::{in_parallel, threads_available};
use warpool_trace::timeline::{Allocation, Level, MarkKind, Region, ReservedRange, Sample, StackTree, Timeline};

use super::columns::Columns;
use super::figures;
use crate::explain::{advice_object, headline, sentences};

/// The maximum number of marks that are drawn; a program that catches out-of-memory errors may have many.
const MARKS_MAX: usize = 4096;

/// Names of regions and texts of the program are cut to this many characters.
const TEXT_MAX: usize = 200;

/// A part of the page that the script inflates.
#[derive(Clone)]
pub struct Section {
    /// The id of its element.
    pub id: String,
    /// Columns, deflated, in base64.
    pub text: String,
}

/// The part of the page for one device: its sections, and their description for the script.
pub struct DevicePart {
    /// Its sections.
    pub sections: Vec<Section>,
    /// Their description for the script.
    pub info: Value,
}

impl DevicePart {
    /// Its size in the page.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let sections: usize = self.sections.iter().map(|section| section.text.len() + 100).sum();
        sections + self.info.to_string().len()
    }

    /// The bytes that shrink with less detail.
    #[must_use]
    pub fn bytes_of_detail(&self) -> usize {
        let is_detail = |id: &str| id.ends_with(".allocations") || id.contains(".level");
        self.sections.iter().filter(|section| is_detail(&section.id)).map(|section| section.text.len()).sum()
    }

    /// The same under other names, for a page with several recordings.
    #[must_use]
    pub fn with_prefix(&self, prefix: &str) -> Self {
        let renamed = |id: &Value| json!(format!("{prefix}-{}", id.as_str().unwrap_or_default()));
        let mut info = self.info.clone();
        info["id"] = renamed(&info["id"]);
        for level in info["levels"].as_array_mut().into_iter().flatten() {
            level["id"] = renamed(&level["id"]);
        }
        let section =
            |section: &Section| Section { id: format!("{prefix}-{}", section.id), text: section.text.clone() };
        Self { sections: self.sections.iter().map(section).collect(), info }
    }
}

/// Makes the part of a timeline.
#[must_use]
pub fn device_part(timeline: &Timeline, snapshot: &Snapshot, frameworks: &Frameworks) -> DevicePart {
    let id = format!("device{}", timeline.device);
    let mut tree = Tree { stacks: &snapshot.stacks, frameworks, tree: StackTree::default() };
    let mut drafts = Vec::new();
    let mut add = |name: &str, columns: Columns| {
        let id = format!("{id}.{name}");
        drafts.push((id.clone(), columns));
        id
    };
    let has_categories = has_categories(timeline);
    let mut add_level = |at: usize, level: &Level| {
        let id = add(&format!("level{at}"), level_columns(level, has_categories));
        json!({ "id": id, "positions": level.positions })
    };
    let levels: Vec<Value> = timeline.levels.iter().enumerate().map(|(at, level)| add_level(at, level)).collect();
    add("allocations", allocation_columns(&timeline.allocations, has_categories, &mut tree));
    add("ranges", range_columns(&timeline.ranges));
    add("regions", region_columns(&timeline.regions));
    add("contexts", context_columns(timeline, snapshot));
    let marks: Vec<Value> = (timeline.marks.iter().take(MARKS_MAX))
        .map(|mark| {
            let stack = mark.stack.and_then(|stack| tree.number(stack));
            json!({"position": mark.position, "kind": mark.kind.name(), "bytes": mark.bytes, "stack": stack})
        })
        .collect();
    add("stacks", tree.columns());
    let explanation = &timeline.explanation;
    let moment = explanation.moment();
    let info = json!({
        "id": id,
        "device": timeline.device,
        "events": timeline.events,
        "levels": levels,
        "marks": marks,
        "figures": figures::object(timeline),
        "moment_position": moment_position(timeline),
        "headline": headline(explanation),
        "prose": sentences(explanation),
        "remarks": explanation.remarks,
        "has_stacks": moment.holders.has_stacks(),
        "moments": moments(timeline),
        "advice": explanation.advice.iter().map(advice_object).collect::<Vec<_>>(),
        // Without them the page hides the choice.
        "categories": if has_categories { category_names() } else { Vec::new() },
        "categories_at_moment": if has_categories { categories_at_moment(timeline) } else { Vec::new() },
        "regions_left_out": timeline.regions_left_out,
        "contexts_complete": timeline.contexts_complete,
    });
    DevicePart { sections: packed(&drafts), info }
}

/// Deflating takes longest, and sections do not depend on each other.
fn packed(drafts: &[(String, Columns)]) -> Vec<Section> {
    let pack = |(id, columns): &(String, Columns)| Section { id: id.clone(), text: columns.pack() };
    in_parallel(drafts.len(), threads_available(), |number| pack(&drafts[number]))
}

/// Whether the kind of any allocation is known.
fn has_categories(timeline: &Timeline) -> bool {
    timeline.allocations.iter().any(|it| it.category != Category::Unknown)
}

fn category_names() -> Vec<Value> {
    Category::ALL.iter().map(|it| json!({ "name": it.name(), "label": it.words() })).collect()
}

/// Requested bytes by category at the moment that is explained.
fn categories_at_moment(timeline: &Timeline) -> Vec<Value> {
    let shares = timeline.explanation.moment().categories.iter();
    shares.map(|share| json!({ "name": share.category.words(), "bytes": share.bytes })).collect()
}

/// The state of an out-of-memory event is the one before it; that of a peak the one after it.
fn moment_position(timeline: &Timeline) -> u64 {
    timeline.explanation.moment().event.map_or(0, |event| event + 1)
}

/// The moments that a reader can go to. Allocated memory is counted as PyTorch does: with rounding.
fn moments(timeline: &Timeline) -> Vec<Value> {
    let peak = |name: &str, bytes: u64, counts: &str, sample: &Sample| {
        json!({
            "name": name,
            "bytes": bytes,
            "counts": counts,
            "position": sample.position,
            "requested_bytes": sample.allocated,
            "allocated_bytes": sample.live(),
            "reserved_bytes": sample.reserved,
        })
    };
    let (live, reserved) = (&timeline.peak_live, &timeline.peak_reserved);
    let mut moments = vec![
        peak("most allocated", live.live(), "requested + rounding", live),
        peak("most reserved", reserved.reserved, "what the allocator has from the driver", reserved),
    ];
    if let Some(mark) = timeline.marks.iter().rfind(|mark| mark.kind == MarkKind::OutOfMemory) {
        moments.push(json!({
            "name": "out of memory",
            "bytes": mark.bytes,
            "counts": "the request that failed",
            "position": mark.position,
        }));
    }
    moments
}

fn level_columns(level: &Level, has_categories: bool) -> Columns {
    let buckets = || level.buckets.iter();
    let mut columns = Columns::default();
    columns
        .sums(buckets().map(|bucket| bucket.sample.time_us))
        .sums(buckets().map(|bucket| bucket.sample.allocated))
        .sums(buckets().map(|bucket| bucket.sample.rounding))
        .sums(buckets().map(|bucket| bucket.sample.waiting))
        .sums(buckets().map(|bucket| bucket.sample.cached))
        .sums(buckets().map(|bucket| bucket.sample.reserved));
    if level.positions == 1 {
        // A bucket of one position is its sample.
        let none = || [].into_iter();
        columns.column(none()).column(none()).column(none());
    } else {
        columns
            .column(buckets().map(|bucket| bucket.sample.position % level.positions))
            .column(buckets().map(|bucket| bucket.sample.live() - bucket.live_min))
            .column(buckets().map(|bucket| bucket.reserved_max - bucket.sample.reserved));
    }
    if has_categories {
        for category in Category::ALL {
            columns.sums(buckets().map(|bucket| bucket.sample.categories[category.index()]));
        }
    }
    columns
}

fn allocation_columns(allocations: &[Allocation], has_categories: bool, tree: &mut Tree<'_>) -> Columns {
    let mut sizes = Numbering::default();
    let size: Vec<u64> = allocations.iter().map(|it| sizes.number((it.bytes, it.requested))).collect();
    let stack: Vec<u64> = allocations
        .iter()
        .map(|it| it.stack.and_then(|stack| tree.number(stack)).map_or(0, |number| u64::from(number) + 1))
        .collect();
    let mut columns = Columns::default();
    columns
        .column(sizes.list.iter().map(|&(bytes, _)| bytes))
        .column(sizes.list.iter().map(|&(_, requested)| requested))
        .sums(allocations.iter().map(|it| it.from))
        // 0 is never; otherwise one more than the distance.
        .column(allocations.iter().map(|it| it.waits_from.map_or(0, |waits| waits - it.from + 1)))
        .column(allocations.iter().map(|it| match (it.waits_from, it.until) {
            (Some(waits), Some(until)) => until - waits + 1,
            _ => 0,
        }))
        .sums(allocations.iter().map(|it| it.addr))
        .column(size.into_iter())
        .column(stack.into_iter());
    if has_categories {
        columns.column(allocations.iter().map(|it| it.category.index() as u64));
    }
    columns
}

fn range_columns(ranges: &[ReservedRange]) -> Columns {
    let mut kinds = Numbering::default();
    let kind: Vec<u64> = ranges.iter().map(|it| kinds.number((it.stream, it.kind, it.pool))).collect();
    let mut columns = Columns::default();
    columns
        .column(kinds.list.iter().map(|&(stream, _, _)| stream))
        .column(kinds.list.iter().map(|&(_, kind, _)| u64::from(kind == SegmentKind::Large)))
        .column(kinds.list.iter().map(|&(_, _, pool)| u64::from(pool)))
        .sums(ranges.iter().map(|it| it.from))
        .column(ranges.iter().map(|it| it.until.map_or(0, |until| until - it.from)))
        .sums(ranges.iter().map(|it| it.addr))
        .column(ranges.iter().map(|it| it.bytes))
        .column(kind.into_iter())
        .sums(ranges.iter().map(|it| u64::from(it.segment)));
    columns
}

fn region_columns(regions: &[Region]) -> Columns {
    let mut names = Numbering::default();
    let name: Vec<u64> = regions.iter().map(|it| names.number(shortened(&it.name))).collect();
    let mut columns = Columns::default();
    columns
        .sums(regions.iter().map(|it| it.from))
        .column(regions.iter().map(|it| it.until.saturating_sub(it.from)))
        .sums(regions.iter().map(|it| it.from_us))
        .column(regions.iter().map(|it| it.until_us.saturating_sub(it.from_us)))
        .column(regions.iter().map(|it| u64::from(it.row)))
        .column(regions.iter().map(|it| u64::from(!it.has_start) + 2 * u64::from(!it.has_end)))
        .column(name.into_iter())
        .bytes(json!(names.list).to_string().as_bytes());
    columns
}

fn context_columns(timeline: &Timeline, snapshot: &Snapshot) -> Columns {
    let contexts = &timeline.contexts;
    let mut texts = Numbering::default();
    // 0 is none.
    let mut numbers = |of: &dyn Fn(usize) -> Option<TextId>| -> Vec<u64> {
        let number = |at| of(at).map_or(0, |text| texts.number(shortened(snapshot.texts.get(text))) + 1);
        (0..contexts.len()).map(number).collect()
    };
    let metadata = numbers(&|at| contexts[at].user_metadata);
    let compiled = numbers(&|at| contexts[at].compile_context);
    let mut columns = Columns::default();
    columns
        .sums(contexts.iter().map(|it| it.position))
        .column(metadata.into_iter())
        .column(compiled.into_iter())
        .bytes(json!(texts.list).to_string().as_bytes());
    columns
}

/// A text of the program, which may be of any length.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The stacks that are used.
struct Tree<'a> {
    stacks: &'a [Arc<[Frame]>],
    frameworks: &'a Frameworks,
    tree: StackTree,
}

impl Tree<'_> {
    fn number(&mut self, stack: warpool::memory::report::StackId) -> Option<u32> {
        self.tree.add(self.stacks, stack, self.frameworks)
    }

    fn columns(&self) -> Columns {
        const PASSES_THROUGH: u64 = 1;
        const FRAMEWORK: u64 = 2;
        let StackTree { frames, passes_through, nodes, sites, stacks, .. } = &self.tree;
        let mut texts = Numbering::default();
        let mut numbers = |texts_of: Vec<&str>| -> Vec<u64> {
            texts_of.into_iter().map(|text| texts.number(text.to_owned())).collect()
        };
        let names = numbers(frames.iter().map(|frame| frame.name.as_str()).collect());
        let files = numbers(frames.iter().map(|frame| StackTree::short_path(&frame.filename)).collect());
        let calls = numbers(sites.iter().map(|site| site.call.as_str()).collect());
        let lines = numbers(sites.iter().map(|site| site.line.as_deref().unwrap_or_default()).collect());
        let flags = frames.iter().zip(passes_through).map(|(frame, &passes)| {
            let framework = self.frameworks.contains(&frame.filename);
            u64::from(passes) * PASSES_THROUGH + u64::from(framework) * FRAMEWORK
        });
        let mut columns = Columns::default();
        columns
            .column(nodes.iter().map(|node| node.parent.map_or(0, |parent| u64::from(parent) + 1)))
            .column(nodes.iter().map(|node| u64::from(node.frame)))
            .column(names.into_iter())
            .column(files.into_iter())
            .column(frames.iter().map(|frame| frame.line))
            .column(flags)
            .column(calls.into_iter())
            .column(lines.into_iter())
            .column(stacks.iter().map(|&(node, _)| u64::from(node)))
            .column(stacks.iter().map(|&(_, site)| u64::from(site)))
            .bytes(json!(texts.list).to_string().as_bytes());
        columns
    }
}

/// Values by number, in the order in which they first appear.
struct Numbering<T> {
    list: Vec<T>,
    numbers: HashMap<T, u64>,
}

impl<T> Default for Numbering<T> {
    fn default() -> Self {
        Self { list: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Numbering<T> {
    fn number(&mut self, value: T) -> u64 {
        let Self { list, numbers } = self;
        *numbers.entry(value).or_insert_with_key(|value| {
            list.push(value.clone());
            list.len() as u64 - 1
        })
    }
}
