//! The values of single keys. Combinations of keys are not checked here, except for sizes whose minimum is the size of
//! large segments, which is set first.

use std::collections::BTreeMap;

use super::keys::{Key, SIZE_UNITS, nearest};
use super::syntax::{Value, Word};
use super::{Backend, FreeBlockOrder, GIB, MIB, RecordMode, RecordSignal, Reserve, Settings};

/// The largest size of large segments: requests of this size are refused (`SizeRules::REQUEST_TOO_LARGE`).
const LARGE_SEGMENT_MAX: u64 = 1 << 60;

/// A message about a position in the string.
#[derive(Debug)]
pub(super) struct Remark {
    pub at: usize,
    pub text: String,
}

type Read<T> = Result<T, Remark>;

/// Sets a value. The remarks are warnings; the error is why the value is invalid.
pub(super) fn set(settings: &mut Settings, key: Key, value: &Value) -> Read<Vec<Remark>> {
    let mut remarks = Vec::new();
    let large = settings.large_segment_bytes;
    let (pinned, record) = (&mut settings.pinned, &mut settings.record);
    match key {
        Key::Backend => match named(key, value, BackendName::ALL, BackendName::name)? {
            BackendName::Of(backend) => settings.backend = backend,
            // The reader turns expandable segments on, unless a later entry names another backend.
            BackendName::Expandable => settings.backend = Backend::Native,
        },
        Key::LargeSegmentSize => settings.large_segment_bytes = large_segment(key, value)?,
        Key::MaxSplitSize => settings.max_split_bytes = Some(size_from(key, value, large)?),
        Key::MaxNonSplitRounding => settings.max_non_split_rounding_bytes = size_from(key, value, large)?,
        Key::GarbageCollectionThreshold => {
            settings.garbage_collection_threshold = number_in(key, value, |fraction| fraction > 0.0 && fraction < 1.0)?;
        }
        Key::RoundupPower2Divisions => settings.roundup_power2_divisions = divisions(key, value)?,
        Key::ExpandableSegments => settings.expandable_segments = boolean(key, value)?,
        Key::ExpandableSegmentsReserve => {
            settings.expandable_segments_reserve = Some(reserve(word(key, value)?, &mut remarks)?);
        }
        Key::ExpandableSegmentsReserveByClass => {
            settings.expandable_segments_reserve_by_class = reserve_by_class(key, value, &mut remarks)?;
        }
        Key::ReleaseLockOnCudamalloc => settings.release_lock_on_cudamalloc = boolean(key, value)?,
        Key::GraphCaptureRecordStreamReuse => settings.graph_capture_record_stream_reuse = boolean(key, value)?,
        Key::PerProcessMemoryFraction => {
            settings.per_process_memory_fraction = number_in(key, value, |fraction| (0.0..=1.0).contains(&fraction))?;
        }
        Key::ThrowOnCudamallocOom => settings.throw_on_cudamalloc_oom = boolean(key, value)?,
        Key::PinnedUseCudaHostRegister => pinned.use_cuda_host_register = boolean(key, value)?,
        Key::PinnedNumRegisterThreads => pinned.num_register_threads = threads(key, value)?,
        Key::PinnedUseBackgroundThreads => pinned.use_background_threads = boolean(key, value)?,
        Key::PinnedReserveSegmentSize => pinned.reserve_segment_bytes = size_from(key, value, MIB)?,
        Key::PinnedMaxRoundThreshold => pinned.max_round_threshold_bytes = Some(size_from(key, value, 0)?),
        Key::PinnedMaxCachedSize => pinned.max_cached_bytes = Some(size_from(key, value, 0)?),
        Key::PinnedFreeCatchAll => pinned.free_catch_all = boolean(key, value)?,
        // With less than the smallest segment nothing could be pinned.
        Key::PinnedCap => pinned.cap_bytes = Some(size_from(key, value, 2 * MIB)?),
        Key::PinnedDeviceCap => pinned.device_cap_bytes = Some(size_from(key, value, 2 * MIB)?),
        Key::FreeBlockOrder => {
            settings.free_block_order = named(key, value, FreeBlockOrder::ALL, FreeBlockOrder::name)?;
        }
        // With less than the smallest segment nothing could be allocated.
        Key::MemoryCap => settings.memory_cap_bytes = Some(size_from(key, value, 2 * MIB)?),
        Key::IdleDecay => settings.idle_decay_ms = Some(millis(key, value)?),
        Key::Share => settings.share.enabled = boolean(key, value)?,
        Key::ShareGuaranteed => settings.share.guaranteed_bytes = size_with_unit(key, value)?,
        Key::ShareLimit => settings.share.limit_bytes = Some(size_with_unit(key, value)?),
        Key::SharePriority => settings.share.priority = integer(key, word(key, value)?)?,
        Key::ShareReclaim => settings.share.reclaim_ms = millis(key, value)?,
        Key::Record => record.mode = named(key, value, RecordMode::ALL, RecordMode::name)?,
        Key::RecordEvents => record.events_max = integer_in(key, value, 1000, 100_000_000)?,
        Key::RecordAbove => record.above = Some(number_in(key, value, |share| share > 0.0 && share < 1.0)?),
        Key::RecordAtExit => record.at_exit = boolean(key, value)?,
        Key::RecordSignal => record.signal = Some(named(key, value, RecordSignal::ALL, RecordSignal::name)?),
        Key::RecordFiles => record.files_max = integer_in(key, value, 1, 10_000)?,
        Key::RecordFileSize => record.file_bytes_max = size_from(key, value, MIB)?,
        Key::RecordInterval => record.interval_s = integer_in(key, value, 0, u64::MAX)?,
    }
    Ok(remarks)
}

