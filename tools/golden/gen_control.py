#!/usr/bin/env python3
"""Golden vectors of ControlStateV1, written from the format's description alone.

Shares no code with the Rust codec: it knows struct, hashlib and the list of fields. Prints
tests/golden/control_state.json to the path given, or to standard output:

    python3 tools/golden/gen_control.py tests/golden/control_state.json
"""

import hashlib
import json
import struct
import sys

from alphabet import data, f32_bits, hexed, i32, i64, opt, rec, u8, u16, u32, u64, vec

ids = vec(u32)  # sets are given sorted
h16, h32 = hexed(16), hexed(32)
log = rec(("count", u64), ("hash", h32))

# ---- the fields, 1 to 23 -----------------------------------------------------------------------

FIELDS = [
    ("identity", rec(("request_id", h16), ("state_seq", u64))),
    ("engine", rec(("engine_kind", u16), ("engine_build", h32))),
    ("model", rec(("model", h32), ("weights_version", u64), ("tokenizer", h32))),
    ("numerics_profile", h32),
    ("lora", opt(rec(("name", data), ("digest", h32), ("scale", f32_bits)))),
    ("tokens", rec(("prompt", log), ("output", log), ("pending_token", u32))),
    ("position", rec(("kv_len", u64), ("next_pos", i64))),
    (
        "limits",
        rec(
            ("max_output", u32),
            ("min_output", u32),
            ("max_context", u32),
            ("ignore_eos", u8),
            ("eos_ids", ids),
            ("stop_ids", ids),
        ),
    ),
    (
        "sampler",
        rec(
            ("temperature", f32_bits),
            ("top_k", u32),
            ("top_p", f32_bits),
            ("min_p", f32_bits),
            ("typical_p", f32_bits),
            ("sampler_order", vec(u16)),
        ),
    ),
    (
        "penalties",
        rec(
            ("repetition", f32_bits),
            ("frequency", f32_bits),
            ("presence", f32_bits),
            ("penalty_window", i32),
            ("penalty_semantics", u16),
        ),
    ),
    ("rng", rec(("rng_kind", u16), ("seed", u64), ("draws", u64), ("rng_state", data))),
    (
        "constraints",
        rec(
            ("logit_bias", vec(lambda kv: u32(kv[0]) + f32_bits(kv[1]))),
            ("allowed", opt(ids)),
            ("bad_words", vec(ids)),
        ),
    ),
    (
        "grammar",
        opt(
            rec(
                ("kind", u16),
                ("backend", data),
                ("backend_version", data),
                ("source", data),
                ("start_index", u32),
                ("accepted", u32),
                ("terminated", u8),
                ("next_mask_digest", h32),
            )
        ),
    ),
    (
        "parsers",
        rec(
            (
                "reasoning",
                opt(
                    rec(
                        ("parser", data),
                        ("ended", u8),
                        ("end_index", opt(u32)),
                        ("budget", opt(u32)),
                    )
                ),
            ),
            (
                "tool_parser",
                opt(rec(("name", data), ("emitted_bytes", u64), ("state", data))),
            ),
        ),
    ),
    (
        "stops",
        rec(
            ("stop_strings", vec(data)),
            ("include_stop", u8),
            ("skip_special", u8),
            ("spaces_between", u8),
        ),
    ),
    (
        "detokenizer",
        rec(
            ("detok_kind", u16),
            ("prefix_offset", u32),
            ("read_offset", u32),
            ("last_special", u8),
            ("held_text", data),
            ("pending_utf8", data),
        ),
    ),
    (
        "stream",
        rec(
            ("sent_bytes", u64),
            ("sent_tokens", u64),
            ("stream_seq", u64),
            ("output_kind", u8),
            ("stream_interval", u32),
        ),
    ),
    (
        "logprobs",
        opt(rec(("top", i32), ("ids", ids), ("cumulative_bits", u64), ("unsent", data))),
    ),
    (
        "usage",
        rec(
            ("usage_prompt", u32),
            ("usage_completion", u32),
            ("usage_cached", u32),
            ("include_usage", u8),
        ),
    ),
    (
        "scheduling",
        rec(("priority", i32), ("remaining_ns", opt(u64)), ("cache_salt", opt(data))),
    ),
    (
        "kv_groups",
        vec(
            rec(
                ("group", u16),
                ("kind", u16),
                ("tokens_per_page", u32),
                ("first_live_pos", u64),
                ("committed", u64),
                ("set_digest", h32),
            )
        ),
    ),
    (
        "mutable_state",
        vec(rec(("group", u16), ("at_pos", u64), ("digest", h32), ("len", u64))),
    ),
    (
        "extensions",
        vec(rec(("namespace", data), ("version", u16), ("critical", u8), ("payload", data))),
    ),
]

