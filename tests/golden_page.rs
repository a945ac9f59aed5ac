//! Pages, plans and digests against vectors that `tools/golden/gen_page.py` wrote without sharing a
//! line with this crate.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use moonlivekv::digest::*;
use moonlivekv::page::*;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn cases(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(file);
    let text = std::fs::read_to_string(&path).expect("golden vectors are committed");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("golden vectors are JSON");
    assert!(!cases.is_empty());
    cases
}

fn int(v: &Value) -> u64 {
    v.as_u64().unwrap_or_else(|| panic!("{v} is not a number"))
}

fn u32s(v: &Value) -> Vec<u32> {
    v.as_array()
        .expect("a list")
        .iter()
        .map(|v| int(v) as u32)
        .collect()
}

fn range(v: &Value) -> std::ops::Range<u64> {
    int(&v[0])..int(&v[1])
}

fn text(v: &Value) -> &str {
    v.as_str().unwrap_or_else(|| panic!("{v} is not text"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn geometry(v: &Value) -> GroupGeometry {
    let row = |name: &str| int(&v[name]) as u32;
    GroupGeometry {
        group: int(&v["group"]) as u16,
        kind: match text(&v["kind"]) {
            "attention" => KvKind::Attention,
            "mla" => KvKind::Mla,
            "sliding" => KvKind::SlidingWindow {
                window: row("window"),
            },
            other => panic!("{other}"),
        },
        dtype: match text(&v["dtype"]) {
            "f32" => Dtype::F32,
            "f16" => Dtype::F16,
            "bf16" => Dtype::Bf16,
            "fp8_e4m3" => Dtype::Fp8E4M3,
            "fp8_e5m2" => Dtype::Fp8E5M2,
            "opaque" => Dtype::Opaque {
                tag: int(&v["tag"]) as u16,
            },
            other => panic!("{other}"),
        },
        layers: u32s(&v["layers"]),
        kv_heads: row("kv_heads"),
        k_bytes: row("k_bytes"),
        v_bytes: row("v_bytes"),
        k_scale_bytes: row("k_scale_bytes"),
        v_scale_bytes: row("v_scale_bytes"),
    }
}

fn axes(v: &Value) -> [Axis; 5] {
    let list: Vec<Axis> = v
        .as_array()
        .expect("a list")
        .iter()
        .map(|a| match text(a) {
            "Layer" => Axis::Layer,
            "Kv" => Axis::Kv,
            "Block" => Axis::Block,
            "Head" => Axis::Head,
            "Slot" => Axis::Slot,
            other => panic!("{other}"),
        })
        .collect();
    list.try_into().expect("five axes")
}

fn layout(spec: &Value, geometry: &Arc<GroupGeometry>, shard: Shard) -> BlockLayout {
    LayoutSpec {
        axes: axes(&spec["axes"]),
        block_tokens: int(&spec["block_tokens"]) as u32,
        blocks: int(&spec["blocks"]) as u32,
        base: int(&spec["base"]),
        block_pad: int(&spec["block_pad"]),
        scales: match &spec["scale_axes"] {
            Value::Null => Scales::OnKvAxis,
            apart => Scales::Apart(axes(apart)),
        },
    }
    .build(geometry, shard)
    .expect("a valid layout")
}

fn shard(v: &Value) -> Shard {
    Shard {
        layers: u32s(&v["layers"]),
        heads: u32s(&v["heads"]),
    }
}

fn content(seed: u64, layer: u32, head: u32, c: Component, token: u64, n: u32) -> Vec<u8> {
    (0..n)
        .map(|at| {
            let mut x = seed ^ 0x9e37_79b9_7f4a_7c15;
            for v in [
                u64::from(layer),
                u64::from(head),
                c as u64,
                token,
                u64::from(at),
            ] {
                x = (x ^ v).wrapping_mul(0xff51_afd7_ed55_8ccd);
                x ^= x >> 32;
            }
            (x >> 24) as u8
        })
        .collect()
}

fn fill(view: &TokenView<'_>, seed: u64, region: &mut [u8]) {
    let layout = view.layout();
    for token in view.tokens() {
        let (block, slot) = view.place(token).expect("covered");
        for (layer, head) in layout.shard().iter() {
            for &c in layout.components() {
                let row = content(seed, layer, head, c, token, layout.geometry().row_bytes(c));
                let at = layout
                    .locate(layer, head, c, block, slot)
                    .expect("in the shard") as usize;
                region[at..at + row.len()].copy_from_slice(&row);
            }
        }
    }
}

#[test]
fn layouts_put_every_row_where_the_vectors_do() {
    for case in cases("layouts.json") {
        let name = text(&case["name"]);
        let geometry = Arc::new(geometry(&case["geometry"]));
        let layout = layout(&case["spec"], &geometry, shard(&case));
        assert_eq!(layout.region_len(), int(&case["region_len"]), "{name}");
        let table = u32s(&case["table"]);
        let view = TokenView::new(&layout, &table, range(&case["tokens"])).expect(name);
        let mut region = vec![0; layout.region_len() as usize];
        fill(&view, int(&case["seed"]), &mut region);
        assert_eq!(
            hex(&Sha256::digest(&region)),
            text(&case["region_sha256"]),
            "{name}"
        );
        let extents: Vec<Vec<[u64; 2]>> = (0..layout.blocks())
            .map(|b| {
                layout
                    .extents(b)
                    .expect(name)
                    .map(|(at, len)| [at, len])
                    .collect()
            })
            .collect();
        let json = serde_json::to_string(&extents).expect("numbers");
        assert_eq!(
            hex(&Sha256::digest(json)),
            text(&case["extents_sha256"]),
            "{name}"
        );
    }
}

#[test]
fn plans_are_the_vectors_runs() {
    for case in cases("plans.json") {
        let name = text(&case["name"]);
        let geometry = Arc::new(geometry(&case["geometry"]));
        let sides = [&case["src"], &case["dst"]].map(|side| {
            (
                layout(&side["spec"], &geometry, shard(side)),
                u32s(&side["table"]),
            )
        });
        let [src, dst] = sides.each_ref().map(|(layout, table)| {
            TokenView::new(layout, table, range(&case["have"])).expect(name)
        });
        let mut runs = Vec::new();
        plan_copy(&src, &dst, range(&case["tokens"]), &mut runs).expect(name);
        let got: Vec<[u64; 3]> = runs.iter().map(|r| [r.src_off, r.dst_off, r.len]).collect();
        let want: Vec<[u64; 3]> =
            serde_json::from_value(case["runs"].clone()).expect("triples of numbers");
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn digests_are_the_vectors_digests_in_every_layout_and_scheme() {
    let mut schemes = BTreeSet::new();
    for case in cases("digests.json") {
        let name = text(&case["name"]);
        let h = &case["header"];
        let scheme = Scheme::ALL
            .into_iter()
            .find(|s| s.name() == text(&h["scheme"]))
            .expect(name);
        schemes.insert(scheme.name());
        let model: Vec<u8> = (0..32)
            .map(|i| u8::from_str_radix(&text(&h["model"])[2 * i..2 * i + 2], 16).expect(name))
            .collect();
        let groups = h["groups"]
            .as_array()
            .expect(name)
            .iter()
            .map(geometry)
            .collect();
        let model = model.try_into().expect("32 bytes");
        let header =
            ObjectSetHeader::new(model, groups, int(&h["page_tokens"]) as u16, scheme).expect(name);
        assert_eq!(hex(&header.encode()), text(&case["header_hex"]), "{name}");
        assert_eq!(
            ObjectSetHeader::decode(&header.encode()).as_ref(),
            Ok(&header)
        );
        let digester = Arc::new(Digester::new(header.clone()).expect(name));
        assert_eq!(
            hex(&digester.header_digest()),
            text(&case["header_digest"]),
            "{name}"
        );
        // Blocks smaller and larger than a page, both head orders, K and V apart and side by side.
        for (major, kv, order, block_tokens) in [
            (Major::Layer, KvSplit::Planes, Order::Nhd, 16),
            (Major::Layer, KvSplit::InBlock, Order::Hnd, 64),
            (Major::Block, KvSplit::InRow, Order::Hnd, 3),
            (Major::Block, KvSplit::Planes, Order::Nhd, 1),
        ] {
            let spec = LayoutSpec::new(major, kv, order, block_tokens, 150 / block_tokens + 2);
            check_digests(&case, &digester, spec);
        }
    }
    assert_eq!(schemes.len(), 3);
}

fn check_digests(case: &Value, digester: &Arc<Digester>, spec: LayoutSpec) {
    let name = text(&case["name"]);
    let header = digester.header();
    let kv_len = int(&case["kv_len"]);
    let seed = int(&case["seed"]);
    let groups = case["groups"].as_array().expect(name);
    let retained: Vec<(u16, u64)> = groups
        .iter()
        .map(|g| (int(&g["group"]) as u16, int(&g["retained_from"])))
        .collect();
    let mut set = digester.set_hasher(&retained).expect(name);
    let mut tails = Vec::new();
    for (want, geometry) in groups.iter().zip(&header.groups) {
        let geometry = Arc::new(geometry.clone());
        let from = int(&want["retained_from"]);
        let pages = want["pages"].as_array().expect(name);
        let whole = Pool::new(&spec, &geometry, geometry.whole(), from..kv_len, seed);
        for page in pages {
            let slots = range(&page["slots"]);
            let span = PageSpan {
                page: int(&page["page"]) as u32,
                from: slots.start as u16,
                to: slots.end as u16,
            };
            let got = whole.page_digest(digester, span.page);
            assert_eq!(
                got.to_string(),
                text(&page["digest"]),
                "{name} page {}",
                span.page
            );
            if header.scheme != Scheme::Sha256Flat {
                assert_eq!(
                    whole.leaves(digester, span.page),
                    texts(&page["leaves"]),
                    "{name}"
                );
            }
            if span.sealed(header.page_tokens) {
                set.push_sealed(geometry.group, span, &got).expect(name);
            } else {
                tails.push((geometry.group, got));
            }
        }
        for rank in want["ranks"].as_array().into_iter().flatten() {
            let (r, size) = (int(&rank["rank"]) as u32, int(&rank["size"]) as u32);
            let shard = Shard::tensor_parallel(&geometry, r, size).expect(name);
            assert_eq!(
                shard.heads,
                u32s(&rank["heads"]),
                "{name} rank {r} of {size}"
            );
            let pool = Pool::new(&spec, &geometry, shard, from..kv_len, seed);
            for (page, want) in pages.iter().zip(rank["leaves"].as_array().expect(name)) {
                let page = int(&page["page"]) as u32;
                assert_eq!(
                    pool.leaves(digester, page),
                    texts(want),
                    "{name} rank {r} of {size}"
                );
            }
        }
    }
    let got = set.finish(kv_len, &tails).expect(name);
    assert_eq!(got.to_string(), text(&case["set_digest"]), "{name}");
}

fn texts(v: &Value) -> Vec<String> {
    v.as_array()
        .expect("a list")
        .iter()
        .map(|v| text(v).to_owned())
        .collect()
}

struct Pool {
    layout: BlockLayout,
    table: Vec<u32>,
    tokens: std::ops::Range<u64>,
    region: Vec<u8>,
}

impl Pool {
    fn new(
        spec: &LayoutSpec,
        geometry: &Arc<GroupGeometry>,
        shard: Shard,
        tokens: std::ops::Range<u64>,
        seed: u64,
    ) -> Self {
        let layout = spec.build(geometry, shard).expect("a valid layout");
        let mut region = vec![0xa5; layout.region_len() as usize];
        let bt = u64::from(layout.block_tokens());
        let n = tokens.end.div_ceil(bt) - (tokens.start / bt).min(tokens.end.div_ceil(bt));
        // Any order but the straight one.
        let table: Vec<u32> = (0..n as u32).rev().collect();
        let view = TokenView::new(&layout, &table, tokens.clone()).expect("covered");
        fill(&view, seed, &mut region);
        Self {
            layout,
            table,
            tokens,
            region,
        }
    }

    fn view(&self) -> TokenView<'_> {
        TokenView::new(&self.layout, &self.table, self.tokens.clone()).expect("covered")
    }

    fn page_digest(&self, digester: &Digester, page: u32) -> PageDigest {
        let mut out = [PageDigest::default()];
        let mut scratch = Scratch::default();
        digester
            .hash_pages(
                &self.view(),
                &self.region,
                page..page + 1,
                &mut scratch,
                None,
                &mut out,
            )
            .expect("resident");
        out[0]
    }

    fn leaves(&self, digester: &Digester, page: u32) -> Vec<String> {
        let mut out = vec![LeafDigest::default(); self.layout.shard().leaves()];
        let mut scratch = Scratch::default();
        digester
            .hash_leaves(
                &self.view(),
                &self.region,
                page..page + 1,
                &mut scratch,
                None,
                &mut out,
            )
            .expect("resident");
        out.iter().map(ToString::to_string).collect()
    }
}

/// The generator is where the vectors come from: run it again and compare.
#[test]
fn the_committed_vectors_are_what_the_generator_writes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary directory");
    let run = Command::new("python3")
        .arg(root.join("tools/golden/gen_page.py"))
        .arg(out.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    let run = match run {
        Ok(run) => run,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("python3 not found: the generator was not run again");
            return;
        }
        Err(e) => panic!("python3: {e}"),
    };
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
    for file in ["digests.json", "layouts.json", "plans.json"] {
        let new = std::fs::read(out.path().join(file)).expect("written");
        let old = std::fs::read(root.join("tests/golden").join(file)).expect("committed");
        assert!(new == old, "{file} differs from what the generator writes");
    }
}
