//! What a source engine promises: holds, pins, watermarks, digests.

use super::flow::*;
use super::{Check, Clause, Pair, Plan};
use crate::control_state::{ControlState, TokenLogHash};
use crate::engine::adapter::{AdapterError, PageDigests};
use crate::id::MigrationEpoch;

pub(super) const CLAUSES: &[Clause] = &[
    Clause {
        id: "hold-is-a-step-boundary",
        text: "A held request stands where all sampled tokens are numbered and emitted and all KV but \
               the last token's is written, and it neither emits nor writes until released.",
        check: hold_is_a_step_boundary,
    },
    Clause {
        id: "hold-frees-nothing",
        text: "Holding gives no block back, pinned or not.",
        check: hold_frees_nothing,
    },
    Clause {
        id: "release-resumes-identically",
        text: "After release_hold a request goes on as if it had never been held.",
        check: release_resumes_identically,
    },
    Clause {
        id: "pin-outlives-the-request",
        text: "Pinned KV stays as it is when the client aborts or the request finishes, and is freed \
               by unpin.",
        check: pin_outlives_the_request,
    },
    Clause {
        id: "watermark-is-device-complete",
        text: "The watermark covers only accepted tokens whose KV is written, and never falls.",
        check: watermark_is_device_complete,
    },
    Clause {
        id: "sealed-slots-stay",
        text: "Slots below the watermark do not change while the request decodes on.",
        check: sealed_slots_stay,
    },
    Clause {
        id: "rewrite-raises-dirty",
        text: "A rewrite of a sealed slot makes the pin dirty, for good.",
        check: rewrite_raises_dirty,
    },
    Clause {
        id: "pages-by-position",
        text: "Pages are addressed by group and position; a call gives exactly the pages asked for, in \
               ascending order, with their valid tokens.",
        check: pages_by_position,
    },
    Clause {
        id: "control-is-frozen",
        text: "A held request's control state is exported the same each time, counts what was emitted, \
               and pins the token log.",
        check: control_is_frozen,
    },
    Clause {
        id: "retire-needs-a-hold",
        text: "A running request cannot be retired; a held one can, and is gone then.",
        check: retire_needs_a_hold,
    },
];

fn hold_is_a_step_boundary(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 9)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let boundary = adapter.hold(REQUEST, EPOCH, soon()).said("hold")?;
    let tokens = output(&*pair.source, REQUEST)?;
    ensure!(
        boundary.seal == tokens.len() as u64,
        "seal is {} and {} tokens were emitted",
        boundary.seal,
        tokens.len()
    );
    let kv_len = pinned.prompt_tokens + boundary.seal - 1;
    ensure!(
        boundary.kv_len == kv_len,
        "kv_len is {}, not {kv_len}",
        boundary.kv_len
    );
    ensure!(
        Some(&boundary.pending_token) == tokens.last(),
        "the pending token is not the last one emitted"
    );
    ensure!(
        boundary.sealed.stable_len == kv_len,
        "the watermark stands at {} of {kv_len} at the boundary",
        boundary.sealed.stable_len
    );
    let before = hash_all(&*adapter, pinned.pin.into(), &pinned.first_live, kv_len)?;
    for _ in 0..8 {
        pair.source.step();
    }
    let after = output(&*pair.source, REQUEST)?;
    ensure!(
        after == tokens,
        "a held request emitted {} tokens",
        after.len() - tokens.len()
    );
    let again = adapter.hold(REQUEST, EPOCH, soon()).said("hold repeated")?;
    ensure!(again == boundary, "a repeated hold gives another boundary");
    let now = hash_all(&*adapter, pinned.pin.into(), &pinned.first_live, kv_len)?;
    ensure!(before == now, "KV of a held request changed");
    Ok(())
}

fn hold_frees_nothing(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 6)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let upto = adapter
        .seal_through(pinned.pin)
        .said("seal_through")?
        .stable_len;
    let live = pinned.first_live.iter().map(|(_, t)| *t).max().unwrap_or(0);
    let before = references(&*pair.source.resident(), pinned.pin.into(), live..upto)?;
    adapter.hold(REQUEST, EPOCH, soon()).said("hold")?;
    let after = references(&*pair.source.resident(), pinned.pin.into(), live..upto)?;
    ensure!(
        before == after,
        "references on the request's blocks went from {before:?} to {after:?}"
    );
    // And without a pin: only the request itself keeps its blocks.
    start(&mut *pair.source, OTHER, &PLAN)?;
    decode(&mut *pair.source, OTHER, 6)?;
    let free = free_blocks(&*pair.source)?;
    adapter
        .hold(OTHER, EPOCH, soon())
        .said("hold without a pin")?;
    ensure!(
        free_blocks(&*pair.source)? == free,
        "blocks came free by a hold"
    );
    Ok(())
}

