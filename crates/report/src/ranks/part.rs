//! Summaries as JSON, and back: the file that `warpool summarize` writes and `warpool merge` reads. `docs/json.md` is
//! its schema. Reading what was written gives equal summaries, so a report over parts is the report over the whole.

use std::fmt;

use serde_json::{Map, Value, json};
use warpool_trace::Category;
use warpool_trace::explain::{Holder, MomentKind, Verdict};
use warpool_trace::ranks::{Column, Figures, Identity, Summary};

use crate::explain::holder_object;

/// The version of the schema, which is raised when a key changes its meaning or is removed.
const SCHEMA_VERSION: u64 = 1;

/// Which distinguishes a part from other JSON.
const KIND: &str = "warpool summaries";

/// Summaries as one object.
#[must_use]
pub fn part(summaries: &[Summary]) -> Value {
    json!({
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "ranks": summaries.iter().map(summary_object).collect::<Vec<_>>(),
    })
}

fn summary_object(summary: &Summary) -> Value {
    let Summary { file, identity: Identity { rank, world, host }, figures } = summary;
    let mut object = json!({ "file": file, "rank": rank, "world": world, "host": host });
    match figures {
        Ok(figures) => object["figures"] = figures_object(figures),
        Err(error) => object["error"] = json!(error),
    }
    object
}

fn figures_object(figures: &Figures) -> Value {
    let categories = Category::ALL.into_iter().map(|it| (it.name().to_owned(), json!(figures.bytes_of(it))));
    let column = |of: fn(&Column) -> u64| figures.columns.iter().map(of).collect::<Vec<u64>>();
    json!({
        "device": figures.device,
        "has_others": figures.has_others,
        "verdict": figures.verdict.name(),
        "evidence": figures.evidence,
        "events": figures.events,
        "ooms": figures.ooms,
        "oom_us": figures.oom_us,
        "start_us": figures.start_us,
        "duration_us": figures.duration_us,
        "exact": figures.exact,
        "device_bytes_total": figures.device_bytes_total,
        "device_name": figures.device_name,
        "available_bytes": figures.bytes_available,
        "moment": figures.moment.name(),
        "event": figures.event,
        "requested_bytes": figures.bytes_requested,
        "allocated_bytes": figures.bytes_allocated,
        "reserved_bytes": figures.bytes_reserved,
        "request_bytes": figures.request_bytes,
        "categories": Value::Object(categories.collect::<Map<_, _>>()),
        "holders": figures.holders.iter().map(holder_object).collect::<Vec<_>>(),
        "peak_allocated_bytes": figures.peak_allocated,
        "peak_reserved_bytes": figures.peak_reserved,
        "peak_needed_bytes": figures.peak_needed,
        "allocated_over_time": column(|column| column.allocated),
        "reserved_over_time": column(|column| column.reserved),
    })
}

/// Why something is not a part, in a sentence.
#[derive(Debug)]
pub struct PartError(String);

impl fmt::Display for PartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PartError {}

type Result<T> = std::result::Result<T, PartError>;

/// The summaries of a part.
///
/// # Errors
/// If it is not a complete part, or of a version that this one does not know.
pub fn parse_part(text: &[u8]) -> Result<Vec<Summary>> {
    let other = || PartError("it is not a part that `warpool summarize` wrote".to_owned());
    let value: Value = serde_json::from_slice(text).map_err(|_| other())?;
    let root = Fields { object: value.as_object().ok_or_else(other)?, place: String::new() };
    if root.object.get("kind").and_then(Value::as_str) != Some(KIND) {
        return Err(other());
    }
    let version = root.number("schema_version")?;
    if version != SCHEMA_VERSION {
        let message = format!("it has schema version {version}, and this version of warpool reads {SCHEMA_VERSION}");
        return Err(PartError(message));
    }
    root.objects("ranks")?.iter().map(summary).collect()
}

