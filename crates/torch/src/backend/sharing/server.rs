//! Pages as file descriptors for other processes. A process that shares pages has a thread that listens on a socket and
//! sends the descriptor of a page by its number. So descriptors are open only briefly, however many pages are shared,
//! and do not keep unused pages alive. The other process needs no ptrace permission for this one, which it would need
//! to take descriptors itself.
//!
//! Only processes of the same user are answered.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use warpool_driver::{Driver, DriverError, ErrorCode, PhysicalId, ShareKind, SharedMemory};

use super::handle::ServerId;
use crate::error::{Error, Result};

/// The timeout of either side.
const TIMEOUT: Duration = Duration::from_secs(20);

const SENT: u8 = 0;
const REFUSED: u8 = 1;

/// The thread of this process.
#[derive(Debug)]
pub(super) struct PageServer {
    id: ServerId,
}

impl PageServer {
    pub(super) fn start(driver: Arc<dyn Driver>) -> io::Result<Self> {
        let half = || u128::from(RandomState::new().build_hasher().finish());
        let id = ServerId { process: std::process::id(), number: half() << 64 | half() };
        let listener = UnixListener::bind_addr(&address(id)?)?;
        thread::Builder::new().name("warpool-share".to_owned()).spawn(move || serve(&listener, &*driver))?;
        Ok(Self { id })
    }

    pub(super) fn id(&self) -> ServerId {
        self.id
    }

    /// A page as a descriptor.
    pub(super) fn export(driver: &dyn Driver, physical: PhysicalId) -> Result<OwnedFd> {
        match driver.vm_export(physical, ShareKind::PosixFd) {
            Ok(SharedMemory::PosixFd(descriptor)) => Ok(descriptor),
            Ok(SharedMemory::Fabric(_)) => Err(Error::NotShareable),
            Err(DriverError { code: ErrorCode::InvalidValue, .. }) => Err(Error::NotShareable),
            Err(error) => Err(error.into()),
        }
    }
}

fn address(id: ServerId) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("warpool-{}-{:032x}", id.process, id.number))
}

fn serve(listener: &UnixListener, driver: &dyn Driver) {
    for stream in listener.incoming() {
        // A refused client finds the connection closed.
        if let Ok(stream) = stream
            && socket_peercred(&stream).is_ok_and(|peer| peer.uid == rustix::process::getuid())
        {
            let _ = answer(stream, driver);
        }
    }
}

/// Answers requests until the other side closes the connection.
fn answer(mut stream: UnixStream, driver: &dyn Driver) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut number = [0; 8];
    loop {
        stream.read_exact(&mut number)?;
        match PageServer::export(driver, PhysicalId(u64::from_le_bytes(number))) {
            Ok(descriptor) => send(&stream, &descriptor)?,
            Err(_) => stream.write_all(&[REFUSED])?,
        }
    }
}

fn send(stream: &UnixStream, descriptor: &OwnedFd) -> io::Result<()> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    sendmsg(stream, &[IoSlice::new(&[SENT])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A connection to another process's server.
pub(super) struct PageClient {
    stream: UnixStream,
    process: u32,
}

impl PageClient {
    pub(super) fn connect(id: ServerId) -> Result<Self> {
        let connect = || {
            let stream = UnixStream::connect_addr(&address(id)?)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_write_timeout(Some(TIMEOUT))?;
            io::Result::Ok(stream)
        };
        let stream = connect().map_err(|source| Error::SharedProcess { process: id.process, source })?;
        Ok(Self { stream, process: id.process })
    }

    /// A page of that process.
    pub(super) fn page(&mut self, physical: PhysicalId) -> Result<OwnedFd> {
        let received = self.stream.write_all(&physical.0.to_le_bytes()).and_then(|()| self.receive());
        let received = received.map_err(|source| Error::SharedProcess { process: self.process, source })?;
        received.ok_or(Error::SharedMemoryGone { process: self.process })
    }

    fn receive(&mut self) -> io::Result<Option<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut status = [REFUSED];
        let mut buffers = [IoSliceMut::new(&mut status)];
        let message = recvmsg(&self.stream, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if message.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other("a file descriptor was lost: too many are open"));
        }
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        Ok(descriptor.filter(|_| status == [SENT]))
    }
}
