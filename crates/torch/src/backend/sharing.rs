//! Blocks shared with other processes. A block is exported as the handle of its segment and an offset; what another
//! process exported is opened once, however often it is received, and closed when its last user goes.
//!
//! A handle is CUDA's 64 bytes, which every version of PyTorch accepts, also with its own allocator. Those of PyTorch's
//! allocator, with two bytes in front, are accepted here.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use warpool_driver::{DeviceId, DevicePtr, Driver, ErrorCode, IpcMemoryHandle};

use crate::error::{Error, Result};

/// The newest version of PyTorch's handles that is known, and the kind that is CUDA's handle.
const TORCH_VERSION_MAX: u8 = 3;
const TORCH_KIND_PLAIN: u8 = b'c';

/// What this process has received from others.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    opened: Mutex<BTreeMap<(DeviceId, IpcMemoryHandle), Opened>>,
}

#[derive(Debug)]
struct Opened {
    ptr: DevicePtr,
    users: usize,
}

impl Sharing {
    /// The handle of the allocation that starts at `base`.
    pub(crate) fn export(driver: &dyn Driver, base: DevicePtr) -> Result<IpcMemoryHandle> {
        match driver.mem_export(base) {
            Err(error) if error.code == ErrorCode::InvalidValue => Err(Error::NotShareable),
            exported => Ok(exported?),
        }
    }

    /// Opens memory of another process, or adds a user. The lock is held during the driver call: a handle must not be
    /// opened twice.
    pub(crate) fn open(&self, driver: &dyn Driver, device: DeviceId, handle: &[u8]) -> Result<DevicePtr> {
        let handle = parse(handle)?;
        let mut opened = self.lock();
        if let Some(known) = opened.get_mut(&(device, handle)) {
            known.users += 1;
            return Ok(known.ptr);
        }
        let ptr = driver.mem_import(device, &handle)?;
        opened.insert((device, handle), Opened { ptr, users: 1 });
        Ok(ptr)
    }

    /// A user is gone.
    pub(crate) fn close(&self, driver: &dyn Driver, ptr: DevicePtr) -> Result<()> {
        let mut opened = self.lock();
        let found = opened.iter_mut().find(|(_, opened)| opened.ptr == ptr);
        let (&key, entry) = found.ok_or(warpool::Error::UnknownPointer { ptr })?;
        entry.users -= 1;
        if entry.users == 0 {
            opened.remove(&key);
            driver.mem_close(key.0, ptr)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(DeviceId, IpcMemoryHandle), Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(handle: &[u8]) -> Result<IpcMemoryHandle> {
    let plain = match handle {
        [version, TORCH_KIND_PLAIN, plain @ ..] if plain.len() == 64 && *version <= TORCH_VERSION_MAX => plain,
        plain => plain,
    };
    let plain = plain.try_into().map_err(|_| Error::SharedHandle { length: handle.len() })?;
    Ok(IpcMemoryHandle(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_pytorch_and_of_cuda_are_accepted() {
        let plain = [7; 64];
        assert_eq!(parse(&plain).unwrap().0, plain);
        for version in 1..=TORCH_VERSION_MAX {
            assert_eq!(parse(&[&[version, b'c'], &plain[..]].concat()).unwrap().0, plain);
        }
        let refused = [vec![], vec![7; 63], [&[9, b'c'], &plain[..]].concat(), [&[2, b'e'], &plain[..]].concat()];
        for bytes in refused {
            assert!(matches!(parse(&bytes), Err(Error::SharedHandle { .. })), "{bytes:?}");
        }
    }
}
