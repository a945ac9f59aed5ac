"""BLAKE3 in plain Python, written from its public specification: hash, keyed hash, derive key.

Slow and obvious on purpose. Running this file, or importing it, checks published test vectors.
"""

import struct

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
KEYED_HASH, DERIVE_KEY_CONTEXT, DERIVE_KEY_MATERIAL = 16, 32, 64
MASK = 0xFFFFFFFF


def _compress(cv, words, counter, length, flags):
    s = list(cv) + list(IV[:4]) + [counter & MASK, counter >> 32, length, flags]

    def g(a, b, c, d, x, y):
        s[a] = (s[a] + s[b] + x) & MASK
        t = s[d] ^ s[a]
        s[d] = (t >> 16 | t << 16) & MASK
        s[c] = (s[c] + s[d]) & MASK
        t = s[b] ^ s[c]
        s[b] = (t >> 12 | t << 20) & MASK
        s[a] = (s[a] + s[b] + y) & MASK
        t = s[d] ^ s[a]
        s[d] = (t >> 8 | t << 24) & MASK
        s[c] = (s[c] + s[d]) & MASK
        t = s[b] ^ s[c]
        s[b] = (t >> 7 | t << 25) & MASK

    m = list(words)
    for round_ in range(7):
        g(0, 4, 8, 12, m[0], m[1])
        g(1, 5, 9, 13, m[2], m[3])
        g(2, 6, 10, 14, m[4], m[5])
        g(3, 7, 11, 15, m[6], m[7])
        g(0, 5, 10, 15, m[8], m[9])
        g(1, 6, 11, 12, m[10], m[11])
        g(2, 7, 8, 13, m[12], m[13])
        g(3, 4, 9, 14, m[14], m[15])
        m = [m[i] for i in PERMUTATION]
    return [s[i] ^ s[i + 8] for i in range(8)]


def _chunk(key, data, counter, flags, root):
    cv = key
    blocks = [data[i : i + 64] for i in range(0, len(data), 64)] or [b""]
    for i, block in enumerate(blocks):
        f = flags
        if i == 0:
            f |= CHUNK_START
        if i == len(blocks) - 1:
            f |= CHUNK_END | (ROOT if root else 0)
        words = struct.unpack("<16I", block.ljust(64, b"\0"))
        cv = _compress(cv, words, counter, len(block), f)
    return cv


def _tree(key, data, counter, flags, root):
    if len(data) <= 1024:
        return _chunk(key, data, counter, flags, root)
    # The left subtree takes the largest power of two of whole chunks that leaves at least a byte.
    left = 1024
    while left * 2 < len(data):
        left *= 2
    a = _tree(key, data[:left], counter, flags, False)
    b = _tree(key, data[left:], counter + left // 1024, flags, False)
    return _compress(key, a + b, 0, 64, flags | PARENT | (ROOT if root else 0))


def _run(key, data, flags):
    return struct.pack("<8I", *_tree(list(key), bytes(data), 0, flags, True))


def blake3(data):
    return _run(IV, data, 0)


def keyed_hash(key, data):
    return _run(struct.unpack("<8I", key), data, KEYED_HASH)


def derive_key(context, material):
    key = _run(IV, context.encode(), DERIVE_KEY_CONTEXT)
    return _run(struct.unpack("<8I", key), material, DERIVE_KEY_MATERIAL)


# From the official test_vectors.json (first 32 bytes of each output): length, hash, keyed, derived.
PUBLISHED = [
    (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
     "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26",
     "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"),
    (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
     "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b",
     "b3e2e340a117a499c6cf2398a19ee0d29cca2bb7404c73063382693bf66cb06c"),
    (1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
     "c951ecdf03288d0fcc96ee3413563d8a6d3589547f2c2fb36d9786470f1b9d6e",
     "74a16c1c3d44368a86e1ca6df64be6a2f64cce8f09220787450722d85725dea5"),
    (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
     "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
     "7356cd7720d5b66b6d0697eb3177d9f8d73a4a5c5e968896eb6a689684302706"),
    (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
     "357dc55de0c7e382c900fd6e320acc04146be01db6a8ce7210b7189bd664ea69",
     "effaa245f065fbf82ac186839a249707c3bddf6d3fdda22d1b95a3c970379bcb"),
    (3073, "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3",
     "68dede9bef00ba89e43f31a6825f4cf433389fedae75c04ee9f0cf16a427c95a",
     "72613c9ec9ff7e40f8f5c173784c532ad852e827dba2bf85b2ab4b76f7079081"),
    (5121, "628bd2cb2004694adaab7bbd778a25df25c47b9d4155a55f8fbd79f2fe154cff",
     "6ccf1c34753e7a044db80798ecd0782a8f76f33563accaddbfbb2e0ea4b2d024",
     "b07f01e518e702f7ccb44a267e9e112d403a7b3f4883a47ffbed4b48339b3c34"),
    (7169, "a003fc7a51754a9b3c7fae0367ab3d782dccf28855a03d435f8cfe74605e7817",
     "ed9b1a922c046fdb3d423ae34e143b05ca1bf28b710432857bf738bcedbfa511",
     "554b0a5efea9ef183f2f9b931b7497995d9eb26f5c5c6dad2b97d62fc5ac31d9"),
]


def check_published():
    for length, plain, keyed, derived in PUBLISHED:
        data = bytes(i % 251 for i in range(length))
        assert blake3(data).hex() == plain, length
        assert keyed_hash(b"whats the Elvish word for friend", data).hex() == keyed, length
        context = "BLAKE3 2019-12-27 16:29:52 test vectors context"
        assert derive_key(context, data).hex() == derived, length


check_published()
