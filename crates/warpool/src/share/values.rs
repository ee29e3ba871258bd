//! What a page says of a device, and how that is a fixed number of words.

use super::layout::{VALUE_WORDS, cut, packed, unpacked};
use crate::memory::{MemPoolId, OomCause, OomReport};

/// The word of a number that is unknown, or of no limit.
const NONE: u64 = u64::MAX;

/// Declares the counters: their names, and their order in the page.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a process on one device.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            const COUNT: usize = [$(stringify!($name)),*].len();

            /// Every counter with its name, in the order of the page.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            fn words(&self) -> [u64; Self::COUNT] {
                [$(self.$name),*]
            }

            fn from_words(words: [u64; Self::COUNT]) -> Self {
                let [$($name),*] = words;
                Self { $($name),* }
            }
        }
    };
}

counters! {
    /// Bytes of allocated blocks.
    bytes_allocated,
    /// Bytes of allocated blocks and of pending frees.
    bytes_active,
    /// Requested bytes, before rounding, of the active blocks.
    bytes_requested,
    /// Bytes from the driver.
    bytes_reserved,
    /// The highest value of `bytes_allocated` since the last reset of the peaks.
    bytes_allocated_peak,
    /// The same of `bytes_reserved`.
    bytes_reserved_peak,
    /// Free bytes of pages: mapped ones and spare ones. 0 with other allocators than the paged one.
    bytes_free_pages,
    /// Bytes of memory that is asleep: released to the driver.
    bytes_asleep,
    /// Bytes of committed elastic memory.
    bytes_elastic,
    /// Bytes of pinned host memory that the device uses.
    bytes_pinned,
    /// Bytes of workspaces of libraries.
    bytes_workspace,
    /// Bytes that the process may reserve on the device; `u64::MAX` is no limit.
    bytes_limit,
    /// Free bytes of the device, as the driver told the process; `u64::MAX` is unknown.
    bytes_device_free,
    /// Allocations, in total.
    allocations,
    /// How often memory was allocated from the driver.
    driver_allocations,
    /// How often memory was returned to the driver.
    driver_frees,
    /// Pages that were mapped.
    pages_mapped,
    /// Mappings that were undone.
    pages_unmapped,
    /// How often all cached memory was released to retry a request.
    retries,
    /// How often a request ran out of memory.
    ooms,
    /// Allocations per second, since the values before.
    allocations_per_second,
    /// Pages mapped and mappings undone per second, since the values before.
    remaps_per_second,
    /// When all these were read, in microseconds since 1970.
    read_us,
}

impl Counters {
    /// The limit on reserved bytes, if there is one.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        some(self.bytes_limit)
    }

    /// Free bytes of the device, if they are known.
    #[must_use]
    pub fn device_free(&self) -> Option<u64> {
        some(self.bytes_device_free)
    }
}

/// The last out-of-memory error of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OomEvent {
    /// When, in microseconds since 1970.
    pub time_us: u64,
    /// Bytes that were requested.
    pub bytes_requested: u64,
    /// Free bytes of the device.
    pub bytes_free: u64,
    /// Bytes that the allocator had reserved.
    pub bytes_reserved: u64,
    /// Bytes of allocated blocks.
    pub bytes_allocated: u64,
    /// What the allocator may reserve, if that is limited.
    pub bytes_limit: Option<u64>,
    /// Whether a limit was the cause, not a full device.
    pub by_limit: bool,
}

impl OomEvent {
    const WORDS: usize = 8;

    /// What the page has of a report that came at this time.
    #[must_use]
    pub fn of(report: &OomReport, time_us: u64) -> Self {
        Self {
            time_us,
            bytes_requested: report.bytes_requested,
            bytes_free: report.bytes_free,
            bytes_reserved: report.bytes_reserved,
            bytes_allocated: report.bytes_allocated,
            bytes_limit: report.bytes_limit,
            by_limit: matches!(report.cause, OomCause::Limit | OomCause::Rejected | OomCause::Cap { .. }),
        }
    }

