//! Reading and writing host memory that a device may access at the same time.
//!
//! The accesses are volatile, so a device that writes meanwhile makes single bytes old or new, and nothing else. No
//! reference to the memory is made.

const WORD: usize = size_of::<u64>();

/// Copies host memory into a buffer.
///
/// # Safety
/// `into.len()` bytes at `from` are readable, and no other thread of this process writes them meanwhile.
pub(crate) unsafe fn read(from: *const u8, into: &mut [u8]) {
    let (head, words) = split(from.addr(), into.len());
    for (index, byte) in into[..head].iter_mut().enumerate() {
        // SAFETY: in the range that the caller promises.
        *byte = unsafe { from.wrapping_add(index).read_volatile() };
    }
    let first_word = from.wrapping_add(head).cast::<u64>();
    let (in_words, tail) = into[head..].split_at_mut(words * WORD);
    for (index, word) in in_words.as_chunks_mut::<WORD>().0.iter_mut().enumerate() {
        // SAFETY: in the range that the caller promises, and aligned.
        *word = unsafe { first_word.wrapping_add(index).read_volatile() }.to_ne_bytes();
    }
    for (index, byte) in tail.iter_mut().enumerate() {
        // SAFETY: in the range that the caller promises.
        *byte = unsafe { from.wrapping_add(head + words * WORD + index).read_volatile() };
    }
}

/// Copies a buffer into host memory.
///
/// # Safety
/// `bytes.len()` bytes at `to` are writable, and no other thread of this process reads or writes them meanwhile.
pub(crate) unsafe fn write(to: *mut u8, bytes: &[u8]) {
    let (head, words) = split(to.addr(), bytes.len());
    for (index, &byte) in bytes[..head].iter().enumerate() {
        // SAFETY: in the range that the caller promises.
        unsafe { to.wrapping_add(index).write_volatile(byte) };
    }
    let first_word = to.wrapping_add(head).cast::<u64>();
    let (in_words, tail) = bytes[head..].split_at(words * WORD);
    for (index, &word) in in_words.as_chunks::<WORD>().0.iter().enumerate() {
        // SAFETY: in the range that the caller promises, and aligned.
        unsafe { first_word.wrapping_add(index).write_volatile(u64::from_ne_bytes(word)) };
    }
    for (index, &byte) in tail.iter().enumerate() {
        // SAFETY: in the range that the caller promises.
        unsafe { to.wrapping_add(head + words * WORD + index).write_volatile(byte) };
    }
}

/// How many bytes come before the first aligned word, and how many whole words follow.
fn split(address: usize, bytes: usize) -> (usize, usize) {
    let head = (address.next_multiple_of(WORD) - address).min(bytes);
    (head, (bytes - head) / WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_offsets_and_lengths_are_copied_exactly() {
        let mut memory: Vec<u8> = (0..64).collect();
        let start = memory.as_mut_ptr();
        for offset in 0..17 {
            for bytes in 0..33 {
                let mut copy = vec![0xff; bytes];
                // SAFETY: inside the vector, which nothing else uses.
                unsafe { read(start.wrapping_add(offset), &mut copy) };
                assert!(copy.iter().enumerate().all(|(index, &byte)| byte == (offset + index) as u8));
                let inverted: Vec<u8> = copy.iter().map(|byte| !byte).collect();
                // SAFETY: as above.
                unsafe { write(start.wrapping_add(offset), &inverted) };
                let mut all = vec![0; 64];
                // SAFETY: as above.
                unsafe { read(start, &mut all) };
                let expected = |index: usize| {
                    let byte = index as u8;
                    if (offset..offset + bytes).contains(&index) { !byte } else { byte }
                };
                assert!(all.iter().enumerate().all(|(index, &byte)| byte == expected(index)), "{offset} {bytes}");
                // SAFETY: as above.
                unsafe { write(start.wrapping_add(offset), &copy) };
            }
        }
    }
}
