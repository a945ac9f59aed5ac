//! The route record.

use super::{Target, longer, patched, seed, shorter};
use moonlivekv::id::*;
use moonlivekv::route::*;

pub const TARGET: Target = Target {
    name: "route_record",
    run,
    outcomes: OUTCOMES,
    seeds,
};

pub(super) const OUTCOMES: &[&str] = &[
    "accept",
    "name",
    "range",
    "trailing",
    "truncated",
    "version",
];

pub(super) fn label(e: &DecodeError) -> &'static str {
    match e {
        DecodeError::Truncated(_) => "truncated",
        DecodeError::Trailing(_) => "trailing",
        DecodeError::Version(_) => "version",
        DecodeError::Range(_) => "range",
        DecodeError::Name => "name",
    }
}

fn run(data: &[u8]) -> &'static str {
    match RouteRecord::decode(data) {
        Ok(record) => {
            assert_eq!(record.encode(), data, "a second spelling was accepted");
            "accept"
        }
        Err(e) => label(&e),
    }
}

pub(super) fn worker(name: &str) -> WorkerRef {
    WorkerRef {
        id: WorkerId::new(name).expect("a plain name"),
        incarnation: Incarnation(0xfeed),
    }
}

pub(super) fn intent() -> Intent {
    Intent {
        migration_epoch: MigrationEpoch(4),
        generation: RouteGeneration(9),
        owner_epoch: OwnerEpoch(2),
        driver: 77,
        src: worker("w1"),
        dst: worker("w2"),
    }
}

pub(super) fn certificate() -> FenceCertificate {
    FenceCertificate {
        request: RequestId([3; 16]),
        migration_epoch: MigrationEpoch(4),
        owner_epoch: OwnerEpoch(2),
        src: worker("w1"),
        seal: 17,
        kv_len: 280,
        set_digest: [5; 32],
        control: ControlSeal {
            hash: [6; 16],
            offset: 17,
            owner_epoch: OwnerEpoch(2),
        },
    }
}

fn seeds() -> Vec<super::Seed> {
    let record = |intent, outcome: Option<Outcome>| {
        RouteRecord {
            request: RequestId([3; 16]),
            generation: RouteGeneration(9),
            owner: worker("w1"),
            owner_epoch: OwnerEpoch(2),
            origin: Origin::Migrated(MigrationEpoch(3)),
            phase: RoutePhase::Serving,
            migration_epoch: MigrationEpoch(4),
            intent,
            last: outcome.map(|outcome| Decision {
                migration_epoch: MigrationEpoch(3),
                outcome,
            }),
        }
        .encode()
    };
    let good = record(Some(intent()), Some(Outcome::Committed(certificate())));
    let (by, cause) = (Party::Destination, Cause::Timeout);
    let plain = record(None, None);
    vec![
        seed("accept.committed", good.clone()),
        seed(
            "accept.aborted",
            record(None, Some(Outcome::Aborted { by, cause })),
        ),
        seed("accept.superseded", record(None, Some(Outcome::Superseded))),
        seed("accept.plain", plain.clone()),
        seed("version", patched(&good, 0, b"XXXX")),
        seed("name.empty", patched(&good, 28, &[0])),
        seed("name.space", patched(&good, 29, b" ")),
        seed("range.flag", patched(&plain, plain.len() - 1, &[2])),
        seed("trailing", longer(&good)),
        seed("truncated", shorter(&good)),
        seed("truncated.nothing", []),
    ]
}
