use super::*;
use crate::id::{ErrorKind, Incarnation, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use crate::wal::WalError;
use crate::wal::sim::{Fault, SimDir, SimOp};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn small() -> JournalOptions {
    JournalOptions {
        window: Duration::ZERO,
        max_append: 4 << 10,
        segment_bytes: 0,
        ..Default::default()
    }
}

fn open(dir: &SimDir) -> Journal {
    try_open(dir).unwrap()
}

fn try_open(dir: &SimDir) -> Result<Journal, JournalError> {
    Journal::open_dir(Arc::new(dir.clone()), small())
}

fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

fn worker(n: u64) -> WorkerRef {
    WorkerRef {
        id: WorkerId::new(format!("w{n}")).unwrap(),
        incarnation: Incarnation(n),
    }
}

fn epoch(n: u64) -> OwnerEpoch {
    OwnerEpoch(n)
}

fn raise(journal: &Journal, request: RequestId, n: u64) -> Tail {
    journal.raise_floor(request, epoch(n), &worker(n)).unwrap()
}

/// Token `seq` of a request, the same each time.
fn token(request: RequestId, seq: u64, len: usize) -> (u32, Vec<u8>) {
    let token = seq as u32 * 31 + u32::from(request.0[0]);
    (
        token,
        (0..len).map(|i| (seq as usize * 7 + i) as u8).collect(),
    )
}

fn append(
    journal: &Journal,
    request: RequestId,
    n: u64,
    first: u64,
    many: u64,
    len: usize,
) -> Result<Appended, JournalError> {
    let tokens: Vec<_> = (first..first + many)
        .map(|seq| token(request, seq, len))
        .collect();
    let tokens: Vec<_> = tokens
        .iter()
        .map(|(token, text)| TokenRef {
            token: *token,
            text,
            finish: None,
        })
        .collect();
    journal.append(request, epoch(n), first, &tokens)
}

fn refusal(result: Result<Appended, JournalError>) -> Refusal {
    match result {
        Err(JournalError::Refused(refusal)) => refusal,
        other => panic!("a refusal was due: {other:?}"),
    }
}

#[test]
fn tokens_are_numbered_without_gaps_and_belong_to_the_floor() {
    let journal = open(&SimDir::new());
    let a = id(1);
    assert_eq!(
        refusal(append(&journal, a, 1, 1, 1, 2)),
        Refusal::Unknown(a)
    );
    let tail = raise(&journal, a, 3);
    assert_eq!(
        (
            tail.status.journaled,
            tail.status.delivered,
            tail.undelivered.len()
        ),
        (0, 0, 0)
    );
    assert_eq!(
        append(&journal, a, 3, 1, 4, 2).unwrap(),
        Appended {
            through: 4,
            fresh: 4
        }
    );
    let (floor, next) = (epoch(3), 5);
    for got in [0, 6, 100, u64::MAX] {
        assert_eq!(
            refusal(append(&journal, a, 3, got, 0, 2)),
            Refusal::Gap { next, got }
        );
    }
    let epoch2 = refusal(append(&journal, a, 2, 5, 1, 2));
    assert_eq!(
        epoch2,
        Refusal::Fenced {
            epoch: epoch(2),
            floor
        }
    );
    // Fenced whatever it brings, an equal duplicate included.
    assert!(matches!(
        refusal(append(&journal, a, 2, 1, 1, 2)),
        Refusal::Fenced { .. }
    ));
    let epoch4 = refusal(append(&journal, a, 4, 5, 1, 2));
    assert_eq!(
        epoch4,
        Refusal::AboveFloor {
            epoch: epoch(4),
            floor
        }
    );
    assert_eq!(journal.status(a).unwrap().unwrap().journaled, 4);
    let too_large = append(&journal, a, 3, 5, 1, 5000);
    assert!(matches!(
        refusal(too_large),
        Refusal::TooLarge { max: 4096, .. }
    ));
}

#[test]
fn an_equal_duplicate_is_dropped_and_an_unequal_one_is_an_integrity_alarm() {
    let journal = open(&SimDir::new());
    let a = id(1);
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 5, 3).unwrap();
    assert_eq!(
        append(&journal, a, 1, 1, 5, 3).unwrap(),
        Appended {
            through: 5,
            fresh: 0
        }
    );
    assert_eq!(
        append(&journal, a, 1, 3, 6, 3).unwrap(),
        Appended {
            through: 8,
            fresh: 3
        }
    );
    let (right, text) = token(a, 8, 3);
    let last = TokenRef {
        token: right,
        text: &text,
        finish: None,
    };
    for wrong in [
        TokenRef {
            token: right + 1,
            ..last
        },
        TokenRef {
            text: b"xyz",
            ..last
        },
        TokenRef {
            text: &text[..2],
            ..last
        },
        TokenRef {
            finish: Some(0),
            ..last
        },
    ] {
        let got = journal.append(a, epoch(1), 8, &[wrong]).unwrap_err();
        assert_eq!(got, JournalError::Refused(Refusal::Conflict { seq: 8 }));
        assert_eq!(got.kind(), ErrorKind::Integrity);
    }
    // Nothing of a refused append stays, not even its sound beginning.
    let (nine, nine_text) = token(a, 9, 3);
    let nine = TokenRef {
        token: nine,
        text: &nine_text,
        finish: None,
    };
    let forked = [TokenRef { token: 0, ..last }, nine];
    assert!(journal.append(a, epoch(1), 8, &forked).is_err());
    assert_eq!(journal.status(a).unwrap().unwrap().journaled, 8);
}

