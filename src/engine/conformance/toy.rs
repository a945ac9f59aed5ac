//! A toy engine, good for testing the suite: KV rows are hashes of what came before, and the next
//! token is drawn from a hash over all *resident* KV, so that a wrong byte anywhere shows.

use super::{Driver, Emitted, Plan};
use crate::control_state::{
    Blob, ControlState, Detokenizer, EngineIdentity, Fingerprint, Grammar, Identity, KvGroup,
    Limits, ModelIdentity, Name, Penalties, PenaltySemantics, Position, ProfilePolicy, Rng,
    RngKind, Sampler, Stops, Stream, TokenLogHash, Tokens, Usage, mask_digest,
};
use crate::digest::{Digester, PageDigest, Scratch, SetDigest};
use crate::engine::adapter::*;
use crate::id::{Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::{BlockPool, MemError, Region};
use crate::page::{
    BlockLayout, Dtype, GroupGeometry, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order, Scheme,
    TokenView,
};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

pub(super) const VOCAB: u32 = 509;
pub(super) const CONTEXT: u32 = 192;
pub(super) const PAGE: u16 = 4;
const LAYERS: u32 = 2;
const HEADS: u32 = 2;
const DIM: u32 = 4;

pub(crate) struct ToyConfig {
    incarnation: u64,
    block_tokens: u32,
    blocks: u32,
    order: Order,
    major: Major,
    /// Blocks are handed out from the end of what is free.
    reversed: bool,
}

impl ToyConfig {
    pub(crate) fn small(incarnation: u64) -> Self {
        Self {
            incarnation,
            block_tokens: 4,
            blocks: 400,
            order: Order::Nhd,
            major: Major::Layer,
            reversed: false,
        }
    }

    pub(crate) fn wide(incarnation: u64) -> Self {
        Self {
            incarnation,
            block_tokens: 8,
            blocks: 300,
            order: Order::Hnd,
            major: Major::Block,
            reversed: true,
        }
    }
}

pub(super) struct Toy {
    pub(super) incarnation: Incarnation,
    pub(super) info: PoolInfo,
    pub(super) digester: Arc<Digester>,
    pub(super) policy: ProfilePolicy,
    reversed: bool,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) requests: BTreeMap<RequestId, Request>,
    pub(super) pins: HashMap<PinId, Pin>,
    pub(super) stages: HashMap<StageId, Stage>,
    pub(super) floors: HashMap<RequestId, MigrationEpoch>,
    pub(super) next_id: u64,
    pub(super) emitted: HashMap<RequestId, Vec<Emitted>>,
    /// Blocks given back while a lease on them was out.
    pub(super) deferred: Vec<u32>,
}

#[derive(Clone)]
pub(super) struct Request {
    pub(super) plan: Plan,
    pub(super) prompt: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) kv_len: u64,
    pub(super) table: Vec<u32>,
    pub(super) owner: OwnerEpoch,
    pub(super) held: Option<MigrationEpoch>,
    pub(super) state_seq: u64,
    pub(super) source: Option<(Fingerprint, u16)>,
    /// Taken from the imported state, as an engine would.
    pub(super) seed: u64,
    pub(super) draws: u64,
}

pub(super) struct Pin {
    pub(super) request: RequestId,
    pub(super) epoch: MigrationEpoch,
    /// Blocks this pin is an owner of.
    pub(super) blocks: Vec<u32>,
    pub(super) dirty: bool,
    /// The request as it was when it ended, if it did.
    pub(super) ended: Option<Request>,
}

pub(super) struct Stage {
    pub(super) spec: ImportSpec,
    pub(super) state: StageState,
    pub(super) table: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    pub(super) hashed: Vec<bool>,
    pub(super) manifest: Option<Manifest>,
    pub(super) request: Option<(Request, Vec<u8>, OwnerEpoch)>,
    pub(super) armed: Option<Armed>,
    pub(super) activated: Option<OwnerEpoch>,
}

pub(super) fn fingerprint() -> Fingerprint {
    Fingerprint {
        engine_build: [0x70; 32],
        numerics_profile: [0x71; 32],
    }
}

fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut h = Sha256::new();
    for part in parts {
        h.update((part.len() as u64).to_le_bytes());
        h.update(part);
    }
    h.finalize().into()
}

/// A grammar that alternates between even and odd tokens.
pub(super) fn allowed(accepted: u64, token: u32) -> bool {
    u64::from(token) % 2 == accepted % 2
}

