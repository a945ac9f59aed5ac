//! One step: choose a batch, compute it, write its KV, draw tokens, hand them out.

use super::clock::clock_ns;
use super::entry::Phase;
use super::event::{CloseReason, TokenEvent};
use super::live::Live;
use super::model::{PastKv, SeqInput, StepOutput};
use super::shared::{Inner, Shared, Slot};
use crate::engine::adapter::LEASE_WAIT;
use crate::mem::{BlockId, ReadLease};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// One request's part of a step. Its [`Live`] state is out of its entry meanwhile.
struct Task {
    slot: Slot,
    live: Box<Live>,
    table: Vec<BlockId>,
    start: usize,
    tokens: Vec<u32>,
    want_logits: bool,
    fill: Option<u64>,
    outcome: Outcome,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// A block it reads was being written: not computed. The next step tries again.
    Skipped,
    /// Computed, and a reader of its last block did not leave in time: not written. The next step
    /// computes it again, with the same result.
    Unwritten,
    /// KV is in the pool.
    Done,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepReport {
    /// Requests in the step; 0 means that there was nothing to do.
    pub requests: usize,
    /// Tokens processed, prompt tokens included.
    pub tokens: usize,
    /// Output tokens made.
    pub output: usize,
}

impl Shared {
    /// Chooses a batch. Takes the live states of its requests out.
    fn plan(&self, inner: &mut Inner) -> Vec<Task> {
        inner.blocks.reap();
        self.admit(inner);
        let block_tokens = self.config.block_tokens as usize;
        let mut budget = self.config.max_step_tokens;
        let mut tasks = Vec::new();
        let n_running = inner.running.len();
        // More may run than fit in a batch (some moved in): they take turns.
        let first = if n_running > self.config.max_batch {
            inner.turn % n_running
        } else {
            0
        };
        // Decoding requests first: a long prompt does not delay them by more than one step.
        for decode in [true, false] {
            for at in 0..n_running {
                let id = inner.running[(first + at) % n_running];
                let Some(e) = inner.entries.get_mut(&id) else {
                    continue;
                };
                let left = e.log.len() - e.stable;
                if !e.may_step() || (left == 1) != decode || left == 0 {
                    continue;
                }
                if budget == 0 || tasks.len() == self.config.max_batch {
                    inner.turn = (first + at) % n_running;
                    return tasks;
                }
                let fill = e.fill.filter(|(_, end)| e.stable < *end);
                let left = fill.map_or(left, |(_, end)| end - e.stable);
                let n = left.min(self.config.prefill_chunk).min(budget);
                let grow = (e.stable + n)
                    .div_ceil(block_tokens)
                    .saturating_sub(e.table.len());
                e.promised = e.promised.saturating_sub(grow as u64);
                if inner.blocks.take_promised(grow, &mut e.table).is_err() {
                    // The ledger's invariant rules this out; waiting is the harmless answer.
                    e.promised += grow as u64;
                    continue;
                }
                let Some(live) = e.live.take() else { continue };
                e.in_flight = true;
                budget -= n;
                tasks.push(Task {
                    slot: id,
                    live,
                    table: e.table.clone(),
                    start: e.stable,
                    tokens: e.log[e.stable..e.stable + n].to_vec(),
                    want_logits: e.stable + n == e.log.len(),
                    fill: fill.map(|(seed, _)| seed),
                    outcome: Outcome::Skipped,
                });
            }
        }
        tasks
    }

    /// Gives waiting requests their promise of blocks, best first, as long as there are any.
    fn admit(&self, inner: &mut Inner) {
        let block_tokens = self.config.block_tokens as usize;
        while inner.running.len() < self.config.max_batch
            && let Some(key) = inner.waiting.first().copied()
        {
            let id = key.1;
            let Some(e) = inner.entries.get_mut(&id) else {
                inner.waiting.remove(&key);
                continue;
            };
            let shared = if e.stable == 0 && e.table.is_empty() {
                // At least the last prompt token is computed: its logits are needed.
                let limit = e.log.len() - 1;
                let keys = e.keys_through(limit, block_tokens).to_vec();
                inner.blocks.shared_prefix(&keys)
            } else {
                Vec::new()
            };
            let need = inner.blocks.for_tokens(e.max_tokens) - shared.len() as u64;
            if inner.blocks.promise(need).is_err() {
                inner.blocks.give_back(&shared);
                return;
            }
            inner.waiting.remove(&key);
            e.promised = need;
            e.stable = shared.len() * block_tokens;
            e.published = shared.len();
            if let Some(live) = &mut e.live {
                live.cached_tokens = e.stable as u32;
            }
            e.table = shared;
            e.phase = Phase::Running;
            inner.running.push(id);
        }
    }

