use crate::sync::primitives::{AtomicU64, Ordering};
use crate::sync::sequence::{ReadError, Sequenced};

#[test]
fn what_was_not_written_here_is_damaged() {
    let words: [AtomicU64; 5] = Default::default();
    let (sequenced, mut values) = (Sequenced::new(&words), [0; 3]);
    assert_eq!(sequenced.read(&mut values), Err(ReadError::NeverWritten));
    sequenced.write(&[1, 2, 3]);
    assert_eq!((sequenced.read(&mut values), values), (Ok(()), [1, 2, 3]));
    for word in [1, 2, 4] {
        words[word].fetch_xor(1 << 40, Ordering::Relaxed);
        assert_eq!(sequenced.read(&mut values), Err(ReadError::Damaged));
        words[word].fetch_xor(1 << 40, Ordering::Relaxed);
    }
    words[0].store(7, Ordering::Relaxed);
    assert_eq!(sequenced.read(&mut values), Err(ReadError::Busy), "its writer ended, or was stopped, in the middle");
    sequenced.write(&[4, 5, 6]);
    assert_eq!((sequenced.read(&mut values), values), (Ok(()), [4, 5, 6]));
}