#[test]
fn nothing_follows_the_last_token() {
    let dir = SimDir::new();
    let journal = open(&dir);
    let a = id(1);
    raise(&journal, a, 1);
    let end = TokenRef {
        token: 1,
        text: b"",
        finish: Some(255),
    };
    let more = TokenRef {
        token: 2,
        text: b"",
        finish: None,
    };
    let got = journal.append(a, epoch(1), 1, &[end, more]);
    assert_eq!(refusal(got), Refusal::Finished { seq: 1 });
    journal.append(a, epoch(1), 1, &[more, end]).unwrap();
    assert_eq!(
        refusal(journal.append(a, epoch(1), 3, &[more])),
        Refusal::Finished { seq: 2 }
    );
    assert_eq!(journal.append(a, epoch(1), 2, &[end]).unwrap().fresh, 0);
    drop(journal);
    let journal = open(&dir);
    assert!(journal.status(a).unwrap().unwrap().finished);
    assert_eq!(journal.read(a, 2, 9).unwrap()[0].finish, Some(255));
}

#[test]
fn a_floor_only_rises_and_returns_the_tail_that_was_not_delivered() {
    let dir = SimDir::new();
    let a = id(9);
    let journal = open(&dir);
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 10, 4).unwrap();
    journal.delivered(a, 7).unwrap();
    let tail = raise(&journal, a, 5);
    assert_eq!((tail.status.journaled, tail.status.delivered), (10, 7));
    assert_eq!(
        tail.status.floor,
        Floor {
            epoch: epoch(5),
            owner: worker(5)
        }
    );
    let seqs: Vec<u64> = tail.undelivered.iter().map(|e| e.seq).collect();
    assert_eq!(seqs, [8, 9, 10]);
    assert_eq!(tail.undelivered[0].text, token(a, 8, 4).1);
    for journal in [journal, open(&dir)] {
        // Again is no error; lower, or by another, is.
        assert_eq!(raise(&journal, a, 5), tail);
        let lower = journal.raise_floor(a, epoch(4), &worker(4)).unwrap_err();
        assert!(matches!(
            lower,
            JournalError::Refused(Refusal::Fenced { .. })
        ));
        let taken = journal.raise_floor(a, epoch(5), &worker(6)).unwrap_err();
        assert!(
            matches!(&taken, JournalError::Refused(Refusal::FloorTaken { owner, .. }) if owner == "w5#5")
        );
        assert!(matches!(
            refusal(append(&journal, a, 1, 11, 1, 4)),
            Refusal::Fenced { .. }
        ));
    }
    append(&open(&dir), a, 5, 11, 1, 4).unwrap();
}

