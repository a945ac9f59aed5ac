//! What both ends promise: epochs, giving back, recovery, typed errors.

use super::flow::*;
use super::{Check, Clause, Pair};
use crate::control_state::Refusal;
use crate::digest::SetDigest;
use crate::engine::adapter::{
    Activation, AdapterError, Checkpoint, ImportSpec, JournalImage, Manifest, PageDigests, PinId,
    RebuildClass, Released, StageId, StageState, What,
};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};

pub(super) const CLAUSES: &[Clause] = &[
    Clause {
        id: "lower-epochs-are-refused",
        text: "Once a higher migration epoch was seen for a request, every mutation under a lower one \
               is refused and changes nothing; only giving back still works.",
        check: lower_epochs_are_refused,
    },
    Clause {
        id: "taking-is-keyed",
        text: "A repeated pin or prepare_import returns the same id, or Conflict for other arguments.",
        check: taking_is_keyed,
    },
    Clause {
        id: "giving-back-is-complete",
        text: "unpin, abort_import, disarm and retire free all they hold, repeated they free nothing, \
               and abort_import never drops what is armed.",
        check: giving_back_is_complete,
    },
    Clause {
        id: "leases-outlive-their-stage",
        text: "A stage aborted under a write lease is gone at once; its blocks are free only when the \
               lease has ended.",
        check: leases_outlive_their_stage,
    },
    Clause {
        id: "no-output-is-refused",
        text: "A request without an output token is refused by type.",
        check: no_output_is_refused,
    },
    Clause {
        id: "rebuild-is-honest",
        text: "A rebuilt request keeps the journal's tokens, and claims no more than was checked.",
        check: rebuild_is_honest,
    },
    Clause {
        id: "unknown-is-typed",
        text: "A call on something that is not here says so by type; giving it back is Ok.",
        check: unknown_is_typed,
    },
];

fn stale(e: &AdapterError) -> bool {
    matches!(e, AdapterError::StaleEpoch { .. })
}

fn lower_epochs_are_refused(pair: &mut Pair) -> Check {
    let mut m = migrate(pair, &PLAN, 9, Upto::Loaded)?;
    let (older, newer) = (MigrationEpoch(EPOCH.0 - 1), MigrationEpoch(EPOCH.0 + 1));
    let (source, destination) = (m.source.clone(), m.destination.clone());
    let (pin, stage) = (m.pinned.pin, m.stage);
    // At the source.
    refused(source.pin(REQUEST, older), "pin under a lower epoch", stale)?;
    refused(
        source.hold(REQUEST, older, soon()),
        "hold under a lower epoch",
        stale,
    )?;
    refused(
        source.release_hold(REQUEST, older),
        "release_hold under a lower epoch",
        stale,
    )?;
    refused(
        source.retire(REQUEST, older),
        "retire under a lower epoch",
        stale,
    )?;
    let boundary = source
        .hold(REQUEST, newer, soon())
        .said("hold taken over by a higher epoch")?;
    ensure!(
        boundary.seal == m.boundary.seal,
        "taking a hold over moved the boundary"
    );
    refused(
        source.release_hold(REQUEST, EPOCH),
        "release_hold after it was taken over",
        stale,
    )?;
    refused(
        source.retire(REQUEST, EPOCH),
        "retire after the hold was taken over",
        stale,
    )?;
    refused(
        source.seal_through(pin),
        "seal_through on a stale pin",
        stale,
    )?;
    refused(
        source.export_control(pin.into(), OWNER),
        "export_control on a stale pin",
        stale,
    )?;
    let before = last_seq(&*pair.source, REQUEST);
    pair.source.step();
    ensure!(
        last_seq(&*pair.source, REQUEST) == before,
        "a stale release let the request run"
    );
    source.unpin(pin).said("unpin of a stale pin")?;
    // At the destination.
    m.spec.epoch = older;
    refused(
        destination.prepare_import(&m.spec),
        "prepare_import under a lower epoch",
        stale,
    )?;
    m.spec.epoch = newer;
    let second = destination
        .prepare_import(&m.spec)
        .said("prepare_import under a higher epoch")?;
    ensure!(second != stage, "a new attempt got the old attempt's stage");
    let (kv_len, group) = (m.boundary.kv_len, groups(&*destination)[0]);
    refused(
        destination.import_tokens(stage, 0, &[]),
        "import_tokens on a stale stage",
        stale,
    )?;
    refused(
        destination.stage_write(stage, group, kv_len - 1..kv_len),
        "stage_write on a stale stage",
        stale,
    )?;
    refused(
        destination.commit_import(stage, &m.manifest()),
        "commit_import on a stale stage",
        stale,
    )?;
    refused(
        destination.import_control(stage, &m.control.bytes, OWNER),
        "import_control on a stale stage",
        stale,
    )?;
    refused(destination.arm(stage), "arm on a stale stage", stale)?;
    let activation = Activation {
        owner_epoch: OwnerEpoch(2),
        reemit_from: m.boundary.seal + 1,
    };
    refused(
        destination.activate(stage, activation),
        "activate on a stale stage",
        stale,
    )?;
    destination.disarm(stage).said("disarm of a stale stage")?;
    destination.abort_import(second).said("abort_import")?;
    Ok(())
}