    fn words(&self) -> [u64; Self::WORDS] {
        let limit = self.bytes_limit.unwrap_or(NONE);
        let Self { time_us, bytes_requested, bytes_free, bytes_reserved, bytes_allocated, .. } = *self;
        [1, time_us, bytes_requested, bytes_free, bytes_reserved, bytes_allocated, limit, self.by_limit.into()]
    }

    fn from_words(
        [is_some, time, requested, free, reserved, allocated, limit, by]: [u64; Self::WORDS],
    ) -> Option<Self> {
        (is_some == 1).then_some(Self {
            time_us: time,
            bytes_requested: requested,
            bytes_free: free,
            bytes_reserved: reserved,
            bytes_allocated: allocated,
            bytes_limit: some(limit),
            by_limit: by == 1,
        })
    }
}

/// What a row counts the memory of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum UsageOf {
    /// A tag ([`Tags`](crate::memory::Tags)). A name is cut after 40 bytes.
    Tag(String),
    /// A pool.
    Pool(MemPoolId),
    /// A stream, by the driver's handle.
    Stream(u64),
    /// Tags for which there was no room, together.
    OtherTags,
    /// The same of pools.
    OtherPools,
    /// The same of streams.
    OtherStreams,
}

impl UsageOf {
    /// What it is one of: `tag`, `pool` or `stream`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Tag(_) | Self::OtherTags => "tag",
            Self::Pool(_) | Self::OtherPools => "pool",
            Self::Stream(_) | Self::OtherStreams => "stream",
        }
    }

    /// Its name within its kind; `None` for those that there was no room for.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        match self {
            Self::Tag(name) => Some(name.clone()),
            Self::Pool(pool) if pool.is_default() => Some("default".to_owned()),
            Self::Pool(pool) => Some(format!("{}.{}", pool.graph, pool.user)),
            Self::Stream(handle) => Some(format!("{handle:#x}")),
            Self::OtherTags | Self::OtherPools | Self::OtherStreams => None,
        }
    }

    fn others(&self) -> Self {
        match self.kind() {
            "tag" => Self::OtherTags,
            "pool" => Self::OtherPools,
            _ => Self::OtherStreams,
        }
    }
}

/// The memory of a tag, of a pool, or of a stream on one device. Each byte is counted once per kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsageRow {
    /// Whose memory it is.
    pub of: UsageOf,
    /// Bytes from the driver.
    pub bytes_reserved: u64,
    /// Bytes of allocated blocks.
    pub bytes_allocated: u64,
    /// Bytes of allocated blocks and of pending frees.
    pub bytes_active: u64,
    /// Bytes of memory that is asleep.
    pub bytes_asleep: u64,
    /// Bytes of elastic memory.
    pub bytes_elastic: u64,
}

impl UsageRow {
    const WORDS: usize = 12;
    const NAME_WORDS: usize = 5;
    /// Rows of each kind, with that of the others.
    pub(super) const OF_KIND_MAX: usize = 18;
    const MAX: usize = 3 * Self::OF_KIND_MAX;

    /// A row without memory.
    #[must_use]
    pub const fn of(of: UsageOf) -> Self {
        Self { of, bytes_reserved: 0, bytes_allocated: 0, bytes_active: 0, bytes_asleep: 0, bytes_elastic: 0 }
    }

    /// Adds the memory of another row.
    pub fn add(&mut self, other: &Self) {
        for (sum, bytes) in self.bytes().into_iter().zip(other.clone().bytes()) {
            *sum = sum.saturating_add(*bytes);
        }
    }

    fn bytes(&mut self) -> [&mut u64; 5] {
        let Self { bytes_reserved, bytes_allocated, bytes_active, bytes_asleep, bytes_elastic, .. } = self;
        [bytes_reserved, bytes_allocated, bytes_active, bytes_asleep, bytes_elastic]
    }

