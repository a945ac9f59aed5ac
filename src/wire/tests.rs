use super::frame::{MAGIC, VERSION, crc32c};
use super::*;
use crate::id::ErrorKind;
use proptest::prelude::*;
use std::io::{IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

fn soon() -> Wait {
    Wait::within(SOON)
}

/// A framed end under test, and the raw socket of a peer that keeps to no rules.
fn hostile(limits: Limits) -> (FramedConn, UnixStream) {
    let (a, b) = UnixStream::pair().unwrap();
    (FramedConn::from_fd(a.into(), limits), b)
}

fn frame_bytes(kind: u16, id: u64, payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader {
        kind,
        flags: 0,
        len: payload.len() as u32,
        id,
        payload_crc: crc32c(payload),
    };
    [&header.encode()[..], payload].concat()
}

#[test]
fn crc_is_castagnoli() {
    // RFC 3720, B.4.
    assert_eq!(crc32c(&[0u8; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let parts = [
        IoSlice::new(b"1234"),
        IoSlice::new(b""),
        IoSlice::new(b"56789"),
    ];
    assert_eq!(frame::crc32c_slices(&parts), 0xe306_9283);
    assert_eq!(frame::crc32c_slices(&[]), crc32c(b""));
}

#[test]
fn a_listener_stays_on_loopback_unless_told_otherwise() {
    for text in [
        "tcp://0.0.0.0:0",
        "tcp://[::]:0",
        "tcp://[::ffff:10.0.0.1]:0",
    ] {
        let endpoint: Endpoint = text.parse().unwrap();
        let got = Listener::bind(&endpoint, ListenOptions::default());
        assert!(matches!(got, Err(WireError::NotLoopback { .. })), "{text}");
    }
    let endpoint: Endpoint = "tcp://0.0.0.0:0".parse().unwrap();
    let open = ListenOptions {
        allow_remote: true,
        ..Default::default()
    };
    assert!(Listener::bind(&endpoint, open).is_ok());
}

fn echo_once(listener: &Listener) {
    let mut conn = listener.accept(Instant::now() + SOON).unwrap();
    let (send, recv) = conn.halves();
    let frame = recv.recv(soon()).unwrap();
    let parts = [IoSlice::new(frame.payload)];
    send.send(frame.header.kind + 1, frame.header.id, &parts, soon())
        .unwrap();
}

#[test]
fn frames_cross_tcp_v4_v6_and_unix_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let unix = Endpoint::unix(dir.path().join("s")).unwrap();
    for endpoint in [
        Endpoint::loopback(0),
        "tcp://[::1]:0".parse().unwrap(),
        unix,
    ] {
        let listener = Listener::bind(&endpoint, ListenOptions::default()).unwrap();
        let at = listener.endpoint().clone();
        let server = std::thread::spawn(move || echo_once(&listener));
        let mut conn = connect(&at, Limits::default(), Instant::now() + SOON).unwrap();
        let body = [7u8; 3000];
        let parts: Vec<IoSlice> = body.chunks(20).map(IoSlice::new).collect();
        assert!(parts.len() > 2 * 64, "more slices than one call takes");
        conn.send(4, 99, &parts, soon()).unwrap();
        let frame = conn.recv(soon()).unwrap();
        assert_eq!((frame.header.kind, frame.header.id), (5, 99));
        assert_eq!(frame.payload, &body[..]);
        server.join().unwrap();
    }
}

#[test]
fn a_socket_file_of_a_dead_process_is_replaced_and_a_living_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let endpoint = Endpoint::unix(&path).unwrap();
    let stale = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(stale);
    assert!(path.exists());
    let listener = Listener::bind(&endpoint, ListenOptions::default()).unwrap();
    let second = Listener::bind(&endpoint, ListenOptions::default());
    assert!(matches!(second, Err(WireError::InUse { .. })));
    drop(listener);
    assert!(!path.exists());

    let listener = Listener::bind(&Endpoint::loopback(0), ListenOptions::default()).unwrap();
    let second = Listener::bind(listener.endpoint(), ListenOptions::default());
    assert!(matches!(second, Err(WireError::InUse { .. })));
}

#[test]
fn waits_end_at_their_deadline_and_at_a_closer() {
    let listener = Listener::bind(&Endpoint::loopback(0), ListenOptions::default()).unwrap();
    let begun = Instant::now();
    let got = listener.accept(begun + Duration::from_millis(20));
    assert!(matches!(
        got,
        Err(WireError::Timeout {
            doing: Doing::Accept,
            ..
        })
    ));
    assert!(begun.elapsed() >= Duration::from_millis(20));
    listener.closer().close();
    assert!(matches!(
        listener.accept(Instant::now() + SOON),
        Err(WireError::ClosedHere)
    ));

    let (mut a, _b) = FramedConn::pair(Limits::default()).unwrap();
    let got = a.recv(Wait::within(Duration::from_millis(5)).spin(1_000_000));
    assert!(matches!(
        got,
        Err(WireError::Timeout {
            doing: Doing::Recv,
            partial: false
        })
    ));
    let closer = a.closer();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        closer.close();
    });
    assert!(matches!(a.recv(soon()), Err(WireError::ClosedHere)));
    assert!(matches!(a.recv(soon()), Err(WireError::ClosedHere)));
    assert!(matches!(
        a.send(1, 1, &[], soon()),
        Err(WireError::ClosedHere)
    ));
    thread.join().unwrap();
}

