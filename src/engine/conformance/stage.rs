//! What a destination engine promises about stages: who reaches them, what may change in them.

use super::flow::*;
use super::{Check, Clause, Failed, Pair};
use crate::engine::adapter::{
    AdapterError, EngineAdapter, Manifest, PageDigests, PageRow, StageId,
};
use crate::page::Component;

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
        id: "reopened-slots-are-hashed-anew",
        text: "Slots whose digests were taken back may be written again, the others not, and nothing \
               is armed before they are hashed again.",
        check: reopened_slots_are_hashed_anew,
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
        id: "valid-tokens-only",
        text: "A digest covers every valid token of its page, and nothing past them.",
        check: valid_tokens_only,
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
        refused(
            m.destination.pin(REQUEST, EPOCH),
            "pinning a staged request",
            |e| matches!(e, AdapterError::Unknown(_)),
        )?;
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
    let twin = m
        .destination
        .pin(OTHER, EPOCH)
        .said("pin of a local request")?;
    let upto = m
        .destination
        .seal_through(twin.pin)
        .said("seal_through")?
        .stable_len;
    for group in groups(&*m.destination) {
        let live = first_live(&twin.first_live, group);
        let staged = m
            .destination_memory
            .table(m.stage.into(), group, live..room)
            .said("table")?;
        let local = m
            .destination_memory
            .table(twin.pin.into(), group, live..upto)
            .said("table")?;
        let pool = m.destination_memory.pool(group).said("pool")?.pool;
        for block in &staged {
            ensure!(
                !local.contains(block),
                "block {block} of a stage is in a running request"
            );
            let refs = pool.refs(*block).map_err(|e| e.to_string())?;
            ensure!(refs == 1, "block {block} of a stage has {refs} owners");
        }
    }
    Ok(())
}

fn digests_read_resident_memory(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 17, Upto::Committed)?;
    let (live, kv_len) = (&m.pinned.first_live, m.boundary.kv_len);
    let size = page_tokens(&*m.destination);
    let ends = [
        (
            &*m.destination,
            &*m.destination_memory,
            m.stage.into(),
            "destination",
            &m.actual,
        ),
        (
            &*m.source,
            &*m.source_memory,
            m.pinned.pin.into(),
            "source",
            &m.expected,
        ),
    ];
    for (adapter, memory, view, end, known) in ends {
        for group in groups(adapter) {
            for token in [kv_len - 1, kv_len / 2] {
                flip_bit(memory, view, group, token)?;
                let now = hash_all(adapter, view, live, kv_len)?;
                let page = token / size;
                let hit = |r: &&PageRow| r.group == group && u64::from(r.page) == page;
                ensure!(
                    known.iter().find(hit) != now.iter().find(hit),
                    "a bit flipped in resident memory of the {end} (token {token}) is not in the digest"
                );
                flip_bit(memory, view, group, token)?;
                let back = hash_all(adapter, view, live, kv_len)?;
                ensure!(
                    back == *known,
                    "flipping the bit back does not restore the digest"
                );
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
        let first = first_live(&m.pinned.first_live, group);
        let page = first.div_ceil(size);
        let tokens = page * size..(page + 1) * size;
        drop(
            m.destination
                .stage_write(m.stage, group, tokens.clone())
                .said("stage_write")?,
        );
        let mut out = PageDigests::new();
        m.destination
            .hash_pages(
                m.stage.into(),
                group,
                page as u32..page as u32 + 1,
                kv_len,
                &mut out,
            )
            .said("hash_pages")?;
        for range in [
            tokens.clone(),
            tokens.start + 1..tokens.start + 2,
            tokens.start..kv_len,
        ] {
            refused(
                m.destination.stage_write(m.stage, group, range),
                "writing to a slot that was hashed",
                |e| matches!(e, AdapterError::Frozen { .. }),
            )?;
        }
        // Slots never hashed are still open, in the same page or block too.
        let open = tokens.end..kv_len;
        drop(
            m.destination
                .stage_write(m.stage, group, open)
                .said("stage_write of open slots")?,
        );
    }
    let mut out = PageDigests::new();
    let tail = kv_len - 1;
    m.destination
        .hash_tail(m.stage.into(), tail, &mut out)
        .said("hash_tail")?;
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
        let rows = hash_all(
            &*m.destination,
            m.stage.into(),
            &m.pinned.first_live,
            kv_len,
        )?;
        ensure!(
            rows == m.expected,
            "pages hashed in parts differ from the source's"
        );
        Ok(())
    })
}