    /// Computes the batch and writes its KV, without the lock.
    fn compute(&self, tasks: &mut [Task], out: &mut StepOutput) {
        let deadline = Instant::now() + LEASE_WAIT;
        let per_block = self.config.block_tokens as usize;
        let past = self.parts.model.reads_past();
        let leases: Vec<Option<ReadLease>> = tasks
            .iter()
            .map(|t| {
                let blocks = if past {
                    &t.table[..t.start.div_ceil(per_block)]
                } else {
                    &[]
                };
                self.parts.pool.read_until(blocks, deadline).ok()
            })
            .collect();
        let seqs: Vec<SeqInput<'_>> = tasks
            .iter()
            .zip(&leases)
            .filter_map(|(t, lease)| {
                let lease = lease.as_ref()?;
                Some(SeqInput {
                    tokens: &t.tokens,
                    start: t.start,
                    past: (t.start > 0).then_some(PastKv {
                        lease,
                        layout: &self.parts.layout,
                        table: &t.table,
                        len: t.start,
                    }),
                    want_logits: t.want_logits,
                    fill: t.fill,
                })
            })
            .collect();
        self.parts.model.forward(&seqs, out);
        drop(seqs);
        let readable: Vec<bool> = leases.iter().map(Option::is_some).collect();
        drop(leases);
        let token_bytes = self.parts.info.token_bytes as usize;
        let mut rows = out.kv.chunks_exact(token_bytes);
        for (task, _) in tasks.iter_mut().zip(readable).filter(|(_, ok)| *ok) {
            let kv: Vec<&[u8]> = rows.by_ref().take(task.tokens.len()).collect();
            task.outcome = if self.write_kv(&task.table, task.start, &kv) {
                Outcome::Done
            } else {
                Outcome::Unwritten
            };
        }
    }

    /// Writes the KV of consecutive tokens, each as `[layer][K, V][head][element]`. The blocks are
    /// leased for as long as the copy takes. `false`: a reader did not leave in time.
    pub(crate) fn write_kv(&self, table: &[BlockId], start: usize, kv: &[&[u8]]) -> bool {
        let layout = &self.parts.layout;
        let per_block = layout.block_tokens() as usize;
        let row = layout.geometry().k_bytes as usize;
        let heads = layout.geometry().kv_heads as usize;
        let planes = self.parts.info.layers as usize * 2;
        let deadline = Instant::now() + LEASE_WAIT;
        let blocks = &table[start / per_block..(start + kv.len()).div_ceil(per_block)];
        let Ok(mut lease) = self.parts.pool.write_until(blocks, deadline) else {
            return false;
        };
        for (i, token) in kv.iter().enumerate() {
            let position = start + i;
            let block = u64::from(table[position / per_block]);
            let slot = (position % per_block) as u64;
            for (p, rows) in (0..planes).zip(token.chunks_exact(row * heads)) {
                let plane = layout.plane(p / 2, p % 2);
                let at = plane.base + block * plane.block_stride + slot * plane.slot_stride;
                if plane.head_stride == row as u64 {
                    lease.bytes_mut(at, rows.len()).copy_from_slice(rows);
                } else {
                    for (h, bytes) in rows.chunks_exact(row).enumerate() {
                        let at = at + h as u64 * plane.head_stride;
                        lease.bytes_mut(at, row).copy_from_slice(bytes);
                    }
                }
            }
        }
        true
    }

    /// Draws the tokens and hands them out, without the lock.
    fn draw(&self, tasks: &mut [Task], out: &mut StepOutput) -> usize {
        let vocab = self.parts.info.vocab;
        let mut rows = out.logits.chunks_exact_mut(vocab);
        let mut made = 0;
        for task in tasks.iter_mut() {
            if !task.want_logits || task.fill.is_some() || task.outcome == Outcome::Skipped {
                continue;
            }
            let Some(logits) = rows.next() else { continue };
            if task.outcome == Outcome::Unwritten {
                continue;
            }
            let done = clock_ns();
            let event: TokenEvent = task.live.step(logits, &self.parts.vocabulary, done);
            self.sink.token(event);
            made += 1;
        }
        made
    }