fn taking_is_keyed(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 7, Upto::Reserved)?;
    let again = m.source.pin(REQUEST, EPOCH).said("pin repeated")?;
    ensure!(again.pin == m.pinned.pin, "a repeated pin is another pin");
    let free = free_blocks(&*pair.destination)?;
    let stage = m
        .destination
        .prepare_import(&m.spec)
        .said("prepare_import repeated")?;
    ensure!(
        stage == m.stage,
        "a repeated prepare_import is another stage"
    );
    let more = ImportSpec {
        max_tokens: m.spec.max_tokens - 1,
        ..m.spec.clone()
    };
    refused(
        m.destination.prepare_import(&more),
        "prepare_import with the same key and other arguments",
        |e| matches!(e, AdapterError::Conflict(_)),
    )?;
    ensure!(
        free_blocks(&*pair.destination)? == free,
        "a repeat reserved blocks"
    );
    let own = ImportSpec {
        epoch: MigrationEpoch(EPOCH.0 + 1),
        ..m.spec.clone()
    };
    refused(
        m.source.prepare_import(&own),
        "importing a request where it runs",
        |e| matches!(e, AdapterError::Conflict(_)),
    )
}

fn giving_back_is_complete(pair: &mut Pair) -> Check {
    let (source, destination) = (pair.source.adapter(), pair.destination.adapter());
    let free = (
        free_blocks(&*pair.source)?,
        free_blocks(&*pair.destination)?,
    );
    let mut m = migrate(pair, &PLAN, 9, Upto::Reserved)?;
    for (n, upto) in [
        Upto::Reserved,
        Upto::Copied,
        Upto::Hashed,
        Upto::Committed,
        Upto::Loaded,
        Upto::Armed,
    ]
    .into_iter()
    .enumerate()
    {
        if n > 0 {
            m.spec.epoch = MigrationEpoch(EPOCH.0 + n as u64);
            m.stage = destination.prepare_import(&m.spec).said("prepare_import")?;
        }
        advance(&mut m, upto)?;
        let first = if upto == Upto::Armed {
            refused(
                destination.abort_import(m.stage),
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
            destination.disarm(m.stage).said("disarm")?
        } else {
            destination.abort_import(m.stage).said("abort_import")?
        };
        ensure!(
            first.blocks > 0,
            "giving back a stage that is {upto:?} gave nothing back"
        );
        for _ in 0..2 {
            let again = destination
                .abort_import(m.stage)
                .said("abort_import repeated")?;
            let disarmed = destination.disarm(m.stage).said("disarm repeated")?;
            ensure!(
                (again, disarmed) == (Released::default(), Released::default()),
                "a stage that is gone gave back blocks"
            );
        }
        pair.destination.step();
        ensure!(
            free_blocks(&*pair.destination)? == free.1,
            "blocks are missing after a stage that was {upto:?} ended"
        );
        refused(
            destination.arm(m.stage),
            "arming a stage that is gone",
            |e| matches!(e, AdapterError::Unknown(What::Stage(_))),
        )?;
    }
    source.retire(REQUEST, EPOCH).said("retire")?;
    source.unpin(m.pinned.pin).said("unpin")?;
    let again = (
        source.unpin(m.pinned.pin).said("unpin repeated")?,
        source.retire(REQUEST, EPOCH).said("retire repeated")?,
    );
    ensure!(
        again == Default::default(),
        "what is gone at the source gave back blocks"
    );
    pair.source.step();
    ensure!(
        free_blocks(&*pair.source)? == free.0,
        "blocks are missing at the source"
    );
    Ok(())
}

fn leases_outlive_their_stage(pair: &mut Pair) -> Check {
    let destination = pair.destination.adapter();
    let group = groups(&*destination)[0];
    // The pool that transports write to: for an engine in another process, this process' own.
    let pool = destination.pool(group).said("pool")?.pool;
    let free = (free_blocks(&*pair.destination)?, pool.stats().free);
    let m = migrate(pair, &PLAN, 9, Upto::Reserved)?;
    let start = first_live(&m.pinned.first_live, group);
    let mut lease = destination
        .stage_write(m.stage, group, start..m.boundary.kv_len)
        .said("stage_write")?;
    let leased = lease.blocks().to_vec();
    destination
        .abort_import(m.stage)
        .said("abort_import under a write lease")?;
    refused(
        destination.commit_import(m.stage, &m.manifest()),
        "committing what is gone",
        |e| matches!(e, AdapterError::Unknown(_)),
    )?;
    // The late write lands in blocks that nobody else can have.
    let info = destination.pool(group).said("pool")?;
    for round in 0..3u8 {
        let churn = RequestId([0xd0 + round; 16]);
        super::flow::start(&mut *pair.destination, churn, &PLAN)?;
        decode(&mut *pair.destination, churn, 5)?;
        let pinned = destination.pin(churn, EPOCH).said("pin")?;
        let upto = destination
            .seal_through(pinned.pin)
            .said("seal_through")?
            .stable_len;
        let live = first_live(&pinned.first_live, group);
        let table = destination
            .table(pinned.pin.into(), group, live..upto)
            .said("table")?;
        ensure!(
            table.iter().all(|b| !leased.contains(b)),
            "a block under a dead stage's lease was given to another request"
        );
        for block in &leased {
            for (offset, len) in info.layout.extents(*block).map_err(|e| e.to_string())? {
                lease.bytes_mut(offset, len as usize).fill(round);
            }
        }
        destination.unpin(pinned.pin).said("unpin")?;
        pair.destination.abort(churn);
    }
    pair.destination.step();
    ensure!(pool.stats().free < free.1, "leased blocks were freed");
    drop(lease);
    let deadline = soon();
    let missing = |pair: &Pair| {
        let engine = free_blocks(&*pair.destination)? < free.0;
        Ok::<_, super::Failed>(engine || pool.stats().free < free.1)
    };
    while missing(pair)? && std::time::Instant::now() < deadline {
        pair.destination.step();
        destination
            .abort_import(m.stage)
            .said("abort_import repeated")?;
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    ensure!(
        !missing(pair)?,
        "blocks of an aborted stage are still missing after its last lease ended"
    );
    Ok(())
}

fn no_output_is_refused(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    let adapter = pair.source.adapter();
    let held = adapter.hold(REQUEST, EPOCH, soon());
    refused(held, "holding a request that has no output", |e| {
        matches!(e, AdapterError::Refused(Refusal::NoOutputYet))
    })?;
    // And it is not stuck.
    decode(&mut *pair.source, REQUEST, 3)
}

fn rebuild_is_honest(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 8)?;
    let (source, destination) = (pair.source.adapter(), pair.destination.adapter());
    let best = destination.capabilities().rebuild;
    let checkpoint = source
        .journal_checkpoint(REQUEST, soon())
        .said("journal_checkpoint")?;
    ensure!(
        checkpoint.seal >= 8,
        "the checkpoint is older than the call"
    );
    decode(&mut *pair.source, REQUEST, checkpoint.seal + 9)?;
    let journal = output(&*pair.source, REQUEST)?;
    let pinned = source.pin(REQUEST, EPOCH).said("pin")?;
    let log = source.token_log(pinned.pin.into(), 0).said("token_log")?;
    let prompt = log[..pinned.prompt_tokens as usize].to_vec();
    let seal = journal.len() as u64;
    let mut epoch = EPOCH.0;
    let mut rebuild = |set_digest: Option<SetDigest>, tokens: &[u32]| {
        epoch += 1;
        destination.rebuild_from_journal(&JournalImage {
            request: REQUEST,
            epoch: MigrationEpoch(epoch),
            owner_epoch: OWNER,
            checkpoint: Checkpoint {
                set_digest,
                ..checkpoint.clone()
            },
            prompt: prompt.clone(),
            output: tokens.to_vec(),
        })
    };
    // Nothing to compare with, then a digest that nothing can equal: never bit-exact.
    for wrong in [None, Some(SetDigest([0xee; 32]))] {
        let rebuilt = rebuild(wrong, &journal).said("rebuild_from_journal")?;
        ensure!(
            rebuilt.class > RebuildClass::BitExact,
            "KV that was compared with {wrong:?} is called bit-exact"
        );
        ensure!(
            rebuilt.class >= best,
            "a better class than the capabilities allow"
        );
        destination
            .disarm(rebuilt.stage)
            .said("disarm of a rebuilt request")?;
    }
    let mut forged = journal.clone();
    forged[2] ^= 1;
    refused(
        rebuild(None, &forged),
        "rebuilding from a journal that contradicts its checkpoint",
        |e| {
            matches!(
                e,
                AdapterError::Conflict(_) | AdapterError::ReplayMismatch(_)
            )
        },
    )?;
    let short = &journal[..checkpoint.seal as usize - 1];
    refused(
        rebuild(None, short),
        "rebuilding from a journal shorter than its checkpoint",
        |e| {
            matches!(
                e,
                AdapterError::Conflict(_)
                    | AdapterError::Caller(_)
                    | AdapterError::OutOfRange { .. }
            )
        },
    )?;
    let rebuilt = rebuild(checkpoint.set_digest, &journal).said("rebuild_from_journal")?;
    ensure!(
        rebuilt.seal == seal,
        "rebuilt up to {} of {seal} journaled tokens",
        rebuilt.seal
    );
    let activation = Activation {
        owner_epoch: OwnerEpoch(2),
        reemit_from: seal - 4,
    };
    destination
        .activate(rebuilt.stage, activation)
        .said("activate")?;
    decode(&mut *pair.destination, REQUEST, seal + 12)?;
    decode(&mut *pair.source, REQUEST, seal + 12)?;
    let expected = output(&*pair.source, REQUEST)?;
    let emitted = pair.destination.emitted(REQUEST);
    ensure!(
        emitted.first().is_some_and(|e| e.seq == seal - 4),
        "the first token emitted is not the one asked for"
    );
    for e in &emitted {
        let kept = e.seq <= seal || rebuilt.class <= RebuildClass::TokenExactOnly;
        let same = expected
            .get(e.seq as usize - 1)
            .is_none_or(|t| *t == e.token);
        ensure!(
            same || !kept,
            "token {} is another one than the lost worker's, though the rebuild is {:?}",
            e.seq,
            rebuilt.class
        );
    }
    Ok(())
}

fn unknown_is_typed(pair: &mut Pair) -> Check {
    let spare = migrate(pair, &PLAN, 3, Upto::Reserved)?;
    let adapter = &*spare.destination;
    let (nobody, pin, stage) = (RequestId([0xfe; 16]), PinId(1 << 60), StageId(1 << 60));
    let unknown = |e: &AdapterError| matches!(e, AdapterError::Unknown(_));
    let request = |e: &AdapterError| matches!(e, AdapterError::Unknown(What::Request(_)));
    refused(adapter.pin(nobody, EPOCH), "pin", request)?;
    refused(adapter.hold(nobody, EPOCH, soon()), "hold", request)?;
    refused(adapter.release_hold(nobody, EPOCH), "release_hold", request)?;
    refused(
        adapter.journal_checkpoint(nobody, soon()),
        "journal_checkpoint",
        request,
    )?;
    refused(adapter.seal_through(pin), "seal_through", unknown)?;
    refused(adapter.pool(u16::MAX), "pool", unknown)?;
    let group = groups(adapter)[0];
    for view in [pin.into(), stage.into()] {
        refused(adapter.table(view, group, 0..1), "table", unknown)?;
        refused(adapter.token_log(view, 0), "token_log", unknown)?;
        let mut out = PageDigests::new();
        refused(
            adapter.hash_pages(view, group, 0..1, 1, &mut out),
            "hash_pages",
            unknown,
        )?;
        refused(adapter.hash_tail(view, 1, &mut out), "hash_tail", unknown)?;
        refused(
            adapter.export_control(view, OWNER),
            "export_control",
            unknown,
        )?;
    }
    let manifest = Manifest {
        kv_len: 1,
        first_live: Vec::new(),
    };
    refused(
        adapter.import_tokens(stage, 0, &[1]),
        "import_tokens",
        unknown,
    )?;
    refused(
        adapter.stage_write(stage, group, 0..1),
        "stage_write",
        unknown,
    )?;
    refused(
        adapter.commit_import(stage, &manifest),
        "commit_import",
        unknown,
    )?;
    refused(
        adapter.import_control(stage, &spare.control.bytes, OWNER),
        "import_control",
        unknown,
    )?;
    refused(adapter.arm(stage), "arm", unknown)?;
    let activation = Activation {
        owner_epoch: OwnerEpoch(2),
        reemit_from: 1,
    };
    refused(adapter.activate(stage, activation), "activate", unknown)?;
    for (call, released) in [
        ("unpin", adapter.unpin(pin)),
        ("abort_import", adapter.abort_import(stage)),
        ("disarm", adapter.disarm(stage)),
        ("retire", adapter.retire(nobody, EPOCH)),
    ] {
        ensure!(
            released.clone().said(call)? == Released::default(),
            "{call} of something unknown gave back blocks"
        );
    }
    Ok(())
}