fn reopened_slots_are_hashed_anew(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 17, Upto::Hashed)?;
    let (destination, stage, kv_len) = (&*m.destination, m.stage, m.boundary.kv_len);
    let (live, size) = (&m.pinned.first_live, page_tokens(destination));
    let room = m.spec.max_tokens;
    for group in groups(destination) {
        let page = first_live(live, group).div_ceil(size);
        let tokens = page * size..(page + 1) * size;
        match destination.reopen(stage, group, tokens.clone()) {
            Err(AdapterError::Caller(_)) => {
                let why = "this engine does not take digests back";
                return Err(Failed::Skipped(why.into()));
            }
            other => other.said("reopen")?,
        }
        refused(
            destination.stage_write(stage, group, tokens.end..tokens.end + 1),
            "writing to a hashed slot beside those reopened",
            |e| matches!(e, AdapterError::Frozen { .. }),
        )?;
        drop(
            destination
                .stage_write(stage, group, tokens.clone())
                .said("stage_write of reopened slots")?,
        );
        // What is written meanwhile is what the next digest says.
        let digest = || {
            let mut out = PageDigests::new();
            let pages = page as u32..page as u32 + 1;
            destination
                .hash_pages(stage.into(), group, pages, kv_len, &mut out)
                .said("hash_pages of reopened slots")?;
            Ok::<_, Failed>(out.iter().map(|(row, _)| *row).collect::<Vec<_>>())
        };
        let hit = |r: &&PageRow| r.group == group && u64::from(r.page) == page;
        flip_through_stage(destination, stage, group, tokens.start)?;
        ensure!(
            digest()?.first() != m.expected.iter().find(hit),
            "a reopened page hashes as before, whatever was written to it"
        );
        destination
            .reopen(stage, group, tokens.clone())
            .said("reopen once more")?;
        flip_through_stage(destination, stage, group, tokens.start)?;
        refused(
            destination.reopen(stage, group, room..room + 1),
            "reopening slots past the stage's end",
            |e| matches!(e, AdapterError::OutOfRange { .. }),
        )?;
    }
    step_to(&m, Upto::Committed)?;
    for group in groups(destination) {
        refused(
            destination.reopen(stage, group, 0..size),
            "reopening slots of a committed stage",
            |e| matches!(e, AdapterError::StageState { .. }),
        )?;
    }
    step_to(&m, Upto::Loaded)?;
    refused(
        destination.arm(stage),
        "arming with reopened slots that were not hashed again",
        |e| matches!(e, AdapterError::NotHashed { .. }),
    )?;
    ensure!(
        hash_all(destination, stage.into(), live, kv_len)? == m.expected,
        "pages that were reopened and restored hash otherwise than the source's"
    );
    step_to(&m, Upto::Armed)
}

/// Flips a bit the way a transport writes: under the stage's own lease.
fn flip_through_stage(
    destination: &dyn EngineAdapter,
    stage: StageId,
    group: u16,
    token: u64,
) -> Result<(), Failed> {
    let info = destination.pool(group).said("pool")?;
    let table = destination
        .table(stage.into(), group, token..token + 1)
        .said("table")?;
    let mut lease = destination
        .stage_write(stage, group, token..token + 1)
        .said("stage_write of a reopened slot")?;
    let slot = (token % u64::from(info.layout.block_tokens())) as u32;
    let shard = info.layout.shard();
    let (layer, head, k) = (shard.layers[0], shard.heads[0], Component::K);
    let at = info.layout.locate(layer, head, k, table[0], slot);
    lease.bytes_mut(at.map_err(|e| e.to_string())?, 1)[0] ^= 0x10;
    Ok(())
}

fn table_survives_commit(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 17, Upto::Hashed)?;
    let (destination, stage, kv_len) = (&*m.destination, m.stage, m.boundary.kv_len);
    let tables = || {
        groups(destination)
            .into_iter()
            .map(|g| {
                let live = first_live(&m.pinned.first_live, g);
                destination
                    .table(stage.into(), g, live..kv_len)
                    .said("table")
            })
            .collect::<Result<Vec<_>, Failed>>()
    };
    let before = tables()?;
    let too_long = Manifest {
        kv_len: m.spec.max_tokens + 300,
        ..m.manifest()
    };
    refused(
        destination.commit_import(stage, &too_long),
        "committing more tokens than were reserved",
        |e| matches!(e, AdapterError::OutOfRange { .. }),
    )?;
    destination
        .commit_import(stage, &m.manifest())
        .said("commit_import")?;
    ensure!(
        tables()? == before,
        "the block table is another one after commit_import"
    );
    destination
        .commit_import(stage, &m.manifest())
        .said("commit_import repeated")?;
    let other = Manifest {
        kv_len: kv_len - 1,
        ..m.manifest()
    };
    refused(
        destination.commit_import(stage, &other),
        "committing another manifest",
        |e| matches!(e, AdapterError::Conflict(_)),
    )?;
    for group in groups(destination) {
        refused(
            destination.stage_write(stage, group, kv_len - 1..kv_len),
            "writing to a committed stage",
            |e| {
                matches!(
                    e,
                    AdapterError::StageState { .. } | AdapterError::Frozen { .. }
                )
            },
        )?;
    }
    let rows = hash_all(destination, stage.into(), &m.pinned.first_live, kv_len)?;
    ensure!(
        rows == m.expected,
        "pages hash otherwise after commit_import"
    );
    Ok(())
}

