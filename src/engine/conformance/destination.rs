//! What a destination engine promises: stages, freezing, arming, activation.

use super::flow::*;
use super::{Check, Clause, Failed, Pair, Plan};
use crate::control_state::{Blob, Claim, ControlState, Refusal, RngKind};
use crate::engine::adapter::{
    Activated, Activation, AdapterError, EngineAdapter, ImportSpec, Manifest, StageState,
};
use crate::id::{MigrationEpoch, OwnerEpoch};

pub(super) const CLAUSES: &[Clause] = &[
    Clause {
        id: "stage-is-unreachable",
        text: "Until it is activated a stage shares no block with anything that computes, its request \
               does not exist, and it emits nothing, armed or not.",
        check: stage_is_unreachable,
    },
    Clause {
        id: "digests-read-resident-memory",
        text: "A digest is that of the bytes in the engine's own memory at the time of the call.",
        check: digests_read_resident_memory,
    },
    Clause {
        id: "hashed-slots-are-frozen",
        text: "Once a slot's digest was given, writing to it is refused.",
        check: hashed_slots_are_frozen,
    },
    Clause {
        id: "table-survives-commit",
        text: "commit_import attaches the blocks that were verified, in order of position, and closes \
               the stage for writing.",
        check: table_survives_commit,
    },
    Clause {
        id: "token-log-is-exact",
        text: "Tokens are appended without gap or change, and a control state that does not pin them \
               is refused.",
        check: token_log_is_exact,
    },
    Clause {
        id: "control-is-re-exported",
        text: "What the destination exports after import equals, byte for byte, what the source \
               exported.",
        check: control_is_re_exported,
    },
    Clause {
        id: "arm-needs-digests",
        text: "A request with a slot that was never hashed here is not armed.",
        check: arm_needs_digests,
    },
    Clause {
        id: "arm-checks-the-replay",
        text: "Arming replays grammar, penalties and detokenizer, and refuses a control state that the \
               replay contradicts.",
        check: arm_checks_the_replay,
    },
    Clause {
        id: "activate-once",
        text: "An armed request starts once, under a higher owner epoch, emits again what it is asked \
               to, and cannot be disarmed any more.",
        check: activate_once,
    },
    Clause {
        id: "continues-identically",
        text: "A migrated request produces the tokens and the control state of a twin that never moved.",
        check: continues_identically,
    },
    Clause {
        id: "mismatch-is-refused",
        text: "Another profile, model or generator is refused by type before anything is reserved.",
        check: mismatch_is_refused,
    },
];

fn stage_is_unreachable(pair: &mut Pair) -> Check {
    let mut m = migrate(pair, &PLAN, 9, Upto::Reserved)?;
    let room = m.spec.max_tokens;
    for upto in [Upto::Hashed, Upto::Committed, Upto::Loaded, Upto::Armed] {
        if upto == Upto::Hashed {
            advance(&mut m, upto)?;
        } else {
            step_to(&m, upto)?;
        }
        refused(m.destination.pin(REQUEST, EPOCH), "pinning a staged request", |e| {
            matches!(e, AdapterError::Unknown(_))
        })?;
        refused(
            m.destination.hold(REQUEST, EPOCH, soon()),
            "holding a staged request",
            |e| matches!(e, AdapterError::Unknown(_)),
        )?;
        for _ in 0..3 {
            pair.destination.step();
        }
        ensure!(
            pair.destination.emitted(REQUEST).is_empty(),
            "a request that is only {upto:?} emitted"
        );
    }
    // A request with the same prompt must find nothing of the stage, neither as prefix nor as room.
    start(&mut *pair.destination, OTHER, &PLAN)?;
    decode(&mut *pair.destination, OTHER, 9)?;
    let twin = m.destination.pin(OTHER, EPOCH).said("pin of a local request")?;
    let upto = m.destination.seal_through(twin.pin).said("seal_through")?.stable_len;
    for group in groups(&*m.destination) {
        let live = twin.first_live.iter().find(|(g, _)| *g == group).map_or(0, |(_, t)| *t);
        let staged = m.destination.table(m.stage.into(), group, live..room).said("table")?;
        let local = m.destination.table(twin.pin.into(), group, live..upto).said("table")?;
        let pool = m.destination.pool(group).said("pool")?.pool;
        for block in &staged {
            ensure!(!local.contains(block), "block {block} of a stage is in a running request");
            let refs = pool.refs(*block).map_err(|e| e.to_string())?;
            ensure!(refs == 1, "block {block} of a stage has {refs} owners");
        }
    }
    Ok(())
}

