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

    fn set(pages: &[PageId]) -> PageSet {
        pages.iter().copied().collect()
    }

    fn listed(set: &PageSet) -> Vec<PageId> {
        (0..1000).filter(|&page| set.contains(page)).collect()
    }

    #[test]
    fn pages_are_inserted_and_removed() {
        let mut pages = set(&[130, 3, 64, 63]);
        assert_eq!(listed(&pages), [3, 63, 64, 130]);
        assert!(pages.remove(64) && !pages.remove(64) && !pages.remove(1000));
        assert_eq!(listed(&pages), [3, 63, 130]);
    }

    #[test]
    fn sets_of_different_sizes_are_joined_and_subtracted() {
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