fn text_of(token: u32) -> Vec<u8> {
    format!("{token:x} ").into_bytes()
}

/// Tokens of text are shown one token late, as if a stop string could begin in the last.
pub(super) fn shown(output: &[u32]) -> (u64, Vec<u8>) {
    let (last, before) = output
        .split_last()
        .map_or((None, output), |(l, b)| (Some(*l), b));
    let sent = before.iter().map(|t| text_of(*t).len() as u64).sum();
    (sent, last.map(text_of).unwrap_or_default())
}

impl Toy {
    pub(super) fn new(config: &ToyConfig) -> Arc<Self> {
        let geometry =
            Arc::new(GroupGeometry::attention(0, 0..LAYERS, HEADS, DIM, Dtype::F32).unwrap());
        let header = ObjectSetHeader::new(
            [0x6d; 32],
            vec![(*geometry).clone()],
            PAGE,
            Scheme::Blake3Leaves,
        )
        .unwrap();
        let spec = LayoutSpec::new(
            config.major,
            KvSplit::InBlock,
            config.order,
            config.block_tokens,
            config.blocks,
        );
        let layout = spec.build(&geometry, geometry.whole()).unwrap();
        let region = Region::anonymous(layout.region_len()).unwrap();
        let pool = BlockPool::new(region, config.blocks, |b| layout.extents(b).unwrap()).unwrap();
        Arc::new(Self {
            incarnation: Incarnation(config.incarnation),
            info: PoolInfo {
                pool,
                layout: Arc::new(layout),
            },
            digester: Arc::new(Digester::new(header).unwrap()),
            policy: ProfilePolicy::exact(),
            reversed: config.reversed,
            state: Mutex::default(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        // Leases that ended since.
        let waiting = std::mem::take(&mut state.deferred);
        for block in waiting {
            self.release(&mut state, &[block]);
        }
        state
    }

    pub(super) fn release(&self, state: &mut State, blocks: &[u32]) {
        for block in blocks {
            match self.info.pool.release(&[*block]) {
                Ok(_) => {}
                Err(MemError::Busy { .. }) => state.deferred.push(*block),
                // Somebody gave back what is ours; the suite sees that, the toy goes on.
                Err(_) => {}
            }
        }
    }

    fn layout(&self) -> &BlockLayout {
        &self.info.layout
    }

    pub(super) fn grow(&self, table: &mut Vec<u32>, tokens: u64) -> Result<Vec<u32>> {
        let want = tokens.div_ceil(u64::from(self.layout().block_tokens())) as usize;
        let mut new = Vec::new();
        if want > table.len() {
            self.info.pool.alloc_into(want - table.len(), &mut new)?;
            if self.reversed {
                new.reverse();
            }
            table.extend_from_slice(&new);
        }
        Ok(new)
    }

    /// Computes the KV of one token: a function of all tokens up to it.
    pub(super) fn write_kv(&self, tokens: &[u32], table: &[u32], at: u64) -> Result<()> {
        let view = TokenView::new(self.layout(), table, 0..at + 1)?;
        let (block, slot) = view.place(at)?;
        let mut lease = self.info.pool.write(&[block])?;
        let past: Vec<u8> = tokens[..=at as usize]
            .iter()
            .flat_map(|t| t.to_le_bytes())
            .collect();
        let geometry = self.layout().geometry().clone();
        for (layer, head) in self.layout().shard().iter() {
            for component in geometry.components() {
                let row = hash(&[
                    &past,
                    &layer.to_le_bytes(),
                    &head.to_le_bytes(),
                    &[component as u8],
                ]);
                let offset = self.layout().locate(layer, head, component, block, slot)?;
                let len = geometry.row_bytes(component) as usize;
                lease.bytes_mut(offset, len).copy_from_slice(&row[..len]);
            }
        }
        Ok(())
    }

    /// "Attention": a hash over all resident KV, page by page.
    fn attend(&self, table: &[u32], kv_len: u64) -> Result<[u8; 32]> {
        let digests = self.digests(table, 0..(kv_len.div_ceil(u64::from(PAGE))) as u32, kv_len)?;
        let all: Vec<u8> = digests.iter().flat_map(|d| d.0).collect();
        Ok(hash(&[&all]))
    }

    pub(super) fn digests(
        &self,
        table: &[u32],
        pages: Range<u32>,
        upto: u64,
    ) -> Result<Vec<PageDigest>> {
        let view = TokenView::new(self.layout(), table, 0..upto)?;
        let first = u64::from(pages.start) * u64::from(PAGE);
        let last = upto.min(u64::from(pages.end) * u64::from(PAGE));
        let mut out = vec![PageDigest::default(); pages.len()];
        let lease = self.info.pool.read(view.blocks_of(first..last)?)?;
        self.digester.hash_pages(
            &view,
            &lease,
            pages,
            &mut Scratch::default(),
            None,
            &mut out,
        )?;
        Ok(out)
    }

    pub(super) fn set_digest(&self, table: &[u32], kv_len: u64) -> Result<SetDigest> {
        let mut hasher = self.digester.set_hasher(&[])?;
        let pages = kv_len.div_ceil(u64::from(PAGE)) as u32;
        let mut tails = Vec::new();
        for (page, digest) in (0..).zip(self.digests(table, 0..pages, kv_len)?) {
            let span =
                crate::page::PageSpan::of(page, PAGE, &(0..kv_len)).expect("a page with tokens");
            if span.sealed(PAGE) {
                hasher.push_sealed(0, span, &digest)?;
            } else {
                tails.push((0, digest));
            }
        }
        Ok(hasher.finish(kv_len, &tails)?)
    }

    fn sample(&self, r: &mut Request) -> Result<u32> {
        let seen = self.attend(&r.table, r.kv_len)?;
        let accepted = (r.tokens.len() - r.prompt) as u64;
        let mut word = seen;
        if r.plan.sampled {
            r.draws += 1;
            word = hash(&[&seen, &r.seed.to_le_bytes(), &r.draws.to_le_bytes()]);
        }
        let token = u32::from_le_bytes([word[0], word[1], word[2], 0]) % VOCAB;
        Ok(match r.plan.constrained && !allowed(accepted, token) {
            true => (token + 1) % (VOCAB - 1),
            false => token,
        })
    }

    /// One decode step of one request.
    fn advance(&self, r: &mut Request) -> Result<Vec<u32>> {
        let len = r.tokens.len() as u64;
        let new = self.grow(&mut r.table, len)?;
        while r.kv_len < len {
            self.write_kv(&r.tokens, &r.table, r.kv_len)?;
            r.kv_len += 1;
        }
        let token = self.sample(r)?;
        r.tokens.push(token);
        Ok(new)
    }

    pub(super) fn control(&self, id: RequestId, r: &Request) -> Result<ControlState> {
        let (prompt, output) = r.tokens.split_at(r.prompt);
        let (source, engine_kind) = r.source.unwrap_or((fingerprint(), 99));
        let accepted = output.len() as u64;
        let (sent_bytes, held) = shown(output);
        let name = |s: &str| Name::new(s).expect("a short name");
        Ok(ControlState {
            identity: Identity {
                request_id: id,
                state_seq: r.state_seq,
            },
            engine: EngineIdentity {
                engine_kind,
                engine_build: source.engine_build,
            },
            model: ModelIdentity {
                model: [0x6d; 32],
                weights_version: 1,
                tokenizer: [0x74; 32],
            },
            numerics_profile: source.numerics_profile,
            tokens: Tokens {
                prompt: TokenLogHash::of(prompt),
                output: TokenLogHash::of(output),
                pending_token: output.last().copied().unwrap_or_default(),
            },
            position: Position {
                kv_len: r.kv_len,
                next_pos: r.kv_len as i64,
            },
            limits: Limits {
                max_output: r.plan.max_output,
                max_context: CONTEXT,
                ..Limits::default()
            },
            sampler: Sampler {
                temperature: f32::from(u8::from(r.plan.sampled)),
                top_p: 1.0,
                typical_p: 1.0,
                ..Sampler::default()
            },
            penalties: Penalties {
                repetition: 1.0,
                penalty_semantics: PenaltySemantics::PromptAndOutput,
                ..Penalties::default()
            },
            rng: Rng {
                rng_kind: if r.plan.sampled {
                    RngKind::Counter
                } else {
                    RngKind::Greedy
                },
                seed: r.seed,
                draws: r.draws,
                rng_state: Blob::default(),
            },
            grammar: r.plan.constrained.then(|| Grammar {
                kind: 1,
                backend: name("toy"),
                backend_version: name("1"),
                source: Blob::new("even, odd").expect("short"),
                accepted: accepted as u32,
                next_mask_digest: mask_digest(VOCAB, |t| allowed(accepted, t)),
                ..Grammar::default()
            }),
            stops: Stops {
                skip_special: true,
                ..Stops::default()
            },
            detokenizer: Detokenizer {
                read_offset: accepted as u32,
                held_text: Blob::new(held).expect("short"),
                ..Detokenizer::default()
            },
            stream: Stream {
                sent_bytes,
                sent_tokens: accepted,
                stream_seq: accepted,
                ..Stream::default()
            },
            usage: Usage {
                usage_prompt: prompt.len() as u32,
                usage_completion: accepted as u32,
                ..Usage::default()
            },
            kv_groups: vec![KvGroup {
                tokens_per_page: PAGE.into(),
                committed: r.kv_len,
                set_digest: self.set_digest(&r.table, r.kv_len)?.0,
                ..KvGroup::default()
            }],
            ..ControlState::default()
        })
    }

    /// Drops a request's own references; what pins hold stays.
    pub(super) fn end(&self, state: &mut State, id: RequestId) -> u64 {
        let Some(request) = state.requests.remove(&id) else {
            return 0;
        };
        for pin in state
            .pins
            .values_mut()
            .filter(|p| p.request == id && p.ended.is_none())
        {
            pin.ended = Some(Request {
                held: None,
                ..request.clone()
            });
        }
        self.release(state, &request.table);
        request.table.len() as u64
    }
}

pub(crate) struct ToyDriver(Arc<Toy>);

impl ToyDriver {
    pub(crate) fn new(config: ToyConfig) -> Self {
        Self(Toy::new(&config))
    }
}

impl Driver for ToyDriver {
    fn adapter(&self) -> Arc<dyn EngineAdapter> {
        self.0.clone()
    }

    fn start(&mut self, id: RequestId, plan: &Plan) -> Result<(), String> {
        let word = |i: u32| hash(&[&plan.seed.to_le_bytes(), &i.to_le_bytes()]);
        let prompt: Vec<u32> = (0..plan.prompt_tokens)
            .map(|i| u32::from(word(i)[0]) * 2 % VOCAB)
            .collect();
        let request = Request {
            plan: *plan,
            prompt: prompt.len(),
            tokens: prompt,
            kv_len: 0,
            table: Vec::new(),
            owner: OwnerEpoch(1),
            held: None,
            state_seq: 0,
            source: None,
            seed: plan.seed,
            draws: 0,
        };
        self.0.lock().requests.insert(id, request);
        Ok(())
    }

    fn step(&mut self) {
        let mut state = self.0.lock();
        let runnable: Vec<RequestId> = state
            .requests
            .iter()
            .filter(|(_, r)| r.held.is_none())
            .map(|(id, _)| *id)
            .collect();
        for id in runnable {
            let mut request = state.requests[&id].clone();
            let new = self.0.advance(&mut request).expect("the toy has room");
            let seq = (request.tokens.len() - request.prompt) as u64;
            let token = *request.tokens.last().expect("just sampled");
            let owner_epoch = request.owner;
            let finished = seq >= u64::from(request.plan.max_output);
            state.requests.insert(id, request);
            state.emitted.entry(id).or_default().push(Emitted {
                owner_epoch,
                seq,
                token,
            });
            // What a pin leases grows with its request.
            for pin in state
                .pins
                .values_mut()
                .filter(|p| p.request == id && p.ended.is_none())
            {
                self.0
                    .info
                    .pool
                    .retain(&new)
                    .expect("blocks just allocated");
                pin.blocks.extend_from_slice(&new);
            }
            if finished {
                self.0.end(&mut state, id);
            }
        }
    }

    fn emitted(&self, id: RequestId) -> Vec<Emitted> {
        self.0.lock().emitted.get(&id).cloned().unwrap_or_default()
    }

    fn abort(&mut self, id: RequestId) {
        let mut state = self.0.lock();
        self.0.end(&mut state, id);
    }

    fn rewrite_sealed_slot(&mut self, id: RequestId, token: u64) -> bool {
        let mut state = self.0.lock();
        let request = state.requests[&id].clone();
        let mut other = request.tokens.clone();
        other[token as usize] ^= 1;
        self.0
            .write_kv(&other, &request.table, token)
            .expect("the slot is there");
        for pin in state.pins.values_mut().filter(|p| p.request == id) {
            pin.dirty = true;
        }
        true
    }
}