/// One step further than the migration is.
fn step_to(m: &Migration, upto: Upto) -> Result<(), Failed> {
    match upto {
        Upto::Committed => m.destination.commit_import(m.stage, &m.manifest()).said("commit_import"),
        Upto::Loaded => m
            .destination
            .import_control(m.stage, &m.control.bytes, OWNER)
            .said("import_control"),
        Upto::Armed => m.destination.arm(m.stage).said("arm").map(|_| ()),
        _ => Ok(()),
    }
}

fn digests_read_resident_memory(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 17, Upto::Committed)?;
    let (live, kv_len) = (&m.pinned.first_live, m.boundary.kv_len);
    let size = page_tokens(&*m.destination);
    let ends = [
        (&*m.destination, m.stage.into(), "destination", &m.actual),
        (&*m.source, m.pinned.pin.into(), "source", &m.expected),
    ];
    for (adapter, view, end, known) in ends {
        for group in groups(adapter) {
            for token in [kv_len - 1, kv_len / 2] {
                flip_bit(adapter, view, group, token)?;
                let now = hash_all(adapter, view, live, kv_len)?;
                let page = token / size;
                let hit = |r: &&crate::engine::adapter::PageRow| {
                    r.group == group && u64::from(r.page) == page
                };
                ensure!(
                    known.iter().find(hit) != now.iter().find(hit),
                    "a bit flipped in resident memory of the {end} (token {token}) is not in the digest"
                );
                flip_bit(adapter, view, group, token)?;
                let back = hash_all(adapter, view, live, kv_len)?;
                ensure!(back == *known, "flipping the bit back does not restore the digest");
            }
        }
    }
    Ok(())
}

fn hashed_slots_are_frozen(pair: &mut Pair) -> Check {
    let mut m = migrate(pair, &PLAN, 17, Upto::Copied)?;
    let size = page_tokens(&*m.destination);
    let kv_len = m.boundary.kv_len;
    for group in groups(&*m.destination) {
        let first = m.pinned.first_live.iter().find(|(g, _)| *g == group).map_or(0, |(_, t)| *t);
        let page = first.div_ceil(size);
        let tokens = page * size..(page + 1) * size;
        drop(m.destination.stage_write(m.stage, group, tokens.clone()).said("stage_write")?);
        let mut out = crate::engine::adapter::PageDigests::new();
        m.destination
            .hash_pages(m.stage.into(), group, page as u32..page as u32 + 1, kv_len, &mut out)
            .said("hash_pages")?;
        for range in [tokens.clone(), tokens.start + 1..tokens.start + 2, tokens.start..kv_len] {
            refused(
                m.destination.stage_write(m.stage, group, range),
                "writing to a slot that was hashed",
                |e| matches!(e, AdapterError::Frozen { .. }),
            )?;
        }
        // Slots never hashed are still open, in the same page or block too.
        let open = tokens.end..kv_len;
        drop(m.destination.stage_write(m.stage, group, open).said("stage_write of open slots")?);
    }
    let mut out = crate::engine::adapter::PageDigests::new();
    let tail = kv_len - 1;
    m.destination.hash_tail(m.stage.into(), tail, &mut out).said("hash_tail")?;
    for group in groups(&*m.destination) {
        refused(
            m.destination.stage_write(m.stage, group, tail - 1..tail),
            "writing to a slot of the tail that was hashed",
            |e| matches!(e, AdapterError::Frozen { .. }),
        )?;
        drop(
            m.destination
                .stage_write(m.stage, group, tail..kv_len)
                .said("stage_write of the slot after the hashed tail")?,
        );
    }
    advance(&mut m, Upto::Hashed).or_else(|_| {
        // Copying again is refused by now, rightly; hashing the rest must still work.
        let rows = hash_all(&*m.destination, m.stage.into(), &m.pinned.first_live, kv_len)?;
        ensure!(rows == m.expected, "pages hashed in parts differ from the source's");
        Ok(())
    })
}