fn token_log_is_exact(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 9, Upto::Reserved)?;
    let (destination, stage) = (&*m.destination, m.stage);
    let log = m
        .source
        .token_log(m.pinned.pin.into(), 0)
        .said("token_log")?;
    let part = m
        .source
        .token_log(m.pinned.pin.into(), 10)
        .said("token_log from 10")?;
    ensure!(
        part == log[10..],
        "token_log from 10 is not the end of the log"
    );
    destination
        .import_tokens(stage, 0, &log[..12])
        .said("import_tokens")?;
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
    let held = destination
        .token_log(stage.into(), 0)
        .said("token_log of the stage")?;
    ensure!(
        held == log[..16],
        "the stage's log is not what was imported"
    );
    // One token short: the control state does not fit.
    destination
        .import_tokens(stage, 16, &log[16..log.len() - 1])
        .said("import_tokens")?;
    let start = m
        .pinned
        .first_live
        .iter()
        .map(|(_, t)| *t)
        .min()
        .unwrap_or(0);
    copy(
        &*m.source,
        m.pinned.pin,
        destination,
        stage,
        &m.pinned.first_live,
        start..m.boundary.kv_len,
    )?;
    hash_all(
        destination,
        stage.into(),
        &m.pinned.first_live,
        m.boundary.kv_len,
    )?;
    destination
        .commit_import(stage, &m.manifest())
        .said("commit_import")?;
    refused(
        destination.import_control(stage, &m.control.bytes, OWNER),
        "a control state for a longer token log",
        |e| matches!(e, AdapterError::ReplayMismatch(_)),
    )?;
    let last = log.len() - 1;
    destination
        .import_tokens(stage, last as u64, &log[last..])
        .said("import_tokens")?;
    destination
        .import_control(stage, &m.control.bytes, OWNER)
        .said("import_control")?;
    Ok(())
}

fn valid_tokens_only(pair: &mut Pair) -> Check {
    let mut m = migrate(pair, &PLAN, 11, Upto::Reserved)?;
    // What a recycled block may hold: garbage in every slot, the ones past the end included.
    let room = m.spec.max_tokens;
    for group in groups(&*m.destination) {
        let mut lease = m
            .destination
            .stage_write(
                m.stage,
                group,
                first_live(&m.pinned.first_live, group)..room,
            )
            .said("stage_write of the whole stage")?;
        let layout = m.destination.pool(group).said("pool")?.layout;
        for block in lease.blocks().to_vec() {
            for (offset, len) in layout.extents(block).map_err(|e| e.to_string())? {
                lease.bytes_mut(offset, len as usize).fill(0xa5);
            }
        }
    }
    advance(&mut m, Upto::Hashed)?;
    let kv_len = m.boundary.kv_len;
    let digest = |upto| {
        let mut out = PageDigests::new();
        m.destination
            .hash_tail(m.stage.into(), upto, &mut out)
            .said("hash_tail")?;
        Ok::<_, Failed>(out)
    };
    let before = digest(kv_len)?;
    for (row, _) in before.iter() {
        ensure!(
            m.expected.contains(row),
            "the tail of a stage whose free slots hold garbage hashes otherwise than the source's"
        );
    }
    // The incremental digest keeps leaf states; a whole re-hash must see a flip in the last slot.
    let pages = hash_all(
        &*m.destination,
        m.stage.into(),
        &m.pinned.first_live,
        kv_len,
    )?;
    for group in groups(&*m.destination) {
        flip_bit(&*m.destination_memory, m.stage.into(), group, kv_len - 1)?;
    }
    let flipped = hash_all(
        &*m.destination,
        m.stage.into(),
        &m.pinned.first_live,
        kv_len,
    )?;
    for (a, b) in pages.iter().zip(&flipped) {
        let last = u64::from(a.page) == (kv_len - 1) / page_tokens(&*m.destination);
        ensure!(
            (a.digest != b.digest) == last,
            "a flip in the last valid slot is not in the digest of its page"
        );
    }
    Ok(())
}
