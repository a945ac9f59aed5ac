//! Leaf, page and set digests over canonical KV bytes.
