//! File descriptors, as which drivers share memory on Unix. Elsewhere there are none: the type has no value.

pub use target::{OwnedFd, from_number, into_stdio, number, of_file, of_stdin};

#[cfg(unix)]
mod target {
    use std::fs::File;
    use std::io;
    use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _};
    use std::process::Stdio;

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
}
