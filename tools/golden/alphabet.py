"""How single values are written: little-endian numbers, counted lists, options, records."""

import struct


def u8(v):
    return struct.pack("<B", v)


def u16(v):
    return struct.pack("<H", v)


def u32(v):
    return struct.pack("<I", v)


def u64(v):
    return struct.pack("<Q", v)


def i32(v):
    return struct.pack("<i", v)


def i64(v):
    return struct.pack("<q", v)


def hexed(n):
    def put(v):
        raw = bytes.fromhex(v)
        assert len(raw) == n
        return raw

    return put


def f32_bits(bits):
    """A float, given as its bits; -0 is written as +0."""
    return u32(0 if bits == 0x80000000 else bits)


def data(v):
    raw = bytes.fromhex(v)
    return u32(len(raw)) + raw


def vec(item):
    return lambda v: u32(len(v)) + b"".join(item(x) for x in v)


def opt(item):
    return lambda v: b"\0" if v is None else b"\1" + item(v)


def rec(*items):
    return lambda v: b"".join(put(v[name]) for name, put in items)