#[test]
fn what_is_delivered_was_journaled_before() {
    let dir = SimDir::new();
    let a = id(1);
    let journal = open(&dir);
    assert!(matches!(
        journal.delivered(a, 0),
        Err(JournalError::Refused(Refusal::Unknown(_)))
    ));
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 3, 1).unwrap();
    let beyond = journal.delivered(a, 4).unwrap_err();
    assert_eq!(
        beyond,
        JournalError::Refused(Refusal::BeyondLog {
            seq: 4,
            journaled: 3
        })
    );
    journal.delivered(a, 3).unwrap();
    journal.delivered(a, 1).unwrap();
    assert_eq!(journal.status(a).unwrap().unwrap().delivered, 3);
    append(&journal, a, 1, 4, 1, 1).unwrap();
    journal.delivered(a, 4).unwrap();
    drop(journal);
    // The cursor travels with the next tokens: older after a crash, never newer.
    assert_eq!(open(&dir).status(a).unwrap().unwrap().delivered, 3);
}

#[test]
fn an_append_costs_one_write_and_no_flush() {
    let dir = SimDir::new();
    let journal = open(&dir);
    let a = id(1);
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 1, 5).unwrap();
    journal.maintain().unwrap();
    let before = dir.ops();
    for seq in 2..20 {
        append(&journal, a, 1, seq, 1, 5).unwrap();
        journal.delivered(a, seq).unwrap();
    }
    let trace = dir.trace();
    assert_eq!(trace.len() - before, 18);
    assert!(
        trace[before..]
            .iter()
            .all(|op| matches!(op, SimOp::Write { .. }))
    );
    journal.maintain().unwrap();
    assert!(matches!(
        dir.trace()[before + 18..],
        [SimOp::Sync { failed: false, .. }]
    ));
}

#[test]
fn a_death_of_the_process_loses_nothing_and_of_the_power_one_window() {
    let dir = SimDir::new();
    let journal = open(&dir);
    let a = id(1);
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 5, 5).unwrap();
    journal.flush().unwrap();
    append(&journal, a, 1, 6, 5, 5).unwrap();
    let ops = dir.ops();
    let dead = open(&dir.after_process_death(ops));
    assert_eq!(dead.status(a).unwrap().unwrap().journaled, 10);
    let dark = open(&dir.after_power_loss(ops, &mut || false));
    assert_eq!(dark.status(a).unwrap().unwrap().journaled, 5);
    // A floor is durable on return, and with it all that stands before it.
    raise(&journal, a, 2);
    let dark = open(&dir.after_power_loss(dir.ops(), &mut || false));
    let status = dark.status(a).unwrap().unwrap();
    assert_eq!((status.journaled, status.floor.epoch), (10, epoch(2)));
}

#[test]
fn a_write_cut_at_any_byte_drops_that_append_only() {
    for cut in 0..300 {
        let dir = SimDir::new();
        let journal = open(&dir);
        let a = id(1);
        raise(&journal, a, 1);
        append(&journal, a, 1, 1, 3, 3).unwrap();
        dir.inject(move |_| Fault::Cut(cut));
        let got = append(&journal, a, 1, 4, 5, 40).unwrap_err();
        assert!(matches!(got, JournalError::Poisoned { .. }));
        dir.heal();
        drop(journal);
        let journal = open(&dir);
        assert_eq!(
            journal.status(a).unwrap().unwrap().journaled,
            3,
            "cut at {cut}"
        );
        append(&journal, a, 1, 4, 1, 3).unwrap();
        assert_eq!(open(&dir).read(a, 1, 9).unwrap().len(), 4, "cut at {cut}");
    }
}

