//! A file without a name, whose descriptor stands for what the simulated GPU exports. Only on Unix.

pub(crate) use target::{contents, descriptor_of};

#[cfg(unix)]
mod target {
    use std::fs::File;
    use std::io::{self, Write as _};
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::os::unix::fs::FileExt as _;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// An unlinked file with this content, so that its descriptor can be duplicated and sent.
    pub(crate) fn descriptor_of(content: &[u8]) -> io::Result<OwnedFd> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let file_name = format!("warpool-sim-{}-{}", std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(file_name);
        let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
        std::fs::remove_file(&path)?;
        file.write_all(content)?;
        Ok(file.into())
    }

    /// The first bytes of the file; `None` if it cannot be read or is shorter.
    pub(crate) fn contents<const N: usize>(descriptor: &OwnedFd) -> Option<[u8; N]> {
        let file = File::from(descriptor.as_fd().try_clone_to_owned().ok()?);
        let mut content = [0; N];
        file.read_exact_at(&mut content, 0).ok()?;
        Some(content)
    }
}

#[cfg(not(unix))]
mod target {
    use std::io;

    use crate::platform::OwnedFd;

    pub(crate) fn descriptor_of(_content: &[u8]) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn contents<const N: usize>(descriptor: &OwnedFd) -> Option<[u8; N]> {
        match *descriptor {}
    }
}
