//! A set of pages.

/// Numbers a page.
pub(super) type PageId = u32;

/// A bit for each page, by number: pages are numbered densely, and sets of them are made for every request that needs
/// pages.
#[derive(Clone, Debug, Default)]
pub(super) struct PageSet {
    words: Vec<u64>,
}

fn place(page: PageId) -> (usize, u64) {
    (page as usize / 64, 1 << (page % 64))
}

impl PageSet {
    /// Empty, with room for the pages below this number.
    pub(super) fn for_pages(end: PageId) -> Self {
        Self { words: vec![0; (end as usize).div_ceil(64)] }
    }

    #[inline]
    pub(super) fn insert(&mut self, page: PageId) {
        let (word, bit) = place(page);
        match self.words.get_mut(word) {
            Some(bits) => *bits |= bit,
            None => self.insert_behind(word, bit),
        }
    }

    #[cold]
    fn insert_behind(&mut self, word: usize, bit: u64) {
        self.words.resize((word + 1).next_power_of_two(), 0);
        self.words[word] |= bit;
    }

    #[inline]
    pub(super) fn contains(&self, page: PageId) -> bool {
        self.bit(page) == 1
    }

    /// 1 if it contains the page, else 0.
    #[inline]
    pub(super) fn bit(&self, page: PageId) -> u64 {
        self.words.get(page as usize / 64).map_or(0, |&bits| bits >> (page % 64) & 1)
    }

    /// Removes a page. Returns whether it was there.
    pub(super) fn remove(&mut self, page: PageId) -> bool {
        let (word, bit) = place(page);
        let had = self.contains(page);
        if had {
            self.words[word] &= !bit;
        }
        had
    }

    /// The pages of both sets.
    pub(super) fn with(mut self, others: &Self) -> Self {
        self.words.resize(self.words.len().max(others.words.len()), 0);
        self.words.iter_mut().zip(&others.words).for_each(|(bits, others)| *bits |= others);
        self
    }

    /// The pages that are not in the other set.
    pub(super) fn without(mut self, others: &Self) -> Self {
        self.words.iter_mut().zip(&others.words).for_each(|(bits, others)| *bits &= !others);
        self
    }

    /// Calls `each` with every page, in the order of their numbers.
    #[inline]
    pub(super) fn for_each(&self, mut each: impl FnMut(PageId)) {
        for (word, &bits) in (0..).zip(&self.words) {
            let mut left = bits;
            while left != 0 {
                each(word * 64 + left.trailing_zeros());
                left &= left - 1;
            }
        }
    }
}

impl Extend<PageId> for PageSet {
    fn extend<I: IntoIterator<Item = PageId>>(&mut self, pages: I) {
        pages.into_iter().for_each(|page| self.insert(page));
    }
}

impl FromIterator<PageId> for PageSet {
    fn from_iter<I: IntoIterator<Item = PageId>>(pages: I) -> Self {
        let mut set = Self::default();
        set.extend(pages);
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(set: &PageSet) -> Vec<PageId> {
        let mut pages = Vec::new();
        set.for_each(|page| pages.push(page));
        pages
    }

    #[test]
    fn pages_are_found_and_listed_in_order() {
        let mut set: PageSet = [130, 3, 64, 63].into_iter().collect();
        assert_eq!(listed(&set), [3, 63, 64, 130]);
        assert!(set.contains(64) && !set.contains(65) && !set.contains(1000));
        assert!(set.remove(64) && !set.remove(64) && !set.remove(1000));
        assert_eq!(listed(&set), [3, 63, 130]);
    }

    #[test]
    fn sets_of_different_sizes_are_joined_and_subtracted() {
        let set = |pages: &[PageId]| pages.iter().copied().collect::<PageSet>();
        let (small, large) = (set(&[1, 2]), set(&[2, 200]));
        assert_eq!(listed(&small.clone().with(&large)), [1, 2, 200]);
        assert_eq!(listed(&large.clone().with(&small)), [1, 2, 200]);
        assert_eq!(listed(&small.clone().without(&large)), [1]);
        assert_eq!(listed(&large.without(&small)), [200]);
    }
}