fn release_resumes_identically(pair: &mut Pair) -> Check {
    for constrained in [false, true] {
        let plan = Plan {
            constrained,
            ..PLAN
        };
        let (held, twin) = if constrained {
            (OTHER, REQUEST)
        } else {
            (REQUEST, OTHER)
        };
        // The twin runs on the other engine, undisturbed; each engine sees each request once.
        match (
            pair.source.start(held, &plan),
            pair.destination.start(twin, &plan),
        ) {
            (Ok(()), Ok(())) => {}
            _ if constrained => return Ok(()),
            (a, b) => return Err(super::Failed::Skipped(format!("{a:?} {b:?}"))),
        }
        let adapter = pair.source.adapter();
        for at in [1, 5, 14] {
            decode(&mut *pair.source, held, at)?;
            adapter.hold(held, EPOCH, soon()).said("hold")?;
            pair.source.step();
            adapter.release_hold(held, EPOCH).said("release_hold")?;
            adapter
                .release_hold(held, EPOCH)
                .said("release_hold repeated")?;
        }
        decode(&mut *pair.source, held, 40)?;
        decode(&mut *pair.destination, twin, 40)?;
        let (a, b) = (
            output(&*pair.source, held)?,
            output(&*pair.destination, twin)?,
        );
        ensure!(
            a[..40] == b[..40],
            "tokens differ from those of a twin that was never held"
        );
    }
    Ok(())
}

fn pin_outlives_the_request(pair: &mut Pair) -> Check {
    let adapter = pair.source.adapter();
    let free = free_blocks(&*pair.source)?;
    for (request, finishes) in [(REQUEST, false), (OTHER, true)] {
        let plan = Plan {
            max_output: if finishes { 30 } else { 90 },
            ..PLAN
        };
        start(&mut *pair.source, request, &plan)?;
        decode(&mut *pair.source, request, 12)?;
        let pinned = adapter.pin(request, EPOCH).said("pin")?;
        let (pin, live) = (pinned.pin, &pinned.first_live);
        let sealed = adapter.seal_through(pin).said("seal_through")?;
        ensure!(
            sealed.generation == pinned.generation,
            "the generation changed though every slot kept its token"
        );
        let before = hash_all(&*adapter, pin.into(), live, sealed.stable_len)?;
        if finishes {
            decode(&mut *pair.source, request, 30)?;
            pair.source.step();
        } else {
            pair.source.abort(request);
            pair.source.step();
        }
        // Others now want blocks.
        for n in 0..3 {
            let churn = crate::id::RequestId([0xc0 + n; 16]);
            start(
                &mut *pair.source,
                churn,
                &Plan {
                    seed: 1000 + u64::from(n),
                    ..PLAN
                },
            )?;
            decode(&mut *pair.source, churn, 10)?;
            pair.source.abort(churn);
        }
        let after = hash_all(&*adapter, pin.into(), live, sealed.stable_len)?;
        let how = if finishes { "finished" } else { "was aborted" };
        ensure!(before == after, "pinned KV changed after the request {how}");
        let now = adapter
            .seal_through(pin)
            .said("seal_through after the end")?;
        ensure!(
            now.generation == pinned.generation && !now.dirty,
            "the pin lost its generation after the request {how}"
        );
        adapter.unpin(pin).said("unpin")?;
        pair.source.step();
        ensure!(
            free_blocks(&*pair.source)? == free,
            "blocks are missing after the request {how} and the pin was given back"
        );
    }
    Ok(())
}

fn watermark_is_device_complete(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 1)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let mut last = 0;
    let mut rose = false;
    for output in 2..40 {
        decode(&mut *pair.source, REQUEST, output)?;
        let sealed = adapter.seal_through(pinned.pin).said("seal_through")?;
        let emitted = pinned.prompt_tokens + last_seq(&*pair.source, REQUEST);
        ensure!(
            sealed.accepted <= emitted,
            "{} tokens are accepted, {emitted} exist",
            sealed.accepted
        );
        // The newest token has no KV before the next step feeds it.
        ensure!(
            sealed.stable_len < sealed.accepted,
            "the watermark {} covers a token that has no KV yet ({} accepted)",
            sealed.stable_len,
            sealed.accepted
        );
        ensure!(
            sealed.stable_len >= last,
            "the watermark fell from {last} to {}",
            sealed.stable_len
        );
        rose |= sealed.stable_len > last && last > 0;
        last = sealed.stable_len;
        let mut out = PageDigests::new();
        adapter
            .hash_tail(pinned.pin.into(), last, &mut out)
            .said("hash_tail at the watermark")?;
    }
    ensure!(
        rose,
        "the watermark never rose while 40 tokens were decoded"
    );
    let too_far = adapter.hash_tail(pinned.pin.into(), last + 1, &mut PageDigests::new());
    refused(too_far, "hashing past the watermark", |e| {
        matches!(e, AdapterError::OutOfRange { .. })
    })?;
    for group in groups(&*adapter) {
        refused(
            adapter.table(pinned.pin.into(), group, last..last + 300),
            "a table past the watermark",
            |e| matches!(e, AdapterError::OutOfRange { .. }),
        )?;
    }
    Ok(())
}

