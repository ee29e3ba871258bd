//! File descriptors, as which drivers share memory on Unix. Elsewhere there are none: the type has no value.

pub use target::{OwnedFd, from_number, into_stdio, number, of_file, of_stdin};
pub(crate) use target::{contents, descriptor_of};

#[cfg(unix)]
mod target {
    use std::fs::File;
    use std::io::{self, Write as _};
    use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _};
    use std::os::unix::fs::FileExt as _;
    use std::process::Stdio;
    use std::sync::atomic::{AtomicU64, Ordering};

    pub use std::os::fd::OwnedFd;

    /// The descriptor of an open file.
    pub fn of_file(file: File) -> io::Result<OwnedFd> {
        Ok(file.into())
    }

    /// A duplicate of this process's standard input.
    pub fn of_stdin() -> io::Result<OwnedFd> {
        io::stdin().as_fd().try_clone_to_owned()
    }

    /// The standard input or output of a process to be started.
    pub fn into_stdio(descriptor: OwnedFd) -> Stdio {
        descriptor.into()
    }

    /// Its number, valid while it is open.
    pub fn number(descriptor: &OwnedFd) -> i32 {
        descriptor.as_raw_fd()
    }

    /// The descriptor with that number.
    ///
    /// # Safety
    /// The number is that of an open descriptor, which nothing else owns.
    pub unsafe fn from_number(number: i32) -> io::Result<OwnedFd> {
        // SAFETY: the caller promises it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

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
    use std::fs::File;
    use std::io;
    use std::process::Stdio;

    /// A file descriptor: this target has none.
    #[derive(Debug)]
    pub enum OwnedFd {}

    pub fn of_file(_file: File) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn of_stdin() -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn into_stdio(descriptor: OwnedFd) -> Stdio {
        match descriptor {}
    }

    pub fn number(descriptor: &OwnedFd) -> i32 {
        match *descriptor {}
    }

    /// # Safety
    /// It is always safe.
    pub unsafe fn from_number(_number: i32) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn descriptor_of(_content: &[u8]) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn contents<const N: usize>(descriptor: &OwnedFd) -> Option<[u8; N]> {
        match *descriptor {}
    }
}