fn table_survives_commit(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 17, Upto::Hashed)?;
    let (destination, stage, kv_len) = (&*m.destination, m.stage, m.boundary.kv_len);
    let tables = || {
        groups(destination)
            .into_iter()
            .map(|g| {
                let live = m.pinned.first_live.iter().find(|(x, _)| *x == g).map_or(0, |(_, t)| *t);
                destination.table(stage.into(), g, live..kv_len).said("table")
            })
            .collect::<Result<Vec<_>, Failed>>()
    };
    let before = tables()?;
    let too_long = Manifest { kv_len: m.spec.max_tokens + 300, ..m.manifest() };
    refused(
        destination.commit_import(stage, &too_long),
        "committing more tokens than were reserved",
        |e| matches!(e, AdapterError::OutOfRange { .. }),
    )?;
    destination.commit_import(stage, &m.manifest()).said("commit_import")?;
    ensure!(tables()? == before, "the block table is another one after commit_import");
    destination.commit_import(stage, &m.manifest()).said("commit_import repeated")?;
    let other = Manifest { kv_len: kv_len - 1, ..m.manifest() };
    refused(
        destination.commit_import(stage, &other),
        "committing another manifest",
        |e| matches!(e, AdapterError::Conflict(_)),
    )?;
    for group in groups(destination) {
        refused(
            destination.stage_write(stage, group, kv_len - 1..kv_len),
            "writing to a committed stage",
            |e| matches!(e, AdapterError::StageState { .. } | AdapterError::Frozen { .. }),
        )?;
    }
    let rows = hash_all(destination, stage.into(), &m.pinned.first_live, kv_len)?;
    ensure!(rows == m.expected, "pages hash otherwise after commit_import");
    Ok(())
}

fn token_log_is_exact(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 9, Upto::Reserved)?;
    let (destination, stage) = (&*m.destination, m.stage);
    let log = m.source.token_log(m.pinned.pin.into(), 0).said("token_log")?;
    let part = m.source.token_log(m.pinned.pin.into(), 10).said("token_log from 10")?;
    ensure!(part == log[10..], "token_log from 10 is not the end of the log");
    destination.import_tokens(stage, 0, &log[..12]).said("import_tokens")?;
    destination
        .import_tokens(stage, 8, &log[8..16])
        .said("import_tokens that overlap")?;
    refused(
        destination.import_tokens(stage, 17, &log[17..]),
        "importing tokens after a gap",
        |e| matches!(e, AdapterError::OutOfRange { .. }),
    )?;
    refused(
        destination.import_tokens(stage, 3, &[log[3] ^ 1]),
        "importing another token for a known one",
        |e| matches!(e, AdapterError::Conflict(_)),
    )?;
    let held = destination.token_log(stage.into(), 0).said("token_log of the stage")?;
    ensure!(held == log[..16], "the stage's log is not what was imported");
    // One token short: the control state does not fit.
    destination
        .import_tokens(stage, 16, &log[16..log.len() - 1])
        .said("import_tokens")?;
    let start = m.pinned.first_live.iter().map(|(_, t)| *t).min().unwrap_or(0);
    copy(&*m.source, m.pinned.pin, destination, stage, &m.pinned.first_live, start..m.boundary.kv_len)?;
    hash_all(destination, stage.into(), &m.pinned.first_live, m.boundary.kv_len)?;
    destination.commit_import(stage, &m.manifest()).said("commit_import")?;
    refused(
        destination.import_control(stage, &m.control.bytes, OWNER),
        "a control state for a longer token log",
        |e| matches!(e, AdapterError::ReplayMismatch(_)),
    )?;
    let last = log.len() - 1;
    destination.import_tokens(stage, last as u64, &log[last..]).said("import_tokens")?;
    destination
        .import_control(stage, &m.control.bytes, OWNER)
        .said("import_control")?;
    Ok(())
}

