//! The digest benchmark, without its clock: our hashing of resident pages against the blake3 crate
//! on contiguous memory, interleaved in one run. `moonlive bench digest` and `benches/digest.rs`
//! call it.
//!
//! The workload is the KV of a 7B model (28 layers, 4 KV heads of 128 bf16): 56 KiB a token, 112
//! leaves, cold memory (several times the last-level cache), blocks of 16 tokens in random order.

use std::sync::Arc;

use rayon::ThreadPool;

use super::{DigestError, Digester, LeafDigest, PageDigest, Scheme, Scratch, TailHasher};
use crate::page::{
    BlockLayout, Dtype, GroupGeometry, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order,
    TokenView,
};

/// Tokens of an engine block in the workload.
pub const BLOCK_TOKENS: u32 = 16;
/// Slices of the memory that ours and theirs hash in turn.
const SLICES: usize = 8;

/// A pool full of KV, its block table in random order.
pub struct Workload {
    order: Order,
    layout: BlockLayout,
    table: Vec<u32>,
    bytes: Vec<u8>,
}

/// One line of the benchmark.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// `scheme/tokens per page/threads`, with `/hnd` where heads lie outside tokens.
    pub case: String,
    /// Bytes hashed per call measured.
    pub bytes: u64,
    /// Median nanoseconds of ours per call.
    pub ours_ns: u64,
    /// Median nanoseconds of `blake3::hash` over as many contiguous bytes with as many threads.
    pub against_ns: u64,
}

impl Measured {
    /// Ours, in 10^9 bytes per second.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.ours_ns.max(1) as f64
    }

    /// The ceiling, in 10^9 bytes per second.
    pub fn against_gbps(&self) -> f64 {
        self.bytes as f64 / self.against_ns.max(1) as f64
    }

    /// Ours as a part of the ceiling.
    pub fn ratio(&self) -> f64 {
        self.against_ns as f64 / self.ours_ns.max(1) as f64
    }
}

fn geometry() -> Result<Arc<GroupGeometry>, DigestError> {
    Ok(Arc::new(GroupGeometry::attention(
        0,
        0..28,
        4,
        128,
        Dtype::Bf16,
    )?))
}

fn digester(page_tokens: u16, scheme: Scheme) -> Result<Arc<Digester>, DigestError> {
    let groups = vec![(*geometry()?).clone()];
    let header = ObjectSetHeader::new([0; 32], groups, page_tokens, scheme)?;
    Ok(Arc::new(Digester::new(header)?))
}

impl Workload {
    /// About `bytes` of KV (rounded down to whole 64-token pages, at least one per slice).
    pub fn new(order: Order, bytes: usize) -> Result<Self, DigestError> {
        let geometry = geometry()?;
        let page = 64 * geometry.token_bytes() as usize;
        let pages = (bytes / page / SLICES).max(1) * SLICES;
        let blocks = (pages * 64) as u32 / BLOCK_TOKENS;
        let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, order, BLOCK_TOKENS, blocks)
            .build(&geometry, geometry.whole())?;
        let mut random = Random(1);
        let mut bytes = vec![0u8; layout.region_len() as usize];
        for word in bytes.as_chunks_mut::<8>().0 {
            *word = random.next().to_le_bytes();
        }
        let mut table: Vec<u32> = (0..blocks).collect();
        for i in (1..table.len()).rev() {
            table.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        Ok(Self {
            order,
            layout,
            table,
            bytes,
        })
    }

