//! `bench digest`: hashing resident pages where they lie, beside BLAKE3 on contiguous memory.
//!
//! Pages of a 7B model (28 layers, 4 KV heads of 128, bf16: 56 KiB a token) fill 256 MiB of an
//! engine's pool in NHD or HND order, 16 tokens a block, and are reached through a permuted block
//! table under a read lease, as an engine's are. A round hashes all of it; rounds of ours and of
//! the ceiling alternate.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};
use moonlivekv::digest::{Digester, PageDigest, Scratch};
use moonlivekv::mem::{BlockPool, ReadLease, Region};
use moonlivekv::page::{
    BlockLayout, Dtype, GroupGeometry, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order,
    Resident, Scheme, TokenView,
};
use sha2::Digest as _;

use super::Output;
use super::ceiling::{WORKING_SET, fill};
use super::plot;
use super::progress::Progress;
use super::quiet::{Quiet, own_cpu_seconds};
use super::row::{Row, Rows, round};
use super::stats::Paired;

/// Tokens of a block of the engine's pool.
const BLOCK_TOKENS: u32 = 16;
/// Contiguous inputs of the ceiling: as long as the crate needs to reach its best rate.
const CONTIGUOUS: usize = 1 << 20;

#[derive(Debug, Clone, Args)]
pub struct DigestArgs {
    /// Tokens of a canonical page.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,4,16,32,64,256",
        value_name = "TOKENS,..."
    )]
    page: Vec<u16>,
    /// Threads that hash.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2",
        value_name = "N,..."
    )]
    threads: Vec<usize>,
    /// Digest schemes.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "blake3-leaves",
        value_name = "SCHEME,..."
    )]
    scheme: Vec<SchemeArg>,
    /// Alternating rounds of each case and its ceiling.
    #[arg(long, default_value_t = 7, value_name = "N")]
    rounds: u32,
    #[command(flatten)]
    out: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SchemeArg {
    /// Keyed BLAKE3 a leaf.
    Blake3Leaves,
    /// SHA-256 a leaf.
    Sha256Leaves,
    /// SHA-256 of the packed page.
    Sha256Flat,
}

impl SchemeArg {
    fn scheme(self) -> Scheme {
        match self {
            Self::Blake3Leaves => Scheme::Blake3Leaves,
            Self::Sha256Leaves => Scheme::Sha256Leaves,
            Self::Sha256Flat => Scheme::Sha256Flat,
        }
    }
}

/// A pool full of KV in one layout, and the lease under which it is read.
struct Pool {
    name: &'static str,
    layout: BlockLayout,
    table: Vec<u32>,
    lease: Leased,
    tokens: u64,
}

struct Leased(ReadLease);

impl Resident for Leased {
    #[inline]
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        self.0.try_bytes(offset, len).ok()
    }
}

/// The KV geometry of Qwen2.5-7B.
pub fn geometry() -> anyhow::Result<GroupGeometry> {
    Ok(GroupGeometry::attention(0, 0..28, 4, 128, Dtype::Bf16)?)
}

impl Pool {
    fn new(order: Order) -> anyhow::Result<Self> {
        let group = Arc::new(geometry()?);
        let block_bytes = group.token_bytes() * u64::from(BLOCK_TOKENS);
        let blocks = (WORKING_SET as u64 / block_bytes) as u32;
        let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, order, BLOCK_TOKENS, blocks)
            .build(&group, group.whole())?;
        let mut region = Region::anonymous(layout.region_len())?;
        fill(region.as_mut_slice(), 3);
        let pool = BlockPool::new(region, blocks, |b| {
            layout.extents(b).into_iter().flatten().collect::<Vec<_>>()
        })?;
        let owned = pool.alloc(blocks as usize)?;
        let lease = Leased(pool.read(&owned)?);
        Ok(Self {
            name: match order {
                Order::Nhd => "nhd",
                Order::Hnd => "hnd",
            },
            tokens: u64::from(blocks) * u64::from(BLOCK_TOKENS),
            table: permuted(blocks),
            layout,
            lease,
        })
    }
}

