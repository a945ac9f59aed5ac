//! Questions to a metadata store and its answers. The first two bytes are the frame's kind.

use super::route_record::label;
use super::{Target, longer, patched, seed, shorter};
use moonlivekv::metastore::msg::{Answer, Request};
use moonlivekv::metastore::{
    Cas, CasOutcome, Event, LeaseOutcome, LeaseTerm, Listing, Revision, StoreError, Versioned,
    WatchBatch,
};
use moonlivekv::route::Writer;
use std::time::Duration;

pub const TARGET: Target = Target {
    name: "store_message",
    run,
    outcomes: &["accept", "range", "trailing", "truncated", "version"],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let Some((kind, payload)) = data.split_first_chunk::<2>() else {
        return "truncated";
    };
    let kind = u16::from_le_bytes(*kind);
    let mut w = Writer(Vec::new());
    let request = Request::decode(kind, payload);
    let answer = Answer::decode(kind, payload);
    match (&request, &answer) {
        (Ok(_), Ok(_)) => panic!("a question is an answer"),
        (Ok(request), _) => {
            request.encode(&mut w);
            assert_eq!((request.kind(), w.0.as_slice()), (kind, payload));
        }
        (_, Ok(answer)) => {
            answer.encode(&mut w);
            assert_eq!((answer.kind(), w.0.as_slice()), (kind, payload));
        }
        (Err(_), Err(_)) => {}
    }
    match (request, answer) {
        (Ok(_), _) | (_, Ok(_)) => "accept",
        // Of the two readings the one that knows the kind tells what is wrong.
        (Err(moonlivekv::route::DecodeError::Version(_)), Err(e)) | (Err(e), Err(_)) => label(&e),
    }
}

fn question(request: &Request<'_>) -> Vec<u8> {
    let mut w = Writer(request.kind().to_le_bytes().to_vec());
    request.encode(&mut w);
    w.0
}

fn reply(answer: &Answer) -> Vec<u8> {
    let mut w = Writer(answer.kind().to_le_bytes().to_vec());
    answer.encode(&mut w);
    w.0
}

fn seeds() -> Vec<super::Seed> {
    let (key, name, holder) = ("route/a", "leader", "w1");
    let term = LeaseTerm(4);
    let cas = Cas {
        op: moonlivekv::metastore::OpId([1; 16]),
        ..Cas::put(key, Some(Revision(7)), b"value")
    };
    let delete = Cas {
        op: moonlivekv::metastore::OpId([2; 16]),
        ..Cas::delete(key, Revision(7))
    };
    let requests = [
        ("get", Request::Get { key }),
        ("put", Request::Cas(cas)),
        ("delete", Request::Cas(delete)),
        (
            "list",
            Request::List {
                prefix: "route/",
                after: Some(key),
            },
        ),
        (
            "watch",
            Request::Watch {
                prefix: "route/",
                after: Revision(3),
            },
        ),
        (
            "acquire",
            Request::Acquire {
                name,
                holder,
                ttl: Duration::from_secs(3),
            },
        ),
        ("renew", Request::Renew { name, holder, term }),
        ("release", Request::Release { name, holder, term }),
        ("keep-awake", Request::KeepAwake { key }),
    ];
    let record = Versioned {
        revision: Revision(7),
        value: b"value".to_vec(),
    };
    let event = |value| Event {
        key: key.into(),
        revision: Revision(8),
        value,
    };
    let page = Listing {
        revision: Revision(9),
        entries: vec![(key.into(), record.clone())],
    };
    let events = vec![event(Some(b"v".to_vec())), event(None)];
    let left = Duration::from_millis(20);
    let answers = [
        ("record", Answer::Record(Some(record.clone()))),
        ("nothing", Answer::Record(None)),
        (
            "applied",
            Answer::Cas(CasOutcome::Applied {
                revision: Revision(8),
            }),
        ),
        (
            "conflict",
            Answer::Cas(CasOutcome::Conflict {
                current: Some(record),
            }),
        ),
        ("page", Answer::Page { page, more: true }),
        (
            "events",
            Answer::Watch(WatchBatch::Events {
                events,
                upto: Revision(9),
            }),
        ),
        ("resync", Answer::Watch(WatchBatch::Resync)),
        ("granted", Answer::Lease(LeaseOutcome::Granted { term })),
        (
            "held",
            Answer::Lease(LeaseOutcome::Held {
                by: holder.into(),
                left,
            }),
        ),
        ("renewed", Answer::Renewed(true)),
        ("released", Answer::Released),
        ("kept-awake", Answer::KeptAwake),
    ];
    let mut all = Vec::new();
    let cause = || "the disk is gone".to_owned();
    let full = StoreError::Full { bytes: 9, max: 8 };
    let errors = [
        ("error-in-doubt", StoreError::InDoubt { cause: cause() }),
        (
            "error-unavailable",
            StoreError::Unavailable { cause: cause() },
        ),
        ("error-poisoned", StoreError::Poisoned { cause: cause() }),
        ("error-full", full.clone()),
        ("error-key", StoreError::Key { len: 900 }),
        ("error-value", StoreError::Value { len: 1 << 30 }),
        ("error-protocol", StoreError::Protocol { what: cause() }),
    ];
    for (what, error) in errors {
        all.push(seed(
            &format!("accept.{what}"),
            reply(&Answer::Error(error)),
        ));
    }
    // kind 2, code 1, numbers 8 and 8, text behind its length.
    let full = reply(&Answer::Error(full));
    all.push(seed("range.error-number", patched(&full, 2, &[2])));
    all.push(seed("range.error-code", patched(&full, 2, &[8])));
    let with_text = [&full[..19], &[1, 0], b"x"].concat();
    all.push(seed("range.error-text", with_text));
    for (what, request) in &requests {
        all.push(seed(&format!("accept.{what}"), question(request)));
    }
    for (what, answer) in &answers {
        all.push(seed(&format!("accept.{what}"), reply(answer)));
    }
    let get = question(&requests[0].1);
    all.extend([
        seed("version", [0xf0, 0x0f, 0, 0]),
        seed("version.answer", [0xf0, 0x8f, 0, 0]),
        seed("range.key", patched(&get, 4, &[0xff])),
        seed("trailing", longer(&get)),
        seed("truncated", shorter(&get)),
        seed("truncated.kind", [1]),
    ]);
    all
}
