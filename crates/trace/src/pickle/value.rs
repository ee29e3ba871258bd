//! What the machine's stack and memo hold: plain values as they are, containers by kind and number.
//! Sixteen bytes each: a recording's memo has a slot per event.

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
    /// A text, by its number in `Texts`.
    Text(u32),
    /// A tuple of two small numbers, as pool ids are.
    Pair(MemPoolId),
    /// Any other tuple; its elements are dropped.
    Tuple,
    Dict(DictKind, u32),
    List(ListKind, u32),
}

/// What a dict is, told by where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DictKind {
    Root,
    Segment,
    Block,
    /// What a block was before, as snapshots up to PyTorch 2.0 tell it.
    Past,
    Entry,
    Frame,
    Settings,
    Divisions,
    Annotation,
    /// Something that nobody asks for; nothing of it is kept.
    Skipped,
}

/// What a list is, told by where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    Segments,
    Blocks,
    History,
    /// The list that has a trace per device.
    Traces,
    Trace,
    Frames,
    Annotations,
    /// Something that nobody asks for; nothing of it is kept.
    Skipped,
}

impl Value {
    /// How it is called in messages.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) | Self::Large(_) => "an int",
            Self::Huge => "an int beyond 64 bits",
            Self::Float(_) => "a float",
            Self::Text(_) => "a text",
            Self::Pair(_) | Self::Tuple => "a tuple",
            Self::Dict(..) => "a dict",
            Self::List(..) => "a list",
        }
    }
}

const _: () = assert!(size_of::<Value>() == 16, "the memo's cost per event");
