//! An owner of ours against scripted initiators.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moonlivekv::id::ErrorKind;
use moonlivekv::mem::{BlockPool, RemoteRegion};
use moonlivekv::transport::frame::{Header, Kind, VERSION, crc32c, encode_span};
use moonlivekv::transport::{
    Access, PIECE_MAX, Refusal, Revoked, Scope, TcpOptions, TcpTransport, Transport,
};

use super::*;

/// An owner with one pool to read and one to write, both filled with a byte.
struct Owner {
    transport: TcpTransport,
    source: Arc<BlockPool>,
    staging: Arc<BlockPool>,
    read: RemoteRegion,
    write: RemoteRegion,
}

impl Owner {
    fn new(options: TcpOptions) -> Self {
        let transport = TcpTransport::bind(TcpOptions {
            frame_deadline: FRAME,
            ..options
        })
        .unwrap();
        let (source, staging) = (pool(1), pool(2));
        let read = transport
            .register(&source, Access::RemoteRead, Scope::Pool)
            .unwrap();
        let write = transport
            .register(&staging, Access::RemoteWrite, Scope::Pool)
            .unwrap();
        Self {
            transport,
            source,
            staging,
            read,
            write,
        }
    }

    /// A peer that has said hello.
    fn peer(&self) -> TcpStream {
        let mut s = self.stranger();
        s.write_all(
            &Header {
                offset: VERSION,
                ..Header::new(Kind::Hello, 0)
            }
            .encode(),
        )
        .unwrap();
        assert_eq!(header(&mut s).kind, Kind::Welcome);
        s
    }

    fn stranger(&self) -> TcpStream {
        let s = TcpStream::connect(self.transport.addr()).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        s
    }

