//! What a destination engine promises when a request is to run: control state, arming, activation.

use super::flow::*;
use super::{Check, Clause, Failed, Pair, Plan};
use crate::control_state::{Blob, Claim, ControlState, Refusal, RngKind};
use crate::engine::adapter::{
    Activated, Activation, AdapterError, EngineAdapter, ImportSpec, StageState,
};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};

pub(super) const CLAUSES: &[Clause] = &[
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

fn control_is_re_exported(pair: &mut Pair) -> Check {
    for constrained in [true, false] {
        let plan = Plan {
            constrained,
            ..PLAN
        };
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
                    AdapterError::Conflict(_)
                        | AdapterError::StageState { .. }
                        | AdapterError::Control(_)
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
    hash_all(
        &*destination,
        m.stage.into(),
        &m.pinned.first_live,
        kv_len - 1,
    )?;
    step_to(&m, Upto::Committed)?;
    step_to(&m, Upto::Loaded)?;
    refused(
        destination.arm(m.stage),
        "arming with a slot never hashed",
        |e| matches!(e, AdapterError::NotHashed { .. }),
    )?;
    m.actual = hash_all(&*destination, m.stage.into(), &m.pinned.first_live, kv_len)?;
    ensure!(
        m.actual == m.expected,
        "pages hashed late differ from the source's"
    );
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
    let plan = Plan {
        constrained: true,
        ..PLAN
    };
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
        m.stage = m
            .destination
            .prepare_import(&m.spec)
            .said("prepare_import")?;
        advance(&mut m, Upto::Committed)?;
        let armed = m
            .destination
            .import_control(m.stage, &m.control.bytes, OWNER)
            .and_then(|()| m.destination.arm(m.stage));
        refused(armed, &format!("arming with {what} altered"), |e| {
            matches!(
                e,
                AdapterError::ReplayMismatch(_) | AdapterError::Control(_)
            )
        })?;
        m.destination.disarm(m.stage).said("disarm")?;
    }
    m.control.bytes = bytes;
    m.spec.epoch = MigrationEpoch(EPOCH.0 + 9);
    m.stage = m
        .destination
        .prepare_import(&m.spec)
        .said("prepare_import")?;
    advance(&mut m, Upto::Loaded)?;
    let armed = m
        .destination
        .arm(m.stage)
        .said("arm with the genuine control state")?;
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
        destination.activate(
            stage,
            Activation {
                owner_epoch: OwnerEpoch(owner),
                reemit_from,
            },
        )
    };
    refused(go(2, seal + 1), "activating what is not armed", |e| {
        matches!(e, AdapterError::StageState { .. })
    })?;
    destination.arm(stage).said("arm")?;
    for owner in [0, OWNER.0] {
        refused(
            go(owner, seal + 1),
            "activating under the old owner epoch",
            |e| matches!(e, AdapterError::OwnerEpoch { .. }),
        )?;
    }
    for reemit_from in [0, seal + 2] {
        refused(
            go(2, reemit_from),
            "emitting again from a token there is not",
            |e| matches!(e, AdapterError::OutOfRange { .. }),
        )?;
    }
    refused(
        destination.abort_import(stage),
        "aborting what is armed",
        |e| {
            matches!(
                e,
                AdapterError::StageState {
                    is: StageState::Armed,
                    ..
                }
            )
        },
    )?;
    let source_output = output(&*pair.source, REQUEST)?;
    let from = seal - 3;
    ensure!(
        matches!(go(2, from).said("activate")?, Activated::Now { .. }),
        "the first activation is not the first"
    );
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
            matches!(
                e,
                AdapterError::StageState {
                    is: StageState::Active,
                    ..
                }
            )
        })?;
    }
    // The stage is used up: nothing reaches the running request through it.
    let gone = |e: &AdapterError| {
        matches!(
            e,
            AdapterError::StageState { .. } | AdapterError::Unknown(_)
        )
    };
    let group = groups(&*destination)[0];
    let written = destination.stage_write(stage, group, m.boundary.kv_len - 1..m.boundary.kv_len);
    refused(written, "writing through a stage that was activated", gone)?;
    let tokens = destination.import_tokens(stage, m.boundary.kv_len + 1, &[1]);
    refused(tokens, "adding tokens to a stage that was activated", gone)?;
    let control = destination.import_control(stage, &m.control.bytes, OwnerEpoch(OWNER.0 + 7));
    refused(
        control,
        "loading control state into a stage that was activated",
        |e| gone(e) || matches!(e, AdapterError::Conflict(_)),
    )?;
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
        let plan = Plan {
            constrained,
            sampled,
            seed: PLAN.seed + u64::from(constrained),
            ..PLAN
        };
        let moved = RequestId([0x60 + u8::from(constrained) + 2 * u8::from(sampled); 16]);
        let twin = RequestId([0x70 + u8::from(constrained) + 2 * u8::from(sampled); 16]);
        match start(&mut *pair.source, moved, &plan) {
            Err(Failed::Skipped(_)) if constrained => continue,
            other => other?,
        }
        start(&mut *pair.destination, twin, &plan)?;
        decode(&mut *pair.source, moved, 15)?;
        let mut m = reserve(pair, moved)?;
        advance(&mut m, Upto::Loaded)?;
        let claim = m.destination.arm(m.stage).said("arm")?.claim;
        let activation = Activation {
            owner_epoch: OwnerEpoch(2),
            reemit_from: 1,
        };
        m.destination
            .activate(m.stage, activation)
            .said("activate")?;
        if claim == Claim::StateEqual {
            // Equal state is all that was promised, and control-is-re-exported has held it.
            continue;
        }
        decode(&mut *pair.destination, moved, 45)?;
        decode(&mut *pair.destination, twin, 45)?;
        let (a, b) = (
            output(&*pair.destination, moved)?,
            output(&*pair.destination, twin)?,
        );
        ensure!(
            a[..45] == b[..45],
            "tokens differ from those of a twin that never moved, from number {}",
            a.iter()
                .zip(&b)
                .position(|(x, y)| x != y)
                .map_or(0, |i| i + 1)
        );
        let (upto, a) = frozen(&*m.destination, moved, OwnerEpoch(2))?;
        let (upto_twin, b) = frozen(&*m.destination, twin, OWNER)?;
        if upto != upto_twin {
            continue;
        }
        for (part, same) in [
            ("tokens", a.tokens == b.tokens && a.position == b.position),
            (
                "sampler",
                a.sampler == b.sampler && a.penalties == b.penalties,
            ),
            ("generator", a.rng == b.rng),
            (
                "constraints",
                a.constraints == b.constraints && a.limits == b.limits,
            ),
            ("grammar", a.grammar == b.grammar),
            (
                "text state",
                a.detokenizer == b.detokenizer && a.stops == b.stops,
            ),
            ("parsers", a.parsers == b.parsers),
            ("KV", a.kv_groups == b.kv_groups),
        ] {
            ensure!(
                same,
                "{} tokens on, the {part} differ from those of a twin that never moved",
                upto
            );
        }
    }
    Ok(())
}