HEADER = b"MLC1" + u16(1) + u16(0)


def field(body):
    return u32(len(body)) + body


def fields_of(state):
    return [HEADER] + [put(state[name]) for name, put in FIELDS]


def encode(state):
    return b"".join(field(body) for body in fields_of(state))


def token_log(tokens):
    h = hashlib.sha256(b"moonlivekv token log v1\0")
    for t in tokens:
        h.update(u32(t))
    return {"count": len(tokens), "hash": h.hexdigest()}


def mask_digest(vocab, allowed):
    bits = bytearray((vocab + 7) // 8)
    for t in allowed:
        bits[t // 8] |= 1 << (t % 8)
    return hashlib.sha256(b"moonlivekv grammar mask v1\0" + u32(vocab) + bits).hexdigest()


# ---- the states --------------------------------------------------------------------------------


def h(label, n=32):
    return hashlib.sha256(label.encode()).digest()[:n].hex()


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def text(s):
    return s.encode().hex()


def minimal():
    prompt, output = [1], [2]
    return {
        "identity": {"request_id": "00" * 16, "state_seq": 0},
        "engine": {"engine_kind": 0, "engine_build": "00" * 32},
        "model": {"model": "00" * 32, "weights_version": 0, "tokenizer": "00" * 32},
        "numerics_profile": "00" * 32,
        "lora": None,
        "tokens": {
            "prompt": token_log(prompt),
            "output": token_log(output),
            "pending_token": output[-1],
        },
        "position": {"kv_len": 1, "next_pos": 1},
        "limits": {
            "max_output": 16,
            "min_output": 0,
            "max_context": 2048,
            "ignore_eos": 0,
            "eos_ids": [],
            "stop_ids": [],
        },
        "sampler": {
            "temperature": bits(0.0),
            "top_k": 0,
            "top_p": bits(1.0),
            "min_p": bits(0.0),
            "typical_p": bits(1.0),
            "sampler_order": [],
        },
        "penalties": {
            "repetition": bits(1.0),
            "frequency": bits(0.0),
            "presence": bits(0.0),
            "penalty_window": -1,
            "penalty_semantics": 0,
        },
        "rng": {"rng_kind": 0, "seed": 0, "draws": 0, "rng_state": ""},
        "constraints": {"logit_bias": [], "allowed": None, "bad_words": []},
        "grammar": None,
        "parsers": {"reasoning": None, "tool_parser": None},
        "stops": {"stop_strings": [], "include_stop": 0, "skip_special": 1, "spaces_between": 1},
        "detokenizer": {
            "detok_kind": 0,
            "prefix_offset": 0,
            "read_offset": 0,
            "last_special": 0,
            "held_text": "",
            "pending_utf8": "",
        },
        "stream": {
            "sent_bytes": 0,
            "sent_tokens": 0,
            "stream_seq": 0,
            "output_kind": 1,
            "stream_interval": 1,
        },
        "logprobs": None,
        "usage": {
            "usage_prompt": 1,
            "usage_completion": 1,
            "usage_cached": 0,
            "include_usage": 0,
        },
        "scheduling": {"priority": 0, "remaining_ns": None, "cache_salt": None},
        "kv_groups": [],
        "mutable_state": [],
        "extensions": [],
    }


def everything():
    prompt = [(i * 7919 + 13) % 151936 for i in range(263)]
    output = [(i * 104729 + 7) % 151936 for i in range(41)]
    s = minimal()
    s["identity"] = {"request_id": h("request", 16), "state_seq": 2**64 - 1}
    s["engine"] = {"engine_kind": 7, "engine_build": h("build")}
    s["model"] = {"model": h("model"), "weights_version": 3, "tokenizer": h("tokenizer")}
    s["numerics_profile"] = h("profile")
    s["lora"] = {"name": text("polite-v2"), "digest": h("lora"), "scale": bits(-0.5)}
    s["tokens"] = {
        "prompt": token_log(prompt),
        "output": token_log(output),
        "pending_token": output[-1],
    }
    s["position"] = {"kv_len": 303, "next_pos": -303}
    s["limits"] = {
        "max_output": 4096,
        "min_output": 2,
        "max_context": 131072,
        "ignore_eos": 1,
        "eos_ids": [151643, 151645],
        "stop_ids": [0, 1, 0xFFFFFFFF],
    }
    s["sampler"] = {
        "temperature": bits(0.7),
        "top_k": 40,
        "top_p": bits(0.95),
        "min_p": bits(0.05),
        "typical_p": bits(0.9),
        "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    }
    s["penalties"] = {
        "repetition": bits(1.1),
        "frequency": bits(0.2),
        "presence": bits(-0.3),
        "penalty_window": 64,
        "penalty_semantics": 2,
    }
    s["rng"] = {"rng_kind": 5, "seed": 2**63, "draws": 41, "rng_state": (h("mt") * 8)}
    s["constraints"] = {
        "logit_bias": [[3, bits(-100.0)], [5, 0x80000000], [50256, 0xFF800000]],
        "allowed": [2, 3, 5, 7],
        "bad_words": [[11], [], [13, 17, 13]],
    }
    s["grammar"] = {
        "kind": 1,
        "backend": text("xgrammar"),
        "backend_version": text("0.1.25"),
        "source": text('{"type":"object"}'),
        "start_index": 3,
        "accepted": 38,
        "terminated": 0,
        "next_mask_digest": mask_digest(151936, [90, 92]),
    }
    s["parsers"] = {
        "reasoning": {"parser": text("deepseek_r1"), "ended": 1, "end_index": 17, "budget": None},
        "tool_parser": {"name": text("hermes"), "emitted_bytes": 12, "state": "00ff"},
    }
    s["stops"] = {
        "stop_strings": [text("\n\n"), text("</s>"), text("Ende\u00df"), ""],
        "include_stop": 1,
        "skip_special": 0,
        "spaces_between": 0,
    }
    s["detokenizer"] = {
        "detok_kind": 2,
        "prefix_offset": 36,
        "read_offset": 40,
        "last_special": 1,
        "held_text": text("</"),
        "pending_utf8": "f09f98",
    }
    s["stream"] = {
        "sent_bytes": 171,
        "sent_tokens": 40,
        "stream_seq": 39,
        "output_kind": 2,
        "stream_interval": 4,
    }
    s["logprobs"] = {
        "top": -1,
        "ids": [4, 8],
        "cumulative_bits": struct.unpack("<Q", struct.pack("<d", -17.25))[0],
        "unsent": "0102",
    }
    s["usage"] = {
        "usage_prompt": 263,
        "usage_completion": 41,
        "usage_cached": 256,
        "include_usage": 1,
    }
    s["scheduling"] = {
        "priority": -5,
        "remaining_ns": 30_000_000_000,
        "cache_salt": text("tenant-a"),
    }
    s["kv_groups"] = [
        {
            "group": 0,
            "kind": 0,
            "tokens_per_page": 16,
            "first_live_pos": 0,
            "committed": 303,
            "set_digest": h("set 0"),
        },
        {
            "group": 3,
            "kind": 2,
            "tokens_per_page": 64,
            "first_live_pos": 128,
            "committed": 303,
            "set_digest": h("set 3"),
        },
    ]
    s["mutable_state"] = [
        {"group": 9, "at_pos": 303, "digest": h("ssm"), "len": 1 << 20},
        {"group": 10, "at_pos": 303, "digest": h("conv"), "len": 0},
    ]
    s["extensions"] = [
        {"namespace": text("a.example"), "version": 1, "critical": 0, "payload": "de00ad"},
        {"namespace": text("a.example"), "version": 2, "critical": 0, "payload": ""},
        {"namespace": text("b"), "version": 0, "critical": 0, "payload": "ff" * 33},
    ]
    return s


def sampled():
    s = minimal()
    prompt, output = list(range(100, 140)), list(range(7, 24))
    s["identity"] = {"request_id": h("another", 16), "state_seq": 1}
    s["tokens"] = {
        "prompt": token_log(prompt),
        "output": token_log(output),
        "pending_token": output[-1],
    }
    s["position"] = {"kv_len": 56, "next_pos": 56}
    s["sampler"]["temperature"] = bits(1.0)
    s["sampler"]["min_p"] = 0x80000000
    s["rng"] = {"rng_kind": 1, "seed": 42, "draws": 17, "rng_state": ""}
    s["constraints"]["allowed"] = []
    return s


# ---- what must be refused, by the error's name --------------------------------------------------


def rejects():
    base = everything()
    parts = fields_of(base)
    good = encode(base)

    def join(replaced):
        return b"".join(field(replaced.get(i, body)) for i, body in enumerate(parts))

    def alter(name, change):
        s = everything()
        change(s)
        return name, encode(s)

    def patched(i, at, raw):
        body = bytearray(parts[i])
        body[at : at + len(raw)] = raw
        return join({i: bytes(body)})

    yield "BadMagic", "magic", patched(0, 0, b"MLC2")
    yield "UnknownVersion", "version 2", patched(0, 4, u16(2))
    yield "ReservedFlags", "flags 1", patched(0, 6, u16(1))
    yield "Truncated", "nothing", b""
    yield "Truncated", "one byte short", good[:-1]
    yield "Truncated", "last field missing", good[: -len(field(parts[23]))]
    yield "Trailing", "one byte more", good + b"\0"
    yield "FieldTrailing", "field 7 one byte longer", join({7: parts[7] + b"\0"})
    yield "Truncated", "field 7 one byte shorter", join({7: parts[7][:-1]})
    yield "BadEnum", "rng kind 6", patched(11, 0, u16(6))
    yield "BadEnum", "penalty semantics 3", patched(10, 16, u16(3))
    yield "BadEnum", "output kind 3", patched(17, 24, u8(3))
    yield "BadEnum", "bool 2", patched(8, 12, u8(2))
    yield "BadEnum", "opt tag 2", patched(5, 0, u8(2))
    yield "Nan", "temperature NaN", patched(9, 0, u32(0x7FC00000))
    yield "NegativeZero", "temperature -0", patched(9, 0, u32(0x80000000))
    # Equal and falling keys of every set and map.
    yield ("NotAscending", *alter("eos ids equal", lambda s: s["limits"].update(eos_ids=[5, 5])))
    yield ("NotAscending", *alter("stop ids fall", lambda s: s["limits"].update(stop_ids=[6, 5])))
    yield (
        "NotAscending",
        *alter("bias equal", lambda s: s["constraints"].update(logit_bias=[[1, 0], [1, 0]])),
    )
    yield ("NotAscending", *alter("allowed fall", lambda s: s["constraints"].update(allowed=[2, 1])))
    yield ("NotAscending", *alter("logprob ids", lambda s: s["logprobs"].update(ids=[2, 2])))
    yield ("NotAscending", *alter("groups fall", lambda s: s["kv_groups"].reverse()))
    yield ("NotAscending", *alter("blobs fall", lambda s: s["mutable_state"].reverse()))
    yield ("NotAscending", *alter("extensions fall", lambda s: s["extensions"].reverse()))
    yield "TooLong", "name of 257 bytes", join({5: b"\1" + u32(257) + b"n" * 257 + parts[5][14:]})
    yield "TooLong", "pending utf-8 of 4 bytes", join({16: parts[16][:-7] + u32(4) + b"\xf0\x9f\x98\x80"})
    yield "TooLong", "2^32 - 1 stop strings", join({15: u32(0xFFFFFFFF) + parts[15][4:]})
    yield "TooLong", "blob of 1 MiB + 1", patched(11, 18, u32((1 << 20) + 1))
    yield (
        "UnknownCritical",
        *alter("critical extension", lambda s: s["extensions"][2].update(critical=1)),
    )
    yield (
        "Inconsistent",
        *alter("kv_len off by one", lambda s: s["position"].update(kv_len=304)),
    )
    yield (
        "Inconsistent",
        *alter("no output", lambda s: s["tokens"].update(output=token_log([]))),
    )
    yield (
        "Inconsistent",
        *alter(
            "counts overflow",
            lambda s: (
                s["tokens"]["prompt"].update(count=2**64 - 1),
                s["position"].update(kv_len=39),
            ),
        ),
    )


def main():
    accepts = []
    for name, state, epoch in [
        ("minimal", minimal(), 0),
        ("sampled", sampled(), 1),
        ("everything", everything(), 2**64 - 1),
    ]:
        raw = encode(state)
        accepts.append(
            {
                "name": name,
                "state": state,
                "encoding": raw.hex(),
                "digest": {
                    "hash": hashlib.sha256(raw).digest()[:16].hex(),
                    "offset": state["tokens"]["output"]["count"],
                    "owner_epoch": epoch,
                },
            }
        )
    logs = [[], [0], [2**32 - 1], list(range(100))]
    masks = [(0, []), (1, [0]), (513, [0, 7, 8, 511, 512]), (151936, [90, 92])]
    out = {
        "about": "written by tools/golden/gen_control.py; do not edit",
        "accept": accepts,
        "reject": [
            {"error": error, "name": name, "encoding": raw.hex()} for error, name, raw in rejects()
        ],
        "token_logs": [{"tokens": t, **token_log(t)} for t in logs],
        "masks": [
            {"vocab": v, "allowed": a, "digest": mask_digest(v, a)} for v, a in masks
        ],
    }
    json_text = json.dumps(out, indent=1, sort_keys=True) + "\n"
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="ascii") as f:
            f.write(json_text)
    else:
        sys.stdout.write(json_text)


if __name__ == "__main__":
    main()