/// A backend as strings name it.
#[derive(Clone, Copy)]
enum BackendName {
    Of(Backend),
    /// The caching allocator with expandable segments.
    Expandable,
}

impl BackendName {
    const ALL: [Self; 4] =
        [Self::Of(Backend::Native), Self::Expandable, Self::Of(Backend::Paged), Self::Of(Backend::CudaMallocAsync)];

    const fn name(self) -> &'static str {
        match self {
            Self::Of(backend) => backend.name(),
            Self::Expandable => "expandable",
        }
    }
}

/// Whether a value of `backend` turns on expandable segments.
pub(super) fn is_expandable_backend(value: &Value) -> bool {
    matches!(value, Value::Word(word) if word.text == BackendName::Expandable.name())
}

/// The value as a word.
fn word(key: Key, value: &Value) -> Read<&Word> {
    match value {
        Value::Word(word) => Ok(word),
        Value::List(_, at) => {
            Err(Remark { at: *at, text: format!("a list is not allowed; expected {}", key.info().expects) })
        }
    }
}

/// The message for an invalid word.
fn invalid(key: Key, word: &Word) -> Remark {
    Remark { at: word.at, text: format!("invalid value `{}`; expected {}", word.text, key.info().expects) }
}

fn boolean(key: Key, value: &Value) -> Read<bool> {
    let word = word(key, value)?;
    match word.text.as_str() {
        "True" => Ok(true),
        "False" => Ok(false),
        other => {
            let meant = match other.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => Some("True"),
                "false" | "0" | "no" | "off" => Some("False"),
                _ => nearest(other, ["True", "False"]),
            };
            let mut remark = invalid(key, word);
            if let Some(meant) = meant {
                remark.text += &format!("; did you mean `{meant}`?");
            }
            Err(remark)
        }
    }
}

/// One of a few names.
fn named<T: Copy, const N: usize>(key: Key, value: &Value, all: [T; N], name: fn(T) -> &'static str) -> Read<T> {
    let word = word(key, value)?;
    all.into_iter().find(|&choice| name(choice) == word.text).ok_or_else(|| {
        let mut remark = invalid(key, word);
        if let Some(meant) = nearest(&word.text, all.map(name)) {
            remark.text += &format!("; did you mean `{meant}`?");
        }
        remark
    })
}

/// An integer: digits and nothing else.
fn integer(key: Key, word: &Word) -> Read<u64> {
    let digits = word.text.bytes().all(|byte| byte.is_ascii_digit());
    if digits && let Ok(number) = word.text.parse() {
        return Ok(number);
    }
    if digits {
        return Err(Remark {
            at: word.at,
            text: format!("`{}` does not fit in 64 bits; give a smaller number", word.text),
        });
    }
    let mut remark = invalid(key, word);
    let unit = word.text.trim_start_matches(|character: char| character.is_ascii_digit());
    if key.name().ends_with("_mb") && unit.len() < word.text.len() && unit.chars().all(char::is_alphabetic) {
        remark.text += "; the unit is MiB, write the number alone";
    }
    Err(remark)
}

fn integer_in(key: Key, value: &Value, least: u64, most: u64) -> Read<u64> {
    let word = word(key, value)?;
    let number = integer(key, word)?;
    if (least..=most).contains(&number) { Ok(number) } else { Err(invalid(key, word)) }
}

/// A size in MiB, as bytes. Saturates at 64 bits.
fn size_from(key: Key, value: &Value, least: u64) -> Read<u64> {
    let word = word(key, value)?;
    let bytes = integer(key, word)?.min(u64::MAX / MIB) * MIB;
    if bytes < least {
        let reason = match key {
            Key::MaxSplitSize | Key::MaxNonSplitRounding => ", the size of large segments (`large_segment_size_mb`)",
            _ => "",
        };
        let text = format!("`{}` is too small; give at least {}{reason}", word.text, least / MIB);
        return Err(Remark { at: word.at, text });
    }
    Ok(bytes)
}

/// The size of large segments: no larger than a request may be.
fn large_segment(key: Key, value: &Value) -> Read<u64> {
    let bytes = size_from(key, value, 11 * MIB)?;
    if bytes <= LARGE_SEGMENT_MAX {
        return Ok(bytes);
    }
    let (word, most) = (word(key, value)?, LARGE_SEGMENT_MAX / MIB);
    Err(Remark { at: word.at, text: format!("`{}` is too large; give at most {most}", word.text) })
}

fn number(word: &Word) -> Option<f64> {
    word.text.parse().ok().filter(|number: &f64| number.is_finite())
}

