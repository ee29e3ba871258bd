//! Shared memory as bytes that another process gets.
//!
//! For plain memory they are CUDA's 64 bytes, which every version of PyTorch accepts, even with its own allocator. The
//! handles of PyTorch's allocator, with two bytes in front, are accepted here too. Pages have a form of their own.
//! Where possible it is preceded by the form of PyTorch's allocator for expandable segments, which ignores what
//! follows.

use warpool_driver::{IpcMemoryHandle, PhysicalId};

use crate::error::{Error, Result};

/// The newest version of PyTorch's handles that is known, and the kinds: CUDA's handle, descriptors of mapped memory.
const TORCH_VERSION_MAX: u8 = 3;
const TORCH_KIND_PLAIN: u8 = b'c';
const TORCH_KIND_MAPPED: u8 = b'e';
/// Since this version the descriptors are preceded by their type: file descriptors.
const TORCH_VERSION_WITH_TYPE: u8 = 3;
const TORCH_TYPES_OF_FILES: [u64; 2] = [1, 0];
/// A number that is no version of PyTorch's handles, and the version of ours.
const PAGES: [u8; 2] = [0xFF, 1];
/// More pages than any device has.
const PAGES_MAX: u64 = 1 << 20;

/// Memory that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Handle {
    Plain(IpcMemoryHandle),
    Pages(PageHandle),
    /// Memory of PyTorch's own allocator.
    Descriptors(DescriptorHandle),
}

/// Pages, side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageHandle {
    pub(super) server: ServerId,
    /// With their sizes.
    pub(super) pages: Vec<(PhysicalId, u64)>,
    /// The same for processes with PyTorch's own allocator.
    pub(super) torch: Option<DescriptorHandle>,
}

/// Names the server of a process: its process id, and a number that no other has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerId {
    pub(super) process: u32,
    pub(super) number: u128,
}

/// Parts of one size, side by side, as descriptors that are open in a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DescriptorHandle {
    /// PyTorch's version of the form.
    pub(super) version: u8,
    pub(super) process: u32,
    pub(super) part_bytes: u64,
    pub(super) descriptors: Vec<i32>,
}

impl Handle {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Plain(handle) => handle.0.to_vec(),
            Self::Pages(PageHandle { server, pages, torch }) => {
                let mut bytes = torch.as_ref().map(DescriptorHandle::to_bytes).unwrap_or_default();
                bytes.extend(PAGES);
                bytes.extend(server.process.to_le_bytes());
                bytes.extend(server.number.to_le_bytes());
                for (physical, size) in pages {
                    bytes.extend(physical.0.to_le_bytes());
                    bytes.extend(size.to_le_bytes());
                }
                bytes
            }
            Self::Descriptors(handle) => handle.to_bytes(),
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let unknown = || Error::SharedHandle { length: bytes.len() };
        if let Ok(plain) = bytes.try_into() {
            return Ok(Self::Plain(IpcMemoryHandle(plain)));
        }
        match bytes {
            [version, TORCH_KIND_PLAIN, plain @ ..] if *version <= TORCH_VERSION_MAX => {
                Ok(Self::Plain(IpcMemoryHandle(plain.try_into().map_err(|_| unknown())?)))
            }
            [version, TORCH_KIND_MAPPED, rest @ ..] if *version <= TORCH_VERSION_MAX => {
                let (torch, rest) = DescriptorHandle::read(*version, rest).ok_or_else(unknown)?;
                if rest.is_empty() {
                    return Ok(Self::Descriptors(torch));
                }
                pages(rest, Some(torch)).map(Self::Pages).ok_or_else(unknown)
            }
            _ => pages(bytes, None).map(Self::Pages).ok_or_else(unknown),
        }
    }
}

