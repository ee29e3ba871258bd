//! The position of a container in the snapshot, from its position on the stack: what a container that is being opened
//! will describe, and the path of one that is wrong.
//!
//! A pickle writes a container before its contents, so the parent is below on the stack: under the mark of its batch of
//! values, or, for a single value without a mark, directly below. A wrong guess does no harm: a container of the wrong
//! kind is refused where it is used.

use super::stack::PickleStack;
use crate::pickle::{DictKind, ListKind, Value};
use crate::snapshot::Builder;
use crate::snapshot::schema::{self, Keyword};

/// The parent of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Parent {
    /// None: it is the root.
    None,
    /// The dict at index `at` of the stack, under that key.
    Dict { at: usize, kind: DictKind, key: u32 },
    /// The list at index `at` of the stack, `ahead` elements after its present end.
    List { at: usize, kind: ListKind, number: u32, ahead: usize },
    /// A container that is not read, such as a tuple.
    Other,
}

/// The kind of a dict that is opened at the top of the stack.
pub(super) fn kind_of_new_dict(stack: &PickleStack) -> DictKind {
    match parent(stack, stack.len(), false) {
        Parent::None => DictKind::Root,
        Parent::Dict { kind, key, .. } => schema::dict_in(kind, Keyword::of(key)),
        Parent::List { kind, .. } => schema::dict_of(kind),
        Parent::Other => DictKind::Skipped,
    }
}

/// The kind of a list that is opened at the top of the stack.
pub(super) fn kind_of_new_list(stack: &PickleStack, keeps_stacks: bool) -> ListKind {
    let kind = match parent(stack, stack.len(), true) {
        Parent::None => ListKind::Segments,
        Parent::Dict { kind, key, .. } => schema::list_in(kind, Keyword::of(key)),
        Parent::List { kind, .. } => schema::list_of(kind),
        Parent::Other => ListKind::Skipped,
    };
    if kind == ListKind::Frames && !keeps_stacks { ListKind::Skipped } else { kind }
}

/// Whether a text at the top of the stack is read, as the value of a key.
pub(super) fn reads_text(stack: &PickleStack, keeps_stacks: bool) -> bool {
    match parent(stack, stack.len(), false) {
        Parent::Dict { kind, key, .. } => schema::reads_text(kind, Keyword::of(key), keeps_stacks),
        Parent::None | Parent::List { .. } | Parent::Other => false,
    }
}

/// The path of the container at index `at` of the stack, as in `.device_traces[0][17]`.
pub(super) fn path(stack: &PickleStack, builder: &Builder, mut at: usize) -> String {
    // Each step goes down the stack, so this ends; a longer path would not be readable.
    const STEPS_MAX: usize = 16;
    let mut steps = Vec::new();
    while steps.len() < STEPS_MAX {
        let is_list = matches!(stack.values().get(at), Some(Value::List(..)));
        match parent(stack, at, is_list) {
            Parent::Dict { at: below, key, .. } => {
                steps.push(format!(".{}", builder.shortened_text(key)));
                at = below;
            }
            Parent::List { at: below, kind, number, ahead } => {
                steps.push(format!("[{}]", builder.length(kind, number) + ahead));
                at = below;
            }
            Parent::None | Parent::Other => break,
        }
    }
    steps.reverse();
    steps.concat()
}

/// The parent of the value at index `at`, which is a list or else a dict.
fn parent(stack: &PickleStack, at: usize, is_list: bool) -> Parent {
    let mark = stack.mark_below(at);
    let floor = mark.unwrap_or(0);
    let values = &stack.values()[floor..at];
    let batch_parent = mark.and_then(|mark| mark.checked_sub(1)).map(|below| (below, stack.values()[below]));
    let ahead = at - floor;

    // Without a mark of its own a container gets one value: [list, value] or [dict, key, value].
    let single = match *values {
        [.., Value::List(kind, number)] => Some(Parent::List { at: at - 1, kind, number, ahead: 0 }),
        [.., Value::Dict(kind, _), Value::Text(key)] => Some(Parent::Dict { at: at - 2, kind, key }),
        _ => None,
    };
    match batch_parent {
        // In a batch of items keys and values alternate, and no list is a key.
        Some((below, Value::Dict(kind, _))) => match values.last() {
            Some(&Value::Text(key)) if ahead % 2 == 1 => {
                let item = Parent::Dict { at: below, kind, key };
                match single {
                    // The value before it may be a dict that still gets its only item.
                    Some(Parent::Dict { kind: inner, .. }) => {
                        let fits = |kind| match is_list {
                            true => schema::list_in(kind, Keyword::of(key)) != ListKind::Skipped,
                            false => schema::dict_in(kind, Keyword::of(key)) != DictKind::Skipped,
                        };
                        if fits(inner) && !fits(kind) { single.unwrap_or(item) } else { item }
                    }
                    _ => item,
                }
            }
            _ => single.unwrap_or(Parent::Other),
        },
        // In a batch of elements the one before it may be a list that still gets its only element.
        Some((below, Value::List(kind, number))) => {
            let element = Parent::List { at: below, kind, number, ahead };
            match single {
                Some(Parent::List { kind: inner, .. }) => {
                    let fits = |kind| match is_list {
                        true => schema::list_of(kind) != ListKind::Skipped,
                        false => schema::dict_of(kind) != DictKind::Skipped,
                    };
                    if fits(inner) && !fits(kind) { single.unwrap_or(element) } else { element }
                }
                Some(single) => single,
                None => element,
            }
        }
        Some(_) => single.unwrap_or(Parent::Other),
        None if at == 0 && mark.is_none() => Parent::None,
        None => single.unwrap_or(Parent::Other),
    }
}
