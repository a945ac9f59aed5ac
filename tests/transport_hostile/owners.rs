//! A link of ours against scripted owners.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use moonlivekv::id::ErrorKind;
use moonlivekv::mem::RemoteRegion;
use moonlivekv::transport::frame::{Header, Kind, VERSION, crc32c, decode_spans, receipt};
use moonlivekv::transport::tcp::TcpLink;
use moonlivekv::transport::{Link, Local, PIECE_MAX, Refusal, Span, Transfer, TransportError};

use super::*;

/// A scripted owner: takes one connection and hands it to the script after the hello.
fn scripted<T>(
    script: impl FnOnce(&mut TcpStream) -> T + Send,
    test: impl FnOnce(&mut TcpLink, RemoteRegion),
) -> T
where
    T: Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let key = moonlivekv::mem::RegionKey::random().unwrap();
    let remote = RemoteRegion {
        key,
        base: 0,
        len: 4 * BLOCK,
        epoch: 3,
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(header(&mut s).kind, Kind::Hello);
            s.write_all(
                &Header {
                    offset: VERSION,
                    ..Header::new(Kind::Welcome, 0)
                }
                .encode(),
            )
            .unwrap();
            script(&mut s)
        });
        let mut link = TcpLink::connect(addr, in_10s(), None, None).unwrap();
        test(&mut link, remote);
        drop(link);
        server.join().unwrap()
    })
}

/// Reads a request and its list.
fn asked(s: &mut TcpStream) -> (Header, Vec<Span>) {
    let h = header(s);
    let mut list = vec![0; h.len as usize];
    s.read_exact(&mut list).unwrap();
    let mut spans = Vec::new();
    decode_spans(&list, h.count, &mut spans).unwrap();
    (h, spans)
}

/// What each answer that breaks the rules must do: end everything as retryable, land nothing more.
#[test]
fn an_owner_that_breaks_the_rules_ends_the_connection_and_its_transfers_retryable() {
    type Answer = fn(&Header) -> Vec<u8>;
    let answers: [(&str, Answer); 9] = [
        ("a header that fails its check", |h| {
            let mut d = data(h.op, h.epoch, 0, &[7; 100]);
            d[9] ^= 0x40;
            d
        }),
        ("an answer to no question", |h| {
            data(h.op + 5, h.epoch, 0, &[7; 100])
        }),
        ("data out of order", |h| data(h.op, h.epoch, 1, &[7; 100])),
        ("more data than asked for", |h| {
            data(h.op, h.epoch, 0, &[7; 101])
        }),
        ("empty data", |h| data(h.op, h.epoch, 0, &[])),
        ("a get that is done", |h| {
            Header::new(Kind::Done, h.op).encode().to_vec()
        }),
        ("a question", |h| {
            Header::new(Kind::Get, h.op).encode().to_vec()
        }),
        ("an endless payload", |h| {
            let mut b = Header {
                len: PIECE_MAX as u32,
                ..Header::new(Kind::Data, h.op)
            }
            .encode();
            b[51] = 0xff;
            let check = crc32c(&b[..60]);
            b[60..].copy_from_slice(&check.to_le_bytes());
            b.to_vec()
        }),
        ("noise", |_| (0..200).map(|i| (i * 37) as u8).collect()),
    ];
    for (name, answer) in answers {
        scripted(
            |s| {
                let (h, _) = asked(s);
                s.write_all(&answer(&h)).unwrap();
                closed(s);
            },
            |link, remote| {
                let near = pool(0);
                submit_get(link, &near, 0, remote, 100);
                submit_get(link, &near, 1, remote, 100);
                for _ in 0..2 {
                    let c = complete(link);
                    let e = c.outcome.unwrap_err();
                    assert_eq!(e.kind(), ErrorKind::Retryable, "{name}: {e}");
                    assert!(
                        matches!(e, TransportError::Connection { .. }),
                        "{name}: {e}"
                    );
                    assert!(c.local.is_some());
                }
                let again = near.write(&[2]).unwrap();
                let spans = vec![Span {
                    remote_off: 0,
                    local_off: 2 * BLOCK,
                    len: 1,
                }];
                let t = Transfer {
                    local: Local::GetInto(again),
                    remote,
                    spans,
                    deadline: in_10s(),
                };
                assert_eq!(
                    link.submit(t).unwrap_err().error.kind(),
                    ErrorKind::Retryable,
                    "{name}"
                );
                let all = near.read(&[0, 1, 2, 3]).unwrap();
                let landed = all
                    .bytes(0, 4 * BLOCK as usize)
                    .iter()
                    .filter(|&&b| b != 0)
                    .count();
                assert_eq!(landed, 0, "{name}");
            },
        );
    }
}

#[test]
fn an_owner_that_goes_in_the_middle_of_a_payload_is_lost() {
    scripted(
        |s| {
            let (h, _) = asked(s);
            s.write_all(&data(h.op, h.epoch, 0, &[7; 1000])[..500])
                .unwrap();
            s.shutdown(std::net::Shutdown::Both).unwrap();
        },
        |link, remote| {
            let near = pool(0);
            submit_get(link, &near, 0, remote, 1000);
            assert_eq!(
                complete(link).outcome.unwrap_err().kind(),
                ErrorKind::PeerLost
            );
            let whole = near.read(&[0, 1, 2, 3]).unwrap();
            assert!(
                whole
                    .bytes(1000, 4 * BLOCK as usize - 1000)
                    .iter()
                    .all(|&b| b == 0)
            );
        },
    );
}