fn summary(fields: &Fields<'_>) -> Result<Summary> {
    let number = |name| fields.optional(name, |value| u32::try_from(value.as_u64()?).ok());
    let identity = Identity { rank: number("rank")?, world: number("world")?, host: fields.optional("host", text_of)? };
    let figures = match fields.object.get("figures").and_then(Value::as_object) {
        Some(object) => Ok(figures(&Fields { object, place: format!("{}figures.", fields.place) })?),
        None => Err(fields.required("error", text_of)?),
    };
    Ok(Summary { file: fields.required("file", text_of)?, identity, figures })
}

fn figures(fields: &Fields<'_>) -> Result<Figures> {
    let named = |name: &str, of: fn(&Value) -> Option<String>| fields.required(name, of);
    let verdict = named("verdict", text_of)?;
    let moment = named("moment", text_of)?;
    let categories = fields.required("categories", |value| value.as_object().cloned())?;
    let mut bytes_by_category = warpool_trace::CategoryBytes::default();
    for category in Category::ALL {
        bytes_by_category[category.index()] = categories.get(category.name()).and_then(Value::as_u64).unwrap_or(0);
    }
    let optional = |name| fields.optional(name, Value::as_u64);
    let allocated = fields.required("allocated_over_time", numbers_of)?;
    let reserved = fields.required("reserved_over_time", numbers_of)?;
    let columns = allocated.into_iter().zip(reserved).map(|(allocated, reserved)| Column { allocated, reserved });
    Ok(Figures {
        device: fields.required("device", |value| u32::try_from(value.as_u64()?).ok())?,
        has_others: fields.required("has_others", Value::as_bool)?,
        verdict: Verdict::ALL.into_iter().find(|it| it.name() == verdict).ok_or_else(|| fields.wrong("verdict"))?,
        evidence: fields.required("evidence", |value| value.as_array()?.iter().map(text_of).collect())?,
        events: fields.number("events")?,
        ooms: fields.number("ooms")?,
        oom_us: fields.optional("oom_us", Value::as_i64)?,
        start_us: fields.optional("start_us", Value::as_i64)?,
        duration_us: optional("duration_us")?,
        exact: fields.optional("exact", Value::as_bool)?,
        device_bytes_total: optional("device_bytes_total")?,
        device_name: fields.optional("device_name", text_of)?,
        bytes_available: optional("available_bytes")?,
        moment: MomentKind::ALL.into_iter().find(|it| it.name() == moment).ok_or_else(|| fields.wrong("moment"))?,
        event: optional("event")?,
        bytes_requested: fields.number("requested_bytes")?,
        bytes_allocated: fields.number("allocated_bytes")?,
        bytes_reserved: fields.number("reserved_bytes")?,
        request_bytes: optional("request_bytes")?,
        categories: bytes_by_category,
        holders: fields.objects("holders")?.iter().map(holder).collect::<Result<_>>()?,
        peak_allocated: fields.number("peak_allocated_bytes")?,
        peak_reserved: fields.number("peak_reserved_bytes")?,
        peak_needed: fields.number("peak_needed_bytes")?,
        columns: columns.collect(),
    })
}

fn holder(fields: &Fields<'_>) -> Result<Holder> {
    let category = fields.required("category", text_of)?;
    Ok(Holder {
        name: fields.required("name", text_of)?,
        line: fields.optional("line", text_of)?,
        forward_line: fields.optional("forward_line", text_of)?,
        path: fields.required("path", |value| value.as_array()?.iter().map(text_of).collect())?,
        bytes: fields.number("bytes")?,
        count: fields.number("count")?,
        category: Category::ALL.into_iter().find(|it| it.name() == category).ok_or_else(|| fields.wrong("category"))?,
    })
}

fn text_of(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn numbers_of(value: &Value) -> Option<Vec<u64>> {
    value.as_array()?.iter().map(Value::as_u64).collect()
}

/// An object of the file, and where it is.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    place: String,
}

impl<'a> Fields<'a> {
    fn wrong(&self, name: &str) -> PartError {
        PartError(format!("{}{name} is missing or wrong", self.place))
    }

