//! The `tcp` path against peers that break its rules, speaking the real protocol by script.

mod initiators;
mod owners;

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moonlivekv::mem::{BlockPool, Region, RemoteRegion};
use moonlivekv::transport::frame::{HEADER_LEN, Header, Kind, crc32c};
use moonlivekv::transport::{Completion, Link, Local, Span, Transfer, TransferId};

const FRAME: Duration = Duration::from_millis(300);
const BLOCK: u64 = 1 << 20;

fn in_10s() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn pool(byte: u8) -> Arc<BlockPool> {
    let mut region = Region::anonymous(4 * BLOCK).unwrap();
    region.as_mut_slice().fill(byte);
    let p = BlockPool::contiguous(region, BLOCK).unwrap();
    p.alloc(4).unwrap();
    p
}

fn submit_get(
    link: &mut dyn Link,
    near: &Arc<BlockPool>,
    block: u32,
    remote: RemoteRegion,
    len: u64,
) -> TransferId {
    let local = Local::GetInto(near.write(&[block]).unwrap());
    let off = u64::from(block) * BLOCK;
    let spans = vec![Span {
        remote_off: off,
        local_off: off,
        len,
    }];
    link.submit(Transfer {
        local,
        remote,
        spans,
        deadline: in_10s(),
    })
    .unwrap()
}

fn submit_put(
    link: &mut dyn Link,
    near: &Arc<BlockPool>,
    remote: RemoteRegion,
    len: u64,
) -> TransferId {
    let local = Local::PutFrom(near.read(&[0]).unwrap());
    let spans = vec![Span {
        remote_off: 0,
        local_off: 0,
        len,
    }];
    link.submit(Transfer {
        local,
        remote,
        spans,
        deadline: in_10s(),
    })
    .unwrap()
}

fn complete(link: &mut dyn Link) -> Completion {
    let mut out = [Completion::empty()];
    assert_eq!(
        link.wait(&mut out, Instant::now() + Duration::from_secs(20)),
        1,
        "nothing completed"
    );
    let [c] = out;
    c
}

fn header(s: &mut TcpStream) -> Header {
    let mut b = [0; HEADER_LEN];
    s.read_exact(&mut b).expect("an answer");
    Header::decode(&b).expect("a good header")
}

/// The peer closed the connection, in good time.
fn closed(s: &mut TcpStream) {
    let t0 = Instant::now();
    let mut rest = Vec::new();
    match s.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
    }
    assert!(
        t0.elapsed() < FRAME * 6,
        "it was let sit for {:?}",
        t0.elapsed()
    );
}

fn data(op: u64, epoch: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let mut h = Header::new(Kind::Data, op);
    (h.epoch, h.offset, h.len, h.payload_crc) = (epoch, offset, bytes.len() as u32, crc32c(bytes));
    [h.encode().as_slice(), bytes].concat()
}