    fn words(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[0] = match &self.of {
            UsageOf::Tag(name) => {
                let bytes = cut(name, Self::NAME_WORDS * 8);
                for (index, word) in words[1..=Self::NAME_WORDS].iter_mut().enumerate() {
                    *word = packed(bytes, index);
                }
                1
            }
            UsageOf::Pool(pool) => {
                words[1] = u64::from(pool.graph) << 32 | u64::from(pool.user);
                2
            }
            UsageOf::Stream(handle) => {
                words[1] = *handle;
                3
            }
            UsageOf::OtherTags => 4,
            UsageOf::OtherPools => 5,
            UsageOf::OtherStreams => 6,
        };
        let bytes = self.clone().bytes().map(|bytes| *bytes);
        words[1 + Self::NAME_WORDS..][..bytes.len()].copy_from_slice(&bytes);
        words
    }

    fn from_words(words: &[u64]) -> Option<Self> {
        #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
        let pool = MemPoolId { graph: (words[1] >> 32) as u32, user: words[1] as u32 };
        let mut row = Self::of(match words[0] {
            1 => UsageOf::Tag(unpacked(words[1..=Self::NAME_WORDS].iter().copied())),
            2 => UsageOf::Pool(pool),
            3 => UsageOf::Stream(words[1]),
            4 => UsageOf::OtherTags,
            5 => UsageOf::OtherPools,
            6 => UsageOf::OtherStreams,
            _ => return None,
        });
        for (bytes, &word) in row.bytes().into_iter().zip(&words[1 + Self::NAME_WORDS..]) {
            *bytes = word;
        }
        Some(row)
    }
}

/// At most as many rows as there is room for, those with most memory of each kind, in a fixed order. The others are
/// added up.
pub(super) fn bounded(mut rows: Vec<UsageRow>) -> Vec<UsageRow> {
    let weight = |row: &UsageRow| row.bytes_reserved.saturating_add(row.bytes_asleep);
    rows.sort_by(|a, b| weight(b).cmp(&weight(a)).then_with(|| a.of.cmp(&b.of)));
    let mut kept = Vec::new();
    for kind in ["tag", "pool", "stream"] {
        let mut of_kind: Vec<UsageRow> = rows.extract_if(.., |row| row.of.kind() == kind).collect();
        if of_kind.len() > UsageRow::OF_KIND_MAX {
            let rest = of_kind.split_off(UsageRow::OF_KIND_MAX - 1);
            let mut others = UsageRow::of(rest[0].of.others());
            rest.iter().for_each(|row| others.add(row));
            of_kind.push(others);
        }
        kept.append(&mut of_kind);
    }
    kept
}

/// All that a page says of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceValues {
    /// The counters.
    pub counters: Counters,
    /// Memory by tag, by pool and by stream: of each kind those with most, and the others together.
    pub rows: Vec<UsageRow>,
    /// The last out-of-memory error.
    pub last_oom: Option<OomEvent>,
}

const OOM_AT: usize = Counters::COUNT;
const ROW_COUNT_AT: usize = OOM_AT + OomEvent::WORDS;
const ROWS_AT: usize = ROW_COUNT_AT + 1;
const _: () = assert!(ROWS_AT + UsageRow::MAX * UsageRow::WORDS <= VALUE_WORDS, "they fit");

impl DeviceValues {
    /// Its words. The rows are [`bounded`].
    pub(super) fn words(&self) -> [u64; VALUE_WORDS] {
        let mut words = [0; VALUE_WORDS];
        words[..Counters::COUNT].copy_from_slice(&self.counters.words());
        if let Some(event) = &self.last_oom {
            words[OOM_AT..][..OomEvent::WORDS].copy_from_slice(&event.words());
        }
        words[ROW_COUNT_AT] = self.rows.len() as u64;
        for (to, row) in words[ROWS_AT..].chunks_exact_mut(UsageRow::WORDS).zip(&self.rows) {
            to.copy_from_slice(&row.words());
        }
        words
    }