fn control_is_re_exported(pair: &mut Pair) -> Check {
    for constrained in [true, false] {
        let plan = Plan { constrained, ..PLAN };
        let request = if constrained { OTHER } else { REQUEST };
        match start(&mut *pair.source, request, &plan) {
            Err(Failed::Skipped(_)) if constrained => continue,
            other => other?,
        }
        decode(&mut *pair.source, request, 14)?;
        let mut m = reserve(pair, request)?;
        advance(&mut m, Upto::Loaded)?;
        let again = || {
            m.destination
                .export_control(m.stage.into(), OWNER)
                .said("export_control of the destination")
        };
        let loaded = again()?;
        ensure!(
            loaded.bytes == m.control.bytes,
            "the destination exports another control state than it was given"
        );
        if let Some(part) = loaded.digest.difference(&m.control.digest) {
            return Err(Failed::Broken(format!("digests differ in their {part}")));
        }
        m.destination.arm(m.stage).said("arm")?;
        ensure!(again()? == m.control, "arming changed the control state");
        refused(
            m.destination.import_control(m.stage, b"MLC1", OWNER),
            "importing other bytes over a control state",
            |e| {
                matches!(
                    e,
                    AdapterError::Conflict(_) | AdapterError::StageState { .. } | AdapterError::Control(_)
                )
            },
        )?;
    }
    Ok(())
}

fn arm_needs_digests(pair: &mut Pair) -> Check {
    let mut m = migrate(pair, &PLAN, 9, Upto::Copied)?;
    let (destination, kv_len) = (m.destination.clone(), m.boundary.kv_len);
    // All but the last slot.
    hash_all(&*destination, m.stage.into(), &m.pinned.first_live, kv_len - 1)?;
    step_to(&m, Upto::Committed)?;
    step_to(&m, Upto::Loaded)?;
    refused(destination.arm(m.stage), "arming with a slot never hashed", |e| {
        matches!(e, AdapterError::NotHashed { .. })
    })?;
    m.actual = hash_all(&*destination, m.stage.into(), &m.pinned.first_live, kv_len)?;
    ensure!(m.actual == m.expected, "pages hashed late differ from the source's");
    let armed = destination.arm(m.stage).said("arm")?;
    ensure!(
        armed.replayed == m.boundary.seal && armed.pending_token == m.boundary.pending_token,
        "armed at another token than the boundary's"
    );
    let again = destination.arm(m.stage).said("arm repeated")?;
    ensure!(again == armed, "a repeated arm gives another answer");
    Ok(())
}