/// Holds a request and reads its control state; also the seal.
fn frozen(
    adapter: &dyn EngineAdapter,
    request: RequestId,
    owner: OwnerEpoch,
) -> Result<(u64, ControlState), Failed> {
    let epoch = MigrationEpoch(EPOCH.0 + 50);
    let pinned = adapter.pin(request, epoch).said("pin")?;
    let boundary = adapter.hold(request, epoch, soon()).said("hold")?;
    let export = adapter
        .export_control(pinned.pin.into(), owner)
        .said("export_control")?;
    let state = ControlState::decode(&export.bytes).map_err(|e| e.to_string())?;
    Ok((boundary.seal, state))
}

fn mismatch_is_refused(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 5, Upto::Reserved)?;
    let destination = &*m.destination;
    destination.abort_import(m.stage).said("abort_import")?;
    let free = free_blocks(&*pair.destination)?;
    let mut next = EPOCH.0;
    let mut with = |change: &dyn Fn(&mut ImportSpec)| {
        next += 1;
        let mut spec = m.spec.clone();
        spec.epoch = MigrationEpoch(next);
        change(&mut spec);
        destination.prepare_import(&spec)
    };
    let profile = |e: &AdapterError| matches!(e, AdapterError::Refused(Refusal::ProfileMismatch));
    refused(
        with(&|s| s.source.numerics_profile[3] ^= 1),
        "another numerics profile",
        profile,
    )?;
    refused(
        with(&|s| s.source.engine_build[3] ^= 1),
        "an engine build not listed",
        profile,
    )?;
    refused(with(&|s| s.header.model[3] ^= 1), "another model", |e| {
        matches!(e, AdapterError::Incompatible(_))
    })?;
    let known = destination.capabilities().rng_kinds;
    if let Some(strange) = RngKind::ALL.into_iter().find(|k| !known.contains(k)) {
        refused(
            with(&|s| s.rng = strange),
            "a generator it does not have",
            |e| matches!(e, AdapterError::Refused(Refusal::OpaqueRng)),
        )?;
    }
    let context = destination.capabilities().max_context;
    refused(
        with(&|s| s.max_tokens = u64::from(context) + 1),
        "a request longer than the context",
        |e| {
            matches!(
                e,
                AdapterError::Incompatible(_) | AdapterError::OutOfRange { .. }
            )
        },
    )?;
    ensure!(
        free_blocks(&*pair.destination)? == free,
        "a refused import reserved blocks"
    );
    Ok(())
}
