//! Memory that is kept from one search to the next, and written without being cleared first.

/// A list in memory that stays initialized when it gets shorter.
#[derive(Debug)]
pub(super) struct Scratch<T> {
    memory: Vec<T>,
    len: usize,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self { memory: Vec::new(), len: 0 }
    }
}

impl<T: Copy + Default> Scratch<T> {
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    pub(super) fn push(&mut self, item: T) {
        self.room(1)[0] = item;
        self.len += 1;
    }

    /// Memory for further items, which are added with [`grow`](Self::grow). What is in it means nothing.
    pub(super) fn room(&mut self, items: usize) -> &mut [T] {
        if self.memory.len() < self.len + items {
            self.memory.resize((self.len + items).next_power_of_two(), T::default());
        }
        &mut self.memory[self.len..self.len + items]
    }

    /// Adds the first `items` items of the [room](Self::room) to the list.
    pub(super) fn grow(&mut self, items: usize) {
        debug_assert!(self.len + items <= self.memory.len(), "there is room for them");
        self.len += items;
    }
}

impl<T> std::ops::Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.memory[..self.len]
    }
}
