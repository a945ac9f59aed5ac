//! The sending half.

use super::error::{Doing, WireError};
use super::frame::{FrameHeader, crc32c_slices};
use super::sock::{Closer, Limits, Socket, Wait, retry};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Slices handed to the kernel in one call, the header's included.
const BATCH: usize = 64;

/// Sends frames. One thread at a time (`&mut`); see [`SharedSend`](super::SharedSend).
#[derive(Debug)]
pub struct SendHalf {
    pub(super) socket: Arc<Socket>,
    limits: Limits,
    broken: bool,
}

impl SendHalf {
    pub(super) fn new(socket: Arc<Socket>, limits: Limits) -> Self {
        Self {
            socket,
            limits,
            broken: false,
        }
    }

    /// Sends one frame: header and up to 63 slices in one system call (more slices take more
    /// calls), resumed after short writes until `wait.deadline`.
    ///
    /// On any error the peer does not get this frame. If part of it had left, the connection is
    /// shut down and this half stays [`WireError::Broken`].
    pub fn send(
        &mut self,
        kind: u16,
        id: u64,
        payload: &[IoSlice<'_>],
        wait: Wait,
    ) -> Result<(), WireError> {
        self.send_flags(kind, 0, id, payload, wait)
    }

    /// [`send`](Self::send) with header flags.
    pub fn send_flags(
        &mut self,
        kind: u16,
        flags: u32,
        id: u64,
        payload: &[IoSlice<'_>],
        wait: Wait,
    ) -> Result<(), WireError> {
        let len: usize = payload.iter().map(|s| s.len()).sum();
        let max = self.limits.max_frame;
        if len > max as usize {
            return Err(WireError::PayloadTooLong { len, max });
        }
        let payload_crc = crc32c_slices(payload);
        let header = FrameHeader {
            kind,
            flags,
            len: len as u32,
            id,
            payload_crc,
        };
        self.send_raw(&header.encode(), payload, wait)
    }

    /// Sends a header exactly as given: for fault injection and hostile-peer tests.
    pub fn send_raw(
        &mut self,
        header: &[u8],
        payload: &[IoSlice<'_>],
        wait: Wait,
    ) -> Result<(), WireError> {
        if self.broken {
            return Err(WireError::Broken);
        }
        if self.socket.closed_here() {
            return Err(WireError::ClosedHere);
        }
        let mut written = false;
        let result = self.write_all(header, payload, wait, &mut written);
        match result {
            Ok(()) => Ok(()),
            Err(WireError::Timeout { doing, .. }) => {
                if written {
                    self.fail();
                }
                Err(WireError::Timeout {
                    doing,
                    partial: written,
                })
            }
            Err(e) => {
                self.fail();
                Err(if self.socket.closed_here() {
                    WireError::ClosedHere
                } else {
                    e
                })
            }
        }
    }

    fn fail(&mut self) {
        self.broken = true;
        // Half a frame may be out: without the shutdown the peer would wait for the other half.
        self.socket.shutdown();
    }

    fn write_all(
        &self,
        header: &[u8],
        payload: &[IoSlice<'_>],
        wait: Wait,
        written: &mut bool,
    ) -> Result<(), WireError> {
        let (first, mut rest) = payload.split_at(payload.len().min(BATCH - 1));
        let mut batch = [IoSlice::new(&[]); BATCH];
        batch[0] = IoSlice::new(header);
        batch[1..=first.len()].copy_from_slice(first);
        self.write_batch(&mut batch[..=first.len()], !rest.is_empty(), wait, written)?;
        while !rest.is_empty() {
            let (next, more) = rest.split_at(rest.len().min(BATCH));
            rest = more;
            batch[..next.len()].copy_from_slice(next);
            self.write_batch(&mut batch[..next.len()], !rest.is_empty(), wait, written)?;
        }
        Ok(())
    }

    fn write_batch(
        &self,
        mut batch: &mut [IoSlice<'_>],
        more: bool,
        wait: Wait,
        written: &mut bool,
    ) -> Result<(), WireError> {
        // NOSIGNAL: inside a host process that keeps SIGPIPE, a dead peer must stay an error.
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if more {
            flags |= SendFlags::MORE;
        }
        IoSlice::advance_slices(&mut batch, 0);
        while !batch.is_empty() {
            let sent = retry(&self.socket, Doing::Send, wait, || {
                sendmsg(
                    self.socket.fd.as_fd(),
                    batch,
                    &mut SendAncillaryBuffer::default(),
                    flags,
                )
            })?
            .map_err(|e| WireError::io("sendmsg", e))?;
            *written |= sent > 0;
            IoSlice::advance_slices(&mut batch, sent);
        }
        Ok(())
    }

    /// A handle that ends the connection from any thread.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.socket))
    }
}