    fn required<T>(&self, name: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<T> {
        self.object.get(name).and_then(read).ok_or_else(|| self.wrong(name))
    }

    /// `None` for null.
    fn optional<T>(&self, name: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.object.get(name) {
            None => Err(self.wrong(name)),
            Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(name)),
        }
    }

    fn number(&self, name: &str) -> Result<u64> {
        self.required(name, Value::as_u64)
    }

    fn objects(&self, name: &str) -> Result<Vec<Fields<'a>>> {
        let list = self.required(name, Value::as_array)?;
        let object = |(at, value): (usize, &'a Value)| {
            let place = format!("{}{name}[{at}].", self.place);
            let object = value.as_object().ok_or_else(|| PartError(format!("{place} is no object")))?;
            Ok(Fields { object, place })
        };
        list.iter().enumerate().map(object).collect()
    }
}

#[cfg(test)]
mod tests {
    use warpool_trace::explain::ExplainOptions;
    use warpool_trace::ranks::{Ranks, summarize};
    use warpool_trace::{ReadOptions, read_file};

    use super::*;
    use crate::ranks::{headline, object, sentences, tables};

    /// Summaries of real recordings as those of a job: one with a device that is full, and one that cannot be read.
    fn summaries() -> Vec<Summary> {
        let names = ["verdict.limit", "verdict.growth", "train.default", "verdict.limit", "device_full.native"];
        let mut found = Vec::new();
        for (rank, name) in names.into_iter().enumerate() {
            let file = format!("{}/../../recordings/{name}.pickle.xz", env!("CARGO_MANIFEST_DIR"));
            let options = ReadOptions { stacks: true, ..ReadOptions::default() };
            let recording = read_file(&file, &options).expect("it is in the repository");
            let file = format!("job/rank{}.pickle", 8 + rank);
            found.extend(summarize(&recording.snapshot, &file, &ExplainOptions::default()).expect("it has a history"));
        }
        found.push(Summary::unreadable("job/rank2.pickle", "it ends at byte 7".to_owned()));
        found
    }

    fn report(summaries: Vec<Summary>) -> String {
        let ranks = Ranks::new(summaries);
        let tables: Vec<_> = tables(&ranks, 10).into_iter().map(|table| (table.title, table.rows)).collect();
        format!("{}\n{:?}\n{:?}\n{}", headline(&ranks), sentences(&ranks), tables, object(&ranks))
    }

    #[test]
    fn any_partition_in_any_order_merges_to_the_same_bytes() {
        let summaries = summaries();
        let expected = report(summaries.clone());
        assert!(expected.contains("rank 9") && expected.contains("it ends at byte 7"), "{expected}");
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut mixed = summaries.clone();
            rng.shuffle(&mut mixed);
            let mut merged = Vec::new();
            while !mixed.is_empty() {
                let taken = mixed.split_off(mixed.len() - rng.usize(1..=mixed.len()));
                let text = part(&taken).to_string();
                let read = parse_part(text.as_bytes()).expect("it was just written");
                assert_eq!(read, taken, "seed {seed}");
                merged.extend(read);
            }
            assert_eq!(report(merged), expected, "seed {seed}");
        }
    }

    #[test]
    fn what_is_not_a_part_is_an_error_that_says_where() {
        let message = |text: &str| parse_part(text.as_bytes()).expect_err("it is wrong").to_string();
        for text in ["", "[]", "{}", "{\"kind\":\"other\"}", "\u{80}\u{2}"] {
            assert_eq!(message(text), "it is not a part that `warpool summarize` wrote");
        }
        let whole = part(&summaries()[..1]);
        let mut newer = whole.clone();
        newer["schema_version"] = json!(2);
        assert!(message(&newer.to_string()).contains("schema version 2"));
        let mut broken = whole.clone();
        broken["ranks"][0]["figures"]["holders"][0]["bytes"] = json!(-1);
        assert_eq!(message(&broken.to_string()), "ranks[0].figures.holders[0].bytes is missing or wrong");
        let text = whole.to_string();
        assert_eq!(message(&text[..text.len() - 1]), "it is not a part that `warpool summarize` wrote");
    }
}