fn number_in(key: Key, value: &Value, fits: fn(f64) -> bool) -> Read<f64> {
    let word = word(key, value)?;
    // Minus zero is zero, but would be written differently.
    let number = number(word).filter(|&number| fits(number)).map(|number| if number == 0.0 { 0.0 } else { number });
    number.ok_or_else(|| invalid(key, word))
}

fn threads(key: Key, value: &Value) -> Read<u64> {
    let word = word(key, value)?;
    let threads = integer(key, word)?;
    if threads.is_power_of_two() && threads <= 128 { Ok(threads) } else { Err(invalid(key, word)) }
}

/// A number with a unit, as bytes.
fn size_with_unit(key: Key, value: &Value) -> Read<u64> {
    let word = word(key, value)?;
    let digits = word.text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = word.text.split_at(digits);
    let unit = SIZE_UNITS.iter().find(|(name, _)| *name == unit).map(|&(_, bytes)| bytes);
    let bytes = number.parse::<u64>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    bytes.ok_or_else(|| invalid(key, word))
}

/// A time of at least a millisecond.
fn millis(key: Key, value: &Value) -> Read<u64> {
    let word = word(key, value)?;
    let millis = integer(key, word)?;
    if millis > 0 { Ok(millis) } else { Err(invalid(key, word)) }
}

/// A table of divisions. An entry of a list covers sizes from its MiB up to twice that; the first one also all below,
/// `>` all above the last; sizes between two entries are not divided.
fn divisions(key: Key, value: &Value) -> Read<[u64; 16]> {
    let (pairs, at) = match value {
        Value::Word(word) => return power_of_two(key, word).map(|steps| [steps; 16]),
        Value::List(pairs, at) => (pairs, *at),
    };
    if pairs.is_empty() {
        return Err(Remark { at, text: "the list is empty; remove the key to turn this rounding off".into() });
    }
    let mut table = [0; 16];
    let mut before: Option<(u64, usize)> = None;
    for (number, (left, right)) in pairs.iter().enumerate() {
        let steps = if right.text == "0" { 0 } else { power_of_two(key, right)? };
        if left.text == ">" {
            let Some((_, bucket)) = before else {
                return Err(Remark {
                    at: left.at,
                    text: "`>` covers all sizes above the last one; give a size first".into(),
                });
            };
            if number + 1 < pairs.len() {
                return Err(Remark {
                    at: left.at,
                    text: "`>` covers all sizes above the last one; put it last".into(),
                });
            }
            table[bucket + 1..].fill(steps);
            continue;
        }
        let boundary = power_of_two(key, left)?;
        if before.is_some_and(|(last, _)| boundary <= last) {
            let text = format!("sizes must ascend, but `{}` follows a size that is not smaller", left.text);
            return Err(Remark { at: left.at, text });
        }
        let bucket = (boundary.ilog2() as usize).min(table.len() - 1);
        match before {
            None => table[..=bucket].fill(steps),
            Some(_) => table[bucket] = steps,
        }
        before = Some((boundary, bucket));
    }
    Ok(table)
}

fn power_of_two(key: Key, word: &Word) -> Read<u64> {
    let number = integer(key, word)?;
    if number.is_power_of_two() {
        return Ok(number);
    }
    Err(Remark { at: word.at, text: format!("`{}` is not a power of two", word.text) })
}

/// A fraction of the device, or GiB with a `G` at the end.
fn reserve(word: &Word, remarks: &mut Vec<Remark>) -> Read<Reserve> {
    let invalid = || Remark {
        at: word.at,
        text: format!(
            "invalid value `{}`; expected a fraction of the device such as 0.5, or GiB such as 40G",
            word.text
        ),
    };
    let gib = word.text.strip_suffix(['G', 'g']);
    let amount = Word { text: gib.unwrap_or(&word.text).into(), at: word.at };
    let number = number(&amount).filter(|&number| number > 0.0).ok_or_else(invalid)?;
    if gib.is_some() {
        // The conversion saturates.
        let bytes = (number * GIB as f64) as u64;
        return if bytes == 0 { Err(invalid()) } else { Ok(Reserve::Bytes(bytes)) };
    }
    if number > 9.0 / 8.0 {
        let text = format!("{} times the device is limited to 9/8 of it; for GiB, write `{}G`", word.text, word.text);
        remarks.push(Remark { at: word.at, text });
    }
    Ok(Reserve::Fraction(number))
}

fn reserve_by_class(key: Key, value: &Value, remarks: &mut Vec<Remark>) -> Read<BTreeMap<String, Reserve>> {
    let pairs = match value {
        Value::List(pairs, _) => pairs,
        Value::Word(word) => return Err(invalid(key, word)),
    };
    let mut classes = BTreeMap::new();
    for (name, size) in pairs {
        let size = reserve(size, remarks)?;
        if classes.insert(name.text.clone(), size).is_some() {
            let text = format!(
                "the class `{}` is given more than once; the last one takes effect, remove the others",
                name.text
            );
            remarks.push(Remark { at: name.at, text });
        }
    }
    Ok(classes)
}