#[test]
fn each_flipped_bit_is_refused_with_its_place() {
    let dir = SimDir::new();
    let journal = open(&dir);
    raise(&journal, id(1), 1);
    append(&journal, id(1), 1, 1, 3, 3).unwrap();
    journal.flush().unwrap();
    append(&journal, id(1), 1, 4, 1, 3).unwrap();
    drop(journal);
    let name = "journal-0000000000000001.log";
    let sound = dir.content(name).unwrap();
    let used = sound.iter().rposition(|&b| b != 0).unwrap() + 1;
    for bit in 0..used * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        dir.set_content(name, bytes);
        let got = try_open(&dir).map(|j| j.requests());
        let Err(JournalError::Log(e)) = got else {
            panic!("bit {bit}: {got:?}")
        };
        assert!(matches!(
            e,
            WalError::Damaged { .. } | WalError::Foreign { .. }
        ));
    }
}

#[test]
fn a_failed_write_or_flush_ends_the_journal() {
    for failing_flush in [false, true] {
        let dir = SimDir::new();
        let journal = open(&dir);
        let a = id(1);
        raise(&journal, a, 1);
        dir.inject(move |op| match op {
            SimOp::Sync { .. } if failing_flush => Fault::Fail(EIO),
            SimOp::Write { .. } if !failing_flush => Fault::Fail(EIO),
            _ => Fault::None,
        });
        let poisoned =
            |e: JournalError| assert!(matches!(e, JournalError::Poisoned { .. }), "{e:?}");
        if failing_flush {
            append(&journal, a, 1, 1, 1, 1).unwrap();
            poisoned(journal.raise_floor(a, epoch(2), &worker(2)).unwrap_err());
        } else {
            poisoned(append(&journal, a, 1, 1, 1, 1).unwrap_err());
        }
        dir.heal();
        poisoned(append(&journal, a, 1, 2, 1, 1).unwrap_err());
        poisoned(journal.maintain().unwrap_err());
        poisoned(journal.status(a).unwrap_err());
        drop(journal);
        let status = open(&dir).status(a).unwrap().unwrap();
        assert_eq!(status.journaled, u64::from(failing_flush));
    }
}

#[test]
fn a_full_disk_refuses_before_anything_is_accepted_and_heals() {
    let dir = SimDir::new();
    let journal = open(&dir);
    let a = id(1);
    raise(&journal, a, 1);
    dir.inject(|op| match op {
        SimOp::Create { .. } => Fault::Fail(ENOSPC),
        _ => Fault::None,
    });
    let mut seq = 1;
    let error = loop {
        match append(&journal, a, 1, seq, 1, 1000) {
            Ok(_) => seq += 1,
            Err(e) => break e,
        }
    };
    assert!(
        matches!(error, JournalError::Unavailable { .. }),
        "{error:?}"
    );
    assert_eq!(journal.status(a).unwrap().unwrap().journaled, seq - 1);
    assert!(matches!(
        journal.maintain(),
        Err(JournalError::Unavailable { .. })
    ));
    dir.heal();
    append(&journal, a, 1, seq, 1, 1000).unwrap();
    journal.maintain().unwrap();
    assert_eq!(open(&dir).status(a).unwrap().unwrap().journaled, seq);
    // And the journal's own bound.
    let options = JournalOptions {
        max_bytes: 5000,
        ..small()
    };
    let journal = Journal::open_dir(Arc::new(SimDir::new()), options).unwrap();
    raise(&journal, a, 1);
    append(&journal, a, 1, 1, 3, 1000).unwrap();
    let over = append(&journal, a, 1, 4, 2, 1000).unwrap_err();
    assert!(matches!(over, JournalError::Unavailable { .. }), "{over:?}");
    journal.forget(a).unwrap();
    raise(&journal, a, 2);
    append(&journal, a, 2, 1, 3, 1000).unwrap();
}