#[test]
fn nobody_listening_is_peer_lost() {
    let listener = Listener::bind(&Endpoint::loopback(0), ListenOptions::default()).unwrap();
    let at = listener.endpoint().clone();
    drop(listener);
    let error = connect(&at, Limits::default(), Instant::now() + SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    let gone = Endpoint::unix("/nonexistent/moonlive.sock").unwrap();
    let error = connect(&gone, Limits::default(), Instant::now() + SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

#[test]
fn a_dead_peer_is_told_from_a_cut_frame() {
    let (mut conn, peer) = hostile(Limits::default());
    drop(peer);
    assert!(matches!(
        conn.recv(soon()),
        Err(WireError::Closed { mid_frame: false })
    ));
    assert!(matches!(conn.recv(soon()), Err(WireError::Broken)));
    assert!(matches!(
        conn.send(1, 1, &[], soon()),
        Err(WireError::Closed { .. })
    ));

    let whole = frame_bytes(1, 2, b"payload");
    for cut in 1..whole.len() {
        let (mut conn, mut peer) = hostile(Limits::default());
        peer.write_all(&whole[..cut]).unwrap();
        drop(peer);
        assert!(
            matches!(
                conn.recv(soon()),
                Err(WireError::Closed { mid_frame: true })
            ),
            "{cut}"
        );
    }
}

#[test]
fn a_kept_connection_whose_peer_is_gone_shows_it_before_it_is_used() {
    let (mut conn, peer) = hostile(Limits::default());
    assert!(conn.halves().1.is_quiet());
    drop(peer);
    assert!(!conn.halves().1.is_quiet());
    let (mut conn, mut peer) = hostile(Limits::default());
    peer.write_all(b"unasked").unwrap();
    assert!(!conn.halves().1.is_quiet());
}

#[test]
fn a_frame_in_drops_is_put_together_and_a_timeout_loses_nothing() {
    let (mut conn, mut peer) = hostile(Limits::default());
    for byte in frame_bytes(1, 2, b"drop by drop") {
        let got = conn.recv(Wait::within(Duration::from_micros(200)));
        assert!(matches!(got, Err(WireError::Timeout { .. })));
        peer.write_all(&[byte]).unwrap();
    }
    assert_eq!(conn.recv(soon()).unwrap().payload, b"drop by drop");
}

#[test]
fn a_dripping_peer_is_cut_off_whatever_the_caller_waits() {
    let limits = Limits {
        frame_timeout: Duration::from_millis(50),
        ..Default::default()
    };
    let (mut conn, mut peer) = hostile(limits);
    let drip = std::thread::spawn(move || {
        for byte in frame_bytes(1, 2, &[0; 4096]) {
            if peer.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    let begun = Instant::now();
    let got = loop {
        match conn.recv(Wait::within(Duration::from_millis(7))) {
            Err(WireError::Timeout { .. }) => assert!(begun.elapsed() < SOON),
            other => break other.map(|_| ()),
        }
    };
    assert!(matches!(got, Err(WireError::TooSlow { .. })), "{got:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    drip.join().unwrap();
    // An idle peer between frames is no slow one.
    let (mut conn, mut peer) = hostile(limits);
    std::thread::sleep(Duration::from_millis(80));
    peer.write_all(&frame_bytes(1, 2, b"x")).unwrap();
    conn.recv(soon()).unwrap();
}

#[test]
fn each_flipped_header_bit_ends_the_connection_with_a_cause() {
    let whole = frame_bytes(3, 4, b"abc");
    for bit in 0..HEADER_BYTES * 8 {
        let (mut conn, mut peer) = hostile(Limits::default());
        let mut bad = whole.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        peer.write_all(&bad).unwrap();
        let got = conn.recv(soon()).map(|_| ());
        let magic = bit < 32;
        assert!(
            matches!(got, Err(WireError::Corrupt(Corrupt::Magic { .. })) if magic)
                || matches!(got, Err(WireError::Corrupt(Corrupt::HeaderCrc { .. })) if !magic),
            "bit {bit}: {got:?}"
        );
        assert!(matches!(conn.recv(soon()), Err(WireError::Broken)));
    }
    // A well-formed header of another release or with a reserved byte set.
    let header = FrameHeader {
        kind: 0,
        flags: 0,
        len: 0,
        id: 0,
        payload_crc: crc32c(b""),
    };
    for (at, value) in [(4, VERSION + 1), (5, 1)] {
        let mut bytes = header.encode();
        bytes[at] = value;
        let crc = crc32c(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc.to_le_bytes());
        let (mut conn, mut peer) = hostile(Limits::default());
        peer.write_all(&bytes).unwrap();
        let got = conn.recv(soon()).unwrap_err();
        assert!(matches!(
            got,
            WireError::Corrupt(Corrupt::Version { got: 2 } | Corrupt::Reserved { got: 1 })
        ));
    }
}

#[test]
fn a_flipped_payload_bit_fails_that_frame_only() {
    let (mut conn, mut peer) = hostile(Limits::default());
    for direct in [false, true] {
        let mut bad = frame_bytes(3, 4, b"abc");
        *bad.last_mut().unwrap() ^= 0x80;
        peer.write_all(&bad).unwrap();
        peer.write_all(&frame_bytes(3, 5, b"next")).unwrap();
        let failed = if direct {
            let (_, recv) = conn.halves();
            assert_eq!(recv.recv_header(soon()).unwrap().id, 4);
            let mut out = [0; 3];
            recv.payload_into(&mut out, soon()).unwrap_err()
        } else {
            conn.recv(soon()).map(|_| ()).unwrap_err()
        };
        assert!(matches!(failed, WireError::Payload { header } if header.id == 4));
        assert_eq!(failed.kind(), ErrorKind::Integrity);
        assert_eq!(conn.recv(soon()).unwrap().payload, b"next");
    }
}

#[test]
fn an_announced_length_alone_allocates_nothing() {
    let limits = Limits {
        max_frame: 1 << 30,
        read_ahead: 4096,
        ..Default::default()
    };
    let (mut conn, mut peer) = hostile(limits);
    let header = FrameHeader {
        kind: 0,
        flags: 0,
        len: 1 << 30,
        id: 0,
        payload_crc: 0,
    };
    peer.write_all(&header.encode()).unwrap();
    peer.write_all(&[0; 100]).unwrap();
    let got = conn.recv(Wait::within(Duration::from_millis(10)));
    assert!(matches!(got, Err(WireError::Timeout { partial: true, .. })));
    let (_, recv) = conn.halves();
    assert!(recv.buffer_bytes() <= 8192, "{}", recv.buffer_bytes());

    let (mut conn, mut peer) = hostile(Limits {
        max_frame: 99,
        ..limits
    });
    peer.write_all(&frame_bytes(0, 0, &[0; 100])).unwrap();
    let got = conn.recv(soon()).map(|_| ());
    assert!(matches!(
        got,
        Err(WireError::FrameTooLong { len: 100, max: 99 })
    ));
    let got = conn.send(0, 0, &[IoSlice::new(&[0; 100])], soon());
    assert!(matches!(
        got,
        Err(WireError::PayloadTooLong { len: 100, max: 99 })
    ));
}

#[test]
fn a_peer_that_does_not_read_times_the_sender_out_and_gets_no_whole_frame() {
    let (mut conn, mut peer) = hostile(Limits {
        max_frame: 64 << 20,
        ..Default::default()
    });
    let body = vec![1u8; 16 << 20];
    let got = conn.send(
        1,
        1,
        &[IoSlice::new(&body)],
        Wait::within(Duration::from_millis(30)),
    );
    assert!(matches!(
        got,
        Err(WireError::Timeout {
            doing: Doing::Send,
            partial: true
        })
    ));
    assert!(matches!(
        conn.send(1, 2, &[], soon()),
        Err(WireError::Broken)
    ));
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert!(!got.is_empty() && got.len() < body.len());

    // With no byte written the half stays whole.
    let (mut conn, mut peer) = hostile(Limits::default());
    let mut sent = 0;
    let failed = loop {
        match conn.send(
            1,
            sent,
            &[IoSlice::new(&[0; 512])],
            Wait::within(Duration::from_millis(5)),
        ) {
            Ok(()) => sent += 1,
            Err(e) => break e,
        }
    };
    let untouched = matches!(
        failed,
        WireError::Timeout {
            doing: Doing::Send,
            partial: false
        }
    );
    assert!(untouched, "{failed:?}");
    let mut drained = vec![0; sent as usize * 544];
    peer.read_exact(&mut drained).unwrap();
    conn.send(1, sent, &[], soon()).unwrap();
}

#[test]
fn large_payloads_land_in_the_callers_memory_and_leftovers_are_skipped() {
    let limits = Limits {
        read_ahead: 4096,
        ..Default::default()
    };
    let (a, mut b) = FramedConn::pair(limits).unwrap();
    let (mut send, _keep) = a.split();
    let body: Vec<u8> = (0..1_000_000u32).map(|i| i as u8).collect();
    let sender = std::thread::spawn({
        let body = body.clone();
        move || {
            for id in 0..3 {
                send.send(1, id, &[IoSlice::new(&body)], soon()).unwrap();
            }
        }
    });
    let (_, recv) = b.halves();
    let header = recv.recv_header(soon()).unwrap();
    assert_eq!(header.len as usize, body.len());
    let mut out = vec![0u8; body.len()];
    let (left, right) = out.split_at_mut(333_333);
    recv.payload_into(left, soon()).unwrap();
    recv.payload_into(right, soon()).unwrap();
    assert_eq!(out, body);
    let got = recv.payload_into(&mut [0], soon());
    assert!(matches!(got, Err(WireError::PayloadTooLong { .. })));
    assert_eq!(recv.recv_header(soon()).unwrap().id, 1);
    recv.payload_into(&mut out[..10], soon()).unwrap();
    assert_eq!(recv.payload_left(), body.len() - 10);
    let frame = recv.recv(soon()).unwrap();
    assert_eq!((frame.header.id, frame.payload), (2, &body[..]));
    sender.join().unwrap();
}

#[test]
fn the_receive_buffer_stops_growing_in_steady_state() {
    let (mut a, mut b) = FramedConn::pair(Limits {
        read_ahead: 64,
        ..Default::default()
    })
    .unwrap();
    let body = [9u8; 10_000];
    let mut size = 0;
    for round in 0..50 {
        a.send(
            1,
            round,
            &[IoSlice::new(&body[..1 + (round as usize * 997) % 9_999])],
            soon(),
        )
        .unwrap();
        a.send(1, round, &[IoSlice::new(&body)], soon()).unwrap();
        b.recv(soon()).unwrap();
        b.recv(soon()).unwrap();
        let now = b.halves().1.buffer_bytes();
        assert!(round < 2 || now == size, "grew from {size} to {now}");
        size = now;
    }
    assert!(size <= 2 * (10_000 + HEADER_BYTES));
}

#[test]
fn threads_share_a_send_half_without_tearing_frames() {
    let (a, mut b) = FramedConn::pair(Limits::default()).unwrap();
    let (send, _recv) = a.split();
    let shared = SharedSend::new(send);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let shared = shared.clone();
            scope.spawn(move || {
                for i in 0..200u64 {
                    let body = vec![thread; 1 + (i as usize * 37) % 500];
                    shared
                        .send(thread.into(), i, &[IoSlice::new(&body)], soon())
                        .unwrap();
                }
            });
        }
        let mut next = [0u64; 4];
        for _ in 0..800 {
            let frame = b.recv(soon()).unwrap();
            let thread = frame.header.kind as usize;
            assert_eq!(frame.header.id, next[thread]);
            assert!(frame.payload.iter().all(|&x| x as usize == thread));
            next[thread] += 1;
        }
    });
}

#[test]
fn a_peer_that_speaks_http_is_named_as_such() {
    let listener = Listener::bind(&Endpoint::loopback(0), ListenOptions::default()).unwrap();
    let Endpoint::Tcp(addr) = listener.endpoint() else {
        unreachable!()
    };
    let mut curl = TcpStream::connect(addr).unwrap();
    curl.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    let mut conn = listener.accept(Instant::now() + SOON).unwrap();
    let got = conn.recv(soon()).map(|_| ());
    assert!(matches!(got, Err(WireError::Corrupt(Corrupt::Magic { got })) if got == *b"GET "));
}

/// What a scripted peer does next.
#[derive(Debug, Clone)]
enum Move {
    Good(Vec<u8>),
    BadPayload(Vec<u8>),
    Junk(Vec<u8>),
    Huge(u32),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let body = || prop::collection::vec(any::<u8>(), 0..300);
    let one = prop_oneof![
        6 => body().prop_map(Move::Good),
        2 => prop::collection::vec(any::<u8>(), 1..300).prop_map(Move::BadPayload),
        1 => prop::collection::vec(any::<u8>(), 32..200).prop_map(Move::Junk),
        1 => (1025u32..).prop_map(Move::Huge),
    ];
    prop::collection::vec(one, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a peer sends, in whatever pieces: each sound frame is received until the first one
    /// whose borders are lost, nothing else is, and the connection's memory stays bounded.
    #[test]
    fn a_hostile_peer_gets_typed_errors_and_bounded_memory(script in moves(), chunk in 1usize..200) {
        let limits = Limits { max_frame: 1024, read_ahead: 64, ..Default::default() };
        let (mut conn, mut peer) = hostile(limits);
        let mut bytes = Vec::new();
        for (i, step) in script.iter().enumerate() {
            match step {
                Move::Good(body) => bytes.extend(frame_bytes(1, i as u64, body)),
                Move::BadPayload(body) => {
                    bytes.extend(frame_bytes(1, i as u64, body));
                    *bytes.last_mut().unwrap() ^= 1;
                }
                Move::Junk(junk) => {
                    prop_assume!(junk[..4] != MAGIC);
                    bytes.extend(junk);
                }
                Move::Huge(len) => {
                    let header = FrameHeader { kind: 0, flags: 0, len: *len, id: 0, payload_crc: 0 };
                    bytes.extend(header.encode());
                }
            }
        }
        let writer = std::thread::spawn(move || {
            for part in bytes.chunks(chunk) {
                if peer.write_all(part).is_err() {
                    return;
                }
            }
        });
        for (i, step) in script.iter().enumerate() {
            let got = conn.recv(soon()).map(|f| (f.header.id, f.payload.to_vec()));
            match (step, got) {
                (Move::Good(body), Ok((id, payload))) => {
                    prop_assert_eq!((id, &payload), (i as u64, body));
                }
                (Move::BadPayload(_), Err(WireError::Payload { header })) => {
                    prop_assert_eq!(header.id, i as u64);
                }
                (Move::Junk(_), Err(WireError::Corrupt(Corrupt::Magic { .. })))
                | (Move::Huge(_), Err(WireError::FrameTooLong { .. })) => {
                    prop_assert!(matches!(conn.recv(soon()), Err(WireError::Broken)));
                    break;
                }
                (step, got) => prop_assert!(false, "{step:?} gave {got:?}"),
            }
            prop_assert!(conn.halves().1.buffer_bytes() <= 1024 + HEADER_BYTES);
        }
        drop(conn);
        writer.join().unwrap();
    }

    #[test]
    fn headers_survive_the_wire(kind: u16, flags: u32, len: u32, id: u64, payload_crc: u32) {
        let header = FrameHeader { kind, flags, len, id, payload_crc };
        prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }
}