/// Changes one thing in a control state that the replay decides otherwise.
type Tamper = (&'static str, fn(&mut ControlState) -> bool);

const TAMPERED: [Tamper; 4] = [
    ("the grammar's mask", |s| {
        s.grammar.as_mut().is_some_and(|g| {
            g.next_mask_digest[0] ^= 1;
            true
        })
    }),
    ("the grammar's count", |s| {
        s.grammar.as_mut().is_some_and(|g| {
            g.accepted += 1;
            true
        })
    }),
    ("the detokenizer's offset", |s| {
        s.detokenizer.read_offset = s.detokenizer.read_offset.wrapping_sub(1);
        true
    }),
    ("the text held back", |s| {
        let mut text = s.detokenizer.held_text.to_vec();
        text.push(b'?');
        Blob::new(text).is_ok_and(|t| {
            s.detokenizer.held_text = t;
            true
        })
    }),
];

fn arm_checks_the_replay(pair: &mut Pair) -> Check {
    let plan = Plan { constrained: true, ..PLAN };
    start(&mut *pair.source, REQUEST, &plan)?;
    decode(&mut *pair.source, REQUEST, 14)?;
    let mut m = reserve(pair, REQUEST)?;
    m.destination.abort_import(m.stage).said("abort_import")?;
    let genuine = ControlState::decode(&m.control.bytes).map_err(|e| e.to_string())?;
    let bytes = m.control.bytes.clone();
    for (n, (what, tamper)) in TAMPERED.iter().enumerate() {
        let mut state = genuine.clone();
        if !tamper(&mut state) {
            continue;
        }
        m.control.bytes = state.encode().map_err(|e| e.to_string())?;
        m.spec.epoch = MigrationEpoch(EPOCH.0 + 1 + n as u64);
        m.stage = m.destination.prepare_import(&m.spec).said("prepare_import")?;
        advance(&mut m, Upto::Committed)?;
        let armed = m
            .destination
            .import_control(m.stage, &m.control.bytes, OWNER)
            .and_then(|()| m.destination.arm(m.stage));
        refused(armed, &format!("arming with {what} altered"), |e| {
            matches!(e, AdapterError::ReplayMismatch(_) | AdapterError::Control(_))
        })?;
        m.destination.disarm(m.stage).said("disarm")?;
    }
    m.control.bytes = bytes;
    m.spec.epoch = MigrationEpoch(EPOCH.0 + 9);
    m.stage = m.destination.prepare_import(&m.spec).said("prepare_import")?;
    advance(&mut m, Upto::Loaded)?;
    let armed = m.destination.arm(m.stage).said("arm with the genuine control state")?;
    ensure!(
        armed.mask_digest == genuine.grammar.map(|g| g.next_mask_digest),
        "the mask after the replay is not the source's"
    );
    Ok(())
}

fn activate_once(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 12, Upto::Loaded)?;
    let (destination, stage, seal) = (m.destination.clone(), m.stage, m.boundary.seal);
    let go = |owner, reemit_from| {
        destination.activate(stage, Activation { owner_epoch: OwnerEpoch(owner), reemit_from })
    };
    refused(go(2, seal + 1), "activating what is not armed", |e| {
        matches!(e, AdapterError::StageState { .. })
    })?;
    destination.arm(stage).said("arm")?;
    for owner in [0, OWNER.0] {
        refused(go(owner, seal + 1), "activating under the old owner epoch", |e| {
            matches!(e, AdapterError::OwnerEpoch { .. })
        })?;
    }
    for reemit_from in [0, seal + 2] {
        refused(go(2, reemit_from), "emitting again from a token there is not", |e| {
            matches!(e, AdapterError::OutOfRange { .. })
        })?;
    }
    refused(destination.abort_import(stage), "aborting what is armed", |e| {
        matches!(e, AdapterError::StageState { is: StageState::Armed, .. })
    })?;
    let source_output = output(&*pair.source, REQUEST)?;
    let from = seal - 3;
    ensure!(go(2, from).said("activate")? == Activated::Now, "the first activation is not the first");
    decode(&mut *pair.destination, REQUEST, seal + 3)?;
    ensure!(
        go(2, from).said("activate repeated")? == Activated::Already,
        "a repeated activation starts again"
    );
    refused(go(3, from), "activating under a third owner epoch", |e| {
        matches!(e, AdapterError::OwnerEpoch { .. })
    })?;
    for (call, result) in [
        ("disarming", destination.disarm(stage)),
        ("aborting", destination.abort_import(stage)),
    ] {
        refused(result, &format!("{call} a running request"), |e| {
            matches!(e, AdapterError::StageState { is: StageState::Active, .. })
        })?;
    }
    decode(&mut *pair.destination, REQUEST, seal + 8)?;
    let emitted = pair.destination.emitted(REQUEST);
    for (i, e) in emitted.iter().enumerate() {
        ensure!(
            e.seq == from + i as u64 && e.owner_epoch == OwnerEpoch(2),
            "emission {i} after activation is token {} of owner epoch {}, not {} of 2",
            e.seq,
            e.owner_epoch,
            from + i as u64
        );
        let known = source_output.get(e.seq as usize - 1);
        ensure!(
            known.is_none_or(|t| *t == e.token),
            "token {} was emitted again as another one",
            e.seq
        );
    }
    Ok(())
}

