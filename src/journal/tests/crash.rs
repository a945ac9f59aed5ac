//! Every crash point of random histories, on a disk that forgets what a real one may.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

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