fn sealed_slots_stay(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 2)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let (view, live) = (pinned.pin.into(), &pinned.first_live);
    let mut seen = Vec::new();
    for output in [4, 5, 6, 9, 17, 18, 30] {
        decode(&mut *pair.source, REQUEST, output)?;
        let sealed = adapter.seal_through(pinned.pin).said("seal_through")?;
        ensure!(!sealed.dirty, "an undisturbed pin is dirty");
        let mut tail = PageDigests::new();
        adapter
            .hash_tail(view, sealed.stable_len, &mut tail)
            .said("hash_tail")?;
        seen.push((
            sealed.stable_len,
            hash_all(&*adapter, view, live, sealed.stable_len)?,
            tail,
        ));
    }
    for (upto, rows, tail) in &seen {
        let now = hash_all(&*adapter, view, live, *upto)?;
        ensure!(
            now == *rows,
            "slots below the watermark {upto} changed later"
        );
        for (row, _) in tail.iter() {
            ensure!(
                rows.contains(row),
                "the incremental digest of page {} at {upto} is not that of its bytes",
                row.page
            );
        }
    }
    Ok(())
}

fn rewrite_raises_dirty(pair: &mut Pair) -> Check {
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 8)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let sealed = adapter.seal_through(pinned.pin).said("seal_through")?;
    ensure!(!sealed.dirty, "an undisturbed pin is dirty");
    if !pair
        .source
        .rewrite_sealed_slot(REQUEST, sealed.stable_len - 2)
    {
        let why = "nothing in this engine rewrites a sealed slot";
        return Err(super::Failed::Skipped(why.into()));
    }
    for _ in 0..2 {
        let sealed = adapter.seal_through(pinned.pin).said("seal_through")?;
        ensure!(
            sealed.dirty,
            "a sealed slot was rewritten and the pin is clean"
        );
        pair.source.step();
    }
    let hashed = adapter.hash_tail(
        pinned.pin.into(),
        sealed.stable_len,
        &mut PageDigests::new(),
    );
    refused(hashed, "hashing a dirty pin", |e| {
        matches!(e, AdapterError::SealedDirty)
    })
}

fn pages_by_position(pair: &mut Pair) -> Check {
    // A neighbour decodes in turn, so that blocks are not handed out in one run.
    start(&mut *pair.source, OTHER, &Plan { seed: 5, ..PLAN })?;
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 30)?;
    let adapter = pair.source.adapter();
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    let upto = adapter
        .seal_through(pinned.pin)
        .said("seal_through")?
        .stable_len;
    let size = page_tokens(&*adapter);
    let last_page = ((upto - 1) / size) as u32;
    let all = hash_all(&*adapter, pinned.pin.into(), &pinned.first_live, upto)?;
    for group in groups(&*adapter) {
        let rows: Vec<_> = all.iter().filter(|r| r.group == group).collect();
        for pair in rows.windows(2) {
            ensure!(
                pair[0].page + 1 == pair[1].page,
                "pages are not in ascending order"
            );
        }
        ensure!(
            rows.last().is_some_and(|r| r.page == last_page),
            "the last page is not that of the last token"
        );
        for row in &rows {
            let valid = (upto - u64::from(row.page) * size).min(size);
            ensure!(
                u64::from(row.valid_tokens) == valid,
                "page {} claims {} valid tokens of {valid}",
                row.page,
                row.valid_tokens
            );
            // Alone it must be what it was among others.
            let mut one = PageDigests::new();
            adapter
                .hash_pages(
                    pinned.pin.into(),
                    group,
                    row.page..row.page + 1,
                    upto,
                    &mut one,
                )
                .said("hash_pages of one page")?;
            let alone = one.last().map(|(r, _)| *r);
            ensure!(
                one.len() == 1 && alone == Some(**row),
                "page {} alone hashes otherwise",
                row.page
            );
        }
        let beyond = adapter.hash_pages(
            pinned.pin.into(),
            group,
            last_page + 1..last_page + 2,
            upto,
            &mut PageDigests::new(),
        );
        refused(beyond, "hashing a page that holds no token", |e| {
            matches!(e, AdapterError::OutOfRange { .. })
        })?;
        // Different tokens at different places: no two full pages are alike, and one flipped bit
        // changes exactly the page its position says.
        let token = upto / 2;
        flip_bit(&*pair.source.resident(), pinned.pin.into(), group, token)?;
        let flipped = hash_all(&*adapter, pinned.pin.into(), &pinned.first_live, upto)?;
        for (a, b) in all.iter().zip(&flipped) {
            let hit = a.group == group && u64::from(a.page) == token / size;
            ensure!(
                (a.digest != b.digest) == hit,
                "a flip in token {token} of group {group} shows in the digest of page {} of group {}: {}",
                a.page,
                a.group,
                a.digest != b.digest
            );
        }
        flip_bit(&*pair.source.resident(), pinned.pin.into(), group, token)?;
    }
    Ok(())
}

