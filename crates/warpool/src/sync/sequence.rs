//! Words that one thread at a time writes and any number read, also in other processes: without a lock, which a reader
//! could keep and a writer take to its death. A sequence number is odd while they are written, so that a reader knows
//! that it has to read again; a check sum tells a damaged file from words that were written.
//!
//! Layout: the sequence number, the sum, the values. A number of 0 means that nothing was written yet.

use super::primitives::{AtomicU64, Ordering, fence, sleep_us, spin_loop};

/// The words beside the values.
pub(crate) const OVERHEAD: usize = 2;

/// A reader gives up after this many attempts: a writer may be stopped in the middle.
const ATTEMPTS: u32 = 200;
const ATTEMPTS_AWAKE: u32 = 20;

/// Why no values were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadError {
    NeverWritten,
    /// They were being written at every attempt.
    Busy,
    /// The sum is wrong: something else wrote there.
    Damaged,
}

/// Words in that layout.
pub(crate) struct Sequenced<'a> {
    sequence: &'a AtomicU64,
    sum: &'a AtomicU64,
    values: &'a [AtomicU64],
}

impl<'a> Sequenced<'a> {
    /// Of at least [`OVERHEAD`] words.
    pub(crate) fn new(words: &'a [AtomicU64]) -> Self {
        Self { sequence: &words[0], sum: &words[1], values: &words[OVERHEAD..] }
    }

    /// Writes all values; one thread at a time.
    pub(crate) fn write(&self, values: &[u64]) {
        assert_eq!(values.len(), self.values.len(), "all values");
        let odd = self.sequence.load(Ordering::Relaxed) | 1;
        self.sequence.store(odd, Ordering::Relaxed);
        // Who sees a value of below sees the odd number, too.
        fence(Ordering::Release);
        self.sum.store(sum(values), Ordering::Relaxed);
        for (word, &value) in self.values.iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
        self.sequence.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// Reads all values, as they were between two writes.
    pub(crate) fn read(&self, values: &mut [u64]) -> Result<(), ReadError> {
        for attempt in 0..ATTEMPTS {
            let before = self.sequence.load(Ordering::Acquire);
            if before == 0 {
                return Err(ReadError::NeverWritten);
            }
            if before.is_multiple_of(2) {
                let expected = self.sum.load(Ordering::Relaxed);
                for (value, word) in values.iter_mut().zip(self.values) {
                    *value = word.load(Ordering::Relaxed);
                }
                // Pairs with the fence of the writer.
                fence(Ordering::Acquire);
                if self.sequence.load(Ordering::Relaxed) == before {
                    return if sum(values) == expected { Ok(()) } else { Err(ReadError::Damaged) };
                }
            }
            if attempt < ATTEMPTS_AWAKE { spin_loop() } else { sleep_us(50) }
        }
        Err(ReadError::Busy)
    }
}

/// Not 0 for values that are all 0, as in a file that was cleared.
fn sum(values: &[u64]) -> u64 {
    // An odd number with its bits spread: the fractional part of the golden ratio.
    values
        .iter()
        .fold(values.len() as u64 + 1, |sum, &value| (sum ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}
