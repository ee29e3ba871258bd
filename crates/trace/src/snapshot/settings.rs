//! The allocator settings while a pickle is read.

use warpool::memory::report::RecordedSettings;

use super::convert::{boolean, float, signed, text};
use super::invalid::Invalid;
use super::schema::Keyword;
use super::texts::TextTable;
use crate::budget::Budget;
use crate::pickle::{DictKind, Value};

/// The most bytes of a settings string, which is copied wherever a pickle refers to it.
const CONF_MAX: usize = 16 << 10;
/// Likewise of a size in `roundup_power2_divisions`.
const DIVISION_NAME_MAX: usize = 20;

/// `roundup_power2_divisions`: sizes in MiB and their divisions.
pub(super) type Divisions = Vec<(String, i64)>;

pub(super) fn set(
    settings: &mut RecordedSettings,
    key: Option<Keyword>,
    value: Value,
    texts: &TextTable,
    divisions: &mut [Divisions],
    budget: &Budget,
) -> Result<(), Invalid> {
    match key {
        Some(Keyword::Conf) => {
            let conf = texts.get(text(value)?);
            if conf.len() > CONF_MAX {
                let length = conf.len();
                return Err(Invalid::new(format!("a settings string of {length} bytes; at most {CONF_MAX} are read")));
            }
            budget.take(conf.len() as u64)?;
            settings.conf = Some(conf.to_owned());
        }
        Some(Keyword::MaxSplitSize) => settings.max_split_size = Some(signed(value)?),
        Some(Keyword::GarbageCollectionThreshold) => settings.garbage_collection_threshold = Some(float(value)?),
        Some(Keyword::ExpandableSegments) => settings.expandable_segments = Some(boolean(value)?),
        Some(Keyword::PinnedNumRegisterThreads) => settings.pinned_num_register_threads = Some(signed(value)?),
        Some(Keyword::ReleaseLockOnCudamalloc) => settings.release_lock_on_cudamalloc = Some(boolean(value)?),
        Some(Keyword::PinnedUseCudaHostRegister) => settings.pinned_use_cuda_host_register = Some(boolean(value)?),
        Some(Keyword::GraphCaptureRecordStreamReuse) => {
            settings.graph_capture_record_stream_reuse = Some(boolean(value)?);
        }
        Some(Keyword::MaxRoundThreshold) => settings.max_round_threshold = Some(signed(value)?),
        Some(Keyword::MaxCachedSize) => settings.max_cached_size = Some(signed(value)?),
        Some(Keyword::RoundupPower2Divisions) => match value {
            Value::Dict(DictKind::Divisions, dict) => {
                settings.roundup_power2_divisions = Some(std::mem::take(&mut divisions[dict as usize]));
            }
            _ => return Err(Invalid::container(value)),
        },
        _ => {}
    }
    Ok(())
}

pub(super) fn set_division(
    divisions: &mut Divisions,
    size: &str,
    value: Value,
    budget: &Budget,
) -> Result<(), Invalid> {
    if size.len() > DIVISION_NAME_MAX {
        return Err(Invalid::new("expected a size in MiB"));
    }
    budget.take(DIVISION_NAME_MAX as u64 + 16)?;
    budget.reserve_one(divisions)?;
    divisions.push((size.to_owned(), signed(value)?));
    Ok(())
}
