//! Stand-ins with the names of the types that `page`, `digest` and `mem` bring; gone as soon as
//! those rooms have them.
#![allow(missing_docs)]

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectSetHeader;
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard;
#[derive(Debug)]
pub struct BlockLayout;
#[derive(Debug)]
pub struct BlockPool;
#[derive(Debug)]
pub struct WriteLease;
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafDigest(pub [u8; 32]);
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageDigest(pub [u8; 32]);
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetDigest(pub [u8; 32]);