/// A block table without any neighbours side by side.
fn permuted(blocks: u32) -> Vec<u32> {
    let mut table: Vec<u32> = (0..blocks).collect();
    let mut x = 0x2545_f491_4f6c_dd1du64;
    for i in (1..table.len()).rev() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        table.swap(i, (x % (i as u64 + 1)) as usize);
    }
    table
}

/// One thread that hashes resident pages in NHD order, for benches that hold something against it.
pub struct Alone {
    pool: Pool,
    digester: Digester,
    scratch: Scratch,
    out: Vec<PageDigest>,
    page: u16,
}

impl Alone {
    /// Fills 256 MiB of an engine's pool.
    pub fn new(page: u16) -> anyhow::Result<Self> {
        let pool = Pool::new(Order::Nhd)?;
        let group = pool.layout.geometry();
        let scheme = Scheme::Blake3Leaves;
        let header = ObjectSetHeader::new([7; 32], vec![(**group).clone()], page, scheme)?;
        Ok(Self {
            digester: Digester::new(header)?,
            scratch: Scratch::new(1),
            out: vec![PageDigest::default(); (pool.tokens / u64::from(page)) as usize],
            pool,
            page,
        })
    }

    /// Hashes all of it once.
    pub fn run(&mut self) -> anyhow::Result<Rate> {
        let tokens = self.out.len() as u64 * u64::from(self.page);
        let view = TokenView::new(&self.pool.layout, &self.pool.table, 0..tokens)?;
        let began = Began::now();
        self.digester.hash_pages(
            &view,
            &self.pool.lease,
            0..self.out.len() as u32,
            &mut self.scratch,
            None,
            &mut self.out,
        )?;
        std::hint::black_box(&self.out);
        Ok(began.rate(tokens * self.pool.layout.geometry().token_bytes()))
    }
}

/// One case: what is hashed and how.
struct Case<'a> {
    pool: &'a Pool,
    scheme: Scheme,
    page: u16,
    threads: usize,
}

impl Case<'_> {
    fn name(&self) -> String {
        format!(
            "{}/{}tok/{}t/{}",
            self.scheme.name(),
            self.page,
            self.threads,
            self.pool.name
        )
    }

    /// Alternates rounds and makes the row.
    fn run(&self, flat: &[u8], rounds: u32) -> anyhow::Result<Row> {
        let group = self.pool.layout.geometry();
        let header =
            ObjectSetHeader::new([7; 32], vec![(**group).clone()], self.page, self.scheme)?;
        let digester = Digester::new(header)?;
        let pages = (self.pool.tokens / u64::from(self.page)) as u32;
        let tokens = u64::from(pages) * u64::from(self.page);
        let view = TokenView::new(&self.pool.layout, &self.pool.table, 0..tokens)?;
        let bytes = tokens * group.token_bytes();
        let threads = match self.threads {
            0 | 1 => None,
            n => Some(rayon::ThreadPoolBuilder::new().num_threads(n).build()?),
        };
        let mut scratch = Scratch::new(self.threads);
        let mut out = vec![PageDigest::default(); pages as usize];
        let mut ours = || -> anyhow::Result<Rate> {
            let began = Began::now();
            digester.hash_pages(
                &view,
                &self.pool.lease,
                0..pages,
                &mut scratch,
                threads.as_ref(),
                &mut out,
            )?;
            std::hint::black_box(&out);
            Ok(began.rate(bytes))
        };
        // Each once unmeasured: first touch of buffers and code.
        ours()?;
        contiguous(self.scheme, flat, self.threads);
        let (mut paired, mut cpu) = (Paired::default(), Paired::default());
        let mut quiet = Quiet::start(&[]);
        for _ in 0..rounds.max(1) {
            let (a, b) = (ours()?, contiguous(self.scheme, flat, self.threads));
            paired.push(a.wall, b.wall);
            cpu.push(a.cpu, b.cpu);
        }
        quiet.stop();
        let what = match self.scheme {
            Scheme::Blake3Leaves => "blake3, contiguous",
            _ => "sha256, contiguous",
        };
        Ok(Row::rate("digest", self.name(), paired.ours(), paired.n())
            .against(what, paired.ceiling(), paired.ratio())
            .quiet(&quiet)
            .with("scheme", self.scheme.name())
            .with("tokens", self.page)
            .with("threads", self.threads)
            .with("layout", self.pool.name)
            .with("cpu_ratio", round(cpu.ratio()))
            .with("page_bytes", u64::from(self.page) * group.token_bytes()))
    }
}