#[test]
fn a_payload_that_fails_its_check_fails_that_transfer_alone() {
    scripted(
        |s| {
            for n in 0..3 {
                let (h, _) = asked(s);
                let mut d = data(h.op, h.epoch, 0, &[7; 1000]);
                if n == 1 {
                    d[700] ^= 1;
                }
                s.write_all(&d).unwrap();
            }
            closed(s);
        },
        |link, remote| {
            let near = pool(0);
            let ids: Vec<_> = (0..3)
                .map(|b| submit_get(link, &near, b, remote, 1000))
                .collect();
            for (n, id) in ids.into_iter().enumerate() {
                let c = complete(link);
                assert_eq!(c.id, id);
                match c.outcome {
                    Ok(()) if n != 1 => {}
                    Err(e) if n == 1 => assert_eq!(
                        e,
                        TransportError::Integrity {
                            offset: 0,
                            len: 1000
                        }
                    ),
                    other => panic!("{n}: {other:?}"),
                }
            }
        },
    );
}

#[test]
fn a_reply_under_another_epoch_lands_nowhere() {
    scripted(
        |s| {
            let (h, _) = asked(s);
            s.write_all(&data(h.op, h.epoch + 1, 0, &[7; 1000]))
                .unwrap();
            let (h, _) = asked(s);
            s.write_all(&data(h.op, h.epoch, 0, &[8; 1000])).unwrap();
            closed(s);
        },
        |link, remote| {
            let near = pool(0);
            submit_get(link, &near, 0, remote, 1000);
            assert_eq!(complete(link).outcome, Err(Refusal::StaleEpoch.into()));
            assert!(
                near.read(&[0])
                    .unwrap()
                    .bytes(0, 1000)
                    .iter()
                    .all(|&b| b == 0)
            );
            submit_get(link, &near, 0, remote, 1000);
            assert_eq!(complete(link).outcome, Ok(()));
        },
    );
}

/// An acknowledgement before the last slice has landed is not believed: done must mean applied, so it
/// carries a receipt that only who has seen all bytes can make.
#[test]
fn a_put_acknowledged_before_its_last_slice_landed_is_not_done() {
    for seen in [0, 3] {
        scripted(
            |s| {
                let (h, _) = asked(s);
                let mut so_far = 0;
                for _ in 0..seen {
                    let d = header(s);
                    s.read_exact(&mut vec![0; d.len as usize]).unwrap();
                    so_far = receipt(so_far, d.payload_crc);
                }
                let early = Header {
                    offset: u64::from(so_far),
                    ..Header::new(Kind::Done, h.op)
                };
                s.write_all(&early.encode()).unwrap();
                closed(s);
            },
            |link, remote| {
                let near = pool(3);
                submit_put(link, &near, remote, BLOCK);
                let e = complete(link).outcome.unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Retryable, "after {seen} pieces: {e}");
            },
        );
    }
    // With all four pieces seen, it is.
    scripted(
        |s| {
            let (h, _) = asked(s);
            let mut so_far = 0;
            for _ in 0..4 {
                let d = header(s);
                let mut bytes = vec![0; d.len as usize];
                s.read_exact(&mut bytes).unwrap();
                so_far = receipt(so_far, crc32c(&bytes));
            }
            let done = Header {
                offset: u64::from(so_far),
                ..Header::new(Kind::Done, h.op)
            };
            s.write_all(&done.encode()).unwrap();
            closed(s);
        },
        |link, remote| {
            submit_put(link, &pool(3), remote, BLOCK);
            assert_eq!(complete(link).outcome, Ok(()));
        },
    );
}

/// A refusal in the middle of a get ends it; what was asked of it besides comes too late and lands
/// nowhere.
#[test]
fn a_get_refused_half_way_lands_nothing_more() {
    scripted(
        |s| {
            let (first, _) = asked(s);
            let (second, _) = asked(s);
            s.write_all(&data(first.op, first.epoch, 0, &vec![7; PIECE_MAX]))
                .unwrap();
            s.write_all(&Header::refused(first.op, Refusal::StaleEpoch).encode())
                .unwrap();
            s.write_all(&data(second.op, second.epoch, 0, &vec![9; PIECE_MAX]))
                .unwrap();
            s.write_all(&Header::refused(second.op, Refusal::StaleEpoch).encode())
                .unwrap();
            let (third, _) = asked(s);
            s.write_all(&data(third.op, third.epoch, 0, &[1; 10]))
                .unwrap();
            closed(s);
        },
        |link, remote| {
            let near = pool(0);
            let local = Local::GetInto(near.write(&[0, 1]).unwrap());
            let spans = vec![Span {
                remote_off: 0,
                local_off: 0,
                len: 2 * BLOCK,
            }];
            link.submit(Transfer {
                local,
                remote,
                spans,
                deadline: in_10s(),
            })
            .unwrap();
            let c = complete(link);
            assert_eq!(
                (c.outcome, c.bytes),
                (Err(Refusal::StaleEpoch.into()), PIECE_MAX as u64)
            );
            drop(c);
            submit_get(link, &near, 2, remote, 10);
            assert_eq!(complete(link).outcome, Ok(()));
            let lease = near.read(&[0, 1]).unwrap();
            assert!(
                !lease.bytes(0, 2 * BLOCK as usize).contains(&9),
                "landed after its transfer ended"
            );
        },
    );
}
