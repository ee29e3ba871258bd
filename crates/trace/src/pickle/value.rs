//! A value on the stack or in the memo of a pickle: scalars as they are, containers by kind and number.
//! Sixteen bytes each, since the memo of a recording has one per event.

use warpool::memory::MemPoolId;

/// A value of a pickle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// From 2^63 to 2^64 - 1.
    Large(u64),
    /// An integer beyond 64 bits; its digits are dropped.
    Huge,
    Float(f64),
    /// A text, by its number in the table of texts.
    Text(u32),
    /// A long text where no text is read; its content is dropped.
    SkippedText,
    /// A tuple of two small numbers: a pool id.
    Pair(MemPoolId),
    /// Any other tuple; its elements are dropped.
    Tuple,
    Dict(DictKind, u32),
    List(ListKind, u32),
}

/// What a dict describes, known from its position in the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DictKind {
    Root,
    Segment,
    Block,
    /// An earlier use of a block, in snapshots up to PyTorch 2.0.
    BlockHistory,
    Entry,
    Frame,
    Settings,
    Divisions,
    Annotation,
    /// A row of an account, in snapshots of Warpool.
    Account,
    /// Not a known part of a snapshot; its content is dropped.
    Skipped,
}

/// What a list contains, known from its position in the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    Segments,
    Blocks,
    BlockHistory,
    /// One trace per device.
    Traces,
    Trace,
    Frames,
    Annotations,
    /// Rows of accounts.
    Account,
    /// A pool id as a list of two numbers: a tuple after a round trip through JSON.
    Pool,
    /// Not a known part of a snapshot; its content is dropped.
    Skipped,
}

impl Value {
    /// The type of the value, for messages.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) | Self::Large(_) => "an int",
            Self::Huge => "an int beyond 64 bits",
            Self::Float(_) => "a float",
            Self::Text(_) => "a text",
            Self::SkippedText => "a text that is first written in a part that is not read",
            Self::Pair(_) | Self::Tuple => "a tuple",
            Self::Dict(..) => "a dict",
            Self::List(..) => "a list",
        }
    }
}

const _: () = assert!(size_of::<Value>() == 16, "the memo has one per event");