fn continues_identically(pair: &mut Pair) -> Check {
    for (constrained, sampled) in [(false, true), (true, true), (false, false)] {
        let plan = Plan { constrained, sampled, seed: PLAN.seed + u64::from(constrained), ..PLAN };
        let moved = crate::id::RequestId([0x60 + u8::from(constrained) + 2 * u8::from(sampled); 16]);
        let twin = crate::id::RequestId([0x70 + u8::from(constrained) + 2 * u8::from(sampled); 16]);
        match start(&mut *pair.source, moved, &plan) {
            Err(Failed::Skipped(_)) if constrained => continue,
            other => other?,
        }
        start(&mut *pair.destination, twin, &plan)?;
        decode(&mut *pair.source, moved, 15)?;
        let mut m = reserve(pair, moved)?;
        advance(&mut m, Upto::Loaded)?;
        let claim = m.destination.arm(m.stage).said("arm")?.claim;
        let activation = Activation { owner_epoch: OwnerEpoch(2), reemit_from: 1 };
        m.destination.activate(m.stage, activation).said("activate")?;
        if claim == Claim::StateEqual {
            // Equal state is all that was promised, and control-is-re-exported has held it.
            continue;
        }
        decode(&mut *pair.destination, moved, 45)?;
        decode(&mut *pair.destination, twin, 45)?;
        let (a, b) = (output(&*pair.destination, moved)?, output(&*pair.destination, twin)?);
        ensure!(
            a[..45] == b[..45],
            "tokens differ from those of a twin that never moved, from number {}",
            a.iter().zip(&b).position(|(x, y)| x != y).map_or(0, |i| i + 1)
        );
        let (upto, a) = frozen(&*m.destination, moved, OwnerEpoch(2))?;
        let (upto_twin, b) = frozen(&*m.destination, twin, OWNER)?;
        if upto != upto_twin {
            continue;
        }
        for (part, same) in [
            ("tokens", a.tokens == b.tokens && a.position == b.position),
            ("sampler", a.sampler == b.sampler && a.penalties == b.penalties),
            ("generator", a.rng == b.rng),
            ("constraints", a.constraints == b.constraints && a.limits == b.limits),
            ("grammar", a.grammar == b.grammar),
            ("text state", a.detokenizer == b.detokenizer && a.stops == b.stops),
            ("parsers", a.parsers == b.parsers),
            ("KV", a.kv_groups == b.kv_groups),
        ] {
            ensure!(same, "{} tokens on, the {part} differ from those of a twin that never moved", upto);
        }
    }
    Ok(())
}

/// Holds a request and reads its control state; also the seal.
fn frozen(
    adapter: &dyn EngineAdapter,
    request: crate::id::RequestId,
    owner: OwnerEpoch,
) -> Result<(u64, ControlState), Failed> {
    let epoch = MigrationEpoch(EPOCH.0 + 50);
    let pinned = adapter.pin(request, epoch).said("pin")?;
    let boundary = adapter.hold(request, epoch, soon()).said("hold")?;
    let export = adapter.export_control(pinned.pin.into(), owner).said("export_control")?;
    let state = ControlState::decode(&export.bytes).map_err(|e| e.to_string())?;
    Ok((boundary.seal, state))
}

fn mismatch_is_refused(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 5, Upto::Reserved)?;
    let destination = &*m.destination;
    destination.abort_import(m.stage).said("abort_import")?;
    let free = free_blocks(destination)?;
    let mut next = EPOCH.0;
    let mut with = |change: &dyn Fn(&mut ImportSpec)| {
        next += 1;
        let mut spec = m.spec.clone();
        spec.epoch = MigrationEpoch(next);
        change(&mut spec);
        destination.prepare_import(&spec)
    };
    let profile = |e: &AdapterError| matches!(e, AdapterError::Refused(Refusal::ProfileMismatch));
    refused(with(&|s| s.source.numerics_profile[3] ^= 1), "another numerics profile", profile)?;
    refused(with(&|s| s.source.engine_build[3] ^= 1), "an engine build not listed", profile)?;
    refused(with(&|s| s.header.model[3] ^= 1), "another model", |e| {
        matches!(e, AdapterError::Incompatible(_))
    })?;
    let known = destination.capabilities().rng_kinds;
    if let Some(strange) = RngKind::ALL.into_iter().find(|k| !known.contains(k)) {
        refused(with(&|s| s.rng = strange), "a generator it does not have", |e| {
            matches!(e, AdapterError::Refused(Refusal::OpaqueRng))
        })?;
    }
    let context = destination.capabilities().max_context;
    refused(
        with(&|s| s.max_tokens = u64::from(context) + 1),
        "a request longer than the context",
        |e| matches!(e, AdapterError::Incompatible(_) | AdapterError::OutOfRange { .. }),
    )?;
    ensure!(free_blocks(destination)? == free, "a refused import reserved blocks");
    Ok(())
}
