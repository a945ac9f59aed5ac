//! Records of the token journal in their order, as recovery reads them.

use super::records::{framed, records};
use super::route_record::label;
use super::{Target, longer, patched, seed, shorter};
use moonlivekv::journal::{Refusal, ReplayError, replay_records};
use moonlivekv::route::Writer;

pub const TARGET: Target = Target {
    name: "journal_record",
    run,
    outcomes: &[
        "accept",
        "name",
        "order",
        "orphan",
        "range",
        "refused-above-floor",
        "refused-beyond-log",
        "refused-fenced",
        "refused-finished",
        "refused-gap",
        "trailing",
        "truncated",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let all = records(data);
    match replay_records(all.iter().copied()) {
        Ok(alive) => {
            assert!(alive <= all.len(), "a request from nowhere");
            "accept"
        }
        Err(ReplayError::Malformed(e)) => label(&e),
        Err(ReplayError::Order(_)) => "order",
        Err(ReplayError::Orphan(_)) => "orphan",
        Err(ReplayError::Refused(refusal)) => match refusal {
            Refusal::Fenced { .. } => "refused-fenced",
            Refusal::AboveFloor { .. } => "refused-above-floor",
            Refusal::Gap { .. } => "refused-gap",
            Refusal::Finished { .. } => "refused-finished",
            Refusal::BeyondLog { .. } => "refused-beyond-log",
            other @ (Refusal::FloorTaken { .. }
            | Refusal::Conflict { .. }
            | Refusal::Unknown(_)
            | Refusal::TooLarge { .. }) => panic!("not a refusal of a replay: {other:?}"),
        },
    }
}

const OPEN: u8 = 1;
const FLOOR: u8 = 2;
const TOKENS: u8 = 3;
const FORGET: u8 = 4;
const RESTATE: u8 = 5;

/// By the format's description, not by the writer's code.
fn floor(epoch: u64, delivered: u64) -> Vec<u8> {
    let mut w = Writer(vec![7; 16]);
    w.u64(epoch);
    w.u64(delivered);
    w.worker(&super::route_record::worker("w1"));
    w.0
}

fn list(w: &mut Writer, tokens: &[(u32, Option<u8>)]) {
    w.u32(tokens.len() as u32);
    for (token, finish) in tokens {
        w.u32(*token);
        w.u8(finish.is_some().into());
        w.u8(finish.unwrap_or(0));
        w.bytes(b"text");
    }
}

fn tokens(epoch: u64, delivered: u64, first: u64, all: &[(u32, Option<u8>)]) -> Vec<u8> {
    let mut w = Writer(vec![7; 16]);
    w.u64(epoch);
    w.u64(delivered);
    w.u64(first);
    list(&mut w, all);
    w.0
}

fn restate(epoch: u64, from: u64, last: bool, all: &[(u32, Option<u8>)]) -> Vec<u8> {
    let mut w = Writer(floor(epoch, 0));
    w.u64(from);
    w.u8(last.into());
    list(&mut w, all);
    w.0
}

fn seeds() -> Vec<super::Seed> {
    let open = (OPEN, floor(1, 0));
    let two = tokens(1, 0, 1, &[(40, None), (41, None)]);
    let with = |more: &[(u8, Vec<u8>)]| {
        let mut all = vec![open.clone()];
        all.extend_from_slice(more);
        framed(&all)
    };
    let end = tokens(1, 2, 3, &[(42, Some(1))]);
    let after = tokens(1, 2, 4, &[(43, None)]);
    // The count of tokens stands after request, epoch, delivered and first.
    let many = patched(&two, 40, &[0xff; 4]);
    let flag = patched(&two, 48, &[2]);
    let stray = patched(&two, 49, &[9]);
    vec![
        seed("accept.nothing", []),
        seed("accept.open", with(&[])),
        seed(
            "accept.life",
            with(&[
                (TOKENS, two.clone()),
                (FLOOR, floor(2, 1)),
                (TOKENS, tokens(2, 2, 3, &[(42, Some(0))])),
                (FORGET, vec![7; 16]),
            ]),
        ),
        seed(
            "accept.restated-in-two",
            with(&[
                (TOKENS, two.clone()),
                (RESTATE, restate(1, 1, false, &[(40, None)])),
                (RESTATE, restate(1, 2, true, &[(41, None)])),
            ]),
        ),
        seed(
            "accept.orphan-restated",
            framed(&[
                (FLOOR, floor(2, 1)),
                (RESTATE, restate(2, 1, true, &[(40, None)])),
            ]),
        ),
        seed("orphan.floor", framed(&[(FLOOR, floor(2, 1))])),
        seed("orphan.tokens", framed(&[(TOKENS, two.clone())])),
        seed("order.twice", with(std::slice::from_ref(&open))),
        seed("order.kind", with(&[(9, vec![7; 16])])),
        seed("order.floor", with(&[(FLOOR, floor(1, 0))])),
        seed(
            "order.gap",
            with(&[(TOKENS, tokens(1, 0, 2, &[(40, None)]))]),
        ),
        seed(
            "order.restated-otherwise",
            with(&[
                (TOKENS, two.clone()),
                (RESTATE, restate(1, 1, true, &[(40, None), (99, None)])),
            ]),
        ),
        seed(
            "refused-gap.restate",
            with(&[(RESTATE, restate(1, 5, true, &[]))]),
        ),
        seed(
            "refused-fenced",
            with(&[(FLOOR, floor(2, 0)), (TOKENS, two.clone())]),
        ),
        seed(
            "refused-above-floor",
            with(&[(TOKENS, tokens(2, 0, 1, &[(40, None)]))]),
        ),
        seed(
            "refused-beyond-log.tokens",
            with(&[(TOKENS, tokens(1, 1, 1, &[(40, None)]))]),
        ),
        seed("refused-beyond-log.floor", with(&[(FLOOR, floor(2, 9))])),
        seed(
            "refused-finished",
            with(&[
                (TOKENS, two.clone()),
                (TOKENS, end.clone()),
                (TOKENS, after),
            ]),
        ),
        seed(
            "refused-finished.inside",
            with(&[(TOKENS, tokens(1, 0, 1, &[(40, Some(0)), (41, None)]))]),
        ),
        seed("name.owner", framed(&[(OPEN, patched(&open.1, 33, b" "))])),
        seed("range.flag", with(&[(TOKENS, flag)])),
        seed("range.finish", with(&[(TOKENS, stray)])),
        seed("truncated.count", with(&[(TOKENS, many)])),
        seed("truncated.id", framed(&[(OPEN, vec![7; 15])])),
        seed("truncated.tokens", with(&[(TOKENS, shorter(&two))])),
        seed("trailing.tokens", with(&[(TOKENS, longer(&two))])),
        seed("trailing.forget", with(&[(FORGET, vec![7; 17])])),
    ]
}
