//! A request whose first tokens are already here: what is missing of its first page, and of its
//! tail, arrives behind them on every path, and the pages then hash as whole ones.

use moonlivekv::digest::{Digester, PageDigest, Scratch};
use moonlivekv::mem::{BlockPool, Region};
use moonlivekv::page::{
    BlockLayout, Dtype, GroupGeometry, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order, Scheme,
    TokenView, plan_copy,
};
use moonlivekv::transport::{
    Access, Completion, Local, LocalTransport, Scope, ShmOptions, ShmTransport, Span, TcpOptions,
    TcpTransport, Transfer, Transport,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u16 = 256;
const TOKENS: u64 = 263;
const LOCAL: u64 = 80;

fn geometry() -> GroupGeometry {
    GroupGeometry::attention(0, [0, 3, 5], 4, 16, Dtype::Bf16).unwrap()
}

/// A pool whose first `table.len()` blocks belong to the request, in another order than its tokens.
struct Side {
    layout: BlockLayout,
    pool: Arc<BlockPool>,
    table: Vec<u32>,
}

impl Side {
    fn new(order: Order, split: KvSplit, block_tokens: u32) -> Self {
        let blocks = (TOKENS as u32).div_ceil(block_tokens);
        let spec = LayoutSpec::new(Major::Block, split, order, block_tokens, blocks);
        let geometry = Arc::new(geometry());
        let layout = spec.build(&geometry, geometry.whole()).unwrap();
        let mut region = Region::memfd("partial-chunk", layout.region_len()).unwrap();
        region.as_mut_slice().fill(0xee);
        let pool = BlockPool::contiguous(region, layout.block_bytes()).unwrap();
        pool.alloc(blocks as usize).unwrap();
        let table = (0..blocks)
            .map(|b| (b * 3 + 1) % blocks)
            .collect::<Vec<_>>();
        let mut sorted = table.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), table.len(), "3 must not divide {blocks}");
        Self {
            layout,
            pool,
            table,
        }
    }

    fn view(&self) -> TokenView<'_> {
        TokenView::new(&self.layout, &self.table, 0..TOKENS).unwrap()
    }

    /// Writes `tokens`; each row says whose it is.
    fn fill(&self, tokens: std::ops::Range<u64>, seed: u8) {
        let mut lease = self.pool.write(&self.table).unwrap();
        let view = self.view();
        for token in tokens {
            let (block, slot) = view.place(token).unwrap();
            for (layer, head) in self.layout.shard().iter() {
                for &c in self.layout.components() {
                    let at = self.layout.locate(layer, head, c, block, slot).unwrap();
                    let len = self.layout.geometry().row_bytes(c) as usize;
                    for (i, byte) in lease.bytes_mut(at, len).iter_mut().enumerate() {
                        let x = token * 31 + u64::from(layer * 7 + head * 3) + c as u64 * 11;
                        *byte = (x + i as u64) as u8 ^ seed;
                    }
                }
            }
        }
    }

    fn digests(&self) -> [PageDigest; 2] {
        let header = ObjectSetHeader::new([1; 32], vec![geometry()], PAGE, Scheme::Blake3Leaves);
        let digester = Digester::new(header.unwrap()).unwrap();
        let lease = self.pool.read(&self.table).unwrap();
        let region = lease.bytes(0, self.layout.region_len() as usize).to_vec();
        let mut out = [PageDigest::default(); 2];
        let mut scratch = Scratch::default();
        digester
            .hash_pages(&self.view(), &region, 0..2, &mut scratch, None, &mut out)
            .unwrap();
        out
    }
}

fn arrives_behind_what_is_here(owner: &dyn Transport, asker: &dyn Transport) {
    let shapes = [
        (Order::Nhd, KvSplit::InRow, 16),
        (Order::Hnd, KvSplit::InBlock, 64),
        (Order::Hnd, KvSplit::InRow, 256),
    ];
    for (from_order, from_split, from_block) in shapes {
        for (to_order, to_split, to_block) in shapes {
            let source = Side::new(from_order, from_split, from_block);
            // What the asker has must not be taken from here again: the owner's copy is another.
            source.fill(0..LOCAL, 0x55);
            source.fill(LOCAL..TOKENS, 0);
            let here = Side::new(to_order, to_split, to_block);
            here.fill(0..LOCAL, 0);
            let whole = Side::new(to_order, to_split, to_block);
            whole.fill(0..TOKENS, 0);
            assert_ne!(here.digests(), whole.digests());

            let mut runs = Vec::new();
            plan_copy(&source.view(), &here.view(), LOCAL..TOKENS, &mut runs).unwrap();
            let bytes: u64 = runs.iter().map(|r| r.len).sum();
            let geometry = source.layout.geometry();
            let row = u64::from(geometry.k_bytes + geometry.v_bytes);
            assert_eq!(
                bytes,
                (TOKENS - LOCAL) * 3 * 4 * row,
                "only what is missing"
            );
            let remote = owner
                .register(&source.pool, Access::RemoteRead, Scope::Pool)
                .unwrap();
            let soon = Instant::now() + Duration::from_secs(20);
            let mut link = asker.connect(&owner.endpoint(), soon).unwrap();
            let spans: Vec<Span> = runs
                .iter()
                .map(|r| Span {
                    remote_off: r.src_off,
                    local_off: r.dst_off,
                    len: r.len,
                })
                .collect();
            for part in spans.chunks(512) {
                link.submit(Transfer {
                    local: Local::GetInto(here.pool.write(&here.table).unwrap()),
                    remote,
                    spans: part.to_vec(),
                    deadline: soon,
                })
                .map_err(|r| r.error)
                .unwrap();
                let mut out = [Completion::empty()];
                assert_eq!(link.wait(&mut out, soon), 1);
                assert_eq!(out[0].outcome, Ok(()));
            }
            assert_eq!(
                here.digests(),
                whole.digests(),
                "{from_order:?}/{from_block} -> {to_order:?}/{to_block}"
            );
            owner.revoke(remote.key, soon).unwrap();
        }
    }
}

#[test]
fn a_page_partly_here_is_completed_over_local() {
    let [a, b] = ["partial-a", "partial-b"].map(|n| LocalTransport::bind(n, None, None).unwrap());
    arrives_behind_what_is_here(&a, &b);
}

#[test]
fn a_page_partly_here_is_completed_over_shm() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] =
        ["a", "b"].map(|n| ShmTransport::bind(ShmOptions::at(dir.path().join(n))).unwrap());
    arrives_behind_what_is_here(&a, &b);
}

#[test]
fn a_page_partly_here_is_completed_over_tcp() {
    let [a, b] = [(); 2].map(|()| TcpTransport::bind(TcpOptions::default()).unwrap());
    arrives_behind_what_is_here(&a, &b);
}
