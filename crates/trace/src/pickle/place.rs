//! Where on the stack means where in the snapshot: what a container that is being opened will be, and the path of one
//! that is wrong.
//!
//! A pickle writes a parent before its children, so the parent is below on the stack: under the mark of its batch of
//! values, or, with a single value and no mark, right below. A guess that is wrong does no harm: a container of the
//! wrong kind is refused where it is used.

use super::machine::Machine;
use super::value::{DictKind, ListKind, Value};
use crate::error::ReadError;
use crate::snapshot::{Word, Wrong, schema};

/// What holds a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    /// Nothing: it is the whole.
    Whole,
    /// A dict at that height, under that key.
    Dict { at: usize, kind: DictKind, key: u32 },
    /// A list at that height, at that many places behind its present end.
    List { at: usize, kind: ListKind, number: u32, ahead: usize },
    /// Something that does not matter, such as a tuple.
    Other,
}

impl Machine<'_, '_> {
    pub(super) fn kind_of_dict(&self) -> DictKind {
        match self.holder(self.stack.len(), false) {
            Holder::Whole => DictKind::Root,
            Holder::Dict { kind, key, .. } => schema::dict_in(kind, Word::of(key)),
            Holder::List { kind, .. } => schema::dict_of(kind),
            Holder::Other => DictKind::Skipped,
        }
    }

    pub(super) fn kind_of_list(&self) -> ListKind {
        let kind = match self.holder(self.stack.len(), true) {
            Holder::Whole => ListKind::Segments,
            Holder::Dict { kind, key, .. } => schema::list_in(kind, Word::of(key)),
            Holder::List { kind, .. } => schema::list_of(kind),
            Holder::Other => ListKind::Skipped,
        };
        if kind == ListKind::Frames && !self.builder.keeps_stacks() { ListKind::Skipped } else { kind }
    }

    /// What will hold the value at height `at`, if that is a list or else a dict.
    fn holder(&self, at: usize, is_list: bool) -> Holder {
        let mark = self.marks.iter().rev().find(|&&mark| mark <= at).copied();
        let floor = mark.unwrap_or(0);
        let parent = mark.and_then(|mark| mark.checked_sub(1)).map(|below| (below, self.stack[below]));
        let ahead = at - floor;

        // Without a mark of its own a container gets one value: [list, value] or [dict, key, value].
        let single = match self.stack[floor..at] {
            [.., Value::List(kind, number)] => Some(Holder::List { at: at - 1, kind, number, ahead: 0 }),
            [.., Value::Dict(kind, _), Value::Text(key)] => Some(Holder::Dict { at: at - 2, kind, key }),
            _ => None,
        };
        match parent {
            // In a batch of items keys and values take turns, and no list is a key.
            Some((below, Value::Dict(kind, _))) => match self.stack[floor..at].last() {
                Some(&Value::Text(key)) if ahead % 2 == 1 => {
                    let item = Holder::Dict { at: below, kind, key };
                    match single {
                        // The value before may be a dict that still gets its only item.
                        Some(Holder::Dict { kind: inner, .. }) => {
                            let fits = |kind| match is_list {
                                true => schema::list_in(kind, Word::of(key)) != ListKind::Skipped,
                                false => schema::dict_in(kind, Word::of(key)) != DictKind::Skipped,
                            };
                            if fits(inner) && !fits(kind) { single.unwrap_or(item) } else { item }
                        }
                        _ => item,
                    }
                }
                _ => single.unwrap_or(Holder::Other),
            },
            // In a batch of elements the one before may be a list that still gets its only element.
            Some((below, Value::List(kind, number))) => {
                let element = Holder::List { at: below, kind, number, ahead };
                match single {
                    Some(Holder::List { kind: inner, .. }) => {
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
            Some(_) => single.unwrap_or(Holder::Other),
            None if at == 0 && mark.is_none() => Holder::Whole,
            None => single.unwrap_or(Holder::Other),
        }
    }

    /// The error that the container at height `at` is wrong.
    #[cold]
    pub(super) fn content(&self, at: usize, wrong: &Wrong) -> Box<ReadError> {
        let mut path = self.path(at);
        path.push_str(&wrong.inside);
        if path.is_empty() {
            path.push_str("the whole");
        }
        let path = path.trim_start_matches('.').to_owned();
        Box::new(ReadError::Content { offset: self.at, at: path, what: wrong.what.clone() })
    }

    fn path(&self, mut at: usize) -> String {
        // Each step goes down the stack, so it ends; a path longer than this helps nobody.
        const STEPS_MAX: usize = 16;
        let mut steps = Vec::new();
        while steps.len() < STEPS_MAX {
            let is_list = matches!(self.stack.get(at), Some(Value::List(..)));
            match self.holder(at, is_list) {
                Holder::Dict { at: below, key, .. } => {
                    steps.push(format!(".{}", self.builder.texts.short(key)));
                    at = below;
                }
                Holder::List { at: below, kind, number, ahead } => {
                    steps.push(format!("[{}]", self.builder.length(kind, number) + ahead));
                    at = below;
                }
                Holder::Whole | Holder::Other => break,
            }
        }
        steps.reverse();
        steps.concat()
    }
}