/// GB/s of a timed piece of work, by the wall clock and by CPU time. On a busy machine the second is
/// the one to trust; it knows nothing of idle waiting.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// By the wall clock.
    pub wall: f64,
    /// By CPU seconds of all threads.
    pub cpu: f64,
}

struct Began(Instant, f64);

impl Began {
    fn now() -> Self {
        Self(Instant::now(), own_cpu_seconds())
    }

    fn rate(&self, bytes: u64) -> Rate {
        Rate {
            wall: bytes as f64 / self.0.elapsed().as_secs_f64() / 1e9,
            cpu: bytes as f64 / (own_cpu_seconds() - self.1).max(1e-9) / 1e9,
        }
    }
}

/// The hash's own crate over contiguous memory, each thread on its share.
pub fn contiguous(scheme: Scheme, flat: &[u8], threads: usize) -> Rate {
    let share = flat.len() / threads.max(1);
    let hash = |part: &[u8]| {
        for input in part.chunks_exact(CONTIGUOUS) {
            match scheme {
                Scheme::Blake3Leaves => {
                    std::hint::black_box(blake3::hash(input));
                }
                Scheme::Sha256Leaves | Scheme::Sha256Flat => {
                    std::hint::black_box(sha2::Sha256::digest(input));
                }
            }
        }
    };
    let hashed: usize = flat
        .chunks_exact(share)
        .map(|p| p.len() / CONTIGUOUS * CONTIGUOUS)
        .sum();
    let began = Began::now();
    match threads {
        0 | 1 => hash(flat),
        _ => std::thread::scope(|s| {
            for part in flat.chunks_exact(share) {
                s.spawn(|| hash(part));
            }
        }),
    }
    began.rate(hashed as u64)
}

/// Runs the bench.
pub fn run(args: &DigestArgs, rows: &mut Rows) -> anyhow::Result<()> {
    let mut flat = Region::anonymous(WORKING_SET as u64)?;
    fill(flat.as_mut_slice(), 5);
    let flat = flat.as_slice();
    let pools = [Pool::new(Order::Nhd)?, Pool::new(Order::Hnd)?];
    let mut cases = Vec::new();
    for scheme in &args.scheme {
        for threads in &args.threads {
            for page in &args.page {
                for pool in &pools {
                    cases.push(Case {
                        pool,
                        scheme: scheme.scheme(),
                        page: *page,
                        threads: (*threads).max(1),
                    });
                }
            }
        }
    }
    let progress = Progress::start(cases.len() as u64);
    for case in &cases {
        progress.say(case.name());
        let row = case
            .run(flat, args.rounds)
            .with_context(|| format!("case {}", case.name()))?;
        rows.push(row)?;
        progress.step();
    }
    drop(progress);
    args.out.draw(|| {
        let note = "pages of a 7B model (56 KiB a token), gathered from resident 16-token blocks";
        plot::digest(
            "Hashing KV pages where they lie".into(),
            plot::note(&[note]),
            rows.all(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_table_is_a_permutation_and_scattered() {
        let table = permuted(292);
        let mut sorted = table.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..292).collect::<Vec<u32>>());
        let beside = table.windows(2).filter(|w| w[0] + 1 == w[1]).count();
        assert!(beside < 10);
    }

    #[test]
    fn a_token_of_the_default_model_takes_56_kib() {
        assert_eq!(geometry().unwrap().token_bytes(), 56 << 10);
    }
}