fn control_is_frozen(pair: &mut Pair) -> Check {
    let m = migrate(pair, &PLAN, 13, Upto::Reserved)?;
    for _ in 0..3 {
        pair.source.step();
        let again = m
            .source
            .export_control(m.pinned.pin.into(), OWNER)
            .said("export_control repeated")?;
        ensure!(
            again == m.control,
            "the control state of a held request changed"
        );
    }
    let seal = m.boundary.seal;
    ensure!(
        m.control.digest.offset == seal && m.control.digest.owner_epoch == OWNER,
        "the digest stands at token {} of owner epoch {}, the boundary at {seal} of {OWNER}",
        m.control.digest.offset,
        m.control.digest.owner_epoch
    );
    let state = ControlState::decode(&m.control.bytes).map_err(|e| e.to_string())?;
    let log = m
        .source
        .token_log(m.pinned.pin.into(), 0)
        .said("token_log")?;
    let prompt = m.pinned.prompt_tokens as usize;
    ensure!(
        log.len() as u64 == m.boundary.kv_len + 1,
        "the token log is not prompt and output"
    );
    ensure!(
        log[prompt..] == output(&*pair.source, REQUEST)?,
        "the token log is not what was emitted"
    );
    ensure!(
        state.tokens.prompt == TokenLogHash::of(&log[..prompt])
            && state.tokens.output == TokenLogHash::of(&log[prompt..])
            && Some(&state.tokens.pending_token) == log.last(),
        "the control state does not pin the token log"
    );
    let other_owner = m
        .source
        .export_control(m.pinned.pin.into(), crate::id::OwnerEpoch(OWNER.0 + 1));
    refused(other_owner, "exporting for another owner epoch", |e| {
        matches!(e, AdapterError::OwnerEpoch { .. })
    })?;
    m.source.release_hold(REQUEST, EPOCH).said("release_hold")?;
    let running = m.source.export_control(m.pinned.pin.into(), OWNER);
    refused(running, "exporting from a running request", |e| {
        matches!(e, AdapterError::NotHeld)
    })
}

fn retire_needs_a_hold(pair: &mut Pair) -> Check {
    let adapter = pair.source.adapter();
    let free = free_blocks(&*pair.source)?;
    start(&mut *pair.source, REQUEST, &PLAN)?;
    decode(&mut *pair.source, REQUEST, 5)?;
    let pinned = adapter.pin(REQUEST, EPOCH).said("pin")?;
    refused(
        adapter.retire(REQUEST, EPOCH),
        "retiring a running request",
        |e| matches!(e, AdapterError::NotHeld),
    )?;
    decode(&mut *pair.source, REQUEST, 8)?;
    adapter.hold(REQUEST, EPOCH, soon()).said("hold")?;
    let older = adapter.retire(REQUEST, MigrationEpoch(EPOCH.0 - 1));
    refused(older, "retiring for an older attempt", |e| {
        matches!(e, AdapterError::StaleEpoch { .. })
    })?;
    adapter.retire(REQUEST, EPOCH).said("retire")?;
    let emitted = last_seq(&*pair.source, REQUEST);
    for _ in 0..4 {
        pair.source.step();
    }
    ensure!(
        last_seq(&*pair.source, REQUEST) == emitted,
        "a retired request emits"
    );
    refused(
        adapter.hold(REQUEST, EPOCH, soon()),
        "holding a retired request",
        |e| matches!(e, AdapterError::Unknown(_) | AdapterError::Finished),
    )?;
    let again = adapter.retire(REQUEST, EPOCH).said("retire repeated")?;
    ensure!(
        again.blocks == 0,
        "a repeated retire gave back {} blocks",
        again.blocks
    );
    adapter.unpin(pinned.pin).said("unpin")?;
    pair.source.step();
    ensure!(
        free_blocks(&*pair.source)? == free,
        "blocks are missing after retire and unpin"
    );
    Ok(())
}
