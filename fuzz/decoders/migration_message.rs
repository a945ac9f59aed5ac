//! The messages of a migration, the fence's among them.

use super::route_record::{OUTCOMES, certificate, intent, label};
use super::{Target, longer, patched, seed, shorter};
use moonlivekv::id::*;
use moonlivekv::migrate::msg::{Body, Emission, Msg, Offer, PageClaim, Push};
use moonlivekv::route::Cause;

pub const TARGET: Target = Target {
    name: "migration_message",
    run,
    outcomes: OUTCOMES,
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let whole = Msg::decode(data);
    if let Ok((msg, payload)) = Msg::decode_prefix(data) {
        let head = &data[..data.len() - payload.len()];
        assert_eq!(msg.encode(), head, "a second spelling was accepted");
        assert_eq!(whole.is_ok(), payload.is_empty());
    } else {
        assert!(whole.is_err());
    }
    match whole {
        Ok(_) => "accept",
        Err(e) => label(&e),
    }
}

fn seeds() -> Vec<super::Seed> {
    let emission = |seq| Emission {
        seq,
        token: 42,
        text: b"ab".to_vec(),
        finish: None,
    };
    let last = Emission {
        finish: Some(1),
        ..emission(9)
    };
    let claim = |page| PageClaim {
        replica: 0,
        page,
        valid: 16,
        digest: [8; 32],
    };
    let push = Push {
        certificate: certificate(),
        tail_from: 272,
        replicas: vec![[5; 32]],
        control_bytes: 700,
        tail_bytes: 4096,
        tokens: vec![emission(16), emission(17)],
    };
    let offer = Offer {
        from: 0,
        to: 32,
        claims: vec![claim(0), claim(1)],
    };
    let owner_epoch = OwnerEpoch(2);
    let bodies = [
        ("prepare", Body::Prepare { intent: intent() }),
        ("prepared", Body::Prepared),
        ("reserve", Body::Reserve { intent: intent() }),
        (
            "ready",
            Body::Ready {
                replicas: 1,
                align_tokens: 16,
            },
        ),
        ("offer", Body::Offer(offer)),
        ("verified", Body::Verified { through: 32 }),
        (
            "progress",
            Body::Progress {
                accepted: 40,
                verified: 32,
                converged: true,
            },
        ),
        ("go", Body::Go),
        ("push", Body::Push(push)),
        (
            "cancel",
            Body::Cancel {
                cause: Cause::Cancelled,
            },
        ),
        (
            "refuse",
            Body::Refuse {
                cause: Cause::Timeout,
            },
        ),
        ("outcome", Body::Outcome),
        (
            "emit",
            Body::Emit {
                owner_epoch,
                tokens: vec![emission(8), last],
            },
        ),
        (
            "accepted",
            Body::Accepted {
                owner_epoch,
                through: 9,
            },
        ),
        (
            "fenced",
            Body::Fenced {
                floor: OwnerEpoch(3),
            },
        ),
        (
            "rebuild",
            Body::Rebuild {
                owner_epoch,
                journaled: 9,
            },
        ),
    ];
    let encode = |body| {
        Msg {
            request: RequestId([3; 16]),
            epoch: MigrationEpoch(4),
            body,
        }
        .encode()
    };
    let mut all: Vec<_> = bodies
        .into_iter()
        .map(|(name, body)| seed(&format!("accept.{name}"), encode(body)))
        .collect();
    let prepare = all[0].1.clone();
    // magic 4, request 16, epoch 8, kind 1; an intent begins with four numbers, then a name.
    all.extend([
        seed("version", patched(&prepare, 0, b"MLM9")),
        seed("range.kind", patched(&prepare, 28, &[200])),
        seed("name", patched(&prepare, 29 + 32 + 1, b"/")),
        seed("trailing", longer(&prepare)),
        seed("truncated", shorter(&prepare)),
        seed("truncated.nothing", []),
    ]);
    all
}
