//! From the address of an allocation to its block, in constant time and without a search: one entry per possible start.
//!
//! Addresses are indexed in pages of 2 MiB. Blocks of a large area are larger than 1 MiB, so at most two start in a
//! page; a page of a small area has a table with an entry per grain, made when it is first used.

use super::block::{GRAIN, NONE};
use crate::memory::SegmentKind;

const PAGE: u64 = 2 << 20;
const GRAINS: usize = (PAGE / GRAIN) as usize;

/// The starts of allocated blocks in one address range.
#[derive(Debug)]
pub(super) enum Starts {
    Small(Vec<Option<Box<[u32; GRAINS]>>>),
    /// With the offsets in the page.
    Large(Vec<[(u32, u32); 2]>),
}

const EMPTY: (u32, u32) = (0, NONE);

#[inline]
fn split(offset: u64) -> (usize, u32) {
    ((offset / PAGE) as usize, (offset % PAGE) as u32)
}

impl Starts {
    pub(super) fn new(kind: SegmentKind) -> Self {
        match kind {
            SegmentKind::Small => Self::Small(Vec::new()),
            SegmentKind::Large => Self::Large(Vec::new()),
        }
    }

    /// The block that starts at this offset in the range.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> Option<u32> {
        let (page, at) = split(offset);
        let id = match self {
            Self::Small(pages) => pages.get(page)?.as_ref()?[(at / GRAIN as u32) as usize],
            Self::Large(pages) => pages.get(page)?.iter().find(|(start, id)| *id != NONE && *start == at)?.1,
        };
        (id != NONE && u64::from(at).is_multiple_of(GRAIN)).then_some(id)
    }

    #[inline]
    pub(super) fn insert(&mut self, offset: u64, id: u32) {
        let (page, at) = split(offset);
        match self {
            Self::Small(pages) => {
                if page >= pages.len() {
                    pages.resize_with(page + 1, || None);
                }
                let page = pages[page].get_or_insert_with(|| Box::new([NONE; GRAINS]));
                page[(at / GRAIN as u32) as usize] = id;
            }
            Self::Large(pages) => {
                if page >= pages.len() {
                    pages.resize(page + 1, [EMPTY; 2]);
                }
                let free = pages[page].iter_mut().find(|(_, id)| *id == NONE);
                *free.expect("at most two large blocks start in a page") = (at, id);
            }
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, offset: u64) {
        let (page, at) = split(offset);
        match self {
            Self::Small(pages) => {
                if let Some(Some(page)) = pages.get_mut(page) {
                    page[(at / GRAIN as u32) as usize] = NONE;
                }
            }
            Self::Large(pages) => {
                let page = pages.get_mut(page).into_iter().flatten();
                page.filter(|(start, id)| *id != NONE && *start == at).for_each(|entry| *entry = EMPTY);
            }
        }
    }
}