    /// Puts the live states back and wakes whoever waits for the boundary.
    fn publish(&self, inner: &mut Inner, tasks: Vec<Task>) {
        let now = clock_ns();
        let block_tokens = self.config.block_tokens as usize;
        let mut wanted = false;
        for task in tasks {
            let Some(e) = inner.entries.get_mut(&task.slot) else {
                continue;
            };
            e.in_flight = false;
            wanted |= e.boundary_wanted > 0;
            if task.outcome == Outcome::Done {
                e.stable = task.start + task.tokens.len();
                e.last_step_done_ns = now;
                e.log.extend_from_slice(&task.live.tokens[e.log.len()..]);
                let full = e.stable / block_tokens;
                if self.config.prefix_cache && e.keys.is_some() && e.published < full {
                    let from = e.published;
                    let keys = e.keys_through(e.stable, block_tokens).to_vec();
                    for (key, block) in keys[from..full].iter().zip(&e.table[from..full]) {
                        inner.blocks.publish(*key, *block);
                    }
                    e.published = full;
                }
            }
            let finish = task.live.finish;
            if e.preview_wanted && e.hold.is_none() && finish.is_none() {
                e.preview = self.preview_of(&task.live);
                e.preview_wanted = e.preview.is_none();
            }
            e.live = Some(task.live);
            if finish.is_some() {
                inner.end(task.slot, true);
            } else if e.abort && e.hold.is_none() {
                self.close(inner, task.slot, CloseReason::Aborted);
            }
        }
        if wanted {
            self.boundary.notify_all();
        }
    }

    /// One step, if there is anything to do.
    pub(crate) fn step(&self, out: &mut StepOutput) -> StepReport {
        let mut tasks = self.plan(&mut self.inner.lock());
        self.run_tasks(&mut tasks, out)
    }

    fn run_tasks(&self, tasks: &mut Vec<Task>, out: &mut StepOutput) -> StepReport {
        if tasks.is_empty() {
            return StepReport::default();
        }
        let worked = catch_unwind(AssertUnwindSafe(|| {
            self.compute(tasks, out);
            self.draw(tasks, out)
        }));
        let Ok(output) = worked else {
            // The panic's own hook has reported it. What was in the batch is lost; recovery takes
            // it from the journal. The engine goes on with the rest.
            let mut inner = self.inner.lock();
            for task in tasks.drain(..) {
                if let Some(e) = inner.entries.get_mut(&task.slot) {
                    e.in_flight = false;
                }
                self.close(&mut inner, task.slot, CloseReason::Failed);
            }
            self.boundary.notify_all();
            return StepReport::default();
        };
        let report = StepReport {
            requests: tasks.len(),
            tokens: tasks.iter().map(|t| t.tokens.len()).sum(),
            output,
        };
        let mut inner = self.inner.lock();
        inner.steps += 1;
        self.publish(&mut inner, std::mem::take(tasks));
        report
    }

    /// The driver: steps until the engine stops, sleeping when there is nothing to do.
    pub(crate) fn drive(&self) {
        /// How soon blocks whose lease was out are looked at again.
        const REAP_EVERY: std::time::Duration = std::time::Duration::from_millis(2);
        let mut out = StepOutput::default();
        loop {
            let mut tasks = {
                let mut inner = self.inner.lock();
                loop {
                    if inner.stop {
                        return;
                    }
                    let tasks = self.plan(&mut inner);
                    if !tasks.is_empty() {
                        break tasks;
                    }
                    if inner.blocks.deferred() > 0 {
                        self.work.wait_for(&mut inner, REAP_EVERY);
                    } else {
                        self.work.wait(&mut inner);
                    }
                }
            };
            let began = std::time::Instant::now();
            self.run_tasks(&mut tasks, &mut out);
            if let Some(rest) = self.config.pace.checked_sub(began.elapsed()) {
                // Between steps: nothing is in flight, and a hold takes effect at once.
                std::thread::sleep(rest);
            }
        }
    }
}