    /// A well-behaved link still gets what it asks for, and no lease is left behind.
    fn goes_on(&self) {
        let near = pool(0);
        let mut link = self
            .transport
            .connect(&self.transport.endpoint(), in_10s())
            .unwrap();
        submit_get(link.as_mut(), &near, 0, self.read, BLOCK);
        assert_eq!(complete(link.as_mut()).outcome, Ok(()));
        let until = in_10s();
        for p in [&self.source, &self.staging] {
            while p.stats().read_leases + p.stats().write_leases > 0 {
                assert!(Instant::now() < until, "a lease was left behind");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn request(kind: Kind, op: u64, region: RemoteRegion, spans: &[(u64, u32)]) -> Vec<u8> {
    let mut list = Vec::new();
    spans
        .iter()
        .for_each(|&(o, l)| encode_span(o, l, &mut list));
    let mut h = Header::new(kind, op);
    (h.key, h.epoch, h.count) = (region.key, region.epoch, spans.len() as u16);
    (h.len, h.payload_crc) = (list.len() as u32, crc32c(&list));
    [h.encode().as_slice(), &list].concat()
}

fn refusal(s: &mut TcpStream, op: u64) -> Option<Refusal> {
    let h = header(s);
    assert_eq!((h.kind, h.op), (Kind::Refused, op));
    Refusal::from_code(h.code)
}

#[test]
fn garbage_instead_of_a_header_closes_that_connection_only() {
    let o = Owner::new(TcpOptions::default());
    for first in [
        vec![0u8; 64],
        b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nUser-Agent: curl 8.0.0.0.0.0\r\n\r\n"
            .to_vec(),
    ] {
        let mut s = o.stranger();
        s.write_all(&first).unwrap();
        closed(&mut s);
    }
    let mut s = o.peer();
    let mut get = request(Kind::Get, 1, o.read, &[(0, 100)]);
    get[20] ^= 1;
    s.write_all(&get).unwrap();
    closed(&mut s);
    for kind in [Kind::Welcome, Kind::Done, Kind::Map, Kind::Hello] {
        let mut s = o.peer();
        s.write_all(&Header::new(kind, 1).encode()).unwrap();
        closed(&mut s);
    }
    o.goes_on();
}

#[test]
fn half_frames_and_dripping_peers_are_cut_off_at_the_deadline() {
    let o = Owner::new(TcpOptions::default());
    // Says nothing; half a header; a header without its list.
    let mut silent = o.stranger();
    let mut half = o.peer();
    half.write_all(&request(Kind::Get, 1, o.read, &[(0, 1)])[..30])
        .unwrap();
    let mut listless = o.peer();
    listless
        .write_all(&request(Kind::Get, 1, o.read, &[(0, 1)])[..70])
        .unwrap();
    for s in [&mut silent, &mut half, &mut listless] {
        closed(s);
    }
    // One byte at a time buys no more time.
    let mut drip = o.peer();
    let t0 = Instant::now();
    for b in request(Kind::Get, 1, o.read, &[(0, 1); 30]) {
        if drip.write_all(&[b]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(t0.elapsed() < FRAME * 6, "a dripping peer was let go on");
    }
    closed(&mut drip);
    // An idle peer between frames is welcome.
    let mut idle = o.peer();
    std::thread::sleep(FRAME * 2);
    idle.write_all(&request(Kind::Get, 9, o.read, &[(0, 3)]))
        .unwrap();
    let h = header(&mut idle);
    assert_eq!((h.kind, h.op, h.len), (Kind::Data, 9, 3));
    o.goes_on();
}

#[test]
fn a_bad_request_is_refused_by_type_and_the_next_one_served() {
    let o = Owner::new(TcpOptions::default());
    let mut s = o.peer();
    let mut op = 0;
    let mut ask = |s: &mut TcpStream, frame: Vec<u8>| {
        s.write_all(&frame).unwrap();
        let why = refusal(s, 7);
        op += 1;
        s.write_all(&request(Kind::Get, 1000 + op, o.read, &[(5, 3)]))
            .unwrap();
        assert_eq!(
            (header(s).op, s.read_exact(&mut [0; 3]).is_ok()),
            (1000 + op, true)
        );
        why
    };
    let end = 4 * BLOCK;
    for (spans, why) in [
        (vec![(end - 1, 2)], Refusal::OutOfRange),
        (vec![(u64::MAX - 1, 2)], Refusal::OutOfRange),
        (vec![(0, 5), (3, 0)], Refusal::BadRequest),
        (vec![], Refusal::BadRequest),
        (vec![(0, 1 << 20), (0, 1)], Refusal::TooLarge),
        (vec![(0, u32::MAX)], Refusal::TooLarge),
        (vec![(0, 1); 4097], Refusal::TooLarge),
    ] {
        assert_eq!(
            ask(&mut s, request(Kind::Get, 7, o.read, &spans)),
            Some(why)
        );
        assert_eq!(
            ask(&mut s, request(Kind::Put, 7, o.write, &spans)),
            Some(why)
        );
    }
    // A list longer than any, and one that does not match its check.
    let mut long = Header::new(Kind::Get, 7);
    (long.key, long.epoch, long.count, long.len) =
        (o.read.key, o.read.epoch, 60_000, PIECE_MAX as u32);
    assert_eq!(
        ask(
            &mut s,
            [long.encode().as_slice(), &vec![0; PIECE_MAX]].concat()
        ),
        Some(Refusal::TooLarge)
    );
    let mut wrong = request(Kind::Get, 7, o.read, &[(0, 1)]);
    *wrong.last_mut().unwrap() ^= 1;
    assert_eq!(ask(&mut s, wrong), Some(Refusal::Integrity));
    o.goes_on();
}

#[test]
fn a_put_that_lies_about_its_bytes_fails_alone() {
    let o = Owner::new(TcpOptions::default());
    let mut s = o.peer();
    s.write_all(&request(Kind::Put, 1, o.write, &[(10, 100)]))
        .unwrap();
    let mut d = data(1, o.write.epoch, 0, &[9; 100]);
    *d.last_mut().unwrap() ^= 1;
    s.write_all(&d).unwrap();
    assert_eq!(refusal(&mut s, 1), Some(Refusal::Integrity));
    s.write_all(&request(Kind::Put, 2, o.write, &[(10, 100)]))
        .unwrap();
    s.write_all(&data(2, o.write.epoch, 0, &[8; 60])).unwrap();
    s.write_all(&data(2, o.write.epoch, 60, &[7; 40])).unwrap();
    assert_eq!(header(&mut s).kind, Kind::Done);
    let lease = o.staging.read(&[0]).unwrap();
    assert_eq!(lease.bytes(9, 2), [2, 8]);
    assert_eq!(
        lease.bytes(69, 42),
        [[8].as_slice(), &[7; 40], &[2]].concat()
    );
    drop(lease);
    // Bytes for a put that was refused, or that never was, are read and thrown away.
    let stale = RemoteRegion {
        epoch: 99,
        ..o.write
    };
    s.write_all(&request(Kind::Put, 3, stale, &[(10, 100)]))
        .unwrap();
    s.write_all(&data(3, 99, 0, &[5; 100])).unwrap();
    s.write_all(&data(4, 99, 0, &[5; 100])).unwrap();
    assert_eq!(refusal(&mut s, 3), Some(Refusal::StaleEpoch));
    s.write_all(&request(Kind::Get, 5, o.read, &[(0, 1)]))
        .unwrap();
    assert_eq!(header(&mut s).op, 5);
    assert_eq!(o.staging.read(&[0]).unwrap().bytes(10, 1), [8]);
    o.goes_on();
}

#[test]
fn data_out_of_order_closes_the_connection_and_frees_the_blocks() {
    let o = Owner::new(TcpOptions::default());
    let whole = BLOCK as u32;
    for bad in [
        data(1, 1, 5, &[0; 10]),
        data(1, 1, 0, &[]),
        data(1, 1, u64::MAX, &[0; 10]),
        request(Kind::Put, 2, o.write, &[(0, 1)]),
    ] {
        let mut s = o.peer();
        s.write_all(&request(Kind::Put, 1, o.write, &[(0, whole)]))
            .unwrap();
        s.write_all(&bad).unwrap();
        closed(&mut s);
    }
    // More bytes than announced.
    let mut s = o.peer();
    s.write_all(&request(Kind::Put, 1, o.write, &[(0, 10)]))
        .unwrap();
    s.write_all(&data(1, 1, 0, &[0; 11])).unwrap();
    closed(&mut s);
    o.goes_on();
}

#[test]
fn a_put_that_stalls_loses_its_blocks_at_the_deadline_and_to_a_revoke_at_once() {
    let o = Owner::new(TcpOptions::default());
    let mut s = o.peer();
    s.write_all(&request(Kind::Put, 1, o.write, &[(0, BLOCK as u32)]))
        .unwrap();
    s.write_all(&data(1, 1, 0, &[5; 1000])).unwrap();
    let until = in_10s();
    while o.staging.stats().write_leases == 0 {
        assert!(Instant::now() < until, "the put was never admitted");
    }
    closed(&mut s);
    assert_eq!(o.staging.stats().write_leases, 0);

    let mut s = o.peer();
    s.write_all(&request(Kind::Put, 1, o.write, &[(0, BLOCK as u32)]))
        .unwrap();
    // Half a piece: the owner is in the middle of landing it.
    s.write_all(&data(1, 1, 0, &[5; 100_000])[..50_000])
        .unwrap();
    while o.staging.stats().write_leases == 0 {
        assert!(Instant::now() < until, "the put was never admitted");
    }
    let t0 = Instant::now();
    assert_eq!(o.transport.revoke(o.write.key, in_10s()), Ok(Revoked::Done));
    assert!(
        t0.elapsed() < FRAME / 2,
        "a revoke waited for its peer: {:?}",
        t0.elapsed()
    );
    let mut mine = o.staging.write(&[0]).expect("nobody else has it");
    mine.bytes_mut(0, BLOCK as usize).fill(6);
    s.write_all(&vec![5; 50_064]).unwrap();
    assert_eq!(refusal(&mut s, 1), Some(Refusal::StaleEpoch));
    assert!(
        mine.bytes(0, BLOCK as usize).iter().all(|&b| b == 6),
        "a late byte landed"
    );
    drop(mine);
    s.write_all(&request(Kind::Get, 5, o.read, &[(0, 1)]))
        .unwrap();
    assert_eq!(header(&mut s).op, 5);
    o.goes_on();
}

#[test]
fn a_peer_that_asks_and_never_reads_is_cut_off_and_holds_nothing() {
    let o = Owner::new(TcpOptions::default());
    let mut s = o.peer();
    // More than all the buffers between the two hold.
    for op in 0..64 {
        if s.write_all(&request(Kind::Get, op, o.read, &[(0, BLOCK as u32)]))
            .is_err()
        {
            break;
        }
    }
    // Well before it is cut off, its blocks are free.
    std::thread::sleep(FRAME / 3);
    drop(
        o.source
            .write_until(&[0], Instant::now() + Duration::from_millis(100))
            .expect("free blocks"),
    );
    let until = Instant::now() + FRAME * 6;
    while o.transport.connections() > 0 {
        assert!(Instant::now() < until, "it was let sit");
        std::thread::sleep(Duration::from_millis(5));
    }
    o.goes_on();
}

#[test]
fn connections_are_bounded_and_dropped_ones_leave_nothing_behind() {
    let o = Owner::new(TcpOptions {
        connections_max: 3,
        ..TcpOptions::default()
    });
    let kept: Vec<_> = (0..3).map(|_| o.peer()).collect();
    let mut extra = o.stranger();
    closed(&mut extra);
    drop(kept);
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let settle = || {
        let until = in_10s();
        while o.transport.connections() > 0 {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    settle();
    let before = fds();
    for _ in 0..100 {
        drop(o.peer());
        settle();
    }
    // Other tests of this process come and go; a leak would be a hundred.
    assert!(
        fds() < before + 50,
        "{} descriptors before, {} after",
        before,
        fds()
    );
    o.goes_on();
}

#[test]
fn listening_beyond_loopback_must_be_asked_for() {
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let options = TcpOptions {
            listen: listen.parse().unwrap(),
            ..TcpOptions::default()
        };
        let e = TcpTransport::bind(options.clone()).err().expect("refused");
        assert_eq!(e.kind(), ErrorKind::Caller);
        TcpTransport::bind(TcpOptions {
            expose: true,
            ..options
        })
        .unwrap();
    }
}