impl DescriptorHandle {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.version, TORCH_KIND_MAPPED];
        // PyTorch writes a structure of C: the process id, padding, two sizes, and the type, padded.
        bytes.extend(u64::from(self.process).to_le_bytes());
        bytes.extend(self.part_bytes.to_le_bytes());
        bytes.extend((self.descriptors.len() as u64).to_le_bytes());
        if self.version >= TORCH_VERSION_WITH_TYPE {
            bytes.extend(TORCH_TYPES_OF_FILES[0].to_le_bytes());
        }
        bytes.extend(self.descriptors.iter().flat_map(|descriptor| descriptor.to_le_bytes()));
        bytes
    }

    /// Reads one, and what follows it.
    fn read(version: u8, bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (process, bytes) = number(bytes)?;
        let (part_bytes, bytes) = number(bytes)?;
        let (count, mut bytes) = number(bytes)?;
        if version >= TORCH_VERSION_WITH_TYPE {
            let (kind, rest) = number(bytes)?;
            // A fabric handle is no descriptor. In its upper half is padding.
            if !TORCH_TYPES_OF_FILES.contains(&(kind & u64::from(u32::MAX))) {
                return None;
            }
            bytes = rest;
        }
        if part_bytes == 0 || count == 0 || count > PAGES_MAX {
            return None;
        }
        let mut descriptors = Vec::new();
        for _ in 0..count {
            let (descriptor, rest) = bytes.split_first_chunk()?;
            descriptors.push(i32::from_le_bytes(*descriptor));
            bytes = rest;
        }
        // The process id is followed by padding.
        let process = u32::try_from(process & u64::from(u32::MAX)).ok()?;
        Some((Self { version, process, part_bytes, descriptors }, bytes))
    }
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

fn pages(bytes: &[u8], torch: Option<DescriptorHandle>) -> Option<PageHandle> {
    let (process, rest) = bytes.strip_prefix(&PAGES)?.split_first_chunk()?;
    let (server, mut rest) = rest.split_first_chunk()?;
    let server = ServerId { process: u32::from_le_bytes(*process), number: u128::from_le_bytes(*server) };
    let mut pages = Vec::new();
    while !rest.is_empty() && (pages.len() as u64) < PAGES_MAX {
        let (physical, after) = number(rest)?;
        let (size, after) = number(after)?;
        pages.push((PhysicalId(physical), size));
        rest = after;
    }
    (!pages.is_empty() && rest.is_empty()).then_some(PageHandle { server, pages, torch })
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

    /// As PyTorch writes it: `struct { int pid; size_t segment_size; size_t num_handles; }`, since version 3 followed
    /// by `int handle_type`, then the descriptors.
    fn written_by_torch(version: u8, kind: Option<i32>, descriptors: &[i32]) -> Vec<u8> {
        let mut bytes = vec![version, b'e'];
        bytes.extend(4321_i32.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend((20_u64 << 20).to_le_bytes());
        bytes.extend((descriptors.len() as u64).to_le_bytes());
        if let Some(kind) = kind {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes.extend(descriptors.iter().flat_map(|descriptor| descriptor.to_le_bytes()));
        bytes
    }

    #[test]
    fn expandable_segments_of_pytorch_are_accepted() {
        for (version, kind) in [(1, None), (2, None), (3, Some(1))] {
            for descriptors in [vec![9], vec![9, 12, 10]] {
                let bytes = written_by_torch(version, kind, &descriptors);
                let handle = DescriptorHandle { version, process: 4321, part_bytes: 20 << 20, descriptors };
                assert_eq!(Handle::from_bytes(&bytes).unwrap(), Handle::Descriptors(handle.clone()));
                assert_eq!(handle.to_bytes(), bytes);
                for length in (0..bytes.len()).filter(|&length| length != 64) {
                    assert!(Handle::from_bytes(&bytes[..length]).is_err(), "{length} of {}", bytes.len());
                }
            }
        }
        let refused =
            [written_by_torch(3, Some(2), &[9]), written_by_torch(2, None, &[]), written_by_torch(4, None, &[9])];
        for bytes in refused {
            assert!(Handle::from_bytes(&bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn handles_of_pages_are_read_as_they_were_written() {
        for count in [1, 2, 3, 100] {
            let pages: Vec<_> = (0..count).map(|number| (PhysicalId(number), 2 << 20)).collect();
            let server = ServerId { process: 77, number: u128::MAX - 5 };
            let with_version = |version| DescriptorHandle {
                version,
                process: 77,
                part_bytes: 2 << 20,
                descriptors: (0..i32::try_from(count).unwrap()).collect(),
            };
            for torch in [None, Some(with_version(2)), Some(with_version(3))] {
                let handle = Handle::Pages(PageHandle { server, pages: pages.clone(), torch: torch.clone() });
                let bytes = handle.to_bytes();
                assert_ne!(bytes.len(), 64, "CUDA's own handle has that length");
                assert_eq!(Handle::from_bytes(&bytes).unwrap(), handle);
                // PyTorch reads its own form, and nothing after it.
                if let Some(torch) = torch {
                    assert!(bytes.starts_with(&torch.to_bytes()));
                }
                for length in [0, 1, 2, 21, 22, 23, bytes.len() - 1] {
                    assert!(Handle::from_bytes(&bytes[..length]).is_err() || length == 64, "{length}");
                }
            }
        }
    }
}
