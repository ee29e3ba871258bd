//! Shared memory as bytes that another process gets.
//!
//! For plain memory they are CUDA's 64, which every version of PyTorch accepts, also with its own allocator; those of
//! PyTorch's allocator, with two bytes in front, are accepted here. Pages have a form of their own, which PyTorch's
//! allocator takes for one of a later version, and refuses.

use warpool_driver::{IpcMemoryHandle, PhysicalId};

use crate::error::{Error, Result};

/// The newest version of PyTorch's handles that is known, and the kind that is CUDA's handle.
const TORCH_VERSION_MAX: u8 = 3;
const TORCH_KIND_PLAIN: u8 = b'c';
/// No version of PyTorch's, and the version of ours.
const PAGES: [u8; 2] = [0xFF, 1];
/// More pages than any device has.
const PAGES_MAX: usize = 1 << 20;

/// Memory that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Handle {
    Plain(IpcMemoryHandle),
    Pages(PageHandle),
}

/// Pages, side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageHandle {
    pub(super) server: ServerId,
    /// With their sizes.
    pub(super) pages: Vec<(PhysicalId, u64)>,
}

/// Names the server of a process: its process id, and a number that no other has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerId {
    pub(super) process: u32,
    pub(super) number: u128,
}

impl Handle {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Plain(handle) => handle.0.to_vec(),
            Self::Pages(PageHandle { server, pages }) => {
                let mut bytes = PAGES.to_vec();
                bytes.extend(server.process.to_le_bytes());
                bytes.extend(server.number.to_le_bytes());
                for (physical, size) in pages {
                    bytes.extend(physical.0.to_le_bytes());
                    bytes.extend(size.to_le_bytes());
                }
                bytes
            }
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let unknown = || Error::SharedHandle { length: bytes.len() };
        if let Some(rest) = bytes.strip_prefix(&PAGES)
            && bytes.len() != 64
        {
            return pages(rest).map(Self::Pages).ok_or_else(unknown);
        }
        let plain = match bytes {
            [version, TORCH_KIND_PLAIN, plain @ ..] if plain.len() == 64 && *version <= TORCH_VERSION_MAX => plain,
            plain => plain,
        };
        Ok(Self::Plain(IpcMemoryHandle(plain.try_into().map_err(|_| unknown())?)))
    }
}

fn pages(bytes: &[u8]) -> Option<PageHandle> {
    let (process, rest) = bytes.split_first_chunk()?;
    let (number, mut rest) = rest.split_first_chunk()?;
    let server = ServerId { process: u32::from_le_bytes(*process), number: u128::from_le_bytes(*number) };
    let mut pages = Vec::new();
    while !rest.is_empty() && pages.len() < PAGES_MAX {
        let (physical, after) = rest.split_first_chunk()?;
        let (size, after) = after.split_first_chunk()?;
        pages.push((PhysicalId(u64::from_le_bytes(*physical)), u64::from_le_bytes(*size)));
        rest = after;
    }
    (!pages.is_empty() && rest.is_empty()).then_some(PageHandle { server, pages })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_pytorch_and_of_cuda_are_accepted() {
        let plain = [7; 64];
        let expected = Handle::Plain(IpcMemoryHandle(plain));
        assert_eq!(Handle::from_bytes(&plain).unwrap(), expected);
        assert_eq!(Handle::from_bytes(&expected.to_bytes()).unwrap(), expected);
        for version in 1..=TORCH_VERSION_MAX {
            assert_eq!(Handle::from_bytes(&[&[version, b'c'], &plain[..]].concat()).unwrap(), expected);
        }
        let refused = [vec![], vec![7; 63], [&[9, b'c'], &plain[..]].concat(), [&[2, b'e'], &plain[..]].concat()];
        for bytes in refused {
            assert!(matches!(Handle::from_bytes(&bytes), Err(Error::SharedHandle { .. })), "{bytes:?}");
        }
    }

    #[test]
    fn handles_of_pages_are_read_as_they_were_written() {
        for count in [1, 2, 3, 100] {
            let pages: Vec<_> = (0..count).map(|number| (PhysicalId(number), 2 << 20)).collect();
            let server = ServerId { process: 77, number: u128::MAX - 5 };
            let handle = Handle::Pages(PageHandle { server, pages });
            let bytes = handle.to_bytes();
            assert_eq!(Handle::from_bytes(&bytes).unwrap(), handle);
            for length in [0, 1, 2, 21, 22, 23, bytes.len() - 1] {
                assert!(Handle::from_bytes(&bytes[..length]).is_err() || length == 64, "{length} of {}", bytes.len());
            }
        }
    }
}
