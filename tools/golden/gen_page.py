#!/usr/bin/env python3
"""Writes the golden vectors of pages and digests, independently of the Rust code.

    python3 tools/golden/gen_page.py [DIRECTORY]     (default: tests/golden)

Python 3.11's standard library only. Nothing here computes a stride: pools are laid out by walking
their axes and handing out the next free bytes, plans are found byte by byte, leaves are built token
by token. `tests/golden.rs` reads the files; it also runs this script and compares.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import blake3_plain as b3

MASK64 = (1 << 64) - 1
SCHEMES = {"blake3-leaves": 1, "sha256-leaves": 2, "sha256-flat": 3}
KINDS = {"attention": 0, "mla": 1, "sliding": 2}
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "opaque": 5}
COMPONENTS = ["k", "v", "k_scale", "v_scale"]


def content(seed, layer, head, component, token, n):
    """The row of `n` bytes that every pool holding it must hold."""
    out = bytearray()
    for at in range(n):
        x = seed ^ 0x9E3779B97F4A7C15
        for v in (layer, head, component, token, at):
            x = ((x ^ v) * 0xFF51AFD7ED558CCD) & MASK64
            x ^= x >> 32
        out.append(x >> 24 & 0xFF)
    return bytes(out)


# ---- geometry and header -------------------------------------------------------------------


def geometry(group, layers, kv_heads, k, v, k_scale=0, v_scale=0, kind="attention", dtype="bf16",
             window=0, tag=0):
    return dict(group=group, kind=kind, window=window, dtype=dtype, tag=tag, layers=list(layers),
                kv_heads=kv_heads, k_bytes=k, v_bytes=v, k_scale_bytes=k_scale,
                v_scale_bytes=v_scale)


def row_bytes(g, c):
    return g[COMPONENTS[c] + ("_bytes")]


def present(g):
    return [c for c in range(4) if row_bytes(g, c)]


def encode_geometry(g):
    out = struct.pack("<BIBH", KINDS[g["kind"]], g["window"], DTYPES[g["dtype"]], g["tag"])
    out += struct.pack("<5I", g["kv_heads"], *(row_bytes(g, c) for c in range(4)))
    out += struct.pack("<I", len(g["layers"]))
    return out + b"".join(struct.pack("<I", layer) for layer in g["layers"])


def encode_header(h):
    out = b"MLKH" + struct.pack("<BBH", 1, SCHEMES[h["scheme"]], h["page_tokens"])
    out += bytes.fromhex(h["model"]) + struct.pack("<H", len(h["groups"]))
    for g in h["groups"]:
        out += struct.pack("<H", g["group"]) + encode_geometry(g)
    return out


# ---- digests -------------------------------------------------------------------------------


def derive(scheme, domain, material):
    if scheme == "blake3-leaves":
        return b3.derive_key(domain, material)
    return hashlib.sha256(domain.encode() + b"\0" + material).digest()


def keyed(scheme, key, message):
    if scheme == "blake3-leaves":
        return b3.keyed_hash(key, message)
    # The key fills SHA-256's first block.
    return hashlib.sha256(key + bytes(32) + message).digest()


def page_spans(page_tokens, tokens):
    for page in range(tokens[0] // page_tokens, -(-tokens[1] // page_tokens)):
        start = max(tokens[0], page * page_tokens) - page * page_tokens
        end = min(tokens[1], (page + 1) * page_tokens) - page * page_tokens
        yield page, start, end


def leaf_bytes(g, seed, layer, head, tokens):
    return b"".join(content(seed, layer, head, c, token, row_bytes(g, c))
                    for token in range(*tokens) for c in present(g))


def token_bytes(g):
    return sum(row_bytes(g, c) for c in range(4))


def digest_group(h, g, seed, tokens):
    scheme, page_tokens = h["scheme"], h["page_tokens"]
    material = bytes([SCHEMES[scheme]]) + struct.pack("<H", page_tokens) + encode_geometry(g)
    leaf_key = derive(scheme, "MoonLiveKV v1 leaf", material)
    page_key = derive(scheme, "MoonLiveKV v1 page", material)
    pages = []
    for page, start, end in page_spans(page_tokens, tokens):
        first = page * page_tokens
        leaves = [leaf_bytes(g, seed, layer, head, (first + start, first + end))
                  for layer in g["layers"] for head in range(g["kv_heads"])]
        if scheme == "sha256-flat":
            pad = token_bytes(g)
            packed = b"".join(bytes(start * pad) + leaf + bytes((page_tokens - end) * pad)
                              for leaf in leaves)
            digests, digest = [], hashlib.sha256(packed).digest()
        else:
            digests = [keyed(scheme, leaf_key, leaf) for leaf in leaves]
            message = struct.pack("<HH", start, end) + b"".join(digests)
            digest = keyed(scheme, page_key, message)
        pages.append((page, start, end, digests, digest))
    return pages


def set_digest(h, groups, kv_len):
    """`groups`: (geometry, first retained token, pages)."""
    scheme = h["scheme"]
    key = derive(scheme, "MoonLiveKV v1 set", bytes([SCHEMES[scheme]]))
    header = keyed(scheme, derive(scheme, "MoonLiveKV v1 header", b""), encode_header(h))
    message = b"\2" + header + struct.pack("<Q", kv_len)
    for g, retained, pages in groups:
        state = keyed(scheme, key, b"\0" + header + struct.pack("<HQ", g["group"], retained))
        tail = b"\0"
        for page, start, end, _, digest in pages:
            span = struct.pack("<IHH", page, start, end)
            if end == h["page_tokens"]:
                state = keyed(scheme, key, b"\1" + state + span + digest)
            else:
                tail = b"\1" + span + digest
        message += struct.pack("<HQ", g["group"], retained) + state + tail
    return header, keyed(scheme, key, message)


def tp_heads(g, rank, size):
    if g["kv_heads"] % size == 0:
        n = g["kv_heads"] // size
        return list(range(rank * n, (rank + 1) * n))
    assert size % g["kv_heads"] == 0
    return [rank // (size // g["kv_heads"])]


def digest_case(name, groups, page_tokens, scheme, kv_len, retained=None, tp=(), seed=7):
    h = dict(model=hashlib.sha256(name.encode()).hexdigest(), groups=groups,
             page_tokens=page_tokens, scheme=scheme)
    retained = retained or {}
    done = []
    for g in groups:
        first = retained.get(g["group"], 0)
        done.append((g, first, digest_group(h, g, seed, (first, kv_len))))
    header, total = set_digest(h, done, kv_len)
    out_groups = []
    for g, first, pages in done:
        out = dict(group=g["group"], retained_from=first, pages=[
            dict(page=p, slots=[a, b], leaves=[d.hex() for d in leaves], digest=digest.hex())
            for p, a, b, leaves, digest in pages])
        if tp and scheme != "sha256-flat":
            out["ranks"] = [
                dict(rank=r, size=size, heads=tp_heads(g, r, size), leaves=[
                    [leaves[i * g["kv_heads"] + head].hex()
                     for i in range(len(g["layers"])) for head in tp_heads(g, r, size)]
                    for _, _, _, leaves, _ in pages])
                for size in tp for r in range(size)]
        out_groups.append(out)
    return dict(name=f"{name}/{scheme}", header=h, header_hex=encode_header(h).hex(),
                header_digest=header.hex(), seed=seed, kv_len=kv_len, groups=out_groups,
                set_digest=total.hex())


def digest_cases():
    two = geometry(0, [0, 1], 2, 32, 32)
    plain = [
        ("gqa-bf16", [two], 16, 37, {}, (1, 2, 4)),
        ("gqa-bf16-page1", [two], 1, 3, {}, ()),
        ("gqa-bf16-page64-aligned", [two], 64, 64, {}, ()),
        ("head-dim-128", [geometry(0, [4], 2, 256, 256)], 16, 25, {}, (2,)),
        ("chunk-ends", [geometry(0, [0], 1, 64, 64)], 128, 123, {}, ()),
        ("mqa-f32", [geometry(5, [3, 7, 8], 1, 64, 64, dtype="f32")], 8, 19, {}, (2,)),
        ("f16-v-narrower", [geometry(0, [0], 3, 96, 48, dtype="f16")], 5, 12, {}, (3,)),
        ("fp8-e4m3-scales", [geometry(0, [0, 2], 2, 64, 64, 4, 4, dtype="fp8_e4m3")], 16, 21, {},
         (2,)),
        ("fp8-e5m2-k-scale", [geometry(0, [1], 2, 40, 40, 2, 0, dtype="fp8_e5m2")], 16, 17, {}, ()),
        ("q8_0-opaque", [geometry(0, [0], 2, 34, 34, dtype="opaque", tag=8)], 16, 9, {}, ()),
        ("mla-576-bf16", [geometry(0, [0, 1], 1, 1152, 0, kind="mla")], 4, 6, {}, (2,)),
        ("mla-656-packed-fp8", [geometry(0, [0, 60], 1, 656, 0, kind="mla", dtype="fp8_e4m3")], 4, 5,
         {}, ()),
        ("full-and-sliding", [two, geometry(1, [2, 3], 2, 32, 32, kind="sliding", window=24)], 16,
         50, {1: 21}, (2,)),
        ("empty", [two], 16, 0, {}, ()),
    ]
    return [digest_case(name, groups, page, scheme, kv_len, retained, tp)
            for name, groups, page, kv_len, retained, tp in plain for scheme in SCHEMES]


# ---- layouts -------------------------------------------------------------------------------


def lay_out(g, spec, layers, heads):
    """{(layer, head, component, block, slot): offset}, end. Walks the axes, outermost first, and
    gives each row the next free bytes."""
    where = {}
    counts = dict(Layer=layers, Block=range(spec["blocks"]), Slot=range(spec["block_tokens"]),
                  Head=heads)
    cursor = spec["base"]

    def walk(axes, place, components):
        nonlocal cursor
        if not axes:
            (component,) = place["Kv"]
            key = (place["Layer"], place["Head"], component, place["Block"], place["Slot"])
            where[key] = cursor
            cursor += row_bytes(g, component)
            return
        axis, rest = axes[0], axes[1:]
        if axis == "Kv":
            for component in components:
                walk(rest, {**place, "Kv": (component,)}, components)
            return
        for value in counts[axis]:
            walk(rest, {**place, axis: value}, components)
            if axis == "Block":
                # The padding of a block follows each of its contiguous parts.
                cursor += spec["block_pad"]

    apart = spec.get("scale_axes")
    main = [c for c in present(g) if not apart or c < 2]
    walk(spec["axes"], {}, main)
    scales = [c for c in present(g) if c not in main]
    if scales:
        walk(apart, {}, scales)
    return where, cursor


def rows_of(g, spec, layers, heads, table, tokens):
    where, end = lay_out(g, spec, layers, heads)
    first = tokens[0] // spec["block_tokens"]
    rows = {}
    for token in range(*tokens):
        block = table[token // spec["block_tokens"] - first]
        for layer in layers:
            for head in heads:
                for c in present(g):
                    slot = token % spec["block_tokens"]
                    rows[layer, head, c, token] = where[layer, head, c, block, slot]
    return rows, end


def permutation(n, seed):
    """A permutation of 0..n that needs no random module."""
    return sorted(range(n), key=lambda i: hashlib.sha256(f"{seed}/{i}".encode()).digest())


def layout_case(name, g, spec, tokens, layers=None, heads=None, seed=11):
    layers = layers or g["layers"]
    heads = heads if heads is not None else list(range(g["kv_heads"]))
    bt = spec["block_tokens"]
    need = -(-tokens[1] // bt) - tokens[0] // bt
    table = permutation(spec["blocks"], name)[:need]
    rows, end = rows_of(g, spec, layers, heads, table, tokens)
    region = bytearray(end)
    for (layer, head, c, token), offset in rows.items():
        row = content(seed, layer, head, c, token, row_bytes(g, c))
        region[offset:offset + len(row)] = row
    where, _ = lay_out(g, spec, layers, heads)
    taken = {}
    for (layer, head, c, block, slot), offset in where.items():
        for i in range(row_bytes(g, c)):
            assert offset + i not in taken
            taken[offset + i] = block
    extents = []
    for block in range(spec["blocks"]):
        mine = sorted(at for at, b in taken.items() if b == block)
        runs = []
        for at in mine:
            if runs and runs[-1][0] + runs[-1][1] == at:
                runs[-1][1] += 1
            else:
                runs.append([at, 1])
        extents.append(runs)
    return dict(name=name, geometry=g, spec=spec, layers=layers, heads=heads, tokens=list(tokens),
                table=table, seed=seed, region_len=end,
                region_sha256=hashlib.sha256(region).hexdigest(),
                extents_sha256=hashlib.sha256(json.dumps(extents, separators=(",", ":")).encode())
                .hexdigest())


def spec(axes, block_tokens, blocks, base=0, block_pad=0, scale_axes=None):
    out = dict(axes=axes.split(), block_tokens=block_tokens, blocks=blocks, base=base,
               block_pad=block_pad)
    if scale_axes:
        out["scale_axes"] = scale_axes.split()
    return out


ORDERS = {
    "nhd-planes": "Layer Kv Block Slot Head",
    "hnd-planes": "Layer Kv Block Head Slot",
    "nhd-in-block": "Layer Block Kv Slot Head",
    "hnd-block-major": "Block Layer Kv Head Slot",
    "LBNHC": "Layer Block Slot Head Kv",
    "LBHNC": "Layer Block Head Slot Kv",
    "BLNHC": "Block Layer Slot Head Kv",
    "BLHNC": "Block Layer Head Slot Kv",
    "LHBNC": "Layer Head Block Slot Kv",
    "HLBNC": "Head Layer Block Slot Kv",
}


def layout_cases():
    gqa = geometry(0, [0, 3], 2, 16, 16)
    scaled = geometry(0, [1, 2], 2, 8, 12, 3, 1, dtype="fp8_e4m3")
    out = [layout_case(name, gqa, spec(axes, 4, 5), (0, 18)) for name, axes in ORDERS.items()]
    out += [
        layout_case("padded", gqa, spec(ORDERS["nhd-planes"], 4, 6, 64, 24), (3, 22)),
        layout_case("block-of-one", gqa, spec(ORDERS["LBHNC"], 1, 20), (5, 19)),
        layout_case("scales-in-line", scaled, spec(ORDERS["BLNHC"], 3, 7), (0, 20)),
        layout_case("scales-apart", scaled,
                    spec(ORDERS["LBHNC"], 3, 7, 8, 5, "Block Layer Slot Kv Head"), (0, 20)),
        layout_case("one-rank", geometry(0, [0, 1, 2], 4, 16, 16), spec(ORDERS["hnd-planes"], 8, 4),
                    (0, 30), layers=[1, 2], heads=[2, 3]),
        layout_case("mla", geometry(0, [0, 1], 1, 656, 0, kind="mla", dtype="fp8_e4m3"),
                    spec(ORDERS["LBNHC"], 4, 3), (0, 9)),
    ]
    return out


# ---- plans ---------------------------------------------------------------------------------


def plan_case(name, g, src, dst, have, tokens):
    """`src`, `dst`: (spec, layers, heads)."""
    sides = []
    for which, (s, layers, heads) in (("src", src), ("dst", dst)):
        bt = s["block_tokens"]
        table = permutation(s["blocks"], name + which)[: -(-have[1] // bt) - have[0] // bt]
        rows, _ = rows_of(g, s, layers, heads, table, have)
        sides.append((dict(spec=s, layers=layers, heads=heads, table=table), rows))
    (a, rows_a), (b, rows_b) = sides
    moves = []
    for key, offset in rows_a.items():
        if key in rows_b and tokens[0] <= key[3] < tokens[1]:
            moves += [(offset + i, rows_b[key] + i) for i in range(row_bytes(g, key[2]))]
    runs = []
    for at, to in sorted(moves):
        if runs and runs[-1][0] + runs[-1][2] == at and runs[-1][1] + runs[-1][2] == to:
            runs[-1][2] += 1
        else:
            runs.append([at, to, 1])
    return dict(name=name, geometry=g, src=a, dst=b, have=list(have), tokens=list(tokens), runs=runs)


def plan_cases():
    small = geometry(0, [0, 1], 4, 4, 4, dtype="f16")
    # One element per token, head and dimension: the page of a published fault, other TP and order.
    page = geometry(0, [0], 4, 256, 256)
    scaled = geometry(0, [0], 2, 8, 8, 2, 2, dtype="fp8_e4m3")
    every = [0, 1, 2, 3]
    nhd, hnd = ORDERS["nhd-planes"], ORDERS["hnd-planes"]
    return [
        plan_case("same-layout", small, (spec(nhd, 4, 6), [0, 1], every),
                  (spec(nhd, 4, 6), [0, 1], every), (0, 21), (0, 21)),
        plan_case("nhd-to-hnd", small, (spec(nhd, 4, 6), [0, 1], every),
                  (spec(hnd, 4, 6), [0, 1], every), (0, 10), (0, 10)),
        plan_case("blocks-16-to-64", small, (spec(nhd, 16, 5), [0, 1], every),
                  (spec(ORDERS["BLHNC"], 64, 2), [0, 1], every), (0, 70), (3, 69)),
        plan_case("partial-range", small, (spec(ORDERS["LBNHC"], 8, 9), [0, 1], every),
                  (spec(ORDERS["LBNHC"], 8, 8), [0, 1], every), (0, 63), (20, 63)),
        plan_case("pipeline-part", small, (spec(nhd, 4, 6), [0, 1], every),
                  (spec(nhd, 4, 9), [1], every), (0, 21), (0, 21)),
        plan_case("page-16-4-128-tp2-to-1", page, (spec(nhd, 16, 2), [0], [2, 3]),
                  (spec(hnd, 16, 3), [0], every), (0, 16), (0, 16)),
        plan_case("page-16-4-128-tp1-to-2", page, (spec(hnd, 16, 2), [0], every),
                  (spec(nhd, 16, 3), [0], [0, 1]), (0, 16), (0, 16)),
        plan_case("scales-apart", scaled,
                  (spec(nhd, 4, 4, 0, 0, "Layer Block Slot Head Kv"), [0], [0, 1]),
                  (spec(ORDERS["LBNHC"], 4, 4), [0], [0, 1]), (0, 14), (0, 14)),
    ]


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "tests/golden")
    out.mkdir(parents=True, exist_ok=True)
    for name, cases in (("digests", digest_cases()), ("layouts", layout_cases()),
                        ("plans", plan_cases())):
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        (out / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