#[test]
fn old_segments_go_while_a_long_request_lives() {
    let dir = SimDir::new();
    let journal = open(&dir);
    let long = id(200);
    let (mut floor, mut seq) = (1, 0);
    raise(&journal, long, floor);
    for round in 0..120 {
        let short = id(round);
        raise(&journal, short, 1);
        append(&journal, short, 1, 1, 3, 1000).unwrap();
        append(&journal, long, floor, seq + 1, 5, 40).unwrap();
        seq += 5;
        if round % 7 == 0 {
            floor += 1;
            raise(&journal, long, floor);
        }
        journal.forget(short).unwrap();
        journal.maintain().unwrap();
        let stats = journal.stats();
        assert!(
            stats.segments <= 8 + 3 * stats.bytes / (16 << 10),
            "{stats:?}"
        );
    }
    assert!(journal.stats().restated > 0, "{:?}", journal.stats());
    let names = crate::wal::Dir::list(&dir).unwrap();
    let logs = names.iter().filter(|n| n.ends_with(".log")).count();
    assert_eq!(logs as u64, journal.stats().segments);
    let want = journal.read(long, 1, u64::MAX).unwrap();
    assert_eq!(want.len() as u64, seq);
    let again = open(&dir);
    assert_eq!(again.requests().unwrap().len(), 1);
    assert_eq!(again.read(long, 1, u64::MAX).unwrap(), want);
}

#[test]
fn a_missing_segment_is_damage() {
    let dir = SimDir::new();
    let journal = open(&dir);
    raise(&journal, id(1), 1);
    for seq in 0..60 {
        append(&journal, id(1), 1, 1 + seq, 1, 1000).unwrap();
    }
    let segments = journal.stats().segments;
    assert!(segments >= 4);
    drop(journal);
    for lost in 1..segments {
        let dir = dir.after_process_death(dir.ops());
        crate::wal::Dir::remove(&dir, &format!("journal-{lost:016x}.log")).unwrap();
        let got = try_open(&dir).map(|j| j.requests());
        assert!(
            matches!(got, Err(JournalError::Log(WalError::Damaged { .. }))),
            "{got:?}"
        );
    }
}

