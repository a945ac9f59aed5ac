//! A worker's memory and engine in miniature: physical pages, a running request, a staged import.

use super::oracle::{Control, SHARES, Slot, step};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::migrate::io::Op;

/// Tokens of a page.
pub const PAGE: usize = 4;
/// Enough for the quarantine of a very unlucky run.
const PAGES: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Free,
    Request,
    Rebuilt,
    Stage(MigrationEpoch),
    Quarantine,
}

#[derive(Clone, Debug)]
pub struct Page {
    pub owner: Owner,
    /// + 1 at every change of owner: a late access to an earlier use is told apart.
    pub generation: u32,
    pub slots: [Slot; PAGE],
}

/// The request as this worker runs it, or is about to.
#[derive(Clone, Debug)]
pub struct Running {
    pub owner_epoch: OwnerEpoch,
    pub table: Vec<usize>,
    pub tokens: Vec<u32>,
    pub kv_len: usize,
    pub control: Control,
    /// A kernel that writes this request's KV is in flight.
    pub stepping: bool,
    pub held: Option<MigrationEpoch>,
    pub hold_asked: Option<Op>,
    pub ended: bool,
    /// Read access granted for an attempt.
    pub grant: Option<MigrationEpoch>,
    pub pin: Option<MigrationEpoch>,
    pub dirty: bool,
    /// Slots of its pages that a lost reader may still touch.
    pub stuck: u64,
    /// Retired while a step is in flight: freed when that ends.
    pub dying: bool,
}

/// An import under way.
#[derive(Clone, Debug)]
pub struct Stage {
    pub epoch: MigrationEpoch,
    pub table: Vec<usize>,
    pub generations: Vec<u32>,
    pub tokens: Vec<Option<u32>>,
    /// By slot and replica: when it was last written, when last read by a hash, and what was read.
    pub written: Vec<Slot>,
    pub hashed: Vec<Slot>,
    pub hashed_value: Vec<Slot>,
    /// Hashes under way: key, blocks.
    pub windows: Vec<(Op, std::ops::Range<usize>)>,
    pub attached: Option<usize>,
    pub control: Option<Control>,
    pub re_exported: bool,
    pub armed: bool,
}

#[derive(Clone, Debug)]
pub struct Engine {
    pub pages: Vec<Page>,
    pub run: Option<Running>,
    pub rebuilt: Option<Running>,
    pub stage: Option<Stage>,
    pub quarantined: u64,
}

impl Engine {
    pub fn new() -> Self {
        let page = Page {
            owner: Owner::Free,
            generation: 0,
            slots: [[0; SHARES]; PAGE],
        };
        Self {
            pages: vec![page; PAGES],
            run: None,
            rebuilt: None,
            stage: None,
            quarantined: 0,
        }
    }

    pub fn alloc(&mut self, n: usize, owner: Owner) -> Option<Vec<usize>> {
        let free: Vec<usize> = (0..self.pages.len())
            .filter(|p| self.pages[*p].owner == Owner::Free)
            .take(n)
            .collect();
        if free.len() < n {
            return None;
        }
        for p in &free {
            self.pages[*p].owner = owner;
            self.pages[*p].generation += 1;
            self.pages[*p].slots = [[0xdead; SHARES]; PAGE];
        }
        Some(free)
    }

    /// Frees pages; `quarantined` bytes of them (counted in slots) are never reused.
    pub fn free(&mut self, pages: &[usize], quarantined: u64) {
        let keep = (quarantined as usize).div_ceil(PAGE).min(pages.len());
        for (i, p) in pages.iter().enumerate() {
            let page = &mut self.pages[*p];
            page.generation += 1;
            page.owner = if i < keep {
                Owner::Quarantine
            } else {
                Owner::Free
            };
        }
        self.quarantined += keep as u64;
    }

    pub fn retag(&mut self, pages: &[usize], owner: Owner) {
        for p in pages {
            self.pages[*p].owner = owner;
        }
    }

    pub fn in_use(&self) -> usize {
        let busy = |p: &&Page| !matches!(p.owner, Owner::Free | Owner::Quarantine);
        self.pages.iter().filter(busy).count()
    }

    pub fn slot(&self, table: &[usize], at: usize) -> Slot {
        self.pages[table[at / PAGE]].slots[at % PAGE]
    }

    pub fn set(&mut self, table: &[usize], at: usize, slot: Slot) {
        self.pages[table[at / PAGE]].slots[at % PAGE] = slot;
    }

    pub fn run_slot(&self, at: usize) -> Slot {
        let run = self.run.as_ref().expect("a running request");
        self.slot(&run.table, at)
    }

    /// Ends a decode step of the running request; returns the newly numbered token.
    pub fn finish_step(&mut self) -> (u64, u32) {
        let mut run = self.run.take().expect("a running request");
        let table = std::mem::take(&mut run.table);
        let seen = (0..run.kv_len).map(|at| self.slot(&table, at));
        let (slot, next) = step(seen, &run.control);
        let mut table = table;
        if run.kv_len / PAGE >= table.len() {
            table.extend(self.alloc(1, Owner::Request).expect("a free page"));
        }
        self.set(&table, run.kv_len, slot);
        run.table = table;
        run.kv_len += 1;
        run.control = next;
        run.tokens.push(next.pending);
        run.stepping = false;
        let numbered = (next.seal, next.pending);
        self.run = Some(run);
        numbered
    }
}

impl Stage {
    pub fn new(epoch: MigrationEpoch, table: Vec<usize>, engine: &Engine) -> Self {
        let n = table.len() * PAGE;
        let generations = table.iter().map(|p| engine.pages[*p].generation).collect();
        Self {
            epoch,
            table,
            generations,
            tokens: vec![None; n + 1],
            written: vec![[0; SHARES]; n],
            hashed: vec![[0; SHARES]; n],
            hashed_value: vec![[0; SHARES]; n],
            windows: Vec::new(),
            attached: None,
            control: None,
            re_exported: false,
            armed: false,
        }
    }

    /// Whether each slot of `0..kv_len` was hashed, by every replica, after its last write.
    pub fn fully_hashed(&self, kv_len: usize, replicas: usize) -> bool {
        (0..kv_len).all(|at| {
            (0..replicas)
                .all(|r| self.written[at][r] > 0 && self.hashed[at][r] > self.written[at][r])
        })
    }
}
