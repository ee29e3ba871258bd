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
    /// Removes all, and makes room for the pages below this number.
    pub(super) fn clear_for(&mut self, end: PageId) {
        self.words.clear();
        self.words.resize((end as usize).div_ceil(64), 0);
    }

    #[inline]
    pub(super) fn insert(&mut self, page: PageId) {
        let (word, bit) = place(page);
        match self.words.get_mut(word) {
            Some(bits) => *bits |= bit,
            None => self.insert_behind(word, bit),
        }
    }

    /// Inserts pages for which there is [room](Self::clear_for).
    #[inline]
    pub(super) fn insert_known(&mut self, pages: impl Iterator<Item = PageId>) {
        let words = self.words.as_mut_slice();
        for page in pages {
            let (word, bit) = place(page);
            words[word] |= bit;
        }
    }

    #[cold]
    fn insert_behind(&mut self, word: usize, bit: u64) {
        self.words.resize((word + 1).next_power_of_two(), 0);
        self.words[word] |= bit;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
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

    /// Inserts all pages of another set.
    pub(super) fn insert_all(&mut self, others: &Self) {
        self.words.resize(self.words.len().max(others.words.len()), 0);
        self.words.iter_mut().zip(&others.words).for_each(|(bits, others)| *bits |= others);
    }

    /// Removes all pages of another set.
    pub(super) fn remove_all(&mut self, others: &Self) {
        self.words.iter_mut().zip(&others.words).for_each(|(bits, others)| *bits &= !others);
    }

    /// Calls `each` with every page that is in both sets, in the order of their numbers.
    #[inline]
    pub(super) fn for_each_in_both(&self, other: &Self, mut each: impl FnMut(PageId)) {
        for (word, (bits, others)) in (0..).zip(self.words.iter().zip(&other.words)) {
            let mut left = bits & others;
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
        set.for_each_in_both(set, |page| pages.push(page));
        pages
    }

    #[test]
    fn pages_are_found_and_listed_in_order() {
        let mut set: PageSet = [130, 3, 64, 63].into_iter().collect();
        assert_eq!(listed(&set), [3, 63, 64, 130]);
        assert!(set.contains(64) && !set.contains(65) && !set.contains(1000));
        assert!(set.remove(64) && !set.remove(64) && !set.remove(1000));
        assert_eq!(listed(&set), [3, 63, 130]);
        let mut both = Vec::new();
        set.for_each_in_both(&[63, 64, 1000].into_iter().collect(), |page| both.push(page));
        assert_eq!(both, [63]);
    }

    #[test]
    fn sets_of_different_sizes_are_joined_and_subtracted() {
        let set = |pages: &[PageId]| pages.iter().copied().collect::<PageSet>();
        let (small, large) = (set(&[1, 2]), set(&[2, 200]));
        let changed = |set: &PageSet, change: fn(&mut PageSet, &PageSet), others: &PageSet| {
            let mut set = set.clone();
            change(&mut set, others);
            listed(&set)
        };
        assert_eq!(changed(&small, PageSet::insert_all, &large), [1, 2, 200]);
        assert_eq!(changed(&large, PageSet::insert_all, &small), [1, 2, 200]);
        assert_eq!(changed(&small, PageSet::remove_all, &large), [1]);
        assert_eq!(changed(&large, PageSet::remove_all, &small), [200]);
    }
}