#[test]
fn threads_append_and_raise_beside_each_other_and_beside_upkeep() {
    let dir = tempfile::tempdir().unwrap();
    let options = JournalOptions {
        window: Duration::from_millis(1),
        ..small()
    };
    let journal = Journal::open(dir.path(), options.clone()).unwrap();
    std::thread::scope(|scope| {
        for n in 1..=4u8 {
            let journal = &journal;
            scope.spawn(move || {
                for life in 1..=6u64 {
                    raise(journal, id(n), life);
                    for seq in 1..=40 {
                        append(journal, id(n), life, seq, 1, 100).unwrap();
                        journal.delivered(id(n), seq).unwrap();
                    }
                    let tail = raise(journal, id(n), life + 1);
                    assert_eq!((tail.status.delivered, tail.undelivered.len()), (40, 0));
                    if life < 6 {
                        journal.forget(id(n)).unwrap();
                    }
                }
            });
        }
    });
    let flushes = journal.stats().flushes;
    let begun = Instant::now();
    append(&journal, id(1), 7, 41, 1, 1).unwrap();
    while journal.stats().flushes == flushes {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "nothing is flushed by the clock"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let want = journal.requests().unwrap();
    assert!(journal.stats().segments <= 8, "{:?}", journal.stats());
    drop(journal);
    let again = Journal::open(dir.path(), options).unwrap();
    let strip = |all: Vec<(RequestId, Status)>| -> Vec<_> {
        all.into_iter()
            .map(|(id, s)| (id, s.floor, s.journaled))
            .collect()
    };
    assert_eq!(strip(again.requests().unwrap()), strip(want));
}

/// What a journal should hold: floor, owner's number, tokens.
type Model = BTreeMap<RequestId, (u64, u64)>;

fn model_of(journal: &Journal, len: usize) -> Model {
    let all = journal.requests().unwrap();
    all.into_iter()
        .map(|(id, status)| {
            assert!(status.delivered <= status.journaled);
            for entry in journal.read(id, 1, u64::MAX).unwrap() {
                assert_eq!((entry.token, entry.text), token(id, entry.seq, len));
            }
            assert_eq!(status.floor.owner, worker(status.floor.epoch.0));
            (id, (status.floor.epoch.0, status.journaled))
        })
        .collect()
}

#[derive(Debug, Clone, Copy)]
enum Act {
    Append(u8, u64),
    Raise(u8),
    Deliver(u8),
    Forget(u8),
    Maintain,
}

fn act() -> impl Strategy<Value = Act> {
    let who = || 0u8..4;
    prop_oneof![
        8 => (who(), 1u64..8).prop_map(|(w, n)| Act::Append(w, n)),
        2 => who().prop_map(Act::Raise),
        2 => who().prop_map(Act::Deliver),
        1 => who().prop_map(Act::Forget),
        2 => Just(Act::Maintain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// At every crash point: after a death of the process all that returned is there; after a power
    /// loss all that was flushed; what is there is the state after some call, never a mixture.
    #[test]
    fn every_crash_point_leaves_the_state_after_some_call(
        acts in prop::collection::vec(act(), 20..90),
        keeps in prop::collection::vec(any::<bool>(), 61),
    ) {
        const LEN: usize = 350;
        let dir = SimDir::new();
        let journal = open(&dir);
        // The model after each call, operations when it returned, and whether it was flushed then.
        let mut models = vec![(Model::new(), dir.ops(), true)];
        for act in acts {
            let mut model = models.last().unwrap().0.clone();
            let mut flushed = false;
            match act {
                Act::Append(who, many) => {
                    if let Some((floor, journaled)) = model.get_mut(&id(who)) {
                        append(&journal, id(who), *floor, *journaled + 1, many, LEN).unwrap();
                        *journaled += many;
                    }
                }
                Act::Raise(who) => {
                    let now = model.entry(id(who)).or_insert((0, 0));
                    now.0 += 1;
                    raise(&journal, id(who), now.0);
                    flushed = true;
                }
                Act::Deliver(who) => {
                    if let Some(&(_, journaled)) = model.get(&id(who)) {
                        journal.delivered(id(who), journaled / 2).unwrap();
                    }
                }
                Act::Forget(who) => {
                    journal.forget(id(who)).unwrap();
                    model.remove(&id(who));
                }
                Act::Maintain => {
                    journal.maintain().unwrap();
                    flushed = true;
                }
            }
            models.push((model, dir.ops(), flushed));
        }
        prop_assert_eq!(&model_of(&journal, LEN), &models.last().unwrap().0);
        let mut draws = keeps.iter().cycle();
        for ops in models[0].1..=dir.ops() {
            let returned = models.iter().rposition(|m| m.1 <= ops).unwrap();
            let flushed = models.iter().rposition(|m| m.1 <= ops && m.2).unwrap();
            let newest = (returned + 1).min(models.len() - 1);
            let dead = dir.after_process_death(ops);
            let found = model_of(&open(&dead), LEN);
            prop_assert!(
                models[returned..=newest].iter().any(|m| m.0 == found),
                "process death at {}: {:?}", ops, found
            );
            for keep in 0..2 {
                let dark = dir.after_power_loss(ops, &mut || keep == 1 && *draws.next().unwrap());
                let found = model_of(&open(&dark), LEN);
                prop_assert!(
                    models[flushed..=newest].iter().any(|m| m.0 == found),
                    "power loss at {}: {:?}", ops, found
                );
            }
        }
    }

    #[test]
    fn any_bytes_are_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for kind in 0..7 {
            let _ = replay_records([(kind, &bytes[..]), (kind, &bytes[..])]);
        }
    }
}