    /// Hashes all pages of `page_tokens` tokens (1 to 64, a power of two), `rounds` times, in turn
    /// with the blake3 crate. `pool` sets the number of threads, both sides use it; `now` gives
    /// nanoseconds of a monotonic clock.
    pub fn measure(
        &self,
        scheme: Scheme,
        page_tokens: u16,
        pool: &ThreadPool,
        rounds: usize,
        now: &dyn Fn() -> u64,
    ) -> Result<Measured, DigestError> {
        let digester = digester(page_tokens, scheme)?;
        let threads = pool.current_num_threads();
        let mut scratch = Scratch::new(threads);
        let tokens = self.table.len() as u64 * u64::from(BLOCK_TOKENS);
        let view = TokenView::new(&self.layout, &self.table, 0..tokens)?;
        let pages = (tokens / u64::from(page_tokens)) as u32 / SLICES as u32;
        let mut out = vec![PageDigest::default(); pages as usize];
        let slice = self.bytes.len() / SLICES;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            for i in 0..SLICES {
                let range = i as u32 * pages..(i as u32 + 1) * pages;
                let memory = self.bytes.as_slice();
                let threads = (threads > 1).then_some(pool);
                let start = now();
                digester.hash_pages(&view, memory, range, &mut scratch, threads, &mut out)?;
                ours.push(now() - start);
                // Another slice, so that neither side finds the other's bytes in a cache.
                let at = (i + SLICES / 2) % SLICES * slice;
                let start = now();
                hash_contiguous(&memory[at..at + slice], pool);
                theirs.push(now() - start);
            }
        }
        let layout = if self.order == Order::Hnd { "/hnd" } else { "" };
        Ok(Measured {
            case: format!("{scheme}/{page_tokens}tok/{threads}t{layout}"),
            bytes: slice as u64,
            ours_ns: median(&mut ours),
            against_ns: median(&mut theirs),
        })
    }

    /// One decoded token in the fence: extends the tail's leaf states by one slot and takes their
    /// digests, against one `blake3::hash` of as many contiguous bytes. One thread; the slot's rows
    /// have just been written, so both sides find their bytes in cache.
    pub fn measure_tail(
        &self,
        rounds: usize,
        now: &dyn Fn() -> u64,
    ) -> Result<Measured, DigestError> {
        let page_tokens = BLOCK_TOKENS as u16;
        let digester = digester(page_tokens, Scheme::Blake3Leaves)?;
        let mut tail = TailHasher::new(digester, &self.layout)?;
        let tokens = self.table.len() as u64 * u64::from(BLOCK_TOKENS);
        let view = TokenView::new(&self.layout, &self.table, 0..tokens)?;
        let bytes = self.layout.geometry().token_bytes() as usize;
        let mut leaves = vec![LeafDigest::default(); self.layout.shard().leaves()];
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            tail.reset(round as u32 % self.table.len() as u32, 0);
            for slot in 0..page_tokens {
                let token = tail.span().tokens(page_tokens).end;
                self.touch(&view, token)?;
                let start = now();
                tail.extend(&view, self.bytes.as_slice(), slot..slot + 1)?;
                tail.leaves(&mut leaves)?;
                ours.push(now() - start);
                let at = (round * 97 + usize::from(slot)) * bytes % (self.bytes.len() - bytes);
                std::hint::black_box(self.bytes[at..at + bytes].iter().step_by(64).max());
                let start = now();
                std::hint::black_box(blake3::hash(&self.bytes[at..at + bytes]));
                theirs.push(now() - start);
            }
        }
        let layout = if self.order == Order::Hnd { "/hnd" } else { "" };
        Ok(Measured {
            case: format!("tail-slot/1t{layout}"),
            bytes: bytes as u64,
            ours_ns: median(&mut ours),
            against_ns: median(&mut theirs),
        })
    }
}

impl Workload {
    /// Reads every row of a token.
    fn touch(&self, view: &TokenView<'_>, token: u64) -> Result<(), DigestError> {
        let (block, slot) = view.place(token)?;
        let geometry = self.layout.geometry();
        for (layer, head) in self.layout.shard().iter() {
            for c in geometry.components() {
                let at = self.layout.locate(layer, head, c, block, slot)? as usize;
                let row = &self.bytes[at..at + geometry.row_bytes(c) as usize];
                std::hint::black_box(row.iter().step_by(64).max());
            }
        }
        Ok(())
    }
}

/// The ceiling: each thread one contiguous part.
fn hash_contiguous(bytes: &[u8], pool: &ThreadPool) {
    let threads = pool.current_num_threads();
    if threads == 1 {
        std::hint::black_box(blake3::hash(bytes));
        return;
    }
    pool.scope(|scope| {
        for part in bytes.chunks(bytes.len().div_ceil(threads)) {
            scope.spawn(move |_| {
                std::hint::black_box(blake3::hash(part));
            });
        }
    });
}

fn median(samples: &mut [u64]) -> u64 {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or(0)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