    /// `None` if no process can have written these words.
    pub(super) fn from_words(words: &[u64; VALUE_WORDS]) -> Option<Self> {
        let rows = usize::try_from(words[ROW_COUNT_AT]).ok().filter(|&rows| rows <= UsageRow::MAX)?;
        let rows = words[ROWS_AT..].chunks_exact(UsageRow::WORDS).take(rows);
        Some(Self {
            counters: Counters::from_words(words[..Counters::COUNT].try_into().expect("their number")),
            rows: rows.map(UsageRow::from_words).collect::<Option<_>>()?,
            last_oom: OomEvent::from_words(words[OOM_AT..][..OomEvent::WORDS].try_into().expect("its words")),
        })
    }
}

fn some(word: u64) -> Option<u64> {
    (word != NONE).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(of: UsageOf, reserved: u64) -> UsageRow {
        UsageRow { bytes_reserved: reserved, bytes_elastic: 1, ..UsageRow::of(of) }
    }

    #[test]
    fn values_survive_their_words() {
        let mut words = [0; Counters::COUNT];
        words.iter_mut().zip(100..).for_each(|(word, number)| *word = number);
        let long = "é".repeat(40);
        let rows = vec![
            row(UsageOf::Tag("weights".to_owned()), 9),
            row(UsageOf::Tag(long.clone()), 8),
            row(UsageOf::OtherTags, 7),
            row(UsageOf::Pool(MemPoolId { graph: 3, user: u32::MAX }), 6),
            row(UsageOf::Stream(u64::MAX), 5),
        ];
        let last_oom = Some(OomEvent { time_us: 5, bytes_limit: Some(0), by_limit: true, ..OomEvent::default() });
        let values = DeviceValues { counters: Counters::from_words(words), rows, last_oom };
        let mut read = DeviceValues::from_words(&values.words()).unwrap();
        assert_eq!(read.rows[1].of, UsageOf::Tag("é".repeat(20)), "cut at a character");
        read.rows[1].of = UsageOf::Tag(long);
        assert_eq!(read, values);
        assert_eq!(DeviceValues::from_words(&DeviceValues::default().words()), Some(DeviceValues::default()));
    }

    #[test]
    fn impossible_words_are_no_values() {
        let mut words = DeviceValues::default().words();
        for rows in [UsageRow::MAX as u64 + 1, u64::MAX] {
            words[ROW_COUNT_AT] = rows;
            assert_eq!(DeviceValues::from_words(&words), None);
        }
        // A row of no kind.
        words[ROW_COUNT_AT] = 1;
        assert_eq!(DeviceValues::from_words(&words), None);
        words[ROWS_AT] = 4;
        assert!(DeviceValues::from_words(&words).is_some());
    }

    #[test]
    fn what_does_not_fit_is_added_up() {
        let mut rows: Vec<UsageRow> = (0..40).map(|stream| row(UsageOf::Stream(stream), 100 + stream)).collect();
        rows.push(row(UsageOf::Pool(MemPoolId::DEFAULT), u64::MAX));
        let kept = bounded(rows);
        assert_eq!(kept.len(), 1 + UsageRow::OF_KIND_MAX);
        assert_eq!((&kept[0].of, &kept[1].of), (&UsageOf::Pool(MemPoolId::DEFAULT), &UsageOf::Stream(39)));
        let others = &kept[UsageRow::OF_KIND_MAX];
        // Streams 0 to 22.
        assert_eq!((&others.of, others.bytes_reserved), (&UsageOf::OtherStreams, 23 * 100 + 22 * 23 / 2));
        assert_eq!(others.bytes_elastic, 23);
        let few = vec![row(UsageOf::Stream(1), 1); UsageRow::OF_KIND_MAX];
        assert_eq!(bounded(few.clone()), few);
    }
}
