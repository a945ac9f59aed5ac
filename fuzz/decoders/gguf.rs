//! The directory of a GGUF file.

use super::{Target, seed, shorter};
use moonlivekv::engine::reference::{Gguf, GgufError};

pub const TARGET: Target = Target {
    name: "gguf",
    run,
    outcomes: &[
        "accept",
        "alignment",
        "array-type",
        "bool",
        "dims",
        "duplicate",
        "magic",
        "name",
        "tensor-place",
        "tensor-type",
        "too-large",
        "truncated",
        "value-type",
        "version",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match Gguf::parse(data) {
        Ok(gguf) => {
            // Every tensor lies in the file.
            let bytes: usize = gguf.tensors.values().map(|t| gguf.data(t).len()).sum();
            assert!(gguf.tensors.is_empty() || bytes > 0);
            "accept"
        }
        Err(e) => match e {
            GgufError::Magic => "magic",
            GgufError::Version(_) => "version",
            GgufError::Truncated { .. } => "truncated",
            GgufError::TooLarge { .. } => "too-large",
            GgufError::ValueType(_) => "value-type",
            GgufError::ArrayType(_) => "array-type",
            GgufError::Bool(_) => "bool",
            GgufError::Duplicate(_) => "duplicate",
            GgufError::Name(_) => "name",
            GgufError::Alignment(_) => "alignment",
            GgufError::TensorType { .. } => "tensor-type",
            GgufError::Dims { .. } => "dims",
            GgufError::TensorPlace { .. } => "tensor-place",
            // Of the loader, which asks for a model's own entries.
            other @ (GgufError::Missing(_)
            | GgufError::Value { .. }
            | GgufError::Shape { .. }
            | GgufError::Unsupported(_)
            | GgufError::Tokenizer(_)) => panic!("not an error of this decoder: {other:?}"),
        },
    }
}

fn text(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

/// Metadata: key, type, value. Tensors: name, dimensions, type, offset.
fn file(
    meta: &[(&[u8], u32, Vec<u8>)],
    tensors: &[(&str, &[u64], u32, u64)],
    data: usize,
) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((meta.len() as u64).to_le_bytes());
    for (key, tag, value) in meta {
        out.extend(text(key));
        out.extend(tag.to_le_bytes());
        out.extend(value);
    }
    for (name, dims, tag, offset) in tensors {
        out.extend(text(name.as_bytes()));
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(tag.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32) + data, 0);
    out
}

fn seeds() -> Vec<super::Seed> {
    let name = |n: &str| (b"general.name" as &[u8], 8, text(n.as_bytes()));
    let list = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &text(b"tok")].concat();
    let alignment = |a: u32| (b"general.alignment" as &[u8], 4, a.to_le_bytes().to_vec());
    let good = file(
        &[
            name("toy"),
            (b"tokens", 9, list.clone()),
            (b"flag", 7, vec![1]),
        ],
        &[("a", &[32, 2], 8, 0), ("b", &[4], 0, 96)],
        128,
    );
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &list].concat();
    let mut many = good.clone();
    many[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    vec![
        seed("accept", good.clone()),
        seed("accept.no-tensors", file(&[name("x")], &[], 0)),
        seed("magic", b"GGML\x03\0\0\0".to_vec()),
        seed("version", b"GGUF\x63\0\0\0".to_vec()),
        seed("truncated", good[..40].to_vec()),
        seed("truncated.nothing", []),
        seed("too-large.entries", many),
        seed("value-type", file(&[(b"k", 99, vec![])], &[], 0)),
        seed("array-type", file(&[(b"k", 9, nested)], &[], 0)),
        seed("bool", file(&[(b"k", 7, vec![2])], &[], 0)),
        seed("duplicate.key", file(&[name("x"), name("y")], &[], 0)),
        seed(
            "duplicate.tensor",
            file(&[], &[("a", &[4], 0, 0), ("a", &[4], 0, 0)], 64),
        ),
        seed("name", file(&[(b"\xff\xfe", 7, vec![1])], &[], 0)),
        seed("alignment", file(&[alignment(3)], &[], 0)),
        seed("tensor-type", file(&[], &[("a", &[4], 77, 0)], 64)),
        seed("dims.zero", file(&[], &[("a", &[0], 0, 0)], 64)),
        seed("dims.block", file(&[], &[("a", &[31], 8, 0)], 64)),
        seed(
            "tensor-place.past-end",
            file(&[], &[("a", &[1 << 40], 0, 0)], 64),
        ),
        seed(
            "tensor-place.misaligned",
            file(&[], &[("a", &[4], 0, 1)], 64),
        ),
        seed(
            "tensor-place.cut",
            shorter(&file(&[], &[("a", &[16], 0, 0)], 64)),
        ),
    ]
}
